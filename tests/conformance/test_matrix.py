# SPDX-License-Identifier: Apache-2.0
"""The page that says which test asserts which requirement, and how markers are found for it."""

from __future__ import annotations

import pytest

from tests.conformance import matrix

MODULE = """
pytestmark = pytest.mark.spec("X-1")
CASES = [pytest.param(1, marks=pytest.mark.spec("X-2", "X-3"))]

@pytest.mark.spec("X-4")
@pytest.mark.parametrize("case", CASES)
def test_one(case): ...

class TestGroup:
    @pytest.mark.parametrize("case", [pytest.param(1, marks=mark.spec("X-5"))])
    async def test_two(self, case): ...

def helper(): ...
"""


def test_markers_are_found_wherever_they_reach_a_test() -> None:
    """Decorators, named lists of cases, cases in place, methods, and the whole module."""
    found = matrix.claims_in(MODULE, "tests/test_x.py")
    assert found == {"test_one": ["X-1", "X-4", "X-2", "X-3"], "test_two": ["X-1", "X-5"]}


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("@pytest.mark.spec('X-1')\ndef helper(): ...", "no test is reached"),
        ("CASES = [pytest.mark.spec('X-1')]\ndef test_one(): ...", "no test is reached"),
        ("@pytest.mark.spec(f'X-{1}')\ndef test_one(): ...", "plain text"),
    ],
)
def test_markers_that_would_be_lost_are_refused(source: str, complaint: str) -> None:
    """A claim that the page could not show is an error."""
    with pytest.raises(matrix.BadMarker, match=complaint):
        matrix.claims_in(source, "tests/test_x.py")


def test_every_marker_names_a_requirement_that_exists() -> None:
    """An id that requirements.tsv does not have is a slip of the pen."""
    assert matrix.unknown(matrix.claims(), matrix.requirements()) == {}


def test_requirements_are_well_formed() -> None:
    """Each has an id of its own, a level, a role and one line that says what it demands."""
    known = matrix.requirements()
    assert len({each.id for each in known}) == len(known) == 785
    assert {each.level for each in known} == set(matrix.LEVELS)
    assert {each.specification for each in known} == set(matrix.SPECIFICATIONS)
    assert all(each.role and each.demand for each in known)


def test_what_is_not_asserted_is_explained() -> None:
    """A requirement has a test, or unasserted.tsv says why it has none."""
    known, found, reasons = matrix.requirements(), matrix.claims(), matrix.reasons()
    assert reasons.keys() <= {each.id for each in known}
    assert [each.id for each in known if not found.get(each.id) and not reasons.get(each.id)] == []


def test_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """A changed marker or requirement without `make conformance` fails here."""
    assert matrix.main(["--check"]) == 0, capsys.readouterr().err
