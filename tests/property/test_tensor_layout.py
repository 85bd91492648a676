# SPDX-License-Identifier: Apache-2.0
"""What holds for every layout and for every slot header: an oracle in Python integers and numpy against the core.

Wire §8.2, §15.8; decisions B9–B16.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Sequence
from random import Random
from typing import Literal

import numpy as np
import pytest
from hypothesis import assume, event, example, given, settings
from hypothesis import strategies as st

from tensorpool._core import DropReason, Mapping, RingReader, RingWriter, SlotFrame, TensorLayout
from tests.levels import SOAK

ROW, COLUMN = 1, 2
BIT = 14
INT32_MAX = 2**31 - 1
LARGEST = 2**32 - 1  # values_len_bytes is a u32
NUMBERS = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f4", "<f8", "?")
NUMPY = dict(enumerate(NUMBERS, start=1)) | {13: "u1"}

dtypes = st.sampled_from(sorted(NUMPY))
orders = st.sampled_from([ROW, COLUMN])


class Declared:
    """B9 and B10 in Python's integers: effective strides, whether they are allowed, and how far they reach."""

    def __init__(self, element: int, order: int, dims: Sequence[int], strides: Sequence[int]) -> None:
        axes = range(len(dims) - 1, -1, -1) if order == ROW else range(len(dims))  # from the fastest outward
        self.strides = list(strides) or [0] * len(dims)
        contiguous = element
        for axis in axes:
            self.strides[axis] = self.strides[axis] or contiguous
            contiguous = self.strides[axis] * dims[axis]
        wide = [axis for axis in axes if dims[axis] > 1]
        least = [element, *(self.strides[axis] * dims[axis] for axis in wide)]
        self.is_empty = 0 in dims
        self.is_ordered = all(self.strides[axis] >= need for axis, need in zip(wide, least, strict=False))
        reach = sum((extent - 1) * stride for extent, stride in zip(dims, self.strides, strict=True))
        self.extent = 0 if self.is_empty else reach + element
        self.is_accepted = self.is_empty or (self.is_ordered and self.extent <= LARGEST)


def layout_or_none(dtype: int, order: int, dims: Sequence[int], strides: Sequence[int] = ()) -> TensorLayout | None:
    try:
        return TensorLayout(dtype, order, list(dims), list(strides))
    except ValueError:
        return None


def overlaps(dims: Sequence[int], strides: Sequence[int], element: int) -> bool:
    """Every element, one by one."""
    starts = np.zeros(1, np.int64)
    for extent, stride in zip(dims, strides, strict=True):
        starts = (starts[:, None] + np.arange(extent) * stride).ravel()
    return bool((np.diff(np.sort(starts)) < element).any())


@st.composite
def small_tensors(draw: st.DrawFn) -> tuple[int, int, list[int], list[int]]:
    """Shapes small enough to enumerate, with strides that are about right, so that both answers are frequent."""
    dtype, order = draw(dtypes), draw(orders)
    element = np.dtype(NUMPY[dtype]).itemsize
    dims = draw(st.lists(st.one_of(st.integers(2, 4), st.integers(0, 4)), min_size=1, max_size=4))
    if draw(st.integers(0, 3)) == 3:
        return dtype, order, dims, []
    contiguous = Declared(element, order, dims, []).strides
    near = [st.one_of(st.just(0), st.integers(max(1, s - 8), s + 16), st.integers(1, 64)) for s in contiguous]
    return dtype, order, dims, draw(st.tuples(*near).map(list))


@settings(max_examples=500 * SOAK)
@given(small_tensors())
@example((9, ROW, [5, 1], [4, 4]))
@example((9, ROW, [2, 3], [20, 8]))
@example((9, COLUMN, [2, 3], [12, 4]))
def test_a_layout_is_accepted_iff_it_is_ordered_and_then_no_element_overlaps(
    case: tuple[int, int, list[int], list[int]],
) -> None:
    """Accepted iff strides follow the order (B9); then no elements overlap and the extent is their reach."""
    dtype, order, dims, strides = case
    element = np.dtype(NUMPY[dtype]).itemsize
    oracle = Declared(element, order, dims, strides)
    layout = layout_or_none(dtype, order, dims, strides)
    event("accepted" if layout else "refused")
    assert (layout is not None) == oracle.is_accepted
    if overlaps(dims, oracle.strides, element):
        assert layout is None
    if layout is None or oracle.is_empty:
        return
    assert layout.byte_strides == tuple(oracle.strides)
    assert layout.extent_bytes == oracle.extent
    # numpy checks the bounds of a strided view itself, and shows elements that share bytes.
    typ = f"u{element}"
    view = np.ndarray(dims, typ, bytearray(layout.extent_bytes), strides=layout.byte_strides)
    values = np.arange(math.prod(dims), dtype=typ).reshape(dims) * (1 if element == 1 else 251)
    view[...] = values
    assert (view == values).all()
    if layout.extent_bytes > 1:  # an empty buffer is none to numpy
        with pytest.raises((TypeError, ValueError)):
            np.ndarray(dims, typ, bytearray(layout.extent_bytes - 1), strides=layout.byte_strides)


@settings(max_examples=300 * SOAK)
@given(dtypes, st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_inferred_strides_are_those_of_numpy(dtype: int, shape: list[int]) -> None:
    """Row order is numpy's C, column order its F; declaring what would be inferred changes nothing."""
    orders: list[tuple[int, Literal["C", "F"]]] = [(ROW, "C"), (COLUMN, "F")]
    for order, name in orders:
        array = np.empty(shape, NUMPY[dtype], order=name)
        inferred = TensorLayout(dtype, order, shape)
        assert inferred.byte_strides == array.strides
        assert inferred.extent_bytes == array.nbytes
        declared = TensorLayout(dtype, order, shape, list(array.strides))
        assert (declared.byte_strides, declared.extent_bytes) == (inferred.byte_strides, inferred.extent_bytes)
        if math.prod(shape) > max(shape):  # more than one wide dimension: the two orders contradict each other
            assert layout_or_none(dtype, ROW + COLUMN - order, shape, array.strides) is None


large = st.one_of(
    st.sampled_from([0, 1, 2, 3, 7, 8, 2**15, 2**16, 2**17, 2**30, INT32_MAX - 1, INT32_MAX]),
    st.integers(0, INT32_MAX),
)


@settings(max_examples=500 * SOAK)
@given(dtypes, orders, st.lists(st.tuples(large, large), min_size=1, max_size=8), st.booleans())
@example(10, ROW, [(INT32_MAX, INT32_MAX)] * 8, True)
@example(1, ROW, [(65537, 0), (65535, 0)], True)
@example(1, ROW, [(2, 0), (1, 0), (1, INT32_MAX)], True)
def test_no_size_wraps_around(dtype: int, order: int, axes: list[tuple[int, int]], is_strided: bool) -> None:
    """Whatever fits int32 is judged as in unlimited integers: beyond 4 GiB it is refused, never taken modulo."""
    dims = [extent for extent, _ in axes]
    strides = [stride for _, stride in axes] if is_strided else []
    oracle = Declared(np.dtype(NUMPY[dtype]).itemsize, order, dims, strides)
    layout = layout_or_none(dtype, order, dims, strides)
    event("accepted" if layout else "refused")
    assert (layout is not None) == oracle.is_accepted
    if layout is not None:
        assert layout.extent_bytes == oracle.extent
        if not oracle.is_empty:
            wide = [i for i, extent in enumerate(dims) if extent > 1]
            assert [layout.byte_strides[i] for i in wide] == [oracle.strides[i] for i in wide]


@settings(max_examples=500 * SOAK)
@given(orders, st.lists(large, min_size=1, max_size=8))
@example(ROW, [2**30, 2**17, 2**17])
@example(COLUMN, [2**17, 2**17, 2**30])
@example(ROW, [2**30 + 1, 2**17, 2**17])
def test_bits_fill_whole_bytes_and_never_wrap(order: int, dims: list[int]) -> None:
    """A tensor of bits takes ceil(n / 8) bytes; beyond 4 GiB it is refused, however the product is reached."""
    size = -(-math.prod(dims) // 8)
    layout = layout_or_none(BIT, order, dims)
    assert (layout is not None) == (size <= LARGEST)
    if layout is not None:
        assert layout.extent_bytes == size


@settings(max_examples=200 * SOAK)
@given(dtypes, orders, st.lists(st.integers(-(2**31), 4), min_size=1, max_size=4))
def test_negative_extents_are_refused(dtype: int, order: int, dims: list[int]) -> None:
    """A negative dimension is no dimension, whatever stands beside it."""
    assume(min(dims) < 0)
    assert layout_or_none(dtype, order, dims) is None


# --- slots

NSLOTS = 4
POOLS = {1: 64, 2: 1024}
INDEX = 1
SEQ = 5
GOLDEN = struct.pack(
    "<QIIHIQI26xI HHHH hhBxBI8i8i109x",
    *(SEQ << 1 | 1, 24, INDEX, 1, 0, 77, 1, 192),
    *(184, 52, 900, 1),
    *(9, ROW, 2, 0, 0),
    *(2, 3, 0, 0, 0, 0, 0, 0),
    *(0,) * 8,
)


class Ring:
    """A ring in anonymous memory, with the bytes of one slot in reach."""

    def __init__(self) -> None:
        self._fds = {key: os.memfd_create("ring") for key in (0, *POOLS)}
        for key, fd in self._fds.items():
            os.truncate(fd, 64 + NSLOTS * POOLS.get(key, 256))
        self.reader = RingReader(*self._map(writable=False))
        self.writer = RingWriter(*self._map(writable=True))

    def _map(self, *, writable: bool) -> tuple[Mapping, list[tuple[int, int, Mapping]], int]:
        maps = {key: Mapping(fd, os.fstat(fd).st_size, writable=writable) for key, fd in self._fds.items()}
        return maps[0], [(pool_id, stride, maps[pool_id]) for pool_id, stride in POOLS.items()], NSLOTS

    def put(self, image: bytes) -> None:
        os.pwrite(self._fds[0], image, 64 + INDEX * 256)

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)


@pytest.fixture(scope="module")
def ring() -> Iterator[Ring]:
    one = Ring()
    yield one
    one.close()


def check_contained(reader: RingReader, frame: SlotFrame) -> None:
    """The payload of a frame lies inside its own slot, and a view with its layout stays inside the payload."""
    _, stride, mapping = reader.pools[frame.pool]
    assert frame.slot == INDEX
    assert frame.payload_offset == 64 + INDEX * stride
    assert frame.values_len_bytes <= stride
    assert frame.payload_offset + stride <= len(mapping)
    out = bytearray(frame.values_len_bytes)
    assert reader.copy_into(frame, out)
    layout = frame.layout
    if frame.values_len_bytes == 0:
        return
    assert layout.extent_bytes <= frame.values_len_bytes
    assert 1 <= len(layout.shape) <= 8
    if layout.dtype != BIT:
        payload = memoryview(mapping)[frame.payload_offset :][: frame.values_len_bytes]
        view = np.ndarray(layout.shape, NUMPY[layout.dtype], payload, strides=layout.byte_strides)
        assert view.nbytes <= frame.values_len_bytes
    else:
        assert math.prod(layout.shape) <= frame.values_len_bytes * 8


# offset, format, and values that are at an edge of something
PIECES: list[tuple[int, str, tuple[int, ...]]] = [
    (8, "<I", (0, 1, 23, 24, 25, 64, 65, 1024, 1025, LARGEST)),
    (12, "<I", (0, 1, 5, LARGEST)),
    (16, "<H", (0, 1, 2, 3, 257)),
    (18, "<I", (0, 1, 64)),
    (60, "<I", (191, 192, 193)),
    (72, "<h", (*range(16), -1)),
    (74, "<h", (0, 1, 2, 3)),
    (76, "<B", (*range(10), 255)),
    (78, "<B", (0, 1, 2, 3)),
    (79, "<I", (0, 1, 4, 12, LARGEST)),
    *((83 + 4 * i, "<i", (0, 1, 2, 3, 6, 64, 2**17, 2**30, INT32_MAX, -1)) for i in range(8)),
    *((115 + 4 * i, "<i", (0, 1, 2, 4, 8, 12, 100, INT32_MAX, -1)) for i in range(8)),
]


def piece(row: tuple[int, str, tuple[int, ...]]) -> st.SearchStrategy[tuple[int, bytes]]:
    at, form, values = row
    return st.sampled_from(values).map(lambda value: (at, struct.pack(form, value)))


changes: st.SearchStrategy[tuple[int, bytes]] = st.one_of(
    st.sampled_from(PIECES).flatmap(piece),
    st.tuples(st.integers(8, 247), st.binary(min_size=1, max_size=8)),
)


@settings(max_examples=500 * SOAK)
@given(changed=st.lists(changes, min_size=1, max_size=8))
def test_a_mutated_header_never_yields_a_frame_outside_its_slot(ring: Ring, changed: list[tuple[int, bytes]]) -> None:
    """A good header with wrong bytes anywhere but in the commit word is a counted drop or a frame in bounds."""
    image = bytearray(GOLDEN)
    for at, data in changed:
        image[at : at + len(data)] = data
    check_read(ring, bytes(image))


@settings(max_examples=500 * SOAK)
@given(body=st.binary(min_size=248, max_size=248), keeps_embedded_header=st.booleans())
def test_random_bytes_never_yield_a_frame_outside_their_slot(
    ring: Ring, body: bytes, keeps_embedded_header: bool
) -> None:
    """248 bytes of noise behind a committed word are a counted drop or a frame in bounds."""
    image = bytearray(GOLDEN[:8] + body)
    if keeps_embedded_header:
        image[12:16], image[18:22], image[60:72] = GOLDEN[12:16], GOLDEN[18:22], GOLDEN[60:72]
    check_read(ring, bytes(image))


def check_read(ring: Ring, image: bytes) -> None:
    ring.put(image)
    reader = ring.reader
    before = (reader.accepted, dict(reader.drops))
    result = reader.read(SEQ)
    event(str(result) if isinstance(result, DropReason) else "accepted")
    if isinstance(result, SlotFrame):
        assert (reader.accepted, dict(reader.drops)) == (before[0] + 1, before[1])
        check_contained(reader, result)
    else:
        assert reader.accepted == before[0]
        assert reader.drops[result] == before[1].get(result, 0) + 1
    ring.put(GOLDEN)
    assert isinstance(reader.read(SEQ), SlotFrame)


@settings(max_examples=500 * SOAK)
@given(case=small_tensors(), noise=st.randoms(use_true_random=False))
def test_what_is_written_is_read(case: tuple[int, int, list[int], list[int]], noise: Random) -> None:
    """Any accepted layout makes the trip through the slot unchanged, bytes included, by copy and in place."""
    layout = layout_or_none(*case)
    assume(layout is not None)
    assert layout is not None
    payload = noise.randbytes(layout.extent_bytes)
    ring = Ring()
    try:
        check_written(ring, layout, payload, SEQ, in_place=False)
        check_written(ring, layout, payload, SEQ + NSLOTS, in_place=True)
    finally:
        ring.close()


def check_written(ring: Ring, layout: TensorLayout, payload: bytes, seq: int, *, in_place: bool) -> None:
    if layout.extent_bytes > max(POOLS.values()):
        assert not ring.writer.write(seq, layout, payload)
        return
    if in_place:
        begun = ring.writer.begin(seq, layout)
        assert begun is not None
        mapping, offset = begun
        memoryview(mapping)[offset : offset + len(payload)] = payload
        ring.writer.commit(timestamp_ns=3, meta_version=4)
    else:
        assert ring.writer.write(seq, layout, payload, timestamp_ns=3, meta_version=4)
    frame = ring.reader.read(seq)
    assert isinstance(frame, SlotFrame)
    assert (frame.timestamp_ns, frame.meta_version) == (3, 4)
    assert frame.layout.shape == layout.shape
    assert frame.layout.byte_strides == layout.byte_strides
    out = bytearray(frame.values_len_bytes)
    assert ring.reader.copy_into(frame, out)
    assert out == payload
