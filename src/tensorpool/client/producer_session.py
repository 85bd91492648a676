# SPDX-License-Identifier: Apache-2.0
"""A producer's duties beside publishing: memory for the lease, QoS, metadata, and the wishes of its consumers.

Runs on the conductor; what the publishing thread needs is handed over as whole objects (`writer`, `consumers.fan_out`).
Wire §5, §10.1.2, §10.1.3, §10.2.2, §10.3, §10.4.2; Driver Model §4.12.2; decisions C20, E22-E28, E43, E44.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tensorpool import aeron
from tensorpool._core import Route, TraceIds
from tensorpool.client import attachment as lease
from tensorpool.client.conductor import ClientConductor
from tensorpool.client.known_consumers import KnownConsumers, ProgressSender
from tensorpool.client.mapped_epoch import EpochWriter
from tensorpool.client.mapping import ActivityDuty
from tensorpool.client.merge_maps import MergeMap, MergeMapRequest
from tensorpool.client.metadata import MetadataSender
from tensorpool.client.names import preferred_id
from tensorpool.client.session import Session, State, StateChange
from tensorpool.client.streams import ClientStreams
from tensorpool.client.trace_ids import MAX_NODE_ID
from tensorpool.client.wall_clock import ClockPair, EpochClock
from tensorpool.control.provisioning import RingRequest, describe
from tensorpool.errors import (
    Closed,
    TensorPoolError,
    TransportError,
)
from tensorpool.shm import MappedRing
from tensorpool.shm.announced import Regions
from tensorpool.wire.attach import AttachResponse
from tensorpool.wire.control import (
    ConsumerHello,
    DataSourceAnnounce,
    DataSourceMeta,
    QosConsumer,
    QosProducer,
    ShmPoolAnnounce,
)
from tensorpool.wire.driver import ResponseCode
from tensorpool.wire.merge import SequenceMergeMapRequest
from tensorpool.wire.trace import TraceLinkSet


class ProducerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `Client.producer` that a producer keeps to."""

    on_state: Callable[[StateChange], object] | None = None
    release_gil_from_bytes: int | None = None
    with_publish_time: bool = False
    is_relay: bool = False
    has_own_clock: bool = True
    ring: RingRequest | None = None  # at least
    trace_ids: bool = False  # for every frame


class ProducerSession(Session):
    """The conductor's side of a `Producer`.

    A relay publishes another host's frames: the bridge forwards their metadata, and its consumers get no
    streams of their own (Bridge §4, §7.1).
    """

    def __init__(
        self,
        conductor: ClientConductor,
        spec: lease.AttachSpec,
        name: str | None,
        options: ProducerOptions = ProducerOptions(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(conductor, spec, name)
        self._has_own_clock = options.has_own_clock
        self._is_relay = options.is_relay
        self._ring = options.ring
        self.writer: EpochWriter | None = None
        self.progress = ProgressSender()
        self.route = Route()
        self.trace_ids = TraceIds()
        self.route.trace_ids = self.trace_ids if options.trace_ids else None
        self.epochs = 0
        self.with_publish_time = options.with_publish_time
        self._is_drivers_choice = name is not None and not conductor.config.driver.stream_id_range
        self.consumers = KnownConsumers(
            self.config, conductor.clock, self.log, self.route, self.send, is_relay=options.is_relay
        )
        self._descriptors: aeron.Publication | None = None
        self._metadata = MetadataSender()
        self._activity = ActivityDuty()
        self._merge_map: MergeMap | None = None  # of a joined stream
        self._is_map_due = False
        self._next_ns = 0

    # --- asked by the user's side

    def adopt(self, writer: EpochWriter | None) -> None:
        """From now on frames go there, until that memory is lost."""
        self.route.publisher = None if writer is None else writer
        if self.writer is not writer:  # lost meanwhile, by the conductor's thread
            self.route.publisher = None

    def consumers_ready(self) -> int:
        """How many consumers have this epoch mapped and reported so lately."""
        writer = self.writer
        return 0 if writer is None else self.consumers.count_in(writer.epoch)

    @property
    def is_back_pressured(self) -> bool:
        """Whether a descriptor would be lost now: a log takes none for a moment after its first reader has come."""
        writer = self.writer
        try:
            return writer is not None and writer.is_back_pressured
        except (Closed, TransportError):
            return True  # the streams is lost; the conductor notices

    def is_read_up_to(self, seq: int, since_ns: int) -> bool:
        """Whether every consumer of this epoch has reported this frame or a later one."""
        writer = self.writer
        return writer is None or self.consumers.have_read(writer.epoch, seq, since_ns)

    def set_metadata(self, message: DataSourceMeta, summary: str) -> None:
        """Conductor: from now on this is what frames of its version mean."""
        self._metadata.set(message, summary)

    def add_blob(self, version: int, blob_type: int, data: bytes, checksum: bool) -> None:
        """Conductor: send now, and again to consumers that come later."""
        self._metadata.add_blob(version, blob_type, data, checksum)

    def set_merge_map(self, merge_map: MergeMap) -> None:
        """Conductor: the rules by which the frames of this stream are joined from others."""
        self._merge_map, self._is_map_due = merge_map, True

    def on_merge_map_request(self, request: MergeMapRequest) -> None:
        """A consumer asks for the rules of this stream; several questions in one turn get one answer."""
        by = "seq" if isinstance(request, SequenceMergeMapRequest) else "time"
        if self._merge_map is not None and self._merge_map.by == by:
            self._is_map_due = True

    def set_clock(self, pair: ClockPair | None) -> None:
        """Conductor: the timestamps of this epoch's frames are by another host's clock."""
        self._metadata.set_clock(EpochClock(pair))

    def link(self, message: TraceLinkSet) -> None:
        """Conductor: send on the metadata stream, in order, when there is room."""
        self._metadata.link(message)

    @property
    def metadata_lost(self) -> int:
        """Messages that were given up for want of room."""
        return self._metadata.given_up

    # --- the session

    def is_resolved(self, now_ns: int) -> bool:
        """A name has one place: where a live producer of that name is, else the id hashed from its name."""
        if self.name is None or self.attachment.spec.stream_id != 0 or self._is_drivers_choice:
            return True
        ids = self.config.driver.stream_id_range
        known = self.conductor.names.find(self.name, now_ns)
        stream_id = known[0].stream_id if known else preferred_id(self.name, ids)
        self.attachment.spec = msgspec.structs.replace(self.attachment.spec, stream_id=stream_id)
        return True

    def _refused(self, refusal: lease.Refused) -> None:
        spec = self.attachment.spec
        now_ns = self.conductor.clock.monotonic_ns()
        if self.name is not None and spec.create and spec.stream_id:
            owner = self.conductor.names.owner(spec.stream_id, now_ns)
            if refusal.code is ResponseCode.INVALID_PARAMS:
                # The driver's range is not the one we know: let it choose.
                self._is_drivers_choice = True
                self.attachment.spec = msgspec.structs.replace(spec, stream_id=0)
                return
            if owner is not None and owner != self.name:
                ids = self.config.driver.stream_id_range
                following = spec.stream_id + 1 if spec.stream_id + 1 in ids else ids.first
                self.attachment.spec = msgspec.structs.replace(spec, stream_id=following)
                return
        super()._refused(refusal)

    def open_streams(self, streams: ClientStreams) -> None:
        self._descriptors = streams.publish(self.config.driver.descriptor)
        self.consumers.streams = streams

    def close_streams(self) -> None:
        self._descriptors = None
        self.consumers.forget_all()

    def on_attached(self, response: AttachResponse, now_ns: int) -> None:
        regions = Regions.of(response)
        self.attachment.spec = msgspec.structs.replace(self.attachment.spec, stream_id=regions.stream_id)
        self._set_node()
        self.start_mapping(regions, writable=True)

    def _set_node(self) -> None:
        """Trace ids hold 16 bits of a node id: of a longer one they say that others may have the same."""
        node_id = self.attachment.node_id
        is_cut = node_id != node_id & MAX_NODE_ID
        self.trace_ids.set_node(node_id & MAX_NODE_ID, is_derived=is_cut or self.attachment.is_node_id_derived)

    def on_lost(self, reason: str) -> None:
        self.stop_mapping()
        self.writer = None
        self.route.publisher = None

    def on_announce(self, announce: ShmPoolAnnounce, now_ns: int, wall_ns: int) -> None:
        super().on_announce(announce, now_ns, wall_ns)
        if self.writer is not None and announce.epoch == self.writer.epoch:
            self._activity.on_announce()

    def do_work(self, now_ns: int) -> int:
        work = super().do_work(now_ns)
        if self.writer is not None:
            self.writer.until_ns = self.attachment.deadline_ns
        if self.writer is not None and self.writer.is_broken:
            raise TransportError("the descriptor log is closed: the media driver is gone")
        if self.streams is None or not self.attachment.is_attached:
            return work
        self._keep_active(now_ns)
        self.consumers.do_work()
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + self.config.announce_period_ns
            self._send_periodic(now_ns)
            self.consumers.forget_stale(now_ns)
            self._is_map_due = self._merge_map is not None
            work += 1
        if self._is_map_due and self._merge_map is not None and self.writer is not None:
            self._is_map_due = False
            self.send(self._merge_map.announce(self.stream_id, self.writer.epoch))
        return work + self._metadata.flush(self._offer_metadata, now_ns) + self.progress.flush(self.consumers.fan_out)

    @property
    def is_restless(self) -> bool:
        """FrameProgress has to be sent within a fraction of a millisecond."""
        return super().is_restless or self.progress.is_waiting(self.consumers.fan_out)

    def is_due(self, now_ns: int) -> bool:
        return now_ns >= self._next_ns or self._metadata.is_due(now_ns) or super().is_due(now_ns)

    # --- consumers

    def on_hello(self, hello: ConsumerHello, now_ns: int) -> None:
        if self.consumers.on_hello(hello, now_ns):
            self._next_ns = 0
            self._metadata.welcome()

    def on_qos_consumer(self, qos: QosConsumer, now_ns: int) -> None:
        self.consumers.on_qos(qos, now_ns)
        with self.changed:
            self.changed.notify_all()

    # --- inside: memory

    def on_mapping_failed(self, regions: Regions, error: TensorPoolError, now_ns: int) -> None:
        self.failure = error
        self.set_state(State.WAITING, str(error))
        self._perform(self.attachment.on_mapping_failed(now_ns), now_ns)

    def on_mapped(self, regions: Regions, ring: MappedRing, now_ns: int) -> None:
        if not self.attachment.is_attached or self._descriptors is None:
            return
        until_ns = self.attachment.deadline_ns
        self.route.publisher = None  # the producer looks, and adopts the new one
        self.writer = EpochWriter(ring, self._descriptors, until_ns, with_publish_time=self.with_publish_time)
        self.epochs += 1
        if self._ring is not None and not self._ring.is_met_by(ring.spec):  # such as of a driver that was restarted
            self.log.warning("ring_smaller_than_asked", asked=str(self._ring), found=describe(ring.spec))
        self._activity = ActivityDuty()
        self._next_ns = 0
        if not self._is_relay:
            self._describe(ring.epoch)
        self.set_state(State.ACTIVE, "attached", ring.epoch)

    def _keep_active(self, now_ns: int) -> None:
        """C9: refresh the activity stamp where the driver leaves that to us."""
        if self.writer is None:
            return
        ring = self.writer.ring
        if self._activity.is_due(ring.activity_timestamp_ns, now_ns, self.config.announce_period_ns):
            stamp_ns = self.stamp_ns(now_ns)
            ring.refresh_activity(stamp_ns)
            self._activity.on_refreshed(stamp_ns, now_ns)

    # --- inside: messages that are sent

    def _send_periodic(self, now_ns: int) -> None:
        writer = self.writer
        if writer is None or self.streams is None:
            return
        producer_id, epoch, stream_id = self.attachment.client_id, writer.epoch, self.stream_id
        current = max(writer.ring_writer.next_seq - 1, 0)
        self._offer(
            self.streams.qos,
            QosProducer(stream_id=stream_id, producer_id=producer_id, epoch=epoch, current_seq=current).encode(),
        )
        self._metadata.repeat()

    def _describe(self, epoch: int) -> None:
        """Say who we are and what frames of this epoch mean."""
        self._metadata.begin(
            DataSourceAnnounce(
                stream_id=self.stream_id,
                producer_id=self.attachment.client_id,
                epoch=epoch,
                meta_version=self.route.meta_version,
                name=self.name or "",
                summary=self._metadata.summary,
            ),
            EpochClock(self._now_by_both_clocks() if self._has_own_clock else None),
            self.stamp_ns(self.conductor.clock.monotonic_ns()),
        )

    def _now_by_both_clocks(self) -> ClockPair:
        clock = self.conductor.clock
        before_ns, utc_ns, after_ns = clock.monotonic_ns(), clock.realtime_ns(), clock.monotonic_ns()
        return ClockPair((before_ns + after_ns) // 2, utc_ns)

    def _offer_metadata(self, data: bytes) -> bool:
        """Whether a message is handled: in the log, or without a subscriber."""
        assert self.streams is not None
        result = self._offer(self.streams.metadata, data)
        return bool(result) or result is aeron.OfferResult.NOT_CONNECTED

    def _offer(self, publication: aeron.Publication, data: bytes) -> aeron.OfferResult:
        """§15.11: what is lost here comes again with the next period."""
        try:
            return publication.offer(data)
        except (TransportError, Closed):
            return aeron.OfferResult.NOT_CONNECTED
