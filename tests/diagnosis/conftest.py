# SPDX-License-Identifier: Apache-2.0
"""A host's shared memory in a directory of the test's own, and epochs in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorpool import shm
from tensorpool.clock import SystemClock
from tensorpool.driver.config import DriverConfig
from tests.support.processes import run_script

RING = "shm.RingSpec(8, (shm.PoolSpec(1, 4096),))"
LONG_AGO_NS = 1  # an activity stamp from the machine's start

# Makes epochs of two streams in a namespace, last seen long ago, and dies without tidying up.
ABANDON = f"""
import os, sys
from tensorpool import shm
from tensorpool.clock import SystemClock
clock = SystemClock()
for namespace in sys.argv[2:]:
    tree = shm.EpochTree.open(sys.argv[1], namespace, clock=clock)
    for stream_id in (1, 2):
        ring = tree.create(stream_id, tree.next_epoch(stream_id), {RING}, clock.monotonic_ns(), reserve_space=False)
        ring.refresh_activity({LONG_AGO_NS})
os._exit(0)
"""


@pytest.fixture
def host(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of /dev/shm, where other tests live too."""
    monkeypatch.setattr("tensorpool.diagnosis.leftovers.ROOT", shm_dir)
    return shm_dir


@pytest.fixture
def config(host: Path) -> DriverConfig:
    """Of a driver on that host."""
    return DriverConfig.load(environ={}, overrides={"shm.base_dir": str(host / "tensorpool")})


@pytest.fixture
def tree(config: DriverConfig) -> Iterator[shm.EpochTree]:
    """The namespace of a driver that lives: this process."""
    with shm.EpochTree.open(config.shm.base_dir, clock=SystemClock()) as tree:
        yield tree


@pytest.fixture
def abandoned(config: DriverConfig) -> Path:
    """The namespace of a driver that died long ago."""
    assert run_script(ABANDON, config.shm.base_dir, "gone") == (0, "")
    return Path(shm.namespace_path(config.shm.base_dir, "gone"))
