# SPDX-License-Identifier: Apache-2.0
"""A service on the test's own thread, and peers of it that know the wire alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tensorpool import aeron
from tensorpool.control import ControlConfig, Service
from tests.control.peer import EventPeer, new_endpoints


class Bench:
    """Services and their peers at one media driver, on streams of their own."""

    def __init__(self, aeron_dir: str, **settings: Any) -> None:
        self.aeron_dir = aeron_dir
        self.config = ControlConfig(**new_endpoints() | settings)
        self.client = aeron.connect(aeron_dir)
        self._services: list[Service] = []
        self._peers: list[EventPeer] = []

    def service(self, name: str = "recorder", instance: str | None = "lab1", **more: Any) -> Service:
        service = Service(name, instance, config=self.config, **more)
        self._services.append(service)
        return service

    def peer(self, **more: Any) -> EventPeer:
        config = self.config
        places = {"control": (config.control_channel, config.control_stream_id)}
        places |= {"status": (config.status_channel, config.status_stream_id)}
        peer = EventPeer(self.aeron_dir, schema_id=config.schema_id, turn=self.turn, **places | more)
        self._peers.append(peer)
        return peer

    def turn(self) -> int:
        """Every service's duty cycle, once."""
        return sum(service.invoke() for service in self._services if service.is_bound)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        for service in self._services:
            service.unbind()
        self.client.close()


type MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench(shared_media_driver: aeron.MediaDriver) -> Iterator[MakeBench]:
    benches: list[Bench] = []

    def make(**settings: Any) -> Bench:
        benches.append(Bench(shared_media_driver.aeron_dir, **settings))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    return make_bench()
