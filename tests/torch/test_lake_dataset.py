# SPDX-License-Identifier: Apache-2.0
"""Frames of a lake by index: which, in what order, and the same ones after a restart."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorpool.errors import ConfigError, LocalProtocolError
from tensorpool.lake import Lake, maintenance
from tensorpool.lake.errors import NotRecorded
from tensorpool.lake.lake import Change
from tensorpool.torch import LakeDataset, Sample
from tests.support.frame_rows import attribute, make_lake, row, rows_over_time, source

FRONT, REAR = 10_000, 10_001


def seqs_of(one: Any) -> Any:
    return [sample.seq for sample in one] if isinstance(one, list) else one.seq


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """Two epochs of camera/front, the first with a gap from 50 to 59, and 20 frames of camera/rear."""
    first = [one for one in rows_over_time(120, meta_version=1) if not 50 <= one["seq"] < 60]
    rows = [*first, *rows_over_time(10, epoch=2), *rows_over_time(20, stream_id=REAR)]
    metadata = [source(FRONT, "camera/front"), attribute(FRONT, 1, "label", "cat"), source(REAR, "camera/rear")]
    make_lake(tmp_path / "lake", rows, metadata=metadata)
    return tmp_path / "lake"


def test_samples_are_the_frames_of_a_stream_in_order(lake: Path) -> None:
    """By epoch and seq, without those that are missing; an index may count from the end."""
    frames = LakeDataset(lake, "camera/front")
    expected = [*range(50), *range(60, 120), *range(10)]
    assert len(frames) == 120
    assert [int(array[0, 0]) for array in frames] == expected
    assert [int(frames[at][1, 2]) for at in (0, 49, 50, 109, 110, -1)] == [0, 49, 60, 119, 0, 9]
    for index in (120, -121):
        with pytest.raises(IndexError, match="of 120"):
            frames[index]
    assert str(frames).endswith("lake: 120 samples of streams [10000]>")


def test_streams_follow_one_another(lake: Path) -> None:
    """In the order that was asked for, by name or id; without any, all of the lake."""
    frames = LakeDataset(lake, ["camera/rear", FRONT], transform=lambda frame: (frame.stream_id, frame.epoch))
    assert [*frames] == [(REAR, 1)] * 20 + [(FRONT, 1)] * 110 + [(FRONT, 2)] * 10
    assert len(LakeDataset(lake)) == 140
    with pytest.raises(NotRecorded, match="camera/top"):
        LakeDataset(lake, ["camera/rear", "camera/top"])


def test_a_batch_is_given_in_the_order_of_its_indices(lake: Path) -> None:
    """However they are read; an index that comes twice gives two arrays."""
    frames = LakeDataset(lake, "camera/front")
    batch = frames.__getitems__([115, 3, 60, 3])
    assert [int(array[0, 0]) for array in batch] == [5, 3, 70, 3]
    batch[1][:] = 99
    assert int(batch[3][0, 0]) == int(frames[3][0, 0]) == 3


def test_transform_gets_a_sample_that_is_its_own(lake: Path) -> None:
    """With the frame's numbers, time and metadata, and an array that may be written to."""
    kept: list[Sample] = []
    frames = LakeDataset(lake, "camera/front", transform=kept.append)
    assert frames[7] is None
    (sample,) = kept
    sample.array[:] += 1
    assert (sample.stream_id, sample.epoch, sample.seq, sample.timestamp_ns) == (FRONT, 1, 7, 1_070_000_000)
    assert sample.metadata is not None
    assert sample.metadata.attributes["label"] == "cat"
    assert LakeDataset(lake, "camera/front")[7].flags.writeable


def test_a_window_is_so_many_frames_in_a_row(lake: Path) -> None:
    """It spans neither a gap nor two epochs; a window that never fits gives an empty dataset."""
    windows = LakeDataset(lake, "camera/front", window=4)
    starts = [*range(47), *range(60, 117), *range(7)]
    assert [array[:, 0, 0].tolist() for array in windows] == [[*range(start, start + 4)] for start in starts]
    listed = LakeDataset(lake, "camera/front", window=4, transform=seqs_of)
    assert listed[46] == [46, 47, 48, 49]
    assert len(LakeDataset(lake, "camera/front", window=61)) == 0
    assert len(LakeDataset(lake, "camera/front", window=1)) == 120


def test_bad_arguments_are_refused_where_the_dataset_is_made(lake: Path, tmp_path: Path) -> None:
    with pytest.raises(LocalProtocolError, match="window = 0: expected a whole number from 1"):
        LakeDataset(lake, window=0)
    with pytest.raises(LocalProtocolError, match="transform = 3: expected a function"):
        LakeDataset(lake, transform=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="record to it first"):
        LakeDataset(tmp_path / "nothing")


def test_a_loop_goes_on_where_it_was_though_the_lake_has_grown(lake: Path) -> None:
    """A state is plain data; what was recorded since is not part of the resumed dataset, so no index changes."""
    frames = LakeDataset(lake, ["camera/front", "camera/rear"], transform=seqs_of)
    everything = [*frames]
    loop = iter(frames)
    head = [next(loop) for _ in range(45)]
    state = json.loads(json.dumps(frames.state_dict()))
    later = [one | {"seq": one["seq"] + 10} for one in rows_over_time(5, epoch=2)]
    make_lake(lake, [*later, *rows_over_time(30, epoch=3)])
    resumed = LakeDataset(lake, ["camera/front", "camera/rear"], transform=seqs_of)
    assert len(resumed) == 140 + 35
    resumed.load_state_dict(state)
    assert len(resumed) == 140
    assert [*head, *resumed] == everything
    assert [*resumed] == everything, "the next loop begins at the start"


def test_a_copy_of_a_dataset_has_the_frames_of_the_original(lake: Path) -> None:
    """Pickled, as a spawned worker gets it: an index means the same frame in a lake that has grown."""
    frames = LakeDataset(lake, transform=seqs_of)
    copies: list[Any] = [pickle.dumps(frames), copy.deepcopy(frames)]
    expected = [frames[at] for at in range(len(frames))]
    make_lake(lake, rows_over_time(30, epoch=3))
    for one in copies:
        again = pickle.loads(one) if isinstance(one, bytes) else one
        assert [again[at] for at in range(len(again))] == expected


def test_a_state_of_another_dataset_is_refused(lake: Path) -> None:
    frames = LakeDataset(lake, "camera/front", window=2)
    with pytest.raises(ConfigError, match=r"window 2 and streams \[10000\]"):
        frames.load_state_dict(LakeDataset(lake, "camera/front").state_dict())
    with pytest.raises(ConfigError, match=r"window 2, streams \[10001\]"):
        frames.load_state_dict(LakeDataset(lake, "camera/rear", window=2).state_dict())
    with pytest.raises(ConfigError, match="a state_dict of a LakeDataset"):
        frames.load_state_dict({"epoch": 3})


def test_frames_that_left_the_lake_are_named(lake: Path) -> None:
    """Retention removes frames: a dataset that was made before says so instead of giving others."""
    frames = LakeDataset(lake, "camera/front")
    state, copied = frames.state_dict(), pickle.dumps(frames)
    opened = Lake.open(lake)
    oldest = opened.files(FRONT, 1)[0]
    opened.append("retain", lambda _: Change((), (oldest,)))
    gone = r"has 60 of the 110 frames 0 to 119 of stream 10000, epoch 1, .* make the dataset anew"
    with pytest.raises(NotRecorded, match=gone):
        len(pickle.loads(copied))
    again = LakeDataset(lake, "camera/front")
    with pytest.raises(NotRecorded, match=gone):
        again.load_state_dict(state)
    assert len(again) == 70
    opened.append("retain", lambda state: Change((), tuple(opened.files(FRONT))))
    with pytest.raises(NotRecorded, match="has 0 of the 110 frames"):
        len(pickle.loads(copied))


def test_compaction_beside_a_training_changes_nothing(tmp_path: Path) -> None:
    """A file that was merged into another and deleted is looked for in the lake as it is now."""
    lake = make_lake(tmp_path / "lake", rows_over_time(80), rows_per_file=2)  # more than are kept open
    frames = LakeDataset(tmp_path / "lake", transform=seqs_of)
    assert maintenance.compact(lake).files_after == 1
    maintenance.remove_unused(lake, grace_s=0)
    assert [frames[at] for at in range(80)] == [*range(80)]


def test_frames_of_other_types_and_shapes_come_as_they_are(tmp_path: Path) -> None:
    """A scalar, an empty one and one in column-major order."""
    arrays: list[np.ndarray[Any, Any]] = [
        np.array(2.5, np.float32),
        np.empty((0, 3), np.int16),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    ]
    make_lake(tmp_path / "lake", [row(array, seq=seq) for seq, array in enumerate(arrays)])
    for array, sample in zip(arrays, LakeDataset(tmp_path / "lake"), strict=True):
        assert (sample.shape, sample.dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(sample, array)
