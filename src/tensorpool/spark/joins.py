# SPDX-License-Identifier: Apache-2.0
"""Streams joined by seq, by time, or by the newest value: `tensorpool.join` over the frames of a lake.

The same state machine decides, in one task that gets a few numbers of each frame, in the order in which the streams
were: payloads are joined by Spark, in as many tasks as it likes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as fn

from tensorpool.client.join_barrier import KeyBarrier, LatestBarrier, Unjoined
from tensorpool.client.joining import By
from tensorpool.errors import ConfigError

BATCH_ROWS: Final = 4096
KEYS_DDL: Final = "tuple BIGINT, input INT, stream_id BIGINT, epoch BIGINT, seq BIGINT, reason STRING"
_KEYS: Final = pa.schema(
    [
        ("tuple", pa.int64()),
        ("input", pa.int32()),
        ("stream_id", pa.int64()),
        ("epoch", pa.int64()),
        ("seq", pa.int64()),
        ("reason", pa.string()),
    ]
)

type Frame = tuple[int, int, int]  # stream_id, epoch, seq


def join_streams(
    frames: DataFrame,
    streams: Sequence[int],
    *,
    by: By,
    tolerance: float | None = None,
    offsets: Sequence[float] = (),
    names: Sequence[str] = (),
) -> DataFrame:
    """The frames of several streams that belong together: a row for each tuple, a struct of columns for each stream.

    >>> pairs = join_streams(frames, [10_000, 10_001], by="time", tolerance=0.005, names=["image", "motion"])
    ...                                                                                       # doctest: +SKIP
    >>> pairs.select("image.seq", "motion.seq", "image.payload")                              # doctest: +SKIP

    As `tensorpool.join` does it for frames that all arrive: `by="seq"` joins equal seqs, `by="time"` frames that were
    taken within `tolerance` seconds of each other, to the microsecond, oldest first, `by="latest"` every frame of the
    first stream with the newest of the others at that time. `offsets` are added to seqs, or in seconds to times.
    Columns are `tuple`, which counts from 0, and one for each of `names` ("stream_<id>" without). `join_keys` says of
    every frame that was not joined why not. Batches. Raises ConfigError.
    """
    if names and (len(names) != len(streams) or len(set(names)) != len(names)):
        raise ConfigError("join_streams(names)", list(names), f"{len(streams)} names, each once")
    keys = join_keys(frames, streams, by=by, tolerance=tolerance, offsets=offsets).where("tuple IS NOT NULL").cache()
    joined = keys.select("tuple").distinct()
    for index, stream in enumerate(streams):
        name = names[index] if names else f"stream_{stream}"
        own = keys.where(fn.col("input") == index).select("tuple", "stream_id", "epoch", "seq")
        whole = own.join(frames.where(fn.col("stream_id") == stream), ["stream_id", "epoch", "seq"])
        columns = [fn.col(f"`{column}`") for column in frames.columns]
        joined = joined.join(whole.select("tuple", fn.struct(*columns).alias(name)), "tuple")
    return joined


def join_keys(
    frames: DataFrame,
    streams: Sequence[int],
    *,
    by: By,
    tolerance: float | None = None,
    offsets: Sequence[float] = (),
) -> DataFrame:
    """Which frames belong together, and why others do not: a row for each frame.

    Columns: `tuple` (null: not joined), `input` (which of `streams`), `stream_id`, `epoch`, `seq` and `reason` (null,
    or why it was not joined, of `JoinStats.unjoined`; WAITING for one whose partner may come after the last frame).
    With `by="latest"` a frame is there for every tuple that it is in. Raises ConfigError.
    """
    if frames.isStreaming:
        raise ConfigError("join_keys", "a streaming DataFrame", "a batch; live streams are joined with tensorpool.join")
    if len(streams) < 2 or len(set(streams)) != len(streams) or not all(type(one) is int for one in streams):
        raise ConfigError("join_keys(streams)", list(streams), "ids of two streams or more, each once")
    if by not in ("seq", "time", "latest"):
        raise ConfigError("join_keys(by)", by, "seq, time or latest")
    if (tolerance is not None) != (by == "time") or (tolerance is not None and not 0 <= tolerance < 1e9):
        raise ConfigError("join_keys(tolerance)", tolerance, "seconds with by='time', and None otherwise")
    if offsets and (len(offsets) != len(streams) or by == "latest"):
        raise ConfigError(
            "join_keys(offsets)", list(offsets), f"one for each of {len(streams)} streams; latest has none"
        )
    shifts = [round(offset * (1e6 if by == "time" else 1)) for offset in offsets]
    tolerance_us = 0 if tolerance is None else round(tolerance * 1e6)

    def decide(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _decided(batches, len(streams), by, tolerance_us, shifts)

    return _in_order(frames, streams).mapInArrow(decide, KEYS_DDL)


def _in_order(frames: DataFrame, streams: Sequence[int]) -> DataFrame:
    """The numbers of all frames as they came: each stream in its own order, streams by their times."""
    index = fn.create_map(*(fn.lit(one) for pair in zip(streams, range(len(streams)), strict=True) for one in pair))
    own = Window.partitionBy("stream_id").orderBy("epoch", "seq")
    numbers = (
        frames.where(fn.col("stream_id").isin(*streams))
        .select("stream_id", "epoch", "seq", "received_ns", fn.unix_micros("time").alias("at_us"))
        .withColumn("input", index[fn.col("stream_id")])
        .withColumn("when", fn.max(fn.coalesce("at_us", fn.col("received_ns") / 1000)).over(own))
    )
    # Of frames of the same moment those of the first stream come last: the others are the newest then.
    return numbers.repartition(1).sortWithinPartitions("when", fn.col("input") == 0, "input", "epoch", "seq")


def _decided(
    batches: Iterable[pa.RecordBatch], count: int, by: By, tolerance_us: int, shifts: Sequence[int]
) -> Iterator[pa.RecordBatch]:
    barrier: KeyBarrier[Frame] | LatestBarrier[Frame]
    barrier = LatestBarrier(count) if by == "latest" else KeyBarrier(count, tolerance=tolerance_us, offsets=shifts)
    epochs: list[int | None] = [None] * count
    rows: list[tuple[int | None, int, int, int, int, str | None]] = []
    tuples = 0
    for batch in batches:
        columns = (batch.column(name).to_pylist() for name in ("input", "stream_id", "epoch", "seq", "at_us"))
        for index, stream_id, epoch, seq, at_us in zip(*columns, strict=True):
            frame = stream_id, epoch, seq
            if by == "seq" and epochs[index] not in (None, epoch):
                barrier.restart(index)
            epochs[index] = epoch
            if by == "time" and at_us is None:
                rows.append((None, index, *frame, Unjoined.NO_TIME.value))
                continue
            barrier.offer(index, at_us if by == "time" else seq, frame, 0)
            while (found := barrier.take()) is not None:
                rows += [(tuples, number, *one, None) for number, one in enumerate(found)]
                tuples += 1
            rows += [(None, left.input_index, *left.item, left.why.value) for left in barrier.left]
            barrier.left = []
        while len(rows) >= BATCH_ROWS:
            yield _batch(rows[:BATCH_ROWS])
            rows = rows[BATCH_ROWS:]
    rows += [(None, index, *one, "WAITING") for index in range(count) for one in barrier.items(index)]
    if rows:
        yield _batch(rows)


def _batch(rows: Sequence[tuple[int | None, int, int, int, int, str | None]]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, _KEYS, strict=True)], schema=_KEYS
    )
