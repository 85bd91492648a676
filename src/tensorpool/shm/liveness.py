# SPDX-License-Identifier: Apache-2.0
"""Does the owner of a region still live? The facts, without a verdict.

A pid alone proves nothing: it may have been given to another process since, or belong to another container.
So callers get what the process table says and what the activity stamp says, and decide with both (C11). A stamp is of
the monotonic clock or of the wall clock, by the driver's `announce_clock_domain`, and does not say which: it is of the
clock that it is nearer to.
Wire §15.14, §15.21a.7; decisions C8, C9, C11.
"""

from __future__ import annotations

import os
import time

import msgspec

from tensorpool.process_identity import MAX_PID, process_stat
from tensorpool.wire.control import ShmRegionSuperblock


class Liveness(msgspec.Struct, frozen=True):
    """What is known of a region's owner."""

    pid: int
    is_process_alive: bool  # the process that wrote the superblock, not one that has its number by now
    activity_age_ns: int | None  # None: monotonic, and in the future, hence before the last boot, hence stale (C8)

    def is_active(self, window_ns: int) -> bool:
        """Whether the last sign of life is at most `window_ns` old."""
        return self.activity_age_ns is not None and self.activity_age_ns <= window_ns


def liveness_of(superblock: ShmRegionSuperblock, now_ns: int, wall_ns: int) -> Liveness:
    """The facts at `now_ns` by the monotonic clock and `wall_ns` by the wall clock, read after the superblock was."""
    is_alive = is_owner_alive(superblock, now_ns, wall_ns)
    age_ns = activity_age_ns(superblock.activity_timestamp_ns, now_ns, wall_ns)
    return Liveness(superblock.pid, is_alive, age_ns)


def activity_age_ns(stamp_ns: int, now_ns: int, wall_ns: int) -> int | None:
    """The age of a stamp of either clock; None for a monotonic one from before the last boot.

    A wall clock may have been set back since: then the distance counts.
    """
    if _is_wall_time(stamp_ns, now_ns, wall_ns):
        return abs(wall_ns - stamp_ns)
    return now_ns - stamp_ns if stamp_ns <= now_ns else None


def is_owner_alive(superblock: ShmRegionSuperblock, now_ns: int, wall_ns: int) -> bool:
    """Whether the process that wrote the superblock still runs, not one that has its number by now."""
    start_ns = superblock.start_timestamp_ns
    if _is_wall_time(start_ns, now_ns, wall_ns):
        start_ns -= wall_ns - now_ns
    return is_process_alive(superblock.pid, start_ns)


def _is_wall_time(stamp_ns: int, now_ns: int, wall_ns: int) -> bool:
    return abs(wall_ns - stamp_ns) < abs(now_ns - stamp_ns)


def is_process_alive(pid: int, since_ns: int) -> bool:
    """Whether the process that had `pid` at the monotonic time `since_ns` still runs. In doubt it does."""
    if not 0 < pid <= MAX_PID:
        return False
    try:
        os.kill(pid, 0)  # asks, sends nothing
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists and is another user's
    stat = process_stat(pid)
    if stat is None:
        return True
    # The kernel keeps the start by a clock that runs on while the machine sleeps. Taking today's difference of the
    # clocks may place it too early, never too late; so does the kernel's rounding.
    asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    started_ns = stat.start_ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK") - asleep_ns
    return not stat.has_ended and started_ns <= since_ns
