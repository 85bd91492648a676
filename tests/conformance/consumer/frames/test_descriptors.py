# SPDX-License-Identifier: Apache-2.0
"""How a consumer turns descriptors and slots into frames, and which ones it drops.

Wire §5, §8.2, §8.3, §10.2, §11, §15.4, §15.18.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Client, Consumer, DropReason
from tensorpool.wire.control import DataSourceMeta, FrameDescriptor, QosConsumer, ShmPoolAnnounce
from tests.conformance.consumer.frames.conftest import FRAME, drops, reasons, received, warm
from tests.support.processes import wait_until
from tests.support.region_bytes import committed, in_progress
from tests.support.regions import NSLOTS, POOLS
from tests.support.wire_producer import Endpoints, WireProducer, altered

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
def test_a_slot_in_progress_is_a_late_drop_and_the_consumer_does_not_wait(
    peer: WireProducer, consumer: Consumer
) -> None:
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


# --- rate


@pytest.mark.spec("WIRE-5-15")
def test_all_messages_may_share_one_stream(shared_media_driver: aeron.MediaDriver, shm_dir: Path) -> None:
    """Descriptors, announces, QoS and metadata on the control stream: distinguished by their template."""
    one, aeron_dir = Endpoints.unused().control, shared_media_driver.aeron_dir
    with (
        WireProducer(shm_dir, aeron_dir, endpoints=Endpoints(one, one, one, one)) as peer,
        tp.connect(aeron_dir, overrides=peer.settings) as client,
    ):
        consumer = warm(peer, client.consumer(peer.stream_id))

        def is_received() -> bool:
            peer.say(DataSourceMeta, meta_version=2)
            return consumer.metadata(2) is not None

        wait_until(is_received, "metadata is received")
        peer.wait_for(QosConsumer, consumer_id=consumer.consumer_id)
        assert peer.received(ShmPoolAnnounce)
        seqs = [peer.publish(FRAME) for _ in range(3)]
        assert [frame.seq for frame in received(peer, consumer)] == seqs
