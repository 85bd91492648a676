# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of docs/concepts: `python docs/pictures/concepts.py` writes ring, epoch, lease and loss as SVG.

Each picture has a light ground of its own, so that it is readable on light and on dark pages.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Final

INK: Final = "#1f2937"
GREY: Final = "#6b7280"
COLOURS: Final = {"blue": "#bfdbfe", "green": "#bbf7d0", "red": "#fecaca", "yellow": "#fde68a", "white": "#ffffff"}
WIDTH: Final = 760


class Picture:
    """Boxes, arrows and text on a light ground."""

    def __init__(self, height: int, title: str) -> None:
        self._height = height
        self._title = title
        self._parts: list[str] = []

    def box(self, x: int, y: int, width: int, height: int, text: str = "", colour: str = "white") -> None:
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{COLOURS[colour]}" stroke="{INK}"/>'
        )
        if text:
            self.text(x + width // 2, y + height // 2 + 5, text, anchor="middle")

    def text(self, x: int, y: int, text: str, *, anchor: str = "start", colour: str = INK) -> None:
        self._parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>')

    def arrow(self, x1: int, y1: int, x2: int, y2: int, *, is_dashed: bool = False) -> None:
        dashes = ' stroke-dasharray="5 4"' if is_dashed else ""
        self._parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.5"{dashes} '
            'marker-end="url(#tip)"/>'
        )

    def line(self, x1: int, y1: int, x2: int, y2: int) -> None:
        self._parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{GREY}"/>')

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" role="img" '
            f'font-family="sans-serif" font-size="14">\n<title>{escape(self._title)}</title>\n'
            f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>\n'
            f'<rect width="{WIDTH}" height="{self._height}" rx="8" fill="#f8fafc"/>\n'
        )
        return head + "\n".join(self._parts) + "\n</svg>\n"


def ring() -> Picture:
    """Eight slots; frame 12 is being written over frame 4."""
    picture = Picture(
        250, "A ring of eight slots: the producer writes frame 12 over frame 4, two consumers read behind it"
    )
    frames = [8, 9, 10, 11, 12, 5, 6, 7]
    picture.text(20, 118, "header")
    picture.text(20, 158, "payload")
    for slot, frame in enumerate(frames):
        x = 90 + 80 * slot
        colour = "yellow" if frame == 12 else "blue"
        picture.text(x + 36, 88, f"slot {slot}", anchor="middle", colour=GREY)
        picture.box(x, 98, 72, 30, f"seq {frame}", colour)
        picture.box(x, 132, 72, 44, "writing…" if frame == 12 else "frame", colour)
    picture.text(446, 30, "producer: frame 12 goes to slot 12 & 7 = 4", anchor="middle")
    picture.arrow(446, 38, 446, 72)
    picture.text(366, 236, "fast consumer: 11", anchor="middle")
    picture.arrow(366, 220, 366, 182)
    picture.text(560, 236, "slow consumer: 5 is next to go", anchor="middle")
    picture.arrow(526, 220, 526, 182)
    return picture


def epoch() -> Picture:
    """Three epochs of one stream, one after the other."""
    picture = Picture(230, "Epochs of a stream: each producer gets new files, and consumers map them")
    parts = (
        ("epoch 7", "producer A", "seq 0 … 812", "blue"),
        ("epoch 8", "no producer", "empty", "white"),
        ("epoch 9", "producer B", "seq 0 …", "green"),
    )
    for number, (name, who, frames, colour) in enumerate(parts):
        x = 20 + 245 * number
        picture.box(x, 50, 225, 92, "", colour)
        for row, text in enumerate((name, who, frames)):
            picture.text(x + 112, 76 + 25 * row, text, anchor="middle")
        picture.text(x + 112, 164, f"…/10000/{7 + number}/header.ring", anchor="middle", colour=GREY)
    for x, text in ((255, "A ends or is killed"), (500, "B attaches")):
        picture.text(x, 28, text, anchor="middle")
        picture.arrow(x, 34, x, 142)
    picture.text(20, 206, "consumer:")
    picture.text(160, 206, "reads epoch 7", anchor="middle")
    picture.arrow(216, 201, 320, 201, is_dashed=True)
    picture.text(400, 206, "maps, waits", anchor="middle")
    picture.arrow(455, 201, 555, 201, is_dashed=True)
    picture.text(622, 206, "reads epoch 9", anchor="middle")
    return picture


def lease() -> Picture:
    """A lease from the request to its end, as messages between client and driver."""
    picture = Picture(330, "The life of a lease: attach, grant, keepalives, and its end")
    picture.box(40, 16, 130, 30, "client", "blue")
    picture.box(590, 16, 130, 30, "driver", "green")
    picture.line(105, 46, 105, 316)
    picture.line(655, 46, 655, 316)
    messages = (
        (78, "attach: stream camera/front, as consumer", True),
        (112, "granted: lease 17, and the files to map", False),
        (152, "keepalive, once a second", True),
        (178, "keepalive", True),
    )
    for y, text, is_request in messages:
        picture.text(380, y - 6, text, anchor="middle")
        picture.arrow(*((110, y, 650, y) if is_request else (650, y, 110, y)))
    picture.text(380, 210, "it ends in one of three ways:", anchor="middle", colour=GREY)
    for y, text, is_request in (
        (240, "detach: the client gives it back", True),
        (304, "revoked: the driver takes it away", False),
    ):
        picture.text(380, y - 6, text, anchor="middle")
        picture.arrow(*((110, y, 650, y) if is_request else (650, y, 110, y)))
    picture.text(380, 272, "expired: no keepalive for three seconds", anchor="middle")
    return picture


def loss() -> Picture:
    """Ten frames published: which a consumer received, and why it lost the others."""
    picture = Picture(210, "Ten published frames: seven received, three lost with a reason, and every one is counted")
    lost = {3: "OVERWRITTEN", 7: "RESYNC", 8: "RESYNC"}
    picture.text(20, 48, "published")
    picture.text(20, 112, "consumer")
    for frame in range(10):
        x = 110 + 63 * frame
        picture.box(x, 28, 54, 30, str(frame), "blue")
        if frame in lost:
            picture.box(x, 92, 54, 30, "lost", "red")
        else:
            picture.box(x, 92, 54, 30, str(frame), "green")
        picture.arrow(x + 27, 60, x + 27, 88, is_dashed=frame in lost)
    picture.text(326, 146, "OVERWRITTEN", anchor="middle", colour=GREY)
    picture.text(609, 146, "RESYNC", anchor="middle", colour=GREY)
    picture.text(
        380, 186, "received 7 + lost 3 = published 10; frame 4 has dropped_before 1, frame 9 has 2", anchor="middle"
    )
    return picture


PICTURES: Final = {"ring": ring, "epoch": epoch, "lease": lease, "loss": loss}

if __name__ == "__main__":
    for name, drawn in PICTURES.items():
        Path(__file__).with_name(f"{name}.svg").write_text(drawn().svg())
