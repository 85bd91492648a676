# SPDX-License-Identifier: Apache-2.0
"""Format "tensorpool": live streams as DataFrames, streaming and batch.

The planner, one process beside the Spark driver, holds a lease per stream and asks the rings what there is; the tasks
read their ranges out of shared memory themselves. What was overwritten before a task came is a counted gap, or the end
of the query with `failOnDataLoss`.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from tensorpool._core import SlotFrame
from tensorpool.client import Client, connect
from tensorpool.client.watch import Watch, WatchedEpoch
from tensorpool.errors import ConfigError, TensorPoolError
from tensorpool.logs import get_logger
from tensorpool.spark import offsets
from tensorpool.spark.offsets import Held, Limits, Loss, Offsets, Position, SeqRange
from tensorpool.spark.options import Ago, LiveOptions, Where, live_options
from tensorpool.spark.rings import FRAME_DDL, FrameReader, RingPart
from tensorpool.spark.tables import TABLE_DDL, TableReader, TableStreamReader

DEFAULT_PARTITIONS: Final = os.cpu_count() or 2
ATTACH_TIMEOUT_S: Final = 30.0


class DataLoss(TensorPoolError):
    """Frames that the query was to read are gone: `failOnDataLoss` is set."""


class RangePartition(InputPartition):
    """A task's share of a batch. Pickled: plain data only."""

    def __init__(self, part: bytes, inline: bool, fail_on_data_loss: bool) -> None:
        super().__init__(part)
        self.part = part
        self.inline = inline
        self.fail_on_data_loss = fail_on_data_loss


class Planner:
    """A query's eyes: leases on its streams, and what their rings hold."""

    def __init__(self, options: LiveOptions) -> None:
        self._options = options
        self._log = get_logger("spark", streams=list(options.streams))
        self._client: Client = connect(options.aeron_dir, config=options.config, overrides=options.overrides)
        atexit.register(self._client.close)
        self._watches: list[Watch] = []
        try:
            for stream in options.streams:
                self._watches.append(self._client.watch(stream, timeout=ATTACH_TIMEOUT_S))
        except BaseException:
            self._client.close()
            raise

    def held(self) -> list[Held]:
        """What every ring has right now."""
        found: list[Held] = []
        for watch in self._watches:
            epochs = watch.epochs
            for index, epoch in enumerate(epochs):
                is_last = index == len(epochs) - 1
                found.append(_held(watch.stream_id, epoch, not is_last or not watch.is_current))
        return found

    def resolve(self, where: Where) -> Offsets:
        """Turn "earliest", an age, and the like into positions."""
        held = self.held()
        if where == "earliest":
            return offsets.earliest(held)
        if isinstance(where, Offsets):
            return self._checked(where, held)
        if isinstance(where, Ago):
            oldest_ns = time.monotonic_ns() - where.age_ns
            return Offsets({watch.stream_id: self._since(watch, oldest_ns) for watch in self._watches})
        return offsets.latest(held)

    def parts(self, ranges: Sequence[SeqRange], losses: Sequence[Loss]) -> list[RingPart]:
        """The ranges with what a task needs to read them."""
        epochs = {(watch.stream_id, epoch.epoch): epoch for watch in self._watches for epoch in watch.epochs}
        bases = tuple(self._client.config.shm.allowed_base_dirs)
        lost: dict[int, int] = {}
        for loss in losses:
            self._log.warning("data_loss", loss=str(loss))
            lost[loss.stream_id] = lost.get(loss.stream_id, 0) + (loss.frames or 0)
        found = []
        for part in ranges:
            epoch = epochs[(part.stream_id, part.epoch)]
            found.append(RingPart(part, epoch.regions, bases, lost.pop(part.stream_id, 0)))
        return found

    def close(self) -> None:
        self._client.close()

    def _checked(self, given: Offsets, held: Sequence[Held]) -> Offsets:
        known = {part.stream_id for part in held}
        unknown = set(given.positions) - known
        if unknown:
            raise ConfigError("option startingOffsets", sorted(unknown), f"streams of this query: {sorted(known)}")
        return Offsets(offsets.latest(held).positions | given.positions)

    def _since(self, watch: Watch, oldest_ns: int) -> Position:
        """The first frame captured at or after a moment; the rings are short, so a bisection is not worth it."""
        for epoch in watch.epochs:
            for seq in range(epoch.first, epoch.end):
                slot = epoch.mapped.reader.read(seq)
                if isinstance(slot, SlotFrame) and slot.timestamp_ns >= oldest_ns:
                    return Position(epoch.epoch, seq)
        newest = watch.epochs[-1]
        return Position(newest.epoch, newest.end)


def _held(stream_id: int, epoch: WatchedEpoch, is_over: bool) -> Held:
    end = epoch.end
    first = max(0, end - epoch.mapped.reader.nslots)
    return Held(stream_id, epoch.epoch, first, end, is_over, epoch.frame_bytes())


def _partitions(parts: Sequence[RingPart], options: LiveOptions) -> list[RangePartition]:
    encode = msgspec.msgpack.encode
    inline = options.payload == "inline"
    return [RangePartition(encode(part), inline, options.fail_on_data_loss) for part in parts]


def read_partition(partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """In a worker: the frames of one partition."""
    assert isinstance(partition, RangePartition)
    part = msgspec.msgpack.decode(partition.part, type=RingPart)
    reader = FrameReader(part, inline=partition.inline)
    yield from reader.batches()
    if reader.gaps:
        gap = reader.gaps[0]
        text = f"stream {gap.stream_id}, epoch {gap.epoch}: frames {gap.lo} to {gap.hi - 1} are lost ({gap.reason})"
        get_logger("spark").warning("data_loss", gaps=len(reader.gaps), first=text)
        if partition.fail_on_data_loss:
            raise DataLoss(f"{text}; give the stream more slots, or set failOnDataLoss to false to count and go on")


def _refuse(losses: Sequence[Loss], options: LiveOptions) -> None:
    if losses and options.fail_on_data_loss:
        more = f" and {len(losses) - 1} more ranges" if len(losses) > 1 else ""
        raise DataLoss(f"{losses[0]}{more}; set failOnDataLoss to false to count and go on")


class LiveStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streaming: the planner's side runs beside the Spark driver, `read` in workers."""

    def __init__(self, options: LiveOptions) -> None:
        self._options = options
        self._planner: Planner | None = None
        self._initial: Offsets | None = None
        self._target: Offsets | None = None

    def initialOffset(self) -> dict[str, Any]:
        # Asked twice: "latest" must not move in between.
        if self._initial is None:
            self._initial = self._plan().resolve(self._options.starting_offsets)
        return self._initial.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()  # ours are frames and bytes at once, which Spark has no limit for

    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        options = self._options
        begin = Offsets.from_json(start) if start else Offsets.from_json(self.initialOffset())
        frames = options.max_frames_per_trigger
        if isinstance(limit, ReadMaxRows):
            frames = limit.max_rows if frames is None else min(frames, limit.max_rows)
        end = offsets.advance(begin, self._plan().held(), Limits(frames, options.max_bytes_per_trigger))
        if self._target is not None:
            end = Offsets({key: min(at, self._target.positions.get(key, at)) for key, at in end.positions.items()})
            end = Offsets({key: max(at, begin.positions.get(key, at)) for key, at in end.positions.items()})
        return end.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return offsets.latest(self._plan().held()).to_json()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = offsets.latest(self._plan().held())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        planner = self._plan()
        ranges, losses = offsets.between(Offsets.from_json(start), Offsets.from_json(end), planner.held())
        _refuse(losses, self._options)
        pieces = offsets.split(ranges, self._options.min_partitions or DEFAULT_PARTITIONS)
        return _partitions(planner.parts(pieces, losses), self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to give back: the ring forgets by itself."""

    def stop(self) -> None:
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    def _plan(self) -> Planner:
        if self._planner is None:
            self._planner = Planner(self._options)
        return self._planner


class LiveReader(DataSourceReader):
    """Batch: a snapshot of what the rings hold."""

    def __init__(self, options: LiveOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        planner = _kept_planner(options)
        where = "earliest" if options.starting_offsets == "latest" else options.starting_offsets
        start, end = planner.resolve(where), planner.resolve(options.ending_offsets)
        parts = []
        losses: list[Loss] = []
        held = planner.held()
        for part in held:  # every epoch between the two positions, where a streaming query takes one at a time
            begin, stop = start.positions[part.stream_id], end.positions[part.stream_id]
            lo = max(part.first, begin.seq if part.epoch == begin.epoch else 0)
            hi = min(part.end, stop.seq if part.epoch == stop.epoch else part.end)
            if begin.epoch <= part.epoch <= stop.epoch and hi > lo:
                parts.append(SeqRange(part.stream_id, part.epoch, lo, hi))
        if isinstance(options.starting_offsets, Offsets):
            losses = offsets.between(start, end, held)[1]
            _refuse(losses, options)
        pieces = offsets.split(parts, options.min_partitions or DEFAULT_PARTITIONS)
        return _partitions(planner.parts(pieces, losses), options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition)


_planners: dict[bytes, tuple[Planner, int]] = {}
KEEP_PLANNER_NS: Final = 30_000_000_000


def _kept_planner(options: LiveOptions) -> Planner:
    """For batch reads, whose reader lives for one query: the lease must outlive its tasks."""
    now_ns = time.monotonic_ns()
    key = msgspec.msgpack.encode([options.streams, options.aeron_dir, options.config, options.overrides])
    for other, (planner, used_ns) in list(_planners.items()):
        if other != key and now_ns - used_ns > KEEP_PLANNER_NS:
            planner.close()
            del _planners[other]
    planner = _planners[key][0] if key in _planners else Planner(options)
    _planners[key] = planner, now_ns
    return planner


class TensorpoolDataSource(DataSource):
    """`spark.readStream.format("tensorpool").option("streams", "camera/front").load()`"""

    @classmethod
    def name(cls) -> str:
        return "tensorpool"

    def schema(self) -> str:
        options = live_options(self.options)
        return FRAME_DDL if options.table == "frames" else TABLE_DDL[options.table]

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = live_options(self.options)
        return LiveStreamReader(options) if options.table == "frames" else TableStreamReader(options)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = live_options(self.options)
        return LiveReader(options) if options.table == "frames" else TableReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from tensorpool.spark.sink import FrameWriter

        return FrameWriter(live_options(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from tensorpool.spark.sink import FrameStreamWriter

        return FrameStreamWriter(live_options(self.options), schema)
