# SPDX-License-Identifier: Apache-2.0
"""Where frames came from, as a DataFrame: the ancestors of many frames at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as fn

from tensorpool.client.lineage import MAX_DEPTH
from tensorpool.errors import ConfigError

_PLACE: Final = ("stream_id", "epoch", "seq", "time")


def lineage(
    frames: DataFrame, links: DataFrame, trace_ids: Iterable[int] | DataFrame, *, max_depth: int = MAX_DEPTH
) -> DataFrame:
    """The frames from which frames were made: a row for each ancestor of each of `trace_ids`.

    >>> links = spark.read.format("tensorpool.lake").option("table", "traces").load("/data/lake")   # doctest: +SKIP
    >>> lineage(frames, links, results.select("trace_id")).show()                                   # doctest: +SKIP

    `frames` and `links` (table "traces") are of a lake, or live. `trace_ids` is a list, or a DataFrame with a column of
    that name. Columns: `trace_id`, `depth` (0: the frame itself; of several ways to an ancestor, the shortest),
    `ancestor_id`, and `stream_id`, `epoch`, `seq` and `time` of each frame that has that id, null where none is there.
    Batches. Raises ConfigError.
    """
    if frames.isStreaming or links.isStreaming:
        raise ConfigError("lineage", "a streaming DataFrame", "batches")
    if not isinstance(trace_ids, DataFrame):
        trace_ids = frames.sparkSession.createDataFrame([(one,) for one in trace_ids], "trace_id BIGINT")
    edges = links.select(fn.col("trace_id").alias("ancestor_id"), "parent_id").distinct().cache()
    due = trace_ids.select("trace_id", fn.col("trace_id").alias("ancestor_id")).where("trace_id > 0").distinct()
    due = found = due.withColumn("depth", fn.lit(0)).localCheckpoint()
    for depth in range(1, max_depth + 1):
        following = due.join(edges, "ancestor_id").select("trace_id", fn.col("parent_id").alias("ancestor_id"))
        news = following.distinct().join(found, ["trace_id", "ancestor_id"], "left_anti")
        due = news.withColumn("depth", fn.lit(depth)).localCheckpoint()  # plans do not grow with the depth
        if due.isEmpty():
            break
        found = found.union(due)
    place = ["ancestor_id", *_PLACE[:3]]
    recorded = frames.where("trace_id IS NOT NULL").withColumnRenamed("trace_id", "ancestor_id").select(*place, "time")
    linked = links.withColumnRenamed("trace_id", "ancestor_id").select(*place).distinct()
    alone = linked.join(recorded, place, "left_anti").withColumn("time", fn.lit(None).cast("timestamp"))
    with_frames = found.join(recorded.unionByName(alone), "ancestor_id", "left")
    return with_frames.select("trace_id", "depth", "ancestor_id", *_PLACE)
