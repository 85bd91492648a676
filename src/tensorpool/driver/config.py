# SPDX-License-Identifier: Apache-2.0
"""Every setting of the SHM driver, checked before anything starts.

    [driver]             who it is, which Aeron streams it uses, which ids it may give away
    [shm]                where memory lies and who may open it
    [policies]           leases, announces, removal of old epochs, limits
    [profiles.<name>]    the shape of a stream's memory
    [streams.<name>]     the streams that exist from the start
    [discovery]          the discovery provider: see tensorpool.discovery.config
    [control]            where the driver receives commands as a service: see tensorpool.control.config
    [client]             how long calls of a client wait

Names and defaults are the specification's; keys that it does not name say so. A configuration that the driver cannot
serve is refused: see `tensorpool.settings` for how.
Driver Model §11, §17; Wire §15.11, §15.21a; decisions A14, B19, B20, D1, D4, D9, E20, E21, E35,
E36, K9.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from tensorpool import settings
from tensorpool.channel import check_endpoints
from tensorpool.control.config import ControlConfig
from tensorpool.discovery.config import DiscoverySection, check_provider
from tensorpool.driver.memory_bill import Bill, BillLine
from tensorpool.driver.message_sizes import check_message_sizes
from tensorpool.errors import ConfigError, LocalProtocolError, RegionRejected
from tensorpool.file_access import FileAccess, group_id
from tensorpool.settings import (
    IPC,
    MS,
    U32,
    AeronStreamId,
    AeronStreamIdRange,
    Channel,
    Configuration,
    Derived,
    EndpointOf,
    Name,
    PositiveU32,
    PublishableChannel,
    Range,
    Secret,
    StreamId,
    StreamIdRange,
)
from tensorpool.shm.containment import AllowedBases
from tensorpool.shm.layout import PoolSpec, RingSpec
from tensorpool.shm.namespace import DEFAULT_NAMESPACE, namespace_path
from tensorpool.shm.permission import check_file_mode
from tensorpool.wire.region_uri import RegionUri

__all__ = [
    "BUILT_IN",
    "ClientSection",
    "DriverConfig",
    "DriverSection",
    "PoliciesSection",
    "PoolConfig",
    "ProfileConfig",
    "Range",
    "ShmSection",
    "StreamConfig",
]

# Without a file: streams on demand, small and large frames, about 146 MB for each epoch.
BUILT_IN: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "driver": {"stream_id_range": "20000-29999"},
        "policies": {"allow_dynamic_streams": True, "max_streams": 64},
        "profiles": {
            "default": {
                "header_nslots": 16,
                "payload_pools": [
                    {"pool_id": 1, "stride_bytes": 1 << 16},
                    {"pool_id": 2, "stride_bytes": 1 << 20},
                    {"pool_id": 3, "stride_bytes": 1 << 23},
                ],
            }
        },
    }
)


_POWER_OF_TWO: Final = "a power of two from 1 to 2147483648"
_STRIDE: Final = "a power of two from 64 to 2147483648"


def _check_directory(key: str, path: str) -> None:
    try:
        RegionUri(path)
    except RegionRejected as rejected:
        accepted = "an absolute path of visible ASCII without spaces, '?' and '|'"
        raise ConfigError(key, path, accepted if rejected.check == "path" else rejected.detail) from None


def _check_page_size(key: str, size_bytes: int) -> None:
    if size_bytes & (size_bytes - 1):
        raise ConfigError(key, size_bytes, _POWER_OF_TWO)


def _check_mode(key: str, mode: str) -> None:
    try:
        check_file_mode(int(mode, 8))
    except ConfigError as error:
        raise ConfigError(key, mode, error.accepted) from None


def _check_nslots(key: str, nslots: int) -> None:
    try:
        RingSpec(nslots, (PoolSpec(1, 64),))
    except LocalProtocolError:
        raise ConfigError(key, nslots, _POWER_OF_TWO) from None


def _check_stride(key: str, stride_bytes: int) -> None:
    try:
        PoolSpec(1, stride_bytes)
    except LocalProtocolError:
        raise ConfigError(key, stride_bytes, _STRIDE) from None


def _three_announce_periods_ns(policies: Any, _: Any) -> int:
    return int(3 * policies.announce_period_ms * MS)


Directory = Annotated[str, Meta(description="an absolute path", extra={"check": _check_directory})]
Directories = Annotated[
    tuple[Directory, ...], Meta(min_length=1, description="one or more absolute paths, as an array")
]
PageSize = Annotated[int, Meta(ge=1, le=2**31, description=_POWER_OF_TWO, extra={"check": _check_page_size})]
Mode = Annotated[
    str,
    Meta(
        pattern=r"\A[0-7]{3,4}\Z",
        description='three or four octal digits as text, such as "660"',
        extra={"check": _check_mode},
    ),
]
Group = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.-]*\Z", description='a group by name or number, or "" for none')]
Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Nanoseconds = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Nslots = Annotated[int, Meta(ge=1, le=2**31, description=_POWER_OF_TWO, extra={"check": _check_nslots})]
PoolId = Annotated[int, Meta(ge=0, le=2**16 - 2)]  # all ones is null
Stride = Annotated[int, Meta(ge=64, le=2**31, description=_STRIDE, extra={"check": _check_stride})]


class DriverSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[driver]`: identity, Aeron endpoints and the ids that may be given away.

    Ours, since clients have to agree with the driver on them and the specification has no keys: descriptor and metadata
    endpoints (E20), announce_clock_domain (Wire §10.1.1), and dialect and node_id_range (K9).
    """

    instance_id: Name = "driver-01"
    """Names this driver in logs, in discovery and in its service tag; one driver of a host has it."""
    control_channel: PublishableChannel = IPC
    """Where clients send requests and the driver answers."""
    control_stream_id: AeronStreamId = 1000
    """The Aeron stream id of control_channel."""
    aeron_dir: str = ""
    """The directory of the media driver; "" is Aeron's default."""
    announce_channel: Annotated[PublishableChannel, Derived("driver.control_channel")]
    """Where the driver announces the epochs of its streams."""
    announce_stream_id: Annotated[AeronStreamId, Derived("driver.control_stream_id")]
    """The Aeron stream id of announce_channel."""
    qos_channel: Channel = IPC
    """Where producers and consumers report their quality of service."""
    qos_stream_id: AeronStreamId = 1200
    """The Aeron stream id of qos_channel."""
    stream_id_range: StreamIdRange = Range()
    """The ids that streams created by clients may have."""
    descriptor_stream_id_range: AeronStreamIdRange = Range()
    """The Aeron stream ids that consumers with a descriptor stream of their own are given."""
    control_stream_id_range: AeronStreamIdRange = Range()
    """The Aeron stream ids that consumers with a control stream of their own are given."""
    descriptor_channel: Channel = IPC
    """Where producers publish the descriptors of their frames."""
    descriptor_stream_id: AeronStreamId = 1100
    """The Aeron stream id of descriptor_channel."""
    metadata_channel: Channel = IPC
    """Where producers publish names and metadata of their streams."""
    metadata_stream_id: AeronStreamId = 1300
    """The Aeron stream id of metadata_channel."""
    announce_clock_domain: Literal["MONOTONIC", "REALTIME_SYNCED"] = "MONOTONIC"
    """The clock that stamps announces; REALTIME_SYNCED where other hosts judge their age."""
    dialect: Literal["auto", "specified", "2026-01"] = "auto"
    """How clients lay out their attach requests: as specified, as other implementations do since January 2026, or as
    specified until a driver that announces does not answer; a driver answers both."""
    node_id_range: StreamIdRange = Range(1, 1023)
    """The node ids that clients of the dialect 2026-01 are given, for their trace ids."""

    control = EndpointOf("control")
    announce = EndpointOf("announce")
    descriptor = EndpointOf("descriptor")
    qos = EndpointOf("qos")
    metadata = EndpointOf("metadata")


class ShmSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[shm]`: where memory lies and who may open it.

    `namespace` is ours: the specification wants it configured and names no key (D1). Strides have not depended on
    `page_size_bytes` since wire 1.2 (B20).
    """

    base_dir: Directory = "/dev/shm/tensorpool"
    """The directory below which the driver makes its regions; created if it is missing."""
    namespace: str = DEFAULT_NAMESPACE
    """The folder below base_dir that belongs to this driver."""
    require_hugepages: bool = False
    """Refuse to start unless base_dir lies on hugetlbfs."""
    page_size_bytes: PageSize = 4096
    """The least page size that base_dir must have; checked at start."""
    permissions_mode: Mode = "660"
    """The mode of region files, in octal: 660, 640 (only the driver's account may write) or 600; the files of a media
    driver that the driver starts get 660, or 600 with 600."""
    group: Group = ""
    """The group of region files and of the media driver's files, by name or number, of which the driver's account is a
    member; "" leaves them the group that the system gives."""
    allowed_base_dirs: Annotated[Directories, Derived("[shm.base_dir]", lambda table, _: (table.base_dir,))]
    """The directories inside which a region may be mapped."""


class PoliciesSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[policies]`: leases, announces, removal of old epochs, limits.

    Ours: `recreate_on_startup` (Driver Model §14 has the mode, no key), `max_leases`, `max_streams` and `max_bytes`,
    the same three for each user, `max_provisioned_stream_bytes` and `max_provisioned_bytes`,
    `dynamic_stream_linger_ms`, `rate_limited_default_hz` (E26), and `node_id_reuse_cooldown_ms` (K9; other
    implementations have this key too).
    """

    allow_dynamic_streams: bool = False
    """Let clients create streams, with ids of driver.stream_id_range."""
    default_profile: Annotated[Name, Derived("the first profile", lambda _, root: next(iter(root.profiles), ""))]
    """The profile of streams that clients create and of streams that name none."""
    announce_period_ms: PositiveU32 = 1000
    """How often the driver announces each stream."""
    lease_keepalive_interval_ms: PositiveU32 = 1000
    """How often clients renew their leases."""
    lease_expiry_grace_intervals: PositiveU32 = 3
    """A lease expires after so many keepalive intervals without a valid keepalive."""
    prefault_shm: bool = True
    """Touch every page of a new epoch before it is announced."""
    mlock_shm: bool = False
    """Lock the memory of every epoch; a failure is fatal."""
    epoch_gc_enabled: bool = True
    """Remove old epochs."""
    epoch_gc_keep: PositiveU32 = 2
    """How many epochs of a stream are kept, the current one included."""
    epoch_gc_min_age_ns: Annotated[Nanoseconds, Derived("three announce periods", _three_announce_periods_ns)]
    """Epochs younger than this are kept in any case."""
    epoch_gc_on_startup: bool = False
    """Also remove old epochs of earlier runs when the driver starts."""
    shutdown_timeout_ms: U32 = 2000
    """How long a driver that ends waits for its last messages to be sent."""
    shutdown_token: Secret = Secret("")
    """The token that a shutdown request must carry; "" refuses every request."""
    recreate_on_startup: bool = False
    """Remove what an earlier driver left in the namespace, after learning its epochs."""
    max_provisioned_stream_bytes: Bytes = 2 << 30
    """The largest ring, one epoch of it, that a client may ask for; 0: none."""
    max_provisioned_bytes: Bytes = 8 << 30
    """What all rings that clients asked for may take together, with the epochs of each that are kept."""
    max_bytes: Bytes = 0
    """What the rings of streams with a producer may take together, with the epochs that are kept; 0: no limit."""
    max_leases: PositiveU32 = 10_000
    """How many leases may exist at a time."""
    max_streams: PositiveU32 = 1_000
    """How many streams may exist at a time, configured ones included."""
    max_user_leases: U32 = 0
    """How many leases one user may hold, or all clients together that do not declare themselves; 0: no limit."""
    max_user_streams: U32 = 0
    """How many streams that one user's clients created may exist; 0: no limit."""
    max_user_bytes: Bytes = 0
    """What the rings of streams that one user produces may take, with the epochs that are kept; 0: no limit."""
    dynamic_stream_linger_ms: PositiveU32 = 30_000
    """How long a stream that a client created outlives its last lease."""
    node_id_reuse_cooldown_ms: U32 = 10_000
    """How long the node id of a client that is gone is given to no other."""
    rate_limited_default_hz: PositiveU32 = 10
    """The rate of a consumer that an override makes RATE_LIMITED and that named no rate in its hello."""


class ClientSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[client]`, all of it ours: how long calls that name no `timeout` wait, and whether frames are traced."""

    attach_timeout_ms: PositiveU32 = 5000
    """How long `Client.producer`, `consumer` and `watch` wait."""
    discover_timeout_ms: PositiveU32 = 2000
    """How long `Client.discover` waits."""
    trace_ids: bool = False
    """Whether producers that do not say give every frame a trace id."""


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`[[profiles.<name>.payload_pools]]`: one size class of payload slots."""

    pool_id: PoolId
    """The id of the pool; other pools of the profile have other ids."""
    stride_bytes: Stride
    """The size of one payload slot."""


class ProfileConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`[profiles.<name>]`: the shape of a stream's memory."""

    payload_pools: tuple[PoolConfig, ...]
    """The size classes of payloads; a frame goes into the smallest slot that holds it."""
    header_nslots: Nslots = 1024
    """How many frames the ring holds."""

    @property
    def ring(self) -> RingSpec:
        pools = tuple(PoolSpec(pool.pool_id, pool.stride_bytes) for pool in self.payload_pools)
        return RingSpec(self.header_nslots, pools)


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`[streams.<name>]`: a stream that exists from the start."""

    stream_id: StreamId
    """The id of the stream; no other stream has it and no range holds it."""
    profile: Annotated[Name, Derived("policies.default_profile")]
    """The profile of its memory."""


class DriverConfig(Configuration, frozen=True, kw_only=True):
    """The configuration of one driver, complete and consistent.

    >>> config = DriverConfig.load(Path("camera.toml"))
    >>> config.profiles[config.streams["front"].profile].ring.size_bytes
    310386944

    Raises ConfigError, however it is made.
    """

    BUILT_IN = BUILT_IN

    driver: DriverSection
    shm: ShmSection
    profiles: Mapping[str, ProfileConfig] = {}
    policies: PoliciesSection
    streams: Mapping[str, StreamConfig] = {}
    discovery: DiscoverySection
    control: ControlConfig
    client: ClientSection

    def __post_init__(self) -> None:
        if not self.profiles:
            accepted = "at least one table [profiles.<name>] with payload_pools"
            raise ConfigError("profiles", dict(self.profiles), accepted)
        settings.check(self)
        self._check_profiles()
        self._check_streams()
        self._check_ranges()
        self._check_endpoints()
        check_provider(self.discovery)
        self._check_user_limits()
        self._check_shm()
        check_message_sizes(self)

    @property
    def has_user_limits(self) -> bool:
        policies = self.policies
        return bool(policies.max_user_leases or policies.max_user_streams or policies.max_user_bytes)

    @property
    def announce_period_ns(self) -> int:
        return self.policies.announce_period_ms * MS

    @property
    def lease_keepalive_interval_ns(self) -> int:
        return self.policies.lease_keepalive_interval_ms * MS

    @property
    def lease_duration_ns(self) -> int:
        """From the last valid keepalive to expiry (§4.4)."""
        return self.lease_keepalive_interval_ns * self.policies.lease_expiry_grace_intervals

    @property
    def dynamic_stream_linger_ns(self) -> int:
        return self.policies.dynamic_stream_linger_ms * MS

    @property
    def node_id_cooldown_ns(self) -> int:
        return self.policies.node_id_reuse_cooldown_ms * MS

    @property
    def shutdown_timeout_ns(self) -> int:
        return self.policies.shutdown_timeout_ms * MS

    @property
    def file_mode(self) -> int:
        return int(self.shm.permissions_mode, 8)

    def aeron_access(self) -> FileAccess:
        """Who may use a media driver of this driver: the accounts that may read regions.

        Raises ConfigError for no such group.
        """
        has_group = self.file_mode & 0o060 != 0
        return FileAccess(0o660 if has_group else 0o600, group_id("shm.group", self.shm.group))

    @property
    def default_ring(self) -> RingSpec:
        """The memory of a stream that a client creates."""
        return self.profiles[self.policies.default_profile].ring

    @property
    def locked_bytes(self) -> int:
        """What `policies.mlock_shm` locks: an epoch of each configured stream, or one that a client creates."""
        return max(self.bill().epoch_bytes, self.default_ring.size_bytes)

    def bill(self) -> Bill:
        """The memory that this configuration can come to take."""
        policies = self.policies
        epochs = policies.epoch_gc_keep if policies.epoch_gc_enabled else None
        lines = []
        for name, stream in self.streams.items():
            size = self.profiles[stream.profile].ring.size_bytes
            lines.append(BillLine(name, stream.stream_id, stream.profile, size, epochs))
        room = min(len(self.driver.stream_id_range), policies.max_streams - len(self.streams))
        if policies.allow_dynamic_streams and room:
            size = self.default_ring.size_bytes
            lines.append(BillLine("dynamic", None, policies.default_profile, size, epochs, room))
        return Bill(tuple(lines))

    def _check_profiles(self) -> None:
        for name, profile in self.profiles.items():
            key = f"profiles.{name}.payload_pools"
            if not profile.payload_pools:
                raise ConfigError(key, [], "at least one pool")
            ids: set[int] = set()
            for index, pool in enumerate(profile.payload_pools):
                if pool.pool_id in ids:
                    accepted = "an id that no other pool of the profile has"
                    raise ConfigError(f"{key}[{index}].pool_id", pool.pool_id, accepted)
                ids.add(pool.pool_id)
            try:
                _ = profile.ring
            except LocalProtocolError:
                accepted = "fewer slots or smaller strides; all regions together stay below 2^63 bytes"
                raise ConfigError(f"profiles.{name}.header_nslots", profile.header_nslots, accepted) from None
        self._check_profile_name("policies.default_profile", self.policies.default_profile)

    def _check_profile_name(self, key: str, profile: str) -> None:
        if profile not in self.profiles:
            raise ConfigError(key, profile, f"one of the profiles {', '.join(self.profiles)}")

    def _check_streams(self) -> None:
        owners: dict[int, str] = {}
        for name, stream in self.streams.items():
            key = f"streams.{name}"
            self._check_profile_name(f"{key}.profile", stream.profile)
            owner = owners.setdefault(stream.stream_id, key)
            if owner != key:
                accepted = f"an id of its own; {owner} has this one"
                raise ConfigError(f"{key}.stream_id", stream.stream_id, accepted)
        if len(self.streams) > self.policies.max_streams:
            accepted = f"at least the {len(self.streams)} streams that are configured"
            raise ConfigError("policies.max_streams", self.policies.max_streams, accepted)
        if self.policies.allow_dynamic_streams:
            if not self.driver.stream_id_range:
                accepted = 'ids to create streams with, such as "20000-29999", or no allow_dynamic_streams'
                raise ConfigError("driver.stream_id_range", "", accepted)
        elif not self.streams:
            accepted = "at least one table [streams.<name>], or policies.allow_dynamic_streams = true"
            raise ConfigError("streams", {}, accepted)

    def _check_ranges(self) -> None:
        """§11: no range holds an id that is in use, nor one of another range. E21: whichever kind it is."""
        driver = self.driver
        ranges = {
            "driver.stream_id_range": driver.stream_id_range,
            "driver.descriptor_stream_id_range": driver.descriptor_stream_id_range,
            "driver.control_stream_id_range": driver.control_stream_id_range,
        }
        used = {
            "driver.control_stream_id": driver.control_stream_id,
            "driver.announce_stream_id": driver.announce_stream_id,
            "driver.qos_stream_id": driver.qos_stream_id,
            "driver.descriptor_stream_id": driver.descriptor_stream_id,
            "driver.metadata_stream_id": driver.metadata_stream_id,
            "discovery.stream_id": self.discovery.stream_id,
            "control.control_stream_id": self.control.control_stream_id,
            "control.status_stream_id": self.control.status_stream_id,
        } | {f"streams.{name}.stream_id": stream.stream_id for name, stream in self.streams.items()}
        for (key, ids), (other, number) in itertools.product(ranges.items(), used.items()):
            if number in ids:
                raise ConfigError(key, str(ids), f"a range without {number}, which is {other}")
        for (other, earlier), (key, ids) in itertools.combinations(ranges.items(), 2):
            if ids.overlaps(earlier):
                raise ConfigError(key, str(ids), f"a range apart from {other}, which is {earlier}")

    def _check_endpoints(self) -> None:
        driver = self.driver
        endpoints = {
            "driver.control_channel": driver.control,
            "driver.announce_channel": driver.announce,
            "driver.qos_channel": driver.qos,
            "driver.descriptor_channel": driver.descriptor,
            "driver.metadata_channel": driver.metadata,
            "discovery.channel": self.discovery.endpoint,
        }
        check_endpoints(endpoints)
        self.control.check_beside(endpoints)

    def _check_user_limits(self) -> None:
        """Clients declare their user to the driver's service, which has to be one of this host."""
        if self.has_user_limits and not (self.control.enabled and self.control.control.uri.is_ipc):
            accepted = (
                "true, and an IPC channel as control.control_channel, with limits for each user (policies.max_user_…)"
            )
            raise ConfigError("control.enabled", self.control.enabled, accepted)

    def _check_shm(self) -> None:
        shm = self.shm
        path = namespace_path(shm.base_dir, shm.namespace)
        if not AllowedBases(shm.allowed_base_dirs).contains(path):
            allowed = ", ".join(shm.allowed_base_dirs)
            raise ConfigError("shm.base_dir", shm.base_dir, f"a directory inside allowed_base_dirs: {allowed}")
