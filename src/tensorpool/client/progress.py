# SPDX-License-Identifier: Apache-2.0
"""Partial frames: when a producer sends FrameProgress, and what a consumer may believe.

A frame is reported as STARTED, PROGRESS …, COMPLETE; never back, never more often than policy and rate allow, and never
without a consumer that asked. Holds no clock and does no IO.
Wire §10.1.2, §10.2.2; decisions B4, B5, B23-B25, B32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from tensorpool.wire.control import ConsumerHello, FrameProgress, FrameProgressState

DEFAULT_INTERVAL_US: Final = 250
DEFAULT_BYTES_DELTA: Final = 65_536
MIN_INTERVAL_US: Final = 200  # the producer's floors
MIN_BYTES_DELTA: Final = 4_096
MAX_RATE_HZ: Final = 2_000  # messages of a stream, of every state
BURST: Final = 16  # messages that may go at once after a pause
MAX_TRACKED: Final = 64


class ProgressPolicy(msgspec.Struct, frozen=True):
    """How often a partial frame is worth a message."""

    interval_ns: int = DEFAULT_INTERVAL_US * 1_000
    bytes_delta: int = DEFAULT_BYTES_DELTA
    major_delta_units: int = 0  # rows or columns; 0: no rule

    @classmethod
    def of(cls, hellos: Iterable[ConsumerHello]) -> ProgressPolicy | None:
        """The most eager of what the consumers that support progress ask for, above the floors; None without any."""
        asking = [hello for hello in hellos if hello.supports_progress]
        if not asking:
            return None

        # B25: 0 and absent say nothing.
        def smallest(values: Iterable[int | None], default: int) -> int:
            return min((value for value in values if value), default=default)

        interval_us = smallest((hello.progress_interval_us for hello in asking), DEFAULT_INTERVAL_US)
        bytes_delta = smallest((hello.progress_bytes_delta for hello in asking), DEFAULT_BYTES_DELTA)
        return cls(
            max(interval_us, MIN_INTERVAL_US) * 1_000,
            max(bytes_delta, MIN_BYTES_DELTA),
            smallest((hello.progress_major_delta_units for hello in asking), 0),
        )


class ProgressThrottle:
    """Decides which updates of a stream's frames are sent, and when.

        none ──start──► begun ──STARTED──► started ──PROGRESS──► started …
          ▲               └──end──► none      └──end: COMPLETE──► none

    Every message takes a token of a bucket that holds BURST and gains MAX_RATE_HZ a second. The last token is kept for
    COMPLETE: a frame whose STARTED was sent always ends with it. A frame that finds no token is not reported at all
    (§10.2.2: FrameProgress may be omitted), unless one comes while it is written. What is too early waits: `take`
    returns the newest state as soon as it may go.
    """

    def __init__(self) -> None:
        self._tokens = float(BURST)
        self._counted_ns: int | None = None  # up to here the bucket was filled
        self._is_open = False
        self._is_started = False
        self._unit_bytes = 0
        self._sent_bytes = 0
        self._sent_ns = 0
        self.filled_bytes = 0

    @property
    def is_started(self) -> bool:
        """Whether STARTED was sent of the frame that is being written."""
        return self._is_started

    def start(self, unit_bytes: int) -> None:
        """A frame begins; `unit_bytes` is the distance of its rows or columns."""
        self._is_open = True
        self._is_started = False
        self._unit_bytes = unit_bytes
        self.filled_bytes = 0

    def update(self, filled_bytes: int) -> None:
        """So much of the frame is written. Raises ValueError for less than before: bytes do not become unwritten."""
        if filled_bytes < self.filled_bytes:
            raise ValueError(f"progress goes back from {self.filled_bytes} to {filled_bytes} bytes")
        self.filled_bytes = filled_bytes

    def is_due(self, policy: ProgressPolicy) -> bool:
        """Whether something of a started frame is worth a PROGRESS, now or when its time has come."""
        delta = self.filled_bytes - self._sent_bytes
        is_enough = delta >= policy.bytes_delta
        if policy.major_delta_units and self._unit_bytes:
            is_enough = is_enough or delta >= policy.major_delta_units * self._unit_bytes
        return self._is_started and is_enough

    def take(self, policy: ProgressPolicy, now_ns: int) -> FrameProgressState | None:
        """What is to be sent now, with `filled_bytes`; None where nothing may go."""
        if not self._is_open or self._tokens_at(now_ns) < 2:
            return None
        if self._is_started and (not self.is_due(policy) or now_ns - self._sent_ns < policy.interval_ns):
            return None
        state = FrameProgressState.PROGRESS if self._is_started else FrameProgressState.STARTED
        self._tokens -= 1
        self._is_started = True
        self._sent_bytes = self.filled_bytes
        self._sent_ns = now_ns
        return state

    def end(self, *, is_committed: bool) -> bool:
        """The frame is committed or given up. Whether its COMPLETE is to be sent."""
        is_complete = is_committed and self._is_started
        self._is_open = self._is_started = False
        self._tokens -= is_complete
        return is_complete

    def _tokens_at(self, now_ns: int) -> float:
        since_ns = now_ns if self._counted_ns is None else self._counted_ns
        self._counted_ns = max(now_ns, since_ns)
        self._tokens = min(self._tokens + (self._counted_ns - since_ns) * MAX_RATE_HZ / 1e9, float(BURST))
        return self._tokens


class ProgressTracker:
    """The progress reports that a consumer has received, in one epoch, of frames that are still being written."""

    def __init__(self) -> None:
        self._reported: dict[int, tuple[FrameProgressState, int] | None] = {}  # None: broken, to be ignored
        self.dropped = 0

    def accepts(self, message: FrameProgress) -> bool:
        """Whether it continues its frame's story; one that goes back spoils the frame (§10.2.2)."""
        if message.state is FrameProgressState.UNKNOWN:
            return False
        fresh = (message.state, message.payload_bytes_filled)
        if message.seq in self._reported:
            known = self._reported[message.seq]
            if known is None or fresh[0] < known[0] or fresh[1] < known[1]:
                self._reported[message.seq] = None
                self.dropped += 1
                return False
        elif len(self._reported) >= MAX_TRACKED:
            del self._reported[next(iter(self._reported))]
        self._reported[message.seq] = fresh
        return True

    def is_broken(self, seq: int) -> bool:
        """Whether this frame's story went back, so that the frame is not to be believed either."""
        return seq in self._reported and self._reported[seq] is None

    def forget(self) -> None:
        """A new epoch counts its own seqs."""
        self._reported.clear()
