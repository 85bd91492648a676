# SPDX-License-Identifier: Apache-2.0
"""What `make docs` adds to mkdocs: pages from outside docs/, links to them, and a check that the site fetches nothing.

Documents at the root of the repository and the examples become pages. A link to a file that is no page, such as a
test, becomes plain text. A built page that would load a script, a style, a font or a picture from another host is an
error.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = ROOT / "docs"
# Page of the site: the document of the repository.
ADDED: Final = {
    f"project/{name.lower()}.md": ROOT / f"{name}.md"
    for name in ("ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "SECURITY")
} | {f"examples/{path.parent.name}.md": path for path in sorted(ROOT.glob("examples/*/README.md"))}
PAGE_OF: Final = {path: page for page, path in ADDED.items()} | {
    ROOT / "README.md": "index.md",
    ROOT / "examples": "examples/quickstart.md",
    **{path.parent: page for page, path in ADDED.items() if path.parent != ROOT},
}

_FENCED: Final = re.compile(r"(^```.*?^```\n?)", re.MULTILINE | re.DOTALL)
_COMMENT: Final = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)  # how a test runs the block that follows
_LINK: Final = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
_LOADED: Final = (
    re.compile(r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\bsrc=[\"']?((?:https?:)?//[^\"'\s>]+)", re.I),
    re.compile(r"<link\b(?![^>]*\brel=[\"']?canonical)[^>]*?\bhref=[\"']?((?:https?:)?//[^\"'\s>]+)", re.I),
    re.compile(r"(?:@import\s+(?:url\()?|\burl\()\s*[\"']?((?:https?:)?//[^\"'\s)]+)", re.I),
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/."""
    from mkdocs.structure.files import File

    for page, document in ADDED.items():
        text = document.read_text()
        program = document.parent / "main.py"
        if program.exists():
            text += f"\n## `{program.relative_to(ROOT)}`\n\n```python\n{program.read_text()}```\n"
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at pages of the site, and leave out the comments for tests."""
    source = ADDED.get(page.file.src_uri, DOCS / page.file.src_uri)
    parts = _FENCED.split(_COMMENT.sub("", markdown))
    parts[::2] = [_LINK.sub(lambda link: site_link(link, source, page.file.src_uri), part) for part in parts[::2]]
    return "".join(parts)


def site_link(link: re.Match[str], source: Path, page: str) -> str:
    """A link of a document as the site has it; one that leads nowhere stays, for mkdocs to refuse."""
    path, hash_, anchor = link[2].partition("#")
    if not path or "://" in path or path.startswith("mailto:"):
        return link[0]
    target = (source.parent / path).resolve()
    if target in PAGE_OF:
        linked = PAGE_OF[target]
    elif target.is_relative_to(DOCS) or not target.exists():
        linked = os.path.relpath(target, DOCS)
    else:
        return link[1]
    return f"[{link[1]}]({os.path.relpath(linked, Path(page).parent)}{hash_}{anchor})"


def loaded_from_elsewhere(text: str) -> list[str]:
    """The addresses of other hosts from which a page or a style would load something; links are not among them."""
    return [address for pattern in _LOADED for address in pattern.findall(text)]


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that would not work without the internet."""
    from mkdocs.exceptions import PluginError

    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css", ".svg") and (found := loaded_from_elsewhere(path.read_text())):
            raise PluginError(
                f"{path.relative_to(config.site_dir)} loads {found[0]}: the site must work without internet"
            )
