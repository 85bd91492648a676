# SPDX-License-Identifier: Apache-2.0
"""A client declares its process to the driver: once before it asks for leases, and once more a moment later.

The driver's service may not know the first one: it takes commands only from a moment after its start on. Nothing
depends on it: a driver without the command, or without a service, grants leases all the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

from tensorpool import aeron
from tensorpool.client.streams import ClientStreams
from tensorpool.clock import Clock
from tensorpool.control import identification
from tensorpool.control.events import make_event
from tensorpool.control.identification import Declaration, driver_tag
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import Closed, TransportError
from tensorpool.process_description import ProcessDescription
from tensorpool.process_identity import ProcessIdentity
from tensorpool.wire import event

APART_NS: Final = 500_000_000  # between two declarations of one session
AGAIN_NS: Final = 2_000_000_000  # after the last request


class ProcessDeclaration:
    """What this process declares, and when; turned by the client's conductor."""

    def __init__(self, config: DriverConfig, clock: Clock, new_correlation_id: Callable[[], int]) -> None:
        self._config = config
        self._clock = clock
        self._new_correlation_id = new_correlation_id
        self._session_id: int | None = None
        self._sent_ns = 0
        self._again_ns: int | None = None

    def on_request(self, streams: ClientStreams, now_ns: int) -> None:
        """A request for a lease is about to be sent."""
        self._again_ns = now_ns + AGAIN_NS
        session_id = streams.control.publication.session_id
        if session_id != self._session_id or now_ns - self._sent_ns >= APART_NS:
            self._send(streams, session_id, now_ns)

    def do_work(self, streams: ClientStreams | None, now_ns: int) -> int:
        if streams is None or self._again_ns is None or now_ns < self._again_ns:
            return 0
        self._again_ns = None
        self._send(streams, streams.control.publication.session_id, now_ns)
        return 1

    def _send(self, streams: ClientStreams, session_id: int, now_ns: int) -> None:
        process = ProcessIdentity.own()
        if process is None or not self._config.control.enabled:
            return
        message = make_event(
            driver_tag(self._config.driver.control),
            identification.KEY,
            Declaration(session_id=session_id, process=process, description=ProcessDescription.own()),
            correlation_id=self._new_correlation_id(),
            timestamp_ns=self._clock.realtime_ns(),
        )
        result = aeron.OfferResult.NOT_CONNECTED
        with contextlib.suppress(TransportError, Closed):  # the conductor notices where the media driver is gone
            result = streams.commands.offer(event.schema.with_id(self._config.control.schema_id).encode(message))
        if result:
            self._session_id, self._sent_ns = session_id, now_ns
