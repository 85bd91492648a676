# SPDX-License-Identifier: Apache-2.0
"""The options of format "tensorpool.lake": every one checked, nothing unknown accepted."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from tensorpool.errors import ConfigError
from tensorpool.spark.lake.cut import CODECS, Cut

TABLES: Final = ("frames", "gaps", "qos", "metadata", "files")
PAYLOADS: Final = ("inline", "reference")

_OF_SPARK: Final = ("checkpointlocation", "queryname")  # what Spark passes on of its own
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE: Final = re.compile(r"(?P<number>[0-9]{1,18})(?P<unit>[kmg]?)b?", re.IGNORECASE)
_SECONDS: Final = re.compile(r"(?P<number>[0-9]{1,9}(\.[0-9]{1,6})?)(?P<unit>ms|s|m|h)?")
_FACTORS: Final = {None: 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class LakeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Made by `lake_options`."""

    path: str
    table: str = "frames"
    streams: tuple[int, ...] = ()
    payload: str = "inline"
    starting_commit: int = 0  # -1: the newest
    max_bytes_per_trigger: int | None = None
    max_bytes_per_partition: int = 128 << 20
    fail_on_data_loss: bool = True
    codec: str = "zstd"
    max_file_bytes: int = 256 << 20
    max_file_seconds: float = 60.0
    is_durable: bool = True

    @property
    def cut(self) -> Cut:
        return Cut(self.codec, self.max_file_bytes, round(self.max_file_seconds * 1e9), self.is_durable)


def lake_options(given: Mapping[str, str]) -> LakeOptions:
    """Check the options of a query. Raises ConfigError with what is accepted."""
    values: dict[str, Any] = {}
    for key, text in given.items():
        if key.lower() in _OF_SPARK:
            continue
        spelling = _SPELLING.get(key.lower())
        if spelling is None:
            close = difflib.get_close_matches(key.lower(), _SPELLING, 1)
            hint = f"did you mean {_SPELLING[close[0]]}? The options are " if close else ""
            raise ConfigError(f"option {key}", text, f"{hint}{', '.join(_OPTIONS)}")
        name, parse = _OPTIONS[spelling]
        values[name] = parse(spelling, text)
    if "path" not in values:
        raise ConfigError("option path", None, "the directory of a lake")
    return LakeOptions(**values)


def _text(key: str, text: str) -> str:
    if not text:
        raise ConfigError(f"option {key}", text, "some text")
    return text.removeprefix("file:") if key == "path" else text


def _streams(key: str, text: str) -> tuple[int, ...]:
    names = [name.strip() for name in text.split(",")]
    if not all(name.isascii() and name.isdecimal() for name in names):
        raise ConfigError(f"option {key}", text, "ids of streams, separated by commas")
    return tuple(sorted({int(name) for name in names}))


def _commit(key: str, text: str) -> int:
    if text in ("earliest", "latest"):
        return 0 if text == "earliest" else -1
    if not (text.isascii() and text.isdecimal() and int(text) < 2**63):
        raise ConfigError(f"option {key}", text, "earliest, latest, or the number of the last commit that is known")
    return int(text)


def _size(key: str, text: str) -> int:
    match = _SIZE.fullmatch(text)
    size = 0 if match is None else int(match["number"]) * _UNITS[match["unit"].lower()]
    if not 0 < size < 2**63:
        raise ConfigError(f"option {key}", text, "a number of bytes, with k, m or g for KiB, MiB or GiB")
    return size


def _seconds(key: str, text: str) -> float:
    match = _SECONDS.fullmatch(text)
    seconds = 0.0 if match is None else float(match["number"]) * _FACTORS[match["unit"]]
    if seconds <= 0:
        raise ConfigError(f"option {key}", text, "a time above 0, such as 30s or 5m")
    return seconds


def _flag(key: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"option {key}", text, "true or false")
    return text.lower() == "true"


def _one_of(words: tuple[str, ...]) -> Callable[[str, str], str]:
    def parse(key: str, text: str) -> str:
        if text not in words:
            raise ConfigError(f"option {key}", text, " or ".join(words))
        return text

    return parse


_OPTIONS: Final[dict[str, tuple[str, Callable[[str, str], Any]]]] = {
    "path": ("path", _text),
    "table": ("table", _one_of(TABLES)),
    "streams": ("streams", _streams),
    "payload": ("payload", _one_of(PAYLOADS)),
    "startingOffsets": ("starting_commit", _commit),
    "maxBytesPerTrigger": ("max_bytes_per_trigger", _size),
    "maxBytesPerPartition": ("max_bytes_per_partition", _size),
    "failOnDataLoss": ("fail_on_data_loss", _flag),
    "codec": ("codec", _one_of(CODECS)),
    "maxFileBytes": ("max_file_bytes", _size),
    "maxFileSeconds": ("max_file_seconds", _seconds),
    "durable": ("is_durable", _flag),
}
_SPELLING: Final = {name.lower(): name for name in _OPTIONS}
