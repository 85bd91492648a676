# SPDX-License-Identifier: Apache-2.0
"""The follower of rings: every frame once or in a gap, whatever dies and whatever is slow."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tensorpool as tp
from tensorpool.cli.test_pattern import Checked
from tensorpool.client import Client
from tensorpool.errors import ConfigError
from tensorpool.lake import Lake, LakeDamaged, commits, delta_log, layout, ring_follower, writer_threads
from tensorpool.lake.errors import LakeConflict
from tensorpool.lake.file_policy import FilePolicy
from tensorpool.lake.live_options import LiveOptions
from tensorpool.lake.losses import DataLoss
from tensorpool.lake.offsets import Offsets, Position
from tensorpool.lake.ring_follower import Plan, RingFollower
from tensorpool.lake.writer_threads import WriterThread
from tests.support.lakes import check, options_of
from tests.support.processes import wait_until


@pytest.fixture
def follow(pool: tp.Local, tmp_path: Path) -> Iterator[Callable[..., RingFollower]]:
    """A task of one recording, not begun; closed with the test."""
    made: list[RingFollower] = []

    def make(*streams: int, start: Offsets | str = "latest", fails: bool = False) -> RingFollower:
        where = options_of(pool)
        live = LiveOptions(
            streams=streams,
            starting_offsets=start,
            fail_on_data_loss=fails,
            aeron_dir=where["aeron_dir"],
            overrides=dict(where["overrides"]),
        )
        policy = FilePolicy("none", is_durable=False)
        plan = Plan(recording="cam", query="q", options=live, policy=policy, commit_s=3600.0)
        made.append(RingFollower(Lake.create(tmp_path / "lake"), plan))
        return made[-1]

    yield make
    for one in made:
        one.close()


def film(producer: tp.Producer, frames: int, nbytes: int = 100) -> None:
    pixels = np.empty(nbytes, np.uint8)
    for _ in range(frames):
        Checked().paint(pixels, producer.next_seq)
        assert producer.publish(pixels) is not None


def commit(task: RingFollower) -> None:
    while task.step():
        pass
    task.roll()
    task.settle()


def seqs_in(path: Path) -> list[int]:
    """Of the one epoch of a lake in which every payload is what was published and nothing is unexplained."""
    (seqs,) = check(Lake.open(path)).values()
    return seqs


@contextlib.contextmanager
def broken_log(lake: Path) -> Iterator[None]:
    """Nothing can be committed meanwhile."""
    log, kept = lake / delta_log.FOLDER, lake.with_name("kept")
    log.rename(kept)
    log.touch()
    yield
    log.unlink()
    kept.rename(log)


def test_what_is_published_is_committed_in_order(
    follow: Callable[..., RingFollower], client: Client, tmp_path: Path, stream: Callable[..., int]
) -> None:
    """Two streams, several commits: each frame once, each commit the next batch of the recording."""
    first, second = stream("deep"), stream("deep")
    with client.producer(first) as one, client.producer(second) as other:
        film(one, 5)
        task = follow(first, second)
        task.begin()
        for count in (3, 1, 200):
            film(one, count)
            film(other, 2 * count)
            commit(task)
        commit(task)
    lake = Lake.open(tmp_path / "lake")
    found = {stream: seqs for (stream, _), seqs in check(lake).items()}
    assert found == {first: list(range(5, 209)), second: list(range(408))}
    assert (task.frames, lake.state.batches, lake.gaps()) == (612, {"q": 2}, [])
    assert not any((lake.path / layout.STAGING).glob("*/*/*"))


def test_it_ends_at_the_given_position(
    follow: Callable[..., RingFollower], client: Client, tmp_path: Path, stream: Callable[..., int]
) -> None:
    """At a target, once everything up to it is committed; a target without a stream means: at once."""
    number = stream("deep")
    with client.producer(number) as producer:
        film(producer, 10)
        start = Offsets({number: Position(producer.epoch or 0, 0)})
        seventh = Offsets({number: Position(producer.epoch or 0, 7)})
        for target, begun, frames in ((seventh, 0, 7), (Offsets(), 7, 0)):
            task = follow(number, start=start)
            assert task.begin().positions[number].seq == begun, "the second goes on where the first ended"
            task.run(lambda target=target: target)  # type: ignore[misc]
            assert task.frames == frames
            task.close()
    assert seqs_in(tmp_path / "lake") == list(range(7))


def test_what_the_ring_forgot_is_a_gap_before_within_and_behind(
    follow: Callable[..., RingFollower], client: Client, tmp_path: Path, stream: Callable[..., int]
) -> None:
    number = stream("tiny")
    with client.producer(number) as producer:
        film(producer, 20)
        task = follow(number, start=Offsets({number: Position(producer.epoch or 0, 0)}))
        task.begin()
        commit(task)
        for _ in range(2):  # within a file: two reads, and the ring goes round between them
            film(producer, 30)
            task.step()
        commit(task)
    lake = Lake.open(tmp_path / "lake")
    assert seqs_in(lake.path) == [*range(12, 20), *range(42, 50), *range(72, 80)]
    recorded_gaps = [(gap.lo, gap.hi, gap.reason) for gap in lake.gaps()]
    assert recorded_gaps == [(0, 12, "OVERWRITTEN"), (20, 42, "OVERWRITTEN"), (50, 72, "OVERWRITTEN")]


def test_with_fail_on_data_loss_it_ends_with_the_range(
    follow: Callable[..., RingFollower], client: Client, stream: Callable[..., int]
) -> None:
    number = stream("tiny")
    with client.producer(number) as producer:
        film(producer, 20)
        task = follow(number, start=Offsets({number: Position(producer.epoch or 0, 0)}), fails=True)
        task.begin()
        with pytest.raises(DataLoss, match=rf"stream {number}, epoch \d+: frames 0 to 11 are lost"):
            task.step()


def test_a_file_that_was_staged_and_not_committed_is_adopted(
    follow: Callable[..., RingFollower], client: Client, tmp_path: Path, stream: Callable[..., int]
) -> None:
    """The manifest cannot be written, the task ends, the ring moves on: what was staged is all that there is."""
    number = stream("tiny")
    lake = tmp_path / "lake"
    with client.producer(number) as producer:
        film(producer, 3)
        task = follow(number)
        task.begin()
        film(producer, 5)
        commit(task)
        film(producer, 6)
        with broken_log(lake):
            with pytest.raises(LakeDamaged):
                commit(task)
            film(producer, 2)
            with pytest.raises(LakeDamaged):
                commit(task)  # whatever comes after must not be committed ahead of it
            task.close()
        film(producer, 20)
        again = follow(number)
        again.begin()
        commit(again)
    assert seqs_in(lake) == [*range(3, 16), *range(28, 36)]
    assert [(gap.lo, gap.hi) for gap in Lake.open(lake).gaps()] == [(16, 28)]


def test_a_recording_that_never_committed_begins_with_what_it_staged(
    follow: Callable[..., RingFollower], client: Client, tmp_path: Path, stream: Callable[..., int]
) -> None:
    number = stream("deep")
    lake = tmp_path / "lake"
    with client.producer(number) as producer:
        film(producer, 3)
        task = follow(number)
        task.begin()
        film(producer, 4)
        with broken_log(lake):
            with pytest.raises(LakeDamaged):
                commit(task)
            task.close()
        film(producer, 4)
        again = follow(number)
        again.begin()
        commit(again)
    assert seqs_in(lake) == list(range(3, 11))


def test_what_was_committed_and_not_cleared_is_not_adopted(
    follow: Callable[..., RingFollower], client: Client, tmp_path: Path, stream: Callable[..., int]
) -> None:
    """Killed between the entry in the manifest and the end of the staging."""
    number = stream("deep")
    lake = tmp_path / "lake"
    with client.producer(number) as producer:
        task = follow(number)
        task.begin()
        for _ in range(2):
            film(producer, 4)
            commit(task)
        task.close()
        for batch, file in enumerate(Lake.open(lake).files()):
            folder = commits.staging_folder(lake, "q", batch)
            folder.mkdir(parents=True, exist_ok=True)
            name = layout.staged_name(file.stream_id, file.epoch, file.lo, file.hi)
            (folder / name).hardlink_to(lake / file.path)
        film(producer, 4)
        again = follow(number)
        again.begin()
        commit(again)
    assert seqs_in(lake) == list(range(12))
    assert not any((lake / layout.STAGING).glob("*/*/*"))


def test_a_recording_that_goes_on_with_fewer_streams_commits_what_was_staged_of_the_others(
    follow: Callable[..., RingFollower], client: Client, tmp_path: Path, stream: Callable[..., int]
) -> None:
    """Staged files of a stream that is recorded no more are frames all the same."""
    first, second = stream("deep"), stream("deep")
    lake = tmp_path / "lake"
    with client.producer(first) as one, client.producer(second) as other:
        task = follow(first, second)
        task.begin()
        film(one, 4)
        film(other, 4)
        commit(task)
        film(one, 4)
        film(other, 4)
        with broken_log(lake):
            with pytest.raises(LakeDamaged):
                commit(task)
            task.close()
        again = follow(first)
        again.begin()
        film(one, 4)
        film(other, 4)
        commit(again)
    found = {number: seqs for (number, _), seqs in check(Lake.open(lake)).items()}
    assert found == {first: list(range(12)), second: list(range(8))}


def test_a_stream_is_followed_once(
    follow: Callable[..., RingFollower], client: Client, stream: Callable[..., int]
) -> None:
    number = stream("deep")
    with client.producer(number), pytest.raises(ConfigError, match="only once"):
        follow(number, number)


def test_a_commit_of_another_is_not_taken_for_ones_own(
    follow: Callable[..., RingFollower], client: Client, tmp_path: Path, stream: Callable[..., int]
) -> None:
    number = stream("deep")
    with client.producer(number) as producer:
        task = follow(number)
        task.begin()
        film(producer, 3)
        commits.commit(Lake.open(tmp_path / "lake"), "q", 0, [])
        with pytest.raises(LakeConflict, match="batch 0 of recording cam was committed by another"):
            commit(task)


def test_a_thread_that_is_behind_is_helped_by_another(
    follow: Callable[..., RingFollower],
    client: Client,
    tmp_path: Path,
    stream: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches of ten frames; the first thread is held up, so the next file is the other's."""
    monkeypatch.setattr(ring_follower, "WRITE_BYTES", 1000)
    number = stream("deep")
    with client.producer(number) as producer:
        task = follow(number)
        task.begin()
        film(producer, 15)
        task.step()
        go_on = threading.Event()
        for _ in range(writer_threads.BATCHES_PER_WRITER):
            task._writers[0].submit(go_on.wait)
        film(producer, 20)
        task.step()
        go_on.set()
        commit(task)
    lake = Lake.open(tmp_path / "lake")
    assert seqs_in(lake.path) == list(range(35))
    assert [file.frames for file in lake.files()] == [10, 25]
    assert lake.state.number == 1, "one commit"


def test_files_are_cut_by_size(
    follow: Callable[..., RingFollower],
    client: Client,
    tmp_path: Path,
    stream: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ring_follower, "WRITE_BYTES", 1000)
    monkeypatch.setattr(writer_threads, "BATCHES_PER_WRITER", 1000)
    monkeypatch.setattr(RingFollower, "max_file_bytes", 3000)
    number = stream("deep")
    with client.producer(number) as producer:
        task = follow(number)
        task.begin()
        film(producer, 100)
        commit(task)
    lake = Lake.open(tmp_path / "lake")
    assert seqs_in(lake.path) == list(range(100))
    assert {file.frames for file in lake.files()} == {30, 10}


def is_followed(task: RingFollower, producer: tp.Producer) -> bool:
    task.step()
    return task._at.positions[producer.stream_id].epoch == producer.epoch


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_every_frame_is_there_once_or_in_a_gap(
    follow: Callable[..., RingFollower], client: Client, tmp_path: Path, stream: Callable[..., int], seed: int
) -> None:
    """Frames, commits, followers that end without one and are succeeded by others, and new epochs, in random order."""
    chance = random.Random(seed)
    number = stream("tiny")
    producer = client.producer(number)
    task = follow(number)
    task.begin()
    for _ in range(39):
        what = chance.choice(["film", "film", "film", "step", "step", "roll", "commit", "task", "epoch"])
        if what == "film":
            film(producer, chance.randrange(1, 12))
        elif what == "step":
            task.step()
        elif what == "roll":
            task.roll()
        elif what == "commit":
            commit(task)
        elif what == "task":
            task.close()
            task = follow(number)
            task.begin()
        elif chance.random() < 0.5:
            producer.close()
            producer = client.producer(number)
            film(producer, 1)
            wait_until(functools.partial(is_followed, task, producer), "it is followed")
    film(producer, 8)
    commit(task)
    producer.close()
    found = check(Lake.open(tmp_path / "lake"))
    assert found
    newest = max(found)
    assert found[newest][-8:] == list(range(found[newest][-1] - 7, found[newest][-1] + 1))


def test_a_thread_does_nothing_more_after_the_first_failure() -> None:
    done: list[int] = []
    writer = WriterThread("test")
    go_on = threading.Event()
    writer.submit(go_on.wait)
    writer.submit(done.append, 1)
    writer.submit(int, "not a number")
    writer.submit(done.append, 2)
    assert writer.waiting == 4
    go_on.set()
    with pytest.raises(ValueError, match="not a number"):
        writer.settle()
    writer.close()
    assert done == [1]
