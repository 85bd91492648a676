# SPDX-License-Identifier: Apache-2.0
"""What the values of a frame look like: extremes, mean, spread and saturation, exact for every dtype.

Integers are added as integers: nothing is rounded before the last step. NaN is no value; it is counted on its own.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
import numpy as np

from tensorpool.lake.payloads import dtype_named
from tensorpool.shm.arrays import Array, numpy_dtype
from tensorpool.wire.control import Dtype

CHUNK: Final = 1 << 16  # elements that are looked at together: they stay in the cache


class Pixels(msgspec.Struct, frozen=True):
    """Of one frame. `spread` is the sum of squared distances from the mean, which adds up across frames."""

    values: int = 0  # elements that are a number
    nan: int = 0
    low: int | float | None = None
    high: int | float | None = None
    mean: float | None = None
    spread: float = 0.0
    saturated: int | None = None  # elements at the end of the scale; None where there is no scale

    @property
    def std(self) -> float | None:
        return math.sqrt(self.spread / self.values) if self.values else None


def measure(payload: Array, dtype: str, count: int, full_scale: float | None = None) -> Pixels:
    """Of the bytes of a payload with `count` elements; its order does not matter.

    >>> measure(np.array([1, 2, 255], np.uint8), "UINT8", 3).saturated
    1

    `full_scale` is the value from which on an element is saturated: 4095 for a camera of 12 bits. By default the
    largest value of an integer dtype; floats have none.
    """
    wire = dtype_named(dtype)
    if not payload.nbytes:
        return Pixels()
    if wire is Dtype.BIT:
        return _bits(payload, count)
    values = payload.view(numpy_dtype(wire))
    if values.dtype.kind == "f":
        return _floats(values, full_scale)
    if values.dtype.kind == "b":
        ones = int(np.count_nonzero(values))
        return _of_bits(ones, values.size)
    return _integers(values, full_scale)


def _bits(payload: Array, count: int) -> Pixels:
    return _of_bits(int(np.count_nonzero(np.unpackbits(payload, count=count))), count)


def _of_bits(ones: int, count: int) -> Pixels:
    if not count:
        return Pixels()
    spread = ones * (count - ones) / count
    return Pixels(count, 0, int(ones == count), int(ones > 0), ones / count, spread, None)


def _integers(values: Array, full_scale: float | None) -> Pixels:
    low, high = int(values.min()), int(values.max())
    if values.dtype.itemsize <= 2:
        total, squares = _small_sums(values)
        spread = (values.size * squares - total * total) / values.size
        mean = total / values.size
    else:
        mean, spread = _large_sums(values, low)
    limits = np.iinfo(values.dtype)
    if full_scale is not None:
        saturated = _count(values, high, math.ceil(full_scale), limits)
    else:
        saturated = _count(values, high, int(limits.max), limits)
        if limits.min < 0 and low == limits.min:
            saturated += int(np.count_nonzero(values == limits.min))
    return Pixels(values.size, 0, low, high, mean, spread, saturated)


def _count(values: Array, high: int, limit: int, limits: Any) -> int:
    if high < limit:
        return 0
    return values.size if limit <= limits.min else int(np.count_nonzero(values >= limit))


def _small_sums(values: Array) -> tuple[int, int]:
    """Sum and sum of squares. Of 16 bits, a chunk's sums stay below 2^53: float64 holds them exactly."""
    total = squares = 0
    for at in range(0, values.size, CHUNK):
        chunk = values[at : at + CHUNK].astype(np.float64)
        total += int(chunk.sum())
        squares += int(np.dot(chunk, chunk))
    return total, squares


def _large_sums(values: Array, low: int) -> tuple[float, float]:
    """Mean and spread, by the distance from the lowest value: that one is exact in unsigned arithmetic."""
    unsigned = np.dtype(f"u{values.dtype.itemsize}")
    base = unsigned.type(low % (1 << (8 * values.dtype.itemsize)))
    flat = values.view(unsigned)
    total = 0
    for at in range(0, flat.size, CHUNK):
        distance = (flat[at : at + CHUNK] - base).astype(np.uint64)
        total += (int((distance >> np.uint64(32)).sum()) << 32) + int((distance & np.uint64(0xFFFFFFFF)).sum())
    middle = total / flat.size
    spread = 0.0
    for at in range(0, flat.size, CHUNK):
        apart = (flat[at : at + CHUNK] - base).astype(np.float64) - middle
        spread += float(np.dot(apart, apart))
    return (low * flat.size + total) / flat.size, spread


def _floats(values: Array, full_scale: float | None) -> Pixels:
    with np.errstate(invalid="ignore"):
        low, high = float(np.fmin.reduce(values)), float(np.fmax.reduce(values))
    if math.isnan(low):
        return Pixels(0, values.size, saturated=None if full_scale is None else 0)
    nan = int(np.count_nonzero(np.isnan(values)))
    kept = values.size - nan
    is_finite = math.isfinite(low) and math.isfinite(high)
    mean = _float_mean(values, kept) if is_finite else _infinite_mean(low, high)
    spread = _float_spread(values, mean) if is_finite else math.nan
    saturated = None if full_scale is None else int(np.count_nonzero(values >= full_scale))
    return Pixels(kept, nan, low, high, mean, spread, saturated)


def _float_mean(values: Array, kept: int) -> float:
    chunks = range(0, values.size, CHUNK)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = [float(np.nansum(values[at : at + CHUNK], dtype=np.float64)) for at in chunks]
        if not all(map(math.isfinite, sums)):  # near the end of float64's range: divide before adding
            return math.fsum(float(np.nansum(values[at : at + CHUNK] / kept)) for at in chunks)
    return math.fsum(sum_ / kept for sum_ in sums)


def _float_spread(values: Array, mean: float) -> float:
    spread = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for at in range(0, values.size, CHUNK):
            apart = values[at : at + CHUNK].astype(np.float64) - mean
            apart[np.isnan(apart)] = 0.0
            spread += float(np.dot(apart, apart))
    return spread


def _infinite_mean(low: float, high: float) -> float:
    return math.nan if low == -math.inf and high == math.inf else (low if low == -math.inf else high)
