# SPDX-License-Identifier: Apache-2.0
"""The observer: receives what all processes announce and report, and keeps the view.

It only subscribes, untethered, and takes no lease: no publisher waits for it. Turned by its caller, or on a thread of
its own. Where a producer reports its seq neither by QoS nor in a ring that we may read, it subscribes to descriptors,
too. Outlives the media driver. Wire §5, §10.5; decisions C6, C7.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from tensorpool import aeron
from tensorpool.aeron.adapter import MessageAdapter
from tensorpool.channel import Endpoint
from tensorpool.clock import Clock, SystemClock
from tensorpool.discovery.provider import ThriftyIdle
from tensorpool.errors import Closed, DecodeError, TransportError
from tensorpool.logs import get_logger
from tensorpool.shm.containment import AllowedBases
from tensorpool.supervisor.config import SupervisorConfig
from tensorpool.supervisor.probe import probe
from tensorpool.supervisor.snapshot import Snapshot
from tensorpool.supervisor.view import View
from tensorpool.wire import Message, event
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
from tensorpool.wire.event import EventMessage

FRAGMENT_LIMIT: Final = 256
TICK_EVERY_NS: Final = 250_000_000
LOOK_EVERY_NS: Final = 500_000_000  # into each ring
LOOKS_AT_ONCE: Final = 4
SHARE: Final = 0.5  # of a core, however many messages there are
SHORTEST_NS: Final = 2_000_000  # between two turns
LONGEST_NS: Final = 20_000_000

_REPORTS: Final[tuple[type[Message], ...]] = (
    ConsumerHello,
    ConsumerConfig,
    QosConsumer,
    QosProducer,
    DataSourceAnnounce,
    DataSourceMeta,
    ShmLeaseKeepalive,
    ShmLeaseRevoked,
    ShmDriverShutdown,
)
_DESCRIPTOR: Final = struct.Struct("<8xIQQQ12x")  # stream, epoch, seq, publish time

type OnDescriptor = Callable[[int, int, int, int | None], object]


class Observer:
    """Subscribes at one media driver.

    >>> with Observer(None, SupervisorConfig.load()) as observer:      # doctest: +SKIP
    ...     print(observer.snapshot().streams)

    Used as a context manager it runs on a thread; a caller with a loop of its own calls `on_start`, `do_work` and
    `on_close` instead. `on_descriptor` gets every frame of every stream: (stream_id, epoch, seq, publish time).
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
        is_local = config.driver.announce.uri.is_ipc
        self.view: Final = View(config, is_local=is_local)
        self.lock: Final = threading.Lock()  # around the view
        self._events = event.schema.with_id(config.control.schema_id)
        self._on_descriptor = on_descriptor
        self._is_patient = is_patient
        self._log = get_logger("observer", aeron_dir=self.aeron_dir)
        self._bases = AllowedBases(config.shm.allowed_base_dirs)
        self._connection = aeron.MediaDriverConnection(
            self.aeron_dir,
            "tensorpool-observer",
            lambda client, now_ns: ObserverStreams(self, client, now_ns),
            self._log,
        )
        self._frames: dict[int, tuple[int, int]] = {}  # the newest of each stream in this turn
        self._looks: deque[tuple[ShmPoolAnnounce, int | None]] = deque()
        self._tick_ns = self._look_ns = 0
        self._now_ns = 0
        self._runner: aeron.AgentRunner | None = None

    # --- for other threads

    @property
    def is_connected(self) -> bool:
        """Whether it is connected to a media driver."""
        return self._connection.streams is not None

    @property
    def client(self) -> aeron.Client | None:
        """The Aeron client, for the agent that turns the observer."""
        return self._connection.client

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
        client = self._connection.client
        try:
            return client.counters() if client is not None else []
        except (TransportError, Closed):
            return []

    # --- the agent

    def on_start(self) -> None:
        self._now_ns = self.clock.monotonic_ns()
        if self._is_patient:
            self._connection.maintain(self._now_ns)
        else:
            self._connection.open(self._now_ns)

    def do_work(self) -> int:
        now_ns = self._now_ns = self.clock.monotonic_ns()
        work = 0
        try:
            if self._connection.maintain(now_ns):
                self._tick_ns = 0
            streams = self._connection.streams
            if streams is not None:
                with self.lock:
                    work = streams.poll(now_ns)
                    self._take_frames(now_ns)
        except (TransportError, Closed) as error:
            self._connection.lose(error, now_ns)
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
        self._connection.close()

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

    # --- inside: messages

    def adapter(self, backlog: aeron.Backlog) -> MessageAdapter:
        """For one subscription. Of its backlog only announces count: they carry the time at which they were made."""
        adapter = MessageAdapter(self._on_malformed)

        def on_report(message: Message, info: aeron.MessageInfo) -> None:
            if not backlog.contains(info):
                self._on_message(message, info)

        adapter.add(ShmPoolAnnounce, self._on_message)
        for kind in _REPORTS:
            adapter.add(kind, on_report)
        adapter.add(EventMessage, on_report, self._events)
        return adapter

    def frame_adapter(self, backlog: aeron.Backlog) -> MessageAdapter:
        """For descriptors. Those of the backlog count in the view, but were not published just now."""
        adapter = MessageAdapter(self._on_malformed)

        def on_frame_descriptor(data: bytes, info: aeron.MessageInfo) -> None:
            if len(data) != _DESCRIPTOR.size:
                return
            stream_id, epoch, seq, time_ns = _DESCRIPTOR.unpack(data)
            self._frames[stream_id] = epoch, seq
            if self._on_descriptor is not None and not backlog.contains(info):
                self._on_descriptor(stream_id, epoch, seq, None if time_ns == 2**64 - 1 else time_ns)

        adapter.add_undecoded(FrameDescriptor, on_frame_descriptor)
        return adapter

    def _on_message(self, message: Message, info: aeron.MessageInfo) -> None:
        self.view.on_message(message, self._now_ns, wall_ns=self.clock.realtime_ns())

    def _on_malformed(self, data: bytes, error: DecodeError) -> None:
        self.view.counts["malformed"] += 1

    def _take_frames(self, now_ns: int) -> None:
        for stream_id, (epoch, seq) in self._frames.items():
            self.view.on_message(FrameDescriptor(stream_id=stream_id, epoch=epoch, seq=seq), now_ns)
        self._frames.clear()

    def _set_descriptors(self, is_needed: bool) -> None:
        streams = self._connection.streams
        if streams is not None:
            try:
                streams.listen_to_frames(is_needed, self._now_ns)
            except (TransportError, Closed) as error:
                self._connection.lose(error, self._now_ns)

    def _look_around(self, now_ns: int) -> int:
        """A few rings in each turn, each about twice a second."""
        if not self._looks:
            if now_ns < self._look_ns:
                return 0
            self._look_ns = now_ns + LOOK_EVERY_NS
            with self.lock:
                self._looks.extend(self.view.probe_targets())
        count = min(LOOKS_AT_ONCE, len(self._looks))
        for _ in range(count):
            announce, seq = self._looks.popleft()
            seen = probe(
                announce,
                seq,
                self._bases,
                now_ns=self.clock.monotonic_ns(),
                wall_ns=self.clock.realtime_ns(),
            )
            with self.lock:
                self.view.on_probe_result(seen, self.clock.monotonic_ns())
        return count


class _Listener:
    """One subscription with its backlog."""

    def __init__(
        self,
        client: aeron.Client,
        endpoint: Endpoint,
        make_adapter: Callable[[aeron.Backlog], MessageAdapter],
        now_ns: int,
    ) -> None:
        self._backlog = aeron.Backlog(now_ns)
        self._adapter = make_adapter(self._backlog)
        self._subscription = aeron.subscribe(client, endpoint)

    def poll(self, now_ns: int) -> int:
        fragments = self._subscription.poll(self._adapter.on_message, FRAGMENT_LIMIT)
        self._backlog.on_polled(fragments, now_ns)
        return fragments

    def close(self) -> None:
        self._subscription.close()


class ObserverStreams:
    """The observer's subscriptions at one media driver."""

    def __init__(self, observer: Observer, client: aeron.Client, now_ns: int) -> None:
        self._observer = observer
        self._client = client
        self._frames: _Listener | None = None
        driver, control = observer.config.driver, observer.config.control
        endpoints = [driver.control, driver.announce, driver.qos, driver.metadata]
        endpoints += [control.status] if control.enabled else []
        self._listeners = [
            _Listener(client, endpoint, observer.adapter, now_ns) for endpoint in aeron.distinct(endpoints)
        ]

    def poll(self, now_ns: int) -> int:
        fragments = sum(listener.poll(now_ns) for listener in self._listeners)
        if self._frames is not None:
            fragments += self._frames.poll(now_ns)
        return fragments

    def listen_to_frames(self, is_needed: bool, now_ns: int) -> None:
        if is_needed and self._frames is None:
            observer = self._observer
            self._frames = _Listener(self._client, observer.config.driver.descriptor, observer.frame_adapter, now_ns)
        elif not is_needed and self._frames is not None:
            self._frames.close()
            self._frames = None
