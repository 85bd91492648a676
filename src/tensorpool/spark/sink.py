# SPDX-License-Identifier: Apache-2.0
"""Writing to format "tensorpool": rows of a DataFrame become frames of a stream.

One task writes a stream, in the order of its rows, under an exclusive producer lease that stays from batch to batch. A
row that is no frame ends the query with an error that names the row. Rows need `payload`, `dtype` and `shape`; `order`,
`timestamp_ns`, `meta_version`, `trace_id` and `parents`, the trace ids that a row was made from, are used where they
are there. With one stream all rows go to it; with several, `stream_id` says where.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import ArrayType, BinaryType, DataType, IntegralType, StringType, StructType

from tensorpool.errors import ConfigError
from tensorpool.lake.live_options import LiveOptions
from tensorpool.spark.sink_process import Order, RowRefused, SinkConnection, end

_COLUMNS: Final[dict[str, tuple[type[DataType], str]]] = {
    "payload": (BinaryType, "BINARY"),
    "dtype": (StringType, "STRING"),
    "shape": (ArrayType, "ARRAY<INT>"),
    "order": (StringType, "STRING"),
    "timestamp_ns": (IntegralType, "BIGINT"),
    "meta_version": (IntegralType, "BIGINT"),
    "trace_id": (IntegralType, "BIGINT"),
    "parents": (ArrayType, "ARRAY<BIGINT>"),
    "stream_id": (IntegralType, "BIGINT"),
}
_REQUIRED: Final = ("payload", "dtype", "shape")


class Published(WriterCommitMessage):
    """What a task did: rows per stream."""

    def __init__(self, rows: dict[int | str, int]) -> None:
        self.rows = rows


class FrameWriter(DataSourceArrowWriter):
    """Batch: `df.coalesce(1).write.format("tensorpool")`."""

    def __init__(self, options: LiveOptions, schema: StructType) -> None:
        check_columns(schema, options)
        self._options = options
        self._run = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _write(self._options, self._run, 0, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._end()

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._end()

    def _end(self) -> None:
        """Consumers get some time to read the last frames; then the lease is given back."""
        for stream in self._options.streams:
            end(_key(self._options, self._run, stream))


class FrameStreamWriter(DataSourceStreamArrowWriter):
    """Streaming: `df.coalesce(1).writeStream.format("tensorpool")`."""

    def __init__(self, options: LiveOptions, schema: StructType) -> None:
        check_columns(schema, options)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task = TaskContext.get()
        assert task is not None
        run = task.getLocalProperty("sql.streaming.queryId") or ""
        batch = int(task.getLocalProperty("streaming.sql.batchId") or 0)
        return _write(self._options, run, batch, iterator)


def check_columns(schema: StructType, options: LiveOptions) -> None:
    """Raises ConfigError for rows that cannot be frames."""
    required = [*_REQUIRED, *(["stream_id"] if len(options.streams) > 1 else [])]
    expected = ", ".join(f"{name} {_COLUMNS[name][1]}" for name in required)
    missing = [name for name in required if name not in schema.names]
    if missing:
        raise ConfigError("columns", schema.names, f"{expected}; missing: {', '.join(missing)}")
    for field in schema.fields:
        kind, text = _COLUMNS.get(field.name, (DataType, ""))
        given = field.dataType
        is_right = isinstance(given, kind)
        if field.name in ("shape", "parents") and isinstance(given, ArrayType):
            is_right = isinstance(given.elementType, IntegralType)
        if not is_right:
            raise ConfigError(f"column {field.name}", given.simpleString(), text)


def _write(options: LiveOptions, run: str, batch: int, batches: Iterator[pa.RecordBatch]) -> Published:
    task = TaskContext.get()
    partition = 0 if task is None else task.partitionId()
    with contextlib.ExitStack() as stack:
        publishers: dict[int | str, SinkConnection] = {}
        seen = 0
        for rows in batches:
            for stream, part in _by_stream(rows, options.streams, seen, partition):
                if stream not in publishers:
                    order = order_of(options, _key(options, run, stream), stream, os.getppid())
                    publishers[stream] = stack.enter_context(SinkConnection(order, batch=batch, partition=partition))
                publishers[stream].publish(part)
            seen += rows.num_rows
        return Published({stream: publisher.rows for stream, publisher in publishers.items()})


def _by_stream(
    batch: pa.RecordBatch, streams: tuple[int | str, ...], first: int, partition: int
) -> Iterator[tuple[int | str, pa.RecordBatch]]:
    """The rows of each stream, in their order."""
    if batch.num_rows == 0:
        return
    wanted = [name for name in batch.schema.names if name in _COLUMNS]
    if len(streams) == 1:
        yield streams[0], batch.select(wanted)
        return
    found: dict[Any, list[int]] = {}
    for index, stream in enumerate(batch.column("stream_id").to_pylist()):
        if stream not in streams:
            raise RowRefused(
                f"row {first + index} (partition {partition}): stream_id {stream}; "
                f"expected one of option streams: {', '.join(map(str, streams))}"
            )
        found.setdefault(stream, []).append(index)
    for stream, rows in found.items():
        yield stream, batch.select(wanted).take(pa.array(rows))


def order_of(options: LiveOptions, key: str, stream: int | str, parent: int) -> Order:
    """What starts the publisher of a stream."""
    where = options.aeron_dir, options.config, options.overrides
    return Order(key, stream, options.create, options.wait_for_consumers, *where, parent)


def _key(options: LiveOptions, run: str, stream: int | str) -> str:
    """Of the publisher that all tasks of a query share for a stream."""
    identity = msgspec.msgpack.encode(
        [run, stream, options.aeron_dir, options.config, sorted(options.overrides.items())]
    )
    return hashlib.sha256(identity).hexdigest()[:32]
