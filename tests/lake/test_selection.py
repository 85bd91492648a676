# SPDX-License-Identifier: Apache-2.0
"""Which frames are wanted: bounds, and what is skipped of a file for them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorpool.lake.files import read_frames
from tensorpool.lake.selection import Bounds, Selection, time_us_of
from tests.support.frame_rows import row, table

NUMBERS = st.integers(-3, 12)
MAYBE = st.none() | NUMBERS
BOUNDS = st.builds(Bounds, MAYBE, MAYBE, st.none() | st.sets(NUMBERS).map(lambda some: tuple(sorted(some))))
START = datetime(2026, 11, 16, 10, tzinfo=UTC)


def has(bounds: Bounds, number: int) -> bool:
    return (
        (bounds.lo is None or number >= bounds.lo)
        and (bounds.hi is None or number <= bounds.hi)
        and (bounds.values is None or number in bounds.values)
    )


@given(BOUNDS, BOUNDS, NUMBERS, NUMBERS)
def test_bounds_are_what_they_say(bounds: Bounds, others: Bounds, lo: int, hi: int) -> None:
    """Narrowed they hold what both hold; `spans` is exact, and `overlaps` true wherever something is wanted."""
    both = bounds.narrowed(others.lo, others.hi, others.values)
    assert [at for at in range(-5, 15) if has(both, at)] == [
        at for at in range(-5, 15) if has(bounds, at) and has(others, at)
    ]
    wanted = [at for at in range(lo, hi) if has(bounds, at)]
    assert [at for first, end in bounds.spans(lo, hi) for at in range(first, end)] == wanted
    if wanted:
        assert bounds.overlaps(lo, hi - 1)
        assert bounds.overlaps(None, hi - 1)
        assert bounds.overlaps(lo, None)


def test_what_is_not_known_is_not_excluded() -> None:
    assert Bounds(5, 7).overlaps(None, None)
    assert not Bounds(5, 7).overlaps(8, 9)
    assert not Bounds(5, 7).overlaps(3, 4)
    assert not Bounds(values=(5, 9)).overlaps(6, 8)
    assert Selection(stream_id=Bounds(7, 7)).has_epoch(7, 3)
    assert not Selection(epoch=Bounds(lo=4)).has_epoch(7, 3)


@pytest.mark.parametrize(
    ("wanted", "seqs", "groups"),
    [
        (Selection(), range(64), [0, 1, 2, 3]),
        (Selection(seq=Bounds(20, 20)), [20], [1]),
        (Selection(seq=Bounds(values=(3, 50))), [3, 50], [0, 3]),
        (Selection(seq=Bounds(lo=100)), [], []),
        (Selection(time=Bounds(lo=time_us_of(START + timedelta(seconds=47)))), range(47, 63), [2, 3]),
        (Selection(time=Bounds(hi=time_us_of(START) + 1)), [0], [0]),
        (Selection(seq=Bounds(lo=60), time=Bounds(hi=time_us_of(START + timedelta(seconds=61)))), [60, 61], [3]),
    ],
)
def test_row_groups_without_wanted_frames_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: Selection, seqs: Any, groups: list[int]
) -> None:
    """By their statistics of seq and time; of the others only rows that are wanted. The last frame has no time."""
    rows = [row(seq=seq, time=None if seq == 63 else START + timedelta(seconds=seq)) for seq in range(64)]
    path = tmp_path / "stream_id=10000" / "epoch=1" / "part.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(table(rows).drop_columns(["stream_id", "epoch"]), path, row_group_size=16)
    read: list[int] = []
    read_row_group = pq.ParquetFile.read_row_group

    def counted(file: pq.ParquetFile, group: int, *columns: Any, **how: Any) -> Any:
        read.append(group)
        return read_row_group(file, group, *columns, **how)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    found = [seq for batch in read_frames(path, wanted=wanted) for seq in batch.column("seq").to_pylist()]
    assert found == list(seqs)
    assert read == groups
