# SPDX-License-Identifier: Apache-2.0
"""`tensorpool top`: once, as JSON, live on a terminal of any size, and where there is nothing to see."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import termios
import threading
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
from tests.support.processes import ROOT, wait_until
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
    assert re.search(r"^service:driver:\S+\s.*● running", output, re.M), output
    assert "LATEST CHANGES" in output
    assert re.search(r"\d+ streams? .*\d+ consumers?  ▲ 1 lagging", output), output


def test_json_is_the_view(shell: Shell, scene: tuple[tp.Producer, tp.Consumer]) -> None:
    """One object a line."""
    producer, consumer = scene
    code, output = shell.run_here("top", "--once", "--json")
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


@contextlib.contextmanager
def running(client: tp.Client, name: str) -> Iterator[tuple[tp.Producer, tp.Consumer]]:
    """A stream of 500 frames a second, and a consumer that reads them all; a ring that lets it stand still for long."""
    is_over = threading.Event()

    def publish(producer: tp.Producer) -> None:
        while not is_over.wait(0.002):
            producer.publish(np.zeros((8, 16), np.float32))

    def read(consumer: tp.Consumer) -> None:
        while not is_over.is_set():
            consumer.poll(timeout=0.1)

    with (
        client.producer(name, create=True, frame=(8, 16), dtype=np.float32, slots=1024) as producer,
        client.consumer(name) as consumer,
    ):
        jobs = [threading.Thread(target=publish, args=(producer,)), threading.Thread(target=read, args=(consumer,))]
        for job in jobs:
            job.start()
        try:
            wait_until(lambda: consumer.stats.received > 100, "frames flow")
            yield producer, consumer
        finally:
            is_over.set()
            for job in jobs:
                job.join()


def pages(found: bytes) -> list[str]:
    """The complete pages of what a terminal got, as plain text."""
    whole = found.split(b"\x1b[H")[1:-1]
    plain = [re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", page.decode(errors="replace")).replace("\r", "") for page in whole]
    return [page for page in plain if page.strip()]


def test_the_first_pages_say_that_they_measure_and_no_consumer_lags_falsely(shell: Shell, client: tp.Client) -> None:
    """A stream and a reader that keeps up, from the first page to the one with all figures; a late reader, too."""
    command = "-m", "tensorpool", "top", "--every", "0.1"
    with (
        running(client, "top/first") as (producer, consumer),
        terminal(shell.environment, *command, rows=40, columns=160) as (_, screen),
    ):
        own, late_id = rf"^top/first +{consumer.consumer_id} .*", 0
        found = b""
        while not re.search(own + r"\d\d\d\.\d +\d+ .*● ok", (pages(found) or [""])[-1], re.M):
            found += read_until(screen, b"\x1b[H")
        wait_until(lambda: producer.next_seq > 1000, "frames flow")
        with client.consumer("top/first") as late:  # for which these have gone by
            late_id = late.consumer_id
            while not re.search(rf"^top/first +{late_id} .*● ok", (pages(found) or [""])[-1], re.M):
                assert late.poll(timeout=60) is not None
                found += read_until(screen, b"\x1b[H") if select.select([screen], [], [], 0)[0] else b""
        shown = pages(found)
    assert "measuring: processes report every 1 s" in shown[0]
    for page in shown:
        assert "no stream is announced" not in page
        rows = re.findall(rf"^top/first +(?:{consumer.consumer_id}|{late_id}|{producer.stream_id}) .*$", page, re.M)
        for row in rows:
            assert not re.search(r"▲|lagging|idle|stale", row), page
            assert "measuring" not in page or not re.search(r" - ", row), page


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


def page_of(
    view: View, width: int, height: int | None, notice: str = "", measuring: str = "", now_ns: int = 4 * S
) -> list[str]:
    console = Console(width=width, height=height, color_system=None, force_terminal=False)
    page = Page(
        aeron_dir="/dev/shm/aeron", wall_ns=1_000 * S, width=width, height=height, notice=notice, measuring=measuring
    )
    with console.capture() as capture:
        console.print(render(view.snapshot(now_ns), page))
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


def test_figures_that_are_measured_are_no_dashes() -> None:
    """While it measures a figure that is not there is "…"; a live stream's rate always is."""
    view = View(SupervisorConfig.load(environ={}))
    message = announce(1, producer_id=7, epoch=EPOCH, announce_timestamp_ns=0, pools={})
    view.on_message(message, 0)
    text = "\n".join(page_of(view, 200, None, measuring="measuring: a while", now_ns=0))
    assert "idle" not in text
    assert re.search(r"^-  +1  +…  +…  +0  +…  .* 7  +…  +…  +… *$", text, re.M), text
    view.on_message(QosProducer(stream_id=1, producer_id=7, epoch=EPOCH, current_seq=100), 0)
    view.on_message(consumer_qos(1, 5, epoch=EPOCH, last_seq_seen=100), 0)
    text = "\n".join(page_of(view, 200, None, now_ns=0))
    assert re.search(r"^-  +1  +…  +…  +1  +100  +-  ", text, re.M), text  # nameless, and not seen to move
    assert "1 stream … Hz … MiB/s" in text
    text = "\n".join(page_of(view, 200, None, measuring="measuring: a while", now_ns=0))
    assert text.startswith("tensorpool  measuring: a while  /dev/shm/aeron")
    assert re.search(r"^-  +1  +…  +…  +1  +100  +…  .* 7  +…  +…  +● live", text, re.M), text
    assert re.search(r"^1  +5  +0  +0  +…  +100 ", text, re.M), text


def test_lost_frames_are_named_by_their_reason() -> None:
    """As everywhere: so many by gaps, so many too late."""
    view = crowd(1, 1)
    qos = consumer_qos(1, 1, epoch=EPOCH, last_seq_seen=400, drops_gap=3, drops_late=2)
    view.on_message(qos, 4 * S)
    text = "\n".join(page_of(view, 200, None))
    assert re.search(r"frames lost .*\n.* 3 gap, 2 late .*▼ dropping", text), text


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
