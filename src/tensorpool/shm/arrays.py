# SPDX-License-Identifier: Apache-2.0
"""Arrays over payloads: numpy's dtypes and orders against those of the wire.

A view keeps its mapping alive and is read-only unless its maker asks to write. Dtypes that the wire does not
know are refused by name, with what to use instead. BYTES shows as uint8; BIT shows as the packed bytes, and
its layout keeps the logical shape. Wire §8.2, §15.8; decisions B9–B14.
"""

from __future__ import annotations

import functools
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from tensorpool._core import Mapping, SlotFrame, TensorLayout
from tensorpool.errors import LocalProtocolError
from tensorpool.wire.control import Dtype, MajorOrder

type Array = npt.NDArray[Any]
type Order = Literal["C", "F"]

_NUMPY: Final[dict[int, np.dtype[Any]]] = {
    Dtype.UINT8: np.dtype("<u1"),
    Dtype.INT8: np.dtype("<i1"),
    Dtype.UINT16: np.dtype("<u2"),
    Dtype.INT16: np.dtype("<i2"),
    Dtype.UINT32: np.dtype("<u4"),
    Dtype.INT32: np.dtype("<i4"),
    Dtype.UINT64: np.dtype("<u8"),
    Dtype.INT64: np.dtype("<i8"),
    Dtype.FLOAT32: np.dtype("<f4"),
    Dtype.FLOAT64: np.dtype("<f8"),
    Dtype.BOOLEAN: np.dtype("?"),
    Dtype.BYTES: np.dtype("<u1"),
    Dtype.BIT: np.dtype("<u1"),
}
_WIRE: Final = {numpy: Dtype(wire) for wire, numpy in reversed(_NUMPY.items())}  # uint8 is UINT8 first of all
_MAX_DIM: Final = 2**31 - 1

# By numpy's kind, or by its character where that says more.
_INSTEAD: Final = {
    "O": "object arrays hold pointers; convert to a numeric dtype",
    "S": "publish the text's bytes as uint8",
    "U": "encode the text and publish its bytes as uint8",
    "T": "encode the text and publish its bytes as uint8",
    "c": "view it as float32 or float64 with a last axis of 2",
    "e": "convert with astype(np.float32), or view it as uint16",
    "g": "convert with astype(np.float64)",
    "M": "view it as int64",
    "m": "view it as int64",
    "V": "publish its fields one by one, or view it as uint8",
}


def dtype_of(dtype: npt.DTypeLike) -> Dtype:
    """The wire's name of a numpy dtype.

    >>> dtype_of(np.float32)
    <Dtype.FLOAT32: 9>

    Raises LocalProtocolError for a dtype that no frame can carry.
    """
    given = np.dtype(dtype)
    wire = _WIRE.get(given)
    if wire is not None:
        return wire
    if given.byteorder == ">" and given.newbyteorder("<") in _WIRE:
        raise LocalProtocolError(f"dtype {given.str} is big-endian; convert with astype({given.name!r})")
    instead = _INSTEAD.get(given.char) or _INSTEAD.get(given.kind) or "convert to a numeric dtype"
    raise LocalProtocolError(f"dtype {given} cannot be sent; {instead}")


def numpy_dtype(dtype: int) -> np.dtype[Any]:
    """The numpy dtype that shows payloads of a wire dtype."""
    return _NUMPY[dtype]


def layout_for(shape: tuple[int, ...], dtype: npt.DTypeLike | Dtype, order: Order = "C") -> TensorLayout:
    """The layout of a contiguous payload; `dtype` is numpy's, or the wire's own (Dtype.BIT, Dtype.BYTES).

    >>> layout_for((1080, 1920, 3), np.uint8).extent_bytes
    6220800

    Raises LocalProtocolError for what no frame can carry: scalars, more than 8 dimensions, 4 GiB and more.
    """
    return _contiguous(dtype if isinstance(dtype, Dtype) else np.dtype(dtype), shape, order == "F")


def layout_of(array: Array) -> TensorLayout:
    """The layout in which an array is published: its own if it is contiguous, else that of a C-ordered copy.

    Raises like `layout_for`.
    """
    return _contiguous(array.dtype, array.shape, array.flags.fnc)  # fnc: Fortran and not C


def view_of(mapping: Mapping, offset: int, layout: TensorLayout, *, writable: bool = False) -> Array:
    """An array over the payload at `offset` of a pool's mapping. It keeps the mapping alive."""
    if layout.dtype == Dtype.BIT:
        view: Array = np.ndarray((layout.extent_bytes,), np.uint8, mapping, offset)
    else:
        view = np.ndarray(layout.shape, _NUMPY[layout.dtype], mapping, offset, layout.byte_strides)
    if not writable and mapping.is_writable:
        view.flags.writeable = False  # numpy has seen to it where the mapping itself is read-only
    return view


def view_of_frame(mapping: Mapping, frame: SlotFrame) -> Array:
    """The payload of a frame that was read from a ring, read-only; `mapping` is that of its pool."""
    layout = frame.layout
    if layout.extent_bytes <= frame.values_len_bytes:
        return view_of(mapping, frame.payload_offset, layout)
    # B14: a shape may come without any payload; what lies in the slot is some earlier frame's.
    nothing: Array = np.empty((0,), _NUMPY[layout.dtype])
    nothing.flags.writeable = False
    return nothing


@functools.lru_cache(maxsize=256)
def _contiguous(dtype: np.dtype[Any] | Dtype, shape: tuple[int, ...], is_fortran: bool) -> TensorLayout:
    wire = dtype if isinstance(dtype, Dtype) else dtype_of(dtype)
    try:
        if max(shape, default=0) > _MAX_DIM:
            raise ValueError("a dimension has at most 2^31 - 1 elements")
        return TensorLayout(wire, MajorOrder.COLUMN if is_fortran else MajorOrder.ROW, shape)
    except ValueError as error:
        raise LocalProtocolError(f"shape {shape}, {wire.name}: {error}") from None
