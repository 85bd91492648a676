# SPDX-License-Identifier: Apache-2.0
"""Frames put together from chunks: every order, repetition, loss and lie, without IO. Bridge §5, §6, §8; G17-G26."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorpool._core import crc32c
from tensorpool.bridge.assembly import SourceEpoch, SourcePool, Verdict
from tests.bridge.frames import (
    EPOCH,
    FOREVER_NS,
    POOLS,
    STREAM,
    TIMEOUT_NS,
    Receiving,
    Ring,
    chunk,
    chunks_of,
    header_of,
)
from tests.levels import SOAK

PAYLOAD = bytes(range(256)) * 8  # 2048 bytes: pool 2


def edited(message: bytes, offset: int, layout: str, value: int) -> bytes:
    out = bytearray(message)
    struct.pack_into("<" + layout, out, offset, value)
    return bytes(out)


# --- frames that get through


def test_a_frame_is_published_whole_under_its_own_seq() -> None:
    """Header, payload and seq are the source's; pool and slot are ours; it was written straight to its slot."""
    receiving = Receiving(pools=((9, 4096),))
    receiving.take(*chunks_of(41, PAYLOAD, [500, 700]))
    assert receiving.ring.payload(41) == PAYLOAD
    found = receiving.ring.reader.read(41)
    assert (found.seq, found.timestamp_ns, found.meta_version) == (41, 5, 3)  # type: ignore[union-attr]
    image, source = receiving.ring.image(41), header_of(41, PAYLOAD)
    assert struct.unpack_from("<IH", image, 12) == (41 % 8, 9)
    assert image[18:] == source[18:]
    assert image[:12] == source[:12]
    assert receiving.assembler.published == 41
    assert receiving.counts == {
        "frames_received": 1,
        "bytes_received": len(PAYLOAD),
        "chunks_received": 3,
        "frames_in_place": 1,
        "assembly_ns": receiving.counts["assembly_ns"],
    }


@given(st.permutations(range(5)))
def test_chunks_are_assembled_in_any_order(order: list[int]) -> None:
    receiving = Receiving()
    chunks = chunks_of(3, PAYLOAD, [400, 300, 500, 100])
    for index in order[:-1]:
        receiving.take(chunks[index])
        assert receiving.ring.payload(3) is None
    receiving.take(chunks[order[-1]])
    assert receiving.ring.payload(3) == PAYLOAD
    assert receiving.frames_dropped == {}
    assert receiving.assembler.buffered_bytes == receiving.assembler.inflight == 0


def test_an_empty_frame_is_one_chunk() -> None:
    receiving = Receiving()
    receiving.take(*chunks_of(1, b""))
    assert receiving.ring.payload(1) == b""


def test_identical_repetitions_are_ignored() -> None:
    receiving = Receiving()
    first, second, third = chunks_of(1, PAYLOAD, [1000, 500])
    receiving.take(first, first, third, third, first, second, second)
    assert receiving.ring.payload(1) == PAYLOAD
    assert receiving.counts["chunks_duplicate"] == 3
    assert receiving.chunks_dropped == {"late": 1}  # of a frame that is published already


def test_a_frame_that_is_overtaken_is_dropped() -> None:
    """G19: a later frame that is whole is published at once; seqs never go back."""
    receiving = Receiving()
    first, second = chunks_of(1, PAYLOAD, [1000])
    receiving.take(first, *chunks_of(2, PAYLOAD[::-1], [1000]), second)
    assert receiving.ring.payload(2) == PAYLOAD[::-1]
    assert receiving.ring.payload(1) is None
    assert receiving.frames_dropped == {"out_of_order": 1}
    assert receiving.counts["frames_in_place"] == 1


def test_an_earlier_frame_is_published_while_a_later_one_is_in_its_slot() -> None:
    receiving = Receiving()
    early, late = chunks_of(2, PAYLOAD, [1000]), chunks_of(3, PAYLOAD[::-1], [1000])
    receiving.take(early[1], late[0], early[0], late[1])
    assert (receiving.ring.payload(2), receiving.ring.payload(3)) == (PAYLOAD, PAYLOAD[::-1])
    assert receiving.frames_dropped == {}


def test_of_two_frames_with_one_slot_the_later_one_has_it() -> None:
    receiving = Receiving()
    early, late = chunks_of(2, PAYLOAD, [1000]), chunks_of(2 + 8, PAYLOAD[::-1], [1000])
    receiving.take(early[1], late[0], early[0], late[1])
    assert receiving.ring.payload(10) == PAYLOAD[::-1]
    assert receiving.frames_dropped == {"out_of_order": 1}


def test_frames_that_never_came_are_counted() -> None:
    receiving = Receiving()
    receiving.take(*chunks_of(1, b"a"), *chunks_of(5, PAYLOAD, [1000])[:1], *chunks_of(9, b"b"))
    assert receiving.counts["frames_unseen"] == 6  # 2, 3, 4, 6, 7, 8
    assert receiving.frames_dropped == {"out_of_order": 1}


# --- chunks that are no use


@pytest.mark.parametrize(
    ("offset", "layout", "value", "reason"),
    [
        (0, "H", 40, "malformed"),  # block length
        (6, "H", 2, "malformed"),  # version
        (2, "H", 2, "foreign"),  # template
        (4, "H", 900, "foreign"),  # schema
        (8, "I", STREAM + 1, "unknown_stream"),
        (12, "Q", EPOCH - 1, "epoch"),
        (12, "Q", EPOCH + 1, "epoch"),
        (20, "Q", 2**63, "malformed"),  # seq
        (28, "I", 3, "chunk_index"),
        (28, "I", 1, "header"),  # a later chunk with a header
        (32, "I", 0, "chunk_count"),
        (32, "I", 65_536, "chunk_count"),
        (40, "I", 999, "length"),
        (44, "I", 2**30 + 1, "malformed"),
        (48, "B", 0, "header"),
        (48, "B", 2, "malformed"),
        (49, "I", 255, "malformed"),
        (49, "I", 2**32 - 1, "malformed"),
        (53 + 256, "I", 2**30, "malformed"),  # payloadBytes
    ],
)
def test_a_chunk_with_a_false_field_is_dropped(offset: int, layout: str, value: int, reason: str) -> None:
    receiving = Receiving()
    first, *rest = chunks_of(1, PAYLOAD, [1000, 500])
    receiving.take(edited(first, offset, layout, value), *rest)
    receiving.wait()
    assert receiving.chunks_dropped == {reason: 1} | ({"epoch": 3} if value == EPOCH + 1 else {})
    assert receiving.assembler.published is None


@pytest.mark.parametrize("length", [0, 1, 7, 8, 56, 57, 300])
def test_a_short_datagram_is_malformed(length: int) -> None:
    receiving = Receiving()
    receiving.take(chunks_of(1, PAYLOAD)[0][:length])
    assert receiving.chunks_dropped == {"malformed": 1}


def test_a_header_of_another_length_is_dropped() -> None:
    receiving = Receiving()
    header = header_of(1, b"x")
    receiving.take(*chunks_of(1, b"x", header_bytes=header[:255]), *chunks_of(1, b"x", header_bytes=b""))
    assert receiving.chunks_dropped == {"header": 2}


def test_chunks_above_the_configured_size_are_dropped() -> None:
    receiving = Receiving(max_chunk_bytes=999)
    receiving.take(*chunks_of(1, PAYLOAD, [1000]))
    assert receiving.chunks_dropped == {"chunk_size": 2}


# --- frames that are no use


@pytest.mark.parametrize(
    ("offset", "layout", "value"),
    [
        (0, "Q", 2 << 1 | 1),  # seq_commit of another seq
        (8, "I", 2047),  # values_len_bytes
        (18, "I", 64),  # payload_offset
        (60, "I", 191),
        (64, "H", 183),
        (66, "H", 53),
        (68, "H", 901),
        (70, "H", 2),
        (72, "h", 0),
        (72, "h", 12),
        (74, "h", 3),
        (76, "B", 0),
        (76, "B", 9),
        (83, "i", -1),
        (83, "i", 0),  # a dimension of 0 with a payload
        (83, "i", 2049),  # more elements than bytes
        (115, "i", -4),
    ],
)
def test_a_malformed_header_drops_the_frame(offset: int, layout: str, value: int) -> None:
    receiving = Receiving()
    header = edited(header_of(1, PAYLOAD), offset, layout, value)
    chunks = chunks_of(1, PAYLOAD, [1000], header=header)
    receiving.take(*chunks)
    assert receiving.frames_dropped == {"header": 1}
    receiving.take(*reversed(chunks_of(2, PAYLOAD, [1000], header=edited(header_of(2, PAYLOAD), 18, "I", 1))))
    assert receiving.frames_dropped == {"header": 2}  # also when chunk 0 is not the first
    assert receiving.assembler.published is None
    receiving.take(*chunks_of(3, PAYLOAD, [1000]))
    assert receiving.assembler.published == 3


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"chunk_count": 4}, "inconsistent"),
        ({"payload_length": 2049}, "inconsistent"),
        ({"chunk_offset": 1100}, "inconsistent"),  # beyond the end
        ({"chunk_offset": 999}, "conflict"),  # overlaps
        ({"chunk_length": 0, "payload_bytes": b""}, "inconsistent"),
        ({"chunk_length": 1000, "payload_bytes": bytes(1000)}, "inconsistent"),  # one short: the sum is wrong
    ],
)
def test_chunks_that_contradict_each_other_drop_the_frame(fields: dict[str, Any], reason: str) -> None:
    receiving = Receiving()
    first, second = chunks_of(1, PAYLOAD, [1000])
    liar = chunks_of(1, PAYLOAD, [1000], **fields)[1]
    receiving.take(first, liar, second)
    assert receiving.frames_dropped == {reason: 1}
    receiving.take(first, second)  # G18: it does not rise again
    assert receiving.assembler.published is None
    assert receiving.assembler.inflight == 0
    receiving.wait()
    receiving.take(first, second)
    assert receiving.assembler.published == 1


def test_the_same_offset_with_other_bytes_is_a_conflict() -> None:
    receiving = Receiving()
    first, second, third = chunks_of(1, PAYLOAD, [1000, 500])
    forged = chunks_of(1, PAYLOAD, [1000, 500], payload_bytes=bytes(500))[1]
    receiving.take(first, second, forged, third)
    receiving.take(*chunks_of(2, PAYLOAD, [1000])[:1])
    receiving.take(*chunks_of(2, PAYLOAD, [1000], header=edited(header_of(2, PAYLOAD), 22, "Q", 6))[:1])
    third_frame = chunks_of(3, PAYLOAD, [1000, 500])
    receiving.take(
        third_frame[2], chunks_of(3, PAYLOAD, [1000, 500], chunk_offset=1600, payload_bytes=b"", chunk_length=0)[2]
    )
    assert receiving.frames_dropped == {"conflict": 2, "inconsistent": 1}
    assert receiving.assembler.published is None


@pytest.mark.parametrize(
    ("before", "fields"),
    [
        ([0, 1], {"chunk_length": 400, "payload_bytes": PAYLOAD[1000:1400]}),  # the same chunk, but shorter
        ([2, 1], {"chunk_length": 400, "payload_bytes": PAYLOAD[1000:1400]}),
        ([2, 1], {"chunk_offset": 1001, "chunk_length": 400, "payload_bytes": PAYLOAD[1001:1401]}),
        ([2], {"chunk_length": 600, "payload_bytes": PAYLOAD[1000:1600]}),  # into the one behind
        ([2, 0], {"chunk_length": 600, "payload_bytes": PAYLOAD[1000:1600]}),
        ([0], {"chunk_offset": 999, "chunk_length": 501, "payload_bytes": PAYLOAD[999:1500]}),  # into the one before
    ],
)
def test_slices_that_overlap_are_a_conflict_though_their_bytes_agree(before: list[int], fields: dict[str, Any]) -> None:
    receiving = Receiving()
    chunks = chunks_of(1, PAYLOAD, [1000, 500])
    receiving.take(*(chunks[index] for index in before), chunks_of(1, PAYLOAD, [1000, 500], **fields)[1])
    assert receiving.frames_dropped == {"conflict": 1}
    assert receiving.assembler.published is None


def test_a_chunk_0_elsewhere_makes_the_frame_invalid() -> None:
    receiving = Receiving()
    receiving.take(chunks_of(1, PAYLOAD, [1000], chunk_offset=1)[0], *chunks_of(1, PAYLOAD, [1000]))
    assert receiving.frames_dropped == {"inconsistent": 1}
    assert receiving.assembler.published is None


@pytest.mark.parametrize(
    ("limits", "payload", "header", "reason"),
    [
        ({"max_payload_bytes": 2047}, PAYLOAD, (), "too_large"),
        ({"pools": ((1, 1024),)}, PAYLOAD, (), "no_pool"),
        ({"is_bound": False}, PAYLOAD, (), "no_lease"),
        ({}, PAYLOAD, (16, "H", 99), "source_pool"),
        ({}, PAYLOAD, (16, "H", 1), "source_stride"),
        ({}, bytes(16_385), None, "source_stride"),
    ],
)
def test_what_cannot_be_published_is_not_assembled(
    limits: dict[str, Any], payload: bytes, header: tuple[int, str, int] | None, reason: str
) -> None:
    """Before anything is allocated, and counted once."""
    receiving = Receiving(**limits)
    image = bytes(256) if header is None else header_of(1, payload)
    if header:
        image = edited(image, *header)
    receiving.take(*chunks_of(1, payload, [1000], header=image))
    assert receiving.frames_dropped == {reason: 1}
    assert receiving.assembler.buffered_bytes == receiving.assembler.inflight == 0
    assert receiving.assembler.published is None


def test_a_frame_is_not_committed_after_the_end_of_the_lease() -> None:
    receiving = Receiving()
    receiving.assembler.bind(receiving.ring.writer, 1)
    receiving.take(*chunks_of(1, PAYLOAD, [1000]))
    assert receiving.frames_dropped == {"no_lease": 1}
    assert receiving.ring.payload(1) is None


def test_another_ring_gets_whole_frames_only() -> None:
    """What was in the slot of the ring before is lost; what was in a buffer goes on."""
    receiving, second = Receiving(), Ring()
    in_place, buffered = chunks_of(1, PAYLOAD, [1000]), chunks_of(2, PAYLOAD, [1000])
    receiving.take(in_place[0], buffered[1])
    receiving.assembler.bind(second.writer, FOREVER_NS)
    receiving.take(in_place[1], buffered[0])
    assert receiving.frames_dropped == {"no_lease": 1}
    assert second.payload(2) == PAYLOAD
    assert receiving.ring.payload(1) is receiving.ring.payload(2) is None


def test_a_paused_assembler_publishes_nothing() -> None:
    receiving = Receiving()
    receiving.take(chunks_of(1, PAYLOAD, [1000])[0])
    receiving.assembler.set_paused(True)
    receiving.take(chunks_of(1, PAYLOAD, [1000])[1], *chunks_of(2, PAYLOAD, [1000]))
    assert receiving.frames_dropped == {"paused": 2}
    receiving.assembler.set_paused(False)
    receiving.take(*chunks_of(3, PAYLOAD, [1000]))
    assert receiving.assembler.published == 3


# --- time and memory


def test_a_frame_that_takes_too_long_is_dropped_and_its_memory_given_back() -> None:
    receiving = Receiving()
    first, second = chunks_of(1, PAYLOAD, [1000])
    receiving.take(second)
    assert receiving.assembler.buffered_bytes == len(PAYLOAD)
    receiving.wait(TIMEOUT_NS - 1)
    assert receiving.assembler.inflight == 1
    receiving.wait(1)
    assert receiving.frames_dropped == {"timeout": 1}
    assert receiving.assembler.buffered_bytes == receiving.assembler.inflight == 0
    receiving.take(first)
    assert receiving.ring.payload(1) is None
    assert receiving.chunks_dropped == {"dropped_frame": 1}


def test_a_frame_is_counted_once_though_its_rest_comes_when_it_is_forgotten() -> None:
    receiving = Receiving()
    first, second = chunks_of(1, PAYLOAD, [1000])
    receiving.take(*chunks_of(0, b"before"), first)
    receiving.wait()
    receiving.wait()
    receiving.take(second, *chunks_of(2, PAYLOAD))
    assert receiving.frames_dropped == {"timeout": 1}
    assert (receiving.counts["frames_received"], receiving.counts.get("frames_unseen", 0)) == (2, 0)


def test_memory_of_a_large_frame_is_given_back() -> None:
    """A frame whose first chunk comes late lies in a buffer; what malloc frees of this size it would keep."""
    nbytes = 16 << 20
    receiving = Receiving(pools=((1, nbytes),))
    receiving.assembler.set_source(EPOCH, [(1, nbytes)])

    def own_bytes() -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))

    before = own_bytes()
    fields: dict[str, Any] = {
        "stream_id": STREAM,
        "epoch": EPOCH,
        "chunk_index": 1,
        "chunk_count": 3,
        "chunk_offset": 1000,
    }
    fields |= {"chunk_length": 5, "payload_length": nbytes, "header_included": 0, "header_bytes": b""}
    for seq in range(4):
        receiving.take(chunk(**fields, seq=seq, payload_bytes=b"bytes"))
        assert receiving.assembler.buffered_bytes == nbytes
        assert own_bytes() >= before + nbytes
        receiving.wait()
    assert receiving.assembler.buffered_bytes == 0
    assert own_bytes() < before + nbytes // 2


@given(st.lists(st.integers(0, 500), max_size=40))
def test_memory_is_bounded_whatever_begins(seqs: list[int]) -> None:
    receiving = Receiving(max_inflight=3)
    for seq in seqs:
        receiving.take(chunks_of(seq, PAYLOAD, [1000])[1])
        assert receiving.assembler.inflight <= 3
        assert receiving.assembler.buffered_bytes <= 3 * len(PAYLOAD)
    lost = receiving.frames_dropped.get("inflight", 0)
    assert receiving.assembler.inflight + lost == len(set(seqs))


# --- epochs


def test_nothing_is_taken_before_an_announce() -> None:
    receiving = Receiving(is_announced=False)
    receiving.take(*chunks_of(1, PAYLOAD, [1000]))
    assert receiving.chunks_dropped == {"no_announce": 2}
    assert receiving.frames_dropped == {"no_announce": 1}
    receiving.assembler.set_source(EPOCH, POOLS)
    receiving.take(*chunks_of(1, PAYLOAD, [1000]))
    assert receiving.assembler.published == 1


def test_an_epoch_change_drops_what_is_in_flight_and_begins_anew() -> None:
    receiving = Receiving()
    receiving.take(*chunks_of(50, PAYLOAD), chunks_of(51, PAYLOAD, [1000])[0])
    receiving.assembler.set_source(EPOCH + 1, POOLS)
    assert receiving.frames_dropped == {"epoch": 1}
    receiving.take(chunks_of(51, PAYLOAD, [1000])[1], *chunks_of(0, PAYLOAD, epoch=EPOCH))
    assert receiving.assembler.published is None
    receiving.assembler.bind((ring := Ring()).writer, FOREVER_NS)
    receiving.take(*chunks_of(0, PAYLOAD, epoch=EPOCH + 1))
    assert ring.payload(0) == PAYLOAD


def test_a_chunk_of_a_higher_epoch_ends_the_one_before() -> None:
    """§8: although its own announce has not come; an announce of the old one does not bring it back at once."""
    receiving = Receiving()
    first, second = chunks_of(1, PAYLOAD, [1000])
    receiving.take(first, *chunks_of(0, b"x", epoch=EPOCH + 1), second)
    assert receiving.frames_dropped == {"epoch": 2}
    assert receiving.chunks_dropped == {"epoch": 2}
    assert (receiving.assembler.newest_epoch, receiving.assembler.last_chunk_ns) == (EPOCH + 1, receiving.now_ns)


POOL = [SourcePool(1, 1024)]


def test_a_lower_epoch_is_believed_after_a_long_silence_only() -> None:
    """G17."""
    source = SourceEpoch(announce_period_ns=100)
    assert source.on_announce(5, POOL, 0) is Verdict.ADOPTED
    assert source.on_announce(4, POOL, 299) is Verdict.STALE
    source.on_chunks(5, 200)
    assert source.on_announce(4, POOL, 499) is Verdict.STALE
    assert source.on_announce(4, POOL, 500) is Verdict.ADOPTED
    assert source.on_announce(4, POOL, 501) is Verdict.REFRESHED
    assert source.on_announce(6, POOL, 502) is Verdict.ADOPTED


def test_an_epoch_that_chunks_have_left_is_stale_until_the_higher_one_is_silent() -> None:
    source = SourceEpoch(announce_period_ns=100)
    source.on_announce(5, POOL, 0)
    source.on_chunks(9, 50)
    assert source.on_announce(5, POOL, 349) is Verdict.STALE
    assert source.on_announce(7, POOL, 349) is Verdict.STALE
    assert source.on_announce(5, POOL, 350) is Verdict.REFRESHED


@given(st.lists(st.tuples(st.sampled_from(["announce", "chunk"]), st.integers(1, 6), st.integers(0, 400)), max_size=30))
def test_the_epoch_only_goes_back_after_silence(events: list[tuple[str, int, int]]) -> None:
    source, now_ns, newest, chunk_ns = SourceEpoch(announce_period_ns=100), 0, 0, 0
    for kind, epoch, later_ns in events:
        now_ns += later_ns
        if kind == "chunk" and source.epoch is not None:
            if epoch >= newest:
                newest, chunk_ns = epoch, now_ns
            source.on_chunks(newest, chunk_ns)
        elif kind == "announce":
            verdict = source.on_announce(epoch, POOL, now_ns)
            may_go = newest == 0 or epoch >= newest or now_ns - chunk_ns >= 300
            assert (verdict is not Verdict.STALE) == may_go
            if may_go:
                newest, chunk_ns = epoch, now_ns
                assert source.epoch == epoch


# --- the private checksum


def test_a_checked_frame_waits_for_its_checksum() -> None:
    receiving = Receiving(needs_digest=True)
    good = [crc32c(PAYLOAD, crc32c(header_of(seq, PAYLOAD))) for seq in (1, 2, 3)]
    receiving.take_digest(1, PAYLOAD, crc32c=good[0])
    receiving.take(*chunks_of(1, PAYLOAD, [1000]))
    assert receiving.assembler.published == 1
    receiving.take(*chunks_of(2, PAYLOAD, [1000]))
    assert receiving.assembler.published == 1
    receiving.take_digest(2, PAYLOAD, crc32c=good[1])
    assert receiving.assembler.published == 2
    receiving.take(*chunks_of(3, PAYLOAD, [1000]))
    receiving.take_digest(3, PAYLOAD, crc32c=good[2] ^ 1)
    receiving.take(*chunks_of(4, PAYLOAD, [1000]))
    receiving.wait()
    assert receiving.frames_dropped == {"crc": 2}
    assert receiving.assembler.published == 2


# --- everything at once


frames = st.lists(st.tuples(st.integers(0, 3000), st.lists(st.integers(1, 900), max_size=5)), min_size=1, max_size=6)


@settings(max_examples=150 * SOAK)
@given(frames, st.randoms(use_true_random=False), st.integers(0, 12), st.floats(0, 0.5), st.floats(0, 0.3))
def test_every_frame_is_published_whole_or_counted_once(
    sizes: list[tuple[int, list[int]]], random: Any, shuffle: int, repeat: float, loss: float
) -> None:
    """Reordered, repeated and lost chunks: what is published is what was sent, in order; the rest has one reason."""
    receiving = Receiving(max_inflight=3)
    sent = {seq: random.randbytes(size) for seq, (size, _) in enumerate(sizes)}
    stream = [message for seq, payload in sent.items() for message in chunks_of(seq, payload, sizes[seq][1])]
    stream = [message for message in stream for _ in range(1 + (random.random() < repeat)) if random.random() >= loss]
    stream = [stream[i] for i in sorted(range(len(stream)), key=lambda i: i + random.random() * shuffle)]
    published: list[int] = []
    for message in stream:
        receiving.take(message)
        last = receiving.assembler.published
        if last is not None and last not in published:
            published.append(last)
            assert receiving.ring.payload(last) == sent[last]
    receiving.wait()
    assert published == sorted(published)
    begun = {struct.unpack_from("<Q", message, 20)[0] for message in stream}
    assert receiving.counts.get("frames_received", 0) == len(published)
    late = begun - set(published) if published else set()
    assert len(published) + sum(receiving.frames_dropped.values()) <= len(begun)
    assert len(published) + sum(receiving.frames_dropped.values()) >= len(begun) - len(
        {seq for seq in late if seq < max(published)}
    )
    assert receiving.assembler.inflight == receiving.assembler.buffered_bytes == 0


@settings(max_examples=200 * SOAK)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 400), st.integers(0, 255)), max_size=25))
def test_no_forged_byte_is_published(edits: list[tuple[int, int, int, int]]) -> None:
    """Fuzzed datagrams: whatever they say, nothing crashes, and what is published is a valid frame."""
    receiving = Receiving(max_inflight=2)
    for seq, index, at, value in edits:
        message = bytearray(chunks_of(seq, PAYLOAD, [1000])[index])
        message[at % len(message)] = value
        receiving.take(bytes(message))
        assert receiving.assembler.buffered_bytes <= 2 * 16_384
    newest = receiving.assembler.published
    if newest is not None:
        assert receiving.ring.payload(newest) is not None


def test_two_streams_share_a_router() -> None:
    receiving = Receiving()
    with pytest.raises(ValueError, match="1000"):
        receiving.router.add(receiving.assembler)
    receiving.router.remove(STREAM)
    receiving.take(*chunks_of(1, b"x"))
    assert receiving.chunks_dropped == {"unknown_stream": 1}


def test_a_chunk_is_what_the_schema_says() -> None:
    """The golden head: block 41, template 1, schema 902, version 1."""
    assert chunks_of(1, b"")[0][:8] == struct.pack("<HHHH", 41, 1, 902, 1)
    assert (
        len(
            chunk(
                **dict.fromkeys(("stream_id", "epoch", "seq", "chunk_index"), 0),
                chunk_count=1,
                chunk_offset=0,
                chunk_length=0,
                payload_length=0,
                header_included=0,
                header_bytes=b"",
                payload_bytes=b"",
            )
        )
        == 57
    )
