# SPDX-License-Identifier: Apache-2.0
"""What the elements of a picture mean, by the names of FFmpeg: rgb24, gray16le, nv12.

A stream says it in its metadata, under KEY. Without it an array of three channels is taken for rgb24, of four for rgba,
of none for gray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

KEY: Final = "pixel_format"
BAYER: Final = ("rggb", "bggr", "gbrg", "grbg")


class PixelFormat(msgspec.Struct, frozen=True):
    """One format: how many channels an element has (0: no axis of its own), its dtype, and rows per row of pixels."""

    name: str
    channels: int
    dtype: str = "uint8"
    halves: int = 2  # rows of the array per two rows of the picture: 3 where chroma follows in planes

    def shape(self, width: int, height: int) -> tuple[int, ...]:
        """Of the array that holds a picture."""
        rows = height * self.halves // 2
        return (rows, width, self.channels) if self.channels else (rows, width)


_ALL: Final = (
    PixelFormat("gray", 0),
    PixelFormat("gray16le", 0, "uint16"),
    PixelFormat("rgb24", 3),
    PixelFormat("bgr24", 3),
    PixelFormat("rgba", 4),
    PixelFormat("bgra", 4),
    PixelFormat("rgb48le", 3, "uint16"),
    PixelFormat("rgba64le", 4, "uint16"),
    PixelFormat("yuyv422", 2),
    PixelFormat("uyvy422", 2),
    PixelFormat("nv12", 0, halves=3),
    PixelFormat("yuv420p", 0, halves=3),
    *(PixelFormat(f"bayer_{order}8", 0) for order in BAYER),
    *(PixelFormat(f"bayer_{order}16le", 0, "uint16") for order in BAYER),
)
FORMATS: Final = {known.name: known for known in _ALL}
_BY_ARRAY: Final = {
    ("uint8", 0): "gray",
    ("uint16", 0): "gray16le",
    ("uint8", 3): "rgb24",
    ("uint16", 3): "rgb48le",
    ("uint8", 4): "rgba",
    ("uint16", 4): "rgba64le",
}


def guess(shape: tuple[int, ...], dtype: np.dtype[Any]) -> str | None:
    """The format of an array of which nothing else is known; None where it is no picture."""
    if len(shape) == 2:
        return _BY_ARRAY.get((dtype.name, 0))
    return _BY_ARRAY.get((dtype.name, shape[2])) if len(shape) == 3 else None


def stated(attributes: Mapping[str, Any] | None) -> str | None:
    """What the metadata of a stream say; None where they say nothing."""
    found = None if attributes is None else attributes.get(KEY)
    return found if isinstance(found, str) else None


def of(shape: tuple[int, ...], dtype: np.dtype[Any], stated: object) -> str | None:
    """The format that a stream states, where an array can have it; otherwise the one that its shape suggests."""
    known = FORMATS.get(stated) if isinstance(stated, str) else None
    channels = shape[2] if len(shape) == 3 else 0
    if known is not None and len(shape) in (2, 3) and (known.dtype, known.channels) == (dtype.name, channels):
        return known.name
    return guess(shape, dtype)
