# SPDX-License-Identifier: Apache-2.0
"""The line that is redrawn in place on a terminal, and the rates in it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

from tensorpool.cli.progress import Meter, Rate

CHILD = "import os; os.write(2, b'a warning of a child' + bytes([10]) + b'its last words')"
SCRIPT = f"""
import logging, os, subprocess, sys
from tensorpool.cli.progress import LiveLine
with LiveLine() as line:
    line.show("12 frames, 3 behind")
    logging.warning("a warning of this process")
    subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
    line.show("15 frames, 0 behind")
os.write(2, b"the end")
"""


def test_what_others_write_to_standard_error_has_lines_of_its_own() -> None:
    """Also a child process, such as Spark, that knows nothing of the line; and nothing of it is lost."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stderr=theirs, stdout=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # the terminal's other end is closed
            break
        seen += data
    os.close(ours)
    assert process.wait() == 0, seen
    lines = [line.rpartition("\x1b[2K")[2].strip("\r") for line in seen.decode().split("\n")]
    for text in ("a warning of a child", "its last words", "the end"):
        assert text in lines, seen
    assert any(line.endswith("a warning of this process") and "frames" not in line for line in lines), seen


def test_a_rate_is_of_half_a_second_or_more() -> None:
    """Two lines that are printed at once, after a pause, show no burst."""
    now_ns = 0
    meter = Meter(lambda: now_ns)
    for _ in range(20):
        meter.add(1 << 20)
        now_ns += 50_000_000
    assert meter.recent() == Rate(20.0, 20.0)
    now_ns += 1_000_000
    meter.add(1 << 20)
    assert meter.recent() == Rate(20.0, 20.0)
    now_ns = 2_000_000_000
    assert meter.recent() == Rate(1.0, 1.0)
