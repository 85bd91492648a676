# SPDX-License-Identifier: Apache-2.0
"""What a ConsumerConfig does to a consumer: mode and rate, streams of its own, and where to go without shared memory.

Wire §5, §10.1.3, §11, §15.12; decisions B28, E25, E26. The other side is `WireProducer`, which here says what a
producer or a supervisor may say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.channel import Endpoint
from tensorpool.client import Consumer, DropReason, Progress, State, StateChange
from tensorpool.wire.control import (
    ConsumerConfig,
    FrameProgress,
    FrameProgressState,
    Mode,
    ShmPoolAnnounce,
)
from tests.support.consuming import deliver, drain
from tests.support.processes import wait_until
from tests.support.wire_producer import WireProducer

IPC = "aeron:ipc?term-length=64k"
FRAME = np.arange(8, dtype=np.uint8)
FALLBACK = "aeron:udp?endpoint=localhost:40123"
PERIOD_MS = 1000  # a consumer's: what failed is tried again after that


@pytest.fixture
def private(shared_media_driver: aeron.MediaDriver, peer: WireProducer, reported: list[Progress]) -> Iterator[Consumer]:
    """A consumer that asked for streams of its own; the ids are the next ones after the peer's."""
    settings = peer.settings | {"policies.announce_period_ms": PERIOD_MS}
    first = peer.endpoints.control[1]
    endpoints: dict[str, Any] = {
        "private_descriptors": Endpoint(IPC, first + 7),
        "private_control": Endpoint(IPC, first + 8),
    }
    with tp.connect(shared_media_driver.aeron_dir, overrides=settings) as client:
        consumer = client.consumer(peer.stream_id, on_progress=reported.append, **endpoints)
        deliver(peer, consumer)
        yield consumer


def configure(peer: WireProducer, consumer: Consumer, **changed: Any) -> None:
    """Send the consumer a config, and return when it has obeyed."""
    other = Mode.STREAM if consumer.mode is Mode.RATE_LIMITED else Mode.RATE_LIMITED
    wanted = changed.get("mode", Mode.STREAM)
    for mode in (other, wanted) if wanted is not other else (wanted,):
        peer.say(ConsumerConfig, consumer_id=consumer.consumer_id, **changed | {"mode": mode})
        wait_until(lambda mode=mode: consumer.poll() is None and consumer.mode is mode, f"the mode is {mode.name}")


def descriptors_of(consumer: Consumer, peer: WireProducer, name: str = "descriptor") -> dict[str, Any]:
    """The fields that grant a private stream."""
    stream_id = peer.endpoints.control[1] + (7 if name == "descriptor" else 8)
    return {f"{name}_channel": IPC, f"{name}_stream_id": stream_id}


# --- rate


@pytest.mark.spec("WIRE-10.1.3-04")
def test_a_consumer_without_a_rate_that_must_limit_it_takes_the_configured_one(
    peer: WireProducer, consumer: Consumer
) -> None:
    """E26: 10 frames a second by the frames' own time, unless configured otherwise; STREAM delivers all again."""
    configure(peer, consumer, mode=Mode.RATE_LIMITED)
    before = consumer.stats
    start_ns = 10**15
    for index in range(40):  # 20 ms apart
        peer.publish(FRAME, descriptor={"timestamp_ns": start_ns + index * 20_000_000})
        drain_one(consumer)
    wait_until(lambda: consumer.poll() is None and counted(consumer) == counted_in(before) + 40, "all are counted")
    assert consumer.stats.received - before.received == 8
    assert consumer.stats.drops[DropReason.RATE_LIMITED] - before.drops.get(DropReason.RATE_LIMITED, 0) == 32
    assert consumer.stats.drops_gap == before.drops_gap
    configure(peer, consumer, mode=Mode.STREAM)
    seqs = [peer.publish(FRAME) for _ in range(4)]
    assert drain(consumer) == seqs


def test_the_rate_for_consumers_without_one_is_configured(
    shared_media_driver: aeron.MediaDriver, peer: WireProducer
) -> None:
    """`policies.rate_limited_default_hz`; a rate of the consumer's own goes before it."""
    settings = peer.settings | {"policies.rate_limited_default_hz": 25}
    with tp.connect(shared_media_driver.aeron_dir, overrides=settings) as client:
        for own_hz, expected in ((0, 20), (5, 4)):
            consumer = client.consumer(peer.stream_id, max_rate_hz=own_hz)
            deliver(peer, consumer)
            configure(peer, consumer, mode=Mode.RATE_LIMITED)
            before = consumer.stats
            for index in range(40):
                peer.publish(FRAME, descriptor={"timestamp_ns": 10**15 + index * 20_000_000})
                drain_one(consumer)
            wait_until(lambda c=consumer, b=before: c.poll() is None and counted(c) == counted_in(b) + 40, "counted")
            assert consumer.stats.received - before.received == expected
            consumer.close()


def drain_one(consumer: Consumer) -> None:
    consumer.poll(0.001)


def counted(consumer: Consumer) -> int:
    return counted_in(consumer.stats)


def counted_in(stats: Any) -> int:
    return int(stats.received + stats.lost)


# --- streams of its own


@pytest.mark.spec("WIRE-5-02")
def test_after_the_throttle_has_ended_gaps_are_gaps_again(peer: WireProducer, private: Consumer) -> None:
    """B28 is for a private stream while it is throttled: RATE_LIMITED, then STREAM, on one stream."""
    own = peer.open((IPC, peer.endpoints.control[1] + 7))
    granted = descriptors_of(private, peer)
    configure(peer, private, mode=Mode.RATE_LIMITED, **granted)
    wait_until(lambda: private.poll() is None and peer.has_listener(own), "the consumer listens on its stream")
    publish_until_delivered(peer, private, own)
    before = private.stats
    peer.publish(FRAME, seq=peer.next_seq + 3, on=own)
    wait_until(lambda: private.poll() is None and counted(private) == counted_in(before) + 4, "all are counted")
    assert private.stats.drops_gap == before.drops_gap
    configure(peer, private, mode=Mode.STREAM, **granted)
    before = private.stats
    peer.publish(FRAME, seq=peer.next_seq + 3, on=own)
    wait_until(lambda: private.poll(0.02) is not None, "the frame comes")
    assert private.stats.drops_gap == before.drops_gap + 3
    assert private.stats.drops.get(DropReason.RATE_LIMITED) == before.drops.get(DropReason.RATE_LIMITED)


def publish_until_delivered(peer: WireProducer, consumer: Consumer, on: tuple[str, int]) -> None:
    def is_through() -> bool:
        peer.publish(FRAME, on=on)
        return consumer.poll(0.15) is not None

    wait_until(is_through, "a frame comes over the private stream")


def wait_for_progress(peer: WireProducer, consumer: Consumer, reported: list[Progress], on: tuple[str, int]) -> None:
    """Return when progress on that stream is reported to the user."""
    reported.clear()

    def is_reported() -> bool:
        peer.next_seq += 1
        peer.begin(peer.next_seq, FRAME)
        peer.say(FrameProgress, on=on, seq=peer.next_seq, payload_bytes_filled=0, state=FrameProgressState.STARTED)
        return consumer.poll(0.02) is None and bool(reported)

    wait_until(is_reported, f"progress on {on} is reported")


@pytest.mark.spec("WIRE-10.1.3-10")
def test_after_a_decline_of_a_private_control_stream_progress_comes_on_the_shared_one(
    peer: WireProducer, private: Consumer, reported: list[Progress]
) -> None:
    """It was granted first; declined with a later answer, the consumer listens to the shared stream again."""
    own = peer.open((IPC, peer.endpoints.control[1] + 8))
    wait_for_progress(peer, private, reported, peer.endpoints.control)
    configure(peer, private, **descriptors_of(private, peer, "control"))
    wait_until(lambda: private.poll() is None and peer.has_listener(own), "the consumer listens on its stream")
    wait_for_progress(peer, private, reported, own)
    configure(peer, private)
    wait_for_progress(peer, private, reported, peer.endpoints.control)
    wait_until(lambda: private.poll() is None and not peer.has_listener(own), "the private stream is left")


@pytest.mark.parametrize("name", ["descriptor", "control"])
def test_a_private_stream_that_could_not_be_opened_is_tried_again(
    peer: WireProducer, private: Consumer, reported: list[Progress], name: str
) -> None:
    """A later answer names one that works; until then frames and progress come on the shared streams."""
    unusable = {f"{name}_channel": "aeron:udp?endpoint=nowhere.invalid:1", f"{name}_stream_id": 5}
    configure(peer, private, **unusable)
    assert deliver(peer, private)[0] == peer.epoch
    wait_for_progress(peer, private, reported, peer.endpoints.control)
    granted = descriptors_of(private, peer, name)
    own = peer.open((granted[f"{name}_channel"], granted[f"{name}_stream_id"]))

    def is_there() -> bool:
        peer.say(ConsumerConfig, consumer_id=private.consumer_id, **granted)
        return private.poll(0.05) is None and peer.has_listener(own)

    wait_until(is_there, "the consumer listens on its stream")


# --- without shared memory


@pytest.mark.spec("WIRE-15.12-02", "WIRE-15.1-07", "WIRE-15.22-14")
def test_a_fallback_that_came_with_shared_memory_is_used_when_the_regions_are_rejected(
    peer: WireProducer, consumer: Consumer, states: list[StateChange]
) -> None:
    """use_shm is true, and the next epoch cannot be mapped: FALLBACK with that URI, until one can be mapped again."""
    configure(peer, consumer, payload_fallback_uri=FALLBACK)
    assert consumer.fallback_uri is None
    assert deliver(peer, consumer)[0] == peer.epoch
    missing = peer.make_regions(peer.epoch + 1, exists=False)
    peer.announces = False
    peer.say(ShmPoolAnnounce, **missing.layout)
    wait_until(lambda: consumer.poll() is None and consumer.state is State.FALLBACK, "the consumer falls back")
    assert consumer.fallback_uri == FALLBACK
    peer.announces = True
    peer.new_epoch(missing.epoch + 1)
    assert deliver(peer, consumer)[0] == peer.epoch
    assert consumer.fallback_uri is None
    assert [it.state for it in states][-2:] == [State.FALLBACK, State.ACTIVE]


def test_without_a_fallback_a_consumer_of_rejected_regions_waits(peer: WireProducer, consumer: Consumer) -> None:
    """Also where an earlier ConsumerConfig named one and the last did not."""
    configure(peer, consumer, payload_fallback_uri=FALLBACK)
    configure(peer, consumer)
    peer.announces = False
    peer.say(ShmPoolAnnounce, **peer.make_regions(peer.epoch + 1, exists=False).layout)
    wait_until(lambda: consumer.poll() is None and consumer.state is State.WAITING, "the consumer waits")
    assert consumer.fallback_uri is None
