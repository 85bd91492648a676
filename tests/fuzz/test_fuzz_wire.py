# SPDX-License-Identifier: Apache-2.0
"""Fuzzing of the codec, from the corpus that is checked in."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.levels import SOAK
from tests.support.processes import fuzzer_memory_limit

pytest.importorskip("atheris")

HERE = Path(__file__).parent
SECONDS = SOAK


@pytest.mark.spec("WIRE-16-17")
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("schema", ["bridge", "control", "discovery", "driver", "event", "merge", "trace"])
def test_no_bytes_escape_the_codec(schema: str, tmp_path: Path) -> None:
    """The target runs from the checked-in corpus and finds no input that breaks its assertions."""
    corpus = shutil.copytree(HERE / "corpus" / schema, tmp_path / "corpus")  # libFuzzer adds what it finds
    command = [sys.executable, str(HERE / "fuzz_wire.py"), schema]
    options = [
        f"-max_total_time={SECONDS}",
        f"-artifact_prefix={tmp_path}/",
        "-print_final_stats=1",
        fuzzer_memory_limit(),
    ]
    result = subprocess.run(
        [*command, *options, str(corpus)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert result.returncode == 0, result.stdout + result.stderr
    executed = re.findall(r"stat::number_of_executed_units:\s*(\d+)", result.stderr)
    coverage = re.findall(r"DONE\s+cov: (\d+)", result.stderr)  # absent when the code is not instrumented
    assert executed, result.stderr
    assert coverage, result.stderr
    assert int(executed[0]) > len(list((HERE / "corpus" / schema).iterdir()))
    assert int(coverage[0]) > 30, result.stderr
