# SPDX-License-Identifier: Apache-2.0
"""A producer's answers to consumers, without a media driver: an override is repeated for as long as it holds.

Wire §10.1.3, §10.5; decisions C20, E22-E28.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tensorpool.channel import Endpoint
from tensorpool.client.attachment import AttachSpec
from tensorpool.client.known_consumers import MAX_CONSUMERS, STALE_PERIODS
from tensorpool.client.producer_session import ProducerOptions, ProducerSession
from tensorpool.client.session import Session
from tensorpool.clock import ManualClock
from tensorpool.wire import Message, decode
from tensorpool.wire.control import ClockDomain, ConsumerConfig, Mode
from tensorpool.wire.driver import Role, ShmLeaseKeepalive
from tests.client.conftest import STREAM, StillConductor, announced, granted, hello
from tests.support import messages

MAX_MESSAGE_BYTES = 8192
HALF: dict[str, Any] = {"descriptor_stream_id": 31_000}  # a request that is answered, with a decline (E23)
OVERRIDES: dict[str, dict[str, Any]] = {
    "a mode": {"mode": Mode.RATE_LIMITED},
    "a redirection": {"use_shm": False, "payload_fallback_uri": "bridge://lab"},
    "no shared memory": {"use_shm": False},
    "everything": {"use_shm": False, "mode": Mode.RATE_LIMITED, "payload_fallback_uri": "aeron:udp?endpoint=host:1"},
}


class _Publication:
    """A private stream without a media driver."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class _Streams:
    """A control stream that keeps what is sent, and private streams."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def publish_private(self, endpoint: Endpoint) -> _Publication:
        return _Publication()

    @property
    def control(self) -> _Streams:
        return self

    def offer(self, data: bytes) -> bool:
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(data)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
        self.sent.append(decode(data))
        return True


class Answers:
    """A producer that answers hellos."""

    def __init__(self, *, is_relay: bool = False, **settings: Any) -> None:
        spec = AttachSpec(STREAM, Role.PRODUCER)
        options = ProducerOptions(is_relay=is_relay)
        self.session = ProducerSession(StillConductor(**settings), spec, None, options)  # type: ignore[arg-type]
        self._streams = _Streams()
        self.session.streams = self._streams  # type: ignore[assignment]
        self.consumers = self.session.consumers
        self.consumers.streams = self.session.streams

    def sent_after(self, act: Callable[[], object]) -> list[Message]:
        """What it sends meanwhile."""
        self._streams.sent.clear()
        act()
        self.consumers.do_work()
        return list(self._streams.sent)

    def to(self, consumer_id: int = 1, now_ns: int = 0, **spec: Any) -> ConsumerConfig:
        """The answer to a hello."""
        self._streams.sent.clear()
        self.session.on_hello(hello(consumer_id, **HALF | spec), now_ns)
        self.consumers.do_work()
        (answer,) = self._streams.sent
        assert isinstance(answer, ConsumerConfig)
        return answer

    def override(self, consumer_id: int = 1, **override: Any) -> None:
        self.consumers.on_consumer_config(config(consumer_id, **override))


def config(consumer_id: int = 1, **changed: Any) -> ConsumerConfig:
    return messages.consumer_config(STREAM, consumer_id, **changed)


@pytest.mark.parametrize("uri", ["x" * 4096, "bridge://\udcff", "a b\n"], ids=["long", "not text", "not printable"])
def test_a_fallback_that_cannot_be_sent_on_is_not_kept(uri: str) -> None:
    """Our answers go on as if it had not come."""
    answers = Answers()
    assert answers.to(1) == config(1)
    answers.consumers.on_consumer_config(config(1, payload_fallback_uri=uri))
    assert answers.to(1) == config(1)


def test_an_answer_that_no_log_takes_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once, and the session goes on."""
    answers = Answers()
    for _ in range(2):
        assert not answers.session.send(config(1, payload_fallback_uri="x" * MAX_MESSAGE_BYTES))
    assert [record.getMessage().split()[0] for record in caplog.records] == ["message_not_sendable"]
    assert answers.to(1) == config(1)


@pytest.mark.parametrize("is_relay", [False, True], ids=["producer", "relay"])
@pytest.mark.parametrize("override", OVERRIDES.values(), ids=OVERRIDES)
def test_an_override_that_another_process_sent_is_repeated(override: dict[str, Any], is_relay: bool) -> None:
    """With every answer, to this consumer alone, until they tell it something else."""
    answers = Answers(is_relay=is_relay)
    assert answers.to(1) == config(1)
    answers.override(1, **override)
    assert [answers.to(1), answers.to(1)] == [config(1, **override)] * 2
    assert answers.to(2) == config(2)
    answers.override(1)
    assert answers.to(1) == config(1)


def test_an_override_holds_for_one_mode() -> None:
    """The hello that asks for another mode gets it, and asking for the first one again brings nothing back."""
    answers = Answers()
    answers.to(mode=Mode.RATE_LIMITED)
    answers.override(use_shm=False, mode=Mode.STREAM)
    assert answers.to(mode=Mode.RATE_LIMITED, max_rate_hz=5) == config(use_shm=False, mode=Mode.STREAM)
    assert answers.to(mode=Mode.STREAM) == config(mode=Mode.STREAM)
    assert answers.to(mode=Mode.RATE_LIMITED) == config(mode=Mode.RATE_LIMITED)


def test_an_override_ends_with_the_lease_of_its_consumer() -> None:
    """A client that reattaches gets a new lease id, and is another consumer."""
    answers = Answers()
    answers.to()
    answers.override(mode=Mode.RATE_LIMITED)
    answers.consumers.on_lease_ended(1)
    assert answers.to() == config()


def test_an_override_ends_with_the_silence_of_its_consumer() -> None:
    """Once it is stale, and not before."""
    answers = Answers()
    answers.to()
    answers.override(mode=Mode.RATE_LIMITED)
    window_ns = STALE_PERIODS * answers.session.config.announce_period_ns
    answers.consumers.forget_stale(window_ns)
    assert answers.to(now_ns=window_ns) == config(mode=Mode.RATE_LIMITED)
    answers.consumers.forget_stale(2 * window_ns + 1)
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
    session.consumers.forget_stale(start_ns + 3 * period_ns)
    assert 1 in session.consumers._consumers
    session.consumers.forget_stale(start_ns + 5 * period_ns)
    assert 1 not in session.consumers._consumers


def test_nothing_is_kept_of_consumers_that_sent_nothing() -> None:
    """A client that makes up ids fills no memory."""
    answers = Answers()
    for consumer_id in range(1000):
        answers.override(consumer_id, mode=Mode.RATE_LIMITED)
    assert not answers.consumers._consumers
    assert answers.to(1) == config(1)


def test_no_override_makes_another_layout_readable() -> None:
    """C20: use_shm stays false; the rest of it is repeated."""
    answers = Answers()
    other = {"expected_layout_version": 2}
    assert answers.to(**other) == config(use_shm=False)
    answers.override(use_shm=True, mode=Mode.RATE_LIMITED, payload_fallback_uri="bridge://lab")
    expected = config(use_shm=False, mode=Mode.RATE_LIMITED, payload_fallback_uri="bridge://lab")
    assert answers.to(**other) == expected


def test_only_so_many_consumers_are_known_at_once() -> None:
    """What strangers say under ever new ids costs bounded memory; those that are known are still answered."""
    answers = Answers()
    assert answers.to(1) == config(1)
    for consumer_id in range(2, 2 * MAX_CONSUMERS):
        answers.session.on_qos_consumer(messages.consumer_qos(STREAM, consumer_id), 0)
        answers.session.on_hello(hello(consumer_id), 0)
    assert len(answers.consumers._consumers) == MAX_CONSUMERS
    answers.override(1, mode=Mode.RATE_LIMITED)
    assert answers.to(1).mode is Mode.RATE_LIMITED


def test_consumers_that_say_hello_are_preferred_to_ids_that_only_report() -> None:
    """A flood of QoS under made-up ids keeps no consumer out; what was not noted is counted."""
    answers = Answers()
    strangers = range(10, 10 + MAX_CONSUMERS + 5)
    for consumer_id in strangers:
        answers.session.on_qos_consumer(messages.consumer_qos(STREAM, consumer_id), 0)
    assert len(answers.consumers._consumers) == MAX_CONSUMERS
    assert answers.consumers.counts["consumers_beyond_limit"] == 5
    assert [answers.to(1), answers.to(2), answers.to(1)] == [config(1), config(2), config(1)]
    assert len(answers.consumers._consumers) == MAX_CONSUMERS
    assert answers.consumers.counts["consumers_beyond_limit"] == 7
    answers.session.on_qos_consumer(messages.consumer_qos(STREAM, 3), 0)
    assert {1, 2} < answers.consumers._consumers.keys()
    assert 3 not in answers.consumers._consumers


# --- streams of a consumer's own, part by part


def asked(kind: str, stream_id: int, channel: str = "aeron:ipc") -> dict[str, Any]:
    return {f"{kind}_channel": channel, f"{kind}_stream_id": stream_id}


KINDS = [("descriptor", "control"), ("control", "descriptor")]


@pytest.mark.spec("WIRE-10.1.3-09")
@pytest.mark.parametrize(("ours", "drivers"), KINDS, ids=["descriptors by us", "progress by us"])
def test_each_part_of_a_request_is_answered_by_the_one_it_asks(ours: str, drivers: str) -> None:
    """E24: an explicit id is granted at once; the stream whose id the driver chose is opened, and repeated later."""
    answers = Answers()
    spec = {"descriptor_stream_id": 0} | asked(ours, 33_000) | asked(drivers, 0)
    assert answers.to(**spec) == config(**asked(ours, 33_000))
    assigned = config(**asked(ours, 33_000), **asked(drivers, 31_000))
    assert answers.sent_after(lambda: answers.consumers.on_consumer_config(assigned)) == []
    known = answers.consumers._consumers[1]
    assert known.descriptors is not None
    assert known.control is not None
    expected = {ours: 33_000, drivers: 31_000}
    assert known.descriptors.endpoint == Endpoint("aeron:ipc", expected["descriptor"])
    assert known.control.endpoint == Endpoint("aeron:ipc", expected["control"])
    assert answers.to(**spec) == assigned


@pytest.mark.parametrize("kind", ["descriptor", "control"])
def test_a_stream_that_the_driver_assigned_and_no_producer_publishes_is_declined(kind: str) -> None:
    """The consumer would wait there for ever: it is sent back to the shared stream, and that is counted."""
    answers = Answers()
    spec = {"descriptor_stream_id": 0} | asked(kind, 0)
    assert answers.sent_after(lambda: answers.session.on_hello(hello(1, **spec), 0)) == []
    elsewhere = config(**asked(kind, 31_000, "aeron:udp?endpoint=10.0.0.9:40123"))
    assert answers.sent_after(lambda: answers.consumers.on_consumer_config(elsewhere)) == [config()]
    assert answers.consumers.counts["private_streams_declined"] == 1


def test_nothing_is_opened_that_the_consumer_did_not_ask_for() -> None:
    """A ConsumerConfig may come from any process: it opens what its consumer asked the driver for, and no more."""
    answers = Answers()
    answers.session.on_hello(hello(1), 0)
    assigned = config(**asked("descriptor", 31_000), **asked("control", 32_000))
    assert answers.sent_after(lambda: answers.consumers.on_consumer_config(assigned)) == []
    assert (answers.consumers._consumers[1].descriptors, answers.consumers._consumers[1].control) == (
        None,
        None,
    )


@pytest.mark.spec("WIRE-5-14", "WIRE-10.1.3-09")
def test_private_streams_stay_on_the_media_of_the_deployment() -> None:
    """A hello, which any process can send, makes no producer send elsewhere; over the shared media it may."""
    elsewhere = asked("descriptor", 33_000, "aeron:udp?endpoint=10.0.0.9:40123")
    answers = Answers()
    assert answers.to(**elsewhere) == config()
    assert answers.consumers.counts["private_streams_declined"] == 1
    udp: dict[str, Any] = {"driver.descriptor_channel": "aeron:udp?endpoint=127.0.0.1:40124"}
    over_udp = Answers(**udp)
    assert over_udp.to(**elsewhere) == config(**elsewhere)
    assert over_udp.to(2, **asked("descriptor", 33_001)) == config(2, **asked("descriptor", 33_001))
    assert over_udp.session.consumers.counts["private_streams_declined"] == 0


# --- clocks


@pytest.mark.parametrize("known_from", ["configuration", "announce"])
@pytest.mark.parametrize("domain", list(ClockDomain), ids=lambda it: it.name)
def test_keepalives_are_stamped_by_the_clock_of_the_announces(domain: ClockDomain, known_from: str) -> None:
    """C8: that of the configuration, until an announce of the stream names another."""
    other = next(it for it in ClockDomain if it is not domain)
    configured = domain if known_from == "configuration" else other
    settings: dict[str, Any] = {"driver.announce_clock_domain": configured.name}
    answers = Answers(**settings)
    session, wall_ns = answers.session, 10**18
    session.conductor.clock = ManualClock(0, wall_ns)
    session.attachment.start(0)
    session.attachment.on_attach_response(granted(1, stream_id=STREAM, epoch=5), 0, wall_ns)
    if known_from == "announce":
        session.on_announce(announced(5, producer_id=1, stream_id=STREAM, announce_clock_domain=domain), 0, wall_ns)
    (keepalive,) = answers.sent_after(lambda: Session.do_work(session, 7))
    assert isinstance(keepalive, ShmLeaseKeepalive)
    assert keepalive.client_timestamp_ns == (7 if domain is ClockDomain.MONOTONIC else wall_ns)
    assert session.stamp_ns(7) == keepalive.client_timestamp_ns
