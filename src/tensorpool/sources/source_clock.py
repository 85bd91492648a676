# SPDX-License-Identifier: Apache-2.0
"""Timestamps of a source on the monotonic clock of this host, and the frames that are missing between them.

Holds no clock and does no IO.

A source counts time from an origin of its own. A frame arrives some time after it was captured, and the shortest such
delay is the one nearest to the truth: the offset between both clocks is the smallest difference seen so far. It may
rise slowly, because clocks drift apart. A time that leaps (the source restarted) begins a new offset.
"""

from __future__ import annotations

from typing import Final

DRIFT_PPM: Final = 200  # by which the source's clock may run faster or slower than ours
LEAP_NS: Final = 2_000_000_000


class SourceClock:
    """Maps times of one source, frame by frame.

    >>> clock = SourceClock()
    >>> clock.stamp_ns(0, now_ns=1_005), clock.stamp_ns(100, now_ns=1_101), clock.stamp_ns(200, now_ns=1_240)
    (1005, 1101, 1201)
    """

    def __init__(self) -> None:
        self._offset_ns: int | None = None
        self._at_ns = 0
        self._last_ns = 0

    def stamp_ns(self, time_ns: int, now_ns: int) -> int:
        """When a frame was captured by our clock: not after `now_ns`, and after the frame before it."""
        found_ns = now_ns - time_ns
        if self._offset_ns is None or abs(found_ns - self._offset_ns) > LEAP_NS:
            self._offset_ns = found_ns
        else:
            drifted_ns = self._offset_ns + (now_ns - self._at_ns) * DRIFT_PPM // 1_000_000
            self._offset_ns = min(found_ns, drifted_ns)
        self._at_ns = now_ns
        self._last_ns = min(now_ns, max(self._offset_ns + time_ns, self._last_ns + 1))
        return self._last_ns


class MissingFrames:
    """Counts frames that the source itself lost: steps of its time that are longer than its rate allows."""

    def __init__(self) -> None:
        self.count = 0
        self._before_ns: int | None = None

    def add(self, time_ns: int, rate_hz: float) -> None:
        """A frame; without a rate nothing can be missing."""
        if self._before_ns is not None and rate_hz > 0:
            step_ns = time_ns - self._before_ns
            if 0 < step_ns <= LEAP_NS:
                self.count += max(0, round(step_ns * rate_hz / 1e9) - 1)
        self._before_ns = time_ns

    def restart(self) -> None:
        """The source was opened again: what it lost meanwhile is not known."""
        self._before_ns = None
