# SPDX-License-Identifier: Apache-2.0
"""What keeps a lake in shape beside its recording: few small files at any time, and every frame once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.lake import Lake, upkeep
from tensorpool.lake.direct_recorder import DirectRecorder
from tensorpool.lake.file_policy import FilePolicy
from tensorpool.lake.manifest import Gap, LakeFile
from tensorpool.lake.recording_engine import Settings
from tensorpool.lake.upkeep import FILES_PER_MERGE, due_merges
from tests.support.deployment import new_stream
from tests.support.lakes import Camera, check, options_of
from tests.support.processes import wait_until

SECOND_NS = 1_000_000_000
NO_LIMIT = FilePolicy(max_bytes=256 << 20, max_ns=1 << 62)


def committed(number: int, size: int, *, frames: int = 10, stream_id: int = 1) -> LakeFile:
    lo = number * frames
    first_ns = number * SECOND_NS
    return LakeFile(
        f"{stream_id}-{number}", stream_id, 1, lo, lo + frames, frames, size, first_ns, first_ns + SECOND_NS - 1
    )


def merged(files: tuple[LakeFile, ...]) -> LakeFile:
    first, last = files[0], files[-1]
    frames, size = sum(file.frames for file in files), sum(file.bytes for file in files)
    times = first.first_timestamp_ns, last.last_timestamp_ns
    return LakeFile(f"{first.path}+", first.stream_id, first.epoch, first.lo, last.hi, frames, size, *times)


def keep(files: list[LakeFile], policy: FilePolicy) -> tuple[list[LakeFile], int]:
    """What is left when all that is due is merged, and how many bytes that wrote."""
    written = 0
    while merges := due_merges(files, policy):
        for one in merges:
            made = merged(one.files)
            assert made.bytes <= policy.max_bytes
            assert (made.last_timestamp_ns or 0) - (made.first_timestamp_ns or 0) <= policy.max_ns
            at = files.index(one.files[0])
            assert tuple(files[at : at + len(one.files)]) == one.files, "neighbours"
            files[at : at + len(one.files)] = [made]
            written += made.bytes
    return files, written


@pytest.mark.parametrize("size", [900, 70_000, 3 << 20])
def test_a_stream_has_some_tens_of_small_files_however_long_it_is_recorded(size: int) -> None:
    """And no byte is written more than a few times for it."""
    files: list[LakeFile] = []
    written = small = 0
    for number in range(4000):
        files, more = keep([*files, committed(number, size)], NO_LIMIT)
        written += more
        small = max(small, sum(2 * file.bytes <= NO_LIMIT.max_bytes for file in files))
    assert [file.lo for file in files[1:]] == [file.hi for file in files[:-1]], "all of it, in order"
    assert small < 4 * FILES_PER_MERGE
    assert written <= 5 * 4000 * size


def test_files_end_at_their_time() -> None:
    """Of a minute at most, of which nothing is merged again."""
    policy = FilePolicy(max_bytes=256 << 20, max_ns=60 * SECOND_NS)
    files: list[LakeFile] = []
    for number in range(600):
        files, _ = keep([*files, committed(number, 1000)], policy)
    spans = [(file.last_timestamp_ns or 0) - (file.first_timestamp_ns or 0) for file in files]
    assert max(spans) > 30 * SECOND_NS
    assert len(files) < 600 / 30 + 2 * FILES_PER_MERGE


def test_nothing_is_merged_across_streams_holes_and_large_files() -> None:
    """A gap that the log lists is no hole."""
    few = [committed(number, 1000) for number in range(FILES_PER_MERGE - 1)]
    other = [committed(number, 1000, stream_id=2) for number in range(FILES_PER_MERGE - 1)]
    assert due_merges([*few, *other], NO_LIMIT) == []
    last = committed(FILES_PER_MERGE, 1000)
    assert due_merges([*few, last], NO_LIMIT) == [], "one is missing between them"
    large = committed(FILES_PER_MERGE - 1, 200 << 20)
    assert due_merges([*few, large, last], NO_LIMIT) == []
    with_gap = LakeFile(*last.key[4:], 1, 1, last.lo, last.hi, 10, 1000, gaps=(Gap(1, 1, few[-1].hi, last.lo, "GONE"),))
    (one,) = due_merges([*few, with_gap], NO_LIMIT)
    assert one.files == (*few, with_gap)
    rows = [LakeFile(f"r{number}", 1, 1, number, number + 1, 1, 100, is_recorded=False) for number in range(40)]
    assert due_merges(rows, NO_LIMIT) == [], "of files that were written from rows only their bounds are known"


@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_committed_the_order_stays(seed: int) -> None:
    chance = random.Random(seed)
    files: list[LakeFile] = []
    policy = FilePolicy(max_bytes=4 << 20, max_ns=100 * SECOND_NS)
    for number in range(300):
        size = chance.choice([500, 500, 500, 80_000, 1 << 20, 5 << 20])
        files, _ = keep([*files, committed(number, size)], policy)
    assert [file.lo for file in files[1:]] == [file.hi for file in files[:-1]]


def test_a_recording_merges_its_own_files(
    pool: tp.Local, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many commits a second leave few files, and every frame is there once."""
    monkeypatch.setattr(upkeep, "LOOK_EVERY_S", 0.05)
    stream = new_stream("deep")
    settings = Settings(trigger_s=0.02, codec="none", is_durable=False, **options_of(pool))
    with Camera(client, stream, hz=200) as camera:
        with DirectRecorder([stream], tmp_path / "lake", settings=settings) as recorder:
            lake = Lake.open(tmp_path / "lake")
            wait_until(lambda: recorder.totals().batches > 3 * FILES_PER_MERGE, "many commits")
            wait_until(lambda: len(lake.files()) < recorder.totals().batches - FILES_PER_MERGE, "files are merged")
            ends = camera.stop()
        totals = recorder.totals()
    assert totals.lost == 0
    found = check(Lake.open(tmp_path / "lake"), ends)
    assert sum(map(len, found.values())) == totals.frames


def test_a_recording_lets_go_of_old_frames(
    pool: tp.Local, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest stay, whatever the bound; the recording goes on."""
    for name in ("LOOK_EVERY_S", "TRIM_EVERY_S", "CLEAN_EVERY_S"):
        monkeypatch.setattr(upkeep, name, 0.05)
    stream = new_stream("deep")
    settings = Settings(
        trigger_s=0.1, codec="none", is_durable=False, compacts=False, max_bytes=100_000, **options_of(pool)
    )
    with Camera(client, stream, hz=200), DirectRecorder([stream], tmp_path / "lake", settings=settings) as recorder:
        wait_until(lambda: recorder.totals().payload_bytes > 500_000, "five times as much as may stay")
        lake = Lake.open(tmp_path / "lake")
        wait_until(lambda: sum(file.bytes for file in lake.files()) < 200_000, "the oldest are gone")
        assert recorder.totals().lost == 0
    check(Lake.open(tmp_path / "lake"))


def test_what_fails_is_logged_and_tried_again(
    pool: tp.Local, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upkeep, "LOOK_EVERY_S", 0.02)
    tries: list[int] = []

    def fail(*_: object) -> list[object]:
        tries.append(1)
        raise OSError("no space")

    monkeypatch.setattr(upkeep, "due_merges", fail)
    one = upkeep.Upkeep(Lake.create(tmp_path / "lake"), upkeep.UpkeepPlan(policy=FilePolicy()))
    wait_until(lambda: len(tries) > 2, "it tries again")
    one.close()
    assert any("upkeep_failed" in record.message and "no space" in record.message for record in caplog.records)
