# SPDX-License-Identifier: Apache-2.0
"""Pages of the documentation, run as a reader would: blocks of Python in one interpreter, commands in terminals.

In a page's source a comment before a block says how it is run, where that is not by itself:

    <!-- not run: REASON -->          cannot run in a test
    <!-- soak: REASON -->             takes long: runs in `make soak` only
    <!-- exit codes: 0, 1 -->         a command that reports what it found
    <!-- set-up                       what the block takes for granted: Python before Python, commands before commands
    …
    -->

A block whose first line is `# NAME.py` or `# NAME.toml` is saved under that name, for commands that follow.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from tests.support.processes import ROOT, wait_until

PAGES: Final = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")))
RUN: Final = frozenset({"python", "sh"})
LONGEST_S: Final = 380

_BLOCK: Final = re.compile(r"((?:^<!--(?:(?!-->).)*-->\n)*)^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_RUN: Final = re.compile(r"<!-- not run: (.+?) -->", re.DOTALL)
_SOAK: Final = re.compile(r"<!-- soak: .+? -->", re.DOTALL)
_CODES: Final = re.compile(r"<!-- exit codes: ([\d, ]+) -->")
_SET_UP: Final = re.compile(r"<!-- set-up\n(.*?)-->", re.DOTALL)
_SAVED: Final = re.compile(r"# ([\w-]+\.(?:py|toml))\n")


class Block(msgspec.Struct, frozen=True):
    """A block of code of a page."""

    page: str
    line: int  # of its first line of code
    language: str
    text: str
    reason: str | None  # why it is not run
    is_soak: bool
    set_up: str
    codes: tuple[int, ...]

    @property
    def file(self) -> str | None:
        """The name under which a reader saves it."""
        saved = _SAVED.match(self.text)
        return saved[1] if saved else None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in its order."""
    text = (ROOT / page).read_text()
    found = []
    for match in _BLOCK.finditer(text):
        comments, language, code = match.groups()
        reason, codes, set_up = _NOT_RUN.search(comments), _CODES.search(comments), _SET_UP.search(comments)
        found.append(
            Block(
                page=page,
                line=text.count("\n", 0, match.start(3)) + 1,
                language=language,
                text=code,
                reason=reason[1] if reason else None,
                is_soak=_SOAK.search(comments) is not None,
                set_up=set_up[1] if set_up else "",
                codes=tuple(map(int, codes[1].split(","))) if codes else (0,),
            )
        )
    return found


class Terminal(msgspec.Struct, frozen=True):
    """A command that keeps its terminal: what it prints when it is ready, and at its end."""

    ready: str
    end: str = ""
    is_interrupted: bool = True  # by Ctrl-C at the end; otherwise it ends by itself
    codes: tuple[int, ...] = (0,)
    listed: str = ""  # the stream that others find once it is ready


class Shell:
    """A folder with `.venv` and `examples` in it, as a clone has, and the processes that the test started there.

    `environment` is all that they inherit.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        path = f"{folder}/.venv/bin:{environment['PATH']}"
        self._environment = {**environment, "PATH": path}
        self._running: list[tuple[str, Terminal, subprocess.Popen[bytes], Path]] = []
        self._python: subprocess.Popen[str] | None = None

    def save(self, block: Block) -> None:
        assert block.file is not None
        (self._folder / block.file).write_text(block.text)

    def start(self, line: str, terminal: Terminal) -> None:
        """Start a command in a terminal of its own, and wait until it is ready. A second driver replaces the first."""
        if " driver" in line:
            self.end(lambda other: " driver" in other)
        output = self._folder / f"terminal-{time.monotonic_ns()}.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", line],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append((line, terminal, process, output))
        wait_until(
            lambda: re.search(terminal.ready, output.read_text()) or process.poll() is not None, f"{line} is ready"
        )
        assert re.search(terminal.ready, output.read_text()), (line, output.read_text())
        if terminal.listed:
            seen = ["bash", "-c", f"tensorpool ls --name {terminal.listed} --json"]
            wait_until(
                lambda: terminal.listed.encode() in subprocess.check_output(seen, env=self._environment),
                f"{terminal.listed} is listed",
            )

    def run(self, line: str, prints: str, codes: tuple[int, ...]) -> None:
        """Run a command to its end, and check its exit code and what it prints."""
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LONGEST_S,
        )
        assert done.returncode in codes, (line, done.stdout)
        assert re.search(prints, done.stdout, re.MULTILINE), (line, done.stdout)

    def execute(self, block: Block) -> str:
        """Run a block of Python where the earlier ones of its page ran; what it printed."""
        if self._python is None:
            self._python = subprocess.Popen(
                [f"{self._folder}/.venv/bin/python", "-m", "tests.support.page_interpreter", "python.txt"],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert self._python.stdin is not None
        assert self._python.stdout is not None
        request = {"page": block.page, "line": block.line, "set_up": block.set_up, "code": block.text}
        print(json.dumps(request), file=self._python.stdin, flush=True)
        printed = self._python.stdout.readline()
        log = (self._folder / "python.txt").read_bytes()
        assert printed, f"{block}\n{log[-8000:].decode(errors='replace')}"
        answer = json.loads(printed)
        output = log[answer["start"] :].decode(errors="replace")
        assert answer["is_done"], f"{block}\n{output[-8000:]}"
        return output

    def end(self, is_meant: Callable[[str], bool] = lambda line: True) -> None:
        """Interrupt what is still running, the latest first; every command ends as it should."""
        for entry in reversed([entry for entry in self._running if is_meant(entry[0])]):
            line, terminal, process, output = entry
            if terminal.is_interrupted:
                with contextlib.suppress(ProcessLookupError):  # a command ended it
                    os.killpg(process.pid, signal.SIGINT)
            assert process.wait(LONGEST_S) in terminal.codes, (line, output.read_text())
            assert re.search(terminal.end, output.read_text(), re.MULTILINE), (line, output.read_text())
            self._running.remove(entry)

    def quit_python(self) -> None:
        """End the interpreter of the page as its reader does."""
        python, self._python = self._python, None
        if python is not None:
            python.communicate(timeout=LONGEST_S)
            assert python.returncode == 0, (self._folder / "python.txt").read_text()[-8000:]

    def reap(self) -> None:
        """Kill what a failed test left."""
        for process in [entry[2] for entry in self._running] + ([self._python] if self._python else []):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._python is not None:
            for pipe in (self._python.stdin, self._python.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
