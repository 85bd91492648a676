# SPDX-License-Identifier: Apache-2.0
"""Leftovers: only what is provably dead is removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensorpool import shm
from tensorpool.clock import ManualClock, SystemClock
from tests.support.processes import run_script

WINDOW_NS = 4_000_000_000
SPEC = "shm.RingSpec(8, (shm.PoolSpec(1, 4096),))"

ABANDON = f"""
import os, sys
from tensorpool import shm
from tensorpool.clock import SystemClock
clock = SystemClock()
tree = shm.EpochTree.open(sys.argv[1], sys.argv[2], clock=clock)
for stream_id in (1, 2):
    tree.create(stream_id, tree.next_epoch(stream_id), {SPEC}, clock.monotonic_ns(), reserve_space=False)
os._exit(0)  # no tidying up
"""


def later() -> ManualClock:
    """A clock on which every stamp made so far is stale."""
    return ManualClock(SystemClock().monotonic_ns() + 2 * WINDOW_NS)


@pytest.fixture
def abandoned(shm_dir: Path) -> Path:
    """A base directory with the epochs of a driver that died."""
    assert run_script(ABANDON, str(shm_dir), "gone") == (0, "")
    return shm_dir


@pytest.mark.spec("WIRE-15.21a.7-02")
def test_the_epochs_of_a_dead_driver_are_removed(abandoned: Path) -> None:
    """Stale stamp, dead process, no lock: removed, and reported."""
    removed = list(shm.remove_dead_epochs(str(abandoned), later(), WINDOW_NS))
    assert [epoch.stream_id for epoch in removed] == [1, 2]
    assert not list(abandoned.rglob("*.pool"))
    assert list(shm.remove_dead_epochs(str(abandoned), later(), WINDOW_NS)) == []


def test_a_recent_sign_of_life_protects(abandoned: Path) -> None:
    """The process is gone but the stamp is fresh: it may live in another container."""
    assert list(shm.remove_dead_epochs(str(abandoned), SystemClock(), WINDOW_NS)) == []
    assert list(abandoned.rglob("*.pool"))


@pytest.mark.parametrize(("elapsed_s", "count"), [(1, 0), (8, 2)])
def test_stamps_of_the_wall_clock_count_as_signs_of_life(shm_dir: Path, elapsed_s: int, count: int) -> None:
    """What a REALTIME_SYNCED driver left is fresh for as long as any other's, and goes after that."""
    assert run_script(ABANDON.replace("clock.monotonic_ns()", "clock.realtime_ns()"), str(shm_dir), "gone") == (0, "")
    system, elapsed_ns = SystemClock(), elapsed_s * 1_000_000_000
    clock = ManualClock(system.monotonic_ns() + elapsed_ns, system.realtime_ns() + elapsed_ns)
    assert len(list(shm.remove_dead_epochs(str(shm_dir), clock, WINDOW_NS))) == count


def test_a_living_process_protects(shm_dir: Path) -> None:
    """The stamp is stale but the process lives: it may be paused."""
    clock = SystemClock()
    with shm.EpochTree.open(str(shm_dir), clock=clock) as tree:
        ring = tree.create(1, 5, eval(SPEC), clock.monotonic_ns(), reserve_space=False)
    assert ring.header.superblock.pid == os.getpid()
    assert list(shm.remove_dead_epochs(str(shm_dir), later(), WINDOW_NS)) == []


def test_a_held_lock_protects(abandoned: Path) -> None:
    """A driver that has just taken over the namespace decides for itself."""
    namespace = shm.namespace_path(str(abandoned), "gone")
    with shm.EpochTree(namespace, clock=SystemClock()):
        assert shm.dead_epochs(namespace, later(), WINDOW_NS)
        assert list(shm.remove_dead_epochs(str(abandoned), later(), WINDOW_NS)) == []


def test_the_own_namespace_is_left_alone(abandoned: Path) -> None:
    """A driver sweeps the others' namespaces; its own has a policy."""
    namespace = shm.namespace_path(str(abandoned), "gone")
    assert list(shm.remove_dead_epochs(str(abandoned), later(), WINDOW_NS, except_namespace=namespace)) == []


def test_two_sweepers_at_once_remove_everything_once(abandoned: Path) -> None:
    """Run twice at the same time, nothing fails and nothing is left."""
    sweep = (
        "import sys; from tensorpool import shm; from tensorpool.clock import ManualClock\n"
        "clock = ManualClock(int(sys.argv[2]))\n"
        f"print(len(list(shm.remove_dead_epochs(sys.argv[1], clock, {WINDOW_NS}))))"
    )
    arguments = [sys.executable, "-c", sweep, str(abandoned), str(later().monotonic_ns())]
    sweepers = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    counts = [int(sweeper.communicate()[0]) for sweeper in sweepers]
    assert [sweeper.returncode for sweeper in sweepers] == [0, 0]
    assert sum(counts) == 2
    assert not list(abandoned.rglob("*.pool"))
