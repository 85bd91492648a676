# SPDX-License-Identifier: Apache-2.0
"""The comparison with peers runs in parts, with real processes, and says what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import native_pair
from benchmarks.peer_report import Table
from benchmarks.peers import BEGIN, END, paste
from tests.support.processes import ROOT


def peers(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.peers", "--quick", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)


def test_the_parts_that_were_asked_for_are_measured_and_printed_as_markdown(tmp_path: Path) -> None:
    """Tensorpool alone, whose peers are not installed everywhere: figures, conditions, targets without a rival."""
    file = tmp_path / "figures.json"
    done = peers(
        "--only",
        "throughput,goodput",
        "--sizes",
        "64",
        "--peers",
        "tensorpool,shared",
        "--markdown",
        "--json",
        str(file),
    )
    found = json.loads(file.read_text())
    assert (found["failed"], found["wrong"]) == ([], {"tensorpool": 0, "shared_memory + pipe": 0}), done.stderr
    assert set(found["rounds"]) == {
        "throughput touching",
        "throughput copying",
        "lapped reader",
        "lapped reader beside a busy process",
    }
    assert len(found["rounds"]["throughput copying"]["64 KiB"]["tensorpool"]) == 3
    assert found["machine"]["stolen"]
    assert {target["verdict"] for target in found["targets"]} == {"not measured"}
    assert "| GiB/s, read in place | 64 KiB |\n|---|---|\n| **tensorpool** | " in done.stdout
    assert "others took over" in done.stdout
    assert done.returncode == 0, done.stdout


def test_many_readers_see_every_frame_and_idle_ones_are_counted(tmp_path: Path) -> None:
    """Fan-out grows reader by reader; the writer's cost is measured beside idle ones."""
    file = tmp_path / "figures.json"
    done = peers("--only", "fanout", "--peers", "tensorpool", "--json", str(file))
    found = json.loads(file.read_text())
    assert found["failed"] == [], done.stderr
    assert list(found["rounds"]["fan-out publish"]) == ["1 reader", "4 readers"]
    assert found["wrong"] == {"tensorpool": 0}


def test_a_run_is_pasted_between_the_marks_of_the_page() -> None:
    """What was there is replaced; the rest of the page stays."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    once = paste(page, "| first |\n")
    twice = paste(once, "| second |")
    assert "| first |" not in twice
    assert f"{BEGIN}\n\n| second |\n\n{END}" in twice
    assert (twice.split(BEGIN)[0], twice.split(END)[1]) == (page.split(BEGIN)[0], page.split(END)[1])


def test_a_part_that_does_not_exist_is_refused() -> None:
    """With those that do."""
    done = peers("--only", "speed")
    assert done.returncode == 2
    assert "parts are throughput, latency, cpu, goodput, fanout, native" in done.stderr


def test_the_headers_carry_frames_between_two_native_processes() -> None:
    """In place and copied; each frame is checked by the program itself."""
    if len(os.sched_getaffinity(0)) > 1:
        assert (native_pair.line_ns() or 0) > 0
    latency = native_pair.run("latency", 4096, 0.2)
    assert latency is not None
    assert 0 < latency["p50_ns"] <= latency["p99_ns"]
    for more in ((), ("copy",)):
        report = native_pair.run("throughput", 4096, 64, 0.3, *more)
        assert report is not None
        assert report["per_second"] > 0
    with pytest.raises(subprocess.CalledProcessError):
        native_pair.run("latency", 8, 0.1)


def test_a_table_is_printed_for_people_and_for_the_page() -> None:
    """The same cells."""
    table = Table(
        "µs", ["4 KiB", "64 KiB"], [("tensorpool", ["1", "22"]), ("  tensorpool / x", ["0.5 [0.4, 0.6]", "-"])]
    )
    assert table.text().splitlines()[0].split() == ["µs", "4", "KiB", "64", "KiB"]
    assert table.markdown() == (
        "| µs | 4 KiB | 64 KiB |\n|---|---|---|\n| **tensorpool** | 1 | 22 |\n| tensorpool / x | 0.5 [0.4, 0.6] | - |"
    )
