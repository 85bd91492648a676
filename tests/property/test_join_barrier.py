# SPDX-License-Identifier: Apache-2.0
"""Frames of several streams, offered in any interleaving: what is joined, and what becomes of the rest."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from tensorpool.client.join_barrier import KeyBarrier, LatestBarrier, Unjoined

type Item = tuple[int, int]  # input, key

keys = st.lists(st.integers(0, 60), unique=True, max_size=25).map(sorted)


@st.composite
def interleaved(draw: st.DrawFn, inputs: int) -> list[Item]:
    """Growing keys of each input, in any order of arrival."""
    waiting = [list(draw(keys)) for _ in range(inputs)]
    order = []
    while any(waiting):
        index = draw(st.sampled_from([index for index, left in enumerate(waiting) if left]))
        order.append((index, waiting[index].pop(0)))
    return order


def run(barrier: KeyBarrier[Item] | LatestBarrier[Item], order: list[Item]) -> list[tuple[Item, ...]]:
    """Takes what there is after every frame."""
    joined = []
    for now_ns, (index, key) in enumerate(order):
        barrier.offer(index, key, (index, key), now_ns)
        barrier.expire(now_ns)
        while (found := barrier.take()) is not None:
            joined.append(found)
    return joined


def accounted(barrier: KeyBarrier[Item], order: list[Item], joined: list[tuple[Item, ...]]) -> None:
    """Every frame once: joined, left, or waiting."""
    seen = Counter(item for found in joined for item in found) + Counter(left.item for left in barrier.left)
    assert all(count == 1 for count in seen.values())
    waiting = Counter(index for index, _ in order) - Counter(index for index, _ in seen.elements())
    assert [waiting[index] for index in range(len(barrier.waiting))] == barrier.waiting
    assert all(left.input_index == left.item[0] for left in barrier.left)


@given(interleaved(3))
def test_equal_seqs_are_joined_in_whatever_order_they_come(order: list[Item]) -> None:
    """Exactly the seqs that all inputs have, each once, in order; the rest is left or may still find a partner."""
    barrier = KeyBarrier[Item](3, tolerance=0)
    joined = run(barrier, order)
    common = set.intersection(*({key for index, key in order if index == at} for at in range(3)))
    assert joined == [tuple((at, key) for at in range(3)) for key in sorted(common)]
    assert {left.why for left in barrier.left} <= {Unjoined.NO_PARTNER}
    accounted(barrier, order, joined)


@given(interleaved(2), st.lists(st.integers(50, 70), min_size=2, max_size=2), st.integers(0, 20), st.integers(-10, 10))
def test_frames_that_match_are_what_offering_them_would_have_joined(
    order: list[Item], keys: list[int], tolerance: int, offset: int
) -> None:
    """Whatever was offered before; and what comes later is joined, or refused, as after an offer."""
    offered, matched = (KeyBarrier[Item](2, tolerance=tolerance, offsets=(0, offset)) for _ in range(2))
    assert run(offered, order) == run(matched, order)
    items = [(index, key) for index, key in enumerate(keys)]
    waiting, left = matched.waiting, list(matched.left)
    is_match = matched.match(keys)
    joined = run(offered, items)
    if is_match:
        assert joined == [tuple(items)]
        assert offered.left == matched.left
    else:
        assert (waiting, left) == (matched.waiting, matched.left)
        assert any(waiting) or joined == []
        assert run(matched, items) == joined
    for later in ([(0, key + 1), (1, key + 1)] for key in keys):
        assert run(offered, later) == run(matched, later)
    assert (offered.left, offered.waiting) == (matched.left, matched.waiting)


@given(interleaved(2), st.integers(0, 8), st.integers(-10, 10))
def test_times_within_the_tolerance_are_joined_as_often_as_possible(
    order: list[Item], tolerance: int, offset: int
) -> None:
    """By an independent matching of the complete lists, oldest first."""
    barrier = KeyBarrier[Item](2, tolerance=tolerance, offsets=(0, offset))
    joined = run(barrier, order)
    first, second = ([key for index, key in order if index == at] for at in range(2))
    expected = []
    while first and second:
        distance = first[0] - (second[0] + offset)
        if abs(distance) <= tolerance:
            expected.append(((0, first.pop(0)), (1, second.pop(0))))
        else:
            (first if distance < 0 else second).pop(0)
    assert joined == expected
    accounted(barrier, order, joined)


@given(interleaved(3), st.integers(0, 8))
def test_no_tuple_is_wider_than_the_tolerance(order: list[Item], tolerance: int) -> None:
    barrier = KeyBarrier[Item](3, tolerance=tolerance)
    joined = run(barrier, order)
    for found in joined:
        of_tuple = [key for _, key in found]
        assert max(of_tuple) - min(of_tuple) <= tolerance
    accounted(barrier, order, joined)


@given(interleaved(2), st.integers(1, 5), st.integers(1, 10))
def test_few_frames_wait_and_not_for_long(order: list[Item], limit: int, timeout_ns: int) -> None:
    """Limits and timeout hold at every moment; what they drop is reported as such."""
    barrier = KeyBarrier[Item](2, tolerance=0, limits=(limit, limit), timeout_ns=timeout_ns)
    for now_ns, (index, key) in enumerate(order):
        barrier.offer(index, key, (index, key), now_ns)
        barrier.expire(now_ns)
        assert max(barrier.waiting) <= limit
        expiry_ns = barrier.next_expiry_ns()
        assert expiry_ns is None or now_ns < expiry_ns <= now_ns + timeout_ns
    assert {left.why for left in barrier.left} <= {Unjoined.CROWDED_OUT, Unjoined.TIMED_OUT}


def test_what_can_have_no_partner_leaves_at_once() -> None:
    """A seq comes once; and who went past a seq will not have it. As many wait as may, and not one fewer."""
    barrier = KeyBarrier[Item](2, tolerance=0, limits=(2, 2))
    for item in ((0, 5), (0, 5), (1, 5), (1, 6), (1, 7)):
        barrier.offer(*item, item, 0)
    assert [(left.item, left.why) for left in barrier.left] == [
        ((0, 5), Unjoined.OUT_OF_ORDER),
        ((1, 5), Unjoined.CROWDED_OUT),
    ]
    assert barrier.waiting == [1, 2]
    assert barrier.take() is None
    assert (barrier.waiting, barrier.left[-1].item) == ([0, 2], (0, 5))
    barrier.offer(0, 7, (0, 7), 0)
    assert barrier.take() == ((0, 7), (1, 7))
    barrier.offer(1, 8, (1, 8), 0)
    barrier.offer(0, 9, (0, 9), 0)
    assert barrier.take() is None
    assert (barrier.waiting, barrier.left[-1]) == ([1, 0], (1, (1, 8), Unjoined.NO_PARTNER))


@given(interleaved(2), st.integers(0, 1), st.integers(0, 20))
def test_an_input_that_begins_again_is_joined_again(order: list[Item], restarted: int, at: int) -> None:
    """A frame whose key went back is out of order, unless its input began again."""
    barrier = KeyBarrier[Item](2, tolerance=0)
    joined = run(barrier, order)
    barrier.offer(restarted, -1, (restarted, -1), 99)
    has_had_frames = any(index == restarted for index, _ in order)
    assert ((restarted, -1) in [left.item for left in barrier.left]) == has_had_frames
    for index in range(2):
        barrier.restart(index)
    assert barrier.waiting == [0, 0]
    again = [(index, at) for index in (0, 1)]
    assert run(barrier, again) == [((0, at), (1, at))]
    assert all(left.why in (Unjoined.NO_PARTNER, Unjoined.OUT_OF_ORDER) for left in barrier.left)
    assert len(joined) <= len(order) // 2


@given(interleaved(3))
def test_latest_joins_each_of_the_first_with_the_newest_of_the_others(order: list[Item]) -> None:
    barrier = LatestBarrier[Item](3)
    joined = run(barrier, order)
    newest: dict[int, Item] = {}
    expected = []
    for item in order:
        newest[item[0]] = item
        if item[0] == 0 and len(newest) == 3:
            expected.append(tuple(newest[at] for at in range(3)))
    assert joined == expected
    joined_items = {item for found in joined for item in found}
    left = Counter(one.item for one in barrier.left)
    assert all(count == 1 for count in left.values())
    assert not joined_items & set(left)
    still_new = {item for index, item in newest.items() if index and item not in joined_items}
    assert set(order) == joined_items | set(left) | still_new
    assert {item for index in range(3) for item in barrier.items(index)} == still_new
    assert [len(barrier.items(index)) for index in range(3)] == barrier.waiting


class Shot(NamedTuple):
    """A frame of a sensor: when it was taken in truth, what its clock said, and when it arrived. Microseconds."""

    stream: int
    epoch: int
    seq: int
    taken: int
    stamp: int
    arrived: int


@st.composite
def sensors(draw: st.DrawFn) -> tuple[list[Shot], list[int]]:
    """Three streams of different rates whose clocks are apart, with jitter, loss, restarts, and delays on the way."""
    shots, apart = [], [draw(st.integers(-2_000_000, 2_000_000)) for _ in range(3)]
    chance = draw(st.randoms(use_true_random=False))
    for stream in range(3):
        interval = draw(st.sampled_from([5_000, 7_000, 10_000, 20_000, 33_333]))
        loss, delay = draw(st.floats(0, 0.4)), draw(st.integers(0, 50_000))
        epoch, first, last = 1, 0, 0
        for number in range(300_000 // interval):
            if chance.random() < 0.03:
                epoch, first = epoch + 1, number
            if chance.random() < loss:
                continue
            taken = number * interval + chance.randrange(0, 1_000)
            last = max(last + 1, taken + delay + chance.randrange(0, 3_000))  # a stream arrives in its order
            shots.append(Shot(stream, epoch, number - first, taken, taken + apart[stream], last))
    return sorted(shots, key=lambda shot: (shot.arrived, shot.stream)), apart


@given(sensors(), st.integers(500, 6_000))
def test_three_streams_are_joined_by_the_time_when_they_were_taken(
    drawn: tuple[list[Shot], list[int]], tolerance: int
) -> None:
    """Whatever is lost, restarted or late: the tuples of a matching of the whole lists, and every frame accounted."""
    shots, apart = drawn
    barrier = KeyBarrier[Shot](3, tolerance=tolerance, offsets=[-offset for offset in apart])
    joined = []
    for shot in shots:
        barrier.offer(shot.stream, shot.stamp, shot, shot.arrived)
        while (found := barrier.take()) is not None:
            joined.append(found)
    queues = [[shot for shot in shots if shot.stream == stream] for stream in range(3)]
    expected = []
    while all(queues):
        heads = [queue[0] for queue in queues]
        oldest = min(heads, key=lambda shot: shot.taken)
        if max(shot.taken for shot in heads) - oldest.taken <= tolerance:
            expected.append(tuple(queue.pop(0) for queue in queues))
        else:
            queues[oldest.stream].pop(0)
    assert joined == expected
    seen = Counter(shot for found in joined for shot in found) + Counter(left.item for left in barrier.left)
    seen += Counter(shot for stream in range(3) for shot in barrier.items(stream))
    assert seen == Counter(shots)


@given(sensors())
def test_seqs_of_one_epoch_are_never_joined_with_those_of_the_one_before(drawn: tuple[list[Shot], list[int]]) -> None:
    """When an input begins again, frames of its old epoch find no partner any more; epochs of a tuple only grow."""
    barrier = KeyBarrier[Shot](3, tolerance=0)
    epochs: dict[int, int] = {}
    current, counted = [0, 0, 0], 0
    for shot in drawn[0]:
        if epochs.setdefault(shot.stream, shot.epoch) != shot.epoch:
            barrier.restart(shot.stream)
            epochs[shot.stream] = shot.epoch
        barrier.offer(shot.stream, shot.seq, shot, shot.arrived)
        while (found := barrier.take()) is not None:
            assert len({one.seq for one in found}) == 1
            assert [one.epoch for one in found] == [epochs[stream] for stream in range(3)]
            assert all(one.epoch >= before for one, before in zip(found, current, strict=True))
            current, counted = [one.epoch for one in found], counted + 3
    assert counted + len(barrier.left) + sum(barrier.waiting) == len(drawn[0])
