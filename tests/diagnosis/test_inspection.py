# SPDX-License-Identifier: Apache-2.0
"""Inspection of a foreign stream: true to the byte, whatever it lies about, and unnoticed by its producer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.diagnosis.announced_streams import observing
from tensorpool.diagnosis.inspection import Inspection, inspect_stream
from tensorpool.diagnosis.streams import Wanted
from tensorpool.wire.control import DataSourceAnnounce, ShmPoolAnnounce
from tensorpool.wire.driver import Role, ShmLeaseKeepalive
from tests.shm.by_hand import mapped_files, open_files
from tests.support.messages import consumer_qos, hello
from tests.support.patience import PATIENT
from tests.support.regions import RING
from tests.support.wire_producer import WireProducer

type Inspect = Callable[..., Inspection]


@pytest.fixture
def peer(shm_dir: Path, shared_media_driver: aeron.MediaDriver) -> Iterator[WireProducer]:
    with WireProducer(shm_dir / "regions", shared_media_driver.aeron_dir) as peer:
        yield peer


@contextmanager
def saying(says: Callable[[], object]) -> Iterator[None]:
    """Again and again, as peers do: what was said before an observer came does not count."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(0.05):
            says()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.fixture
def inspect(peer: WireProducer, shared_media_driver: aeron.MediaDriver) -> Inspect:
    """Without discovery, as a foreign deployment may be: announces have to do."""

    def look(stream: str, seconds: float = 0.3, says: Callable[[], object] = lambda: None) -> Inspection:
        settings = peer.settings | {"discovery.enabled": False, "policies.announce_period_ms": 1000}
        config = tp.DriverConfig.load(environ=PATIENT, overrides=settings)
        where = shared_media_driver.aeron_dir
        with tp.connect(where, config=config) as client, observing(config, where) as observer, saying(says):
            deadline = time.monotonic() + 30
            while not observer.snapshot().streams and time.monotonic() < deadline:
                observer.do_work()
            return inspect_stream(client, observer, Wanted(stream), timeout=1, seconds=seconds)

    return look


def test_a_foreign_stream_is_shown_and_notices_nothing(peer: WireProducer, inspect: Inspect, shm_dir: Path) -> None:
    """Layout, superblocks, slots and owner; no lease was asked for, nothing is mapped or open afterwards."""
    for _ in range(11):
        peer.publish(np.zeros((4, 8), np.uint16))
    found = inspect(str(peer.stream_id))
    assert (found.stream_id, found.name, found.reported_by, found.epoch) == (
        peer.stream_id,
        None,
        "announce",
        peer.epoch,
    )
    assert found.layout.nslots == peer.nslots
    assert [(pool.pool_id, pool.stride_bytes) for pool in found.layout.pools] == list(peer.pools.items())
    assert found.problems == []
    assert [region.name for region in found.regions] == ["header ring", "pool 1", "pool 7"]
    for region in found.regions:
        assert region.superblock is not None
        assert (region.superblock.epoch, region.superblock.stream_id) == (peer.epoch, peer.stream_id)
        assert region.file is not None
        assert region.file.owner == "root"
        assert region.activity_age_s is not None
        assert region.activity_age_s < 60
    assert found.slots is not None
    assert (found.slots.committed, found.slots.oldest_seq, found.slots.newest_seq) == (8, 3, 10)
    assert found.slots.newest is not None
    assert (found.slots.newest.shape, found.slots.newest.dtype) == ((4, 8), "UINT16")
    assert [(lease.role, lease.client_id, lease.lease_id) for lease in found.leases] == [
        ("PRODUCER", peer.producer_id, None)
    ]
    assert peer.grants == []
    sent = {type(entry.message).__name__ for entry in peer.transcript}
    assert sent <= {"ShmPoolAnnounce", "FrameDescriptor"}
    assert mapped_files(shm_dir / "regions") == []
    assert [path for path in open_files(shm_dir / "regions") if "header" not in path and "pool" not in path] == []


def test_holders_of_leases_and_lagging_consumers_are_observed(peer: WireProducer, inspect: Inspect) -> None:
    """Keepalives tell holders, QoS tells lag and drops, announces the name."""
    for _ in range(5):
        peer.publish(np.zeros(8, np.uint8))

    def say() -> None:
        peer.say(DataSourceAnnounce, name="foreign/one", meta_version=4)
        for client_id, role in ((peer.producer_id, Role.PRODUCER), (77, Role.CONSUMER)):
            message = ShmLeaseKeepalive(
                lease_id=client_id + 1, stream_id=peer.stream_id, client_id=client_id, role=role, client_timestamp_ns=1
            )
            peer.send(message, on=peer.endpoints.control)
        peer.send(hello(peer.stream_id, 77), on=peer.endpoints.control)
        losses = {"epoch": peer.epoch, "last_seq_seen": 1, "drops_gap": 2, "drops_late": 3}
        qos = consumer_qos(peer.stream_id, 77, **losses)
        peer.send(qos, on=peer.endpoints.qos)

    found = inspect(str(peer.stream_id), seconds=1.0, says=say)
    assert [(lease.role, lease.client_id, lease.lease_id) for lease in found.leases] == [
        ("PRODUCER", peer.producer_id, peer.producer_id + 1),
        ("CONSUMER", 77, 78),
    ]
    assert all(lease.expires_in_s is not None and 0 <= lease.expires_in_s <= 3 for lease in found.leases)
    (consumer,) = found.consumers
    assert (consumer.consumer_id, consumer.last_seq, consumer.drops_gap, consumer.drops_late) == (77, 1, 2, 3)
    assert consumer.lag == 3
    assert (found.name, found.status and found.status.meta_version) == ("foreign/one", 4)


def test_a_difference_is_reported_field_by_field(peer: WireProducer, inspect: Inspect) -> None:
    """A superblock of another layout, a pool that is cut short, a file that may not be opened: each in its region."""
    peer.regions.set_superblock(RING, layout_version=3, nslots=16)
    peer.regions.shorten(7)
    os.unlink(peer.regions.paths[1])
    found = inspect(str(peer.stream_id))
    ring, small, large = found.regions
    assert ring.problem == f"layout_version: expected 1, found 3; nslots: expected {peer.nslots}, found 16"
    assert small.problem.startswith("missing: there is no such file")
    assert large.problem.startswith(f"size: expected at least {64 + 8 * 4096} bytes, found {64 + 8 * 4096 - 1}")
    assert found.problems == [f"{region.name}: {region.problem}" for region in found.regions]


def test_an_invalid_layout_is_reported_and_nothing_is_opened(peer: WireProducer, inspect: Inspect) -> None:
    """Slots of another size: shown as announced, with the flaw."""
    peer.announces = False
    found = inspect(
        str(peer.stream_id),
        says=lambda: peer.say(ShmPoolAnnounce, epoch=peer.epoch + 1, header_nslots=6),
    )
    assert found.layout.problem.startswith("announced ring: pool 1: nslots = 8: expected the ring's 6")
    assert (found.regions, found.slots) == ((), None)


def test_an_unknown_name_is_answered_with_what_is_announced(peer: WireProducer, inspect: Inspect) -> None:
    """Without discovery too, and within a bounded time."""
    with pytest.raises(tp.TensorPoolError, match=rf"no stream 'absent'.*\(no name\) \({peer.stream_id} of driver-01\)"):
        inspect("absent")
