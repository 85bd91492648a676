# SPDX-License-Identifier: Apache-2.0
"""Every setting of the supervisor, and what observers such as `tensorpool top` share with it.

    [supervisor]                who it is, how much it remembers, when somebody lags or is stale, where it serves HTTP
    [[supervisor.rules]]        which consumers are told what, and when
    [control]                   the service control plane: see tensorpool.control.config
    [driver] [shm] [policies]   the driver's own keys: endpoints, directories, announce period, shutdown token

A driver's file can be read as it is: [profiles], [streams] and [discovery] are accepted and not used.
Wire §10.1.3, §10.5, §15.14; Driver Model §4.13; decisions E24, E26, E28, I4.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self

import msgspec
from msgspec import Meta

from tensorpool import config
from tensorpool.channel import check_channel
from tensorpool.config import U32, Name, PositiveU32
from tensorpool.control.config import ControlConfig
from tensorpool.discovery.config import DiscoverySection
from tensorpool.driver.config import (
    DriverConfig,
    DriverSection,
    PoliciesSection,
    ProfileConfig,
    ShmSection,
    StreamConfig,
)
from tensorpool.errors import ConfigError

MS: Final = 1_000_000  # nanoseconds
_HTTP: Final = 'HOST:PORT such as 127.0.0.1:9464 or [::1]:9464, or "" for none'


def parse_address(key: str, text: str) -> tuple[str, int]:
    """A host and a port. Raises ConfigError for `key`."""
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if is_bracketed else host
    if not colon or not bare or (":" in bare and not is_bracketed):
        raise ConfigError(key, text, _HTTP)
    if not (port.isascii() and port.isdecimal()) or int(port) > 65_535:
        raise ConfigError(key, text, "a port from 0 to 65535 after the colon; 0 takes any that is free")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this host can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_http(key: str, text: str) -> None:
    if text:
        parse_address(key, text)


def _check_fallback(key: str, uri: str) -> None:
    """§10.1.3: schemes that nobody defined count as no fallback, so they are refused here."""
    if uri.startswith("aeron"):
        check_channel(key, uri)
    elif uri and (not uri.startswith("bridge://") or uri == "bridge://" or not uri.isascii() or not uri.isprintable()):
        raise ConfigError(key, uri, 'an Aeron URI, bridge://<id>, or "" for none')


Address = Annotated[str, Meta(description=_HTTP, extra={"check": _check_http})]
Fallback = Annotated[str, Meta(description="an Aeron URI or bridge://<id>", extra={"check": _check_fallback})]
Periods = Annotated[int, Meta(ge=3, le=5)]  # §15.14
Frames = Annotated[int, Meta(ge=0, le=2**63 - 1)]
ConsumerId = Annotated[int, Meta(ge=1, le=2**32 - 2)]


class RuleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`[[supervisor.rules]]`: consumers that do badly for `for_ms` are told to take less, or to go elsewhere.

    Of several rules that fit, the first counts. A threshold of 0 does not count. E26: ConsumerConfig carries no rate,
    so a consumer that is told RATE_LIMITED takes its own max_rate_hz.
    """

    stream: str = "*"  # a name, with * and ?, or an id
    consumer_ids: tuple[ConsumerId, ...] = ()  # none: all
    when_lag_over: Frames = 0
    when_drops_per_s_over: U32 = 0
    for_ms: U32 = 2_000
    mode: Literal["STREAM", "RATE_LIMITED"] = "RATE_LIMITED"
    fallback_uri: Fallback = ""  # given: use_shm is false
    release_after_ms: U32 = 0  # of doing well again; 0: what was told stays
    cooldown_ms: PositiveU32 = 30_000  # after a release, twice as long after each further one


class SupervisorSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[supervisor]`"""

    instance_id: Name = "supervisor-01"
    aeron_dir: str = ""  # driver.aeron_dir
    http: Address = "127.0.0.1:9464"
    http_allow_remote: bool = False
    stale_periods: Periods = 4  # of announces, hello, QoS and heartbeats that did not come
    forget_ms: PositiveU32 = 60_000  # what is stale is shown for so long
    lag_frames: Frames = 0  # who is further behind lags; 0: half the ring, or a quarter of a second of frames
    read_regions: bool = True  # look into superblocks and slot headers, which only reads
    max_streams: PositiveU32 = 10_000
    max_consumers: PositiveU32 = 10_000
    max_leases: PositiveU32 = 20_000
    max_services: PositiveU32 = 1_000
    max_changes: PositiveU32 = 1_000
    rules: tuple[RuleConfig, ...] = ()


class SupervisorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one supervisor, complete and consistent.

    >>> config = SupervisorConfig.load("supervisor.toml")     # doctest: +SKIP

    Raises ConfigError, however it is made.
    """

    supervisor: SupervisorSection = msgspec.field(default_factory=SupervisorSection)
    control: ControlConfig = msgspec.field(default_factory=ControlConfig)
    driver: DriverSection = msgspec.field(default_factory=DriverSection)
    shm: ShmSection = msgspec.field(default_factory=ShmSection)
    policies: PoliciesSection = msgspec.field(default_factory=PoliciesSection)
    profiles: Mapping[str, ProfileConfig] = {}
    streams: Mapping[str, StreamConfig] = {}
    discovery: DiscoverySection = msgspec.field(default_factory=DiscoverySection)

    @classmethod
    def load(
        cls,
        path: Path | str | None = None,
        environ: Mapping[str, str] = os.environ,
        overrides: Mapping[str, Any] = MappingProxyType({}),
    ) -> Self:
        """Read a file; variables and then flags go over it. Raises ConfigError."""
        return config.load(cls, path=None if path is None else Path(path), environ=environ, overrides=overrides)

    @classmethod
    def of(cls, driver: DriverConfig, **supervisor: Any) -> Self:
        """For an observer of one driver, by that driver's configuration; keywords are keys of [supervisor]."""
        return cls(
            supervisor=SupervisorSection(**supervisor),
            control=driver.control,
            driver=driver.driver,
            shm=driver.shm,
            policies=driver.policies,
        )

    def __post_init__(self) -> None:
        section = self.supervisor
        config.check(_Used(supervisor=section, control=self.control, driver=self.driver, shm=self.shm))
        self.control.check_beside(
            {"driver.control_channel": self.driver.control, "driver.qos_channel": self.driver.qos}
        )
        if section.http:
            host, _ = parse_address("supervisor.http", section.http)
            if not section.http_allow_remote and not is_loopback(host):
                accepted = "a loopback address, or supervisor.http_allow_remote = true: anybody who reaches it can read"
                raise ConfigError("supervisor.http", section.http, accepted)
        for index, rule in enumerate(section.rules):
            _check_rule(f"supervisor.rules[{index}]", rule)

    @property
    def announce_period_ns(self) -> int:
        return self.policies.announce_period_ms * MS

    @property
    def stale_ns(self) -> int:
        """§15.14, E28: how long nothing may be heard of somebody alive."""
        return self.supervisor.stale_periods * self.announce_period_ns

    def dump(self) -> dict[str, object]:
        """Every key with its value in effect; the token stays hidden."""
        return config.dump(self)


class _Used(msgspec.Struct, frozen=True, kw_only=True):
    """What is checked beyond its types; of the driver's other tables the driver is the judge."""

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
        raise ConfigError(f"{key}.mode", rule.mode, "RATE_LIMITED, or a fallback_uri: a rule has to tell something")
    if rule.fallback_uri and rule.release_after_ms:
        accepted = "0 with a fallback_uri: of a consumer that went elsewhere nobody knows how it does"
        raise ConfigError(f"{key}.release_after_ms", rule.release_after_ms, accepted)
