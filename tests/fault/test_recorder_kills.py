# SPDX-License-Identifier: Apache-2.0
"""`tensorpool record` and signals at random instants: what was committed is there once, what is missing explained."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars
import pytest

import tensorpool as tp
from tensorpool.lake import Lake, maintenance
from tests.support.lakes import Camera, check
from tests.support.processes import Process, wait_until

SETTINGS = {
    "profiles.default": {"header_nslots": 16_384, "payload_pools": [{"pool_id": 1, "stride_bytes": 2048}]},
    "policies.announce_period_ms": 300,
    "policies.lease_keepalive_interval_ms": 20_000,  # the camera keeps its epoch while a JVM starts
}
# As a shell or a service manager starts it: with a process group of its own.
COMMAND = "import os; os.setpgid(0, 0); from tensorpool.cli.main import main; main()"
# And on a machine that has neither Java nor pyspark.
WITHOUT_SPARK = f"import os, sys; sys.modules |= dict(pyspark=None, py4j=None); os.environ['PATH'] = ''; {COMMAND}"
SPARK = ("--spark", "spark.driver.memory=1g", "--master", "local[2]", "--no-warm-up")
PATIENCE_S = 180
OURS = "/tensorpool/"  # in a traceback: a task of Spark's that is stopped halfway prints one of its own


class Recording:
    """The command in a process of its own, and what it says."""

    def __init__(self, pool: tp.Local, lake: Path | str, *, is_direct: bool = False) -> None:
        where = ("--aeron-dir", pool.aeron_dir, "--set", f"shm.base_dir={pool.config.shm.base_dir}")
        command = ("record", "cam", "--to", str(lake), "--trigger", "0.8", "--codec", "none", "--no-sync", "--json")
        engine = ("--direct",) if is_direct else SPARK
        self.process = Process("-c", WITHOUT_SPARK if is_direct else COMMAND, *command, *where, *engine)

    def wait_for(self, event: str) -> dict[str, Any]:
        """The next of its events of a kind; fails with its output where it ends before."""
        received = []
        while (line := self.process.read_line()) or self.process.is_running:
            received.append(line)
            if line.startswith("{") and json.loads(line).get("event") == event:
                return json.loads(line)  # type: ignore[no-any-return]
        raise AssertionError("\n".join(received[-20:]))

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
    """False for a zombie whose parent has not waited for it."""
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
@pytest.mark.parametrize("victim", ["recorder", "jvm"])
def test_frames_survive_a_kill_and_a_signal_to_the_group_drains(pool: tp.Local, tmp_path: Path, victim: str) -> None:
    """Recorder or JVM killed, started again, ended by a signal: one recording, no frame twice, none unexplained.

    `timeout` and Ctrl-C signal the whole process group: it drains all the same, and ends with exit code 0.
    """
    survive_a_kill(pool, tmp_path / "lake", victim)


def test_frames_survive_a_kill_of_a_recorder_without_spark(pool: tp.Local, tmp_path: Path) -> None:
    """The same where there is neither pyspark nor Java."""
    survive_a_kill(pool, tmp_path / "lake", "direct recorder")


@pytest.mark.timeout(2 * PATIENCE_S + 60)
@pytest.mark.usefixtures("quick_jvm")
@pytest.mark.parametrize(
    "victim", ["direct recorder", *(pytest.param(one, marks=pytest.mark.soak) for one in ("recorder", "jvm"))]
)
def test_frames_survive_a_kill_of_a_recorder_to_a_bucket(
    pool: tp.Local, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """The same on S3, while files are compacted and others read: every version that they see is whole."""
    monkeypatch.setenv("TENSORPOOL_SPOOL_DIR", str(tmp_path / "spool"))
    place = f"{bucket}/lake"
    Lake.create(place)
    with at_work(place) as found:
        survive_a_kill(pool, place, victim)
    assert found.compacted > 1
    assert found.read == sorted(found.read)
    assert found.read[-1] > 0


class AtWork:
    """Compacts a lake and counts its frames again and again, on a thread."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._is_over = threading.Event()
        self.compacted = 0  # files
        self.read: list[int] = []
        self.thread = threading.Thread(target=self._run, name="at-work")

    def stop(self) -> None:
        self._is_over.set()
        self.thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.2):
            self.compacted += maintenance.compact(Lake.open(self._place), codec="none").files_before
            self.read.append(polars.scan_delta(self._place).select(polars.len()).collect().item())


@contextlib.contextmanager
def at_work(place: str) -> Iterator[AtWork]:
    found = AtWork(place)
    found.thread.start()
    try:
        yield found
    finally:
        found.stop()


def survive_a_kill(pool: tp.Local, lake: Path | str, victim: str) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    number, is_direct = chance.choice([signal.SIGTERM, signal.SIGINT]), victim == "direct recorder"
    print(f"seed {seed}: the {victim} is killed, then {number.name} to the group")
    with pool.connect() as client, Camera(client, "cam", hz=100) as camera:
        first = Recording(pool, lake, is_direct=is_direct)
        with first.process as process:
            first.wait_for_frames(chance.randrange(1, 200))
            jvms = first.jvms()
            assert len(jvms) == (0 if is_direct else 1)
            os.kill(jvms[0] if victim == "jvm" else process.pid, signal.SIGKILL)
            code, output = process.finish(timeout_s=PATIENCE_S)
            assert (code, "Spark is gone" in output) == ((1, True) if victim == "jvm" else (-9, False)), output
        committed = check(Lake.open(lake))
        second = Recording(pool, lake, is_direct=is_direct)
        with second.process as process:
            second.wait_for_frames(1)
            assert not any(map(is_alive, jvms)), "one recording has one Spark"
            published = camera.producers["cam"].next_seq
            os.killpg(process.pid, number)
            summary = second.wait_for("summary")
            code, output = process.finish(timeout_s=PATIENCE_S)
            assert (code, OURS in output) == (0, False), output
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
    wait_until(lambda: not any((opened.path / "_staging").glob("*/*/*")), "nothing is left in staging")
