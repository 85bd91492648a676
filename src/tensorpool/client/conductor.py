# SPDX-License-Identifier: Apache-2.0
"""The client's duty cycle: listens to the driver for all leases of this client, and gives each session its turn.

The only thread that publishes on the control, QoS and metadata streams. Frames are never published or polled here.
Driver Model §4.4a, §4.5; Wire §10.1.1; decisions C7, E3, E31, E34, E42.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from tensorpool import aeron
from tensorpool.channel import Endpoint
from tensorpool.client.attachment import Attachment, Phase, Wish
from tensorpool.client.discovery import Discovery, NameFinder
from tensorpool.client.link import Handler, Link
from tensorpool.client.mapping import has_epoch, is_fresh
from tensorpool.client.names import Names
from tensorpool.client.session import Session
from tensorpool.client.unanswered import AbandonedRequests, MakingReports
from tensorpool.clock import Clock
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import Closed, DecodeError, TransportError
from tensorpool.logs import get_logger
from tensorpool.shm import AllowedBases, MappedRing, map_ring
from tensorpool.shm.space import mount_space
from tensorpool.wire import Message, control, decode, driver, peek_header
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

if TYPE_CHECKING:
    from tensorpool.client.consumer_session import ConsumerSession
    from tensorpool.client.mapping import Regions
    from tensorpool.client.producer_session import ProducerSession

FRAGMENT_LIMIT: Final = 256
RECONNECT_EVERY_NS: Final = 100_000_000
RECONNECT_AT_LEAST_NS: Final = 2_000_000_000  # a connection that fails sooner is tried again after longer pauses
LOOK_EVERY_NS: Final = 500_000_000
LOG_FAILURES_EVERY_NS: Final = 1_000_000_000

_FROM_DRIVER: Final = frozenset(
    kind.TEMPLATE_ID for kind in (ShmAttachResponse, ShmDetachResponse, ShmLeaseRevoked, ShmDriverShutdown)
)
_OF_CONTROL: Final = frozenset(kind.TEMPLATE_ID for kind in (ShmPoolAnnounce, ConsumerHello, ConsumerConfig))
_OF_METADATA: Final = frozenset(
    kind.TEMPLATE_ID for kind in (DataSourceAnnounce, DataSourceMeta, MetaBlobAnnounce, MetaBlobChunk, MetaBlobComplete)
)


class Kick:
    """Like threading.Event, but safe where a signal's exception lands in the middle of it: no lock stays taken."""

    def __init__(self) -> None:
        self._kicks: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        if self._kicks.empty():
            self._kicks.put(None)

    def clear(self) -> None:
        while self.wait(0):
            pass

    def wait(self, seconds: float) -> bool:
        """False when the time is over. Takes the kick away."""
        try:
            self._kicks.get(timeout=seconds)
        except queue.Empty:
            return False
        return True


class ClientConductor:
    """The agent behind a `Client`. `order`, `kick`, `submit`, `map` and the id makers are for any thread."""

    role_name = "tensorpool-client"

    def __init__(self, config: DriverConfig, clock: Clock, aeron_dir: str, client_name: str) -> None:
        self.config = config
        self.clock = clock
        self.discovery = Discovery(config)
        self.names = NameFinder(Names(config.announce_period_ns), self.discovery)
        self.kicked = Kick()
        self._waiters = 0
        self.malformed = 0
        self.failures = 0  # of sessions' turns and handlers
        self._log_failure_ns = 0
        self._aeron_dir = aeron_dir
        self._client_name = client_name
        self._bases = AllowedBases(config.shm.allowed_base_dirs)
        self._log = get_logger("client", aeron_dir=aeron_dir)
        self._link: Link | None = None
        self._reconnect_ns = 0
        self._reconnect_pause_ns = RECONNECT_EVERY_NS
        self._connected_ns = 0
        self._look_ns = 0
        self._media_driver = aeron.DriverSight(aeron_dir)
        self._orders: deque[Callable[[int], object]] = deque()
        self._sessions: list[Session] = []
        self._producers: list[ProducerSession] = []
        self._consumers: list[ConsumerSession] = []
        self._wants_names = False
        self._next_correlation_id = secrets.randbits(62)
        self._lock = threading.Lock()
        self._workers: ThreadPoolExecutor | None = None
        self._now_ns = 0
        self._driver_heard_ns = 0
        self._abandoned = AbandonedRequests(self._say)
        self._reports = MakingReports(config.control, self._on_driver_alive)

    # --- for any thread

    def has_driver(self, within_ns: int) -> bool:
        """Whether a driver announced, answered or reported anything on the control stream within that time."""
        return self._driver_heard_ns > 0 and self.clock.monotonic_ns() - self._driver_heard_ns <= within_ns

    def order(self, act: Callable[[int], object]) -> None:
        """Have `act(now_ns)` done in the next turn."""
        self._orders.append(act)
        self.kicked.set()

    def kick(self) -> None:
        """Have a turn soon."""
        self.kicked.set()

    @property
    def is_urgent(self) -> bool:
        """Whether turns have to follow each other quickly: a call waits for an answer, or a session asks for it."""
        return self._waiters > 0 or any(session.is_restless for session in self._sessions)

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Turn often meanwhile: the caller waits for what the control plane brings."""
        with self._lock:
            self._waiters += 1
        self.kick()
        try:
            yield
        finally:
            with self._lock:
                self._waiters -= 1

    def submit(self, make: Callable[[], MappedRing]) -> Future[MappedRing]:
        """Do what takes long beside the duty cycle."""
        if self._workers is None:
            self._workers = ThreadPoolExecutor(1, "tensorpool-mapping")
        future = self._workers.submit(make)
        future.add_done_callback(lambda _: self.kick())
        return future

    def map(self, regions: Regions, *, writable: bool) -> MappedRing:
        """Map what was announced. Raises RegionRejected, with nothing mapped.

        Driver Model §17: mlock is per process, so where the policy is on clients lock what they map. A client that may
        not works all the same, with a warning.
        """
        ring = map_ring(
            regions.ring,
            regions.uris,
            self._bases,
            stream_id=regions.stream_id,
            epoch=regions.epoch,
            layout_version=regions.layout_version,
            writable=writable,
            keep_header_file=not writable,
        )
        if self.config.policies.mlock_shm:
            try:
                ring.lock()
            except OSError as error:
                remedy = f"ulimit -l {-(-ring.spec.size_bytes // 1024)} or more, for all that this process maps"
                text = os.strerror(error.errno or 0)
                self._log.warning("mlock_failed", stream_id=regions.stream_id, error=text, remedy=remedy)
        return ring

    def subscribe(self, endpoint: Endpoint) -> aeron.Subscription:
        """A subscription on the current link. Raises TransportError."""
        if self._link is None:
            raise TransportError(f"no media driver at {self._aeron_dir}")
        return self._link.subscribe(endpoint)

    def is_asking(self, wish: Wish, *, besides: Session) -> bool:
        """§4.8: whether another session has asked for the same stream and role and waits for the answer."""
        wanted = wish.stream_id, wish.role
        return any(
            session is not besides
            and session.attachment.phase is Phase.ATTACHING
            and (session.attachment.wish.stream_id, session.attachment.wish.role) == wanted
            for session in self._sessions
        )

    def resume_abandoned(self, attachment: Attachment) -> None:
        """§4.8: go on with a request for the same stream and role whose caller gave up, instead of asking beside it."""
        abandoned = self._abandoned.take(attachment.wish)
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

    def listen_for_names(self, now_ns: int) -> None:
        self._wants_names = True

    # --- the agent

    def on_start(self) -> None:
        self._now_ns = self.clock.monotonic_ns()
        self._connect(self._now_ns)

    def do_work(self) -> int:
        now_ns = self._now_ns = self.clock.monotonic_ns()
        self.kicked.clear()
        work = 0
        try:
            work += self._listen(now_ns)
        except (TransportError, Closed) as error:
            self._lose_link(str(error), now_ns)
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
        if self._workers is not None:
            self._workers.shutdown(wait=False, cancel_futures=True)
        if self._link is not None:
            self._link.close()
            self._link = None

    # --- inside

    def _guarded(self, act: Callable[[int], object], now_ns: int) -> int:
        """A transport that fails under one session's hands is lost for all; any other failure is that session's own."""
        try:
            done = act(now_ns)
        except (TransportError, Closed) as error:
            self._lose_link(str(error), now_ns)
            return 0
        except Exception as error:
            self._log_failure(error, now_ns)
            return 0
        return done if isinstance(done, int) else 0

    def _log_failure(self, error: Exception, now_ns: int) -> None:
        """What fails under one session's hands costs the others nothing; one line a second says so."""
        self.failures += 1
        if now_ns >= self._log_failure_ns:
            self._log_failure_ns = now_ns + LOG_FAILURES_EVERY_NS
            self._log.error("session_failed", failures=self.failures, exc_info=error)

    def _add(self, session: Session, now_ns: int) -> None:
        self._sessions.append(session)
        if self._link is not None:
            session.on_link(self._link, now_ns)

    def _follow_unanswered(self, now_ns: int) -> int:
        waiting = [session.attachment for session in self._sessions]
        return self._abandoned.do_work(now_ns) + self._reports.do_work(waiting, self._link, now_ns)

    def _on_driver_alive(self) -> None:
        self._driver_heard_ns = self._now_ns

    def _say(self, message: Message) -> None:
        if self._link is not None:
            self._link.control.offer(message.encode())

    def _forget(self, session: Session) -> None:
        if session.attachment.phase is Phase.ABANDONED:
            self._abandoned.add(session.attachment)
        for sessions in (self._sessions, self._producers, self._consumers):
            if session in sessions:
                sessions.remove(session)  # type: ignore[arg-type]
        session.close_streams()

    def _connect(self, now_ns: int) -> None:
        self._link = Link(self.config, self._aeron_dir, self._client_name)
        self._connected_ns = now_ns
        self._media_driver.adopt()
        for session in tuple(self._sessions):
            session.on_link(self._link, now_ns)

    def _listen(self, now_ns: int) -> int:
        if self._link is None:
            if now_ns < self._reconnect_ns:
                return 0
            self._reconnect_ns = now_ns + RECONNECT_EVERY_NS
            if self._media_driver.is_dead() or not aeron.is_driver_active(self._aeron_dir):
                return 0
            self._connect(now_ns)
            self._log.info("media_driver_found")
        link = self._link
        assert link is not None
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + LOOK_EVERY_NS
            if link.is_lost or self._media_driver.is_dead():
                raise TransportError(f"the media driver at {self._aeron_dir} is gone")
        work = link.poll_control(self._handled(self._on_control), FRAGMENT_LIMIT)
        if self._producers or self._consumers:
            work += link.poll_qos(self._handled(self._on_qos), FRAGMENT_LIMIT)
        if self._consumers or self._wants_names:
            work += link.poll_metadata(self._handled(self._on_metadata), FRAGMENT_LIMIT)
        return work

    def _discover(self, now_ns: int) -> int:
        return self.discovery.do_work(self._link, now_ns)

    def _lose_link(self, words: str, now_ns: int) -> None:
        link, self._link = self._link, None
        if link is None:
            return
        self._media_driver.forget()
        words = self._explained(words)
        is_brief = now_ns - self._connected_ns < RECONNECT_AT_LEAST_NS
        pause_ns = min(2 * self._reconnect_pause_ns, RECONNECT_AT_LEAST_NS) if is_brief else RECONNECT_EVERY_NS
        self._reconnect_pause_ns = pause_ns
        self._log.warning("media_driver_lost", error=words)
        for session in tuple(self._sessions):
            session.on_link_lost(words, now_ns)
        self.discovery.on_link_lost()
        link.close()
        self._reconnect_ns = now_ns + pause_ns

    def _explained(self, words: str) -> str:
        """What a failure of Aeron means to an operator, where it is one of space."""
        if "insufficient" not in words:
            return words
        space = mount_space(self._aeron_dir)
        if space.free_bytes is None or space.total_bytes is None:
            return words
        free, total = space.free_bytes >> 20, space.total_bytes >> 20
        return (
            f"{space.mount_point}, where Aeron's files are, has {free} MiB free of {total} MiB: free some, or enlarge "
            f"it (mount -o remount,size={2 * total}m {space.mount_point}; for Docker's /dev/shm --shm-size); {words}"
        )

    def _handled(self, handle: Handler) -> Handler:
        """Counts a message that cannot be decoded, or that fails otherwise, and goes on with the next one."""

        def handler(data: bytes, info: aeron.MessageInfo) -> None:
            try:
                handle(data, info)
            except DecodeError:
                self.malformed += 1
            except (TransportError, Closed):
                raise
            except Exception as error:
                self._log_failure(error, self._now_ns)

        return handler

    def _on_control(self, data: bytes, info: aeron.MessageInfo) -> None:
        header = peek_header(data)
        if header.schema_id == driver.schema.id:
            if header.template_id in _FROM_DRIVER:
                self._on_driver_message(data)
        elif header.schema_id == control.schema.id and header.template_id in _OF_CONTROL:
            self._on_control_message(data, info)

    def _on_driver_message(self, data: bytes) -> None:
        now_ns = self._now_ns
        self._driver_heard_ns = now_ns
        match decode(data):
            case ShmAttachResponse() as response:
                wall_ns = self.clock.realtime_ns()
                self._abandoned.on_attach_response(response, now_ns, wall_ns)
                for session in tuple(self._sessions):
                    session.on_attach_response(response, now_ns, wall_ns)
            case ShmDetachResponse() as response:
                self._abandoned.on_detach_response(response)
                for session in tuple(self._sessions):
                    session.on_detach_response(response, now_ns)
            case ShmLeaseRevoked() as notice:
                self._abandoned.on_revoked(notice, now_ns)
                for session in tuple(self._sessions):
                    session.on_revoked(notice, now_ns)
                if notice.role is Role.CONSUMER:
                    for producer in self._producers:
                        if producer.stream_id == notice.stream_id:
                            producer.on_consumer_end(notice)
            case ShmDriverShutdown() as shutdown:
                self._abandoned.on_driver_shutdown()
                for session in tuple(self._sessions):
                    session.on_driver_shutdown(shutdown.error_message, now_ns)

    def _on_control_message(self, data: bytes, info: aeron.MessageInfo) -> None:
        now_ns = self._now_ns
        match decode(data):
            case ShmPoolAnnounce() as announce:
                self._on_announce(announce, info, now_ns)
            case ConsumerHello() as hello:
                for producer in self._producers:
                    if producer.stream_id == hello.stream_id and producer.attachment.is_attached:
                        producer.on_hello(hello, now_ns)
            case ConsumerConfig() as config:
                is_own = self._link is not None and self._link.is_own(info)
                for producer in self._producers:
                    if producer.stream_id == config.stream_id and not is_own:
                        producer.on_consumer_config(config)
                for consumer in self._consumers:
                    if consumer.stream_id == config.stream_id:
                        consumer.on_consumer_config(config, now_ns)

    def _on_announce(self, announce: ShmPoolAnnounce, info: aeron.MessageInfo, now_ns: int) -> None:
        if self._link is None:
            return
        if not has_epoch(announce):
            self.malformed += 1
            return
        joined_ns, wall_ns = self._link.joined_ns(info), self.clock.realtime_ns()
        if is_fresh(announce, joined_ns, now_ns, wall_ns, self.config.announce_period_ns):
            self._driver_heard_ns = now_ns
            self.discovery.on_announce(announce, now_ns)
        concerned = [session for session in self._sessions if session.stream_id == announce.stream_id]
        for session in concerned:
            if session.is_fresh(announce, joined_ns, now_ns, wall_ns):
                session.on_announce(announce, now_ns, wall_ns)

    def _on_qos(self, data: bytes, info: aeron.MessageInfo) -> None:
        header = peek_header(data)
        if header.schema_id != control.schema.id or header.template_id != QosConsumer.TEMPLATE_ID:
            return
        qos = decode(data)
        assert isinstance(qos, QosConsumer)
        for producer in self._producers:
            if producer.stream_id == qos.stream_id:
                producer.on_qos_consumer(qos, self._now_ns)
        if self._link is None or self._link.is_own_qos(info):
            return
        for consumer in self._consumers:
            if consumer.stream_id == qos.stream_id:
                consumer.on_qos_of_others(qos, self._now_ns)

    def _on_metadata(self, data: bytes, info: aeron.MessageInfo) -> None:
        header = peek_header(data)
        if header.schema_id != control.schema.id or header.template_id not in _OF_METADATA:
            return
        message = decode(data)
        if isinstance(message, DataSourceAnnounce):
            self.names.on_announce(message, self._now_ns)
        assert isinstance(
            message, DataSourceAnnounce | DataSourceMeta | MetaBlobAnnounce | MetaBlobChunk | MetaBlobComplete
        )
        for consumer in self._consumers:
            if consumer.stream_id == message.stream_id:
                consumer.metadata.on_message(message, info.session_id)


class KickedIdle:
    """Sleeps between turns, longer and longer, until there is work or somebody kicks; briefly while somebody waits."""

    URGENT_NS: Final = (200_000, 2_000_000)
    CALM_NS: Final = (50_000_000, 100_000_000)

    def __init__(self, conductor: ClientConductor) -> None:
        self._conductor = conductor
        self._park_ns = 0

    def idle(self, work_count: int) -> None:
        is_urgent = self._conductor.is_urgent
        if work_count > 0:
            self._park_ns = 0
            if is_urgent or work_count >= FRAGMENT_LIMIT:  # a poll that was full: more is waiting
                return
        shortest_ns, longest_ns = self.URGENT_NS if is_urgent else self.CALM_NS
        self._park_ns = min(max(2 * self._park_ns, shortest_ns), longest_ns)
        if self._conductor.kicked.wait(self._park_ns / 1e9):
            self._park_ns = 0
