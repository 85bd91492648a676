# SPDX-License-Identifier: Apache-2.0
"""How a lease ends from the client's side, and when the client asks for another."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tensorpool.client.attachment import FIRST_RETRY_NS, LOST_RETRY_NS, Detached, LossReason, Lost, Send
from tensorpool.client.attachment_phases import Phase
from tensorpool.wire.driver import LeaseRevokeReason, ResponseCode, Role, ShmDetachRequest
from tests.client.attachment.conftest import KEEPALIVE_NS, SILENCE_NS, T0, Bench, attach_request, detach_request, lost
from tests.client.conftest import SECOND_NS, STREAM, granted, refused, revoked


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
