# SPDX-License-Identifier: Apache-2.0
"""The native publisher: slot, copy, commit and descriptor in one call, and what becomes of descriptors.

Wire §8.3, §9, §10.2.1, §15.18; decision A20.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorpool import aeron
from tensorpool._core import MAX_SEQ, FramePublisher, ProducerBase, Route, SlotFrame, monotonic_ns
from tensorpool.errors import LocalProtocolError
from tensorpool.shm import layout_of
from tensorpool.wire import Message, decode
from tensorpool.wire.control import FrameDescriptor
from tests.client.conftest import IPC, STREAM, Stream
from tests.support.processes import wait_until

EVER = 2**63
FRAME = np.arange(6, dtype=np.float32).reshape(2, 3)


class Bench:
    """A publisher, its descriptors and its ring."""

    def __init__(self, stream: Stream, *, with_publish_time: bool = False) -> None:
        self.stream = stream
        self.publisher = FramePublisher(
            stream.writer, stream.publication, stream.stream_id, stream.epoch, with_publish_time
        )
        self.reader = stream.map().reader()

    def publish(self, array: np.ndarray[Any, Any] = FRAME, **options: Any) -> int | None:
        return self.publisher.publish(layout_of(array), array, **options)

    def received(self) -> list[FrameDescriptor]:
        messages: list[Message] = []
        self.stream.subscription.poll(lambda data, info: messages.append(decode(data)), 1000)
        return [message for message in messages if isinstance(message, FrameDescriptor)]

    def slot(self, seq: int) -> SlotFrame:
        slot = self.reader.read(seq)
        assert isinstance(slot, SlotFrame)
        return slot


@pytest.fixture
def bench(stream: Stream) -> Bench:
    return Bench(stream)


@pytest.mark.spec("WIRE-10.2.1-01", "WIRE-8.3-02", "WIRE-15.18-01")
def test_frames_are_written_and_described_with_growing_seqs(bench: Bench) -> None:
    """One descriptor each, of the slot that holds it."""
    assert [bench.publish(FRAME + number) for number in range(20)] == list(range(20))
    received = bench.received()
    assert [(it.stream_id, it.epoch, it.seq) for it in received] == [(STREAM, 1, seq) for seq in range(20)]
    for seq in range(12, 20):
        assert bench.slot(seq).slot == seq % 8
    assert (bench.publisher.bytes, bench.stream.writer.written) == (20 * 24, 20)
    assert (bench.publisher.unheard, bench.publisher.back_pressured, bench.publisher.is_broken) == (0, 0, False)


@pytest.mark.spec("WIRE-10.2.1-03", "WIRE-10.2.1-04", "WIRE-15.7-01", "WIRE-10.3.2-03")
def test_a_frame_carries_what_it_was_given(bench: Bench) -> None:
    """Capture time in the slot, now by default; version and trace in both places that have one."""
    before = monotonic_ns()
    bench.publish()
    bench.publish(timestamp_ns=5, meta_version=3, trace_id=9)
    after = monotonic_ns()
    assert before <= bench.slot(0).timestamp_ns <= after
    assert (bench.slot(1).timestamp_ns, bench.slot(1).meta_version) == (5, 3)
    first, second = bench.received()
    assert (first.timestamp_ns, first.meta_version, first.trace_id) == (None, None, None)
    assert (second.timestamp_ns, second.meta_version, second.trace_id) == (None, 3, 9)


@pytest.mark.spec("WIRE-15.7-02")
def test_a_capture_time_that_goes_back_is_refused_where_descriptors_carry_a_time(stream: Stream) -> None:
    """Before anything is written: the seq stays free. 0 and all ones are no time; without the other time it is free."""
    bench = Bench(stream, with_publish_time=True)
    for time_ns in (5, 5, 0, 2**64 - 1, 6):
        assert bench.publish(timestamp_ns=time_ns) is not None
    for time_ns in (5, 1):
        with pytest.raises(ValueError, match="goes back"):
            bench.publish(timestamp_ns=time_ns)
        with pytest.raises(ValueError, match="goes back"):
            bench.publisher.check_time(time_ns)
    assert bench.publish(timestamp_ns=6) == 5
    assert [it.seq for it in bench.received()] == [0, 1, 2, 3, 4, 5]


def test_without_a_time_of_publishing_capture_times_are_the_callers(bench: Bench) -> None:
    """Replays publish in their own order."""
    assert [bench.publish(timestamp_ns=time_ns) for time_ns in (9, 5)] == [0, 1]
    bench.publisher.check_time(1)


@pytest.mark.spec("WIRE-15.7-02")
def test_the_time_of_publishing_is_sent_where_it_is_wanted(stream: Stream) -> None:
    """Taken when the descriptor goes out, after the commit: never before, and growing."""
    bench = Bench(stream, with_publish_time=True)
    stamps = []
    for _ in range(5):
        before = monotonic_ns()
        bench.publish(timestamp_ns=1)
        (descriptor,) = bench.received()
        assert descriptor.timestamp_ns is not None
        assert before <= descriptor.timestamp_ns <= monotonic_ns()
        stamps.append(descriptor.timestamp_ns)
    assert stamps == sorted(stamps)


@pytest.mark.spec("WIRE-9-04", "WIRE-9-03")
def test_what_no_pool_holds_is_dropped_and_takes_no_seq(bench: Bench) -> None:
    """No message about it is sent."""
    assert bench.publish(np.zeros(4096, np.uint8)) == 0
    assert bench.publish(np.zeros(4097, np.uint8)) is None
    assert bench.publish(np.zeros(256, np.uint8)) == 1
    assert [it.seq for it in bench.received()] == [0, 1]
    pools = [bench.reader.pools[bench.slot(seq).pool][0] for seq in (0, 1)]
    assert pools == [2, 1]
    assert bench.publisher.bytes == 4096 + 256


def test_a_seq_of_the_callers_own_may_skip_and_never_goes_back(bench: Bench) -> None:
    """For those who number their frames themselves; refused before anything is written or sent."""
    assert bench.publish(seq=5) == 5
    assert bench.publish() == 6
    assert bench.publish(seq=100) == 100
    with pytest.raises(ValueError, match="goes back"):
        bench.publish(seq=100)
    with pytest.raises(ValueError, match="2\\^63"):
        bench.publish(seq=MAX_SEQ + 1)
    assert bench.publish(seq=MAX_SEQ) == MAX_SEQ
    assert [it.seq for it in bench.received()] == [5, 6, 100, MAX_SEQ]


def test_a_claim_is_committed_and_described(bench: Bench) -> None:
    """After it was filled in place; the bytes are the caller's to count."""
    layout = layout_of(FRAME)
    place = bench.stream.writer.begin(0, layout)
    assert place is not None
    with pytest.raises(LocalProtocolError, match="claimed"):
        bench.publish()
    assert bench.received() == []
    np.ndarray((2, 3), np.float32, place[0], place[1])[:] = FRAME
    bench.publisher.commit(timestamp_ns=7, meta_version=2, trace_id=4, bytes=24)
    (descriptor,) = bench.received()
    assert (descriptor.seq, descriptor.meta_version, descriptor.trace_id) == (0, 2, 4)
    assert (bench.slot(0).timestamp_ns, bench.publisher.bytes) == (7, 24)
    with pytest.raises(LocalProtocolError, match="no claim"):
        bench.publisher.commit()
    assert bench.received() == []


class Short(ProducerBase):
    """A producer that has only the short way: what cannot go it is None."""

    def __init__(self, bench: Bench) -> None:
        self.route = Route()
        self.route.publisher, bench.publisher.until_ns = bench.publisher, EVER
        self.others: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        super().__init__(self.route)

    def _publish(self, *arguments: Any, **named: Any) -> None:
        self.others.append((arguments, named))


def test_an_array_like_the_last_one_takes_the_native_path(bench: Bench) -> None:
    """Same shape, dtype and order: one call. Anything else returns None, and nothing is written."""
    short = Short(bench)
    assert short.publish(FRAME) is None  # there is no last one yet
    bench.publish(FRAME)
    assert short.publish(FRAME + 1, timestamp_ns=6, meta_version=2, trace_id=3) == 1
    for other in (FRAME.astype(np.int32), FRAME.reshape(3, 2), FRAME.ravel(), FRAME.T, np.asfortranarray(FRAME)):
        assert short.publish(other) is None
    assert short.publish(np.zeros((4, 3), np.float32)[::2]) is None
    assert short.publish(FRAME.astype(">f4")) is None
    assert short.publish(memoryview(FRAME)) is None
    assert short.publish(np.ma.masked_array(FRAME)) is None
    assert [(it.seq, it.trace_id) for it in bench.received()] == [(0, None), (1, 3)]
    assert (bench.slot(1).timestamp_ns, bench.slot(1).meta_version) == (6, 2)
    bench.publish(np.asfortranarray(FRAME))
    assert short.publish(FRAME) is None
    assert short.publish(np.asfortranarray(FRAME)) == 3


def test_after_the_leases_end_nothing_goes_the_short_way(bench: Bench) -> None:
    """The caller looks into it; nothing was written."""
    bench.publish(FRAME)
    short = Short(bench)
    bench.publisher.until_ns = monotonic_ns()
    assert short.publish(FRAME) is None
    assert bench.stream.next_seq == 1
    bench.publisher.until_ns = EVER
    assert short.publish(FRAME) == 1
    assert 0 < bench.slot(1).timestamp_ns <= monotonic_ns()


def test_without_a_publisher_or_with_private_streams_nothing_goes_the_short_way(bench: Bench) -> None:
    """Memory was lost, or a consumer wants its descriptors elsewhere: Python handles it. What is lost is released."""
    bench.publish(FRAME)
    short = Short(bench)
    short.route.is_plain = False
    assert short.publish(FRAME) is None
    short.route.is_plain = True
    held = sys.getrefcount(bench.publisher)
    short.route.publisher = None
    left = sys.getrefcount(bench.publisher)
    assert left == held - 1
    assert short.publish(FRAME) is None
    short.route.publisher = bench.publisher
    assert short.publish(FRAME) == 1


def test_the_route_says_which_metadata_applies_unless_the_frame_does(bench: Bench) -> None:
    bench.publish(FRAME)
    short = Short(bench)
    short.route.meta_version = 5
    assert (short.publish(FRAME), short.publish(FRAME, meta_version=0), short.publish(FRAME, meta_version=None)) == (
        1,
        2,
        3,
    )
    assert [bench.slot(seq).meta_version for seq in (1, 2, 3)] == [5, 0, 5]


@pytest.mark.parametrize(
    "named",
    [
        {"timestamp_ns": -1},
        {"timestamp_ns": 2**64},
        {"timestamp_ns": 1.5},
        {"meta_version": 2**32},
        {"trace_id": 2**64},
        {"seq": 7},
        {"parents": (1,)},
        {"colour": 3},
        {"trace_id": 3, "timestamp_ns": "now"},
    ],
)
def test_what_the_short_way_cannot_do_is_handed_on_unchanged(bench: Bench, named: dict[str, Any]) -> None:
    """Wishes, mistakes and numbers out of range; no error of the attempt is left behind."""
    bench.publish(FRAME)
    short = Short(bench)
    assert short.publish(FRAME, **named) is None
    assert [(len(arguments), rest) for arguments, rest in short.others] == [(1, named)]
    assert bench.stream.next_seq == 1
    for arguments in ((), (FRAME, 3)):
        assert short.publish(*arguments, **named) is None
    assert [len(arguments) for arguments, _ in short.others] == [1, 0, 2]


def test_a_producer_that_was_never_made_hands_everything_on() -> None:
    """A subclass that forgot super().__init__ is a mistake, not a crash."""

    class Forgetful(ProducerBase):
        def __init__(self) -> None:
            pass

        def _publish(self, array: Any) -> str:
            return "handed on"

    assert Forgetful().publish(FRAME) == "handed on"
    with pytest.raises(TypeError):
        ProducerBase(None)  # type: ignore[arg-type]


def test_bytes_that_are_not_the_layouts_are_refused(bench: Bench) -> None:
    """Before anything is written or sent."""
    with pytest.raises(ValueError, match="24"):
        bench.publisher.publish(layout_of(FRAME), np.zeros(7, np.float32))
    with pytest.raises((ValueError, BufferError)):
        bench.publisher.publish(layout_of(FRAME), np.zeros((4, 3), np.float32)[::2])
    assert bench.received() == []
    assert bench.stream.next_seq == 0


def test_a_descriptor_without_a_subscriber_is_counted(shm_dir: Path, transport: aeron.Client, stream: Stream) -> None:
    """The frame stands in the ring all the same."""
    lonely = transport.add_publication(IPC, stream.aeron_stream_id + 500_000, exclusive=True)
    bench = Bench(stream)
    publisher = FramePublisher(stream.writer, lonely, STREAM, stream.epoch)
    assert publisher.publish(layout_of(FRAME), FRAME) == 0
    assert (publisher.unheard, publisher.back_pressured, publisher.is_broken) == (1, 0, False)
    assert bench.slot(0).seq == 0


@pytest.mark.spec("WIRE-15.4-02", "WIRE-15.4-01")
def test_a_full_log_costs_descriptors_and_does_not_delay_the_producer(bench: Bench) -> None:
    """A consumer that does not poll: frames go on, their descriptors are counted as lost."""
    published = 0
    while bench.publisher.back_pressured < 5:
        bench.publish()
        published += 1
        assert published < 10_000
    lost = bench.publisher.back_pressured
    received: list[int] = []

    def is_all() -> bool:
        received.extend(it.seq for it in bench.received())
        return len(received) == published - lost

    wait_until(is_all, "what was sent is received")
    assert received == sorted(set(received))
    assert bench.slot(published - 1).seq == published - 1


def test_a_closed_publication_breaks_only_the_telling(bench: Bench) -> None:
    """The media driver may be gone; the frame stays in the ring, and the owner gets the error."""
    bench.stream.publication.close()
    assert bench.publish() == 0
    assert bench.publisher.is_broken
    assert bench.publisher.unheard == 1
    assert bench.slot(0).seq == 0
    assert bench.publish() == 1


@pytest.mark.parametrize(
    "options", [{"timestamp_ns": -1}, {"meta_version": 2**32}, {"trace_id": -1}, {"trace_id": 2**64}, {"seq": -1}]
)
def test_numbers_that_do_not_fit_are_refused(bench: Bench, options: dict[str, Any]) -> None:
    """Nothing is written or sent."""
    with pytest.raises((TypeError, ValueError, OverflowError)):
        bench.publish(**options)
    assert bench.received() == []
    assert bench.stream.next_seq == 0
