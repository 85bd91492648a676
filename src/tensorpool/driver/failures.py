# SPDX-License-Identifier: Apache-2.0
"""Failures inside a turn: counted, and logged at most once a second, so that the turn can go on.

One client's message, one order or one part of the housekeeping may fail without harm to other clients.
A failure that repeats at every turn must not fill the disk either.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from tensorpool.clock import Clock
from tensorpool.logs import Logger

LOG_EVERY_NS: Final = 1_000_000_000


class Failures:
    """Counts failures under `failures` and logs `turn_failed` with how many were not logged since the last time."""

    def __init__(self, log: Logger, clock: Clock, counts: Counter[str]) -> None:
        self._log = log
        self._clock = clock
        self._counts = counts
        self._next_ns: int | None = None
        self._suppressed = 0

    def report(self, part: str, error: Exception) -> None:
        """`part` names what failed."""
        self._counts["failures"] += 1
        now_ns = self._clock.monotonic_ns()
        if self._next_ns is not None and now_ns < self._next_ns:
            self._suppressed += 1
            return
        self._next_ns = now_ns + LOG_EVERY_NS
        suppressed, self._suppressed = self._suppressed, 0
        self._log.error("turn_failed", part=part, suppressed=suppressed, exc_info=error)
