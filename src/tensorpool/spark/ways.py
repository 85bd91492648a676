# SPDX-License-Identifier: Apache-2.0
"""The two ways in which Spark records: micro-batches of a streaming query, or one task that follows the rings.

    Batches    a streaming query of ranges into the lake's writer: every batch is planned anew and takes its time, so
               a ring has to last for several; as many tasks as Spark has
    Tailing    a job of one task, which reads the rings as they fill: a ring of tenths of a second is enough; one host

Files, manifest and gaps are the same, and so is what a kill -9 at any instant costs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

import msgspec
from py4j.protocol import Py4JError, Py4JNetworkError  # type: ignore[import-untyped]
from pyspark import InheritableThread
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamReader

from tensorpool.errors import ConfigError, TensorPoolError
from tensorpool.logs import get_logger
from tensorpool.spark.lake import Lake, layout
from tensorpool.spark.lake.cut import Cut
from tensorpool.spark.lake.store import write_once
from tensorpool.spark.offsets import Offsets, Position
from tensorpool.spark.options import LiveOptions, source_options

MAX_BYTES_PER_TRIGGER: Final = 4 << 30
READY_S: Final = 300.0  # that a task may take to have the rings; Spark may have to start its workers first
HALT_S: Final = 20.0  # that a task may take to commit what it has
MODES: Final = ("tail", "batches")


class RecordingFailed(TensorPoolError):
    """The recording ended and could not be started again; its checkpoint is kept."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How to record."""

    mode: str | None = None  # "tail" or "batches"; None: as it was begun, and a new one follows
    codec: str = "zstd"
    trigger_s: float = 1.0
    starting_offsets: str = "latest"  # of a recording that has no checkpoint yet
    max_file_bytes: int = 256 << 20
    max_file_seconds: float = 60.0
    is_durable: bool = True
    is_warmed_up: bool = True  # a new recording, before it takes its first offset
    fail_on_data_loss: bool = False
    aeron_dir: str | None = None
    config: str | None = None
    overrides: Mapping[str, str] = MappingProxyType({})

    def source(self, streams: Sequence[int], starting_offsets: str) -> dict[str, str]:
        """As options of the live source."""
        options = {
            "streams": ",".join(map(str, streams)),
            "table": "ranges",
            "startingOffsets": starting_offsets,
            "maxBytesPerTrigger": str(MAX_BYTES_PER_TRIGGER),
            "failOnDataLoss": str(self.fail_on_data_loss).lower(),
            **self.overrides,
        }
        if self.aeron_dir is not None:
            options["aeronDir"] = self.aeron_dir
        if self.config is not None:
            options["config"] = self.config
        return options


class Way(Protocol):
    """How a recording is done. `query` is the name under which its commits are found."""

    @property
    def mode(self) -> str: ...

    @property
    def query(self) -> str: ...

    def begin(self, start: Offsets) -> None:
        """Start, or start again; `start` is where the newest frames are. Raises what Spark says."""

    def started(self) -> Offsets:
        """Where it begins, once it is known. Raises RecordingFailed."""

    def failure(self) -> str | None:
        """Why it ended, "" where somebody stopped it; None while it runs, or has drained."""

    def drain(self, target: Offsets) -> None:
        """Take nothing that lies beyond a target; asked once."""

    def has_reached(self, target: Offsets) -> bool:
        """Whether everything up to a target is committed."""

    def halt(self) -> bool:
        """End soon; what is not committed yet is taken up when the recording goes on. False: it may not have ended."""


class Batches:
    """A streaming query."""

    mode: Final = "batches"

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

    @staticmethod
    def is_begun(checkpoint: Path) -> bool:
        """Whether there is one to go on with."""
        return (checkpoint / "offsets").exists()

    def begin(self, start: Offsets) -> None:
        starting = self._settings.starting_offsets
        if starting == "latest":
            starting = msgspec.json.encode(start.to_json()).decode()
        ranges = self._ranges(starting).load()
        self._query = self._sink(ranges, str(self._lake.path), str(self._checkpoint), self._settings.trigger_s)
        self.query = str(self._query.id)
        self._start = start

    def started(self) -> Offsets:
        return self._start

    def warm_up(self, start: Offsets) -> None:
        """Have Spark, planner and workers do once what they will do from now on, into a lake that goes again."""
        scratch = tempfile.mkdtemp(prefix="tensorpool-warm-up-")
        try:
            begin = {stream: Position(at.epoch, max(0, at.seq - 2)) for stream, at in start.positions.items()}
            ranges = self._ranges(msgspec.json.encode(Offsets(begin).to_json()).decode())
            self._sink(ranges.load(), f"{scratch}/lake", f"{scratch}/checkpoint", None).awaitTermination()
        except PySparkException as error:  # whatever it is, the recording itself meets it too, and is restarted
            self._log.warning("warm_up_failed", error=last_words(str(error)))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def failure(self) -> str | None:
        if self._query is None or self._query.isActive:
            return None
        failure = self._query.exception()
        return "" if failure is None else str(failure)

    def drain(self, target: Offsets) -> None:
        """The query goes on until somebody sees that it has reached the target."""

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


class _Mark(msgspec.Struct, frozen=True):
    """What tail.json says: the name under which the recording commits."""

    id: str


class Tailing:
    """A job of one task that follows the rings."""

    mode: Final = "tail"

    def __init__(self, spark: SparkSession, lake: Lake, name: str, streams: Sequence[int], settings: Settings) -> None:
        self._spark = spark
        self._lake = lake
        self._name = name
        self._folder = lake.path / layout.CHECKPOINTS / name
        self._options: LiveOptions = source_options(settings.source(streams, settings.starting_offsets))
        self._settings = settings
        self._job: _Job | None = None
        self._target: Offsets | None = None
        self.query = self._known_query()

    @staticmethod
    def is_begun(checkpoint: Path) -> bool:
        """Whether there is one to go on with."""
        return (checkpoint / layout.TAIL).exists()

    def begin(self, start: Offsets) -> None:
        from tensorpool.spark.lake.tail import Plan, Signs  # needs Arrow, and only where this way is gone

        settings = self._settings
        plan = Plan(
            lake=str(self._lake.path),
            recording=self._name,
            query=self.query,
            run=uuid.uuid4().hex,
            options=self._options,
            cut=Cut(settings.codec, settings.max_file_bytes, is_durable=settings.is_durable),
            commit_s=min(settings.trigger_s, settings.max_file_seconds),
        )
        signs = Signs(self._folder, plan.run)
        signs.clear()
        if self._target is not None:
            _tell(signs.stop, self._target)
        self._job = _Job(self._spark, plan, signs)

    def started(self) -> Offsets:
        assert self._job is not None
        return self._job.started()

    def failure(self) -> str | None:
        if self._job is None or self._job.is_running:
            return None
        if self._job.gone is not None:
            raise self._job.gone
        failure = self._job.failure
        return failure if failure is not None or self._target is not None else ""

    def drain(self, target: Offsets) -> None:
        self._target = target
        if self._job is not None:
            _tell(self._job.signs.stop, target)

    def has_reached(self, target: Offsets) -> bool:
        return self._job is not None and self._job.is_done

    def halt(self) -> bool:
        job, self._job = self._job, None
        return job is None or job.halt()

    def _known_query(self) -> str:
        path = self._folder / layout.TAIL
        self._folder.mkdir(parents=True, exist_ok=True)
        write_once(path, msgspec.json.encode(_Mark(uuid.uuid4().hex)))
        try:
            return msgspec.json.decode(path.read_bytes(), type=_Mark).id
        except msgspec.DecodeError:
            raise ConfigError("checkpoint", str(path), "what a recording of mode tail wrote there") from None


class _Job:
    """A running task, seen from the recorder."""

    def __init__(self, spark: SparkSession, plan: Any, signs: Any) -> None:
        self._spark = spark
        self._plan = plan
        self.signs = signs
        self.failure: str | None = None
        self.gone: Exception | None = None  # the JVM
        self._tag = f"tensorpool-{plan.run}"
        self._thread = InheritableThread(target=self._work, name=self._tag, daemon=True, session=spark)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return bool(self._thread.is_alive())

    @property
    def is_done(self) -> bool:
        return not self.is_running and self.failure is None and self.gone is None

    def started(self) -> Offsets:
        """Where it began, as soon as it has the rings. Raises RecordingFailed."""
        until_s = time.monotonic() + READY_S
        while True:
            is_over = not self.is_running
            with contextlib.suppress(FileNotFoundError):
                return Offsets.from_json(self.signs.ready.read_text())
            if is_over or time.monotonic() > until_s:
                break
            time.sleep(0.02)
        no_slot = f"its task did not begin within {READY_S:.0f} s: has Spark a free slot for it?"
        failure = self.failure or (no_slot if self.gone is None else str(self.gone))
        self.halt()
        raise RecordingFailed(f"recording {self._plan.recording} failed: {last_words(failure)}")

    def halt(self) -> bool:
        """Have it commit what it has and end; what does not end is cut off. False: it may go on for a while."""
        if self.is_running:
            _tell(self.signs.stop, Offsets())
            self._thread.join(HALT_S)
        if self.is_running:
            with contextlib.suppress(Py4JError, PySparkException, OSError):
                self._spark.interruptTag(self._tag)
            self._thread.join(HALT_S)
        self.signs.clear()
        return not self.is_running

    def _work(self) -> None:
        from tensorpool.spark.lake.tail import follow

        try:
            self._spark.addTag(self._tag)
            task = self._spark.range(0, 1, 1, 1).mapInArrow(functools.partial(follow, self._plan), "frames long")
            task.collect()
        except (Py4JNetworkError, OSError) as error:
            self.gone = error
        except Exception as error:  # whatever it is, the recorder decides what comes of it
            self.failure = str(error) or type(error).__name__


def _tell(path: Path, target: Offsets) -> None:
    write_once(path, msgspec.json.encode(target.to_json()))


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


def last_words(failure: str) -> str:
    """The line of an error in which Python says what it was."""
    lines = [line.strip() for line in failure.splitlines() if line.strip()]
    ours = [line for line in lines if re.match(r"tensorpool\.[\w.]+: ", line)]
    ours = ours or [line for line in lines if re.match(r"\w+(Error|Exception): ", line)]
    return ours[-1] if ours else lines[0] if lines else "no reason given"
