# SPDX-License-Identifier: Apache-2.0
"""Our driver and clients that speak the dialect of January 2026, byte by byte. Decision K9."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from tensorpool import aeron
from tensorpool.wire.driver import ExtendedAttachResponse, ResponseCode, Role, ShmAttachResponse
from tests.support.driver_client import DriverClient, deployed, extended_request, new_client_id, packed_text
from tests.support.driver_process import Deployment

STREAM = 10_700
NULL_U32, NULL_U64 = 2**32 - 1, 2**64 - 1


@pytest.fixture(scope="module")
def deployment(shared_media_driver: aeron.MediaDriver) -> Iterator[Deployment]:
    with deployed(
        shared_media_driver.aeron_dir,
        streams=[STREAM],
        policies={"lease_keepalive_interval_ms": 1000, "lease_expiry_grace_intervals": 20},
    ) as deployment:
        yield deployment


def raw(correlation_id: int, wish: int, *, role: int = 2, block: int = 27, client_id: int | None = None) -> bytes:
    """A request packed by hand."""
    client_id = new_client_id() if client_id is None else client_id
    body = struct.pack("<q I I B I B B I", correlation_id, STREAM, client_id, role, 0, 255, 0, wish)
    return struct.pack("<4H", block, 1, 901, 1) + body


@pytest.mark.parametrize("role", list(Role), ids=lambda role: role.name.lower())
def test_a_request_of_27_bytes_gets_an_answer_of_54(client: DriverClient, role: Role) -> None:
    """With a node id where the other layout has max_dims, and everything else as in the other layout."""
    lease = client.granted(extended_request(STREAM, role, desired_node_id=900 + role))
    data, response = lease.received.data, lease.response
    assert struct.unpack_from("<4H q i", data) == (54, 2, 901, 1, response.correlation_id, 0)
    assert struct.unpack_from("<I", data, 8 + 50) == (900 + role,)
    assert struct.unpack_from("<2H", data, 8 + 54) == (10, len(response.payload_pools))
    other = client.attach(STREAM).response
    for name in ("stream_id", "epoch", "layout_version", "header_nslots", "payload_pools", "header_region_uri"):
        assert getattr(other, name) == getattr(response, name), name
    client.detach(lease)
    assert not client.received(ShmAttachResponse, correlation_id=response.correlation_id)


def test_a_wish_that_another_client_has_is_rejected_byte_by_byte(client: DriverClient) -> None:
    """All optional fields null, the reason in words."""
    holder = client.granted(extended_request(STREAM, desired_node_id=910))
    response = client.refused(raw(-70, 910), -70)
    assert response.code is ResponseCode.REJECTED
    assert str(holder.client_id) in response.error_message
    (received,) = client.received(ExtendedAttachResponse, correlation_id=-70)
    assert received.data == struct.pack(
        "<4H q i Q Q I Q I I H I 2H", 54, 2, 901, 1, -70, 3, *[NULL_U64] * 2, NULL_U32, NULL_U64, *[NULL_U32] * 2,
        65535, NULL_U32, 10, 0,
    ) + packed_text("") + packed_text(response.error_message)  # fmt: skip
    assert client.detach(holder).message.code is ResponseCode.OK
    rested = client.refused(raw(-71, 910), -71)
    assert "is free in" in rested.error_message


@pytest.mark.parametrize("wish", [0, NULL_U32])
def test_node_ids_of_live_clients_differ(client: DriverClient, wish: int) -> None:
    """Whatever stands for no wish."""
    requests = [extended_request(STREAM, desired_node_id=wish if wish == 0 else None) for _ in range(20)]
    leases = [client.granted(request) for request in requests]
    given = {lease.response.node_id for lease in leases}
    assert len(given) == 20
    assert given <= set(range(1, 1024))
    for lease in leases:
        client.detach(lease)


@pytest.mark.parametrize("data", [raw(-72, 5, role=9), raw(-72, 5)[:-1], raw(-72, 5) + b"\0"], ids=range(3))
def test_what_cannot_be_read_is_refused_in_its_own_dialect(client: DriverClient, data: bytes) -> None:
    """So that its sender can read the reason."""
    response = client.refused(data, -72)
    assert type(response) is ExtendedAttachResponse
    assert response.code is ResponseCode.INVALID_PARAMS
    assert response.error_message
