# SPDX-License-Identifier: Apache-2.0
"""The console over HTTP: the page, its files, and answers in JSON. Nothing without the token; see `access`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tensorpool._core import monotonic_ns
from tensorpool.console import services
from tensorpool.console.access import HEADERS, NO_TOKEN, Access, Refusal, place_in_page
from tensorpool.console.drawing import Drawable, draw, npy, png
from tensorpool.console.lakes import Lakes, RecordedLake, Where
from tensorpool.console.previews import Previews
from tensorpool.console.sockets import Sockets
from tensorpool.console.state import StateFeed, find
from tensorpool.console.stream_details import details, memory
from tensorpool.console.viewer import Wish
from tensorpool.control.errors import CommandError, CommandUnanswered, CommandUnfinished
from tensorpool.diagnosis.all_checks import run_checks
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import ConfigError, LocalProtocolError, TensorPoolError
from tensorpool.logs import get_logger
from tensorpool.looks import Look, NotShown
from tensorpool.shm.containment import AllowedBases

WEB: Final = Path(__file__).parent / "web"
MAX_BODY_BYTES: Final = 65_536
DOCTOR_S: Final = 10.0  # how long its findings are kept
AT_ONCE: Final = 4  # frames that are read from lakes or saved


class Parts(msgspec.Struct, frozen=True):
    """What an app is made of."""

    config: DriverConfig
    aeron_dir: str
    record_options: tuple[str, ...]  # with which a recorder finds the driver
    access: Access
    feed: StateFeed
    previews: Previews
    lakes: Lakes


class RecordingRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    streams: list[str | int]


def make_app(parts: Parts) -> ASGIApp:
    """The application, with its guard around it."""
    api, sockets = _Api(parts), Sockets(parts.feed, parts.previews)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        reading = asyncio.create_task(parts.feed.run())
        try:
            yield
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading

    routes = [
        Route("/", api.page),
        *([Mount("/web", StaticFiles(directory=WEB))] if WEB.is_dir() else []),
        Route("/healthz", lambda request: PlainTextResponse("ok")),
        Route("/api/state", api.state),
        Route("/api/streams/{stream_id:int}", api.stream),
        Route("/api/streams/{stream_id:int}/frame.npy", api.frame_npy),
        Route("/api/streams/{stream_id:int}/frame.png", api.frame_png),
        Route("/api/lakes", api.all_lakes),
        Route("/api/lakes/{name}/timeline", api.timeline),
        Route("/api/lakes/{name}/frame", api.recorded_frame),
        Route("/api/lakes/{name}/frame.npy", api.recorded_npy),
        Route("/api/lakes/{name}/recording", api.start_recording, methods=["POST"]),
        Route("/api/lakes/{name}/recording", api.end_recording, methods=["DELETE"]),
        Route("/api/services/{tag}/commands", api.command, methods=["POST"]),
        Route("/api/doctor", api.doctor),
        Route("/api/memory", api.memory),
        WebSocketRoute("/ws/state", sockets.state),
        WebSocketRoute("/ws/preview/{stream_id:int}", sockets.preview),
    ]
    handlers: Any = {HTTPException: _on_http_error, TensorPoolError: _on_error, Exception: _on_failure}
    return Guard(Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan), parts.access)


class Guard:
    """Around the app: lets nothing pass without the token, and adds what a browser must know to every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"].endswith("response.start"):
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._answer(scope)
        try:
            await (self._app if answer is None else answer)(scope, receive, send_guarded)
        except Exception as error:
            get_logger("console").error("request_failed", exc_info=error, path=scope["path"])
            raise

    def _answer(self, scope: Scope) -> Response | None:
        """Instead of the app's: a refusal, or the cookie in exchange for the token."""
        headers = Headers(scope=scope)
        server = scope.get("server")
        reached = None if server is None else server[0]
        is_http = scope["type"] == "http"
        method = scope["method"] if is_http else "WS"
        if is_http and scope["path"] in ("/", "/healthz") and method in ("GET", "HEAD"):
            refusal = self._access.host_refusal(headers, reached)
            if refusal is not None:
                return _refused(refusal)
            if scope["path"] == "/healthz":
                return None
            query = QueryParams(scope["query_string"])
            if "token" in query or "link" in query:
                return self._welcome(query)
        refusal = self._access.refusal(method, headers, reached)
        return None if refusal is None else _refused(refusal)

    def _welcome(self, query: QueryParams) -> Response:
        """Sets the cookie, and has the browser ask again from a page of ours: then it sends a cookie of this site."""
        link = query.get("link")
        is_good = (
            self._access.use_link(link, monotonic_ns())
            if link is not None
            else self._access.is_token(query.get("token", ""))
        )
        if not is_good:
            return _refused(NO_TOKEN)
        place = place_in_page(query.get("at", ""))
        icon = '<link rel="icon" href="/web/icon.svg">'
        page = f'<!doctype html><meta charset="utf-8">{icon}<meta http-equiv="refresh" content="0;url={place}">'
        return HTMLResponse(page, headers={"Set-Cookie": self._access.set_cookie()})


class _Api:
    """The answers."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._bases = AllowedBases(parts.config.shm.allowed_base_dirs)
        self._examining = asyncio.Lock()
        self._findings: tuple[float, bytes] | None = None
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def page(self, request: Request) -> Response:
        if not (WEB / "index.html").is_file():
            raise HTTPException(503, "the page is not in this installation: `make setup` with npm puts it there")
        return FileResponse(WEB / "index.html", media_type="text/html; charset=utf-8")

    async def state(self, request: Request) -> Response:
        return Response(self._parts.feed.text, media_type="application/json")

    async def stream(self, request: Request) -> Response:
        stream_id = request.path_params["stream_id"]
        metadata = self._parts.previews.metadata(stream_id)
        found = await asyncio.to_thread(details, self._view(), stream_id, self._bases, metadata)
        if found is None:
            raise HTTPException(404, f"there is no stream {stream_id}")
        return _json(found)

    async def frame_npy(self, request: Request) -> Response:
        return await self._saved(request, "npy", lambda frame: npy(frame.array))

    async def frame_png(self, request: Request) -> Response:
        look = _look(request.query_params)
        return await self._saved(request, "png", lambda frame: png(frame, look))

    async def _saved(self, request: Request, kind: str, encode: Callable[[Drawable], bytes]) -> Response:
        stream_id, seq = request.path_params["stream_id"], _number(request.query_params, "seq")
        if find(self._view(), "streams", "stream_id", stream_id) is None:
            raise HTTPException(404, f"there is no stream {stream_id}")
        async with self._turns:
            frame = await asyncio.to_thread(self._parts.previews.copy, stream_id, seq)
            body = await asyncio.to_thread(encode, frame)
        return _file(frame, kind, body)

    async def all_lakes(self, request: Request) -> Response:
        return _json(await asyncio.to_thread(self._parts.lakes.about))

    async def timeline(self, request: Request) -> Response:
        query = request.query_params
        stream, start, end = query.get("stream", ""), _number(query, "from"), _number(query, "to")
        return _json(await asyncio.to_thread(self._lake(request).timeline, stream, start, end))

    async def recorded_frame(self, request: Request) -> Response:
        look = _look(request.query_params)
        frame = await self._recorded(request)
        drawn = await asyncio.to_thread(draw, frame, Wish(look))
        header = msgspec.json.encode(frame.header() | drawn.fields).decode()
        media = drawn.fields["media"]
        return Response(drawn.body, media_type="application/octet-stream" if media == "line" else media,
                        headers={"X-Frame": header})  # fmt: skip

    async def recorded_npy(self, request: Request) -> Response:
        frame = await self._recorded(request)
        return _file(frame, "npy", await asyncio.to_thread(npy, frame.array))

    async def _recorded(self, request: Request) -> Drawable:
        query = request.query_params
        where = Where(
            stream=query.get("stream", ""),
            epoch=_number(query, "epoch"),
            seq=_number(query, "seq"),
            step=_number(query, "step") or 0,
            at_ns=_number(query, "at"),
        )
        async with self._turns:
            return await asyncio.to_thread(self._lake(request).frame, where)

    async def start_recording(self, request: Request) -> Response:
        wanted = await _body(request, RecordingRequest)
        view = self._view()
        streams = []
        for stream in wanted.streams:
            known = find(view, "streams", "stream_id", stream) or find(view, "streams", "name", stream)
            if known is None:
                raise HTTPException(404, f"there is no stream {stream!r} to record")
            streams.append(str(known["stream_id"]))
        if not streams:
            raise HTTPException(400, "name at least one stream to record")
        lake, options = self._lake(request), self._parts.record_options
        return _json(await asyncio.to_thread(lake.record, streams, options), 201)

    async def end_recording(self, request: Request) -> Response:
        return _json(await asyncio.to_thread(self._lake(request).end_recording))

    async def command(self, request: Request) -> Response:
        tag, command = request.path_params["tag"], await _body(request, services.Command)
        if find(self._view(), "services", "tag", tag) is None:
            raise HTTPException(404, f"there is no service {tag!r}")
        if services.needs_confirmation(command) and not command.confirmed:
            text = f'{command.command} changes {tag}: send it again with "confirmed": true'
            raise HTTPException(409, text)
        parts = self._parts
        result = await asyncio.to_thread(services.send, parts.config, parts.aeron_dir, tag, command)
        return _json({"result": result})

    async def doctor(self, request: Request) -> Response:
        async with self._examining:
            if self._findings is None or time.monotonic() - self._findings[0] > DOCTOR_S:
                self._findings = time.monotonic(), await asyncio.to_thread(self._examine)
            return Response(self._findings[1], media_type="application/json")

    def _examine(self) -> bytes:
        findings = list(run_checks(self._parts.config, self._parts.aeron_dir))
        failures = sum(finding.level == "FAIL" for finding in findings)
        warnings = sum(finding.level == "WARN" for finding in findings)
        return msgspec.json.encode({"findings": findings, "failures": failures, "warnings": warnings})

    async def memory(self, request: Request) -> Response:
        return _json(await asyncio.to_thread(memory, self._parts.config, self._parts.feed.view))

    def _view(self) -> dict[str, Any]:
        view = self._parts.feed.view
        if view is None:
            raise HTTPException(503, msgspec.json.decode(self._parts.feed.text)["why"])
        return view

    def _lake(self, request: Request) -> RecordedLake:
        name = request.path_params["name"]
        try:
            return self._parts.lakes[name]
        except KeyError:
            raise HTTPException(404, f"there is no lake {name!r}; give it with --lake PATH") from None


async def _body[T](request: Request, kind: type[T]) -> T:
    """A small JSON body."""
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise HTTPException(413, f"at most {MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise HTTPException(400, f"not understood: {error}") from None


def _look(query: QueryParams) -> Look:
    text = query.get("look")
    try:
        return Look() if text is None else msgspec.json.decode(text, type=Look)
    except (msgspec.DecodeError, UnicodeError, ConfigError) as error:
        raise HTTPException(400, f"look: {error}") from None


def _number(query: QueryParams, name: str) -> int | None:
    text = query.get(name)
    if text is None or text == "":
        return None
    if not (text.removeprefix("-").isascii() and text.removeprefix("-").isdecimal() and len(text) <= 20):
        raise HTTPException(400, f"{name} = {text[:40]!r}: expected a whole number")
    return int(text)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _file(frame: Drawable, kind: str, body: bytes) -> Response:
    name = f"stream-{frame.stream_id}-{frame.epoch}-{frame.seq}.{kind}"
    media = "image/png" if kind == "png" else "application/octet-stream"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    headers["X-Frame"] = msgspec.json.encode(frame.header()).decode()
    return Response(body, media_type=media, headers=headers)


def _refused(refusal: Refusal) -> Response:
    return _json({"error": refusal.text}, refusal.status)


def _on_http_error(request: Request, error: HTTPException) -> Response:
    return _json({"error": error.detail}, error.status_code)


def _on_error(request: Request, error: TensorPoolError) -> Response:
    """Our own errors say what to do."""
    status = 500
    match error:
        case NotShown():
            status = 422
        case ConfigError():
            status = 400
        case CommandUnanswered() | CommandUnfinished():
            status = 504
        case CommandError() | LocalProtocolError():
            status = 409
        case _ if type(error).__name__ == "NotRecorded":  # of the lake, which is imported when it is used
            status = 404
    return _json({"error": str(error)}, status)


def _on_failure(request: Request, error: Exception) -> Response:
    """The guard logs it."""
    return _json({"error": "this failed; the console's log says why"}, 500)
