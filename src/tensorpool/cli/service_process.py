# SPDX-License-Identifier: Apache-2.0
"""A service's process as operators see it: /metrics and /healthz over HTTP, readiness and watchdog for systemd."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click
import msgspec

from tensorpool import aeron, logs
from tensorpool.closing import ClosesOnExit
from tensorpool.telemetry.addresses import checked_address
from tensorpool.telemetry.health import standing_still
from tensorpool.telemetry.systemd import Notifier

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class Monitoring(msgspec.Struct, frozen=True):
    """--metrics and --metrics-allow-remote as the user gave them."""

    address: str | None = None
    allow_remote: bool = False

    def check(self) -> tuple[str, int] | None:
        """Where to serve; None: nowhere. Raises ConfigError."""
        if not self.address:
            return None
        text = f"127.0.0.1{self.address}" if self.address.startswith(":") else self.address
        return checked_address(
            "--metrics", text, allow_remote=self.allow_remote, permission="give --metrics-allow-remote too"
        )


def monitoring_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds --metrics and --metrics-allow-remote; the command receives them as one argument, `monitoring`."""

    @functools.wraps(command)
    def call(*, metrics: str | None, metrics_allow_remote: bool, **arguments: Any) -> None:
        monitoring = Monitoring(metrics, metrics_allow_remote)
        monitoring.check()
        command(monitoring=monitoring, **arguments)

    address = "Serve /metrics (Prometheus) and /healthz at this address; :PORT is 127.0.0.1."
    remote = "Allow --metrics an address that other hosts reach: every process that reaches it can read."
    wrapped: Callable[..., None] = click.option("--metrics-allow-remote", is_flag=True, help=remote)(call)
    return click.option("--metrics", metavar="HOST:PORT", help=address)(wrapped)


class ServiceProcess(ClosesOnExit):
    """Reports a service to HTTP clients and to systemd while it runs.

    >>> with ServiceProcess("driver", "driver-01", Monitoring(), silent_ns=lambda: 0) as process:   # doctest: +SKIP
    ...     process.ready()
    ...     while not stop.wait(0.1):
    ...         process.beat()

    `silent_ns` is how long ago the duty cycle turned: one that stands still gets systemd no sign of life. `trouble`
    says what else is wrong, for /healthz. `collect` gives the service's own metrics, and is called from other threads.
    Raises ConfigError when the address cannot be bound.
    """

    def __init__(
        self,
        service: str,
        instance: str,
        monitoring: Monitoring,
        *,
        silent_ns: Callable[[], int],
        trouble: Callable[[], str | None] = lambda: None,
        collect: Callable[[], Iterable[Metric]] = tuple,
        aeron_dir: str | None = None,
    ) -> None:
        """`aeron_dir`: where the media driver of this process is, whose counters are metrics too."""
        self._silent_ns = silent_ns
        self._trouble = trouble
        self._has_stopped = False
        self._notifier = Notifier()
        self._stack = contextlib.ExitStack()
        self.address: str | None = None
        where = monitoring.check()
        if where is not None:
            self._serve(service, instance, where, collect, aeron_dir)

    def ready(self, status: str = "") -> None:
        self._notifier.ready(status)
        self.beat()

    def status(self, text: str) -> None:
        self._notifier.status(text)

    def beat(self) -> None:
        """For every turn of the command's main loop."""
        self._notifier.beat(is_alive=self._stillness() is None)

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """While the service reads its configuration again."""
        self._notifier.reloading()
        try:
            yield
        finally:
            self._notifier.ready()

    def stopping(self) -> None:
        """It was asked to end; `close` says so too."""
        if not self._has_stopped:
            self._has_stopped = True
            self._notifier.stopping()

    def close(self) -> None:
        self.stopping()
        self._stack.close()

    def _stillness(self) -> str | None:
        return standing_still(self._silent_ns())

    def _serve(
        self,
        service: str,
        instance: str,
        where: tuple[str, int],
        collect: Callable[[], Iterable[Metric]],
        aeron_dir: str | None,
    ) -> None:
        from tensorpool.telemetry.http import HttpServer
        from tensorpool.telemetry.metrics import AeronCounters, Endpoints, aeron_metrics

        counters = None if aeron_dir is None else AeronCounters(aeron_dir)
        if counters is not None:
            self._stack.callback(counters.close)

        def everything() -> Iterator[Metric]:
            yield from collect()
            if counters is not None:
                yield from aeron_metrics(counters.readings())

        endpoints = Endpoints(service, instance, lambda: self._stillness() or self._trouble(), everything)
        server = HttpServer(*where, endpoints.routes, key="--metrics")
        self._stack.callback(server.close)
        self.address = server.address
        if where[1] == 0:
            logs.say(f"metrics at http://{self.address}/metrics /healthz", err=True)


def missing_media_driver(aeron_dir: str) -> str | None:
    """What is wrong where no media driver is alive."""
    return None if aeron.is_driver_active(aeron_dir) else f"no media driver is alive at {aeron_dir}"
