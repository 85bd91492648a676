# SPDX-License-Identifier: Apache-2.0
"""`tensorpool top`: once, as JSON, live on a terminal of any size, and where there is nothing to see."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import tensorpool as tp
from tensorpool.cli.overview import Page, render
from tensorpool.supervisor.config import SupervisorConfig
from tensorpool.supervisor.view import View
from tensorpool.wire.control import DataSourceAnnounce, QosProducer
from tests.cli.conftest import Shell
from tests.support.messages import announce, consumer_qos
from tests.support.processes import ROOT
from tests.support.terminals import read_until, terminal

S = 1_000_000_000
EPOCH = 1_794_812_572_954_192_273


@pytest.fixture(scope="module")
def scene(client: tp.Client) -> Iterator[tuple[tp.Producer, tp.Consumer]]:
    """A stream that moved, with a reader that never reads."""
    with client.producer("top/front", create=True) as producer, client.consumer(producer.stream_id) as consumer:
        producer.wait_for_consumers()
        for _ in range(50):
            producer.publish(np.zeros((8, 16), np.float32))
        yield producer, consumer


def test_once_prints_streams_consumers_and_services(shell: Shell, scene: tuple[tp.Producer, tp.Consumer]) -> None:
    """As text, in this process: what moves, who reads it, how far behind."""
    producer, consumer = scene
    code, output = shell.run_here("top", "--once")
    assert code == 0, output
    assert re.search(rf"^top/front\s+{producer.stream_id}\s.*8x16 float32", output, re.M), output
    assert re.search(rf"^top/front\s+{consumer.consumer_id}\s+49\s", output, re.M), output
    assert re.search(r"^service:driver:\S+\s.*running", output, re.M), output
    assert "LATEST CHANGES" in output
    assert re.search(r"\d+ streams? .*\d+ consumers?  1 lagging", output), output


def test_json_is_the_view(shell: Shell, scene: tuple[tp.Producer, tp.Consumer]) -> None:
    """One object a line."""
    producer, consumer = scene
    code, output = shell.run_here("top", "--once", "--json", "--seconds", "1")
    assert code == 0
    view = json.loads(output)
    (stream,) = [it for it in view["streams"] if it["stream_id"] == producer.stream_id]
    assert (stream["name"], stream["seq"], stream["consumers"]) == ("top/front", 49, 1)
    (reader,) = [it for it in view["consumers"] if it["consumer_id"] == consumer.consumer_id]
    assert (reader["lag"], reader["state"]) == (49, "lagging")
    code, output = shell.run_here("top", "--json", "--every", "0.1", "--seconds", "2")
    assert code == 0
    assert len([json.loads(line) for line in output.splitlines()]) >= 3


def test_without_a_media_driver_it_says_what_to_do(shell: Shell, shm_dir: Path) -> None:
    """Exit code 1, one line."""
    for command in (["top", "--once"], ["hz", "7"]):
        code, output = shell.run_here(*command, "--aeron-dir", str(shm_dir))
        assert code == 1
        assert re.fullmatch(r"error: no media driver is alive at .*; start one \(`tensorpool driver`\).*\n", output)


def test_without_a_driver_it_says_so(shell: Shell, shm_dir: Path) -> None:
    """A media driver alone announces nothing."""
    from tensorpool import aeron

    with aeron.MediaDriver(str(shm_dir / "aeron")) as driver:
        code, output = shell.run_here("top", "--once", "--seconds", "0.3", "--aeron-dir", driver.aeron_dir)
    assert code == 0
    assert "0 streams" in output
    assert "no stream is announced here. Is an SHM driver (`tensorpool driver`) running" in output


def test_live_on_a_terminal_until_q(shell: Shell, scene: tuple[tp.Producer, tp.Consumer]) -> None:
    """The page comes, q ends it with code 0, and the terminal is as it was before."""
    with terminal(shell.environment, "-m", "tensorpool", "top", "--every", "0.2", rows=30, columns=100) as (
        process,
        screen,
    ):
        before = termios.tcgetattr(screen)
        found = read_until(screen, b"CONSUMERS")
        assert b"\x1b[?1049h" in found  # a page of its own
        os.write(screen, b"xq")
        rest = read_until(screen, b"\x1b[?1049l")
        assert process.wait(60) == 0, rest
        assert termios.tcgetattr(screen) == before


def test_live_until_ctrl_c(shell: Shell, scene: tuple[tp.Producer, tp.Consumer]) -> None:
    """Code 0, no traceback."""
    with terminal(shell.environment, "-m", "tensorpool", "top", rows=12, columns=40) as (process, screen):
        read_until(screen, b"STREAMS")
        process.send_signal(signal.SIGINT)
        rest = read_until(screen, b"\x1b[?1049l")
        assert b"Traceback" not in rest
        assert process.wait(60) == 0


# --- the page, without a terminal


def crowd(streams: int = 3, consumers: int = 4) -> View:
    """Streams and consumers, one of which lags."""
    view = View(SupervisorConfig.load(environ={}))
    for second in range(5):
        for stream_id in range(1, streams + 1):
            message = announce(stream_id, producer_id=7, epoch=EPOCH, announce_timestamp_ns=second * S, pools={})
            view.on_message(message, second * S)
            named = DataSourceAnnounce(
                stream_id=stream_id,
                producer_id=7,
                epoch=EPOCH,
                meta_version=0,
                name=f"a/rather/long/name/of/a/camera/{stream_id}",
            )
            view.on_message(named, second * S)
            view.on_message(
                QosProducer(stream_id=stream_id, producer_id=7, epoch=EPOCH, current_seq=100 * second),
                second * S,
            )
        for consumer_id in range(1, consumers + 1):
            behind = 90 if consumer_id == consumers and second == 4 else 0
            qos = consumer_qos(1, consumer_id, epoch=EPOCH, last_seq_seen=100 * second - behind)
            view.on_message(qos, second * S)
        view.tick(second * S)
    return view


def page_of(view: View, width: int, height: int | None, notice: str = "") -> list[str]:
    console = Console(width=width, height=height, color_system=None, force_terminal=False)
    page = Page(aeron_dir="/dev/shm/aeron", wall_ns=1_000 * S, width=width, height=height, notice=notice)
    with console.capture() as capture:
        console.print(render(view.snapshot(4 * S), page))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 200])
@pytest.mark.parametrize("height", [8, 12, 20, 24, 40, None])
def test_a_page_fits_its_terminal(width: int, height: int | None) -> None:
    """Never wider, never higher; streams first, the consumer in trouble before those that are fine."""
    lines = page_of(crowd(streams=10, consumers=20), width, height)
    assert max(map(len, lines)) <= width
    if height is not None:
        assert len(lines) <= height
    text = "\n".join(lines)
    assert "STREAMS" in text
    if height is None:
        assert text.count("a/rather") >= 30
    if "CONSUMERS" in text:
        consumers = lines[next(index for index, line in enumerate(lines) if line.startswith("CONSUMERS")) + 2 :]
        assert re.search(r"\b20\b", consumers[0])
        assert "90" in consumers[0]


def test_what_is_left_out_is_counted() -> None:
    """So that the reader does not take a part for the whole."""
    text = "\n".join(page_of(crowd(streams=10, consumers=20), 100, 24))
    assert re.search(r"^CONSUMERS  … \d+ more$", text, re.M), text


def test_what_peers_say_cannot_reach_the_terminal() -> None:
    """Escape sequences and newlines in names are shown, not obeyed; markup is text."""
    view = crowd(1, 1)
    evil = "\x1b[2J\n[red]x[/red]"
    view.on_message(
        DataSourceAnnounce(stream_id=1, producer_id=7, epoch=EPOCH, meta_version=0, name=evil),
        4 * S,
    )
    text = "\n".join(page_of(view, 120, None))
    assert "\x1b" not in text
    assert r"\x1b[2J\n[red]x[/red]" in text


def test_a_notice_is_shown_in_full() -> None:
    """Folded, where it is longer than the terminal is wide."""
    words = "no stream is announced here. Is an SHM driver running, at this directory?"
    lines = page_of(View(SupervisorConfig.load(environ={})), 40, 10, words)
    assert "".join(line.strip() + " " for line in lines[2:]).split() == words.split()


def test_top_starts_with_what_it_needs_only() -> None:
    """Only what it needs is imported."""
    script = (
        "import sys, tensorpool.cli.top, tensorpool.cli.hz\n"
        "print([name for name in sys.modules if name.startswith(('pyspark', 'rich', 'prometheus', 'structlog'))])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=180)
    assert done.stdout.strip() == "[]"
