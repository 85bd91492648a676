# SPDX-License-Identifier: Apache-2.0
"""Spans of time as people write them: 500ms, 1s, 10m, 2h."""

from __future__ import annotations

import re
from typing import Final

from tensorpool.errors import ConfigError

_TEXT: Final = re.compile(r"(?P<number>[0-9]{1,9}(\.[0-9]{1,9})?) *(?P<unit>us|ms|s|m|h|d)")
_UNIT_NS: Final = {
    "us": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
    "d": 86_400_000_000_000,
}
SHORTEST_NS: Final = 1_000


def parse_duration_ns(name: str, text: str) -> int:
    """Nanoseconds, at least a microsecond. Raises ConfigError, with `name` as what was given wrong.

    >>> parse_duration_ns("window", "1.5s")
    1500000000
    """
    match = _TEXT.fullmatch(text.strip())
    value_ns = 0 if match is None else round(float(match["number"]) * _UNIT_NS[match["unit"]])
    if value_ns < SHORTEST_NS:
        raise ConfigError(name, text, "a span of time such as 500ms, 1s, 10m or 2h, of a microsecond at least")
    return value_ns
