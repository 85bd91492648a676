# SPDX-License-Identifier: Apache-2.0
"""Messages made by hand, memory with both ends in this process, and a small deployment of everything."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool._core import DescriptorFeed, DropReason, ReceivedFrame
from tensorpool.client import Client, Consumer, Frame, Producer
from tensorpool.client.attach_dialects import AttachDialects
from tensorpool.client.mapped_epoch import MappedEpoch
from tensorpool.clock import ManualClock
from tensorpool.driver import DriverConfig
from tensorpool.shm import AllowedBases, MappedRing, PoolSpec, RingSpec, layout_of, map_ring
from tensorpool.wire import Message, decode, driver
from tensorpool.wire.control import ConsumerHello, FrameDescriptor, ShmPoolAnnounce
from tensorpool.wire.driver import (
    LeaseRevokeReason,
    ResponseCode,
    Role,
    ShmAttachResponse,
    ShmLeaseRevoked,
)
from tests.support import messages
from tests.support.processes import wait_until

STREAM = 10_000
BASE = "/dev/shm/tp"
SECOND_NS = 1_000_000_000
MS = 1_000_000
RING = RingSpec(4, (PoolSpec(1, 64), PoolSpec(2, 128)))
IPC = "aeron:ipc?term-length=256k"
FRAME = np.arange(6, dtype=np.float32).reshape(2, 3)
SMALL: dict[str, Any] = {
    "driver.stream_id_range": [20_000, 20_999],
    "driver.descriptor_stream_id_range": [31_000, 31_015],
    "driver.control_stream_id_range": [32_000, 32_015],
    "policies.announce_period_ms": 3_000,
    "policies.lease_keepalive_interval_ms": 5_000,
    "policies.max_streams": 1000,
    "policies.dynamic_stream_linger_ms": 60_000,
    "streams.front.stream_id": STREAM,
    "profiles.default": {
        "header_nslots": 8,
        "payload_pools": [{"pool_id": 1, "stride_bytes": 256}, {"pool_id": 7, "stride_bytes": 65_536}],
    },
}

_aeron_stream_ids = itertools.count(81_000)
_names = itertools.count()


# --- messages


def granted(correlation_id: int, **changed: Any) -> ShmAttachResponse:
    """An OK that is complete, with what the test wants otherwise."""
    folder = f"shm:file?path={BASE}/{STREAM}/{changed.get('epoch', 5)}"
    fields: dict[str, Any] = {
        "correlation_id": correlation_id,
        "code": ResponseCode.OK,
        "lease_id": 77,
        "lease_expiry_timestamp_ns": None,
        "stream_id": STREAM,
        "epoch": 5,
        "layout_version": 1,
        "header_nslots": RING.nslots,
        "header_slot_bytes": 256,
        "max_dims": 8,
        "payload_pools": tuple(
            driver.PayloadPool(
                pool_id=pool.pool_id,
                pool_nslots=RING.nslots,
                stride_bytes=pool.stride_bytes,
                region_uri=f"{folder}/{pool.pool_id}.pool",
            )
            for pool in RING.pools
        ),
        "header_region_uri": f"{folder}/header.ring",
    }
    return ShmAttachResponse(**fields | changed)


def refused(correlation_id: int, code: ResponseCode = ResponseCode.REJECTED, words: str = "no") -> ShmAttachResponse:
    return ShmAttachResponse(correlation_id=correlation_id, code=code, error_message=words)


def announced(epoch: int, **changed: Any) -> ShmPoolAnnounce:
    """An announce of a ring as it is granted, in some epoch."""
    pools = {pool.pool_id: pool.stride_bytes for pool in RING.pools}
    fields = {"stream_id": STREAM, "announce_timestamp_ns": 0} | changed
    return messages.announce(epoch=epoch, nslots=RING.nslots, pools=pools, below=BASE, **fields)


def revoked(lease_id: int, client_id: int, role: Role = Role.PRODUCER, **changed: Any) -> ShmLeaseRevoked:
    fields: dict[str, Any] = {
        "timestamp_ns": 0,
        "lease_id": lease_id,
        "stream_id": STREAM,
        "client_id": client_id,
        "role": role,
        "reason": LeaseRevokeReason.EXPIRED,
    }
    return ShmLeaseRevoked(**fields | changed)


def hello(consumer_id: int = 1, stream_id: int = STREAM, **changed: Any) -> ConsumerHello:
    return messages.hello(stream_id, consumer_id, **{"expected_layout_version": 0} | changed)


class StillConductor:
    """As much of a conductor as a session without a link needs."""

    def __init__(self, **settings: Any) -> None:
        self.config = DriverConfig.load(environ={}, overrides=SMALL | settings)
        self.clock = ManualClock()
        self.dialects = AttachDialects()

    def new_client_id(self) -> int:
        return 1

    def new_correlation_id(self) -> int:
        return 1


# --- memory and descriptors, without a driver and without a client


class Stream:
    """One epoch of a stream: a writer, a mapping to read from, and the descriptors between them.

    >>> stream.write(np.arange(6))     # a slot
    >>> stream.describe(0)             # its descriptor
    """

    def __init__(
        self,
        folder: Path,
        client: aeron.Client,
        *,
        epoch: int = 1,
        nslots: int = 8,
        pools: tuple[tuple[int, int], ...] = ((1, 256), (2, 4096)),
        stream_id: int = STREAM,
        aeron_stream_id: int | None = None,
    ) -> None:
        self.client = client
        self.stream_id = stream_id
        self.epoch = epoch
        self.spec = RingSpec(nslots, tuple(PoolSpec(*pool) for pool in pools))
        self.make_files(folder)
        self.aeron_stream_id = next(_aeron_stream_ids) if aeron_stream_id is None else aeron_stream_id
        self.publication = client.add_publication(IPC, self.aeron_stream_id, exclusive=True)
        self.subscription = self.subscribe()

    def make_files(self, folder: Path) -> None:
        """The regions of the epoch, and a writer for them."""
        self.folder = folder / f"{self.stream_id}-{self.epoch}"
        self.folder.mkdir()
        self.paths: list[Path] = []
        for region in self.spec.regions(self.stream_id, self.epoch):
            path = self.folder / f"{region.region_type.name}-{region.pool_id}"
            path.write_bytes(region.superblock(1, 1).encode_body())
            with path.open("r+b") as file:
                file.truncate(region.size_bytes)
            self.paths.append(path)
        self.bases = AllowedBases([folder])
        self.writer = self.map(writable=True).writer()

    def later(self, folder: Path) -> Stream:
        """The epoch after this one, on the same descriptor stream."""
        later = copy.copy(self)
        later.epoch += 1
        later.make_files(folder)
        return later

    def map(self, *, writable: bool = False) -> MappedRing:
        uris = [f"shm:file?path={path}" for path in self.paths]
        return map_ring(
            self.spec,
            uris,
            self.bases,
            stream_id=self.stream_id,
            epoch=self.epoch,
            writable=writable,
            keep_header_file=not writable,
        )

    def mapped(self) -> MappedEpoch:
        return MappedEpoch(self.map())

    def subscribe(self) -> aeron.Subscription:
        """A subscription that receives descriptors from now on."""
        subscription = self.client.add_subscription(IPC, self.aeron_stream_id)
        wait_until(lambda: subscription.is_connected and self.publication.is_connected, "the streams are connected")
        return subscription

    def feed(self, expected: int | None = None, max_outstanding: int = 0) -> DescriptorFeed:
        return DescriptorFeed(self.map().reader(), self.stream_id, self.epoch, expected, max_outstanding)

    @property
    def next_seq(self) -> int:
        return self.writer.next_seq

    def write(self, array: np.ndarray[Any, Any] | None = None, *, seq: int | None = None, **header: int) -> int:
        """Commit a slot without a descriptor."""
        data = np.array([self.next_seq], np.uint64) if array is None else array
        number = self.next_seq if seq is None else seq
        assert self.writer.write(number, layout_of(data), data, **header)
        return number

    def describe(self, seq: int, *, epoch: int | None = None, stream_id: int | None = None, **more: Any) -> None:
        """Send the descriptor of a slot, whatever is in it."""
        own = self.stream_id if stream_id is None else stream_id
        number = self.epoch if epoch is None else epoch
        wait_until(lambda: self.publication.offer_descriptor(own, number, seq, **more), "the log takes a descriptor")

    def publish(self, array: np.ndarray[Any, Any] | None = None, **header: int) -> int:
        seq = self.write(array, **header)
        self.describe(seq)
        return seq

    def say(self, data: bytes) -> None:
        """Put other bytes on the descriptor stream."""
        wait_until(lambda: self.publication.offer(data), "the log takes a message")

    def poke(self, slot: int, offset: int, data: bytes) -> None:
        """Change bytes of a slot of the header ring, as a producer that breaks the rules does."""
        with self.paths[0].open("r+b") as file:
            file.seek(64 + slot * 256 + offset)
            file.write(data)

    def begin(self, seq: int) -> None:
        """The slot of `seq` as it looks while the frame is being written."""
        self.poke(seq & (self.spec.nslots - 1), 0, (seq << 1).to_bytes(8, "little"))


def descriptor_bytes(stream: Stream, seq: int) -> bytes:
    return FrameDescriptor(stream_id=stream.stream_id, epoch=stream.epoch, seq=seq).encode()


def taken(feed: DescriptorFeed, subscription: aeron.Subscription) -> list[ReceivedFrame]:
    """Everything that a feed delivers now."""
    frames: list[ReceivedFrame] = []
    while (frame := feed.next(subscription)) is not None:
        frames.append(frame)
    return frames


def drops_of(feed: DescriptorFeed) -> dict[DropReason, int]:
    return {reason: count for reason, count in feed.drops.items() if count}


@pytest.fixture(scope="session")
def transport(shared_media_driver: aeron.MediaDriver) -> Iterator[aeron.Client]:
    client = aeron.connect(shared_media_driver.aeron_dir)
    yield client
    client.close()


@pytest.fixture
def stream(shm_dir: Path, transport: aeron.Client) -> Iterator[Stream]:
    stream = Stream(shm_dir, transport)
    yield stream
    stream.publication.close()


# --- the whole


def new_name() -> str:
    """Of a stream that no other test has."""
    return f"test/{next(_names)}"


@pytest.fixture(scope="session")
def pool() -> Iterator[tp.Local]:
    """A driver for tests that do not end it; leases there outlast a pause of some seconds."""
    with tp.local(overrides=SMALL) as pool:
        yield pool


@pytest.fixture(scope="session")
def patient() -> Iterator[tp.Local]:
    """A driver, and clients of it, that forget nothing within the time of a test: what ends there was ended."""
    minutes = {"policies.announce_period_ms": 60_000, "policies.lease_keepalive_interval_ms": 60_000}
    with tp.local(overrides=SMALL | minutes) as pool:
        yield pool


@pytest.fixture(scope="session")
def shared_client(pool: tp.Local) -> Iterator[Client]:
    """For tests that do not end it."""
    with pool.connect() as client:
        yield client


@pytest.fixture
def client(pool: tp.Local) -> Iterator[Client]:
    with pool.connect() as client:
        yield client


class Pair:
    """A producer and a consumer of one stream, in one client or two."""

    def __init__(self, producer: Producer, consumer: Consumer) -> None:
        self.producer = producer
        self.consumer = consumer

    def publish(self, array: np.ndarray[Any, Any] = FRAME, **options: Any) -> Frame:
        """Through both ends."""
        seq = self.producer.publish(array, **options)
        assert seq is not None
        frame = self.consumer.poll(20)
        assert frame is not None
        assert frame.seq == seq
        return frame


def paired(client: Client, **options: Any) -> Pair:
    """Of a stream of the test's own; the consumer misses nothing from now on."""
    producer = client.producer(new_name(), create=True)
    consumer = client.consumer(producer.stream_id, **options)
    assert producer.wait_for_consumers(1, 20)
    return Pair(producer, consumer)


@pytest.fixture
def pair(shared_client: Client) -> Iterator[Pair]:
    pair = paired(shared_client)
    yield pair
    pair.consumer.close()
    pair.producer.close()


def leases(pool: tp.Local, stream_id: int, role: Role) -> int:
    """How many the driver counts."""
    held = list(pool.conductor.lifecycle.leases)
    return sum((lease.stream_id, lease.role) == (stream_id, role) for lease in held)


class Outsider:
    """Another process on the streams of a deployment, with nothing but the codec."""

    def __init__(self, pool: tp.Local) -> None:
        self._client = aeron.connect(pool.aeron_dir)
        driver = pool.config.driver
        self._publications = {
            name: self._client.add_publication(endpoint.channel, endpoint.stream_id, exclusive=True)
            for name, endpoint in (("control", driver.control), ("qos", driver.qos), ("metadata", driver.metadata))
        }
        self._subscriptions = [
            self._client.add_subscription(driver.metadata.channel, driver.metadata.stream_id),
            self._client.add_subscription(f"{driver.control.channel}|tether=false", driver.control.stream_id),
        ]
        self.received: list[Message] = []

    def say(self, name: str, message: Message) -> None:
        wait_until(lambda: self._publications[name].offer(message.encode()), "a subscriber takes a message")

    def wait_for[M: Message](self, kind: type[M], is_it: Callable[[M], bool]) -> M:
        """Of the metadata or the control stream."""
        found: list[M] = []

        def is_there() -> bool:
            for subscription in self._subscriptions:
                subscription.poll(lambda data, _: self.received.append(decode(data)), 100)
            found.extend(it for it in self.received if isinstance(it, kind) and is_it(it))
            return bool(found)

        wait_until(is_there, f"a {kind.__name__}")
        return found[0]

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def outsider(pool: tp.Local) -> Iterator[Outsider]:
    outsider = Outsider(pool)
    yield outsider
    outsider.close()
