# SPDX-License-Identifier: Apache-2.0
"""An agent with an Aeron connection of its own, for services whose process has none to share."""

from __future__ import annotations

from typing import Final

from tensorpool import aeron
from tensorpool.clock import Clock, SystemClock
from tensorpool.control.service import Service
from tensorpool.errors import TransportError
from tensorpool.logs import get_logger


class ServiceAgent:
    """Runs a service, and waits for a media driver where none is alive.

    >>> with aeron.AgentRunner(ServiceAgent(service, "/dev/shm/aeron-me")):     # doctest: +SKIP
    ...     ...
    """

    def __init__(self, service: Service, aeron_dir: str, *, clock: Clock | None = None) -> None:
        self.role_name: Final = f"tensorpool-{service.tag}"
        self._service = service
        self._clock = clock or SystemClock()
        self._connection = aeron.MediaDriverConnection(
            aeron_dir, self.role_name, self._bind, get_logger("control", tag=service.tag), close_streams=Service.unbind
        )

    def on_start(self) -> None:
        self._maintain()

    def do_work(self) -> int:
        self._maintain()
        return self._service.invoke()

    def on_close(self) -> None:
        self._connection.close()

    def _maintain(self) -> None:
        now_ns = self._clock.monotonic_ns()
        try:
            self._connection.maintain(now_ns)
        except TransportError as error:
            self._connection.lose(error, now_ns)

    def _bind(self, client: aeron.Client, now_ns: int) -> Service:
        self._service.bind(client, patiently=True)
        return self._service


class AgentWithService:
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
