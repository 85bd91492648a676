# SPDX-License-Identifier: Apache-2.0
"""What a consumer makes of FrameProgress. Wire §10.2, §11."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorpool.client import Client, Consumer, DropReason, Progress
from tensorpool.wire.control import ConsumerHello, FrameDescriptor, FrameProgress, FrameProgressState, ProgressUnit
from tests.conformance.consumer.frames.conftest import FRAME, drops, reasons, received, warm
from tests.support.processes import wait_until
from tests.support.region_bytes import in_progress
from tests.support.regions import NSLOTS, POOLS
from tests.support.wire_producer import WireProducer


@pytest.fixture
def eager(connected: Client, peer: WireProducer, reported: list[Progress]) -> Consumer:
    """One that opted in to progress."""
    return warm(peer, connected.consumer(peer.stream_id, on_progress=reported.append))


PAYLOAD = FRAME.tobytes()


def tell(peer: WireProducer, filled: int, state: FrameProgressState = FrameProgressState.PROGRESS, **lie: Any) -> None:
    peer.say(FrameProgress, **{"seq": peer.next_seq, "payload_bytes_filled": filled, "state": state} | lie)


def received_progress(peer: WireProducer, consumer: Consumer, reported: list[Progress]) -> list[Progress]:
    """Wait until all progress sent before now is received: that of a later frame has arrived."""
    seq = peer.next_seq
    peer.next_seq += 1
    mark = peer.next_seq
    peer.next_seq += 1
    peer.begin(mark, FRAME)
    peer.say(FrameProgress, seq=mark, payload_bytes_filled=0, state=FrameProgressState.STARTED)
    wait_until(lambda: consumer.poll(0.01) is None and any(it.seq == mark for it in reported), "the mark is reported")
    peer.next_seq = seq
    found = [it for it in reported if it.seq != mark]
    reported.clear()
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
    peer: WireProducer, eager: Consumer, reported: list[Progress]
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
    found = received_progress(peer, eager, reported)
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
def test_a_prefix_never_reaches_beyond_the_payload(
    peer: WireProducer, eager: Consumer, reported: list[Progress]
) -> None:
    """A message that claims more than values_len_bytes opens nothing beyond it."""
    peer.begin(peer.next_seq, FRAME)
    for filled in (25, POOLS[1], 2**63):
        tell(peer, filled)
    for it in received_progress(peer, eager, reported):
        assert it.prefix is None or it.prefix.nbytes <= 24


@pytest.mark.spec("WIRE-10.2.2-08", "WIRE-10.2.2-15")
def test_rows_are_layout_safe_only_with_a_true_stride(
    peer: WireProducer, eager: Consumer, reported: list[Progress]
) -> None:
    """A strided frame has a prefix by rows if it declares them, none if it does not, and is dropped if it lies."""
    strided: dict[str, Any] = {"strides": (16, 4), "values_len_bytes": 32}
    peer.begin(peer.next_seq, FRAME, **strided)
    tell(peer, 20)
    (plain,) = received_progress(peer, eager, reported)
    assert plain.prefix is None
    assert plain.rows is None
    peer.next_seq += 3

    seq = peer.next_seq
    peer.begin(seq, FRAME, **strided, progress_unit=ProgressUnit.ROWS, progress_stride_bytes=16)
    peer.fill(seq, PAYLOAD[:12], length=32)
    tell(peer, 20)
    (by_rows,) = received_progress(peer, eager, reported)
    assert by_rows.rows == 1
    assert by_rows.prefix is not None
    np.testing.assert_array_equal(np.asarray(by_rows.prefix).reshape(-1)[:3], FRAME[0])
    peer.next_seq += 3
    received(peer, eager)  # settles the gap

    for stride in (0, 12, 17):
        before = drops(eager)
        peer.begin(peer.next_seq, FRAME, **strided, progress_unit=ProgressUnit.ROWS, progress_stride_bytes=stride)
        tell(peer, 20)
        assert [it for it in received_progress(peer, eager, reported) if it.prefix is not None] == []
        lie = {"progress_unit": ProgressUnit.ROWS, "progress_stride_bytes": stride}
        peer.publish(np.zeros(8, np.float32), slot=strided | lie | {"dims": (2, 3), "ndims": 2})
        assert received(peer, eager) == []
        assert reasons(eager, before) == {DropReason.BAD_PROGRESS: 1}


@pytest.mark.spec("WIRE-10.2.2-11")
def test_a_frame_whose_progress_goes_back_is_dropped(
    peer: WireProducer, eager: Consumer, reported: list[Progress]
) -> None:
    """No more progress of it is reported, and its descriptor, however good its slot is, brings no frame."""
    before = drops(eager)
    seq = peer.next_seq
    peer.begin(seq, FRAME)
    for filled in (12, 8, 20):
        tell(peer, filled)
    assert [it.bytes_filled for it in received_progress(peer, eager, reported)] == [12]
    peer.publish(FRAME, seq=seq)
    assert received(peer, eager) == []
    assert sum(reasons(eager, before).values()) == 1


@pytest.mark.spec("WIRE-10.2.2-11")
def test_the_newest_frame_is_refused_when_its_progress_went_back(
    peer: WireProducer, eager: Consumer, reported: list[Progress]
) -> None:
    """`latest` gives it no more than `poll` does: it is dropped and counted once, and the next frame is shown."""
    before, count = drops(eager), eager.stats.received
    seq = peer.next_seq
    peer.begin(seq, FRAME)
    for filled in (12, 8):
        tell(peer, filled)
    received_progress(peer, eager, reported)
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
    peer: WireProducer, eager: Consumer, reported: list[Progress]
) -> None:
    """Uncommitted or committed, COMPLETE brings no frame; described while uncommitted, it is dropped as such."""
    before = drops(eager)
    seq = peer.next_seq
    peer.begin(seq, FRAME)
    peer.fill(seq, PAYLOAD)
    tell(peer, 24, FrameProgressState.COMPLETE)
    received_progress(peer, eager, reported)
    assert eager.poll(0.02) is None
    peer.publish(FRAME, seq=seq, slot={"word": in_progress(seq)})
    assert received(peer, eager) == []
    assert reasons(eager, before) == {DropReason.NOT_COMMITTED: 1}

    peer.write(peer.next_seq, FRAME)
    tell(peer, 24, FrameProgressState.COMPLETE)
    received_progress(peer, eager, reported)
    assert eager.poll(0.02) is None
    count = eager.stats.received
    assert received(peer, eager) == []  # described at last, it is the one that ends the wait
    assert eager.stats.received == count + 1


@pytest.mark.spec("WIRE-8.2-09")
@pytest.mark.parametrize("word", ["an earlier seq", "a later seq"])
def test_progress_of_a_seq_that_the_slot_does_not_hold_shows_no_data(
    peer: WireProducer, eager: Consumer, reported: list[Progress], word: str
) -> None:
    """The commit word names another frame: there is nothing of this one to be read."""
    seq = peer.next_seq
    other = seq + NSLOTS if word == "a later seq" else seq - NSLOTS
    peer.begin(seq, FRAME)
    peer.fill(seq, PAYLOAD)
    peer.regions.set_word(seq % NSLOTS, in_progress(other % 2**63))
    tell(peer, 12)
    for it in received_progress(peer, eager, reported):
        assert it.prefix is None or not it.is_intact()


@pytest.mark.spec("WIRE-10.2.2-05", "WIRE-10.2.1-07")
@pytest.mark.parametrize("lie", [{"epoch": 99}, {"stream_id": 5}, {"state": FrameProgressState.UNKNOWN}], ids=str)
def test_progress_that_is_not_of_this_epoch_and_stream_is_ignored(
    peer: WireProducer, eager: Consumer, reported: list[Progress], lie: dict[str, Any]
) -> None:
    """A foreign epoch or stream, or no state at all: nothing is reported, and nothing is unmapped (G6)."""
    peer.begin(peer.next_seq, FRAME)
    tell(peer, 12, **lie)
    assert received_progress(peer, eager, reported) == []
    assert eager.is_active
