# SPDX-License-Identifier: Apache-2.0
"""Rows of frames as numpy arrays: views of Arrow's own buffers, with dtype, shape and order applied.

Needs neither Spark nor a JVM. BIT shows as its packed bytes, BYTES as uint8, a frame without payload as an empty array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from tensorpool.errors import ConfigError, FrameOverwritten
from tensorpool.lake.ring_reader import ReferencedFrame, payload_of, referenced
from tensorpool.shm.arrays import Array, numpy_dtype
from tensorpool.wire.control import Dtype

DTYPES: Final = {member.name: member for member in Dtype if member}
WANTED: Final = ("seq", "dtype", "shape", "order", "nbytes", "payload")


def dtype_named(name: str) -> Dtype:
    """Raises ConfigError for what is no dtype of a frame."""
    try:
        return DTYPES[name]
    except KeyError:
        raise ConfigError("column dtype", name, f"one of {', '.join(DTYPES)}") from None


def nbytes_of(dtype: Dtype, shape: Sequence[int]) -> int:
    """Of a whole payload."""
    count = math.prod(shape)
    return -(-count // 8) if dtype is Dtype.BIT else count * numpy_dtype(dtype).itemsize


def array_of(payload: Any, dtype: str, shape: Sequence[int], order: str = "C") -> Array:
    """A view of a payload as the tensor that it is. Raises ConfigError where the two do not fit.

    >>> array_of(b"\\1\\2\\3\\4", "UINT8", [2, 2]).tolist()
    [[1, 2], [3, 4]]
    """
    wire = dtype_named(dtype)
    kind = numpy_dtype(wire)
    flat: Array = np.frombuffer(payload, np.uint8) if len(payload) else np.empty(0, np.uint8)
    if not flat.nbytes and math.prod(shape) > 0:
        return np.empty(0, kind)
    if flat.nbytes != nbytes_of(wire, shape):
        raise ConfigError("column payload", f"{flat.nbytes} bytes", f"{nbytes_of(wire, shape)} for {dtype} {[*shape]}")
    if order not in ("C", "F"):
        raise ConfigError("column order", order, "C or F")
    if wire is Dtype.BIT:
        return flat
    return flat.view(kind).reshape(tuple(shape), order="F" if order == "F" else "C")


def arrays_of(batch: pa.RecordBatch) -> Iterator[Array | None]:
    """The frames of a batch, in its order, as read-only views of its buffers.

    Rows of `payload=reference` are fetched from shared memory; None is a frame that was overwritten by then. Raises
    ConfigError where a column or a payload is missing.
    """
    payloads = payloads_of(batch)
    names, shapes, orders = (batch.column(name).to_pylist() for name in ("dtype", "shape", "order"))
    for payload, name, shape, order in zip(payloads, names, shapes, orders, strict=True):
        yield None if payload is None else array_of(payload, name, shape, order)


def payloads_of(batch: pa.RecordBatch) -> Iterator[Array | None]:
    """The bytes of each row's payload, without a copy where the row holds them; None: overwritten by now."""
    return (
        piece if isinstance(piece, np.ndarray) else _fetched(piece, size, seq) for piece, size, seq in _pieces(batch)
    )


def over_payloads[T](batch: pa.RecordBatch, function: Callable[[int, Array], T]) -> list[T | None]:
    """`function` of every row's number and the bytes of its payload; None: overwritten before the function was done.

    The bytes of a row with a reference are a view of shared memory, not a copy: they last while the function runs, and
    what it returns must not refer to them.
    """
    found: list[T | None] = []
    for index, (piece, size, seq) in enumerate(_pieces(batch)):
        if isinstance(piece, np.ndarray):
            found.append(function(index, piece))
            continue
        frame = referenced(piece, seq)
        found.append(None if frame is None or frame.nbytes != size else _of_view(frame, index, function))
    return found


def _of_view[T](frame: ReferencedFrame, index: int, function: Callable[[int, Array], T]) -> T | None:
    try:
        value = function(index, frame.array.ravel(order="K").view(np.uint8))
    except Exception:
        if frame.is_intact():
            raise
        return None  # it has seen what no producer wrote
    return value if frame.is_intact() else None


def _pieces(batch: pa.RecordBatch) -> Iterator[tuple[Array | bytes, int, int]]:
    """What the rows hold, with nbytes and seq: an array is the payload, bytes are a reference to it."""
    missing = [name for name in WANTED if name not in batch.schema.names]
    if missing:
        raise ConfigError("columns", batch.schema.names, f"the columns of frames; {', '.join(missing)} are missing")
    column, sizes = batch.column("payload"), batch.column("nbytes").to_pylist()
    if column.null_count:
        if any(is_null and size for is_null, size in zip(column.is_null().to_pylist(), sizes, strict=True)):
            raise ConfigError("column payload", None, "payloads; read the frames with option payload=inline")
        column = column.fill_null(b"")
    if not pa.types.is_large_binary(column.type) and not pa.types.is_binary(column.type):
        column = column.cast(pa.binary())
    return _slices(column, sizes, batch)


def _slices(column: pa.Array, sizes: list[int], batch: pa.RecordBatch) -> Iterator[tuple[Array | bytes, int, int]]:
    if not len(column):
        return
    width = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, width)[column.offset : column.offset + len(column) + 1].tolist()
    whole: Array = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    whole.flags.writeable = False
    seqs = batch.column("seq").to_pylist()
    for lo, hi, size, seq in zip(ends[:-1], ends[1:], sizes, seqs, strict=True):
        piece = whole[lo:hi]
        yield (piece if hi - lo == size else piece.tobytes()), size, seq


def _fetched(reference: bytes, nbytes: int, seq: int) -> Array | None:
    found = payload_of(reference, nbytes, seq)
    return None if found is None else np.frombuffer(found, np.uint8)


def frames_to_numpy(rows: Any) -> list[Array]:
    """Frames as arrays: of collected rows, of dicts, or of an Arrow table or batch.

    >>> images = frames_to_numpy(frames.limit(10).collect())          # doctest: +SKIP
    >>> images = frames_to_numpy(frames.limit(10).toArrow())          # doctest: +SKIP  the same, without a copy

    Raises ConfigError for what holds no frames, and FrameOverwritten for a reference to a frame that is gone.
    """
    if isinstance(rows, pa.Table):
        return [array for batch in rows.to_batches() for array in _all_of(batch)]
    if isinstance(rows, pa.RecordBatch):
        return list(_all_of(rows))
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes | Mapping):
        raise ConfigError("rows", type(rows).__name__, "rows of frames: df.collect(), df.toArrow() or dicts")
    return [_of_row(row, number) for number, row in enumerate(rows)]


def _all_of(batch: pa.RecordBatch) -> Iterator[Array]:
    for index, array in enumerate(arrays_of(batch)):
        if array is None:
            raise FrameOverwritten(*(batch.column(name)[index].as_py() for name in ("stream_id", "epoch", "seq")))
        yield array


def _of_row(row: Any, number: int) -> Array:
    fields: dict[str, Any] = row if isinstance(row, dict) else getattr(row, "asDict", dict)()
    missing = [name for name in ("dtype", "shape", "payload") if name not in fields]
    if missing:
        raise ConfigError(f"row {number}", sorted(fields), f"the columns of frames; {', '.join(missing)} are missing")
    payload, nbytes = fields["payload"], fields.get("nbytes")
    if payload is None and nbytes:
        raise ConfigError(f"row {number}: payload", None, "a payload; read the frames with option payload=inline")
    if nbytes is not None and "seq" in fields and len(payload or b"") != nbytes:
        payload = payload_of(payload, nbytes, fields["seq"])
        if payload is None:
            raise FrameOverwritten(fields.get("stream_id", 0), fields.get("epoch", 0), fields["seq"])
    return array_of(payload or b"", fields["dtype"], fields["shape"], fields.get("order") or "C")
