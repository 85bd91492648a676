# SPDX-License-Identifier: Apache-2.0
"""What a bridge receiver makes of frames: the same bytes in local memory, whatever way they came.

Bridge §2.2, §5.2, §5.3, §5.3a, §6, §7; decisions G18, G19, G21, G24-G26, G28. The other end is a test sender that has
no memory behind it; what is published is read from files, by a consumer made of the codec.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tensorpool as tp
from tensorpool.wire.control import FrameDescriptor, ProgressUnit
from tests.support.bridge_rig import Host, Reception
from tests.support.bridge_sender import (
    CHUNK_BYTES,
    FIRST_CHUNK_BYTES,
    BridgeSender,
    Chunk,
    Link,
    encoded,
    noise,
    packed_chunk,
)
from tests.support.driver_process import NSLOTS, POOLS
from tests.support.region_bytes import committed, in_progress
from tests.support.wire_consumer import MappedStream

LARGEST = max(POOLS.values())
THREE_CHUNKS = FIRST_CHUNK_BYTES + 2 * CHUNK_BYTES


@pytest.fixture(scope="module")
def reception(host: Host, link: Link) -> Iterator[Reception]:
    """A bridge that has received a frame."""
    with Reception(host, link=link.again(), max_inflight_frames=256) as reception:
        yield reception.meet()


# --- the same frame


def plain(length: int) -> NDArray[Any]:
    return np.frombuffer(noise(length), np.uint8)


FRAMES = {
    "one byte": plain(1),
    "floats": np.arange(6, dtype=np.float32).reshape(2, 3),
    "columns first": np.asfortranarray(np.arange(35, dtype=np.int16).reshape(5, 7)),
    "eight dimensions": np.arange(256, dtype=np.uint64).reshape((2,) * 8),
    "booleans": np.array([True, False, True]),
    "the smallest pool, full": plain(256),
    "a byte more": plain(257),
    "one chunk, full": plain(FIRST_CHUNK_BYTES),
    "two chunks, the second of a byte": plain(FIRST_CHUNK_BYTES + 1),
    "two chunks, full": plain(FIRST_CHUNK_BYTES + CHUNK_BYTES),
    "the largest pool, full": plain(LARGEST),
}


@pytest.mark.spec("BRG-2-02", "BRG-6-11", "BRG-6-13", "BRG-6-14", "BRG-6-15", "BRG-7-01")
@pytest.mark.parametrize("array", FRAMES.values(), ids=FRAMES)
def test_a_frame_arrives_as_it_was_sent(reception: Reception, array: NDArray[Any]) -> None:
    """Payload, seq and every field of the slot but its place, which is the local ring's; described where all are."""
    (first, *_) = chunks = reception.sender.frame(array, timestamp_ns=123_456_789, meta_version=5)
    arrived = reception.accepts(*chunks)
    sent, slot, seq = first["header_bytes"], arrived.slot, first["seq"]
    assert arrived.payload == array.tobytes("A")
    assert slot.seq_commit == committed(seq)
    assert slot.pool_id == reception.host.pool_for(array.nbytes)
    assert slot.payload_slot == seq & (NSLOTS - 1)
    assert slot.data[8:12] == sent[8:12]  # values_len_bytes
    assert slot.data[18:] == sent[18:]  # everything behind pool_id: offset, times, version, tensor header
    assert slot.timestamp_ns == 123_456_789
    assert slot.meta_version == 5
    assert arrived.descriptor.seq == seq
    assert arrived.descriptor.epoch == reception.mapped(arrived.descriptor.epoch).epoch
    assert arrived.descriptor.trace_id is None
    assert arrived.endpoint_stream_id == reception.host.place.endpoints.descriptor[1]


@pytest.mark.spec("BRG-6-14", "BRG-6-15")
def test_what_a_header_declares_survives_and_where_it_lay_does_not(reception: Reception) -> None:
    """Strides and progress units are the tensor's; pool and slot are the source's and mean nothing here."""
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    declared: dict[str, Any] = {
        "strides": (16, 4),
        "progress_unit": ProgressUnit.ROWS,
        "progress_stride_bytes": 16,
        "payload_slot": 2**32 - 1,
        "pool_id": 9,
    }
    (chunk,) = reception.sender.frame(array, **declared)
    slot = reception.accepts(chunk).slot
    assert slot.strides[:2] == (16, 4)
    assert (slot.progress_unit, slot.progress_stride_bytes) == (ProgressUnit.ROWS, 16)
    assert (slot.pool_id, slot.payload_slot) == (1, chunk["seq"] & (NSLOTS - 1))


@pytest.mark.spec("BRG-6-18")
def test_the_commit_bit_of_a_source_says_nothing(reception: Reception) -> None:
    """G24: only the seq of the source's commit word counts; the local word is committed."""
    seq = reception.sender.next_seq
    (chunk,) = reception.sender.frame(b"bit", seq_commit=in_progress(seq))
    assert reception.accepts(chunk).slot.seq_commit == committed(seq)


@pytest.mark.spec("BRG-6-14")
def test_seqs_are_the_sources_with_their_gaps(reception: Reception) -> None:
    """Jumps stay jumps, also far beyond the ring; one beyond what is possible when nothing else comes."""
    last = reception.sender.next_seq
    for seq in (last + 1, last + 5, last + 1000):
        arrived = reception.deliver(b"jump", seq=seq)
        assert (arrived.slot.seq, arrived.descriptor.seq) == (seq, seq)
    before = reception.drops()
    reception.sender.next_seq = 2**40
    arrived = reception.wait_through()
    assert arrived.slot.seq == arrived.descriptor.seq > 2**40
    assert (reception.drops() - before)["frames.seq_jump"] > 0


@pytest.mark.spec("BRG-5.2-01", "BRG-6-13")
def test_an_empty_frame_is_one_chunk_with_nothing_in_it(reception: Reception) -> None:
    """G26."""
    chunks = reception.sender.frame(np.empty((0, 4), np.float32))
    assert [chunk["chunk_length"] for chunk in chunks] == [0]
    arrived = reception.accepts(*chunks)
    assert arrived.payload == b""
    assert arrived.slot.shape == (0, 4)


@pytest.mark.spec("BRG-2-02")
def test_a_consumer_of_ours_reads_what_a_bridge_wrote(reception: Reception) -> None:
    """It is a stream like any other: arrays in the order of their seqs, none missing."""
    client = tp.connect(reception.host.aeron_dir, config=reception.host.config)
    with client, client.consumer(reception.dest_stream_id) as consumer:
        reception.deliver(b"first")
        while consumer.poll(0.5) is None:
            reception.deliver(b"warm")
        while consumer.poll() is not None:
            pass
        sent = {}
        for index in range(5):
            array = np.arange(index, index + 600, dtype=np.int32).reshape(20, 30)
            sent[reception.sender.send_frame(array)] = array
        for seq, array in sent.items():
            frame = consumer.poll(60.0)
            assert frame is not None
            assert frame.seq == seq
            np.testing.assert_array_equal(frame.copy(), array)
            assert frame.dropped_before == 0


@pytest.mark.spec("BRG-11-01")
def test_chunks_by_the_codec_and_by_hand_are_the_same_bytes(reception: Reception) -> None:
    """What this kit sends is what the schema says."""
    chunks = reception.sender.frame(noise(THREE_CHUNKS))
    assert [encoded(chunk) for chunk in chunks] == [packed_chunk(**chunk) for chunk in chunks]
    reception.accepts(*chunks)


# --- any order


def shuffled(chunks: list[Chunk], seed: int) -> list[Chunk]:
    return random.Random(seed).sample(chunks, len(chunks))


@pytest.mark.spec("BRG-5.2-22", "BRG-6-13")
def test_chunks_may_come_in_any_order(reception: Reception) -> None:
    """All six orders of three chunks, and cuts that are as uneven as a sender likes."""
    for order in itertools.permutations(range(3)):
        payload = noise(THREE_CHUNKS)
        chunks = reception.sender.frame(payload)
        assert reception.accepts(*(chunks[index] for index in order)).payload == payload
    payload = noise(LARGEST)
    uneven = [(0, 1), (1, 1000), (1001, 7), (1008, CHUNK_BYTES), (1008 + CHUNK_BYTES, 1280), (3568, LARGEST - 3568)]
    chunks = shuffled(reception.sender.frame(payload, cuts=uneven), 1)
    assert reception.accepts(*chunks).payload == payload


@pytest.mark.spec("BRG-5.2-22")
def test_the_order_of_indices_is_not_that_of_offsets(reception: Reception) -> None:
    """Frames are put together by offset and length: chunk 2 may lie before chunk 1."""
    payload = noise(3000)
    chunks = reception.sender.frame(payload, cuts=[(0, 1000), (2000, 1000), (1000, 1000)])
    assert reception.accepts(*chunks).payload == payload


@pytest.mark.spec("BRG-5.2-22")
def test_frames_may_be_interleaved(reception: Reception) -> None:
    """The chunks of several frames by turns; each is published when its last is there."""
    payloads = [noise(THREE_CHUNKS) for _ in range(4)]
    frames = [reception.sender.frame(payload) for payload in payloads]
    since = reception.now
    for turn in zip(*frames, strict=True):
        reception.send(*turn)
    last = reception.fence()
    seqs = [chunks[0]["seq"] for chunks in frames]
    assert reception.seqs(since) == [*seqs, last]
    epoch = reception.published(since)[-1].epoch
    assert [reception.mapped(epoch).payload(seq) for seq in seqs] == payloads


@pytest.mark.spec("BRG-5.2-24", "BRG-5.2-26")
def test_a_chunk_that_comes_again_the_same_changes_nothing(reception: Reception) -> None:
    payload = noise(THREE_CHUNKS)
    first, second, third = reception.sender.frame(payload)
    again = [first, first, third, second, third, second]
    assert reception.accepts(*again[:4]).payload == payload
    other = noise(THREE_CHUNKS)
    first, second, third = reception.sender.frame(other)
    assert reception.accepts(second, second, first, second, first, third).payload == other


@pytest.mark.spec("BRG-6-01")
def test_a_frame_that_comes_again_is_not_published_again(reception: Reception) -> None:
    """G18, G19: neither its last chunk nor all of it."""
    chunks = reception.sender.frame(noise(THREE_CHUNKS))
    reception.accepts(*chunks)
    reception.refuses(chunks[-1])
    reception.refuses(*chunks)
    changed = [chunk | {"payload_bytes": noise(chunk["chunk_length"])} for chunk in chunks]
    reception.refuses(*changed)


@pytest.mark.spec("BRG-6-14")
def test_a_frame_that_is_complete_too_late_is_dropped(reception: Reception) -> None:
    """G19: a higher seq was published before; local seqs never go back."""
    chunks = reception.sender.frame(noise(THREE_CHUNKS))
    before = reception.drops()
    reception.send(*chunks[:2])
    reception.fence()
    reception.refuses(chunks[2])
    assert reception.drops() - before == {"frames.out_of_order": 1, "chunks.late": 1}


# --- loss


@pytest.mark.spec("BRG-5.3-01")
@pytest.mark.parametrize("missing", [0, 1, 2], ids=["first", "middle", "last"])
def test_a_frame_with_a_hole_is_not_published(reception: Reception, missing: int) -> None:
    chunks = reception.sender.frame(noise(THREE_CHUNKS))
    reception.refuses(*(chunk for index, chunk in enumerate(chunks) if index != missing))


@pytest.mark.spec("BRG-5.3a-01", "BRG-5.3a-02", "BRG-5.3a-03", "BRG-5.3a-04")
def test_what_is_not_whole_in_time_is_given_up(host: Host, link: Link) -> None:
    """Dropped once and counted, its room is free again, and what still comes of it completes nothing."""
    keys: dict[str, Any] = {"assembly_timeout_ms": 40, "max_inflight_frames": 2}
    with Reception(host, link=link.again(), **keys) as reception:
        reception.meet()
        for _ in range(4):
            frames = [reception.sender.frame(noise(THREE_CHUNKS)) for _ in range(2)]
            before = reception.drops()
            for chunks in frames:
                reception.send(*chunks[:2])
            reception.wait_until(
                lambda before=before: (reception.drops() - before)["frames.timeout"] == 2, "two frames are given up"
            )
            assert reception.inflight_frames == 0
            reception.refuses(*(chunks[2] for chunks in frames))
        since, sent = reception.now, set[int]()

        def is_through() -> bool:
            sent.add(reception.sender.send_frame(noise(THREE_CHUNKS)))
            return bool(sent & set(reception.seqs(since)))

        reception.wait_until(is_through, "a frame is whole in time")


@pytest.mark.spec("BRG-5.3a-03")
def test_no_more_frames_are_under_way_than_configured(host: Host, link: Link) -> None:
    """G21: the number is a bound, whatever a sender begins, and frames that come whole get through all the same."""
    with Reception(host, link=link.again(), max_inflight_frames=3, assembly_timeout_ms=60_000) as reception:
        reception.meet()
        before, taken = reception.drops(), reception.chunks_received
        frames = [reception.sender.frame(noise(THREE_CHUNKS)) for _ in range(20)]
        reception.send(*(chunks[0] for chunks in frames))
        reception.wait_until(lambda: (reception.drops() - before)["frames.inflight"] == 17, "all were looked at")
        assert reception.chunks_received == taken + 20
        assert reception.inflight_frames == 3
        payload = noise(THREE_CHUNKS)
        assert reception.deliver(payload).payload == payload


# --- memory


@pytest.mark.spec("BRG-6-16", "BRG-5.3-01")
def test_a_slot_that_is_being_filled_never_looks_whole(reception: Reception) -> None:
    """Either the frame before is still there to the byte, or its commit word is gone."""
    held = {seq: noise(THREE_CHUNKS) for seq in range(reception.sender.next_seq, reception.sender.next_seq + NSLOTS)}
    for seq, payload in held.items():
        mapped = reception.mapped(reception.deliver(payload, seq=seq).descriptor.epoch)
    chunks = reception.sender.frame(noise(THREE_CHUNKS))
    seq = chunks[0]["seq"]
    reception.send(*chunks[:2])
    reception.fence()
    word = mapped.word(seq)
    if word == committed(seq - NSLOTS):
        assert mapped.payload(seq) == held[seq - NSLOTS]
    else:
        assert word == in_progress(seq)
    reception.refuses(chunks[2])
    assert mapped.word(seq) != committed(seq)


@pytest.mark.spec("BRG-6-16", "BRG-6-17")
def test_a_descriptor_follows_its_committed_slot(reception: Reception) -> None:
    """Whenever one comes, the slot holds its frame, or already a later one: for several rounds of the ring."""
    epoch = reception.deliver(b"here").descriptor.epoch
    mapped = reception.mapped(epoch)
    payloads: dict[int, bytes] = {}
    looked: list[int] = []

    def look(received: Any) -> None:
        message = received.message
        if isinstance(message, FrameDescriptor) and message.stream_id == reception.dest_stream_id:
            looked.append(_look(mapped, message.seq, payloads))

    reception.consumer.observers.append(look)
    try:
        for _ in range(4 * NSLOTS):
            chunks = reception.sender.frame(noise(THREE_CHUNKS))
            payloads[chunks[0]["seq"]] = b"".join(chunk["payload_bytes"] for chunk in chunks)
            reception.send(*chunks)
            reception.consumer.poll()
        reception.wait_until(lambda: len(looked) >= 4 * NSLOTS, "all frames are described")
    finally:
        reception.consumer.observers.remove(look)
    assert looked == list(payloads)


def _look(mapped: MappedStream, seq: int, payloads: dict[int, bytes]) -> int:
    """Read a slot as a consumer does."""
    before, payload, after = mapped.word(seq), mapped.payload(seq), mapped.word(seq)
    if before == after == committed(seq):
        assert payload == payloads[seq]
    else:
        assert after >> 1 > seq, "described before it was committed"
    return seq


# --- what does not fit


@pytest.mark.spec("BRG-5.2-13", "BRG-6-12")
def test_a_frame_that_no_local_pool_takes_is_dropped(reception: Reception) -> None:
    """Though the source has a pool for it."""
    before = reception.drops()
    reception.refuses(*reception.sender.frame(noise(LARGEST + 1)))
    assert (reception.drops() - before)["frames.no_pool"] == 1
    assert reception.deliver(noise(LARGEST)).slot.values_len_bytes == LARGEST


@pytest.mark.spec("BRG-6-10")
def test_a_frame_that_its_source_pool_cannot_hold_is_dropped(reception: Reception) -> None:
    """Pool 3 of the source has slots of 1024 bytes."""
    before = reception.drops()
    reception.refuses(*reception.sender.frame(noise(1025), pool_id=3))
    assert (reception.drops() - before)["frames.source_stride"] == 1
    (chunk,) = reception.sender.frame(noise(1024), pool_id=3)
    reception.accepts(chunk)


@pytest.mark.spec("BRG-10-10")
def test_a_frame_above_max_payload_bytes_is_dropped(host: Host, link: Link) -> None:
    with Reception(host, link=link.again(), max_payload_bytes=1000) as reception:
        reception.meet()
        before = reception.drops()
        reception.refuses(*reception.sender.frame(noise(1001)))
        assert (reception.drops() - before)["frames.too_large"] == 1
        assert len(reception.deliver(noise(1000)).payload) == 1000


@pytest.mark.spec("BRG-5.2-27", "BRG-5.2-28", "BRG-5.2-29")
@pytest.mark.parametrize(
    ("keys", "bound"),
    [
        ({"chunk_bytes": 500}, 500),
        ({"mtu_bytes": 1000}, 872),
        ({"mtu_bytes": 1000, "chunk_bytes": 4000}, 872),
        ({"max_chunk_bytes": 300}, 300),
    ],
    ids=["chunk_bytes", "mtu_bytes", "the lesser of both", "max_chunk_bytes"],
)
def test_a_chunk_that_is_longer_than_agreed_is_dropped(
    host: Host, link: Link, keys: dict[str, Any], bound: int
) -> None:
    """The bound is the receiver's own configuration; a chunk that reaches it is good."""
    with Reception(host, link=link.again(), **keys) as reception:
        reception.meet()
        payload = noise(bound + 50)
        good = reception.sender.frame(payload, cuts=[(0, 50), (50, bound)])
        assert reception.accepts(*good).payload == payload
        before = reception.drops()
        payload = noise(bound + 51)
        reception.refuses(*reception.sender.frame(payload, cuts=[(0, 50), (50, bound + 1)]))
        reception.refuses(*reception.sender.frame(payload, cuts=[(0, bound + 1), (bound + 1, 50)]))
        assert (reception.drops() - before)["chunks.chunk_size"] == 2


@pytest.mark.spec("BRG-5.2-28", "BRG-10-07")
def test_without_a_configured_mtu_the_bound_is_that_of_the_sender(host: Host, link: Link) -> None:
    """As the sender's own channel says; neither end needs a key for it."""
    own = link.again()
    sized = own._replace(payload=(f"{own.payload[0]}|mtu=2048", own.payload[1]))
    with (
        BridgeSender(host.aeron_dir, sized) as sender,
        Reception(host, link=own, sender=sender) as reception,
    ):
        reception.meet()
        bound = 2048 - 128
        payload = noise(bound + 50)
        assert reception.accepts(*sender.frame(payload, cuts=[(0, 50), (50, bound)])).payload == payload
        before = reception.drops()
        reception.refuses(*sender.frame(noise(bound + 51), cuts=[(0, 50), (50, bound + 1)]))
        assert (reception.drops() - before)["chunks.chunk_size"] == 1


# --- gates


@pytest.mark.spec("BRG-5.2-14")
def test_nothing_is_accepted_before_an_announce(host: Host, link: Link) -> None:
    """Frames before the first announce of the mapping are dropped and counted, and never published afterwards."""
    with Reception(host, link=link.again()) as reception:
        reception.wait_until(reception.sender.is_connected, "the bridge listens")
        chunks = reception.sender.frame(noise(THREE_CHUNKS))
        reception.send(*chunks[:2])
        early = reception.sender.send_frame(b"too early")
        reception.wait_until(lambda: reception.drops()["chunks.no_announce"] >= 3, "chunks are dropped")
        foreign = reception.sender.announced(stream_id=reception.sender.stream_id + 100_000)
        reception.sender.send(foreign, reception.link.control)
        early_too = reception.sender.send_frame(b"too early too")
        reception.wait_until(lambda: reception.drops()["chunks.no_announce"] >= 4, "a chunk is dropped")
        reception.meet()
        reception.refuses(chunks[2])
        assert not {early, early_too, chunks[0]["seq"]} & set(reception.seqs())


@pytest.mark.spec("BRG-6-01")
def test_chunks_of_streams_that_are_not_mapped_are_dropped(reception: Reception) -> None:
    """Also those that name the destination."""
    for stream_id in (reception.dest_stream_id, reception.sender.stream_id + 1, 0, 2**32 - 1):
        before = reception.drops()
        (chunk,) = reception.sender.frame(b"lost")
        reception.refuses(chunk | {"stream_id": stream_id})
        assert reception.drops() - before == {"chunks.unknown_stream": 1}
