# SPDX-License-Identifier: Apache-2.0
"""Every setting of the UDP bridge, checked before anything starts.

    [bridge]        who it is, the UDP channels, limits, what is forwarded, where the local driver is
    [[mappings]]    which stream goes where: source_stream_id of one host becomes dest_stream_id of the other
    [control]       where the bridge receives commands as a service: see tensorpool.control.config

Names and defaults are the specification's. Ours, because it has none for them: which end this is (`role`, or
`direction` of a mapping), the local driver, channels of their own for what is received (`receive_*`; two hosts that
send to each other by unicast listen elsewhere than they send to), `max_inflight_frames`, and the private extensions
`crc32c`, `mac_key_file` and `rewrite_progress_epoch`, which are off; and `dialect` (K9).
Bridge §2.3, §4, §5.2, §7.1, §9, §10; decisions G1, G2, G6, G9, G11, G14, G15, G20, G22, G29.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from tensorpool import settings
from tensorpool.bridge import config_checks as checks
from tensorpool.bridge.config_checks import DIRECTION_OF_ROLE, mtu_of
from tensorpool.channel import Endpoint, check_channel
from tensorpool.control.config import ControlConfig
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import ConfigError
from tensorpool.settings import (
    IPC,
    MS,
    U32,
    AeronStreamId,
    Configuration,
    Derived,
    EndpointOf,
    Name,
    OptionalChannel,
    PositiveU32,
    PublishableChannel,
    Range,
    StreamId,
    StreamIdRange,
)

AERON_HEADER_BYTES: Final = 32
CHUNK_OVERHEAD_BYTES: Final = 57  # message header, fixed block, two length prefixes
TRACED_BYTES: Final = 12  # by which a traced chunk is longer
HEADER_BYTES: Final = 256  # the slot header that chunk 0 carries
FIRST_CHUNK_OVERHEAD_BYTES: Final = AERON_HEADER_BYTES + CHUNK_OVERHEAD_BYTES + HEADER_BYTES  # G1: 345
MTU_MARGIN_BYTES: Final = 128  # §5.2
MAX_MTU_BYTES: Final = 65_504
MAX_CHUNKS: Final = 65_535
MAX_PAYLOAD_BYTES: Final = 1 << 30


def _check_udp(key: str, channel: str) -> None:
    uri = check_channel(key, channel)
    if uri.media != "udp" or uri.is_spy:
        raise ConfigError(key, channel, "an aeron:udp channel such as aeron:udp?endpoint=host:port")


def _check_optional_udp(key: str, channel: str) -> None:
    if channel:
        _check_udp(key, channel)


def _check_network(key: str, network: str) -> None:
    try:
        ipaddress.ip_network(network)
    except ValueError as error:
        raise ConfigError(key, network, f"an address or a network such as 10.0.0.0/24; {error}") from None


SourceNetwork = Annotated[str, Meta(description="an IP address or network", extra={"check": _check_network})]
UdpChannel = Annotated[str, Meta(description="an aeron:udp URI", extra={"check": _check_udp})]
OptionalUdpChannel = Annotated[
    str, Meta(description='an aeron:udp URI, or "" for none', extra={"check": _check_optional_udp})
]
OptionalAeronStreamId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
OptionalStreamId = Annotated[int, Meta(ge=0, le=2**32 - 2)]
MtuBytes = Annotated[int, Meta(ge=0, le=MAX_MTU_BYTES)]
ChunkBytes = Annotated[int, Meta(ge=1, le=65_535)]
OptionalChunkBytes = Annotated[int, Meta(ge=0, le=65_535)]
PayloadBytes = Annotated[int, Meta(ge=1, le=MAX_PAYLOAD_BYTES)]
Inflight = Annotated[int, Meta(ge=1, le=4096)]
Role = Annotated[Literal["", "sender", "receiver", "both"], Meta(description='"sender", "receiver" or "both"')]
Dialect = Annotated[Literal["specified", "2026-01"], Meta(description='"specified" or "2026-01"')]
Direction = Annotated[Literal["", "send", "receive"], Meta(description='"send" or "receive"')]
Ranges = tuple[StreamIdRange, ...]


def _mtu_bytes(table: Any, _: Any) -> int:
    return mtu_of("bridge.payload_channel", table.payload_channel) or 0


def _direction(_: Any, root: Any) -> str:
    return DIRECTION_OF_ROLE.get(root.bridge.role, "")


def _unless_in_file(value: Any) -> Callable[[Any, Any], Any]:
    """The default of a key of the local driver, unless bridge.driver_config names the file to take it from."""
    return lambda table, _: type(value)() if table.driver_config else value


LOCAL: Final = "as in bridge.driver_config, or the driver's default"
LocalChannel = Annotated[OptionalChannel, Derived(LOCAL, _unless_in_file(IPC))]


class BridgeSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[bridge]`: identity, UDP endpoints, limits, what is forwarded, and the local side."""

    instance_id: Name
    """Names this bridge in logs and in its service tag."""
    payload_channel: UdpChannel
    """Where chunks of frames are sent."""
    payload_stream_id: AeronStreamId
    """The Aeron stream id of payload_channel."""
    control_channel: PublishableChannel
    """Where announces, progress and QoS are sent."""
    control_stream_id: AeronStreamId
    """The Aeron stream id of control_channel."""
    role: Role = ""
    """The end of the link that this bridge is, for all mappings; "" leaves it to their directions."""
    mtu_bytes: Annotated[MtuBytes, Derived("payload_channel's mtu=, or 0", _mtu_bytes)]
    """The size of a datagram, into which a chunk fits; 0 is the media driver's where frames are sent, and the sender's
    where they are received."""
    chunk_bytes: OptionalChunkBytes = 0
    """The payload bytes of a chunk, at most; 0 is as many as fit: the MTU less 128."""
    dialect: Dialect = "specified"
    """How chunks are sent: as specified, or as other implementations do since January 2026, with the frame's trace id
    and a checksum of each chunk; both are received."""
    max_chunk_bytes: ChunkBytes = 65_535
    """A received chunk with more payload bytes is dropped."""
    max_payload_bytes: PayloadBytes = MAX_PAYLOAD_BYTES
    """A frame with more payload bytes is dropped."""
    max_inflight_frames: Inflight = 16
    """How many frames of a stream are assembled at a time."""
    allow_from: tuple[SourceNetwork, ...] = ()
    """The addresses and networks of hosts whose streams are received, such as "10.0.0.7" or "10.0.0.0/24"; none listed
    is every host."""
    assembly_timeout_ms: PositiveU32 = 250
    """A frame that is not complete so long after its first chunk is dropped."""
    dest_stream_id_range: StreamIdRange = Range()
    """The ids for mappings without a dest_stream_id."""
    reserved_stream_id_ranges: Ranges = ()
    """Ranges of other bridges on the destination host, which dest_stream_id_range must not meet."""
    forward_metadata: bool = True
    """Forward names and metadata; without a metadata channel nothing is forwarded, with a warning."""
    metadata_channel: OptionalUdpChannel = ""
    """Where names and metadata are sent."""
    metadata_stream_id: OptionalAeronStreamId = 0
    """The Aeron stream id of metadata_channel."""
    source_metadata_stream_id: AeronStreamId = 1300
    """The Aeron stream id on which local producers publish names and metadata."""
    forward_qos: bool = False
    """Forward QoS reports; every mapping needs both control stream ids."""
    forward_traces: bool = False
    """Forward trace links, on the metadata channel; the same at both ends."""
    forward_progress: bool = False
    """Forward the progress of frames; every mapping needs both control stream ids."""
    rewrite_progress_epoch: bool = False
    """Give forwarded progress the local epoch instead of the source's (G6)."""
    crc32c: bool = False
    """Append a checksum to every frame and check it; the same at both ends."""
    mac_key_file: str = ""
    """A file with a secret of 16 to 64 bytes that both ends share: every frame gets an authentication code instead of a
    checksum, and one without the right code is dropped; "" for none."""
    receive_payload_channel: Annotated[UdpChannel, Derived("bridge.payload_channel")]
    """Where chunks are received, if elsewhere than they are sent to."""
    receive_payload_stream_id: Annotated[AeronStreamId, Derived("bridge.payload_stream_id")]
    """The Aeron stream id of receive_payload_channel."""
    receive_control_channel: Annotated[PublishableChannel, Derived("bridge.control_channel")]
    """Where announces, progress and QoS are received."""
    receive_control_stream_id: Annotated[AeronStreamId, Derived("bridge.control_stream_id")]
    """The Aeron stream id of receive_control_channel."""
    receive_metadata_channel: Annotated[OptionalUdpChannel, Derived("bridge.metadata_channel")]
    """Where names and metadata are received."""
    receive_metadata_stream_id: Annotated[OptionalAeronStreamId, Derived("bridge.metadata_stream_id")]
    """The Aeron stream id of receive_metadata_channel."""
    aeron_dir: str = ""
    """The directory of the media driver; "" is Aeron's default."""
    driver_config: str = ""
    """The local driver's TOML file, for everything about the driver that is not set here."""
    driver_control_channel: LocalChannel
    """The local driver's driver.control_channel."""
    driver_control_stream_id: Annotated[OptionalAeronStreamId, Derived(LOCAL, _unless_in_file(1000))]
    """The local driver's driver.control_stream_id."""
    local_descriptor_channel: LocalChannel
    """The local driver's driver.descriptor_channel."""
    local_descriptor_stream_id: Annotated[OptionalAeronStreamId, Derived(LOCAL, _unless_in_file(1100))]
    """The local driver's driver.descriptor_stream_id."""
    local_control_channel: Annotated[OptionalChannel, Derived("bridge.driver_control_channel")]
    """The channel of source_control_stream_id and dest_control_stream_id."""
    local_metadata_channel: LocalChannel
    """The local driver's driver.metadata_channel."""
    local_metadata_stream_id: Annotated[OptionalAeronStreamId, Derived(LOCAL, _unless_in_file(1300))]
    """The local driver's driver.metadata_stream_id."""
    local_qos_channel: LocalChannel
    """The local driver's driver.qos_channel."""
    local_qos_stream_id: Annotated[OptionalAeronStreamId, Derived(LOCAL, _unless_in_file(1200))]
    """The local driver's driver.qos_stream_id."""
    allowed_base_dirs: tuple[str, ...] = ()
    """Where the local driver's memory may lie; none is what the driver's settings say."""
    announce_period_ms: U32 = 0
    """How often announces are expected (G17); 0 is the local driver's policies.announce_period_ms."""

    payload = EndpointOf("payload")
    control = EndpointOf("control")
    receive_payload = EndpointOf("receive_payload")
    receive_control = EndpointOf("receive_control")

    def at_mtu(self, mtu_bytes: int) -> BridgeSection:
        """With this MTU, where none is configured. Raises ConfigError where it leaves no room for a chunk."""
        if self.mtu_bytes:
            return self
        found = msgspec.structs.replace(self, mtu_bytes=mtu_bytes)
        checks.check_sizes(found)
        return found

    @property
    def effective_chunk_bytes(self) -> int:
        """The most payload bytes that a chunk carries, and that a receiver takes (§5.2, §10)."""
        bounds = (self.chunk_bytes, self.mtu_bytes and self.mtu_bytes - MTU_MARGIN_BYTES, self.max_chunk_bytes)
        return min(bound for bound in bounds if bound)

    @property
    def least_mtu_bytes(self) -> int:
        """For chunk 0, which carries the slot header (G1), and a byte of payload."""
        return FIRST_CHUNK_OVERHEAD_BYTES + (TRACED_BYTES if self.dialect == "2026-01" else 0) + 1

    @property
    def first_chunk_bytes(self) -> int:
        """The most that chunk 0 carries beside its header, so that it fits the MTU, which is known (G1)."""
        return min(self.effective_chunk_bytes, self.mtu_bytes - self.least_mtu_bytes + 1)

    @property
    def largest_frame_bytes(self) -> int:
        """The largest payload that MAX_CHUNKS chunks hold (G2)."""
        return min(self.first_chunk_bytes + (MAX_CHUNKS - 1) * self.effective_chunk_bytes, self.max_payload_bytes)

    @property
    def has_digests(self) -> bool:
        """Whether frames are checked as a whole."""
        return self.crc32c or bool(self.mac_key_file)

    @property
    def assembly_timeout_ns(self) -> int:
        return self.assembly_timeout_ms * MS

    @property
    def metadata(self) -> Endpoint | None:
        """Where metadata go over the network; None: they stay at home."""
        return self._metadata(self.metadata_channel, self.metadata_stream_id)

    @property
    def receive_metadata(self) -> Endpoint | None:
        return self._metadata(self.receive_metadata_channel, self.receive_metadata_stream_id)

    def _metadata(self, channel: str, stream_id: int) -> Endpoint | None:
        return Endpoint(channel, stream_id) if self.forward_metadata and channel else None


class MappingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`[[mappings]]`: one stream from its source to its destination."""

    source_stream_id: StreamId
    """The stream at the sending host."""
    dest_stream_id: OptionalStreamId = 0
    """The stream at the receiving host; 0 lets the receiver choose one of bridge.dest_stream_id_range."""
    direction: Annotated[Direction, Derived("as bridge.role says", _direction)]
    """Whether this bridge sends or receives the stream."""
    profile: str = ""
    """The driver's profile that the destination is expected to have; another one is logged, since an attach names
    none (G15)."""
    metadata_stream_id: Annotated[
        OptionalStreamId, Derived("its dest_stream_id", lambda table, _: table.dest_stream_id)
    ]
    """The stream id that forwarded metadata carry."""
    source_control_stream_id: OptionalAeronStreamId = 0
    """The Aeron stream id of progress and QoS at the source; 0 forwards none."""
    dest_control_stream_id: OptionalAeronStreamId = 0
    """The Aeron stream id of progress and QoS at the destination; 0 forwards none."""

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


class BridgeConfig(Configuration, frozen=True, kw_only=True):
    """The configuration of one bridge, complete and consistent.

    >>> config = BridgeConfig.load(Path("bridge.toml"))     # doctest: +SKIP
    >>> config.bridge.at_mtu(1408).effective_chunk_bytes    # doctest: +SKIP
    1280

    """

    bridge: BridgeSection
    mappings: tuple[MappingConfig, ...]
    """The streams that are bridged; at least one."""
    control: ControlConfig

    @classmethod
    def check_given(cls, given: Mapping[str, Any]) -> None:
        """G14: metadata that were asked for need a channel; the default forwards none without one."""
        section = given.get("bridge", {})
        has_channel = section.get("metadata_channel") or section.get("receive_metadata_channel")
        if section.get("forward_metadata") is True and not has_channel:
            accepted = "an aeron:udp URI, since bridge.forward_metadata = true was asked for; or set that to false"
            raise ConfigError("bridge.metadata_channel", "", accepted)

    def __post_init__(self) -> None:
        if not self.mappings:
            accepted = "at least one table [[mappings]] with source_stream_id and dest_stream_id"
            raise ConfigError("mappings", [], accepted)
        checks.check_directions(self)
        settings.check(self)
        checks.check_sizes(self.bridge)
        checks.check_channels(self)
        checks.check_mappings(self.mappings)
        checks.check_forwarding(self)
        checks.check_range(self)

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
        driver = DriverConfig.load(section.driver_config or None, environ=environ, overrides=given)
        checks.check_against_driver(self, driver)
        return driver

    def local_control_channel(self, driver: DriverConfig) -> str:
        """The channel of source_control_stream_id and dest_control_stream_id."""
        return self.bridge.local_control_channel or driver.driver.control_channel

    def warnings(self) -> list[str]:
        """What is allowed and probably not meant."""
        return list(checks.warnings(self))
