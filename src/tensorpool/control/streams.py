# SPDX-License-Identifier: Apache-2.0
"""A service's subscription to commands and its publication of status, at one media driver.

Commands of the backlog are not for it: the one that ended its predecessor may be among them. Service Control §4, §5.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorpool import _core, aeron
from tensorpool.control.config import ControlConfig


class ServiceStreams:
    """Hands over the commands that pass the filter. Raises TransportError when an endpoint cannot be opened."""

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
        self._handler = self._on_message  # bound once: a poll that finds nothing allocates nothing
        self._opened: list[aeron.Publication | aeron.Subscription] = []
        self._backlog: aeron.Backlog | None = None
        self.from_before = 0
        try:
            self.status = self._kept(aeron.publish(client, config.status))
            if config.control.uri.is_ipc:
                shared = self._kept(client.add_publication(config.control_channel, config.control_stream_id))
                self._backlog = aeron.Backlog(now_ns, shared)
            self.commands = self._kept(aeron.subscribe(client, config.control))
        except BaseException:
            self.close()
            raise

    def poll(self, limit: int, now_ns: int) -> int:
        """Hand over commands; returns how many fragments were read for it."""
        fragments = self._filter.poll(self.commands, self._handler, limit)
        if self._backlog is not None:
            self._backlog.on_polled(fragments, now_ns)
        return fragments

    def close(self) -> None:
        """Close what was opened; the client may be another's."""
        for resource in self._opened:
            resource.close()
        self._opened.clear()

    def _kept[T: aeron.Publication | aeron.Subscription](self, resource: T) -> T:
        self._opened.append(resource)
        return resource

    def _on_message(self, data: bytes, info: aeron.MessageInfo) -> None:
        if self._backlog is not None and self._backlog.contains(info):
            self.from_before += 1
        else:
            self._on_command(data)
