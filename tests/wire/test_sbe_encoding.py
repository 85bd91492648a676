# SPDX-License-Identifier: Apache-2.0
"""Which messages the codec refuses to write, and what message objects promise."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from tensorpool.errors import DecodeFault, LocalProtocolError
from tensorpool.wire import DecodeError, Message, MessageHeader, control, decode, discovery, driver, event, peek_header
from tests.wire.sample_messages import ANNOUNCE, CHUNK, DESCRIPTOR, EVENT, HELLO, POOL, REQUEST, TENSOR, u16, u32


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


def test_a_constant_is_an_attribute_of_the_class() -> None:
    """maxDims has no bytes and no field."""
    assert control.TensorHeader.MAX_DIMS == 8
    assert "max_dims" not in control.TensorHeader.__struct_fields__


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
