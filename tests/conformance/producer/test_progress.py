# SPDX-License-Identifier: Apache-2.0
"""When a producer sends FrameProgress, and what it says. Wire §10.2, §15.7, §15.14."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

import tensorpool as tp
from tensorpool.client import Producer
from tensorpool.client.progress import BURST
from tensorpool.wire.control import FrameProgress, FrameProgressState
from tests.conformance.producer.conftest import (
    COMPLETE,
    PROGRESS,
    STARTED,
    busy_until,
    descriptors,
    fence,
    fill,
    progress_of,
)
from tests.support.driver_client import new_client_id
from tests.support.wire_consumer import MappedStream, WireConsumer


@pytest.mark.spec("WIRE-10.2.2-02", "WIRE-10.2.2-03", "WIRE-10.2.2-04", "WIRE-10.2.2-16", "WIRE-10.2.2-18")
@pytest.mark.spec("WIRE-10.2.2-09", "WIRE-10.2.2-10", "WIRE-10.2.2-17", "WIRE-8.2-08", "WIRE-10.2.2-19")
def test_a_frame_is_started_makes_progress_and_is_complete(
    peer: WireConsumer, producer: Producer, mapped: MappedStream
) -> None:
    """In this order, once each but PROGRESS, bytes growing up to the payload's length; each frame has its own seq."""
    peer.say_hello(producer.stream_id, supports_progress=True)
    fence(peer, producer)
    first, _ = fill(producer)
    second, _ = fill(producer)
    assert second == first + 1
    for seq in (first, second):
        received = [it for it in progress_of(peer, producer, second) if it.seq == seq]
        states = [it.state for it in received]
        filled = [it.payload_bytes_filled for it in received]
        assert states == [STARTED, *[PROGRESS] * (len(received) - 2), COMPLETE]
        assert len(received) >= 3
        assert filled == sorted(filled)
        assert (filled[0], filled[-1]) == (0, 256 * 1024)
        assert all(it.epoch == producer.epoch for it in received)
        assert all(later - earlier >= 65_536 for earlier, later in itertools.pairwise(filled[:-1]))
        assert mapped.slot(seq).seq == seq
        assert mapped.slot(seq).progress_unit == 1
        assert mapped.slot(seq).progress_stride_bytes == 1024


@pytest.mark.spec("WIRE-10.2.2-06", "WIRE-10.2.2-07", "WIRE-10.2.2-16")
def test_the_header_is_there_while_a_frame_makes_progress(
    peer: WireConsumer, producer: Producer, mapped: MappedStream
) -> None:
    """B4: when STARTED is sent, the slot is in progress for that seq and already says how it is laid out."""
    peer.say_hello(producer.stream_id, supports_progress=True)
    fence(peer, producer)
    with producer.claim((64, 32), np.float32, progress="rows") as slot:
        started = peer.wait_for(FrameProgress, stream_id=producer.stream_id, state=STARTED).message
        found = mapped.slot(started.seq)
        assert started.seq == slot.seq
        assert found.seq_commit == started.seq << 1
        assert (found.shape, found.progress_unit, found.progress_stride_bytes) == ((64, 32), 1, 128)
        slot.array[:] = 1
    assert mapped.slot(started.seq).is_committed


@pytest.mark.spec("WIRE-10.2.2-16", "WIRE-10.2.2-17", "WIRE-10.2.2-10")
def test_a_frame_that_was_given_up_does_not_make_the_next_ones_progress_go_back(
    peer: WireConsumer, producer: Producer
) -> None:
    """What was reported of a seq stays true: per seq the bytes never shrink and STARTED comes once."""
    peer.say_hello(producer.stream_id, supports_progress=True)
    fence(peer, producer)
    slot = producer.claim((256, 1024), np.uint8, progress="rows")
    busy_until(time.monotonic_ns() + 1_000_000)
    slot.progress(rows=128)
    slot.abandon()
    seq, _ = fill(producer)
    stories: dict[int, list[FrameProgress]] = {}
    for it in progress_of(peer, producer, seq):
        stories.setdefault(it.seq, []).append(it)
    for story in stories.values():
        assert [it.state for it in story].count(STARTED) == 1, story
        filled = [it.payload_bytes_filled for it in story]
        assert filled == sorted(filled)


@pytest.mark.spec("WIRE-10.2.2-09", "WIRE-10.2.2-10")
def test_impossible_progress_is_refused(peer: WireConsumer, producer: Producer) -> None:
    """More than the frame has, or less than was reported before: an error, and nothing on the wire."""
    peer.say_hello(producer.stream_id, supports_progress=True)
    fence(peer, producer)
    with producer.claim((256, 1024), np.uint8, progress="rows") as slot:
        with pytest.raises((ValueError, tp.LocalProtocolError)):
            slot.progress(rows=257)
        with pytest.raises((ValueError, tp.LocalProtocolError)):
            slot.progress(bytes_filled=256 * 1024 + 1)
        busy_until(time.monotonic_ns() + 1_000_000)
        slot.progress(rows=128)
        with pytest.raises((ValueError, tp.LocalProtocolError)):
            slot.progress(rows=127)
    assert slot.seq is not None
    filled = [it.payload_bytes_filled for it in progress_of(peer, producer, slot.seq)]
    assert filled == [0, 128 * 1024, 256 * 1024]


@pytest.mark.spec("WIRE-10.2.2-01", "WIRE-10.2.2-21", "WIRE-10.2.2-04")
def test_without_a_consumer_that_wants_it_no_progress_is_sent(peer: WireConsumer, producer: Producer) -> None:
    """A consumer that does not support it gets none; the descriptor alone ends each frame."""
    peer.say_hello(producer.stream_id, supports_progress=False)
    fence(peer, producer)
    seq, _ = fill(producer)
    assert [it.seq for it in descriptors(peer, producer, seq)] == [seq]
    fence(peer, producer)
    assert peer.received(FrameProgress, stream_id=producer.stream_id) == []


@pytest.mark.spec("WIRE-10.1.2-14", "WIRE-10.2.2-22", "WIRE-10.2.2-19", "WIRE-10.1.2-06", "WIRE-10.1.2-07")
@pytest.mark.parametrize(
    ("hints", "smallest"),
    [
        ([{}], 65_536),
        ([{"progress_bytes_delta": 32_768}, {"progress_bytes_delta": 16_384}, {}], 16_384),
        ([{"progress_bytes_delta": 0}, {"progress_bytes_delta": 32_768}], 32_768),
        ([{"progress_bytes_delta": 1}], 4_096),
        ([{"progress_bytes_delta": 2**31}, {"progress_major_delta_units": 8}], 8_192),
    ],
    ids=["default", "smallest of three", "0 is no wish", "above the floor", "rows"],
)
def test_the_most_eager_wish_counts_above_the_floor(
    peer: WireConsumer, producer: Producer, hints: list[dict[str, int]], smallest: int
) -> None:
    """The smallest delta of all consumers, not below the producer's own minimum: each step tells so much, no less."""
    for hint in hints:
        peer.say_hello(producer.stream_id, consumer_id=new_client_id(), supports_progress=True, **hint)
    fence(peer, producer)
    seq, offered = fill(producer)
    sent = [it.payload_bytes_filled for it in progress_of(peer, producer, seq) if it.state is PROGRESS]
    expected = [filled for filled in offered if filled % smallest == 0]
    assert sent == expected


@pytest.mark.spec("WIRE-10.2.2-19", "WIRE-10.2.2-20", "WIRE-10.2.2-22")
@pytest.mark.parametrize(("asked_us", "shortest_us"), [(20_000, 20_000), (1, 200)], ids=["as asked", "the most"])
def test_progress_is_sent_at_most_once_an_interval(
    peer: WireConsumer, producer: Producer, asked_us: int, shortest_us: int
) -> None:
    """However often it is offered: no more than the frame's time allows, and after a burst 2000 a second at most."""
    hint = {"progress_interval_us": asked_us, "progress_bytes_delta": 4096}
    peer.say_hello(producer.stream_id, supports_progress=True, **hint)
    fence(peer, producer)
    start_ns = time.monotonic_ns()
    seq, offered = fill(producer, step=1024, pause_us=100)
    elapsed_us = (time.monotonic_ns() - start_ns) // 1000
    sent = [it for it in progress_of(peer, producer, seq) if it.state is PROGRESS]
    assert 1 <= len(sent) <= min(elapsed_us // shortest_us + 1, elapsed_us // 500 + BURST)
    assert len(offered) == 256


@pytest.mark.spec("WIRE-10.2.2-20")
def test_small_frames_do_not_flood_the_control_stream(peer: WireConsumer, producer: Producer) -> None:
    """Frames as fast as they can be claimed: 2000 messages a second of all states, and started frames are complete."""
    peer.repeated.append(peer.say_hello(producer.stream_id, supports_progress=True))
    fence(peer, producer)
    start_ns, count = time.monotonic_ns(), 0
    while time.monotonic_ns() - start_ns < 200_000_000:
        with producer.claim((4, 4), np.uint8, progress="rows"):
            count += 1
        if count % 50 == 0:
            peer.poll()
    elapsed_us = (time.monotonic_ns() - start_ns) // 1000
    with producer.claim((4, 4), np.uint8, progress="rows") as slot:
        assert slot.seq is not None
        peer.wait_for(FrameProgress, stream_id=producer.stream_id, seq=slot.seq, state=STARTED)
    sent = progress_of(peer, producer, slot.seq)
    assert 2 < len(sent) - 2 <= elapsed_us // 500 + BURST
    states: dict[int, list[FrameProgressState]] = {}
    for it in sent:
        states.setdefault(it.seq, []).append(it.state)
    assert set(map(tuple, states.values())) == {(STARTED, COMPLETE)}
    assert count > len(sent), "the cap was needed"


@pytest.mark.spec("WIRE-10.2.2-20")
def test_an_update_that_came_too_early_is_sent_when_the_interval_is_over(
    peer: WireConsumer, producer: Producer
) -> None:
    """The newest state, by the conductor, though the producer says nothing more."""
    hint = {"progress_interval_us": 20_000, "progress_bytes_delta": 4096}
    peer.repeated.append(peer.say_hello(producer.stream_id, supports_progress=True, **hint))
    fence(peer, producer)
    with producer.claim((256, 1024), np.uint8, progress="rows") as slot:
        for rows in (10, 20, 30):
            slot.progress(rows=rows)
        received = peer.wait_for(
            FrameProgress, stream_id=producer.stream_id, seq=slot.seq, payload_bytes_filled=30 * 1024
        )
    assert received.message.state is PROGRESS
