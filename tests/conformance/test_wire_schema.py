# SPDX-License-Identifier: Apache-2.0
"""Schema clauses: ids, null values, enum numbers and limits."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from tensorpool.errors import DecodeFault, LocalProtocolError
from tensorpool.wire import DecodeError, bridge, control, decode, discovery, driver, event, trace
from tensorpool.wire.control import (
    ClockDomain,
    ControlResponse,
    Dtype,
    FrameDescriptor,
    FrameProgressState,
    MajorOrder,
    Mode,
    ProgressUnit,
    RegionType,
)
from tensorpool.wire.discovery import DiscoveryRequest, DiscoveryStatus, Tag
from tensorpool.wire.driver import (
    HugepagesPolicy,
    LeaseRevokeReason,
    PublishMode,
    ResponseCode,
    Role,
    ShmAttachResponse,
    ShutdownReason,
)
from tests.support.messages import CHUNK


@pytest.mark.parametrize(
    ("module", "schema_id", "templates"),
    [
        pytest.param(
            control,
            900,
            {
                "ShmPoolAnnounce": 1,
                "ConsumerHello": 2,
                "ConsumerConfig": 3,
                "FrameDescriptor": 4,
                "QosConsumer": 5,
                "QosProducer": 6,
                "DataSourceAnnounce": 7,
                "DataSourceMeta": 8,
                "ControlResponse": 9,
                "MetaBlobAnnounce": 10,
                "FrameProgress": 11,
                "MetaBlobChunk": 12,
                "MetaBlobComplete": 13,
                "ShmRegionSuperblock": 50,
                "SlotHeader": 51,
                "TensorHeader": 52,
            },
            marks=pytest.mark.spec("WIRE-16-01", "WIRE-16-02"),
            id="control",
        ),
        pytest.param(
            driver,
            901,
            {
                "ShmAttachRequest": 1,
                "ShmAttachResponse": 2,
                "ShmDetachRequest": 3,
                "ShmDetachResponse": 4,
                "ShmLeaseKeepalive": 5,
                "ShmDriverShutdown": 6,
                "ShmLeaseRevoked": 7,
                "ShmDriverShutdownRequest": 8,
            },
            marks=pytest.mark.spec("DRV-A-01"),
            id="driver",
        ),
        pytest.param(bridge, 902, {"BridgeFrameChunk": 1}, marks=pytest.mark.spec("BRG-11-01"), id="bridge"),
        pytest.param(trace, 904, {"TraceLinkSet": 1}, id="trace"),
        pytest.param(event, 905, {"EventMessage": 1}, id="event"),
        pytest.param(discovery, 910, {"DiscoveryRequest": 1, "DiscoveryResponse": 2}, id="discovery"),
    ],
)
def test_schema_and_template_ids(module: Any, schema_id: int, templates: dict[str, int]) -> None:
    """Every schema has exactly these messages under these numbers, at version 1."""
    assert (module.schema.id, module.schema.version) == (schema_id, 1)
    assert {cls.__name__: template for template, cls in module.schema.messages.items()} == templates
    assert {(cls.SCHEMA_ID, cls.SCHEMA_VERSION) for cls in module.schema.messages.values()} == {(schema_id, 1)}


@pytest.mark.parametrize(
    ("enum", "numbers"),
    [
        pytest.param(
            Dtype,
            "UNKNOWN 0 UINT8 1 INT8 2 UINT16 3 INT16 4 UINT32 5 INT32 6 UINT64 7 INT64 8 FLOAT32 9 "
            "FLOAT64 10 BOOLEAN 11 BYTES 13 BIT 14",
            marks=pytest.mark.spec("WIRE-15.8-04"),
        ),
        pytest.param(MajorOrder, "UNKNOWN 0 ROW 1 COLUMN 2", marks=pytest.mark.spec("WIRE-15.8-05")),
        pytest.param(
            control.ResponseCode,
            "OK 0 UNSUPPORTED 1 INVALID_PARAMS 2 REJECTED 3 INTERNAL_ERROR 4",
            marks=pytest.mark.spec("WIRE-15.17-01"),
        ),
        (ResponseCode, "OK 0 UNSUPPORTED 1 INVALID_PARAMS 2 REJECTED 3 INTERNAL_ERROR 4"),
        (Mode, "STREAM 1 RATE_LIMITED 2"),
        (FrameProgressState, "UNKNOWN 0 STARTED 1 PROGRESS 2 COMPLETE 3"),
        (ProgressUnit, "NONE 0 ROWS 1 COLUMNS 2"),
        (ClockDomain, "MONOTONIC 1 REALTIME_SYNCED 2"),
        (RegionType, "HEADER_RING 1 PAYLOAD_POOL 2"),
        pytest.param(Role, "PRODUCER 1 CONSUMER 2", marks=pytest.mark.spec("DRV-A-10")),
        pytest.param(PublishMode, "REQUIRE_EXISTING 1 EXISTING_OR_CREATE 2", marks=pytest.mark.spec("DRV-A-10")),
        pytest.param(LeaseRevokeReason, "DETACHED 1 EXPIRED 2 REVOKED 3", marks=pytest.mark.spec("DRV-A-10")),
        pytest.param(ShutdownReason, "NORMAL 0 ADMIN 1 ERROR 2", marks=pytest.mark.spec("DRV-A-10")),
        pytest.param(HugepagesPolicy, "UNSPECIFIED 0 STANDARD 1 HUGEPAGES 2", marks=pytest.mark.spec("DRV-A-10")),
        (DiscoveryStatus, "OK 1 NOT_FOUND 2 ERROR 3"),
        pytest.param(
            event.Format,
            "NOTHING 0 UINT8 1 INT8 2 UINT16 3 INT16 4 UINT32 5 INT32 6 UINT64 7 INT64 8 FLOAT32 9 "
            "FLOAT64 10 BOOLEAN 11 STRING 12 BYTES 13 BIT 14 REF 15",
            marks=pytest.mark.spec("CTL-5.1-02"),
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_enum_numbers(enum: Any, numbers: str) -> None:
    """Every enum has exactly these members."""
    assert " ".join(f"{member.name} {member.value}" for member in enum) == numbers


@pytest.mark.spec("WIRE-10.1-03")
@pytest.mark.parametrize("value", [0, 2**64 - 1])
def test_both_null_values_of_a_trace_id_mean_absent(value: int) -> None:
    """traceId is absent at 0; all-ones, the type's own null, is read the same."""
    data = FrameDescriptor(stream_id=1, epoch=2, seq=3, trace_id=4).encode()[:-8] + struct.pack("<Q", value)
    message = decode(data)
    assert isinstance(message, FrameDescriptor)
    assert message.trace_id is None


@pytest.mark.spec("WIRE-16-05")
def test_the_length_of_data_is_at_most_a_gibibyte() -> None:
    """A longer length is refused as a value, before anybody looks for the bytes."""
    data = ControlResponse(correlation_id=1, code=control.ResponseCode.OK).encode()[:-4]
    with pytest.raises(DecodeError) as caught:
        decode(data + struct.pack("<I", 1073741825))
    assert caught.value.fault is DecodeFault.VALUE
    with pytest.raises(DecodeError) as caught:
        decode(data + struct.pack("<I", 1073741824))
    assert caught.value.fault is DecodeFault.TRUNCATED


@pytest.mark.spec("DRV-4.4a-01", "DRV-4.4a-04", "DRV-4.4a-05")
@pytest.mark.parametrize(
    ("offset", "value", "fault"),
    [(6, 2, DecodeFault.VERSION), (4, 900, DecodeFault.SCHEMA), (2, 99, DecodeFault.TEMPLATE)],
)
def test_driver_messages_of_another_version_schema_or_template_are_refused(
    offset: int, value: int, fault: DecodeFault
) -> None:
    """The header is checked before the body is read, and the fault tells the three cases apart."""
    data = bytearray(ShmAttachResponse(correlation_id=42, code=ResponseCode.REJECTED).encode())
    struct.pack_into("<H", data, offset, value)
    with pytest.raises(DecodeError) as caught:
        driver.schema.decode(data)
    assert caught.value.fault is fault


@pytest.mark.spec("BRG-11-02")
def test_chunk_header_bytes_have_at_most_256_bytes() -> None:
    """256 bytes pass, 257 are refused in both directions."""
    fields: dict[str, Any] = CHUNK | {"header_included": True}
    data = bridge.BridgeFrameChunk(**fields, header_bytes=bytes(256)).encode()
    assert data[49:53] == b"\x00\x01\x00\x00"
    assert decode(data).encode() == data
    with pytest.raises(DecodeError, match="header_bytes: 257 bytes, at most 256"):
        decode(data[:49] + b"\x01\x01\x00\x00" + data[53:] + b"\0")
    with pytest.raises(LocalProtocolError, match="header_bytes: 257 bytes, at most 256"):
        bridge.BridgeFrameChunk(**fields, header_bytes=bytes(257)).encode()


@pytest.mark.spec("BRG-11-03")
@pytest.mark.parametrize(
    ("field", "offset", "limit"),
    [
        ("chunk_index", 20, 65535),
        ("chunk_count", 24, 65535),
        ("chunk_length", 32, 65535),
        ("payload_length", 36, 1073741824),
    ],
)
def test_chunk_fields_keep_their_limits(field: str, offset: int, limit: int) -> None:
    """The limit itself passes, one more is refused in both directions."""
    data = bytearray(bridge.BridgeFrameChunk(**CHUNK | {field: limit}).encode())
    assert getattr(decode(data), field) == limit
    struct.pack_into("<I", data, 8 + offset, limit + 1)
    with pytest.raises(DecodeError) as caught:
        decode(data)
    assert (caught.value.field, caught.value.offset) == (field, 8 + offset)
    with pytest.raises(LocalProtocolError, match=f"BridgeFrameChunk.{field} = {limit + 1}"):
        bridge.BridgeFrameChunk(**CHUNK | {field: limit + 1}).encode()


@pytest.mark.spec("CTL-5.1-01")
def test_an_event_with_additional_fields_is_accepted() -> None:
    """A longer block is read as far as we know it."""
    message = event.EventMessage(timestamp_ns=1, correlation_id=2, format=event.Format.NOTHING, tag="t", key="k")
    data = message.encode()
    assert decode(b"\x30\x00" + data[2:48] + b"\x01\x02\x03\x04\x05\x06\x07\x08" + data[48:]) == message


@pytest.mark.spec("DISC-15-04")
def test_a_tag_entry_with_a_block_is_accepted() -> None:
    """The schema calls the tag a field: what a peer counts into a block is skipped."""
    message = DiscoveryRequest(
        request_id=1, client_id=3, response_stream_id=7004, tags=(Tag(tag="a"),), response_channel="c"
    )
    data = message.encode()
    assert data[40:49] == bytes.fromhex("0000 0100 01000000 61")
    assert decode(data[:40] + bytes.fromhex("0300 0100 ffffff 01000000 61") + data[49:]) == message
