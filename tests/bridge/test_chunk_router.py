# SPDX-License-Identifier: Apache-2.0
"""Chunks that native code takes from Aeron as they come, until another message arrives."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest

from tensorpool import aeron
from tensorpool._core import BridgePump, crc32c
from tensorpool.errors import Closed
from tests.bridge.frames import EPOCH, STREAM, Receiving, chunks_of, digest_of, header_of
from tests.support.processes import wait_until

FOREVER_NS = 10**15
STREAM_IDS = itertools.count(61_000)  # a log of its own for every test: Aeron keeps one for a while that was closed
PAYLOAD = bytes(range(256)) * 8


class Line:
    """Both ends of a payload and a control stream."""

    def __init__(self, client: aeron.Client) -> None:
        stream_ids = next(STREAM_IDS), next(STREAM_IDS)
        payload_id, control_id = stream_ids
        self.ears = (
            client.add_subscription("aeron:ipc", payload_id),
            client.add_subscription("aeron:ipc", control_id),
        )
        self.mouths = [client.add_publication("aeron:ipc", stream_id) for stream_id in stream_ids]
        wait_until(lambda: all(mouth.has_room for mouth in self.mouths), "both have a subscriber")

    def send(self, *messages: bytes) -> None:
        assert all(self.mouths[0].offer(message) for message in messages)

    def speak(self, message: bytes = b"an announce") -> None:
        assert self.mouths[1].offer(message)

    def pump(self, receiving: Receiving, for_ns: int) -> int:
        return BridgePump().pump([], (receiving.router, *self.ears), [], for_ns)


@pytest.fixture
def line(shared_media_driver: aeron.MediaDriver, connect: Callable[[aeron.MediaDriver], aeron.Client]) -> Line:
    return Line(connect(shared_media_driver))


def test_chunks_are_taken_until_the_time_is_over(line: Line) -> None:
    receiving = Receiving()
    line.send(*chunks_of(1, PAYLOAD, [700, 700]), *chunks_of(2, PAYLOAD, [700, 700]))
    taken = 0
    while taken < 6:
        taken += line.pump(receiving, 10_000_000)
    assert taken == 6
    assert receiving.assembler.published == 2
    assert receiving.ring.payload(2) == PAYLOAD
    assert line.pump(receiving, 0) == 0


def test_a_message_beside_them_comes_first(line: Line) -> None:
    """The chunks after it may be judged by it: they stay where they are."""
    receiving = Receiving()
    line.speak()
    line.send(*chunks_of(1, PAYLOAD, [700, 700]))
    assert line.pump(receiving, FOREVER_NS) == 0
    assert receiving.assembler.published is None
    assert line.ears[1].poll(lambda data, info: None, 1) == 1
    while receiving.assembler.published is None:
        line.pump(receiving, 10_000_000)


def test_one_round_is_made_whatever_waits_beside_it(line: Line) -> None:
    """Else a flood of messages would stop the frames."""
    receiving = Receiving()
    line.speak()
    line.send(*chunks_of(1, PAYLOAD, [700, 700]))
    wait_until(lambda: line.pump(receiving, 0) == 0 and receiving.assembler.published == 1, "the frame is published")


def test_checksums_are_taken_from_the_control_stream_up_to_another_message(line: Line) -> None:
    """Those of the session that is followed, without Python; what follows a message for Python waits for it."""
    receiving = Receiving(needs_digest=True)
    receiving.assembler.set_origin(line.mouths[1].session_id)
    crcs = [crc32c(PAYLOAD, crc32c(header_of(seq, PAYLOAD))) for seq in (1, 2)]
    line.send(*chunks_of(1, PAYLOAD, [700, 700]), *chunks_of(2, PAYLOAD, [700, 700]))
    line.speak(digest_of(1, PAYLOAD, crc32c=crcs[0]))
    line.speak()
    line.speak(digest_of(2, PAYLOAD, crc32c=crcs[1]))
    wait_until(lambda: line.pump(receiving, 0) == 0 and receiving.assembler.inflight == 1, "one frame is published")
    assert receiving.assembler.published == 1
    assert line.ears[1].poll(lambda data, info: None, 1) == 1
    wait_until(lambda: line.pump(receiving, 1) == 0 and receiving.assembler.published == 2, "both are published")


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
        taken = line.pump(receiving, FOREVER_NS)
        assert (taken, end) == (3, "a message arrives")
    except Closed:
        assert end == "the stream is closed"
    finally:
        thread.join()


def test_an_assembler_is_not_touched_while_it_is_fed(line: Line) -> None:
    receiving = Receiving()
    thread = threading.Thread(target=line.pump, args=(receiving, FOREVER_NS))
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
