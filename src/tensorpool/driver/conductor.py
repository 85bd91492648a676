# SPDX-License-Identifier: Apache-2.0
"""The driver's duty cycle: reads the control stream, lets `Lifecycle` decide, performs the effects.

Single-threaded; never blocks. Each message, order and part of a turn is performed by itself: one that fails is counted
and logged, and the others go on. Driver Model §4.4a, §4.5; decisions A19, E32-E34, E39, K9.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Final

from tensorpool import aeron
from tensorpool.aeron.adapter import MessageAdapter, has_kind
from tensorpool.audit_log import AuditLog
from tensorpool.clock import Clock
from tensorpool.control import State
from tensorpool.control.identification import MAX_NAME
from tensorpool.driver.audit import Event, Trail
from tensorpool.driver.commands import DriverCommands
from tensorpool.driver.config import DriverConfig
from tensorpool.driver.connected_streams import DriverStreams
from tensorpool.driver.effects import Announce, CreateEpoch, DropStream, Effect, Exit, Report, Send
from tensorpool.driver.failures import Failures
from tensorpool.driver.lifecycle import Lifecycle, Phase
from tensorpool.driver.memory import Created, Failed, Memory
from tensorpool.driver.message_sizes import check_message_sizes
from tensorpool.driver.other_drivers import LISTEN_NS, OtherDrivers
from tensorpool.driver.outbox import Outbox
from tensorpool.driver.reload import Plan, plan
from tensorpool.errors import (
    Closed,
    ConfigError,
    DecodeError,
    DecodeFault,
    TensorPoolError,
    TransportError,
)
from tensorpool.logs import get_logger
from tensorpool.peer_text import printable
from tensorpool.settings import ReloadRefused
from tensorpool.wire import Message
from tensorpool.wire.attach import AttachRequest, AttachResponse, Dialect
from tensorpool.wire.control import ConsumerConfig, ConsumerHello, ShmPoolAnnounce
from tensorpool.wire.driver import (
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmAttachResponse,
    ShmDetachRequest,
    ShmDriverShutdownRequest,
    ShmLeaseKeepalive,
    ShutdownReason,
)

FRAGMENT_LIMIT: Final = 256
MAX_EARLY: Final = 4096  # requests kept while we listen for other drivers; clients ask again
MAX_EARLY_BYTES: Final = 16 << 10  # more than any request has
STALL_AT_LEAST_NS: Final = 300_000_000  # idle turns come every 100 milliseconds
LOOK_EVERY_NS: Final = 25_000_000  # for requests of clients that do not ring
LAST_WORDS_NS: Final = 1_000_000_000  # how long a log that is held may keep the shutdown notice from leaving
HOLDERS_EVERY_NS: Final = 1_000_000_000

_CORRELATION_ID: Final = struct.Struct("<8xq")  # the first field of an attach or detach request of any version (E33)


class DriverConductor:
    """The agent that owns leases and epochs. Everything public but `do_work` may be called from other threads."""

    role_name = "tensorpool-driver"

    def __init__(
        self,
        config: DriverConfig,
        clock: Clock,
        aeron_dir: str,
        *,
        load: Callable[[], DriverConfig] | None = None,
        on_reloaded: Callable[[DriverConfig], object] | None = None,
    ) -> None:
        self._config = config
        self._load = load
        self._on_reloaded = on_reloaded
        self._clock = clock
        self._aeron_dir = aeron_dir
        self._log = get_logger("driver", instance_id=config.driver.instance_id)
        self._is_woken = True
        self._memory = Memory(config, clock, self.wake)
        self.lifecycle = Lifecycle(
            config,
            first_lease_id=clock.realtime_ns(),
            hugepages=self._memory.is_hugepages,
            root=f"shm:file?path={self._memory.path}/",
        )
        self._other_drivers = OtherDrivers(config, clock, self.lifecycle, self._log)
        self.failure: TensorPoolError | None = None  # why the driver had to end, where it did not end in order
        self._connection = aeron.MediaDriverConnection(
            aeron_dir,
            f"tensorpool-driver {config.driver.instance_id}",
            lambda client, now_ns: DriverStreams(client, config, aeron_dir, now_ns),
            self._log,
            on_lost=self._on_connection_lost,
        )
        self._early: list[tuple[bytes, aeron.MessageInfo]] | None = None  # requests that are kept for later
        self._adapter = self._make_adapter()
        self._requests = self._make_request_adapter()
        self.failures = Failures(self._log, clock, self.lifecycle.counts)
        self._outbox = Outbox(self.lifecycle.counts, self._log)
        self._holders: tuple[aeron.Holder, ...] = ()
        self._holders_ns = 0
        self._orders: deque[Callable[[int], list[Effect]]] = deque()
        self._stall_ns = max(config.lease_keepalive_interval_ns, STALL_AT_LEAST_NS)
        self._last_turn_ns = clock.monotonic_ns()
        self._next_housekeeping_ns = 0
        self.find_name: Callable[[int], str] = lambda stream_id: ""  # the name that a producer gave its stream
        self._audit_log = AuditLog(service="driver", instance_id=config.driver.instance_id)
        self._trail = Trail(self.lifecycle.clients, self._name_of)
        self._commands = self._make_commands() if config.control.enabled else None
        self._service = None if self._commands is None else self._commands.service

    # --- for other threads

    def shut_down(self, reason: ShutdownReason = ShutdownReason.NORMAL, text: str = "") -> None:
        """Drain and end; the turn that follows begins it."""
        self._order(lambda now_ns: self.lifecycle.drain(reason, text, now_ns))

    def revoke(self, lease_id: int, text: str = "revoked by the operator") -> None:
        """End a lease administratively."""
        self._order(lambda now_ns: self.lifecycle.revoke(lease_id, text, now_ns))

    def reload(self) -> Future[tuple[str, ...]]:
        """Read the configuration again and go on with it: how it differs, or ReloadRefused and nothing changes."""
        reloaded: Future[tuple[str, ...]] = Future()

        def order(now_ns: int) -> list[Effect]:
            try:
                reloaded.set_result(self._reload())
            except Exception as error:
                reloaded.set_exception(error)
            return []

        self._order(order)
        return reloaded

    def nap(self, nanoseconds: int) -> None:
        """What its runner does between turns: sleep until a client has sent something, `wake`, or the time is over."""
        until_ns = time.monotonic_ns() + nanoseconds
        while not self._has_news() and (left_ns := until_ns - time.monotonic_ns()) > 0:
            self._connection.nap(aeron.Bell.CONTROL, min(left_ns, LOOK_EVERY_NS))

    def wake(self) -> None:
        """Have a turn soon."""
        self._is_woken = True
        self._connection.ring(aeron.Bell.CONTROL)

    def remove_regions(self) -> None:
        """Remove the files of every epoch; for a process that cannot wait for `on_close`."""
        self._memory.remove_everything()

    # --- the agent

    def on_start(self) -> None:
        now_ns = self._clock.monotonic_ns()
        try:
            streams = self._connection.open(now_ns)
            check_message_sizes(self._config, streams.answers.max_message_length, streams.announces.max_message_length)
            self._bind_service()
            self._last_turn_ns = now_ns
            self._perform(self.lifecycle.on_start(now_ns))
            self._listen_for_other_drivers(streams)
        except BaseException:
            self._unbind_service()
            self._connection.close()
            self._memory.close()
            raise
        self._log.info("driver_started", aeron_dir=self._aeron_dir, path=self._memory.path)

    def do_work(self) -> int:
        self._is_woken = False
        now_ns = self._clock.monotonic_ns()
        is_stalled = now_ns - self._last_turn_ns > self._stall_ns
        self._last_turn_ns = now_ns
        self.lifecycle.stamp_offset_ns = self._memory.stamp_offset_ns()
        self.lifecycle.utc_offset_ns = self._clock.realtime_ns() - now_ns
        work = self._part("listening", self._listen, now_ns)
        if self._other_drivers.failure is not None:
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
            self._part("other_drivers", self._other_drivers.expire, now_ns)
            work += self._part("collection", self._memory.collect, now_ns)
        work += self._part("service", self._serve_commands, now_ns)
        work += self._part("message", self._attach_declared, now_ns)
        work += self._part("sending", self._flush)
        self._part("audit", self._audit, now_ns)
        self._part("holders", self._watch_holders, now_ns)
        return work

    def on_close(self) -> None:
        """Send the shutdown notice, wait a moment where the log is held, and release everything, whatever fails."""
        self._part("end", lambda: self._perform(self.lifecycle.end(self._clock.monotonic_ns())))
        self._part("audit", self._audit, self._clock.monotonic_ns(), is_last=True)
        self._outbox.drop_announces()
        deadline_ns = time.monotonic_ns() + LAST_WORDS_NS
        while self._streams is not None and time.monotonic_ns() < deadline_ns:
            self._part("sending", self._flush)
            if not self._outbox:
                break
            time.sleep(0.005)
        self._part("service", self._unbind_service)
        self._part("connection", self._connection.close)
        self._memory.close()
        self._log.info("driver_stopped", counts=dict(self.lifecycle.counts))

    # --- inside

    @property
    def _streams(self) -> DriverStreams | None:
        return self._connection.streams

    def _part[**P](self, name: str, part: Callable[P, int | None], *args: P.args, **kwargs: P.kwargs) -> int:
        """Do one part of the turn. A failure is reported; one of Aeron's means that the connection is lost."""
        try:
            return part(*args, **kwargs) or 0
        except aeron.AgentTerminated:
            raise
        except Exception as error:
            if isinstance(error, TransportError | Closed) and name in ("listening", "sending", "holders"):
                self._part("connection", self._connection.lose, error, self._last_turn_ns)
            else:
                self.failures.report(name, error)
            return 0

    def _order(self, order: Callable[[int], list[Effect]]) -> None:
        self._orders.append(order)
        self.wake()

    def _has_news(self) -> bool:
        """Whether a turn would find something to do, other than what is due."""
        try:
            is_asked = self._streams is not None and self._streams.requests.has_news()
        except (TransportError, Closed):
            is_asked = True
        return is_asked or self._is_woken

    def _obey(self, order: Callable[[int], list[Effect]], now_ns: int) -> int:
        return self._perform(order(now_ns))

    def _reload(self) -> tuple[str, ...]:
        """Load, compare, apply. Raises TensorPoolError, and nothing has changed."""
        try:
            plan = self._plan_reload()
        except TensorPoolError as error:
            self._audit_log.line(self._last_turn_ns, "reload_refused", error=str(error))
            raise
        self._config = plan.config
        self._memory.reload(plan.config)
        self._perform(self.lifecycle.reload(plan))
        self._audit_log.line(self._last_turn_ns, "reloaded", changes=list(plan.lines))
        if self._on_reloaded is not None:
            self._on_reloaded(plan.config)
        return plan.lines

    def _plan_reload(self) -> Plan:
        if self._load is None:
            raise ReloadRefused("this driver was started by a program, and has no file to read again")
        if self.lifecycle.phase is not Phase.SERVING:
            raise ReloadRefused("the driver is shutting down")
        try:
            config, streams = self._load(), self._streams
            if streams is not None:
                check_message_sizes(config, streams.answers.max_message_length, streams.announces.max_message_length)
        except ConfigError as error:
            raise ReloadRefused(str(error)) from None
        return plan(self._config, config, self.lifecycle.in_use())

    def _take_outcomes(self, now_ns: int) -> int:
        work = 0
        while (outcome := self._memory.take_finished()) is not None:
            work += self._part("memory", self._on_outcome, outcome, now_ns)
        return work

    def _serve_commands(self, now_ns: int) -> int:
        if self._service is None or self._commands is None:
            return 0
        if self.lifecycle.phase is not Phase.SERVING:
            self._service.state = State.DRAINING
        return self._service.invoke() + self._commands.publish_leases(now_ns)

    def _audit(self, now_ns: int, *, is_last: bool = False) -> None:
        """Log what happened to leases and epochs, with the clients behind it."""
        events, self.lifecycle.events = self.lifecycle.events, []
        for event in events:
            self._trail.add(event, now_ns)
        for name, fields in self._trail.take(now_ns, is_last=is_last or self._service is None):
            self._audit_log.line(now_ns, name, **fields)
        self._audit_log.flush(now_ns, is_last=is_last)

    def _watch_holders(self, now_ns: int) -> None:
        """Log which subscribers hold our logs when that changes, or more is known of their processes."""
        streams = self._streams
        if streams is None:
            return
        if now_ns >= self._holders_ns:
            self._holders_ns = now_ns + HOLDERS_EVERY_NS
            streams.refresh_holders()
        holders = streams.holders
        if holders == self._holders:
            return
        before = {(holder.subscriber.registration_id, holder.pids) for holder in self._holders}
        after = {(holder.subscriber.registration_id, holder.pids) for holder in holders}
        self._holders = holders
        if after - before:
            self._log.warning("log_held", holders=[str(holder) for holder in holders], renewals=streams.renewals)
        elif before and not after:
            self._log.info("log_released", renewals=streams.renewals)

    def _listen_for_other_drivers(self, streams: DriverStreams) -> None:
        """Ask for a driver that was here before us, and wait for its answer. Raises ConfigError.

        Memory is made meanwhile; requests are kept, and answered afterwards.
        """
        self._early = []
        self._perform(self._other_drivers.on_start())
        until_ns = time.monotonic_ns() + LISTEN_NS
        while time.monotonic_ns() < until_ns and self._other_drivers.failure is None:
            self._flush()
            streams.poll(self._on_message, FRAGMENT_LIMIT)
            time.sleep(0.001)
        early, self._early = self._early, None
        if self._other_drivers.failure is not None:
            self._yield()
            raise self._other_drivers.failure
        for data, info in early:
            self._on_message(data, info)

    def _yield(self) -> None:
        """End without a notice: the other driver's clients would take our end for its end (E31)."""
        self.failure = self._other_drivers.failure
        self.lifecycle.phase = Phase.ENDED

    def _listen(self, now_ns: int) -> int:
        if self._connection.maintain(now_ns):
            self._bind_service()
            self.lifecycle.on_stall(now_ns)
        streams = self._streams
        if streams is None:
            return 0
        fragments = streams.poll(self._on_message, FRAGMENT_LIMIT)
        streams.backlog.on_polled(fragments, now_ns)
        return fragments

    def _make_commands(self) -> DriverCommands:
        return DriverCommands(
            self._config,
            self.lifecycle,
            self._clock,
            status=self._status,
            drain=lambda: self.shut_down(text="drained by an event"),
            reload=self._reload,
            perform=self._perform,
            look_for_producer=self._end_lease_of_ended_process,
            name_of=self._name_of,
            counters=self._counters,
        )

    def _name_of(self, stream_id: int) -> str:
        """The name of a stream, "" where none is known; the configured one where discovery does not know better."""
        stream = self.lifecycle.streams.get(stream_id)
        configured = "" if stream is None or stream.is_dynamic else stream.name
        return printable(self.find_name(stream_id) or configured, MAX_NAME)

    def _counters(self) -> list[aeron.CounterReading]:
        """Of the media driver; none where it is gone."""
        try:
            return [] if self._connection.client is None else self._connection.client.counters()
        except (TransportError, Closed):
            return []

    def _end_lease_of_ended_process(self, stream_id: int) -> None:
        """Before another producer is refused: the process of the present one may have been killed."""
        lease = self.lifecycle.producer_to_look_for(stream_id)
        if lease is not None and lease.process is not None and lease.process.has_ended():
            self._log.info("process_ended", pid=lease.process.pid, stream_id=stream_id, lease_id=lease.lease_id)
            self._perform(self.lifecycle.on_process_ended(lease, self._last_turn_ns))

    def _bind_service(self) -> None:
        if self._service is not None and self._connection.client is not None:
            self._service.bind(self._connection.client, patiently=True)

    def _status(self) -> dict[str, object]:
        return {
            "aeron_dir": self._aeron_dir,
            "path": str(self._memory.path),
            "streams": len(self.lifecycle.streams),
            "leases": len(self.lifecycle.leases),
            "held_by": [str(holder) for holder in self._holders],
            "sessions_given_up": 0 if self._streams is None else self._streams.renewals,
            "counts": dict(self.lifecycle.counts),
        }

    def _unbind_service(self) -> None:
        if self._service is not None:
            self._service.unbind()

    def _on_connection_lost(self, reason: str, now_ns: int) -> None:
        self._part("service", self._unbind_service)
        self._outbox.clear()

    # --- inside: messages

    def _make_adapter(self) -> MessageAdapter:
        """Separates messages of other drivers from requests to this one."""
        adapter = MessageAdapter(self._on_malformed)
        adapter.add_undecoded(ShmAttachRequest, self._on_attach_request)
        for kind in (ShmDetachRequest, ShmLeaseKeepalive, ShmDriverShutdownRequest, ConsumerHello, ConsumerConfig):
            adapter.add_undecoded(kind, self._on_request)
        adapter.add(ShmAttachResponse, self.on_shm_attach_response)
        adapter.add(ShmPoolAnnounce, self.on_shm_pool_announce)
        return adapter

    def _make_request_adapter(self) -> MessageAdapter:
        adapter = MessageAdapter(self._on_malformed)
        adapter.add(ShmAttachRequest, self.on_shm_attach_request)
        adapter.add(ShmDetachRequest, self.on_shm_detach_request)
        adapter.add(ShmLeaseKeepalive, self.on_shm_lease_keepalive)
        adapter.add(ShmDriverShutdownRequest, self.on_shm_driver_shutdown_request)
        adapter.add(ConsumerHello, self.on_consumer_hello)
        adapter.add(ConsumerConfig, self.on_consumer_config)
        return adapter

    def _on_message(self, data: bytes, info: aeron.MessageInfo) -> None:
        if self._streams is not None and not self._streams.is_own(info):
            self._part("message", self._adapter.on_message, data, info)

    def _on_attach_request(self, data: bytes, info: aeron.MessageInfo) -> None:
        answer = self._other_drivers.probe_answer(data)
        if answer is None:
            self._on_request(data, info)
        else:
            self._perform([answer])

    def _on_request(self, data: bytes, info: aeron.MessageInfo) -> None:
        """The bytes of a request: those of the backlog are skipped, since clients ask again."""
        if self._early is not None:
            if len(data) <= MAX_EARLY_BYTES and len(self._early) < MAX_EARLY:
                self._early.append((data, info))
        elif self._is_in_backlog(info):
            self.lifecycle.counts["messages_from_before"] += 1
        else:
            self._requests.on_message(data, info)

    def _is_in_backlog(self, info: aeron.MessageInfo) -> bool:
        return self._streams is not None and self._streams.backlog.contains(info)

    def on_shm_attach_response(self, response: AttachResponse, info: aeron.MessageInfo) -> None:
        self._perform(self._other_drivers.on_attach_response(response, is_before=self._is_in_backlog(info)))

    def on_shm_pool_announce(self, announce: ShmPoolAnnounce, info: aeron.MessageInfo) -> None:
        self._perform(self._other_drivers.on_announce(announce, is_before=self._is_in_backlog(info)))

    def on_shm_attach_request(self, request: AttachRequest, info: aeron.MessageInfo) -> None:
        self.lifecycle.authority.on_request(request)
        clients, now_ns = self.lifecycle.clients, self._last_turn_ns
        is_deferred = self._config.has_user_limits and clients.defer(request, info.session_id, now_ns)
        clients.on_request(request.client_id, info.session_id)
        if not is_deferred:
            self._attach(request, now_ns)

    def _attach(self, request: AttachRequest, now_ns: int) -> int:
        if request.role is Role.PRODUCER:
            self._end_lease_of_ended_process(request.stream_id)
        return self._perform(self.lifecycle.on_attach(request, now_ns))

    def _attach_declared(self, now_ns: int) -> int:
        """Requests that waited for the declaration of their client, because limits hold for each user."""
        return sum(self._part("message", self._attach, it, now_ns) for it in self.lifecycle.clients.take_due(now_ns))

    def on_shm_detach_request(self, request: ShmDetachRequest, info: aeron.MessageInfo) -> None:
        self._perform(self.lifecycle.on_detach(request, self._last_turn_ns))

    def on_shm_lease_keepalive(self, keepalive: ShmLeaseKeepalive, info: aeron.MessageInfo) -> None:
        self.lifecycle.on_keepalive(keepalive, self._last_turn_ns)

    def on_shm_driver_shutdown_request(self, request: ShmDriverShutdownRequest, info: aeron.MessageInfo) -> None:
        self._perform(self.lifecycle.on_shutdown_request(request, self._last_turn_ns))

    def on_consumer_hello(self, hello: ConsumerHello, info: aeron.MessageInfo) -> None:
        self._perform(self.lifecycle.on_consumer_hello(hello, self._last_turn_ns))

    def on_consumer_config(self, config: ConsumerConfig, info: aeron.MessageInfo) -> None:
        self._perform(self.lifecycle.on_consumer_config(config))

    def _on_malformed(self, data: bytes, error: DecodeError) -> None:
        """Count it, and refuse a request whose correlation id can be read."""
        self.lifecycle.counts["malformed_messages"] += 1
        if len(data) < _CORRELATION_ID.size:
            return
        is_unsupported = error.fault is DecodeFault.VERSION or error.field == "publish_mode"  # A19, E33
        code = ResponseCode.UNSUPPORTED if is_unsupported else ResponseCode.INVALID_PARAMS
        (correlation_id,) = _CORRELATION_ID.unpack_from(data)
        if has_kind(data, ShmAttachRequest):
            dialect = Dialect.of_request(data)
            self._perform(self.lifecycle.on_malformed_attach(correlation_id, code, str(error), dialect))
        elif has_kind(data, ShmDetachRequest):
            self._perform(self.lifecycle.on_malformed_detach(correlation_id, code, str(error)))

    # --- inside: effects

    def _on_outcome(self, outcome: Created | Failed, now_ns: int) -> int:
        return self._perform(self._outcome_effects(outcome, now_ns))

    def _outcome_effects(self, outcome: Created | Failed, now_ns: int) -> list[Effect]:
        if isinstance(outcome, Created):
            epoch = outcome.epoch
            self.lifecycle.authority.on_epoch_created(epoch.stream_id, epoch.epoch)
            fields = {"epoch": epoch.epoch, "reserved": outcome.reserved}
            self.lifecycle.events.append(Event(name="epoch_created", stream_id=epoch.stream_id, fields=fields))
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
                if self._streams is None:  # clients ask again
                    self.lifecycle.counts["messages_dropped"] += 1
                else:
                    self._outbox.post(effect.message)
            case Announce():
                if self._streams is not None:
                    self._outbox.announce(effect.stream_id)
            case CreateEpoch():
                self._memory.submit(effect)
            case Report():
                if self._commands is not None:
                    self._commands.report(effect)
            case DropStream():
                self._memory.drop(effect.stream_id)
            case Exit():
                raise aeron.AgentTerminated

    def _flush(self) -> int:
        streams = self._streams
        if streams is None:
            return 0
        return self._outbox.flush(streams.answers, streams.announces, self._announce_of)

    def _announce_of(self, stream_id: int) -> Message | None:
        try:
            return self.lifecycle.announce(stream_id, self._clock.monotonic_ns())
        except Exception as error:  # the other streams are announced
            self.failures.report("announce", error)
            return None
