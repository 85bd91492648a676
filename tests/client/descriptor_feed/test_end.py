# SPDX-License-Identifier: Apache-2.0
"""Where a feed ends, and where the next one of the epoch continues."""

from __future__ import annotations

from typing import Any

import pytest

from tensorpool._core import MAX_SEQ, DescriptorFeed, DropReason, is_gap, is_late
from tensorpool.client.stream_reader import STOPPED
from tests.client.conftest import Stream, drops_of, taken
from tests.client.descriptor_feed.conftest import seqs, total


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
def test_a_feed_that_received_nothing_is_where_it_began(stream: Stream, expected: int | None) -> None:
    """Whatever the ring holds."""
    for _ in range(3):
        stream.write()
    feed = stream.feed(expected)
    assert feed.finish() == expected
    assert drops_of(feed) == {}


@pytest.mark.spec("WIRE-15.21-10")
def test_descriptors_that_came_while_nothing_was_mapped_are_discarded(stream: Stream) -> None:
    """§15.21: dropped, even if it could be read by now; it is missing before the first frame that comes later."""
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
    """Counted once, under its reason, and reported with the next one together with what was lost before it."""
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


def test_losses_of_the_epoch_before_are_reported_with_the_first_frame(stream: Stream) -> None:
    """They are added to its own."""
    feed = stream.feed(expected=0)
    feed.carry_lost(5)
    assert feed.lost == 5
    stream.write()
    stream.publish()
    (frame,) = taken(feed, stream.subscription)
    assert frame.dropped_before == 6
    assert feed.lost == 0


def test_reasons_are_reported_by_name() -> None:
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
