# SPDX-License-Identifier: Apache-2.0
"""The native feed over a real Aeron stream: every seq is delivered or counted, once, under one reason.

Wire §10.2.1, §11, §15.3, §15.4, §15.18, §15.21; decisions B27-B30, B33, B34.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tensorpool._core import MAX_SEQ, DropReason, is_gap, is_late
from tensorpool.client.stream_reader import NEWER_EPOCH, SEQ_WENT_BACK
from tensorpool.wire.control import FrameDescriptor, QosProducer
from tests.client.conftest import SECOND_NS, STREAM, Stream, descriptor_bytes, drops_of, taken
from tests.client.descriptor_feed.conftest import (
    BLOCK_LENGTH,
    DIMS,
    DTYPE,
    FRAME,
    HEADER_LENGTH,
    MAJOR_ORDER,
    NDIMS,
    NSLOTS,
    PAYLOAD_OFFSET,
    PAYLOAD_SLOT,
    POOL_ID,
    PROGRESS_UNIT,
    SCHEMA_ID,
    STRIDES,
    TEMPLATE_ID,
    VALUES_LEN,
    VERSION,
    seqs,
    total,
)

# --- frames


@pytest.mark.spec("WIRE-11-01", "WIRE-10.2.1-09")
def test_every_frame_that_is_described_is_delivered_in_order(stream: Stream) -> None:
    """Once around the ring and further, as fast as it is read."""
    feed = stream.feed()
    for number in range(3 * NSLOTS):
        stream.publish(np.array([number], np.uint64), timestamp_ns=number + 1, meta_version=number)
        (frame,) = taken(feed, stream.subscription)
        assert (frame.seq, frame.slot, frame.dropped_before) == (number, number % NSLOTS, 0)
        assert (frame.timestamp_ns, frame.meta_version) == (number + 1, number)
    assert (feed.received, drops_of(feed), feed.last_seq_seen) == (3 * NSLOTS, {}, 3 * NSLOTS - 1)
    assert (feed.attention, feed.duplicates, feed.ignored, feed.foreign, feed.lost) == (0, 0, 0, 0, 0)


def test_a_frame_has_what_its_descriptor_says(stream: Stream) -> None:
    """Time of publishing and trace; both may be absent, the trace in two ways (A4)."""
    feed = stream.feed()
    stream.describe(stream.write(FRAME), timestamp_ns=77, trace_id=5)
    stream.describe(stream.write(FRAME), trace_id=2**64 - 1)
    stream.describe(stream.write(FRAME))
    frames = taken(feed, stream.subscription)
    assert [(frame.publish_timestamp_ns, frame.trace_id) for frame in frames] == [(77, 5), (None, 0), (None, 0)]


def test_the_first_descriptor_decides_where_counting_begins(stream: Stream) -> None:
    """Without an expected seq there is nothing before it to miss."""
    for _ in range(5):
        stream.write()
    feed = stream.feed()
    stream.describe(4)
    assert seqs(feed, stream) == [4]
    assert drops_of(feed) == {}


def test_what_was_published_before_the_epoch_was_mapped_is_unmapped(stream: Stream) -> None:
    """With an expected seq everything up to the first descriptor is missing, under a reason of its own."""
    for _ in range(5):
        stream.write()
    feed = stream.feed(expected=1)
    stream.describe(4)
    stream.describe(7)
    frames = taken(feed, stream.subscription)
    assert [(frame.seq, frame.dropped_before) for frame in frames] == [(4, 3)]
    assert drops_of(feed) == {DropReason.UNMAPPED: 3, DropReason.GAP: 2, DropReason.STALE: 1}
    assert total(feed) == 7  # 1 to 7


@pytest.mark.spec("WIRE-10.4.1-03")
def test_seqs_without_a_descriptor_are_gaps(stream: Stream) -> None:
    """Counted when the next one comes, and reported with the next frame."""
    feed = stream.feed()
    stream.publish()
    stream.write()
    stream.write()
    stream.publish()
    stream.publish()
    frames = taken(feed, stream.subscription)
    assert [(frame.seq, frame.dropped_before) for frame in frames] == [(0, 0), (3, 2), (4, 0)]
    assert drops_of(feed) == {DropReason.GAP: 2}


SLOT_LIES: dict[str, tuple[DropReason, int, bytes]] = {
    "length 191": (DropReason.BAD_EMBEDDED_HEADER, HEADER_LENGTH, struct.pack("<I", 191)),
    "template": (DropReason.BAD_EMBEDDED_HEADER, TEMPLATE_ID, struct.pack("<H", 51)),
    "schema": (DropReason.BAD_EMBEDDED_HEADER, SCHEMA_ID, struct.pack("<H", 901)),
    "version": (DropReason.BAD_EMBEDDED_HEADER, VERSION, struct.pack("<H", 2)),
    "block": (DropReason.BAD_EMBEDDED_HEADER, BLOCK_LENGTH, struct.pack("<H", 183)),
    "payload offset": (DropReason.BAD_PAYLOAD_OFFSET, PAYLOAD_OFFSET, struct.pack("<I", 64)),
    "payload slot": (DropReason.BAD_PAYLOAD_SLOT, PAYLOAD_SLOT, struct.pack("<I", 7)),
    "pool": (DropReason.BAD_POOL, POOL_ID, struct.pack("<H", 9)),
    "too long": (DropReason.BAD_LENGTH, VALUES_LEN, struct.pack("<I", 257)),
    "too short": (DropReason.BAD_LENGTH, VALUES_LEN, struct.pack("<I", 23)),
    "dtype 12": (DropReason.BAD_DTYPE, DTYPE, struct.pack("<h", 12)),
    "dtype 0": (DropReason.BAD_DTYPE, DTYPE, struct.pack("<h", 0)),
    "major order": (DropReason.BAD_MAJOR_ORDER, MAJOR_ORDER, struct.pack("<h", 3)),
    "no dims": (DropReason.BAD_NDIMS, NDIMS, b"\x00"),
    "9 dims": (DropReason.BAD_NDIMS, NDIMS, b"\x09"),
    "a negative dim": (DropReason.BAD_DIMS, DIMS, struct.pack("<i", -2)),
    "a negative stride": (DropReason.BAD_STRIDES, STRIDES, struct.pack("<i", -12)),
    "overlapping strides": (DropReason.BAD_STRIDES, STRIDES, struct.pack("<ii", 4, 4)),
    "progress unit": (DropReason.BAD_PROGRESS, PROGRESS_UNIT, b"\x07"),
    "no progress stride": (DropReason.BAD_PROGRESS, PROGRESS_UNIT, b"\x01"),
}


@pytest.mark.spec("WIRE-15.21-04", "WIRE-15.13-01")
@pytest.mark.parametrize(("reason", "offset", "data"), SLOT_LIES.values(), ids=SLOT_LIES.keys())
def test_a_slot_that_lies_is_dropped_for_its_own_reason(
    stream: Stream, reason: DropReason, offset: int, data: bytes
) -> None:
    """Neither late nor a gap, reported with the next frame; the frames around it are not concerned."""
    feed = stream.feed()
    stream.publish(FRAME)
    lying = stream.write(FRAME)
    stream.poke(lying, offset, data)
    stream.describe(lying)
    stream.publish(FRAME)
    frames = taken(feed, stream.subscription)
    assert [(frame.seq, frame.dropped_before) for frame in frames] == [(0, 0), (2, 1)]
    assert drops_of(feed) == {reason: 1}
    assert not is_late(reason)
    assert not is_gap(reason)


@pytest.mark.spec("WIRE-10.4.1-04", "WIRE-15.18-02", "WIRE-15.21-03", "WIRE-8.3-08")
def test_a_slot_that_does_not_hold_the_frame_is_late(stream: Stream) -> None:
    """Not yet, no longer, not at all: each under its name, all of them late; the feed does not wait."""
    feed = stream.feed(expected=0)
    stream.publish()
    stream.begin(1)
    stream.describe(1)
    assert seqs(feed, stream) == [0]
    stream.write(seq=2)
    stream.write(seq=2 + NSLOTS)
    stream.describe(2)
    stream.describe(3)
    assert seqs(feed, stream) == []
    assert drops_of(feed) == {DropReason.NOT_COMMITTED: 1, DropReason.OVERWRITTEN: 1, DropReason.STALE: 1}
    assert all(is_late(reason) for reason in drops_of(feed))
    assert total(feed) == 4


def test_the_backlog_of_a_ring_that_came_round_is_overwritten(stream: Stream) -> None:
    """Descriptors whose slot a later one has are counted as such; the rest is delivered."""
    feed = stream.feed()
    for _ in range(3 * NSLOTS):
        stream.publish()
    frames = taken(feed, stream.subscription)
    assert [frame.seq for frame in frames] == list(range(2 * NSLOTS, 3 * NSLOTS))
    assert frames[0].dropped_before == 2 * NSLOTS
    assert drops_of(feed) == {DropReason.OVERWRITTEN: 2 * NSLOTS}


# --- what is not for us


@pytest.mark.spec("WIRE-10.2.1-07", "WIRE-10.2.1-14")
def test_descriptors_of_other_streams_and_epochs_are_ignored(stream: Stream) -> None:
    """They deliver nothing and are no gap; those of other epochs are counted, a later one asks for attention."""
    feed = stream.feed()
    stream.publish()
    stream.describe(50, stream_id=STREAM + 1)
    stream.describe(51, epoch=stream.epoch - 1)
    assert seqs(feed, stream) == [0]
    assert (feed.ignored, feed.attention) == (1, 0)
    stream.describe(52, epoch=stream.epoch + 1)
    stream.publish()
    assert seqs(feed, stream) == [1]
    assert (feed.ignored, feed.attention) == (2, NEWER_EPOCH)
    feed.forget(NEWER_EPOCH)
    assert feed.attention == 0
    assert drops_of(feed) == {}


@pytest.mark.parametrize("seq", [MAX_SEQ + 1, 2**64 - 1])
def test_a_seq_that_cannot_be_is_ignored(stream: Stream, seq: int) -> None:
    """A20: seqs have 63 bits; it must not make everything before it a gap."""
    feed = stream.feed()
    stream.publish()
    stream.describe(seq)
    stream.publish()
    assert seqs(feed, stream) == [0, 1]
    assert drops_of(feed) == {}


def test_messages_that_are_no_descriptors_are_foreign(stream: Stream) -> None:
    """Everything may be multiplexed on one stream; nonsense, other versions and other lengths are passed over."""
    feed = stream.feed()
    good = descriptor_bytes(stream, 0)
    other = QosProducer(stream_id=STREAM, producer_id=1, epoch=1, current_seq=0).encode()
    for data in (b"", b"\x00", other, good + b"\x00", good[:-1], good[:6] + b"\x02\x00" + good[8:]):
        stream.say(data)
    stream.write()
    stream.say(good)
    assert seqs(feed, stream) == [0]
    assert feed.foreign == 6


def test_a_descriptor_of_the_codec_is_one_of_the_feed(stream: Stream) -> None:
    """Two encoders, one layout."""
    feed = stream.feed()
    stream.write(FRAME)
    stream.say(FrameDescriptor(stream_id=STREAM, epoch=1, seq=0, timestamp_ns=9, meta_version=3, trace_id=4).encode())
    (frame,) = taken(feed, stream.subscription)
    assert (frame.seq, frame.publish_timestamp_ns, frame.trace_id) == (0, 9, 4)


# --- seqs that come again, or go back


def test_a_descriptor_that_comes_again_is_a_duplicate(stream: Stream) -> None:
    """B29: it counts once, and nothing needs to be mapped again."""
    feed = stream.feed()
    stream.publish()
    stream.describe(0)
    stream.publish()
    stream.describe(1)
    assert seqs(feed, stream) == [0, 1]
    assert (feed.duplicates, feed.attention, drops_of(feed)) == (2, 0, {})


@pytest.mark.spec("WIRE-15.2-05")
def test_a_seq_that_goes_back_stops_the_feed(stream: Stream) -> None:
    """B29: the owner maps again; until then nothing more is delivered."""
    feed = stream.feed()
    for _ in range(3):
        stream.publish()
    stream.describe(1)
    stream.publish()
    assert seqs(feed, stream) == [0, 1, 2]
    assert feed.attention == SEQ_WENT_BACK
    assert feed.next(stream.subscription) is None
    assert feed.wait(stream.subscription, 10 * SECOND_NS)  # the owner is needed: no sleep
    assert feed.duplicates == 0


def test_frames_before_one_that_goes_back_are_delivered(stream: Stream) -> None:
    """What is behind it in the queue says nothing about their slots."""
    feed = stream.feed()
    for _ in range(6):
        stream.write()
    stream.describe(5)
    stream.describe(3)
    assert seqs(feed, stream) == [5]
    assert drops_of(feed) == {}
    assert feed.attention == SEQ_WENT_BACK


def test_during_a_switch_seqs_that_are_not_higher_are_passed_over(stream: Stream) -> None:
    """B34: the other stream may repeat descriptors of the first; the first higher one ends the switch."""
    feed = stream.feed()
    for _ in range(4):
        stream.publish()
    assert seqs(feed, stream) == [0, 1, 2, 3]
    feed.set_switching()
    for seq in (0, 1, 2, 3):
        stream.describe(seq)
    stream.publish()
    assert seqs(feed, stream) == [4]
    assert (feed.duplicates, feed.attention) == (4, 0)
    stream.describe(2)
    assert seqs(feed, stream) == []
    assert feed.attention == SEQ_WENT_BACK


def test_a_switch_to_another_subscription_loses_nothing(stream: Stream) -> None:
    """What waits in the queue of the old one is still delivered, what both describe counts once."""
    feed = stream.feed()
    stream.publish()
    assert seqs(feed, stream) == [0]
    second = stream.subscribe()
    for _ in range(3):
        stream.publish()
    first = feed.next(stream.subscription)
    assert first is not None
    feed.set_switching()
    assert [first.seq, *(frame.seq for frame in taken(feed, second))] == [1, 2, 3]
    assert feed.attention == 0  # what the queue still had was no sign that the other stream has caught up
    stream.publish()
    assert [frame.seq for frame in taken(feed, second)] == [4]
    assert drops_of(feed) == {}
