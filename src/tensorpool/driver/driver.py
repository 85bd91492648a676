# SPDX-License-Identifier: Apache-2.0
"""The SHM driver as one object: a conductor on a thread, with a media driver where none is running yet.

Discovery answers beside it, on a thread and a connection of its own: a flood of queries costs no client its lease.
Driver Model §2.1, §4.11; Discovery §2.1, §4.2.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from tensorpool import aeron
from tensorpool.channel import Endpoint
from tensorpool.clock import Clock, SystemClock
from tensorpool.closing import ClosesOnExit
from tensorpool.discovery.directory import DriverIdentity
from tensorpool.discovery.provider import Provider, Source, ThriftyIdle
from tensorpool.driver.conductor import DriverConductor
from tensorpool.driver.config import DriverConfig
from tensorpool.driver.failures import Failures
from tensorpool.logs import get_logger
from tensorpool.settings import lookalikes
from tensorpool.wire.driver import ShutdownReason

NOTICE_S: Final = 0.15  # clients that have nothing to do look every 100 ms
DISCOVERY_SHARE: Final = 0.25  # of a core, at most
LONGEST_NAP_NS: Final = 100_000_000
SHORTEST_DISCOVERY_NAP_NS: Final = 10_000_000
LONGEST_DISCOVERY_NAP_NS: Final = 80_000_000  # our clients end it; others are answered so much later


class Driver(ClosesOnExit):
    """A running SHM driver inside this process.

    >>> with Driver(DriverConfig.load()) as driver:      # doctest: +SKIP
    ...     client = tensorpool.connect(driver.aeron_dir)

    Uses the media driver at `aeron_dir` if one is alive there and embeds one otherwise. Raises `ConfigError` for a
    configuration that cannot be served, also when another driver owns the namespace, and `TransportError` when Aeron
    cannot start. `load` returns the configuration as it is now, for `reload`.
    """

    def __init__(
        self,
        config: DriverConfig | None = None,
        *,
        aeron_dir: str | None = None,
        clock: Clock | None = None,
        load: Callable[[], DriverConfig] | None = None,
    ) -> None:
        self.config = config or DriverConfig.load()
        for name, key in lookalikes(self.config, os.environ).items():
            get_logger("driver").warning("variable_ignored", name=name, perhaps_meant=key)
        self.aeron_dir = aeron_dir or self.config.driver.aeron_dir or aeron.default_aeron_dir()
        self.discovery: Provider | None = None  # that answers for this driver
        self._media_driver = aeron.embed(self.aeron_dir, self.config.aeron_access())
        try:
            self.conductor = DriverConductor(
                self.config, clock or SystemClock(), self.aeron_dir, load=load, on_reloaded=self._on_reloaded
            )
            idle = aeron.NappingIdle(self.conductor.nap, LONGEST_NAP_NS)
            self._runner = aeron.AgentRunner(self.conductor, idle, on_error=self._on_error).start()
        except BaseException:
            self._close_media_driver()
            raise
        self._discovery_runner: aeron.AgentRunner | None = None
        if self.config.discovery.enabled:
            try:
                self._start_discovery(clock or SystemClock())
            except BaseException:
                self._runner.close()
                self._close_media_driver()
                raise

    @property
    def is_running(self) -> bool:
        """False once a shutdown request, or `close`, has taken effect."""
        return self._runner.is_running

    @property
    def silent_ns(self) -> int:
        """How long ago its duty cycle turned."""
        return self._runner.silent_ns

    @property
    def embeds_media_driver(self) -> bool:
        return self._media_driver is not None

    def shut_down(self, reason: ShutdownReason = ShutdownReason.NORMAL, text: str = "") -> None:
        """Drain: refuse new attaches, announce a last time, notify the clients after the shutdown timeout, then end."""
        self.conductor.shut_down(reason, text)

    def reload(self, timeout_s: float | None = None) -> tuple[str, ...]:
        """Read the configuration again and go on with it: streams, profiles, ranges, registries and limits.

        All or nothing: returns how it differs, key by key, or raises ReloadRefused with every reason.
        """
        return self.conductor.reload().result(timeout_s)

    def close(self) -> None:
        """End at once: regions are removed, the media driver goes if it is ours. Clients fail closed.

        Raises what made the driver end by itself, once.
        """
        is_left_behind = self._media_driver is not None and len(self.conductor.lifecycle.leases) > 0
        with contextlib.ExitStack() as stack:  # each is closed, whatever the one before raised
            stack.callback(self._close_media_driver)
            if is_left_behind:  # clients get the notice that the driver ends before its messages are gone
                stack.callback(time.sleep, NOTICE_S)
            stack.callback(self._runner.close)
            if self._discovery_runner is not None:
                stack.callback(self._discovery_runner.close)
        failure, self.conductor.failure = self.conductor.failure, None
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """Remove the regions, and the media driver's files if it is ours, without waiting for any thread.

        For a process that is about to end and cannot wait for `close`.
        """
        self.conductor.remove_regions()
        if self._media_driver is not None:
            shutil.rmtree(self.aeron_dir, ignore_errors=True)

    def __repr__(self) -> str:
        phase = "running" if self.is_running else "closed"
        return f"<{type(self).__name__} {self.config.driver.instance_id} at {self.aeron_dir}: {phase}>"

    def _start_discovery(self, clock: Clock) -> None:
        settings = self.config.discovery
        self.discovery = Provider(
            settings, [_source(self.config)], self.aeron_dir, clock, registries=_registries(self.config)
        )
        self.conductor.find_name = functools.partial(self.discovery.directory.name_of, self.config.driver.instance_id)
        idle = ThriftyIdle(
            share=DISCOVERY_SHARE,
            shortest_ns=SHORTEST_DISCOVERY_NAP_NS,
            longest_ns=LONGEST_DISCOVERY_NAP_NS,
            nap=self.discovery.nap,
        )
        failures = Failures(get_logger("driver"), clock, Counter())
        self._discovery_runner = aeron.AgentRunner(
            self.discovery, idle, on_error=lambda error: failures.report("discovery", error)
        ).start()

    def _on_reloaded(self, config: DriverConfig) -> None:
        self.config = config
        if self.discovery is not None:
            self.discovery.reload([_source(config)], _registries(config))

    def _on_error(self, error: Exception) -> None:
        """A whole turn failed; the driver goes on, since clients depend on the leases that it keeps."""
        self.conductor.failures.report("turn", error)

    def _close_media_driver(self) -> None:
        if self._media_driver is not None:
            self._media_driver.close()


def _source(config: DriverConfig) -> Source:
    """The driver itself, as its discovery provider follows it."""
    endpoints = config.driver
    names = {stream.stream_id: name for name, stream in config.streams.items()}
    identity = DriverIdentity(endpoints.instance_id, endpoints.control, config.discovery.expiry_ms * 1_000_000, names)
    return Source(identity, endpoints.announce, endpoints.metadata)


def _registries(config: DriverConfig) -> list[Endpoint]:
    """Where its announces are sent on to."""
    return [registry.announce for registry in config.discovery.registries if registry.announce is not None]
