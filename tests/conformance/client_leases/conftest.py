# SPDX-License-Identifier: Apache-2.0
"""A driver that grants honestly but for the answers that a test falsifies, and clients of it.

The driver is `WireProducer`. Producers and consumers are judged alike: `Session` is either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Client, Consumer, DropReason, Producer
from tensorpool.wire.control import ConsumerConfig, FrameDescriptor
from tensorpool.wire.driver import Role, ShmAttachRequest
from tests.support.driver_client import new_client_id
from tests.support.messages import hello
from tests.support.processes import private_directory, wait_until
from tests.support.wire_producer import WireProducer

PERIOD_MS = 1000  # in the client's configuration; the peer announces far more often
SHORT_PERIOD_MS = 300
KEEPALIVE_MS = 100
FRAME = np.arange(6, dtype=np.float32)
both_roles = pytest.mark.parametrize("role", list(Role), ids=lambda role: role.name.lower())
type Session = Producer | Consumer


class Bench:
    """A peer, and clients that are closed at the end."""

    def __init__(self, folder: Path, aeron_dir: str) -> None:
        self.aeron_dir = aeron_dir
        self.peer = WireProducer(folder, aeron_dir)
        self.clients: list[Client] = []

    def connect(
        self,
        *,
        conductor: Literal["thread", "invoked"] = "thread",
        announce_period_ms: int = PERIOD_MS,
        **more: Any,
    ) -> Client:
        settings = self.peer.settings | {
            "policies.announce_period_ms": announce_period_ms,
            "policies.lease_keepalive_interval_ms": KEEPALIVE_MS,
        }
        self.clients.append(tp.connect(self.aeron_dir, conductor=conductor, overrides=settings | more))
        return self.clients[-1]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.peer.close()


@pytest.fixture
def bench(shared_media_driver: aeron.MediaDriver, shm_dir: Path) -> Iterator[Bench]:
    bench = Bench(shm_dir, shared_media_driver.aeron_dir)
    yield bench
    bench.close()


@pytest.fixture
def peer(bench: Bench) -> WireProducer:
    return bench.peer


@pytest.fixture(scope="module")
def shared_bench(shared_media_driver: aeron.MediaDriver) -> Iterator[Bench]:
    with private_directory() as folder:
        bench = Bench(folder, shared_media_driver.aeron_dir)
        bench.connect()
        yield bench
        bench.close()


@pytest.fixture
def shared(shared_bench: Bench) -> tuple[WireProducer, Client]:
    """For the many tests that need no client of their own."""
    shared_bench.peer.lies.clear()
    shared_bench.peer.answer_held()
    shared_bench.peer.announces = True
    return shared_bench.peer, shared_bench.clients[0]


def start(client: Client, peer: WireProducer, role: Role, **options: Any) -> Session:
    opener: Callable[..., Session] = client.producer if role is Role.PRODUCER else client.consumer
    return opener(peer.stream_id, **options)


def works(session: Session, peer: WireProducer, client: Client | None = None) -> bool:
    """Whether a frame goes through now: out of a producer, or into a consumer."""
    if client is not None:
        client.invoke()
    if isinstance(session, Producer):
        return session.publish(FRAME) is not None
    seq = peer.publish(FRAME)
    while (frame := session.poll(0.01)) is not None:
        if (frame.epoch, frame.seq) == (peer.epoch, seq):
            return True
    return False


def wait_works(session: Session, peer: WireProducer, client: Client | None = None) -> None:
    wait_until(lambda: works(session, peer, client), "frames go through")


def own_id(session: Session) -> int:
    return session.producer_id if isinstance(session, Producer) else session.consumer_id


def requests_of(peer: WireProducer, role: Role, since: int = 0) -> list[ShmAttachRequest]:
    """Each once, however often it was repeated for want of an answer."""
    found = {
        received.message: None
        for received in peer.received(ShmAttachRequest, since, stream_id=peer.stream_id, role=role)
    }
    return list(found)


def fence(session: Session, peer: WireProducer) -> None:
    """Return when the client has handled all that was said on the control stream before."""
    if isinstance(session, Consumer):
        peer.fence(session)
        return
    stranger, since = new_client_id(), peer.now
    peer.send(hello(peer.stream_id, stranger, descriptor_stream_id=31_000))
    peer.wait_for(ConsumerConfig, since, consumer_id=stranger)


def queue_frames(session: Session, peer: WireProducer) -> None:
    """Frames that a consumer has not polled yet."""
    if isinstance(session, Consumer):
        for _ in range(3):
            peer.publish(FRAME)


def assert_idle(session: Session, peer: WireProducer) -> None:
    """Neither old nor new frames go through, in either direction, and every one of them is counted."""
    if isinstance(session, Producer):
        before = session.stats.dropped.get(DropReason.DETACHED, 0)
        since = peer.now
        assert [session.publish(FRAME) for _ in range(3)] == [None] * 3
        assert session.stats.dropped[DropReason.DETACHED] == before + 3
        with session.claim((4,), np.uint8) as slot:
            slot.array[:] = 1
        assert slot.seq is None
        assert peer.received(FrameDescriptor, since) == []
    else:
        peer.publish(FRAME)
        assert session.poll(0.05) is None
        assert session.latest() is None
