# SPDX-License-Identifier: Apache-2.0
"""Arrays to pictures. First fewer pixels, then their conversion: the cost follows the picture, not the array.

array ── see ──► planes ── thin ──► few values ── shades, colour map, YUV ──► Picture ── encode ──► JPEG, PNG
"""

from __future__ import annotations

import io
from typing import Final

import msgspec
import numpy as np

from tensorpool.extras import library
from tensorpool.looks import colormaps
from tensorpool.looks.look import Look
from tensorpool.looks.scaling import bounds, extremes, shades
from tensorpool.looks.seen import Chroma, Seen, see
from tensorpool.looks.thinning import plain, thin
from tensorpool.shm.arrays import Array

MAX_PAIRS: Final = 2048  # of a line
MAX_IN_PAIR: Final = 512  # values of which a pair is computed
QUALITY: Final = 80
LINE: Final = "line"
PICTURE: Final = "picture"
_FRACTION: Final = 5  # bits of the sums of YUV


def _table(factor: float, zero: int) -> Array:
    """What each value of Y, U or V adds to a colour, in fractions."""
    return np.rint((np.arange(256) - zero) * factor * (1 << _FRACTION)).astype(np.int16)


# BT.601 with limited range, which cameras and FFmpeg mean by yuv.
_Y: Final = _table(1.164, 16)
_V_RED, _U_GREEN, _V_GREEN, _U_BLUE = (_table(factor, 128) for factor in (1.596, -0.392, -0.813, 2.017))


class Picture(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """An array as a viewer looks at it.

    `pixels` are uint8, of (height, width) or (height, width, 3). Of kind "line" they are float32, of (count, 2): the
    least and the largest of each `step` values.
    """

    pixels: Array
    kind: str
    low: float  # the values that became black and white
    high: float
    step: int  # pixels of the array per pixel of the picture, in each direction
    size: tuple[int, int]  # width and height of the array as seen
    region: tuple[int, int, int, int]  # of it that is shown: x, y, width, height
    axes: tuple[int, ...]  # lengths of the axes that `look.index` chooses from


def look_at(array: Array, look: Look, pixel_format: str | None = None) -> Picture:
    """A picture of an array of any shape and any numeric dtype; complex numbers by their magnitude.

    >>> look_at(np.eye(2, dtype=np.uint8), Look(scale="minmax")).pixels.tolist()
    [[255, 0], [0, 255]]

    Raises NotShown for what is no array of numbers, and for an index or a region that the array does not have.
    """
    seen = see(array, look, pixel_format)
    if not seen.channels:
        return _line(seen, look)
    if not seen.raw.size:
        return _picture(seen, np.zeros((1, 1), np.uint8), (0.0, 0.0), 1)
    _, _, width, height = seen.region
    step = max(-(-width // (look.width * seen.unit)), -(-height // (look.height * seen.unit)))
    planes = [thin(planes, step, lossless=look.lossless) for planes in seen.channels]
    if seen.chroma is not None:
        planes = _rgb(planes[0], seen.chroma, seen.region, step)
    values = planes[0] if len(planes) == 1 else np.stack(planes, axis=-1)
    low, high = bounds(values, seen.dtype, look)
    pixels = shades(values, low, high)
    if len(planes) == 1:
        pixels = colormaps.apply(pixels, look.colormap)
    elif len(planes) == 2:
        pixels = np.dstack([pixels, np.zeros_like(pixels[..., 0])])
    return _picture(seen, pixels, (low, high), step * seen.unit)


def encode(picture: Picture, lossless: bool) -> tuple[str, bytes]:
    """Media type and bytes: PNG or JPEG, or the pairs of a line as float32. Raises MissingExtra without Pillow."""
    if picture.kind == LINE:
        return LINE, picture.pixels.astype("<f4", copy=False).tobytes()
    image = library("PIL.Image", "a picture of a frame", "console").fromarray(np.ascontiguousarray(picture.pixels))
    file = io.BytesIO()
    if lossless:
        image.save(file, "PNG", compress_level=1)
        return "image/png", file.getvalue()
    image.save(file, "JPEG", quality=QUALITY)
    return "image/jpeg", file.getvalue()


def drawn(picture: Picture, width: int, height: int) -> Array:
    """The pixels of a picture; a line is drawn white on black into so many."""
    if picture.kind != LINE:
        return picture.pixels
    canvas = np.zeros((height, width), np.uint8)
    pairs = picture.pixels
    if not len(pairs):
        return canvas
    starts = np.arange(width) * len(pairs) // width
    least, most = np.fmin.reduceat(pairs[:, 0], starts), np.fmax.reduceat(pairs[:, 1], starts)
    bottom, top = (_rows(values, picture, height) for values in (least, most))
    is_drawn = ~np.isnan(least)
    is_joined = is_drawn[1:] & is_drawn[:-1]  # a column reaches to the one before it
    lowest = np.where(is_joined, np.maximum(bottom[1:], top[:-1]), bottom[1:])
    highest = np.where(is_joined, np.minimum(top[1:], bottom[:-1]), top[1:])
    rows = np.arange(height)[:, None]
    canvas[:, 1:][(rows >= highest) & (rows <= lowest) & is_drawn[1:]] = 255
    canvas[:, :1][(rows >= top[:1]) & (rows <= bottom[:1]) & is_drawn[:1]] = 255
    return canvas


def _rows(values: Array, line: Picture, height: int) -> Array:
    """The rows of a canvas in which values are: `high` in the first one, `low` in the last one."""
    span = line.high / 2 - line.low / 2
    with np.errstate(over="ignore"):  # far outside is outside
        halves = np.nan_to_num(values.astype(np.float64)) / 2 - line.low / 2
        share = halves / span if span else np.full(len(values), 0.5)
    return np.rint((height - 1) * (1 - np.clip(share, 0, 1))).astype(np.int64)


def _picture(seen: Seen, pixels: Array, ends: tuple[float, float], step: int, kind: str = PICTURE) -> Picture:
    return Picture(
        pixels=pixels,
        kind=kind,
        low=ends[0],
        high=ends[1],
        step=step,
        size=seen.size,
        region=seen.region,
        axes=seen.axes,
    )


def _rgb(luma: Array, chroma: Chroma, region: tuple[int, int, int, int], step: int) -> list[Array]:
    """Red, green and blue of YUV; one element of chroma for each pixel of the picture."""
    left, top, _, _ = region
    rows = np.minimum((top + np.arange(luma.shape[0]) * step) // chroma.rows, chroma.u.shape[0] - 1)
    columns = np.minimum((left + np.arange(luma.shape[1]) * step) // chroma.columns, chroma.u.shape[1] - 1)
    where = np.ix_(rows, columns)
    u, v = chroma.u[where], chroma.v[where]
    grey = np.take(_Y, luma)
    grey += 1 << _FRACTION - 1
    colours = grey + np.take(_V_RED, v), grey + np.take(_U_GREEN, u) + np.take(_V_GREEN, v), grey + np.take(_U_BLUE, u)
    return [np.clip(colour >> _FRACTION, 0, 255).astype(np.uint8) for colour in colours]


def _line(seen: Seen, look: Look) -> Picture:
    """The least and the largest value of each `step` values, from about 512 of them."""
    values = seen.raw
    step = max(1, -(-len(values) // MAX_PAIRS))
    whole, every = len(values) // step, max(1, step // MAX_IN_PAIR)
    with np.errstate(over="ignore", invalid="ignore"):
        blocks = plain(values[: whole * step].reshape(whole, step)[:, ::every])
        least, most = np.fmin.reduce(blocks, axis=1), np.fmax.reduce(blocks, axis=1)
        if whole * step < len(values):
            rest = plain(values[whole * step :: every])
            least, most = np.append(least, np.fmin.reduce(rest)), np.append(most, np.fmax.reduce(rest))
        pairs = np.stack([least, most], axis=-1)
        ends = extremes(pairs) if look.scale == "auto" else bounds(pairs, seen.dtype, look)
        return _picture(seen, pairs.astype(np.float32), ends, step, LINE)
