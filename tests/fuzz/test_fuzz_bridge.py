# SPDX-License-Identifier: Apache-2.0
"""Fuzzing of the bridge's receiving end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.levels import SOAK
from tests.support.processes import ROOT, fuzzer_memory_limit

pytest.importorskip("atheris")

HERE = Path(__file__).parent
SECONDS = SOAK


@pytest.mark.timeout(SECONDS + 60)
def test_no_datagram_hurts_the_assembler(tmp_path: Path) -> None:
    """No crash, bounded memory, and nothing published that no consumer would accept."""
    command = [sys.executable, str(HERE / "fuzz_bridge.py"), f"-max_total_time={SECONDS}", "-max_len=2000"]
    options = [f"-artifact_prefix={tmp_path}/", "-print_final_stats=1", fuzzer_memory_limit()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    executed = re.findall(r"stat::number_of_executed_units:\s*(\d+)", result.stderr)
    assert executed, result.stderr
    assert int(executed[0]) > 100, result.stderr
