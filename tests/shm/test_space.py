# SPDX-License-Identifier: Apache-2.0
"""Space: the bill is compared with what the mount really has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensorpool import shm
from tensorpool.errors import RegionRejected
from tensorpool.shm import PoolSpec, RingSpec, space
from tests.shm.by_hand import folder, mounted

EIGHT_MIB = RingSpec(64, (PoolSpec(1, 1 << 16), PoolSpec(2, 1 << 16))).regions(1, 1)


def test_the_bill_is_for_all_regions_together(shm_dir: Path) -> None:
    """Each of the pools alone would fit; whole pages are counted."""
    with mounted(shm_dir / "small", "tmpfs", "size=8m") as small, folder(small) as fd:
        needed = 20480 + 2 * ((4 << 20) + 4096)
        with pytest.raises(RegionRejected, match=rf"space: needs {needed} bytes .*, {small} has 8388608 bytes"):
            space.require_space("uri", fd, str(small), EIGHT_MIB)
        space.require_space("uri", fd, str(small), EIGHT_MIB[:2])


def test_a_mount_without_a_limit_is_not_refused(shm_dir: Path) -> None:
    """tmpfs with size=0 reports no blocks at all, which does not mean that it is full."""
    with mounted(shm_dir / "boundless", "tmpfs", "size=0") as boundless, folder(boundless) as fd:
        assert os.fstatvfs(fd).f_blocks == 0
        assert shm.mount_space(str(boundless)) == shm.MountSpace(str(boundless), None, None)
        space.require_space("uri", fd, str(boundless), EIGHT_MIB)


def test_a_mount_without_inodes_says_so(shm_dir: Path) -> None:
    """Space left and no inode: the remedy is another one."""
    with mounted(shm_dir / "few", "tmpfs", "size=8m,nr_inodes=2") as few, folder(few) as fd:
        (few / "last").touch()
        refused = space.space_refused("uri", fd, str(few), 1)
        assert f"{few} has no inode left; remove files, or mount -o remount,nr_inodes" in refused.detail


def test_the_space_of_a_mount_is_reported_for_paths_that_do_not_exist_yet(shm_dir: Path) -> None:
    """A bill can be checked before the first directory exists."""
    with mounted(shm_dir / "small", "tmpfs", "size=8m") as small:
        (small / "x").write_bytes(bytes(4096))
        found = shm.mount_space(f"{small}/not/yet")
        assert found == shm.MountSpace(str(small), 8 << 20, (8 << 20) - 4096)


def test_the_mount_point_is_found_from_below(shm_dir: Path) -> None:
    """The nearest mount above a directory, itself included."""
    with mounted(shm_dir / "a", "tmpfs") as at:
        (at / "b" / "c").mkdir(parents=True)
        assert space.mount_point(str(at / "b" / "c")) == str(at)
        assert space.mount_point(str(at)) == str(at)
    assert space.mount_point(str(shm_dir)) == "/dev/shm"


def test_space_is_reserved_in_steps_without_a_gap(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may undo one step, never all of them."""
    real, steps = os.posix_fallocate, []

    def reserving(fd: int, start: int, size: int) -> None:
        steps.append((start, size))
        real(fd, start, size)

    monkeypatch.setattr(os, "posix_fallocate", reserving)
    with open(shm_dir / "r", "wb") as file:
        space.reserve(file.fileno(), (40 << 20) + 1)
        assert os.fstat(file.fileno()).st_blocks * 512 > 40 << 20
        assert os.fstat(file.fileno()).st_size == (40 << 20) + 1
    assert steps == [(0, 16 << 20), (16 << 20, 16 << 20), (32 << 20, (8 << 20) + 1)]
