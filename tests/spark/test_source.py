# SPDX-License-Identifier: Apache-2.0
"""The live source on real Spark: snapshots and streaming queries, loss, epochs, references, restarts."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, spark_partition_id
from pyspark.sql.streaming.query import StreamingQuery

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Client
from tensorpool.lake.ring_reader import FRAME_SCHEMA
from tensorpool.spark import fetch_payloads, progress_of, total_of, with_metrics
from tests.spark.conftest import read, read_stream, wait_for_progress
from tests.support.deployment import consumer_leases, look_until, pattern, publish
from tests.support.driver_process import Deployment
from tests.support.processes import wait_until

PATIENT = {"announce_period_ms": 1000, "lease_keepalive_interval_ms": 1000}  # with a machine that stands still
SMALL = {"header_nslots": 64, "payload_pools": [{"pool_id": 1, "stride_bytes": 256}]}

type Start = Callable[..., StreamingQuery]
type Stream = Callable[..., int]


def rows_of(spark: SparkSession, table: str) -> list[tuple[int, int, bytes]]:
    """What a memory sink has: epoch, seq and payload, in order."""
    found = spark.table(table).select("epoch", "seq", "payload").orderBy("epoch", "seq").collect()
    return [(row.epoch, row.seq, bytes(row.payload)) for row in found]


def wait_for_rows(query: StreamingQuery, rows: int) -> None:
    def is_there() -> bool:
        failure = query.exception()
        assert failure is None, failure
        return total_of(query.recentProgress).frames >= rows

    look_until(is_there, f"{rows} rows in {query.name}")


def into_memory(frames: DataFrame, name: str, **trigger: Any) -> Any:
    writer = frames.writeStream.format("memory").queryName(name)
    return writer.trigger(**trigger) if trigger else writer


# --- batch


def test_a_snapshot_is_what_the_rings_hold(spark: SparkSession, pool: tp.Local, client: Client, stream: Stream) -> None:
    """By id and by name, two streams at once, every byte; what the ring has lost is not in it."""
    small, named = stream("tiny"), "snapshot/camera"
    with publish(client, small, 20), publish(client, named, 50) as producer:
        frames = read(spark, pool, small, named, minPartitions=5)
        assert frames.schema.names == FRAME_SCHEMA.names
        rows = frames.withColumn("partition", spark_partition_id()).collect()
    assert len({row.partition for row in rows}) >= 5
    found = {(row.stream_id, row.seq): row for row in rows}
    assert sorted(found) == sorted(
        [(small, seq) for seq in range(12, 20)] + [(producer.stream_id, s) for s in range(50)]
    )
    for (_, seq), row in found.items():
        assert bytes(row.payload) == pattern(seq).tobytes()
        assert (row.dtype, row.shape, row.order, row.nbytes) == ("UINT8", [64], "C", 64)
        assert row.timestamp_ns <= row.received_ns


def test_a_snapshot_between_offsets(spark: SparkSession, pool: tp.Local, client: Client, stream: Stream) -> None:
    """Exact ones, and an age; ends in the wrong place are refused with what there is."""
    stream_id = stream()
    with publish(client, stream_id, 100, first=0) as producer:
        epoch = producer.epoch
        ends = [f'{{"{stream_id}": {{"epoch": {epoch}, "seq": {seq}}}}}' for seq in (20, 30)]
        rows = read(spark, pool, stream_id, startingOffsets=ends[0], endingOffsets=ends[1]).select("seq").collect()
        assert sorted(row.seq for row in rows) == list(range(20, 30))
        assert read(spark, pool, stream_id, startingOffsets="-10m").count() == 100
        assert read(spark, pool, stream_id, startingOffsets="-0ms").count() == 0
        times = [row.time for row in read(spark, pool, stream_id).select("time").orderBy("seq").collect()]
        assert times == sorted(times)
        middle = times[40].astimezone(UTC).isoformat()
        later = sum(time >= times[40] for time in times)
        assert read(spark, pool, stream_id, startingTimestamp=middle).count() == later
        assert read(spark, pool, stream_id, endingTimestamp=middle).count() == 100 - later
        assert read(spark, pool, stream_id).where(col("time") >= times[40]).count() == later
        elsewhere = f'{{"7": {{"epoch": {epoch}, "seq": 0}}}}'
        with pytest.raises(Exception, match=f"streams of this query: {stream_id}"):
            read(spark, pool, stream_id, startingOffsets=elsewhere).count()
        ahead = f'{{"{stream_id}": {{"epoch": {epoch + 1 if epoch else 0}, "seq": 0}}}}'
        with pytest.raises(Exception, match=f"up to the newest, {epoch}"):
            read(spark, pool, stream_id, startingOffsets=ahead).count()


def test_unknown_and_malformed_options_reach_the_user(spark: SparkSession, pool: tp.Local) -> None:
    with pytest.raises(Exception, match=r"did you mean failOnDataLoss\?"):
        read(spark, pool, 10_000, failOnDataLos="true")
    with pytest.raises(
        Exception, match=r"option maxBytesPerTrigger = 'lots' is not usable; accepted: a number of bytes"
    ):
        read_stream(spark, pool, 10_000, maxBytesPerTrigger="lots")


def test_references_are_fetched_in_later_stages(
    spark: SparkSession, pool: tp.Local, client: Client, stream: Stream
) -> None:
    stream_id = stream()
    with publish(client, stream_id, 40, 4096):
        references = read(spark, pool, stream_id, payload="reference")
        largest = references.selectExpr("max(length(payload)) AS largest").collect()[0].largest
        fetched = references.filter("seq >= 10").mapInArrow(fetch_payloads, references.schema).collect()
    assert largest < 1000
    assert {row.seq: bytes(row.payload) for row in fetched} == {s: pattern(s, 4096).tobytes() for s in range(10, 40)}


# --- streaming


def test_two_streams_of_different_rates_in_one_query(
    spark: SparkSession, pool: tp.Local, client: Client, stream: Stream, query: Start
) -> None:
    """Admission control holds, no stream starves, every frame comes once, progress reports frames, bytes and lag."""
    fast, slow = stream("deep"), stream()
    with publish(client, fast, 600) as producer, publish(client, slow, 30):
        frames = read_stream(spark, pool, fast, slow, startingOffsets="earliest", maxFramesPerTrigger=250)
        started = query(into_memory(with_metrics(frames), "rates", processingTime="10 milliseconds"))
        first = wait_for_progress(started, lambda batch: batch["numInputRows"] > 0, "a first batch")
        for number in range(600, 700):
            producer.publish(pattern(number))
        wait_for_rows(started, 730)
        started.processAllAvailable()
        assert max(batch.numInputRows for batch in started.recentProgress) <= 250
        rows = spark.table("rates").select("stream_id", "seq").collect()
        assert sorted((row.stream_id, row.seq) for row in rows) == sorted(
            [(fast, seq) for seq in range(700)] + [(slow, seq) for seq in range(30)]
        )
        in_first_batch = progress_of(first)
        assert 240 < in_first_batch.frames <= 250
        assert (in_first_batch.gaps, in_first_batch.nbytes) == (0, in_first_batch.frames * 64)
        assert in_first_batch.lag >= 380
        total = total_of(started.recentProgress)
        assert (total.frames, total.gaps, total.nbytes, total.lag) == (730, 0, 730 * 64, 0)


def test_an_overrun_is_counted(
    spark: SparkSession, pool: tp.Local, client: Client, stream: Stream, query: Start, tmp_path: Path
) -> None:
    """With failOnDataLoss the query stops instead and names the range. Both give their lease back."""
    stream_id = stream("tiny")
    found: list[Any] = []
    with publish(client, stream_id, 5) as producer:
        for upto in (45, 85):  # the same checkpoint twice: what was published between them is too much for the ring
            frames = read_stream(spark, pool, stream_id, startingOffsets="earliest")
            writer = frames.writeStream.foreachBatch(lambda batch, _: found.extend(batch.collect()))
            started = query(writer.trigger(availableNow=True), tmp_path / "checkpoint")
            assert started.awaitTermination(180)
            for number in range(upto - 40, upto):
                producer.publish(pattern(number))
        found.sort(key=lambda row: row.seq)
        assert [row.seq for row in found] == [*range(5), *range(37, 45)]
        assert [row.dropped_before for row in found] == [0] * 5 + [32] + [0] * 7
        assert total_of(started.recentProgress).gaps == 32

        frames = read_stream(spark, pool, stream_id, failOnDataLoss="true")
        failing = query(frames.writeStream.format("noop"), tmp_path / "checkpoint")
        words = f"stream {stream_id}, epoch {producer.epoch}: frames 45 to 76 are lost"
        with pytest.raises(StreamingQueryException, match=words):
            failing.awaitTermination(180)
        wait_until(lambda: consumer_leases(pool, stream_id) == 0, "the leases are given back")


def test_a_producer_that_restarts_is_followed_into_its_new_epoch(
    spark: SparkSession, pool: tp.Local, client: Client, stream: Stream, query: Start
) -> None:
    """What the old epoch still had is read, and nothing of either is lost."""
    stream_id = stream()
    with publish(client, stream_id, 40) as producer:
        epochs = [producer.epoch]
        live = read_stream(spark, pool, stream_id, startingOffsets="earliest", failOnDataLoss="true")
        started = query(into_memory(live, "epochs"))
        wait_for_rows(started, 10)
    for frames, total in ((30, 70), (20, 90)):
        with publish(client, stream_id, frames) as producer:
            epochs.append(producer.epoch)
        wait_for_rows(started, total)
    wanted = [(epoch, s, pattern(s).tobytes()) for epoch, n in zip(epochs, (40, 30, 20), strict=True) for s in range(n)]
    assert rows_of(spark, "epochs") == wanted
    assert total_of(started.recentProgress).gaps == 0
    started.stop()
    wait_until(lambda: consumer_leases(pool, stream_id) == 0, "the lease is given back")


def test_a_driver_that_restarts_does_not_end_the_query(
    spark: SparkSession, query: Start, media_driver: aeron.MediaDriver, shm_dir: Path
) -> None:
    """The query goes on in the epoch that the next driver makes; the producer needs no help either."""
    site = Deployment(shm_dir, media_driver.aeron_dir, profiles={"small": SMALL}, policies=PATIENT)
    options = {"streams": "10000", "config": str(site.config_path), "aeronDir": site.aeron_dir}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(site.start())
        client = stack.enter_context(tp.connect(site.aeron_dir, config=site.config_path))
        producer = stack.enter_context(client.producer(10_000, timeout=30))
        for number in range(20):
            producer.publish(pattern(number))
        live = spark.readStream.format("tensorpool").options(**options, startingOffsets="earliest").load()
        started = query(into_memory(live, "restarted"))
        wait_for_rows(started, 20)
        before = producer.epoch
        first.kill()
        stack.enter_context(site.start())
        wait_until(lambda: producer.is_active and producer.epoch != before, "the producer has a new epoch")
        for number in range(15):
            producer.publish(pattern(number))
        wait_for_rows(started, 35)
        started.stop()
    assert [(seq, data) for _, seq, data in rows_of(spark, "restarted")] == [
        (seq, pattern(seq).tobytes()) for seq in (*range(20), *range(15))
    ]


def test_a_planner_that_is_killed_costs_the_query_but_no_frame(
    spark: SparkSession, pool: tp.Local, client: Client, stream: Stream, query: Start, tmp_path: Path
) -> None:
    """Its lease expires by itself; the query fails, and started anew goes on where it was."""
    stream_id = stream("deep")
    with publish(client, stream_id, 100) as producer:
        frames = read_stream(spark, pool, stream_id, startingOffsets="earliest")
        writer = frames.select("seq").writeStream.format("parquet").option("path", str(tmp_path / "seqs"))
        before = planners(spark)
        started = query(writer, tmp_path / "checkpoint")
        wait_for_progress(started, lambda batch: batch["numInputRows"] > 0, "a first batch")
        (planner,) = planners(spark) - before
        os.kill(planner, signal.SIGKILL)
        with pytest.raises(StreamingQueryException):
            started.awaitTermination(180)
        for number in range(100, 150):
            producer.publish(pattern(number))
        limited = read_stream(spark, pool, stream_id, maxBytesPerTrigger=40 * 64).select("seq")
        writer = limited.writeStream.format("parquet").option("path", str(tmp_path / "seqs"))
        again = query(writer.trigger(availableNow=True), tmp_path / "checkpoint")
        assert again.awaitTermination(180)
        assert max(batch.numInputRows for batch in again.recentProgress) <= 40
        found = spark.read.parquet(str(tmp_path / "seqs")).orderBy("seq").collect()
        assert [row.seq for row in found] == list(range(150))
        wait_until(lambda: consumer_leases(pool, stream_id) == 0, "the lease of the killed planner expires")


def planners(spark: SparkSession) -> set[int]:
    """The processes that plan streaming queries of this session: children of its JVM."""
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    found = set()
    for task in Path(f"/proc/{gateway.proc.pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # who ends while we look
            for pid in task.read_text().split():
                if b"python_streaming_source_runner" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(int(pid))
    return found


# --- ranges


def test_ranges_follow_from_the_offsets_alone(
    spark: SparkSession, pool: tp.Local, client: Client, stream: Stream, query: Start, tmp_path: Path
) -> None:
    """A batch that fails and comes again has the same ranges, whatever the ring has lost in between."""
    stream_id = stream("tiny")
    seen: list[list[tuple[Any, ...]]] = []

    def fail_at_first(batch: DataFrame, number: int) -> None:
        rows = batch.select("stream_id", "epoch", "lo", "hi", "lost").orderBy("lo").collect()
        seen.append([tuple(row) for row in rows])
        if len(seen) == 1:
            raise RuntimeError("once")

    with publish(client, stream_id, 20) as producer:
        first = f'{{"{stream_id}": {{"epoch": {producer.epoch}, "seq": 2}}}}'
        ranges = read_stream(spark, pool, stream_id, table="ranges", minPartitions=2, startingOffsets=first)
        writer = ranges.writeStream.foreachBatch(fail_at_first).trigger(availableNow=True)
        with pytest.raises(StreamingQueryException):
            query(writer, tmp_path / "checkpoint").awaitTermination(180)
        for number in range(20, 50):
            producer.publish(pattern(number))
        query(writer, tmp_path / "checkpoint").awaitTermination(180)
        epoch = producer.epoch
    again = [
        (stream_id, epoch, 2, 12, "overwritten before they were read"),
        (stream_id, epoch, 12, 16, None),
        (stream_id, epoch, 16, 20, None),
    ]
    assert seen[:2] == [again, again]
    assert seen[2][0] == (stream_id, epoch, 20, 42, "overwritten before they were read")
