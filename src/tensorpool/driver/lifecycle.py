# SPDX-License-Identifier: Apache-2.0
"""What the driver decides: every request in, the answers and duties that follow from it out.

The only writer of leases and streams. Holds no clock and does no IO: each method takes `now_ns` and returns effects,
which the conductor performs in their order. Making memory takes long, so it is an effect (`CreateEpoch`) whose outcome
comes back as an event; what depends on it waits here, and everything else goes on.

    attach (producer)   CreateEpoch … Report while it takes long … epoch ready: Send(OK), Announce
    attach (consumer)   Send(OK)                                       (waits where the stream has no epoch yet)
    detach              Send(response), Send(revoked), then for a producer CreateEpoch … Announce
    expiry, revoke      Send(revoked), then for a producer CreateEpoch … Announce

Driver Model §4-§8, §10, §11, §13; decisions A19, C4, E1-E3, E8-E19, E22-E25, E30-E33, E38, E39, E43-E46, K9.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum, auto

import msgspec

from tensorpool.control.provisioning import ProvisionRequest
from tensorpool.driver import epoch_messages, limits
from tensorpool.driver.audit import Event, lease_event, refusal_event
from tensorpool.driver.authority import Authority
from tensorpool.driver.clients import Clients, Owner
from tensorpool.driver.config import DriverConfig
from tensorpool.driver.effects import Announce, CreateEpoch, DropStream, Effect, Exit, Report, Send
from tensorpool.driver.epoch_messages import Epoch
from tensorpool.driver.leases import Keepalive, Lease, LeaseTable
from tensorpool.driver.limits import LimitReached
from tensorpool.driver.message_sizes import limited
from tensorpool.driver.node_ids import NodeIds
from tensorpool.driver.private_streams import PrivateStreams
from tensorpool.driver.reload import InUse, Plan
from tensorpool.driver.streams import NoStream, Stream, StreamTable
from tensorpool.shm.layout import LAYOUT_VERSION
from tensorpool.wire.attach import AttachRequest, AttachResponse, Dialect, attach_refusal
from tensorpool.wire.control import ClockDomain, ConsumerConfig, ConsumerHello, ShmPoolAnnounce
from tensorpool.wire.driver import (
    ExtendedAttachRequest,
    LeaseRevokeReason,
    PublishMode,
    ResponseCode,
    Role,
    ShmDetachRequest,
    ShmDetachResponse,
    ShmDriverShutdown,
    ShmDriverShutdownRequest,
    ShmLeaseKeepalive,
    ShmLeaseRevoked,
    ShutdownReason,
)

NULL_U32 = 0xFFFF_FFFF
MAX_PENDING_ATTACHES = 1024
RETRY_CREATION_NS = 1_000_000_000
FIRST_REPORT_NS = 200_000_000  # an attach that takes longer is reported, and again at this interval:
REPORT_EVERY_NS = 1_000_000_000
NEVER_NS = 2**63
_NOTHING: list[Effect] = []


class Phase(Enum):
    """Of the driver as a whole."""

    SERVING = auto()
    DRAINING = auto()
    ENDED = auto()


class Pending(msgspec.Struct):
    """An attach that waits for memory, however long that takes (E2); `report_ns`: when that is to be reported."""

    request: AttachRequest
    stream: Stream
    since_ns: int
    report_ns: int


class Lifecycle:
    """The driver's decisions. `first_lease_id` must differ between runs (E6)."""

    def __init__(self, config: DriverConfig, *, first_lease_id: int, hugepages: bool = False, root: str = "") -> None:
        self.config = config
        self.authority = Authority(config.announce_period_ns, root)  # `root`: how the URIs of our regions begin
        self.leases = LeaseTable(config.lease_duration_ns, first_lease_id)
        self.streams = StreamTable(config)
        self.phase = Phase.SERVING
        self.counts: Counter[str] = Counter()
        self.clients = Clients()
        self.events: list[Event] = []  # for the audit log; the caller takes them
        self.stamp_offset_ns = 0  # from the clock of deadlines to the clock of stamps (C8)
        self.utc_offset_ns = 0  # … to the time of day
        self._hugepages = hugepages
        self._pending: list[Pending] = []
        self.private_streams = PrivateStreams(config, self.counts)
        # Another first id in each run: clients of the last one wish for theirs again.
        self.node_ids = NodeIds(config.driver.node_id_range, config.node_id_cooldown_ns, start=first_lease_id)
        self._next_announce_ns = 0
        self._next_report_ns = NEVER_NS
        self._exit_ns = 0
        self._exit_notice = ShutdownReason.NORMAL, ""

    # --- time

    def on_start(self, now_ns: int) -> list[Effect]:
        """Provision what the configuration names, so that it is announced and discovered (E13)."""
        self._next_announce_ns = now_ns
        return [effect for stream in self.streams for effect in self._create(stream, reserve=False)]

    def on_tick(self, now_ns: int) -> list[Effect]:
        """Everything that is due: expiry, announces, a creation to try again, the end of a drain."""
        if now_ns < min(self.leases.no_expiry_before_ns, self._next_announce_ns, self._next_report_ns):
            return _NOTHING
        effects: list[Effect] = self._report_pending(now_ns)
        for lease in self.leases.expire(now_ns):
            effects += self._ended(lease, LeaseRevokeReason.EXPIRED, "no keepalive within the grace", now_ns)
        if now_ns >= self._next_announce_ns:
            self._next_announce_ns = now_ns + self.config.announce_period_ns
            effects += self._drop_unused_streams(now_ns)
            for stream in self.streams:
                if stream.current is not None:
                    effects.append(Announce(stream.stream_id))
                elif not stream.is_creating and now_ns >= stream.retry_ns:
                    effects += self._create(stream, reserve=False)
            self.private_streams.forget_stale(now_ns)
        if self.phase is Phase.DRAINING:
            self._next_announce_ns = min(self._next_announce_ns, self._exit_ns)
        if self.phase is Phase.DRAINING and now_ns >= self._exit_ns:
            effects += [*self.end(now_ns), Exit()]
        return effects

    def end(self, now_ns: int) -> list[Effect]:
        """Notify the clients that this driver ends, once (§4.13)."""
        if self.phase is Phase.ENDED:
            return []
        self.phase = Phase.ENDED
        reason, text = self._exit_notice
        return [Send(ShmDriverShutdown(timestamp_ns=self._stamp(now_ns), reason=reason, error_message=text))]

    def on_stall(self, now_ns: int) -> None:
        """The driver could not run for a while: keepalives and hellos may have had no chance to arrive."""
        self.counts["stalls"] += 1
        self.leases.forgive(now_ns)
        self.private_streams.on_stall(now_ns)

    # --- requests

    def on_attach(self, request: AttachRequest, now_ns: int) -> list[Effect]:
        held = self.leases.of_client(request.client_id)
        if held is not None and _is_retry(held.request, request, held.stream_id):
            return self._answered_again(held)
        waiting = next((p for p in self._pending if p.request.client_id == request.client_id), None)
        if waiting is not None and _is_retry(waiting.request, request, waiting.stream.stream_id):
            return []  # it is being worked on
        try:
            stream = self._admit(request, held or waiting, now_ns)
        except (_Refusal, LimitReached) as refusal:
            return [Send(self._refused(request, refusal))]
        if isinstance(request, ExtendedAttachRequest):
            node_id = self.node_ids.take(request.client_id, request.desired_node_id, now_ns)
            self.counts["node_ids_exhausted"] += node_id is None
        if request.role is Role.CONSUMER and stream.current is not None:
            return [self._granted(request, stream, now_ns)]
        self._pending.append(Pending(request, stream, now_ns, now_ns + FIRST_REPORT_NS))
        self._next_report_ns = min(self._next_report_ns, now_ns + FIRST_REPORT_NS)
        return self._create(stream, reserve=request.role is Role.PRODUCER)

    def on_malformed_attach(
        self, correlation_id: int, code: ResponseCode, text: str, dialect: Dialect = Dialect.SPECIFIED
    ) -> list[Effect]:
        """A request that names its correlation id but cannot be understood (A19, E33, K9)."""
        self.counts["malformed_attaches"] += 1
        return [Send(attach_refusal(dialect, correlation_id, code, limited(text)))]

    def on_detach(self, request: ShmDetachRequest, now_ns: int) -> list[Effect]:
        lease = self.leases.detach(request)
        if lease is None:
            text = f"no active lease {request.lease_id} of client {request.client_id} on stream {request.stream_id}"
            return [Send(_detach_response(request.correlation_id, ResponseCode.REJECTED, text))]
        response = _detach_response(request.correlation_id, ResponseCode.OK, "")
        return [Send(response), *self._ended(lease, LeaseRevokeReason.DETACHED, "", now_ns)]

    def on_malformed_detach(self, correlation_id: int, code: ResponseCode, text: str) -> list[Effect]:
        self.counts["malformed_detaches"] += 1
        return [Send(_detach_response(correlation_id, code, text))]

    def on_keepalive(self, message: ShmLeaseKeepalive, now_ns: int) -> None:
        outcome = self.leases.keepalive(message, now_ns)
        if outcome is not Keepalive.EXTENDED:
            self.counts[f"keepalives_{outcome.name.lower()}"] += 1

    def on_consumer_hello(self, hello: ConsumerHello, now_ns: int) -> list[Effect]:
        """Answer a consumer that asks for ids of the per-consumer ranges (E22, E24)."""
        if self.streams.get(hello.stream_id) is None:
            return []
        is_leased = self._is_consumer((hello.stream_id, hello.consumer_id))
        answer = self.private_streams.on_hello(hello, is_leased, now_ns)
        return [] if answer is None else [Send(answer)]

    def on_consumer_config(self, config: ConsumerConfig) -> list[Effect]:
        """The producer's answer to a consumer, or another process's order (Wire §10.1.3)."""
        answer = self.private_streams.on_config(config)
        return [] if answer is None else [Send(answer)]

    def on_shutdown_request(self, request: ShmDriverShutdownRequest, now_ns: int) -> list[Effect]:
        """Drain if the token is right; say nothing at all otherwise (§4.13, E30)."""
        if not self.config.policies.shutdown_token.matches(request.token):
            self.counts["shutdown_requests_refused"] += 1
            return []
        return self.drain(request.reason, request.error_message, now_ns)

    def on_claim(self, stream_id: int, now_ns: int) -> list[Effect]:
        """Another driver answers for this stream: attaches that wait for its memory are refused (K6)."""
        self.counts["claims_of_other_drivers"] += 1
        claimed = self._claim_on(stream_id, now_ns)
        refused = [each for each in self._pending if claimed and each.stream.stream_id == stream_id]
        self._pending = [each for each in self._pending if each not in refused]
        return [self._refuse_pending(each, claimed, now_ns) for each in refused if claimed]

    def provision(self, asked: ProvisionRequest, now_ns: int) -> Stream:
        """Have a stream whose next producer gets a ring of that size; a new one waits for it, without memory.

        Raises NoStream.
        """
        if self.phase is not Phase.SERVING:
            raise NoStream("the driver is shutting down", invalid=False)
        if (claimed := self._claim_on(asked.stream_id, now_ns)) is not None:
            raise NoStream(str(claimed), invalid=False)
        stream = self.streams.provision(
            asked, lambda known: known.producer is not None or self._has_pending(known, Role.PRODUCER)
        )
        if stream.current is None and not stream.is_creating:
            stream.retry_ns = now_ns + self.config.dynamic_stream_linger_ns
        self.counts["rings_provisioned"] += 1
        return stream

    # --- processes

    def on_identify(self, session_id: int, owner: Owner) -> bool:
        """A client declares its process; False where another one was declared for its session."""
        is_noted = self.clients.declare(session_id, owner)
        self.counts["processes_identified" if is_noted else "identifications_ignored"] += 1
        for lease in self.leases:
            if lease.owner is None and self.clients.session_of(lease.client_id) == session_id:
                lease.owner = self.clients.owner_of(lease.client_id)
        return is_noted

    def producer_to_look_for(self, stream_id: int) -> Lease | None:
        """The lease that keeps another producer from a stream, if it is known which process holds it."""
        stream = self.streams.get(stream_id)
        lease = None if stream is None else stream.producer
        return None if lease is None or lease.process is None else lease

    def on_process_ended(self, lease: Lease, now_ns: int) -> list[Effect]:
        """The process that holds this lease runs no more: the lease ends before its time (E47)."""
        if lease.process is None or self.leases.get(lease.lease_id) is not lease:
            return []
        self.counts["leases_of_ended_processes"] += 1
        return self.revoke(lease.lease_id, f"its process {lease.process.pid} has ended", now_ns)

    # --- the operator

    def revoke(self, lease_id: int, text: str, now_ns: int) -> list[Effect]:
        """End a lease administratively."""
        lease = self.leases.revoke(lease_id)
        return self._ended(lease, LeaseRevokeReason.REVOKED, text, now_ns) if lease else []

    def drain(self, reason: ShutdownReason, text: str, now_ns: int) -> list[Effect]:
        """Refuse new attaches, announce a last time, and end after the shutdown timeout (E32)."""
        if self.phase is not Phase.SERVING:
            return []
        self.phase = Phase.DRAINING
        self._exit_notice = reason, limited(text)
        self._exit_ns = now_ns + self.config.shutdown_timeout_ns
        self._next_announce_ns = min(self._next_announce_ns, self._exit_ns)
        refusal = _Refusal(ResponseCode.REJECTED, "the driver is shutting down")
        effects: list[Effect] = [self._refuse_pending(pending, refusal, now_ns) for pending in self._pending]
        self._pending.clear()
        return effects + [Announce(stream.stream_id) for stream in self.streams if stream.current is not None]

    def in_use(self) -> InUse:
        """What a change of the configuration has to leave alone."""
        in_use: dict[int, list[str]] = {}
        for lease in self.leases:
            in_use.setdefault(lease.stream_id, []).append(str(lease))
        for pending in self._pending:
            role, client_id = pending.request.role.name.lower(), pending.request.client_id
            in_use.setdefault(pending.stream.stream_id, []).append(f"{role} client {client_id}, which is attaching")
        return InUse(
            holders=in_use,
            dynamic_ids=frozenset(stream.stream_id for stream in self.streams if stream.is_dynamic),
            descriptor_ids=self.private_streams.descriptor_ids.lent,
            control_ids=self.private_streams.control_ids.lent,
        )

    def reload(self, plan: Plan) -> list[Effect]:
        """Go on with another configuration: streams come, change and go as planned."""
        self.counts["reloads"] += 1
        self.config = self.streams.config = plan.config
        self.private_streams.descriptor_ids.replace(plan.config.driver.descriptor_stream_id_range)
        self.private_streams.control_ids.replace(plan.config.driver.control_stream_id_range)
        self.node_ids.configure(plan.config.driver.node_id_range, plan.config.node_id_cooldown_ns)
        effects: list[Effect] = []
        for stream_id in plan.retired:
            self.streams.forget(stream_id)
            effects.append(DropStream(stream_id))
        for name, entry in (*plan.added, *plan.changed):
            effects += self._renew(self.streams.configure(name, entry))
        return effects

    # --- memory

    def on_epoch_created(self, epoch: Epoch, reserved: bool, now_ns: int) -> list[Effect]:
        """The memory is there: it becomes the stream's epoch, and clients that waited for it are answered (E45)."""
        stream = self.streams.get(epoch.stream_id)
        if stream is None:  # it was retired meanwhile
            return [DropStream(epoch.stream_id)]
        stream.is_creating = False
        stream.was_ready = True
        stream.current = epoch
        effects: list[Effect] = []
        if reserved and (pending := self._take_pending(stream, Role.PRODUCER)) is not None:
            effects.append(self._granted(pending.request, stream, now_ns))
        effects.append(Announce(stream.stream_id))
        while (pending := self._take_pending(stream, Role.CONSUMER)) is not None:
            effects.append(self._granted(pending.request, stream, now_ns))
        owed = [lease for lease in self.leases if lease.is_owed_answer and lease.stream_id == stream.stream_id]
        effects += [self._answer(lease, epoch) for lease in owed]
        if stream.producer is None and self._has_pending(stream, Role.PRODUCER):
            effects += self._create(stream, reserve=True)
        elif not stream.is_provisioned:
            effects += self._renew(stream)
        return effects

    def on_epoch_failed(self, stream_id: int, reserved: bool, text: str, now_ns: int) -> list[Effect]:
        """The memory could not be made: clients that waited for it get the reason, and the stream stays as it was."""
        self.counts["epochs_failed"] += 1
        stream = self.streams.get(stream_id)
        if stream is None:
            return []
        stream.is_creating = False
        stream.retry_ns = now_ns + RETRY_CREATION_NS
        refusal = _Refusal(ResponseCode.INTERNAL_ERROR, text)
        roles = (Role.PRODUCER,) if reserved else (Role.CONSUMER,) if stream.current is None else ()
        effects: list[Effect] = []
        for role in roles:
            while (pending := self._take_pending(stream, role)) is not None:
                effects.append(self._refuse_pending(pending, refusal, now_ns))
        if not reserved and self._has_pending(stream, Role.PRODUCER):
            effects += self._create(stream, reserve=True)
        elif reserved and stream.current is None and self._has_pending(stream, Role.CONSUMER):
            effects += self._create(stream, reserve=False)
        elif stream.is_dynamic and not stream.was_ready:
            self.streams.forget(stream_id)  # it was never announced: its id is free again
        return effects

    def announce(self, stream_id: int, now_ns: int) -> ShmPoolAnnounce | None:
        """The announce of a stream as it is now; None while it has no epoch."""
        stream = self.streams.get(stream_id)
        if stream is None or stream.current is None:
            return None
        return epoch_messages.announce(
            stream.current,
            producer_id=stream.producer.client_id if stream.producer else 0,
            timestamp_ns=self._stamp(now_ns),
            clock_domain=ClockDomain[self.config.driver.announce_clock_domain],
        )

    # --- inside

    def _stamp(self, now_ns: int) -> int:
        return now_ns + self.stamp_offset_ns

    def _admit(self, request: AttachRequest, holder: Lease | Pending | None, now_ns: int) -> Stream:
        """The stream that the request may attach to; raises _Refusal or LimitReached with the code of §4.6."""
        if self.phase is not Phase.SERVING:
            raise _Refusal(ResponseCode.REJECTED, "the driver is shutting down")
        if request.client_id in (0, NULL_U32):
            raise _Refusal(ResponseCode.INVALID_PARAMS, f"clientId {request.client_id} is reserved")
        if request.stream_id == NULL_U32:
            raise _Refusal(ResponseCode.INVALID_PARAMS, f"streamId {request.stream_id} is reserved")
        if holder is not None:
            raise _Refusal(ResponseCode.REJECTED, _describe_holder(request.client_id, holder))
        user = self._user(request)
        pending = [self._user(each.request) for each in self._pending]
        limits.check_leases(self.config.policies, user, list(self.leases), pending)
        if len(self._pending) >= MAX_PENDING_ATTACHES:
            raise _Refusal(ResponseCode.REJECTED, f"{len(self._pending)} attaches wait for memory; try again later")
        if request.expected_layout_version not in (0, NULL_U32, LAYOUT_VERSION):
            raise _Refusal(
                ResponseCode.REJECTED,
                f"layout_version: expected {request.expected_layout_version}, this driver has {LAYOUT_VERSION}; "
                "update the older of the two",
            )
        limits.check_pages(request.require_hugepages, self._hugepages)
        if isinstance(request, ExtendedAttachRequest):
            taken = self.node_ids.flaw_in_wish(request.desired_node_id, now_ns)
            if taken is not None:
                raise _Refusal(ResponseCode.REJECTED, taken)
        if (claimed := self._claim_on(request.stream_id, now_ns)) is not None:
            raise claimed
        known = self.streams.get(request.stream_id)
        stream = known or self._make_stream(request)
        if stream.ring is None:
            text = f"stream {stream.stream_id} has no payload pools; give its profile one"
            raise _Refusal(ResponseCode.INVALID_PARAMS, text)
        try:
            if stream.is_dynamic and not stream.creator:
                limits.check_streams(self.config.policies, user, self.streams)
            if request.role is Role.PRODUCER:
                self._check_exclusive(stream)
                limits.check_bytes(self.config, user, stream, self._producing())
        except (_Refusal, LimitReached):
            if known is None:
                self.streams.forget(stream.stream_id)
            raise
        stream.creator = stream.creator or user or limits.UNKNOWN
        return stream

    def _make_stream(self, request: AttachRequest) -> Stream:
        if request.publish_mode is not PublishMode.EXISTING_OR_CREATE:  # E12: absent means REQUIRE_EXISTING
            text = f"stream {request.stream_id} does not exist; pass create=True, or see `tensorpool ls`"
            raise _Refusal(ResponseCode.REJECTED, text)
        try:
            return self.streams.create(request.stream_id)
        except NoStream as error:
            code = ResponseCode.INVALID_PARAMS if error.invalid else ResponseCode.REJECTED
            raise _Refusal(code, str(error)) from None

    def _claim_on(self, stream_id: int, now_ns: int) -> _Refusal | None:
        seen = self.authority.claim_on(stream_id, now_ns)
        text = f"another driver on this control stream {seen}; stop one of the two, or separate their streams"
        return None if seen is None else _Refusal(ResponseCode.REJECTED, text)

    def _check_exclusive(self, stream: Stream) -> None:
        """§5: one producer, also while its memory is being made."""
        if stream.producer is not None:
            lease = stream.producer
            raise _Refusal(
                ResponseCode.REJECTED,
                f"stream {stream.stream_id} already has a producer (client {lease.client_id}, {lease.holder}); detach "
                "it or use another stream",
            )
        if self._has_pending(stream, Role.PRODUCER):
            text = f"stream {stream.stream_id}: another producer is attaching; use another stream"
            raise _Refusal(ResponseCode.REJECTED, text)

    def _user(self, request: AttachRequest) -> str | None:
        owner = self.clients.owner_of(request.client_id)
        return None if owner is None else owner.user

    def _producing(self) -> list[tuple[Stream, str | None]]:
        """The streams that have a producer or are getting one, and whose it is."""
        held = [(stream, stream.producer.user) for stream in self.streams if stream.producer]
        producers = (each for each in self._pending if each.request.role is Role.PRODUCER)
        return held + [(each.stream, self._user(each.request)) for each in producers]

    def _granted(self, request: AttachRequest, stream: Stream, now_ns: int) -> Send:
        lease = self.leases.grant(stream.stream_id, request, now_ns)
        lease.owner, lease.granted_utc_ns = self.clients.owner_of(lease.client_id), now_ns + self.utc_offset_ns
        self.events.append(lease_event("attached", lease))
        stream.unused_since_ns = None  # also of a lease that comes and goes between two announces
        if request.role is Role.PRODUCER:
            stream.producer = lease
        assert stream.current is not None
        return self._answer(lease, stream.current)

    def _answered_again(self, lease: Lease) -> list[Effect]:
        """E2: a retry is answered with its lease and what is current (§4.2), as soon as the stream has an epoch."""
        stream = self.streams.get(lease.stream_id)
        if stream is None or stream.current is None:
            lease.is_owed_answer = True
            return []
        return [self._answer(lease, stream.current)]

    def _answer(self, lease: Lease, epoch: Epoch) -> Send:
        lease.is_owed_answer = False
        node_id = self.node_ids.of(lease.client_id)
        return Send(epoch_messages.grant(epoch, lease.request, lease.lease_id, self._stamp(lease.expiry_ns), node_id))

    def _report_pending(self, now_ns: int) -> list[Effect]:
        """Clients whose memory takes long learn that it is on its way, and how much of it."""
        if now_ns < self._next_report_ns:
            return []
        effects: list[Effect] = []
        for pending in self._pending:
            if now_ns >= pending.report_ns:
                pending.report_ns = now_ns + REPORT_EVERY_NS
                stream, correlation_id = pending.stream, pending.request.correlation_id
                size_bytes = 0 if stream.ring is None else stream.ring.size_bytes
                effects.append(Report(correlation_id, stream.stream_id, size_bytes, now_ns - pending.since_ns))
        self._next_report_ns = min((pending.report_ns for pending in self._pending), default=NEVER_NS)
        return effects

    def _refused(self, request: AttachRequest, why: _Refusal | LimitReached) -> AttachResponse:
        self.counts["attaches_refused"] += 1
        self.events.append(refusal_event(request, why.code, str(why)))
        return attach_refusal(Dialect.of(request), request.correlation_id, why.code, limited(str(why)))

    def _refuse_pending(self, pending: Pending, why: _Refusal, now_ns: int) -> Send:
        self.node_ids.give_back(pending.request.client_id, now_ns)
        return Send(self._refused(pending.request, why))

    def _ended(self, lease: Lease, reason: LeaseRevokeReason, text: str, now_ns: int) -> list[Effect]:
        """§4.9: every end is published; a producer's end also makes a new epoch, announced when it exists."""
        self.private_streams.give_back((lease.stream_id, lease.client_id))
        self.node_ids.give_back(lease.client_id, now_ns)
        held_ms = (now_ns - lease.granted_ns) // 1_000_000
        self.events.append(lease_event(reason.name.lower(), lease, reason=text or None, held_ms=held_ms))
        notice = ShmLeaseRevoked(
            timestamp_ns=self._stamp(now_ns),
            lease_id=lease.lease_id,
            stream_id=lease.stream_id,
            client_id=lease.client_id,
            role=lease.role,
            reason=reason,
            error_message=limited(text),
        )
        effects: list[Effect] = [Send(notice)]
        stream = self.streams.get(lease.stream_id)
        if stream is not None and stream.producer is lease:
            stream.producer = None
            stream.current = None  # a stale epoch is not announced again (§7)
            effects += self._create(stream, reserve=False)
        return effects

    def _drop_unused_streams(self, now_ns: int) -> list[Effect]:
        """A stream that a client created goes some time after its last lease, so that its id and memory are free."""
        used = {lease.stream_id for lease in self.leases} | {pending.stream.stream_id for pending in self._pending}
        effects: list[Effect] = []
        for stream in self.streams:
            if not stream.is_dynamic or stream.is_creating or stream.stream_id in used:
                stream.unused_since_ns = None
            elif stream.unused_since_ns is None:
                stream.unused_since_ns = now_ns
            elif now_ns - stream.unused_since_ns >= self.config.dynamic_stream_linger_ns:
                self.streams.forget(stream.stream_id)
                effects.append(DropStream(stream.stream_id))
        return effects

    def _create(self, stream: Stream, *, reserve: bool) -> list[Effect]:
        if stream.ring is None or stream.is_creating:
            return []
        stream.is_creating = True
        return [CreateEpoch(stream.stream_id, stream.ring, reserve)]

    def _renew(self, stream: Stream) -> list[Effect]:
        """A new epoch where the present one has another ring than the stream, and no producer writes it."""
        if stream.producer is not None or (stream.current is not None and stream.current.ring == stream.ring):
            return []
        return self._create(stream, reserve=False)

    def _has_pending(self, stream: Stream, role: Role) -> bool:
        return any(p.stream is stream and p.request.role is role for p in self._pending)

    def _take_pending(self, stream: Stream, role: Role) -> Pending | None:
        for index, pending in enumerate(self._pending):
            if pending.stream is stream and pending.request.role is role:
                return self._pending.pop(index)
        return None

    def _is_consumer(self, owner: tuple[int, int]) -> bool:
        """Whether a client holds a consumer's lease on a stream."""
        stream_id, client_id = owner
        lease = self.leases.of_client(client_id)
        return lease is not None and lease.role is Role.CONSUMER and lease.stream_id == stream_id


class _Refusal(Exception):
    """Why an attach is not granted."""

    def __init__(self, code: ResponseCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def _is_retry(first: AttachRequest, again: AttachRequest, stream_id: int) -> bool:
    """The same attempt (E2), also one that names the stream that the first was given; the client is the same."""
    is_same = (type(first), first.correlation_id, first.role) == (type(again), again.correlation_id, again.role)
    return is_same and again.stream_id in (first.stream_id, stream_id)


def _describe_holder(client_id: int, holder: Lease | Pending) -> str:
    if isinstance(holder, Pending):
        return f"client {client_id} is already attaching to stream {holder.stream.stream_id}"
    return (
        f"client {client_id} already holds lease {holder.lease_id} on stream {holder.stream_id}; one client, one lease"
    )


def _detach_response(correlation_id: int, code: ResponseCode, text: str) -> ShmDetachResponse:
    return ShmDetachResponse(correlation_id=correlation_id, code=code, error_message=limited(text))
