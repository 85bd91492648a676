# SPDX-License-Identifier: Apache-2.0
"""Commands on a terminal of their own, whose other end the test holds: what it shows, what it answers, its size."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping

from tests.support.processes import ROOT, terminal_environment


def resize(fd: int, rows: int, columns: int) -> None:
    """As a window does it; the command gets SIGWINCH where the terminal is its own."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@contextlib.contextmanager
def terminal(
    environment: Mapping[str, str], *arguments: str, rows: int, columns: int
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`python ARGUMENTS` on a terminal of its own: the process, and our end of the terminal."""
    ours, theirs = pty.openpty()
    resize(theirs, rows, columns)
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=terminal_environment() | dict(environment),
        cwd=ROOT,
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(fd: int, *wanted: bytes) -> bytes:
    """What the command writes, until all of `wanted` are part of it."""
    found = b""
    deadline = time.monotonic() + 90
    while not all(part in found for part in wanted):
        assert time.monotonic() < deadline, found[-2000:]
        if select.select([fd], [], [], 0.1)[0]:
            try:
                found += os.read(fd, 65536)
            except OSError:
                raise AssertionError(f"the command has ended: {found[-2000:]!r}") from None
    return found
