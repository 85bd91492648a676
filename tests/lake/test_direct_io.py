# SPDX-License-Identifier: Apache-2.0
"""Files past the page cache: what comes out is what went in, and what cannot be written is said."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorpool.lake import direct_io
from tensorpool.lake.direct_io import ALIGN_BYTES, BLOCK_BYTES, DirectFile

SIZES = st.sampled_from([0, 1, ALIGN_BYTES - 1, ALIGN_BYTES, 70_000, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1])


def noise(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8).tobytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


@pytest.fixture
def no_spare_blocks() -> Iterator[None]:
    """Whatever this test leaves among the spare blocks goes."""
    kept, direct_io._spare[:] = list(direct_io._spare), []
    yield
    direct_io._spare[:] = kept


@settings(max_examples=25)
@given(st.lists(SIZES, max_size=6), st.booleans())
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], sync: bool
) -> None:
    path = tmp_path_factory.mktemp("direct") / "file"
    pieces = [noise(size, index) for index, size in enumerate(sizes)]
    file = DirectFile(path)
    for piece in pieces:
        at = file.tell()
        assert file.write(piece) == len(piece)
        assert file.tell() == at + len(piece)
    file.finish(is_durable=sync)
    assert path.read_bytes() == b"".join(pieces)


def test_it_goes_past_the_page_cache(path: Path) -> None:
    file = DirectFile(path)
    is_direct = fcntl.fcntl(file._fd, fcntl.F_GETFL) & os.O_DIRECT
    file.write(noise(2 * BLOCK_BYTES))
    file.finish(is_durable=False)
    assert is_direct
    assert path.read_bytes() == noise(2 * BLOCK_BYTES)


@pytest.mark.usefixtures("no_spare_blocks")
def test_a_disk_that_refuses_direct_writes_gets_ordinary_ones(path: Path) -> None:
    """The kernel refuses a direct write from memory that does not begin at a block, as some file systems refuse all."""
    direct_io._spare.append(np.empty(BLOCK_BYTES + 1, np.uint8)[1:])
    data = noise(BLOCK_BYTES + 5)
    file = DirectFile(path)
    file.write(data)
    file.finish(is_durable=True)
    assert path.read_bytes() == data


def test_memory_is_used_again(path: Path, no_spare_blocks: None) -> None:
    for turn in range(3):
        file = DirectFile(path.with_name(f"file{turn}"))
        file.write(noise(BLOCK_BYTES + 1))
        file.finish(is_durable=False)
        assert len(direct_io._spare) == 2


def test_a_block_that_another_thread_took_first_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raced(list[object]):
        """Looks as if there were something in it."""

        def __bool__(self) -> bool:
            return True

    monkeypatch.setattr(direct_io, "_spare", Raced())
    assert len(direct_io._take_block()) == BLOCK_BYTES


def test_what_cannot_be_written_is_said_and_nothing_is_left_open(path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = set(os.listdir("/proc/self/fd"))
    file = DirectFile(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES, hard))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            file.write(noise(4 * BLOCK_BYTES))
        file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_name_that_is_taken_is_not_written_over(path: Path) -> None:
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        DirectFile(path)
    assert path.read_bytes() == b"mine"
