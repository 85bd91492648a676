# SPDX-License-Identifier: Apache-2.0
"""The demo's Spark: a process that records the camera to a lake, watches it live, and checks the lake afterwards.

It says when Spark is there, so that the camera begins; when it records, so that the time counts; and at the end whether
the lake has, byte for byte, what was published, but for the gaps that it names.
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

from tensorpool.cli import actors
from tensorpool.cli.actors import Part
from tensorpool.cli.pattern import checkable
from tensorpool.errors import TensorPoolError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from tensorpool.spark.lake import Lake
    from tensorpool.spark.recorder import Recorder, Settings, Totals

TRIGGER_S: Final = 0.5
WATCH_EVERY: Final = "2 seconds"
REPORT_EVERY_S: Final = 0.2
PATIENCE_S: Final = 60.0  # for the first live statistics
WATCHES: Final = 3  # how often the live query is started: on a busy host Spark gives its workers up too soon
WINDOW: Final = "1s"
PICTURES: Final = ("timeline.png", "frames.png")


class Archive(msgspec.Struct, frozen=True):
    """How far the recording is, and in the end what the lake is worth."""

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
    live: str = ""  # what the live query said last
    checked: int = 0
    checked_bytes: int = 0
    adds_up: bool = False
    wrong: str = ""
    stats: dict[str, Any] = {}
    pictures: tuple[str, ...] = ()
    failure: str = ""


def missing_for_spark() -> str:
    """What to install before the demo can use Spark; nothing where all is there."""
    try:
        from tensorpool.spark.sessions import require_java
    except ImportError as error:
        return f"{error.name} is missing: pip install 'tensorpool[spark]'"
    try:
        require_java()
    except TensorPoolError as error:
        return str(error)
    return ""


def play_archivist(part: Part, folder: str, pipe: Connection) -> None:
    """Record until the word comes how many frames there were, then check the lake, draw it, and leave."""
    with contextlib.suppress(EOFError, BrokenPipeError):  # the demo is gone
        try:
            archive = _record(part, Path(folder), pipe)
        except Exception as error:  # Spark has many ways to fail; each ends the demo with its first line
            archive = Archive(failure=(str(error).strip() or type(error).__name__).splitlines()[0])
        pipe.send(msgspec.structs.replace(archive, is_final=True))


def _record(part: Part, folder: Path, pipe: Connection) -> Archive:
    from tensorpool.spark.recorder import Recorder, Settings

    shutil.rmtree(folder / "lake", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    where = {"shm.base_dir": part.config.shm.base_dir}
    settings = Settings(trigger_s=TRIGGER_S, is_durable=False, aeron_dir=part.aeron_dir, overrides=where)
    with _spark() as spark:
        pipe.send(Archive(phase="waiting for the camera"))
        recorder = Recorder(spark, [actors.STREAM], folder / "lake", name="demo", settings=settings)
        try:
            pipe.send(Archive(phase="warming up"))
            with _watching(spark, settings) as live:
                recorder.start()
                published = _follow(recorder, live, pipe)
            pipe.send(_so_far(recorder.totals(), "committing the rest", live))
            totals = recorder.stop()
        finally:
            recorder.close()
        archive = _so_far(totals, "checking the lake", live)
        pipe.send(archive)
        return _checked(spark, archive, totals, folder, published, part.shape, pipe)


@contextlib.contextmanager
def _spark() -> Iterator[SparkSession]:
    from tensorpool.cli.sparks import started

    # What the JVM prints while it starts is not for a demo's eyes.
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        with started("local[2]", "demo", ()) as spark:
            yield spark
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class _Live:
    """The live query, started again where it ended by itself, and what it said last."""

    def __init__(self, start: Callable[[_Live], StreamingQuery]) -> None:
        self.words = ""
        self._start = start
        self._starts = 1
        self._query = start(self)

    def tend(self) -> None:
        if not self._query.isActive and self._starts < WATCHES:
            self._starts += 1
            self._query = self._start(self)

    def stop(self) -> None:
        self._query.stop()


@contextlib.contextmanager
def _watching(spark: SparkSession, settings: Settings) -> Iterator[_Live]:
    """Live statistics: references through Spark, pixels read from shared memory where the task runs."""
    from pyspark.sql import functions as fn

    from tensorpool.spark.functions import frame_stats

    def show(live: _Live, batch: DataFrame) -> None:
        row = batch.agg(
            fn.count("*").alias("frames"), fn.avg("mean").alias("mean"), fn.max("max").alias("max")
        ).collect()[0]
        if row["frames"] and row["mean"] is not None:
            live.words = f"{row['frames']} frames looked at live, mean {row['mean']:.1f}, max {row['max']:.0f}"

    frames = spark.readStream.format("tensorpool").options(
        streams=actors.STREAM, payload="reference", aeronDir=settings.aeron_dir, **settings.overrides
    )

    def start(live: _Live) -> StreamingQuery:
        writer = frame_stats(frames.load()).writeStream.foreachBatch(lambda batch, _: show(live, batch))
        return writer.trigger(processingTime=WATCH_EVERY).start()

    live = _Live(start)
    try:
        yield live
    finally:
        live.stop()


def _follow(recorder: Recorder, live: _Live, pipe: Connection) -> int:
    """Until the camera has left; returns how many frames it published. Recording means that statistics flow, too."""
    report_s = 0.0
    patience_s = time.monotonic() + PATIENCE_S
    while not pipe.poll(REPORT_EVERY_S / 4):
        recorder.poll()
        if time.monotonic() >= report_s:
            report_s = time.monotonic() + REPORT_EVERY_S
            live.tend()
            is_recording = bool(live.words) or time.monotonic() > patience_s
            archive = _so_far(recorder.totals(), "recording", live)
            pipe.send(msgspec.structs.replace(archive, is_recording=is_recording))
    published: int = pipe.recv()
    return published


def _so_far(totals: Totals, phase: str, live: _Live) -> Archive:
    reasons: dict[str, int] = {}
    for stream in totals.streams:
        reasons |= stream.reasons
    return Archive(
        phase=phase,
        frames=totals.frames,
        lost=totals.lost,
        lag=totals.lag_frames,
        mib_per_s=totals.payload_bytes / totals.seconds / 2**20 if totals.seconds else 0.0,
        file_bytes=totals.file_bytes,
        reasons=reasons,
        live=live.words,
        adds_up=totals.adds_up,
    )


def _checked(
    spark: SparkSession,
    archive: Archive,
    totals: Totals,
    folder: Path,
    published: int,
    shape: tuple[int, ...],
    pipe: Connection,
) -> Archive:
    """The lake against what the camera painted; then its figures and pictures."""
    from tensorpool.cli.sparks import rows_of
    from tensorpool.spark import pictures
    from tensorpool.spark.analytics import frames_of, stats
    from tensorpool.spark.functions import frame_stats
    from tensorpool.spark.lake import Lake

    lake = Lake.open(folder / "lake")
    first, last, checked, checked_bytes, wrong = _verify(lake, shape)
    if last != published:
        wrong = wrong or f"the lake ends before frame {last}, the camera published {published}"
    archive = msgspec.structs.replace(
        archive, phase="drawing", first_seq=first, checked=checked, checked_bytes=checked_bytes, wrong=wrong
    )
    pipe.send(archive)
    measured = frame_stats(frames_of(lake)).cache()
    (overall,) = rows_of(stats(measured))
    drawn = (
        pictures.timeline(
            rows_of(stats(measured, WINDOW)), folder / PICTURES[0], title="demo/camera, recorded by Spark"
        ),
        pictures.contact_sheet(lake, folder / PICTURES[1]),
    )
    return msgspec.structs.replace(archive, stats=overall, pictures=tuple(map(str, drawn)))


def _verify(lake: Lake, shape: tuple[int, ...]) -> tuple[int, int, int, int, str]:
    """Every frame of the lake, byte by byte, and every seq between the first and the last: recorded or in a gap."""
    import numpy as np

    from tensorpool.spark.lake.files import read_frames

    pattern = checkable(shape)
    pattern.paint(np.empty(shape, np.uint8), 0)  # makes its tables
    seqs: list[int] = []
    checked_bytes, wrong = 0, ""
    for file in lake.files():
        for batch in read_frames(lake.path / file.path, columns=["seq", "payload"]):
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
        wrong = wrong or "a frame that is neither in the lake nor in a gap, or in it twice"
    return first, last, len(seqs), checked_bytes, wrong
