# SPDX-License-Identifier: Apache-2.0
"""Frames of a live stream as samples: every one or the newest, until when, and every lost one counted."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.errors import ConfigError, FrameOverwritten, LocalProtocolError
from tensorpool.torch import LiveCounts, LiveDataset, Sample
from tensorpool.torch.live_dataset import _ShareReader
from tensorpool.torch.worker_counts import MAX_WORKERS, WorkerCounts
from tests.support.deployment import consumer_leases, pattern
from tests.support.processes import wait_until

LONG_S = 60.0


class Source:
    """A producer whose frames hold their numbers, and datasets of its stream."""

    def __init__(self, pool: tp.Local, client: Client, stream_id: int) -> None:
        self.pool = pool
        self.stream_id = stream_id
        self.producer = client.producer(stream_id, create=True)
        self.published = 0

    def publish(self, frames: int = 1) -> None:
        for _ in range(frames):
            assert self.producer.publish(pattern(self.published)) == self.published
            self.published += 1

    def dataset(self, **how: Any) -> LiveDataset:
        usual: dict[str, Any] = {"timeout": LONG_S, "transform": seq_of}
        return LiveDataset(self.stream_id, aeron_dir=self.pool.aeron_dir, config=self.pool.config, **(usual | how))

    def next_of(self, loop: Iterator[Any]) -> Any:
        """The next sample of a loop. Publishes until it has one: it may still have to attach, or miss some."""
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(next(loop)))
        thread.start()
        while thread.is_alive():
            self.publish()
            thread.join(0.05)
        return found[0]


def seq_of(sample: Sample) -> int:
    assert int.from_bytes(sample.array[:8].tobytes(), "little") == sample.seq
    return sample.seq


@pytest.fixture
def camera(pool: tp.Local, client: Client, stream: Callable[..., int]) -> Source:
    """With a ring of 8 frames."""
    return Source(pool, client, stream("tiny"))


def test_every_frame_is_a_sample_until_the_count(camera: Source) -> None:
    """In order, whole, its own memory; the lease is given back at the end, and the next loop counts anew."""
    arrays = camera.dataset(count=3, transform=None)
    loop = iter(arrays)
    first = camera.next_of(loop)
    rest = [camera.next_of(loop) for _ in range(2)]
    numbers = [int.from_bytes(array[:8].tobytes(), "little") for array in [first, *rest]]
    assert numbers == [numbers[0] + step for step in range(3)]
    assert all(array.flags.writeable and array.flags.owndata for array in rest)
    assert list(loop) == []
    assert consumer_leases(camera.pool, camera.stream_id) == 0
    again = iter(arrays)
    for _ in range(3):
        camera.next_of(again)
    assert list(again) == []
    assert arrays.counts.received == 6


def test_an_iteration_ends_when_no_frame_comes(camera: Source) -> None:
    assert list(camera.dataset(timeout=0.1)) == []
    assert list(camera.dataset(timeout=0.1, latest=True)) == []
    assert list(camera.dataset(count=0)) == []


@pytest.mark.parametrize("shares", [1, 3])
def test_lost_frames_of_a_share_are_counted(camera: Source, shares: int) -> None:
    """Between the first and the last sample of each share: samples and lost frames are all that were published."""
    parts = [camera.dataset(share=(part, shares)) for part in range(shares)]
    loops = [iter(part) for part in parts]
    firsts = [camera.next_of(loop) for loop in loops]
    camera.publish(40)  # five times round the ring
    lasts = [camera.next_of(loop) for loop in loops]
    for number, (part, first, last) in enumerate(zip(parts, firsts, lasts, strict=True)):
        assert first % shares == last % shares == number
        counts = part.counts
        assert (counts.received, counts.skipped) == (2, 0)
        assert counts.lost == (last - first) // shares - 1 > 0


def test_a_new_epoch_goes_on_counting(camera: Source, client: Client) -> None:
    """A producer that ends and one that follows: what was published before the first sample of its epoch is lost."""
    frames = camera.dataset(transform=lambda sample: (sample.epoch, sample.seq))
    loop = iter(frames)
    epoch, first = camera.next_of(loop)
    while True:
        before = camera.next_of(loop)
        if before[1] + 1 == camera.published:
            break  # it has all that there is
    camera.producer.close()
    camera.producer = client.producer(camera.stream_id, create=True)
    camera.published = 0
    later, seq = camera.next_of(loop)
    assert later > epoch
    assert frames.counts.received + frames.counts.lost == before[1] - first + 1 + seq + 1


def test_latest_gives_the_newest_frame_and_counts_those_before(camera: Source) -> None:
    """Never one twice, also not for two that share the stream."""
    frames = camera.dataset(latest=True)
    loop = iter(frames)
    first = camera.next_of(loop)
    camera.publish(5)
    newest = camera.published - 1
    assert next(loop) == newest
    counts = frames.counts
    assert (counts.received, counts.skipped + counts.lost) == (2, newest - first - 1)
    assert counts.skipped > 0
    second = camera.next_of(loop)
    assert second > newest

    odd = camera.dataset(latest=True, share=(1, 2))
    taken = iter(odd)
    seqs = [camera.next_of(taken) for _ in range(3)]
    assert [seq % 2 for seq in seqs] == [1, 1, 1]
    assert sorted(set(seqs)) == seqs
    assert odd.counts.received + odd.counts.skipped + odd.counts.lost == (seqs[-1] - seqs[0]) // 2 + 1


def test_latest_waits_for_a_frame_that_is_new(camera: Source, client: Client) -> None:
    """The newest is not given again; what the next epoch skipped is counted, though its seqs are those of before."""
    counts = WorkerCounts()
    with client.consumer(camera.stream_id) as consumer:
        camera.producer.wait_for_consumers()
        reader = _ShareReader(consumer, counts.row(0), 0, 1, latest=True)
        camera.publish(3)
        newest = reader.next(LONG_S)
        while newest is not None and newest.seq < 2:
            newest = reader.next(LONG_S)
        assert newest is not None
        assert reader.next(0.05) is None
        before = counts.total()
        camera.producer.close()
        camera.producer = client.producer(camera.stream_id, create=True)
        camera.published = 0
        wait_until(
            lambda: reader.next(0.0) is None and consumer.epoch == camera.producer.epoch,
            "the consumer reads the next epoch",
        )
        camera.publish(4)
        frame = reader.next(LONG_S)
        assert frame is not None
        assert (frame.seq, frame.epoch > newest.epoch) == (3, True)
        after = counts.total()
        assert after.lost + after.skipped - before.lost - before.skipped == 3


def test_a_frame_that_is_overwritten_before_its_copy_is_lost(camera: Source, client: Client) -> None:
    """It is counted once, and those after it are, too."""
    counts = WorkerCounts()
    with client.consumer(camera.stream_id) as consumer:
        camera.producer.wait_for_consumers()
        reader = _ShareReader(consumer, counts.row(0), 0, 1, latest=False)
        camera.publish()
        frame = reader.next(LONG_S)
        assert frame is not None
        camera.publish(20)
        with pytest.raises(FrameOverwritten):
            frame.copy()
        reader.count_overwritten()
        later = reader.next(LONG_S)
        assert later is not None
        assert counts.total().lost == later.seq - frame.seq


def test_a_loop_takes_what_was_left_of_its_count(camera: Source) -> None:
    """After a restart, from a state that is plain data: frames that passed meanwhile are lost, and counted."""
    frames = camera.dataset(count=6)
    loop = iter(frames)
    first = camera.next_of(loop)
    for _ in range(3):
        last = camera.next_of(loop)
    state = json.loads(json.dumps(frames.state_dict()))
    loop.close()  # type: ignore[attr-defined]
    before = frames.counts
    camera.publish(2)

    resumed = camera.dataset(count=6)
    resumed.load_state_dict(state)
    assert resumed.counts == before
    rest = iter(resumed)
    assert camera.next_of(rest) > last
    end = camera.next_of(rest)
    assert list(rest) == []
    assert resumed.counts.received == 6
    assert resumed.counts.received + resumed.counts.lost == end - first + 1
    later = camera.dataset(count=6)
    later.load_state_dict(resumed.state_dict())
    abandoned, whole = iter(later), iter(later)
    camera.next_of(abandoned)
    for _ in range(6):
        camera.next_of(whole)
    assert list(whole) == [], "a loop after one that ended, or was left, has the whole count"


def test_a_state_that_does_not_fit_is_refused(camera: Source) -> None:
    """Of another stream, of another number of workers, or of something else."""
    frames = camera.dataset(count=2)
    camera.next_of(iter(frames))
    state = frames.state_dict()
    with pytest.raises(ConfigError, match="the state of stream 'other'"):
        LiveDataset("other").load_state_dict(state)
    with pytest.raises(ConfigError, match="a state_dict of a LiveDataset"):
        frames.load_state_dict({"position": 3})
    state["workers"][0]["workers"] = 2
    frames.load_state_dict(state)
    with pytest.raises(ConfigError, match="2, with which the state was saved"):
        next(iter(frames))


def test_bad_arguments_are_refused_where_the_dataset_is_made() -> None:
    for how, words in (
        ({"count": -1}, "count = -1"),
        ({"timeout": "soon"}, "timeout = 'soon'"),
        ({"transform": 3}, "transform = 3"),
        ({"share": (2, 2)}, r"share\[0\] = 2: expected a whole number from 0 to 1"),
        ({"share": (0, 0)}, r"share\[1\] = 0"),
    ):
        with pytest.raises(LocalProtocolError, match=words):
            LiveDataset("camera", **how)
    with pytest.raises(ConfigError, match="at most 256"):
        WorkerCounts().row(MAX_WORKERS)


def test_a_copy_that_is_no_worker_counts_for_itself(camera: Source) -> None:
    frames = camera.dataset(count=1)
    camera.next_of(iter(frames))
    copied = copy.deepcopy(frames)
    assert (frames.counts.received, copied.counts) == (1, LiveCounts(0, 0, 0))


def test_transform_finds_the_metadata_of_a_live_frame(camera: Source) -> None:
    camera.producer.set_metadata({"label": "cat"})
    frames = camera.dataset(transform=lambda sample: (sample.metadata, sample.time, sample.array.shape))

    def is_told() -> bool:
        metadata, time, shape = camera.next_of(loop)
        assert time is not None
        assert shape == (64,)
        return metadata is not None and metadata.attributes["label"] == "cat"

    loop = iter(frames)
    wait_until(is_told, "the metadata has arrived")
