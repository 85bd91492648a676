# SPDX-License-Identifier: Apache-2.0
"""A page without a browser: HTTP and WebSockets as the console's own page uses them."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tensorpool.console.messages import unpack
from tensorpool.console.server import Console

WITHIN_S = 90.0


class Answer(msgspec.Struct, frozen=True):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Site:
    """A console, and requests that have its token."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.address = parts.netloc
        self.token = parse_qs(parts.query)["token"][0]

    @classmethod
    def of(cls, console: Console) -> Site:
        return cls(console.url())

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    @property
    def cookie(self) -> dict[str, str]:
        port = self.address.rpartition(":")[2]
        return {"Cookie": f"tensorpool-console-{port}={self.token}"}

    @property
    def origin(self) -> dict[str, str]:
        return {"Origin": f"http://{self.address}"}

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, self.bearer | headers)

    def post(self, path: str, body: object, **headers: str) -> Answer:
        return self.ask("POST", path, self.bearer | headers, json.dumps(body).encode())

    def delete(self, path: str, **headers: str) -> Answer:
        return self.ask("DELETE", path, self.bearer | headers)

    def ask(self, method: str, path: str, headers: dict[str, str], body: bytes | None = None) -> Answer:
        """Without anything that is not given here."""
        connection = http.client.HTTPConnection(self.address, timeout=WITHIN_S)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())

    @contextlib.contextmanager
    def socket(self, path: str, headers: dict[str, str] | None = None) -> Iterator[ClientConnection]:
        given = self.bearer if headers is None else headers
        with connect(
            f"ws://{self.address}{path}", additional_headers=given, max_size=None, open_timeout=WITHIN_S, proxy=None
        ) as socket:
            yield socket

    @contextlib.contextmanager
    def watch(self, stream_id: int, **look: Any) -> Iterator[Preview]:
        with self.socket(f"/ws/preview/{stream_id}") as socket:
            preview = Preview(socket)
            preview.look(**look)
            yield preview

    @contextlib.contextmanager
    def states(self) -> Iterator[States]:
        with self.socket("/ws/state") as socket:
            yield States(socket)


class States:
    """What `/ws/state` sends."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self.hello = json.loads(socket.recv(WITHIN_S))
        assert self.hello["type"] == "hello"

    def next(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._socket.recv(WITHIN_S))
        return found

    def until(self, is_met: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        """The first message that meets a condition."""
        deadline, found = time.monotonic() + WITHIN_S, dict[str, Any]()
        while time.monotonic() < deadline:
            found = self.next()
            if is_met(found):
                return found
        raise AssertionError(f"not within {WITHIN_S} s: {what}; the last was {str(found)[:3000]}")


class Preview:
    """A page that watches one stream."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    def say(self, **message: Any) -> None:
        self.socket.send(json.dumps(message))

    def look(self, **look: Any) -> None:
        self.say(type="look", look=look)

    def receive(self, *, timeout: float = WITHIN_S) -> tuple[dict[str, Any], bytes] | dict[str, Any]:
        message = self.socket.recv(timeout)
        if isinstance(message, bytes):
            return unpack(message)
        text: dict[str, Any] = json.loads(message)
        return text

    def unacknowledged(self) -> tuple[dict[str, Any], bytes]:
        """The next picture, which stays in flight."""
        while isinstance(found := self.receive(), dict):
            pass
        return found

    def picture(self) -> tuple[dict[str, Any], bytes]:
        header, body = self.unacknowledged()
        self.say(type="ack", number=header["number"])
        return header, body

    def answer(self, kind: str) -> dict[str, Any]:
        """The next text of a kind; pictures meanwhile are acknowledged."""
        while True:
            found = self.receive()
            if not isinstance(found, dict):
                self.say(type="ack", number=found[0]["number"])
            elif found["type"] == kind:
                return found

    def wait_for_status(self, words: str) -> None:
        """Until a status has these words; there may be others before it."""
        while words not in self.answer("status")["text"]:
            pass

    def is_open(self) -> bool:
        try:
            return self.socket.ping().wait(WITHIN_S)
        except ConnectionClosed:
            return False
