# SPDX-License-Identifier: Apache-2.0
"""A lease from the client's side, transition by transition, with time passed by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tensorpool.client.attachment import (
    DETACH_NS,
    FIRST_RETRY_NS,
    LONGEST_REPEAT_NS,
    LONGEST_RETRY_NS,
    LOST_RETRY_NS,
    REPORT_FRESH_NS,
    Attached,
    Attachment,
    AttachSpec,
    Detached,
    Effect,
    LossReason,
    Lost,
    Phase,
    Refused,
    Send,
)
from tensorpool.wire.driver import (
    HugepagesPolicy,
    LeaseRevokeReason,
    PayloadPool,
    PublishMode,
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmAttachResponse,
    ShmDetachRequest,
    ShmDetachResponse,
    ShmLeaseKeepalive,
)
from tests.client.conftest import MS, SECOND_NS, STREAM, announced, granted, refused, revoked

T0 = 1_000 * SECOND_NS
WALL = 10**18  # the wall clock is far from the monotonic one
KEEPALIVE_NS = SECOND_NS
SILENCE_NS = 3 * SECOND_NS
LEASE_NS = 3 * SECOND_NS

both_roles = pytest.mark.parametrize("role", list(Role), ids=lambda role: role.name.lower())


class Bench:
    """An attachment, and a driver that is the test."""

    def __init__(self, spec: AttachSpec | None = None, role: Role = Role.CONSUMER, lease_ns: int = LEASE_NS) -> None:
        self.client_ids: Iterator[int] = itertools.count(41)
        self.correlation_ids: Iterator[int] = itertools.count(901)
        self.attachment = Attachment(
            spec or AttachSpec(STREAM, role),
            new_client_id=lambda: next(self.client_ids),
            new_correlation_id=lambda: next(self.correlation_ids),
            keepalive_interval_ns=KEEPALIVE_NS,
            silence_ns=SILENCE_NS,
            lease_ns=lease_ns,
        )
        self.request: ShmAttachRequest | None = None

    def start(self, now_ns: int = T0) -> ShmAttachRequest:
        self.request = attach_request(self.attachment.start(now_ns))
        return self.request

    def answer(self, now_ns: int = T0, **changed: Any) -> list[Effect]:
        assert self.request is not None
        return self.attachment.on_attach_response(
            granted(self.request.correlation_id, **changed), now_ns, WALL + now_ns
        )

    def attach(self, now_ns: int = T0, *, lease_ns: int | None = LEASE_NS, **changed: Any) -> ShmAttachResponse:
        """To ATTACHED, by the shortest way."""
        self.start(now_ns)
        expiry_ns = None if lease_ns is None else now_ns + lease_ns
        (effect,) = self.answer(now_ns, lease_expiry_timestamp_ns=expiry_ns, **changed)
        assert isinstance(effect, Attached)
        return effect.response

    def keep(self, now_ns: int) -> ShmLeaseKeepalive | None:
        """Send the keepalive that is due, if one is."""
        keepalive = self.attachment.keepalive(now_ns, now_ns)
        if keepalive is not None:
            self.attachment.on_keepalive_sent(now_ns)
        return keepalive

    def hear(self, now_ns: int, epoch: int = 5, **changed: Any) -> list[Effect]:
        producer = {"producer_id": self.attachment.client_id} if "producer_id" not in changed else {}
        return self.attachment.on_announce(announced(epoch, **producer, **changed), now_ns)


def attach_request(effects: list[Effect]) -> ShmAttachRequest:
    (effect,) = effects
    assert isinstance(effect, Send)
    assert isinstance(effect.message, ShmAttachRequest)
    return effect.message


def detach_request(effects: list[Effect]) -> ShmDetachRequest:
    effect = effects[0]
    assert isinstance(effect, Send)
    assert isinstance(effect.message, ShmDetachRequest)
    return effect.message


def lost(effects: list[Effect]) -> Lost:
    (effect,) = effects
    assert isinstance(effect, Lost)
    return effect


@pytest.fixture(params=list(Role), ids=lambda role: role.name.lower())
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(role=request.param)


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
    """It is told with all that it carries, and the lease is kept from then on."""
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
    assert bench.answer(stream_id=STREAM + 1) == []  # somebody else's, who chose the same number
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
def test_a_refusal_is_told_in_the_drivers_words_and_asked_again(bench: Bench, code: ResponseCode) -> None:
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
    """Fail closed: no lease is told; E18: what the driver granted is freed, else it would block the next attempt."""
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
    """Expected and found, for whoever has to look for it."""
    bench.start()
    loss = bench.answer(T0, header_slot_bytes=255)[-1]
    assert isinstance(loss, Lost)
    assert "header_slot_bytes = 255: expected 256" in loss.words


# --- the deadline


@pytest.mark.spec("DRV-4.4-02", "DRV-4.2-31")
@pytest.mark.parametrize("lease_ns", [None, LEASE_NS], ids=["no deadline", "deadline"])
def test_keepalives_are_due_at_once_and_then_at_the_interval(bench: Bench, lease_ns: int | None) -> None:
    """With a deadline or without one."""
    bench.attach(lease_ns=lease_ns)
    first = bench.keep(T0)
    assert first == ShmLeaseKeepalive(
        lease_id=77,
        stream_id=STREAM,
        client_id=bench.attachment.client_id,
        role=bench.attachment.spec.role,
        client_timestamp_ns=T0,
    )
    assert bench.keep(T0 + KEEPALIVE_NS - 1) is None
    assert bench.keep(T0 + KEEPALIVE_NS) is not None
    late_ns = T0 + KEEPALIVE_NS + 300 * MS
    assert bench.keep(late_ns + KEEPALIVE_NS) is not None
    assert bench.keep(late_ns + 2 * KEEPALIVE_NS - 1) is None


@pytest.mark.spec("DRV-4.4-02")
def test_a_lease_that_is_shorter_than_the_interval_is_kept_too(bench: Bench) -> None:
    """§4.4: keepalives come before the deadline, whatever is configured."""
    lease_ns = KEEPALIVE_NS // 2
    bench.attach(lease_ns=lease_ns)
    for now_ns in range(T0, T0 + 5 * KEEPALIVE_NS, lease_ns // 5):
        bench.hear(now_ns)
        assert bench.attachment.on_tick(now_ns) == []
        bench.keep(now_ns)
    assert bench.attachment.is_attached


@pytest.mark.spec("DRV-4.2-30", "DRV-4.7-07", "DRV-4.13-14")
def test_a_lease_ends_at_its_deadline_by_itself(bench: Bench) -> None:
    """Not a nanosecond later, whether or not the driver says so."""
    bench.attach()
    assert bench.attachment.on_tick(T0 + LEASE_NS - 1) == []
    bench.hear(T0 + LEASE_NS - 1)
    loss = lost(bench.attachment.on_tick(T0 + LEASE_NS))
    assert loss.reason is LossReason.EXPIRED
    assert bench.attachment.lease_id is None
    assert bench.attachment.keepalive(T0 + LEASE_NS, T0 + LEASE_NS) is None
    attach_request(bench.attachment.on_tick(bench.attachment.next_ns))


@pytest.mark.spec("DRV-4.2-30", "DRV-4.4-02")
def test_the_deadline_slides_with_each_keepalive_that_was_sent(bench: Bench) -> None:
    """E4: by the whole duration of the lease from then on."""
    bench.attach()
    sent_ns = T0
    for now_ns in range(T0, T0 + 10 * SECOND_NS, 700 * MS):
        bench.hear(now_ns)
        assert bench.attachment.on_tick(now_ns) == []
        if bench.keep(now_ns) is not None:
            sent_ns = now_ns
    end_ns = sent_ns + LEASE_NS
    bench.hear(end_ns - 1)
    assert bench.attachment.on_tick(end_ns - 1) == []
    assert lost(bench.attachment.on_tick(end_ns)).reason is LossReason.EXPIRED


@pytest.mark.spec("DRV-4.2-30")
def test_a_keepalive_that_could_not_be_sent_slides_nothing(bench: Bench) -> None:
    """E7: back pressure is retried at every turn, and the deadline stays where it was."""
    bench.attach()
    for now_ns in range(T0, T0 + LEASE_NS, 250 * MS):
        bench.hear(now_ns)
        assert bench.attachment.on_tick(now_ns) == []
        assert bench.attachment.keepalive(now_ns, now_ns) is not None
        assert bench.attachment.on_keepalive_failed(is_connected=True, now_ns=now_ns) == []
    assert lost(bench.attachment.on_tick(T0 + LEASE_NS)).reason is LossReason.EXPIRED


@pytest.mark.parametrize("by", ["monotonic", "wall"])
def test_the_expiry_may_be_by_either_clock(bench: Bench, by: str) -> None:
    """C8: the clock is not declared, so the nearer one counts."""
    bench.start()
    base_ns = T0 if by == "monotonic" else WALL + T0
    bench.answer(T0, lease_expiry_timestamp_ns=base_ns + LEASE_NS)
    assert bench.attachment.on_tick(T0 + LEASE_NS - 1) == []
    assert lost(bench.attachment.on_tick(T0 + LEASE_NS)).reason is LossReason.EXPIRED


@pytest.mark.spec("DRV-4.2-32")
def test_a_lease_without_deadline_lasts_while_the_driver_is_heard(bench: Bench) -> None:
    """Until it is revoked; keepalives go on all the same."""
    bench.attach(lease_ns=None)
    now_ns = T0
    for _ in range(100):
        now_ns += SECOND_NS
        bench.hear(now_ns)
        assert bench.attachment.on_tick(now_ns) == []
        assert bench.keep(now_ns) is not None
    notice = revoked(77, bench.attachment.client_id, bench.attachment.spec.role)
    assert lost(bench.attachment.on_revoked(notice, now_ns)).reason is LossReason.EXPIRED


@pytest.mark.spec("DRV-4.4-06")
def test_nobody_listening_for_more_than_an_interval_is_the_end(bench: Bench) -> None:
    """E7: counted from the first failure, forgotten when one gets through."""
    bench.attach(lease_ns=None)
    fail = bench.attachment.on_keepalive_failed
    assert fail(is_connected=False, now_ns=T0) == []
    assert fail(is_connected=False, now_ns=T0 + KEEPALIVE_NS) == []
    bench.attachment.on_keepalive_sent(T0 + KEEPALIVE_NS)
    assert fail(is_connected=False, now_ns=T0 + 2 * KEEPALIVE_NS) == []
    assert fail(is_connected=True, now_ns=T0 + 2 * KEEPALIVE_NS + 1) == []  # somebody listens again: back pressure
    assert fail(is_connected=False, now_ns=T0 + 3 * KEEPALIVE_NS) == []
    assert fail(is_connected=False, now_ns=T0 + 4 * KEEPALIVE_NS) == []
    assert lost(fail(is_connected=False, now_ns=T0 + 4 * KEEPALIVE_NS + 1)).reason is LossReason.DRIVER_GONE
    assert bench.attachment.phase is Phase.BACKOFF


# --- the end of a lease


@pytest.mark.spec("DRV-4.9-07", "DRV-4.9-09", "DRV-4.7-06", "DRV-4.7-07")
@pytest.mark.parametrize("reason", list(LeaseRevokeReason))
def test_a_revoked_lease_is_lost_and_another_one_asked_for(bench: Bench, reason: LeaseRevokeReason) -> None:
    """With the driver's words where it has some."""
    bench.attach()
    late_ns = T0 + 2 * KEEPALIVE_NS
    client_id, role = bench.attachment.client_id, bench.attachment.spec.role
    effects = bench.attachment.on_revoked(revoked(77, client_id, role, reason=reason, error_message="by hand"), late_ns)
    loss = lost(effects)
    assert (loss.reason.value, loss.words) == (reason.name, "by hand")
    assert (bench.attachment.phase, bench.attachment.lease_id) == (Phase.BACKOFF, None)
    again = attach_request(bench.attachment.on_tick(late_ns + LOST_RETRY_NS))
    assert again.client_id != client_id


@pytest.mark.spec("DRV-4.9-11", "DRV-4.9-12")
@pytest.mark.parametrize("other", ["lease_id", "stream_id", "client_id", "role"])
def test_the_end_of_another_lease_is_not_ours(bench: Bench, other: str) -> None:
    """All four have to match."""
    bench.attach()
    client_id, role = bench.attachment.client_id, bench.attachment.spec.role
    ours = revoked(77, client_id, role)
    not_role = Role.PRODUCER if role is Role.CONSUMER else Role.CONSUMER
    change: dict[str, Any] = {other: not_role if other == "role" else getattr(ours, other) + 1}
    assert bench.attachment.on_revoked(msgspec.structs.replace(ours, **change), T0) == []
    assert bench.attachment.is_attached


@pytest.mark.spec("DRV-4.9-21")
def test_a_revocation_that_comes_again_ends_nothing_more(bench: Bench) -> None:
    """Neither in the pause, nor when the next lease is there."""
    bench.attach()
    notice = revoked(77, bench.attachment.client_id, bench.attachment.spec.role)
    bench.attachment.on_revoked(notice, T0)
    assert bench.attachment.on_revoked(notice, T0) == []
    bench.request = attach_request(bench.attachment.on_tick(bench.attachment.next_ns))
    assert bench.attachment.on_revoked(notice, T0 + SECOND_NS) == []
    bench.answer(T0 + SECOND_NS, lease_id=78)
    assert bench.attachment.on_revoked(notice, T0 + SECOND_NS) == []
    assert bench.attachment.is_attached


def test_a_lease_that_does_not_last_is_not_asked_for_in_a_tight_loop(bench: Bench) -> None:
    """Lost within a keepalive interval: the pauses grow. Later: the first attempt comes soon."""
    now_ns, pauses = T0, list[int]()
    for lease_id in range(5):
        if bench.attachment.phase is Phase.UNATTACHED:
            bench.start(now_ns)
        else:
            bench.request = attach_request(bench.attachment.on_tick(now_ns))
        bench.answer(now_ns, lease_id=lease_id)
        now_ns += 1
        lost(
            bench.attachment.on_revoked(
                revoked(lease_id, bench.attachment.client_id, bench.attachment.spec.role), now_ns
            )
        )
        pauses.append(bench.attachment.next_ns - now_ns)
        now_ns = bench.attachment.next_ns
    assert pauses == [FIRST_RETRY_NS << n for n in range(5)]


@pytest.mark.spec("DRV-4.13-11", "DRV-4.13-13", "DRV-4.12-03")
def test_a_shutdown_notice_ends_the_lease_at_once(bench: Bench) -> None:
    """The attachment is unattached, and asks under new ids until the driver is back."""
    bench.attach()
    first_id, now_ns = bench.attachment.client_id, T0 + 2 * KEEPALIVE_NS
    loss = lost(bench.attachment.on_driver_shutdown("maintenance", now_ns))
    assert (loss.reason, loss.words) == (LossReason.DRIVER_GONE, "maintenance")
    assert bench.attachment.lease_id is None
    assert (bench.attachment.phase, bench.attachment.next_ns) == (Phase.UNATTACHED, now_ns + LOST_RETRY_NS)
    assert attach_request(bench.attachment.start(now_ns + LOST_RETRY_NS)).client_id != first_id


@pytest.mark.spec("DRV-4.12-03")
def test_a_request_dies_with_its_driver(bench: Bench) -> None:
    """What it is granted late is nothing; after a growing pause another request is made, under new ids."""
    now_ns, pauses, ids = T0, list[int](), set[tuple[int, int]]()
    for _ in range(3):
        request = bench.start(now_ns)
        ids.add((request.client_id, request.correlation_id))
        bench.attachment.on_creation_report(1, 1, now_ns)
        assert bench.attachment.on_driver_shutdown("", now_ns) == []
        assert (bench.attachment.phase, bench.attachment.creation) == (Phase.UNATTACHED, None)
        assert bench.answer(now_ns) == []
        assert bench.attachment.on_tick(now_ns + 10**18) == []
        pauses.append(bench.attachment.next_ns - now_ns)
        now_ns = bench.attachment.next_ns
    assert pauses == [FIRST_RETRY_NS, 2 * FIRST_RETRY_NS, 4 * FIRST_RETRY_NS]
    assert len(ids) == 3


@pytest.mark.spec("DRV-4.12-03")
def test_a_shutdown_notice_leads_from_every_phase_to_where_nothing_is_held(bench: Bench) -> None:
    """Unattached: also in a pause, which goes on. What its owner gives back or gave up is closed, and stays so."""
    attachment = bench.attachment
    assert attachment.on_driver_shutdown("", T0) == []
    assert attachment.phase is Phase.UNATTACHED
    attachment.on_attach_response(refused(bench.start().correlation_id), T0, T0)
    pause_ns = attachment.next_ns
    assert attachment.on_driver_shutdown("", T0) == []
    assert (attachment.phase, attachment.next_ns) == (Phase.UNATTACHED, pause_ns)
    attachment.start(pause_ns)
    attachment.detach(pause_ns)
    assert attachment.phase is Phase.ABANDONED
    assert attachment.on_driver_shutdown("", pause_ns) == [Detached()]
    assert attachment.phase is Phase.CLOSED
    assert attachment.on_driver_shutdown("", pause_ns) == []
    other = Bench()
    other.attach()
    other.attachment.detach(T0)
    assert other.attachment.on_driver_shutdown("", T0) == [Detached()]
    assert other.attachment.phase is Phase.CLOSED


def test_a_driver_that_answers_with_another_lease_does_not_know_ours(bench: Bench) -> None:
    """E40: only in answer to a question. That lease is given back, ours counts as lost, and another is asked for."""
    bench.attach()
    request = bench.request
    assert request is not None
    stranger, refusal = granted(request.correlation_id, lease_id=99), refused(request.correlation_id)
    assert bench.attachment.on_attach_response(stranger, T0, T0) == []
    assert bench.attachment.ask_again() == request
    assert bench.attachment.on_attach_response(refusal, T0, T0) == []
    assert bench.attachment.on_attach_response(stranger, T0, T0) == [], "the question was answered"
    bench.attachment.ask_again()
    loss, detach = bench.attachment.on_attach_response(stranger, T0 + 2 * KEEPALIVE_NS, T0)
    assert isinstance(loss, Lost)
    assert loss.reason is LossReason.DRIVER_GONE
    assert isinstance(detach, Send)
    assert isinstance(detach.message, ShmDetachRequest)
    assert detach.message.lease_id == 99
    assert not bench.attachment.is_attached


@pytest.mark.spec("DRV-4.13-14", "DRV-4.13-15")
def test_a_driver_that_announces_nothing_more_is_gone(bench: Bench) -> None:
    """E42: counted from the last announce of the stream; the attach itself counts as a sign of life."""
    bench.attach(lease_ns=None)
    assert bench.attachment.on_tick(T0 + SILENCE_NS) == []
    bench.hear(T0 + SILENCE_NS)
    end_ns = T0 + 2 * SILENCE_NS
    assert bench.attachment.on_tick(end_ns) == []
    assert lost(bench.attachment.on_tick(end_ns + 1)).reason is LossReason.DRIVER_GONE


def test_announces_of_other_streams_are_no_sign_of_life(bench: Bench) -> None:
    """The stream that was dropped is gone for its clients, however much the driver lives."""
    bench.attach(lease_ns=None)
    for now_ns in range(T0, T0 + SILENCE_NS, SECOND_NS):
        assert bench.hear(now_ns, stream_id=STREAM + 1) == []
    assert lost(bench.attachment.on_tick(T0 + SILENCE_NS + 1)).reason is LossReason.DRIVER_GONE


@pytest.mark.parametrize(
    ("epoch", "is_ours", "is_lost"),
    [(5, True, False), (4, True, False), (4, False, False), (6, True, True), (6, False, True), (5, False, True)],
)
def test_a_producer_sees_in_announces_that_it_was_replaced(epoch: int, is_ours: bool, is_lost: bool) -> None:
    """E44: a higher epoch, or another producer of our own."""
    bench = Bench(role=Role.PRODUCER)
    bench.attach()
    effects = bench.hear(T0, epoch, **({} if is_ours else {"producer_id": 9}))
    assert bool(effects) is is_lost
    if is_lost:
        assert lost(effects).reason is LossReason.REVOKED
        assert bench.attachment.phase is Phase.BACKOFF


@pytest.mark.parametrize(("epoch", "producer_id"), [(6, 9), (5, 9), (4, 0)])
def test_a_consumer_keeps_its_lease_whatever_is_announced(epoch: int, producer_id: int) -> None:
    """E41: epochs come and go, the lease stays."""
    bench = Bench()
    bench.attach()
    assert bench.hear(T0, epoch, producer_id=producer_id) == []
    assert bench.attachment.is_attached


def test_memory_that_cannot_be_used_is_given_back(bench: Bench) -> None:
    """E18: detached, and asked again after a growing while."""
    bench.attach()
    client_id = bench.attachment.client_id
    given_back = detach_request(bench.attachment.on_mapping_failed(T0))
    assert (given_back.lease_id, given_back.client_id, given_back.stream_id) == (77, client_id, STREAM)
    assert (bench.attachment.phase, bench.attachment.lease_id) == (Phase.BACKOFF, None)
    assert bench.attachment.next_ns == T0 + FIRST_RETRY_NS
    assert bench.attachment.on_mapping_failed(T0) == []
    bench.request = attach_request(bench.attachment.on_tick(T0 + FIRST_RETRY_NS))
    bench.answer(T0 + SECOND_NS)
    bench.attachment.on_mapping_failed(T0 + SECOND_NS)
    assert bench.attachment.next_ns == T0 + SECOND_NS + 2 * FIRST_RETRY_NS


@pytest.mark.parametrize("phase", [Phase.UNATTACHED, Phase.ATTACHING, Phase.ATTACHED, Phase.BACKOFF])
def test_with_the_media_driver_everything_is_gone(bench: Bench, phase: Phase) -> None:
    """Only a lease that was there is lost; then nothing happens until there is a link to start on."""
    if phase is not Phase.UNATTACHED:
        bench.start()
    if phase is Phase.ATTACHED:
        bench.answer()
    elif phase is Phase.BACKOFF:
        bench.answer(code=ResponseCode.REJECTED)
    assert bench.attachment.phase is phase
    effects = bench.attachment.on_connection_lost("no more Aeron")
    expected = [Lost(LossReason.DRIVER_GONE, "no more Aeron")] if phase is Phase.ATTACHED else []
    assert effects == expected
    assert (bench.attachment.phase, bench.attachment.lease_id) == (Phase.UNATTACHED, None)
    assert bench.attachment.on_tick(T0 + 100 * SECOND_NS) == []
    bench.start(T0 + 100 * SECOND_NS)


# --- giving it back


@pytest.mark.spec("DRV-4.12-01")
def test_a_lease_is_given_back_when_its_owner_wants(bench: Bench) -> None:
    """A request of its own, confirmed by its answer; then there is nothing more to do."""
    asked = bench.attach().correlation_id
    request = detach_request(bench.attachment.detach(T0))
    assert bench.attachment.phase is Phase.DETACHING
    assert request.correlation_id != asked
    assert (request.lease_id, request.stream_id) == (77, STREAM)
    assert (request.client_id, request.role) == (bench.attachment.client_id, bench.attachment.spec.role)
    assert bench.attachment.keepalive(T0 + KEEPALIVE_NS, T0 + KEEPALIVE_NS) is None
    other = ShmDetachResponse(correlation_id=asked, code=ResponseCode.OK)
    assert bench.attachment.on_detach_response(other) == []
    answer = ShmDetachResponse(correlation_id=request.correlation_id, code=ResponseCode.OK)
    assert bench.attachment.on_detach_response(answer) == [Detached()]
    assert (bench.attachment.phase, bench.attachment.lease_id) == (Phase.CLOSED, None)
    assert bench.attachment.on_tick(T0 + 100 * SECOND_NS) == []
    assert bench.attachment.on_detach_response(answer) == []
    assert bench.attachment.start(T0) == []
    assert bench.attachment.next_ns > T0 + 100 * SECOND_NS


@pytest.mark.parametrize("code", list(ResponseCode))
def test_every_answer_to_a_detach_is_the_end(bench: Bench, code: ResponseCode) -> None:
    """E11: an unknown lease is as gone as one that was given back."""
    bench.attach()
    request = detach_request(bench.attachment.detach(T0))
    answer = ShmDetachResponse(correlation_id=request.correlation_id, code=code)
    assert bench.attachment.on_detach_response(answer) == [Detached()]


def test_the_notice_of_our_own_detach_is_the_confirmation(bench: Bench) -> None:
    """E8: no reason to ask for another lease."""
    bench.attach()
    bench.attachment.detach(T0)
    notice = revoked(77, bench.attachment.client_id, bench.attachment.spec.role, reason=LeaseRevokeReason.DETACHED)
    assert bench.attachment.on_revoked(msgspec.structs.replace(notice, lease_id=78), T0) == []
    assert bench.attachment.on_revoked(notice, T0) == [Detached()]
    assert bench.attachment.phase is Phase.CLOSED
    assert bench.attachment.on_revoked(notice, T0) == []


def test_an_unanswered_detach_is_repeated_for_a_while_and_then_it_is_over(bench: Bench) -> None:
    """The same request; a driver that is not there takes nothing back."""
    bench.attach()
    request = detach_request(bench.attachment.detach(T0))
    sent = 0
    while True:
        now_ns = bench.attachment.next_ns
        effects = bench.attachment.on_tick(now_ns)
        if effects == [Detached()]:
            break
        assert effects == [Send(request)]
        sent += 1
    assert sent >= 2
    assert T0 + DETACH_NS <= now_ns <= T0 + 2 * DETACH_NS
    assert bench.attachment.phase is Phase.CLOSED


@pytest.mark.parametrize("event", ["shutdown", "link lost"])
def test_a_driver_that_goes_during_a_detach_has_taken_the_lease_along(bench: Bench, event: str) -> None:
    """Closed, not lost: it was meant to end."""
    bench.attach()
    bench.attachment.detach(T0)
    gone = (
        bench.attachment.on_driver_shutdown("", T0) if event == "shutdown" else bench.attachment.on_connection_lost("")
    )
    assert gone == [Detached()]
    assert bench.attachment.phase is Phase.CLOSED


@pytest.mark.parametrize("phase", [Phase.UNATTACHED, Phase.BACKOFF])
def test_without_a_lease_or_a_request_a_detach_is_done_at_once(bench: Bench, phase: Phase) -> None:
    """And an answer that comes later is not believed."""
    if phase is not Phase.UNATTACHED:
        bench.start()
    if phase is Phase.BACKOFF:
        bench.answer(code=ResponseCode.REJECTED)
    assert bench.attachment.detach(T0) == [Detached()]
    assert bench.attachment.phase is Phase.CLOSED
    assert bench.attachment.detach(T0) == []
    if bench.request is not None:
        assert not any(isinstance(effect, Attached) for effect in bench.answer(T0))
        assert bench.attachment.phase is Phase.CLOSED


def test_after_the_end_nothing_wakes_it(bench: Bench) -> None:
    """CLOSED is for good."""
    bench.attach()
    bench.attachment.detach(T0)
    bench.attachment.on_driver_shutdown("", T0)
    attachment = bench.attachment
    assert attachment.on_connection_lost("") == []
    assert attachment.on_driver_shutdown("", T0) == []
    assert attachment.on_mapping_failed(T0) == []
    assert bench.hear(T0, 9) == []
    assert attachment.start(T0) == []
    assert attachment.on_tick(T0 + 10**18) == []
    assert attachment.phase is Phase.CLOSED


def test_a_pool_with_its_own_slot_count_is_named(bench: Bench) -> None:
    """The diagnostic names the pool and both numbers."""
    bench.start()
    pool = PayloadPool(pool_id=9, pool_nslots=8, stride_bytes=64, region_uri="shm:file?path=/dev/shm/x")
    loss = bench.answer(T0, payload_pools=(pool,))[-1]
    assert isinstance(loss, Lost)
    assert "pool 9: nslots = 8: expected the ring's 4" in loss.words
