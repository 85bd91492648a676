# SPDX-License-Identifier: Apache-2.0
"""Every array that a frame can carry goes through a producer and a consumer unchanged, whatever its memory looks like.

Any dtype, up to 8 dimensions, C and Fortran order, slices with steps of either sign, transposes, broadcasts; published
or filled in place. What no frame can carry is refused, and nothing is published by the attempt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

import tensorpool as tp
from tensorpool.client import Consumer, DropReason, Frame, Producer
from tensorpool.errors import FrameTooLarge, LocalProtocolError
from tensorpool.shm.arrays import dtype_of
from tensorpool.shm.carried_dtypes import is_carrier
from tensorpool.wire.control import Dtype
from tests.client.conftest import SMALL
from tests.levels import SOAK

type Array = np.ndarray[Any, Any]

NUMBERS: Final = ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f4", "<f8", "?")
LARGEST: Final = 65_536  # the larger pool's stride
CARRIED: Final = ("<f2", "<c8", "<c16")
REFUSED: Final = (">i4", ">f8", ">f2", ">c8", "<g", "<G", "S3", "<U2", "<M8[s]", "<m8[D]", "O", "i4,f8")

dtypes = st.sampled_from(NUMBERS)
shapes = nps.array_shapes(min_dims=1, max_dims=8, min_side=0, max_side=3)  # all of them fit a pool
settled = settings(max_examples=150 * SOAK)


class Ends:
    """Both ends of a stream."""

    def __init__(self, producer: Producer, consumer: Consumer) -> None:
        self.producer = producer
        self.consumer = consumer

    def received(self, seq: int | None) -> Frame:
        assert seq is not None
        frame = self.consumer.poll(20)
        assert frame is not None
        assert (frame.seq, frame.epoch, frame.dropped_before) == (seq, self.producer.epoch, 0)
        return frame


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    with tp.local(overrides=SMALL) as pool, pool.connect() as client:
        producer = client.producer("round/trip", create=True)
        consumer = client.consumer("round/trip")
        assert producer.wait_for_consumers(1, 20)
        yield Ends(producer, consumer)


def fill(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    """Every bit pattern, NaNs with payloads and denormals included."""
    kind = np.dtype(dtype)
    data = np.random.default_rng(seed).bytes(int(np.prod(shape)) * kind.itemsize)
    array = np.frombuffer(data, kind).reshape(shape).copy()
    return array.view(np.uint8) % 2 == 1 if dtype == "?" else array


class Drawn:
    """An array, and how it was made."""

    def __init__(self, array: Array, how: str) -> None:
        self.array = array
        self._how = how

    def __repr__(self) -> str:
        return f"{self.array.dtype} {self.array.shape} with strides {self.array.strides}: {self._how}"


@st.composite
def arrays(draw: st.DrawFn, kinds: Sequence[str] = NUMBERS) -> Drawn:
    """Contiguous in either order, or a view of something larger."""
    shape, dtype, seed = draw(shapes), draw(st.sampled_from(kinds)), draw(st.integers(0, 2**32))
    array, how = fill(shape, dtype, seed), [f"fill({shape}, {dtype!r}, {seed})"]
    for _ in range(draw(st.integers(0, 3))):
        match draw(st.sampled_from(["fortran", "transpose", "slice", "axis", "broadcast"])):
            case "fortran":
                array = np.asfortranarray(array)
                how.append("fortran")
            case "transpose":
                axes = draw(st.permutations(range(array.ndim)))
                array = array.transpose(axes)
                how.append(f"transpose{axes}")
            case "slice":
                index = draw(nps.basic_indices(array.shape, allow_ellipsis=False, min_dims=1))
                array = array[index]
                how.append(str(index))
            case "axis" if array.ndim < 8:
                array = array[np.newaxis]
                how.append("newaxis")
            case "broadcast" if array.ndim < 8:
                array = np.broadcast_to(array, (draw(st.integers(0, 3)), *array.shape))
                how.append(f"broadcast{array.shape}")
    return Drawn(array, " ".join(how))


def same(one: Array, other: Array) -> bool:
    """Byte for byte, element by element."""
    return (one.shape, one.dtype) == (other.shape, other.dtype) and one.tobytes() == other.tobytes()


@settled
@given(drawn=arrays(), stamp=st.integers(1, 2**64 - 2), version=st.integers(0, 2**32 - 2), trace=st.integers(0, 2**63))
@example(drawn=Drawn(np.zeros((0, 3), np.uint8).T, ""), stamp=1, version=0, trace=0)
@example(drawn=Drawn(np.arange(4, dtype="<i8")[::-1], ""), stamp=1, version=0, trace=0)
@example(drawn=Drawn(np.broadcast_to(np.float64(2.5), (3, 4)), ""), stamp=1, version=0, trace=0)
def test_every_array_arrives_as_it_was(ends: Ends, drawn: Drawn, stamp: int, version: int, trace: int) -> None:
    """Its elements, its shape, its dtype; the order is its own where it is contiguous, else C."""
    array = drawn.array
    event(f"ndim {array.ndim}")
    event("contiguous" if array.flags.c_contiguous or array.flags.f_contiguous else "strided")
    before = array.copy()
    if is_carrier(dtype_of(array.dtype), array.shape):
        version = 0  # one that has no metadata would be waited for
    seq = ends.producer.publish(array, timestamp_ns=stamp, meta_version=version, trace_id=trace)
    frame = ends.received(seq)
    assert (frame.timestamp_ns, frame.meta_version, frame.trace_id) == (stamp, version, trace)
    assert frame.shape == array.shape
    if array.size:
        assert same(frame.array, before)
        assert frame.order == ("F" if array.flags.fnc else "C")
        assert not frame.array.flags.writeable
    assert same(np.ascontiguousarray(frame.copy()).reshape(before.shape), np.ascontiguousarray(before))
    if array.size:
        out = np.empty_like(array, order="K")
        assert same(frame.copy_into(out), before)
    assert same(array, before), "publishing changes nothing"
    assert frame.is_intact()


@settled
@given(shape=shapes, dtype=dtypes, order=st.sampled_from("CF"), seed=st.integers(0, 2**32))
def test_what_is_filled_in_place_arrives_as_it_was(
    ends: Ends, shape: tuple[int, ...], dtype: str, order: Any, seed: int
) -> None:
    """In the order that was asked for."""
    array = fill(shape, dtype, seed)
    with ends.producer.claim(shape, dtype, order) as slot:
        assert slot.array.shape == shape
        assert slot.array.dtype == array.dtype
        slot.array[...] = array
    frame = ends.received(slot.seq)
    assert frame.shape == shape
    if array.size:
        assert same(frame.array, array)
        assert frame.array.flags.c_contiguous if order == "C" else frame.array.flags.f_contiguous


@settled
@given(shape=nps.array_shapes(min_dims=1, max_dims=8, min_side=1, max_side=3), seed=st.integers(0, 2**32))
@pytest.mark.parametrize("dtype", [Dtype.BYTES, Dtype.BIT], ids=lambda dtype: dtype.name)
def test_bytes_and_bits_are_distinguished_from_numbers(
    ends: Ends, dtype: Dtype, shape: tuple[int, ...], seed: int
) -> None:
    """BIT has one byte for eight of them."""
    with ends.producer.claim(shape, dtype) as slot:
        count = int(np.prod(shape))
        assert slot.array.size == (count if dtype is Dtype.BYTES else -(-count // 8))
        data = np.random.default_rng(seed).integers(0, 256, slot.array.shape, np.uint8)
        slot.array[...] = data
    frame = ends.received(slot.seq)
    assert (frame.wire_dtype, frame.shape, frame.dtype) == (dtype, shape, np.dtype(np.uint8))
    assert same(frame.array, data)


@settled
@given(length=st.integers(0, 2 * LARGEST), is_strided=st.booleans())
@example(length=256, is_strided=False)
@example(length=257, is_strided=True)
@example(length=LARGEST, is_strided=False)
@example(length=LARGEST + 1, is_strided=False)
def test_every_length_arrives_or_is_counted(ends: Ends, length: int, is_strided: bool) -> None:
    """Across the boundaries of the pools; too large is an error, and the next seq is the same."""
    data = np.resize(np.arange(251, dtype=np.uint8), length)
    array = np.repeat(data, 2)[::2] if is_strided else data
    next_seq, dropped = ends.producer.next_seq, ends.producer.stats.dropped.get(DropReason.NO_POOL, 0)
    if length > LARGEST:
        with pytest.raises(FrameTooLarge):
            ends.producer.publish(array)
        assert ends.producer.stats.dropped[DropReason.NO_POOL] == dropped + 1
        assert ends.producer.next_seq == next_seq
        assert ends.consumer.poll() is None
    else:
        assert same(ends.received(ends.producer.publish(array)).copy(), data)


@settings(settled, max_examples=100 * SOAK)
@given(drawn=arrays(CARRIED).filter(lambda drawn: drawn.array.ndim < 8 and drawn.array.size > 0))
def test_every_array_that_travels_as_another_dtype_arrives_as_it_was(ends: Ends, drawn: Drawn) -> None:
    """Its elements, bit by bit, its shape and its dtype, whatever its strides and whatever was published before."""
    frame = ends.received(ends.producer.publish(drawn.array))
    assert (frame.shape, frame.dtype) == (drawn.array.shape, drawn.array.dtype)
    assert same(frame.array, drawn.array)
    assert same(np.ascontiguousarray(frame.copy()), np.ascontiguousarray(drawn.array))


@settings(settled, max_examples=100 * SOAK)
@given(dtype=st.sampled_from(REFUSED), shape=nps.array_shapes(min_dims=1, max_dims=3), is_fortran=st.booleans())
def test_dtypes_that_no_frame_can_carry_are_refused(
    ends: Ends, dtype: str, shape: tuple[int, ...], is_fortran: bool
) -> None:
    """By publish and by claim, whatever was published before, and no seq is used."""
    next_seq = ends.producer.next_seq
    with pytest.raises(LocalProtocolError, match="dtype"):
        ends.producer.publish(np.zeros(shape, dtype, order="F" if is_fortran else "C"))
    with pytest.raises(LocalProtocolError, match="dtype"):
        ends.producer.claim(shape, dtype)
    assert ends.producer.next_seq == next_seq


@settings(settled, max_examples=100 * SOAK)
@given(
    shape=st.just(()) | nps.array_shapes(min_dims=9, max_dims=12, max_side=1),
    dtype=dtypes,
)
def test_dimensions_that_no_frame_has_are_refused(ends: Ends, shape: tuple[int, ...], dtype: str) -> None:
    """None, or more than eight."""
    next_seq = ends.producer.next_seq
    with pytest.raises(LocalProtocolError, match="dimensions"):
        ends.producer.publish(np.zeros(shape, dtype))
    with pytest.raises(LocalProtocolError, match="dimensions"):
        ends.producer.claim(shape, dtype)
    assert ends.producer.next_seq == next_seq
