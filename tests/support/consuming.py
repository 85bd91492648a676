# SPDX-License-Identifier: Apache-2.0
"""What tests of a consumer wait for, with a `WireProducer` on the other side."""

from __future__ import annotations

import numpy as np

from tensorpool.client import Consumer
from tests.support.processes import wait_until
from tests.support.wire_producer import WireProducer


def deliver(peer: WireProducer, consumer: Consumer) -> tuple[int, int]:
    """Publish until a frame comes through: the consumer has mapped what is announced. Its epoch and seq."""
    got: list[tuple[int, int]] = []

    def is_through() -> bool:
        seq = peer.publish(np.arange(8, dtype=np.uint8))
        while (frame := consumer.poll(0.02)) is not None:
            got.append((frame.epoch, frame.seq))
            if got[-1] == (peer.epoch, seq):
                return True
        return False

    wait_until(is_through, f"a frame of epoch {peer.epoch} is delivered")
    return got[-1]


def wait_waiting(consumer: Consumer) -> None:
    """What it had is not used any more."""
    wait_until(lambda: consumer.poll() is None and not consumer.is_active, "the consumer waits")


def drain(consumer: Consumer) -> list[int]:
    """The seqs that are still to be had."""
    seqs = []
    while (frame := consumer.poll(0.02)) is not None:
        seqs.append(frame.seq)
    return seqs
