# SPDX-License-Identifier: Apache-2.0
"""A client's side of the Aeron streams on one media driver: what is published and heard, and where.

Every publication has a log of its own, so that nobody who floods or dies in the middle of a message can hold us up, and
every subscription lets itself be passed over: whoever stops polling costs nobody else more than 100 ms. Of the control
stream's log not even a foreign subscriber that never polls can hold us up.
Wire §5, §15.11; decisions C7, E20, F4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tensorpool import aeron
from tensorpool.channel import MAX_MESSAGE_BYTES, Endpoint, check_channel
from tensorpool.channel import max_message_bytes as channel_limit
from tensorpool.driver.config import DriverConfig

SMALL_TERM: Final = "64k"  # messages up to 8 KiB: requests, hello, QoS
BLOB_TERM: Final = "1m"  # messages up to 128 KiB: a chunk of a blob
MAX_AERON_STREAM_ID: Final = 2**31 - 1  # the wire has 32 unsigned bits
WINDOW_LIMIT: Final = "100ms"
_ADDRESS: Final = frozenset({"endpoint", "control", "control-mode", "interface", "session-id", "ttl", "mtu"})

type Handler = Callable[[bytes, aeron.MessageInfo], object]


class Link:
    """The connection; closed as a whole when its media driver is gone."""

    def __init__(self, config: DriverConfig, aeron_dir: str, client_name: str) -> None:
        self._config = config
        self._client = aeron.connect(aeron_dir, client_name=client_name)
        self._publications: dict[str, aeron.Publication] = {}
        self._subscriptions: dict[str, aeron.Subscription] = {}
        self._joined_ns: dict[int, int] = {}  # when each publisher of the control or announce stream came into sight
        try:
            channel = self._channel(config.driver.control, SMALL_TERM)
            self.control = aeron.RenewedPublication(self._client, aeron_dir, channel, config.driver.control_stream_id)
            self._heard = [self.subscribe(config.driver.control, self._on_image)]
            if config.driver.announce != config.driver.control:
                self._heard.append(self.subscribe(config.driver.announce, self._on_image))
        except BaseException:
            self._client.close()
            raise

    @property
    def is_lost(self) -> bool:
        return self._client.is_closed

    def joined_ns(self, info: aeron.MessageInfo) -> int:
        """The join time of the image that delivered a message (C7)."""
        return self._joined_ns.get(info.session_id, 0)

    def is_own(self, info: aeron.MessageInfo) -> bool:
        """Whether a message of the control stream is one that we said."""
        return self.control.is_own(info)

    def is_own_qos(self, info: aeron.MessageInfo) -> bool:
        """Whether a message of the QoS stream is one that we said."""
        qos = self._publications.get("qos")
        return qos is not None and info.session_id == qos.session_id

    def publish(self, endpoint: Endpoint, term: str | None = None) -> aeron.Publication:
        """A new publication with a log of its own; `term` makes the log of an IPC channel smaller."""
        return self._client.add_publication(self._channel(endpoint, term), endpoint.stream_id, exclusive=True)

    def publish_private(self, endpoint: Endpoint) -> aeron.Publication:
        """A new publication for a consumer's own stream: of its channel only the address counts; the log is small."""
        uri = check_channel("channel", endpoint.channel)
        kept = {name: value for name, value in uri.parameters.items() if name in _ADDRESS} | {"term-length": SMALL_TERM}
        channel = _with(endpoint.channel, {}, kept)
        return self.publish(Endpoint(channel, endpoint.stream_id))

    def subscribe(
        self, endpoint: Endpoint, on_image: Callable[[aeron.ImageEvent], object] | None = None
    ) -> aeron.Subscription:
        """A new subscription that lets itself be passed over."""
        channel = endpoint.channel
        uri = check_channel("channel", channel)
        channel = _with(channel, uri.parameters, {"tether": "false"})
        return self._client.add_subscription(channel, endpoint.stream_id, on_image)

    @property
    def qos(self) -> aeron.Publication:
        return self._publication("qos", self._config.driver.qos, SMALL_TERM)

    @property
    def metadata(self) -> aeron.Publication:
        return self._publication("metadata", self._config.driver.metadata, BLOB_TERM)

    def poll_control(self, handler: Handler, limit: int) -> int:
        return sum(subscription.poll(handler, limit) for subscription in self._heard)

    def poll_qos(self, handler: Handler, limit: int) -> int:
        return self._subscription("qos", self._config.driver.qos).poll(handler, limit)

    def poll_metadata(self, handler: Handler, limit: int) -> int:
        return self._subscription("metadata", self._config.driver.metadata).poll(handler, limit)

    def close(self) -> None:
        self._client.close()

    @staticmethod
    def _channel(endpoint: Endpoint, term: str | None) -> str:
        uri = check_channel("channel", endpoint.channel)
        if uri.media != "ipc":
            return endpoint.channel
        changes = {"untethered-window-limit-timeout": WINDOW_LIMIT} | ({"term-length": term} if term else {})
        return _with(endpoint.channel, uri.parameters, changes)

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
    """The longest message that `Link.publish(endpoint, term)` takes; Aeron's limit where the media driver decides."""
    is_ipc = check_channel("channel", endpoint.channel).media == "ipc"
    return channel_limit(f"aeron:ipc?term-length={term}" if is_ipc else endpoint.channel) or MAX_MESSAGE_BYTES


def _with(channel: str, parameters: object, changes: dict[str, str]) -> str:
    """The channel with parameters added; those that it sets itself stay, but for the size of the log."""
    assert isinstance(parameters, dict)
    kept = {name: value for name, value in changes.items() if name not in parameters or name == "term-length"}
    merged = parameters | kept
    base = channel.partition("?")[0]
    return base + "?" + "|".join(f"{name}={value}" for name, value in merged.items())
