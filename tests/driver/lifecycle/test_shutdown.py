# SPDX-License-Identifier: Apache-2.0
"""How a driver drains and ends."""

from __future__ import annotations

import pytest

from tensorpool.driver.effects import Exit, Send
from tensorpool.driver.lifecycle import Phase
from tensorpool.wire.driver import (
    ResponseCode,
    Role,
    ShmAttachResponse,
    ShmDriverShutdown,
    ShmDriverShutdownRequest,
    ShutdownReason,
)
from tests.driver.conftest import FRONT, LEASE_NS, REAR, SECOND_NS, attach, created, detach, keepalive, serving
from tests.driver.lifecycle.conftest import message_of, only_message, outline, refusal, with_producer


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
