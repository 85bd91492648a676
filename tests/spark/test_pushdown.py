# SPDX-License-Identifier: Apache-2.0
"""Filters of batch reads: which of them reach the readers, and what is not read for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.lake import Lake, LakeFile, commits, ring_reader
from tensorpool.lake.file_policy import FilePolicy
from tensorpool.lake.lake import Change
from tensorpool.lake.live_options import source_options
from tensorpool.lake.ring_reader import RingPart
from tensorpool.lake.selection import Bounds, Selection, time_us_of
from tensorpool.lake.staging import Staging
from tensorpool.spark import lake_reader, live_source, register
from tensorpool.spark.lake_options import lake_options
from tensorpool.spark.pushdown import ENABLED, Pushdown, narrowed
from tests.spark.conftest import read
from tests.support.deployment import options_of, publish
from tests.support.frame_rows import make_lake, rows_over_time
from tests.support.lakes import Ring

MIB = 1 << 20
NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)


# --- what a filter means


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (EqualTo(("seq",), 7), Selection(seq=Bounds(7, 7))),
        (EqualNullSafe(("epoch",), 7), Selection(epoch=Bounds(7, 7))),
        (GreaterThan(("seq",), 7), Selection(seq=Bounds(8))),
        (GreaterThanOrEqual(("seq",), 7), Selection(seq=Bounds(7))),
        (LessThan(("time",), NOON), Selection(time=Bounds(hi=time_us_of(NOON) - 1))),
        (LessThanOrEqual(("stream_id",), 7), Selection(stream_id=Bounds(hi=7))),
        (In(("stream_id",), (9, None, 7)), Selection(stream_id=Bounds(values=(7, 9)))),
    ],
)
def test_comparisons_with_stream_epoch_seq_and_time_are_taken(given: Filter, meant: Selection) -> None:
    assert narrowed(Selection(), given) == meant
    assert list(Pushdown(Selection())([given])) == []


@pytest.mark.parametrize(
    "given",
    [
        EqualTo(("nbytes",), 7),
        EqualTo(("seq",), None),
        EqualTo(("seq",), 7.0),
        EqualTo(("seq", "deeper"), 7),
        LessThan(("time",), datetime(2026, 11, 16, 12)),
        LessThan(("seq",), NOON),
        IsNotNull(("seq",)),
        Not(EqualTo(("seq",), 7)),
    ],
)
def test_what_bounds_cannot_hold_exactly_goes_back_to_spark(given: Filter) -> None:
    assert narrowed(Selection(), given) is None
    assert list(Pushdown(Selection())([given])) == [given]


# --- a lake


@pytest.fixture
def large(shm_dir: Path, tmp_path: Path) -> Iterator[Lake]:
    """Two files of eight frames of 1 MiB, in row groups of two."""
    lake, ring = Lake.create(tmp_path / "lake"), Ring(shm_dir, nslots=16, nbytes=MIB)
    ring.write(16)
    policy = FilePolicy("none", is_durable=False)
    for batch in range(2):
        lo, hi = 8 * batch, 8 * batch + 8
        staged = Staging(lake.path, "q", batch).stage(ring.part(lo, hi), ring.span(lo, hi), policy)
        commits.commit(lake, "q", batch, [staged])
    yield lake
    ring_reader.let_go(0)


def read_bytes() -> int:
    """What this process has read from files since it started."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])


def cost_of(lake: Lake, *filters: Filter, **options: str) -> tuple[list[int], int]:
    """The seqs that a batch read gives, and how many bytes it reads for them: planning and every task."""
    before = read_bytes()
    reader = lake_reader.LakeReader(lake_options({"path": str(lake.path), "pushFilters": "true", **options}))
    assert list(reader.pushFilters(list(filters))) == []
    found: list[int] = []
    for part in reader.partitions():
        for batch in reader.read(part):
            found += batch.column("seq").to_pylist()
    return sorted(found), read_bytes() - before


def test_one_seq_reads_one_row_group(large: Lake) -> None:
    """All 16 frames have 16 MiB; a row group has two."""
    assert len(large.files()) == 2
    seqs, cost = cost_of(large)
    assert (seqs, cost > 16 * MIB) == (list(range(16)), True)
    seqs, cost = cost_of(large, EqualTo(("seq",), 5))
    assert seqs == [5]
    assert 2 * MIB < cost < 2.5 * MIB
    seqs, cost = cost_of(large, In(("seq",), (1, 15)))
    assert (seqs, cost < 4.5 * MIB) == ([1, 15], True)
    seqs, cost = cost_of(large, GreaterThan(("stream_id",), 10_000))
    assert (seqs, cost < MIB / 2) == ([], True)


def test_references_read_no_payload(large: Lake) -> None:
    seqs, cost = cost_of(large, payload="reference")
    assert seqs == list(range(16))
    assert cost < MIB / 2


def test_files_are_left_out_by_partition_and_statistics(tmp_path: Path) -> None:
    """Those of another writer, of which nothing is known, are read."""
    lake = Lake.create(tmp_path / "lake")
    noon_us = time_us_of(NOON)
    files = [
        LakeFile(f"{name}.parquet", stream, epoch, lo, lo + 10, 10, 100, None, None, 0, True, 0, *times, lo, lo + 9)
        for name, stream, epoch, lo, times in [
            ("a", 7, 1, 0, (noon_us - 9, noon_us - 1)),
            ("b", 7, 1, 10, (noon_us, noon_us + 9)),
            ("c", 7, 2, 0, (noon_us + 10, noon_us + 19)),
            ("d", 8, 1, 0, (None, None)),
        ]
    ]
    lake.append("record", lambda _: Change(tuple(files)))

    def planned(*filters: Filter, **options: str) -> str:
        reader = lake_reader.LakeReader(lake_options({"path": str(lake.path), "pushFilters": "true", **options}))
        assert list(reader.pushFilters(list(filters))) == []
        parts: list[Any] = list(reader.partitions())
        shares = [
            share for part in parts for share in msgspec.msgpack.decode(part.shares, type=list[lake_reader.Share])
        ]
        return "".join(sorted(share.path[0] for share in shares))

    assert planned() == "abcd"
    assert planned(EqualTo(("stream_id",), 8)) == "d"
    assert planned(In(("epoch",), (2, 3))) == "c"
    assert planned(LessThan(("seq",), 10)) == "acd"
    assert planned(GreaterThanOrEqual(("time",), NOON)) == "bcd"
    assert planned(LessThan(("time",), NOON), EqualTo(("stream_id",), 7)) == "a"
    assert planned(startingTimestamp="2026-11-16T12:00:00Z", streams="7") == "bc"
    assert planned(endingTimestamp="2026-11-16T12:00:00Z", streams="7") == "a"


def test_a_query_over_a_lake_gives_what_it_gives_without_pushdown(spark: SparkSession, tmp_path: Path) -> None:
    """Also a DataFrame that is used again: by default filters are Spark's. Times can be given as options."""
    rows = [one | {"time": NOON + timedelta(seconds=one["seq"])} for one in rows_over_time(40)]
    rows += [one | {"epoch": 2, "time": None} for one in rows_over_time(10)]
    lake = make_lake(tmp_path / "lake", rows, rows_per_file=16)
    wheres = [
        "seq IN (3, 39, 40) AND epoch = 1",
        "seq > 5 AND seq <= 9 AND NOT seq = 7 AND nbytes = 6",
        "time BETWEEN TIMESTAMP '2026-11-16 12:00:05Z' AND TIMESTAMP '2026-11-16 12:00:07Z'",
        "time IS NULL AND seq < 3",
    ]
    plain = spark.read.format("tensorpool.lake").load(str(lake.path))
    pushed = spark.read.format("tensorpool.lake").option("pushFilters", "true").load(str(lake.path))
    found = [
        [sorted(map(tuple, frames.where(it).select("epoch", "seq").collect())) for it in wheres]
        for frames in (plain, pushed)
    ]
    assert found[0] == found[1]
    assert [len(it) for it in found[0]] == [2, 6, 3, 3]
    assert plain.count() == 50, "what one query asks for is nothing to the next"
    five = {"startingTimestamp": "2026-11-16T12:00:05Z", "endingTimestamp": "2026-11-16T12:00:10Z"}
    assert spark.read.format("tensorpool.lake").options(**five).load(str(lake.path)).count() == 5


# --- a live stream


def ranges_of(pool: tp.Local, streams: str, *filters: Filter) -> list[tuple[int, int, int, bool]]:
    """Of the tasks of a batch read: stream, seqs, and whether it goes on to the end of the ring."""
    reader = live_source.LiveReader(
        source_options({"streams": streams, "minPartitions": "1", "pushFilters": "true"} | options_of(pool))
    )
    back = list(reader.pushFilters(list(filters)))
    assert back == [one for one in filters if one.attribute == ("time",)]  # type: ignore[attr-defined]
    parts: list[Any] = list(reader.partitions())
    decoded = [msgspec.msgpack.decode(part.part, type=RingPart) for part in parts]
    return [(it.range.stream_id, it.range.lo, it.range.hi, it.is_open) for it in decoded]


def test_a_live_read_takes_nothing_but_the_ranges_that_are_wanted(
    pool: tp.Local, client: Client, stream: Callable[..., int]
) -> None:
    one, two = stream(), stream()
    with publish(client, one, 100), publish(client, two, 50):
        both = f"{one},{two}"
        assert ranges_of(pool, both) == [(one, 0, 100, True), (two, 0, 50, True)]
        assert ranges_of(pool, both, EqualTo(("stream_id",), two)) == [(two, 0, 50, True)]
        assert ranges_of(pool, both, LessThan(("epoch",), 0)) == []
        assert ranges_of(pool, both, GreaterThanOrEqual(("seq",), 60)) == [(one, 60, 100, True)]
        assert ranges_of(pool, str(one), LessThan(("seq",), 7)) == [(one, 0, 7, False)]
        assert ranges_of(pool, str(one), In(("seq",), (3, 8, 9))) == [(one, 3, 4, False), (one, 8, 10, False)]


def test_a_live_read_is_narrowed_by_time(pool: tp.Local, client: Client, stream: Callable[..., int]) -> None:
    """To the frames in question and those within a second of them: Spark chooses among those."""
    stream_id = stream()
    with client.producer(stream_id, create=True) as producer:
        now_ns = time.monotonic_ns()
        for seq in range(100):
            producer.publish(np.full(8, seq, np.uint8), timestamp_ns=now_ns - (100 - seq) * 10**9)
        at = datetime.now(UTC) - timedelta(seconds=60)
        ((_, lo, hi, is_open),) = ranges_of(
            pool, str(stream_id), GreaterThan(("time",), at), LessThan(("time",), at + timedelta(seconds=10))
        )
        assert not is_open
        assert 30 < lo < 42 < 48 < hi < 60
        assert ranges_of(pool, str(stream_id), LessThan(("time",), at - timedelta(days=1))) == []


def test_a_query_over_a_live_stream_gives_what_it_gives_without_pushdown(
    spark: SparkSession, pool: tp.Local, client: Client, stream: Callable[..., int]
) -> None:
    stream_id = stream()
    with publish(client, stream_id, 50):
        frames = read(spark, pool, stream_id, pushFilters="true")
        times = {row.seq: row.time for row in read(spark, pool, stream_id).select("seq", "time").collect()}
        chosen = frames.where(frames.time > times[10]).where("seq < 20").select("seq").collect()
        assert sorted(row.seq for row in chosen) == [seq for seq in range(20) if times[seq] > times[10]]


def test_a_session_without_pushdown_reads_by_default_and_says_what_to_set(spark: SparkSession, tmp_path: Path) -> None:
    """As one that finds our format by itself; `register` sets it."""
    lake = make_lake(tmp_path / "lake", rows_over_time(4))
    spark.conf.set(ENABLED, "false")
    try:
        assert spark.read.format("tensorpool.lake").load(str(lake.path)).where("seq = 3").count() == 1
        with pytest.raises(Exception, match=ENABLED):
            spark.read.format("tensorpool.lake").option("pushFilters", "true").load(str(lake.path)).count()
    finally:
        register(spark)
    assert spark.conf.get(ENABLED) == "true"
