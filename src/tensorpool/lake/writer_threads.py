# SPDX-License-Identifier: Apache-2.0
"""Threads that compress and write files, each one job after another, while their owner continues to read."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from tensorpool.lake import layout
from tensorpool.lake.commits import Staged
from tensorpool.lake.file_policy import FilePolicy
from tensorpool.lake.files import FrameFile
from tensorpool.lake.manifest import Gap

BATCHES_PER_WRITER: Final = 3  # that wait; more, and the next file is another thread's


class WriterThread:
    """A thread that runs one job after another, and none after the first that fails."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, f"tensorpool-{name}")
        self._flying: deque[Future[Any]] = deque()
        self._failure: BaseException | None = None

    @property
    def waiting(self) -> int:
        """How much is still to do. Raises what went wrong."""
        while self._flying and self._flying[0].done():
            self._flying.popleft().result()
        return len(self._flying)

    def submit[T](self, call: Callable[..., T], *args: Any) -> Future[T]:
        future = self._thread.submit(self._do, call, *args)
        self._flying.append(future)
        return future

    def wait_for_room(self, most: int) -> None:
        """Until fewer than `most` are waiting. Raises what went wrong."""
        while self.waiting >= most:
            self._flying[0].exception()

    def settle(self) -> None:
        self.wait_for_room(1)

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _do[T](self, call: Callable[..., T], *args: Any) -> T:
        if self._failure is not None:
            raise self._failure
        try:
            return call(*args)
        except BaseException as failure:
            self._failure = failure
            raise


class Draft:
    """A file that a writer thread writes."""

    def __init__(self, writer: WriterThread, folder: Path, policy: FilePolicy) -> None:
        self._writer = writer
        self._folder = folder
        self._policy = policy
        self._gaps: list[Gap] = []
        self._file: FrameFile | None = None  # used by the writer thread alone
        self.payload_bytes = 0

    @property
    def is_behind(self) -> bool:
        return self._writer.waiting >= BATCHES_PER_WRITER

    def add(self, batch: pa.RecordBatch, gaps: list[Gap], done: Callable[[], None]) -> None:
        self._gaps += gaps
        self.payload_bytes += batch.column("payload").nbytes
        self._writer.wait_for_room(BATCHES_PER_WRITER)
        self._writer.submit(self._add, batch, done)

    def finish(self) -> Future[Staged]:
        return self._writer.submit(self._finish)

    def drop(self) -> None:
        """The writer thread is idle."""
        if self._file is not None:
            self._file.discard()
            self._file = None

    def _add(self, batch: pa.RecordBatch, done: Callable[[], None]) -> None:
        if self._file is None:
            self._file = FrameFile(self._folder / f".{uuid.uuid4().hex}", self._policy)
        self._file.add(batch)
        done()

    def _finish(self) -> Staged:
        file, self._file = self._file, None
        assert file is not None
        assert file.first_seq is not None
        assert file.last_seq is not None
        path, footer = file.finish(file.first_seq, file.last_seq + 1, tuple(self._gaps), self._name_of(file))
        return Staged((msgspec.structs.replace(footer.file, path=path.name),), footer.gaps)

    def _name_of(self, file: FrameFile) -> Callable[[int, int], Path]:
        stream_id, epoch = file.ids
        return lambda lo, hi: self._folder / layout.staged_name(stream_id, epoch, lo, hi)
