# SPDX-License-Identifier: Apache-2.0
"""The driver's publications and subscriptions at one media driver.

Driver Model §4.4a, §4.5; decisions E32, E39.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tensorpool import aeron
from tensorpool.channel import Endpoint
from tensorpool.driver.config import DriverConfig


class DriverStreams:
    """What the driver sends and receives by. Raises TransportError."""

    def __init__(self, client: aeron.Client, config: DriverConfig, aeron_dir: str, now_ns: int) -> None:
        control, announce = config.driver.control, config.driver.announce
        self._shared = client.add_publication(control.channel, control.stream_id)
        self.backlog: Final = aeron.Backlog(now_ns, self._shared)
        self.requests: Final = client.add_subscription(control.channel, control.stream_id)
        # Exclusive logs: clients that fill the one that they share cannot keep us from answering.
        self.answers: Final = _publish(client, aeron_dir, control)
        self.announces = self.answers
        self._announced: aeron.Subscription | None = None
        if announce != control:
            self.announces = _publish(client, aeron_dir, announce)
            self._announced = client.add_subscription(announce.channel, announce.stream_id)

    def poll(self, handler: Callable[[bytes, aeron.MessageInfo], object], limit: int) -> int:
        if self._announced is not None:  # where another driver would announce too
            self._announced.poll(handler, limit)
        return self.requests.poll(handler, limit)

    def is_own(self, info: aeron.MessageInfo) -> bool:
        return self.answers.is_own(info) or self.announces.is_own(info)

    @property
    def holders(self) -> tuple[aeron.Holder, ...]:
        """Subscribers that do not poll, and would stop us if we did not open new sessions."""
        if self.announces is self.answers:
            return self.answers.holders
        return self.answers.holders + self.announces.holders

    @property
    def renewals(self) -> int:
        return sum(outlet.renewals for outlet in {self.answers, self.announces})

    def refresh_holders(self) -> None:
        for outlet in {self.answers, self.announces}:
            outlet.refresh_holders()


def _publish(client: aeron.Client, aeron_dir: str, endpoint: Endpoint) -> aeron.RenewedPublication:
    return aeron.RenewedPublication(client, aeron_dir, str(endpoint.uri.for_publication()), endpoint.stream_id)
