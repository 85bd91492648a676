# SPDX-License-Identifier: Apache-2.0
"""Streams of a lake joined, and ancestors of frames: exact against references that try everything."""

from __future__ import annotations

import itertools
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession

from tensorpool.errors import ConfigError
from tensorpool.lake.side_tables import write_rows
from tensorpool.spark.joins import join_keys, join_streams
from tensorpool.spark.traces import lineage
from tests.support.frame_rows import make_lake, row

START = datetime(2026, 11, 18, tzinfo=UTC)
STREAMS = [10_000, 10_001, 10_002]
type Rows = list[dict[str, Any]]
type Key = tuple[int, int, int]  # stream_id, epoch, seq


def recording(seed: int, *, seconds: float = 4.0) -> Rows:
    """Three streams of different rates, with jitter, loss, clocks that are apart, epochs, and frames without a time."""
    chance = random.Random(seed)
    rows = []
    for stream, hz, apart_us in zip(STREAMS, (50, 37, 20), (0, 1_700, -900), strict=True):
        epoch, first = 1, 0
        for number in range(int(hz * seconds)):
            at_us = round(number * 1e6 / hz) + apart_us + chance.randrange(-2_000, 2_000)
            if chance.random() < 0.01:
                epoch, first = epoch + 1, number
            if chance.random() < 0.1:
                continue
            time = None if chance.random() < 0.02 else START + timedelta(microseconds=at_us)
            seen_ns = round(START.timestamp() * 1e9) + at_us * 1000 + 1_000_000
            keys = {"stream_id": stream, "epoch": epoch, "seq": number - first}
            rows.append(row(np.array([number], np.int32), time=time, received_ns=seen_ns, **keys))
    return rows


def key(one: dict[str, Any]) -> Key:
    return one["stream_id"], one["epoch"], one["seq"]


def in_order(rows: Rows) -> Rows:
    """As the frames came; a frame whose time went back came when the one before it did."""
    found = []
    for stream in STREAMS:
        latest = 0.0
        for one in sorted((one for one in rows if one["stream_id"] == stream), key=key):
            at = one["received_ns"] / 1e9 if one["time"] is None else one["time"].timestamp()
            latest = max(latest, at)
            found.append((latest, stream == STREAMS[0], stream, one["epoch"], one["seq"], one))
    return [entry[-1] for entry in sorted(found, key=lambda entry: entry[:5])]


def by_seq(rows: Rows) -> list[tuple[Key, ...]]:
    """A tuple when all streams have a seq in the epochs that they are in; a frame that another has passed goes."""
    held: dict[int, dict[int, Key]] = {stream: {} for stream in STREAMS}
    epochs: dict[int, int] = {}
    lasts: dict[int, int] = {}
    tuples = []
    for one in in_order(rows):
        stream, epoch, seq = key(one)
        if epochs.setdefault(stream, epoch) != epoch:
            held[stream].clear()
        epochs[stream], lasts[stream] = epoch, seq
        held[stream][seq] = key(one)
        for at in range(seq + 1):
            if all(at in own for own in held.values()):
                tuples.append(tuple(own.pop(at) for own in held.values()))
            for other, last in lasts.items():
                if last >= at and at not in held[other]:  # it is not going to come
                    for own in held.values():
                        own.pop(at, None)
    return tuples


def by_time(rows: Rows, tolerance_us: int) -> list[tuple[Key, ...]]:
    """The oldest frames of all streams, as long as there are any: a tuple, or the oldest of them goes."""
    queues: list[list[tuple[int, Key]]] = []
    for stream in STREAMS:
        last, queue = -1, []
        for one in sorted((one for one in rows if one["stream_id"] == stream and one["time"]), key=key):
            at_us = round((one["time"] - START) / timedelta(microseconds=1)) + 10**9
            if at_us > last:  # those that went back are out of order
                queue.append((at_us, key(one)))
                last = at_us
        queues.append(queue)
    tuples = []
    while all(queues):
        times = [queue[0][0] for queue in queues]
        if max(times) - min(times) <= tolerance_us:
            tuples.append(tuple(queue.pop(0)[1] for queue in queues))
        else:
            queues[times.index(min(times))].pop(0)
    return tuples


def by_latest(rows: Rows) -> list[tuple[Key, ...]]:
    newest: dict[int, Key] = {}
    tuples = []
    for one in in_order(rows):
        newest[one["stream_id"]] = key(one)
        if one["stream_id"] == STREAMS[0] and len(newest) == len(STREAMS):
            tuples.append(tuple(newest[stream] for stream in STREAMS))
    return tuples


def load(spark: SparkSession, path: Path, table: str = "frames") -> DataFrame:
    return spark.read.format("tensorpool.lake").option("table", table).load(str(path))


@pytest.mark.parametrize("seed", range(3))
def test_a_join_over_a_lake_is_exact(spark: SparkSession, tmp_path: Path, seed: int) -> None:
    """By seq, time and newest value; every frame is in a tuple or has a reason."""
    rows = recording(seed)
    make_lake(tmp_path / "lake", rows)
    frames = load(spark, tmp_path / "lake").cache()
    cases: list[tuple[dict[str, Any], list[tuple[Key, ...]]]] = [
        ({"by": "seq"}, by_seq(rows)),
        ({"by": "time", "tolerance": 0.008}, by_time(rows, 8_000)),
        ({"by": "latest"}, by_latest(rows)),
    ]
    for options, expected in cases:
        assert len(expected) > 10
        found = join_keys(frames, STREAMS, **options).collect()
        tuples: dict[int, dict[int, Key]] = {}
        for one in found:
            if one.tuple is not None:
                tuples.setdefault(one.tuple, {})[one.input] = (one.stream_id, one.epoch, one.seq)
        assert [tuple(tuples[number][index] for index in range(3)) for number in sorted(tuples)] == expected
        joined = {(one.stream_id, one.epoch, one.seq) for one in found if one.reason is None}
        left = [(one.stream_id, one.epoch, one.seq) for one in found if one.reason is not None]
        assert sorted([*joined, *left]) == sorted(map(key, rows))


def test_joined_frames_come_with_their_columns(spark: SparkSession, tmp_path: Path) -> None:
    """A struct for each stream, by the names that are given; offsets move what is compared."""
    rows = recording(7, seconds=1.0)
    make_lake(tmp_path / "lake", rows)
    frames = load(spark, tmp_path / "lake")
    pairs = join_streams(frames, STREAMS[:2], by="seq", names=["left", "right"]).orderBy("tuple").collect()
    payloads = {key(one): one["payload"] for one in rows}
    assert len(pairs) > 10
    for pair in pairs:
        assert pair.left.seq == pair.right.seq
        for one in (pair.left, pair.right):
            assert bytes(one.payload) == payloads[one.stream_id, one.epoch, one.seq]
    moved = join_streams(frames, STREAMS[:2], by="seq", offsets=(0, 2)).select("stream_10000.seq", "stream_10001.seq")
    assert {left - right for left, right in moved.collect()} == {2}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"by": "name"}, "seq, time or latest"),
        ({"by": "time"}, "tolerance"),
        ({"by": "seq", "tolerance": 1.0}, "tolerance"),
        ({"by": "time", "tolerance": -1.0}, "tolerance"),
        ({"by": "seq", "offsets": (1,)}, "offsets"),
        ({"by": "latest", "offsets": (1, 1)}, "offsets"),
        ({"by": "seq", "streams": [10_000]}, "two streams"),
        ({"by": "seq", "streams": [10_000, 10_000]}, "each once"),
        ({"by": "seq", "names": ["a"]}, "names"),
        ({"by": "seq", "names": ["a", "a"]}, "names"),
    ],
)
def test_wrong_arguments_are_refused(spark: SparkSession, options: dict[str, Any], text: str) -> None:
    frames = spark.createDataFrame([], "stream_id BIGINT, epoch BIGINT, seq BIGINT, time TIMESTAMP, received_ns BIGINT")
    with pytest.raises(ConfigError, match=text):
        join_streams(frames, **({"streams": [10_000, 10_001]} | options))


def test_the_ancestors_of_frames_are_found(spark: SparkSession, tmp_path: Path) -> None:
    """Exact against a walk over all links, also around loops and to frames that were not recorded."""
    chance = random.Random(5)
    links = [(child, parent) for child in range(20, 60) for parent in chance.sample(range(1, child), 2)]
    links += [(1, 59), (2, 999)]  # a loop, and an id without a frame
    rows = [row(stream_id=10_000 + one % 3, seq=one, trace_id=one) for one in range(1, 60)]
    lake = make_lake(tmp_path / "lake", rows)
    write_rows(lake, "traces", [(1, 10_000 + child % 3, 1, child, child, parent) for child, parent in links * 2])
    wanted = [59, 40, 1, 777]
    expected = set()
    for start in wanted:
        depths = {start: 0}
        for depth in itertools.count(1):
            reached = {parent for child, parent in links if depths.get(child) == depth - 1} - set(depths)
            depths |= dict.fromkeys(reached, depth)
            if not reached:
                break
        for one, depth in depths.items():
            place = (10_000 + one % 3, 1, one) if one < 60 else (None, None, None)
            expected.add((start, depth, one, *place))
    found = lineage(load(spark, lake.path), load(spark, lake.path, "traces"), wanted).drop("time").collect()
    assert sorted(map(tuple, found), key=str) == sorted(expected, key=str)
    one_step = lineage(load(spark, lake.path), load(spark, lake.path, "traces"), [59], max_depth=1)
    assert one_step.count() == 1 + len({parent for child, parent in links if child == 59})
