# SPDX-License-Identifier: Apache-2.0
"""The standard library: a ring of slots in multiprocessing.shared_memory, their numbers through a Pipe.

What one writes in an afternoon. A semaphore counts free slots, so that the writer waits for its one reader instead of
overrunning it; nothing else protects a frame: a view that is kept after its turn changes under the reader unseen, and
a reader that dies with slots in hand stops the writer for good.
"""

from __future__ import annotations

import multiprocessing
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import shared_memory
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.peer import Frame, Visit, new_frame

ACQUIRE_S = 0.2
OVER = b""


class Ends(NamedTuple):
    segment: str
    free: Semaphore
    receiving: Connection
    sending: Connection


class SharedMemory:
    name = "shared_memory + pipe"
    package: str | None = None
    module = ""
    says = "a ring of slots, slot numbers through a Pipe, a semaphore of free slots; no protection against torn reads"

    @contextmanager
    def host(self, size: int, depth: int, folder: Path, readers: int) -> Iterator[Ends]:
        context = multiprocessing.get_context("spawn")
        segment = shared_memory.SharedMemory(create=True, size=size * depth)
        receiving, sending = context.Pipe(duplex=False)
        try:
            yield Ends(segment.name, context.Semaphore(depth), receiving, sending)
        finally:
            receiving.close()
            sending.close()
            segment.close()
            segment.unlink()

    def writer(self, shared: Ends, size: int, depth: int) -> SharedMemoryWriter:
        return SharedMemoryWriter(shared, size, depth)

    def reader(self, shared: Ends, size: int, depth: int) -> SharedMemoryReader:
        return SharedMemoryReader(shared, size, depth)


class _Slots:
    def __init__(self, shared: Ends, size: int, depth: int) -> None:
        self._segment = shared_memory.SharedMemory(shared.segment)
        whole = np.ndarray((depth, size // 8), np.uint64, self._segment.buf)
        self.views = list(whole)

    def close(self) -> None:
        self.views.clear()
        self._segment.close()


class SharedMemoryWriter:
    def __init__(self, shared: Ends, size: int, depth: int) -> None:
        self._slots = _Slots(shared, size, depth)
        self._free, self._pipe = shared.free, shared.sending
        self._numbers = [struct.pack("=I", n) for n in range(depth)]
        self._turn = 0

    def source(self, size: int) -> Frame:
        return new_frame(size)

    def publish(self, frame: Frame) -> None:
        if not self._free.acquire(True, ACQUIRE_S):
            return
        slot = self._turn % len(self._numbers)
        self._turn += 1
        self._slots.views[slot][:] = frame
        self._pipe.send_bytes(self._numbers[slot])

    def finish(self) -> None:
        self._pipe.send_bytes(OVER)

    def close(self) -> None:
        self._slots.close()


class SharedMemoryReader:
    def __init__(self, shared: Ends, size: int, depth: int) -> None:
        self._slots = _Slots(shared, size, depth)
        self._free, self._pipe = shared.free, shared.receiving

    def run(self, visit: Visit, into: Frame | None, deadline_s: float, wait_s: float) -> None:
        receive, views, free = self._pipe.recv_bytes, self._slots.views, self._free
        while (number := receive()) != OVER:
            frame = views[int.from_bytes(number, "little")]
            if into is not None:
                into[:] = frame
                frame = into
            visit(frame)
            free.release()

    def close(self) -> None:
        self._slots.close()
