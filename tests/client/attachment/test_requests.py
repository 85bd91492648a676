# SPDX-License-Identifier: Apache-2.0
"""When an attachment sends its request, repeats it, gives up, and which answers it believes."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from tensorpool.client.attachment import (
    FIRST_RETRY_NS,
    LONGEST_REPEAT_NS,
    LONGEST_RETRY_NS,
    LOST_RETRY_NS,
    REPORT_FRESH_NS,
    Attached,
    AttachSpec,
    Detached,
    LossReason,
    Lost,
    Refused,
    Send,
)
from tensorpool.client.attachment_phases import Phase
from tensorpool.wire.driver import HugepagesPolicy, PublishMode, ResponseCode, Role, ShmAttachRequest, ShmDetachResponse
from tests.client.attachment.conftest import KEEPALIVE_NS, LEASE_NS, T0, WALL, Bench, attach_request, detach_request
from tests.client.conftest import MS, SECOND_NS, STREAM, granted, refused

# --- asking


@pytest.mark.spec("DRV-4.3-03")
@pytest.mark.parametrize("create", [False, True])
def test_a_request_says_what_is_wished(create: bool) -> None:
    """Stream, role, pages, layout and mode as given; maxDims is 0; the ids are those that were made for it."""
    spec = AttachSpec(7, Role.PRODUCER, create, HugepagesPolicy.STANDARD, 1)
    request = Bench(spec).start()
    assert request == ShmAttachRequest(
        correlation_id=901,
        stream_id=7,
        client_id=41,
        role=Role.PRODUCER,
        expected_layout_version=1,
        max_dims=0,
        publish_mode=PublishMode.EXISTING_OR_CREATE if create else PublishMode.REQUIRE_EXISTING,
        require_hugepages=HugepagesPolicy.STANDARD,
    )


@pytest.mark.spec("DRV-4.12-01")
def test_nothing_is_asked_before_the_start(bench: Bench) -> None:
    """UNATTACHED is a state that time does not change."""
    attachment = bench.attachment
    assert attachment.phase is Phase.UNATTACHED
    assert attachment.on_tick(T0 + 10**18) == []
    assert attachment.keepalive(T0 + 10**18, T0 + 10**18) is None
    assert attachment.next_ns == 0  # its owner may start at once
    assert (attachment.lease_id, attachment.stream_id, attachment.is_attached) == (None, STREAM, False)


@pytest.mark.spec("DRV-4.2-16", "DRV-4.8-06")
def test_an_unanswered_request_is_repeated_as_it_is_at_growing_intervals(bench: Bench) -> None:
    """E2: the same bytes each time, as long as it takes: the driver can tell a retry from a second client."""
    first, asked_ns = bench.start(), [T0]
    for now_ns in range(T0, T0 + 60 * SECOND_NS, 10 * MS):
        for effect in bench.attachment.on_tick(now_ns):
            assert effect == Send(first)
            asked_ns.append(now_ns)
    intervals = [later - earlier for earlier, later in itertools.pairwise(asked_ns)]
    assert intervals == [min(FIRST_RETRY_NS << n, LONGEST_REPEAT_NS) for n in range(len(intervals))]
    assert len(intervals) > 50
    assert bench.attachment.phase is Phase.ATTACHING
    bench.answer(T0 + 60 * SECOND_NS)
    assert bench.attachment.is_attached


def test_nothing_is_sent_before_it_is_due(bench: Bench) -> None:
    """`next_ns` tells when to come back, and coming earlier does nothing."""
    bench.start()
    due_ns = bench.attachment.next_ns
    assert due_ns == T0 + FIRST_RETRY_NS
    assert bench.attachment.on_tick(due_ns - 1) == []
    assert len(bench.attachment.on_tick(due_ns)) == 1


@pytest.mark.spec("DRV-4.8-06")
def test_a_request_that_a_link_took_away_is_repeated_under_its_ids(bench: Bench) -> None:
    """The driver may be working on it still: another id would be a second request beside it."""
    first = bench.start()
    assert bench.attachment.on_connection_lost("gone") == []
    assert attach_request(bench.attachment.start(T0 + SECOND_NS)) == first


def test_a_request_for_another_stream_has_ids_of_its_own(bench: Bench) -> None:
    """A name may lead elsewhere once the link is back."""
    first = bench.start()
    bench.attachment.on_connection_lost("gone")
    bench.attachment.spec = msgspec.structs.replace(bench.attachment.spec, stream_id=STREAM + 1)
    second = attach_request(bench.attachment.start(T0 + SECOND_NS))
    assert second.correlation_id != first.correlation_id
    assert second.client_id != first.client_id


# --- giving up


def test_a_lease_that_is_granted_after_its_caller_gave_up_is_given_back(bench: Bench) -> None:
    """E18: at once, and again until that is confirmed; nothing is asked meanwhile."""
    request = bench.start()
    attachment = bench.attachment
    assert attachment.detach(T0 + 1) == [Detached()]
    assert attachment.phase is Phase.ABANDONED
    assert attachment.detach(T0 + 2) == []
    assert attachment.start(T0 + 2) == []
    assert attachment.on_tick(T0 + 100 * SECOND_NS) == []
    assert attachment.next_ns > T0 + 10**18
    late_ns = T0 + 100 * SECOND_NS
    given_back = detach_request(bench.answer(late_ns))
    assert (given_back.lease_id, given_back.client_id, given_back.role) == (77, request.client_id, request.role)
    assert not attachment.is_attached
    assert detach_request(attachment.on_tick(late_ns + FIRST_RETRY_NS)) == given_back
    closed = attachment.on_detach_response(
        ShmDetachResponse(correlation_id=given_back.correlation_id, code=ResponseCode.OK)
    )
    assert closed == [Detached()]
    assert attachment.phase is Phase.CLOSED


def test_a_refusal_after_its_caller_gave_up_is_the_end(bench: Bench) -> None:
    """There is nothing to give back."""
    bench.start()
    bench.attachment.detach(T0)
    assert bench.answer(T0, code=ResponseCode.REJECTED) == [Detached()]
    assert bench.attachment.phase is Phase.CLOSED


def test_an_abandoned_request_outlives_its_link(bench: Bench) -> None:
    """The driver may grant it on the next one."""
    bench.start()
    bench.attachment.detach(T0)
    assert bench.attachment.on_connection_lost("gone") == []
    assert detach_request(bench.answer(T0)).lease_id == 77


def test_what_was_never_asked_or_was_answered_is_not_abandoned(bench: Bench) -> None:
    """UNATTACHED and BACKOFF end at once."""
    assert bench.attachment.detach(T0) == [Detached()]
    assert bench.attachment.phase is Phase.CLOSED
    other = Bench()
    other.start()
    other.answer(code=ResponseCode.REJECTED)
    assert other.attachment.detach(T0) == [Detached()]
    assert other.attachment.phase is Phase.CLOSED


@pytest.mark.spec("DRV-4.8-06")
def test_an_abandoned_request_can_be_resumed(bench: Bench) -> None:
    """The same stream is asked for again: the driver sees one request, and its answer is the new caller's."""
    first = bench.start()
    bench.attachment.detach(T0)
    again = Bench(bench.attachment.spec)
    again.attachment.resume(bench.attachment)
    assert again.start(T0 + SECOND_NS) == first
    assert isinstance(again.answer(T0 + SECOND_NS)[0], Attached)


# --- reports of the driver


def test_a_driver_that_makes_memory_is_believed_for_a_while(bench: Bench) -> None:
    """Its report is about our correlation id, fresh for some seconds, and over with the answer."""
    attachment = bench.attachment
    request = bench.start()
    assert not attachment.is_creating(T0)
    assert attachment.is_about(request.correlation_id)
    assert not attachment.is_about(request.correlation_id + 1)
    attachment.on_creation_report(2**31, 7 * SECOND_NS, T0)
    assert attachment.is_creating(T0 + REPORT_FRESH_NS)
    assert not attachment.is_creating(T0 + REPORT_FRESH_NS + 1)
    bench.answer(T0)
    assert attachment.creation is None
    assert not attachment.is_about(request.correlation_id)


def test_reports_are_listened_for_only_while_a_request_waits(bench: Bench) -> None:
    """Not before it is asked, not in its first moment, not after the answer."""
    attachment = bench.attachment
    assert not attachment.is_asking_since(T0)
    bench.start()
    assert not attachment.is_asking_since(T0 - 1)
    assert attachment.is_asking_since(T0)
    bench.answer()
    assert not attachment.is_asking_since(T0)


@pytest.mark.spec("DRV-4.8-06")
def test_starting_twice_asks_once(bench: Bench) -> None:
    """While a request is under way or the lease is there, a start is nothing."""
    bench.start()
    assert bench.attachment.start(T0 + 1) == []
    bench.answer()
    assert bench.attachment.start(T0 + 2) == []
    bench.attachment.detach(T0 + 3)
    assert bench.attachment.start(T0 + 4) == []


# --- answers


@pytest.mark.spec("DRV-4.12-01")
def test_an_ok_is_a_lease(bench: Bench) -> None:
    """It is reported with all that it carries, and the lease is kept from then on."""
    response = bench.attach()
    attachment = bench.attachment
    assert attachment.phase is Phase.ATTACHED
    assert attachment.is_attached
    assert attachment.response is response
    assert (attachment.lease_id, attachment.stream_id) == (77, STREAM)


def test_the_stream_that_the_driver_chose_is_the_leases(bench: Bench) -> None:
    """E14: with id 0 it is the driver that names one."""
    bench = Bench(AttachSpec(0, Role.PRODUCER, create=True))
    assert bench.attachment.stream_id == 0
    bench.attach(stream_id=20_003)
    assert bench.attachment.stream_id == 20_003
    keepalive = bench.keep(T0)
    assert keepalive is not None
    assert keepalive.stream_id == 20_003


def test_answers_without_a_question_are_ignored(bench: Bench) -> None:
    """E3: another's correlation id, an answer that comes twice, one to an earlier request."""
    attachment = bench.attachment
    assert attachment.on_attach_response(granted(901), T0, WALL) == []  # nothing was asked yet
    first = bench.start()
    assert attachment.on_attach_response(granted(first.correlation_id + 1), T0, WALL) == []
    assert attachment.on_attach_response(refused(first.correlation_id + 1), T0, WALL) == []
    assert bench.answer(stream_id=STREAM + 1) == []  # of another client that chose the same number
    assert attachment.phase is Phase.ATTACHING
    bench.answer(code=ResponseCode.REJECTED)
    assert attachment.on_attach_response(granted(first.correlation_id), T0, WALL) == []
    assert attachment.phase is Phase.BACKOFF
    bench.request = attach_request(attachment.on_tick(attachment.next_ns))
    assert attachment.on_attach_response(granted(first.correlation_id), T0, WALL) == []
    assert attachment.phase is Phase.ATTACHING
    bench.answer(T0 + SECOND_NS)
    assert bench.answer(T0 + SECOND_NS, lease_id=78) == []
    assert attachment.lease_id == 77


@pytest.mark.spec("DRV-4.12-02", "WIRE-15.17-02")
@pytest.mark.parametrize("code", [code for code in ResponseCode if code is not ResponseCode.OK])
def test_a_refusal_carries_the_drivers_text_and_is_asked_again(bench: Bench, code: ResponseCode) -> None:
    """After a while, as a new series."""
    request = bench.start()
    effects = bench.attachment.on_attach_response(refused(request.correlation_id, code, "stream 7 is taken"), T0, WALL)
    assert effects == [Refused(code, "stream 7 is taken")]
    assert bench.attachment.phase is Phase.BACKOFF
    assert bench.attachment.lease_id is None
    again = attach_request(bench.attachment.on_tick(T0 + FIRST_RETRY_NS))
    assert again.client_id != request.client_id


@pytest.mark.spec("DRV-4.2-16")
def test_refusals_in_a_row_make_the_pauses_longer_up_to_a_limit(bench: Bench) -> None:
    """Doubled each time, beyond what the driver keeps a lease that is not renewed (E2)."""
    now_ns, pauses = T0, list[int]()
    bench.start()
    for _ in range(10):
        bench.answer(now_ns, code=ResponseCode.REJECTED)
        pauses.append(bench.attachment.next_ns - now_ns)
        now_ns = bench.attachment.next_ns
        assert bench.attachment.on_tick(now_ns - 1) == []
        bench.request = attach_request(bench.attachment.on_tick(now_ns))
    assert pauses == [min(FIRST_RETRY_NS << n, LONGEST_RETRY_NS) for n in range(10)]
    assert pauses[-1] > LEASE_NS


def test_pauses_grow_beyond_a_long_grace() -> None:
    """Whatever is configured."""
    bench, now_ns = Bench(lease_ns=40 * SECOND_NS), T0
    bench.start()
    for _ in range(12):
        bench.answer(now_ns, code=ResponseCode.REJECTED)
        pause_ns = bench.attachment.next_ns - now_ns
        now_ns = bench.attachment.next_ns
        bench.request = attach_request(bench.attachment.on_tick(now_ns))
    assert pause_ns == 50 * SECOND_NS


def test_a_lease_that_lasted_makes_the_pauses_short_again(bench: Bench) -> None:
    """What was refused before it is forgotten."""
    bench.start()
    for _ in range(4):
        bench.answer(T0, code=ResponseCode.REJECTED)
        bench.request = attach_request(bench.attachment.on_tick(bench.attachment.next_ns))
    bench.answer(T0)
    late_ns = T0 + 2 * KEEPALIVE_NS
    bench.attachment.on_driver_shutdown("", late_ns)
    assert bench.attachment.next_ns == late_ns + LOST_RETRY_NS
    bench.start(late_ns + LOST_RETRY_NS)
    bench.answer(late_ns, code=ResponseCode.REJECTED)
    assert bench.attachment.next_ns == late_ns + FIRST_RETRY_NS


REQUIRED = ("lease_id", "stream_id", "epoch", "layout_version", "header_nslots", "header_slot_bytes", "max_dims")
ONE_POOL = granted(0).payload_pools[0]
FLAWS: dict[str, dict[str, Any]] = {
    **{f"no {name}": {name: None} for name in REQUIRED},
    "slots of 255": {"header_slot_bytes": 255},
    "slots of 512": {"header_slot_bytes": 512},
    "7 dims": {"max_dims": 7},
    "no dims": {"max_dims": 0},
    "no pools": {"payload_pools": ()},
    "a pool with other slots": {"payload_pools": (ONE_POOL, msgspec.structs.replace(ONE_POOL, pool_nslots=8))},
    "no ring URI": {"header_region_uri": ""},
    "a blank ring URI": {"header_region_uri": "  \t"},
    "no pool URI": {"payload_pools": (msgspec.structs.replace(ONE_POOL, region_uri=""),)},
    "a blank pool URI": {"payload_pools": (ONE_POOL, msgspec.structs.replace(ONE_POOL, region_uri=" "))},
    "an unknown scheme": {"header_region_uri": "shm:memfd?path=/dev/shm/x"},
    "a relative path": {"header_region_uri": "shm:file?path=dev/shm/x"},
    "an unknown parameter": {"header_region_uri": "shm:file?path=/dev/shm/x|mode=1"},
}


@pytest.mark.spec("DRV-4.2-23", "DRV-4.2-24", "DRV-4.2-25", "DRV-4.2-26", "DRV-4.2-27", "DRV-4.2-28", "DRV-4.2-29")
@pytest.mark.spec("DRV-4.2-34", "DRV-4.7a-01")
@pytest.mark.parametrize("flaw", FLAWS.values(), ids=FLAWS.keys())
def test_an_ok_that_is_not_complete_is_given_back_and_asked_again(bench: Bench, flaw: dict[str, Any]) -> None:
    """Fail closed: no lease is reported; E18: the driver's grant is freed, else it would block the next attempt."""
    request = bench.start()
    effects = bench.answer(T0, **flaw)
    assert not any(isinstance(effect, Attached) for effect in effects)
    *sent, last = effects
    assert isinstance(last, Lost)
    assert last.reason is LossReason.PROTOCOL_ERROR
    assert bench.attachment.phase is Phase.BACKOFF
    assert (bench.attachment.response, bench.attachment.lease_id) == (None, None)
    if "lease_id" in flaw:
        assert sent == []
    else:
        given_back = detach_request(effects)
        assert given_back.lease_id == 77
        assert (given_back.client_id, given_back.role) == (request.client_id, request.role)
        assert given_back.stream_id == STREAM
    assert attach_request(bench.attachment.on_tick(bench.attachment.next_ns)).client_id != request.client_id


def test_the_words_of_a_flaw_say_what_is_wrong(bench: Bench) -> None:
    """The text says what was expected and what was found."""
    bench.start()
    loss = bench.answer(T0, header_slot_bytes=255)[-1]
    assert isinstance(loss, Lost)
    assert "header_slot_bytes = 255: expected 256" in loss.words
