# SPDX-License-Identifier: Apache-2.0
"""How a client gives its lease back."""

from __future__ import annotations

import msgspec
import pytest

from tensorpool.client.attachment import DETACH_NS, Attached, Detached, Lost, Send
from tensorpool.client.attachment_phases import Phase
from tensorpool.wire.driver import LeaseRevokeReason, PayloadPool, ResponseCode, ShmDetachResponse
from tests.client.attachment.conftest import KEEPALIVE_NS, T0, Bench, detach_request
from tests.client.conftest import SECOND_NS, STREAM, revoked


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
