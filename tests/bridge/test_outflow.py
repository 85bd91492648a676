# SPDX-License-Identifier: Apache-2.0
"""Frames that leave without Python: what is sent while a sender waits, and what ends its wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

import pytest

from tensorpool.bridge.receiver import with_buffers
from tensorpool.channel import check_channel
from tensorpool.client.stream_reader import SEQ_WENT_BACK
from tensorpool.wire.control import FrameDescriptor
from tests.bridge.sending import NSLOTS, Rig, pattern
from tests.support.processes import wait_until

BIG: Final = 200_000  # more than the receiver's window: without a reader it has to wait
SHORT_NS: Final = 20_000_000
FOREVER_NS: Final = 2**62


@pytest.fixture
def rig(make: Callable[..., Rig]) -> Rig:
    """With a receiver that had a frame, so that every further one is of a known epoch."""
    rig = make()
    rig.listen()
    rig.settle()
    rig.publish(pattern(100))
    rig.until(lambda: rig.frames, "the first frame has come")
    return rig


def wait_for(rig: Rig, condition: Callable[[], object]) -> None:
    """Whatever is sent meanwhile is sent by waiting, as long as nothing else is to be done."""
    deadline_s = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline_s
        rig.streams.pump(SHORT_NS)
        rig.sender.invoke(time.monotonic_ns())
        rig.hear()


def test_a_wait_sends_what_comes(rig: Rig) -> None:
    for number in range(1, 3 * NSLOTS):
        seq = rig.publish(pattern(5000, number))
        wait_for(rig, lambda number=number: rig.counters["frames_sent", ""] == number + 1)  # type: ignore[misc]
    wait_for(rig, lambda: len(rig.frames) == 3 * NSLOTS)
    assert rig.frames[rig.producer.epoch or 0, seq] == pattern(5000, number).tobytes()
    assert rig.counters["frames_taken", ""] == rig.counters["frames_sent", ""] == 3 * NSLOTS


def test_what_is_to_be_forwarded_ends_a_wait(rig: Rig) -> None:
    """The driver announces every second; the sender tells it, and goes on."""
    before = len(rig.announced_epochs)
    assert rig.streams.pump(FOREVER_NS) == 0
    rig.until(lambda: len(rig.announced_epochs) > before, "the announce is sent")


def test_a_pause_during_a_wait_keeps_further_frames_at_home(rig: Rig) -> None:
    rig.sender._forwarder._sources.clear()  # the wait lasts until the producer goes
    seen: list[int | None] = []
    thread = threading.Thread(target=lambda: seen.append(rig.streams.pump(FOREVER_NS)))
    thread.start()
    rig.publish(pattern(100, 1))
    wait_until(lambda: rig.counters["frames_sent", ""] == 2, "the frame is sent")
    rig.sender.paused = True
    rig.publish(pattern(100, 2))
    wait_until(lambda: rig.dropped("paused") == 1, "the frame is counted")
    assert thread.is_alive()
    rig.sender.paused = False
    rig.publish(pattern(100, 3))
    wait_until(lambda: rig.counters["frames_sent", ""] == 3, "the frame is sent")
    rig.producer.close()
    thread.join(60)
    assert seen == [3]


def test_frames_wait_in_the_ring_until_their_epoch_is_announced(rig: Rig) -> None:
    """G16."""
    rig.sender._forwarder._announced_epoch = None
    rig.publish(pattern(100, 1))
    assert rig.streams.pump(SHORT_NS) is None
    assert rig.counters["frames_sent", ""] == 1
    wait_for(rig, lambda: rig.counters["frames_sent", ""] == 2)
    assert rig.counters.total("frames_dropped") == 0


def test_a_frame_that_finds_no_room_goes_on_when_there_is(rig: Rig) -> None:
    rig.is_reading = False
    seq = rig.publish(pattern(BIG, 1))
    wait_for(rig, lambda: rig.sender._is_sending)
    assert rig.streams.pump(SHORT_NS) == 0
    rig.is_reading = True
    wait_for(rig, lambda: (rig.producer.epoch, seq) in rig.frames)
    assert rig.frames[rig.producer.epoch or 0, seq] == pattern(BIG, 1).tobytes()
    assert rig.counters.total("frames_dropped") == 0


def test_a_frame_that_tears_meanwhile_is_followed_by_the_newest(rig: Rig) -> None:
    rig.is_reading = False
    rig.publish(pattern(BIG, 1))
    wait_for(rig, lambda: rig.sender._is_sending)
    for number in range(2, NSLOTS + 2):
        newest = rig.publish(pattern(BIG, number))
    wait_for(rig, lambda: rig.dropped("torn"))
    rig.is_reading = True
    wait_for(rig, lambda: len(rig.frames) == 2)
    assert rig.frames[rig.producer.epoch or 0, newest] == pattern(BIG, NSLOTS + 1).tobytes()
    assert rig.dropped("skipped") == NSLOTS - 1


def test_a_frame_that_is_no_longer_awaited_is_given_up(make: Callable[..., Rig]) -> None:
    rig = make(assembly_timeout_ms=10)
    rig.listen()
    rig.settle()
    rig.publish(pattern(100))
    rig.until(lambda: rig.frames, "the first frame has come")
    rig.is_reading = False
    rig.publish(pattern(BIG, 1))
    wait_for(rig, lambda: rig.dropped("back_pressured"))
    assert not rig.sender._is_sending


def test_a_checksum_follows_each_frame_of_a_sender_that_waits(make: Callable[..., Rig]) -> None:
    rig = make(crc32c=True)
    rig.listen()
    rig.settle()
    for number in range(3):
        rig.publish(pattern(5000, number))
        wait_for(rig, lambda number=number: len(rig.frames) == number + 1)  # type: ignore[misc]
    rig.until(lambda: rig.counters["messages_forwarded", "checksum"] == 3, "each checksum is sent")


def test_an_epoch_that_is_mapped_again_is_sent_on(rig: Rig) -> None:
    """B29: a seq that goes back makes the consumer map the same epoch anew."""
    for number in range(1, 3):
        rig.publish(pattern(100, number))
    wait_for(rig, lambda: len(rig.frames) == 3)
    assert rig.sender._consumer is not None
    reader = rig.sender._consumer._reader
    mapped, epoch = reader.mapped, rig.producer.epoch
    assert epoch is not None
    endpoint = rig.client.config.driver.descriptor
    mouth = rig.link.add_publication(endpoint.channel, endpoint.stream_id)
    try:
        wait_until(lambda: mouth.has_room, "it has a subscriber")
        assert mouth.offer(FrameDescriptor(stream_id=rig.stream_id, epoch=epoch, seq=0).encode())
        rig.until(lambda: reader.attention & SEQ_WENT_BACK or reader.mapped is not mapped, "a seq has gone back")
        wait_until(lambda: reader.mapped not in (None, mapped), "it is mapped anew")  # before the sender's next turn
    finally:
        mouth.close()
    assert rig.sender._consumer.epoch == epoch

    def has_come() -> bool:
        rig.publish(pattern(300, 7))
        return pattern(300, 7).tobytes() in rig.frames.values()

    rig.until(has_come, "a frame of it has come")


def test_a_receiving_socket_holds_a_window_of_datagrams() -> None:
    """The kernel books up to twice their bytes: a window of 8 KiB datagrams would overflow a buffer of its own size."""
    plain, sized = "aeron:udp?endpoint=127.0.0.1:1", "aeron:udp?endpoint=127.0.0.1:1|so-rcvbuf=1m|rcv-wnd=1m"
    for channel, expected in ((plain, f"{plain}|so-rcvbuf=4m|rcv-wnd=2m"), (sized, sized), ("aeron:ipc", "aeron:ipc")):
        assert str(with_buffers(check_channel("channel", channel))) == expected
