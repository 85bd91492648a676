# SPDX-License-Identifier: Apache-2.0
"""`tensorpool doctor`: findings with remedies and an exit code; --gc asks, and refuses without a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tensorpool import shm
from tests.cli.conftest import Shell
from tests.diagnosis.conftest import ABANDON
from tests.support.processes import run_script, terminal_environment

NOTHING = "/dev/shm/tp-test-nothing-here"


def test_a_host_that_works_is_found_to_work(shell: Shell) -> None:
    """Who answers where, who holds what, versions and room; nothing fails, so the exit code is 0."""
    code, output = shell.run_here("doctor")
    where = shell.pool.aeron_dir
    assert code == 0, output
    assert f"OK    media driver    alive at {where}, pid {os.getpid()}," in output
    assert f"OK    driver          answers at aeron:ipc?term-length=4m stream 1000 of {where} after" in output
    assert "OK    discovery       asked aeron:ipc?term-length=4m stream 1000: answered after" in output
    assert f"OK    driver lock     pid {os.getpid()} holds {shell.pool.config.shm.base_dir}/" in output
    assert "OK    space           /dev/shm has" in output
    assert output.splitlines()[-1].startswith("0 failures, ")
    code, output = shell.run_here("doctor", "--json")
    found = json.loads(output)
    assert (code, found["failures"]) == (0, 0)
    checks = {finding["check"] for finding in found["findings"]}
    assert checks >= {
        "python",
        "libaeron",
        "copies",
        "media driver",
        "driver",
        "discovery",
        "leftovers",
        "directories",
        "layouts",
    }
    assert all(finding["remedy"] for finding in found["findings"] if finding["level"] != "OK")


def test_where_nothing_runs_it_fails_with_a_remedy_and_makes_nothing(
    shell: Shell, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No media driver, no base directory: said at once; not a file is made."""
    monkeypatch.setattr("tensorpool.diagnosis.leftovers.ROOT", shm_dir)
    base = shm_dir / "none"
    arguments = ["--aeron-dir", NOTHING, "--set", f"shm.base_dir={base}", "--set", "policies.mlock_shm=true"]
    code, output = shell.run_here("doctor", *arguments)
    assert code == 1
    assert f"FAIL  media driver    none is at {NOTHING} (no cnc.dat)\n" in output
    assert "→ tensorpool driver " in output
    assert f"{base} does not exist yet; a driver makes it" in output
    assert "memlock" in output
    assert list(shm_dir.iterdir()) == []
    assert not os.path.exists(NOTHING)


def test_a_setting_that_cannot_be_used_and_options_that_do_not_fit_are_refused(shell: Shell) -> None:
    """Before anything is looked at."""
    code, output = shell.run_here("doctor", "--set", "shm.namespace=a/b")
    assert (code, "shm.namespace = 'a/b' is not usable" in output) == (1, True)
    code, output = shell.run_here("doctor", "--yes")
    assert (code, "--yes goes with --gc" in output) == (2, True)


def test_a_variable_that_nothing_reads_is_pointed_out(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Almost a key: a typo that would otherwise do nothing in silence."""
    monkeypatch.setenv("POLICIES_ANNOUNCE_PERIOD", "100")
    code, output = shell.run_here("doctor", "--json")
    (finding,) = [each for each in json.loads(output)["findings"] if each["check"] == "environment"]
    assert (code, finding["level"], finding["found"].split()[0]) == (0, "WARN", "POLICIES_ANNOUNCE_PERIOD")


def test_gc_explains_asks_and_removes(shell: Shell, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal it refuses; on one, no keeps everything and yes removes what was listed."""
    monkeypatch.setattr("tensorpool.diagnosis.leftovers.ROOT", shm_dir)
    base = str(shm_dir / "tensorpool")
    arguments = ["--gc", "--aeron-dir", NOTHING, "--set", f"shm.base_dir={base}"]
    code, output = shell.run_here("doctor", *arguments)
    assert (code, output) == (0, "0 dead, 0 B in total; 0 belong to running processes\n")
    assert run_script(ABANDON, base, "gone") == (0, "")
    epochs = shm.scan_epochs(shm.namespace_path(base, "gone"))
    assert len(epochs) == 2
    code, output = shell.run_here("doctor", *arguments)
    assert code == 1
    assert output.startswith("dead  epoch ")
    assert "no driver holds its namespace's lock" in output
    assert "error: there is no terminal to ask at: give --yes to remove what is listed as dead" in output
    code, output = on_terminal("n\n", *arguments)
    assert (code, "Remove these 2 directories? [y/N]" in output) == (0, True)
    assert shm.scan_epochs(shm.namespace_path(base, "gone")) == epochs
    code, output = on_terminal("y\n", *arguments)
    assert (code, output.splitlines()[-1]) == (0, "2 of 2 removed")
    for epoch in epochs:
        assert f"removed  {epoch.path}" in output
    assert shm.scan_epochs(shm.namespace_path(base, "gone")) == []


def on_terminal(answer: str, *arguments: str) -> tuple[int, str]:
    """The command with a terminal to ask on, which sees nothing of /dev/shm but the base directory it is given."""
    ours, theirs = pty.openpty()
    script = "import sys, pathlib, tensorpool.diagnosis.leftovers as it; it.ROOT = pathlib.Path('/nowhere')\n"
    script += "from tensorpool.cli.main import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", script, "doctor", *arguments],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=terminal_environment(),
    ) as process:
        os.close(theirs)
        os.write(ours, answer.encode())
        output, _ = process.communicate(timeout=180)
        os.close(ours)
    return process.returncode, output
