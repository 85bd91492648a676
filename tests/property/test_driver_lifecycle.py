# SPDX-License-Identifier: Apache-2.0
"""What holds for the driver's leases and epochs under every schedule.

The machine plays the clients, the clock, the operator and the memory, and believes only what a client could see: the
messages, in the order of the effects. From them it keeps its own books of who holds what, until when, on which epoch.

    one producer per stream, granted or promised          one lease per client, no lease id twice, also across restarts
    an epoch of its own for each producer and each end    every end told once, a producer's before the next announce
    no epoch for a consumer, no stream lost in use        no keepalive for the dead, none with a wrong field
    one answer to each request, in the end                only the newest ready epoch announced, with its producer or 0
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensorpool.driver.epoch_messages import Epoch
from tensorpool.driver.lifecycle import (
    Announce,
    CreateEpoch,
    DropStream,
    Effect,
    Exit,
    Lifecycle,
    Phase,
    Report,
    Send,
)
from tensorpool.driver.private_streams import STALE_PERIODS
from tensorpool.wire.control import ConsumerConfig, ConsumerHello, ShmPoolAnnounce
from tensorpool.wire.driver import (
    HugepagesPolicy,
    LeaseRevokeReason,
    PublishMode,
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmAttachResponse,
    ShmDetachRequest,
    ShmDetachResponse,
    ShmDriverShutdown,
    ShmLeaseKeepalive,
    ShmLeaseRevoked,
    ShutdownReason,
)
from tests.driver.conftest import (
    DYNAMIC,
    FRONT,
    LEASE_NS,
    PERIOD_NS,
    REAR,
    RING,
    SECOND_NS,
    attach,
    detach,
    driver_config,
    epoch_of,
    keepalive,
)
from tests.levels import SOAK
from tests.support import messages

MAX_LEASES, MAX_STREAMS = 4, 4
CONFIG = driver_config(
    {
        "policies.max_leases": MAX_LEASES,
        "policies.max_streams": MAX_STREAMS,
        "policies.shutdown_timeout_ms": 700,  # not in step with the announces
        "policies.dynamic_stream_linger_ms": 5_000,
    }
)
SHUTDOWN_NS, LINGER_NS = CONFIG.shutdown_timeout_ns, CONFIG.dynamic_stream_linger_ns
STAMP_OFFSET_NS = 10**18  # what clients read is in another clock than deadlines are
NULL_U32 = 2**32 - 1
OUTSIDE = 555  # of the range of stream ids
CLIENTS = (1, 2, 3, 4, 5)
FIELDS = ("lease_id", "stream_id", "client_id", "role")
STALE_NS = STALE_PERIODS * PERIOD_NS
LENDABLE = {"descriptor": 2, "control": 1}  # ids in the range of each kind

roles = st.sampled_from(Role)
sound_requests = st.builds(
    attach,
    st.sampled_from(CLIENTS),
    st.sampled_from([FRONT, REAR, *DYNAMIC, 0]),
    roles,
    correlation_id=st.sampled_from([1, 2]),  # shared by all clients: they collide (E3)
    publish_mode=st.just(PublishMode.EXISTING_OR_CREATE),
)
oddities: st.SearchStrategy[dict[str, object]] = st.sampled_from(
    [
        {"client_id": 0},
        {"client_id": NULL_U32},
        {"stream_id": OUTSIDE},
        {"stream_id": NULL_U32},
        {"publish_mode": PublishMode.REQUIRE_EXISTING},
        {"publish_mode": None},
        {"expected_layout_version": 1},
        {"expected_layout_version": 9},
        {"expected_layout_version": NULL_U32},
        {"require_hugepages": HugepagesPolicy.STANDARD},
        {"require_hugepages": HugepagesPolicy.HUGEPAGES},
    ]
)
odd_requests = st.builds(lambda request, odd: msgspec.structs.replace(request, **odd), sound_requests, oddities)
picks = st.integers(0, 11)
wrong_fields = st.sampled_from([None, None, None, *FIELDS])
moments = st.sampled_from([0, 1, PERIOD_NS // 2, PERIOD_NS])
durations = moments | st.sampled_from([LEASE_NS - 1, LEASE_NS, STALE_NS + 1, 3 * LEASE_NS])
seldom = st.integers(0, 3).map(lambda number: number == 3)


class Held(msgspec.Struct):
    """A lease, as its owner knows it."""

    lease_id: int
    client_id: int
    stream_id: int
    role: Role
    expiry_ns: int
    request: ShmAttachRequest
    response: ShmAttachResponse
    is_forgiven: bool = False


class Waiting(msgspec.Struct):
    """A request that has not been answered yet."""

    request: ShmAttachRequest
    stream_id: int


class DriverMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 1_000 * SECOND_NS
        # What outlives a driver: its files, its past leases, what clients have seen.
        self.highest_epoch: dict[int, int] = {}
        self.seen_epoch: dict[int, int] = {}
        self.highest_lease_id = 0
        self.dead: list[Held] = []
        self.refused: list[ShmAttachRequest] = []
        self.start(first_lease_id=1)

    def start(self, first_lease_id: int) -> None:
        self.life = Lifecycle(CONFIG, first_lease_id=first_lease_id)
        self.life.stamp_offset_ns = STAMP_OFFSET_NS
        self.held: dict[int, Held] = {}
        self.waiting: list[Waiting] = []
        self.orders: dict[int, CreateEpoch] = {}
        self.ready: dict[int, Epoch] = {}
        self.owed: set[int] = set()  # leases that asked again while their stream had no epoch
        self.known = {FRONT, REAR}
        self.was_ready: set[int] = set()
        self.used_ns: dict[int, int] = {}  # when a client last had a lease
        self.idle_ns: dict[int, int] = {}  # when an announce found a dynamic stream without use
        self.lent: dict[tuple[str, tuple[int, int]], int] = {}
        self.heard_ns: dict[tuple[int, int], int] = {}
        self.announced_ns = self.now_ns - PERIOD_NS  # when the cadence last came round
        self.exit_ns: int | None = None
        self.has_ended = False
        self.perform(self.life.on_start(self.now_ns))
        assert self.orders.keys() == self.known

    # --- clients

    @precondition(lambda self: not self.has_ended)
    @rule(request=sound_requests)
    def attach_and_wait(self, request: ShmAttachRequest) -> None:
        """The common case, in one step: no other request comes until the memory is there."""
        self.attach(request)
        while (entry := self.waiting_of(request.client_id)) is not None:
            self.finish(entry.stream_id, is_made=True)

    @precondition(lambda self: not self.has_ended)
    @rule(
        stream_id=st.sampled_from([FRONT, DYNAMIC[0]]),
        roles=st.lists(roles, min_size=2, max_size=4),
        outcome=st.sampled_from([None, True, False]),
    )
    def attach_together(self, stream_id: int, roles: list[Role], outcome: bool | None) -> None:
        """Several at one stream before its memory is there, if it ever is."""
        for client_id, role in zip(CLIENTS, roles, strict=False):
            self.attach(attach(client_id, stream_id, role, publish_mode=PublishMode.EXISTING_OR_CREATE))
        if outcome is not None and stream_id in self.orders:
            self.finish(stream_id, is_made=outcome)

    @precondition(lambda self: not self.has_ended)
    @rule(request=sound_requests | odd_requests)
    def attach(self, request: ShmAttachRequest) -> None:
        effects = self.life.on_attach(request, self.now_ns)
        held = next((lease for lease in self.held.values() if lease.client_id == request.client_id), None)
        waiting = self.waiting_of(request.client_id)
        if held is not None and is_same_attempt(held.request, request, held.stream_id):
            current = self.ready.get(held.stream_id)
            if current is None:
                assert effects == []
                self.owed.add(held.lease_id)
                return
            self.owed.add(held.lease_id)
            self.perform(effects)
            assert held.lease_id not in self.owed, "answered at once"
            return
        if waiting is not None and is_same_attempt(waiting.request, request, waiting.stream_id):
            assert effects == []
            return
        codes = self.reasons_to_refuse(request)
        if codes:
            (answer,) = self.perform(effects)
            assert isinstance(answer, ShmAttachResponse)
            assert answer.code in codes
            assert answer.error_message
            assert answer == ShmAttachResponse(
                correlation_id=request.correlation_id, code=answer.code, error_message=answer.error_message
            )
            self.refused = [*self.refused[-3:], request]
            return
        stream_id = request.stream_id or min(set(DYNAMIC) - self.known)
        self.known.add(stream_id)
        is_under_way = stream_id in self.orders
        self.waiting.append(Waiting(request, stream_id))
        self.perform(effects)
        if request.role is Role.CONSUMER and stream_id in self.ready:
            assert [type(effect) for effect in effects] == [Send]
            assert all(entry.request is not request for entry in self.waiting)
        else:
            assert [type(effect) for effect in effects] == ([] if is_under_way else [CreateEpoch])

    @precondition(lambda self: (self.held or self.waiting or self.refused) and not self.has_ended)
    @rule(pick=picks)
    def attach_again(self, pick: int) -> None:
        """The answer was lost, or the client is impatient."""
        earlier = [lease.request for lease in self.held.values()]
        earlier += [entry.request for entry in self.waiting] + self.refused
        self.attach(earlier[pick % len(earlier)])

    @precondition(lambda self: (self.held or self.dead) and not self.has_ended)
    @rule(pick=picks, wrong=wrong_fields)
    def keepalive(self, pick: int, wrong: str | None) -> None:
        """Of anybody who ever had a lease, also of an earlier driver."""
        lease = self.some_lease(pick)
        message = keepalive(lease.lease_id, lease.client_id, lease.stream_id, lease.role)
        self.life.on_keepalive(falsified(message, wrong), self.now_ns)
        if wrong is None and lease.lease_id in self.held:
            lease.is_forgiven = False
            lease.expiry_ns = max(lease.expiry_ns, self.now_ns + LEASE_NS)

    @precondition(lambda self: (self.held or self.dead) and not self.has_ended)
    @rule(pick=picks, wrong=wrong_fields, correlation_id=st.integers(-2, 2))
    def detach(self, pick: int, wrong: str | None, correlation_id: int) -> None:
        lease = self.some_lease(pick)
        message = detach(lease.lease_id, lease.client_id, lease.stream_id, lease.role, correlation_id=correlation_id)
        is_valid = wrong is None and lease.lease_id in self.held
        answer, *notices = self.perform(self.life.on_detach(falsified(message, wrong), self.now_ns))
        assert isinstance(answer, ShmDetachResponse)
        assert answer.correlation_id == correlation_id
        assert answer.code is (ResponseCode.OK if is_valid else ResponseCode.REJECTED)
        self.check_ends(notices, [lease] if is_valid else [], LeaseRevokeReason.DETACHED)

    @precondition(lambda self: not self.has_ended)
    @rule(pick=picks, kinds=st.sets(st.sampled_from(sorted(LENDABLE))))
    def hello(self, pick: int, kinds: set[str]) -> None:
        """Of a consumer with a lease, or of one that the driver does not know."""
        owners = [(lease.stream_id, lease.client_id) for lease in self.held.values()] + [(FRONT, 1), (REAR, 9)]
        owner = stream_id, consumer_id = owners[pick % len(owners)]
        answers = self.perform(self.life.on_consumer_hello(hello(consumer_id, stream_id, kinds), self.now_ns))
        assert len(answers) == bool(kinds)
        if owner in self.heard_ns:
            self.heard_ns[owner] = self.now_ns
        for answer in answers:
            assert isinstance(answer, ConsumerConfig)
            assert (answer.stream_id, answer.consumer_id) == owner
            for kind in kinds:
                self.check_lent(kind, owner, getattr(answer, f"{kind}_stream_id"))

    # --- the clock and the operator

    @rule(duration_ns=moments)
    def advance(self, duration_ns: int) -> None:
        """Time passes between two turns of the driver."""
        self.now_ns += duration_ns

    @precondition(lambda self: not self.has_ended)
    @rule(duration_ns=moments | durations)
    def tick(self, duration_ns: int) -> None:
        """Everything that is due happens, and nothing else."""
        self.now_ns += duration_ns
        expired = [lease for lease in self.held.values() if self.now_ns >= lease.expiry_ns]
        in_the_making = self.orders.keys() | {lease.stream_id for lease in expired if lease.role is Role.PRODUCER}
        effects = self.life.on_tick(self.now_ns)
        messages = self.perform(effects)
        if self.exit_ns is not None and self.now_ns >= self.exit_ns:
            assert isinstance(effects[-1], Exit)
            assert isinstance(messages.pop(), ShmDriverShutdown)
        notices = [message for message in messages if not isinstance(message, ShmPoolAnnounce)]
        self.check_ends(notices, expired, LeaseRevokeReason.EXPIRED)
        announces = [effect.stream_id for effect in effects if isinstance(effect, Announce)]
        is_due = self.now_ns - self.announced_ns >= PERIOD_NS
        if is_due:
            self.check_unused_streams(in_the_making)
            assert Counter(announces) == Counter(self.ready.keys())
            self.announced_ns = self.now_ns
            for owner in [o for o, heard_ns in self.heard_ns.items() if self.now_ns - heard_ns > STALE_NS]:
                self.forget_owner(owner)
        assert is_due or not announces or self.has_ended

    @precondition(lambda self: not self.has_ended)
    @rule(duration_ns=durations)
    def stall(self, duration_ns: int) -> None:
        """The driver could not run: no lease is lost for that, unless it was silent since the last time."""
        self.now_ns += duration_ns
        self.life.on_stall(self.now_ns)
        for lease in self.held.values():
            if not lease.is_forgiven:
                lease.is_forgiven = True
                lease.expiry_ns = max(lease.expiry_ns, self.now_ns + LEASE_NS)
        self.heard_ns = dict.fromkeys(self.heard_ns, self.now_ns)
        self.tick(0)

    @precondition(lambda self: (self.held or self.dead) and not self.has_ended)
    @rule(pick=picks)
    def revoke(self, pick: int) -> None:
        lease = self.some_lease(pick)
        is_alive = lease.lease_id in self.held
        notices = self.perform(self.life.revoke(lease.lease_id, "by hand", self.now_ns))
        self.check_ends(notices, [lease] if is_alive else [], LeaseRevokeReason.REVOKED)

    @precondition(lambda self: self.exit_ns is None)
    @rule(is_meant=seldom)
    def drain(self, is_meant: bool) -> None:
        if not is_meant:  # most runs are about a driver that serves
            return
        waiting, self.waiting = self.waiting, []
        self.exit_ns = self.now_ns + SHUTDOWN_NS
        messages = self.perform(self.life.drain(ShutdownReason.ADMIN, "", self.now_ns))
        answers = [message for message in messages if isinstance(message, ShmAttachResponse)]
        check_refused(answers, waiting, ResponseCode.REJECTED)
        announces = [message for message in messages if isinstance(message, ShmPoolAnnounce)]
        assert messages == answers + announces
        assert Counter(announce.stream_id for announce in announces) == Counter(self.ready.keys())

    @rule(is_meant=seldom, is_killed=st.booleans(), skipped=st.sampled_from([1, 1000]))
    def restart(self, is_meant: bool, is_killed: bool, skipped: int) -> None:
        """What it held and promised is gone without another word, its files tell its epochs."""
        if not is_meant and not self.has_ended:
            return
        if not is_killed:
            notices = [effect.message for effect in self.life.end(self.now_ns) if isinstance(effect, Send)]
            assert [type(notice) for notice in notices] == ([] if self.has_ended else [ShmDriverShutdown])
            assert self.life.end(self.now_ns) == []
        self.dead = [*self.dead, *self.held.values()][-3:]
        self.start(self.highest_lease_id + skipped)

    # --- memory

    @precondition(lambda self: self.orders and not self.has_ended)
    @rule(pick=picks, is_made=st.sampled_from([True, True, True, False]), step=st.integers(1, 3))
    def finish_creation(self, pick: int, is_made: bool, step: int) -> None:
        """In any order between streams, at any time, with either outcome."""
        self.finish(sorted(self.orders)[pick % len(self.orders)], is_made, step)

    @precondition(lambda self: self.waiting and not self.has_ended)
    @rule(pick=picks, is_made=st.booleans())
    def finish_what_somebody_waits_for(self, pick: int, is_made: bool) -> None:
        self.finish(self.waiting[pick % len(self.waiting)].stream_id, is_made)

    def finish(self, stream_id: int, is_made: bool, step: int = 1) -> None:
        order = self.orders.pop(stream_id)
        waiting = [entry for entry in self.waiting if entry.stream_id == stream_id]
        producers = [entry for entry in waiting if entry.request.role is Role.PRODUCER]
        consumers = [entry for entry in waiting if entry.request.role is Role.CONSUMER]
        number = self.highest_epoch.get(stream_id, 0) + step
        self.highest_epoch[stream_id] = number  # one that fails has used its number too
        if is_made:
            epoch = epoch_of(stream_id, number)
            self.ready[stream_id] = epoch
            self.was_ready.add(stream_id)
            effects = self.life.on_epoch_created(epoch, order.reserve, self.now_ns)
            granted = [ShmAttachResponse] * len(producers if order.reserve else [])
            owed = {id for id in self.owed if id in self.held and self.held[id].stream_id == stream_id}
            messages = self.perform(effects)
            waited = [ShmAttachResponse] * (len(consumers) + len(owed))
            assert [type(message) for message in messages] == [*granted, ShmPoolAnnounce, *waited]
            assert all(m.code is ResponseCode.OK for m in messages if isinstance(m, ShmAttachResponse))
            assert not owed & self.owed
            return
        refused = producers if order.reserve else consumers
        self.waiting = [entry for entry in self.waiting if entry not in refused]
        effects = self.life.on_epoch_failed(stream_id, order.reserve, "no space", self.now_ns)
        check_refused(self.perform(effects), refused, ResponseCode.INTERNAL_ERROR)
        if stream_id in DYNAMIC and stream_id not in self.was_ready and stream_id not in self.orders:
            self.known.discard(stream_id)

    # --- what always holds

    @invariant()
    def always(self) -> None:
        self.check_books()
        self.check_claims()

    def check_books(self) -> None:
        """Every lease of the driver's was granted to a client and not revoked since, to the nanosecond."""
        assert {lease.lease_id: lease.expiry_ns for lease in self.life.leases} == {
            lease.lease_id: lease.expiry_ns for lease in self.held.values()
        }
        assert {stream.stream_id for stream in self.life.streams} == self.known
        assert self.life.phase is (
            Phase.ENDED if self.has_ended else Phase.SERVING if self.exit_ns is None else Phase.DRAINING
        )

    def check_claims(self) -> None:
        """Granted or promised: one producer per stream, one lease per client; and promises are being kept."""
        claims = self.claims()
        producers = Counter(stream_id for _, stream_id, role in claims if role is Role.PRODUCER)
        clients = Counter(client_id for client_id, _, _ in claims)
        assert not producers or max(producers.values()) == 1
        assert not clients or max(clients.values()) == 1
        assert len(claims) <= MAX_LEASES
        assert all(entry.stream_id in self.orders for entry in self.waiting)  # each waits for an epoch

    def teardown(self) -> None:
        """Once all memory is made every client has an answer, and every configured stream is there."""
        if sys.exception() is not None:
            return  # it has failed already
        for _ in range(4):
            for stream_id in sorted(self.orders):
                self.finish(stream_id, is_made=True)
            if not self.has_ended and self.exit_ns is None:
                self.tick(2 * PERIOD_NS)
        assert self.waiting == []
        assert self.has_ended or self.exit_ns is not None or self.ready.keys() >= {FRONT, REAR}

    # --- what clients see

    def perform(self, effects: list[Effect]) -> list[object]:
        """As the conductor does, in their order. Returns every message that went out."""
        messages: list[object] = []
        for effect in effects:
            match effect:
                case CreateEpoch():
                    self.on_order(effect)
                    continue
                case DropStream():
                    self.on_dropped(effect.stream_id)
                    continue
                case Report():
                    assert any(entry.request.correlation_id == effect.correlation_id for entry in self.waiting)
                    continue
                case Exit():
                    assert not self.has_ended
                    self.has_ended = True
                    continue
                case Announce(stream_id):
                    message: object = self.life.announce(stream_id, self.now_ns)
                case Send(message):
                    pass
            messages.append(message)
            match message:
                case ShmPoolAnnounce():
                    self.on_announce(message)
                case ShmAttachResponse(code=ResponseCode.OK, lease_id=lease_id) if lease_id in self.owed:
                    self.on_answered_again(message)
                case ShmAttachResponse(code=ResponseCode.OK):
                    self.on_granted(message)
                case ShmLeaseRevoked():
                    self.on_revoked(message)
                case ShmDriverShutdown():
                    assert message.timestamp_ns == self.now_ns + STAMP_OFFSET_NS
                    assert self.exit_ns is not None
                    assert self.now_ns >= self.exit_ns
                case None:
                    raise AssertionError(f"an announce of stream {effect} without an epoch")
        return messages

    def on_order(self, order: CreateEpoch) -> None:
        """One creation at a time, where there is no epoch or a producer needs its own: never for a consumer's sake."""
        assert order.stream_id not in self.orders
        assert order.ring == RING
        is_for_producer = any(
            entry.stream_id == order.stream_id and entry.request.role is Role.PRODUCER for entry in self.waiting
        )
        assert is_for_producer or order.stream_id not in self.ready
        assert order.reserve is is_for_producer  # C4: gigabytes only where a producer will write them
        self.orders[order.stream_id] = order

    def on_dropped(self, stream_id: int) -> None:
        """Only what clients created, and only long after the last of them."""
        assert stream_id in DYNAMIC
        assert stream_id not in self.orders
        assert all(stream_id != lease.stream_id for lease in self.held.values())
        assert self.now_ns - self.used_ns.get(stream_id, 0) >= LINGER_NS
        del self.idle_ns[stream_id]
        self.ready.pop(stream_id, None)
        self.known.remove(stream_id)
        self.was_ready.remove(stream_id)

    def on_announce(self, announce: ShmPoolAnnounce) -> None:
        epoch = self.ready[announce.stream_id]  # none between a producer's end and the new epoch
        producer = self.producer_of(announce.stream_id)
        assert announce.epoch == epoch.epoch
        assert announce.producer_id == (producer.client_id if producer else 0)
        assert announce.header_region_uri == epoch.header_region_uri
        assert tuple(pool.region_uri for pool in announce.payload_pools) == epoch.pool_region_uris
        assert announce.epoch >= self.seen_epoch.get(announce.stream_id, 0)
        self.seen_epoch[announce.stream_id] = announce.epoch

    def on_granted(self, answer: ShmAttachResponse) -> None:
        lease = self.life.leases.get(answer.lease_id or 0)
        assert lease is not None
        (entry,) = [entry for entry in self.waiting if entry.request.client_id == lease.client_id]
        self.waiting.remove(entry)
        request, stream_id = entry.request, entry.stream_id
        assert (answer.correlation_id, answer.stream_id) == (request.correlation_id, stream_id)
        assert self.exit_ns is None
        assert lease.lease_id > self.highest_lease_id  # never one that was given before, by whichever driver
        self.highest_lease_id = lease.lease_id
        assert answer.lease_expiry_timestamp_ns == self.now_ns + LEASE_NS + STAMP_OFFSET_NS
        epoch = self.ready[stream_id]
        assert (answer.epoch, answer.header_region_uri) == (epoch.epoch, epoch.header_region_uri)
        assert tuple(pool.region_uri for pool in answer.payload_pools) == epoch.pool_region_uris
        if request.role is Role.PRODUCER:
            assert self.producer_of(stream_id) is None
            assert epoch.epoch > self.seen_epoch.get(stream_id, 0)  # its own, which no client has seen yet
        else:
            assert epoch.epoch == self.seen_epoch[stream_id]  # the one that is announced
        self.seen_epoch[stream_id] = epoch.epoch
        self.used_ns[stream_id] = self.now_ns
        self.idle_ns.pop(stream_id, None)
        self.held[lease.lease_id] = Held(
            lease.lease_id, request.client_id, stream_id, request.role, self.now_ns + LEASE_NS, request, answer
        )

    def on_answered_again(self, answer: ShmAttachResponse) -> None:
        """The lease that there is, with what is current (§4.2)."""
        held, current = self.held[answer.lease_id or 0], self.ready[answer.stream_id or 0]
        self.owed.discard(held.lease_id)
        assert (answer.correlation_id, answer.stream_id) == (held.request.correlation_id, held.stream_id)
        assert (answer.epoch, answer.header_region_uri) == (current.epoch, current.header_region_uri)

    def on_revoked(self, notice: ShmLeaseRevoked) -> None:
        self.owed.discard(notice.lease_id)
        lease = self.held.pop(notice.lease_id)  # fails for one that has ended before
        assert (notice.stream_id, notice.client_id, notice.role) == (lease.stream_id, lease.client_id, lease.role)
        assert notice.timestamp_ns == self.now_ns + STAMP_OFFSET_NS
        self.dead = [*self.dead, lease][-3:]
        self.used_ns[lease.stream_id] = self.now_ns
        if lease.role is Role.PRODUCER:
            assert self.ready.pop(lease.stream_id).epoch == lease.response.epoch
        self.forget_owner((lease.stream_id, lease.client_id))

    # --- the machine's own

    def reasons_to_refuse(self, request: ShmAttachRequest) -> set[ResponseCode]:
        """Every code that some rule of §4.3-§4.8, §5 or §11 demands; none: the request must be granted."""
        stream_id, client_id = request.stream_id, request.client_id
        rejected, invalid = {ResponseCode.REJECTED}, {ResponseCode.INVALID_PARAMS}
        codes: set[ResponseCode] = set()
        if client_id in (0, NULL_U32) or stream_id == NULL_U32:
            codes |= invalid
        claims = self.claims()
        if (
            self.exit_ns is not None
            or any(claim[0] == client_id for claim in claims)
            or len(claims) >= MAX_LEASES
            or request.expected_layout_version not in (0, 1, NULL_U32)
            or request.require_hugepages is HugepagesPolicy.HUGEPAGES
        ):
            codes |= rejected
        if stream_id in self.known:
            if request.role is Role.PRODUCER and any(claim[1:] == (stream_id, Role.PRODUCER) for claim in claims):
                codes |= rejected
        elif request.publish_mode is not PublishMode.EXISTING_OR_CREATE:
            codes |= rejected
        elif stream_id not in (0, *DYNAMIC):
            codes |= invalid
        elif len(self.known) >= MAX_STREAMS or self.known.issuperset(DYNAMIC):
            codes |= rejected
        return codes

    def check_ends(self, notices: list[object], ended: list[Held], reason: LeaseRevokeReason) -> None:
        """Exactly these leases were revoked, and a producer's end has ordered the next epoch."""
        assert all(isinstance(notice, ShmLeaseRevoked) and notice.reason is reason for notice in notices)
        told = [notice.lease_id for notice in notices if isinstance(notice, ShmLeaseRevoked)]
        assert sorted(told) == sorted(lease.lease_id for lease in ended)
        assert all(lease.stream_id in self.orders for lease in ended if lease.role is Role.PRODUCER)

    def check_unused_streams(self, in_the_making: set[int]) -> None:
        """At every announce: what has been without use for long enough is gone by now."""
        used = {lease.stream_id for lease in self.held.values()} | in_the_making
        for stream_id in self.known & set(DYNAMIC):
            if stream_id in used:
                self.idle_ns.pop(stream_id, None)
            else:
                assert self.now_ns - self.idle_ns.setdefault(stream_id, self.now_ns) < LINGER_NS

    def check_lent(self, kind: str, owner: tuple[int, int], number: int) -> None:
        """The same id again, or one that is free, for a consumer with a lease; declined when all of them are lent."""
        is_consumer = any(
            (held.stream_id, held.client_id, held.role) == (*owner, Role.CONSUMER) for held in self.held.values()
        )
        lent = {key[1]: id_ for key, id_ in self.lent.items() if key[0] == kind}
        if number == 0:
            assert owner not in lent
            assert not is_consumer or len(lent) == LENDABLE[kind]
            return
        assert is_consumer
        assert lent.setdefault(owner, number) == number
        assert len(set(lent.values())) == len(lent)
        self.lent[kind, owner] = number
        self.heard_ns[owner] = self.now_ns

    def forget_owner(self, owner: tuple[int, int]) -> None:
        self.heard_ns.pop(owner, None)
        for kind in LENDABLE:
            self.lent.pop((kind, owner), None)

    def claims(self) -> list[tuple[int, int, Role]]:
        """Client, stream and role of everything that is granted or promised."""
        granted = [(lease.client_id, lease.stream_id, lease.role) for lease in self.held.values()]
        promised = [(entry.request.client_id, entry.stream_id, entry.request.role) for entry in self.waiting]
        return granted + promised

    def producer_of(self, stream_id: int) -> Held | None:
        producers = [held for held in self.held.values() if (held.stream_id, held.role) == (stream_id, Role.PRODUCER)]
        return producers[0] if producers else None

    def waiting_of(self, client_id: int) -> Waiting | None:
        return next((entry for entry in self.waiting if entry.request.client_id == client_id), None)

    def some_lease(self, pick: int) -> Held:
        leases = [*self.held.values(), *self.dead]
        return leases[pick % len(leases)]


def is_same_attempt(first: ShmAttachRequest, again: ShmAttachRequest, stream_id: int) -> bool:
    """E2, of the same client: the stream is named as before, or as the one that was given."""
    is_same = (first.correlation_id, first.role) == (again.correlation_id, again.role)
    return is_same and again.stream_id in (first.stream_id, stream_id)


def check_refused(answers: Sequence[object], refused: list[Waiting], code: ResponseCode) -> None:
    """Each of these got this answer, and no other client got one."""
    assert all(isinstance(answer, ShmAttachResponse) and answer.code is code for answer in answers)
    assert Counter(answer.correlation_id for answer in answers if isinstance(answer, ShmAttachResponse)) == Counter(
        entry.request.correlation_id for entry in refused
    )


def falsified[M: (ShmLeaseKeepalive, ShmDetachRequest)](message: M, wrong: str | None) -> M:
    """The message with one field that is not the lease's."""
    match wrong:
        case None:
            return message
        case "role":
            other = Role.CONSUMER if message.role is Role.PRODUCER else Role.PRODUCER
            return msgspec.structs.replace(message, role=other)
        case "lease_id":
            return msgspec.structs.replace(message, lease_id=message.lease_id + 1_000_000)
    return msgspec.structs.replace(message, **{wrong: getattr(message, wrong) + 1})


def hello(consumer_id: int, stream_id: int, kinds: set[str]) -> ConsumerHello:
    channels = {f"{kind}_channel": "aeron:ipc" for kind in kinds}
    return messages.hello(stream_id, consumer_id, **channels)


DriverMachine.TestCase.settings = settings(max_examples=250 * SOAK, stateful_step_count=60)
TestDriver = DriverMachine.TestCase
