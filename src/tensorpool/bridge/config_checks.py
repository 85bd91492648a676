# SPDX-License-Identifier: Apache-2.0
"""The rules of a bridge's configuration that concern several keys, and warnings about what is probably not meant.

Each check raises ConfigError. Bridge §2.3, §4, §5.2, §7.2, §9, §10; decisions G9, G29.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from tensorpool.channel import Endpoint, check_channel, check_endpoints
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import ConfigError
from tensorpool.settings import Range

if TYPE_CHECKING:
    from tensorpool.bridge.config import BridgeConfig, BridgeSection, MappingConfig

DIRECTION_OF_ROLE: Final[Mapping[str, str]] = {"sender": "send", "receiver": "receive"}
SUGGESTED_PAYLOAD_IDS: Final = Range(50_000, 59_999)  # §4
RECOMMENDED_TIMEOUT_MS: Final = Range(100, 500)  # §5.3a


def check_directions(settings: BridgeConfig) -> None:
    """G9: each mapping has a direction, its own or that of the role, and they do not contradict each other."""
    role = settings.bridge.role
    of_role = DIRECTION_OF_ROLE.get(role, "")
    for index, mapping in enumerate(settings.mappings):
        key = f"mappings[{index}].direction"
        if not mapping.direction:
            accepted = '"send" or "receive"; or bridge.role = "sender" or "receiver" for all mappings'
            raise ConfigError(key, mapping.direction, accepted)
        if of_role and mapping.direction != of_role:
            accepted = f'"{of_role}", since bridge.role = "{role}"; or bridge.role = "both"'
            raise ConfigError(key, mapping.direction, accepted)


def mtu_of(key: str, channel: str) -> int | None:
    """What the channel itself says, in bytes."""
    mtu = check_channel(key, channel).terms.get("mtu")
    return mtu if isinstance(mtu, int) else None


def check_against_driver(settings: BridgeConfig, driver: DriverConfig) -> None:
    """§4: destinations obey the driver's rules, and keep clear of what it uses itself. Raises ConfigError."""
    if settings.bridge.driver_config:
        _check_profiles(settings.mappings, driver)
    ids = settings.bridge.dest_stream_id_range
    if not ids:
        return
    key = "bridge.dest_stream_id_range"
    section = driver.driver
    used = {
        "driver.control_stream_id": section.control_stream_id,
        "driver.announce_stream_id": section.announce_stream_id,
        "driver.qos_stream_id": section.qos_stream_id,
        "driver.descriptor_stream_id": section.descriptor_stream_id,
        "driver.metadata_stream_id": section.metadata_stream_id,
    }
    used |= {f"streams.{name}.stream_id": stream.stream_id for name, stream in driver.streams.items()}
    _refuse_members(key, ids, used)
    for name in ("descriptor_stream_id_range", "control_stream_id_range"):
        _refuse_overlap(key, ids, f"driver.{name}", getattr(section, name))
    allowed = section.stream_id_range
    if allowed and not ids.overlaps(allowed):
        raise ConfigError(key, str(ids), f"ids of driver.stream_id_range = {allowed}: the driver creates no others")
    wanting = [index for index, it in enumerate(settings.mappings) if not it.is_sent and not it.dest_stream_id]
    if not wanting:
        return
    if not driver.policies.allow_dynamic_streams:
        why = "policies.allow_dynamic_streams is false" if allowed else "driver.stream_id_range is empty"
        accepted = f"the id of a stream that the local driver has: {why} there, so that it creates none"
        raise ConfigError(f"mappings[{wanting[0]}].dest_stream_id", 0, accepted)
    possible = allocatable(settings, driver)
    if len(wanting) > len(possible):
        accepted = (
            f"{len(wanting)} ids that the driver may create, one for each mapping without a dest_stream_id; only "
            f"{possible} is in driver.stream_id_range = {allowed} too"
        )
        raise ConfigError(key, str(ids), accepted)


def _check_profiles(mappings: tuple[MappingConfig, ...], driver: DriverConfig) -> None:
    """§10: the profile of a mapping is one of the local driver's."""
    for index, mapping in enumerate(mappings):
        if mapping.profile and not mapping.is_sent and mapping.profile not in driver.profiles:
            accepted = f"a profile of bridge.driver_config: {', '.join(driver.profiles)}"
            raise ConfigError(f"mappings[{index}].profile", mapping.profile, accepted)


def allocatable(settings: BridgeConfig, driver: DriverConfig) -> Range:
    """The destination ids that this bridge may choose and the driver may create (G29)."""
    ids, allowed = settings.bridge.dest_stream_id_range, driver.driver.stream_id_range
    if not driver.policies.allow_dynamic_streams or not ids.overlaps(allowed):
        return Range()
    return Range(max(ids.first, allowed.first), min(ids.last, allowed.last))


def check_sizes(section: BridgeSection) -> None:
    if 0 < section.mtu_bytes < section.least_mtu_bytes:
        accepted = f"at least {section.least_mtu_bytes}, for a slot header and a byte of its frame; or 0"
        raise ConfigError("bridge.mtu_bytes", section.mtu_bytes, accepted)
    mtu = mtu_of("bridge.payload_channel", section.payload_channel)
    if mtu is not None and section.mtu_bytes > mtu:
        accepted = f"at most the mtu={mtu} of bridge.payload_channel: a chunk is one datagram"
        raise ConfigError("bridge.mtu_bytes", section.mtu_bytes, accepted)


def check_channels(settings: BridgeConfig) -> None:
    """§2.3, §7.2: ids distinguish the messages of one channel; metadata do not use the control channel."""
    section = settings.bridge
    places: dict[str, Endpoint] = {}
    if settings.sent:
        places |= {"bridge.payload_channel": section.payload, "bridge.control_channel": section.control}
        places |= {} if section.metadata is None else {"bridge.metadata_channel": section.metadata}
    if settings.received:
        for name in ("payload", "control", "metadata"):
            own, usual = getattr(section, f"receive_{name}"), getattr(section, name)
            if own is not None:
                places[f"bridge.{name}_channel" if own == usual else f"bridge.receive_{name}_channel"] = own
    if section.forward_metadata and settings.sent and section.metadata_channel and not section.metadata_stream_id:
        raise ConfigError("bridge.metadata_stream_id", 0, "1 to 2147483647: metadata are forwarded")
    has_receive = settings.received and section.receive_metadata_channel
    if section.forward_metadata and has_receive and not section.receive_metadata_stream_id:
        raise ConfigError("bridge.metadata_stream_id", 0, "1 to 2147483647: metadata are forwarded")
    seen: dict[object, tuple[str, str]] = {}
    for key, endpoint in places.items():
        kind = key.removeprefix("bridge.").removeprefix("receive_")
        address = check_channel(key, endpoint.channel).address
        other, others_kind = seen.setdefault((address, endpoint.stream_id), (key, kind))
        if others_kind != kind:
            stream_key = key.replace("_channel", "_stream_id")
            accepted = f"an id of its own: {other} is the same channel, and only ids distinguish their messages"
            raise ConfigError(stream_key, endpoint.stream_id, accepted)
    controls = {key: check_channel(key, it.channel).address for key, it in places.items() if "control_ch" in key}
    for key, endpoint in places.items():
        if "metadata_ch" in key and check_channel(key, endpoint.channel).address in controls.values():
            accepted = f"another channel than {' and '.join(controls)} (an endpoint of its own)"
            raise ConfigError(key, endpoint.channel, accepted)
    _check_groups(places)
    sent = {key: place for key, place in places.items() if "receive_" not in key}
    check_endpoints(sent)
    settings.control.check_beside(sent)


def _check_groups(places: Mapping[str, Endpoint]) -> None:
    """Linux hands every group of a host to each socket that is bound to its port: status messages would get lost."""
    seen: dict[str, tuple[str, str]] = {}
    for key, endpoint in places.items():
        group, _, port = check_channel(key, endpoint.channel).parameters.get("endpoint", "").rpartition(":")
        try:
            if not ipaddress.ip_address(group.strip("[]").partition("%")[0]).is_multicast:
                continue
        except ValueError:
            continue  # a name
        other, others_group = seen.setdefault(port, (key, group))
        if others_group != group:
            raise ConfigError(key, endpoint.channel, f"a port of its own: {other} is another group with this port")


def check_mappings(mappings: tuple[MappingConfig, ...]) -> None:
    """§2.3: each stream has one place, and what came in one direction does not go back in the other."""
    for name in ("source_stream_id", "dest_stream_id"):
        seen: dict[tuple[str, int], int] = {}
        for index, mapping in enumerate(mappings):
            stream_id = getattr(mapping, name)
            if not stream_id:
                continue
            first = seen.setdefault((mapping.direction, stream_id), index)
            if first != index:
                accepted = f"an id of its own; mappings[{first}] has this one in the same direction"
                raise ConfigError(f"mappings[{index}].{name}", stream_id, accepted)
    names = ("source_stream_id", "dest_stream_id")
    sent = {
        getattr(mapping, name): f"mappings[{index}].{name}"
        for index, mapping in enumerate(mappings)
        if mapping.is_sent
        for name in names
        if getattr(mapping, name)
    }
    for index, mapping in enumerate(mappings):
        for name in () if mapping.is_sent else names:
            stream_id = getattr(mapping, name)
            if stream_id in sent:
                accepted = (
                    f"an id that no mapping of the other direction uses; {sent[stream_id]} is the same, and frames "
                    "would come back to where they came from"
                )
                raise ConfigError(f"mappings[{index}].{name}", stream_id, accepted)


def check_forwarding(settings: BridgeConfig) -> None:
    """§9: progress and QoS need both control streams, trace links the metadata stream."""
    section = settings.bridge
    if section.forward_traces and section.metadata is None and section.receive_metadata is None:
        raise ConfigError("bridge.forward_traces", True, "false without bridge.metadata_channel, on which links travel")
    for flag in ("forward_progress", "forward_qos"):
        if not getattr(section, flag):
            continue
        for index, mapping in enumerate(settings.mappings):
            for name in ("source_control_stream_id", "dest_control_stream_id"):
                if not getattr(mapping, name):
                    accepted = f"1 to 2147483647, since bridge.{flag} = true"
                    raise ConfigError(f"mappings[{index}].{name}", 0, accepted)


def check_range(settings: BridgeConfig) -> None:
    """§4, §10: where destinations are chosen from. Nothing else lies there."""
    section, key = settings.bridge, "bridge.dest_stream_id_range"
    ids = section.dest_stream_id_range
    for index, mapping in enumerate(settings.mappings):
        if mapping.dest_stream_id == 0 and not mapping.is_sent and not ids:
            accepted = f'"first-last" or [first, last]: mappings[{index}] has no dest_stream_id'
            raise ConfigError(key, "", accepted)
    if not ids:
        return
    used = {
        "bridge.payload_stream_id": section.payload_stream_id,
        "bridge.control_stream_id": section.control_stream_id,
        "bridge.metadata_stream_id": section.metadata_stream_id,
        "bridge.source_metadata_stream_id": section.source_metadata_stream_id,
        "bridge.receive_payload_stream_id": section.receive_payload_stream_id,
        "bridge.receive_control_stream_id": section.receive_control_stream_id,
        "bridge.receive_metadata_stream_id": section.receive_metadata_stream_id,
        "bridge.driver_control_stream_id": section.driver_control_stream_id,
        "bridge.local_descriptor_stream_id": section.local_descriptor_stream_id,
        "bridge.local_metadata_stream_id": section.local_metadata_stream_id,
        "bridge.local_qos_stream_id": section.local_qos_stream_id,
    }
    for index, mapping in enumerate(settings.mappings):
        used |= {
            f"mappings[{index}].{name}": getattr(mapping, name)
            for name in (
                "dest_stream_id",
                "metadata_stream_id",
                "source_control_stream_id",
                "dest_control_stream_id",
            )
        }
        if mapping.is_sent:
            used[f"mappings[{index}].source_stream_id"] = mapping.source_stream_id
    _refuse_members(key, ids, used)
    for index, reserved in enumerate(section.reserved_stream_id_ranges):
        _refuse_overlap(key, ids, f"bridge.reserved_stream_id_ranges[{index}]", reserved)
    wanted = sum(mapping.dest_stream_id == 0 for mapping in settings.received)
    if wanted > len(ids):
        raise ConfigError(key, str(ids), f"at least {wanted} ids, one for each mapping without a dest_stream_id")


def _refuse_members(key: str, ids: Range, used: Mapping[str, int]) -> None:
    for name, stream_id in used.items():
        if stream_id in ids:
            raise ConfigError(key, str(ids), f"ids that nothing else uses; {name} = {stream_id} is among them")


def _refuse_overlap(key: str, ids: Range, name: str, other: Range) -> None:
    if other and ids.overlaps(other):
        raise ConfigError(key, str(ids), f"ids outside of {name} = {other}")


def warnings(settings: BridgeConfig) -> Iterator[str]:
    section = settings.bridge
    if section.forward_metadata and not section.metadata_channel and not section.receive_metadata_channel:
        yield "bridge.metadata_channel is empty: no metadata are forwarded, consumers of bridged streams have none"
    if section.payload_stream_id not in SUGGESTED_PAYLOAD_IDS:
        yield f"bridge.payload_stream_id = {section.payload_stream_id}: {SUGGESTED_PAYLOAD_IDS} is the usual range"
    if settings.received and section.assembly_timeout_ms not in RECOMMENDED_TIMEOUT_MS:
        yield (
            f"bridge.assembly_timeout_ms = {section.assembly_timeout_ms}: {RECOMMENDED_TIMEOUT_MS} is recommended; "
            "large frames on slow links need more"
        )
    if section.chunk_bytes > section.effective_chunk_bytes:
        yield (
            f"bridge.chunk_bytes = {section.chunk_bytes}: chunks have {section.effective_chunk_bytes} bytes, "
            "because of bridge.mtu_bytes or bridge.max_chunk_bytes"
        )
    for index, mapping in enumerate(settings.mappings):
        if mapping.dest_stream_id and mapping.metadata_stream_id != mapping.dest_stream_id:
            yield (
                f"mappings[{index}].metadata_stream_id = {mapping.metadata_stream_id} is not its dest_stream_id "
                f"{mapping.dest_stream_id}: consumers will not find the metadata of its frames"
            )
