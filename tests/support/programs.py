# SPDX-License-Identifier: Apache-2.0
"""What tests need and a fresh machine lacks, such as ffmpeg and Chromium, installed by apt-get where we are root."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

from tests.support.processes import ROOT

# Which command shows that it is there, and the packages that bring it.
CHECKS: Final = {
    "chromium": (["chromium", "--version"], ["chromium"]),
    "ffmpeg": (["ffmpeg", "-version"], ["ffmpeg"]),
    "gstreamer": (
        ["gst-inspect-1.0", "--exists", "videotestsrc"],
        ["gstreamer1.0-tools", "gstreamer1.0-plugins-base"],
    ),
    "inter": (["test", "-d", "/usr/share/fonts/opentype/inter"], ["fonts-inter"]),  # the page's first choice of a font
}
QUIET: Final = ["apt-get", "-qq", "-y", "-o", "DPkg::Lock::Timeout=300"]


@cache
def need(name: str) -> None:
    """Install a program unless it is there; one test worker at a time. Fails, and never skips, where it cannot."""
    check, packages = CHECKS[name]
    if _works(check):
        return
    lock = ROOT / "build" / "programs.lock"
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if _works(check):
            return
        todo = f"apt-get install --no-install-recommends {' '.join(packages)}"
        assert os.geteuid() == 0, f"these tests need {name}, and only root can install it: {todo}"
        install = [*QUIET, "install", "--no-install-recommends", *packages]
        if not _runs(install):
            _runs([*QUIET, "update"])
            assert _runs(install), f"{todo} failed: {Path(file.name)}.log says why"
        assert _works(check), f"{check[0]} is installed and does not work"


def _works(check: list[str]) -> bool:
    return shutil.which(check[0]) is not None and subprocess.run(check, capture_output=True).returncode == 0


def _runs(command: list[str]) -> bool:
    with (ROOT / "build" / "programs.lock.log").open("ab") as log:
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        return subprocess.run(command, stdout=log, stderr=log, env=environment).returncode == 0
