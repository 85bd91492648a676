# SPDX-License-Identifier: Apache-2.0
"""The levels of tests: every folder of tests is known, and each test is in exactly one level."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.levels import QUICK_FOLDERS

LEVELS = {"quick", "test", "soak"}
SLOW_FOLDERS = {
    "benchmarks",
    "cli",
    "conformance",
    "console",
    "console_page",
    "diagnosis",
    "examples",
    "exports",
    "fault",
    "first_hour",
    "fuzz",
    "integration",
    "lake",
    "notebook",
    "sources",
    "spark",
    "torch",
    "wheel",
}


def test_every_folder_of_tests_is_quick_or_not_on_purpose() -> None:
    """A new folder is put into one level by a person, not by omission."""
    folders = {path.parent.name for path in Path(__file__).parent.glob("*/test_*.py")}
    assert folders - SLOW_FOLDERS == QUICK_FOLDERS


def test_a_test_has_exactly_one_level(request: pytest.FixtureRequest) -> None:
    """`-m quick`, `-m test` and `-m soak` are disjoint, and together everything."""
    for item in request.session.items:
        assert len(LEVELS & {mark.name for mark in item.iter_markers()}) == 1, item.nodeid
