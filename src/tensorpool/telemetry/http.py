# SPDX-License-Identifier: Apache-2.0
"""A small read-only HTTP server: GET and HEAD, a few paths, nothing else.

The number of requests at once and the time of each are bounded. On a loopback address it answers only requests that
name this host, so that no web page can read it through a browser.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import msgspec

from tensorpool.errors import ConfigError
from tensorpool.logs import get_logger
from tensorpool.telemetry.addresses import accepted_names

MAX_REQUESTS: Final = 32  # at once
READ_TIMEOUT_S: Final = 5.0
REQUEST_TIMEOUT_S: Final = 15.0
POLL_S: Final = 0.1


class Answer(msgspec.Struct, frozen=True):
    status: int
    content_type: str
    body: bytes


class HttpServer:
    """Answers on a thread of its own until it is closed.

    >>> server = HttpServer("127.0.0.1", 0, {"/healthz": lambda: Answer(200, "text/plain", b"ok")})
    >>> server.close()

    Raises ConfigError when the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[str, Callable[[], Answer]],
        *,
        key: str = "http",
    ) -> None:
        try:
            self._server = _Server(host, port, routes, accepted_names(host))
        except OSError as error:
            accepted = f"an address of this host that is free; {error.strerror or error}"
            raise ConfigError(key, f"{host}:{port}", accepted) from None
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL_S,), name="tensorpool-http")
        self._thread.daemon = True
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it answers, as it stands in a URL."""
        host, port = self._server.server_address[:2]
        host = host if isinstance(host, str) else host.decode()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def counts(self) -> dict[str, int]:
        return dict(self._server.counts)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, host: str, port: int, routes: Mapping[str, Callable[[], Answer]], names: frozenset[str] | None
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.routes: Final = routes
        self.names: Final = names
        self.counts = {"requests": 0, "refused": 0, "failed": 0}
        self.log: Final = get_logger("http")
        self._lock = threading.Lock()
        self._open: dict[Any, float] = {}  # requests: since when
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """As the base does, without asking a name server for our name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self.counts["requests"] += 1
            is_admitted = len(self._open) < MAX_REQUESTS
            if is_admitted:
                self._open[request] = time.monotonic()
            else:
                self.counts["refused"] += 1
        if is_admitted:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off requests that take too long; their threads then end by themselves."""
        oldest = time.monotonic() - REQUEST_TIMEOUT_S
        with self._lock:
            slow = [request for request, since in self._open.items() if since < oldest]
        for request in slow:
            with self._lock:
                if request not in self._open:
                    continue  # it was answered meanwhile
                self.counts["refused"] += 1
                self._open[request] = float("inf")
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the client closed it

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that disconnects during an answer is counted, not logged."""
        with self._lock:
            self.counts["failed"] += 1


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "tensorpool"
    sys_version = ""
    timeout = READ_TIMEOUT_S

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """As text, without repeating the request."""
        text = {501: "only GET and HEAD are answered", 405: "only GET and HEAD are answered"}.get(code, "")
        text = text or self.responses.get(code, ("error", ""))[0]
        self._send(Answer(code, "text/plain; charset=utf-8", f"{code} {text}\n".encode()))

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing per request."""

    def _answer(self) -> None:
        if not self._is_for_us():
            self._send(Answer(403, "text/plain; charset=utf-8", b"403 ask for this host by its own name\n"))
            return
        route = self.server.routes.get(self.path.partition("?")[0])
        if route is None:
            known = " ".join(self.server.routes)
            self._send(Answer(404, "text/plain; charset=utf-8", f"404 there is only {known}\n".encode()))
            return
        try:
            answer = route()
        except Exception as error:
            self.server.log.error("request_failed", exc_info=error, path=self.path)
            answer = Answer(500, "text/plain; charset=utf-8", b"500 the log says why\n")
        self._send(answer)

    def _is_for_us(self) -> bool:
        if self.server.names is None:
            return True
        given = self.headers.get("Host")
        if given is None:
            return True  # no browser leaves it out
        host = given.rpartition("]")[0].lstrip("[") if given.startswith("[") else given.partition(":")[0]
        return host.lower() in self.server.names

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)
