# SPDX-License-Identifier: Apache-2.0
"""Region files, mounts and witnesses made by hand, without the code that the tests judge."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.region_bytes import MAGIC, packed_superblock

NOBODY = 65534
RING = {
    "magic": MAGIC,
    "layout_version": 1,
    "epoch": 7,
    "stream_id": 10000,
    "region_type": 1,
    "pool_id": 0,
    "nslots": 4,
    "slot_bytes": 256,
    "stride_bytes": 0,
    "pid": 4711,
    "start_timestamp_ns": 1_000,
    "activity_timestamp_ns": 2_000,
}
POOL = RING | {"region_type": 2, "pool_id": 3, "slot_bytes": 128, "stride_bytes": 128}


def ring_file(path: Path, **changed: int) -> str:
    """A header ring of 4 slots; the URI that names it."""
    path.write_bytes(packed_superblock(RING | changed) + bytes(4 * 256))
    return uri_of(path)


def pool_file(path: Path, **changed: int) -> str:
    """A pool of 4 slots of 128 bytes; the URI that names it."""
    path.write_bytes(packed_superblock(POOL | changed) + bytes(4 * 128))
    return uri_of(path)


def uri_of(path: Path) -> str:
    return f"shm:file?path={path}"


def mapped_files(below: Path) -> list[str]:
    """Files below a directory that this process has mapped, as the kernel tells."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return [line.split(maxsplit=5)[5].strip() for line in maps if str(below) in line]


def huge_page_bytes() -> int:
    """What the kernel can gather the pages of a tmpfs into; 0: it cannot, or is configured not to."""
    settings = Path("/sys/kernel/mm/transparent_hugepage")
    if not settings.exists() or "[deny]" in (settings / "shmem_enabled").read_text():
        return 0
    return int((settings / "hpage_pmd_size").read_text())


def resident_bytes(below: Path, kind: str = "Rss") -> int:
    """How much of the mapped files below a directory has its pages in this process."""
    total, is_below = 0, False
    with open("/proc/self/smaps", encoding="utf-8") as smaps:
        for line in smaps:
            if "-" in line.split()[0]:
                is_below = str(below) in line
            elif is_below and line.startswith(f"{kind}:"):
                total += int(line.split()[1]) * 1024
    return total


def open_files(below: Path) -> list[str]:
    """Files below a directory that this process has open, as the kernel tells."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in names if str(below) in name]


@contextlib.contextmanager
def mounted(at: Path, kind: str, *options: str) -> Iterator[Path]:
    """A file system of the test's own. Unmounting fails, and so does the test, if something still maps it."""
    at.mkdir()
    arguments = ["-o", ",".join(options)] if options else []
    mounting = subprocess.run(["mount", "-t", kind, *arguments, "none", str(at)], capture_output=True, text=True)
    assert mounting.returncode == 0, f"{mounting.stderr.strip()}: be root, if only in `unshare --map-root-user --mount`"
    try:
        yield at
    except BaseException:
        subprocess.run(["umount", "-l", str(at)], check=True)
        raise
    unmounting = subprocess.run(["umount", str(at)], capture_output=True, text=True)
    if unmounting.returncode:
        subprocess.run(["umount", "-l", str(at)], check=True)
    assert unmounting.returncode == 0, unmounting.stderr


@contextlib.contextmanager
def folder(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def replace_bytes(path: str | Path, offset: int, data: Any) -> None:
    """Overwrite a part of a file in place: those who mapped it see it."""
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)
