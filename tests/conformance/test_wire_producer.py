# SPDX-License-Identifier: Apache-2.0
"""What a producer writes and says: slots, descriptors, progress, metadata, QoS, and streams of consumers' own.

Wire §5, §8.2, §8.3, §10.1.2, §10.1.3, §10.2, §10.3, §10.4.2, §11, §15.2, §15.7, §15.9, §15.14; Driver Model §2.2.
A real driver grants the memory; the other side is `WireConsumer`, which reads files and messages byte for byte. The
announce period is also that of hello and QoS: short, so that staleness is too.
"""

from __future__ import annotations

import functools
import itertools
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Client, DropReason, Producer
from tensorpool.client.progress import BURST
from tensorpool.errors import FrameTooLarge
from tensorpool.wire import decode
from tensorpool.wire.control import (
    ConsumerConfig,
    ConsumerHello,
    DataSourceAnnounce,
    DataSourceMeta,
    FrameDescriptor,
    FrameProgress,
    FrameProgressState,
    MetaBlobAnnounce,
    MetaBlobChunk,
    MetaBlobComplete,
    Mode,
    QosProducer,
)
from tensorpool.wire.driver import Role
from tensorpool.wire.trace import TraceLinkSet
from tests.support.driver_client import new_client_id, serving
from tests.support.driver_process import Deployment
from tests.support.listener import Endpoint, Heard
from tests.support.processes import private_directory, wait_until
from tests.support.region_bytes import DTYPES, committed
from tests.support.wire_consumer import MappedStream, WireConsumer, endpoint_of, separate

NSLOTS = 8
POOLS = {1: 256, 7: 4096, 9: 1 << 18}
PERIOD_MS = 600
STREAMS = range(12_000, 12_050)
IPC = "aeron:ipc?term-length=64k"
STARTED, PROGRESS, COMPLETE = (FrameProgressState(number) for number in (1, 2, 3))

_stream_ids = iter(STREAMS)
_private_ids = iter(range(310_000, 320_000))


@pytest.fixture(scope="module")
def deployment(shared_media_driver: aeron.MediaDriver) -> Iterator[Deployment]:
    pools = [{"pool_id": id, "stride_bytes": stride} for id, stride in POOLS.items()]
    profile = {"header_nslots": NSLOTS, "payload_pools": pools}
    with private_directory() as folder:
        deployment = Deployment(
            folder,
            shared_media_driver.aeron_dir,
            streams=STREAMS,
            policies={"announce_period_ms": PERIOD_MS, "lease_keepalive_interval_ms": 3000},
            profiles={"small": profile},
        )
        with serving(separate(deployment)):
            yield deployment


@pytest.fixture(scope="module")
def connected(deployment: Deployment) -> Iterator[Client]:
    with tp.connect(deployment.aeron_dir, config=deployment.config_path) as client:
        yield client


@pytest.fixture
def producer(connected: Client) -> Iterator[Producer]:
    """Of a stream of the test's own."""
    with connected.producer(next(_stream_ids)) as producer:
        wait_until(lambda: producer.is_active, "the producer is active")
        yield producer


@pytest.fixture
def peer(deployment: Deployment, producer: Producer) -> Iterator[WireConsumer]:
    """It listens before the first frame."""
    with WireConsumer(deployment) as peer:
        peer.forget()
        peer.wait_for(QosProducer, stream_id=producer.stream_id)  # from now on it hears the producer
        assert producer.publish(np.zeros(1, np.uint8)) == 0
        peer.wait_for(FrameDescriptor, stream_id=producer.stream_id)
        peer.transcript.clear()
        yield peer


@pytest.fixture
def mapped(peer: WireConsumer, producer: Producer) -> MappedStream:
    lease = peer.attach(producer.stream_id)
    peer.kept.append(lease)
    assert lease.epoch == producer.epoch
    return peer.map(lease.response)


def unused_endpoint() -> Endpoint:
    return IPC, next(_private_ids)


def fence(peer: WireConsumer, producer: Producer) -> None:
    """Return when the producer does as the hellos ask: it declined a request that came after them."""
    nobody = new_client_id()
    peer.say_hello(producer.stream_id, consumer_id=nobody, descriptor_stream_id=31_000)
    peer.wait_for(ConsumerConfig, consumer_id=nobody)


def descriptors(peer: WireConsumer, producer: Producer, last: int | None) -> list[FrameDescriptor]:
    """The producer's, up to a seq, on the shared stream."""
    shared = peer.endpoints["descriptor"]

    def heard() -> list[FrameDescriptor]:
        return [it for it in peer.heard_on(shared, FrameDescriptor) if it.stream_id == producer.stream_id]

    peer.wait_until(lambda: any(it.seq == last for it in heard()), f"the descriptor of {last}")
    return heard()


def config_of(peer: WireConsumer, hello: ConsumerHello) -> ConsumerConfig:
    """The answer to a hello."""
    return peer.wait_for(ConsumerConfig, consumer_id=hello.consumer_id, stream_id=hello.stream_id).message


def busy_until(now_ns: int) -> None:
    while time.monotonic_ns() < now_ns:
        time.sleep(0.0001)


# --- slots and descriptors


@pytest.mark.spec("WIRE-8.2-08", "WIRE-10.2.1-01", "WIRE-10.2.1-12", "WIRE-15.2-03", "WIRE-10.2.1-04")
def test_each_frame_has_one_descriptor_and_both_name_its_seq(
    peer: WireConsumer, producer: Producer, mapped: MappedStream
) -> None:
    """Seq for seq from the first one on, through the ring and back, in a message without time, version or trace."""
    first = producer.next_seq
    rng = np.random.default_rng(5)
    for index in range(NSLOTS * 2 + 3):
        dtype = [*DTYPES][index % len(DTYPES)]
        array = rng.integers(0, 2, (index + 1, 3)).astype(dtype)
        array = np.asfortranarray(array) if index % 2 else array
        seq = producer.publish(array)
        assert seq == first + index
        slot = mapped.slot(seq)
        assert (slot.seq_commit, slot.shape, slot.dtype) == (committed(seq), array.shape, DTYPES[dtype])
        assert slot.payload_slot == seq % NSLOTS
        np.testing.assert_array_equal(mapped.array(seq), array)
    assert [it.seq for it in descriptors(peer, producer, seq)] == list(range(first, first + 2 * NSLOTS + 3))
    names = (producer.stream_id, producer.epoch, seq)
    expected = struct.pack("<4H I Q Q Q I Q", 40, 4, 900, 1, *names, 2**64 - 1, 2**32 - 1, 0)
    assert peer.heard(FrameDescriptor, seq=seq)[0].data == expected
    assert first == 1, "the first frame of an epoch, which the fixture published, is 0"


@pytest.mark.spec("WIRE-10.2.1-01")
def test_a_frame_that_is_not_published_is_not_described(
    peer: WireConsumer, producer: Producer, mapped: MappedStream
) -> None:
    """Larger than every pool, or given up: no descriptor, and the seqs that are described have no hole."""
    first = producer.next_seq
    with pytest.raises(FrameTooLarge):
        producer.publish(np.zeros((1 << 18) + 1, np.uint8))
    assert producer.stats.dropped == {DropReason.NO_POOL: 1}
    with pytest.raises(RuntimeError, match="no light"), producer.claim((4,), np.uint8):
        raise RuntimeError("no light")
    with producer.claim((2, 2), np.uint8) as slot:
        slot.array[:] = 3
    last = producer.publish(np.ones(3))
    assert [it.seq for it in descriptors(peer, producer, last)] == [slot.seq, last]
    assert (slot.seq, last) == (first, first + 1)
    assert mapped.payload(first) == b"\3\3\3\3"


@pytest.mark.spec("WIRE-8.2-26", "WIRE-8.2-08")
@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 3)])
def test_an_empty_frame_is_committed_and_described(
    peer: WireConsumer, producer: Producer, mapped: MappedStream, shape: tuple[int, ...]
) -> None:
    """values_len_bytes 0 in a committed slot whose payload_slot is its own index."""
    seq = producer.publish(np.zeros(shape, np.float32))
    assert seq is not None
    slot = mapped.slot(seq)
    assert (slot.seq_commit, slot.values_len_bytes, slot.payload_slot) == (committed(seq), 0, seq % NSLOTS)
    assert slot.shape == shape
    assert [it.seq for it in descriptors(peer, producer, seq)] == [seq]


@pytest.mark.spec("WIRE-8.2-19", "WIRE-8.2-22", "WIRE-8.2-13", "WIRE-8.2-15")
def test_padded_rows_are_published_with_their_strides(producer: Producer, mapped: MappedStream) -> None:
    """The slot's strides are the array's, values_len_bytes its extent, and the payload one block of its memory."""
    memory = np.arange(20 * 64, dtype=np.uint16).reshape(20, 64)
    for image, order in ((memory[:, :50], 1), (memory[:, :50].T, 2)):
        seq = producer.publish(image, keep_strides=True)
        assert seq is not None
        slot = mapped.slot(seq)
        assert (slot.shape, slot.strides[:2], slot.major_order) == (image.shape, image.strides, order)
        assert (slot.values_len_bytes, slot.payload_offset) == (19 * 128 + 100, 0)
        assert set(slot.strides[2:]) <= {0}
        assert mapped.payload(seq) == memory.tobytes()[: 19 * 128 + 100]


@pytest.mark.spec("WIRE-10.2.1-06", "WIRE-8.3-16", "WIRE-8.2-08")
def test_nothing_is_told_of_a_frame_before_its_bytes_are_there(
    peer: WireConsumer, producer: Producer, mapped: MappedStream
) -> None:
    """At a descriptor the slot is committed, at a COMPLETE too and the payload is whole, unless it is overwritten."""
    peer.repeated.append(peer.say_hello(producer.stream_id, supports_progress=True))
    fence(peer, producer)
    shape, count = (64, 1024), 300
    described, completed = set(), set()
    wrong: list[Any] = []

    def judge(heard: Heard[Any]) -> None:
        message = heard.message
        if isinstance(message, FrameDescriptor) and message.stream_id == producer.stream_id:
            described.add(message.seq)
            if mapped.word(message.seq) != committed(message.seq):
                wrong.append((message, mapped.word(message.seq)))
        elif not isinstance(message, FrameProgress) or message.state is not COMPLETE:
            return
        elif message.stream_id == producer.stream_id:
            completed.add(message.seq)
            is_whole = mapped.payload(message.seq) == bytes([message.seq % 251]) * (64 * 1024)
            word = mapped.word(message.seq)
            if word < committed(message.seq) or (word == committed(message.seq) and not is_whole):
                wrong.append((message, word))

    def produce() -> None:
        for _ in range(count):
            with producer.claim(shape, np.uint8, progress="rows") as slot:
                assert slot.seq is not None
                slot.array[:] = slot.seq % 251
            while slot.seq - max(described, default=0) >= NSLOTS - 2:
                time.sleep(0.0001)  # the frame that is judged is not overwritten

    peer.observers.append(judge)
    first = producer.next_seq
    thread = threading.Thread(target=produce)
    thread.start()
    peer.wait_until(lambda: not thread.is_alive(), "all is produced")
    thread.join()
    descriptors(peer, producer, first + count - 1)
    peer.wait_until(lambda: completed, "a frame is complete")
    assert wrong == []
    assert described == set(range(first, first + count))


@pytest.mark.spec("WIRE-8.3-16", "WIRE-10.2.2-04")
def test_complete_is_sent_after_the_commit(peer: WireConsumer, producer: Producer, mapped: MappedStream) -> None:
    """§15.18 step 8: whenever FrameProgress leaves the producer, the commit word says what the message says."""
    peer.repeated.append(peer.say_hello(producer.stream_id, supports_progress=True))
    fence(peer, producer)
    seen: list[tuple[FrameProgressState, bool]] = []

    class Watched:
        """A publication that looks at the slot before each message."""

        def __init__(self, publication: aeron.Publication) -> None:
            self._publication = publication

        def offer(self, data: bytes) -> aeron.OfferResult:
            message = decode(data)
            assert isinstance(message, FrameProgress)
            seen.append((message.state, mapped.word(message.seq) == committed(message.seq)))
            return self._publication.offer(data)

    session = producer._session
    assert session.consumers._progress is not None
    watched: Any = Watched(session.consumers._progress)
    session.consumers._progress = watched
    wait_until(
        lambda: session.consumers.fan_out.progress == (watched,), "the conductor has looked at its consumers again"
    )
    seq, _ = fill(producer)
    assert seen[0] == (STARTED, False)
    assert set(seen[1:-1]) == {(PROGRESS, False)}
    assert seen[-1] == (COMPLETE, True)
    assert progress_of(peer, producer, seq)[-1].state is COMPLETE


@pytest.mark.spec("WIRE-10.2.1-02", "WIRE-10.2.1-03", "WIRE-10.2.1-04", "WIRE-15.7-01")
def test_slots_carry_the_time_of_capture(peer: WireConsumer, producer: Producer, mapped: MappedStream) -> None:
    """The given one, or the monotonic time of publishing, never going back; a descriptor's is not before its slot's."""
    captured_ns = time.monotonic_ns() - 50_000_000
    seq = producer.publish(np.zeros(3), timestamp_ns=captured_ns)
    assert seq is not None
    assert mapped.slot(seq).timestamp_ns == captured_ns
    stamps = [captured_ns]
    for index in range(NSLOTS - 2):
        before_ns = time.monotonic_ns()
        if index % 2:
            seq = producer.publish(np.zeros(3))
        else:
            with producer.claim((3,), np.uint8) as slot:
                pass
            seq = slot.seq
        assert seq is not None
        stamps.append(mapped.slot(seq).timestamp_ns)
        assert before_ns <= stamps[-1] <= time.monotonic_ns()
    assert stamps == sorted(stamps)
    for descriptor, stamp in zip(descriptors(peer, producer, seq), stamps, strict=True):
        assert descriptor.timestamp_ns is None or descriptor.timestamp_ns >= stamp


@pytest.mark.spec("WIRE-10.2.1-12", "WIRE-10.2.1-13")
def test_a_trace_is_told_with_its_frame_and_its_parents(peer: WireConsumer, producer: Producer) -> None:
    """trace_id in the descriptor, 0 where there is none; the parents of a traced frame in a TraceLinkSet."""
    plain = producer.publish(np.zeros(3))
    traced = producer.publish(np.zeros(3), trace_id=77, parents=[5, 6])
    assert plain is not None
    assert traced is not None
    by_seq = {it.seq: it for it in descriptors(peer, producer, traced)}
    assert (by_seq[plain].trace_id, by_seq[traced].trace_id) == (None, 77)
    link = peer.wait_for(TraceLinkSet, stream_id=producer.stream_id).message
    assert (link.epoch, link.seq, link.trace_id) == (producer.epoch, traced, 77)
    assert [parent.trace_id for parent in link.parents] == [5, 6]


# --- progress


def progress_of(peer: WireConsumer, producer: Producer, last: int) -> list[FrameProgress]:
    """On the shared control stream, once the descriptor of `last` and all before it were received."""
    descriptors(peer, producer, last)
    peer.wait_for(FrameProgress, stream_id=producer.stream_id, seq=last, state=COMPLETE)
    return [heard.message for heard in peer.heard(FrameProgress, stream_id=producer.stream_id)]


def fill(producer: Producer, *, step: int = 4096, pause_us: int = 600) -> tuple[int, list[int]]:
    """A frame of 256 rows of 1 KiB, reported row by row or in larger steps; its seq and the steps."""
    told = []
    with producer.claim((256, 1024), np.uint8, progress="rows") as slot:
        assert slot.seq is not None
        for rows in range(step // 1024, 257, step // 1024):
            slot.array[:rows] = slot.seq % 251
            busy_until(time.monotonic_ns() + pause_us * 1000)
            slot.progress(rows=rows)
            told.append(rows * 1024)
    assert slot.seq is not None
    return slot.seq, told


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
        heard = [it for it in progress_of(peer, producer, second) if it.seq == seq]
        states = [it.state for it in heard]
        filled = [it.payload_bytes_filled for it in heard]
        assert states == [STARTED, *[PROGRESS] * (len(heard) - 2), COMPLETE]
        assert len(heard) >= 3
        assert filled == sorted(filled)
        assert (filled[0], filled[-1]) == (0, 256 * 1024)
        assert all(it.epoch == producer.epoch for it in heard)
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
def test_without_anybody_who_wants_it_no_progress_is_told(peer: WireConsumer, producer: Producer) -> None:
    """A consumer that does not support it gets none; the descriptor alone ends each frame."""
    peer.say_hello(producer.stream_id, supports_progress=False)
    fence(peer, producer)
    seq, _ = fill(producer)
    assert [it.seq for it in descriptors(peer, producer, seq)] == [seq]
    fence(peer, producer)
    assert peer.heard(FrameProgress, stream_id=producer.stream_id) == []


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
    told = [it.payload_bytes_filled for it in progress_of(peer, producer, seq) if it.state is PROGRESS]
    expected = [filled for filled in offered if filled % smallest == 0]
    assert told == expected


@pytest.mark.spec("WIRE-10.2.2-19", "WIRE-10.2.2-20", "WIRE-10.2.2-22")
@pytest.mark.parametrize(("asked_us", "shortest_us"), [(20_000, 20_000), (1, 200)], ids=["as asked", "the most"])
def test_progress_is_told_at_most_once_an_interval(
    peer: WireConsumer, producer: Producer, asked_us: int, shortest_us: int
) -> None:
    """However often it is offered: no more than the frame's time allows, and after a burst 2000 a second at most."""
    hint = {"progress_interval_us": asked_us, "progress_bytes_delta": 4096}
    peer.say_hello(producer.stream_id, supports_progress=True, **hint)
    fence(peer, producer)
    start_ns = time.monotonic_ns()
    seq, offered = fill(producer, step=1024, pause_us=100)
    elapsed_us = (time.monotonic_ns() - start_ns) // 1000
    told = [it for it in progress_of(peer, producer, seq) if it.state is PROGRESS]
    assert 1 <= len(told) <= min(elapsed_us // shortest_us + 1, elapsed_us // 500 + BURST)
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
    told = progress_of(peer, producer, slot.seq)
    assert 2 < len(told) - 2 <= elapsed_us // 500 + BURST
    states: dict[int, list[FrameProgressState]] = {}
    for it in told:
        states.setdefault(it.seq, []).append(it.state)
    assert set(map(tuple, states.values())) == {(STARTED, COMPLETE)}
    assert count > len(told), "the cap was needed"


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
        heard = peer.wait_for(FrameProgress, stream_id=producer.stream_id, seq=slot.seq, payload_bytes_filled=30 * 1024)
    assert heard.message.state is PROGRESS


# --- QoS, metadata, blobs


@pytest.mark.spec("WIRE-10.4.2-02", "WIRE-10.4.2-01")
def test_qos_tells_who_produces_and_how_far_it_is(peer: WireConsumer, producer: Producer) -> None:
    """stream, producer, epoch and the last committed seq, byte for byte, again and again."""
    last = [producer.publish(np.zeros(3)) for _ in range(5)][-1]
    heard = peer.wait_for(QosProducer, stream_id=producer.stream_id, current_seq=last)
    names = (producer.stream_id, producer.producer_id, producer.epoch)
    assert heard.data == struct.pack("<4H I I Q Q I", 28, 6, 900, 1, *names, last, 2**32 - 1)
    assert heard.stream_id == peer.endpoints["qos"][1]
    peer.wait_for(QosProducer, heard.index + 1, stream_id=producer.stream_id, current_seq=last)


@pytest.mark.spec("WIRE-10.3.1-02")
@pytest.mark.spec("WIRE-10.3.1-03", "WIRE-10.3.2-01", "WIRE-10.3.2-03", "WIRE-10.3.1-01")
def test_metadata_is_told_on_change_and_again_and_frames_name_its_version(
    peer: WireConsumer, producer: Producer, mapped: MappedStream
) -> None:
    """Every change has a higher version; slot and descriptor name the one that applies; announces show the newest."""
    versions: list[int] = []
    for exposure in (4, 5):
        version = producer.set_metadata({"camera": "front", "exposure_ms": exposure, "mask": b"\x01\x02"}, tags=["lab"])
        versions.append(version)
        heard = peer.wait_for(DataSourceMeta, stream_id=producer.stream_id, meta_version=version)
        found = {it.key: (it.format, it.value) for it in heard.message.attributes}
        assert found["camera"] == ("text/plain", b"front")
        assert found["exposure_ms"] == ("application/json", str(exposure).encode())
        assert found["mask"][1] == b"\x01\x02"
        assert "tags" in found
        peer.wait_for(DataSourceMeta, heard.index + 1, stream_id=producer.stream_id, meta_version=version)
        announce = peer.wait_for(DataSourceAnnounce, heard.index, stream_id=producer.stream_id, meta_version=version)
        assert (announce.message.producer_id, announce.message.epoch) == (producer.producer_id, producer.epoch)
        assert {heard.stream_id, announce.stream_id} == {peer.endpoints["metadata"][1]}
        seq = producer.publish(np.zeros(3))
        assert seq is not None
        assert mapped.slot(seq).meta_version == version
        assert descriptors(peer, producer, seq)[-1].meta_version in (None, version)
    assert versions[0] < versions[1]
    assert producer.publish(np.zeros(3), meta_version=versions[0]) is not None
    assert mapped.slot(producer.next_seq - 1).meta_version == versions[0]


@pytest.mark.spec("WIRE-10.3.3-01", "WIRE-15.9-01", "WIRE-15.9-02")
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("length", [0, 1, 65_536, 200_000])
def test_a_blob_is_cut_into_chunks_that_cover_it(
    peer: WireConsumer, producer: Producer, length: int, checksum: bool
) -> None:
    """Offsets from 0 on, each where the last ended, at most 64 KiB a piece, up to total_len; CRC32C or 0."""
    blob = os.urandom(length)
    version = producer.publish_blob(blob, blob_type=5, checksum=checksum)
    names: dict[str, Any] = {"stream_id": producer.stream_id, "meta_version": version}
    announce = peer.wait_for(MetaBlobAnnounce, **names)
    complete = peer.wait_for(MetaBlobComplete, announce.index, **names)
    chunks = [it for it in peer.heard(MetaBlobChunk, announce.index, **names) if it.index < complete.index]
    assert (announce.message.total_len, announce.message.blob_type) == (length, 5)
    data = b""
    for heard in chunks:
        assert heard.message.chunk_offset == len(data)
        assert 0 < len(heard.message.chunk_bytes) <= 65_536
        data += heard.message.chunk_bytes
    assert data == blob
    assert announce.message.checksum == complete.message.checksum
    assert (announce.message.checksum != 0) == (checksum and length > 0)
    if length == 1 and checksum:
        assert announce.message.checksum == crc32c(blob)


def crc32c(data: bytes) -> int:
    """Castagnoli's, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


# --- streams of a consumer's own


def asked(endpoint: Endpoint, kind: str = "descriptor") -> dict[str, Any]:
    return {f"{kind}_channel": endpoint[0], f"{kind}_stream_id": endpoint[1]}


def assigned(config: ConsumerConfig, kind: str = "descriptor") -> Endpoint:
    return getattr(config, f"{kind}_channel"), getattr(config, f"{kind}_stream_id")


@pytest.mark.spec("WIRE-5-01", "WIRE-5-05", "WIRE-5-07", "WIRE-5-09", "WIRE-5-10", "WIRE-5-13", "WIRE-10.1.3-01")
def test_streams_of_its_own_are_granted_as_asked(peer: WireConsumer, producer: Producer) -> None:
    """The answer names them; every frame is described there, and its control stream has progress and nothing else."""
    own, control = unused_endpoint(), unused_endpoint()
    listening = peer.listen(own), peer.listen(control)
    hello = peer.say_hello(
        producer.stream_id, supports_progress=True, max_rate_hz=1, **asked(own), **asked(control, "control")
    )
    config = config_of(peer, hello)
    assert (config.stream_id, config.consumer_id, config.use_shm) == (producer.stream_id, peer.consumer_id, True)
    assert (assigned(config), assigned(config, "control")) == (own, control)
    peer.wait_until(lambda: all(it.is_connected for it in listening), "the producer publishes there")
    seqs = [producer.publish(np.zeros(3)) for _ in range(20)]
    seqs.append(fill(producer)[0])
    producer.set_metadata({"a": 1})
    peer.wait_until(lambda: peer.heard_on(own, FrameDescriptor)[-1:] != [], "a private descriptor")
    peer.wait_until(lambda: peer.heard_on(own, FrameDescriptor)[-1].seq == seqs[-1], "the last private descriptor")
    peer.wait_for(DataSourceMeta, stream_id=producer.stream_id)
    fence(peer, producer)
    assert [it.seq for it in peer.heard_on(own, FrameDescriptor)] == seqs
    assert all(isinstance(it.message, FrameDescriptor) for it in peer.transcript if it.stream_id == own[1])
    progress = [it.message for it in peer.transcript if it.stream_id == control[1]]
    assert [it.state for it in progress][:1] == [STARTED]
    assert all(isinstance(it, FrameProgress) for it in progress)


@pytest.mark.spec("WIRE-10.1.2-08", "WIRE-10.1.2-09", "WIRE-10.1.2-12", "WIRE-10.1.2-13", "WIRE-10.1.3-07")
@pytest.mark.spec("WIRE-10.1.3-08", "WIRE-10.1.3-09", "WIRE-10.1.3-01")
@pytest.mark.parametrize("kind", ["descriptor", "control"])
def test_half_a_request_is_declined(peer: WireConsumer, producer: Producer, kind: str) -> None:
    """A channel without id, or an id without channel: the answer is empty and 0; only what is whole is granted."""
    channel, stream_id = unused_endpoint()
    for half in ((channel, 0), ("", stream_id)):
        hello = peer.say_hello(producer.stream_id, consumer_id=new_client_id(), **asked(half, kind))
        config = config_of(peer, hello)
        assert (assigned(config), assigned(config, "control")) == (("", 0), ("", 0))
        assert config.use_shm
    nothing = peer.say_hello(producer.stream_id, consumer_id=new_client_id())
    fence(peer, producer)
    for answer in peer.heard(ConsumerConfig, consumer_id=nothing.consumer_id):
        assert (assigned(answer.message), assigned(answer.message, "control")) == (("", 0), ("", 0))
    whole = peer.say_hello(producer.stream_id, consumer_id=new_client_id(), **asked((channel, stream_id), kind))
    assert assigned(config_of(peer, whole), kind) == (channel, stream_id)


BAD_ENDPOINTS: dict[str, Endpoint] = {
    "no Aeron channel": ("tcp://localhost:1", 31_001),
    "not a channel": ("aeron:ipc?term-length", 31_001),
    "an unknown medium": ("aeron:tcp?endpoint=localhost:1", 31_001),
    "a spy": ("aeron-spy:aeron:ipc", 31_001),
    "an id beyond Aeron's": (IPC, 2**31),
    "an address elsewhere": ("aeron:udp?endpoint=127.0.0.1:40999", 31_001),
}


@pytest.mark.spec("WIRE-5-14", "WIRE-10.1.3-09")
@pytest.mark.parametrize("kind", ["descriptor", "control"])
def test_an_endpoint_that_cannot_be_is_declined(
    peer: WireConsumer, producer: Producer, deployment: Deployment, kind: str
) -> None:
    """A malformed channel, an impossible id, a stream that others use: empty and 0, and frames come as before."""
    taken = unused_endpoint()
    hello = peer.say_hello(producer.stream_id, consumer_id=new_client_id(), **asked(taken))
    assert assigned(config_of(peer, hello)) == taken
    shared = {name: endpoint_of(deployment, name) for name in ("descriptor", "qos", "metadata")}
    shared["control"] = deployment.control
    for name, endpoint in (BAD_ENDPOINTS | shared | {"another consumer's": taken}).items():
        hello = peer.say_hello(producer.stream_id, consumer_id=new_client_id(), **asked(endpoint, kind))
        assert assigned(config_of(peer, hello), kind) == ("", 0), name
    seq = producer.publish(np.zeros(3))
    assert seq is not None
    assert [it.seq for it in descriptors(peer, producer, seq)] == [seq]


def answer_to(peer: WireConsumer, producer: Producer, endpoint: Endpoint) -> Endpoint:
    """What a new consumer that asks for this stream is given."""
    hello = peer.say_hello(producer.stream_id, consumer_id=new_client_id(), **asked(endpoint))
    return assigned(config_of(peer, hello))


@pytest.mark.spec("WIRE-5-14")
def test_hellos_without_a_lease_take_little_memory(
    peer: WireConsumer, producer: Producer, deployment: Deployment
) -> None:
    """However large the logs that they name are, and wherever their channels lead."""
    folder = Path(deployment.aeron_dir) / "publications"
    before = set(folder.iterdir())
    for number in range(20):
        own = "aeron:ipc?term-length=1g|linger=1h" if number % 2 else f"aeron:udp?endpoint=127.0.0.1:{41_000 + number}"
        endpoint = own, next(_private_ids)
        answer = functools.partial(answer_to, peer, producer, endpoint)
        if number % 2:  # a producer that took long for the others declines, and another consumer may ask
            peer.wait_until(lambda ask=answer, own=endpoint: ask() == own, "the private stream is granted")
        else:
            assert answer() == ("", 0)
    made = [path.stat().st_size for path in set(folder.iterdir()) - before]
    assert len(made) >= 10
    assert sum(made) <= 20 * (3 * (64 << 10) + 4096)
    assert producer.stats.private_streams_declined >= 10


@pytest.mark.spec("WIRE-11-02", "WIRE-10.1.3-09")
def test_a_rate_limited_request_may_be_declined(peer: WireConsumer, producer: Producer, deployment: Deployment) -> None:
    """No thinned-out stream of its own where that cannot be: empty and 0, and every frame is on the shared one."""
    wish = {"mode": Mode.RATE_LIMITED, "max_rate_hz": 1}
    shared = endpoint_of(deployment, "descriptor")
    hello = peer.say_hello(producer.stream_id, consumer_id=new_client_id(), **wish, **asked(shared))
    config = config_of(peer, hello)
    assert assigned(config) == ("", 0)
    assert (config.mode, config.use_shm) == (Mode.RATE_LIMITED, True)
    seqs = [producer.publish(np.zeros(3)) for _ in range(NSLOTS)]
    assert seqs[-1] is not None
    assert [it.seq for it in descriptors(peer, producer, seqs[-1])] == seqs


@pytest.mark.spec("WIRE-11-04", "WIRE-5-06", "WIRE-5-08", "WIRE-10.1.2-05")
def test_a_rate_caps_a_private_stream_and_never_the_shared_one(peer: WireConsumer, producer: Producer) -> None:
    """RATE_LIMITED at 50 Hz: at most so many there, while the shared stream and an unlimited one have every frame."""
    limited, unlimited = unused_endpoint(), unused_endpoint()
    listening = [peer.listen(limited), peer.listen(unlimited)]
    wish = {"mode": Mode.RATE_LIMITED}
    for endpoint, rate in ((limited, 50), (unlimited, 0)):
        own = {"consumer_id": new_client_id(), "max_rate_hz": rate}
        peer.repeated.append(peer.say_hello(producer.stream_id, **own, **wish, **asked(endpoint)))
    peer.say_hello(producer.stream_id, consumer_id=new_client_id(), max_rate_hz=1, **wish)  # without a stream
    peer.wait_until(lambda: all(it.is_connected for it in listening), "the producer publishes there")
    fence(peer, producer)
    start_ns = time.monotonic_ns()
    seqs = []
    for _ in range(100):
        busy_until(time.monotonic_ns() + 3_000_000)
        seqs.append(producer.publish(np.zeros(3)))
        peer.poll()
    elapsed_s = (time.monotonic_ns() - start_ns) / 1e9
    assert [it.seq for it in descriptors(peer, producer, seqs[-1])] == seqs
    peer.wait_until(lambda: len(peer.heard_on(unlimited, FrameDescriptor)) == 100, "the unlimited one has them all")
    assert [it.seq for it in peer.heard_on(unlimited, FrameDescriptor)] == seqs
    assert 0.3 * 50 / 2 <= len(peer.heard_on(limited, FrameDescriptor)) <= elapsed_s * 50 + 2


@pytest.mark.spec("WIRE-5-03", "WIRE-10.1.3-11", "WIRE-10.1.2-02")
def test_private_streams_end_with_the_silence_of_their_consumer(peer: WireConsumer, producer: Producer) -> None:
    """Hellos alone or QoS alone keep one open; neither for 3 to 5 times the interval closes it, and not before."""
    names = ("silent", "hellos", "qos")
    consumers = {name: (new_client_id(), unused_endpoint(), unused_endpoint()) for name in names}
    listening: dict[str, list[aeron.Subscription]] = {}
    hellos: dict[str, dict[str, Any]] = {}
    for name, (consumer_id, own, control) in consumers.items():
        listening[name] = [peer.listen(own), peer.listen(control)]
        hellos[name] = {"consumer_id": consumer_id, **asked(own), **asked(control, "control")}
        peer.say_hello(producer.stream_id, **hellos[name])
    said_ns = time.monotonic_ns()
    everything = [it for pair in listening.values() for it in pair]
    next_ns = 0

    def keep_saying() -> None:
        nonlocal next_ns
        if time.monotonic_ns() >= next_ns:
            next_ns = time.monotonic_ns() + PERIOD_MS * 1_000_000
            peer.say_hello(producer.stream_id, **hellos["hellos"])
            peer.say_qos(producer.stream_id, consumer_id=hellos["qos"]["consumer_id"])

    def is_all_open() -> bool:
        keep_saying()
        return all(it.is_connected for it in everything)

    def is_silent_closed() -> bool:
        keep_saying()
        return not any(it.is_connected for it in listening["silent"])

    peer.wait_until(is_all_open, "all streams are there")
    peer.wait_until(is_silent_closed, "the silent consumer's streams are closed")
    silence_ms = (time.monotonic_ns() - said_ns) / 1e6
    assert silence_ms >= 3 * PERIOD_MS
    assert silence_ms <= 5 * PERIOD_MS + 5000  # media driver and machine take their time to tell
    end_ns = said_ns + 8 * PERIOD_MS * 1_000_000

    def is_long_past() -> bool:
        keep_saying()
        return time.monotonic_ns() > end_ns

    peer.wait_until(is_long_past, "twice the window is over")
    assert all(it.is_connected for name in ("hellos", "qos") for it in listening[name])


@pytest.mark.spec("WIRE-10.1.3-11")
def test_private_streams_end_with_the_lease_of_their_consumer(peer: WireConsumer, producer: Producer) -> None:
    """A consumer that detached is gone: its streams close, long before its silence would close them."""
    lease = peer.attach(producer.stream_id)
    own = unused_endpoint()
    listening = peer.listen(own)
    peer.say_hello(producer.stream_id, consumer_id=lease.client_id, **asked(own))
    peer.wait_until(lambda: listening.is_connected, "the stream is there")
    peer.detach(lease)

    def is_closed() -> bool:
        peer.say_qos(producer.stream_id, consumer_id=new_client_id())
        return not listening.is_connected

    peer.wait_until(is_closed, "the stream is closed")


@pytest.mark.spec("WIRE-10.1.3-01")
def test_a_hello_for_another_stream_is_not_answered(peer: WireConsumer, producer: Producer) -> None:
    """A producer grants nothing to consumers of streams that are not its own."""
    own = unused_endpoint()
    stranger = new_client_id()
    peer.say_hello(producer.stream_id + 1_000, consumer_id=stranger, **asked(own))
    fence(peer, producer)
    assert peer.heard(ConsumerConfig, consumer_id=stranger) == []


def test_another_layout_version_is_told_not_to_use_shared_memory(peer: WireConsumer, producer: Producer) -> None:
    """C20: expected_layout_version 2 cannot be served; 0 is any."""
    hello = peer.say_hello(producer.stream_id, expected_layout_version=2)
    assert not config_of(peer, hello).use_shm
    own = unused_endpoint()
    anything = peer.say_hello(producer.stream_id, consumer_id=new_client_id(), expected_layout_version=0, **asked(own))
    assert config_of(peer, anything).use_shm


def test_what_a_producer_answered_before_is_no_decree(peer: WireConsumer, producer: Producer) -> None:
    """It hears its own words on the control stream: a consumer that comes with another layout version is served."""
    hello = peer.say_hello(producer.stream_id, expected_layout_version=2)
    assert not config_of(peer, hello).use_shm
    fence(peer, producer)
    peer.transcript.clear()
    hello = peer.say_hello(producer.stream_id, expected_layout_version=1, **asked(unused_endpoint()))
    assert config_of(peer, hello).use_shm


# --- files


@pytest.mark.spec("DRV-2.2-01", "WIRE-15.14-02")
def test_a_producer_writes_only_into_files_that_are_there(
    deployment: Deployment, connected: Client, peer: WireConsumer
) -> None:
    """While it produces nothing is created, removed, or of another size, and no second producer gets in."""
    with connected.producer(next(_stream_ids)) as producer:
        wait_until(lambda: producer.is_active, "the producer is active")
        granted = peer.attach(producer.stream_id).response
        uris = [granted.header_region_uri, *(pool.region_uri for pool in granted.payload_pools)]
        files = {Path(uri.removeprefix("shm:file?path=")) for uri in uris}
        (folder,) = {path.parent for path in files}
        assert set(folder.iterdir()) == files
        before = tree(folder)
        for index in range(3 * NSLOTS):
            producer.publish(np.full(index * 1000, index, np.uint8))
        with (
            tp.connect(deployment.aeron_dir, config=deployment.config_path) as other,
            pytest.raises(tp.AttachRefused) as refused,
        ):
            other.producer(producer.stream_id, timeout=2.0)
        assert refused.value.code == "REJECTED"
        assert refused.value.stream == producer.stream_id
        assert tree(folder) == before
        assert producer.is_active


def tree(folder: Path) -> dict[Path, tuple[int, int]]:
    """What changes when a process creates, removes or truncates a file."""
    stats = {path: path.stat() for path in (folder, *folder.rglob("*"))}
    return {path: (it.st_ino, it.st_mtime_ns if path.is_dir() else it.st_size) for path, it in stats.items()}


@pytest.mark.spec("WIRE-15.2-03", "WIRE-10.2.2-17")
def test_seqs_start_anew_with_a_new_lease(deployment: Deployment, connected: Client) -> None:
    """Each lease of a producer has an epoch of its own, and the first frame of it is 0."""
    stream_id = next(_stream_ids)
    epochs: list[Any] = []
    with WireConsumer(deployment) as peer:
        for _ in range(2):
            with connected.producer(stream_id) as producer:
                wait_until(lambda it=producer: it.is_active, "the producer is active")
                assert [producer.publish(np.zeros(3)) for _ in range(3)] == [0, 1, 2]
                epochs.append(producer.epoch)
                lease = peer.attach(stream_id, Role.CONSUMER)
                assert lease.epoch == producer.epoch
                assert [peer.map(lease.response).slot(seq).seq for seq in range(3)] == [0, 1, 2]
    assert epochs[0] < epochs[1]
