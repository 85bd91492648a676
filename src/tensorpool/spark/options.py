# SPDX-License-Identifier: Apache-2.0
"""The options of our formats: every one checked, nothing unknown accepted, nothing falls back in silence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from tensorpool.errors import ConfigError, RemoteProtocolError
from tensorpool.spark.offsets import Offsets

DEFAULT_BYTES_PER_TRIGGER: Final = 256 << 20
TABLES: Final = ("frames", "qos", "metadata", "announces", "events")
PAYLOADS: Final = ("inline", "reference")

_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE: Final = re.compile(r"(?P<number>[0-9]{1,18})(?P<unit>[kmg]?)b?", re.IGNORECASE)
_AGO: Final = re.compile(r"-(?P<number>[0-9]{1,9}(\.[0-9]{1,6})?)(?P<unit>ms|s|m|h)")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Ago(msgspec.Struct, frozen=True):
    """Frames that are at most so old."""

    age_ns: int


type Where = str | Ago | Offsets  # "earliest", "latest", an age, or exact offsets


class LiveOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Of format "tensorpool"; made by `live_options`."""

    streams: tuple[int | str, ...]
    starting_offsets: Where = "latest"
    ending_offsets: Where = "latest"
    max_frames_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = DEFAULT_BYTES_PER_TRIGGER
    min_partitions: int | None = None
    fail_on_data_loss: bool = False
    payload: str = "inline"
    table: str = "frames"
    aeron_dir: str | None = None
    config: str | None = None
    overrides: dict[str, str] = {}
    create: bool = True
    order: str = "C"


def live_options(given: Mapping[str, str]) -> LiveOptions:
    """Check the options of a query. Raises ConfigError with what is accepted."""
    known: dict[str, tuple[str, Callable[[str, str], Any]]] = {
        "streams": ("streams", _streams),
        "startingoffsets": ("starting_offsets", _where),
        "endingoffsets": ("ending_offsets", _where),
        "maxframespertrigger": ("max_frames_per_trigger", _count),
        "maxbytespertrigger": ("max_bytes_per_trigger", _size),
        "minpartitions": ("min_partitions", _count),
        "failondataloss": ("fail_on_data_loss", _flag),
        "payload": ("payload", _one_of(PAYLOADS)),
        "table": ("table", _one_of(TABLES)),
        "aerondir": ("aeron_dir", _text),
        "config": ("config", _text),
        "create": ("create", _flag),
    }
    spelling = (
        "streams startingOffsets endingOffsets maxFramesPerTrigger maxBytesPerTrigger minPartitions failOnDataLoss "
        "payload table aeronDir config create"
    ).split()
    values: dict[str, Any] = {}
    overrides: dict[str, str] = {}
    for key, text in given.items():
        if key.lower() in known:
            name, parse = known[key.lower()]
            values[name] = parse(next(word for word in spelling if word.lower() == key.lower()), text)
        elif "." in key:
            overrides[key] = text  # a key of the driver's configuration, checked when it is loaded
        elif key.lower() not in ("path",):
            close = difflib.get_close_matches(key.lower(), [word.lower() for word in spelling], 1)
            hint = f"did you mean {next(w for w in spelling if w.lower() == close[0])}? " if close else ""
            raise ConfigError(
                f"option {key}", text, f"{hint}one of {', '.join(spelling)}, or a key of the configuration"
            )
    if "streams" not in values and values.get("table", "frames") == "frames":
        raise ConfigError("option streams", None, "ids or names of streams, separated by commas")
    return LiveOptions(**{"streams": ()} | values, overrides=overrides)


def _text(key: str, text: str) -> str:
    if not text:
        raise ConfigError(f"option {key}", text, "some text")
    return text


def _streams(key: str, text: str) -> tuple[int | str, ...]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(f"option {key}", text, "ids or names of streams, separated by commas")
    streams = tuple(int(name) if name.isascii() and name.isdecimal() else name for name in names)
    if len(set(streams)) != len(streams):
        raise ConfigError(f"option {key}", text, "each stream once")
    return streams


def _where(key: str, text: str) -> Where:
    if text in ("earliest", "latest"):
        return text
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return Ago(round(float(ago["number"]) * _SECONDS[ago["unit"]] * 1e9))
    try:
        return Offsets.from_json(text)
    except RemoteProtocolError:
        accepted = 'earliest, latest, an age such as -10s, or {"10000": {"epoch": 3, "seq": 120}}'
        raise ConfigError(f"option {key}", text, accepted) from None


def _count(key: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**63):
        raise ConfigError(f"option {key}", text, "a whole number from 1")
    return int(text)


def _size(key: str, text: str) -> int:
    match = _SIZE.fullmatch(text)
    size = 0 if match is None else int(match["number"]) * _UNITS[match["unit"].lower()]
    if not 0 < size < 2**63:
        raise ConfigError(f"option {key}", text, "a number of bytes, with k, m or g for KiB, MiB or GiB")
    return size


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
