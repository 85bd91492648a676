# SPDX-License-Identifier: Apache-2.0
"""How epochs are created, on which thread and in which order."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tensorpool import shm
from tensorpool.clock import ManualClock, SystemClock
from tensorpool.driver.effects import CreateEpoch
from tensorpool.driver.memory import Created, Failed
from tensorpool.shm import AllowedBases, PoolSpec, RingSpec, map_ring
from tests.driver.conftest import FRONT, REAR, RING
from tests.driver.memory.conftest import MEBIBYTE, SEED, create, memory_in, next_outcome, wait_for_files
from tests.shm.by_hand import resident_bytes

GIBIBYTE = RingSpec(1024, (PoolSpec(1, 1 << 20),))


@pytest.mark.parametrize("reserve", [False, True])
def test_an_epoch_is_made_as_it_was_ordered_and_can_be_mapped(shm_dir: Path, clock: ManualClock, reserve: bool) -> None:
    """The outcome carries what clients receive, and a client's own checks accept it."""
    with memory_in(shm_dir, clock) as memory:
        memory.submit(CreateEpoch(FRONT, RING, reserve))
        outcome = next_outcome(memory)
        assert isinstance(outcome, Created)
        epoch = outcome.epoch
        assert outcome.reserved is reserve
        assert (epoch.stream_id, epoch.epoch, epoch.layout_version, epoch.ring) == (FRONT, SEED, 1, RING)
        assert epoch.header_region_uri == f"shm:file?path={memory.path}/{FRONT}/{SEED}/header.ring"
        uris = [epoch.header_region_uri, *epoch.pool_region_uris]
        ring = map_ring(RING, uris, AllowedBases([shm_dir]), stream_id=FRONT, epoch=SEED)
        assert ring.activity_timestamp_ns == clock.monotonic_ns()
        assert ring.header.pid == os.getpid()
        assert memory.take_finished() is None
        del ring


@pytest.mark.spec("DRV-17-28")
@pytest.mark.parametrize(("reserve", "prefault"), [(False, True), (True, False), (True, True)])
def test_only_a_producers_epoch_takes_memory(shm_dir: Path, clock: ManualClock, reserve: bool, prefault: bool) -> None:
    """C4: sparse without a producer; reserved with one, and brought in where the policy says so."""
    with memory_in(shm_dir, clock, prefault_shm=prefault) as memory:
        epoch = create(memory, ring=MEBIBYTE, reserve=reserve)
        taken = sum(file.stat().st_blocks * 512 for file in Path(memory.path, str(FRONT), str(epoch)).iterdir())
        assert (taken >= MEBIBYTE.size_bytes) is reserve
        assert (resident_bytes(shm_dir) >= MEBIBYTE.size_bytes) is (reserve and prefault)


def test_the_thread_that_asks_never_waits(shm_dir: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """An order is taken and the outcome comes later, from another thread, while others overtake it."""
    may_go_on, threads = threading.Event(), []
    real = shm.EpochTree.create

    def slow(self: shm.EpochTree, stream_id: int, *args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        if stream_id == FRONT:
            assert may_go_on.wait(30)
        return real(self, stream_id, *args, **options)

    monkeypatch.setattr(shm.EpochTree, "create", slow)
    with memory_in(shm_dir, clock) as memory:
        memory.submit(CreateEpoch(FRONT, RING, True))
        memory.submit(CreateEpoch(REAR, RING, False))
        overtaking = next_outcome(memory)
        assert isinstance(overtaking, Created)
        assert overtaking.epoch.stream_id == REAR
        assert memory.take_finished() is None
        may_go_on.set()
        slow_one = next_outcome(memory)
        assert isinstance(slow_one, Created)
        assert slow_one.epoch.stream_id == FRONT
    assert all(name.startswith("epochs") for name in threads)


def test_the_epochs_of_a_stream_come_in_order(shm_dir: Path) -> None:
    """Many streams at once, each with one order under way at a time as the driver has it, removal included."""
    streams = range(1, 9)
    with memory_in(shm_dir, SystemClock(), epoch_gc_min_age_ns=0) as memory:
        seen: dict[int, list[int]] = {stream_id: [] for stream_id in streams}
        for stream_id in streams:
            memory.submit(CreateEpoch(stream_id, RING, False))
        while any(len(epochs) < 20 for epochs in seen.values()):
            outcome = next_outcome(memory)
            assert isinstance(outcome, Created), outcome
            epochs = seen[outcome.epoch.stream_id]
            epochs.append(outcome.epoch.epoch)
            memory.collect(time.monotonic_ns())
            if len(epochs) < 20:
                memory.submit(CreateEpoch(outcome.epoch.stream_id, RING, random.random() < 0.5))
        for stream_id, epochs in seen.items():
            assert epochs == list(range(epochs[0], epochs[0] + 20))
            memory.collect(time.monotonic_ns())
            wait_for_files(memory, epochs[-2:], stream_id)


def test_a_gigabyte_is_made_while_the_driver_goes_on(shm_dir: Path) -> None:
    """Turns go on all the time, and the sparse epoch of a stream that asked later is there long before."""
    free = shm.mount_space(str(shm_dir)).free_bytes
    assert free is None or free > 2 * GIBIBYTE.size_bytes, "needs 2 GiB of /dev/shm"
    with memory_in(shm_dir, SystemClock()) as memory:
        memory.submit(CreateEpoch(FRONT, GIBIBYTE, True))
        memory.submit(CreateEpoch(REAR, GIBIBYTE, False))
        turns = 0
        order: list[Any] = []
        while len(order) < 2:
            turns += 1
            outcome = memory.take_finished()
            if outcome is not None:
                assert isinstance(outcome, Created), outcome
                order.append((outcome.epoch.stream_id, turns))
            time.sleep(0.001)  # one turn of a duty cycle
        (first, early), (last, late) = order
        assert (first, last) == (REAR, FRONT)
        assert late - early > 10


@pytest.mark.parametrize("error", [RuntimeError("surprise"), MemoryError(), ValueError("odd")])
def test_every_order_has_an_outcome(
    shm_dir: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Every failure on the other thread is reported: no client waits for an answer that never comes."""

    def fail(*args: Any, **options: Any) -> None:
        raise error

    with memory_in(shm_dir, clock) as memory:
        with monkeypatch.context() as patch:
            patch.setattr(shm.EpochTree, "create", fail)
            memory.submit(CreateEpoch(FRONT, RING, True))
            outcome = next_outcome(memory)
        assert isinstance(outcome, Failed)
        assert (outcome.stream_id, outcome.reserved, outcome.is_fatal) == (FRONT, True, False)
        assert type(error).__name__ in outcome.text
        assert create(memory) > SEED
