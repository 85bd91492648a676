# SPDX-License-Identifier: Apache-2.0
"""The options of our formats: every one checked, nothing unknown accepted, nothing falls back in silence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from tensorpool.errors import ConfigError, RemoteProtocolError
from tensorpool.lake.offsets import Offsets
from tensorpool.lake.option_values import (
    Parse,
    check_trigger,
    count_of,
    flag_of,
    one_of,
    pattern_of,
    seconds_of,
    size_of,
    text_of,
    unknown,
    utc_ns_of,
)

DEFAULT_BYTES_PER_TRIGGER: Final = 256 << 20
TABLES: Final = ("frames", "ranges", "qos", "metadata", "traces", "announces", "events")
PAYLOADS: Final = ("inline", "reference")
STREAMS: Final = "ids or names of streams, separated by commas"

_AGO: Final = re.compile(r"-(?P<number>[0-9]{1,9}(\.[0-9]{1,6})?)(?P<unit>ms|s|m|h)")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Ago(msgspec.Struct, frozen=True):
    """Frames that are at most so old."""

    age_ns: int


class Moment(msgspec.Struct, frozen=True):
    """Frames that were taken then or later."""

    utc_ns: int


type Where = str | Ago | Moment | Offsets  # "earliest", "latest", an age, a moment, or exact offsets


class LiveOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Of format "tensorpool"; made by `source_options` and `sink_options`."""

    streams: tuple[int | str, ...]
    stream_pattern: str | None = None  # of names, in place of streams
    starting_offsets: Where | None = None
    ending_offsets: Where = "latest"
    max_frames_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = DEFAULT_BYTES_PER_TRIGGER
    min_frames_per_trigger: int | None = None
    max_trigger_delay_s: float | None = None
    min_partitions: int | None = None
    fail_on_data_loss: bool = False
    payload: str = "inline"
    push_filters: bool = False
    include_metadata: bool = False
    table: str = "frames"
    aeron_dir: str | None = None
    config: str | None = None
    overrides: dict[str, str] = {}
    create: bool = True
    wait_for_consumers: int = 0


def source_options(given: Mapping[str, str]) -> LiveOptions:
    """Check the options of a query that reads. Raises ConfigError with what is accepted."""
    table = _OPTIONS["table"][1]("table", given["table"]) if "table" in given else "frames"
    options = _options(given, _ACCEPTED.get(table, CONTROL_PLANE))
    if options.streams and options.stream_pattern is not None:
        raise ConfigError("option subscribePattern", options.stream_pattern, "streams or subscribePattern, not both")
    if not options.streams and options.stream_pattern is None and table in _ACCEPTED:
        raise ConfigError("option streams", None, f"{STREAMS}; or subscribePattern")
    check_trigger(options.min_frames_per_trigger, options.max_trigger_delay_s)
    most = options.max_frames_per_trigger
    if most is not None and most < (options.min_frames_per_trigger or 0):
        accepted = f"at least minFramesPerTrigger, {options.min_frames_per_trigger}"
        raise ConfigError("option maxFramesPerTrigger", most, accepted)
    if table in ("qos", "announces", "metadata", "traces") and not all(
        isinstance(stream, int) for stream in options.streams
    ):
        raise ConfigError("option streams", ",".join(map(str, options.streams)), f"ids of streams for table {table}")
    return options


def stream_options(given: Mapping[str, str]) -> LiveOptions:
    """The same of a query that streams: what would end it is refused."""
    options = source_options(given)
    if options.ending_offsets != "latest":
        accepted = "batch reads only: a stream goes on until it is stopped"
        raise ConfigError("option endingOffsets or endingTimestamp", options.ending_offsets, accepted)
    return options


def sink_options(given: Mapping[str, str]) -> LiveOptions:
    """Check the options of a query that writes. Raises ConfigError with what is accepted."""
    own = {key: text for key, text in given.items() if key.lower() not in SPARKS_OWN}
    options = _options(own, SINK)
    if not options.streams:
        raise ConfigError("option streams", None, "the stream to write to, or the ids of several")
    if len(options.streams) > 1 and not all(isinstance(stream, int) for stream in options.streams):
        accepted = "one name, or ids: the rows' column stream_id says which"
        raise ConfigError("option streams", ",".join(map(str, options.streams)), accepted)
    return options


def _options(given: Mapping[str, str], accepted: Sequence[str]) -> LiveOptions:
    spelling = {name.lower(): name for name in accepted}
    values: dict[str, Any] = {}
    overrides: dict[str, str] = {}
    named: dict[str, str] = {}
    for key, text in given.items():
        name = spelling.get(key.lower())
        if name is not None:
            field, parse = _OPTIONS[name]
            if field in named:
                raise ConfigError(f"option {name}", text, f"{named[field]} or {name}, not both")
            named[field] = name
            values[field] = parse(name, text)
        elif "." in key:
            overrides[key] = text  # a key of the driver's configuration, checked when it is loaded
        else:
            raise unknown(key, text, spelling, ", and keys of the configuration, such as shm.base_dir")
    return LiveOptions(**{"streams": ()} | values, overrides=overrides)


def _streams(key: str, text: str) -> tuple[int | str, ...]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(f"option {key}", text, STREAMS)
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


def _moment(key: str, text: str) -> Where:
    return Moment(utc_ns_of(key, text))


_OPTIONS: Final[dict[str, tuple[str, Parse[Any]]]] = {
    "streams": ("streams", _streams),
    "subscribePattern": ("stream_pattern", pattern_of),
    "startingOffsets": ("starting_offsets", _where),
    "endingOffsets": ("ending_offsets", _where),
    "startingTimestamp": ("starting_offsets", _moment),
    "endingTimestamp": ("ending_offsets", _moment),
    "maxFramesPerTrigger": ("max_frames_per_trigger", count_of),
    "maxBytesPerTrigger": ("max_bytes_per_trigger", size_of),
    "minFramesPerTrigger": ("min_frames_per_trigger", count_of),
    "maxTriggerDelay": ("max_trigger_delay_s", seconds_of),
    "minPartitions": ("min_partitions", count_of),
    "failOnDataLoss": ("fail_on_data_loss", flag_of),
    "pushFilters": ("push_filters", flag_of),
    "includeMetadata": ("include_metadata", flag_of),
    "payload": ("payload", one_of(PAYLOADS)),
    "table": ("table", one_of(TABLES)),
    "aeronDir": ("aeron_dir", text_of),
    "config": ("config", text_of),
    "create": ("create", flag_of),
    "waitForConsumers": ("wait_for_consumers", count_of),
}
WHERE_IT_IS: Final = ("aeronDir", "config")
SOURCE: Final = tuple(name for name in _OPTIONS if name not in ("create", "waitForConsumers"))
CONTROL_PLANE: Final = ("streams", "table", *WHERE_IT_IS)
SINK: Final = ("streams", "create", "waitForConsumers", *WHERE_IT_IS)
SPARKS_OWN: Final = ("path", "checkpointlocation", "queryname")  # reach a sink with the rest
_ACCEPTED: Final = {
    "frames": SOURCE,
    "ranges": tuple(name for name in SOURCE if name not in ("payload", "pushFilters", "includeMetadata")),
}
