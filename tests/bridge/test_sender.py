# SPDX-License-Identifier: Apache-2.0
"""The sender read by a receiver that only listens: what leaves, in which order, and what becomes of the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable

import google_crc32c
import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.bridge.bridge import Bridge
from tensorpool.bridge.config import BridgeConfig
from tests.bridge.frames import digest_of
from tests.bridge.sending import NSLOTS, Rig, free_endpoint, pattern
from tests.support.processes import wait_until

BIG = 200_000  # more than the receiver's window: without a reader it has to wait


@pytest.fixture
def rig(make: Callable[..., Rig]) -> Rig:
    """With a receiver, connected and announced."""
    rig = make()
    rig.listen()
    rig.settle()
    return rig


@pytest.mark.spec(
    "BRG-5.1-01", "BRG-5.1-02", "BRG-5.1-03", "BRG-5.1-04", "BRG-5.2-05", "BRG-5.2-06", "BRG-5.2-08", "BRG-5.2-23"
)
def test_frame_leaves_as_chunks_in_order_with_its_slot_header_first(rig: Rig) -> None:
    data = pattern(10_000).reshape(100, 100)
    seq = rig.publish(data)
    rig.until(lambda: rig.frames, "the frame has come")
    epoch = rig.producer.epoch
    assert rig.frames == {(epoch, seq): data.tobytes()}
    assert [chunk.chunk_index for chunk in rig.chunks] == list(range(8))
    assert [chunk.chunk_offset for chunk in rig.chunks] == [0, *range(1063, 10_000, 1280)]
    assert {(chunk.stream_id, chunk.epoch, chunk.seq) for chunk in rig.chunks} == {(rig.stream_id, epoch, seq)}
    assert {(chunk.chunk_count, chunk.payload_length) for chunk in rig.chunks} == {(8, 10_000)}
    assert [chunk.header_included for chunk in rig.chunks] == [True] + [False] * 7
    assert [len(chunk.header_bytes) for chunk in rig.chunks] == [256] + [0] * 7
    header = rig.chunks[0].header_bytes
    assert int.from_bytes(header[:8], "little") == seq << 1 | 1
    assert int.from_bytes(header[8:12], "little") == 10_000
    assert header[64:72] == bytes.fromhex("b800340084030100")
    sent = {"frames_sent": 1, "bytes_sent": 10_000, "chunks_sent": 8, "frames_taken": 1}
    assert sent.items() <= rig.counters.as_dict().items()


@pytest.mark.spec("BRG-5.2-01")
def test_empty_frame_is_one_chunk(rig: Rig) -> None:
    """G26."""
    rig.publish(np.empty((0, 3), np.float32))
    rig.until(lambda: rig.chunks, "a chunk has come")
    (chunk,) = rig.chunks
    assert (chunk.chunk_count, chunk.chunk_length, chunk.payload_length) == (1, 0, 0)
    assert len(chunk.header_bytes) == 256


def test_frames_of_every_size_arrive_whole(rig: Rig) -> None:
    frames = {rig.publish(data): data.tobytes() for data in map(pattern, (1, 1063)) if rig.turn() >= 0}
    for size in (1064, 2343, 2344, 100_000, 262_144):
        data = pattern(size, size)
        frames[rig.publish(data)] = data.tobytes()
        rig.until(lambda: len(rig.frames) == len(frames), "every frame has come")
    assert {seq: data for (_, seq), data in rig.frames.items()} == frames


@pytest.mark.spec("BRG-2-01")
def test_overwritten_frame_never_completes_and_the_newest_follows(rig: Rig) -> None:
    """G3: a frame whose slot is used again while the link has no room keeps its last chunks for itself."""
    rig.is_reading = False
    rig.publish(pattern(BIG, 0))
    rig.until(lambda: rig.sender._is_sending, "the log is full")
    for number in range(1, NSLOTS + 1):
        newest = rig.publish(pattern(BIG, number))
    rig.until(lambda: rig.dropped("torn"), "the sender has noticed")
    rig.is_reading = True
    rig.until(lambda: rig.frames, "a frame has come")
    assert rig.frames == {(rig.producer.epoch, newest): pattern(BIG, NSLOTS).tobytes()}
    assert {chunk.seq for chunk in rig.chunks} == {0, newest}
    assert rig.dropped("torn") == 1
    assert rig.dropped("skipped") == NSLOTS - 1
    assert rig.counters["frames_sent", ""] == 1


def test_frame_that_no_receiver_would_wait_for_is_given_up_for_the_newest(make: Callable[..., Rig]) -> None:
    rig = make(assembly_timeout_ms=1000)
    rig.listen()
    rig.settle()
    rig.is_reading = False
    rig.publish(pattern(BIG, 0))
    rig.until(lambda: rig.sender._is_sending, "the log is full")
    rig.publish(pattern(BIG, 1))
    newest = rig.publish(pattern(BIG, 2))
    rig.until(lambda: rig.dropped("back_pressured"), "the frame is given up")
    rig.is_reading = True
    rig.until(lambda: rig.frames, "a frame has come")
    assert rig.frames == {(rig.producer.epoch, newest): pattern(BIG, 2).tobytes()}
    assert rig.dropped("skipped") == 1


def test_frames_without_a_receiver_are_counted_and_the_source_goes_on(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.settle()
    for number in range(10):
        rig.publish(pattern(100, number))
        rig.until(lambda number=number: rig.dropped("not_connected") == number + 1, "the frame is counted")  # type: ignore[misc]
    rig.listen()
    rig.settle()
    seq = rig.publish(pattern(100, 99))
    rig.until(lambda: rig.frames, "the frame has come")
    assert [seq for _, seq in rig.frames] == [seq]
    assert rig.dropped("not_connected") == 10


def test_receiver_that_goes_in_the_middle_of_a_frame(rig: Rig) -> None:
    rig.is_reading = False
    rig.publish(pattern(BIG))
    rig.until(lambda: rig.sender._is_sending, "the log is full")
    rig.deafen()
    rig.until(lambda: rig.dropped("not_connected"), "the frame is given up")
    assert not rig.sender._is_sending
    assert rig.counters["frames_sent", ""] == 0


@pytest.mark.spec("BRG-5.2-02")
def test_too_large_frame_is_dropped_and_the_stride_is_warned_of(
    make: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    """G2."""
    rig = make(max_payload_bytes=5000)
    rig.listen()
    rig.settle()
    with caplog.at_level(logging.WARNING, "tensorpool.bridge"):
        rig.publish(pattern(5001))
        rig.publish(pattern(5000))
        rig.until(lambda: rig.frames, "the smaller frame has come")
    assert rig.dropped("too_large") == 1
    assert len({chunk.seq for chunk in rig.chunks}) == 1
    warnings = [record.message for record in caplog.records if "frames_may_be_too_large" in record.message]
    assert len(warnings) == 1
    assert "largest_frame_bytes=5000" in warnings[0]


def test_paused_sender_counts_what_it_leaves_out(rig: Rig) -> None:
    rig.sender.paused = True
    for number in range(3):
        rig.publish(pattern(100, number))
        rig.until(lambda number=number: rig.dropped("paused") == number + 1, "the frame is counted")  # type: ignore[misc]
    rig.sender.paused = False
    seq = rig.publish(pattern(100, 3))
    rig.until(lambda: rig.frames, "the frame has come")
    assert [seq for _, seq in rig.frames] == [seq]


@pytest.mark.spec("BRG-8-01")
def test_new_epoch_is_announced_before_its_first_chunk(rig: Rig) -> None:
    """§8, G16: the frame under way is given up, and the next one is of the new epoch."""
    rig.is_reading = False
    rig.publish(pattern(BIG))
    rig.until(lambda: rig.sender._is_sending, "the log is full")
    first = rig.producer.epoch
    rig.producer.close()
    rig.until(lambda: rig.dropped("epoch_ended"), "the frame of the old epoch is given up")
    rig.is_reading = True
    rig.producer = rig.client.producer(rig.stream_id)
    second = rig.producer.epoch
    assert first is not None
    assert second is not None
    assert second > first
    rig.until(lambda: rig.producer.wait_for_consumers(1, 0.001), "the sender reads the new epoch")
    data = pattern(3000)
    seq = rig.publish(data)
    rig.until(lambda: rig.frames, "the frame has come")
    assert rig.frames == {(second, seq): data.tobytes()}
    assert second in rig.announced_epochs


def test_every_published_frame_is_sent_or_counted(rig: Rig) -> None:
    """The sum holds while the source outruns a link that is read now and then."""
    published = 300
    for number in range(published):
        rig.publish(pattern(50_000, number))
        rig.is_reading = number % 7 < 4
        rig.turn()
    rig.is_reading = True

    def accounted() -> int:
        counts = rig.counters
        return counts["frames_sent", ""] + counts.total("frames_dropped")

    rig.until(lambda: accounted() == published, "every frame is accounted for")
    sent = rig.counters["frames_sent", ""]
    rig.until(lambda: len(rig.frames) == sent, "every frame that was sent has come")
    assert all(data == pattern(50_000, seq).tobytes() for (_, seq), data in rig.frames.items())
    assert 0 < sent <= published


def test_checksum_of_each_frame_follows_on_the_control_stream(make: Callable[..., Rig]) -> None:
    """The private extension: over the header as chunk 0 carries it, and the payload."""
    rig = make(crc32c=True)
    rig.listen()
    rig.settle()
    data = pattern(5000)
    seq = rig.publish(data)
    rig.until(lambda: rig.frames and any(len(it) == 36 for it in rig.control), "frame and checksum have come")
    crc32c = google_crc32c.value(rig.chunks[0].header_bytes + data.tobytes())
    expected = digest_of(seq, data.tobytes(), crc32c=crc32c, stream_id=rig.stream_id, epoch=rig.producer.epoch or 0)
    assert expected in rig.control


def test_larger_mtu_is_asked_of_the_channel(make: Callable[..., Rig]) -> None:
    rig = make(mtu_bytes=8192)
    rig.listen()
    rig.settle()
    rig.publish(pattern(20_000))
    rig.until(lambda: rig.frames, "the frame has come")
    assert [chunk.chunk_length for chunk in rig.chunks] == [7847, 8064, 4089]


def test_source_that_is_not_there_yet_is_waited_for(make: Callable[..., Rig], client: tp.Client) -> None:
    rig = make()
    rig.producer.close()
    rig.listen()
    rig.until(lambda: rig.sender.is_ready, "the sender is attached")
    rig.producer = client.producer(rig.stream_id)
    rig.settle()
    seq = rig.publish(pattern(100))
    rig.until(lambda: rig.frames, "the frame has come")
    assert [seq for _, seq in rig.frames] == [seq]


def test_closed_sender_gives_its_lease_back(rig: Rig) -> None:
    rig.sender.close()
    wait_until(lambda: not rig.producer.wait_for_consumers(1, 0.001), "the driver has no consumer")
    rig.sender.close()


def test_all_mappings_of_a_bridge_have_one_window_together(pool: tp.Local, link: aeron.Client) -> None:
    """They share a publication on each stream: with one each, the receiver's socket would overflow."""
    base = f"aeron:udp?endpoint={free_endpoint()}|term-length=64k"
    config = BridgeConfig.load(
        None,
        environ={},
        bridge={
            "instance_id": "test",
            "role": "sender",
            "payload_channel": base,
            "payload_stream_id": 7_001,
            "control_channel": base,
            "control_stream_id": 7_002,
            "forward_metadata": False,
        },
        mappings=[{"source_stream_id": 19_000 + i, "dest_stream_id": 29_000 + i} for i in range(4)],
    )
    subscriptions = [link.add_subscription(base, stream_id) for stream_id in (7_001, 7_002)]
    try:
        with Bridge(config, driver=pool.config, aeron_dir=pool.aeron_dir) as bridge:
            wait_until(
                lambda: (bridge.invoke(), all(it.is_connected for it in subscriptions))[1], "the bridge is connected"
            )
            assert len(bridge.workers) == 4
            assert [it.image_count for it in subscriptions] == [1, 1]
    finally:
        for subscription in subscriptions:
            subscription.close()
