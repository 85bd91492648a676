# SPDX-License-Identifier: Apache-2.0
"""`tensorpool record`: records streams to a lake, shows its progress, and accounts for every frame in a summary."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from tensorpool import extras
from tensorpool.cli import format, options, progress, spark_options
from tensorpool.cli.service_process import Monitoring, ServiceProcess, monitoring_options
from tensorpool.cli.signals import StopSignals, interruptible
from tensorpool.errors import TensorPoolError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tensorpool.lake.recorder import RecorderBase, RingDepth, Totals

GIB: Final = 2**30
SLICE_S: Final = 0.2  # the longest time that a signal waits
REPORT_EVERY_S: Final = 1.0
UNWRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@click.command(name="record")
@click.argument("streams", nargs=-1, required=True, metavar="STREAM...")
@click.option(
    "--to",
    "lake",
    required=True,
    type=click.Path(path_type=Path),
    metavar="LAKE",
    help="The lake: a folder, or s3://bucket/path.",
)
@click.option(
    "--name", metavar="NAME", help="Name of the recording, under which it can be resumed.  [default: from the streams]"
)
@click.option(
    "--codec",
    type=click.Choice(["none", "lz4", "zstd"]),
    default="zstd",
    show_default=True,
    help="How payloads are compressed.",
)
@click.option(
    "--direct",
    is_flag=True,
    help="Record in this process, without Spark and without Java: for short rings and high rates.",
)
@options.seconds_option()
@click.option("--frames", type=click.IntRange(min=1), metavar="N", help="End once N frames are recorded.")
@click.option(
    "--trigger",
    "trigger_s",
    type=options.Number(min=0.05),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Commit every S seconds.",
)
@click.option(
    "--from",
    "start",
    default="latest",
    show_default=True,
    metavar="WHERE",
    help="Where a new recording begins: latest, earliest, or an age such as -10s.",
)
@click.option("--file-size", default="256m", show_default=True, metavar="SIZE", help="Files grow up to SIZE bytes.")
@click.option("--file-seconds", type=options.Number(min=0.1), default=3600.0, show_default=True, metavar="S",
              help="Frames of one file span at most S seconds.")  # fmt: skip
@click.option("--no-compact", is_flag=True, help="Leave the small files of the commits as they are.")
@click.option("--retain-age", "max_age_s", type=options.Age(), help="Remove frames recorded longer ago, such as 7d.")
@click.option("--retain-bytes", "max_bytes", type=options.Size(), help="Remove the oldest frames beyond a size: 500g.")
@click.option("--no-warm-up", is_flag=True, help="Read the first frame before Spark has warmed up: for deep rings.")
@click.option("--no-sync", is_flag=True, help="Do not wait for the disk: a crash of the machine may lose files.")
@click.option("--fail-on-data-loss", is_flag=True, help="End with an error at the first gap.")
@options.json_option("Print progress and summary as lines of JSON.")
@spark_options.spark_options
@monitoring_options
@options.connection_options
def command(
    streams: tuple[str, ...],
    lake: Path,
    name: str | None,
    codec: str,
    direct: bool,
    seconds: float | None,
    frames: int | None,
    trigger_s: float,
    start: str,
    file_size: str,
    file_seconds: float,
    no_compact: bool,
    max_age_s: float | None,
    max_bytes: int | None,
    no_warm_up: bool,
    no_sync: bool,
    fail_on_data_loss: bool,
    master: str,
    conf: tuple[str, ...],
    as_json: bool,
    monitoring: Monitoring,
    connection: options.Connection,
) -> None:
    """Record the frames of STREAM..., ids or names, to a lake.

    Started again under the same name, an interrupted recording continues after its last commit, whatever interrupted
    it. Ctrl-C and SIGTERM record what was published until then, and print a summary. `tensorpool event send
    service:recorder:NAME pause` commands it from another terminal; so do resume, status and drain. Exit code 1: the
    recording failed.
    """
    if not direct:
        extras.require("recording without --direct", "spark", "pyspark")
    connection.load()  # refuses a wrong configuration before Spark starts
    with progress.LiveLine(is_quiet=as_json) as line, interruptible(), contextlib.ExitStack() as stack:
        from tensorpool.lake.option_values import size_of
        from tensorpool.lake.recording_engine import Settings

        chosen = Settings(
            codec=codec,
            trigger_s=trigger_s,
            starting_offsets=start,
            max_file_bytes=size_of("--file-size", file_size),
            max_file_seconds=file_seconds,
            compacts=not no_compact,
            max_age_s=max_age_s,
            max_bytes=max_bytes,
            is_warmed_up=not no_warm_up,
            is_durable=not no_sync,
            fail_on_data_loss=fail_on_data_loss,
            aeron_dir=connection.aeron_dir,
            config=None if connection.path is None else str(connection.path),
            overrides=options.overrides(connection.settings),
        )
        ids = list(map(options.stream_reference, streams))
        recorder: RecorderBase
        if direct:
            from tensorpool.lake.direct_recorder import DirectRecorder

            with _explained(str(lake)):
                recorder = DirectRecorder(ids, lake, name=name, settings=chosen)
        else:
            line.note(f"starting Spark {master}")
            spark = stack.enter_context(spark_options.started(master, "record", conf))
            from tensorpool.spark.recorder import Recorder

            recorder = Recorder(spark, ids, lake, name=name, settings=chosen)
        stack.callback(recorder.close)
        verb = "resuming" if recorder.is_resumed else "preparing"
        line.note(f"{verb} recording {recorder.name}: {', '.join(streams)} to {recorder.lake.uri}")
        with _explained(recorder.lake.uri):
            recorder.start()
        stop = StopSignals()
        typed = dict(zip(recorder.stream_ids, streams, strict=True))
        _Job(recorder, line, typed, as_json, is_direct=direct).run(stop, seconds, frames, monitoring)


@contextlib.contextmanager
def _explained(lake: str) -> Iterator[None]:
    """A lake that cannot be written at the start is an error of one line; one that fills up later is waited for."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise TensorPoolError(
            f"lake {lake} cannot be written: {error.strerror}; make room, or record elsewhere"
        ) from None


class _Job:
    """One run of a recorder."""

    def __init__(
        self,
        recorder: RecorderBase,
        line: progress.LiveLine,
        typed: Mapping[int, str],
        as_json: bool,
        *,
        is_direct: bool,
    ) -> None:
        """`typed` are the streams as the user wrote them, by id."""
        self._recorder = recorder
        self._line = line
        self._typed = typed
        self._as_json = as_json
        self._is_direct = is_direct
        self._last = (time.monotonic(), 0, 0)
        self._report_s = time.monotonic() + REPORT_EVERY_S
        self._turned_ns = time.monotonic_ns()
        self._totals: Totals | None = None  # the newest

    def run(self, stop: StopSignals, seconds: float | None, frames: int | None, monitoring: Monitoring) -> None:
        with ServiceProcess(
            "recorder",
            self._recorder.name,
            monitoring,
            silent_ns=lambda: time.monotonic_ns() - self._turned_ns,
            trouble=lambda: "the lake's disk is full" if self._recorder.is_full else None,
            collect=self._collect,
        ) as process:
            self._run(stop, seconds, frames, process)

    def _run(self, stop: StopSignals, seconds: float | None, frames: int | None, process: ServiceProcess) -> None:
        recorder = self._recorder
        for depth in recorder.depths():
            self._print_depth(depth)
        process.ready(f"records {', '.join(self._typed.values())} to {recorder.lake.uri}")
        until_s = None if seconds is None else time.monotonic() + seconds
        while not stop.count and not recorder.is_drained and (until_s is None or time.monotonic() < until_s):
            stop.wait(SLICE_S)
            recorder.poll()
            self._totals = totals = recorder.totals()
            self._turned_ns = time.monotonic_ns()
            process.beat()
            if frames is not None and totals.frames >= frames:
                break
            self._report(totals)
        process.stopping()
        self._line.end()
        self._line.note("draining")
        totals = recorder.stop()
        self._summarise(totals)

    def _collect(self) -> Iterator[Metric]:
        """Of the newest totals, for the thread that serves metrics."""
        from prometheus_client.core import CounterMetricFamily

        from tensorpool.telemetry.metrics import counter, gauge, space_metrics

        totals = self._totals
        if totals is not None:
            yield counter("tensorpool_recorder_frames", "Frames that were committed.", totals.frames)
            yield counter("tensorpool_recorder_payload_bytes", "Their payload.", totals.payload_bytes)
            yield counter("tensorpool_recorder_file_bytes", "What they take in files.", totals.file_bytes)
            yield counter("tensorpool_recorder_commits", "Commits.", totals.batches)
            yield counter("tensorpool_recorder_restarts", "Times that recording began anew.", totals.restarts)
            yield gauge("tensorpool_recorder_lag_frames", "Published, but not committed yet.", totals.lag_frames)
            lost = CounterMetricFamily(
                "tensorpool_recorder_lost_frames", "Frames that are not recorded.", labels=["stream"]
            )
            counts = {stream.stream_id: stream.lost for stream in totals.streams}
            for stream_id, name in self._typed.items():  # 0 from the start, so that the first loss is an increase
                lost.add_metric([name], counts.get(stream_id, 0))
            yield lost
        yield gauge("tensorpool_recorder_disk_full", "1 while the lake's disk is full.", self._recorder.is_full)
        uri = self._recorder.lake.uri
        if "://" not in uri:
            yield from space_metrics(lake=uri)

    def _print_depth(self, depth: RingDepth) -> None:
        if self._as_json:
            click.echo(msgspec.json.encode({"event": "ring", **msgspec.structs.asdict(depth)}))
            return
        holds = "no measured rate yet" if depth.holds_s is None else f"{depth.holds_s:.1f} s of frames"
        advice = "" if self._is_direct else ", a shorter --trigger, or --direct"
        hint = "" if depth.is_enough else f"; frames may be lost: give the stream more slots{advice}"
        needs = f"the recorder needs {depth.needs_s:.2g} s"
        text = f"{self._label(depth.stream_id)}: the ring holds {holds}; {needs}{hint}"
        self._line.note(text)

    def _label(self, stream_id: int) -> str:
        typed = self._typed.get(stream_id, str(stream_id))
        return f"stream {typed}" if typed.isdecimal() else typed

    def _report(self, totals: Totals) -> None:
        is_due = time.monotonic() >= self._report_s if self._as_json else self._line.is_due
        if not is_due:
            return
        self._report_s = time.monotonic() + REPORT_EVERY_S
        now_s, (then_s, frames, size) = time.monotonic(), self._last
        rate = progress.Rate(
            (totals.frames - frames) / (now_s - then_s), (totals.payload_bytes - size) / format.MIB / (now_s - then_s)
        )
        if self._as_json:
            self._last = (now_s, totals.frames, totals.payload_bytes)
            click.echo(
                msgspec.json.encode(
                    {
                        "event": "progress",
                        "seconds": totals.seconds,
                        "frames": totals.frames,
                        "gib": round(totals.payload_bytes / GIB, 6),
                        "rate_hz": round(rate.hz, 3),
                        "mib_per_s": round(rate.mib_per_s, 3),
                        "lag_frames": totals.lag_frames,
                        "lost": totals.lost,
                    }
                )
            )
            return
        if now_s - then_s >= REPORT_EVERY_S * 2:
            self._last = (now_s, totals.frames, totals.payload_bytes)
        gib = f"{totals.payload_bytes / GIB:.2f} GiB"
        self._line.show(
            f"{totals.frames} frames  {gib}  {rate}  {totals.lag_frames} behind  {totals.lost} lost  "
            f"{totals.files} files"
        )

    def _summarise(self, totals: Totals) -> None:
        if self._as_json:
            summary = {"event": "summary", **msgspec.structs.asdict(totals), "adds_up": totals.adds_up}
            click.echo(msgspec.json.encode(summary))
            return
        rate = progress.Rate(
            totals.frames / max(totals.seconds, 1e-9), totals.payload_bytes / format.MIB / max(totals.seconds, 1e-9)
        )
        size = f"{format.size(totals.payload_bytes)} in {totals.files} files of {format.size(totals.file_bytes)}"
        click.echo(f"recorded {totals.frames} frames, {size}, in {totals.seconds:.1f} s: {rate}")
        for stream in totals.streams:
            reasons = format.counts(stream.reasons)
            sign = "=" if stream.adds_up else "is not"
            tail = f"; the last seq of {stream.unknown} epochs is not known" if stream.unknown else ""
            click.echo(
                f"{self._label(stream.stream_id)}: {stream.published} published {sign} {stream.recorded} recorded "
                f"+ {stream.lost} lost{f' ({reasons})' if reasons else ''}{tail}"
            )
        click.echo(f"side tables: {totals.metadata_rows} rows of metadata, {totals.qos_rows} rows of QoS reports")
        click.echo(f"lake {self._recorder.lake.uri}")
