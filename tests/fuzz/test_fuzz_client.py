# SPDX-License-Identifier: Apache-2.0
"""A hostile peer against a real client."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.levels import SOAK

SECONDS = 3 * SOAK
MOST_LINES = 200 + 20 * SECONDS  # of its log


@pytest.mark.timeout(SECONDS + 240)
def test_no_peer_upsets_a_client(tmp_path: Path) -> None:
    """The client serves its streams, in bounded memory, without a failed or long turn and without flooding its log."""
    target = Path(__file__).with_name("fuzz_client.py")
    result = subprocess.run(
        [sys.executable, str(target), "--seconds", str(SECONDS)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-20_000:]
    seen = json.loads(result.stdout[result.stdout.index("{") :])
    assert sum(seen["sent"].values()) > 1000, seen
    assert len(result.stderr.splitlines()) < MOST_LINES, result.stderr[-20_000:]
