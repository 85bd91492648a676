# SPDX-License-Identifier: Apache-2.0
"""The observer: listens to what everybody announces and reports, and keeps the view.

It only listens, takes no lease, and lets itself be passed over: whoever publishes never waits for it. Turned by its
caller, or on a thread of its own. Where a producer tells its seq neither by QoS nor by a ring that we may read, it
listens to descriptors too. Outlives the media driver. Wire §5, §10.5; decisions C6, C7.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Final, Protocol, Self

from tensorpool import aeron
from tensorpool.channel import Endpoint, check_channel
from tensorpool.clock import Clock, SystemClock
from tensorpool.control.link import subscribe
from tensorpool.discovery.provider import ThriftyIdle
from tensorpool.errors import Closed, DecodeError, TransportError
from tensorpool.logs import get_logger
from tensorpool.shm.containment import AllowedBases
from tensorpool.supervisor.config import SupervisorConfig
from tensorpool.supervisor.probe import look
from tensorpool.supervisor.snapshot import Snapshot
from tensorpool.supervisor.view import View
from tensorpool.wire import control, driver, event, peek_header
from tensorpool.wire.control import (
    ConsumerConfig,
    ConsumerHello,
    DataSourceAnnounce,
    DataSourceMeta,
    FrameDescriptor,
    QosConsumer,
    QosProducer,
    ShmPoolAnnounce,
)
from tensorpool.wire.driver import ShmDriverShutdown, ShmLeaseKeepalive, ShmLeaseRevoked

FRAGMENT_LIMIT: Final = 256
RECONNECT_EVERY_NS: Final = 100_000_000
CHECK_EVERY_NS: Final = 500_000_000  # whether the media driver is there
TICK_EVERY_NS: Final = 250_000_000
LOOK_EVERY_NS: Final = 500_000_000  # into each ring
LOOKS_AT_ONCE: Final = 4
CATCH_UP_AT_LEAST_NS: Final = 50_000_000
CATCH_UP_AT_MOST_NS: Final = 1_000_000_000
SHARE: Final = 0.5  # of a core, however much there is to hear
SHORTEST_NS: Final = 2_000_000  # between two turns
LONGEST_NS: Final = 20_000_000

_OF_CONTROL: Final = frozenset(
    kind.TEMPLATE_ID
    for kind in (
        ShmPoolAnnounce,
        ConsumerHello,
        ConsumerConfig,
        QosConsumer,
        QosProducer,
        DataSourceAnnounce,
        DataSourceMeta,
    )
)
_OF_DRIVER: Final = frozenset(kind.TEMPLATE_ID for kind in (ShmLeaseKeepalive, ShmLeaseRevoked, ShmDriverShutdown))
_DESCRIPTOR: Final = struct.Struct("<8xIQQQ12x")  # stream, epoch, seq, publish time

type OnDescriptor = Callable[[int, int, int, int | None], object]


class _Handler(Protocol):
    def __call__(self, data: bytes, *, is_from_before: bool) -> None: ...


class Observer:
    """Listens at one media driver.

    >>> with Observer(None, SupervisorConfig()) as observer:      # doctest: +SKIP
    ...     print(observer.snapshot().streams)

    Used as a context manager it runs on a thread; a caller with a loop of its own calls `on_start`, `do_work` and
    `on_close` instead. `on_descriptor` hears of every frame of every stream: (stream_id, epoch, seq, publish time).
    Raises `TransportError` where no media driver is alive, unless it `is_patient` and waits for one.
    """

    role_name = "tensorpool-observer"

    def __init__(
        self,
        aeron_dir: str | None,
        config: SupervisorConfig,
        *,
        clock: Clock | None = None,
        on_descriptor: OnDescriptor | None = None,
        is_patient: bool = False,
    ) -> None:
        self.config: Final = config
        self.aeron_dir: Final = (
            aeron_dir or config.supervisor.aeron_dir or config.driver.aeron_dir or aeron.default_aeron_dir()
        )
        self.clock: Final = clock or SystemClock()
        is_local = check_channel("driver.announce_channel", config.driver.announce_channel).media == "ipc"
        self.view: Final = View(config, is_local=is_local)
        self.lock: Final = threading.Lock()  # around the view
        self._events = event.schema.with_id(config.control.schema_id)
        self._on_descriptor = on_descriptor
        self._is_patient = is_patient
        self._log = get_logger("observer", aeron_dir=self.aeron_dir)
        self._bases = AllowedBases(config.shm.allowed_base_dirs)
        self._media_driver = aeron.DriverSight(self.aeron_dir)
        self._link: _Link | None = None
        self._frames: dict[int, tuple[int, int]] = {}  # the newest of each stream in this turn
        self._looks: deque[tuple[ShmPoolAnnounce, int | None]] = deque()
        self._reconnect_ns = self._check_ns = self._tick_ns = self._look_ns = 0
        self._now_ns = 0
        self._runner: aeron.AgentRunner | None = None

    # --- for other threads

    @property
    def is_connected(self) -> bool:
        """Whether there is a media driver to listen at."""
        return self._link is not None

    @property
    def client(self) -> aeron.Client | None:
        """The connection, for whoever turns the observer."""
        return self._link.client if self._link is not None else None

    @property
    def turned_ns(self) -> int:
        """When it was turned last."""
        return self._now_ns

    def snapshot(self) -> Snapshot:
        """Everything that is known now."""
        with self.lock:
            return self.view.snapshot(self.clock.monotonic_ns())

    def counters(self) -> list[aeron.CounterReading]:
        """The media driver's own; none where it is gone."""
        link = self._link
        try:
            return link.client.counters() if link is not None else []
        except (TransportError, Closed):
            return []

    # --- the agent

    def on_start(self) -> None:
        self._now_ns = self.clock.monotonic_ns()
        try:
            self._connect()
        except TransportError as error:
            if not self._is_patient:
                raise
            self._log.warning("media_driver_missing", error=str(error))

    def do_work(self) -> int:
        now_ns = self._now_ns = self.clock.monotonic_ns()
        work = 0
        try:
            if self._link is None:
                self._reconnect(now_ns)
            if self._link is not None:
                self._check(self._link, now_ns)
                with self.lock:
                    work = self._link.poll(now_ns)
                    self._take_frames(now_ns)
        except (TransportError, Closed) as error:
            self._lose_link(str(error))
        if now_ns >= self._tick_ns:
            self._tick_ns = now_ns + TICK_EVERY_NS
            with self.lock:
                self.view.tick(now_ns)
                is_needed = self.view.needs_descriptors(now_ns)
            self._set_descriptors(is_needed or self._on_descriptor is not None)
        if self.config.supervisor.read_regions:
            work += self._look_around(now_ns)
        return work

    def on_close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    # --- on a thread

    def __enter__(self) -> Self:
        self._runner = aeron.AgentRunner(
            self,
            ThriftyIdle(share=SHARE, shortest_ns=SHORTEST_NS, longest_ns=LONGEST_NS),
            on_error=self._log_failed_turn,
        ).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            self._runner.close()

    def _log_failed_turn(self, error: Exception) -> None:
        self._log.error("turn_failed", exc_info=error)

    # --- inside: the connection

    def _connect(self) -> None:
        self._link = _Link(self, self.aeron_dir, self._now_ns)
        self._media_driver.adopt()
        self._tick_ns = 0

    def _reconnect(self, now_ns: int) -> None:
        if now_ns < self._reconnect_ns:
            return
        self._reconnect_ns = now_ns + RECONNECT_EVERY_NS
        if not self._media_driver.is_dead() and aeron.is_driver_active(self.aeron_dir):
            self._connect()
            self._log.info("media_driver_found")

    def _check(self, link: _Link, now_ns: int) -> None:
        if now_ns >= self._check_ns:
            self._check_ns = now_ns + CHECK_EVERY_NS
            if link.client.is_closed or self._media_driver.is_dead():
                raise TransportError(f"the media driver at {self.aeron_dir} is gone")

    def _lose_link(self, words: str) -> None:
        link, self._link = self._link, None
        self._media_driver.forget()
        self._reconnect_ns = self._now_ns + RECONNECT_EVERY_NS
        if link is not None:
            self._log.warning("media_driver_lost", error=words)
            link.close()

    # --- inside: what is heard

    def on_bytes(self, data: bytes, *, is_from_before: bool) -> None:
        """A message that may be for the view. Of what was in the log before us, only announces tell their age."""
        header = peek_header(data)
        template_id = header.template_id
        if header.schema_id == control.schema.id:
            if template_id not in _OF_CONTROL:
                return
            if is_from_before and template_id != ShmPoolAnnounce.TEMPLATE_ID:
                return
            message = control.schema.decode(data)
        elif header.schema_id == driver.schema.id:
            if template_id not in _OF_DRIVER or is_from_before:
                return
            message = driver.schema.decode(data)
        elif header.schema_id == self.config.control.schema_id and not is_from_before:
            message = self._events.decode(data)
        else:
            return
        self.view.on_message(message, self._now_ns, wall_ns=self.clock.realtime_ns())

    def on_frame(self, data: bytes, *, is_from_before: bool) -> None:
        """A descriptor, or what else is there. What was in the log before us was not published just now."""
        if len(data) != _DESCRIPTOR.size:
            return
        header = peek_header(data)
        if (header.schema_id, header.template_id) != (control.schema.id, FrameDescriptor.TEMPLATE_ID):
            return
        stream_id, epoch, seq, time_ns = _DESCRIPTOR.unpack(data)
        self._frames[stream_id] = epoch, seq
        if self._on_descriptor is not None and not is_from_before:
            self._on_descriptor(stream_id, epoch, seq, None if time_ns == 2**64 - 1 else time_ns)

    def _take_frames(self, now_ns: int) -> None:
        for stream_id, (epoch, seq) in self._frames.items():
            self.view.on_message(FrameDescriptor(stream_id=stream_id, epoch=epoch, seq=seq), now_ns)
        self._frames.clear()

    def _set_descriptors(self, is_needed: bool) -> None:
        if self._link is not None:
            try:
                self._link.listen_to_frames(is_needed, self._now_ns)
            except (TransportError, Closed) as error:
                self._lose_link(str(error))

    def _look_around(self, now_ns: int) -> int:
        """A few rings in each turn, each about twice a second."""
        if not self._looks:
            if now_ns < self._look_ns:
                return 0
            self._look_ns = now_ns + LOOK_EVERY_NS
            with self.lock:
                self._looks.extend(self.view.places())
        count = min(LOOKS_AT_ONCE, len(self._looks))
        for _ in range(count):
            announce, seq = self._looks.popleft()
            seen = look(
                announce,
                seq,
                self._bases,
                now_ns=self.clock.monotonic_ns(),
                wall_ns=self.clock.realtime_ns(),
            )
            with self.lock:
                self.view.on_look(seen, self.clock.monotonic_ns())
        return count


class _Ear:
    """One subscription, and whether what it hears was there before us.

    On IPC a new subscriber begins where the slowest one is.
    """

    def __init__(self, subscription: aeron.Subscription, handler: _Handler, counts: Counter[str], now_ns: int) -> None:
        self._subscription = subscription
        self._handler = handler
        self._counts = counts
        self._made_ns = now_ns
        self._is_catching_up = True

    def poll(self, now_ns: int) -> int:
        fragments = self._subscription.poll(self._on_message, FRAGMENT_LIMIT)
        if self._is_catching_up:
            age_ns = now_ns - self._made_ns
            if (fragments == 0 and age_ns > CATCH_UP_AT_LEAST_NS) or age_ns > CATCH_UP_AT_MOST_NS:
                self._is_catching_up = False
        return fragments

    def _on_message(self, data: bytes, info: aeron.MessageInfo) -> None:
        try:
            self._handler(data, is_from_before=self._is_catching_up)
        except DecodeError:
            self._counts["malformed"] += 1

    def close(self) -> None:
        self._subscription.close()


class _Link:
    """The observer's subscriptions at one media driver."""

    def __init__(self, observer: Observer, aeron_dir: str, now_ns: int) -> None:
        self._observer = observer
        self._frames: _Ear | None = None
        self.client: Final = aeron.connect(aeron_dir, client_name="tensorpool-observer")
        try:
            self._ears = [
                _Ear(subscribe(self.client, endpoint), observer.on_bytes, observer.view.counts, now_ns)
                for endpoint in _places(observer.config)
            ]
        except BaseException:
            self.client.close()
            raise

    def poll(self, now_ns: int) -> int:
        fragments = sum(ear.poll(now_ns) for ear in self._ears)
        if self._frames is not None:
            fragments += self._frames.poll(now_ns)
        return fragments

    def listen_to_frames(self, is_needed: bool, now_ns: int) -> None:
        if is_needed and self._frames is None:
            subscription = subscribe(self.client, self._observer.config.driver.descriptor)
            self._frames = _Ear(subscription, self._observer.on_frame, self._observer.view.counts, now_ns)
        elif not is_needed and self._frames is not None:
            self._frames.close()
            self._frames = None

    def close(self) -> None:
        self.client.close()


def _places(config: SupervisorConfig) -> Iterable[Endpoint]:
    """Where to listen; two that are one place are listened to once."""
    wanted = [config.driver.control, config.driver.announce, config.driver.qos, config.driver.metadata]
    if config.control.enabled:
        wanted.append(config.control.status)
    found: dict[object, Endpoint] = {}
    for endpoint in wanted:
        found.setdefault((check_channel("channel", endpoint.channel).address, endpoint.stream_id), endpoint)
    return found.values()
