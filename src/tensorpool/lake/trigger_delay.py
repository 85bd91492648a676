# SPDX-License-Identifier: Apache-2.0
"""Larger batches for queries that would otherwise start one for every frame. Holds no clock and does no IO."""

from __future__ import annotations

from typing import Final

MAX_DELAY_S: Final = 1.0  # unless another is given: rings are short


class TriggerDelay:
    """Holds a batch back until enough frames wait for it, or the first of them has waited long enough."""

    def __init__(self, min_frames: int | None, max_delay_s: float | None) -> None:
        self._min_frames = min_frames or 0
        self._max_delay_s = MAX_DELAY_S if max_delay_s is None else max_delay_s
        self._since_s: float | None = None  # when frames were first seen to wait

    def is_due(self, waiting: int, now_s: float) -> bool:
        """Whether a batch may begin now; then the next one is held back anew."""
        if waiting == 0:
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now_s
        if waiting < self._min_frames and now_s - self._since_s < self._max_delay_s:
            return False
        self._since_s = None
        return True
