# SPDX-License-Identifier: Apache-2.0
"""The array of a frame as it is looked at, of a live or a recorded one."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from tensorpool.shm.arrays import Array
from tensorpool.wire.control import Dtype


class FrameLike(Protocol):
    """What live and recorded frames have in common here."""

    @property
    def array(self) -> Array: ...
    @property
    def wire_dtype(self) -> Dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def order(self) -> str: ...


def pixels_of(frame: FrameLike) -> Array:
    """The view of its payload; bits, which travel packed, one by one."""
    if frame.wire_dtype is not Dtype.BIT:
        return frame.array
    return unpacked(frame.array, frame.shape, frame.order)


def unpacked(packed: Array, shape: tuple[int, ...], order: str) -> Array:
    """Bits as booleans."""
    bits = np.unpackbits(packed, count=math.prod(shape)).view(np.bool_)
    return bits.reshape(shape, order="F" if order == "F" else "C")
