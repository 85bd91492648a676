# SPDX-License-Identifier: Apache-2.0
"""What wakes the client's conductor, and that nothing which a peer sends stops or stalls it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorpool.channel import Endpoint
from tensorpool.client import Client
from tensorpool.client.conductor import FRAGMENT_LIMIT, WakeableIdle, Wakeup
from tensorpool.client.known_consumers import OPENING_NS
from tests.client.conftest import Outsider, Pair, hello, paired
from tests.support import messages
from tests.support.processes import run_script, wait_until

IPC = "aeron:ipc?term-length=64k"


def in_turn[T](client: Client, act: Callable[[int], T]) -> T:
    """What `act` returns when the conductor performs it."""
    done: list[T] = []
    turned = threading.Event()

    def perform(now_ns: int) -> None:
        try:
            done.append(act(now_ns))
        finally:
            turned.set()

    client._conductor.order(perform)
    assert turned.wait(20)
    return done[0]


def test_a_kick_is_kept_until_it_is_waited_for() -> None:
    """Several are one, and clearing takes it away."""
    wakeup = Wakeup()
    assert not wakeup.wait(0)
    wakeup.set()
    wakeup.set()
    assert wakeup.wait(0)
    assert not wakeup.wait(0)
    wakeup.set()
    wakeup.clear()
    assert not wakeup.wait(0.001)


def test_a_kick_survives_an_exception_in_the_middle_of_it() -> None:
    """As a signal handler raises it: a thread that waits is not locked out for good."""
    code, output = run_script(
        """
import signal, threading, time
from tensorpool.client.conductor import FRAGMENT_LIMIT, Wakeup, WakeableIdle

wakeup, turns, is_over = Wakeup(), 0, False

def turn():
    global turns
    while not is_over:
        turns += wakeup.wait(0.001)

def on_alarm(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, on_alarm)
thread = threading.Thread(target=turn, daemon=True)
thread.start()
end_s = time.monotonic() + 1.0
while time.monotonic() < end_s:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0002)
        while True:
            wakeup.set()
    except KeyboardInterrupt:
        pass
seen = turns
wakeup.set()
is_over = True
thread.join(10)
print(thread.is_alive(), seen > 0)
"""
    )
    assert (code, output.split()) == (0, ["False", "True"])


def test_a_message_and_an_order_that_raise_cost_no_other_session_a_turn(client: Client, outsider: Outsider) -> None:
    """They are counted; sessions and messages after them are served."""
    pair = paired(client)
    conductor = client._conductor
    before = conductor.failures

    def fail(*_: Any) -> None:
        raise ValueError("a mistake of ours")

    pair.producer._session.on_hello = fail  # type: ignore[method-assign, assignment]
    stream_id = pair.producer.stream_id
    outsider.say("control", hello(5, stream_id))
    outsider.say("control", messages.consumer_config(stream_id, pair.consumer.consumer_id, use_shm=False))
    conductor.order(fail)
    wait_until(lambda: pair.consumer.state == "FALLBACK", "the message after the one that failed")
    wait_until(lambda: conductor.failures > before + 1, "both failures")
    assert in_turn(client, lambda now_ns: now_ns) > 0


def test_private_streams_are_opened_within_a_budget_of_time(client: Client) -> None:
    """A consumer that asks for ever new streams is declined until the conductor has had time for others."""
    pair = paired(client)
    session = pair.producer._session

    def ask(now_ns: int, stream_id: int) -> bool:
        spec = {"descriptor_channel": IPC, "descriptor_stream_id": stream_id}
        session.on_hello(hello(5, session.stream_id, **spec), now_ns)
        return session.consumers._consumers[5].descriptors is not None

    assert in_turn(client, lambda now_ns: ask(now_ns, 50_001))
    spent_ns = in_turn(client, lambda _: session.consumers._opener._opening_ns)
    assert spent_ns > 0

    def run_out(now_ns: int) -> None:
        session.consumers._opener._opening_ns, session.consumers._opener._opening_since_ns = (
            OPENING_NS,
            client._conductor.clock.monotonic_ns(),
        )

    in_turn(client, run_out)
    assert not in_turn(client, lambda now_ns: ask(now_ns, 50_002))

    def wait_long(now_ns: int) -> None:
        session.consumers._opener._opening_since_ns -= 10 * OPENING_NS + session.config.announce_period_ns

    in_turn(client, wait_long)
    assert in_turn(client, lambda now_ns: ask(now_ns, 50_002))


def test_a_consumer_follows_one_change_of_its_streams_in_a_period(client: Client) -> None:
    """ConsumerConfigs that contradict each other do not keep the conductor subscribing."""
    with client.producer("test/flipping", create=True) as producer:
        consumer = client.consumer("test/flipping", private_descriptors=Endpoint(IPC, 50_010))
        session = consumer._session

        def follow(now_ns: int, stream_id: int) -> Endpoint | None:
            config = messages.consumer_config(
                session.stream_id, consumer.consumer_id, descriptor_channel=IPC, descriptor_stream_id=stream_id
            )
            session.on_consumer_config(config, now_ns)
            return session._private

        def change_twice(now_ns: int) -> list[Endpoint | None]:
            session._paces[0].next_ns = 0
            return [follow(now_ns, 50_011), follow(now_ns, 50_012)]

        def change_later(now_ns: int) -> list[Endpoint | None]:
            session._paces[0].next_ns = 0
            return [follow(now_ns, 50_012)]

        assert in_turn(client, change_twice) == [Endpoint(IPC, 50_011), Endpoint(IPC, 50_011)]
        assert in_turn(client, change_later) == [Endpoint(IPC, 50_012)]
        consumer.close()
        assert producer.publish(np.zeros(4, np.uint8)) is not None


@pytest.mark.parametrize("stream_id", [2**31, 2**32 - 2])
def test_a_consumer_takes_a_stream_id_that_aeron_does_not_have_as_a_decline(client: Client, stream_id: int) -> None:
    """The wire has 32 unsigned bits, Aeron 31: the shared streams go on."""
    with client.producer(f"test/ids/{stream_id}", create=True):
        ends: dict[str, Any] = {"private_descriptors": Endpoint(IPC, 50_020), "private_control": Endpoint(IPC, 50_021)}
        consumer = client.consumer(f"test/ids/{stream_id}", on_progress=lambda progress: None, **ends)
        session = consumer._session

        def assign(now_ns: int) -> tuple[Endpoint | None, Endpoint | None]:
            spec = {"descriptor_channel": IPC, "descriptor_stream_id": stream_id}
            spec |= {"control_channel": IPC, "control_stream_id": stream_id}
            config = messages.consumer_config(session.stream_id, consumer.consumer_id, **spec)
            session.on_consumer_config(config, now_ns)
            return session._private, session.reader.progress_endpoint

        assert in_turn(client, assign) == (None, session.config.driver.control)
        consumer.close()


class Calm:
    """A conductor as its idle strategy sees it, to which nothing urgent happens."""

    is_urgent = False

    def __init__(self) -> None:
        self.wakeup = self
        self.waits = 0
        self.news_after = 1000
        self.woken_after = 1000

    def wait(self, seconds: float) -> bool:
        self.waits += 1
        assert seconds <= 0.1
        return self.waits >= self.woken_after

    def has_news(self) -> bool:
        return self.waits >= self.news_after

    def waits_of(self, idle: WakeableIdle, work_count: int = 0) -> int:
        """How many there were between two turns."""
        self.waits = 0
        idle.idle(work_count)
        return self.waits


def test_a_calm_client_reads_on_while_polls_are_full() -> None:
    """Who floods a stream cannot make a client sleep through the driver's announces."""
    calm = Calm()
    idle = WakeableIdle(calm)  # type: ignore[arg-type]
    assert calm.waits_of(idle, FRAGMENT_LIMIT) == 0
    assert calm.waits_of(idle, FRAGMENT_LIMIT + 1) == 0
    assert calm.waits_of(idle, FRAGMENT_LIMIT - 1) > 0
    assert calm.waits_of(idle) > 0


def test_a_calm_client_has_turns_for_news_and_without() -> None:
    """It looks every tenth of a second, and has a turn in any case every half second."""
    calm = Calm()
    idle = WakeableIdle(calm)  # type: ignore[arg-type]
    assert calm.waits_of(idle) == WakeableIdle.LOOKS
    calm.news_after = 1
    assert calm.waits_of(idle) == 1
    calm.news_after, calm.woken_after = 1000, 1
    assert calm.waits_of(idle) == 1


def test_what_is_due_is_news(shared_client: Client, pair: Pair) -> None:
    """Keepalives, periodic reports, and how far a consumer has read, each by itself."""
    client, producer, consumer = shared_client, pair.producer._session, pair.consumer._session

    def due(now_ns: int) -> list[bool]:
        seen = []
        for session in (producer, consumer):
            kept = session.attachment._next_ns, session._next_ns
            for keepalive_ns, report_ns in ((2, 2), (1, 2), (2, 1)):
                session.attachment._next_ns, session._next_ns = keepalive_ns, report_ns
                seen.append(session.is_due(1))
            session.attachment._next_ns, session._next_ns = kept
        return seen

    wait_until(lambda: in_turn(client, lambda _: consumer._reported == consumer._seen()), "all is reported")
    assert in_turn(client, due) == 2 * [False, True, True]
    pair.publish()
    wait_until(lambda: in_turn(client, lambda _: consumer._reported == consumer._seen()), "what was read is reported")


def test_a_client_that_lost_its_media_driver_has_news(shared_client: Client) -> None:
    """So that it does not wait for a look that cannot succeed; and a message that nobody read is news."""
    conductor = shared_client._conductor

    def news(now_ns: int) -> tuple[bool, bool, bool]:
        streams = conductor._connection.streams
        assert streams is not None
        while streams.has_news():
            streams.poll_control(lambda data, info: None, FRAGMENT_LIMIT)
            streams.poll_qos(lambda data, info: None, FRAGMENT_LIMIT)
            streams.poll_metadata(lambda data, info: None, FRAGMENT_LIMIT)
        before = streams.has_news()
        streams.control.offer(bytes(8))
        wait_until(streams.has_news, "our own message is in the log")
        conductor._connection.streams = None
        try:
            return before, conductor.has_news(), streams.has_news()
        finally:
            conductor._connection.streams = streams

    assert in_turn(shared_client, news) == (False, True, True)
