# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: what it answers, and that nothing that is sent to it can hurt."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator

import pytest

from tensorpool.errors import ConfigError
from tensorpool.telemetry import http as module
from tensorpool.telemetry.http import Answer, HttpServer
from tests.support.processes import wait_until


def fail() -> Answer:
    raise RuntimeError("broken")


@pytest.fixture
def server() -> Iterator[HttpServer]:
    routes = {"/hello": lambda: Answer(200, "text/plain", b"hello"), "/broken": fail}
    server = HttpServer("127.0.0.1", 0, routes)
    yield server
    server.close()


def ask(server: HttpServer, path: str = "/hello", method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server.address, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()


def send(server: HttpServer, data: bytes) -> bytes:
    """Raw bytes, to the end of the answer."""
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        with contextlib.suppress(OSError):  # a client may hang up early
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                found += part
        return found


def test_get_and_head_are_answered_and_nothing_else(server: HttpServer) -> None:
    """404 and 501 say what there is."""
    assert ask(server) == (200, b"hello")
    assert ask(server, "/hello?x=1") == (200, b"hello")
    assert ask(server, method="HEAD") == (200, b"")
    assert ask(server, "/nothing") == (404, b"404 there is only /hello /broken\n")
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, method=method) == (501, b"501 only GET and HEAD are answered\n")


def test_a_page_that_names_another_host_is_refused(server: HttpServer) -> None:
    """A browser that was lured here sends the name it was lured by."""
    assert ask(server, Host="evil.example")[0] == 403
    assert ask(server, Host="LOCALHOST:1")[0] == 200
    assert ask(server, Host="[::1]:9464")[0] == 200
    assert ask(server, Host="[evil]")[0] == 403
    assert ask(server, Host="")[0] == 403


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n\r\n",
        b"\x00\xff\xfe",
        b"GET\r\n\r\n",
        b"GET /hello HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /hello HTTP/1.1\r\n" + b"a: b\r\n" * 500 + b"\r\n",
        b"GET /hello HTTP/1.1\r\nA: " + b"b" * 70_000 + b"\r\n\r\n",
        b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http://evil/hello HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=range(10),
)
def test_nonsense_is_answered_or_closed_and_does_no_harm(server: HttpServer, data: bytes) -> None:
    """No answer repeats what was sent; the next request is served."""
    found = send(server, data)
    assert b"evil" not in found
    assert b"passwd" not in found
    assert b"hello" not in found.partition(b"\r\n\r\n")[2].replace(b"/hello /broken", b"")
    assert ask(server) == (200, b"hello")


def test_a_route_that_fails_is_a_500_without_its_words(server: HttpServer) -> None:
    """They are in the log."""
    assert ask(server, "/broken") == (500, b"500 the log says why\n")


def test_so_many_at_once_and_no_more(server: HttpServer) -> None:
    """A client that sends nothing takes a place; the next is refused, and admitted when places are free."""
    host, _, port = server.address.rpartition(":")
    held = [socket.create_connection((host, int(port)), timeout=30) for _ in range(module.MAX_REQUESTS)]
    try:
        wait_until(lambda: server.counts["requests"] == module.MAX_REQUESTS, "all places are taken")
        with socket.create_connection((host, int(port)), timeout=30) as late:
            assert late.recv(100) == b""
        assert server.counts["refused"] == 1
    finally:
        for connection in held:
            connection.close()

    def is_served() -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return ask(server) == (200, b"hello")
        return False

    wait_until(is_served, "there is room again")


def test_who_dribbles_is_cut_off(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then keeps no place for ever."""
    monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", 0.3)
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        slow.sendall(b"GET /hel")
        assert slow.recv(100) == b""
    assert server.counts["refused"] == 1


def test_an_address_that_cannot_be_had_is_a_config_error(server: HttpServer) -> None:
    """It names the key, and what is wrong."""
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=r"supervisor.http = '127.0.0.1:\d+'.*Address already in use"):
        HttpServer("127.0.0.1", port, {}, key="supervisor.http")


def test_it_ends_while_a_client_is_connected() -> None:
    """And leaves no thread of its own."""
    server = HttpServer("127.0.0.1", 0, {})
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30):
        server.close()
    assert not any(thread.name == "tensorpool-http" for thread in threading.enumerate())
