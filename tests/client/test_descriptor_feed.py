# SPDX-License-Identifier: Apache-2.0
"""The native feed over a real Aeron stream: every seq is delivered or counted, once, under one reason.

Wire §10.2.1, §11, §15.3, §15.4, §15.18, §15.21; decisions B27-B30, B33, B34.
"""

from __future__ import annotations

import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorpool import aeron
from tensorpool._core import MAX_SEQ, DescriptorFeed, DropReason, is_gap, is_late
from tensorpool.client.stream_reader import IMAGE_LOST, NEWER_EPOCH, SEQ_WENT_BACK, STOPPED
from tensorpool.errors import Closed, LocalProtocolError
from tensorpool.wire.control import FrameDescriptor, QosProducer
from tests.client.conftest import SECOND_NS, STREAM, Stream, descriptor_bytes, drops_of, taken
from tests.support.processes import wait_until

NSLOTS = 8
FRAME = np.arange(6, dtype=np.float32).reshape(2, 3)

# where fields of a slot are
VALUES_LEN, PAYLOAD_SLOT, POOL_ID, PAYLOAD_OFFSET = 8, 12, 16, 18
HEADER_LENGTH, BLOCK_LENGTH, TEMPLATE_ID, SCHEMA_ID, VERSION = 60, 64, 66, 68, 70
DTYPE, MAJOR_ORDER, NDIMS, PROGRESS_UNIT, PROGRESS_STRIDE, DIMS, STRIDES = 72, 74, 76, 78, 79, 83, 115


def seqs(feed: DescriptorFeed, stream: Stream) -> list[int]:
    return [frame.seq for frame in taken(feed, stream.subscription)]


def total(feed: DescriptorFeed) -> int:
    return feed.received + sum(feed.drops.values())


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
def test_seqs_that_nobody_described_are_gaps(stream: Stream) -> None:
    """Counted when the next one comes, and told with the next frame."""
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
    """Neither late nor a gap, told with the next frame; the frames around it are not concerned."""
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
    """Not yet, no longer, not at all: each under its name, all of them late; nobody waits."""
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
    """B34: the other stream may repeat what the first has told; the first higher one ends the switch."""
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
    """What waits in the queue of the old one is still delivered, what both have told counts once."""
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


# --- attention


def test_a_stopped_feed_delivers_nothing_until_it_is_let_go(stream: Stream) -> None:
    """And nothing is lost by it."""
    feed = stream.feed()
    stream.publish()
    feed.stop()
    assert feed.attention == STOPPED
    assert feed.next(stream.subscription) is None
    assert feed.latest(stream.subscription) is None
    feed.forget(STOPPED)
    assert seqs(feed, stream) == [0]


def test_the_end_of_a_publisher_asks_for_attention(stream: Stream) -> None:
    """It may have ended, or we were too slow for it: the owner finds out."""
    feed = stream.feed()
    stream.publish()
    assert seqs(feed, stream) == [0]
    stream.publication.close()
    wait_until(lambda: feed.next(stream.subscription) is None and feed.attention & IMAGE_LOST, "the image is gone")
    feed.forget(IMAGE_LOST)
    assert feed.attention == 0


def test_two_threads_in_one_feed_are_refused(stream: Stream) -> None:
    """One at a time: the second is told, the first goes on."""
    feed = stream.feed()
    stream.publish()
    assert seqs(feed, stream) == [0]
    waiter = threading.Thread(target=feed.wait, args=(stream.subscription, 60 * SECOND_NS))
    waiter.start()

    def is_refused() -> bool:
        try:
            feed.next(stream.subscription)
        except LocalProtocolError:
            return True
        return False

    wait_until(is_refused, "the feed is busy")
    with pytest.raises(LocalProtocolError, match="another thread"):
        feed.latest(stream.subscription)
    with pytest.raises(LocalProtocolError, match="another thread"):
        feed.finish()
    feed.stop()
    waiter.join()
    assert feed.finish() == 1


def test_a_closed_subscription_is_an_error(stream: Stream) -> None:
    """Not silence: the owner gets another one."""
    feed = stream.feed()
    subscription = stream.subscribe()
    subscription.close()
    for call in (feed.next, feed.latest, lambda s: feed.wait(s, 0)):
        with pytest.raises(Closed):
            call(subscription)


# --- waiting


def test_a_wait_ends_at_once_when_there_is_something(stream: Stream) -> None:
    """With time or without."""
    feed = stream.feed()
    assert not feed.wait(stream.subscription, 0)
    stream.publish()
    assert feed.wait(stream.subscription, 0)
    assert feed.wait(stream.subscription, 60 * SECOND_NS)
    assert seqs(feed, stream) == [0]
    assert not feed.wait(stream.subscription, 1_000)


@pytest.mark.parametrize("what", ["frame", "stop"])
def test_a_sleeper_is_woken(stream: Stream, what: str) -> None:
    """By a frame with its commit, by its owner, long before its time is over."""
    feed = stream.feed(expected=0)
    started, results = threading.Event(), list[bool]()

    def sleep() -> None:
        started.set()
        results.append(feed.wait(stream.subscription, 60 * SECOND_NS))

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    started.wait()
    if what == "frame":
        stream.publish()
        stream.writer.wake()
    else:
        feed.stop()
    sleeper.join(timeout=30)
    assert not sleeper.is_alive()
    assert results == [True]
    assert seqs(feed, stream) == ([0] if what == "frame" else [])


def test_a_commit_without_descriptor_is_no_frame(stream: Stream) -> None:
    """A wait that was woken by it goes on waiting."""
    feed = stream.feed(expected=0)
    stream.write()
    assert not feed.wait(stream.subscription, 2_000_000)
    assert feed.next(stream.subscription) is None


# --- catching up


@pytest.mark.spec("WIRE-15.4-04", "WIRE-15.4-03")
def test_too_far_behind_means_on_to_the_newest(stream: Stream) -> None:
    """B30: what was passed over is RESYNC, and counts as a gap; what was missing before it stays one."""
    feed = stream.feed(max_outstanding=4)
    for _ in range(4):
        stream.publish()
    assert seqs(feed, stream) == [0, 1, 2, 3]  # 3 behind: not yet
    for _ in range(3):
        stream.publish()
    stream.write()
    stream.publish()
    frames = taken(feed, stream.subscription)
    assert [(frame.seq, frame.dropped_before) for frame in frames] == [(8, 4)]
    assert drops_of(feed) == {DropReason.RESYNC: 3, DropReason.GAP: 1}
    assert is_gap(DropReason.RESYNC)
    assert total(feed) == 9


def test_after_a_large_frame_what_came_meanwhile_is_looked_at(shm_dir: Path, transport: aeron.Client) -> None:
    """Whoever reads much takes long: the frame that is next in line may be about to go."""
    stream = Stream(shm_dir, transport, pools=((1, 1 << 19),))
    feed, frame = stream.feed(max_outstanding=4), np.zeros(1 << 18, np.uint8)
    for _ in range(2):
        stream.publish(frame)
    first = feed.next(stream.subscription)
    assert first is not None
    assert first.seq == 0
    for _ in range(5):
        stream.publish(frame)
    later = feed.next(stream.subscription)
    assert later is not None
    assert (later.seq, drops_of(feed)) == (6, {DropReason.RESYNC: 5})


def test_0_is_never_too_far(stream: Stream) -> None:
    """Then only the ring's end is."""
    feed = stream.feed(max_outstanding=0)
    for _ in range(NSLOTS):
        stream.publish()
    assert len(seqs(feed, stream)) == NSLOTS


@pytest.mark.spec("WIRE-11-05", "WIRE-11-03")
@pytest.mark.parametrize("by", ["descriptor", "slot"])
def test_a_rate_is_kept_by_the_publishers_clock(stream: Stream, by: str) -> None:
    """§11: the descriptor's time, else the slot's; when they are polled does not matter."""
    feed = stream.feed()
    feed.set_min_interval_ns(100)
    for number in range(NSLOTS):
        at_ns = 1_000 + 40 * number
        slot_ns = at_ns if by == "slot" else 1_000
        seq = stream.write(timestamp_ns=slot_ns)
        stream.describe(seq, **({"timestamp_ns": at_ns} if by == "descriptor" else {}))
    # due at 1000, 1100, 1200: met by those of 1000, 1120, 1200
    frames = taken(feed, stream.subscription)
    assert [frame.seq for frame in frames] == [0, 3, 5]
    assert drops_of(feed) == {DropReason.RATE_LIMITED: 5}
    assert all(frame.dropped_before == 0 for frame in frames)  # it was asked for
    assert not is_gap(DropReason.RATE_LIMITED)


@pytest.mark.parametrize("stamp", [0, 2**64 - 1], ids=["0", "all ones"])
def test_without_any_time_of_the_publisher_it_is_ours(stream: Stream, stamp: int) -> None:
    """B26: 0 and all ones are no time; with an hour between frames only the first is due."""
    feed = stream.feed()
    feed.set_min_interval_ns(3600 * SECOND_NS)
    for _ in range(3):
        stream.publish(None, timestamp_ns=stamp)
    assert seqs(feed, stream) == [0]
    feed.set_min_interval_ns(0)
    stream.publish(None, timestamp_ns=stamp)
    assert seqs(feed, stream) == [3]


def test_a_publishers_clock_that_jumps_back_does_not_stop_the_stream(stream: Stream) -> None:
    """More than an interval before its due time is another clock: it begins anew."""
    feed = stream.feed()
    feed.set_min_interval_ns(100)
    for at_ns in (10_000, 10_050, 500, 550, 600):
        stream.describe(stream.write(), timestamp_ns=at_ns)
    assert seqs(feed, stream) == [0, 2, 4]


def test_a_throttled_stream_has_no_gaps(stream: Stream) -> None:
    """B28: its publisher leaves frames out on purpose."""
    feed = stream.feed()
    feed.set_throttled(True)
    for seq in range(6):
        stream.write()
        if seq % 3 == 0:
            stream.describe(seq)
    frames = taken(feed, stream.subscription)
    assert [(frame.seq, frame.dropped_before) for frame in frames] == [(0, 0), (3, 0)]
    assert drops_of(feed) == {DropReason.RATE_LIMITED: 2}
    feed.set_throttled(False)
    stream.describe(5)
    assert seqs(feed, stream) == [5]
    assert drops_of(feed) == {DropReason.RATE_LIMITED: 2, DropReason.GAP: 1}


# --- the newest


def test_the_newest_frame_is_there_right_after_joining(stream: Stream) -> None:
    """From the ring itself: its descriptor was told before anybody listened."""
    feed = stream.feed()
    assert feed.latest(stream.subscription) is None
    stream.write()
    stream.write(FRAME)
    frame = feed.latest(stream.subscription)
    assert frame is not None
    assert (frame.seq, frame.publish_timestamp_ns, frame.dropped_before) == (1, None, 0)
    assert (feed.received, drops_of(feed), feed.last_seq_seen) == (1, {}, 1)


def test_the_newest_frame_is_received_once_and_shown_as_often_as_asked(stream: Stream) -> None:
    """Those in between are SKIPPED; asking again counts nothing."""
    feed = stream.feed(expected=0)
    for _ in range(5):
        stream.publish()
    for _ in range(3):
        frame = feed.latest(stream.subscription)
        assert frame is not None
        assert frame.seq == 4
        assert (feed.received, drops_of(feed)) == (1, {DropReason.SKIPPED: 4})
    stream.publish()
    assert seqs(feed, stream) == [5]
    assert total(feed) == 6


def test_a_frame_that_was_polled_is_the_newest_until_another_comes(stream: Stream) -> None:
    """Both ways of reading go together."""
    feed = stream.feed()
    stream.publish()
    assert seqs(feed, stream) == [0]
    frame = feed.latest(stream.subscription)
    assert frame is not None
    assert (frame.seq, feed.received) == (0, 1)


def test_a_descriptor_that_comes_after_its_frame_was_shown_is_a_duplicate(stream: Stream) -> None:
    """The ring may tell of a frame before the log does."""
    feed = stream.feed(expected=0)
    stream.write()
    assert feed.latest(stream.subscription) is not None
    stream.describe(0)
    stream.publish()
    assert seqs(feed, stream) == [1]
    assert (feed.duplicates, feed.attention, feed.received, drops_of(feed)) == (1, 0, 2, {})


def test_late_descriptors_of_frames_that_were_skipped_are_no_step_back(stream: Stream) -> None:
    """Nor when there are several of them."""
    feed = stream.feed(expected=0)
    for _ in range(4):
        stream.write()
    frame = feed.latest(stream.subscription)
    assert frame is not None
    assert frame.seq == 3
    for seq in range(4):
        stream.describe(seq)
    stream.publish()
    assert seqs(feed, stream) == [4]
    assert feed.attention == 0
    assert total(feed) == 5


def test_losses_before_the_newest_frame_are_told_with_it(stream: Stream) -> None:
    """Gaps are; what it skipped itself is not a loss."""
    feed = stream.feed()
    stream.publish()
    assert seqs(feed, stream) == [0]
    stream.write()
    stream.publish()
    stream.publish()
    frame = feed.latest(stream.subscription)
    assert frame is not None
    assert (frame.seq, frame.dropped_before) == (3, 1)
    assert drops_of(feed) == {DropReason.GAP: 1, DropReason.SKIPPED: 1}


def test_a_newest_frame_that_is_being_overwritten_gives_way_to_another(stream: Stream) -> None:
    """What was described and is gone is skipped; the newest that stands is shown."""
    feed = stream.feed(expected=0)
    for _ in range(3):
        stream.publish()
    stream.begin(2 + NSLOTS)
    frame = feed.latest(stream.subscription)
    assert frame is None or frame.seq < 2
    stream.write(seq=3)
    frame = feed.latest(stream.subscription)
    assert frame is not None
    assert frame.seq == 3
    assert total(feed) == 4


def test_a_rate_does_not_keep_the_newest_frame_back(stream: Stream) -> None:
    """Whoever asks for it by hand gets it."""
    feed = stream.feed()
    feed.set_min_interval_ns(3600 * SECOND_NS)
    stream.publish()
    stream.publish()
    assert seqs(feed, stream) == [0]
    frame = feed.latest(stream.subscription)
    assert frame is not None
    assert frame.seq == 1
    assert total(feed) == 2


# --- the end


def test_a_finished_feed_tells_which_seq_is_the_first_that_is_not_accounted_for(stream: Stream) -> None:
    """What waits in the queue is among them; nothing more is delivered, and nothing counted."""
    feed = stream.feed()
    for _ in range(4):
        stream.publish()
    assert feed.next(stream.subscription) is not None  # the other three are in the queue
    assert feed.finish() == feed.finish() == 1
    assert feed.attention & STOPPED
    assert feed.next(stream.subscription) is None
    assert (feed.received, drops_of(feed)) == (1, {})


def test_the_next_feed_of_the_epoch_goes_on_where_the_last_one_was(stream: Stream) -> None:
    """What neither has seen is missing in the second, and counted there."""
    feed = stream.feed()
    for _ in range(4):
        stream.publish()
    assert feed.next(stream.subscription) is not None
    again = stream.feed(expected=feed.finish())
    stream.publish()
    assert seqs(again, stream) == [4]
    assert drops_of(again) == {DropReason.UNMAPPED: 3}
    assert total(feed) + total(again) == 5


@pytest.mark.parametrize("expected", [None, 0, 2])
def test_a_feed_that_heard_nothing_is_where_it_began(stream: Stream, expected: int | None) -> None:
    """Whatever the ring holds."""
    for _ in range(3):
        stream.write()
    feed = stream.feed(expected)
    assert feed.finish() == expected
    assert drops_of(feed) == {}


@pytest.mark.spec("WIRE-15.21-10")
def test_what_was_told_while_nothing_was_mapped_is_discarded(stream: Stream) -> None:
    """§15.21: dropped, even if it could be read by now; it is missing before the first that is told later."""
    for _ in range(3):
        stream.publish()
    feed = stream.feed(expected=0)
    feed.discard(stream.subscription)
    assert feed.next(stream.subscription) is None
    assert feed.ignored == 3
    stream.publish()
    assert seqs(feed, stream) == [3]
    assert drops_of(feed) == {DropReason.UNMAPPED: 3}
    assert total(feed) == 4


def test_a_frame_that_is_not_to_be_believed_is_dropped_after_all(stream: Stream) -> None:
    """Counted once, under its reason, and told with the next one together with what was lost before it."""
    feed = stream.feed()
    stream.publish()
    assert seqs(feed, stream) == [0]
    stream.write()
    stream.write()
    stream.publish()
    (refused,) = taken(feed, stream.subscription)
    for _ in range(2):
        feed.refuse(refused, DropReason.BAD_PROGRESS)
    shown = feed.latest(stream.subscription)
    assert shown is not None
    assert shown.seq == 3
    feed.refuse(shown, DropReason.BAD_PROGRESS)  # it is the same frame
    assert (feed.received, drops_of(feed)) == (1, {DropReason.GAP: 2, DropReason.BAD_PROGRESS: 1})
    stream.publish()
    (frame,) = taken(feed, stream.subscription)
    assert (frame.seq, frame.dropped_before) == (4, 3)
    assert total(feed) == 5


def test_losses_of_the_epoch_before_are_told_with_the_first_frame(stream: Stream) -> None:
    """They are added to its own."""
    feed = stream.feed(expected=0)
    feed.carry_lost(5)
    assert feed.lost == 5
    stream.write()
    stream.publish()
    (frame,) = taken(feed, stream.subscription)
    assert frame.dropped_before == 6
    assert feed.lost == 0


def test_reasons_are_told_by_name() -> None:
    """As the wire reports them: late, gap, or neither."""
    late = {DropReason.NOT_COMMITTED, DropReason.OVERWRITTEN, DropReason.STALE}
    gap = {DropReason.GAP, DropReason.RESYNC}
    assert {reason for reason in DropReason if is_late(reason)} == late
    assert {reason for reason in DropReason if is_gap(reason)} == gap


@pytest.mark.parametrize("arguments", [{"stream_id": -1}, {"epoch": -1}, {"expected": -1}, {"max_outstanding": -1}])
def test_numbers_that_are_none_are_refused(stream: Stream, arguments: dict[str, Any]) -> None:
    """When the feed is made."""
    fields: dict[str, Any] = {"stream_id": 1, "epoch": 1, "expected": 0, "max_outstanding": 0}
    with pytest.raises(TypeError):
        DescriptorFeed(stream.map().reader(), **fields | arguments)


@pytest.mark.parametrize("seq", [100, 2**40, MAX_SEQ])
def test_a_descriptor_of_a_frame_that_the_ring_does_not_know_is_ignored(stream: Stream, seq: int) -> None:
    """One message of a stranger neither makes frames lost nor those that follow old."""
    feed, subscription = stream.feed(), stream.subscribe()
    stream.publish()
    stream.publish()
    stream.describe(seq)
    stream.publish()
    assert [frame.seq for frame in taken(feed, subscription)] == [0, 1, 2]
    assert drops_of(feed) == {}
    assert feed.ignored == 1
    assert feed.attention == 0
    stream.write(seq=200)
    stream.describe(200)  # a jump that the ring confirms is a gap
    assert [frame.seq for frame in taken(feed, subscription)] == [200]
    assert drops_of(feed) == {DropReason.GAP: 197}
