# SPDX-License-Identifier: Apache-2.0
"""Times of a source on our clock, what it lost, and how long to wait before it is opened again."""

from __future__ import annotations

from tensorpool.sources.ingest import LONGEST_WAIT_S, BackOff
from tensorpool.sources.source_clock import LEAP_NS, MissingFrames, SourceClock

SECOND = 1_000_000_000


def test_the_shortest_delay_sets_the_offset() -> None:
    """Frames that arrive late keep the spacing that the source gave them."""
    clock = SourceClock()
    assert clock.stamp_ns(0, 10_000) == 10_000
    assert clock.stamp_ns(100, 10_100) == 10_100
    assert clock.stamp_ns(200, 10_900) == 10_200  # 700 late
    assert clock.stamp_ns(300, 10_290) == 10_290  # earlier than any: the offset is smaller than thought


def test_times_never_go_back_nor_into_the_future() -> None:
    """A smaller offset does not put a frame before the one before it."""
    clock = SourceClock()
    stamps = [clock.stamp_ns(at, now) for at, now in ((0, 1000), (10, 1900), (20, 1905), (21, 950 + 960))]
    assert stamps == sorted(set(stamps))
    assert all(stamp <= now for stamp, now in zip(stamps, (1000, 1900, 1905, 1910), strict=True))


def test_a_clock_that_runs_slower_than_ours_is_followed() -> None:
    """After hours of 100 ppm drift a stamp is still near the arrival."""
    clock = SourceClock()
    for second in range(0, 10_000, 10):
        now = second * SECOND
        stamp = clock.stamp_ns(now - second * 100_000, now)
    assert now - stamp < SECOND // 100


def test_a_leap_of_the_sources_time_begins_anew() -> None:
    """A source that restarts at 0 is not stamped hours in the past."""
    clock = SourceClock()
    clock.stamp_ns(100 * LEAP_NS, 5 * SECOND)
    assert clock.stamp_ns(0, 6 * SECOND) == 6 * SECOND


def test_frames_that_a_source_left_out_are_counted_by_its_rate() -> None:
    """A step of three periods is two missing frames; jitter, restarts and sources without a rate count nothing."""
    missing = MissingFrames()
    for at_ms in (0, 10, 21, 30, 60, 71):
        missing.add(at_ms * 1_000_000, 100.0)
    assert missing.count == 2
    missing.restart()
    missing.add(200_000_000, 100.0)
    missing.add(900_000_000, 0.0)
    missing.add(0, 100.0)  # looped
    assert missing.count == 2


def test_waits_grow_to_a_limit_and_start_anew_after_a_frame() -> None:
    """0.5, 1, 2 … 30 s."""
    wait = BackOff()
    assert [wait.next_s() for _ in range(8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_WAIT_S, LONGEST_WAIT_S]
    wait.reset()
    assert wait.next_s() == 0.5
