# SPDX-License-Identifier: Apache-2.0
"""Leases from grant to their end, and what the driver tells of it. Driver Model §4.1, §4.4, §4.7-§4.9, §6, §7.

Leases are short here, and the client keeps alive only those that a test wants to live. Times are compared with bounds
that hold on a machine of any speed.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import pytest

from tensorpool import aeron
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import LeaseRevokeReason, ResponseCode, Role, ShmDetachResponse, ShmLeaseRevoked
from tests.support.driver_client import DriverClient, Lease, attach_request, deployed, shutdown_request
from tests.support.driver_process import Deployment, DriverProcess, path_of
from tests.support.listener import ReceivedMessage
from tests.support.processes import private_directory
from tests.support.region_bytes import superblock

STREAMS = range(11_000, 11_020)
POLICIES = {"lease_keepalive_interval_ms": 200, "lease_expiry_grace_intervals": 8}
TURN_NS = 1_000_000_000  # how old the time may be that a driver reads once a turn, on a machine that stands still

_stream_ids = iter(STREAMS)


@pytest.fixture(scope="module")
def deployment(shared_media_driver: aeron.MediaDriver) -> Iterator[Deployment]:
    with deployed(shared_media_driver.aeron_dir, streams=STREAMS, policies=POLICIES) as deployment:
        yield deployment


@pytest.fixture
def stream_id() -> int:
    """A stream of the test's own."""
    return next(_stream_ids)


@pytest.fixture(scope="module")
def operated(shared_media_driver: aeron.MediaDriver) -> Iterator[tuple[Deployment, DriverProcess]]:
    """A driver that hardly announces by the clock, and an operator who can revoke: every message is prompted."""
    with private_directory() as folder:
        deployment = Deployment(
            folder, shared_media_driver.aeron_dir, streams=STREAMS, policies=POLICIES | {"announce_period_ms": 600_000}
        )
        with deployment.start_operated() as process, DriverClient(deployment) as client:
            client.meet(process)
            client.close()
            yield deployment, process
            assert not process.has_ended, process.finish()


@pytest.fixture
def quiet(operated: tuple[Deployment, DriverProcess]) -> Iterator[DriverClient]:
    """A client of the driver that announces changes only."""
    with DriverClient(operated[0]) as client:
        yield client.forget()


def revoke_of(client: DriverClient, lease: Lease) -> ReceivedMessage[ShmLeaseRevoked]:
    """The one notice of this lease's end; waits for it."""
    received = client.wait_for(ShmLeaseRevoked, lease_id=lease.lease_id)
    client.fence()
    assert client.received(ShmLeaseRevoked, lease_id=lease.lease_id) == [received]
    return received


def packed_revoke(revoked: ShmLeaseRevoked, lease: Lease, role: int, reason: int) -> bytes:
    text = revoked.error_message.encode()
    names = struct.pack("<Q I I B B", lease.lease_id, lease.stream_id, lease.client_id, role, reason)
    return struct.pack("<4H Q", 26, 7, 901, 1, revoked.timestamp_ns) + names + struct.pack("<I", len(text)) + text


# --- time


@pytest.mark.spec("DRV-4.1-02", "DRV-4.4-05")
@pytest.mark.parametrize("role", list(Role))
def test_the_granted_deadline_is_interval_times_grace_from_the_grant(
    client: DriverClient, deployment: Deployment, stream_id: int, role: Role
) -> None:
    """The expiry in a grant follows from the two configured values, on the monotonic clock."""
    lease = client.attach(stream_id, role)
    expiry_ns = lease.response.lease_expiry_timestamp_ns
    assert expiry_ns is not None
    granted_ns = expiry_ns - deployment.lease_ns
    assert lease.sent_ns - TURN_NS <= granted_ns <= lease.received.received_ns
    client.detach(lease)


@pytest.mark.spec("DRV-4.1-03", "DRV-4.4-01", "DRV-4.4-04", "DRV-4.7-04", "DRV-4.9-05", "DRV-6-03", "DRV-7-01")
@pytest.mark.spec("DRV-4.9-15", "DRV-4.9-20", "DRV-7-02", "DRV-8-04", "DRV-A-09", "WIRE-15.2-01")
def test_a_silent_producer_expires_and_the_stream_gets_a_new_epoch(
    client: DriverClient, deployment: Deployment, stream_id: int
) -> None:
    """Revoked as EXPIRED not before its deadline; then, and only then, a higher epoch without producer is announced."""
    lease = client.attach(stream_id, Role.PRODUCER)
    received = revoke_of(client, lease)
    assert received.data == packed_revoke(received.message, lease, role=1, reason=2)
    assert received.message.timestamp_ns >= (lease.response.lease_expiry_timestamp_ns or 0)
    assert received.message.timestamp_ns <= received.received_ns

    bumped = client.wait_for(ShmPoolAnnounce, received.index, stream_id=stream_id).message
    assert bumped.epoch > lease.epoch
    assert bumped.producer_id == 0
    before = client.received(ShmPoolAnnounce, stream_id=stream_id)
    assert all(other.message.epoch <= lease.epoch for other in before if other.index < received.index)

    assert client.detach(lease).message.code is ResponseCode.REJECTED
    client.send(lease.keepalive())  # revives nothing
    assert client.detach(lease).message.code is ResponseCode.REJECTED
    successor = client.attach(stream_id, Role.PRODUCER)
    assert successor.epoch > bumped.epoch
    client.detach(successor)
    assert client.received(ShmLeaseRevoked, lease_id=lease.lease_id) == [received]


@pytest.mark.spec("DRV-4.9-06", "DRV-4.7-04", "DRV-6-07")
def test_a_silent_consumer_expires_and_the_epoch_stays(client: DriverClient, stream_id: int) -> None:
    """The driver revokes it like a producer's, but neither the epoch nor the producer's lease is touched."""
    producer = client.attach(stream_id, Role.PRODUCER)
    client.kept.append(producer)
    consumer = client.attach(stream_id)
    assert consumer.epoch == producer.epoch
    received = revoke_of(client, consumer)
    assert received.data == packed_revoke(received.message, consumer, role=2, reason=2)
    announce = client.next_announce(stream_id).message
    assert (announce.epoch, announce.producer_id) == (producer.epoch, producer.client_id)
    client.kept.clear()
    assert client.detach(producer).message.code is ResponseCode.OK


@pytest.mark.spec("DRV-4.4-03", "DRV-4.7-02", "DRV-A-06")
def test_keepalives_carry_a_lease_past_its_first_deadline(
    client: DriverClient, deployment: Deployment, stream_id: int
) -> None:
    """After twice the granted lifetime the lease is still active, because it was kept alive."""
    lease = client.attach(stream_id, Role.PRODUCER)
    client.kept.append(lease)
    names = (lease.lease_id, stream_id, lease.client_id, 1)
    assert lease.keepalive(client_timestamp_ns=7).encode() == struct.pack("<4H Q I I B Q", 25, 5, 901, 1, *names, 7)
    end_ns = time.monotonic_ns() + 2 * deployment.lease_ns
    client.wait_until(lambda: time.monotonic_ns() > end_ns, "two lifetimes pass")
    assert client.refused(attach_request(stream_id, Role.PRODUCER)).code is ResponseCode.REJECTED
    assert client.next_announce(stream_id).message.producer_id == lease.client_id
    assert not client.received(ShmLeaseRevoked, lease_id=lease.lease_id)
    client.kept.clear()
    assert client.detach(lease).message.code is ResponseCode.OK


@pytest.mark.spec("DRV-4.1-01")
def test_keepalives_with_a_wrong_field_extend_nothing(client: DriverClient, stream_id: int) -> None:
    """Another stream, client, role or lease in it, or an undefined role: the lease expires as if nothing had come."""
    right = client.attach(stream_id)
    client.kept.append(right)
    leases = {name: client.attach(stream_id) for name in ("stream_id", "client_id", "role", "lease_id", "undefined")}
    wrong = [
        leases["stream_id"].keepalive(stream_id=stream_id + 1).encode(),
        leases["client_id"].keepalive(client_id=right.client_id).encode(),
        leases["role"].keepalive(role=Role.PRODUCER).encode(),
        leases["lease_id"].keepalive(lease_id=right.lease_id).encode(),
        leases["undefined"].keepalive().encode()[:24] + b"\x09" + bytes(8),
    ]

    def all_expired() -> bool:
        for message in wrong:
            client.send(message)
        ended = {received.message.lease_id for received in client.received(ShmLeaseRevoked)}
        return ended >= {lease.lease_id for lease in leases.values()}

    client.wait_until(all_expired, "the five expire")
    for lease in leases.values():
        assert revoke_of(client, lease).message.reason is LeaseRevokeReason.EXPIRED
    client.kept.clear()
    assert client.detach(right).message.code is ResponseCode.OK


# --- detach


@pytest.mark.spec("DRV-4.9-01", "DRV-4.9-05", "DRV-4.9-15", "DRV-4.7-03", "DRV-6-04")
def test_a_producers_detach_is_answered_then_published_then_announced(client: DriverClient, stream_id: int) -> None:
    """On the wire: the response, the notice with reason DETACHED, the announce of a higher epoch without producer."""
    lease = client.attach(stream_id, Role.PRODUCER)
    response = client.detach(lease)
    assert response.message.code is ResponseCode.OK
    bumped = client.announce_after(stream_id, lease.epoch)
    received = revoke_of(client, lease)
    assert received.data == packed_revoke(received.message, lease, role=1, reason=1)
    assert response.index < received.index < bumped.index
    assert bumped.message.producer_id == 0
    assert not [
        other
        for other in client.received(ShmPoolAnnounce, response.index, stream_id=stream_id)
        if other.message.epoch <= lease.epoch
    ], "a dead epoch is not announced again"


@pytest.mark.spec("DRV-4.9-01", "DRV-4.9-06", "DRV-6-07")
def test_a_consumers_detach_is_published_and_begins_no_epoch(client: DriverClient, stream_id: int) -> None:
    """Response, then notice; attach and detach of consumers leave the epoch as it was."""
    epoch = client.next_announce(stream_id).message.epoch
    lease = client.attach(stream_id)
    response = client.detach(lease)
    received = revoke_of(client, lease)
    assert response.message.code is ResponseCode.OK
    assert received.data == packed_revoke(received.message, lease, role=2, reason=1)
    assert response.index < received.index
    assert lease.epoch == client.next_announce(stream_id).message.epoch == epoch


@pytest.mark.spec("DRV-4.9-02", "DRV-4.9-03", "DRV-4.9-20")
def test_a_detach_that_does_not_match_ends_nothing(client: DriverClient, stream_id: int) -> None:
    """Every field has to be the lease's own, and a lease ends once; a refusal says why and is not sent to others."""
    lease = client.attach(stream_id)
    for wrong in (
        {"stream_id": stream_id + 1},
        {"client_id": lease.client_id + 1},
        {"role": Role.PRODUCER},
        {"lease_id": lease.lease_id + 1_000_000},
    ):
        response = client.detach(lease, **wrong).message
        assert response.code is ResponseCode.REJECTED, wrong
        assert response.error_message
    assert not client.received(ShmLeaseRevoked, lease_id=lease.lease_id)
    assert client.detach(lease).message.code is ResponseCode.OK
    assert client.detach(lease).message.code is ResponseCode.REJECTED
    revoke_of(client, lease)


# --- promptness


@pytest.mark.spec("WIRE-10.1.1-02", "DRV-8-03", "DRV-8-04", "DRV-6-01", "DRV-6-04")
def test_attach_and_detach_of_a_producer_are_announced_at_once(quiet: DriverClient, stream_id: int) -> None:
    """With a period of ten minutes the changes are announced all the same: response, announce; response, announce."""
    consumer = quiet.attach(stream_id)
    lease = quiet.attach(stream_id, Role.PRODUCER)
    attached = quiet.wait_for(ShmPoolAnnounce, stream_id=stream_id, producer_id=lease.client_id)
    assert attached.index > lease.received.index
    assert consumer.epoch < lease.epoch == attached.message.epoch
    response = quiet.detach(lease)
    detached = quiet.wait_for(ShmPoolAnnounce, response.index, stream_id=stream_id)
    assert detached.message.producer_id == 0
    assert detached.message.epoch > lease.epoch
    quiet.fence()
    announces = quiet.received(ShmPoolAnnounce, stream_id=stream_id)
    assert [received for received in announces if received.index > lease.received.index] == [attached, detached]


@pytest.mark.spec("DRV-4.7a-03", "DRV-6-03", "DRV-4.9-15")
def test_expiry_of_a_producer_is_announced_at_once(quiet: DriverClient, stream_id: int) -> None:
    """Consumers learn of the new epoch long before the next periodic announce."""
    lease = quiet.attach(stream_id, Role.PRODUCER)
    received = revoke_of(quiet, lease)
    announce = quiet.wait_for(ShmPoolAnnounce, received.index, stream_id=stream_id)
    assert announce.message.epoch > lease.epoch
    assert announce.message.announce_timestamp_ns >= received.message.timestamp_ns


@pytest.mark.spec("DRV-4.7-05", "DRV-4.7a-03", "DRV-4.9-05", "DRV-4.9-06", "DRV-4.9-15", "DRV-6-02")
def test_leases_that_the_operator_revokes_end_at_once(
    quiet: DriverClient, operated: tuple[Deployment, DriverProcess], stream_id: int
) -> None:
    """Reason REVOKED for either role; a producer's is followed by a higher epoch, a consumer's by nothing."""
    _, process = operated
    producer, consumer = quiet.attach(stream_id, Role.PRODUCER), quiet.attach(stream_id)
    quiet.kept += [producer, consumer]
    process.revoke(consumer.lease_id)
    received = revoke_of(quiet, consumer)
    assert received.data == packed_revoke(received.message, consumer, role=2, reason=3)
    assert not quiet.received(ShmPoolAnnounce, received.index, stream_id=stream_id)
    assert not quiet.received(ShmLeaseRevoked, lease_id=producer.lease_id)

    process.revoke(producer.lease_id)
    received = revoke_of(quiet, producer)
    assert received.data == packed_revoke(received.message, producer, role=1, reason=3)
    announce = quiet.wait_for(ShmPoolAnnounce, received.index, stream_id=stream_id)
    assert announce.message.epoch > producer.epoch
    assert announce.message.producer_id == 0
    quiet.kept.clear()
    for lease in (producer, consumer):
        assert quiet.detach(lease).message.code is ResponseCode.REJECTED


@pytest.mark.spec("DRV-2.1-01", "DRV-4.11-01", "DRV-15-02")
def test_an_embedded_driver_is_like_any_other(
    quiet: DriverClient, operated: tuple[Deployment, DriverProcess], stream_id: int
) -> None:
    """The driver inside the operator's program is reached at the configured endpoint and has the same tree of files."""
    deployment, process = operated
    lease = quiet.attach(stream_id)
    path = path_of(lease.response.header_region_uri)
    assert path.relative_to(deployment.base_dir).parts[1:] == ("lab", str(stream_id), str(lease.epoch), "header.ring")
    assert superblock(path)["pid"] == process.pid
    assert quiet.detach(lease).message.code is ResponseCode.OK


# --- no token


@pytest.mark.spec("DRV-17-38", "DRV-4.13-02")
def test_without_a_configured_token_no_client_can_end_the_driver(client: DriverClient, stream_id: int) -> None:
    """The empty token of the configuration is not a token that an empty request matches."""
    for token in ("", "\0", "token"):
        client.send(shutdown_request(token))
    client.fence()
    lease = client.attach(stream_id)
    assert client.detach(lease).message.code is ResponseCode.OK
    assert len(client.received(ShmDetachResponse)) == 1
