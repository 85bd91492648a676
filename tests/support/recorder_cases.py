# SPDX-License-Identifier: Apache-2.0
"""What holds for a recorder whichever engine it has: every frame once or in a gap, across epochs and restarts.

Test modules import these and give the fixture `record`: it makes a recorder to the test's lake, not started, and
closes it with the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Client
from tensorpool.errors import ConfigError, LocalProtocolError
from tensorpool.lake import UNKNOWN_TAIL, Lake
from tensorpool.lake.recorder import RecorderBase, Totals, default_name
from tests.control.peer import IPC, EventPeer
from tests.support.deployment import look_until, new_stream
from tests.support.driver_process import Deployment
from tests.support.lakes import Camera, check, recorded
from tests.support.processes import wait_until

TAG = "service:recorder:held"


def wait_for_totals(recorder: RecorderBase, is_met: Callable[[Totals], bool], what: str) -> None:
    """A query that fails meanwhile is started again."""

    def is_there() -> bool:
        recorder.poll()
        return is_met(recorder.totals())

    look_until(is_there, what)


def wait_for_frames(recorder: RecorderBase, count: int) -> None:
    wait_for_totals(recorder, lambda totals: totals.frames >= count, f"{count} frames are recorded")


def test_two_streams_are_recorded_whole_with_what_was_said_of_them(
    record: Callable[..., RecorderBase], client: Client, tmp_path: Path
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
    attributes = {attribute.key: attribute.value for attribute in newest.attributes}
    assert attributes.items() >= {"exposure_ms": b"4", "tags": b"lab1"}.items()
    assert sum(file.rows for file in lake.tables("qos")) == totals.qos_rows > 0


def test_a_recording_goes_on_where_it_was_closed(
    record: Callable[..., RecorderBase], client: Client, tmp_path: Path
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


def test_a_recording_goes_on_with_fewer_streams(
    record: Callable[..., RecorderBase], client: Client, tmp_path: Path
) -> None:
    """What is recorded goes on without a loss. What is left out keeps its frames; those of a batch that was planned but
    not committed are recorded or counted as lost."""
    first, second = new_stream("deep"), new_stream("deep")
    with Camera(client, first, second, hz=50) as camera:
        recorder = record(first, second, name="cam")
        recorder.start()
        wait_for_frames(recorder, 40)
        recorder.close()
        left_out = second, camera.producers[second].epoch or 0
        before = recorded(Lake.open(tmp_path / "lake"))[left_out]
        again = record(first, name="cam")
        again.start()
        wait_for_frames(again, 40)
        ends = camera.stop()
        totals = again.stop()
    assert totals.adds_up
    assert [stream.lost for stream in totals.streams if stream.stream_id == first] == [0]
    found = check(Lake.open(tmp_path / "lake"), {first: ends[first]})
    assert found[left_out][: len(before)] == before
    assert max(found[left_out]) < ends[second] - 1


def test_a_caller_that_gives_up_draining_learns_what_is_left(
    record: Callable[..., RecorderBase], client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    stream = new_stream("deep")
    with Camera(client, stream, hz=200) as camera:
        recorder = record(stream)
        recorder.start()
        seq = camera.producers[stream].next_seq
        wait_until(lambda: camera.producers[stream].next_seq > seq, "there is something to record")
        recorder.stop(timeout_s=0)
    (text,) = [it.message for it in caplog.records if it.message.startswith("stopped_early")]
    assert "goes on where its last commit ended" in text


def test_a_new_epoch_goes_on_in_the_same_recording(
    record: Callable[..., RecorderBase], pool: tp.Local, client: Client, tmp_path: Path
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


@contextlib.contextmanager
def small_disk(at: Path) -> Iterator[Path]:
    """Let go of as soon as Spark's workers do."""
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(at)], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def fill(mount: Path, recorder: RecorderBase) -> Path:
    """Leave no space until the recorder says so: the file to remove."""
    hog = mount / ".hog"
    with hog.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):  # to the last byte, whatever the recorder takes meanwhile
            pass

    def is_full() -> bool:
        recorder.poll()
        return recorder.is_full

    look_until(is_full, "the recorder says that there is no space")
    return hog


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_is_waited_for(
    record: Callable[..., RecorderBase], client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, nothing is torn or there twice, and the recording goes on when there is space."""
    stream = new_stream("deep")
    with small_disk(tmp_path / "lake") as mount, Camera(client, stream, hz=50) as camera:
        recorder = record(stream)
        recorder.start()
        wait_for_frames(recorder, 20)
        hog = fill(mount, recorder)
        before = recorder.totals().frames
        hog.unlink()
        wait_for_frames(recorder, before + 20)
        ends = camera.stop()
        totals = recorder.stop()
        assert not recorder.is_full
        assert totals.adds_up
        check(Lake.open(mount), ends)
        assert [record.message.split()[0] for record in caplog.records if "lake_" in record.message] == [
            "lake_full",
            "lake_goes_on",
        ]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_recorder_that_is_stopped_when_there_is_space_again_records_up_to_the_stop(
    record: Callable[..., RecorderBase], client: Client, tmp_path: Path
) -> None:
    """What is published after the stop does not count as frames for which there was no space."""
    stream = new_stream("deep")
    with small_disk(tmp_path / "lake") as mount, Camera(client, stream, hz=200) as camera:
        recorder = record(stream)
        recorder.start()
        wait_for_frames(recorder, 20)
        fill(mount, recorder).unlink()
        end = camera.producers[stream].next_seq
        totals = recorder.stop()
        assert totals.adds_up
        (found,) = check(Lake.open(mount)).values()
        assert max(found) >= end - 1


def test_what_cannot_be_recorded_is_refused(record: Callable[..., RecorderBase]) -> None:
    with pytest.raises(ConfigError, match="at least one stream"):
        record()
    with pytest.raises(ConfigError, match="letters, digits"):
        record(1, name="../up")
    with pytest.raises(ConfigError, match="none or lz4 or zstd"):
        record(1, codec="gzip")


def test_a_driver_that_is_killed_and_started_again_costs_no_recording(
    record: Callable[..., RecorderBase], media_driver: aeron.MediaDriver, shm_dir: Path, tmp_path: Path
) -> None:
    """It goes on by itself in the epoch that the next driver makes; what was not read of the old one is a gap."""
    profile = {"header_nslots": 4096, "payload_pools": [{"pool_id": 1, "stride_bytes": 1024}]}
    patient = {"announce_period_ms": 1000, "lease_keepalive_interval_ms": 1000}
    site = Deployment(shm_dir, media_driver.aeron_dir, profiles={"small": profile}, policies=patient)
    with site.start() as first:
        where = {"aeron_dir": site.aeron_dir, "config": str(site.config_path), "overrides": {}}
        client = tp.connect(site.aeron_dir, config=site.config_path)
        with client, Camera(client, 10_000, hz=50) as camera:
            recorder = record(10_000, **where)
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


def test_a_recording_is_named_by_its_streams() -> None:
    assert default_name(["camera/front", 10001]) == "camera-front_10001"


def test_a_pause_costs_what_the_rings_forgot_in_it(
    record: Callable[..., RecorderBase], pool: tp.Local, client: Client, tmp_path: Path
) -> None:
    """Paused it takes no frames; resumed it goes on: a deep ring has them all, a small one leaves a gap."""
    deep, tiny = new_stream("deep"), new_stream("tiny")
    recorder = record(deep, tiny, name="held", trigger_s=0.1)
    with Camera(client, deep, tiny, hz=50) as camera:  # the deep ring lasts 80 s
        recorder.start()
        peer = EventPeer(pool.aeron_dir, control=(IPC, 1400), status=(IPC, 1401), turn=recorder.poll)
        with peer:
            wait_until(lambda: recorder.poll() or recorder.totals().frames >= 20, "it records")
            assert peer.answer_to(peer.command(TAG, "pause")).value == b"paused"
            assert recorder.is_paused
            held = recorder.totals().frames
            producer = camera.producers[tiny]
            until = producer.next_seq + 40  # five times what the small ring holds
            wait_until(lambda: recorder.poll() or producer.next_seq > until, "more is published")
            status = json.loads(peer.answer_to(peer.command(TAG, "status")).value)
            assert (status["frames"], status["state"], status["streams"]) == (held, "paused", [deep, tiny])
            assert peer.answer_to(peer.command(TAG, "resume")).value == b"running"
            wait_until(lambda: recorder.poll() or recorder.totals().frames > held + 40, "it goes on")
            ends = camera.stop()
            assert peer.answer_to(peer.command(TAG, "drain")).value == b"draining"
            peer.until(lambda: recorder.is_drained, "it is drained")
        totals = recorder.stop()
    assert totals.adds_up
    lost = {stream.stream_id: stream.lost for stream in totals.streams}
    assert lost[deep] == 0
    assert lost[tiny] >= 20
    check(Lake.open(tmp_path / "lake"), ends)
