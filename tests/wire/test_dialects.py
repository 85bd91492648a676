# SPDX-License-Identifier: Apache-2.0
"""The two layouts of attach and the merge maps, against bytes packed by hand and examples of another encoder."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorpool.errors import DecodeFault
from tensorpool.wire import DecodeError, Message, decode, driver, merge
from tensorpool.wire.driver import (
    ExtendedAttachRequest,
    ExtendedAttachResponse,
    HugepagesPolicy,
    PayloadPool,
    PublishMode,
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmAttachResponse,
)
from tests.wire.test_vectors import snake_case

LINES = (Path(__file__).parent / "vectors" / "dialects.jsonl").read_text().splitlines()
VECTORS = [vector for vector in map(json.loads, LINES) if vector["message"].startswith("ShmAttach")]
NULL_U32, NULL_U64 = 2**32 - 1, 2**64 - 1
LENGTHS = {1: {24, 27}, 2: {51, 54}}

ASKED: dict[str, Any] = {
    "correlation_id": -5,
    "stream_id": 10_000,
    "client_id": 42,
    "role": Role.CONSUMER,
    "expected_layout_version": 1,
    "publish_mode": PublishMode.EXISTING_OR_CREATE,
    "require_hugepages": HugepagesPolicy.STANDARD,
}
GRANTED: dict[str, Any] = {
    "correlation_id": -5,
    "code": ResponseCode.OK,
    "lease_id": 77,
    "lease_expiry_timestamp_ns": 9,
    "stream_id": 10_000,
    "epoch": 3,
    "layout_version": 1,
    "header_nslots": 8,
    "header_slot_bytes": 256,
    "payload_pools": (PayloadPool(pool_id=1, pool_nslots=8, stride_bytes=192, region_uri="shm:file?path=/p"),),
    "header_region_uri": "shm:file?path=/h",
}


def text(value: str) -> bytes:
    return struct.pack("<I", len(value)) + value.encode()


def header(block: int, template: int, schema: int) -> bytes:
    return struct.pack("<4H", block, template, schema, 1)


# payloadPools with one entry of a block of 10 and its URI, headerRegionUri, errorMessage
TAIL = struct.pack("<HHHII", 10, 1, 1, 8, 192) + text("shm:file?path=/p") + text("shm:file?path=/h") + text("")

GOLDEN: list[tuple[Message, bytes]] = [
    (
        ShmAttachRequest(**ASKED, max_dims=0),
        header(24, 1, 901) + struct.pack("<qIIBIBBB", -5, 10_000, 42, 2, 1, 0, 2, 1),
    ),
    (
        ExtendedAttachRequest(**ASKED, desired_node_id=7),
        header(27, 1, 901) + struct.pack("<qIIBIBBI", -5, 10_000, 42, 2, 1, 2, 1, 7),
    ),
    (
        ExtendedAttachRequest(**ASKED | {"publish_mode": None}),
        header(27, 1, 901) + struct.pack("<qIIBIBBI", -5, 10_000, 42, 2, 1, 255, 1, NULL_U32),
    ),
    (
        ShmAttachResponse(**GRANTED, max_dims=8),
        header(51, 2, 901) + struct.pack("<qiQQIQIIHB", -5, 0, 77, 9, 10_000, 3, 1, 8, 256, 8) + TAIL,
    ),
    (
        ExtendedAttachResponse(**GRANTED, node_id=968),
        header(54, 2, 901) + struct.pack("<qiQQIQIIHI", -5, 0, 77, 9, 10_000, 3, 1, 8, 256, 968) + TAIL,
    ),
    (
        ExtendedAttachResponse(correlation_id=6, code=ResponseCode.REJECTED, error_message="no"),
        header(54, 2, 901)
        + struct.pack("<qiQQIQIIHI", 6, 3, NULL_U64, NULL_U64, NULL_U32, NULL_U64, NULL_U32, NULL_U32, 65535, NULL_U32)
        + struct.pack("<HH", 10, 0)
        + text("")
        + text("no"),
    ),
    (
        merge.SequenceMergeMapAnnounce(
            out_stream_id=9,
            epoch=3,
            rules=(
                merge.Rule(input_stream_id=10, rule_type=merge.SequenceRuleType.OFFSET, offset=-2),
                merge.Rule(input_stream_id=11, rule_type=merge.SequenceRuleType.WINDOW, window_size=5),
            ),
        ),
        header(20, 1, 903)
        + struct.pack("<IQQ", 9, 3, NULL_U64)
        + struct.pack("<HH", 13, 2)
        + struct.pack("<IBiI", 10, 0, -2, NULL_U32)
        + struct.pack("<IBiI", 11, 1, -(2**31), 5),
    ),
    (merge.SequenceMergeMapRequest(out_stream_id=9, epoch=3), header(12, 2, 903) + struct.pack("<IQ", 9, 3)),
    (
        merge.TimestampMergeMapAnnounce(
            out_stream_id=9,
            epoch=3,
            stale_timeout_ns=10**9,
            clock_domain=merge.ClockDomain.REALTIME_SYNCED,
            lateness_ns=5_000_000,
            time_rules=(
                merge.TimeRule(
                    input_stream_id=10,
                    rule_type=merge.TimestampRuleType.OFFSET_NS,
                    timestamp_source=merge.TimestampSource.SLOT_HEADER,
                    offset_ns=-7,
                ),
                merge.TimeRule(
                    input_stream_id=11,
                    rule_type=merge.TimestampRuleType.WINDOW_NS,
                    timestamp_source=merge.TimestampSource.FRAME_DESCRIPTOR,
                    window_ns=10_000_000,
                ),
            ),
        ),
        header(29, 3, 903)
        + struct.pack("<IQQBQ", 9, 3, 10**9, 2, 5_000_000)
        + struct.pack("<HH", 22, 2)
        + struct.pack("<IBBqQ", 10, 0, 2, -7, NULL_U64)
        + struct.pack("<IBBqQ", 11, 1, 1, -(2**63), 10_000_000),
    ),
    (merge.TimestampMergeMapRequest(out_stream_id=9, epoch=3), header(12, 4, 903) + struct.pack("<IQ", 9, 3)),
]


@pytest.mark.parametrize(("message", "data"), GOLDEN, ids=[type(message).__name__ for message, _ in GOLDEN])
def test_messages_have_the_bytes_that_were_packed_by_hand(message: Message, data: bytes) -> None:
    """Both ways; no prefix is a message, nor is anything longer."""
    assert message.encode() == data
    assert decode(data) == message
    assert type(decode(data)) is type(message)
    for wrong in (*(data[:length] for length in range(len(data))), data + b"\0"):
        with pytest.raises(DecodeError):
            decode(wrong)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["hex"][16:24])
def test_examples_of_another_encoder_decode_to_their_fields(vector: dict[str, Any]) -> None:
    """And encode to their bytes again."""
    data = bytes.fromhex(vector["hex"])
    message = decode(data)
    assert type(message).__name__ == vector["message"].replace("Shm", "Extended")
    for name, value in vector["fields"].items():
        found = getattr(message, snake_case(name))
        if name == "payloadPools":
            found = [[pool.pool_id, pool.pool_nslots, pool.stride_bytes, pool.region_uri] for pool in found]
        is_null = found is None and value in (255, 65535, NULL_U32, NULL_U64)
        assert found == value or is_null, name
    assert message.encode() == data


@pytest.mark.spec("WIRE-16-17")
@pytest.mark.parametrize("template", LENGTHS)
def test_every_other_block_length_is_refused_with_a_sentence(template: int) -> None:
    """Which says what was found and what is known, whatever follows the header."""
    name = "ShmAttachRequest" if template == 1 else "ShmAttachResponse"
    known = " or ".join(map(str, sorted(LENGTHS[template])))
    for length in set(range(2**16)) - LENGTHS[template]:
        with pytest.raises(DecodeError) as caught:
            decode(header(length, template, 901) + b"\0" * min(length, 80))
        assert caught.value.fault is DecodeFault.BLOCK_LENGTH
        assert str(caught.value).startswith(f"{name}: block length {length}, expected {known}")


@given(st.integers(0, 2**16 - 1), st.sampled_from([1, 2]), st.binary(max_size=120))
def test_no_block_length_is_read_as_another_layout(length: int, template: int, body: bytes) -> None:
    """What decodes has the block length of its class and encodes to the same bytes."""
    data = header(length, template, 901) + body
    try:
        message = decode(data)
    except DecodeError:
        return
    assert length == type(message).BLOCK_LENGTH
    assert message.encode() == data


def test_a_schema_encodes_both_layouts_under_its_id() -> None:
    """A deployment with another schema id has both dialects too."""
    moved = driver.schema.with_id(999)
    for message, data in GOLDEN[:6]:
        encoded = moved.encode(message)
        assert encoded == data[:4] + struct.pack("<H", 999) + data[6:]
        assert moved.decode(encoded) == message
