# SPDX-License-Identifier: Apache-2.0
"""What holds for the picture of every array: any dtype, any shape, any memory order, any look."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from tensorpool.looks import Look, NotShown, drawn, encode, histogram, look_at, pixel, profile
from tensorpool.looks.look import SCALES
from tensorpool.pixel_formats import FORMATS
from tensorpool.shm.arrays import Array
from tests.levels import SOAK

MANY = settings(max_examples=300 * SOAK, deadline=None)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=20)
NUMBERS = (
    hnp.boolean_dtypes() | hnp.integer_dtypes() | hnp.unsigned_integer_dtypes() | hnp.floating_dtypes()
    | hnp.complex_number_dtypes() | hnp.unsigned_integer_dtypes(sizes=(8, 16))
)  # fmt: skip
SIDE = st.integers(1, 30)


@st.composite
def arrays(draw: st.DrawFn, /, shapes: st.SearchStrategy[Any] = SHAPES, dtypes: Any = NUMBERS) -> Array:
    """In C or Fortran order, or a view that runs backwards with gaps."""
    array: Array = draw(hnp.arrays(draw(dtypes), draw(shapes), fill=st.nothing() if draw(st.booleans()) else None))
    match draw(st.sampled_from("CFv")):
        case "F":
            return np.asfortranarray(array)
        case "v":
            return np.repeat(array, 2, axis=-1)[..., ::-2] if array.ndim else array
    return array


@st.composite
def looks(draw: st.DrawFn, /, **fixed: Any) -> Look:
    scale = draw(st.sampled_from(SCALES))
    low = draw(st.floats(-1e6, 1e6))
    fields: dict[str, Any] = {
        "width": draw(SIDE),
        "height": draw(SIDE),
        "colormap": draw(st.sampled_from(("gray", "gray", "viridis", "turbo"))),
        "scale": scale,
        "low": low,
        "high": low + draw(st.floats(1e-3, 1e6)),
        "index": tuple(draw(st.lists(st.integers(0, 25), max_size=3))),
        "region": draw(st.none() | st.tuples(st.integers(0, 25), st.integers(0, 25), SIDE, SIDE)),
        "lossless": draw(st.booleans()),
    }
    return Look(**(fields | fixed))


@MANY
@example(np.array(3.4028236e38), Look(scale="fixed", low=0.0, high=0.5), None)  # more than a float32 holds
@given(arrays(), looks(), st.sampled_from([None, *FORMATS]))
def test_every_array_has_a_picture_within_its_look(array: Array, look: Look, pixel_format: str | None) -> None:
    """Or a clear refusal, for an index or a region that it does not have. It can be encoded, drawn and measured."""
    try:
        picture = look_at(array, look, pixel_format)
    except NotShown:
        assert look.index or look.region
        return
    x, y, width, height = picture.region
    assert x + width <= picture.size[0]
    assert y + height <= picture.size[1]
    assert np.isfinite([picture.low, picture.high]).all()
    assert picture.low <= picture.high
    media, data = encode(picture, look.lossless)
    assert drawn(picture, 7, 5).dtype == np.uint8
    assert sum(histogram(array, look, pixel_format).counts) <= array.size
    if picture.kind == "line":
        assert (media, len(data)) == ("line", picture.pixels.size * 4)
        assert picture.pixels.shape == (width, 2)
        return
    rows, columns = picture.pixels.shape[:2]
    assert picture.pixels.dtype == np.uint8
    assert picture.pixels.shape[2:] in ((), (3,))
    assert columns <= look.width
    assert rows <= look.height
    decoded = np.asarray(Image.open(io.BytesIO(data)))
    assert decoded.shape == picture.pixels.shape
    assert not look.lossless or (decoded == picture.pixels).all()
    if width and height:
        assert 1 <= -(-width // picture.step) - columns + 1 <= 2  # Bayer leaves half a quad out
        assert len(profile(array, look, (x, y, x + width - 1, y), pixel_format)) == width


@MANY
@given(arrays(), looks(), st.sampled_from([None, *FORMATS]))
def test_the_picture_does_not_depend_on_the_memory(array: Array, look: Look, pixel_format: str | None) -> None:
    """A contiguous copy looks the same, and the array is not changed."""
    before = array.tobytes()
    try:
        picture = look_at(array, look, pixel_format)
    except NotShown:
        return
    assert array.tobytes() == before
    again = look_at(np.array(array, order="C"), look, pixel_format)
    assert np.array_equal(picture.pixels, again.pixels, equal_nan=picture.kind == "line")
    assert (picture.low, picture.high, picture.step) == (again.low, again.high, again.step)


@MANY
@given(
    arrays(hnp.array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=40), st.just(np.dtype(np.uint8))),
    looks(colormap="gray", scale="full", index=()),
)
def test_pixels_are_of_the_array(array: Array, look: Look) -> None:
    """Lossless they are every n-th one; otherwise none is beyond the extremes of its block."""
    try:
        picture = look_at(array, look)
    except NotShown:
        return
    x, y, width, height = picture.region
    step = picture.step
    part = array[y : y + height, x : x + width]
    if look.lossless:
        assert (picture.pixels == part[::step, ::step]).all()
        return
    for row, line in enumerate(picture.pixels):
        for column, shade in enumerate(line):
            block = part[row * step : (row + 1) * step, column * step : (column + 1) * step]
            assert block.min() <= shade <= block.max()


@MANY
@given(arrays(hnp.array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=12)), looks(index=(), lossless=True))
def test_larger_values_are_never_darker(array: Array, look: Look) -> None:
    """The order of the values is the order of their shades; at `low` it is black, at `high` white."""
    array = np.abs(array) if array.dtype.kind == "c" else array
    try:
        picture = look_at(array, Look(scale=look.scale, low=look.low, high=look.high, lossless=True))
    except NotShown:
        return
    values, shades = array.reshape(-1).astype(np.float64), picture.pixels.reshape(-1).astype(int)
    is_number = ~np.isnan(values)
    values, shades = values[is_number], shades[is_number]
    assert (np.diff(shades[np.argsort(values, kind="stable")]) >= 0).all()
    assert (shades[values <= picture.low] == 0).all()
    if picture.low < picture.high:
        assert (shades[values >= picture.high] == 255).all()


@MANY
@given(arrays(hnp.array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=12)), st.data())
def test_a_pixel_is_an_element(array: Array, data: st.DataObject) -> None:
    """Exactly, integers of 64 bits as well."""
    row, column = data.draw(st.integers(0, array.shape[0] - 1)), data.draw(st.integers(0, array.shape[1] - 1))
    found = pixel(array, Look(), column, row)
    expected = np.abs(array[row, column]) if array.dtype.kind == "c" else array[row, column]
    if array.dtype.itemsize <= 8 or array.dtype.kind == "c":
        assert found == expected or (np.isnan(found) and np.isnan(expected))
    assert len(profile(array, Look(), (0, 0, column, row))) == max(row, column) + 1
