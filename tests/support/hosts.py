# SPDX-License-Identifier: Apache-2.0
"""Hosts on one machine: network namespaces that hang on a switch by veth pairs, as separate as hosts on a wire.

    Network      the namespaces and their addresses; the switch is a namespace too, so that two tests never meet
    Host         a Site (media driver, SHM driver, producers, consumers) whose processes live in a namespace
    BridgeEnd    `tensorpool bridge` in it, as an operator starts it, and the counters that its metrics show

Needs root and iproute2. A process that is started while the thread is inside a namespace stays in it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tensorpool import aeron
from tests.support.driver_process import DriverProcess
from tests.support.processes import wait_until
from tests.support.stream_processes import Consuming, Producing, Site
from tests.support.toml import toml_text

SUBNET: Final = "10.214.0"
SWITCH: Final = f"{SUBNET}.1"  # an address on the switch itself, for a relay
LINK_MTU_BYTES: Final = 9000
PATIENT: Final = {"announce_period_ms": 1_000, "lease_keepalive_interval_ms": 2_000}  # load kills no client
METRICS_PORT: Final = 9464
READY: Final = "tensorpool_bridge_ready 1.0"
SAMPLE: Final = re.compile(r"tensorpool_bridge_(?P<name>\w+?)_total(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)")

_networks = itertools.count()


class Network:
    """Namespaces on one switch. `own_address` puts the switch into this process's own namespace, with that address."""

    def __init__(self, *hosts: str, subnet: str = SUBNET, own_address: str | None = None) -> None:
        self._prefix = f"tp{os.getpid() % 100_000}{chr(97 + next(_networks) % 26)}"
        self.addresses = {host: f"{subnet}.{10 + index}" for index, host in enumerate(hosts)}
        self._is_own = own_address is not None
        self._bridge = f"{self._prefix}b"
        try:
            if not self._is_own:
                self._make_namespace("switch")
            switch = () if self._is_own else ("-n", self.namespace("switch"))
            _ip(*switch, "link", "add", self._bridge, "type", "bridge", "mcast_snooping", "0")
            _ip(*switch, "addr", "add", f"{own_address or f'{subnet}.1'}/24", "dev", self._bridge)
            _ip(*switch, "link", "set", self._bridge, "up")
            for host, address in self.addresses.items():
                self._make_namespace(host)
                name, cable = self.namespace(host), f"{self._prefix}{host}v"[:15]
                _ip(*switch, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
                _ip(*switch, "link", "set", cable, "mtu", str(LINK_MTU_BYTES), "master", self._bridge, "up")
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "mtu", str(LINK_MTU_BYTES), "up")
                _ip("-n", name, "route", "add", "224.0.0.0/4", "dev", "eth0")
        except BaseException:
            self.close()
            raise

    def namespace(self, host: str) -> str:
        return f"{self._prefix}{host}"

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """This thread, what it starts and the sockets that it makes are on that host."""
        with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{self.namespace(host)}") as there:
            os.setns(there.fileno(), os.CLONE_NEWNET)
            try:
                yield
            finally:
                os.setns(home.fileno(), os.CLONE_NEWNET)

    def set_loopback_mtu(self, host: str, mtu: int) -> None:
        _ip("-n", self.namespace(host), "link", "set", "lo", "mtu", str(mtu))

    def close(self) -> None:
        for host in ("switch", *self.addresses):
            subprocess.run(["ip", "netns", "del", self.namespace(host)], check=False, capture_output=True)
        if self._is_own:
            subprocess.run(["ip", "link", "del", self._bridge], check=False, capture_output=True)

    def _make_namespace(self, host: str) -> None:
        _ip("netns", "add", self.namespace(host))
        _ip("-n", self.namespace(host), "link", "set", "lo", "up")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()} (root and iproute2 are needed)")


class Host(Site):
    """A site in a namespace. Its media driver can lose datagrams."""

    def __init__(self, folder: Path, network: Network, name: str, streams: Sequence[int], **options: Any) -> None:
        self.name = name
        self.network = network
        self.address = network.addresses[name]
        folder = folder / name
        folder.mkdir()
        driver = {"instance_id": name, "control_stream_id": None, **options.pop("driver", {})}
        policies = {**PATIENT, **options.pop("policies", {})}
        super().__init__(folder, streams, driver=driver, policies=policies, **options)

    def start_driver(self) -> DriverProcess:
        with self.network.inside(self.name):
            return super().start_driver()

    def produce(self, stream_id: int, **options: float) -> Producing:
        with self.network.inside(self.name):
            return super().produce(stream_id, **options)

    def consume(self, stream_id: int, **options: float) -> Consuming:
        with self.network.inside(self.name):
            return super().consume(stream_id, **options)

    def set_loss(self, rate: float) -> None:
        """Of every datagram that arrives here from now on."""
        self.media.write_line(f"loss {rate}")
        assert self.media.read_line() == f"loses {rate}"

    def bridge(self, bridge: Mapping[str, Any], *mappings: Mapping[str, Any]) -> BridgeEnd:
        """A bridge on this host, not started yet."""
        return BridgeEnd(self, bridge, mappings)

    def media_counters(self) -> dict[str, int]:
        """The media driver's own, by label: what really happened on the wire."""
        with contextlib.closing(aeron.connect(self.deployment.aeron_dir)) as client:
            return {reading.label: reading.value for reading in client.counters()}

    def run(self, process: DriverProcess) -> DriverProcess:
        """Have it reaped with the others."""
        return self._undo.enter_context(process)

    def _launch_media(self) -> tuple[DriverProcess, str]:
        directory = self.deployment.aeron_dir
        settings = self._media_settings[1::2]
        with self.network.inside(self.name):
            process = self.run(DriverProcess("-m", "tests.support.lossy_media", directory, *settings))
        line = process.read_line()
        return process, "" if line == f"media driver at {directory}" else f"{line} {process.finish()}"


class BridgeEnd:
    """One end of a bridge: its file, and one process after the other that runs it."""

    def __init__(self, host: Host, bridge: Mapping[str, Any], mappings: Sequence[Mapping[str, Any]]) -> None:
        self.host = host
        self.config_path = host.folder / f"{bridge['instance_id']}.toml"
        local = {"aeron_dir": host.deployment.aeron_dir, "driver_config": str(host.deployment.config_path)}
        tables = {"bridge": {**local, **bridge}, "mappings": list(mappings)}
        self.config_path.write_text(toml_text(tables), encoding="utf-8")
        self.instance_id = bridge["instance_id"]
        self.process: DriverProcess | None = None

    def start(self) -> DriverProcess:
        """Returns at once."""
        arguments = ["bridge", "--config", str(self.config_path), "--metrics", f"127.0.0.1:{METRICS_PORT}"]
        with self.host.network.inside(self.host.name):
            self.process = self.host.run(DriverProcess("-m", "tensorpool", *arguments, "--log-level", "error"))
        return self.process

    def wait_ready(self) -> None:
        """Every mapping has its lease."""
        wait_until(lambda: self.check() or READY in self._scrape(), f"{self.instance_id} is ready")

    def counters(self, *, mapping: str) -> Counter[tuple[str, str]]:
        """By name and reason."""
        totals: Counter[tuple[str, str]] = Counter()
        for found in SAMPLE.finditer(self._scrape()):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', found["labels"] or ""))
            if labels.get("mapping") == mapping:
                totals[found["name"], labels.get("reason", "")] += int(float(found["value"]))
        return totals

    def check(self) -> None:
        assert self.process is not None
        assert not self.process.has_ended, f"{self.instance_id} ended: {self.process.finish()}"

    def _scrape(self) -> str:
        """Its metrics; nothing while it does not serve them."""
        try:
            with (
                self.host.network.inside(self.host.name),
                socket.create_connection(("127.0.0.1", METRICS_PORT), timeout=30) as connection,
            ):
                connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()
        except (ConnectionRefusedError, ConnectionResetError):
            return ""
