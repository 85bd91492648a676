# SPDX-License-Identifier: Apache-2.0
"""Descriptor and progress streams of a consumer's own, as a producer opens them: where they may lead, and how many.

A hello may come from any process, so it decides little: the media are those of the deployment, the logs are small, and
number and time are limited. What is declined is counted.
Wire §5, §10.1.3; decisions E22-E27.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from tensorpool import aeron
from tensorpool.channel import Endpoint, check_channel, may_be_private
from tensorpool.client.link import MAX_AERON_STREAM_ID, Link
from tensorpool.clock import Clock
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import ConfigError, TransportError
from tensorpool.logs import Logger

MAX_PRIVATE_STREAMS: Final = 64
OPENING_NS: Final = 250_000_000  # spent on opening private streams in an announce period; then they are declined
LOG_EVERY_NS: Final = 1_000_000_000
NO_STREAM: Final = Endpoint("", 0)


class PrivateStream:
    """A consumer's own descriptor or progress stream, with the rate that it asked for."""

    __slots__ = ("_due_ns", "_interval_ns", "endpoint", "publication", "unconnected_since_ns")

    def __init__(self, endpoint: Endpoint, publication: aeron.Publication, max_rate_hz: int) -> None:
        self.endpoint: Final = endpoint
        self.publication: Final = publication
        self._interval_ns = 1_000_000_000 // max_rate_hz if max_rate_hz else 0
        self._due_ns = 0
        self.unconnected_since_ns: int | None = None

    def set_rate(self, max_rate_hz: int) -> None:
        self._interval_ns = 1_000_000_000 // max_rate_hz if max_rate_hz else 0

    def is_due(self, now_ns: int) -> bool:
        """Whether the cap leaves room for this frame."""
        if now_ns < self._due_ns:
            return False
        is_steady = now_ns - self._due_ns < self._interval_ns
        self._due_ns = (self._due_ns if is_steady else now_ns) + self._interval_ns
        return True


class PrivateStreamOpener:
    """Opens the private streams of one producer."""

    def __init__(self, config: DriverConfig, clock: Clock, log: Logger, counts: Counter[str]) -> None:
        self._config = config
        self._clock = clock
        self._log = log
        self._counts = counts
        self._opening_ns = 0  # spent since `_opening_since_ns`
        self._opening_since_ns = 0
        self._log_ns = 0

    def open(
        self,
        link: Link | None,
        endpoint: Endpoint,
        current: PrivateStream | None,
        rate_hz: int,
        find_others: Callable[[], Sequence[PrivateStream]],
    ) -> PrivateStream | None:
        """A publication for it, the current one if that leads there; None: nothing was asked for, or it is declined.

        `find_others` finds the open streams of all other consumers, and of this consumer's other kind.
        """
        if current is not None and current.endpoint == endpoint and not current.publication.is_closed:
            current.set_rate(rate_hz)
            return current
        if current is not None:
            current.publication.close()
        if endpoint == NO_STREAM:
            return None
        started_ns = self._clock.monotonic_ns()
        reason = self._reason_to_decline(endpoint, find_others(), started_ns)
        if reason is None and link is not None:
            try:
                return PrivateStream(endpoint, link.publish_private(endpoint), rate_hz)
            except (ConfigError, TransportError) as error:
                reason = str(error)
            finally:
                self._opening_ns += self._clock.monotonic_ns() - started_ns
        self._counts["private_streams_declined"] += 1
        if started_ns >= self._log_ns:
            self._log_ns = started_ns + LOG_EVERY_NS
            self._log.warning("private_stream_declined", channel=endpoint.channel[:200], error=reason)
        return None

    def _reason_to_decline(self, endpoint: Endpoint, others: Sequence[PrivateStream], now_ns: int) -> str | None:
        if not endpoint.channel or not 0 < endpoint.stream_id <= MAX_AERON_STREAM_ID:
            return f"stream id {endpoint.stream_id}: expected a channel with an id from 1 to {MAX_AERON_STREAM_ID}"
        if not may_be_private(endpoint.channel, self._config.driver.descriptor.channel):
            return "expected an Aeron channel over IPC, or over the media of driver.descriptor_channel"
        if self._is_taken(endpoint, others):
            return f"stream id {endpoint.stream_id} is in use there"
        if len(others) >= MAX_PRIVATE_STREAMS:
            return f"{len(others)} private streams are open"
        if not self._has_time(now_ns):
            return "opening private streams took too long; the consumer may ask again"
        return None

    def _has_time(self, now_ns: int) -> bool:
        """Whether there is time to open another private stream: some ms, or as long as a name server takes."""
        if now_ns - self._opening_since_ns >= max(self._config.announce_period_ns, 10 * self._opening_ns):
            self._opening_ns, self._opening_since_ns = 0, now_ns
        return self._opening_ns < OPENING_NS

    def _is_taken(self, endpoint: Endpoint, others: Sequence[PrivateStream]) -> bool:
        """§5: a stream that others use is not given away."""
        shared = self._config.driver
        taken = {shared.control, shared.announce, shared.descriptor, shared.qos, shared.metadata}
        taken |= {stream.endpoint for stream in others}
        return _place(endpoint) in {_place(it) for it in taken}


def _place(endpoint: Endpoint) -> tuple[tuple[str | None, ...], int]:
    return check_channel("channel", endpoint.channel).address, endpoint.stream_id
