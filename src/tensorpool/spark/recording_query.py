# SPDX-License-Identifier: Apache-2.0
"""Recording as a structured streaming query: its rows are ranges, and its tasks read the rings and write the files.

Every micro-batch is planned anew and takes its time, so a ring has to last for several. What a batch reads follows from
its offsets alone, so one that Spark runs again is the same batch, and commits once.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamReader

from tensorpool.lake import layout
from tensorpool.lake.lake import Lake
from tensorpool.lake.offsets import Offsets, Position
from tensorpool.lake.recording_engine import EngineGone, RecordingFailed, Settings, reason_of
from tensorpool.logs import get_logger

BATCH_OVERHEAD_S: Final = 0.5  # of a micro-batch, beyond its trigger
BATCHES_IN_RING: Final = 4
BATCH_WAIT_S: Final = 3.0  # that a stop waits for the end of a batch
WARM_UP_FROM: Final = "-0.1s"  # some frames of a stream that is live


class RecordingQuery:
    """The engine: a streaming query."""

    def __init__(self, spark: SparkSession, lake: Lake, name: str, streams: Sequence[int], settings: Settings) -> None:
        self._spark = spark
        self._lake = lake
        self._checkpoint = lake.path / layout.CHECKPOINTS / name
        self._streams = streams
        self._settings = settings
        self._log = get_logger("recorder", recording=name)
        self._query: StreamingQuery | None = None
        self._start = Offsets()
        self.query = ""

    @property
    def process(self) -> int | None:
        return _jvm_pid(self._spark)

    @property
    def needs_s(self) -> float:
        return BATCHES_IN_RING * (self._settings.trigger_s + BATCH_OVERHEAD_S)

    def begin(self, start: Offsets) -> Offsets:
        starting = self._settings.starting_offsets
        if starting == "latest":
            starting = msgspec.json.encode(start.to_json()).decode()
        try:
            ranges = self._ranges(starting).load()
            self._query = self._sink(ranges, self._lake.uri, str(self._checkpoint), self._settings.trigger_s)
            self.query = str(self._query.id)
        except (PySparkException, Py4JError) as error:
            raise RecordingFailed(reason_of(str(error))) from error
        self._start = start
        return start

    def warm_up(self) -> None:
        """Have Spark, planner and workers do once what they will do from now on, into a lake that goes again."""
        scratch = tempfile.mkdtemp(prefix="tensorpool-warm-up-")
        try:
            ranges = self._ranges(WARM_UP_FROM).load()
            self._sink(ranges, f"{scratch}/lake", f"{scratch}/checkpoint", None).awaitTermination()
        except PySparkException as error:  # the recording itself meets it too, and is restarted
            self._log.warning("warm_up_failed", error=reason_of(str(error)))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def failure(self) -> str | None:
        try:
            if self._query is None or self._query.isActive:
                return None
            failure = self._query.exception()
        except (Py4JError, OSError) as error:
            raise EngineGone(f"Spark is gone ({type(error).__name__})") from None
        return "" if failure is None else str(failure)

    def drain(self, target: Offsets) -> None:
        """The query goes on until the recorder sees that it has reached the target."""

    def has_reached(self, target: Offsets) -> bool:
        reached = committed_offsets(self._checkpoint)
        if reached is None:
            if self._settings.starting_offsets != "latest":
                return all(at.seq == 0 for at in target.positions.values())
            reached = self._start
        for stream, at in target.positions.items():
            there = reached.positions.get(stream, Position(0, 0))
            if (there.epoch, there.seq) < (at.epoch, at.seq):
                return False
        return True

    def halt(self) -> bool:
        query, self._query = self._query, None
        try:
            if query is not None:
                _await_batch(query)
                query.stop()
        except (Py4JError, OSError):  # a JVM that is gone has no query to stop
            return False
        return True

    def _ranges(self, starting_offsets: str) -> DataStreamReader:
        options: dict[str, Any] = dict(self._settings.source(self._streams, starting_offsets))
        return self._spark.readStream.format("tensorpool").options(**options)

    def _sink(self, ranges: Any, path: str, checkpoint: str, trigger_s: float | None) -> StreamingQuery:
        settings = self._settings
        writer = ranges.writeStream.format("tensorpool.lake").options(
            checkpointLocation=checkpoint,
            codec=settings.codec,
            maxFileBytes=settings.max_file_bytes,
            maxFileSeconds=f"{settings.max_file_seconds}s",
            durable=str(settings.is_durable).lower(),
        )
        if trigger_s is None:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{round(trigger_s * 1000)} milliseconds")
        query: StreamingQuery = writer.start(path)
        return query


def _await_batch(query: StreamingQuery) -> None:
    """Wait for the end of a batch, for some seconds: Spark reports one that is stopped halfway as a page of errors."""
    until_s = time.monotonic() + BATCH_WAIT_S
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < until_s:
        time.sleep(0.01)


def committed_offsets(checkpoint: Path) -> Offsets | None:
    """Where the last batch ended that Spark's checkpoint has as done; None where there is none.

    An entry of the offset log is a line with its version, one with settings, and one per source.
    """
    try:
        batches = [int(name) for name in os.listdir(checkpoint / "commits") if name.isdecimal()]
        lines = (checkpoint / "offsets" / str(max(batches))).read_text().splitlines()
        return Offsets.from_json(lines[2])
    except (FileNotFoundError, ValueError, IndexError):
        return None


def _jvm_pid(spark: SparkSession) -> int | None:
    """Of a JVM that this process started."""
    gateway = getattr(getattr(spark, "sparkContext", None), "_gateway", None)
    process = getattr(gateway, "proc", None)
    return None if process is None else int(process.pid)
