# SPDX-License-Identifier: Apache-2.0
"""Format "tensorpool.lake": rows in and out, tables, streams of commits, compaction, and files that are not there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tensorpool.lake import Lake, commits, layout, maintenance, ring_reader
from tensorpool.lake.file_policy import FilePolicy
from tensorpool.lake.files import read_frames
from tensorpool.lake.staging import Staging
from tensorpool.spark.columns import FRAME_DDL
from tests.support.lakes import Ring, check, recorded


class Recording:
    """A lake that batches of a ring without a driver are recorded to."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.ring = Ring(folder, nslots=64)
        self.lake = Lake.create(path)
        self.batches = 0

    def add(self, frames: int, tasks: int = 2) -> None:
        lo = self.ring.next_seq
        self.ring.write(frames)
        edges = [lo + frames * index // tasks for index in range(tasks + 1)]
        folder, policy = Staging(self.lake.path, "q", self.batches), FilePolicy("lz4", is_durable=False)
        staged = [
            folder.stage(self.ring.part(first, last), self.ring.span(first, last), policy)
            for first, last in itertools.pairwise(edges)
        ]
        commits.commit(self.lake, "q", self.batches, staged)
        self.batches += 1


@pytest.fixture
def recording(shm_dir: Path, tmp_path: Path) -> Iterator[Recording]:
    yield Recording(shm_dir, tmp_path / "lake")
    ring_reader.let_go(0)


def read(spark: SparkSession, lake: Lake | Path, **options: Any) -> DataFrame:
    return (
        spark.read.format("tensorpool.lake").options(**options).load(str(lake.path if isinstance(lake, Lake) else lake))
    )


def seqs_of(frames: DataFrame) -> list[int]:
    return sorted(row.seq for row in frames.select("seq").collect())


def row(seq: int, array: np.ndarray[Any, Any], dtype: str, order: str = "C", **more: Any) -> Row:
    data = array.tobytes(order=order)  # type: ignore[arg-type]
    values = {"timestamp_ns": 5, "received_ns": 6, "meta_version": 1, "trace_id": 2**40, "dropped_before": 0}
    values |= {"time": None, "dropped_reason": None} | more
    own = {"stream_id": 7, "epoch": 3, "seq": seq, "dtype": dtype, "shape": list(array.shape), "order": order}
    return Row(**own, **values, nbytes=len(data), payload=data)


def test_rows_come_back_as_they_went_in(spark: SparkSession, tmp_path: Path) -> None:
    """Every column, whatever the order of the rows."""
    arrays: list[tuple[np.ndarray[Any, Any], str, str]] = [
        (np.arange(6, dtype=np.uint16).reshape(2, 3), "UINT16", "C"),
        (np.arange(6, dtype=np.float64).reshape(3, 2), "FLOAT64", "F"),
        (np.array(7, np.int64), "INT64", "C"),
        (np.zeros((0, 4), np.uint8), "UINT8", "C"),
    ]
    rows = [row(seq, array, dtype, order) for seq, (array, dtype, order) in enumerate(arrays)][::-1]
    names = [name.split()[0].strip("`") for name in FRAME_DDL.replace("ARRAY<INT>", "X").split(", ")]
    frames = spark.createDataFrame([tuple(one[name] for name in names) for one in rows], FRAME_DDL)
    frames.repartition(2).write.format("tensorpool.lake").mode("append").save(str(tmp_path / "lake"))
    back = read(spark, tmp_path / "lake").orderBy("seq").collect()
    assert [tuple(one) for one in back] == [tuple(one[name] for name in names) for one in rows[::-1]]
    lake = Lake.open(tmp_path / "lake")
    assert [(file.is_recorded, file.stream_id) for file in lake.files()] == [(False, 7)] * len(lake.files())
    assert not list((lake.path / layout.STAGING).iterdir())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [7]}, "row 0: 6 bytes; UINT8 .7. has 7"),
        ({"dtype": "COMPLEX"}, "row 0: dtype 'COMPLEX'; expected one of"),
        ({"payload": None}, "row 0: payload is null"),
        ({"seq": -1}, "row 0: seq -1"),
    ],
)
def test_a_row_that_is_no_frame_is_refused_by_number(
    spark: SparkSession, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    good = row(0, np.arange(6, dtype=np.uint8), "UINT8").asDict() | change
    schema = "stream_id BIGINT, epoch BIGINT, seq BIGINT, dtype STRING, shape ARRAY<INT>, payload BINARY"
    names = ("stream_id", "epoch", "seq", "dtype", "shape", "payload")
    frames = spark.createDataFrame([tuple(good[name] for name in names)], schema)
    with pytest.raises(Exception, match=words):
        frames.write.format("tensorpool.lake").mode("append").save(str(tmp_path / "lake"))
    lake = Lake.open(tmp_path / "lake")
    assert lake.state.number == 0
    assert not [path for path in (lake.path / layout.STAGING).rglob("*") if path.is_file()]


def test_what_cannot_be_written_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    one = spark.range(1)
    with pytest.raises(Exception, match="those of frames"):
        one.write.format("tensorpool.lake").mode("append").save(str(tmp_path / "lake"))
    with pytest.raises(Exception, match="append; a lake is trimmed by retention"):
        one.write.format("tensorpool.lake").mode("overwrite").save(str(tmp_path / "lake"))
    with pytest.raises(Exception, match="record to it first"):
        read(spark, tmp_path / "nothing")


def test_tables_streams_and_payloads_by_option(spark: SparkSession, recording: Recording) -> None:
    recording.add(10)
    recording.ring.write(100)
    recording.add(4)
    lake = recording.lake
    staged = Staging(lake.path, "q", 2).stage(
        recording.ring.part(10, 110), recording.ring.span(10, 110), FilePolicy("none")
    )
    commits.commit(lake, "q", 2, [staged])
    frames = read(spark, lake)
    assert seqs_of(frames) == recorded(lake)[(10_000, 1)]
    assert [tuple(gap) for gap in read(spark, lake, table="gaps").collect()] == [
        (10_000, 1, gap.lo, gap.hi, gap.hi - gap.lo, gap.reason) for gap in lake.gaps()
    ]
    files = read(spark, lake, table="files").select("path", "frames").collect()
    assert [tuple(file) for file in files] == [(file.path, file.frames) for file in lake.files()]
    assert read(spark, lake, streams="7").count() == 0
    reference = read(spark, lake, payload="reference").where("payload IS NULL AND nbytes = 96")
    assert seqs_of(reference) == seqs_of(frames)
    assert seqs_of(read(spark, lake, maxBytesPerPartition="1k")) == seqs_of(frames)
    assert seqs_of(spark.read.parquet(str(lake.path))) == seqs_of(frames), "anything that reads Parquet can read it"


def test_a_file_that_is_missing_or_torn_is_named(spark: SparkSession, recording: Recording) -> None:
    recording.add(8)
    first = recording.lake.full_path(recording.lake.files()[0].path)
    first.unlink()
    with pytest.raises(Exception, match=f"{first.name}: the log names this file, but it is missing"):
        read(spark, recording.lake).collect()
    assert seqs_of(read(spark, recording.lake, failOnDataLoss="false")) == [4, 5, 6, 7]
    first.write_bytes(b"no Parquet")
    with pytest.raises(Exception, match=f"{first.name}: it is torn or no Parquet file"):
        read(spark, recording.lake).collect()


def test_new_commits_stream_once_and_across_compaction_and_retention(
    spark: SparkSession, recording: Recording, query: Callable[..., StreamingQuery], tmp_path: Path
) -> None:
    """A reader that fell behind reads from the files that took in those it had not read yet."""
    lake, checkpoint, copy = recording.lake, tmp_path / "checkpoint", Lake.create(tmp_path / "copy")
    recording.add(6)

    def catch_up() -> list[int]:
        stream = spark.readStream.format("tensorpool.lake").option("maxBytesPerTrigger", "1").load(str(lake.path))
        writer = stream.writeStream.format("tensorpool.lake").trigger(availableNow=True).option("path", str(copy.path))
        done = query(writer, checkpoint)
        done.awaitTermination()
        assert done.exception() is None
        return seqs_of(read(spark, copy))

    assert catch_up() == list(range(6))
    recording.add(6)
    recording.add(6)
    before = read(spark, lake)
    done = maintenance.compact(lake)
    assert (done.files_before, done.files_after) == (6, 1)
    assert check(lake) == {(10_000, 1): list(range(18))}
    assert seqs_of(before) == list(range(18))
    maintenance.remove_unused(lake, grace_s=0)
    assert len(list(lake.path.glob("stream_id=*/*/*.parquet"))) == 1
    assert catch_up() == list(range(18))
    assert maintenance.compact(lake) == maintenance.Compacted(0, 0, 0, 0)
    recording.add(6)
    maintenance.retain(lake, max_bytes=lake.files()[-1].bytes)
    assert seqs_of(read(spark, lake)) == [21, 22, 23]
    assert catch_up() == list(range(24)), "within the grace period nothing is lost"


def test_large_frames_come_one_row_group_at_a_time(shm_dir: Path, tmp_path: Path) -> None:
    """A worker holds one frame of 16 MiB, however many the file has."""
    lake, ring = Lake.create(tmp_path / "lake"), Ring(shm_dir, nslots=8, nbytes=16 << 20)
    ring.write(5)
    staged = Staging(lake.path, "q", 0).stage(ring.part(0, 5), ring.span(0, 5), FilePolicy("none", is_durable=False))
    commits.commit(lake, "q", 0, [staged])
    batches = read_frames(lake.full_path(lake.files()[0].path))
    assert [batch.num_rows for batch in batches] == [1] * 5
    ring_reader.let_go(0)
