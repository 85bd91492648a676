# SPDX-License-Identifier: Apache-2.0
"""Our clients and drivers that speak the dialect of January 2026, or none that we know. Decision K9."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Client, Producer
from tensorpool.errors import AttachPending, RemoteProtocolError
from tensorpool.shm.namespace import LOCK_NAME
from tensorpool.wire.attach import Dialect
from tensorpool.wire.driver import ExtendedAttachRequest, Role, ShmAttachRequest
from tests.conformance.client_leases.conftest import both_roles, own_id, start, wait_works
from tests.support.processes import wait_until
from tests.support.wire_producer import WireProducer

POOL_ID = 16  # its offset in a header slot
PERIOD_MS = 100  # three of them until a client changes its dialect

type Connect = Callable[..., Client]


@pytest.fixture
def peer(shared_media_driver: aeron.MediaDriver, shm_dir: Path) -> Iterator[WireProducer]:
    """A driver that knows the newer dialect only; its namespace is `shm_dir`."""
    with WireProducer(shm_dir / "regions", shared_media_driver.aeron_dir, dialect=Dialect.JANUARY_2026) as peer:
        yield peer


@pytest.fixture
def connect(shared_media_driver: aeron.MediaDriver, peer: WireProducer) -> Iterator[Connect]:
    clients: list[Client] = []

    def connect(**settings: object) -> Client:
        overrides = peer.settings | {"policies.announce_period_ms": PERIOD_MS} | settings
        clients.append(tp.connect(shared_media_driver.aeron_dir, overrides=overrides))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@both_roles
def test_a_driver_of_the_newer_dialect_is_found_out_and_remembered(
    peer: WireProducer, connect: Connect, role: Role
) -> None:
    """It drops requests of 24 bytes; the next session begins with 27. Frames go through."""
    client = connect()
    with start(client, peer, role, timeout=60) as session:
        wait_works(session, peer)
        first = peer.received(ShmAttachRequest)[0].message
        second = peer.received(ExtendedAttachRequest)[0]
        assert own_id(session) == second.message.client_id != first.client_id
        assert second.message.correlation_id != first.correlation_id
        fields = (second.message.correlation_id, peer.stream_id, second.message.client_id, role)
        assert second.data == struct.pack("<4H q I I B I B B I", 27, 1, 901, 1, *fields, 0, 1, 0, 2**32 - 1)
        if isinstance(session, Producer):
            assert not session.is_node_id_derived
            assert session.node_id == peer.grant_of(session.producer_id).response.node_id  # type: ignore[union-attr]
    since = peer.now
    with start(client, peer, role, timeout=60) as again:
        wait_works(again, peer)
    assert peer.received(ShmAttachRequest, since) == []


def test_a_configured_dialect_is_spoken_from_the_start(peer: WireProducer, connect: Connect) -> None:
    """No request of the other one, and a node id that is wished for again after a shutdown notice."""
    client = connect(**{"driver.dialect": "2026-01"})
    with client.producer(peer.stream_id, timeout=60) as producer:
        node_id, since = producer.node_id, peer.now
        peer.shut_down()
        request = peer.wait_for(ExtendedAttachRequest, since).message
        assert request.desired_node_id == node_id
        wait_works(producer, peer)
        assert producer.node_id == node_id
    assert peer.received(ShmAttachRequest) == []


def test_a_configured_stream_is_found_though_no_provider_answers(peer: WireProducer, connect: Connect) -> None:
    """A driver without discovery, or a busy one: a producer does not make a second stream of that name."""
    client = connect(**{"streams.eye": {"stream_id": peer.stream_id}})
    with client.producer("eye", create=True, timeout=60) as producer:
        assert producer.stream_id == peer.stream_id


def test_a_refused_wish_is_given_up(peer: WireProducer, connect: Connect) -> None:
    """The producer comes back under another node id."""
    client = connect(**{"driver.dialect": "2026-01"})
    with client.producer(peer.stream_id, timeout=60) as producer:
        node_id, since = producer.node_id, peer.now
        peer.refuse(text=f"node id {node_id} belongs to client 5")
        peer.shut_down()
        wait_until(lambda: len(set(peer_wishes(peer, since))) == 2, "it asks with its wish, then without")
        wait_works(producer, peer)
        assert peer_wishes(peer, since)[0] == node_id
        assert peer_wishes(peer, since)[-1] is None
        assert producer.node_id != node_id


def peer_wishes(peer: WireProducer, since: int) -> list[int | None]:
    return [received.message.desired_node_id for received in peer.received(ExtendedAttachRequest, since)]


@pytest.mark.parametrize("configured", ["auto", "specified"])
def test_a_driver_that_answers_nothing_is_alive_all_the_same(
    peer: WireProducer, connect: Connect, configured: str
) -> None:
    """While it announces, no error asks whether a driver is running: also of a call that waits for a moment."""
    peer.answers = False
    client = connect(**{"driver.dialect": configured})
    wait_until(lambda: client._conductor.has_driver(1), "an announce has arrived")
    for timeout in (0.001, 1.0):
        with pytest.raises(AttachPending, match="the driver is alive and has not answered yet about stream") as caught:
            client.consumer(peer.stream_id, timeout=timeout)
        assert ('driver.dialect = "specified"' in str(caught.value)) is (configured == "specified")


@both_roles
@pytest.mark.parametrize("block", [0, 50, 53, 60, 65535])
def test_an_answer_with_another_block_length_is_an_error_with_a_sentence(
    peer: WireProducer, connect: Connect, role: Role, block: int
) -> None:
    """Which names the lengths, at the end of the timeout: the driver might be replaced meanwhile."""
    for _ in range(100):
        peer.lies.append(lambda honest: struct.pack("<H", block) + honest.encode()[2:])
    client = connect(**{"driver.dialect": "2026-01"})
    with pytest.raises(RemoteProtocolError, match=f"block length {block}, expected 51 or 54.*to one version"):
        start(client, peer, role, timeout=1)


def test_our_own_driver_is_never_asked_anew(peer: WireProducer, connect: Connect, shm_dir: Path) -> None:
    """It is known by its lock beside the regions that it announces; its answer comes when it is ready."""
    (shm_dir / LOCK_NAME).touch()
    peer.dialect, peer.answers = None, False
    client = connect()
    with pytest.raises(AttachPending):
        client.consumer(peer.stream_id, timeout=12 * PERIOD_MS / 1e3)
    asked = peer.received(ShmAttachRequest)
    assert asked[-1].received_ns - asked[0].received_ns > 6 * PERIOD_MS * 10**6
    assert peer.received(ExtendedAttachRequest) == []
    peer.answer_held()
    with client.consumer(peer.stream_id, timeout=60) as consumer:
        wait_works(consumer, peer)


@both_roles
def test_a_ring_whose_strides_are_any_multiples_of_64_is_mapped(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path, role: Role
) -> None:
    """K7: frames go through, each in the smallest pool that holds it."""
    pools = {3: 192, 4: 64 * 17}
    with WireProducer(shm_dir / "regions", shared_media_driver.aeron_dir, pools=pools) as peer:
        overrides = peer.settings | {"policies.announce_period_ms": PERIOD_MS}
        with (
            tp.connect(shared_media_driver.aeron_dir, overrides=overrides) as client,
            start(client, peer, role, timeout=60) as session,
        ):
            wait_works(session, peer)
            if isinstance(session, Producer):
                assert session.max_frame_bytes == 64 * 17
                assert session.publish(np.arange(100, dtype=np.uint8)) is not None
                assert session.publish(np.arange(250, dtype=np.uint8)) is not None
                assert [slot_of(peer, session.next_seq - back) for back in (2, 1)] == [3, 4]


@pytest.mark.parametrize("found", [128, 256, 320])
def test_a_foreign_stride_that_its_superblock_does_not_have_is_refused(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path, found: int
) -> None:
    """K7: nothing but the power of two is given up."""
    with WireProducer(shm_dir / "regions", shared_media_driver.aeron_dir, pools={3: 192}) as peer:
        peer.use(peer.make_regions(peer.epoch + 1, stride_bytes=found))
        with (
            tp.connect(shared_media_driver.aeron_dir, overrides=peer.settings) as client,
            pytest.raises(tp.TensorPoolError, match=f"stride_bytes: expected 192, found {found}"),
        ):
            client.consumer(peer.stream_id, timeout=2)


def slot_of(peer: WireProducer, seq: int) -> int:
    """The pool that the slot of a frame names."""
    at = 64 + (seq & (peer.nslots - 1)) * 256
    return int(struct.unpack_from("<H", peer.regions.read(0, at, 256), POOL_ID)[0])


def test_our_own_driver_gives_node_ids_to_clients_that_ask_for_them() -> None:
    """Each producer of a client has one of its own; a client of the default dialect derives its own."""
    with tp.local() as pool, tp.connect(pool.aeron_dir, config=pool.config) as plain:
        other = tp.connect(
            pool.aeron_dir, overrides={"driver.dialect": "2026-01", "shm.base_dir": pool.config.shm.base_dir}
        )
        with other, other.producer("a", create=True) as a, other.producer("b", create=True) as b:
            assert (a.is_node_id_derived, b.is_node_id_derived) == (False, False)
            assert a.node_id != b.node_id
            assert {a.node_id, b.node_id} <= set(range(1, 1024))
            with plain.producer("c", create=True) as c:
                assert (c.is_node_id_derived, c.node_id) == (True, (c.producer_id ^ c.producer_id >> 16) % 2**16)
