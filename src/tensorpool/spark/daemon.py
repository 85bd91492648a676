# SPDX-License-Identifier: Apache-2.0
"""The parent of Spark's Python workers, with everything imported that our tasks and planners need.

Spark forks workers from it: one that finds its modules there starts in milliseconds instead of seconds, and collects no
garbage among them after every task. Chosen by the setting `spark.python.daemon.module`.
"""

from __future__ import annotations

import gc

import pyarrow.compute
import pyarrow.parquet  # noqa: F401
from pyspark import daemon, worker  # noqa: F401

import tensorpool.spark.lake.intake
import tensorpool.spark.lake.reader
import tensorpool.spark.lake.writer
import tensorpool.spark.live
import tensorpool.spark.sink  # noqa: F401

if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    daemon.manager()
