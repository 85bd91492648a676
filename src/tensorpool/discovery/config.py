# SPDX-License-Identifier: Apache-2.0
"""Every setting of discovery: of the provider inside a driver, of its clients, and of a registry.

    [discovery]                 where requests arrive, limits, who may see what
    [[discovery.acl]]           a rule: which streams some clients see
    [[discovery.registries]]    of a driver and its clients: registries to announce to and to query
    [[discovery.drivers]]       of a registry: the drivers whose announces it receives
    [control]                   of a registry: where it receives commands as a service

Discovery §4.2, §5.2, §6.2, §8, §12; decisions F1, F3, F4, F6, F9, F11.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from tensorpool import settings
from tensorpool.channel import check_channel, check_endpoints
from tensorpool.control.config import ControlConfig
from tensorpool.errors import ConfigError
from tensorpool.settings import (
    MS,
    U32,
    AeronStreamId,
    Configuration,
    Derived,
    EndpointOf,
    Name,
    OptionalChannel,
    OptionalEndpointOf,
    PositiveU32,
    PublishableChannel,
    StreamId,
)

EXPIRY_PERIODS: Final = 3
ERROR_MESSAGE_MAX_BYTES: Final = 1024
NAME_MAX_BYTES: Final = 256
REGISTRY_CHANNEL: Final = "aeron:ipc?term-length=1m"

OptionalName = Annotated[str, Meta(pattern=r"\A[!-~]*\Z", description='visible ASCII without spaces, or "" for none')]
Limit = Annotated[int, Meta(ge=1, le=65_534)]  # A18: entries of a group
Scheme = Literal["aeron:ipc", "aeron:udp"]


def _expiry_ms(provider: Any, _: Any) -> int:
    return EXPIRY_PERIODS * int(provider.announce_period_ms)


def _driver_expiry_ms(driver: Any, root: Any) -> int:
    """A driver that announces at a period of its own also expires by it."""
    has_own_period = driver.gives("announce_period_ms")
    return _expiry_ms(driver, root) if has_own_period else int(root.discovery.expiry_ms)


class AclRule(msgspec.Struct, frozen=True, kw_only=True):
    """`[[discovery.acl]]`: these clients see the streams that fit every list; an empty list fits all."""

    client_ids: tuple[U32, ...] = ()
    """The clients that this rule is for."""
    driver_instance_ids: tuple[Name, ...] = ()
    """They see streams of these drivers."""
    stream_ids: tuple[StreamId, ...] = ()
    """They see streams with these ids."""
    names: tuple[str, ...] = ()
    """They see streams with these names, in which * and ? are wildcards."""
    tags: tuple[str, ...] = ()
    """They see streams that have all of these tags."""


class ProviderSection(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that the provider inside a driver and a registry have in common."""

    channel: PublishableChannel
    """Where discovery requests arrive."""
    stream_id: AeronStreamId
    """The Aeron stream id of channel."""
    announce_period_ms: PositiveU32
    """How often streams are announced."""
    expiry_ms: Annotated[
        PositiveU32,
        Derived("three announce periods", _expiry_ms),
    ]
    """A stream that was not announced for so long is no longer listed."""
    max_results: Limit = 1000
    """A query that finds more streams is refused."""
    max_streams: PositiveU32 = 100_000
    """How many streams are listed at the most."""
    client_requests_per_s: PositiveU32 = 50
    """How many requests of one client are answered in a second."""
    requests_per_s: PositiveU32 = 500
    """How many requests are answered in a second."""
    response_publication_limit: PositiveU32 = 64
    """How many response channels are open at a time; the least recently used one is closed for a new one."""
    response_idle_ms: PositiveU32 = 30_000
    """A response channel that was not used for so long is closed."""
    response_connect_ms: PositiveU32 = 2_000
    """A response is dropped if its channel has no subscriber for so long."""
    response_channel_allow: tuple[Scheme, ...] = ("aeron:ipc", "aeron:udp")
    """Responses are sent over these media only."""
    response_host_names: bool = False
    """Allow host names in response channels, which the media driver must resolve, beside IP addresses."""
    acl_enabled: bool = False
    """Show a client only what the rules of discovery.acl allow."""
    acl: tuple[AclRule, ...] = ()
    """The rules; a stream that no rule allows is not shown."""

    endpoint = EndpointOf("")


class RegistryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """`[[discovery.registries]]`: where a registry receives requests, and where it receives this driver's announces."""

    channel: PublishableChannel
    """Where the registry receives requests."""
    stream_id: AeronStreamId = 1000
    """The Aeron stream id of channel."""
    announce_channel: OptionalChannel = ""
    """Where the driver announces its streams for this registry, beside driver.announce_channel."""
    announce_stream_id: AeronStreamId = 1000
    """The Aeron stream id of announce_channel."""

    endpoint = EndpointOf("")
    announce = OptionalEndpointOf("announce")


class DiscoverySection(ProviderSection, frozen=True, kw_only=True):
    """`[discovery]` of a driver and its clients."""

    channel: Annotated[PublishableChannel, Derived("driver.control_channel")]
    stream_id: Annotated[AeronStreamId, Derived("driver.control_stream_id")]
    announce_period_ms: Annotated[PositiveU32, Derived("policies.announce_period_ms")]
    enabled: bool = True
    """Answer discovery requests in the driver."""
    response_channel: OptionalChannel = ""
    """Where clients ask for responses; "" is a channel that the client makes for itself."""
    registries: tuple[RegistryEntry, ...] = ()
    """Registries that the driver announces to and that clients query too."""


class DriverEntry(msgspec.Struct, frozen=True, kw_only=True):
    """`[[discovery.drivers]]`: a driver whose announces a registry receives, and what the registry says about it."""

    instance_id: Name
    """The driver's driver.instance_id."""
    control_channel: PublishableChannel
    """Where clients find the driver."""
    control_stream_id: AeronStreamId
    """The Aeron stream id of control_channel."""
    announce_channel: Annotated[PublishableChannel, Derived("its control_channel", lambda it, _: it.control_channel)]
    """Where the registry receives the driver's announces; no other driver announces there."""
    announce_stream_id: Annotated[AeronStreamId, Derived("its control_stream_id", lambda it, _: it.control_stream_id)]
    """The Aeron stream id of announce_channel."""
    metadata_channel: OptionalChannel = ""
    """Where the registry receives names and metadata of the driver's streams."""
    metadata_stream_id: AeronStreamId = 1300
    """The Aeron stream id of metadata_channel."""
    announce_period_ms: Annotated[PositiveU32, Derived("discovery.announce_period_ms")]
    """How often this driver announces."""
    expiry_ms: Annotated[PositiveU32, Derived("three periods of its own, or discovery.expiry_ms", _driver_expiry_ms)]
    """A stream of this driver that was not announced for so long is no longer listed."""

    control = EndpointOf("control")
    announce = EndpointOf("announce")
    metadata = OptionalEndpointOf("metadata")

    @property
    def expiry_ns(self) -> int:
        return self.expiry_ms * MS


class RegistrySection(ProviderSection, frozen=True, kw_only=True):
    """`[discovery]` of a registry."""

    channel: PublishableChannel = REGISTRY_CHANNEL
    stream_id: AeronStreamId = 1000
    announce_period_ms: PositiveU32 = 1000
    instance_id: OptionalName = ""
    """With an id the registry's service tag is `service:discovery:<instance_id>`."""
    aeron_dir: str = ""
    """The directory of the media driver; "" is Aeron's default."""
    drivers: tuple[DriverEntry, ...] = ()
    """The drivers whose announces the registry receives; at least one."""


class RegistryConfig(Configuration, frozen=True, kw_only=True):
    """The configuration of one registry, complete and consistent.

    >>> config = RegistryConfig.load(Path("registry.toml"))     # doctest: +SKIP
    """

    discovery: RegistrySection
    control: ControlConfig

    def __post_init__(self) -> None:
        settings.check(self)
        section = self.discovery
        check_provider(section)
        if not section.drivers:
            accepted = "at least one table [[discovery.drivers]] with instance_id, control_channel, control_stream_id"
            raise ConfigError("discovery.drivers", [], accepted)
        _check_drivers(section)
        self.control.check_beside({"discovery.channel": section.endpoint})


def check_provider(section: ProviderSection) -> None:
    """Refuse an expiry that a stream could not outlive between two announces. Raises ConfigError."""
    if section.expiry_ms <= section.announce_period_ms:
        accepted = f"more than the announce period of {section.announce_period_ms} ms"
        raise ConfigError("discovery.expiry_ms", section.expiry_ms, accepted)


def _check_drivers(section: RegistrySection) -> None:
    """F6: an announce does not name its driver, so each driver needs an announce stream of its own."""
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
        for field, endpoint in (("announce_channel", driver.announce), ("metadata_channel", driver.metadata)):
            if endpoint is None:
                continue
            place = check_channel(f"{key}.{field}", endpoint.channel).address, endpoint.stream_id
            owner, owners_field = places.setdefault(place, (driver.instance_id, f"{key}.{field}"))
            if owner != driver.instance_id:
                accepted = (
                    f"a channel or stream id of its own: {owners_field} of driver {owner} is the same stream, and the "
                    "messages there do not name their driver"
                )
                raise ConfigError(f"{key}.{field}", endpoint.channel, accepted)
        if check_channel(f"{key}.announce_channel", driver.announce_channel).media == "ipc":  # it is on this host
            check_endpoints({f"{key}.control_channel": driver.control, "discovery.channel": section.endpoint})
