# SPDX-License-Identifier: Apache-2.0
"""Every setting of the SHM driver, checked before anything starts.

    [driver]             who it is, which Aeron streams it uses, which ids it may give away
    [shm]                where memory lies and who may open it
    [policies]           leases, announces, removal of old epochs, limits
    [profiles.<name>]    the shape of a stream's memory
    [streams.<name>]     the streams that exist from the start
    [discovery]          who answers which streams there are: see tensorpool.discovery.config
    [control]            where the driver hears commands as a service: see tensorpool.control.config

Names and defaults are the specification's; keys that it does not name say so. What is left out and derived
from other keys is filled in when the configuration is made. What cannot be served is refused: see
`tensorpool.config` for how. Driver Model §11, §17; Wire §15.11, §15.21a; decisions A14, B19, B20, D1, D4, D9,
E20, E21, E35, E36.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self

import msgspec
from msgspec import Meta

from tensorpool import config
from tensorpool.channel import Endpoint, check_channel, check_endpoints
from tensorpool.config import (
    U32,
    AeronStreamId,
    AeronStreamIdRange,
    Channel,
    Name,
    PositiveU32,
    Range,
    Secret,
    StreamId,
    StreamIdRange,
    fill,
)
from tensorpool.control.config import ControlConfig
from tensorpool.discovery.config import EXPIRY_PERIODS, DiscoverySection, check_provider
from tensorpool.driver.message_sizes import check_message_sizes
from tensorpool.errors import ConfigError, LocalProtocolError, RegionRejected
from tensorpool.shm.containment import AllowedBases
from tensorpool.shm.layout import PoolSpec, RingSpec
from tensorpool.shm.namespace import DEFAULT_NAMESPACE, namespace_path
from tensorpool.shm.permission import check_file_mode
from tensorpool.wire.region_uri import RegionUri

__all__ = [
    "BUILT_IN",
    "Bill",
    "BillLine",
    "DriverConfig",
    "DriverSection",
    "PoliciesSection",
    "PoolConfig",
    "ProfileConfig",
    "Range",
    "ShmSection",
    "StreamConfig",
]

IPC: Final = "aeron:ipc?term-length=4m"
MS: Final = 1_000_000  # nanoseconds

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
Nanoseconds = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Nslots = Annotated[int, Meta(ge=1, le=2**31, description=_POWER_OF_TWO, extra={"check": _check_nslots})]
PoolId = Annotated[int, Meta(ge=0, le=2**16 - 2)]  # all ones is null
Stride = Annotated[int, Meta(ge=64, le=2**31, description=_STRIDE, extra={"check": _check_stride})]


class DriverSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[driver]`: identity, Aeron endpoints and the ids that may be given away.

    An empty `aeron_dir` is Aeron's default. Ours, since clients have to agree with the driver on them and the
    specification has no keys: descriptor and metadata endpoints (E20), announce_clock_domain (Wire §10.1.1).
    """

    instance_id: Name = "driver-01"
    control_channel: Channel = IPC
    control_stream_id: AeronStreamId = 1000
    aeron_dir: str = ""
    announce_channel: Channel = ""  # control_channel
    announce_stream_id: AeronStreamId = 0  # control_stream_id
    qos_channel: Channel = IPC
    qos_stream_id: AeronStreamId = 1200
    stream_id_range: StreamIdRange = Range()
    descriptor_stream_id_range: AeronStreamIdRange = Range()
    control_stream_id_range: AeronStreamIdRange = Range()
    descriptor_channel: Channel = IPC
    descriptor_stream_id: AeronStreamId = 1100
    metadata_channel: Channel = IPC
    metadata_stream_id: AeronStreamId = 1300
    announce_clock_domain: Literal["MONOTONIC", "REALTIME_SYNCED"] = "MONOTONIC"

    def __post_init__(self) -> None:
        fill(self, "announce_channel", "", self.control_channel)
        fill(self, "announce_stream_id", 0, self.control_stream_id)

    @property
    def control(self) -> Endpoint:
        return Endpoint(self.control_channel, self.control_stream_id)

    @property
    def announce(self) -> Endpoint:
        return Endpoint(self.announce_channel, self.announce_stream_id)

    @property
    def descriptor(self) -> Endpoint:
        return Endpoint(self.descriptor_channel, self.descriptor_stream_id)

    @property
    def qos(self) -> Endpoint:
        return Endpoint(self.qos_channel, self.qos_stream_id)

    @property
    def metadata(self) -> Endpoint:
        return Endpoint(self.metadata_channel, self.metadata_stream_id)


class ShmSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[shm]`: where memory lies and who may open it.

    `namespace` is ours: the specification wants it configured and names no key (D1). `page_size_bytes` is
    the least that the pages of base_dir must have, which the driver checks at start; strides have not depended on it
    since wire 1.2 (B20).
    """

    base_dir: Directory = "/dev/shm/tensorpool"
    namespace: str = DEFAULT_NAMESPACE
    require_hugepages: bool = False
    page_size_bytes: PageSize = 4096
    permissions_mode: Mode = "660"
    allowed_base_dirs: Directories = ()  # base_dir

    def __post_init__(self) -> None:
        fill(self, "allowed_base_dirs", (), (self.base_dir,))


class PoliciesSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[policies]`: leases, announces, removal of old epochs, limits.

    Ours: `recreate_on_startup` removes what an earlier driver left (Driver Model §14 has the mode, no key);
    `max_leases` and `max_streams` bound what clients can make the driver hold, configured streams included;
    `dynamic_stream_linger_ms` is how long a stream that a client created outlives its last lease;
    `rate_limited_default_hz` is the rate of a consumer that is told to be RATE_LIMITED and has none of its own (E26).
    """

    allow_dynamic_streams: bool = False
    default_profile: Name = ""  # the first profile
    announce_period_ms: PositiveU32 = 1000
    lease_keepalive_interval_ms: PositiveU32 = 1000
    lease_expiry_grace_intervals: PositiveU32 = 3
    prefault_shm: bool = True
    mlock_shm: bool = False
    epoch_gc_enabled: bool = True
    epoch_gc_keep: PositiveU32 = 2
    epoch_gc_min_age_ns: Nanoseconds = -1  # three announce periods
    epoch_gc_on_startup: bool = False
    shutdown_timeout_ms: U32 = 2000
    shutdown_token: Secret = Secret("")
    recreate_on_startup: bool = False
    max_leases: PositiveU32 = 10_000
    max_streams: PositiveU32 = 1_000
    dynamic_stream_linger_ms: PositiveU32 = 30_000
    rate_limited_default_hz: PositiveU32 = 10

    def __post_init__(self) -> None:
        fill(self, "epoch_gc_min_age_ns", -1, 3 * self.announce_period_ms * MS)


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`[[profiles.<name>.payload_pools]]`: one size class of payload slots."""

    pool_id: PoolId
    stride_bytes: Stride


class ProfileConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`[profiles.<name>]`: the shape of a stream's memory."""

    payload_pools: tuple[PoolConfig, ...]
    header_nslots: Nslots = 1024

    @property
    def ring(self) -> RingSpec:
        pools = tuple(PoolSpec(pool.pool_id, pool.stride_bytes) for pool in self.payload_pools)
        return RingSpec(self.header_nslots, pools)


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`[streams.<name>]`: a stream that exists from the start."""

    stream_id: StreamId
    profile: Name = ""  # policies.default_profile


class BillLine(msgspec.Struct, frozen=True):
    """The memory of one stream, or of `streams` alike that clients may still create (`stream_id` is None)."""

    name: str
    stream_id: int | None
    profile: str
    epoch_bytes: int
    epochs: int | None  # kept at a time; None: old epochs are never removed
    streams: int = 1

    @property
    def total_bytes(self) -> int | None:
        """All epochs of all these streams; None without a limit."""
        return None if self.epochs is None else self.epoch_bytes * self.epochs * self.streams


class Bill(msgspec.Struct, frozen=True):
    """What a configuration can come to take, at most.

    Epochs younger than `policies.epoch_gc_min_age_ns` are kept beyond `epochs`: a producer that restarts
    all the time takes more for as long.
    """

    lines: tuple[BillLine, ...]

    @property
    def epoch_bytes(self) -> int:
        """One epoch of each stream that the configuration names: what they need to work at all."""
        return sum(line.epoch_bytes for line in self.lines if line.stream_id is not None)

    @property
    def total_bytes(self) -> int | None:
        """All lines together; None without a limit."""
        totals = [line.total_bytes for line in self.lines]
        return None if None in totals else sum(filter(None, totals))


class DriverConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one driver, complete and consistent.

    >>> config = DriverConfig.load(Path("camera.toml"))
    >>> config.profiles[config.streams["front"].profile].ring.size_bytes
    310386944

    Raises ConfigError, however it is made.
    """

    driver: DriverSection = msgspec.field(default_factory=DriverSection)
    shm: ShmSection = msgspec.field(default_factory=ShmSection)
    policies: PoliciesSection = msgspec.field(default_factory=PoliciesSection)
    profiles: Mapping[str, ProfileConfig] = {}
    streams: Mapping[str, StreamConfig] = {}
    discovery: DiscoverySection = msgspec.field(default_factory=DiscoverySection)
    control: ControlConfig = msgspec.field(default_factory=ControlConfig)

    @classmethod
    def load(
        cls,
        path: Path | str | None = None,
        environ: Mapping[str, str] = os.environ,
        overrides: Mapping[str, Any] = MappingProxyType({}),
        **tables: Any,
    ) -> Self:
        """Read a file, or take BUILT_IN without one; variables and then flags go over it.

        >>> DriverConfig.load(overrides={"driver.control_stream_id": 2000}, shm={"namespace": "lab1"})

        See `tensorpool.config.load`. Raises ConfigError.
        """
        return config.load(
            cls,
            path=None if path is None else Path(path),
            built_in=BUILT_IN,
            environ=environ,
            overrides={**overrides, **tables},
        )

    def __post_init__(self) -> None:
        if not self.profiles:
            accepted = "at least one table [profiles.<name>] with payload_pools"
            raise ConfigError("profiles", dict(self.profiles), accepted)
        self._resolve()
        config.check(self)
        self._check_profiles()
        self._check_streams()
        self._check_ranges()
        self._check_endpoints()
        check_provider(self.discovery)
        self._check_shm()
        check_message_sizes(self)

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
    def shutdown_timeout_ns(self) -> int:
        return self.policies.shutdown_timeout_ms * MS

    @property
    def file_mode(self) -> int:
        return int(self.shm.permissions_mode, 8)

    @property
    def default_ring(self) -> RingSpec:
        """The memory of a stream that a client creates."""
        return self.profiles[self.policies.default_profile].ring

    @property
    def locked_bytes(self) -> int:
        """What `policies.mlock_shm` locks: an epoch of each configured stream, or one that a client creates."""
        return max(self.bill().epoch_bytes, self.default_ring.size_bytes)

    def dump(self) -> dict[str, object]:
        """Every key with its value in effect, for logs and `--check`; the token stays hidden (§4.4)."""
        return config.dump(self)

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

    def _resolve(self) -> None:
        """Fill in the profiles that are left out, and where and how long discovery listens (F4, F9)."""
        discovery = self.discovery
        period_ms = discovery.announce_period_ms or self.policies.announce_period_ms
        discovery = msgspec.structs.replace(
            discovery,
            channel=discovery.channel or self.driver.control_channel,
            stream_id=discovery.stream_id or self.driver.control_stream_id,
            announce_period_ms=period_ms,
            expiry_ms=discovery.expiry_ms or EXPIRY_PERIODS * period_ms,
        )
        msgspec.structs.force_setattr(self, "discovery", discovery)
        policies = self.policies
        if policies.default_profile == "":
            policies = msgspec.structs.replace(policies, default_profile=next(iter(self.profiles)))
            msgspec.structs.force_setattr(self, "policies", policies)
        streams = {
            name: stream if stream.profile else msgspec.structs.replace(stream, profile=policies.default_profile)
            for name, stream in self.streams.items()
        }
        msgspec.structs.force_setattr(self, "streams", streams)

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
        for key in ("driver.control_channel", "driver.announce_channel"):
            channel = getattr(driver, key.removeprefix("driver."))
            if check_channel(key, channel).is_spy:
                raise ConfigError(key, channel, "aeron:ipc or aeron:udp; nobody can publish on a spy")
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

    def _check_shm(self) -> None:
        shm = self.shm
        path = namespace_path(shm.base_dir, shm.namespace)
        if not AllowedBases(shm.allowed_base_dirs).contains(path):
            allowed = ", ".join(shm.allowed_base_dirs)
            raise ConfigError("shm.base_dir", shm.base_dir, f"a directory inside allowed_base_dirs: {allowed}")
