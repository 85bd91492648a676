# SPDX-License-Identifier: Apache-2.0
"""The receiving end: chunks become frames of local streams, and what is forwarded beside them is told here.

`Reception` listens for all mappings that a bridge receives; each `Receiver` is the exclusive producer of one
destination. Chunks never pass through Python: `_core.Intake` takes them from Aeron and hands them to the
`_core.Assembler` of their stream, which writes them to the slot. A new epoch of the source becomes a new local epoch by
giving the lease back and attaching anew; frames are dropped, and counted, until that is done.
Bridge §4, §5, §6, §7, §8, §9; decisions G4-G7, G10-G13, G15-G17, G20, G22, G25, G28.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from tensorpool import aeron
from tensorpool._core import Assembler, Intake
from tensorpool.bridge.assembly import SourceEpoch, SourcePool, Verdict
from tensorpool.bridge.attaching import Attaching
from tensorpool.bridge.channels import hearing, telling
from tensorpool.bridge.checksum import SCHEMA_ID, FrameChecksum
from tensorpool.bridge.config import BridgeConfig, MappingConfig
from tensorpool.bridge.destinations import Destinations
from tensorpool.bridge.metrics import Counters, Key
from tensorpool.channel import Endpoint
from tensorpool.client import Client, Producer
from tensorpool.client.mapping import Regions
from tensorpool.client.producer_session import Writing
from tensorpool.errors import DecodeError, RemoteProtocolError, TensorPoolError
from tensorpool.logs import get_logger
from tensorpool.wire import Message, control, decode, peek_header
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

FRAGMENT_LIMIT: Final = 256
CONTROL_LIMIT: Final = 64
POLLS_PER_TURN: Final = 8
SLOW_LINK_BYTES_PER_S: Final = 125_000_000  # 1 Gb/s
SECOND: Final = 1_000_000_000
METADATA_TERM: Final = "1m"
CONTROL_TERM: Final = "64k"

_METADATA: Final = (DataSourceAnnounce, DataSourceMeta, MetaBlobAnnounce, MetaBlobChunk, MetaBlobComplete)
_METADATA_IDS: Final = frozenset(kind.TEMPLATE_ID for kind in _METADATA)
_CONTROL_IDS: Final = frozenset(kind.TEMPLATE_ID for kind in (ShmPoolAnnounce, FrameProgress, QosProducer, QosConsumer))


class Reception:
    """Everything that a bridge receives, on one subscription each for chunks, control and metadata.

    `unrouted` counts what belongs to no mapping.
    """

    def __init__(
        self,
        config: BridgeConfig,
        client: Client,
        link: aeron.Client,
        destinations: Destinations,
        counters: Mapping[MappingConfig, Counters],
        unrouted: Counters,
    ) -> None:
        section = config.bridge
        self._unrouted = unrouted
        self._intake = Intake()
        self._streams: list[Callable[[], None]] = []
        self.receivers: tuple[Receiver, ...] = ()
        self._metadata: aeron.Subscription | None = None
        self._now_ns = 0
        unrouted.include(self._unrouted_counts)
        try:
            self._payload = self._subscribe(link, section.receive_payload)
            self._control = self._subscribe(link, section.receive_control)
            if section.receive_metadata is not None:
                self._metadata = self._subscribe(link, section.receive_metadata)
            for mapping in config.received:
                receiver = Receiver(mapping, config, client, link, destinations, counters[mapping])
                self.receivers += (receiver,)
                self._intake.add(receiver.assembler)
        except BaseException:
            self.close()
            raise

    def invoke(self, now_ns: int) -> int:
        """One turn: what was announced first, so that chunks of a new epoch find it known (G16)."""
        self._now_ns = now_ns
        work = self._control.poll(self._on_control, CONTROL_LIMIT)
        if self._metadata is not None:
            work += self._metadata.poll(self._on_metadata, CONTROL_LIMIT)
        for receiver in self.receivers:
            work += receiver.invoke(now_ns)
        for _ in range(POLLS_PER_TURN):
            fragments = self._intake.poll(self._payload, FRAGMENT_LIMIT, now_ns)
            work += fragments
            if fragments == 0:
                break
        return work

    def wait(self, timeout_ns: int) -> None:
        """Take chunks as they come, without Python, until something else is heard. Raises TransportError, Closed."""
        others = (self._control,) if self._metadata is None else (self._control, self._metadata)
        self._intake.pump(self._payload, others, FRAGMENT_LIMIT, timeout_ns)

    def close(self) -> None:
        for receiver in self.receivers:
            self._intake.remove(receiver.assembler.stream_id)
            receiver.close()
        for close in self._streams:
            close()
        self._streams.clear()
        self._unrouted.keep(self._unrouted_counts)

    # --- inside

    def _subscribe(self, link: aeron.Client, endpoint: Endpoint) -> aeron.Subscription:
        subscription = link.add_subscription(hearing(endpoint.channel), endpoint.stream_id)
        self._streams.append(subscription.close)
        return subscription

    def _unrouted_counts(self) -> dict[Key, int]:
        return self._intake.counts

    def _on_control(self, data: bytes, _: aeron.MessageInfo) -> None:
        """§10: schemas 900 and 902 share the stream."""
        message = self._decoded(data, _CONTROL_IDS, "control_dropped")
        if message is None:
            return
        if isinstance(message, FrameChecksum):
            for each in self.receivers:
                each.on_checksum(message, self._now_ns)
            return
        assert isinstance(message, ShmPoolAnnounce | FrameProgress | QosProducer | QosConsumer)
        concerned = [it for it in self.receivers if it.mapping.source_stream_id == message.stream_id]
        if not concerned:
            self._unrouted.add("control_dropped", reason="unknown_stream")
        for receiver in concerned:  # one: sources are distinct
            match message:
                case ShmPoolAnnounce():
                    receiver.on_announce(message, self._now_ns)
                case FrameProgress():
                    receiver.on_progress(message)
                case _:
                    receiver.on_qos(message)

    def _on_metadata(self, data: bytes, _: aeron.MessageInfo) -> None:
        message = self._decoded(data, _METADATA_IDS, "metadata_dropped")
        if message is None:
            return
        assert isinstance(message, _METADATA)
        # G10: a sender that has rewritten the id already is understood, too.
        ids = {message.stream_id}
        for receiver in self.receivers:
            if ids & {receiver.mapping.source_stream_id, receiver.metadata_stream_id}:
                receiver.on_metadata(message)
                return
        self._unrouted.add("metadata_dropped", reason="unknown_stream")

    def _decoded(self, data: bytes, known: frozenset[int], what: str) -> Message | FrameChecksum | None:
        """None for what is not for us, counted where it should have been."""
        try:
            header = peek_header(data)
            if header.schema_id == SCHEMA_ID:
                return FrameChecksum.decode(data)
            if header.schema_id != control.schema.id or header.template_id not in known:
                self._unrouted.add(what, reason="foreign")
                return None
            return decode(data)
        except DecodeError:
            self._unrouted.add(what, reason="malformed")
            return None


class Receiver:
    """One mapping: the local producer of another host's stream. A `bridge.Worker`, turned by its `Reception`."""

    def __init__(
        self,
        mapping: MappingConfig,
        config: BridgeConfig,
        client: Client,
        link: aeron.Client,
        destinations: Destinations,
        counters: Counters,
    ) -> None:
        section = config.bridge
        self.mapping = mapping
        self._section = section
        self._counters = counters
        self._client = client
        self._destinations = destinations
        self._log = get_logger("bridge", mapping=mapping.name, role="receiver")
        self._source = SourceEpoch(client.config.announce_period_ns)
        self.assembler: Final = Assembler(
            mapping.source_stream_id,
            max_chunk_bytes=section.effective_chunk_bytes,
            max_payload_bytes=section.max_payload_bytes,
            max_inflight=section.max_inflight_frames,
            timeout_ns=section.assembly_timeout_ns,
            needs_checksum=section.crc32c,
        )
        self._producer: Producer | None = None
        self._writing: Writing | None = None
        self._attaching = self._attach(None)
        self._is_paused = False
        self._kept: dict[type[Message], DataSourceAnnounce | DataSourceMeta] = {}
        self._is_warned_of: set[str] = set()
        self._look_ns = 0
        self._local: dict[str, aeron.Publication] = {}
        counters.include(self._counts)
        try:
            if section.receive_metadata is not None:
                driver = client.config.driver
                self._local["metadata"] = _publish(link, driver.metadata, METADATA_TERM)
            if (section.forward_progress or section.forward_qos) and mapping.dest_control_stream_id:
                endpoint = Endpoint(config.local_control_channel(client.config), mapping.dest_control_stream_id)
                self._local["control"] = _publish(link, endpoint, CONTROL_TERM)
        except BaseException:
            self.close()
            raise

    # --- what it is

    @property
    def paused(self) -> bool:
        return self._is_paused

    @paused.setter
    def paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused  # taken over in the next turn: the assembler belongs to whoever polls

    @property
    def is_ready(self) -> bool:
        """Whether it has the lease on its destination, and its memory."""
        return self._writing is not None

    @property
    def failure(self) -> TensorPoolError | None:
        """Why it has no lease."""
        return self._attaching.failure

    @property
    def dest_stream_id(self) -> int:
        """The destination; 0 while none was chosen."""
        return self.mapping.dest_stream_id or self._destinations.chosen(self.mapping)

    @property
    def metadata_stream_id(self) -> int:
        return self.mapping.metadata_stream_id or self.dest_stream_id

    @property
    def local_epoch(self) -> int | None:
        return None if self._writing is None else self._writing.ring.epoch

    # --- the duty cycle

    def invoke(self, now_ns: int) -> int:
        """One turn, but for the chunks. Raises TransportError, Closed."""
        work = 0
        if self._producer is None:
            self._producer = self._attaching.poll(now_ns)
            work += self._producer is not None
        writing = None if self._producer is None else self._producer.writing
        if writing is not self._writing:
            self._writing = writing
            work += 1
            if writing is not None:
                self._on_memory(writing)
        self.assembler.bind(None if writing is None else writing.publisher, 0 if writing is None else writing.until_ns)
        self.assembler.set_paused(self._is_paused)
        work += self.assembler.expire(now_ns)
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + SECOND
            self._warn_of_chunk_size()
        return work

    def close(self) -> None:
        self.assembler.bind(None)
        self._attaching.close()
        if self._producer is not None:
            self._producer.close()
            self._producer = None
        self._writing = None
        for publication in self._local.values():
            publication.close()
        self._local.clear()
        self._counters.keep(self._counts)

    # --- what is heard beside the chunks

    def on_announce(self, announce: ShmPoolAnnounce, now_ns: int) -> None:
        """§7.2: what frames are judged by. Never republished."""
        try:
            announced = Regions.of(announce).ring.pools
        except RemoteProtocolError:
            self._counters.add("announces_dropped", reason="malformed")
            return
        self._source.on_chunks(self.assembler.newest_epoch, self.assembler.heard_ns)
        before = self._source.epoch
        pools = [SourcePool(pool.pool_id, pool.stride_bytes) for pool in announced]
        verdict = self._source.on_announce(announce.epoch, pools, now_ns)
        if verdict is Verdict.STALE:
            self._counters.add("announces_dropped", reason="stale")
            return
        self._counters.add("announces_accepted")
        self.assembler.set_source(announce.epoch, [(pool.pool_id, pool.stride_bytes) for pool in self._source.pools])
        if verdict is Verdict.ADOPTED:
            self._log.info("source_epoch", epoch=announce.epoch, before=before)
            if before is not None:
                self._renew()
            self._warn_of_sizes()

    def on_checksum(self, checksum: FrameChecksum, now_ns: int) -> None:
        if checksum.stream_id == self.mapping.source_stream_id:
            self.assembler.set_checksum(checksum.epoch, checksum.seq, checksum.payload_length, checksum.crc32c, now_ns)

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
            if self._writing is None
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
        self._tell("control", msgspec.structs.replace(progress, stream_id=self.dest_stream_id, epoch=epoch), "progress")

    def on_qos(self, qos: QosProducer | QosConsumer) -> None:
        """§9: the source's QoS, under the destination's id."""
        if self._section.forward_qos and self.dest_stream_id:
            self._tell("control", msgspec.structs.replace(qos, stream_id=self.dest_stream_id), "qos")

    def on_metadata(
        self, message: DataSourceAnnounce | DataSourceMeta | MetaBlobAnnounce | MetaBlobChunk | MetaBlobComplete
    ) -> None:
        """§7.1, G12: as it came, but with the ids of this host."""
        if isinstance(message, DataSourceAnnounce | DataSourceMeta):
            self._kept[type(message)] = message
        self._tell_metadata(message)

    # --- inside

    def _attach(self, old: Producer | None) -> Attaching[Producer]:
        """Ask for the lease; `old` is given back first, so that there is a new local epoch (G4)."""

        def attach() -> Producer:
            if old is not None:
                old.close()
            return self._destinations.attach(self.mapping, self._client)

        return Attaching(attach, stream=self.mapping.dest_stream_id, role="producer")

    def _renew(self) -> None:
        """G5: the seqs of the new source epoch begin anew, and so does the local one."""
        self.assembler.bind(None)
        self._writing = None
        if self._producer is not None:
            self._attaching.close()
            self._attaching = self._attach(self._producer)
            self._producer = None

    def _on_memory(self, writing: Writing) -> None:
        self._log.info("destination", stream_id=self.dest_stream_id, epoch=writing.ring.epoch)
        self._warn_of_sizes()
        for kind in (DataSourceAnnounce, DataSourceMeta):  # the announce names the epoch of what follows (K4)
            if kind in self._kept:
                self._tell_metadata(self._kept[kind])

    def _tell_metadata(
        self, message: DataSourceAnnounce | DataSourceMeta | MetaBlobAnnounce | MetaBlobChunk | MetaBlobComplete
    ) -> None:
        writing, producer = self._writing, self._producer
        if writing is None or producer is None:
            self._counters.add("metadata_dropped", reason="no_lease")  # the last of each kind is told later
            return
        changes: dict[str, int] = {"stream_id": self.metadata_stream_id}
        if isinstance(message, DataSourceAnnounce):
            changes |= {"epoch": writing.ring.epoch, "producer_id": producer.producer_id}
        self._tell("metadata", msgspec.structs.replace(message, **changes), "metadata")

    def _tell(self, where: str, message: Message, what: str) -> None:
        publication = self._local.get(where)
        if publication is None:
            return
        result = publication.offer(message.encode())
        if result or result is aeron.OfferResult.NOT_CONNECTED:
            self._counters.add(f"{what}_forwarded")
        else:
            self._counters.add(f"{what}_dropped", reason="back_pressured")

    def _counts(self) -> dict[Key, int]:
        return self.assembler.counts

    # --- inside: what an operator should know, said once

    def _warn(self, event: str, **fields: object) -> None:
        if event not in self._is_warned_of:
            self._is_warned_of.add(event)
            self._log.warning(event, **fields)

    def _warn_of_sizes(self) -> None:
        """G15, G20: whether the destination holds what the source may send, and whether it can arrive in time."""
        if self._writing is None or not self._source.pools:
            return
        local = max(pool.stride_bytes for pool in self._writing.ring.spec.pools)
        source = self._source.largest_stride_bytes
        if local < source:
            advice = "larger frames are dropped; give the destination stream a profile with a larger pool"
            self._warn(
                "destination_is_smaller",
                profile=self.mapping.profile,
                local_stride_bytes=local,
                source_stride_bytes=source,
                advice=advice,
            )
        needed_ms = min(local, source) * 1000 // SLOW_LINK_BYTES_PER_S
        if needed_ms > self._section.assembly_timeout_ms:
            self._warn(
                "assembly_timeout_is_short",
                assembly_timeout_ms=self._section.assembly_timeout_ms,
                needed_ms_at_1_gbit=needed_ms,
                advice="raise bridge.assembly_timeout_ms if the link is that slow",
            )

    def _warn_of_chunk_size(self) -> None:
        """G22: the two ends have to agree on sizes; else nothing gets through."""
        if "chunks_too_large" in self._is_warned_of or ("chunks_dropped", "chunk_size") not in self.assembler.counts:
            return
        self._warn(
            "chunks_too_large",
            accepted_bytes=self._section.effective_chunk_bytes,
            advice="give both ends the same bridge.mtu_bytes, bridge.chunk_bytes and bridge.max_chunk_bytes",
        )


def _publish(link: aeron.Client, endpoint: Endpoint, term: str) -> aeron.Publication:
    return link.add_publication(telling(endpoint.channel, term), endpoint.stream_id, exclusive=True)
