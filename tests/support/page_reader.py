# SPDX-License-Identifier: Apache-2.0
"""What commands and snippets of the pages print, and a reader who does what a page says, from top to bottom."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from tests.support.pages import Block, Shell, Terminal, blocks

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
    r"record (?!.*--seconds)": Terminal("recording ", r"^\S+: \d+ published"),
    r"supervisor(?!.*--check)": Terminal("supervisor supervisor-01"),
    r"console\b": Terminal(r"console: http://127\.0\.0\.1:\d+/\?token=[0-9a-f]{64}$"),
    r"view camera/front *(#|$)": Terminal(r"^open http://127\.0\.0\.1:\d+/\?token=[0-9a-f]{64}&at=/streams/\d+$"),
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
    r"record camera/front --to \S+ --direct --seconds": r"^camera/front: (\d+) published = \d+ recorded \+ \d+ lost",
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


class Reader:
    """Reads pages at a shell: what keeps its terminal goes on running, everything else ends and prints what it should.

    `skipped` lines are not run. `step` is entered with the name of each step while it runs.
    """

    def __init__(
        self,
        shell: Shell,
        *,
        is_soak: bool = False,
        skipped: tuple[str, ...] = (),
        step: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._shell = shell
        self._is_soak = is_soak
        self._skipped = skipped
        self._step = step

    def read(self, page: str) -> None:
        prints = iter(SNIPPETS.get(page, ()))
        for block in blocks(page):
            if block.reason is not None or (block.is_soak and not self._is_soak):
                continue
            if block.file is not None:
                self._shell.save(block)
            elif block.language == "python":
                with self._step(f"python, line {block.line}"):
                    self._run_python(block, next(prints, None))
            elif block.language == "sh":
                for line in (block.set_up + block.text).splitlines():
                    if line not in self._skipped:
                        with self._step(line):
                            self._run_line(line, block)

    def _run_python(self, block: Block, expected: str | None) -> None:
        output = self._shell.execute(block)
        if expected is None:
            expected = r"\S" if re.search(r"\bprint\(|\.show\(", block.text) else ""
        assert re.search(expected, output, re.MULTILINE), f"{block}\n{output}"

    def _run_line(self, line: str, block: Block) -> None:
        command = re.sub(r"^(\.venv/bin/)?(tensorpool|python) ", "", line)
        terminal = next((kept for start, kept in TERMINALS.items() if re.match(start, command)), None)
        if terminal is not None:
            self._shell.start(line, terminal)
            return
        prints = next((text for start, text in PRINTS.items() if re.match(start, command)), "")
        codes = (0, 1) if command == "doctor" else block.codes  # the host may lack something
        self._shell.run(line, prints, codes)
