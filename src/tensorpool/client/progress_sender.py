# SPDX-License-Identifier: Apache-2.0
"""Sends FrameProgress for one producer: at once from the thread that fills a frame, later from the conductor.

Wire §10.2.2, §15.18.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tensorpool._core import monotonic_ns
from tensorpool.client.progress import ProgressThrottle
from tensorpool.errors import Closed, TransportError
from tensorpool.wire.control import FrameProgress, FrameProgressState

if TYPE_CHECKING:
    from tensorpool.client.producer_session import FanOut


class ProgressSender:
    """The frame that a producer is writing, as far as consumers know of it. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._throttle = ProgressThrottle()
        self._ids = (0, 0, 0)

    def start(self, stream_id: int, epoch: int, seq: int, unit_bytes: int, fan_out: FanOut) -> None:
        """A frame begins."""
        with self._lock:
            self._ids = stream_id, epoch, seq
            self._throttle.start(unit_bytes)
            self._send_due(fan_out)

    def update(self, filled_bytes: int, fan_out: FanOut) -> bool:
        """So much of it is written. True: it has to wait to be sent. Raises ValueError for less than before."""
        with self._lock:
            self._throttle.update(filled_bytes)
            self._send_due(fan_out)
            return fan_out.policy is not None and self._throttle.is_due(fan_out.policy)

    def flush(self, fan_out: FanOut) -> int:
        """Conductor: send what had to wait, if its time has come. Returns how much was sent."""
        with self._lock:
            return self._send_due(fan_out)

    def is_waiting(self, fan_out: FanOut) -> bool:
        """Whether something has to be sent as soon as it may."""
        return fan_out.policy is not None and self._throttle.is_due(fan_out.policy)

    def complete(self, filled_bytes: int, fan_out: FanOut) -> None:
        """The frame is committed (§15.18 step 8: not before)."""
        with self._lock:
            if self._throttle.end(is_committed=True):
                self._send(FrameProgressState.COMPLETE, filled_bytes, fan_out)

    def abandon(self) -> bool:
        """The frame is given up. Whether consumers know of it."""
        with self._lock:
            is_known = self._throttle.is_started
            self._throttle.end(is_committed=False)
            return is_known

    def _send_due(self, fan_out: FanOut) -> int:
        if fan_out.policy is None or not fan_out.progress:
            return 0
        state = self._throttle.take(fan_out.policy, monotonic_ns())
        if state is None:
            return 0
        self._send(state, self._throttle.filled_bytes, fan_out)
        return 1

    def _send(self, state: FrameProgressState, filled_bytes: int, fan_out: FanOut) -> None:
        stream_id, epoch, seq = self._ids
        message = FrameProgress(
            stream_id=stream_id, epoch=epoch, seq=seq, payload_bytes_filled=filled_bytes, state=state
        ).encode()
        for publication in fan_out.progress:
            try:
                publication.offer(message)
            except (Closed, TransportError):
                continue  # the conductor closed it, or notices by itself
