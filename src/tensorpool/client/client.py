# SPDX-License-Identifier: Apache-2.0
"""A process's connection to a running driver: where producers and consumers come from.

Driver Model §2, §4.12; decisions E1-E3, E20.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from tensorpool import aeron
from tensorpool.channel import Endpoint
from tensorpool.client.attachment import Wish
from tensorpool.client.conductor import ClientConductor, KickedIdle
from tensorpool.client.consumer import Consumer, Progress
from tensorpool.client.consumer_session import ConsumerSession, Preferences
from tensorpool.client.producer import Producer
from tensorpool.client.producer_session import ProducerSession
from tensorpool.client.session import Session, State, StateChange
from tensorpool.client.watch import Watch
from tensorpool.clock import Clock, SystemClock
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import Closed, ConfigError, DriverUnreachable, LocalProtocolError
from tensorpool.logs import get_logger
from tensorpool.wire.control import Mode
from tensorpool.wire.driver import Role

if TYPE_CHECKING:
    from tensorpool.client.aio import AsyncClient

CLOSE_WITHIN_S: Final = 2.0
MAX_STREAM_ID: Final = 2**32 - 2

_MODES: Final = {"stream": Mode.STREAM, "rate_limited": Mode.RATE_LIMITED}


class Client:
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
        self.config = config
        self.aeron_dir = aeron_dir
        label = name or f"tensorpool {os.getpid()}"
        self._conductor = ClientConductor(config, clock or SystemClock(), aeron_dir, label)
        self._is_closed = False
        self._pid = os.getpid()
        self._runner: aeron.AgentRunner | None = None
        self._invoker: aeron.AgentInvoker | None = None
        self._sessions: list[Session] = []
        if conductor == "thread":
            idle = KickedIdle(self._conductor)
            self._runner = aeron.AgentRunner(self._conductor, idle, on_error=_log_failed_turn).start()
        else:
            self._invoker = aeron.AgentInvoker(self._conductor, on_error=_log_failed_turn)
            self._invoker.start()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def aio(self) -> AsyncClient:
        """The same for asyncio: `async for frame in client.aio.consumer("camera/front")`."""
        from tensorpool.client.aio import AsyncClient

        return AsyncClient(self)

    def producer(
        self,
        stream: int | str,
        *,
        create: bool = False,
        timeout: float = 5.0,
        on_state: Callable[[StateChange], object] | None = None,
        release_gil_from_bytes: int | None = None,
        with_publish_time: bool = False,
    ) -> Producer:
        """Become the producer of a stream, by id or by name.

        >>> producer = client.producer("camera/front", create=True)     # doctest: +SKIP

        `create` lets the driver make the stream. Within `timeout` seconds a stream that is still taken is asked for
        again: a producer that was killed holds its lease for some seconds. Raises AttachRefused with the driver's
        words, DriverUnreachable when nobody answers. `on_state` is called from `publish`. Frames of
        `release_gil_from_bytes` and more are copied without the GIL (8 MiB by default).
        """
        stream_id, name = _stream(stream)
        wish = Wish(stream_id, Role.PRODUCER, create)
        session = ProducerSession(self._conductor, wish, name, with_publish_time=with_publish_time)
        if name is not None:
            self._order(self._conductor.listen_for_names)
        self._attach(session, lambda now_ns: self._conductor.add_producer(session, now_ns), timeout)
        return Producer(session, self._detach, self._wait_for, on_state, release_gil_from_bytes)

    def consumer(
        self,
        stream: int | str,
        *,
        mode: Literal["stream", "rate_limited"] = "stream",
        max_rate_hz: int = 0,
        create: bool = False,
        timeout: float = 5.0,
        on_state: Callable[[StateChange], object] | None = None,
        on_progress: Callable[[Progress], object] | None = None,
        progress_interval_us: int | None = None,
        progress_bytes_delta: int | None = None,
        progress_major_delta_units: int | None = None,
        max_outstanding_seq_gap: int | None = None,
        private_descriptors: Endpoint | None = None,
        private_control: Endpoint | None = None,
    ) -> Consumer:
        """Read a stream, by id or by name.

        >>> consumer = client.consumer("camera/front")     # doctest: +SKIP

        `mode="rate_limited"` delivers at most `max_rate_hz` frames a second. A consumer that falls more than
        `max_outstanding_seq_gap` frames behind goes on with the newest (three quarters of the ring by default; 0:
        never). `on_progress` is called from `poll` with partial frames. A stream of descriptors
        or of progress of its own is asked for with `private_descriptors` and `private_control`.
        Raises like `producer`, and RegionRejected when the stream's memory must not be mapped.
        """
        stream_id, name = _stream(stream)
        preferences = _preferences(
            mode,
            max_rate_hz,
            on_progress is not None,
            (progress_interval_us, progress_bytes_delta, progress_major_delta_units),
            private_descriptors,
            private_control,
        )
        self._check_allocation(private_descriptors, private_control)
        _check_range("max_outstanding_seq_gap", max_outstanding_seq_gap, 2**63 - 1)
        wish = Wish(stream_id, Role.CONSUMER, create)
        session = ConsumerSession(self._conductor, wish, name, preferences, max_outstanding_seq_gap)
        if name is not None:
            self._order(self._conductor.listen_for_names)
        self._attach(session, lambda now_ns: self._conductor.add_consumer(session, now_ns), timeout)
        invoke = None if self._invoker is None else self.invoke
        return Consumer(session, self._detach, invoke, on_state, on_progress)

    def watch(self, stream: int | str, *, timeout: float = 5.0) -> Watch:
        """Follow a stream's rings without receiving its frames. Raises like `consumer`."""
        stream_id, name = _stream(stream)
        wish, preferences = Wish(stream_id, Role.CONSUMER), Preferences(listens=False)
        session = ConsumerSession(self._conductor, wish, name, preferences, None)
        watch = Watch(session, self._detach)
        if name is not None:
            self._order(self._conductor.listen_for_names)
        self._attach(session, lambda now_ns: self._conductor.add_consumer(session, now_ns), timeout)
        return watch

    def invoke(self) -> int:
        """One turn of the conductor, for clients made with conductor="invoked"; returns the work done."""
        if self._invoker is None:
            raise LocalProtocolError('this client has a thread for its conductor; see connect(conductor="invoked")')
        return self._invoker.invoke()

    def close(self) -> None:
        """Give every lease back and disconnect. Frames and views stay valid."""
        if self._is_closed:
            return
        self._is_closed = True
        for session in self._sessions:
            if isinstance(session, ConsumerSession):
                session.reception.close()
            self._detach(session)
        if self._runner is not None:
            self._runner.close()
        if self._invoker is not None:
            self._invoker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside

    def _order(self, act: Callable[[int], object]) -> None:
        if self._is_closed or os.getpid() != self._pid:
            raise Closed("the client is closed, or belongs to the process that this one was forked from")
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

    def _attach(self, session: Session, add: Callable[[int], object], timeout: float) -> None:
        if not timeout > 0:
            raise LocalProtocolError(f"timeout = {timeout}: expected a positive number of seconds")
        self._order(add)
        self._sessions = [kept for kept in self._sessions if not kept.is_closed] + [session]
        started_ns = time.monotonic_ns()
        try:
            usable = (State.ACTIVE, State.FALLBACK)
            self._wait_for(session, lambda: session.state in usable or session.is_hopeless, timeout)
        except BaseException:
            self._detach(session)
            raise
        if session.state in usable:
            return
        failure = session.failure
        self._detach(session)
        if failure is not None and not isinstance(failure, DriverUnreachable):
            raise failure
        channel = self.config.driver.control.channel
        words = "is a driver running there? (`tensorpool driver`)"
        raise DriverUnreachable(channel, time.monotonic_ns() - started_ns, words)

    def _detach(self, session: Session) -> None:
        if session.is_closed:
            return
        if self._is_driven:
            self._conductor.order(session.detach)
            self._wait_for(session, lambda: session.is_closed, CLOSE_WITHIN_S)
        session.set_state(State.CLOSED, "closed")

    @property
    def _is_driven(self) -> bool:
        """Whether somebody turns the conductor; not so in a forked child."""
        return self._invoker is not None or (self._runner is not None and self._runner.is_running)

    def _wait_for(self, session: Session, is_met: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until it is so; turns the conductor where nobody else does."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._conductor.awaited():
            return self._wait_until(session, is_met, deadline)

    def _wait_until(self, session: Session, is_met: Callable[[], bool], deadline: float | None) -> bool:
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


def _stream(stream: int | str) -> tuple[int, str | None]:
    if isinstance(stream, str):
        if not stream or not stream.isprintable() or len(stream.encode()) > 256 or not stream.isascii():
            raise LocalProtocolError(f"stream name {stream!r}: expected 1 to 256 printable ASCII characters")
        return (int(stream), None) if stream.isdecimal() else (0, stream)
    if type(stream) is not int or not 1 <= stream <= MAX_STREAM_ID:
        raise LocalProtocolError(f"stream {stream!r}: expected a name, or an id from 1 to 2^32 - 2")
    return stream, None


def _preferences(
    mode: str,
    max_rate_hz: int,
    supports_progress: bool,
    hints: tuple[int | None, int | None, int | None],
    descriptors: Endpoint | None,
    control: Endpoint | None,
) -> Preferences:
    if mode not in _MODES:
        raise LocalProtocolError(f"mode = {mode!r}: expected 'stream' or 'rate_limited'")
    _check_range("max_rate_hz", max_rate_hz, 2**32 - 1)
    if mode == "rate_limited" and max_rate_hz == 0:
        raise LocalProtocolError("mode 'rate_limited' needs max_rate_hz")
    names = "progress_interval_us", "progress_bytes_delta", "progress_major_delta_units"
    for name, value in zip(names, hints, strict=True):
        _check_range(name, value, 2**32 - 2)
    for name, endpoint in (("private_descriptors", descriptors), ("private_control", control)):
        if endpoint is not None and (not endpoint.channel or not 0 <= endpoint.stream_id < 2**31):
            raise LocalProtocolError(f"{name} = {endpoint}: expected a channel and a stream id below 2^31")
    return Preferences(_MODES[mode], max_rate_hz, supports_progress, *hints, descriptors, control)


def _check_range(name: str, value: int | None, highest: int) -> None:
    if value is not None and (type(value) is not int or not 0 <= value <= highest):
        raise LocalProtocolError(f"{name} = {value!r}: expected 0 to {highest}")


def _log_failed_turn(error: Exception) -> None:
    get_logger("client").error("turn_failed", exc_info=error)
