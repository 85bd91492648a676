# SPDX-License-Identifier: Apache-2.0
"""A registry as one object: a provider for many drivers on a thread, with a media driver where none is running yet.

Discovery §2.2, §8; Service Control §4.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from tensorpool import aeron
from tensorpool.clock import Clock, SystemClock
from tensorpool.control import Hosted, Service, ServiceAgent, host_standard
from tensorpool.discovery.config import RegistryConfig
from tensorpool.discovery.directory import DriverIdentity
from tensorpool.discovery.provider import Provider, Source, ThriftyIdle
from tensorpool.logs import get_logger


class Registry:
    """A running registry inside this process.

    >>> with Registry(RegistryConfig.load("registry.toml")) as registry:      # doctest: +SKIP
    ...     print(registry.provider.size)

    Uses the media driver at `aeron_dir` if one is alive there and embeds one otherwise. Raises `TransportError` when
    Aeron cannot start or an endpoint cannot be listened at.
    """

    def __init__(self, config: RegistryConfig, *, aeron_dir: str | None = None, clock: Clock | None = None) -> None:
        self.config = config
        section = config.discovery
        self.aeron_dir = aeron_dir or section.aeron_dir or aeron.default_aeron_dir()
        self._media_driver = aeron.embed(self.aeron_dir)
        sources = [
            Source(
                DriverIdentity(driver.instance_id, driver.control, driver.expiry_ns), driver.announce, driver.metadata
            )
            for driver in section.drivers
        ]
        try:
            self.provider = Provider(section, sources, self.aeron_dir, clock or SystemClock())
            self._runner = aeron.AgentRunner(self._agent(), ThriftyIdle(share=0.9), on_error=log_failed_turn).start()
        except BaseException:
            self._close_media_driver()
            raise

    @property
    def is_running(self) -> bool:
        return self._runner.is_running

    def close(self) -> None:
        """Stop answering."""
        try:
            self._runner.close()
        finally:
            self._close_media_driver()

    def _agent(self) -> aeron.Agent:
        """The provider, and beside it the service that can be commanded."""
        if not self.config.control.enabled:
            return self.provider
        service = Service("discovery", self.config.discovery.instance_id or None, config=self.config.control)
        host_standard(service, status=self._status, drain=_end)
        return Hosted(self.provider, ServiceAgent(service, self.aeron_dir))

    def _status(self) -> dict[str, object]:
        drivers = len(self.config.discovery.drivers)
        return {"drivers": drivers, "streams": self.provider.size, "counts": dict(self.provider.counts)}

    def _close_media_driver(self) -> None:
        if self._media_driver is not None:
            self._media_driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _end() -> None:
    raise aeron.AgentTerminated


def log_failed_turn(error: Exception) -> None:
    """One turn failed; the provider goes on, for the sake of everybody else who asks."""
    get_logger("discovery").error("turn_failed", exc_info=error)
