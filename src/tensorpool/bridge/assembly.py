# SPDX-License-Identifier: Apache-2.0
"""Which source epoch a receiver accepts, and which metadata belong to it: decided by what was forwarded.

Holds no clock and does no IO. Frames themselves are put together by `tensorpool._core.Assembler`.

    unknown ──announce──► epoch E ──announce of a higher one──► epoch E' (remap boundary)
                             ├─────announce of E──► the same, with its latest pools
                             └─────announce of a lower one──► ignored, until the higher one has been silent for long

A chunk of an epoch above E ends E as well, although its pools are not known yet: what is older than the highest epoch
that was seen is not published any more. Bridge §6, §7.2, §8; decisions G5, G16, G17.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import Final

import msgspec

from tensorpool.bridge.tables import TableMessage, Tables
from tensorpool.wire.control import DataSourceAnnounce, DataSourceMeta

SILENT_PERIODS: Final = 3  # G17

type Described = DataSourceAnnounce | DataSourceMeta


class SourcePool(msgspec.Struct, frozen=True):
    """A payload pool of the source, as announced."""

    pool_id: int
    stride_bytes: int


class Verdict(Enum):
    """What an announce changes."""

    ADOPTED = auto()  # another epoch than before
    REFRESHED = auto()  # the same epoch; its pools may have changed
    STALE = auto()  # of an epoch that is over


class SourceEpoch:
    """The source of one mapping.

    >>> source = SourceEpoch(announce_period_ns=10**9)
    >>> source.on_announce(3, [SourcePool(1, 4096)], now_ns=0)
    <Verdict.ADOPTED: 1>
    >>> source.on_announce(2, [SourcePool(1, 4096)], now_ns=10**9)
    <Verdict.STALE: 3>
    >>> source.on_announce(2, [SourcePool(1, 4096)], now_ns=4 * 10**9)
    <Verdict.ADOPTED: 1>
    """

    def __init__(self, announce_period_ns: int) -> None:
        self._silence_ns = SILENT_PERIODS * announce_period_ns
        self.epoch: int | None = None
        self.pools: tuple[SourcePool, ...] = ()
        self._newest = 0
        self._chunk_ns = 0

    @property
    def largest_stride_bytes(self) -> int:
        return max((pool.stride_bytes for pool in self.pools), default=0)

    def on_chunks(self, newest_epoch: int, chunk_ns: int) -> None:
        """The highest epoch of a chunk, and when the last chunk of it arrived."""
        if self.epoch is None or newest_epoch < self._newest:
            return
        is_later = newest_epoch > self._newest or chunk_ns > self._chunk_ns
        self._newest = newest_epoch
        if is_later:
            self._chunk_ns = max(chunk_ns, self._chunk_ns)

    def on_announce(self, epoch: int, pools: Iterable[SourcePool], now_ns: int) -> Verdict:
        """A forwarded announce of the source stream."""
        if self.epoch is not None and epoch < self._newest and now_ns - self._chunk_ns < self._silence_ns:
            return Verdict.STALE
        is_same = epoch == self.epoch
        self.epoch = self._newest = epoch
        self.pools = tuple(pools)
        self._chunk_ns = now_ns
        return Verdict.REFRESHED if is_same else Verdict.ADOPTED


class SourceMetadata:
    """The last name and metadata of the source, and its tables, for consumers that come later.

    A DataSourceAnnounce names the epoch of what follows it (K4); metadata without one are of the epoch at that time.
    """

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._kept: dict[type[Described], Described] = {}
        self.tables: Final = Tables[TableMessage]()

    def take(self, message: Described, source_epoch: int | None) -> bool:
        """Keep what there is one of; whether it is about the source's present epoch and may be published now."""
        if isinstance(message, DataSourceAnnounce) and message.epoch != self._epoch:
            self._epoch = message.epoch
            self._forget()
        self._kept[type(message)] = message
        return self.is_of(source_epoch)

    def on_epoch(self, source_epoch: int) -> list[Described]:
        """The source goes on in another epoch: what is known about that one already, in the order to publish it."""
        if self._epoch is None:
            self._forget()
        return self.again(source_epoch)

    def again(self, source_epoch: int | None) -> list[Described]:
        """For readers who have none of it: what to publish before the tables, all of which are due."""
        self.tables.post()
        kinds = (DataSourceAnnounce, DataSourceMeta)
        return [self._kept[kind] for kind in kinds if kind in self._kept] if self.is_of(source_epoch) else []

    def is_of(self, source_epoch: int | None) -> bool:
        """Whether what is kept is about this epoch."""
        return self._epoch is None or source_epoch is None or self._epoch == source_epoch

    def _forget(self) -> None:
        self._kept.clear()
        self.tables.clear()
