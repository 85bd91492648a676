# SPDX-License-Identifier: Apache-2.0
"""What a consumer receives: a read-only view of shared memory that knows whether it is still whole.

A view keeps its mapping alive: it may outlive the frame, the consumer, the epoch and the lease. What it cannot do is
keep the producer from using the slot again, which `is_intact` tells. Wire §8.3, §15.18; decisions B3, B26.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from tensorpool._core import FrameBase, monotonic_ns
from tensorpool.client.mapped_epoch import MappedEpoch
from tensorpool.client.wall_clock import ClockPair, utc_ns
from tensorpool.errors import FrameOverwritten, LocalProtocolError
from tensorpool.shm.arrays import Array, Order, numpy_dtype
from tensorpool.wire.control import Dtype, MajorOrder

if TYPE_CHECKING:
    from tensorpool.looks.card import Card

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
NO_TIMESTAMP: Final = 2**64 - 1


class Frame(FrameBase):
    """A frame as it stood when it was received.

    >>> for frame in consumer:                                 # doctest: +SKIP
    ...     show(frame.array, frame.seq, frame.age_ns)         # a view: valid until the ring comes round
    ...     kept = frame.copy()                                # yours; raises FrameOverwritten if it was too late

    `with frame:` raises FrameOverwritten on leaving if the view tore meanwhile.
    """

    __slots__ = ()
    _mapped: MappedEpoch

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor; for BIT frames that of the bits."""
        carried, shape = self._mapped.carried(self._slot), self._slot.layout.shape
        return shape if carried is None else carried.shape_of(shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of `array`."""
        carried = self._mapped.carried(self._slot)
        return numpy_dtype(self._slot.layout.dtype) if carried is None else carried.dtype

    @property
    def numpy_dtype(self) -> str:
        """The name of the dtype that was published; bfloat16 shows as uint16 where ml_dtypes is not installed."""
        carried = self._mapped.carried(self._slot)
        return self.dtype.name if carried is None else carried.name

    @property
    def wire_dtype(self) -> Dtype:
        """As the wire calls it: tells BYTES and BIT from UINT8."""
        return Dtype(self._slot.layout.dtype)

    @property
    def order(self) -> Order:
        """C, or F where columns come first."""
        return "F" if self._slot.layout.major_order == MajorOrder.COLUMN else "C"

    @property
    def stream_id(self) -> int:
        """Which stream it is of."""
        return self._mapped.stream_id

    @property
    def epoch(self) -> int:
        """Which run of its producer it is of; seqs count within it."""
        return self._mapped.epoch

    @property
    def timestamp_ns(self) -> int | None:
        """When the payload was captured, by the producer's monotonic clock unless it says otherwise."""
        stamp = self._slot.timestamp_ns
        return None if stamp in (0, NO_TIMESTAMP) else stamp

    @property
    def time(self) -> datetime | None:
        """When the payload was captured, in UTC; None where the producer's clock is not known.

        As good as the wall clock of the producer's host when the epoch began: later steps of that clock change nothing.
        """
        utc = self._utc_ns
        return None if utc is None else EPOCH + timedelta(microseconds=utc // 1000)

    @property
    def _utc_ns(self) -> int | None:
        stamp = self.timestamp_ns
        now = ClockPair(monotonic_ns(), time.time_ns())
        return None if stamp is None else utc_ns(stamp, self._mapped.clock, now)

    @property
    def publish_timestamp_ns(self) -> int | None:
        """When the producer sent its descriptor; most producers leave it out."""
        return self._slot.publish_timestamp_ns

    @property
    def age_ns(self) -> int | None:
        """How long ago it was captured; None where the producer gave no time."""
        stamp = self.timestamp_ns
        return None if stamp is None else monotonic_ns() - stamp

    def copy(self) -> Array:
        """A copy that is yours, verified. Raises FrameOverwritten when the slot was used again meanwhile."""
        return self.copy_into(np.empty_like(self.array))

    def copy_into(self, out: Array) -> Array:
        """Copy into an array of the same shape and dtype, verified; returns it.

        Raises FrameOverwritten, and LocalProtocolError for an array that does not fit.
        """
        is_whole = self._copy_like(out)
        if is_whole is None:
            view = self.array
            if out.shape != view.shape or out.dtype != view.dtype:
                raise LocalProtocolError(f"out is {out.dtype} {out.shape}, the frame {view.dtype} {view.shape}")
            np.copyto(out, view)
            is_whole = self.is_intact()
        if not is_whole:
            raise self._overwritten()
        return out

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> Array:
        if copy is True or (dtype is not None and np.dtype(dtype) != self.dtype):
            if copy is False:
                raise ValueError(f"a frame of {self.dtype} cannot be shown as {dtype} without a copy")
            return self.copy().astype(dtype or self.dtype, copy=False)
        return self.array

    def __dlpack__(
        self, *, max_version: tuple[int, int] | None = None, copy: bool | None = None, **options: Any
    ) -> Any:
        """For torch.from_dlpack and jax: read-only, without a copy, for importers that know DLPack 1.0's flag.

        Older ones could write to the view: they get a verified copy, or BufferError where they want none.
        """
        is_flagged = max_version is not None and max_version[0] >= 1
        if copy is False and not is_flagged:
            raise BufferError(
                "a frame is read-only, which this importer does not know (it asks for no DLPack 1.0); "
                "let it copy, import frame.copy(), or use a newer version of it"
            )
        if copy or not is_flagged:
            return self.copy().__dlpack__(max_version=max_version, **options)
        return self.array.__dlpack__(max_version=max_version, copy=copy, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self.is_intact():
            raise self._overwritten()

    def __repr__(self) -> str:
        shape = "x".join(map(str, self._slot.layout.shape))
        return f"<Frame {self.seq} of stream {self.stream_id}, epoch {self.epoch}: {self.wire_dtype.name} {shape}>"

    def _repr_png_(self) -> bytes | None:
        """For notebooks: a picture of it; None where there can be none, or Pillow is not installed."""
        return self._card().png

    def _repr_html_(self) -> str:
        """For notebooks: what it is, above a picture of it."""
        return self._card().html

    def _card(self) -> Card:
        from tensorpool.looks.card import card

        mapped = self._mapped
        metadata = mapped.find_metadata(self.meta_version) if self.meta_version else None
        made = card(self, mapped.stream_label, None if metadata is None else metadata.attributes)
        return made if self.is_intact() else made.without_picture("it was overwritten; show consumer.latest()")

    def _overwritten(self) -> FrameOverwritten:
        return FrameOverwritten(self.stream_id, self.epoch, self.seq)
