# SPDX-License-Identifier: Apache-2.0
"""Receiving frames: every one in order, or the newest.

A consumer's loop keeps running across producers that come and go, driver restarts and lost leases; it sees no exception
that it did not ask for, and finds every lost frame in `stats`, with a reason. Handlers run on the thread that polls.
Wire §10.2, §11, §15.4, §15.18, §15.21; decisions B4, B5, B23, B27-B34.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import msgspec
import numpy as np

from tensorpool import aeron
from tensorpool._core import ConsumerBase, DropReason, FrameSource, RingReader, SlotFrame
from tensorpool.aeron.adapter import MessageAdapter
from tensorpool.client.arguments import seconds, whole_number
from tensorpool.client.consumer_session import ConsumerSession
from tensorpool.client.frame import Frame
from tensorpool.client.mapped_epoch import MappedEpoch
from tensorpool.client.metadata import Metadata
from tensorpool.client.progress import ProgressTracker
from tensorpool.client.session import State, StateChange
from tensorpool.client.stream_reader import NEWER_EPOCH, SEQ_WENT_BACK, ConsumerStats
from tensorpool.errors import Closed, TransportError
from tensorpool.shm.arrays import Array, view_of_frame
from tensorpool.wire.control import FrameProgress, FrameProgressState, MajorOrder, Mode, ProgressUnit

if TYPE_CHECKING:
    from tensorpool.client.client import Client
    from tensorpool.client.stream_widget import StreamWidget

SLICE_NS: Final = 250_000_000  # a wait comes up this often, to report changes of the state; at once for a signal
INVOKED_SLICE_NS: Final = 1_000_000
PROGRESS_SLICE_NS: Final = 500_000
FRAGMENT_LIMIT: Final = 256


class Progress:
    """How far a frame is that is still being written.

    `prefix` is what can be read of it: complete rows (columns), read-only, or None where the layout does not allow it.
    Ask `is_intact` after reading it; only a Frame is sure to be whole.
    """

    def __init__(self, mapped: MappedEpoch, message: FrameProgress, slot: SlotFrame) -> None:
        self._reader: Final[RingReader] = mapped.reader
        self._slot: Final = slot
        self.stream_id: Final = message.stream_id
        self.epoch: Final = message.epoch
        self.seq: Final = message.seq
        self.state: Final = message.state
        self.bytes_filled: Final = message.payload_bytes_filled
        self.rows: Final = self._complete(ProgressUnit.ROWS)
        self.columns: Final = self._complete(ProgressUnit.COLUMNS)
        self.prefix: Final = self._prefix(mapped)

    def is_intact(self) -> bool:
        """Whether the slot still belonged to this frame when its prefix was read."""
        return self._reader.is_held(self._slot)

    def _complete(self, unit: ProgressUnit) -> int | None:
        layout = self._slot.layout
        if layout.progress_unit != unit:
            return None
        axis = 0 if unit is ProgressUnit.ROWS else 1
        if self.bytes_filled >= layout.extent_bytes:
            return layout.shape[axis]  # the last one may end before its padding does
        return min(self.bytes_filled // layout.progress_stride_bytes, layout.shape[axis])

    def _prefix(self, mapped: MappedEpoch) -> Array | None:
        """B23: rows of a row-major frame, columns of a column-major one, or the plain bytes of a contiguous one."""
        view = view_of_frame(mapped.pools[self._slot.pool], self._slot)
        carried, layout = mapped.carried(self._slot), self._slot.layout
        if carried is not None:
            view = carried.restore(view)
        if self.rows is not None and layout.major_order == MajorOrder.ROW:
            return view[: self.rows]
        if self.columns is not None and layout.major_order == MajorOrder.COLUMN and view.ndim == 2:
            return view[:, : self.columns]
        is_dense = view.flags.c_contiguous or view.flags.f_contiguous
        if layout.progress_unit == ProgressUnit.NONE and is_dense:
            flat = np.frombuffer(mapped.pools[self._slot.pool], np.uint8, view.nbytes, self._slot.payload_offset)
            return flat[: self.bytes_filled]
        return None


class Consumer(ConsumerBase):
    """Receives the frames of one stream. Made by `Client.consumer`; one thread at a time polls it.

    >>> for frame in consumer:                        # every frame            # doctest: +SKIP
    ...     show(frame.array, frame.dropped_before)
    >>> frame = consumer.latest()                     # the newest, or None    # doctest: +SKIP
    >>> frame = consumer.poll(timeout=0.5)            # the next, or None      # doctest: +SKIP
    """

    def __init__(
        self,
        session: ConsumerSession,
        client: Client,
        invoke: Callable[[], int] | None,
        on_state: Callable[[StateChange], object] | None,
        on_progress: Callable[[Progress], object] | None,
    ) -> None:
        self._is_simple = invoke is None and on_progress is None
        super().__init__(session.reader, self._is_simple)
        self._session = session
        self._reader = session.reader
        self._lock = session.reader.lock
        self._client = client
        self._invoke = invoke
        self._on_state = on_state
        self._on_progress = on_progress
        self.is_awaited = False  # by an event loop, whose thread is the only one that polls it
        self._tracker = ProgressTracker()
        self._tracked_epoch: int | None = None
        self._partial: list[Progress] = []
        self._progress_adapter = MessageAdapter(on_malformed=lambda data, error: None)
        if on_progress is not None:  # a cycle: without one the last reference ends the consumer at once
            self._progress_adapter.add(FrameProgress, self._on_frame_progress)

    # --- who it is

    @property
    def stream_id(self) -> int:
        """Which stream it is; with a name, found or chosen at the attach."""
        return self._session.stream_id

    @property
    def name(self) -> str | None:
        """The name by which the stream was asked for; None where it was an id."""
        return self._session.name

    @property
    def epoch(self) -> int | None:
        """That is mapped; None while there is none."""
        mapped = self._reader.mapped
        return None if mapped is None else mapped.epoch

    @property
    def consumer_id(self) -> int:
        """Under which the driver and the producer know it."""
        return self._session.attachment.client_id

    @property
    def lease_id(self) -> int | None:
        """Of the lease that it holds; None while there is none."""
        return self._session.attachment.lease_id

    @property
    def state(self) -> State:
        """What it can do at the moment."""
        return self._session.state

    @property
    def is_active(self) -> bool:
        """Whether frames flow."""
        return self._session.state is State.ACTIVE

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, by `close` or with its client: no more frames come."""
        return self._session.is_closed or self._reader.is_closed

    @property
    def mode(self) -> Mode:
        """As asked for, or as a ConsumerConfig overrides it."""
        return self._session.mode

    @property
    def fallback_uri(self) -> str | None:
        """Where to get the payload while the state is FALLBACK; None where the ConsumerConfig names none."""
        return self._session.fallback_uri

    @property
    def stats(self) -> ConsumerStats:
        """What became of the frames so far, the lost ones by reason."""
        self._reader.apply_pending()
        return msgspec.structs.replace(self._reader.stats(), layout_mismatches=self._session.layout_mismatches)

    # --- frames

    # Native for a frame that has arrived already; otherwise they call _poll and _next, which wait for one.
    poll = ConsumerBase.poll
    __iter__ = ConsumerBase.__iter__
    __next__ = ConsumerBase.__next__

    def poll_many(self, n: int, timeout: float = 0.0) -> list[Frame]:
        """The next frames, up to `n` that have arrived, waiting up to `timeout` seconds for the first; may be empty.

        Like as many calls of `poll`, at a fraction of their cost where frames are small. The ring goes on meanwhile:
        choose `n` well below its number of slots, or the first frames are overwritten before you get to the last.
        """
        wanted = whole_number("n", n, 2**31, 1)
        frames: list[Frame] = self._take_arrived(wanted)
        while len(frames) < wanted and not (frames and self._is_simple):
            frame = self.poll(0.0 if frames else timeout)
            if frame is None:
                break
            frames.append(frame)
            frames += self._take_arrived(wanted - len(frames))
        return frames

    def latest(self) -> Frame | None:
        """The newest frame, received before or not; None when there is none yet, or it is refused. Never waits.

        Frames between the last one received and this one are counted as SKIPPED. A frame whose progress went back is
        refused and counted as BAD_PROGRESS.
        """
        self._housekeeping()
        reader = self._reader
        with self._lock:
            reader.apply()
            source = reader.source
            if source is None:
                return None
            try:
                received = source.feed.latest(source.descriptors)
            except (TransportError, Closed):
                reader.lose_descriptors()
                self._session.conductor.wake()
                return None
            if received is None:
                return None
            if self._on_progress is not None and self._tracker.is_broken(received.seq):
                source.feed.refuse(received, DropReason.BAD_PROGRESS)
                return None
            return Frame(source.mapped, received)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until `poll` has something to do. False when the time is over, or the consumer is closed.

        Like `poll` and `latest` it raises Closed in a process that was forked from the one that attached.
        """
        self._session.check_process()
        deadline_ns = None if timeout is None else time.monotonic_ns() + round(seconds("timeout", timeout) * 1e9)
        while not self.is_closed:
            left_ns = SLICE_NS if deadline_ns is None else deadline_ns - time.monotonic_ns()
            if self._wait_once(min(left_ns, SLICE_NS)):
                return True
            if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
                return False
        return False

    @contextlib.contextmanager
    def lent(self) -> Iterator[FrameSource | None]:
        """Let native code take frames in place of `poll`, from the source that is given; None while there is none.

        Does what `poll` does for the consumer itself.
        """
        self._housekeeping()
        is_remapping = self._attend() & SEQ_WENT_BACK
        with self._lock:
            self._reader.apply()
            yield None if is_remapping else self._reader.source

    # --- about the frames

    def metadata(self, meta_version: int | None = None, *, epoch: int | None = None) -> Metadata | None:
        """What frames of a meta_version mean, or what applies now; None where nothing was received yet.

        Versions start anew with each producer: they belong to the mapped epoch, unless you name another
        (`consumer.metadata(frame.meta_version, epoch=frame.epoch)`).
        """
        return self._session.metadata.get(meta_version, epoch)

    def blob(self, blob_type: int, meta_version: int | None = None, *, epoch: int | None = None) -> bytes | None:
        """A large table that the producer of the mapped epoch, or of `epoch`, distributes, once it is complete."""
        return self._session.metadata.blob(blob_type, meta_version, epoch)

    def widget(self) -> StreamWidget:
        """The stream, live, in a notebook: with a button that pauses and a choice of colour maps.

        >>> consumer.widget()     # the last line of a cell shows it     # doctest: +SKIP

        It has a consumer of its own, which it attaches while it is shown: this one misses nothing. Raises MissingExtra
        where the extra `notebook` is not installed, and LocalProtocolError for a client without a thread.
        """
        from tensorpool.client.stream_widget import widget_of

        return widget_of(self._client, self._session.stream_id, self._session.name)

    def close(self) -> None:
        """Give the lease back. Loops over this consumer end; frames and views stay valid."""
        self._reader.close()
        self._client._detach(self._session)
        self._session.take_events(self._on_state)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        session = getattr(self, "_session", None)
        if session is not None:
            session.on_unreferenced(self)

    def __repr__(self) -> str:
        about = f"<Consumer of {self._session.stream_label}: {self.state.lower()}"
        if self.epoch is None:
            return f"{about}>"
        stats = self.stats
        drops = "".join(f", {count} {reason.name.lower()}" for reason, count in stats.drops.items() if count)
        return f"{about}, epoch {self.epoch}, {stats.received} received{drops}>"

    # --- inside

    def _try_next(self) -> Frame | None:
        source = self._reader.source
        if source is None:
            return None
        try:
            frame: Frame | None = source.next()
        except (TransportError, Closed):
            self._reader.lose_descriptors()
            self._session.conductor.wake()  # the media driver is gone: it will find another
            return None
        if frame is not None and self._on_progress is not None and self._tracker.is_broken(frame.seq):
            source.feed.refuse(frame._slot, DropReason.BAD_PROGRESS)  # §10.2.2: its progress went back
            return self._try_next()
        return frame

    def _next(self) -> Frame:
        """`__next__` where no frame has arrived yet: waits for one; the loop ends after close()."""
        while True:
            frame = self._poll(1.0)
            if frame is not None:
                return frame
            if self.is_closed:
                raise StopIteration

    def _poll(self, timeout: float = 0.0) -> Frame | None:
        """`poll` where no frame has arrived yet: waits up to `timeout` seconds for one."""
        deadline_ns = time.monotonic_ns() + round(seconds("timeout", timeout) * 1e9)
        reader = self._reader
        while True:
            self._housekeeping()
            with self._lock:
                reader.apply()
                if reader.is_closed:
                    return None
                frame = self._try_next()
                if frame is not None:
                    return frame
            left_ns = deadline_ns - time.monotonic_ns()
            if left_ns <= 0:
                return None
            self._wait_once(min(left_ns, SLICE_NS))

    def _wait_once(self, timeout_ns: int) -> bool:
        """Sleep until there is something to do, at most `timeout_ns`."""
        reader = self._reader
        timeout_ns = max(0, min(timeout_ns, self._slice_ns))
        if self._invoke is not None:
            self._invoke()
        if self._attend() & SEQ_WENT_BACK:
            time.sleep(min(timeout_ns, 1_000_000) / 1e9)
            return True
        with self._lock:
            reader.apply()
            source = reader.source
            if source is not None:
                try:
                    return source.feed.wait(source.descriptors, timeout_ns)
                except (TransportError, Closed):
                    reader.lose_descriptors()
                    self._session.conductor.wake()
        with reader.mapped_or_changed:
            if reader.source is None and not reader.pending:
                reader.mapped_or_changed.wait(timeout_ns / 1e9)
        return bool(reader.pending)

    def _before_wait(self) -> int:
        """What `wait_any` has this consumer do before it sleeps, and for how long it may (ns); 0: it has to be polled.

        Where an event loop awaits it, callbacks are left to the loop's own poll.
        """
        if not self.is_awaited:
            self._housekeeping()
        elif self._invoke is not None:
            self._invoke()
        if self.is_closed or self._session.events:
            return 0
        self._attend()
        self._reader.apply_pending()
        return self._slice_ns

    @property
    def _slice_ns(self) -> int:
        """How long a wait may last before the consumer has to do something."""
        if self._on_progress is not None:
            return PROGRESS_SLICE_NS
        return SLICE_NS if self._invoke is None else INVOKED_SLICE_NS

    def _attend(self) -> int:
        """Have the conductor do what the feed asks for; returns what that is."""
        attention = self._reader.attention
        if attention & NEWER_EPOCH:
            self._reader.forget_attention(NEWER_EPOCH)
            self._session.newer_epoch_seen = True
        if attention & (NEWER_EPOCH | SEQ_WENT_BACK):
            self._session.conductor.wake()  # it asks the driver, or maps the epoch again
        return attention

    def _housekeeping(self) -> None:
        self._session.check_process()
        if self._invoke is not None:
            self._invoke()
        if self._session.events:
            self._session.take_events(self._on_state)
        if self._on_progress is not None:
            self._poll_progress()

    # --- inside: partial frames

    def _poll_progress(self) -> None:
        with self._lock:
            subscription = self._reader.progress
            if subscription is None or self._on_progress is None:
                return
            try:
                subscription.poll(self._progress_adapter.on_message, FRAGMENT_LIMIT)
            except (TransportError, Closed):
                self._session.conductor.wake()
            partial, self._partial = self._partial, []
        for progress in partial:
            self._on_progress(progress)

    def _on_frame_progress(self, message: FrameProgress, info: aeron.MessageInfo) -> None:
        mapped = self._reader.mapped
        if mapped is None or message.stream_id != mapped.stream_id or message.epoch != mapped.epoch:
            return  # G6: a foreign epoch is passed over, never a reason to remap
        if self._tracked_epoch != mapped.epoch:
            self._tracked_epoch = mapped.epoch
            self._tracker.forget()
        if not self._tracker.accepts(message):
            return
        slot = mapped.reader.read_partial(message.seq)
        if not isinstance(slot, SlotFrame) or message.payload_bytes_filled > slot.values_len_bytes:
            self._tracker.dropped += 1
            return
        if message.state is not FrameProgressState.UNKNOWN:
            self._partial.append(Progress(mapped, message, slot))
