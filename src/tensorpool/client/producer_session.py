# SPDX-License-Identifier: Apache-2.0
"""A producer's duties beside publishing: memory for the lease, QoS, metadata, and the wishes of its consumers.

Runs on the conductor; what the publishing thread needs is handed over as whole objects (`writing`, `fan_out`).
Wire §5, §10.1.2, §10.1.3, §10.2.2, §10.3, §10.4.2; Driver Model §4.12.2; decisions C20, E22-E28, E43, E44.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from typing import Final

import msgspec

from tensorpool import aeron
from tensorpool._core import FramePublisher, Route
from tensorpool.channel import Endpoint, asks_for_id, is_repeatable
from tensorpool.client import attachment as lease
from tensorpool.client.activity import ActivityDuty
from tensorpool.client.conductor import ClientConductor
from tensorpool.client.description import Description
from tensorpool.client.link import SMALL_TERM, Link
from tensorpool.client.mapping import Regions
from tensorpool.client.names import preferred_id
from tensorpool.client.private_streams import NO_STREAM, PrivateStream, PrivateStreamOpener
from tensorpool.client.progress import ProgressPolicy
from tensorpool.client.progress_sender import ProgressSender
from tensorpool.client.session import Session, State
from tensorpool.errors import (
    Closed,
    RegionRejected,
    RemoteProtocolError,
    TensorPoolError,
    TransportError,
)
from tensorpool.shm import LAYOUT_VERSION, MappedRing
from tensorpool.wire import Message
from tensorpool.wire.control import (
    ConsumerConfig,
    ConsumerHello,
    DataSourceAnnounce,
    DataSourceMeta,
    Mode,
    QosConsumer,
    QosProducer,
    ShmPoolAnnounce,
)
from tensorpool.wire.driver import ResponseCode, ShmAttachResponse, ShmLeaseRevoked

STALE_PERIODS: Final = 4  # without hello or QoS (E28)
MAX_CONSUMERS: Final = 1024  # known at once; what others ask for is not noted until some of these are gone
FIRST_FRAME_NS: Final = 100_000_000


class Writing:
    """What the publishing thread needs of one epoch."""

    __slots__ = ("publisher", "ring", "writer")

    def __init__(
        self, ring: MappedRing, publication: aeron.Publication, until_ns: int, *, with_publish_time: bool
    ) -> None:
        self.ring: Final = ring
        self.writer: Final = ring.writer()
        self.publisher: Final = FramePublisher(
            self.writer, publication, ring.stream_id, ring.epoch, with_publish_time=with_publish_time
        )
        self.until_ns = until_ns

    @property
    def until_ns(self) -> int:
        """§4.7: who stood still past the end of the lease writes nothing more."""
        return self.publisher.until_ns

    @until_ns.setter
    def until_ns(self, until_ns: int) -> None:
        self.publisher.until_ns = until_ns


class FanOut(msgspec.Struct, frozen=True):
    """Where else frames and their progress are told, as of now."""

    descriptors: tuple[PrivateStream, ...] = ()
    progress: tuple[aeron.Publication, ...] = ()
    policy: ProgressPolicy | None = None


class _Heard:
    """A consumer, as far as we heard of it."""

    def __init__(self) -> None:
        self.hello: ConsumerHello | None = None
        self.decree: ConsumerConfig | None = None  # the last that others told it
        self.heard_ns = 0
        self.epoch: int | None = None
        self.last_seq_seen = 0
        self.qos_ns = 0
        self.descriptors: PrivateStream | None = None
        self.control: PrivateStream | None = None

    def mode(self, hello: ConsumerHello) -> Mode:
        return hello.mode if self.decree is None else self.decree.mode

    def max_rate_hz(self, hello: ConsumerHello, default_hz: int) -> int:
        """The cap of its descriptor stream while RATE_LIMITED: its own, or the default where others limit it (E26)."""
        if self.mode(hello) is not Mode.RATE_LIMITED:
            return 0  # E27
        return hello.max_rate_hz if hello.max_rate_hz or hello.mode is Mode.RATE_LIMITED else default_hz

    def close(self) -> None:
        for stream in (self.descriptors, self.control):
            if stream is not None:
                stream.publication.close()
        self.descriptors = self.control = None


class ProducerSession(Session):
    """The conductor's side of a `Producer`.

    A relay publishes another host's frames: what they mean is told by whoever forwards that, and its consumers get no
    streams of their own (Bridge §4, §7.1).
    """

    def __init__(
        self,
        conductor: ClientConductor,
        wish: lease.Wish,
        name: str | None,
        *,
        with_publish_time: bool = False,
        is_relay: bool = False,
    ) -> None:
        super().__init__(conductor, wish, name)
        self._is_relay = is_relay
        self.writing: Writing | None = None
        self.fan_out = FanOut()
        self.progress = ProgressSender()
        self.route = Route()
        self.epochs = 0
        self.with_publish_time = with_publish_time
        self._is_drivers_choice = name is not None and not conductor.config.driver.stream_id_range
        self.counts: Counter[str] = Counter()  # of what was asked for and not done
        self._consumers: dict[int, _Heard] = {}
        self._descriptors: aeron.Publication | None = None
        self._progress: aeron.Publication | None = None
        self._mapping: Future[MappedRing] | None = None
        self._description = Description()
        self._activity = ActivityDuty()
        self._next_ns = 0
        self._is_spread = True  # whether the publishing thread knows of what consumers asked for
        self._answers: list[ConsumerConfig] = []  # that go out once it does
        self._opener = PrivateStreamOpener(self.config, conductor.clock, self.log, self.counts)

    # --- asked by the user's side

    def adopt(self, writing: Writing | None) -> None:
        """From now on frames go there, until that memory is lost."""
        self.route.publisher = None if writing is None else writing.publisher
        if self.writing is not writing:  # lost meanwhile, by the conductor's thread
            self.route.publisher = None

    def consumers_ready(self) -> int:
        """How many consumers have this epoch mapped and told so lately."""
        writing = self.writing
        if writing is None:
            return 0
        epoch = writing.ring.epoch
        return sum(heard.epoch == epoch for heard in list(self._consumers.values()))

    @property
    def is_choked(self) -> bool:
        """Whether a descriptor would be lost now: a log takes none for a moment after its first reader has come."""
        writing = self.writing
        try:
            return writing is not None and writing.publisher.is_choked
        except (Closed, TransportError):
            return True  # the link is lost; the conductor notices

    def is_read_up_to(self, seq: int, since_ns: int) -> bool:
        """Whether every consumer of this epoch has told of this frame or a later one.

        B31: seq 0 looks like none at all, so for the first frame alone we want to hear from them a while after.
        """
        writing = self.writing
        if writing is None:
            return True
        epoch = writing.ring.epoch
        heard = [consumer for consumer in list(self._consumers.values()) if consumer.epoch == epoch]
        if seq == 0:
            return all(consumer.qos_ns > since_ns + FIRST_FRAME_NS for consumer in heard)
        return all(consumer.last_seq_seen >= seq for consumer in heard)

    def set_metadata(self, message: DataSourceMeta, summary: str) -> None:
        """Conductor: from now on this is what frames of its version mean."""
        self._description.set(message, summary)

    def add_blob(self, version: int, blob_type: int, data: bytes, checksum: bool) -> None:
        """Conductor: send now, and again to consumers that come later."""
        self._description.add_blob(version, blob_type, data, checksum)

    def post_metadata(self, message: Message) -> None:
        """Conductor: send once on the metadata stream, in order, when there is room."""
        self._description.post(message)

    # --- the session

    def is_resolved(self, now_ns: int) -> bool:
        """A name has one place: where a live producer of that name is, else the one that its letters choose."""
        if self.name is None or self.attachment.wish.stream_id != 0 or self._is_drivers_choice:
            return True
        ids = self.config.driver.stream_id_range
        known = self.conductor.names.find(self.name, now_ns)
        stream_id = known[0].stream_id if known else preferred_id(self.name, ids)
        self.attachment.wish = msgspec.structs.replace(self.attachment.wish, stream_id=stream_id)
        return True

    def _refused(self, refusal: lease.Refused) -> None:
        wish = self.attachment.wish
        now_ns = self.conductor.clock.monotonic_ns()
        if self.name is not None and wish.create and wish.stream_id:
            owner = self.conductor.names.owner(wish.stream_id, now_ns)
            if refusal.code is ResponseCode.INVALID_PARAMS:
                # The driver's range is not the one we know: let it choose.
                self._is_drivers_choice = True
                self.attachment.wish = msgspec.structs.replace(wish, stream_id=0)
                return
            if owner is not None and owner != self.name:
                ids = self.config.driver.stream_id_range
                following = wish.stream_id + 1 if wish.stream_id + 1 in ids else ids.first
                self.attachment.wish = msgspec.structs.replace(wish, stream_id=following)
                return
        super()._refused(refusal)

    def open_streams(self, link: Link) -> None:
        self._descriptors = link.publish(self.config.driver.descriptor)

    def close_streams(self) -> None:
        self._descriptors = None
        self._progress = None
        for heard in self._consumers.values():
            heard.close()
        self._consumers.clear()
        self._spread()

    def on_attached(self, response: ShmAttachResponse, now_ns: int) -> None:
        # Mapping gigabytes page by page takes longer than a keepalive may wait.
        try:
            regions = Regions.of(response)
        except RemoteProtocolError as error:
            self.failure = error
            self.set_state(State.WAITING, str(error))
            self._perform(self.attachment.on_mapping_failed(now_ns), now_ns)
            return
        self.attachment.wish = msgspec.structs.replace(self.attachment.wish, stream_id=regions.stream_id)
        self._mapping = self.conductor.submit(lambda: self._map(regions))

    def is_under_way(self, now_ns: int) -> bool:
        return self._mapping is not None or super().is_under_way(now_ns)

    def on_lost(self, reason: str) -> None:
        self._mapping = None
        self.writing = None
        self.route.publisher = None

    def on_announce(self, announce: ShmPoolAnnounce, now_ns: int, wall_ns: int) -> None:
        super().on_announce(announce, now_ns, wall_ns)
        if self.writing is not None and announce.epoch == self.writing.ring.epoch:
            self._activity.on_announce()

    def on_consumer_end(self, notice: ShmLeaseRevoked) -> None:
        """E28: a consumer without a lease needs no stream of its own."""
        heard = self._consumers.pop(notice.client_id, None)
        if heard is not None:
            heard.close()
            self._spread()

    def do_work(self, now_ns: int) -> int:
        work = super().do_work(now_ns)
        if self.writing is not None:
            self.writing.until_ns = self.attachment.deadline_ns
        if self._mapping is not None and self._mapping.done():
            mapping, self._mapping = self._mapping, None
            self._mapped(mapping, now_ns)
            work += 1
        if self.writing is not None and self.writing.publisher.is_broken:
            raise TransportError("the descriptor log is closed: the media driver is gone")
        if self.link is None or not self.attachment.is_attached:
            return work
        self._keep_active(now_ns)
        self.serve_consumers()
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + self.config.announce_period_ns
            self._tell(now_ns)
            self._forget_stale(now_ns)
            work += 1
        return work + self._description.flush(self._take_metadata) + self.progress.flush(self.fan_out)

    @property
    def is_restless(self) -> bool:
        """FrameProgress has to be sent within a fraction of a millisecond."""
        return super().is_restless or self.progress.is_waiting(self.fan_out)

    # --- consumers

    def serve_consumers(self) -> None:
        """Do what consumers asked for since the last turn, then answer them: an answer is true when it is sent."""
        if not self._is_spread:
            self._spread()
        for answer in self._answers:
            self.send(answer)
        self._answers.clear()

    def on_hello(self, hello: ConsumerHello, now_ns: int) -> None:
        if len(self._consumers) >= MAX_CONSUMERS and hello.consumer_id not in self._consumers:
            self._forget_one_without_hello()
        heard = self._known(hello.consumer_id)
        if heard is None:
            return
        is_new = heard.hello is None
        if heard.hello is not None and heard.hello.mode is not hello.mode:
            heard.decree = None  # what it was told was told to another wish
        heard.heard_ns = now_ns
        heard.hello = hello
        if is_new:
            self._next_ns = 0
            self._description.welcome()
        if hello.expected_layout_version not in (0, LAYOUT_VERSION):  # C20
            self._answers.append(self._config_for(hello, heard, can_use_shm=False))
        elif _asked(hello) != (NO_STREAM, NO_STREAM):
            if self._is_relay:
                self._answers.append(self._config_for(hello, heard))
            else:
                self._assign(hello, heard)
        self._is_spread = False

    def on_consumer_config(self, config: ConsumerConfig) -> None:
        """What another process sent to a consumer: streams whose ids the driver chose are opened here (E24).

        §10.1.3: a central authority may force a mode or redirect, so our own answers repeat it from now on.
        """
        heard = self._consumers.get(config.consumer_id)
        if heard is None or not is_repeatable(config.payload_fallback_uri):
            return
        heard.decree = config
        hello = heard.hello
        if hello is None:
            return
        by_driver = [asks_for_id(asked) for asked in _asked(hello)]
        shared = self.config.driver.descriptor, self.config.driver.control  # E25: being assigned these is a no
        descriptors, control = (
            endpoint if is_by_driver and endpoint != no else NO_STREAM
            for endpoint, is_by_driver, no in zip(_assigned(config), by_driver, shared, strict=True)
        )
        if not self._is_relay:
            rate = heard.max_rate_hz(hello, self.config.policies.rate_limited_default_hz)
            if by_driver[0]:
                heard.descriptors = self._private(descriptors, heard.descriptors, rate)
            if by_driver[1]:
                heard.control = self._private(control, heard.control, 0)
        is_declined = (descriptors.channel and not heard.descriptors) or (control.channel and not heard.control)
        if is_declined:  # here alone: without this answer the consumer would wait on a stream without a publisher
            self._answers.append(self._config_for(hello, heard))
        self._is_spread = False

    def on_qos_consumer(self, qos: QosConsumer, now_ns: int) -> None:
        heard = self._known(qos.consumer_id)
        if heard is None:
            return
        heard.heard_ns = now_ns
        heard.epoch = qos.epoch
        heard.last_seq_seen = qos.last_seq_seen
        heard.qos_ns = now_ns
        with self.changed:
            self.changed.notify_all()

    def _known(self, consumer_id: int) -> _Heard | None:
        """The consumer of this id; None: it is new, and there are too many. Those are counted."""
        heard = self._consumers.get(consumer_id)
        if heard is None and len(self._consumers) < MAX_CONSUMERS:
            heard = self._consumers[consumer_id] = _Heard()
        if heard is None:
            self.counts["consumers_beyond_limit"] += 1
        return heard

    def _forget_one_without_hello(self) -> None:
        """Make room for a consumer that introduces itself: ids that only reported QoS may be made up."""
        stranger = next((number for number, heard in self._consumers.items() if heard.hello is None), None)
        if stranger is not None:
            del self._consumers[stranger]
            self.counts["consumers_beyond_limit"] += 1

    # --- inside: memory

    def _map(self, regions: Regions) -> MappedRing:
        ring = self.conductor.map(regions, writable=True)
        ring.prefault()
        return ring

    def _mapped(self, mapping: Future[MappedRing], now_ns: int) -> None:
        try:
            ring = mapping.result()
        except (RegionRejected, TensorPoolError) as error:
            self.failure = error
            self.set_state(State.WAITING, str(error))
            self._perform(self.attachment.on_mapping_failed(now_ns), now_ns)
            return
        if not self.attachment.is_attached or self._descriptors is None:
            return
        until_ns = self.attachment.deadline_ns
        self.route.publisher = None  # the producer looks, and adopts the new one
        self.writing = Writing(ring, self._descriptors, until_ns, with_publish_time=self.with_publish_time)
        self.epochs += 1
        self._activity = ActivityDuty()
        self._next_ns = 0
        if not self._is_relay:
            self._describe(ring.epoch)
        self.set_state(State.ACTIVE, "attached", ring.epoch)

    def _keep_active(self, now_ns: int) -> None:
        """C9: refresh the activity stamp where the driver leaves that to us."""
        if self.writing is None:
            return
        ring = self.writing.ring
        if self._activity.is_due(ring.activity_timestamp_ns, now_ns, self.config.announce_period_ns):
            stamp_ns = self.stamp_ns(now_ns)
            ring.refresh_activity(stamp_ns)
            self._activity.on_refreshed(stamp_ns, now_ns)

    # --- inside: what is told

    def _tell(self, now_ns: int) -> None:
        writing = self.writing
        if writing is None or self.link is None:
            return
        producer_id, epoch, stream_id = self.attachment.client_id, writing.ring.epoch, self.stream_id
        current = max(writing.writer.next_seq - 1, 0)
        self._offer(
            self.link.qos,
            QosProducer(stream_id=stream_id, producer_id=producer_id, epoch=epoch, current_seq=current).encode(),
        )
        self._description.repeat()

    def _describe(self, epoch: int) -> None:
        """Say who we are and what frames of this epoch mean."""
        self._description.begin(
            DataSourceAnnounce(
                stream_id=self.stream_id,
                producer_id=self.attachment.client_id,
                epoch=epoch,
                meta_version=self.route.meta_version,
                name=self.name or "",
                summary=self._description.summary,
            )
        )

    def _take_metadata(self, data: bytes) -> bool:
        """Whether a message is dealt with: taken, or without a reader."""
        assert self.link is not None
        result = self._offer(self.link.metadata, data)
        return bool(result) or result is aeron.OfferResult.NOT_CONNECTED

    def _offer(self, publication: aeron.Publication, data: bytes) -> aeron.OfferResult:
        """§15.11: what is lost here comes again with the next period."""
        try:
            return publication.offer(data)
        except (TransportError, Closed):
            return aeron.OfferResult.NOT_CONNECTED

    # --- inside: streams of consumers' own

    def _assign(self, hello: ConsumerHello, heard: _Heard) -> None:
        """§10.1.3, E22-E24: explicit ids are ours to answer; of a channel with id 0 the driver answers, or adds its id.

        Half a request, an id without a channel, is declined like one that cannot be granted.
        """
        descriptors, control = _asked(hello)
        if not asks_for_id(descriptors):
            rate = heard.max_rate_hz(hello, self.config.policies.rate_limited_default_hz)
            heard.descriptors = self._private(descriptors, heard.descriptors, rate)
        if not asks_for_id(control):
            heard.control = self._private(control, heard.control, 0)
        if descriptors.stream_id or control.stream_id:
            self._answers.append(self._config_for(hello, heard))

    def _private(self, endpoint: Endpoint, current: PrivateStream | None, rate: int) -> PrivateStream | None:
        """A publication for it, or None: then the request is declined."""

        def find_others() -> list[PrivateStream]:
            streams = [stream for heard in self._consumers.values() for stream in (heard.descriptors, heard.control)]
            return [stream for stream in streams if stream is not None and stream is not current]

        return self._opener.open(self.link, endpoint, current, rate, find_others)

    def _config_for(self, hello: ConsumerHello, heard: _Heard, *, can_use_shm: bool = True) -> ConsumerConfig:
        descriptors = heard.descriptors.endpoint if heard.descriptors else NO_STREAM
        control = heard.control.endpoint if heard.control else NO_STREAM
        decree = heard.decree
        return ConsumerConfig(
            stream_id=hello.stream_id,
            consumer_id=hello.consumer_id,
            use_shm=can_use_shm and (decree is None or decree.use_shm),
            mode=heard.mode(hello),
            descriptor_stream_id=descriptors.stream_id,
            control_stream_id=control.stream_id,
            payload_fallback_uri="" if decree is None else decree.payload_fallback_uri,
            descriptor_channel=descriptors.channel,
            control_channel=control.channel,
        )

    def _forget_stale(self, now_ns: int) -> None:
        window_ns = STALE_PERIODS * self.config.announce_period_ns
        for consumer_id, heard in list(self._consumers.items()):
            if now_ns - heard.heard_ns > window_ns:
                heard.close()
                del self._consumers[consumer_id]
                continue
            for kind in ("descriptors", "control"):
                stream: PrivateStream | None = getattr(heard, kind)
                if stream is None:
                    continue
                if stream.publication.is_connected:
                    stream.unconnected_since_ns = None
                elif stream.unconnected_since_ns is None:
                    stream.unconnected_since_ns = now_ns
                elif now_ns - stream.unconnected_since_ns > window_ns:
                    stream.publication.close()
                    setattr(heard, kind, None)
        self._spread()

    def _spread(self) -> None:
        """Hand the publishing thread a new picture of who wants what."""
        consumers = list(self._consumers.values())
        policy = ProgressPolicy.of(heard.hello for heard in consumers if heard.hello is not None)
        progress: list[aeron.Publication] = []
        if policy is not None and self.link is not None:
            asking = [heard for heard in consumers if heard.hello is not None and heard.hello.supports_progress]
            progress = [heard.control.publication for heard in asking if heard.control is not None]
            if any(heard.control is None for heard in asking):
                if self._progress is None:
                    self._progress = self.link.publish(self.config.driver.control, SMALL_TERM)
                progress.append(self._progress)
        descriptors = tuple(heard.descriptors for heard in consumers if heard.descriptors is not None)
        self.route.is_plain = not descriptors
        self.fan_out = FanOut(descriptors, tuple(progress), policy)
        self._is_spread = True


def _asked(hello: ConsumerHello) -> tuple[Endpoint, Endpoint]:
    descriptors = Endpoint(hello.descriptor_channel, hello.descriptor_stream_id)
    return descriptors, Endpoint(hello.control_channel, hello.control_stream_id)


def _assigned(config: ConsumerConfig) -> tuple[Endpoint, Endpoint]:
    descriptors = Endpoint(config.descriptor_channel, config.descriptor_stream_id)
    return descriptors, Endpoint(config.control_channel, config.control_stream_id)
