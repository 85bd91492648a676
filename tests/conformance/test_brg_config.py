# SPDX-License-Identifier: Apache-2.0
"""The configuration of a bridge: what it needs, what it assumes, and what it refuses before anything starts.

Bridge §2.3, §3, §4, §5.2, §7.1, §9, §10; decisions G1, G9, G11, G14, G29 and section 2 of the configuration keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorpool.bridge.config import BridgeConfig
from tensorpool.driver import DriverConfig
from tensorpool.errors import ConfigError
from tests.support.bridge_rig import write_toml
from tests.support.driver_process import DriverProcess

BRIDGE: dict[str, Any] = {
    "instance_id": "lab-to-desk",
    "role": "receiver",
    "payload_channel": "aeron:udp?endpoint=10.0.0.2:40100",
    "payload_stream_id": 50_000,
    "control_channel": "aeron:udp?endpoint=10.0.0.2:40101",
    "control_stream_id": 50_001,
}
METADATA: dict[str, Any] = {"metadata_channel": "aeron:udp?endpoint=10.0.0.2:40102", "metadata_stream_id": 50_002}
MAPPING: dict[str, Any] = {"source_stream_id": 1000, "dest_stream_id": 2000}
RETURN: dict[str, Any] = {"source_stream_id": 3000, "dest_stream_id": 4000}


def load(*mappings: dict[str, Any], without: str = "", **keys: Any) -> BridgeConfig:
    """A configuration with one mapping unless others are given."""
    bridge = {key: value for key, value in (BRIDGE | keys).items() if key != without}
    return BridgeConfig.load(environ={}, bridge=bridge, mappings=list(mappings or [MAPPING]))


def refusal(*mappings: dict[str, Any], without: str = "", **keys: Any) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        load(*mappings, without=without, **keys)
    return raised.value


def sent(mapping: dict[str, Any]) -> dict[str, Any]:
    return mapping | {"direction": "send"}


def received(mapping: dict[str, Any]) -> dict[str, Any]:
    return mapping | {"direction": "receive"}


# --- what it needs


@pytest.mark.parametrize(
    "key",
    [
        pytest.param("instance_id", marks=pytest.mark.spec("BRG-10-01")),
        pytest.param("payload_channel", marks=pytest.mark.spec("BRG-10-02")),
        pytest.param("payload_stream_id", marks=pytest.mark.spec("BRG-10-03")),
        pytest.param("control_channel", marks=pytest.mark.spec("BRG-10-04")),
        pytest.param("control_stream_id", marks=pytest.mark.spec("BRG-10-05")),
    ],
)
def test_a_required_key_that_is_left_out_or_empty_is_refused_by_its_name(key: str) -> None:
    assert refusal(without=key).key == f"bridge.{key}"
    unusable: dict[str, Any] = {key: "" if isinstance(BRIDGE[key], str) else 0}
    assert refusal(**unusable).key == f"bridge.{key}"


@pytest.mark.spec("BRG-10-06", "BRG-10-19")
def test_there_is_a_mapping_and_it_has_a_source() -> None:
    absent: list[dict[str, Any]] = [{}, {"mappings": []}]
    for tables in absent:
        with pytest.raises(ConfigError) as raised:
            BridgeConfig.load(environ={}, bridge=BRIDGE, **tables)
        assert raised.value.key == "mappings"
    assert refusal({"dest_stream_id": 2000}).key == "mappings[0].source_stream_id"
    assert refusal(MAPPING, {"source_stream_id": 0, "dest_stream_id": 9}).key == "mappings[1].source_stream_id"


def test_every_mapping_has_a_direction() -> None:
    """G9: the specification has no key for it."""
    assert refusal(without="role").key == "mappings[0].direction"
    assert refusal(role="both").key == "mappings[0].direction"
    assert refusal(sent(MAPPING), role="receiver").key == "mappings[0].direction"
    assert load(role="sender").sent
    assert load(role="receiver").received
    both = load(sent(MAPPING), received(RETURN), without="role")
    assert [mapping.source_stream_id for mapping in both.sent] == [1000]
    assert [mapping.source_stream_id for mapping in both.received] == [3000]


@pytest.mark.spec("BRG-3-01")
@pytest.mark.parametrize(
    "channel", ["aeron:ipc", "aeron:ipc?term-length=4m", "udp://10.0.0.2:1", "aeron-spy:aeron:udp?endpoint=1.2.3.4:5"]
)
def test_frames_and_metadata_travel_over_udp(channel: str) -> None:
    assert refusal(payload_channel=channel).key == "bridge.payload_channel"
    assert refusal(**METADATA | {"metadata_channel": channel}).key == "bridge.metadata_channel"


# --- what it assumes


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param("bridge.mtu_bytes", 0, marks=()),
        pytest.param("bridge.max_chunk_bytes", 65_535, marks=pytest.mark.spec("BRG-10-09")),
        pytest.param("bridge.max_payload_bytes", 1 << 30, marks=pytest.mark.spec("BRG-10-10")),
        pytest.param("bridge.dest_stream_id_range", "", marks=pytest.mark.spec("BRG-10-11")),
        pytest.param("bridge.forward_metadata", True, marks=pytest.mark.spec("BRG-10-13")),
        pytest.param("bridge.metadata_channel", "", marks=pytest.mark.spec("BRG-10-14")),
        pytest.param("bridge.forward_qos", False, marks=pytest.mark.spec("BRG-10-16")),
        pytest.param("bridge.forward_progress", False, marks=pytest.mark.spec("BRG-10-17")),
        pytest.param("bridge.assembly_timeout_ms", 250, marks=pytest.mark.spec("BRG-10-18")),
        pytest.param("bridge.max_inflight_frames", 16, marks=()),
        pytest.param("mappings[0].metadata_stream_id", 2000, marks=pytest.mark.spec("BRG-10-21")),
        pytest.param("mappings[0].source_control_stream_id", 0, marks=pytest.mark.spec("BRG-10-22")),
        pytest.param("mappings[0].dest_control_stream_id", 0, marks=pytest.mark.spec("BRG-10-23")),
    ],
)
def test_what_is_not_said_has_the_default_of_the_specification(key: str, value: object) -> None:
    assert load().dump()[key] == value


@pytest.mark.spec("BRG-10-07", "BRG-10-08", "BRG-5.2-17")
@pytest.mark.parametrize(
    ("keys", "first", "others"),
    [
        ({}, 1063, 1280),
        ({"payload_channel": "aeron:udp?endpoint=10.0.0.2:40100|mtu=8192"}, 7847, 8064),
        ({"payload_channel": "aeron:udp?endpoint=10.0.0.2:40100|mtu=8k"}, 7847, 8064),
        ({"mtu_bytes": 1000}, 655, 872),
        ({"chunk_bytes": 500}, 500, 500),
        ({"chunk_bytes": 5000}, 1063, 1280),
        ({"chunk_bytes": 1200}, 1063, 1200),
        ({"max_chunk_bytes": 100}, 100, 100),
        ({"mtu_bytes": 346}, 1, 218),
        ({"mtu_bytes": 358, "dialect": "2026-01"}, 1, 230),
    ],
)
def test_a_chunk_is_what_fits_the_mtu_or_less(keys: dict[str, Any], first: int, others: int) -> None:
    """min(chunk_bytes, MTU - 128, max_chunk_bytes), and beside the header MTU - 345 (G1)."""
    section = load(**keys).bridge.at_mtu(1408)
    assert (section.first_chunk_bytes, section.effective_chunk_bytes) == (first, others)


@pytest.mark.spec("BRG-10-20")
def test_a_mapping_names_a_profile_that_the_local_driver_has(tmp_path: Path) -> None:
    """Of a mapping that is received; another one is refused by its name."""
    profile = {"header_nslots": 8, "payload_pools": [{"pool_id": 1, "stride_bytes": 64}]}
    tables = {"driver": {}, "profiles.cameras": profile, "streams.other": {"stream_id": 5}}
    path = str(write_toml(tmp_path / "driver.toml", tables))
    known = load(MAPPING | {"profile": "cameras"}, driver_config=path)
    assert known.driver({}).profiles[known.mappings[0].profile].header_nslots == 8
    with pytest.raises(ConfigError, match="cameras") as raised:
        load(MAPPING | {"profile": "camera"}, driver_config=path).driver({})
    assert raised.value.key == "mappings[0].profile"
    assert load(sent(MAPPING | {"profile": "theirs"}), role="sender", driver_config=path).driver({})


@pytest.mark.parametrize("network", ["host.example", "10.0.0.0/33", "10.0.0.1/8", ""])
def test_who_is_allowed_is_an_address_or_a_network(network: str) -> None:
    assert load(allow_from=["10.0.0.0/8", "fd00::1"]).bridge.allow_from == ("10.0.0.0/8", "fd00::1")
    assert refusal(allow_from=["10.0.0.7", network]).key == "bridge.allow_from[1]"


@pytest.mark.spec("BRG-4-01")
def test_a_payload_stream_outside_of_the_usual_range_is_worth_a_warning() -> None:
    def tells(stream_id: int) -> bool:
        return any("payload_stream_id" in text for text in load(payload_stream_id=stream_id).warnings())

    assert [tells(stream_id) for stream_id in (49_999, 50_000, 59_999, 60_000)] == [True, False, False, True]


# --- limits


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("mtu_bytes", [1, 345, 65_505, -1]),
        ("chunk_bytes", [-1, 65_536]),
        ("max_chunk_bytes", [0, 65_536]),
        ("max_payload_bytes", [0, (1 << 30) + 1]),
        ("assembly_timeout_ms", [0, -1]),
        ("max_inflight_frames", [0, -1]),
        ("payload_stream_id", [-1, 2**31]),
        ("role", ["relay"]),
        ("crc", [True]),
    ],
)
def test_what_cannot_work_is_refused(key: str, values: list[Any]) -> None:
    for value in values:
        assert refusal(**{key: value}).key == f"bridge.{key}"


# --- both directions


@pytest.mark.spec("BRG-2.3-01")
def test_one_bridge_may_have_mappings_of_both_directions() -> None:
    settings = load(sent(MAPPING), received(RETURN), role="both")
    assert (len(settings.sent), len(settings.received)) == (1, 1)


@pytest.mark.spec("BRG-2.3-02")
@pytest.mark.parametrize(
    "mappings",
    [
        (MAPPING, {"source_stream_id": 1000, "dest_stream_id": 2001}),
        (MAPPING, {"source_stream_id": 1001, "dest_stream_id": 2000}),
    ],
    ids=["one source twice", "one destination twice"],
)
def test_every_mapping_has_streams_of_its_own(mappings: tuple[dict[str, Any], ...]) -> None:
    assert refusal(*mappings).key.startswith("mappings[1].")
    assert refusal(*map(sent, mappings), role="both").key.startswith("mappings[1].")


@pytest.mark.spec("BRG-2.3-02", "BRG-2.3-04")
@pytest.mark.parametrize(
    "back",
    [
        {"source_stream_id": 2000, "dest_stream_id": 1000},
        {"source_stream_id": 2000, "dest_stream_id": 3000},
        {"source_stream_id": 3000, "dest_stream_id": 1000},
    ],
    ids=["there and back", "what arrives goes on", "what arrives is sent"],
)
def test_a_stream_does_not_come_back_to_where_it_came_from(back: dict[str, Any]) -> None:
    """1000->2000 with 2000->1000, and what amounts to it."""
    assert refusal(sent(MAPPING), received(back), role="both").key.startswith("mappings[1].")


@pytest.mark.spec("BRG-2.3-03")
def test_on_a_shared_channel_ids_tell_traffic_apart() -> None:
    channel = BRIDGE["payload_channel"]
    apart = load(control_channel=channel, **METADATA)
    assert apart.bridge.control_stream_id == 50_001
    assert refusal(control_channel=channel, control_stream_id=50_000).key.endswith("control_stream_id")
    same = {"metadata_channel": channel, "metadata_stream_id": 50_000}
    assert refusal(**same).key.endswith("metadata_stream_id")
    assert refusal(sent(MAPPING), **same, role="sender").key.endswith("metadata_stream_id")


@pytest.mark.spec("BRG-7.2-04")
def test_metadata_have_a_channel_of_their_own() -> None:
    refused = refusal(metadata_channel=BRIDGE["control_channel"], metadata_stream_id=50_002)
    assert refused.key.endswith("metadata_channel")


# --- forwarding


@pytest.mark.spec("BRG-7.1-06", "BRG-7.1-07")
def test_metadata_without_a_channel_stay_at_home() -> None:
    """G14: nothing is forwarded, with a warning; who asked for it in so many words is refused."""
    settings = load()
    assert settings.bridge.metadata is None
    assert settings.bridge.receive_metadata is None
    assert any("metadata_channel" in text for text in settings.warnings())
    assert refusal(forward_metadata=True).key == "bridge.metadata_channel"
    assert load(forward_metadata=False, **METADATA).bridge.metadata is None
    assert load(forward_metadata=True, **METADATA).bridge.metadata is not None
    assert refusal(metadata_channel=METADATA["metadata_channel"]).key == "bridge.metadata_stream_id"


@pytest.mark.spec("BRG-9-11", "BRG-9-12")
@pytest.mark.parametrize("missing", ["source_control_stream_id", "dest_control_stream_id"])
@pytest.mark.parametrize("value", [None, 0], ids=["left out", "zero"])
@pytest.mark.parametrize("flag", ["forward_progress", "forward_qos"])
def test_progress_and_qos_need_both_control_streams(missing: str, value: int | None, flag: str) -> None:
    whole = MAPPING | {"source_control_stream_id": 1000, "dest_control_stream_id": 1001}
    keys: dict[str, Any] = {flag: True}
    assert load(whole, **keys).mappings[0].dest_control_stream_id == 1001
    broken: dict[str, Any] = {key: given for key, given in whole.items() if key != missing}
    broken |= {} if value is None else {missing: value}
    assert refusal(whole, {**broken, **RETURN}, **keys).key == f"mappings[1].{missing}"


# --- destinations to be chosen


CHOSEN = {"source_stream_id": 1000}
FREE = "20000-20010"


@pytest.mark.spec("BRG-4-05")
@pytest.mark.parametrize("mapping", [CHOSEN, CHOSEN | {"dest_stream_id": 0}], ids=["left out", "zero"])
def test_a_destination_that_is_to_be_chosen_needs_a_range(mapping: dict[str, Any]) -> None:
    assert refusal(mapping).key == "bridge.dest_stream_id_range"
    assert load(mapping, dest_stream_id_range=FREE).mappings[0].dest_stream_id == 0
    assert load(mapping, dest_stream_id_range=[20_000, 20_010]).dump()["bridge.dest_stream_id_range"] == FREE


@pytest.mark.spec("BRG-4-06", "BRG-10-12")
@pytest.mark.parametrize(
    "used",
    [
        {"payload_stream_id": 20_005},
        {"control_stream_id": 20_005},
        METADATA | {"metadata_stream_id": 20_005},
        METADATA | {"source_metadata_stream_id": 20_010},
        {"driver_control_stream_id": 20_000},
        {"local_descriptor_stream_id": 20_000},
        {"local_metadata_stream_id": 20_000},
        {"reserved_stream_id_ranges": ["20010-20020"]},
    ],
    ids=lambda used: list(used)[-1],
)
def test_a_range_keeps_clear_of_all_that_is_used(used: dict[str, Any]) -> None:
    assert refusal(CHOSEN, dest_stream_id_range=FREE, **used).key == "bridge.dest_stream_id_range"


@pytest.mark.spec("BRG-4-06", "BRG-10-12")
@pytest.mark.parametrize(
    "name", ["dest_stream_id", "metadata_stream_id", "source_control_stream_id", "dest_control_stream_id"]
)
def test_a_range_keeps_clear_of_the_mappings(name: str) -> None:
    other = RETURN | {name: 20_003}
    assert refusal(CHOSEN, other, dest_stream_id_range=FREE).key == "bridge.dest_stream_id_range"


@pytest.mark.spec("BRG-4-06", "BRG-4-03")
@pytest.mark.parametrize(
    "driver",
    [
        {"driver": {"control_stream_id": 20_001}},
        {"driver": {"announce_stream_id": 20_001}},
        {"driver": {"qos_stream_id": 20_001}},
        {"driver": {"descriptor_stream_id": 20_001}},
        {"driver": {"metadata_stream_id": 20_001}},
        {"driver": {"descriptor_stream_id_range": "20010-20020"}},
        {"driver": {"control_stream_id_range": "19000-20000"}},
        {"streams": {"s": {"stream_id": 20_004, "profile": "p"}}},
        {"driver": {"stream_id_range": "30000-30010"}},
    ],
    ids=[
        *("control", "announce", "qos", "descriptor", "metadata", "private descriptors", "private control", "static"),
        "what the driver creates",
    ],
)
def test_a_range_keeps_clear_of_the_local_driver(tmp_path: Path, driver: dict[str, Any]) -> None:
    """G29: and has ids that the driver may create."""
    profile = {"header_nslots": 8, "payload_pools": [{"pool_id": 1, "stride_bytes": 64}]}
    tables = {"driver": driver.get("driver", {}), "profiles.p": profile, "streams.other": {"stream_id": 5}}
    tables |= {f"streams.{name}": table for name, table in driver.get("streams", {}).items()}
    path = write_toml(tmp_path / "driver.toml", tables)
    DriverConfig.load(path, environ={})
    settings = load(CHOSEN, dest_stream_id_range=FREE, driver_config=str(path))
    with pytest.raises(ConfigError) as raised:
        settings.driver({})
    assert raised.value.key == "bridge.dest_stream_id_range"


# --- the command


def test_check_tells_what_is_wrong_and_what_is_in_effect(tmp_path: Path) -> None:
    """`--check` starts nothing: exit code 0 and the settings, or 1 and the key that is wrong."""
    good = write_toml(tmp_path / "good.toml", {"bridge": BRIDGE, "mappings": [MAPPING]})
    bad = write_toml(tmp_path / "bad.toml", {"bridge": BRIDGE | {"mtu_bytes": 12}, "mappings": [MAPPING]})
    for path, expected, text in ((good, 0, "chunk_bytes"), (bad, 1, "bridge.mtu_bytes")):
        with DriverProcess("-m", "tensorpool", "bridge", "--config", str(path), "--check") as process:
            code, output = process.finish()
        assert code == expected, output
        assert text in output
