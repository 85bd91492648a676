# SPDX-License-Identifier: Apache-2.0
"""The control plane as tables: announces, QoS, metadata and events, on real Spark and message by message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Client
from tensorpool.spark import tables
from tensorpool.spark.options import source_options
from tensorpool.spark.tables import Listener, TableStreamReader, rows_of
from tensorpool.wire.control import Mode, QosConsumer, QosProducer
from tensorpool.wire.event import EventMessage, Format
from tests.spark.conftest import look_until, options_of, publish, read, read_stream
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
    """As a stream: every version that is told from the query's start on."""
    with publish(client, "table/camera", 1) as producer:
        metadata = read_stream(spark, pool, producer.stream_id, table="metadata")
        started = query(metadata.writeStream.format("memory").queryName("told"))
        look_until(lambda: spark.table("told").filter("kind = 'source'").count(), "the source is announced")
        version = producer.set_metadata({"exposure_ms": 4})
        look_until(lambda: spark.table("told").filter("key = 'exposure_ms'").count(), "its metadata")
        started.stop()
    (row,) = spark.table("told").filter("key = 'exposure_ms'").limit(1).collect()
    assert (row.stream_id, row.meta_version, bytes(row.value)) == (producer.stream_id, version, b"4")
    assert spark.table("told").filter("kind = 'source'").first().name == "table/camera"


# --- message by message


def test_qos_and_events_are_rows() -> None:
    producer = QosProducer(stream_id=3, producer_id=4, epoch=5, current_seq=6)
    assert rows_of("qos", producer, 9) == [(9, "producer", 3, 4, 5, 6, None, None, None)]
    consumer = QosConsumer(
        stream_id=3, consumer_id=7, epoch=5, last_seq_seen=2**64 - 2, drops_gap=1, drops_late=2, mode=Mode.STREAM
    )
    assert rows_of("qos", consumer, 9) == [(9, "consumer", 3, 7, 5, None, 1, 2, "STREAM")]
    event = EventMessage(timestamp_ns=1, correlation_id=2, tag="lab", key="go", format=Format.NOTHING, value=b"")
    assert rows_of("events", event, 9) == [(9, 1, 2, "lab", "go", "NOTHING", b"")]
    assert rows_of("metadata", event, 9) == []


@pytest.fixture
def listening(pool: tp.Local) -> dict[str, str]:
    return {"table": "announces", **options_of(pool)}


def test_rows_that_nobody_takes_are_bounded(listening: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_ROWS", 10)
    listener = Listener(source_options(listening))
    wait_until(lambda: listener.end > 30, "more rows than are kept")
    assert len(listener.rows(0, listener.end)) <= 10
    listener.close()


def test_a_query_that_starts_again_counts_on_from_its_checkpoint(listening: dict[str, str]) -> None:
    """Rows that an earlier run planned are gone; what is heard from now on is not."""
    reader = TableStreamReader(source_options(listening))
    (lost,) = reader.partitions({"row": 40}, {"row": 50})
    assert lost.rows == []
    found: list[dict[str, Any]] = []
    wait_until(lambda: found.append(reader.latestOffset({"row": 50})) or found[-1]["row"] > 50, "rows")
    (part,) = reader.partitions({"row": 50}, found[-1])
    assert len(part.rows) == found[-1]["row"] - 50
    reader.commit(found[-1])
    reader.stop()


def test_a_media_driver_that_comes_back_is_heard_again(media_driver: aeron.MediaDriver) -> None:
    options = source_options({"table": "events", "aeronDir": media_driver.aeron_dir})
    listener = Listener(options)
    media_driver.close()
    wait_until(lambda: listener._client.is_closed, "the loss is noticed")
    with aeron.MediaDriver(media_driver.aeron_dir) as again:
        client = aeron.connect(again.aeron_dir)
        publication = client.add_publication(tables.EVENTS.channel, tables.EVENTS.stream_id)
        event = EventMessage(timestamp_ns=1, correlation_id=2, tag="", key="go", format=Format.NOTHING, value=b"")
        wait_until(lambda: publication.offer(event.encode()), "somebody listens again")
        wait_until(lambda: listener.end == 1, "the event is heard")
        listener.close()
        client.close()
