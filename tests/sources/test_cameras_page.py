# SPDX-License-Identifier: Apache-2.0
"""docs/cameras.md: its program runs as printed, and its commands are understood."""

from __future__ import annotations

import re
import shlex

from tensorpool.cli.export import command as export
from tensorpool.cli.import_file import command as import_file
from tensorpool.cli.ingest import command as ingest
from tests.support.processes import ROOT, run_script

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    return _BLOCK.findall((ROOT / "docs" / page).read_text())


def test_the_camera_of_your_own_runs_and_prints_what_the_page_says() -> None:
    """The program of the page, as a script."""
    found = blocks("cameras.md")
    at = next(index for index, (language, _) in enumerate(found) if language == "python")
    assert run_script(found[at][1]) == (0, found[at + 1][1])


def test_the_commands_of_both_pages_have_options_that_exist() -> None:
    """Each line is parsed by its command."""
    commands = {"ingest": ingest, "import": import_file, "export": export}
    lines = [line for page in ("cameras.md", "export.md") for kind, text in blocks(page) if kind == "sh"
             for line in text.splitlines()]  # fmt: skip
    assert len(lines) > 10
    for line in lines:
        _, name, *arguments = shlex.split(line)
        if name == "import":
            arguments[0] = str(ROOT / "README.md")  # a file that exists
        commands[name].make_context(name, arguments)
