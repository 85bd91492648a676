# SPDX-License-Identifier: Apache-2.0
"""The driver's duty cycle: reads the control stream, lets `Lifecycle` decide, performs the effects.

Single-threaded; never blocks. The control stream is shared by all schemas and directions: what is not addressed to a
driver is passed over by its header alone. Each message, order and part of a turn is performed by itself: one that fails
is counted and logged, and the others go on. Driver Model §4.4a, §4.5; decisions A19, E32-E34, E39.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from tensorpool import aeron
from tensorpool.channel import Endpoint
from tensorpool.clock import Clock
from tensorpool.control import Service, State, host_standard
from tensorpool.control.events import MAKING, Making
from tensorpool.control.link import with_parameters
from tensorpool.driver.config import DriverConfig
from tensorpool.driver.failures import Failures
from tensorpool.driver.lifecycle import Announce, CreateEpoch, DropStream, Effect, Exit, Lifecycle, Phase, Report, Send
from tensorpool.driver.memory import Created, Failed, Memory
from tensorpool.driver.message_sizes import check_message_sizes
from tensorpool.driver.outbox import Outbox
from tensorpool.driver.rivals import LISTEN_NS, Rivals
from tensorpool.errors import Closed, DecodeError, DecodeFault, TensorPoolError, TransportError
from tensorpool.logs import get_logger
from tensorpool.wire import Message, control, decode, driver, peek_header
from tensorpool.wire.control import ConsumerConfig, ConsumerHello
from tensorpool.wire.driver import (
    ResponseCode,
    ShmAttachRequest,
    ShmDetachRequest,
    ShmDriverShutdownRequest,
    ShmLeaseKeepalive,
    ShutdownReason,
)

FRAGMENT_LIMIT: Final = 256
RECONNECT_EVERY_NS: Final = 100_000_000
LOOK_EVERY_NS: Final = 500_000_000
CATCH_UP_AT_LEAST_NS: Final = 50_000_000
CATCH_UP_AT_MOST_NS: Final = 1_000_000_000
MAX_EARLY: Final = 4096  # requests kept while we listen for other drivers; clients ask again
MAX_EARLY_BYTES: Final = 16 << 10  # more than any request has
STALL_AT_LEAST_NS: Final = 100_000_000  # idle turns come every few milliseconds
LAST_WORDS_NS: Final = 1_000_000_000  # how long a log that is held may keep the shutdown notice from leaving
HOLDERS_EVERY_NS: Final = 1_000_000_000
WINDOW_LIMIT: Final = "100ms"  # after which Aeron passes over an untethered subscriber that does not poll

_REQUESTS: Final = frozenset(
    kind.TEMPLATE_ID for kind in (ShmAttachRequest, ShmDetachRequest, ShmLeaseKeepalive, ShmDriverShutdownRequest)
)
_OF_CONSUMERS: Final = frozenset(kind.TEMPLATE_ID for kind in (ConsumerHello, ConsumerConfig))
_CORRELATION_ID: Final = struct.Struct("<8xq")  # the first field of an attach or detach request of any version (E33)


class DriverConductor:
    """The agent that owns leases and epochs. Everything public but `do_work` may be called from other threads."""

    role_name = "tensorpool-driver"

    def __init__(self, config: DriverConfig, clock: Clock, aeron_dir: str) -> None:
        self._config = config
        self._clock = clock
        self._aeron_dir = aeron_dir
        self._log = get_logger("driver", instance_id=config.driver.instance_id)
        self._memory = Memory(config, clock)
        self.lifecycle = Lifecycle(
            config,
            first_lease_id=clock.realtime_ns(),
            hugepages=self._memory.is_hugepages,
            root=f"shm:file?path={self._memory.path}/",
        )
        self._rivals = Rivals(config, clock, self.lifecycle, self._log)
        self.failure: TensorPoolError | None = None  # why the driver had to end, where it did not end in order
        self._link: _Link | None = None
        self._media_driver = aeron.DriverSight(aeron_dir)
        self._reconnect_ns = 0
        self._look_ns = 0
        self.failures = Failures(self._log, clock, self.lifecycle.counts)
        self._outbox = Outbox(self.lifecycle.counts, self._log)
        self._holders: tuple[aeron.Holder, ...] = ()
        self._holders_ns = 0
        self._orders: deque[Callable[[int], list[Effect]]] = deque()
        self._stall_ns = max(config.lease_keepalive_interval_ns, STALL_AT_LEAST_NS)
        self._last_turn_ns = clock.monotonic_ns()
        self._next_housekeeping_ns = 0
        self._service = self._make_service() if config.control.enabled else None

    # --- for other threads

    def shut_down(self, reason: ShutdownReason = ShutdownReason.NORMAL, text: str = "") -> None:
        """Drain and end; the turn that follows begins it."""
        self._orders.append(lambda now_ns: self.lifecycle.drain(reason, text, now_ns))

    def revoke(self, lease_id: int, text: str = "revoked by the operator") -> None:
        """End a lease administratively."""
        self._orders.append(lambda now_ns: self.lifecycle.revoke(lease_id, text, now_ns))

    def remove_regions(self) -> None:
        """Remove the files of every epoch; for a process that cannot wait for `on_close`."""
        self._memory.remove_everything()

    # --- the agent

    def on_start(self) -> None:
        now_ns = self._clock.monotonic_ns()
        try:
            self._link = link = _Link(self._config, self._aeron_dir, now_ns)
            check_message_sizes(self._config, link.answers.max_message_length, link.announces.max_message_length)
            self._media_driver.adopt()
            self._bind_service(link)
            self._last_turn_ns = now_ns
            self._perform(self.lifecycle.on_start(now_ns))
            self._listen_for_rivals(link)
        except BaseException:
            self._unbind_service()
            if self._link is not None:
                self._link.close()
            self._memory.close()
            raise
        self._log.info("driver_started", aeron_dir=self._aeron_dir, path=self._memory.path)

    def do_work(self) -> int:
        now_ns = self._clock.monotonic_ns()
        is_stalled = now_ns - self._last_turn_ns > self._stall_ns
        self._last_turn_ns = now_ns
        self.lifecycle.stamp_offset_ns = self._memory.stamp_offset_ns()
        work = self._part("listening", self._listen, now_ns)
        if self._rivals.failure is not None:
            self._yield()
            raise aeron.AgentTerminated
        if is_stalled:
            # Keepalives that waited in the log are read by now; those that could not be sent get their chance.
            self.lifecycle.on_stall(now_ns)
            self._log.warning("driver_stalled")
        while self._orders:
            work += self._part("order", self._obey, self._orders.popleft(), now_ns)
        work += self._part("memory", self._take_outcomes, now_ns)
        work += self._part("time", lambda: self._perform(self.lifecycle.on_tick(now_ns)))
        if now_ns >= self._next_housekeeping_ns:
            self._next_housekeeping_ns = now_ns + self._config.announce_period_ns
            self._part("activity", self._memory.refresh_activity)
            self._part("rivals", self._rivals.expire, now_ns)
            work += self._part("collection", self._memory.collect, now_ns)
        work += self._part("service", self._serve_commands)
        work += self._part("sending", self._flush)
        self._part("holders", self._watch_holders, now_ns)
        return work

    def on_close(self) -> None:
        """Send the shutdown notice, wait a moment where the log is held, and release everything, whatever fails."""
        self._part("end", lambda: self._perform(self.lifecycle.end(self._clock.monotonic_ns())))
        self._outbox.drop_announces()
        deadline_ns = time.monotonic_ns() + LAST_WORDS_NS
        while self._link is not None and time.monotonic_ns() < deadline_ns:
            self._part("sending", self._flush)
            if not self._outbox:
                break
            time.sleep(0.005)
        self._part("service", self._unbind_service)
        if self._link is not None:
            self._part("connection", self._link.close)
        self._memory.close()
        self._log.info("driver_stopped", counts=dict(self.lifecycle.counts))

    # --- inside

    def _part[**P](self, name: str, part: Callable[P, int | None], *args: P.args, **kwargs: P.kwargs) -> int:
        """Do one part of the turn. A failure is reported; without a media driver the link is given up."""
        try:
            return part(*args, **kwargs) or 0
        except aeron.AgentTerminated:
            raise
        except Exception as error:
            if isinstance(error, TransportError | Closed) and name in ("listening", "sending", "holders"):
                self._lose_link(error)
            else:
                self.failures.report(name, error)
            return 0

    def _obey(self, order: Callable[[int], list[Effect]], now_ns: int) -> int:
        return self._perform(order(now_ns))

    def _take_outcomes(self, now_ns: int) -> int:
        work = 0
        while (outcome := self._memory.take_finished()) is not None:
            work += self._part("memory", self._on_outcome, outcome, now_ns)
        return work

    def _serve_commands(self) -> int:
        if self._service is None:
            return 0
        if self.lifecycle.phase is not Phase.SERVING:
            self._service.state = State.DRAINING
        return self._service.invoke()

    def _watch_holders(self, now_ns: int) -> None:
        """Log which subscribers hold our logs when that changes, or more is known of their processes."""
        if self._link is None:
            return
        if now_ns >= self._holders_ns:
            self._holders_ns = now_ns + HOLDERS_EVERY_NS
            self._link.refresh_holders()
        holders = self._link.holders
        if holders == self._holders:
            return
        before = {(holder.subscriber.registration_id, holder.pids) for holder in self._holders}
        after = {(holder.subscriber.registration_id, holder.pids) for holder in holders}
        self._holders = holders
        if after - before:
            self._log.warning("log_held", holders=[str(holder) for holder in holders], renewals=self._link.renewals)
        elif before and not after:
            self._log.info("log_released", renewals=self._link.renewals)

    def _listen_for_rivals(self, link: _Link) -> None:
        """Ask for a driver that was here before us, and wait for its answer. Raises ConfigError.

        Memory is made meanwhile; requests are kept, and answered afterwards.
        """
        early: list[tuple[bytes, aeron.MessageInfo]] = []

        def keep(data: bytes, info: aeron.MessageInfo) -> None:
            if not self._is_of_rival(data, info) and len(data) <= MAX_EARLY_BYTES and len(early) < MAX_EARLY:
                early.append((data, info))

        self._perform(self._rivals.on_start())
        until_ns = time.monotonic_ns() + LISTEN_NS
        while time.monotonic_ns() < until_ns and self._rivals.failure is None:
            self._flush()
            link.poll(lambda data, info: self._part("message", keep, data, info), FRAGMENT_LIMIT)
            time.sleep(0.001)
        if self._rivals.failure is not None:
            self._yield()
            raise self._rivals.failure
        for data, info in early:
            self._on_message(data, info)

    def _is_of_rival(self, data: bytes, info: aeron.MessageInfo) -> bool:
        """Whether it came from another driver, or from us; what follows from it is done."""
        if self._link is None or self._link.is_own(info):
            return True
        effects = self._rivals.take(data, is_before=self._link.is_from_before(info))
        self._perform(effects or ())
        return effects is not None

    def _yield(self) -> None:
        """End without a word: the other driver's clients listen here too, and would take our end for its end (E31)."""
        self.failure = self._rivals.failure
        self.lifecycle.phase = Phase.ENDED

    def _listen(self, now_ns: int) -> int:
        if self._link is None:
            if now_ns < self._reconnect_ns:
                return 0
            self._reconnect_ns = now_ns + RECONNECT_EVERY_NS
            if self._media_driver.is_dead() or not aeron.is_driver_active(self._aeron_dir):
                return 0
            self._media_driver.adopt()
            self._link = _Link(self._config, self._aeron_dir, now_ns)
            self._bind_service(self._link)
            self.lifecycle.on_stall(now_ns)
            self._log.info("media_driver_found", aeron_dir=self._aeron_dir)
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + LOOK_EVERY_NS
            if self._link.is_lost or self._media_driver.is_dead():
                raise TransportError(f"the media driver at {self._aeron_dir} is gone")
        fragments = self._link.poll(self._on_message, FRAGMENT_LIMIT)
        self._link.on_polled(fragments, now_ns)
        return fragments

    def _make_service(self) -> Service:
        service = Service("driver", self._config.driver.instance_id, config=self._config.control, clock=self._clock)
        host_standard(service, status=self._status, drain=lambda: self.shut_down(text="drained by an event"))
        return service

    def _bind_service(self, link: _Link) -> None:
        if self._service is not None:
            self._service.bind(link.client, patiently=True)

    def _status(self) -> dict[str, object]:
        return {
            "aeron_dir": self._aeron_dir,
            "path": str(self._memory.path),
            "streams": len(self.lifecycle.streams),
            "leases": len(self.lifecycle.leases),
            "held_by": [str(holder) for holder in self._holders],
            "sessions_given_up": 0 if self._link is None else self._link.renewals,
            "counts": dict(self.lifecycle.counts),
        }

    def _unbind_service(self) -> None:
        if self._service is not None:
            self._service.unbind()

    def _lose_link(self, error: Exception) -> None:
        link, self._link = self._link, None
        self._part("service", self._unbind_service)
        if link is not None:
            self._log.warning("media_driver_lost", error=str(error))
            self._part("connection", link.close)
        self._media_driver.forget()
        self._outbox.clear()

    def _on_message(self, data: bytes, info: aeron.MessageInfo) -> None:
        self._part("message", self._hear, data, info)

    def _hear(self, data: bytes, info: aeron.MessageInfo) -> None:
        now_ns = self._last_turn_ns
        counts = self.lifecycle.counts
        if self._is_of_rival(data, info):
            return
        if self._link is not None and self._link.is_from_before(info):
            counts["messages_from_before"] += 1
            return
        try:
            header = peek_header(data)
            if header.schema_id == driver.schema.id:
                if header.template_id in _REQUESTS:
                    self._perform(self._on_request(decode(data), now_ns))
            elif header.schema_id == control.schema.id and header.template_id in _OF_CONSUMERS:
                self._on_consumer(decode(data), info, now_ns)
        except DecodeError as error:
            counts["malformed_messages"] += 1
            self._perform(self._on_malformed(data, error))

    def _on_consumer(self, message: Message, info: aeron.MessageInfo, now_ns: int) -> None:
        match message:
            case ConsumerHello():
                self._perform(self.lifecycle.on_consumer_hello(message, now_ns))
            case ConsumerConfig():
                self._perform(self.lifecycle.on_consumer_config(message))

    def _on_request(self, message: Message, now_ns: int) -> list[Effect]:
        match message:
            case ShmLeaseKeepalive():
                self.lifecycle.on_keepalive(message, now_ns)
                return []
            case ShmAttachRequest():
                self.lifecycle.authority.on_request(message)
                return self.lifecycle.on_attach(message, now_ns)
            case ShmDetachRequest():
                return self.lifecycle.on_detach(message, now_ns)
            case ShmDriverShutdownRequest():
                return self.lifecycle.on_shutdown_request(message, now_ns)
        return []

    def _on_malformed(self, data: bytes, error: DecodeError) -> list[Effect]:
        """Answer a request that can still be told apart by its correlation id; drop everything else."""
        if len(data) < _CORRELATION_ID.size:
            return []
        header = peek_header(data)
        if header.schema_id != driver.schema.id:
            return []
        is_unsupported = error.fault is DecodeFault.VERSION or error.field == "publish_mode"  # A19, E33
        code = ResponseCode.UNSUPPORTED if is_unsupported else ResponseCode.INVALID_PARAMS
        (correlation_id,) = _CORRELATION_ID.unpack_from(data)
        if header.template_id == ShmAttachRequest.TEMPLATE_ID:
            return self.lifecycle.on_malformed_attach(correlation_id, code, str(error))
        if header.template_id == ShmDetachRequest.TEMPLATE_ID:
            return self.lifecycle.on_malformed_detach(correlation_id, code, str(error))
        return []

    def _on_outcome(self, outcome: Created | Failed, now_ns: int) -> int:
        return self._perform(self._outcome_effects(outcome, now_ns))

    def _outcome_effects(self, outcome: Created | Failed, now_ns: int) -> list[Effect]:
        if isinstance(outcome, Created):
            epoch = outcome.epoch
            self.lifecycle.authority.on_epoch_created(epoch.stream_id, epoch.epoch)
            self._log.info("epoch_created", stream_id=epoch.stream_id, epoch=epoch.epoch, reserved=outcome.reserved)
            return self.lifecycle.on_epoch_created(epoch, outcome.reserved, now_ns)
        effects = self.lifecycle.on_epoch_failed(outcome.stream_id, outcome.reserved, outcome.text, now_ns)
        if outcome.is_fatal:
            self.failure = TensorPoolError(outcome.text)
            effects += self.lifecycle.drain(ShutdownReason.ERROR, outcome.text, now_ns)
        return effects

    def _perform(self, effects: Iterable[Effect]) -> int:
        """Each effect by itself: one that fails takes no other with it."""
        done = 0
        for effect in effects:
            done += 1
            self._part("effect", self._perform_one, effect)
        return done

    def _perform_one(self, effect: Effect) -> None:
        match effect:
            case Send():
                if self._link is None:  # clients ask again
                    self.lifecycle.counts["messages_dropped"] += 1
                else:
                    self._outbox.post(effect.message)
            case Announce():
                if self._link is not None:
                    self._outbox.announce(effect.stream_id)
            case CreateEpoch():
                self._memory.submit(effect)
            case Report():
                self._report(effect)
            case DropStream():
                self._memory.drop(effect.stream_id)
            case Exit():
                raise aeron.AgentTerminated

    def _report(self, report: Report) -> None:
        if self._service is not None:
            value = Making(
                stream_id=report.stream_id, bytes=report.size_bytes, elapsed_ms=report.elapsed_ns // 1_000_000
            )
            self._service.status(MAKING, value, correlation_id=report.correlation_id)

    def _flush(self) -> int:
        link = self._link
        if link is None:
            return 0
        return self._outbox.flush(link.answers, link.announces, self._announce_of)

    def _announce_of(self, stream_id: int) -> Message | None:
        try:
            return self.lifecycle.announce(stream_id, self._clock.monotonic_ns())
        except Exception as error:  # the other streams are announced
            self.failures.report("announce", error)
            return None


class _Link:
    """The driver's side of the control plane on one media driver."""

    def __init__(self, config: DriverConfig, aeron_dir: str, now_ns: int) -> None:
        self._made_ns = now_ns
        self._is_catching_up = True
        endpoint = config.driver
        self.client = aeron.connect(aeron_dir, client_name=f"tensorpool-driver {endpoint.instance_id}")
        try:
            control = endpoint.control_channel, endpoint.control_stream_id
            self._shared = self.client.add_publication(*control)
            self._joined_at = self._shared.position
            self.requests = self.client.add_subscription(*control)
            # Logs of our own: clients that fill theirs, which they share, cannot keep us from answering.
            self.answers = self._publish(endpoint.control, aeron_dir)
            self.announces = self.answers
            self._announced = None
            if endpoint.announce != endpoint.control:
                self.announces = self._publish(endpoint.announce, aeron_dir)
                self._announced = self.client.add_subscription(endpoint.announce_channel, endpoint.announce_stream_id)
        except BaseException:
            self.client.close()
            raise

    @property
    def is_lost(self) -> bool:
        return self.client.is_closed

    def poll(self, handler: Callable[[bytes, aeron.MessageInfo], object], limit: int) -> int:
        if self._announced is not None:  # where another driver would announce too
            self._announced.poll(handler, limit)
        return self.requests.poll(handler, limit)

    def is_own(self, info: aeron.MessageInfo) -> bool:
        return self.answers.is_own(info) or self.announces.is_own(info)

    @property
    def holders(self) -> tuple[aeron.Holder, ...]:
        """Subscribers that do not poll, and would stop us if we did not open new sessions."""
        if self.announces is self.answers:
            return self.answers.holders
        return self.answers.holders + self.announces.holders

    @property
    def renewals(self) -> int:
        return sum(outlet.renewals for outlet in {self.answers, self.announces})

    def refresh_holders(self) -> None:
        for outlet in {self.answers, self.announces}:
            outlet.refresh_holders()

    def is_from_before(self, info: aeron.MessageInfo) -> bool:
        """Whether a message was in its log before we were.

        A new subscriber on IPC begins where the slowest one is: it may find attaches that an earlier driver granted,
        and the shutdown request that ended it. Of the log that publishers share we know where it stood; those that
        have one of their own are passed over until all logs were read to the end once. Clients ask again.
        """
        if info.session_id == self._shared.session_id:
            return info.position <= self._joined_at
        return self._is_catching_up

    def on_polled(self, fragments: int, now_ns: int) -> None:
        """Logs come into sight a moment after we joined, and one that never ends must not hold us up."""
        age_ns = now_ns - self._made_ns
        if (fragments == 0 and age_ns > CATCH_UP_AT_LEAST_NS) or age_ns > CATCH_UP_AT_MOST_NS:
            self._is_catching_up = False

    def close(self) -> None:
        self.client.close()

    def _publish(self, endpoint: Endpoint, aeron_dir: str) -> aeron.RenewedPublication:
        channel = with_parameters(endpoint.channel, {"untethered-window-limit-timeout": WINDOW_LIMIT})
        return aeron.RenewedPublication(self.client, aeron_dir, channel, endpoint.stream_id)
