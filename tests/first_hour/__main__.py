# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.first_hour`: walks, prints the times, and removes the folder. Exit code 1 where a step failed."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from tests.first_hour.walk import isolated
from tests.support.processes import ROOT

(ROOT / "build").mkdir(exist_ok=True)
folder = Path(tempfile.mkdtemp(prefix="first-hour-", dir=ROOT / "build"))
try:
    found = isolated(folder)
finally:
    shutil.rmtree(folder)
print(found.text())
sys.exit(1 if found.failure or found.outside else 0)
