# SPDX-License-Identifier: Apache-2.0
"""A counter that is read now and then: its rate, and its value in between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorpool.supervisor.sampled_counter import MAX_POINTS, SampledCounter

S = 1_000_000_000


def run(hz: float, seconds: float, every_s: float = 1.0, begin_ns: int = 0) -> SampledCounter:
    track = SampledCounter()
    for index in range(int(seconds / every_s) + 1):
        now_s = index * every_s
        track.add(begin_ns + round(now_s * S), int(now_s * hz))
    return track


@pytest.mark.parametrize("hz", [0.5, 1, 30, 1000, 100_000])
@pytest.mark.parametrize("every_s", [0.01, 0.25, 1.0])
def test_the_rate_of_a_steady_counter_is_its_rate(hz: float, every_s: float) -> None:
    """However often it is read."""
    rate = run(hz, 20, every_s).rate_hz()
    assert rate == pytest.approx(hz, rel=0.15)


def test_one_look_tells_no_rate_and_two_do() -> None:
    """Nothing is guessed."""
    track = SampledCounter()
    assert (track.value, track.seen_ns, track.rate_hz(), track.at(5)) == (None, None, None, None)
    track.add(0, 7)
    assert (track.value, track.rate_hz(), track.at(5)) == (7, None, 7)
    track.add(S, 7)
    assert track.rate_hz() == 0.0


def test_a_counter_that_stops_has_rate_0_soon() -> None:
    """Not only when the time before is forgotten."""
    track = run(100, 10)
    assert track.rate_hz() == pytest.approx(100, rel=0.1)
    for second in range(11, 15):
        track.add(second * S, 1000)
    assert track.rate_hz() == 0.0
    assert track.moved_ns == 10 * S


def test_a_slow_counter_is_not_taken_for_one_that_stopped() -> None:
    """One step in ten seconds, read each second."""
    track = run(0.1, 60)
    assert track.rate_hz() == pytest.approx(0.1, rel=0.25)


def test_a_step_back_begins_anew() -> None:
    """A new epoch counts from 0."""
    track = run(100, 5)
    track.add(6 * S, 3)
    assert (track.value, track.rate_hz()) == (3, None)


def test_between_two_looks_it_ran_evenly_and_after_the_last_it_stood() -> None:
    """A consumer that is compared with it never seems further behind than it is; before the first nothing is known."""
    track = SampledCounter()
    track.add(0, 0)
    track.add(S, 100)
    track.add(2 * S, 100)
    assert track.at(-1) is None
    assert [track.at(when) for when in (0, S // 2, S, 3 * S // 2, 2 * S, 9 * S)] == [0, 50, 100, 100, 100, 100]


@given(st.lists(st.tuples(st.integers(0, 2 * S), st.integers(0, 10_000)), min_size=1, max_size=300))
def test_memory_is_bounded_and_estimates_stay_within_what_was_seen(steps: list[tuple[int, int]]) -> None:
    """For every history of samples, also two at one time."""
    track = SampledCounter()
    now_ns = value = 0
    for later_ns, more in steps:
        now_ns, value = now_ns + later_ns, value + more
        track.add(now_ns, value)
        rate = track.rate_hz()
        assert rate is None or rate >= 0
    assert len(track._points) <= MAX_POINTS
    assert track.value == value
    assert track.at(now_ns) == value
    for when_ns in range(0, now_ns + 1, max(1, now_ns // 7)):
        found = track.at(when_ns)
        assert (found is None) == (when_ns < track._points[0][0])
        assert found is None or 0 <= found <= value
