# SPDX-License-Identifier: Apache-2.0
"""The table of mutants does not rot; `make mutants` runs its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.table import ROWS, Row, claiming_files

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.requirement} {row.mistake}")
def test_a_row_changes_one_place_and_has_tests(row: Row) -> None:
    """Its text occurs once in its file, the change is one, and some test claims its requirement."""
    text = (ROOT / "src/tensorpool" / row.file).read_text(encoding="utf-8")
    assert text.count(row.old) == 1
    assert row.old != row.new
    compile(text.replace(row.old, row.new), row.file, "exec")
    assert claiming_files(ROOT, row.requirement)
