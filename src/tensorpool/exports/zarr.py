# SPDX-License-Identifier: Apache-2.0
"""Zarr, version 3 of the format: a folder with one compressed chunk per frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tensorpool.exports.array_store import ArrayExport
from tensorpool.extras import library


class _Zarr:
    def __init__(self, path: Path) -> None:
        self._group = library("zarr", "writing Zarr", "export").open_group(str(path), mode="a", zarr_format=3)

    def create(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], chunks: tuple[int, ...]) -> Any:
        return self._group.create_array(name, shape=shape, dtype=dtype, chunks=chunks, overwrite=True)

    def get(self, name: str) -> Any:
        return self._group[name]

    @property
    def attributes(self) -> Any:
        return self._group.attrs

    def flush(self) -> None:
        """Every write is a file of its own already."""

    def close(self) -> None:
        """Nothing is open."""


def zarr(path: Path) -> ArrayExport:
    """A folder, or its continuation."""
    return ArrayExport(path, _Zarr(path))
