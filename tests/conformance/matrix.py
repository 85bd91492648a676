# SPDX-License-Identifier: Apache-2.0
"""Which test asserts which requirement: docs/conformance.md from requirements.tsv and the tests' `spec` markers.

Why a requirement has no test stands in unasserted.tsv.

    python -m tests.conformance.matrix            write the page
    python -m tests.conformance.matrix --check    say whether it is up to date, and write nothing

Tests are read, not run: a marker is found in a test's decorators, in a list of cases that they name, and in the
module's `pytestmark`. A marker that no test reaches, or whose ids are not plain text, is an error.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

ROOT: Final = Path(__file__).parents[2]
REQUIREMENTS: Final = Path(__file__).with_name("requirements.tsv")
UNASSERTED: Final = Path(__file__).with_name("unasserted.tsv")
PAGE: Final = ROOT / "docs/conformance.md"
LEVELS: Final = ("MUST", "SHOULD", "MAY")
SPECIFICATIONS: Final = {
    "WIRE": "Wire: memory, messages, consumers and producers",
    "DRV": "Driver model",
    "DISC": "Discovery",
    "BRG": "UDP bridge",
    "CTL": "Service control plane",
}

type Claims = dict[str, list["Claim"]]


class Requirement(msgspec.Struct, frozen=True):
    """One line of requirements.tsv."""

    id: str
    level: str
    role: str
    demand: str

    @property
    def specification(self) -> str:
        return self.id.partition("-")[0]


class Claim(msgspec.Struct, frozen=True, order=True):
    """A test that says it asserts a requirement; `path` is relative to the repository."""

    path: str
    test: str


class BadMarker(Exception):
    """A marker that cannot be understood: where, and why."""


def requirements() -> list[Requirement]:
    """Every requirement, in the order of the file."""
    heading, *lines = REQUIREMENTS.read_text().splitlines()
    assert heading == "id\tlevel\trole\tdemand"
    return [Requirement(*line.split("\t")) for line in lines]


def reasons() -> dict[str, str]:
    """Why a requirement has no test, by id."""
    heading, *lines = UNASSERTED.read_text().splitlines()
    assert heading == "id\treason"
    return dict(line.split("\t") for line in lines)


@cache
def claims(root: Path = ROOT) -> Claims:
    """Which tests claim each id; read once. Raises BadMarker."""
    found: Claims = defaultdict(list)
    for path in sorted(root.glob("tests/**/test_*.py")):
        place = str(path.relative_to(root))
        for test, ids in claims_in(path.read_text(), place).items():
            for each in ids:
                found[each].append(Claim(place, test))
    return found


def claims_in(source: str, place: str) -> dict[str, list[str]]:
    """The ids that each test of a module claims. Raises BadMarker."""
    module = ast.parse(source)
    cases = {name: ids for statement in module.body for name, ids in _assigned(statement, place)}
    everywhere = cases.pop("pytestmark", [])
    found: dict[str, list[str]] = {}
    used: set[str] = set()
    for test in _tests(module):
        ids = list(everywhere)
        for decorator in test.decorator_list:
            ids += _ids_in(decorator, place)
            names = {node.id for node in ast.walk(decorator) if isinstance(node, ast.Name)} & cases.keys()
            ids += [each for name in sorted(names) for each in cases[name]]
            used |= names
        if ids:
            found[test.name] = list(dict.fromkeys(ids))
    reached = sum(len(_ids_in(decorator, place)) for test in _tests(module) for decorator in test.decorator_list)
    reached += sum(len(cases[name]) for name in used) + len(everywhere)
    if reached != len(_ids_in(module, place)):
        raise BadMarker(f"{place}: a spec marker stands where no test is reached by it")
    return found


def unknown(found: Claims, known: Iterable[Requirement]) -> dict[str, list[Claim]]:
    """Claims of ids that do not exist."""
    ids = {requirement.id for requirement in known}
    return {each: tests for each, tests in found.items() if each not in ids}


def page(known: list[Requirement], found: Mapping[str, list[Claim]]) -> str:
    """The text of docs/conformance.md."""
    return "\n".join([*_heading(known, found), *(_section(name, known, found) for name in SPECIFICATIONS)])


def main(arguments: list[str]) -> int:
    known = requirements()
    try:
        found = claims()
    except BadMarker as error:
        print(error, file=sys.stderr)
        return 1
    if strangers := unknown(found, known):
        for each, tests in strangers.items():
            print(f"{each} is no requirement; claimed by {', '.join(_name(test) for test in tests)}", file=sys.stderr)
        return 1
    text = page(known, found)
    if arguments == ["--check"]:
        is_current = PAGE.exists() and PAGE.read_text() == text
        if not is_current:
            print("docs/conformance.md is out of date; `make conformance` writes it", file=sys.stderr)
        return 0 if is_current else 1
    PAGE.write_text(text)
    return 0


# --- reading tests


def _tests(module: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node


def _assigned(statement: ast.stmt, place: str) -> Iterator[tuple[str, list[str]]]:
    """Module-level names whose value carries markers."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            ids = _ids_in(value, place)
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            ids = _ids_in(value, place)
        case _:
            return
    if ids:
        yield name, ids


def _ids_in(node: ast.AST, place: str) -> list[str]:
    ids: list[str] = []
    for call in ast.walk(node):
        match call:
            case ast.Call(func=ast.Attribute(attr="spec", value=ast.Attribute(attr="mark") | ast.Name(id="mark"))):
                pass
            case _:
                continue
        for argument in call.args:
            if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                raise BadMarker(f"{place}:{argument.lineno}: the ids of a spec marker are plain text")
            ids.append(argument.value)
    return ids


# --- writing the page


def _heading(known: list[Requirement], found: Mapping[str, list[Claim]]) -> list[str]:
    total = Counter((each.specification, each.level) for each in known)
    asserted = Counter((each.specification, each.level) for each in known if found.get(each.id))
    rows = []
    for name, title in SPECIFICATIONS.items():
        cells = [f"{asserted[name, level]} of {total[name, level]}" for level in LEVELS]
        rows.append(f"| [{title}](#{_anchor(title)}) | {' | '.join(cells)} |")
    missing = [each for each in known if not found.get(each.id)]
    return [
        "# Conformance",
        "",
        "<!-- Written by `make conformance` from tests/conformance/requirements.tsv and the tests. Do not edit. -->",
        "",
        "What the specifications demand, in one line each, and which tests assert it. A test claims a requirement with",
        '`@pytest.mark.spec("DRV-4.2-07")`. The ids are specification, section and number; the level is that of the',
        "specification; the role is who has to fulfil it. How the protocol works is in [protocol.md](protocol.md), how",
        "contradictions were settled in [decisions.md](decisions.md).",
        "",
        f"| asserted | {' | '.join(LEVELS)} |",
        "|---|---|---|---|",
        *rows,
        "",
        f"## Not asserted by a test: {len(missing)}",
        "",
        *(f"- {each.id} ({each.level}): {each.demand}. {reasons().get(each.id, '')}".rstrip() for each in missing),
        "" if missing else "None.\n",
    ]


def _section(name: str, known: list[Requirement], found: Mapping[str, list[Claim]]) -> str:
    rows = [_row(each, found.get(each.id, [])) for each in known if each.specification == name]
    heading = ["| id | level | role | demands | asserted by |", "|---|---|---|---|---|"]
    return "\n".join([f"## {SPECIFICATIONS[name]}", "", *heading, *rows, ""])


def _row(each: Requirement, tests: list[Claim]) -> str:
    cells = each.id, each.level, each.role, each.demand.replace("|", "\\|"), _links(tests)
    return f"| {' | '.join(cells)} |"


def _links(tests: list[Claim]) -> str:
    """File by file: a link, then the names of its tests."""
    by_path: dict[str, list[str]] = defaultdict(list)
    for test in sorted(set(tests)):
        by_path[test.path].append(test.test)
    links = []
    for path, names in by_path.items():
        short = path.removeprefix("tests/").removesuffix(".py")
        links.append(f"[{short}](../{path}): {', '.join(f'`{name}`' for name in names)}")
    return "<br>".join(links)


def _name(test: Claim) -> str:
    return f"{test.path}::{test.test}"


def _anchor(title: str) -> str:
    return "".join(c for c in title.lower() if c.isalnum() or c in " -").replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
