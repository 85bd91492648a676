# SPDX-License-Identifier: Apache-2.0
"""Which frames a reader wants, by stream, epoch, seq and time, so that the rest need not be read.

Holds no state and does no IO.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Bounds(msgspec.Struct, frozen=True, omit_defaults=True):
    """Numbers from `lo` to `hi`, both included, and where there are `values` only those of them."""

    lo: int | None = None
    hi: int | None = None
    values: tuple[int, ...] | None = None

    @property
    def is_all(self) -> bool:
        return self == Bounds()

    def narrowed(self, lo: int | None = None, hi: int | None = None, values: Iterable[int] | None = None) -> Bounds:
        """What lies within both."""
        lows = [low for low in (self.lo, lo) if low is not None]
        highs = [high for high in (self.hi, hi) if high is not None]
        kept = self.values
        if values is not None:
            kept = tuple(sorted(value for value in set(values) if kept is None or value in kept))
        return Bounds(max(lows, default=None), min(highs, default=None), kept)

    def overlaps(self, first: int | None, last: int | None) -> bool:
        """Whether some number from `first` to `last`, both included, may be wanted; None: that end is not known."""
        if self.lo is not None and last is not None and last < self.lo:
            return False
        if self.hi is not None and first is not None and first > self.hi:
            return False
        values = self.values
        return values is None or any(
            (first is None or value >= first) and (last is None or value <= last) for value in values
        )

    def spans(self, lo: int, hi: int) -> list[tuple[int, int]]:
        """What is wanted of the numbers from `lo` up to, not including, `hi`, as ranges of the same kind."""
        first = lo if self.lo is None else max(lo, self.lo)
        end = hi if self.hi is None else min(hi, self.hi + 1)
        if self.values is None:
            return [(first, end)] if first < end else []
        found: list[tuple[int, int]] = []
        for value in self.values:
            if not first <= value < end:
                continue
            if found and found[-1][1] == value:
                found[-1] = found[-1][0], value + 1
            else:
                found.append((value, value + 1))
        return found


class Selection(msgspec.Struct, frozen=True, omit_defaults=True):
    """The frames that are within all bounds. A frame without a time is in none of those of time."""

    stream_id: Bounds = Bounds()
    epoch: Bounds = Bounds()
    seq: Bounds = Bounds()
    time: Bounds = Bounds()  # microseconds since 1970, UTC

    @property
    def is_all(self) -> bool:
        return self == Selection()

    @property
    def is_open_ended(self) -> bool:
        """Whether frames that come later may be wanted."""
        return all(bounds.hi is None and bounds.values is None for bounds in (self.seq, self.time))

    def narrowed(self, name: str, **by: Any) -> Selection:
        """With narrower bounds of one column."""
        return msgspec.structs.replace(self, **{name: getattr(self, name).narrowed(**by)})

    def has_epoch(self, stream_id: int, epoch: int) -> bool:
        """Whether frames of an epoch may be wanted."""
        return self.stream_id.overlaps(stream_id, stream_id) and self.epoch.overlaps(epoch, epoch)


def time_us_of(moment: datetime) -> int:
    """Microseconds since 1970 of a time with its zone."""
    return (moment - _EPOCH) // timedelta(microseconds=1)
