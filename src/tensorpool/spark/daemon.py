# SPDX-License-Identifier: Apache-2.0
"""The parent of Spark's Python workers, with everything imported that our tasks and planners need.

Spark forks workers from it: one that finds its modules there starts in milliseconds instead of seconds, and collects no
garbage among them after every task. Chosen by the setting `spark.python.daemon.module`.

Spark starts one for every kind of work, half a dozen before the first row of a query, each with its own copy of pyspark
in an archive ahead of all else on the path: Python compiles that anew each time, which takes longer than all the rest.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from typing import Final

MODULES: Final = (
    "pyarrow.compute",
    "pyarrow.parquet",
    "pyspark.worker",
    "tensorpool.lake.row_staging",
    "tensorpool.lake.staging",
    "tensorpool.spark.lake_reader",
    "tensorpool.spark.lake_writer",
    "tensorpool.spark.live_source",
    "tensorpool.spark.sink",
)

_ARCHIVE: Final = os.path.join("pyspark", "python", "lib", "pyspark.zip")


def without_archive(path: list[str]) -> list[str]:
    """A module path without pyspark's archive, where the package that it lies in, which is the same, is on it too.

    >>> without_archive(["/lib/pyspark/python/lib/pyspark.zip", "/lib"])
    ['/lib']
    >>> without_archive(["/opt/spark/python/lib/pyspark.zip", "/lib"])
    ['/opt/spark/python/lib/pyspark.zip', '/lib']
    """
    return [entry for entry in path if not (entry.endswith(_ARCHIVE) and entry.removesuffix(_ARCHIVE)[:-1] in path)]


def main() -> None:
    """Run as Spark's daemon does."""
    sys.path[:] = without_archive(sys.path)
    daemon = importlib.import_module("pyspark.daemon")
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    daemon.manager()


if __name__ == "__main__":
    main()
