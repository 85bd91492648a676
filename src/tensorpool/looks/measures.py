# SPDX-License-Identifier: Apache-2.0
"""Values of what is looked at: a histogram, the values along a line, one pixel. In the array's own numbers and order.

Complex numbers are measured by their magnitude. Of planes of YUV it is the luma.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
import numpy as np

from tensorpool.looks.look import Look, NotShown
from tensorpool.looks.scaling import extremes, full_range
from tensorpool.looks.seen import Seen, see
from tensorpool.looks.thinning import plain
from tensorpool.shm.arrays import Array

MAX_VALUES: Final = 1 << 18
BINS: Final = 256
MAX_PROFILE: Final = 1024


class Histogram(msgspec.Struct, frozen=True):
    """How often values occur, in 256 bins of equal width from `low` to `high`, which is in the last one."""

    low: float
    high: float
    counts: list[int]


def histogram(array: Array, look: Look, pixel_format: str | None = None) -> Histogram:
    """Of the region of a look, all channels together, from at most 2^18 values. Raises NotShown."""
    seen = see(array, look, pixel_format)
    axes = min(seen.raw.ndim, 2)
    step = max(1, math.ceil((seen.raw.size / MAX_VALUES) ** (1 / axes)))
    values = plain(seen.raw[(slice(None, None, step),) * axes]).reshape(-1)
    if seen.dtype == np.uint8:
        return Histogram(*full_range(seen.dtype), np.bincount(values, minlength=BINS).tolist())
    low, high = extremes(values)
    span = high / 2 - low / 2  # in halves: the span of any two numbers is a number
    finite = values[np.isfinite(values)].astype(np.float64)
    share = (finite / 2 - low / 2) / (span or 1.0)
    bins = np.clip(share * BINS, 0, BINS - 1).astype(np.int64)
    return Histogram(low, high, np.bincount(bins, minlength=BINS).tolist())


def profile(
    array: Array, look: Look, ends: tuple[float, float, float, float], pixel_format: str | None = None
) -> list[Any]:
    """The values of the pixels along a line from x0, y0 to x1, y1, at most 1024 of them. Raises NotShown.

    A value is a number, or a list of one for each channel. What is outside of the array counts to its edge.
    """
    seen = _whole(array, look, pixel_format)
    if not all(map(math.isfinite, ends)):
        raise NotShown(f"there is no line along {ends}")
    width, height = seen.size
    x0, x1 = (min(max(x, 0), width - 1) for x in ends[::2])
    y0, y1 = (min(max(y, 0), height - 1) for y in ends[1::2])
    count = min(MAX_PROFILE, round(max(abs(x1 - x0), abs(y1 - y0))) + 1)
    columns = np.rint(np.linspace(x0, x1, count)).astype(np.int64)
    rows = np.rint(np.linspace(y0, y1, count)).astype(np.int64)
    found = seen.raw[columns] if seen.raw.ndim == 1 else seen.raw[rows, columns]
    return list(plain(found).tolist())


def pixel(array: Array, look: Look, x: int, y: int, pixel_format: str | None = None) -> Any:
    """The value of the pixel at x, y of the array: a number, or a list of one for each channel. Raises NotShown."""
    seen = _whole(array, look, pixel_format)
    width, height = seen.size
    if not (0 <= x < width and 0 <= y < height):
        raise NotShown(f"there is no pixel at {x}, {y}: the picture has {width} x {height}")
    found = seen.raw[x] if seen.raw.ndim == 1 else seen.raw[y, x]
    return plain(np.asarray(found)).tolist()


def _whole(array: Array, look: Look, pixel_format: str | None) -> Seen:
    """The slice that a look shows, without its region."""
    seen = see(array, msgspec.structs.replace(look, region=None), pixel_format)
    if not seen.raw.size:
        raise NotShown("the array is empty")
    return seen
