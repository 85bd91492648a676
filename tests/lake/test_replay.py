# SPDX-License-Identifier: Apache-2.0
"""Replay: what a consumer receives is what was recorded, in its own time. No Spark and no JVM takes part."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import tensorpool as tp
from tensorpool.client import Client, Consumer, Frame
from tensorpool.errors import ConfigError
from tensorpool.lake import Lake
from tensorpool.lake.payloads import array_of
from tensorpool.lake.playback import Prefetch, Span, TrackClock
from tensorpool.lake.replay import Part, Replay, ReplayOptions, Schedule, Summary, tracks_of
from tensorpool.wire.control import Dtype
from tests.support.frame_rows import MS, SECOND_NS, attribute, bit_row, make_lake, row, rows_over_time, source
from tests.support.processes import Process, wait_until

_ids = itertools.count(41_000)
type Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def deployment() -> Iterator[tp.Local]:
    """A driver of the replay's own: streams are made on demand."""
    pools = [{"pool_id": 1, "stride_bytes": 4096}]
    settings = {
        "policies.announce_period_ms": 1000,
        "driver.stream_id_range": [41_000, 41_999],
        "profiles.default": {"header_nslots": 1024, "payload_pools": pools},
    }
    with tp.local(overrides=settings) as pool:
        yield pool


@pytest.fixture
def client(deployment: tp.Local) -> Iterator[Client]:
    with deployment.connect() as client:
        yield client


class ReceivedFrame:
    """A frame as a consumer has received it."""

    def __init__(self, frame: Frame) -> None:
        self.array = frame.copy()
        self.frame = frame
        self.row = {
            "seq": frame.seq,
            "timestamp_ns": frame.timestamp_ns,
            "meta_version": frame.meta_version,
            "dtype": frame.wire_dtype.name,
            "shape": list(frame.shape),
            "order": frame.order,
            "nbytes": frame.nbytes,
        }
        self.epoch = frame.epoch


def play(
    lake: Lake, client: Client, *, frames: int, recorded: Sequence[int] = (10_000,), **options: Any
) -> tuple[list[list[ReceivedFrame]], Summary, list[Consumer]]:
    """Replay to consumers that miss nothing; everything that they received."""
    targets = [next(_ids) for _ in recorded]
    parts = tuple(Part(*pair) for pair in zip(recorded, targets, strict=True))
    consumers = [client.consumer(target, create=True) for target in targets]
    received: list[list[ReceivedFrame]] = [[] for _ in targets]

    def listen(_: object) -> None:
        for consumer, own in zip(consumers, received, strict=True):
            while (frame := consumer.poll()) is not None:
                own.append(ReceivedFrame(frame))

    chosen = ReplayOptions(parts=parts, wait_consumers=1, **options)
    summary = Replay(lake, client, chosen, on_frame=listen).run()

    def is_there() -> bool:
        listen(None)
        return sum(map(len, received)) >= frames

    wait_until(is_there, f"{frames} frames arrive, so far {[len(own) for own in received]}")
    return received, summary, consumers


def various() -> Rows:
    """Every dtype and order, shapes of several dimensions, gaps between them, and a frame without a time."""
    arrays: list[np.ndarray[Any, Any]] = [
        np.arange(24).reshape(2, 3, 4).astype(dtype) for dtype in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8")
    ]
    arrays += [np.linspace(0, 1, 12, dtype=dtype).reshape(3, 4) for dtype in ("f4", "f8")]
    arrays += [np.array([[True], [False]]), np.zeros((0, 5), np.uint8)]
    arrays += [np.asfortranarray(array) for array in arrays[:9:4]]
    rows = []
    for number, array in enumerate(arrays):
        stamp_ns = 5 * SECOND_NS + number * 2 * MS
        times = {"timestamp_ns": stamp_ns, "received_ns": stamp_ns + MS}
        rows.append(row(array, seq=number * 3, meta_version=1 + number // 8, **times))
    rows.append(bit_row(13, seq=90, timestamp_ns=6 * SECOND_NS, received_ns=6 * SECOND_NS))
    rows.append(row(dtype=Dtype.BYTES.name, seq=91, timestamp_ns=6 * SECOND_NS, received_ns=6 * SECOND_NS))
    rows.append(row(seq=95, received_ns=6 * SECOND_NS + MS))
    return rows


METADATA = [
    attribute(10_000, 1, "lens", "35 mm", told_ns=4 * SECOND_NS),
    attribute(10_000, 1, "gain", "2.5", told_ns=4 * SECOND_NS, kind="application/json"),
    attribute(10_000, 1, "tags", "lab1,raw", told_ns=4 * SECOND_NS),
    attribute(10_000, 2, "plate", "\x01\x02", told_ns=5 * SECOND_NS, kind="image/x-raw"),
]


def test_consumers_cannot_tell_a_replay_from_the_instrument(client: Client, tmp_path: Path) -> None:
    """Bytes, dtypes, shapes, orders, seqs with their gaps, times and metadata are those of the recording."""
    rows = various()
    lake = make_lake(tmp_path / "lake", rows, metadata=METADATA, rows_per_file=5)
    ((received,), summary, (consumer,)) = play(lake, client, frames=len(rows), speed=20.0, timestamps="preserve")
    for recorded, frame in zip(rows, received, strict=True):
        assert frame.row == {name: recorded[name] for name in frame.row}
        array = array_of(recorded["payload"], recorded["dtype"], recorded["shape"], recorded["order"])
        np.testing.assert_array_equal(frame.array, array)
        assert frame.array.tobytes(order="A") == recorded["payload"]
    epoch = received[-1].epoch  # the replay's own: when it ended the driver made another
    wait_until(lambda: consumer.metadata(2, epoch=epoch), "the second metadata arrive")
    first, second = consumer.metadata(1, epoch=epoch), consumer.metadata(2, epoch=epoch)
    assert first is not None
    assert second is not None
    assert (first.attributes, first.tags, first.timestamp_ns) == (
        {"lens": "35 mm", "gain": 2.5}, ("lab1", "raw"), 4 * SECOND_NS,
    )  # fmt: skip
    assert (second.attributes, second.formats) == ({"plate": b"\x01\x02"}, {"plate": "image/x-raw"})
    assert (summary.frames, summary.end, summary.rounds) == (len(rows), "end", 1)
    assert summary.streams[0].dropped == {}
    assert consumer.stats.lost == rows[-1]["seq"] + 1 - len(rows)


def test_a_replay_says_when_the_frames_were_taken_not_when_they_were_played(client: Client, tmp_path: Path) -> None:
    """The pair of the recording is published anew; a recording without times has none, unless they are renewed."""
    taken = datetime(2024, 2, 29, 12, 0, 0, 250_000, tzinfo=UTC)
    rows = rows_over_time(3)
    timed = [one | {"time": taken + timedelta(milliseconds=10 * one["seq"])} for one in rows]
    ((received,), *_) = play(make_lake(tmp_path / "timed", timed), client, frames=3, speed=20.0, timestamps="preserve")
    wait_until(lambda: received[-1].frame.time == timed[-1]["time"], "the pair of the recording")
    ((received,), *_) = play(make_lake(tmp_path / "not", rows), client, frames=3, speed=20.0, timestamps="preserve")
    wait_until(lambda: received[-1].frame._mapped.clock is not None, "that there is no pair")
    assert received[-1].frame.time is None
    ((received,), *_) = play(make_lake(tmp_path / "new", timed), client, frames=3, speed=20.0)
    played = received[-1].frame.time
    assert played is not None
    assert abs(datetime.now(UTC) - played) < timedelta(minutes=2)


def test_renewed_seqs_count_on_and_renewed_times_keep_their_distances(client: Client, tmp_path: Path) -> None:
    """Nothing is missing in them; at twice the speed the distances are halved."""
    rows = [one for one in rows_over_time(30) if one["seq"] % 5]
    lake = make_lake(tmp_path / "lake", rows)
    ((received,), _, (consumer,)) = play(lake, client, frames=len(rows), speed=2.0, seq="renew")
    assert [frame.row["seq"] for frame in received] == list(range(len(rows)))
    assert consumer.stats.lost == 0
    stamps = np.array([frame.row["timestamp_ns"] for frame in received])
    given = np.array([one["timestamp_ns"] for one in rows])
    np.testing.assert_allclose(np.diff(stamps), np.diff(given) / 2, atol=1)


def test_several_streams_stay_in_step(client: Client, tmp_path: Path) -> None:
    """Two streams of different rates: the times of one lie between those of the other as they did."""
    rows = rows_over_time(20, rate_hz=100) + rows_over_time(5, rate_hz=25, stream_id=10_001)
    lake = make_lake(tmp_path / "lake", rows)
    (received, summary, _) = play(lake, client, frames=25, recorded=[10_000, 10_001], speed=4.0)
    fast, slow = (np.array([frame.row["timestamp_ns"] for frame in own]) for own in received)
    np.testing.assert_allclose(slow, fast[::4], atol=2)
    assert [one.frames for one in summary.streams] == [20, 5]


def test_an_epoch_of_the_recording_is_an_epoch_of_the_replay(client: Client, tmp_path: Path) -> None:
    """A seq may not go back within one. Metadata that was sent anew in the second epoch is sent anew."""
    metadata = [
        attribute(10_000, 1, "run", "first", told_ns=SECOND_NS),
        attribute(10_000, 1, "run", "second", told_ns=2 * SECOND_NS),
    ]
    later = rows_over_time(4, epoch=2, meta_version=1)
    for one in later:
        one["timestamp_ns"] += SECOND_NS
    rows = rows_over_time(5, meta_version=1) + later
    lake = make_lake(tmp_path / "lake", rows, metadata=metadata)
    ((received,), summary, (consumer,)) = play(lake, client, frames=9, speed=None, timestamps="preserve")
    assert [frame.row["seq"] for frame in received] == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert len({frame.epoch for frame in received}) == summary.streams[0].epochs == 2
    epoch = received[-1].epoch
    wait_until(
        lambda: (found := consumer.metadata(1, epoch=epoch)) and found.attributes == {"run": "second"},
        "the metadata is sent anew",
    )


def test_a_loop_begins_again_until_it_is_stopped(client: Client, tmp_path: Path) -> None:
    """With renewed seqs in the same epoch."""
    lake = make_lake(tmp_path / "lake", rows_over_time(7))
    published = itertools.count(1)
    numbers: list[int] = []
    replay = Replay(
        lake,
        client,
        ReplayOptions(parts=(Part(10_000, next(_ids)),), speed=None, loop=True, seq="renew"),
        pause=lambda _: bool(numbers) and numbers[-1] >= 20,
        on_frame=lambda _: numbers.append(next(published)),
    )
    summary = replay.run()
    assert (summary.frames, summary.rounds, summary.end) == (20, 3, "signal")


@pytest.mark.parametrize(
    ("span", "seqs"),
    [
        (Span(from_seq=12, to_seq=15), [12, 13, 14]),
        (Span(from_seq=97), [97, 98, 99]),
        (Span(to_ns=30 * MS), [0, 1, 2]),
        (Span(from_ns=975 * MS), [98, 99]),
        (Span(from_seq=50, to_ns=520 * MS), [50, 51]),
    ],
    ids=str,
)
def test_a_part_of_a_recording_is_played(tmp_path: Path, span: Span, seqs: list[int]) -> None:
    """By seqs or by times since its start; the ends are not part of it."""
    lake = make_lake(tmp_path / "lake", rows_over_time(100), rows_per_file=10)
    (track,) = tracks_of(lake, [Part(10_000, 1)], span)
    assert [frame.seq for frame in track.frames()] == seqs
    with Prefetch(track, 50) as prefetch:
        assert [frame.seq for frame in prefetch] == seqs


def test_files_that_overlap_are_played_in_order_and_rows_once(client: Client, tmp_path: Path) -> None:
    """Rows that were written twice are dropped, and counted."""
    rows = rows_over_time(10)
    make_lake(tmp_path / "lake", rows[::2])
    lake = make_lake(tmp_path / "lake", rows[1::2] + rows[4:5], rows_per_file=99)
    ((received,), summary, _) = play(lake, client, frames=10, speed=None)
    assert [frame.row["seq"] for frame in received] == list(range(10))
    assert summary.streams[0].dropped == {"SEQ_WENT_BACK": 1}


def test_frames_that_fit_no_pool_are_refused_at_once(client: Client, tmp_path: Path) -> None:
    """With the size that there is."""
    lake = make_lake(tmp_path / "lake", [row(np.zeros(8192, np.uint8))])
    with pytest.raises(tp.FrameTooLarge, match="larger stride_bytes"):
        Replay(lake, client, ReplayOptions(parts=(Part(10_000, next(_ids)),))).run()


@pytest.mark.parametrize(
    ("parts", "span", "words"),
    [
        ([5], Span(), "recorded stream: 10000"),
        ([10_000, 10_000], Span(), "each stream once"),
        ([10_000], Span(from_seq=500), "a span in which stream 10000 has frames"),
        ([10_000], Span(from_ns=SECOND_NS), "a span in which"),
    ],
)
def test_what_was_not_recorded_cannot_be_played(tmp_path: Path, parts: list[int], span: Span, words: str) -> None:
    """Said before anything is published."""
    lake = make_lake(tmp_path / "lake", rows_over_time(10))
    with pytest.raises(ConfigError, match=words):
        tracks_of(lake, [Part(one, one) for one in parts], span)


def test_a_damaged_file_ends_the_replay_with_its_name(client: Client, tmp_path: Path) -> None:
    """What was read before it is played."""
    lake = make_lake(tmp_path / "lake", rows_over_time(20), rows_per_file=10)
    (lake.path / lake.files(10_000)[1].path).write_bytes(b"PAR1 but no more")
    with pytest.raises(tp.TensorPoolError, match=r"part-0000000010.*Parquet"):
        Replay(lake, client, ReplayOptions(parts=(Part(10_000, next(_ids)),), speed=None)).run()


# --- the schedule


@hypothesis.given(
    st.lists(st.integers(0, 10**12), min_size=1, max_size=50),
    st.floats(0.01, 100),
    st.one_of(st.none(), st.integers(1, 10**10)),
)
def test_the_schedule_never_goes_back_and_does_not_drift(times: list[int], speed: float, longest: int | None) -> None:
    """However many steps there are, the end is where the sum of them is, but for one rounding."""
    schedule = Schedule(1000, speed, longest)
    due = [schedule.due_ns(time_ns) for time_ns in times]
    assert due == sorted(due)
    assert due[0] == 1000
    highest, steps = times[0], 0
    for time_ns in times[1:]:
        step = max(0, time_ns - highest)
        steps += step if longest is None else min(step, longest)
        highest = max(highest, time_ns)
    assert due[-1] == 1000 + round(steps / speed)


@hypothesis.given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=20), st.data())
def test_a_clock_that_passes_over_files_is_where_reading_them_would_have_left_it(
    files: list[tuple[int, int]], data: st.DataObject
) -> None:
    """So that a seek changes no time."""
    bounds = [(min(pair), max(pair)) for pair in files]
    before_ns = data.draw(st.integers(0, 10**10))
    seeking, reading = TrackClock(0), TrackClock(0)
    for first, last in bounds:
        is_over = seeking.pass_over(first, last, before_ns)
        if not is_over:
            seeking.advance(first), seeking.advance(last)
        reading.advance(first)
        assert is_over == (reading.advance(last) < before_ns)
    last = bounds[-1][1]
    assert seeking.advance(last) == reading.advance(last)


# --- the command


def test_the_command_replays_and_ends_in_order_on_sigterm(deployment: tp.Local, client: Client, tmp_path: Path) -> None:
    """By the stream's name, which it keeps; it waits for a consumer, loops, says what it did, and exits with 0."""
    make_lake(tmp_path / "lake", rows_over_time(50, rate_hz=1000), metadata=[source(10_000, "camera/front")])
    arguments = ["replay", str(tmp_path / "lake"), "--stream", "camera/front", "--speed", "5", "--loop"]
    arguments += ["--wait-consumers", "1", "--json", "--aeron-dir", deployment.aeron_dir]
    with Process("-m", "tensorpool", *arguments, SHM_BASE_DIR=deployment.config.shm.base_dir) as process:
        with client.consumer("camera/front", timeout=90) as consumer:
            seen: list[tuple[int, int]] = []

            def is_second_round() -> bool:
                while (frame := consumer.poll()) is not None:
                    seen.append((frame.epoch, frame.seq))
                return len({epoch for epoch, _ in seen}) >= 2

            wait_until(is_second_round, "the second round arrives")
        process.send(signal.SIGTERM)
        code, output = process.finish()
    assert code == 0, output
    summary = json.loads(output.splitlines()[-1])
    assert summary["end"] == "signal"
    assert summary["rounds"] >= 1
    assert summary["streams"][0]["frames"] >= len(seen)
    assert [seq for epoch, seq in seen if epoch == seen[0][0]] == list(range(50))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--speed", "0"], "a factor such as"),
        (["--speed", "fast"], "or max"),
        (["--from", "soon"], "such as 500ms"),
        (["--as", "1", "--as", "1"], "one target for each of the"),
        (["--seq", "keep"], "preserve"),
    ],
    ids=str,
)
def test_the_command_refuses_what_it_cannot_do(tmp_path: Path, arguments: list[str], words: str) -> None:
    """With exit code 2 and what would do."""
    from click.testing import CliRunner

    from tensorpool.cli.main import group

    make_lake(tmp_path / "lake", rows_over_time(2))
    found = CliRunner().invoke(group, ["replay", str(tmp_path / "lake"), "--stream", "10000", *arguments])
    assert found.exit_code == 2
    assert words in found.output


def test_a_consumer_that_waits_for_a_replay_counts_nothing_before_its_first_seq_as_lost(
    client: Client, tmp_path: Path
) -> None:
    """A recording seldom begins with seq 0: what no producer of this epoch published is not lost. Its gaps are."""
    rows = [one | {"seq": one["seq"] + 100_000} for one in rows_over_time(30) if one["seq"] not in (7, 8)]
    lake = make_lake(tmp_path / "lake", rows)
    ((received,), _, (consumer,)) = play(lake, client, frames=len(rows), speed=4.0)
    assert [frame.row["seq"] for frame in received] == [one["seq"] for one in rows]
    assert consumer.stats.lost == 2
