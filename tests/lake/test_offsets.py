# SPDX-License-Identifier: Apache-2.0
"""Offsets: what the next batch takes, and what follows from the two ends of a batch."""

from __future__ import annotations

import json
import re

import pytest

from tensorpool.errors import RemoteProtocolError
from tensorpool.lake import offsets
from tensorpool.lake.offsets import (
    ENDED,
    OVERWRITTEN,
    UNSEEN,
    EpochSpan,
    Limits,
    Loss,
    Offsets,
    Position,
    RingExtent,
    SeqRange,
)

NO_LIMITS = Limits()


def at(epoch: int, seq: int, *path: EpochSpan, stream: int = 1) -> Offsets:
    return Offsets({stream: Position(epoch, seq, path)})


def held(epoch: int, first: int, end: int, *, stream: int = 1, frame_bytes: int = 100) -> RingExtent:
    return RingExtent(stream, epoch, first, end, frame_bytes)


# --- as text


def test_an_offset_survives_its_way_through_sparks_json() -> None:
    """The text is the same every time, whatever order the streams came in."""
    given = Offsets({20: Position(3, 7, (EpochSpan(2, 5, None), EpochSpan(3, 0, 7))), 3: Position(1, 0)})
    text = json.dumps(given.to_json())
    assert text == '{"3": {"epoch": 1, "seq": 0}, "20": {"epoch": 3, "seq": 7, "path": [[2, 5, null], [3, 0, 7]]}}'
    assert Offsets.from_json(text) == given
    assert Offsets.from_json(json.loads(text)) == given


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        '{"1": 5}',
        '{"1": {"epoch": 1}}',
        '{"camera": {"epoch": 1, "seq": 2}}',
        '{"0": {"epoch": 1, "seq": 2}}',
        '{"1": {"epoch": -1, "seq": 2}}',
        '{"1": {"epoch": 1, "seq": 2.5}}',
        '{"1": {"epoch": 1, "seq": true}}',
        '{"1": {"epoch": 1, "seq": 9223372036854775808}}',
        '{"1": {"epoch": 1, "seq": 2, "sequence": 2}}',
        '{"1": {"epoch": 1, "seq": 2, "path": [[1, 0, 3]]}}',
        '{"1": {"epoch": 2, "seq": 2, "path": [[2, 0, 2], [1, 0, 2]]}}',
    ],
)
def test_what_is_no_offset_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=re.escape('expected {"10000": {"epoch": 3, "seq": 120}}')):
        Offsets.from_json(text)


# --- the next batch


def test_a_batch_takes_everything_that_is_there() -> None:
    end = offsets.advance(at(5, 10), [held(5, 0, 30)], NO_LIMITS)
    assert end == at(5, 30)
    assert offsets.between(at(5, 10), end) == ([SeqRange(1, 5, 10, 30)], [])


def test_without_news_the_offset_stays_to_the_letter() -> None:
    """Spark takes any other text for new data."""
    for start in (at(5, 30), at(5, 30, EpochSpan(4, 0, None), EpochSpan(5, 0, 30)), at(5, 31)):
        assert offsets.advance(start, [held(5, 0, 30)], NO_LIMITS) == start
        assert offsets.advance(start, [], NO_LIMITS) == start


def test_overwritten_frames_are_named_by_the_offset() -> None:
    end = offsets.advance(at(5, 10), [held(5, 20, 30)], NO_LIMITS)
    assert end == at(5, 30, EpochSpan(5, 20, 30))
    assert offsets.between(at(5, 10), end) == ([SeqRange(1, 5, 20, 30)], [Loss(1, 5, 10, 20, OVERWRITTEN)])


def test_a_batch_crosses_the_end_of_an_epoch() -> None:
    """What the old epoch still had comes first, then what the new one has."""
    end = offsets.advance(at(5, 10), [held(5, 0, 30), held(6, 0, 0), held(7, 0, 4)], NO_LIMITS)
    assert end == at(7, 4, EpochSpan(5, 10, 30), EpochSpan(6, 0, 0), EpochSpan(7, 0, 4))
    assert offsets.between(at(5, 10), end) == ([SeqRange(1, 5, 10, 30), SeqRange(1, 7, 0, 4)], [])


def test_a_limit_may_end_a_batch_in_the_old_epoch() -> None:
    first = offsets.advance(at(5, 10), [held(5, 0, 30), held(6, 0, 4)], Limits(15))
    assert first == at(5, 25)
    second = offsets.advance(first, [held(5, 0, 30), held(6, 0, 4)], Limits(15))
    assert offsets.between(first, second) == ([SeqRange(1, 5, 25, 30), SeqRange(1, 6, 0, 4)], [])


def test_an_epoch_that_is_gone_is_a_loss_of_unknown_size() -> None:
    start = at(5, 10)
    end = offsets.advance(start, [held(6, 2, 4)], NO_LIMITS)
    ranges, losses = offsets.between(start, end)
    assert ranges == [SeqRange(1, 6, 2, 4)]
    assert losses == [Loss(1, 5, 10, None, ENDED), Loss(1, 6, 0, 2, OVERWRITTEN)]
    assert "from 10 on, if there were any" in str(losses[0])
    assert losses[0].is_data


def test_epochs_that_were_not_seen_are_named_without_data() -> None:
    """They may never have had a producer, so they stop no query."""
    start = at(5, 10)
    losses = offsets.between(start, offsets.advance(start, [held(5, 0, 10), held(8, 0, 4)], NO_LIMITS))[1]
    assert losses == [Loss(1, 6, 0, None, UNSEEN)]
    assert not losses[0].is_data


def test_a_stream_that_joins_begins_with_its_newest_frame() -> None:
    end = offsets.advance(at(5, 10), [held(5, 0, 12), held(9, 0, 40, stream=2)], NO_LIMITS)
    assert end.positions[2] == Position(9, 40)
    assert offsets.between(at(5, 10), end) == ([SeqRange(1, 5, 10, 12)], [])


def test_a_position_ahead_of_every_epoch_is_found() -> None:
    assert offsets.ahead(at(9, 0), [held(5, 0, 3), held(6, 0, 3)]) == [(1, 9, 6)]
    assert offsets.ahead(at(6, 99), [held(6, 0, 3)]) == []


def test_a_stream_that_joins_begins_with_the_oldest_frame_that_there_is() -> None:
    """Its first batch follows from its offsets alone, and may be limited like any other."""
    there = [held(5, 0, 12), held(3, 0, 0, stream=2), held(4, 20, 40, stream=2)]
    end = offsets.advance(at(5, 10), there, Limits(12), joins_at_oldest=True)
    again = Offsets.from_json(end.to_json())
    ranges, losses = offsets.between(at(5, 10), again)
    assert (ranges, losses) == ([SeqRange(1, 5, 10, 11), SeqRange(2, 4, 20, 30)], [])
    rest = offsets.advance(again, there, NO_LIMITS, joins_at_oldest=True)
    assert offsets.between(again, rest)[0][-1].hi == 40
    assert offsets.advance(rest, there, NO_LIMITS, joins_at_oldest=True) == rest
    assert offsets.advance(Offsets(), [held(7, 0, 0)], NO_LIMITS, joins_at_oldest=True) == at(7, 0)


def test_user_given_ends_in_different_epochs_name_what_lies_between() -> None:
    ranges, losses = offsets.between(at(5, 10), at(8, 3))
    assert ranges == [SeqRange(1, 8, 0, 3)]
    assert losses == [Loss(1, 5, 10, None, ENDED), Loss(1, 6, 0, None, UNSEEN)]
    assert offsets.between(at(8, 3), at(5, 10)) == ([], [])


# --- limits


def test_limits_are_shared_by_what_waits() -> None:
    start = Offsets({1: Position(5, 0), 2: Position(5, 0)})
    there = [held(5, 0, 900), held(5, 0, 100, stream=2)]
    assert offsets.advance(start, there, Limits(100)).to_json() == {
        "1": {"epoch": 5, "seq": 90},
        "2": {"epoch": 5, "seq": 10},
    }
    assert offsets.advance(start, there, Limits(max_bytes=10_000)) == offsets.advance(start, there, Limits(100))


def test_no_stream_starves() -> None:
    """Even where one frame of each is more than the limit."""
    start = Offsets({stream: Position(5, 0) for stream in range(1, 6)})
    there = [held(5, 0, 1000 if stream == 1 else 1, stream=stream) for stream in range(1, 6)]
    end = offsets.advance(start, there, Limits(2, 50))
    assert [position.seq for _, position in sorted(end.positions.items())] == [1, 1, 1, 1, 1]


# --- named places


def test_earliest_and_latest() -> None:
    there = [held(5, 3, 3), held(6, 4, 9), held(7, 0, 2), held(1, 0, 0, stream=2)]
    assert offsets.earliest(there).to_json() == {"1": {"epoch": 6, "seq": 4}, "2": {"epoch": 1, "seq": 0}}
    assert offsets.latest(there).to_json() == {"1": {"epoch": 7, "seq": 2}, "2": {"epoch": 1, "seq": 0}}


def test_a_target_is_reached_and_never_passed() -> None:
    """Trigger.AvailableNow: what came after the target is not there, also where the ring has passed it."""
    target = at(6, 5)
    there = [held(5, 0, 8), held(6, 2, 9), held(7, 0, 3)]
    end = offsets.advance(at(5, 6), offsets.cut(there, target), NO_LIMITS)
    assert end.positions[1].seq == 5
    assert offsets.between(at(5, 6), end)[0] == [SeqRange(1, 5, 6, 8), SeqRange(1, 6, 2, 5)]
    assert offsets.advance(end, offsets.cut(there, target), NO_LIMITS) == end
    overrun = offsets.advance(at(6, 1), offsets.cut([held(6, 50, 90)], target), NO_LIMITS)
    assert offsets.between(at(6, 1), overrun) == ([], [Loss(1, 6, 1, 5, OVERWRITTEN)])


# --- tasks


def test_ranges_are_cut_for_the_tasks() -> None:
    assert offsets.split([SeqRange(1, 5, 0, 10)], 3) == [
        SeqRange(1, 5, 0, 3),
        SeqRange(1, 5, 3, 6),
        SeqRange(1, 5, 6, 10),
    ]
    assert offsets.split([SeqRange(1, 5, 0, 2)], 8) == [SeqRange(1, 5, 0, 1), SeqRange(1, 5, 1, 2)]
    two = [SeqRange(1, 5, 0, 90), SeqRange(2, 5, 0, 10)]
    assert offsets.split(two, 2) == two
    assert offsets.split([], 4) == []


def test_a_span_counts_what_was_read_and_what_was_lost() -> None:
    start = at(5, 10)
    end = offsets.advance(start, [held(5, 20, 30), held(6, 0, 4)], NO_LIMITS)
    assert offsets.span(start, end) == 24


def test_ranges_are_grouped_into_as_many_tasks_as_there_are_cores() -> None:
    """Every range is in one group, the groups are about as large as each other, and none is empty."""
    ranges = [SeqRange(stream, 1, 0, frames) for stream, frames in enumerate((9, 1, 1, 1, 8, 2, 1, 1), 1)]
    groups = offsets.grouped(ranges, 2)
    assert sorted(part.stream_id for group in groups for part in group) == list(range(1, 9))
    assert [sum(part.frames for part in group) for group in groups] == [12, 12]
    assert offsets.grouped(ranges[:1], 4) == [ranges[:1]]
    assert offsets.grouped([], 4) == []
    halves = [SeqRange(1, 1, 5, 9), SeqRange(1, 1, 0, 5)]
    assert offsets.grouped(halves, 1) == [halves[::-1]], "in order"
