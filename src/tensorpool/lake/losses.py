# SPDX-License-Identifier: Apache-2.0
"""What is said of lost frames: a line when a stream begins to lose them, a sum now and then, a line when it is over.

Holds no clock: callers pass the time, also when nothing was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from tensorpool.errors import TensorPoolError
from tensorpool.lake.offsets import Loss
from tensorpool.logs import Logger

SUM_EVERY_S: Final = 10.0
OVER_AFTER_S: Final = 10.0  # without a loss


class DataLoss(TensorPoolError):
    """Frames that the query was to read are gone: `failOnDataLoss` is set."""


class _Losing(msgspec.Struct):
    """A stream that loses frames."""

    said_s: float
    last_s: float
    ranges: int = 0
    frames: int = 0
    unsaid: int = 0  # ranges


class LossLog:
    """Of the streams of one process."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._losing: dict[int, _Losing] = {}

    def note(self, losses: Sequence[Loss], now_s: float) -> None:
        """Tell what was lost since the last time; nothing is worth a call too."""
        for loss in losses:
            state = self._losing.get(loss.stream_id)
            if state is None:
                own = sum(other.stream_id == loss.stream_id for other in losses)
                more = f" and {own - 1} more ranges" if own > 1 else ""
                self._log.warning("data_loss", loss=f"{loss}{more}")
                state = self._losing[loss.stream_id] = _Losing(now_s, now_s, unsaid=-own)
            state.last_s = now_s
            state.ranges += 1
            state.unsaid += 1
            state.frames += loss.frames or 0
        for stream_id, state in list(self._losing.items()):
            so_far = {"stream_id": stream_id, "frames": state.frames, "ranges": state.ranges}
            if now_s - state.last_s >= OVER_AFTER_S:
                self._log.warning("data_loss_over", **so_far)
                del self._losing[stream_id]
            elif state.unsaid and now_s - state.said_s >= SUM_EVERY_S:
                self._log.warning("data_loss_goes_on", **so_far)
                state.said_s, state.unsaid = now_s, 0


def refuse(losses: Sequence[Loss], *, is_fatal: bool) -> None:
    """Raises DataLoss where something is lost of a query that must lose nothing."""
    data = [loss for loss in losses if loss.is_data]
    if data and is_fatal:
        more = f" and {len(data) - 1} more ranges" if len(data) > 1 else ""
        raise DataLoss(f"{data[0]}{more}; set failOnDataLoss to false to count and go on")
