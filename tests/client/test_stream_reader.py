# SPDX-License-Identifier: Apache-2.0
"""Where reader and conductor meet: epochs that come and go, streams that are exchanged, and one book over all of them.

produced = received + lost, over epochs, remaps and pauses; decisions B27-B34.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorpool import aeron
from tensorpool._core import ConsumerBase, DropReason
from tensorpool.channel import Endpoint
from tensorpool.client.frame import Frame
from tensorpool.client.stream_reader import IMAGE_LOST, SEQ_WENT_BACK, ConsumerStats, StreamReader
from tensorpool.errors import TransportError
from tests.client.conftest import SECOND_NS, STREAM, Stream
from tests.support.processes import wait_until

NSLOTS = 8


def taken(reader: StreamReader) -> list[Frame]:
    """Everything that there is to deliver now, as a consumer takes it."""
    frames: list[Frame] = []
    with reader.lock:
        reader.apply()
        while reader.source is not None and (frame := reader.source.next()) is not None:
            frames.append(frame)
    return frames


def seqs(reader: StreamReader) -> list[int]:
    return [frame.seq for frame in taken(reader)]


def drops(reader: StreamReader) -> dict[DropReason, int]:
    return {reason: count for reason, count in reader.stats().drops.items() if count}


def counted(reader: StreamReader) -> int:
    stats = reader.stats()
    return stats.received + stats.lost


@pytest.fixture
def reader(stream: Stream) -> StreamReader:
    """Of a stream whose first epoch is mapped."""
    reader = StreamReader(0)
    reader.set_streams(stream.subscription, None)
    reader.adopt(stream.mapped())
    return reader


@pytest.fixture
def second(stream: Stream, shm_dir: Path) -> Stream:
    """The epoch after it, on the same descriptor stream."""
    return stream.later(shm_dir)


class Short(ConsumerBase):
    """A consumer that has only the native path: a poll that it cannot serve returns its arguments."""

    def _poll(self, *arguments: Any, **named: Any) -> Any:
        return arguments, named

    def _next(self) -> Any:
        raise StopIteration


def test_a_frame_that_is_there_takes_the_native_path(stream: Stream, reader: StreamReader) -> None:
    """To poll and to a loop; what is not there yet, and whatever else is asked, is handed on unchanged."""
    short = Short(reader, is_simple=True)
    assert (short.poll(), short.poll(0.5), short.poll(timeout=2)) == (((), {}), ((0.5,), {}), ((), {"timeout": 2}))
    for _ in range(6):
        stream.publish()
    assert [frame.seq for frame in (short.poll(), short.poll(9.0), short.poll(timeout=9.0)) if frame is not None] == [
        0,
        1,
        2,
    ]
    assert short.poll(1, 2) == ((1, 2), {})  # type: ignore[call-arg]
    assert [frame.seq for frame in short] == [3, 4, 5]
    assert list(short) == []
    assert reader.stats().received == 6


def test_a_poll_that_needs_attention_does_not_take_the_native_path(stream: Stream, reader: StreamReader) -> None:
    """Progress callbacks, an invoked conductor, an epoch that ended, a media driver that is gone."""
    careful, short = Short(reader, is_simple=False), Short(reader, is_simple=True)
    stream.publish()
    assert careful.poll() == ((), {})
    stream.subscription.close()
    assert short.poll() == ((), {})
    assert reader.source is not None
    held = sys.getrefcount(reader.source)
    source = reader.source
    reader.source = None
    left = sys.getrefcount(source)
    assert left == held  # ours instead of the reader's
    assert short.poll() == ((), {})


def test_a_consumer_that_was_never_made_hands_everything_on(reader: StreamReader) -> None:
    """A subclass that forgot super().__init__ is a mistake, not a crash."""

    class Forgetful(Short):
        def __init__(self) -> None:
            pass

    assert Forgetful().poll() == ((), {})
    assert list(Forgetful()) == []
    with pytest.raises(TypeError):
        ConsumerBase(None, is_simple=True)  # type: ignore[arg-type]


def test_before_anything_is_mapped_there_is_nothing() -> None:
    """No frames, no counts, no attention."""
    reader = StreamReader(None)
    assert taken(reader) == []
    assert reader.stats() == ConsumerStats(0, {}, None, 0, 0, 0, 0)
    assert (reader.attention, reader.image_count, reader.last_seq_seen) == (0, 0, 0)


def test_a_mapped_epoch_delivers_its_frames(stream: Stream, reader: StreamReader) -> None:
    """From the first descriptor on: what was before it is not counted as lost."""
    stream.write()
    stream.publish()
    stream.publish()
    assert seqs(reader) == [1, 2]
    stats = reader.stats()
    assert (stats.received, stats.lost, stats.epoch, stats.epochs, stats.last_seq_seen) == (2, 0, 1, 1, 2)


@pytest.mark.spec("WIRE-15.21-10")
@pytest.mark.parametrize("missing", ["memory", "descriptors"])
def test_without_memory_or_descriptors_nothing_is_delivered(stream: Stream, missing: str) -> None:
    """Both are needed."""
    reader = StreamReader(0)
    if missing == "memory":
        reader.set_streams(stream.subscription, None)
    else:
        reader.adopt(stream.mapped())
    stream.publish()
    assert taken(reader) == []


@pytest.mark.spec("WIRE-15.21-07", "WIRE-15.21-09", "WIRE-15.18-03")
def test_the_next_epoch_counts_from_0(stream: Stream, second: Stream, reader: StreamReader) -> None:
    """What the old one had left is EPOCH_ENDED, what the new one had before it was mapped is UNMAPPED."""
    stream.publish()
    assert seqs(reader) == [0]
    stream.publish()
    stream.write()
    second.write()
    second.write()
    reader.suspend()
    assert taken(reader) == []
    assert reader.stats().epoch is None
    reader.adopt(second.mapped())
    second.publish()
    frames = taken(reader)
    assert [(frame.epoch, frame.seq, frame.dropped_before) for frame in frames] == [(2, 2, 4)]
    assert drops(reader) == {DropReason.EPOCH_ENDED: 2, DropReason.UNMAPPED: 2}
    stats = reader.stats()
    assert (stats.epoch, stats.epochs, stats.last_seq_seen) == (2, 2, 2)
    assert stats.descriptors_ignored == 1  # of the old epoch, still in the log
    assert counted(reader) == 3 + 3


@pytest.mark.spec("WIRE-15.21-10")
def test_what_was_described_before_its_epoch_was_mapped_is_dropped(
    stream: Stream, second: Stream, reader: StreamReader
) -> None:
    """Even where it could be read by now."""
    stream.publish()
    assert seqs(reader) == [0]
    reader.suspend()
    second.publish()
    second.publish()
    reader.adopt(second.mapped())
    second.publish()
    assert seqs(reader) == [2]
    assert drops(reader) == {DropReason.UNMAPPED: 2}


def test_an_epoch_may_follow_without_a_pause(stream: Stream, second: Stream, reader: StreamReader) -> None:
    """Adopting is enough."""
    stream.publish()
    assert seqs(reader) == [0]
    reader.adopt(second.mapped())
    second.publish()
    assert seqs(reader) == [0]
    assert (drops(reader), reader.stats().epochs) == ({}, 2)


def test_an_epoch_of_which_nothing_was_seen_is_counted_too(
    stream: Stream, second: Stream, reader: StreamReader, shm_dir: Path
) -> None:
    """All of it, if it was not the first."""
    stream.publish()
    assert seqs(reader) == [0]
    reader.adopt(second.mapped())
    for _ in range(3):
        second.write()
    third = second.later(shm_dir)
    reader.adopt(third.mapped())
    assert drops(reader) == {DropReason.EPOCH_ENDED: 3}
    assert counted(reader) == 4


@pytest.mark.parametrize("pause", ["suspended", "let go", "neither"])
def test_the_same_epoch_goes_on_where_it_was(stream: Stream, reader: StreamReader, pause: str) -> None:
    """Mapped again after a pause, short or long: each frame counts once."""
    stream.publish()
    stream.publish()
    assert seqs(reader) == [0, 1]
    stream.publish()
    if pause != "neither":
        reader.suspend()
    stream.publish()
    if pause == "let go":
        reader.let_go()
    stream.publish()
    reader.adopt(stream.mapped())
    stream.publish()
    delivered = seqs(reader)
    assert delivered[-1] == 5
    assert reader.stats().epochs == 1
    assert counted(reader) == 6


def test_what_is_let_go_is_counted_at_once(stream: Stream, reader: StreamReader) -> None:
    """And its memory released; letting go of nothing is nothing."""
    stream.publish()
    assert seqs(reader) == [0]
    stream.publish()
    reader.suspend()
    assert drops(reader) == {}
    reader.let_go()
    assert drops(reader) == {DropReason.EPOCH_ENDED: 1}
    reader.let_go()
    assert counted(reader) == 2


def test_a_seq_that_went_back_is_begun_anew(stream: Stream, reader: StreamReader) -> None:
    """B29: nothing is known about the seqs of this epoch, so nothing before the first is missing."""
    for _ in range(5):
        stream.publish()
    assert len(seqs(reader)) == 5
    stream.describe(1)
    assert seqs(reader) == []
    assert reader.attention & SEQ_WENT_BACK
    reader.forget_seqs()
    reader.suspend()
    reader.adopt(stream.mapped())
    assert reader.attention == 0
    stream.describe(2)
    stream.describe(3)
    assert seqs(reader) == [2, 3]
    assert drops(reader) == {}


# --- settings


def test_a_rate_holds_across_epochs(stream: Stream, second: Stream, reader: StreamReader) -> None:
    """Set before or after the epoch was mapped; 0 lifts it."""
    reader.set_rate(1)
    for at_s in (1.0, 1.5, 2.0):
        stream.describe(stream.write(), timestamp_ns=int(at_s * SECOND_NS))
    assert seqs(reader) == [0, 2]
    reader.adopt(second.mapped())
    for at_s in (1.0, 1.5, 2.0):
        second.describe(second.write(), timestamp_ns=int(at_s * SECOND_NS))
    assert seqs(reader) == [0, 2]
    reader.set_rate(0)
    for at_s in (2.1, 2.2):
        second.describe(second.write(), timestamp_ns=int(at_s * SECOND_NS))
    assert seqs(reader) == [3, 4]
    assert drops(reader) == {DropReason.RATE_LIMITED: 2}


@pytest.mark.spec("WIRE-15.4-05")
@pytest.mark.parametrize(("nslots", "limit"), [(4, 3), (256, 192), (512, 256), (1024, 256)])
def test_without_a_limit_of_its_own_a_consumer_may_be_256_frames_behind(
    shm_dir: Path, transport: aeron.Client, nslots: int, limit: int
) -> None:
    """In a smaller ring three quarters of it; one frame more, and it goes on with the newest."""
    stream = Stream(shm_dir, transport, nslots=nslots, pools=((1, 64),))
    reader = StreamReader(None)
    reader.set_streams(stream.subscription, None)
    reader.adopt(stream.mapped())
    for _ in range(limit):
        stream.publish()
    assert seqs(reader) == list(range(limit))
    for _ in range(limit + 1):
        stream.publish()
    assert seqs(reader) == [2 * limit]
    assert drops(reader) == {DropReason.RESYNC: limit}
    stream.publication.close()


@pytest.mark.spec("WIRE-15.4-03", "WIRE-15.4-04")
@pytest.mark.parametrize(("limit", "is_resynced"), [(None, True), (3, True), (0, False), (100, False)])
def test_how_far_behind_is_too_far(stream: Stream, limit: int | None, is_resynced: bool) -> None:
    """As it was given; by default before the ring's end."""
    reader = StreamReader(limit)
    reader.set_streams(stream.subscription, None)
    reader.adopt(stream.mapped())
    stream.publish()
    assert seqs(reader) == [0]
    for _ in range(NSLOTS):
        stream.publish()
    assert seqs(reader) == ([NSLOTS] if is_resynced else list(range(1, NSLOTS + 1)))
    assert counted(reader) == NSLOTS + 1
    assert reader.stats().drops_gap == (NSLOTS - 1 if is_resynced else 0)


# --- streams


def test_descriptors_may_come_from_another_stream(stream: Stream, reader: StreamReader) -> None:
    """B34: what both describe counts once, and the old subscription is closed."""
    stream.publish()
    stream.publish()
    assert seqs(reader) == [0, 1]
    other = stream.subscribe()
    stream.publish()  # on both
    old = stream.subscription
    assert seqs(reader) == [2]
    reader.switch(other, is_throttled=False)
    stream.publish()
    assert seqs(reader) == [3]
    assert old.is_closed
    assert drops(reader) == {}


def test_what_was_queued_before_a_switch_does_not_end_it(stream: Stream, reader: StreamReader) -> None:
    """B34: frames that the old stream described come first; descriptors that the other one repeats are no step back."""
    other = stream.subscribe()
    for _ in range(4):
        stream.publish()  # on both
    with reader.lock:
        reader.apply()
        source = reader.source
        assert source is not None
        assert source.feed.wait(source.descriptors, SECOND_NS)  # all of them are queued
        assert source.next() is not None
    reader.switch(other, is_throttled=False)
    stream.publish()
    assert seqs(reader) == [1, 2, 3, 4]
    assert not reader.attention & SEQ_WENT_BACK
    assert drops(reader) == {}


def test_an_image_that_was_lost_before_a_remap_is_still_missing_after_it(
    stream: Stream, second: Stream, reader: StreamReader
) -> None:
    """Who was passed over for being slow, and lost the lease as well, must know that it has to listen anew."""
    stream.publish()
    assert seqs(reader) == [0]
    stream.publication.close()

    def is_noticed() -> bool:
        taken(reader)
        return bool(reader.attention & IMAGE_LOST)

    wait_until(is_noticed, "the image goes")
    reader.suspend()
    assert reader.attention & IMAGE_LOST
    reader.adopt(second.mapped())
    assert reader.attention & IMAGE_LOST
    anew = stream.client.add_subscription("aeron:ipc", stream.aeron_stream_id)
    reader.switch(anew, is_throttled=False)
    assert not reader.attention & IMAGE_LOST


def test_frames_that_a_producer_published_after_we_left_its_epoch_are_counted(
    stream: Stream, second: Stream, reader: StreamReader
) -> None:
    """A producer may hear of the end of its epoch later than its consumers: produced is still received plus lost."""
    stream.publish()
    assert seqs(reader) == [0]
    reader.adopt(second.mapped())
    assert counted(reader) == 1
    stream.publish()
    stream.publish()
    assert drops(reader) == {DropReason.EPOCH_ENDED: 2}
    second.publish()
    assert seqs(reader) == [0]
    stream.publish()
    assert counted(reader) == 5
    reader.let_go()
    assert counted(reader) == 5
    reader.close()
    assert counted(reader) == 5
    assert drops(reader) == {DropReason.EPOCH_ENDED: 3}


def test_a_throttled_stream_counts_no_gaps_in_this_epoch_and_the_next(
    stream: Stream, second: Stream, reader: StreamReader
) -> None:
    """B28: until it is exchanged for one that is not."""
    stream.publish()
    assert seqs(reader) == [0]
    reader.switch(stream.subscribe(), is_throttled=True)
    stream.write()
    stream.publish()
    assert seqs(reader) == [2]
    reader.adopt(second.mapped())
    second.write()
    second.publish()
    assert seqs(reader) == [1]
    assert drops(reader) == {DropReason.RATE_LIMITED: 2}
    reader.switch(stream.subscribe(), is_throttled=False)
    second.write()
    second.publish()
    assert seqs(reader) == [3]
    assert drops(reader) == {DropReason.RATE_LIMITED: 2, DropReason.GAP: 1}


def test_a_new_link_brings_new_streams(stream: Stream, reader: StreamReader) -> None:
    """Between two links there are none."""
    stream.publish()
    assert seqs(reader) == [0]
    reader.set_streams(None, None)
    stream.publish()
    assert seqs(reader) == []
    reader.set_streams(stream.subscribe(), None)
    stream.publish()
    assert seqs(reader)[-1] == 2  # whether the new one also has what came before it is Aeron's choice
    assert counted(reader) == 3


def test_the_progress_stream_is_exchanged_once(stream: Stream, reader: StreamReader) -> None:
    """The same endpoint again is no reason to subscribe again."""
    made: list[aeron.Subscription] = []

    def subscribe() -> aeron.Subscription:
        made.append(stream.subscribe())
        return made[-1]

    endpoint = Endpoint("aeron:ipc", 5)
    reader.switch_progress(endpoint, subscribe)
    reader.switch_progress(endpoint, subscribe)
    assert len(made) == 1
    assert reader.progress is made[0]
    reader.switch_progress(Endpoint("aeron:ipc", 6), subscribe)
    assert reader.progress is made[1]
    assert made[0].is_closed


def test_a_progress_stream_that_could_not_be_opened_is_opened_when_asked_again(
    stream: Stream, reader: StreamReader
) -> None:
    """The failure reaches the caller and is not taken for a subscription."""
    endpoint = Endpoint("aeron:ipc", 5)

    def fail() -> aeron.Subscription:
        raise TransportError("no such channel")

    with pytest.raises(TransportError):
        reader.switch_progress(endpoint, fail)
    assert reader.progress is None
    reader.switch_progress(endpoint, stream.subscribe)
    assert reader.progress is not None


def test_a_publisher_that_went_asks_for_attention_until_it_is_forgotten(stream: Stream, reader: StreamReader) -> None:
    """The conductor looks whether it was us who were too slow."""
    assert reader.image_count == 1
    stream.publication.close()
    wait_until(lambda: not taken(reader) and reader.attention & IMAGE_LOST, "the image is gone")
    assert reader.image_count == 0
    reader.forget_attention(IMAGE_LOST)
    assert reader.attention == 0


# --- between threads


def test_a_sleeping_reader_comes_out_for_a_change(stream: Stream, second: Stream, reader: StreamReader) -> None:
    """The conductor does not wait for it, and the reader makes the change."""
    stream.publish()
    assert seqs(reader) == [0]
    asleep, woken = threading.Event(), list[bool]()

    def sleep() -> None:
        with reader.lock:
            source = reader.source
            assert source is not None
            asleep.set()
            woken.append(source.feed.wait(source.descriptors, 60 * SECOND_NS))

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    asleep.wait()
    reader.adopt(second.mapped())  # returns although the reader has the lock
    sleeper.join(timeout=30)
    assert woken == [True]
    assert seqs(reader) == []  # the change is made before anything is looked for
    second.publish()
    assert seqs(reader) == [0]
    assert reader.stats().epoch == 2


def test_a_change_while_a_thread_reads_waits_for_its_turn(stream: Stream, reader: StreamReader) -> None:
    """The thread that has the lock next makes it."""
    with reader.lock:
        reader.suspend()
        assert reader.mapped is not None
        assert len(reader.pending) == 1
    reader.apply_pending()
    assert reader.mapped is None
    assert not reader.pending


def test_closing_is_the_end_of_frames_and_not_of_counts(stream: Stream, reader: StreamReader) -> None:
    """What was not read stays uncounted: no caller asked for it."""
    stream.publish()
    stream.publish()
    stream.publish()
    with reader.lock:
        assert reader.source is not None
        assert reader.source.next() is not None
    reader.close()
    assert reader.is_closed
    assert taken(reader) == []
    assert (reader.stats().received, drops(reader)) == (1, {})


def test_idle_means_nothing_since_the_last_time(stream: Stream, reader: StreamReader) -> None:
    """Asked twice without a frame between."""
    assert not reader.is_idle
    assert reader.is_idle
    stream.publish()
    assert seqs(reader) == [0]
    assert not reader.is_idle
    assert reader.is_idle


def test_stats_of_all_kinds_add_up_to_what_qos_reports(stream: Stream, reader: StreamReader) -> None:
    """Gaps and late ones by their own sums, the rest in `lost` alone."""
    stream.publish()
    stream.write()
    stream.publish()
    stream.describe(3)
    lying = 4
    stream.write(np.zeros(4, np.uint8), seq=lying)
    stream.poke(lying, 72, b"\x63\x00")  # a dtype that is none
    stream.describe(lying)
    assert seqs(reader) == [0, 2]
    stats = reader.stats()
    assert (stats.drops_gap, stats.drops_late, stats.lost) == (1, 1, 3)
    assert stats.drops[DropReason.BAD_DTYPE] == 1


def test_frames_of_an_epoch_that_is_over_stay_what_they_were(
    stream: Stream, second: Stream, reader: StreamReader
) -> None:
    """Theirs is the mapping that they came from."""
    stream.publish(np.arange(3, dtype=np.uint8))
    (frame,) = taken(reader)
    reader.adopt(second.mapped())
    reader.close()
    assert (frame.epoch, frame.stream_id, list(frame.array)) == (1, STREAM, [0, 1, 2])
    assert frame.is_intact()
