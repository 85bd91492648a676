# SPDX-License-Identifier: Apache-2.0
"""Every setting of the UDP bridge, checked before anything starts.

    [bridge]        who it is, the UDP channels, limits, what is forwarded, where the local driver is
    [[mappings]]    which stream goes where: source_stream_id of one host becomes dest_stream_id of the other
    [control]       where the bridge hears commands as a service: see tensorpool.control.config

Names and defaults are the specification's. Ours, because it has none for them: which end this is (`role`, or
`direction` of a mapping), the local driver, channels of their own for what is received (`receive_*`; two hosts that
send to each other by unicast listen elsewhere than they send to), `max_inflight_frames`, and the private extensions
`crc32c` and `rewrite_progress_epoch`, which are off.
Bridge §2.3, §4, §5.2, §7.1, §9, §10; decisions G1, G2, G6, G9, G11, G14, G15, G20, G22, G29.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self, cast

import msgspec
from msgspec import Meta

from tensorpool import config
from tensorpool.channel import Endpoint, check_channel, check_endpoints
from tensorpool.config import U32, AeronStreamId, Name, PositiveU32, Range, StreamId, StreamIdRange, fill
from tensorpool.control.config import ControlConfig
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import ConfigError

IPC: Final = "aeron:ipc?term-length=4m"
MS: Final = 1_000_000  # nanoseconds
AERON_HEADER_BYTES: Final = 32
CHUNK_OVERHEAD_BYTES: Final = 57  # message header, fixed block, two length prefixes
HEADER_BYTES: Final = 256  # the slot header that chunk 0 carries
FIRST_CHUNK_OVERHEAD_BYTES: Final = AERON_HEADER_BYTES + CHUNK_OVERHEAD_BYTES + HEADER_BYTES  # G1: 345
MTU_MARGIN_BYTES: Final = 128  # §5.2
DEFAULT_MTU_BYTES: Final = 1408
MAX_MTU_BYTES: Final = 65_504
MAX_CHUNKS: Final = 65_535
MAX_PAYLOAD_BYTES: Final = 1 << 30
SUGGESTED_PAYLOAD_IDS: Final = Range(50_000, 59_999)  # §4
RECOMMENDED_TIMEOUT_MS: Final = Range(100, 500)  # §5.3a


def _check_udp(key: str, channel: str) -> None:
    uri = check_channel(key, channel)
    if uri.media != "udp" or uri.is_spy:
        raise ConfigError(key, channel, "an aeron:udp channel such as aeron:udp?endpoint=host:port")


def _check_publishable(key: str, channel: str) -> None:
    if check_channel(key, channel).is_spy:
        raise ConfigError(key, channel, "aeron:udp or aeron:ipc; nobody can publish on a spy")


def _check_optional_udp(key: str, channel: str) -> None:
    if channel:
        _check_udp(key, channel)


def _check_optional(key: str, channel: str) -> None:
    if channel:
        _check_publishable(key, channel)


UdpChannel = Annotated[str, Meta(description="an aeron:udp URI", extra={"check": _check_udp})]
ControlChannel = Annotated[str, Meta(description="an Aeron URI", extra={"check": _check_publishable})]
OptionalUdpChannel = Annotated[
    str, Meta(description='an aeron:udp URI, or "" for none', extra={"check": _check_optional_udp})
]
OptionalChannel = Annotated[str, Meta(description='an Aeron URI, or "" for none', extra={"check": _check_optional})]
OptionalAeronStreamId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
OptionalStreamId = Annotated[int, Meta(ge=0, le=2**32 - 2)]
MtuBytes = Annotated[int, Meta(ge=FIRST_CHUNK_OVERHEAD_BYTES + 1, le=MAX_MTU_BYTES)]
ChunkBytes = Annotated[int, Meta(ge=1, le=65_535)]
PayloadBytes = Annotated[int, Meta(ge=1, le=MAX_PAYLOAD_BYTES)]
Inflight = Annotated[int, Meta(ge=1, le=4096)]
Role = Annotated[Literal["", "sender", "receiver", "both"], Meta(description='"sender", "receiver" or "both"')]
Direction = Annotated[Literal["", "send", "receive"], Meta(description='"send" or "receive"')]
Ranges = tuple[StreamIdRange, ...]

_UNSAID: Final = cast("bool", msgspec.UNSET)  # what no file can say


class BridgeSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[bridge]`: identity, UDP endpoints, limits, what is forwarded, and the local side."""

    instance_id: Name
    payload_channel: UdpChannel
    payload_stream_id: AeronStreamId
    control_channel: ControlChannel
    control_stream_id: AeronStreamId
    role: Role = ""  # what the mappings say
    mtu_bytes: MtuBytes = 0  # payload_channel's mtu=, else 1408
    chunk_bytes: ChunkBytes = 0  # mtu_bytes - 128
    max_chunk_bytes: ChunkBytes = 65_535
    max_payload_bytes: PayloadBytes = MAX_PAYLOAD_BYTES
    max_inflight_frames: Inflight = 16
    assembly_timeout_ms: PositiveU32 = 250
    dest_stream_id_range: StreamIdRange = Range()
    reserved_stream_id_ranges: Ranges = ()  # of other bridges on the destination host
    forward_metadata: bool = _UNSAID  # true; without metadata_channel it is as good as false
    metadata_channel: OptionalUdpChannel = ""
    metadata_stream_id: OptionalAeronStreamId = 0
    source_metadata_stream_id: AeronStreamId = 1300
    forward_qos: bool = False
    forward_progress: bool = False
    rewrite_progress_epoch: bool = False  # G6: to the local epoch, instead of the source's
    crc32c: bool = False
    receive_payload_channel: UdpChannel = ""  # payload_channel
    receive_payload_stream_id: AeronStreamId = 0
    receive_control_channel: ControlChannel = ""
    receive_control_stream_id: AeronStreamId = 0
    receive_metadata_channel: OptionalUdpChannel = ""
    receive_metadata_stream_id: OptionalAeronStreamId = 0
    aeron_dir: str = ""
    driver_config: str = ""  # the local driver's TOML file: what is not said here is taken from it
    driver_control_channel: OptionalChannel = ""
    driver_control_stream_id: OptionalAeronStreamId = 0
    local_descriptor_channel: OptionalChannel = ""
    local_descriptor_stream_id: OptionalAeronStreamId = 0
    local_control_channel: OptionalChannel = ""
    local_metadata_channel: OptionalChannel = ""
    local_metadata_stream_id: OptionalAeronStreamId = 0
    local_qos_channel: OptionalChannel = ""
    local_qos_stream_id: OptionalAeronStreamId = 0
    allowed_base_dirs: tuple[str, ...] = ()  # where the local driver's memory may lie
    announce_period_ms: U32 = 0  # how often announces are expected (G17); 0: as the local driver announces

    def __post_init__(self) -> None:
        if self.forward_metadata is True and not self.metadata_channel and not self.receive_metadata_channel:
            accepted = "an aeron:udp URI, since bridge.forward_metadata = true was asked for; or set that to false"
            raise ConfigError("bridge.metadata_channel", "", accepted)  # G14
        fill(self, "forward_metadata", _UNSAID, True)
        mtu = _mtu_of("bridge.payload_channel", self.payload_channel)
        fill(self, "mtu_bytes", 0, mtu or DEFAULT_MTU_BYTES)
        fill(self, "chunk_bytes", 0, max(self.mtu_bytes - MTU_MARGIN_BYTES, 1))
        for name in ("payload", "control", "metadata"):
            fill(self, f"receive_{name}_channel", "", getattr(self, f"{name}_channel"))
            fill(self, f"receive_{name}_stream_id", 0, getattr(self, f"{name}_stream_id"))
        if not self.driver_config:
            fill(self, "driver_control_channel", "", IPC)
            fill(self, "driver_control_stream_id", 0, 1000)
            fill(self, "local_descriptor_channel", "", IPC)
            fill(self, "local_descriptor_stream_id", 0, 1100)
            fill(self, "local_control_channel", "", self.driver_control_channel)
            fill(self, "local_metadata_channel", "", IPC)
            fill(self, "local_metadata_stream_id", 0, 1300)
            fill(self, "local_qos_channel", "", IPC)
            fill(self, "local_qos_stream_id", 0, 1200)

    @property
    def effective_chunk_bytes(self) -> int:
        """The most payload bytes that a chunk carries, and that a receiver takes (§5.2, §10)."""
        return min(self.chunk_bytes, self.mtu_bytes - MTU_MARGIN_BYTES, self.max_chunk_bytes)

    @property
    def first_chunk_bytes(self) -> int:
        """The most that chunk 0 carries beside its header, so that it fits the MTU (G1)."""
        return min(self.effective_chunk_bytes, self.mtu_bytes - FIRST_CHUNK_OVERHEAD_BYTES)

    @property
    def largest_frame_bytes(self) -> int:
        """The largest payload that MAX_CHUNKS chunks hold (G2)."""
        return min(self.first_chunk_bytes + (MAX_CHUNKS - 1) * self.effective_chunk_bytes, self.max_payload_bytes)

    @property
    def assembly_timeout_ns(self) -> int:
        return self.assembly_timeout_ms * MS

    @property
    def payload(self) -> Endpoint:
        return Endpoint(self.payload_channel, self.payload_stream_id)

    @property
    def control(self) -> Endpoint:
        return Endpoint(self.control_channel, self.control_stream_id)

    @property
    def metadata(self) -> Endpoint | None:
        """Where metadata go over the network; None: they stay at home."""
        return self._metadata(self.metadata_channel, self.metadata_stream_id)

    @property
    def receive_payload(self) -> Endpoint:
        return Endpoint(self.receive_payload_channel, self.receive_payload_stream_id)

    @property
    def receive_control(self) -> Endpoint:
        return Endpoint(self.receive_control_channel, self.receive_control_stream_id)

    @property
    def receive_metadata(self) -> Endpoint | None:
        return self._metadata(self.receive_metadata_channel, self.receive_metadata_stream_id)

    def _metadata(self, channel: str, stream_id: int) -> Endpoint | None:
        return Endpoint(channel, stream_id) if self.forward_metadata and channel else None


class MappingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`[[mappings]]`: one stream from its source to its destination.

    `dest_stream_id` 0 lets the receiver choose one of `bridge.dest_stream_id_range`. `profile` only says what is
    expected: an attach carries no profile (G15).
    """

    source_stream_id: StreamId
    dest_stream_id: OptionalStreamId = 0
    direction: Direction = ""  # what bridge.role says
    profile: str = ""
    metadata_stream_id: OptionalStreamId = 0  # dest_stream_id
    source_control_stream_id: OptionalAeronStreamId = 0
    dest_control_stream_id: OptionalAeronStreamId = 0

    def __post_init__(self) -> None:
        fill(self, "metadata_stream_id", 0, self.dest_stream_id)

    @property
    def name(self) -> str:
        """How logs and metrics call it."""
        return f"{self.source_stream_id}->{self.dest_stream_id or 'auto'}"

    @property
    def is_sent(self) -> bool:
        return self.direction == "send"

    @property
    def has_control(self) -> bool:
        """Whether progress and QoS can be forwarded (§9)."""
        return bool(self.source_control_stream_id and self.dest_control_stream_id)


class BridgeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one bridge, complete and consistent.

    >>> config = BridgeConfig.load(Path("bridge.toml"))     # doctest: +SKIP
    >>> config.bridge.effective_chunk_bytes                 # doctest: +SKIP
    1280

    Raises ConfigError, however it is made.
    """

    bridge: BridgeSection
    mappings: tuple[MappingConfig, ...]
    control: ControlConfig = msgspec.field(default_factory=ControlConfig)

    @classmethod
    def load(
        cls,
        path: Path | str | None = None,
        environ: Mapping[str, str] = os.environ,
        overrides: Mapping[str, Any] = MappingProxyType({}),
        **tables: Any,
    ) -> Self:
        """Read a file; variables and then flags go over it. Without a file, `bridge=` and `mappings=` are its tables.

        Raises ConfigError.
        """
        where = None if path is None else Path(path)
        return config.load(cls, path=where, built_in=tables, environ=environ, overrides=overrides)

    def __post_init__(self) -> None:
        if not self.mappings:
            accepted = "at least one table [[mappings]] with source_stream_id and dest_stream_id"
            raise ConfigError("mappings", [], accepted)
        msgspec.structs.force_setattr(self, "mappings", tuple(_directed(self.bridge.role, self.mappings)))
        config.check(self)
        _check_sizes(self.bridge)
        _check_channels(self)
        _check_mappings(self.mappings)
        _check_forwarding(self)
        _check_range(self)

    @property
    def sent(self) -> tuple[MappingConfig, ...]:
        return tuple(mapping for mapping in self.mappings if mapping.is_sent)

    @property
    def received(self) -> tuple[MappingConfig, ...]:
        return tuple(mapping for mapping in self.mappings if not mapping.is_sent)

    def driver(self, environ: Mapping[str, str] = os.environ) -> DriverConfig:
        """The local driver's settings as its clients need them: its file, with what this configuration says over it.

        Raises ConfigError, also for a destination range that the driver would refuse (G29).
        """
        section = self.bridge
        ours: dict[str, object] = {
            "driver.control_channel": section.driver_control_channel,
            "driver.control_stream_id": section.driver_control_stream_id,
            "driver.descriptor_channel": section.local_descriptor_channel,
            "driver.descriptor_stream_id": section.local_descriptor_stream_id,
            "driver.metadata_channel": section.local_metadata_channel,
            "driver.metadata_stream_id": section.local_metadata_stream_id,
            "driver.qos_channel": section.local_qos_channel,
            "driver.qos_stream_id": section.local_qos_stream_id,
            "policies.announce_period_ms": section.announce_period_ms,
        }
        if section.allowed_base_dirs:
            first, *_ = section.allowed_base_dirs
            ours |= {"shm.base_dir": first, "shm.allowed_base_dirs": list(section.allowed_base_dirs)}
        given = {key: value for key, value in ours.items() if value}
        settings = DriverConfig.load(section.driver_config or None, environ=environ, overrides=given)
        check_against_driver(self, settings)
        return settings

    def local_control_channel(self, driver: DriverConfig) -> str:
        """The channel of source_control_stream_id and dest_control_stream_id."""
        return self.bridge.local_control_channel or driver.driver.control_channel

    def dump(self) -> dict[str, object]:
        """Every key with its value in effect."""
        return config.dump(self)

    def warnings(self) -> list[str]:
        """What is allowed and probably not meant."""
        return list(_warnings(self))


def check_against_driver(settings: BridgeConfig, driver: DriverConfig) -> None:
    """§4: destinations obey the driver's rules, and keep clear of what it uses itself. Raises ConfigError."""
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


def allocatable(settings: BridgeConfig, driver: DriverConfig) -> Range:
    """The destination ids that this bridge may choose and the driver may create (G29)."""
    ids, allowed = settings.bridge.dest_stream_id_range, driver.driver.stream_id_range
    if not driver.policies.allow_dynamic_streams or not ids.overlaps(allowed):
        return Range()
    return Range(max(ids.first, allowed.first), min(ids.last, allowed.last))


def _mtu_of(key: str, channel: str) -> int | None:
    """What the channel itself says, in bytes."""
    mtu = check_channel(key, channel).terms.get("mtu")
    return mtu if isinstance(mtu, int) else None


def _directed(role: str, mappings: tuple[MappingConfig, ...]) -> Iterator[MappingConfig]:
    """G9: each mapping with a direction, its own or that of the role."""
    of_role = {"sender": "send", "receiver": "receive"}.get(role, "")
    for index, mapping in enumerate(mappings):
        key = f"mappings[{index}].direction"
        if not mapping.direction and not of_role:
            accepted = '"send" or "receive"; or bridge.role = "sender" or "receiver" for all mappings'
            raise ConfigError(key, mapping.direction, accepted)
        if mapping.direction and of_role and mapping.direction != of_role:
            accepted = f'"{of_role}", since bridge.role = "{role}"; or bridge.role = "both"'
            raise ConfigError(key, mapping.direction, accepted)
        yield mapping if mapping.direction else msgspec.structs.replace(mapping, direction=of_role)


def _check_sizes(section: BridgeSection) -> None:
    mtu = _mtu_of("bridge.payload_channel", section.payload_channel)
    if mtu is not None and section.mtu_bytes > mtu:
        accepted = f"at most the mtu={mtu} of bridge.payload_channel: a chunk is one datagram"
        raise ConfigError("bridge.mtu_bytes", section.mtu_bytes, accepted)


def _check_channels(settings: BridgeConfig) -> None:
    """§2.3, §7.2: ids tell apart what travels on one channel; metadata do not use the control channel."""
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
            accepted = f"an id of its own: {other} is the same channel, and only ids tell their messages apart"
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


def _check_mappings(mappings: tuple[MappingConfig, ...]) -> None:
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


def _check_forwarding(settings: BridgeConfig) -> None:
    """§9: progress and QoS need both control streams."""
    section = settings.bridge
    for flag in ("forward_progress", "forward_qos"):
        if not getattr(section, flag):
            continue
        for index, mapping in enumerate(settings.mappings):
            for name in ("source_control_stream_id", "dest_control_stream_id"):
                if not getattr(mapping, name):
                    accepted = f"1 to 2147483647, since bridge.{flag} = true"
                    raise ConfigError(f"mappings[{index}].{name}", 0, accepted)


def _check_range(settings: BridgeConfig) -> None:
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


def _warnings(settings: BridgeConfig) -> Iterator[str]:
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
