# SPDX-License-Identifier: Apache-2.0
"""The view: one picture of streams, consumers, leases and services, made of all announces and reports.

    ShmPoolAnnounce ─────────────► streams: epoch, producer, layout, age
    QosProducer, probes of rings ► ... seq, rate, bytes a second
    DataSourceAnnounce, Meta ────► ... name, tags
    QosConsumer, ConsumerHello ──► consumers: lag, drops, mode         ──► changes, the latest of them
    keepalives, revocations ─────► leases, and consumers that report nothing
    EventMessage "alive" ────────► services: state, age
    EventMessage "leases" ───────► the processes behind leases

Holds no clock and does no IO: callers pass `now_ns`, monotonic. Foreign producers that send no name, metadata or QoS
are streams like any other. Memory is bounded whatever is received: entries without room are counted, and so are ignored
messages, with a reason. Wire §10.1-10.5, §15.14; decisions A13, B31, B33, C1, C6, C8, C15, C17, E28, E43.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from tensorpool.control import events, identification
from tensorpool.errors import RemoteProtocolError
from tensorpool.soft_state import SoftStateTable
from tensorpool.supervisor.announces import flaw_in, lean, shape_of
from tensorpool.supervisor.config import SupervisorConfig
from tensorpool.supervisor.history import History
from tensorpool.supervisor.observed import Consumer, Lease, Service, Stream
from tensorpool.supervisor.peer_text import MAX_TEXT, MAX_VALUE_BYTES, readable, tags_of
from tensorpool.supervisor.snapshot import ChangeKind, Snapshot
from tensorpool.wire import Message
from tensorpool.wire.control import (
    ClockDomain,
    ConsumerConfig,
    ConsumerHello,
    DataSourceAnnounce,
    DataSourceMeta,
    FrameDescriptor,
    QosConsumer,
    QosProducer,
    ShmPoolAnnounce,
)
from tensorpool.wire.driver import (
    LeaseRevokeReason,
    Role,
    ShmDriverShutdown,
    ShmLeaseKeepalive,
    ShmLeaseRevoked,
)
from tensorpool.wire.event import EventMessage

SETTLE_NS: Final = 5_000_000_000  # drops and lag are over when there were none for so long
MAX_STREAM_ID: Final = 2**32 - 2
MAX_EPOCH: Final = 2**64 - 2
MAX_PAGE_BYTES: Final = 64 << 10


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe of a stream's memory found; `fault` is why it found nothing."""

    stream_id: int
    epoch: int
    activity_age_ns: int | None = None  # None: stamped in the future, hence before the last boot (C8)
    seq: int | None = None
    frame_bytes: int | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    fault: str | None = None


class View:
    """Everything that was seen lately.

    >>> view = View(SupervisorConfig.load(environ={}))
    >>> view.on_message(QosProducer(stream_id=7, producer_id=1, epoch=1, current_seq=5), now_ns=0)
    >>> view.snapshot(0).streams[0].seq
    5

    `is_local` is whether announces come from this host: only then their timestamps can be compared with our clock (C6).
    """

    def __init__(self, config: SupervisorConfig, *, is_local: bool = True) -> None:
        self._limits = config.supervisor
        self._stale_ns = config.stale_ns
        self._settle_ns = max(config.stale_ns, SETTLE_NS)
        self._announce_window_ns = 3 * config.announce_period_ns  # §10.1.1
        self._forget_ns = max(config.supervisor.forget_ms * 1_000_000, config.stale_ns)
        self._service_stale_ns = config.supervisor.stale_periods * config.control.alive_period_ms * 1_000_000
        self._is_local = is_local
        self._streams: dict[int, Stream] = {}
        limits, stale_ns, forget_ns = config.supervisor, config.stale_ns, self._forget_ns
        self._consumers = SoftStateTable[tuple[int, int], Consumer](stale_ns, forget_ns, limit=limits.max_consumers)
        self._leases = SoftStateTable[int, Lease](2 * stale_ns, limit=limits.max_leases)
        self._services = SoftStateTable[str, Service](
            self._service_stale_ns, max(forget_ns, self._service_stale_ns), limit=limits.max_services
        )
        # The leases of consumers that detached: what they sent before may arrive after it.
        self._detached = SoftStateTable[tuple[int, int], int](stale_ns, limit=limits.max_consumers)
        self.history = History(config.supervisor.max_changes)
        self.counts: Counter[str] = Counter()
        self.overflow: Counter[str] = Counter()
        self._ticked_ns: int | None = None
        self._handlers: dict[type[Message], Callable[[Any, int], None]] = {
            QosProducer: self._on_qos_producer,
            QosConsumer: self._on_qos_consumer,
            ConsumerHello: self._on_hello,
            ConsumerConfig: self._on_consumer_config,
            DataSourceAnnounce: self._on_source,
            DataSourceMeta: self._on_meta,
            FrameDescriptor: self._on_descriptor,
            ShmLeaseKeepalive: self._on_keepalive,
            ShmLeaseRevoked: self._on_revoked,
            ShmDriverShutdown: self._on_shutdown,
            EventMessage: self._on_event,
        }

    # --- messages

    def on_message(self, message: Message, now_ns: int, *, wall_ns: int | None = None) -> None:
        """Any message of any stream; kinds that carry no state of the view are ignored.

        `wall_ns` is the time of day: with it, announces stamped by a synchronised clock are checked for their age.
        """
        self.counts[type(message).__name__] += 1
        if isinstance(message, ShmPoolAnnounce):
            self._on_announce(message, now_ns, wall_ns)
            return
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message, now_ns)

    def on_probe_result(self, look: ProbeResult, now_ns: int) -> None:
        """The observer probed a stream's memory just now."""
        stream = self._streams.get(look.stream_id)
        if stream is None or stream.epoch != look.epoch:
            return
        stream.region_fault = look.fault
        if look.fault is not None:
            stream.probed_ns = stream.active_ns = None
            return
        stream.probed_ns = now_ns
        age_ns = self._stale_ns + 1 if look.activity_age_ns is None else look.activity_age_ns
        stream.active_ns = now_ns - age_ns
        if look.seq is not None and stream.producer_id is not None and look.seq >= (stream.seq_counter.value or 0):
            stream.seq_counter.add(now_ns, look.seq)
            stream.seq_reported_ns = now_ns
        if look.frame_bytes is not None:
            stream.frame_bytes, stream.dtype, stream.shape = look.frame_bytes, look.dtype, look.shape

    def on_decision(self, stream_id: int, consumer_id: int, text: str, now_ns: int) -> None:
        """The policy made a decision."""
        label = self._label(stream_id)
        self.history.add(
            ChangeKind.POLICY_DECIDED,
            now_ns,
            f"consumer {consumer_id} of {label}: {text}",
            stream_id=stream_id,
            consumer_id=consumer_id,
        )

    # --- queries

    def probe_targets(self) -> Iterator[tuple[ShmPoolAnnounce, int | None]]:
        """The streams to probe: announces that a client could map, each with the newest seq known."""
        for stream in tuple(self._streams.values()):
            if stream.announce is not None and stream.layout_flaw is None and stream.announced_ns is not None:
                yield stream.announce, stream.seq_counter.value

    def needs_descriptors(self, now_ns: int) -> bool:
        """Whether descriptors are needed: the seq of some producer comes neither by QoS nor from its ring."""
        for stream in self._streams.values():
            seq_reported_ns = stream.first_ns if stream.seq_reported_ns is None else stream.seq_reported_ns
            if stream.producer_id is not None and not stream.is_stale and now_ns - seq_reported_ns > self._stale_ns:
                return True
        return False

    def stream(self, stream_id: int) -> Stream | None:
        return self._streams.get(stream_id)

    def consumers(self) -> Iterator[tuple[Consumer, Stream | None]]:
        """For the policy."""
        for consumer in tuple(self._consumers.values()):
            yield consumer, self._streams.get(consumer.stream_id)

    def snapshot(self, now_ns: int) -> Snapshot:
        """Everything that is known now."""
        self.tick(now_ns)
        counted = Counter(consumer.stream_id for consumer in self._consumers.values() if consumer.expired_ns is None)
        stale_ns = self._stale_ns
        known = (lease for lease in self._leases.values() if lease.facts is not None and lease.facts.short)
        holders = {(lease.stream_id, lease.client_id): lease.facts.short for lease in known if lease.facts}
        return Snapshot(
            taken_ns=now_ns,
            streams=tuple(
                self._streams[stream_id].status(now_ns, stale_ns, counted[stream_id], holders)
                for stream_id in sorted(self._streams)
            ),
            consumers=tuple(
                consumer.status(self._streams.get(consumer.stream_id), now_ns, stale_ns, holders)
                for consumer in sorted(self._consumers.values(), key=lambda consumer: consumer.key)
            ),
            leases=tuple(
                lease.status(now_ns) for lease in sorted(self._leases.values(), key=lambda lease: lease.lease_id)
            ),
            services=tuple(
                service.status(now_ns) for service in sorted(self._services.values(), key=lambda service: service.tag)
            ),
            changes=tuple(self.history.changes),
            change_counts=dict(self.history.counts),
            message_counts=dict(self.counts),
            overflow=dict(self.overflow),
        )

    # --- time

    def tick(self, now_ns: int) -> None:
        """Mark what is stale, judge lag, and forget what has been stale for long."""
        if self._ticked_ns is not None and now_ns <= self._ticked_ns:
            return
        self._ticked_ns = now_ns
        self._tick_streams(now_ns, 0 if len(self._streams) >= self._limits.max_streams else self._forget_ns)
        self._tick_consumers(now_ns)
        self._tick_services(now_ns)
        self._leases.tick(now_ns)
        self._detached.tick(now_ns)

    def _tick_streams(self, now_ns: int, forget_ns: int) -> None:
        for stream in tuple(self._streams.values()):
            is_silent = stream.is_silent(now_ns, self._stale_ns)
            if is_silent and not stream.is_stale:
                stream.is_stale = True
                is_announced = stream.announced_ns is not None and now_ns - stream.announced_ns <= self._stale_ns
                why = "its memory is not refreshed" if is_announced else f"not announced for {_s(self._stale_ns)}"
                self._record_stream(ChangeKind.STREAM_STALE, stream, now_ns, why)
            elif stream.is_stale and not is_silent:
                stream.is_stale = False
                self._record_stream(ChangeKind.STREAM_FRESH, stream, now_ns, "is back")
            if is_silent and now_ns - max(stream.seen_ns, stream.announced_ns or 0) > max(forget_ns, self._stale_ns):
                del self._streams[stream.stream_id]
                self._record_stream(ChangeKind.STREAM_VANISHED, stream, now_ns, "is forgotten")

    def _tick_consumers(self, now_ns: int) -> None:
        ticked = self._consumers.tick(now_ns)
        for _, consumer in ticked.stale:
            consumer.is_stale = True
            self._record_consumer(ChangeKind.CONSUMER_STALE, consumer, now_ns, f"no message for {_s(self._stale_ns)}")
        for _, consumer in ticked.gone:
            text = "is forgotten" if consumer.expired_ns is None else "its lease is gone"
            self._record_consumer(ChangeKind.CONSUMER_VANISHED, consumer, now_ns, text)
        for consumer in self._consumers.values():
            if consumer.is_stale or consumer.expired_ns is not None:
                continue
            if consumer.is_dropping and now_ns - consumer.dropped_ns > self._settle_ns:
                consumer.is_dropping = False
                lost = consumer.drops_total - consumer.drops_before
                self._record_consumer(
                    ChangeKind.CONSUMER_DROPS_ENDED, consumer, now_ns, f"lost {lost} frames, none lately"
                )
            self._judge_lag(consumer, now_ns)

    def _judge_lag(self, consumer: Consumer, now_ns: int) -> None:
        stream = self._streams.get(consumer.stream_id)
        lag = consumer.lag(stream)
        limit = None if stream is None else consumer.lag_limit(stream, self._limits.lag_frames)
        if lag is not None and limit is not None and lag > limit // 2:
            consumer.fine_ns = None
            if lag > limit and not consumer.is_lagging:
                consumer.is_lagging = True
                self._record_consumer(ChangeKind.CONSUMER_LAGGING, consumer, now_ns, f"is {lag} frames behind")
            return
        if consumer.fine_ns is None:
            consumer.fine_ns = now_ns
        # A consumer that skips ahead is level with the producer for a moment: it has caught up when it stays there.
        if consumer.is_lagging and now_ns - consumer.fine_ns >= self._settle_ns:
            consumer.is_lagging = False
            text = "no longer measured" if lag is None else f"is {lag} frames behind"
            self._record_consumer(ChangeKind.CONSUMER_CAUGHT_UP, consumer, now_ns, text)

    def _tick_services(self, now_ns: int) -> None:
        ticked = self._services.tick(now_ns)
        for _, service in ticked.stale:
            service.is_stale = True
            text = f"no heartbeat for {_s(self._service_stale_ns)}"
            self._record_service(ChangeKind.SERVICE_STALE, service, now_ns, text)
        for _, service in ticked.gone:
            self._record_service(ChangeKind.SERVICE_VANISHED, service, now_ns, "is forgotten")

    # --- inside: streams

    def _on_announce(self, announce: ShmPoolAnnounce, now_ns: int, wall_ns: int | None) -> None:
        if not 1 <= announce.stream_id <= MAX_STREAM_ID or not 1 <= announce.epoch <= MAX_EPOCH:
            self.counts["announces_without_stream_or_epoch"] += 1
            return
        if self._is_local and not self._is_recent(announce, now_ns, wall_ns):
            self.counts["announces_too_old"] += 1
            return
        stream = self._streams.get(announce.stream_id) or self._add_stream(announce.stream_id, now_ns)
        if stream is None:
            return
        is_new = stream.announced_ns is None  # before it, reports may have named any epoch
        is_earlier = not is_new and announce.epoch < (stream.epoch or 0)
        if is_earlier and not stream.is_silent(now_ns, self._stale_ns):
            self.counts["announces_of_earlier_epochs"] += 1  # C1
            return
        if announce.epoch != stream.epoch:
            before = stream.epoch
            stream.begin_epoch(announce.epoch)
            if before is not None and not is_new:
                stream.epoch_changes += 1
                self._record_stream(ChangeKind.EPOCH_CHANGED, stream, now_ns, f"epoch {before} -> {announce.epoch}")
        if stream.announce is None or shape_of(announce) != shape_of(stream.announce):
            stream.layout_flaw = flaw_in(announce)
        stream.announce = lean(announce)
        stream.announced_ns = stream.seen_ns = now_ns
        self._set_producer(stream, announce.producer_id or None, now_ns, is_reported=not is_new)
        if stream.is_stale and not stream.is_silent(now_ns, self._stale_ns):
            stream.is_stale = False
            self._record_stream(ChangeKind.STREAM_FRESH, stream, now_ns, "is announced again")

    def _is_recent(self, announce: ShmPoolAnnounce, now_ns: int, wall_ns: int | None) -> bool:
        clock_ns = now_ns if announce.announce_clock_domain is ClockDomain.MONOTONIC else wall_ns
        return clock_ns is None or abs(clock_ns - announce.announce_timestamp_ns) <= self._announce_window_ns

    def _set_producer(self, stream: Stream, producer_id: int | None, now_ns: int, *, is_reported: bool) -> None:
        before, stream.producer_id = stream.producer_id, producer_id
        if before == producer_id or not is_reported:
            return
        if before is None:
            self._record_stream(ChangeKind.PRODUCER_ATTACHED, stream, now_ns, f"producer {producer_id}")
        elif producer_id is None:
            self._record_stream(ChangeKind.PRODUCER_LEFT, stream, now_ns, f"producer {before} is gone")
        else:
            self._record_stream(ChangeKind.PRODUCER_CHANGED, stream, now_ns, f"producer {before} -> {producer_id}")

    def _add_stream(self, stream_id: int, now_ns: int) -> Stream | None:
        if len(self._streams) >= self._limits.max_streams:
            self.overflow["streams"] += 1
            return None
        stream = self._streams[stream_id] = Stream(stream_id, now_ns)
        self._record_stream(ChangeKind.STREAM_APPEARED, stream, now_ns, "is there")
        return stream

    def _on_qos_producer(self, qos: QosProducer, now_ns: int) -> None:
        if self._on_seq(qos.stream_id, qos.producer_id or None, qos.epoch, qos.current_seq, now_ns):
            self._streams[qos.stream_id].seq_reported_ns = now_ns

    def _on_descriptor(self, descriptor: FrameDescriptor, now_ns: int) -> None:
        self._on_seq(descriptor.stream_id, None, descriptor.epoch, descriptor.seq, now_ns)

    def _on_seq(self, stream_id: int, producer_id: int | None, epoch: int, seq: int, now_ns: int) -> bool:
        """A report of the newest seq of a stream; whether it was accepted."""
        if not 1 <= stream_id <= MAX_STREAM_ID or not 1 <= epoch <= MAX_EPOCH:
            self.counts["reports_without_stream_or_epoch"] += 1
            return False
        stream = self._streams.get(stream_id) or self._add_stream(stream_id, now_ns)
        if stream is None:
            return False
        if stream.epoch is not None and epoch < stream.epoch:
            self.counts["reports_of_earlier_epochs"] += 1
            return False
        if stream.epoch is None:
            stream.begin_epoch(epoch)
            stream.producer_id = producer_id
        elif epoch > stream.epoch:
            return False  # the announce of that epoch is on its way
        stream.seen_ns = now_ns
        if stream.announced_ns is None:
            stream.producer_id = producer_id or stream.producer_id
            if stream.is_stale:
                stream.is_stale = False
                self._record_stream(ChangeKind.STREAM_FRESH, stream, now_ns, "is back")
        # Several sources report the seq, and not in the order of the frames.
        if stream.seq_counter.value is None or seq >= stream.seq_counter.value:
            stream.seq_counter.add(now_ns, seq)
        return True

    def _on_source(self, source: DataSourceAnnounce, now_ns: int) -> None:
        if not 1 <= source.stream_id <= MAX_STREAM_ID:
            self.counts["reports_without_stream_or_epoch"] += 1
            return
        stream = self._streams.get(source.stream_id) or self._add_stream(source.stream_id, now_ns)
        if stream is None:
            return
        if stream.epoch is not None and source.epoch < stream.epoch:
            self.counts["reports_of_earlier_epochs"] += 1
            return
        stream.seen_ns = now_ns
        # A name outlives its producer; the next one takes it away by having none.
        if source.name or source.producer_id != stream.named_by:
            stream.name = readable(source.name) or None
            stream.named_by = source.producer_id
        stream.summary = readable(source.summary) or None
        stream.meta_version = source.meta_version

    def _on_meta(self, meta: DataSourceMeta, now_ns: int) -> None:
        stream = self._streams.get(meta.stream_id)
        if stream is None:
            return
        stream.meta_version = meta.meta_version
        stream.tags = next((tags_of(item) for item in meta.attributes if item.key == "tags"), ())

    # --- inside: consumers

    def _on_hello(self, hello: ConsumerHello, now_ns: int) -> None:
        consumer = self._consumer(hello.stream_id, hello.consumer_id, now_ns)
        if consumer is None:
            return
        consumer.wanted_mode = hello.mode
        consumer.max_rate_hz = hello.max_rate_hz
        if consumer.mode is None:
            consumer.mode = hello.mode
        consumer.wants_own_streams = bool(hello.descriptor_channel or hello.control_channel)

    def _on_qos_consumer(self, qos: QosConsumer, now_ns: int) -> None:
        consumer = self._consumer(qos.stream_id, qos.consumer_id, now_ns)
        if consumer is None:
            return
        is_first = consumer.qos_ns is None
        total = qos.drops_gap + qos.drops_late
        lost = 0 if is_first else total - consumer.drops_total
        if qos.epoch != consumer.epoch or lost < 0:
            consumer.received.clear()
        if qos.last_seq_seen or qos.epoch != consumer.epoch:
            consumer.unread_ns = None
        if not qos.last_seq_seen and consumer.unread_ns is None:
            consumer.unread_ns = now_ns
        consumer.qos_ns = now_ns
        consumer.epoch, consumer.last_seq, consumer.mode = qos.epoch, qos.last_seq_seen, qos.mode
        if lost > 0:
            if not consumer.is_dropping:
                consumer.is_dropping = True
                consumer.drops_before = consumer.drops_total
                gap, late = qos.drops_gap - consumer.drops_gap, qos.drops_late - consumer.drops_late
                text = f"lost {lost} frames (gap {gap}, late {late})"
                self._record_consumer(ChangeKind.CONSUMER_DROPPING, consumer, now_ns, text)
            consumer.dropped_ns = now_ns
        consumer.drops_gap, consumer.drops_late = qos.drops_gap, qos.drops_late
        consumer.drops.add(now_ns, total)
        consumer.received.add(now_ns, qos.last_seq_seen - total)

    def _on_consumer_config(self, config: ConsumerConfig, now_ns: int) -> None:
        consumer = self._consumers.get((config.stream_id, config.consumer_id))
        if consumer is None:
            return
        given = config.use_shm, config.mode, readable(config.payload_fallback_uri)
        consumer.assigned = (
            config.descriptor_channel,
            config.descriptor_stream_id,
            config.control_channel,
            config.control_stream_id,
        )
        if given == consumer.config:
            return
        before, consumer.config = consumer.config, given
        is_plain = before is None and config.use_shm and config.mode is consumer.mode
        if not is_plain:  # the answer to a request for streams of its own changes nothing
            text = f"set to {config.mode.name}" if config.use_shm else "redirected from shared memory"
            text += f", fallback {given[2]}" if given[2] else ""
            self._record_consumer(ChangeKind.CONSUMER_CONFIGURED, consumer, now_ns, text)

    def _consumer(self, stream_id: int, consumer_id: int, now_ns: int, lease_id: int | None = None) -> Consumer | None:
        """The consumer that just sent a message; None for one that has detached or has no room."""
        key = stream_id, consumer_id
        consumer = self._consumers.get(key)
        if consumer is not None and consumer.expired_ns is not None:
            if lease_id is None or lease_id == consumer.lease_id:
                return None
            self._drop_consumer(consumer, now_ns, "attached again")
            consumer = None
        if consumer is None:
            if key in self._detached and lease_id in (None, self._detached.get(key)):
                return None
            consumer = Consumer(stream_id, consumer_id, now_ns)
            if not self._consumers.add(key, consumer, now_ns):
                self.overflow["consumers"] += 1
                return None
            self._detached.pop(key)
            self._record_consumer(ChangeKind.CONSUMER_APPEARED, consumer, now_ns, "is there")
        consumer.seen_ns = now_ns
        if self._consumers.refresh(key, now_ns):
            consumer.is_stale = False
            self._record_consumer(ChangeKind.CONSUMER_FRESH, consumer, now_ns, "sends messages again")
        return consumer

    def _drop_consumer(self, consumer: Consumer, now_ns: int, text: str) -> None:
        self._consumers.pop(consumer.key)
        self._record_consumer(ChangeKind.CONSUMER_VANISHED, consumer, now_ns, text)

    # --- inside: leases

    def _on_keepalive(self, keepalive: ShmLeaseKeepalive, now_ns: int) -> None:
        lease = self._leases.get(keepalive.lease_id)
        if lease is None:
            lease = Lease(keepalive.lease_id, keepalive.stream_id, keepalive.client_id, keepalive.role, now_ns)
            if not self._leases.add(keepalive.lease_id, lease, now_ns):
                self.overflow["leases"] += 1
                return
        lease.seen_ns = now_ns
        self._leases.refresh(keepalive.lease_id, now_ns)
        if keepalive.role is Role.CONSUMER:
            consumer = self._consumer(keepalive.stream_id, keepalive.client_id, now_ns, keepalive.lease_id)
            if consumer is not None:
                consumer.lease_id = keepalive.lease_id

    def _on_revoked(self, notice: ShmLeaseRevoked, now_ns: int) -> None:
        self._leases.pop(notice.lease_id)
        if notice.role is not Role.CONSUMER:
            return  # the next epoch is announced
        key = notice.stream_id, notice.client_id
        consumer = self._consumers.get(key)
        if consumer is None or consumer.expired_ns is not None:
            return
        consumer.lease_id = notice.lease_id
        if notice.reason is LeaseRevokeReason.DETACHED:
            self._detached.add(key, notice.lease_id, now_ns)
            self._drop_consumer(consumer, now_ns, "detached")
            return
        consumer.expired_ns = now_ns
        self._consumers.retire(key, now_ns)
        reason = f": {readable(notice.error_message)}" if notice.error_message else ""
        self._record_consumer(ChangeKind.CONSUMER_EXPIRED, consumer, now_ns, f"lease {notice.reason.name}{reason}")

    def _on_shutdown(self, notice: ShmDriverShutdown, now_ns: int) -> None:
        self._leases.clear()
        reason = f": {readable(notice.error_message)}" if notice.error_message else ""
        self.history.add(ChangeKind.DRIVER_SHUTDOWN, now_ns, f"the driver ended, {notice.reason.name}{reason}")

    # --- inside: services

    def _on_lease_page(self, event: EventMessage) -> None:
        """A driver says who holds leases: of those whose keepalives we receive."""
        try:
            page = identification.read_page(event.value if len(event.value) <= MAX_PAGE_BYTES else b"")
        except RemoteProtocolError:
            self.counts["lease_pages_malformed"] += 1
            return
        for facts in page.leases:
            lease = self._leases.get(facts.lease_id)
            if lease is not None and (lease.stream_id, lease.client_id) == (facts.stream_id, facts.client_id):
                lease.facts = facts

    def _on_event(self, event: EventMessage, now_ns: int) -> None:
        if event.key == identification.LEASES and event.tag.startswith("service:driver"):
            self._on_lease_page(event)
        if event.key != events.ALIVE:
            return
        alive = events.read_alive(event) if event.tag and len(event.value) <= MAX_VALUE_BYTES else None
        if alive is None:
            self.counts["heartbeats_malformed"] += 1
            return
        tag = readable(event.tag)
        service = self._services.get(tag)
        state = str(alive.state)
        if service is None:
            service = Service(tag, now_ns)
            if not self._services.add(tag, service, now_ns):
                self.overflow["services"] += 1
                return
            service.state, service.pid = state, alive.pid
            self._record_service(ChangeKind.SERVICE_APPEARED, service, now_ns, f"is {state}")
        service.seen_ns = now_ns
        service.service, service.version = alive.service[:MAX_TEXT], alive.version[:MAX_TEXT]
        service.instance = None if alive.instance is None else alive.instance[:MAX_TEXT]
        if self._services.refresh(tag, now_ns):
            service.is_stale = False
            self._record_service(ChangeKind.SERVICE_FRESH, service, now_ns, "sends messages again")
        if alive.pid != service.pid:
            self._record_service(ChangeKind.SERVICE_STATE, service, now_ns, f"pid {service.pid} -> {alive.pid}")
            service.pid = alive.pid
        if state != service.state:
            self._record_service(ChangeKind.SERVICE_STATE, service, now_ns, f"{service.state} -> {state}")
            service.state = state

    # --- inside: changes

    def _label(self, stream_id: int) -> str:
        stream = self._streams.get(stream_id)
        return stream.label if stream else f"stream {stream_id}"

    def _record_stream(self, kind: ChangeKind, stream: Stream, now_ns: int, text: str) -> None:
        self.history.add(kind, now_ns, f"{stream.label}: {text}", stream_id=stream.stream_id)

    def _record_consumer(self, kind: ChangeKind, consumer: Consumer, now_ns: int, text: str) -> None:
        text = f"consumer {consumer.consumer_id} of {self._label(consumer.stream_id)}: {text}"
        self.history.add(kind, now_ns, text, stream_id=consumer.stream_id, consumer_id=consumer.consumer_id)

    def _record_service(self, kind: ChangeKind, service: Service, now_ns: int, text: str) -> None:
        self.history.add(kind, now_ns, f"{service.tag}: {text}", service=service.tag)


def _s(duration_ns: int) -> str:
    return f"{duration_ns / 1e9:g} s"
