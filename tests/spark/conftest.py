# SPDX-License-Identifier: Apache-2.0
"""One Spark session for all tests of the pipeline, beside the deployment; what a test starts ends with it.

spark       local[2], quiet, real; shared by everybody
query       starts a streaming query that is stopped with the test
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

import tensorpool as tp
from tensorpool.spark import session
from tests.support.buckets import bucket, s3_environment
from tests.support.deployment import client, look_until, options_of, pool, stream
from tests.support.processes import ROOT

__all__ = ["bucket", "client", "pool", "s3_environment", "stream"]

QUIET: Final = {
    "spark.driver.extraJavaOptions": "-Dderby.system.home=/tmp",
    "spark.driver.memory": "1g",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.connect.grpc.binding.address": "127.0.0.1",  # of a Connect server, which `test_connect.py` starts in it
    "spark.connect.grpc.binding.port": "0",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.streaming.pollingDelay": "50ms",  # between two questions whether there is something new
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}


@pytest.fixture(scope="session")
def spark_folder() -> Iterator[Path]:
    """Where the session puts what it needs; not in /dev/shm."""
    path = Path(tempfile.mkdtemp(prefix="tp-test-spark-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def spark(spark_folder: Path, quick_jvm: None, s3_environment: dict[str, str]) -> Iterator[SparkSession]:
    """The session that all tests share. Its workers find the bucket server by the environment of its JVM."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # so that workers find the tests' own functions
    own = {"spark.local.dir": str(spark_folder), "spark.sql.warehouse.dir": str(spark_folder / "warehouse")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment.items():
            patch.setenv(name, value)
        spark = session("local[2]", **QUIET, **own)
    spark.sparkContext.setLogLevel("OFF")
    yield spark
    end(spark)


def end(spark: SparkSession) -> None:
    """Stop a session, and its JVM with it."""
    gateway: Any = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(180)


def read(spark: SparkSession, pool: tp.Local, *streams: int | str, **options: Any) -> DataFrame:
    """A batch read of streams."""
    rows: DataFrame = _with(spark.read.format("tensorpool"), pool, streams, options).load()
    return rows


def read_stream(spark: SparkSession, pool: tp.Local, *streams: int | str, **options: Any) -> DataFrame:
    rows: DataFrame = _with(spark.readStream.format("tensorpool"), pool, streams, options).load()
    return rows


def _with(reader: Any, pool: tp.Local, streams: tuple[int | str, ...], options: dict[str, Any]) -> Any:
    if streams:
        reader = reader.option("streams", ",".join(map(str, streams)))
    for name, value in (options_of(pool) | options).items():
        reader = reader.option(name, value)
    return reader


@pytest.fixture
def query(tmp_path: Path) -> Iterator[Callable[..., StreamingQuery]]:
    """Starts a writer, with a checkpoint of its own unless it has one; stopped with the test."""
    started: list[StreamingQuery] = []

    def start(writer: DataStreamWriter, checkpoint: Path | None = None) -> StreamingQuery:
        where = checkpoint or tmp_path / f"checkpoint-{len(started)}"
        started.append(writer.option("checkpointLocation", str(where)).start())
        return started[-1]

    yield start
    for one in started:
        with contextlib.suppress(Exception):  # of a query that the test has made fail
            one.stop()


def wait_for_progress(query: StreamingQuery, is_it: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    """The first progress of which it is true; fails with the query's own error."""
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        failure = query.exception()
        if failure is not None:
            raise AssertionError(f"the query ended: {failure}")
        found.extend(it for it in map(_as_dict, query.recentProgress) if is_it(it))
        return bool(found)

    look_until(is_there, what)
    return found[0]


def _as_dict(progress: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(progress.json)
    return made
