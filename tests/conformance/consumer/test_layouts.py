# SPDX-License-Identifier: Apache-2.0
"""What announces and descriptors of the mapped epoch, and of no epoch, do to a consumer. Wire §10.1.1, §10.2.1, §15.1,
§15.21; decisions C17, K1, K2.

The other side is `WireProducer`, whose announces are honest but for the one field that a test wants otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Client, Consumer, State, StateChange
from tensorpool.wire.control import FrameDescriptor, ShmPoolAnnounce
from tensorpool.wire.driver import ShmAttachRequest
from tests.shm.by_hand import mapped_files
from tests.support.consuming import deliver, drain
from tests.support.processes import wait_until
from tests.support.regions import RING, Regions
from tests.support.wire_producer import WireProducer

PERIOD_MS = 60_000  # in the consumer's configuration: nothing is stale within a test, and no question is repeated
POOL = 7


@pytest.fixture
def connected(shared_media_driver: aeron.MediaDriver, peer: WireProducer) -> Iterator[Client]:
    settings = peer.settings | {"policies.announce_period_ms": PERIOD_MS}
    with tp.connect(shared_media_driver.aeron_dir, overrides=settings) as client:
        yield client


# --- announces of the mapped epoch


def _one_more_pool(regions: Regions) -> dict[str, Any]:
    pools = regions.layout["payload_pools"]
    more = msgspec.structs.replace(pools[0], pool_id=99, region_uri=pools[0].region_uri + "x")
    return {"payload_pools": (*pools, more)}


def _double_slots(regions: Regions) -> dict[str, Any]:
    nslots = 2 * regions.nslots
    pools = (msgspec.structs.replace(pool, pool_nslots=nslots) for pool in regions.layout["payload_pools"])
    return {"header_nslots": nslots, "payload_pools": tuple(pools)}


def _other_pool_id(regions: Regions) -> dict[str, Any]:
    return regions.layout_with(POOL, pool_id=POOL + 1)


def _ring_and_pool_swapped(regions: Regions) -> dict[str, Any]:
    swapped = regions.layout_with(POOL, region_uri=regions.uri(RING))
    return swapped | {"header_region_uri": regions.uri(POOL)}


MISMATCHES: list[Any] = [
    pytest.param(lambda it: {"layout_version": 2}, id="layout version", marks=pytest.mark.spec("WIRE-15.1-01")),
    pytest.param(_double_slots, id="slot count", marks=pytest.mark.spec("WIRE-15.1-02")),
    pytest.param(lambda it: {"header_slot_bytes": 512}, id="slot bytes", marks=pytest.mark.spec("WIRE-15.1-03")),
    pytest.param(
        lambda it: it.layout_with(POOL, stride_bytes=2 * it.pools[POOL]),
        id="stride",
        marks=pytest.mark.spec("WIRE-15.1-04"),
    ),
    pytest.param(_ring_and_pool_swapped, id="region types", marks=pytest.mark.spec("WIRE-15.1-05")),
    pytest.param(_other_pool_id, id="pool id", marks=pytest.mark.spec("WIRE-15.1-06")),
    pytest.param(_one_more_pool, id="a pool more"),
    pytest.param(lambda it: {"payload_pools": it.layout["payload_pools"][:-1]}, id="a pool less"),
    pytest.param(
        lambda it: {"header_region_uri": f"shm:file?path={it.folder}/elsewhere"},
        id="ring elsewhere",
    ),
]


@pytest.mark.spec("WIRE-15.1-07")
@pytest.mark.parametrize("lie", MISMATCHES)
def test_an_announce_of_the_mapped_epoch_that_differs_from_what_is_mapped_remaps(
    peer: WireProducer, consumer: Consumer, states: list[StateChange], lie: Callable[[Regions], dict[str, Any]]
) -> None:
    """The superblocks are as they were, so nothing but the announce tells; it is counted, and the truth maps again."""
    peer.announces = False
    assert consumer.stats.layout_mismatches == 0
    peer.say(ShmPoolAnnounce, **peer.regions.layout | lie(peer.regions))
    wait_until(lambda: consumer.poll() is None and consumer.stats.layout_mismatches == 1, "the announce is compared")
    since = [change.state for change in states]
    assert since[-1] is State.WAITING or since[-2:] == [State.WAITING, State.ACTIVE]
    peer.announces = True
    assert deliver(peer, consumer)[0] == peer.epoch


@pytest.mark.spec("WIRE-15.1-07")
def test_what_the_announce_describes_is_mapped_where_it_exists(peer: WireProducer, consumer: Consumer) -> None:
    """Other files of the same epoch, as announced: those are read from then on, and the old ones are let go."""
    before = peer.regions
    peer.use(peer.make_regions(peer.epoch))
    assert deliver(peer, consumer)[0] == before.epoch
    wait_until(lambda: consumer.poll() is None and not mapped_files(before.folder), "the old files are unmapped")
    assert consumer.stats.layout_mismatches == 1


@pytest.mark.parametrize("epoch", [0, 2**64 - 1], ids=["zero", "null"])
def test_an_announce_of_no_epoch_changes_nothing(
    peer: WireProducer, consumer: Consumer, states: list[StateChange], epoch: int
) -> None:
    """Malformed: not one frame is lost by it."""
    lost = consumer.stats.lost
    peer.say(ShmPoolAnnounce, epoch=epoch)
    peer.fence(consumer)
    seqs = [peer.publish(np.zeros(8, np.uint8)) for _ in range(3)]
    assert drain(consumer) == seqs
    assert (consumer.stats.lost, consumer.stats.layout_mismatches) == (lost, 0)
    assert [change.state for change in states] == [State.ACTIVE]


# --- descriptors of a later epoch


@pytest.mark.spec("WIRE-10.2.1-07", "WIRE-15.21-09")
def test_a_descriptor_of_a_later_epoch_makes_the_consumer_ask_and_nothing_else(
    peer: WireProducer, consumer: Consumer
) -> None:
    """The driver is asked at once, once, by the request that it granted; frames of the mapped epoch go on."""
    asked = peer.wait_for(ShmAttachRequest, client_id=consumer.consumer_id).message
    since = peer.now
    for _ in range(5):
        peer.say(FrameDescriptor, epoch=peer.epoch + 1, seq=0)
        assert drain(consumer) == []
    again = peer.wait_for(ShmAttachRequest, since, client_id=consumer.consumer_id).message
    assert again == asked
    seqs = [peer.publish(np.zeros(8, np.uint8)) for _ in range(3)]
    assert drain(consumer) == seqs
    peer.fence(consumer)
    assert consumer.is_active
    assert len(peer.received(ShmAttachRequest, since)) == 1


@pytest.mark.spec("WIRE-15.21-09", "WIRE-15.21-10")
def test_the_drivers_answer_confirms_the_later_epoch_before_it_is_announced(
    peer: WireProducer, consumer: Consumer
) -> None:
    """From the answer on no frame of the old epoch is delivered, and those of the new one are."""
    peer.announces = False
    old, new = peer.regions, peer.make_regions(peer.epoch + 1)
    peer.use(new)
    peer.say(FrameDescriptor, seq=0)
    wait_until(lambda: consumer.poll(0.02) is None and consumer.epoch == new.epoch, "the new epoch is mapped")
    received = consumer.stats.received
    peer.write(old.nslots, b"late", regions=old)
    peer.say(FrameDescriptor, epoch=old.epoch, seq=old.nslots)
    assert drain(consumer) == []
    assert consumer.stats.received == received
    assert deliver(peer, consumer)[0] == new.epoch


def test_an_answer_of_the_mapped_epoch_changes_nothing(
    peer: WireProducer, consumer: Consumer, states: list[StateChange]
) -> None:
    """The descriptor was forged: the driver knows no later epoch, and the mapping stays."""
    since = peer.now
    peer.say(FrameDescriptor, epoch=2**64 - 2, seq=0)
    assert drain(consumer) == []
    peer.wait_for(ShmAttachRequest, since, client_id=consumer.consumer_id)
    peer.fence(consumer)
    seqs = [peer.publish(np.zeros(8, np.uint8)) for _ in range(3)]
    assert drain(consumer) == seqs
    assert [change.state for change in states] == [State.ACTIVE]
