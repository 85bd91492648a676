# SPDX-License-Identifier: Apache-2.0
"""README.md and docs/: every command and every snippet runs as printed, in real processes, in the order of the page."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.page_reader import Reader
from tests.support.pages import PAGES, RUN, Shell, blocks
from tests.support.processes import ROOT

MAKE: Final = ("make setup", "make demo")  # tests/first_hour runs them
TOUR_S: Final = 1200  # of many commands and a Spark, on a loaded machine

# Pages that are read one after the other, on one machine: what keeps its terminal goes on running to the last page.
TOURS: Final = {
    "recordings": ("README.md", "docs/lake.md", "docs/spark.md", "docs/analytics.md"),  # which share a Spark
    "watching": (
        "docs/tutorials/first-look.md",
        "docs/discovery.md",
        "docs/troubleshooting.md",
        "docs/supervisor.md",
        "docs/console.md",
    ),
    "services": ("docs/control.md",),
    "driver": ("docs/driver.md", "docs/protocol.md", "docs/bridge.md", "docs/tutorials/two-hosts.md"),
    "first stream": ("docs/index.md", "docs/tutorials/first-stream.md", "docs/client.md"),
    "notebooks": ("docs/notebooks.md",),
    "first recording": ("docs/tutorials/first-recording.md", "docs/tutorials/training.md"),
}


@pytest.fixture
def shell(tmp_path: Path, shm_dir: Path) -> Iterator[Shell]:
    """A terminal whose commands use a driver of their own, and no port."""
    own = {"AERON_DIR": str(shm_dir / "aeron"), "SHM_BASE_DIR": str(shm_dir / "shm"), "SUPERVISOR_HTTP": ""}
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    opened = Shell(tmp_path, os.environ | {"PYTHONPATH": str(ROOT)} | own)
    try:
        yield opened
    finally:
        opened.reap()


@pytest.mark.usefixtures("quick_jvm")
@pytest.mark.timeout(TOUR_S)
@pytest.mark.parametrize("tour", TOURS)
def test_commands_and_snippets_run_as_printed(tour: str, shell: Shell) -> None:
    """Page by page, what it prints as code does what it says."""
    reader = Reader(shell, skipped=MAKE)
    for page in TOURS[tour]:
        reader.read(page)
    shell.end()


@pytest.mark.soak
@pytest.mark.usefixtures("quick_jvm")
@pytest.mark.timeout(TOUR_S)
def test_slow_commands_run_as_printed_too(shell: Shell) -> None:
    """The tour of the pages with Spark, with the blocks that take long."""
    reader = Reader(shell, is_soak=True, skipped=MAKE)
    for page in TOURS["recordings"]:
        reader.read(page)
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
