# SPDX-License-Identifier: Apache-2.0
"""Where the frames of an export come from: a stream of a lake, or a live one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Protocol

import numpy as np

from tensorpool import pixel_formats
from tensorpool.client import Consumer, Frame
from tensorpool.errors import FrameOverwritten
from tensorpool.exports.protocol import ExportFrame, Missing
from tensorpool.lake.recording import EPOCH, RecordedFrame, RecordedStream

DEFAULT_HZ: Final = 30.0
SLICE_S: Final = 0.1
LOST: Final = "LOST"
NOT_EXPORTED: Final = "NOT_EXPORTED"


class Frames(Protocol):
    """Frames by epoch and seq."""

    @property
    def is_live(self) -> bool:
        """Whether an interruption is the end of it."""

    @property
    def total(self) -> int | None:
        """None where it is not known."""

    @property
    def rate_hz(self) -> float: ...

    def after(self, position: tuple[int, int] | None) -> Iterator[ExportFrame | None]:
        """The frames behind a position; None now and then while it waits."""

    def missing(self) -> list[Missing]:
        """What is not among the frames so far, by epoch and seq."""


class LakeFrames:
    """A recorded stream, or a slice of one."""

    is_live: Final = False

    def __init__(self, stream: RecordedStream) -> None:
        self._stream = stream

    @property
    def total(self) -> int:
        return len(self._stream)

    @property
    def rate_hz(self) -> float:
        """By the times of the frames: their median distance."""
        times = self._stream.times
        steps = np.diff(times[~np.isnat(times)]).astype(np.int64)
        middle = float(np.median(steps[steps > 0])) if (steps > 0).any() else 0.0
        return round(1e6 / middle, 3) if middle else DEFAULT_HZ

    def after(self, position: tuple[int, int] | None) -> Iterator[ExportFrame | None]:
        for epoch in self._stream.epochs:
            if position is not None and epoch < position[0]:
                continue
            part = self._stream.epoch(epoch)
            if position is not None and epoch == position[0]:
                part = part[position[1] + 1 :]
            yield from map(_of_lake, part)

    def missing(self) -> list[Missing]:
        return [Missing(gap.epoch, gap.lo, gap.hi, gap.reason) for gap in self._stream.gaps()]


def _of_lake(frame: RecordedFrame) -> ExportFrame:
    attributes = None if frame.metadata is None else frame.metadata.attributes
    at_ns = None if frame.time is None else round((frame.time - EPOCH).total_seconds() * 1e6) * 1000
    return _export_frame(frame, frame.array, attributes, at_ns)


class LiveFrames:
    """What a consumer receives from now on. A frame that is overwritten before it is copied is missing."""

    is_live: Final = True
    total: Final = None

    def __init__(self, consumer: Consumer, known: list[Missing] | None = None) -> None:
        self._consumer = consumer
        self._missing = list(known or ())
        self._last: tuple[int, int] | None = None

    @property
    def rate_hz(self) -> float:
        metadata = self._consumer.metadata()
        rate = None if metadata is None else metadata.attributes.get("rate_hz")
        return float(rate) if isinstance(rate, int | float) and rate > 0 else DEFAULT_HZ

    def after(self, position: tuple[int, int] | None) -> Iterator[ExportFrame | None]:
        self._last = position
        is_first = True
        while True:
            frame = self._consumer.poll(SLICE_S)
            if frame is None:
                yield None
                continue
            if self._last is not None and frame.epoch == self._last[0] and frame.seq > self._last[1] + 1:
                reason = NOT_EXPORTED if is_first else LOST
                self._missing.append(Missing(frame.epoch, self._last[1] + 1, frame.seq, reason))
            is_first, self._last = False, (frame.epoch, frame.seq)
            try:
                array = frame.copy()
            except FrameOverwritten:
                self._missing.append(Missing(frame.epoch, frame.seq, frame.seq + 1, LOST))
                continue
            metadata = self._consumer.metadata(frame.meta_version, epoch=frame.epoch)
            at_ns = None if frame.time is None else round((frame.time - EPOCH).total_seconds() * 1e6) * 1000
            yield _export_frame(frame, array, None if metadata is None else metadata.attributes, at_ns)

    def missing(self) -> list[Missing]:
        return list(self._missing)


def _export_frame(frame: RecordedFrame | Frame, array: Any, attributes: Any, at_ns: int | None) -> ExportFrame:
    kind = pixel_formats.of(array.shape, array.dtype, pixel_formats.stated(attributes))
    return ExportFrame(frame.epoch, frame.seq, at_ns, frame.timestamp_ns, array, kind)
