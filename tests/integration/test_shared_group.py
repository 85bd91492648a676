# SPDX-License-Identifier: Apache-2.0
"""Two accounts of a group share a driver by examples/driver/shared_group.toml as it is; another user gets nowhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT

FRAME = [0, 1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each account found, once for all tests of the module."""
    return run_accounts(Path(__file__).with_name("shared_group.py"), tmp_path_factory.mktemp("accounts"))


def run_accounts(script: Path, folder: Path) -> dict[str, Any]:
    """Run a scenario of accounts in namespaces of its own: what it printed, by what it is."""
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run(
        [*apart, sys.executable, str(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=200,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
    )
    entries = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stderr)
    return {entry["what"]: entry["found"] for entry in entries}


def test_members_exchange_frames_both_ways(found: dict[str, Any]) -> None:
    """Whoever of the two produces, though their umask shares nothing."""
    for what in ("ann reads bob's frames", "bob reads his own", "bob reads ann's frames"):
        assert found[what] == FRAME, what
    assert found["end"] == 0


def test_files_have_the_group_and_the_mode_of_the_configuration(found: dict[str, Any]) -> None:
    """Regions, and what the media driver made at its start and later; the lock and the record are the driver's own."""
    by_mode = found["modes"]
    assert set(by_mode) == {"64001:64100 2750", "64001:64100 660", "64001:64100 600"}
    private = {Path(path).name.partition(".")[0] for path in by_mode["64001:64100 600"]}
    assert private <= {"driver", "highest-epoch"}
    shared = {Path(path).suffix for path in by_mode["64001:64100 660"]}
    assert {".ring", ".pool", ".dat", ".logbuffer"} <= shared


def test_another_user_learns_what_to_do_and_can_do_nothing(found: dict[str, Any]) -> None:
    """Neither list, read, write, replace, remove nor cut short; the advice names the group, and never root."""
    text = found["eve connects"]
    assert text.startswith(
        "TransportError: the media driver at /dev/shm/imaging-aeron may be alive and belongs to ann: "
    )
    assert "add eve to group imaging (usermod -aG imaging eve) and start anew" in text
    assert "root" not in text
    assert found["eve attacks"] == {}
    assert found["eve truncates"] == []


def test_a_member_can_do_what_the_mode_says_and_no_more(found: dict[str, Any]) -> None:
    """List directories, read and write files; create, replace and remove none."""
    assert set(found["bob attacks"]) == {"list", "read", "write"}
    assert found["bob reads again"] == FRAME
    written = {Path(path).suffix for path in found["bob attacks"]["write"]}
    assert written == {".ring", ".pool", ".dat", ".logbuffer"}


def test_read_only_regions_have_readers_and_no_other_writer(found: dict[str, Any]) -> None:
    """Mode 640: a member consumes; it can neither write nor cut a region short, and learns why it cannot produce."""
    assert found["bob reads read-only regions"] == FRAME
    assert set(found["bob attacks read-only regions"]) == {"read"}
    assert found["bob truncates read-only regions"] == []
    assert "this process may not read and write" in found["bob produces"]
    assert 'have ann set shm.permissions_mode to "660", and restart the driver' in found["bob produces"]
