# SPDX-License-Identifier: Apache-2.0
"""Chunks and slot headers that lie: a bridge receiver publishes nothing of them, counts them, and goes on.

Bridge §5.2, §5.3, §6, §10, §11; decisions G18, G21, G26, G27. Each frame here is honest but for one thing. That nothing
is published is proved by an honest frame behind it, which is; that it was seen at all by a counter.
"""

from __future__ import annotations

import random
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorpool import aeron
from tensorpool.wire import Message, driver
from tensorpool.wire.control import Dtype, FrameDescriptor, MajorOrder
from tests.support.bridge_rig import Host, Reception
from tests.support.bridge_sender import (
    CHUNK,
    CHUNK_BYTES,
    FIRST_CHUNK_BYTES,
    Chunk,
    noise,
    packed_chunk,
)
from tests.support.driver_client import attach_request
from tests.support.region_bytes import committed

mark = pytest.mark
NULL_32 = 2**32 - 1
LENGTH = FIRST_CHUNK_BYTES + CHUNK_BYTES + 700  # three chunks
MIB = 1 << 20

type Lie = Callable[[list[Chunk]], list[Chunk | bytes]]


@pytest.fixture(scope="module")
def reception(host: Host) -> Iterator[Reception]:
    with Reception(host, max_inflight_frames=1024, announce_period_ms=1000) as reception:
        yield reception.meet()


def all_with(**fields: Any) -> Lie:
    """Every chunk says so."""
    return lambda chunks: [chunk | fields for chunk in chunks]


def one_with(index: int, **fields: Any) -> Lie:
    """One chunk says so."""
    return lambda chunks: [chunk | fields if at == index else chunk for at, chunk in enumerate(chunks)]


def moved(index: int, by: int) -> Lie:
    """One chunk lies elsewhere."""

    def lie(chunks: list[Chunk]) -> list[Chunk | bytes]:
        offset = (chunks[index]["chunk_offset"] + by) % 2**32
        return one_with(index, chunk_offset=offset)(chunks)

    return lie


def again(index: int, **fields: Any) -> Lie:
    """One chunk comes before the last one again, otherwise."""
    return lambda chunks: [*chunks[:-1], chunks[index] | fields, chunks[-1]]


def raw(index: int, change: Callable[[bytes], bytes]) -> Lie:
    """The bytes of one chunk are changed."""
    return lambda chunks: [change(packed_chunk(**chunk)) if at == index else chunk for at, chunk in enumerate(chunks)]


def cut_otherwise(*cuts: tuple[int, int]) -> Lie:
    """The same payload in other slices."""

    def lie(chunks: list[Chunk]) -> list[Chunk | bytes]:
        payload = b"".join(chunk["payload_bytes"] for chunk in chunks)
        return [
            chunks[min(index, 1)]
            | {"chunk_index": index, "chunk_count": len(cuts), "chunk_offset": offset, "chunk_length": length}
            | {"payload_bytes": (payload + payload)[offset : offset + length]}
            for index, (offset, length) in enumerate(cuts)
        ]

    return lie


def with_image(index: int, *, included: bool, length: int = 256) -> Lie:
    return lambda chunks: one_with(
        index, header_included=included, header_bytes=(chunks[0]["header_bytes"] + bytes(256))[:length]
    )(chunks)


def case(name: str, claim: pytest.MarkDecorator, reason: str, lie: object) -> Any:
    """A lie, and what it is counted as."""
    return pytest.param(lie, reason, id=name, marks=claim)


CHUNK_LIES = [
    case("a count of zero", mark.spec("BRG-5.2-03"), "chunks.chunk_count", all_with(chunk_count=0)),
    case("a count of 65536", mark.spec("BRG-5.2-03"), "chunks.chunk_count", all_with(chunk_count=65_536)),
    case("a count of all ones", mark.spec("BRG-11-03"), "chunks.chunk_count", all_with(chunk_count=NULL_32)),
    case("an index of the count", mark.spec("BRG-5.2-04"), "chunks.chunk_index", one_with(2, chunk_index=3)),
    case("an index above a lesser count", mark.spec("BRG-5.2-04"), "chunks.chunk_index", all_with(chunk_count=2)),
    case("an index of 65536", mark.spec("BRG-11-03"), "chunks.chunk_index", one_with(2, chunk_index=65_536)),
    case("an index of all ones", mark.spec("BRG-11-03"), "chunks.chunk_index", one_with(2, chunk_index=NULL_32)),
    case(
        "chunk 0 behind chunk 1",
        mark.spec("BRG-5.2-07"),
        "frames.inconsistent",
        cut_otherwise((1000, 1000), (0, 1000), (2000, LENGTH - 2000)),
    ),
    case("a second header", mark.spec("BRG-5.2-09"), "chunks.header", with_image(1, included=True)),
    case(
        "a second header that is empty",
        mark.spec("BRG-5.2-09"),
        "chunks.header",
        with_image(1, included=True, length=0),
    ),
    case(
        "no header in chunk 0",
        mark.spec("BRG-5.2-18"),
        "chunks.header",
        one_with(0, header_included=False, header_bytes=b""),
    ),
    case("a header of 255 bytes", mark.spec("BRG-5.2-19"), "chunks.header", with_image(0, included=True, length=255)),
    case("a header of no bytes", mark.spec("BRG-5.2-19"), "chunks.header", with_image(0, included=True, length=0)),
    case("a header of 257 bytes", mark.spec("BRG-11-02"), "chunks.header", with_image(0, included=True, length=257)),
    case("a header that claims 257 bytes", mark.spec("BRG-11-02"), "chunks.malformed", one_with(0, header_length=257)),
    case(
        "a header that claims all ones", mark.spec("BRG-5.2-31"), "chunks.malformed", one_with(0, header_length=NULL_32)
    ),
    case(
        "a header in chunk 1 that says it has none",
        mark.spec("BRG-5.2-20"),
        "chunks.header",
        with_image(1, included=False),
    ),
    case(
        "a byte of a header in chunk 2",
        mark.spec("BRG-5.2-20"),
        "chunks.header",
        with_image(2, included=False, length=1),
    ),
    case(
        "a header in chunk 0 that says it has none",
        mark.spec("BRG-5.2-20"),
        "chunks.header",
        with_image(0, included=False),
    ),
    case(
        "a header that is neither there nor not",
        mark.spec("BRG-5.2-18"),
        "chunks.malformed",
        one_with(0, header_included=2),
    ),
    case(
        "a header that is 255 in chunk 1", mark.spec("BRG-5.2-18"), "chunks.malformed", one_with(1, header_included=255)
    ),
    case(
        "a byte less than stated",
        mark.spec("BRG-5.2-21"),
        "chunks.length",
        lambda it: one_with(1, payload_bytes=it[1]["payload_bytes"][:-1])(it),
    ),
    case(
        "a byte more than stated",
        mark.spec("BRG-5.2-21"),
        "chunks.length",
        lambda it: one_with(1, payload_bytes=it[1]["payload_bytes"] + b"+")(it),
    ),
    case("no bytes at all", mark.spec("BRG-5.2-21"), "chunks.length", one_with(2, payload_bytes=b"")),
    case(
        "bytes that claim to be more than there are",
        mark.spec("BRG-5.2-31"),
        "chunks.malformed",
        one_with(1, bytes_length=CHUNK_BYTES + 1),
    ),
    case(
        "bytes that claim to be 1 GiB", mark.spec("BRG-5.2-30"), "chunks.malformed", one_with(1, bytes_length=1 << 30)
    ),
    case("bytes that claim all ones", mark.spec("BRG-5.2-31"), "chunks.malformed", one_with(1, bytes_length=NULL_32)),
    case(
        "an end before the end", mark.spec("BRG-5.2-12"), "frames.inconsistent", lambda it: [*it[:2], _shorter(it[2])]
    ),
    case(
        "an empty chunk more",
        mark.spec("BRG-5.2-12"),
        "frames.inconsistent",
        cut_otherwise((0, 1000), (1000, 1000), (2000, LENGTH - 2000), (LENGTH, 0)),
    ),
    case(
        "an empty chunk first",
        mark.spec("BRG-5.2-12"),
        "frames.inconsistent",
        cut_otherwise((0, 0), (0, 1000), (1000, 1200), (2200, LENGTH - 2200)),
    ),
    case("a slice beyond the end", mark.spec("BRG-5.2-12"), "frames.inconsistent", moved(2, 1)),
    case(
        "a slice far beyond the end", mark.spec("BRG-5.2-12"), "frames.inconsistent", one_with(2, chunk_offset=NULL_32)
    ),
    case(
        "a slice that ends beyond 32 bits",
        mark.spec("BRG-5.2-12"),
        "frames.inconsistent",
        one_with(2, chunk_offset=2**32 - 700),
    ),
    case("a slice over the one before", mark.spec("BRG-5.2-25"), "frames.conflict", moved(1, -1)),
    case("a slice over the one behind", mark.spec("BRG-5.2-25"), "frames.conflict", moved(1, 1)),
    case(
        "a slice in the place of another",
        mark.spec("BRG-5.2-25"),
        "frames.conflict",
        lambda it: one_with(2, chunk_offset=0)(it),
    ),
    case(
        "the same place with other bytes",
        mark.spec("BRG-5.2-25"),
        "frames.conflict",
        again(1, payload_bytes=noise(CHUNK_BYTES)),
    ),
    case(
        "the same place with one other bit",
        mark.spec("BRG-5.2-26"),
        "frames.conflict",
        lambda it: again(1, payload_bytes=_flipped(it[1]))(it),
    ),
    case(
        "the same place, shorter",
        mark.spec("BRG-5.2-26"),
        "frames.conflict",
        lambda it: [*it[:2], _shorter(it[1]), it[2]],
    ),
    case(
        "the same place, longer",
        mark.spec("BRG-5.2-26"),
        "frames.conflict",
        lambda it: [it[0], it[2], *_longer(it[2]), it[1]],
    ),
    case("the same place, a byte longer", mark.spec("BRG-5.2-26"), "frames.conflict", lambda it: _again_longer(it)),
    case(
        "the same chunk, a byte further on",
        mark.spec("BRG-5.2-25"),
        "frames.conflict",
        lambda it: again(1, chunk_offset=it[1]["chunk_offset"] + 1)(it),
    ),
    case(
        "a slice over one that came before it",
        mark.spec("BRG-5.2-25"),
        "frames.conflict",
        lambda it: [it[2], moved(1, 1)(it)[1], it[0]],
    ),
    case(
        "a first slice over the second", mark.spec("BRG-5.2-25"), "frames.conflict", lambda it: _first_over_second(it)
    ),
    case("chunk 1 in two places", mark.spec("BRG-5.2-25"), "frames.conflict", one_with(2, chunk_index=1)),
    case("counts that differ", mark.spec("BRG-5.3-02"), "frames.inconsistent", one_with(1, chunk_count=4)),
    case("the last count differs", mark.spec("BRG-5.3-02"), "frames.inconsistent", one_with(2, chunk_count=4)),
    case("lengths that differ", mark.spec("BRG-5.3-02"), "frames.inconsistent", one_with(1, payload_length=LENGTH + 1)),
    case(
        "the last length differs",
        mark.spec("BRG-5.3-02"),
        "frames.inconsistent",
        one_with(2, payload_length=LENGTH + 1),
    ),
    case("a length above 1 GiB", mark.spec("BRG-11-03"), "chunks.malformed", all_with(payload_length=(1 << 30) + 1)),
    case("a length of all ones", mark.spec("BRG-11-03"), "chunks.malformed", all_with(payload_length=NULL_32)),
    case("a chunk of 65536 bytes", mark.spec("BRG-11-03"), "chunks.length", one_with(1, chunk_length=65_536)),
    case("a chunk of all ones", mark.spec("BRG-11-03"), "chunks.length", one_with(1, chunk_length=NULL_32)),
    case(
        "a block a byte shorter",
        mark.spec("BRG-11-01"),
        "chunks.malformed",
        one_with(1, message_header=(40, 1, 902, 1)),
    ),
    case(
        "a block a byte longer", mark.spec("BRG-11-01"), "chunks.malformed", one_with(1, message_header=(42, 1, 902, 1))
    ),
    case("another template", mark.spec("BRG-11-01"), "chunks.foreign", one_with(1, message_header=(41, 2, 902, 1))),
    case("another schema", mark.spec("BRG-11-01"), "chunks.foreign", one_with(1, message_header=(41, 1, 900, 1))),
    case("another stream", mark.spec("BRG-6-01"), "chunks.unknown_stream", one_with(1, stream_id=1)),
    case(
        "another seq", mark.spec("BRG-6-01"), "frames.out_of_order", lambda it: one_with(1, seq=it[1]["seq"] + 1000)(it)
    ),
    case("the epoch before", mark.spec("BRG-6-02"), "chunks.epoch", lambda it: all_with(epoch=it[0]["epoch"] - 1)(it)),
    case("no epoch", mark.spec("BRG-6-02"), "chunks.epoch", all_with(epoch=0)),
    case(
        "one chunk of the epoch before",
        mark.spec("BRG-6-02"),
        "chunks.epoch",
        lambda it: one_with(1, epoch=it[1]["epoch"] - 1)(it),
    ),
    case("only the header of the message", mark.spec("BRG-6-06"), "chunks.malformed", raw(1, lambda data: data[:8])),
    case("half a block", mark.spec("BRG-6-06"), "chunks.malformed", raw(1, lambda data: data[:30])),
    case("no lengths", mark.spec("BRG-6-06"), "chunks.malformed", raw(1, lambda data: data[: CHUNK.size - 4])),
    case("nothing", mark.spec("BRG-6-06"), "chunks.malformed", raw(1, lambda data: data[:1])),
    case("half a chunk 0", mark.spec("BRG-6-06"), "chunks.malformed", raw(0, lambda data: data[: CHUNK.size + 100])),
]


def _flipped(chunk: Chunk) -> bytes:
    data = bytearray(chunk["payload_bytes"])
    data[-1] ^= 1
    return bytes(data)


def _shorter(chunk: Chunk) -> Chunk:
    return chunk | {"chunk_length": chunk["chunk_length"] - 1, "payload_bytes": chunk["payload_bytes"][:-1]}


def _again_longer(chunks: list[Chunk]) -> list[Chunk | bytes]:
    """A slice, then the same with a byte of the next one."""
    cuts = (0, 1000), (1000, 1000), (2000, LENGTH - 2000)
    first, second, third = cut_otherwise(*cuts)(chunks)
    longer = cut_otherwise(cuts[0], (1000, 1001), cuts[2])(chunks)[1]
    return [first, second, longer, third]


def _first_over_second(chunks: list[Chunk]) -> list[Chunk | bytes]:
    """The lengths are right in sum: a byte is there twice, and the last one is missing."""
    at = FIRST_CHUNK_BYTES
    over, _, short = cut_otherwise((0, at + 1), (at, CHUNK_BYTES), (at + CHUNK_BYTES, 699))(chunks)
    return [chunks[1], over, short]


def _longer(chunk: Chunk) -> list[Chunk]:
    """The same slice with a byte of the one before."""
    data = b"!" + chunk["payload_bytes"]
    return [chunk | {"chunk_offset": chunk["chunk_offset"] - 1, "chunk_length": len(data), "payload_bytes": data}]


@pytest.mark.spec("BRG-5.3-01")
@pytest.mark.parametrize(("lie", "reason"), CHUNK_LIES)
def test_a_chunk_that_lies_completes_nothing(reception: Reception, lie: Lie, reason: str) -> None:
    """And is counted for what it is."""
    before = reception.drops()
    chunks = reception.sender.frame(noise(LENGTH))
    reception.refuses(*lie(chunks))
    assert reason in reception.drops() - before


@pytest.mark.spec("BRG-5.2-12")
@pytest.mark.parametrize("stated_length", [LENGTH - 1, LENGTH + 1], ids=["less", "more"])
def test_a_frame_whose_chunks_are_not_its_length_is_dropped(reception: Reception, stated_length: int) -> None:
    """Though header and chunks agree on the length."""
    header: dict[str, Any] = {"values_len_bytes": stated_length, "dims": (min(stated_length, LENGTH - 1),)}
    chunks = reception.sender.frame(noise(LENGTH), **header)
    before = reception.drops()
    reception.refuses(*(chunk | {"payload_length": stated_length} for chunk in chunks))
    assert (reception.drops() - before)["frames.inconsistent"] == 1


@pytest.mark.spec("BRG-5.2-25", "BRG-5.3-01")
@pytest.mark.parametrize(
    "lie",
    [again(1, payload_bytes=noise(CHUNK_BYTES)), moved(1, -1), one_with(1, chunk_count=4)],
    ids=["conflict", "overlap", "contradiction"],
)
def test_what_was_dropped_does_not_rise_again(reception: Reception, lie: Lie) -> None:
    """G18: the same seq, sent honestly right behind, is not published."""
    chunks = reception.sender.frame(noise(LENGTH))
    since = reception.now
    reception.send(*lie(chunks))
    reception.send(*chunks)
    assert reception.seqs(since)[-1:] != [chunks[0]["seq"]]
    last = reception.fence()
    assert reception.seqs(since) == [last]


# --- slot headers


HEADER_LIES = [
    case("a length of a byte less", mark.spec("BRG-6-04"), "frames.header", {"values_len_bytes": 23}),
    case("a length of a byte more", mark.spec("BRG-6-04"), "frames.header", {"values_len_bytes": 25}),
    case("a length of nothing", mark.spec("BRG-6-04"), "frames.header", {"values_len_bytes": 0}),
    case("a length of all ones", mark.spec("BRG-6-04"), "frames.header", {"values_len_bytes": NULL_32}),
    case("no dimensions", mark.spec("BRG-6-05"), "frames.header", {"ndims": 0}),
    case("nine dimensions", mark.spec("BRG-6-05"), "frames.header", {"ndims": 9}),
    case("255 dimensions", mark.spec("BRG-6-05"), "frames.header", {"ndims": 255}),
    case("dtype 0", mark.spec("BRG-6-05"), "frames.header", {"dtype": Dtype.UNKNOWN}),
    case("dtype 12", mark.spec("BRG-6-05"), "frames.header", {"dtype": 12}),
    case("dtype 15", mark.spec("BRG-6-05"), "frames.header", {"dtype": 15}),
    case("dtype -1", mark.spec("BRG-6-05"), "frames.header", {"dtype": -1}),
    case("dtype 32767", mark.spec("BRG-6-05"), "frames.header", {"dtype": 32_767}),
    case("a negative extent", mark.spec("BRG-6-05"), "frames.header", {"dims": (-2, 3)}),
    case("more elements than bytes", mark.spec("BRG-6-05"), "frames.header", {"dims": (2, 4)}),
    case(
        "more elements than 64 bits count",
        mark.spec("BRG-6-05"),
        "frames.header",
        {"dims": (2**31 - 1,) * 8, "ndims": 8},
    ),
    case("an extent of zero with bytes", mark.spec("BRG-6-05"), "frames.header", {"dims": (0, 3)}),
    case("no order", mark.spec("BRG-6-06"), "frames.header", {"major_order": MajorOrder.UNKNOWN}),
    case("a third order", mark.spec("BRG-6-06"), "frames.header", {"major_order": 3}),
    case("a negative stride", mark.spec("BRG-6-06"), "frames.header", {"strides": (-12, 4)}),
    case("rows that overlap", mark.spec("BRG-6-06"), "frames.header", {"strides": (4, 4)}),
    case("rows beyond the end", mark.spec("BRG-6-06"), "frames.header", {"strides": (1000, 4)}),
    case(
        "a third progress unit",
        mark.spec("BRG-6-06"),
        "frames.header",
        {"progress_unit": 3, "progress_stride_bytes": 12},
    ),
    case(
        "a row that is none", mark.spec("BRG-6-06"), "frames.header", {"progress_unit": 1, "progress_stride_bytes": 13}
    ),
    case("an embedded header of 191 bytes", mark.spec("BRG-6-07"), "frames.header", {"header_length": 191}),
    case("an embedded header of 193 bytes", mark.spec("BRG-6-07"), "frames.header", {"header_length": 193}),
    case("an embedded header of no bytes", mark.spec("BRG-6-07"), "frames.header", {"header_length": 0}),
    case("an embedded header of all ones", mark.spec("BRG-6-07"), "frames.header", {"header_length": NULL_32}),
    case("an embedded block of 183 bytes", mark.spec("BRG-6-07"), "frames.header", {"block_length": 183}),
    case("an embedded block of 185 bytes", mark.spec("BRG-6-07"), "frames.header", {"block_length": 185}),
    case("the template of a slot", mark.spec("BRG-6-07"), "frames.header", {"template_id": 51}),
    case("no template", mark.spec("BRG-6-07"), "frames.header", {"template_id": 0}),
    case("the schema of the driver", mark.spec("BRG-6-07"), "frames.header", {"schema_id": 901}),
    case("the schema of the bridge", mark.spec("BRG-6-07"), "frames.header", {"schema_id": 902}),
    case("version 0", mark.spec("BRG-6-07"), "frames.header", {"version": 0}),
    case("version 2", mark.spec("BRG-6-07"), "frames.header", {"version": 2}),
    case("an offset of a byte", mark.spec("BRG-6-08"), "frames.header", {"payload_offset": 1}),
    case("an offset of all ones", mark.spec("BRG-6-08"), "frames.header", {"payload_offset": NULL_32}),
    case("pool 99", mark.spec("BRG-6-09"), "frames.source_pool", {"pool_id": 99}),
    case("a pool that only the destination has", mark.spec("BRG-6-09"), "frames.source_pool", {"pool_id": 7}),
    case("a pool of all ones", mark.spec("BRG-6-09"), "frames.source_pool", {"pool_id": 65_535}),
    case("the seq before", mark.spec("BRG-6-18"), "frames.header", {"seq_commit": -1}),
    case("the seq behind", mark.spec("BRG-6-18"), "frames.header", {"seq_commit": 1}),
]


@pytest.mark.parametrize(("lie", "reason"), HEADER_LIES)
def test_a_header_that_lies_is_not_published(reception: Reception, lie: dict[str, Any], reason: str) -> None:
    """Neither in a frame of one chunk nor in the first of three."""
    small = np.arange(6, dtype=np.float32).reshape(2, 3)
    before = reception.drops()
    (chunk,) = reception.sender.frame(small, **_header(lie, reception.sender.next_seq))
    reception.refuses(chunk)
    cuts = [(0, 10), (10, 10), (20, 4)]
    chunks = reception.sender.frame(small, cuts=cuts, **_header(lie, reception.sender.next_seq))
    reception.refuses(*reversed(chunks))
    assert (reception.drops() - before)[reason] == 2


def _header(lie: dict[str, Any], seq: int) -> dict[str, Any]:
    """A commit word is named by its distance."""
    return lie | {"seq_commit": committed(seq + lie["seq_commit"])} if "seq_commit" in lie else lie


@pytest.mark.spec("BRG-6-03")
def test_a_refused_frame_leaves_no_trace_in_memory(reception: Reception) -> None:
    """Of an epoch, a header or a length that is not so, nothing is written: not a byte of the local regions changes."""
    epoch = reception.deliver(b"before").descriptor.epoch
    files = reception.files(epoch)
    sender = reception.sender
    before = reception.drops()
    reception.send(*sender.frame(noise(LENGTH), epoch=sender.epoch - 1))
    reception.send(*sender.frame(noise(LENGTH), pool_id=99))
    reception.send(*sender.frame(noise(LENGTH), values_len_bytes=LENGTH - 1))
    reception.send(*sender.frame(noise(5000)))
    reception.send(*(chunk | {"stream_id": 1} for chunk in sender.frame(noise(LENGTH))))
    (last,) = sender.frame(b"the last of them")
    reception.send(last | {"stream_id": 1})
    reception.wait_until(lambda: (reception.drops() - before)["chunks.unknown_stream"] >= 4, "the last is dropped")
    assert reception.files(epoch) == files


# --- what is no chunk


@pytest.mark.spec("BRG-10-24", "BRG-3-04")
def test_messages_are_distinguished_by_their_schema(reception: Reception) -> None:
    """Template 1 is an announce, a chunk or an attach, by its schema; each counts only where it belongs."""
    sender, control = reception.sender, reception.link.control
    (chunk,) = sender.frame(b"not here")
    attach = attach_request(reception.dest_stream_id, driver.Role.PRODUCER)
    strangers: list[Message | bytes] = [
        packed_chunk(**chunk),
        attach.encode(),
        FrameDescriptor(stream_id=sender.stream_id, epoch=sender.epoch, seq=1),
        struct.pack("<4H", 35, 1, 999, 1) + bytes(60),
        struct.pack("<4H", 0, 0, 0, 0),
        b"",
        b"\xff" * 200,
    ]
    since = reception.now
    for said in strangers:
        if said != b"":
            sender.send(said, control)
    reception.refuses(
        *(said if isinstance(said, bytes) else said.encode() for said in strangers[1:] if said != b""),
        sender.announced(epoch=sender.epoch + 5).encode(),
    )
    sender.announce()
    assert len(reception.deliver(b"still here").payload) == 10
    assert chunk["seq"] not in reception.seqs(since)
    assert not reception.consumer.received(driver.ShmAttachRequest, since, correlation_id=attach.correlation_id)


@pytest.mark.spec("BRG-5.2-30", "BRG-5.2-31", "BRG-6-06")
def test_noise_is_neither_published_nor_kept(reception: Reception) -> None:
    """Thousands of datagrams that are almost chunks and announces: no crash, no frame, no memory."""
    dice = random.Random(20)
    sender = reception.sender
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    announce = sender.announced().encode()
    since = reception.now
    for _ in range(400):
        chunks = [packed_chunk(**chunk) for chunk in sender.frame(noise(LENGTH))[:2]]  # never whole
        for data in chunks:
            sender.send(_spoilt(data, dice))
            sender.send(_spoilt(data, dice))
            sender.send(dice.randbytes(dice.randrange(1, 400)))
        sender.send(_spoilt(announce, dice, range(8)), reception.link.control)  # never one of our source
    first = sender.next_seq
    reception.wait_through(announces=True)  # an epoch from the future may have been among it
    assert min(reception.seqs(since)) >= first
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 64 * 1024  # KiB


def _spoilt(data: bytes, dice: random.Random, where: range | None = None) -> bytes:
    """Some bits flipped, or an end missing, or both."""
    spoilt = bytearray(data)
    for _ in range(dice.randrange(1, 4)):
        at = dice.choice(where) if where else dice.randrange(min(len(spoilt), CHUNK.size + 260))
        spoilt[at] ^= 1 << dice.randrange(8)
    if dice.random() < 0.2:
        del spoilt[dice.randrange(1, len(spoilt)) :]
    return bytes(spoilt)


@pytest.mark.spec("BRG-5.3a-03", "BRG-5.2-30")
def test_frames_that_are_only_begun_take_a_bounded_room(shared_media_driver: aeron.MediaDriver, shm_dir: Path) -> None:
    """G21: two hundred frames of 2 MiB begin, and at most three are held."""
    pools = {1: 2 * MIB}
    with Host(shm_dir, shared_media_driver.aeron_dir, pools=pools, nslots=4) as host:
        sender = {"pools": {3: 2 * MIB}}
        with Reception(host, sender=sender, max_inflight_frames=3, assembly_timeout_ms=60_000) as reception:
            reception.meet()
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            payload = noise(2 * MIB)
            before, taken = reception.drops(), reception.chunks_received
            for _ in range(200):
                begun = reception.sender.frame(payload, cuts=[(0, 1000), (1000, 2 * MIB - 1000)])[0]
                reception.send(begun | {"chunk_count": 1700})
            reception.wait_until(lambda: (reception.drops() - before)["frames.inflight"] == 197, "all were looked at")
            assert reception.chunks_received == taken + 200
            assert reception.inflight_frames == 3
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 48 * 1024  # KiB
