# SPDX-License-Identifier: Apache-2.0
"""A workstation with five users and a busy operator: nothing is lost that is not counted, nobody harms somebody else.

A minute by itself; an hour by `TENSORPOOL_SOAK=60 pytest -m soak --timeout 7200 tests/integration/test_workstation.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Final

import pytest

from tests.levels import SEED, SOAK
from tests.support.old_version import install_old
from tests.support.processes import ROOT

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900 + 60 * SOAK)]
SECONDS: Final = 60 * SOAK
NAMESPACES: Final = ("--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child", "--mount-proc")
ACTS: Final = {
    "restart_driver",
    "upgrade_driver",
    "revoke_leases",
    "reload_driver",
    "restart_recorder",
    "kill_user",
    "stop_user",
    "fill_memory",
    "fill_disk",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the scenario found, once for all tests of the module."""
    print(f"TENSORPOOL_SEED={SEED}")
    old = install_old(tmp_path_factory.mktemp("old"))
    done = subprocess.run(
        [
            *("unshare", *NAMESPACES, sys.executable, "-m", "tests.integration.workstation"),
            *(str(SECONDS), str(SEED), str(old)),
        ],
        capture_output=True,
        text=True,
        timeout=SECONDS + 800,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-40_000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps({key: result[key] for key in ("acts", "codes", "healths", "far")}))
    return result


def test_no_frame_is_missing_that_is_not_counted_and_no_byte_is_wrong(found: dict[str, Any]) -> None:
    """For every reader of every stream, through restarts, kills, pauses and full mounts."""
    assert [fault for report in found["reports"] for fault in report["faults"]] == []
    assert sum(sum(report["received"].values()) for report in found["reports"]) > 1000
    assert found["far"] > 0, "the bridge carried nothing"


def test_the_recorder_accounts_for_every_frame_and_its_lake_is_whole(found: dict[str, Any]) -> None:
    """Each of its runs; retention removed what was too old, and the full disk left nothing torn."""
    assert len(found["recordings"]) >= 2
    assert all(recording["adds_up"] for recording in found["recordings"]), found["recordings"]
    assert "0 problems" in found["verified"]


def test_services_stay_well_and_end_in_order(found: dict[str, Any]) -> None:
    """No part of the driver's duty cycle failed; nothing is left in memory."""
    assert set(found["acts"]) == ACTS
    assert found["codes"] == dict.fromkeys(found["codes"], 0)
    assert found["healths"] == dict.fromkeys(found["healths"], 200)
    assert found["failures"] == 0
    assert [path for path in found["left"] if "highest-epoch" not in path] == []
