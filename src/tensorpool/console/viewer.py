# SPDX-License-Identifier: Apache-2.0
"""One page that watches one stream: what it wants to see, and whether it may be sent a picture now.

    look ──► ready ──picture──► in flight ──ack──► ready          pause ──► holds a copy ──step──► the next one
                                                                  resume ──► live

One picture is in flight at a time, so a page that stalls gets none and is owed none. Holds no clock and does no IO.
"""

from __future__ import annotations

import msgspec

from tensorpool.console.messages import Ack, FromPage, Pause, Resume, SetHistogram, SetLook, Step
from tensorpool.looks import Look

type FrameKey = tuple[int, int]  # epoch and seq


class Wish(msgspec.Struct, frozen=True):
    """How a page looks at frames. Pages with equal wishes share a picture."""

    look: Look
    has_histogram: bool = False


class Viewer:
    """The state of one page."""

    def __init__(self) -> None:
        self.is_paused = False
        self.held: FrameKey | None = None  # the copy that a paused page looks at
        self.shown: FrameKey | None = None  # of the last picture
        self.skipped = 0  # frames between the last picture and the one before it
        self.number = 0  # pictures sent
        self.served_ns = 0  # when a picture was last made for it, or tried
        self.status = ""
        self._look: Look | None = None
        self._has_histogram = False
        self._acked = 0
        self._steps = False
        self._drawn: tuple[FrameKey, Wish] | None = None

    @property
    def wish(self) -> Wish | None:
        """None before the first look."""
        return None if self._look is None else Wish(self._look, self._has_histogram)

    @property
    def is_ready(self) -> bool:
        """Whether it may be sent a picture."""
        return self._look is not None and self._acked >= self.number

    @property
    def is_live(self) -> bool:
        """Whether it waits for the next frame."""
        return self.is_ready and not self.is_paused

    def on_message(self, message: FromPage) -> None:
        match message:
            case SetLook(look):
                self._look = look
                self.status = ""  # another look may work, or say again why it does not
            case Ack(number):
                self._acked = max(self._acked, min(number, self.number))
            case Pause():
                self.is_paused = True
            case Resume():
                self.is_paused, self.held, self._steps = False, None, False
            case Step():
                self.is_paused, self._steps = True, True
            case SetHistogram(on):
                self._has_histogram = on
            case _:
                pass

    def wants_copy(self, newest: FrameKey) -> bool:
        """Whether it is paused and needs a copy of the newest frame: the first one, or the next after a step."""
        return self.is_paused and (self.held is None or (self._steps and newest != self.held))

    def hold(self, key: FrameKey) -> None:
        """A copy was made for it."""
        self.held, self._steps = key, False

    def picture_of(self, newest: FrameKey | None) -> FrameKey | None:
        """The frame that it should be sent a picture of now; None: it waits, or has seen this one in this way."""
        key = self.held if self.is_paused else newest
        if key is None or not self.is_ready or self._drawn == (key, self.wish):
            return None
        return key

    def on_picture(self, key: FrameKey, wish: Wish, now_ns: int) -> None:
        """It was sent this picture."""
        before, self.shown = self.shown, key
        is_later = before is not None and before[0] == key[0] and key[1] > before[1]
        self.skipped = key[1] - before[1] - 1 if is_later and before is not None else 0
        self.number += 1
        self.status = ""
        self.on_tried(key, wish, now_ns)

    def on_tried(self, key: FrameKey, wish: Wish, now_ns: int) -> None:
        """This frame is not drawn again in this way, and others are served first."""
        self.served_ns = now_ns
        self._drawn = key, wish

    def new_status(self, text: str) -> bool:
        """Whether the page was not sent this text already."""
        is_new = text != self.status
        self.status = text
        return is_new
