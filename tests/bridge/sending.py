# SPDX-License-Identifier: Apache-2.0
"""A sender turned by hand, with a real source on one side and a receiver that only listens on the other."""

from __future__ import annotations

import itertools
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

import numpy as np

import tensorpool as tp
from tensorpool import aeron
from tensorpool.bridge.bridge import BridgeStreams
from tensorpool.bridge.config import BridgeConfig
from tensorpool.bridge.metrics import Counters
from tensorpool.bridge.publications import Publications
from tensorpool.bridge.sender import Sender
from tensorpool.wire import Message, decode
from tensorpool.wire.bridge import BridgeFrameChunk
from tests.support.processes import wait_until

NSLOTS: Final = 4
STRIDE_BYTES: Final = 262_144
POOL: Final[dict[str, Any]] = {
    "driver.stream_id_range": [20_000, 20_999],
    "policies.announce_period_ms": 1000,
    "policies.max_streams": 1000,
    "profiles.default": {
        "header_nslots": NSLOTS,
        "payload_pools": [{"pool_id": 1, "stride_bytes": 4096}, {"pool_id": 2, "stride_bytes": STRIDE_BYTES}],
    },
}
PAYLOAD_ID, CONTROL_ID, METADATA_ID = 50_000, 50_001, 50_002

_stream_ids = itertools.count(20_000)


def free_endpoint() -> str:
    """An address of this host without a listener."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def pattern(nbytes: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


class Rig:
    """One mapping's sender, its source stream, and everything that came over the network.

    >>> rig.listen()
    >>> rig.settle()             # connected, announced
    >>> rig.publish(pattern(5000))
    >>> rig.until(lambda: rig.frames)
    """

    def __init__(self, pool: tp.Local, client: tp.Client, link: aeron.Client, **keys: Any) -> None:
        self.pool = pool
        self.client = client
        self.link = link
        self.stream_id = next(_stream_ids)
        base = f"aeron:udp?endpoint={free_endpoint()}|term-length=64k"
        bridge = {
            "instance_id": "test",
            "role": "sender",
            "assembly_timeout_ms": 60_000,  # no frame is given up for a pause of this machine
            "payload_channel": base,
            "payload_stream_id": PAYLOAD_ID,
            "control_channel": base,
            "control_stream_id": CONTROL_ID,
            **{key: value for key, value in keys.items() if key != "mapping"},
        }
        mapping = {"source_stream_id": self.stream_id, "dest_stream_id": 30_000, **keys.get("mapping", {})}
        self.config = BridgeConfig.load(None, environ={}, bridge=bridge, mappings=[mapping])
        self.counters = Counters("test")
        self.producer = client.producer(self.stream_id, create=True)
        self.streams = BridgeStreams(Publications(link))
        self.sender = Sender(
            self.config.mappings[0], self.config, client, link, self.streams.publications, self.counters
        )
        self.streams.senders = (self.sender,)
        self.chunks: list[BridgeFrameChunk] = []
        self.control: list[bytes] = []
        self.metadata: list[bytes] = []
        self._payload: aeron.Subscription | None = None
        self._others: list[tuple[aeron.Subscription, list[bytes]]] = []
        self.is_reading = True
        self.skipped_ns = 0  # by which the sender's clock runs ahead
        self.on_chunk: Callable[[bytes], object] = self._on_chunk

    # --- the receiver

    def listen(self) -> None:
        section = self.config.bridge
        self._payload = self.link.add_subscription(section.payload_channel, section.payload_stream_id)
        self._others.append((self.link.add_subscription(section.control_channel, CONTROL_ID), self.control))
        if section.metadata is not None:
            self._others.append((self.link.add_subscription(section.metadata_channel, METADATA_ID), self.metadata))

    def deafen(self) -> None:
        """The receiver goes."""
        for subscription in (self._payload, *(other for other, _ in self._others)):
            if subscription is not None:
                subscription.close()
        self._payload, self._others = None, []

    def wait_until_disconnected(self) -> None:
        """Aeron notices a receiver that is gone after seconds, of each channel by itself."""
        forwarder = self.sender._forwarder
        outlets = [it for it in (forwarder._control, forwarder._metadata) if it is not None]
        self.until(
            lambda: not self.sender._publication.is_connected and not any(it.is_connected for it in outlets),
            "the receiver is gone",
        )

    @property
    def frames(self) -> dict[tuple[int, int], bytes]:
        """Payloads of frames of which every chunk came, by epoch and seq."""
        by_frame: dict[tuple[int, int], dict[int, BridgeFrameChunk]] = defaultdict(dict)
        for chunk in self.chunks:
            by_frame[chunk.epoch, chunk.seq][chunk.chunk_index] = chunk
        return {
            key: b"".join(parts[index].payload_bytes for index in range(len(parts)))
            for key, parts in by_frame.items()
            if len(parts) == parts[min(parts)].chunk_count
        }

    def received[M: Message](self, kind: type[M]) -> list[M]:
        """The messages of one kind that came on the control or metadata stream."""
        messages = [
            decode(data)
            for data in (*self.control, *self.metadata)
            if int.from_bytes(data[4:6], "little") in (900, 904)
        ]
        return [message for message in messages if isinstance(message, kind)]

    # --- the sender

    def turn(self) -> int:
        work = self.streams.invoke(time.monotonic_ns() + self.skipped_ns)
        self.hear()
        return work

    def hear(self) -> None:
        """What came over the network, the sender left alone."""
        for subscription, received in self._others:
            subscription.poll(lambda data, _, received=received: received.append(data), 100)  # type: ignore[misc]
        if self._payload is not None and self.is_reading:
            self._payload.poll(lambda data, _: self.on_chunk(data), 1000)

    def until(self, condition: Callable[[], object], what: str = "what the test waits for") -> None:
        def is_met() -> bool:
            self.turn()
            return bool(condition())

        wait_until(is_met, what)

    def settle(self) -> None:
        """Until frames would be sent at once."""
        self.until(
            lambda: self.sender.is_ready and self.producer.wait_for_consumers(1, 0.001), "the sender is attached"
        )
        if self._payload is not None:
            self.until(lambda: self.announced_epochs, "the epoch is announced")
            self.until(lambda: self.sender._is_connected, "the receiver is connected")

    @property
    def announced_epochs(self) -> list[int]:
        from tensorpool.wire.control import ShmPoolAnnounce

        return [announce.epoch for announce in self.received(ShmPoolAnnounce)]

    def publish(self, array: np.ndarray[Any, Any]) -> int:
        seq = self.producer.publish(array)
        assert seq is not None
        return seq

    def dropped(self, reason: str) -> int:
        return self.counters["frames_dropped", reason]

    def close(self) -> None:
        self.streams.close()
        self.deafen()
        self.producer.close()

    def _on_chunk(self, data: bytes) -> None:
        chunk = decode(data)
        assert isinstance(chunk, BridgeFrameChunk)  # §7: nothing else travels here
        self.chunks.append(chunk)
