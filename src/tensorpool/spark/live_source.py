# SPDX-License-Identifier: Apache-2.0
"""Reading format "tensorpool": live streams as DataFrames, streaming and batch.

The planner, one process beside the Spark driver, holds a lease per stream and asks the rings what there is; the tasks
read their ranges out of shared memory themselves. What was overwritten before a task came is a counted gap, or the end
of the query with `failOnDataLoss`. Table "ranges" has a row per range instead of one per frame, for those who read the
frames themselves, such as the recorder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from tensorpool.errors import ConfigError
from tensorpool.lake import offsets
from tensorpool.lake.live_options import LiveOptions
from tensorpool.lake.losses import DataLoss, LossLog, refuse
from tensorpool.lake.offsets import Limits, Loss, Offsets, RingExtent, SeqRange
from tensorpool.lake.query_planner import Planner
from tensorpool.lake.ring_reader import FrameReader, RingPart
from tensorpool.lake.row_staging import gap_of
from tensorpool.lake.selection import Selection
from tensorpool.lake.trigger_delay import TriggerDelay
from tensorpool.logs import get_logger
from tensorpool.spark import metadata_column
from tensorpool.spark.metadata_column import with_metadata
from tensorpool.spark.planner_process import exit_in_order, kept_planner
from tensorpool.spark.pushdown import Pushdown

EVERYTHING: Final = Selection()
DEFAULT_PARTITIONS: Final = os.cpu_count() or 2
RANGE_SCHEMA: Final = pa.schema(
    [
        ("stream_id", pa.int64()),
        ("epoch", pa.int64()),
        ("lo", pa.int64()),
        ("hi", pa.int64()),  # null: not known
        ("lost", pa.string()),  # why nothing of it can be read; null for a range to read
        ("part", pa.binary()),  # a RingPart; null where the ring is not known any more
    ]
)


_losses_of_tasks: Final = LossLog(get_logger("spark"))  # of the worker that we are in


class FramesPartition(InputPartition):
    """A task's share of a batch, as a RingPart. Pickled: plain data only."""

    def __init__(
        self, part: bytes, inline: bool, fail_on_data_loss: bool, metadata: dict[int, str] | None = None
    ) -> None:
        super().__init__(part)
        self.part = part
        self.inline = inline
        self.fail_on_data_loss = fail_on_data_loss
        self.metadata = metadata  # by version; None: not asked for


class RangesPartition(InputPartition):
    """Rows of the table "ranges"."""

    def __init__(self, rows: list[tuple[Any, ...]]) -> None:
        super().__init__(rows)
        self.rows = rows


def plan(
    planner: Planner,
    start: Offsets,
    end: Offsets,
    options: LiveOptions,
    *,
    is_open: bool = False,
    wanted: Selection = EVERYTHING,
) -> list[InputPartition]:
    """The tasks of a batch. Raises DataLoss where something is lost already that must not be.

    Nothing is read but what is `wanted`. With `is_open` the last range of every stream ends where its ring does when
    the task comes to it.
    """
    ranges, losses = offsets.between(start, end)
    planner.count(losses)
    refuse(losses, is_fatal=options.fail_on_data_loss)
    tasks = options.min_partitions or DEFAULT_PARTITIONS
    pieces = offsets.split(planner.narrowed(ranges, wanted), tasks)
    if options.table == "ranges":  # a task costs more than a range: there are as many as cores, whatever the streams
        return _ranges(planner, offsets.grouped(pieces, tasks), losses)
    found: list[InputPartition] = []
    gone: list[Loss] = []
    lost = _lost(losses)
    last = {piece.stream_id: piece for piece in sorted(pieces, key=msgspec.structs.astuple)}
    for piece in pieces:
        part = planner.part(piece, *lost.get(piece.stream_id, (0, None)))
        if part is None:
            gone.append(Loss(piece.stream_id, piece.epoch, piece.lo, piece.hi, "their epoch is gone"))
            lost = _lost(gone[-1:], lost)
        else:
            part = msgspec.structs.replace(part, is_open=is_open and last[piece.stream_id] == piece)
            inline, is_fatal = options.payload == "inline", options.fail_on_data_loss
            metadata = _metadata(planner, piece) if options.include_metadata else None
            found.append(FramesPartition(_encode(part), inline, is_fatal, metadata))
            lost.pop(piece.stream_id, None)
    planner.count(gone)
    refuse(gone, is_fatal=options.fail_on_data_loss)
    return found


def _metadata(planner: Planner, piece: SeqRange) -> dict[int, str]:
    return {version: metadata_column.text_of(attributes) for version, attributes in planner.metadata(piece).items()}


def _ranges(planner: Planner, groups: Sequence[Sequence[SeqRange]], losses: Sequence[Loss]) -> list[InputPartition]:
    """A task for every group of ranges to read; what is lost already travels with the first."""
    rows: list[list[tuple[Any, ...]]] = [[_range_row(planner, piece, losses) for piece in group] for group in groups]
    gaps = [(loss.stream_id, loss.epoch, loss.lo, loss.hi, loss.reason, None) for loss in losses]
    if gaps:
        rows = [gaps + rows[0], *rows[1:]] if rows else [gaps]
    return [RangesPartition(part) for part in rows]


def _range_row(planner: Planner, piece: SeqRange, losses: Sequence[Loss]) -> tuple[Any, ...]:
    before = [
        loss for loss in losses if (loss.stream_id, loss.epoch, loss.hi) == (piece.stream_id, piece.epoch, piece.lo)
    ]
    part = planner.part(piece, *_lost(before).get(piece.stream_id, (0, None)))
    return (*msgspec.structs.astuple(piece), None, None if part is None else _encode(part))


def _lost(losses: Sequence[Loss], before: dict[int, tuple[int, str]] | None = None) -> dict[int, tuple[int, str]]:
    """By stream: how many frames the next one to read has lost before it, and why the last of them were lost."""
    found = dict(before or {})
    for loss in losses:
        count, _ = found.get(loss.stream_id, (0, ""))
        found[loss.stream_id] = count + (loss.frames or 0), gap_of(loss).reason
    return found


def _encode(part: RingPart) -> bytes:
    return msgspec.msgpack.encode(part)


def read_partition(partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """In a worker: the rows of one task."""
    if isinstance(partition, RangesPartition):
        columns = zip(*partition.rows, strict=True)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, RANGE_SCHEMA, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=RANGE_SCHEMA)
    elif isinstance(partition, FramesPartition):
        yield from _read_frames(partition)


def _read_frames(partition: FramesPartition) -> Iterator[pa.RecordBatch]:
    part = msgspec.msgpack.decode(partition.part, type=RingPart)
    reader = FrameReader(part, inline=partition.inline)
    known = partition.metadata
    for batch in reader.batches():
        yield batch if known is None else with_metadata(batch, lambda version, _: known.get(version))
    losses = [Loss(gap.stream_id, gap.epoch, gap.lo, gap.hi, gap.reason) for gap in reader.gaps]
    _losses_of_tasks.note(losses, time.monotonic())
    if losses and partition.fail_on_data_loss:
        more = f" and {len(losses) - 1} more ranges" if len(losses) > 1 else ""
        advice = "give the stream more slots, or set failOnDataLoss to false to count and go on"
        raise DataLoss(f"{losses[0]}{more}; {advice}")


class LiveStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streaming: the planner's side runs beside the Spark driver, `read` in workers."""

    def __init__(self, options: LiveOptions) -> None:
        self._options = options
        self._delay = TriggerDelay(options.min_frames_per_trigger, options.max_trigger_delay_s)
        self._planner: Planner | None = None
        self._initial: Offsets | None = None
        self._target: Offsets | None = None

    def initialOffset(self) -> dict[str, Any]:
        # Asked twice: "latest" must not move in between.
        if self._initial is None:
            self._initial = self._plan().resolve("startingOffsets", self._options.starting_offsets or "latest")
        return self._initial.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()  # ours are frames and bytes at once, which Spark has no limit for

    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        begin = Offsets.from_json(start if start is not None else self.initialOffset())
        planner = self._plan()
        planner.join()
        held = planner.held()
        planner.check(begin, held)
        if self._target is not None:
            held = offsets.cut(held, self._target)
        elif self._options.min_frames_per_trigger is not None:
            waiting = offsets.span(begin, self._advance(begin, held, Limits()))
            if not self._delay.is_due(waiting, time.monotonic()):
                return begin.to_json()
        return self._advance(begin, held, self._limits(limit)).to_json()

    def _advance(self, begin: Offsets, held: Sequence[RingExtent], limits: Limits) -> Offsets:
        return offsets.advance(begin, held, limits, joins_at_oldest=self._options.stream_pattern is not None)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return offsets.latest(self._plan().held()).to_json()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = offsets.latest(self._plan().held())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return plan(self._plan(), Offsets.from_json(start), Offsets.from_json(end), self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to give back: the ring forgets by itself."""

    def stop(self) -> None:
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    def _limits(self, limit: ReadLimit | None) -> Limits:
        frames, size = self._options.max_frames_per_trigger, self._options.max_bytes_per_trigger
        if isinstance(limit, ReadMaxRows):
            frames = limit.max_rows if frames is None else min(frames, limit.max_rows)
        if isinstance(limit, ReadMaxBytes):
            size = limit.max_bytes if size is None else min(size, limit.max_bytes)
        return Limits(frames, size)

    def _plan(self) -> Planner:
        if self._planner is None:
            self._planner = Planner(self._options)
            exit_in_order(self._planner.close)
        return self._planner


class LiveReader(DataSourceReader):
    """Batch: a snapshot of what the rings hold."""

    def __init__(self, options: LiveOptions) -> None:
        self._options = options
        self._pushdown = Pushdown(EVERYTHING, hints=["time"])
        if options.push_filters and options.table == "frames":
            self.pushFilters = self._pushdown  # type: ignore[method-assign]

    def partitions(self) -> Sequence[InputPartition]:
        """One look at the rings decides. A ring that went round before its task came is read on to its new end."""
        options = self._options
        planner = kept_planner(options)
        planner.join()
        held = planner.held()
        if not held:
            raise ConfigError("option subscribePattern", options.stream_pattern, "the name of some stream")
        # A batch that began with the latest frame would be empty: without an option it begins with the earliest.
        start = planner.resolve("startingOffsets", options.starting_offsets or "earliest", held)
        end = planner.resolve("endingOffsets", options.ending_offsets, held)
        stop = offsets.advance(start, offsets.cut(held, end), Limits())
        wanted = self._pushdown.selection
        is_open = options.ending_offsets == "latest" and wanted.is_open_ended
        return plan(planner, start, stop, options, is_open=is_open, wanted=wanted)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition)
