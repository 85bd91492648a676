# SPDX-License-Identifier: Apache-2.0
"""Which frames a feed skips, and how it delivers the newest one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensorpool import aeron
from tensorpool._core import DropReason, is_gap
from tests.client.conftest import SECOND_NS, Stream, drops_of, taken
from tests.client.descriptor_feed.conftest import FRAME, NSLOTS, seqs, total

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
    """A reader of large frames takes long: the frame that is next in line may be about to go."""
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


@pytest.mark.spec("WIRE-11-05")
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
    """From the ring itself: its descriptor was sent before the feed subscribed."""
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


def test_losses_before_the_newest_frame_are_reported_with_it(stream: Stream) -> None:
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
    """A caller that asks for the newest frame gets it."""
    feed = stream.feed()
    feed.set_min_interval_ns(3600 * SECOND_NS)
    stream.publish()
    stream.publish()
    assert seqs(feed, stream) == [0]
    frame = feed.latest(stream.subscription)
    assert frame is not None
    assert frame.seq == 1
    assert total(feed) == 2
