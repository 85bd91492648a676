# SPDX-License-Identifier: Apache-2.0
"""Attach and detach requests, and the bytes of their answers. Driver Model §4.2, §4.3, §4.4a, §4.5, §4.6, §4.8, §5.

The driver is a process of its own; every request and answer goes over Aeron. Expected bytes are packed here by hand.
"""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ET
from collections.abc import Iterator

import msgspec
import pytest

from tensorpool import aeron
from tensorpool.wire import peek_header
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import (
    HugepagesPolicy,
    PublishMode,
    ResponseCode,
    Role,
    ShmAttachResponse,
    ShmDetachResponse,
    ShmLeaseRevoked,
)
from tests.support.driver_client import DriverClient, Lease, attach_request, deployed, packed_text, raw_attach
from tests.support.driver_process import IPC, NSLOTS, POOLS, Deployment, path_of
from tests.support.processes import ROOT

MISSING = 77  # a stream that is not configured
SHARED = 10_000  # for tests that leave no trace on the stream
ABSENT_U32, ABSENT_U64 = 2**32 - 1, 2**64 - 1

_stream_ids = iter(range(10_001, 10_024))


@pytest.fixture(scope="module")
def deployment(shared_media_driver: aeron.MediaDriver) -> Iterator[Deployment]:
    with deployed(
        shared_media_driver.aeron_dir,
        streams=[SHARED, *range(10_001, 10_024)],
        policies={"lease_keepalive_interval_ms": 1000, "lease_expiry_grace_intervals": 20},
    ) as deployment:
        yield deployment


@pytest.fixture
def stream_id() -> int:
    """A stream of the test's own."""
    return next(_stream_ids)


def packed_grant(response: ShmAttachResponse, correlation_id: int, stream_id: int, announce: ShmPoolAnnounce) -> bytes:
    """The response that conveys what the announce does; lease and expiry are as found."""
    head = struct.pack("<4H q i", 51, 2, 901, 1, correlation_id, 0)
    lease = struct.pack("<Q Q", response.lease_id, response.lease_expiry_timestamp_ns)
    fields = struct.pack("<I Q I I H B", stream_id, announce.epoch, 1, NSLOTS, 256, 8)
    pools = struct.pack("<2H", 10, len(POOLS)) + b"".join(
        struct.pack("<H I I", pool_id, NSLOTS, stride) + packed_text(pool.region_uri)
        for (pool_id, stride), pool in zip(POOLS.items(), announce.payload_pools, strict=True)
    )
    return head + lease + fields + pools + packed_text(announce.header_region_uri) + packed_text("")


# --- success


@pytest.mark.spec(
    "DRV-4.2-01", "DRV-4.2-03", "DRV-4.2-04", "DRV-4.2-05", "DRV-4.2-06", "DRV-4.2-07", "DRV-4.2-08", "DRV-4.2-09"
)
@pytest.mark.spec("DRV-4.2-10", "DRV-4.2-11", "DRV-4.2-12", "DRV-4.6-01", "DRV-4.7-01", "DRV-8-02", "DRV-A-03")
@pytest.mark.parametrize("role", list(Role))
def test_a_grant_has_every_required_field_and_agrees_with_the_announce(
    client: DriverClient, stream_id: int, role: Role
) -> None:
    """An OK response is, byte for byte, the profile and what the announce of the same epoch conveys."""
    request = attach_request(stream_id, role)
    lease = client.granted(request)
    announce = client.wait_for(ShmPoolAnnounce, stream_id=stream_id, epoch=lease.epoch).message
    expected = packed_grant(lease.response, request.correlation_id, stream_id, announce)
    assert lease.received.data == expected
    assert lease.lease_id not in (0, ABSENT_U64)
    assert announce.producer_id == (request.client_id if role is Role.PRODUCER else 0)
    for field in ("layout_version", "header_nslots", "header_slot_bytes"):
        assert getattr(announce, field) == getattr(lease.response, field), field
    for granted, announced in zip(lease.response.payload_pools, announce.payload_pools, strict=True):
        for field in ("pool_id", "pool_nslots", "stride_bytes", "region_uri"):
            assert getattr(granted, field) == getattr(announced, field), field
    assert client.detach(lease).message.code is ResponseCode.OK


@pytest.mark.spec("DRV-4.2-02", "DRV-4.9-04")
@pytest.mark.parametrize("correlation_id", [0, -1, -(2**63), -(2**63) + 1, 2**63 - 1])
def test_correlation_ids_come_back_unchanged(client: DriverClient, correlation_id: int) -> None:
    """Any 64 bits are echoed in grants, refusals and detach responses."""
    lease = client.attach(SHARED, correlation_id=correlation_id)
    assert client.detach(lease, correlation_id=correlation_id).message.correlation_id == correlation_id
    assert client.refused(attach_request(MISSING, correlation_id=correlation_id)).correlation_id == correlation_id


@pytest.mark.spec("DRV-4.8-07")
def test_an_identical_retry_gets_the_same_lease(client: DriverClient, stream_id: int) -> None:
    """A client that lost the response asks again and learns its lease, with the expiry of now; there is only one."""
    request = attach_request(stream_id, Role.PRODUCER)
    client.send(request)
    lease = client.granted(request)  # also asks while the first one may still be under way
    client.send(lease.keepalive())
    again = client.granted(request)
    expiries = [it.response.lease_expiry_timestamp_ns or 0 for it in (lease, again)]
    assert 0 < expiries[0] < expiries[1]
    for received in client.received(ShmAttachResponse, correlation_id=request.correlation_id):
        same = msgspec.structs.replace(
            received.message, lease_expiry_timestamp_ns=lease.response.lease_expiry_timestamp_ns
        )
        assert same == lease.response
    assert client.detach(again).message.code is ResponseCode.OK
    assert client.detach(again).message.code is ResponseCode.REJECTED
    client.fence()
    assert len(client.received(ShmLeaseRevoked, client_id=request.client_id)) == 1


@pytest.mark.spec("DRV-4.2-03")
def test_a_retry_after_an_epoch_change_is_answered_with_what_is_announced(client: DriverClient, stream_id: int) -> None:
    """The consumer's lease stays; epoch and URIs are those that another process can map now."""
    request = attach_request(stream_id)
    consumer = client.granted(request)
    producer = client.attach(stream_id, Role.PRODUCER)
    again = client.granted(request)
    assert (again.lease_id, again.epoch) == (consumer.lease_id, producer.epoch)
    assert again.epoch > consumer.epoch
    assert again.response.header_region_uri == producer.response.header_region_uri
    assert path_of(again.response.payload_pools[0].region_uri).exists()
    for lease in (producer, again):
        assert client.detach(lease).message.code is ResponseCode.OK


@pytest.mark.spec("DRV-4.2-22")
def test_an_absent_text_has_length_zero(client: DriverClient) -> None:
    """Texts are never marked optional in the schema; a response to a good detach ends in four zero bytes."""
    document = ET.parse(ROOT / "src/tensorpool/wire/schemas/driver.xml")
    data = list(document.iter("data"))
    assert len(data) == 8
    assert not [element for element in data if element.get("presence")]
    received = client.detach(client.attach(SHARED))
    assert received.data == struct.pack("<4H q i I", 12, 4, 901, 1, received.message.correlation_id, 0, 0)


@pytest.mark.spec("DRV-4.4a-02", "DRV-4.5-01", "DRV-A-05", "DRV-A-09")
def test_answers_have_the_version_of_the_request_and_the_control_stream(
    deployment: Deployment, client: DriverClient
) -> None:
    """Whatever the driver says to a version 1 client has schema 901, version 1, and is on the configured stream."""
    lease = client.attach(SHARED)
    client.detach(lease)
    client.wait_for(ShmLeaseRevoked, lease_id=lease.lease_id)
    for kind, block_length in ((ShmAttachResponse, 51), (ShmDetachResponse, 12), (ShmLeaseRevoked, 26)):
        answers = client.received(kind)
        assert answers, kind
        for received in answers:
            header = peek_header(received.data)
            assert (header.schema_id, header.version, header.block_length) == (901, 1, block_length)
            assert received.stream_id == deployment.control[1]


# --- who may


@pytest.mark.spec("DRV-5-01", "DRV-4.6-04", "DRV-4.2-18")
def test_a_second_producer_is_refused_by_a_text_that_names_the_first(client: DriverClient, stream_id: int) -> None:
    """One producer at a time; the refusal names the holder's client and lease, and the stream is free afterwards."""
    first = client.attach(stream_id, Role.PRODUCER)
    refusal = client.refused(attach_request(stream_id, Role.PRODUCER))
    assert refusal.code is ResponseCode.REJECTED
    assert str(first.client_id) in refusal.error_message
    assert str(first.lease_id) in refusal.error_message
    client.detach(first)
    client.detach(client.attach(stream_id, Role.PRODUCER))


@pytest.mark.spec("DRV-5-01")
def test_of_two_producers_at_the_same_moment_one_wins(client: DriverClient, stream_id: int) -> None:
    """The first request in the log gets the stream although its memory is still being made when the second comes."""
    first, second = (attach_request(stream_id, Role.PRODUCER) for _ in range(2))
    client.send(first)
    assert client.refused(second).code is ResponseCode.REJECTED
    answer = client.wait_for(ShmAttachResponse, correlation_id=first.correlation_id)
    assert answer.message.code is ResponseCode.OK
    client.detach(Lease(first.client_id, first.role, answer.message, 0, answer))


@pytest.mark.spec("DRV-5-02")
def test_many_consumers_share_a_stream_with_its_producer(client: DriverClient, stream_id: int) -> None:
    """Fifty consumers attach while a producer is there, all to the same epoch."""
    producer = client.attach(stream_id, Role.PRODUCER)
    consumers = [client.attach(stream_id) for _ in range(50)]
    assert {lease.epoch for lease in consumers} == {producer.epoch}
    for lease in [*consumers, producer]:
        assert client.detach(lease).message.code is ResponseCode.OK


@pytest.mark.parametrize("client_id", [0, ABSENT_U32])
@pytest.mark.parametrize("role", list(Role))
def test_reserved_client_ids_are_invalid(client: DriverClient, client_id: int, role: Role) -> None:
    """0 means "no producer" in announces and all-ones is null: neither can be a client."""
    refusal = client.refused(attach_request(SHARED, role, client_id=client_id))
    assert refusal.code is ResponseCode.INVALID_PARAMS
    assert "clientId" in refusal.error_message


@pytest.mark.spec("DRV-4.8-05")
def test_a_client_id_has_one_lease_at_a_time(client: DriverClient, stream_id: int) -> None:
    """Same stream or another, same role or another: the newer attach is refused, the older lease stays."""
    lease = client.attach(stream_id)
    for other, role in ((stream_id, Role.CONSUMER), (SHARED, Role.CONSUMER), (stream_id, Role.PRODUCER)):
        refusal = client.refused(attach_request(other, role, client_id=lease.client_id))
        assert refusal.code is ResponseCode.REJECTED, (other, role)
        assert str(lease.lease_id) in refusal.error_message
    assert client.detach(lease).message.code is ResponseCode.OK
    client.detach(client.attach(stream_id, client_id=lease.client_id))


# --- what is asked for


@pytest.mark.spec("DRV-4.3-02")
@pytest.mark.parametrize("version", [0, 1, ABSENT_U32])
def test_an_absent_or_equal_layout_version_is_served(client: DriverClient, version: int) -> None:
    """The response tells the version in use."""
    lease = client.attach(SHARED, expected_layout_version=version)
    assert lease.response.layout_version == 1
    client.detach(lease)


@pytest.mark.spec("DRV-4.3-01")
@pytest.mark.parametrize("version", [2, 999])
def test_another_layout_version_is_rejected(client: DriverClient, version: int) -> None:
    """The driver refuses a client that expects what it does not have."""
    refusal = client.refused(attach_request(SHARED, expected_layout_version=version))
    assert refusal.code is ResponseCode.REJECTED
    assert str(version) in refusal.error_message


@pytest.mark.spec("DRV-4.3-04")
@pytest.mark.parametrize("max_dims", [4, 255])
def test_max_dims_of_the_request_is_ignored(client: DriverClient, max_dims: int) -> None:
    """Whatever a client asks for, the answer is the schema's constant."""
    lease = client.attach(SHARED, max_dims=max_dims)
    assert lease.response.max_dims == 8
    client.detach(lease)


@pytest.mark.spec("DRV-4.2-20", "DRV-A-02")
@pytest.mark.parametrize("publish_mode", [255, 1, 2])
def test_a_provisioned_stream_needs_no_particular_publish_mode(client: DriverClient, publish_mode: int) -> None:
    """Absent, REQUIRE_EXISTING and EXISTING_OR_CREATE all find a stream of the configuration."""
    data = raw_attach(5, stream_id=SHARED, publish_mode=publish_mode)
    mode = None if publish_mode == 255 else PublishMode(publish_mode)
    request = attach_request(
        SHARED, correlation_id=5, client_id=int.from_bytes(data[20:24], "little"), publish_mode=mode
    )
    assert request.encode() == data
    client.detach(client.granted(request))


@pytest.mark.spec("DRV-4.2-14", "DRV-4.3-05", "DRV-17-10")
@pytest.mark.parametrize("publish_mode", [None, *PublishMode])
@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("stream_id", [0, MISSING])
def test_a_stream_that_is_not_configured_is_rejected(
    client: DriverClient, deployment: Deployment, stream_id: int, role: Role, publish_mode: PublishMode | None
) -> None:
    """No mode brings a stream into being where dynamic streams are off, and nothing is left of the attempt."""
    refusal = client.refused(attach_request(stream_id, role, publish_mode=publish_mode))
    assert refusal.code is ResponseCode.REJECTED
    assert refusal.error_message
    assert not deployment.epochs(stream_id)


@pytest.mark.spec("DRV-4.3-06", "DRV-4.3-08", "DRV-9-04")
def test_huge_pages_are_rejected_where_there_are_none(client: DriverClient) -> None:
    """On tmpfs HUGEPAGES cannot be had; STANDARD, and UNSPECIFIED under the default policy, can."""
    refusal = client.refused(attach_request(SHARED, require_hugepages=HugepagesPolicy.HUGEPAGES))
    assert refusal.code is ResponseCode.REJECTED
    assert "hugepages" in refusal.error_message
    for policy in (HugepagesPolicy.STANDARD, HugepagesPolicy.UNSPECIFIED):
        lease = client.attach(SHARED, require_hugepages=policy)
        assert "require_hugepages=true" not in lease.response.header_region_uri
        client.detach(lease)


# --- files of the grant


@pytest.mark.spec("DRV-4.2-33", "DRV-3-01", "WIRE-15.21a.4-01")
def test_granted_uris_are_absolute_files_in_the_drivers_own_tree(
    client: DriverClient, deployment: Deployment, stream_id: int
) -> None:
    """The client names no path; those that it is given are plain `shm:file` URIs below the configured base."""
    lease = client.attach(stream_id, Role.PRODUCER)
    uris = [lease.response.header_region_uri, *(pool.region_uri for pool in lease.response.payload_pools)]
    assert len(set(uris)) == 1 + len(POOLS)
    for uri in uris:
        assert uri.isascii()
        assert uri.isprintable()
        assert not set("| ") & set(uri)
        path = path_of(uri)
        assert path.is_absolute()
        assert path.resolve() == path
        assert path.is_relative_to(deployment.base_dir)
    client.detach(lease)


@pytest.mark.spec("DRV-4.5-01")
def test_nothing_is_said_on_the_default_stream_when_another_is_configured(
    client: DriverClient, shared_media_driver: aeron.MediaDriver
) -> None:
    """The driver receives no request on stream 1000 and sends no announce there."""
    connection = aeron.connect(shared_media_driver.aeron_dir)
    try:
        publication, subscription = connection.add_publication(IPC, 1000), connection.add_subscription(IPC, 1000)
        client.wait_until(lambda: publication.has_room, "connected to our own subscription")
        request = attach_request(SHARED)
        received: list[bytes] = []
        client.wait_until(lambda: publication.offer(request.encode()), "sent")
        client.wait_for(ShmPoolAnnounce, len(client.transcript), stream_id=SHARED)
        client.fence()
        client.wait_until(
            lambda: subscription.poll(lambda data, _: received.append(data)), "our own request comes back"
        )
        assert received == [request.encode()]
        assert not client.received(ShmAttachResponse, correlation_id=request.correlation_id)
    finally:
        connection.close()


@pytest.mark.spec("DRV-4.8-01", "DRV-4.8-02")
def test_lease_ids_are_never_given_twice(client: DriverClient) -> None:
    """Hundreds of leases, held together and one after the other, ended and not: every id is new."""
    requests = [attach_request(SHARED) for _ in range(400)]
    for request in requests:
        client.send(request)
    expected = {request.correlation_id for request in requests}
    client.wait_until(lambda: len(client.received(ShmAttachResponse)) >= len(requests), "all answers")
    responses = [
        received for received in client.received(ShmAttachResponse) if received.message.correlation_id in expected
    ]
    by_id = {request.correlation_id: request.client_id for request in requests}
    for received in responses:
        client.send(
            Lease(by_id[received.message.correlation_id], Role.CONSUMER, received.message, 0, received).detach()
        )
    client.wait_until(lambda: len(client.received(ShmDetachResponse)) == len(requests), "all are detached")
    ids = [received.message.lease_id for received in responses]
    for _ in range(20):
        lease = client.attach(SHARED)
        ids.append(lease.lease_id)
        client.detach(lease)
    assert None not in ids
    assert len(set(ids)) == len(ids) == len(requests) + 20
