# SPDX-License-Identifier: Apache-2.0
"""An earlier version of tensorpool, built as its own wheel is, for tests in which two versions meet.

OLD is the last commit of main whose version is 0.2.0 and that has no services with --metrics: nothing is tagged. It is
built from the repository's history, which a shallow clone lacks; TENSORPOOL_UPGRADE_FROM names another commit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

from tests.support.processes import ROOT

OLD: Final = os.environ.get("TENSORPOOL_UPGRADE_FROM", "53ff917")


def install_old(folder: Path) -> Path:
    """Build OLD below `folder`, and return where it is installed."""
    source = folder / "source"
    source.mkdir()
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", OLD], stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "--extract", "--directory", str(source)], input=archive, check=True)
    uv = str(ROOT / ".uv/bin/uv")
    build = [uv, "build", "--quiet", "--wheel", "--python", sys.executable, "--no-build-isolation"]
    subprocess.run([*build, "--out-dir", str(folder), str(source)], check=True, cwd=source)
    (wheel,) = folder.glob("*.whl")
    target = folder / "installed"
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", str(target)]
    subprocess.run([*install, str(wheel)], check=True)
    return target


def old_python(installed: Path) -> tuple[str, str]:
    """The interpreter and the PYTHONPATH that run it: the base interpreter, which has no link to this source."""
    return sys._base_executable, f"{installed}:{sysconfig.get_path('purelib')}"  # type: ignore[attr-defined]
