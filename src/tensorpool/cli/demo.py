# SPDX-License-Identifier: Apache-2.0
"""`tensorpool demo`: a camera, two readers and Spark, each in its own process, and a summary that checks itself.

Everything is real and embedded: a media driver, an SHM driver, a producer and two consumers that share nothing but
memory, a Spark that records the stream to a lake. The readers check every byte of what they get, one is slow on
purpose; the lake is checked byte by byte as well. Every frame must be accounted for, everywhere.
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

from tensorpool.cli import actors, archivist, figures, options
from tensorpool.cli.actors import Part, Report
from tensorpool.cli.archivist import Archive
from tensorpool.cli.signals import StopSignals
from tensorpool.diagnosis.space import shortage
from tensorpool.driver import DriverConfig
from tensorpool.embedded import ROOT, Local, local
from tensorpool.errors import TensorPoolError

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

CAMERA: Final = "camera"
DELAYS: Final = {"fast reader": 0.0, "slow reader": 2.5}  # in frame intervals, over each frame
ARCHIVIST: Final = "recorder"
NSLOTS: Final = 16
NSLOTS_RECORDED: Final = 256  # a recorder looks in every second or so
MIN_STRIDE: Final = 64
REDRAW_EVERY_S: Final = 0.1
LINE_EVERY_S: Final = 1.0
PATIENCE_S: Final = 60.0  # beyond the time that was asked for
SPARK_PATIENCE_S: Final = 240.0
WIDE: Final = 76  # columns that show everything


@click.command(name="demo")
@click.option("--seconds", default=10.0, show_default=True, type=click.FloatRange(min=0.5), help="How long to record.")
@click.option("--rate", default=40.0, show_default=True, type=click.FloatRange(min=1), help="Frames per second.")
@click.option(
    "--shape",
    type=options.shape,
    default="480x640x3",
    show_default=True,
    metavar="NxM…",
    help="Of a frame of bytes: up to 8 extents.",
)
@click.option("--spark/--no-spark", "with_spark", default=True, help="Record to a lake as well, and draw it.")
@click.option(
    "--to",
    default="tensorpool-demo",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where lake and pictures go.",
)
@click.option("--keep", is_flag=True, help="Keep the drivers running afterwards, for other commands, until Ctrl-C.")
def command(seconds: float, rate: float, shape: tuple[int, ...], with_spark: bool, to: Path, keep: bool) -> None:
    """A camera, two readers, one of them slow, a recording by Spark, and a summary that checks itself.

    Exit code 1: a frame is unaccounted for, a byte is wrong, or something is left behind.
    """
    if with_spark and (missing := archivist.missing_for_spark()):
        click.echo(f"without Spark: {missing}")
        with_spark = False
    nbytes = math.prod(shape)
    stride = max(MIN_STRIDE, 1 << (nbytes - 1).bit_length())
    nslots = NSLOTS_RECORDED if with_spark else NSLOTS
    profile = {"header_nslots": nslots, "payload_pools": [{"pool_id": 1, "stride_bytes": stride}]}
    overrides = {"profiles.default": profile}
    if missing_space := shortage(DriverConfig.load(environ={}, overrides={**overrides, "shm.base_dir": str(ROOT)})):
        raise TensorPoolError(missing_space)
    stop = StopSignals()
    with local(overrides=overrides) as pool:
        click.echo(
            f"camera: {figures.shape(shape)} bytes at {rate:g} Hz, {figures.size(nbytes)} a frame, "
            f"ring of {nslots} slots\n"
            "two readers check every byte; one of them is slow on purpose"
            + ("\nSpark records to a lake, which is checked byte by byte" if with_spark else "")
        )
        with _Cast(pool, shape, rate, seconds, to if with_spark else None) as cast:
            faults = cast.play(stop)
        if stop.count and not cast.reports[CAMERA].frames:
            faults.append("stopped before the first frame")
        faults = faults or account(cast.reports)
        if cast.archive is not None and not faults:
            faults = account_for_lake(cast.archive, cast.reports[CAMERA].frames, to)
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

    def __init__(
        self, pool: Local, shape: tuple[int, ...], rate: float, seconds: float, lake_folder: Path | None
    ) -> None:
        self._seconds = seconds
        self.archive = None if lake_folder is None else Archive()
        self._processes: dict[str, ForkServerProcess] = {}
        self._pipes: dict[str, Connection] = {}
        self.reports = {name: Report(name) for name in (CAMERA, *DELAYS)}
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([actors.__name__])  # imported once for all three
        ours_to_handle = signal.signal(signal.SIGINT, signal.SIG_IGN)  # they inherit it, and are told by us
        for name in self.reports:
            ours, theirs = context.Pipe()
            delay_s = DELAYS.get(name, 0.0) / rate
            is_led = lake_folder is not None
            part = Part(name, pool.aeron_dir, pool.config, shape, rate, seconds, len(DELAYS), delay_s, is_led)
            play = actors.play_camera if name == CAMERA else actors.play_reader
            self._processes[name] = context.Process(target=play, args=(part, theirs), daemon=True)
            self._processes[name].start()
            theirs.close()
            self._pipes[name] = ours
        if lake_folder is not None:
            ours, theirs = context.Pipe()
            told = (part, str(lake_folder.absolute()), theirs)
            self._processes[ARCHIVIST] = context.Process(target=archivist.play_archivist, args=told, daemon=True)
            self._processes[ARCHIVIST].start()
            theirs.close()
            self._pipes[ARCHIVIST] = ours
        signal.signal(signal.SIGINT, ours_to_handle)

    def play(self, stop: StopSignals) -> list[str]:
        """Until all have reported a last time; returns what went wrong."""
        patience_s = PATIENCE_S if self.archive is None else SPARK_PATIENCE_S
        deadline_s = time.monotonic() + self._seconds + patience_s
        end_s = None
        is_begun = is_stopped = is_over = False
        with _Display() as display:
            while not self._is_over:
                if fault := self._listen():
                    return [fault]
                now_s = time.monotonic()
                if stop.count > 1 or now_s > deadline_s:
                    return ["interrupted" if stop.count > 1 else "it takes too long"]
                if self.archive is not None:
                    if self.archive.phase != Archive().phase and not is_begun:
                        is_begun = True
                        self._tell(CAMERA, "go")
                    if self.archive.is_recording and end_s is None:
                        end_s = now_s + self._seconds
                if (stop.count or (end_s is not None and now_s >= end_s)) and not is_stopped:
                    is_stopped = True
                    self._tell(CAMERA, "stop")
                if self.reports[CAMERA].is_final and not is_over:
                    is_over = True
                    for name in self._pipes.keys() - {CAMERA}:
                        self._tell(name, self.reports[CAMERA].frames)
                display.show(self.reports, self.archive)
        return []

    @property
    def _is_over(self) -> bool:
        is_filed = self.archive is None or self.archive.is_final
        return is_filed and all(report.is_final for report in self.reports.values())

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
            if isinstance(report, Archive):
                self.archive = report
            else:
                self.reports[name] = report
            if report.failure:
                return f"the {name}: {report.failure}"
        return ""

    def _open_pipes(self) -> list[Connection]:
        return [pipe for name, pipe in self._pipes.items() if not self._is_final(name)]

    def _is_final(self, name: str) -> bool:
        if name == ARCHIVIST:
            return self.archive is None or self.archive.is_final
        return self.reports[name].is_final

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell(CAMERA, "leave")
        for name, process in self._processes.items():
            if not self._is_final(name):
                process.terminate()
            process.join()
            self._pipes[name].close()


class _Display:
    """What is going on: a table that is redrawn on a terminal, a line every second elsewhere."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._started_s: float | None = None
        self._next_s = 0.0
        self._phase = ""
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(auto_refresh=False, transient=True)

    def show(self, reports: dict[str, Report], archive: Archive | None) -> None:
        now_s = time.monotonic()
        if archive is not None and archive.phase != self._phase and self._live is None:
            self._phase = archive.phase
            click.echo(f"Spark: {archive.phase}")
        if now_s < self._next_s:
            return
        if self._live is not None:
            self._next_s = now_s + REDRAW_EVERY_S
            self._live.update(_table(reports, archive, self._live.console.width), refresh=True)
            return
        camera = reports[CAMERA]
        if self._started_s is None and camera.frames:
            self._started_s = now_s
        elif self._started_s is not None and not camera.is_final:
            readers = "".join(f"; {name} {reports[name].frames}, lost {reports[name].lost}" for name in DELAYS)
            filed = "" if archive is None else f"; recorded {archive.frames}, lag {archive.lag}"
            click.echo(f"{now_s - self._started_s:4.1f} s  {camera.frames} frames, {camera.recent}{readers}{filed}")
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


def _table(reports: dict[str, Report], archive: Archive | None, width: int) -> Table:
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
    if archive is not None:
        words = archive.phase + (f", lag {archive.lag}" if archive.is_recording else "")
        rate_words = figures.number(archive.mib_per_s) if archive.frames else ""
        row = [ARCHIVIST, str(archive.frames), "", rate_words, str(archive.lost)]
        table.add_row(*row, *(["", "", words] if is_wide else []))
    return table


def account_for_lake(archive: Archive, published: int, folder: Path) -> list[str]:
    """Print what became of every frame in the lake; returns what does not add up."""
    faults = [] if archive.frames else ["the recorder recorded nothing"]
    total = archive.frames + archive.lost
    checked = f"checked {figures.size(archive.checked_bytes)}, {archive.wrong or 'all right'}"
    click.echo(
        f"{ARCHIVIST:<13}{archive.frames} recorded + {archive.lost} lost = {total}, "
        f"frames {archive.first_seq} to {published - 1}; {checked}"
    )
    if archive.lost:
        reasons = ", ".join(f"{name.lower()} {count}" for name, count in archive.reasons.items())
        click.echo(f"{'':<13}lost: {reasons}")
    if archive.live:
        click.echo(f"{'':<13}{archive.live}")
    stats = archive.stats
    if stats:
        click.echo(
            f"{'statistics':<13}{stats['hz']:.1f} Hz, {stats['mib_per_s']:.1f} MiB/s, pixels {stats['min']:.0f} to "
            f"{stats['max']:.0f}, mean {stats['mean']:.1f}, std {stats['std']:.1f}"
        )
    click.echo(
        f"{'lake':<13}{folder / 'lake'} ({figures.size(archive.file_bytes)}); try: tensorpool stats {folder / 'lake'}"
    )
    click.echo(f"{'pictures':<13}{', '.join(str(folder / Path(path).name) for path in archive.pictures)}")
    if archive.wrong:
        faults.append(f"the lake is wrong: {archive.wrong}")
    if not archive.adds_up or archive.first_seq + total != published:
        faults.append(f"the lake accounts for {archive.first_seq} + {total} of {published} frames")
    if archive.checked != archive.frames:
        faults.append(f"{archive.checked} of {archive.frames} recorded frames were found in the lake")
    return faults


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
