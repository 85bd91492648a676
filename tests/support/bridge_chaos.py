# SPDX-License-Identifier: Apache-2.0
"""Kills the processes of a bridge, and starts them again as a service manager would.

The other processes stay as they are, and have to find each other again.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from tests.support.crossing import Crossing
from tests.support.driver_process import DriverProcess
from tests.support.hosts import BridgeEnd, Host
from tests.support.processes import wait_until

PAUSE_S: Final = 1.0
POLICIES: Final = {"announce_period_ms": 300, "lease_keepalive_interval_ms": 500}  # who was killed is missed soon


class BridgeChaos:
    """Kills by name: `sender`, `receiver`, `left driver`, `right driver`, `left media`, `right media`, `producer`."""

    def __init__(self, hosts: Crossing, chance: random.Random) -> None:
        self.hosts = hosts
        self.hits: Counter[str] = Counter()
        self.slowest_s: dict[str, float] = {}
        self._history: list[str] = []
        self._chance = chance
        self._kills: dict[str, Callable[[], None]] = {
            "sender": lambda: self._restart_bridge(hosts.sender),
            "receiver": lambda: self._restart_bridge(hosts.receiver),
            "left driver": lambda: self._restart_driver(hosts.left),
            "right driver": lambda: self._restart_driver(hosts.right),
            "left media": lambda: self._restart_media(hosts.left),
            "right media": lambda: self._restart_media(hosts.right),
            "producer": self._restart_producer,
        }

    def hit_everybody(self) -> None:
        """Each once, in random order, some before the others have recovered."""
        names = list(self._kills)
        self._chance.shuffle(names)
        for index, name in enumerate(names):
            self.hit(name)
            if index % 2:
                self.recover()

    def run(self, seconds: float) -> None:
        """Anybody, until the time is over."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self.hit(self._chance.choice(list(self._kills)))
            if self._chance.random() < 0.7:
                self.recover()

    def hit(self, name: str) -> None:
        self._history.append(name)
        self.hits[name] += 1
        self._kills[name]()

    def recover(self) -> None:
        """Frames of the producer that is there now arrive."""
        begin_s = time.monotonic()
        try:
            wait_until(self._is_tended, "everybody is there")
            self.hosts.wait_for_frames()
        except AssertionError as error:
            error.add_note(f"killed so far: {', '.join(self._history)}")
            raise
        took_s = round(time.monotonic() - begin_s, 1)
        last = self._history[-1]
        self.slowest_s[last] = max(self.slowest_s.get(last, 0.0), took_s)

    def settle(self) -> dict[str, Any]:
        """Wait until everything has recovered. Returns figures."""
        self.recover()
        self.hosts.settle()
        for client in (*self.hosts.left.clients, *self.hosts.right.clients):
            assert not client.complaints(), f"{client.name}: {client.complaints()}"
        mapped = self.hosts.consumer.mapped_epochs
        assert mapped == sorted(mapped), mapped
        assert len(mapped) > 1, "a receiver that starts again brings an epoch of its own"
        ended = self.hosts.consumer.end()
        return {
            "hits": dict(self.hits),
            "slowest recovery in s": self.slowest_s,
            "received": ended["received"],
            "missed": sum(ended["drops"].values()),
            "epochs": ended["epochs"],
        }

    def _is_tended(self) -> bool:
        """A driver that gave way to another media driver is started again, as by its service manager."""
        words = [host.tend_driver() for host in (self.hosts.left, self.hosts.right)]
        return not any(words)

    def _kill(self, process: DriverProcess) -> None:
        process.kill()
        until_s = time.monotonic() + self._chance.choice((0.0, self._chance.uniform(0.0, PAUSE_S)))
        wait_until(lambda: time.monotonic() >= until_s, "time passes")

    def _restart_bridge(self, end: BridgeEnd) -> None:
        assert end.process is not None
        self._kill(end.process)
        end.start()

    def _restart_driver(self, host: Host) -> None:
        self._kill(host.driver)
        host.start_driver()

    def _restart_media(self, host: Host) -> None:
        self._kill(host.media)
        host.start_media()

    def _restart_producer(self) -> None:
        self._kill(self.hosts.producer)
        self.hosts.produce()
