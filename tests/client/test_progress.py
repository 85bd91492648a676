# SPDX-License-Identifier: Apache-2.0
"""Partial frames: whose wishes count, which updates are told, and which story a consumer believes."""

from __future__ import annotations

import pytest

from tensorpool.client.progress import (
    DEFAULT_BYTES_DELTA,
    DEFAULT_INTERVAL_US,
    MAX_RATE_HZ,
    MAX_TRACKED,
    MIN_BYTES_DELTA,
    MIN_INTERVAL_US,
    ProgressPolicy,
    ProgressThrottle,
    ProgressTracker,
)
from tensorpool.wire.control import ConsumerHello, FrameProgress, FrameProgressState
from tests.client.conftest import STREAM, hello

UNKNOWN, STARTED, PROGRESS, COMPLETE = FrameProgressState
POLICY = ProgressPolicy(interval_ns=1_000, bytes_delta=100)


def wish(**hints: int | None) -> ConsumerHello:
    return hello(supports_progress=True, **hints)


# --- policy


@pytest.mark.spec("WIRE-10.2.2-21")
def test_without_anybody_who_supports_it_there_is_no_policy() -> None:
    """Hints of a consumer that does not support progress are none."""
    assert ProgressPolicy.of([]) is None
    assert ProgressPolicy.of([hello(supports_progress=False, progress_bytes_delta=1)]) is None


@pytest.mark.spec("WIRE-10.1.2-07")
def test_the_defaults_are_those_that_the_specification_recommends() -> None:
    """250 µs, 64 KiB, no rule about rows."""
    assert (DEFAULT_INTERVAL_US, DEFAULT_BYTES_DELTA) == (250, 65_536)
    assert ProgressPolicy() == ProgressPolicy(250_000, 65_536, 0)
    policy = ProgressPolicy.of([wish()])
    assert policy is not None
    assert (policy.bytes_delta, policy.major_delta_units) == (65_536, 0)


@pytest.mark.spec("WIRE-10.2.2-22", "WIRE-10.1.2-14")
def test_the_smallest_of_each_wish_counts() -> None:
    """Each hint by itself, whoever gave it; those who do not support progress have no say."""
    policy = ProgressPolicy.of(
        [
            wish(progress_interval_us=9_000, progress_bytes_delta=20_000, progress_major_delta_units=7),
            wish(progress_interval_us=4_000, progress_bytes_delta=50_000),
            wish(progress_major_delta_units=3),
            hello(supports_progress=False, progress_interval_us=1, progress_bytes_delta=1),
        ]
    )
    assert policy == ProgressPolicy(4_000_000, 20_000, 3)


def test_0_and_absent_say_nothing() -> None:
    """B25: they are no smallest."""
    policy = ProgressPolicy.of(
        [
            wish(progress_interval_us=0, progress_bytes_delta=0, progress_major_delta_units=0),
            wish(progress_interval_us=9_000, progress_bytes_delta=70_000, progress_major_delta_units=5),
            wish(progress_interval_us=None, progress_bytes_delta=None, progress_major_delta_units=None),
        ]
    )
    assert policy == ProgressPolicy(9_000_000, 70_000, 5)


@pytest.mark.spec("WIRE-10.2.2-20", "WIRE-10.2.2-22")
def test_no_wish_goes_below_the_producers_floor() -> None:
    """Neither the interval, which is also the stream's highest rate, nor the bytes."""
    policy = ProgressPolicy.of([wish(progress_interval_us=1, progress_bytes_delta=1)])
    assert policy is not None
    assert policy.interval_ns == max(MIN_INTERVAL_US * 1_000, 1_000_000_000 // MAX_RATE_HZ)
    assert policy.bytes_delta == MIN_BYTES_DELTA


def test_a_wish_for_less_than_the_defaults_is_granted() -> None:
    """A default is for those who said nothing."""
    policy = ProgressPolicy.of([wish(progress_interval_us=2_000_000, progress_bytes_delta=1 << 30)])
    assert policy == ProgressPolicy(2_000_000_000, 1 << 30, 0)


# --- what is told


@pytest.mark.spec("WIRE-10.2.2-03", "WIRE-10.2.2-19")
def test_an_update_is_told_after_enough_bytes_and_enough_time() -> None:
    """Both, counted from the last one that was told."""
    throttle = ProgressThrottle()
    throttle.start(0, 0)
    assert not throttle.update(100, 0, POLICY, 999)  # too early
    assert not throttle.update(99 + 1, 0, POLICY, 999)
    assert throttle.update(100, 0, POLICY, 1_000)
    assert not throttle.update(199, 0, POLICY, 5_000)  # too little
    assert throttle.update(200, 0, POLICY, 5_000)
    assert not throttle.update(400, 0, POLICY, 5_999)
    assert throttle.update(400, 0, POLICY, 6_000)


def test_rows_count_where_somebody_counts_in_rows() -> None:
    """Enough of them, or enough bytes: whichever comes first."""
    policy = ProgressPolicy(interval_ns=0, bytes_delta=1_000, major_delta_units=4)
    throttle = ProgressThrottle()
    throttle.start(0, 0)
    assert not throttle.update(39, 10, policy, 1)
    assert throttle.update(40, 10, policy, 1)
    assert not throttle.update(79, 10, policy, 2)
    assert throttle.update(80, 10, policy, 2)
    throttle.start(1, 3)
    assert not throttle.update(999, 500, policy, 4)  # neither 4 rows of 500 nor 1000 bytes
    assert throttle.update(1_000, 500, policy, 4)
    throttle.start(2, 5)
    assert not throttle.update(999, 0, policy, 6)  # no unit, no rows


@pytest.mark.spec("WIRE-10.2.2-10")
def test_bytes_do_not_become_unwritten() -> None:
    """Also against an update that was not told."""
    throttle = ProgressThrottle()
    throttle.start(0, 0)
    assert not throttle.update(50, 0, POLICY, 1)
    with pytest.raises(ValueError, match="from 50 to 49"):
        throttle.update(49, 0, POLICY, 2)
    assert not throttle.update(50, 0, POLICY, 3)


def test_each_frame_begins_at_nothing() -> None:
    """What was told of the frame before does not count."""
    throttle = ProgressThrottle()
    throttle.start(0, 0)
    assert throttle.update(500, 0, POLICY, 2_000)
    throttle.start(1, 2_000)
    assert not throttle.update(100, 0, POLICY, 2_999)
    assert throttle.update(100, 0, POLICY, 3_000)


# --- what is believed


def told(seq: int, filled: int, state: FrameProgressState = PROGRESS) -> FrameProgress:
    return FrameProgress(stream_id=STREAM, epoch=1, seq=seq, payload_bytes_filled=filled, state=state)


def test_a_story_that_goes_on_is_believed() -> None:
    """STARTED, PROGRESS …, COMPLETE; frames may overlap, and a story may begin anywhere."""
    tracker = ProgressTracker()
    story = [
        *[told(1, 0, STARTED), told(1, 10), told(2, 0, STARTED), told(1, 10), told(2, 5), told(1, 20)],
        *[told(1, 30, COMPLETE), told(2, 30, COMPLETE), told(7, 12), told(9, 5, COMPLETE)],
    ]
    assert [tracker.accepts(message) for message in story] == [True] * len(story)
    assert tracker.dropped == 0


@pytest.mark.spec("WIRE-10.2.2-11")
@pytest.mark.parametrize(
    "back",
    [told(1, 9), told(1, 0, STARTED), told(1, 10, STARTED)],
    ids=["fewer bytes", "a new start", "a state before"],
)
def test_a_story_that_goes_back_spoils_its_frame(back: FrameProgress) -> None:
    """For good, and it is counted; other frames are not concerned."""
    tracker = ProgressTracker()
    assert tracker.accepts(told(1, 10))
    assert not tracker.accepts(back)
    assert not tracker.accepts(told(1, 50))
    assert not tracker.accepts(told(1, 99, COMPLETE))
    assert tracker.dropped == 3
    assert tracker.accepts(told(2, 1))
    assert [tracker.is_broken(seq) for seq in (1, 2, 3)] == [True, False, False]
    tracker.forget()
    assert not tracker.is_broken(1)


def test_after_complete_there_is_no_progress() -> None:
    """Also when the bytes do not shrink."""
    tracker = ProgressTracker()
    assert tracker.accepts(told(1, 10, COMPLETE))
    assert not tracker.accepts(told(1, 10))


def test_an_unknown_state_is_passed_over() -> None:
    """B32: it neither continues nor spoils anything."""
    tracker = ProgressTracker()
    assert tracker.accepts(told(1, 10))
    assert not tracker.accepts(told(1, 0, UNKNOWN))
    assert tracker.accepts(told(1, 11))
    assert tracker.dropped == 0


def test_only_so_many_frames_are_remembered() -> None:
    """The oldest is forgotten: seqs cannot make memory grow."""
    tracker = ProgressTracker()
    for seq in range(MAX_TRACKED):
        assert tracker.accepts(told(seq, 10))
    assert not tracker.accepts(told(0, 5))
    assert tracker.accepts(told(MAX_TRACKED, 10))
    assert tracker.accepts(told(0, 5))  # forgotten, so this is its beginning
    assert len(tracker._heard) <= MAX_TRACKED


def test_a_new_epoch_counts_its_own_seqs() -> None:
    """What was heard of seq 1 before says nothing about it now."""
    tracker = ProgressTracker()
    tracker.accepts(told(1, 10, COMPLETE))
    tracker.forget()
    assert tracker.accepts(told(1, 0, STARTED))
