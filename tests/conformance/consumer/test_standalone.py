# SPDX-License-Identifier: Apache-2.0
"""A producer that owns its regions and announces them by itself, and a consumer of it: no driver anywhere.

Wire §10.1.1, §10.1.2, §15.1, §15.12, §15.14, §15.21. The producer is `WireProducer`, which here answers no request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Client, Consumer
from tensorpool.errors import LocalProtocolError, TensorPoolError
from tensorpool.wire.control import ConsumerHello, Mode, QosConsumer, ShmPoolAnnounce
from tensorpool.wire.driver import ShmAttachRequest, ShmDetachRequest, ShmLeaseKeepalive
from tests.shm.by_hand import mapped_files
from tests.support.consuming import deliver, drain, wait_waiting
from tests.support.messages import consumer_qos
from tests.support.processes import wait_until
from tests.support.regions import RING, Regions
from tests.support.wire_producer import WireProducer

PERIOD_MS = 1000  # nothing is stale before 3 s, so that a slow machine makes nothing stale
SHORT_PERIOD_MS = 250  # for what has to become stale
POOL = 7


@pytest.fixture
def peer(shared_media_driver: aeron.MediaDriver, shm_dir: Path) -> Iterator[WireProducer]:
    with WireProducer(shm_dir, shared_media_driver.aeron_dir) as peer:
        peer.answers = False
        yield peer


@pytest.fixture
def client(shared_media_driver: aeron.MediaDriver, peer: WireProducer) -> Iterator[Client]:
    settings = peer.settings | {"policies.announce_period_ms": PERIOD_MS}
    with tp.connect(shared_media_driver.aeron_dir, overrides=settings) as client:
        yield client


@pytest.fixture
def consumer(client: Client, peer: WireProducer) -> Consumer:
    consumer = client.consumer(peer.stream_id, driver=False)
    deliver(peer, consumer)
    return consumer


def asked_of_a_driver(peer: WireProducer) -> list[Any]:
    return [it for kind in (ShmAttachRequest, ShmDetachRequest, ShmLeaseKeepalive) for it in peer.received(kind)]


@pytest.mark.spec("WIRE-10.1.2-01", "WIRE-15.12-01", "WIRE-15.21-05")
def test_what_a_producer_announces_by_itself_is_read_without_a_driver(peer: WireProducer, client: Client) -> None:
    """Frames across an epoch change, hello and QoS as ever, and not one message for a driver."""
    consumer = client.consumer(peer.stream_id, driver=False)
    assert consumer.lease_id is None
    for _ in range(2):
        assert deliver(peer, consumer)[0] == peer.epoch
        seqs = [peer.publish(np.full(16, index, np.uint8)) for index in range(3)]
        assert drain(consumer) == seqs
        mine: dict[str, Any] = {"consumer_id": consumer.consumer_id, "stream_id": peer.stream_id}
        peer.wait_for(ConsumerHello, **mine)
        peer.wait_for(QosConsumer, **mine, epoch=peer.epoch, last_seq_seen=seqs[-1])
        peer.new_epoch()
    consumer.close()
    wait_until(lambda: not mapped_files(peer.folder), "nothing is mapped any more")
    assert asked_of_a_driver(peer) == []


def test_a_name_leads_to_its_producer_without_a_driver(peer: WireProducer, client: Client) -> None:
    """As the producer announces it on the metadata stream."""
    peer.name = "camera/standalone"
    consumer = client.consumer("camera/standalone", driver=False, timeout=60)
    assert consumer.stream_id == peer.stream_id
    assert deliver(peer, consumer)[0] == peer.epoch
    assert asked_of_a_driver(peer) == []


def test_without_a_producer_the_caller_learns_what_is_missing(peer: WireProducer, client: Client) -> None:
    """No driver confirms that the stream exists: after the timeout the error names it."""
    with pytest.raises(TensorPoolError, match=f"no producer announces stream {peer.stream_id + 1_000_000}"):
        client.consumer(peer.stream_id + 1_000_000, driver=False, timeout=0.3)
    for options in ({"create": True}, {"driver_instance_id": "driver-01"}):
        with pytest.raises(LocalProtocolError, match="driver=False"):
            client.consumer(peer.stream_id, driver=False, **options)


# --- every check


def _outside(peer: WireProducer, regions: Regions) -> dict[str, Any]:
    return regions.layout_with(POOL, region_uri="shm:file?path=/etc/hostname")


def _short(peer: WireProducer, regions: Regions) -> dict[str, Any]:
    regions.shorten(POOL)
    return regions.layout


def _spoilt(peer: WireProducer, regions: Regions) -> dict[str, Any]:
    regions.set_superblock(POOL, stride_bytes=64)
    return regions.layout


def _old(peer: WireProducer, regions: Regions) -> dict[str, Any]:
    return regions.layout | {"announce_timestamp_ns": peer.now_ns() - 10_000_000_000}


def _stale(peer: WireProducer, regions: Regions) -> dict[str, Any]:
    regions.set_superblock(RING, activity_timestamp_ns=1)
    return regions.layout


@pytest.mark.spec("WIRE-15.1-07", "WIRE-15.1-10", "WIRE-10.1.1-09", "WIRE-15.22-15")
@pytest.mark.parametrize("lie", [_outside, _short, _spoilt, _old, _stale])
def test_what_must_not_be_mapped_is_not_mapped_without_a_driver_either(
    peer: WireProducer, consumer: Consumer, lie: Callable[[WireProducer, Regions], dict[str, Any]]
) -> None:
    """Containment, size, superblock, age of the announce, activity; an honest announce of a later epoch is mapped."""
    peer.announces = False
    regions = peer.make_regions(peer.epoch + 1)
    peer.say(ShmPoolAnnounce, **lie(peer, regions))
    peer.fence(consumer)
    consumer.poll()
    assert not mapped_files(regions.folder)
    assert consumer.epoch != regions.epoch
    honest = peer.use(peer.make_regions(peer.epoch + 2))
    peer.announces = True
    assert deliver(peer, consumer)[0] == honest.epoch


@pytest.mark.spec("WIRE-15.14-03", "WIRE-15.14-01")
def test_a_second_writer_or_a_dead_one_ends_the_mapping_without_a_driver_too(
    peer: WireProducer, shared_media_driver: aeron.MediaDriver
) -> None:
    """Another pid in the superblock is a second writer; a stamp that is not refreshed a dead one."""
    settings = peer.settings | {"policies.announce_period_ms": SHORT_PERIOD_MS}
    with tp.connect(shared_media_driver.aeron_dir, overrides=settings) as client:
        _check_writers(peer, client.consumer(peer.stream_id, driver=False))


def _check_writers(peer: WireProducer, consumer: Consumer) -> None:
    deliver(peer, consumer)
    peer.breathes = False
    wait_waiting(consumer)
    peer.breathes = True
    assert deliver(peer, consumer)[0] == peer.epoch
    peer.regions.set_superblock(RING, pid=1)
    wait_waiting(consumer)
    regions = peer.new_epoch()
    assert deliver(peer, consumer)[0] == regions.epoch


# --- ids


def collide(peer: WireProducer, consumer_id: int) -> None:
    """Another process reports under that id."""
    peer.send(consumer_qos(peer.stream_id, consumer_id, epoch=peer.epoch, mode=Mode.STREAM), peer.endpoints.qos)


@pytest.mark.spec("WIRE-10.1.2-16")
def test_a_standalone_consumer_whose_id_another_process_uses_takes_another(
    peer: WireProducer, consumer: Consumer
) -> None:
    """At once, and without losing a frame; reports of other ids and other streams are no reason."""
    first = consumer.consumer_id
    received = consumer.stats.received
    collide(peer, first + 1)
    peer.send(consumer_qos(peer.stream_id + 1_000_000, first), peer.endpoints.qos)
    seqs = [peer.publish(np.zeros(8, np.uint8)) for _ in range(3)]
    assert drain(consumer) == seqs
    assert consumer.consumer_id == first
    since = peer.now
    collide(peer, first)
    wait_until(lambda: consumer.poll() is None and consumer.consumer_id != first, "it has another id")
    peer.wait_for(ConsumerHello, since, consumer_id=consumer.consumer_id)
    peer.wait_for(QosConsumer, since, consumer_id=consumer.consumer_id)
    peer.publish(np.zeros(8, np.uint8))
    assert len(drain(consumer)) == 1
    assert consumer.stats.received == received + 4


@pytest.mark.spec("WIRE-10.1.2-16")
def test_a_consumer_with_a_lease_whose_id_another_process_uses_attaches_with_another(
    peer: WireProducer, client: Client
) -> None:
    """The id is the lease's: that lease is given back, and the new one has the new id. Not again for a while."""
    peer.answers = True
    consumer = client.consumer(peer.stream_id)
    deliver(peer, consumer)
    first = consumer.consumer_id
    collide(peer, first)
    peer.wait_for(ShmDetachRequest, client_id=first)
    wait_until(lambda: consumer.poll() is None and consumer.is_active, "it is attached again")
    second = consumer.consumer_id
    assert second != first
    assert deliver(peer, consumer)[0] == peer.epoch
    collide(peer, second)
    assert deliver(peer, consumer)[0] == peer.epoch
    peer.fence(consumer)
    assert consumer.consumer_id == second
