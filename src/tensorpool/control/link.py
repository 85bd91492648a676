# SPDX-License-Identifier: Apache-2.0
"""A service's side of the two streams on one media driver.

Commands that were in their log before the service was are not for it: a new subscriber on IPC begins where the slowest
one is, and may find the very command that ended its predecessor. Service Control §4, §5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tensorpool import _core, aeron
from tensorpool.channel import Endpoint, check_channel
from tensorpool.control.config import ControlConfig

CATCH_UP_AT_LEAST_NS: Final = 50_000_000
CATCH_UP_AT_MOST_NS: Final = 1_000_000_000
WINDOW_LIMIT: Final = "100ms"  # how long a watcher that sleeps may hold up a service


class ServiceLink:
    """Hears the control stream through a filter, and publishes on the status stream from a log of its own.

    Raises TransportError when an endpoint cannot be opened.
    """

    def __init__(
        self,
        client: aeron.Client,
        config: ControlConfig,
        filter: _core.EventFilter,
        on_command: Callable[[bytes], object],
        now_ns: int,
    ) -> None:
        self._filter = filter
        self._on_command = on_command
        self._made_ns = now_ns
        self._is_catching_up = self._is_ipc = check_channel("channel", config.control_channel).media == "ipc"
        self._handler = self._on_message  # bound once: a poll that hears nothing allocates nothing
        self._opened: list[aeron.Publication | aeron.Subscription] = []
        self.from_before = 0
        try:
            self.status = client.add_publication(
                with_parameters(config.status_channel, {"untethered-window-limit-timeout": WINDOW_LIMIT}),
                config.status_stream_id,
                exclusive=True,
            )
            self._opened.append(self.status)
            self._shared: aeron.Publication | None = None
            self._joined_at = 0
            if self._is_ipc:
                self._shared = client.add_publication(config.control_channel, config.control_stream_id)
                self._opened.append(self._shared)
                self._joined_at = self._shared.position
            self.commands = subscribe(client, config.control)
            self._opened.append(self.commands)
        except BaseException:
            self.close()
            raise

    def poll(self, limit: int, allowance: int, now_ns: int) -> int:
        """Hand over commands, at most `allowance`; returns how many fragments were read for it."""
        fragments = self._filter.poll(self.commands, self._handler, limit, allowance)
        if self._is_catching_up:
            age_ns = now_ns - self._made_ns
            if (fragments == 0 and age_ns > CATCH_UP_AT_LEAST_NS) or age_ns > CATCH_UP_AT_MOST_NS:
                self._is_catching_up = False
        return fragments

    def close(self) -> None:
        for resource in self._opened:
            resource.close()
        self._opened.clear()

    def _on_message(self, data: bytes, info: aeron.MessageInfo) -> None:
        if self._is_from_before(info):
            self.from_before += 1
        else:
            self._on_command(data)

    def _is_from_before(self, info: aeron.MessageInfo) -> bool:
        """Of the log that publishers share we know where it stood; others count once all were read to the end."""
        if self._shared is not None and info.session_id == self._shared.session_id:
            return info.position <= self._joined_at
        return self._is_catching_up


def subscribe(client: aeron.Client, endpoint: Endpoint) -> aeron.Subscription:
    """A subscription that lets itself be passed over: whoever publishes never waits for it."""
    return client.add_subscription(with_parameters(endpoint.channel, {"tether": "false"}), endpoint.stream_id)


def with_parameters(channel: str, parameters: dict[str, str]) -> str:
    """An IPC channel with parameters that it does not set itself; others as they are."""
    uri = check_channel("channel", channel)
    added = [f"{name}={value}" for name, value in parameters.items() if name not in uri.parameters]
    if uri.media != "ipc" or not added:
        return channel
    return channel + ("|" if "?" in channel else "?") + "|".join(added)
