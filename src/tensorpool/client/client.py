# SPDX-License-Identifier: Apache-2.0
"""A process's connection to a running driver: where producers and consumers come from.

Streams that discovery finds at another driver are attached there, through a connection to that driver.
Driver Model §2, §4.12; Discovery §3, §7; decisions E1-E3, E20.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from tensorpool import aeron
from tensorpool.channel import Endpoint
from tensorpool.client import arguments
from tensorpool.client.attachment import AttachSpec
from tensorpool.client.conductor import ClientConductor, WakeableIdle
from tensorpool.client.consumer_session import ConsumerSession, Preferences, StandaloneSession
from tensorpool.client.discovery import PATIENCE_NS, config_for
from tensorpool.client.discovery_query import DiscoveredStream, DiscoveryQuery, Filters
from tensorpool.client.merge_maps import MergeMapQuery
from tensorpool.client.names import preferred_id
from tensorpool.client.producer_session import ProducerOptions, ProducerSession
from tensorpool.client.provisioning import provision, ring_request
from tensorpool.client.ring_watch import RingWatch
from tensorpool.client.session import Session, State, StateChange
from tensorpool.clock import Clock, SystemClock
from tensorpool.closing import ClosesOnExit
from tensorpool.control.provisioning import RingRequest
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import Closed, ConfigError, LocalProtocolError, TensorPoolError
from tensorpool.logs import get_logger
from tensorpool.shm.copies import choose_copies
from tensorpool.wire.driver import Role

if TYPE_CHECKING:
    import numpy.typing as npt

    from tensorpool.client.aio import AsyncClient, Waiter
    from tensorpool.client.consumer import Consumer, Progress
    from tensorpool.client.frame import Frame
    from tensorpool.client.producer import Producer
    from tensorpool.wire.control import Dtype

CLOSE_WITHIN_S: Final = 2.0
PATIENCE_S: Final = PATIENCE_NS / 1e9
OWN_PATIENCE_S: Final = 2.0  # of a producer: without the answer of a busy driver it makes a second stream of that name
LOOK_AGAIN_S: Final = 0.05

type Awaited = Session | DiscoveryQuery | MergeMapQuery


class Client(ClosesOnExit):
    """A connection to the SHM driver behind a media driver. Made by `connect`.

    >>> with connect() as client, client.producer("camera/front", create=True) as producer:     # doctest: +SKIP
    ...     producer.publish(image)

    Its conductor keeps the leases of all producers and consumers on a thread of its own, or in `invoke` by hand.
    """

    def __init__(
        self,
        config: DriverConfig,
        aeron_dir: str,
        *,
        conductor: Literal["thread", "invoked"] = "thread",
        clock: Clock | None = None,
        name: str | None = None,
    ) -> None:
        if conductor not in ("thread", "invoked"):
            raise LocalProtocolError(f"conductor = {conductor!r}: expected 'thread' or 'invoked'")
        choose_copies()
        self.config = config
        self.aeron_dir = aeron_dir
        label = name or f"tensorpool {os.getpid()}"
        self._conductor = ClientConductor(config, clock or SystemClock(), aeron_dir, label)
        self._is_closed = False
        self._clock = clock
        self._others: dict[Endpoint, Client] = {}  # of other drivers, by their control endpoint
        self._others_lock = threading.Lock()
        self._pid = os.getpid()
        self._runner: aeron.AgentRunner | None = None
        self._invoker: aeron.AgentInvoker | None = None
        self._sessions: list[Session] = []
        self._producers: weakref.WeakSet[Producer] = weakref.WeakSet()
        self._consumers: list[weakref.ref[Consumer]] = []
        self._waiter: Waiter | None = None
        if conductor == "thread":
            idle = WakeableIdle(self._conductor)
            self._runner = aeron.AgentRunner(self._conductor, idle, on_error=_log_failed_turn).start()
        else:
            self._invoker = aeron.AgentInvoker(self._conductor, on_error=_log_failed_turn)
            self._invoker.start()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    @property
    def aio(self) -> AsyncClient:
        """The same for asyncio: `async for frame in client.aio.consumer("camera/front")`."""
        from tensorpool.client.aio import AsyncClient, Waiter

        if self._waiter is None:
            self._waiter = Waiter()
        return AsyncClient(self, self._waiter)

    def producer(
        self,
        stream: int | str,
        *,
        create: bool = False,
        frame: tuple[int, ...] | None = None,
        dtype: npt.DTypeLike | Dtype = "uint8",
        seconds: float | None = None,
        rate_hz: float | None = None,
        slots: int | None = None,
        max_frame_bytes: int | None = None,
        timeout: float | None = None,
        on_state: Callable[[StateChange], object] | None = None,
        release_gil_from_bytes: int | None = None,
        with_publish_time: bool = False,
        is_relay: bool = False,
        has_own_clock: bool = True,
        trace_ids: bool | None = None,
        driver_instance_id: str | None = None,
    ) -> Producer:
        """Become the producer of a stream, by id or by name.

        >>> producer = client.producer("camera/front", create=True)     # doctest: +SKIP
        >>> producer = client.producer("camera/wide", create=True, frame=(1080, 1920, 3), seconds=2)  # doctest: +SKIP

        `create` lets the driver make the stream. The producer of a stream that this client has open already is
        returned as it is, so that a notebook's cell can be run again; with other arguments that is an error.

        With a `frame` (its shape, of `dtype`) or `max_frame_bytes` the driver makes a ring that holds such frames for
        `seconds` (2) at `rate_hz` (60), or `slots` of them, within its policies `max_provisioned_stream_bytes` and
        `max_provisioned_bytes`. Without them it makes that of its default profile. A stream that exists and fits is
        used as it is.

        Within `timeout` seconds a stream that is still taken is asked for again: a producer that was killed holds its
        lease for some seconds. Without a `timeout` the call waits for `client.attach_timeout_ms` (5 s), and longer for
        as long as the driver reports that it makes the stream's memory. `on_state` is called from `publish`. Frames of
        `release_gil_from_bytes` and more are copied without the GIL (8 MiB by default). Another driver's stream is
        produced with its `driver_instance_id`.

        With `trace_ids` every frame gets a trace id, by which results that are published with `parents` refer to it
        (`client.trace_ids`, off). Without it only frames with parents do.

        For those who publish frames of others: a relay (`is_relay`) announces no data source of its own and gives
        consumers no streams of their own. Where the timestamps that you give are not of this host's monotonic clock,
        say so with `has_own_clock=False`, and by `Producer.set_clock` what is known of their clock: `frame.time`
        depends on it.

        Raises AttachRefused with the driver's words, RingRefused where it makes no such ring, AttachPending when a
        driver has not answered in time, DriverUnreachable when there is none.
        """
        stream_id, name = arguments.stream(stream)
        arguments.timeout(self._attach_timeout(timeout))
        arguments.callback("on_state", on_state)
        if release_gil_from_bytes is not None:
            arguments.whole_number("release_gil_from_bytes", release_gil_from_bytes, 2**63 - 1)
        ring = ring_request(
            create=create,
            frame=frame,
            dtype=dtype,
            seconds=seconds,
            rate_hz=rate_hz,
            slots=slots,
            max_frame_bytes=max_frame_bytes,
        )
        options = ProducerOptions(
            ring=ring,
            on_state=on_state,
            release_gil_from_bytes=release_gil_from_bytes,
            with_publish_time=with_publish_time,
            is_relay=is_relay,
            has_own_clock=has_own_clock,
            trace_ids=self.config.client.trace_ids if trace_ids is None else trace_ids,
        )
        home = self
        if driver_instance_id is not None:
            home, left = self._driver(driver_instance_id, self._attach_timeout(timeout))
            timeout = None if timeout is None else left
        return home._open_producer(stream_id, name, create, timeout, options)

    def consumer(
        self,
        stream: int | str,
        *,
        mode: Literal["stream", "rate_limited"] = "stream",
        max_rate_hz: int = 0,
        create: bool = False,
        timeout: float | None = None,
        on_state: Callable[[StateChange], object] | None = None,
        on_progress: Callable[[Progress], object] | None = None,
        progress_interval_us: int | None = None,
        progress_bytes_delta: int | None = None,
        progress_major_delta_units: int | None = None,
        max_outstanding_seq_gap: int | None = None,
        private_descriptors: Endpoint | None = None,
        private_control: Endpoint | None = None,
        driver_instance_id: str | None = None,
        driver: bool = True,
    ) -> Consumer:
        """Read a stream, by id or by name.

        >>> consumer = client.consumer("camera/front")     # doctest: +SKIP

        `mode="rate_limited"` delivers at most `max_rate_hz` frames a second. A consumer that falls more than
        `max_outstanding_seq_gap` frames behind goes on with the newest (256 by default, or three quarters of a
        smaller ring; 0: never). `on_progress` is called from `poll` with partial frames. A stream of descriptors
        or of progress of its own is asked for with `private_descriptors` and `private_control`. A name that streams of
        several drivers have is an error that lists them; `driver_instance_id` chooses one. Without a driver
        (`driver=False`) what a producer announces by itself is mapped, with every check that a driver's memory gets. A
        stream that has no producer yet is waited for. Raises like `producer`, and RegionRejected when its memory must
        not be mapped.
        """
        from tensorpool.client.consumer import Consumer  # with numpy, before anything is attached

        stream_id, name = arguments.stream(stream)
        preferences = arguments.preferences(
            mode,
            max_rate_hz,
            on_progress is not None,
            (progress_interval_us, progress_bytes_delta, progress_major_delta_units),
            private_descriptors,
            private_control,
        )
        self._check_allocation(private_descriptors, private_control)
        if max_outstanding_seq_gap is not None:
            arguments.whole_number("max_outstanding_seq_gap", max_outstanding_seq_gap, 2**63 - 1)
        arguments.callback("on_state", on_state)
        arguments.callback("on_progress", on_progress)
        home, left = self, self._attach_timeout(timeout)
        if driver:
            home, stream_id, left = self._locate(stream_id, name, driver_instance_id, left)
        elif create or driver_instance_id is not None:
            raise LocalProtocolError(
                "driver=False: no driver is asked, so neither create nor driver_instance_id applies"
            )
        spec = AttachSpec(stream_id, Role.CONSUMER, create)
        kind = ConsumerSession if driver else StandaloneSession
        session = kind(home._conductor, spec, name, preferences, max_outstanding_seq_gap)
        session.wait = home._wait_for
        home._attach_consumer(session, None if timeout is None else left)
        invoke = None if home._invoker is None else home.invoke
        consumer = Consumer(session, home, invoke, on_state, on_progress)
        self._consumers.append(weakref.ref(consumer, self._consumers.remove))
        return consumer

    def run(self, on_frame: Callable[[Consumer, Frame], object]) -> None:
        """Call `on_frame(consumer, frame)` with every frame of every consumer that this client has open.

        >>> client.run(lambda consumer, frame: print(consumer.name, frame.seq))     # doctest: +SKIP

        Everything happens on the thread that calls it, one frame at a time, in turns between the consumers: while
        `on_frame` takes long, frames of the others are lost as usual, and counted. `on_frame` may open and close
        consumers. Returns when all of them, or the client, are closed; what `on_frame` or a signal handler raises ends
        it, too. Consumers of `aio` are left out. Raises LocalProtocolError where no consumer is open.
        """
        from tensorpool.client.waiting import run

        run(on_frame, self._consumers)

    def watch(
        self, stream: int | str, *, timeout: float | None = None, driver_instance_id: str | None = None
    ) -> RingWatch:
        """Follow a stream's rings without receiving its frames. Raises like `consumer`."""
        stream_id, name = arguments.stream(stream)
        home, stream_id, left = self._locate(stream_id, name, driver_instance_id, self._attach_timeout(timeout))
        spec, preferences = AttachSpec(stream_id, Role.CONSUMER), Preferences(listens=False)
        session = ConsumerSession(home._conductor, spec, name, preferences, None)
        watch = RingWatch(session, home._detach)
        home._attach_consumer(session, None if timeout is None else left)
        return watch

    def discover(
        self,
        name: str | None = None,
        *,
        tags: Iterable[str] = (),
        producer_id: int | None = None,
        stream_id: int | None = None,
        data_source_id: int | None = None,
        driver_instance_id: str | None = None,
        timeout: float | None = None,
    ) -> list[DiscoveredStream]:
        """Which streams there are, as the driver's provider and every configured registry say, by driver and id.

        >>> for stream in client.discover(tags=["lab1"]):     # doctest: +SKIP
        ...     print(stream.data_source_name, stream.stream_id, stream.driver_instance_id)

        Filters are combined with AND; names and tags are compared byte for byte. Returns when all have answered, or a
        quarter of a second after the first one. Raises DriverUnreachable when none answers within `timeout` seconds
        (without one `client.discover_timeout_ms`, 2 s), TensorPoolError with the provider's words when it refuses, as
        it does with more matches than fit.
        """
        if isinstance(tags, str):
            raise LocalProtocolError(f"tags = {tags!r}: expected a list of texts")
        filters = Filters(
            name=name,
            tags=tuple(dict.fromkeys(tags)),
            producer_id=producer_id,
            stream_id=stream_id,
            data_source_id=data_source_id,
            driver_instance_id=driver_instance_id,
        ).check()
        timeout = arguments.timeout(self.config.client.discover_timeout_ms / 1e3 if timeout is None else timeout)
        endpoints = self._conductor.discovery.endpoints
        if not endpoints:
            accepted = "true, or registries to ask in [[discovery.registries]]"
            raise ConfigError("discovery.enabled", False, accepted)
        started_ns = time.monotonic_ns()
        query = self._query(filters, timeout)
        query.raise_for_silence(endpoints, time.monotonic_ns() - started_ns)
        return query.streams

    def invoke(self) -> int:
        """One turn of the conductor, for clients made with conductor="invoked"; returns the work done."""
        if self._invoker is None:
            raise LocalProtocolError('this client has a thread for its conductor; see connect(conductor="invoked")')
        return self._invoker.invoke() + sum(other.invoke() for other in tuple(self._others.values()))

    def close(self) -> None:
        """Give every lease back and disconnect. Frames and views stay valid."""
        if self._is_closed:
            return
        self._is_closed = True
        for other in tuple(self._others.values()):
            other.close()
        for session in self._sessions:
            if isinstance(session, ConsumerSession):
                session.reader.close()
            self._detach(session)
        if self._runner is not None:
            self._runner.close()
        if self._invoker is not None:
            self._invoker.close()

    def __repr__(self) -> str:
        sessions = [session for session in self._sessions if not session.is_closed]
        consumers = sum(isinstance(session, ConsumerSession) for session in sessions)
        counts = (len(sessions) - consumers, "producer"), (consumers, "consumer")
        held = ", ".join(f"{count} {role}{'' if count == 1 else 's'}" for count, role in counts)
        return f"<Client at {self.aeron_dir}: {'closed' if self._is_closed else held}>"

    # --- inside

    def _order(self, act: Callable[[int], object]) -> None:
        if self._is_closed or os.getpid() != self._pid:
            raise Closed(
                "the client is closed, or belongs to the process that this one was forked from: connect() anew here, "
                "or start the process with multiprocessing's 'spawn'"
            )
        self._conductor.order(act)

    def _check_allocation(self, descriptors: Endpoint | None, control: Endpoint | None) -> None:
        """E22: id 0 asks the driver for an id; only a driver that has some to give is asked."""
        ranges = self.config.driver
        for name, endpoint, ids in (
            ("private_descriptors", descriptors, ranges.descriptor_stream_id_range),
            ("private_control", control, ranges.control_stream_id_range),
        ):
            if endpoint is not None and endpoint.stream_id == 0 and not ids:
                key = "driver." + ("descriptor" if name == "private_descriptors" else "control") + "_stream_id_range"
                raise LocalProtocolError(f"{name}: id 0 asks the driver for one, and {key} is empty; give an id")

    def _query(self, filters: Filters, timeout: float) -> DiscoveryQuery:
        query = DiscoveryQuery(filters)
        discovery = self._conductor.discovery
        self._order(lambda now_ns: discovery.ask(query, now_ns))
        self._wait_for(query, lambda: query.is_done, timeout)
        self._order(lambda now_ns: discovery.forget(query))
        return query

    def _own_stream(self, name: str, timeout: float, *, create: bool) -> int:
        """The stream of that name at our own driver, 0 if there is none: its producer finds a place for it.

        One of the configuration is asked for again during half of the time: a driver that has just started lists it
        once its memory is made.
        """
        timeout = arguments.timeout(timeout)
        discovery = self._conductor.discovery
        if not discovery.endpoints:
            return 0
        configured = self.config.streams.get(name)
        until_s = time.monotonic() + (0 if create or configured is None else timeout / 2)
        found: list[DiscoveredStream] = []
        while not found:
            query = self._query(Filters(name=name), min(timeout, OWN_PATIENCE_S))
            found = [stream for stream in query.streams if discovery.is_here(stream)]
            if time.monotonic() >= until_s:
                break
            if not found:
                time.sleep(LOOK_AGAIN_S)
        if len(found) > 1:
            raise _ambiguous(name, found)
        if not found and query.answers == 0 and configured is not None:
            return configured.stream_id
        return found[0].stream_id if found else 0

    def _open_producer(
        self, stream_id: int, name: str | None, create: bool, timeout: float | None, options: ProducerOptions
    ) -> Producer:
        from tensorpool.client.producer import Producer

        for known in tuple(self._producers):
            if known._is_open_as(stream_id, name) and os.getpid() == self._pid:
                known._check_options(options)
                return known
        if name is not None:
            stream_id = self._own_stream(name, self._attach_timeout(timeout), create=create)
        if options.ring is not None:
            stream_id = self._provision(stream_id, name, options.ring)
        session = ProducerSession(self._conductor, AttachSpec(stream_id, Role.PRODUCER, create), name, options)
        if name is not None:
            self._order(self._conductor.listen_for_names)
        self._attach(session, lambda now_ns: self._conductor.add_producer(session, now_ns), timeout)
        producer = Producer(session, self._detach, self._wait_for, options)
        producer._check_ring()
        self._producers.add(producer)
        return producer

    def _provision(self, stream_id: int, name: str | None, ring: RingRequest) -> int:
        """Have the driver make room; the id of the stream, which it may have chosen."""
        if name is not None and stream_id == 0:
            stream_id = preferred_id(name, self.config.driver.stream_id_range)
        label, timeout = name or str(stream_id), self.config.control.command_timeout_ms / 1e3
        return provision(self.config, self.aeron_dir, stream_id, label, ring, timeout)

    def _driver(self, instance_id: str, timeout: float) -> tuple[Client, float]:
        """The client of that driver, learnt from any of its streams, and the time that is left."""
        if self._conductor.discovery.is_own_id(instance_id):
            return self, timeout
        deadline = time.monotonic() + timeout
        found = self.discover(driver_instance_id=instance_id, timeout=timeout)
        if not found:
            raise TensorPoolError(f"no stream of a driver {instance_id!r} is announced; `tensorpool ls` shows what is")
        return self._client_of(found[0]), max(deadline - time.monotonic(), LOOK_AGAIN_S)

    def _locate(
        self, stream_id: int, name: str | None, driver_instance_id: str | None, timeout: float
    ) -> tuple[Client, int, float]:
        """Who grants leases on a stream: the client of that driver, the stream's id, and the time that is left.

        Waits for a name that no stream has yet. A name that no provider knows is left to what producers announce here.
        """
        timeout = arguments.timeout(timeout)
        discovery = self._conductor.discovery
        is_chosen = driver_instance_id is not None
        if (name is None and not is_chosen) or (not discovery.endpoints and not is_chosen):
            return self, stream_id, timeout
        filters = Filters(name=name, stream_id=stream_id or None, driver_instance_id=driver_instance_id).check()
        deadline = time.monotonic() + timeout
        answers = 0
        while (left := deadline - time.monotonic()) > 0:
            query = self._query(filters, left if answers or is_chosen else min(left, PATIENCE_S))
            answers += query.answers
            if answers == 0:
                if is_chosen:
                    query.raise_for_silence(discovery.endpoints, int(timeout * 1e9))
                return self, stream_id, max(deadline - time.monotonic(), LOOK_AGAIN_S)
            found = query.streams
            if len(found) > 1:
                raise _ambiguous(name or str(stream_id), found)
            if found:
                return self._client_of(found[0]), found[0].stream_id, max(deadline - time.monotonic(), LOOK_AGAIN_S)
            may_be_here = driver_instance_id is None or discovery.is_own_id(driver_instance_id)
            if self._is_announced_here(name if may_be_here else None, query, min(LOOK_AGAIN_S, left)):
                return self, stream_id, max(deadline - time.monotonic(), LOOK_AGAIN_S)
        where = f" at driver {driver_instance_id!r}" if is_chosen else ""
        what = f"no producer announces the name {name!r}" if name is not None else f"there is no stream {stream_id}"
        raise TensorPoolError(f"{what}{where}; `tensorpool ls` shows what there is")

    def _is_announced_here(self, name: str | None, query: DiscoveryQuery, timeout: float) -> bool:
        """Whether a producer here announces the name, though no provider knows it."""
        announced: list[object] = []
        if name is not None:
            names = self._conductor.names
            self._order(self._conductor.listen_for_names)
            self._order(lambda now_ns: announced.extend(names.announced(name, now_ns)))
        return self._wait_for(query, lambda: bool(announced), timeout)

    def _client_of(self, stream: DiscoveredStream) -> Client:
        """§5.2: leases are asked for at the control endpoint that the answer names."""
        discovery = self._conductor.discovery
        if discovery.is_here(stream):
            return self
        if discovery.is_other_host(stream):
            raise TensorPoolError(
                f"{stream} cannot be attached from here: it is served at {stream.driver_control_channel} of another "
                "host; a bridge brings it here"
            )
        with self._others_lock:
            other = self._others.get(stream.control)
            if other is None:
                mode: Literal["thread", "invoked"] = "thread" if self._invoker is None else "invoked"
                settings = config_for(self.config, stream)
                other = self._others[stream.control] = Client(
                    settings, self.aeron_dir, conductor=mode, clock=self._clock
                )
        return other

    def _attach_timeout(self, timeout: float | None) -> float:
        """How long a call waits for a driver that reports nothing."""
        return self.config.client.attach_timeout_ms / 1e3 if timeout is None else timeout

    def _attach_consumer(self, session: ConsumerSession, timeout: float | None) -> None:
        if session.name is not None:
            self._order(self._conductor.listen_for_names)
        self._attach(session, lambda now_ns: self._conductor.add_consumer(session, now_ns), timeout)

    def _attach(self, session: Session, add: Callable[[int], object], timeout: float | None) -> None:
        patience = arguments.timeout(self._attach_timeout(timeout))
        self._order(add)
        self._sessions = [kept for kept in self._sessions if not kept.is_closed] + [session]
        started_ns = time.monotonic_ns()

        def is_decided() -> bool:
            return session.is_usable or session.is_hopeless

        try:
            while not self._wait_for(session, is_decided, patience):
                if timeout is not None or not session.is_under_way(self._conductor.clock.monotonic_ns()):
                    break
                patience = LOOK_AGAIN_S
        except BaseException:
            self._detach(session)
            raise
        if session.is_usable:
            return
        failure = session.failure
        if failure is None or session.is_under_way(self._conductor.clock.monotonic_ns()):
            failure = session.no_answer(time.monotonic_ns() - started_ns)
        self._detach(session)
        raise failure

    def _detach(self, session: Session) -> None:
        if session.is_closed:
            return
        if self._is_driven:
            self._conductor.order(session.detach)
            self._wait_for(session, lambda: session.is_closed, CLOSE_WITHIN_S)
        session.set_state(State.CLOSED, "closed")

    @property
    def _is_driven(self) -> bool:
        """Whether the conductor takes turns; not so in a forked child."""
        return self._invoker is not None or (self._runner is not None and self._runner.is_running)

    def _wait_for(self, session: Awaited, is_met: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until it is so; without a thread for the conductor this call turns it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._conductor.awaited():
            return self._wait_until(session, is_met, deadline)

    def _wait_until(self, session: Awaited, is_met: Callable[[], bool], deadline: float | None) -> bool:
        while not is_met():
            if session.is_closed:
                return is_met()
            left = 0.1 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            if self._invoker is not None:
                if self._invoker.invoke() == 0:
                    time.sleep(min(left, 0.0005))
            else:
                with session.changed:
                    if not is_met():
                        session.changed.wait(min(left, 0.1))
        return True


def connect(
    aeron_dir: str | None = None,
    *,
    config: DriverConfig | Path | str | None = None,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    conductor: Literal["thread", "invoked"] = "thread",
) -> Client:
    """Connect to the driver whose media driver is at `aeron_dir` (by default where everybody's is).

    >>> client = connect()                                                          # doctest: +SKIP
    >>> client = connect(config="camera.toml", overrides={"shm.namespace": "lab1"})    # doctest: +SKIP

    The driver's configuration file serves its clients too: endpoints, directories and periods are the same. Raises
    TransportError when no media driver is alive there, ConfigError for settings that cannot be used.
    """
    if isinstance(config, DriverConfig):
        if overrides:
            raise ConfigError("overrides", dict(overrides), "none together with a configuration that is already made")
        settings = config
    else:
        settings = DriverConfig.load(config, overrides=overrides)
    where = aeron_dir or settings.driver.aeron_dir or aeron.default_aeron_dir()
    return Client(settings, where, conductor=conductor)


def _ambiguous(name: str, found: list[DiscoveredStream]) -> TensorPoolError:
    candidates = ", ".join(map(str, found))
    is_one_driver = len({stream.driver_instance_id for stream in found}) == 1
    choice = "give one of the ids" if is_one_driver else "choose with driver_instance_id="
    return TensorPoolError(f"{name!r} is ambiguous: {candidates}; {choice}")


def _log_failed_turn(error: Exception) -> None:
    get_logger("client").error("turn_failed", exc_info=error)
