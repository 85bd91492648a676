# SPDX-License-Identifier: Apache-2.0
"""Partial frames: when a producer tells of them, and what a consumer may believe.

A frame is told as STARTED, PROGRESS …, COMPLETE; never back, never more often than its policy allows, and never without
somebody who asked. Holds no clock and does no IO.
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
MAX_RATE_HZ: Final = 2_000
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
            max(interval_us, MIN_INTERVAL_US, 1_000_000 // MAX_RATE_HZ) * 1_000,
            max(bytes_delta, MIN_BYTES_DELTA),
            smallest((hello.progress_major_delta_units for hello in asking), 0),
        )


class ProgressThrottle:
    """Decides which updates of a stream's frames are told."""

    def __init__(self) -> None:
        self._seq: int | None = None
        self._told_bytes = 0
        self._filled_bytes = 0
        self._told_ns = 0

    def start(self, seq: int, now_ns: int) -> None:
        """A frame begins; its STARTED is always told."""
        self._seq = seq
        self._told_bytes = 0
        self._filled_bytes = 0
        self._told_ns = now_ns

    def update(self, filled_bytes: int, unit_bytes: int, policy: ProgressPolicy, now_ns: int) -> bool:
        """Whether this much is worth a PROGRESS now: enough time and enough bytes, or units, since the last.

        Raises ValueError when it is less than before: bytes do not become unwritten.
        """
        if filled_bytes < self._filled_bytes:
            raise ValueError(f"progress goes back from {self._filled_bytes} to {filled_bytes} bytes")
        self._filled_bytes = filled_bytes
        delta = filled_bytes - self._told_bytes
        is_enough = delta >= policy.bytes_delta
        if policy.major_delta_units and unit_bytes:
            is_enough = is_enough or delta >= policy.major_delta_units * unit_bytes
        if not is_enough or now_ns - self._told_ns < policy.interval_ns:
            return False
        self._told_bytes = filled_bytes
        self._told_ns = now_ns
        return True


class ProgressTracker:
    """What a consumer has heard of frames that are under way, in one epoch."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[FrameProgressState, int] | None] = {}  # None: broken, to be ignored
        self.dropped = 0

    def accepts(self, message: FrameProgress) -> bool:
        """Whether it continues its frame's story; one that goes back spoils the frame (§10.2.2)."""
        if message.state is FrameProgressState.UNKNOWN:
            return False
        fresh = (message.state, message.payload_bytes_filled)
        if message.seq in self._heard:
            heard = self._heard[message.seq]
            if heard is None or fresh[0] < heard[0] or fresh[1] < heard[1]:
                self._heard[message.seq] = None
                self.dropped += 1
                return False
        elif len(self._heard) >= MAX_TRACKED:
            del self._heard[next(iter(self._heard))]
        self._heard[message.seq] = fresh
        return True

    def is_broken(self, seq: int) -> bool:
        """Whether this frame's story went back, so that the frame is not to be believed either."""
        return seq in self._heard and self._heard[seq] is None

    def forget(self) -> None:
        """A new epoch counts its own seqs."""
        self._heard.clear()
