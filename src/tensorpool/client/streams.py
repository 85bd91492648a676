# SPDX-License-Identifier: Apache-2.0
"""A client's publications and subscriptions at one media driver.

Every publication has an exclusive log: no other publisher can fill it, or die in the middle of a message in it. Every
subscription is untethered: Aeron skips a client that stops polling after 100 ms. The control stream's log is replaced
when a foreign subscriber that never polls holds it.
Wire §5, §15.11; decisions C7, E20, F4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tensorpool import aeron
from tensorpool.channel import MAX_MESSAGE_BYTES, Endpoint
from tensorpool.channel import max_message_bytes as channel_limit
from tensorpool.driver.config import DriverConfig

SMALL_TERM: Final = "64k"  # messages up to 8 KiB: requests, hello, QoS
BLOB_TERM: Final = "1m"  # messages up to 128 KiB: a chunk of a blob
_ADDRESS: Final = ("endpoint", "control", "control-mode", "interface", "session-id", "ttl", "mtu")

type Handler = Callable[[bytes, aeron.MessageInfo], object]


class ClientStreams:
    """Opens the control stream at once, the others when they are used first. Raises TransportError."""

    def __init__(self, client: aeron.Client, config: DriverConfig, aeron_dir: str) -> None:
        self._client = client
        self._config = config
        self._publications: dict[str, aeron.Publication] = {}
        self._subscriptions: dict[str, aeron.Subscription] = {}
        self._joined_ns: dict[int, int] = {}  # when each publisher of the control or announce stream came into sight
        control, announce = config.driver.control, config.driver.announce
        channel = str(control.uri.for_publication(SMALL_TERM))
        self.control = aeron.RenewedPublication(client, aeron_dir, channel, control.stream_id)
        self._received = [self.subscribe(control, self._on_image)]
        if announce != control:
            self._received.append(self.subscribe(announce, self._on_image))

    def joined_ns(self, info: aeron.MessageInfo) -> int:
        """The join time of the image that delivered a message (C7)."""
        return self._joined_ns.get(info.session_id, 0)

    def is_own(self, info: aeron.MessageInfo) -> bool:
        """Whether this client sent a message of the control stream."""
        return self.control.is_own(info)

    def is_own_qos(self, info: aeron.MessageInfo) -> bool:
        """Whether this client sent a message of the QoS stream."""
        qos = self._publications.get("qos")
        return qos is not None and info.session_id == qos.session_id

    def publish(self, endpoint: Endpoint, term: str | None = None) -> aeron.Publication:
        """A new exclusive publication; `term` is the size of its log over IPC."""
        return aeron.publish(self._client, endpoint, term)

    def publish_private(self, endpoint: Endpoint) -> aeron.Publication:
        """A new publication to a consumer's private stream: only its channel's address counts; the log is small."""
        channel = endpoint.uri.with_only(_ADDRESS).with_parameters({"term-length": SMALL_TERM})
        return self.publish(Endpoint(str(channel), endpoint.stream_id))

    def subscribe(
        self, endpoint: Endpoint, on_image: Callable[[aeron.ImageEvent], object] | None = None
    ) -> aeron.Subscription:
        """A new untethered subscription."""
        return aeron.subscribe(self._client, endpoint, on_image)

    def ring(self, bell: aeron.Bell) -> None:
        """Wake who naps there: a message was sent."""
        self._client.ring(bell)

    @property
    def qos(self) -> aeron.Publication:
        return self._publication("qos", self._config.driver.qos, SMALL_TERM)

    @property
    def metadata(self) -> aeron.Publication:
        return self._publication("metadata", self._config.driver.metadata, BLOB_TERM)

    @property
    def commands(self) -> aeron.Publication:
        """To the services."""
        return self._publication("commands", self._config.control.control, SMALL_TERM)

    def poll_control(self, handler: Handler, limit: int) -> int:
        return sum(subscription.poll(handler, limit) for subscription in self._received)

    def poll_qos(self, handler: Handler, limit: int) -> int:
        return self._subscription("qos", self._config.driver.qos).poll(handler, limit)

    def poll_metadata(self, handler: Handler, limit: int) -> int:
        return self._subscription("metadata", self._config.driver.metadata).poll(handler, limit)

    def has_news(self) -> bool:
        """Whether one of the streams would give something. Raises TransportError."""
        return any(subscription.has_news() for subscription in (*self._received, *self._subscriptions.values()))

    def _publication(self, name: str, endpoint: Endpoint, term: str) -> aeron.Publication:
        if name not in self._publications:
            self._publications[name] = self.publish(endpoint, term)
        return self._publications[name]

    def _subscription(self, name: str, endpoint: Endpoint) -> aeron.Subscription:
        if name not in self._subscriptions:
            self._subscriptions[name] = self.subscribe(endpoint)
        return self._subscriptions[name]

    def _on_image(self, event: aeron.ImageEvent) -> None:
        if event.available:
            self._joined_ns[event.session_id] = event.monotonic_ns
        else:
            self._joined_ns.pop(event.session_id, None)


def max_message_bytes(endpoint: Endpoint, term: str) -> int:
    """The longest message that `publish(endpoint, term)` takes; Aeron's limit where the media driver decides."""
    return channel_limit(str(endpoint.uri.for_publication(term))) or MAX_MESSAGE_BYTES
