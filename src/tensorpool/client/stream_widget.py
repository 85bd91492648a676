# SPDX-License-Identifier: Apache-2.0
"""A live stream in a notebook: `consumer.widget()`.

    browser                                kernel
    shown, not paused: next {view} ──────► a consumer of its own, attached by the first request
    picture in place, again: next ◄─────── the newest frame as a JPEG, or what it waits for
    hidden, paused, closed: nothing        no request for IDLE_S: the consumer is closed

A view asks for each picture, so at most one is on its way to it, and none to a hidden view. Everything runs
on the event loop that receives the requests: no thread, and no work while there is no request.
"""

from __future__ import annotations

import asyncio
import time
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tensorpool import extras, pixel_formats
from tensorpool.errors import LocalProtocolError, TensorPoolError
from tensorpool.looks import Look, NotShown, encode, look_at, pixels_of
from tensorpool.looks.colormaps import NAMES as COLORMAPS
from tensorpool.looks.pictures import LINE, PICTURE, drawn

if TYPE_CHECKING:
    from tensorpool.client.client import Client
    from tensorpool.client.consumer import Consumer
    from tensorpool.client.frame import Frame

extras.require("consumer.widget()", "notebook", "anywidget", "PIL")

import anywidget  # noqa: E402
import traitlets  # noqa: E402

PERIOD_S: Final = 0.05  # between two looks at the stream, and hence between two pictures
ANSWER_S: Final = 1.0  # a view gets an answer within this time, a picture or not: it sees that the kernel lives
IDLE_S: Final = 3.0
ATTACH_S: Final = 0.5  # cells wait for it
RETRY_S: Final = 5.0
MAX_VIEWS: Final = 16
MAX_WIDTH: Final = 1280
LINE_SIZE: Final = (640, 240)


class Request(msgspec.Struct, frozen=True):
    """A view wants a picture that it does not show yet, `width` pixels wide."""

    view: str
    width: int = 640
    asked_at: float = 0.0  # by our clock


class StreamWidget(anywidget.AnyWidget):
    """Shows the newest frames of a stream. Made by `Consumer.widget`; `colormap` and `is_paused` can be set."""

    _esm = files("tensorpool.client").joinpath("stream_widget.js").read_text()
    _css = files("tensorpool.client").joinpath("stream_widget.css").read_text()
    stream = traitlets.Unicode().tag(sync=True)
    colormaps = traitlets.List(traitlets.Unicode(), list(COLORMAPS)).tag(sync=True)
    colormap = traitlets.Enum(COLORMAPS, "gray").tag(sync=True)
    is_paused = traitlets.Bool(False).tag(sync=True)

    def __init__(self, client: Client, stream_id: int, name: str | None) -> None:
        self._client = client
        self._stream_id = stream_id
        self._consumer: Consumer | None = None
        self._retry_at = 0.0  # an attach, after one that failed
        self._failure = ""
        self._requests: dict[str, Request] = {}  # without an answer, by view
        self._shown: dict[str, tuple[int, int, str]] = {}  # what each view shows: epoch, seq, colour map
        self._asked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        super().__init__(stream=name or str(stream_id))
        self.on_msg(self._on_request)

    def close(self) -> None:
        """End it; the views stay with their last picture."""
        self._stop()
        super().close()

    # --- inside

    def _on_request(self, _: object, content: Any, __: object) -> None:
        now = self._asked_at = time.monotonic()
        try:
            request = msgspec.structs.replace(msgspec.convert(content, Request), asked_at=now)
        except msgspec.ValidationError:
            return
        if request.view in self._requests or len(self._requests) < MAX_VIEWS:
            self._requests[request.view] = request
        if self._timer is None:
            self._tick(asyncio.get_running_loop())

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer what can be answered; again soon, until there was no request for a while."""
        now = time.monotonic()
        if now - self._asked_at > IDLE_S:
            self._stop()
            return
        if self._requests:
            self._answer(now)
        self._timer = loop.call_later(PERIOD_S, self._tick, loop)

    def _answer(self, now: float) -> None:
        frame = self._newest(now)
        for view, request in list(self._requests.items()):
            why = self._failure or "waiting for the first frame"
            if frame is not None:
                showing = frame.epoch, frame.seq, self.colormap
                why = "no new frame" if self._shown.get(view) == showing else self._send_picture(frame, request)
                if not why:
                    self._shown[view] = showing
            is_late = now - request.asked_at >= ANSWER_S
            if why and is_late:
                self.send({"view": view, "text": why})
            if is_late or not why:
                del self._requests[view]

    def _newest(self, now: float) -> Frame | None:
        if self._consumer is None and now >= self._retry_at:
            try:
                self._consumer = self._client.consumer(self._stream_id, timeout=ATTACH_S)
                self._failure = ""
            except TensorPoolError as error:
                self._failure, self._retry_at = str(error), now + RETRY_S
        return None if self._consumer is None else self._consumer.latest()

    def _send_picture(self, frame: Frame, request: Request) -> str:
        """Empty, or why there is no picture of the frame."""
        metadata = self._consumer.metadata(frame.meta_version, epoch=frame.epoch) if self._consumer else None
        stated = pixel_formats.stated(None if metadata is None else metadata.attributes)
        width = min(max(request.width, 64), MAX_WIDTH)
        try:
            picture = look_at(pixels_of(frame), Look(width=width, height=width, colormap=self.colormap), stated)
        except NotShown as error:
            return str(error)
        pixels = drawn(picture, *LINE_SIZE)
        if not frame.is_intact():
            return "the frame was overwritten while it was drawn"
        is_line = picture.kind == LINE
        _, data = encode(msgspec.structs.replace(picture, pixels=pixels, kind=PICTURE), lossless=is_line)
        about = {
            "view": request.view,
            "media": "image/png" if is_line else "image/jpeg",
            "seq": frame.seq,
            "about": f"{'x'.join(map(str, frame.shape)) or 'scalar'} {frame.numpy_dtype}",
            "values": f"{picture.low:g} to {picture.high:g}",
            "is_colour": pixels.ndim == 3 and self.colormap == "gray",
            "time": None if frame.time is None else frame.time.timestamp(),
        }
        self.send(about, [data])
        return ""

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._requests.clear()
        self._shown.clear()
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()


def widget_of(client: Client, stream_id: int, name: str | None) -> StreamWidget:
    """A widget that shows a stream of a client. Raises LocalProtocolError for a client that has no thread."""
    if client._invoker is not None:
        raise LocalProtocolError('a widget needs a client with a thread: connect() without conductor="invoked"')
    return StreamWidget(client, stream_id, name)
