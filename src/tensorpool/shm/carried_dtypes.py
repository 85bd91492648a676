# SPDX-License-Identifier: Apache-2.0
"""Dtypes that the wire does not have, carried as dtypes that it has.

float16 and bfloat16 travel as UINT16, complex numbers as FLOAT32 or FLOAT64 with a last axis of 2. The metadata of such
frames say so in the attribute `numpy_dtype`, and readers show the array as it was, without a copy. Who does not know
the attribute sees the wire's dtype. numpy has no bfloat16: it shows as uint16 where ml_dtypes is not installed.
Wire §8.2; decision B12.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

from tensorpool.errors import LocalProtocolError
from tensorpool.shm.arrays import Array, Order, numpy_dtype
from tensorpool.wire.control import Dtype


class CarriedDtype(msgspec.Struct, frozen=True):
    """A dtype and what carries it; `is_pair`: an element is two of the wire's, in a last axis of its own."""

    name: str
    wire: Dtype
    is_pair: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """What arrays show: the wire's dtype where bfloat16 cannot be shown."""
        return _bfloat16() if self.name == "bfloat16" else np.dtype(self.name)

    def fits(self, wire: int, shape: tuple[int, ...]) -> bool:
        """Whether payloads of that wire dtype and shape can be this."""
        return wire == self.wire and (not self.is_pair or (len(shape) > 1 and shape[-1] == 2))

    def shape_of(self, wire_shape: tuple[int, ...]) -> tuple[int, ...]:
        return wire_shape[:-1] if self.is_pair else wire_shape

    def on_wire(
        self, shape: tuple[int, ...], order: Order, strides: tuple[int, ...] | None
    ) -> tuple[tuple[int, ...], Dtype, tuple[int, ...] | None]:
        """Shape, dtype and strides of what carries it. Raises LocalProtocolError for what nothing carries."""
        if not self.is_pair:
            return shape, self.wire, strides
        if order == "F":
            raise LocalProtocolError(f"dtype {self.name} is sent in C order; leave order='F' out")
        try:
            steps = None if strides is None else (*strides, numpy_dtype(self.wire).itemsize)
            wire_shape = (*shape, 2)
        except TypeError:
            raise LocalProtocolError(f"shape {shape!r}, strides {strides!r}: expected tuples") from None
        if len(wire_shape) == 1:
            raise LocalProtocolError(f"shape (), {self.name}: a frame has at least one dimension")
        return wire_shape, self.wire, steps

    def encode(self, array: Array) -> Array:
        """The array as the wire has it, without a copy."""
        wire = numpy_dtype(self.wire)
        if self.is_pair:
            self.on_wire(array.shape, "C", None)
        return array[..., np.newaxis].view(wire) if self.is_pair else array.view(wire)

    def restore(self, view: Array) -> Array:
        """The wire's array as it was, without a copy."""
        if not self.is_pair:
            return view.view(self.dtype)
        return view.view(self.dtype)[..., 0] if view.ndim > 1 else np.empty(0, self.dtype)  # B14: without a payload


_CARRIED: Final[Mapping[str, CarriedDtype]] = {
    carried.name: carried
    for carried in (
        CarriedDtype("float16", Dtype.UINT16),
        CarriedDtype("bfloat16", Dtype.UINT16),
        CarriedDtype("complex64", Dtype.FLOAT32, is_pair=True),
        CarriedDtype("complex128", Dtype.FLOAT64, is_pair=True),
    )
}


def carried_dtype(dtype: object) -> CarriedDtype | None:
    """How a dtype of an array travels; None: the wire has it, or nothing carries it."""
    if isinstance(dtype, Dtype):
        return None
    given = np.dtype(dtype)  # type: ignore[call-overload]
    return _CARRIED.get(given.name) if given.isnative else None


def is_carrier(wire: int, shape: tuple[int, ...]) -> bool:
    """Whether payloads of that wire dtype and shape may stand for another dtype: their metadata decide."""
    return wire == Dtype.UINT16 or (wire in (Dtype.FLOAT32, Dtype.FLOAT64) and len(shape) > 1 and shape[-1] == 2)


def carried_named(name: object) -> CarriedDtype | None:
    """What the attribute `numpy_dtype` of metadata says about their frames; None: that they are what the wire says."""
    return _CARRIED.get(name) if isinstance(name, str) else None


@functools.cache
def _bfloat16() -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(np.uint16)
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found
