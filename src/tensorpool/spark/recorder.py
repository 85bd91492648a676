# SPDX-License-Identifier: Apache-2.0
"""Recording live streams to a lake: one streaming query of ranges, whose tasks read shared memory and write Parquet.

    Recorder ── Spark query: table "ranges" of the live source ──► lake's writer ──► files, one manifest entry per batch
        └────── leases of its own: how far the producers are, how long the rings last; metadata and QoS besides

A recording has a name, and its checkpoint in the lake: started again under the same name it goes on where its last
commit ended, whatever ended it. What the rings lost meanwhile is a gap in the lake.

It is the service `service:recorder:<name>`: paused it takes no frames, and resumed it goes on where its last commit
ended, so that a pause costs what the rings forgot in it. Service Control §4.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self

import msgspec
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamReader

from tensorpool.client import Client, connect
from tensorpool.client.watch import Watch
from tensorpool.control import Service, ServiceAgent, State, host_standard
from tensorpool.errors import ConfigError, TensorPoolError
from tensorpool.logs import get_logger
from tensorpool.spark.lake import Lake, layout
from tensorpool.spark.lake.beside import Beside
from tensorpool.spark.lake.cut import Cut
from tensorpool.spark.lake.lock import RecordingLock
from tensorpool.spark.lake.totals import Counted, StreamTotals
from tensorpool.spark.offsets import Offsets, Position
from tensorpool.spark.options import LiveOptions

ATTACH_TIMEOUT_S: Final = 30.0
BATCH_OVERHEAD_S: Final = 0.5  # of a micro-batch, beyond its trigger
BATCHES_IN_RING: Final = 4
TURNS_PER_POLL: Final = 100  # of its service
MAX_BYTES_PER_TRIGGER: Final = 4 << 30
RESTARTS: Final = 5  # of a query that fails, without a batch in between
FULL: Final = os.strerror(errno.ENOSPC)
MIN_FREE_BYTES: Final = 1 << 20  # below, it is not tried
RETRY_S, MAX_RETRY_S = 1.0, 30.0  # between two tries, the first and the last
FINAL: Final = (
    "LakeConflict",
    "LakeDamaged",
    "DataLoss",
    "ConfigError",
    "RemoteProtocolError",
)  # no use in trying again


class RecordingFailed(TensorPoolError):
    """The query ended and could not be started again; its checkpoint is kept."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How to record."""

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


class RingDepth(msgspec.Struct, frozen=True):
    """How long a ring remembers, and how long the recorder needs it to."""

    stream_id: int
    slots: int
    rate_hz: float
    holds_s: float | None  # None: nothing is published, so nothing is forgotten
    needs_s: float

    @property
    def is_enough(self) -> bool:
        return self.holds_s is None or self.holds_s >= self.needs_s


class Totals(msgspec.Struct, frozen=True):
    """What this run of a recorder has committed."""

    frames: int
    payload_bytes: int
    file_bytes: int
    files: int
    lost: int
    batches: int
    seconds: float
    lag_frames: int  # published, but not committed yet
    streams: tuple[StreamTotals, ...]
    metadata_rows: int = 0
    qos_rows: int = 0
    restarts: int = 0

    @property
    def adds_up(self) -> bool:
        return all(stream.adds_up for stream in self.streams)


class Recorder:
    """Records streams until it is stopped.

    >>> with Recorder(spark, ["camera/front"], "/data/lake") as recorder:      # doctest: +SKIP
    ...     recorder.wait(60)
    >>> print(recorder.totals().frames)                                        # doctest: +SKIP
    """

    def __init__(
        self,
        spark: SparkSession,
        streams: Sequence[int | str],
        lake: Path | str,
        *,
        name: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        if not streams:
            raise ConfigError("streams", [], "at least one stream, by id or by name")
        self.settings: Final = settings or Settings()
        self.name: Final = default_name(streams) if name is None else name
        if not layout.is_plain_name(self.name):
            raise ConfigError("name", self.name, "letters, digits, '.', '_' and '-', at most 100")
        Cut(self.settings.codec)
        self._spark = spark
        self._log = get_logger("recorder", recording=self.name)
        self._lake = Lake.create(lake)
        self._client: Client | None = None
        self._watches: list[Watch] = []
        self._names: dict[int, str] = {}  # of streams that were asked for by name
        self._beside: Beside | None = None
        self._query: StreamingQuery | None = None
        self._start = Offsets()
        self._started_s = 0.0
        self._ended_s = 0.0
        self._first_commit = self._lake.state.number + 1
        self._read_commits = self._first_commit - 1
        self._counted = Counted()
        self._restarts = 0
        self._restarts_in_row = 0
        self._restarted_at = -1
        self._query_id: str | None = None
        self._beside_rows = {"metadata": 0, "qos": 0}
        self._full_at: int | None = None  # the last batch that there was space for
        self._retry_s = 0.0
        self._retry_after_s = RETRY_S
        self._service: Service | None = None
        self._agent: ServiceAgent | None = None
        self._is_drained = False
        self._lock = RecordingLock(self._lake.path / layout.CHECKPOINTS / f"{self.name}.lock", self.name)
        try:
            self._attach(streams)
        except BaseException:
            self.close()
            raise

    @property
    def checkpoint(self) -> Path:
        return self._lake.path / layout.CHECKPOINTS / self.name

    @property
    def lake(self) -> Lake:
        return self._lake

    @property
    def stream_ids(self) -> list[int]:
        return [watch.stream_id for watch in self._watches]

    @property
    def is_paused(self) -> bool:
        """Whether a command told it to take no frames for now."""
        return self._service is not None and self._service.state is State.PAUSED

    @property
    def is_drained(self) -> bool:
        """Whether a command told it to end: whoever runs it calls `stop`."""
        return self._is_drained

    @property
    def is_full(self) -> bool:
        """Whether it waits for space in the lake."""
        return self._full_at is not None

    @property
    def is_resumed(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return (self.checkpoint / "offsets").exists()

    def start(self) -> None:
        """Warm up, take the first offset, and record from there. A resumed recording goes on without delay."""
        if self.settings.is_warmed_up and not self.is_resumed:
            self.warm_up()
        self._lock.tell(_jvm_pid(self._spark))
        self._beside = Beside(self._lake, self._live_options(), self._names)
        self._start = self._positions()
        self._begin()
        self._started_s = time.monotonic()
        self._serve()

    def pause(self) -> None:
        """Take no frames: the query ends at once, what it has not committed is taken up when the recording goes on."""
        if self._query is not None:
            with contextlib.suppress(Py4JError, OSError):  # `poll` will say that the JVM is gone
                self._query.stop()
            self._query = None

    def resume(self) -> None:
        """Go on where the last commit ended. What the rings forgot meanwhile is a gap."""
        if self._query is None:
            self._begin()

    def warm_up(self) -> None:
        """Have Spark, planner and workers do once what they will do from now on, into a lake that goes again."""
        scratch = tempfile.mkdtemp(prefix="tensorpool-warm-up-")
        try:
            begin = {
                stream: Position(at.epoch, max(0, at.seq - 2)) for stream, at in self._positions().positions.items()
            }
            ranges = self._ranges(msgspec.json.encode(Offsets(begin).to_json()).decode())
            query = self._sink(ranges.load(), f"{scratch}/lake", f"{scratch}/checkpoint", trigger_s=None)
            query.awaitTermination()
        except PySparkException as error:  # whatever it is, the recording itself meets it too, and is restarted
            self._log.warning("warm_up_failed", error=_last_words(str(error)))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def depths(self, seconds: float = 0.5) -> list[RingDepth]:
        """How long every ring remembers, from what is published within some seconds."""
        before = self._positions().positions
        began_s = time.monotonic()
        time.sleep(seconds)
        after = self._positions().positions
        elapsed_s = time.monotonic() - began_s
        needs_s = BATCHES_IN_RING * (self.settings.trigger_s + BATCH_OVERHEAD_S)
        found = []
        for watch in self._watches:
            stream, slots = watch.stream_id, watch.epochs[-1].mapped.reader.nslots
            is_same = before[stream].epoch == after[stream].epoch
            count = after[stream].seq - (before[stream].seq if is_same else 0)
            rate_hz = count / elapsed_s
            found.append(RingDepth(stream, slots, rate_hz, slots / rate_hz if count else None, needs_s))
        return found

    def poll(self) -> None:
        """To be called now and then: writes what was heard beside the frames, answers commands, restarts a query.

        A full disk is waited for. Raises RecordingFailed when the query fails again and again.
        """
        if self._beside is not None:
            try:
                self._beside.write()
            except OSError as error:
                self._note_full(error)
        self._turn_service()
        failure = self._failure()
        if failure is None:
            self._note_space()
            return
        if failure == "":
            raise RecordingFailed(f"recording {self.name}: somebody stopped its query")
        if FULL in failure:
            self._note_full(failure)
            if time.monotonic() < self._retry_s or shutil.disk_usage(self._lake.path).free < MIN_FREE_BYTES:
                return
            self._retry_s = time.monotonic() + self._retry_after_s
            self._retry_after_s = min(2 * self._retry_after_s, MAX_RETRY_S)
        else:
            self._restarts_in_row = self._restarts_in_row + 1 if self._committed_batch() == self._restarted_at else 1
            self._restarted_at = self._committed_batch()
            if self._restarts_in_row > RESTARTS or any(name in failure for name in FINAL):
                raise RecordingFailed(f"recording {self.name} failed: {_last_words(failure)}")
            self._log.warning("query_restarted", times=self._restarts_in_row, error=_last_words(failure))
        self._restarts += 1
        try:
            self._begin()
        except (PySparkException, Py4JError, OSError) as error:  # the failed query stays: the next poll looks again
            self._log.debug("query_not_restarted", error=_last_words(str(error)))

    def wait(self, seconds: float) -> None:
        """Record for so long, or until a command drains it."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0 and not self._is_drained:
            self.poll()
            time.sleep(min(0.2, left_s))

    def stop(self, timeout_s: float = 120.0) -> Totals:
        """Record everything that was published up to this call, commit it, and end. A paused one ends at once."""
        if self._service is not None:
            self._service.state = State.DRAINING
        target = self._positions()
        until_s = time.monotonic() + timeout_s
        while self._query is not None and not self._has_reached(target) and time.monotonic() < until_s:
            self.poll()
            time.sleep(0.05)
        lag, is_early = self._lag(), self._query is not None and not self._has_reached(target)
        self.close()
        if is_early:
            self._log.warning(
                "stopped_early",
                waited_s=timeout_s,
                frames_left=lag,
                advice="start the recording again: it goes on where its last commit ended, as far as the rings go back",
            )
        if self._full_at is not None and lag:
            raise RecordingFailed(
                f"recording {self.name}: no space is left for {self._lake.path}, {lag} frames are not recorded; "
                "make space and start it again: it goes on where its last commit ended"
            )
        return self.totals()

    def close(self) -> None:
        """End at once; what is not committed yet is staged, and taken up when the recording goes on."""
        self._ended_s = self._ended_s or time.monotonic()
        if self._agent is not None:
            self._agent.on_close()
            self._agent = None
        if self._query is not None:
            with contextlib.suppress(Py4JError, OSError):  # a JVM that is gone has no query to stop
                self._query.stop()
                self._lock.tell(None)
            self._query = None
        try:
            if self._beside is not None:
                beside, self._beside = self._beside, None
                try:
                    beside.close()
                except OSError as error:
                    self._note_full(error)
                self._beside_rows = dict(beside.rows)
        finally:
            if self._client is not None:
                self._client.close()
                self._client = None
            self._lock.release()

    def totals(self) -> Totals:
        """What this run has committed so far."""
        newest = self._lake.state.number
        while self._read_commits < newest:
            self._read_commits += 1
            commit = self._lake.store.commit(self._read_commits)
            if commit.kind == "record" and commit.query == self._query_id:
                self._counted.add(commit)
        counted = self._counted
        rows = self._beside_rows if self._beside is None else self._beside.rows
        return Totals(
            frames=counted.frames,
            payload_bytes=counted.payload_bytes,
            file_bytes=counted.file_bytes,
            files=counted.files,
            lost=counted.lost,
            batches=counted.batches,
            seconds=round((self._ended_s or time.monotonic()) - (self._started_s or time.monotonic()), 3),
            lag_frames=self._lag(),
            streams=counted.streams(),
            metadata_rows=rows["metadata"],
            qos_rows=rows["qos"],
            restarts=self._restarts,
        )

    # --- the service

    def _serve(self) -> None:
        assert self._client is not None
        settings = self._client.config.control
        if not settings.enabled:
            return
        self._service = Service("recorder", self.name, config=settings)
        host_standard(self._service, status=self._status, drain=self._drain, pause=self.pause, resume=self.resume)
        self._agent = ServiceAgent(self._service, self._client.aeron_dir)
        self._agent.on_start()

    def _turn_service(self) -> None:
        """Polls are rare; a busy stream may have much to read between two of them."""
        for _ in range(TURNS_PER_POLL):
            if self._agent is None or not self._agent.do_work():
                break

    def _status(self) -> dict[str, object]:
        totals = self.totals()
        known = {name: getattr(totals, name) for name in ("frames", "payload_bytes", "files", "lost", "lag_frames")}
        return {"streams": self.stream_ids, "lake": str(self._lake.path), **known, "restarts": totals.restarts}

    def _drain(self) -> None:
        self._is_drained = True

    # --- the query

    def _begin(self) -> None:
        starting = self.settings.starting_offsets
        if starting == "latest":
            starting = msgspec.json.encode(self._start.to_json()).decode()
        ranges = self._ranges(starting).load()
        path, checkpoint = str(self._lake.path), str(self.checkpoint)
        self._query = self._sink(ranges, path, checkpoint, trigger_s=self.settings.trigger_s)
        self._query_id = str(self._query.id)

    def _ranges(self, starting_offsets: str) -> DataStreamReader:
        settings = self.settings
        options: dict[str, Any] = {
            "streams": ",".join(map(str, self.stream_ids)),
            "table": "ranges",
            "startingOffsets": starting_offsets,
            "maxBytesPerTrigger": MAX_BYTES_PER_TRIGGER,
            "failOnDataLoss": str(settings.fail_on_data_loss).lower(),
            **settings.overrides,
        }
        if settings.aeron_dir is not None:
            options["aeronDir"] = settings.aeron_dir
        if settings.config is not None:
            options["config"] = settings.config
        return self._spark.readStream.format("tensorpool").options(**options)

    def _sink(self, ranges: Any, path: str, checkpoint: str, *, trigger_s: float | None) -> StreamingQuery:
        settings = self.settings
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

    def _failure(self) -> str | None:
        """Why the query ended, "" where somebody stopped it; None while it runs."""
        try:
            if self._query is None or self._query.isActive:
                return None
            failure = self._query.exception()
        except (Py4JError, OSError) as error:
            self._query = None
            raise RecordingFailed(f"recording {self.name}: Spark is gone ({type(error).__name__})") from None
        return "" if failure is None else str(failure)

    def _note_full(self, failure: OSError | str) -> None:
        """Say once that the disk is full. Raises what is anything else."""
        if isinstance(failure, OSError) and FULL not in str(failure):
            raise failure
        if self._full_at is None:
            free = shutil.disk_usage(self._lake.path).free
            self._log.error("lake_full", path=str(self._lake.path), free_bytes=free, advice="make space: it goes on")
            self._full_at = self._committed_batch()

    def _note_space(self) -> None:
        if self._full_at is not None and self._committed_batch() > self._full_at:
            self._full_at, self._retry_after_s = None, RETRY_S
            self._log.warning("lake_goes_on", path=str(self._lake.path))

    def _committed_batch(self) -> int:
        return self._lake.state.batches.get(self._query_id or "", -1)

    def _has_reached(self, target: Offsets) -> bool:
        """Whether the last batch that was committed ended at or behind a target."""
        reached = committed_offsets(self.checkpoint)
        if reached is None:
            if self.settings.starting_offsets != "latest":
                return all(at.seq == 0 for at in target.positions.values())
            reached = self._start
        for stream, at in target.positions.items():
            there = reached.positions.get(stream, Position(0, 0))
            if (there.epoch, there.seq) < (at.epoch, at.seq):
                return False
        return True

    # --- what the recorder sees itself

    def _attach(self, streams: Sequence[int | str]) -> None:
        settings = self.settings
        self._client = connect(settings.aeron_dir, config=settings.config, overrides=settings.overrides)
        for stream in streams:
            watch = self._client.watch(stream, timeout=ATTACH_TIMEOUT_S)
            if watch.stream_id in self.stream_ids:
                raise ConfigError("streams", list(streams), f"stream {watch.stream_id} only once")
            self._watches.append(watch)
            if isinstance(stream, str):
                self._names[watch.stream_id] = stream

    def _positions(self) -> Offsets:
        positions = {}
        for watch in self._watches:
            newest = max(watch.epochs, key=lambda epoch: epoch.epoch)
            positions[watch.stream_id] = Position(newest.epoch, newest.end)
        return Offsets(positions)

    def _lag(self) -> int:
        """Frames that are published and not committed yet, in the current epochs."""
        if self._client is None:
            return 0
        lag = 0
        ends = self._lake.state.ends
        for stream, at in self._positions().positions.items():
            start = self._start.positions.get(stream)
            begin = start.seq if start is not None and start.epoch == at.epoch else 0
            lag += max(0, at.seq - max(begin, ends.get(f"{stream}/{at.epoch}", 0)))
        return lag

    def _live_options(self) -> LiveOptions:
        settings = self.settings
        return LiveOptions(
            streams=tuple(self.stream_ids),
            aeron_dir=settings.aeron_dir,
            config=settings.config,
            overrides=dict(settings.overrides),
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.close()


def default_name(streams: Sequence[int | str]) -> str:
    """The name of a recording that was given none: those of its streams.

    >>> default_name(["camera/front", 10001])
    'camera-front_10001'
    """
    return "_".join(re.sub(r"[^A-Za-z0-9.-]+", "-", str(stream)).strip("-.") for stream in streams)[:100]


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


def _last_words(failure: str) -> str:
    """The line of an error in which Python says what it was."""
    lines = [line.strip() for line in failure.splitlines() if line.strip()]
    ours = [line for line in lines if re.match(r"tensorpool\.[\w.]+: ", line)]
    ours = ours or [line for line in lines if re.match(r"\w+(Error|Exception): ", line)]
    return ours[-1] if ours else lines[0] if lines else "no reason given"
