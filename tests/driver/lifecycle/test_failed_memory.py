# SPDX-License-Identifier: Apache-2.0
"""What the driver does when the memory of an epoch cannot be created."""

from __future__ import annotations

import pytest

from tensorpool.driver.effects import CreateEpoch, DropStream
from tensorpool.driver.lifecycle import RETRY_CREATION_NS, Lifecycle
from tensorpool.wire.driver import ResponseCode, Role
from tests.driver.conftest import (
    DYNAMIC,
    FRONT,
    PERIOD_NS,
    REAR,
    SECOND_NS,
    attach,
    created,
    detach,
    driver_config,
    serving,
)
from tests.driver.lifecycle.conftest import CREATE, outline, refusal


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
    """Neither failure nor memory of what is not there; that is removed."""
    lifecycle = serving()
    assert created(lifecycle, 4711, 1) == [DropStream(4711)]
    assert lifecycle.on_epoch_failed(4711, True, "full", 0) == []
    assert len(lifecycle.streams) == 2
