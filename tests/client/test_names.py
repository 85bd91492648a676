# SPDX-License-Identifier: Apache-2.0
"""Names of data sources: learnt from announces, forgotten with their producers."""

from __future__ import annotations

import pytest

from tensorpool.client import names
from tensorpool.client.names import FRESH_PERIODS, Names, preferred_id
from tensorpool.settings import Range
from tensorpool.wire.control import DataSourceAnnounce
from tests.client.conftest import SECOND_NS

WINDOW_NS = FRESH_PERIODS * SECOND_NS


def source_announce(stream_id: int, name: str, *, producer_id: int = 1, epoch: int = 1) -> DataSourceAnnounce:
    return DataSourceAnnounce(stream_id=stream_id, producer_id=producer_id, epoch=epoch, meta_version=0, name=name)


def test_a_name_leads_to_the_stream_that_announced_it() -> None:
    """With what was said last."""
    known = Names(SECOND_NS)
    known.on_announce(source_announce(7, "camera/front", producer_id=3, epoch=9), 100)
    (source,) = known.find("camera/front", 100)
    assert (source.stream_id, source.name, source.producer_id, source.epoch) == (7, "camera/front", 3, 9)
    assert known.find("camera/rear", 100) == []
    assert known.owner(7, 100) == "camera/front"
    assert known.owner(8, 100) is None


@pytest.mark.spec("DISC-5.1-12")
def test_names_are_compared_as_they_are() -> None:
    """Neither case nor blanks are anybody's opinion."""
    known = Names(SECOND_NS)
    known.on_announce(source_announce(7, "Camera"), 0)
    assert [known.find(name, 0) for name in ("camera", "Camera ", " Camera", "CAMERA")] == [[], [], [], []]
    assert len(known.find("Camera", 0)) == 1


def test_a_stream_has_the_name_that_it_was_last_given() -> None:
    """A renamed one is not found by its earlier name."""
    known = Names(SECOND_NS)
    known.on_announce(source_announce(7, "old"), 0)
    known.on_announce(source_announce(7, "new"), 1)
    assert known.find("old", 1) == []
    assert known.owner(7, 1) == "new"


def test_an_announce_without_a_name_says_nothing_about_names() -> None:
    """It neither gives one nor takes it away."""
    known = Names(SECOND_NS)
    known.on_announce(source_announce(7, ""), 0)
    assert known.owner(7, 0) is None
    known.on_announce(source_announce(7, "camera"), 0)
    known.on_announce(source_announce(7, ""), 1)
    assert known.owner(7, 1) == "camera"


def test_two_streams_of_one_name_are_both_found() -> None:
    """It is for the caller to call that ambiguous."""
    known = Names(SECOND_NS)
    known.on_announce(source_announce(7, "camera"), 0)
    known.on_announce(source_announce(8, "camera"), 0)
    assert sorted(source.stream_id for source in known.find("camera", 0)) == [7, 8]


def test_a_name_is_forgotten_after_three_periods_of_silence() -> None:
    """Soft state: each announce keeps it for as long again."""
    known = Names(SECOND_NS)
    known.on_announce(source_announce(7, "camera"), 0)
    known.on_announce(source_announce(8, "other"), WINDOW_NS - 1)
    assert len(known.find("camera", WINDOW_NS - 1)) == 1
    assert known.find("camera", WINDOW_NS) == []
    assert known.owner(7, WINDOW_NS) is None
    assert known.owner(8, WINDOW_NS) == "other"


def test_there_are_only_so_many_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """More streams than that are not learnt; those that are known still change."""
    monkeypatch.setattr(names, "MAX_NAMES", 3)
    known = Names(SECOND_NS)
    for stream_id in range(5):
        known.on_announce(source_announce(stream_id, f"n{stream_id}"), 0)
    assert [len(known.find(f"n{stream_id}", 0)) for stream_id in range(5)] == [1, 1, 1, 0, 0]
    known.on_announce(source_announce(0, "renamed"), 1)
    assert known.owner(0, 1) == "renamed"


def test_stale_names_make_room_and_long_ones_are_not_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that strangers have filled takes new names when theirs are old; none is longer than a name may be."""
    monkeypatch.setattr(names, "MAX_NAMES", 3)
    known = Names(SECOND_NS)
    for stream_id in range(3):
        known.on_announce(source_announce(stream_id, f"n{stream_id}"), 0)
    known.on_announce(source_announce(7, "n7"), WINDOW_NS + 1)
    assert known.owner(7, WINDOW_NS + 1) == "n7"
    known.on_announce(source_announce(8, "n" * names.MAX_NAME_CHARS), WINDOW_NS + 1)
    known.on_announce(source_announce(9, "n" * (names.MAX_NAME_CHARS + 1)), WINDOW_NS + 1)
    assert known.owner(8, WINDOW_NS + 1) is not None
    assert known.owner(9, WINDOW_NS + 1) is None


def test_a_name_has_its_place_in_every_process_and_after_every_restart() -> None:
    """CRC-32 of the name, modulo the range: a change of the rule would move every stream."""
    ids = Range(20_000, 20_999)
    assert preferred_id("123456789", ids) == 20_000 + 0xCBF43926 % 1_000  # the CRC's own check value
    assert preferred_id("camera/front", ids) == 20_672
    assert {preferred_id(f"n{number}", Range(5, 7)) for number in range(50)} == {5, 6, 7}
    assert preferred_id("anything", Range(5, 5)) == 5


def test_without_a_range_there_is_no_place() -> None:
    """0: the driver chooses."""
    assert preferred_id("camera", Range()) == 0
