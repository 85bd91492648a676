# SPDX-License-Identifier: Apache-2.0
"""Spark's recorder: what holds for every recorder, and that dead workers cost nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.errors import ConfigError
from tensorpool.lake import Lake
from tensorpool.lake.direct_recorder import DirectRecorder
from tensorpool.spark.recorder import Recorder, RecordingFailed, Settings
from tests.support.deployment import look_until, new_stream
from tests.support.lakes import Camera, check, options_of
from tests.support.recorder_cases import (  # noqa: F401  run here with the fixture `record` below
    test_a_caller_that_gives_up_draining_learns_what_is_left,
    test_a_driver_that_is_killed_and_started_again_costs_no_recording,
    test_a_full_disk_is_waited_for,
    test_a_new_epoch_goes_on_in_the_same_recording,
    test_a_pause_costs_what_the_rings_forgot_in_it,
    test_a_recorder_that_is_stopped_when_there_is_space_again_records_up_to_the_stop,
    test_a_recording_goes_on_where_it_was_closed,
    test_a_recording_goes_on_with_fewer_streams,
    test_a_recording_is_named_by_its_streams,
    test_two_streams_are_recorded_whole_with_what_was_said_of_them,
    test_what_cannot_be_recorded_is_refused,
    wait_for_frames,
    wait_for_totals,
)


@pytest.fixture
def record(spark: SparkSession, pool: tp.Local, tmp_path: Path) -> Iterator[Callable[..., Recorder]]:
    """A recorder to the test's lake; not started, closed with the test."""
    made: list[Recorder] = []

    def make(*streams: int | str, name: str | None = None, **settings: Any) -> Recorder:
        chosen = Settings(trigger_s=0.3, codec="none", is_durable=False, is_warmed_up=False, **options_of(pool))
        chosen = msgspec.structs.replace(chosen, **settings)
        made.append(Recorder(spark, streams, tmp_path / "lake", name=name, settings=chosen))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_an_overrun_of_a_small_ring_is_gaps_that_add_up(
    record: Callable[..., Recorder], client: Client, tmp_path: Path
) -> None:
    stream = new_stream("tiny")
    with Camera(client, stream, hz=500) as camera:
        recorder = record(stream)
        recorder.start()
        wait_for_totals(recorder, lambda totals: totals.lost >= 100, "the ring outruns it")
        ends = camera.stop()
        totals = recorder.stop()
    assert totals.frames >= 8, "what the ring still had"
    assert totals.adds_up
    assert totals.streams[0].reasons == {"OVERWRITTEN": totals.lost}
    check(Lake.open(tmp_path / "lake"), ends)


def test_with_fail_on_data_loss_an_overrun_ends_it_with_the_range(
    record: Callable[..., Recorder], client: Client
) -> None:
    stream = new_stream("tiny")
    with Camera(client, stream, hz=500):
        recorder = record(stream, fail_on_data_loss=True)
        recorder.start()
        with pytest.raises(RecordingFailed, match=rf"DataLoss: stream {stream}, epoch \d+: frames \d+ to \d+ are lost"):
            wait_for_frames(recorder, 10**9)


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


def test_a_recording_goes_on_with_the_engine_that_it_was_begun_with(
    record: Callable[..., Recorder], client: Client, tmp_path: Path
) -> None:
    """Spark's checkpoint and that of a direct recording count batches of their own."""
    first, second = new_stream("deep"), new_stream("deep")
    with Camera(client, first, second, hz=50):
        recorder = record(first, name="cam")
        recorder.start()
        wait_for_frames(recorder, 5)
        settings = recorder.settings
        recorder.close()
        with (
            pytest.raises(ConfigError, match=r"cam.*begun with it"),
            DirectRecorder([first], tmp_path / "lake", name="cam", settings=settings),
        ):
            pass
        with DirectRecorder([second], tmp_path / "lake", name="other", settings=settings) as direct:
            wait_for_frames(direct, 5)
        again = record(second, name="other")
        with pytest.raises(ConfigError, match=r"other.*not begun with --direct"):
            again.start()
