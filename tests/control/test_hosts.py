# SPDX-License-Identifier: Apache-2.0
"""Our own services as services: the driver, a registry, and one with a connection of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.bridge.bridge import Bridge
from tensorpool.bridge.config import BridgeConfig
from tensorpool.control import (
    Commander,
    CommandError,
    CommandRejected,
    CommandUnanswered,
    ControlConfig,
    Service,
    ServiceAgent,
)
from tensorpool.control.common_commands import add_common_commands
from tensorpool.discovery.config import RegistryConfig
from tensorpool.discovery.registry import Registry
from tests.support.disc_client import unused_udp_channel
from tests.support.processes import wait_until

DRIVER = "service:driver:driver-01"
LONG = 30.0
SMALL = {
    "profiles.default": {"header_nslots": 4, "payload_pools": [{"pool_id": 1, "stride_bytes": 64}]},
    "policies.shutdown_timeout_ms": 50,
}
DRIVERS = [{"instance_id": "a", "control_channel": "aeron:ipc?term-length=4m", "control_stream_id": 2000}]


@contextmanager
def commanding(aeron_dir: str, config: ControlConfig | None = None) -> Iterator[Commander]:
    client = aeron.connect(aeron_dir)
    try:
        yield Commander(client, config or ControlConfig(command_timeout_ms=60_000))
    finally:
        client.close()


def answers(commander: Commander, tag: str) -> bool:
    """Whether a service is there: what was said before it came is not for it."""
    try:
        return commander.send(tag, "ping", timeout=0.2).value == "pong"
    except CommandError:
        return False


def test_a_driver_is_a_service_that_can_be_drained() -> None:
    """With nothing configured: it answers, tells what it holds, and ends in order after its answer."""
    with tp.local(overrides=SMALL) as pool, commanding(pool.aeron_dir) as commander:
        assert commander.send(DRIVER, "ping", timeout=LONG).value == "pong"
        with pool.connect() as client, client.producer("camera", create=True):
            status = commander.send(DRIVER, "status", timeout=LONG).json
            assert (status["streams"], status["leases"], status["state"]) == (1, 1, "running")
        with pytest.raises(
            CommandRejected, match="knows drain, leases, log-level, ping, provision, reload, revoke, status"
        ):
            commander.send(DRIVER, "pause", timeout=LONG)
        assert commander.send(DRIVER, "drain", timeout=LONG).value == "draining"
        wait_until(lambda: not pool.is_running, "the driver ends")


def test_a_driver_may_be_no_service() -> None:
    """`control.enabled = false` leaves it without a tag."""
    with (
        tp.local(overrides=SMALL | {"control.enabled": False}) as pool,
        commanding(pool.aeron_dir) as commander,
        pytest.raises(CommandUnanswered, match=r"with control\.enabled"),
    ):
        commander.send(DRIVER, "ping", timeout=0.05)


def test_a_registry_is_a_service_that_can_be_drained(shared_media_driver: aeron.MediaDriver) -> None:
    """By the instance that its configuration names."""
    overrides = {"discovery": {"drivers": DRIVERS, "instance_id": "r1", "stream_id": 52_001}, "control": {
        "control_stream_id": 52_002, "status_stream_id": 52_003}}  # fmt: skip
    config = RegistryConfig.load(environ={}, overrides=overrides)
    directory = shared_media_driver.aeron_dir
    with Registry(config, aeron_dir=directory) as registry, commanding(directory, config.control) as commander:
        status = commander.send("service:discovery:r1", "status", timeout=LONG).json
        assert (status["service"], status["drivers"], status["streams"]) == ("discovery", 1, 0)
        assert commander.send("service:discovery:r1", "drain", timeout=LONG).value == "draining"
        wait_until(lambda: not registry.is_running, "the registry ends")


def test_a_bridge_is_a_service_that_can_be_paused_and_drained() -> None:
    """By its instance; a pause is seen in its state, whichever process ordered it."""
    channel = unused_udp_channel()
    section = {"instance_id": "left", "role": "sender", "payload_channel": channel, "payload_stream_id": 50_000}
    section |= {"control_channel": channel, "control_stream_id": 50_001}
    mapping = {"source_stream_id": 20_000, "dest_stream_id": 30_000}
    config = BridgeConfig.load(environ={}, bridge=section, mappings=[mapping])
    with (
        tp.local(overrides=SMALL) as pool,
        Bridge(config, driver=pool.config, aeron_dir=pool.aeron_dir).start() as bridge,
        commanding(pool.aeron_dir) as commander,
    ):
        tag = "service:bridge:left"
        wait_until(lambda: answers(commander, tag), "the bridge is connected")
        assert commander.send(tag, "pause", timeout=LONG).value == "paused"
        assert bridge.is_paused
        status = commander.send(tag, "status", timeout=LONG).json
        assert (status["state"], status["mappings"]) == ("paused", ["20000->30000"])
        bridge.resume()
        assert commander.send(tag, "status", timeout=LONG).json["state"] == "running"
        assert commander.send(tag, "resume", timeout=LONG).value == "already running"
        assert commander.send(tag, "drain", timeout=LONG).value == "draining"
        wait_until(lambda: not bridge.is_running, "the bridge ends")


def test_a_service_outlives_its_media_driver(shm_dir: Path) -> None:
    """One with a connection of its own waits for the next media driver and answers there."""
    directory = str(shm_dir / "aeron")
    service = Service("x")
    add_common_commands(service, status=dict, drain=lambda: None)
    with aeron.AgentRunner(ServiceAgent(service, directory), aeron.SleepingIdle()):
        for _ in range(2):
            with aeron.MediaDriver(directory), commanding(directory) as commander:
                wait_until(lambda: service.is_bound, "the service is there")
                assert commander.send("service:x", "ping", timeout=LONG).value == "pong"
            wait_until(lambda: not service.is_bound, "the service sees it gone")
