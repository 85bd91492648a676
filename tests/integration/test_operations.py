# SPDX-License-Identifier: Apache-2.0
"""docs/operations.md: an operator types every command of the page, with real accounts, and each does what it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any, Final

import pytest
import yaml

from tests.integration.operations import BY_HAND, PAGE
from tests.support.pages import blocks
from tests.support.processes import ROOT

pytestmark = pytest.mark.timeout(900)  # of many commands, on a loaded machine
NAMESPACES: Final = ("--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child", "--mount-proc")
# What commands print, by how they begin.
PRINTS: Final = {
    "tensorpool driver .*--check": r"in total at most",
    "tensorpool service install": r"then: systemd-tmpfiles --create && systemctl daemon-reload",
    "tensorpool doctor": r"0 failures",
    "runuser -u bob .*--verify": r"verified 100 frames, every byte",
    "runuser -u bob .*--count 20": r"received 20 frames",
    "runuser -u bob .*leases --config": r"(?s)camera/front +producer +\d+ +ann .*consumer +\d+ +tensorpool",
    "runuser -u bob .*leases revoke": r"not authorised: revoke changes the service; send it as tensorpool",
    "runuser -u tensorpool .*leases revoke": r"(?s)revoked .*user ann.*revoked .*user tensorpool",
    "runuser -u cem .*--latest": r"received 50 frames",
    "runuser -u cem .*--count 30": r"received 30 frames",
    "runuser -u gil": r"verified 100 frames, every byte",
    "runuser -u dua": r"Hz",
    "runuser -u eva": r"camera/front  stream 10000",
    "runuser -u ann .*robots": r"add ann to group robots",
    "runuser -u ann .*rear": r"published 20 frames",
    "tensorpool service status --system$": r"(?s)driver\S+ +\w+ +ok\n.*supervisor\S+ +\w+ +ok\n.*recorder\S+ +\w+ +ok",
    "tensorpool service status --system --name": r"tensorpool-robots-driver\.service +\w+ +ok",
    "tensorpool top": r"camera/front",
    "tensorpool lake ls": r"camera/front",
    "tensorpool lake verify": r"0 problems",
    "tensorpool service uninstall": r"removed /etc/systemd/system/tensorpool-robots-driver\.service",
}


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Each command of the page with its output."""
    folder = tmp_path_factory.mktemp("operations")
    done = subprocess.run(
        ["unshare", *NAMESPACES, sys.executable, "-m", "tests.integration.operations", str(folder)],
        capture_output=True,
        text=True,
        timeout=800,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_every_command_of_the_page_does_what_it_says(typed: list[dict[str, Any]]) -> None:
    """With the exit code and the words that the page promises."""
    for entry in typed:
        assert entry["is_good"], entry
    lines = [entry["line"] for entry in typed]
    for pattern, expected in PRINTS.items():
        found = [entry for entry in typed if re.match(pattern, entry["line"])]
        assert found, f"no command like {pattern} in {lines}"
        for entry in found:
            assert re.search(expected, entry["output"]), entry


def test_units_report_ready_reloading_and_stopping(typed: list[dict[str, Any]]) -> None:
    """In the order in which the operator asked for it; no memory is left afterwards."""
    (messages,) = [entry["output"] for entry in typed if entry["line"] == "units"]
    words = [message.partition("=")[0] for message in messages["tensorpool-driver"] if "WATCHDOG" not in message]
    assert words == ["READY", "RELOADING", "READY", "STOPPING", "READY", "STOPPING"]
    assert set(messages) >= {"tensorpool-supervisor", "tensorpool-recorder", "tensorpool-robots-driver"}
    (left,) = [entry["output"] for entry in typed if entry["line"] == "left"]
    assert not [path for path in left if "highest-epoch" not in path]


def test_every_block_of_the_page_is_run_or_says_who_runs_it() -> None:
    """The alerts' scrape targets are the ports of the units."""
    for block in blocks(PAGE):
        if block.language == "sh":
            assert block.reason is not None
            assert BY_HAND in block.reason or "tests/wheel" in block.reason
        if block.language == "yaml":
            (job,) = yaml.safe_load(block.text)["scrape_configs"]
            assert job["static_configs"][0]["targets"] == ["127.0.0.1:9464", "127.0.0.1:9465", "127.0.0.1:9468"]
