# SPDX-License-Identifier: Apache-2.0
"""One thread for many consumers: who has a frame, who is closed, and a function that is called with every frame."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import tensorpool as tp
from tensorpool.client import Client, Consumer, Frame, Producer, State, waiting
from tensorpool.client import consumer as consumer_module
from tensorpool.errors import LocalProtocolError
from tests.client.conftest import FRAME, new_name, paired
from tests.support.processes import wait_until

LONG_S = 60.0


class Streams:
    """Some streams, each with a producer and a consumer."""

    def __init__(self, client: Client, count: int) -> None:
        self.pairs = [paired(client) for _ in range(count)]
        self.producers: list[Producer] = [pair.producer for pair in self.pairs]
        self.consumers: list[Consumer] = [pair.consumer for pair in self.pairs]

    def close(self) -> None:
        for pair in self.pairs:
            pair.consumer.close()
            pair.producer.close()


@pytest.fixture
def streams(client: Client) -> Iterator[Streams]:
    streams = Streams(client, 4)
    yield streams
    streams.close()


def test_those_that_have_frames_are_returned(streams: Streams) -> None:
    """Until they were polled; none at the timeout."""
    assert tp.wait_any(streams.consumers, 0) == []
    started = time.monotonic()
    assert tp.wait_any(streams.consumers, 0.05) == []
    assert time.monotonic() - started >= 0.05
    for index in (1, 3, 3):
        streams.producers[index].publish(FRAME)
    first, third = streams.consumers[1], streams.consumers[3]
    wait_until(lambda: tp.wait_any(iter(streams.consumers), LONG_S) == [first, third], "both have frames")
    assert first.poll() is not None
    assert third.poll() is not None
    assert tp.wait_any(streams.consumers, LONG_S) == [third]
    assert third.poll() is not None
    assert tp.wait_any(streams.consumers, 0) == []


def test_a_frame_of_any_stream_ends_the_sleep(streams: Streams) -> None:
    """Long before the time is over; every stream gets its turn."""
    order: list[int] = []

    def publish() -> None:
        for number in (2, 0, 3, 1):
            streams.producers[number].publish(FRAME)
            wait_until(lambda number=number: number in order, "it is received")

    thread = threading.Thread(target=publish)
    thread.start()
    while len(order) < 4:
        for consumer in tp.wait_any(streams.consumers, LONG_S):
            assert consumer.poll() is not None
            order.append(streams.consumers.index(consumer))
    thread.join()
    assert order == [2, 0, 3, 1]


def test_a_closed_consumer_is_returned_at_once(streams: Streams) -> None:
    """Also when it is closed meanwhile, and when all are: no wait hangs."""
    closed = streams.consumers[1]
    closer = threading.Timer(0.05, closed.close)
    closer.start()
    assert tp.wait_any(streams.consumers) == [closed]
    closer.join()
    assert closed.is_closed
    assert closed.poll() is None
    streams.producers[2].publish(FRAME)
    both = {closed, streams.consumers[2]}
    wait_until(lambda: set(tp.wait_any(streams.consumers, LONG_S)) == both, "the frame is there, too")
    for consumer in streams.consumers:
        consumer.close()
    assert tp.wait_any(streams.consumers) == streams.consumers


def test_a_producer_that_comes_back_is_noticed(client: Client) -> None:
    """Its consumer waits beside others, without memory, until the next epoch is there; callbacks run meanwhile."""
    states: list[State] = []
    name, other = new_name(), paired(client)
    with client.producer(name, create=True) as producer:
        consumer = client.consumer(name, on_state=lambda change: states.append(change.state))
        assert producer.wait_for_consumers(1, 20)
    both = [consumer, other.consumer]
    wait_until(lambda: not tp.wait_any(both, 0.01) and State.WAITING in states, "its memory is gone")

    def come_back() -> None:
        with client.producer(name, create=True) as again:
            again.wait_for_consumers(1, LONG_S)
            again.publish(FRAME)
            again.drain(LONG_S)

    thread = threading.Thread(target=come_back)
    thread.start()
    frame = None
    while frame is None:
        assert tp.wait_any(both, LONG_S) == [consumer]
        frame = consumer.poll()
    assert frame.seq == 0
    thread.join()
    for end in (consumer, other.consumer, other.producer):
        end.close()


def test_what_cannot_be_waited_for_is_refused(streams: Streams) -> None:
    """An empty list, the same consumer twice, something else, and one that another thread polls."""
    first, second = streams.consumers[:2]
    with pytest.raises(LocalProtocolError, match="at least one consumer"):
        tp.wait_any([], 1.0)
    with pytest.raises(LocalProtocolError, match="given twice"):
        tp.wait_any([first, first], 1.0)
    with pytest.raises(LocalProtocolError, match="expected consumers"):
        tp.wait_any([first, streams.producers[0]], 1.0)  # type: ignore[list-item]
    with pytest.raises(LocalProtocolError, match="timeout"):
        tp.wait_any([first], float("nan"))
    stop = threading.Event()

    def poll() -> None:
        while not stop.is_set():
            first.wait(LONG_S)

    thread = threading.Thread(target=poll)
    thread.start()

    def is_refused() -> bool:
        try:
            tp.wait_any([second, first], 0.01)
        except LocalProtocolError as error:
            return "another thread" in str(error)
        return False

    wait_until(is_refused, "two threads wait for one consumer")
    stop.set()
    streams.producers[0].publish(FRAME)
    thread.join()
    assert tp.wait_any([second, first], LONG_S) == [first]


def test_a_signal_ends_the_wait(streams: Streams) -> None:
    """Ctrl-C as in any other call."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs us in the background
    try:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            tp.wait_any(streams.consumers)
    finally:
        signal.signal(signal.SIGINT, before)


class Alarm(Exception):
    """What the handler of SIGALRM raises."""


@pytest.mark.parametrize("wait", [tp.wait_any, lambda consumers: consumers[0].poll(100 * LONG_S)])
def test_a_signal_ends_the_sleep_at_once(
    streams: Streams, wait: Callable[[list[Consumer]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when the wait comes up by itself."""
    for module in (consumer_module, waiting):
        monkeypatch.setattr(module, "SLICE_NS", 10**12)

    def on_alarm(number: int, frame: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise Alarm

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)  # again: one that comes just before the sleep does not end it
        started_s = time.monotonic()
        with pytest.raises(Alarm):
            wait(streams.consumers)
        assert time.monotonic() - started_s < 5, "something else ended it"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_clients_without_a_thread_take_turns_meanwhile(pool: tp.Local, client: Client) -> None:
    """And partial frames are reported."""
    progress: list[int] = []
    with pool.connect(conductor="invoked") as own, client.producer(new_name(), create=True) as producer:
        consumer = own.consumer(producer.stream_id, on_progress=lambda it: progress.append(it.rows or 0))
        wait_until(lambda: not tp.wait_any([consumer], 0.01) and producer.consumers == 1, "it is ready")
        with producer.claim((60_000, 1), progress="rows") as slot:
            slot.array[:] = 1
            rows = itertools.count(1)

            def is_reported() -> bool:
                slot.progress(rows=next(rows))
                return not tp.wait_any([consumer], 0.01) and bool(progress)

            wait_until(is_reported, "a part of the frame is reported")
        assert tp.wait_any([consumer], LONG_S) == [consumer]
        assert consumer.poll() is not None


# --- run


def test_a_function_gets_every_frame_of_every_consumer(client: Client) -> None:
    """In the thread of the caller; it may open and close consumers, and ends with the last that is closed."""
    streams, late = Streams(client, 3), paired(client)
    late.consumer.close()
    seen: list[tuple[int, int]] = []
    opened: list[Consumer] = []
    main = threading.get_ident()

    def on_frame(consumer: Consumer, frame: Frame) -> None:
        assert threading.get_ident() == main
        seen.append((consumer.stream_id, frame.seq))
        if len(seen) == 6:
            opened.append(client.consumer(late.producer.stream_id))
            late.producer.wait_for_consumers(1, 20)
            late.producer.publish(FRAME)
        if consumer in opened:
            for each in (*streams.consumers, consumer):
                each.close()

    for _ in range(2):
        for producer in streams.producers:
            producer.publish(FRAME)
    client.run(on_frame)
    ids = [consumer.stream_id for consumer in streams.consumers]
    assert sorted(seen[:6]) == sorted((stream_id, seq) for stream_id in ids for seq in (0, 1))
    assert seen[6:] == [(late.producer.stream_id, 0)]
    streams.close()
    late.producer.close()


def test_what_a_function_raises_ends_the_run(client: Client, streams: Streams) -> None:
    """The consumers stay open; without one there is nothing to run."""

    def fail(consumer: Consumer, frame: Frame) -> None:
        raise ZeroDivisionError

    streams.producers[0].publish(FRAME)
    with pytest.raises(ZeroDivisionError):
        client.run(fail)
    assert not streams.consumers[0].is_closed
    with pytest.raises(LocalProtocolError, match="on_frame = 7"):
        client.run(7)  # type: ignore[arg-type]
    for consumer in streams.consumers:
        consumer.close()
    with pytest.raises(LocalProtocolError, match="no open consumer"):
        client.run(fail)


def test_a_closed_client_ends_its_run(pool: tp.Local, client: Client) -> None:
    """From another thread; every frame until then is received, or counted."""
    own = pool.connect()
    with client.producer(new_name(), create=True) as producer:
        consumer = own.consumer(producer.stream_id)
        assert producer.wait_for_consumers(1, 20)
        seqs: list[int] = []

        def on_frame(consumer: Consumer, frame: Frame) -> None:
            seqs.append(frame.seq)
            if frame.seq == 0:
                for _ in range(40):  # five times round the ring
                    producer.publish(FRAME)
            if frame.seq == 40:
                threading.Thread(target=own.close).start()

        producer.publish(FRAME)
        own.run(on_frame)
    stats = consumer.stats
    assert seqs[-1] == 40
    assert stats.received == len(seqs)
    assert stats.received + stats.lost == 41
