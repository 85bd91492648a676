# SPDX-License-Identifier: Apache-2.0
"""A fleet on one machine: three drivers in three network namespaces, each with its own media driver, and two registries
that they reach over UDP only.

Streams appear, vanish after their driver was killed, and come back with a later epoch; both registries say the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import tensorpool as tp
from tensorpool.client.discovery_query import DiscoveredStream
from tests.support.driver_process import DriverProcess
from tests.support.hosts import Network
from tests.support.patience import PATIENT
from tests.support.processes import Process, private_directory, wait_until

PERIOD_MS: Final = 500
HOSTS: Final = ("h1", "h2", "h3")
SUBNET: Final = "10.213.77"
BRIDGE_ADDRESS: Final = f"{SUBNET}.1"
PORTS: Final = (40_123, 40_223)  # where the registries hear requests; announces one above
PRODUCE: Final = """
import sys
import numpy as np
import tensorpool as tp

with tp.connect(sys.argv[1], config=sys.argv[2]) as client:
    with client.producer(sys.argv[3], create=True, timeout=60) as producer:
        producer.set_metadata({}, tags=["fleet", sys.argv[3]])
        print(producer.stream_id, flush=True)
        sys.stdin.readline()
"""


class Host:
    """A driver and a producer behind a network namespace, with directories of their own."""

    def __init__(self, name: str, namespace: str, folder: Path) -> None:
        self.name = name
        self.folder = folder / name
        self.folder.mkdir()
        self.aeron_dir = str(self.folder / "aeron")
        self._enter = f"import os, sys; os.setns(os.open('/run/netns/{namespace}', os.O_RDONLY), os.CLONE_NEWNET); "
        registries = "".join(
            f'[[discovery.registries]]\nchannel = "aeron:udp?endpoint={BRIDGE_ADDRESS}:{port}"\n'
            f'announce_channel = "aeron:udp?endpoint={BRIDGE_ADDRESS}:{port + 1}"\n'
            f"announce_stream_id = {2001 + HOSTS.index(name)}\n"
            for port in PORTS
        )
        self.config = self.folder / "driver.toml"
        self.config.write_text(
            f'[driver]\ninstance_id = "{name}"\nstream_id_range = "20000-29999"\n'
            f'[shm]\nbase_dir = "{self.folder}/shm"\n'
            f"[policies]\nallow_dynamic_streams = true\nannounce_period_ms = {PERIOD_MS}\n"
            "lease_keepalive_interval_ms = 500\n"
            "[profiles.default]\nheader_nslots = 8\npayload_pools = [{pool_id = 1, stride_bytes = 4096}]\n" + registries
        )
        self.processes: list[Process] = []

    def run(self, script: str, *arguments: str) -> DriverProcess:
        """A Python process in the namespace."""
        process = DriverProcess("-c", self._enter + "exec(sys.argv.pop(1))", script, *arguments)
        self.processes.append(process)
        return process

    def start(self) -> DriverProcess:
        arguments = ["driver", "--config", str(self.config), "--aeron-dir", self.aeron_dir, "--log-level", "error"]
        script = "from tensorpool.cli.main import main; main()"
        driver = self.run(script, *arguments)
        assert driver.read_line().startswith(f"driver {self.name} serves")
        return driver

    def produce(self, name: str) -> int:
        """The id of a new stream."""
        producer = self.run(PRODUCE, self.aeron_dir, str(self.config), name)
        line = producer.read_line()
        assert line.isdecimal(), line + producer.finish()[1]
        return int(line)

    def reap(self) -> None:
        for process in self.processes:
            process.reap()


def registry_file(folder: Path, port: int) -> Path:
    drivers = "".join(
        f'[[discovery.drivers]]\ninstance_id = "{host}"\ncontrol_channel = "aeron:ipc?term-length=4m"\n'
        f'control_stream_id = 1000\nannounce_channel = "aeron:udp?endpoint={BRIDGE_ADDRESS}:{port + 1}"\n'
        f"announce_stream_id = {2001 + index}\n"
        f'metadata_channel = "aeron:udp?endpoint={BRIDGE_ADDRESS}:{port + 1}"\nmetadata_stream_id = {2001 + index}\n'
        for index, host in enumerate(HOSTS)
    )
    path = folder / f"registry{port}.toml"
    path.write_text(
        f'[discovery]\nchannel = "aeron:udp?endpoint={BRIDGE_ADDRESS}:{port}"\nstream_id = 1000\n'
        f"announce_period_ms = {PERIOD_MS}\n" + drivers
    )
    return path


class Fleet:
    """Two registries here, three hosts over there, and a client of each registry."""

    def __init__(self, folder: Path) -> None:
        self.network = Network(*HOSTS, subnet=SUBNET, own_address=BRIDGE_ADDRESS)
        self.hosts: dict[str, Host] = {}
        self.registries: list[DriverProcess] = []
        self.clients: list[tp.Client] = []
        try:
            self._start(folder)
        except BaseException:
            self.close()
            raise

    def _start(self, folder: Path) -> None:
        self._folder = folder
        for which in (0, 1):
            self.start_registry(which)
        self.hosts = {host: Host(host, self.network.namespace(host), folder) for host in HOSTS}
        for port in PORTS:
            settings = {
                "discovery.channel": f"aeron:udp?endpoint={BRIDGE_ADDRESS}:{port}",
                "discovery.stream_id": 1000,
            }
            config = tp.DriverConfig.load(environ=PATIENT, overrides=settings)
            self.clients.append(tp.connect(str(folder / f"aeron{port}"), config=config))

    def start_registry(self, which: int) -> None:
        port = PORTS[which]
        path = registry_file(self._folder, port)
        arguments = ["discovery", "--config", str(path), "--aeron-dir", str(self._folder / f"aeron{port}")]
        registry = DriverProcess("-m", "tensorpool", *arguments, "--log-level", "error")
        self.registries[which:] = [registry, *self.registries[which + 1 :]]
        line = registry.read_line()
        assert line.startswith("registry answers at"), line

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for host in self.hosts.values():
            host.reap()
        for registry in self.registries:
            registry.reap()
        self.network.close()

    def streams(self, which: int = 0, **filters: str) -> list[DiscoveredStream]:
        return self.clients[which].discover(filters.get("name"), driver_instance_id=filters.get("driver"))

    def drivers(self, which: int = 0) -> set[str]:
        return {stream.driver_instance_id for stream in self.streams(which)}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with private_directory() as folder:
        fleet = Fleet(folder)
        yield fleet
        fleet.close()


def test_streams_of_a_fleet_appear_vanish_and_come_back_later(fleet: Fleet) -> None:
    """From driver to registry over UDP alone; a killed driver's go with the expiry, and return with a later epoch."""
    drivers = {name: host.start() for name, host in fleet.hosts.items()}
    ids = {name: host.produce(f"camera/{name}") for name, host in fleet.hosts.items()}
    wait_until(
        lambda: all(tags_at(fleet, which) == {f"camera/{name}" for name in HOSTS} for which in (0, 1)),
        "all streams are known to both registries, by name and with their tags",
    )
    wait_until(lambda: fleet.streams(0) == fleet.streams(1), "they say the same")
    streams = {stream.driver_instance_id: stream for stream in fleet.streams()}
    assert {name: stream.stream_id for name, stream in streams.items()} == ids
    assert all(stream.producer_id != 0 for stream in streams.values())

    before = streams["h2"].epoch
    drivers["h2"].kill()
    wait_until(lambda: fleet.drivers() == fleet.drivers(1) == {"h1", "h3"}, "the killed driver's stream is gone")
    fleet.hosts["h2"].processes[-1].reap()  # its producer
    fleet.hosts["h2"].start()
    fleet.hosts["h2"].produce("camera/h2")
    wait_until(lambda: "camera/h2" in names_at(fleet, 0) & names_at(fleet, 1), "it is back")
    assert fleet.streams(name="camera/h2")[0].epoch > before


def test_a_stream_of_another_host_is_listed_and_refused_with_the_way_out(fleet: Fleet) -> None:
    """Its control endpoint is IPC over there; the same words here are another driver, or none."""
    with pytest.raises(tp.TensorPoolError, match="of another host; a bridge brings it here"):
        fleet.clients[0].consumer("camera/h1", timeout=60)


def test_ls_lists_the_fleet(fleet: Fleet) -> None:
    """With the filters of the registry and those of the client."""
    wait_until(lambda: fleet.drivers() == set(HOSTS), "the registry knows them all")
    environment = os.environ | {"DISCOVERY_CHANNEL": f"aeron:udp?endpoint={BRIDGE_ADDRESS}:40123"}
    arguments = ["ls", "--driver", "h3", "--tag", "fleet", "--json", "--aeron-dir", fleet.clients[0].aeron_dir]
    done = subprocess.run(
        [sys.executable, "-m", "tensorpool", *arguments], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    (stream,) = json.loads(done.stdout)
    assert (stream["driver_instance_id"], stream["data_source_name"]) == ("h3", "camera/h3")


def test_a_registry_that_is_killed_and_restarted_knows_everything_again(fleet: Fleet) -> None:
    """Soft state: nothing has to be kept. Meanwhile the other one answers."""
    fleet.registries[1].kill()
    wait_until(lambda: len(fleet.streams(0)) == 3, "the other one answers")
    fleet.start_registry(1)
    wait_until(lambda: same_answers(fleet), "both say the same again")


def same_answers(fleet: Fleet) -> bool:
    try:
        return fleet.streams(1) == fleet.streams(0)
    except tp.TensorPoolError:
        return False  # its media driver is still on its way


def tags_at(fleet: Fleet, which: int) -> set[str]:
    """The names of streams that have the tags of their producer."""
    streams = [(stream.data_source_name or "", set(stream.tags)) for stream in fleet.streams(which)]
    return {name for name, tags in streams if tags == {"fleet", name}}


def names_at(fleet: Fleet, which: int) -> set[str]:
    return {stream.data_source_name or "" for stream in fleet.streams(which)}
