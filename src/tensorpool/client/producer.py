# SPDX-License-Identifier: Apache-2.0
"""Publishing frames: copy an array in, or fill a slot in place.

A producer never waits for anybody: what cannot be published is dropped and counted. It survives the loss of its lease,
of the driver and of the media driver; meanwhile its frames are dropped and counted as DETACHED.
Wire §8.3, §9, §10.2, §15.18; decisions B4, B12, B17, B26.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Literal, Self

import msgspec
import numpy as np
import numpy.typing as npt

from tensorpool._core import DropReason, ProducerBase, TensorLayout, monotonic_ns
from tensorpool.client.arguments import (
    MAX_META_VERSION,
    blob,
    check_metadata,
    frame_numbers,
    metadata_message,
    seconds,
    whole_number,
)
from tensorpool.client.producer_session import ProducerSession, Writing
from tensorpool.client.session import State, StateChange
from tensorpool.errors import Closed, LocalProtocolError, TransportError
from tensorpool.shm.arrays import Array, Order, layout_for, layout_of, numpy_dtype, payload_of, view_of
from tensorpool.wire.control import DataSourceMeta, Dtype, MajorOrder, ProgressUnit
from tensorpool.wire.trace import Parent, TraceLinkSet

MAX_PARENTS: Final = 10_000

type ProgressAxis = Literal["rows", "columns"]


class ProducerStats(msgspec.Struct, frozen=True):
    """What became of the frames so far. `published` + the sum of `dropped` is every frame that was given."""

    published: int
    bytes: int
    dropped: dict[DropReason, int]
    descriptors_unheard: int  # published while nobody listened
    descriptors_lost: int  # published, but the descriptor log was full: consumers count a gap
    epochs: int
    private_streams_declined: int = 0  # requests of consumers for streams of their own
    consumers_beyond_limit: int = 0  # messages of consumers that were not noted: too many are known


class Producer(ProducerBase):
    """Publishes the frames of one stream. Made by `Client.producer`.

    >>> with client.producer("camera/front", create=True) as producer:     # doctest: +SKIP
    ...     seq = producer.publish(image)                                  # None: dropped and counted

    `publish` is native for an array that looks like the one before; everything else goes through `_publish`.
    """

    def __init__(
        self,
        session: ProducerSession,
        close: Callable[[ProducerSession], None],
        wait: Callable[[ProducerSession, Callable[[], bool], float | None], bool],
        on_state: Callable[[StateChange], object] | None,
        release_gil_from_bytes: int | None,
    ) -> None:
        super().__init__(session.route)
        self._session = session
        self._close = close
        self._wait = wait
        self._on_state = on_state
        self._release_gil_from_bytes = release_gil_from_bytes
        self._dropped: Counter[DropReason] = Counter()
        self._totals = _Totals()
        self._writing: Writing | None = None

    # --- who it is

    @property
    def stream_id(self) -> int:
        return self._session.stream_id

    @property
    def name(self) -> str | None:
        return self._session.name

    @property
    def epoch(self) -> int | None:
        """Of the memory that frames go to; None while there is none."""
        writing = self._session.writing
        return None if writing is None else writing.ring.epoch

    @property
    def producer_id(self) -> int:
        return self._session.attachment.client_id

    @property
    def lease_id(self) -> int | None:
        return self._session.attachment.lease_id

    @property
    def next_seq(self) -> int:
        writing = self._session.writing
        return 0 if writing is None else writing.writer.next_seq

    @property
    def max_frame_bytes(self) -> int:
        """The largest frame that fits a pool; 0 while there is no memory."""
        writing = self._session.writing
        return 0 if writing is None else max(pool.stride_bytes for pool in writing.ring.spec.pools)

    @property
    def state(self) -> State:
        return self._session.state

    @property
    def is_active(self) -> bool:
        return self._session.state is State.ACTIVE

    @property
    def consumers(self) -> int:
        """How many consumers have this epoch mapped and told so lately."""
        return self._session.consumers_ready()

    @property
    def writing(self) -> Writing | None:
        """What native code publishes with, until its `until_ns`; None while there is no memory. Ask before each use."""
        writing = self._session.writing
        if writing is None or writing is not self._writing or monotonic_ns() >= writing.until_ns:
            writing = self._renew()
        return writing

    @property
    def stats(self) -> ProducerStats:
        totals = self._totals.with_current(self._writing)
        return ProducerStats(
            published=totals.written,
            bytes=totals.bytes,
            dropped=dict(self._dropped),
            descriptors_unheard=totals.unheard,
            descriptors_lost=totals.back_pressured,
            epochs=self._session.epochs,
            private_streams_declined=self._session.counts["private_streams_declined"],
            consumers_beyond_limit=self._session.counts["consumers_beyond_limit"],
        )

    # --- frames

    def _publish(
        self,
        array: npt.ArrayLike,
        *,
        timestamp_ns: int | None = None,
        meta_version: int | None = None,
        trace_id: int = 0,
        parents: Iterable[int] = (),
        seq: int | None = None,
        dtype: npt.DTypeLike | Dtype | None = None,
        shape: tuple[int, ...] | None = None,
        keep_strides: bool = False,
    ) -> int | None:
        """`publish` of the first array, of another kind of array, and with every option."""
        session = self._session
        timestamp_ns, meta_version, trace_id, seq = frame_numbers(timestamp_ns, meta_version, trace_id, seq)
        links = _links(trace_id, parents)
        writing = session.writing
        if writing is None or writing is not self._writing or monotonic_ns() >= writing.until_ns:
            writing = self._renew()
            if writing is None:
                self._dropped[DropReason.DETACHED] += 1
                return None
        version = session.route.meta_version if meta_version is None else meta_version
        is_usual = dtype is None and shape is None and not keep_strides
        if is_usual:
            data = array if type(array) is np.ndarray else np.asarray(array)
            if not data.flags.forc:
                return self._publish_strided(data, timestamp_ns, meta_version, trace_id, links, seq)
            layout = layout_of(data)
        else:
            layout, data = payload_of(array, dtype, shape, keep_strides)
        number = writing.publisher.publish(layout, data, timestamp_ns, version, trace_id, seq, is_usual)
        if number is None:
            self._dropped[DropReason.NO_POOL] += 1
            return None
        if links or not session.route.is_plain:
            self._tell_others(writing, number, version, trace_id, links)
        return number

    def claim(
        self,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike | Dtype = np.uint8,
        order: Order = "C",
        *,
        timestamp_ns: int | None = None,
        meta_version: int | None = None,
        trace_id: int = 0,
        progress: ProgressAxis | None = None,
        seq: int | None = None,
        strides: tuple[int, ...] | None = None,
    ) -> Slot:
        """A slot to fill in place: no copy at all.

        >>> with producer.claim((1080, 1920, 3), np.uint8) as slot:     # doctest: +SKIP
        ...     camera.read_into(slot.array)                            # published here, given up on an exception

        A frame that cannot be published gets an array all the same, so that your loop goes on; it is dropped, and
        counted, when the slot is left. `progress` lets `slot.progress(rows=…)` tell consumers about partial frames.
        `strides`, in bytes, are for devices that pad their rows: `claim((1080, 1900), strides=(2048, 1))`.
        """
        timestamp_ns, meta_version, trace_id, seq = frame_numbers(timestamp_ns, meta_version, trace_id, seq)
        layout = layout_for(shape, dtype, order, strides)
        if progress is not None:
            layout = _with_progress(layout, progress, strides)
        version = self._session.route.meta_version if meta_version is None else meta_version
        writing = self._session.writing
        if writing is None or writing is not self._writing or monotonic_ns() >= writing.until_ns:
            writing = self._renew()
        return Slot(self, writing, layout, timestamp_ns, version, trace_id, progress, seq)

    # --- about the frames

    def set_metadata(self, attributes: Mapping[str, Any], *, tags: Iterable[str] = (), summary: str = "") -> int:
        """Say what frames mean from now on; returns their meta_version.

        Text and bytes travel as they are, everything else as JSON. Raises LocalProtocolError for what cannot travel.
        """
        session = self._session
        session.check_process()
        version = session.route.meta_version + 1
        if version > MAX_META_VERSION:
            raise LocalProtocolError("meta_version is used up; attach anew")
        stamp_ns = session.stamp_ns(session.conductor.clock.monotonic_ns())
        message = metadata_message(session.config, self.name, attributes, tags, summary, version, stamp_ns)
        session.route.meta_version = version
        session.conductor.order(lambda now_ns: session.set_metadata(message, summary))
        return version

    def repeat_metadata(self, message: DataSourceMeta, *, summary: str = "") -> None:
        """Say what another producer said, under its meta_version and at its time: for replays.

        Frames are of that version from now on. Raises LocalProtocolError for a version that no frame can carry.
        """
        session = self._session
        session.check_process()
        if not 1 <= message.meta_version <= MAX_META_VERSION:
            raise LocalProtocolError(f"meta_version {message.meta_version}: expected 1 to 2^32 - 2")
        check_metadata(session.config, self.name, message, summary)
        session.route.meta_version = message.meta_version
        session.conductor.order(lambda now_ns: session.set_metadata(message, summary))

    def publish_blob(self, data: bytes, *, blob_type: int, checksum: bool = True) -> int:
        """Distribute a large table (a flat field, a mask) under the current meta_version, which is returned.

        Consumers that come later get it too. Raises LocalProtocolError for what the metadata stream cannot carry.
        """
        session = self._session
        session.check_process()
        kept, version = blob(session.config, data, blob_type), session.route.meta_version
        session.conductor.order(lambda now_ns: session.add_blob(version, blob_type, kept, checksum))
        return version

    def wait_for_consumers(self, n: int = 1, timeout: float | None = None) -> bool:
        """Wait until `n` consumers have this epoch mapped, so that they miss nothing from here on."""
        session = self._session
        session.check_process()
        wanted = whole_number("n", n, 2**32)
        within = None if timeout is None else seconds("timeout", timeout)
        return self._wait(session, lambda: session.consumers_ready() >= wanted and not session.is_choked, within)

    def drain(self, timeout: float | None = 5.0) -> bool:
        """Wait until every consumer of this epoch has seen the last frame; what it has not seen goes with the epoch."""
        self._session.check_process()
        within = None if timeout is None else seconds("timeout", timeout)
        last = self.next_seq - 1
        since_ns = monotonic_ns()
        return last < 0 or self._wait(self._session, lambda: self._session.is_read_up_to(last, since_ns), within)

    def close(self) -> None:
        """Give the lease back. Frames that consumers have not read yet are lost to them; see `drain`."""
        self._close(self._session)
        self._retire()
        self._session.take_events(self._on_state)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside

    def _renew(self) -> Writing | None:
        """The epoch changed, or is gone: look again, and tell the user."""
        session = self._session
        session.check_process()
        if session.is_closed:
            raise Closed(f"the producer of stream {self.name or self.stream_id} is closed")
        if session.events:
            session.take_events(self._on_state)
        current = session.writing
        if current is not self._writing:
            self._retire()
            self._writing = current
            if current is not None and self._release_gil_from_bytes is not None:
                current.writer.release_gil_from_bytes = self._release_gil_from_bytes
            session.adopt(current)
        if current is not None and monotonic_ns() >= current.until_ns:
            session.conductor.kick()  # we stood still for longer than the lease lasts: it is about to find out
            return None
        return current

    def _is_current(self, writing: Writing) -> bool:
        return self._session.writing is writing and monotonic_ns() < writing.until_ns

    def _retire(self) -> None:
        self._session.adopt(None)
        self._totals = self._totals.with_current(self._writing)
        self._writing = None

    def _publish_strided(
        self,
        data: Array,
        timestamp_ns: int | None,
        meta_version: int | None,
        trace_id: int,
        links: tuple[Parent, ...],
        seq: int | None,
    ) -> int | None:
        slot = self.claim(
            data.shape, data.dtype, timestamp_ns=timestamp_ns, meta_version=meta_version, trace_id=trace_id, seq=seq
        )
        with slot:
            np.copyto(slot.array, data)
        number = slot.seq
        if number is not None and links and self._writing is not None:
            self._link_parents(self._writing, number, trace_id, links)
        return number

    def _tell_others(
        self, writing: Writing, seq: int, meta_version: int, trace_id: int, links: tuple[Parent, ...] = ()
    ) -> None:
        epoch, now_ns = writing.ring.epoch, monotonic_ns()
        for stream in self._session.fan_out.descriptors:
            if stream.is_due(now_ns):
                try:
                    stamp_ns = now_ns if self._session.with_publish_time else None
                    stream.publication.offer_descriptor(
                        self.stream_id, epoch, seq, stamp_ns, meta_version or None, trace_id
                    )
                except (Closed, TransportError):
                    continue  # the conductor closed it, or notices by itself
        if links:
            self._link_parents(writing, seq, trace_id, links)

    def _link_parents(self, writing: Writing, seq: int, trace_id: int, links: tuple[Parent, ...]) -> None:
        session = self._session
        message = TraceLinkSet(
            stream_id=self.stream_id,
            epoch=writing.ring.epoch,
            seq=seq,
            trace_id=trace_id,
            parents=links,
        )
        session.conductor.order(lambda now_ns: session.post_metadata(message))


class Slot:
    """A frame being written in place. Leaving the `with` block commits it, an exception gives it up.

    `array` is writable until then, read-only afterwards; views that you made of it stay writable, so do not keep them.
    `seq` is None where the frame is going to be dropped.
    """

    def __init__(
        self,
        producer: Producer,
        writing: Writing | None,
        layout: TensorLayout,
        timestamp_ns: int | None,
        meta_version: int,
        trace_id: int,
        progress: ProgressAxis | None,
        seq: int | None,
    ) -> None:
        self._producer = producer
        self._writing = writing
        self._layout = layout
        self._timestamp_ns = timestamp_ns
        self._meta_version = meta_version
        self._trace_id = trace_id
        self._axis = progress
        self._is_open = True
        self._drop: DropReason | None = None
        self.seq: int | None = None
        place = None
        if writing is None:
            self._drop = DropReason.DETACHED
        else:
            number = writing.writer.next_seq if seq is None else seq
            stamp_ns = monotonic_ns() if timestamp_ns is None else timestamp_ns
            writing.publisher.check_time(stamp_ns)
            place = writing.writer.begin(number, layout, stamp_ns, meta_version, header_first=progress is not None)
            if place is None:
                self._drop = DropReason.NO_POOL
            else:
                self.seq = number
        if place is not None:
            self.array: Array = view_of(place[0], place[1], layout, writable=True)
        else:
            self.array = _scratch(layout)
        if progress is not None and self.seq is not None and writing is not None:
            ids = producer.stream_id, writing.ring.epoch, self.seq
            producer._session.progress.start(*ids, layout.progress_stride_bytes, producer._session.fan_out)

    def progress(self, *, rows: int | None = None, columns: int | None = None, bytes_filled: int | None = None) -> None:
        """Tell consumers how far the frame is: so many complete rows (columns), or bytes.

        Cheap where no consumer asked. What comes too soon after the last update is sent later, the newest only.
        """
        if not self._is_open:
            raise LocalProtocolError("the slot is committed or given up")
        named = {"rows": rows, "columns": columns, "bytes_filled": bytes_filled}
        highest = self._layout.extent_bytes
        given = [whole_number(name, value, highest) for name, value in named.items() if value is not None]
        if self._axis is None or len(given) != 1:
            raise LocalProtocolError(
                "claim(progress='rows' or 'columns'), then give one of rows, columns, bytes_filled"
            )
        if (rows is not None and self._axis != "rows") or (columns is not None and self._axis != "columns"):
            raise LocalProtocolError(f"this frame is claimed with progress={self._axis!r}")
        layout = self._layout
        filled = given[0]
        if bytes_filled is None:
            # The last row may end before its padding does.
            is_whole = given[0] == layout.shape[0 if self._axis == "rows" else 1]
            filled = layout.extent_bytes if is_whole else given[0] * layout.progress_stride_bytes
        if not 0 <= filled <= layout.extent_bytes:
            raise LocalProtocolError(f"{filled} bytes are filled, the frame has {layout.extent_bytes}")
        session = self._producer._session
        try:
            if self.seq is not None and session.progress.update(filled, session.fan_out):
                session.conductor.kick()
        except ValueError as error:
            raise LocalProtocolError(str(error)) from None

    def commit(self) -> int | None:
        """Publish; the seq, or None: dropped and counted."""
        if not self._is_open:
            raise LocalProtocolError("the slot is committed or given up already")
        self._close()
        producer, writing = self._producer, self._writing
        if self._drop is None and writing is not None and not producer._is_current(writing):
            self._forget_progress()
            writing.writer.abandon()
            self._drop = DropReason.DETACHED  # the lease went while the frame was being written
            self.seq = None
        if self._drop is not None or writing is None or self.seq is None:
            producer._dropped[self._drop or DropReason.DETACHED] += 1
            return None
        writing.publisher.commit(self._timestamp_ns, self._meta_version, self._trace_id, self._layout.extent_bytes)
        fan_out = producer._session.fan_out
        if self._axis is not None:
            producer._session.progress.complete(self._layout.extent_bytes, fan_out)
        if fan_out.descriptors:
            producer._tell_others(writing, self.seq, self._meta_version, self._trace_id)
        return self.seq

    def abandon(self) -> None:
        """Give it up: nobody sees the frame. Its seq is used again, unless consumers were told of its progress."""
        if not self._is_open:
            return
        self._close()
        if self._drop is None and self._writing is not None:
            is_known = self._forget_progress()
            self._writing.writer.abandon(is_told=is_known)
            if is_known:
                self._producer._dropped[DropReason.ABANDONED] += 1
        self.seq = None

    def _close(self) -> None:
        self._is_open = False
        self.array.flags.writeable = False

    def _forget_progress(self) -> bool:
        """Whether consumers know of the frame, which is not going to be committed."""
        return self._axis is not None and self._producer._session.progress.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abandon()
        elif self._is_open:
            self.commit()


class _Totals(msgspec.Struct, frozen=True):
    """Counters of epochs that are over."""

    written: int = 0
    bytes: int = 0
    unheard: int = 0
    back_pressured: int = 0

    def with_current(self, writing: Writing | None) -> _Totals:
        if writing is None:
            return self
        publisher = writing.publisher
        return _Totals(
            self.written + writing.writer.written,
            self.bytes + publisher.bytes,
            self.unheard + publisher.unheard,
            self.back_pressured + publisher.back_pressured,
        )


def _with_progress(layout: TensorLayout, axis: ProgressAxis, strides: tuple[int, ...] | None) -> TensorLayout:
    """B23: rows are dimension 0, columns dimension 1."""
    index = {"rows": 0, "columns": 1}.get(axis)
    if index is None:
        raise LocalProtocolError(f"progress = {axis!r}: expected 'rows' or 'columns'")
    unit = ProgressUnit.ROWS if axis == "rows" else ProgressUnit.COLUMNS
    try:
        stride = layout.byte_strides[index]
        return TensorLayout(layout.dtype, layout.major_order, layout.shape, strides or (), unit, stride)
    except (IndexError, ValueError) as error:
        raise LocalProtocolError(f"progress = {axis!r} of shape {layout.shape}: {error}") from None


def _scratch(layout: TensorLayout) -> Array:
    if layout.dtype == Dtype.BIT:
        return np.empty((layout.extent_bytes,), np.uint8)
    order: Order = "F" if layout.major_order == MajorOrder.COLUMN else "C"
    return np.empty(layout.shape, numpy_dtype(layout.dtype), order)


def _links(trace_id: int, parents: Iterable[int]) -> tuple[Parent, ...]:
    """Checked before the frame goes out: what is wrong with them must not cost the conductor a turn."""
    try:
        given = tuple(parents)
    except TypeError:
        raise LocalProtocolError(f"parents = {parents!r:.80}: expected trace ids") from None
    if not given:
        return ()
    if not trace_id:
        raise LocalProtocolError("parents= needs a trace_id= that they lead to")
    if len(given) > MAX_PARENTS or any(type(parent) is not int or not 0 < parent < 2**64 - 1 for parent in given):
        raise LocalProtocolError(f"parents: expected at most {MAX_PARENTS} trace ids from 1 to 2^64 - 2")
    return tuple(Parent(trace_id=parent) for parent in given)
