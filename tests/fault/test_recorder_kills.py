# SPDX-License-Identifier: Apache-2.0
"""`tensorpool record` and signals at random instants: what was committed is there once, what is missing explained."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tensorpool as tp
from tensorpool.spark.lake import Lake
from tests.support.lakes import Camera, check
from tests.support.processes import Process, wait_until

SETTINGS = {
    "profiles.default": {"header_nslots": 16_384, "payload_pools": [{"pool_id": 1, "stride_bytes": 2048}]},
    "policies.announce_period_ms": 300,
}
# As a shell or a service manager starts it: with a process group of its own.
COMMAND = "import os; os.setpgid(0, 0); from tensorpool.cli.main import main; main()"
PATIENCE_S = 180


class Recording:
    """The command in a process of its own, and what it says."""

    def __init__(self, pool: tp.Local, lake: Path, *more: str) -> None:
        where = ("--aeron-dir", pool.aeron_dir, "--set", f"shm.base_dir={pool.config.shm.base_dir}")
        quick = ("--spark", "spark.driver.memory=1g", "--master", "local[2]", "--no-sync", "--no-warm-up")
        command = ("record", "cam", "--to", str(lake), "--trigger", "0.8", "--codec", "none", "--json")
        self.process = Process("-c", COMMAND, *command, *where, *quick, *more)

    def wait_for(self, event: str) -> dict[str, Any]:
        """The next of its events of a kind; fails with its output where it ends before."""
        heard = []
        while (line := self.process.read_line()) or self.process.is_running:
            heard.append(line)
            if line.startswith("{") and json.loads(line).get("event") == event:
                return json.loads(line)  # type: ignore[no-any-return]
        raise AssertionError("\n".join(heard[-20:]))

    def wait_for_frames(self, frames: int) -> None:
        while self.wait_for("progress")["frames"] < frames:
            pass

    def jvms(self) -> list[int]:
        """The JVM that it has started, if it has."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, _, rest = path.read_text().rpartition(")")
            except OSError:
                continue
            if int(rest.split()[1]) == self.process.pid and "(java" in name:
                found.append(int(path.parent.name))
        return found


def is_alive(pid: int) -> bool:
    """Not so a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def pool() -> Iterator[tp.Local]:
    with tp.local(overrides=SETTINGS) as pool:
        yield pool


@pytest.mark.usefixtures("quick_jvm")
def test_a_recorder_that_is_interrupted_while_spark_starts_leaves_no_jvm(pool: tp.Local, tmp_path: Path) -> None:
    """The JVM has a session of its own, and does not notice the end of a parent that it never met."""
    with pool.connect() as client, client.producer("cam", create=True):
        recording = Recording(pool, tmp_path / "lake")
        with recording.process as process:
            wait_until(lambda: process.is_running and recording.jvms(), "it has started a JVM")
            (jvm,) = recording.jvms()
            process.send(signal.SIGINT)
            code, output = process.finish(timeout_s=PATIENCE_S)
    assert (code, "stopped before it began" in output, "Traceback" in output) == (0, True, False), output
    wait_until(lambda: not is_alive(jvm), "the JVM is gone")


@pytest.mark.timeout(2 * PATIENCE_S + 60)
@pytest.mark.usefixtures("quick_jvm")
def test_frames_survive_a_kill_and_a_signal_to_the_group_drains(pool: tp.Local, tmp_path: Path) -> None:
    """Recorder or JVM killed, started again, told to end: one recording, no frame twice, none unexplained.

    `timeout` and Ctrl-C signal the whole process group: it drains all the same, and ends with exit code 0.
    """
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    victim, number = chance.choice(["recorder", "jvm"]), chance.choice([signal.SIGTERM, signal.SIGINT])
    mode = chance.choice(["tail", "batches"])
    print(f"seed {seed}: {victim} is killed in mode {mode}, then {number.name} to the group")
    lake = tmp_path / "lake"
    with pool.connect() as client, Camera(client, "cam", hz=100) as camera:
        first = Recording(pool, lake, "--mode", mode)
        with first.process as process:
            first.wait_for_frames(chance.randrange(1, 200))
            (jvm,) = first.jvms()
            os.kill(process.pid if victim == "recorder" else jvm, signal.SIGKILL)
            code, output = process.finish(timeout_s=PATIENCE_S)
            assert (code, "Spark is gone" in output) == ((-9, False) if victim == "recorder" else (1, True)), output
        committed = check(Lake.open(lake))
        second = Recording(pool, lake)
        with second.process as process:
            second.wait_for_frames(1)
            assert not is_alive(jvm), "one recording has one Spark"
            published = camera.producers["cam"].next_seq
            os.killpg(process.pid, number)
            summary = second.wait_for("summary")
            code, output = process.finish(timeout_s=PATIENCE_S)
            assert (code, "Traceback" in output) == (0, False), output
        ends = camera.stop()
    assert summary["adds_up"]
    assert summary["lag_frames"] == 0
    opened = Lake.open(lake)
    found = check(opened)
    assert len(found) == 1
    assert {key: found[key][: len(seqs)] for key, seqs in committed.items()} == committed
    (seqs,) = found.values()
    assert published <= seqs[-1] + 1 <= next(iter(ends.values())), "drained up to the signal"
    assert len(opened.state.batches) == 1, "it is one recording"
    assert opened.gaps() == [], "the ring was deep enough for everything"
    assert opened.names() == {"cam": [next(iter(found))[0]]}
    wait_until(lambda: not any((lake / "_staging").glob("*/*/*")), "nothing is left in staging")
