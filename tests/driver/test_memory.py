# SPDX-License-Identifier: Apache-2.0
"""The driver's memory: real files, made and removed beside the thread that asks for them."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorpool import shm
from tensorpool.clock import Clock, ManualClock, SystemClock
from tensorpool.driver import memory as driver_memory
from tensorpool.driver.lifecycle import CreateEpoch
from tensorpool.driver.memory import CREATORS, SWEEP_EVERY_NS, Created, Failed, Memory
from tensorpool.errors import ConfigError
from tensorpool.shm import AllowedBases, PoolSpec, RingSpec, map_ring
from tests.driver.conftest import FRONT, REAR, RING, SECOND_NS, driver_config
from tests.shm.by_hand import mapped_files, mounted, open_files, resident_bytes
from tests.support.processes import run_script, wait_until
from tests.support.region_bytes import superblock

SEED = 1_800_000_000_000_000_000
MEBIBYTE = RingSpec(16, (PoolSpec(1, 1 << 16),))
GIBIBYTE = RingSpec(1024, (PoolSpec(1, 1 << 20),))


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


def kill(memory: Memory) -> None:
    """What is left when a driver dies: its files, and a lock that no process holds."""
    for pool in (memory._large, memory._small, memory._sparse, memory._removals):
        pool.shutdown()
    memory._rings.clear()
    memory._finished.clear()
    memory._tree.close()
    memory.was_killed = True  # type: ignore[attr-defined]


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


def wait_until_idle(memory: Memory) -> None:
    """Every thread that removes has come to the end of what it did."""
    barrier = threading.Barrier(CREATORS + 1)
    for _ in range(CREATORS):
        memory._removals.submit(barrier.wait, 30)
    barrier.wait(30)


def everything_below(path: Path) -> list[str]:
    """Files, but for the record of the highest epoch."""
    files = [entry for entry in path.rglob("*") if not entry.is_dir() and not entry.name.startswith("highest-epoch.")]
    return sorted(str(entry.relative_to(path)) for entry in files)


# --- creation


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


# --- failure


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


# Runs as nobody, who may lock 4 KB.
LOCKING = """
import os, resource, sys, time
from tensorpool.clock import SystemClock
from tensorpool.driver import memory as driver_memory
from tensorpool.driver.lifecycle import CreateEpoch
from tensorpool.driver.memory import Memory
from tests.driver.conftest import FRONT, REAR, driver_config
from tests.driver.test_memory import MEBIBYTE, next_outcome
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
        assert "space: needs" in outcome.text
        assert not outcome.is_fatal
        gc.collect()


# Runs as nobody, who may lock 4 KB; the configuration needs two MiB.
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


# --- room for the next epoch

THIRD = RingSpec(32, (PoolSpec(1, 1 << 20),))  # 32 MiB on a mount of 64


@pytest.fixture
def small(shm_dir: Path) -> Iterator[Path]:
    with mounted(shm_dir / "small", "tmpfs", "size=64m") as small:
        yield small


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
        assert "space: needs" in outcome.text
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


# --- signs of life


@pytest.mark.spec("DRV-3-06", "WIRE-7.1-05")
def test_activity_is_refreshed_in_every_region_of_every_live_epoch(shm_dir: Path, clock: ManualClock) -> None:
    """C9: header rings and pools of all streams; a retired epoch is left to grow stale."""
    with memory_in(shm_dir, clock) as memory:
        retired = create(memory, FRONT)
        live = [(FRONT, create(memory, FRONT)), (REAR, create(memory, REAR))]
        clock.advance(4_000)
        memory.refresh_activity()
        stamps = [
            superblock(file)["activity_timestamp_ns"]
            for stream_id, epoch in live
            for file in Path(memory.path, str(stream_id), str(epoch)).iterdir()
        ]
        assert stamps == [5_000] * 6
        assert superblock(f"{memory.path}/{FRONT}/{retired}/header.ring")["activity_timestamp_ns"] == 1_000


@pytest.mark.parametrize(("domain", "expected"), [("MONOTONIC", 1_000), ("REALTIME_SYNCED", SEED)])
def test_stamps_are_in_the_clock_that_announces_are_in(
    shm_dir: Path, clock: ManualClock, domain: str, expected: int
) -> None:
    """C8: at creation and at every refresh."""
    config = driver_config({"shm.base_dir": str(shm_dir), "driver.announce_clock_domain": domain})
    with contextlib.closing(Memory(config, clock)) as memory:
        header = f"{memory.path}/{FRONT}/{create(memory)}/header.ring"
        found = superblock(header)
        assert (found["start_timestamp_ns"], found["activity_timestamp_ns"]) == (expected, expected)
        clock.advance(500)
        memory.refresh_activity()
        assert superblock(header)["activity_timestamp_ns"] == expected + 500


# --- removal


@pytest.mark.spec("DRV-17-34")
@pytest.mark.parametrize(("keep", "kept"), [(1, 1), (2, 2), (3, 3), (9, 5)])
def test_the_newest_epochs_are_kept_the_current_one_among_them(
    shm_dir: Path, clock: ManualClock, keep: int, kept: int
) -> None:
    """epoch_gc_keep counts the current one; what is beyond it goes, and is counted once."""
    with memory_in(shm_dir, clock, epoch_gc_keep=keep, epoch_gc_min_age_ns=0) as memory:
        epochs = [create(memory) for _ in range(5)]
        assert memory.collect(clock.monotonic_ns()) == 5 - kept
        wait_for_files(memory, epochs[-kept:])
        assert memory.collect(clock.monotonic_ns()) == 0


@pytest.mark.spec("DRV-17-35")
def test_no_epoch_is_removed_before_its_age(shm_dir: Path, clock: ManualClock) -> None:
    """Counted from the moment it was replaced: consumers get time to move on."""
    with memory_in(shm_dir, clock, epoch_gc_keep=1, epoch_gc_min_age_ns=1_000) as memory:
        first = create(memory)
        clock.advance(10_000)
        second = create(memory)
        clock.advance(500)
        third = create(memory)
        assert memory.collect(11_999) == 0
        assert memory.collect(12_000) == 1
        wait_for_files(memory, [second, third])
        assert memory.collect(12_499) == 0
        assert memory.collect(12_500) == 1
        wait_for_files(memory, [third])
        assert first < second < third


def test_a_young_epoch_is_not_counted_as_room_for_an_older_one(shm_dir: Path, clock: ManualClock) -> None:
    """Of two retired ones the older goes at its age though the younger has to wait for its own."""
    with memory_in(shm_dir, clock, epoch_gc_keep=2, epoch_gc_min_age_ns=1_000) as memory:
        create(memory)
        second = create(memory)
        clock.advance(1_000)
        third = create(memory)
        assert memory.collect(clock.monotonic_ns()) == 1
        wait_for_files(memory, [second, third])


def test_streams_are_collected_each_by_itself(shm_dir: Path, clock: ManualClock) -> None:
    """A busy stream does not cost another one its epochs."""
    with memory_in(shm_dir, clock, epoch_gc_min_age_ns=0) as memory:
        quiet = [create(memory, REAR), create(memory, REAR)]
        busy = [create(memory, FRONT) for _ in range(4)]
        assert memory.collect(clock.monotonic_ns()) == 2
        wait_for_files(memory, busy[-2:], FRONT)
        assert on_disk(memory, REAR) == quiet


@pytest.mark.spec("DRV-17-33")
def test_without_collection_everything_stays(shm_dir: Path, clock: ManualClock) -> None:
    """epoch_gc_enabled = false."""
    with memory_in(shm_dir, clock, epoch_gc_enabled=False, epoch_gc_min_age_ns=0) as memory:
        epochs = [create(memory) for _ in range(4)]
        assert memory.collect(10**18) == 0
        assert on_disk(memory) == epochs


def test_readers_keep_what_they_mapped(shm_dir: Path, clock: ManualClock) -> None:
    """A removed epoch loses its name, not its memory."""
    with memory_in(shm_dir, clock, epoch_gc_keep=1, epoch_gc_min_age_ns=0) as memory:
        memory.submit(CreateEpoch(FRONT, RING, True))
        outcome = next_outcome(memory)
        assert isinstance(outcome, Created)
        uris = [outcome.epoch.header_region_uri, *outcome.epoch.pool_region_uris]
        ring = map_ring(RING, uris, AllowedBases([shm_dir]), stream_id=FRONT, epoch=outcome.epoch.epoch)
        current = create(memory)
        memory.collect(clock.monotonic_ns())
        wait_for_files(memory, [current])
        ring.revalidate()
        del ring


def test_a_dropped_stream_keeps_nothing(shm_dir: Path, clock: ManualClock) -> None:
    """All its epochs go at their age, its activity grows stale at once, and its numbers are not used again."""
    with memory_in(shm_dir, clock, epoch_gc_keep=2, epoch_gc_min_age_ns=1_000) as memory:
        first, second = create(memory), create(memory)
        clock.advance(500)
        memory.drop(FRONT)
        memory.drop(REAR)  # has none
        clock.advance(500)
        memory.refresh_activity()
        assert superblock(f"{memory.path}/{FRONT}/{second}/header.ring")["activity_timestamp_ns"] == 1_000
        wait_until(lambda: mapped_files(shm_dir) == [], "a worker unmapped its epochs")
        assert memory.collect(2_000) == 1
        wait_for_files(memory, [second])
        assert memory.collect(2_500) == 1
        wait_for_files(memory, [])
        assert create(memory) == second + 1 == first + 2


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
from tests.driver.test_memory import create
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
