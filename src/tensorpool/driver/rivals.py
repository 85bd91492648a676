# SPDX-License-Identifier: Apache-2.0
"""Listens for other drivers on the control stream, and answers those that start after us.

This module separates their messages from those of clients and from those that lay in the logs before us; `Authority`
judges them.
Driver Model §2.1; decisions E31, K6.
"""

from __future__ import annotations

import struct
from typing import Final

from tensorpool.clock import Clock
from tensorpool.driver.authority import probe_answer
from tensorpool.driver.config import DriverConfig
from tensorpool.driver.lifecycle import Effect, Lifecycle, Send
from tensorpool.errors import ConfigError, DecodeError
from tensorpool.logs import Logger
from tensorpool.wire import control, decode, driver, peek_header
from tensorpool.wire.control import ClockDomain, ShmPoolAnnounce
from tensorpool.wire.driver import ShmAttachRequest, ShmAttachResponse

LISTEN_NS: Final = 60_000_000  # a driver answers a probe in a few ms; one that is later still ends us
FRESH_PERIODS: Final = 3

_ATTACH_REQUEST: Final = driver.schema.id, ShmAttachRequest.TEMPLATE_ID
_ATTACH_RESPONSE: Final = driver.schema.id, ShmAttachResponse.TEMPLATE_ID
_ANNOUNCE: Final = control.schema.id, ShmPoolAnnounce.TEMPLATE_ID
_ATTACH_IDS: Final = struct.Struct("<8xqII")  # correlation_id, stream_id and client_id of an attach request


class Rivals:
    """What the conductor asks about other drivers."""

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
        if not self._authority.rival:
            return None
        endpoint = self._config.driver
        accepted = (
            f"a control stream of its own; on {endpoint.control_channel} another driver {self._authority.rival}; stop "
            "it, or give one of the two another driver.control_stream_id"
        )
        return ConfigError("driver.control_stream_id", endpoint.control_stream_id, accepted)

    def on_start(self) -> list[Effect]:
        """Send the probe; what comes within LISTEN_NS decides whether we serve."""
        self._joined_ns = self._clock.monotonic_ns()
        return [Send(self._authority.on_start(self._joined_ns))]

    def take(self, data: bytes, *, is_before: bool) -> list[Effect] | None:
        """What follows from a message of another driver; None where it is none.

        `is_before`: it lay in its log before we listened. Answers to our probe and the probes of later drivers cannot.
        """
        authority, now_ns = self._authority, self._clock.monotonic_ns()
        if len(data) < _ATTACH_IDS.size:
            return None
        header = peek_header(data)
        kind = header.schema_id, header.template_id
        if kind == _ATTACH_REQUEST:
            correlation_id, stream_id, client_id = _ATTACH_IDS.unpack_from(data)
            is_probe = authority.is_later_probe(correlation_id, stream_id, client_id)
            return [Send(probe_answer(correlation_id))] if is_probe else None
        if kind not in (_ATTACH_RESPONSE, _ANNOUNCE):
            return None
        try:
            message = decode(data)
        except DecodeError:
            self._lifecycle.counts["malformed_messages"] += 1
            return []
        claimed: int | None = None
        match message:
            case ShmAttachResponse() if authority.is_probe_answer(message) or not is_before:
                claimed = authority.on_response(message, now_ns)
            case ShmPoolAnnounce() if not is_before and self._is_fresh(message, now_ns):
                claimed = authority.on_announce(message, now_ns)
        if claimed is None or self._lifecycle.streams.get(claimed) is None:
            return []
        authority.on_own_stream_claimed(claimed, now_ns)
        if not authority.rival:
            self._log.error("other_driver_found", stream_id=claimed, seen=authority.claim_on(claimed, now_ns))
        return self._lifecycle.on_claim(claimed, now_ns)

    def expire(self, now_ns: int) -> None:
        """Claims that have ended."""
        for stream_id in self._authority.expire(now_ns):
            self._log.info("other_driver_silent", stream_id=stream_id)

    def _is_fresh(self, announce: ShmPoolAnnounce, now_ns: int) -> bool:
        """Whether it was made lately, and since we are here."""
        is_monotonic = announce.announce_clock_domain is ClockDomain.MONOTONIC
        age_ns = (now_ns if is_monotonic else self._clock.realtime_ns()) - announce.announce_timestamp_ns
        window_ns = FRESH_PERIODS * self._config.announce_period_ns
        return -window_ns <= age_ns <= min(window_ns, now_ns - self._joined_ns)
