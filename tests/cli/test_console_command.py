# SPDX-License-Identifier: Apache-2.0
"""`tensorpool console` and `tensorpool view` as an operator starts and ends them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tensorpool as tp
from tests.cli.conftest import Shell
from tests.console.page import Site
from tests.support.processes import Process, wait_until
from tests.support.terminals import read_until, terminal

SETTINGS = ("--set", "policies.announce_period_ms=1000")  # as the driver's


@contextlib.contextmanager
def started(shell: Shell, *arguments: str) -> Iterator[tuple[Process, str]]:
    """A command with the line that it prints when it is ready; warnings before it are left out."""
    with shell.start(*arguments) as process:
        line = process.read_line()
        while line.startswith("warning: "):
            line = process.read_line()
        yield process, line


@pytest.fixture
def producer(client: tp.Client) -> Iterator[tp.Producer]:
    with client.producer("view/front", create=True) as producer:
        producer.publish(np.zeros((8, 8), np.uint8))
        yield producer


def test_it_prints_its_address_serves_and_ends_with_a_signal(shell: Shell, producer: tp.Producer) -> None:
    """The address carries the token; SIGTERM and Ctrl-C end it with code 0, also while a page watches."""
    for number in (signal.SIGTERM, signal.SIGINT):
        with started(shell, "console") as (process, line):
            match = re.fullmatch(r"console: (http://127\.0\.0\.1:\d+/\?token=[0-9a-f]{64})", line)
            assert match is not None, line
            site = Site(match[1])
            with site.watch(producer.stream_id) as preview:
                preview.picture()
                process.send(number)
                assert process.finish()[0] == 0
                assert not preview.is_open()
        wait_until(lambda: not producer.consumers, "its consumer is closed")


def test_a_token_of_your_own_and_a_port(shell: Shell, tmp_path: Path) -> None:
    """From a file; nothing of it is printed but in the address."""
    file = tmp_path / "token"
    file.write_text("a-token-that-somebody-chose-for-himself\n")
    with started(shell, "console", "--json", "--token-file", str(file)) as (_, line):
        ready = json.loads(line)
        site = Site(ready["url"])
        assert site.token == "a-token-that-somebody-chose-for-himself"
        assert ready["address"] == f"http://{site.address}/"
        assert site.get("/api/state").status == 200
        port = site.address.rpartition(":")[2]
        code, output = shell.run_here("console", "--port", port)
        assert (code, f"127.0.0.1:{port}" in output) == (1, True)


def test_beyond_loopback_it_refuses_without_a_token_of_yours(shell: Shell) -> None:
    """One sentence that says what to do."""
    code, output = shell.run_here("console", "--listen", "0.0.0.0")
    assert code == 1
    assert re.fullmatch(r"error: --listen = '0\.0\.0\.0' is not usable; .*--token-file FILE: .*\n", output)


def record(site: Site, producer: tp.Producer) -> int:
    """Start a recording as a page does, until frames are in the lake; the recorder's pid."""
    wait_until(lambda: site.get(f"/api/streams/{producer.stream_id}").status == 200, "the stream is there")
    pid = site.post("/api/lakes/lake/recording", {"streams": [producer.stream_id]}).json["pid"]
    assert isinstance(pid, int)

    def is_recording() -> bool:
        producer.publish(np.zeros(64, np.uint8))
        return any(stream["frames"] for stream in site.get("/api/lakes").json[0]["streams"])

    wait_until(is_recording, "frames are in the lake")
    return pid


def has_ended(pid: int) -> bool:
    """Also one that no process has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_recording_of_a_page_ends_with_the_console(shell: Shell, client: tp.Client, tmp_path: Path) -> None:
    """In order: what was published until then is in the lake, which can be read."""
    lake = tmp_path / "lake"
    with client.producer("view/recorded", create=True) as producer:
        with started(shell, "console", "--json", "--lake", str(lake), *SETTINGS) as (process, line):
            pid = record(Site(json.loads(line)["url"]), producer)
            process.send(signal.SIGINT)
            assert process.finish()[0] == 0
        assert has_ended(pid)
        assert len(tp.open(lake)["view/recorded"]) > 0


def test_a_console_that_is_killed_does_not_break_its_recording(shell: Shell, client: tp.Client, tmp_path: Path) -> None:
    """It goes on, and ends by a command like any other."""
    lake = tmp_path / "lake"
    with (
        client.producer("view/orphaned", create=True) as producer,
        started(shell, "console", "--json", "--lake", str(lake), *SETTINGS) as (process, line),
    ):
        pid = record(Site(json.loads(line)["url"]), producer)
        try:
            process.send(signal.SIGKILL)
            process.finish()
            frames = len(tp.open(lake)[producer.stream_id])

            def goes_on() -> bool:
                producer.publish(np.zeros(64, np.uint8))
                return len(tp.open(lake)[producer.stream_id]) > frames

            wait_until(goes_on, "further frames are in the lake")
            view = json.loads(shell.run_here("top", "--once", "--json")[1])
            (tag,) = [service["tag"] for service in view["services"] if service["pid"] == pid]
            assert shell.run_here("event", "send", tag, "drain") == (0, "draining\n")
            wait_until(lambda: has_ended(pid), "the recorder has ended")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_view_prints_the_address_where_there_is_no_browser(shell: Shell, producer: tp.Producer) -> None:
    """By name or id; it leads to the stream's page. It ends by itself after --seconds."""
    for stream in ("view/front", str(producer.stream_id)):
        with started(shell, "view", stream, "--no-browser") as (process, line):
            match = re.fullmatch(rf"open (http://\S+\?token=[0-9a-f]{{64}})&at=/streams/{producer.stream_id}", line)
            assert match is not None, line
            answer = Site(match[1]).ask("GET", line.partition("/?")[2].join(("/?", "")), {})
            assert f"url=/#/streams/{producer.stream_id}".encode() in answer.body
            process.send(signal.SIGTERM)
            assert process.finish()[0] == 0
    code, output = shell.run_here("view", "view/front", "--no-browser", "--seconds", "0.1")
    assert (code, output.count("token=")) == (0, 1)


def test_view_opens_a_browser_with_a_link_for_one_use(shell: Shell, producer: tp.Producer, tmp_path: Path) -> None:
    """The command line of a browser can be read by other users: it has no token."""
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}.new\nmv {opened}.new {opened}\n')
    browser.chmod(0o755)
    with Process("-m", "tensorpool", "view", "view/front", **shell.environment, BROWSER=f"{browser} %s") as process:
        line = process.read_line()
        while line.startswith("warning: "):
            line = process.read_line()
        assert line.startswith("opening the browser; also at http://")
        site = Site(line.rpartition(" ")[2])
        wait_until(opened.exists, "the browser was started")
        url = opened.read_text().strip()
        assert site.token not in url
        path = url.partition(site.address)[2]
        assert site.ask("GET", path, {}).status == 200
        assert site.ask("GET", path, {}).status == 401
        process.send(signal.SIGTERM)
        assert process.finish()[0] == 0


def test_a_stream_that_is_not_there_is_named(shell: Shell, producer: tp.Producer) -> None:
    """With those that are alike."""
    code, output = shell.run_here("view", "view/fron", "--no-browser", "--timeout", "5")
    assert code == 1
    assert "there is no stream 'view/fron'" in output
    assert "view/front" in output


def test_view_draws_into_a_terminal(shell: Shell, producer: tp.Producer) -> None:
    """Until q; without a terminal one line says so."""
    command = ("-m", "tensorpool", "view", "view/front", "--terminal")
    with terminal(shell.environment, *command, rows=24, columns=80) as (process, screen):
        read_until(screen, b"view/front")
        os.write(screen, b"q")
        read_until(screen, b"\x1b[?1049l")
        assert process.wait(60) == 0
    done = shell.run("view", "view/front", "--terminal")
    assert (done.code, done.stderr.count("\n"), "standard output is none" in done.stderr) == (1, 1, True)
