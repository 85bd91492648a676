# SPDX-License-Identifier: Apache-2.0
"""`tensorpool demo`: a camera, two readers and Spark, each in its own process, and a summary that checks itself.

The demo starts a media driver and an SHM driver of its own, a producer, two consumers that share nothing with it but
memory, and a Spark that records the stream to a lake. The readers check every byte that they receive, one of them
slowly on purpose; the lake is checked byte by byte as well. Each of them must account for every frame.
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

from tensorpool.cli import demo_processes, demo_recorder, format, options, progress
from tensorpool.cli.demo_processes import ProcessSettings, Report
from tensorpool.cli.demo_recorder import RecorderReport
from tensorpool.cli.signals import StopSignals
from tensorpool.diagnosis.space import shortage
from tensorpool.driver import DriverConfig
from tensorpool.embedded import ROOT, Local, local
from tensorpool.errors import TensorPoolError

if TYPE_CHECKING:
    from rich.table import Table

CAMERA: Final = "camera"
DELAYS: Final = {"fast reader": 0.0, "slow reader": 2.5}  # spent on each frame, in frame intervals
RECORDER: Final = "recorder"
NSLOTS: Final = 16
NSLOTS_RECORDED: Final = 256  # a recorder reads the ring about once a second
MIN_STRIDE: Final = 64
REDRAW_EVERY_S: Final = 0.1
LINE_EVERY_S: Final = 1.0
OVERTIME_S: Final = 60.0  # allowed beyond --seconds
SPARK_OVERTIME_S: Final = 240.0
WIDE: Final = 76  # columns that are enough for the whole table


@click.command(name="demo")
@click.option("--seconds", default=10.0, show_default=True, type=options.Number(min=0.5), help="How long to record.")
@click.option("--rate", default=40.0, show_default=True, type=options.Number(min=1), help="Frames per second.")
@click.option(
    "--shape",
    type=options.shape,
    default="480x640x3",
    show_default=True,
    metavar="NxM…",
    help="Shape of a frame of bytes: up to 8 extents.",
)
@click.option("--spark/--no-spark", "with_spark", default=True, help="Record to a lake as well, and draw it.")
@click.option(
    "--to",
    default="tensorpool-demo",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for the lake and the pictures.",
)
@click.option("--keep", is_flag=True, help="Keep the drivers running afterwards, for other commands, until Ctrl-C.")
def command(seconds: float, rate: float, shape: tuple[int, ...], with_spark: bool, to: Path, keep: bool) -> None:
    """Run a camera, a fast and a slow reader and a recording by Spark, and check that every frame is accounted for.

    Exit code 1: a frame is unaccounted for, a byte is wrong, or a file in shared memory is left behind.
    """
    if with_spark and (missing := demo_recorder.missing_for_spark()):
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
            f"camera: {format.shape(shape)} bytes at {rate:g} Hz, {format.size(nbytes)} a frame, "
            f"ring of {nslots} slots\n"
            "two readers check every byte; one of them is slow on purpose"
            + ("\nSpark records to a lake, which is checked byte by byte" if with_spark else "")
        )
        with _Processes(pool, shape, rate, seconds, to if with_spark else None) as processes:
            faults = processes.run(stop)
        if stop.count and not processes.reports[CAMERA].frames:
            faults.append("stopped before the first frame")
        faults = faults or account(processes.reports)
        if processes.recorder is not None and not faults:
            faults = account_for_lake(processes.recorder, processes.reports[CAMERA].frames, to)
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


class _Processes:
    """The processes of the demo: starts them, controls them, collects their reports and ends them."""

    def __init__(
        self, pool: Local, shape: tuple[int, ...], rate: float, seconds: float, lake_folder: Path | None
    ) -> None:
        self._seconds = seconds
        self.recorder = None if lake_folder is None else RecorderReport()
        self._processes: dict[str, ForkServerProcess] = {}
        self._pipes: dict[str, Connection] = {}
        self.reports = {name: Report(name) for name in (CAMERA, *DELAYS)}
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([demo_processes.__name__])  # imported once for all three
        ours_to_handle = signal.signal(signal.SIGINT, signal.SIG_IGN)  # they inherit it; the demo stops them
        for name in self.reports:
            ours, theirs = context.Pipe()
            delay_s = DELAYS.get(name, 0.0) / rate
            is_remote_controlled = lake_folder is not None
            settings = ProcessSettings(
                name,
                pool.aeron_dir,
                pool.config,
                shape,
                rate,
                seconds,
                len(DELAYS),
                delay_s,
                is_remote_controlled,
            )
            target = demo_processes.run_camera if name == CAMERA else demo_processes.run_reader
            self._processes[name] = context.Process(target=target, args=(settings, theirs), daemon=True)
            self._processes[name].start()
            theirs.close()
            self._pipes[name] = ours
        if lake_folder is not None:
            ours, theirs = context.Pipe()
            arguments = (settings, str(lake_folder.absolute()), theirs)
            self._processes[RECORDER] = context.Process(target=demo_recorder.run_recorder, args=arguments, daemon=True)
            self._processes[RECORDER].start()
            theirs.close()
            self._pipes[RECORDER] = ours
        signal.signal(signal.SIGINT, ours_to_handle)

    def run(self, stop: StopSignals) -> list[str]:
        """Until each has sent its final report; returns what went wrong."""
        overtime_s = OVERTIME_S if self.recorder is None else SPARK_OVERTIME_S
        deadline_s = time.monotonic() + self._seconds + overtime_s
        end_s = None
        is_begun = is_stopped = is_over = False
        with _Display() as display:
            while not self._is_over:
                if fault := self._receive():
                    return [fault]
                now_s = time.monotonic()
                if stop.count > 1 or now_s > deadline_s:
                    return [
                        "interrupted" if stop.count > 1 else f"not finished {overtime_s:g} s after the end of --seconds"
                    ]
                if self.recorder is not None:
                    if self.recorder.phase != RecorderReport().phase and not is_begun:
                        is_begun = True
                        self._send(CAMERA, "go")
                    if self.recorder.is_recording and end_s is None:
                        end_s = now_s + self._seconds
                if (stop.count or (end_s is not None and now_s >= end_s)) and not is_stopped:
                    is_stopped = True
                    self._send(CAMERA, "stop")
                if self.reports[CAMERA].is_final and not is_over:
                    is_over = True
                    for name in self._pipes.keys() - {CAMERA}:
                        self._send(name, self.reports[CAMERA].frames)
                display.show(self.reports, self.recorder)
        return []

    @property
    def _is_over(self) -> bool:
        is_recorded = self.recorder is None or self.recorder.is_final
        return is_recorded and all(report.is_final for report in self.reports.values())

    def _send(self, name: str, message: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # the process has ended, which `_receive` reports
            self._pipes[name].send(message)

    def _receive(self) -> str:
        """Take the reports of the processes; returns the first failure, or an empty text."""
        for pipe in wait(self._open_pipes(), REDRAW_EVERY_S):
            assert isinstance(pipe, Connection)
            name = next(name for name, known in self._pipes.items() if known is pipe)
            try:
                report = pipe.recv()
            except EOFError:
                self._processes[name].join()
                return f"the {name} ended with exit code {self._processes[name].exitcode}"
            if isinstance(report, RecorderReport):
                self.recorder = report
            else:
                self.reports[name] = report
            if report.failure:
                return f"the {name}: {report.failure}"
        return ""

    def _open_pipes(self) -> list[Connection]:
        return [pipe for name, pipe in self._pipes.items() if not self._is_final(name)]

    def _is_final(self, name: str) -> bool:
        if name == RECORDER:
            return self.recorder is None or self.recorder.is_final
        return self.reports[name].is_final

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._send(CAMERA, "leave")
        for name, process in self._processes.items():
            if not self._is_final(name):
                process.terminate()
            process.join()
            self._pipes[name].close()


class _Display(progress.Redrawn):
    """Progress of the demo: a table that is redrawn on a terminal, a line every second elsewhere."""

    def __init__(self) -> None:
        super().__init__(to_stderr=False)
        self._started_s: float | None = None
        self._next_s = 0.0
        self._phase = ""

    def show(self, reports: dict[str, Report], recorder: RecorderReport | None) -> None:
        now_s = time.monotonic()
        if recorder is not None and recorder.phase != self._phase and self._live is None:
            self._phase = recorder.phase
            click.echo(f"Spark: {recorder.phase}")
        if now_s < self._next_s:
            return
        if self._live is not None:
            self._next_s = now_s + REDRAW_EVERY_S
            self._live.update(_table(reports, recorder, self._live.console.width), refresh=True)
            return
        camera = reports[CAMERA]
        if self._started_s is None and camera.frames:
            self._started_s = now_s
        elif self._started_s is not None and not camera.is_final:
            readers = "".join(f"; {name} {reports[name].frames}, lost {reports[name].lost}" for name in DELAYS)
            recorded = "" if recorder is None else f"; recorded {recorder.frames}, lag {recorder.lag}"
            click.echo(f"{now_s - self._started_s:4.1f} s  {camera.frames} frames, {camera.recent}{readers}{recorded}")
        if self._started_s is not None:
            self._next_s = (self._next_s or now_s) + LINE_EVERY_S


def _table(reports: dict[str, Report], recorder: RecorderReport | None, width: int) -> Table:
    is_wide = width >= WIDE
    table = format.table("", "frames", "Hz", "MiB/s", "lost", *(["age p50", "p99"] if is_wide else []), left=[""])
    if is_wide:
        table.add_column("why", no_wrap=True, overflow="ellipsis", style="dim")
    for name, report in reports.items():
        ages = [format.latency(age) for age in report.ages_ms] if report.ages_ms else ["", ""]
        rate = report.overall if report.is_final else report.recent
        table.add_row(
            name,
            str(report.frames),
            format.number(rate.hz),
            format.number(rate.mib_per_s),
            str(report.lost),
            *([*ages, progress.drops(report.drops)] if is_wide else []),
        )
    if recorder is not None:
        note = recorder.phase + (f", lag {recorder.lag}" if recorder.is_recording else "")
        recorder_rate = format.number(recorder.mib_per_s) if recorder.frames else ""
        row = [RECORDER, str(recorder.frames), "", recorder_rate, str(recorder.lost)]
        table.add_row(*row, *(["", "", note] if is_wide else []))
    return table


def account_for_lake(recorder: RecorderReport, published: int, folder: Path) -> list[str]:
    """Print how many frames the lake holds and lacks; returns what does not add up."""
    faults = [] if recorder.frames else ["the recorder recorded nothing"]
    total = recorder.frames + recorder.lost
    checked = f"checked {format.size(recorder.checked_bytes)}, {recorder.wrong or 'all right'}"
    click.echo(
        f"{RECORDER:<13}{recorder.frames} recorded + {recorder.lost} lost = {total}, "
        f"frames {recorder.first_seq} to {published - 1}; {checked}"
    )
    if recorder.lost:
        click.echo(f"{'':<13}lost: {format.counts(recorder.reasons)}")
    if recorder.live:
        click.echo(f"{'':<13}{recorder.live}")
    stats = recorder.stats
    if stats:
        click.echo(
            f"{'statistics':<13}{stats['hz']:.1f} Hz, {stats['mib_per_s']:.1f} MiB/s, pixels {stats['min']:.0f} to "
            f"{stats['max']:.0f}, mean {stats['mean']:.1f}, std {stats['std']:.1f}"
        )
    click.echo(
        f"{'lake':<13}{folder / 'lake'} ({format.size(recorder.file_bytes)}); try: tensorpool stats {folder / 'lake'}"
    )
    click.echo(f"{'pictures':<13}{', '.join(str(folder / Path(path).name) for path in recorder.pictures)}")
    if recorder.wrong:
        faults.append(f"the lake is wrong: {recorder.wrong}")
    if not recorder.adds_up or recorder.first_seq + total != published:
        faults.append(f"the lake accounts for {recorder.first_seq} + {total} of {published} frames")
    if recorder.checked != recorder.frames:
        faults.append(f"{recorder.checked} of {recorder.frames} recorded frames were found in the lake")
    return faults


def account(reports: dict[str, Report]) -> list[str]:
    """Print how many frames each reader received and lost; returns what does not add up."""
    camera = reports[CAMERA]
    faults = [] if camera.frames else ["nothing was published"]
    click.echo(f"{CAMERA:<13}published {camera.frames} frames in {camera.seconds:.1f} s: {camera.overall}")
    if camera.lost:
        click.echo(f"{'':<13}could not publish {camera.lost}: {progress.drops(camera.drops)}")
    for name in DELAYS:
        report = reports[name]
        total = report.frames + report.lost
        checked = f"checked {format.size(report.checked_bytes)}, {report.wrong or 'all right'}"
        click.echo(f"{name:<13}{report.frames} received + {report.lost} lost = {total}; {checked}")
        if report.lost:
            click.echo(f"{'':<13}lost: {progress.drops(report.drops)}")
        if report.overwritten:
            click.echo(f"{'':<13}overwritten during the check, and detected: {report.overwritten}")
        if total != camera.frames:
            faults.append(f"the {name} accounts for {total} of {camera.frames} frames")
        if report.wrong:
            faults.append(f"the {name} found {report.wrong} wrong")
        if not report.frames:
            faults.append(f"the {name} received nothing")
        elif report.checked != report.frames and not report.wrong:  # what was overwritten during a check is lost
            faults.append(f"the {name} did not check every frame")
    return faults


def _stay(pool: Local, stop: StopSignals) -> None:
    """Keep the drivers running for other commands until a signal arrives."""
    stream = demo_processes.STREAM
    click.echo(
        "the drivers keep running until Ctrl-C; in another terminal:\n"
        f"  export AERON_DIR={pool.aeron_dir} SHM_BASE_DIR={pool.config.shm.base_dir}\n"
        "  tensorpool tap\n"
        f"  tensorpool consume {stream} --verify & tensorpool produce {stream} --pattern checked"
    )
    signals = stop.count
    while stop.count == signals:
        time.sleep(REDRAW_EVERY_S)
