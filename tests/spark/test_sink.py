# SPDX-License-Identifier: Apache-2.0
"""The sink on real Spark: rows become frames, in order, and come back through the source as they were."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.errors import ConfigError
from tensorpool.lake.control_tables import Listener
from tensorpool.lake.live_options import sink_options, source_options
from tensorpool.shm.arrays import numpy_dtype
from tensorpool.spark.columns import FRAME_DDL
from tensorpool.spark.sink import check_columns
from tensorpool.wire.control import Dtype
from tensorpool.wire.driver import Role
from tests.spark.conftest import read
from tests.support.deployment import options_of, pattern
from tests.support.frame_rows import write_in_order
from tests.support.processes import wait_until

type Stream = Callable[..., int]

SHAPES = [(5,), (2, 3), (3, 1, 2), (0,), (4, 0, 2), (1, 1, 1, 1, 1, 1, 1, 9)]


def producers(pool: tp.Local, stream_id: int) -> int:
    held = list(pool.conductor.lifecycle.leases)
    return sum((lease.stream_id, lease.role) == (stream_id, Role.PRODUCER) for lease in held)


def written(frames: DataFrame, pool: tp.Local, *streams: int) -> Any:
    """A batch writer to streams."""
    writer = frames.write.format("tensorpool").mode("append").option("streams", ",".join(map(str, streams)))
    return writer.options(**options_of(pool))


def every_kind() -> list[dict[str, Any]]:
    """A row of every dtype, order and shape, with random bytes."""
    random = np.random.default_rng(11)
    rows = []
    for dtype, order, shape in itertools.product(filter(None, Dtype), "CF", SHAPES):
        count = int(np.prod(shape))
        nbytes = -(-count // 8) if dtype is Dtype.BIT else count * numpy_dtype(dtype).itemsize
        data = random.integers(0, 2 if dtype is Dtype.BOOLEAN else 256, nbytes, np.uint8)
        rows.append({"dtype": dtype.name, "order": order, "shape": list(shape), "payload": data.tobytes()})
    return rows


def test_every_dtype_order_and_shape_comes_back_as_it_was(
    spark: SparkSession, pool: tp.Local, client: Client, query: Callable[..., StreamingQuery], tmp_path: Path
) -> None:
    """Through a streaming query of two batches: one epoch, one lease, in order, with stamps and versions."""
    rows = [row | {"timestamp_ns": 1000 + n, "meta_version": n} for n, row in enumerate(every_kind())]
    stream_id = 11_011
    half = len(rows) // 2
    types = {"shape": pa.list_(pa.int32()), "payload": pa.binary()}
    tables = [pa.Table.from_pylist(part) for part in (rows[:half], rows[half:])]
    schemas = [pa.schema({one.name: types.get(one.name, one.type) for one in table.schema}) for table in tables]
    (tmp_path / "in").mkdir()
    write_in_order(tmp_path / "in", map(pa.Table.cast, tables, schemas))
    schema = "dtype STRING, `order` STRING, shape ARRAY<INT>, payload BINARY, timestamp_ns BIGINT, meta_version BIGINT"
    reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
    writer = reader.parquet(str(tmp_path / "in")).coalesce(1).writeStream.format("tensorpool")
    writer = writer.option("streams", stream_id).options(**options_of(pool)).trigger(availableNow=True)
    started = query(writer)
    assert started.awaitTermination(180)
    assert len([batch for batch in started.recentProgress if batch.numInputRows]) == 2
    found = read(spark, pool, stream_id).orderBy("seq").collect()
    names = ("dtype", "order", "shape", "payload", "timestamp_ns", "meta_version")
    assert [{name: row[name] for name in names} for row in found] == [
        {name: row[name] for name in names} for row in rows
    ]
    assert len({row.epoch for row in found}) == 1
    assert producers(pool, stream_id) == 1


def test_a_batch_is_published_in_order_and_gives_its_lease_back(
    spark: SparkSession, pool: tp.Local, client: Client, stream: Stream
) -> None:
    """Two streams at once, distinguished by stream_id."""
    streams = [stream("tiny"), stream("tiny")]
    rows = [(streams[n % 2], bytearray(pattern(n).tobytes()), "UINT8", [8, 8], n + 1) for n in range(12)]
    columns = "stream_id BIGINT, payload BINARY, dtype STRING, shape ARRAY<INT>, trace_id BIGINT"
    with ThreadPoolExecutor(2) as threads:
        received = [threads.submit(receive, client, one, 6) for one in streams]
        written(spark.createDataFrame(rows, columns).coalesce(1), pool, *streams).option("waitForConsumers", 1).save()
        for index, frames in enumerate(received):
            assert frames.result() == [(n, 2 * n + index + 1, (8, 8)) for n in range(6)]
    assert [producers(pool, one) for one in streams] == [0, 0]


def test_rows_are_linked_to_their_parents(spark: SparkSession, pool: tp.Local, client: Client, stream: Stream) -> None:
    """With a trace id of their own, or one that is made; rows without parents have none."""
    stream_id = stream("tiny")
    payload = bytearray(pattern(1).tobytes())
    traced = ((None, [5, 7]), (9, [8]), (None, None))
    rows = [(payload, "UINT8", [8, 8], *one) for one in traced]
    columns = "payload BINARY, dtype STRING, shape ARRAY<INT>, trace_id BIGINT, parents ARRAY<BIGINT>"
    links = Listener(source_options({"table": "traces", "streams": str(stream_id), **options_of(pool)}))
    with ThreadPoolExecutor(1) as threads:
        received = threads.submit(receive, client, stream_id, 3)
        written(spark.createDataFrame(rows, columns).coalesce(1), pool, stream_id).option("waitForConsumers", 1).save()
        ids = [trace_id for _, trace_id, _ in received.result()]
    assert ids[0] > 0
    assert ids[1:] == [9, 0]
    wait_until(lambda: links.end >= 3, "the links are sent")
    assert {row[3:] for row in links.rows(0, links.end)} == {(0, ids[0], 5), (0, ids[0], 7), (1, 9, 8)}
    links.close()


def receive(client: Client, stream_id: int, count: int) -> list[tuple[int, int, tuple[int, ...]]]:
    with client.consumer(stream_id) as consumer:
        frames = itertools.takewhile(lambda frame: frame is not None, (consumer.poll(30) for _ in range(count)))
        return [(frame.seq, frame.trace_id, frame.shape) for frame in frames if frame is not None]


def test_bad_rows_and_bad_plans_are_refused_by_name(spark: SparkSession, pool: tp.Local, stream: Stream) -> None:
    stream_id = stream("tiny")
    columns = "stream_id BIGINT, payload BINARY, dtype STRING, shape ARRAY<INT>"
    good = (stream_id, bytearray(6), "UINT8", [2, 3])

    def write(*rows: tuple[Any, ...], partitions: int = 1, streams: tuple[int, ...] = (stream_id,)) -> None:
        written(spark.createDataFrame(list(rows), columns).repartition(partitions), pool, *streams).save()

    with pytest.raises(Exception, match=r"row 0 \(stream .*, partition 0\): payload of 6 bytes; UINT8 \[4\] has 4"):
        write((stream_id, bytearray(6), "UINT8", [4]))
    with pytest.raises(Exception, match="one task writes a stream, in order"):
        write(*[good] * 20, partitions=2)
    with pytest.raises(Exception, match=f"stream_id 99; expected one of option streams: {stream_id}, 20999"):
        write((99, bytearray(6), "UINT8", [2, 3]), streams=(stream_id, 20_999))
    assert producers(pool, stream_id) == 0


def columns_of(text: str) -> StructType:
    found = StructType.fromDDL(text)
    assert isinstance(found, StructType)
    return found


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ("payload BINARY, dtype STRING", "missing: shape"),
        ("payload STRING, dtype STRING, shape ARRAY<INT>", "column payload = 'string' is not usable; accepted: BINARY"),
        ("payload BINARY, dtype STRING, shape ARRAY<STRING>", r"column shape = 'array<string>'.*ARRAY<INT>"),
        ("payload BINARY, dtype STRING, shape ARRAY<INT>, trace_id STRING", "column trace_id = 'string'"),
    ],
)
def test_columns_that_cannot_be_frames_are_refused(columns: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_columns(columns_of(columns), sink_options({"streams": "1"}))


def test_the_sources_own_rows_are_frames() -> None:
    check_columns(columns_of(FRAME_DDL), sink_options({"streams": "camera/copy"}))
