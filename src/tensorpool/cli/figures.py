# SPDX-License-Identifier: Apache-2.0
"""Figures as people read them: rates, ages, sizes and drops, and a line that is redrawn in place on a terminal."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import click
import msgspec
import numpy as np

from tensorpool.client import DropReason, State, StateChange

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

MIB: Final = 2**20
MAX_AGES: Final = 100_000
REDRAW_EVERY_NS: Final = 200_000_000


class Rate(msgspec.Struct, frozen=True):
    """Frames and bytes a second."""

    hz: float = 0.0
    mib_per_s: float = 0.0

    def __str__(self) -> str:
        return f"{number(self.hz)} Hz, {number(self.mib_per_s)} MiB/s"


class Meter:
    """Counts frames and bytes, and tells their rate: over the whole, and since it was last asked."""

    def __init__(self) -> None:
        self.frames = 0
        self.bytes = 0
        self._first_bytes = 0
        self._first_ns = 0
        self._last_ns = 0
        self._asked = (time.monotonic_ns(), 0, 0)

    def add(self, nbytes: int) -> None:
        self._last_ns = time.monotonic_ns()
        if self.frames == 0:
            self._first_ns, self._first_bytes = self._last_ns, nbytes
        self.frames += 1
        self.bytes += nbytes

    @property
    def seconds(self) -> float:
        """From the first frame to the last."""
        return (self._last_ns - self._first_ns) / 1e9

    @property
    def overall(self) -> Rate:
        """Between the first frame and the last."""
        if self.frames < 2:
            return Rate()
        return Rate((self.frames - 1) / self.seconds, (self.bytes - self._first_bytes) / MIB / self.seconds)

    def recent(self) -> Rate:
        """Since the last call."""
        now_ns = time.monotonic_ns()
        then_ns, frames, size = self._asked
        self._asked = (now_ns, self.frames, self.bytes)
        seconds = (now_ns - then_ns) / 1e9
        return Rate((self.frames - frames) / seconds, (self.bytes - size) / MIB / seconds)


class Ages:
    """How old frames were when they arrived; of the last 100 000."""

    def __init__(self) -> None:
        self._ages_ns: deque[int] = deque(maxlen=MAX_AGES)

    def add(self, age_ns: int | None) -> None:
        if age_ns is not None:
            self._ages_ns.append(age_ns)

    def percentiles_ms(self) -> tuple[float, float] | None:
        """p50 and p99; None while there is none."""
        if not self._ages_ns:
            return None
        half, most = np.percentile(np.fromiter(self._ages_ns, np.int64, len(self._ages_ns)), [50, 99]) / 1e6
        return float(half), float(most)


class LiveLine:
    """One line at the bottom of a terminal, and nothing where there is no terminal. Writes to stderr."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        self._live: Live | None = None
        self._redraw_ns = time.monotonic_ns() + REDRAW_EVERY_NS
        self._has_begun = False
        self._is_over = False
        if not is_quiet and sys.stderr.isatty():
            from rich.live import Live

            self._live = Live(console=terminal(), auto_refresh=False, transient=True)

    @property
    def is_due(self) -> bool:
        """Whether it is time to show something; never without a terminal."""
        return self._live is not None and time.monotonic_ns() >= self._redraw_ns

    def show(self, text: str) -> None:
        from rich.text import Text

        assert self._live is not None
        self._redraw_ns = time.monotonic_ns() + REDRAW_EVERY_NS
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._live is None:
            click.echo(text, err=True)
        else:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def on_state(self, change: StateChange) -> None:
        """Say when frames stop flowing, and when they flow again."""
        if change.state in (State.WAITING, State.FALLBACK) and not self._is_over:
            self.note(f"waiting: {change.reason}")
        elif change.state is State.ACTIVE and self._has_begun:
            self.note(f"{change.reason}, epoch {change.epoch}")
        self._has_begun = self._has_begun or change.state is State.ACTIVE

    def end(self) -> None:
        """What happens from here on is our own doing."""
        self._is_over = True

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def terminal() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def number(value: float) -> str:
    """Three or more digits that matter."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def size(nbytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"


def duration_ms(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:.1f} s"
    return f"{number(value)} ms" if value >= 1 else f"{1000 * value:.0f} µs"


def shape(extents: tuple[int, ...]) -> str:
    return "x".join(map(str, extents))


def drops(counts: Mapping[DropReason, int]) -> str:
    """Most frequent first: "overwritten 12, gap 3"; empty where there are none."""
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{reason.name.lower()} {count}" for reason, count in ranked if count)


def drops_by_name(counts: Mapping[DropReason, int]) -> dict[str, int]:
    """For JSON."""
    return {reason.name: count for reason, count in counts.items() if count}
