# SPDX-License-Identifier: Apache-2.0
"""Which consumers a producer gives streams of their own, and for how long. Wire §5, §10.1.2, §10.1.3, §11, §15.9."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorpool import aeron
from tensorpool.client import Producer
from tensorpool.wire.control import ConsumerConfig, ConsumerHello, DataSourceMeta, FrameDescriptor, FrameProgress, Mode
from tests.conformance.producer.conftest import NSLOTS, PERIOD_MS, STARTED, busy_until, descriptors, fence, fill
from tests.support.driver_client import new_client_id
from tests.support.driver_process import Deployment
from tests.support.listener import Endpoint
from tests.support.wire_consumer import WireConsumer, endpoint_of

IPC = "aeron:ipc?term-length=64k"
_private_ids = iter(range(310_000, 320_000))


def unused_endpoint() -> Endpoint:
    return IPC, next(_private_ids)


def config_of(peer: WireConsumer, hello: ConsumerHello) -> ConsumerConfig:
    """The answer to a hello."""
    return peer.wait_for(ConsumerConfig, consumer_id=hello.consumer_id, stream_id=hello.stream_id).message


def asked(endpoint: Endpoint, kind: str = "descriptor") -> dict[str, Any]:
    return {f"{kind}_channel": endpoint[0], f"{kind}_stream_id": endpoint[1]}


def assigned(config: ConsumerConfig, kind: str = "descriptor") -> Endpoint:
    return getattr(config, f"{kind}_channel"), getattr(config, f"{kind}_stream_id")


@pytest.mark.spec("WIRE-5-01", "WIRE-5-05", "WIRE-5-07", "WIRE-5-09", "WIRE-5-10", "WIRE-5-13", "WIRE-10.1.3-01")
def test_streams_of_its_own_are_granted_as_asked(peer: WireConsumer, producer: Producer) -> None:
    """The answer names them; every frame is described there, and its control stream has progress and nothing else."""
    own, control = unused_endpoint(), unused_endpoint()
    listening = peer.listen(own), peer.listen(control)
    hello = peer.say_hello(
        producer.stream_id, supports_progress=True, max_rate_hz=1, **asked(own), **asked(control, "control")
    )
    config = config_of(peer, hello)
    assert (config.stream_id, config.consumer_id, config.use_shm) == (producer.stream_id, peer.consumer_id, True)
    assert (assigned(config), assigned(config, "control")) == (own, control)
    peer.wait_until(lambda: all(it.is_connected for it in listening), "the producer publishes there")
    seqs = [producer.publish(np.zeros(3)) for _ in range(20)]
    seqs.append(fill(producer)[0])
    producer.set_metadata({"a": 1})
    peer.wait_until(lambda: peer.received_on(own, FrameDescriptor)[-1:] != [], "a private descriptor")
    peer.wait_until(lambda: peer.received_on(own, FrameDescriptor)[-1].seq == seqs[-1], "the last private descriptor")
    peer.wait_for(DataSourceMeta, stream_id=producer.stream_id)
    fence(peer, producer)
    assert [it.seq for it in peer.received_on(own, FrameDescriptor)] == seqs
    assert all(isinstance(it.message, FrameDescriptor) for it in peer.transcript if it.stream_id == own[1])
    progress = [it.message for it in peer.transcript if it.stream_id == control[1]]
    assert [it.state for it in progress][:1] == [STARTED]
    assert all(isinstance(it, FrameProgress) for it in progress)


@pytest.mark.spec("WIRE-10.1.2-08", "WIRE-10.1.2-09", "WIRE-10.1.2-12", "WIRE-10.1.2-13", "WIRE-10.1.3-07")
@pytest.mark.spec("WIRE-10.1.3-08", "WIRE-10.1.3-09", "WIRE-10.1.3-01")
@pytest.mark.parametrize("kind", ["descriptor", "control"])
def test_half_a_request_is_declined(peer: WireConsumer, producer: Producer, kind: str) -> None:
    """A channel without id, or an id without channel: the answer is empty and 0; only what is whole is granted."""
    channel, stream_id = unused_endpoint()
    for half in ((channel, 0), ("", stream_id)):
        hello = peer.say_hello(producer.stream_id, consumer_id=new_client_id(), **asked(half, kind))
        config = config_of(peer, hello)
        assert (assigned(config), assigned(config, "control")) == (("", 0), ("", 0))
        assert config.use_shm
    nothing = peer.say_hello(producer.stream_id, consumer_id=new_client_id())
    fence(peer, producer)
    for answer in peer.received(ConsumerConfig, consumer_id=nothing.consumer_id):
        assert (assigned(answer.message), assigned(answer.message, "control")) == (("", 0), ("", 0))
    whole = peer.say_hello(producer.stream_id, consumer_id=new_client_id(), **asked((channel, stream_id), kind))
    assert assigned(config_of(peer, whole), kind) == (channel, stream_id)


BAD_ENDPOINTS: dict[str, Endpoint] = {
    "no Aeron channel": ("tcp://localhost:1", 31_001),
    "not a channel": ("aeron:ipc?term-length", 31_001),
    "an unknown medium": ("aeron:tcp?endpoint=localhost:1", 31_001),
    "a spy": ("aeron-spy:aeron:ipc", 31_001),
    "an id beyond Aeron's": (IPC, 2**31),
    "an address elsewhere": ("aeron:udp?endpoint=127.0.0.1:40999", 31_001),
}


@pytest.mark.spec("WIRE-5-14", "WIRE-10.1.3-09")
@pytest.mark.parametrize("kind", ["descriptor", "control"])
def test_an_endpoint_that_cannot_be_is_declined(
    peer: WireConsumer, producer: Producer, deployment: Deployment, kind: str
) -> None:
    """A malformed channel, an impossible id, a stream that others use: empty and 0, and frames come as before."""
    taken = unused_endpoint()
    hello = peer.say_hello(producer.stream_id, consumer_id=new_client_id(), **asked(taken))
    assert assigned(config_of(peer, hello)) == taken
    shared = {name: endpoint_of(deployment, name) for name in ("descriptor", "qos", "metadata")}
    shared["control"] = deployment.control
    for name, endpoint in (BAD_ENDPOINTS | shared | {"another consumer's": taken}).items():
        hello = peer.say_hello(producer.stream_id, consumer_id=new_client_id(), **asked(endpoint, kind))
        assert assigned(config_of(peer, hello), kind) == ("", 0), name
    seq = producer.publish(np.zeros(3))
    assert seq is not None
    assert [it.seq for it in descriptors(peer, producer, seq)] == [seq]


def answer_to(peer: WireConsumer, producer: Producer, endpoint: Endpoint) -> Endpoint:
    """What a new consumer that asks for this stream is given."""
    hello = peer.say_hello(producer.stream_id, consumer_id=new_client_id(), **asked(endpoint))
    return assigned(config_of(peer, hello))


@pytest.mark.spec("WIRE-5-14")
def test_hellos_without_a_lease_take_little_memory(
    peer: WireConsumer, producer: Producer, deployment: Deployment
) -> None:
    """However large the logs that they name are, and wherever their channels lead."""
    folder = Path(deployment.aeron_dir) / "publications"
    before = set(folder.iterdir())
    for number in range(20):
        own = "aeron:ipc?term-length=1g|linger=1h" if number % 2 else f"aeron:udp?endpoint=127.0.0.1:{41_000 + number}"
        endpoint = own, next(_private_ids)
        answer = functools.partial(answer_to, peer, producer, endpoint)
        if number % 2:  # a producer that took long for the others declines, and another consumer may ask
            peer.wait_until(lambda ask=answer, own=endpoint: ask() == own, "the private stream is granted")
        else:
            assert answer() == ("", 0)
    made = [path.stat().st_size for path in set(folder.iterdir()) - before]
    assert len(made) >= 10
    assert sum(made) <= 20 * (3 * (64 << 10) + 4096)
    assert producer.stats.private_streams_declined >= 10


@pytest.mark.spec("WIRE-11-02", "WIRE-10.1.3-09")
def test_a_rate_limited_request_may_be_declined(peer: WireConsumer, producer: Producer, deployment: Deployment) -> None:
    """No thinned-out stream of its own where that cannot be: empty and 0, and every frame is on the shared one."""
    wish = {"mode": Mode.RATE_LIMITED, "max_rate_hz": 1}
    shared = endpoint_of(deployment, "descriptor")
    hello = peer.say_hello(producer.stream_id, consumer_id=new_client_id(), **wish, **asked(shared))
    config = config_of(peer, hello)
    assert assigned(config) == ("", 0)
    assert (config.mode, config.use_shm) == (Mode.RATE_LIMITED, True)
    seqs = [producer.publish(np.zeros(3)) for _ in range(NSLOTS)]
    assert seqs[-1] is not None
    assert [it.seq for it in descriptors(peer, producer, seqs[-1])] == seqs


@pytest.mark.spec("WIRE-11-04", "WIRE-5-06", "WIRE-5-08", "WIRE-10.1.2-05")
def test_a_rate_caps_a_private_stream_and_never_the_shared_one(peer: WireConsumer, producer: Producer) -> None:
    """RATE_LIMITED at 50 Hz: at most so many there, while the shared stream and an unlimited one have every frame."""
    limited, unlimited = unused_endpoint(), unused_endpoint()
    listening = [peer.listen(limited), peer.listen(unlimited)]
    wish = {"mode": Mode.RATE_LIMITED}
    for endpoint, rate in ((limited, 50), (unlimited, 0)):
        own = {"consumer_id": new_client_id(), "max_rate_hz": rate}
        peer.repeated.append(peer.say_hello(producer.stream_id, **own, **wish, **asked(endpoint)))
    peer.say_hello(producer.stream_id, consumer_id=new_client_id(), max_rate_hz=1, **wish)  # without a stream
    peer.wait_until(lambda: all(it.is_connected for it in listening), "the producer publishes there")
    fence(peer, producer)
    start_ns = time.monotonic_ns()
    seqs = []
    for _ in range(100):
        busy_until(time.monotonic_ns() + 3_000_000)
        seqs.append(producer.publish(np.zeros(3)))
        peer.poll()
    elapsed_s = (time.monotonic_ns() - start_ns) / 1e9
    assert [it.seq for it in descriptors(peer, producer, seqs[-1])] == seqs
    peer.wait_until(lambda: len(peer.received_on(unlimited, FrameDescriptor)) == 100, "the unlimited one has them all")
    assert [it.seq for it in peer.received_on(unlimited, FrameDescriptor)] == seqs
    assert 0.3 * 50 / 2 <= len(peer.received_on(limited, FrameDescriptor)) <= elapsed_s * 50 + 2


@pytest.mark.spec("WIRE-5-03", "WIRE-10.1.3-11", "WIRE-10.1.2-02")
def test_private_streams_end_with_the_silence_of_their_consumer(peer: WireConsumer, producer: Producer) -> None:
    """Hellos alone or QoS alone keep one open; neither for 3 to 5 times the interval closes it, and not before."""
    names = ("silent", "hellos", "qos")
    consumers = {name: (new_client_id(), unused_endpoint(), unused_endpoint()) for name in names}
    listening: dict[str, list[aeron.Subscription]] = {}
    hellos: dict[str, dict[str, Any]] = {}
    for name, (consumer_id, own, control) in consumers.items():
        listening[name] = [peer.listen(own), peer.listen(control)]
        hellos[name] = {"consumer_id": consumer_id, **asked(own), **asked(control, "control")}
        peer.say_hello(producer.stream_id, **hellos[name])
    said_ns = time.monotonic_ns()
    everything = [it for pair in listening.values() for it in pair]
    next_ns = 0

    def keep_saying() -> None:
        nonlocal next_ns
        if time.monotonic_ns() >= next_ns:
            next_ns = time.monotonic_ns() + PERIOD_MS * 1_000_000
            peer.say_hello(producer.stream_id, **hellos["hellos"])
            peer.say_qos(producer.stream_id, consumer_id=hellos["qos"]["consumer_id"])

    def is_all_open() -> bool:
        keep_saying()
        return all(it.is_connected for it in everything)

    def is_silent_closed() -> bool:
        keep_saying()
        return not any(it.is_connected for it in listening["silent"])

    peer.wait_until(is_all_open, "all streams are there")
    peer.wait_until(is_silent_closed, "the silent consumer's streams are closed")
    silence_ms = (time.monotonic_ns() - said_ns) / 1e6
    assert silence_ms >= 3 * PERIOD_MS
    assert silence_ms <= 5 * PERIOD_MS + 5000  # media driver and machine take their time to tell
    end_ns = said_ns + 8 * PERIOD_MS * 1_000_000

    def is_long_past() -> bool:
        keep_saying()
        return time.monotonic_ns() > end_ns

    peer.wait_until(is_long_past, "twice the window is over")
    assert all(it.is_connected for name in ("hellos", "qos") for it in listening[name])


@pytest.mark.spec("WIRE-10.1.3-11")
def test_private_streams_end_with_the_lease_of_their_consumer(peer: WireConsumer, producer: Producer) -> None:
    """A consumer that detached is gone: its streams close, long before its silence would close them."""
    lease = peer.attach(producer.stream_id)
    own = unused_endpoint()
    listening = peer.listen(own)
    peer.say_hello(producer.stream_id, consumer_id=lease.client_id, **asked(own))
    peer.wait_until(lambda: listening.is_connected, "the stream is there")
    peer.detach(lease)

    def is_closed() -> bool:
        peer.say_qos(producer.stream_id, consumer_id=new_client_id())
        return not listening.is_connected

    peer.wait_until(is_closed, "the stream is closed")


@pytest.mark.spec("WIRE-10.1.3-01")
def test_a_hello_for_another_stream_is_not_answered(peer: WireConsumer, producer: Producer) -> None:
    """A producer grants nothing to consumers of streams that are not its own."""
    own = unused_endpoint()
    stranger = new_client_id()
    peer.say_hello(producer.stream_id + 1_000, consumer_id=stranger, **asked(own))
    fence(peer, producer)
    assert peer.received(ConsumerConfig, consumer_id=stranger) == []


def test_a_consumer_of_another_layout_version_may_not_use_shared_memory(peer: WireConsumer, producer: Producer) -> None:
    """C20: expected_layout_version 2 cannot be served; 0 is any."""
    hello = peer.say_hello(producer.stream_id, expected_layout_version=2)
    assert not config_of(peer, hello).use_shm
    own = unused_endpoint()
    anything = peer.say_hello(producer.stream_id, consumer_id=new_client_id(), expected_layout_version=0, **asked(own))
    assert config_of(peer, anything).use_shm


def test_what_a_producer_answered_before_is_no_decree(peer: WireConsumer, producer: Producer) -> None:
    """It hears its own words on the control stream: a consumer that comes with another layout version is served."""
    hello = peer.say_hello(producer.stream_id, expected_layout_version=2)
    assert not config_of(peer, hello).use_shm
    fence(peer, producer)
    peer.transcript.clear()
    hello = peer.say_hello(producer.stream_id, expected_layout_version=1, **asked(unused_endpoint()))
    assert config_of(peer, hello).use_shm
