# SPDX-License-Identifier: Apache-2.0
"""More than one machine, as docs/clusters.md has it: a recorder per host into one bucket, and Spark that reads it.

A host is a driver, a camera and `tensorpool record --direct`, the commands of that page. In the long form every host is
a network namespace, and Spark a standalone cluster in a third one; root and iproute2 are needed there.
"""

from __future__ import annotations

import base64
import contextlib
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tensorpool.cli.test_pattern import Checked
from tensorpool.lake import Lake
from tensorpool.lake.payloads import array_of
from tests.spark.test_cluster import PATIENCE_S, Cluster, run_application
from tests.support.buckets import bucket_server, make_bucket
from tests.support.hosts import Network
from tests.support.processes import Process, private_directory
from tests.support.toml import toml_text

HOSTS = ("left", "right")
FRAMES = 40
DRIVER = {"stream_id_range": "20000-29999"}
POLICIES = {"allow_dynamic_streams": True, "default_profile": "default"}
RING = {"header_nslots": 1024, "payload_pools": [{"pool_id": 1, "stride_bytes": 1024}]}

APPLICATION = """
import base64, json, sys
from tensorpool.spark import session
from tensorpool.spark.analytics import stats

master, options, folder, conf = sys.argv[1:5]
lake = json.loads(options)["lake"]
spark = session(master, **json.loads(conf))
frames = spark.read.format("tensorpool.lake").option("maxBytesPerPartition", "4k").load(lake)
rows = [row.asDict() for row in frames.select("stream_id", "seq", "shape", "payload").collect()]
for row in rows:
    row["payload"] = base64.b64encode(row["payload"]).decode()
figures = {row.stream_id: row.frames for row in stats(lake).select("stream_id", "frames").collect()}
executors = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
print(json.dumps({"rows": rows, "figures": figures, "executors": executors}))
spark.stop()
"""


class Machine:
    """A host: its driver, its camera `NAME/camera`, and the recorder that writes it to a lake."""

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str]) -> None:
        self.stream = f"{name}/camera"
        own = {"AERON_DIR": "aeron", "SHM_BASE_DIR": "shm", "TENSORPOOL_SPOOL_DIR": "spool"}
        self._environment = {key: str(folder / part) for key, part in own.items()} | dict(environment)
        self._config = folder / "driver.toml"
        self._config.write_text(toml_text({"driver": DRIVER, "policies": POLICIES, "profiles": {"default": RING}}))
        self._committed = 0
        self._undo = contextlib.ExitStack()

    def start(self, lake: str) -> None:
        driver = self._start("driver", "--config", str(self._config))
        said = [driver.read_line()]
        while not said[-1].startswith("driver "):
            assert said[-1], f"the driver ended: {said}"
            said.append(driver.read_line())
        self._start("produce", self.stream, "--shape", "6x7x3", "--rate", "100", "--pattern", "checked")
        self._recorder = self._start("record", self.stream, "--to", lake, "--direct", "--json", "--trigger", "0.3")

    def record_more(self) -> None:
        """Until so many more frames are committed."""
        wanted = self._committed + FRAMES
        while self._committed < wanted:
            line = self._recorder.read_line()
            assert line or self._recorder.is_running, "the recorder ended"
            event = json.loads(line) if line.startswith("{") else {}
            self._committed = event.get("frames", self._committed)

    def finish(self) -> dict[str, Any]:
        """Ctrl-C; the summary of its recording."""
        self._recorder.send(signal.SIGINT)
        code, output = self._recorder.finish()
        assert code == 0, output
        summary: dict[str, Any] = json.loads(output.splitlines()[-1])
        return summary

    def close(self) -> None:
        self._undo.close()

    def _start(self, *arguments: str) -> Process:
        return self._undo.enter_context(Process("-m", "tensorpool", *arguments, **self._environment))


@contextlib.contextmanager
def recorded(
    lake: str, environment: Mapping[str, str], inside: Callable[[str], contextlib.AbstractContextManager[None]]
) -> Iterator[dict[str, int]]:
    """How many frames each host has recorded to a lake, by the name of the stream; nothing is lost on the way."""
    with contextlib.ExitStack() as stack:
        machines = []
        for name in HOSTS:
            machine = Machine(name, stack.enter_context(private_directory()), environment)
            stack.callback(machine.close)
            with inside(name):
                machine.start(lake)
            machines.append(machine)
        for machine in machines * 2:  # each commits while the other does
            machine.record_more()
        totals = {machine.stream: machine.finish() for machine in machines}
        assert all(total["adds_up"] for total in totals.values()), totals
        yield {stream: total["frames"] for stream, total in totals.items()}


def check(rows: list[dict[str, Any]], names: Mapping[str, int], frames: Mapping[str, int]) -> None:
    """Every frame of both hosts is there once, without a gap between them, and right to the last byte."""
    pattern = Checked()
    for stream, stream_id in names.items():
        own = sorted((row for row in rows if row["stream_id"] == stream_id), key=lambda row: row["seq"])
        assert len(own) == frames[stream] >= FRAMES
        first = own[0]["seq"]
        assert [row["seq"] for row in own] == list(range(first, first + len(own)))
        for row in own:
            assert pattern.find(array_of(row["payload"], "UINT8", row["shape"]), row["seq"]) is None


def ids_of(lake: str) -> dict[str, int]:
    """The streams of a lake by their names."""
    return {name: stream_id for name, (stream_id,) in Lake.open(lake).names().items()}


def test_recorders_of_two_hosts_share_a_lake_in_a_bucket(
    spark: SparkSession, bucket: str, s3_environment: dict[str, str]
) -> None:
    """Both commit to one log at once; Spark reads all, or the stream of one host by its name."""
    lake = f"{bucket}/lake"
    with recorded(lake, s3_environment, lambda _: contextlib.nullcontext()) as frames:
        names = ids_of(lake)
        assert set(names) == {"left/camera", "right/camera"}
        reader = spark.read.format("tensorpool.lake")
        rows = reader.load(lake).select("stream_id", "seq", "shape", "payload").collect()
        check([row.asDict() for row in rows], names, frames)
        left = reader.option("streams", "left/camera").load(lake)
        assert left.where("seq >= 0").count() == frames["left/camera"]


@pytest.mark.soak  # the same without namespaces and cluster: above
@pytest.mark.timeout(PATIENCE_S + 50)
def test_a_cluster_reads_what_two_hosts_have_recorded_into_one_bucket(
    quick_jvm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three hosts that share nothing but a network: two with cameras, and one with the bucket and the cluster."""
    with Network(*HOSTS, "head") as network, network.inside("head"):
        address = network.addresses["head"]
        with bucket_server(tmp_path / "s3.log", address) as environment:
            make_bucket("lakes", environment["AWS_ENDPOINT_URL"])
            lake = "s3://lakes/lake"
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            with recorded(lake, environment, network.inside) as frames:
                cluster = Cluster(tmp_path)
                try:
                    executor = {f"spark.executorEnv.{name}": value for name, value in environment.items()}
                    result = run_application(cluster, APPLICATION, {"lake": lake}, tmp_path, **executor)
                finally:
                    cluster.close()
            names = ids_of(lake)
    for row in result["rows"]:
        row["payload"] = base64.b64decode(row["payload"])
    check(result["rows"], names, frames)
    assert result["figures"] == {str(names[stream]): count for stream, count in frames.items()}
    assert result["executors"] == 2
