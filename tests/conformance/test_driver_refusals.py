# SPDX-License-Identifier: Apache-2.0
"""What the driver refuses, byte by byte, and what it passes over in silence. Driver Model §4.2, §4.4a, §4.6, §4.13.

Requests are packed by hand where no codec would write them; decisions A6, A19, E30, E33, E34.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tensorpool import aeron
from tensorpool.wire import Message
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import (
    LeaseRevokeReason,
    ResponseCode,
    Role,
    ShmAttachResponse,
    ShmDetachResponse,
    ShmDriverShutdown,
    ShmLeaseKeepalive,
    ShmLeaseRevoked,
    ShutdownReason,
)
from tests.support.driver_client import (
    DriverClient,
    attach_request,
    deployed,
    packed_text,
    raw_attach,
    shutdown_request,
)
from tests.support.driver_process import Deployment

TOKEN = "open sesame"
STREAM = 10_100
MISSING = 77  # a stream that is not configured
ABSENT_U32, ABSENT_U64 = 2**32 - 1, 2**64 - 1


@pytest.fixture(scope="module")
def deployment(shared_media_driver: aeron.MediaDriver) -> Iterator[Deployment]:
    with deployed(
        shared_media_driver.aeron_dir,
        streams=[STREAM],
        policies={"lease_keepalive_interval_ms": 1000, "lease_expiry_grace_intervals": 20, "shutdown_token": TOKEN},
    ) as deployment:
        yield deployment


def packed_refusal(correlation_id: int, code: int, text: str) -> bytes:
    """A response in which everything optional is null and every text but the last is empty."""
    nulls = struct.pack("<Q Q I Q I I H B", *[ABSENT_U64] * 2, ABSENT_U32, ABSENT_U64, *[ABSENT_U32] * 2, 65535, 255)
    head = struct.pack("<4H q i", 51, 2, 901, 1, correlation_id, code)
    return head + nulls + struct.pack("<2H", 10, 0) + packed_text("") + packed_text(text)


@pytest.mark.spec("DRV-4.2-17", "DRV-4.2-18", "DRV-4.2-19", "DRV-4.2-21", "DRV-A-03")
def test_a_refusal_is_null_but_for_correlation_id_code_and_text(client: DriverClient) -> None:
    """Every optional field is its null value, the pools are an empty group and the URI an empty text."""
    request = attach_request(MISSING)
    response = client.refused(request)
    (received,) = client.received(ShmAttachResponse, correlation_id=request.correlation_id)
    assert response.error_message
    assert received.data == packed_refusal(request.correlation_id, 3, response.error_message)


@pytest.mark.spec("DRV-4.6-02")
@pytest.mark.parametrize("publish_mode", [0, 3, 7, 254])
def test_an_undefined_publish_mode_is_unsupported(client: DriverClient, publish_mode: int) -> None:
    """A mode of a later schema is a feature that this driver does not have."""
    response = client.refused(raw_attach(-7, stream_id=STREAM, publish_mode=publish_mode), -7)
    assert response.code is ResponseCode.UNSUPPORTED
    assert client.received(ShmAttachResponse)[0].data == packed_refusal(-7, 1, response.error_message)


@pytest.mark.spec("DRV-4.6-03")
@pytest.mark.parametrize(
    "wrong",
    [
        *({"role": role} for role in (0, 3, 9, 255)),
        *({"hugepages": policy} for policy in (3, 255)),
        {"stream_id": ABSENT_U32},
    ],
    ids=str,
)
def test_undefined_values_in_an_attach_are_invalid(client: DriverClient, wrong: dict[str, Any]) -> None:
    """Roles and policies that the schema does not have, and the stream id that means none."""
    response = client.refused(raw_attach(-8, **{"stream_id": STREAM, **wrong}), -8)
    assert response.code is ResponseCode.INVALID_PARAMS
    assert response.error_message


@pytest.mark.spec("DRV-4.6-03")
@pytest.mark.parametrize("length", [16, 31, 33])
def test_too_few_and_too_many_bytes_are_invalid(client: DriverClient, length: int) -> None:
    """As long as the correlation id can be read, the client gets an answer."""
    response = client.refused((raw_attach(-8, stream_id=STREAM) + b"\0")[:length], -8)
    assert response.code is ResponseCode.INVALID_PARAMS
    assert response.error_message


@pytest.mark.spec("DRV-4.6-03")
@pytest.mark.parametrize("role", [0, 3, 255])
def test_a_malformed_detach_is_invalid_and_ends_nothing(client: DriverClient, role: int) -> None:
    """A detach with an undefined role is answered and leaves the lease alone."""
    lease = client.attach(STREAM)
    data = bytearray(lease.detach(correlation_id=-9).encode())
    data[-1] = role
    client.send(bytes(data))
    response = client.wait_for(ShmDetachResponse, correlation_id=-9)
    assert response.message.code is ResponseCode.INVALID_PARAMS
    assert response.data == struct.pack("<4H q i", 12, 4, 901, 1, -9, 2) + packed_text(response.message.error_message)
    assert client.detach(lease).message.code is ResponseCode.OK


@pytest.mark.spec("DRV-4.4a-03", "DRV-4.6-02")
@pytest.mark.parametrize("version", [0, 2, 65535])
@pytest.mark.parametrize("block_length", [24, 40])
def test_another_schema_version_is_unsupported(client: DriverClient, version: int, block_length: int) -> None:
    """Attach and detach of a version that we do not speak are refused under the id that they begin with."""
    tail = bytes(block_length - 24)
    response = client.refused(raw_attach(-10, stream_id=STREAM, header=(block_length, 1, 901, version)) + tail, -10)
    assert response.code is ResponseCode.UNSUPPORTED
    assert client.received(ShmAttachResponse)[0].data == packed_refusal(-10, 1, response.error_message)
    client.send(struct.pack("<4H q Q I I B", block_length + 1, 3, 901, version, -11, 1, STREAM, 2, 2) + tail)
    assert client.wait_for(ShmDetachResponse, correlation_id=-11).message.code is ResponseCode.UNSUPPORTED


@pytest.mark.parametrize("block_length", [0, 23, 25, 26, 28, 51, 54, 65535])
def test_a_block_of_another_length_is_not_misread(client: DriverClient, block_length: int) -> None:
    """Version 1 has two lengths: a request of any other layout is refused in readable words."""
    data = raw_attach(-12, stream_id=STREAM, header=(block_length, 1, 901, 1)) + bytes(max(0, block_length - 24) % 1000)
    response = client.refused(data, -12)
    assert response.code in (ResponseCode.UNSUPPORTED, ResponseCode.INVALID_PARAMS)
    assert f"block length {block_length}, expected 24 or 27" in response.error_message


@pytest.mark.spec("DRV-4.2-35")
def test_no_diagnostic_exceeds_its_limit(client: DriverClient) -> None:
    """Whatever is refused, and for whatever reason, the text has at most 1024 bytes."""
    for data in (
        raw_attach(-13, stream_id=MISSING),
        raw_attach(-13, role=0) + bytes(5000),
        raw_attach(-13, header=(60000, 1, 901, 1)) + bytes(60000),
        raw_attach(-13, header=(24, 1, 901, 65535)) + bytes(60000),
    ):
        assert 0 < len(client.refused(data, -13).error_message.encode()) <= 1024


# --- what is not for the driver


def test_other_schemas_on_the_same_stream_are_passed_over(client: DriverClient) -> None:
    """Template 1 exists in other schemas too: nothing but schema 901 is ever answered."""
    for schema_id in (0, 900, 902, 904, 905, 910, 65535):
        for version in (0, 1, 2):
            client.send(raw_attach(-14, header=(24, 1, schema_id, version)))
    for data in (b"", b"\1", raw_attach(-14)[:7], raw_attach(-14)[:15], raw_attach(-14, header=(24, 99, 901, 1))):
        client.send(data)
    client.fence()
    assert not client.received(ShmAttachResponse, correlation_id=-14)


@pytest.mark.spec("DRV-3-03")
def test_messages_of_a_driver_from_a_client_change_nothing(client: DriverClient) -> None:
    """A client that says what only a driver may say moves neither leases nor epochs nor the driver's end.

    The stream is not granted to others until that client was silent for three announce periods (K6).
    """
    lease = client.attach(STREAM, Role.PRODUCER)
    for _ in range(3):  # a driver that has just started would end: the other was there before it
        true = client.next_announce(STREAM).message
    forged: list[Message] = [
        msgspec.structs.replace(true, producer_id=1, epoch=true.epoch + 100, layout_version=2),
        ShmLeaseRevoked(
            timestamp_ns=time.monotonic_ns(),
            lease_id=lease.lease_id,
            stream_id=STREAM,
            client_id=lease.client_id,
            role=lease.role,
            reason=LeaseRevokeReason.REVOKED,
        ),
        ShmDriverShutdown(timestamp_ns=time.monotonic_ns(), reason=ShutdownReason.NORMAL),
        lease.response,
    ]
    for message in forged:
        client.send(message)
    client.fence()
    after = client.next_announce(STREAM).message
    assert (after.epoch, after.producer_id, after.layout_version) == (true.epoch, lease.client_id, 1)
    assert client.detach(lease).message.code is ResponseCode.OK
    freed = {"stream_id": STREAM, "producer_id": 0}
    bumped = client.wait_for(ShmPoolAnnounce, where=lambda it: it.epoch > true.epoch, **freed).message
    assert bumped.epoch < true.epoch + 100
    silent_periods = 3
    for _ in range(silent_periods + 1):
        client.next_announce(STREAM)
    client.detach(client.attach(STREAM))


@pytest.mark.spec("DRV-4.13-02", "DRV-4.13-05")
def test_shutdown_requests_without_the_token_are_not_even_answered(client: DriverClient) -> None:
    """Wrong, missing, almost right, cut off, undefined reason: the driver says nothing and goes on."""
    since = len(client.transcript)
    for token in ("", " ", TOKEN[:-1], TOKEN + " ", TOKEN.upper(), "x" * 1000):
        for reason in ShutdownReason:
            client.send(shutdown_request(token, reason))
    request = shutdown_request(TOKEN).encode()
    client.send(request[:-4])
    client.send(request[:16] + b"\x09" + request[17:])
    client.fence()
    said = [
        type(received.message)
        for received in client.from_driver(since)
        if type(received.message) is not ShmPoolAnnounce
    ]
    assert said == [ShmAttachResponse], "the answer to the fence"
    client.detach(client.attach(STREAM))


def test_keepalives_have_no_answer(client: DriverClient) -> None:
    """They are one-way, right or wrong."""
    lease = client.attach(STREAM)
    since = len(client.transcript)
    client.send(lease.keepalive())
    client.send(lease.keepalive(lease_id=lease.lease_id + 1_000_000))
    client.send(ShmLeaseKeepalive(lease_id=1, stream_id=1, client_id=1, role=Role.PRODUCER, client_timestamp_ns=0))
    client.fence()
    said = [
        type(received.message)
        for received in client.from_driver(since)
        if type(received.message) is not ShmPoolAnnounce
    ]
    assert said == [ShmAttachResponse], "the answer to the fence"
    client.detach(lease)
