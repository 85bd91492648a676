# SPDX-License-Identifier: Apache-2.0
"""PromQL as alerts use it, evaluated over recorded samples: what Prometheus would have answered.

promql_parser parses; this evaluates selectors, arithmetic, comparisons, and/or/unless, aggregations, and functions of a
range, by Prometheus' own rules (lookback of five minutes, extrapolation of `increase` and `rate`). Anything else is
refused. `tests/telemetry/test_promql.py` has answers of promtool to compare with.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
import promql_parser as parser

LOOKBACK_S: Final = 300.0
type Labels = frozenset[tuple[str, str]]
type Vector = dict[Labels, float]

ARITHMETIC: Final[dict[str, Callable[[float, float], float]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: a / b if b else (float("nan") if not a else float("inf") * (1 if a > 0 else -1)),
}
COMPARISONS: Final[dict[str, Callable[[float, float], bool]]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
AGGREGATIONS: Final[dict[str, Callable[[list[float]], float]]] = {"sum": sum, "max": max, "min": min, "count": len}


class Recording:
    """Samples by series, in the order of time."""

    def __init__(self) -> None:
        self.series: dict[Labels, list[tuple[float, float]]] = {}
        self.scrapes: list[float] = []

    def add(self, at_s: float, samples: Iterable[tuple[str, dict[str, str], float]]) -> None:
        """One scrape. A series that it does not have any more is stale from then on, as after a scrape."""
        self.scrapes.append(at_s)
        found = {frozenset({"__name__": name, **labels}.items()): value for name, labels, value in samples}
        for labels, value in found.items():
            self.series.setdefault(labels, []).append((at_s, value))
        for labels in self.series.keys() - found.keys():
            if self.series[labels][-1][1] is not None:
                self.series[labels].append((at_s, STALE))


STALE: Final[Any] = None


class Alert(msgspec.Struct):
    """One rule of a file."""

    name: str
    expression: str
    for_s: float


def alerts(rules: dict[str, Any]) -> list[Alert]:
    """Those of a rule file, as YAML gives it."""
    return [
        Alert(rule["alert"], rule["expr"], _seconds(rule.get("for")))
        for group in rules["groups"]
        for rule in group["rules"]
    ]


def _seconds(duration: str | None) -> float:
    return 0.0 if duration is None else float(parser.parse_duration(duration).total_seconds())


def fired(alert: Alert, recording: Recording, times_s: Sequence[float]) -> dict[float, list[dict[str, str]]]:
    """When it fires: by time of evaluation the labels of what has been so for long enough."""
    expression = parser.parse(alert.expression)
    since: dict[Labels, float] = {}
    found: dict[float, list[dict[str, str]]] = {}
    for at_s in times_s:
        active = evaluate(expression, recording, at_s)
        assert isinstance(active, dict)
        since = {labels: since.get(labels, at_s) for labels in active}
        firing = [dict(labels) for labels, begin_s in since.items() if at_s - begin_s >= alert.for_s]
        if firing:
            found[at_s] = firing
    return found


def evaluate(node: Any, recording: Recording, at_s: float) -> Vector | float:
    """The value of an expression at a time."""
    match node:
        case parser.NumberLiteral():
            return float(node.val)
        case parser.ParenExpr():
            return evaluate(node.expr, recording, at_s)
        case parser.VectorSelector():
            return dict(_instant(node, recording, at_s))
        case parser.Call():
            return _call(node, recording, at_s)
        case parser.AggregateExpr():
            return _aggregate(node, recording, at_s)
        case parser.BinaryExpr():
            return _binary(node, recording, at_s)
    raise NotImplementedError(f"{type(node).__name__}: {node}")


def _selected(selector: Any, recording: Recording) -> Iterable[tuple[Labels, list[tuple[float, float]]]]:
    assert selector.offset is None
    assert selector.at is None
    for labels, points in recording.series.items():
        found = dict(labels)
        if selector.name in (None, found["__name__"]) and all(_fits(it, found) for it in selector.matchers.matchers):
            yield labels, points


def _fits(matcher: Any, labels: dict[str, str]) -> bool:
    value = labels.get(matcher.name, "")
    match str(matcher.op).rpartition(".")[2]:
        case "Equal":
            return bool(value == matcher.value)
        case "NotEqual":
            return bool(value != matcher.value)
        case "Re":
            return re.fullmatch(matcher.value, value) is not None
        case "NotRe":
            return re.fullmatch(matcher.value, value) is None
    raise NotImplementedError(str(matcher.op))


def _instant(selector: Any, recording: Recording, at_s: float) -> Iterable[tuple[Labels, float]]:
    for labels, points in _selected(selector, recording):
        newest = next((point for point in reversed(points) if point[0] <= at_s), None)
        if newest is not None and newest[1] is not STALE and newest[0] > at_s - LOOKBACK_S:
            yield labels, newest[1]


def _call(node: Any, recording: Recording, at_s: float) -> Vector:
    function = FUNCTIONS[node.func.name]
    (argument,) = node.args
    assert isinstance(argument, parser.MatrixSelector)
    range_s = argument.range.total_seconds()
    found: Vector = {}
    for labels, points in _selected(argument.vector_selector, recording):
        window = [(at, value) for at, value in points if at_s - range_s <= at <= at_s and value is not STALE]
        value = function(window, at_s - range_s, at_s)
        if value is not None:
            found[_without_name(labels)] = value
    return found


def _increase(window: list[tuple[float, float]], begin_s: float, end_s: float) -> float | None:
    """With resets, and extrapolated to the ends of the range as far as the samples let one believe."""
    if len(window) < 2:
        return None
    total = sum(after - before if after >= before else after for (_, before), (_, after) in itertools.pairwise(window))
    sampled_s = window[-1][0] - window[0][0]
    average_s = sampled_s / (len(window) - 1)
    to_start_s, to_end_s = window[0][0] - begin_s, end_s - window[-1][0]
    if total > 0 and window[0][1] >= 0:  # a counter does not begin below zero
        to_start_s = min(to_start_s, sampled_s * (window[0][1] / total))
    believed_s = sampled_s
    for gap_s in (to_start_s, to_end_s):
        believed_s += gap_s if gap_s < average_s * 1.1 else average_s / 2
    return total * believed_s / sampled_s


def _rate(window: list[tuple[float, float]], begin_s: float, end_s: float) -> float | None:
    increase = _increase(window, begin_s, end_s)
    return None if increase is None else increase / (end_s - begin_s)


def _max(window: list[tuple[float, float]], begin_s: float, end_s: float) -> float | None:
    return max((value for _, value in window), default=None)


FUNCTIONS: Final = {"increase": _increase, "rate": _rate, "max_over_time": _max}


def _aggregate(node: Any, recording: Recording, at_s: float) -> Vector:
    vector = evaluate(node.expr, recording, at_s)
    assert isinstance(vector, dict)
    kept = set(node.modifier.labels) if node.modifier is not None else set()
    assert node.modifier is None or str(node.modifier.type).endswith("By"), "only `by`"
    groups: dict[Labels, list[float]] = {}
    for labels, value in vector.items():
        groups.setdefault(frozenset((key, it) for key, it in labels if key in kept), []).append(value)
    combine = AGGREGATIONS[str(node.op)]
    return {labels: combine(values) for labels, values in groups.items()}


def _binary(node: Any, recording: Recording, at_s: float) -> Vector | float:
    assert not str(node.modifier or ""), "no on, ignoring, group_left or bool"
    left, right = (evaluate(side, recording, at_s) for side in (node.lhs, node.rhs))
    symbol = str(node.op)
    if symbol in ("and", "or", "unless"):
        assert isinstance(left, dict)
        assert isinstance(right, dict)
        there, here = ({_without_name(labels) for labels in side} for side in (right, left))
        if symbol == "or":
            return left | {labels: value for labels, value in right.items() if _without_name(labels) not in here}
        wanted = symbol == "and"
        return {labels: value for labels, value in left.items() if (_without_name(labels) in there) is wanted}
    if isinstance(left, float) or isinstance(right, float):
        assert isinstance(left, dict), "a vector on the left"
        assert isinstance(right, float)
        return _combined(symbol, {labels: (value, right) for labels, value in left.items()})
    others = {_without_name(labels): value for labels, value in right.items()}
    pairs = {labels: (value, others[key]) for labels, value in left.items() if (key := _without_name(labels)) in others}
    return _combined(symbol, pairs)


def _combined(symbol: str, pairs: dict[Labels, tuple[float, float]]) -> Vector:
    if symbol in COMPARISONS:
        return {labels: pair[0] for labels, pair in pairs.items() if COMPARISONS[symbol](*pair)}
    return {_without_name(labels): ARITHMETIC[symbol](*pair) for labels, pair in pairs.items()}


def _without_name(labels: Labels) -> Labels:
    return frozenset(pair for pair in labels if pair[0] != "__name__")
