# SPDX-License-Identifier: Apache-2.0
"""Recording live streams: every frame once or in a gap, across overruns, epochs, dead workers and restarts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Client
from tensorpool.errors import ConfigError, LocalProtocolError
from tensorpool.spark.lake import UNKNOWN_TAIL, Lake
from tensorpool.spark.recorder import Recorder, RecordingFailed, Settings, default_name
from tests.spark.conftest import look_until, new_stream
from tests.support.driver_process import Deployment
from tests.support.lakes import Camera, check, options_of
from tests.support.processes import wait_until


@pytest.fixture(params=["tail", "batches"])
def mode(request: pytest.FixtureRequest) -> str:
    """Everything holds for both ways to record."""
    return str(request.param)


@pytest.fixture
def record(spark: SparkSession, pool: tp.Local, tmp_path: Path, mode: str) -> Iterator[Callable[..., Recorder]]:
    """A recorder to the test's lake; not started, closed with the test."""
    made: list[Recorder] = []

    def make(*streams: int | str, name: str | None = None, **settings: object) -> Recorder:
        chosen = Settings(
            mode=mode, trigger_s=0.3, codec="none", is_durable=False, is_warmed_up=False, **options_of(pool)
        )
        chosen = msgspec.structs.replace(chosen, **settings)
        made.append(Recorder(spark, streams, tmp_path / "lake", name=name, settings=chosen))
        return made[-1]

    yield make
    for one in made:
        one.close()


def wait_for_frames(recorder: Recorder, count: int) -> None:
    def is_there() -> bool:
        recorder.poll()
        return recorder.totals().frames >= count

    look_until(is_there, f"{count} frames are recorded")


def test_two_streams_are_recorded_whole_with_what_was_said_of_them(
    record: Callable[..., Recorder], client: Client, tmp_path: Path
) -> None:
    """Everything that was published up to the stop is there; metadata and QoS beside it."""
    first, second = new_stream("deep"), new_stream("deep")
    with Camera(client, first, second) as camera:
        camera.producers[first].set_metadata({"exposure_ms": 4}, tags=["lab1"])
        recorder = record(first, second, is_warmed_up=True)
        recorder.start()
        wait_for_frames(recorder, 100)
        ends = camera.stop()
        totals = recorder.stop()
    assert (totals.lost, totals.lag_frames, totals.adds_up) == (0, 0, True)
    assert [stream.stream_id for stream in totals.streams] == [first, second]
    lake = Lake.open(tmp_path / "lake")
    assert sum(map(len, check(lake, ends).values())) == totals.frames >= 100
    newest = lake.metadata(first)[-1]
    assert {attribute.key: attribute.value for attribute in newest.attributes} == {"exposure_ms": b"4", "tags": b"lab1"}
    assert sum(file.rows for file in lake.tables("qos")) == totals.qos_rows > 0


def test_a_recording_goes_on_where_it_was_closed(
    record: Callable[..., Recorder], client: Client, tmp_path: Path
) -> None:
    """Closed without draining: the frames in between come from the ring."""
    stream = new_stream("deep")
    with Camera(client, stream, hz=50) as camera:
        recorder = record(stream, name="cam")
        with pytest.raises(LocalProtocolError, match="recording 'cam' is running already"):
            record(stream, name="cam")
        recorder.start()
        wait_for_frames(recorder, 40)
        recorder.close()
        more = camera.producers[stream].next_seq + 50
        wait_until(lambda: camera.producers[stream].next_seq > more, "more is published")
        again = record(stream, name="cam")
        assert again.is_resumed
        again.start()
        wait_for_frames(again, 40)
        ends = camera.stop()
        assert again.stop().lost == 0
    lake = Lake.open(tmp_path / "lake")
    assert len(lake.state.batches) == 1
    check(lake, ends)
    assert lake.gaps() == []


def test_whoever_gives_up_draining_is_told_what_is_left(
    record: Callable[..., Recorder], client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    stream = new_stream("deep")
    with Camera(client, stream, hz=200) as camera:
        recorder = record(stream)
        recorder.start()
        seq = camera.producers[stream].next_seq
        wait_until(lambda: camera.producers[stream].next_seq > seq, "there is something to record")
        recorder.stop(timeout_s=0)
    (told,) = [it.message for it in caplog.records if it.message.startswith("stopped_early")]
    assert "goes on where its last commit ended" in told


@pytest.mark.parametrize("mode", ["batches"])
def test_an_overrun_of_a_small_ring_is_gaps_that_add_up(
    record: Callable[..., Recorder], client: Client, tmp_path: Path
) -> None:
    stream = new_stream("tiny")
    with Camera(client, stream, hz=500) as camera:
        recorder = record(stream)
        recorder.start()
        look_until(lambda: recorder.totals().lost >= 100, "the ring outruns it")
        ends = camera.stop()
        totals = recorder.stop()
    assert totals.frames >= 8, "what the ring still had"
    assert totals.adds_up
    assert totals.streams[0].reasons == {"OVERWRITTEN": totals.lost}
    check(Lake.open(tmp_path / "lake"), ends)


@pytest.mark.parametrize("mode", ["batches"])
def test_with_fail_on_data_loss_an_overrun_ends_it_with_the_range(
    record: Callable[..., Recorder], client: Client
) -> None:
    stream = new_stream("tiny")
    with Camera(client, stream, hz=500):
        recorder = record(stream, fail_on_data_loss=True)
        recorder.start()
        with pytest.raises(RecordingFailed, match=rf"DataLoss: stream {stream}, epoch \d+: frames \d+ to \d+ are lost"):
            wait_for_frames(recorder, 10**9)


def test_a_new_epoch_goes_on_in_the_same_recording(
    record: Callable[..., Recorder], pool: tp.Local, client: Client, tmp_path: Path
) -> None:
    """The producer leaves and another comes: the driver begins a new epoch."""
    stream = new_stream("deep")
    with Camera(client, stream, hz=50):
        recorder = record(stream)
        recorder.start()
        wait_for_frames(recorder, 20)
    with Camera(client, stream) as camera:
        wait_until(lambda: camera.producers[stream].next_seq > 50, "the next producer publishes")
        ends = camera.stop()
        totals = recorder.stop()
    lake = Lake.open(tmp_path / "lake")
    found = check(lake, ends)
    assert len(found) == totals.streams[0].epochs >= 2
    assert totals.adds_up
    assert not [gap for gap in lake.gaps() if gap.reason == UNKNOWN_TAIL]


def test_a_worker_that_is_killed_in_the_midst_of_a_task_costs_nothing(
    record: Callable[..., Recorder], client: Client, spark: SparkSession, tmp_path: Path
) -> None:
    """kill -9 of every Python process that Spark runs tasks in while one has a task: the query fails and goes on."""
    stream = new_stream("deep")
    tracker = spark.sparkContext.statusTracker()

    def tasks() -> int:
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        return sum(stage.numActiveTasks for stage in stages if stage is not None)

    with Camera(client, stream, hz=25) as camera:  # the ring outlasts a slow restart
        recorder = record(stream)
        recorder.start()
        wait_for_frames(recorder, 20)
        workers = workers_below(spark)
        assert workers
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        look_until(lambda: tasks() > 0, "a task is with a worker that does nothing")
        for pid in workers_below(spark):
            os.kill(pid, signal.SIGKILL)
        wait_for_frames(recorder, recorder.totals().frames + 20)
        ends = camera.stop()
        totals = recorder.stop()
    assert totals.restarts >= 1
    lake = Lake.open(tmp_path / "lake")
    check(lake, ends)
    assert totals.lost == 0
    assert lake.gaps() == []


def workers_below(spark: SparkSession) -> list[int]:
    """The Python processes that run tasks: children of the daemons that the JVM has started."""
    java = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        parents[int(stat.parent.name)] = (int(words[1]), command)
    daemons = {pid for pid, (parent, command) in parents.items() if parent == java and b"pyspark.worker" in command}
    return [pid for pid, (parent, _) in parents.items() if parent in daemons]


def test_a_driver_that_is_killed_and_started_again_costs_no_recording(
    spark: SparkSession, media_driver: aeron.MediaDriver, shm_dir: Path, tmp_path: Path, mode: str
) -> None:
    """It goes on by itself in the epoch that the next driver makes; what nobody saw of the old one is a gap."""
    profile = {"header_nslots": 4096, "payload_pools": [{"pool_id": 1, "stride_bytes": 1024}]}
    patient = {"announce_period_ms": 1000, "lease_keepalive_interval_ms": 1000}
    site = Deployment(shm_dir, media_driver.aeron_dir, profiles={"small": profile}, policies=patient)
    settings = Settings(mode=mode, trigger_s=0.3, codec="none", is_durable=False, is_warmed_up=False)
    with site.start() as first:
        where = {"aeron_dir": site.aeron_dir, "config": str(site.config_path)}
        client = tp.connect(site.aeron_dir, config=site.config_path)
        with client, Camera(client, 10_000, hz=50) as camera:
            recorder = Recorder(spark, [10_000], tmp_path / "lake", settings=msgspec.structs.replace(settings, **where))
            recorder.start()
            wait_for_frames(recorder, 20)
            before = camera.producers[10_000].epoch
            first.kill()
            with site.start():
                wait_until(lambda: (camera.producers[10_000].epoch or 0) > (before or 0), "the next epoch")
                wait_for_frames(recorder, recorder.totals().frames + 40)
                ends = camera.stop()
                totals = recorder.stop()
    lake = Lake.open(tmp_path / "lake")
    found = check(lake, ends)
    assert max(epoch for _, epoch in found) > (before or 0)
    assert totals.adds_up
    assert totals.streams[0].epochs >= 2


@contextlib.contextmanager
def small_disk(at: Path) -> Iterator[Path]:
    """Let go of as soon as Spark's workers do."""
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(at)], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_is_waited_for(
    record: Callable[..., Recorder], client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, nothing is torn or there twice, and the recording goes on when there is space."""
    stream = new_stream("deep")
    with small_disk(tmp_path / "lake") as mount, Camera(client, stream, hz=50) as camera:
        recorder = record(stream)
        recorder.start()
        wait_for_frames(recorder, 20)
        hog = mount / ".hog"
        with hog.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):  # to the last byte, whatever the recorder takes meanwhile
                pass

        def is_full() -> bool:
            recorder.poll()
            return recorder.is_full

        look_until(is_full, "the recorder says that there is no space")
        before = recorder.totals().frames
        hog.unlink()
        wait_for_frames(recorder, before + 20)
        ends = camera.stop()
        totals = recorder.stop()
        assert not recorder.is_full
        assert totals.adds_up
        check(Lake.open(mount), ends)
        assert [told.message.split()[0] for told in caplog.records if "lake_" in told.message] == [
            "lake_full",
            "lake_goes_on",
        ]


def test_what_cannot_be_recorded_is_refused(record: Callable[..., Recorder]) -> None:
    with pytest.raises(ConfigError, match="at least one stream"):
        record()
    with pytest.raises(ConfigError, match="letters, digits"):
        record(1, name="../up")
    with pytest.raises(ConfigError, match="none or lz4 or zstd"):
        record(1, codec="gzip")
    with pytest.raises(ConfigError, match="tail or batches"):
        record(1, mode="guess")


def test_a_recording_goes_on_as_it_was_begun(record: Callable[..., Recorder], client: Client, mode: str) -> None:
    stream = new_stream("deep")
    with Camera(client, stream, hz=50):
        recorder = record(stream, name="cam")
        recorder.start()
        wait_for_frames(recorder, 5)
        recorder.close()
        other = {"tail": "batches", "batches": "tail"}[mode]
        again = record(stream, name="cam", mode=other)
        with pytest.raises(ConfigError, match=f"{other}.*accepted: {mode}, with which cam was begun"):
            again.start()
        again.close()
        again = record(stream, name="cam", mode=None)
        again.start()
        assert again.mode == mode


def test_a_recording_is_named_by_its_streams() -> None:
    assert default_name(["camera/front", 10001]) == "camera-front_10001"
