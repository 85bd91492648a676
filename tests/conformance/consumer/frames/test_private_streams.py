# SPDX-License-Identifier: Apache-2.0
"""Which streams a consumer listens to after ConsumerConfig. Wire §5, §10.1.3."""

from __future__ import annotations

from typing import Any

import pytest

from tensorpool.client import Client, Consumer, Progress, State, StateChange
from tensorpool.wire.control import ConsumerConfig, ConsumerHello, FrameProgress, FrameProgressState, Mode, QosConsumer
from tests.conformance.consumer.frames.conftest import FRAME, received, warm
from tests.support.processes import wait_until
from tests.support.wire_producer import WireProducer


@pytest.mark.spec("WIRE-10.1.3-02", "WIRE-10.1.3-04")
def test_a_consumer_obeys_only_its_own_config(connected: Client, peer: WireProducer) -> None:
    """One for another consumer or another stream changes nothing; its own changes its mode, also in what it reports."""
    states: list[StateChange] = []
    consumer = warm(peer, connected.consumer(peer.stream_id, on_state=states.append))
    mine: dict[str, Any] = {"consumer_id": consumer.consumer_id, "mode": Mode.RATE_LIMITED}
    for other in ({"consumer_id": consumer.consumer_id + 1}, {"stream_id": peer.stream_id + 1_000_000}):
        peer.say(ConsumerConfig, **mine | other, use_shm=False, payload_fallback_uri="bridge://x")
        peer.say(ConsumerConfig, consumer_id=consumer.consumer_id, mode=Mode.RATE_LIMITED)
        wait_until(lambda: consumer.mode is Mode.RATE_LIMITED, "its own config is obeyed")
        peer.say(ConsumerConfig, consumer_id=consumer.consumer_id, mode=Mode.STREAM)
        wait_until(lambda: consumer.mode is Mode.STREAM, "its own config is obeyed")
        received(peer, consumer)
        assert consumer.is_active
        assert consumer.fallback_uri is None
        assert consumer.poll(0) is None  # and `on_state` has been called
        assert State.FALLBACK not in {change.state for change in states}
    since = peer.now
    peer.say(ConsumerConfig, consumer_id=consumer.consumer_id, mode=Mode.RATE_LIMITED)
    peer.wait_for(QosConsumer, since, consumer_id=consumer.consumer_id, mode=Mode.RATE_LIMITED)


def grant(peer: WireProducer, consumer: Consumer) -> tuple[tuple[str, int], tuple[str, int]]:
    """Give the consumer what it asked for; returns when it listens there."""
    hello = peer.wait_for(ConsumerHello, consumer_id=consumer.consumer_id).message
    descriptor = peer.open((hello.descriptor_channel, hello.descriptor_stream_id))
    control = peer.open((hello.control_channel, hello.control_stream_id))
    peer.say(
        ConsumerConfig,
        consumer_id=consumer.consumer_id,
        descriptor_channel=descriptor[0],
        descriptor_stream_id=descriptor[1],
        control_channel=control[0],
        control_stream_id=control[1],
    )
    for endpoint in (descriptor, control):
        wait_until(
            lambda it=endpoint: consumer.poll() is None and peer.has_listener(it), "the consumer listens on its stream"
        )
    return descriptor, control


@pytest.mark.spec("WIRE-5-02")
def test_with_a_stream_of_its_own_a_consumer_ignores_shared_descriptors(peer: WireProducer, private: Consumer) -> None:
    """Different seqs on both: only those of the private stream surface, and none twice."""
    descriptor, _ = grant(peer, private)
    peer.publish(FRAME, seq=peer.next_seq + 1, on=descriptor)
    wait_until(lambda: private.poll(0.02) is not None, "a frame comes over the private stream")
    ours: list[int] = []
    theirs: list[int] = []
    for index in range(6):
        seq = peer.publish(FRAME, on=descriptor if index % 2 else None)
        (ours if index % 2 else theirs).append(seq)
    frames: list[int] = []
    wait_until(
        lambda: frames.extend(it.seq for it in [private.poll(0.02)] if it) or frames[-1:] == ours[-1:],
        "the last frame comes",
    )
    assert frames == ours


@pytest.mark.spec("WIRE-5-11", "WIRE-5-12")
def test_with_a_control_stream_of_its_own_progress_comes_there_and_the_rest_where_it_was(
    peer: WireProducer, private: Consumer, reported: list[Progress]
) -> None:
    """FrameProgress on the private stream is received, and an announce of a new epoch on the shared one is obeyed."""
    _, control = grant(peer, private)
    peer.begin(peer.next_seq, FRAME)
    peer.say(FrameProgress, on=control, seq=peer.next_seq, payload_bytes_filled=0, state=FrameProgressState.STARTED)
    wait_until(lambda: private.poll(0.01) is None and reported, "progress is reported")
    assert reported[-1].seq == peer.next_seq
    regions = peer.new_epoch()
    wait_until(lambda: private.poll() is None and private.epoch == regions.epoch, "the new epoch is mapped")


@pytest.mark.spec("WIRE-10.1.3-10", "WIRE-10.1.3-07")
@pytest.mark.parametrize("assigned", ["nothing", "the shared streams"])
def test_after_a_decline_the_consumer_stays_on_the_shared_stream(
    peer: WireProducer, private: Consumer, assigned: str
) -> None:
    """Empty and 0, or what is shared anyway, is a decline: frames keep arriving, each once."""
    shared = {
        "descriptor_channel": peer.endpoints.descriptor[0],
        "descriptor_stream_id": peer.endpoints.descriptor[1],
    }
    names: dict[str, Any] = {"consumer_id": private.consumer_id} | (shared if assigned == "the shared streams" else {})
    for mode in (Mode.RATE_LIMITED, Mode.STREAM):
        peer.say(ConsumerConfig, **names, mode=mode)
        wait_until(lambda mode=mode: private.mode is mode, "the config is obeyed")
    seqs = [peer.publish(FRAME) for _ in range(3)]
    assert [frame.seq for frame in received(peer, private)] == seqs
