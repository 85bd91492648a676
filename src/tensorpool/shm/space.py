# SPDX-License-Identifier: Apache-2.0
"""Is there room for it? The bill of an epoch against what its mount has left, before anything is created.

A tmpfs hands out pages at the first touch and answers with SIGBUS when there are none, far from the cause.
So memory that will be written is reserved when it is created, and a refusal says what is needed, what is
there and how to get more. Decisions B22, D10.

Large regions are put together from transparent huge pages if they are to be prefaulted: quicker to get, to map and to
give back, and to copy to. They are tmpfs pages all the same (D8): what the specifications call huge pages is hugetlbfs.
Several threads ask for them, each for another part, since one thread gets memory more slowly than the machine gives it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from tensorpool._core import Mapping
from tensorpool.errors import Closed, RegionRejected
from tensorpool.shm.containment import Check, huge_page_bytes
from tensorpool.shm.layout import RegionSpec, round_up

_MIB: Final = 1 << 20
# Of one call to posix_fallocate: in older kernels a signal interrupts it, and tmpfs gives back what that call had
# reserved, so that a steady signal would keep a large one from ever ending.
_RESERVE_STEP_BYTES: Final = 16 * _MIB
_PART_BYTES: Final = 256 * _MIB  # that one thread brings in at a time, at most
_LEAST_PART_BYTES: Final = 32 * _MIB  # a thread for less is not worth it
_MOST_THREADS: Final = 4  # more gain nothing where they were measured


class MountSpace(msgspec.Struct, frozen=True):
    """What a mount holds; None where it has no limit of its own."""

    mount_point: str
    total_bytes: int | None
    free_bytes: int | None


def mount_space(path: str) -> MountSpace:
    """The space of the mount that holds `path`, or will once it is created."""
    at = mount_point(os.path.realpath(path))
    mount = os.statvfs(at)
    if not mount.f_blocks:  # tmpfs with size=0 and plain hugetlbfs report no blocks at all
        return MountSpace(at, None, None)
    return MountSpace(at, mount.f_blocks * mount.f_frsize, mount.f_bavail * mount.f_frsize)


def reserve(fd: int, size_bytes: int, *, in_huge_pages: bool = False, stop: threading.Event | None = None) -> None:
    """Size a new file and take its blocks from the mount now. Raises OSError: ENOSPC for too few.

    `in_huge_pages` is a wish: where the kernel has none the blocks are small ones, as on any tmpfs. Raises Closed soon
    after `stop` is set.
    """
    if in_huge_pages and huge_page_bytes(fd) is None:
        os.ftruncate(fd, size_bytes)
        with contextlib.suppress(OSError):  # no room: the reservation below says so
            bring_in(Mapping(fd, size_bytes, writable=True), in_huge_pages=True, stop=stop)
    for start in range(0, size_bytes, _RESERVE_STEP_BYTES):
        _check_wanted(stop)
        os.posix_fallocate(fd, start, min(_RESERVE_STEP_BYTES, size_bytes - start))


def bring_in(mapping: Mapping, *, in_huge_pages: bool = False, stop: threading.Event | None = None) -> None:
    """Give every page of a mapping its memory now, with as many threads as the machine has use for. Raises OSError.

    `in_huge_pages` puts a new tmpfs file together from huge pages, as far as the kernel has any. Raises Closed soon
    after `stop` is set.
    """

    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    part_bytes = min(max(round_up(len(mapping) // threads, _LEAST_PART_BYTES), _LEAST_PART_BYTES), _PART_BYTES)
    parts = range(0, len(mapping), part_bytes)
    threads = min(threads, len(parts))

    def bring(begin: int) -> None:
        _check_wanted(stop)
        end = min(begin + part_bytes, len(mapping))
        if in_huge_pages:
            mapping.collapse(begin, end)
        mapping.prefault(begin, end)

    if threads == 1:
        for begin in parts:
            bring(begin)
        return
    with ThreadPoolExecutor(threads, "tensorpool-prefault") as pool:
        for _ in pool.map(bring, parts):
            pass


def _check_wanted(stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise Closed("the memory is not wanted any more: the driver ends")


def require_space(uri: str, directory_fd: int, directory: str, regions: Iterable[RegionSpec]) -> None:
    """Refuse regions that the mount of `directory` has no room for. Raises RegionRejected, check "space"."""
    page_bytes = os.fstatvfs(directory_fd).f_frsize
    needed = sum(round_up(region.size_bytes, page_bytes) for region in regions)
    free = mount_space(directory).free_bytes
    if free is not None and needed > free:
        raise space_refused(uri, directory_fd, directory, needed)


def space_refused(uri: str, fd: int, directory: str, needed_bytes: int) -> RegionRejected:
    """The bill: what is needed, what is free, where, and what to do about it. `fd` is any on that mount."""
    mount, space = os.fstatvfs(fd), mount_space(directory)
    at = space.mount_point
    if huge_page_bytes(fd):
        pages = round_up(needed_bytes, mount.f_bsize) // mount.f_bsize
        detail = f"needs {pages} huge pages of {_size(mount.f_bsize)} at {at}, fewer are free"
        fix = "raise vm.nr_hugepages"
    elif mount.f_files and not mount.f_favail:
        detail, fix = f"{at} has no inode left", f"remove files, or mount -o remount,nr_inodes=… {at}"
    else:
        total, free = space.total_bytes or 0, space.free_bytes or 0
        enough = round_up(total + max(needed_bytes - free, 0), _MIB) // _MIB
        detail = f"needs {_size(needed_bytes)}, {at} has {_size(free)} free of {_size(total)}"
        fix = f"enlarge it (mount -o remount,size={enough}m {at}; for Docker's /dev/shm --shm-size={enough}m)"
    return RegionRejected(uri, Check.SPACE, f"{detail}; {fix}, or ask for fewer slots or smaller strides")


def mount_point(path: str) -> str:
    """Where the file system is mounted that holds the canonical `path`."""
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def _size(size_bytes: int) -> str:
    return f"{size_bytes} bytes ({size_bytes / _MIB:.1f} MiB)"
