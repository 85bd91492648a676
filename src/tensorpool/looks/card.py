# SPDX-License-Identifier: Apache-2.0
"""A frame in a notebook: a small table of what it is, and its picture."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Protocol

import msgspec

from tensorpool import pixel_formats
from tensorpool.errors import MissingExtra, install_command
from tensorpool.looks.frames import FrameLike, pixels_of
from tensorpool.looks.look import Look, NotShown
from tensorpool.looks.pictures import LINE, PICTURE, drawn, encode, look_at

LOOK: Final = Look(width=480, height=480)
LINE_SIZE: Final = (480, 160)
SMALL: Final = 240  # pixels: what is smaller is enlarged


class ShownFrame(FrameLike, Protocol):
    """What a card says about a live or recorded frame."""

    @property
    def seq(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def time(self) -> datetime | None: ...
    @property
    def dtype(self) -> Any: ...


class Card(msgspec.Struct, frozen=True):
    """Lines of a table, and a picture or why there is none."""

    rows: dict[str, str]
    png: bytes | None
    note: str = ""

    def without_picture(self, why: str) -> Card:
        return Card(self.rows, None, why)

    @property
    def html(self) -> str:
        """Takes its colours from the page; loads nothing."""
        lines = "".join(
            f'<tr><th style="text-align:left;font-weight:600">{html.escape(name)}</th>'
            f'<td style="text-align:left">{html.escape(value)}</td></tr>'
            for name, value in self.rows.items()
        )
        picture = ""
        if self.png is not None:
            data = base64.b64encode(self.png).decode()
            picture = f'<img alt="the frame" style="max-width:100%" src="data:image/png;base64,{data}">'
        note = f"<div><em>{html.escape(self.note)}</em></div>" if self.note else ""
        return f'<div><table style="margin:0 0 0.5em 0">{lines}</table>{picture}{note}</div>'


def card(frame: ShownFrame, stream: str, attributes: Mapping[str, Any] | None) -> Card:
    """Of a frame of `stream`, whose metadata have `attributes`."""
    rows = {
        "stream": stream.removeprefix("stream "),
        "seq": f"{frame.seq} of epoch {frame.epoch}",
        "time": "unknown" if frame.time is None else frame.time.isoformat(sep=" ", timespec="milliseconds"),
        "shape": "x".join(map(str, frame.shape)) or "scalar",
        "dtype": str(frame.dtype),
    }
    try:
        picture = look_at(pixels_of(frame), LOOK, pixel_formats.stated(attributes))
        if picture.kind == LINE or picture.high != 255 or picture.low:
            rows["values"] = f"{picture.low:g} to {picture.high:g}"
        if picture.axes:
            chosen = ", ".join(str(length // 2) for length in picture.axes)
            rows["shown"] = f"slice {chosen} of {'x'.join(map(str, picture.axes))}"
        pixels = drawn(picture, *LINE_SIZE)
        times = max(1, SMALL // max(pixels.shape[:2]))
        enlarged = pixels.repeat(times, axis=0).repeat(times, axis=1)
        shown = msgspec.structs.replace(picture, pixels=enlarged, kind=PICTURE)
        return Card(rows, encode(shown, lossless=True)[1])
    except NotShown as error:
        return Card(rows, None, str(error))
    except MissingExtra:
        return Card(rows, None, f"for a picture: {install_command('notebook')}")
