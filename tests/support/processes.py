# SPDX-License-Identifier: Apache-2.0
"""Real processes for tests: started with the test's interpreter, reaped by pid whatever happens."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parents[2]


def wait_until(condition: Callable[..., object], what: str, *, timeout_s: float = 90.0) -> None:
    """Wait for a condition, never for time; `what` is the sentence of the failure."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.002)


def whole_lines(path: Path) -> list[str]:
    """The complete lines of a file to which a process appends."""
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def terminal_environment() -> dict[str, str]:
    """For a child on a terminal of its own, whose size counts."""
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return kept | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}


def own_bytes(pid: int) -> int:
    """The memory that a process has to itself: neither regions nor Aeron's logs."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no memory")


class Process:
    """A child running a Python script or module, with its output captured to a pipe."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    def read_line(self) -> str:
        """The next line of output; empty when the process has ended."""
        assert self._popen.stdout is not None
        return self._popen.stdout.readline().rstrip("\n")

    def write_line(self, text: str) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(text + "\n")
        self._popen.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def finish(self, *, stdin: str | None = None, timeout_s: float = 200.0) -> tuple[int, str]:
        """Wait for the end: exit code (negative: the signal) and the rest of the output."""
        output, _ = self._popen.communicate(stdin, timeout=timeout_s)
        return self._popen.returncode, output

    def reap(self) -> None:
        if self._popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._popen.send_signal(signal.SIGCONT)
                self._popen.kill()
        self._popen.wait()
        for stream in (self._popen.stdin, self._popen.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reap()


def media_driver(directory: str, *settings: str) -> Process:
    """`tensorpool media-driver` in a process of its own, when it is there."""
    options = [word for setting in settings for word in ("--set", setting)]
    process = Process("-m", "tensorpool", "media-driver", "--aeron-dir", directory, *options)
    try:
        assert process.read_line() == f"media driver at {directory}"
    except BaseException:
        process.reap()
        raise
    return process


def run_script(text: str, *arguments: str, timeout_s: float = 200.0, **environment: str) -> tuple[int, str]:
    """Run a script in a process of its own: exit code and output. A negative code is a signal: a crash."""
    with Process("-X", "faulthandler", "-c", text, *arguments, **environment) as process:
        return process.finish(timeout_s=timeout_s)


@contextlib.contextmanager
def private_directory(prefix: str = "tp-test-") -> Iterator[Path]:
    """A directory of this test's own in /dev/shm, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir="/dev/shm"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def remove_directories_of_the_dead(prefix: str = "tp-test-") -> None:
    """Private directories of test runs that were killed: nobody else removes them."""
    for path in Path("/dev/shm").glob(f"{prefix}*-*"):
        owner = path.name.removeprefix(prefix).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(path, ignore_errors=True)


def fuzzer_memory_limit() -> str:
    """libFuzzer's usual 2 GiB, on top of what this process has used: its children inherit that as their own peak."""
    return f"-rss_limit_mb={2048 + (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)}"
