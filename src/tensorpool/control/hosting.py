# SPDX-License-Identifier: Apache-2.0
"""Services whose host has no Aeron connection to share: they have their own, made again with every media driver."""

from __future__ import annotations

from typing import Final

from tensorpool import aeron
from tensorpool.clock import Clock, SystemClock
from tensorpool.control.service import Service
from tensorpool.errors import Closed, TransportError
from tensorpool.logs import get_logger

CONNECT_EVERY_NS: Final = 500_000_000


class ServiceAgent:
    """An agent that turns a service with a connection of its own. A media driver that is away is waited for.

    >>> with aeron.AgentRunner(ServiceAgent(service, "/dev/shm/aeron-me")):     # doctest: +SKIP
    ...     ...
    """

    def __init__(self, service: Service, aeron_dir: str, *, clock: Clock | None = None) -> None:
        self.role_name: Final = f"tensorpool-{service.tag}"
        self._service = service
        self._aeron_dir = aeron_dir
        self._clock = clock or SystemClock()
        self._client: aeron.Client | None = None
        self._media_driver = aeron.DriverSight(aeron_dir)
        self._look_ns = 0
        self._log = get_logger("control", tag=service.tag)

    def on_start(self) -> None:
        self._look(self._clock.monotonic_ns())

    def do_work(self) -> int:
        now_ns = self._clock.monotonic_ns()
        if now_ns >= self._look_ns:
            self._look(now_ns)
        return self._service.invoke()

    def on_close(self) -> None:
        self._service.unbind()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _look(self, now_ns: int) -> None:
        self._look_ns = now_ns + CONNECT_EVERY_NS
        if self._client is not None:
            if not self._client.is_closed and not self._media_driver.is_dead():
                return
            self._log.warning("media_driver_lost", aeron_dir=self._aeron_dir)
            self.on_close()
            self._media_driver.forget()
        if self._media_driver.is_dead() or not aeron.is_driver_active(self._aeron_dir):
            return
        try:
            self._client = aeron.connect(self._aeron_dir, client_name=self.role_name)
            self._media_driver.adopt()
            self._service.bind(self._client, patiently=True)
        except (TransportError, Closed):  # it went again while we came
            self.on_close()


class Hosted:
    """An agent with a service beside it, on one thread."""

    def __init__(self, agent: aeron.Agent, service: ServiceAgent) -> None:
        self.role_name: Final = agent.role_name
        self._agent = agent
        self._service = service

    def on_start(self) -> None:
        self._agent.on_start()
        self._service.on_start()

    def do_work(self) -> int:
        return self._agent.do_work() + self._service.do_work()

    def on_close(self) -> None:
        self._service.on_close()
        self._agent.on_close()
