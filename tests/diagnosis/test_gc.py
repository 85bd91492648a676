# SPDX-License-Identifier: Apache-2.0
"""`doctor --gc` over two hundred directories, half of them of living processes, twice at once."""

from __future__ import annotations

import json
from typing import Any

from tests.support.processes import run_script

# In a mount namespace of its own, so that /dev/shm is empty and private. Owners are forked: each holds the locks
# of its namespaces; half of them are killed. Of the living one has stale stamps, as if it were paused, and one has no
# lock, as another implementation's driver.
HOST = """
import fcntl, json, os, signal, subprocess, sys, time
from pathlib import Path
os.unshare(os.CLONE_NEWNS)
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "none", "/dev/shm"], check=True)
from tensorpool import shm
from tensorpool.clock import SystemClock
clock = SystemClock()
BASE, RING = "/dev/shm/tensorpool", shm.RingSpec(8, (shm.PoolSpec(1, 4096),))
OWNERS, NAMESPACES = 4, 12

def make_epochs(base, namespace, is_stale):
    tree = shm.EpochTree.open(base, namespace, clock=clock)
    for stream_id in (1, 2):
        ring = tree.create(stream_id, tree.next_epoch(stream_id), RING, clock.monotonic_ns(), reserve_space=False)
        if is_stale:
            ring.refresh_activity(1)  # as if last seen at the start of the machine
    return tree

def own(number, is_doomed):
    folder = Path(f"/dev/shm/tensorpool-local-{number}")
    folder.mkdir(mode=0o700)
    lock = os.open(folder / "owner.lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    kept = [lock, make_epochs(str(folder / "regions"), "default", is_doomed)]
    for index in range(NAMESPACES):
        tree = make_epochs(BASE, f"{number}-{index}", is_doomed or number == "live-0")
        tree.close() if number == "live-1" else kept.append(tree)
    return kept

def directories():
    epochs = Path(BASE).glob("*/*/*/*")
    return sorted(map(str, [*epochs, *Path("/dev/shm").glob("tensorpool-local-*")]))

owners, report = {}, {}
for kind in ("live", "dead"):
    for index in range(OWNERS):
        ready, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            kept = own(f"{kind}-{index}", kind == "dead")
            os.write(write_end, b".")
            signal.pause()
        os.close(write_end)
        assert os.read(ready, 1) == b"."
        owners.setdefault(kind, []).append(pid)
for pid in owners["dead"]:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
report["before"] = directories()
command = [sys.executable, "-m", "tensorpool", "doctor", "--gc", "--yes", "--json"]
environment = {name: text for name, text in os.environ.items() if name != "SHM_BASE_DIR"}
both = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(2)]
report["said"] = [json.loads(doctor.communicate()[0]) for doctor in both]
report["codes"] = [doctor.returncode for doctor in both]
report["after"] = directories()
for pid in owners["live"]:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
print(json.dumps(report))
"""


def test_exactly_what_is_dead_goes_also_when_two_run_at_once() -> None:
    """Of 200 directories the 100 of killed processes are removed, each by one of the two, and nothing else is."""
    code, output = run_script(HOST)
    assert code == 0, output
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    before, after = set(report["before"]), set(report["after"])
    dead = {path for path in before if "dead-" in path}
    assert (len(before), len(dead)) == (200, 100)
    assert after == before - dead
    assert report["codes"] == [0, 0]
    removed = [path for said in report["said"] for path in said["removed"]]
    assert sorted(removed) == sorted(dead)
    for said in report["said"]:
        reported = {leftover["path"] for leftover in said["dead"]}
        assert reported <= dead
        assert {*said["removed"], *(left["path"] for left in said["left"])} == reported
        for leftover in said["dead"]:
            assert any("lock" in reason for reason in leftover["why"])
            assert leftover["memory_bytes"] > 0
