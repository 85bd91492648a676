# SPDX-License-Identifier: Apache-2.0
"""Regions: what is created can be mapped, what does not match cannot, and no failure leaves a trace."""

from __future__ import annotations

import gc
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorpool import _core
from tensorpool.errors import RegionRejected
from tensorpool.shm import (
    AllowedBases,
    Backing,
    Check,
    PoolSpec,
    Region,
    RegionSpec,
    RingSpec,
    map_region,
    region,
)
from tensorpool.wire.region_uri import RegionUri
from tests.shm.by_hand import (
    POOL,
    RING,
    folder,
    huge_page_bytes,
    mapped_files,
    mounted,
    pool_file,
    replace_bytes,
    resident_bytes,
    ring_file,
    umask,
    uri_of,
)
from tests.support.processes import run_script
from tests.support.region_bytes import superblock

RING_SPEC, POOL_SPEC = RingSpec(4, (PoolSpec(3, 128),)).regions(10000, 7)
SPARSE = Backing(reserve_space=False)


def create(
    path: Path,
    spec: RegionSpec = RING_SPEC,
    backing: Backing = SPARSE,
    *,
    hugepages: bool = False,
    **more: Any,
) -> Region:
    with folder(path.parent) as fd:
        uri = RegionUri(str(path), hugepages)
        return region.create_region(uri, spec, 1_000, dir_fd=fd, backing=backing, **more)


def pool_of(nslots: int, stride_bytes: int) -> RegionSpec:
    return RingSpec(nslots, (PoolSpec(3, stride_bytes),)).regions(10000, 7)[1]


# --- mapping


def test_a_foreign_region_is_mapped_read_only(shm_dir: Path, bases: AllowedBases) -> None:
    """A file laid out by hand maps, shows its superblock, and cannot be written."""
    mapped = map_region(ring_file(shm_dir / "r"), RING_SPEC, bases)
    assert mapped.activity_timestamp_ns == 2_000
    assert (mapped.pid, mapped.superblock.pid, mapped.superblock.epoch) == (4711, 4711, 7)
    assert len(mapped.mapping) == 64 + 4 * 256
    assert not mapped.mapping.is_writable
    with pytest.raises(ValueError, match="read-only"):
        mapped.refresh_activity(3_000)
    assert memoryview(mapped.mapping).readonly


def test_a_producer_maps_for_writing(shm_dir: Path, bases: AllowedBases) -> None:
    """What it writes is in the file."""
    mapped = map_region(pool_file(shm_dir / "p"), POOL_SPEC, bases, writable=True)
    memoryview(mapped.mapping)[64:68] = b"data"
    assert (shm_dir / "p").read_bytes()[64:68] == b"data"


@pytest.mark.parametrize(
    ("make", "spec", "changed", "text"),
    [
        (
            ring_file,
            RING_SPEC,
            {"magic": 1},
            "superblock: magic: expected 0x544f504c53484d31, found 0x0000000000000001",
        ),
        (ring_file, RING_SPEC, {"epoch": 8}, "superblock: epoch: expected 7, found 8"),
        (
            ring_file,
            RING_SPEC,
            {"region_type": 3},
            "superblock: ShmRegionSuperblock.region_type: 3 is refused",
        ),
        (pool_file, POOL_SPEC, {"stride_bytes": 64}, "superblock: stride_bytes: expected 128, found 64"),
        (pool_file, RING_SPEC, {}, "size: expected at least 1088 bytes, found 576"),
    ],
)
def test_a_rejected_region_leaves_nothing_mapped(
    shm_dir: Path,
    bases: AllowedBases,
    make: Callable[..., str],
    spec: RegionSpec,
    changed: dict[str, int],
    text: str,
) -> None:
    """The error says which file, which check and what differs; not even its traceback keeps a mapping."""
    uri = make(shm_dir / "r", **changed)
    with pytest.raises(RegionRejected) as caught:
        map_region(uri, spec, bases)
    assert str(caught.value).startswith(f"{uri}: {text}")
    assert mapped_files(shm_dir) == []


def test_a_uri_that_is_none_is_rejected_by_its_grammar(bases: AllowedBases) -> None:
    """The text goes to the parser first."""
    with pytest.raises(RegionRejected, match="only shm:file is supported"):
        map_region("file:///dev/shm/x", RING_SPEC, bases)


def test_a_region_stays_mapped_for_its_last_view(shm_dir: Path, bases: AllowedBases) -> None:
    """Unlinked, dropped, collected: an array over it still reads what was there, and frees it in the end."""
    uri = pool_file(shm_dir / "p")
    replace_bytes(shm_dir / "p", 64, b"\x05" * 128)
    mapped = map_region(uri, POOL_SPEC, bases)
    view = np.ndarray((128,), np.uint8, mapped.mapping, 64)
    (shm_dir / "p").unlink()
    del mapped
    gc.collect()
    assert len(mapped_files(shm_dir)) == 1
    assert view.sum() == 5 * 128
    del view
    assert mapped_files(shm_dir) == []


# --- revalidation


def test_an_untouched_region_stays_valid(shm_dir: Path, bases: AllowedBases) -> None:
    """Signs of life do not count as changes."""
    mapped = map_region(ring_file(shm_dir / "r"), RING_SPEC, bases)
    mapped.revalidate()
    replace_bytes(shm_dir / "r", 56, (9_000).to_bytes(8, "little"))
    mapped.revalidate()
    assert mapped.activity_timestamp_ns == 9_000


@pytest.mark.parametrize(
    ("offset", "data", "check", "text"),
    [
        (0, b"\0", "superblock", "magic: expected 0x544f504c53484d31, found 0x544f504c53484d00"),
        (12, b"\x08", "superblock", "epoch: expected 7, found 8"),
        (8, b"\x02", "superblock", "layout_version: expected 1, found 2"),
        (40, b"\x68\x12", "second writer", "pid: expected 4711, found 4712"),
    ],
)
def test_a_superblock_that_changes_is_noticed(
    shm_dir: Path, bases: AllowedBases, offset: int, data: bytes, check: str, text: str
) -> None:
    """Magic, epoch, layout and writer are checked again whenever asked."""
    mapped = map_region(ring_file(shm_dir / "r"), RING_SPEC, bases)
    replace_bytes(shm_dir / "r", offset, data)
    with pytest.raises(RegionRejected) as caught:
        mapped.revalidate()
    assert (caught.value.check, caught.value.detail) == (check, text)


# --- creation


@pytest.mark.parametrize("backing", [SPARSE, Backing(), Backing(prefault=True), Backing(mlock=True)])
@pytest.mark.parametrize(("spec", "fields"), [(RING_SPEC, RING), (POOL_SPEC, POOL)], ids=["ring", "pool"])
def test_a_created_region_is_zeroed_and_carries_its_superblock(
    shm_dir: Path, bases: AllowedBases, spec: RegionSpec, fields: dict[str, int], backing: Backing
) -> None:
    """The file holds the superblock, then zeros, and others map it at once."""
    path = shm_dir / "r"
    created = create(path, spec, backing)
    assert superblock(path) == fields | {"pid": os.getpid(), "activity_timestamp_ns": 1_000}
    assert path.read_bytes()[64:] == bytes(spec.size_bytes - 64)
    assert path.stat().st_size == spec.size_bytes
    assert created.uri == uri_of(path)
    assert created.mapping.is_writable
    other = map_region(created.uri, spec, bases)
    created.refresh_activity(5_000)
    assert other.activity_timestamp_ns == 5_000


def test_reserved_space_is_taken_at_once_and_sparse_space_as_it_is_used(shm_dir: Path) -> None:
    """A producer's region has all its blocks; one without a producer has those of its superblock."""
    spec = pool_of(256, 1 << 16)
    reserved, sparse = create(shm_dir / "a", spec, Backing()), create(shm_dir / "b", spec)
    assert (shm_dir / "a").stat().st_blocks * 512 >= spec.size_bytes
    assert (shm_dir / "b").stat().st_blocks * 512 <= 1 << 14
    assert len(reserved.mapping) == len(sparse.mapping) == spec.size_bytes


def test_prefaulting_brings_every_page_in(shm_dir: Path) -> None:
    """The first write into each page then costs nothing; without, only the superblock's page is there."""
    spec = pool_of(256, 1 << 12)
    plain = create(shm_dir / "a", spec, Backing())
    assert resident_bytes(shm_dir) < 1 << 19
    del plain
    prefaulted = create(shm_dir / "b", spec, Backing(prefault=True))
    assert resident_bytes(shm_dir) >= len(prefaulted.mapping)


def test_a_large_prefaulted_region_lies_in_huge_pages_wherever_it_is_mapped(shm_dir: Path, bases: AllowedBases) -> None:
    """As far as the kernel has any: for its creator and for a reader that maps it later."""
    spec = pool_of(8, 1 << 20)
    whole = spec.size_bytes // huge_page_bytes() * huge_page_bytes() if huge_page_bytes() else 0
    created = create(shm_dir / "r", spec, Backing(prefault=True))
    taken = resident_bytes(shm_dir, "ShmemPmdMapped")
    assert taken <= whole
    assert (taken > 0) is (whole > 0)
    assert (shm_dir / "r").stat().st_blocks * 512 >= (shm_dir / "r").stat().st_size == spec.size_bytes
    assert not np.frombuffer(created.mapping, np.uint8)[64:].any()
    mapped = map_region(uri_of(shm_dir / "r"), spec, bases)
    mapped.mapping.prefault()
    assert resident_bytes(shm_dir, "ShmemPmdMapped") == 2 * taken


def test_regions_that_are_not_prefaulted_take_no_huge_pages(shm_dir: Path) -> None:
    """Theirs are brought in one by one, as they are used."""
    regions = [
        create(shm_dir / name, pool_of(8, 1 << 20), backing) for name, backing in [("a", SPARSE), ("b", Backing())]
    ]
    assert resident_bytes(shm_dir, "ShmemPmdMapped") == 0
    assert resident_bytes(shm_dir) <= len(regions) << 16


WITHOUT_HUGE_PAGES = """
import ctypes, sys
from pathlib import Path
from tensorpool.shm import Backing
from tests.shm.by_hand import resident_bytes
from tests.shm.test_region import create, pool_of

PR_SET_THP_DISABLE = 41
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
below = Path(sys.argv[1])
region = create(below / "r", pool_of(8, 1 << 20), Backing(prefault=True))
print(resident_bytes(below, "ShmemPmdMapped"), resident_bytes(below) >= region.spec.size_bytes)
"""


def test_huge_pages_are_a_wish(shm_dir: Path) -> None:
    """Where the kernel gives none, the region is reserved and prefaulted all the same."""
    assert run_script(WITHOUT_HUGE_PAGES, str(shm_dir)) == (0, "0 True\n")


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o777])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o660])
def test_the_mode_is_exact_whatever_the_umask(shm_dir: Path, mask: int, mode: int) -> None:
    """fchmod, not the mode of open, decides."""
    with umask(mask):
        create(shm_dir / "r", mode=mode)
    assert stat.S_IMODE((shm_dir / "r").stat().st_mode) == mode


@pytest.mark.spec("WIRE-15.14-04")
def test_the_magic_is_stored_last_and_then_synced(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the magic appears the other fields are there; before, a reader sees no region at all. fsync comes after."""
    path = shm_dir / "r"
    seen: list[tuple[int | str, dict[str, int]]] = []

    class Witness:
        def __init__(self, fd: int, length: int, *, writable: bool) -> None:
            self._mapping = _core.Mapping(fd, length, writable=writable)

        def __buffer__(self, flags: int) -> memoryview:
            return memoryview(self._mapping)

        def store_u64(self, offset: int, value: int) -> None:
            seen.append((offset, superblock(path)))
            self._mapping.store_u64(offset, value)
            seen.append((offset, superblock(path)))

    monkeypatch.setattr(region, "Mapping", Witness)
    monkeypatch.setattr("tensorpool.shm.region.os.fsync", lambda fd: seen.append(("fsync", superblock(path))))
    create(path)
    complete = RING | {"pid": os.getpid(), "activity_timestamp_ns": 1_000}
    assert seen == [(0, complete | {"magic": 0}), (0, complete), ("fsync", complete)]


@pytest.mark.spec("DRV-9-03")
def test_a_file_that_exists_is_never_taken_over(shm_dir: Path) -> None:
    """No file, link or FIFO is followed, opened, changed or removed."""
    (shm_dir / "r").write_bytes(b"theirs")
    (shm_dir / "link").symlink_to(shm_dir / "elsewhere")
    os.mkfifo(shm_dir / "fifo")
    for name in ("r", "link", "fifo"):
        with pytest.raises(RegionRejected, match="create: File exists"):
            create(shm_dir / name)
    assert (shm_dir / "r").read_bytes() == b"theirs"
    assert (shm_dir / "fifo").is_fifo()
    assert not (shm_dir / "elsewhere").exists()


def test_a_full_tmpfs_is_a_bill_not_a_signal(shm_dir: Path) -> None:
    """64 MiB mounted, 128 MiB asked for: refused with needed, free, mount and remedy; all is given back."""
    spec = pool_of(1 << 10, 1 << 17)
    with mounted(shm_dir / "small", "tmpfs", "size=64m") as small:
        free = os.statvfs(small).f_bfree
        with pytest.raises(RegionRejected) as caught:
            create(small / "1.pool", spec, Backing(prefault=True))
        assert caught.value.check == Check.SPACE
        assert caught.value.detail == (
            f"needs 134217792 bytes (128.0 MiB), {small} has 67108864 bytes (64.0 MiB) free of "
            f"67108864 bytes (64.0 MiB); enlarge it (mount -o remount,size=129m {small}; "
            "for Docker's /dev/shm --shm-size=129m), or ask for fewer slots or smaller strides"
        )
        assert list(small.iterdir()) == []
        assert os.statvfs(small).f_bfree == free
        create(small / "1.pool", spec)  # sparse: takes nothing until it is used


def test_a_failure_after_mapping_gives_everything_back(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file, no blocks and no mapping remain, though the exception is kept."""

    def fail(fd: int) -> None:
        raise OSError(5, "disk on fire")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RegionRejected, match="create: disk on fire") as caught:
        create(shm_dir / "r", backing=Backing(prefault=True))
    assert mapped_files(shm_dir) == []
    assert list(shm_dir.iterdir()) == []
    assert caught.value.__cause__ is not None


def test_an_interrupt_while_creating_leaves_no_file(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C passes through, after the cleaning up."""

    def interrupt(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        create(shm_dir / "r")
    assert list(shm_dir.iterdir()) == []


def test_huge_pages_are_demanded_of_the_mount(shm_dir: Path) -> None:
    """Refused off hugetlbfs; on it sizes are whole pages, and too few pages are a bill in pages."""
    with pytest.raises(RegionRejected, match=r"require_hugepages: shm\.base_dir is not on hugetlbfs"):
        create(shm_dir / "r", hugepages=True)
    assert list(shm_dir.iterdir()) == []
    spec = pool_of(1 << 20, 1 << 20)  # a TiB and a superblock: more pages than any machine has reserved
    with mounted(shm_dir / "huge", "hugetlbfs") as huge:
        page = os.statvfs(huge).f_bsize
        pages = (1 << 40) // page + 1
        with pytest.raises(RegionRejected, match=f"space: needs {pages} huge pages of .* raise vm.nr_hugepages"):
            create(huge / "r", spec, Backing(), hugepages=True)
        assert list(huge.iterdir()) == []


LOCKING = """
import os, resource, sys
from tensorpool.errors import RegionRejected
from tensorpool.shm import Backing, PoolSpec, RingSpec, create_region
from tensorpool.wire.region_uri import RegionUri
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
os.setgid(65534)
os.setuid(65534)
for directory, backing in ((sys.argv[1], Backing(mlock=True)), (sys.argv[2], Backing())):
    fd = os.open(directory, os.O_PATH)
    spec = RingSpec(1024, (PoolSpec(1, 64),)).regions(1, 1)[0]
    try:
        create_region(RegionUri(directory + "/r"), spec, 1, dir_fd=fd, backing=backing)
    except RegionRejected as rejected:
        print(rejected.check, rejected.detail, sep=": ")
"""


def test_limits_of_the_account_are_explained(shm_dir: Path) -> None:
    """mlock beyond the limit, and a directory that we may not write to, say so and leave nothing."""
    shm_dir.chmod(0o755)
    theirs, ours = shm_dir / "theirs", shm_dir / "ours"
    theirs.mkdir(mode=0o755)
    ours.mkdir()
    os.chown(ours, 65534, 65534)
    code, output = run_script(LOCKING, str(ours), str(theirs))
    mlock, permission = output.splitlines()
    assert code == 0
    assert mlock == "mlock: Cannot allocate memory; raise `ulimit -l`, or set policies.mlock_shm = false"
    assert permission.startswith(f"permission: this process may not read and write {theirs}: it runs as nobody")
    assert list(ours.iterdir()) == []
