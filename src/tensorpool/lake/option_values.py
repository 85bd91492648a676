# SPDX-License-Identifier: Apache-2.0
"""What the texts of Spark's options mean: each kind of value, checked, and what an unknown option was meant to be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final

from tensorpool.errors import ConfigError
from tensorpool.lake.durations import parse_duration_ns
from tensorpool.lake.selection import time_us_of

type Parse[T] = Callable[[str, str], T]  # of an option's name and its text

_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE: Final = re.compile(r"(?P<number>[0-9]{1,18})(?P<unit>[kmg]?)b?", re.IGNORECASE)


def text_of(key: str, text: str) -> str:
    if not text:
        raise ConfigError(f"option {key}", text, "some text")
    return text


def count_of(key: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**63):
        raise ConfigError(f"option {key}", text, "a whole number from 1")
    return int(text)


def size_of(key: str, text: str) -> int:
    match = _SIZE.fullmatch(text)
    size = 0 if match is None else int(match["number"]) * _UNITS[match["unit"].lower()]
    if not 0 < size < 2**63:
        raise ConfigError(f"option {key}", text, "a number of bytes, with k, m or g for KiB, MiB or GiB")
    return size


def flag_of(key: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"option {key}", text, "true or false")
    return text.lower() == "true"


def utc_ns_of(key: str, text: str) -> int:
    """ISO 8601 with an offset from UTC, as Spark and Kafka's connector write it, or milliseconds since 1970."""
    if text.isascii() and text.isdecimal():
        return int(text) * 1_000_000
    try:
        return time_us_of(datetime.fromisoformat(text)) * 1000
    except (ValueError, TypeError):  # no time, or one without its offset
        accepted = "a time such as 2026-11-16T10:00:00Z, with its offset from UTC, or milliseconds since 1970"
        raise ConfigError(f"option {key}", text, accepted) from None


def seconds_of(key: str, text: str) -> float:
    """A span of time; without a unit it is in seconds."""
    return parse_duration_ns(f"option {key}", text if text[-1:].isalpha() else f"{text}s") / 1e9


def pattern_of(key: str, text: str) -> str:
    try:
        re.compile(text_of(key, text))
    except re.error as error:
        raise ConfigError(f"option {key}", text, f"a regular expression ({error})") from None
    return text


def check_trigger(min_frames: int | None, max_delay_s: float | None) -> None:
    """Raises ConfigError for a delay without anything to wait for."""
    if min_frames is None and max_delay_s is not None:
        raise ConfigError("option maxTriggerDelay", max_delay_s, "with minFramesPerTrigger only")


def one_of(words: tuple[str, ...]) -> Parse[str]:
    def parse(key: str, text: str) -> str:
        if text not in words:
            raise ConfigError(f"option {key}", text, " or ".join(words))
        return text

    return parse


def unknown(key: str, text: str, spelling: Mapping[str, str], besides: str = "") -> ConfigError:
    """An option that is none of `spelling` (by its name in lower case), with what was perhaps meant."""
    close = difflib.get_close_matches(key.lower(), spelling, 1)
    hint = f"did you mean {spelling[close[0]]}? The options are " if close else ""
    return ConfigError(f"option {key}", text, f"{hint}{', '.join(spelling.values())}{besides}")
