# SPDX-License-Identifier: Apache-2.0
"""The demo's Spark: a process that records the camera to a lake, computes live statistics, and checks the lake.

It reports when Spark has started, so that the camera begins; when it records, so that the demo's time begins; and at
the end whether the lake holds, byte for byte, what the camera published, apart from the gaps that the lake lists.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tensorpool.cli import demo_processes
from tensorpool.cli.demo_processes import ProcessSettings
from tensorpool.cli.test_pattern import checkable
from tensorpool.errors import TensorPoolError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from tensorpool.lake import Lake
    from tensorpool.lake.recorder import Totals
    from tensorpool.spark.recorder import Recorder, Settings

TRIGGER_S: Final = 0.5
WATCH_EVERY: Final = "2 seconds"
REPORT_EVERY_S: Final = 0.2
FIRST_STATISTICS_S: Final = 60.0  # the longest wait for the first live statistics
MAX_STARTS: Final = 3  # of the live query: on a busy host Spark gives up its workers too soon
WINDOW: Final = "1s"
PICTURES: Final = ("timeline.png", "frames.png")


class RecorderReport(msgspec.Struct, frozen=True):
    """Progress of the recording, and at the end the result of the checks."""

    phase: str = "starting Spark"
    is_recording: bool = False
    is_final: bool = False
    first_seq: int = 0
    frames: int = 0
    lost: int = 0
    lag: int = 0
    mib_per_s: float = 0.0
    file_bytes: int = 0
    reasons: dict[str, int] = {}
    live: str = ""  # the latest live statistics
    checked: int = 0
    checked_bytes: int = 0
    adds_up: bool = False
    wrong: str = ""
    stats: dict[str, Any] = {}
    pictures: tuple[str, ...] = ()
    failure: str = ""


def missing_for_spark() -> str:
    """What to install before the demo can use Spark; empty where everything is installed."""
    try:
        from tensorpool.spark.sessions import require_java
    except ImportError as error:
        return str(error)
    try:
        require_java()
    except TensorPoolError as error:
        return str(error)
    return ""


def run_recorder(process: ProcessSettings, folder: str, pipe: Connection) -> None:
    """Record until the demo sends how many frames the camera published, then check the lake, draw it, and end."""
    with contextlib.suppress(EOFError, BrokenPipeError):  # the demo has ended
        try:
            report = _record(process, Path(folder), pipe)
        except Exception as error:  # Spark fails with many types; the demo prints the first line
            report = RecorderReport(failure=(str(error).strip() or type(error).__name__).splitlines()[0])
        pipe.send(msgspec.structs.replace(report, is_final=True))


def _record(process: ProcessSettings, folder: Path, pipe: Connection) -> RecorderReport:
    from tensorpool.spark.recorder import Recorder, Settings

    shutil.rmtree(folder / "lake", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    where = {"shm.base_dir": process.config.shm.base_dir}
    settings = Settings(trigger_s=TRIGGER_S, is_durable=False, aeron_dir=process.aeron_dir, overrides=where)
    with _spark() as spark:
        pipe.send(RecorderReport(phase="waiting for the camera"))
        recorder = Recorder(spark, [demo_processes.STREAM], folder / "lake", name="demo", settings=settings)
        try:
            pipe.send(RecorderReport(phase="warming up"))
            with _live_statistics(spark, settings) as live:
                recorder.start()
                published = _follow(recorder, live, pipe)
            pipe.send(_progress(recorder.totals(), "committing the rest", live))
            totals = recorder.stop()
        finally:
            recorder.close()
        report = _progress(totals, "checking the lake", live)
        pipe.send(report)
        return _checked(spark, report, totals, folder, published, process.shape, pipe)


@contextlib.contextmanager
def _spark() -> Iterator[SparkSession]:
    from tensorpool.cli.spark_options import started

    # Hides what the JVM prints while it starts.
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        with started("local[2]", "demo", ()) as spark:
            yield spark
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class _LiveQuery:
    """The live query, which is started again when it fails, and its latest statistics."""

    def __init__(self, start: Callable[[_LiveQuery], StreamingQuery]) -> None:
        self.statistics = ""
        self._start = start
        self._starts = 1
        self._query = start(self)

    def restart_if_ended(self) -> None:
        if not self._query.isActive and self._starts < MAX_STARTS:
            self._starts += 1
            self._query = self._start(self)

    def stop(self) -> None:
        self._query.stop()


@contextlib.contextmanager
def _live_statistics(spark: SparkSession, settings: Settings) -> Iterator[_LiveQuery]:
    """Statistics of live frames: Spark carries references, and each task reads the pixels from shared memory."""
    from pyspark.sql import functions as fn

    from tensorpool.spark.functions import frame_stats

    def show(live: _LiveQuery, batch: DataFrame) -> None:
        row = batch.agg(
            fn.count("*").alias("frames"), fn.avg("mean").alias("mean"), fn.max("max").alias("max")
        ).collect()[0]
        if row["frames"] and row["mean"] is not None:
            live.statistics = f"{row['frames']} frames analysed live, mean {row['mean']:.1f}, max {row['max']:.0f}"

    frames = spark.readStream.format("tensorpool").options(
        streams=demo_processes.STREAM, payload="reference", aeronDir=settings.aeron_dir, **settings.overrides
    )

    def start(live: _LiveQuery) -> StreamingQuery:
        writer = frame_stats(frames.load()).writeStream.foreachBatch(lambda batch, _: show(live, batch))
        return writer.trigger(processingTime=WATCH_EVERY).start()

    live = _LiveQuery(start)
    try:
        yield live
    finally:
        live.stop()


def _follow(recorder: Recorder, live: _LiveQuery, pipe: Connection) -> int:
    """Record until the camera has ended; returns how many frames it published.

    Reports `is_recording` once live statistics arrive as well, or do not arrive in time.
    """
    report_s = 0.0
    deadline_s = time.monotonic() + FIRST_STATISTICS_S
    while not pipe.poll(REPORT_EVERY_S / 4):
        recorder.poll()
        if time.monotonic() >= report_s:
            report_s = time.monotonic() + REPORT_EVERY_S
            live.restart_if_ended()
            is_recording = bool(live.statistics) or time.monotonic() > deadline_s
            report = _progress(recorder.totals(), "recording", live)
            pipe.send(msgspec.structs.replace(report, is_recording=is_recording))
    published: int = pipe.recv()
    return published


def _progress(totals: Totals, phase: str, live: _LiveQuery) -> RecorderReport:
    reasons: dict[str, int] = {}
    for stream in totals.streams:
        reasons |= stream.reasons
    return RecorderReport(
        phase=phase,
        frames=totals.frames,
        lost=totals.lost,
        lag=totals.lag_frames,
        mib_per_s=totals.payload_bytes / totals.seconds / 2**20 if totals.seconds else 0.0,
        file_bytes=totals.file_bytes,
        reasons=reasons,
        live=live.statistics,
        adds_up=totals.adds_up,
    )


def _checked(
    spark: SparkSession,
    report: RecorderReport,
    totals: Totals,
    folder: Path,
    published: int,
    shape: tuple[int, ...],
    pipe: Connection,
) -> RecorderReport:
    """Compare the lake with what the camera painted; then compute its statistics and draw it."""
    from tensorpool.cli.spark_options import rows_of
    from tensorpool.lake import Lake, pictures
    from tensorpool.spark.analytics import measured_frames, stats

    lake = Lake.open(folder / "lake")
    first, last, checked, checked_bytes, wrong = _verify(lake, shape)
    if last != published:
        wrong = wrong or f"the lake ends before frame {last}, the camera published {published}"
    report = msgspec.structs.replace(
        report, phase="drawing", first_seq=first, checked=checked, checked_bytes=checked_bytes, wrong=wrong
    )
    pipe.send(report)
    measured = measured_frames(lake).cache()
    (overall,) = rows_of(stats(measured))
    drawn = (
        pictures.timeline(
            rows_of(stats(measured, WINDOW)), folder / PICTURES[0], title="demo/camera, recorded by Spark"
        ),
        pictures.contact_sheet(lake, folder / PICTURES[1]),
    )
    return msgspec.structs.replace(report, stats=overall, pictures=tuple(map(str, drawn)))


def _verify(lake: Lake, shape: tuple[int, ...]) -> tuple[int, int, int, int, str]:
    """Check every byte of every frame in the lake, and that each seq is recorded or in a gap, and only once."""
    import numpy as np

    pattern = checkable(shape)
    pattern.paint(np.empty(shape, np.uint8), 0)  # fills its tables
    seqs: list[int] = []
    checked_bytes, wrong = 0, ""
    for file in lake.files():
        for batch in lake.read_frames(file.path, columns=["seq", "payload"]):
            for seq, payload in zip(batch.column("seq").to_pylist(), batch.column("payload"), strict=True):
                array = np.frombuffer(payload.as_buffer(), np.uint8).reshape(shape)
                difference = pattern.find(array, seq)
                if difference is not None:
                    wrong = wrong or f"frame {seq} of the lake at byte {difference.offset}"
                seqs.append(seq)
                checked_bytes += array.nbytes
    missing = [seq for gap in lake.gaps() for seq in range(gap.lo, gap.hi)]
    known = sorted(seqs + missing)
    if not known:
        return 0, 0, 0, 0, "the lake is empty"
    first, last = known[0], known[-1] + 1
    if known != list(range(first, last)):
        wrong = wrong or "a seq is missing without a gap, or recorded twice"
    return first, last, len(seqs), checked_bytes, wrong
