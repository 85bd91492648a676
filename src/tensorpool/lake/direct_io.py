# SPDX-License-Identifier: Apache-2.0
"""A file that is written from front to back, past the page cache, while the next bytes are being made.

A recording is written once and read much later: in the page cache it would cost a second copy, push out what others
keep there, and make `fsync` wait for gigabytes at a time. Where the file system has no direct writes, ordinary ones do.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Buffer

    import numpy.typing as npt

    type Block = npt.NDArray[np.uint8]

BLOCK_BYTES: Final = 4 << 20
ALIGN_BYTES: Final = 4096  # of memory, offsets and lengths
SPARE_BLOCKS: Final = 8

_spare: list[Block] = []  # new memory costs more than what is written through it


class DirectFile:
    """As much of a Python file as a Parquet writer wants. Raises OSError, possibly one write late."""

    closed: bool

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = os.open(path, flags, 0o644)
        self.closed = False
        self._block = _take_block()
        self._filled = 0
        self._written = 0
        self._thread = ThreadPoolExecutor(1, "tensorpool-write")
        self._flying: Future[None] | None = None
        self._flying_block: Block | None = None

    def write(self, data: Buffer) -> int:
        source = np.frombuffer(data, np.uint8)
        at = 0
        while at < len(source):
            count = min(len(source) - at, BLOCK_BYTES - self._filled)
            self._block[self._filled : self._filled + count] = source[at : at + count]
            self._filled += count
            at += count
            if self._filled == BLOCK_BYTES:
                self._send()
        return len(source)

    def tell(self) -> int:
        return self._written + self._filled

    def flush(self) -> None:
        """What is left over goes at the end: a direct write is whole blocks."""

    def finish(self, *, is_durable: bool) -> None:
        """Everything is in the file, and on the disk where that is asked for."""
        size = self.tell()
        if self._filled:
            padded = -(-self._filled // ALIGN_BYTES) * ALIGN_BYTES
            self._block[self._filled : padded] = 0
            self._send(padded)
        self._settle()
        os.ftruncate(self._fd, size)
        if is_durable:
            os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        """Whatever is not written yet is dropped."""
        if self.closed:
            return
        self.closed = True
        self._thread.shutdown(wait=True)
        os.close(self._fd)
        _spare.extend(block for block in (self._block, self._flying_block) if block is not None)
        del _spare[SPARE_BLOCKS:]

    def _send(self, count: int = BLOCK_BYTES) -> None:
        """Hand the block to the thread, and go on with another."""
        self._settle()
        block, self._block = self._block, _take_block() if self._flying_block is None else self._flying_block
        self._flying_block = block
        self._flying = self._thread.submit(self._put, memoryview(block[:count]), self._written)
        self._written += count
        self._filled = 0

    def _settle(self) -> None:
        flying, self._flying = self._flying, None
        if flying is not None:
            flying.result()

    def _put(self, data: memoryview, offset: int) -> None:
        while data:
            try:
                count = os.pwrite(self._fd, data, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not _is_direct(self._fd):
                    raise
                _make_ordinary(self._fd)
                continue
            data, offset = data[count:], offset + count
            if count % ALIGN_BYTES:
                _make_ordinary(self._fd)  # the disk is nearly full: the rest is not aligned


def _is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def _make_ordinary(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


def _take_block() -> Block:
    """Memory that begins at a page."""
    try:
        return _spare.pop()  # asked first, another thread could have it by then
    except IndexError:
        return np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8)
