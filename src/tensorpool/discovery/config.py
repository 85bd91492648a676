# SPDX-License-Identifier: Apache-2.0
"""Every setting of discovery: of the provider inside a driver, of its clients, and of a registry.

    [discovery]                 where requests are heard, limits, who may see what
    [[discovery.acl]]           a rule: which streams some clients see
    [[discovery.registries]]    of a driver and its clients: registries to tell and to ask
    [[discovery.drivers]]       of a registry: whom it listens to
    [control]                   of a registry: where it hears commands as a service

What is left out and derived from other keys is filled in when the configuration is made.
Discovery §4.2, §5.2, §6.2, §8, §12; decisions F1, F3, F4, F6, F9, F11.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self

import msgspec
from msgspec import Meta

from tensorpool import config
from tensorpool.channel import Endpoint, check_channel, check_endpoints
from tensorpool.config import U32, AeronStreamId, Channel, Name, PositiveU32, StreamId, fill
from tensorpool.control.config import ControlConfig
from tensorpool.errors import ConfigError

MS: Final = 1_000_000  # nanoseconds
EXPIRY_PERIODS: Final = 3
ERROR_MESSAGE_MAX_BYTES: Final = 1024
NAME_MAX_BYTES: Final = 256
REGISTRY_CHANNEL: Final = "aeron:ipc?term-length=1m"


def _check_optional_channel(key: str, channel: str) -> None:
    if channel:
        check_channel(key, channel)


OptionalChannel = Annotated[
    str, Meta(description='an Aeron URI, or "" for none', extra={"check": _check_optional_channel})
]
OptionalName = Annotated[str, Meta(pattern=r"\A[!-~]*\Z", description='visible ASCII without spaces, or "" for none')]
Limit = Annotated[int, Meta(ge=1, le=65_534)]  # A18: entries of a group
Scheme = Literal["aeron:ipc", "aeron:udp"]


class AclRule(msgspec.Struct, frozen=True, kw_only=True):
    """`[[discovery.acl]]`: these clients see the streams that fit every list; an empty list fits all."""

    client_ids: tuple[U32, ...] = ()
    driver_instance_ids: tuple[Name, ...] = ()
    stream_ids: tuple[StreamId, ...] = ()
    names: tuple[str, ...] = ()  # with * and ?
    tags: tuple[str, ...] = ()  # all of them


class ProviderSection(msgspec.Struct, frozen=True, kw_only=True):
    """What the provider inside a driver and a registry have in common."""

    channel: Channel = ""
    stream_id: AeronStreamId = 0
    announce_period_ms: PositiveU32 = 0
    expiry_ms: PositiveU32 = 0  # three announce periods
    max_results: Limit = 1000
    max_streams: PositiveU32 = 100_000
    client_requests_per_s: PositiveU32 = 50
    requests_per_s: PositiveU32 = 500
    response_publication_limit: PositiveU32 = 64
    response_idle_ms: PositiveU32 = 30_000
    response_connect_ms: PositiveU32 = 2_000
    response_channel_allow: tuple[Scheme, ...] = ("aeron:ipc", "aeron:udp")
    response_host_names: bool = False
    acl_enabled: bool = False
    acl: tuple[AclRule, ...] = ()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.channel, self.stream_id)


class RegistryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """`[[discovery.registries]]`: where a registry hears requests, and where it hears this driver."""

    channel: Channel
    stream_id: AeronStreamId = 1000
    announce_channel: OptionalChannel = ""
    announce_stream_id: AeronStreamId = 1000

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.channel, self.stream_id)

    @property
    def announce(self) -> Endpoint | None:
        return Endpoint(self.announce_channel, self.announce_stream_id) if self.announce_channel else None


class DiscoverySection(ProviderSection, frozen=True, kw_only=True):
    """`[discovery]` of a driver and its clients."""

    enabled: bool = True
    response_channel: OptionalChannel = ""
    registries: tuple[RegistryEntry, ...] = ()


class DriverEntry(msgspec.Struct, frozen=True, kw_only=True):
    """`[[discovery.drivers]]`: whom a registry listens to, and what it tells about them."""

    instance_id: Name
    control_channel: Channel
    control_stream_id: AeronStreamId
    announce_channel: Channel = ""  # control_channel
    announce_stream_id: AeronStreamId = 0  # control_stream_id
    metadata_channel: OptionalChannel = ""
    metadata_stream_id: AeronStreamId = 1300
    announce_period_ms: PositiveU32 = 0  # discovery.announce_period_ms
    expiry_ms: PositiveU32 = 0  # discovery.expiry_ms, or three periods of its own

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
    def metadata(self) -> Endpoint | None:
        return Endpoint(self.metadata_channel, self.metadata_stream_id) if self.metadata_channel else None

    @property
    def expiry_ns(self) -> int:
        return self.expiry_ms * MS


class RegistrySection(ProviderSection, frozen=True, kw_only=True):
    """`[discovery]` of a registry. With an `instance_id` its service is `service:discovery:<instance_id>`."""

    instance_id: OptionalName = ""
    aeron_dir: str = ""
    drivers: tuple[DriverEntry, ...] = ()

    def __post_init__(self) -> None:
        fill(self, "channel", "", REGISTRY_CHANNEL)
        fill(self, "stream_id", 0, 1000)
        fill(self, "announce_period_ms", 0, 1000)
        drivers = []
        for driver in self.drivers:
            period_ms = driver.announce_period_ms or self.announce_period_ms
            own = EXPIRY_PERIODS * period_ms
            expiry_ms = driver.expiry_ms or (own if driver.announce_period_ms else self.expiry_ms or own)
            drivers.append(msgspec.structs.replace(driver, announce_period_ms=period_ms, expiry_ms=expiry_ms))
        msgspec.structs.force_setattr(self, "drivers", tuple(drivers))
        fill(self, "expiry_ms", 0, EXPIRY_PERIODS * self.announce_period_ms)


class RegistryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one registry, complete and consistent.

    >>> config = RegistryConfig.load(Path("registry.toml"))     # doctest: +SKIP

    Raises ConfigError, however it is made.
    """

    discovery: RegistrySection = msgspec.field(default_factory=RegistrySection)
    control: ControlConfig = msgspec.field(default_factory=ControlConfig)

    @classmethod
    def load(
        cls,
        path: Path | str | None = None,
        environ: Mapping[str, str] = os.environ,
        overrides: Mapping[str, Any] = MappingProxyType({}),
    ) -> Self:
        """Read a file; variables and then flags go over it. Raises ConfigError."""
        return config.load(cls, path=None if path is None else Path(path), environ=environ, overrides=overrides)

    def __post_init__(self) -> None:
        config.check(self)
        section = self.discovery
        check_provider(section)
        if not section.drivers:
            accepted = "at least one table [[discovery.drivers]] with instance_id, control_channel, control_stream_id"
            raise ConfigError("discovery.drivers", [], accepted)
        _check_drivers(section)
        self.control.check_beside({"discovery.channel": section.endpoint})

    def dump(self) -> dict[str, object]:
        """Every key with its value in effect."""
        return config.dump(self)


def check_provider(section: ProviderSection) -> None:
    """What cannot be said by a type. Raises ConfigError."""
    if section.expiry_ms <= section.announce_period_ms:
        accepted = f"more than the announce period of {section.announce_period_ms} ms"
        raise ConfigError("discovery.expiry_ms", section.expiry_ms, accepted)
    if check_channel("discovery.channel", section.channel).is_spy:
        raise ConfigError("discovery.channel", section.channel, "aeron:ipc or aeron:udp; nobody can publish on a spy")


def _check_drivers(section: RegistrySection) -> None:
    """F6: an announce does not say whose it is, so each driver needs a place of its own to be heard at."""
    names: dict[str, int] = {}
    places: dict[object, tuple[str, str]] = {}
    for index, driver in enumerate(section.drivers):
        key = f"discovery.drivers[{index}]"
        if driver.instance_id in names:
            accepted = f"a name of its own; discovery.drivers[{names[driver.instance_id]}] has this one"
            raise ConfigError(f"{key}.instance_id", driver.instance_id, accepted)
        names[driver.instance_id] = index
        if driver.expiry_ms <= driver.announce_period_ms:
            accepted = f"more than the announce period of {driver.announce_period_ms} ms"
            raise ConfigError(f"{key}.expiry_ms", driver.expiry_ms, accepted)
        if check_channel(f"{key}.control_channel", driver.control_channel).is_spy:
            raise ConfigError(f"{key}.control_channel", driver.control_channel, "aeron:ipc or aeron:udp")
        for field, endpoint in (("announce_channel", driver.announce), ("metadata_channel", driver.metadata)):
            if endpoint is None:
                continue
            place = check_channel(f"{key}.{field}", endpoint.channel).address, endpoint.stream_id
            owner, owners_field = places.setdefault(place, (driver.instance_id, f"{key}.{field}"))
            if owner != driver.instance_id:
                accepted = (
                    f"a channel or stream id of its own: {owners_field} of driver {owner} is the same place, and what "
                    "is heard there does not say whose it is"
                )
                raise ConfigError(f"{key}.{field}", endpoint.channel, accepted)
        if check_channel(f"{key}.announce_channel", driver.announce_channel).media == "ipc":  # it is on this host
            check_endpoints({f"{key}.control_channel": driver.control, "discovery.channel": section.endpoint})
