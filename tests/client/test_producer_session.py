# SPDX-License-Identifier: Apache-2.0
"""A producer's answers to consumers, without a media driver: what others decree is repeated for as long as it holds.

Wire §10.1.3, §10.5; decisions C20, E22-E28.
"""

from __future__ import annotations

from typing import Any

import pytest

from tensorpool.client.attachment import Wish
from tensorpool.client.producer_session import MAX_CONSUMERS, STALE_PERIODS, ProducerSession
from tensorpool.wire import Message, decode
from tensorpool.wire.control import ConsumerConfig, Mode
from tensorpool.wire.driver import Role
from tests.client.conftest import STREAM, StillConductor, hello, revoked
from tests.support import messages

MAX_MESSAGE_BYTES = 8192
HALF: dict[str, Any] = {"descriptor_stream_id": 31_000}  # a request that is answered, with a decline (E23)
DECREES: dict[str, dict[str, Any]] = {
    "a mode": {"mode": Mode.RATE_LIMITED},
    "a redirection": {"use_shm": False, "payload_fallback_uri": "bridge://lab"},
    "no shared memory": {"use_shm": False},
    "everything": {"use_shm": False, "mode": Mode.RATE_LIMITED, "payload_fallback_uri": "aeron:udp?endpoint=host:1"},
}


class _Link:
    """A control stream that keeps what is said."""

    def __init__(self) -> None:
        self.said: list[Message] = []

    @property
    def control(self) -> _Link:
        return self

    def offer(self, data: bytes) -> bool:
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(data)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
        self.said.append(decode(data))
        return True


class Answers:
    """A producer that answers hellos."""

    def __init__(self, *, is_relay: bool = False) -> None:
        wish = Wish(STREAM, Role.PRODUCER)
        self.session = ProducerSession(StillConductor(), wish, None, is_relay=is_relay)  # type: ignore[arg-type]
        self._link = _Link()
        self.session.link = self._link  # type: ignore[assignment]

    def to(self, consumer_id: int = 1, now_ns: int = 0, **wish: Any) -> ConsumerConfig:
        """The answer to a hello."""
        self._link.said.clear()
        self.session.on_hello(hello(consumer_id, **HALF | wish), now_ns)
        (answer,) = self._link.said
        assert isinstance(answer, ConsumerConfig)
        return answer

    def decree(self, consumer_id: int = 1, **decree: Any) -> None:
        self.session.on_consumer_config(config(consumer_id, **decree))


def config(consumer_id: int = 1, **changed: Any) -> ConsumerConfig:
    return messages.consumer_config(STREAM, consumer_id, **changed)


@pytest.mark.parametrize("uri", ["x" * 4096, "bridge://\udcff", "a b\n"], ids=["long", "not text", "not printable"])
def test_a_fallback_that_cannot_be_sent_on_is_not_kept(uri: str) -> None:
    """Our answers go on as if it had not come."""
    answers = Answers()
    assert answers.to(1) == config(1)
    answers.session.on_consumer_config(config(1, payload_fallback_uri=uri))
    assert answers.to(1) == config(1)


def test_an_answer_that_no_log_takes_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once, and the session goes on."""
    answers = Answers()
    for _ in range(2):
        assert not answers.session.send(config(1, payload_fallback_uri="x" * MAX_MESSAGE_BYTES))
    assert [record.getMessage().split()[0] for record in caplog.records] == ["message_not_sendable"]
    assert answers.to(1) == config(1)


@pytest.mark.parametrize("is_relay", [False, True], ids=["producer", "relay"])
@pytest.mark.parametrize("decree", DECREES.values(), ids=DECREES)
def test_what_others_told_a_consumer_is_repeated(decree: dict[str, Any], is_relay: bool) -> None:
    """With every answer, to this consumer alone, until they tell it something else."""
    answers = Answers(is_relay=is_relay)
    assert answers.to(1) == config(1)
    answers.decree(1, **decree)
    assert [answers.to(1), answers.to(1)] == [config(1, **decree)] * 2
    assert answers.to(2) == config(2)
    answers.decree(1)
    assert answers.to(1) == config(1)


def test_a_decree_holds_for_one_wish() -> None:
    """The hello that asks for another mode gets it, and asking for the first one again brings nothing back."""
    answers = Answers()
    answers.to(mode=Mode.RATE_LIMITED)
    answers.decree(use_shm=False, mode=Mode.STREAM)
    assert answers.to(mode=Mode.RATE_LIMITED, max_rate_hz=5) == config(use_shm=False, mode=Mode.STREAM)
    assert answers.to(mode=Mode.STREAM) == config(mode=Mode.STREAM)
    assert answers.to(mode=Mode.RATE_LIMITED) == config(mode=Mode.RATE_LIMITED)


def test_a_decree_ends_with_the_lease_of_its_consumer() -> None:
    """Who comes again is somebody else."""
    answers = Answers()
    answers.to()
    answers.decree(mode=Mode.RATE_LIMITED)
    answers.session.on_consumer_end(revoked(1, 1, Role.CONSUMER))
    assert answers.to() == config()


def test_a_decree_ends_with_the_silence_of_its_consumer() -> None:
    """Once it is stale, and not before."""
    answers = Answers()
    answers.to()
    answers.decree(mode=Mode.RATE_LIMITED)
    window_ns = STALE_PERIODS * answers.session.config.announce_period_ns
    answers.session._forget_stale(window_ns)
    assert answers.to(now_ns=window_ns) == config(mode=Mode.RATE_LIMITED)
    answers.session._forget_stale(2 * window_ns + 1)
    assert answers.to() == config()


@pytest.mark.spec("WIRE-5-04", "WIRE-5-03")
@pytest.mark.parametrize("said", ["hello", "QoS"])
def test_a_consumer_is_stale_after_three_to_five_silent_periods(said: str) -> None:
    """Whichever of the two messages came last; each starts the wait anew."""
    session = Answers().session
    period_ns = session.config.announce_period_ns
    session.on_hello(hello(1), 0)
    start_ns = 2 * period_ns
    if said == "hello":
        session.on_hello(hello(1), start_ns)
    else:
        session.on_qos_consumer(messages.consumer_qos(STREAM, 1), start_ns)
    session._forget_stale(start_ns + 3 * period_ns)
    assert 1 in session._consumers
    session._forget_stale(start_ns + 5 * period_ns)
    assert 1 not in session._consumers


def test_nothing_is_kept_of_consumers_that_were_never_heard() -> None:
    """Whoever makes up ids fills no memory."""
    answers = Answers()
    for consumer_id in range(1000):
        answers.decree(consumer_id, mode=Mode.RATE_LIMITED)
    assert not answers.session._consumers
    assert answers.to(1) == config(1)


def test_no_decree_makes_another_layout_readable() -> None:
    """C20: use_shm stays false; the rest of it is repeated."""
    answers = Answers()
    other = {"expected_layout_version": 2}
    assert answers.to(**other) == config(use_shm=False)
    answers.decree(use_shm=True, mode=Mode.RATE_LIMITED, payload_fallback_uri="bridge://lab")
    told = config(use_shm=False, mode=Mode.RATE_LIMITED, payload_fallback_uri="bridge://lab")
    assert answers.to(**other) == told


def test_only_so_many_consumers_are_known_at_once() -> None:
    """What strangers say under ever new ids costs bounded memory; those that are known are still answered."""
    answers = Answers()
    assert answers.to(1) == config(1)
    for consumer_id in range(2, 2 * MAX_CONSUMERS):
        answers.session.on_qos_consumer(messages.consumer_qos(STREAM, consumer_id), 0)
        answers.session.on_hello(hello(consumer_id), 0)
    assert len(answers.session._consumers) == MAX_CONSUMERS
    answers.decree(1, mode=Mode.RATE_LIMITED)
    assert answers.to(1).mode is Mode.RATE_LIMITED
