# SPDX-License-Identifier: Apache-2.0
"""What a bridge sender makes of frames: chunks by the rules, of whole frames only, behind the announce of their epoch.

Bridge §2.1, §5.1, §5.2, §7.2, §8; decisions G1-G3, G10, G16, G26. The source is a producer made of files that may
write anything at any time; the test receiver checks every rule of §5 with each frame that it puts together.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tensorpool import aeron
from tensorpool.wire.bridge import BridgeFrameChunk
from tensorpool.wire.control import FrameDescriptor, FrameProgress, ShmPoolAnnounce
from tests.support.bridge_rig import Sending
from tests.support.bridge_sender import CHUNK_BYTES, FIRST_CHUNK_BYTES, MTU, Link, cut, noise
from tests.support.processes import private_directory, wait_until
from tests.support.region_bytes import committed, in_progress

POOLS = {1: 256, 7: 1 << 17}
OVERHEAD = 32  # Aeron's


@pytest.fixture(scope="module")
def sending(shared_media_driver: aeron.MediaDriver, link: Link) -> Iterator[Sending]:
    """A bridge that has sent a frame."""
    with (
        private_directory() as folder,
        Sending(folder, shared_media_driver.aeron_dir, link=link.again(), producer={"pools": POOLS}) as sending,
    ):
        yield sending.meet()


def plain(length: int) -> NDArray[Any]:
    return np.frombuffer(noise(length), np.uint8)


FRAMES = {
    "one byte": plain(1),
    "columns first": np.asfortranarray(np.arange(35, dtype=np.int16).reshape(5, 7)),
    "one chunk, full": plain(FIRST_CHUNK_BYTES),
    "a byte more": plain(FIRST_CHUNK_BYTES + 1),
    "two chunks, full": plain(FIRST_CHUNK_BYTES + CHUNK_BYTES),
    "two chunks and a byte": plain(FIRST_CHUNK_BYTES + CHUNK_BYTES + 1),
    "a hundred chunks": np.arange(1 << 14, dtype=np.float64).reshape(128, 128),
}


@pytest.mark.spec("BRG-5.1-01", "BRG-5.1-02", "BRG-5.1-03", "BRG-5.1-04", "BRG-5.2-05", "BRG-5.2-06", "BRG-5.2-08")
@pytest.mark.spec("BRG-5.2-10", "BRG-5.2-11", "BRG-5.2-18", "BRG-5.2-21", "BRG-11-01")
@pytest.mark.spec("BRG-5.2-15", "BRG-5.2-16", "BRG-5.2-17", "BRG-5.2-23")
@pytest.mark.parametrize("array", FRAMES.values(), ids=FRAMES)
def test_a_frame_leaves_in_chunks_that_fit(sending: Sending, array: NDArray[Any]) -> None:
    """Its bytes and its slot, under the source's stream, epoch and seq; in order, each in one datagram (G1)."""
    frame = sending.carry(array, slot={"timestamp_ns": 4711, "meta_version": 3})
    producer = sending.producer
    assert frame.payload == array.tobytes("A")
    assert frame.slot.data == producer.regions.header(frame.seq & (producer.nslots - 1))
    assert frame.slot.seq == frame.seq
    assert {chunk.stream_id for chunk in frame.chunks} == {producer.stream_id}
    assert frame.epoch == producer.epoch
    sizes = [(chunk.chunk_offset, chunk.chunk_length) for chunk in frame.chunks]
    assert sizes == cut(frame.payload)
    assert [chunk.chunk_index for chunk in frame.chunks] == list(range(len(sizes)))
    received = sending.receiver.received(BridgeFrameChunk, seq=frame.seq)
    assert all(len(it.data) <= MTU - OVERHEAD for it in received)
    assert sending.receiver.has_seen_no_fragments


@pytest.mark.spec("BRG-5.2-01")
def test_an_empty_frame_is_one_chunk(sending: Sending) -> None:
    """G26."""
    frame = sending.carry(np.empty((0, 3), np.float32))
    assert [(chunk.chunk_count, chunk.chunk_length) for chunk in frame.chunks] == [(1, 0)]
    assert frame.slot.shape == (0, 3)


@pytest.mark.spec("BRG-5.2-17", "BRG-10-08", "BRG-5.2-15", "BRG-5.2-16")
@pytest.mark.parametrize(
    ("keys", "mtu", "first", "others"),
    [
        ({"chunk_bytes": 500}, MTU, 500, 500),
        ({"mtu_bytes": 1024}, 1024, 679, 896),
        ({"channel_mtu": 8192}, 8192, 7847, 8064),
        ({"max_chunk_bytes": 100}, MTU, 100, 100),
    ],
    ids=["chunk_bytes", "mtu_bytes", "the channel's mtu", "max_chunk_bytes"],
)
def test_chunks_have_the_size_that_is_configured(
    shared_media_driver: aeron.MediaDriver,
    shm_dir: Path,
    link: Link,
    keys: dict[str, Any],
    mtu: int,
    first: int,
    others: int,
) -> None:
    keys = dict(keys)
    own = link.again()
    if channel_mtu := keys.pop("channel_mtu", 0):
        own = own._replace(payload=(f"{own.payload[0]}|mtu={channel_mtu}", own.payload[1]))
    with Sending(shm_dir, shared_media_driver.aeron_dir, link=own, producer={"pools": POOLS}, **keys) as sending:
        frame = sending.meet().carry(noise(20_000))
        sizes = [(chunk.chunk_offset, chunk.chunk_length) for chunk in frame.chunks]
        assert sizes == cut(frame.payload, first, others)
        received = sending.receiver.received(BridgeFrameChunk, seq=frame.seq)
        assert all(len(it.data) <= mtu - OVERHEAD for it in received)
        assert sending.receiver.has_seen_no_fragments


@pytest.mark.spec("BRG-10-07", "BRG-5.2-17")
def test_without_a_configured_mtu_it_is_that_of_the_media_driver(shm_dir: Path) -> None:
    """No key of the bridge, and nothing in its channels, says it."""
    with (
        aeron.MediaDriver(str(shm_dir / "aeron"), mtu_length=4096) as media_driver,
        private_directory() as folder,
        Sending(folder, media_driver.aeron_dir, producer={"pools": POOLS}) as sending,
    ):
        frame = sending.meet().carry(noise(20_000))
        sizes = [(chunk.chunk_offset, chunk.chunk_length) for chunk in frame.chunks]
        assert sizes == cut(frame.payload, 4096 - 345, 4096 - 128)
        assert sending.receiver.has_seen_no_fragments


@pytest.mark.spec("BRG-5.2-02")
def test_a_frame_of_too_many_chunks_is_not_sent(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path, link: Link
) -> None:
    """G2: not one chunk of it, and it is counted; the next frame goes."""
    keys: dict[str, Any] = {"chunk_bytes": 1}
    with Sending(
        shm_dir, shared_media_driver.aeron_dir, link=link.again(), producer={"pools": POOLS}, **keys
    ) as sending:
        sending.meet()
        before, since = sending.drops(), len(sending.receiver.transcript)
        seq = sending.producer.publish(noise(65_536))
        frame = sending.carry(noise(300))
        assert len(frame.chunks) == 300
        assert {chunk.seq for chunk in sending.receiver.chunks(since)} == {frame.seq}
        assert seq != frame.seq
        assert sending.drops() - before == {"too_large": 1}


@pytest.mark.spec("BRG-10-10")
def test_a_frame_above_max_payload_bytes_is_not_sent(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path, link: Link
) -> None:
    keys: dict[str, Any] = {"max_payload_bytes": 1000}
    with Sending(shm_dir, shared_media_driver.aeron_dir, link=link.again(), **keys) as sending:
        sending.meet()
        before, since = sending.drops(), len(sending.receiver.transcript)
        sending.producer.publish(noise(1001))
        frame = sending.carry(noise(1000))
        assert {chunk.seq for chunk in sending.receiver.chunks(since)} == {frame.seq}
        assert (sending.drops() - before).total() == 1


# --- as a consumer


@pytest.mark.spec("BRG-2-01")
@pytest.mark.parametrize(
    "lie",
    [
        {"word": "in_progress"},
        {"word": "another"},
        {"values_len_bytes": 2**31},
        {"pool_id": 99},
        {"payload_slot": 10**6},
        {"schema_id": 901},
        {"ndims": 9},
        {"payload_offset": 64},
    ],
    ids=str,
)
def test_a_slot_that_a_consumer_would_drop_is_not_sent(sending: Sending, lie: dict[str, Any]) -> None:
    """The sender reads under the rules of any consumer."""
    producer, receiver = sending.producer, sending.receiver
    seq = producer.next_seq
    words = {"in_progress": in_progress(seq), "another": committed(seq + producer.nslots)}
    given = lie | {"word": words[lie["word"]]} if "word" in lie else lie
    since = len(receiver.transcript)
    producer.publish(noise(3000), slot=given)
    frame = sending.carry(noise(300))
    assert {chunk.seq for chunk in receiver.chunks(since)} == {frame.seq}


@pytest.mark.spec("BRG-2-01")
def test_descriptors_of_other_streams_and_epochs_send_nothing(sending: Sending) -> None:
    producer, receiver = sending.producer, sending.receiver
    since = len(receiver.transcript)
    seq = producer.next_seq
    producer.write(seq, noise(100))
    producer.say(FrameDescriptor, seq=seq, stream_id=producer.stream_id + 1)
    producer.say(FrameDescriptor, seq=seq, epoch=producer.epoch + 1)
    producer.next_seq = seq + 1
    frame = sending.carry(noise(300))
    assert {chunk.seq for chunk in receiver.chunks(since)} == {frame.seq}


@pytest.mark.spec("BRG-2-01", "BRG-5.3-01")
def test_a_frame_that_is_overwritten_while_it_is_sent_never_completes(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path, link: Link
) -> None:
    """G3: the link is full with half a frame out, its slot gets another frame; what completes is whole."""
    own = link.again()
    narrow = own._replace(payload=(f"{own.payload[0]}|term-length=64k", own.payload[1]))
    producer_keys = {"pools": {1: 256, 7: 1 << 20}, "nslots": 1}
    keys: dict[str, Any] = {"assembly_timeout_ms": 60_000}
    with Sending(shm_dir, shared_media_driver.aeron_dir, link=narrow, producer=producer_keys, **keys) as sending:
        sending.meet()
        producer, receiver = sending.producer, sending.receiver
        for _ in range(3):
            sent = sending.bridge.counts()["chunks_sent"]
            old = producer.publish(bytes(900_000))
            wait_until(lambda sent=sent: sending.bridge.counts()["chunks_sent"] > sent, "the frame is begun")
            new = producer.publish(b"\1" * 900_000)
            assert receiver.wait_frame(new).payload == b"\1" * 900_000
            assert receiver.chunks(seq=old)
            assert not receiver.has_frame(old)
            receiver.transcript.clear()
        assert sending.drops()["torn"] == 3


# --- announces and epochs


@pytest.mark.spec("BRG-7.2-01", "BRG-5.2-14")
def test_no_chunk_leaves_before_the_announce_did(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path, link: Link
) -> None:
    """G16: while no receiver takes announces, the sender sends no frames, though a receiver waits for them."""
    with Sending(shm_dir, shared_media_driver.aeron_dir, link=link.again(), hears=["payload", "metadata"]) as sending:
        receiver, producer = sending.receiver, sending.producer
        receiver.wait_until(lambda: receiver.is_connected, "the sender publishes frames")
        before = sending.drops()["not_connected"]
        receiver.wait_until(
            lambda: producer.publish(noise(100)) and sending.drops()["not_connected"] >= before + 3,
            "frames are passed over",
        )
        assert receiver.chunks() == []
        receiver.hear("control")
        sending.meet(forgets=False)
        receiver.wait_for(ShmPoolAnnounce)  # by another socket than the chunks: which arrives first says nothing


@pytest.mark.spec("BRG-7.2-01", "BRG-8-01")
def test_frames_of_an_epoch_that_was_not_announced_are_not_sent(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path, link: Link
) -> None:
    """G16: the sender reads the new epoch already; its first chunk follows the announce, once there is one."""
    keys: dict[str, Any] = {"forward_progress": True}
    link, has_control = link.again(), True
    with Sending(shm_dir, shared_media_driver.aeron_dir, link=link, has_control=has_control, **keys) as sending:
        producer, receiver = sending.meet().producer, sending.receiver
        producer.announces = False
        (grant,) = producer.grants
        producer.use(producer.make_regions(producer.epoch + 1))
        producer.revoke(grant)
        receiver.wait_until(lambda: producer.grants, "the sender has another lease")
        for round in range(10):  # turns of the sender, each with a frame to be taken
            producer.publish(noise(100))
            producer.say(FrameProgress, seq=round, payload_bytes_filled=round)
            receiver.wait_for(FrameProgress, payload_bytes_filled=round)
        assert receiver.chunks(epoch=producer.epoch) == []
        producer.announces = True
        sending.meet(forgets=False)
        receiver.wait_for(ShmPoolAnnounce, epoch=producer.epoch)


@pytest.mark.spec("BRG-7.2-01")
def test_an_epoch_that_the_sender_cannot_map_is_announced_too(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path, link: Link
) -> None:
    """The receiver learns of it while the sender has no lease."""
    with Sending(shm_dir, shared_media_driver.aeron_dir, link=link.again()) as sending:
        producer, receiver = sending.meet().producer, sending.receiver
        producer.answers = False
        (grant,) = producer.grants
        producer.use(producer.make_regions(producer.epoch + 1))
        producer.revoke(grant)
        receiver.wait_for(ShmPoolAnnounce, epoch=producer.epoch)
        assert producer.grants == []


@pytest.mark.spec("BRG-8-01", "BRG-5.1-01")
def test_every_epoch_that_has_chunks_is_announced(sending: Sending) -> None:
    """With the layout of the new epoch; chunks carry the epoch that they were read in."""
    producer, receiver = sending.producer, sending.receiver
    sending.carry(noise(3000))
    for _ in range(3):
        receiver.transcript.clear()
        producer.new_epoch()
        sending.meet(forgets=False)
        epoch = producer.epoch
        announce = receiver.wait_for(ShmPoolAnnounce, epoch=epoch)
        assert announce.message.header_region_uri == producer.regions.layout["header_region_uri"]
        assert {chunk.epoch for chunk in receiver.chunks()} == {epoch}


@pytest.mark.spec("BRG-7.2-01")
def test_a_receiver_that_connects_later_gets_the_announce_too(
    shared_media_driver: aeron.MediaDriver, sending: Sending
) -> None:
    """As often as the driver announces."""
    receiver = sending.receiver
    for _ in range(3):
        receiver.wait_for(ShmPoolAnnounce, len(receiver.transcript), epoch=sending.producer.epoch)


@pytest.mark.spec("BRG-2-01")
def test_a_link_without_a_receiver_costs_the_source_nothing(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path, link: Link
) -> None:
    """Frames are dropped and counted; the first receiver gets the newest, not what was."""
    with Sending(shm_dir, shared_media_driver.aeron_dir, link=link.again(), hears=[]) as sending:
        producer, receiver = sending.producer, sending.receiver
        receiver.wait_until(
            lambda: producer.publish(noise(100)) and sending.drops()["not_connected"] >= 20, "frames are dropped"
        )
        lost = producer.next_seq - producer.nslots
        for name in Link._fields:
            receiver.hear(name)
        sending.meet(forgets=False)
        assert min(chunk.seq for chunk in receiver.chunks()) >= lost
