# SPDX-License-Identifier: Apache-2.0
"""The driver's decisions, one by one: what is answered, what is announced, what is made, and in which order."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import pytest

from tensorpool.control.provisioning import ProvisionRequest
from tensorpool.driver import lifecycle as module
from tensorpool.driver.lifecycle import (
    FIRST_REPORT_NS,
    REPORT_EVERY_NS,
    RETRY_CREATION_NS,
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
from tensorpool.driver.streams import NoStream, Stream
from tensorpool.wire.control import ClockDomain, ConsumerConfig, ConsumerHello, Mode
from tensorpool.wire.driver import (
    HugepagesPolicy,
    LeaseRevokeReason,
    PublishMode,
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmAttachResponse,
    ShmDetachResponse,
    ShmDriverShutdown,
    ShmDriverShutdownRequest,
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
    created,
    detach,
    driver_config,
    epoch_of,
    keepalive,
    serving,
)
from tests.support import messages

HOW_TO_CREATE = "; pass create=True, or see `tensorpool ls`"
CREATE = PublishMode.EXISTING_OR_CREATE
MAX_TEXT_BYTES = 1024


def outline(effects: list[Effect]) -> list[str]:
    """Effects in words, in their order."""
    return [_in_words(effect) for effect in effects]


def _in_words(effect: Effect) -> str:
    match effect:
        case Announce(stream_id):
            return f"announce {stream_id}"
        case CreateEpoch(stream_id, _, reserve):
            return f"create {stream_id}" + (" for a producer" if reserve else "")
        case DropStream(stream_id):
            return f"drop {stream_id}"
        case Report(correlation_id):
            return f"report {correlation_id}"
        case Exit():
            return "exit"
        case Send(ShmAttachResponse(code=code)):
            return f"attach {code.name}"
        case Send(ShmDetachResponse(code=code)):
            return f"detach {code.name}"
        case Send(ShmLeaseRevoked() as notice):
            return f"revoked {notice.lease_id} {notice.reason.name}"
        case Send(ShmDriverShutdown(reason=reason)):
            return f"shutdown {reason.name}"
        case Send(ConsumerConfig() as answer):
            return f"ids {answer.descriptor_stream_id} {answer.control_stream_id}"
    raise AssertionError(effect)


def message_of(effect: Effect) -> Any:
    assert isinstance(effect, Send)
    return effect.message


def only_message(effects: list[Effect]) -> Any:
    """The message of the one effect there is."""
    (effect,) = effects
    return message_of(effect)


def refusal(effects: list[Effect]) -> tuple[ResponseCode, str]:
    """Code and text of the one answer, which carries nothing else (§4.2)."""
    answer = only_message(effects)
    assert isinstance(answer, ShmAttachResponse)
    assert answer == ShmAttachResponse(
        correlation_id=answer.correlation_id, code=answer.code, error_message=answer.error_message
    )
    return answer.code, answer.error_message


def with_producer(client_id: int = 7, *, now_ns: int = 0, epoch: int = 2) -> Lifecycle:
    """A driver whose stream FRONT has a producer, lease 500."""
    lifecycle = serving(now_ns=now_ns)
    lifecycle.on_attach(attach(client_id, role=Role.PRODUCER), now_ns)
    created(lifecycle, FRONT, epoch, now_ns, reserved=True)
    return lifecycle


# --- start and cadence


def test_configured_streams_are_provisioned_at_start() -> None:
    """Memory for each, sparse, since no producer writes it yet (C4, E13)."""
    lifecycle = Lifecycle(driver_config(), first_lease_id=500)
    assert lifecycle.on_start(0) == [CreateEpoch(FRONT, RING, False), CreateEpoch(REAR, RING, False)]


def test_a_stream_is_announced_as_soon_as_its_memory_is_there_and_not_before() -> None:
    """Without an epoch there is nothing to announce; with one it is announced at once."""
    lifecycle = Lifecycle(driver_config(), first_lease_id=500)
    lifecycle.on_start(0)
    assert lifecycle.on_tick(0) == []
    assert lifecycle.announce(FRONT, 1) is None
    assert created(lifecycle, FRONT, 7, 1) == [Announce(FRONT)]
    assert outline(lifecycle.on_tick(PERIOD_NS)) == [f"announce {FRONT}"]


@pytest.mark.spec("DRV-8-03", "DRV-8-04", "WIRE-10.1.1-03")
def test_an_announce_tells_the_epoch_and_its_producer() -> None:
    """Every field, with producerId 0 while there is none (§8)."""
    lifecycle = serving()
    announce = lifecycle.announce(FRONT, 17)
    assert announce is not None
    assert (announce.stream_id, announce.producer_id, announce.epoch) == (FRONT, 0, 1)
    assert (announce.announce_timestamp_ns, announce.announce_clock_domain) == (17, ClockDomain.MONOTONIC)
    assert (announce.layout_version, announce.header_nslots, announce.header_slot_bytes) == (1, RING.nslots, 256)
    assert announce.header_region_uri == epoch_of(FRONT, 1).header_region_uri
    pools = [(p.pool_id, p.pool_nslots, p.stride_bytes, p.region_uri) for p in announce.payload_pools]
    uris = epoch_of(FRONT, 1).pool_region_uris
    assert pools == [(1, RING.nslots, 64, uris[0]), (2, RING.nslots, 128, uris[1])]
    announce = with_producer(client_id=7).announce(FRONT, 18)
    assert announce is not None
    assert (announce.producer_id, announce.epoch) == (7, 2)
    assert lifecycle.announce(4711, 17) is None


@pytest.mark.spec("WIRE-10.1.1-01")
def test_announces_come_once_per_period() -> None:
    """On the turn that finds the period over, and not again before the next is."""
    lifecycle = serving(now_ns=10)
    both = [f"announce {FRONT}", f"announce {REAR}"]
    assert lifecycle.on_tick(10 + PERIOD_NS - 1) == []
    assert outline(lifecycle.on_tick(10 + PERIOD_NS)) == both
    assert lifecycle.on_tick(10 + PERIOD_NS) == []
    assert outline(lifecycle.on_tick(10 + 5 * PERIOD_NS)) == both  # a late turn announces once
    assert lifecycle.on_tick(10 + 6 * PERIOD_NS - 1) == []


def test_an_idle_turn_returns_nothing_and_allocates_nothing() -> None:
    """Ten thousand turns between two announces leave no block behind, with leases and streams to look after."""
    lifecycle = serving()
    for client_id in range(1, 100):
        lifecycle.on_attach(attach(client_id), 0)
    lifecycle.on_tick(PERIOD_NS)
    now_ns = PERIOD_NS + 1
    results = {id(lifecycle.on_tick(now_ns)) for _ in range(100)}
    grown = []
    for _ in range(3):  # other threads of this process allocate now and then, not in every round
        before = sys.getallocatedblocks()
        for _ in range(10_000):
            lifecycle.on_tick(now_ns)
        grown.append(sys.getallocatedblocks() - before)
    assert len(results) == 1  # not even an empty list
    assert lifecycle.on_tick(now_ns) == []
    assert min(grown) < 10


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


def test_a_provisioned_stream_gets_its_memory_when_its_producer_comes() -> None:
    """No epoch is made before, none of another size; without a producer it goes like every dynamic stream."""
    lifecycle = serving()
    asked = ProvisionRequest(stream_id=DYNAMIC[0], slots=8, frame_bytes=4096)
    assert lifecycle.provision(asked, 0).ring == asked.ring
    for now_s in (1, 5):
        assert f"create {DYNAMIC[0]}" not in outline(lifecycle.on_tick(now_s * SECOND_NS))
    effects = lifecycle.on_attach(attach(1, DYNAMIC[0], Role.PRODUCER, publish_mode=CREATE), 6 * SECOND_NS)
    assert [effect.ring for effect in effects if isinstance(effect, CreateEpoch)] == [asked.ring]
    larger = ProvisionRequest(stream_id=DYNAMIC[0], slots=9, frame_bytes=4096)
    with pytest.raises(NoStream, match="and a producer"):  # it is attaching
        lifecycle.provision(larger, 6 * SECOND_NS)
    lifecycle.provision(ProvisionRequest(stream_id=DYNAMIC[1], slots=1, frame_bytes=1), 7 * SECOND_NS)
    lifecycle.on_tick(8 * SECOND_NS)
    assert DropStream(DYNAMIC[1]) in lifecycle.on_tick(39 * SECOND_NS)
    lifecycle.drain(ShutdownReason.NORMAL, "", 40 * SECOND_NS)
    with pytest.raises(NoStream, match="shutting down"):
        lifecycle.provision(asked, 40 * SECOND_NS)


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


# --- refusals


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (attach(0), ResponseCode.INVALID_PARAMS, "clientId 0 is reserved"),
        (attach(2**32 - 1), ResponseCode.INVALID_PARAMS, "clientId 4294967295 is reserved"),
        (attach(1, 2**32 - 1, publish_mode=CREATE), ResponseCode.INVALID_PARAMS, "streamId 4294967295 is reserved"),
        (attach(1, DYNAMIC[0]), ResponseCode.REJECTED, "stream 20000 does not exist" + HOW_TO_CREATE),
        (
            attach(1, DYNAMIC[0], publish_mode=PublishMode.REQUIRE_EXISTING),
            ResponseCode.REJECTED,
            "stream 20000 does not exist" + HOW_TO_CREATE,
        ),
        (attach(1, 0), ResponseCode.REJECTED, "stream 0 does not exist" + HOW_TO_CREATE),
        (
            attach(1, 555, publish_mode=CREATE),
            ResponseCode.INVALID_PARAMS,
            "stream 555 is outside driver.stream_id_range 20000-20002",
        ),
        (
            attach(1, layout_version=2),
            ResponseCode.REJECTED,
            "layout_version: expected 2, this driver has 1; update the older of the two",
        ),
    ],
)
def test_what_is_wrong_or_unwanted_is_refused_by_code_and_text(
    request_: ShmAttachRequest, code: ResponseCode, text: str
) -> None:
    """§4.6: a wrong parameter is INVALID_PARAMS, a lawful wish that is denied is REJECTED; nothing is kept."""
    lifecycle = serving()
    assert refusal(lifecycle.on_attach(request_, 0)) == (code, text)
    assert (len(lifecycle.leases), len(lifecycle.streams)) == (0, 2)
    assert lifecycle.counts["attaches_refused"] == 1


@pytest.mark.spec("DRV-4.3-02")
@pytest.mark.parametrize("layout_version", [0, 1, 2**32 - 1])
def test_the_own_layout_version_or_none_is_accepted(layout_version: int) -> None:
    """E16, E17: zero and all ones are absent."""
    assert outline(serving().on_attach(attach(1, layout_version=layout_version), 0)) == ["attach OK"]


def test_dynamic_streams_may_be_forbidden() -> None:
    """Then an unknown id is denied by policy, whatever the mode."""
    lifecycle = serving({"policies.allow_dynamic_streams": False})
    code, text = refusal(lifecycle.on_attach(attach(1, DYNAMIC[0], publish_mode=CREATE), 0))
    assert code is ResponseCode.REJECTED
    assert text == (
        "stream 20000 is not configured and policies.allow_dynamic_streams is false; configure it, or set that to true"
    )


@pytest.mark.spec("DRV-4.3-06", "DRV-4.3-07")
@pytest.mark.parametrize(
    ("hugepages", "pages", "text"),
    [
        (
            False,
            HugepagesPolicy.HUGEPAGES,
            "hugepages are required; shm.base_dir is not on hugetlbfs: mount one there, or ask for any pages",
        ),
        (
            True,
            HugepagesPolicy.STANDARD,
            "standard pages are required; shm.base_dir is on hugetlbfs: choose another, or ask for any pages",
        ),
        (False, HugepagesPolicy.STANDARD, None),
        (True, HugepagesPolicy.HUGEPAGES, None),
        (False, HugepagesPolicy.UNSPECIFIED, None),
        (True, HugepagesPolicy.UNSPECIFIED, None),
    ],
)
def test_pages_that_the_regions_do_not_have_are_refused(
    hugepages: bool, pages: HugepagesPolicy, text: str | None
) -> None:
    """E38: compared with what there is; who does not care gets what there is."""
    effects = serving(hugepages=hugepages).on_attach(attach(1, pages=pages), 0)
    if text is None:
        assert outline(effects) == ["attach OK"]
    else:
        assert refusal(effects) == (ResponseCode.REJECTED, text)


@pytest.mark.spec("DRV-4.3-09")
@pytest.mark.parametrize("role", Role)
def test_a_stream_without_pools_is_an_invalid_parameter(role: Role) -> None:
    """§4.3; nothing is ever made for it, also not by the clock."""
    lifecycle = serving()
    lifecycle.streams._streams[77] = Stream(77, "bare", None)
    effects = lifecycle.on_attach(attach(1, 77, role), 0)
    assert refusal(effects) == (
        ResponseCode.INVALID_PARAMS,
        "stream 77 has no payload pools; give its profile one",
    )
    assert not any(isinstance(effect, CreateEpoch) for effect in lifecycle.on_tick(PERIOD_NS))
    assert lifecycle.announce(77, 0) is None


@pytest.mark.spec("DRV-4.8-05")
@pytest.mark.parametrize("second", [attach(5, REAR), attach(5, FRONT, Role.PRODUCER), attach(5, correlation_id=2)])
def test_a_client_holds_one_lease(second: ShmAttachRequest) -> None:
    """E1: another stream, another role or another attempt of the same client is rejected; the lease stays."""
    lifecycle = serving()
    lifecycle.on_attach(attach(5), 0)
    code, text = refusal(lifecycle.on_attach(second, 0))
    assert code is ResponseCode.REJECTED
    assert text == f"client 5 already holds lease 500 on stream {FRONT}; one client, one lease"
    assert len(lifecycle.leases) == 1


def test_a_client_that_waits_for_memory_cannot_ask_for_more() -> None:
    """A promised lease counts as one that is held."""
    lifecycle = serving()
    lifecycle.on_attach(attach(5, role=Role.PRODUCER), 0)
    code, text = refusal(lifecycle.on_attach(attach(5, REAR), 0))
    assert (code, text) == (ResponseCode.REJECTED, f"client 5 is already attaching to stream {FRONT}")


@pytest.mark.spec("DRV-5-01")
def test_a_second_producer_learns_which_client_is_attached() -> None:
    """§5: the client and its lease, so that an operator can act."""
    lifecycle = with_producer(client_id=7)
    code, text = refusal(lifecycle.on_attach(attach(8, role=Role.PRODUCER), 0))
    assert code is ResponseCode.REJECTED
    assert text == (f"stream {FRONT} already has a producer (client 7, lease 500); detach it or use another stream")


@pytest.mark.spec("DRV-5-01")
def test_a_second_producer_is_refused_while_the_first_ones_memory_is_made() -> None:
    """The promise is exclusive too; when it fails the stream is free again."""
    lifecycle = serving()
    lifecycle.on_attach(attach(7, role=Role.PRODUCER), 0)
    second = attach(8, role=Role.PRODUCER)
    code, text = refusal(lifecycle.on_attach(second, 0))
    assert (code, text) == (ResponseCode.REJECTED, f"stream {FRONT}: another producer is attaching; use another stream")
    lifecycle.on_epoch_failed(FRONT, True, "full", 0)
    assert outline(lifecycle.on_attach(second, 0)) == [f"create {FRONT} for a producer"]


def test_another_stream_has_another_producer() -> None:
    """Exclusive by stream, not by driver."""
    lifecycle = with_producer()
    assert outline(lifecycle.on_attach(attach(8, REAR, Role.PRODUCER), 0)) == [f"create {REAR} for a producer"]


def test_max_leases_counts_the_promised_ones_too() -> None:
    """One held and one waiting fill a limit of two; an end makes room."""
    lifecycle = serving({"policies.max_leases": 2})
    lifecycle.on_attach(attach(1), 0)
    lifecycle.on_attach(attach(2, REAR, Role.PRODUCER), 0)
    code, text = refusal(lifecycle.on_attach(attach(3), 0))
    assert code is ResponseCode.REJECTED
    assert "policies.max_leases" in text
    lifecycle.on_detach(detach(500, 1), 0)
    assert outline(lifecycle.on_attach(attach(3), 0)) == ["attach OK"]


def test_max_streams_bounds_what_clients_create() -> None:
    """The refused one is not left behind half made."""
    lifecycle = serving({"policies.max_streams": 3})
    assert outline(lifecycle.on_attach(attach(1, 0, publish_mode=CREATE), 0)) == [f"create {DYNAMIC[0]}"]
    code, text = refusal(lifecycle.on_attach(attach(2, 0, publish_mode=CREATE), 0))
    assert (code, text) == (
        ResponseCode.REJECTED,
        "there are already 3 streams (policies.max_streams); raise it, or end some",
    )
    assert len(lifecycle.streams) == 3


def test_a_used_up_range_refuses_only_those_who_need_a_new_id() -> None:
    """An existing stream of the range is open to all."""
    lifecycle = serving()
    for client_id, stream_id in enumerate(DYNAMIC, 1):
        lifecycle.on_attach(attach(client_id, 0, publish_mode=CREATE), 0)
        created(lifecycle, stream_id, 1)
    code, text = refusal(lifecycle.on_attach(attach(9, 0, publish_mode=CREATE), 0))
    assert (code, text) == (
        ResponseCode.REJECTED,
        "all stream ids of 20000-20002 are taken; enlarge driver.stream_id_range",
    )
    assert outline(lifecycle.on_attach(attach(9, DYNAMIC[2]), 0)) == ["attach OK"]


def test_attaches_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood while memory is made is refused beyond the bound; those within it are answered."""
    monkeypatch.setattr(module, "MAX_PENDING_ATTACHES", 3)
    lifecycle = Lifecycle(driver_config(), first_lease_id=500)
    lifecycle.on_start(0)
    for client_id in (1, 2, 3):
        assert lifecycle.on_attach(attach(client_id), 0) == []
    code, text = refusal(lifecycle.on_attach(attach(4), 0))
    assert (code, text) == (ResponseCode.REJECTED, "3 attaches wait for memory; try again later")
    assert outline(created(lifecycle, FRONT, 1)) == [f"announce {FRONT}", *["attach OK"] * 3]
    assert outline(lifecycle.on_attach(attach(4), 0)) == ["attach OK"]


def test_a_request_that_cannot_be_understood_is_answered_by_its_correlation_id() -> None:
    """E33: attach and detach each with their own response, and counted."""
    lifecycle = serving()
    code, text = refusal(lifecycle.on_malformed_attach(-4, ResponseCode.UNSUPPORTED, "version 2"))
    assert (code, text) == (ResponseCode.UNSUPPORTED, "version 2")
    answer = only_message(lifecycle.on_malformed_detach(-5, ResponseCode.INVALID_PARAMS, "role 9"))
    assert answer == ShmDetachResponse(correlation_id=-5, code=ResponseCode.INVALID_PARAMS, error_message="role 9")
    assert (lifecycle.counts["malformed_attaches"], lifecycle.counts["malformed_detaches"]) == (1, 1)


@pytest.mark.spec("DRV-4.2-35", "DRV-4.2-36")
@pytest.mark.parametrize("text", ["x" * 5000, "ä" * 600, "x" * 1023 + "ä", "\udcff" * 1025])
def test_long_texts_are_cut_between_characters_at_1024_bytes(text: str) -> None:
    """E39: in every message of the driver, also for bytes that are no text."""
    lifecycle = with_producer()
    messages = [only_message(lifecycle.on_malformed_attach(1, ResponseCode.INVALID_PARAMS, text))]
    messages.append(only_message(lifecycle.on_malformed_detach(1, ResponseCode.INVALID_PARAMS, text)))
    revoked, _ = lifecycle.revoke(500, text, 0)
    lifecycle.drain(ShutdownReason.ADMIN, text, 0)
    *_, notice, _ = lifecycle.on_tick(2 * SECOND_NS)
    messages += [message_of(revoked), message_of(notice)]
    for message in messages:
        assert len(message.error_message.encode("utf-8", "surrogateescape")) <= MAX_TEXT_BYTES
        assert text.startswith(message.error_message)
        assert message.decode_body(message.encode_body()) == message


def test_a_text_that_fits_is_not_touched() -> None:
    """1024 bytes exactly, and bytes that are no text."""
    lifecycle = serving()
    for text in ("x" * 1024, "ä" * 512, "\udcff" * 1024):
        answer = only_message(lifecycle.on_malformed_attach(1, ResponseCode.INVALID_PARAMS, text))
        assert answer.error_message == text


# --- memory that cannot be made


def test_a_failed_creation_is_answered_with_its_text_and_harms_no_other_client() -> None:
    """The producer gets INTERNAL_ERROR and the bill; consumers, epoch and announces stay; it may try again."""
    lifecycle = serving()
    lifecycle.on_attach(attach(3), 0)
    lifecycle.on_attach(attach(7, role=Role.PRODUCER), 0)
    assert refusal(lifecycle.on_epoch_failed(FRONT, True, "needs 9 bytes, 3 are free", 1)) == (
        ResponseCode.INTERNAL_ERROR,
        "needs 9 bytes, 3 are free",
    )
    announce = lifecycle.announce(FRONT, 2)
    assert announce is not None
    assert (announce.epoch, announce.producer_id, len(lifecycle.leases)) == (1, 0, 1)
    assert outline(lifecycle.on_tick(2 * PERIOD_NS)) == [f"announce {FRONT}", f"announce {REAR}"]
    assert lifecycle.counts["epochs_failed"] == 1
    again = attach(7, role=Role.PRODUCER, correlation_id=2)
    assert outline(lifecycle.on_attach(again, 0)) == [f"create {FRONT} for a producer"]


@pytest.mark.parametrize("role", Role)
def test_a_dynamic_stream_whose_memory_cannot_be_made_is_forgotten(role: Role) -> None:
    """It was never announced: its id is free again and no creation is tried by itself."""
    lifecycle = serving()
    lifecycle.on_attach(attach(1, 0, role, publish_mode=CREATE), 0)
    effects = lifecycle.on_epoch_failed(DYNAMIC[0], role is Role.PRODUCER, "full", 0)
    assert refusal(effects) == (ResponseCode.INTERNAL_ERROR, "full")
    assert lifecycle.streams.get(DYNAMIC[0]) is None
    assert outline(lifecycle.on_tick(9 * SECOND_NS)) == [f"announce {FRONT}", f"announce {REAR}"]
    again = attach(1, 0, role, publish_mode=CREATE)
    expected = f"create {DYNAMIC[0]}" + (" for a producer" if role is Role.PRODUCER else "")
    assert outline(lifecycle.on_attach(again, 0)) == [expected]


def test_a_dynamic_stream_that_was_once_ready_is_kept_when_its_next_epoch_fails() -> None:
    """Others know it by then."""
    lifecycle = serving()
    lifecycle.on_attach(attach(1, DYNAMIC[0], Role.PRODUCER, publish_mode=CREATE), 0)
    created(lifecycle, DYNAMIC[0], 1, reserved=True)
    lifecycle.on_detach(detach(500, 1, DYNAMIC[0], Role.PRODUCER), 0)
    assert lifecycle.on_epoch_failed(DYNAMIC[0], False, "full", 0) == []
    assert lifecycle.streams.get(DYNAMIC[0]) is not None


def test_waiting_consumers_fail_with_the_sparse_epoch_and_a_waiting_producer_gets_its_own_try() -> None:
    """Each is refused by the outcome of its own kind of memory only."""
    lifecycle = Lifecycle(driver_config(), first_lease_id=500)
    lifecycle.on_start(0)
    lifecycle.on_attach(attach(1), 0)
    lifecycle.on_attach(attach(7, role=Role.PRODUCER), 0)
    effects = lifecycle.on_epoch_failed(FRONT, False, "full", 0)
    assert outline(effects) == ["attach INTERNAL_ERROR", f"create {FRONT} for a producer"]
    assert outline(lifecycle.on_epoch_failed(FRONT, True, "full", 0)) == ["attach INTERNAL_ERROR"]


def test_a_producer_that_fails_leaves_the_sparse_epoch_to_the_consumers_who_wait() -> None:
    """Gigabytes may be missing where a sparse file is not."""
    lifecycle = serving()
    lifecycle.on_attach(attach(7, DYNAMIC[0], Role.PRODUCER, publish_mode=CREATE), 0)
    assert lifecycle.on_attach(attach(1, DYNAMIC[0]), 0) == []
    effects = lifecycle.on_epoch_failed(DYNAMIC[0], True, "full", 0)
    assert outline(effects) == ["attach INTERNAL_ERROR", f"create {DYNAMIC[0]}"]
    assert outline(created(lifecycle, DYNAMIC[0], 2)) == [f"announce {DYNAMIC[0]}", "attach OK"]


def test_a_configured_stream_is_tried_again_by_itself_but_not_at_once() -> None:
    """A full mount is not hammered; once it has room the stream is back."""
    lifecycle = Lifecycle(driver_config({"policies.announce_period_ms": 300}), first_lease_id=500)
    lifecycle.on_start(0)
    created(lifecycle, REAR, 1)
    lifecycle.on_tick(0)
    lifecycle.on_epoch_failed(FRONT, False, "full", 100)
    times = [now_ns for now_ns in range(0, 2 * SECOND_NS, SECOND_NS // 100) if _tries(lifecycle, now_ns)]
    assert times == [1_200_000_000]  # the first cadence after the second is over, then none while it is under way
    assert times[0] >= 100 + RETRY_CREATION_NS
    assert outline(created(lifecycle, FRONT, 2, times[0])) == [f"announce {FRONT}"]


def _tries(lifecycle: Lifecycle, now_ns: int) -> bool:
    return any(isinstance(effect, CreateEpoch) for effect in lifecycle.on_tick(now_ns))


def test_an_outcome_for_a_stream_that_is_unknown_changes_nothing() -> None:
    """Neither memory nor failure of what is not there."""
    lifecycle = serving()
    assert created(lifecycle, 4711, 1) == []
    assert lifecycle.on_epoch_failed(4711, True, "full", 0) == []
    assert len(lifecycle.streams) == 2


# --- streams that no client uses any more

LINGER_NS = 10 * SECOND_NS


def with_dynamic_stream() -> Lifecycle:
    """A driver that has made DYNAMIC[0] for consumer 1, lease 500, and lets streams linger for ten seconds."""
    lifecycle = serving({"policies.dynamic_stream_linger_ms": LINGER_NS // 1_000_000})
    lifecycle.on_attach(attach(1, DYNAMIC[0], publish_mode=CREATE), 0)
    created(lifecycle, DYNAMIC[0], 1)
    return lifecycle


def drops(lifecycle: Lifecycle, until_ns: int, *, from_ns: int = 0) -> list[int]:
    """When, turn by turn at every announce, a stream was dropped."""
    times = range(from_ns, until_ns + 1, PERIOD_NS)
    return [now_ns for now_ns in times if any("drop" in words for words in outline(lifecycle.on_tick(now_ns)))]


def test_a_dynamic_stream_goes_some_time_after_its_last_lease() -> None:
    """Then it is announced no more, its id is free, and who wants it has it made again."""
    lifecycle = with_dynamic_stream()
    lifecycle.on_detach(detach(500, 1, DYNAMIC[0]), SECOND_NS)
    assert drops(lifecycle, LINGER_NS, from_ns=SECOND_NS) == []
    effects = outline(lifecycle.on_tick(SECOND_NS + LINGER_NS))
    assert effects == [f"drop {DYNAMIC[0]}", f"announce {FRONT}", f"announce {REAR}"]
    assert lifecycle.announce(DYNAMIC[0], 0) is None
    assert outline(lifecycle.on_attach(attach(2, DYNAMIC[0]), 0)) == ["attach REJECTED"]
    again = attach(2, 0, Role.PRODUCER, publish_mode=CREATE)
    assert outline(lifecycle.on_attach(again, 0)) == [f"create {DYNAMIC[0]} for a producer"]


def test_a_stream_that_is_used_or_configured_is_never_dropped() -> None:
    """However long it lasts."""
    lifecycle = with_dynamic_stream()
    for now_ns in range(0, 5 * LINGER_NS, SECOND_NS):
        lifecycle.on_keepalive(keepalive(500, 1, DYNAMIC[0]), now_ns)
        assert not any("drop" in words for words in outline(lifecycle.on_tick(now_ns)))
    assert len(lifecycle.streams) == 3


def test_a_stream_lingers_from_its_last_lease_not_from_its_first_silence() -> None:
    """A client that comes and goes between two announces counts too."""
    lifecycle = with_dynamic_stream()
    lifecycle.on_detach(detach(500, 1, DYNAMIC[0]), 0)
    assert drops(lifecycle, LINGER_NS - SECOND_NS) == []
    lifecycle.on_attach(attach(2, DYNAMIC[0]), LINGER_NS - 2)
    lifecycle.on_detach(detach(501, 2, DYNAMIC[0]), LINGER_NS - 1)
    assert drops(lifecycle, 3 * LINGER_NS, from_ns=LINGER_NS) == [2 * LINGER_NS]


def test_a_stream_whose_memory_is_being_made_is_not_dropped() -> None:
    """The client that waits for it gets it; it lingers anew afterwards."""
    lifecycle = with_dynamic_stream()
    lifecycle.on_detach(detach(500, 1, DYNAMIC[0]), 0)
    lifecycle.on_tick(PERIOD_NS)
    lifecycle.on_attach(attach(7, DYNAMIC[0], Role.PRODUCER), PERIOD_NS)
    assert drops(lifecycle, 3 * LINGER_NS, from_ns=2 * PERIOD_NS) == []
    lifecycle.on_epoch_failed(DYNAMIC[0], True, "full", 3 * LINGER_NS)
    first_ns = 3 * LINGER_NS + PERIOD_NS
    assert drops(lifecycle, 5 * LINGER_NS, from_ns=first_ns) == [first_ns + LINGER_NS]


def test_a_stream_between_two_epochs_is_not_dropped() -> None:
    """After its producer's end memory is being made, which a client has to use."""
    lifecycle = with_dynamic_stream()
    lifecycle.on_attach(attach(7, DYNAMIC[0], Role.PRODUCER), 0)
    created(lifecycle, DYNAMIC[0], 2, reserved=True)
    lifecycle.on_detach(detach(500, 1, DYNAMIC[0]), 0)
    lifecycle.on_detach(detach(501, 7, DYNAMIC[0], Role.PRODUCER), 0)
    assert drops(lifecycle, 3 * LINGER_NS) == []
    created(lifecycle, DYNAMIC[0], 3, 3 * LINGER_NS)
    first_ns = 3 * LINGER_NS + PERIOD_NS
    assert drops(lifecycle, 5 * LINGER_NS, from_ns=first_ns) == [first_ns + LINGER_NS]


# --- the end of a lease


@pytest.mark.spec("DRV-4.9-01", "DRV-4.9-05", "DRV-6-04")
def test_detach_is_answered_then_published_then_followed_by_a_new_epoch() -> None:
    """E9: response, revoke, announce; in between nothing is announced, then producerId is 0."""
    lifecycle = with_producer()
    effects = lifecycle.on_detach(detach(500, 7, role=Role.PRODUCER, correlation_id=-3), 70)
    assert outline(effects) == ["detach OK", "revoked 500 DETACHED", f"create {FRONT}"]
    assert effects[:2] == [
        Send(ShmDetachResponse(correlation_id=-3, code=ResponseCode.OK)),
        Send(
            ShmLeaseRevoked(
                timestamp_ns=70,
                lease_id=500,
                stream_id=FRONT,
                client_id=7,
                role=Role.PRODUCER,
                reason=LeaseRevokeReason.DETACHED,
            )
        ),
    ]
    assert lifecycle.announce(FRONT, 71) is None
    assert outline(lifecycle.on_tick(PERIOD_NS)) == [f"announce {REAR}"]
    assert created(lifecycle, FRONT, 3, PERIOD_NS + 1) == [Announce(FRONT)]
    announce = lifecycle.announce(FRONT, PERIOD_NS + 2)
    assert announce is not None
    assert (announce.epoch, announce.producer_id) == (3, 0)


@pytest.mark.spec("DRV-6-03", "DRV-4.9-15", "DRV-4.9-05")
def test_expiry_of_a_producer_is_published_before_any_announce() -> None:
    """One turn finds both due: the revoke comes first, and the stale epoch is not announced again (§7)."""
    lifecycle = with_producer()
    effects = lifecycle.on_tick(LEASE_NS)
    assert outline(effects) == ["revoked 500 EXPIRED", f"create {FRONT}", f"announce {REAR}"]
    assert message_of(effects[0]).error_message == "no keepalive within the grace"
    assert outline(lifecycle.on_tick(LEASE_NS + PERIOD_NS)) == [f"announce {REAR}"]
    assert created(lifecycle, FRONT, 3) == [Announce(FRONT)]


@pytest.mark.spec("DRV-4.9-20")
@pytest.mark.spec("DRV-6-02", "DRV-4.7-05", "DRV-4.9-05")
def test_an_administrative_revoke_ends_a_lease_with_its_reason() -> None:
    """A producer's as an expiry does; an id that is not alive does nothing."""
    lifecycle = with_producer()
    effects = lifecycle.revoke(500, "make room", 3)
    assert outline(effects) == ["revoked 500 REVOKED", f"create {FRONT}"]
    assert message_of(effects[0]).error_message == "make room"
    assert lifecycle.revoke(500, "make room", 4) == []
    assert lifecycle.revoke(1, "", 4) == []


def test_all_leases_that_are_over_end_in_one_turn() -> None:
    """Each published once, and none twice."""
    lifecycle = with_producer()
    for client_id in (1, 2):
        lifecycle.on_attach(attach(client_id), 0)
    lifecycle.on_attach(attach(3, REAR), 1)
    effects = outline(lifecycle.on_tick(LEASE_NS))
    assert effects == [
        "revoked 500 EXPIRED",
        f"create {FRONT}",
        "revoked 501 EXPIRED",
        "revoked 502 EXPIRED",
        f"announce {REAR}",
    ]
    assert outline(lifecycle.on_tick(LEASE_NS + 1)) == ["revoked 503 EXPIRED"]
    assert lifecycle.on_tick(LEASE_NS + 2) == []


@pytest.mark.spec("DRV-7-02")
def test_a_new_producer_waits_for_both_epochs_after_the_end_of_the_last() -> None:
    """§6, §7: one for the end and one for the attach; the grant is never on the epoch of the dead one."""
    lifecycle = with_producer()
    lifecycle.on_tick(LEASE_NS)
    assert lifecycle.on_attach(attach(8, role=Role.PRODUCER), LEASE_NS) == []
    assert outline(created(lifecycle, FRONT, 3)) == [f"announce {FRONT}", f"create {FRONT} for a producer"]
    effects = created(lifecycle, FRONT, 4, reserved=True)
    assert outline(effects) == ["attach OK", f"announce {FRONT}"]
    assert message_of(effects[0]).epoch == 4


def test_a_consumer_between_two_epochs_waits_for_the_next() -> None:
    """It is not given the dead producer's memory."""
    lifecycle = with_producer()
    lifecycle.on_tick(LEASE_NS)
    assert lifecycle.on_attach(attach(3), LEASE_NS) == []
    effects = created(lifecycle, FRONT, 3, LEASE_NS)
    assert outline(effects) == [f"announce {FRONT}", "attach OK"]
    assert message_of(effects[1]).epoch == 3


@pytest.mark.spec("DRV-4.9-03")
@pytest.mark.parametrize(
    "wrong",
    [detach(501, 7, role=Role.PRODUCER), detach(500, 8, role=Role.PRODUCER), detach(500, 7, REAR), detach(500, 7)],
)
def test_a_detach_with_a_wrong_field_is_rejected_and_changes_nothing(wrong: Any) -> None:
    """E10, E11: lease, client, stream and role must all be right; the text says what was asked for."""
    lifecycle = with_producer()
    answer = only_message(lifecycle.on_detach(wrong, 0))
    text = f"no active lease {wrong.lease_id} of client {wrong.client_id} on stream {wrong.stream_id}"
    assert answer == ShmDetachResponse(correlation_id=2, code=ResponseCode.REJECTED, error_message=text)
    assert len(lifecycle.leases) == 1


@pytest.mark.spec("DRV-4.9-02", "DRV-4.9-20")
def test_a_second_detach_is_rejected_without_a_second_notice() -> None:
    """The end of a lease is published once."""
    lifecycle = with_producer()
    request = detach(500, 7, role=Role.PRODUCER)
    lifecycle.on_detach(request, 0)
    assert outline(lifecycle.on_detach(request, 0)) == ["detach REJECTED"]


@pytest.mark.spec("DRV-4.4-04")
def test_only_a_right_keepalive_keeps_a_lease() -> None:
    """E5, E6: wrong ones are counted and have no effect."""
    lifecycle = with_producer()
    for message in (
        keepalive(500, 8, role=Role.PRODUCER),
        keepalive(500, 7, REAR, Role.PRODUCER),
        keepalive(500, 7, role=Role.CONSUMER),
        keepalive(499, 7, role=Role.PRODUCER),
    ):
        lifecycle.on_keepalive(message, LEASE_NS - 1)
    assert lifecycle.counts["keepalives_wrong_fields"] == 3
    assert lifecycle.counts["keepalives_unknown_lease"] == 1
    assert outline(lifecycle.on_tick(LEASE_NS))[0] == "revoked 500 EXPIRED"
    lifecycle.on_keepalive(keepalive(500, 7, role=Role.PRODUCER), LEASE_NS)
    assert (len(lifecycle.leases), lifecycle.counts["keepalives_unknown_lease"]) == (0, 2)


@pytest.mark.spec("DRV-4.4-03")
def test_a_right_keepalive_moves_the_expiry() -> None:
    """A grace period from the last one."""
    lifecycle = with_producer()
    lifecycle.on_keepalive(keepalive(500, 7, role=Role.PRODUCER), LEASE_NS - 1)
    assert "revoked 500 EXPIRED" not in outline(lifecycle.on_tick(2 * LEASE_NS - 2))
    assert outline(lifecycle.on_tick(2 * LEASE_NS - 1))[0] == "revoked 500 EXPIRED"


def test_a_stall_of_the_driver_expires_no_lease() -> None:
    """Every lease gets a whole grace period from the moment the driver is back."""
    lifecycle = with_producer()
    lifecycle.on_attach(attach(3), 0)
    back_ns = 50 * SECOND_NS
    lifecycle.on_stall(back_ns)
    assert outline(lifecycle.on_tick(back_ns)) == [f"announce {FRONT}", f"announce {REAR}"]
    assert not any("revoked" in words for words in outline(lifecycle.on_tick(back_ns + LEASE_NS - 1)))
    assert outline(lifecycle.on_tick(back_ns + LEASE_NS))[0] == "revoked 500 EXPIRED"
    assert lifecycle.counts["stalls"] == 1


def test_clients_read_stamps_and_the_driver_counts_by_its_own_clock() -> None:
    """C8: every stamp is in the domain of the announces; no deadline moves by that."""
    offset_ns = 10**18
    lifecycle = serving()
    lifecycle.stamp_offset_ns = offset_ns
    lifecycle.on_attach(attach(7, role=Role.PRODUCER), 0)
    granted, _ = created(lifecycle, FRONT, 2, reserved=True)
    assert message_of(granted).lease_expiry_timestamp_ns == LEASE_NS + offset_ns
    announce = lifecycle.announce(FRONT, 5)
    assert announce is not None
    assert announce.announce_timestamp_ns == 5 + offset_ns
    assert not any("revoked" in words for words in outline(lifecycle.on_tick(LEASE_NS - 1)))
    revoked = lifecycle.on_tick(LEASE_NS)[0]
    assert message_of(revoked).timestamp_ns == LEASE_NS + offset_ns
    lifecycle.drain(ShutdownReason.NORMAL, "", LEASE_NS)
    notice = lifecycle.on_tick(LEASE_NS + 2 * SECOND_NS)[-2]
    assert message_of(notice).timestamp_ns == LEASE_NS + 2 * SECOND_NS + offset_ns


# --- shutdown


@pytest.mark.spec("DRV-4.13-07", "DRV-4.13-08")
def test_a_drain_announces_a_last_time_and_ends_after_the_timeout() -> None:
    """E32: epochs unchanged; the notice is the last word, and nothing comes after it."""
    lifecycle = with_producer()
    assert outline(lifecycle.drain(ShutdownReason.ADMIN, "maintenance", 100)) == [
        f"announce {FRONT}",
        f"announce {REAR}",
    ]
    assert lifecycle.phase is Phase.DRAINING
    lifecycle.on_keepalive(keepalive(500, 7, role=Role.PRODUCER), 100)
    assert "exit" not in outline(lifecycle.on_tick(100 + 2 * SECOND_NS - 1))
    effects = lifecycle.on_tick(100 + 2 * SECOND_NS)
    assert outline(effects)[-2:] == ["shutdown ADMIN", "exit"]
    assert effects[-2] == Send(
        ShmDriverShutdown(timestamp_ns=100 + 2 * SECOND_NS, reason=ShutdownReason.ADMIN, error_message="maintenance")
    )
    assert lifecycle.phase is Phase.ENDED
    assert "exit" not in outline(lifecycle.on_tick(100 + 9 * SECOND_NS))


@pytest.mark.spec("DRV-4.13-06")
def test_a_driver_that_drains_refuses_attaches_and_serves_the_rest() -> None:
    """New ones and those that wait are rejected; keepalives, detaches, retries and expiry go on."""
    lifecycle = with_producer()
    lifecycle.on_attach(attach(3), 0)
    first = lifecycle.on_attach(attach(4), 0)
    lifecycle.on_attach(attach(8, REAR, Role.PRODUCER, correlation_id=88), 0)
    effects = lifecycle.drain(ShutdownReason.NORMAL, "", 1)
    assert outline(effects) == ["attach REJECTED", f"announce {FRONT}", f"announce {REAR}"]
    answer = message_of(effects[0])
    assert isinstance(answer, ShmAttachResponse)
    assert (answer.correlation_id, answer.error_message) == (88, "the driver is shutting down")
    assert refusal(lifecycle.on_attach(attach(9), 2)) == (ResponseCode.REJECTED, "the driver is shutting down")
    assert lifecycle.on_attach(attach(4), 2) == first
    assert outline(lifecycle.on_detach(detach(501, 3), 2)) == ["detach OK", "revoked 501 DETACHED"]
    effects = lifecycle.on_detach(detach(500, 7, role=Role.PRODUCER), 2)
    assert outline(effects) == ["detach OK", "revoked 500 DETACHED", f"create {FRONT}"]
    assert outline(created(lifecycle, FRONT, 3, 3)) == [f"announce {FRONT}"]
    assert outline(created(lifecycle, REAR, 2, 3, reserved=True)) == [f"announce {REAR}"]
    assert [lease.client_id for lease in lifecycle.leases] == [4]


def test_a_second_drain_changes_nothing() -> None:
    """Neither its time nor its reason."""
    lifecycle = serving()
    lifecycle.drain(ShutdownReason.ADMIN, "first", 0)
    assert lifecycle.drain(ShutdownReason.ERROR, "second", SECOND_NS) == []
    *_, notice, exit_ = lifecycle.on_tick(2 * SECOND_NS)
    assert message_of(notice).error_message == "first"
    assert isinstance(exit_, Exit)


def test_an_end_without_a_drain_is_published_once() -> None:
    """A driver that is closed at once still notifies clients; no client attaches afterwards."""
    lifecycle = with_producer()
    notice = only_message(lifecycle.end(40))
    assert notice == ShmDriverShutdown(timestamp_ns=40, reason=ShutdownReason.NORMAL)
    assert lifecycle.end(41) == []
    assert lifecycle.drain(ShutdownReason.ADMIN, "", 42) == []
    assert outline(lifecycle.on_attach(attach(3), 43)) == ["attach REJECTED"]
    assert "exit" not in outline(lifecycle.on_tick(2 * LEASE_NS))


def test_an_end_in_the_middle_of_a_drain_tells_the_reason_of_the_drain() -> None:
    """A caller that cannot wait for the timeout changes nothing else."""
    lifecycle = serving()
    lifecycle.drain(ShutdownReason.ERROR, "out of memory", 0)
    notice = only_message(lifecycle.end(1))
    assert (notice.reason, notice.error_message) == (ShutdownReason.ERROR, "out of memory")
    assert "exit" not in outline(lifecycle.on_tick(9 * SECOND_NS))


@pytest.mark.parametrize("timeout_ms", [0, 10, 5_000])
def test_the_end_of_a_drain_does_not_wait_for_an_announce(timeout_ms: int) -> None:
    """Whatever the cadence, the driver ends on the first turn after the timeout."""
    lifecycle = serving({"policies.shutdown_timeout_ms": timeout_ms, "policies.announce_period_ms": 700})
    lifecycle.drain(ShutdownReason.NORMAL, "", 0)
    end_ns = timeout_ms * 1_000_000
    for now_ns in range(0, end_ns, SECOND_NS // 10):
        assert "exit" not in outline(lifecycle.on_tick(now_ns))
    assert outline(lifecycle.on_tick(end_ns))[-1] == "exit"


@pytest.mark.spec("DRV-4.13-02", "DRV-4.13-05", "DRV-4.13-09")
@pytest.mark.parametrize(
    ("configured", "token", "is_obeyed"),
    [("sesame", "sesame", True), ("sesame", "Sesame", False), ("sesame", "", False), ("", "", False), ("", "x", False)],
)
def test_only_the_right_token_shuts_down(configured: str, token: str, is_obeyed: bool) -> None:
    """E30: no answer to a wrong one; without a configured token there is no right one."""
    lifecycle = serving({"policies.shutdown_token": configured})
    request = ShmDriverShutdownRequest(correlation_id=1, reason=ShutdownReason.ADMIN, token=token, error_message="bye")
    effects = outline(lifecycle.on_shutdown_request(request, 0))
    assert effects == ([f"announce {FRONT}", f"announce {REAR}"] if is_obeyed else [])
    assert (lifecycle.phase is Phase.DRAINING) is is_obeyed
    assert lifecycle.counts["shutdown_requests_refused"] == (not is_obeyed)
    if is_obeyed:
        *_, notice, _ = lifecycle.on_tick(2 * SECOND_NS)
        assert message_of(notice).reason is ShutdownReason.ADMIN
        assert message_of(notice).error_message == "bye"


# --- streams of a consumer's own


def hello(
    consumer_id: int = 3,
    stream_id: int = FRONT,
    *,
    descriptor: tuple[str, int] = ("", 0),
    control: tuple[str, int] = ("", 0),
) -> ConsumerHello:
    return messages.hello(
        stream_id,
        consumer_id,
        mode=Mode.RATE_LIMITED,
        max_rate_hz=30,
        descriptor_channel=descriptor[0],
        descriptor_stream_id=descriptor[1],
        control_channel=control[0],
        control_stream_id=control[1],
    )


ANY = ("aeron:ipc", 0)


def consuming(*client_ids: int, period_ms: int = 1000, changed: dict[str, Any] | None = None) -> Lifecycle:
    """A driver with consumers of the first stream: their leases are 500 and up. `changed`: keys of its `driver`."""
    overrides = {f"driver.{key}": value for key, value in (changed or {}).items()}
    intervals = {"policies.announce_period_ms": period_ms, "policies.lease_keepalive_interval_ms": period_ms}
    lifecycle = serving(overrides | intervals)
    for client_id in client_ids:
        lifecycle.on_attach(attach(client_id), 0)
    return lifecycle


@pytest.mark.spec("DRV-11-04", "DRV-11-05")
def test_a_consumer_that_asks_with_a_channel_and_id_0_is_lent_ids() -> None:
    """§11, E22: from their ranges, on the channels that it named, the same again at every hello."""
    lifecycle = consuming(3)
    asked = hello(descriptor=("aeron:ipc?mtu=8k", 0), control=ANY)
    answer = only_message(lifecycle.on_consumer_hello(asked, 0))
    assert answer == messages.consumer_config(
        FRONT,
        3,
        mode=Mode.RATE_LIMITED,
        descriptor_stream_id=31000,
        control_stream_id=32000,
        descriptor_channel="aeron:ipc?mtu=8k",
        control_channel="aeron:ipc",
    )
    assert only_message(lifecycle.on_consumer_hello(asked, SECOND_NS)) == answer


@pytest.mark.parametrize(
    "asked",
    [
        hello(),
        hello(descriptor=("aeron:ipc", 4000), control=("aeron:ipc", 4001)),
        hello(descriptor=("", 4000)),
        hello(stream_id=4711, descriptor=ANY),
    ],
)
def test_hellos_that_are_the_producers_are_passed_over(asked: ConsumerHello) -> None:
    """E24: no request, explicit ids, half requests, and streams of other drivers."""
    lifecycle = serving()
    assert lifecycle.on_consumer_hello(asked, 0) == []
    assert len(lifecycle.private_streams) == 0


@pytest.mark.spec("DRV-11-07")
def test_what_cannot_be_lent_is_declined_with_nothing() -> None:
    """E25: empty channel and 0 for a used-up range, beside the id that there is."""
    lifecycle = consuming(1, 2, 3)
    lifecycle.on_consumer_hello(hello(1, descriptor=ANY, control=ANY), 0)
    answer = only_message(lifecycle.on_consumer_hello(hello(2, descriptor=ANY, control=ANY), 0))
    assert (answer.descriptor_stream_id, answer.descriptor_channel) == (31001, "aeron:ipc")
    assert (answer.control_stream_id, answer.control_channel) == (0, "")
    answer = only_message(lifecycle.on_consumer_hello(hello(3, descriptor=ANY), 0))
    assert (answer.descriptor_stream_id, answer.descriptor_channel) == (0, "")


@pytest.mark.spec("DRV-11-06")
def test_without_ranges_every_request_is_declined() -> None:
    """E25: the consumer stays on the shared streams."""
    lifecycle = serving({"driver.descriptor_stream_id_range": "", "driver.control_stream_id_range": ""})
    assert outline(lifecycle.on_consumer_hello(hello(descriptor=ANY, control=ANY), 0)) == ["ids 0 0"]


@pytest.mark.parametrize("ending", ["detach", "expiry", "revoke"])
def test_ids_come_back_with_the_end_of_the_lease(ending: str) -> None:
    """E28: whichever way it ends, the next consumer may have them."""
    lifecycle = consuming(3)
    lifecycle.on_attach(attach(4), 1)
    lifecycle.on_consumer_hello(hello(3, control=ANY), 0)
    assert outline(lifecycle.on_consumer_hello(hello(4, control=ANY), 0)) == ["ids 0 0"]
    match ending:
        case "detach":
            lifecycle.on_detach(detach(500, 3), 1)
        case "expiry":
            lifecycle.on_consumer_hello(hello(3, control=ANY), LEASE_NS)
            lifecycle.on_tick(LEASE_NS)
        case "revoke":
            lifecycle.revoke(500, "", 1)
    assert outline(lifecycle.on_consumer_hello(hello(4, control=ANY), LEASE_NS)) == ["ids 0 32000"]


def test_an_override_by_another_process_is_repeated_to_a_consumer_with_lent_ids() -> None:
    """Wire §10.1.3: with every answer, until it asks for another mode or is gone; nothing is kept of anybody else."""
    lifecycle = consuming(3)
    asked = hello(3, control=ANY)
    plain = only_message(lifecycle.on_consumer_hello(asked, 0))
    decree = messages.consumer_config(FRONT, 3, use_shm=False, payload_fallback_uri="bridge://lab")
    lifecycle.on_consumer_config(decree)
    lifecycle.on_consumer_config(msgspec.structs.replace(decree, consumer_id=4))
    overridden = msgspec.structs.replace(plain, use_shm=False, mode=Mode.STREAM, payload_fallback_uri="bridge://lab")
    for _ in range(2):
        assert only_message(lifecycle.on_consumer_hello(asked, 1)) == overridden
    declined = only_message(lifecycle.on_consumer_hello(hello(4, control=ANY), 1))
    assert (declined.use_shm, declined.mode, declined.payload_fallback_uri) == (True, Mode.RATE_LIMITED, "")
    other_wish = msgspec.structs.replace(asked, mode=Mode.STREAM)
    assert only_message(lifecycle.on_consumer_hello(other_wish, 1)) == msgspec.structs.replace(plain, mode=Mode.STREAM)
    lifecycle.on_consumer_config(decree)
    lifecycle.on_detach(detach(500, 3), 1)
    lifecycle.on_attach(attach(3), 2)
    assert only_message(lifecycle.on_consumer_hello(asked, 2)) == plain


@pytest.mark.parametrize("uri", ["x" * 600_000, "bridge://\u00e9", "bridge://\n", "bridge://\udcff"])
def test_a_fallback_that_no_answer_can_carry_is_counted_and_not_kept(uri: str) -> None:
    """What the driver keeps of messages is bounded: a ConsumerConfig may come from any process."""
    lifecycle = consuming(3)
    asked = hello(3, control=ANY)
    plain = only_message(lifecycle.on_consumer_hello(asked, 0))
    lifecycle.on_consumer_config(messages.consumer_config(FRONT, 3, use_shm=False, payload_fallback_uri=uri))
    assert only_message(lifecycle.on_consumer_hello(asked, 1)) == plain
    assert lifecycle.counts["consumer_configs_refused"] == 1


def test_ids_are_lent_only_to_consumers_with_a_lease_on_the_stream() -> None:
    """E43: hellos of anybody else, a producer's among them, are declined and leave nothing behind."""
    lifecycle = consuming(3)
    lifecycle.on_attach(attach(5, role=Role.PRODUCER), 0)
    created(lifecycle, FRONT, 2, reserved=True)
    wanted: dict[str, Any] = {"descriptor": ANY, "control": ANY}
    strangers = [hello(3, stream_id=REAR, **wanted), hello(4, **wanted), hello(5, **wanted)]
    strangers += [hello(number, **wanted) for number in (0, 2**32 - 1)]
    for stranger in strangers:
        assert outline(lifecycle.on_consumer_hello(stranger, 0)) == ["ids 0 0"]
    assert len(lifecycle.private_streams) == lifecycle.private_streams.ids_lent == 0
    assert outline(lifecycle.on_consumer_hello(hello(3, **wanted), 0)) == ["ids 31000 32000"]


@pytest.mark.spec("WIRE-5-04")
@pytest.mark.parametrize("period_ms", [100, 1000, 10_000])
def test_ids_come_back_from_a_consumer_that_is_silent_for_four_periods(period_ms: int) -> None:
    """E28: hellos come once in an announce period; each starts the wait anew, also one that asks for nothing."""
    lifecycle = consuming(3, 4, period_ms=period_ms)
    period_ns = lifecycle.config.announce_period_ns
    lifecycle.on_consumer_hello(hello(3, control=ANY), 0)
    lifecycle.on_consumer_hello(hello(3), 3 * period_ns)
    for period in range(4, 13):
        now_ns = period * period_ns
        for lease_id, client_id in ((500, 3), (501, 4)):
            lifecycle.on_keepalive(keepalive(lease_id, client_id), now_ns)
        lifecycle.on_tick(now_ns)
        answer = outline(lifecycle.on_consumer_hello(hello(4, control=ANY), now_ns))
        assert answer == (["ids 0 0"] if period < 3 + 4 else ["ids 0 32000"]), period


MIXED = {
    "descriptors by the driver": hello(3, descriptor=ANY, control=("aeron:ipc", 4001)),
    "progress by the driver": hello(3, descriptor=("aeron:ipc", 4000), control=ANY),
}


@pytest.mark.spec("WIRE-10.1.3-09", "DRV-11-05")
@pytest.mark.parametrize("asked", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("is_granted", [True, False], ids=["granted", "declined"])
def test_an_answer_of_the_producer_is_completed_with_the_drivers_id(asked: ConsumerHello, is_granted: bool) -> None:
    """E24: the driver never declines what the producer answers: it repeats that answer, once, with its own id in it."""
    lifecycle = consuming(3)
    assert lifecycle.on_consumer_hello(asked, 0) == []
    streams = ("descriptor_stream_id", "descriptor_channel"), ("control_stream_id", "control_channel")
    granted = {name: getattr(asked, name) for pair in streams if getattr(asked, pair[0]) for name in pair}
    said = messages.consumer_config(FRONT, 3, mode=asked.mode, **granted if is_granted else {})
    answer = only_message(lifecycle.on_consumer_config(said))
    by_driver = (
        {"control_stream_id": 32000, "control_channel": "aeron:ipc"}
        if asked.descriptor_stream_id
        else {"descriptor_stream_id": 31000, "descriptor_channel": "aeron:ipc"}
    )
    assert answer == msgspec.structs.replace(said, **by_driver)
    assert lifecycle.on_consumer_config(answer) == []
    assert lifecycle.on_consumer_hello(asked, 1) == []
    assert only_message(lifecycle.on_consumer_config(said)) == answer


@pytest.mark.parametrize("asked", MIXED.values(), ids=MIXED)
def test_an_answer_of_the_producer_stands_where_there_is_no_id_to_add(asked: ConsumerHello) -> None:
    """No range, no lease, a channel that may not be: the driver adds nothing to the producer's answer."""
    said = messages.consumer_config(FRONT, 3)
    without_ranges = consuming(3, changed={"descriptor_stream_id_range": "", "control_stream_id_range": ""})
    without_lease = consuming(4)
    elsewhere = "aeron:udp?endpoint=10.0.0.9:40123"
    changed = {
        name: elsewhere
        for name in ("descriptor_channel", "control_channel")
        if not getattr(asked, name.replace("channel", "stream_id"))
    }
    for lifecycle, wish in (
        (without_ranges, asked),
        (without_lease, asked),
        (consuming(3), msgspec.structs.replace(asked, **changed)),
    ):
        assert lifecycle.on_consumer_hello(wish, 0) == []
        assert lifecycle.on_consumer_config(said) == []
        assert len(lifecycle.private_streams) == 0


def test_ids_are_lent_for_channels_that_a_producer_may_open() -> None:
    """Over IPC, or over the media of the shared descriptor stream; of any other channel nothing is lent."""
    elsewhere = ("aeron:udp?endpoint=10.0.0.9:40123", 0)
    assert outline(consuming(3).on_consumer_hello(hello(3, descriptor=elsewhere), 0)) == ["ids 0 0"]
    over_udp = consuming(3, changed={"descriptor_channel": "aeron:udp?endpoint=127.0.0.1:40124"})
    assert outline(over_udp.on_consumer_hello(hello(3, descriptor=elsewhere), 0)) == ["ids 31000 0"]


def test_a_stall_of_the_driver_takes_no_ids_away() -> None:
    """Hellos that it could not read are not held against their consumers: two of them would share one id."""
    lifecycle = consuming(3, 4)
    lifecycle.on_consumer_hello(hello(3, control=ANY), 0)
    back_ns = 50 * SECOND_NS
    lifecycle.on_stall(back_ns)
    lifecycle.on_tick(back_ns)
    assert outline(lifecycle.on_consumer_hello(hello(4, control=ANY), back_ns)) == ["ids 0 0"]
    assert outline(lifecycle.on_consumer_hello(hello(3, control=ANY), back_ns)) == ["ids 0 32000"]
