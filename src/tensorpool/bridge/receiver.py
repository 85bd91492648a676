# SPDX-License-Identifier: Apache-2.0
"""The receiving end: chunks become frames of local streams, and messages forwarded beside them are published here.

`Reception` listens for all mappings that a bridge receives; each `Receiver` is the exclusive producer of one
destination. Chunks never pass through Python: `_core.ChunkRouter` takes them from Aeron and hands them to the
`_core.Assembler` of their stream, which writes them to the slot. A new epoch of the source becomes a new local epoch by
giving the lease back and attaching anew; frames are dropped, and counted, until that is done.
Bridge §4, §5, §6, §7, §8, §9; decisions G4-G7, G10-G13, G15-G17, G20, G22, G25, G28.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from tensorpool import aeron
from tensorpool._core import Assembler, ChunkRouter, SessionPin
from tensorpool.aeron.adapter import MessageAdapter
from tensorpool.bridge.advice import Advice
from tensorpool.bridge.assembly import SourceEpoch, SourceMetadata, SourcePool, Verdict
from tensorpool.bridge.background_attach import BackgroundAttach
from tensorpool.bridge.checksum import FrameChecksum
from tensorpool.bridge.config import BridgeConfig, MappingConfig
from tensorpool.bridge.destinations import Destinations
from tensorpool.bridge.metrics import Counters, Key
from tensorpool.bridge.sessions import FollowedSession, Origin, Sources
from tensorpool.bridge.tables import TableMessage
from tensorpool.channel import ChannelUri, Endpoint
from tensorpool.client import Client, Producer
from tensorpool.client.mapped_epoch import EpochWriter
from tensorpool.client.metadata import TablePace
from tensorpool.clock import Clock
from tensorpool.errors import RemoteProtocolError, TensorPoolError
from tensorpool.logs import get_logger
from tensorpool.shm.announced import Regions
from tensorpool.wire import Message
from tensorpool.wire.control import (
    DataSourceAnnounce,
    DataSourceMeta,
    FrameProgress,
    MetaBlobAnnounce,
    MetaBlobChunk,
    MetaBlobComplete,
    QosConsumer,
    QosProducer,
    ShmPoolAnnounce,
)
from tensorpool.wire.trace import TraceLinkSet

CONTROL_LIMIT: Final = 64
SECOND: Final = 1_000_000_000
DAY: Final = 86_400 * SECOND
LEAST_JUMP: Final = 1024  # by which a seq may be ahead at any time, however small the source's ring is
MAX_UNTOLD: Final = 256
MAX_EARLY: Final = 16  # metadata that came before the first announce
METADATA_TERM: Final = "1m"
MAX_MESSAGE_BYTES: Final = (1 << 20) // 8  # what a log of that term takes; nothing longer could be published here
CONTROL_TERM: Final = "64k"
NETWORK_BUFFERS: Final = {"so-rcvbuf": "4m", "rcv-wnd": "2m"}

type Metadata = DataSourceAnnounce | DataSourceMeta | MetaBlobAnnounce | MetaBlobChunk | MetaBlobComplete | TraceLinkSet


class Reception:
    """Everything that a bridge receives, on one subscription each for chunks, control and metadata.

    `unrouted` counts what belongs to no mapping.
    """

    def __init__(
        self,
        config: BridgeConfig,
        client: Client,
        transport: aeron.Client,
        destinations: Destinations,
        counters: Mapping[MappingConfig, Counters],
        unrouted: Counters,
        clock: Clock,
        mac_key: bytes = b"",
    ) -> None:
        section = config.bridge
        self._unrouted = unrouted
        self._clock = clock
        self._router = ChunkRouter(section.allow_from)
        self._control_sources = Sources(section.allow_from, is_ipc=section.receive_control.uri.is_ipc)
        self._metadata_sources = Sources(section.allow_from, is_ipc=False)
        self._streams: list[Callable[[], None]] = []
        self.receivers: tuple[Receiver, ...] = ()
        self._metadata: aeron.Subscription | None = None
        self._now_ns = 0
        self._control_adapter = self._make_control_adapter()
        self._metadata_adapter = self._make_metadata_adapter()
        if section.forward_traces:
            self._metadata_adapter.add(TraceLinkSet, self.on_metadata)
        self._control_filter = self._control_adapter.make_filter(MAX_MESSAGE_BYTES)
        self._metadata_filter = self._metadata_adapter.make_filter(MAX_MESSAGE_BYTES)
        unrouted.include(self._unrouted_counts)
        try:
            self._payload = self._subscribe(transport, section.receive_payload)
            self._control = self._subscribe(transport, section.receive_control, self.on_control_image)
            if section.receive_metadata is not None:
                self._metadata = self._subscribe(transport, section.receive_metadata, self.on_metadata_image)
            for mapping in config.received:
                receiver = Receiver(mapping, config, client, transport, destinations, counters[mapping], mac_key)
                self.receivers += (receiver,)
                self._router.add(receiver.assembler)
        except BaseException:
            self.close()
            raise

    def invoke(self, now_ns: int) -> int:
        """One turn, but for the chunks: what was announced, so that chunks of a new epoch find it known (G16)."""
        self._now_ns = now_ns
        work = self._control_filter.poll(self._control, self._control_adapter.on_message, CONTROL_LIMIT)
        if self._metadata is not None:
            work += self._metadata_filter.poll(self._metadata, self._metadata_adapter.on_message, CONTROL_LIMIT)
        for receiver in self.receivers:
            work += receiver.invoke(now_ns)
        return work

    @property
    def inflow(self) -> tuple[ChunkRouter, aeron.Subscription, aeron.Subscription]:
        """What native code receives: chunks, and the checksums of frames that come on the control stream."""
        return self._router, self._payload, self._control

    @property
    def subscriptions(self) -> tuple[aeron.Subscription, ...]:
        """What is received here, beside the control stream."""
        return () if self._metadata is None else (self._metadata,)

    def close(self) -> None:
        for receiver in self.receivers:
            self._router.remove(receiver.assembler.stream_id)
            receiver.close()
        for close in self._streams:
            close()
        self._streams.clear()
        self._unrouted.keep(self._unrouted_counts)

    # --- inside

    def _subscribe(
        self, transport: aeron.Client, endpoint: Endpoint, on_image: Callable[[aeron.ImageEvent], None] | None = None
    ) -> aeron.Subscription:
        subscription = transport.add_subscription(str(with_buffers(endpoint.uri)), endpoint.stream_id, on_image)
        self._streams.append(subscription.close)
        return subscription

    def _unrouted_counts(self) -> dict[Key, int]:
        filters = {"control_dropped": self._control_filter, "metadata_dropped": self._metadata_filter}
        stopped = {(what, reason): n for what, each in filters.items() for reason, n in each.counts.items()}
        return self._router.counts | stopped

    def _make_control_adapter(self) -> MessageAdapter:
        """§10: schemas 900 and 902 share the stream."""
        adapter = self._adapter("control_dropped")
        adapter.add_undecoded(FrameChecksum, self.on_frame_checksum)
        adapter.add(ShmPoolAnnounce, self.on_shm_pool_announce)
        adapter.add(FrameProgress, self.on_frame_progress)
        adapter.add(QosProducer, self.on_qos)
        adapter.add(QosConsumer, self.on_qos)
        return adapter

    def _make_metadata_adapter(self) -> MessageAdapter:
        adapter = self._adapter("metadata_dropped")
        adapter.add(DataSourceAnnounce, self.on_metadata)
        adapter.add(DataSourceMeta, self.on_metadata)
        adapter.add(MetaBlobAnnounce, self.on_metadata)
        adapter.add(MetaBlobChunk, self.on_metadata)
        adapter.add(MetaBlobComplete, self.on_metadata)
        return adapter

    def _adapter(self, counter: str) -> MessageAdapter:
        return MessageAdapter(
            on_malformed=lambda data, error: self._unrouted.add(counter, reason="malformed"),
            on_foreign=lambda data: self._unrouted.add(counter, reason="foreign"),
        )

    def on_control_image(self, event: aeron.ImageEvent) -> None:
        self._control_sources.on_image(event)
        if not event.available:
            for receiver in self.receivers:
                receiver.on_control_gone(event.session_id)

    def on_metadata_image(self, event: aeron.ImageEvent) -> None:
        self._metadata_sources.on_image(event)
        if not event.available:
            for receiver in self.receivers:
                receiver.metadata_session.on_image_gone(event.session_id)

    def on_frame_checksum(self, data: bytes, info: aeron.MessageInfo) -> None:
        if not self._router.take_digest(data, self._now_ns, info.session_id):
            self._unrouted.add("control_dropped", reason="malformed")

    def on_shm_pool_announce(self, announce: ShmPoolAnnounce, info: aeron.MessageInfo) -> None:
        origin = self._control_sources.find(info.session_id)
        if origin is None:
            self._unrouted.add("control_dropped", reason="address")
            return
        for receiver in self._receiving(announce.stream_id):
            receiver.on_announce(announce, origin, self._now_ns, self._clock.realtime_ns())

    def on_frame_progress(self, progress: FrameProgress, info: aeron.MessageInfo) -> None:
        for receiver in self._receiving(progress.stream_id, info):
            receiver.on_progress(progress)

    def on_qos(self, qos: QosProducer | QosConsumer, info: aeron.MessageInfo) -> None:
        for receiver in self._receiving(qos.stream_id, info):
            receiver.on_qos(qos)

    def on_metadata(self, message: Metadata, info: aeron.MessageInfo) -> None:
        """G10: a sender that has rewritten the id already is understood, too. Of chained mappings (1000->2000,
        2000->3000) both ends may have one id: a source's comes first."""
        origin = self._metadata_sources.find(info.session_id)
        if origin is None:
            self._unrouted.add("metadata_dropped", reason="address")
            return
        stream_id = message.stream_id
        by_source = [it for it in self.receivers if it.mapping.source_stream_id == stream_id]
        for receiver in by_source or [it for it in self.receivers if it.metadata_stream_id == stream_id][:1]:
            receiver.on_metadata(message, origin)
            return
        self._unrouted.add("metadata_dropped", reason="unknown_stream")

    def _receiving(self, stream_id: int, info: aeron.MessageInfo | None = None) -> list[Receiver]:
        """The receiver of this source stream, of which there is at most one; none for a session it does not follow."""
        found = [receiver for receiver in self.receivers if receiver.mapping.source_stream_id == stream_id]
        if not found:
            self._unrouted.add("control_dropped", reason="unknown_stream")
        return [receiver for receiver in found if info is None or receiver.admits(info.session_id)]


class Receiver:
    """One mapping: the local producer of another host's stream. A `bridge.Worker`, turned by its `Reception`."""

    def __init__(
        self,
        mapping: MappingConfig,
        config: BridgeConfig,
        client: Client,
        transport: aeron.Client,
        destinations: Destinations,
        counters: Counters,
        mac_key: bytes = b"",
    ) -> None:
        section = config.bridge
        self.mapping = mapping
        self._section = section
        self._counters = counters
        self._client = client
        self._destinations = destinations
        self._log = get_logger("bridge", mapping=mapping.name, role="receiver")
        self._advice = Advice(mapping, section, client.config, self._log)
        self._source = SourceEpoch(client.config.announce_period_ns)
        self._followed = FollowedSession(client.config.announce_period_ns)
        self.metadata_session: Final = SessionPin()
        self._early: deque[tuple[Metadata, Origin]] = deque(maxlen=MAX_EARLY)
        self.assembler: Final = Assembler(
            mapping.source_stream_id,
            max_chunk_bytes=section.effective_chunk_bytes,
            max_payload_bytes=section.max_payload_bytes,
            max_inflight=section.max_inflight_frames,
            timeout_ns=section.assembly_timeout_ns,
            needs_digest=section.has_digests,
            mac_key=mac_key,
        )
        self._producer: Producer | None = None
        self._writer: EpochWriter | None = None
        self._attach = self._start_attach(None)
        self._is_paused = False
        self._metadata = SourceMetadata()
        self._untold: deque[Metadata] = deque()  # metadata that wait for room in the local log
        self._again_ns = 0  # when metadata are published again
        self._table_pace = TablePace()
        self._met = 0  # consumers of this producer, when metadata were last published for one that came
        self._look_ns = 0
        self._local: dict[str, aeron.Publication] = {}
        counters.include(self._counts)
        try:
            if section.receive_metadata is not None:
                driver = client.config.driver
                self._local["metadata"] = aeron.publish(transport, driver.metadata, METADATA_TERM)
            if (section.forward_progress or section.forward_qos) and mapping.dest_control_stream_id:
                endpoint = Endpoint(config.local_control_channel(client.config), mapping.dest_control_stream_id)
                self._local["control"] = aeron.publish(transport, endpoint, CONTROL_TERM)
        except BaseException:
            self.close()
            raise

    # --- what it is

    @property
    def paused(self) -> bool:
        return self._is_paused

    @paused.setter
    def paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused  # takes effect in the next turn: the assembler belongs to the polling thread

    @property
    def is_ready(self) -> bool:
        """Whether it has the lease on its destination, and its memory."""
        return self._writer is not None

    @property
    def failure(self) -> TensorPoolError | None:
        """Why it has no lease."""
        return self._attach.failure

    @property
    def dest_stream_id(self) -> int:
        """The destination; 0 while none was chosen."""
        return self.mapping.dest_stream_id or self._destinations.chosen(self.mapping)

    @property
    def metadata_stream_id(self) -> int:
        return self.mapping.metadata_stream_id or self.dest_stream_id

    @property
    def local_epoch(self) -> int | None:
        return None if self._writer is None else self._writer.ring.epoch

    # --- the duty cycle

    def invoke(self, now_ns: int) -> int:
        """One turn, but for the chunks. Raises TransportError, Closed."""
        work = 0
        if self._producer is None:
            self._producer = self._attach.poll(now_ns)
            work += self._producer is not None
        writer = None if self._producer is None else self._producer.epoch_writer
        if writer is not self._writer:
            self._writer = writer
            work += 1
            if writer is not None:
                self._on_memory(writer, now_ns)
        work += self._flush_metadata(now_ns)
        self.assembler.bind(writer, 0 if writer is None else writer.until_ns)
        self.assembler.set_paused(self._is_paused)
        work += self.assembler.expire(now_ns)
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + SECOND
            self._advice.on_counts(self.assembler.counts)
        return work

    def close(self) -> None:
        self.assembler.bind(None)
        self._attach.close()
        if self._producer is not None:
            self._producer.close()
            self._producer = None
        self._writer = None
        for publication in self._local.values():
            publication.close()
        self._local.clear()
        self._counters.keep(self._counts)

    # --- messages beside the chunks

    def admits(self, session_id: int) -> bool:
        """Whether a message of the control stream is from the session that is followed; others are counted."""
        if self._followed.is_followed(session_id):
            return True
        self._counters.add("control_dropped", reason="session")
        return False

    def on_control_gone(self, session_id: int) -> None:
        """An image of the control stream is gone: the next announce may be another session's."""
        if self._followed.on_image_gone(session_id):
            self._log.info("session_gone", session_id=session_id)
            self._set_origin(None)

    def on_announce(self, announce: ShmPoolAnnounce, origin: Origin, now_ns: int, realtime_ns: int) -> None:
        """§7.2: what frames are judged by. Never republished. Epochs may begin with the time, so none is far above."""
        epoch_limit = realtime_ns + DAY
        if not self._followed.may_follow(origin.session_id, self.assembler.last_chunk_ns, now_ns):
            self._counters.add("announces_dropped", reason="session")
            self._advice.warn("another_sender", address=origin.address, session_id=origin.session_id)
            return
        try:
            ring = Regions.of(announce).ring
        except RemoteProtocolError:
            self._counters.add("announces_dropped", reason="malformed")
            return
        if announce.epoch > epoch_limit:
            self._counters.add("announces_dropped", reason="epoch")
            return
        self._source.on_chunks(self.assembler.newest_epoch, self.assembler.last_chunk_ns)
        before = self._source.epoch
        pools = [SourcePool(pool.pool_id, pool.stride_bytes) for pool in ring.pools]
        verdict = self._source.on_announce(announce.epoch, pools, now_ns)
        if verdict is Verdict.STALE:
            self._counters.add("announces_dropped", reason="stale")
            return
        self._counters.add("announces_accepted")
        if self._followed.follow(origin, now_ns):
            self._log.info("session", address=origin.address, session_id=origin.session_id)
            self._set_origin(origin)
        has_published = self.assembler.published is not None
        self.assembler.set_source(
            announce.epoch,
            [(pool.pool_id, pool.stride_bytes) for pool in self._source.pools],
            epoch_limit=epoch_limit,
            max_jump=max(ring.nslots, LEAST_JUMP),
        )
        if verdict is Verdict.ADOPTED:
            self._log.info("source_epoch", epoch=announce.epoch, before=before)
            if has_published:  # else the local epoch is as good as new, and its lease is kept
                self._renew()
            for message in self._metadata.on_epoch(announce.epoch):
                self._tell_metadata(message)
            self._advise_on_sizes()
        while self._early:
            self.on_metadata(*self._early.popleft())

    def on_progress(self, progress: FrameProgress) -> None:
        """§9, G6, G7: under the destination's id; of a frame that may still come."""
        if not self._section.forward_progress:
            return
        published = self.assembler.published
        reason = (
            "epoch"
            if progress.epoch != self._source.epoch
            else "late"
            if (published is not None and progress.seq <= published) or self.assembler.is_lost(progress.seq)
            else "no_lease"
            if self._writer is None
            else "paused"
            if self._is_paused
            else ""
        )
        if reason:
            self._counters.add("progress_dropped", reason=reason)
            return
        epoch = progress.epoch
        if self._section.rewrite_progress_epoch and self.local_epoch is not None:
            epoch = self.local_epoch
        self._publish(
            "control", msgspec.structs.replace(progress, stream_id=self.dest_stream_id, epoch=epoch), "progress"
        )

    def on_qos(self, qos: QosProducer | QosConsumer) -> None:
        """§9: the source's QoS, under the destination's id."""
        if not self._section.forward_qos or not self.dest_stream_id:
            return
        if isinstance(qos, QosConsumer):  # of another host: a supervisor of this one would look for it here
            self._counters.add("qos_dropped", reason="consumer")
        else:
            self._publish("control", msgspec.structs.replace(qos, stream_id=self.dest_stream_id), "qos")

    def on_metadata(self, message: Metadata, origin: Origin) -> None:
        """§7.1, G12: as it came, but with the ids of this host. Before the first announce their epoch is not known:
        they wait for it."""
        if self._followed.origin is None and self._source.epoch is None:
            if isinstance(message, DataSourceAnnounce | DataSourceMeta):
                self._early.append((message, origin))
            else:
                self._counters.add("metadata_dropped", reason="early")  # the sender repeats tables
        elif not self.metadata_session.admits(origin.session_id, origin.address):
            self._counters.add("metadata_dropped", reason="session")
        elif isinstance(message, TraceLinkSet):
            self._tell_link(message)
        elif isinstance(message, MetaBlobAnnounce | MetaBlobChunk | MetaBlobComplete):
            reason = self._metadata.tables.take(message, message)
            if reason:
                self._counters.add("metadata_dropped", reason=reason)
        elif self._metadata.take(message, self._source.epoch):
            self._tell_metadata(message)
        else:
            self._counters.add("metadata_dropped", reason="epoch")

    # --- inside

    def _set_origin(self, origin: Origin | None) -> None:
        """Chunks and metadata are taken from this sender."""
        given = (None, "") if origin is None else (origin.session_id, origin.address)
        self.assembler.set_origin(*given)
        self.metadata_session.set_origin(*given)

    def _start_attach(self, old: Producer | None) -> BackgroundAttach[Producer]:
        """Ask for the lease; `old` is given back first, so that there is a new local epoch (G4)."""

        def attach() -> Producer:
            if old is not None:
                old.close()
            return self._destinations.attach(self.mapping, self._client)

        return BackgroundAttach(attach, stream=self.mapping.dest_stream_id, role="producer")

    def _renew(self) -> None:
        """G5: the seqs of the new source epoch begin anew, and so does the local one."""
        self.assembler.bind(None)
        self._writer, self._met = None, 0
        self._untold.clear()
        if self._producer is not None:
            self._attach.close()
            self._attach = self._start_attach(self._producer)
            self._producer = None

    def _on_memory(self, writer: EpochWriter, now_ns: int) -> None:
        self._log.info("destination", stream_id=self.dest_stream_id, epoch=writer.ring.epoch)
        self._advise_on_sizes()
        self._tell_again(now_ns)

    def _tell_again(self, now_ns: int) -> None:
        """For consumers who have none of it: from the beginning, in order."""
        self._untold.clear()
        self._again_ns = now_ns + self._metadata.tables.period_ns()
        for message in self._metadata.again(self._source.epoch):
            self._tell_metadata(message)

    def _tell_link(self, link: TraceLinkSet) -> None:
        """Links are events: published now or never."""
        if link.epoch != self._source.epoch:
            self._counters.add("metadata_dropped", reason="epoch")
        elif self._writer is None:
            self._counters.add("metadata_dropped", reason="no_lease")
        else:
            changed = msgspec.structs.replace(link, stream_id=self.dest_stream_id, epoch=self._writer.ring.epoch)
            self._publish("metadata", changed, "metadata")

    def _tell_metadata(self, message: Metadata) -> None:
        if self._writer is None:
            self._counters.add("metadata_dropped", reason="no_lease")  # the last of each kind is published later
            return
        if len(self._untold) == MAX_UNTOLD:
            self._untold.popleft()
            self._counters.add("metadata_dropped", reason="back_pressured")
        self._untold.append(message)

    def _flush_metadata(self, now_ns: int) -> int:
        """Publish what there is room for; everything again when a consumer has come, and for one that missed some."""
        if self._writer is None or self._producer is None:
            return 0
        met, self._met = self._met, self._producer.consumers_met
        if self._met > met or now_ns >= self._again_ns:
            self._tell_again(now_ns)
        work = 0
        while self._untold and self._publish_metadata(self._untold[0]):
            self._untold.popleft()
            work += 1
        if self._table_pace.is_due(now_ns) and not self._untold and self._metadata.is_of(self._source.epoch):
            work += self._metadata.tables.flush(lambda message: self._publish_table(message, now_ns), 1)
        return work

    def _publish_table(self, message: TableMessage, now_ns: int) -> bool:
        is_done = self._publish_metadata(message)
        if is_done:
            self._table_pace.on_sent(message, now_ns)
        return is_done

    def _publish_metadata(self, message: Metadata) -> bool:
        """Whether it is done with: published, or without a subscriber."""
        assert self._writer is not None
        assert self._producer is not None
        changes: dict[str, object] = {"stream_id": self.metadata_stream_id}
        if isinstance(message, DataSourceAnnounce):
            changes |= {"epoch": self._writer.ring.epoch, "producer_id": self._producer.producer_id}
        return self._publish("metadata", msgspec.structs.replace(message, **changes), "metadata", is_last_try=False)

    def _publish(self, where: str, message: Message, what: str, *, is_last_try: bool = True) -> bool:
        """Whether it is done with: published, or dropped and counted."""
        publication = self._local.get(where)
        if publication is None:
            return True
        result = publication.offer(message.encode())
        is_alone = result is aeron.OfferResult.NOT_CONNECTED
        if result:
            self._counters.add(f"{what}_forwarded")
        elif is_alone or is_last_try:
            self._counters.add(f"{what}_dropped", reason="not_connected" if is_alone else "back_pressured")
        return bool(result) or is_alone or is_last_try

    def _advise_on_sizes(self) -> None:
        if self._writer is not None:
            self._advice.on_sizes(self._writer.ring.spec, self._source.largest_stride_bytes)

    def _counts(self) -> dict[Key, int]:
        return self.assembler.counts


def with_buffers(uri: ChannelUri) -> ChannelUri:
    """For a subscription over the network: room for what arrives while this host does something else.

    With Aeron's own 128 KiB the sender waits for us all the time. The kernel books a datagram with up to twice its
    bytes (one of 8 KiB takes 16): the socket gets twice the window. A kernel that allows less grants what it allows.
    """
    return uri if uri.is_ipc else uri.with_defaults(NETWORK_BUFFERS)
