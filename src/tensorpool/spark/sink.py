# SPDX-License-Identifier: Apache-2.0
"""Writing to format "tensorpool": rows of a DataFrame become frames of a stream.

One task publishes a stream, in the order of its rows, under an exclusive producer lease. A row that is no frame ends the
query with an error that names the row. Rows need `payload`, `dtype` and `shape`; `order`, `timestamp_ns`, `meta_version`
and `trace_id` are used where they are there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from tensorpool.client import Client, Producer, connect
from tensorpool.errors import ConfigError, TensorPoolError
from tensorpool.shm.arrays import numpy_dtype
from tensorpool.spark.options import LiveOptions
from tensorpool.wire.control import Dtype

REQUIRED: Final = ("payload", "dtype", "shape")
OPTIONAL: Final = ("order", "timestamp_ns", "meta_version", "trace_id")
DRAIN_S: Final = 2.0


class RowRefused(TensorPoolError):
    """A row that is no frame."""


class _Publishing:
    """A task's producer; one per task, closed with it."""

    def __init__(self, options: LiveOptions) -> None:
        if len(options.streams) != 1:
            raise ConfigError("option streams", options.streams, "one stream to write to")
        self._client: Client = connect(options.aeron_dir, config=options.config, overrides=options.overrides)
        try:
            self.producer: Producer = self._client.producer(options.streams[0], create=options.create, timeout=30.0)
        except BaseException:
            self._client.close()
            raise
        self.published = 0
        self.dropped = 0

    def publish(self, row: dict[str, Any], number: int) -> None:
        array = frame_of(row, number)
        seq = self.producer.publish(
            array,
            timestamp_ns=row.get("timestamp_ns"),
            meta_version=row.get("meta_version"),
            trace_id=row.get("trace_id") or 0,
        )
        if seq is None:
            self.dropped += 1
            if array.nbytes > self.producer.max_frame_bytes > 0:
                raise RowRefused(
                    f"row {number}: {array.nbytes} bytes exceed the largest pool of {self.producer.max_frame_bytes}; "
                    "give the stream's profile a larger pool"
                )
        else:
            self.published += 1

    def close(self) -> None:
        self.producer.drain(DRAIN_S)
        self._client.close()


def frame_of(row: dict[str, Any], number: int) -> np.ndarray[Any, Any]:
    """The array that a row stands for. Raises RowRefused with the row's number."""
    payload, name, shape = row["payload"], row["dtype"], row["shape"]
    if payload is None or name is None or shape is None:
        raise RowRefused(f"row {number}: payload, dtype and shape must not be null")
    try:
        dtype = Dtype[name.upper()]
        kind = numpy_dtype(dtype)
    except KeyError:
        names = ", ".join(member.name for member in Dtype if member)
        raise RowRefused(f"row {number}: dtype {name!r}; expected one of {names}") from None
    order = row.get("order") or "C"
    if order not in ("C", "F"):
        raise RowRefused(f"row {number}: order {order!r}; expected C or F")
    count = math.prod(shape)
    expected = -(-count // 8) if dtype is Dtype.BIT else count * kind.itemsize
    if any(extent < 0 for extent in shape) or len(payload) != expected:
        raise RowRefused(f"row {number}: {len(payload)} bytes; {dtype.name} {list(shape)} has {expected}")
    flat = np.frombuffer(payload, kind)
    return flat if dtype is Dtype.BIT else flat.reshape(tuple(shape), order=order)


def _publish_all(options: LiveOptions, batches: Iterator[Any]) -> Published:
    publishing: _Publishing | None = None
    number = 0
    try:
        for batch in batches:
            for row in batch.to_pylist():
                if publishing is None:
                    publishing = _Publishing(options)
                publishing.publish(row, number)
                number += 1
        return Published(publishing.published if publishing else 0, publishing.dropped if publishing else 0)
    finally:
        if publishing is not None:
            publishing.close()


def _check(schema: StructType, options: LiveOptions) -> None:
    names = set(schema.names)
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise ConfigError("columns", sorted(names), f"{', '.join(REQUIRED)} and perhaps {', '.join(OPTIONAL)}")
    if len(options.streams) != 1:
        raise ConfigError("option streams", options.streams, "one stream to write to")


class Published(WriterCommitMessage):
    """What a task did."""

    def __init__(self, published: int, dropped: int) -> None:
        self.published = published
        self.dropped = dropped


class FrameWriter(DataSourceArrowWriter):
    """Batch: `df.coalesce(1).write.format("tensorpool")`."""

    def __init__(self, options: LiveOptions, schema: StructType) -> None:
        _check(schema, options)
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return _publish_all(self._options, iterator)


class FrameStreamWriter(DataSourceStreamArrowWriter):
    """Streaming: `df.coalesce(1).writeStream.format("tensorpool")`."""

    def __init__(self, options: LiveOptions, schema: StructType) -> None:
        _check(schema, options)
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return _publish_all(self._options, iterator)
