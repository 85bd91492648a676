# SPDX-License-Identifier: Apache-2.0
"""The last ten minutes of every stream, one point in five seconds. Holds no clock and does no IO."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

POINT_NS: Final = 5_000_000_000
POINTS: Final = 120
MAX_STREAMS: Final = 1_000  # further ones have no history


class _Past:
    """Of one stream."""

    def __init__(self) -> None:
        self.points: deque[tuple[int, float | None, float | None, int]] = deque(maxlen=POINTS)
        self.drops = 0  # of its consumers, when the last point was made

    @property
    def columns(self) -> dict[str, list[Any]]:
        names = ("t", "rate", "bytes", "drops")
        return {name: [point[at] for point in self.points] for at, name in enumerate(names)}


class History:
    """Fed with the state once a second; keeps a point of each stream every five seconds."""

    def __init__(self) -> None:
        self._streams: dict[int, _Past] = {}
        self._due_ns = 0

    def add(self, view: Mapping[str, Any]) -> None:
        """A state, as the supervisor gives it: `t` of a point is its time of day."""
        now_ns = view["time_ns"]
        if self._due_ns - POINT_NS <= now_ns < self._due_ns:  # a wall clock that was set back begins anew
            return
        self._due_ns = now_ns + POINT_NS
        drops: dict[int, int] = {}
        for consumer in view["consumers"]:
            stream_id = consumer["stream_id"]
            drops[stream_id] = drops.get(stream_id, 0) + consumer["drops_gap"] + consumer["drops_late"]
        streams = {stream["stream_id"]: stream for stream in view["streams"]}
        self._streams = {stream_id: past for stream_id, past in self._streams.items() if stream_id in streams}
        for stream_id, stream in streams.items():
            past = self._streams.get(stream_id)
            if past is None:
                if len(self._streams) >= MAX_STREAMS:
                    continue
                past = self._streams[stream_id] = _Past()
                past.drops = drops.get(stream_id, 0)
            lost = drops.get(stream_id, 0)
            # A consumer that ended takes its count with it.
            point = now_ns, _short(stream["rate_hz"]), _short(stream["bytes_per_s"]), max(0, lost - past.drops)
            past.points.append(point)
            past.drops = lost

    def columns(self) -> dict[str, dict[str, list[Any]]]:
        """By stream id: times, rates, bytes a second, and frames that consumers lost since the point before."""
        return {str(stream_id): past.columns for stream_id, past in self._streams.items()}


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
