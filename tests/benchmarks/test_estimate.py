# SPDX-License-Identifier: Apache-2.0
"""A target is judged by the interval of the rounds' median, never by the median alone."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.estimate import Estimate, Target, Verdict, estimate


def test_the_interval_holds_the_true_median_in_nineteen_of_twenty_cases() -> None:
    """Whatever the distribution: here one with a long tail."""
    chance = np.random.default_rng(5)
    true = float(np.exp(0.0))
    for rounds in (6, 13, 40):
        found = [estimate(chance.lognormal(0.0, 1.0, rounds)) for _ in range(2000)]
        held = sum(value is not None and value.low <= true <= value.high for value in found)
        assert 0.945 <= held / 2000 <= 0.995, rounds


def test_few_rounds_give_their_whole_range_and_decide_nothing() -> None:
    """Below six rounds no interval of 95 % exists."""
    few = estimate([3.0, 1.0, 2.0])
    assert few == Estimate(2.0, 1.0, 3.0, 3)
    assert Target(name="few", value=few, bound=0.5, at_least=True).verdict is Verdict.NOT_DECIDED
    assert estimate([]) is None


@pytest.mark.parametrize(
    ("low", "high", "at_least", "verdict"),
    [
        (1.0, 1.4, True, Verdict.MET),
        (0.99, 1.4, True, Verdict.NOT_DECIDED),
        (0.5, 0.99, True, Verdict.MISSED),
        (0.5, 1.0, False, Verdict.MET),
        (0.5, 1.01, False, Verdict.NOT_DECIDED),
        (1.01, 1.4, False, Verdict.MISSED),
    ],
)
def test_a_target_is_met_or_missed_by_a_whole_interval(
    low: float, high: float, at_least: bool, verdict: Verdict
) -> None:
    """What straddles the bound is not decided."""
    value = Estimate((low + high) / 2, low, high, 9)
    target = Target(name="ratio", value=value, bound=1.0, at_least=at_least)
    assert target.verdict is verdict
    assert str(target).startswith(verdict)


def test_what_was_not_measured_has_no_verdict_of_success() -> None:
    """Nor of failure."""
    assert Target(name="none", value=None, bound=1.0, at_least=True).verdict is Verdict.NOT_MEASURED
