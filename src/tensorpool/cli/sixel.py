# SPDX-License-Identifier: Apache-2.0
"""Pictures as sixels, which some terminals draw pixel by pixel. Pure.

A picture is cut into bands of six rows. For each colour of a band there is a line of characters, one for each column,
whose six bits are the rows that have the colour.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from tensorpool.shm.arrays import Array

ROWS: Final = 6  # of a band
SHADES: Final = 128  # of grey
LEVELS: Final = (6, 7, 6)  # of red, green and blue: 252 colours; most terminals have room for 256
BEGIN: Final = b"\x1bP0;1q"  # pixels that get no colour stay as they are
END: Final = b"\x1b\\"
_RUN: Final = re.compile(rb"(.)\1{3,}", re.DOTALL)
# Ordered dithering: the share by which the pixels of a block of 4 x 4 are rounded up.
_DITHER: Final = (np.array([[0, 8, 2, 10], [12, 4, 14, 6], [3, 11, 1, 9], [15, 7, 13, 5]]) + 0.5) / 16


def sixels(pixels: Array) -> bytes:
    """The escape sequence that draws a picture, of (height, width) or (height, width, 3) uint8."""
    height, width = pixels.shape[:2]
    colours = _greys(pixels) if pixels.ndim == 2 else _dithered(pixels)
    lines = [BEGIN, f'"1;1;{width};{height}'.encode()]
    lines += [_definition(int(colour), is_grey=pixels.ndim == 2) for colour in np.unique(colours)]
    for top in range(0, height, ROWS):
        lines += [_band(colours[top : top + ROWS]), b"-"]
    return b"".join([*lines, END])


def _greys(pixels: Array) -> Array:
    return pixels.astype(np.int32) * SHADES // 256


def _dithered(pixels: Array) -> Array:
    """The numbers of colours of which a block has the right mean."""
    height, width = pixels.shape[:2]
    threshold = np.tile(_DITHER, (-(-height // 4), -(-width // 4)))[:height, :width, None]
    most = np.array(LEVELS) - 1
    levels = np.minimum((pixels * (most / 255) + threshold).astype(np.int32), most)
    numbers: Array = np.ravel_multi_index(tuple(np.moveaxis(levels, -1, 0)), LEVELS)
    return numbers


def _definition(colour: int, *, is_grey: bool) -> bytes:
    """In percent of red, green and blue."""
    if is_grey:
        shares = [round(100 * colour / (SHADES - 1))] * 3
    else:
        levels = np.unravel_index(colour, LEVELS)
        shares = [round(100 * int(level) / (count - 1)) for level, count in zip(levels, LEVELS, strict=True)]
    return "#{};2;{};{};{}".format(colour, *shares).encode()


def _band(rows: Array) -> bytes:
    colours, where = np.unique(rows, return_inverse=True)
    bits = np.zeros((len(colours), rows.shape[1]), np.uint8)
    for row, line in enumerate(where.reshape(rows.shape)):
        bits[line, np.arange(rows.shape[1])] |= np.uint8(1 << row)
    lines = [(line + 63).tobytes().rstrip(b"?") for line in bits]
    return b"$".join(b"#%d%b" % (colour, _RUN.sub(_run, line)) for colour, line in zip(colours, lines, strict=True))


def _run(run: re.Match[bytes]) -> bytes:
    return b"!%d%b" % (len(run[0]), run[1])
