# SPDX-License-Identifier: Apache-2.0
"""Random access to a lake: by seq, by time, in order, while others write, compact and delete."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import deltalake
import numpy as np
import pytest

import tensorpool as tp
from tensorpool.cli.test_pattern import Checked
from tensorpool.client import Client
from tensorpool.lake import Gap, Lake, LakeDamaged, commits, log_store, maintenance, open_files, ring_reader
from tensorpool.lake.direct_recorder import DirectRecorder
from tensorpool.lake.errors import NotRecorded, RecordingOutdated
from tensorpool.lake.file_policy import FilePolicy
from tensorpool.lake.lake import Change
from tensorpool.lake.recording import RecordedStream
from tensorpool.lake.recording_engine import Settings
from tensorpool.lake.row_staging import stage_rows
from tensorpool.lake.staging import Staging
from tests.support.deployment import new_stream
from tests.support.frame_rows import attribute, bit_row, make_lake, row, rows_over_time, source, table
from tests.support.lakes import Camera, Ring, options_of
from tests.support.recorder_cases import wait_for_frames

START = datetime(2026, 11, 16, 10, tzinfo=UTC)
NO_SYNC = FilePolicy("none", is_durable=False)


def timed(count: int, **fields: Any) -> list[dict[str, Any]]:
    """A frame a second from START on; each holds its number."""
    return [one | {"time": START + timedelta(seconds=one["seq"])} for one in rows_over_time(count, **fields)]


@pytest.fixture
def stream(tmp_path: Path) -> RecordedStream:
    """Frames 0 to 49 and 60 to 119, in files of at most 50 and row groups of 16."""
    rows = [one for one in timed(120) if not 50 <= one["seq"] < 60]
    lost = Gap(10_000, 1, 50, 60, "OVERWRITTEN")
    make_lake(tmp_path / "lake", rows, gaps=(lost,), metadata=[source(10_000, "camera/front")])
    return tp.open(tmp_path / "lake")["camera/front"]


# --- by seq


def test_a_frame_is_found_by_its_seq(stream: RecordedStream) -> None:
    for seq in (0, 15, 16, 49, 60, 119):
        frame = stream[seq]
        assert (frame.seq, frame.epoch, frame.stream_id) == (seq, 1, 10_000)
        assert frame.array.tolist() == [[seq] * 3] * 2
        assert frame.time == START + timedelta(seconds=seq)
        assert frame.timestamp_ns == 1_000_000_000 + seq * 10_000_000
    assert not stream[3].array.flags.writeable
    assert repr(stream[3]) == "<RecordedFrame 3 of stream 10000, epoch 1: UINT8 2x3, 2026-11-16T10:00:03Z>"


def test_a_missing_frame_is_explained(stream: RecordedStream) -> None:
    """The error is a KeyError, and names the reason of the gap and the nearest frames."""
    with pytest.raises(KeyError) as caught:
        stream[55]
    assert str(caught.value) == (
        'frame 55 of stream "camera/front" (10000), epoch 1, is not here: OVERWRITTEN, seqs 50 to 59 are missing; '
        "nearest: 49 and 60"
    )
    with pytest.raises(NotRecorded, match=r"frame 120 .* is not here; nearest: 119$"):
        stream[120]
    with pytest.raises(NotRecorded, match=r"frame -1 .* is not here; nearest: 0$"):
        stream[-1]
    assert 49 in stream
    assert 55 not in stream


def test_a_slice_by_seq_is_half_open_and_knows_its_gaps(stream: RecordedStream) -> None:
    part = stream[45:65]
    seqs = [*range(45, 50), *range(60, 65)]
    assert [frame.seq for frame in part] == seqs
    assert part.seqs.tolist() == seqs
    assert len(part) == 10
    assert part.gaps() == stream.gaps() == [Gap(10_000, 1, 50, 60, "OVERWRITTEN")]
    assert stream[:52].gaps() == [Gap(10_000, 1, 50, 52, "OVERWRITTEN")]
    assert stream[60:].gaps() == []
    assert part.numpy()[:, 0, 0].tolist() == seqs
    assert np.asarray(part[:47]).shape == (2, 2, 3)
    assert len(part[0:1000]) == 10
    assert repr(part) == '<RecordedStream stream "camera/front" (10000): 10 frames, epoch 1, seqs 45 to 64>'
    with pytest.raises(NotRecorded, match="frame 44 "):
        part[44]


def test_everything_is_iterated_in_order(stream: RecordedStream) -> None:
    expected = [*range(50), *range(60, 120)]
    assert len(stream) == 110
    assert [frame.seq for frame in stream] == stream.seqs.tolist() == expected
    assert [int(frame.array[0, 0]) for frame in stream] == expected
    assert [frame.seq for frame in stream[:]] == expected


def test_a_sample_is_evenly_spread(stream: RecordedStream) -> None:
    """From the first frame to the last, over the gap; of few frames all, of none none."""
    assert [frame.seq for frame in stream.sample(3)] == [0, 64, 119]
    assert [frame.seq for frame in stream[48:62].sample(50)] == [48, 49, 60, 61]
    assert stream[50:60].sample(5) == []


def test_what_is_no_slice_is_refused(stream: RecordedStream) -> None:
    with pytest.raises(TypeError, match="have no step"):
        stream[0:10:2]
    with pytest.raises(TypeError, match="by seqs or by times"):
        stream[0:"2026-11-16"]
    with pytest.raises(TypeError, match=r"for a moment use at\(\)"):
        stream["2026-11-16"]  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="no frames here to stack"):
        stream[50:55].numpy()


# --- by time


@pytest.mark.parametrize(
    "bounds",
    [
        ("2026-11-16T10:00:45Z", "2026-11-16T10:01:05Z"),
        ("2026-11-16T11:00:45+01:00", "2026-11-16T10:01:05"),
        (START + timedelta(seconds=45), START + timedelta(seconds=65)),
        (np.datetime64("2026-11-16T10:00:45"), np.datetime64("2026-11-16T10:01:05")),
    ],
)
def test_a_slice_by_time_is_half_open(stream: RecordedStream, bounds: tuple[Any, Any]) -> None:
    part = stream[bounds[0] : bounds[1]]
    assert part.seqs.tolist() == [*range(45, 50), *range(60, 65)]
    assert part.times[0] == np.datetime64("2026-11-16T10:00:45")
    assert part.gaps() == [Gap(10_000, 1, 50, 60, "OVERWRITTEN")]
    assert part[60].seq == 60
    assert stream[: bounds[0]].seqs.tolist() == list(range(45))


def test_at_gives_the_newest_frame_that_is_not_later(stream: RecordedStream) -> None:
    assert stream.at("2026-11-16T10:00:05Z").seq == 5
    assert stream.at("2026-11-16T10:00:05.999999Z").seq == 5
    assert stream.at("2026-11-16T10:00:55Z").seq == 49
    assert stream.at("2027-01-01").seq == 119
    assert stream[20:30].at("2027-01-01").seq == 29
    with pytest.raises(NotRecorded, match=r"has no frame of 2026-11-16T09:59:59Z or before"):
        stream.at(START - timedelta(seconds=1))


def test_times_may_go_back_or_be_unknown(tmp_path: Path) -> None:
    """A frame without a time is in no slice by time; `at` goes by time, not by seq."""
    seconds = [0, 5, 3, None, 4]
    rows = [row(seq=seq, time=None if at is None else START + timedelta(seconds=at)) for seq, at in enumerate(seconds)]
    make_lake(tmp_path / "lake", rows, rows_per_file=2)
    stream = tp.open(tmp_path / "lake")[10_000]
    assert stream.at(START + timedelta(seconds=4)).seq == 4
    assert stream.at(START + timedelta(seconds=9)).seq == 1
    assert stream[START : START + timedelta(seconds=5)].seqs.tolist() == [0, 2, 4]
    assert stream[: START + timedelta(seconds=5)].seqs.tolist() == [0, 2, 4]
    assert np.isnat(stream.times).tolist() == [False, False, False, True, False]
    assert stream[3].time is None


# --- epochs and streams


def test_seqs_count_within_an_epoch(tmp_path: Path) -> None:
    """With several epochs a seq needs one of them; iteration and times go over all."""
    later = [one | {"time": one["time"] + timedelta(hours=1)} for one in timed(3, epoch=4)]
    make_lake(tmp_path / "lake", [*timed(5), *later])
    stream = tp.open(tmp_path / "lake")[10_000]
    assert stream.epochs == (1, 4)
    assert [(frame.epoch, frame.seq) for frame in stream][4:6] == [(1, 4), (4, 0)]
    with pytest.raises(
        NotRecorded, match=r"epochs 1, 4, and seqs count within an epoch; choose one, such as epoch\(4\)"
    ):
        stream[1]
    with pytest.raises(NotRecorded, match="epochs 1, 4"):
        stream[0:2]
    assert stream.epoch(4)[1].epoch == 4
    assert len(stream.epoch(1)[2:]) == 3
    assert stream.at("2026-11-16T10:30Z").epoch == 1
    assert stream["2026-11-16T10:30Z":][2].epoch == 4
    with pytest.raises(NotRecorded, match="no frames of epoch 2, but of 1, 4"):
        stream.epoch(2)
    assert repr(stream) == "<RecordedStream stream 10000: 8 frames, 2 epochs>"


def test_streams_are_found_by_name_and_id(tmp_path: Path) -> None:
    rows = [*rows_over_time(2), *rows_over_time(3, stream_id=7)]
    make_lake(tmp_path / "lake", rows, metadata=[source(10_000, "camera/front")])
    recording = tp.open(tmp_path / "lake")
    assert list(recording) == [7, "camera/front"]
    assert {key: len(stream) for key, stream in recording.items()} == {7: 3, "camera/front": 2}
    assert recording[10_000].name == "camera/front"
    assert recording.get("camera/rear") is None
    with pytest.raises(NotRecorded, match=r"no stream 'camera/rear'; a recorded stream: 7, camera/front \(10000\)"):
        recording["camera/rear"]
    assert repr(recording) == f"<Recording {tmp_path}/lake, version 1: 7, 'camera/front'>"


# --- what frames hold


def test_arrays_have_dtype_shape_and_order(tmp_path: Path) -> None:
    """As a live frame shows them: BIT as packed bytes, BYTES as uint8, columns first where they were."""
    fortran = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    rows = [
        row(np.arange(4, dtype=np.int16), seq=0, dropped_before=2, dropped_reason="LATE", meta_version=1),
        row(fortran, seq=1),
        bit_row(12, seq=2),
        row(np.arange(5, dtype=np.uint8), seq=3, dtype="BYTES"),
        row(np.empty((0, 3), np.uint8), seq=4),
    ]
    metadata = [attribute(10_000, 1, "exposure_ms", "4", kind="application/json"), attribute(10_000, 1, "lens", "wide")]
    make_lake(tmp_path / "lake", rows, metadata=metadata)
    short, columns, bits, data, empty = stream = list(tp.open(tmp_path / "lake")[10_000])
    assert (short.dtype, short.array.tolist(), short.dropped_before, short.dropped_reason) == (
        np.int16, [0, 1, 2, 3], 2, "LATE"
    )  # fmt: skip
    assert short.metadata is not None
    assert short.metadata.attributes == {"exposure_ms": 4, "lens": "wide"}
    assert columns.metadata is None
    assert (columns.order, columns.array.tolist()) == ("F", fortran.tolist())
    assert columns.array.flags.f_contiguous
    assert (bits.shape, bits.array.tolist(), bits.wire_dtype) == ((12,), [255, 240], tp.Dtype.BIT)
    assert (data.array.tolist(), data.wire_dtype) == ([0, 1, 2, 3, 4], tp.Dtype.BYTES)
    assert empty.array.shape == (0, 3)
    assert not any(frame.array.flags.writeable for frame in stream)
    with pytest.raises(ValueError, match=r"frame 1 of epoch 1 is float32 \(2, 3\), the frames before are int16 \(4,\)"):
        tp.open(tmp_path / "lake")[10_000].numpy()


def test_dtypes_that_the_wire_carries_as_others_are_restored(tmp_path: Path) -> None:
    """By the metadata of each frame's version, without a copy; frames of other versions are what the wire says."""
    half, waves = np.arange(4, dtype=np.float16), (np.arange(6) * (1 + 2j)).astype(np.complex64).reshape(2, 3)
    rows = [
        row(half.view(np.uint16), seq=0, meta_version=1),
        row(half.view(np.uint16), seq=1, meta_version=3),
        row(half.view(np.uint16), seq=2),
        row(waves[..., None].view(np.float32), seq=3, meta_version=2),
        row(np.ones(3, np.float32), seq=4, meta_version=2),
    ]
    dtypes = [attribute(10_000, 1, "numpy_dtype", "float16"), attribute(10_000, 2, "numpy_dtype", "complex64")]
    make_lake(tmp_path / "lake", rows, metadata=[*dtypes, attribute(10_000, 3, "lens", "wide")])
    frames = list(tp.open(tmp_path / "lake")[10_000])
    assert [frame.dtype.name for frame in frames] == ["float16", "uint16", "uint16", "complex64", "float32"]
    np.testing.assert_array_equal(frames[0].array, half)
    np.testing.assert_array_equal(frames[3].array, waves)
    assert frames[3].shape == (2, 3)
    assert not frames[3].array.flags.owndata
    assert not any(frame.array.flags.writeable for frame in frames)
    np.testing.assert_array_equal(tp.open(tmp_path / "lake")[10_000][3].array, waves)


def test_one_frame_costs_one_row_group(stream: RecordedStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths and seqs read no payloads; neighbours come from the row group that is there."""
    read: list[int] = []
    whole = open_files._read_group
    monkeypatch.setattr(open_files, "_read_group", lambda file, group: read.append(group) or whole(file, group))
    assert (len(stream[10:40]), len(stream.seqs), len(stream.times)) == (30, 110, 110)
    assert read == []
    kept = [stream[seq] for seq in (20, 21, 31)]
    assert read == [1]
    assert [frame.array.base is None for frame in kept] == [True] * 3
    assert [frame.seq for frame in stream[14:34]] == list(range(14, 34))
    assert read == [1, 0, 1, 2]


# --- beside writers


@pytest.fixture
def lake(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """On a local disk, and in a bucket."""
    monkeypatch.setenv("TENSORPOOL_SPOOL_DIR", str(tmp_path / "spool"))
    return Lake.create(place)


@pytest.fixture
def ring(shm_dir: Path) -> Iterator[Ring]:
    yield Ring(shm_dir)
    ring_reader.let_go(0)


def record(lake: Lake, ring: Ring, batch: int) -> None:
    ring.write(4)
    lo, hi = 4 * batch, 4 * batch + 4
    commits.commit(
        lake, "q", batch, [Staging(lake.path, "q", batch).stage(ring.part(lo, hi), ring.span(lo, hi), NO_SYNC)]
    )


def test_row_groups_hold_few_frames(shm_dir: Path, tmp_path: Path) -> None:
    """About 2 MiB each, also after a compaction: three frames of 640 KiB, however many are written at once."""
    lake = Lake.create(tmp_path / "lake")
    ring = Ring(shm_dir, nbytes=640 << 10)
    for batch in range(2):
        record(lake, ring, batch)
    assert [_groups(lake, file.path) for file in lake.files()] == [[3, 1], [3, 1]]
    maintenance.compact(lake)
    assert [_groups(lake, file.path) for file in lake.files()] == [[3, 3, 2]]
    check(tp.open(lake.uri)[10_000], range(8))
    ring_reader.let_go(0)


def _groups(lake: Lake, path: str) -> list[int]:
    about = lake.open_parquet(path).metadata
    return [about.row_group(group).num_rows for group in range(about.num_row_groups)]


def check(stream: RecordedStream, seqs: range) -> None:
    """Byte for byte, in order and at random."""
    pattern = Checked()
    assert [frame.seq for frame in stream] == list(seqs)
    for seq in reversed(seqs):
        assert pattern.find(stream[seq].array, seq) is None


def test_a_recording_follows_commits_compaction_and_retention(lake: Lake, ring: Ring) -> None:
    """It stays as it was until it is refreshed; a file that was deleted meanwhile is explained."""
    record(lake, ring, 0)
    recording = tp.open(lake.uri)
    before = recording[10_000]
    check(before, range(4))
    for batch in (1, 2):
        record(lake, ring, batch)
    assert (len(before), len(recording[10_000])) == (4, 4)
    recording.refresh()
    small = recording[10_000]
    check(small, range(12))
    assert maintenance.compact(lake).files_before == 3
    check(small, range(12))
    recording.refresh()
    check(recording[10_000], range(12))
    maintenance.remove_unused(lake, grace_s=0)
    with pytest.raises(RecordingOutdated, match=r"left the lake .* call refresh\(\)"):
        check(small, range(12))
    check(recording[10_000], range(12))
    record(lake, ring, 3)
    maintenance.retain(lake, max_bytes=1)
    recording.refresh()
    check(recording[10_000], range(12, 16))
    with pytest.raises(NotRecorded, match=r"frame 3 .*nearest: 12$"):
        recording[10_000][3]


def test_a_row_group_in_a_bucket_is_one_request(
    bucket: str, ring: Ring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one for each column; for random access and for reading everything."""
    monkeypatch.setenv("TENSORPOOL_SPOOL_DIR", str(tmp_path / "spool"))
    lake = Lake.create(f"{bucket}/lake")
    record(lake, ring, 0)
    stream = tp.open(lake.uri)[10_000]
    assert len(stream._source.files.starts(lake.files()[0])) == 2  # the footer is there
    reads: list[int] = []
    read = log_store._Remote.read
    monkeypatch.setattr(log_store._Remote, "read", lambda file, size=-1: reads.append(size) or read(file, size))
    assert stream[2].seq == 2
    assert len(reads) == 1
    reads.clear()
    assert [batch.num_rows for batch in lake.read_frames(lake.files()[0].path)] == [4]
    assert len(reads) <= 3  # the footer too


def test_a_file_that_the_log_names_and_that_is_gone_is_damage(lake: Lake, ring: Ring) -> None:
    record(lake, ring, 0)
    stream = tp.open(lake.uri)[10_000]
    lake.store.remove([lake.files()[0].path])
    with pytest.raises(LakeDamaged, match="the log names this file, but it is missing"):
        stream[1]


def test_rows_of_other_writers_are_found_in_order(tmp_path: Path) -> None:
    """Their files may overlap ours and need not be sorted."""
    lake = make_lake(tmp_path / "lake", [one for one in timed(8) if one["seq"] % 2 == 0])
    table = deltalake.DeltaTable(lake.uri)
    more = table.to_pyarrow_table().slice(0, 3)
    for seqs in ([5, 1, 3], [9, 7, 8]):
        more = more.set_column(more.schema.get_field_index("seq"), "seq", [seqs])
        deltalake.write_deltalake(table, more, mode="append")
    stream = tp.open(lake.uri)[10_000]
    assert [frame.seq for frame in stream] == stream.seqs.tolist() == list(range(10))
    assert [stream[seq].seq for seq in (5, 1, 6, 9)] == [5, 1, 6, 9]
    assert stream[1:4].seqs.tolist() == [1, 2, 3]


def test_a_frame_of_another_writer_is_found_without_opening_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many files there are: the log has the seqs of each."""
    lake = Lake.create(tmp_path / "written")
    for batch in range(5):
        folder = Staging(lake.path, "q", batch)
        rows = table(rows_over_time(10 * batch + 10)[-10:])
        staged = stage_rows(folder, iter(rows.to_batches()), NO_SYNC)
        commits.commit(lake, "q", batch, [staged], kind="write")
    assert [file.is_recorded for file in lake.files()] == 5 * [False]
    opened: list[str] = []
    whole = Lake.open_parquet
    monkeypatch.setattr(Lake, "open_parquet", lambda self, path: opened.append(path) or whole(self, path))
    assert tp.open(lake.path)[10_000][27].seq == 27
    assert len(opened) == 1


def test_an_open_recording_keeps_frames_that_leave_the_lake(tmp_path: Path) -> None:
    lake = make_lake(tmp_path / "lake", timed(4))
    recording = tp.open(tmp_path / "lake")
    lake.append("retain", lambda state: Change((), tuple(state.files.values())))
    assert [frame.seq for frame in recording[10_000]] == [0, 1, 2, 3]


def test_what_a_recorder_writes_is_read_while_it_writes(pool: tp.Local, client: Client, tmp_path: Path) -> None:
    """Byte for byte, with its name and the times of its producer's clock."""
    name = new_stream("deep")
    settings = Settings(trigger_s=0.3, codec="zstd", is_durable=False, is_warmed_up=False, **options_of(pool))
    pattern = Checked()
    with Camera(client, name, hz=100), DirectRecorder([name], tmp_path / "lake", settings=settings) as recorder:
        wait_for_frames(recorder, 20)
        recording = tp.open(tmp_path / "lake")
        stream = recording[name]
        first = len(stream)
        assert first >= 1
        wait_for_frames(recorder, first + 20)
        recording.refresh()
        now = datetime.now(UTC)
        stream = recording[name]
        assert len(stream) > first
        for frame in stream:
            assert pattern.find(frame.array, frame.seq) is None
            assert frame.time is not None
            assert timedelta() <= now - frame.time < timedelta(minutes=5)
        assert stream.at(now).seq == stream.seqs[-1]


# --- the documents
