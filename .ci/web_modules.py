# SPDX-License-Identifier: Apache-2.0
"""Puts what the console's page uses of others into src/tensorpool/console/web/vendor: modules and licences.

`npm ci` fetches the packages that package-lock.json names into build/npm. The modules are copied as they are, except
for their imports: `from "preact"` becomes `from "./preact.js"`. An import map would have to be an inline script, which
the console's Content-Security-Policy forbids.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
WORK: Final = ROOT / "build/npm"
VENDOR: Final = ROOT / "src/tensorpool/console/web/vendor"
# The name of a module in imports, its file in node_modules, and its name in vendor/.
MODULES: Final = {
    "preact": ("preact/dist/preact.mjs", "preact.js"),
    "preact/hooks": ("preact/hooks/dist/hooks.mjs", "hooks.js"),
    "@preact/signals-core": ("@preact/signals-core/dist/signals-core.mjs", "signals-core.js"),
    "@preact/signals": ("@preact/signals/dist/signals.mjs", "signals.js"),
    "htm": ("htm/dist/htm.mjs", "htm.js"),
    "uplot": ("uplot/dist/uPlot.esm.js", "uPlot.js"),
}
STYLES: Final = {"uplot/dist/uPlot.min.css": "uPlot.css"}
LICENCES: Final = VENDOR / "LICENSES.txt"  # written last: make takes it for the sign that all are there
_IMPORT: Final = re.compile(r"""\b(from|import)\s*["']([@\w][\w@/.-]*)["']""")
_MAP: Final = re.compile(r"^//# sourceMappingURL=.*\n?", re.MULTILINE)


def rewrite(text: str) -> str:
    """A module whose imports are relative. Raises KeyError for a module that vendor/ does not have."""
    return _MAP.sub("", _IMPORT.sub(lambda found: f'{found[1]}"./{MODULES[found[2]][1]}"', text))


def install() -> Path:
    """What the lock file names, in build/npm/node_modules; no script of a package is run."""
    WORK.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(ROOT / name, WORK / name)
    quiet = ["--loglevel=error", "--no-audit", "--no-fund", "--no-update-notifier"]
    subprocess.run(["npm", "ci", "--ignore-scripts", "--cache", str(WORK / "cache"), *quiet], cwd=WORK, check=True)
    return WORK / "node_modules"


def licences(packages: Path) -> str:
    """The licence of every package in the lock file, with its name and version."""
    locked = json.loads((ROOT / "package-lock.json").read_text())["packages"]
    texts = []
    for path, package in sorted(locked.items()):
        if path:
            name = path.removeprefix("node_modules/")
            text = (packages / name / "LICENSE").read_text().strip()
            texts.append(f"{name} {package['version']} ({package['license']})\n\n{text}\n")
    return f"\n{'-' * 72}\n\n".join(texts)


def main() -> None:
    packages = install()
    shutil.rmtree(VENDOR, ignore_errors=True)
    VENDOR.mkdir()
    for source, name in MODULES.values():
        (VENDOR / name).write_text(rewrite((packages / source).read_text()))
    for source, name in STYLES.items():
        shutil.copy(packages / source, VENDOR / name)
    LICENCES.write_text(licences(packages))


if __name__ == "__main__":
    main()
