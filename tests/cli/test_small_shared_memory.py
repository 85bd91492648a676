# SPDX-License-Identifier: Apache-2.0
"""On the 64 MiB of /dev/shm that Docker gives, every command that a new user types ends with a sentence about it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.support.pages import blocks
from tests.support.processes import ROOT

MOUNT = "mount -t tmpfs -o size=64m none /dev/shm"
SESSION = """
tensorpool driver > driver.txt 2>&1 & driver=$!
until grep -q serves driver.txt || ! kill -0 $driver; do sleep 0.05; done
tensorpool produce camera/front --count 1 --timeout 1; echo "exit code $?"
tensorpool ingest camera/file --npy frame.npy --timeout 1; echo "exit code $?"
kill -INT $driver; wait $driver; echo "exit code $?"
"""


def in_small_memory(command: str, folder: Path) -> tuple[int, list[str]]:
    """Run it where /dev/shm is as small; exit code and lines of output."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{MOUNT} && {command}"],
        cwd=folder,
        env={"PATH": path, "PYTHONPATH": str(ROOT), "AERON_DIR": "/dev/shm/aeron-small", "HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stdout.splitlines()


def says_what_to_do(line: str) -> bool:
    return all(words in line for words in ("/dev/shm has ", " free of 6", "--shm-size=", "remount,size="))


def test_the_demo_says_so_before_it_begins(tmp_path: Path) -> None:
    """One line with the bill."""
    code, (line,) = in_small_memory("tensorpool demo --no-spark", tmp_path)
    assert code == 1
    assert says_what_to_do(line)
    for words in ("64 MiB free of 64 MiB, and 80 MiB are needed", "16 MiB for the ring", "--shm-size=81m"):
        assert words in line


def test_the_first_program_of_the_readme_ends_with_it(tmp_path: Path) -> None:
    """The last line of the traceback, and one line of the driver's log before it."""
    quickstart = next(block for block in blocks("README.md") if block.language == "python")
    (tmp_path / "quickstart.py").write_text(quickstart.text)
    code, lines = in_small_memory("python quickstart.py", tmp_path)
    assert code == 1
    assert lines[-1].startswith("tensorpool.errors.AttachRefused: producer of stream camera/front: ")
    assert says_what_to_do(lines[-1])
    assert sum("epoch_failed" in line for line in lines) == 1, lines


def test_a_driver_warns_and_commands_that_publish_say_it_in_one_line(tmp_path: Path) -> None:
    """The driver serves: smaller rings fit."""
    np.save(tmp_path / "frame.npy", np.zeros((1080, 1920, 3), np.uint8))
    _, lines = in_small_memory(f"({SESSION})", tmp_path)
    produced, code, ingested, other_code, driver_code = lines
    assert (code, other_code, driver_code) == ("exit code 1", "exit code 1", "exit code 0")
    for line, name in ((produced, "camera/front"), (ingested, "camera/file")):
        assert line.startswith(f"error: producer of stream {name}: ")
        assert says_what_to_do(line)
    warning, *_ = (tmp_path / "driver.txt").read_text().splitlines()
    assert warning.startswith("warning: ")
    assert says_what_to_do(warning)
