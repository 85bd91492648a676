# SPDX-License-Identifier: Apache-2.0
"""Options of reads: streams by a pattern, batches that wait for frames, metadata as a column, lakes that change."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.errors import ConfigError
from tensorpool.lake import Lake, commits, maintenance, ring_reader
from tensorpool.lake.file_policy import FilePolicy
from tensorpool.lake.live_options import source_options
from tensorpool.lake.query_planner import JOIN_EVERY_S
from tensorpool.lake.ring_reader import RingPart
from tensorpool.lake.staging import Staging
from tensorpool.spark.lake_options import lake_options
from tensorpool.spark.lake_reader import LakeStreamReader
from tensorpool.spark.live_source import LiveReader, LiveStreamReader
from tests.spark.conftest import read
from tests.support.deployment import look_until, options_of, pattern, publish
from tests.support.frame_rows import attribute, make_lake, row
from tests.support.lakes import Ring


@pytest.fixture
def reader(pool: tp.Local) -> Iterator[Callable[..., LiveStreamReader]]:
    """Makes the planner's side of a streaming read, closed with the test."""
    made: list[LiveStreamReader] = []

    def make(**options: str) -> LiveStreamReader:
        made.append(LiveStreamReader(source_options(options | options_of(pool))))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def ranges_of(parts: Any) -> list[tuple[int, int, int]]:
    found = [msgspec.msgpack.decode(part.part, type=RingPart).range for part in parts]
    return sorted((one.stream_id, one.lo, one.hi) for one in found)


# --- streams by a pattern


def test_streams_that_match_join_a_running_query(
    pool: tp.Local, client: Client, reader: Callable[..., LiveStreamReader]
) -> None:
    """With everything that their rings hold; a batch that is planned again is the same batch."""
    site = f"site-{uuid.uuid4().hex[:8]}"
    with publish(client, f"{site}/a", 5) as first, publish(client, f"{site}/other", 5):
        stream = reader(subscribePattern=f"{site}/.", startingOffsets="earliest", minPartitions="1")
        start = stream.initialOffset()
        assert list(start) == [str(first.stream_id)]
        end = stream.latestOffset(start)
        assert ranges_of(stream.partitions(start, end)) == [(first.stream_id, 0, 5)]
        with publish(client, f"{site}/b", 7) as second:
            joined: list[dict[str, Any]] = []

            def has_joined() -> bool:
                joined.append(stream.latestOffset(end))
                return str(second.stream_id) in joined[-1]

            look_until(has_joined, f"the new stream joins, which takes {JOIN_EVERY_S} s")
            for number in range(7, 9):
                second.publish(pattern(number))
            assert ranges_of(stream.partitions(end, joined[-1])) == [(second.stream_id, 0, 7)]
            later = stream.latestOffset(joined[-1])
            assert ranges_of(stream.partitions(joined[-1], later)) == [(second.stream_id, 7, 9)]
        with pytest.raises(ConfigError, match=r"option subscribePattern = 'nowhere/.'"):
            LiveReader(source_options({"subscribePattern": "nowhere/."} | options_of(pool))).partitions()


# --- batches that wait


def test_a_batch_waits_for_frames(
    client: Client, stream: Callable[..., int], reader: Callable[..., LiveStreamReader]
) -> None:
    stream_id = stream()
    with publish(client, stream_id, 3) as producer:
        options = {"streams": str(stream_id), "startingOffsets": "earliest", "minFramesPerTrigger": "10"}
        patient = reader(**options, maxTriggerDelay="10h")
        start = patient.initialOffset()
        assert patient.latestOffset(start) == start
        hasty = reader(**options, maxTriggerDelay="10ms")
        assert hasty.latestOffset(start) == start
        look_until(lambda: hasty.latestOffset(start)[str(stream_id)]["seq"] == 3, "the frames have waited long enough")
        for number in range(3, 12):
            producer.publish(pattern(number))
        assert patient.latestOffset(start)[str(stream_id)]["seq"] == 12
        once = reader(**options | {"minFramesPerTrigger": "100"}, maxTriggerDelay="10h")
        once.prepareForTriggerAvailableNow()
        assert once.latestOffset(start)[str(stream_id)]["seq"] == 12, "nothing more comes: it does not wait"


# --- lakes


class Recorded:
    """A lake that a ring is recorded to, batch by batch."""

    def __init__(self, lake: Lake, ring: Ring) -> None:
        self.lake, self.ring, self.batches = lake, ring, 0

    def add(self, frames: int) -> None:
        lo = self.ring.next_seq
        self.ring.write(frames)
        part, span = self.ring.part(lo, lo + frames), self.ring.span(lo, lo + frames)
        policy = FilePolicy("none", is_durable=False)
        staged = Staging(self.lake.path, "q", self.batches).stage(part, span, policy)
        commits.commit(self.lake, "q", self.batches, [staged])
        self.batches += 1


@pytest.fixture
def recorded(shm_dir: Path, tmp_path: Path) -> Iterator[Recorded]:
    yield Recorded(Lake.create(tmp_path / "lake"), Ring(shm_dir, nslots=64))
    ring_reader.let_go(0)


def test_a_batch_of_a_lake_waits_for_frames(recorded: Recorded) -> None:
    """A compaction brings none: it is passed over at once."""
    recorded.add(4)
    given = {"path": str(recorded.lake.path), "minFramesPerTrigger": "10", "maxTriggerDelay": "10h"}
    stream = LakeStreamReader(lake_options(given))
    assert stream.latestOffset({"commit": 0}) == {"commit": 0}
    recorded.add(4)
    assert stream.latestOffset({"commit": 0}) == {"commit": 0}
    recorded.add(4)
    assert stream.latestOffset({"commit": 0}) == {"commit": 3}
    maintenance.compact(recorded.lake)
    assert stream.latestOffset({"commit": 3}) == {"commit": 4}
    assert stream.partitions({"commit": 3}, {"commit": 4}) == []


def test_a_compaction_beside_a_running_stream_doubles_nothing(
    spark: SparkSession, recorded: Recorded, query: Callable[..., StreamingQuery]
) -> None:
    recorded.add(6)
    frames = spark.readStream.format("tensorpool.lake").load(str(recorded.lake.path)).select("seq")
    started = query(frames.writeStream.format("memory").queryName("beside"))

    def seqs() -> list[int]:
        failure = started.exception()
        assert failure is None, failure
        return sorted(row.seq for row in spark.table("beside").collect())

    look_until(lambda: len(seqs()) >= 6, "the first frames")
    recorded.add(6)
    assert maintenance.compact(recorded.lake).files_after == 1
    recorded.add(6)
    look_until(lambda: len(seqs()) >= 18, "the frames after the compaction")
    maintenance.compact(recorded.lake)
    started.processAllAvailable()
    assert seqs() == list(range(18))


# --- metadata


def test_metadata_of_live_frames_is_a_variant(
    spark: SparkSession, pool: tp.Local, client: Client, stream: Callable[..., int]
) -> None:
    """Of each frame's own version; null for those of none."""
    stream_id = stream()
    with client.producer(stream_id, create=True) as producer:
        producer.publish(np.zeros(4, np.uint8))
        producer.set_metadata({"exposure_ms": 4.5, "lens": "wide", "roi": {"x": [1, 2]}, "raw": b"\x00\xff"})
        producer.publish(np.zeros(4, np.uint8))
        producer.set_metadata({"exposure_ms": 8})
        producer.publish(np.zeros(4, np.uint8))
        frames = read(spark, pool, stream_id, includeMetadata="true")
        assert frames.dtypes[-1] == ("metadata", "variant")
        found = frames.selectExpr(
            "metadata IS NULL AS is_null",
            "variant_get(metadata, '$.exposure_ms', 'double') AS exposure",
            "metadata:lens::string AS lens",
            "metadata:roi.x[1]::int AS x",
            "metadata:raw::string AS raw",
        ).collect()
    assert [tuple(row) for row in found] == [
        (True, None, None, None, None),
        (False, 4.5, "wide", 2, "AP8="),
        (False, 8.0, None, None, None),
    ]


def test_metadata_of_recorded_frames_is_a_variant(spark: SparkSession, tmp_path: Path) -> None:
    """Of a version that was published again, what was said last when the frame was taken; of version 0 nothing."""
    attributes = [
        attribute(10_000, 0, "exposure_ms", "7", told_ns=5, kind="application/json"),
        attribute(10_000, 1, "exposure_ms", "4", told_ns=5, kind="application/json"),
        attribute(10_000, 1, "exposure_ms", "9", told_ns=50, kind="application/json"),
    ]
    rows = [row(seq=seq, meta_version=min(seq, 2), timestamp_ns=seq * 20) for seq in range(4)]
    rows += [row(seq=4, meta_version=1, timestamp_ns=80)]
    lake = make_lake(tmp_path / "lake", rows, metadata=attributes)
    frames = spark.read.format("tensorpool.lake").option("includeMetadata", "true").option("payload", "reference")
    found = frames.load(str(lake.path)).selectExpr("seq", "metadata:exposure_ms::int AS exposure").collect()
    assert {row.seq: row.exposure for row in found} == {0: None, 1: 4, 2: None, 3: None, 4: 9}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"startingTimestamp": "now"}, "with its offset from UTC"),
        ({"endingTimestamp": "1", "table": "gaps"}, "option endingTimestamp = .* table frames only, not gaps"),
        ({"includeMetadata": "true", "table": "qos"}, "table frames only, not qos"),
        ({"maxTriggerDelay": "1s"}, "with minFramesPerTrigger only"),
        ({"pushFilter": "true"}, "did you mean pushFilters?"),
    ],
)
def test_a_lake_refuses_with_what_is_accepted(given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        lake_options({"path": "/data/lake"} | given)
