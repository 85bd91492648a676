# SPDX-License-Identifier: Apache-2.0
"""The state of everything, once a second, for all pages: the supervisor's view, computed once.

It comes from an observer in this process, or from a running supervisor's /view. A change is sent at once, and a page
that does not read gets the newest state when it reads again: none wait for it.
"""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec

from tensorpool._core import monotonic_ns
from tensorpool.closing import ClosesOnExit
from tensorpool.console.history import History
from tensorpool.console.messages import text
from tensorpool.console.services import offered
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import ConfigError, TensorPoolError
from tensorpool.logs import get_logger
from tensorpool.supervisor.config import SupervisorConfig
from tensorpool.supervisor.encoding import to_json
from tensorpool.supervisor.observer import Observer

PERIOD_S: Final = 1.0
NOTICE_S: Final = 0.2  # a change is sent so soon
MAX_CHANGES: Final = 200  # in a state; the latest
REMOTE_TIMEOUT_S: Final = 2.0
MAX_VIEW_BYTES: Final = 64 << 20


class Away(TensorPoolError):
    """There is no view at the moment: why, as a page shows it."""


class ViewSource(Protocol):
    """Where the view comes from."""

    @property
    def url(self) -> str | None:
        """Of a supervisor elsewhere; None: the view is made here."""

    def read(self) -> bytes:
        """The view as JSON. Raises Away. May block."""

    def has_changed(self) -> bool:
        """Whether to read it before its time."""

    def close(self) -> None: ...


class EmbeddedView(ClosesOnExit):
    """An observer in this process. It waits for a media driver that is not there."""

    url: Final = None

    def __init__(self, config: DriverConfig, aeron_dir: str | None) -> None:
        self._observer = Observer(aeron_dir, SupervisorConfig.of(config), is_patient=True)
        self._observer.__enter__()
        self._read_number = 0
        self._was_connected = False

    def read(self) -> bytes:
        observer = self._observer
        self._was_connected = observer.is_connected
        if not self._was_connected:
            raise Away(f"no media driver is alive at {observer.aeron_dir}; waiting for it")
        snapshot = observer.snapshot()
        self._read_number = snapshot.changes[-1].number if snapshot.changes else 0
        return to_json(snapshot, time.time_ns())

    def has_changed(self) -> bool:
        observer = self._observer
        with observer.lock:
            changes = observer.view.history.changes
            number = changes[-1].number if changes else 0
        return number != self._read_number or observer.is_connected != self._was_connected

    def close(self) -> None:
        self._observer.__exit__(None, None, None)


class SupervisorView:
    """A running supervisor, asked over HTTP. Raises ConfigError for what is no address of one."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") not in ("", "view") or parts.query:
            raise ConfigError("--supervisor", url, "the address of a supervisor, such as http://127.0.0.1:9464")
        self.url: Final = f"http://{parts.netloc}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def read(self) -> bytes:
        try:
            with self._opener.open(f"{self.url}/view", timeout=REMOTE_TIMEOUT_S) as answer:
                found: bytes = answer.read(MAX_VIEW_BYTES)
        except (OSError, urllib.error.URLError) as error:
            reason = getattr(error, "reason", None) or error
            raise Away(f"the supervisor at {self.url} does not answer ({reason}); waiting for it") from None
        return found

    def has_changed(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is kept open."""


class StateFeed:
    """Reads the view once a second and has its newest state ready for every page. Runs in an event loop."""

    def __init__(
        self, source: ViewSource, own_consumers: Callable[[], Collection[int]], about: Mapping[str, object]
    ) -> None:
        self._source = source
        self._own_consumers = own_consumers
        self._about = about
        self._history = History()
        self._turned = asyncio.Condition()
        self._thread = ThreadPoolExecutor(1, "console-state")  # its own: no request keeps the state waiting
        self._log = get_logger("console")
        self.number = 0
        self.text = text("gone", why="the console has just started")
        self.view: dict[str, Any] | None = None  # None while there is none
        self.trouble: str | None = "the console has just started"  # why there is none
        self.turned_ns = monotonic_ns()  # when its loop ran last

    @property
    def hello(self) -> str:
        """The first message to a page."""
        return text(
            "hello",
            **self._about,
            history=self._history.columns(),
            period_ms=round(PERIOD_S * 1e3),
            supervisor=self._source.url,
        )

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()

        def turn() -> None:
            self.turned_ns = monotonic_ns()
            loop.call_later(NOTICE_S, turn)

        turn()
        with self._thread:
            while True:
                began_s = loop.time()
                await self.read()
                while (left_s := began_s + PERIOD_S - loop.time()) > 0:
                    await asyncio.sleep(min(NOTICE_S, left_s))
                    if self._source.has_changed():
                        break

    async def read(self) -> None:
        """Once, for all pages."""
        try:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._thread, self._read, self.number + 1)
            self.trouble = None
        except Away as away:
            found, self.trouble = None, str(away)
        except Exception as error:
            self._log.error("state_failed", exc_info=error)
            found, self.trouble = None, "the state cannot be read; the console's log says why"
        view, message = found or (None, text("gone", why=self.trouble))
        if view is not None:
            self._history.add(view)
        async with self._turned:
            self.number += 1
            self.view, self.text = view, message
            self._turned.notify_all()

    async def after(self, number: int) -> tuple[int, str]:
        """The newest message, once there is one that is newer."""
        async with self._turned:
            await self._turned.wait_for(lambda: self.number > number)
            return self.number, self.text

    def _read(self, number: int) -> tuple[dict[str, Any], str]:
        try:
            view: dict[str, Any] = msgspec.json.decode(self._source.read())
            complete(view, self._own_consumers())
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            raise Away(f"{self._source.url} serves no view of a supervisor ({error!r:.200})") from None
        return view, text("state", number=number, **view)


def complete(view: dict[str, Any], own_consumers: Collection[int]) -> None:
    """Add what only pages need: how long a ring lasts, commands of services, which consumers are the console's."""
    for stream in view["streams"]:
        rate_hz, nslots = stream["rate_hz"], stream["nslots"]
        stream["ring_s"] = nslots / rate_hz if nslots and rate_hz else None
    for service in view["services"]:
        service["commands"] = offered(service["service"])
    for consumer in view["consumers"]:
        consumer["is_console"] = consumer["consumer_id"] in own_consumers
    view["changes"] = view["changes"][-MAX_CHANGES:]


def find(view: dict[str, Any] | None, table: str, key: str, value: object) -> dict[str, Any] | None:
    """The row of a view's table that has a value."""
    return next((row for row in (view or {}).get(table, ()) if row[key] == value), None)
