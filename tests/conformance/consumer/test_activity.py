# SPDX-License-Identifier: Apache-2.0
"""Our producer and our consumer on a driver that leaves the activity stamp to producers. Wire §7.1, §15.14; C9.

The driver is `WireProducer` with `breathes` off: it grants, announces and never stamps anything.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Client, State, StateChange
from tensorpool.wire.control import ClockDomain, ShmPoolAnnounce
from tests.support.processes import wait_until
from tests.support.regions import RING
from tests.support.wire_producer import WireProducer

PERIOD_MS = 1000  # stale after 4 s; a driver that is silent for 3 s is lost
FRAME = np.arange(8, dtype=np.uint8)


@pytest.fixture
def driver(shared_media_driver: aeron.MediaDriver, shm_dir: Path) -> Iterator[WireProducer]:
    with WireProducer(shm_dir, shared_media_driver.aeron_dir) as driver:
        driver.breathes = False
        driver.producer_id = 0
        yield driver


@pytest.fixture
def client(shared_media_driver: aeron.MediaDriver, driver: WireProducer) -> Iterator[Client]:
    settings = driver.settings | {"policies.announce_period_ms": PERIOD_MS}
    with tp.connect(shared_media_driver.aeron_dir, overrides=settings) as client:
        yield client


def stamp(driver: WireProducer, region: int = RING) -> int:
    return int(struct.unpack("<Q", driver.regions.read(region, 56, 8))[0])


def superblocks(driver: WireProducer) -> dict[int, bytes]:
    """Without the activity stamp."""
    return {region: driver.regions.read(region, 0, 56) for region in (RING, *driver.regions.pools)}


@pytest.mark.spec("WIRE-7.1-05", "WIRE-7.1-04")
def test_a_stream_of_ours_lives_on_a_driver_that_stamps_nothing(driver: WireProducer, client: Client) -> None:
    """The consumer comes first and waits; once the producer writes it is never without the stream again."""
    for region in (RING, *driver.regions.pools):
        driver.regions.set_superblock(region, activity_timestamp_ns=1)
    states: list[StateChange] = []
    consumer = client.consumer(driver.stream_id, timeout=30, on_state=states.append)
    assert (consumer.state, consumer.epoch) == (State.WAITING, None)
    producer = client.producer(driver.stream_id)
    before = superblocks(driver)
    wait_until(lambda: consumer.poll() is None and consumer.epoch == producer.epoch, "the epoch is mapped")
    assert producer.wait_for_consumers(1, 60)  # the first frame is described to it
    since = len(states)
    for _ in range(5):  # refreshes: longer than it takes a stamp to become stale
        last = stamp(driver)
        wait_until(lambda last=last: consumer.poll(0.01) is None and stamp(driver) != last, "the stamp is refreshed")
        assert producer.publish(FRAME) is not None
        assert consumer.poll(60) is not None
    consumer.poll()
    assert [change.state for change in states[since:] if change.state is not State.ACTIVE] == []
    assert superblocks(driver) == before
    assert len({stamp(driver, region) for region in (RING, *driver.regions.pools)}) == 1
    producer.close()


def test_the_stamp_is_by_the_clock_of_the_announces(driver: WireProducer, client: Client) -> None:
    """C8: with REALTIME_SYNCED the wall clock's."""
    driver.clock_domain = ClockDomain.REALTIME_SYNCED
    producer = client.producer(driver.stream_id)
    first = stamp(driver)
    wait_until(lambda: stamp(driver) != first, "the producer refreshes the stamp")
    assert abs(stamp(driver) - time.time_ns()) < 60 * 1_000_000_000
    producer.close()


def test_without_announces_our_producer_stamps_nothing(driver: WireProducer, client: Client) -> None:
    """The driver may be dead: its silence ends the lease, and until then the stamp stays as it is.

    But for one refresh, which announces from before the silence may have asked for.
    """
    driver.lease_ns = None
    producer = client.producer(driver.stream_id)
    since = driver.now
    wait_until(lambda: driver.received(ShmPoolAnnounce, since), "the epoch is announced")
    driver.announces = False
    seen: set[int] = set()
    wait_until(lambda: seen.add(stamp(driver)) or producer.state is State.WAITING, "the lease is lost")
    assert len(seen) <= 2
