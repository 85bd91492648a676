# SPDX-License-Identifier: Apache-2.0
"""What holds for the driver's leases and epochs under every schedule.

The machine plays the clients, the clock, the operator and the memory, and believes only what a client could see: the
messages, in the order of the effects. From them it keeps its own books of who holds what, until when, on which epoch.

    one producer per stream, granted or promised          one lease per client, no lease id twice, also across restarts
    an epoch of its own for each producer and each end    every end sent once, a producer's before the next announce
    no epoch for a consumer, no stream lost in use        no keepalive for the dead, none with a wrong field
    one answer to each request, in the end                only the newest ready epoch announced, with its producer or 0
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tensorpool.driver.effects import Announce, CreateEpoch, Exit, Send
from tensorpool.driver.lifecycle import Phase
from tensorpool.wire.control import ConsumerConfig, ShmPoolAnnounce
from tensorpool.wire.driver import (
    LeaseRevokeReason,
    PublishMode,
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmAttachResponse,
    ShmDetachResponse,
    ShmDriverShutdown,
    ShutdownReason,
)
from tests.driver.conftest import DYNAMIC, FRONT, LEASE_NS, PERIOD_NS, REAR, attach, detach, epoch_of, keepalive
from tests.levels import SOAK
from tests.property.driver_inputs import (
    CLIENTS,
    LENDABLE,
    MAX_LEASES,
    SHUTDOWN_NS,
    STALE_NS,
    durations,
    falsified,
    hello,
    moments,
    odd_requests,
    picks,
    roles,
    seldom,
    sound_requests,
    wrong_fields,
)
from tests.property.driver_model import DriverModel, Waiting


class DriverMachine(DriverModel):
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
        if owner in self.renewed_ns:
            self.renewed_ns[owner] = self.now_ns
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
            for owner in [o for o, renewed_ns in self.renewed_ns.items() if self.now_ns - renewed_ns > STALE_NS]:
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
        self.renewed_ns = dict.fromkeys(self.renewed_ns, self.now_ns)
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
    def finish_what_a_client_waits_for(self, pick: int, is_made: bool) -> None:
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


DriverMachine.TestCase.settings = settings(max_examples=250 * SOAK, stateful_step_count=60)
TestDriver = DriverMachine.TestCase
