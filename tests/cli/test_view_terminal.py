# SPDX-License-Identifier: Apache-2.0
"""A stream in a terminal: half blocks and sixels show the published pixels, on any terminal, until q or a signal."""

from __future__ import annotations

import os
import re
import signal
import termios
from collections.abc import Iterator

import numpy as np
import pytest
from rich.console import Console

import tensorpool as tp
from tensorpool.cli.sixel import sixels
from tensorpool.cli.view_terminal import HalfBlocks
from tensorpool.shm.arrays import Array
from tests.cli.conftest import Shell
from tests.support.terminals import read_until, resize, terminal

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
LEAVE = b"\x1b[?1049l"  # the page of its own, and the cursor
CURSOR = b"\x1b[?25h"
ASKED = b"\x1b[c"
PROGRAM = """
import sys, tensorpool as tp
from tensorpool.cli.signals import StopSignals
from tensorpool.cli.view_terminal import show
from tensorpool.looks import Look
stop = StopSignals()
with tp.connect() as client, client.consumer(sys.argv[1]) as consumer:
    show(consumer, Look(), stop)
print("ended in order")
"""


def quarters(height: int, width: int) -> Array:
    """Red and green above, blue and white below."""
    array = np.zeros((height, width, 3), np.uint8)
    for (top, left), colour in zip(((0, 0), (0, 1), (1, 0), (1, 1)), (RED, GREEN, BLUE, WHITE), strict=True):
        rows, columns = slice(top * height // 2, None), slice(left * width // 2, None)
        array[rows, columns] = colour
    return array


@pytest.fixture(scope="module")
def stream(client: tp.Client) -> Iterator[tp.Producer]:
    with client.producer("view/front", create=True) as producer:
        producer.publish(quarters(64, 64))
        yield producer


# --- as a user sees it


type Colour = tuple[int, int, int]


def cells(data: bytes) -> list[list[tuple[Colour, Colour]]]:
    """The colours of half blocks, upper and lower, of the last page in what a terminal got."""
    page = data.decode().rpartition("\x1b[H")[2]
    lines = []
    for line in page.splitlines():
        found = re.findall(r"\x1b\[38;2;(\d+);(\d+);(\d+);48;2;(\d+);(\d+);(\d+)m(▀+)", line)
        row = [((int(a), int(b), int(c)), (int(d), int(e), int(f))) for a, b, c, d, e, f, run in found for _ in run]
        lines += [row] if row else []
    return lines


def test_half_blocks_on_a_terminal_that_answers_nothing(shell: Shell, stream: tp.Producer) -> None:
    """It does not wait for an answer; the picture has the published colours, q ends it, the terminal is as before."""
    environment = {**shell.environment, "COLORTERM": "truecolor"}
    with terminal(environment, "-c", PROGRAM, "view/front", rows=22, columns=60) as (process, screen):
        before = termios.tcgetattr(screen)
        found = read_until(screen, ASKED, b"q or Ctrl-C ends")
        assert b"view/front" in found
        assert b"64x64x3 uint8  seq 0" in found
        drawing = cells(found)
        assert (len(drawing), {len(row) for row in drawing}) == (16, {32})
        assert drawing[0][0] == drawing[7][15] == (RED, RED)
        assert drawing[0][31] == (GREEN, GREEN)
        assert drawing[8][0] == (BLUE, BLUE)
        assert drawing[15][31] == (WHITE, WHITE)
        os.write(screen, b"q")
        rest = read_until(screen, b"ended in order")
        assert LEAVE in rest
        assert CURSOR in rest
        assert process.wait(60) == 0
        assert termios.tcgetattr(screen) == before


def test_new_frames_and_new_sizes_are_drawn(shell: Shell, client: tp.Client) -> None:
    """A frame that is published while it runs replaces the one before; a smaller window gets a smaller picture."""
    environment = {**shell.environment, "COLORTERM": "truecolor"}
    with client.producer("view/moving", create=True) as producer:
        producer.publish(np.full((40, 40), 255, np.uint8))
        with terminal(environment, "-c", PROGRAM, "view/moving", rows=22, columns=60) as (process, screen):
            found = read_until(screen, ASKED, b"q or Ctrl-C ends")
            assert cells(found)[0][0] == (WHITE, WHITE)
            producer.publish(np.zeros((40, 40), np.uint8))
            found = read_until(screen, b"seq 1", b"q or Ctrl-C ends")
            assert b"\x1b[H\x1b[1mview/moving" in found  # in the place of the picture before
            assert {cell for row in cells(found) for cell in row} == {((0, 0, 0), (0, 0, 0))}
            resize(screen, 12, 30)
            process.send_signal(signal.SIGWINCH)
            while len(cells(found)) != 10:
                found = read_until(screen, b"q or Ctrl-C ends")
            resize(screen, 12, 90)
            producer.publish(np.arange(5))
            read_until(screen, b"5 int64  seq 2")
            process.send_signal(signal.SIGINT)
            rest = read_until(screen, b"ended in order")
            assert LEAVE in rest
            assert b"Traceback" not in rest
            assert process.wait(60) == 0


def test_sixels_where_the_terminal_draws_them(shell: Shell, stream: tp.Producer) -> None:
    """4 among the attributes that it answers to DA1: the pixels arrive as they were published."""
    with terminal(shell.environment, "-c", PROGRAM, "view/front", rows=30, columns=90) as (process, screen):
        read_until(screen, ASKED)
        os.write(screen, b"\x1b[6;16;8t\x1b[?62;4;22c")
        found = read_until(screen, b"\x1bP", b"\x1b\\")
        drawing = decoded(found[found.index(b"\x1bP") :])
        assert "▀".encode() not in found
        assert drawing.shape == (448, 448, 3)  # seven times as large: of 30 lines of 16 pixels two are text
        assert (drawing == quarters(448, 448)).all()
        process.send_signal(signal.SIGTERM)
        rest = read_until(screen, b"ended in order")
        assert LEAVE in rest
        assert process.wait(60) == 0


def test_without_sixels_a_terminal_that_answers_gets_half_blocks_at_once(shell: Shell, stream: tp.Producer) -> None:
    """44 is not 4."""
    with terminal(shell.environment, "-c", PROGRAM, "view/front", rows=30, columns=90) as (_, screen):
        read_until(screen, ASKED)
        os.write(screen, b"\x1b[?64;1;44;22c")
        assert b"\x1bP" not in read_until(screen, "▀".encode(), b"q or Ctrl-C ends")


def test_a_stream_without_frames_says_what_it_waits_for(shell: Shell, client: tp.Client) -> None:
    """And shows the first one when it comes."""
    with (
        client.producer("view/later", create=True) as producer,
        terminal(shell.environment, "-c", PROGRAM, "view/later", rows=10, columns=60) as (_, screen),
    ):
        read_until(screen, b"waiting for the first frame")
        producer.publish(np.zeros((4, 4), np.float32))
        read_until(screen, b"4x4 float32  seq 0")


def test_it_needs_a_terminal(shell: Shell, stream: tp.Producer, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe is refused in one sentence."""
    from tensorpool.cli.signals import StopSignals
    from tensorpool.cli.view_terminal import show
    from tensorpool.looks import Look

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with (
            shell.pool.connect() as client,
            client.consumer("view/front") as consumer,
            pytest.raises(tp.TensorPoolError, match="draws into a terminal, and standard output is none"),
        ):
            show(consumer, Look(), StopSignals())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- the drawing itself


def decoded(data: bytes) -> Array:
    """The picture of a sixel sequence, as a terminal draws it; -1 where it draws nothing."""
    body = data.removeprefix(b"\x1bP0;1q").partition(b"\x1b\\")[0].decode()
    raster = re.match(r'"1;1;(\d+);(\d+)', body)
    assert raster is not None
    width, height = int(raster[1]), int(raster[2])
    canvas = np.full((-(-height // 6) * 6, width, 3), -1)
    colours: dict[int, list[int]] = {}
    x = y = colour = 0
    for token in re.findall(r"#\d+;2;\d+;\d+;\d+|#\d+|!\d+.|[?-~]|\$|-", body[raster.end() :]):
        if token == "$":
            x = 0
        elif token == "-":
            x, y = 0, y + 6
        elif ";" in token:
            number, _, *shares = map(int, token[1:].split(";"))
            colours[number] = [round(share * 2.55) for share in shares]
        elif token[0] == "#":
            colour = int(token[1:])
        else:
            count, bits = (int(token[1:-1]), ord(token[-1]) - 63) if token[0] == "!" else (1, ord(token) - 63)
            for row in range(6):
                if bits >> row & 1:
                    canvas[y + row, x : x + count] = colours[colour]
            x += count
    return canvas[:height]


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (6, 4), (13, 30)])
def test_sixels_of_grey_pictures(shape: tuple[int, int]) -> None:
    """Of any size; each pixel within two shades, all of them drawn."""
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    assert np.abs(decoded(sixels(pixels)) - pixels[..., None]).max() <= 2


def test_sixels_of_colours_have_the_right_mean() -> None:
    """A colour that is not among the 252 is mixed of its neighbours."""
    pixels = np.tile(np.array([100, 30, 222], np.uint8), (32, 32, 1))
    drawing = decoded(sixels(pixels))
    assert len(np.unique(drawing.reshape(-1, 3), axis=0)) > 1
    assert np.abs(drawing.mean(axis=(0, 1)) - pixels[0, 0]).max() < 3


def rendered(pixels: Array, **options: str | None) -> list[str]:
    console = Console(width=80, force_terminal=True, legacy_windows=False, **options)  # type: ignore[arg-type]
    with console.capture() as capture:
        console.print(HalfBlocks(pixels), end="")
    return capture.get().splitlines()


def test_half_blocks_by_hand() -> None:
    """Neighbours of one colour are one run; the lower half of an odd last line is black."""
    pixels = np.array([[255, 255, 0], [0, 0, 255], [255, 0, 0]], np.uint8)
    white, black = "255;255;255", "0;0;0"
    assert rendered(pixels, color_system="truecolor") == [
        f"\x1b[38;2;{white};48;2;{black}m▀▀\x1b[0m\x1b[38;2;{black};48;2;{white}m▀\x1b[0m",
        f"\x1b[38;2;{white};48;2;{black}m▀\x1b[0m\x1b[38;2;{black};48;2;{black}m▀▀\x1b[0m",
    ]
    assert rendered(pixels, color_system=None) == ["▒▒▒", "▒  "]
    assert rendered(pixels, color_system="standard")[0].count("▀") == 3
