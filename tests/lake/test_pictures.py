# SPDX-License-Identifier: Apache-2.0
"""Pictures of recordings: what is drawn, of which frames, and what is said about it. No Spark takes part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from tensorpool.errors import ConfigError
from tensorpool.lake.pictures import contact_sheet, pick, qos_timeline, require_place, timeline
from tests.support.frame_rows import SECOND_NS, attribute, bit_row, make_lake, row, rows_over_time


def windows(stream_id: int, count: int, **fields: Any) -> list[dict[str, Any]]:
    rows = []
    for number in range(count):
        made = {"stream_id": stream_id, "start_ns": SECOND_NS * number, "seconds": 1.0, "hz": 30.0, "frames": 30}
        rows.append(made | {"lost": number % 3, "p50_ms": 1.0, "p90_ms": 2.0, "p99_ms": 3.0} | fields)
    return rows


def is_drawn(path: Path) -> bool:
    """Whether a picture shows something."""
    picture = imread(path)
    return min(picture.shape[:2]) > 200 and 0.02 < float((picture[..., :3].min(axis=-1) < 0.9).mean()) < 0.98


def test_a_timeline_is_drawn_of_whatever_there_is(tmp_path: Path) -> None:
    """One window or many, in any order, with pauses and outliers, without gaps, without latency, with a clock ahead."""
    rows = windows(1, 1) + windows(2, 2, lost=0) + windows(3, 60)[::-1] + windows(4, 3) + windows(4, 30)[20:]
    rows += windows(5, 5, p50_ms=None, p90_ms=None, p99_ms=None) + windows(6, 4, p50_ms=-3.0)
    rows += [one | {"p99_ms": 10.0**number} for number, one in enumerate(windows(7, 6))]
    assert is_drawn(timeline(rows, tmp_path / "t.png", title="/data/lake"))


def test_a_timeline_of_consumers_is_drawn(tmp_path: Path) -> None:
    """With a line for each."""
    rows = []
    for number in range(5):
        report = {"received_ns": number * SECOND_NS, "stream_id": 1, "drops_gap": number, "drops_late": None}
        rows += [report | {"client_id": 1, "lag": number or None}, report | {"client_id": 2, "lag": 3}]
    assert is_drawn(qos_timeline(rows, tmp_path / "q.png"))


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    """And so is a place where nothing can be written."""
    for draw in (timeline, qos_timeline):
        with pytest.raises(ConfigError, match="no rows"):
            draw([], tmp_path / "t.png")
    with pytest.raises(ConfigError, match="can be written"):
        timeline(windows(1, 2), tmp_path / "missing" / "t.png")
    with pytest.raises(ConfigError, match="can be written"):
        require_place(tmp_path)
    lake = make_lake(tmp_path / "lake", rows_over_time(3))
    with pytest.raises(ConfigError, match="recorded stream: 10000"):
        contact_sheet(lake, tmp_path / "c.png", stream_id=3)
    with pytest.raises(ConfigError, match="1 to 64"):
        contact_sheet(lake, tmp_path / "c.png", count=0)
    with pytest.raises(ConfigError, match="recorded stream: none"):
        contact_sheet(make_lake(tmp_path / "empty", []), tmp_path / "c.png")


def test_a_contact_sheet_has_frames_at_even_distances(tmp_path: Path) -> None:
    """From the first to the last, across files; of few frames all."""
    lake = make_lake(tmp_path / "lake", rows_over_time(101), rows_per_file=7)
    pictures = pick(lake, None, 5)
    assert [picked.frame.seq for picked in pictures] == [0, 25, 50, 75, 100]
    assert [picked.seconds for picked in pictures] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [int(picked.picture.pixels[0, 0]) for picked in pictures if picked.picture] == [0, 25, 50, 75, 100]
    assert len(pick(make_lake(tmp_path / "small", rows_over_time(3)), 10_000, 12)) == 3
    assert is_drawn(contact_sheet(lake, tmp_path / "c.png", count=7))


def test_every_kind_of_frame_is_shown_somehow(tmp_path: Path) -> None:
    """Colour, grey, floats with NaN, lines, many dimensions, bits, nothing at all: on one sheet."""
    arrays: list[np.ndarray[Any, Any]] = [
        np.zeros((40, 50, 3), np.uint8),
        np.full((40, 50), 200, np.uint8),
        np.array([[np.nan, 1.0], [np.inf, 2.0]], np.float32),
        np.sin(np.arange(100)),
        np.zeros((3, 4, 20, 30), np.uint16),
        np.ones((20, 30), np.bool_),
        np.zeros((0, 4), np.uint8),
        np.asfortranarray(np.arange(12, dtype=np.int64).reshape(3, 4)),
        np.full((2, 2), np.nan),
        np.zeros((1, 1), np.uint8),
    ]
    rows = [row(array, seq=seq) for seq, array in enumerate(arrays)]
    lake = make_lake(tmp_path / "lake", [*rows, bit_row(64, seq=len(arrays))])
    assert is_drawn(contact_sheet(lake, tmp_path / "c.png", count=20))
    notes = [picked.note for picked in pick(lake, None, 20)]
    assert notes[2:5] == ["1.01 to 1.99", "", "slice 1, 2 of 3x4, 0 to 0"]
    assert (notes[5], notes[6], notes[8]) == ("", "empty", "0 to 0")


def test_large_frames_are_thinned_and_wide_ones_stretched(tmp_path: Path) -> None:
    """A preview is small; 16 bits become 8 by their own range."""
    wide = np.linspace(100, 4095, 2000 * 30).reshape(2000, 30).astype(np.uint16)
    (picked,) = pick(make_lake(tmp_path / "lake", [row(wide)]), None, 1)
    assert picked.picture is not None
    assert picked.picture.pixels.shape == (400, 6)
    assert (picked.picture.pixels.dtype, picked.picture.pixels.min()) == (np.uint8, 0)
    low, high = map(float, picked.note.split(" to "))
    assert 100 < low < 200
    assert 4000 < high < 4095


def test_colours_are_those_of_the_pixel_format(tmp_path: Path) -> None:
    """Red is red, also where the camera sends blue first."""
    red = np.zeros((4, 4, 3), np.uint8)
    red[..., 2] = 255
    metadata = [attribute(10_000, 1, "pixel_format", "bgr24")]
    lake = make_lake(tmp_path / "lake", [row(red, meta_version=1)], metadata=metadata)
    (picked,) = pick(lake, None, 1)
    assert picked.picture is not None
    assert picked.picture.pixels[0, 0].tolist() == [255, 0, 0]
