# SPDX-License-Identifier: Apache-2.0
"""A real standalone cluster on loopback, one master and two workers: source, recorder and analytics at 16 MiB a frame.

The application is a process of its own: a JVM has one SparkContext, and the other tests have theirs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.lake import Lake
from tensorpool.lake.files import read_frames
from tests.spark.conftest import QUIET
from tests.support.deployment import consumer_leases, options_of, pattern, publish
from tests.support.jvm import quick_options
from tests.support.processes import ROOT, Process, wait_until

SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
FRAME_BYTES = 16 << 20
FRAMES = 4
PATIENCE_S = 350

APPLICATION = """
import json, sys
from pyspark.sql.functions import sha2, spark_partition_id
from tensorpool.spark import session, total_of
from tensorpool.spark.analytics import stats
from tensorpool.spark.recorder import Recorder, Settings

master, options, folder, conf = sys.argv[1:5]
options = json.loads(options)
spark = session(master, **json.loads(conf))
live = spark.readStream.format("tensorpool").options(**options, startingOffsets="earliest").load()
rows = live.select("seq", sha2("payload", 256).alias("digest"), spark_partition_id().alias("task"))
found = []
writer = rows.writeStream.foreachBatch(lambda batch, _: found.extend(row.asDict() for row in batch.collect()))
query = writer.option("checkpointLocation", folder + "/checkpoint").trigger(availableNow=True).start()
assert query.awaitTermination(300)
total = total_of(query.recentProgress)

where = {key: value for key, value in options.items() if "." in key}
settings = Settings(trigger_s=0.2, codec="lz4", starting_offsets="earliest", is_warmed_up=False, is_durable=False,
                    aeron_dir=options["aeronDir"], overrides=where)
with Recorder(spark, [int(options["streams"])], folder + "/lake", settings=settings) as recorder:
    while recorder.totals().frames < total.frames:
        recorder.wait(0.1)
recorded = recorder.totals()
figures = stats(folder + "/lake").select("frames", "bytes", "lost", "min", "max", "mean").collect()

executors = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
print(json.dumps({
    "frames": total.frames, "gaps": total.gaps, "executors": executors, "rows": found,
    "recorded": recorded.frames, "adds_up": recorded.adds_up, "figures": [row.asDict() for row in figures],
}))
spark.stop()
"""


class Cluster:
    """A master and two workers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.port = free_port()
        self.master = f"spark://127.0.0.1:{self.port}"
        here = ["--host", "127.0.0.1"]
        self._start("master", "master.Master", *here, "--port", str(self.port), "--webui-port", "0")
        self._wait_for("master", r"I have been elected leader|Starting Spark master", "the master listens")
        for name in ("one", "two"):
            work = str(folder / f"work-{name}")
            more = ["--cores", "1", "--memory", "1g", "--webui-port", "0", "--work-dir", work]
            self._start(name, "worker.Worker", *here, *more, self.master)

    def log(self, name: str) -> str:
        path = self._folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
            process.wait(180)

    def _start(self, name: str, kind: str, *arguments: str) -> None:
        environment = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_JAVA_OPTS": quick_options()}
        with (self._folder / f"{name}.log").open("wb") as log:
            command = [str(SPARK_CLASS), f"org.apache.spark.deploy.{kind}", *arguments]
            self._processes.append(
                subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
            )

    def _wait_for(self, name: str, words: str, what: str) -> None:
        wait_until(lambda: re.search(words, self.log(name)), f"{what}: {self.log(name)[-2000:]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, quick_jvm: None) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.close()


def run_application(
    cluster: Cluster, script: str, options: dict[str, Any], folder: Path, **conf: str
) -> dict[str, Any]:
    """Run a script with the master, its options, a folder and settings; what it prints last is JSON."""
    settings = {
        **QUIET,
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.cores.max": "2",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",  # nothing begins before both are there
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "180s",
        "spark.executor.extraJavaOptions": quick_options(),
        "spark.driver.host": "127.0.0.1",
        "spark.executorEnv.PYTHONPATH": str(ROOT),
        "spark.local.dir": str(folder),
        **conf,
    }
    arguments = [cluster.master, json.dumps(options), str(folder), json.dumps(settings)]
    with Process("-c", script, *arguments, PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1") as process:
        code, output = process.finish(timeout_s=280)
    assert code == 0, output
    # Threads of Spark may have words of their own after it.
    last_result = next(line for line in reversed(output.splitlines()) if line.startswith("{"))
    last: dict[str, Any] = json.loads(last_result)
    return last


@pytest.mark.soak  # the same in one process: test_source.py, test_recorder.py, test_analytics.py
@pytest.mark.timeout(PATIENCE_S + 50)
def test_a_cluster_reads_records_and_measures_frames_of_16_mib_with_workers_of_1_gib(
    cluster: Cluster, pool: tp.Local, client: Client, tmp_path: Path
) -> None:
    """Both executors take part, every byte arrives, in rows and in the lake, and no lease is left."""
    stream_id = 12_005
    with publish(client, stream_id, FRAMES, FRAME_BYTES):
        options = options_of(pool) | {"streams": str(stream_id), "minPartitions": "2"}
        result = run_application(cluster, APPLICATION, options, tmp_path, **{"spark.executor.pyspark.memory": "1g"})
    assert (result["frames"], result["gaps"], result["executors"]) == (FRAMES, 0, 2)
    digests = {seq: hashlib.sha256(pattern(seq, FRAME_BYTES)).hexdigest() for seq in range(FRAMES)}
    assert {row["seq"]: row["digest"] for row in result["rows"]} == digests
    assert {row["task"] for row in result["rows"]} == {0, 1}
    assert (result["recorded"], result["adds_up"]) == (FRAMES, True)
    lake = Lake.open(tmp_path / "lake")
    written = {
        row["seq"]: hashlib.sha256(row["payload"]).hexdigest()
        for file in lake.files()
        for batch in read_frames(lake.full_path(file.path))
        for row in batch.to_pylist()
    }
    assert written == digests
    means = [pattern(seq, FRAME_BYTES).mean() for seq in range(FRAMES)]
    assert result["figures"] == [
        {
            "frames": FRAMES, "bytes": FRAMES * FRAME_BYTES, "lost": 0, "min": 0.0, "max": FRAMES - 1,
            "mean": pytest.approx(sum(means) / FRAMES),
        }
    ]  # fmt: skip
    wait_until(lambda: consumer_leases(pool, stream_id) == 0, "the leases are given back")
