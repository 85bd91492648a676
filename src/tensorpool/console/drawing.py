# SPDX-License-Identifier: Apache-2.0
"""Frames and looks: a picture with the fields of its header, values of pixels, whole files.

A frame that is still in the ring may be overwritten while it is drawn: then the picture is not used.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self

import msgspec
import numpy as np

from tensorpool import pixel_formats
from tensorpool._core import monotonic_ns
from tensorpool.client.frame import Frame
from tensorpool.client.metadata import Metadata
from tensorpool.console.messages import PixelQuery, ProfileQuery
from tensorpool.console.viewer import FrameKey, Wish
from tensorpool.looks import Look, encode, histogram, look_at, pixel, pixels_of, profile
from tensorpool.looks.look import MAX_PIXELS
from tensorpool.shm.arrays import Array

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MS: Final = 1_000_000


class Drawable(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A frame to look at: live in its ring, a copy of it, or of a recording."""

    stream_id: int
    epoch: int
    seq: int
    time_ns: int | None  # since 1970, UTC
    timestamp_ns: int | None  # by this host's monotonic clock; None where that is not known
    latency_ms: float | None  # its age when the console got it
    pixel_format: str | None
    array: Array
    is_intact: Callable[[], bool] = lambda: True

    @property
    def key(self) -> FrameKey:
        return self.epoch, self.seq

    @classmethod
    def live(cls, frame: Frame, metadata: Metadata | None) -> Self:
        """As it is in the ring now."""
        age_ns = frame.age_ns
        return cls(
            stream_id=frame.stream_id,
            epoch=frame.epoch,
            seq=frame.seq,
            time_ns=ns_since_1970(frame.time),
            timestamp_ns=frame.timestamp_ns,
            latency_ms=None if age_ns is None else round(age_ns / MS, 3),
            pixel_format=pixel_formats.stated(None if metadata is None else metadata.attributes),
            array=pixels_of(frame),
            is_intact=frame.is_intact,
        )

    def copied(self) -> Self | None:
        """With an array of its own; None where the frame was overwritten meanwhile."""
        array = self.array.copy(order="K")
        return msgspec.structs.replace(self, array=array, is_intact=lambda: True) if self.is_intact() else None

    def header(self) -> dict[str, Any]:
        """What a page gets to know about the frame."""
        stamp_ns = self.timestamp_ns
        return {
            "stream_id": self.stream_id,
            "epoch": self.epoch,
            "seq": self.seq,
            "time": self.time_ns,
            "shape": self.array.shape,
            "dtype": self.array.dtype.name,
            "age_ms": None if stamp_ns is None else round((monotonic_ns() - stamp_ns) / MS, 3),
            "latency_ms": self.latency_ms,
        }


class Drawn(msgspec.Struct, frozen=True, eq=False):
    """A picture, encoded, and the fields of its header that do not depend on the page."""

    fields: dict[str, Any]
    body: bytes


def draw(frame: Drawable, wish: Wish) -> Drawn:
    """Raises NotShown for what cannot be shown in this way."""
    look = wish.look
    picture = look_at(frame.array, look, frame.pixel_format)
    media, body = encode(picture, look.lossless)
    counts = histogram(frame.array, look, frame.pixel_format) if wish.has_histogram else None
    fields = {
        "media": media,
        "low": picture.low,
        "high": picture.high,
        "step": picture.step,
        "size": picture.size,
        "axes": picture.axes,
        "region": picture.region,
        "histogram": None if counts is None else msgspec.structs.asdict(counts),
    }
    return Drawn(fields, body)


def answer(frame: Drawable, look: Look, query: PixelQuery | ProfileQuery) -> dict[str, Any]:
    """A pixel's value, or the values along a line. Raises NotShown."""
    if isinstance(query, PixelQuery):
        value = pixel(frame.array, look, query.x, query.y, frame.pixel_format)
        return {"type": "pixel", "x": query.x, "y": query.y, "seq": frame.seq, "value": value}
    ends = query.x0, query.y0, query.x1, query.y1
    return {"type": "profile", "seq": frame.seq, "values": profile(frame.array, look, ends, frame.pixel_format)}


def npy(array: Array) -> bytes:
    """As a file of numpy."""
    file = io.BytesIO()
    np.save(file, np.asarray(array), allow_pickle=False)
    return file.getvalue()


def png(frame: Drawable, look: Look) -> bytes:
    """As large as the frame, up to 4096 pixels a side. Raises NotShown."""
    whole = msgspec.structs.replace(look, width=MAX_PIXELS, height=MAX_PIXELS, lossless=True)
    return draw(frame, Wish(whole)).body


def ns_since_1970(moment: datetime | None) -> int | None:
    return None if moment is None else (moment - EPOCH) // timedelta(microseconds=1) * 1000
