# SPDX-License-Identifier: Apache-2.0
"""Partial frames: whose wishes count, which updates are sent and when, and which story a consumer believes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tensorpool.client.progress import (
    BURST,
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


def spec(**hints: Any) -> ConsumerHello:
    return hello(supports_progress=True, **hints)


# --- policy


@pytest.mark.spec("WIRE-10.2.2-21")
def test_without_a_consumer_that_supports_it_there_is_no_policy() -> None:
    """Hints of a consumer that does not support progress are none."""
    assert ProgressPolicy.of([]) is None
    assert ProgressPolicy.of([hello(supports_progress=False, progress_bytes_delta=1)]) is None


@pytest.mark.spec("WIRE-10.1.2-07")
def test_the_defaults_are_those_that_the_specification_recommends() -> None:
    """250 µs, 64 KiB, no rule about rows."""
    assert (DEFAULT_INTERVAL_US, DEFAULT_BYTES_DELTA) == (250, 65_536)
    assert ProgressPolicy() == ProgressPolicy(250_000, 65_536, 0)
    assert ProgressPolicy.of([spec()]) == ProgressPolicy()


@pytest.mark.spec("WIRE-10.2.2-22", "WIRE-10.1.2-14")
def test_the_smallest_of_each_wish_counts() -> None:
    """Each hint by itself, from any consumer; consumers that do not support progress do not count."""
    policy = ProgressPolicy.of(
        [
            spec(progress_interval_us=9_000, progress_bytes_delta=20_000, progress_major_delta_units=7),
            spec(progress_interval_us=4_000, progress_bytes_delta=50_000),
            spec(progress_major_delta_units=3),
            hello(supports_progress=False, progress_interval_us=1, progress_bytes_delta=1),
        ]
    )
    assert policy == ProgressPolicy(4_000_000, 20_000, 3)


def test_0_and_absent_say_nothing() -> None:
    """B25: they are no smallest."""
    policy = ProgressPolicy.of(
        [
            spec(progress_interval_us=0, progress_bytes_delta=0, progress_major_delta_units=0),
            spec(progress_interval_us=9_000, progress_bytes_delta=70_000, progress_major_delta_units=5),
            spec(progress_interval_us=None, progress_bytes_delta=None, progress_major_delta_units=None),
        ]
    )
    assert policy == ProgressPolicy(9_000_000, 70_000, 5)


@pytest.mark.spec("WIRE-10.2.2-22", "WIRE-10.1.2-14")
def test_no_wish_goes_below_the_producers_floor() -> None:
    """Neither the interval nor the bytes."""
    policy = ProgressPolicy.of([spec(progress_interval_us=1, progress_bytes_delta=1)])
    assert policy == ProgressPolicy(MIN_INTERVAL_US * 1_000, MIN_BYTES_DELTA)


def test_a_wish_for_less_than_the_defaults_is_granted() -> None:
    """A default is for those who said nothing."""
    policy = ProgressPolicy.of([spec(progress_interval_us=2_000_000, progress_bytes_delta=1 << 30)])
    assert policy == ProgressPolicy(2_000_000_000, 1 << 30, 0)


# --- what is sent


def started(unit_bytes: int = 0, policy: ProgressPolicy = POLICY, at_ns: int = 0) -> ProgressThrottle:
    """With a frame whose STARTED was sent."""
    throttle = ProgressThrottle()
    throttle.start(unit_bytes)
    assert throttle.take(policy, at_ns) is STARTED
    return throttle


def sent(throttle: ProgressThrottle, filled: int, now_ns: int, policy: ProgressPolicy = POLICY) -> bool:
    """Whether an update is sent at once."""
    throttle.update(filled)
    return throttle.take(policy, now_ns) is PROGRESS


@pytest.mark.spec("WIRE-10.2.2-02", "WIRE-10.2.2-16", "WIRE-10.2.2-18")
def test_a_frame_is_started_once_and_ends_once() -> None:
    """STARTED first, then PROGRESS, then COMPLETE; nothing afterwards."""
    throttle = started()
    assert throttle.take(POLICY, 10_000) is None
    assert sent(throttle, 100, 10_000)
    assert throttle.end(is_committed=True)
    assert throttle.take(POLICY, 10**9) is None
    assert not throttle.end(is_committed=True)
    throttle.start(0)
    assert throttle.take(POLICY, 10**9) is STARTED
    assert not throttle.end(is_committed=False), "a frame that was given up is not complete"


@pytest.mark.spec("WIRE-10.2.2-03", "WIRE-10.2.2-19")
def test_an_update_is_sent_after_enough_bytes_and_enough_time() -> None:
    """Both, counted from the last one that was sent."""
    throttle = started()
    assert not sent(throttle, 100, 999)  # too early
    assert sent(throttle, 100, 1_000)
    assert not sent(throttle, 199, 5_000)  # too little
    assert sent(throttle, 200, 5_000)
    assert not sent(throttle, 400, 5_999)
    assert sent(throttle, 400, 6_000)


@pytest.mark.spec("WIRE-10.2.2-20")
def test_an_update_that_came_too_early_is_sent_when_the_interval_is_over() -> None:
    """The newest state, once; and what is too little to be sent does not wait."""
    throttle = started()
    assert not throttle.is_due(POLICY)
    assert not sent(throttle, 150, 300)
    assert not sent(throttle, 270, 600)
    assert throttle.is_due(POLICY)
    assert throttle.take(POLICY, 1_000) is PROGRESS
    assert throttle.filled_bytes == 270
    assert not throttle.is_due(POLICY)
    assert throttle.take(POLICY, 9_000) is None
    throttle.update(500)
    throttle.end(is_committed=True)
    assert not throttle.is_due(POLICY)


@pytest.mark.spec("WIRE-10.2.2-20")
def test_small_frames_cannot_exceed_the_rate_of_the_stream() -> None:
    """27,000 frames a second are two seconds long reported with MAX_RATE_HZ messages a second, every state counted."""
    throttle = ProgressThrottle()
    frames = range(0, 2 * 10**9, 37_000)
    complete = begun = 0
    for now_ns in frames:
        throttle.start(0)
        is_begun = throttle.take(POLICY, now_ns) is STARTED
        is_complete = throttle.end(is_committed=True)
        assert is_complete == is_begun, "who hears of a frame hears its end"
        begun += is_begun
        complete += is_complete
    assert 2 * MAX_RATE_HZ - 2 <= begun + complete <= 2 * MAX_RATE_HZ + BURST
    assert len(frames) > 50_000


@pytest.mark.spec("WIRE-10.2.2-20")
def test_a_burst_is_followed_by_the_rate_of_the_stream_and_the_newest_state() -> None:
    """BURST messages as quickly as the interval allows, then MAX_RATE_HZ; the last token is the COMPLETE's."""
    policy = ProgressPolicy(interval_ns=200_000, bytes_delta=1)
    throttle = started(policy=policy)
    times = [now_ns for now_ns in range(0, 50_000_000, 10_000) if sent(throttle, now_ns, now_ns, policy)]
    gaps = {later - earlier for earlier, later in itertools.pairwise(times)}
    assert min(gaps) == 200_000
    assert {later - earlier for earlier, later in itertools.pairwise(times[-10:])} == {10**9 // MAX_RATE_HZ}
    assert len(times) <= 50_000_000 * MAX_RATE_HZ // 10**9 + BURST
    assert throttle.end(is_committed=True)


@pytest.mark.spec("WIRE-10.2.2-20")
def test_one_message_is_kept_for_the_end_of_the_frame() -> None:
    """At once there are BURST messages and no more, COMPLETE among them."""
    policy = ProgressPolicy(interval_ns=0, bytes_delta=1)
    throttle = started(policy=policy)
    assert sum(sent(throttle, filled, 0, policy) for filled in range(1, 100)) == BURST - 2
    assert throttle.end(is_committed=True)


def test_a_frame_that_found_no_token_is_started_when_there_is_one() -> None:
    """With what is written by then; a frame that ends before is not reported."""
    throttle = ProgressThrottle()
    for _ in range(BURST):
        throttle.start(0)
        throttle.take(POLICY, 0)
        throttle.end(is_committed=True)
    throttle.start(0)
    throttle.update(77)
    assert throttle.take(POLICY, 0) is None
    assert not throttle.is_started
    assert throttle.take(POLICY, 2 * 10**9 // MAX_RATE_HZ) is STARTED
    assert throttle.filled_bytes == 77


def test_a_clock_that_goes_back_brings_no_tokens() -> None:
    """Threads read it in any order."""
    throttle = started(at_ns=10**9)
    tokens = throttle._tokens
    assert throttle.take(POLICY, 0) is None
    assert throttle.take(POLICY, 10**9) is None
    assert throttle._tokens == tokens


def test_rows_count_where_a_consumer_counts_in_rows() -> None:
    """Enough of them, or enough bytes: whichever comes first."""
    policy = ProgressPolicy(interval_ns=0, bytes_delta=1_000, major_delta_units=4)
    throttle = started(10, policy)
    assert not sent(throttle, 39, 1, policy)
    assert sent(throttle, 40, 1, policy)
    assert not sent(throttle, 79, 2, policy)
    assert sent(throttle, 80, 2, policy)
    throttle = started(500, policy)
    assert not sent(throttle, 999, 4, policy)  # neither 4 rows of 500 nor 1000 bytes
    assert sent(throttle, 1_000, 4, policy)
    throttle = started(0, policy)
    assert not sent(throttle, 999, 6, policy)  # no unit, no rows


@pytest.mark.spec("WIRE-10.2.2-10")
def test_bytes_do_not_become_unwritten() -> None:
    """Also against an update that was not sent."""
    throttle = started()
    assert not sent(throttle, 50, 1)
    with pytest.raises(ValueError, match="from 50 to 49"):
        throttle.update(49)
    assert throttle.filled_bytes == 50


def test_each_frame_begins_at_nothing() -> None:
    """What was sent of the frame before does not count."""
    throttle = started()
    assert sent(throttle, 500, 2_000)
    throttle.end(is_committed=True)
    throttle.start(0)
    assert throttle.take(POLICY, 2_000) is STARTED
    assert not sent(throttle, 100, 2_999)
    assert sent(throttle, 100, 3_000)


# --- what is believed


def report(seq: int, filled: int, state: FrameProgressState = PROGRESS) -> FrameProgress:
    return FrameProgress(stream_id=STREAM, epoch=1, seq=seq, payload_bytes_filled=filled, state=state)


def test_a_story_that_goes_on_is_believed() -> None:
    """STARTED, PROGRESS …, COMPLETE; frames may overlap, and a story may begin anywhere."""
    tracker = ProgressTracker()
    story = [
        *[report(1, 0, STARTED), report(1, 10), report(2, 0, STARTED), report(1, 10), report(2, 5), report(1, 20)],
        *[report(1, 30, COMPLETE), report(2, 30, COMPLETE), report(7, 12), report(9, 5, COMPLETE)],
    ]
    assert [tracker.accepts(message) for message in story] == [True] * len(story)
    assert tracker.dropped == 0


@pytest.mark.spec("WIRE-10.2.2-11")
@pytest.mark.parametrize(
    "back",
    [report(1, 9), report(1, 0, STARTED), report(1, 10, STARTED)],
    ids=["fewer bytes", "a new start", "a state before"],
)
def test_a_story_that_goes_back_spoils_its_frame(back: FrameProgress) -> None:
    """For good, and it is counted; other frames are not concerned."""
    tracker = ProgressTracker()
    assert tracker.accepts(report(1, 10))
    assert not tracker.accepts(back)
    assert not tracker.accepts(report(1, 50))
    assert not tracker.accepts(report(1, 99, COMPLETE))
    assert tracker.dropped == 3
    assert tracker.accepts(report(2, 1))
    assert [tracker.is_broken(seq) for seq in (1, 2, 3)] == [True, False, False]
    tracker.forget()
    assert not tracker.is_broken(1)


def test_after_complete_there_is_no_progress() -> None:
    """Also when the bytes do not shrink."""
    tracker = ProgressTracker()
    assert tracker.accepts(report(1, 10, COMPLETE))
    assert not tracker.accepts(report(1, 10))


def test_an_unknown_state_is_passed_over() -> None:
    """B32: it neither continues nor spoils anything."""
    tracker = ProgressTracker()
    assert tracker.accepts(report(1, 10))
    assert not tracker.accepts(report(1, 0, UNKNOWN))
    assert tracker.accepts(report(1, 11))
    assert tracker.dropped == 0


def test_only_so_many_frames_are_remembered() -> None:
    """The oldest is forgotten: seqs cannot make memory grow."""
    tracker = ProgressTracker()
    for seq in range(MAX_TRACKED):
        assert tracker.accepts(report(seq, 10))
    assert not tracker.accepts(report(0, 5))
    assert tracker.accepts(report(MAX_TRACKED, 10))
    assert tracker.accepts(report(0, 5))  # forgotten, so this is its beginning
    assert len(tracker._reported) <= MAX_TRACKED


def test_a_new_epoch_counts_its_own_seqs() -> None:
    """Reports of seq 1 in the previous epoch say nothing about it now."""
    tracker = ProgressTracker()
    tracker.accepts(report(1, 10, COMPLETE))
    tracker.forget()
    assert tracker.accepts(report(1, 0, STARTED))
