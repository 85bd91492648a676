# SPDX-License-Identifier: Apache-2.0
"""Data source names: which stream a name belongs to, learnt from what producers announce about themselves.

Soft state: a name that was not announced for three periods is forgotten. Holds no clock and does no IO.
Wire §10.3.1; decisions A13, F5, F14.
"""

from __future__ import annotations

import zlib
from typing import Final

import msgspec

from tensorpool.config import Range
from tensorpool.wire.control import DataSourceAnnounce

FRESH_PERIODS: Final = 3
MAX_NAME_BYTES: Final = 256
MAX_NAMES: Final = 100_000
MAX_NAME_CHARS: Final = 1024


class Source(msgspec.Struct, frozen=True):
    """A producer's word about itself."""

    stream_id: int
    name: str
    producer_id: int
    epoch: int
    heard_ns: int


class Names:
    """The data sources that were heard lately."""

    def __init__(self, announce_period_ns: int) -> None:
        self._window_ns = FRESH_PERIODS * announce_period_ns
        self._sources: dict[int, Source] = {}
        self._forget_ns = 0

    def on_announce(self, announce: DataSourceAnnounce, now_ns: int) -> None:
        if not announce.name or len(announce.name) > MAX_NAME_CHARS:
            return
        if len(self._sources) >= MAX_NAMES and now_ns >= self._forget_ns:
            self._forget_ns = now_ns + self._window_ns
            self._forget(now_ns)
        if announce.stream_id in self._sources or len(self._sources) < MAX_NAMES:
            self._sources[announce.stream_id] = Source(
                announce.stream_id, announce.name, announce.producer_id, announce.epoch, now_ns
            )

    def find(self, name: str, now_ns: int) -> list[Source]:
        """Every live stream of that name; more than one is ambiguous."""
        self._forget(now_ns)
        return [source for source in self._sources.values() if source.name == name]

    def owner(self, stream_id: int, now_ns: int) -> str | None:
        """The name that a stream goes by, if a producer lives there."""
        self._forget(now_ns)
        source = self._sources.get(stream_id)
        return source.name if source is not None else None

    def _forget(self, now_ns: int) -> None:
        stale = [key for key, source in self._sources.items() if now_ns - source.heard_ns > self._window_ns]
        for stream_id in stale:
            del self._sources[stream_id]


def preferred_id(name: str, ids: Range) -> int:
    """Where a new stream of this name goes: the same id after every restart, so that its consumers find it again."""
    return ids.first + zlib.crc32(name.encode("utf-8", "surrogateescape")) % len(ids) if len(ids) else 0
