# SPDX-License-Identifier: Apache-2.0
"""Files of frames, opened for random access: a frame costs one row group.

Keeps the footers of the files used last, and the row group read last. May be used from several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Container
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tensorpool.lake.errors import LakeDamaged, RecordingOutdated
from tensorpool.lake.lake import Lake
from tensorpool.lake.manifest import LakeFile

type Rows = npt.NDArray[np.int64]
type Times = npt.NDArray[np.datetime64]

MAX_OPEN: Final = 32  # files
COLUMNS: Final = [
    "seq", "time", "timestamp_ns", "received_ns", "meta_version", "trace_id",
    "dtype", "shape", "order", "dropped_before", "dropped_reason", "payload",
]  # fmt: skip


class OpenFile:
    """An open file. Rows are numbered in the order of the file; a recorded file is sorted by seq."""

    def __init__(self, file: LakeFile, parquet: pq.ParquetFile) -> None:
        self.file: Final = file
        self.parquet: Final = parquet
        groups = range(parquet.metadata.num_row_groups)
        counts = [parquet.metadata.row_group(group).num_rows for group in groups]
        self.starts: Final = np.cumsum([0, *counts])  # first row of each row group, and the number of rows

    @cached_property
    def seqs(self) -> Rows:
        """By row. Nothing is read of a recorded file that has all of its seqs."""
        file = self.file
        if file.is_recorded and file.first_seq is not None and file.last_seq == file.first_seq + file.frames - 1:
            return np.arange(file.first_seq, file.first_seq + file.frames, dtype=np.int64)
        return self._column("seq").astype(np.int64)

    @cached_property
    def times(self) -> Times:
        """By row, in UTC; NaT where the time is not known."""
        return self._column("time").astype("datetime64[us]")

    def _column(self, name: str) -> npt.NDArray[Any]:
        column = self.parquet.read([name], use_threads=False).column(name)
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("us"))  # numpy has no zones: this is UTC
        return np.asarray(column.to_numpy())


class OpenFiles:
    """The files of one lake."""

    def __init__(self, lake: Lake) -> None:
        self._lake: Final = lake
        self._files: Final[OrderedDict[str, OpenFile]] = OrderedDict()
        self._group: tuple[str, int, pa.RecordBatch] | None = None
        self._lock: Final = threading.RLock()

    def seqs(self, file: LakeFile) -> Rows:
        """By row. Raises RecordingOutdated, LakeDamaged."""
        return self._read(file, lambda opened: opened.seqs)

    def times(self, file: LakeFile) -> Times:
        """By row; NaT where the time is not known. Raises RecordingOutdated, LakeDamaged."""
        return self._read(file, lambda opened: opened.times)

    def starts(self, file: LakeFile) -> Rows:
        """The first row of each row group, then the number of rows. Raises RecordingOutdated, LakeDamaged."""
        return self._read(file, lambda opened: opened.starts)

    def group(self, file: LakeFile, number: int) -> pa.RecordBatch:
        """A row group with its payloads. Raises RecordingOutdated, LakeDamaged."""
        with self._lock:
            if self._group is None or self._group[:2] != (file.path, number):
                self._group = None  # so that two of them are never held
                self._group = file.path, number, self._read(file, lambda opened: _read_group(opened, number))
            return self._group[2]

    def keep(self, paths: Container[str]) -> None:
        """Close all other files."""
        with self._lock:
            for path in [path for path in self._files if path not in paths]:
                del self._files[path]
            if self._group is not None and self._group[0] not in paths:
                self._group = None

    def _read[T](self, file: LakeFile, read: Callable[[OpenFile], T]) -> T:
        with self._lock:
            try:
                return read(self._open(file))
            except LakeDamaged as error:
                problem = error.problem
            except (pa.ArrowException, OSError) as error:
                problem = f"it cannot be read ({error})"
            self._files.pop(file.path, None)
            path = f"{self._lake.uri}/{file.path}"
            if file.path not in self._lake.state.files:
                raise RecordingOutdated(path) from None
            raise LakeDamaged(path, problem) from None

    def _open(self, file: LakeFile) -> OpenFile:
        opened = self._files.get(file.path)
        if opened is None:
            opened = OpenFile(file, self._lake.open_parquet(file.path))
            if len(self._files) >= MAX_OPEN:
                self._files.popitem(last=False)
            self._files[file.path] = opened
        self._files.move_to_end(file.path)
        return opened


def _read_group(opened: OpenFile, number: int) -> pa.RecordBatch:
    table = opened.parquet.read_row_group(number, COLUMNS, use_threads=False)
    (batch,) = table.combine_chunks().to_batches()
    times = batch.column("time").cast(pa.timestamp("us", "UTC"))  # another writer may have another unit
    return batch.set_column(COLUMNS.index("time"), "time", times)
