# SPDX-License-Identifier: Apache-2.0
"""What HDF5 and Zarr have in common: arrays that grow, with one chunk per frame.

They are `frames`, `epoch`, `seq`, `time_ns` and `timestamp_ns`. The attribute `tensorpool` says how many frames are
whole; arrays may be longer until the export is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from tensorpool.exports.protocol import ExportFrame, Missing, Written, refuse_change

COLUMNS: Final = ("epoch", "seq", "time_ns", "timestamp_ns")
ATTRIBUTE: Final = "tensorpool"
UNKNOWN: Final = np.iinfo(np.int64).min  # of a time: numpy's NaT
COMMIT_EVERY: Final = 32  # frames; arrays grow by as many


class Store(Protocol):
    """A file of HDF5 or a group of Zarr, opened for writing."""

    def create(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], chunks: tuple[int, ...]) -> Any: ...

    def get(self, name: str) -> Any: ...

    @property
    def attributes(self) -> Any: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class ArrayExport:
    """Frames of one shape and dtype. `open_store` opens what an earlier run left, or an empty store."""

    def __init__(self, path: Path, store: Store) -> None:
        self._path = path
        self._store = store
        self._frames = 0
        self._committed = 0
        self._first: tuple[tuple[int, ...], str] | None = None
        self._rows: list[tuple[int, int, int, int]] = []

    def resume(self) -> Written:
        found = self._store.attributes.get(ATTRIBUTE)
        if found is None or not msgspec.json.decode(found)["frames"]:
            return Written()
        self._frames = self._committed = int(msgspec.json.decode(found)["frames"])
        frames = self._store.get("frames")
        self._first = tuple(frames.shape[1:]), str(frames.dtype)
        last = self._frames - 1
        return Written(self._frames, (int(self._store.get("epoch")[last]), int(self._store.get("seq")[last])))

    def add(self, frame: ExportFrame) -> None:
        if self._first is None:
            self._first = frame.array.shape, str(frame.array.dtype)
            self._store.create("frames", (0, *frame.array.shape), frame.array.dtype, (1, *frame.array.shape))
            for name in COLUMNS:
                self._store.create(name, (0,), np.dtype(np.int64), (1024,))
        refuse_change(self._path, self._first, frame)
        frames = self._store.get("frames")
        if frames.shape[0] <= self._frames:
            frames.resize((self._frames + COMMIT_EVERY, *self._first[0]))
        frames[self._frames] = frame.array
        times = [UNKNOWN if found is None else found for found in (frame.time_ns, frame.timestamp_ns)]
        self._rows.append((frame.epoch, frame.seq, times[0], times[1]))
        self._frames += 1
        if len(self._rows) >= COMMIT_EVERY:
            self._commit()

    def finish(self, missing: Sequence[Missing], about: dict[str, Any]) -> Path:
        attributes = {"missing": [msgspec.to_builtins(gap) for gap in missing], "unknown_time": UNKNOWN, **about}
        self._commit(attributes)
        if self._first is not None:
            self._store.get("frames").resize((self._frames, *self._first[0]))
        self._store.close()
        return self._path

    def suspend(self) -> None:
        self._commit()
        self._store.close()

    def _commit(self, more: dict[str, Any] | None = None) -> None:
        """Payloads are in the store by now; then the columns, and last the number of frames that counts."""
        if self._rows:
            for index, name in enumerate(COLUMNS):
                column = self._store.get(name)
                column.resize((self._frames,))
                column[self._committed : self._frames] = np.array([row[index] for row in self._rows], np.int64)
            self._store.flush()
        self._rows, self._committed = [], self._frames
        attributes = {"frames": self._frames, **(more or {})}
        self._store.attributes[ATTRIBUTE] = msgspec.json.encode(attributes).decode()
        self._store.flush()
