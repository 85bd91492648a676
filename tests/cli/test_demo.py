# SPDX-License-Identifier: Apache-2.0
"""`demo` as a newcomer runs it: it ends by itself, adds up, tells when it does not, and leaves nothing behind."""

from __future__ import annotations

import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tensorpool.cli.demo import account, account_for_lake
from tensorpool.cli.demo_processes import Report
from tensorpool.cli.demo_recorder import PICTURES, RecorderReport
from tensorpool.client import DropReason
from tensorpool.lake import Lake
from tests.support.processes import Process, terminal_environment, wait_until

READERS = ["fast reader", "slow reader"]


def check_summary(output: str) -> int:
    """Every frame is accounted for in both readers; returns how many there were."""
    published = int(re.search(r"^camera +published (\d+) frames", output, re.MULTILINE)[1])  # type: ignore[index]
    found = re.findall(
        r"^(\w+ reader) +(\d+) received \+ (\d+) lost = (\d+); checked [\d.]+ \w+, all right", output, re.MULTILINE
    )
    assert [name for name, *_ in found] == READERS, output
    for _, received, lost, total in found:
        assert int(received) + int(lost) == int(total) == published
        assert int(received) > 0
    assert re.search(r"^/dev/shm +nothing left behind$", output, re.MULTILINE), output
    assert re.search(r"^OK +every frame is accounted for$", output, re.MULTILINE), output
    return published


def children_of(pid: int) -> list[int]:
    """The camera and the readers, below the fork server."""
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            below = list(map(int, task.read_text().split()))
            found += below
            waiting += below
    return found


def test_demo_accounts_for_every_frame() -> None:
    """It ends by itself with exit code 0; both readers account for every frame, and the slow one has lost some."""
    with Process(
        "-m", "tensorpool", "demo", "--no-spark", "--seconds", "3", "--rate", "100", "--shape", "240x320"
    ) as process:
        code, output = process.finish()
    assert code == 0, output
    assert check_summary(output) > 10
    assert output.startswith("camera: 240x320 bytes at 100 Hz, 75 KiB a frame, ring of 16 slots\n")
    assert re.search(r"slow reader .*\n +lost: .*(overwritten|resync) \d+", output), output
    assert re.search(r"^ \d\.\d s  \d+ frames, .*Hz, .*MiB/s; fast reader \d+, lost \d+", output, re.MULTILINE), output


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"frames": 9}, "the fast reader accounts for 9 of 10 frames"),
        ({"frames": 7, "checked": 7, "drops": {DropReason.GAP: 4}}, "the fast reader accounts for 11 of 10 frames"),
        ({"checked": 9}, "the fast reader did not check every frame"),
        ({"frames": 9, "checked": 9, "overwritten": 1, "drops": {DropReason.OVERWRITTEN: 1}}, None),
        ({"checked": 9, "wrong": "frame 3 at byte 5"}, "the fast reader found frame 3 at byte 5 wrong"),
        ({"frames": 0, "checked": 0, "drops": {DropReason.GAP: 10}}, "the fast reader received nothing"),
    ],
)
def test_demo_fails_when_something_does_not_add_up(changes: dict[str, Any], fault: str | None) -> None:
    """A frame too few or too many, a wrong or an unchecked one, and none at all: each is a fault of its own."""
    reports = {name: Report(name, frames=10, checked=10) for name in ("camera", *READERS)}
    assert account(reports) == []
    reports["fast reader"] = msgspec.structs.replace(reports["fast reader"], **changes)
    found = account(reports)
    assert found[:1] == ([] if fault is None else [fault])


def test_demo_says_which_part_of_it_died() -> None:
    """A part that is killed is named, the others are ended, and the exit code is 1."""
    with Process("-m", "tensorpool", "demo", "--no-spark", "--seconds", "60", "--shape", "64") as process:
        while " s  " not in (line := process.read_line()):  # frames are flowing
            assert line, "the demo ended"
        victims = [pid for pid in children_of(process.pid) if is_demo_process(pid)]
        assert len(victims) == 3
        os.kill(victims[-1], signal.SIGKILL)
        code, output = process.finish()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in victims), "the others are ended")
    assert code == 1, output
    assert re.search(r"^FAILED +the (camera|fast reader|slow reader) ended with exit code -9$", output, re.MULTILINE)
    assert "nothing left behind" in output


def is_demo_process(pid: int) -> bool:
    """The fork server and the resource tracker have no memory of ours mapped."""
    return "tensorpool-local-" in Path(f"/proc/{pid}/maps").read_text()


def test_demo_keeps_its_drivers_for_other_commands_and_ends_at_a_signal() -> None:
    """--keep: what it prints is enough to use them from another terminal; afterwards nothing is left."""
    with Process("-m", "tensorpool", "demo", "--no-spark", "--seconds", "0.5", "--shape", "64", "--keep") as process:
        lines = [process.read_line()]
        while not lines[-1].startswith("  tensorpool consume"):
            lines.append(process.read_line())
            assert lines[-1], lines
        (export,) = (line for line in lines if line.startswith("  export "))
        environment = dict(text.split("=") for text in export.split()[1:])
        consume, produce = (line.split() for line in lines[-1].split(" & "))
        with (
            Process("-m", *consume, "--count=5", "--timeout=60", **environment) as consumer,
            Process("-m", *produce, "--count=5", "--shape=64", "--wait-for-consumers=1", **environment) as camera,
        ):
            for part in (camera, consumer):
                code, output = part.finish()
                assert code == 0, output
        process.send(signal.SIGTERM)
        code, output = process.finish()
    assert code == 0, output
    assert "verified" not in output
    check_summary("\n".join(lines) + "\n" + output)
    assert not Path(environment["AERON_DIR"]).exists()


@pytest.mark.usefixtures("quick_jvm")
def test_demo_records_checks_and_draws_with_spark(tmp_path: Path) -> None:
    """The main job: what Spark recorded is, byte by byte, what the camera published, and there are pictures of it."""
    with Process(
        *(
            "-m",
            "tensorpool",
            "demo",
            "--seconds",
            "2",
            "--rate",
            "20",
            "--shape",
            "96x128x3",
            "--to",
            str(tmp_path / "out"),
        )
    ) as process:
        code, output = process.finish(timeout_s=380)
    assert code == 0, output
    published = check_summary(output)
    found = re.search(
        r"^recorder +(\d+) recorded \+ (\d+) lost = (\d+), frames (\d+) to (\d+); checked [\d.]+ \w+, all right$",
        output,
        re.MULTILINE,
    )
    assert found, output
    recorded, lost, total, first, last = map(int, found.groups())
    assert recorded > 0
    assert (recorded + lost, last + 1, first + total) == (total, published, published)
    assert "frames analysed live" in output
    lake = Lake.open(tmp_path / "out" / "lake")
    assert sum(file.frames for file in lake.files()) == recorded
    for name in PICTURES:
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"frames": 0, "checked": 0, "lost": 10}, "the recorder recorded nothing"),
        ({"frames": 9, "checked": 9}, "the lake accounts for 5 + 9 of 15 frames"),
        ({"checked": 9}, "9 of 10 recorded frames were found in the lake"),
        ({"wrong": "frame 7 of the lake at byte 3"}, "the lake is wrong: frame 7 of the lake at byte 3"),
        ({"adds_up": False}, "the lake accounts for 5 + 10 of 15 frames"),
    ],
)
def test_demo_fails_when_the_lake_does_not_add_up(changes: dict[str, Any], fault: str | None, tmp_path: Path) -> None:
    """A frame too few, one that is wrong, one that is not there."""
    report = RecorderReport(frames=10, checked=10, first_seq=5, adds_up=True, is_final=True)
    found = account_for_lake(msgspec.structs.replace(report, **changes), 15, tmp_path)
    assert found[:1] == ([] if fault is None else [fault])


@pytest.mark.parametrize("columns", [48, 100])
def test_demo_shows_a_table_that_fits_the_terminal(columns: int) -> None:
    """On a terminal there is a live table, narrow where it has to be; Ctrl-C ends the demo with its summary."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorpool", "demo", "--no-spark", "--seconds", "60", "--shape", "64x64"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=terminal_environment(),
    )
    os.close(theirs)
    data, shown, is_stopped = b"", "", False
    while True:
        try:
            data += os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode(errors="replace"))
        if not is_stopped and re.search(r"slow reader +[1-9]", shown):
            is_stopped = True
            os.killpg(process.pid, signal.SIGINT)
    os.close(ours)
    assert process.wait(120) == 0, shown
    lines = re.split(r"[\r\n]+", shown)
    table = [line for line in lines if re.match(r" {6,}frames +Hz", line)]
    assert table
    assert ("age p50" in table[0]) is (columns == 100)
    rows = [line for line in lines if re.match(r"(camera|fast reader|slow reader) +\d+ +\d+\.", line)]
    assert rows
    assert max(map(len, table + rows)) <= columns
    check_summary(shown.replace("\r", ""))
