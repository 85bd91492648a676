# SPDX-License-Identifier: Apache-2.0
"""What a driver does with the files of an earlier one, and with its own at its end."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tensorpool import shm
from tensorpool.clock import ManualClock
from tensorpool.driver.effects import CreateEpoch
from tensorpool.driver.memory import CREATORS, SWEEP_EVERY_NS, Memory
from tensorpool.errors import ConfigError
from tests.driver.conftest import FRONT, REAR, RING, SECOND_NS, driver_config
from tests.driver.memory.conftest import SEED, create, everything_below, memory_in, on_disk, wait_for_files
from tests.shm.by_hand import mapped_files, open_files
from tests.support.processes import run_script, wait_until


def kill(memory: Memory) -> None:
    """What is left when a driver dies: its files, and a lock that no process holds."""
    for pool in (memory._large, memory._small, memory._sparse, memory._removals):
        pool.shutdown()
    memory._rings.clear()
    memory._finished.clear()
    memory._tree.close()
    memory.was_killed = True  # type: ignore[attr-defined]


def wait_until_idle(memory: Memory) -> None:
    """Every thread that removes has come to the end of what it did."""
    barrier = threading.Barrier(CREATORS + 1)
    for _ in range(CREATORS):
        memory._removals.submit(barrier.wait, 30)
    barrier.wait(30)


# --- restart


def test_a_driver_that_was_killed_is_followed_by_higher_epochs(shm_dir: Path, clock: ManualClock) -> None:
    """C2: learnt from the files, though the wall clock was set back and the files are removed at once."""
    with memory_in(shm_dir, clock) as memory:
        last = [create(memory) for _ in range(3)][-1]
        kill(memory)
    for policies in ({}, {"epoch_gc_on_startup": True}, {"recreate_on_startup": True}):
        with memory_in(shm_dir, ManualClock(1, 5), **policies) as memory:
            assert create(memory) == last + 1
            last += 1
            kill(memory)


def test_epochs_of_an_earlier_driver_are_retired_ones(shm_dir: Path, clock: ManualClock) -> None:
    """They stay until they are old enough, by the time of the new driver, and go by the same policy."""
    with memory_in(shm_dir, clock) as memory:
        left = [create(memory) for _ in range(3)]
        kill(memory)
    with memory_in(shm_dir, ManualClock(500, 5), epoch_gc_min_age_ns=1_000) as memory:
        assert on_disk(memory) == left
        current = create(memory)
        assert memory.collect(1_499) == 0
        assert memory.collect(1_500) == 2
        wait_for_files(memory, [left[-1], current])


def test_a_stream_that_is_no_longer_served_keeps_nothing(shm_dir: Path, clock: ManualClock) -> None:
    """What an earlier driver made on demand goes at its age; while this driver lives its numbers are not used again."""
    with memory_in(shm_dir, clock) as memory:
        left = [create(memory, REAR) for _ in range(2)]
        kept = create(memory, FRONT)
        kill(memory)
    with memory_in(shm_dir, ManualClock(1, 5), epoch_gc_min_age_ns=1_000) as memory:
        current = create(memory, FRONT)
        assert memory.collect(1_000) == 0
        assert memory.collect(1_001) == 2
        wait_for_files(memory, [], REAR)
        assert on_disk(memory, FRONT) == [kept, current]
        assert create(memory, REAR) == left[-1] + 1


@pytest.mark.spec("DRV-14-01", "DRV-14-02")
def test_a_start_may_remove_everything(shm_dir: Path, clock: ManualClock) -> None:
    """recreate_on_startup: no file of an earlier driver is left, and epochs go on from theirs (§14)."""
    with memory_in(shm_dir, clock) as memory:
        left = [create(memory) for _ in range(3)]
        kill(memory)
    with memory_in(shm_dir, ManualClock(1, 5), recreate_on_startup=True) as memory:
        assert [name for name in everything_below(Path(memory.path)) if name != "driver.lock"] == []
        assert create(memory) == left[-1] + 1


@pytest.mark.parametrize(
    ("policies", "elapsed_ns", "kept"),
    [
        ({}, 10**12, 4),
        ({"epoch_gc_on_startup": True}, 10**12, 1),
        ({"epoch_gc_on_startup": True, "epoch_gc_keep": 1}, 10**12, 0),
        ({"epoch_gc_on_startup": True, "epoch_gc_keep": 3}, 10**12, 2),
        ({"epoch_gc_on_startup": True, "epoch_gc_min_age_ns": 2_000}, 1_999, 4),
        ({"epoch_gc_on_startup": True, "epoch_gc_min_age_ns": 2_000}, 2_000, 1),
        ({"epoch_gc_on_startup": True, "epoch_gc_enabled": False}, 10**12, 4),
    ],
)
def test_collection_at_the_start_goes_by_the_policy(
    shm_dir: Path, clock: ManualClock, policies: dict[str, Any], elapsed_ns: int, kept: int
) -> None:
    """epoch_gc_on_startup counts the epoch that comes as the current one, and age from the last sign of life."""
    with memory_in(shm_dir, clock) as memory:
        left = [create(memory) for _ in range(4)]
        kill(memory)
    clock.advance(elapsed_ns)
    with memory_in(shm_dir, clock, **policies) as memory:
        assert on_disk(memory) == left[4 - kept :]
        assert create(memory) > left[-1]


def test_collection_at_the_start_keeps_nothing_of_a_stream_that_is_not_configured(
    shm_dir: Path, clock: ManualClock
) -> None:
    """What clients of an earlier driver created on demand."""
    with memory_in(shm_dir, clock) as memory:
        created = [create(memory, 20_000), create(memory, FRONT)]
        kill(memory)
    clock.advance(10**12)
    with memory_in(shm_dir, clock, epoch_gc_on_startup=True) as memory:
        assert on_disk(memory, 20_000) == []
        assert on_disk(memory, FRONT) == created[1:]


def test_a_removal_that_was_interrupted_is_finished_at_startup(shm_dir: Path, clock: ManualClock) -> None:
    """Half an epoch belongs to no stream, and its number is not used again."""
    with memory_in(shm_dir, clock) as memory:
        first, second = create(memory), create(memory)
        kill(memory)
    stream = Path(memory.path, str(FRONT))
    (stream / str(second)).rename(stream / f".{second}.retired")
    with memory_in(shm_dir, ManualClock(1, 5)) as memory:
        assert on_disk(memory) == [first]
        assert create(memory) == second + 1


def test_two_drivers_cannot_share_a_namespace(shm_dir: Path, clock: ManualClock) -> None:
    """The second is refused with the first one's pid, and may have it afterwards."""
    with memory_in(shm_dir, clock) as memory:
        create(memory)
        with pytest.raises(ConfigError, match=f"pid {os.getpid()} holds"):
            Memory(driver_config({"shm.base_dir": str(shm_dir)}), clock)
        assert on_disk(memory) == [SEED]
    with memory_in(shm_dir, clock):
        pass


# A driver of another namespace, which dies as it stands.
DYING = """
import os, sys
from tensorpool.clock import SystemClock
from tensorpool.driver.memory import Memory
from tests.driver.conftest import driver_config
from tests.driver.memory.conftest import create
create(Memory(driver_config({"shm.base_dir": sys.argv[1], "shm.namespace": "other"}), SystemClock()))
os._exit(0)
"""


@pytest.mark.spec("WIRE-15.21a.7-02")
def test_what_a_dead_driver_left_in_another_namespace_is_swept_away(shm_dir: Path) -> None:
    """C11: once its last sign of life is old enough, every minute, and only where collection is enabled."""
    code, output = run_script(DYING, str(shm_dir))
    assert code == 0, output
    other = shm_dir / "tensorpool-root" / "other"
    found = [name for name in everything_below(other) if name != "driver.lock"]
    assert len(found) == 3
    clock = ManualClock(time.monotonic_ns(), SEED)
    with memory_in(shm_dir, clock, epoch_gc_enabled=False) as memory:
        clock.advance(3_600 * SECOND_NS)
        memory.collect(clock.monotonic_ns())
    clock = ManualClock(time.monotonic_ns(), SEED)
    with memory_in(shm_dir, clock) as memory:
        mine = create(memory)
        memory.collect(clock.monotonic_ns())  # too early: it may only be slow
        wait_until_idle(memory)
        clock.advance(SWEEP_EVERY_NS - 1)
        memory.collect(clock.monotonic_ns())  # not this turn's business
        wait_until_idle(memory)
        assert [name for name in everything_below(other) if name != "driver.lock"] == found
        clock.advance(1)
        memory.collect(clock.monotonic_ns())
        wait_until(lambda: everything_below(other) == [], "the leftovers are gone")
        assert on_disk(memory) == [mine]


# --- the end


@pytest.mark.spec("WIRE-15.14-05")
@pytest.mark.spec("WIRE-15.21a.7-01")
def test_close_removes_everything(shm_dir: Path, clock: ManualClock) -> None:
    """Current and retired epochs, those that no client asked for yet, and the lock; nothing stays mapped or open."""
    with memory_in(shm_dir, clock) as memory:
        for _ in range(3):
            create(memory, FRONT)
        create(memory, REAR, reserve=True)
        memory.submit(CreateEpoch(REAR, RING, True))
        wait_until(lambda: len(on_disk(memory, REAR)) == 2, "the second epoch is made")
    assert everything_below(shm_dir) == []
    assert os.listdir(memory.path) == [f"highest-epoch.{SEED + 2}"]
    assert mapped_files(shm_dir) == []
    assert open_files(shm_dir) == []


def test_close_waits_for_what_is_under_way_and_begins_nothing(
    shm_dir: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half-made epochs go too; orders that no thread has begun are dropped, so that the end comes soon."""
    may_go_on, begun = threading.Event(), []
    real = shm.EpochTree.create

    def slow(self: shm.EpochTree, stream_id: int, *args: Any, **options: Any) -> Any:
        begun.append(stream_id)
        assert may_go_on.wait(30)
        return real(self, stream_id, *args, **options)

    monkeypatch.setattr(shm.EpochTree, "create", slow)
    memory = Memory(driver_config({"shm.base_dir": str(shm_dir)}), clock)
    for stream_id in range(1, CREATORS + 6):
        memory.submit(CreateEpoch(stream_id, RING, True))
    wait_until(lambda: len(begun) == CREATORS, "all threads are busy")
    closing = threading.Thread(target=memory.close)
    closing.start()
    wait_until(lambda: memory._large._shutdown, "it is being closed")
    may_go_on.set()
    closing.join(30)
    assert sorted(begun) == list(range(1, CREATORS + 1))
    assert everything_below(shm_dir) == []
    assert mapped_files(shm_dir) == []
