# SPDX-License-Identifier: Apache-2.0
"""A lake through Spark's own Parquet reader, which reads no column and no row group that a query does not need."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from tensorpool.lake.columns import FRAMES
from tensorpool.lake.lake import Lake
from tensorpool.lake.log_store import LocalStore
from tensorpool.spark.columns import FRAME_DDL


def native_frames(spark: SparkSession, lake: Lake | Path | str) -> DataFrame:
    """The frames that are committed to a lake now, with the columns and types of format "tensorpool.lake".

    >>> native_frames(spark, "/data/lake").where("seq = 4711").select("time", "nbytes").show()     # doctest: +SKIP

    The files are those of this moment: ask again for what is recorded later, and after a compaction or a retention,
    which delete files once their grace is over. Spark reads them itself, so it must know the lake's file system. Raises
    ConfigError where there is no lake.
    """
    opened = lake if isinstance(lake, Lake) else Lake.open(lake)
    root = f"file:{opened.path.absolute()}" if isinstance(opened.store, LocalStore) else opened.uri
    files = [f"{root}/{file.path}" for file in opened.files()]
    if not files:
        return spark.createDataFrame([], FRAME_DDL)
    return spark.read.schema(FRAME_DDL).option("basePath", root).parquet(*files).select(*FRAMES)
