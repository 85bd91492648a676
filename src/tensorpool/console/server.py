# SPDX-License-Identifier: Apache-2.0
"""The console as one object: HTTP and WebSockets on a thread, and everything behind them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import uvicorn

from tensorpool import aeron
from tensorpool._core import monotonic_ns
from tensorpool.closing import ClosesOnExit
from tensorpool.console.access import Access, check_listen, chosen_token, new_token
from tensorpool.console.app import WEB, Parts, make_app
from tensorpool.console.lakes import Lakes
from tensorpool.console.messages import MAX_BYTES
from tensorpool.console.previews import Previews
from tensorpool.console.state import EmbeddedView, StateFeed, SupervisorView, ViewSource
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import ConfigError, TensorPoolError
from tensorpool.version import __version__

THREADS: Final = 16  # for what blocks: files, commands, checks
MAX_CONNECTIONS: Final = 128
START_S: Final = 30.0
END_S: Final = 5  # until open requests are cut off


class ConsoleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where it listens, who may ask, and what it shows."""

    listen: str = "127.0.0.1"
    port: int = 0
    token_file: Path | None = None
    supervisor: str | None = None  # the address of a running one; None: an observer in this process
    lakes: tuple[str, ...] = ()
    record_options: tuple[str, ...] = ()  # of `tensorpool record`: which driver


class Console(ClosesOnExit):
    """A running console.

    >>> with Console(DriverConfig.load(), None, ConsoleOptions()) as console:      # doctest: +SKIP
    ...     print(console.url)

    Waits for a media driver that is not running. Raises ConfigError for an address that cannot be used.
    """

    def __init__(self, config: DriverConfig, aeron_dir: str | None, options: ConsoleOptions) -> None:
        check_listen(options.listen, has_token_file=options.token_file is not None)
        self._token = new_token() if options.token_file is None else _read_token(options.token_file)
        self._socket = _bound(options.listen, options.port)
        with contextlib.ExitStack() as undo:
            undo.callback(self._socket.close)
            host, port = self._socket.getsockname()[:2]
            self.port: Final[int] = port
            self._host = f"[{host}]" if ":" in host else host
            where = aeron_dir or config.driver.aeron_dir or aeron.default_aeron_dir()
            self._access = Access(self._token, port, frozenset({options.listen, host, socket.gethostname()}))
            source: ViewSource = (
                EmbeddedView(config, where) if options.supervisor is None else SupervisorView(options.supervisor)
            )
            undo.callback(source.close)
            previews = Previews(config, where)
            undo.callback(previews.close)
            lakes = Lakes(options.lakes)
            undo.callback(lakes.close)
            about = {"version": __version__, "host": socket.gethostname()}
            self._previews = previews
            self._feed = feed = StateFeed(source, lambda: previews.consumer_ids, about)
            app = make_app(Parts(config, where, options.record_options, self._access, feed, previews, lakes))
            settings = uvicorn.Config(
                app,
                loop="asyncio",
                http="h11",
                ws="websockets-sansio",
                ws_max_size=MAX_BYTES,
                ws_per_message_deflate=False,
                lifespan="on",
                log_config=None,
                log_level="critical",  # the guard logs what fails; a refused WebSocket is no error
                access_log=False,  # it would write the token
                proxy_headers=False,
                server_header=False,
                limit_concurrency=MAX_CONNECTIONS,
                timeout_graceful_shutdown=END_S,
            )
            self._server = uvicorn.Server(settings)
            self._failure: BaseException | None = None
            self._started = threading.Event()
            self._thread = threading.Thread(target=self._serve, name="console", daemon=True)
            self._thread.start()
            undo.callback(self._stop)
            self._wait_for_start()
            self._undo = undo.pop_all()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    @property
    def silent_ns(self) -> int:
        """How long ago its event loop turned."""
        return monotonic_ns() - self._feed.turned_ns

    @property
    def trouble(self) -> str | None:
        """Why pages see no streams; None: they do."""
        return self._feed.trouble

    @property
    def watched_streams(self) -> int:
        return len(self._previews.consumer_ids)

    @property
    def address(self) -> str:
        """Without the token."""
        return f"http://{self._host}:{self.port}/"

    def url(self, at: str = "") -> str:
        """What to open in a browser, with the token: it opens everything. `at` is a place in the page."""
        return f"{self.address}?token={self._token}" + (f"&at={at}" if at else "")

    def link(self, at: str = "") -> str:
        """The same for one use within a minute, for a browser's command line, which other users can read."""
        return f"{self.address}?link={self._access.new_link(monotonic_ns())}" + (f"&at={at}" if at else "")

    def close(self) -> None:
        """End recordings that pages started, previews, and the server."""
        self._undo.close()

    def _serve(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:
            self._failure = error
        finally:
            self._started.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(THREADS, "console-job"))
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.01)
        self._started.set()
        await serving

    def _wait_for_start(self) -> None:
        if not self._started.wait(START_S) or not self._server.started:
            raise TensorPoolError(f"the console did not start: {self._failure or 'no answer'}")

    def _stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


def missing_page() -> str | None:
    """One sentence where this installation has no page to show."""
    if (WEB / "index.html").is_file() and (WEB / "vendor").is_dir():
        return None
    return f"the console's page is not complete: {WEB}/vendor is made by `make setup` where npm is installed"


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        accepted = f"an address of this host and a free port; {error.strerror or error}"
        raise ConfigError("--listen", f"{host}:{port}", accepted) from None
    return bound


def _read_token(path: Path) -> str:
    try:
        return chosen_token(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--token-file", str(path), f"a file that can be read; {error}") from None
