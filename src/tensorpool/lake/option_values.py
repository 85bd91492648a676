# SPDX-License-Identifier: Apache-2.0
"""What the texts of Spark's options mean: each kind of value, checked, and what an unknown option was meant to be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Final

from tensorpool.errors import ConfigError

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
