# SPDX-License-Identifier: Apache-2.0
"""When a client asks in the other dialect, and what it makes of the answers. Decision K9."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tensorpool.client.attach_dialects import MAX_FOLDERS, AttachDialects
from tensorpool.client.attachment import REPORT_FRESH_NS, Attached, Effect, LossReason, Lost, Refused, Send
from tensorpool.client.attachment_phases import Phase
from tensorpool.wire.attach import AttachRequest, Dialect
from tensorpool.wire.driver import (
    ExtendedAttachRequest,
    ExtendedAttachResponse,
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmDetachRequest,
)
from tests.client.attachment.conftest import T0, WALL, Bench, lost
from tests.client.conftest import SECOND_NS, STREAM, granted, refused, revoked

PERIOD_NS = SECOND_NS
OURS = "/dev/shm/tp/ours"


def uri(folder: str = "/dev/shm/other/default") -> str:
    return f"shm:file?path={folder}/{STREAM}/3/header.ring|require_hugepages=false"


def extended(correlation_id: int, *, node_id: int | None = None, **changed: Any) -> ExtendedAttachResponse:
    fields = msgspec.structs.asdict(granted(correlation_id, **changed))
    del fields["max_dims"]
    return ExtendedAttachResponse(**fields, node_id=node_id)


class Asking:
    """A bench that runs until a given time while a driver announces, or does not."""

    def __init__(self, configured: str = "auto", role: Role = Role.CONSUMER) -> None:
        self.dialects = AttachDialects(configured, PERIOD_NS, is_ours=lambda folder: folder == OURS)
        self.bench = Bench(role=role, dialects=self.dialects)
        self.attachment = self.bench.attachment
        self.requests: list[AttachRequest] = []
        self.now_ns = T0
        self.take(self.attachment.start(T0))

    def take(self, effects: list[Effect]) -> list[Effect]:
        """Note the requests; what else there is."""
        sent = [effect.message for effect in effects if isinstance(effect, Send)]
        self.requests += [m for m in sent if isinstance(m, ShmAttachRequest | ExtendedAttachRequest)]
        return [e for e in effects if not isinstance(e, Send) or isinstance(e.message, ShmDetachRequest)]

    def run(self, until_ns: int, announced: str | None = uri(), step_ns: int = PERIOD_NS // 4) -> None:
        while self.now_ns < until_ns:
            self.now_ns += step_ns
            if announced is not None:
                self.dialects.on_announce(announced, self.now_ns)
            self.take(self.attachment.on_tick(self.now_ns))

    def answer(self, response: Any) -> list[Effect]:
        return self.take(self.attachment.on_attach_response(response, self.now_ns, WALL + self.now_ns))

    @property
    def asked(self) -> list[Dialect]:
        """In which dialects, without repetitions."""
        every = {request.correlation_id: Dialect.of(request) for request in self.requests}
        return list(every.values())


@pytest.mark.parametrize("role", list(Role))
def test_a_driver_that_announces_and_does_not_answer_is_asked_in_the_other_dialect(role: Role) -> None:
    """After three announce periods, with new ids; and back again after three more."""
    asking = Asking(role=role)
    asking.run(T0 + 3 * PERIOD_NS - PERIOD_NS // 4)
    assert asking.asked == [Dialect.SPECIFIED]
    asking.run(T0 + 5 * PERIOD_NS)
    first, second = asking.requests[0], asking.requests[-1]
    assert type(second) is ExtendedAttachRequest
    assert (second.stream_id, second.role, second.desired_node_id) == (first.stream_id, first.role, None)
    assert second.correlation_id != first.correlation_id
    assert second.client_id != first.client_id
    asking.run(T0 + 8 * PERIOD_NS)
    assert asking.asked == [Dialect.SPECIFIED, Dialect.JANUARY_2026, Dialect.SPECIFIED]


@pytest.mark.parametrize("announced", [None, uri(OURS)], ids=["nobody announces", "ours"])
def test_neither_a_silent_driver_nor_our_own_is_asked_anew(announced: str | None) -> None:
    """The first may come later, the second takes its time."""
    asking = Asking()
    asking.run(T0 + 20 * PERIOD_NS, announced)
    assert asking.asked == [Dialect.SPECIFIED]
    assert len(asking.requests) > 10


def test_our_own_driver_is_known_among_producers_that_announce_by_themselves() -> None:
    """Whoever else announces on its stream."""
    asking = Asking()
    for _ in range(40):
        asking.dialects.on_announce(uri(OURS), asking.now_ns)
        asking.run(asking.now_ns + PERIOD_NS // 4, uri("/dev/shm/producer/own"))
    assert asking.asked == [Dialect.SPECIFIED]


def test_announces_from_before_the_request_count_for_nothing() -> None:
    """The driver may have ended since."""
    asking = Asking()
    asking.dialects.on_announce(uri(), T0 - 1)
    asking.run(T0 + 10 * PERIOD_NS, None)
    assert asking.asked == [Dialect.SPECIFIED]


def test_a_driver_that_works_on_the_request_is_not_asked_anew() -> None:
    """As long as it says so."""
    asking = Asking()
    asking.attachment.on_creation_report(1 << 30, 0, T0 + PERIOD_NS)
    asking.run(T0 + PERIOD_NS + REPORT_FRESH_NS)
    assert asking.asked == [Dialect.SPECIFIED]
    asking.run(T0 + 3 * PERIOD_NS + REPORT_FRESH_NS)
    assert asking.asked == [Dialect.SPECIFIED, Dialect.JANUARY_2026]


@pytest.mark.parametrize("configured", list(Dialect))
def test_a_configured_dialect_is_kept(configured: Dialect) -> None:
    """Whatever the driver does."""
    asking = Asking(configured)
    asking.run(T0 + 20 * PERIOD_NS)
    assert asking.asked == [configured]


@pytest.mark.parametrize(
    ("code", "is_remembered"), [(code, code not in (1, 2)) for code in ResponseCode], ids=lambda value: str(value)
)
def test_what_was_answered_is_asked_first_next_time(code: ResponseCode, is_remembered: bool) -> None:
    """INVALID_PARAMS and UNSUPPORTED may mean that it was not understood."""
    asking = Asking()
    asking.run(T0 + 4 * PERIOD_NS)
    response = extended(asking.requests[-1].correlation_id, code=code)
    asking.answer(response)
    assert asking.dialects.first is (Dialect.JANUARY_2026 if is_remembered else Dialect.SPECIFIED)
    other = Bench(dialects=asking.dialects).attachment.start(T0)
    assert type(other[0].message) is (ExtendedAttachRequest if is_remembered else ShmAttachRequest)  # type: ignore[union-attr]


def test_the_answer_to_the_first_request_counts_though_another_was_sent() -> None:
    """A slow driver of the specified dialect; what it grants to the second request is given back."""
    asking = Asking()
    first = asking.requests[0]
    asking.run(T0 + 4 * PERIOD_NS)
    second = asking.requests[-1]
    (effect,) = asking.answer(granted(first.correlation_id, lease_id=70))
    assert isinstance(effect, Attached)
    attachment = asking.attachment
    assert (attachment.client_id, attachment.lease_id) == (first.client_id, 70)
    assert asking.dialects.first is Dialect.SPECIFIED
    (give_back,) = asking.answer(extended(second.correlation_id, lease_id=71))
    assert isinstance(give_back, Send)
    request = give_back.message
    assert isinstance(request, ShmDetachRequest)
    assert (request.lease_id, request.client_id, request.stream_id) == (71, second.client_id, STREAM)
    assert asking.answer(extended(second.correlation_id, lease_id=71)) == []
    assert attachment.is_attached


def test_a_request_that_is_resumed_goes_on_in_its_dialect() -> None:
    """The caller gave up and asked once more; the earlier answer is still known."""
    asking = Asking()
    asking.run(T0 + 4 * PERIOD_NS)
    asking.attachment.detach(asking.now_ns)
    again = Bench(dialects=asking.dialects).attachment
    again.resume(asking.attachment)
    assert again.start(asking.now_ns) == [Send(asking.requests[-1])]
    (effect,) = again.on_attach_response(granted(asking.requests[0].correlation_id), asking.now_ns, WALL)
    assert isinstance(effect, Attached)


@pytest.mark.parametrize("is_earlier", [False, True])
def test_an_answer_that_cannot_be_read_is_an_error_with_a_sentence(is_earlier: bool) -> None:
    """And the request is made anew after a while; an answer to others says nothing."""
    asking = Asking()
    first = asking.requests[0].correlation_id
    asking.run(T0 + 4 * PERIOD_NS)
    assert asking.attachment.on_unreadable_response(1, "no", asking.now_ns) == []
    about = first if is_earlier else asking.requests[-1].correlation_id
    found = lost(asking.attachment.on_unreadable_response(about, "block length 60, expected 51 or 54", asking.now_ns))
    assert found.reason is LossReason.PROTOCOL_ERROR
    expected = (
        "the attach response is unusable: block length 60, expected 51 or 54; bring driver and client to one version"
    )
    assert found.words == expected
    assert asking.attachment.phase is Phase.BACKOFF
    asking.run(asking.now_ns + PERIOD_NS, None)
    assert asking.attachment.phase is Phase.ATTACHING


# --- node ids


def attached(node_id: int | None) -> Asking:
    asking = Asking("2026-01")
    (effect,) = asking.answer(extended(asking.requests[-1].correlation_id, node_id=node_id))
    assert isinstance(effect, Attached)
    return asking


def test_a_node_id_is_kept_and_wished_for_again_when_the_driver_was_gone() -> None:
    """So that trace ids go on under it."""
    asking = attached(968)
    attachment = asking.attachment
    assert (attachment.node_id, attachment.is_node_id_derived) == (968, False)
    assert isinstance(asking.take(attachment.on_driver_shutdown("", T0))[0], Lost)
    assert attachment.node_id == 968
    asking.take(attachment.start(T0 + SECOND_NS))
    request = asking.requests[-1]
    assert isinstance(request, ExtendedAttachRequest)
    assert request.desired_node_id == 968
    refusal = refused(request.correlation_id, words="node id 968 belongs to client 4")
    assert isinstance(asking.answer(refusal)[0], Refused)
    asking.run(T0 + 3 * SECOND_NS)
    request = asking.requests[-1]
    assert isinstance(request, ExtendedAttachRequest)
    assert request.desired_node_id is None


def test_a_node_id_that_the_driver_let_rest_is_not_wished_for() -> None:
    """It ended the lease itself: it would refuse the wish."""
    asking = attached(968)
    asking.take(asking.attachment.on_revoked(revoked(77, asking.attachment.client_id, Role.CONSUMER), T0))
    asking.run(T0 + 3 * SECOND_NS)
    request = asking.requests[-1]
    assert isinstance(request, ExtendedAttachRequest)
    assert request.desired_node_id is None


@pytest.mark.parametrize("node_id", [None, 0])
def test_a_client_that_got_no_node_id_derives_one(node_id: int | None) -> None:
    """Null, or 0 as one implementation writes it."""
    attachment = attached(node_id).attachment
    assert (attachment.node_id, attachment.is_node_id_derived) == (attachment.client_id, True)


# --- what is remembered of announces


def test_a_bounded_number_of_announced_folders_is_remembered() -> None:
    """The newest; and a URI that is none counts as announced by somebody else."""
    dialects = AttachDialects("auto", PERIOD_NS, is_ours=lambda folder: folder == OURS)
    dialects.on_announce(uri(OURS), T0)
    for number in range(MAX_FOLDERS):
        assert not dialects.is_to_change(T0, T0 + 3 * PERIOD_NS)
        dialects.on_announce(uri(f"/dev/shm/other/{number}"), T0)
    assert dialects.is_to_change(T0, T0 + 3 * PERIOD_NS)
    nowhere = AttachDialects("auto", PERIOD_NS, is_ours=lambda folder: folder == OURS)
    nowhere.on_announce("no uri", T0)
    assert nowhere.is_to_change(T0, T0 + 3 * PERIOD_NS)
