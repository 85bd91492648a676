# SPDX-License-Identifier: Apache-2.0
"""A driver and a registry that read their configuration again while clients use them: SIGHUP, and the command."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.control import Commander, CommandFailed, ControlConfig
from tests.support.chaos import events_of
from tests.support.driver_process import Deployment, DriverProcess
from tests.support.processes import Process, wait_until
from tests.support.toml import toml_text

FRONT, REAR, SIDE = 10_000, 10_001, 10_002
type Connect = Callable[[aeron.MediaDriver], aeron.Client]

TAG = "service:driver:driver-01"


@pytest.fixture
def deployment(media_driver: aeron.MediaDriver, shm_dir: Path) -> Deployment:
    return Deployment(shm_dir, media_driver.aeron_dir, streams=[FRONT, REAR])


@pytest.fixture
def client(deployment: Deployment, process: DriverProcess) -> Iterator[tp.Client]:
    wait_until(deployment.config_path.exists, "the driver's file")
    config = tp.DriverConfig.load(deployment.config_path, environ={})
    with tp.connect(deployment.aeron_dir, config=config) as client:
        yield client


def rewrite(deployment: Deployment, *, streams: dict[str, int] | None = None, **policies: int) -> None:
    """The operator edits the file."""
    if streams is not None:
        deployment.tables["streams"] = {name: {"stream_id": id, "profile": "small"} for name, id in streams.items()}
    deployment.tables["policies"].update(policies)
    deployment.config_path.write_text(toml_text(deployment.tables), encoding="utf-8")


def names(client: tp.Client) -> set[str]:
    return {found.data_source_name or "" for found in client.discover(timeout=60)}


def test_sighup_changes_streams_beside_a_producer_that_goes_on(
    deployment: Deployment, process: DriverProcess, client: tp.Client, log: Path
) -> None:
    """The lease lasts, a new stream is found by its name, a retired one is gone, and a bad file is refused."""
    with client.producer(FRONT, timeout=60) as producer, client.consumer(FRONT, timeout=60) as consumer:
        rewrite(deployment, streams={"front": FRONT, "side": SIDE}, max_leases=3)
        process.send(signal.SIGHUP)
        wait_until(lambda: events_of(log, "reloaded"), "the configuration is applied")
        (entry,) = events_of(log, "reloaded")
        assert f"+ streams.side.stream_id = {SIDE}" in entry["changes"]
        assert "~ policies.max_leases = 3 (was 10000)" in entry["changes"]
        line = f"- streams.s{REAR}.stream_id = {REAR}"
        wait_until(lambda: line in log.read_text().splitlines(), "the difference is printed, too")
        wait_until(lambda: names(client) == {"front", "side"}, "discovery has the new names")
        wait_until(lambda: deployment.epochs(REAR) == [], "the retired stream's memory is removed")
        refused = pytest.raises(tp.AttachRefused, match=r"3 leases are held \(policies.max_leases\)")
        with client.producer("side", timeout=60), refused:
            client.consumer("side", timeout=1)
        with pytest.raises(tp.AttachRefused, match="does not exist"):
            client.consumer(REAR, timeout=1)

        rewrite(deployment, streams={"side": SIDE}, announce_period_ms=50)
        process.send(signal.SIGHUP)
        wait_until(lambda: events_of(log, "reload_refused"), "it is refused")
        (entry,) = events_of(log, "reload_refused")
        assert "policies.announce_period_ms = 50 (was 100) needs a restart" in entry["error"]
        assert f'stream "front" ({FRONT}) is in use by ' in entry["error"]
        assert f"pid {os.getpid()}" in entry["error"]

        deployment.config_path.write_text("[streams")
        process.send(signal.SIGHUP)
        wait_until(lambda: len(events_of(log, "reload_refused")) == 2, "it is refused")
        producer.publish(np.arange(3))
        frame = consumer.poll(60)
        assert frame is not None
        assert frame.copy().tolist() == [0, 1, 2]
    code, _ = process.terminate()
    assert code == 0


def test_the_command_answers_with_the_difference_or_with_every_reason(
    deployment: Deployment, client: tp.Client, media_driver: aeron.MediaDriver, connect: Connect
) -> None:
    """`event send … reload`; a stream whose profile changes has the new ring for its next producer."""
    with client.producer(FRONT, timeout=60) as producer:
        commander = Commander(connect(media_driver), ControlConfig())
        assert commander.send(TAG, "reload", timeout=60).value == "nothing differs"
        deployment.tables["profiles"]["small"] = {
            "header_nslots": 8,
            "payload_pools": [{"pool_id": 1, "stride_bytes": 1 << 16}],
        }
        rewrite(deployment)
        lines = str(commander.send(TAG, "reload", timeout=60).value).splitlines()
        assert "~ profiles.small.payload_pools[0].stride_bytes = 65536 (was 256)" in lines
        assert "- profiles.small.payload_pools[1].pool_id = 7" in lines
        assert producer.max_frame_bytes == 4096
        producer.close()
        with client.producer(FRONT, timeout=60) as again:
            assert again.max_frame_bytes == 65536
        rewrite(deployment, streams={"other": 10_005}, lease_keepalive_interval_ms=5)
        with pytest.raises(CommandFailed, match=r"lease_keepalive_interval_ms = 5 .was 200. needs a restart"):
            commander.send(TAG, "reload", timeout=60)


REGISTRY = """
[discovery]
channel = "aeron:ipc?term-length=1m"
stream_id = 7300
"""
ENTRY = """
[[discovery.drivers]]
instance_id = "{name}"
control_channel = "{channel}"
control_stream_id = {stream_id}
announce_period_ms = 100
"""


def test_a_registry_follows_the_drivers_that_its_file_names_now(
    deployment: Deployment, process: DriverProcess, media_driver: aeron.MediaDriver, connect: Connect, shm_dir: Path
) -> None:
    """One is added by SIGHUP and its streams are listed; one is taken away by the command and they are not."""
    channel, stream_id = deployment.control
    absent = ENTRY.format(name="absent", channel=channel, stream_id=7301)
    present = ENTRY.format(name="driver-01", channel=channel, stream_id=stream_id)
    path = shm_dir / "registry.toml"
    path.write_text(REGISTRY + absent)
    arguments = ("-m", "tensorpool", "discovery", "--config", str(path), "--aeron-dir", media_driver.aeron_dir)
    with Process(*arguments, "--log-level", "error") as registry:
        assert "for 1 drivers" in registry.read_line()
        commander = Commander(connect(media_driver), ControlConfig())

        def streams() -> int:
            found = commander.send("service:discovery", "status", timeout=60).json
            return int(found["streams"])

        assert streams() == 0
        path.write_text(REGISTRY + absent + present)
        registry.send(signal.SIGHUP)
        assert registry.read_line().startswith("+ discovery.drivers[1]")
        wait_until(lambda: streams() == 2, "the streams of the driver are listed")
        path.write_text(REGISTRY + absent)
        assert "- discovery.drivers[1].instance_id = driver-01" in str(
            commander.send("service:discovery", "reload", timeout=60).value
        )
        wait_until(lambda: streams() == 0, "they are listed no more")
        path.write_text(REGISTRY.replace("7300", "7302") + absent)
        with pytest.raises(CommandFailed, match=r"discovery.stream_id = 7302 .was 7300. needs a restart"):
            commander.send("service:discovery", "reload", timeout=60)
