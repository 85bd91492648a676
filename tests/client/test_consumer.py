# SPDX-License-Identifier: Apache-2.0
"""Consumers: waiting, the newest, rates, partial frames, streams of their own and fallback, as their users see it."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import tensorpool as tp
from tensorpool.channel import Endpoint
from tensorpool.client import Client, Consumer, DropReason, Progress, State, StateChange
from tensorpool.wire.control import (
    ConsumerConfig,
    FrameProgressState,
    Mode,
)
from tests.client.conftest import FRAME, SECOND_NS, SMALL, Outsider, Pair, hello, new_name, paired
from tests.support.messages import consumer_config
from tests.support.processes import wait_until

_private_ids = itertools.count(33_000)


def test_waiting_has_an_end(pair: Pair) -> None:
    """poll gives None, wait gives False, latest nothing."""
    assert pair.consumer.poll() is None
    assert pair.consumer.poll(0.01) is None
    assert not pair.consumer.wait(0.01)
    assert not pair.consumer.wait(0)
    assert pair.consumer.latest() is None


def test_a_waiting_consumer_gets_a_frame_when_it_comes(pair: Pair) -> None:
    """By poll, by wait, by iteration; long before its time is over."""
    for wait in (lambda: pair.consumer.poll(60), lambda: pair.consumer.wait(60), lambda: next(pair.consumer)):
        results: list[Any] = []
        waiter = threading.Thread(target=lambda wait=wait, results=results: results.append(wait()))
        waiter.start()
        pair.producer.publish(FRAME)
        waiter.join(timeout=30)
        assert results
        assert results[0]
        while pair.consumer.poll() is not None:
            pass


def test_latest_is_the_newest_also_right_after_attaching(pair: Pair, shared_client: Client) -> None:
    """What was published before is there; older ones are SKIPPED."""
    for number in range(5):
        pair.producer.publish(FRAME + number)
    with shared_client.consumer(pair.producer.stream_id) as late:
        frame = late.latest()
        assert frame is not None
        assert frame.seq == 4
        again = late.latest()
        assert again is not None
        assert again.seq == 4
        assert late.stats.received == 1
    frame = pair.consumer.latest()
    assert frame is not None
    assert frame.seq == 4
    stats = pair.consumer.stats
    assert stats.received + stats.lost == 5
    assert stats.drops.get(DropReason.SKIPPED) == 4


def test_a_slow_consumer_counts_what_the_ring_took(pair: Pair) -> None:
    """Every frame, and says so with the next one that it gets."""
    pair.publish()
    for _ in range(100):
        pair.producer.publish(FRAME)
    frame = pair.consumer.poll(20)
    assert frame is not None
    assert frame.seq > 90
    assert frame.dropped_before == frame.seq - 1
    while pair.consumer.poll() is not None:
        pass
    stats = pair.consumer.stats
    assert stats.received + stats.lost == 101 == pair.producer.stats.published


def test_a_rate_limited_consumer_gets_fewer(shared_client: Client) -> None:
    """By the times of the frames; the rest is counted as what it asked for."""
    pair = paired(shared_client, mode="rate_limited", max_rate_hz=10)
    assert pair.consumer.mode is Mode.RATE_LIMITED
    for number in range(6):
        pair.producer.publish(FRAME, timestamp_ns=1_000_000_000 + number * 50_000_000)
    frames = [pair.consumer.poll(5) for _ in range(3)]
    assert [frame and frame.seq for frame in frames] == [0, 2, 4]
    assert pair.consumer.poll() is None
    stats = pair.consumer.stats
    assert (stats.received, stats.drops.get(DropReason.RATE_LIMITED)) == (3, 3)
    assert stats.drops_gap == 0
    pair.consumer.close()
    pair.producer.close()


def test_partial_frames_are_reported_to_consumers_that_asked(client: Client) -> None:
    """STARTED, complete rows, COMPLETE; each prefix is what was written, and whole afterwards."""
    reports: list[tuple[Progress, Any]] = []
    producer = client.producer(new_name(), create=True)
    consumer = client.consumer(
        producer.stream_id,
        on_progress=lambda it: reports.append((it, None if it.prefix is None else it.prefix.copy())),
        progress_bytes_delta=4096,
        progress_interval_us=1,
    )
    wait_until(lambda: producer._session.consumers.fan_out.policy, "the producer knows that a consumer asked")
    with producer.claim((16, 4096), np.uint8, progress="rows") as slot:
        for row in range(16):
            slot.array[row] = row + 1

            def is_reported(rows: int = row + 1) -> bool:
                slot.progress(rows=rows)
                consumer.poll()
                return bool(reports) and reports[-1][0].rows == rows

            wait_until(is_reported, "the row is reported")
            progress, prefix = reports[-1]
            assert progress.state is FrameProgressState.PROGRESS
            assert (progress.seq, progress.epoch, progress.stream_id) == (0, producer.epoch, producer.stream_id)
            assert progress.is_intact()
            assert prefix.shape == (row + 1, 4096)
            assert (prefix == np.arange(1, row + 2)[:, None]).all()
    frame = consumer.poll(20)
    assert frame is not None
    assert reports[0][0].state is FrameProgressState.STARTED
    wait_until(
        lambda: consumer.poll() is None and reports[-1][0].state is FrameProgressState.COMPLETE, "the frame is complete"
    )
    assert progress.columns is None


def test_partial_frames_are_reported_also_to_a_consumer_that_always_has_whole_ones(client: Client) -> None:
    """A poll that finds a frame has looked for progress too."""
    reports: list[Progress] = []
    producer = client.producer(new_name(), create=True)
    consumer = client.consumer(producer.stream_id, on_progress=reports.append)
    wait_until(lambda: producer._session.consumers.fan_out.progress, "the producer knows that a consumer asked")
    assert producer.wait_for_consumers(1, 20)
    producer.publish(FRAME)
    with producer.claim((16, 4096), np.uint8, progress="rows") as slot:
        frame = consumer.poll()
        assert frame is not None
        assert [(it.seq, it.state) for it in reports] == [(slot.seq, FrameProgressState.STARTED)]


# --- private streams, and being reports not to use shared memory


@pytest.mark.parametrize("by", ["consumer", "driver"])
@pytest.mark.spec("WIRE-5-01", "WIRE-5-02")
def test_a_consumer_may_have_descriptors_of_its_own(client: Client, by: str) -> None:
    """On an id of its own choosing, or of the driver's; frames come as before, each once."""
    endpoint = Endpoint("aeron:ipc?term-length=64k", next(_private_ids) if by == "consumer" else 0)
    producer = client.producer(new_name(), create=True)
    consumer = client.consumer(producer.stream_id, private_descriptors=endpoint)
    wait_until(lambda: producer._session.consumers.fan_out.descriptors, "the producer has opened a stream")
    (private,) = producer._session.consumers.fan_out.descriptors
    if by == "consumer":
        assert private.endpoint == endpoint
    else:
        assert private.endpoint.stream_id in client.config.driver.descriptor_stream_id_range
    wait_until(lambda: private.publication.has_room, "the consumer listens to it")
    wait_until(lambda: consumer._session._private == private.endpoint, "and to nothing else")
    pair = Pair(producer, consumer)
    for _ in range(10):
        pair.publish()
    assert consumer.stats.received == 10
    consumer.close()
    wait_until(lambda: not producer._session.consumers.fan_out.descriptors, "the stream is closed with its consumer")


@pytest.mark.parametrize("by_driver", ["descriptors", "progress"])
@pytest.mark.spec("WIRE-10.1.3-10", "WIRE-5-11", "WIRE-5-02", "DRV-11-04", "DRV-11-05")
def test_a_consumer_may_choose_one_of_its_streams_and_leave_the_other_to_the_driver(
    brisk: tuple[Client, Outsider], by_driver: str
) -> None:
    """E24: producer and driver answer their part each, and neither takes away what the other one granted."""
    client, outsider = brisk
    reports: list[Progress] = []
    explicit, chosen = Endpoint("aeron:ipc?term-length=64k", next(_private_ids)), Endpoint("aeron:ipc", 0)
    descriptors, control = (chosen, explicit) if by_driver == "descriptors" else (explicit, chosen)
    producer = client.producer(new_name(), create=True)
    consumer = client.consumer(
        producer.stream_id, private_descriptors=descriptors, private_control=control, on_progress=reports.append
    )
    session, known = consumer._session, producer._session.consumers
    wait_until(lambda: known.fan_out.descriptors and known.fan_out.progress, "the producer has opened both")
    (private,) = known.fan_out.descriptors
    wait_until(lambda: session._private == private.endpoint, "the consumer takes its descriptors there")
    shared = client.config.driver.control
    wait_until(lambda: session.reader.progress_endpoint not in (None, shared), "and its progress")
    endpoints = session._private, session.reader.progress_endpoint
    assert explicit in endpoints
    wait_until(
        lambda: private.publication.has_room and all(it.has_room for it in known.fan_out.progress), "they are read"
    )
    outsider.say("control", hello(700_000, producer.stream_id, descriptor_stream_id=31_000))
    outsider.wait_for(ConsumerConfig, lambda it: it.consumer_id == 700_000)
    outsider.received.clear()  # the producer's answers from before it knew both

    def answers() -> list[ConsumerConfig]:
        outsider.wait_for(ConsumerConfig, lambda it: it.consumer_id == consumer.consumer_id)
        return [it for it in outsider.received if isinstance(it, ConsumerConfig)]

    wait_until(lambda: len(answers()) >= 6, "hellos were answered three times more, by both")
    for answer in answers():
        assert Endpoint(answer.descriptor_channel, answer.descriptor_stream_id) == endpoints[0]
        assert Endpoint(answer.control_channel, answer.control_stream_id) == endpoints[1]
    pair = Pair(producer, consumer)
    for _ in range(10):
        pair.publish()
    assert consumer.stats.received == 10
    with producer.claim((16, 4096), np.uint8, progress="rows"):
        wait_until(lambda: consumer.poll() is None and reports, "progress comes too")
    assert (session._private, session.reader.progress_endpoint) == endpoints
    assert producer.stats.private_streams_declined == 1  # what the outsider asked for


def test_descriptors_of_its_own_have_the_time_of_publishing_too(client: Client) -> None:
    """Where the producer tells it on the shared stream."""
    producer = client.producer(new_name(), create=True, with_publish_time=True)
    consumer = client.consumer(
        producer.stream_id, private_descriptors=Endpoint("aeron:ipc?term-length=64k", next(_private_ids))
    )
    wait_until(
        lambda: any(it.publication.has_room for it in producer._session.consumers.fan_out.descriptors),
        "the consumer listens to its own stream",
    )
    wait_until(lambda: consumer._session._private is not None, "and to nothing else")
    assert Pair(producer, consumer).publish().publish_timestamp_ns is not None


def test_a_private_stream_is_throttled_as_asked(client: Client) -> None:
    """E26-E28: the rate is kept by the producer, and what it leaves out is no gap."""
    producer = client.producer(new_name(), create=True)
    consumer = client.consumer(
        producer.stream_id,
        mode="rate_limited",
        max_rate_hz=1,
        private_descriptors=Endpoint("aeron:ipc?term-length=64k", next(_private_ids)),
    )
    wait_until(
        lambda: any(it.publication.has_room for it in producer._session.consumers.fan_out.descriptors),
        "the consumer listens to its own stream",
    )
    wait_until(lambda: consumer._session._private is not None, "and to nothing else")
    pair = Pair(producer, consumer)
    pair.publish()
    for _ in range(5):
        producer.publish(FRAME)
    assert consumer.poll() is None
    assert consumer.stats.drops_gap == 0
    assert producer.stats.published == 6


class Answers:
    """What the producer or the driver answers to a consumer's hellos."""

    def __init__(self, outsider: Outsider, consumer: Consumer, spec: Endpoint) -> None:
        self._outsider = outsider
        self._consumer = consumer
        self._requested = spec
        self._strangers = itertools.count(700_000)

    def after(self, override: ConsumerConfig) -> list[ConsumerConfig]:
        """The next three, from one on that was sent after the override was received."""
        self._outsider.say("control", override)
        stranger = hello(next(self._strangers), override.stream_id, descriptor_stream_id=31_000)
        if not self._requested.stream_id:
            stranger = msgspec.structs.replace(
                stranger, descriptor_stream_id=0, descriptor_channel=self._requested.channel
            )
        self._outsider.say("control", stranger)
        self._outsider.wait_for(ConsumerConfig, lambda it: it.consumer_id == stranger.consumer_id)
        self._outsider.received.clear()

        def is_ours(message: ConsumerConfig) -> bool:
            return message.consumer_id == self._consumer.consumer_id

        def said() -> list[ConsumerConfig]:
            self._outsider.wait_for(ConsumerConfig, is_ours)
            return [it for it in self._outsider.received if isinstance(it, ConsumerConfig) and is_ours(it)]

        wait_until(lambda: len(said()) >= 3, "the consumer was answered three times more")
        return said()[:3]


@pytest.fixture
def brisk() -> Iterator[tuple[Client, Outsider]]:
    """Where hellos are frequent."""
    often = {"policies.announce_period_ms": 300}
    with (
        tp.local(overrides=SMALL | often) as pool,
        pool.connect() as client,
        contextlib.closing(Outsider(pool)) as outsider,
    ):
        yield client, outsider


@pytest.mark.parametrize("by", ["producer", "driver"])
@pytest.mark.spec("WIRE-10.1.3-03", "WIRE-10.1.3-04")
def test_an_answer_to_a_hello_repeats_the_override(brisk: tuple[Client, Outsider], by: str) -> None:
    """A mode and a redirection stay, with the streams that the consumer has, until they are taken back."""
    client, outsider = brisk
    spec = Endpoint("aeron:ipc?term-length=64k", next(_private_ids) if by == "producer" else 0)
    producer = client.producer(new_name(), create=True)
    consumer = client.consumer(producer.stream_id, max_rate_hz=20, private_descriptors=spec)
    wait_until(lambda: consumer._session._private is not None, "the consumer has a stream of its own")
    endpoint = consumer._session._private
    assert endpoint is not None
    (private,) = producer._session.consumers.fan_out.descriptors
    wait_until(lambda: private.publication.has_room, "the consumer listens to it")
    answers = Answers(outsider, consumer, spec)
    plain = consumer_config(
        consumer.stream_id,
        consumer.consumer_id,
        descriptor_stream_id=endpoint.stream_id,
        descriptor_channel=endpoint.channel,
    )
    limited = msgspec.structs.replace(plain, mode=Mode.RATE_LIMITED)
    assert answers.after(limited) == [limited] * 3
    wait_until(lambda: consumer.mode is Mode.RATE_LIMITED, "the consumer obeys")
    wait_until(lambda: private._interval_ns == SECOND_NS // 20, "the producer keeps the consumer's rate")
    for _ in range(3):
        for _ in range(3):
            producer.publish(FRAME)
        wait_until(lambda: producer.publish(FRAME) is not None and consumer.poll(0.02), "a frame comes")
    assert consumer.stats.drops[DropReason.RATE_LIMITED] > 0
    assert consumer.stats.drops_gap == 0
    redirected = msgspec.structs.replace(plain, use_shm=False, payload_fallback_uri="bridge://lab")
    assert answers.after(redirected) == [redirected] * 3
    wait_until(lambda: consumer.state is State.FALLBACK, "the consumer falls back")
    assert consumer.fallback_uri == "bridge://lab"
    assert answers.after(plain) == [plain] * 3
    wait_until(lambda: consumer.is_active and consumer.mode is Mode.STREAM, "the consumer is back")
    wait_until(lambda: private._interval_ns == 0, "the producer leaves nothing out")
    wait_until(lambda: producer.publish(FRAME) is not None and consumer.poll(0.05), "frames flow again")
    while consumer.poll() is not None:
        pass
    pair = Pair(producer, consumer)
    for _ in range(5):
        pair.publish()
    assert private in producer._session.consumers.fan_out.descriptors
    assert consumer.stats.drops_gap == 0


@pytest.mark.parametrize("uri", ["aeron:udp?endpoint=host:1|stream=5", "bridge://lab", "", "http://x"])
@pytest.mark.spec("WIRE-10.1.3-03", "WIRE-10.1.3-06", "WIRE-15.12-02")
def test_a_consumer_that_is_reported_not_to_use_shared_memory_falls_back(
    client: Client, outsider: Outsider, uri: str
) -> None:
    """And comes back when it is reports otherwise; unknown schemes are no fallback."""
    seen: list[StateChange] = []
    producer = client.producer(new_name(), create=True)
    consumer = client.consumer(producer.stream_id, on_state=seen.append)
    producer.wait_for_consumers(1, 20)
    pair = Pair(producer, consumer)
    pair.publish()
    reports = consumer_config(consumer.stream_id, consumer.consumer_id, use_shm=False, payload_fallback_uri=uri)
    outsider.say(
        "control", msgspec.structs.replace(reports, consumer_id=reports.consumer_id ^ 1)
    )  # for another consumer
    outsider.say("control", msgspec.structs.replace(reports, stream_id=reports.stream_id + 1))
    outsider.say("control", msgspec.structs.replace(reports, use_shm=True, mode=Mode.RATE_LIMITED))
    wait_until(lambda: consumer.mode is Mode.RATE_LIMITED, "the messages before were received")
    assert consumer.is_active
    outsider.say("control", reports)
    wait_until(lambda: consumer.state is State.FALLBACK, "the consumer falls back")
    assert consumer.fallback_uri == (uri if uri.startswith(("aeron:", "bridge:")) else None)
    producer.publish(FRAME)
    assert consumer.poll(0.01) is None
    assert consumer.epoch is None
    assert not consumer.is_active
    outsider.say("control", msgspec.structs.replace(reports, use_shm=True, payload_fallback_uri=""))
    wait_until(lambda: consumer.is_active, "the consumer is back")
    assert consumer.fallback_uri is None
    wait_until(lambda: producer.publish(FRAME) is not None and consumer.poll(0.05), "frames flow again")
    wait_until(lambda: consumer.poll() is None and seen[-1].state is State.ACTIVE, "the callback hears of it")
    states = [change.state for change in seen]
    assert states[states.index(State.FALLBACK) :] == [State.FALLBACK, State.WAITING, State.ACTIVE]


def test_a_closed_consumer_ends_its_loops(pair: Pair) -> None:
    """Those that wait in other threads as well; frames stay what they were."""
    frame = pair.publish()
    ended: list[str] = []

    def loop() -> None:
        for _ in pair.consumer:
            pass
        ended.append("loop")

    reader = threading.Thread(target=loop)
    reader.start()
    pair.consumer.close()
    reader.join(timeout=30)
    assert ended == ["loop"]
    assert pair.consumer.poll() is None
    assert pair.consumer.poll(1) is None
    assert pair.consumer.latest() is None
    assert not pair.consumer.wait(1)
    assert list(pair.consumer) == []
    np.testing.assert_array_equal(frame.array, FRAME)
    assert frame.is_intact()
    assert pair.consumer.stats.received == 1
    pair.consumer.close()


def test_a_closed_client_ends_the_loops_of_its_consumers(pool: tp.Local) -> None:
    """Wherever they wait."""
    client = pool.connect()
    pair = paired(client)
    reader = threading.Thread(target=lambda: list(pair.consumer))
    reader.start()
    client.close()
    reader.join(timeout=30)
    assert not reader.is_alive()


def test_consumers_go_from_producer_to_producer(client: Client, shared_client: Client) -> None:
    """Each in an epoch of its own; every frame of all of them is accounted for."""
    name = new_name()
    published = 0
    consumer: Consumer | None = None
    for lap in range(3):
        with shared_client.producer(name, create=True, timeout=20) as producer:
            consumer = consumer or client.consumer(name)
            assert producer.wait_for_consumers(1, 20)
            for _ in range(lap + 2):
                producer.publish(FRAME)
            frame = consumer.poll(20)
            assert frame is not None
            assert frame.epoch == producer.epoch
            published += producer.stats.published
    assert consumer is not None
    ended = consumer
    wait_until(
        lambda: ended.poll(0.01) is None and ended.stats.received + ended.stats.lost == published,
        "everything is accounted for",
    )
    assert ended.stats.epochs >= 3
