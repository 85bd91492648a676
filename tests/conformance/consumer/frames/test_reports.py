# SPDX-License-Identifier: Apache-2.0
"""What a consumer reports about itself: hello and QoS. Wire §10.1.2, §10.4.1."""

from __future__ import annotations

import struct
from typing import Any

import pytest

import tensorpool as tp
from tensorpool.channel import Endpoint
from tensorpool.client import Client, Consumer
from tensorpool.wire.control import ConsumerHello, QosConsumer
from tests.conformance.consumer.frames.conftest import FRAME, IPC, received, warm
from tests.support.processes import wait_until
from tests.support.region_bytes import committed, in_progress
from tests.support.regions import NSLOTS
from tests.support.wire_producer import WireProducer

NULL_U32 = 2**32 - 1


# --- QoS


@pytest.mark.spec("WIRE-10.4.1-02", "WIRE-10.4.1-03", "WIRE-10.4.1-04", "WIRE-10.4.1-01", "WIRE-15.18-02")
@pytest.mark.spec("WIRE-10.1.2-02")
def test_qos_tells_what_was_seen_missed_and_late(peer: WireProducer, brisk: Client) -> None:
    """Three seqs that were never described are drops_gap 3, an overwritten one is drops_late 1, byte for byte."""
    consumer = warm(peer, brisk.consumer(peer.stream_id))
    peer.next_seq += 3
    assert received(peer, consumer) == []
    peer.publish(FRAME, slot={"word": committed(peer.next_seq + NSLOTS)})
    received(peer, consumer)
    last = peer.next_seq - 1
    arrived = peer.wait_for(QosConsumer, consumer_id=consumer.consumer_id, last_seq_seen=last)
    assert arrived.stream_id == peer.endpoints.qos[1]
    names = (peer.stream_id, consumer.consumer_id, peer.epoch)
    assert arrived.data == struct.pack("<4H I I Q Q Q Q B", 41, 5, 900, 1, *names, last, 3, 1, 1)
    assert (consumer.stats.drops_gap, consumer.stats.drops_late) == (3, 1)
    peer.wait_for(QosConsumer, arrived.index + 1, consumer_id=consumer.consumer_id)  # and again, though nothing changed
    peer.wait_for(ConsumerHello, arrived.index + 1, consumer_id=consumer.consumer_id)


@pytest.mark.spec("WIRE-10.4.1-04", "WIRE-15.18-02")
def test_qos_counts_a_frame_as_late_that_was_overwritten_after_its_delivery(peer: WireProducer, brisk: Client) -> None:
    """K3: delivered whole, overwritten before it was copied: one drops_late, however often it is looked at again."""
    consumer = warm(peer, brisk.consumer(peer.stream_id))
    late = consumer.stats.drops_late
    seq = peer.publish(FRAME)
    (frame,) = received(peer, consumer)
    assert frame.seq == seq
    before = consumer.stats
    peer.regions.set_word(seq % NSLOTS, in_progress(seq + NSLOTS))
    with pytest.raises(tp.FrameOverwritten):
        frame.copy()
    assert not frame.is_intact()
    with pytest.raises(tp.FrameOverwritten), frame:
        pass
    arrived = peer.wait_for(QosConsumer, consumer_id=consumer.consumer_id, drops_late=late + 1).message
    after = consumer.stats
    assert (after.received, after.drops_late) == (before.received - 1, before.drops_late + 1)
    assert arrived.drops_gap == after.drops_gap == before.drops_gap


# --- hello


def packed_hello(
    peer: WireProducer,
    consumer: Consumer,
    *,
    progress: bool = False,
    mode: int = 1,
    max_rate_hz: int = 0,
    layout_version: int = 1,
    hints: tuple[int, int, int] = (NULL_U32,) * 3,
    descriptor: tuple[str, int] = ("", 0),
    control: tuple[str, int] = ("", 0),
) -> bytes:
    names = (peer.stream_id, consumer.consumer_id)
    wishes = (1, progress, mode, max_rate_hz, layout_version)
    layout = "<4H I I B B B I I I I I I I"
    fixed = struct.pack(layout, 39, 2, 900, 1, *names, *wishes, *hints, descriptor[1], control[1])
    texts = [channel.encode() for channel, _ in (descriptor, control)]
    return fixed + b"".join(struct.pack("<I", len(text)) + text for text in texts)


@pytest.mark.spec("WIRE-10.1.2-01", "WIRE-10.1.2-03", "WIRE-10.1.2-04", "WIRE-10.1.2-05", "WIRE-10.1.3-07")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"mode": "rate_limited", "max_rate_hz": 30}, {"mode": 2, "max_rate_hz": 30}),
        ({"on_progress": print}, {"progress": True}),
        (
            {"on_progress": print, "progress_interval_us": 500, "progress_bytes_delta": 4096},
            {"progress": True, "hints": (500, 4096, NULL_U32)},
        ),
        (
            {"on_progress": print, "progress_major_delta_units": 16},
            {"progress": True, "hints": (NULL_U32, NULL_U32, 16)},
        ),
        (
            {"private_descriptors": Endpoint(IPC, 31001), "private_control": Endpoint(IPC, 31002)},
            {"descriptor": (IPC, 31001), "control": (IPC, 31002)},
        ),
    ],
    ids=["plain", "rate limited", "progress", "hints", "major hint", "private"],
)
def test_a_consumer_says_hello_when_it_starts(
    brisk: Client, peer: WireProducer, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    """On the control stream, with what it can do and wants, byte for byte; nothing asked for is 0, null or empty."""
    consumer = brisk.consumer(peer.stream_id, **options)
    arrived = peer.wait_for(ConsumerHello, consumer_id=consumer.consumer_id)
    assert arrived.stream_id == peer.endpoints.control[1]
    golden = {packed_hello(peer, consumer, layout_version=version, **expected) for version in (0, 1)}
    assert arrived.data in golden  # 0 is any version, 1 the only one there is
    wait_until(lambda: len(peer.received(ConsumerHello, consumer_id=consumer.consumer_id)) > 1, "it says hello again")


@pytest.mark.spec("WIRE-10.1.2-10", "WIRE-10.1.2-11", "WIRE-10.1.3-08")
@pytest.mark.parametrize("name", ["private_descriptors", "private_control"])
@pytest.mark.parametrize("endpoint", [Endpoint(IPC, 0), Endpoint("", 31001)], ids=["id 0", "no channel"])
def test_half_a_request_for_a_private_stream_is_never_sent(
    connected: Client, peer: WireProducer, name: str, endpoint: Endpoint
) -> None:
    """The API refuses a channel without an id and an id without a channel."""
    half: dict[str, Any] = {name: endpoint}
    with pytest.raises((tp.ConfigError, tp.LocalProtocolError, ValueError)):
        connected.consumer(peer.stream_id, **half)
    consumer = connected.consumer(peer.stream_id)
    peer.wait_for(ConsumerHello, consumer_id=consumer.consumer_id)
    for arrived in peer.received(ConsumerHello):
        assert (arrived.message.descriptor_stream_id, arrived.message.descriptor_channel) == (0, "")
        assert (arrived.message.control_stream_id, arrived.message.control_channel) == (0, "")
