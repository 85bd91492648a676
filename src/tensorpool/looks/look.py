# SPDX-License-Identifier: Apache-2.0
"""How a viewer looks at an array: how large, which part of it, which values are black and white, in which colours."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from tensorpool.errors import ConfigError, TensorPoolError
from tensorpool.looks.colormaps import NAMES as COLORMAPS

MAX_PIXELS: Final = 4096  # of a side of a picture
SCALES: Final = ("auto", "full", "minmax", "percentile", "fixed")


class NotShown(TensorPoolError, ValueError):
    """An array of which no picture can be made, or a part of it that it does not have; the text says why."""


class Look(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an array is looked at. Raises ConfigError for values that make no sense.

    >>> Look(width=320, colormap="viridis").scale
    'auto'
    """

    width: int = 960  # of the picture, at most: it is never larger than the array
    height: int = 960
    colormap: str = "gray"  # of arrays of one channel
    scale: str = "auto"  # full for uint8 and bool, else percentile
    low: float | None = None  # with scale fixed: the value that becomes black
    high: float | None = None  # and the one that becomes white
    index: tuple[int, ...] = ()  # of the leading axes, where there are more than a picture has; default: the middle
    region: tuple[int, int, int, int] | None = None  # x, y, width, height in pixels of the array
    lossless: bool = False  # every n-th pixel as it is, instead of means

    def __post_init__(self) -> None:
        for key in ("width", "height"):
            if not 1 <= getattr(self, key) <= MAX_PIXELS:
                raise ConfigError(f"look.{key}", getattr(self, key), f"1 to {MAX_PIXELS}")
        for key, accepted in (("colormap", COLORMAPS), ("scale", SCALES)):
            if getattr(self, key) not in accepted:
                raise ConfigError(f"look.{key}", getattr(self, key), ", ".join(accepted))
        if self.scale == "fixed":
            self._check_fixed()
        if any(number < 0 for number in self.index):
            raise ConfigError("look.index", self.index, "numbers from 0")
        if self.region is not None and (min(self.region[:2]) < 0 or min(self.region[2:]) < 1):
            raise ConfigError("look.region", self.region, "x and y from 0, width and height from 1")

    def _check_fixed(self) -> None:
        for key, value in (("low", self.low), ("high", self.high)):
            if value is None or not math.isfinite(value):
                raise ConfigError(f"look.{key}", value, "a number, with scale fixed")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ConfigError("look.high", self.high, f"more than low, {self.low}")
