# SPDX-License-Identifier: Apache-2.0
"""The driver's memory: real files, made and removed beside the thread that asks for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorpool.clock import Clock, ManualClock
from tensorpool.driver.effects import CreateEpoch
from tensorpool.driver.memory import Created, Failed, Memory
from tensorpool.shm import PoolSpec, RingSpec
from tests.driver.conftest import FRONT, RING, driver_config
from tests.shm.by_hand import mounted
from tests.support.processes import wait_until

SEED = 1_800_000_000_000_000_000
MEBIBYTE = RingSpec(16, (PoolSpec(1, 1 << 16),))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000, SEED)


@contextlib.contextmanager
def memory_in(base: Path, clock: Clock, **policies: Any) -> Iterator[Memory]:
    """A driver's memory, closed at the end unless it was killed before."""
    overrides = {f"policies.{name}": value for name, value in policies.items()}
    memory = Memory(driver_config({"shm.base_dir": str(base)} | overrides), clock)
    try:
        yield memory
    finally:
        if not getattr(memory, "was_killed", False):
            memory.close()


def next_outcome(memory: Memory, timeout_s: float = 30.0) -> Created | Failed:
    outcomes: list[Created | Failed] = []

    def is_there() -> bool:
        outcome = memory.take_finished()
        if outcome is not None:
            outcomes.append(outcome)
        return bool(outcomes)

    wait_until(is_there, "an epoch is finished", timeout_s=timeout_s)
    return outcomes[0]


def create(memory: Memory, stream_id: int = FRONT, ring: RingSpec = RING, *, reserve: bool = False) -> int:
    """Make an epoch and wait for it: its number."""
    memory.submit(CreateEpoch(stream_id, ring, reserve))
    outcome = next_outcome(memory)
    assert isinstance(outcome, Created), outcome
    return outcome.epoch.epoch


def on_disk(memory: Memory, stream_id: int = FRONT) -> list[int]:
    """The epochs whose directories are there, by number; -1 for one on its way out."""
    folder = Path(memory.path, str(stream_id))
    names = os.listdir(folder) if folder.exists() else []
    return sorted(-1 if name.startswith(".") else int(name) for name in names)


def wait_for_files(memory: Memory, expected: list[int], stream_id: int = FRONT) -> None:
    """Removal is not waited for by the driver either."""
    wait_until(lambda: on_disk(memory, stream_id) == expected, f"epochs {expected} are what is left")


def everything_below(path: Path) -> list[str]:
    """Files, but for the record of the highest epoch."""
    files = [entry for entry in path.rglob("*") if not entry.is_dir() and not entry.name.startswith("highest-epoch.")]
    return sorted(str(entry.relative_to(path)) for entry in files)


@pytest.fixture
def small(shm_dir: Path) -> Iterator[Path]:
    with mounted(shm_dir / "small", "tmpfs", "size=64m") as small:
        yield small
