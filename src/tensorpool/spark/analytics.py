# SPDX-License-Identifier: Apache-2.0
"""What a recording, or a live stream, was like: rates, gaps, latency and pixels; and how its consumers kept up.

Payloads are measured once, by the executors' Python, and leave it as one small row per frame; the rest is Spark SQL.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as fn

from tensorpool.errors import ConfigError
from tensorpool.lake import Lake
from tensorpool.lake.durations import parse_duration_ns
from tensorpool.spark.functions import (
    FORGOTTEN_AFTER,
    MIB,
    STATS_DDL,
    by_window,
    frame_stats,
    latency_columns,
    latency_figures,
    stats_of,
    window_start,
    with_lag,
)

type Source = DataFrame | Lake | Path | str

SECOND_NS: Final = 1_000_000_000
BYTES_PER_TASK: Final = 32 << 20  # a second's work: few enough to start, small enough to see progress


def stats(
    source: Source,
    window: str | None = None,
    *,
    streams: tuple[int | str, ...] = (),
    full_scale: float | None = None,
    watermark: str = FORGOTTEN_AFTER,
) -> DataFrame:
    """Figures per stream, or per stream and window of capture time, of frames or of a lake. Streams and batches.

    >>> stats("/data/lake", "1s").select("stream_id", "start_ns", "hz", "lost", "p99_ms").show()     # doctest: +SKIP

    Columns: `stream_id`, `start_ns` and `seconds` (of the window, or from the first frame to the last), `frames`, `hz`,
    `gaps` and `lost` (breaks in the seqs, and frames missing there), `bytes`, `mib_per_s`, `p50_ms`, `p90_ms`, `p99_ms`
    and `max_ms` (from capture to receipt), `values`, `nan`, `min`, `mean`, `max`, `std`, `min_int`, `max_int` and
    `saturated` (see `frame_stats`). A gap belongs to the window of the frame after it. On a stream, which needs a
    `window`, the gaps are those that the source has counted. The result of `frame_stats` is taken as well: keep it to
    ask for several windows.
    """
    frames = frames_of(source, streams)
    if frames.isStreaming and window is None:
        raise ConfigError("stats(window)", None, "a window such as 1s: a stream has no end at which to sum it up")
    measured = frames if "spread" in frames.columns else frame_stats(frames, full_scale=full_scale)
    if measured.isStreaming:
        counted = measured.withColumn("lost", fn.col("dropped_before")).withColumn("base", fn.lit(0.0))
    else:
        counted = _with_breaks(measured)
    timed, keys, seconds = by_window(counted, window, watermark)
    grouped = timed.groupBy(*keys).agg(*_figures())
    return grouped.select(*_columns(seconds)).drop("window")


def frames_of(source: Source, streams: tuple[int | str, ...] = (), table: str = "frames") -> DataFrame:
    """A table of a lake, or the DataFrame itself. Raises ConfigError where there is no lake, or no such stream."""
    if isinstance(source, DataFrame):
        for name in streams:
            if isinstance(name, str):
                raise ConfigError("streams", name, "ids: the rows of a DataFrame have no names of streams")
        return source.where(fn.col("stream_id").isin(*streams)) if streams else source
    lake = source if isinstance(source, Lake) else Lake.open(source)
    spark = SparkSession.active()
    reader = spark.read.format("tensorpool.lake").option("table", table)
    if streams:
        reader = reader.option("streams", ",".join(map(str, lake.resolve(streams))))
    return reader.load(lake.uri)


def measured_frames(lake: Lake, streams: tuple[int, ...] = (), *, full_scale: float | None = None) -> DataFrame:
    """`frame_stats` of a lake. Tasks read the files themselves: no payload passes through the JVM."""
    uri = lake.uri
    shares = [
        (file.path, index, count)
        for file in lake.files()
        if (not streams or file.stream_id in streams) and file.frames
        for count in [-(-file.bytes // BYTES_PER_TASK)]
        for index in range(count)
    ]

    def of_shares(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        opened = Lake.open(uri)
        for batch in batches:
            for share in batch.to_pylist():
                for frames in opened.read_frames(share["path"], share=(share["index"], share["count"])):
                    yield stats_of(frames, full_scale)

    tasks = SparkSession.active().createDataFrame(shares, "path STRING, index INT, count INT")
    return tasks.repartition(max(1, len(shares))).mapInArrow(of_shares, STATS_DDL)


def _with_breaks(measured: DataFrame) -> DataFrame:
    """How many seqs are missing before each frame, and a mean near which those of the stream lie."""
    order = Window.partitionBy("stream_id").orderBy("epoch", "seq")
    whole = order.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    is_same = fn.lag("epoch").over(order) == fn.col("epoch")
    missing = fn.greatest(fn.lit(0), fn.col("seq") - fn.lag("seq").over(order) - 1)
    return measured.withColumn("lost", fn.when(is_same, missing).otherwise(0)).withColumn(
        "base", fn.first("mean", ignorenulls=True).over(whole)
    )


def _figures() -> list[Column]:
    """Spreads of frames add up with those of their means, taken from a common base so that nothing cancels."""
    apart, weight = fn.col("mean") - fn.col("base"), fn.col("values")
    when = fn.coalesce(fn.col("timestamp_ns"), fn.col("received_ns"))
    return [
        fn.count("*").alias("frames"),
        fn.sum("nbytes").alias("bytes"),
        fn.sum("lost").alias("lost"),
        fn.count_if(fn.col("lost") > 0).alias("gaps"),
        fn.min(when).alias("first_ns"),
        fn.max(when).alias("last_ns"),
        *latency_figures(),
        fn.sum("values").alias("values"),
        fn.sum("nan").alias("nan"),
        fn.min("min").alias("min"),
        fn.max("max").alias("max"),
        fn.min("min_int").alias("min_int"),
        fn.max("max_int").alias("max_int"),
        fn.first("base", ignorenulls=True).alias("base"),
        fn.sum(weight * apart).alias("apart"),
        fn.sum(weight * apart * apart).alias("apart_squared"),
        fn.sum("spread").alias("spread"),
        fn.sum(fn.col("saturated") * weight).alias("saturated"),
        fn.sum(fn.when(fn.col("saturated").isNotNull(), weight)).alias("scaled"),
    ]


def _columns(window_s: float | None) -> list[Column | str]:
    shift = fn.try_divide(fn.col("apart"), fn.col("values"))
    spread = fn.greatest(fn.lit(0.0), fn.col("spread") + fn.col("apart_squared") - fn.col("apart") * shift)
    span_s = (fn.col("last_ns") - fn.col("first_ns")) / SECOND_NS
    seconds = span_s if window_s is None else fn.lit(window_s)
    steps = fn.col("frames") - 1 if window_s is None else fn.col("frames")
    nbytes = fn.col("bytes") * fn.try_divide(steps, fn.col("frames"))
    return [
        "stream_id",
        fn.col("first_ns").alias("start_ns") if window_s is None else window_start(),
        seconds.alias("seconds"),
        "frames",
        fn.try_divide(steps, seconds).alias("hz"),
        "gaps",
        "lost",
        "bytes",
        fn.try_divide(nbytes, seconds * MIB).alias("mib_per_s"),
        *latency_columns(),
        "max_ms",
        "values",
        "nan",
        "min",
        (fn.col("base") + shift).alias("mean"),
        "max",
        fn.sqrt(fn.try_divide(spread, fn.col("values"))).alias("std"),
        "min_int",
        "max_int",
        fn.try_divide(fn.col("saturated"), fn.col("scaled")).alias("saturated"),
    ]


def qos(source: Source, window: str | None = None, *, streams: tuple[int | str, ...] = ()) -> DataFrame:
    """How producers and consumers did, by what they reported; of the table "qos", live or of a lake. Batches.

    >>> qos("/data/lake").select("stream_id", "client_id", "lag_max", "drops_gap").show()            # doctest: +SKIP

    One row per stream, epoch and client, and per window of time where one is given: `reports`, `start_ns`, `seconds`,
    `hz` (seqs a second), `lag_mean`, `lag_max` and `lag_last` (frames behind the producer; null for producers), and
    `drops_gap` and `drops_late`, which count from the client's beginning.
    """
    reports = frames_of(source, streams, "qos")
    if reports.isStreaming:
        raise ConfigError("qos", "a streaming DataFrame", "a batch; on a stream use functions.consumer_lag")
    reported = with_lag(reports)
    groups = ["stream_id", "epoch", "kind", "client_id"]
    if window is not None:
        length_ns = parse_duration_ns("window", window)
        reported = reported.withColumn("window_ns", fn.expr(f"received_ns - received_ns % {length_ns}"))
        groups.append("window_ns")
    seconds = (fn.col("last_ns") - fn.col("first_ns")) / SECOND_NS
    grouped = reported.groupBy(*groups).agg(
        fn.count("*").alias("reports"),
        fn.min("received_ns").alias("first_ns"),
        fn.max("received_ns").alias("last_ns"),
        (fn.max("seq") - fn.min("seq")).alias("seqs"),
        fn.avg("lag").alias("lag_mean"),
        fn.max("lag").alias("lag_max"),
        fn.max_by("lag", "received_ns").alias("lag_last"),
        fn.max("drops_gap").alias("drops_gap"),
        fn.max("drops_late").alias("drops_late"),
    )
    return grouped.select(
        "stream_id",
        "epoch",
        "kind",
        "client_id",
        fn.col("first_ns" if window is None else "window_ns").alias("start_ns"),
        seconds.alias("seconds"),
        "reports",
        fn.try_divide(fn.col("seqs"), seconds).alias("hz"),
        "lag_mean",
        "lag_max",
        "lag_last",
        "drops_gap",
        "drops_late",
    )
