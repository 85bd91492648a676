# SPDX-License-Identifier: Apache-2.0
"""Time as something that callers pass in: every deadline is monotonic, and tests turn the clock by hand.

The monotonic clock is CLOCK_MONOTONIC, which all processes of a host share. Wire §15.7, §10.1.1.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where an agent reads the time from."""

    def monotonic_ns(self) -> int:
        """Nanoseconds that never run backwards, comparable between the processes of one host."""

    def realtime_ns(self) -> int:
        """Nanoseconds since 1970, subject to steps; never used for a deadline."""


class SystemClock:
    """The host's clocks."""

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def realtime_ns(self) -> int:
        return time.time_ns()


class ManualClock:
    """A clock that moves only when a test moves it.

    >>> clock = ManualClock(1_000)
    >>> clock.advance(500)
    >>> clock.monotonic_ns()
    1500
    """

    def __init__(self, monotonic_ns: int = 0, realtime_ns: int = 0) -> None:
        self._monotonic_ns = monotonic_ns
        self._realtime_ns = realtime_ns

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def realtime_ns(self) -> int:
        return self._realtime_ns

    def advance(self, duration_ns: int) -> None:
        """Let `duration_ns` pass on both clocks."""
        if duration_ns < 0:
            raise ValueError(f"time does not run backwards: duration_ns = {duration_ns}")
        self._monotonic_ns += duration_ns
        self._realtime_ns += duration_ns

    def step_realtime(self, delta_ns: int) -> None:
        """Step the wall clock alone, as NTP or an operator does."""
        self._realtime_ns += delta_ns
