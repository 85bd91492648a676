# SPDX-License-Identifier: Apache-2.0
"""The evaluator of alerts gives the answers of Prometheus; promql_answers.yml is a file that promtool accepts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import promql_parser
import pytest
import yaml

from tests.support.promql import STALE, Labels, Recording, evaluate

(ANSWERS,) = yaml.safe_load(Path(__file__).with_name("promql_answers.yml").read_text())["tests"]
STEP_S: Final = 10.0


def labels_of(text: str) -> Labels:
    """Of a series as promtool writes it."""
    name, _, rest = text.partition("{")
    labels = dict(re.findall(r'(\w+)="([^"]*)"', rest))
    return frozenset((labels | ({"__name__": name} if name else {})).items())


@pytest.fixture(scope="module")
def recording() -> Recording:
    made = Recording()
    for series in ANSWERS["input_series"]:
        points = [(index * STEP_S, text) for index, text in enumerate(series["values"].split()) if text != "_"]
        values = [(at_s, STALE if text == "stale" else float(text)) for at_s, text in points]
        made.series[labels_of(series["series"])] = values
    return made


@pytest.mark.parametrize("case", ANSWERS["promql_expr_test"], ids=lambda case: f"{case['expr']} at {case['eval_time']}")
def test_an_expression_has_the_value_that_prometheus_gives(case: dict[str, Any], recording: Recording) -> None:
    """Labels and numbers."""
    found = evaluate(promql_parser.parse(case["expr"]), recording, float(case["eval_time"].rstrip("s")))
    expected = {labels_of(sample["labels"]): float(sample["value"]) for sample in case["exp_samples"]}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    "text", ["x offset 5m", "x + on (a) y", "absent(x)", "sum without (a) (x)", "x > bool 1", "-x"]
)
def test_what_it_does_not_know_is_refused(text: str, recording: Recording) -> None:
    """Instead of a wrong answer."""
    with pytest.raises((NotImplementedError, AssertionError, KeyError)):
        evaluate(promql_parser.parse(text), recording, 10.0)
