# SPDX-License-Identifier: Apache-2.0
"""The client's duty cycle: listens to the driver for all leases of this client, and gives each session its turn.

The only thread that publishes on the control, QoS and metadata streams. Frames are never published or polled here.
Driver Model §4.4a, §4.5; Wire §10.1.1; decisions C7, E3, E31, E34, E42, K9.
"""

from __future__ import annotations

import queue
import secrets
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from tensorpool import aeron
from tensorpool.aeron.adapter import MessageAdapter, has_kind
from tensorpool.channel import Endpoint
from tensorpool.client.attach_dialects import AttachDialects
from tensorpool.client.attach_requests import AbandonedRequests, CreationReports
from tensorpool.client.attachment import Attachment, AttachSpec
from tensorpool.client.attachment_phases import Phase
from tensorpool.client.declaration import ProcessDeclaration
from tensorpool.client.discovery import Discovery, NameFinder
from tensorpool.client.mapped_epoch import EpochMapper
from tensorpool.client.merge_maps import MergeMapAnnounce, MergeMapQuery, MergeMapRequest
from tensorpool.client.names import Names
from tensorpool.client.session import Session
from tensorpool.client.streams import ClientStreams, Handler
from tensorpool.clock import Clock
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import Closed, DecodeError, TransportError
from tensorpool.logs import get_logger
from tensorpool.shm.announced import FRESH_PERIODS, has_epoch, is_fresh
from tensorpool.shm.namespace import has_lock_file
from tensorpool.shm.space import mount_space
from tensorpool.wire import Message
from tensorpool.wire.attach import AttachResponse
from tensorpool.wire.control import (
    ConsumerConfig,
    ConsumerHello,
    DataSourceAnnounce,
    DataSourceMeta,
    MetaBlobAnnounce,
    MetaBlobChunk,
    MetaBlobComplete,
    QosConsumer,
    ShmPoolAnnounce,
)
from tensorpool.wire.driver import (
    Role,
    ShmAttachResponse,
    ShmDetachResponse,
    ShmDriverShutdown,
    ShmLeaseRevoked,
)
from tensorpool.wire.merge import (
    SequenceMergeMapAnnounce,
    SequenceMergeMapRequest,
    TimestampMergeMapAnnounce,
    TimestampMergeMapRequest,
)

if TYPE_CHECKING:
    from tensorpool.client.consumer_session import ConsumerSession
    from tensorpool.client.producer_session import ProducerSession

FRAGMENT_LIMIT: Final = 256
LOG_FAILURES_EVERY_NS: Final = 1_000_000_000
CORRELATION_ID: Final = struct.Struct("<8xq")  # the first field of an attach response of any layout


class Wakeup:
    """Like threading.Event, but safe where a signal's exception lands in the middle of it: no lock stays taken."""

    def __init__(self) -> None:
        self._pending: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        if self._pending.empty():
            self._pending.put(None)

    def clear(self) -> None:
        while not self._pending.empty():
            self.wait(0)

    def wait(self, seconds: float) -> bool:
        """Whether it was set before `seconds` were over; clears it."""
        try:
            self._pending.get(timeout=seconds)
        except queue.Empty:
            return False
        return True


class ClientConductor:
    """The agent behind a `Client`. `order`, `wake`, `mapper` and the id makers are for any thread."""

    role_name = "tensorpool-client"

    def __init__(self, config: DriverConfig, clock: Clock, aeron_dir: str, client_name: str) -> None:
        self.config = config
        self.clock = clock
        self.discovery = Discovery(config)
        self.names = NameFinder(Names(config.announce_period_ns), self.discovery)
        self.wakeup = Wakeup()
        self._waiters = 0
        self.malformed = 0
        self.failures = 0  # of sessions' turns and handlers
        self._log_failure_ns = 0
        self._aeron_dir = aeron_dir
        self._log = get_logger("client", aeron_dir=aeron_dir)
        self.mapper = EpochMapper(config, self._log, self.wake)
        self._connection = aeron.MediaDriverConnection(
            aeron_dir,
            client_name,
            lambda client, now_ns: ClientStreams(client, config, aeron_dir),
            self._log,
            on_lost=self._on_connection_lost,
            explain=self._explained,
        )
        self._on_control = self._guarded_handler(self._control_adapter())
        self._on_qos = self._guarded_handler(self._qos_adapter())
        self._on_metadata = self._guarded_handler(self._metadata_adapter())
        self._orders: deque[Callable[[int], object]] = deque()
        self._sessions: list[Session] = []
        self._producers: list[ProducerSession] = []
        self._consumers: list[ConsumerSession] = []
        self.merge_queries: list[MergeMapQuery] = []
        self._wants_names = False
        self._next_correlation_id = secrets.randbits(62)
        self._lock = threading.Lock()
        self._now_ns = 0
        self._driver_heard_ns = 0
        self._driver_ended_ns = 0  # when it said so
        self._abandoned = AbandonedRequests(self._say)
        self._reports = CreationReports(config.control, self._on_driver_alive)
        self._declaration = ProcessDeclaration(config, clock, self.new_correlation_id)
        self.dialects = AttachDialects(config.driver.dialect, config.announce_period_ns, has_lock_file)

    # --- for any thread

    def has_driver(self, within_ns: int) -> bool:
        """Whether a driver announced, answered or reported anything within that time, or within three announce periods.

        Not one that has ended since.
        """
        within_ns = max(within_ns, FRESH_PERIODS * self.config.announce_period_ns)
        has_ended = self._driver_heard_ns == self._driver_ended_ns
        return not has_ended and self.clock.monotonic_ns() - self._driver_heard_ns <= within_ns

    def order(self, act: Callable[[int], object]) -> None:
        """Have `act(now_ns)` done in the next turn."""
        self._orders.append(act)
        self.wakeup.set()

    def wake(self) -> None:
        """Have a turn soon."""
        self.wakeup.set()

    @property
    def is_urgent(self) -> bool:
        """Whether turns have to follow each other quickly: a call waits for an answer, or a session asks for it."""
        return self._waiters > 0 or any(session.is_restless for session in self._sessions)

    def has_news(self) -> bool:
        """Whether a turn would find a message, or has something to send or to mend. On the conductor's thread."""
        streams, now_ns = self._streams, self.clock.monotonic_ns()
        try:
            return streams is None or streams.has_news() or any(session.is_due(now_ns) for session in self._sessions)
        except (TransportError, Closed):
            return True

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Turn often meanwhile: the caller waits for what the control plane brings."""
        with self._lock:
            self._waiters += 1
        self.wake()
        try:
            yield
        finally:
            with self._lock:
                self._waiters -= 1

    def subscribe(self, endpoint: Endpoint) -> aeron.Subscription:
        """A subscription at the current media driver. Raises TransportError."""
        if self._streams is None:
            raise TransportError(f"no media driver at {self._aeron_dir}")
        return self._streams.subscribe(endpoint)

    def is_asking(self, spec: AttachSpec, *, besides: Session) -> bool:
        """§4.8: whether another session has asked for the same stream and role and waits for the answer."""
        wanted = spec.stream_id, spec.role
        return any(
            session is not besides
            and session.attachment.phase is Phase.ATTACHING
            and (session.attachment.spec.stream_id, session.attachment.spec.role) == wanted
            for session in self._sessions
        )

    def resume_abandoned(self, attachment: Attachment) -> None:
        """§4.8: go on with a request for the same stream and role whose caller gave up, instead of asking beside it."""
        abandoned = self._abandoned.take(attachment.spec)
        if abandoned is not None:
            attachment.resume(abandoned)

    def new_client_id(self) -> int:
        """A lease's own id (E1, E43): random, so that two processes do not meet."""
        return secrets.randbelow(2**32 - 2) + 1

    def new_correlation_id(self) -> int:
        with self._lock:
            self._next_correlation_id += 1
            return self._next_correlation_id

    # --- orders, performed in a turn

    def add_producer(self, session: ProducerSession, now_ns: int) -> None:
        self._producers.append(session)
        self._add(session, now_ns)

    def add_consumer(self, session: ConsumerSession, now_ns: int) -> None:
        self._consumers.append(session)
        self._add(session, now_ns)

    def declare_process(self) -> None:
        """A session asks for a lease: the driver learns whose it is."""
        if self._streams is not None:
            self._declaration.on_request(self._streams, self._now_ns)

    def listen_for_names(self, now_ns: int) -> None:
        self._wants_names = True

    # --- the agent

    def on_start(self) -> None:
        self._now_ns = self.clock.monotonic_ns()
        self._connection.open(self._now_ns)
        self._give_streams(self._now_ns)

    def do_work(self) -> int:
        now_ns = self._now_ns = self.clock.monotonic_ns()
        self.wakeup.clear()
        work = 0
        try:
            work += self._listen(now_ns)
        except (TransportError, Closed) as error:
            self._lose_connection(error, now_ns)
        while self._orders:
            self._guarded(self._orders.popleft(), now_ns)
            work += 1
        work += self._guarded(self._discover, now_ns)
        for session in tuple(self._sessions):
            work += self._guarded(session.do_work, now_ns)
            if session.is_closed:
                self._forget(session)
        work += self._guarded(self._follow_unanswered, now_ns)
        return work

    def on_close(self) -> None:
        self.mapper.close()
        self._connection.close()

    # --- inside

    @property
    def _streams(self) -> ClientStreams | None:
        return self._connection.streams

    def _guarded(self, act: Callable[[int], object], now_ns: int) -> int:
        """When Aeron fails in one session's turn the connection is lost for all; other failures end that turn only."""
        try:
            done = act(now_ns)
        except (TransportError, Closed) as error:
            self._lose_connection(error, now_ns)
            return 0
        except Exception as error:
            self._log_failure(error, now_ns)
            return 0
        return done if isinstance(done, int) else 0

    def _lose_connection(self, error: Exception, now_ns: int) -> None:
        """A driver that shut down may have taken its media driver with it, as `tp.local()` does."""
        is_expected = 0 < self._driver_heard_ns == self._driver_ended_ns
        self._connection.lose(error, now_ns, is_expected=is_expected)

    def _log_failure(self, error: Exception, now_ns: int) -> None:
        """Count a turn or a message that failed; the log has at most one line a second of it."""
        self.failures += 1
        if now_ns >= self._log_failure_ns:
            self._log_failure_ns = now_ns + LOG_FAILURES_EVERY_NS
            self._log.error("session_failed", failures=self.failures, exc_info=error)

    def _add(self, session: Session, now_ns: int) -> None:
        self._sessions.append(session)
        if self._streams is not None:
            session.on_connected(self._streams, now_ns)

    def _follow_unanswered(self, now_ns: int) -> int:
        waiting = [session.attachment for session in self._sessions]
        work = self._declaration.do_work(self._streams, now_ns)
        return work + self._abandoned.do_work(now_ns) + self._reports.do_work(waiting, self._streams, now_ns)

    def _on_driver_alive(self) -> None:
        self._driver_heard_ns = self._now_ns

    def _say(self, message: Message) -> None:
        if self._streams is not None:
            self._streams.control.offer(message.encode())

    def _forget(self, session: Session) -> None:
        if session.attachment.phase is Phase.ABANDONED:
            self._abandoned.add(session.attachment)
        for sessions in (self._sessions, self._producers, self._consumers):
            if session in sessions:
                sessions.remove(session)  # type: ignore[arg-type]
        session.close_streams()

    def _give_streams(self, now_ns: int) -> None:
        """Have every session open what it needs at a new media driver."""
        if self._streams is not None:
            for session in tuple(self._sessions):
                session.on_connected(self._streams, now_ns)

    def _listen(self, now_ns: int) -> int:
        if self._connection.maintain(now_ns):
            self._give_streams(now_ns)
        streams = self._streams
        if streams is None:
            return 0
        work = streams.poll_control(self._on_control, FRAGMENT_LIMIT)
        if self._producers or self._consumers:
            work += streams.poll_qos(self._on_qos, FRAGMENT_LIMIT)
        if self._consumers or self._wants_names:
            work += streams.poll_metadata(self._on_metadata, FRAGMENT_LIMIT)
        return work

    def _discover(self, now_ns: int) -> int:
        return self.discovery.do_work(self._streams, now_ns)

    def _on_connection_lost(self, reason: str, now_ns: int) -> None:
        for session in tuple(self._sessions):
            session.on_connection_lost(reason, now_ns)
        self.discovery.on_connection_lost()

    def _explained(self, reason: str) -> str:
        """An error of Aeron's, with what to do where a mount is full."""
        if "insufficient" not in reason:
            return reason
        space = mount_space(self._aeron_dir)
        if space.free_bytes is None or space.total_bytes is None:
            return reason
        free, total = space.free_bytes >> 20, space.total_bytes >> 20
        return (
            f"{space.mount_point}, where Aeron's files are, has {free} MiB free of {total} MiB: free some, or enlarge "
            f"it (mount -o remount,size={2 * total}m {space.mount_point}; for Docker's /dev/shm --shm-size); {reason}"
        )

    # --- inside: messages

    def _guarded_handler(self, adapter: MessageAdapter) -> Handler:
        """Counts a message whose handling fails, and goes on with the next one."""

        def handler(data: bytes, info: aeron.MessageInfo) -> None:
            try:
                adapter.on_message(data, info)
            except (TransportError, Closed):
                raise
            except Exception as error:
                self._log_failure(error, self._now_ns)

        return handler

    def _on_malformed(self, data: bytes, error: DecodeError) -> None:
        self.malformed += 1
        if has_kind(data, ShmAttachResponse) and len(data) >= CORRELATION_ID.size:
            (correlation_id,) = CORRELATION_ID.unpack_from(data)
            for session in tuple(self._sessions):
                session.on_unreadable_response(correlation_id, str(error), self._now_ns)

    def _control_adapter(self) -> MessageAdapter:
        adapter = MessageAdapter(self._on_malformed)
        adapter.add(ShmAttachResponse, self.on_shm_attach_response)
        adapter.add(ShmDetachResponse, self.on_shm_detach_response)
        adapter.add(ShmLeaseRevoked, self.on_shm_lease_revoked)
        adapter.add(ShmDriverShutdown, self.on_shm_driver_shutdown)
        adapter.add(ShmPoolAnnounce, self.on_shm_pool_announce)
        adapter.add(ConsumerHello, self.on_consumer_hello)
        adapter.add(ConsumerConfig, self.on_consumer_config)
        adapter.add(SequenceMergeMapRequest, self.on_merge_map_request)
        adapter.add(TimestampMergeMapRequest, self.on_merge_map_request)
        adapter.add(SequenceMergeMapAnnounce, self.on_merge_map_announce)
        adapter.add(TimestampMergeMapAnnounce, self.on_merge_map_announce)
        return adapter

    def _qos_adapter(self) -> MessageAdapter:
        adapter = MessageAdapter(self._on_malformed)
        adapter.add(QosConsumer, self.on_qos_consumer)
        return adapter

    def _metadata_adapter(self) -> MessageAdapter:
        adapter = MessageAdapter(self._on_malformed)
        adapter.add(DataSourceAnnounce, self.on_data_source_announce)
        adapter.add(DataSourceMeta, self.on_metadata)
        adapter.add(MetaBlobAnnounce, self.on_metadata)
        adapter.add(MetaBlobChunk, self.on_metadata)
        adapter.add(MetaBlobComplete, self.on_metadata)
        return adapter

    def on_shm_attach_response(self, response: AttachResponse, info: aeron.MessageInfo) -> None:
        now_ns, wall_ns = self._now_ns, self.clock.realtime_ns()
        self._driver_heard_ns = now_ns
        self._abandoned.on_attach_response(response, now_ns, wall_ns)
        for session in tuple(self._sessions):
            session.on_attach_response(response, now_ns, wall_ns)

    def on_shm_detach_response(self, response: ShmDetachResponse, info: aeron.MessageInfo) -> None:
        now_ns = self._driver_heard_ns = self._now_ns
        self._abandoned.on_detach_response(response)
        for session in tuple(self._sessions):
            session.on_detach_response(response, now_ns)

    def on_shm_lease_revoked(self, notice: ShmLeaseRevoked, info: aeron.MessageInfo) -> None:
        now_ns = self._driver_heard_ns = self._now_ns
        self._abandoned.on_revoked(notice, now_ns)
        for session in tuple(self._sessions):
            session.on_revoked(notice, now_ns)
        if notice.role is Role.CONSUMER:
            for producer in self._producers:
                if producer.stream_id == notice.stream_id:
                    producer.consumers.on_lease_ended(notice.client_id)

    def on_shm_driver_shutdown(self, shutdown: ShmDriverShutdown, info: aeron.MessageInfo) -> None:
        now_ns = self._driver_heard_ns = self._driver_ended_ns = self._now_ns
        self._abandoned.on_driver_shutdown()
        for session in tuple(self._sessions):
            session.on_driver_shutdown(shutdown.error_message, now_ns)

    def on_consumer_hello(self, hello: ConsumerHello, info: aeron.MessageInfo) -> None:
        for producer in self._producers:
            if producer.stream_id == hello.stream_id and producer.attachment.is_attached:
                producer.on_hello(hello, self._now_ns)

    def on_consumer_config(self, config: ConsumerConfig, info: aeron.MessageInfo) -> None:
        is_own = self._streams is not None and self._streams.is_own(info)
        for producer in self._producers:
            if producer.stream_id == config.stream_id and not is_own:
                producer.consumers.on_consumer_config(config)
        for consumer in self._consumers:
            if consumer.stream_id == config.stream_id:
                consumer.on_consumer_config(config, self._now_ns)

    def on_shm_pool_announce(self, announce: ShmPoolAnnounce, info: aeron.MessageInfo) -> None:
        now_ns, streams = self._now_ns, self._streams
        if streams is None:
            return
        if not has_epoch(announce):
            self.malformed += 1
            return
        joined_ns, wall_ns = streams.joined_ns(info), self.clock.realtime_ns()
        if is_fresh(announce, joined_ns, now_ns, wall_ns, self.config.announce_period_ns):
            self._driver_heard_ns = now_ns
            self.discovery.on_announce(announce, now_ns)
            self.dialects.on_announce(announce.header_region_uri, now_ns)
            for query in self.merge_queries:
                if query.out_stream_id == announce.stream_id:
                    for request in query.on_pool_announce(announce.epoch):
                        self._say(request)
        concerned = [session for session in self._sessions if session.stream_id == announce.stream_id]
        for session in concerned:
            if session.is_fresh(announce, joined_ns, now_ns, wall_ns):
                session.on_announce(announce, now_ns, wall_ns)

    def on_merge_map_request(self, request: MergeMapRequest, info: aeron.MessageInfo) -> None:
        for producer in self._producers:
            if producer.stream_id == request.out_stream_id:
                producer.on_merge_map_request(request)

    def on_merge_map_announce(self, announce: MergeMapAnnounce, info: aeron.MessageInfo) -> None:
        for query in self.merge_queries:
            query.on_announce(announce)

    def on_qos_consumer(self, qos: QosConsumer, info: aeron.MessageInfo) -> None:
        for producer in self._producers:
            if producer.stream_id == qos.stream_id:
                producer.on_qos_consumer(qos, self._now_ns)
        if self._streams is None or self._streams.is_own_qos(info):
            return
        for consumer in self._consumers:
            if consumer.stream_id == qos.stream_id:
                consumer.on_qos_of_others(qos, self._now_ns)

    def on_data_source_announce(self, announce: DataSourceAnnounce, info: aeron.MessageInfo) -> None:
        self.names.on_announce(announce, self._now_ns)
        self.on_metadata(announce, info)

    def on_metadata(
        self,
        message: DataSourceAnnounce | DataSourceMeta | MetaBlobAnnounce | MetaBlobChunk | MetaBlobComplete,
        info: aeron.MessageInfo,
    ) -> None:
        for consumer in self._consumers:
            if consumer.stream_id == message.stream_id:
                consumer.on_metadata(message, info.session_id)


class WakeableIdle:
    """Sleeps between turns until there is work or `wake` is called; briefly, and longer each time, while a call waits.

    While nothing is urgent it looks ten times a second for news and for what is due, and has a turn taken for them.
    """

    URGENT_NS: Final = (200_000, 2_000_000)
    LOOK_EVERY_S: Final = 0.1
    LOOKS: Final = 5  # then there is a turn without news, to see whether peers and the media driver are still there

    def __init__(self, conductor: ClientConductor) -> None:
        self._conductor = conductor
        self._park_ns = 0

    def idle(self, work_count: int) -> None:
        conductor = self._conductor
        if not conductor.is_urgent:
            self._park_ns = 0
            if work_count < FRAGMENT_LIMIT:  # else a poll was full: more is waiting
                self._wait_for_news()
        elif work_count > 0:
            self._park_ns = 0
        else:
            shortest_ns, longest_ns = self.URGENT_NS
            self._park_ns = min(max(2 * self._park_ns, shortest_ns), longest_ns)
            if conductor.wakeup.wait(self._park_ns / 1e9):
                self._park_ns = 0

    def _wait_for_news(self) -> None:
        for _ in range(self.LOOKS):
            if self._conductor.wakeup.wait(self.LOOK_EVERY_S) or self._conductor.has_news():
                return
