# SPDX-License-Identifier: Apache-2.0
"""A connection to a media driver that is opened again whenever the media driver was gone.

    LOST ──the pause is over, a media driver is alive──► OPEN ──it is gone, a call failed, events were missed──► LOST

The pause grows while a connection cannot be opened or does not last. The log says once that the media driver was lost
and once that it was found again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from tensorpool._core import Client
from tensorpool.aeron.media_driver import DriverLiveness
from tensorpool.aeron.transport import Bell, connect, is_driver_active
from tensorpool.errors import Closed, TransportError
from tensorpool.logs import Logger

RETRY_NS: Final = 100_000_000
MAX_RETRY_NS: Final = 2_000_000_000
LASTING_NS: Final = 2_000_000_000  # a connection that is lost sooner is opened again after a longer pause
CHECK_EVERY_NS: Final = 500_000_000


class MediaDriverConnection[S]:
    """An agent's client at one media driver, and the streams that the agent has there.

    >>> connection = MediaDriverConnection(aeron_dir, "tensorpool-me", open_streams, log)    # doctest: +SKIP
    >>> connection.maintain(now_ns)                  # in every turn          # doctest: +SKIP
    >>> if connection.streams is not None: ...       # use them, and call `lose` when they raise   # doctest: +SKIP

    `open_streams(client, now_ns)` opens the agent's publications and subscriptions; `streams` is what it returned, and
    None while there is no media driver. Closing the client closes all of its publications and subscriptions:
    `close_streams` is for what else the streams hold. `on_lost(reason, now_ns)` is called before the client is closed,
    `explain` makes an error of Aeron's clearer. Belongs to the agent's thread, but `streams` and `client` may be read
    from others.
    """

    def __init__(
        self,
        aeron_dir: str,
        client_name: str,
        open_streams: Callable[[Client, int], S],
        log: Logger,
        *,
        close_streams: Callable[[S], object] | None = None,
        on_lost: Callable[[str, int], object] | None = None,
        explain: Callable[[str], str] = str,
    ) -> None:
        self.aeron_dir: Final = aeron_dir
        self.client: Client | None = None
        self.streams: S | None = None
        self._client_name = client_name
        self._open_streams = open_streams
        self._close_streams = close_streams
        self._on_lost = on_lost
        self._explain = explain
        self._log = log
        self._liveness = DriverLiveness(aeron_dir)
        self._opened_ns = 0
        self._retry_ns = 0
        self._pause_ns = RETRY_NS
        self._check_ns = 0
        self._reported = ""  # why there is no connection, as the log says it

    def open(self, now_ns: int) -> S:
        """Connect now. Raises TransportError when no media driver is alive, and what `open_streams` raises."""
        self._liveness.adopt()
        client = connect(self.aeron_dir, client_name=self._client_name)
        client.expect_polls()
        try:
            streams = self._open_streams(client, now_ns)
        except BaseException:
            client.close()
            self._liveness.forget()
            raise
        self.client, self.streams = client, streams
        self._opened_ns = now_ns
        self._check_ns = now_ns + CHECK_EVERY_NS
        return streams

    def maintain(self, now_ns: int) -> bool:
        """Reconnect where that is due; True when the streams were opened just now.

        Raises TransportError when the media driver is gone; then call `lose`.
        """
        if self.client is None:
            return self._reconnect(now_ns)
        if now_ns >= self._check_ns:
            self._check_ns = now_ns + CHECK_EVERY_NS
            if self.client.is_closed or self._liveness.is_dead():
                raise TransportError(f"the media driver at {self.aeron_dir} is gone")
            if self.client.has_missed_events:
                raise TransportError(
                    f"this process stood still and missed events of the media driver at {self.aeron_dir}: "
                    "it connects anew"
                )
        return False

    def lose(self, error: Exception, now_ns: int, *, is_expected: bool = False) -> None:
        """Give the connection up after `error`; `maintain` opens another one.

        `is_expected`: the media driver was about to end, which is no reason to warn.
        """
        if self.client is None:
            return
        self._pause(now_ns, is_longer=now_ns - self._opened_ns < LASTING_NS)
        reason = self._report("media_driver_lost", str(error), is_expected=is_expected)
        if self._on_lost is not None:
            self._on_lost(reason, now_ns)
        self.close()

    def nap(self, bell: Bell, nanoseconds: int) -> None:
        """Sleep until a process rings, or the time is over. A ring that comes just before is missed."""
        client = self.client
        if client is None:
            time.sleep(nanoseconds / 1e9)
        else:
            client.wait_for_ring(bell, nanoseconds)

    def ring(self, bell: Bell) -> None:
        """Wake who naps there; for any thread."""
        client = self.client
        if client is not None:
            client.ring(bell)

    def close(self) -> None:
        """Close the streams and the client."""
        client, streams = self.client, self.streams
        self.client = self.streams = None
        self._liveness.forget()
        try:
            if streams is not None and self._close_streams is not None:
                self._close_streams(streams)
        finally:
            if client is not None:
                client.close()

    def _reconnect(self, now_ns: int) -> bool:
        if now_ns < self._retry_ns:
            return False
        self._retry_ns = now_ns + RETRY_NS
        if self._liveness.is_dead() or not is_driver_active(self.aeron_dir):
            if not self._reported:
                self._report("media_driver_missing", f"no media driver is alive at {self.aeron_dir}")
            return False
        try:
            self.open(now_ns)
        except (TransportError, Closed) as error:
            self._pause(now_ns, is_longer=True)
            if self._explain(str(error)) != self._reported:
                self._report("connection_failed", str(error))
            return False
        if self._reported:
            self._reported = ""
            self._log.info("media_driver_found", aeron_dir=self.aeron_dir)
        return True

    def _pause(self, now_ns: int, *, is_longer: bool) -> None:
        self._pause_ns = min(2 * self._pause_ns, MAX_RETRY_NS) if is_longer else RETRY_NS
        self._retry_ns = now_ns + self._pause_ns

    def _report(self, event: str, reason: str, *, is_expected: bool = False) -> str:
        self._reported = self._explain(reason)
        log = self._log.info if is_expected else self._log.warning
        log(event, aeron_dir=self.aeron_dir, error=self._reported)
        return self._reported
