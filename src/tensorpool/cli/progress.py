# SPDX-License-Identifier: Apache-2.0
"""Progress of a running command: rates, ages of frames, and a line that is redrawn in place on a terminal."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import click
import msgspec
import numpy as np

from tensorpool.cli.format import MIB, counts, number
from tensorpool.client import DropReason, State, StateChange

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

MAX_AGES: Final = 100_000
MOMENT_S: Final = 1.0  # for which a command may be silent
STDERR_EVERY_S: Final = 0.05
REDRAW_EVERY_NS: Final = 200_000_000
WINDOW_NS: Final = 500_000_000  # of a rate: of a shorter time it would say little


class Rate(msgspec.Struct, frozen=True):
    """Frames and bytes a second."""

    hz: float = 0.0
    mib_per_s: float = 0.0

    def __str__(self) -> str:
        return f"{number(self.hz)} Hz, {number(self.mib_per_s)} MiB/s"


class Meter:
    """Counts frames and bytes, and computes their rate: over all frames, and lately."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self.frames = 0
        self.bytes = 0
        self._first_bytes = 0
        self._first_ns = 0
        self._last_ns = 0
        self._before = (now_ns(), 0, 0)
        self._recent = Rate()

    def add(self, nbytes: int) -> None:
        self._last_ns = self._now_ns()
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
        """Of the time since it was computed last, which is half a second ago or more."""
        now_ns = self._now_ns()
        then_ns, frames, nbytes = self._before
        if now_ns - then_ns >= WINDOW_NS:
            self._before = (now_ns, self.frames, self.bytes)
            seconds = (now_ns - then_ns) / 1e9
            self._recent = Rate((self.frames - frames) / seconds, (self.bytes - nbytes) / MIB / seconds)
        return self._recent


class Ages:
    """How old frames were when they arrived; of the last 100 000."""

    def __init__(self) -> None:
        self._ages_ns: deque[int] = deque(maxlen=MAX_AGES)

    def add(self, age_ns: int | None) -> None:
        if age_ns is not None:
            self._ages_ns.append(age_ns)

    def percentiles_ms(self) -> tuple[float, float] | None:
        """p50 and p99; None without frames."""
        if not self._ages_ns:
            return None
        half, most = np.percentile(np.fromiter(self._ages_ns, np.int64, len(self._ages_ns)), [50, 99]) / 1e6
        return float(half), float(most)


class Redrawn:
    """Base of what is redrawn in place: `_live` is an area of the terminal, or None where there is no terminal."""

    def __init__(self, *, to_stderr: bool, is_quiet: bool = False) -> None:
        self._live: Live | None = None
        if not is_quiet and (sys.stderr if to_stderr else sys.stdout).isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=to_stderr), auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


class _StderrLines:
    """What this process and its children, such as Spark's, write to standard error: given on line by line.

    A child knows nothing of the line that is redrawn in place, and would write behind it.
    """

    def __init__(self, console: Console, note: Callable[[str], None]) -> None:
        self._note = note
        sys.stderr.flush()
        self._terminal = os.dup(2)
        console.file = os.fdopen(os.dup(self._terminal), "w")
        self._reading, writing = os.pipe()
        os.dup2(writing, 2)
        os.close(writing)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="tensorpool-stderr", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Standard error is the terminal again. A child that goes on writes into nothing."""
        sys.stderr.flush()
        os.dup2(self._terminal, 2)
        os.close(self._terminal)
        self._is_over.set()
        self._thread.join()
        os.close(self._reading)

    def _read(self) -> None:
        rest = b""
        while True:
            is_over = self._is_over.is_set()  # whatever was written before that is there by now
            if select.select([self._reading], [], [], STDERR_EVERY_S)[0]:
                data = os.read(self._reading, 1 << 16)
                if not data:
                    break
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._note(line.decode(errors="replace"))
            elif is_over:
                break
        if rest:
            self._note(rest.decode(errors="replace"))


class LiveLine(Redrawn):
    """One line at the bottom of a terminal, and nothing where there is no terminal. Writes to stderr."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        super().__init__(to_stderr=True, is_quiet=is_quiet)
        self._stderr: _StderrLines | None = None
        self._redraw_ns = time.monotonic_ns() + REDRAW_EVERY_NS
        self._has_begun = False
        self._is_over = False

    def __enter__(self) -> Self:
        if self._live is not None:
            self._stderr = _StderrLines(self._live.console, self.note)
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stderr is not None:
            self._stderr.close()
        super().__exit__(kind, error, trace)

    @property
    def is_due(self) -> bool:
        """Whether it is time to redraw the line; never without a terminal."""
        return self._live is not None and time.monotonic_ns() >= self._redraw_ns

    def show(self, text: str) -> None:
        from rich.text import Text

        assert self._live is not None
        self._redraw_ns = time.monotonic_ns() + REDRAW_EVERY_NS
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        if self._live is None:
            click.echo(text, err=True)
        else:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def noting_a_wait(self, text: str) -> Iterator[None]:
        """Print a line where what is inside takes longer than a moment."""
        timer = threading.Timer(MOMENT_S, self.note, [text])
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def on_state(self, change: StateChange) -> None:
        """Print when frames stop flowing, and when they flow again."""
        if change.state in (State.WAITING, State.FALLBACK) and not self._is_over:
            self.note(f"waiting: {change.reason}")
        elif change.state is State.ACTIVE and self._has_begun:
            self.note(f"{change.reason}, epoch {change.epoch}")
        self._has_begun = self._has_begun or change.state is State.ACTIVE

    def end(self) -> None:
        """The command itself ends the stream from here on: do not print that frames stop."""
        self._is_over = True


def drops(by_reason: Mapping[DropReason, int]) -> str:
    """ "overwritten 12, gap 3"; empty where there are none."""
    return counts(drops_by_name(by_reason))


def drops_by_name(by_reason: Mapping[DropReason, int]) -> dict[str, int]:
    """For JSON."""
    return {reason.name: count for reason, count in by_reason.items() if count}
