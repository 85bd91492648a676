# SPDX-License-Identifier: Apache-2.0
"""Who refreshes the activity stamp: the driver, or the producer in its place. Time is passed by hand."""

from __future__ import annotations

import pytest

from tensorpool.client.mapping import ActivityDuty

PERIOD_NS = 1_000
T0 = 1_000_000


def refreshes(duty: ActivityDuty, periods: int, *, driver_stamps: bool, announces: bool, stamp_ns: int = 7) -> int:
    """How often a producer refreshes in so many announce periods, looking four times in each."""
    count = 0
    for quarter in range(4 * periods):
        now_ns = T0 + quarter * PERIOD_NS // 4
        if quarter % 4 == 1:
            stamp_ns = now_ns if driver_stamps else stamp_ns
            if announces:
                duty.on_announce()
        if duty.is_due(stamp_ns, now_ns, PERIOD_NS):
            stamp_ns = now_ns
            duty.on_refreshed(stamp_ns, now_ns)
            count += 1
    return count


@pytest.mark.spec("WIRE-7.1-05")
def test_a_stamp_that_stands_still_while_the_epoch_is_announced_is_refreshed_every_period() -> None:
    """The first time after two announces, then with each one."""
    count = refreshes(ActivityDuty(), 20, driver_stamps=False, announces=True)
    assert 17 <= count <= 19


def test_a_driver_that_refreshes_it_is_left_alone() -> None:
    """Its own stamps come with its announces."""
    assert refreshes(ActivityDuty(), 20, driver_stamps=True, announces=True) == 0


def test_without_announces_nothing_is_refreshed() -> None:
    """A dead driver shows, however long the producer lives; also one that died right after its last refresh."""
    assert refreshes(ActivityDuty(), 20, driver_stamps=False, announces=False) == 0
    duty = ActivityDuty()
    assert not duty.is_due(7, T0, PERIOD_NS)
    duty.on_announce()
    assert refreshes(duty, 20, driver_stamps=False, announces=False) == 0


def test_announces_in_quick_succession_are_no_reason() -> None:
    """A newcomer may make a driver announce at once: the stamp must have stood still for a whole period."""
    duty = ActivityDuty()
    assert not duty.is_due(7, T0, PERIOD_NS)
    for _ in range(5):
        duty.on_announce()
    assert not duty.is_due(7, T0 + PERIOD_NS - 1, PERIOD_NS)
    assert duty.is_due(7, T0 + PERIOD_NS, PERIOD_NS)
