# SPDX-License-Identifier: Apache-2.0
"""Small pictures computed by hand: what each dtype, shape, scale and pixel format becomes."""

from __future__ import annotations

import io
import tracemalloc
from typing import Any

import cv2
import matplotlib
import numpy as np
import pytest
from PIL import Image

from tensorpool.looks import Look, NotShown, colormaps, drawn, encode, look_at
from tensorpool.pixel_formats import BAYER
from tensorpool.shm.arrays import Array


def pixels(array: Array, pixel_format: str | None = None, **look: Any) -> list[Any]:
    found: list[Any] = look_at(array, Look(**look), pixel_format).pixels.tolist()
    return found


def test_bytes_are_shown_as_they_are() -> None:
    """Grey and colour pictures of uint8 are not stretched: their values are the shades."""
    grey = np.array([[0, 10], [200, 255]], np.uint8)
    assert pixels(grey) == grey.tolist()
    colour = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    assert pixels(colour) == colour.tolist()
    picture = look_at(colour, Look())
    assert (picture.kind, picture.low, picture.high, picture.step) == ("picture", 0.0, 255.0, 1)
    assert (picture.size, picture.region, picture.axes) == ((2, 2), (0, 0, 2, 2), ())


def test_a_smaller_picture_has_means_or_every_nth_pixel() -> None:
    """Of 4 x 4 in blocks of two by two: their means, rounded; lossless: their first pixels."""
    array = np.array([[0, 2, 10, 10], [4, 6, 10, 11], [9, 0, 255, 255], [0, 0, 255, 255]], np.uint8)
    assert pixels(array, width=2, height=2) == [[3, 10], [2, 255]]
    assert pixels(array, width=2, height=2, lossless=True) == [[0, 10], [9, 255]]
    assert look_at(array, Look(width=2)).step == look_at(array, Look(height=2)).step == 2


def test_incomplete_blocks_are_shown_by_their_first_pixel() -> None:
    """Of 5 columns in blocks of 2 the last is half a block: 3 columns."""
    array = np.array([[0, 2, 10, 14, 77], [2, 4, 12, 16, 99]], np.uint8)
    picture = look_at(array, Look(width=3))
    assert (picture.pixels.tolist(), picture.step, picture.size) == ([[2, 13, 77]], 2, (5, 2))
    assert pixels(np.full((5, 1000, 3), 7, np.uint8), width=10, height=10) == [[[7, 7, 7]] * 10]


@pytest.mark.parametrize(
    ("array", "look", "expected", "ends"),
    [
        (np.array([[100, 200], [300, 1100]], np.uint16), {"scale": "minmax"}, [[0, 26], [51, 255]], (100, 1100)),
        (np.array([[0, 65535], [32768, 1]], np.uint16), {"scale": "full"}, [[0, 255], [128, 0]], (0, 65535)),
        (np.array([[-128, 127]] * 2, np.int8), {"scale": "full"}, [[0, 255]] * 2, (-128, 127)),
        (np.array([[-1.0, 0.0], [0.5, 2.0]]), {"scale": "full"}, [[0, 0], [128, 255]], (0, 1)),
        (np.array([[0, 50], [100, 255]], np.uint8), {"scale": "fixed", "low": 50, "high": 100},
         [[0, 0], [255, 255]], (50, 100)),
        (np.array([[1.0, np.nan], [np.inf, 3.0]], np.float32), {}, [[0, 0], [255, 255]], (1.02, 2.98)),
        (np.array([[1.0, np.nan], [-np.inf, 3.0]], np.float16), {"scale": "minmax"}, [[0, 0], [0, 255]], (1, 3)),
        (np.array([[True, False], [False, True]]), {}, [[255, 0], [0, 255]], (0, 1)),
        (np.array([[3 + 4j, 0], [0, 10]]), {"scale": "minmax"}, [[128, 0], [0, 255]], (0, 10)),
        (np.array([[-1e308, 0.0], [0.0, 1e308]]), {"scale": "minmax"}, [[0, 128], [128, 255]], (-1e308, 1e308)),
        (np.array([[0, 2**63], [0, 2**64 - 1]], np.uint64), {"scale": "full"}, [[0, 128], [0, 255]], (0, 2.0**64)),
        (np.full((2, 2), 5.0), {}, [[0, 0], [0, 0]], (5, 5)),
        (np.full((2, 2), np.nan), {}, [[0, 0], [0, 0]], (0, 0)),
        (np.zeros((0, 7), np.float32), {}, [[0]], (0, 0)),
        (np.zeros((4, 0, 3), np.uint8), {}, [[0]], (0, 0)),
    ],
)  # fmt: skip
def test_values_become_shades(
    array: Array, look: dict[str, Any], expected: list[Any], ends: tuple[float, float]
) -> None:
    """By the whole range of the dtype, by the values, by percentiles, between two numbers; NaN is black."""
    picture = look_at(array, Look(**look))
    assert picture.pixels.tolist() == expected
    assert (picture.low, picture.high) == pytest.approx(ends)


def test_percentiles_leave_a_few_hot_pixels_out() -> None:
    """A hundred values and one defect: the ordinary values get the whole range."""
    array = np.tile(np.arange(100, 200, dtype=np.uint16), (10, 1))
    array[0, 0] = 65_535
    picture = look_at(array, Look())
    assert 100 <= picture.low < 102 < 197 < picture.high < 200
    assert picture.pixels[5, -1] == 255


def test_means_of_large_numbers_are_numbers() -> None:
    """Near the end of float32, of float64 and of uint64 the sum of four does not fit."""
    for array in (np.full((4, 4), 3e38, np.float32), np.full((4, 4), 1.7e308), np.full((4, 4), 2**64 - 1, np.uint64)):
        picture = look_at(array, Look(width=2, height=2, scale="minmax"))
        assert picture.low == picture.high == pytest.approx(float(array[0, 0]))


def test_channels_have_the_order_that_the_stream_states() -> None:
    """rgb by default; bgr24 and bgra are turned, alpha is not shown; two channels are red and green."""
    array = np.array([[[1, 2, 3, 4]]] * 2, np.uint8)
    assert pixels(array) == [[[1, 2, 3]]] * 2
    assert pixels(array, "bgra") == [[[3, 2, 1]]] * 2
    assert pixels(array[..., :3], "bgr24") == [[[3, 2, 1]]] * 2
    assert pixels(array[..., :3], "nv12") == [[[1, 2, 3]]] * 2  # not what an array with channels can be
    assert pixels(array[..., :2]) == [[[1, 2, 0]]] * 2
    assert pixels(array[..., :1].repeat(2, axis=1)) == [[1, 1]] * 2  # one channel is grey


@pytest.mark.parametrize("order", BAYER)
@pytest.mark.parametrize("bits", [8, 16])
def test_quads_of_bayer_patterns_become_colours(order: str, bits: int) -> None:
    """Red 200, blue 50, the greens 100 and 110, in each of the four orders: the green shown is their mean."""
    values = {"r": [200], "g": [100, 110], "b": [50]}
    quad = np.array([values[letter].pop(0) for letter in order]).reshape(2, 2)
    mosaic = np.tile(quad, (3, 4)).astype(np.uint8 if bits == 8 else np.uint16)
    name = f"bayer_{order}{'8' if bits == 8 else '16le'}"
    picture = look_at(mosaic, Look(scale="fixed", low=0, high=255), name)
    assert picture.pixels.tolist() == [[[200, 105, 50]] * 4] * 3
    assert (picture.step, picture.size) == (2, (8, 6))
    region = look_at(mosaic, Look(scale="fixed", low=0, high=255, region=(3, 3, 4, 2)), name)
    assert region.region == (2, 2, 5, 3)  # it begins with a whole quad
    assert region.pixels.tolist() == [[[200, 105, 50]] * 2]
    small = look_at(mosaic, Look(scale="fixed", low=0, high=255, width=2, height=2), name)
    assert (small.step, small.pixels.tolist()) == (4, [[[200, 105, 50]] * 2] * 2)


def yuv_planes(name: str, width: int, height: int) -> Array:
    rng = np.random.default_rng(1)
    if name in ("yuyv422", "uyvy422"):
        smooth = np.full((height, width, 2), 128, np.uint8)
        smooth[..., 0 if name == "yuyv422" else 1] = rng.integers(16, 235, (height, width))
        smooth[:, :, 1 if name == "yuyv422" else 0] = np.repeat(rng.integers(60, 190, (height, 1)), width, axis=1)
        return smooth
    return rng.integers(16, 235, (height * 3 // 2, width), dtype=np.uint8)


@pytest.mark.parametrize("name", ["nv12", "yuv420p", "yuyv422", "uyvy422"])
def test_yuv_becomes_what_opencv_makes_of_it(name: str) -> None:
    """At full size, within two shades."""
    codes = {"nv12": "NV12", "yuv420p": "I420", "yuyv422": "YUYV", "uyvy422": "UYVY"}
    array = yuv_planes(name, 16, 12)
    expected = cv2.cvtColor(array, getattr(cv2, f"COLOR_YUV2RGB_{codes[name]}"))
    picture = look_at(array, Look(), name)
    assert picture.size == (16, 12)
    assert np.abs(picture.pixels.astype(int) - expected).max() <= 2
    part = look_at(array, Look(region=(5, 3, 6, 4)), name)
    assert (part.pixels == picture.pixels[3:7, 5:11]).all()


def test_yuv_by_hand() -> None:
    """White, black and the red of BT.601; an odd number of rows is no such picture and stays grey."""
    array = np.zeros((3, 6), np.uint8)
    array[:2] = [[235, 235, 16, 16, 81, 81]] * 2
    array[2] = [128, 128, 128, 128, 90, 240]
    white, black, red = [255] * 3, [0] * 3, [254, 0, 0]
    assert pixels(array, "nv12") == [[white, white, black, black, red, red]] * 2
    assert pixels(np.full((4, 6), 9, np.uint8), "nv12") == [[9] * 6] * 4


def test_a_stack_is_shown_by_the_slice_that_is_asked_for() -> None:
    """The middle of each axis by default; numbers for some of the axes, or for all of them."""
    stack = np.arange(3 * 4 * 5 * 6, dtype=np.uint16).reshape(3, 4, 5, 6)
    whole: dict[str, Any] = {"scale": "fixed", "low": 0, "high": 255}
    assert pixels(stack, **whole) == np.clip(stack[1, 2], 0, 255).tolist()
    assert pixels(stack, index=(0,), **whole) == stack[0, 2].tolist()
    assert pixels(stack, index=(0, 3), **whole) == stack[0, 3].tolist()
    assert look_at(stack, Look()).axes == (3, 4)
    colours = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    assert pixels(colours, "bgr24", index=(0,)) == colours[0, ..., ::-1].tolist()
    with pytest.raises(NotShown, match=r"look.index: 3 of axis 0, which has 3"):
        look_at(stack, Look(index=(3,)))
    with pytest.raises(NotShown, match=r"look.index has 1 numbers, and an array of \(5, 6\) has 0"):
        look_at(stack[0, 0], Look(index=(0,)))


def test_a_region_is_cut_to_the_array() -> None:
    """One that reaches over the edge is shown as far as it goes; one outside is refused."""
    array = np.arange(30, dtype=np.uint8).reshape(5, 6)
    picture = look_at(array, Look(region=(4, 2, 100, 2)))
    assert (picture.pixels.tolist(), picture.region, picture.size) == (
        [[16, 17], [22, 23]],
        (4, 2, 2, 2),
        (6, 5),
    )
    with pytest.raises(NotShown, match=r"look.region \(6, 0, 1, 1\) is outside of the picture, which has 6 x 5 pixels"):
        look_at(array, Look(region=(6, 0, 1, 1)))


@pytest.mark.parametrize("kind", ["object", "U3", "S3", "datetime64[s]", "timedelta64[s]", "i4,f4", "V8"])
def test_what_has_no_numbers_is_refused(kind: str) -> None:
    """By its dtype, with what can be shown."""
    with pytest.raises(NotShown, match="cannot be shown; arrays of numbers and of booleans can"):
        look_at(np.zeros((2, 2), kind), Look())


def test_dtypes_of_machine_learning_are_numbers() -> None:
    """bfloat16 and float8 of ml_dtypes, and numbers of the other byte order."""
    import ml_dtypes

    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ">u2", ">f4"):
        array = np.array([[0, 1], [2, 4]]).astype(dtype)
        assert pixels(array, scale="minmax") == [[0, 64], [128, 255]]
        assert pixels(np.tile(array, (4, 4)), width=4, height=4, scale="full")


# --- lines


def test_one_dimension_is_a_line() -> None:
    """Short ones value by value, of any dtype; (n, 1) and (1, n) are lines, too, and so is a number."""
    for array in (np.array([3, -1, 2]), np.array([[3.0, -1.0, 2.0]]), np.array([[3], [-1], [2]], np.int8)):
        picture = look_at(array, Look())
        assert picture.pixels.tolist() == [[3, 3], [-1, -1], [2, 2]]
        assert (picture.kind, picture.low, picture.high, picture.size) == ("line", -1.0, 3.0, (3, 1))
    assert look_at(np.array(7.5), Look()).pixels.tolist() == [[7.5, 7.5]]
    assert look_at(np.zeros(0), Look()).pixels.shape == (0, 2)
    assert look_at(np.array([3, -1, 2]), Look(region=(1, 0, 9, 1))).pixels.tolist() == [[-1, -1], [2, 2]]
    assert encode(look_at(np.array([1.0, 2.0]), Look()), False) == (
        "line",
        np.array([1, 1, 2, 2], np.float32).tobytes(),
    )


def test_a_long_line_is_the_least_and_the_largest_of_each_part() -> None:
    """A single peak among a million values is not lost."""
    values = np.zeros(100_000, np.float32)
    values[77_777] = 9.0
    values[0] = np.nan
    picture = look_at(values, Look())
    assert picture.step == 49
    assert picture.pixels.shape == (2041, 2)
    assert picture.pixels[:, 1].max() == 9.0
    assert not np.isnan(picture.pixels).any()
    assert look_at(np.full(5000, np.nan), Look()).pixels.shape == (1667, 2)


def test_a_line_is_drawn_without_gaps() -> None:
    """A step from low to high is joined; NaN is a gap; a narrow canvas keeps the peak."""
    line = look_at(np.array([0.0, 0.0, 1.0, np.nan, 1.0]), Look())
    assert drawn(line, 5, 3).tolist() == [[0, 0, 255, 0, 255], [0, 0, 255, 0, 0], [255, 255, 255, 0, 0]]
    assert drawn(look_at(np.full(4, 2.0), Look()), 4, 3).tolist() == [[0] * 4, [255] * 4, [0] * 4]
    peak = np.zeros(1000)
    peak[501] = 1.0
    assert drawn(look_at(peak, Look()), 10, 4)[0].tolist() == [0] * 5 + [255] + [0] * 4
    assert not drawn(look_at(np.zeros(0), Look()), 10, 4).any()


# --- colours and files


@pytest.mark.parametrize("name", ["viridis", "magma", "cividis", "turbo"])
def test_colour_maps_are_those_of_matplotlib(name: str) -> None:
    """Within five shades of 255; the ends exactly. They apply to grey pictures only."""
    ours = colormaps.table(name)
    theirs = matplotlib.colormaps[name](np.arange(256), bytes=True)[:, :3]
    assert np.abs(ours.astype(int) - theirs).max() <= 5
    assert np.abs(ours[[0, 255]].astype(int) - theirs[[0, 255]]).max() <= 1
    assert pixels(np.array([[0, 255]] * 2, np.uint8), colormap=name) == [ours[[0, 255]].tolist()] * 2
    colour = np.full((2, 2, 3), 9, np.uint8)
    assert pixels(colour, colormap=name) == colour.tolist()


def test_a_png_has_the_pixels_and_a_jpeg_nearly() -> None:
    """Lossless is exact; quality 80 is within a few shades where the picture is smooth."""
    rows, columns = np.mgrid[:64, :96]
    array = np.stack([rows * 2, columns * 2, rows + columns], axis=-1).astype(np.uint8)
    picture = look_at(array, Look())
    media, data = encode(picture, True)
    assert media == "image/png"
    assert (np.asarray(Image.open(io.BytesIO(data))) == array).all()
    media, data = encode(picture, False)
    assert media == "image/jpeg"
    assert np.abs(np.asarray(Image.open(io.BytesIO(data))).astype(int) - array).mean() < 3


@pytest.mark.parametrize(
    ("shape", "dtype", "pixel_format"),
    [
        ((100_000, 300_000, 3), np.uint8, None),
        ((100_000, 300_000), np.uint16, "bayer_rggb16le"),
        ((300_000, 100_000), np.uint8, "nv12"),
        ((500, 100_000, 300_000), np.float32, None),
        ((30_000_000_000,), np.complex128, None),
    ],
)
@pytest.mark.parametrize("lossless", [True, False])
def test_the_cost_follows_the_picture(
    shape: tuple[int, ...], dtype: Any, pixel_format: str | None, lossless: bool
) -> None:
    """An array of 90 gigabytes and more, which no machine could read in time, takes the memory of its picture."""
    array = np.broadcast_to(np.ones((), dtype), shape)
    look_at(np.ones((4, 4)), Look())  # imports
    tracemalloc.start()
    try:
        picture = look_at(array, Look(width=300, height=300, lossless=lossless), pixel_format)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert max(picture.pixels.shape) in (300, 2048)
