# SPDX-License-Identifier: Apache-2.0
"""The codec's promises: what it refuses, what it says about it, and what it never does."""

from __future__ import annotations

import array
import pickle
import struct
import tracemalloc
from typing import Any

import pytest

from tensorpool.errors import DecodeFault, LocalProtocolError
from tensorpool.wire import (
    DecodeError,
    Message,
    MessageHeader,
    bridge,
    control,
    decode,
    discovery,
    driver,
    event,
    peek_header,
    trace,
)

DESCRIPTOR = control.FrameDescriptor(stream_id=10000, epoch=7, seq=5)
PROGRESS = control.FrameProgress(
    stream_id=10000, epoch=7, seq=5, payload_bytes_filled=0, state=control.FrameProgressState.STARTED
)
HELLO = control.ConsumerHello(
    stream_id=10000,
    consumer_id=9,
    supports_shm=True,
    supports_progress=False,
    mode=control.Mode.STREAM,
    max_rate_hz=0,
    expected_layout_version=1,
    descriptor_stream_id=0,
    control_stream_id=0,
)
POOL = control.PayloadPool(pool_id=1, pool_nslots=8, stride_bytes=4096, region_uri="shm:file?path=/p/1.pool")
ANNOUNCE = control.ShmPoolAnnounce(
    stream_id=10000,
    producer_id=3,
    epoch=7,
    announce_timestamp_ns=1000,
    announce_clock_domain=control.ClockDomain.MONOTONIC,
    layout_version=1,
    header_nslots=8,
    header_slot_bytes=256,
    payload_pools=(POOL, POOL),
    header_region_uri="shm:file?path=/p/h",
)
TENSOR = control.TensorHeader(
    dtype=control.Dtype.FLOAT32,
    major_order=control.MajorOrder.ROW,
    ndims=2,
    progress_unit=control.ProgressUnit.NONE,
    progress_stride_bytes=0,
    dims=(2, 3, 0, 0, 0, 0, 0, 0),
    strides=(0,) * 8,
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
CHUNK = bridge.BridgeFrameChunk(
    stream_id=10000,
    epoch=7,
    seq=5,
    chunk_index=0,
    chunk_count=1,
    chunk_offset=0,
    chunk_length=2,
    payload_length=2,
    header_included=False,
    payload_bytes=b"\xaa\xbb",
)
REQUEST = discovery.DiscoveryRequest(
    request_id=1,
    client_id=3,
    response_stream_id=7004,
    tags=(discovery.Tag(tag="a"), discovery.Tag(tag="bc")),
    response_channel="aeron:ipc",
)
EVENT = event.EventMessage(timestamp_ns=1, correlation_id=2, format=event.Format.STRING, tag="t", key="k", value=b"v")
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


def u16(value: int) -> bytes:
    return struct.pack("<H", value)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


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


@pytest.mark.parametrize(
    ("field", "value"),
    [("trace_id", 0), ("trace_id", 2**64 - 1), ("timestamp_ns", 2**64 - 1), ("meta_version", 2**32 - 1)],
)
def test_a_null_value_cannot_be_written_as_a_number(field: str, value: int) -> None:
    """It would come back as None."""
    message = control.FrameDescriptor(stream_id=1, epoch=2, seq=3, **{field: value})
    with pytest.raises(LocalProtocolError, match=f"FrameDescriptor.{field} = {value}: .*, or None"):
        message.encode()


def test_required_fields_carry_every_value() -> None:
    """All-ones is a null for optional fields only."""
    message = control.FrameDescriptor(stream_id=2**32 - 1, epoch=2**64 - 1, seq=2**64 - 1, timestamp_ns=0)
    assert decode(message.encode()) == message


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


def test_a_constant_is_an_attribute_of_the_class() -> None:
    """maxDims has no bytes and no field."""
    assert control.TensorHeader.MAX_DIMS == 8
    assert "max_dims" not in control.TensorHeader.__struct_fields__


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


@pytest.mark.parametrize("value", [-1, 2**32, 2**70, 1.5, "1", None, b"1"])
def test_a_number_out_of_range_is_refused(value: Any) -> None:
    """The error names message, field, value and range, whatever was put there."""
    message = control.FrameDescriptor(stream_id=value, epoch=7, seq=5)
    for encode in message.encode, message.encode_body, lambda: message.encode_into(bytearray(100)):
        with pytest.raises(LocalProtocolError) as caught:
            encode()
        text = f"FrameDescriptor.stream_id = {value!r}: expected uint32 from 0 to 4294967295"
        assert str(caught.value) == text


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            driver.ShmDetachResponse(correlation_id=2**63, code=driver.ResponseCode.OK),
            "ShmDetachResponse.correlation_id = 9223372036854775808: expected int64 from -92233720368",
        ),
        (
            driver.ShmDetachResponse(correlation_id=0, code=7),  # type: ignore[arg-type]
            "ShmDetachResponse.code = 7: expected ResponseCode OK, UNSUPPORTED, INVALID_PARAMS",
        ),
        (
            driver.ShmDetachResponse(correlation_id=0, code=None),  # type: ignore[arg-type]
            "ShmDetachResponse.code = None: expected ResponseCode OK",
        ),
        (
            driver.ShmDetachResponse(correlation_id=0, code=[]),  # type: ignore[arg-type]
            "ShmDetachResponse.code = []: expected ResponseCode OK",
        ),
    ],
)
def test_wrong_numbers_and_enums_are_refused(message: Message, text: str) -> None:
    """Signed fields and enums are held to their ranges too."""
    with pytest.raises(LocalProtocolError) as caught:
        message.encode()
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("message", "changes", "text"),
    [
        (
            TENSOR,
            {"dims": (1,) * 7},
            "TensorHeader.dims = (1, 1, 1, 1, 1, 1, ...): expected 8 values, each int32",
        ),
        (TENSOR, {"dims": (1,) * 7, "strides": (1,) * 9}, "TensorHeader.dims"),
        (TENSOR, {"strides": (0,) * 7 + (2**31,)}, "TensorHeader.strides"),
        (TENSOR, {"dims": None}, "TensorHeader.dims = None"),
        (
            CHUNK,
            {"chunk_count": 65536},
            "BridgeFrameChunk.chunk_count = 65536: expected uint32 from 0 to 65535",
        ),
        (CHUNK, {"chunk_count": "1"}, "BridgeFrameChunk.chunk_count = '1'"),
        (CHUNK, {"payload_length": 2**30 + 1}, "BridgeFrameChunk.payload_length = 1073741825"),
        (CHUNK, {"header_included": 2}, "BridgeFrameChunk.header_included = 2: expected True or False"),
        (
            CHUNK,
            {"header_bytes": bytes(257)},
            "BridgeFrameChunk.header_bytes: 257 bytes, at most 256 are allowed",
        ),
        (CHUNK, {"payload_bytes": "text"}, "BridgeFrameChunk.payload_bytes = 'text': expected bytes"),
        (CHUNK, {"payload_bytes": bytearray(2)}, "BridgeFrameChunk.payload_bytes = bytearray"),
        (
            ANNOUNCE,
            {"header_region_uri": b"x"},
            "ShmPoolAnnounce.header_region_uri = b'x': expected ASCII text",
        ),
        (
            ANNOUNCE,
            {"payload_pools": None},
            "ShmPoolAnnounce.payload_pools = None: expected a tuple of PayloadPool",
        ),
        (
            ANNOUNCE,
            {"payload_pools": (POOL, 1)},
            "ShmPoolAnnounce.payload_pools[1] = 1: expected a tensorpool.wire.c",
        ),
        (
            ANNOUNCE,
            {"payload_pools": (POOL,) * 65535},
            "ShmPoolAnnounce.payload_pools: 65535 entries, at most 65534",
        ),
        (
            ANNOUNCE,
            {"payload_pools": (control.PayloadPool(pool_id=65536, pool_nslots=1, stride_bytes=64),)},
            "ShmPoolAnnounce.payload_pools.pool_id = 65536: expected uint16 from 0 to 65535",
        ),
    ],
)
def test_what_the_schema_cannot_carry_is_refused(message: Message, changes: dict[str, Any], text: str) -> None:
    """Arrays, maxima, groups and data are held to the schema; the path in the error leads to the value."""
    broken = type(message)(**{name: getattr(message, name) for name in message.__struct_fields__} | changes)
    with pytest.raises(LocalProtocolError) as caught:
        broken.encode()
    assert str(caught.value).startswith(text)
    assert len(str(caught.value)) < 1000


def test_encode_into_writes_at_the_given_offset_or_not_at_all() -> None:
    """A buffer that is too small stays untouched."""
    size = len(DESCRIPTOR.encode())
    exact = bytearray(size)
    assert DESCRIPTOR.encode_into(exact) == size
    assert exact == DESCRIPTOR.encode()
    small = bytearray(size + 3)
    for offset in 4, -1, 1000:
        with pytest.raises(LocalProtocolError, match=f"48 bytes: it does not fit at offset {offset} of 51"):
            DESCRIPTOR.encode_into(small, offset)
    assert small == bytes(size + 3)
    with pytest.raises(TypeError):
        DESCRIPTOR.encode_into(bytes(size))


@pytest.mark.parametrize("name", ["caf\u00e9", "カメラ", "tab\tand\0null", "\U0001f4f7"])
def test_names_carry_any_text(name: str) -> None:
    """A data source name may be any bytes; the codec does not interpret it."""
    message = control.DataSourceAnnounce(stream_id=1, producer_id=2, epoch=3, meta_version=4, name=name)
    assert decode(message.encode()) == message
    assert name.encode() in message.encode()


def test_bytes_that_are_no_text_survive_a_round_trip() -> None:
    """Names are opaque: what came in goes out, byte for byte."""
    template = control.DataSourceAnnounce(stream_id=1, producer_id=2, epoch=3, meta_version=4).encode()
    opaque = bytes(range(256))
    data = template[:28] + u32(256) + opaque + u32(0)
    message = decode(data)
    assert isinstance(message, control.DataSourceAnnounce)
    assert message.name.startswith("\0\1\2")
    assert message.encode() == data
    half = control.DataSourceAnnounce(stream_id=1, producer_id=2, epoch=3, meta_version=4, name="\ud800")
    with pytest.raises(LocalProtocolError, match=r"DataSourceAnnounce.name = .*: expected text that UTF-8"):
        half.encode()


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (ANNOUNCE, "header_region_uri"),
        (HELLO, "descriptor_channel"),
        (REQUEST, "response_channel"),
        (EVENT, "tag"),
        (driver.ShmDriverShutdownRequest(correlation_id=1, reason=driver.ShutdownReason.ADMIN), "token"),
    ],
)
def test_what_peers_compare_or_open_must_be_ascii(message: Message, path: str) -> None:
    """URIs, channels, tags, formats, tokens and ids are refused on the way out and accepted on the way in."""
    values = {name: getattr(message, name) for name in message.__struct_fields__}
    kind = type(message)
    with pytest.raises(LocalProtocolError, match=f"{kind.__name__}.{path} = 'é': expected ASCII text"):
        kind(**values | {path: "é"}).encode()
    ascii_only = kind(**values | {path: "@@"}).encode()
    received = decode(ascii_only.replace(b"@@", "é".encode()))
    assert getattr(received, path) == "é"


def test_the_ascii_rule_reaches_into_groups() -> None:
    """Region URIs of pools, tags, formats and instance ids sit in entries."""
    result = discovery.Result(
        stream_id=1,
        producer_id=2,
        epoch=3,
        layout_version=1,
        header_nslots=8,
        header_slot_bytes=256,
        max_dims=8,
        driver_control_stream_id=1000,
        data_source_name="é",
        driver_instance_id="é",
    )
    response = discovery.DiscoveryResponse(
        request_id=1, status=discovery.DiscoveryStatus.OK, results=(result,), error_message="é"
    )
    with pytest.raises(LocalProtocolError, match=r"DiscoveryResponse.results.driver_instance_id = 'é': expected ASCII"):
        response.encode()
    attribute = control.Attribute(key="é", format="é")
    meta = control.DataSourceMeta(stream_id=1, meta_version=2, timestamp_ns=3, attributes=(attribute,))
    with pytest.raises(LocalProtocolError, match=r"DataSourceMeta.attributes.format = 'é': expected ASCII"):
        meta.encode()


def test_messages_are_frozen_hashable_keyword_only_and_picklable() -> None:
    """They travel between threads, processes and dictionaries."""
    assert pickle.loads(pickle.dumps(ANNOUNCE)) == ANNOUNCE
    assert hash(ANNOUNCE) == hash(decode(ANNOUNCE.encode()))
    with pytest.raises(AttributeError):
        DESCRIPTOR.seq = 6  # type: ignore[misc]
    with pytest.raises(TypeError):
        control.FrameDescriptor(10000, 7, 5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="seq"):
        control.FrameDescriptor(stream_id=10000, epoch=7)  # type: ignore[call-arg]


def test_a_schema_can_be_given_another_id() -> None:
    """Deployments number the event schema as they like; the message classes stay the same."""
    schema = event.schema.with_id(906)
    data = schema.encode(EVENT)
    assert peek_header(data) == MessageHeader(block_length=40, template_id=1, schema_id=906, version=1)
    assert data[8:] == EVENT.encode_body()
    assert schema.decode(data) == EVENT
    assert schema.decode(u16(42) + data[2:48] + b"??" + data[48:]) == EVENT
    assert event.schema.id == 905
    for refuse, wrong in (schema.decode, EVENT.encode()), (event.schema.decode, data), (decode, data):
        with pytest.raises(DecodeError) as caught:
            refuse(wrong)
        assert caught.value.fault is DecodeFault.SCHEMA
    with pytest.raises(LocalProtocolError, match="FrameDescriptor is not a message of schema 906"):
        schema.encode(DESCRIPTOR)
    with pytest.raises(LocalProtocolError, match="schema id 65536"):
        event.schema.with_id(65536)
