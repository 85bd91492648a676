# SPDX-License-Identifier: Apache-2.0
"""Which values become black and white, and values as shades from 0 to 255.

NaN is black, infinities are the ends of the scale. The extremes are those of the picture, not of the whole array.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tensorpool.looks.look import Look
from tensorpool.shm.arrays import Array

PERCENTILES: Final = (1.0, 99.0)
MAX_SAMPLES: Final = 1 << 16  # of which percentiles are computed
TABLED: Final = ("uint8", "uint16")  # dtypes of which each value is computed once


def bounds(values: Array, dtype: np.dtype[Any], look: Look) -> tuple[float, float]:
    """The values of a picture of an array of `dtype` that become black and white; 0 and 0 where none is finite."""
    if look.scale == "fixed" and look.low is not None and look.high is not None:
        return look.low, look.high
    if look.scale == "full" or (look.scale == "auto" and dtype.name in ("uint8", "bool")):
        return full_range(dtype)
    if look.scale == "minmax":
        return extremes(values)
    flat = values.reshape(-1)
    some = flat[:: -(-flat.size // MAX_SAMPLES) or 1]
    finite = some if some.dtype.kind in "iu" else some[np.isfinite(some)]
    if finite.size:
        with np.errstate(over="ignore", invalid="ignore"):
            low, high = (float(value) for value in np.percentile(finite, PERCENTILES))
        if -np.inf < low < high < np.inf:
            return low, high
    return extremes(values)


def full_range(dtype: np.dtype[Any]) -> tuple[float, float]:
    """All that integers can be; 0 to 1 of everything else."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return float(limits.min), float(limits.max)
    return 0.0, 1.0


def extremes(values: Array) -> tuple[float, float]:
    """The least and the largest finite value; 0 and 0 where there is none."""
    finite = values if values.dtype.kind in "iu" else values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def shades(values: Array, low: float, high: float) -> Array:
    """Values as uint8: `low` is 0, `high` is 255."""
    if values.dtype == np.uint8 and (low, high) == (0.0, 255.0):
        return values
    if values.dtype.name in TABLED and values.size > 256:
        table = _shades(np.arange(np.iinfo(values.dtype).max + 1), low, high)
        return table[values]
    return _shades(values, low, high)


def _shades(values: Array, low: float, high: float) -> Array:
    """In halves, so that the span of any two numbers is a number."""
    is_wide = values.dtype.itemsize > 4 or values.dtype.kind in "iu"
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        scaled: Array = values.astype(np.float64 if is_wide else np.float32)
        scaled *= 0.5
        scaled -= low / 2
        span = high / 2 - low / 2
        scaled *= (255.0 / np.float64(span)) if span else np.inf
        scaled += 0.5
        np.clip(scaled, 0, 255, out=scaled)
    scaled[np.isnan(scaled)] = 0  # NaN, and where all values are the same
    return scaled.astype(np.uint8)
