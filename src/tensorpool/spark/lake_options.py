# SPDX-License-Identifier: Apache-2.0
"""The options of format "tensorpool.lake": every one checked, nothing unknown accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from tensorpool.errors import ConfigError
from tensorpool.lake.file_policy import CODECS, FilePolicy
from tensorpool.lake.option_values import (
    Parse,
    check_trigger,
    count_of,
    flag_of,
    one_of,
    seconds_of,
    size_of,
    text_of,
    unknown,
    utc_ns_of,
)
from tensorpool.lake.selection import Bounds, Selection

TABLES: Final = ("frames", "gaps", "qos", "metadata", "traces", "files")
PAYLOADS: Final = ("inline", "reference")

_OF_SPARK: Final = ("checkpointlocation", "queryname")  # what Spark passes on of its own


class LakeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Made by `lake_options`."""

    path: str
    table: str = "frames"
    streams: tuple[int | str, ...] = ()
    payload: str = "inline"
    starting_commit: int = 0  # -1: the newest
    starting_ns: int | None = None  # UTC: frames that were taken then or later
    ending_ns: int | None = None  # UTC: and before that
    max_bytes_per_trigger: int | None = None
    max_bytes_per_partition: int = 128 << 20
    fail_on_data_loss: bool = True
    push_filters: bool = False
    include_metadata: bool = False
    min_frames_per_trigger: int | None = None
    max_trigger_delay_s: float | None = None
    codec: str = "zstd"
    max_file_bytes: int = 256 << 20
    max_file_seconds: float = 60.0
    is_durable: bool = True

    @property
    def selection(self) -> Selection:
        """The frames that the options ask for, by their times."""
        first = None if self.starting_ns is None else -(-self.starting_ns // 1000)
        end = None if self.ending_ns is None else -(-self.ending_ns // 1000)
        return Selection(time=Bounds(first, None if end is None else end - 1))

    @property
    def policy(self) -> FilePolicy:
        return FilePolicy(self.codec, self.max_file_bytes, round(self.max_file_seconds * 1e9), self.is_durable)


def lake_options(given: Mapping[str, str]) -> LakeOptions:
    """Check the options of a query. Raises ConfigError with what is accepted."""
    values: dict[str, Any] = {}
    for key, text in given.items():
        if key.lower() in _OF_SPARK:
            continue
        spelling = _SPELLING.get(key.lower())
        if spelling is None:
            raise unknown(key, text, _SPELLING)
        name, parse = _OPTIONS[spelling]
        values[name] = parse(spelling, text)
    if "path" not in values:
        raise ConfigError("option path", None, "the directory of a lake")
    options = LakeOptions(**values)
    for name in _OF_FRAMES:
        field = _OPTIONS[name][0]
        if field in values and options.table != "frames":
            raise ConfigError(f"option {name}", values[field], f"table frames only, not {options.table}")
    check_trigger(options.min_frames_per_trigger, options.max_trigger_delay_s)
    return options


def _path(key: str, text: str) -> str:
    return text_of(key, text).removeprefix("file:")


def _streams(key: str, text: str) -> tuple[int | str, ...]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(f"option {key}", text, "ids or names of streams, separated by commas")
    return tuple(int(name) if name.isascii() and name.isdecimal() else name for name in dict.fromkeys(names))


def _commit(key: str, text: str) -> int:
    if text in ("earliest", "latest"):
        return 0 if text == "earliest" else -1
    if not (text.isascii() and text.isdecimal() and int(text) < 2**63):
        raise ConfigError(f"option {key}", text, "earliest, latest, or the number of the last commit that is known")
    return int(text)


_OPTIONS: Final[dict[str, tuple[str, Parse[Any]]]] = {
    "path": ("path", _path),
    "table": ("table", one_of(TABLES)),
    "streams": ("streams", _streams),
    "payload": ("payload", one_of(PAYLOADS)),
    "startingOffsets": ("starting_commit", _commit),
    "startingTimestamp": ("starting_ns", utc_ns_of),
    "endingTimestamp": ("ending_ns", utc_ns_of),
    "maxBytesPerTrigger": ("max_bytes_per_trigger", size_of),
    "maxBytesPerPartition": ("max_bytes_per_partition", size_of),
    "failOnDataLoss": ("fail_on_data_loss", flag_of),
    "pushFilters": ("push_filters", flag_of),
    "includeMetadata": ("include_metadata", flag_of),
    "minFramesPerTrigger": ("min_frames_per_trigger", count_of),
    "maxTriggerDelay": ("max_trigger_delay_s", seconds_of),
    "codec": ("codec", one_of(CODECS)),
    "maxFileBytes": ("max_file_bytes", size_of),
    "maxFileSeconds": ("max_file_seconds", seconds_of),
    "durable": ("is_durable", flag_of),
}
_OF_FRAMES: Final = (
    "startingTimestamp",
    "endingTimestamp",
    "pushFilters",
    "includeMetadata",
    "minFramesPerTrigger",
    "maxTriggerDelay",
)
_SPELLING: Final = {name.lower(): name for name in _OPTIONS}
