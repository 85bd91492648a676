# SPDX-License-Identifier: Apache-2.0
"""WebSockets: the state once a second, and previews. A page that does not read holds up no other page.

Their number, the size of messages and their rate are bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from tensorpool._core import monotonic_ns
from tensorpool.console import messages
from tensorpool.console.messages import MessageRate
from tensorpool.console.previews import Page, Previews, Watch
from tensorpool.console.state import StateFeed

MAX_SOCKETS: Final = 32
MAX_WAITING: Final = 256  # messages to a page that does not read
TOO_MANY: Final = 1008  # "policy violation"
MAX_STREAM_ID: Final = 2**32 - 2


class Outbox:
    """What waits to be sent to a page: one picture, and some texts. What has no room is dropped.

    A page that acknowledges pictures before it has read them gets no more of them than one that reads.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[str | bytes] = asyncio.Queue(MAX_WAITING)
        self._has_picture = False

    def put(self, message: str | bytes) -> None:
        is_picture = isinstance(message, bytes)
        if (is_picture and self._has_picture) or self._queue.full():
            return
        self._has_picture |= is_picture
        self._queue.put_nowait(message)

    async def get(self) -> str | bytes:
        message = await self._queue.get()
        if isinstance(message, bytes):
            self._has_picture = False
        return message


class Sockets:
    """All WebSockets of a console."""

    def __init__(self, feed: StateFeed, previews: Previews) -> None:
        self._feed = feed
        self._previews = previews
        self._count = 0

    async def state(self, socket: WebSocket) -> None:
        """`/ws/state`"""
        if not await self._is_admitted(socket):
            return
        try:
            await _first_to_end(self._send_state(socket), _ignore(socket))
        finally:
            self._count -= 1

    async def preview(self, socket: WebSocket) -> None:
        """`/ws/preview/{stream_id}`"""
        stream_id = int(socket.path_params["stream_id"])
        if not 1 <= stream_id <= MAX_STREAM_ID:
            await socket.send_denial_response(JSONResponse({"error": f"there is no stream {stream_id}"}, 404))
            return
        if not await self._is_admitted(socket):
            return
        loop = asyncio.get_running_loop()
        outbox = Outbox()
        page = Page(lambda message: loop.call_soon_threadsafe(outbox.put, message))
        watch = self._previews.open(stream_id, page)
        try:
            await _first_to_end(_send_all(socket, outbox), _receive(socket, watch, page, outbox))
        finally:
            self._count -= 1
            self._previews.leave(watch, page)

    async def _is_admitted(self, socket: WebSocket) -> bool:
        """Accept it, or say why not. No `await` between the question and the count."""
        if self._count >= MAX_SOCKETS:
            text = f"this console has {MAX_SOCKETS} WebSockets open already; close a page"
            await socket.send_denial_response(JSONResponse({"error": text}, 503))
            return False
        self._count += 1
        try:
            await socket.accept()
        except BaseException:
            self._count -= 1
            raise
        return True

    async def _send_state(self, socket: WebSocket) -> None:
        await socket.send_text(self._feed.hello)
        number = self._feed.number - 1  # what there is at once
        while True:
            number, text = await self._feed.after(number)
            await socket.send_text(text)


async def _send_all(socket: WebSocket, outbox: Outbox) -> None:
    while True:
        message = await outbox.get()
        if isinstance(message, str):
            await socket.send_text(message)
        else:
            await socket.send_bytes(message)


async def _receive(socket: WebSocket, watch: Watch, page: Page, outbox: Outbox) -> None:
    """Messages of a page about its preview, until it leaves or sends too many."""
    rate = MessageRate()
    while (data := await _next(socket)) is not None:
        if not rate.is_kept(monotonic_ns()):
            await socket.close(TOO_MANY, "too many messages")
            return
        try:
            watch.receive(page, messages.read(data))
        except ValueError as error:
            outbox.put(messages.text("error", text=str(error)))


async def _ignore(socket: WebSocket) -> None:
    """A page that watches the state has nothing to say."""
    rate = MessageRate()
    while await _next(socket) is not None:
        if not rate.is_kept(monotonic_ns()):
            await socket.close(TOO_MANY, "too many messages")
            return


async def _next(socket: WebSocket) -> str | bytes | None:
    """The next message; None when the page has left."""
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        return None
    data: str | bytes | None = message.get("text")
    return data if data is not None else message["bytes"]


async def _first_to_end(*jobs: Coroutine[Any, Any, None]) -> None:
    """Run all until one of them ends; the page leaving in the middle of a send is no error."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, WebSocketDisconnect):
            raise result
