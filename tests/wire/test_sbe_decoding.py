# SPDX-License-Identifier: Apache-2.0
"""What the codec makes of bytes: what it refuses, by name and place, and what it ignores."""

from __future__ import annotations

import array
import struct
import tracemalloc

import pytest

from tensorpool.errors import DecodeFault
from tensorpool.wire import DecodeError, Message, MessageHeader, control, decode, driver, peek_header, trace
from tests.wire.sample_messages import ANNOUNCE, CHUNK, DESCRIPTOR, EVENT, HELLO, REQUEST, TENSOR, u16, u32

PROGRESS = control.FrameProgress(
    stream_id=10000, epoch=7, seq=5, payload_bytes_filled=0, state=control.FrameProgressState.STARTED
)
ATTACH = driver.ShmAttachRequest(
    correlation_id=42,
    stream_id=10000,
    client_id=3,
    role=driver.Role.PRODUCER,
    expected_layout_version=0,
    max_dims=0,
    require_hugepages=driver.HugepagesPolicy.UNSPECIFIED,
)
SLOT = control.SlotHeader(
    seq_commit=11,
    values_len_bytes=24,
    payload_slot=5,
    pool_id=1,
    payload_offset=0,
    timestamp_ns=77,
    meta_version=1,
    header_bytes=TENSOR.encode(),
)


def patched(message: Message, offset: int, replacement: bytes) -> bytes:
    data = bytearray(message.encode())
    data[offset : offset + len(replacement)] = replacement
    return bytes(data)


GROUP_AT = 8 + 35  # the payloadPools of ShmPoolAnnounce
FIRST_URI_AT = GROUP_AT + 4 + 10


@pytest.mark.spec("WIRE-16-01", "WIRE-16-17")
@pytest.mark.parametrize(
    ("data", "fault", "offset", "text"),
    [
        (b"", DecodeFault.TRUNCATED, 0, "message header: 8 bytes needed, 0 left"),
        (DESCRIPTOR.encode()[:7], DecodeFault.TRUNCATED, 0, "message header: 8 bytes needed, 7 left"),
        (patched(DESCRIPTOR, 4, u16(999)), DecodeFault.SCHEMA, 4, "schema 999 is unknown, expected 900, 901"),
        (patched(DESCRIPTOR, 2, u16(99)), DecodeFault.TEMPLATE, 2, "schema 900 has no template 99"),
        (
            patched(DESCRIPTOR, 6, u16(2)),
            DecodeFault.VERSION,
            6,
            "FrameDescriptor: schema version 2, expected 1",
        ),
        (
            patched(DESCRIPTOR, 6, u16(0)),
            DecodeFault.VERSION,
            6,
            "FrameDescriptor: schema version 0, expected 1",
        ),
        (
            patched(DESCRIPTOR, 0, u16(44)),
            DecodeFault.BLOCK_LENGTH,
            0,
            "FrameDescriptor: block length 44, expected 40",
        ),
        (
            patched(DESCRIPTOR, 0, u16(39)),
            DecodeFault.BLOCK_LENGTH,
            0,
            "FrameDescriptor: block length 39, expected 40",
        ),
        (DESCRIPTOR.encode()[:-1], DecodeFault.TRUNCATED, 8, "FrameDescriptor: 40 bytes needed, 39 left"),
        (
            DESCRIPTOR.encode() + b"\0\0",
            DecodeFault.TRAILING_BYTES,
            48,
            "FrameDescriptor: 2 bytes after its end",
        ),
    ],
)
def test_a_wrong_header_or_size_is_refused_by_name(data: bytes, fault: DecodeFault, offset: int, text: str) -> None:
    """Schema, template, version, block length and size are checked in turn; errors say which and where."""
    with pytest.raises(DecodeError) as caught:
        decode(data)
    assert (caught.value.fault, caught.value.offset, caught.value.field) == (fault, offset, "")
    assert caught.value.what.startswith(text)
    assert str(caught.value).endswith(f"(at byte {offset})")


@pytest.mark.parametrize(
    ("data", "fault", "offset", "field", "text"),
    [
        (
            patched(ANNOUNCE, GROUP_AT + 2, u16(65535)),
            DecodeFault.VALUE,
            GROUP_AT + 2,
            "payload_pools",
            "ShmPoolAnnounce.payload_pools: 65535 entries, at most 65534 are allowed",
        ),
        (
            patched(ANNOUNCE, GROUP_AT + 2, u16(65534)),
            DecodeFault.TRUNCATED,
            GROUP_AT + 2,
            "payload_pools",
            "ShmPoolAnnounce.payload_pools: 65534 entries need at least 917476 bytes, 96 left",
        ),
        (
            patched(ANNOUNCE, GROUP_AT + 2, u16(3)),
            DecodeFault.VALUE,
            GROUP_AT + 4 + 2 * 37 + 10,  # the third entry would be the header's URI
            "region_uri",
            "ShmPoolAnnounce.payload_pools.region_uri: ",
        ),
        (
            patched(ANNOUNCE, GROUP_AT, u16(11)),
            DecodeFault.BLOCK_LENGTH,
            GROUP_AT,
            "",
            "ShmPoolAnnounce.payload_pools: block length 11, expected 10",
        ),
        (
            ANNOUNCE.encode()[: GROUP_AT + 3],
            DecodeFault.TRUNCATED,
            GROUP_AT,
            "payload_pools",
            "ShmPoolAnnounce.payload_pools: 4 bytes needed, 3 left",
        ),
        (
            patched(ANNOUNCE, FIRST_URI_AT, u32(1000)),
            DecodeFault.TRUNCATED,
            FIRST_URI_AT + 4,
            "region_uri",
            "ShmPoolAnnounce.payload_pools.region_uri: 1000 bytes needed, 82 left",
        ),
        (
            patched(ANNOUNCE, FIRST_URI_AT, u32(0xFFFFFFFF)),
            DecodeFault.VALUE,
            FIRST_URI_AT,
            "region_uri",
            "ShmPoolAnnounce.payload_pools.region_uri: 4294967295 bytes, at most 1073741824 are allowed",
        ),
        (
            patched(PROGRESS, 36, b"\x09"),
            DecodeFault.VALUE,
            36,
            "state",
            "FrameProgress.state: 9 is refused, expected FrameProgressState UNKNOWN, STARTED, ",
        ),
        (
            patched(HELLO, 16, b"\x02"),
            DecodeFault.VALUE,
            16,
            "supports_shm",
            "ConsumerHello.supports_shm: 2 is refused, expected True or False",
        ),
        (
            patched(ATTACH, 8 + 22, b"\x03"),
            DecodeFault.VALUE,
            30,
            "publish_mode",
            "ShmAttachRequest.publish_mode: 3 is refused, expected PublishMode REQUIRE_EXISTING, ",
        ),
        (
            patched(TENSOR, 8, u16(12)),
            DecodeFault.VALUE,
            8,
            "dtype",
            "TensorHeader.dtype: 12 is refused",
        ),
        (
            patched(CHUNK, 8 + 20, u32(65536)),
            DecodeFault.VALUE,
            28,
            "chunk_index",
            "BridgeFrameChunk.chunk_index: 65536 is refused, expected uint32 from 0 to 65535",
        ),
    ],
)
def test_a_malformed_body_is_refused_by_name(
    data: bytes, fault: DecodeFault, offset: int, field: str, text: str
) -> None:
    """Counts, lengths, enums and maxima that do not hold are refused; errors name field and value."""
    with pytest.raises(DecodeError) as caught:
        decode(data)
    assert caught.value.what.startswith(text)
    assert (caught.value.fault, caught.value.offset, caught.value.field) == (fault, offset, field)


def test_a_tiny_buffer_that_claims_many_entries_allocates_nothing() -> None:
    """A count is checked against the remaining bytes before a single entry exists."""
    claim = REQUEST.encode()[:40] + u16(0) + u16(65534) + bytes(100)
    peaks = []
    tracemalloc.start()
    try:
        for _ in range(3):  # the first round pays for lazily made constants, another one for another thread's work
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            with pytest.raises(DecodeError, match="65534 entries need at least 262136 bytes, 100 left"):
                decode(claim)
            _, peak = tracemalloc.get_traced_memory()
            peaks.append(peak - before)
    finally:
        tracemalloc.stop()
    assert min(peaks) < 16_384


def test_schema_id_decides_before_template_id() -> None:
    """Template 1 means something else in every schema."""
    link = trace.TraceLinkSet(stream_id=1, epoch=2, seq=3, trace_id=4, parents=(trace.Parent(trace_id=5),))
    messages = (ANNOUNCE, ATTACH, CHUNK, REQUEST, EVENT, link)
    assert {message.TEMPLATE_ID for message in messages} == {1}
    assert [decode(message.encode()) for message in messages] == list(messages)


def test_peek_header_reads_the_header_alone() -> None:
    """A router can look at the header of a message that it could not decode."""
    header = MessageHeader(block_length=40, template_id=4, schema_id=900, version=1)
    assert peek_header(DESCRIPTOR.encode()[:8]) == header
    assert peek_header(memoryview(DESCRIPTOR.encode())) == header
    with pytest.raises(DecodeError, match="8 bytes needed, 7 left"):
        peek_header(bytes(7))
    with pytest.raises(TypeError, match="not from items of format 'I'"):
        peek_header(array.array("I", [0] * 12))


def test_a_body_is_read_without_header_and_without_surplus() -> None:
    """Structures in shared memory have no header; the caller passes exactly their bytes."""
    assert control.SlotHeader.decode_body(SLOT.encode_body()) == SLOT
    assert len(SLOT.encode_body()) == 256
    assert decode(SLOT.header_bytes) == TENSOR
    with pytest.raises(DecodeError) as caught:
        control.SlotHeader.decode_body(SLOT.encode_body() + b"\0")
    assert (caught.value.fault, caught.value.offset) == (DecodeFault.TRAILING_BYTES, 256)
    with pytest.raises(DecodeError) as caught:
        control.TensorHeader.decode_body(bytes(183))
    assert (caught.value.fault, caught.value.offset) == (DecodeFault.TRUNCATED, 0)


def test_a_view_of_wider_items_is_refused() -> None:
    """Indices into such a view would not be bytes."""
    words = memoryview(array.array("I", [0] * 12))
    with pytest.raises(TypeError, match="not from items of format 'I'"):
        decode(words)
    with pytest.raises(TypeError):
        decode("text")  # type: ignore[arg-type]
    assert decode(memoryview(bytes(2) + DESCRIPTOR.encode())[2:]) == DESCRIPTOR


def test_what_is_decoded_never_aliases_the_buffer() -> None:
    """Overwriting or resizing the input afterwards changes nothing and is not prevented."""
    buffer = bytearray(SLOT.encode())
    message = decode(memoryview(buffer))
    buffer[:] = b"\xff" * len(buffer)
    buffer.clear()
    assert message == SLOT


@pytest.mark.parametrize("wire_value", [0, 2**64 - 1])
def test_an_absent_trace_id_is_zero_and_all_ones_is_absent_too(wire_value: int) -> None:
    """Peers whose generated code knows only the type's null write all-ones."""
    data = patched(DESCRIPTOR, 40, struct.pack("<Q", wire_value))
    assert decode(data) == DESCRIPTOR
    assert DESCRIPTOR.trace_id is None
    assert DESCRIPTOR.encode()[40:] == bytes(8)


def test_an_optional_enum_is_none_when_null() -> None:
    """publishMode 255 is absent, not undefined."""
    assert ATTACH.publish_mode is None
    assert ATTACH.encode()[30] == 255
    assert decode(ATTACH.encode()) == ATTACH


def test_padding_is_written_zero_and_ignored() -> None:
    """`pad` is no field of the message; peers may keep anything there."""
    assert not hasattr(SLOT, "pad")
    data = SLOT.encode_body()
    assert data[34:60] == bytes(26)
    assert control.SlotHeader.decode_body(data[:34] + b"\xff" * 26 + data[60:]) == SLOT


def test_fields_after_ours_in_an_event_are_skipped() -> None:
    """Service Control allows compatible schemas with more fields."""
    data = EVENT.encode()
    assert decode(u16(45) + data[2:48] + b"extra" + data[48:]) == EVENT
    with pytest.raises(DecodeError, match="block length 39, expected 40 or more"):
        decode(u16(39) + data[2:47] + data[48:])
    with pytest.raises(DecodeError, match="EventMessage: 45 bytes needed, 40 left"):
        decode(u16(45) + data[2:48])


def test_a_block_in_a_tag_entry_is_skipped() -> None:
    """Peers may count the tag, which the schema calls a field, into a block; no peer may do so elsewhere."""
    data = REQUEST.encode()
    entries = b"??" + u32(1) + b"a" + b"??" + u32(2) + b"bc"
    assert decode(data[:40] + u16(2) + u16(2) + entries + data[40 + 4 + 5 + 6 :]) == REQUEST
    meta = control.DataSourceMeta(
        stream_id=1, meta_version=2, timestamp_ns=3, attributes=(control.Attribute(key="k", format="f"),)
    )
    with pytest.raises(DecodeError, match=r"DataSourceMeta.attributes: block length 2, expected 0"):
        decode(patched(meta, 24, u16(2)))


def test_a_discovery_request_without_its_last_string_can_be_distinguished() -> None:
    """The codec refuses it, and says enough for a provider that wants to read the missing name as empty."""
    short = REQUEST.encode()[:-4]
    with pytest.raises(DecodeError) as caught:
        decode(short)
    assert (caught.value.field, caught.value.offset) == ("data_source_name", len(short))
    assert decode(short + u32(0)) == REQUEST
