# SPDX-License-Identifier: Apache-2.0
"""Streams read together: tuples of frames with the same seq, of the same time, or the newest of each.

Frames are views of their rings while they wait for partners. One whose ring is about to come round is copied, so that
a slow partner costs memory, not frames. Every frame that is not joined is counted with a reason.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final, Literal, Self

import msgspec

from tensorpool import _core
from tensorpool.client.arguments import seconds, whole_number
from tensorpool.client.consumer import Consumer
from tensorpool.client.frame import Frame
from tensorpool.client.join_barrier import KeyBarrier, LatestBarrier, Unjoined
from tensorpool.client.session import State
from tensorpool.errors import FrameOverwritten, LocalProtocolError
from tensorpool.shm.arrays import Array, Order
from tensorpool.wire.control import Dtype

MAX_WAITING: Final = 256  # frames of one stream
MOST_REPLACED: Final = 64  # frames of each stream, by newer ones, before the next tuple
SLICE_S: Final = 0.1
NS: Final = 1_000_000_000

type By = Literal["seq", "time", "latest"]


class FrameCopy(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A frame with memory of its own, where its ring has no room for it any more."""

    array: Array
    stream_id: int
    epoch: int
    seq: int
    time: datetime | None
    timestamp_ns: int | None
    meta_version: int
    trace_id: int
    wire_dtype: Dtype
    order: Order
    dropped_before: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def is_intact(self) -> bool:
        """Always."""
        return True

    def copy(self) -> Array:
        return self.array.copy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        import numpy as np

        return np.array(self.array, dtype, copy=copy)


type Joinable = Frame | FrameCopy


class JoinStats(msgspec.Struct, frozen=True):
    """Of every input: received = joined + unjoined + waiting. With by="latest" a frame is joined at least once."""

    joined: int  # tuples
    received: tuple[int, ...]
    unjoined: tuple[dict[Unjoined, int], ...]
    waiting: tuple[int, ...]
    copied: int


class Join:
    """The frames of several consumers that belong together. Made by `tensorpool.join`; one thread at a time uses it."""

    def __init__(
        self,
        consumers: Iterable[Consumer],
        by: By,
        tolerance: float | None,
        timeout: float | None,
        offsets: Sequence[float],
    ) -> None:
        self._consumers: Final = list(consumers)
        count = len(self._consumers)
        if count < 2 or not all(isinstance(one, Consumer) for one in self._consumers):
            raise LocalProtocolError("join: expected two consumers or more")
        if len({id(one) for one in self._consumers}) < count:
            raise LocalProtocolError("join: expected each consumer once")
        if offsets and len(offsets) != count:
            raise LocalProtocolError(f"offsets = {offsets!r}: expected one for each of the {count} consumers")
        if by not in ("seq", "time", "latest"):
            raise LocalProtocolError(f"by = {by!r}: expected 'seq', 'time' or 'latest'")
        if (tolerance is not None) != (by == "time"):
            raise LocalProtocolError(f"tolerance = {tolerance!r}: expected seconds with by='time', and None otherwise")
        if by == "latest" and (offsets or timeout is not None):
            raise LocalProtocolError("by = 'latest' waits for nothing: it takes neither offsets nor a timeout")
        self._by: Final = by
        scale = NS if by == "time" else 1
        timeout_ns = None if timeout is None else round(seconds("timeout", timeout) * NS)
        self._barrier: KeyBarrier[Joinable] | LatestBarrier[Joinable]
        if by == "latest":
            self._barrier = LatestBarrier(count)
        else:
            for offset in offsets if by == "seq" else ():
                whole_number("offsets", abs(int(offset)), 2**62)
            self._barrier = KeyBarrier(
                count,
                tolerance=0 if tolerance is None else round(seconds("tolerance", tolerance) * NS),
                offsets=[round(offset * scale) for offset in offsets],
                timeout_ns=timeout_ns,
                limits=[MAX_WAITING] * count,
            )
        self._epochs: list[int | None] = [None] * count
        self._newest: list[int] = [0] * count
        self._received = [0] * count
        self._unjoined: list[Counter[Unjoined]] = [Counter() for _ in self._consumers]
        self._joined = self._copied = 0

    @property
    def stats(self) -> JoinStats:
        """What became of the frames so far. What consumers lost before is in their own `stats`."""
        self._count_left()
        unjoined = tuple(dict(counts) for counts in self._unjoined)
        waiting = self._barrier.waiting
        return JoinStats(self._joined, tuple(self._received), unjoined, tuple(waiting), self._copied)

    def poll(self, timeout: float | None = 0.0) -> tuple[Joinable, ...] | None:
        """The next tuple, waiting up to `timeout` seconds (None: as long as it takes); None when there is none.

        Views in it are intact when it is returned; as of every frame, ask `is_intact` after reading, or copy.
        """
        deadline_s = None if timeout is None else time.monotonic() + seconds("timeout", timeout)
        while (found := self.take()) is None:
            is_open = self._open()
            if not is_open:
                return None
            self._keep_whole()
            left_s = SLICE_S if deadline_s is None else min(SLICE_S, deadline_s - time.monotonic())
            ready = _core.wait_any(is_open, max(0, int(self.wait_at_most(left_s) * NS)))
            self._accept(ready, is_open)
            if not ready:
                for consumer in is_open:
                    consumer._housekeeping()
                if left_s <= 0:
                    return self.take()
        return found

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Joinable, ...]:
        found = self.poll(None)
        if found is None:
            raise StopIteration
        return found

    # --- inside

    def receive(self) -> bool:
        """Take what the consumers have; whether one of them may have more."""
        is_open = self._open()
        ready = _core.wait_any(is_open, 0) if is_open else []
        self._accept(ready, is_open)
        self._keep_whole()
        return bool(ready)

    def _open(self) -> list[Consumer]:
        return [one for one in self._consumers if one.state is not State.CLOSED]

    def _accept(self, ready: list[Consumer], is_open: list[Consumer]) -> None:
        """Take a frame of each consumer that has one: a poll that finds nothing costs more than to ask before.

        With by="latest" all that there are: older ones are replaced.
        """
        for _ in range(MOST_REPLACED if self._by == "latest" else 1):
            for consumer in ready:
                frame = consumer.poll()
                if frame is not None:
                    self._offer(self._consumers.index(consumer), frame)
            if self._by != "latest" or not (ready := _core.wait_any(is_open, 0)):
                break
        self._barrier.expire(time.monotonic_ns())

    def _offer(self, index: int, frame: Frame) -> None:
        self._received[index] += 1
        if frame.epoch != self._epochs[index]:
            if self._by == "seq" and self._epochs[index] is not None:
                self._barrier.restart(index)
            self._epochs[index] = frame.epoch
        self._newest[index] = frame.seq
        key: int | None = frame.seq
        if self._by == "time":
            key = frame._utc_ns
        if key is None:
            self._unjoined[index][Unjoined.NO_TIME] += 1
            return
        self._barrier.offer(index, key, frame, time.monotonic_ns())

    def _keep_whole(self) -> None:
        """Copy frames that have waited for half of their ring, or whose epoch has ended."""
        if self._by != "latest" and not any(self._barrier.waiting):
            return
        for index, consumer in enumerate(self._consumers):
            items = self._barrier.items(index)
            if not items:
                continue
            mapped = consumer._reader.mapped
            nslots = 0 if mapped is None else mapped.reader.nslots
            for frame in items:
                if not isinstance(frame, Frame):
                    continue
                is_safe = frame.epoch == self._epochs[index] and self._newest[index] - frame.seq < nslots // 2
                if is_safe:
                    break
                self._barrier.replace(index, frame, self._kept(frame))

    def _kept(self, frame: Frame) -> Joinable | None:
        try:
            array = frame.copy()
        except FrameOverwritten:
            return None
        self._copied += 1
        array.flags.writeable = False
        return FrameCopy(
            array=array,
            stream_id=frame.stream_id,
            epoch=frame.epoch,
            seq=frame.seq,
            time=frame.time,
            timestamp_ns=frame.timestamp_ns,
            meta_version=frame.meta_version,
            trace_id=frame.trace_id,
            wire_dtype=frame.wire_dtype,
            order=frame.order,
            dropped_before=frame.dropped_before,
        )

    def take(self) -> tuple[Joinable, ...] | None:
        """The next tuple of what was received; None where there is none."""
        is_new = self._barrier.waiting if self._by == "latest" else None  # frames that were not in a tuple before
        while (found := self._barrier.take()) is not None:
            torn = [not frame.is_intact() for frame in found]
            if not any(torn):
                self._joined += 1
                return found
            for index, is_torn in enumerate(torn):
                if is_new is None or is_new[index]:
                    self._unjoined[index][Unjoined.OVERWRITTEN if is_torn else Unjoined.NO_PARTNER] += 1
        self._count_left()
        return None

    def _count_left(self) -> None:
        left, self._barrier.left = self._barrier.left, []
        for one in left:
            self._unjoined[one.input_index][one.why] += 1

    def wait_at_most(self, timeout_s: float) -> float:
        """The time for which there is nothing to do without a frame, and at most that."""
        expiry_ns = self._barrier.next_expiry_ns()
        return timeout_s if expiry_ns is None else min(timeout_s, max(0.0, (expiry_ns - time.monotonic_ns()) / NS))


def join(
    consumers: Iterable[Consumer],
    *,
    by: By,
    tolerance: float | None = None,
    timeout: float | None = None,
    offsets: Sequence[float] = (),
) -> Join:
    """Read several streams together: an iterator over tuples of frames, one of each consumer.

    >>> for left, right in tp.join([left_eye, right_eye], by="seq"):                        # doctest: +SKIP
    ...     depth(left.array, right.array)
    >>> for image, motion in tp.join([camera, imu], by="time", tolerance=0.005):            # doctest: +SKIP
    ...     ...

    `by="seq"` joins frames of equal seqs; `by="time"` frames that were taken within `tolerance` seconds of each other,
    in UTC (half of the shortest frame interval is a good tolerance), oldest first; `by="latest"` every frame of the
    first consumer with the newest of the others. `offsets` are added to the seqs, or in seconds to the times, of each
    consumer. A frame waits for its partners at most `timeout` seconds.
    """
    return Join(consumers, by, tolerance, timeout, offsets)
