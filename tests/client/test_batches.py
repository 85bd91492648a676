# SPDX-License-Identifier: Apache-2.0
"""Many small frames with one call at either end: the same frames, losses and counts as one at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import tensorpool as tp
from tensorpool.client import Client
from tests.client.conftest import FRAME, Pair, paired

LONG_S = 60.0
SLOTS = 8  # of a ring


@pytest.fixture
def pair(client: Client) -> Iterator[Pair]:
    pair = paired(client)
    yield pair
    pair.consumer.close()
    pair.producer.close()


def received(pair: Pair, count: int) -> list[tp.Frame]:
    frames: list[tp.Frame] = []
    while len(frames) < count:
        batch = pair.consumer.poll_many(count - len(frames), LONG_S)
        assert batch
        frames += batch
    return frames


def test_batches_cross(pair: Pair) -> None:
    """Rows of one array, or arrays of any kind one after the other: each is a frame of its own."""
    rows = np.arange(30, dtype=np.float32).reshape(5, 6)
    published = 0
    for batch in (
        rows,
        rows[::-2],
        [rows[0], rows[1].astype(np.int16), rows[2], rows[:2]],
        iter(rows),
        np.asfortranarray(rows),
        [[1, 2], (3,)],
        [],
    ):
        expected = [np.asarray(array) for array in (list(batch) if not isinstance(batch, np.ndarray) else batch)]
        assert pair.producer.publish_many(expected if not isinstance(batch, np.ndarray) else batch) == len(expected)
        frames = received(pair, len(expected))
        assert [frame.seq for frame in frames] == list(range(published, published + len(expected)))
        published += len(expected)
        for frame, array in zip(frames, expected, strict=True):
            assert frame.dtype == array.dtype
            np.testing.assert_array_equal(frame.copy(), array)
    assert pair.consumer.poll_many(5) == []
    assert pair.producer.stats.published == pair.consumer.stats.received == published
    assert pair.consumer.stats.lost == 0


def test_what_is_no_batch_is_refused(pair: Pair) -> None:
    """Before anything is published."""
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(tp.LocalProtocolError, match="n = "):
            pair.consumer.poll_many(wrong)  # type: ignore[arg-type]
    for nothing in (7, np.zeros(())):
        with pytest.raises(tp.LocalProtocolError, match="arrays = "):
            pair.producer.publish_many(nothing)  # type: ignore[arg-type]
    assert pair.producer.stats.published == 0
    pair.consumer.close()
    assert pair.consumer.poll_many(5, LONG_S) == []


def test_a_batch_keeps_what_came_before_the_array_at_fault(pair: Pair) -> None:
    """Every array is published, or dropped and counted, or untouched."""
    small, large = np.zeros(8, np.uint8), np.zeros(1 << 20, np.uint8)
    with pytest.raises(tp.FrameTooLarge):
        pair.producer.publish_many([small, small, large, small])
    assert [frame.seq for frame in received(pair, 2)] == [0, 1]
    assert pair.producer.stats.published == 2
    assert pair.producer.stats.dropped == {tp.DropReason.NO_POOL: 1}
    with pair.producer.claim((8,)), pytest.raises(tp.LocalProtocolError, match="is claimed and not committed"):
        pair.producer.publish_many([small])
    pair.producer.close()
    with pytest.raises(tp.Closed):
        pair.producer.publish_many([small])


def test_a_batch_larger_than_the_ring_is_accounted_for(pair: Pair) -> None:
    """Its first frames are overwritten by its last ones."""
    pair.publish()
    assert pair.producer.publish_many([FRAME] * 5 * SLOTS) == 5 * SLOTS
    frames = received(pair, 1)
    while frames[-1].seq < 5 * SLOTS:
        frames += pair.consumer.poll_many(100, LONG_S)
    stats = pair.consumer.stats
    assert len(frames) <= SLOTS
    assert stats.received == 1 + len(frames)
    assert stats.received + stats.lost == 1 + 5 * SLOTS
    assert sum(frame.dropped_before for frame in frames) == stats.lost


def test_partial_frames_are_reported_between_batches(client: Client) -> None:
    """Consumers that have something to do before each frame take one at a time."""
    progress: list[int] = []
    pair = paired(client, on_progress=lambda it: progress.append(it.rows or 0))
    for seq in range(3):
        assert pair.producer.publish(FRAME) == seq
    assert [frame.seq for frame in received(pair, 3)] == [0, 1, 2]
    pair.consumer.close()
    pair.producer.close()


def test_a_sleeper_is_woken_by_a_batch(pair: Pair) -> None:
    """Once, for all its frames."""
    pair.publish()
    seqs: list[int] = []

    def sleep() -> None:
        while len(seqs) < 5:
            seqs.extend(frame.seq for frame in pair.consumer.poll_many(5, LONG_S))

    thread = threading.Thread(target=sleep)
    thread.start()
    assert pair.producer.publish_many([FRAME] * 5) == 5
    thread.join()
    assert seqs == [1, 2, 3, 4, 5]
