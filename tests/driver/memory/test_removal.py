# SPDX-License-Identifier: Apache-2.0
"""How long epochs stay: refreshed while they are used, removed by policy afterwards."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tensorpool.clock import ManualClock
from tensorpool.driver.effects import CreateEpoch
from tensorpool.driver.memory import Created, Memory
from tensorpool.shm import AllowedBases, map_ring
from tests.driver.conftest import FRONT, REAR, RING, driver_config
from tests.driver.memory.conftest import SEED, create, memory_in, next_outcome, on_disk, wait_for_files
from tests.shm.by_hand import mapped_files
from tests.support.processes import wait_until
from tests.support.region_bytes import superblock

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
