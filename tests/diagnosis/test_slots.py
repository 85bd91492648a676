# SPDX-License-Identifier: Apache-2.0
"""Slots: what a header ring holds, read from its file without touching it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tensorpool import shm
from tensorpool.clock import SystemClock
from tensorpool.diagnosis.slots import SlotFacts, read_slots

NSLOTS = 8
LAYOUT = shm.layout_for((2, 3), np.uint16)
PERIOD_NS = 10_000_000


@contextmanager
def made(base: Path) -> Iterator[shm.MappedRing]:
    with shm.EpochTree.open(str(base), clock=SystemClock()) as tree:
        yield tree.create(1, 1, shm.RingSpec(NSLOTS, (shm.PoolSpec(1, 4096),)), 1, reserve_space=False)


def facts(ring: shm.MappedRing) -> SlotFacts:
    fd = os.open(ring.header.uri.removeprefix("shm:file?path="), os.O_RDONLY)
    try:
        return read_slots(fd, NSLOTS)
    finally:
        os.close(fd)


def test_an_empty_ring_stays_sparse(shm_dir: Path) -> None:
    """Nothing was written; a look reserves no memory for it, where a mapping would."""
    with made(shm_dir) as ring:
        path = ring.header.uri.removeprefix("shm:file?path=")
        before = os.stat(path).st_blocks
        found = facts(ring)
        assert (found.never_written, found.committed, found.newest_seq, found.newest) == (NSLOTS, 0, None, None)
        assert os.stat(path).st_blocks == before


@pytest.mark.parametrize("count", [1, 5, NSLOTS, 3 * NSLOTS + 2])
def test_committed_slots_reach_back_to_the_oldest(shm_dir: Path, count: int) -> None:
    """Oldest and newest seq, and what the ring holds in seconds by the producer's stamps."""
    with made(shm_dir) as ring:
        writer = ring.writer()
        for seq in range(count):
            assert writer.write(seq, LAYOUT, bytes(12), timestamp_ns=(seq + 1) * PERIOD_NS, meta_version=3)
        found = facts(ring)
        held = min(count, NSLOTS)
        assert (found.committed, found.in_progress, found.never_written) == (held, 0, NSLOTS - held)
        assert (found.oldest_seq, found.newest_seq) == (count - held, count - 1)
        assert found.newest is not None
        assert (found.newest.seq, found.newest.shape, found.newest.dtype) == (count - 1, (2, 3), "UINT16")
        assert (found.newest.nbytes, found.newest.pool_id, found.newest.meta_version) == (12, 1, 3)
        if held == 1:
            assert (found.span_s, found.rate_hz, found.holds_s) == (None, None, None)
        else:
            assert found.span_s == pytest.approx((held - 1) * 0.01)
            assert found.rate_hz == pytest.approx(100)
            assert found.holds_s == pytest.approx(NSLOTS * 0.01)


def test_a_slot_being_written_and_a_foreign_word_are_distinguished(shm_dir: Path) -> None:
    """In progress by its low bit; a seq that belongs to another slot is no frame."""
    with made(shm_dir) as ring:
        writer = ring.writer()
        for seq in range(NSLOTS):
            assert writer.write(seq, LAYOUT, bytes(12), timestamp_ns=1)
        writer.begin(NSLOTS, LAYOUT)
        ring.header.mapping.store_u64(64 + 3 * 256, 2 * 1000 + 1)  # 1000 belongs to slot 0
        found = facts(ring)
        writer.abandon()
    assert (found.committed, found.in_progress, found.misplaced) == (NSLOTS - 2, 1, 1)
    assert (found.oldest_seq, found.newest_seq) == (1, NSLOTS - 1)
    assert found.rate_hz is None  # stamps that do not move tell no rate


def test_a_frame_whose_header_is_nonsense_is_passed_over(shm_dir: Path) -> None:
    """A foreign producer's slot that does not decode: counted as committed, not described."""
    with made(shm_dir) as ring:
        memoryview(ring.header.mapping)[64 : 64 + 256] = b"\x01" + bytes(255)
        found = facts(ring)
    assert (found.committed, found.newest_seq, found.newest) == (1, 0, None)
