# SPDX-License-Identifier: Apache-2.0
"""The memory that a driver's configuration can come to take, stream by stream."""

from __future__ import annotations

import msgspec


class BillLine(msgspec.Struct, frozen=True):
    """The memory of one stream, or of `streams` alike that clients may still create (`stream_id` is None)."""

    name: str
    stream_id: int | None
    profile: str
    epoch_bytes: int
    epochs: int | None  # kept at a time; None: old epochs are never removed
    streams: int = 1

    @property
    def total_bytes(self) -> int | None:
        """All epochs of all these streams; None without a limit."""
        return None if self.epochs is None else self.epoch_bytes * self.epochs * self.streams


class Bill(msgspec.Struct, frozen=True):
    """What a configuration can come to take, at most.

    Epochs younger than `policies.epoch_gc_min_age_ns` are kept beyond `epochs`: a producer that restarts
    all the time takes more for as long.
    """

    lines: tuple[BillLine, ...]

    @property
    def epoch_bytes(self) -> int:
        """One epoch of each stream that the configuration names: what they need to work at all."""
        return sum(line.epoch_bytes for line in self.lines if line.stream_id is not None)

    @property
    def total_bytes(self) -> int | None:
        """All lines together; None without a limit."""
        totals = [line.total_bytes for line in self.lines]
        return None if None in totals else sum(filter(None, totals))
