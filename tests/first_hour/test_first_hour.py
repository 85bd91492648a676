# SPDX-License-Identifier: Apache-2.0
"""README.md and the tutorials, from a clone to the last page, on a machine as new as this one can be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.first_hour.walk import PAGES, isolated
from tests.support.processes import ROOT


@pytest.fixture
def folder() -> Iterator[Path]:
    """On a disk: the environment takes gigabytes."""
    (ROOT / "build").mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="first-hour-", dir=ROOT / "build") as path:
        yield Path(path)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_first_hour(folder: Path) -> None:
    """Every step does what its page says, and nothing is left outside the clone."""
    found = isolated(folder)
    print(found.text())
    assert not found.failure
    assert found.outside == []
    assert [page for page in PAGES if not any(step.page == page for step in found.steps)] == []
