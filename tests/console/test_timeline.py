# SPDX-License-Identifier: Apache-2.0
"""Timelines: what the log knows of a recorded stream, over time, without opening a file."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tensorpool.console.timeline import MAX_BUCKETS, MAX_GAPS, ends, lost_by_reason, timeline
from tensorpool.lake.manifest import Gap, LakeFile

US = 1_000
S = 1_000_000_000


def file_of(
    lo: int, hi: int, first_us: int | None, last_us: int | None, frames: int | None = None, epoch: int = 1
) -> LakeFile:
    return LakeFile(
        path=f"{epoch}-{lo}", stream_id=7, epoch=epoch, lo=lo, hi=hi, frames=hi - lo if frames is None else frames,
        bytes=10, first_time_us=first_us, last_time_us=last_us, written_ns=99 * S, first_seq=lo, last_seq=hi - 1,
    )  # fmt: skip


FILES = st.lists(
    st.builds(
        lambda lo, count, first, span, epoch: file_of(lo, lo + count, first, first + span, epoch=epoch),
        st.integers(0, 10_000),
        st.integers(1, 10_000),
        st.integers(0, 10**15),
        st.integers(0, 10**10),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=8,
)
GAPS = st.lists(
    st.builds(
        lambda lo, count, epoch: Gap(7, epoch, lo, lo + count, "OVERWRITTEN"),
        st.integers(0, 20_000),
        st.integers(0, 500),
        st.integers(1, 4),
    ),
    max_size=5,
)


@given(FILES, GAPS)
def test_every_frame_and_every_loss_is_in_one_bucket(files: list[LakeFile], gaps: list[Gap]) -> None:
    """Buckets add up, are of equal length, and cover the whole span."""
    found = timeline(files, gaps)
    assert sum(frames for _, frames, _ in found["buckets"]) == sum(file.frames for file in files)
    assert sum(lost for _, _, lost in found["buckets"]) == sum(gap.hi - gap.lo for gap in gaps)
    assert (found["from"], found["to"]) == ends(files)
    assert 1 <= len(found["buckets"]) <= MAX_BUCKETS
    starts = [start for start, _, _ in found["buckets"]]
    assert starts[0] == found["from"]
    assert starts[-1] <= found["to"]
    steps = {after - before for before, after in itertools.pairwise(starts)}
    assert not steps or max(steps) - min(steps) <= 1
    assert sum(epoch["frames"] for epoch in found["epochs"]) == sum(file.frames for file in files)


@given(FILES, st.integers(0, 10**18), st.integers(0, 10**13))
def test_a_span_has_what_is_in_it(files: list[LakeFile], start_ns: int, length_ns: int) -> None:
    """Never more than there is, and all of it where the span covers all."""
    found = timeline(files, [], start_ns, start_ns + length_ns)
    total = sum(file.frames for file in files)
    counted = sum(frames for _, frames, _ in found["buckets"])
    assert 0 <= counted <= total
    first, last = ends(files) or (0, 0)
    if start_ns <= first and start_ns + length_ns >= last:
        assert counted == total
    if start_ns > last or start_ns + length_ns < first:
        assert counted == 0


def test_a_gap_is_where_its_frames_would_have_been() -> None:
    """Between the frames around it, by their seqs and times."""
    files = [file_of(0, 101, 0, 1_000_000), file_of(201, 302, 2_000_000, 3_000_000)]
    found = timeline(files, [Gap(7, 1, 101, 201, "OVERWRITTEN"), Gap(7, 1, 302, 302, "UNKNOWN_TAIL")])
    gap, tail = found["gaps"]
    assert (gap["from_seq"], gap["to_seq"], gap["frames"], gap["reason"]) == (101, 200, 100, "OVERWRITTEN")
    assert 1.0 * S < gap["time"] < 1.1 * S
    assert (tail["from_seq"], tail["frames"]) == (302, 0)
    lost = [start for start, _, count in found["buckets"] if count]
    assert 0.99 * S < min(lost) < 1.1 * S
    assert 1.9 * S < max(lost) < 2.1 * S
    assert lost_by_reason([Gap(7, 1, 101, 201, "A"), Gap(7, 2, 0, 5, "A"), Gap(7, 2, 9, 9, "B")]) == {"A": 105, "B": 0}


def test_files_without_times_are_where_they_were_written() -> None:
    """One bucket, all frames."""
    found = timeline([file_of(0, 50, None, None)], [])
    assert found["from"] == found["to"] == 99 * S
    assert found["buckets"] == [[99 * S, 50, 0]]


def test_nothing_recorded_is_an_empty_timeline() -> None:
    """Also where a file tells of gaps only."""
    empty: dict[str, object] = {"from": None, "to": None, "buckets": [], "gaps": [], "epochs": []}
    assert timeline([], []) == empty
    assert timeline([file_of(0, 5, None, None, frames=0)], [Gap(7, 1, 0, 5, "A")]) == empty


def test_gaps_are_limited() -> None:
    """A recorder that lost every second frame does not send megabytes."""
    gaps = [Gap(7, 1, seq, seq + 1, "OVERWRITTEN") for seq in range(0, 4 * MAX_GAPS, 2)]
    assert len(timeline([file_of(0, 5000, 0, 10**6)], gaps)["gaps"]) == MAX_GAPS
