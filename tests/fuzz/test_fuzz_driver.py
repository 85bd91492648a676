# SPDX-License-Identifier: Apache-2.0
"""Fuzzing of the driver's decisions.

`python -m tests.fuzz.driver_conversation --seconds 600` holds whole conversations for longer.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.driver_conversation import configured, converse
from tests.levels import SEED, SOAK
from tests.support.processes import fuzzer_memory_limit

HERE = Path(__file__).parent
SECONDS = SOAK


def test_no_conversation_of_valid_messages_stops_the_driver() -> None:
    """Extreme fields in every order: a client that behaves is served after each; `--seed` repeats one."""
    with configured() as config:
        assert converse(config, seed=1, steps=100) > 100
        assert converse(config, seed=SEED, steps=100) > 100


@pytest.mark.timeout(SECONDS + 60)
def test_no_conversation_upsets_the_driver(tmp_path: Path) -> None:
    """The target runs from the checked-in corpus and finds no input that breaks its assertions."""
    pytest.importorskip("atheris")
    corpus = shutil.copytree(HERE / "corpus" / "driver_control", tmp_path / "corpus")  # libFuzzer adds what it finds
    options = [f"-max_total_time={SECONDS}", f"-artifact_prefix={tmp_path}/", "-print_final_stats=1", "-max_len=4096"]
    options.append(fuzzer_memory_limit())
    result = subprocess.run(
        [sys.executable, str(HERE / "fuzz_driver.py"), *options, str(corpus)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    executed = re.findall(r"stat::number_of_executed_units:\s*(\d+)", result.stderr)
    coverage = re.findall(r"DONE\s+cov: (\d+)", result.stderr)  # absent when the code is not instrumented
    assert executed, result.stderr
    assert coverage, result.stderr
    assert int(executed[0]) > len(list((HERE / "corpus" / "driver_control").iterdir()))
    assert int(coverage[0]) > 100, result.stderr
