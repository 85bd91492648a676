# SPDX-License-Identifier: Apache-2.0
"""README.md: every command and every snippet runs as printed, in real processes, in the order of the page."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest

from tests.support.processes import ROOT, wait_until

README: Final = (ROOT / "README.md").read_text()
MAKE: Final = ["make setup", "make demo"]
_BLOCK: Final = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Terminal(msgspec.Struct, frozen=True):
    """A command that keeps its terminal: what it prints when it is ready, and at its end."""

    ready: str
    end: str
    is_interrupted: bool = True  # by Ctrl-C at the end; otherwise it ends by itself


class Once(msgspec.Struct, frozen=True):
    """A command that ends: what it prints."""

    prints: str
    codes: tuple[int, ...] = (0,)


# Each command of the page, by its line without the path of the environment.
COMMANDS: Final[dict[str, Terminal | Once]] = {
    "driver": Terminal("driver driver-01 serves ", ""),
    "produce camera/front --shape 480x640x3 --rate 30 --pattern checked": Terminal(
        r'producing stream "camera/front" \(\d+\): 480x640x3 uint8 frames of 900 KiB', r"published \d+ frames"
    ),
    "consume camera/front --verify": Terminal(
        r'consuming stream "camera/front" \(\d+\)', r"verified [1-9]\d* frames, every byte"
    ),
    "ls": Once(r"^camera/front +\d+ "),
    "top --once": Once(r"^camera/front +\d+ .* (live|idle) *$"),
    "hz camera/front --seconds 3": Once(r"^ +\d+\.\d\d Hz   mean "),
    "inspect camera/front": Once(r"^camera/front  stream \d+  driver driver-01"),
    "doctor": Once(r"^\d+ failures, \d+ warnings, [1-9]\d* ok$", codes=(0, 1)),  # the host may lack something
    "record camera/front --to lake --direct --seconds 5": Once(
        r"^stream \d+: (\d+) published = \d+ recorded \+ \d+ lost"
    ),
    "lake verify lake": Once(r"^[1-9]\d* files, 0 problems$"),
    "stats lake --plot timeline.png --contact-sheet frames.png": Once(r"^wrote timeline.png\nwrote frames.png$"),
    "replay lake --stream camera/front --as camera/again --wait-consumers 1": Terminal(
        "replaying camera/again at 1x, waiting for 1 consumer", r"replayed [1-9]\d* frames", is_interrupted=False
    ),
    "consume camera/again --verify --timeout 3": Once(r"^verified [1-9]\d* frames, every byte"),
}
SNIPPETS: Final = (r"^0 \(720, 1280, 3\) 10\.0 0$", r"^\| *\d+\|\[480, 640, 3\]\|")  # what the blocks of Python print


def blocks() -> list[tuple[str, str]]:
    """Language and text of the page's blocks of code."""
    return _BLOCK.findall(README)


def shell_lines() -> list[str]:
    return [line for language, text in blocks() if language == "sh" for line in text.splitlines()]


class Shell:
    """A folder with `.venv` in it, as a clone has, and the processes that the test started there."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._environment = os.environ | environment
        self._running: list[tuple[str, Terminal, subprocess.Popen[bytes], Path]] = []
        (folder / ".venv").symlink_to(sys.prefix)

    def start(self, line: str, terminal: Terminal) -> None:
        """Start a command in a terminal of its own, and wait until it is ready."""
        output = self._folder / f"terminal-{len(self._running)}.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", line],
                cwd=self._folder,
                env=self._environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append((line, terminal, process, output))
        wait_until(
            lambda: re.search(terminal.ready, output.read_text()) or process.poll() is not None, f"{line} is ready"
        )
        assert process.poll() is None, output.read_text()

    def run(self, line: str, once: Once) -> None:
        """Run a command to its end, and check its exit code and what it prints."""
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=380,
        )
        assert done.returncode in once.codes, (line, done.stdout)
        assert re.search(once.prints, done.stdout, re.MULTILINE), (line, done.stdout)

    def end(self) -> None:
        """Interrupt what is still running, the latest first; every command ends with exit code 0."""
        for line, terminal, process, output in reversed(self._running):
            if terminal.is_interrupted:
                os.killpg(process.pid, signal.SIGINT)
            assert process.wait(60) == 0, (line, output.read_text())
            assert re.search(terminal.end, output.read_text(), re.MULTILINE), (line, output.read_text())

    def reap(self) -> None:
        for *_, process, _ in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def shell(tmp_path: Path, shm_dir: Path) -> Iterator[Shell]:
    """A terminal whose commands use a driver of their own."""
    directories = {"AERON_DIR": str(shm_dir / "aeron"), "SHM_BASE_DIR": str(shm_dir / "shm")}
    opened = Shell(tmp_path, directories)
    try:
        yield opened
    finally:
        opened.reap()


def test_each_command_of_the_readme_is_known_here() -> None:
    """A command that is added to the page is run by this file, and one that is removed is removed here."""
    ours = [line.removeprefix(".venv/bin/tensorpool ") for line in shell_lines() if line not in MAKE]
    assert ours == list(COMMANDS)
    assert [line for line in shell_lines() if line in MAKE] == MAKE
    assert len(SNIPPETS) == sum(language == "python" for language, _ in blocks())


@pytest.mark.usefixtures("quick_jvm")
def test_commands_and_snippets_of_the_readme_run_as_printed(shell: Shell) -> None:
    """From top to bottom: what keeps its terminal goes on running, everything else ends and prints what it should."""
    prints = iter(SNIPPETS)
    for language, text in blocks():
        if language == "python":
            shell.run(f".venv/bin/python - <<'README'\n{text}README\n", Once(next(prints)))
            continue
        for line in text.splitlines():
            expected = None if line in MAKE else COMMANDS[line.removeprefix(".venv/bin/tensorpool ")]
            if isinstance(expected, Terminal):
                shell.start(line, expected)
            elif expected is not None:
                shell.run(line, expected)
    shell.end()


@pytest.mark.soak
def test_the_readme_leads_from_a_clone_to_the_demo(tmp_path: Path) -> None:
    """In a fresh clone `make setup` and `make demo` are enough, and the demo accounts for every frame."""
    clone = tmp_path / "tensorpool"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    for line in MAKE:
        done = subprocess.run(["bash", "-c", line], cwd=clone, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
    assert re.search(r"^OK +every frame is accounted for$", done.stdout, re.MULTILINE), done.stdout
