# SPDX-License-Identifier: Apache-2.0
"""A consumer's duties beside reading: which epoch is mapped, hello and QoS, and the streams it listens to.

Runs on the conductor. What the reading thread needs is handed over through `StreamReader`, whose lock one of both
threads holds at a time. Wire §5, §10.1, §10.4.1, §11, §15.12, §15.14, §15.21; Driver Model §4.9, §4.12.3; decisions
B27-B34, C1-C17, E22-E28, E40-E43, K1, K2.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from typing import Final

import msgspec

from tensorpool import aeron
from tensorpool.channel import MAX_AERON_STREAM_ID, Endpoint
from tensorpool.client import attachment as lease
from tensorpool.client import mapping
from tensorpool.client.conductor import ClientConductor
from tensorpool.client.leaseless_attachment import LeaselessAttachment
from tensorpool.client.mapped_epoch import MappedEpoch
from tensorpool.client.metadata import Metadata, MetadataCache
from tensorpool.client.session import Session, State
from tensorpool.client.stream_reader import IMAGE_LOST, NEWER_EPOCH, SEQ_WENT_BACK, StreamReader
from tensorpool.client.streams import ClientStreams
from tensorpool.errors import RegionRejected, RemoteProtocolError, TensorPoolError, TransportError
from tensorpool.shm import Check, MappedRing
from tensorpool.shm.announced import Regions
from tensorpool.wire import Message
from tensorpool.wire.attach import AttachResponse
from tensorpool.wire.control import ConsumerConfig, ConsumerHello, Mode, QosConsumer, ShmPoolAnnounce
from tensorpool.wire.driver import Role, ShmLeaseRevoked

PROBE_NS: Final = 200_000_000
IDLE_QOS_NS: Final = 50_000_000
KEEP_OPEN_NS: Final = 5_000_000_000  # the header of an epoch that was left, for its last frames
METADATA_PERIODS: Final = 3  # that a frame waits for its metadata
RECONNECT_PERIODS: Final = 10  # between two changes of id
LOG_EVERY_NS: Final = 1_000_000_000
LONGEST_RETRY_PERIODS: Final = 16  # between attempts to subscribe to a private stream


class Preferences(msgspec.Struct, frozen=True):
    """What a consumer asks for."""

    mode: Mode = Mode.STREAM
    max_rate_hz: int = 0
    supports_progress: bool = False
    progress_interval_us: int | None = None
    progress_bytes_delta: int | None = None
    progress_major_delta_units: int | None = None
    descriptors: Endpoint | None = None  # a descriptor stream of its own
    control: Endpoint | None = None  # a stream of its own for FrameProgress
    listens: bool = True  # to descriptors


class _Pace:
    """How often one private stream is subscribed to: each time takes some ms of a turn."""

    def __init__(self) -> None:
        self.next_ns = 0
        self._periods = 1

    def on_changed(self, now_ns: int, period_ns: int) -> None:
        """A change is followed once in an announce period."""
        self.next_ns = now_ns + period_ns
        self._periods = 1

    def on_failed(self, now_ns: int, period_ns: int) -> None:
        """One that cannot be subscribed to is tried again with a later answer, after a pause that doubles."""
        self.next_ns = now_ns + self._periods * period_ns
        self._periods = min(2 * self._periods, LONGEST_RETRY_PERIODS)


class ConsumerSession(Session):
    """The conductor's side of a `Consumer`."""

    def __init__(
        self,
        conductor: ClientConductor,
        spec: lease.AttachSpec,
        name: str | None,
        preferences: Preferences,
        max_outstanding_seq_gap: int | None,
    ) -> None:
        super().__init__(conductor, spec, name)
        self.preferences = preferences
        self.mode = preferences.mode
        self.fallback_uri: str | None = None
        self.newer_epoch_seen = False  # by the reading thread, in a descriptor (K1)
        self.metadata = MetadataCache()
        self.reader = StreamReader(max_outstanding_seq_gap, conductor.wake)
        self.on_epoch: Callable[[Regions, MappedEpoch], object] | None = None  # called with each that is mapped
        self._mapping = mapping.MappingState(self.config.announce_period_ns)
        self._mapped: MappedEpoch | None = None
        self._logged = ""  # why it was rejected last
        self._log_ns = 0
        self._fallback_if_rejected: str | None = None  # the payload_fallback_uri of the last ConsumerConfig
        self._may_use_shm = True
        self._private: Endpoint | None = None
        self._paces = _Pace(), _Pace()  # of private descriptors and private progress
        self._next_question_ns = 0
        self._probe: aeron.Subscription | None = None
        self._probe_until_ns = 0
        self._next_ns = 0
        self._reported = (0, 0)  # the epoch and seq of the last QoS
        self._reported_ns = 0
        self._changed_ns = 0
        self._has_sent_hello = True
        self.wait: Callable[[Session, Callable[[], bool], float | None], bool] | None = None  # set by the client
        self._missed: set[tuple[int, int]] = set()  # versions and epochs whose metadata did not come in time
        self._awaits_producer = False  # attached; nothing of the stream is alive yet
        self._next_reconnect_ns = 0
        self._apply_rate()

    @property
    def is_usable(self) -> bool:
        """A reader may wait for a producer; who only watches the rings needs them mapped."""
        is_waiting = self._awaits_producer and self.attachment.is_attached and self.preferences.listens
        return super().is_usable or is_waiting

    @property
    def layout_mismatches(self) -> int:
        """Announces of the mapped epoch that described other regions (K2)."""
        return self._mapping.mismatches

    # --- the session

    def is_resolved(self, now_ns: int) -> bool:
        """A name leads to where its producer is now; it may have moved while we were away."""
        if self.name is None:
            return True
        found = self.conductor.names.find(self.name, now_ns)
        if len(found) > 1:
            ids = ", ".join(str(source.stream_id) for source in found)
            self.failure = TensorPoolError(f"{self.name!r} is the name of streams {ids}; give one of the ids")
            return False
        if found:
            self.attachment.spec = msgspec.structs.replace(self.attachment.spec, stream_id=found[0].stream_id)
            return True
        if self.attachment.spec.stream_id:
            return True
        self.failure = self.failure or TensorPoolError(
            f"no producer announces the name {self.name!r}; `tensorpool ls` shows what there is"
        )
        return False

    def open_streams(self, streams: ClientStreams) -> None:
        if not self.preferences.listens:
            return
        descriptors = streams.subscribe(self.config.driver.descriptor)
        progress = None
        if self.preferences.supports_progress:
            progress = streams.subscribe(self.config.driver.control)
        self._paces = _Pace(), _Pace()
        self.reader.set_streams(descriptors, progress, self.config.driver.control)

    def close_streams(self) -> None:
        self._probe = None
        self._private = None
        self.reader.set_streams(None, None)

    def on_attached(self, response: AttachResponse, now_ns: int) -> None:
        self.attachment.spec = msgspec.structs.replace(self.attachment.spec, stream_id=self.stream_id)
        self._follow(self._mapping.on_attached(response, now_ns), now_ns)

    def on_attach_response(self, response: AttachResponse, now_ns: int, wall_ns: int) -> None:
        is_answered_again = self.attachment.is_answered_again(response)
        super().on_attach_response(response, now_ns, wall_ns)
        mapped, epoch = self._mapping.epoch, response.epoch
        if is_answered_again and epoch is not None and self._may_use_shm and (mapped is None or epoch > mapped):
            self.on_attached(response, now_ns)  # what `_ask_what_is_current` asked (E40, K1)

    def on_lost(self, reason: str) -> None:
        self.stop_mapping()
        self._follow(self._mapping.on_lease_lost(reason), self.conductor.clock.monotonic_ns())
        self._may_use_shm = True  # the order not to use it named the id of that lease
        self._fallback_if_rejected = self.fallback_uri = None
        self._leave_private()
        if self.streams is not None and not self.is_ending:
            with contextlib.suppress(TransportError):  # the streams is lost; the conductor notices
                self._assign_progress(None, False)

    def on_revoked(self, notice: ShmLeaseRevoked, now_ns: int) -> None:
        super().on_revoked(notice, now_ns)
        if notice.role is Role.PRODUCER and notice.stream_id == self.stream_id and self.attachment.is_attached:
            self._follow(self._mapping.on_producer_revoked(notice, now_ns), now_ns)

    def on_announce(self, announce: ShmPoolAnnounce, now_ns: int, wall_ns: int) -> None:
        super().on_announce(announce, now_ns, wall_ns)
        if not self.attachment.is_attached or not self._may_use_shm:
            return
        try:
            self._follow(self._mapping.on_announce(announce, now_ns, self._is_active(now_ns, wall_ns)), now_ns)
        except RemoteProtocolError as error:
            self._fail(error, now_ns)

    def abandon(self, now_ns: int) -> None:
        self.reader.close()
        super().abandon(now_ns)

    def on_metadata(self, message: Message, session_id: int) -> None:
        """A producer of the stream says what its frames mean, or by which clock they are stamped."""
        self.metadata.on_message(message, session_id)
        if self._mapped is not None:
            self._mapped.clock = self.metadata.clock(self._mapped.epoch)
        with self.changed:
            self.changed.notify_all()

    def await_metadata(self, meta_version: int, epoch: int) -> Metadata | None:
        """User's side: what frames of a version mean, as soon as it is known. A producer repeats it every period.

        Where it does not come within three periods, warns and does not wait for that version again.
        """
        version = meta_version, epoch

        def is_known() -> bool:
            return self.metadata.get(*version) is not None

        if self.wait is None or version in self._missed or os.getpid() != self._pid:
            return self.metadata.get(*version)
        if not self.wait(self, is_known, METADATA_PERIODS * self.config.announce_period_ns / 1e9):
            self._missed.add(version)
            warnings.warn(
                f"{self.stream_label}: metadata version {meta_version} did not come; arrays show the wire's dtype, "
                "which may stand for another (numpy_dtype)",
                RuntimeWarning,
                stacklevel=2,
            )
        return self.metadata.get(*version)

    def on_consumer_config(self, config: ConsumerConfig, now_ns: int) -> None:
        """§10.1.3, for us. A fallback whose scheme is not defined counts as none."""
        if config.consumer_id != self.attachment.client_id or not self.attachment.is_attached:
            return
        self.mode = config.mode
        self._apply_rate()
        uri = config.payload_fallback_uri
        self._fallback_if_rejected = uri if uri.startswith(("aeron:", "bridge://")) else None
        if not config.use_shm:
            self._may_use_shm = False
            self.fallback_uri = self._fallback_if_rejected
            self.set_state(State.FALLBACK, f"ConsumerConfig: use_shm is false, fallback {uri or 'none'}")
            self._follow(self._mapping.on_lease_lost("a ConsumerConfig forbids shared memory"), now_ns)
            return
        if not self._may_use_shm:
            self._may_use_shm = True
            self.fallback_uri = None
            self.set_state(State.WAITING, "ConsumerConfig: use_shm is true again")
            response = self.attachment.response
            if response is not None:
                self._follow(self._mapping.on_attached(response, now_ns), now_ns)
        self._assigned(config, now_ns)

    def on_qos_of_others(self, qos: QosConsumer, now_ns: int) -> None:
        """§10.1.2: another process reports under our id. Take another, at most once in a while: anyone can say so."""
        if qos.consumer_id != self.attachment.client_id or not self.attachment.is_attached:
            return
        if now_ns < self._next_reconnect_ns:
            return
        self._next_reconnect_ns = now_ns + RECONNECT_PERIODS * self.config.announce_period_ns
        self.log.warning("consumer_id_collision", consumer_id=qos.consumer_id)
        self._take_new_id(now_ns)

    def do_work(self, now_ns: int) -> int:
        work = super().do_work(now_ns)
        reader = self.reader
        reader.apply_pending()
        attention = reader.attention
        if attention & NEWER_EPOCH or self.newer_epoch_seen:
            self._ask_for_epoch(now_ns)
        if attention & SEQ_WENT_BACK:
            reader.forget_seqs()
            self._follow(self._mapping.on_seq_went_back(), now_ns)
            work += 1
        if attention & IMAGE_LOST and self._probe is None:
            self._look_again(now_ns)
        if self._probe is not None:
            self._compare(now_ns)
        keep_open_ns = max(KEEP_OPEN_NS, 4 * self.config.announce_period_ns)  # its producer knows after three
        if self._changed_ns and now_ns - self._changed_ns > keep_open_ns:
            self._changed_ns = 0
            reader.let_go()
        if self.streams is None or not self.attachment.is_attached:
            return work
        if not self._has_sent_hello and self._mapped is not None:
            self._send_hello_and_qos(now_ns)
        if self._mapping.on_tick(now_ns):
            self._ask_what_is_current()  # E40: the epoch after a revoked one did not come; the lease stays
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + self.config.announce_period_ns
            wall_ns = self.conductor.clock.realtime_ns()
            if self._mapped is not None and not self._is_active(now_ns, wall_ns):
                self._follow(self._mapping.on_stale(), now_ns)
            self._hello()
            self._qos(now_ns)
            return work + 1
        if now_ns - self._reported_ns >= IDLE_QOS_NS and reader.is_idle and self._reported != self._seen():
            self._qos(now_ns)  # a reader that has caught up says so soon: producers that end wait for it
            work += 1
        return work

    def is_due(self, now_ns: int) -> bool:
        """Also where its user has read more than was reported."""
        return now_ns >= self._next_ns or self._reported != self._seen() or super().is_due(now_ns)

    # --- inside: memory

    def _follow(self, effects: list[mapping.Effect], now_ns: int) -> None:
        for effect in effects:
            match effect:
                case mapping.Unmap():
                    self._mapped = None
                    self._changed_ns = now_ns
                    self.reader.suspend()
                    if self.attachment.is_attached and self.state is State.ACTIVE:
                        self.set_state(State.WAITING, effect.reason)
                case mapping.Check():
                    self._check(now_ns)
                case mapping.Map():
                    self.start_mapping(effect.regions, writable=False)

    def on_mapping_failed(self, regions: Regions, error: TensorPoolError, now_ns: int) -> None:
        if self._mapping.is_awaited(regions.epoch):
            self._fail(error, now_ns)

    def on_mapped(self, regions: Regions, ring: MappedRing, now_ns: int) -> None:
        if not self._mapping.is_awaited(regions.epoch):
            self._pass_over(regions, ring)
            return
        wall_ns = self.conductor.clock.realtime_ns()
        self._awaits_producer = not self._mapping.is_activity_fresh(ring.activity_timestamp_ns, now_ns, wall_ns)
        if self._awaits_producer:
            self._fail(RemoteProtocolError(f"no process refreshes the regions of epoch {regions.epoch}"), now_ns)
            return
        mapped = self._epoch_of(regions, ring)
        self._mapping.on_mapped(regions.epoch)
        self._mapped = mapped
        self._changed_ns = now_ns
        self.reader.adopt(mapped)
        if self.on_epoch is not None:
            self.on_epoch(regions, mapped)
        self.newer_epoch_seen = False
        self.fallback_uri = None
        self.failure = None
        self._logged = ""
        self.set_state(State.ACTIVE, "mapped", regions.epoch)
        self._send_hello_and_qos(now_ns)

    def _pass_over(self, regions: Regions, ring: MappedRing) -> None:
        """An epoch that ended while it was being mapped: its frames count as lost; a RingWatch can read them."""
        if self._mapped is not None:
            return
        mapped = self._epoch_of(regions, ring)
        self.reader.adopt(mapped)
        self.reader.suspend()
        if self.on_epoch is not None:
            self.on_epoch(regions, mapped)

    def _epoch_of(self, regions: Regions, ring: MappedRing) -> MappedEpoch:
        mapped = MappedEpoch(ring)
        mapped.stream_label = self.stream_label
        mapped.find_metadata = lambda meta_version: self.await_metadata(meta_version, regions.epoch)
        self.metadata.on_epoch(regions.epoch)
        mapped.clock = self.metadata.clock(regions.epoch)
        return mapped

    def _send_hello_and_qos(self, now_ns: int) -> None:
        """Say that we are there as soon as the reading thread has the epoch: producers may be waiting for us."""
        self._has_sent_hello = self.reader.mapped is self._mapped
        if self._has_sent_hello:
            self._next_ns = now_ns + self.config.announce_period_ns
            self._hello()
            self._qos(now_ns)

    def _check(self, now_ns: int) -> None:
        if self._mapped is None:
            return
        try:
            self._mapped.ring.revalidate()
        except RegionRejected as error:
            if error.check == Check.SECOND_WRITER:
                self._mapping.on_second_writer()
            self._fail(error, now_ns)

    def _fail(self, error: TensorPoolError, now_ns: int) -> None:
        if str(error) != self._logged and now_ns >= self._log_ns:  # once per reason, not once per attempt
            self._log_ns = now_ns + LOG_EVERY_NS
            self._logged = str(error)
            self.log.warning("regions_rejected", error=self._logged)
        self.failure = error.with_traceback(None)  # its frames hold the mapping
        self._follow(self._mapping.on_rejected(str(error)), now_ns)
        if not self.attachment.is_attached:
            return
        self.fallback_uri = self._fallback_if_rejected
        self.set_state(State.WAITING if self.fallback_uri is None else State.FALLBACK, str(error))

    def _take_new_id(self, now_ns: int) -> None:
        """The id is the lease's (E43): give it back and attach with another."""
        reason = "another process uses this consumer's id; attaching with another one"
        effects = self.attachment.on_mapping_failed(now_ns)
        self.on_lost(reason)
        self.set_state(State.WAITING, reason)
        self._perform(effects, now_ns)

    def _ask_for_epoch(self, now_ns: int) -> None:
        """K1: a descriptor named a later epoch. Ask the driver, at most once in an announce period, which it is.

        The question is the attach request once more: a driver answers it with the lease that we hold and what is
        current (E2), or refuses it, which changes nothing. The next announce comes in any case.
        """
        self.newer_epoch_seen = True
        self.reader.forget_attention(NEWER_EPOCH)
        if now_ns < self._next_question_ns or self._mapping.epoch is None or not self.attachment.is_attached:
            return
        self._next_question_ns = now_ns + self.config.announce_period_ns
        self.newer_epoch_seen = False
        self._ask_what_is_current()

    def _ask_what_is_current(self) -> None:
        self.send(self.attachment.ask_again())

    def _is_active(self, now_ns: int, wall_ns: int) -> bool:
        mapped = self._mapped
        return mapped is not None and self._mapping.is_activity_fresh(
            mapped.ring.activity_timestamp_ns, now_ns, wall_ns
        )

    def _apply_rate(self) -> None:
        """§11, E26: our own rate; where we have none and a supervisor limits us, the configured one."""
        rate_hz = self.preferences.max_rate_hz or self.config.policies.rate_limited_default_hz
        self.reader.set_rate(rate_hz if self.mode is Mode.RATE_LIMITED else 0)

    # --- inside: messages that are sent

    def _hello(self) -> None:
        wanted = self.preferences
        descriptors = wanted.descriptors or Endpoint("", 0)
        control = wanted.control or Endpoint("", 0)
        self.send(
            ConsumerHello(
                stream_id=self.stream_id,
                consumer_id=self.attachment.client_id,
                supports_shm=True,
                supports_progress=wanted.supports_progress,
                mode=wanted.mode,
                max_rate_hz=wanted.max_rate_hz,
                expected_layout_version=1,
                progress_interval_us=wanted.progress_interval_us,
                progress_bytes_delta=wanted.progress_bytes_delta,
                progress_major_delta_units=wanted.progress_major_delta_units,
                descriptor_stream_id=descriptors.stream_id,
                control_stream_id=control.stream_id,
                descriptor_channel=descriptors.channel,
                control_channel=control.channel,
            )
        )

    def _seen(self) -> tuple[int, int]:
        return (self._mapping.epoch or 0, self.reader.last_seq_seen)

    def _qos(self, now_ns: int) -> None:
        if self.streams is None or self._mapping.epoch is None or not self._has_sent_hello:
            return
        stats = self.reader.stats()
        self._reported, self._reported_ns = self._seen(), now_ns
        message = QosConsumer(
            stream_id=self.stream_id,
            consumer_id=self.attachment.client_id,
            epoch=self._mapping.epoch,
            last_seq_seen=self._reported[1],
            drops_gap=stats.drops_gap,
            drops_late=stats.drops_late,
            mode=self.mode,
        )
        try:
            self.streams.qos.offer(message.encode())
        except TransportError:
            return  # the streams is lost; the conductor notices

    # --- inside: where descriptors come from

    def _assigned(self, config: ConsumerConfig, now_ns: int) -> None:
        """§5: streams of our own, or the shared ones where they were declined (E25)."""
        period_ns = self.config.announce_period_ns
        for pace, assign, channel, stream_id in (
            (self._paces[0], self._assign_descriptors, config.descriptor_channel, config.descriptor_stream_id),
            (self._paces[1], self._assign_progress, config.control_channel, config.control_stream_id),
        ):
            is_assigned = bool(channel) and 0 < stream_id <= MAX_AERON_STREAM_ID
            before = self._private, self.reader.progress_endpoint
            try:
                assign(Endpoint(channel, stream_id) if is_assigned else None, now_ns >= pace.next_ns)
            except TensorPoolError as error:
                pace.on_failed(now_ns, period_ns)
                self.log.warning("private_stream_unusable", channel=channel, error=str(error))
            else:
                if before != (self._private, self.reader.progress_endpoint):
                    pace.on_changed(now_ns, period_ns)

    def _assign_descriptors(self, assigned: Endpoint | None, may_subscribe: bool) -> None:
        assert self.streams is not None
        is_throttled = self.mode is Mode.RATE_LIMITED
        if assigned is None or assigned == self.config.driver.descriptor:
            self._leave_private()
        elif assigned == self._private:
            self.reader.set_throttled(is_throttled)
        elif self.preferences.descriptors is not None and may_subscribe:
            subscription = self.streams.subscribe(assigned)
            self._private = assigned
            self.reader.switch(subscription, is_throttled=is_throttled)

    def _assign_progress(self, assigned: Endpoint | None, may_subscribe: bool) -> None:
        shared = self.config.driver.control
        endpoint = shared if assigned is None or self.preferences.control is None else assigned
        if self.preferences.supports_progress and (may_subscribe or endpoint == shared):
            self.reader.switch_progress(endpoint, lambda: self.conductor.subscribe(endpoint))

    def _leave_private(self) -> None:
        if self._private is None:
            return
        self._private = None
        if self.streams is not None:
            try:
                self.reader.switch(self.streams.subscribe(self.config.driver.descriptor), is_throttled=False)
            except TransportError:
                return  # the streams is lost; the conductor notices

    def _look_again(self, now_ns: int) -> None:
        """An image went. Either its publisher ended, or we were too slow and must subscribe anew: a probe tells."""
        if self.streams is None:
            return
        if self._private is not None:
            self._leave_private()
            return
        self._probe = self.streams.subscribe(self.config.driver.descriptor)
        self._probe_until_ns = self.conductor.clock.monotonic_ns() + PROBE_NS  # subscribing may have taken long

    def _compare(self, now_ns: int) -> None:
        probe, joined = self._probe, self.reader.image_count
        assert probe is not None
        is_slow = probe.image_count > joined
        if now_ns < self._probe_until_ns and not (is_slow and joined == 0):
            return  # one that has just come may be seen by the probe first
        self._probe = None
        self.reader.forget_attention(IMAGE_LOST)
        if is_slow:
            self.log.warning("descriptors_lost", reason="this consumer was too slow for the descriptor stream")
        if is_slow or joined == 0:  # without a publisher nothing is lost by subscribing anew
            self.reader.switch(probe, is_throttled=False)
        else:
            probe.close()


class StandaloneSession(ConsumerSession):
    """The conductor's side of a `Consumer` that was made with `driver=False`.

    Its producer announces its own regions: there is no driver and no lease. Only what is announced freshly is mapped,
    with the checks of every mapping: containment, superblocks, activity, pid.
    """

    attachment_type = LeaselessAttachment

    def __init__(
        self,
        conductor: ClientConductor,
        spec: lease.AttachSpec,
        name: str | None,
        preferences: Preferences,
        max_outstanding_seq_gap: int | None,
    ) -> None:
        super().__init__(conductor, spec, name, preferences, max_outstanding_seq_gap)
        if name is None:
            self.failure = TensorPoolError(f"no producer announces stream {spec.stream_id}; is it running?")

    def do_work(self, now_ns: int) -> int:
        work = super().do_work(now_ns)
        if self.attachment.is_attached:
            self._mapping.on_listening()
        return work

    def _take_new_id(self, now_ns: int) -> None:
        assert isinstance(self.attachment, LeaselessAttachment)
        self.attachment.take_new_id()
        self._leave_private()
        self._next_ns = 0  # hello and QoS under the new id

    def _ask_what_is_current(self) -> None:
        self._hello()  # producers may answer it with an announce
