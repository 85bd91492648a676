# SPDX-License-Identifier: Apache-2.0
"""A bridge as one object: mappings of both directions on one media driver, in one duty cycle.

    disconnected ──media driver alive──► connected: a worker per mapping ──its transport fails──► disconnected

A worker never waits and raises TransportError or Closed when the media driver is gone; then all of them are closed and
made anew once it is back. A driver that restarts, a lease that is lost and a source that changes its epoch are the
workers' own business. As a service it can be paused, resumed and drained.
Bridge §2, §3; decision G9; Service Control §4.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final, Protocol, Self

from tensorpool import aeron
from tensorpool._core import BridgePump
from tensorpool.bridge.checksum import read_key
from tensorpool.bridge.config import BridgeConfig, MappingConfig
from tensorpool.bridge.config_checks import check_against_driver
from tensorpool.bridge.destinations import Destinations
from tensorpool.bridge.metrics import Collector, Counters
from tensorpool.bridge.publications import Publications
from tensorpool.bridge.receiver import Receiver, Reception
from tensorpool.bridge.sender import Sender
from tensorpool.client import Client
from tensorpool.clock import Clock, SystemClock
from tensorpool.closing import ClosesOnExit
from tensorpool.control import Service, State, add_common_commands
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import Closed, ConfigError, TransportError
from tensorpool.logs import get_logger

WAIT_NS: Final = 20_000_000  # for frames or chunks; messages beside chunks end it, the rest is not urgent
PROGRESS_WAIT_NS: Final = 1_000_000  # where everything else includes progress


class Worker(Protocol):
    """What turns one mapping: `sender.Sender` and `receiver.Receiver`.

        Sender(mapping: MappingConfig, config: BridgeConfig, client: tensorpool.client.Client,
               transport: aeron.Client, publications: Publications, counters: Counters)

    `client` is connected to the local SHM driver and has a thread of its own; consumers are opened with
    `attaching.BackgroundAttach`, since `client.consumer` waits. `transport` is for local publications and for
    subscriptions; the worker closes what it adds. `client.config` is the local driver's configuration.
    """

    @property
    def mapping(self) -> MappingConfig: ...

    @property
    def is_ready(self) -> bool:
        """Whether it has its lease and its streams."""

    def invoke(self, now_ns: int) -> int:
        """One turn, but for frames and chunks: never waits, returns the work done. Raises TransportError, Closed."""

    def close(self) -> None:
        """Give back leases and streams; raises nothing when the media driver is gone already."""


class Bridge(ClosesOnExit):
    """A bridge inside this process: an agent, turned by `invoke`, or on a thread between `start` and `close`.

    >>> with Bridge(BridgeConfig.load("bridge.toml")).start() as bridge:      # doctest: +SKIP
    ...     print(bridge.counters)

    `driver` is the local driver's configuration where it is at hand; by default it is made of the bridge's own keys.
    Waits for a media driver that is not there yet. Raises ConfigError.
    """

    def __init__(
        self,
        config: BridgeConfig,
        *,
        driver: DriverConfig | None = None,
        aeron_dir: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.driver = config.driver() if driver is None else driver
        check_against_driver(config, self.driver)
        self._mac_key = read_key(config.bridge.mac_key_file)
        self.aeron_dir = (
            aeron_dir or config.bridge.aeron_dir or self.driver.driver.aeron_dir or aeron.default_aeron_dir()
        )
        self._clock = clock or SystemClock()
        self._log = get_logger("bridge", instance_id=config.bridge.instance_id)
        self._counters = {mapping: Counters(mapping.name) for mapping in config.mappings}
        self._unrouted = Counters("")
        self._destinations = Destinations(config, self.driver)
        self._connection = aeron.MediaDriverConnection(
            self.aeron_dir, self.role_name, self._open_workers, self._log, close_streams=self._close_workers
        )
        self._client: Client | None = None
        self._paused: set[MappingConfig] = set()
        self._logged_failure = ""
        self._is_closed = False
        self._is_drained = False
        self._service = self._make_service() if config.control.enabled else None
        self._runner: aeron.AgentRunner | None = None
        for warning in config.warnings():
            self._log.warning("config", advice=warning)

    # --- what it is

    @property
    def role_name(self) -> str:
        return f"bridge {self.config.bridge.instance_id}"

    @property
    def workers(self) -> tuple[Sender | Receiver, ...]:
        """Of all mappings; none while there is no media driver."""
        streams = self._connection.streams
        return () if streams is None else streams.workers

    @property
    def is_ready(self) -> bool:
        """Whether every mapping has its lease and its streams."""
        workers = self.workers
        return len(workers) == len(self.config.mappings) and all(worker.is_ready for worker in workers)

    @property
    def is_running(self) -> bool:
        return self._runner is not None and self._runner.is_running

    @property
    def silent_ns(self) -> int:
        """How long ago its duty cycle turned, on the thread between `start` and `close`."""
        return 0 if self._runner is None else self._runner.silent_ns

    @property
    def trouble(self) -> str | None:
        """Why some mapping is not carried; None: all are."""
        if self._connection.streams is None:
            return f"no media driver is alive at {self.aeron_dir}"
        if self.is_ready:
            return None
        return "; ".join(f"{name}: {why}" for name, why in self.failures.items()) or "mappings wait for their streams"

    @property
    def counters(self) -> dict[str, dict[str, int]]:
        """What each mapping counted so far; under "" what belongs to none."""
        return {counters.mapping: counters.as_dict() for counters in self._all_counters()}

    @property
    def failures(self) -> dict[str, str]:
        """Mappings without a lease, and why."""
        found = {worker.mapping.name: worker.failure for worker in self.workers}
        return {name: str(failure) for name, failure in found.items() if failure is not None}

    @property
    def destinations(self) -> dict[str, int]:
        """The local stream of each mapping that is received; 0 while none was chosen."""
        return {
            mapping.name: mapping.dest_stream_id or self._destinations.chosen(mapping)
            for mapping in self.config.received
        }

    @property
    def collector(self) -> Collector:
        """For prometheus_client.REGISTRY.register."""
        return Collector(lambda: tuple(self._all_counters()), self._gauges)

    def pause(self, mapping: str | None = None) -> None:
        """Send and publish nothing until `resume`; what is left out is counted. All mappings, or the one named."""
        self._paused |= self._named(mapping)
        self._apply_pauses()

    def resume(self, mapping: str | None = None) -> None:
        self._paused -= self._named(mapping)
        self._apply_pauses()

    @property
    def is_paused(self) -> bool:
        """Whether every mapping is."""
        return len(self._paused) == len(self.config.mappings)

    # --- the duty cycle

    def invoke(self) -> int:
        """One turn; never waits long. Returns the work done."""
        if self._is_closed:
            raise Closed(f"bridge {self.config.bridge.instance_id} is closed")
        now_ns = self._clock.monotonic_ns()
        try:
            if self._connection.maintain(now_ns):
                self._on_connected()
            streams = self._connection.streams
            if streams is None:
                return 0
            work = streams.invoke(now_ns)
            return work + (self._service.invoke() if self._service is not None else 0)
        except (TransportError, Closed) as error:
            self._connection.lose(error, now_ns)
            return 1

    def on_start(self) -> None: ...

    def do_work(self) -> int:
        if self._is_drained:
            raise aeron.AgentTerminated
        return self.invoke()

    def on_close(self) -> None:
        self._end()

    def start(self, idle: aeron.IdleStrategy | None = None) -> Self:
        """Turn on a thread of its own until `close`."""
        self._runner = aeron.AgentRunner(self, idle or _Idle(self), on_error=self._on_failed_turn).start()
        return self

    def close(self) -> None:
        """Give every lease back and end."""
        if self._runner is not None:
            self._runner.close()
        else:
            self._end()

    def wait(self, timeout_ns: int) -> bool:
        """Send frames and take chunks as they come, in native code, until something else is to be done.

        False where there is nothing to send yet, nor to receive.
        """
        streams = self._connection.streams
        try:
            return streams is not None and streams.pump(timeout_ns) is not None
        except (TransportError, Closed):
            return False  # the next turn finds out

    # --- inside

    def _open_workers(self, transport: aeron.Client, now_ns: int) -> BridgeStreams:
        if self._client is None:
            self._client = Client(self.driver, self.aeron_dir, name=self.role_name)
        streams = BridgeStreams(Publications(transport))
        try:
            for mapping in self.config.sent:
                counters = self._counters[mapping]
                sender = Sender(
                    mapping, self.config, self._client, transport, streams.publications, counters, self._mac_key
                )
                streams.senders += (sender,)
            if self.config.received:
                streams.reception = Reception(
                    self.config,
                    self._client,
                    transport,
                    self._destinations,
                    self._counters,
                    self._unrouted,
                    self._clock,
                    self._mac_key,
                )
        except BaseException:
            streams.close()
            raise
        return streams

    def _on_connected(self) -> None:
        self._apply_pauses()
        if self._service is not None and self._connection.client is not None:
            self._service.bind(self._connection.client, patiently=True)
        self._log.info("connected", aeron_dir=self.aeron_dir, mappings=len(self.config.mappings))

    def _close_workers(self, streams: BridgeStreams) -> None:
        if self._service is not None:
            self._service.unbind()
        streams.close()

    def _end(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._connection.close()
        if self._client is not None:
            self._client.close()

    def _named(self, name: str | None) -> set[MappingConfig]:
        found = {mapping for mapping in self.config.mappings if name in (None, mapping.name)}
        if not found:
            names = ", ".join(mapping.name for mapping in self.config.mappings)
            raise ValueError(f"mapping {name!r}: expected one of {names}")
        return found

    def _apply_pauses(self) -> None:
        for worker in self.workers:
            worker.paused = worker.mapping in self._paused
        if self._service is not None and self._service.state is not State.DRAINING:
            self._service.state = State.PAUSED if self.is_paused else State.RUNNING

    def _make_service(self) -> Service:
        service = Service("bridge", self.config.bridge.instance_id, config=self.config.control, clock=self._clock)
        add_common_commands(service, status=self._status, drain=self._drain, pause=self.pause, resume=self.resume)
        return service

    def _status(self) -> dict[str, object]:
        return {
            "ready": self.is_ready,
            "mappings": [mapping.name for mapping in self.config.mappings],
            "failures": self.failures,
            "destinations": self.destinations,
            "counters": self.counters,
        }

    def _drain(self) -> None:
        self._is_drained = True

    def _all_counters(self) -> Iterator[Counters]:
        yield self._unrouted
        yield from self._counters.values()

    def _gauges(self) -> dict[str, float]:
        return {
            "ready": float(self.is_ready),
            "mappings": float(len(self.config.mappings)),
            "mappings_ready": float(sum(worker.is_ready for worker in self.workers)),
        }

    def _on_failed_turn(self, error: Exception) -> None:
        if isinstance(error, ConfigError):
            raise error  # no further turn would mend it: `close` raises it
        if str(error) != self._logged_failure:
            self._log.error("turn_failed", exc_info=error)
        self._logged_failure = str(error)


class BridgeStreams:
    """The workers of all mappings, with their publications and subscriptions at one media driver."""

    def __init__(self, publications: Publications) -> None:
        self.publications = publications
        self.senders: tuple[Sender, ...] = ()
        self.reception: Reception | None = None
        self._pump = BridgePump()

    @property
    def workers(self) -> tuple[Sender | Receiver, ...]:
        return (*self.senders, *(self.reception.receivers if self.reception is not None else ()))

    def invoke(self, now_ns: int) -> int:
        """One turn of every worker. Raises TransportError, Closed."""
        work = sum(sender.invoke(now_ns) for sender in self.senders)
        if self.reception is not None:
            work += self.reception.invoke(now_ns)
        return work + (self.pump(0) or 0)

    def pump(self, for_ns: int) -> int | None:
        """Send and receive in native code: one round at least, and for so long, unless something else is to be done.

        How many frames and chunks there were; None where no stream can be sent or received now. Raises TransportError,
        Closed.
        """
        others = [it for sender in self.senders for it in sender.subscriptions]
        inflow = None
        if self.reception is not None:
            inflow = self.reception.inflow
            others += self.reception.subscriptions
        with contextlib.ExitStack() as stack:
            lent = [stack.enter_context(sender.lent()) for sender in self.senders]
            outflows = [outflow for outflow in lent if outflow is not None]
            if not outflows and inflow is None:
                return None
            return self._pump.pump(outflows, inflow, others, for_ns)

    def close(self) -> None:
        for worker in (*self.senders, *(() if self.reception is None else (self.reception,))):
            worker.close()
        self.publications.close()


class _Idle:
    """Sends and receives natively, and backs off while there is nothing to send or to receive."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._wait_ns = PROGRESS_WAIT_NS if bridge.config.bridge.forward_progress else WAIT_NS
        self._backoff = aeron.BackoffIdle(max_yields=5, max_park_ns=500_000)

    def idle(self, work_count: int) -> None:
        if not self._bridge.wait(self._wait_ns):
            self._backoff.idle(work_count)
