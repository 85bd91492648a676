# SPDX-License-Identifier: Apache-2.0
"""How the driver answers attaches, their retries, and those that wait for memory."""

from __future__ import annotations

import pytest

from tensorpool.driver.effects import CreateEpoch, Effect, Report, Send
from tensorpool.driver.lifecycle import FIRST_REPORT_NS, REPORT_EVERY_NS, Lifecycle
from tensorpool.wire.driver import PublishMode, ResponseCode, Role, ShmAttachRequest, ShmAttachResponse
from tests.driver.conftest import (
    DYNAMIC,
    FRONT,
    LEASE_NS,
    PERIOD_NS,
    REAR,
    RING,
    SECOND_NS,
    attach,
    created,
    detach,
    driver_config,
    epoch_of,
    keepalive,
    serving,
)
from tests.driver.lifecycle.conftest import CREATE, message_of, only_message, outline, with_producer

# --- attach


def test_a_consumer_of_a_ready_stream_is_answered_at_once() -> None:
    """Every field that OK requires, and no new epoch for it."""
    lifecycle = serving()
    answer = only_message(lifecycle.on_attach(attach(3, correlation_id=-9), 40))
    assert (answer.correlation_id, answer.code, answer.lease_id) == (-9, ResponseCode.OK, 500)
    assert answer.lease_expiry_timestamp_ns == 40 + LEASE_NS
    assert (answer.stream_id, answer.epoch, answer.layout_version) == (FRONT, 1, 1)
    assert (answer.header_nslots, answer.header_slot_bytes, answer.max_dims) == (RING.nslots, 256, 8)
    assert answer.header_region_uri == epoch_of(FRONT, 1).header_region_uri
    pools = [(p.pool_id, p.pool_nslots, p.stride_bytes, p.region_uri) for p in answer.payload_pools]
    uris = epoch_of(FRONT, 1).pool_region_uris
    assert pools == [(1, RING.nslots, 64, uris[0]), (2, RING.nslots, 128, uris[1])]
    assert answer.error_message == ""


@pytest.mark.spec("DRV-6-01", "WIRE-10.1.1-02")
def test_a_producer_is_answered_when_its_own_epoch_is_there_then_announced() -> None:
    """E45: memory, then OK, then the announce with its id; the epoch before it stays announced meanwhile."""
    lifecycle = serving()
    assert lifecycle.on_attach(attach(7, role=Role.PRODUCER), 0) == [CreateEpoch(FRONT, RING, True)]
    assert f"announce {FRONT}" in outline(lifecycle.on_tick(PERIOD_NS))
    assert lifecycle.announce(FRONT, 0) is not None
    effects = created(lifecycle, FRONT, 2, 5, reserved=True)
    assert outline(effects) == ["attach OK", f"announce {FRONT}"]
    answer = message_of(effects[0])
    assert isinstance(answer, ShmAttachResponse)
    assert (answer.epoch, answer.lease_expiry_timestamp_ns) == (2, 5 + LEASE_NS)
    announce = lifecycle.announce(FRONT, 6)
    assert announce is not None
    assert (announce.epoch, announce.producer_id) == (2, 7)


@pytest.mark.spec("DRV-6-07", "DRV-4.9-06")
def test_consumers_come_and_go_without_a_new_epoch() -> None:
    """Attach, detach, expiry and revocation of a consumer never make memory (DRV-6-07)."""
    lifecycle = with_producer()
    for client_id in (1, 2, 3):
        assert outline(lifecycle.on_attach(attach(client_id), 0)) == ["attach OK"]
    assert outline(lifecycle.on_detach(detach(501, 1), 0)) == ["detach OK", "revoked 501 DETACHED"]
    assert outline(lifecycle.revoke(502, "", 0)) == ["revoked 502 REVOKED"]
    lifecycle.on_keepalive(keepalive(500, 7, role=Role.PRODUCER), 1)
    effects = outline(lifecycle.on_tick(LEASE_NS))
    assert effects == ["revoked 503 EXPIRED", f"announce {FRONT}", f"announce {REAR}"]
    announce = lifecycle.announce(FRONT, 0)
    assert announce is not None
    assert announce.epoch == 2


def test_a_consumer_while_a_producers_memory_is_made_gets_the_epoch_that_is_announced() -> None:
    """It does not wait for the memory of another stream."""
    lifecycle = serving()
    lifecycle.on_attach(attach(7, role=Role.PRODUCER), 0)
    assert only_message(lifecycle.on_attach(attach(3), 0)).epoch == 1


def test_who_comes_before_the_first_epoch_waits_for_it() -> None:
    """Consumers are answered in their order after the announce; a producer then gets an epoch of its own."""
    lifecycle = Lifecycle(driver_config(), first_lease_id=500)
    lifecycle.on_start(0)
    for request in (attach(1), attach(7, role=Role.PRODUCER), attach(2)):
        assert lifecycle.on_attach(request, 0) == []
    effects = created(lifecycle, FRONT, 1, 9)
    assert outline(effects) == [f"announce {FRONT}", "attach OK", "attach OK", f"create {FRONT} for a producer"]
    holders = [(lease.lease_id, lease.client_id, lease.granted_ns) for lease in lifecycle.leases]
    assert holders == [(500, 1, 9), (501, 2, 9)]
    assert outline(created(lifecycle, FRONT, 2, 10, reserved=True)) == ["attach OK", f"announce {FRONT}"]


@pytest.mark.parametrize("role", Role)
def test_a_stream_without_an_epoch_and_without_a_creation_gets_one_when_a_client_attaches(role: Role) -> None:
    """After a failure a client need not wait for the driver's own next attempt."""
    lifecycle = Lifecycle(driver_config(), first_lease_id=500)
    lifecycle.on_start(0)
    lifecycle.on_epoch_failed(FRONT, False, "full", 0)
    expected = f"create {FRONT}" + (" for a producer" if role is Role.PRODUCER else "")
    assert outline(lifecycle.on_attach(attach(1, role=role), 1)) == [expected]


def test_a_dynamic_stream_is_made_for_the_client_that_asks_first() -> None:
    """By id or by id 0, for either role; the answer names the stream (E13, E14)."""
    lifecycle = serving()
    asked = attach(1, DYNAMIC[1], publish_mode=CREATE)
    assert outline(lifecycle.on_attach(asked, 0)) == [f"create {DYNAMIC[1]}"]
    lowest = attach(2, 0, Role.PRODUCER, publish_mode=CREATE)
    assert outline(lifecycle.on_attach(lowest, 0)) == [f"create {DYNAMIC[0]} for a producer"]
    assert outline(created(lifecycle, DYNAMIC[1], 1)) == [f"announce {DYNAMIC[1]}", "attach OK"]
    effects = created(lifecycle, DYNAMIC[0], 1, reserved=True)
    assert outline(effects) == ["attach OK", f"announce {DYNAMIC[0]}"]
    assert message_of(effects[0]).stream_id == DYNAMIC[0]


def test_a_dynamic_stream_exists_for_others_once_it_was_made() -> None:
    """REQUIRE_EXISTING then finds it."""
    lifecycle = serving()
    lifecycle.on_attach(attach(1, DYNAMIC[0], publish_mode=CREATE), 0)
    created(lifecycle, DYNAMIC[0], 1)
    existing = attach(2, DYNAMIC[0], publish_mode=PublishMode.REQUIRE_EXISTING)
    assert outline(lifecycle.on_attach(existing, 0)) == ["attach OK"]


# --- retries


@pytest.mark.spec("DRV-4.8-07")
@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("stream_id", [FRONT, 0])
def test_an_identical_retry_is_answered_identically(role: Role, stream_id: int) -> None:
    """E2: also for the one that asked for any stream, however late, and it makes and extends nothing."""
    lifecycle = serving()
    request = attach(5, stream_id, role, publish_mode=CREATE)
    effects = lifecycle.on_attach(request, 0)
    for order in [effect for effect in effects if isinstance(effect, CreateEpoch)]:
        effects = created(lifecycle, order.stream_id, 2, reserved=order.reserve)
    (first,) = [effect for effect in effects if isinstance(effect, Send)]
    streams = len(lifecycle.streams)
    assert lifecycle.on_attach(request, LEASE_NS - 1) == [first]
    assert (len(lifecycle.leases), len(lifecycle.streams)) == (1, streams)
    assert f"revoked {message_of(first).lease_id} EXPIRED" in outline(lifecycle.on_tick(LEASE_NS))


@pytest.mark.spec("DRV-4.2-03")
def test_a_retry_is_answered_with_what_is_current() -> None:
    """§4.2, E2: the same lease with the epoch, the URIs and the expiry of now."""
    lifecycle = serving()
    (first,) = lifecycle.on_attach(attach(5), 0)
    before = message_of(first)
    lifecycle.on_attach(attach(7, role=Role.PRODUCER), 0)
    created(lifecycle, FRONT, 2, reserved=True)
    lifecycle.on_keepalive(keepalive(before.lease_id, 5), 500)
    (again,) = lifecycle.on_attach(attach(5), 600)
    after = message_of(again)
    assert (after.lease_id, after.correlation_id, after.stream_id) == (before.lease_id, 1, FRONT)
    assert (after.epoch, after.lease_expiry_timestamp_ns) == (2, 500 + LEASE_NS)
    announce = lifecycle.announce(FRONT, 600)
    assert announce is not None
    assert after.header_region_uri == announce.header_region_uri != before.header_region_uri
    assert [pool.region_uri for pool in after.payload_pools] == [pool.region_uri for pool in announce.payload_pools]


def test_a_retry_while_the_stream_has_no_epoch_is_answered_with_the_next() -> None:
    """The producer has just gone: one answer, with the epoch that comes, to the lease that is there."""
    lifecycle = serving()
    (first,) = lifecycle.on_attach(attach(5), 0)
    lifecycle.on_attach(attach(7, role=Role.PRODUCER), 0)
    effects = created(lifecycle, FRONT, 2, reserved=True)
    producer = next(message_of(effect) for effect in effects if isinstance(effect, Send))
    lifecycle.on_detach(detach(producer.lease_id, 7, role=Role.PRODUCER), 1)
    assert lifecycle.on_attach(attach(5), 2) == []
    assert lifecycle.on_attach(attach(5), 3) == []
    answers = [message_of(effect) for effect in created(lifecycle, FRONT, 3) if isinstance(effect, Send)]
    assert [(answer.lease_id, answer.epoch) for answer in answers] == [(message_of(first).lease_id, 3)]
    assert len(lifecycle.leases) == 1
    assert not [effect for effect in created(lifecycle, FRONT, 4) if isinstance(effect, Send)], "answered once"


@pytest.mark.parametrize("role", Role)
def test_a_retry_may_name_the_stream_that_the_first_was_given(role: Role) -> None:
    """Who asked for any stream knows its id since, and asks about that."""
    lifecycle = serving()
    (order,) = lifecycle.on_attach(attach(5, 0, role, publish_mode=CREATE), 0)
    assert isinstance(order, CreateEpoch)
    again = attach(5, order.stream_id, role, publish_mode=CREATE)
    assert lifecycle.on_attach(again, 1) == []
    created(lifecycle, order.stream_id, 2, reserved=order.reserve)
    assert outline(lifecycle.on_attach(again, 2)) == ["attach OK"]
    assert len(lifecycle.leases) == 1


# --- memory that takes long


def reports(effects: list[Effect]) -> list[Report]:
    return [effect for effect in effects if isinstance(effect, Report)]


def test_an_attach_that_waits_for_memory_is_reported_until_it_is_answered() -> None:
    """After 200 ms and then every second, with its correlation id, the stream, the bytes and the time."""
    lifecycle = serving()
    lifecycle.on_attach(attach(5, role=Role.PRODUCER, correlation_id=77), 0)
    reported = [(now_ns, reports(lifecycle.on_tick(now_ns))) for now_ns in range(0, 3 * SECOND_NS, 50_000_000)]
    assert [(now_ns, found) for now_ns, found in reported if found] == [
        (now_ns, [Report(77, FRONT, RING.size_bytes, now_ns)])
        for now_ns in (FIRST_REPORT_NS, FIRST_REPORT_NS + REPORT_EVERY_NS, FIRST_REPORT_NS + 2 * REPORT_EVERY_NS)
    ]
    created(lifecycle, FRONT, 2, reserved=True)
    assert not reports(lifecycle.on_tick(10 * SECOND_NS))


def test_a_quick_attach_is_not_reported() -> None:
    """Nor is one that was refused, or that the driver's end has answered."""
    lifecycle = serving()
    lifecycle.on_attach(attach(5, role=Role.PRODUCER), 0)
    assert not reports(lifecycle.on_tick(FIRST_REPORT_NS - 1))
    created(lifecycle, FRONT, 2, reserved=True)
    lifecycle.on_attach(attach(6, role=Role.PRODUCER), 0)
    assert not reports(lifecycle.on_tick(FIRST_REPORT_NS))


def test_a_request_stays_pending_however_long_its_memory_takes() -> None:
    """E2: an hour and many retries later it is granted once, under its own id."""
    lifecycle = serving()
    lifecycle.on_attach(attach(5, role=Role.PRODUCER, correlation_id=77), 0)
    for minute in range(60):
        now_ns = minute * 60 * SECOND_NS
        assert lifecycle.on_attach(attach(5, role=Role.PRODUCER, correlation_id=77), now_ns) == []
        lifecycle.on_tick(now_ns)
    effects = created(lifecycle, FRONT, 2, reserved=True)
    assert outline(effects).count("attach OK") == 1


@pytest.mark.spec("DRV-4.8-07")
@pytest.mark.parametrize(
    "request_",
    [
        attach(5, role=Role.PRODUCER),
        attach(5, 0, Role.PRODUCER, publish_mode=CREATE),
        attach(5, 0, Role.CONSUMER, publish_mode=CREATE),
    ],
)
def test_a_retry_while_its_memory_is_made_is_swallowed(request_: ShmAttachRequest) -> None:
    """One answer is on its way; a second stream or creation is not."""
    lifecycle = serving()
    (order,) = lifecycle.on_attach(request_, 0)
    assert isinstance(order, CreateEpoch)
    assert lifecycle.on_attach(request_, 1) == []
    effects = created(lifecycle, order.stream_id, 2, reserved=order.reserve)
    assert outline(effects).count("attach OK") == 1
    assert (len(lifecycle.leases), lifecycle.counts["attaches_refused"]) == (1, 0)


def test_a_retry_of_what_was_refused_is_decided_anew() -> None:
    """A refusal holds nothing, so the next try may succeed."""
    lifecycle = with_producer()
    again = attach(8, role=Role.PRODUCER)
    assert outline(lifecycle.on_attach(again, 0)) == ["attach REJECTED"]
    lifecycle.on_detach(detach(500, 7, role=Role.PRODUCER), 0)
    created(lifecycle, FRONT, 3)
    assert outline(lifecycle.on_attach(again, 0)) == [f"create {FRONT} for a producer"]


def test_the_same_correlation_id_of_another_client_is_no_retry() -> None:
    """E3: clients choose their ids and may collide; each gets its own lease and its own answer."""
    lifecycle = serving()
    first = only_message(lifecycle.on_attach(attach(1, correlation_id=77), 0))
    second = only_message(lifecycle.on_attach(attach(2, correlation_id=77), 0))
    assert (first.lease_id, second.lease_id) == (500, 501)


def test_after_the_end_of_a_lease_the_same_request_gets_a_new_one() -> None:
    """A dead lease answers no retry."""
    lifecycle = serving()
    first = only_message(lifecycle.on_attach(attach(1), 0))
    lifecycle.on_detach(detach(first.lease_id, 1), 0)
    assert only_message(lifecycle.on_attach(attach(1), 0)).lease_id == first.lease_id + 1
