# SPDX-License-Identifier: Apache-2.0
"""`tensorpool demo`: a camera and two readers, each in its own process, live figures, a summary that checks itself.

Everything is real and embedded: a media driver, an SHM driver, a producer and two consumers that share nothing but
memory. Both readers check every byte of what they get; one is slow on purpose. Every frame must be accounted for.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing as mp
import signal
import sys
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import click

from tensorpool.cli import actors, figures, options
from tensorpool.cli.actors import Part, Report
from tensorpool.cli.signals import StopSignals
from tensorpool.embedded import Local, local

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

CAMERA: Final = "camera"
DELAYS: Final = {"fast reader": 0.0, "slow reader": 2.5}  # in frame intervals, over each frame
NSLOTS: Final = 16
MIN_STRIDE: Final = 64
REDRAW_EVERY_S: Final = 0.1
LINE_EVERY_S: Final = 1.0
PATIENCE_S: Final = 60.0  # beyond the time that was asked for
WIDE: Final = 76  # columns that show everything


@click.command(name="demo")
@click.option("--seconds", default=5.0, show_default=True, type=click.FloatRange(min=0.5), help="How long to run.")
@click.option("--rate", default=60.0, show_default=True, type=click.FloatRange(min=1), help="Frames per second.")
@click.option(
    "--shape",
    type=options.shape,
    default="720x1280x3",
    show_default=True,
    metavar="NxM…",
    help="Of a frame of bytes: up to 8 extents.",
)
@click.option("--keep", is_flag=True, help="Keep the drivers running afterwards, for other commands, until Ctrl-C.")
def command(seconds: float, rate: float, shape: tuple[int, ...], keep: bool) -> None:
    """A camera, two readers, one of them slow, and a summary that checks itself.

    Exit code 1: a frame is unaccounted for, a byte is wrong, or something is left behind.
    """
    nbytes = math.prod(shape)
    stride = max(MIN_STRIDE, 1 << (nbytes - 1).bit_length())
    profile = {"header_nslots": NSLOTS, "payload_pools": [{"pool_id": 1, "stride_bytes": stride}]}
    stop = StopSignals()
    with local(overrides={"profiles.default": profile}) as pool:
        click.echo(
            f"camera: {figures.shape(shape)} bytes at {rate:g} Hz, {figures.size(nbytes)} a frame, "
            f"ring of {NSLOTS} slots\ntwo readers check every byte; one of them is slow on purpose"
        )
        with _Cast(pool, shape, rate, seconds) as cast:
            faults = cast.play(stop)
        if stop.count and not cast.reports[CAMERA].frames:
            faults.append("stopped before the first frame")
        faults = faults or account(cast.reports)
        if keep and not faults:
            _stay(pool, stop)
    folder = Path(pool.aeron_dir).parent
    if folder.exists():
        faults.append(f"{folder} is left behind")
    else:
        click.echo(f"{'/dev/shm':<13}nothing left behind")
    verdict = f"FAILED       {'; '.join(faults)}" if faults else "OK           every frame is accounted for"
    click.secho(verdict, fg="red" if faults else "green", bold=True)
    sys.exit(1 if faults else 0)


class _Cast:
    """The processes, from their start to their end."""

    def __init__(self, pool: Local, shape: tuple[int, ...], rate: float, seconds: float) -> None:
        self._seconds = seconds
        self._processes: dict[str, ForkServerProcess] = {}
        self._pipes: dict[str, Connection] = {}
        self.reports = {name: Report(name) for name in (CAMERA, *DELAYS)}
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([actors.__name__])  # imported once for all three
        ours_to_handle = signal.signal(signal.SIGINT, signal.SIG_IGN)  # they inherit it, and are told by us
        for name in self.reports:
            ours, theirs = context.Pipe()
            delay_s = DELAYS.get(name, 0.0) / rate
            part = Part(name, pool.aeron_dir, pool.config, shape, rate, seconds, len(DELAYS), delay_s)
            play = actors.play_camera if name == CAMERA else actors.play_reader
            self._processes[name] = context.Process(target=play, args=(part, theirs), daemon=True)
            self._processes[name].start()
            theirs.close()
            self._pipes[name] = ours
        signal.signal(signal.SIGINT, ours_to_handle)

    def play(self, stop: StopSignals) -> list[str]:
        """Until all have reported a last time; returns what went wrong."""
        deadline_s = time.monotonic() + self._seconds + PATIENCE_S
        is_stopped = is_over = False
        with _Display() as display:
            while not all(report.is_final for report in self.reports.values()):
                if fault := self._listen():
                    return [fault]
                if stop.count > 1 or time.monotonic() > deadline_s:
                    return ["interrupted" if stop.count > 1 else "it takes too long"]
                if stop.count and not is_stopped:
                    is_stopped = True
                    self._tell(CAMERA, "stop")
                if self.reports[CAMERA].is_final and not is_over:
                    is_over = True
                    for name in DELAYS:
                        self._tell(name, self.reports[CAMERA].frames)
                display.show(self.reports)
        return []

    def _tell(self, name: str, words: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is dead, as `_listen` will find
            self._pipes[name].send(words)

    def _listen(self) -> str:
        """Take what the actors report; the first failure, or nothing."""
        for pipe in wait(self._open_pipes(), REDRAW_EVERY_S):
            assert isinstance(pipe, Connection)
            name = next(name for name, known in self._pipes.items() if known is pipe)
            try:
                report = pipe.recv()
            except EOFError:
                self._processes[name].join()
                return f"the {name} ended with exit code {self._processes[name].exitcode}"
            self.reports[name] = report
            if report.failure:
                return f"the {name}: {report.failure}"
        return ""

    def _open_pipes(self) -> list[Connection]:
        return [pipe for name, pipe in self._pipes.items() if not self.reports[name].is_final]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, process in self._processes.items():
            if not self.reports[name].is_final:
                process.terminate()
            process.join()
            self._pipes[name].close()


class _Display:
    """What is going on: a table that is redrawn on a terminal, a line every second elsewhere."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._started_s: float | None = None
        self._next_s = 0.0
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(auto_refresh=False, transient=True)

    def show(self, reports: dict[str, Report]) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        if self._live is not None:
            self._next_s = now_s + REDRAW_EVERY_S
            self._live.update(_table(reports, self._live.console.width), refresh=True)
            return
        camera = reports[CAMERA]
        if self._started_s is None and camera.frames:
            self._started_s = now_s
        elif self._started_s is not None and not camera.is_final:
            readers = "".join(f"; {name} {reports[name].frames}, lost {reports[name].lost}" for name in DELAYS)
            click.echo(f"{now_s - self._started_s:4.1f} s  {camera.frames} frames, {camera.recent}{readers}")
        if self._started_s is not None:
            self._next_s = (self._next_s or now_s) + LINE_EVERY_S

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def _table(reports: dict[str, Report], width: int) -> Table:
    from rich.table import Table

    is_wide = width >= WIDE
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for title in ("frames", "Hz", "MiB/s", "lost", *(["age p50", "p99"] if is_wide else [])):
        table.add_column(title, justify="right", no_wrap=True)
    if is_wide:
        table.add_column("why", no_wrap=True, overflow="ellipsis", style="dim")
    for name, report in reports.items():
        ages = [figures.duration_ms(age) for age in report.ages_ms] if report.ages_ms else ["", ""]
        rate = report.overall if report.is_final else report.recent
        table.add_row(
            name,
            str(report.frames),
            figures.number(rate.hz),
            figures.number(rate.mib_per_s),
            str(report.lost),
            *([*ages, figures.drops(report.drops)] if is_wide else []),
        )
    return table


def account(reports: dict[str, Report]) -> list[str]:
    """Print what became of every frame; returns what does not add up."""
    camera = reports[CAMERA]
    faults = [] if camera.frames else ["nothing was published"]
    click.echo(f"{CAMERA:<13}published {camera.frames} frames in {camera.seconds:.1f} s: {camera.overall}")
    if camera.lost:
        click.echo(f"{'':<13}could not publish {camera.lost}: {figures.drops(camera.drops)}")
    for name in DELAYS:
        report = reports[name]
        total = report.frames + report.lost
        checked = f"checked {figures.size(report.checked_bytes)}, {report.wrong or 'all right'}"
        click.echo(f"{name:<13}{report.frames} received + {report.lost} lost = {total}; {checked}")
        if report.lost:
            click.echo(f"{'':<13}lost: {figures.drops(report.drops)}")
        if report.overwritten:
            click.echo(f"{'':<13}overwritten while being checked, and noticed: {report.overwritten}")
        if total != camera.frames:
            faults.append(f"the {name} accounts for {total} of {camera.frames} frames")
        if report.wrong:
            faults.append(f"the {name} found {report.wrong} wrong")
        if not report.frames:
            faults.append(f"the {name} received nothing")
        elif report.checked + report.overwritten != report.frames and not report.wrong:
            faults.append(f"the {name} did not check every frame")
    return faults


def _stay(pool: Local, stop: StopSignals) -> None:
    """Let others use the drivers until a signal comes."""
    click.echo(
        "the drivers go on until Ctrl-C; in another terminal:\n"
        f"  export AERON_DIR={pool.aeron_dir} SHM_BASE_DIR={pool.config.shm.base_dir}\n"
        "  tensorpool tap\n"
        f"  tensorpool consume {actors.STREAM} --verify & tensorpool produce {actors.STREAM} --pattern checked"
    )
    signals = stop.count
    while stop.count == signals:
        time.sleep(REDRAW_EVERY_S)
