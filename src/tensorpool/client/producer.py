# SPDX-License-Identifier: Apache-2.0
"""Publishing frames: copy an array in, or fill a slot in place.

A producer never waits for anybody. It survives the loss of its lease, of the driver and of the media driver; meanwhile
its frames are dropped and counted as DETACHED. A frame that no pool can ever hold is counted and raises FrameTooLarge.
Wire §8.3, §9, §10.2, §15.18; decisions B4, B12, B17, B26.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

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
from tensorpool.client.mapped_epoch import EpochWriter
from tensorpool.client.metadata import NUMPY_DTYPE, Metadata, with_numpy_dtype
from tensorpool.client.producer_session import ProducerOptions, ProducerSession
from tensorpool.client.session import State
from tensorpool.client.slot import ProgressAxis, Slot, with_progress
from tensorpool.client.trace_ids import Traced, parent_ids
from tensorpool.client.wall_clock import ClockPair
from tensorpool.control.provisioning import describe
from tensorpool.errors import Closed, FrameTooLarge, LocalProtocolError, RingRefused, TransportError
from tensorpool.shm.arrays import Array, Order, layout_for, layout_of, payload_of
from tensorpool.shm.carried_dtypes import CarriedDtype, carried_dtype, carried_named
from tensorpool.wire.control import DataSourceMeta, Dtype
from tensorpool.wire.trace import Parent, TraceLinkSet


class ProducerStats(msgspec.Struct, frozen=True):
    """What became of the frames so far. `published` + the sum of `dropped` is every frame that was given."""

    published: int
    bytes: int
    dropped: dict[DropReason, int]
    descriptors_unheard: int  # published while the descriptor stream had no subscriber
    descriptors_lost: int  # published, but the descriptor log was full: consumers count a gap
    epochs: int
    private_streams_declined: int = 0  # requests of consumers for streams of their own
    consumers_beyond_limit: int = 0  # messages of consumers that were not noted: too many are known
    untraced_parents: int = 0  # frames in `parents` that have no trace id: they are not linked
    metadata_lost: int = 0  # messages, trace links among them, that the metadata log had no room for


class Producer(ProducerBase):
    """Publishes the frames of one stream. Made by `Client.producer`.

    >>> with client.producer("camera/front", create=True) as producer:     # doctest: +SKIP
    ...     seq = producer.publish(image)                                  # None: dropped and counted
    """

    def __init__(
        self,
        session: ProducerSession,
        close: Callable[[ProducerSession], None],
        wait: Callable[[ProducerSession, Callable[[], bool], float | None], bool],
        options: ProducerOptions,
    ) -> None:
        super().__init__(session.route)
        self._session = session
        self._close = close
        self._wait = wait
        self._options = options
        self._on_state = options.on_state
        self._dropped: Counter[DropReason] = Counter()
        self._totals = _Totals()
        self._untraced_parents = 0
        self._carried: CarriedDtype | None = None  # what the present metadata say about the dtype
        self._said = DataSourceMeta(stream_id=1, meta_version=0, timestamp_ns=0), ""  # the present metadata
        self._writer: EpochWriter | None = None

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
        """Of the memory that frames go to; None while there is none."""
        writer = self._session.writer
        return None if writer is None else writer.epoch

    @property
    def producer_id(self) -> int:
        """Under which the driver and consumers know it."""
        return self._session.attachment.client_id

    @property
    def lease_id(self) -> int | None:
        """Of the lease that it holds; None while there is none."""
        return self._session.attachment.lease_id

    @property
    def node_id(self) -> int:
        """Who makes the trace ids of its frames; it may change with the lease."""
        return self._session.attachment.node_id

    @property
    def is_node_id_derived(self) -> bool:
        """Whether the driver gave no node id: this one is of the producer's id, and another client may have it too."""
        return self._session.attachment.is_node_id_derived

    @property
    def next_seq(self) -> int:
        """The seq of the next frame; it starts at 0 in every epoch."""
        writer = self._session.writer
        return 0 if writer is None else writer.ring_writer.next_seq

    @property
    def max_frame_bytes(self) -> int:
        """The largest frame that fits a pool; 0 while there is no memory."""
        writer = self._session.writer
        return 0 if writer is None else writer.max_frame_bytes

    @property
    def state(self) -> State:
        """What it can do at the moment."""
        return self._session.state

    @property
    def is_active(self) -> bool:
        """Whether frames flow."""
        return self._session.state is State.ACTIVE

    @property
    def consumers(self) -> int:
        """How many consumers have this epoch mapped and reported so lately."""
        return self._session.consumers_ready()

    @property
    def consumers_met(self) -> int:
        """How many consumers have come so far, those included that have gone: it grows when one needs metadata."""
        return self._session.consumers.met

    @property
    def epoch_writer(self) -> EpochWriter | None:
        """What native code publishes with, until its `until_ns`; None while there is no memory. Ask before each use."""
        writer = self._session.writer
        if writer is None or writer is not self._writer or monotonic_ns() >= writer.until_ns:
            writer = self._renew()
        return writer

    @property
    def stats(self) -> ProducerStats:
        """What became of the frames so far."""
        totals = self._totals.with_current(self._writer)
        return ProducerStats(
            published=totals.written,
            bytes=totals.bytes,
            dropped=dict(self._dropped),
            descriptors_unheard=totals.unheard,
            descriptors_lost=totals.back_pressured,
            epochs=self._session.epochs,
            private_streams_declined=self._session.consumers.counts["private_streams_declined"],
            consumers_beyond_limit=self._session.consumers.counts["consumers_beyond_limit"],
            untraced_parents=self._untraced_parents,
            metadata_lost=self._session.metadata_lost,
        )

    # --- frames

    publish = ProducerBase.publish  # native for an array like the one before; every other call goes to _publish

    def publish_many(self, arrays: Iterable[npt.ArrayLike]) -> int:
        """Publish several arrays with one call and one wake-up of the consumers; returns how many were published.

        >>> producer.publish_many([sample, sample])                       # a list of arrays     # doctest: +SKIP
        >>> producer.publish_many(np.zeros((100, 64), np.float32))        # a frame per row      # doctest: +SKIP

        For many small frames: of arrays that look like the one before each costs a fraction of a `publish`. Frames
        without a lease are dropped and counted. More at once than the ring has slots overwrite each other. Raises like
        `publish`; what came before the array at fault is published then.
        """
        try:
            given = arrays if type(arrays) is np.ndarray and arrays.ndim > 0 else list(arrays)
        except TypeError:
            text = f"arrays = {arrays!r:.80}: expected a list of arrays, or one with a frame per row"
            raise LocalProtocolError(text) from None
        index = published = 0
        while True:
            same = self._publish_same(given, index)
            index, published = index + same, published + same
            if index >= len(given):
                return published
            published += self.publish(given[index]) is not None
            index += 1

    def _publish(
        self,
        array: npt.ArrayLike,
        *,
        timestamp_ns: int | None = None,
        meta_version: int | None = None,
        trace_id: int | None = None,
        parents: Iterable[Traced | int] = (),
        seq: int | None = None,
        dtype: npt.DTypeLike | Dtype | None = None,
        shape: tuple[int, ...] | None = None,
        keep_strides: bool = False,
    ) -> int | None:
        """`publish` where the array or its options differ from the call before; see `help(Producer.publish)`."""
        session = self._session
        timestamp_ns, meta_version, trace_id, seq = frame_numbers(timestamp_ns, meta_version, trace_id, seq)
        trace_id, links = self._trace(trace_id, parents)
        writer = session.writer
        if writer is None or writer is not self._writer or monotonic_ns() >= writer.until_ns:
            writer = self._renew()
            if writer is None:
                self._dropped[DropReason.DETACHED] += 1
                return None
        is_usual = dtype is None and shape is None and not keep_strides
        data: Array = array if type(array) is np.ndarray else np.asarray(array)
        carried = None if dtype is Dtype.BIT or dtype is Dtype.BYTES else carried_dtype(data.dtype)
        if is_usual and not (data.flags.forc if carried is None or not carried.is_pair else data.flags.c_contiguous):
            return self._publish_strided(data, timestamp_ns, meta_version, trace_id, links, seq)
        if carried is not None:
            if dtype is not None and carried_dtype(dtype) is not carried:
                raise LocalProtocolError(f"dtype = {dtype!r} for an array of {data.dtype}: use astype()")
            data, dtype = carried.encode(data), None
        if is_usual:
            layout = layout_of(data)
        else:
            layout, data = payload_of(array if carried is None else data, dtype, shape, keep_strides)
        version = self._version(meta_version, carried, layout)
        number = writer.publish(layout, data, timestamp_ns, version, trace_id, seq, is_usual and carried is None)
        if number is None:
            raise self._too_large(writer, layout.extent_bytes)
        if links or not session.route.is_plain:
            self._tell_others(writer, number, version, trace_id, links)
        return number

    def claim(
        self,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike | Dtype = np.uint8,
        order: Order = "C",
        *,
        timestamp_ns: int | None = None,
        meta_version: int | None = None,
        trace_id: int | None = None,
        parents: Iterable[Traced | int] = (),
        progress: ProgressAxis | None = None,
        seq: int | None = None,
        strides: tuple[int, ...] | None = None,
    ) -> Slot:
        """A slot to fill in place: no copy at all.

        >>> with producer.claim((1080, 1920, 3), np.uint8) as slot:     # doctest: +SKIP
        ...     camera.read_into(slot.array)                            # published here, given up on an exception

        Without a lease you get an array all the same, so that your loop goes on; the frame is dropped, and counted,
        when the slot is left. Raises FrameTooLarge for what no pool of the stream holds. `progress` lets
        `slot.progress(rows=…)` tell consumers about partial frames. `trace_id` and `parents` are those of `publish`.
        `strides`, in bytes, are for devices that pad their rows: `claim((1080, 1900), strides=(2048, 1))`.
        """
        timestamp_ns, meta_version, trace_id, seq = frame_numbers(timestamp_ns, meta_version, trace_id, seq)
        trace_id, links = self._trace(trace_id, parents)
        carried = carried_dtype(dtype)
        if carried is not None:
            shape, dtype, strides = carried.on_wire(shape, order, strides)
        layout = layout_for(shape, dtype, order, strides)
        if progress is not None:
            layout = with_progress(layout, progress, strides)
        version = self._version(meta_version, carried, layout)
        writer = self._session.writer
        if writer is None or writer is not self._writer or monotonic_ns() >= writer.until_ns:
            writer = self._renew()
        return Slot(self, writer, layout, timestamp_ns, version, trace_id, links, progress, seq, carried)

    def check_fits(self, nbytes: int) -> None:
        """Raises FrameTooLarge for frames that no pool of the stream holds; for sources that know their size."""
        whole_number("nbytes", nbytes, 2**63 - 1)
        writer = self._session.writer
        if writer is not None and nbytes > writer.max_frame_bytes:
            raise self._too_large(writer, nbytes)

    # --- about the frames

    def set_metadata(self, attributes: Mapping[str, Any], *, tags: Iterable[str] = (), summary: str = "") -> int:
        """Say what frames mean from now on; returns their meta_version.

        Text and bytes travel as they are, everything else as JSON. Raises LocalProtocolError for what cannot travel.
        """
        session = self._session
        session.check_process()
        name = None if self._carried is None else self._carried.name
        message = metadata_message(
            session.config, self.name, attributes, tags, summary, self._next_version(), self._stamp_ns(), name
        )
        self._say(message, summary)
        return message.meta_version

    def repeat_metadata(self, message: DataSourceMeta, *, summary: str = "") -> None:
        """Say what another producer said, under its meta_version and at its time: for replays.

        Frames are of that version from now on. Raises LocalProtocolError for a version that no frame can carry.
        """
        session = self._session
        session.check_process()
        if not 1 <= message.meta_version <= MAX_META_VERSION:
            raise LocalProtocolError(f"meta_version {message.meta_version}: expected 1 to 2^32 - 2")
        check_metadata(session.config, self.name, message, summary)
        self._carried = carried_named(Metadata.of(message).attributes.get(NUMPY_DTYPE))
        self._say(message, summary)

    def set_clock(self, pair: ClockPair | None) -> None:
        """Say by which clock the timestamps of this epoch's frames are, or with None that it is not known.

        For those who publish another producer's frames, attached with `has_own_clock=False`. It is true of the present
        epoch; call it again for the next.
        """
        session = self._session
        session.check_process()
        if not isinstance(pair, ClockPair | None):
            raise LocalProtocolError(f"clock {pair!r}: expected a ClockPair or None")
        session.conductor.order(lambda now_ns: session.set_clock(pair))

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
        return self._wait(
            session, lambda: session.consumers_ready() >= wanted and not session.is_back_pressured, within
        )

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

    def __del__(self) -> None:
        session = getattr(self, "_session", None)
        if session is not None:
            session.on_unreferenced(self)

    def __repr__(self) -> str:
        about = f"<Producer of {self._session.stream_label}: {self.state.lower()}"
        return f"{about}, epoch {self.epoch}, next seq {self.next_seq}, {self.consumers} reading>"

    # --- inside

    def _is_open_as(self, stream_id: int, name: str | None) -> bool:
        """Whether a caller who asks for that stream, by id or by name, means this one."""
        is_same = self.stream_id == stream_id if name is None else self.name == name
        return is_same and not self._session.is_closed and not self._session.is_ending

    def _check_options(self, options: ProducerOptions) -> None:
        """Raises LocalProtocolError where it was opened with other arguments."""
        mine, asked = msgspec.structs.asdict(self._options), msgspec.structs.asdict(options)
        different = [f"{key}={mine[key]!r:.80}" for key in mine if mine[key] != asked[key]]
        if different:
            raise LocalProtocolError(
                f"this client has {self._session.stream_label} open already, with {', '.join(different)}; close() that "
                "producer first, or ask for it with the same arguments"
            )

    def _renew(self) -> EpochWriter | None:
        """The epoch changed, or is gone: look again, and tell the user."""
        session = self._session
        session.check_process()
        if session.is_closed:
            raise Closed(f"the producer of stream {self.name or self.stream_id} is closed")
        if session.events:
            session.take_events(self._on_state)
        current = session.writer
        if current is not self._writer:
            self._retire()
            self._writer = current
            if current is not None and self._options.release_gil_from_bytes is not None:
                current.ring_writer.release_gil_from_bytes = self._options.release_gil_from_bytes
            session.adopt(current)
        if current is not None and monotonic_ns() >= current.until_ns:
            session.conductor.wake()  # we stood still for longer than the lease lasts: it is about to find out
            return None
        return current

    def _check_ring(self) -> None:
        """Raises RingRefused, closed, where the memory is less than what was asked for: it was taken meanwhile."""
        asked, writer = self._options.ring, self._session.writer
        if asked is not None and writer is not None and not asked.is_met_by(writer.ring.spec):
            has = describe(writer.ring.spec)
            self.close()
            raise RingRefused(self.name or self.stream_id, f"it has {has}, less than the {asked} asked for; try again")

    def _next_version(self) -> int:
        version = self._session.route.meta_version + 1
        if version > MAX_META_VERSION:
            raise LocalProtocolError("meta_version is used up; attach anew")
        return version

    def _stamp_ns(self) -> int:
        return self._session.stamp_ns(self._session.conductor.clock.monotonic_ns())

    def _say(self, message: DataSourceMeta, summary: str) -> None:
        session = self._session
        self._said = message, summary
        session.route.meta_version = message.meta_version
        session.conductor.order(lambda now_ns: session.set_metadata(message, summary))

    def _version(self, meta_version: int | None, carried: CarriedDtype | None, layout: TensorLayout) -> int:
        """The meta_version of a frame. One that carries another dtype than the frames before gets new metadata."""
        session, known = self._session, self._carried
        if meta_version is not None:
            if carried is not None and (carried is not known or meta_version != session.route.meta_version):
                raise LocalProtocolError(f"meta_version = {meta_version}: frames of {carried.name} choose their own")
            return meta_version
        is_other = (
            carried is not None if known is None else known.fits(layout.dtype, layout.shape) or carried is not None
        )
        if is_other and carried is not known:
            session.check_process()
            message, summary = self._said
            message = with_numpy_dtype(message, None if carried is None else carried.name)
            message = msgspec.structs.replace(message, meta_version=self._next_version(), timestamp_ns=self._stamp_ns())
            check_metadata(session.config, self.name, message, summary)
            self._say(message, summary)
            self._carried = carried
            if self._writer is not None:
                self._writer.forget_layout()  # an array like the one before is of another version now
        return session.route.meta_version

    def _too_large(self, writer: EpochWriter, nbytes: int) -> FrameTooLarge:
        """WIRE §9: such a frame is dropped at once; we count it and say so."""
        self._dropped[DropReason.NO_POOL] += 1
        return FrameTooLarge(self._session.stream_label, nbytes, writer.max_frame_bytes)

    def _is_current(self, writer: EpochWriter) -> bool:
        return self._session.writer is writer and monotonic_ns() < writer.until_ns

    def _retire(self) -> None:
        self._session.adopt(None)
        self._totals = self._totals.with_current(self._writer)
        self._writer = None

    def _publish_strided(
        self,
        data: Array,
        timestamp_ns: int | None,
        meta_version: int | None,
        trace_id: int,
        links: tuple[Parent, ...],
        seq: int | None,
    ) -> int | None:
        parents = [link.trace_id for link in links]
        with self.claim(
            data.shape,
            data.dtype,
            timestamp_ns=timestamp_ns,
            meta_version=meta_version,
            trace_id=trace_id,
            parents=parents,
            seq=seq,
        ) as slot:
            np.copyto(slot.array, data)
        return slot.seq

    def _trace(self, trace_id: int | None, parents: Iterable[Traced | int]) -> tuple[int, tuple[Parent, ...]]:
        """The trace id of a frame, 0 for none, and what to link it to. Checked before anything is published."""
        links, untraced = ((), 0) if type(parents) is tuple and not parents else parent_ids(parents)
        if not links and not untraced:
            return self._session.route.new_trace_id() if trace_id is None else trace_id, ()
        if trace_id == 0 and links:
            raise LocalProtocolError(
                "trace_id = 0: a frame with parents= has one; leave it out, and it is made for you"
            )
        self._untraced_parents += untraced
        return self._session.trace_ids.next() if trace_id is None else trace_id, links

    def _tell_others(
        self, writer: EpochWriter, seq: int, meta_version: int, trace_id: int, links: tuple[Parent, ...]
    ) -> None:
        epoch, now_ns = writer.epoch, monotonic_ns()
        for stream in self._session.consumers.fan_out.descriptors:
            if stream.is_due(now_ns):
                try:
                    stamp_ns = now_ns if self._session.with_publish_time else None
                    stream.publication.offer_descriptor(
                        self.stream_id, epoch, seq, stamp_ns, meta_version or None, trace_id
                    )
                except (Closed, TransportError):
                    continue  # the conductor closed it, or notices by itself
        if links:
            self._link_parents(writer, seq, trace_id, links)

    def _link_parents(self, writer: EpochWriter, seq: int, trace_id: int, links: tuple[Parent, ...]) -> None:
        session = self._session
        message = TraceLinkSet(
            stream_id=self.stream_id,
            epoch=writer.epoch,
            seq=seq,
            trace_id=trace_id,
            parents=links,
        )
        session.conductor.order(lambda now_ns: session.link(message))


class _Totals(msgspec.Struct, frozen=True):
    """Counters of epochs that are over."""

    written: int = 0
    bytes: int = 0
    unheard: int = 0
    back_pressured: int = 0

    def with_current(self, writer: EpochWriter | None) -> _Totals:
        if writer is None:
            return self
        return _Totals(
            self.written + writer.ring_writer.written,
            self.bytes + writer.bytes,
            self.unheard + writer.unheard,
            self.back_pressured + writer.back_pressured,
        )
