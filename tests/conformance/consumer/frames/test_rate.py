# SPDX-License-Identifier: Apache-2.0
"""Which frames a consumer skips: by its rate, by how far it is behind, by their time. Wire §10.1.3, §11."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorpool.client import Client, Consumer, DropReason
from tensorpool.wire.control import QosConsumer
from tests.conformance.consumer.frames.conftest import FRAME, drops, reasons, received, warm
from tests.support.wire_producer import WireProducer


@pytest.mark.spec("WIRE-11-03", "WIRE-11-05", "WIRE-10.1.2-05")
@pytest.mark.parametrize("clock", ["descriptor", "slot"])
def test_a_declined_rate_is_kept_locally_by_the_frames_time(connected: Client, peer: WireProducer, clock: str) -> None:
    """At most max_rate_hz by publish time, or capture time where there is none; what is skipped is no gap."""
    limits: dict[str, Any] = {"mode": "rate_limited", "max_rate_hz": 10, "max_outstanding_seq_gap": 0}
    consumer = warm(peer, connected.consumer(peer.stream_id, **limits))
    gaps = consumer.stats.drops_gap
    start_ns = 10**15
    for index in range(8):
        stamp = {"timestamp_ns": start_ns + index * 50_000_000}
        stamps: dict[str, Any] = (
            {"descriptor": stamp, "slot": {"timestamp_ns": 5}} if clock == "descriptor" else {"slot": stamp}
        )
        peer.publish(np.full(4, index, np.uint8), **stamps)
    got = []
    while (frame := consumer.poll(0.05)) is not None:
        got.append(int(frame.array[0]))
    assert got == [0, 2, 4, 6]
    assert consumer.stats.drops_gap == gaps
    assert consumer.stats.drops[DropReason.RATE_LIMITED] >= 4


@pytest.mark.spec("WIRE-15.4-04", "WIRE-15.4-03")
@pytest.mark.parametrize(("limit", "skipped"), [(4, 5), (6, 0), (0, 0)])
def test_too_far_behind_means_on_to_the_newest(brisk: Client, peer: WireProducer, limit: int, skipped: int) -> None:
    """Six frames, all still in their slots: beyond the limit only the newest is taken, and QoS counts the others."""
    consumer = warm(peer, brisk.consumer(peer.stream_id, max_outstanding_seq_gap=limit))
    gaps, before = consumer.stats.drops_gap, drops(consumer)
    seqs = [peer.publish(FRAME) for _ in range(6)]
    got = []
    while (frame := consumer.poll(0.05)) is not None:
        got.append(frame.seq)
    assert got == seqs[skipped:]
    assert reasons(consumer, before) == ({DropReason.RESYNC: skipped} if skipped else {})
    peer.wait_for(QosConsumer, consumer_id=consumer.consumer_id, drops_gap=gaps + skipped, last_seq_seen=seqs[-1])


@pytest.mark.spec("WIRE-15.7-02")
@pytest.mark.parametrize(
    ("captured", "published", "refused"),
    [
        ((5, 6, 4, 5), (5, 6, 7, 8), [2]),
        ((5, 6, 7, 8), (5, 9, 8, 9), [2]),
        ((5, 5, 5, 6), (5, 5, 6, 6), []),
        ((5, 4, 3, 2), (None, None, None, None), []),
        ((9, 0, 2**64 - 1, 9), (5, 6, 7, 8), []),
    ],
    ids=["capture", "publishing", "equal", "capture alone", "no capture time"],
)
def test_a_frame_whose_time_goes_back_is_refused(
    peer: WireProducer,
    consumer: Consumer,
    captured: tuple[int, ...],
    published: tuple[int | None, ...],
    refused: list[int],
) -> None:
    """Where slot and descriptor both carry a time, against the frame before; otherwise it is as good as any."""
    before = drops(consumer)
    seqs = [
        peer.publish(FRAME, slot={"timestamp_ns": capture}, descriptor={"timestamp_ns": publish})
        for capture, publish in zip(captured, published, strict=True)
    ]
    kept = [seq for index, seq in enumerate(seqs) if index not in refused]
    assert [frame.seq for frame in received(peer, consumer)] == kept
    assert reasons(consumer, before) == ({DropReason.BAD_TIMESTAMP: len(refused)} if refused else {})
