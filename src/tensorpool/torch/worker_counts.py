# SPDX-License-Identifier: Apache-2.0
"""What each worker of a LiveDataset took and missed, in memory that they share with the process that made the dataset.

A worker writes a row of its own, so no lock is needed. Processes that multiprocessing starts share the memory; any
other copy of a dataset begins with counts of its own.
"""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any, Final

import msgspec
import numpy as np

from tensorpool.errors import ConfigError

MAX_WORKERS: Final = 256


class LiveCounts(msgspec.Struct, frozen=True):
    """What became of the frames, from the first one on that each worker saw."""

    received: int  # became samples
    lost: int  # were overwritten, or dropped for another reason, before they became samples
    skipped: int  # with `latest`: were older than the newest


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker did and where it was; a row of the memory, in this order."""

    workers: int  # between how many the frames are divided; 0: no worker used this row
    resumes: int  # 1: the next iteration continues this one
    taken: int  # samples of this iteration
    received: int
    lost: int
    skipped: int
    epoch: int
    next_seq: int  # after the frame seen last; 0: none was


ROW: Final = np.dtype([(name, np.int64) for name in WorkerState.__struct_fields__])


class WorkerCounts:
    """The rows of all workers."""

    def __init__(self) -> None:
        self._memory: Any = RawArray("q", MAX_WORKERS * len(WorkerState.__struct_fields__))

    @property
    def _rows(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self._memory, ROW)

    def row(self, worker: int) -> Any:
        """Of one worker, to read and write by field name. Raises ConfigError where there are too many."""
        if worker >= MAX_WORKERS:
            raise ConfigError("num_workers", worker + 1, f"at most {MAX_WORKERS}")
        return self._rows[worker]

    def total(self) -> LiveCounts:
        rows = self._rows
        return LiveCounts(*(int(rows[name].sum()) for name in LiveCounts.__struct_fields__))

    def states(self) -> list[WorkerState]:
        """Of the workers that there were, by number."""
        rows = [WorkerState(**dict(zip(ROW.names or (), row, strict=True))) for row in self._rows.tolist()]
        used = max((number for number, row in enumerate(rows) if row.workers), default=-1)
        return rows[: used + 1]

    def load(self, worker: int, state: WorkerState) -> None:
        row = self.row(worker)
        for name, value in msgspec.structs.asdict(state).items():
            row[name] = value
        row["resumes"] = 1

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ if get_spawning_popen() is not None else {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.__dict__.update(state)
