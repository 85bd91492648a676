# SPDX-License-Identifier: Apache-2.0
"""`tensorpool record`: streams to a lake, with figures while it runs and a summary that adds up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from tensorpool.cli import figures, options, sparks
from tensorpool.cli.signals import StopSignals, interruptible

if TYPE_CHECKING:
    from tensorpool.spark.recorder import Recorder, RingDepth, Totals

GIB: Final = 2**30
SLICE_S: Final = 0.2  # how long a signal may wait
REPORT_EVERY_S: Final = 1.0


@click.command(name="record")
@click.argument("streams", nargs=-1, required=True, metavar="STREAM...")
@click.option("--to", "lake", required=True, type=click.Path(path_type=Path), metavar="LAKE", help="Where to.")
@click.option("--name", metavar="NAME", help="Of the recording, to go on with it later.  [default: the streams']")
@click.option(
    "--codec",
    type=click.Choice(["none", "lz4", "zstd"]),
    default="zstd",
    show_default=True,
    help="How payloads are compressed.",
)
@click.option(
    "--mode",
    type=click.Choice(["tail", "batches"]),
    help="A task that follows the rings, or micro-batches.  [default: as the recording was begun, or tail]",
)
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), metavar="S", help="End after S seconds.")
@click.option("--frames", type=click.IntRange(min=1), metavar="N", help="End once N frames are recorded.")
@click.option(
    "--trigger",
    "trigger_s",
    type=click.FloatRange(min=0.05),
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
@click.option("--file-size", default="256m", show_default=True, metavar="SIZE", help="Files are cut at SIZE bytes.")
@click.option("--file-seconds", type=click.FloatRange(min=0.1), default=60.0, show_default=True, metavar="S",
              help="Files are cut when their frames span S seconds.")  # fmt: skip
@click.option("--no-warm-up", is_flag=True, help="Take the first frame before Spark is warm: for deep rings.")
@click.option("--no-sync", is_flag=True, help="Do not wait for the disk: a crash of the machine may cost files.")
@click.option("--fail-on-data-loss", is_flag=True, help="End with an error at the first gap.")
@click.option("--json", "as_json", is_flag=True, help="Figures and summary as JSON lines.")
@sparks.spark_options
@options.connection_options
def command(
    streams: tuple[str, ...],
    lake: Path,
    name: str | None,
    codec: str,
    mode: str | None,
    seconds: float | None,
    frames: int | None,
    trigger_s: float,
    start: str,
    file_size: str,
    file_seconds: float,
    no_warm_up: bool,
    no_sync: bool,
    fail_on_data_loss: bool,
    master: str,
    conf: tuple[str, ...],
    as_json: bool,
    aeron_dir: str | None,
    path: Path | None,
    settings: tuple[str, ...],
) -> None:
    """Record the frames of STREAM..., ids or names, to a lake.

    A recording that was interrupted, however, goes on where its last commit ended when it is started again under the
    same name. Ctrl-C and SIGTERM record what was published up to then, and end with a summary. Exit code 1: it could
    not be recorded. `tensorpool event send service:recorder:NAME pause`, and resume, status or drain, command it.
    """
    options.load_config(path, settings)  # says what is wrong with them before Spark starts
    with figures.LiveLine(is_quiet=as_json) as line, interruptible():
        line.note(f"starting Spark {master}")
        from tensorpool.spark.lake.options import lake_options
        from tensorpool.spark.recorder import Recorder, Settings

        chosen = Settings(
            mode=mode,
            codec=codec,
            trigger_s=trigger_s,
            starting_offsets=start,
            max_file_bytes=lake_options({"path": str(lake), "maxFileBytes": file_size}).max_file_bytes,
            max_file_seconds=file_seconds,
            is_warmed_up=not no_warm_up,
            is_durable=not no_sync,
            fail_on_data_loss=fail_on_data_loss,
            aeron_dir=aeron_dir,
            config=None if path is None else str(path),
            overrides=options.overrides(settings),
        )
        ids = [int(stream) if stream.isascii() and stream.isdecimal() else stream for stream in streams]
        with sparks.started(master, "record", conf) as spark:
            recorder = Recorder(spark, ids, lake, name=name, settings=chosen)
            try:
                line.note(_beginning(recorder))
                recorder.start()
                stop = StopSignals()
                _Job(recorder, line, as_json).run(stop, seconds, frames)
            finally:
                recorder.close()


def _beginning(recorder: Recorder) -> str:
    verb = "going on with" if recorder.is_resumed else "preparing"
    streams = ", ".join(map(str, recorder.stream_ids))
    return f"{verb} recording {recorder.name}: streams {streams} to {recorder.lake.path}"


class _Job:
    """One run of a recorder."""

    def __init__(self, recorder: Recorder, line: figures.LiveLine, as_json: bool) -> None:
        self._recorder = recorder
        self._line = line
        self._as_json = as_json
        self._last = (time.monotonic(), 0, 0)
        self._report_s = time.monotonic() + REPORT_EVERY_S

    def run(self, stop: StopSignals, seconds: float | None, frames: int | None) -> None:
        recorder = self._recorder
        for depth in recorder.depths():
            self._say_depth(depth)
        until_s = None if seconds is None else time.monotonic() + seconds
        while not stop.count and not recorder.is_drained and (until_s is None or time.monotonic() < until_s):
            stop.wait(SLICE_S)
            recorder.poll()
            totals = recorder.totals()
            if frames is not None and totals.frames >= frames:
                break
            self._report(totals)
        self._line.end()
        self._line.note("draining")
        totals = recorder.stop()
        self._summarise(totals)

    def _say_depth(self, depth: RingDepth) -> None:
        if self._as_json:
            click.echo(msgspec.json.encode({"event": "ring", **msgspec.structs.asdict(depth)}))
            return
        holds = "as long as nothing is published" if depth.holds_s is None else f"{depth.holds_s:.1f} s"
        mode = self._recorder.mode
        advice = "" if mode == "tail" else ", or a shorter --trigger"
        hint = "" if depth.is_enough else f"; frames may be lost: give the stream more slots{advice}"
        needs = f"{depth.needs_s:.2g} s are needed in mode {mode}"
        text = f"stream {depth.stream_id}: the ring holds {holds}, {needs}{hint}"
        self._line.note(text)

    def _report(self, totals: Totals) -> None:
        is_due = time.monotonic() >= self._report_s if self._as_json else self._line.is_due
        if not is_due:
            return
        self._report_s = time.monotonic() + REPORT_EVERY_S
        now_s, (then_s, frames, size) = time.monotonic(), self._last
        rate = figures.Rate(
            (totals.frames - frames) / (now_s - then_s), (totals.payload_bytes - size) / figures.MIB / (now_s - then_s)
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
        rate = figures.Rate(
            totals.frames / max(totals.seconds, 1e-9), totals.payload_bytes / figures.MIB / max(totals.seconds, 1e-9)
        )
        size = f"{figures.size(totals.payload_bytes)} in {totals.files} files of {figures.size(totals.file_bytes)}"
        click.echo(f"recorded {totals.frames} frames, {size}, in {totals.seconds:.1f} s: {rate}")
        for stream in totals.streams:
            reasons = ", ".join(f"{reason.lower()} {count}" for reason, count in sorted(stream.reasons.items()))
            sign = "=" if stream.adds_up else "is not"
            tail = f"; {stream.unknown} ends of epochs were not seen" if stream.unknown else ""
            click.echo(
                f"stream {stream.stream_id}: {stream.published} published {sign} {stream.recorded} recorded "
                f"+ {stream.lost} lost{f' ({reasons})' if reasons else ''}{tail}"
            )
        click.echo(f"beside them {totals.metadata_rows} rows of metadata and {totals.qos_rows} of QoS")
        click.echo(f"lake {self._recorder.lake.path}")
