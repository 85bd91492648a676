# SPDX-License-Identifier: Apache-2.0
"""Region files read through a descriptor: nothing is mapped and no lease is taken.

For those who look from outside, and for those who had to unmap an epoch and still owe an account of it. A sparse ring
stays sparse, and a file that shrinks is no SIGBUS. Wire §7.1, §8.1-§8.3, §15.21.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from array import array
from typing import Final

from tensorpool._core import HEADER_SLOT_BYTES, SUPERBLOCK_BYTES
from tensorpool.errors import DecodeError
from tensorpool.wire import control
from tensorpool.wire.control import SlotHeader, TensorHeader

_AT_ONCE: Final = 16_384  # slots: 4 MiB


def read_head(path: str) -> tuple[bytes, int]:
    """The superblock of a region file, or as much of one as there is, and the file's size.

    Raises OSError, also for a link and for what is no file: a pipe or a device is not read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return os.pread(fd, SUPERBLOCK_BYTES, 0), found.st_size
    finally:
        os.close(fd)


class HeaderFile:
    """The slots of a ring. Keeps a descriptor of its own, closed with its last reference."""

    def __init__(self, fd: int, nslots: int) -> None:
        self._fd = os.dup(fd)
        self.nslots: Final = nslots

    def commit_words(self) -> array[int]:
        """`seq_commit` of every slot, one after the other; what a shorter file lacks is left out."""
        words: array[int] = array("Q")
        for first in range(0, self.nslots, _AT_ONCE):
            data = self._read(first, min(_AT_ONCE, self.nslots - first))
            whole = data[: len(data) - len(data) % HEADER_SLOT_BYTES]
            words.extend(array("Q", whole)[:: HEADER_SLOT_BYTES // 8])
        return words

    def commit_word(self, seq: int) -> int:
        """`seq_commit` of the slot that frame `seq` has."""
        return int.from_bytes(os.pread(self._fd, 8, self._offset(seq)), "little")

    def newest(self) -> int | None:
        """The newest committed seq, or None."""
        return max((word >> 1 for word in self.commit_words() if word & 1), default=None)

    def newest_since(self, known_seq: int) -> int | None:
        """The newest committed seq by a few looks, from one that was there before; None where that does not help.

        Whatever the slot of a known seq holds now, all later frames are within one lap of it.
        """
        word = self.commit_word(known_seq)
        first = word >> 1
        if not word & 1 or (first ^ known_seq) & (self.nslots - 1):
            return None
        low, high = 0, self.nslots - 1  # first + low is committed
        while low < high:
            middle = (low + high + 1) // 2
            word = self.commit_word(first + middle)
            if word & 1 and word >> 1 >= first + middle:
                low = middle
            else:
                high = middle - 1
        return first + low

    def frame(self, seq: int) -> tuple[SlotHeader, TensorHeader] | None:
        """What the slot of `seq` holds, if it is committed, decodes, and holds still: it is read twice."""
        data = self._read(seq, 1)
        if not data or not data[0] & 1 or data != self._read(seq, 1):
            return None
        try:
            slot = SlotHeader.decode_body(data)
            tensor = control.schema.decode(slot.header_bytes)
        except DecodeError:
            return None
        return (slot, tensor) if isinstance(tensor, TensorHeader) else None

    def _read(self, seq: int, slots: int) -> bytes:
        return os.pread(self._fd, slots * HEADER_SLOT_BYTES, self._offset(seq))

    def _offset(self, seq: int) -> int:
        return SUPERBLOCK_BYTES + (seq & (self.nslots - 1)) * HEADER_SLOT_BYTES

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._fd)
