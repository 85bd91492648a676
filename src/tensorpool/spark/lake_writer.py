# SPDX-License-Identifier: Apache-2.0
"""Writing to format "tensorpool.lake": the recorder's ranges, or rows that are frames.

Ranges come from the live source's table `ranges`: the task reads the frames from shared memory itself and no payload
passes through the JVM. Rows with a payload are written as they come. Either way the files are staged first, and the
batch becomes part of the lake with one entry of its log, once.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from tensorpool.errors import ConfigError
from tensorpool.lake import commits
from tensorpool.lake.commits import Staged
from tensorpool.lake.lake import Lake
from tensorpool.lake.manifest import Kind
from tensorpool.spark.lake_options import LakeOptions

if TYPE_CHECKING:
    import pyarrow as pa

RANGE_COLUMNS: Final = ("stream_id", "epoch", "lo", "hi", "lost", "part")
ROW_COLUMNS: Final = ("stream_id", "epoch", "seq", "dtype", "shape", "payload")

_QUERY: Final = "sql.streaming.queryId"
_BATCH: Final = "streaming.sql.batchId"


class StagedMessage(WriterCommitMessage):
    """What a task staged. Pickled: plain data only."""

    def __init__(self, query: str, batch: int, staged: bytes) -> None:
        self.query = query
        self.batch = batch
        self.staged = staged


_lakes: dict[str, Lake] = {}


def known_lake(path: str) -> Lake:
    """A lake that this process keeps open: its log is read on, not anew. One that is gone is made again."""
    lake = _lakes.get(path)
    if lake is None or not lake.log.exists():
        lake = _lakes[path] = Lake.create(path)
    return lake


class LakeStreamWriter(DataSourceStreamArrowWriter):
    """Streaming: `ranges.writeStream.format("tensorpool.lake")`, or frames."""

    def __init__(self, options: LakeOptions, schema: StructType) -> None:
        self._options = options
        self._is_ranges = is_ranges(schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        query, batch = _whose()
        staged = _stage(query, batch, iterator, self._options, self._is_ranges)
        return StagedMessage(query, batch, msgspec.msgpack.encode(staged))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        written = [message for message in messages if isinstance(message, StagedMessage)]
        if not written:
            return  # a batch without tasks has nothing to say
        kind: Kind = "record" if self._is_ranges else "write"
        lake = known_lake(self._options.path)
        commits.commit(
            lake, written[0].query, batchId, _decoded(written), kind=kind, is_durable=self._options.is_durable
        )

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """What is staged stays: the batch will come again."""


class LakeWriter(DataSourceArrowWriter):
    """Batch: `frames.write.format("tensorpool.lake").mode("append")`."""

    def __init__(self, options: LakeOptions, schema: StructType) -> None:
        self._options = options
        self._is_ranges = is_ranges(schema)
        self._job = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        staged = _stage(self._job, 0, iterator, self._options, self._is_ranges)
        return StagedMessage(self._job, 0, msgspec.msgpack.encode(staged))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        written = [message for message in messages if isinstance(message, StagedMessage)]
        lake = known_lake(self._options.path)
        staged = _decoded(written)
        if any(part.files or part.gaps for part in staged):
            kind: Kind = "record" if self._is_ranges else "write"
            commits.commit(lake, self._job, 0, staged, kind=kind, is_durable=self._options.is_durable)
        commits.discard(lake, self._job)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        commits.discard(known_lake(self._options.path), self._job)


def is_ranges(schema: StructType) -> bool:
    """Ranges or rows. Raises ConfigError for what is neither."""
    names = set(schema.names)
    if names.issuperset(RANGE_COLUMNS):
        return True
    if names.issuperset(ROW_COLUMNS):
        return False
    missing = [name for name in ROW_COLUMNS if name not in names]
    raise ConfigError(
        "columns",
        sorted(names),
        f"those of frames ({', '.join(missing)} missing), or those of ranges: {', '.join(RANGE_COLUMNS)}",
    )


def _whose() -> tuple[str, int]:
    context = TaskContext.get()
    assert context is not None
    query, batch = context.getLocalProperty(_QUERY), context.getLocalProperty(_BATCH)
    assert query is not None
    assert batch is not None
    return query, int(batch)


def _decoded(messages: Sequence[StagedMessage]) -> list[Staged]:
    return [msgspec.msgpack.decode(message.staged, type=Staged) for message in messages]


def _stage(query: str, batch: int, batches: Iterator[pa.RecordBatch], options: LakeOptions, has_ranges: bool) -> Staged:
    # Only tasks need Arrow and the rings; planners and committers start quicker without.
    from tensorpool.lake.row_staging import stage_ranges, stage_rows
    from tensorpool.lake.staging import Staging

    folder = Staging(known_lake(options.path).path, query, batch)
    return (stage_ranges if has_ranges else stage_rows)(folder, batches, options.policy)
