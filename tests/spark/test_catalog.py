# SPDX-License-Identifier: Apache-2.0
"""Tables of Spark's catalog over live streams and lakes, and a lake through Spark's own Parquet reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.lake import Lake, commits, maintenance, ring_reader
from tensorpool.lake.file_policy import FilePolicy
from tensorpool.lake.staging import Staging
from tensorpool.spark import native_frames
from tensorpool.spark.catalog import options_given, schema_for
from tensorpool.spark.columns import FRAME_DDL
from tests.support.deployment import options_of, publish
from tests.support.frame_rows import make_lake, rows_over_time
from tests.support.lakes import Ring

SPARKS = {"provider": "tensorpool", "owner": "me", "location": "file:/x", "comment": "c", "a property": "7"}


def test_properties_of_a_table_are_sparks_and_its_options_are_ours() -> None:
    table = SPARKS | {"path": "file:/x", "streams": "7", "option.streams": "7", "option.banana": "x", "banana": "x"}
    assert options_given(table) == {"path": "file:/x", "streams": "7", "banana": "x"}
    schema = schema_for(FRAME_DDL, table)
    assert not isinstance(schema, str)
    assert options_given({"STREAMS": "8"}, schema) == {"STREAMS": "8", "path": "file:/x", "banana": "x"}
    assert schema_for(FRAME_DDL, {"streams": "7"}) == FRAME_DDL
    assert options_given({"streams": "7", "owner": "me"}) == {"streams": "7", "owner": "me"}, "an option, to be refused"


@pytest.fixture
def table(spark: SparkSession) -> Iterator[Callable[..., str]]:
    """Creates a table that is dropped with the test."""
    made: list[str] = []

    def create(name: str, of: str, more: str = "", **options: str) -> str:
        given = ", ".join(f"`{key}` '{text}'" for key, text in options.items())
        spark.sql(f"CREATE TABLE {name} USING {of} OPTIONS ({given}) {more}")
        made.append(name)
        return name

    yield create
    for name in made:
        spark.sql(f"DROP TABLE IF EXISTS {name}")


def test_a_table_over_a_lake(spark: SparkSession, tmp_path: Path, table: Callable[..., str]) -> None:
    """Read by SQL, and with other options for one query; dropping it leaves the lake as it is."""
    lake = make_lake(tmp_path / "lake", rows_over_time(20))
    place = str(lake.path)
    name = table("over_lake", "`tensorpool.lake`", "COMMENT 'frames' TBLPROPERTIES ('group'='lab')", path=place)
    assert spark.sql(f"SELECT sum(seq) AS s, count(payload) AS n FROM {name}").collect()[0] == (190, 20)
    assert spark.read.option("payload", "reference").table(name).where("payload IS NULL").count() == 20
    with pytest.raises(Exception, match=r"option banana = 'x' is not usable"):
        table("refused", "`tensorpool.lake`", path=place, banana="x")
    spark.sql(f"DROP TABLE IF EXISTS {name}")
    table(name, "`tensorpool.lake`", f"LOCATION '{place}'", table="frames")
    assert spark.table(name).count() == 20


def test_a_table_over_a_live_stream(
    spark: SparkSession, pool: tp.Local, client: Client, stream: Callable[..., int], table: Callable[..., str]
) -> None:
    stream_id = stream()
    name = table("over_stream", "tensorpool", streams=str(stream_id), **options_of(pool))
    with publish(client, stream_id, 30):
        assert spark.sql(f"SELECT max(seq) AS newest FROM {name} WHERE nbytes = 64").collect()[0].newest == 29
    with pytest.raises(Exception, match=r"did you mean failOnDataLoss\?"):
        table("refused", "tensorpool", streams="7", failOnDataLos="true")


# --- natively


def rows_of(frames: DataFrame) -> list[tuple[object, ...]]:
    return sorted(tuple(row) for row in frames.selectExpr("*", "crc32(payload) AS crc").drop("payload").collect())


def test_native_frames_are_those_of_the_format(spark: SparkSession, shm_dir: Path, tmp_path: Path) -> None:
    """After a compaction and a retention too, although the files of before are still in the folders."""
    lake, ring = Lake.create(tmp_path / "a lake"), Ring(shm_dir, nslots=64)
    assert native_frames(spark, lake).count() == 0
    for batch in range(4):
        ring.write(8)
        lo, hi = 8 * batch, 8 * batch + 8
        staged = Staging(lake.path, "q", batch).stage(ring.part(lo, hi), ring.span(lo, hi), FilePolicy("zstd"))
        commits.commit(lake, "q", batch, [staged])
        if batch == 2:
            maintenance.compact(lake)
    maintenance.retain(lake, max_bytes=1)
    ring_reader.let_go(0)
    assert len(list(lake.path.glob("stream_id=*/*/*.parquet"))) == 5
    ours = spark.read.format("tensorpool.lake").load(str(lake.path))
    native = native_frames(spark, str(lake.path))
    assert native.dtypes == ours.dtypes
    assert rows_of(native) == rows_of(ours)
    assert [row[2] for row in rows_of(native)] == list(range(24, 32))
    plan = native.where("seq = 30 AND stream_id = 10000").select("time")._jdf.queryExecution().toString()
    assert "ReadSchema: struct<seq:bigint,time:timestamp>" in plan, "no payload is read"
    assert "EqualTo(seq,30)" in plan
    assert "PartitionFilters: [isnotnull(stream_id" in plan
