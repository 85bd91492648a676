# SPDX-License-Identifier: Apache-2.0
"""A Spark session with everything set, or our formats for a session that is already there."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Final

from pyspark.sql import SparkSession

from tensorpool.errors import ConfigError
from tensorpool.spark.live import TensorpoolDataSource

SETTINGS: Final = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "4096",
    "spark.sql.execution.pythonUDF.arrow.enabled": "true",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "4",
    "spark.driver.memory": "2g",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}


def session(master: str = "local[*]", app_name: str = "tensorpool", **conf: str) -> SparkSession:
    """A session in which format("tensorpool") and format("tensorpool.lake") work.

    >>> spark = session()                                                                      # doctest: +SKIP
    >>> frames = spark.readStream.format("tensorpool").option("streams", "camera/front").load()   # doctest: +SKIP

    Settings come as keyword arguments with "__" for the dots: session(spark__driver__memory="4g"). Raises ConfigError
    when no Java is found.
    """
    require_java()
    # Workers take the first python3 on PATH unless they are told; it need not have our packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master).appName(app_name)
    chosen = SETTINGS | {name.replace("__", "."): str(value) for name, value in conf.items()}
    for name, value in chosen.items():
        builder = builder.config(name, value)
    spark: SparkSession = builder.getOrCreate()
    register(spark)
    return spark


def register(spark: SparkSession) -> None:
    """Add our formats to a session."""
    spark.dataSource.register(TensorpoolDataSource)


def require_java() -> None:
    """Raises ConfigError with what to install where there is no Java."""
    home = os.environ.get("JAVA_HOME")
    if (home and os.access(os.path.join(home, "bin", "java"), os.X_OK)) or shutil.which("java"):
        return
    raise ConfigError(
        "JAVA_HOME", home, "a Java 17 or newer for Spark; on Debian: apt-get install openjdk-17-jre-headless"
    )
