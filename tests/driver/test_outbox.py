# SPDX-License-Identifier: Apache-2.0
"""The order in which a driver's messages leave, and what becomes of those that cannot."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tensorpool.aeron import OfferResult
from tensorpool.driver import outbox as module
from tensorpool.driver.outbox import Outbox
from tensorpool.logs import get_logger
from tensorpool.wire import Message, decode
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import ResponseCode, ShmDetachResponse
from tests.support.messages import announce, consumer_config


class Log:
    """Takes `room` messages."""

    max_message_length = 4096

    def __init__(self, room: int = 1000) -> None:
        self.room = room
        self.taken: list[int] = []

    def offer(self, data: bytes) -> OfferResult:
        if not self.room:
            return OfferResult.BACK_PRESSURED
        self.room -= 1
        message: Any = decode(data)
        number = message.stream_id if isinstance(message, ShmPoolAnnounce) else message.correlation_id
        self.taken.append(number)
        return OfferResult.ACCEPTED


@pytest.fixture
def counts() -> Counter[str]:
    return Counter()


@pytest.fixture
def outbox(counts: Counter[str]) -> Outbox:
    return Outbox(counts, get_logger("test"))


def answer(number: int) -> ShmDetachResponse:
    return ShmDetachResponse(correlation_id=number, code=ResponseCode.OK)


def announced(stream_id: int) -> Message:
    return announce(stream_id)


def test_answers_leave_before_announces_that_waited_longer(outbox: Outbox) -> None:
    """Each in their own order: a client waits for its answer, an announce comes again."""
    log = Log(room=0)
    for number in (1, 2):
        outbox.announce(100 + number)
        outbox.post(answer(number))
        outbox.flush(log, log, announced)
    log.room = 3
    assert outbox.flush(log, log, announced) == 3
    assert log.taken == [1, 2, 101]
    outbox.post(answer(3))
    log.room = 9
    outbox.flush(log, log, announced)
    assert log.taken == [1, 2, 101, 3, 102]
    assert len(outbox) == 0


@pytest.mark.spec("DRV-4.9-15")
def test_no_announce_overtakes_an_answer(outbox: Outbox) -> None:
    """E9: where the log gets room between two offers, the answer that found none still goes first."""

    class Reluctant(Log):
        def offer(self, data: bytes) -> OfferResult:
            self.room += 1  # for the next one
            return super().offer(data) if self.room > 1 else OfferResult.BACK_PRESSURED

    log = Reluctant(room=0)
    outbox.post(answer(1))
    outbox.announce(100)
    assert outbox.flush(log, log, announced) == 0
    outbox.flush(log, log, announced)
    assert log.taken == [1, 100]


def test_one_announce_of_a_stream_waits_and_is_made_when_it_leaves(outbox: Outbox, counts: Counter[str]) -> None:
    """So it carries the epoch and the time of then; a stream without an epoch is not announced at all."""
    log = Log(room=0)
    for _ in range(5):
        outbox.announce(100)
        outbox.announce(101)
        outbox.flush(log, log, announced)
    assert len(outbox) == 2
    assert counts["announces_superseded"] == 8
    log.room = 9
    assert outbox.flush(log, log, lambda stream_id: None if stream_id == 100 else announced(stream_id)) == 1
    assert log.taken == [101]
    assert len(outbox) == 0


def test_a_held_control_log_does_not_hold_another_log(outbox: Outbox) -> None:
    """Where announces have a stream of their own."""
    held, free = Log(room=0), Log()
    outbox.post(answer(1))
    outbox.announce(100)
    assert outbox.flush(held, free, announced) == 1
    assert (held.taken, free.taken) == ([], [100])


def test_what_cannot_be_sent_is_dropped_counted_and_logged_once(
    outbox: Outbox, counts: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Too long for the log, or not to be encoded at all: what comes behind it leaves in the same turn."""
    log = Log()
    for number in range(3):
        outbox.post(consumer_config(1, 1, payload_fallback_uri="x" * 5000))
        outbox.post(consumer_config(1, 1, payload_fallback_uri="\udcff"))
        outbox.post(answer(number))
    outbox.announce(7)
    outbox.flush(log, log, lambda _: announce(7, pools=dict.fromkeys(range(100), 64)))
    assert log.taken == [0, 1, 2]
    assert counts["messages_unsendable"] == 7
    assert len(outbox) == 0
    assert [record.message.split()[0] for record in caplog.records] == ["message_unsendable"] * 2


def test_where_too_much_waits_the_oldest_goes(
    outbox: Outbox, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By number and by bytes: the newest, such as the notice of a shutdown, is never the one that is lost."""
    monkeypatch.setattr(module, "MAX_MESSAGES", 5)
    for number in range(9):
        outbox.post(answer(number))
    assert (len(outbox), counts["messages_dropped"]) == (5, 4)
    monkeypatch.setattr(module, "MAX_BYTES", 2 * len(answer(0).encode()))
    outbox.post(answer(9))
    log = Log()
    outbox.flush(log, log, announced)
    assert log.taken == [8, 9]
    assert outbox.size_bytes == 0
