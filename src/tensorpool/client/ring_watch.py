# SPDX-License-Identifier: Apache-2.0
"""Following a stream's rings without receiving its frames: for planners, recorders and tools.

Holds a consumer's lease like any other, but listens to no descriptors: what the rings hold is asked of the rings.
Driver Model §4.1; decision E41.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from tensorpool._core import SlotFrame
from tensorpool.client.consumer_session import ConsumerSession
from tensorpool.client.mapped_epoch import MappedEpoch
from tensorpool.client.metadata import MetadataCache
from tensorpool.client.session import State
from tensorpool.shm.announced import Regions

KEPT_EPOCHS: Final = 4  # with frames, whose memory lasts as long
KEPT_IN_ALL: Final = 16
SCAN_EVERY_NS: Final = 20_000_000  # while nothing new follows the newest frame that we know


class WatchedEpoch:
    """One epoch of a stream, as far as we saw it."""

    def __init__(self, regions: Regions, mapped: MappedEpoch) -> None:
        self.regions: Final = regions
        self.mapped: Final = mapped
        self._newest: int | None = None  # as far as we looked
        self._scan_ns = 0  # when all slots are looked at again

    @property
    def epoch(self) -> int:
        return self.regions.epoch

    @property
    def end(self) -> int:
        """The seq after the newest committed frame. Looks at every slot."""
        self._newest = self.mapped.reader.newest()
        self._scan_ns = time.monotonic_ns() + SCAN_EVERY_NS
        return 0 if self._newest is None else self._newest + 1

    def recent_end(self) -> int:
        """The same for those who ask again and again: searches forward from the newest frame of the last call.

        In a ring of many slots that takes a hundredth of the time. A producer that skips seqs is noticed later, within
        `SCAN_EVERY_NS`.
        """
        newest = self._newest
        found = None if newest is None else self.mapped.reader.newest(newest)
        if found is None or (found == newest and time.monotonic_ns() >= self._scan_ns):
            return self.end
        self._newest = found
        return found + 1

    @property
    def first(self) -> int:
        """The oldest seq that the ring may still hold."""
        return max(0, self.end - self.mapped.reader.nslots)

    def frame_bytes(self) -> int:
        """Of the newest frame; 0 where there is none."""
        newest = self.mapped.reader.newest(self._newest)
        slot = None if newest is None else self.mapped.reader.read(newest)
        return slot.values_len_bytes if isinstance(slot, SlotFrame) else 0


class RingWatch:
    """A stream's recent epochs. Made by `Client.watch`.

    >>> with client.watch("camera/front") as watch:            # doctest: +SKIP
    ...     print(watch.epochs[-1].end)
    """

    def __init__(self, session: ConsumerSession, close: Callable[[ConsumerSession], None]) -> None:
        self._session = session
        self._close = close
        self._seen: deque[WatchedEpoch] = deque(maxlen=KEPT_IN_ALL)
        session.on_epoch = self._on_epoch

    @property
    def stream_id(self) -> int:
        return self._session.stream_id

    @property
    def metadata(self) -> MetadataCache:
        """What producers say about the stream's frames."""
        return self._session.metadata

    @property
    def state(self) -> State:
        return self._session.state

    @property
    def epochs(self) -> list[WatchedEpoch]:
        """The epochs that were mapped lately, the current one last. Earlier ones may have lost their names."""
        return list(self._seen)

    @property
    def is_current(self) -> bool:
        """Whether the last of `epochs` is the one that is written now."""
        return self._session.state is State.ACTIVE

    def close(self) -> None:
        """Give the lease back."""
        self._close(self._session)
        self._seen.clear()

    def _on_epoch(self, regions: Regions, mapped: MappedEpoch) -> None:
        """An epoch that is mapped again replaces its earlier self; empty ones take no memory and are kept longer."""
        kept = [known for known in self._seen if known.epoch != regions.epoch]
        full = [known for known in kept if known.end > 0]
        for known in full[: max(0, len(full) - KEPT_EPOCHS + 1)]:
            kept.remove(known)
        self._seen = deque([*kept, WatchedEpoch(regions, mapped)], maxlen=KEPT_IN_ALL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
