# SPDX-License-Identifier: Apache-2.0
"""A service whose log nobody reads: a pipe of one page that is soon full, for stdout and stderr."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tensorpool import aeron
from tensorpool.line_writer import LineWriter
from tests.support.chaos import TOKEN
from tests.support.driver_client import DriverClient, shutdown_request
from tests.support.driver_process import Deployment, DriverProcess
from tests.support.processes import Process, wait_until
from tests.support.toml import toml_text

STREAM: Final = 37_000
LATER: Final = 37_001
PIPE_BYTES: Final = 4096
ONE_PAGE: Final = f"import fcntl; fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, {PIPE_BYTES})"

LOGGING = f"""
import sys
{ONE_PAGE}
from tensorpool import logs
logs.choose_format(sys.argv[1])
logs.configure("info")
log = logs.get_logger("driver")
for number in range(5_000):
    log.info("lease_attached", number=number, padding="x" * 100)
logs.say("the service goes on")  # the reader is told by a file: its pipe is full
open(sys.argv[2], "w").close()
sys.stdin.readline()
while not logs.flush():  # the reader reads now; the count is written behind the last line that was kept
    pass
log.info("lease_expired", dropped=logs.lines_dropped())
"""


@pytest.fixture
def deployment(media_driver: aeron.MediaDriver, shm_dir: Path) -> Deployment:
    policies = {"shutdown_token": TOKEN}
    return Deployment(shm_dir, media_driver.aeron_dir, streams=[STREAM], policies=policies)


def unread(deployment: Deployment) -> DriverProcess:
    """`tensorpool driver --log-level debug` before a full pipe."""
    return deployment.start_limited(f"{ONE_PAGE}\nsys.argv[-1] = 'debug'")


def attach_until_full(client: DriverClient) -> int:
    """Each attach and each detach is a line of more than 100 bytes."""
    count = PIPE_BYTES // 100
    for _ in range(count):
        client.detach(client.attach(STREAM))
    return count


def test_a_driver_whose_log_nobody_reads_goes_on_granting_leases(deployment: Deployment) -> None:
    """Its log is whole once it is read: it holds far less than may wait."""
    with unread(deployment) as process, DriverClient(deployment) as client:
        client.meet(process)
        count = attach_until_full(client)
        client.detach(client.attach(STREAM))
        client.send(shutdown_request(TOKEN))
        code, output = process.finish()
    assert code == 0, output
    assert output.count('"event": "lease_attached"') == count + 1
    assert "log_lines_dropped" not in output


def test_a_driver_whose_log_nobody_reads_obeys_signals(deployment: Deployment) -> None:
    """SIGHUP changes its streams, SIGTERM ends it."""
    with unread(deployment) as process, DriverClient(deployment) as client:
        client.meet(process)
        attach_until_full(client)
        for number in range(20):  # more lines than the rest of the page holds
            later = {"stream_id": LATER + number, "profile": "small"}
            deployment.tables["streams"][f"a-stream-with-a-long-name-that-comes-later-{number}"] = later
        deployment.config_path.write_text(toml_text(deployment.tables), encoding="utf-8")
        process.send(signal.SIGHUP)
        client.next_announce(LATER)
        client.attach(LATER)
        process.send(signal.SIGTERM)
        wait_until(lambda: process.has_ended, "the driver ends")
        code, output = process.finish()
    assert code == 0, output
    assert deployment.leftovers() == []


def test_each_line_is_written_or_counted_where_it_is_missing() -> None:
    """Also while a slow reader makes room for some."""
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    writer = LineWriter(write_end, lambda count: f"dropped {count}")
    received = bytearray()
    number = 0
    while writer.dropped < 10_000:
        writer.write(f"line {number} {'x' * 100}")
        number += 1
        if number % 60 == 0:  # more than a page
            received += os.read(read_end, PIPE_BYTES)
    os.set_blocking(read_end, False)
    is_written = False
    while not is_written:
        is_written = writer.flush(0.01)
        with contextlib.suppress(BlockingIOError):
            received += os.read(read_end, PIPE_BYTES)
    os.close(write_end)
    os.close(read_end)
    expected = counts = 0
    for line in received.decode().splitlines():
        kind, found, *_ = line.split()
        if kind == "dropped":
            expected += int(found)
            counts += 1
        else:
            assert int(found) == expected
            expected += 1
    assert expected == number
    assert counts > 0


@pytest.mark.parametrize("format", ["json", "logfmt", "journald", "console"])
def test_lines_that_nobody_reads_are_counted_in_one_line(format: str, tmp_path: Path) -> None:
    """Those before it are whole and in order, and those after it follow when the reader has caught up."""
    gone_on = tmp_path / "gone-on"
    with Process("-c", LOGGING, format, str(gone_on)) as process:
        wait_until(gone_on.exists, "it has logged everything")
        process.write_line("")
        code, output = process.finish()
    assert code == 0, output
    lines = [re.sub(r"\x1b\[\d*m", "", line) for line in output.splitlines()]
    lines.remove("the service goes on")
    numbers = [int(found[1]) for line in lines if (found := re.search(r'\bnumber"?[=:] ?(\d+)', line))]
    assert numbers == list(range(len(numbers)))
    told, last = lines[len(numbers) :]
    count = 5_000 - len(numbers)
    assert count > 0
    assert re.search(rf'log_lines_dropped.*\bcount"?[=:] ?{count}\b', told), told
    assert re.search(rf'lease_expired.*\bdropped"?[=:] ?{count}\b', last), last
    if format == "journald":
        assert told.startswith("<4>")


def test_a_reader_that_is_gone_stops_no_service() -> None:
    """What is written then is dropped; `head` has read enough."""
    script = LOGGING.partition("logs.say")[0] + "print(logs.lines_dropped())"
    script = script.replace(ONE_PAGE, "").replace("range(5_000)", "range(50)").replace("print(", "print(logs.flush(), ")
    writer = subprocess.Popen(
        [sys.executable, "-c", script, "json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert writer.stderr is not None
    writer.stderr.close()
    output, _ = writer.communicate(timeout=90)
    assert (writer.returncode, output) == (0, "True 50\n")


def test_what_a_command_prints_waits_for_its_reader(tmp_path: Path) -> None:
    """Only the lines of running services may be dropped: `tensorpool … --check | less` shows everything."""
    config = tmp_path / "driver.toml"
    streams = "".join(f'[streams.s{id}]\nstream_id = {id}\nprofile = "small"\n' for id in range(1_000, 2_000))
    profile = "[profiles.small]\nheader_nslots = 8\npayload_pools = [{pool_id = 1, stride_bytes = 4096}]\n"
    config.write_text(profile + streams)
    script = f"{ONE_PAGE}\nfrom tensorpool.cli.main import main\nmain()"
    with Process("-c", script, "driver", "--config", str(config), "--check") as process:
        code, output = process.finish()
    assert code == 0, output
    assert all(f"\ns{id} " in output for id in range(1_000, 2_000))
