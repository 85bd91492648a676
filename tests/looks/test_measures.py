# SPDX-License-Identifier: Apache-2.0
"""Histograms, profiles and single pixels, against values counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tensorpool.looks import Look, NotShown, histogram, pixel, pixels_of, profile
from tensorpool.wire.control import Dtype

LOOK = Look()


def test_a_histogram_counts_the_region() -> None:
    """Of uint8 one bin for each value; of others 256 bins between the extremes; what is not finite is not counted."""
    array = np.array([[0, 0, 7], [255, 7, 7]], np.uint8)
    found = histogram(array, LOOK)
    assert (found.low, found.high, len(found.counts)) == (0, 255, 256)
    assert {value: count for value, count in enumerate(found.counts) if count} == {0: 2, 7: 3, 255: 1}
    assert sum(histogram(array, Look(region=(2, 0, 1, 2))).counts) == 2
    floats = np.array([[0.0, 1.0, np.nan], [np.inf, 0.5, 0.999]])
    found = histogram(floats, LOOK)
    assert (found.low, found.high) == (0, 1)
    assert {value: count for value, count in enumerate(found.counts) if count} == {0: 1, 128: 1, 255: 2}
    assert histogram(np.full((3, 3), 5), LOOK).counts[0] == 9
    assert sum(histogram(np.zeros((0, 3)), LOOK).counts) == 0
    assert sum(histogram(np.array([-1e308, 1e308]), LOOK).counts) == 2


def test_a_histogram_of_a_large_array_is_of_a_part_of_it() -> None:
    """Which has the same shares."""
    array = np.tile(np.arange(4, dtype=np.uint8), (3000, 1000))
    counts = histogram(array[:, ::-1], LOOK).counts
    assert 10_000 < sum(counts) <= 1 << 18
    assert sum(histogram(np.zeros(10_000_000, np.int16), LOOK).counts) <= 1 << 18


def test_a_pixel_is_the_value_in_the_array() -> None:
    """By the coordinates of the array, whatever region is shown; channels in the array's order."""
    array = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    assert pixel(array, Look(region=(1, 1, 1, 1)), 3, 0, "bgr24") == [9, 10, 11]
    assert pixel(np.array([[2**63, 1], [1, 1]], np.uint64), LOOK, 0, 0) == 2**63
    assert pixel(np.array([[1, 3 + 4j], [0, 0]]), LOOK, 1, 0) == 5.0
    assert pixel(np.array([[True, False], [False, False]]), LOOK, 0, 0) == 1
    assert pixel(np.array([1.0, 2.5]), LOOK, 1, 0) == 2.5
    assert pixel(np.arange(8).reshape(2, 2, 2, 1), Look(index=(1,)), 1, 0) == 5
    with pytest.raises(NotShown, match="there is no pixel at 4, 0: the picture has 4 x 2"):
        pixel(array, LOOK, 4, 0)
    with pytest.raises(NotShown, match="the array is empty"):
        pixel(np.zeros((0, 4)), LOOK, 0, 0)


def test_a_profile_follows_the_line() -> None:
    """From one end to the other, both included; beyond the edge it ends there; long ones have 1024 values."""
    array = np.arange(25, dtype=np.int16).reshape(5, 5)
    assert profile(array, LOOK, (0, 0, 4, 4)) == [0, 6, 12, 18, 24]
    assert profile(array, LOOK, (3, 2, 1, 2)) == [13, 12, 11]
    assert profile(array, LOOK, (-9, 1, 99, 1)) == [5, 6, 7, 8, 9]
    assert profile(array, LOOK, (2, 2, 2, 2)) == [12]
    assert profile(np.arange(6).reshape(1, 2, 3), LOOK, (0, 0, 1, 0)) == [[0, 1, 2], [3, 4, 5]]
    assert profile(np.arange(4.0), LOOK, (1, 0, 2, 0)) == [1.0, 2.0]
    assert len(profile(np.zeros((10, 5000)), LOOK, (0, 0, 4999, 0))) == 1024
    with pytest.raises(NotShown, match="there is no line along"):
        profile(array, LOOK, (0, 0, float("nan"), 0))


def test_bits_are_unpacked() -> None:
    """A frame of bits has packed bytes; it is looked at bit by bit, in its own order."""

    class Bits:
        array = np.packbits([1, 0, 1, 1, 0, 0])
        wire_dtype = Dtype.BIT
        shape = (2, 3)

        def __init__(self, order: str) -> None:
            self.order = order

    assert pixels_of(Bits("C")).tolist() == [[True, False, True], [True, False, False]]
    assert pixels_of(Bits("F")).tolist() == [[True, True, False], [False, True, False]]
