# SPDX-License-Identifier: Apache-2.0
"""The rows of mutants.tsv. Requirements without a test stand in tests/conformance/unasserted.tsv, with the reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

from tests.levels import QUICK_FOLDERS


class Row(NamedTuple):
    """`old` occurs once in src/tensorpool/<file>; with `new` in its place a test that claims the requirement fails."""

    requirement: str
    file: str
    mistake: str
    old: str
    new: str

    def arguments(self, root: Path) -> list[str]:
        """For pytest with the plugin tests.mutants.claims."""
        return ["--claims", self.requirement, *claiming_files(root, self.requirement)]


def claiming_files(root: Path, requirement: str) -> list[str]:
    """Files of tests in which the id occurs, those that start no processes first."""
    quoted = re.compile(f'"{re.escape(requirement)}"')
    found = [path for path in (root / "tests").glob("**/test_*.py") if quoted.search(path.read_text())]
    paths = [path.relative_to(root) for path in found]
    return [str(path) for path in sorted(paths, key=lambda path: (path.parts[1] not in QUICK_FOLDERS, path))]


def _rows() -> tuple[Row, ...]:
    """One line each, a newline in the source written as \\n."""
    heading, *lines = Path(__file__).with_name("mutants.tsv").read_text(encoding="utf-8").splitlines()
    assert heading.split("\t") == list(Row._fields)
    return tuple(Row(*(cell.replace("\\n", "\n") for cell in line.split("\t"))) for line in lines)


ROWS: Final = _rows()
