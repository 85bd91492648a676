# SPDX-License-Identifier: Apache-2.0
"""A driver, cameras, readers and a console, each a process as a user starts it, and a browser that looks at them."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote, urlsplit

from playwright.sync_api import Browser, Page, WebSocket, sync_playwright

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.driver import DriverConfig
from tests.support.processes import Process, private_directory, wait_until
from tests.support.programs import need

CHROMIUM: Final = "/usr/bin/chromium"
FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE_S: Final = 60.0
LOOK_MS: Final = 20
TOKEN: Final = "0123456789abcdef" * 4
LAPTOP: Final = (1440, 900)
PHONE: Final = (390, 844)


class Site:
    """Processes in directories of their own; all of them end with it."""

    driver: Process
    console: Process

    def __init__(self, folder: Path, lakes: Sequence[Path] = ()) -> None:
        self.aeron_dir = str(folder / "aeron")
        self.base_dir = str(folder / "shm")
        self.address = ""
        self._folder = folder
        self._lakes = lakes
        self._port = 0
        self._processes: list[Process] = []

    def start(self, *arguments: str) -> Process:
        """`tensorpool …`"""
        process = Process("-m", "tensorpool", *arguments, AERON_DIR=self.aeron_dir, SHM_BASE_DIR=self.base_dir)
        self._processes.append(process)
        return process

    def start_driver(self) -> Process:
        self.driver = self.start("driver", "--log-level", "error")
        while " serves " not in (line := self.driver.read_line()):
            assert self.driver.is_running, line
        return self.driver

    def client(self) -> Client:
        """In this process."""
        return tp.connect(self.aeron_dir, config=DriverConfig.load(overrides={"shm.base_dir": self.base_dir}))

    def start_camera(self, name: str, *options: str) -> Process:
        """A producer that is attached and prints its counts at its end."""
        return self.start("produce", name, "--json", "--timeout", "60", *options)

    def start_console(self) -> Process:
        """Each time at the same address, with the same token."""
        token_file = self._folder / "token"
        if not token_file.exists():
            token_file.touch(0o600)
            token_file.write_text(TOKEN)
        lakes = [word for lake in self._lakes for word in ("--lake", str(lake))]
        where = ("--port", str(self._port), "--token-file", str(token_file))
        self.console = self.start("console", "--json", *where, *lakes)
        self.address = json.loads(self.console.read_line())["address"]
        self._port = urlsplit(self.address).port or 0
        return self.console

    def stream(self, name: str) -> dict[str, Any]:
        """A stream as the console knows it, once it is live."""
        found: list[dict[str, Any]] = []

        def is_live() -> bool:
            streams = self.get("/api/state").get("streams", ())
            found[:] = [it for it in streams if it["name"] == name and it["state"] == "live" and it["shape"]]
            return bool(found)

        wait_until(is_live, f"{name} is live")
        return found[0]

    def url(self, at: str = "") -> str:
        """What a user opens; `at` is a place in the page, such as /streams/10001."""
        return f"{self.address}?token={TOKEN}" + (f"&at={quote(at)}" if at else "")

    def get(self, path: str) -> Any:
        """What the console answers."""
        request = urllib.request.Request(
            self.address + path.removeprefix("/"), headers={"Authorization": f"Bearer {TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._processes):
            process.reap()


@contextlib.contextmanager
def running(*, lakes: Sequence[Path] = ()) -> Iterator[Site]:
    """A site with a driver and a console."""
    with private_directory() as folder, Site(folder, lakes) as site:
        site.start_driver()
        site.start_console()
        yield site


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's, without a window, with a home of its own."""
    need("chromium")
    with private_directory("tp-home-") as home, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=FLAGS, env={"HOME": str(home), "LANG": "C.UTF-8"}
        )
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page with all that its browser complains about, and every state that it was sent, by number."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.states: dict[int, dict[str, Any]] = {}
        page.set_default_timeout(PATIENCE_S * 1000)
        page.on("console", lambda it: self.complaints.append(f"{it.type}: {it.text} {it.location['url']}"))
        page.on("pageerror", lambda it: self.complaints.append(f"{it}\n{it.stack}"))
        page.on("websocket", self._on_socket)

    def _on_socket(self, socket: WebSocket) -> None:
        if socket.url.endswith("/ws/state"):
            socket.on("framereceived", self._on_frame)

    def _on_frame(self, data: str | bytes) -> None:
        message = json.loads(data)
        if message["type"] == "state":
            self.states[message["number"]] = message

    def open(self, url: str) -> None:
        """As a user does: the address with the token leads to the page without it, which then shows a state."""
        self.page.goto(url)
        self.page.wait_for_url(lambda found: "token=" not in found)
        self.wait("document.querySelector('.asof time') !== null")

    def wait(self, expression: str, argument: Any = None) -> Any:
        """Until an expression of JavaScript is true: its value. Playwright's own uses `eval`, which is forbidden."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self.page.evaluate(expression, argument)):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {PATIENCE_S:.0f} s: {expression} {argument or ''}")
            self.page.wait_for_timeout(LOOK_MS)
        return found


@contextlib.contextmanager
def watched(browser: Browser, size: tuple[int, int] = LAPTOP, scheme: str = "light") -> Iterator[Watched]:
    """A new page; fails where the browser complains about anything."""
    width, height = size
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    try:
        seen = Watched(context.new_page())
        yield seen
        assert not seen.complaints, "\n".join(seen.complaints)
    finally:
        context.close()
