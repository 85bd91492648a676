# SPDX-License-Identifier: Apache-2.0
"""Data source names: which stream a name belongs to, learnt from the announces of producers.

Soft state: a name that was not announced for three periods is forgotten. Holds no clock and does no IO.
Wire §10.3.1; decisions A13, F5, F14.
"""

from __future__ import annotations

import zlib
from typing import Final

import msgspec

from tensorpool.settings import Range
from tensorpool.soft_state import SoftStateTable
from tensorpool.wire.control import DataSourceAnnounce

FRESH_PERIODS: Final = 3
MAX_NAME_BYTES: Final = 256
MAX_NAMES: Final = 100_000
MAX_NAME_CHARS: Final = 1024


class Source(msgspec.Struct, frozen=True):
    """What a producer announces about itself."""

    stream_id: int
    name: str
    producer_id: int
    epoch: int


class Names:
    """The data sources that were announced lately."""

    def __init__(self, announce_period_ns: int) -> None:
        self._sources = SoftStateTable[int, Source](FRESH_PERIODS * announce_period_ns, limit=MAX_NAMES)

    def on_announce(self, announce: DataSourceAnnounce, now_ns: int) -> None:
        if not announce.name or len(announce.name) > MAX_NAME_CHARS:
            return
        self._sources.tick(now_ns)
        source = Source(announce.stream_id, announce.name, announce.producer_id, announce.epoch)
        self._sources.add(announce.stream_id, source, now_ns)

    def find(self, name: str, now_ns: int) -> list[Source]:
        """Every live stream of that name; more than one is ambiguous."""
        self._sources.tick(now_ns)
        return [source for source in self._sources.values() if source.name == name]

    def owner(self, stream_id: int, now_ns: int) -> str | None:
        """The name of a stream, if its producer announced one lately."""
        source = self._sources.get_fresh(stream_id, now_ns)
        return source.name if source is not None else None


def preferred_id(name: str, ids: Range) -> int:
    """Where a new stream of this name goes: the same id after every restart, so that its consumers find it again."""
    return ids.first + zlib.crc32(name.encode("utf-8", "surrogateescape")) % len(ids) if len(ids) else 0
