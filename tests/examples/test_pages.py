# SPDX-License-Identifier: Apache-2.0
"""README.md and docs/: every command and every snippet runs as printed, in real processes, in the order of the page."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.pages import PAGES, RUN, Block, Shell, Terminal, blocks
from tests.support.processes import ROOT

MAKE: Final = ["make setup", "make demo"]  # the last test here runs them
TOUR_S: Final = 1200  # of many commands and a Spark, on a loaded machine

# Pages that are read one after the other, on one machine: what keeps its terminal goes on running to the last page.
TOURS: Final = {
    "recordings": ("README.md", "docs/lake.md", "docs/spark.md", "docs/analytics.md"),  # which share a Spark
    "watching": (
        "docs/tutorials/first-look.md",
        "docs/discovery.md",
        "docs/troubleshooting.md",
        "docs/supervisor.md",
    ),
    "services": ("docs/control.md",),
    "driver": ("docs/driver.md", "docs/protocol.md", "docs/bridge.md", "docs/tutorials/two-hosts.md"),
    "first stream": ("docs/index.md", "docs/tutorials/first-stream.md", "docs/client.md"),
    "notebooks": ("docs/notebooks.md",),
    "first recording": ("docs/tutorials/first-recording.md", "docs/tutorials/training.md"),
}

# Commands that keep their terminal, by how they begin.
TERMINALS: Final = {
    r"driver(?!.*--check)": Terminal("driver [\\w-]+ serves "),
    r"produce ": Terminal(r'producing stream ("camera/front" \(\d+\)|\d+): ', r"published \d+ frames"),
    r"consume camera/front --verify$": Terminal("consuming stream", r"verified [1-9]\d* frames, every byte"),
    r"replay .* --wait-consumers 1": Terminal(
        "replaying camera/again at 1x, waiting for 1 consumer",
        r"replayed [1-9]\d* frames",
        is_interrupted=False,
        listed="camera/again",
    ),
    r"record (?!.*--seconds)": Terminal("recording ", r"^stream \d+: "),
    r"supervisor(?!.*--check)": Terminal("supervisor supervisor-01"),
    r"event watch": Terminal("", codes=(0, 1)),
    r"hz camera/front *(#|$)": Terminal(r"\d+\.\d\d Hz"),
    r"top *(#|$)": Terminal("camera/front"),
    r"camera\.py": Terminal("waiting for a consumer", "published 90", is_interrupted=False),
}
# What other commands print, by how they begin.
PRINTS: Final = {
    r"ls\b": r"^camera/front +\d+ |\"camera/front\"",
    r"top --once": r"^camera/front +\d+ .* (live|idle) *$",
    r"hz camera/front --seconds 3": r"^ +\d+\.\d\d Hz   mean ",
    r"inspect camera/front": r"^camera/front  stream \d+  driver driver-01",
    r"doctor": r"^\d+ failures, \d+ warnings, [1-9]\d* ok$",
    r"record camera/front --to lake --direct --seconds": r"^stream \d+: (\d+) published = \d+ recorded \+ \d+ lost",
    r"lake ls": r"camera/front",
    r"lake verify": r"^[1-9]\d* files, 0 problems$",
    r"stats lake --plot": r"^wrote timeline.png\nwrote frames.png$",
    r"consume camera/again --verify --timeout 3": r"^verified [1-9]\d* frames, every byte",
    r"event send service:driver:driver-01 ping": "pong",
    r"viewer\.py": r"^received \d+ lost \d+$",
}
# What blocks of Python print, by page, in its order; any other block that prints has to print something.
SNIPPETS: Final = {
    "README.md": (r"^0 \(720, 1280, 3\) 10\.0 0$", r"^\| *\d+\|\[480, 640, 3\]\|"),
    "docs/index.md": (r"^0 \(720, 1280, 3\) 10\.0$",),
    "docs/tutorials/first-stream.md": (r"^0 float32 \(3, 4\) \[ 8\.  9\. 10\. 11\.\]$",),
    "docs/tutorials/training.md": (r"^400 frames recorded$", r"^\(400, 768\) 0\.5$", r"^100% of 80 right$"),
    "docs/supervisor.md": (r"^camera/front \d+ .* \d+$",),
}


def run_page(shell: Shell, page: str, *, is_soak: bool) -> None:
    """From top to bottom: what keeps its terminal goes on running, everything else ends and prints what it should."""
    prints = iter(SNIPPETS.get(page, ()))
    for block in blocks(page):
        if block.reason is not None or (block.is_soak and not is_soak):
            continue
        if block.file is not None:
            shell.save(block)
        elif block.language == "python":
            output = shell.execute(block)
            expected = next(prints, r"\S" if re.search(r"\bprint\(|\.show\(", block.text) else "")
            assert re.search(expected, output, re.MULTILINE), f"{block}\n{output}"
        elif block.language == "sh":
            for line in (block.set_up + block.text).splitlines():
                run_line(shell, line, block)


def run_line(shell: Shell, line: str, block: Block) -> None:
    if line in MAKE:
        return
    command = re.sub(r"^(\.venv/bin/)?(tensorpool|python) ", "", line)
    terminal = next((kept for start, kept in TERMINALS.items() if re.match(start, command)), None)
    if terminal is not None:
        shell.start(line, terminal)
        return
    prints = next((text for start, text in PRINTS.items() if re.match(start, command)), "")
    codes = (0, 1) if command == "doctor" else block.codes  # the host may lack something
    shell.run(line, prints, codes)


@pytest.fixture
def shell(tmp_path: Path, shm_dir: Path) -> Iterator[Shell]:
    """A terminal whose commands use a driver of their own, and no port."""
    own = {"AERON_DIR": str(shm_dir / "aeron"), "SHM_BASE_DIR": str(shm_dir / "shm"), "SUPERVISOR_HTTP": ""}
    opened = Shell(tmp_path, own)
    try:
        yield opened
    finally:
        opened.reap()


@pytest.mark.usefixtures("quick_jvm")
@pytest.mark.timeout(TOUR_S)
@pytest.mark.parametrize("tour", TOURS)
def test_commands_and_snippets_run_as_printed(tour: str, shell: Shell) -> None:
    """Page by page, what it prints as code does what it says."""
    for page in TOURS[tour]:
        run_page(shell, page, is_soak=False)
    shell.end()


@pytest.mark.soak
@pytest.mark.usefixtures("quick_jvm")
@pytest.mark.timeout(TOUR_S)
def test_slow_commands_run_as_printed_too(shell: Shell) -> None:
    """The tour of the pages with Spark, with the blocks that take long."""
    for page in TOURS["recordings"]:
        run_page(shell, page, is_soak=True)
    shell.end()


def test_every_block_of_every_page_is_run_or_says_why_not() -> None:
    """A page with a block to run is in a tour, and no command hides in a block without a language."""
    toured = [page for pages in TOURS.values() for page in pages]
    assert len(toured) == len(set(toured))
    assert not set(toured) - set(PAGES)
    for page in PAGES:
        for block in blocks(page):
            runs = block.language in RUN and block.reason is None
            assert not runs or page in toured, f"{block} is in no tour, and has no `<!-- not run: reason -->`"
            assert block.language in RUN or not block.set_up, f"{block}: a set-up for a block that does not run"
            assert not block.is_soak or page in TOURS["recordings"], f"{block}: no test runs it in `make soak`"
            assert block.language or not re.search(r"^(\$ |tensorpool )", block.text, re.MULTILINE), (
                f"{block} has commands: say `sh`, and put what they print into a block of its own"
            )


@pytest.mark.soak
def test_the_readme_leads_from_a_clone_to_the_demo(tmp_path: Path) -> None:
    """In a fresh clone `make setup` and `make demo` are enough, and the demo accounts for every frame."""
    commands = [line for block in blocks("README.md") if block.language == "sh" for line in block.text.splitlines()]
    assert [line for line in commands if line in MAKE] == MAKE
    clone = tmp_path / "tensorpool"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    for line in MAKE:
        done = subprocess.run(["bash", "-c", line], cwd=clone, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
    assert re.search(r"^OK +every frame is accounted for$", done.stdout, re.MULTILINE), done.stdout
