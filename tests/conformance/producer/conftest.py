# SPDX-License-Identifier: Apache-2.0
"""A producer of ours, and a consumer that reads its files and messages byte for byte.

A real driver grants the memory; the other side is `WireConsumer`. The announce period is also that of hello and QoS:
short, so that a consumer soon counts as stale.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Client, Producer
from tensorpool.wire.control import ConsumerConfig, FrameDescriptor, FrameProgress, FrameProgressState, QosProducer
from tests.support.driver_client import new_client_id, serving
from tests.support.driver_process import Deployment
from tests.support.processes import private_directory, wait_until
from tests.support.wire_consumer import MappedStream, WireConsumer, separate

NSLOTS = 8
POOLS = {1: 256, 7: 4096, 9: 1 << 18}
PERIOD_MS = 600
STREAMS = range(12_000, 12_050)
STARTED, PROGRESS, COMPLETE = (FrameProgressState(number) for number in (1, 2, 3))
_stream_ids = iter(STREAMS)


@pytest.fixture(scope="module")
def deployment(shared_media_driver: aeron.MediaDriver) -> Iterator[Deployment]:
    pools = [{"pool_id": id, "stride_bytes": stride} for id, stride in POOLS.items()]
    profile = {"header_nslots": NSLOTS, "payload_pools": pools}
    with private_directory() as folder:
        deployment = Deployment(
            folder,
            shared_media_driver.aeron_dir,
            streams=STREAMS,
            policies={"announce_period_ms": PERIOD_MS, "lease_keepalive_interval_ms": 3000},
            profiles={"small": profile},
        )
        with serving(separate(deployment)):
            yield deployment


@pytest.fixture(scope="module")
def connected(deployment: Deployment) -> Iterator[Client]:
    with tp.connect(deployment.aeron_dir, config=deployment.config_path) as client:
        yield client


@pytest.fixture
def producer(connected: Client) -> Iterator[Producer]:
    """Of a stream of the test's own."""
    with connected.producer(next(_stream_ids)) as producer:
        wait_until(lambda: producer.is_active, "the producer is active")
        yield producer


@pytest.fixture
def peer(deployment: Deployment, producer: Producer) -> Iterator[WireConsumer]:
    """It listens before the first frame."""
    with WireConsumer(deployment) as peer:
        peer.forget()
        peer.wait_for(QosProducer, stream_id=producer.stream_id)  # from now on it hears the producer
        assert producer.publish(np.zeros(1, np.uint8)) == 0
        peer.wait_for(FrameDescriptor, stream_id=producer.stream_id)
        peer.transcript.clear()
        yield peer


@pytest.fixture
def mapped(peer: WireConsumer, producer: Producer) -> MappedStream:
    lease = peer.attach(producer.stream_id)
    peer.kept.append(lease)
    assert lease.epoch == producer.epoch
    return peer.map(lease.response)


def fence(peer: WireConsumer, producer: Producer) -> None:
    """Return when the producer does as the hellos ask: it declined a request that came after them."""
    stranger = new_client_id()
    peer.say_hello(producer.stream_id, consumer_id=stranger, descriptor_stream_id=31_000)
    peer.wait_for(ConsumerConfig, consumer_id=stranger)


def descriptors(peer: WireConsumer, producer: Producer, last: int | None) -> list[FrameDescriptor]:
    """The producer's, up to a seq, on the shared stream."""
    shared = peer.endpoints["descriptor"]

    def received() -> list[FrameDescriptor]:
        return [it for it in peer.received_on(shared, FrameDescriptor) if it.stream_id == producer.stream_id]

    peer.wait_until(lambda: any(it.seq == last for it in received()), f"the descriptor of {last}")
    return received()


def busy_until(now_ns: int) -> None:
    while time.monotonic_ns() < now_ns:
        time.sleep(0.0001)


def progress_of(peer: WireConsumer, producer: Producer, last: int) -> list[FrameProgress]:
    """On the shared control stream, once the descriptor of `last` and all before it were received."""
    descriptors(peer, producer, last)
    peer.wait_for(FrameProgress, stream_id=producer.stream_id, seq=last, state=COMPLETE)
    return [received.message for received in peer.received(FrameProgress, stream_id=producer.stream_id)]


def fill(producer: Producer, *, step: int = 4096, pause_us: int = 600) -> tuple[int, list[int]]:
    """A frame of 256 rows of 1 KiB, reported row by row or in larger steps; its seq and the steps."""
    sent = []
    with producer.claim((256, 1024), np.uint8, progress="rows") as slot:
        assert slot.seq is not None
        for rows in range(step // 1024, 257, step // 1024):
            slot.array[:rows] = slot.seq % 251
            busy_until(time.monotonic_ns() + pause_us * 1000)
            slot.progress(rows=rows)
            sent.append(rows * 1024)
    assert slot.seq is not None
    return slot.seq, sent
