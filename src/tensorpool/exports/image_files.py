# SPDX-License-Identifier: Apache-2.0
"""A folder of files, one per frame: PNG, TIFF or NPY, named EPOCH-SEQ. Each appears under its name when it is whole."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from tensorpool.exports.protocol import ExportFrame, ExportRefused, Missing, Written
from tensorpool.extras import library

_NAME: Final = re.compile(r"(\d+)-(\d+)")


class FileExport:
    """Writes each frame by `save`, a function of a path and a frame."""

    def __init__(self, folder: Path, suffix: str, save: Callable[[Path, ExportFrame], None]) -> None:
        self._folder = folder
        self._suffix = suffix
        self._save = save

    def resume(self) -> Written:
        self._folder.mkdir(parents=True, exist_ok=True)
        names = [_NAME.fullmatch(path.stem) for path in self._folder.glob(f"*{self._suffix}")]
        found = [(int(name[1]), int(name[2])) for name in names if name is not None]
        return Written(len(found), max(found, default=None))

    def add(self, frame: ExportFrame) -> None:
        name = f"{frame.epoch}-{frame.seq:010}"
        draft = self._folder / f".{name}{self._suffix}"
        self._save(draft, frame)
        os.replace(draft, self._folder / f"{name}{self._suffix}")

    def finish(self, missing: Sequence[Missing], about: dict[str, Any]) -> Path:
        for draft in self._folder.glob(f".*{self._suffix}"):
            draft.unlink()  # of a run that was killed
        return self._folder

    def suspend(self) -> None:
        """Nothing is open."""


def png(folder: Path) -> FileExport:
    """8-bit gray, RGB, RGBA; 16-bit gray."""
    image = library("PIL.Image", "writing PNG", "export")

    def save(path: Path, frame: ExportFrame) -> None:
        pixels = frame.rgb()
        if pixels.dtype == np.uint16 and pixels.ndim == 3:
            raise ExportRefused(f"frame {frame.seq} has 16 bits and {pixels.shape[2]} channels: export it as tiff")
        image.fromarray(pixels).save(path, format="PNG", compress_level=1)

    return FileExport(folder, ".png", save)


def tiff(folder: Path) -> FileExport:
    """Every numeric dtype; epoch, seq and time are in the description, as JSON."""
    tifffile = library("tifffile", "writing TIFF", "export")

    def save(path: Path, frame: ExportFrame) -> None:
        is_color = frame.array.ndim == 3 and frame.array.shape[2] in (3, 4) and frame.array.dtype.kind == "u"
        description = {
            "epoch": frame.epoch,
            "seq": frame.seq,
            "time_ns": frame.time_ns,
            "timestamp_ns": frame.timestamp_ns,
        }
        pixels = frame.rgb() if is_color else frame.array
        kind = "rgb" if is_color else "minisblack"
        text = msgspec.json.encode(description).decode()
        tifffile.imwrite(path, pixels, photometric=kind, description=text, metadata=None)

    return FileExport(folder, ".tif", save)


def npy(folder: Path) -> FileExport:
    """Arrays as they are."""
    return FileExport(folder, ".npy", lambda path, frame: np.save(path, frame.array, allow_pickle=False))
