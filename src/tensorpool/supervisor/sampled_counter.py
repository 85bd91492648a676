# SPDX-License-Identifier: Apache-2.0
"""A counter that is read now and then: its rate, and its value at a time in between.

Holds no clock and does no IO.
"""

from __future__ import annotations

from collections import deque
from typing import Final

MAX_POINTS: Final = 64
APART_NS: Final = 150_000_000  # points closer than this replace each other
WINDOW_NS: Final = 3_000_000_000
FEW: Final = 8  # steps: a slow counter is measured over a longer time
AT_LEAST_IDLE_NS: Final = 2_000_000_000
IDLE_INTERVALS: Final = 3


class SampledCounter:
    """Samples of a counter that only grows. A step back starts it anew."""

    __slots__ = ("_points", "moved_ns")

    def __init__(self) -> None:
        self._points: deque[tuple[int, int]] = deque(maxlen=MAX_POINTS)
        self.moved_ns: int | None = None  # when it last grew

    def clear(self) -> None:
        self._points.clear()
        self.moved_ns = None

    @property
    def value(self) -> int | None:
        """The last value."""
        return self._points[-1][1] if self._points else None

    @property
    def seen_ns(self) -> int | None:
        """When it was read last."""
        return self._points[-1][0] if self._points else None

    def add(self, now_ns: int, value: int) -> None:
        """Its value is `value` now."""
        points = self._points
        if points and value < points[-1][1]:
            self.clear()
        if points and value > points[-1][1]:
            self.moved_ns = now_ns
        if not points:
            points.append((now_ns, value))
            return
        last_ns = points[-1][0]
        if now_ns < last_ns:
            return
        # The last point may be replaced; the rate is measured from those before it.
        if len(points) >= 2 and last_ns - points[-2][0] < APART_NS:
            points[-1] = now_ns, value
        else:
            points.append((now_ns, value))

    def at(self, when_ns: int) -> int | None:
        """The value then: interpolated between points, the last one after them; None before the first."""
        points = self._points
        if not points:
            return None
        later_ns, later = points[-1]
        for earlier_ns, earlier in reversed(points):
            if when_ns >= earlier_ns:
                if later_ns == earlier_ns or when_ns >= later_ns:
                    return later
                return earlier + (later - earlier) * (when_ns - earlier_ns) // (later_ns - earlier_ns)
            later_ns, later = earlier_ns, earlier
        return None

    def rate_hz(self) -> float | None:
        """Steps a second lately; None while there is one sample only."""
        points = self._points
        if len(points) < 2:
            return None
        last_ns, last = points[-1]
        since_ns, since = points[0]
        for point_ns, value in reversed(points):
            if last_ns - point_ns >= WINDOW_NS and last - value >= FEW:
                since_ns, since = point_ns, value
                break
        if last == since or last_ns == since_ns:
            return 0.0
        interval_ns = (last_ns - since_ns) / (last - since)
        is_over = self.moved_ns is None or last_ns - self.moved_ns > max(AT_LEAST_IDLE_NS, IDLE_INTERVALS * interval_ns)
        return 0.0 if is_over else 1e9 / interval_ns
