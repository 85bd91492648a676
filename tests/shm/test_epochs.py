# SPDX-License-Identifier: Apache-2.0
"""Epochs: created whole, numbered upwards whatever happened before, retired without a trace."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tensorpool.clock import ManualClock
from tensorpool.errors import Closed, ConfigError, LocalProtocolError, RegionRejected
from tensorpool.shm import (
    AllowedBases,
    Check,
    EpochTree,
    PoolSpec,
    RingSpec,
    map_ring,
    region,
    scan_epochs,
    space,
)
from tests.shm.by_hand import mapped_files, mounted, ring_file, umask
from tests.support.processes import run_script
from tests.support.region_bytes import superblock

SPEC = RingSpec(4, (PoolSpec(3, 128), PoolSpec(9, 64)))
SEED = 1_800_000_000_000_000_000


@pytest.fixture
def tree(shm_dir: Path) -> Iterator[EpochTree]:
    with EpochTree.open(str(shm_dir), clock=ManualClock(1_000, SEED)) as tree:
        yield tree


def names(path: str | Path) -> list[str]:
    """Everything below a directory, but for the lock and the record of the highest epoch."""
    below = sorted(str(entry.relative_to(path)) for entry in Path(path).rglob("*"))
    return [name for name in below if name != "driver.lock" and not name.startswith("highest-epoch.")]


def reopened(tree: EpochTree, realtime_ns: int = SEED) -> EpochTree:
    tree.close()
    return EpochTree(tree.path, clock=ManualClock(0, realtime_ns))


# --- creation


def test_an_epoch_is_a_directory_with_a_file_per_region(tree: EpochTree, shm_dir: Path) -> None:
    """The canonical layout, and URIs that name it."""
    ring = tree.create(10000, 7, SPEC, 5_000)
    folder = f"{shm_dir}/tensorpool-root/default/10000/7"
    assert [region.uri for region in ring.regions] == [
        f"shm:file?path={folder}/header.ring",
        f"shm:file?path={folder}/3.pool",
        f"shm:file?path={folder}/9.pool",
    ]
    assert names(folder) == ["3.pool", "9.pool", "header.ring"]
    assert (ring.stream_id, ring.epoch, ring.layout_version, ring.spec) == (10000, 7, 1, SPEC)
    found = superblock(f"{folder}/9.pool")
    assert (found["epoch"], found["pool_id"], found["nslots"], found["start_timestamp_ns"]) == (
        7,
        9,
        4,
        5_000,
    )


def test_others_map_what_was_created(tree: EpochTree, bases: AllowedBases) -> None:
    """Announced as URIs, mapped by the consumer's own checks."""
    ring = tree.create(10000, 7, SPEC, 5_000, layout_version=4, prefault=True)
    uris = [region.uri for region in ring.regions]
    other = map_ring(SPEC, uris, bases, stream_id=10000, epoch=7, layout_version=4)
    ring.refresh_activity(6_000)
    assert other.activity_timestamp_ns == 6_000


@pytest.mark.parametrize(("file_mode", "files", "directories"), [(0o660, "660", "2750"), (0o600, "600", "700")])
def test_modes_are_exact_whatever_the_umask(shm_dir: Path, file_mode: int, files: str, directories: str) -> None:
    """Files get the mode, directories the one that suits it."""
    with umask(0o777), EpochTree.open(str(shm_dir), clock=ManualClock(), file_mode=file_mode) as tree:
        tree.create(10000, 7, SPEC, 1)
    stream = Path(tree.path) / "10000"
    modes = [f"{stat.S_IMODE(path.stat().st_mode):o}" for path in (stream, stream / "7")]
    assert modes == [directories, directories]
    assert {f"{stat.S_IMODE(path.stat().st_mode):o}" for path in (stream / "7").iterdir()} == {files}


def test_an_epoch_that_exists_is_never_reused(tree: EpochTree) -> None:
    """The files of an epoch have one life."""
    tree.create(10000, 7, SPEC, 1)
    with pytest.raises(RegionRejected, match="create: File exists"):
        tree.create(10000, 7, SPEC, 2)
    assert superblock(f"{tree.path}/10000/7/header.ring")["start_timestamp_ns"] == 1


def test_a_failure_halfway_leaves_nothing(tree: EpochTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last file fails: no file, no directory and no mapping remain, though the exception is kept."""
    real, calls = space.reserve, 0

    def fail_at_last(fd: int, size_bytes: int, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(28, "full by now")
        real(fd, size_bytes, **options)

    monkeypatch.setattr(region, "reserve", fail_at_last)
    with pytest.raises(RegionRejected) as caught:
        tree.create(10000, 7, SPEC, 1)
    assert caught.value.check == Check.SPACE
    assert caught.value.uri.endswith("/10000/7/header.ring")
    assert names(tree.path) == ["10000"]
    assert mapped_files(Path(tree.path)) == []


def test_the_bill_is_presented_before_anything_is_created(shm_dir: Path) -> None:
    """128 MiB on a mount of 64: needed, free and remedy; a sparse epoch of the same size is welcome."""
    spec = RingSpec(1024, (PoolSpec(1, 1 << 16), PoolSpec(2, 1 << 16)))
    with (
        mounted(shm_dir / "small", "tmpfs", "size=64m") as small,
        EpochTree.open(str(small), clock=ManualClock()) as tree,
    ):
        with pytest.raises(RegionRejected) as caught:
            tree.create(10000, 7, spec, 1, prefault=True)
        assert caught.value.check == Check.SPACE
        assert "needs 134492160 bytes (128.3 MiB)" in caught.value.detail
        assert f"{small} has 67104768 bytes" in caught.value.detail
        assert "remount,size=129m" in caught.value.detail
        assert names(tree.path) == []
        tree.create(10000, 8, spec, 1, reserve_space=False)
        tree.remove(10000, 8)


def test_running_out_of_inodes_is_a_refusal_too(shm_dir: Path) -> None:
    """Whatever the system lacks, the error is ours and names the region."""
    options = "size=8m,nr_inodes=6"
    with (
        mounted(shm_dir / "small", "tmpfs", options) as small,
        EpochTree.open(str(small), clock=ManualClock()) as tree,
    ):
        with pytest.raises(RegionRejected, match=r"space: .* has no inode left"):
            tree.create(10000, 7, SPEC, 1)
        assert names(tree.path) == ["10000"]


def test_a_stream_directory_of_another_user_is_refused(tree: EpochTree) -> None:
    """The refusal names the owner."""
    Path(tree.path, "10000").mkdir()
    os.chown(Path(tree.path, "10000"), 65534, 65534)
    with pytest.raises(RegionRejected, match="create: it belongs to nobody, who could replace our files"):
        tree.create(10000, 8, SPEC, 1)


def test_a_planted_link_in_the_place_of_a_stream_is_not_followed(tree: EpochTree, shm_dir: Path) -> None:
    """Neither to create nor to remove."""
    (shm_dir / "elsewhere" / "7").mkdir(parents=True)
    Path(tree.path, "10000").symlink_to(shm_dir / "elsewhere")
    with pytest.raises(RegionRejected, match="create: Not a directory"):
        tree.create(10000, 8, SPEC, 1)
    with pytest.raises(NotADirectoryError):
        tree.remove(10000, 7)
    assert names(shm_dir / "elsewhere") == ["7"]


# --- numbering


def test_a_stream_without_history_starts_at_the_wall_clock(tree: EpochTree) -> None:
    """Then counts up, each stream by itself."""
    assert [tree.next_epoch(1), tree.next_epoch(1), tree.next_epoch(2)] == [SEED, SEED + 1, SEED]


def test_epochs_grow_across_restarts_though_the_wall_clock_was_set_back(tree: EpochTree) -> None:
    """What is on disk counts more than the clock."""
    tree.create(1, tree.next_epoch(1), SPEC, 1)
    with reopened(tree, realtime_ns=5) as again:
        assert again.next_epoch(1) == SEED + 1


def test_epochs_grow_after_the_last_directory_was_removed(tree: EpochTree) -> None:
    """Removal does not make a driver forget, nor does a number that was never created."""
    tree.create(1, 50, SPEC, 1)
    tree.remove(1, 50)
    assert tree.next_epoch(1) == 51
    tree.remove(1, 90)
    assert tree.next_epoch(1) == 91


def test_an_epoch_given_by_hand_is_remembered(tree: EpochTree) -> None:
    """A driver that creates 50 gets 51 next."""
    tree.create(1, 50, SPEC, 1)
    assert tree.next_epoch(1) == 51


def test_superblocks_retired_and_unfinished_epochs_all_count(tree: EpochTree) -> None:
    """Whatever tells of a higher epoch of that stream is believed."""
    found = [("1/40", 1, 60), ("2/.70.retired", 2, 5), ("3/80", 3, None), ("4/90", 3, 95), ("5/9", 5, 2**64 - 1)]
    for name, stream_id, epoch in found:
        path = Path(tree.path, name)
        path.mkdir(parents=True)
        if epoch is not None:
            ring_file(path / "header.ring", stream_id=stream_id, epoch=epoch)
    with reopened(tree) as again:
        assert [again.next_epoch(stream) for stream in (1, 2, 3, 4, 5)] == [61, 71, 81, 91, 10]


def test_a_stream_whose_epochs_are_used_up_says_so(tree: EpochTree) -> None:
    """2^64 - 2 is the last one; it would take a forged directory to get there."""
    Path(tree.path, "1", str(2**64 - 2)).mkdir(parents=True)
    with reopened(tree) as again, pytest.raises(LocalProtocolError, match="stream 1 has used up its epochs"):
        again.next_epoch(1)


def test_a_clock_at_zero_still_gives_an_epoch(shm_dir: Path) -> None:
    """0 is no epoch."""
    with EpochTree.open(str(shm_dir), clock=ManualClock()) as tree:
        assert tree.next_epoch(1) == 1


@pytest.mark.spec("DRV-10-02")
def test_epochs_grow_after_a_clean_stop_though_the_wall_clock_was_set_back(tree: EpochTree) -> None:
    """No directory is left: the record alone tells, also of a stream whose highest number was below another's."""
    tree.create(1, tree.next_epoch(1), SPEC, 1)
    tree.create(2, SEED + 70, SPEC, 1)
    for stream_id, epoch in ((1, SEED), (2, SEED + 70)):
        tree.remove(stream_id, epoch)
    with reopened(tree, realtime_ns=5) as again:
        assert names(again.path) == []
        assert [again.next_epoch(1), again.next_epoch(2), again.next_epoch(1)] == [SEED + 71, SEED + 71, SEED + 72]


def test_a_clock_that_went_on_counts_more_than_the_record(tree: EpochTree) -> None:
    """Epochs stay near the wall clock, as C2 has them."""
    tree.create(1, tree.next_epoch(1), SPEC, 1)
    tree.remove(1, SEED)
    with reopened(tree, realtime_ns=SEED + 10_000) as again:
        assert again.next_epoch(1) == SEED + 10_000


def test_the_record_is_one_empty_file_however_many_streams_come_and_go(tree: EpochTree) -> None:
    """It is raised before the epoch's directory is there, and never lowered."""
    for stream_id in range(1, 20):
        tree.create(stream_id, 100 - stream_id, SPEC, 1)
        tree.remove(stream_id, 100 - stream_id)
    tree.close()
    (record,) = os.listdir(tree.path)
    assert record == "highest-epoch.99"
    assert Path(tree.path, record).stat().st_size == 0


def test_the_record_is_raised_where_there_is_no_room_for_anything_else(shm_dir: Path) -> None:
    """A rename needs no space and no inode: removal goes on, and what was given is not given again."""
    with (
        mounted(shm_dir / "small", "tmpfs", "size=1m,nr_inodes=12") as small,
        EpochTree.open(str(small), clock=ManualClock()) as tree,
    ):
        tree.create(1, 50, SPEC, 1)
        with (small / "hog").open("wb", buffering=0) as hog, contextlib.suppress(OSError):
            while True:
                hog.write(bytes(4096))
        assert os.statvfs(small).f_bavail == 0
        tree.remove(1, 60)
        assert [name for name in os.listdir(tree.path) if name.startswith("highest")] == ["highest-epoch.60"]


@pytest.mark.parametrize("name", ["", "x", "0", "07", "-1", ".7.retired", str(2**64 - 1)])
def test_a_record_that_cannot_be_read_is_refused(tree: EpochTree, name: str) -> None:
    """Fail closed: to go on without it could give an epoch twice."""
    tree.close()
    Path(tree.path, f"highest-epoch.{name}").touch()
    with pytest.raises(ConfigError, match=r"highest-epoch\..* does not; remove it"):
        EpochTree(tree.path, clock=ManualClock())
    Path(tree.path, f"highest-epoch.{name}").unlink()
    EpochTree(tree.path, clock=ManualClock()).close()


# --- scanning


def test_a_scan_finds_every_epoch_and_its_superblock(tree: EpochTree) -> None:
    """Sorted by number, not by name."""
    for stream_id, epoch in ((10, 9), (10, 100), (9, 3)):
        tree.create(stream_id, epoch, SPEC, epoch)
    found = tree.scan()
    assert [(epoch.stream_id, epoch.epoch, epoch.is_retired) for epoch in found] == [
        (9, 3, False),
        (10, 9, False),
        (10, 100, False),
    ]
    assert [epoch.path for epoch in found][-1] == f"{tree.path}/10/100"
    assert [epoch.superblock.start_timestamp_ns for epoch in found if epoch.superblock] == [3, 9, 100]
    assert [epoch.superblock.pid for epoch in found if epoch.superblock] == [os.getpid()] * 3


def test_a_scan_passes_over_garbage(tree: EpochTree, shm_dir: Path) -> None:
    """Names that are no number, files in the place of directories, links, and superblocks that are none."""
    root = Path(tree.path)
    for name in (
        "0",
        "01",
        "-1",
        "+1",
        "1e3",
        "٣",
        "x",
        "10/07",
        "10/ 7",
        "10/.7",
        "10/7.retired",
        "99999999999",
    ):
        (root / name).mkdir(parents=True)
    (root / "11").touch()
    (root / "12").symlink_to(shm_dir)
    (root / "10" / "8").touch()
    (root / "10" / "9").symlink_to(shm_dir)
    (root / "10" / str(2**64 - 1)).mkdir()
    for epoch, content in (("1", b""), ("2", bytes(64)), ("3", b"x" * 64)):
        (root / "10" / epoch).mkdir()
        (root / "10" / epoch / "header.ring").write_bytes(content)
    (root / "10" / "4").mkdir()
    os.mkfifo(root / "10" / "4" / "header.ring")
    (root / "10" / "5").mkdir()
    ring_file(shm_dir / "sound", epoch=99)
    (root / "10" / "5" / "header.ring").symlink_to(shm_dir / "sound")
    before = names(root)
    found = tree.scan()
    assert [(epoch.stream_id, epoch.epoch, epoch.superblock) for epoch in found] == [
        (10, epoch, None) for epoch in (1, 2, 3, 4, 5)
    ]
    assert names(root) == before


def test_every_process_may_scan_a_namespace(tree: EpochTree) -> None:
    """Without its lock, and without changing it."""
    tree.create(1, 2, SPEC, 3)
    assert scan_epochs(tree.path) == tree.scan()
    with pytest.raises(OSError, match="No such file"):
        scan_epochs(tree.path + "/missing")


# --- removal


def test_a_removed_epoch_is_gone_and_its_readers_keep_it(tree: EpochTree, bases: AllowedBases) -> None:
    """Unlinked, not unmapped; removing it again changes nothing."""
    ring = tree.create(1, 2, SPEC, 3)
    other = map_ring(SPEC, [region.uri for region in ring.regions], bases, stream_id=1, epoch=2)
    tree.create(1, 3, SPEC, 3)
    tree.remove(1, 2)
    assert names(f"{tree.path}/1") == ["3", "3/3.pool", "3/9.pool", "3/header.ring"]
    other.revalidate()
    tree.remove(1, 2)
    tree.remove(77, 1)
    assert [epoch.epoch for epoch in tree.scan()] == [3]


def test_an_epoch_disappears_in_one_step(tree: EpochTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """When its first file goes its directory is already out of sight."""
    tree.create(1, 2, SPEC, 3)
    real, seen = os.unlink, []

    def unlinking(path: Any, **arguments: Any) -> None:
        seen.append((path, names(f"{tree.path}/1")[0]))
        real(path, **arguments)

    monkeypatch.setattr(os, "unlink", unlinking)
    tree.remove(1, 2)
    assert sorted(path for path, _ in seen) == ["3.pool", "9.pool", "header.ring"]
    assert {first for _, first in seen} == {".2.retired"}


def test_an_interrupted_removal_is_finished_by_the_next(tree: EpochTree) -> None:
    """A retired directory shows up in scans and goes with the epoch's removal."""
    tree.create(1, 2, SPEC, 3)
    Path(tree.path, "1", "2").rename(Path(tree.path, "1", ".2.retired"))
    assert [(epoch.epoch, epoch.is_retired) for epoch in tree.scan()] == [(2, True)]
    tree.remove(1, 2)
    assert names(tree.path) == ["1"]


def test_removal_follows_no_link_and_takes_whatever_is_inside(tree: EpochTree, shm_dir: Path) -> None:
    """Links in and instead of an epoch are removed; what they lead to is not."""
    kept = shm_dir / "kept"
    kept.mkdir()
    (kept / "file").touch()
    stream = Path(tree.path, "1")
    (stream / "5" / "nested" / "deep").mkdir(parents=True)
    (stream / "5" / "link").symlink_to(kept)
    (stream / "6").symlink_to(kept)
    (stream / "7").touch()
    for epoch in (5, 6, 7):
        tree.remove(1, epoch)
    assert names(tree.path) == ["1"]
    assert names(kept) == ["file"]


def test_several_may_remove_the_same_epoch_at_once(tree: EpochTree) -> None:
    """Each call succeeds, whichever process comes first."""
    failures: list[BaseException] = []

    def remove_all(start: threading.Barrier) -> None:
        try:
            for epoch in range(1, 31):
                start.wait()
                tree.remove(1, epoch)
        except BaseException as error:
            failures.append(error)
            start.abort()

    for epoch in range(1, 31):
        tree.create(1, epoch, SPEC, 1, reserve_space=False)
    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=remove_all, args=(barrier,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert names(tree.path) == ["1"]


# --- ownership


def test_a_tree_has_one_driver(tree: EpochTree) -> None:
    """The second learns which process the first is; a failed opening leaves nothing open."""
    with pytest.raises(ConfigError, match=rf"shm\.namespace = 'default' .* pid {os.getpid()} holds"):
        EpochTree(tree.path, clock=ManualClock())


def test_closing_frees_the_namespace_and_keeps_the_epochs(tree: EpochTree) -> None:
    """Empty streams go, the lock goes, the rest tells the next driver where to go on."""
    tree.create(1, 2, SPEC, 3)
    tree.create(5, 6, SPEC, 3)
    tree.remove(5, 6)
    tree.close()
    tree.close()
    assert sorted(os.listdir(tree.path)) == ["1", "highest-epoch.6"]
    for use in (lambda: tree.create(1, 3, SPEC, 1), lambda: tree.remove(1, 2)):
        with pytest.raises(Closed):
            use()


def test_an_epoch_may_be_created_beside_the_duty_cycle(tree: EpochTree) -> None:
    """Creating on one thread while another removes what is complete, and counts, on the same stream."""
    failures: list[BaseException] = []

    def create_many() -> None:
        try:
            for epoch in range(1000, 1060):
                tree.create(1, epoch, SPEC, 1, reserve_space=False)
        except BaseException as error:
            failures.append(error)

    creator = threading.Thread(target=create_many)
    creator.start()
    while creator.is_alive():
        for found in tree.scan():
            if found.superblock is not None:
                tree.remove(1, found.epoch)
        tree.next_epoch(2)
    creator.join()
    for found in tree.scan():
        tree.remove(1, found.epoch)
    assert failures == []
    assert names(tree.path) == ["1"]


# A driver that creates and retires as fast as it can is killed at a random instant; the next one takes over,
# finds what was left, goes on with a higher epoch and cleans up.
KILLED = """
import os, random, signal, sys, time
from tensorpool.clock import SystemClock
from tensorpool.shm import EpochTree, PoolSpec, RingSpec
spec = RingSpec(16, (PoolSpec(1, 64), PoolSpec(2, 4096)))
seed = random.SystemRandom().getrandbits(32)
print("seed", seed)
rng = random.Random(seed)
highest, has_record = 0, False
for _ in range(60):
    ready, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        tree = EpochTree.open(sys.argv[1], clock=SystemClock())
        os.write(write_end, b"x")
        while True:
            epoch = tree.next_epoch(7)
            tree.create(7, epoch, spec, time.monotonic_ns())
            tree.remove(7, epoch - 1)
    os.read(ready, 1)
    os.close(ready), os.close(write_end)
    time.sleep(rng.random() * 0.004)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with EpochTree.open(sys.argv[1], clock=SystemClock()) as tree:
        found = tree.scan()
        epoch = tree.next_epoch(7)
        assert epoch > max([highest, *(each.epoch for each in found)]), (epoch, highest, found)
        highest = epoch
        for each in found:
            tree.remove(each.stream_id, each.epoch)
    left = [name for _, folders, files in os.walk(tree.path) for name in folders + files]
    if not left and not found and not has_record:
        continue  # killed before it had an epoch
    (record,) = left
    has_record = True
    assert int(record.removeprefix("highest-epoch.")) >= max([0, *(each.epoch for each in found)]), (record, found)
print("done")
"""


def test_drivers_killed_at_random_instants_leave_nothing_that_the_next_cannot_mend(shm_dir: Path) -> None:
    """No lock, no file but the record, and no lower epoch survives a SIGKILL."""
    code, output = run_script(KILLED, str(shm_dir))
    assert (code, output.splitlines()[-1]) == (0, "done"), output


def test_epochs_never_repeat_while_others_are_removed(shm_dir: Path) -> None:
    """Creation and removal run on several threads; the number of a stream only grows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with EpochTree.open(str(shm_dir), clock=ManualClock(0, 1)) as tree, ThreadPoolExecutor(2) as pool:
            is_over = threading.Event()
            removals = pool.submit(remove_until, is_over, tree)
            epochs = [tree.next_epoch(7) for _ in range(1_000)]
            is_over.set()
            assert removals.result() > 0
    finally:
        sys.setswitchinterval(interval)
    assert all(later == earlier + 1 for earlier, later in itertools.pairwise(epochs))


def remove_until(is_over: threading.Event, tree: EpochTree) -> int:
    """Remove an epoch again and again; how often."""
    count = 0
    while not is_over.is_set():
        tree.remove(7, 1)
        count += 1
    return count
