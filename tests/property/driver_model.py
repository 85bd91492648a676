# SPDX-License-Identifier: Apache-2.0
"""What clients know of a driver: leases, requests, epochs and lent ids, from the messages that they see.

`perform` takes the driver's effects in order and checks each against this knowledge. The rules that change the driver
are in tests/property/test_driver_lifecycle.py.
"""

from __future__ import annotations

import msgspec
from hypothesis.stateful import RuleBasedStateMachine

from tensorpool.driver.effects import Announce, CreateEpoch, DropStream, Effect, Exit, Report, Send
from tensorpool.driver.epoch_messages import Epoch
from tensorpool.driver.lifecycle import Lifecycle
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import (
    HugepagesPolicy,
    LeaseRevokeReason,
    PublishMode,
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmAttachResponse,
    ShmDriverShutdown,
    ShmLeaseRevoked,
)
from tests.driver.conftest import DYNAMIC, FRONT, LEASE_NS, PERIOD_NS, REAR, RING, SECOND_NS
from tests.property.driver_inputs import CONFIG, LENDABLE, LINGER_NS, MAX_LEASES, MAX_STREAMS, NULL_U32, STAMP_OFFSET_NS


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


class DriverModel(RuleBasedStateMachine):
    """A driver, and what its clients know of it."""

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
        self.renewed_ns: dict[tuple[int, int], int] = {}
        self.announced_ns = self.now_ns - PERIOD_NS  # when the cadence last came round
        self.exit_ns: int | None = None
        self.has_ended = False
        self.perform(self.life.on_start(self.now_ns))
        assert self.orders.keys() == self.known

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
        revoked = [notice.lease_id for notice in notices if isinstance(notice, ShmLeaseRevoked)]
        assert sorted(revoked) == sorted(lease.lease_id for lease in ended)
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
        self.renewed_ns[owner] = self.now_ns

    def forget_owner(self, owner: tuple[int, int]) -> None:
        self.renewed_ns.pop(owner, None)
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
