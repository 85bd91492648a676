# SPDX-License-Identifier: Apache-2.0
"""HDF5: one file, one dataset per column. A file that a killed run left open cannot be continued: it is begun anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tensorpool.exports.array_store import ArrayExport
from tensorpool.extras import library


class _Hdf5:
    def __init__(self, path: Path) -> None:
        h5py = library("h5py", "writing HDF5", "export")
        try:
            # "latest" marks a file that is being written, so that one of a killed run is recognised.
            self._file = h5py.File(path, "a", libver="latest")
        except OSError:
            path.unlink()
            self._file = h5py.File(path, "w", libver="latest")

    def create(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], chunks: tuple[int, ...]) -> Any:
        return self._file.create_dataset(name, shape, dtype, chunks=chunks, maxshape=(None, *shape[1:]))

    def get(self, name: str) -> Any:
        return self._file[name]

    @property
    def attributes(self) -> Any:
        return self._file.attrs

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def hdf5(path: Path) -> ArrayExport:
    """A file, or its continuation."""
    return ArrayExport(path, _Hdf5(path))
