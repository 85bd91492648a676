# SPDX-License-Identifier: Apache-2.0
"""Memory that cannot be created, locked or backed by the pages that are configured."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from tensorpool.clock import ManualClock
from tensorpool.driver import memory as driver_memory
from tensorpool.driver.effects import CreateEpoch
from tensorpool.driver.memory import Failed, Memory
from tensorpool.errors import ConfigError
from tensorpool.shm import PoolSpec, RingSpec
from tests.driver.conftest import FRONT, driver_config
from tests.driver.memory.conftest import MEBIBYTE, SEED, create, everything_below, memory_in, next_outcome, on_disk
from tests.shm.by_hand import mounted, resident_bytes
from tests.support.processes import run_script


def test_an_epoch_that_does_not_fit_is_refused_with_the_bill(shm_dir: Path, clock: ManualClock) -> None:
    """On a mount of 64 MB: what is needed, what is free, what to do; sparse and small epochs still come."""
    large = RingSpec(1024, (PoolSpec(1, 1 << 16), PoolSpec(2, 1 << 16)))
    with mounted(shm_dir / "small", "tmpfs", "size=64m") as small, memory_in(small, clock) as memory:
        first = create(memory, ring=MEBIBYTE, reserve=True)
        memory.submit(CreateEpoch(FRONT, large, True))
        outcome = next_outcome(memory)
        assert isinstance(outcome, Failed)
        assert (outcome.stream_id, outcome.reserved, outcome.is_fatal) == (FRONT, True, False)
        assert f"needs {134492160} bytes (128.3 MiB)" in outcome.text
        assert f"{small} has " in outcome.text
        assert "mount -o remount,size=" in outcome.text
        assert on_disk(memory) == [first]
        sparse = create(memory, ring=large)
        again = create(memory, ring=MEBIBYTE, reserve=True)
        assert (first, sparse, again) == (SEED, SEED + 2, SEED + 3)  # the one that failed has used its number
        gc.collect()


def test_hugepages_off_hugetlbfs_are_refused_at_the_start(shm_dir: Path, clock: ManualClock) -> None:
    """By the key that demands them; the namespace stays free for a driver that does not."""
    config = driver_config({"shm.base_dir": str(shm_dir), "shm.require_hugepages": True})
    with pytest.raises(ConfigError, match=r"shm\.require_hugepages = True .* is not on hugetlbfs"):
        Memory(config, clock)
    with memory_in(shm_dir, clock) as memory:
        assert not memory.is_hugepages


@pytest.mark.spec("DRV-17-20")
def test_pages_smaller_than_the_configuration_wants_are_refused(shm_dir: Path) -> None:
    """§17: `shm.page_size_bytes` is the least that the pages of base_dir must have; the namespace is free again."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    wanted = {"shm.base_dir": str(shm_dir), "shm.page_size_bytes": 2 * page_bytes}
    with pytest.raises(ConfigError, match=rf"shm\.page_size_bytes = {2 * page_bytes} .* at most {page_bytes}"):
        Memory(driver_config(wanted), ManualClock())
    Memory(driver_config(wanted | {"shm.page_size_bytes": page_bytes}), ManualClock()).close()


def test_what_regions_are_backed_by_is_found_out(shm_dir: Path, clock: ManualClock) -> None:
    """E38: hugetlbfs is noticed also where it is not demanded."""
    with mounted(shm_dir / "huge", "hugetlbfs") as huge, memory_in(huge, clock) as memory:
        assert memory.is_hugepages


# Runs as the user nobody, who may lock 4 KB.
LOCKING = """
import os, resource, sys, time
from tensorpool.clock import SystemClock
from tensorpool.driver import memory as driver_memory
from tensorpool.driver.lifecycle import CreateEpoch
from tensorpool.driver.memory import Memory
from tests.driver.conftest import FRONT, REAR, driver_config
from tests.driver.memory.conftest import MEBIBYTE, next_outcome
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
memory = Memory(driver_config({"shm.base_dir": sys.argv[1], "policies.mlock_shm": True}), SystemClock())
for order in (CreateEpoch(FRONT, MEBIBYTE, True), CreateEpoch(REAR, MEBIBYTE, False)):
    memory.submit(order)
    outcome = next_outcome(memory)
    print(type(outcome).__name__, getattr(outcome, "is_fatal", None), getattr(outcome, "text", ""))
memory.close()
"""


def test_memory_that_cannot_be_locked_is_fatal(shm_dir: Path) -> None:
    """E37: the outcome says so, with the remedy; a sparse epoch has no producer and is not locked."""
    shm_dir.chmod(0o777)
    code, output = run_script(LOCKING, str(shm_dir / "base"))
    assert code == 0, output
    reserved, sparse = (line for line in output.splitlines() if line.startswith(("Created", "Failed")))
    assert reserved.startswith("Failed True ")
    assert "mlock: Cannot allocate memory; raise `ulimit -l`, or set policies.mlock_shm = false" in reserved
    assert sparse == "Created None "
    assert everything_below(shm_dir) == []


def test_another_failure_is_not_fatal_though_memory_is_to_be_locked(shm_dir: Path, clock: ManualClock) -> None:
    """Not even where the word is in the path."""
    large = RingSpec(1024, (PoolSpec(1, 1 << 16),))
    with (
        mounted(shm_dir / "mlock", "tmpfs", "size=8m") as small,
        memory_in(small, clock, mlock_shm=True) as memory,
    ):
        memory.submit(CreateEpoch(FRONT, large, True))
        outcome = next_outcome(memory)
        assert isinstance(outcome, Failed)
        assert "the ring needs" in outcome.text
        assert not outcome.is_fatal
        gc.collect()


# Runs as the user nobody, who may lock 4 KB; the configuration needs two MiB.
REFUSED_LOCKING = """
import os, resource, sys
from tensorpool.clock import SystemClock
from tensorpool.driver.memory import Memory
from tensorpool.errors import ConfigError
from tests.driver.conftest import driver_config
resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(sys.argv[2]), int(sys.argv[2])))
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
pool = {"pool_id": 1, "stride_bytes": 65536}
overrides = {"profiles.large": {"header_nslots": 16, "payload_pools": [pool]}, "policies.default_profile": "large"}
try:
    Memory(driver_config({"shm.base_dir": sys.argv[1], "policies.mlock_shm": True} | overrides), SystemClock()).close()
    print("started")
except ConfigError as error:
    print(error)
"""


@pytest.mark.spec("DRV-17-30")
@pytest.mark.parametrize(("limit_bytes", "can_start"), [(4096, False), (4 << 20, True)])
def test_a_limit_that_is_too_low_for_mlock_is_refused_at_the_start(
    shm_dir: Path, limit_bytes: int, can_start: bool
) -> None:
    """With what is needed, what is allowed, and the remedy; the namespace stays free."""
    shm_dir.chmod(0o777)
    code, output = run_script(REFUSED_LOCKING, str(shm_dir / "base"), str(limit_bytes))
    assert code == 0, output
    line = output.splitlines()[-1]
    if can_start:
        assert line == "started"
        return
    assert line.startswith("policies.mlock_shm = True")
    assert f"`ulimit -l` allows {limit_bytes}" in line
    needed = 2 * MEBIBYTE.size_bytes  # an epoch of each stream
    assert f"{needed} bytes have to be locked" in line
    assert f"ulimit -l {-(-needed // 1024)}" in line
    assert everything_below(shm_dir) == []


@pytest.mark.spec("DRV-17-32")
def test_a_platform_without_mlock_is_warned_of(
    shm_dir: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """§17: a no-op there, and the log says so."""
    monkeypatch.setattr(driver_memory, "can_lock", lambda: False)
    with memory_in(shm_dir, clock, mlock_shm=True) as memory:
        create(memory, reserve=True)
        assert resident_bytes(shm_dir, "Locked") == 0
    assert "mlock_unsupported" in caplog.text
