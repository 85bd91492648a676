# SPDX-License-Identifier: Apache-2.0
"""`tensorpool view --terminal`: draws the newest frame of a stream into the terminal, also over ssh.

With sixels where the terminal says that it draws them (4 among its answers to DA1), else with half blocks: a character
is two pixels, one above the other. Draws at most 15 times a second, and for at most a third of its time.
"""

from __future__ import annotations

import fcntl
import functools
import re
import struct
import sys
import termios
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from rich.color import Color
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.control import Control
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from tensorpool import pixel_formats
from tensorpool.cli import states
from tensorpool.cli.format import age, number, printable, shape
from tensorpool.cli.keyboard import Keyboard, keyboard
from tensorpool.cli.signals import StopSignals
from tensorpool.cli.sixel import sixels
from tensorpool.errors import TensorPoolError
from tensorpool.looks import Look, NotShown, Picture, drawn, look_at, pixels_of
from tensorpool.shm.arrays import Array
from tensorpool.supervisor.sampled_counter import SampledCounter
from tensorpool.supervisor.snapshot import StreamState

if TYPE_CHECKING:
    from tensorpool.client import Consumer, Frame

ANSWER_S: Final = 1.0  # how long a terminal may take to say what it can, also behind a slow line
SHORTEST_S: Final = 1 / 15  # between two pictures
AGAIN_S: Final = 1.0  # after this time a frame is drawn again: its age has changed
SHARE: Final = 1 / 3  # of the time that drawing may take
LOOK_S: Final = 0.02  # the longest time that a key or a frame waits
MAX_SIXELS: Final = 800  # pixels of a side: a few hundred kilobytes a picture
ATTEMPTS: Final = 3  # to draw a frame that is not overwritten meanwhile
LINES: Final = 2  # of text, above and below the picture
CELL: Final = (8, 16)  # pixels of a character, where the terminal does not say
BLOCK: Final = "▀"
RAMP: Final = " ░▒▓█"  # where there are no colours
_DA1: Final = re.compile(r"\x1b\[\?([\d;]*)c")
_CELL: Final = re.compile(r"\x1b\[6;(\d+);(\d+)t")


class Graphics(msgspec.Struct, frozen=True):
    """What a terminal can draw: the pixels of a character, None where it is characters only."""

    cell: tuple[int, int] | None = None


def show(consumer: Consumer, look: Look, stop: StopSignals, seconds: float | None = None) -> None:
    """Draw the newest frame until q, a signal or the end of the time; the terminal is as before then."""
    if not sys.stdout.isatty():
        raise TensorPoolError("--terminal draws into a terminal, and standard output is none")
    console = Console()
    deadline = time.monotonic() + seconds if seconds else float("inf")
    with keyboard() as keys, console.screen() as screen:
        graphics = graphics_of(keys)
        view = _View(consumer, look)
        size, drawn_at, pause_s = None, 0.0, 0.0
        while not stop.count and time.monotonic() < deadline:
            now = time.monotonic()
            is_resized = console.size != size
            if is_resized or (now - drawn_at >= pause_s and (view.take_newest() or now - drawn_at >= AGAIN_S)):
                size, drawn_at = console.size, now
                console.control(Control.home())
                if graphics.cell is None:
                    screen.update(view.page(size.width, size.height))
                else:
                    if is_resized:
                        screen.update(Text())
                    view.print_sixels(console, graphics.cell)
                pause_s = max(SHORTEST_S, (time.monotonic() - now) / SHARE)
            if "q" in keys.read(LOOK_S):
                break


def graphics_of(keys: Keyboard) -> Graphics:
    """Ask the terminal. One that does not answer has half blocks."""
    answer = keys.ask("\x1b[16t\x1b[c", lambda text: _DA1.search(text) is not None, ANSWER_S)
    attributes = _DA1.search(answer)
    if attributes is None or "4" not in attributes[1].split(";"):
        return Graphics()
    rows, columns, width, height = struct.unpack("HHHH", fcntl.ioctl(sys.stdout, termios.TIOCGWINSZ, b"\0" * 8))
    if rows and columns and width >= columns and height >= rows:
        return Graphics((width // columns, height // rows))
    said = _CELL.search(answer)
    return Graphics((max(1, int(said[2])), max(1, int(said[1]))) if said else CELL)


class HalfBlocks:
    """A picture in characters, for rich: each is the upper half of its cell in one colour, the lower in another."""

    def __init__(self, pixels: Array) -> None:
        height, width = pixels.shape[:2]
        colour = pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, axis=-1)
        few = (colour.astype(np.uint32) * 31 + 127) // 255  # of 5 bits: pairs of colours that come again are kept
        packed = few[..., 0] << 10 | few[..., 1] << 5 | few[..., 2]
        if height % 2:
            packed = np.vstack([packed, np.zeros((1, width), np.uint32)])
        self.cells: Final = packed[0::2] << 15 | packed[1::2]
        self.pixels: Final = pixels

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        has_colours = console.color_system is not None
        for row in self.cells:
            starts = np.flatnonzero(np.diff(row, prepend=row[0] + 1))
            for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(row)], strict=True):
                pair = int(row[start])
                if has_colours:
                    yield Segment(BLOCK * (end - start), _style(pair))
                else:
                    yield Segment(_shade(pair) * (end - start))
            yield Segment.line()


@functools.lru_cache(maxsize=1 << 16)
def _style(pair: int) -> Style:
    upper, lower = (Color.from_rgb(*_rgb(pair >> shift)) for shift in (15, 0))
    return Style(color=upper, bgcolor=lower)


def _rgb(packed: int) -> tuple[int, int, int]:
    return (packed >> 10 & 31) * 255 // 31, (packed >> 5 & 31) * 255 // 31, (packed & 31) * 255 // 31


def _shade(pair: int) -> str:
    light = sum(sum(_rgb(pair >> shift)) for shift in (15, 0)) / 6
    return RAMP[round(light / 255 * (len(RAMP) - 1))]


class _View:
    """The newest frame of a stream, as pictures and lines of text."""

    def __init__(self, consumer: Consumer, look: Look) -> None:
        self._consumer = consumer
        self._look = look
        self._frame: Frame | None = None
        self._seqs = SampledCounter()

    def take_newest(self) -> bool:
        """Whether there is another frame than before."""
        frame, before = self._consumer.latest(), self._frame
        if frame is None:
            return False
        is_new = before is None or (frame.epoch, frame.seq) != (before.epoch, before.seq)
        if before is not None and frame.epoch != before.epoch:
            self._seqs.clear()
        self._seqs.add(time.monotonic_ns(), frame.seq)
        self._frame = frame
        return is_new

    def page(self, width: int, height: int) -> RenderableType:
        """For a terminal of so many characters."""
        lines = max(1, height - LINES)
        pixels, picture, why = self._pixels(width, 2 * lines)
        drawing: RenderableType = Text(why) if pixels is None else HalfBlocks(pixels)
        blank = lines - (1 if pixels is None else -(-pixels.shape[0] // 2))
        return Group(self._head(picture), drawing, *[Text() for _ in range(blank)], self._foot())

    def print_sixels(self, console: Console, cell: tuple[int, int]) -> None:
        """Write over what was drawn before."""
        columns, lines = console.size.width, max(1, console.size.height - LINES)
        room = min(columns * cell[0], MAX_SIXELS), min(lines * cell[1], MAX_SIXELS)
        pixels, picture, why = self._pixels(*room)
        console.control(Control.home())
        self._print_line(console, self._head(picture))
        if pixels is None:
            self._print_line(console, Text(why))
        else:
            console.file.write(sixels(pixels).decode("ascii"))
        console.control(Control.move_to(0, lines + 1))
        self._print_line(console, self._foot(), end="")
        console.file.flush()

    def _print_line(self, console: Console, line: Text, end: str = "\n") -> None:
        line.truncate(console.size.width - 1, pad=True)
        console.print(line, end=end, no_wrap=True)

    def _pixels(self, width: int, height: int) -> tuple[Array | None, Picture | None, str]:
        """Of the newest frame, as large as fits; or why there are none."""
        fitting = {"width": min(width, self._look.width), "height": min(height, self._look.height)}
        look = msgspec.structs.replace(self._look, **fitting)
        for _ in range(ATTEMPTS):
            self.take_newest()
            frame = self._frame
            if frame is None:
                return None, None, "waiting for the first frame"
            metadata = self._consumer.metadata(frame.meta_version, epoch=frame.epoch)
            stated = pixel_formats.stated(None if metadata is None else metadata.attributes)
            try:
                picture = look_at(pixels_of(frame), look, stated)
            except NotShown as error:
                return None, None, str(error)
            if frame.is_intact():
                pixels = drawn(picture, width, height)
                times = max(1, min(width // pixels.shape[1], height // pixels.shape[0]))
                return pixels.repeat(times, axis=0).repeat(times, axis=1), picture, ""
        return None, None, "each frame is overwritten while it is drawn: the ring turns too fast"

    def _head(self, picture: Picture | None) -> Text:
        consumer, frame = self._consumer, self._frame
        line = Text(
            printable(consumer.name or str(consumer.stream_id)), style="bold", no_wrap=True, overflow="ellipsis"
        )
        line.append_text(Text("  ").append_text(states.shown(self._state())))
        if frame is not None:
            old = "" if frame.age_ns is None else f"  {age(frame.age_ns / 1e9)} old"
            rate_hz = self._seqs.rate_hz()
            rate = "" if rate_hz is None else f"{number(rate_hz)} Hz  "
            line.append(f"  {rate}{shape(frame.shape)} {frame.numpy_dtype}  seq {frame.seq}{old}")
        if picture is not None:
            line.append(f"  {picture.low:g} to {picture.high:g}")
        return line

    def _foot(self) -> Text:
        return Text("q or Ctrl-C ends", style=states.QUIET, no_wrap=True, overflow="ellipsis")

    def _state(self) -> StreamState:
        if not self._consumer.is_active:
            return StreamState.NO_PRODUCER if self._frame is None else StreamState.STALE
        if self._frame is None:
            return StreamState.IDLE
        return StreamState.LIVE if self._seqs.rate_hz() != 0.0 else StreamState.IDLE
