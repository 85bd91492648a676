# SPDX-License-Identifier: Apache-2.0
"""Options: every one checked, with what is accepted; nothing unknown, nothing in silence."""

from __future__ import annotations

import pytest

from tensorpool.errors import ConfigError
from tensorpool.lake.live_options import Ago, Moment, sink_options, source_options, stream_options
from tensorpool.lake.offsets import Offsets, Position


def test_defaults_are_those_of_the_contract() -> None:
    options = source_options({"streams": "10000"})
    assert options.streams == (10000,)
    assert options.starting_offsets is None
    assert options.ending_offsets == "latest"
    assert options.max_frames_per_trigger is None
    assert options.max_bytes_per_trigger == 256 << 20
    assert options.min_partitions is None
    assert not options.fail_on_data_loss
    assert (options.payload, options.table) == ("inline", "frames")


def test_names_of_options_know_no_case() -> None:
    """Spark hands them over in whatever case the user wrote."""
    options = source_options({"STREAMS": "camera/front, 7", "maxframespertrigger": "5", "FailOnDataLoss": "True"})
    assert options.streams == ("camera/front", 7)
    assert options.max_frames_per_trigger == 5
    assert options.fail_on_data_loss


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("earliest", "earliest"),
        ("latest", "latest"),
        ("-10s", Ago(10_000_000_000)),
        ("-1.5m", Ago(90_000_000_000)),
        ("-200ms", Ago(200_000_000)),
        ('{"7": {"epoch": 3, "seq": 120}}', Offsets({7: Position(3, 120)})),
    ],
)
def test_places_to_start_from(text: str, meaning: object) -> None:
    assert source_options({"streams": "7", "startingOffsets": text}).starting_offsets == meaning


@pytest.mark.parametrize(
    ("text", "utc_s"),
    [
        ("2026-11-16T10:00:00Z", 1_794_823_200.0),
        ("2026-11-16 11:00:00.5+01:00", 1_794_823_200.5),
        ("1794823200000", 1_794_823_200.0),
    ],
)
def test_moments_are_in_utc(text: str, utc_s: float) -> None:
    """ISO 8601 with its offset, or milliseconds since 1970."""
    options = source_options({"streams": "7", "startingTimestamp": text, "endingTimestamp": text})
    assert options.starting_offsets == options.ending_offsets == Moment(round(utc_s * 1e9))


@pytest.mark.parametrize(("text", "size"), [("1", 1), ("64k", 65536), ("256M", 256 << 20), ("1gb", 1 << 30)])
def test_sizes(text: str, size: int) -> None:
    assert source_options({"streams": "7", "maxBytesPerTrigger": text}).max_bytes_per_trigger == size


def test_patterns_and_triggers() -> None:
    given = {"subscribePattern": "camera/.*", "minFramesPerTrigger": "50", "maxTriggerDelay": "200ms"}
    options = source_options(given | {"includeMetadata": "true"})
    assert (options.streams, options.stream_pattern) == ((), "camera/.*")
    assert (options.min_frames_per_trigger, options.max_trigger_delay_s) == (50, 0.2)
    assert options.include_metadata


def test_a_stream_has_no_end() -> None:
    for ending in ({"endingOffsets": "-1s"}, {"endingTimestamp": "1"}):
        with pytest.raises(ConfigError, match="batch reads only"):
            stream_options({"streams": "7"} | ending)
    assert stream_options({"streams": "7", "endingOffsets": "latest"}).ending_offsets == "latest"


def test_dotted_keys_are_the_configurations() -> None:
    assert source_options({"streams": "7", "shm.base_dir": "/dev/shm/x"}).overrides == {"shm.base_dir": "/dev/shm/x"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "option streams = None.*ids or names"),
        ({"streams": ""}, "ids or names"),
        ({"streams": "1,,2"}, "ids or names"),
        ({"streams": "1,1"}, "each stream once"),
        ({"stream": "1"}, "did you mean streams?"),
        ({"streams": "1", "startingOfsets": "latest"}, "did you mean startingOffsets?"),
        ({"streams": "1", "banana": "x"}, "option banana = 'x' is not usable; accepted: streams, subscribePattern, st"),
        ({"streams": "1", "startingOffsets": "now"}, "earliest, latest, an age such as -10s"),
        ({"streams": "1", "startingOffsets": "10s"}, "earliest, latest, an age such as -10s"),
        ({"streams": "1", "endingOffsets": '{"a": 1}'}, "earliest, latest, an age such as -10s"),
        ({"streams": "1", "startingTimestamp": "10 o'clock"}, "2026-11-16T10:00:00Z, with its offset from UTC"),
        ({"streams": "1", "endingTimestamp": "2026-11-16T10:00:00"}, "with its offset from UTC"),
        (
            {"streams": "1", "startingOffsets": "latest", "startingTimestamp": "1"},
            "startingOffsets or startingTimestamp",
        ),
        ({"streams": "1", "maxFramesPerTrigger": "0"}, "a whole number from 1"),
        ({"streams": "1", "maxFramesPerTrigger": "-3"}, "a whole number from 1"),
        ({"streams": "1", "maxBytesPerTrigger": "lots"}, "with k, m or g"),
        ({"streams": "1", "maxBytesPerTrigger": "0"}, "with k, m or g"),
        ({"streams": "1", "minPartitions": "2.5"}, "a whole number from 1"),
        ({"streams": "1", "failOnDataLoss": "yes"}, "true or false"),
        ({"streams": "1", "payload": "lazy"}, "inline or reference"),
        ({"streams": "1", "table": "frame"}, "frames or ranges or qos or metadata or traces or announces or events"),
        ({"streams": "1", "aeronDir": ""}, "some text"),
        ({"streams": "1", "create": "true"}, "option create"),
        ({"streams": "1", "table": "ranges", "payload": "inline"}, "option payload"),
        ({"table": "qos", "failOnDataLoss": "true"}, "accepted: streams, table, aeronDir, config"),
        ({"subscribePattern": "camera/("}, "a regular expression"),
        ({"streams": "1", "subscribePattern": "camera/.*"}, "streams or subscribePattern, not both"),
        ({"table": "qos", "subscribePattern": "camera/.*"}, "option subscribePattern"),
        ({"streams": "1", "maxTriggerDelay": "2s"}, "with minFramesPerTrigger only"),
        ({"streams": "1", "minFramesPerTrigger": "9", "maxTriggerDelay": "0s"}, "a span of time such as 500ms"),
        ({"streams": "1", "minFramesPerTrigger": "9", "maxFramesPerTrigger": "8"}, "at least minFramesPerTrigger, 9"),
        ({"streams": "1", "table": "ranges", "includeMetadata": "true"}, "option includeMetadata"),
        ({"table": "qos", "streams": "camera/front"}, "ids of streams for table qos"),
    ],
)
def test_a_source_refuses_with_what_is_accepted(given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        source_options(given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "the stream to write to"),
        ({"streams": "a,b"}, "one name, or ids"),
        (
            {"streams": "1", "startingOffsets": "latest"},
            "accepted: streams, create, waitForConsumers, aeronDir, config",
        ),
        ({"streams": "1", "creat": "true"}, "did you mean create?"),
        ({"streams": "1", "create": "maybe"}, "true or false"),
    ],
)
def test_a_sink_refuses_with_what_is_accepted(given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sink_options(given)


def test_a_sink_takes_what_spark_adds() -> None:
    options = sink_options({"streams": "camera/front", "checkpointLocation": "/tmp/x", "path": "y"})
    assert options.streams == ("camera/front",)
    assert options.create
