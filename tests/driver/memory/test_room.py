# SPDX-License-Identifier: Apache-2.0
"""Which epochs are removed to make room for the next."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from tensorpool import shm
from tensorpool.clock import ManualClock
from tensorpool.driver.effects import CreateEpoch
from tensorpool.driver.memory import CREATORS, Created, Failed, Memory
from tensorpool.shm import AllowedBases, PoolSpec, RingSpec, map_ring
from tests.driver.conftest import FRONT, REAR
from tests.driver.memory.conftest import MEBIBYTE, SEED, create, memory_in, next_outcome, on_disk

THIRD = RingSpec(32, (PoolSpec(1, 1 << 20),))  # 32 MiB on a mount of 64


def reattach(memory: Memory, stream_id: int = FRONT) -> tuple[int, int]:
    """A producer comes, and goes: its epoch and the sparse one after it."""
    return create(memory, stream_id, THIRD, reserve=True), create(memory, stream_id, THIRD)


@pytest.mark.parametrize("min_age_ns", [0, 10**12], ids=["by policy", "earlier than the policy has it"])
def test_an_epoch_without_a_producer_is_freed_before_the_next_is_reserved(
    small: Path, clock: ManualClock, min_age_ns: int
) -> None:
    """Where only one fits: again and again, though epoch_gc_keep would keep the last one's memory."""
    with memory_in(small, clock, epoch_gc_min_age_ns=min_age_ns) as memory:
        seen = [reattach(memory) for _ in range(3)]
        last = create(memory, FRONT, THIRD, reserve=True)
        assert on_disk(memory)[-2:] == [seen[-1][1], last]
        assert seen[-1][0] not in on_disk(memory), "its memory made room"


def test_what_the_policy_will_not_keep_goes_before_the_next_is_reserved(
    shm_dir: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs of one stream never take memory at once, also where there would be room for both."""
    there: list[list[int]] = []
    real = shm.EpochTree.create

    def looking(self: shm.EpochTree, stream_id: int, *args: Any, **options: Any) -> Any:
        there.append(on_disk(memory))
        return real(self, stream_id, *args, **options)

    monkeypatch.setattr(shm.EpochTree, "create", looking)
    with memory_in(shm_dir, clock, epoch_gc_min_age_ns=0) as memory:
        _, sparse = create(memory, reserve=True), create(memory)
        create(memory, reserve=True)
        assert there[-1] == [sparse]


def test_another_streams_retired_epochs_make_room_too(small: Path, clock: ManualClock) -> None:
    """A stream without a producer must not keep the others out."""
    with memory_in(small, clock, epoch_gc_min_age_ns=10**12) as memory:
        used, _ = reattach(memory, REAR)
        create(memory, FRONT, THIRD, reserve=True)
        assert used not in on_disk(memory, REAR)


def test_nothing_is_freed_that_has_room(small: Path, clock: ManualClock) -> None:
    """The policy alone decides then."""
    with memory_in(small, clock, epoch_gc_min_age_ns=10**12) as memory:
        epochs = [create(memory, ring=MEBIBYTE, reserve=True) for _ in range(4)]
        assert on_disk(memory) == epochs


def test_without_collection_nothing_is_freed_for_the_next(small: Path, clock: ManualClock) -> None:
    """epoch_gc_enabled = false: refused with the bill, and everything stays."""
    with memory_in(small, clock, epoch_gc_enabled=False) as memory:
        epochs = list(reattach(memory))
        memory.submit(CreateEpoch(FRONT, THIRD, True))
        outcome = next_outcome(memory)
        assert isinstance(outcome, Failed)
        assert "the ring needs" in outcome.text
        assert on_disk(memory) == epochs


def test_readers_of_a_freed_epoch_keep_its_memory_and_the_next_is_refused(small: Path, clock: ManualClock) -> None:
    """What is mapped cannot be taken away: the bill says what is free."""
    with memory_in(small, clock) as memory:
        memory.submit(CreateEpoch(FRONT, THIRD, True))
        outcome = next_outcome(memory)
        assert isinstance(outcome, Created)
        uris = [outcome.epoch.header_region_uri, *outcome.epoch.pool_region_uris]
        ring = map_ring(THIRD, uris, AllowedBases([small]), stream_id=FRONT, epoch=outcome.epoch.epoch)
        create(memory, ring=THIRD)
        memory.submit(CreateEpoch(FRONT, THIRD, True))
        assert isinstance(next_outcome(memory), Failed)
        ring.revalidate()
        del ring
        create(memory, ring=THIRD, reserve=True)
        gc.collect()


def test_a_small_epoch_does_not_wait_behind_large_ones(
    shm_dir: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every thread for large ones is busy: a producer of a small stream is served all the same."""
    may_go_on = threading.Event()
    real = shm.EpochTree.create

    def slow(self: shm.EpochTree, stream_id: int, *args: Any, **options: Any) -> Any:
        if stream_id != FRONT:
            assert may_go_on.wait(30)
        return real(self, stream_id, *args, **options)

    monkeypatch.setattr(shm.EpochTree, "create", slow)
    large = RingSpec(128, (PoolSpec(1, 1 << 20),))
    with memory_in(shm_dir, clock, prefault_shm=False) as memory:
        for stream_id in range(1, CREATORS + 3):
            memory.submit(CreateEpoch(stream_id, large, True))
        try:
            assert create(memory, FRONT, MEBIBYTE, reserve=True) == SEED
        finally:
            may_go_on.set()
