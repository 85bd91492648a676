# SPDX-License-Identifier: Apache-2.0
"""Arrays over payloads: numpy's dtypes and orders against those of the wire.

A view keeps its mapping alive and is read-only unless its maker asks to write. Dtypes that the wire does not
know are refused by name, with what to use instead. BYTES shows as uint8; BIT shows as the packed bytes, and
its layout keeps the logical shape. Wire §8.2, §15.8; decisions B9–B14.
"""

from __future__ import annotations

import functools
import operator
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
_MAX_INT32: Final = 2**31 - 1

# By numpy's kind, or by its character where that says more.
_INSTEAD: Final = {
    "O": "object arrays hold pointers; convert to a numeric dtype",
    "S": "publish the text's bytes as uint8",
    "U": "encode the text and publish its bytes as uint8",
    "T": "encode the text and publish its bytes as uint8",
    "g": "convert with astype(np.float64)",
    "M": "view it as int64",
    "m": "view it as int64",
    "V": "publish its fields one by one, or view it as unsigned integers",
    "G": "convert with astype(np.complex128)",
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
    if given.byteorder == ">" and given.kind in "iufc":
        raise LocalProtocolError(f"dtype {given.str} is big-endian; convert with astype({given.name!r})")
    instead = _INSTEAD.get(given.char) or _INSTEAD.get(given.kind) or "convert to a numeric dtype"
    raise LocalProtocolError(f"dtype {given} cannot be sent; {instead}")


def numpy_dtype(dtype: int) -> np.dtype[Any]:
    """The numpy dtype that shows payloads of a wire dtype."""
    return _NUMPY[dtype]


def layout_for(
    shape: tuple[int, ...],
    dtype: npt.DTypeLike | Dtype,
    order: Order = "C",
    strides: tuple[int, ...] | None = None,
) -> TensorLayout:
    """The layout of a payload; `dtype` is numpy's, or the wire's own (Dtype.BIT, Dtype.BYTES).

    >>> layout_for((1080, 1920, 3), np.uint8).extent_bytes
    6220800
    >>> layout_for((1080, 1900), np.uint8, strides=(2048, 1)).extent_bytes     # rows of a camera, padded
    2211692

    `strides` are in bytes, as numpy's; without them the payload is contiguous. Raises LocalProtocolError for what no
    frame can carry: scalars, more than 8 dimensions, 4 GiB and more, strides that overlap or contradict the order.
    """
    if order not in ("C", "F"):
        raise LocalProtocolError(f"order = {order!r}: expected 'C' or 'F'")
    wire = dtype if isinstance(dtype, Dtype) else np.dtype(dtype)
    try:
        dims = tuple(map(operator.index, shape))
        steps = None if strides is None else tuple(map(operator.index, strides))
    except TypeError:
        raise LocalProtocolError(f"shape {shape!r}, strides {strides!r}: expected whole numbers in tuples") from None
    return _layout(wire, dims, order == "F", steps)


def layout_with_strides(array: Array) -> TensorLayout:
    """The layout of an array with its own strides, contiguous or not. Raises like `layout_for`."""
    # Strides of axes without a second element mean nothing to numpy: they are inferred.
    steps = tuple(stride if extent > 1 else 0 for stride, extent in zip(array.strides, array.shape, strict=True))
    real = [stride for stride, extent in zip(array.strides, array.shape, strict=True) if extent > 1]
    if min(real, default=1) <= 0:
        raise LocalProtocolError(f"strides {array.strides}: a reversed or broadcast array needs a copy")
    return _layout(array.dtype, array.shape, len(real) > 1 and real[0] < real[-1], steps)


def payload_of(
    data: Any, dtype: npt.DTypeLike | Dtype | None, shape: tuple[int, ...] | None, keep_strides: bool
) -> tuple[TensorLayout, Array]:
    """The layout and the bytes of a payload that is not simply an array: packed bits, plain bytes, padded rows.

    Raises LocalProtocolError.
    """
    if dtype is Dtype.BIT or dtype is Dtype.BYTES:
        return _packed(data, dtype, shape)
    array: Array = np.asarray(data)
    own = dtype_of(array.dtype)
    if shape is not None or (dtype is not None and own is not (dtype if isinstance(dtype, Dtype) else dtype_of(dtype))):
        given = f"dtype = {dtype!r}, shape = {shape} for an array of {array.dtype} {array.shape}"
        raise LocalProtocolError(f"{given}: they are for Dtype.BIT and Dtype.BYTES; use astype() and reshape()")
    if not keep_strides and not array.flags.forc:
        array = np.ascontiguousarray(array)
    layout = layout_with_strides(array)
    return layout, bytes_of(array, layout.extent_bytes)


def _packed(data: Any, dtype: Dtype, shape: tuple[int, ...] | None) -> tuple[TensorLayout, Array]:
    own: tuple[int, ...] | None = None
    if isinstance(data, np.ndarray):
        if data.dtype != np.uint8:
            raise LocalProtocolError(f"{dtype.name} from {data.dtype}: expected bytes; numpy.packbits packs bits")
        own, data = data.shape, np.ascontiguousarray(data)
    try:
        packed = np.frombuffer(data, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise LocalProtocolError(f"{dtype.name} from {type(data).__name__}: expected bytes; {error}") from None
    if own is None or dtype is Dtype.BIT:
        own = (8 * packed.size if dtype is Dtype.BIT else packed.size,)
    layout = layout_for(own if shape is None else shape, dtype)
    if layout.extent_bytes != packed.size:
        raise LocalProtocolError(f"{dtype.name} {layout.shape} takes {layout.extent_bytes} bytes, not {packed.size}")
    return layout, packed


def bytes_of(array: Array, extent_bytes: int) -> Array:
    """From the first byte of an array's first element on, what lies between its rows included. Read-only."""
    return np.asarray(_Block(array, extent_bytes))


def layout_of(array: Array) -> TensorLayout:
    """The layout in which an array is published: its own if it is contiguous, else that of a C-ordered copy.

    Raises like `layout_for`.
    """
    return _layout(array.dtype, array.shape, array.flags.fnc, None)  # fnc: Fortran and not C


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


class _Block:
    """Memory of an array as plain bytes, in numpy's array interface; keeps the array alive."""

    def __init__(self, array: Array, size: int) -> None:
        self.array = array
        address = array.__array_interface__["data"][0]
        self.__array_interface__ = {"data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3}


@functools.lru_cache(maxsize=256)
def _layout(
    dtype: np.dtype[Any] | Dtype, shape: tuple[int, ...], is_fortran: bool, strides: tuple[int, ...] | None
) -> TensorLayout:
    wire = dtype if isinstance(dtype, Dtype) else dtype_of(dtype)
    try:
        if max(shape, default=0) > _MAX_INT32 or min(shape, default=0) < 0:
            raise ValueError("a dimension has 0 to 2^31 - 1 elements")
        if strides is not None and not all(0 <= stride <= _MAX_INT32 for stride in strides):
            raise ValueError("a stride is 0 (inferred) to 2^31 - 1 bytes; reversed and broadcast arrays need a copy")
        return TensorLayout(wire, MajorOrder.COLUMN if is_fortran else MajorOrder.ROW, shape, strides or ())
    except ValueError as error:
        given = "" if strides is None else f", strides {strides}"
        raise LocalProtocolError(f"shape {shape}{given}, {wire.name}: {error}") from None
