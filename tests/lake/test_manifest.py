# SPDX-License-Identifier: Apache-2.0
"""The lake on disk: what is a lake, commits that are whole and one at a time, and errors that name the file."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tensorpool.errors import ConfigError, LocalProtocolError
from tensorpool.lake import (
    Lake,
    LakeConflict,
    LakeDamaged,
    LakeFile,
    commits,
    delta_log,
    layout,
    maintenance,
    ring_reader,
)
from tensorpool.lake.commits import Staged
from tensorpool.lake.file_policy import FilePolicy
from tensorpool.lake.lake import Change
from tensorpool.lake.lock import RecordingLock
from tensorpool.lake.manifest import UNKNOWN_TAIL, Commit, Gap
from tensorpool.lake.staging import GONE, Staging
from tensorpool.lake.table_log import MIN_ENTRIES_PER_CHECKPOINT
from tensorpool.spark.lake_options import lake_options
from tests.support.frame_rows import make_lake, row, source
from tests.support.lakes import Ring, check

NO_SYNC = FilePolicy("none", is_durable=False)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


@pytest.fixture
def ring(shm_dir: Path) -> Iterator[Ring]:
    yield Ring(shm_dir)
    ring_reader.let_go(0)


def record(lake: Lake, ring: Ring, batch: int, lo: int, hi: int, query: str = "q") -> Commit | None:
    staged = Staging(lake.path, query, batch).stage(ring.part(lo, hi), ring.span(lo, hi), NO_SYNC)
    return commits.commit(lake, query, batch, [staged])


def made_up(lo: int, hi: int, epoch: int = 1) -> LakeFile:
    return LakeFile(layout.frames_path(10_000, epoch, lo, hi, "x"), 10_000, epoch, lo, hi, hi - lo, 100)


# --- what is a lake


def test_streams_are_found_by_the_names_that_they_were_recorded_under(tmp_path: Path) -> None:
    """A name that is unknown lists those that are there, one that several streams had their ids."""
    names = [source(10_000, "camera/front"), source(10_000, "", told_ns=5), source(7, "rig"), source(8, "rig")]
    rows = [row(stream_id=stream) for stream in (7, 8, 9, 10_000)]
    lake = make_lake(tmp_path / "named", rows, metadata=[*names, source(11, "without/frames")])
    assert lake.names() == {"camera/front": [10_000], "rig": [7, 8]}
    assert lake.resolve(["camera/front", "9", 7]) == (10_000, 9, 7)
    with pytest.raises(
        ConfigError, match=r"--stream = 'camera/fornt' .* rig \(7\), rig \(8\), 9, camera/front \(10000\)"
    ):
        lake.resolve(["camera/fornt"], "--stream")
    with pytest.raises(ConfigError, match="one of the ids that had this name: 7, 8"):
        lake.resolve(["rig"])
    with pytest.raises(ConfigError, match=r"streams = 11 .* a recorded stream"):
        lake.resolve([11])
    with pytest.raises(ConfigError, match="there is none in the lake"):
        Lake.create(tmp_path / "empty").resolve(["camera/front"])


def test_a_lake_is_made_once_and_opened_as_often_as_you_like(tmp_path: Path) -> None:
    Lake.create(tmp_path / "a" / "lake")
    assert Lake.create(tmp_path / "a" / "lake").state.number == 0
    assert Lake.open(tmp_path / "a" / "lake").streams() == []


def test_what_is_no_lake_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="record to it first"):
        Lake.open(tmp_path)
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ConfigError, match=r"an empty directory: it has .thesis\.txt"):
        Lake.create(tmp_path)
    with pytest.raises(ConfigError, match="a directory"):
        Lake.create(tmp_path / "thesis.txt" / "lake")
    with pytest.raises(ConfigError, match="record to it first"):
        Lake.open(tmp_path / "thesis.txt")


def test_a_lake_of_another_version_or_format_is_refused(lake: Lake, tmp_path: Path) -> None:
    """Of a later version, of the format before Delta, and a Delta table that is no lake: each with a sentence."""
    first = lake.path / delta_log.entry_name(0)
    written = first.read_bytes()
    first.write_bytes(written.replace(b'"tensorpool.lake":"1"', b'"tensorpool.lake":"2"'))
    with pytest.raises(ConfigError, match="a lake of version 1, not 2"):
        Lake.open(lake.path)
    first.write_bytes(written.replace(b'"tensorpool.lake":"1"', b'"other":"1"'))
    with pytest.raises(ConfigError, match="not another Delta table"):
        Lake.create(lake.path)
    old = tmp_path / "old"
    (old / "_manifest").mkdir(parents=True)
    (old / "_lake.json").write_text('{"format": "tensorpool.lake", "version": 1}')
    for opens in (Lake.open, Lake.create):
        with pytest.raises(ConfigError, match="of a format that was never released"):
            opens(old)


@pytest.mark.parametrize("place", ["gs://bucket/lake", "hdfs://host/lake", "http://host/lake"])
def test_a_place_that_is_not_supported_is_refused(place: str) -> None:
    """No scheme becomes a local directory in silence."""
    for opens in (Lake.open, Lake.create):
        with pytest.raises(ConfigError, match="accepted: a path"):
            opens(place)


def test_a_lake_deleted_and_made_anew_at_its_path_is_another(lake: Lake, ring: Ring) -> None:
    """An open lake does not mix what it knows of the first with the second."""
    ring.write(8)
    for batch in range(4):
        record(lake, ring, batch, 2 * batch, 2 * batch + 2)
    shutil.rmtree(lake.path)
    other = Lake.create(lake.path)
    record(other, ring, 0, 0, 4)
    assert [(file.lo, file.hi) for file in lake.files()] == [(0, 4)]
    record(lake, ring, 1, 4, 8)
    assert check(other) == {(10_000, 1): list(range(8))}
    assert other.state.number == 2


# --- commits


def test_of_two_committers_one_wins_a_number_and_both_get_in(lake: Lake) -> None:
    """Several at once, each from a view of its own: nothing is overwritten, numbers are without gaps."""

    def commit(worker: int) -> None:
        own = Lake.open(lake.path)
        for index in range(10):
            lo = 10 * (10 * worker + index)
            own.append("record", lambda _, lo=lo: Change((made_up(lo, lo + 10),)))  # type: ignore[misc]

    workers = [threading.Thread(target=commit, args=(worker,)) for worker in range(4)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    assert lake.state.number == 40
    assert [file.lo for file in lake.files()] == list(range(0, 400, 10))
    assert sorted(lake.commit(number).added[0].lo for number in range(1, 41)) == list(range(0, 400, 10))


def test_many_commits_are_summed_up_and_the_sum_is_used(lake: Lake) -> None:
    count = MIN_ENTRIES_PER_CHECKPOINT + 5
    for index in range(count):
        lake.append("record", lambda _, lo=index: Change((made_up(lo, lo + 1),)))  # type: ignore[misc]
    lake.log.settle()
    assert (lake.path / delta_log.checkpoint_name(MIN_ENTRIES_PER_CHECKPOINT - 1)).exists()
    (lake.path / delta_log.entry_name(3)).unlink()  # the checkpoint replaces it
    assert [file.lo for file in Lake.open(lake.path).files()] == list(range(count))
    assert len(Lake.open(lake.path).state_at(MIN_ENTRIES_PER_CHECKPOINT + 1).files) == MIN_ENTRIES_PER_CHECKPOINT + 1


def test_a_missing_or_torn_commit_is_an_error_that_names_it(lake: Lake) -> None:
    for index in range(3):
        lake.append("record", lambda _, lo=index: Change((made_up(lo, lo + 1),)))  # type: ignore[misc]
    second = lake.path / delta_log.entry_name(2)
    second.write_bytes(second.read_bytes()[:-20])
    with pytest.raises(LakeDamaged, match=r"00002\.json: it is torn"):
        Lake.open(lake.path).files()
    second.unlink()
    with pytest.raises(LakeDamaged, match=r"00002\.json: the log entry is missing"):
        Lake.open(lake.path).files()


def test_a_log_cannot_lead_out_of_the_lake(lake: Lake) -> None:
    for path in ("/etc/passwd", "../../etc/passwd"):
        with pytest.raises(LakeDamaged, match="outside the lake"):
            lake.full_path(path)


# --- ranges of a ring


def test_frames_are_recorded_byte_for_byte_and_gaps_with_their_reason(lake: Lake, ring: Ring) -> None:
    ring.write(6)
    record(lake, ring, 0, 0, 6)
    ring.write(20)
    record(lake, ring, 1, 6, 26)
    assert check(lake) == {(10_000, 1): [0, 1, 2, 3, 4, 5, *range(18, 26)]}
    assert lake.gaps() == [Gap(10_000, 1, 6, 18, "OVERWRITTEN")]
    first = lake.files()[0]
    assert (first.frames, first.first_timestamp_ns, first.last_timestamp_ns, first.payload_bytes) == (6, 1, 6, 576)


def test_a_batch_that_comes_again_adopts_what_is_staged(lake: Lake, ring: Ring) -> None:
    """The ring has moved on; the staged file is all that is left of its frames."""
    ring.write(8)
    Staging(lake.path, "q", 0).stage(ring.part(0, 8), ring.span(0, 8), NO_SYNC)
    ring.write(30)
    record(lake, ring, 0, 0, 8)
    assert check(lake) == {(10_000, 1): list(range(8))}
    assert lake.gaps() == []


def test_a_batch_that_is_cut_otherwise_when_it_comes_again_loses_nothing(lake: Lake, ring: Ring) -> None:
    ring.write(8)
    folder = Staging(lake.path, "q", 0)
    folder.stage(ring.part(0, 5), ring.span(0, 5), NO_SYNC)
    ring.write(6)  # 0 to 5 are overwritten
    parts = [folder.stage(ring.part(lo, hi), ring.span(lo, hi), NO_SYNC) for lo, hi in ((0, 3), (3, 8))]
    commits.commit(lake, "q", 0, parts)
    assert check(lake) == {(10_000, 1): [0, 1, 2, 3, 4, 6, 7]}
    assert lake.gaps() == [Gap(10_000, 1, 5, 6, "OVERWRITTEN")]


def test_a_torn_staged_file_is_read_again(lake: Lake, ring: Ring) -> None:
    ring.write(4)
    folder = Staging(lake.path, "q", 0)
    folder.stage(ring.part(0, 4), ring.span(0, 4), NO_SYNC)
    staged = next(folder.folder.iterdir())
    staged.write_bytes(staged.read_bytes()[:100])
    record(lake, ring, 0, 0, 4)
    assert check(lake) == {(10_000, 1): [0, 1, 2, 3]}


def test_a_ring_that_is_gone_is_a_gap(lake: Lake, ring: Ring) -> None:
    staged = Staging(lake.path, "q", 0).stage(None, ring.span(3, 9), NO_SYNC)
    assert staged == Staged((), (Gap(10_000, 1, 3, 9, GONE),))


def test_a_committed_batch_is_not_committed_again(lake: Lake, ring: Ring) -> None:
    ring.write(4)
    assert record(lake, ring, 0, 0, 4) is not None
    assert record(lake, ring, 0, 0, 4) is None
    assert lake.state.number == 1


def test_a_second_recording_of_the_same_frames_is_refused(lake: Lake, ring: Ring) -> None:
    ring.write(4)
    record(lake, ring, 0, 0, 4)
    with pytest.raises(LakeConflict, match=r"frames 2 to 3 of stream 10000, epoch 1, are in the lake already"):
        record(lake, ring, 0, 2, 4, query="another")
    check(lake)
    assert maintenance.orphans(lake, -1) == []


def test_files_are_cut_by_time(lake: Lake, ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorpool.lake.staging.WRITE_BYTES", 1)
    ring.write(6)
    policy = msgspec.structs.replace(NO_SYNC, max_ns=2)
    commits.commit(lake, "q", 0, [Staging(lake.path, "q", 0).stage(ring.part(0, 6), ring.span(0, 6), policy)])
    assert [(file.lo, file.hi) for file in lake.files()] == [(0, 3), (3, 6)]


def test_leftovers_of_dead_queries_go_and_those_of_recordings_stay(lake: Lake) -> None:
    for query in ("dead", "recording"):
        (lake.path / layout.STAGING / query / "0").mkdir(parents=True)
    checkpoint = lake.path / layout.CHECKPOINTS / "cam"
    checkpoint.mkdir()
    (checkpoint / "metadata").write_text('{"id": "recording"}')
    assert commits.collect(lake, 3600) == []
    assert commits.collect(lake, -1) == ["dead"]


# --- keeping it in shape


def test_retention_forgets_the_oldest_and_says_nothing_of_them_any_more(lake: Lake, ring: Ring) -> None:
    ring.write(12)
    record(lake, ring, 0, 0, 12)
    for batch in range(1, 4):
        ring.write(4)
        record(lake, ring, batch, 8 + 4 * batch, 12 + 4 * batch)
    size = sum(file.bytes for file in lake.files())
    gone = maintenance.retain(lake, max_bytes=size - 1)
    assert (gone.files, gone.frames) == (1, 8)
    assert lake.gaps() == []
    assert check(lake) == {(10_000, 1): list(range(12, 24))}
    assert maintenance.retain(lake, max_age_s=3600) == maintenance.Removal()
    assert maintenance.retain(lake, max_age_s=0).files == 3
    assert lake.files() == []


def test_removed_files_stay_for_the_grace_period(lake: Lake, ring: Ring) -> None:
    ring.write(4)
    record(lake, ring, 0, 0, 4)
    file = lake.full_path(lake.files()[0].path)
    maintenance.retain(lake, max_age_s=0)
    assert maintenance.remove_unused(lake, grace_s=3600).files == 0
    assert file.exists()
    assert maintenance.remove_unused(lake, grace_s=0).files == 1
    assert not file.exists()
    assert maintenance.remove_unused(lake, grace_s=0).files == 0


def test_a_check_finds_what_is_missing_torn_or_unexplained(lake: Lake, ring: Ring) -> None:
    ring.write(8)
    record(lake, ring, 0, 0, 3)
    record(lake, ring, 1, 3, 6)
    assert maintenance.verify(lake, is_deep=True) == []
    lake.append("record", lambda _: Change((made_up(7, 8),)))
    first = lake.full_path(lake.files()[0].path)
    first.write_bytes(first.read_bytes()[:-9])
    problems = maintenance.verify(lake)
    assert len(problems) == 3
    assert "nothing explains frames 6 to 6" in problems[0]
    assert f"{first}: it is torn" in problems[1]
    assert "it is missing" in problems[2]


def test_unknown_tails_are_kept_without_a_count(lake: Lake) -> None:
    tail = Gap(10_000, 1, 5, 5, UNKNOWN_TAIL)
    commits.commit(lake, "q", 0, [Staged((), (tail, tail))])
    assert lake.gaps() == [tail]
    assert maintenance.verify(lake) == []


# --- one recorder at a time, and its options


def test_a_recording_has_one_recorder(tmp_path: Path) -> None:
    first = RecordingLock(tmp_path / "cam.lock", "cam")
    with pytest.raises(LocalProtocolError, match="recording 'cam' is running already"):
        RecordingLock(tmp_path / "cam.lock", "cam")
    first.tell(os.getpid())
    first.release()
    RecordingLock(tmp_path / "cam.lock", "cam").release()


def test_a_living_spark_of_a_killed_recorder_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = RecordingLock(tmp_path / "cam.lock", "cam")
    first.tell(os.getppid())
    first.release()
    monkeypatch.setattr("tensorpool.lake.lock.WAIT_S", 0.0)
    with pytest.raises(LocalProtocolError, match=f"pid {os.getppid()}, does not end"):
        RecordingLock(tmp_path / "cam.lock", "cam")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "option path = None"),
        ({"codec": "gzip"}, "none or lz4 or zstd"),
        ({"tabel": "gaps"}, "did you mean table"),
        ({"table": "rows"}, "frames or gaps or qos or metadata or traces or files"),
        ({"streams": "front,,1"}, "ids or names of streams"),
        ({"maxFileBytes": "much"}, "with k, m or g"),
        ({"maxFileSeconds": "0"}, "a span of time such as 500ms"),
        ({"durable": "yes"}, "true or false"),
        ({"startingOffsets": "-1"}, "earliest, latest"),
    ],
)
def test_bad_options_are_refused_with_what_is_accepted(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        lake_options(options if not options else {"path": "/lake", **options})
