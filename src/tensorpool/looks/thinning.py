# SPDX-License-Identifier: Apache-2.0
"""Fewer elements of an array, as numbers that numpy computes with. Reads only what it keeps."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tensorpool.shm.arrays import Array

_SINGLE: Final = {"c": 8, "i": 2, "u": 2}  # bytes that an element of a kind may have for float32 to hold it; else 4


def float_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """float32 where it holds every value of `dtype`, or all but its last digits; else float64."""
    return np.dtype(np.float32 if dtype.itemsize <= _SINGLE.get(dtype.kind, 4) else np.float64)


def plain(values: Array) -> Array:
    """Integers as they are, booleans as 0 and 1, complex numbers by their magnitude, all others as float32 or 64."""
    if values.dtype.kind == "b":
        return values.view(np.uint8)
    if values.dtype.kind in "iu":
        return values.astype(values.dtype.newbyteorder("="), copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        # In one order: the last bit of a magnitude depends on how the numbers lie in memory.
        magnitudes: Array = np.abs(np.array(values, order="C")) if values.dtype.kind == "c" else values
        return magnitudes.astype(float_of(values.dtype), copy=False)


def thin(planes: tuple[Array, ...], step: int, *, lossless: bool) -> Array:
    """Every `step`-th element, or means: of four elements of each block of `step` x `step`, and of all planes.

    At the right and the lower edge blocks may be incomplete: of them the first element stands for all.
    """
    corners = [plane[::step, ::step] for plane in planes]
    if lossless or (step == 1 and len(planes) == 1):
        return plain(corners[0])
    height, width = (length // step for length in planes[0].shape)
    ends = sorted({step // 4, step - 1 - step // 4})
    samples = [
        plane[row : height * step : step, column : width * step : step]
        for plane in planes
        for row in ends
        for column in ends
    ]
    means = _mean(samples)
    if means.shape == corners[0].shape:
        return means
    whole = _mean(corners)
    whole[:height, :width] = means
    return whole


def _mean(samples: list[Array]) -> Array:
    return _mean_of_bytes(samples) if samples[0].dtype == np.uint8 else _mean_of_numbers(samples)


def _mean_of_bytes(samples: list[Array]) -> Array:
    total = samples[0].astype(np.uint16)
    for sample in samples[1:]:
        total += sample
    total += len(samples) // 2
    total >>= len(samples).bit_length() - 1  # there are 1, 2, 4 or 8
    return total.astype(np.uint8)


def _mean_of_numbers(samples: list[Array]) -> Array:
    """Divided before they are added: the sum of large numbers may not be one."""
    dtype = float_of(samples[0].dtype)
    total = np.zeros(samples[0].shape, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for sample in samples:
            total += plain(sample) * dtype.type(1 / len(samples))
    return total
