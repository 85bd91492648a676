# SPDX-License-Identifier: Apache-2.0
"""A slot of the ring that a producer fills in place, and the reports of how far it is.

Wire §8.3, §10.2.2, §15.18; decisions B4, B23-B26.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from tensorpool._core import DropReason, TensorLayout, monotonic_ns
from tensorpool.client.arguments import whole_number
from tensorpool.client.mapped_epoch import EpochWriter
from tensorpool.errors import LocalProtocolError
from tensorpool.shm.arrays import Array, Order, numpy_dtype, view_of
from tensorpool.shm.carried_dtypes import CarriedDtype
from tensorpool.wire.control import Dtype, MajorOrder, ProgressUnit
from tensorpool.wire.trace import Parent

if TYPE_CHECKING:
    from tensorpool.client.producer import Producer

type ProgressAxis = Literal["rows", "columns"]


class Slot:
    """A frame being written in place. Leaving the `with` block commits it, an exception gives it up.

    `array` is writable until then, read-only afterwards; views that you made of it stay writable, so do not keep them.
    `seq` is None where the frame is going to be dropped; `trace_id` is 0 where it has none.
    """

    def __init__(
        self,
        producer: Producer,
        writer: EpochWriter | None,
        layout: TensorLayout,
        timestamp_ns: int | None,
        meta_version: int,
        trace_id: int,
        links: tuple[Parent, ...],
        progress: ProgressAxis | None,
        seq: int | None,
        carried: CarriedDtype | None,
    ) -> None:
        self._producer = producer
        self._writer = writer
        self._layout = layout
        self._timestamp_ns = timestamp_ns
        self._meta_version = meta_version
        self.trace_id = trace_id
        self._links = links
        self._axis = progress
        self._is_open = True
        self._drop: DropReason | None = None
        self.seq: int | None = None
        place = None
        if writer is None:
            self._drop = DropReason.DETACHED
        else:
            number = writer.ring_writer.next_seq if seq is None else seq
            stamp_ns = monotonic_ns() if timestamp_ns is None else timestamp_ns
            writer.check_time(stamp_ns)
            place = writer.ring_writer.begin(number, layout, stamp_ns, meta_version, header_first=progress is not None)
            if place is None:
                raise producer._too_large(writer, layout.extent_bytes)
            self.seq = number
        if place is not None:
            self.array: Array = view_of(place[0], place[1], layout, writable=True)
        else:
            self.array = _scratch(layout)
        if carried is not None:
            self.array = carried.restore(self.array)
        if progress is not None and self.seq is not None and writer is not None:
            ids = producer.stream_id, writer.epoch, self.seq
            producer._session.progress.start(*ids, layout.progress_stride_bytes, producer._session.consumers.fan_out)

    def progress(self, *, rows: int | None = None, columns: int | None = None, bytes_filled: int | None = None) -> None:
        """Tell consumers how far the frame is: so many complete rows (columns), or bytes.

        Cheap where no consumer asked. What comes too soon after the last update is sent later, the newest only.
        """
        if not self._is_open:
            raise LocalProtocolError("the slot is committed or given up")
        named = {"rows": rows, "columns": columns, "bytes_filled": bytes_filled}
        highest = self._layout.extent_bytes
        given = [whole_number(name, value, highest) for name, value in named.items() if value is not None]
        if self._axis is None or len(given) != 1:
            raise LocalProtocolError(
                "claim(progress='rows' or 'columns'), then give one of rows, columns, bytes_filled"
            )
        if (rows is not None and self._axis != "rows") or (columns is not None and self._axis != "columns"):
            raise LocalProtocolError(f"this frame is claimed with progress={self._axis!r}")
        layout = self._layout
        filled = given[0]
        if bytes_filled is None:
            # The last row may end before its padding does.
            is_whole = given[0] == layout.shape[0 if self._axis == "rows" else 1]
            filled = layout.extent_bytes if is_whole else given[0] * layout.progress_stride_bytes
        if not 0 <= filled <= layout.extent_bytes:
            raise LocalProtocolError(f"{filled} bytes are filled, the frame has {layout.extent_bytes}")
        session = self._producer._session
        try:
            if self.seq is not None and session.progress.update(filled, session.consumers.fan_out):
                session.conductor.wake()
        except ValueError as error:
            raise LocalProtocolError(str(error)) from None

    def commit(self) -> int | None:
        """Publish; the seq, or None: dropped and counted."""
        if not self._is_open:
            raise LocalProtocolError("the slot is committed or given up already")
        self._close()
        producer, writer = self._producer, self._writer
        if self._drop is None and writer is not None and not producer._is_current(writer):
            self._forget_progress()
            writer.ring_writer.abandon()
            self._drop = DropReason.DETACHED  # the lease went while the frame was being written
            self.seq = None
        if self._drop is not None or writer is None or self.seq is None:
            producer._dropped[self._drop or DropReason.DETACHED] += 1
            return None
        writer.commit(self._timestamp_ns, self._meta_version, self.trace_id, self._layout.extent_bytes)
        fan_out = producer._session.consumers.fan_out
        if self._axis is not None:
            producer._session.progress.complete(self._layout.extent_bytes, fan_out)
        if fan_out.descriptors or self._links:
            producer._tell_others(writer, self.seq, self._meta_version, self.trace_id, self._links)
        return self.seq

    def abandon(self) -> None:
        """Give it up: consumers do not see the frame. Its seq is used again, unless its progress was reported."""
        if not self._is_open:
            return
        self._close()
        if self._drop is None and self._writer is not None:
            is_known = self._forget_progress()
            self._writer.ring_writer.abandon(is_known=is_known)
            if is_known:
                self._producer._dropped[DropReason.ABANDONED] += 1
        self.seq = None

    def __repr__(self) -> str:
        phase = "being filled" if self._is_open else "given up or dropped" if self.seq is None else "published"
        about = f"{self.array.dtype} {'x'.join(map(str, self.array.shape))}"
        stream = self._producer._session.stream_label
        return f"<Slot {'-' if self.seq is None else self.seq} of {stream}: {about}, {phase}>"

    def _close(self) -> None:
        self._is_open = False
        self.array.flags.writeable = False

    def _forget_progress(self) -> bool:
        """Whether consumers know of the frame, which is not going to be committed."""
        return self._axis is not None and self._producer._session.progress.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abandon()
        elif self._is_open:
            self.commit()


def with_progress(layout: TensorLayout, axis: ProgressAxis, strides: tuple[int, ...] | None) -> TensorLayout:
    """B23: rows are dimension 0, columns dimension 1."""
    index = {"rows": 0, "columns": 1}.get(axis)
    if index is None:
        raise LocalProtocolError(f"progress = {axis!r}: expected 'rows' or 'columns'")
    unit = ProgressUnit.ROWS if axis == "rows" else ProgressUnit.COLUMNS
    try:
        stride = layout.byte_strides[index]
        return TensorLayout(layout.dtype, layout.major_order, layout.shape, strides or (), unit, stride)
    except (IndexError, ValueError) as error:
        raise LocalProtocolError(f"progress = {axis!r} of shape {layout.shape}: {error}") from None


def _scratch(layout: TensorLayout) -> Array:
    if layout.dtype == Dtype.BIT:
        return np.empty((layout.extent_bytes,), np.uint8)
    order: Order = "F" if layout.major_order == MajorOrder.COLUMN else "C"
    return np.empty(layout.shape, numpy_dtype(layout.dtype), order)
