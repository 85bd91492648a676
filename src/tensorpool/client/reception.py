# SPDX-License-Identifier: Apache-2.0
"""Where the reading thread and the conductor meet: the mapped epoch, its descriptors, and the count of every frame.

The reading thread holds the lock while it polls and waits; the conductor only adds to `pending` and stops the feed, so
it never waits for a reader. Whoever has the lock next makes the change, the old epoch's losses counted.
Wire §15.4, §15.18, §15.21; decisions B27-B34.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

import msgspec

from tensorpool import aeron
from tensorpool._core import DropReason, Feed, is_gap, is_late
from tensorpool.channel import Endpoint
from tensorpool.client.frame import MappedEpoch
from tensorpool.errors import Closed, TransportError

STOPPED: Final = 1  # Feed.attention
NEWER_EPOCH: Final = 2
SEQ_WENT_BACK: Final = 4
IMAGE_LOST: Final = 8


class ConsumerStats(msgspec.Struct, frozen=True):
    """What became of the frames so far.

    For every epoch that was mapped, `received` + `lost` is what was produced in it: from the first descriptor that was
    seen on in the first epoch, from seq 0 on in every later one.
    """

    received: int
    drops: dict[DropReason, int]
    epoch: int | None
    last_seq_seen: int
    epochs: int
    duplicates: int
    descriptors_ignored: int  # of other epochs

    @property
    def lost(self) -> int:
        """The sum of all drops."""
        return sum(self.drops.values())

    @property
    def drops_gap(self) -> int:
        """As QosConsumer reports it."""
        return sum(count for reason, count in self.drops.items() if is_gap(reason))

    @property
    def drops_late(self) -> int:
        """As QosConsumer reports it."""
        return sum(count for reason, count in self.drops.items() if is_late(reason))


class _Book(msgspec.Struct, frozen=True):
    """The counts of epochs that are over, and the feeds that still count; replaced as a whole, so readable anywhere."""

    drops: dict[DropReason, int] = {}
    received: int = 0
    duplicates: int = 0
    ignored: int = 0
    epochs: int = 0
    current: Feed | None = None
    suspended: Feed | None = None

    def summed(self) -> _Book:
        """With what the feeds have counted so far."""
        drops = Counter(self.drops)
        received, duplicates, ignored = self.received, self.duplicates, self.ignored
        for feed in (self.current, self.suspended):
            if feed is not None:
                drops.update(feed.drops)
                received += feed.received
                duplicates += feed.duplicates
                ignored += feed.ignored
        return _Book(dict(drops), received, duplicates, ignored, self.epochs)


class Reception:
    """The state of reading one stream."""

    def __init__(self, max_outstanding_seq_gap: int | None) -> None:
        self.lock = threading.Lock()
        self.mapped_or_changed = threading.Condition()
        self.pending: deque[Callable[[], object]] = deque()
        self.current: tuple[Feed, aeron.Subscription, MappedEpoch] | None = None  # what poll needs, as one
        self.mapped: MappedEpoch | None = None
        self.feed: Feed | None = None
        self.descriptors: aeron.Subscription | None = None
        self.progress: aeron.Subscription | None = None
        self.is_closed = False
        self._max_gap = max_outstanding_seq_gap
        self._book = _Book()
        self._suspended: MappedEpoch | None = None
        self._next_seq: tuple[int, int | None] | None = None  # of the epoch that was settled last
        self._interval_ns = 0
        self._is_throttled = False
        self._forget_seqs = False
        self._progress_endpoint: Endpoint | None = None
        self._lost_carried = 0
        self._attention_carried = 0
        self._idle_mark = -1

    # --- from the conductor

    def adopt(self, mapped: MappedEpoch) -> None:
        """Go on with this epoch."""
        self._change(lambda: self._adopt(mapped))

    def suspend(self) -> None:
        """Deliver nothing more; what is lost is counted when the next epoch is there, or by `let_go`."""
        self._change(lambda: self._settle(None))  # unmaps

    def let_go(self) -> None:
        """The suspended epoch is not coming back: count what it lost and release it."""
        self._change(lambda: self._settle(None))

    def set_streams(self, descriptors: aeron.Subscription | None, progress: aeron.Subscription | None) -> None:
        """The streams of a new link, or none."""

        def change() -> None:
            self.descriptors, self.progress = descriptors, progress
            self._attention_carried = 0
            self._is_throttled = False
            self._progress_endpoint = None
            if self.feed is not None:
                self.feed.set_switching()
                self.feed.set_throttled(False)

        self._change(change)

    def switch(self, descriptors: aeron.Subscription, *, is_throttled: bool) -> None:
        """B34: take descriptors from another stream."""

        def change() -> None:
            old, self.descriptors = self.descriptors, descriptors
            self._is_throttled = is_throttled
            self.forget_attention(IMAGE_LOST)
            if self.feed is not None:
                self.feed.set_switching()
                self.feed.set_throttled(is_throttled)
            if old is not None:
                old.close()

        self._change(change)

    def switch_progress(self, endpoint: Endpoint, subscribe: Callable[[], aeron.Subscription]) -> None:
        """§5: FrameProgress comes on a stream of our own."""
        if endpoint == self._progress_endpoint:
            return
        self._progress_endpoint = endpoint
        subscription = subscribe()

        def change() -> None:
            old, self.progress = self.progress, subscription
            if old is not None:
                old.close()

        self._change(change)

    def set_rate(self, max_rate_hz: int) -> None:
        """Deliver at most so many frames a second; 0: all."""
        interval_ns = 1_000_000_000 // max_rate_hz if max_rate_hz else 0
        if interval_ns == self._interval_ns:
            return
        self._interval_ns = interval_ns

        def change() -> None:
            if self.feed is not None:
                self.feed.set_min_interval_ns(interval_ns)

        self._change(change)

    def forget_seqs(self) -> None:
        """B29: the epoch is mapped again, and nothing is known about its seqs."""
        self._forget_seqs = True

    def forget_attention(self, bits: int) -> None:
        self._attention_carried &= ~bits
        if self.feed is not None:
            self.feed.forget(bits)

    def close(self) -> None:
        """No more frames for anybody. What was counted stays."""
        self.is_closed = True
        self._change(lambda: self._settle(None, is_end=True))

    def apply_pending(self) -> None:
        """Make the changes that are due, unless the reading thread is at it."""
        if self.pending and self.lock.acquire(blocking=False):
            try:
                self.apply()
            finally:
                self.lock.release()

    @property
    def attention(self) -> int:
        feed = self.feed
        return self._attention_carried | (0 if feed is None else feed.attention)

    @property
    def image_count(self) -> int:
        descriptors = self.descriptors
        try:
            return 0 if descriptors is None else descriptors.image_count
        except (Closed, TransportError):
            return 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing was received since the last time somebody asked."""
        received = self._book.summed().received
        is_idle, self._idle_mark = received == self._idle_mark, received
        return is_idle

    # --- from anywhere

    @property
    def last_seq_seen(self) -> int:
        feed = self.feed
        return 0 if feed is None else feed.last_seq_seen or 0  # B31

    def stats(self) -> ConsumerStats:
        book = self._book.summed()
        epoch = None if self.mapped is None else self.mapped.epoch
        return ConsumerStats(
            book.received, book.drops, epoch, self.last_seq_seen, book.epochs, book.duplicates, book.ignored
        )

    # --- with the lock held

    def apply(self) -> None:
        """Make the changes that the conductor asked for.

        It asks first and stops the feed then; so we let the feed go on first and look for what was asked then.
        """
        if self.feed is not None:
            self.feed.forget(STOPPED)
        while self.pending:
            self.pending.popleft()()
        self._publish()

    # --- inside

    def _publish(self) -> None:
        feed, descriptors, mapped = self.feed, self.descriptors, self.mapped
        is_whole = feed is not None and descriptors is not None and mapped is not None
        self.current = (feed, descriptors, mapped) if is_whole else None  # type: ignore[assignment]

    def lose_descriptors(self) -> None:
        """Their media driver is gone; the conductor brings others."""
        self.descriptors = None
        self.current = None

    def _change(self, change: Callable[[], object]) -> None:
        self.pending.append(change)
        feed = self.feed
        if feed is not None:
            feed.stop()  # a sleeping reader comes out and makes the change
        self.apply_pending()
        with self.mapped_or_changed:
            self.mapped_or_changed.notify_all()

    def _suspend(self) -> None:
        if self.feed is not None and self.mapped is not None:
            self.feed.stop()
            self._attention_carried |= self.feed.attention & IMAGE_LOST  # of the streams, which go on
            self._suspended = self.mapped
            self._book = msgspec.structs.replace(self._book, current=None, suspended=self.feed)
        self.feed = None
        self.mapped = None

    def _settle(self, next_epoch: int | None, *, is_end: bool = False) -> None:
        """Close the book on the epoch before, unless it goes on."""
        self._suspend()
        mapped, feed = self._suspended, self._book.suspended
        self._suspended = None
        if mapped is None or feed is None:
            return
        is_over = mapped.epoch != next_epoch and not is_end
        self._next_seq = mapped.epoch, feed.finish(is_epoch_over=is_over)
        self._lost_carried = feed.lost
        self._book = self._book.summed()

    def _adopt(self, mapped: MappedEpoch) -> None:
        self._settle(mapped.epoch)
        expected: int | None = None  # in the first epoch the first descriptor decides
        is_new = self._next_seq is None or self._next_seq[0] != mapped.epoch
        if self._next_seq is not None:
            expected = 0 if is_new else self._next_seq[1]
        if self._forget_seqs:
            expected, self._forget_seqs = None, False
        gap = self._max_gap
        if gap is None:
            # §15.4 recommends 256 frames and to mind the depth: near the end of the ring a frame does not last.
            gap = max(1, mapped.reader.nslots * 3 // 4)
        feed = Feed(mapped.reader, mapped.stream_id, mapped.epoch, expected, gap)
        feed.carry_lost(self._lost_carried)
        feed.set_min_interval_ns(self._interval_ns)
        feed.set_throttled(self._is_throttled)
        feed.set_switching()
        self._lost_carried = 0
        self._next_seq = mapped.epoch, expected
        self._book = msgspec.structs.replace(self._book, current=feed, epochs=self._book.epochs + is_new)
        self.mapped, self.feed = mapped, feed
