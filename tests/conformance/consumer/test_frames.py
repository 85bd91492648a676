# SPDX-License-Identifier: Apache-2.0
"""What a consumer makes of descriptors, slots, progress and metadata, and what it says about itself.

Wire §5, §8.2, §8.3, §10.1.2, §10.1.3, §10.2, §10.3, §10.4.1, §11, §15.4, §15.18. The other side is `WireProducer`,
which is honest but for the one thing that a test wants otherwise. Each test begins with a consumer that has received a
frame: it is mapped, and it misses nothing that is described from then on.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.channel import Endpoint
from tensorpool.client import Client, Consumer, DropReason, Frame, Progress, State, StateChange
from tensorpool.wire.control import (
    Attribute,
    ConsumerConfig,
    ConsumerHello,
    DataSourceMeta,
    FrameDescriptor,
    FrameProgress,
    FrameProgressState,
    MetaBlobAnnounce,
    MetaBlobChunk,
    MetaBlobComplete,
    Mode,
    ProgressUnit,
    QosConsumer,
    ShmPoolAnnounce,
)
from tests.support.processes import wait_until
from tests.support.region_bytes import committed, in_progress
from tests.support.regions import NSLOTS, POOLS
from tests.support.wire_producer import Endpoints, WireProducer, altered

IPC = "aeron:ipc?term-length=4m"
FRAME = np.arange(6, dtype=np.float32).reshape(2, 3)
NULL_U32 = 2**32 - 1

type Connect = Callable[..., Client]


@pytest.fixture
def brisk(shared_media_driver: aeron.MediaDriver, peer: WireProducer) -> Iterator[Client]:
    """One that says hello and tells its QoS three times a second."""
    settings = peer.settings | {"policies.announce_period_ms": 330}
    with tp.connect(shared_media_driver.aeron_dir, overrides=settings) as client:
        yield client


@pytest.fixture
def consumer(connected: Client, peer: WireProducer) -> Consumer:
    return warm(peer, connected.consumer(peer.stream_id))


@pytest.fixture
def eager(connected: Client, peer: WireProducer, told: list[Progress]) -> Consumer:
    """One that opted in to progress."""
    return warm(peer, connected.consumer(peer.stream_id, on_progress=told.append))


def warm(peer: WireProducer, consumer: Consumer) -> Consumer:
    """Publish until a frame comes through."""

    def is_through() -> bool:
        seq = peer.publish(FRAME)
        while (frame := consumer.poll(0.02)) is not None:
            if frame.seq == seq:
                return True
        return False

    wait_until(is_through, "a frame is delivered")
    return consumer


def received(peer: WireProducer, consumer: Consumer) -> list[Frame]:
    """Everything that comes up to a frame that is published now, without that one."""
    last = peer.publish(FRAME)
    frames: list[Frame] = []

    def is_there() -> bool:
        while (frame := consumer.poll(0.02)) is not None:
            if frame.seq == last:
                return True
            frames.append(frame)
        return False

    wait_until(is_there, "the last frame is delivered")
    return frames


def drops(consumer: Consumer) -> dict[DropReason, int]:
    return {reason: count for reason, count in consumer.stats.drops.items() if count}


def reasons(consumer: Consumer, before: dict[DropReason, int]) -> dict[DropReason, int]:
    """What was dropped since."""
    now = drops(consumer)
    return {reason: now[reason] - before.get(reason, 0) for reason in now if now[reason] != before.get(reason, 0)}


# --- descriptors


@pytest.mark.spec("WIRE-10.2.1-09", "WIRE-11-01", "WIRE-10.2.1-08")
def test_every_descriptor_becomes_a_frame_from_the_slot_of_its_seq(peer: WireProducer, consumer: Consumer) -> None:
    """Through several rounds of the ring, each with the shape, type and order that its slot tells."""
    before = drops(consumer)
    shapes = [((2, 3), np.float32), ((5,), np.uint8), ((2, 2, 2), np.int64), ((40, 10), np.uint16)]
    for index in range(3 * NSLOTS + 1):
        shape, dtype = shapes[index % len(shapes)]
        array = np.arange(index, index + np.prod(shape)).astype(dtype).reshape(shape)
        array = np.asfortranarray(array) if index % 3 == 0 else array
        seq = peer.publish(array)
        frame = consumer.poll(60.0)
        assert frame is not None
        assert (frame.seq, frame.shape, frame.dtype) == (seq, shape, dtype)
        np.testing.assert_array_equal(frame.array, array)
    assert reasons(consumer, before) == {}


@pytest.mark.spec("WIRE-10.2.1-07", "WIRE-10.2.1-14")
@pytest.mark.parametrize("lie", [{"epoch": 99}, {"epoch": 101}, {"epoch": 2**64 - 1}, {"stream_id": 5}], ids=str)
def test_descriptors_of_other_epochs_and_streams_are_ignored(
    peer: WireProducer, consumer: Consumer, lie: dict[str, int]
) -> None:
    """The slot is there and committed, but it is not what the descriptor speaks of."""
    last = consumer.stats.last_seq_seen
    peer.write(peer.next_seq, FRAME)
    fields: dict[str, Any] = {"seq": peer.next_seq} | lie
    peer.say(FrameDescriptor, **fields)
    assert received(peer, consumer) == []  # the same seq, described by its own producer, comes
    assert consumer.stats.last_seq_seen == last + 1
    assert consumer.stats.drops_gap == 0
    assert consumer.stats.lost == 0


@pytest.mark.spec("WIRE-8.2-09", "WIRE-15.18-02", "WIRE-10.4.1-04")
@pytest.mark.parametrize(
    ("ahead", "reason"), [(NSLOTS, DropReason.OVERWRITTEN), (-NSLOTS, DropReason.STALE)], ids=["later", "earlier"]
)
def test_a_slot_that_holds_another_seq_is_a_late_drop(
    peer: WireProducer, consumer: Consumer, ahead: int, reason: DropReason
) -> None:
    """The descriptor's seq and that of the commit word differ: dropped and counted once, as late."""
    peer.next_seq += 2 * NSLOTS
    received(peer, consumer)  # settles the gap
    before, late = drops(consumer), consumer.stats.drops_late
    seq = peer.next_seq
    peer.publish(FRAME, slot={"word": committed(seq + ahead)})
    assert received(peer, consumer) == []
    assert reasons(consumer, before) == {reason: 1}
    assert consumer.stats.drops_late == late + 1


@pytest.mark.spec("WIRE-15.18-02", "WIRE-11-01", "WIRE-10.4.1-04")
def test_a_slot_in_progress_is_a_late_drop_and_nobody_waits_for_it(peer: WireProducer, consumer: Consumer) -> None:
    """Described too early, it is dropped at once; committed afterwards, it does not come back."""
    before, late = drops(consumer), consumer.stats.drops_late
    seq = peer.next_seq
    peer.publish(FRAME, slot={"word": in_progress(seq)})
    assert received(peer, consumer) == []
    peer.commit(seq)
    assert received(peer, consumer) == []
    assert reasons(consumer, before) == {DropReason.NOT_COMMITTED: 1}
    assert consumer.stats.drops_late == late + 1


SLOT_LIES: dict[str, tuple[dict[str, Any], DropReason]] = {
    "payload_slot of the next": ({"payload_slot": "next"}, DropReason.BAD_PAYLOAD_SLOT),
    "payload_slot beyond the ring": ({"payload_slot": NSLOTS}, DropReason.BAD_PAYLOAD_SLOT),
    "payload_slot far beyond": ({"payload_slot": 2**32 - 1}, DropReason.BAD_PAYLOAD_SLOT),
    "longer than the stride": ({"values_len_bytes": POOLS[1] + 1}, DropReason.BAD_LENGTH),
    "longer than everything": ({"values_len_bytes": 2**32 - 1}, DropReason.BAD_LENGTH),
    "shorter than the shape": ({"values_len_bytes": 23}, DropReason.BAD_LENGTH),
    "an offset": ({"payload_offset": 64}, DropReason.BAD_PAYLOAD_OFFSET),
    "a pool that was not announced": ({"pool_id": 9}, DropReason.BAD_POOL),
    "dtype UNKNOWN": ({"dtype": 0}, DropReason.BAD_DTYPE),
    "dtype 12": ({"dtype": 12}, DropReason.BAD_DTYPE),
    "dtype 77": ({"dtype": 77}, DropReason.BAD_DTYPE),
    "order UNKNOWN": ({"major_order": 0}, DropReason.BAD_MAJOR_ORDER),
    "order 3": ({"major_order": 3}, DropReason.BAD_MAJOR_ORDER),
    "no dimensions": ({"ndims": 0}, DropReason.BAD_NDIMS),
    "nine dimensions": ({"ndims": 9}, DropReason.BAD_NDIMS),
    "a negative dimension": ({"dims": (-2, 3)}, DropReason.BAD_DIMS),
    "a huge shape": ({"dims": (2**31 - 1, 2**31 - 1)}, DropReason.BAD_LENGTH),
    "a negative stride": ({"strides": (-12, 4)}, DropReason.BAD_STRIDES),
    "overlapping strides": ({"strides": (4, 4)}, DropReason.BAD_STRIDES),
    "strides of the other order": ({"strides": (4, 8)}, DropReason.BAD_STRIDES),
    "rows without a stride": ({"progress_unit": 1}, DropReason.BAD_PROGRESS),
    "rows of another stride": ({"progress_unit": 1, "progress_stride_bytes": 16}, DropReason.BAD_PROGRESS),
    "a header of 191 bytes": ({"header_length": 191}, DropReason.BAD_EMBEDDED_HEADER),
    "a block of 183 bytes": ({"block_length": 183}, DropReason.BAD_EMBEDDED_HEADER),
    "another template": ({"template_id": 51}, DropReason.BAD_EMBEDDED_HEADER),
    "another schema": ({"schema_id": 901}, DropReason.BAD_EMBEDDED_HEADER),
    "another version": ({"version": 2}, DropReason.BAD_EMBEDDED_HEADER),
}


@pytest.mark.spec("WIRE-10.2.1-10", "WIRE-10.2.1-11", "WIRE-10.2.2-08", "WIRE-15.8-01", "WIRE-10.2.1-08")
def test_a_slot_that_lies_is_dropped_for_its_own_reason(peer: WireProducer, consumer: Consumer) -> None:
    """Each alone, between honest frames: dropped, counted once, and neither late nor a gap."""
    for name, (lie, reason) in SLOT_LIES.items():
        before, late = drops(consumer), consumer.stats.drops_late
        if lie.get("payload_slot") == "next":
            lie = {"payload_slot": (peer.next_seq + 1) % NSLOTS}
        peer.publish(FRAME, slot=lie)
        assert received(peer, consumer) == [], name
        dropped = reasons(consumer, before)
        assert sum(dropped.values()) == 1, name
        assert dropped == {reason: 1} or (name == "a huge shape" and DropReason.BAD_DIMS in dropped), name
        assert consumer.stats.drops_late == late, name
    assert consumer.stats.drops_gap == 0


@pytest.mark.spec("WIRE-10.2.1-05", "WIRE-10.2.1-02", "WIRE-10.2.1-12", "WIRE-10.2.1-08")
@pytest.mark.parametrize(
    "descriptor",
    [
        {},
        {"timestamp_ns": 5, "meta_version": 9, "trace_id": 77},
        {"timestamp_ns": 10**12, "meta_version": 4, "trace_id": None},
        {"timestamp_ns": 1234},
    ],
    ids=["absent", "earlier", "later", "equal"],
)
def test_capture_and_publish_time_may_differ(
    peer: WireProducer, consumer: Consumer, descriptor: dict[str, int | None]
) -> None:
    """The slot's stamp is the capture time, the descriptor's the publish time; a frame without trace has id 0."""
    peer.publish(FRAME, slot={"timestamp_ns": 1234, "meta_version": 4}, descriptor=descriptor)
    (frame,) = received(peer, consumer)
    assert frame.timestamp_ns == 1234
    assert frame.publish_timestamp_ns == descriptor.get("timestamp_ns")
    assert frame.meta_version == 4
    assert frame.trace_id == (descriptor.get("trace_id") or 0)
    np.testing.assert_array_equal(frame.array, FRAME)


@pytest.mark.spec("WIRE-10.2.1-12")
def test_a_trace_id_of_all_ones_is_absent_too(peer: WireProducer, consumer: Consumer) -> None:
    """As codecs write it that know the general null value only (A4)."""
    seq = peer.next_seq
    peer.next_seq += 1
    peer.write(seq, FRAME)
    absent = altered(peer.honest(FrameDescriptor, seq=seq), 8 + 32, b"\xff" * 8)
    peer.send(absent, peer.endpoints.descriptor)
    (frame,) = received(peer, consumer)
    assert (frame.seq, frame.trace_id) == (seq, 0)


def test_a_descriptor_that_comes_twice_counts_once(peer: WireProducer, consumer: Consumer) -> None:
    """An equal seq is a duplicate, not a step back."""
    before, seq = drops(consumer), peer.publish(FRAME)
    peer.say(FrameDescriptor, seq=seq)
    peer.say(FrameDescriptor, seq=seq)
    assert [frame.seq for frame in received(peer, consumer)] == [seq]
    assert consumer.stats.duplicates == 2
    assert reasons(consumer, before) == {}
    assert consumer.is_active


@pytest.mark.spec("WIRE-11-01", "WIRE-15.18-02", "WIRE-15.4-01")
def test_what_the_ring_overwrote_is_lost_and_counted(connected: Client, peer: WireProducer) -> None:
    """A consumer that slept through two rounds gets the last one, every frame in order, and the rest as late."""
    consumer = warm(peer, connected.consumer(peer.stream_id, max_outstanding_seq_gap=0))
    before, late = drops(consumer), consumer.stats.drops_late
    seqs = [peer.publish(np.full(4, index, np.uint8)) for index in range(3 * NSLOTS)]
    frames = received(peer, consumer)
    assert [frame.seq for frame in frames] == seqs[2 * NSLOTS + 1 :]  # the frame that ends the wait took one more
    assert [int(frame.copy()[0]) for frame in frames] == list(range(2 * NSLOTS + 1, 3 * NSLOTS))
    assert frames[0].dropped_before == 2 * NSLOTS + 1
    assert reasons(consumer, before) == {DropReason.OVERWRITTEN: 2 * NSLOTS + 1}
    assert consumer.stats.drops_late == late + 2 * NSLOTS + 1


# --- QoS


@pytest.mark.spec("WIRE-10.4.1-02", "WIRE-10.4.1-03", "WIRE-10.4.1-04", "WIRE-10.4.1-01", "WIRE-15.18-02")
@pytest.mark.spec("WIRE-10.1.2-02")
def test_qos_tells_what_was_seen_missed_and_late(peer: WireProducer, brisk: Client) -> None:
    """Three seqs that were never described are drops_gap 3, an overwritten one is drops_late 1, byte for byte."""
    consumer = warm(peer, brisk.consumer(peer.stream_id))
    peer.next_seq += 3
    assert received(peer, consumer) == []
    peer.publish(FRAME, slot={"word": committed(peer.next_seq + NSLOTS)})
    received(peer, consumer)
    last = peer.next_seq - 1
    heard = peer.wait_for(QosConsumer, consumer_id=consumer.consumer_id, last_seq_seen=last)
    assert heard.stream_id == peer.endpoints.qos[1]
    names = (peer.stream_id, consumer.consumer_id, peer.epoch)
    assert heard.data == struct.pack("<4H I I Q Q Q Q B", 41, 5, 900, 1, *names, last, 3, 1, 1)
    assert (consumer.stats.drops_gap, consumer.stats.drops_late) == (3, 1)
    peer.wait_for(QosConsumer, heard.index + 1, consumer_id=consumer.consumer_id)  # and again, though nothing changed
    peer.wait_for(ConsumerHello, heard.index + 1, consumer_id=consumer.consumer_id)


@pytest.mark.spec("WIRE-10.4.1-04", "WIRE-15.18-02")
def test_qos_counts_a_frame_as_late_that_was_overwritten_after_its_delivery(peer: WireProducer, brisk: Client) -> None:
    """K3: delivered whole, overwritten before it was copied: one drops_late, however often it is looked at again."""
    consumer = warm(peer, brisk.consumer(peer.stream_id))
    late = consumer.stats.drops_late
    seq = peer.publish(FRAME)
    (frame,) = received(peer, consumer)
    assert frame.seq == seq
    before = consumer.stats
    peer.regions.set_word(seq % NSLOTS, in_progress(seq + NSLOTS))
    with pytest.raises(tp.FrameOverwritten):
        frame.copy()
    assert not frame.is_intact()
    with pytest.raises(tp.FrameOverwritten), frame:
        pass
    heard = peer.wait_for(QosConsumer, consumer_id=consumer.consumer_id, drops_late=late + 1).message
    after = consumer.stats
    assert (after.received, after.drops_late) == (before.received - 1, before.drops_late + 1)
    assert heard.drops_gap == after.drops_gap == before.drops_gap


# --- hello


def packed_hello(
    peer: WireProducer,
    consumer: Consumer,
    *,
    progress: bool = False,
    mode: int = 1,
    max_rate_hz: int = 0,
    layout_version: int = 1,
    hints: tuple[int, int, int] = (NULL_U32,) * 3,
    descriptor: tuple[str, int] = ("", 0),
    control: tuple[str, int] = ("", 0),
) -> bytes:
    names = (peer.stream_id, consumer.consumer_id)
    wishes = (1, progress, mode, max_rate_hz, layout_version)
    layout = "<4H I I B B B I I I I I I I"
    fixed = struct.pack(layout, 39, 2, 900, 1, *names, *wishes, *hints, descriptor[1], control[1])
    texts = [channel.encode() for channel, _ in (descriptor, control)]
    return fixed + b"".join(struct.pack("<I", len(text)) + text for text in texts)


@pytest.mark.spec("WIRE-10.1.2-01", "WIRE-10.1.2-03", "WIRE-10.1.2-04", "WIRE-10.1.2-05", "WIRE-10.1.3-07")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"mode": "rate_limited", "max_rate_hz": 30}, {"mode": 2, "max_rate_hz": 30}),
        ({"on_progress": print}, {"progress": True}),
        (
            {"on_progress": print, "progress_interval_us": 500, "progress_bytes_delta": 4096},
            {"progress": True, "hints": (500, 4096, NULL_U32)},
        ),
        (
            {"on_progress": print, "progress_major_delta_units": 16},
            {"progress": True, "hints": (NULL_U32, NULL_U32, 16)},
        ),
        (
            {"private_descriptors": Endpoint(IPC, 31001), "private_control": Endpoint(IPC, 31002)},
            {"descriptor": (IPC, 31001), "control": (IPC, 31002)},
        ),
    ],
    ids=["plain", "rate limited", "progress", "hints", "major hint", "private"],
)
def test_a_consumer_says_hello_when_it_starts(
    brisk: Client, peer: WireProducer, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    """On the control stream, with what it can do and wants, byte for byte; nothing asked for is 0, null or empty."""
    consumer = brisk.consumer(peer.stream_id, **options)
    heard = peer.wait_for(ConsumerHello, consumer_id=consumer.consumer_id)
    assert heard.stream_id == peer.endpoints.control[1]
    golden = {packed_hello(peer, consumer, layout_version=version, **expected) for version in (0, 1)}
    assert heard.data in golden  # 0 is any version, 1 the only one there is
    wait_until(lambda: len(peer.heard(ConsumerHello, consumer_id=consumer.consumer_id)) > 1, "it says hello again")


@pytest.mark.spec("WIRE-10.1.2-10", "WIRE-10.1.2-11", "WIRE-10.1.3-08")
@pytest.mark.parametrize("name", ["private_descriptors", "private_control"])
@pytest.mark.parametrize("endpoint", [Endpoint(IPC, 0), Endpoint("", 31001)], ids=["id 0", "no channel"])
def test_half_a_request_for_a_private_stream_is_never_sent(
    connected: Client, peer: WireProducer, name: str, endpoint: Endpoint
) -> None:
    """The API refuses a channel without an id and an id without a channel."""
    half: dict[str, Any] = {name: endpoint}
    with pytest.raises((tp.ConfigError, tp.LocalProtocolError, ValueError)):
        connected.consumer(peer.stream_id, **half)
    consumer = connected.consumer(peer.stream_id)
    peer.wait_for(ConsumerHello, consumer_id=consumer.consumer_id)
    for heard in peer.heard(ConsumerHello):
        assert (heard.message.descriptor_stream_id, heard.message.descriptor_channel) == (0, "")
        assert (heard.message.control_stream_id, heard.message.control_channel) == (0, "")


# --- ConsumerConfig


@pytest.mark.spec("WIRE-10.1.3-02", "WIRE-10.1.3-04")
def test_a_consumer_obeys_only_its_own_config(connected: Client, peer: WireProducer) -> None:
    """One for another consumer or another stream changes nothing; its own changes its mode, also in what it reports."""
    states: list[StateChange] = []
    consumer = warm(peer, connected.consumer(peer.stream_id, on_state=states.append))
    mine: dict[str, Any] = {"consumer_id": consumer.consumer_id, "mode": Mode.RATE_LIMITED}
    for other in ({"consumer_id": consumer.consumer_id + 1}, {"stream_id": peer.stream_id + 1_000_000}):
        peer.say(ConsumerConfig, **mine | other, use_shm=False, payload_fallback_uri="bridge://x")
        peer.say(ConsumerConfig, consumer_id=consumer.consumer_id, mode=Mode.RATE_LIMITED)
        wait_until(lambda: consumer.mode is Mode.RATE_LIMITED, "its own config is obeyed")
        peer.say(ConsumerConfig, consumer_id=consumer.consumer_id, mode=Mode.STREAM)
        wait_until(lambda: consumer.mode is Mode.STREAM, "its own config is obeyed")
        received(peer, consumer)
        assert consumer.is_active
        assert consumer.fallback_uri is None
        assert consumer.poll(0) is None  # and `on_state` has been called
        assert State.FALLBACK not in {change.state for change in states}
    since = peer.now
    peer.say(ConsumerConfig, consumer_id=consumer.consumer_id, mode=Mode.RATE_LIMITED)
    peer.wait_for(QosConsumer, since, consumer_id=consumer.consumer_id, mode=Mode.RATE_LIMITED)


@pytest.fixture
def private(connected: Client, peer: WireProducer, told: list[Progress]) -> Consumer:
    """A consumer that asked for streams of its own and was not answered yet."""
    first = peer.endpoints.control[1]
    endpoints: dict[str, Any] = {
        "private_descriptors": Endpoint(IPC, first + 7),
        "private_control": Endpoint(IPC, first + 8),
    }
    return warm(peer, connected.consumer(peer.stream_id, on_progress=told.append, **endpoints))


def grant(peer: WireProducer, consumer: Consumer) -> tuple[tuple[str, int], tuple[str, int]]:
    """Give the consumer what it asked for; returns when it listens there."""
    hello = peer.wait_for(ConsumerHello, consumer_id=consumer.consumer_id).message
    descriptor = peer.open((hello.descriptor_channel, hello.descriptor_stream_id))
    control = peer.open((hello.control_channel, hello.control_stream_id))
    peer.say(
        ConsumerConfig,
        consumer_id=consumer.consumer_id,
        descriptor_channel=descriptor[0],
        descriptor_stream_id=descriptor[1],
        control_channel=control[0],
        control_stream_id=control[1],
    )
    for endpoint in (descriptor, control):
        wait_until(
            lambda it=endpoint: consumer.poll() is None and peer.has_listener(it), "the consumer listens on its stream"
        )
    return descriptor, control


@pytest.mark.spec("WIRE-5-02")
def test_with_a_stream_of_its_own_the_shared_descriptors_are_not_heard(peer: WireProducer, private: Consumer) -> None:
    """Different seqs on both: only those of the private stream surface, and none twice."""
    descriptor, _ = grant(peer, private)
    peer.publish(FRAME, seq=peer.next_seq + 1, on=descriptor)
    wait_until(lambda: private.poll(0.02) is not None, "a frame comes over the private stream")
    ours: list[int] = []
    theirs: list[int] = []
    for index in range(6):
        seq = peer.publish(FRAME, on=descriptor if index % 2 else None)
        (ours if index % 2 else theirs).append(seq)
    frames: list[int] = []
    wait_until(
        lambda: frames.extend(it.seq for it in [private.poll(0.02)] if it) or frames[-1:] == ours[-1:],
        "the last frame comes",
    )
    assert frames == ours


@pytest.mark.spec("WIRE-5-11", "WIRE-5-12")
def test_with_a_control_stream_of_its_own_progress_comes_there_and_the_rest_where_it_was(
    peer: WireProducer, private: Consumer, told: list[Progress]
) -> None:
    """FrameProgress on the private stream is received, and an announce of a new epoch on the shared one is obeyed."""
    _, control = grant(peer, private)
    peer.begin(peer.next_seq, FRAME)
    peer.say(FrameProgress, on=control, seq=peer.next_seq, payload_bytes_filled=0, state=FrameProgressState.STARTED)
    wait_until(lambda: private.poll(0.01) is None and told, "progress is told")
    assert told[-1].seq == peer.next_seq
    regions = peer.new_epoch()
    wait_until(lambda: private.poll() is None and private.epoch == regions.epoch, "the new epoch is mapped")


@pytest.mark.spec("WIRE-10.1.3-10", "WIRE-10.1.3-07")
@pytest.mark.parametrize("assigned", ["nothing", "the shared streams"])
def test_after_a_decline_the_consumer_stays_on_the_shared_stream(
    peer: WireProducer, private: Consumer, assigned: str
) -> None:
    """Empty and 0, or what is shared anyway, is a decline: frames keep arriving, each once."""
    shared = {
        "descriptor_channel": peer.endpoints.descriptor[0],
        "descriptor_stream_id": peer.endpoints.descriptor[1],
    }
    names: dict[str, Any] = {"consumer_id": private.consumer_id} | (shared if assigned == "the shared streams" else {})
    for mode in (Mode.RATE_LIMITED, Mode.STREAM):
        peer.say(ConsumerConfig, **names, mode=mode)
        wait_until(lambda mode=mode: private.mode is mode, "the config is obeyed")
    seqs = [peer.publish(FRAME) for _ in range(3)]
    assert [frame.seq for frame in received(peer, private)] == seqs


# --- progress


ROWS = {"progress_unit": ProgressUnit.ROWS, "progress_stride_bytes": 12}
PAYLOAD = FRAME.tobytes()


def tell(peer: WireProducer, filled: int, state: FrameProgressState = FrameProgressState.PROGRESS, **lie: Any) -> None:
    peer.say(FrameProgress, **{"seq": peer.next_seq, "payload_bytes_filled": filled, "state": state} | lie)


def heard_progress(peer: WireProducer, consumer: Consumer, told: list[Progress]) -> list[Progress]:
    """Wait until all progress sent before now is received: that of a later frame has arrived."""
    seq = peer.next_seq
    peer.next_seq += 1
    mark = peer.next_seq
    peer.next_seq += 1
    peer.begin(mark, FRAME)
    peer.say(FrameProgress, seq=mark, payload_bytes_filled=0, state=FrameProgressState.STARTED)
    wait_until(lambda: consumer.poll(0.01) is None and any(it.seq == mark for it in told), "the mark is told")
    peer.next_seq = seq
    found = [it for it in told if it.seq != mark]
    told.clear()
    return found


@pytest.mark.spec("WIRE-10.2.2-05")
def test_without_opting_in_progress_is_ignored(peer: WireProducer, consumer: Consumer) -> None:
    """Its hello says so, and neither honest nor impossible progress changes what it receives."""
    assert not peer.wait_for(ConsumerHello, consumer_id=consumer.consumer_id).message.supports_progress
    before = drops(consumer)
    peer.begin(peer.next_seq, FRAME)
    for filled in (24, 8, 2**60):
        tell(peer, filled)
    seq = peer.publish(FRAME)
    assert [frame.seq for frame in received(peer, consumer)] == [seq]
    assert reasons(consumer, before) == {}


@pytest.mark.spec("WIRE-10.2.2-06", "WIRE-10.2.2-07", "WIRE-10.2.2-14", "WIRE-8.2-08")
def test_a_prefix_is_what_was_filled_in_the_slot_of_the_seq(
    peer: WireProducer, eager: Consumer, told: list[Progress]
) -> None:
    """Also after a round of the ring: with inferred strides the filled bytes can be read, and not one more."""
    peer.next_seq += NSLOTS + 3 - peer.next_seq % NSLOTS
    seq = peer.next_seq
    peer.begin(seq, FRAME)
    peer.fill(seq, b"\xee" * 24)
    tell(peer, 0, FrameProgressState.STARTED)
    for filled in (4, 12, 20):
        peer.fill(seq, PAYLOAD[:filled], length=24)
        tell(peer, filled)
    found = heard_progress(peer, eager, told)
    assert [(it.seq, it.epoch, it.bytes_filled) for it in found] == [(seq, peer.epoch, n) for n in (0, 4, 12, 20)]
    assert found[0].state is FrameProgressState.STARTED
    for it in found[1:]:
        assert it.state is FrameProgressState.PROGRESS
        assert it.prefix is not None
        assert it.prefix.tobytes() == PAYLOAD[: it.bytes_filled]
        assert not it.prefix.flags.writeable
        assert it.is_intact()
    peer.fill(seq, PAYLOAD)
    peer.commit(seq)
    peer.next_seq += 1
    peer.say(FrameDescriptor, seq=seq)
    assert [frame.seq for frame in received(peer, eager)] == [seq]
    peer.begin(seq + NSLOTS, FRAME)
    assert not found[-1].is_intact()


@pytest.mark.spec("WIRE-10.2.2-07", "WIRE-10.2.2-09")
def test_a_prefix_never_reaches_beyond_the_payload(peer: WireProducer, eager: Consumer, told: list[Progress]) -> None:
    """A message that claims more than values_len_bytes opens nothing beyond it."""
    peer.begin(peer.next_seq, FRAME)
    for filled in (25, POOLS[1], 2**63):
        tell(peer, filled)
    for it in heard_progress(peer, eager, told):
        assert it.prefix is None or it.prefix.nbytes <= 24


@pytest.mark.spec("WIRE-10.2.2-08", "WIRE-10.2.2-15")
def test_rows_are_layout_safe_only_with_a_true_stride(
    peer: WireProducer, eager: Consumer, told: list[Progress]
) -> None:
    """A strided frame has a prefix by rows if it declares them, none if it does not, and is dropped if it lies."""
    strided: dict[str, Any] = {"strides": (16, 4), "values_len_bytes": 32}
    peer.begin(peer.next_seq, FRAME, **strided)
    tell(peer, 20)
    (plain,) = heard_progress(peer, eager, told)
    assert plain.prefix is None
    assert plain.rows is None
    peer.next_seq += 3

    seq = peer.next_seq
    peer.begin(seq, FRAME, **strided, progress_unit=ProgressUnit.ROWS, progress_stride_bytes=16)
    peer.fill(seq, PAYLOAD[:12], length=32)
    tell(peer, 20)
    (by_rows,) = heard_progress(peer, eager, told)
    assert by_rows.rows == 1
    assert by_rows.prefix is not None
    np.testing.assert_array_equal(np.asarray(by_rows.prefix).reshape(-1)[:3], FRAME[0])
    peer.next_seq += 3
    received(peer, eager)  # settles the gap

    for stride in (0, 12, 17):
        before = drops(eager)
        peer.begin(peer.next_seq, FRAME, **strided, progress_unit=ProgressUnit.ROWS, progress_stride_bytes=stride)
        tell(peer, 20)
        assert [it for it in heard_progress(peer, eager, told) if it.prefix is not None] == []
        lie = {"progress_unit": ProgressUnit.ROWS, "progress_stride_bytes": stride}
        peer.publish(np.zeros(8, np.float32), slot=strided | lie | {"dims": (2, 3), "ndims": 2})
        assert received(peer, eager) == []
        assert reasons(eager, before) == {DropReason.BAD_PROGRESS: 1}


@pytest.mark.spec("WIRE-10.2.2-11")
def test_a_frame_whose_progress_goes_back_is_dropped(peer: WireProducer, eager: Consumer, told: list[Progress]) -> None:
    """No more progress of it is reported, and its descriptor, however good its slot is, brings no frame."""
    before = drops(eager)
    seq = peer.next_seq
    peer.begin(seq, FRAME)
    for filled in (12, 8, 20):
        tell(peer, filled)
    assert [it.bytes_filled for it in heard_progress(peer, eager, told)] == [12]
    peer.publish(FRAME, seq=seq)
    assert received(peer, eager) == []
    assert sum(reasons(eager, before).values()) == 1


@pytest.mark.spec("WIRE-10.2.2-11")
def test_the_newest_frame_is_refused_when_its_progress_went_back(
    peer: WireProducer, eager: Consumer, told: list[Progress]
) -> None:
    """`latest` gives it no more than `poll` does: it is dropped and counted once, and the next frame is shown."""
    before, count = drops(eager), eager.stats.received
    seq = peer.next_seq
    peer.begin(seq, FRAME)
    for filled in (12, 8):
        tell(peer, filled)
    heard_progress(peer, eager, told)
    peer.publish(FRAME, seq=seq)
    shown: set[int] = set()

    def is_refused() -> bool:
        frame = eager.latest()
        shown.update(() if frame is None else (frame.seq,))
        return bool(reasons(eager, before))

    wait_until(is_refused, "the frame is refused")
    assert eager.latest() is None
    assert seq not in shown
    assert reasons(eager, before) == {DropReason.BAD_PROGRESS: 1}
    assert eager.stats.received == count
    peer.publish(FRAME)
    wait_until(lambda: eager.latest() is not None, "the next frame is shown")
    assert eager.stats.received == count + 1


@pytest.mark.spec("WIRE-10.2.2-12", "WIRE-10.2.2-13")
def test_complete_is_neither_a_commit_nor_a_descriptor(
    peer: WireProducer, eager: Consumer, told: list[Progress]
) -> None:
    """Uncommitted or committed, COMPLETE brings no frame; described while uncommitted, it is dropped as such."""
    before = drops(eager)
    seq = peer.next_seq
    peer.begin(seq, FRAME)
    peer.fill(seq, PAYLOAD)
    tell(peer, 24, FrameProgressState.COMPLETE)
    heard_progress(peer, eager, told)
    assert eager.poll(0.02) is None
    peer.publish(FRAME, seq=seq, slot={"word": in_progress(seq)})
    assert received(peer, eager) == []
    assert reasons(eager, before) == {DropReason.NOT_COMMITTED: 1}

    peer.write(peer.next_seq, FRAME)
    tell(peer, 24, FrameProgressState.COMPLETE)
    heard_progress(peer, eager, told)
    assert eager.poll(0.02) is None
    count = eager.stats.received
    assert received(peer, eager) == []  # described at last, it is the one that ends the wait
    assert eager.stats.received == count + 1


@pytest.mark.spec("WIRE-8.2-09")
@pytest.mark.parametrize("word", ["an earlier seq", "a later seq"])
def test_progress_of_a_seq_that_the_slot_does_not_hold_shows_no_data(
    peer: WireProducer, eager: Consumer, told: list[Progress], word: str
) -> None:
    """The commit word names another frame: there is nothing of this one to be read."""
    seq = peer.next_seq
    other = seq + NSLOTS if word == "a later seq" else seq - NSLOTS
    peer.begin(seq, FRAME)
    peer.fill(seq, PAYLOAD)
    peer.regions.set_word(seq % NSLOTS, in_progress(other % 2**63))
    tell(peer, 12)
    for it in heard_progress(peer, eager, told):
        assert it.prefix is None or not it.is_intact()


@pytest.mark.spec("WIRE-10.2.2-05", "WIRE-10.2.1-07")
@pytest.mark.parametrize("lie", [{"epoch": 99}, {"stream_id": 5}, {"state": FrameProgressState.UNKNOWN}], ids=str)
def test_progress_that_is_not_of_this_epoch_and_stream_is_ignored(
    peer: WireProducer, eager: Consumer, told: list[Progress], lie: dict[str, Any]
) -> None:
    """A foreign epoch or stream, or no state at all: nothing is reported, and nothing is unmapped (G6)."""
    peer.begin(peer.next_seq, FRAME)
    tell(peer, 12, **lie)
    assert heard_progress(peer, eager, told) == []
    assert eager.is_active


# --- metadata


def crc32c(data: bytes) -> int:
    """Castagnoli's, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.spec("WIRE-10.3.2-04")
def test_metadata_is_known_by_its_version(peer: WireProducer, consumer: Consumer) -> None:
    """Text and JSON attributes as what they hold, others as bytes; also keys and formats that are not defined."""
    attributes = (
        Attribute(key="camera", format="text/plain", value=b"front"),
        Attribute(key="exposure", format="application/json", value=b'{"ms": 4}'),
        Attribute(key="never-heard-of", format="sbe:77.3", value=b"\x00\xff"),
    )

    def is_known() -> bool:
        peer.say(DataSourceMeta, meta_version=3, attributes=attributes)  # periodically, as producers do
        peer.say(DataSourceMeta, meta_version=4, attributes=attributes[:1])
        known = (consumer.metadata(3), consumer.metadata(4))
        return None not in known

    wait_until(is_known, "the metadata is known")
    known = consumer.metadata(3)
    assert known is not None
    assert known.attributes == {"camera": "front", "exposure": {"ms": 4}, "never-heard-of": b"\x00\xff"}
    wait_until(lambda: (it := consumer.metadata()) and it.meta_version == 4, "the last one is the newest")
    newest = consumer.metadata()
    assert newest is not None
    assert (newest.meta_version, newest.attributes) == (4, {"camera": "front"})


BLOB = bytes(range(256)) * 3
WHOLE = [(0, BLOB[:300]), (300, BLOB[300:600]), (600, BLOB[600:])]
BROKEN_BLOBS: dict[str, tuple[list[tuple[int, bytes]], int, int]] = {
    "a gap": ([WHOLE[0], WHOLE[2]], len(BLOB), 0),
    "an overlap": ([WHOLE[0], (299, BLOB[299:600]), WHOLE[2]], len(BLOB), 0),
    "a chunk twice": ([WHOLE[0], WHOLE[0], WHOLE[1], WHOLE[2]], len(BLOB), 0),
    "backwards": (WHOLE[::-1], len(BLOB), 0),
    "an end missing": (WHOLE[:2], len(BLOB), 0),
    "more than announced": (WHOLE, len(BLOB) - 1, 0),
    "another checksum": (WHOLE, len(BLOB), crc32c(BLOB) ^ 1),
    "a flipped bit": ([WHOLE[0], (300, b"\x00" + BLOB[301:600]), WHOLE[2]], len(BLOB), crc32c(BLOB)),
}


def send_blob(peer: WireProducer, version: int, chunks: list[tuple[int, bytes]], total: int, checksum: int) -> None:
    peer.say(MetaBlobAnnounce, meta_version=version, blob_type=5, total_len=total, checksum=checksum)
    for offset, data in chunks:
        peer.say(MetaBlobChunk, meta_version=version, chunk_offset=offset, chunk_bytes=data)
    peer.say(MetaBlobComplete, meta_version=version, checksum=checksum)


@pytest.mark.spec("WIRE-10.3.3-02", "WIRE-15.9-02")
def test_a_blob_with_a_flaw_is_discarded(peer: WireProducer, consumer: Consumer) -> None:
    """Gap, overlap, repetition, wrong length, wrong checksum: no blob; without a flaw it is one, checksum or not."""

    def is_listening() -> bool:
        peer.say(DataSourceMeta)
        return consumer.metadata() is not None

    wait_until(is_listening, "the consumer hears the metadata stream")
    for version, (chunks, total, checksum) in enumerate(BROKEN_BLOBS.values(), start=10):
        send_blob(peer, version, chunks, total, checksum)
    send_blob(peer, 8, WHOLE, len(BLOB), crc32c(BLOB))
    send_blob(peer, 9, WHOLE, len(BLOB), 0)
    wait_until(lambda: consumer.blob(5, 9) is not None, "the last blob is there")
    assert consumer.blob(5, 8) == consumer.blob(5, 9) == BLOB
    for version, name in enumerate(BROKEN_BLOBS, start=10):
        assert consumer.blob(5, version) is None, name


# --- rate


@pytest.mark.spec("WIRE-11-03", "WIRE-11-05", "WIRE-10.1.2-05")
@pytest.mark.parametrize("clock", ["descriptor", "slot"])
def test_a_declined_rate_is_kept_locally_by_the_frames_time(connected: Client, peer: WireProducer, clock: str) -> None:
    """At most max_rate_hz by publish time, or capture time where there is none; what is skipped is no gap."""
    limits: dict[str, Any] = {"mode": "rate_limited", "max_rate_hz": 10, "max_outstanding_seq_gap": 0}
    consumer = warm(peer, connected.consumer(peer.stream_id, **limits))
    gaps = consumer.stats.drops_gap
    start_ns = 10**15
    for index in range(8):
        stamp = {"timestamp_ns": start_ns + index * 50_000_000}
        stamps: dict[str, Any] = (
            {"descriptor": stamp, "slot": {"timestamp_ns": 5}} if clock == "descriptor" else {"slot": stamp}
        )
        peer.publish(np.full(4, index, np.uint8), **stamps)
    got = []
    while (frame := consumer.poll(0.05)) is not None:
        got.append(int(frame.array[0]))
    assert got == [0, 2, 4, 6]
    assert consumer.stats.drops_gap == gaps
    assert consumer.stats.drops[DropReason.RATE_LIMITED] >= 4


@pytest.mark.spec("WIRE-15.4-04", "WIRE-15.4-03")
@pytest.mark.parametrize(("limit", "skipped"), [(4, 5), (6, 0), (0, 0)])
def test_too_far_behind_means_on_to_the_newest(brisk: Client, peer: WireProducer, limit: int, skipped: int) -> None:
    """Six frames, all still in their slots: beyond the limit only the newest is taken, and QoS counts the others."""
    consumer = warm(peer, brisk.consumer(peer.stream_id, max_outstanding_seq_gap=limit))
    gaps, before = consumer.stats.drops_gap, drops(consumer)
    seqs = [peer.publish(FRAME) for _ in range(6)]
    got = []
    while (frame := consumer.poll(0.05)) is not None:
        got.append(frame.seq)
    assert got == seqs[skipped:]
    assert reasons(consumer, before) == ({DropReason.RESYNC: skipped} if skipped else {})
    peer.wait_for(QosConsumer, consumer_id=consumer.consumer_id, drops_gap=gaps + skipped, last_seq_seen=seqs[-1])


@pytest.mark.spec("WIRE-15.7-02")
@pytest.mark.parametrize(
    ("captured", "published", "refused"),
    [
        ((5, 6, 4, 5), (5, 6, 7, 8), [2]),
        ((5, 6, 7, 8), (5, 9, 8, 9), [2]),
        ((5, 5, 5, 6), (5, 5, 6, 6), []),
        ((5, 4, 3, 2), (None, None, None, None), []),
        ((9, 0, 2**64 - 1, 9), (5, 6, 7, 8), []),
    ],
    ids=["capture", "publishing", "equal", "capture alone", "no capture time"],
)
def test_a_frame_whose_time_goes_back_is_refused(
    peer: WireProducer,
    consumer: Consumer,
    captured: tuple[int, ...],
    published: tuple[int | None, ...],
    refused: list[int],
) -> None:
    """Where slot and descriptor both carry a time, against the frame before; otherwise it is as good as any."""
    before = drops(consumer)
    seqs = [
        peer.publish(FRAME, slot={"timestamp_ns": capture}, descriptor={"timestamp_ns": publish})
        for capture, publish in zip(captured, published, strict=True)
    ]
    kept = [seq for index, seq in enumerate(seqs) if index not in refused]
    assert [frame.seq for frame in received(peer, consumer)] == kept
    assert reasons(consumer, before) == ({DropReason.BAD_TIMESTAMP: len(refused)} if refused else {})


@pytest.mark.spec("WIRE-5-15")
def test_all_messages_may_share_one_stream(shared_media_driver: aeron.MediaDriver, shm_dir: Path) -> None:
    """Descriptors, announces, QoS and metadata on the control stream: told apart by their template."""
    one, aeron_dir = Endpoints.unused().control, shared_media_driver.aeron_dir
    with (
        WireProducer(shm_dir, aeron_dir, endpoints=Endpoints(one, one, one, one)) as peer,
        tp.connect(aeron_dir, overrides=peer.settings) as client,
    ):
        consumer = warm(peer, client.consumer(peer.stream_id))

        def is_heard() -> bool:
            peer.say(DataSourceMeta, meta_version=2)
            return consumer.metadata(2) is not None

        wait_until(is_heard, "metadata is heard")
        peer.wait_for(QosConsumer, consumer_id=consumer.consumer_id)
        assert peer.heard(ShmPoolAnnounce)
        seqs = [peer.publish(FRAME) for _ in range(3)]
        assert [frame.seq for frame in received(peer, consumer)] == seqs
