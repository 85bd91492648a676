# SPDX-License-Identifier: Apache-2.0
"""Rows of frames as arrays, and what their values look like: exact for every dtype, without Spark."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest

from tensorpool.errors import ConfigError
from tensorpool.lake.durations import parse_duration_ns
from tensorpool.lake.payloads import array_of, arrays_of, frames_to_numpy
from tensorpool.lake.pixels import CHUNK, Pixels, measure
from tensorpool.shm.arrays import dtype_of
from tests.support.frame_rows import bit_row, row, table

INTEGERS = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8")
NUMBERS = (*INTEGERS, "f4", "f8", "?")
SHAPES = hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5)


def pixels(array: np.ndarray[Any, Any], **options: Any) -> Pixels:
    raw = np.frombuffer(array.tobytes(), np.uint8)
    return measure(raw, dtype_of(array.dtype).name, array.size, **options)


@hypothesis.given(st.data())
def test_every_dtype_shape_and_order_comes_back_as_it_was(data: st.DataObject) -> None:
    """From rows, from Arrow, and from a slice of Arrow."""
    dtype = np.dtype(data.draw(st.sampled_from(NUMBERS)))
    arrays = data.draw(st.lists(hnp.arrays(dtype, SHAPES), min_size=1, max_size=3))
    given = [np.asfortranarray(array) if data.draw(st.booleans()) else array for array in arrays]
    rows = [row(array, seq=seq) for seq, array in enumerate(given)]
    whole = table(rows)
    for found in (
        frames_to_numpy(rows),
        frames_to_numpy(whole),
        frames_to_numpy(whole.combine_chunks().to_batches()[0]),
    ):
        for array, back in zip(given, found, strict=True):
            np.testing.assert_array_equal(back, array)
            assert back.dtype == array.dtype
            assert back.flags.fnc == array.flags.fnc or array.size <= 1
    sliced = frames_to_numpy(whole.slice(len(given) - 1))
    np.testing.assert_array_equal(sliced[0], given[-1])


def test_views_are_arrows_own_memory_and_read_only() -> None:
    """Nothing is copied, and no caller can write to what others read."""
    batch = table([row(np.arange(8, dtype=np.uint16))]).to_batches()[0]
    (view,) = arrays_of(batch)
    assert view is not None
    assert not view.flags.writeable
    data = batch.column("payload").buffers()[2]
    assert data.address <= view.ctypes.data < data.address + data.size


def test_bit_and_bytes_and_frames_without_payload() -> None:
    """BIT shows its packed bytes, BYTES uint8, and a shape without bytes an empty array."""
    bits, raw, empty = frames_to_numpy(
        [bit_row(11), row(dtype="BYTES"), row(np.zeros((3, 0), np.float32)) | {"shape": [3, 4]}]
    )
    assert bits.tolist() == [255, 224]
    assert (raw.dtype, raw.shape) == (np.uint8, (2, 3))
    assert (empty.dtype, empty.shape) == (np.float32, (0,))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtype": "COMPLEX"}, "COMPLEX.*one of UINT8"),
        ({"shape": [2, 4]}, "6 bytes.*8 for UINT8"),
        ({"order": "Z"}, "C or F"),
        ({"payload": None}, "payload=inline"),
    ],
)
def test_rows_that_are_no_frames_are_refused(fields: dict[str, Any], words: str) -> None:
    """With what they should have been."""
    with pytest.raises(ConfigError, match=words):
        frames_to_numpy([row() | fields])
    with pytest.raises(ConfigError, match=words):
        frames_to_numpy(table([row() | fields]))


@pytest.mark.parametrize("rows", ["text", 3, {"a": 1}, [{"seq": 1}], pa.table({"seq": [1]})], ids=str)
def test_what_holds_no_frames_is_refused(rows: Any) -> None:
    """By name, with what to give."""
    with pytest.raises(ConfigError, match=r"rows of frames|columns of frames"):
        frames_to_numpy(rows)


@hypothesis.given(st.data())
def test_integers_are_measured_without_rounding(data: st.DataObject) -> None:
    """Extremes and mean are those of exact arithmetic, also at the ends of ranges; the spread is near."""
    dtype: Any = np.dtype(data.draw(st.sampled_from(INTEGERS)))
    limits = np.iinfo(dtype)
    ends = st.sampled_from([int(limits.min), int(limits.min) + 1, int(limits.max) - 1, int(limits.max)])
    elements = st.one_of(ends, st.integers(int(limits.min), int(limits.max)))
    values = data.draw(st.lists(elements, min_size=1, max_size=20))
    found = pixels(np.array(values, dtype))
    mean = Fraction(sum(values), len(values))
    assert (found.values, found.low, found.high) == (len(values), min(values), max(values))
    assert found.mean == float(mean)
    spread = float(sum((value - mean) ** 2 for value in values))
    assert found.spread == pytest.approx(spread, rel=1e-9, abs=1e-9)
    saturated = sum(value == limits.max or (value == limits.min and limits.min < 0) for value in values)
    assert found.saturated == saturated


@hypothesis.given(
    hnp.arrays(st.sampled_from([np.float32, np.float64]), st.integers(1, 30), elements=st.floats(-1e6, 1e6, width=32)),
    st.data(),
)
def test_floats_are_measured_around_nan(values: np.ndarray[Any, Any], data: st.DataObject) -> None:
    """NaN is counted, and is no value."""
    values[data.draw(hnp.arrays(np.bool_, values.size))] = np.nan
    found = pixels(values)
    kept = values[~np.isnan(values)].astype(np.float64)
    assert (found.values, found.nan) == (kept.size, values.size - kept.size)
    if not kept.size:
        assert (found.low, found.high, found.mean, found.std) == (None, None, None, None)
        return
    assert (found.low, found.high) == (kept.min(), kept.max())
    assert found.mean == pytest.approx(kept.mean(), rel=1e-9, abs=1e-6)
    assert found.std == pytest.approx(kept.std(), rel=1e-6, abs=1e-4)


def test_large_frames_are_measured_chunk_by_chunk() -> None:
    """The chunks of a frame add up to the whole."""
    rng = np.random.default_rng(1)
    for array in (
        rng.integers(0, 65_536, 3 * CHUNK + 7, np.uint16),
        rng.integers(2**63, 2**64, 2 * CHUNK + 1, np.uint64, endpoint=False),
        rng.normal(1e9, 1.0, 2 * CHUNK + 1),
    ):
        found = pixels(array)
        exact = array - array.min()
        assert found.std == pytest.approx(float(exact.astype(np.float64).std()), rel=1e-9)
        assert found.high == array.max()


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        ([np.inf, 1.0], (1.0, math.inf, math.inf)),
        ([-np.inf, np.nan], (-math.inf, -math.inf, -math.inf)),
        ([1e308, 1e308, 1e308], (1e308, 1e308, pytest.approx(1e308))),
    ],
)
def test_the_extremes_of_floats_are_reported_as_they_are(array: list[float], expected: Any) -> None:
    """Infinities are values; near the largest number nothing overflows."""
    found = pixels(np.array(array))
    assert (found.low, found.high, found.mean) == expected


def test_bits_and_booleans_are_measured_as_ones_and_zeros() -> None:
    """Padding is no bit."""
    one = measure(np.packbits(np.array([1, 1, 1, 1, 1, 1, 1, 1, 0, 1], np.uint8)), "BIT", 10)
    assert (one.values, one.low, one.high, one.mean) == (10, 0, 1, 0.9)
    assert one.std == pytest.approx(0.3)
    both = pixels(np.array([True, False]))
    assert (both.low, both.high, both.mean, both.std) == (0, 1, 0.5, 0.5)
    assert pixels(np.empty(0, np.uint8)) == Pixels()


@pytest.mark.parametrize(
    ("values", "dtype", "scale", "saturated"),
    [
        ([4094, 4095, 5000], "u2", 4095, 2),
        ([0.5, 1.0, np.nan], "f4", 1.0, 1),
        ([1, 2], "u1", 300, 0),
        ([1, 2], "u1", -1, 2),
    ],
)
def test_a_scale_of_its_own_decides_what_is_saturated(values: Any, dtype: str, scale: float, saturated: int) -> None:
    """As for a camera of 12 bits in 16."""
    assert pixels(np.array(values, dtype), full_scale=scale).saturated == saturated


def test_spans_of_time_are_read_as_people_write_them() -> None:
    """And refused with examples."""
    assert [parse_duration_ns("w", text) for text in ("1s", "500ms", " 1.5m ", "2h")] == [
        10**9, 5 * 10**8, 90 * 10**9, 7200 * 10**9,
    ]  # fmt: skip
    for wrong in ("", "s", "1", "-1s", "0s", "1 week", "1e3s"):
        with pytest.raises(ConfigError, match="such as 500ms"):
            parse_duration_ns("window", wrong)


def test_array_of_checks_what_it_shows() -> None:
    """A payload of another size is no such tensor."""
    with pytest.raises(ConfigError, match="3 bytes"):
        array_of(b"abc", "UINT16", [2])
