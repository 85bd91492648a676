# SPDX-License-Identifier: Apache-2.0
"""The consumers that a producer knows of: what they asked for, how far they have read, and the streams of their own.

A hello may come from any process, so it decides little: private streams use the media of the deployment, their logs are
small, and their number and the time that opening them takes are limited. What is declined is counted.
Belongs to the conductor; the publishing thread reads `fan_out`, which is replaced as a whole.
Wire §5, §10.1.2, §10.1.3, §10.2.2; decisions C20, E22-E28.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from tensorpool import aeron
from tensorpool._core import Route, monotonic_ns
from tensorpool.channel import MAX_AERON_STREAM_ID, Endpoint, asks_for_id, is_repeatable, may_be_private
from tensorpool.client.progress import ProgressPolicy, ProgressThrottle
from tensorpool.client.streams import SMALL_TERM, ClientStreams
from tensorpool.clock import Clock
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import Closed, ConfigError, TransportError
from tensorpool.logs import Logger
from tensorpool.shm import LAYOUT_VERSION
from tensorpool.wire.consumer_config import NO_STREAM, ConsumerTerms, assigned_streams, requested_streams
from tensorpool.wire.control import ConsumerConfig, ConsumerHello, FrameProgress, FrameProgressState, QosConsumer

MAX_CONSUMERS: Final = 1024  # known at once; further ones are not noted until some of these are gone
STALE_PERIODS: Final = 4  # without hello or QoS (E28)
FIRST_FRAME_NS: Final = 100_000_000
MAX_PRIVATE_STREAMS: Final = 64
OPENING_NS: Final = 250_000_000  # spent on opening private streams in an announce period; then they are declined
LOG_EVERY_NS: Final = 1_000_000_000


class PrivateStream:
    """A consumer's own descriptor or progress stream, with the rate that it asked for."""

    __slots__ = ("_due_ns", "_interval_ns", "_unconnected_since_ns", "endpoint", "publication")

    def __init__(self, endpoint: Endpoint, publication: aeron.Publication, max_rate_hz: int) -> None:
        self.endpoint: Final = endpoint
        self.publication: Final = publication
        self._interval_ns = 1_000_000_000 // max_rate_hz if max_rate_hz else 0
        self._due_ns = 0
        self._unconnected_since_ns: int | None = None

    def set_rate(self, max_rate_hz: int) -> None:
        self._interval_ns = 1_000_000_000 // max_rate_hz if max_rate_hz else 0

    def is_due(self, now_ns: int) -> bool:
        """Whether the cap leaves room for this frame."""
        if now_ns < self._due_ns:
            return False
        is_steady = now_ns - self._due_ns < self._interval_ns
        self._due_ns = (self._due_ns if is_steady else now_ns) + self._interval_ns
        return True

    def is_unused(self, now_ns: int, window_ns: int) -> bool:
        """Whether it has had no subscriber for so long; then it is closed."""
        if self.publication.is_connected:
            self._unconnected_since_ns = None
            return False
        if self._unconnected_since_ns is None:
            self._unconnected_since_ns = now_ns
        if now_ns - self._unconnected_since_ns <= window_ns:
            return False
        self.publication.close()
        return True


class PrivateStreamOpener:
    """Opens the private streams of one producer."""

    def __init__(self, config: DriverConfig, clock: Clock, log: Logger, counts: Counter[str]) -> None:
        self._config = config
        self._clock = clock
        self._log = log
        self._counts = counts
        self._opening_ns = 0  # spent since `_opening_since_ns`
        self._opening_since_ns = 0
        self._log_ns = 0

    def open(
        self,
        streams: ClientStreams | None,
        endpoint: Endpoint,
        current: PrivateStream | None,
        rate_hz: int,
        find_others: Callable[[], Sequence[PrivateStream]],
    ) -> PrivateStream | None:
        """A publication for it, the current one if that leads there; None: nothing was asked for, or it is declined.

        `find_others` finds the open streams of all other consumers, and of this consumer's other kind.
        """
        if current is not None and current.endpoint == endpoint and not current.publication.is_closed:
            current.set_rate(rate_hz)
            return current
        if current is not None:
            current.publication.close()
        if endpoint == NO_STREAM:
            return None
        started_ns = self._clock.monotonic_ns()
        reason = self._reason_to_decline(endpoint, find_others(), started_ns)
        if reason is None and streams is not None:
            try:
                return PrivateStream(endpoint, streams.publish_private(endpoint), rate_hz)
            except (ConfigError, TransportError) as error:
                reason = str(error)
            finally:
                self._opening_ns += self._clock.monotonic_ns() - started_ns
        self._counts["private_streams_declined"] += 1
        if started_ns >= self._log_ns:
            self._log_ns = started_ns + LOG_EVERY_NS
            self._log.warning("private_stream_declined", channel=endpoint.channel[:200], error=reason)
        return None

    def _reason_to_decline(self, endpoint: Endpoint, others: Sequence[PrivateStream], now_ns: int) -> str | None:
        if not endpoint.channel or not 0 < endpoint.stream_id <= MAX_AERON_STREAM_ID:
            return f"stream id {endpoint.stream_id}: expected a channel with an id from 1 to {MAX_AERON_STREAM_ID}"
        if not may_be_private(endpoint.channel, self._config.driver.descriptor.channel):
            return "expected an Aeron channel over IPC, or over the media of driver.descriptor_channel"
        if self._is_taken(endpoint, others):
            return f"stream id {endpoint.stream_id} is in use there"
        if len(others) >= MAX_PRIVATE_STREAMS:
            return f"{len(others)} private streams are open"
        if not self._has_time(now_ns):
            return "opening private streams took too long; the consumer may ask again"
        return None

    def _has_time(self, now_ns: int) -> bool:
        """Whether there is time to open another private stream: some ms, or as long as a name server takes."""
        if now_ns - self._opening_since_ns >= max(self._config.announce_period_ns, 10 * self._opening_ns):
            self._opening_ns, self._opening_since_ns = 0, now_ns
        return self._opening_ns < OPENING_NS

    def _is_taken(self, endpoint: Endpoint, others: Sequence[PrivateStream]) -> bool:
        """§5: a stream that others use is not given away."""
        shared = self._config.driver
        taken = {shared.control, shared.announce, shared.descriptor, shared.qos, shared.metadata}
        taken |= {stream.endpoint for stream in others}
        return endpoint.place in {it.place for it in taken}


class FanOut(msgspec.Struct, frozen=True):
    """Where descriptors and progress go besides the shared descriptor stream, as of now."""

    descriptors: tuple[PrivateStream, ...] = ()
    progress: tuple[aeron.Publication, ...] = ()
    policy: ProgressPolicy | None = None


class ProgressSender:
    """Sends FrameProgress: at once from the thread that fills a frame, what has to wait from the conductor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._throttle = ProgressThrottle()
        self._ids = (0, 0, 0)

    def start(self, stream_id: int, epoch: int, seq: int, unit_bytes: int, fan_out: FanOut) -> None:
        """A frame begins."""
        with self._lock:
            self._ids = stream_id, epoch, seq
            self._throttle.start(unit_bytes)
            self._send_due(fan_out)

    def update(self, filled_bytes: int, fan_out: FanOut) -> bool:
        """So much of it is written. True: it has to wait to be sent. Raises ValueError for less than before."""
        with self._lock:
            self._throttle.update(filled_bytes)
            self._send_due(fan_out)
            return fan_out.policy is not None and self._throttle.is_due(fan_out.policy)

    def flush(self, fan_out: FanOut) -> int:
        """Conductor: send what had to wait, if its time has come. Returns how much was sent."""
        with self._lock:
            return self._send_due(fan_out)

    def is_waiting(self, fan_out: FanOut) -> bool:
        """Whether something has to be sent as soon as it may."""
        return fan_out.policy is not None and self._throttle.is_due(fan_out.policy)

    def complete(self, filled_bytes: int, fan_out: FanOut) -> None:
        """The frame is committed (§15.18 step 8: not before)."""
        with self._lock:
            if self._throttle.end(is_committed=True):
                self._send(FrameProgressState.COMPLETE, filled_bytes, fan_out)

    def abandon(self) -> bool:
        """The frame is given up. Whether consumers know of it."""
        with self._lock:
            is_known = self._throttle.is_started
            self._throttle.end(is_committed=False)
            return is_known

    def _send_due(self, fan_out: FanOut) -> int:
        if fan_out.policy is None or not fan_out.progress:
            return 0
        state = self._throttle.take(fan_out.policy, monotonic_ns())
        if state is None:
            return 0
        self._send(state, self._throttle.filled_bytes, fan_out)
        return 1

    def _send(self, state: FrameProgressState, filled_bytes: int, fan_out: FanOut) -> None:
        stream_id, epoch, seq = self._ids
        message = FrameProgress(
            stream_id=stream_id, epoch=epoch, seq=seq, payload_bytes_filled=filled_bytes, state=state
        ).encode()
        for publication in fan_out.progress:
            try:
                publication.offer(message)
            except (Closed, TransportError):
                continue  # the conductor closed it, or notices by itself


class KnownConsumer(ConsumerTerms):
    """A consumer that sent a hello, or reported QoS."""

    def __init__(self) -> None:
        super().__init__()
        self.received_ns = 0  # the last message of it
        self.epoch: int | None = None
        self.last_seq_seen = 0
        self.qos_ns = 0
        self.descriptors: PrivateStream | None = None
        self.control: PrivateStream | None = None

    def config(self, *, can_use_shm: bool = True) -> ConsumerConfig:
        """The answer to its hello."""
        descriptors = self.descriptors.endpoint if self.descriptors else NO_STREAM
        control = self.control.endpoint if self.control else NO_STREAM
        return self.answer(descriptors, control, can_use_shm=can_use_shm)

    def close(self) -> None:
        for stream in (self.descriptors, self.control):
            if stream is not None:
                stream.publication.close()
        self.descriptors = self.control = None


class KnownConsumers:
    """The consumers of one producer. A relay (`is_relay`) opens no private streams for them.

    `send` puts an answer on the control stream; `route.is_plain` is set while no consumer has private descriptors.
    """

    def __init__(
        self,
        config: DriverConfig,
        clock: Clock,
        log: Logger,
        route: Route,
        send: Callable[[ConsumerConfig], object],
        *,
        is_relay: bool = False,
    ) -> None:
        self.fan_out = FanOut()
        self.counts: Counter[str] = Counter()  # of requests that were declined, and messages that were not noted
        self.streams: ClientStreams | None = None  # at the current media driver
        self.met = 0  # consumers that said hello so far
        self._config = config
        self._route = route
        self._send = send
        self._is_relay = is_relay
        self._consumers: dict[int, KnownConsumer] = {}
        self._opener = PrivateStreamOpener(config, clock, log, self.counts)
        self._progress: aeron.Publication | None = None
        self._is_fan_out_current = True
        self._answers: list[ConsumerConfig] = []  # that are sent once it is

    def __len__(self) -> int:
        return len(self._consumers)

    # --- for any thread

    def count_in(self, epoch: int) -> int:
        """How many consumers have reported lately that they have this epoch mapped."""
        return sum(consumer.epoch == epoch for consumer in list(self._consumers.values()))

    def have_read(self, epoch: int, seq: int, since_ns: int) -> bool:
        """Whether every consumer of this epoch has reported this frame or a later one.

        B31: seq 0 looks like none at all, so for the first frame alone a report of a while after is wanted.
        """
        consumers = [consumer for consumer in list(self._consumers.values()) if consumer.epoch == epoch]
        if seq == 0:
            return all(consumer.qos_ns > since_ns + FIRST_FRAME_NS for consumer in consumers)
        return all(consumer.last_seq_seen >= seq for consumer in consumers)

    # --- messages

    def on_hello(self, hello: ConsumerHello, now_ns: int) -> bool:
        """Whether it is the first hello of a consumer."""
        if len(self._consumers) >= MAX_CONSUMERS and hello.consumer_id not in self._consumers:
            self._forget_one_without_hello()
        consumer = self._known(hello.consumer_id)
        if consumer is None:
            return False
        is_first = consumer.hello is None
        self.met += is_first
        consumer.on_hello(hello)
        consumer.received_ns = now_ns
        if hello.expected_layout_version not in (0, LAYOUT_VERSION):  # C20
            self._answers.append(consumer.config(can_use_shm=False))
        elif requested_streams(hello) != (NO_STREAM, NO_STREAM):
            if self._is_relay:
                self._answers.append(consumer.config())
            else:
                self._assign(hello, consumer)
        self._is_fan_out_current = False
        return is_first

    def on_consumer_config(self, config: ConsumerConfig) -> None:
        """What another process sent to a consumer: streams whose ids the driver chose are opened here (E24).

        §10.1.3: a central authority may force a mode or redirect, so our own answers repeat it from now on.
        """
        consumer = self._consumers.get(config.consumer_id)
        if consumer is None or not is_repeatable(config.payload_fallback_uri):
            return
        consumer.override = config
        if consumer.hello is None:
            return
        by_driver = [asks_for_id(requested) for requested in requested_streams(consumer.hello)]
        shared = self._config.driver.descriptor, self._config.driver.control  # E25: being assigned these declines
        descriptors, control = (
            endpoint if is_by_driver and endpoint != declined else NO_STREAM
            for endpoint, is_by_driver, declined in zip(assigned_streams(config), by_driver, shared, strict=True)
        )
        if not self._is_relay:
            if by_driver[0]:
                self._open_descriptors(consumer, descriptors)
            if by_driver[1]:
                consumer.control = self._open(control, consumer.control, 0)
        is_declined = (descriptors.channel and not consumer.descriptors) or (control.channel and not consumer.control)
        if is_declined:  # by us: without this answer the consumer would wait on a stream without a publisher
            self._answers.append(consumer.config())
        self._is_fan_out_current = False

    def on_qos(self, qos: QosConsumer, now_ns: int) -> None:
        consumer = self._known(qos.consumer_id)
        if consumer is not None:
            consumer.received_ns = consumer.qos_ns = now_ns
            consumer.epoch = qos.epoch
            consumer.last_seq_seen = qos.last_seq_seen

    def on_lease_ended(self, consumer_id: int) -> None:
        """E28: a consumer without a lease needs no stream of its own."""
        consumer = self._consumers.pop(consumer_id, None)
        if consumer is not None:
            consumer.close()
            self._update_fan_out()

    # --- the conductor's turn

    def do_work(self) -> None:
        """Open what consumers asked for since the last turn, then answer them: an answer is true when it is sent."""
        if not self._is_fan_out_current:
            self._update_fan_out()
        for answer in self._answers:
            self._send(answer)
        self._answers.clear()

    def forget_stale(self, now_ns: int) -> None:
        """Forget consumers that are silent, and close private streams that have had no subscriber for as long."""
        window_ns = STALE_PERIODS * self._config.announce_period_ns
        for consumer_id, consumer in list(self._consumers.items()):
            if now_ns - consumer.received_ns > window_ns:
                consumer.close()
                del self._consumers[consumer_id]
                continue
            if consumer.descriptors is not None and consumer.descriptors.is_unused(now_ns, window_ns):
                consumer.descriptors = None
            if consumer.control is not None and consumer.control.is_unused(now_ns, window_ns):
                consumer.control = None
        self._update_fan_out()

    def forget_all(self) -> None:
        """The media driver is gone, and every stream with it."""
        self.streams = self._progress = None
        for consumer in self._consumers.values():
            consumer.close()
        self._consumers.clear()
        self._update_fan_out()

    # --- inside

    def _known(self, consumer_id: int) -> KnownConsumer | None:
        """The consumer of this id; None: it is new, and there are too many. Those are counted."""
        consumer = self._consumers.get(consumer_id)
        if consumer is None and len(self._consumers) < MAX_CONSUMERS:
            consumer = self._consumers[consumer_id] = KnownConsumer()
        if consumer is None:
            self.counts["consumers_beyond_limit"] += 1
        return consumer

    def _forget_one_without_hello(self) -> None:
        """Make room for a consumer that sends a hello: ids that only reported QoS may be made up."""
        stranger = next((number for number, consumer in self._consumers.items() if consumer.hello is None), None)
        if stranger is not None:
            del self._consumers[stranger]
            self.counts["consumers_beyond_limit"] += 1

    def _assign(self, hello: ConsumerHello, consumer: KnownConsumer) -> None:
        """§10.1.3, E22-E24: explicit ids are ours to answer; of a channel with id 0 the driver answers, or adds its id.

        Half a request, an id without a channel, is declined like one that cannot be granted.
        """
        descriptors, control = requested_streams(hello)
        if not asks_for_id(descriptors):
            self._open_descriptors(consumer, descriptors)
        if not asks_for_id(control):
            consumer.control = self._open(control, consumer.control, 0)
        if descriptors.stream_id or control.stream_id:
            self._answers.append(consumer.config())

    def _open_descriptors(self, consumer: KnownConsumer, endpoint: Endpoint) -> None:
        rate_hz = consumer.max_rate_hz(self._config.policies.rate_limited_default_hz)
        consumer.descriptors = self._open(endpoint, consumer.descriptors, rate_hz)

    def _open(self, endpoint: Endpoint, current: PrivateStream | None, rate_hz: int) -> PrivateStream | None:
        """A publication for it, or None: then the request is declined."""

        def find_others() -> list[PrivateStream]:
            kept = [
                stream for consumer in self._consumers.values() for stream in (consumer.descriptors, consumer.control)
            ]
            return [stream for stream in kept if stream is not None and stream is not current]

        return self._opener.open(self.streams, endpoint, current, rate_hz, find_others)

    def _update_fan_out(self) -> None:
        consumers = list(self._consumers.values())
        policy = ProgressPolicy.of(consumer.hello for consumer in consumers if consumer.hello is not None)
        progress: list[aeron.Publication] = []
        if policy is not None and self.streams is not None:
            asking = [consumer for consumer in consumers if consumer.hello and consumer.hello.supports_progress]
            progress = [consumer.control.publication for consumer in asking if consumer.control is not None]
            if any(consumer.control is None for consumer in asking):
                if self._progress is None:
                    self._progress = self.streams.publish(self._config.driver.control, SMALL_TERM)
                progress.append(self._progress)
        descriptors = tuple(consumer.descriptors for consumer in consumers if consumer.descriptors is not None)
        self._route.is_plain = not descriptors
        self.fan_out = FanOut(descriptors, tuple(progress), policy)
        self._is_fan_out_current = True
