# SPDX-License-Identifier: Apache-2.0
"""Frames whose bytes say which they are, and the records of them that survive SIGKILL.

A book is a mapped file in which every entry is one store, a journal a file of JSON lines: both are true up to the very
instruction at which a process was killed.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import struct
import time
import traceback
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from tensorpool.client import StateChange

type Bytes = npt.NDArray[np.uint8]
TAG: Final = struct.Struct("<QQQ")  # at the start of a frame: which, of whom, how long
PERIOD: Final = 4093  # of the patterns; a prime, so that no slot sees the same one twice in a row
LARGEST: Final = 16 << 10
LARGE: Final = 1 << 20  # frames of such a stream have all orders of magnitude
SMALLEST: Final = 1 << 10  # of those
GOLDEN: Final = 0.6180339887498949


def frame_bytes(number: int, of: int, largest: int) -> Bytes:
    """Frame `number` of producer `of`: some length, some pattern."""
    nbytes = _frame_length(number, largest)
    data = _pattern(nbytes)[_start(number, of) :][:nbytes].copy()
    data[: TAG.size] = np.frombuffer(TAG.pack(number, of, nbytes), np.uint8)
    return data


def recognise(view: Bytes) -> tuple[int, int] | None:
    """Which frame these bytes are, and of whom; None when they are not exactly one frame."""
    if view.ndim != 1 or view.nbytes < TAG.size:
        return None
    number, of, nbytes = TAG.unpack(view[: TAG.size].tobytes())
    expected = _pattern(view.nbytes)[_start(number, of) :][: view.nbytes]
    is_whole = nbytes == view.nbytes and np.array_equal(view[TAG.size :], expected[TAG.size :])
    return (number, of) if is_whole else None


def _frame_length(number: int, largest: int) -> int:
    if largest < LARGE:
        return TAG.size + number * 7919 % (largest - TAG.size)
    return int(SMALLEST * (largest / SMALLEST) ** (number * GOLDEN % 1.0))


def _start(number: int, of: int) -> int:
    return (number * 61 + of) % PERIOD


def _pattern(nbytes: int) -> Bytes:
    """At least so long, behind any start; the same for all that have a frame of this length."""
    return _noise(LARGE if nbytes <= LARGE else -(-nbytes // (16 * LARGE)) * 16 * LARGE)


@functools.cache
def _noise(nbytes: int) -> Bytes:
    return np.frombuffer(np.random.default_rng(4711).bytes(nbytes + PERIOD), np.uint8)


class Book:
    """Counters, and a count for each epoch, in a mapped file."""

    BUSY, LINES, TOTAL, EPOCH, SEQ, HELD, LONGEST_NS, SPOILT, WAITING, OF, OBEYED = range(11)
    FIRST_LINE: Final = 16
    MAX_LINES: Final = 2000

    def __init__(self, path: Path, mode: Literal["r", "r+", "w+"]) -> None:
        shape = (self.FIRST_LINE + 2 * self.MAX_LINES,)
        self.words: npt.NDArray[np.uint64] = np.memmap(path, np.uint64, mode, shape=shape).view(np.ndarray)
        self._line = self.FIRST_LINE - 2

    def __getitem__(self, index: int) -> int:
        return int(self.words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self.words[index] = value

    def enter(self, epoch: int, seq: int) -> None:
        """One more frame, of this epoch; a book is written by one thread."""
        words = self.words
        if self._line < self.FIRST_LINE or words[self._line] != epoch:
            self._line += 2
            words[self._line + 1] = 0
            words[self._line] = epoch
            words[self.LINES] += 1
        words[self._line + 1] += 1
        words[self.TOTAL] += 1
        words[self.EPOCH] = epoch
        words[self.SEQ] = seq  # who sees this one finds it counted

    def set_held(self, is_held: bool) -> None:
        """Of a producer that is still waiting for its lease; once it has one it says so itself."""
        if self[self.WAITING]:
            self[self.HELD] = is_held

    def frames(self) -> dict[int, int]:
        """How many of each epoch."""
        counts: dict[int, int] = {}
        for line in range(self[self.LINES]):
            epoch, count = (int(word) for word in self.words[self.FIRST_LINE + 2 * line :][:2])
            counts[epoch] = counts.get(epoch, 0) + count
        return counts


class Journal(logging.Handler):
    """What a process saw, line by line; it takes the warnings of the library too."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, event: str, **fields: Any) -> None:
        entry = {"s": round(time.monotonic(), 3), "event": event, **fields}
        os.write(self._fd, json.dumps(entry).encode() + b"\n")

    def emit(self, record: logging.LogRecord) -> None:
        trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
        self.write("log", level=record.levelname, text=f"{record.getMessage()}\n{trace}".strip())

    def state(self, change: StateChange) -> None:
        self.write("state", state=change.state.value, reason=change.reason, epoch=change.epoch)
