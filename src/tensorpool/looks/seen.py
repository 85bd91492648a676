# SPDX-License-Identifier: Apache-2.0
"""What of an array a look shows: which slice, which region, and what its elements mean. Views only, no copy.

The last axes are the picture: (height, width), or (height, width, channels) with two to four channels. A 3-D array
whose last axis has another length is a stack of pictures. An array with one long axis is a line.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from tensorpool import pixel_formats
from tensorpool.looks.look import Look, NotShown
from tensorpool.shm.arrays import Array

COLOURS: Final = (2, 3, 4)  # lengths of a last axis that is taken for channels; 1 is one channel: grey
PLANAR: Final = ("nv12", "yuv420p")  # the chroma is below the luma, half as high
# Of the two rows and columns of a Bayer pattern: where red is. Blue is diagonally opposite.
_RED: Final = {"rggb": (0, 0), "bggr": (1, 1), "gbrg": (1, 0), "grbg": (0, 1)}


class Chroma(msgspec.Struct, frozen=True, eq=False):
    """The colour planes of YUV, and how many pixels share one of their elements."""

    u: Array
    v: Array
    rows: int
    columns: int


class Seen(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A slice of an array and its region.

    `channels` has the planes of each colour (one colour: grey; none: a line); several planes of a colour are averaged.
    An element of a plane stands for `unit` x `unit` elements of the array.
    """

    raw: Array  # the region of the slice, as it is in the array: 1-D, 2-D, or 3-D with channels
    channels: tuple[tuple[Array, ...], ...]
    chroma: Chroma | None = None
    unit: int = 1
    size: tuple[int, int]  # width and height of the slice
    region: tuple[int, int, int, int]  # of the slice: what of the look's region there is
    axes: tuple[int, ...]  # lengths of those that `index` chooses from
    dtype: np.dtype[Any]


def see(array: Array, look: Look, pixel_format: str | None = None) -> Seen:
    """What a look shows of an array whose stream states `pixel_format`. Raises NotShown."""
    values = np.asarray(array)
    _require_numbers(values.dtype)
    has_channels = values.ndim >= 3 and values.shape[-1] in COLOURS
    if values.ndim >= 3 and values.shape[-1] == 1:
        values = values[..., 0]
    ndim = 3 if has_channels else min(values.ndim, 2)
    name = _format(values.shape[values.ndim - ndim :], values.dtype, pixel_format)
    axes = values.shape[: values.ndim - ndim]
    raw = _slice(values, axes, look.index)
    is_line = raw.ndim < 2 or (raw.ndim == 2 and 1 in raw.shape and raw.size > 0)
    if is_line:
        raw = raw.reshape(1) if raw.ndim == 0 else raw[0] if raw.ndim == 2 and raw.shape[0] == 1 else raw
        raw = raw[:, 0] if raw.ndim == 2 else raw
        size = len(raw), 1
    else:
        size = raw.shape[1], raw.shape[0] * 2 // 3 if name in PLANAR else raw.shape[0]
    is_bayer = name is not None and name.startswith("bayer_")
    x, y, width, height = region = _clipped(look.region, size, align=2 if is_bayer else 1)
    shown = raw[x : x + width] if is_line else raw[y : y + height, x : x + width]
    channels: tuple[tuple[Array, ...], ...]
    chroma, unit = None if is_line else _chroma(raw, name, size), 1
    if is_line:
        channels = ()
    elif is_bayer and min(shown.shape) >= 2:
        channels, unit = _bayer(shown, str(name)), 2
    elif shown.ndim == 2:
        channels = ((shown,),)
    elif chroma is not None:
        channels = ((shown[..., 1 if name == "uyvy422" else 0],),)
    else:
        order = (2, 1, 0) if name in ("bgr24", "bgra") else (0, 1, 2)
        channels = tuple((shown[..., at],) for at in order[: shown.shape[2]])
    return Seen(
        raw=shown,
        channels=channels,
        chroma=chroma,
        unit=unit,
        size=size,
        region=region,
        axes=axes,
        dtype=values.dtype,
    )


def _require_numbers(dtype: np.dtype[Any]) -> None:
    is_numeric = dtype.kind in "biufc" or (dtype.kind == "V" and dtype.type is not np.void)  # those of ml_dtypes
    if not is_numeric:
        raise NotShown(f"an array of {dtype} cannot be shown; arrays of numbers and of booleans can")


def _format(shape: tuple[int, ...], dtype: np.dtype[Any], stated: str | None) -> str | None:
    """The pixel format of a slice; None where it has none that has a name."""
    if len(shape) < 2:
        return None
    name = pixel_formats.of(shape, dtype, stated)
    is_whole = shape[0] % 3 == 0 and shape[0] * 2 // 3 % 2 == 0 and shape[1] % 2 == 0  # pairs of rows and columns
    return None if name in PLANAR and not is_whole else name


def _slice(values: Array, axes: tuple[int, ...], index: tuple[int, ...]) -> Array:
    if len(index) > len(axes):
        raise NotShown(f"look.index has {len(index)} numbers, and an array of {values.shape} has {len(axes)} to choose")
    for axis, (number, length) in enumerate(zip(index, axes, strict=False)):
        if number >= length:
            raise NotShown(f"look.index: {number} of axis {axis}, which has {length}")
    if 0 in axes:
        return values[(slice(0),) * len(axes)].reshape(0, 0)
    chosen: Array = values[tuple(index) + tuple(length // 2 for length in axes[len(index) :])]
    return chosen


def _clipped(region: tuple[int, int, int, int] | None, size: tuple[int, int], align: int) -> tuple[int, int, int, int]:
    """What of a region there is; it starts at a multiple of `align`."""
    width, height = size
    if region is None or not width or not height:
        return 0, 0, width, height
    left, top = (start - start % align for start in region[:2])
    right, bottom = min(region[0] + region[2], width), min(region[1] + region[3], height)
    if left >= right or top >= bottom:
        raise NotShown(f"look.region {region} is outside of the picture, which has {width} x {height} pixels")
    return left, top, right - left, bottom - top


def _bayer(raw: Array, name: str) -> tuple[tuple[Array, ...], ...]:
    """Red, green and blue of each quad of elements: half as wide and high as the array."""
    row, column = _RED[name[len("bayer_") :][:4]]
    whole = raw[: raw.shape[0] // 2 * 2, : raw.shape[1] // 2 * 2]
    greens = whole[row::2, 1 - column :: 2], whole[1 - row :: 2, column::2]
    return (whole[row::2, column::2],), greens, (whole[1 - row :: 2, 1 - column :: 2],)


def _chroma(raw: Array, name: str | None, size: tuple[int, int]) -> Chroma | None:
    width, height = size
    match name:
        case "nv12":
            return Chroma(raw[height:, 0::2], raw[height:, 1::2], 2, 2)
        case "yuv420p":
            flat, count = raw[height:].reshape(-1), height // 2 * (width // 2)
            shape = height // 2, width // 2
            return Chroma(flat[:count].reshape(shape), flat[count : 2 * count].reshape(shape), 2, 2)
        case "yuyv422" | "uyvy422" if width >= 2:
            at = 1 if name == "yuyv422" else 0
            return Chroma(raw[:, 0 : width // 2 * 2 : 2, at], raw[:, 1::2, at], 1, 2)
    return None
