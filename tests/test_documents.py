# SPDX-License-Identifier: Apache-2.0
"""The documents: every link leads somewhere, and the files, functions, settings and errors that they name exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
import pytest
from docs import hooks
from docs.pictures import concepts

from tensorpool.bridge.config import BridgeSection
from tensorpool.cli.main import COMMANDS
from tensorpool.control.config import ControlConfig
from tensorpool.discovery.config import DiscoverySection, RegistrySection
from tensorpool.driver.config import DriverSection, PoliciesSection, ShmSection
from tensorpool.supervisor.config import SupervisorSection

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
NAMING: Final = ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")
SETTINGS: Final[dict[str, tuple[type[msgspec.Struct], ...]]] = {
    "driver": (DriverSection,),
    "shm": (ShmSection,),
    "policies": (PoliciesSection,),
    "discovery": (DiscoverySection, RegistrySection),
    "control": (ControlConfig,),
    "bridge": (BridgeSection,),
    "supervisor": (SupervisorSection,),
}
FILES: Final = frozenset({("driver", "lock")})  # that look like a setting
_CODE: Final = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# `src/tensorpool/driver/conductor.py`, or with what is meant in it: `client/mapping.py::MappingState.on_announce`
_PLACE: Final = re.compile(r"`((?:[\w.-]+/)+[\w.*-]*|[\w-]+\.(?:py|hpp|cpp|md|toml|tsv))(?:::([\w.]+))?`")
_NATIVE: Final = re.compile(r"\b(?:class|struct|enum class)\s+(\w+)|\b(\w+)\s*\(")


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", _CODE.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return frozenset(re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(page: Path) -> None:
    """A relative link names a file that exists, and an anchor one of its headings."""
    broken = []
    for target in _LINK.findall(_CODE.sub("", page.read_text())):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and linked.suffix == ".md" and anchor not in anchors(linked)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize(
    ("word", "anchor"),
    [
        ("stream", "stream"),
        ("frame", "frame"),
        ("epoch", "epoch"),
        ("lease", "lease"),
        ("ring", "header-ring"),
        ("slot", "slot"),
        ("lake", "lake"),
    ],
)
def test_the_readme_links_a_term_where_it_is_first_used(word: str, anchor: str) -> None:
    """The first use of a term of ours, in singular or plural, is a link to its entry in the glossary."""
    text = _CODE.sub("", (ROOT / "README.md").read_text())
    first = re.search(rf"(?i)\b{word}s?\b(?![^(]*\))", text)
    assert first is not None
    linked = text[first.start() - 1 : first.end()] + f"](docs/glossary.md#{anchor})"
    assert text[first.start() - 1 :].startswith(linked), text[first.start() - 40 : first.end() + 40]


def test_the_readme_lists_every_command() -> None:
    """Its table has each command of the command line once, and no other."""
    table = re.search(r"^## Commands$(.*?)^## ", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert table is not None
    rows = [line.split("|")[1] for line in table[1].splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`tensorpool ([\w-]+)`", row)]
    assert sorted(listed) == sorted(COMMANDS)


def test_the_hooks_before_a_commit_run_the_checks_of_make() -> None:
    """.pre-commit-config.yaml fetches nothing and has each command of `make check`."""
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"repo: (.+)", config) == ["local"]
    hooks = re.findall(r"entry: (.+)", config)
    check = re.search(r"^check:.*\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert check is not None
    tools = [line.split()[:2] for line in check[1].splitlines()]
    assert tools
    for tool in tools:
        assert any(hook.startswith(" ".join(tool).removesuffix(" --check")) for hook in hooks), tool
    assert set(re.findall(r"language: (.+)", config)) == {"system"}


@cache
def names_in(path: Path) -> frozenset[str]:
    """What a file defines: `Class`, `function`, `Class.method`; of C++ every name that is declared or called."""
    text = path.read_text()
    if path.suffix != ".py":
        return frozenset(name for pair in _NATIVE.findall(text) for name in pair if name)
    found: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + child.name)
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                found.add(prefix + child.target.id)
            elif isinstance(child, ast.Assign):
                found.update(prefix + target.id for target in child.targets if isinstance(target, ast.Name))

    visit(ast.parse(text), "")
    return frozenset(found)


def defines(path: Path, name: str) -> bool:
    """Whether a file has this name; in C++ class and method are looked for one by one."""
    names = names_in(path)
    return name in names if path.suffix == ".py" else names.issuperset(name.split("."))


def resolve(place: str) -> list[Path]:
    """The files that a place of a document may mean: from the root, or from the package."""
    bases = (ROOT, ROOT / "src/tensorpool")
    return [path for base in bases for path in base.glob(place.rstrip("/"))]


@pytest.mark.parametrize("document", NAMING)
def test_files_and_functions_that_documents_name_exist(document: str) -> None:
    """`path` exists, and `path::name` is defined there."""
    places = _PLACE.findall(_CODE.sub("", (ROOT / document).read_text()))
    assert places
    missing = []
    for place, name in places:
        paths = resolve(place)
        if not any(not name or defines(path, name) for path in paths):
            missing.append(f"{place}::{name}" if name else place)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_that_documents_name_exist(page: Path) -> None:
    """`section.key` is a setting of that section."""
    named = set(re.findall(rf"`({'|'.join(SETTINGS)})\.([a-z_0-9]+)`", page.read_text())) - FILES
    known = {
        (section, field.name)
        for section, structs in SETTINGS.items()
        for struct in structs
        for field in msgspec.structs.fields(struct)
    }
    assert named <= known, named - known


@cache
def texts() -> str:
    """Every text of the program except docstrings, in one; what is filled in at run time is left out."""
    parts: list[str] = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                values = [value.value if isinstance(value, ast.Constant) else "\0" for value in node.values]
                parts.append("".join(map(str, values)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.append(node.value)
    return "\n".join(parts)


TITLES: Final = re.findall(r"^## (.+)$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("title", [title for title in TITLES if not title.startswith("Leftovers:")])
def test_titles_of_troubleshooting_are_texts_of_errors(title: str) -> None:
    """Each clause of a title is in the source: two or three words in a row, since names and numbers are filled in."""
    clauses = [clause.split() for clause in re.split(r"…|[:;,()=`'\"]|\S*\d\S*|/\S+", title)]
    for words in next(filter(None, ([clause for clause in clauses if len(clause) >= least] for least in (4, 2, 1)))):
        size = 3 if len(words) >= 4 else min(2, len(words))
        runs = [" ".join(words[start : start + size]) for start in range(len(words) - size + 1)]
        assert any(run in texts() for run in runs), f"no error says: {' '.join(words)}"


@pytest.mark.parametrize("name", concepts.PICTURES)
def test_pictures_of_concepts_are_as_drawn(name: str) -> None:
    """docs/pictures/concepts.py writes what is checked in."""
    assert (ROOT / f"docs/pictures/{name}.svg").read_text() == concepts.PICTURES[name]().svg()


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example/a.js"></script>',
        "<img alt=x src=//cdn.example/a.png>",
        '<link rel="stylesheet" href="https://fonts.example/css">',
        "@import url(https://fonts.example/css);",
        "src: url('//fonts.example/a.woff2')",
    ],
)
def test_a_page_of_the_site_that_loads_from_another_host_is_recognised(text: str) -> None:
    """`make docs` refuses such a page; a link to another host is no reason."""
    assert hooks.loaded_from_elsewhere(text)
    assert not hooks.loaded_from_elsewhere('<a href="https://example.org/">x</a> <link rel="icon" href="a.png">')
