# SPDX-License-Identifier: Apache-2.0
"""Every setting of the supervisor, and what observers such as `tensorpool top` share with it.

    [supervisor]                identity, limits, when something lags or is stale, where it serves HTTP
    [[supervisor.rules]]        which consumers get which mode, and when
    [control]                   the service control plane: see tensorpool.control.config
    [driver] [shm] [policies]   the driver's own keys: endpoints, directories, announce period, shutdown token

A driver's file can be read as it is: [profiles], [streams], [discovery] and [client] are accepted and not used.
Wire §10.1.3, §10.5, §15.14; Driver Model §4.13; decisions E24, E26, E28, I4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta

from tensorpool import settings
from tensorpool.channel import check_channel
from tensorpool.control.config import ControlConfig
from tensorpool.discovery.config import DiscoverySection
from tensorpool.driver.config import (
    ClientSection,
    DriverConfig,
    DriverSection,
    PoliciesSection,
    ProfileConfig,
    ShmSection,
    StreamConfig,
)
from tensorpool.errors import ConfigError
from tensorpool.settings import MS, U32, Configuration, Name, PositiveU32
from tensorpool.telemetry.addresses import HTTP_ADDRESS, checked_address, parse_address


def _check_http(key: str, text: str) -> None:
    if text:
        parse_address(key, text)


def _check_fallback(key: str, uri: str) -> None:
    """§10.1.3: consumers ignore a fallback with an undefined scheme, so it is refused here."""
    if uri.startswith("aeron"):
        check_channel(key, uri)
    elif uri and (not uri.startswith("bridge://") or uri == "bridge://" or not uri.isascii() or not uri.isprintable()):
        raise ConfigError(key, uri, 'an Aeron URI, bridge://<id>, or "" for none')


Address = Annotated[str, Meta(description=HTTP_ADDRESS, extra={"check": _check_http})]
Fallback = Annotated[str, Meta(description="an Aeron URI or bridge://<id>", extra={"check": _check_fallback})]
Periods = Annotated[int, Meta(ge=3, le=5)]  # §15.14
Frames = Annotated[int, Meta(ge=0, le=2**63 - 1)]
ConsumerId = Annotated[int, Meta(ge=1, le=2**32 - 2)]


class RuleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`[[supervisor.rules]]`: consumers that are in trouble for `for_ms` get another mode, or another source.

    Of several rules that fit, the first counts. E26: ConsumerConfig carries no rate, so a consumer that a rule makes
    RATE_LIMITED keeps its own max_rate_hz.
    """

    stream: str = "*"
    """The streams that the rule is for: a name, in which * and ? are wildcards, or an id."""
    consumer_ids: tuple[ConsumerId, ...] = ()
    """The consumers that the rule is for; none is all."""
    when_lag_over: Frames = 0
    """A consumer that is more frames behind is in trouble; 0 ignores the lag."""
    when_drops_per_s_over: U32 = 0
    """A consumer that drops more frames a second is in trouble; 0 ignores drops."""
    for_ms: U32 = 2_000
    """How long a consumer must be in trouble before the rule acts."""
    mode: Literal["STREAM", "RATE_LIMITED"] = "RATE_LIMITED"
    """The mode that the consumer gets."""
    fallback_uri: Fallback = ""
    """Where the consumer gets its frames instead of shared memory."""
    release_after_ms: U32 = 0
    """Undo the rule after so long without trouble; 0 never undoes it."""
    cooldown_ms: PositiveU32 = 30_000
    """How long the rule does not act again after it was undone; twice as long each further time."""


class SupervisorSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[supervisor]`"""

    instance_id: Name = "supervisor-01"
    """Names this supervisor in logs and in its service tag."""
    aeron_dir: str = ""
    """The directory of the media driver; "" is driver.aeron_dir."""
    http: Address = "127.0.0.1:9464"
    """Where the supervisor serves HTTP; "" serves none."""
    http_allow_remote: bool = False
    """Allow an address that other hosts reach; every process that reaches it can read."""
    stale_periods: Periods = 4
    """A stream, consumer or service is stale after so many announce or heartbeat periods without a message."""
    forget_ms: PositiveU32 = 60_000
    """How long something stale is still shown."""
    lag_frames: Frames = 0
    """A consumer that is further behind lags; 0 is half the ring, or a quarter of a second of frames."""
    read_regions: bool = True
    """Read superblocks and slot headers of the streams; nothing is written there."""
    max_streams: PositiveU32 = 10_000
    """How many streams are tracked at the most."""
    max_consumers: PositiveU32 = 10_000
    """How many consumers are tracked at the most."""
    max_leases: PositiveU32 = 20_000
    """How many leases are tracked at the most."""
    max_services: PositiveU32 = 1_000
    """How many services are tracked at the most."""
    max_changes: PositiveU32 = 1_000
    """How many of the latest changes are kept."""
    rules: tuple[RuleConfig, ...] = ()
    """The rules, in the order in which they are tried."""


class SupervisorConfig(Configuration, frozen=True, kw_only=True):
    """The configuration of one supervisor, complete and consistent.

    >>> config = SupervisorConfig.load("supervisor.toml")     # doctest: +SKIP
    """

    supervisor: SupervisorSection
    control: ControlConfig
    driver: DriverSection
    shm: ShmSection
    profiles: Mapping[str, ProfileConfig] = {}
    policies: PoliciesSection
    streams: Mapping[str, StreamConfig] = {}
    discovery: DiscoverySection
    client: ClientSection

    @classmethod
    def of(cls, driver: DriverConfig, **supervisor: Any) -> Self:
        """For an observer of one driver, by that driver's configuration; keywords are keys of [supervisor]."""
        return cls(
            supervisor=SupervisorSection(**supervisor),
            control=driver.control,
            driver=driver.driver,
            shm=driver.shm,
            policies=driver.policies,
            discovery=driver.discovery,
            client=driver.client,
        )

    def __post_init__(self) -> None:
        section = self.supervisor
        settings.check(_Used(supervisor=section, control=self.control, driver=self.driver, shm=self.shm))
        self.control.check_beside(
            {"driver.control_channel": self.driver.control, "driver.qos_channel": self.driver.qos}
        )
        if section.http:
            checked_address(
                "supervisor.http",
                section.http,
                allow_remote=section.http_allow_remote,
                permission="supervisor.http_allow_remote = true",
            )
        for index, rule in enumerate(section.rules):
            _check_rule(f"supervisor.rules[{index}]", rule)

    @property
    def announce_period_ns(self) -> int:
        return self.policies.announce_period_ms * MS

    @property
    def stale_ns(self) -> int:
        """§15.14, E28: whatever sends nothing for longer is stale."""
        return self.supervisor.stale_periods * self.announce_period_ns


class _Used(msgspec.Struct, frozen=True, kw_only=True):
    """The tables that the supervisor uses and therefore checks; the driver checks its other tables itself."""

    supervisor: SupervisorSection
    control: ControlConfig
    driver: DriverSection
    shm: ShmSection


def _check_rule(key: str, rule: RuleConfig) -> None:
    if not rule.stream:
        raise ConfigError(f"{key}.stream", rule.stream, 'a name, with * and ?, or an id; "*" for all')
    if not rule.when_lag_over and not rule.when_drops_per_s_over:
        accepted = "frames, or when_drops_per_s_over frames a second: a rule needs one of them"
        raise ConfigError(f"{key}.when_lag_over", rule.when_lag_over, accepted)
    if rule.mode == "STREAM" and not rule.fallback_uri:
        raise ConfigError(f"{key}.mode", rule.mode, "RATE_LIMITED, or a fallback_uri: a rule has to change something")
    if rule.fallback_uri and rule.release_after_ms:
        accepted = "0 with a fallback_uri: a consumer that reads elsewhere reports no lag or drops"
        raise ConfigError(f"{key}.release_after_ms", rule.release_after_ms, accepted)
