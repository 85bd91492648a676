# SPDX-License-Identifier: Apache-2.0
"""What an export is: a file or a folder that takes frames one by one, and can be continued after an interruption."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tensorpool import pixel_formats
from tensorpool.errors import TensorPoolError
from tensorpool.shm.arrays import Array


class ExportRefused(TensorPoolError):
    """Frames that a format cannot hold, or a target that holds something else."""


class ExportFrame(msgspec.Struct, frozen=True, eq=False):
    """A frame on its way out. `time_ns` is UTC since 1970; None where it is not known."""

    epoch: int
    seq: int
    time_ns: int | None
    timestamp_ns: int | None
    array: Array
    pixel_format: str | None

    @property
    def position(self) -> tuple[int, int]:
        return self.epoch, self.seq

    def rgb(self) -> Array:
        """The pixels for formats that know gray, RGB and RGBA only. Raises ExportRefused for what is none of them."""
        if self.pixel_format in ("bgr24", "bgra"):
            return self.array[:, :, [2, 1, 0, 3][: self.array.shape[2]]]
        if pixel_formats.guess(self.array.shape, self.array.dtype) is None or self.pixel_format in ("nv12", "yuv420p"):
            shape = "x".join(map(str, self.array.shape))
            raise ExportRefused(
                f"frame {self.seq} is {shape} {self.array.dtype} {self.pixel_format or ''}, and no picture of gray, "
                "RGB or RGBA with 8 or 16 bits; export it as npy, zarr or hdf5"
            )
        return self.array


class Missing(msgspec.Struct, frozen=True):
    """Frames of an epoch that are not in the export: `lo` up to, not including, `hi`."""

    epoch: int
    lo: int
    hi: int
    reason: str


class Written(msgspec.Struct, frozen=True):
    """How much an unfinished export holds: as many frames, the last of them at `position`, an epoch and a seq."""

    frames: int = 0
    position: tuple[int, int] | None = None


class Export(Protocol):
    """One format. It writes to a path that is not the final one; who made it renames it once it is complete."""

    def resume(self) -> Written:
        """Open what an earlier run left at the path, or begin. What cannot be continued is begun anew."""

    def add(self, frame: ExportFrame) -> None:
        """Write a frame. Raises ExportRefused for one that the format cannot hold."""

    def finish(self, missing: Sequence[Missing], about: dict[str, Any]) -> Path:
        """Complete it, with what is missing and what it was made from where the format can say so; what to rename."""

    def suspend(self) -> None:
        """Close it so that a later run can continue."""


def refuse_change(path: Path, first: tuple[tuple[int, ...], str], frame: ExportFrame) -> None:
    """For formats whose frames are all alike. Raises ExportRefused."""
    if (frame.array.shape, str(frame.array.dtype)) != first:
        raise ExportRefused(
            f"{path.name}: frame {frame.seq} is {frame.array.dtype} {frame.array.shape}, those before are "
            f"{first[1]} {first[0]}; export the parts on their own, with --from and --to"
        )
