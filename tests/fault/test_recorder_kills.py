# SPDX-License-Identifier: Apache-2.0
"""`tensorpool record` and SIGKILL at random instants: what was committed is there once, what is missing explained."""

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
QUICK = "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class Recording:
    """The command in a process of its own, and what it says."""

    def __init__(self, pool: tp.Local, lake: Path, *options: str) -> None:
        where = ("--aeron-dir", pool.aeron_dir, "--set", f"shm.base_dir={pool.config.shm.base_dir}")
        quick = ("--spark", QUICK, "--spark", "spark.driver.memory=1g", "--master", "local[2]", "--no-sync")
        command = ("record", "cam", "--to", str(lake), "--trigger", "0.2", "--codec", "none", "--json")
        self.process = Process("-m", "tensorpool", *command, *where, *quick, *options)

    def wait_for(self, event: str) -> dict[str, Any]:
        """The next of its events of a kind; fails with its output where it ends before."""
        heard = []
        while line := self.process.read_line():
            heard.append(line)
            if line.startswith("{") and json.loads(line).get("event") == event:
                return json.loads(line)  # type: ignore[no-any-return]
        raise AssertionError("\n".join(heard[-20:]))

    def wait_for_frames(self, frames: int) -> None:
        while self.wait_for("progress")["frames"] < frames:
            pass

    def jvm(self) -> int:
        """The JVM that it has started."""
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, _, rest = path.read_text().rpartition(")")
            except OSError:
                continue
            if int(rest.split()[1]) == self.process.pid and "(java" in name:
                return int(path.parent.name)
        raise AssertionError("no JVM")


@pytest.fixture
def pool() -> Iterator[tp.Local]:
    with tp.local(overrides=SETTINGS) as pool:
        yield pool


def test_frames_survive_a_kill_and_sigterm_drains(pool: tp.Local, tmp_path: Path) -> None:
    """Recorder or JVM killed, started again, ended in order: one recording, no frame twice, none unexplained."""
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    victim = chance.choice(["recorder", "jvm"])
    print(f"seed {seed}, victim {victim}")
    lake = tmp_path / "lake"
    with pool.connect() as client, Camera(client, "cam", hz=100) as camera:
        first = Recording(pool, lake, "--no-warm-up")
        with first.process as process:
            first.wait_for_frames(chance.randrange(1, 200))
            jvm = first.jvm()
            os.kill(process.pid if victim == "recorder" else jvm, signal.SIGKILL)
            code, output = process.finish()
            assert (code, "Spark is gone" in output) == ((-9, False) if victim == "recorder" else (1, True)), output
        committed = check(Lake.open(lake))
        second = Recording(pool, lake)
        with second.process as process:
            second.wait_for_frames(1)
            assert not Path(f"/proc/{jvm}").exists(), "one recording has one Spark"
            published = camera.producers["cam"].next_seq
            process.send(signal.SIGTERM)
            summary = second.wait_for("summary")
            code, output = process.finish()
            assert code == 0, output
        ends = camera.stop()
    assert summary["adds_up"]
    assert summary["lag_frames"] == 0
    found = check(Lake.open(lake))
    assert len(found) == 1
    assert {key: found[key][: len(seqs)] for key, seqs in committed.items()} == committed
    (seqs,) = found.values()
    assert published <= seqs[-1] + 1 <= next(iter(ends.values())), "drained up to the signal"
    opened = Lake.open(lake)
    assert len(opened.state.batches) == 1, "it is one recording"
    assert opened.gaps() == [], "the ring was deep enough for everything"
    wait_until(lambda: not any((lake / "_staging").glob("*/*/*")), "nothing is left in staging")
