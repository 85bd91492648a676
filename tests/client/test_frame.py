# SPDX-License-Identifier: Apache-2.0
"""Frames: read-only views without a copy, copies that are whole or refused, and views that outlive everything."""

from __future__ import annotations

import gc
import struct
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorpool._core import MAX_DIMS, DescriptorFeed, DropReason, monotonic_ns
from tensorpool.client.frame import Frame
from tensorpool.client.mapped_epoch import MappedEpoch
from tensorpool.errors import FrameOverwritten, LocalProtocolError
from tensorpool.shm import layout_for
from tensorpool.wire.control import Dtype
from tests.client.conftest import STREAM, Stream, taken
from tests.client.descriptor_feed.conftest import NSLOTS, POOL_ID, VALUES_LEN
from tests.shm.by_hand import mapped_files

DTYPES = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8", "?"]
MATRIX = np.arange(24, dtype=np.int32).reshape(4, 6)


class Reader:
    """One mapping of a stream, and the frames that come from it."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.mapped = stream.mapped()
        self._feed = DescriptorFeed(self.mapped.reader, stream.stream_id, stream.epoch)

    def next(self) -> Frame:
        (received,) = taken(self._feed, self.stream.subscription)
        return Frame(self.mapped, received)

    def publish(self, array: np.ndarray[Any, Any], **header: int) -> Frame:
        self.stream.publish(array, **header)
        return self.next()


@pytest.fixture
def reader(stream: Stream) -> Reader:
    return Reader(stream)


def overwrite(stream: Stream, frame: Frame) -> None:
    """Use the frame's slot again."""
    stream.write(np.zeros(frame.shape or (1,), frame.dtype), seq=frame.seq + NSLOTS)


# --- what a frame tells


def test_a_frame_tells_what_it_is(stream: Stream, reader: Reader) -> None:
    """Shape, dtype, order, length, whose it is and when it was captured."""
    frame = reader.publish(MATRIX, timestamp_ns=12, meta_version=3)
    assert (frame.shape, frame.dtype, frame.order, frame.nbytes) == ((4, 6), np.dtype("<i4"), "C", 96)
    assert frame.wire_dtype is Dtype.INT32
    assert (frame.stream_id, frame.epoch, frame.seq) == (STREAM, stream.epoch, 0)
    assert (frame.timestamp_ns, frame.publish_timestamp_ns, frame.meta_version) == (12, None, 3)
    assert (frame.trace_id, frame.dropped_before) == (0, 0)
    assert repr(frame) == f"<Frame 0 of stream {STREAM}, epoch {stream.epoch}: INT32 4x6>"


@pytest.mark.parametrize("stamp", [0, 2**64 - 1])
def test_a_frame_without_a_time_has_no_age(reader: Reader, stamp: int) -> None:
    """B26: 0 and all ones are no time."""
    frame = reader.publish(MATRIX, timestamp_ns=stamp)
    assert (frame.timestamp_ns, frame.age_ns) == (None, None)


def test_the_age_is_by_the_monotonic_clock(reader: Reader) -> None:
    """And it grows."""
    before = monotonic_ns()
    frame = reader.publish(MATRIX, timestamp_ns=before - 1_000)
    first, second = frame.age_ns, frame.age_ns
    assert first is not None
    assert second is not None
    assert 1_000 <= first <= second <= monotonic_ns() - before + 1_000


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_dtype_in_either_order_is_shown_as_it_was(reader: Reader, dtype: str, order: Any) -> None:
    """Without a copy, in the producer's order."""
    array = np.asarray(np.arange(24).reshape(2, 3, 4) % 2, dtype, order=order)
    frame = reader.publish(array)
    assert frame.array.dtype == array.dtype
    assert frame.array.strides == array.strides
    assert frame.order == order
    np.testing.assert_array_equal(frame.array, array)
    np.testing.assert_array_equal(frame.copy(), array)


def test_eight_dimensions_are_the_most(reader: Reader) -> None:
    """And a column is both orders at once: it shows as C."""
    array = np.arange(2**8, dtype=np.uint8).reshape((2,) * MAX_DIMS)
    frame = reader.publish(array)
    assert frame.shape == (2,) * MAX_DIMS
    np.testing.assert_array_equal(frame.array, array)
    assert reader.publish(np.zeros((5, 1), np.uint8)).order == "C"


@pytest.mark.spec("WIRE-8.2-27")
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 2)])
def test_an_empty_frame_is_an_empty_array(reader: Reader, shape: tuple[int, ...]) -> None:
    """Of its shape as far as the frame tells."""
    frame = reader.publish(np.empty(shape, np.float32))
    assert (frame.array.size, frame.nbytes, frame.shape) == (0, 0, shape)
    assert frame.copy().size == 0
    assert frame.is_intact()
    with frame as entered:
        assert entered is frame


def test_bits_are_shown_as_their_packed_bytes(stream: Stream, reader: Reader) -> None:
    """With the shape of the bits."""
    layout = layout_for((3, 5), Dtype.BIT)
    place = stream.writer.begin(0, layout)
    assert place is not None
    np.ndarray((2,), np.uint8, place[0], place[1])[:] = (0xA5, 0x7F)
    stream.writer.commit()
    stream.describe(0)
    frame = reader.next()
    assert (frame.wire_dtype, frame.shape, frame.nbytes) == (Dtype.BIT, (3, 5), 2)
    assert list(frame.array) == list(frame.copy()) == [0xA5, 0x7F]


@pytest.mark.spec("WIRE-8.2-27")
def test_a_shape_without_payload_shows_nothing_of_an_earlier_frame(stream: Stream, reader: Reader) -> None:
    """B14: legal, and what lies in the slot is not this frame's; also when the frame before looked the same."""
    first = reader.publish(MATRIX)
    assert first.array.size == 24  # a view of this slot, this layout, was made
    second = stream.write(MATRIX, seq=NSLOTS)
    stream.poke(0, VALUES_LEN, struct.pack("<I", 0))
    stream.describe(second)
    frame = reader.next()
    assert (frame.seq, frame.nbytes) == (NSLOTS, 0)
    assert frame.array.size == 0
    assert frame.copy().size == 0


def test_a_payload_longer_than_its_shape_shows_the_shape(stream: Stream, reader: Reader) -> None:
    """B14: trailing bytes are allowed, and neither shown nor copied."""
    seq = stream.write(MATRIX)
    stream.poke(seq, VALUES_LEN, struct.pack("<I", 200))
    stream.describe(seq)
    frame = reader.next()
    assert frame.nbytes == 200
    np.testing.assert_array_equal(frame.array, MATRIX)
    np.testing.assert_array_equal(frame.copy(), MATRIX)
    out = np.empty_like(MATRIX)
    np.testing.assert_array_equal(frame.copy_into(out), MATRIX)


# --- views


def test_a_view_cannot_be_written(reader: Reader) -> None:
    """Not by any of its ways, and not by asking to."""
    view = reader.publish(MATRIX).array
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1
    with pytest.raises(ValueError, match=r"writeable|WRITEABLE"):
        view.flags.writeable = True
    with pytest.raises(ValueError, match="read-only"):
        np.copyto(view, 0)
    with pytest.raises((TypeError, BufferError, ValueError)):
        memoryview(view)[0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        view.reshape(-1)[:] = 0


def test_views_are_of_the_same_memory_and_objects_of_their_own(reader: Reader) -> None:
    """A caller that reshapes its view does not reshape another's."""
    frame = reader.publish(MATRIX)
    views = [frame.array for _ in range(3)]
    assert all(np.shares_memory(view, views[0]) for view in views)
    for view in views:
        with warnings.catch_warnings(action="ignore"):  # numpy will stop people from doing this
            view.shape = (24,)
        assert frame.array.shape == (4, 6)


def test_a_view_follows_the_slot(stream: Stream, reader: Reader) -> None:
    """It is no copy: what the producer writes there shows, and the frame says that it is no longer whole."""
    frame = reader.publish(MATRIX)
    view = frame.array
    assert frame.is_intact()
    stream.write(MATRIX + 100, seq=NSLOTS)
    assert view[0, 0] == 100
    assert not frame.is_intact()


def test_frames_of_the_same_slot_and_other_layouts_are_shown_each_as_it_is(stream: Stream, reader: Reader) -> None:
    """The views that are kept per slot do not mix them up."""
    arrays: list[np.ndarray[Any, Any]] = [
        MATRIX,
        MATRIX.reshape(2, 12),
        MATRIX.astype(np.float32),
        np.asfortranarray(MATRIX),
        MATRIX.astype(np.float64),  # in the same pool
        np.arange(1000, dtype=np.int32),  # in another
        MATRIX,
    ]
    for lap, array in enumerate(arrays):
        stream.describe(stream.write(array, seq=lap * NSLOTS))
        frame = reader.next()
        assert (frame.array.shape, frame.array.dtype, frame.array.strides) == (array.shape, array.dtype, array.strides)
        np.testing.assert_array_equal(frame.array, array)


def test_the_same_layout_in_another_pool_is_shown_from_there(stream: Stream, reader: Reader) -> None:
    """A producer may take a larger one than it needs."""
    first = reader.publish(MATRIX)
    np.testing.assert_array_equal(first.array, MATRIX)
    again = stream.write(MATRIX, seq=NSLOTS)
    with stream.paths[2].open("r+b") as file:
        file.seek(64)
        file.write((MATRIX + 7).tobytes())
    stream.poke(0, POOL_ID, struct.pack("<H", 2))
    stream.describe(again)
    np.testing.assert_array_equal(reader.next().array, MATRIX + 7)


def test_a_view_outlives_frame_reader_mapping_and_files(stream: Stream, reader: Reader) -> None:
    """It keeps its pool mapped; when it goes, so does the memory."""
    view = reader.publish(MATRIX).array
    part = view[1:3, ::2]
    epoch: MappedEpoch | None = reader.mapped
    files = [path for path in mapped_files(stream.folder) if "POOL" in path]
    assert files
    del epoch, view
    reader.__dict__.clear()
    stream.writer = None  # type: ignore[assignment]
    for path in stream.paths:
        path.unlink()
    gc.collect()
    np.testing.assert_array_equal(part, MATRIX[1:3, ::2])
    assert len(mapped_files(stream.folder)) == 1
    del part
    gc.collect()
    assert mapped_files(stream.folder) == []


def test_is_intact_still_works_when_only_the_frame_is_left(stream: Stream, reader: Reader) -> None:
    """A frame keeps the ring as well as the pool."""
    frame = reader.publish(MATRIX)
    reader.__dict__.clear()
    gc.collect()
    assert frame.is_intact()
    np.testing.assert_array_equal(frame.copy(), MATRIX)
    overwrite(stream, frame)
    assert not frame.is_intact()


# --- copies


def test_a_copy_is_ours(stream: Stream, reader: Reader) -> None:
    """Writable, contiguous, of the frame's order, and it stays what it was."""
    for array in (MATRIX, np.asfortranarray(MATRIX)):
        frame = reader.publish(array)
        copy = frame.copy()
        assert copy.flags.writeable
        assert copy.flags.owndata
        assert copy.strides == array.strides
        assert not np.shares_memory(copy, frame.array)
        overwrite(stream, frame)
        np.testing.assert_array_equal(copy, MATRIX)


OUTS: dict[str, Any] = {
    "C": lambda: np.empty((4, 6), np.int32),
    "F": lambda: np.empty((4, 6), np.int32, order="F"),
    "every other row": lambda: np.empty((8, 6), np.int32)[::2],
    "every other column": lambda: np.empty((4, 12), np.int32)[:, ::2],
    "backwards": lambda: np.empty((4, 6), np.int32)[::-1, ::-1],
    "transposed": lambda: np.empty((6, 4), np.int32).T,
    "unaligned": lambda: np.frombuffer(bytearray(97), np.uint8)[1:].view(np.int32).reshape(4, 6),
    "a field of records": lambda: np.empty((4, 6), np.dtype([("a", "i4"), ("b", "u1")]))["a"],
    "inside something larger": lambda: np.empty((9, 9), np.int32)[2:6, 1:7],
}


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("make", OUTS.values(), ids=OUTS.keys())
def test_a_frame_is_copied_into_every_array_of_its_shape(reader: Reader, make: Any, order: Any) -> None:
    """Whatever the strides of either; nothing around it is touched."""
    frame = reader.publish(np.asarray(MATRIX, order=order))
    out = make()
    base = out if out.base is None else out.base
    around = base.copy() if isinstance(base, np.ndarray) else None
    assert frame.copy_into(out) is out
    np.testing.assert_array_equal(out, MATRIX)
    if around is not None and base.dtype == out.dtype and base.size > out.size:
        untouched = np.ones(base.shape, bool)
        view = np.lib.array_utils.byte_bounds(out)[0] - np.lib.array_utils.byte_bounds(base)[0]
        mask = np.ndarray(
            out.shape,
            bool,
            untouched,
            view // base.itemsize,
            tuple(stride // base.itemsize for stride in out.strides),
        )
        mask[...] = False
        np.testing.assert_array_equal(base[untouched], around[untouched])


@pytest.mark.parametrize(
    "out",
    [np.empty((6, 4), np.int32), np.empty(24, np.int32), np.empty((4, 6), np.uint32), np.empty((4, 6), ">i4")],
    ids=["shape", "dims", "dtype", "byte order"],
)
def test_an_array_that_does_not_fit_is_refused(reader: Reader, out: np.ndarray[Any, Any]) -> None:
    """Nothing is converted and nothing broadcast."""
    with pytest.raises(LocalProtocolError, match="out is"):
        reader.publish(MATRIX).copy_into(out)


@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_that_may_not_be_written_is_refused(reader: Reader, order: Any) -> None:
    """By either way of copying, and it is not written."""
    out = np.zeros((4, 6), np.int32, order=order)
    out.flags.writeable = False
    with pytest.raises((ValueError, BufferError, TypeError)):
        reader.publish(MATRIX).copy_into(out)
    assert not out.any()


def entered(frame: Frame) -> None:
    with frame:
        pass


USES: dict[str, Callable[[Frame], object]] = {
    "copy": Frame.copy,
    "copy_into": lambda frame: frame.copy_into(np.empty((4, 6), np.int32)),
    "copy_into strided": lambda frame: frame.copy_into(np.empty((6, 4), np.int32).T),
    "array": lambda frame: np.array(frame),
    "another dtype": lambda frame: np.asarray(frame, np.float64),
    "with": entered,
}


@pytest.mark.spec("WIRE-8.3-17")
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_what_was_overwritten_is_never_taken_for_whole(
    stream: Stream, reader: Reader, use: Callable[[Frame], object]
) -> None:
    """The error says which frame and what to do."""
    frame = reader.publish(MATRIX)
    overwrite(stream, frame)
    with pytest.raises(FrameOverwritten) as caught:
        use(frame)
    assert (caught.value.stream_id, caught.value.epoch, caught.value.seq) == (STREAM, stream.epoch, 0)
    assert "more slots" in str(caught.value)


@pytest.mark.parametrize("lap", [1, 2, 5])
@pytest.mark.parametrize("state", ["in progress", "committed"])
def test_a_slot_that_was_used_again_is_not_intact(stream: Stream, reader: Reader, lap: int, state: str) -> None:
    """From the moment that its next frame is begun."""
    frame = reader.publish(MATRIX)
    seq = frame.seq + lap * NSLOTS
    if state == "committed":
        stream.write(MATRIX, seq=seq)
    else:
        stream.begin(seq)
    assert not frame.is_intact()


def test_other_slots_do_not_concern_it(stream: Stream, reader: Reader) -> None:
    """The ring may go on for all but one."""
    frame = reader.publish(MATRIX)
    for _ in range(NSLOTS - 1):
        stream.write(MATRIX)
    assert frame.is_intact()
    stream.write(MATRIX)
    assert not frame.is_intact()


def test_an_exception_inside_with_is_not_hidden(stream: Stream, reader: Reader) -> None:
    """The user's own error comes first."""
    frame = reader.publish(MATRIX)
    overwrite(stream, frame)
    with pytest.raises(KeyError), frame:
        raise KeyError


# --- protocols


def test_numpy_sees_a_frame_as_an_array(reader: Reader) -> None:
    """asarray without a copy, array with one, and arithmetic at once."""
    frame = reader.publish(MATRIX)
    seen = np.asarray(frame)
    assert np.shares_memory(seen, frame.array)
    assert not seen.flags.writeable
    copied = np.array(frame)
    assert not np.shares_memory(copied, frame.array)
    assert copied.flags.writeable
    np.testing.assert_array_equal(np.add(frame, 1), MATRIX + 1)
    assert np.mean(frame) == MATRIX.mean()


def test_another_dtype_is_a_copy_or_refused(reader: Reader) -> None:
    """numpy's copy=False means it."""
    frame = reader.publish(MATRIX)
    converted = np.asarray(frame, np.float64)
    assert converted.dtype == np.float64
    np.testing.assert_array_equal(converted, MATRIX)
    assert np.shares_memory(np.asarray(frame, np.int32), frame.array)
    assert np.shares_memory(np.array(frame, copy=False), frame.array)
    with pytest.raises(ValueError, match="without a copy"):
        np.array(frame, np.float64, copy=False)


def test_dlpack_shares_the_memory_read_only(reader: Reader) -> None:
    """For those who know DLPack 1.0's flag; it outlives the frame."""
    frame = reader.publish(MATRIX)
    assert frame.__dlpack_device__() == (1, 0)
    shared = np.from_dlpack(frame)
    assert np.shares_memory(shared, frame.array)
    assert not shared.flags.writeable
    del frame
    reader.__dict__.clear()
    gc.collect()
    np.testing.assert_array_equal(shared, MATRIX)


class OldImporter:
    """One that calls `__dlpack__` as it was before DLPack 1.0."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def __dlpack__(self, **options: Any) -> Any:
        return self._frame.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._frame.__dlpack_device__()


def test_dlpack_gives_a_copy_to_those_who_do_not_know_the_flag(stream: Stream, reader: Reader) -> None:
    """They could write: they get a whole copy, or a refusal; for one that wants no copy the error says what to do."""
    frame = reader.publish(MATRIX)
    taken = np.from_dlpack(OldImporter(frame))
    assert not np.shares_memory(taken, frame.array)
    np.testing.assert_array_equal(taken, MATRIX)
    with pytest.raises(BufferError, match=r"frame\.copy\(\)"):
        frame.__dlpack__(copy=False)
    own = np.from_dlpack(frame, copy=True)
    assert own.flags.writeable
    assert not np.shares_memory(own, frame.array)
    overwrite(stream, frame)
    with pytest.raises(FrameOverwritten):
        frame.__dlpack__()


# --- the mapped epoch


def test_a_mapped_epoch_knows_whose_it_is(stream: Stream) -> None:
    """Stream, epoch, and its pools in the reader's order."""
    mapped = stream.mapped()
    assert (mapped.stream_id, mapped.epoch) == (STREAM, stream.epoch)
    assert len(mapped.pools) == 2
    assert mapped.reader.read(0) is DropReason.NOT_COMMITTED
