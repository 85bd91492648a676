# SPDX-License-Identifier: Apache-2.0
"""Listens for other drivers on the control stream, and answers those that start after us.

This module ignores what they sent before we subscribed; `Authority` judges the rest.
Driver Model §2.1; decisions E31, K6.
"""

from __future__ import annotations

import struct
from typing import Final

from tensorpool.clock import Clock
from tensorpool.driver.authority import probe_answer
from tensorpool.driver.config import DriverConfig
from tensorpool.driver.effects import Effect, Send
from tensorpool.driver.lifecycle import Lifecycle
from tensorpool.errors import ConfigError
from tensorpool.logs import Logger
from tensorpool.shm.announced import is_fresh
from tensorpool.wire.attach import AttachResponse, Dialect
from tensorpool.wire.control import ShmPoolAnnounce

LISTEN_NS: Final = 60_000_000  # a driver answers a probe in a few ms; one that is later still ends us

_ATTACH_IDS: Final = struct.Struct("<8xqII")  # correlation_id, stream_id and client_id of an attach request


class OtherDrivers:
    """Reads the messages of other drivers for the conductor."""

    def __init__(self, config: DriverConfig, clock: Clock, lifecycle: Lifecycle, log: Logger) -> None:
        self._config = config
        self._clock = clock
        self._lifecycle = lifecycle
        self._authority = lifecycle.authority
        self._log = log
        self._joined_ns = 0

    @property
    def failure(self) -> ConfigError | None:
        """Why we must end: another driver was here before us."""
        if not self._authority.earlier_driver:
            return None
        endpoint, claim = self._config.driver, self._authority.earlier_driver
        accepted = (
            f"a control stream of its own; on {endpoint.control_channel} another driver {claim}; "
            "stop it, or give one of the two another driver.control_stream_id"
        )
        return ConfigError("driver.control_stream_id", endpoint.control_stream_id, accepted)

    def on_start(self) -> list[Effect]:
        """Send the probes; what comes within LISTEN_NS decides whether we serve."""
        self._joined_ns = self._clock.monotonic_ns()
        return [Send(probe) for probe in self._authority.on_start(self._joined_ns)]

    def probe_answer(self, data: bytes) -> Send | None:
        """The answer to an attach request that is the probe of a driver that starts after us; None for any other.

        Such a request cannot lie in the backlog.
        """
        if len(data) < _ATTACH_IDS.size:
            return None
        correlation_id, stream_id, client_id = _ATTACH_IDS.unpack_from(data)
        is_probe = self._authority.is_later_probe(correlation_id, stream_id, client_id)
        return Send(probe_answer(correlation_id, Dialect.of_request(data))) if is_probe else None

    def on_attach_response(self, response: AttachResponse, *, is_before: bool) -> list[Effect]:
        """Another driver answered; `is_before`: before we subscribed, which it cannot have done to our probe."""
        if is_before and not self._authority.is_probe_answer(response):
            return []
        now_ns = self._clock.monotonic_ns()
        return self._on_claimed(self._authority.on_response(response, now_ns), now_ns)

    def on_announce(self, announce: ShmPoolAnnounce, *, is_before: bool) -> list[Effect]:
        """Another driver announced a stream; `is_before`: before we subscribed."""
        now_ns = self._clock.monotonic_ns()
        wall_ns, period_ns = self._clock.realtime_ns(), self._config.announce_period_ns
        if is_before or not is_fresh(announce, self._joined_ns, now_ns, wall_ns, period_ns):
            return []
        return self._on_claimed(self._authority.on_announce(announce, now_ns), now_ns)

    def _on_claimed(self, stream_id: int | None, now_ns: int) -> list[Effect]:
        authority = self._authority
        if stream_id is None or self._lifecycle.streams.get(stream_id) is None:
            return []
        authority.on_own_stream_claimed(stream_id, now_ns)
        if not authority.earlier_driver:
            self._log.error("other_driver_found", stream_id=stream_id, seen=authority.claim_on(stream_id, now_ns))
        return self._lifecycle.on_claim(stream_id, now_ns)

    def expire(self, now_ns: int) -> None:
        """Claims that have ended."""
        for stream_id in self._authority.expire(now_ns):
            self._log.info("other_driver_silent", stream_id=stream_id)
