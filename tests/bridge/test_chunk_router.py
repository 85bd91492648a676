# SPDX-License-Identifier: Apache-2.0
"""Chunks that native code takes from Aeron as they come, until another message arrives."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest

from tensorpool import aeron
from tensorpool.errors import Closed
from tests.bridge.frames import EPOCH, STREAM, Receiving, chunks_of
from tests.support.processes import wait_until

FOREVER_NS = 10**15
STREAM_IDS = itertools.count(61_000)  # a log of its own for every test: Aeron keeps one for a while that was closed
PAYLOAD = bytes(range(256)) * 8


class Line:
    """Both ends of a payload and a control stream."""

    def __init__(self, client: aeron.Client) -> None:
        stream_ids = next(STREAM_IDS), next(STREAM_IDS)
        self.ears = [client.add_subscription("aeron:ipc", stream_id) for stream_id in stream_ids]
        self.mouths = [client.add_publication("aeron:ipc", stream_id) for stream_id in stream_ids]
        wait_until(lambda: all(mouth.has_room for mouth in self.mouths), "both have a subscriber")

    def send(self, *messages: bytes) -> None:
        assert all(self.mouths[0].offer(message) for message in messages)

    def speak(self) -> None:
        assert self.mouths[1].offer(b"an announce")


@pytest.fixture
def line(shared_media_driver: aeron.MediaDriver, connect: Callable[[aeron.MediaDriver], aeron.Client]) -> Line:
    return Line(connect(shared_media_driver))


def test_chunks_are_taken_until_the_time_is_over(line: Line) -> None:
    receiving = Receiving()
    line.send(*chunks_of(1, PAYLOAD, [700, 700]), *chunks_of(2, PAYLOAD, [700, 700]))
    taken = 0
    while taken < 6:
        taken += receiving.router.pump(line.ears[0], line.ears[1:], 2, 10_000_000)
    assert taken == 6
    assert receiving.assembler.published == 2
    assert receiving.ring.payload(2) == PAYLOAD
    assert receiving.router.pump(line.ears[0], (), 2, 0) == 0


def test_a_message_beside_them_comes_first(line: Line) -> None:
    """The chunks after it may be judged by it: they stay where they are."""
    receiving = Receiving()
    line.speak()
    line.send(*chunks_of(1, PAYLOAD, [700, 700]))
    assert receiving.router.pump(line.ears[0], line.ears[1:], 64, FOREVER_NS) == 0
    assert receiving.assembler.published is None
    assert line.ears[1].poll(lambda data, info: None, 1) == 1
    while receiving.assembler.published is None:
        receiving.router.pump(line.ears[0], line.ears[1:], 64, 10_000_000)


@pytest.mark.parametrize("end", ["a message arrives", "the stream is closed"])
def test_a_thread_that_waits_for_chunks_wakes_up(line: Line, end: str) -> None:
    """Another thread sends, and then ends it: nothing is waited for that does not come."""
    receiving = Receiving()

    def act() -> None:
        line.send(*chunks_of(1, PAYLOAD, [700, 700]))
        wait_until(lambda: ("frames_received", "") in receiving.assembler.counts, "the frame is published")
        if end == "a message arrives":
            line.speak()
        else:
            line.ears[0].close()

    thread = threading.Thread(target=act)
    thread.start()
    try:
        taken = receiving.router.pump(line.ears[0], line.ears[1:], 64, FOREVER_NS)
        assert (taken, end) == (3, "a message arrives")
    except Closed:
        assert end == "the stream is closed"
    finally:
        thread.join()


def test_an_assembler_is_not_touched_while_it_is_fed(line: Line) -> None:
    receiving = Receiving()
    thread = threading.Thread(target=receiving.router.pump, args=(line.ears[0], line.ears[1:], 64, FOREVER_NS))
    thread.start()
    try:
        line.send(*chunks_of(1, PAYLOAD, [700, 700]))
        wait_until(lambda: ("frames_received", "") in receiving.assembler.counts, "it is being fed")
        with pytest.raises(Exception, match="one thread uses it at a time"):
            receiving.assembler.set_source(EPOCH, ())
    finally:
        line.speak()
        thread.join()
    assert receiving.assembler.stream_id == STREAM
