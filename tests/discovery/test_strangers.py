# SPDX-License-Identifier: Apache-2.0
"""What strangers can do to a registry on the network, whose ports anybody may send to: docs/trust.md says the same."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest

from tensorpool import aeron
from tensorpool.control import Commander, CommandRejected
from tensorpool.discovery.config import RegistryConfig
from tensorpool.discovery.registry import Registry
from tensorpool.wire import Message, decode
from tensorpool.wire.control import DataSourceMeta, FrameProgress, ShmPoolAnnounce
from tensorpool.wire.discovery import DiscoveryRequest, DiscoveryResponse
from tests.discovery.conftest import announce, request
from tests.support.disc_client import unused_udp_channel
from tests.support.processes import wait_until

STREAM = 62_900
TAG = "service:discovery:r1"


class Network:
    """A registry that receives everything over UDP, and the streams that anybody can publish on."""

    def __init__(self, aeron_dir: str, **section: Any) -> None:
        self.requests, self.announces, self.commands = (unused_udp_channel() for _ in range(3))
        driver = {
            "instance_id": "a",
            "control_channel": "aeron:ipc",
            "control_stream_id": STREAM,
            "announce_channel": self.announces,
            "announce_stream_id": STREAM + 1,
            "metadata_channel": self.announces,
            "metadata_stream_id": STREAM + 1,
        }
        own = {"channel": self.requests, "stream_id": STREAM + 2, "instance_id": "r1", "drivers": [driver], **section}
        control = {
            "control_channel": self.commands,
            "control_stream_id": STREAM + 3,
            "status_stream_id": STREAM + 4,
            "command_timeout_ms": 60_000,
        }
        self.config = RegistryConfig.load(environ={}, overrides={"discovery": own, "control": control})
        self.registry = Registry(self.config, aeron_dir=aeron_dir)
        self.client = aeron.connect(aeron_dir)
        self._answers: list[DiscoveryResponse] = []
        self._responses = self.client.add_subscription("aeron:ipc", STREAM + 5)
        self._asking = self.publish(self.requests, STREAM + 2)
        self.announcing = self.publish(self.announces, STREAM + 1)

    def publish(self, channel: str, stream_id: int, more: str = "") -> aeron.Publication:
        """A session of its own."""
        publication = self.client.add_publication(channel + more, stream_id, exclusive=True)
        wait_until(lambda: publication.is_connected, "the registry listens")
        return publication

    def ask(self) -> list[int]:
        """The streams that the registry knows, as it answers an honest client."""
        before = len(self._answers)
        message = request(response_stream_id=STREAM + 5).encode()
        wait_until(lambda: self._asking.offer(message), "the request is sent")

        def is_answered() -> bool:
            self._responses.poll(lambda data, info: self._answers.append(decode(data)), 100)  # type: ignore[arg-type]
            return len(self._answers) > before

        wait_until(is_answered, "an answer")
        return [result.stream_id for result in self._answers[-1].results]

    def close(self) -> None:
        self.registry.close()
        self.client.close()


@pytest.fixture
def network(shared_media_driver: aeron.MediaDriver) -> Iterator[Network]:
    network = Network(shared_media_driver.aeron_dir)
    yield network
    network.close()


@pytest.mark.parametrize("kind", [DiscoveryRequest, ShmPoolAnnounce, DataSourceMeta, FrameProgress])
def test_long_messages_take_no_memory(network: Network, kind: type[Message]) -> None:
    """Of known kinds and of others, from several sessions; an honest announce and an honest client are served."""
    head = struct.pack("<HHHHI", 24, kind.TEMPLATE_ID, kind.SCHEMA_ID, 1, 7)
    channel = network.requests if kind is DiscoveryRequest else network.announces
    stream_id = STREAM + (2 if kind is DiscoveryRequest else 1)
    for _ in range(4):
        stranger = network.publish(channel, stream_id, "|term-length=64m")
        wait_until(lambda it=stranger: it.offer(head.ljust(8_000_000, b".")), "it sends 8 MB")
    wait_until(lambda: network.announcing.offer(announce(7).encode()), "an honest announce is sent")
    wait_until(lambda: network.ask() == [7], "it is known")
    counts = network.registry.provider.counts
    if kind is not FrameProgress:
        wait_until(lambda: counts["messages_too_long"] == 4, "all are counted")
    streams = network.registry.provider._connection.streams
    assert streams is not None
    assert [it.partial_sessions for it in streams._subscriptions.values()] == [0] * len(streams._subscriptions)


def test_strangers_may_ask_how_it_is_and_command_nothing(network: Network) -> None:
    """Queries change nothing; everything else needs control.allow_remote."""
    commander = Commander(network.client, network.config.control)
    assert commander.send(TAG, "ping").value == "pong"
    assert commander.send(TAG, "status").json["service"] == "discovery"
    for key in ("drain", "log-level"):
        with pytest.raises(CommandRejected, match=r"control\.allow_remote"):
            commander.send(TAG, key)
    assert network.registry.is_running


def test_forged_announces_are_bounded(shared_media_driver: aeron.MediaDriver) -> None:
    """A stranger can name streams that do not exist, up to discovery.max_streams, and no more."""
    network = Network(shared_media_driver.aeron_dir, max_streams=20)
    try:
        for stream_id in range(1, 60):
            message = announce(stream_id).encode()
            wait_until(lambda data=message: network.announcing.offer(data), "a forged announce is sent")
        wait_until(lambda: len(network.ask()) == 20, "the directory is full")
    finally:
        network.close()
