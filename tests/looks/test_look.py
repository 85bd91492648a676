# SPDX-License-Identifier: Apache-2.0
"""What a look accepts, from Python and from JSON."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tensorpool.errors import ConfigError
from tensorpool.looks import Look


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"width": 0}, "look.width = 0 is not usable; accepted: 1 to 4096"),
        ({"height": 4097}, "look.height = 4097 is not usable"),
        ({"colormap": "jet"}, "look.colormap = 'jet' is not usable; accepted: gray, viridis, magma, cividis, turbo"),
        ({"scale": "log"}, "look.scale = 'log' is not usable; accepted: auto, full, minmax, percentile, fixed"),
        ({"scale": "fixed"}, "look.low = None is not usable; accepted: a number, with scale fixed"),
        ({"scale": "fixed", "low": 0.0, "high": float("nan")}, "look.high = nan is not usable"),
        ({"scale": "fixed", "low": 1, "high": 1}, "look.high = 1 is not usable; accepted: more than low, 1"),
        ({"index": (1, -1)}, "look.index = (1, -1) is not usable; accepted: numbers from 0"),
        ({"region": (0, -1, 5, 5)}, "look.region = (0, -1, 5, 5) is not usable"),
        ({"region": (0, 0, 0, 5)}, "look.region = (0, 0, 0, 5) is not usable"),
    ],
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any], words: str) -> None:
    """By the name of the field, with what it accepts; the same from JSON."""
    with pytest.raises(ConfigError) as refusal:
        Look(**values)
    assert str(refusal.value).startswith(words)
    if values.get("high") == values.get("high"):  # JSON has no NaN
        with pytest.raises(ConfigError):
            msgspec.json.decode(msgspec.json.encode(values), type=Look)


def test_a_look_comes_from_json_and_can_be_a_key() -> None:
    """Equal looks are one key; a field that there is not is refused."""
    sent = b'{"width":100,"index":[1,2],"region":[0,0,5,5],"scale":"fixed","low":-1,"high":2.5}'
    look = msgspec.json.decode(sent, type=Look)
    assert look == Look(width=100, index=(1, 2), region=(0, 0, 5, 5), scale="fixed", low=-1, high=2.5)
    assert len({look, msgspec.json.decode(sent, type=Look)}) == 1
    with pytest.raises(msgspec.ValidationError, match="unknown field `zoom`"):
        msgspec.json.decode(b'{"zoom":1}', type=Look)
