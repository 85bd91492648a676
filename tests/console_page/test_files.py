# SPDX-License-Identifier: Apache-2.0
"""The page's files: nothing inline, nothing from elsewhere, every import is a file, and licences are shipped."""

from __future__ import annotations

import json
import re
import runpy
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

import pytest

from tests.support.processes import ROOT

WEB: Final = ROOT / "src/tensorpool/console/web"
BUILD: Final = runpy.run_path(str(ROOT / ".ci/web_modules.py"))
OWN: Final = sorted(path for path in WEB.rglob("*.*") if "vendor" not in path.parts)
MODULES: Final = sorted(WEB.rglob("*.js"))
_IMPORT: Final = re.compile(r"""\b(?:from|import)\s*["']([^"'\s]+)["']""")
_ADDRESS: Final = re.compile(r"https?://[\w./-]+")


class Tags(HTMLParser):
    """What a page has that its policy would refuse, and the files that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.inline: list[str] = []
        self.files: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.inline += [f"{tag} {name}" for name in found if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in found):
            self.inline.append(tag)
        self.files += [value for name, value in found.items() if name in ("src", "href") and value is not None]


def test_the_page_has_nothing_inline_and_all_its_files() -> None:
    """No script, style or handler in the markup, which `script-src 'self'; style-src 'self'` refuses."""
    tags = Tags()
    tags.feed((WEB / "index.html").read_text())
    assert not tags.inline
    assert len(tags.files) > 5
    assert not [name for name in tags.files if not (WEB / name.removeprefix("/web/")).is_file()]


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(WEB)))
def test_imports_are_files_of_the_page(module: Path) -> None:
    """Relative, so that no import map is needed, and there."""
    if module.name == "uPlot.js":  # has the words in comments, and imports nothing
        assert not re.search(r"^import\b", module.read_text(), re.MULTILINE)
        return
    for name in _IMPORT.findall(module.read_text()):
        assert name.startswith(("./", "../")), name
        assert (module.parent / name).is_file(), name


def test_nothing_is_fetched_from_elsewhere() -> None:
    """Our files name no address but the name of SVG, which is none."""
    found = {address for path in OWN for address in _ADDRESS.findall(path.read_text())}
    assert found <= {"http://www.w3.org/2000/svg"}


def test_every_package_is_locked_and_its_licence_is_shipped() -> None:
    """By a hash, without the address of a registry; LICENSES.txt has the name, version and text of each."""
    packages = {
        name: it for name, it in json.loads((ROOT / "package-lock.json").read_text())["packages"].items() if name
    }
    text = (WEB / "vendor/LICENSES.txt").read_text()
    for name, package in packages.items():
        assert package["integrity"].startswith("sha512-")
        assert "resolved" not in package
        assert f"{name.removeprefix('node_modules/')} {package['version']} ({package['license']})" in text
    assert text.count("Permission is hereby granted") == sum(it["license"] == "MIT" for it in packages.values())


def test_imports_are_rewritten_and_an_unknown_one_is_refused() -> None:
    """A package that a new version needs and vendor/ does not have fails the build instead of the page."""
    rewrite = BUILD["rewrite"]
    module = 'import{h as n}from"preact";export*from"@preact/signals-core";\n//# sourceMappingURL=x.map\n'
    assert rewrite(module) == 'import{h as n}from"./preact.js";export*from"./signals-core.js";\n'
    with pytest.raises(KeyError, match="left-pad"):
        rewrite('import"left-pad";')
