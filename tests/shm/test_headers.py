# SPDX-License-Identifier: Apache-2.0
"""A header ring read through its file: what is newest, what a slot holds, and files that are not what they should."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tensorpool._core import HEADER_SLOT_BYTES, SUPERBLOCK_BYTES
from tensorpool.shm import AllowedBases, HeaderFile, PoolSpec, RingSpec, layout_of, map_ring
from tensorpool.shm.headers import read_head
from tests.shm.by_hand import RING, mapped_files, open_files, pool_file, replace_bytes, ring_file
from tests.support.region_bytes import packed_superblock

NSLOTS = 4


type Write = Callable[[int], None]


@pytest.fixture
def write(shm_dir: Path, bases: AllowedBases) -> Write:
    """Frames into a ring by a producer that is gone again."""
    uris = [ring_file(shm_dir / "ring"), pool_file(shm_dir / "small")]

    def written(count: int) -> None:
        spec = RingSpec(NSLOTS, (PoolSpec(3, 128),))
        writer = map_ring(spec, uris, bases, stream_id=10000, epoch=7, writable=True).writer()
        for seq in range(count):
            array = np.full(8, seq, np.int16)
            assert writer.write(seq, layout_of(array), array)

    return written


def header_of(folder: Path, nslots: int = NSLOTS) -> HeaderFile:
    fd = os.open(folder / "ring", os.O_RDONLY)
    try:
        return HeaderFile(fd, nslots)
    finally:
        os.close(fd)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 11])
def test_the_newest_is_found_by_a_scan_and_from_any_seq_that_was_there(write: Write, shm_dir: Path, count: int) -> None:
    write(count)
    header = header_of(shm_dir)
    newest = count - 1 if count else None
    assert header.newest() == newest
    for known in range(count):
        assert header.newest_since(known) == newest
    assert len(header.commit_words()) == NSLOTS


def test_a_seq_that_never_was_finds_nothing(write: Write, shm_dir: Path) -> None:
    """Its slot is empty, or is being written."""
    write(2)
    header = header_of(shm_dir)
    assert header.newest_since(3) is None
    replace_bytes(shm_dir / "ring", SUPERBLOCK_BYTES, (8).to_bytes(8, "little"))
    assert header.newest_since(0) is None
    assert header.newest() == 1


def test_a_frame_is_read_with_its_header(write: Write, shm_dir: Path) -> None:
    write(5)
    frame = header_of(shm_dir).frame(4)
    assert frame is not None
    slot, tensor = frame
    assert (slot.seq_commit >> 1, slot.values_len_bytes, tensor.dims[0]) == (4, 16, 8)


@pytest.mark.parametrize(
    ("offset", "data"),
    [(0, b"\x08"), (60, b"\xff\xff\xff\x7f"), (64, b"\xff" * 8)],
    ids=["being written", "header length", "header"],
)
def test_a_slot_that_is_invalid_is_none(write: Write, shm_dir: Path, offset: int, data: bytes) -> None:
    write(5)
    replace_bytes(shm_dir / "ring", SUPERBLOCK_BYTES + offset, data)
    assert header_of(shm_dir).frame(4) is None


@pytest.mark.parametrize("size", [0, SUPERBLOCK_BYTES, SUPERBLOCK_BYTES + HEADER_SLOT_BYTES - 1])
def test_a_file_that_ends_too_early_is_an_empty_ring(write: Write, shm_dir: Path, size: int) -> None:
    write(5)
    header = header_of(shm_dir)
    os.truncate(shm_dir / "ring", size)
    assert len(header.commit_words()) == 0
    assert header.newest() is None
    assert header.frame(4) is None


def test_a_file_that_lost_its_end_tells_what_it_has(write: Write, shm_dir: Path) -> None:
    write(4)
    header = header_of(shm_dir)
    os.truncate(shm_dir / "ring", SUPERBLOCK_BYTES + 2 * HEADER_SLOT_BYTES + 100)
    assert header.newest() == 1


def test_nothing_is_mapped_and_the_file_outlives_its_name(shm_dir: Path) -> None:
    ring_file(shm_dir / "ring")
    header = header_of(shm_dir)
    (shm_dir / "ring").unlink()
    assert header.newest() is None
    assert not mapped_files(shm_dir)
    fds = len(os.listdir("/proc/self/fd"))
    del header
    assert len(os.listdir("/proc/self/fd")) == fds - 1


def test_the_head_of_a_region_is_its_superblock_and_its_size(shm_dir: Path) -> None:
    """Of a file that is shorter, what there is; afterwards nothing is open."""
    path = shm_dir / "ring"
    ring_file(path)
    assert read_head(str(path)) == (packed_superblock(RING), 64 + 4 * 256)
    os.truncate(path, 10)
    assert read_head(str(path)) == (packed_superblock(RING)[:10], 10)
    assert open_files(shm_dir) == []


@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "nothing"])
def test_what_is_no_region_file_is_not_read(shm_dir: Path, kind: str) -> None:
    """Without waiting for anybody, and nothing stays open."""
    path = shm_dir / "ring"
    match kind:
        case "link":
            ring_file(shm_dir / "elsewhere")
            path.symlink_to(shm_dir / "elsewhere")
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
    with pytest.raises(OSError, match="ring"):
        read_head(str(path))
    assert open_files(shm_dir) == []
