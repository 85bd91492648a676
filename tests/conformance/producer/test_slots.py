# SPDX-License-Identifier: Apache-2.0
"""What a producer writes into slots and files, and what its descriptors say.

Wire §8.2, §8.3, §10.2, §15.2; Driver Model §2.2.
"""

from __future__ import annotations

import struct
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Client, DropReason, Producer
from tensorpool.wire import decode
from tensorpool.wire.control import FrameDescriptor, FrameProgress, FrameProgressState
from tensorpool.wire.driver import Role
from tensorpool.wire.trace import TraceLinkSet
from tests.conformance.producer.conftest import (
    COMPLETE,
    NSLOTS,
    PROGRESS,
    STARTED,
    _stream_ids,
    descriptors,
    fence,
    fill,
    progress_of,
)
from tests.support.driver_process import Deployment
from tests.support.listener import ReceivedMessage
from tests.support.processes import wait_until
from tests.support.region_bytes import DTYPES, committed
from tests.support.wire_consumer import MappedStream, WireConsumer

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
    assert peer.received(FrameDescriptor, seq=seq)[0].data == expected
    assert first == 1, "the first frame of an epoch, which the fixture published, is 0"


@pytest.mark.spec("WIRE-10.2.1-01")
def test_a_frame_that_is_not_published_is_not_described(
    peer: WireConsumer, producer: Producer, mapped: MappedStream
) -> None:
    """Larger than every pool, or given up: no descriptor, and the seqs that are described have no hole."""
    first = producer.next_seq
    with pytest.raises(tp.FrameTooLarge):
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
def test_nothing_is_sent_of_a_frame_before_its_bytes_are_written(
    peer: WireConsumer, producer: Producer, mapped: MappedStream
) -> None:
    """At a descriptor the slot is committed, at a COMPLETE too and the payload is whole, unless it is overwritten."""
    peer.repeated.append(peer.say_hello(producer.stream_id, supports_progress=True))
    fence(peer, producer)
    shape, count = (64, 1024), 300
    described, completed = set(), set()
    wrong: list[Any] = []

    def judge(received: ReceivedMessage[Any]) -> None:
        message = received.message
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
def test_a_trace_is_sent_with_its_frame_and_its_parents(peer: WireConsumer, producer: Producer) -> None:
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
