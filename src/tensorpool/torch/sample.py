# SPDX-License-Identifier: Apache-2.0
"""A frame as training takes it: the same for a recorded and for a live one, so that one `transform` serves both."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from tensorpool.client.metadata import Metadata
from tensorpool.shm.arrays import Array

if TYPE_CHECKING:
    from tensorpool.client.frame import Frame
    from tensorpool.lake.recording import RecordedFrame


class Sample(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """What a `transform` gets. `array` is yours: whole, writable, and shared with nothing."""

    array: Array
    stream_id: int
    epoch: int
    seq: int
    time: datetime | None  # UTC
    timestamp_ns: int | None
    meta_version: int
    trace_id: int | None
    dropped_before: int
    _find_metadata: Callable[[], Metadata | None]

    @property
    def metadata(self) -> Metadata | None:
        """What is known about frames of its meta_version; None where nothing is."""
        return self._find_metadata()


def sample_of(frame: Frame | RecordedFrame, array: Array, find_metadata: Callable[[], Metadata | None]) -> Sample:
    return Sample(
        array=array,
        stream_id=frame.stream_id,
        epoch=frame.epoch,
        seq=frame.seq,
        time=frame.time,
        timestamp_ns=frame.timestamp_ns,
        meta_version=frame.meta_version,
        trace_id=frame.trace_id,
        dropped_before=frame.dropped_before,
        _find_metadata=find_metadata,
    )
