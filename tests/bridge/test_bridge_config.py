# SPDX-License-Identifier: Apache-2.0
"""The settings of a bridge that are ours: directions, channels of the receiving side, the local driver, warnings.

Bridge §2.3, §4, §10; decisions G1, G2, G9, G14, G20, G29. What the specification names is in tests/conformance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorpool.bridge.config import BridgeConfig
from tensorpool.bridge.config_checks import allocatable
from tensorpool.driver import DriverConfig
from tensorpool.errors import ConfigError
from tensorpool.settings import Range, known_keys

BRIDGE: dict[str, Any] = {
    "instance_id": "a-to-b",
    "role": "sender",
    "payload_channel": "aeron:udp?endpoint=10.0.0.2:40100",
    "payload_stream_id": 50_000,
    "control_channel": "aeron:udp?endpoint=10.0.0.2:40101",
    "control_stream_id": 50_001,
}
MAPPING: dict[str, Any] = {"source_stream_id": 1000, "dest_stream_id": 2000}
OTHER: dict[str, Any] = {"source_stream_id": 3000, "dest_stream_id": 4000}


def load(*mappings: dict[str, Any], environ: dict[str, str] | None = None, **keys: Any) -> BridgeConfig:
    bridge = {key: value for key, value in (BRIDGE | keys).items() if value is not None}
    return BridgeConfig.load(environ=environ or {}, bridge=bridge, mappings=list(mappings or [MAPPING]))


def refusal(*mappings: dict[str, Any], **keys: Any) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        load(*mappings, **keys)
    return raised.value


def sent(mapping: dict[str, Any]) -> dict[str, Any]:
    return mapping | {"direction": "send"}


def received(mapping: dict[str, Any]) -> dict[str, Any]:
    return mapping | {"direction": "receive"}


# --- which end this is


def test_a_role_is_the_direction_of_all_mappings() -> None:
    assert [mapping.direction for mapping in load(MAPPING, OTHER).mappings] == ["send", "send"]
    assert load(role="receiver").received == load(role="receiver").mappings


@pytest.mark.parametrize("role", [None, "both"])
def test_without_a_role_each_mapping_says_its_direction(role: str | None) -> None:
    config = load(sent(MAPPING), received(OTHER), role=role)
    assert ([it.name for it in config.sent], [it.name for it in config.received]) == (["1000->2000"], ["3000->4000"])
    assert refusal(sent(MAPPING), OTHER, role=role).key == "mappings[1].direction"


def test_a_role_and_a_direction_do_not_contradict_each_other() -> None:
    assert "sender" in refusal(received(MAPPING)).accepted
    assert refusal(role="relay").accepted == '"sender", "receiver" or "both" (from a flag)'


@pytest.mark.parametrize(
    ("mapping", "key"),
    [
        ({"source_stream_id": 2000, "dest_stream_id": 1000}, "mappings[1].source_stream_id"),
        ({"source_stream_id": 3000, "dest_stream_id": 1000}, "mappings[1].dest_stream_id"),
        ({"source_stream_id": 1000, "dest_stream_id": 2000}, "mappings[1].source_stream_id"),
    ],
)
def test_what_is_received_is_not_sent_back(mapping: dict[str, Any], key: str) -> None:
    refused = refusal(sent(MAPPING), received(mapping), role="both")
    assert refused.key == key
    assert "would come back" in refused.accepted


# --- where it listens and sends


def test_what_is_received_comes_from_the_same_channels_unless_others_are_named() -> None:
    section = load().bridge
    assert (section.receive_payload, section.receive_control) == (section.payload, section.control)
    channel = "aeron:udp?endpoint=10.0.0.1:40100"
    section = load(receive_payload_channel=channel, receive_payload_stream_id=7).bridge
    assert (section.receive_payload.channel, section.receive_payload.stream_id) == (channel, 7)


def test_metadata_need_no_channel_without_a_mapping_that_uses_it() -> None:
    channel = "aeron:udp?endpoint=10.0.0.1:40102"
    config = load(
        role="receiver", forward_metadata=True, receive_metadata_channel=channel, receive_metadata_stream_id=3
    )
    assert config.bridge.receive_metadata is not None
    assert config.bridge.metadata is None
    assert refusal(role="receiver", receive_metadata_channel=channel).key == "bridge.metadata_stream_id"


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"payload_channel": "aeron:ipc"}, "bridge.payload_channel"),
        ({"payload_channel": "aeron-spy:aeron:udp?endpoint=a:1"}, "bridge.payload_channel"),
        ({"control_channel": "aeron-spy:aeron:udp?endpoint=a:1"}, "bridge.control_channel"),
        ({"metadata_channel": "aeron:ipc", "metadata_stream_id": 5}, "bridge.metadata_channel"),
        ({"control_channel": BRIDGE["payload_channel"], "control_stream_id": 50_000}, "bridge.control_stream_id"),
        (
            {"metadata_channel": BRIDGE["payload_channel"], "metadata_stream_id": 50_000},
            "bridge.metadata_stream_id",
        ),
        ({"metadata_channel": BRIDGE["control_channel"], "metadata_stream_id": 9}, "bridge.metadata_channel"),
        ({"mtu_bytes": 8192, "payload_channel": BRIDGE["payload_channel"] + "|mtu=4096"}, "bridge.mtu_bytes"),
        (
            {
                "payload_channel": "aeron:udp?endpoint=224.0.1.1:40456|interface=127.0.0.1",
                "control_channel": "aeron:udp?endpoint=224.0.1.3:40456|interface=127.0.0.1",
            },
            "bridge.control_channel",
        ),
        ({"max_inflight_frames": 0}, "bridge.max_inflight_frames"),
        ({"chunk_size": 3}, "bridge.chunk_size"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_by_its_key(keys: dict[str, Any], key: str) -> None:
    assert refusal(**keys).key == key


def test_sizes_follow_the_mtu_of_the_channel() -> None:
    section = load(payload_channel=BRIDGE["payload_channel"] + "|mtu=8k").bridge
    assert (section.mtu_bytes, section.effective_chunk_bytes, section.first_chunk_bytes) == (8192, 8064, 7847)
    assert section.largest_frame_bytes == 7847 + 65_534 * 8064
    assert section.at_mtu(1408) is section
    assert load(chunk_bytes=100).bridge.at_mtu(1408).first_chunk_bytes == 100


def test_a_media_driver_whose_datagrams_are_too_small_is_refused() -> None:
    for dialect, least in (("specified", 346), ("2026-01", 358)):
        section = load(dialect=dialect).bridge
        assert section.at_mtu(least).first_chunk_bytes == 1
        with pytest.raises(ConfigError, match=f"at least {least}"):
            section.at_mtu(least - 1)


def test_a_variable_goes_over_the_file(tmp_path: Path) -> None:
    config = load(environ={"BRIDGE_ASSEMBLY_TIMEOUT_MS": "400", "BRIDGE_CRC32C": "true"})
    assert (config.bridge.assembly_timeout_ns, config.bridge.crc32c) == (400_000_000, True)
    assert known_keys(BridgeConfig)["bridge.dest_stream_id_range"] == "BRIDGE_DEST_STREAM_ID_RANGE"


# --- the local driver


def test_the_local_driver_is_where_the_bridge_says(tmp_path: Path) -> None:
    config = load(
        driver_control_stream_id=1001,
        local_descriptor_stream_id=1101,
        local_qos_stream_id=1201,
        local_metadata_stream_id=1301,
        allowed_base_dirs=["/dev/shm/here", "/dev/shm/there"],
        announce_period_ms=70,
    )
    driver = config.driver({})
    endpoints = driver.driver
    found = [it.stream_id for it in (endpoints.control, endpoints.descriptor, endpoints.qos, endpoints.metadata)]
    assert found == [1001, 1101, 1201, 1301]
    assert endpoints.announce == endpoints.control
    assert driver.shm.allowed_base_dirs == ("/dev/shm/here", "/dev/shm/there")
    assert driver.announce_period_ns == 70_000_000


def test_the_drivers_own_file_says_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "driver.toml"
    path.write_text("""
        [driver]
        control_stream_id = 1005
        qos_stream_id = 1205
        [profiles.small]
        payload_pools = [{pool_id = 1, stride_bytes = 4096}]
        [streams.camera]
        stream_id = 30005
    """)
    config = load(driver_config=str(path), local_metadata_stream_id=1399)
    driver = config.driver({}).driver
    assert (driver.control_stream_id, driver.qos_stream_id, driver.metadata_stream_id) == (1005, 1205, 1399)
    assert config.local_control_channel(config.driver({})) == driver.control_channel
    taken = load({"source_stream_id": 1}, role="receiver", driver_config=str(path), dest_stream_id_range="30000-30010")
    with pytest.raises(ConfigError, match=r"streams\.camera\.stream_id = 30005"):
        taken.driver({})


def test_destinations_are_chosen_where_the_driver_may_create_them() -> None:
    def chosen(ids: str, allowed: str) -> Range:
        config = load({"source_stream_id": 1}, role="receiver", dest_stream_id_range=ids)
        driver = DriverConfig.load(environ={}, overrides={"driver.stream_id_range": allowed})
        return allocatable(config, driver)

    assert chosen("20500-30500", "20000-29999") == Range(20_500, 29_999)
    config = load({"source_stream_id": 1}, role="receiver", dest_stream_id_range="40000-40010")
    with pytest.raises(ConfigError, match=r"driver\.stream_id_range = 20000-29999"):
        config.driver({})
    two = load({"source_stream_id": 1}, {"source_stream_id": 2}, role="receiver", dest_stream_id_range="29999-30010")
    with pytest.raises(ConfigError, match=r"2 ids that the driver may create.* only 29999-29999"):
        two.driver({})


@pytest.mark.parametrize(
    ("ids", "why"),
    [("", "stream_id_range is empty"), ('stream_id_range = "30000-30010"', "allow_dynamic_streams is false")],
)
def test_no_destination_is_chosen_where_the_driver_creates_none(tmp_path: Path, ids: str, why: str) -> None:
    """G29: refused at startup, by the mapping that has no id; those that name a stream of the driver are fine."""
    path = tmp_path / "driver.toml"
    path.write_text(f"""
        [driver]
        {ids}
        [profiles.small]
        payload_pools = [{{pool_id = 1, stride_bytes = 4096}}]
        [streams.camera]
        stream_id = 2000
    """)
    keys: dict[str, Any] = {"driver_config": str(path), "dest_stream_id_range": "30000-30010"}
    for mappings in ([MAPPING, {"source_stream_id": 1}], [MAPPING, {"source_stream_id": 1, "dest_stream_id": 0}]):
        with pytest.raises(ConfigError, match=why) as raised:
            load(*mappings, role="receiver", **keys).driver({})
        assert (raised.value.key, raised.value.value) == ("mappings[1].dest_stream_id", 0)
    assert load(MAPPING, role="receiver", **keys).driver({}).streams["camera"].stream_id == 2000
    assert load({"source_stream_id": 1}, role="sender", **keys).driver({})


@pytest.mark.parametrize(
    ("mappings", "keys"),
    [
        ([{"source_stream_id": 1}], {}),
        ([{"source_stream_id": 1}, {"source_stream_id": 2}], {"dest_stream_id_range": "30000-30000"}),
        ([{"source_stream_id": 1}], {"dest_stream_id_range": "50000-50005"}),
        ([{"source_stream_id": 1}], {"dest_stream_id_range": "1000-1000"}),
        ([{"source_stream_id": 1}, MAPPING], {"dest_stream_id_range": "1999-2001"}),
        (
            [{"source_stream_id": 1}],
            {"dest_stream_id_range": "30000-30010", "reserved_stream_id_ranges": ["30010-30020"]},
        ),
    ],
)
def test_a_range_that_overlaps_something_is_refused(mappings: list[dict[str, Any]], keys: dict[str, Any]) -> None:
    assert refusal(*mappings, role="receiver", **keys).key == "bridge.dest_stream_id_range"


# --- what is allowed and probably not meant


@pytest.mark.parametrize(
    ("mapping", "keys", "word"),
    [
        (MAPPING, {}, "metadata_channel is empty"),
        (MAPPING, {"payload_stream_id": 7}, "50000-59999"),
        (MAPPING, {"role": "receiver", "assembly_timeout_ms": 50}, "100-500"),
        (MAPPING, {"chunk_bytes": 2000, "mtu_bytes": 1408}, "1280"),
        (MAPPING | {"metadata_stream_id": 2001}, {}, "2001"),
    ],
)
def test_it_warns(mapping: dict[str, Any], keys: dict[str, Any], word: str) -> None:
    assert any(word in warning for warning in load(mapping, **keys).warnings())


def test_a_quiet_configuration() -> None:
    assert load(forward_metadata=False).warnings() == []
