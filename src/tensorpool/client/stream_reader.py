# SPDX-License-Identifier: Apache-2.0
"""Where the reading thread and the conductor meet: the mapped epoch, its descriptors, and the count of every frame.

The reading thread holds the lock while it polls and waits; the conductor only adds to `pending` and stops the feed, so
it never waits for a reader. The thread that takes the lock next makes the change, with the old epoch's losses counted.
Wire §15.4, §15.18, §15.21; decisions B27-B34.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

import msgspec

from tensorpool import aeron
from tensorpool._core import DescriptorFeed, DropReason, FrameSource, LateFrames, ReceptionBase, is_gap, is_late
from tensorpool.channel import Endpoint
from tensorpool.client.mapped_epoch import MappedEpoch
from tensorpool.errors import Closed, TransportError
from tensorpool.shm import HeaderFile

STOPPED: Final = 1  # DescriptorFeed.attention
NEWER_EPOCH: Final = 2
SEQ_WENT_BACK: Final = 4
IMAGE_LOST: Final = 8

DEFAULT_MAX_GAP: Final = 256
MAX_OVER: Final = 4  # epochs whose last frames may still come


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
    layout_mismatches: int = 0  # announces of the mapped epoch that described other regions

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


class _EndedEpoch(msgspec.Struct, frozen=True):
    """An epoch that is unmapped and perhaps not over: what of it was accounted for, and who tells how far it came."""

    epoch: int
    expected: int | None
    header_file: HeaderFile | None

    def missing(self) -> int:
        """How many frames were committed that no count includes yet."""
        newest = None if self.header_file is None else self.header_file.newest()
        return 0 if self.expected is None or newest is None else max(newest + 1 - self.expected, 0)


class _Counts(msgspec.Struct, frozen=True):
    """The counts of epochs before, and the feed that counts now; replaced as a whole, so any thread may read it."""

    drops: dict[DropReason, int] = {}
    received: int = 0
    duplicates: int = 0
    ignored: int = 0
    epochs: int = 0
    current: DescriptorFeed | None = None
    over: tuple[_EndedEpoch, ...] = ()  # we have left these epochs; their producers may hear of it a moment later

    @property
    def lost(self) -> int:
        return sum(self.drops.values())

    def settled(self) -> _Counts:
        """With what was committed in epochs that we have left."""
        missing = [tail.missing() for tail in self.over]
        if not any(missing):
            return self
        drops = Counter(self.drops)
        drops[DropReason.EPOCH_ENDED] += sum(missing)
        over = tuple(
            msgspec.structs.replace(tail, expected=(tail.expected or 0) + count)
            for tail, count in zip(self.over, missing, strict=True)
        )
        return msgspec.structs.replace(self, drops=dict(drops), over=over)

    def summed(self) -> _Counts:
        """With what the feed has counted so far, and without it."""
        feed = self.current
        if feed is None:
            return self
        drops = Counter(self.drops)
        drops.update(feed.drops)
        return _Counts(
            dict(drops),
            self.received + feed.received,
            self.duplicates + feed.duplicates,
            self.ignored + feed.ignored,
            self.epochs,
            over=self.over,
        )


class StreamReader(ReceptionBase):
    """The state of reading one stream."""

    def __init__(self, max_outstanding_seq_gap: int | None, on_change: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.mapped_or_changed = threading.Condition()
        self.pending: deque[Callable[[], object]] = deque()
        self.mapped: MappedEpoch | None = None
        self.feed: DescriptorFeed | None = None
        self.descriptors: aeron.Subscription | None = None
        self.progress: aeron.Subscription | None = None
        self.is_closed = False
        self._max_gap = max_outstanding_seq_gap
        self._on_change = on_change  # a reader made changes that the conductor waits for
        self._counts = _Counts()
        self._late = LateFrames()
        self._tail: _EndedEpoch | None = None
        self._interval_ns = 0
        self._is_throttled = False
        self._forget_seqs = False
        self.progress_endpoint: Endpoint | None = None
        self._lost_carried = 0
        self._attention_carried = 0
        self._idle_mark = -1

    # --- from the conductor

    def adopt(self, mapped: MappedEpoch) -> None:
        """Go on with this epoch."""
        self._change(lambda: self._adopt(mapped))

    def suspend(self) -> None:
        """Unmap: deliver nothing more. What is lost is counted when another epoch is there, or by `let_go`."""
        self._change(self._suspend)

    def let_go(self) -> None:
        """What was left some time ago is not coming back: count what it lost, and forget its file if we go on."""
        self._change(self._let_go)

    def set_streams(
        self,
        descriptors: aeron.Subscription | None,
        progress: aeron.Subscription | None,
        progress_endpoint: Endpoint | None = None,
    ) -> None:
        """The streams at a new media driver, or none."""
        self.progress_endpoint = progress_endpoint

        def change() -> None:
            self.descriptors, self.progress = descriptors, progress
            self._attention_carried = 0
            self._is_throttled = False
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
        """§5: FrameProgress comes on a stream of our own, or on the shared one again."""
        if endpoint == self.progress_endpoint:
            return
        subscription = subscribe()
        self.progress_endpoint = endpoint

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

    def set_throttled(self, is_throttled: bool) -> None:
        """B28: whether the stream that descriptors come from leaves frames out on purpose."""
        if is_throttled == self._is_throttled:
            return

        def change() -> None:
            self._is_throttled = is_throttled
            if self.feed is not None:
                self.feed.set_throttled(is_throttled)

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
        self._change(self._end)

    def apply_pending(self) -> None:
        """Make the changes that are due, unless the reading thread is at it."""
        if (self.pending or self.attention & STOPPED) and self.lock.acquire(blocking=False):
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
        """Whether nothing was received since this was asked last."""
        counts = self._counts
        received = counts.received + (0 if counts.current is None else counts.current.received)
        is_idle, self._idle_mark = received == self._idle_mark, received
        return is_idle

    # --- from anywhere

    @property
    def last_seq_seen(self) -> int:
        feed = self.feed
        return 0 if feed is None else feed.last_seq_seen or 0  # B31

    def stats(self) -> ConsumerStats:
        late = self._late.count  # first: every one of them is among the received
        book = self._counts.summed().settled()
        drops = dict(book.drops)
        if late:
            drops[DropReason.OVERWRITTEN] = drops.get(DropReason.OVERWRITTEN, 0) + late
        epoch = None if self.mapped is None else self.mapped.epoch
        return ConsumerStats(
            book.received - late, drops, epoch, self.last_seq_seen, book.epochs, book.duplicates, book.ignored
        )

    # --- with the lock held

    def apply(self) -> None:
        """Make the changes that the conductor asked for.

        It asks first and stops the feed then; so we let the feed go on first and look for what was asked then.
        """
        if self.feed is not None:
            self.feed.forget(STOPPED)
        if not self.pending:
            return
        while self.pending:
            self.pending.popleft()()
        feed, descriptors, mapped = self.feed, self.descriptors, self.mapped
        self.source = None
        if feed is not None and descriptors is not None and mapped is not None:
            from tensorpool.client.frame import Frame  # numpy: for those who have something to read

            self.source = FrameSource(feed, descriptors, mapped, Frame)
        self._on_change()

    # --- inside

    def lose_descriptors(self) -> None:
        """Their media driver is gone; the conductor brings others."""
        self.descriptors = None
        self.source = None

    def _change(self, change: Callable[[], object]) -> None:
        self.pending.append(change)
        feed = self.feed
        if feed is not None:
            feed.stop()  # a sleeping reader comes out and makes the change
        self.apply_pending()
        with self.mapped_or_changed:
            self.mapped_or_changed.notify_all()

    def _suspend(self) -> None:
        feed, mapped = self.feed, self.mapped
        self.feed = self.mapped = self.source = None
        if feed is None or mapped is None:
            return
        feed.stop()
        expected = feed.finish()
        self._attention_carried |= feed.attention & IMAGE_LOST  # of the streams, which go on
        self._lost_carried = feed.lost
        self._counts = self._counts.summed()
        self._tail = _EndedEpoch(mapped.epoch, expected, mapped.ring.header_file)

    def _settle(self, next_epoch: int | None) -> None:
        """Finalize the previous epoch's counters, unless it is the one that goes on."""
        tail, book = self._tail, self._counts
        settled = book.settled()
        if tail is not None and tail.epoch != next_epoch and tail.header_file is not None:
            settled = msgspec.structs.replace(settled, over=(*settled.over[-MAX_OVER + 1 :], tail)).settled()
            self._tail = _EndedEpoch(tail.epoch, settled.over[-1].expected, None)
        self._lost_carried += settled.lost - book.lost
        self._counts = settled

    def _let_go(self) -> None:
        self._settle(None)
        if self.feed is not None:
            self._counts = msgspec.structs.replace(self._counts, over=())

    def _end(self) -> None:
        """Closed by the user: what was not asked for is not lost."""
        self._suspend()
        self._tail = None
        self._let_go()

    def _adopt(self, mapped: MappedEpoch) -> None:
        self._suspend()
        self._settle(mapped.epoch)
        tail = next((tail for tail in self._counts.over if tail.epoch == mapped.epoch), self._tail)  # it comes back
        over = tuple(tail for tail in self._counts.over if tail.epoch != mapped.epoch)
        is_new = tail is None or tail.epoch != mapped.epoch
        expected: int | None = None  # in the first epoch the first descriptor decides
        if tail is not None and not self._forget_seqs:
            expected = 0 if is_new else tail.expected
        self._forget_seqs = False
        gap = self._max_gap
        if gap is None:
            # §15.4: 256 frames, and mind the depth: near the end of the ring a frame does not last.
            gap = min(DEFAULT_MAX_GAP, max(1, mapped.reader.nslots * 3 // 4))
        feed = DescriptorFeed(mapped.reader, mapped.stream_id, mapped.epoch, expected, gap, self._late)
        feed.carry_lost(self._lost_carried)
        feed.set_min_interval_ns(self._interval_ns)
        feed.set_throttled(self._is_throttled)
        feed.set_switching()
        if self.descriptors is not None:
            with contextlib.suppress(TransportError, Closed):  # its media driver is gone, with the descriptors
                feed.discard(self.descriptors)
        self._lost_carried = 0
        self._tail = _EndedEpoch(mapped.epoch, expected, None)
        self._counts = msgspec.structs.replace(
            self._counts, current=feed, epochs=self._counts.epochs + is_new, over=over
        )
        self.mapped, self.feed = mapped, feed
