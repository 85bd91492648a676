# SPDX-License-Identifier: Apache-2.0
"""The provider in a driver and as a registry, over real Aeron: what it hears, whom it answers, what a flood costs."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.discovery.config import RegistryConfig
from tensorpool.discovery.registry import Registry
from tensorpool.wire import Message, decode
from tensorpool.wire.discovery import DiscoveryResponse, DiscoveryStatus
from tests.discovery.conftest import IPC, announce, described, named, request
from tests.support.processes import wait_until

REQUESTS = ("aeron:ipc?term-length=1m", 62_000)
_stream_ids = itertools.count(62_100)


class Fleet:
    """A registry for two drivers that are not there: this test announces for them."""

    def __init__(self, aeron_dir: str, **section: Any) -> None:
        self.places = {name: (IPC, next(_stream_ids)) for name in ("a", "b")}
        drivers = [
            {
                "instance_id": name,
                "control_channel": IPC,
                "control_stream_id": place[1] + 1000,
                "announce_channel": place[0],
                "announce_stream_id": place[1],
                "metadata_channel": place[0],
                "metadata_stream_id": place[1],
            }
            for name, place in self.places.items()
        ]
        own: dict[str, Any] = {"channel": REQUESTS[0], "stream_id": next(_stream_ids), "drivers": drivers}
        self.registry = Registry(
            RegistryConfig.load(environ={}, overrides={"discovery": own | section}), aeron_dir=aeron_dir
        )
        self.client = aeron.connect(aeron_dir)
        self._publications = {
            name: self.client.add_publication(*place, exclusive=True) for name, place in self.places.items()
        }
        self._requests = self.client.add_publication(own["channel"], own["stream_id"], exclusive=True)
        self.response_stream_id = next(_stream_ids)
        self._responses = self.client.add_subscription("aeron:ipc", self.response_stream_id)
        self.received: list[DiscoveryResponse] = []

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.registry.provider.counts)

    def say(self, name: str, message: Message) -> None:
        wait_until(lambda: self._publications[name].offer(message.encode()), "the announce stream takes it")

    def announce(self, name: str, stream_id: int, **changed: Any) -> None:
        self.say(name, announce(stream_id, announce_timestamp_ns=time.monotonic_ns(), **changed))

    def send(self, data: bytes) -> None:
        wait_until(lambda: self._requests.offer(data), "the request stream takes it")

    def ask(self, *tags: str, **changed: Any) -> DiscoveryResponse:
        request_id = next(_stream_ids)
        fields = {"request_id": request_id, "response_stream_id": self.response_stream_id} | changed
        self.send(request(*tags, **fields).encode())
        wait_until(lambda: self.answers(request_id), "an answer")
        return self.answers(request_id)[0]

    def answers(self, request_id: int) -> list[DiscoveryResponse]:
        self._responses.poll(lambda data, info: self.received.append(decode(data)), 100)  # type: ignore[arg-type]
        return [response for response in self.received if response.request_id == request_id]

    def close(self) -> None:
        self.client.close()
        self.registry.close()


@pytest.fixture
def fleet(shared_media_driver: aeron.MediaDriver) -> Iterator[Fleet]:
    fleet = Fleet(shared_media_driver.aeron_dir, client_requests_per_s=10_000, requests_per_s=10_000, expiry_ms=30_000)
    yield fleet
    fleet.close()


def test_a_registry_answers_for_all_its_drivers(fleet: Fleet) -> None:
    """Each stream under the driver whose announce stream it came on."""
    fleet.announce("a", 7)
    fleet.announce("b", 7, epoch=3)
    fleet.say("b", named(7, "cam", 3))
    fleet.say("b", described(7, tags="x"))
    wait_until(lambda: fleet.ask("x", data_source_name="cam").results, "the name is known")
    results = fleet.ask().results
    assert [(result.driver_instance_id, result.epoch) for result in results] == [("a", 1), ("b", 3)]
    assert [result.driver_control_stream_id for result in results] == [
        place[1] + 1000 for place in fleet.places.values()
    ]


def test_a_description_that_is_repeated_is_known_again_after_a_later_epoch(fleet: Fleet) -> None:
    """The very same bytes: they count for the epoch that they come in."""
    fleet.announce("a", 7, epoch=1)
    wait_until(lambda: fleet.ask().results, "the stream is known")
    for epoch in (1, 2, 3):
        fleet.announce("a", 7, epoch=epoch)
        for _ in range(3):
            fleet.say("a", named(7, "cam", 9))
            fleet.say("a", described(7, tags="x"))
        wait_until(lambda: fleet.ask("x", data_source_name="cam").results, "name and tags are known")
        assert fleet.ask().results[0].epoch == epoch
    fleet.announce("a", 7, epoch=10)
    wait_until(lambda: fleet.ask().results[0].epoch == 10, "the later epoch is known")
    assert fleet.ask("x").results == ()


def test_old_announces_in_a_log_of_this_host_are_passed_over(fleet: Fleet) -> None:
    """Older than the expiry by the clock that they name, or from the future."""
    now_ns = time.monotonic_ns()
    fleet.say("a", announce(7, announce_timestamp_ns=now_ns - 31_000_000_000))
    fleet.say("a", announce(8, announce_timestamp_ns=now_ns + 60_000_000_000))
    fleet.announce("a", 9)
    wait_until(lambda: fleet.ask().results, "the fresh one is known")
    assert [result.stream_id for result in fleet.ask().results] == [9]
    assert fleet.counts["announces_too_old"] == 2


def test_hostile_requests_are_answered_by_nothing_and_cost_little(fleet: Fleet) -> None:
    """Endpoints by the thousand, absurd groups, noise: an honest client is answered meanwhile, memory stays bounded."""
    for stream_id in range(1, 200):
        fleet.announce("a", stream_id)
    wait_until(lambda: len(fleet.ask().results) == 199, "all streams are known")
    before_kib = _rss_kib()
    noise = [
        request(response_channel="").encode(),
        request(response_channel="aeron:tcp?endpoint=1.2.3.4:5").encode(),
        request(response_channel="aeron:udp?endpoint=no-such-host.invalid:5").encode(),
        request(response_stream_id=2**31).encode(),
        request(*["t"] * 3000, response_channel="").encode(),
        request(*["t" * 1000] * 60).encode(),
        request().encode()[:20],
        request().encode()[:-1],
        b"",
        os.urandom(64),
    ]
    for number in range(2000):
        fleet.send(noise[number % len(noise)])
        fleet.send(request(response_channel=f"aeron:udp?endpoint=192.0.2.1:{10_000 + number}").encode())
        if number % 500 == 499:
            started = time.monotonic()
            assert len(fleet.ask().results) == 199
            assert time.monotonic() - started < 5
    assert len(fleet.ask(stream_id=7).results) == 1
    counts = fleet.counts
    assert counts["responses_opened"] <= 64 + 64 + 32 * 30
    assert counts["responses_not_opened"] > 500
    assert len(fleet.registry.provider._connection.streams.responder) <= 64  # type: ignore[union-attr]
    assert _rss_kib() - before_kib < 100_000
    assert not [response for response in fleet.received if response.status is DiscoveryStatus.ERROR]


def test_a_client_that_asks_too_often_is_passed_over_alone(shared_media_driver: aeron.MediaDriver) -> None:
    """Another one is answered meanwhile."""
    fleet = Fleet(shared_media_driver.aeron_dir, client_requests_per_s=5)
    try:
        for _ in range(200):
            fleet.send(request(client_id=13, response_stream_id=fleet.response_stream_id).encode())
        assert fleet.ask(client_id=14).status is DiscoveryStatus.OK
        assert fleet.counts["requests_over_rate"] >= 150
    finally:
        fleet.close()


def test_a_flood_of_queries_costs_no_lease(shm_dir: Path) -> None:
    """The driver's duty cycle goes on beside its provider: attaches are granted, leases kept."""
    overrides = {"policies.lease_keepalive_interval_ms": 500, "discovery.requests_per_s": 100_000}
    with tp.local(overrides=overrides) as pool, pool.connect() as client:
        producer = client.producer("cam", create=True)
        asker = aeron.connect(pool.aeron_dir)
        requests = asker.add_publication(pool.config.discovery.channel, pool.config.discovery.stream_id, exclusive=True)
        is_over = threading.Event()

        def flood() -> None:
            number = 0
            while not is_over.is_set():
                number += 1
                requests.offer(request(client_id=number, response_stream_id=63_000).encode())
                if number % 50 == 0:
                    time.sleep(0.001)

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            for _ in range(5):
                with client.consumer(producer.stream_id) as consumer:
                    assert consumer.stream_id == producer.stream_id
            assert pool.discovery is not None
            counts = pool.discovery.counts
            wait_until(lambda: counts["requests"] + counts["responses_beyond_queue"] > 100, "a flood of requests")
            assert producer.is_active
        finally:
            is_over.set()
            thread.join()
            asker.close()


def test_a_provider_comes_back_with_its_media_driver(shm_dir: Path) -> None:
    """As clients do, by itself."""
    aeron_dir = str(shm_dir / "aeron")
    media_driver = aeron.MediaDriver(aeron_dir)
    fleet = Fleet(aeron_dir)
    try:
        fleet.client.close()
        media_driver.close()
        provider = fleet.registry.provider
        wait_until(lambda: provider._connection.streams is None, "the loss is noticed")
        media_driver = aeron.MediaDriver(aeron_dir)
        wait_until(lambda: provider._connection.streams is not None, "it is back")
    finally:
        fleet.close()
        media_driver.close()


def _rss_kib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4
