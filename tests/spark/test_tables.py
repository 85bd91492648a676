# SPDX-License-Identifier: Apache-2.0
"""The control plane as tables: announces, QoS, metadata and events, on real Spark and message by message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.lake.live_options import source_options
from tensorpool.spark.tables import TableStreamReader
from tests.spark.conftest import read, read_stream
from tests.support.deployment import look_until, options_of, publish
from tests.support.processes import wait_until

type Stream = Callable[..., int]


def test_announces_are_a_table(spark: SparkSession, pool: tp.Local, client: Client, stream: Stream) -> None:
    """A snapshot has every stream that was asked for, with its memory."""
    stream_id = stream("tiny")
    with publish(client, stream_id, 1) as producer:
        rows = read(spark, pool, stream_id, table="announces").collect()
        epoch = producer.epoch
    assert {(row.stream_id, row.epoch, row.header_nslots, row.pools) for row in rows} == {
        (stream_id, epoch, 8, "1:256,2:4096")
    }


def test_metadata_is_a_table(
    spark: SparkSession, pool: tp.Local, client: Client, query: Callable[..., StreamingQuery]
) -> None:
    """As a stream: every version that is sent from the query's start on."""
    with publish(client, "table/camera", 1) as producer:
        metadata = read_stream(spark, pool, producer.stream_id, table="metadata")
        started = query(metadata.writeStream.format("memory").queryName("metadata_rows"))
        look_until(lambda: spark.table("metadata_rows").filter("kind = 'source'").count(), "the source is announced")
        version = producer.set_metadata({"exposure_ms": 4})
        look_until(lambda: spark.table("metadata_rows").filter("key = 'exposure_ms'").count(), "its metadata")
        started.stop()
    (row,) = spark.table("metadata_rows").filter("key = 'exposure_ms'").limit(1).collect()
    assert (row.stream_id, row.meta_version, bytes(row.value)) == (producer.stream_id, version, b"4")
    (source,) = spark.table("metadata_rows").filter("kind = 'source'").limit(1).collect()
    assert source.name == "table/camera"


@pytest.fixture
def listening(pool: tp.Local) -> dict[str, str]:
    return {"table": "announces", **options_of(pool)}


def test_a_query_that_starts_again_counts_on_from_its_checkpoint(listening: dict[str, str]) -> None:
    """Rows that an earlier run planned are gone; messages that arrive from now on are not."""
    reader = TableStreamReader(source_options(listening))
    (lost,) = reader.partitions({"row": 40}, {"row": 50})
    assert rows_of(lost) == []
    found: list[dict[str, Any]] = []
    wait_until(lambda: found.append(reader.latestOffset({"row": 50})) or found[-1]["row"] > 50, "rows")
    (part,) = reader.partitions({"row": 50}, found[-1])
    assert len(rows_of(part)) == found[-1]["row"] - 50
    reader.commit(found[-1])
    reader.stop()


def rows_of(part: Any) -> list[Any]:
    rows: list[Any] = part.rows
    return rows
