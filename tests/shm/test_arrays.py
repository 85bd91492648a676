# SPDX-License-Identifier: Apache-2.0
"""Arrays: every dtype both ways, refusals by name, views that are what they show."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from tensorpool._core import Mapping, TensorLayout
from tensorpool.errors import LocalProtocolError
from tensorpool.shm import (
    AllowedBases,
    PoolSpec,
    RingSpec,
    dtype_of,
    layout_for,
    layout_of,
    map_ring,
    numpy_dtype,
    view_of,
    view_of_frame,
)
from tensorpool.shm.arrays import payload_of
from tensorpool.wire.control import Dtype, MajorOrder
from tests.shm.by_hand import mapped_files, pool_file, ring_file

PAIRS = [
    (np.uint8, Dtype.UINT8),
    (np.int8, Dtype.INT8),
    (np.uint16, Dtype.UINT16),
    (np.int16, Dtype.INT16),
    (np.uint32, Dtype.UINT32),
    (np.int32, Dtype.INT32),
    (np.uint64, Dtype.UINT64),
    (np.int64, Dtype.INT64),
    (np.float32, Dtype.FLOAT32),
    (np.float64, Dtype.FLOAT64),
    (np.bool_, Dtype.BOOLEAN),
]


def memory(shm_dir: Path) -> Mapping:
    """4 KiB to write to."""
    with open(shm_dir / "memory", "w+b") as file:
        file.truncate(4096)
        return Mapping(file.fileno(), 4096, writable=True)


@pytest.mark.parametrize(("numpy", "wire"), PAIRS, ids=[wire.name for _, wire in PAIRS])
def test_dtypes_have_one_name_on_each_side(numpy: Any, wire: Dtype) -> None:
    """Both ways, and little-endian whatever the host."""
    assert dtype_of(numpy) is wire
    assert numpy_dtype(wire) == np.dtype(numpy)
    assert numpy_dtype(wire).byteorder in "<=|"


def test_bytes_and_bits_show_as_uint8() -> None:
    """They have no dtype of their own in numpy; uint8 is published as UINT8."""
    assert numpy_dtype(Dtype.BYTES) == numpy_dtype(Dtype.BIT) == np.uint8
    assert dtype_of("u1") is Dtype.UINT8


def test_spellings_of_a_dtype_are_one_dtype() -> None:
    """long long is int64, single bytes have no byte order."""
    assert (dtype_of(np.longlong), dtype_of(">u1"), dtype_of(float)) == (
        Dtype.INT64,
        Dtype.UINT8,
        Dtype.FLOAT64,
    )


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (object, "dtype object cannot be sent; object arrays hold pointers"),
        ("S3", "publish the text's bytes as uint8"),
        ("U3", "encode the text and publish its bytes as uint8"),
        (np.dtypes.StringDType(), "encode the text"),
        (np.clongdouble, r"convert with astype\(np.complex128\)"),
        (ml_dtypes.float8_e4m3fn, "dtype float8_e4m3fn cannot be sent; .* view it as unsigned integers"),
        (">f2", r"dtype >f2 is big-endian; convert with astype\('float16'\)"),
        (np.longdouble, r"convert with astype\(np.float64\)"),
        ("M8[ns]", "view it as int64"),
        ("m8[s]", "view it as int64"),
        ([("a", "i4"), ("b", "f4")], "publish its fields one by one"),
        (">f4", r"dtype >f4 is big-endian; convert with astype\('float32'\)"),
        (">i8", r"dtype >i8 is big-endian; convert with astype\('int64'\)"),
    ],
)
def test_dtypes_that_no_frame_can_carry_are_refused_by_name(dtype: Any, text: str) -> None:
    """The message says what to use instead."""
    with pytest.raises(LocalProtocolError, match=text):
        layout_of(np.zeros(3, dtype))


def test_a_layout_has_the_order_of_its_array() -> None:
    """C and Fortran as they are; whatever is neither counts as its C-ordered copy."""
    c = np.zeros((4, 6), np.int16)
    for array, order, strides in [
        (c, MajorOrder.ROW, (12, 2)),
        (np.asfortranarray(c), MajorOrder.COLUMN, (2, 8)),
        (c[:, ::2], MajorOrder.ROW, (6, 2)),
        (c[::-1], MajorOrder.ROW, (12, 2)),
        (np.broadcast_to(c[0], (4, 6)), MajorOrder.ROW, (12, 2)),
        (c[:1], MajorOrder.ROW, (12, 2)),
    ]:
        layout = layout_of(array)
        assert (layout.major_order, layout.shape, layout.byte_strides) == (order, array.shape, strides)
        assert layout.extent_bytes == array.nbytes


def test_layouts_are_cached_by_dtype_shape_and_order() -> None:
    """A stream keeps its shape: the same object comes back, and another for another."""
    frame = np.zeros((3, 5), np.float32)
    assert layout_of(frame) is layout_of(frame + 1)
    assert layout_of(frame) is layout_for((3, 5), np.float32)
    others = [frame.T, frame.reshape(5, 3), frame.astype(np.int32), frame.view(np.uint32)]
    assert len({id(layout_of(other)) for other in [frame, *others]}) == 5


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((), r"shape \(\), UINT8: a tensor has 1 to 8 dimensions; reshape a scalar to \(1,\)"),
        ((1,) * 9, "at most 8 dimensions"),
        ((2**31, 1), r"0 to 2\^31 - 1 elements"),
        ((2**16, 2**16), "below 4 GiB"),
        ((-1,), r"0 to 2\^31 - 1 elements"),
    ],
)
def test_shapes_that_no_frame_can_have_are_refused(shape: tuple[int, ...], text: str) -> None:
    """The message repeats the shape."""
    with pytest.raises(LocalProtocolError, match=text):
        layout_for(shape, np.uint8)


@pytest.mark.parametrize(("numpy", "wire"), PAIRS, ids=[wire.name for _, wire in PAIRS])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_view_shows_the_bytes_in_place(shm_dir: Path, numpy: Any, wire: Dtype, order: Any) -> None:
    """Written through one view, read through another and in the raw bytes."""
    mapping = memory(shm_dir)
    values = np.arange(24).reshape(2, 3, 4).astype(numpy)
    layout = layout_for(values.shape, wire, order)
    view_of(mapping, 64, layout, writable=True)[...] = values
    shown = view_of(mapping, 64, layout)
    assert (shown == values).all()
    assert shown.dtype == np.dtype(numpy)
    assert bytes(memoryview(mapping)[64 : 64 + layout.extent_bytes]) == values.tobytes(order)


def test_declared_strides_are_respected(shm_dir: Path) -> None:
    """Rows with padding between them, as a camera delivers them."""
    mapping = memory(shm_dir)
    memoryview(mapping)[:64] = bytes(range(64))
    view = view_of(mapping, 0, TensorLayout(Dtype.UINT8, MajorOrder.ROW, [3, 4], [16, 1]))
    assert view.tolist() == [[0, 1, 2, 3], [16, 17, 18, 19], [32, 33, 34, 35]]


def test_bits_show_as_packed_bytes_and_keep_their_shape_in_the_layout(shm_dir: Path) -> None:
    """unpackbits gets the logical array back."""
    mapping = memory(shm_dir)
    bits = np.arange(30).reshape(3, 10) % 3 == 0
    layout = layout_for(bits.shape, Dtype.BIT)
    view_of(mapping, 64, layout, writable=True)[...] = np.packbits(bits)
    packed = view_of(mapping, 64, layout)
    assert packed.shape == (4,)
    assert layout.shape == (3, 10)
    assert (np.unpackbits(packed, count=30).reshape(layout.shape) == bits).all()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2)])
def test_arrays_without_elements_are_fine(shm_dir: Path, shape: tuple[int, ...]) -> None:
    """They have a shape, and nothing in it."""
    mapping = memory(shm_dir)
    layout = layout_of(np.empty(shape, np.float64))
    assert layout.extent_bytes == 0
    assert view_of(mapping, 4096, layout).shape == shape


def test_views_are_read_only_unless_asked(shm_dir: Path) -> None:
    """Also over writable memory, and there is no way back."""
    mapping = memory(shm_dir)
    layout = layout_for((4,), np.uint8)
    view = view_of(mapping, 0, layout)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    view_of(mapping, 0, layout, writable=True)[0] = 1
    assert view[0] == 1


def test_a_read_only_mapping_has_no_writable_views(shm_dir: Path) -> None:
    """Not even by asking numpy."""
    (shm_dir / "memory").write_bytes(bytes(64))
    with open(shm_dir / "memory", "rb") as file:
        mapping = Mapping(file.fileno(), 64, writable=False)
    for writable in (False, True):
        view = view_of(mapping, 0, layout_for((4,), np.uint8), writable=writable)
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True


def test_a_view_behind_the_end_is_refused(shm_dir: Path) -> None:
    """numpy checks the extent against the mapping."""
    mapping = memory(shm_dir)
    with pytest.raises((TypeError, ValueError)):
        view_of(mapping, 4000, layout_for((97,), np.uint8))


def test_a_view_of_a_view_keeps_the_mapping(shm_dir: Path) -> None:
    """The last slice unmaps it, not the first."""
    view = view_of(memory(shm_dir), 0, layout_for((16, 16), np.uint8))
    part = view[3:, ::2].T
    del view
    gc.collect()
    assert len(mapped_files(shm_dir)) == 1
    assert part.sum() == 0
    del part
    assert mapped_files(shm_dir) == []


def test_a_frame_without_payload_shows_nothing_of_an_earlier_one(shm_dir: Path, bases: AllowedBases) -> None:
    """Its header may name any shape (B14): the slot's old bytes are not its payload."""
    spec = RingSpec(4, (PoolSpec(3, 128),))
    uris = [ring_file(shm_dir / "r"), pool_file(shm_dir / "p")]
    ring = map_ring(spec, uris, bases, stream_id=10000, epoch=7, writable=True)
    writer, reader = ring.writer(), ring.reader()
    secret = np.full(32, 0x53, np.uint8)
    writer.write(0, layout_of(secret), secret)
    memoryview(ring.header.mapping)[64 + 8 : 64 + 12] = bytes(4)  # values_len_bytes = 0
    frame = reader.read(0)
    view = view_of_frame(reader.pools[0][2], frame)  # type: ignore[arg-type]
    assert (view.size, view.dtype, view.flags.writeable) == (0, np.dtype(np.uint8), False)


def test_a_frame_is_shown_where_it_lies(shm_dir: Path, bases: AllowedBases) -> None:
    """The view is the slot's memory, not a copy."""
    spec = RingSpec(4, (PoolSpec(3, 128),))
    uris = [ring_file(shm_dir / "r"), pool_file(shm_dir / "p")]
    writer = map_ring(spec, uris, bases, stream_id=10000, epoch=7, writable=True).writer()
    reader = map_ring(spec, uris, bases, stream_id=10000, epoch=7).reader()
    values = np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.write(6, layout_of(values), values)
    frame: Any = reader.read(6)
    view = view_of_frame(reader.pools[frame.pool][2], frame)
    assert view.flags.f_contiguous
    assert (view == values).all()
    in_memory = np.frombuffer(reader.pools[0][2], np.uint8, offset=64 + 2 * 128, count=1)
    assert view.__array_interface__["data"][0] == in_memory.__array_interface__["data"][0]


# --- strides, bits and bytes

PADDED = np.arange(4 * 8, dtype=np.uint16).reshape(4, 8)[:, :6]


@pytest.mark.spec("WIRE-8.2-19")
@pytest.mark.parametrize(
    ("array", "order"),
    [
        (PADDED, MajorOrder.ROW),
        (PADDED.T, MajorOrder.COLUMN),
        (np.zeros((3, 5, 7), np.float32)[:, :, :2], MajorOrder.ROW),
        (np.zeros((3, 8), np.uint8)[:, ::2], MajorOrder.ROW),
        (np.zeros((4, 4), np.uint8)[:1, :2][::-1], MajorOrder.ROW),
        (np.zeros((6, 4), np.uint8), MajorOrder.ROW),
    ],
    ids=["padded rows", "padded columns", "three dimensions", "every other", "one row reversed", "contiguous"],
)
def test_an_array_keeps_its_strides(array: np.ndarray[Any, Any], order: MajorOrder) -> None:
    """Its layout has them, and its bytes are one block with what lies between the rows."""
    layout, block = payload_of(array, None, None, keep_strides=True)
    assert (layout.shape, layout.major_order) == (array.shape, order)
    wide = [axis for axis in range(array.ndim) if array.shape[axis] > 1]
    assert [layout.byte_strides[axis] for axis in wide] == [array.strides[axis] for axis in wide]
    assert (block.nbytes, block.ctypes.data) == (layout.extent_bytes, array.ctypes.data)
    assert not block.flags.writeable
    again = np.ndarray(layout.shape, array.dtype, block, 0, layout.byte_strides)
    np.testing.assert_array_equal(again, array)


@pytest.mark.spec("WIRE-8.2-19")
@pytest.mark.parametrize(
    "array",
    [
        PADDED[::-1],
        PADDED[:, ::-1],
        np.broadcast_to(PADDED[0], (4, 6)),
        as_strided(PADDED, (4, 6), (2, 2)),
        np.broadcast_to(np.uint16(5), (4,)),
    ],
    ids=["rows reversed", "columns reversed", "broadcast", "overlapping", "one number"],
)
def test_strides_that_no_frame_can_have_are_refused(array: np.ndarray[Any, Any]) -> None:
    """By name, with what to do."""
    with pytest.raises(LocalProtocolError, match="strides"):
        payload_of(array, None, None, keep_strides=True)


def test_a_block_keeps_its_array_alive() -> None:
    """Though it is only an address to numpy."""
    array = np.full((4, 8), 7, np.uint8)[:, :6]
    _, block = payload_of(array, None, None, keep_strides=True)
    owner = weakref.ref(array.base)
    del array
    gc.collect()
    assert owner() is not None
    assert set(block) == {7}


@pytest.mark.parametrize("data", [b"\x01\x02\x03", bytearray(b"\x01\x02\x03"), memoryview(b"\x01\x02\x03")], ids=type)
def test_bytes_are_a_payload(data: Any) -> None:
    """Of their own length, or of a shape that has it; an array of uint8 keeps its shape."""
    layout, packed = payload_of(data, Dtype.BYTES, None, keep_strides=False)
    assert (layout.dtype, layout.shape, packed.tobytes()) == (Dtype.BYTES, (3,), b"\x01\x02\x03")
    assert payload_of(data, Dtype.BYTES, (3, 1), keep_strides=False)[0].shape == (3, 1)
    square = np.arange(16, dtype=np.uint8).reshape(4, 4)
    layout, packed = payload_of(square.T, Dtype.BYTES, None, keep_strides=False)
    assert (layout.shape, packed.tobytes()) == ((4, 4), square.T.tobytes())


def test_packed_bits_have_the_shape_of_the_bits() -> None:
    """By default all of them; otherwise as many as the shape says, with the last byte's rest unused."""
    packed = np.packbits(np.ones(13, bool))
    assert payload_of(packed, Dtype.BIT, None, keep_strides=False)[0].shape == (16,)
    layout, data = payload_of(packed, Dtype.BIT, (13,), keep_strides=False)
    assert (layout.shape, layout.extent_bytes, data.tobytes()) == ((13,), 2, packed.tobytes())
    with pytest.raises(LocalProtocolError, match="takes 3 bytes, not 2"):
        payload_of(packed, Dtype.BIT, (17,), keep_strides=False)
    with pytest.raises(LocalProtocolError, match="packbits"):
        payload_of(np.ones(16, bool), Dtype.BIT, None, keep_strides=False)
