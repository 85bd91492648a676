# SPDX-License-Identifier: Apache-2.0
"""Pictures of arrays, for previews, notebooks and terminals. Pure: no IO, no clock; only `encode` needs Pillow."""

from tensorpool.looks.frames import pixels_of
from tensorpool.looks.look import Look, NotShown
from tensorpool.looks.measures import Histogram, histogram, pixel, profile
from tensorpool.looks.pictures import Picture, drawn, encode, look_at

__all__ = [
    "Histogram",
    "Look",
    "NotShown",
    "Picture",
    "drawn",
    "encode",
    "histogram",
    "look_at",
    "pixel",
    "pixels_of",
    "profile",
]
