# SPDX-License-Identifier: Apache-2.0
"""Consumers that have received a frame, and what reached them since.

Each test begins with a consumer that has received a frame: it has mapped the epoch, and receives every descriptor that
is sent from then on. The other side is `WireProducer`, which is honest but for the one thing that a test falsifies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.channel import Endpoint
from tensorpool.client import Client, Consumer, DropReason, Frame, Progress
from tests.support.processes import wait_until
from tests.support.wire_producer import WireProducer

IPC = "aeron:ipc?term-length=4m"
FRAME = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def brisk(shared_media_driver: aeron.MediaDriver, peer: WireProducer) -> Iterator[Client]:
    """One that says hello and tells its QoS three times a second."""
    settings = peer.settings | {"policies.announce_period_ms": 330}
    with tp.connect(shared_media_driver.aeron_dir, overrides=settings) as client:
        yield client


@pytest.fixture
def consumer(connected: Client, peer: WireProducer) -> Consumer:
    return warm(peer, connected.consumer(peer.stream_id))


def warm(peer: WireProducer, consumer: Consumer) -> Consumer:
    """Publish until a frame comes through."""

    def is_through() -> bool:
        seq = peer.publish(FRAME)
        while (frame := consumer.poll(0.02)) is not None:
            if frame.seq == seq:
                return True
        return False

    wait_until(is_through, "a frame is delivered")
    return consumer


def received(peer: WireProducer, consumer: Consumer) -> list[Frame]:
    """Everything that comes up to a frame that is published now, without that one."""
    last = peer.publish(FRAME)
    frames: list[Frame] = []

    def is_there() -> bool:
        while (frame := consumer.poll(0.02)) is not None:
            if frame.seq == last:
                return True
            frames.append(frame)
        return False

    wait_until(is_there, "the last frame is delivered")
    return frames


def drops(consumer: Consumer) -> dict[DropReason, int]:
    return {reason: count for reason, count in consumer.stats.drops.items() if count}


def reasons(consumer: Consumer, before: dict[DropReason, int]) -> dict[DropReason, int]:
    """What was dropped since."""
    now = drops(consumer)
    return {reason: now[reason] - before.get(reason, 0) for reason in now if now[reason] != before.get(reason, 0)}


@pytest.fixture
def private(connected: Client, peer: WireProducer, reported: list[Progress]) -> Consumer:
    """A consumer that asked for streams of its own and was not answered yet."""
    first = peer.endpoints.control[1]
    endpoints: dict[str, Any] = {
        "private_descriptors": Endpoint(IPC, first + 7),
        "private_control": Endpoint(IPC, first + 8),
    }
    return warm(peer, connected.consumer(peer.stream_id, on_progress=reported.append, **endpoints))
