# SPDX-License-Identifier: Apache-2.0
"""Clients are killed or stopped under a driver: their leases end in time, and no other client's memory is touched."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tensorpool import aeron
from tensorpool._core import SlotFrame
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import LeaseRevokeReason, ResponseCode, Role, ShmLeaseKeepalive, ShmLeaseRevoked
from tests.support.client_nursery import LAYOUT, Nursery, frame, ring_of
from tests.support.driver_client import DriverClient, attach_request, deployed
from tests.support.driver_process import NSLOTS, Deployment, path_of
from tests.support.processes import wait_until

STREAMS = range(30_000, 30_003)
POLICIES = {"announce_period_ms": 500, "lease_keepalive_interval_ms": 500}
SLACK_NS = 3_000_000_000  # for a machine that is busy with something else

_stream_ids = iter(STREAMS)


@pytest.fixture(scope="module")
def deployment(shared_media_driver: aeron.MediaDriver) -> Iterator[Deployment]:
    """A driver with leases of 1.5 s."""
    with deployed(shared_media_driver.aeron_dir, streams=STREAMS, policies=POLICIES) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def nursery(deployment: Deployment) -> Iterator[Nursery]:
    with Nursery(deployment) as nursery:
        yield nursery


@pytest.fixture
def client(deployment: Deployment) -> Iterator[DriverClient]:
    with DriverClient(deployment) as client:
        yield client.forget()


@pytest.fixture
def stream_id() -> int:
    """A stream of the test's own."""
    return next(_stream_ids)


@pytest.mark.spec("DRV-7-01", "DRV-7-02", "DRV-4.7a-03", "DRV-4.9-15", "DRV-6-03")
def test_a_killed_producer_expires_within_the_grace_and_makes_room(
    deployment: Deployment, client: DriverClient, nursery: Nursery, stream_id: int
) -> None:
    """After kill -9 amid writing: EXPIRED within the grace, then a higher epoch; a new producer attaches."""
    consumer = client.attach(stream_id)
    client.kept.append(consumer)
    pid = nursery.hold(Role.PRODUCER, stream_id)
    granted = nursery.wait_for(pid, "granted", client)
    announce = client.wait_for(ShmPoolAnnounce, stream_id=stream_id, epoch=granted["epoch"]).message
    assert announce.producer_id != 0
    header = path_of(announce.header_region_uri)
    client.wait_until(lambda: any(header.read_bytes()[64:]), "it writes frames")
    client.wait_for(ShmLeaseKeepalive, lease_id=granted["lease_id"])

    nursery.kill(pid)
    killed_ns = time.monotonic_ns()
    revoke = client.wait_for(ShmLeaseRevoked, lease_id=granted["lease_id"])
    assert revoke.message.reason is LeaseRevokeReason.EXPIRED
    assert (revoke.message.client_id, revoke.message.role) == (announce.producer_id, Role.PRODUCER)
    kept = client.received(ShmLeaseKeepalive, lease_id=granted["lease_id"])[-1].message
    assert revoke.message.timestamp_ns >= kept.client_timestamp_ns + deployment.lease_ns
    assert revoke.message.timestamp_ns <= killed_ns + deployment.lease_ns + SLACK_NS
    bumped = client.wait_for(ShmPoolAnnounce, revoke.index, stream_id=stream_id).message
    assert bumped.epoch > granted["epoch"]
    assert bumped.producer_id == 0

    successor = client.attach(stream_id, Role.PRODUCER)
    client.kept.append(successor)
    assert successor.epoch > bumped.epoch
    assert client.next_announce(stream_id).message.producer_id == successor.client_id
    assert not client.received(ShmLeaseRevoked, lease_id=consumer.lease_id), "the consumer kept its lease"
    assert [received.message.lease_id for received in client.received(ShmLeaseRevoked, stream_id=stream_id)] == [
        granted["lease_id"]
    ]


def test_a_killed_consumer_expires_and_no_other_client_notices(
    deployment: Deployment, client: DriverClient, nursery: Nursery, stream_id: int
) -> None:
    """After kill -9 of one of two consumers: its lease alone expires, the epoch stays, the producer goes on."""
    producer = client.attach(stream_id, Role.PRODUCER)
    client.kept.append(producer)
    pids = [nursery.hold(Role.CONSUMER, stream_id) for _ in range(2)]
    victim, survivor = (nursery.wait_for(pid, "granted", client) for pid in pids)
    nursery.kill(pids[0])
    killed_ns = time.monotonic_ns()
    revoke = client.wait_for(ShmLeaseRevoked, lease_id=victim["lease_id"]).message
    assert revoke.reason is LeaseRevokeReason.EXPIRED
    assert revoke.timestamp_ns <= killed_ns + deployment.lease_ns + SLACK_NS
    end_ns = time.monotonic_ns() + 2 * deployment.lease_ns
    client.wait_until(lambda: time.monotonic_ns() > end_ns, "two lifetimes pass")
    assert len(client.received(ShmLeaseRevoked, stream_id=stream_id)) == 1
    announce = client.next_announce(stream_id).message
    assert (announce.epoch, announce.producer_id) == (producer.epoch, producer.client_id)
    assert survivor["epoch"] == producer.epoch
    assert [entry["event"] for entry in nursery.diary(pids[1])] == ["granted"]


@pytest.mark.spec("DRV-4.7-04", "DRV-6-03", "DRV-7-02")
def test_a_stopped_producer_that_wakes_up_cannot_touch_the_new_epoch(
    deployment: Deployment, client: DriverClient, nursery: Nursery, stream_id: int
) -> None:
    """SIGSTOP past expiry, a successor writes, SIGCONT: the zombie writes into memory that no consumer reads any more.

    Every slot that the successor wrote is intact, no other slot is committed, and the zombie's keepalives revive
    nothing.
    """
    pid = nursery.hold(Role.PRODUCER, stream_id, stubborn=True)
    granted = nursery.wait_for(pid, "granted", client)
    announce = client.wait_for(ShmPoolAnnounce, stream_id=stream_id, epoch=granted["epoch"]).message
    with path_of(announce.header_region_uri).open("rb") as old:  # it may lose its name
        wait_until(lambda: any(os.pread(old.fileno(), 64 + 256, 0)[64:]), "it writes frames")
        os.kill(pid, signal.SIGSTOP)
        client.wait_for(ShmLeaseRevoked, lease_id=granted["lease_id"])

        successor = client.attach(stream_id, Role.PRODUCER)
        client.kept.append(successor)
        assert successor.epoch > granted["epoch"]
        ring = ring_of(successor, deployment.base_dir, writable=True)
        writer, count = ring.writer(), NSLOTS // 2
        for seq in range(count):
            writer.write(seq, LAYOUT, frame(successor.client_id, seq))
        regions = [bytes(memoryview(region.mapping)[64:]) for region in ring.regions]

        stopped = os.pread(old.fileno(), 64 + 256 * NSLOTS, 0)
        os.kill(pid, signal.SIGCONT)
        client.wait_until(lambda: os.pread(old.fileno(), 64 + 256 * NSLOTS, 0) != stopped, "the zombie writes on")
        resumed_ns = time.monotonic_ns()
        # Long enough for its keepalives to have kept a lease, had there been one.
        client.wait_until(lambda: time.monotonic_ns() > resumed_ns + 2 * deployment.lease_ns, "two lifetimes pass")
        assert os.pread(old.fileno(), 64 + 256 * NSLOTS, 0) != stopped

    assert [bytes(memoryview(region.mapping)[64:]) for region in ring.regions] == regions
    reader = ring_of(successor, deployment.base_dir).reader()
    for seq in range(count):
        found = reader.read(seq)
        assert isinstance(found, SlotFrame), (seq, found)
        payload = bytearray(LAYOUT.extent_bytes)
        assert reader.copy_into(found, payload)
        assert payload == frame(successor.client_id, seq)
    assert reader.newest() == count - 1
    assert not any(isinstance(reader.read(seq), SlotFrame) for seq in range(count, NSLOTS))

    revokes = client.received(ShmLeaseRevoked, stream_id=stream_id)
    assert [received.message.lease_id for received in revokes] == [granted["lease_id"]], (
        "once, and the successor's is alive"
    )
    refusal = client.refused(attach_request(stream_id, Role.PRODUCER))
    assert refusal.code is ResponseCode.REJECTED
    assert f"client {successor.client_id}, lease {successor.lease_id}" in refusal.error_message
    announce = client.next_announce(stream_id).message
    assert (announce.epoch, announce.producer_id) == (successor.epoch, successor.client_id)
    assert [entry["event"] for entry in nursery.diary(pid)] == ["granted"], "it does not know that it is over"
