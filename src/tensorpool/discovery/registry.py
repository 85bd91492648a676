# SPDX-License-Identifier: Apache-2.0
"""A registry as one object: a provider for many drivers on a thread, with a media driver where none is running yet.

Discovery §2.2, §8; Service Control §4.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from tensorpool import aeron, settings
from tensorpool.clock import Clock, SystemClock
from tensorpool.closing import ClosesOnExit
from tensorpool.control import AgentWithService, Service, ServiceAgent, add_common_commands
from tensorpool.discovery.config import RegistryConfig
from tensorpool.discovery.directory import DriverIdentity
from tensorpool.discovery.provider import Provider, Source, ThriftyIdle
from tensorpool.errors import TensorPoolError
from tensorpool.logs import get_logger
from tensorpool.settings import ReloadRefused

CHANGEABLE: Final = re.compile(r"discovery\.drivers\[.+")  # the rest needs a restart


class Registry(ClosesOnExit):
    """A running registry inside this process.

    >>> with Registry(RegistryConfig.load("registry.toml")) as registry:      # doctest: +SKIP
    ...     print(registry.provider.size)

    Uses the media driver at `aeron_dir` if one is alive there and embeds one otherwise. Raises `TransportError` when
    Aeron cannot start or an endpoint cannot be subscribed to. `load` returns the configuration as it is now, for
    `reload`.
    """

    def __init__(
        self,
        config: RegistryConfig,
        *,
        aeron_dir: str | None = None,
        clock: Clock | None = None,
        load: Callable[[], RegistryConfig] | None = None,
    ) -> None:
        self.config = config
        self._load = load
        section = config.discovery
        self.aeron_dir = aeron_dir or section.aeron_dir or aeron.default_aeron_dir()
        self._media_driver = aeron.embed(self.aeron_dir)
        try:
            self.provider = Provider(section, _sources(config), self.aeron_dir, clock or SystemClock())
            self._runner = aeron.AgentRunner(self._agent(), ThriftyIdle(share=0.9), on_error=log_failed_turn).start()
        except BaseException:
            self._close_media_driver()
            raise

    @property
    def is_running(self) -> bool:
        return self._runner.is_running

    @property
    def silent_ns(self) -> int:
        """How long ago its duty cycle turned."""
        return self._runner.silent_ns

    @property
    def embeds_media_driver(self) -> bool:
        return self._media_driver is not None

    def reload(self) -> tuple[str, ...]:
        """Read the configuration again and follow the drivers that it names now; all or nothing.

        Returns how it differs, key by key, or raises ReloadRefused with every reason.
        """
        log = get_logger("discovery")
        try:
            if self._load is None:
                raise ReloadRefused("this registry was started by a program, and has no file to read again")
            config = self._load()
            lines = settings.differences(self.config, config)
            if refused := settings.fixed(lines, CHANGEABLE):
                raise ReloadRefused("; ".join(refused))
        except TensorPoolError as error:
            log.warning("reload_refused", error=str(error))
            raise error if isinstance(error, ReloadRefused) else ReloadRefused(str(error)) from None
        self.config = config
        self.provider.reload(_sources(config))
        log.info("reloaded", changes=list(lines.values()))
        return tuple(lines.values())

    def close(self) -> None:
        """Stop answering."""
        try:
            self._runner.close()
        finally:
            self._close_media_driver()

    def _agent(self) -> aeron.Agent:
        """The provider, and beside it the service that receives commands."""
        if not self.config.control.enabled:
            return self.provider
        service = Service("discovery", self.config.discovery.instance_id or None, config=self.config.control)
        add_common_commands(service, status=self._status, drain=_end, reload=self.reload)
        return AgentWithService(self.provider, ServiceAgent(service, self.aeron_dir))

    def _status(self) -> dict[str, object]:
        drivers = len(self.config.discovery.drivers)
        return {"drivers": drivers, "streams": self.provider.size, "counts": dict(self.provider.counts)}

    def _close_media_driver(self) -> None:
        if self._media_driver is not None:
            self._media_driver.close()


def _sources(config: RegistryConfig) -> list[Source]:
    return [
        Source(DriverIdentity(driver.instance_id, driver.control, driver.expiry_ns), driver.announce, driver.metadata)
        for driver in config.discovery.drivers
    ]


def _end() -> None:
    raise aeron.AgentTerminated


def log_failed_turn(error: Exception) -> None:
    """One turn failed; the provider goes on, since other clients may be served."""
    get_logger("discovery").error("turn_failed", exc_info=error)
