# SPDX-License-Identifier: Apache-2.0
"""Chunks of the other layout (block 53): known by their block length, with a trace id and a checksum of each. K9."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from tensorpool._core import Assembler, ChunkRouter
from tensorpool.wire import decode as decode_message
from tensorpool.wire.bridge import BridgeFrameChunk
from tests.bridge import traced
from tests.bridge.frames import EPOCH, POOLS, STREAM, Receiving, chunks_of, header_of
from tests.bridge.sending import Rig, pattern

VECTORS = [
    json.loads(line)
    for line in Path(__file__).parent.joinpath("vectors", "traced_chunks.jsonl").read_text("utf-8").splitlines()
]
PAYLOAD = bytes(range(256)) * 8
TRACE_ID = 0x1122_3344_5566_7788
KEY = b"a secret of both ends"


def traced_chunks_of(seq: int, payload: bytes, sizes: tuple[int, ...] = (700, 700), **changed: Any) -> list[bytes]:
    """The frame's chunks in the other layout, with what the test wants otherwise."""
    found = []
    for message in chunks_of(seq, payload, sizes):
        chunk = decode_message(message)
        assert isinstance(chunk, BridgeFrameChunk)
        content = bytes(chunk.header_bytes) + bytes(chunk.payload_bytes)
        fields = {
            "streamId": chunk.stream_id,
            "epoch": chunk.epoch,
            "seq": chunk.seq,
            "traceId": TRACE_ID,
            "chunkIndex": chunk.chunk_index,
            "chunkCount": chunk.chunk_count,
            "chunkOffset": chunk.chunk_offset,
            "chunkLength": chunk.chunk_length,
            "payloadLength": chunk.payload_length,
            "payloadCrc32c": google_crc32c.value(content),
            "headerBytes": bytes(chunk.header_bytes).hex(),
            "payloadBytes": bytes(chunk.payload_bytes).hex(),
        }
        found.append(traced.encode(fields | changed))
    return found


@pytest.mark.parametrize("vector", VECTORS, ids=["with a slot header", "without"])
def test_the_layout_is_that_of_other_implementations(vector: dict[str, Any]) -> None:
    """Their bytes, both ways; this is what the other tests here write and read."""
    message = bytes.fromhex(vector["hex"])
    assert traced.encode(vector["fields"]) == message
    assert traced.decode(message) == vector["fields"]


@pytest.mark.parametrize("vector", VECTORS, ids=["with a slot header", "without"])
def test_their_chunks_are_taken_for_what_they_are(vector: dict[str, Any]) -> None:
    """Their examples have a checksum of nothing in particular; with the right one the chunk itself is accepted."""
    fields = vector["fields"]
    content = bytes.fromhex(fields["headerBytes"]) + bytes.fromhex(fields["payloadBytes"])
    assembler = Assembler(
        fields["streamId"], max_chunk_bytes=65_535, max_payload_bytes=2**30, max_inflight=4, timeout_ns=10**9
    )
    router = ChunkRouter()
    router.add(assembler)
    assembler.set_source(fields["epoch"], POOLS)
    router.take(bytes.fromhex(vector["hex"]), 1)
    assert assembler.counts == {("chunks_received", ""): 1, ("chunks_dropped", "crc"): 1}
    router.take(traced.encode(fields | {"payloadCrc32c": google_crc32c.value(content)}), 1)
    assert assembler.counts["chunks_received", ""] == 2
    assert assembler.counts["chunks_dropped", "crc"] == 1
    assert assembler.counts["frames_dropped", "no_lease"] == 1  # the chunk is whole, and there is no ring for its frame


@pytest.mark.parametrize("order", [1, -1], ids=["in order", "reversed"])
def test_a_traced_frame_is_put_together(order: int) -> None:
    receiving = Receiving()
    receiving.take(*traced_chunks_of(1, PAYLOAD)[::order])
    assert receiving.ring.payload(1) == PAYLOAD
    header = bytearray(header_of(1, PAYLOAD))
    header[34:50] = struct.pack("<QQ", TRACE_ID, TRACE_ID ^ 0x5450_5452_4143_4531)  # K11: in the slot, too
    assert receiving.ring.image(1)[8:] == header[8:]
    receiving.take(*chunks_of(2, PAYLOAD, [700, 700]))  # the specification's go on beside them
    assert receiving.ring.payload(2) == PAYLOAD
    assert not receiving.frames_dropped
    assert not receiving.chunks_dropped


@pytest.mark.parametrize("at", [40, -1], ids=["in the slot header", "in the payload"])
def test_a_harmed_chunk_is_dropped_and_counted(at: int) -> None:
    receiving = Receiving()
    first, *others = traced_chunks_of(1, PAYLOAD)
    harmed = bytearray(first)
    harmed[65 + at if at > 0 else at] ^= 1
    receiving.take(bytes(harmed), *others)
    assert receiving.chunks_dropped == {"crc": 1}
    assert receiving.ring.payload(1) is None
    receiving.take(first)
    assert receiving.ring.payload(1) == PAYLOAD


def test_a_sender_that_computes_no_checksum_says_zero() -> None:
    receiving = Receiving()
    receiving.take(*traced_chunks_of(1, PAYLOAD, payloadCrc32c=0))
    assert receiving.ring.payload(1) == PAYLOAD


def test_chunks_of_one_frame_have_one_trace_id() -> None:
    receiving = Receiving()
    first, second, third = traced_chunks_of(1, PAYLOAD)
    receiving.take(first, second, traced_chunks_of(1, PAYLOAD, traceId=TRACE_ID + 1)[2], third)
    assert receiving.ring.payload(1) is None
    assert receiving.frames_dropped == {"inconsistent": 1}


@pytest.mark.parametrize("block", [0, 24, 40, 42, 49, 52, 54, 61, 65_535])
def test_every_other_block_length_is_refused_and_counted(block: int) -> None:
    receiving = Receiving()
    for message in (chunks_of(1, PAYLOAD)[0], traced_chunks_of(1, PAYLOAD, ())[0]):
        receiving.take(struct.pack("<H", block) + message[2:])
    assert receiving.chunks_dropped == {"malformed": 2}


@pytest.mark.parametrize("cut", [8, 60, 64, 68, 100, 330])
def test_a_traced_chunk_that_ends_early_is_refused(cut: int) -> None:
    receiving = Receiving()
    receiving.take(traced_chunks_of(1, PAYLOAD)[0][:cut])
    assert receiving.chunks_dropped == {"malformed": 1}


def test_the_authentication_code_covers_the_trace_id() -> None:
    receiving = Receiving(needs_digest=True, mac_key=KEY)
    for seq, trace_id, is_right in ((1, TRACE_ID, True), (2, TRACE_ID + 1, False)):
        identity = struct.pack("<IQQIQ", STREAM, EPOCH, seq, len(PAYLOAD), TRACE_ID)
        code = hashlib.blake2b(identity + header_of(seq, PAYLOAD) + PAYLOAD, key=KEY, digest_size=16).digest()
        receiving.take(*traced_chunks_of(seq, PAYLOAD, traceId=trace_id))
        receiving.take_digest(seq, PAYLOAD, mac=code)
        assert (receiving.ring.payload(seq) == PAYLOAD) is is_right
    assert receiving.frames_dropped == {"mac": 1}


def test_a_traced_sender_sends_the_trace_id_and_a_checksum_of_each_chunk(make: Callable[..., Rig]) -> None:
    """Chunk 0 is 12 bytes shorter than the specification's, so that it fits the datagram, too."""
    rig = make(dialect="2026-01")
    messages: list[bytes] = []
    rig.on_chunk = messages.append
    rig.listen()
    rig.settle()
    data = pattern(3000)
    seq = rig.producer.publish(data, trace_id=TRACE_ID)
    rig.until(lambda: len(messages) == 3, "the frame has come")
    chunks = [traced.decode(message) for message in messages]
    assert [chunk["chunkLength"] for chunk in chunks] == [1051, 1280, 669]
    assert [chunk["chunkOffset"] for chunk in chunks] == [0, 1051, 2331]
    assert "".join(chunk["payloadBytes"] for chunk in chunks) == data.tobytes().hex()
    assert {(chunk["seq"], chunk["traceId"], chunk["payloadLength"]) for chunk in chunks} == {(seq, TRACE_ID, 3000)}
    for chunk in chunks:
        content = bytes.fromhex(chunk["headerBytes"] + chunk["payloadBytes"])
        assert chunk["payloadCrc32c"] == google_crc32c.value(content)
    assert len(messages[0]) == 1408 - 32


def test_by_default_no_trace_id_leaves(make: Callable[..., Rig]) -> None:
    rig = make()
    messages: list[bytes] = []
    rig.on_chunk = messages.append
    rig.listen()
    rig.settle()
    rig.producer.publish(pattern(100), trace_id=TRACE_ID)
    rig.until(lambda: messages, "the frame has come")
    assert struct.unpack_from("<H", messages[0]) == (41,)
    assert TRACE_ID.to_bytes(8, "little") not in messages[0]
