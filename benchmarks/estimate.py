# SPDX-License-Identifier: Apache-2.0
"""What rounds that scatter say: a median with its interval of 95 %, and whether it decides about a target.

The interval is that of order statistics (how many of the rounds may lie beyond the true median), which asks nothing of
the distribution. With fewer than six rounds it goes from the lowest to the highest, which is less than 95 % and
decides nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from enum import StrEnum

import msgspec

MISTAKE = 0.05
DECISIVE_ROUNDS = 6  # with fewer even all of them are less than 95 %


class Estimate(msgspec.Struct, frozen=True):
    median: float
    low: float
    high: float
    rounds: int

    def text(self, form: str = "{:.2f}") -> str:
        return f"{form.format(self.median)} [{form.format(self.low)}, {form.format(self.high)}]"

    def scaled(self, factor: float) -> Estimate:
        return Estimate(self.median * factor, self.low * factor, self.high * factor, self.rounds)


def estimate(values: Iterable[float]) -> Estimate | None:
    """None of no values."""
    ordered = sorted(values)
    count = len(ordered)
    if count == 0:
        return None
    beyond, tail = 0, 0.5**count  # the chance that at most `beyond` of the rounds lie below the true median
    while 2 * (tail + math.comb(count, beyond + 1) * 0.5**count) <= MISTAKE:
        beyond += 1
        tail += math.comb(count, beyond) * 0.5**count
    return Estimate(statistics.median(ordered), ordered[beyond], ordered[-1 - beyond], count)


class Verdict(StrEnum):
    MET = "met"
    MISSED = "MISSED"
    NOT_DECIDED = "not decided"
    NOT_MEASURED = "not measured"


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A bound that the true median has to keep; the interval decides."""

    name: str
    value: Estimate | None
    bound: float
    at_least: bool

    @property
    def verdict(self) -> Verdict:
        if self.value is None:
            return Verdict.NOT_MEASURED
        low, high = self.value.low, self.value.high
        if self.value.rounds < DECISIVE_ROUNDS:
            return Verdict.NOT_DECIDED
        if low >= self.bound if self.at_least else high <= self.bound:
            return Verdict.MET
        if high < self.bound if self.at_least else low > self.bound:
            return Verdict.MISSED
        return Verdict.NOT_DECIDED

    @property
    def bound_text(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}"

    def __str__(self) -> str:
        value = "" if self.value is None else f"{self.value.text()} of {self.value.rounds} rounds, "
        return f"{self.verdict:<12} {self.name}: {value}target {self.bound_text}"
