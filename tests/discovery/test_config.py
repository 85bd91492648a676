# SPDX-License-Identifier: Apache-2.0
"""The settings of discovery: defaults that follow other keys, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorpool.discovery.config import RegistryConfig
from tensorpool.driver import DriverConfig
from tensorpool.errors import ConfigError

IPC = "aeron:ipc?term-length=4m"
UDP = "aeron:udp?endpoint=127.0.0.1:40124"


def driver(name: str = "a", **changed: Any) -> dict[str, Any]:
    return {"instance_id": name, "control_channel": IPC, "control_stream_id": 2000} | changed


def registry(*drivers: dict[str, Any], **section: Any) -> RegistryConfig:
    return RegistryConfig.load(environ={}, overrides={"discovery": {"drivers": list(drivers), **section}})


def test_a_registrys_defaults_are_the_specifications() -> None:
    """§4.2, §5.2, §6.2."""
    config = registry(driver())
    section = config.discovery
    assert (section.channel, section.stream_id, section.max_results) == ("aeron:ipc?term-length=1m", 1000, 1000)
    (entry,) = section.drivers
    assert (entry.announce, entry.metadata, entry.expiry_ns) == (entry.control, None, 3_000_000_000)
    assert config.dump()["discovery.drivers[0].announce_stream_id"] == 2000


def test_expiry_follows_the_period_of_each_driver() -> None:
    """Its own period, else the registry's expiry, else the registry's period."""
    entries = registry(
        driver("a"),
        driver("b", control_stream_id=2001, announce_period_ms=100),
        driver("c", control_stream_id=2002, announce_period_ms=100, expiry_ms=5000),
        announce_period_ms=500,
        expiry_ms=4000,
    ).discovery.drivers
    assert [entry.expiry_ms for entry in entries] == [4000, 300, 5000]
    assert [entry.announce_period_ms for entry in entries] == [500, 100, 100]
    assert registry(driver(), announce_period_ms=500).discovery.drivers[0].expiry_ms == 1500


def test_a_driver_has_discovery_on_its_control_stream() -> None:
    """With its announce period; each can be set otherwise."""
    config = DriverConfig.load(
        environ={}, overrides={"driver.control_stream_id": 2000, "policies.announce_period_ms": 50}
    )
    section = config.discovery
    assert section.enabled
    assert section.endpoint == config.driver.control
    assert (section.announce_period_ms, section.expiry_ms) == (50, 150)
    other = DriverConfig.load(environ={"DISCOVERY_STREAM_ID": "2100", "DISCOVERY_ENABLED": "false"})
    assert (other.discovery.stream_id, other.discovery.enabled) == (2100, False)


def test_variables_go_over_the_file(tmp_path: Path) -> None:
    """As everywhere."""
    path = tmp_path / "registry.toml"
    path.write_text(
        '[discovery]\nmax_results = 5\n[[discovery.drivers]]\ninstance_id = "a"\n'
        f'control_channel = "{IPC}"\ncontrol_stream_id = 2000\n'
    )
    assert RegistryConfig.load(path, environ={}).discovery.max_results == 5
    assert RegistryConfig.load(path, environ={"DISCOVERY_MAX_RESULTS": "7"}).discovery.max_results == 7


@pytest.mark.parametrize(
    ("drivers", "section", "key"),
    [
        ([], {}, "discovery.drivers"),
        ([driver(), driver()], {}, "discovery.drivers[1].instance_id"),
        ([driver(), driver("b")], {}, "discovery.drivers[1].announce_channel"),
        ([driver(), driver("b", control_channel="aeron:ipc")], {}, "discovery.drivers[1].announce_channel"),
        (
            [
                driver(announce_channel=UDP, metadata_channel=UDP, metadata_stream_id=5),
                driver("b", control_stream_id=2001, metadata_channel=UDP + "|mtu=8k", metadata_stream_id=5),
            ],
            {},
            "discovery.drivers[1].metadata_channel",
        ),
        ([driver(control_stream_id=0)], {}, "discovery.drivers[0].control_stream_id"),
        ([driver(control_channel="")], {}, "discovery.drivers[0].control_channel"),
        ([driver(instance_id="")], {}, "discovery.drivers[0].instance_id"),
        ([driver(expiry_ms=1000)], {}, "discovery.drivers[0].expiry_ms"),
        ([driver()], {"expiry_ms": 1000}, "discovery.expiry_ms"),
        ([driver(control_stream_id=1000)], {}, "discovery.channel"),  # F4
        ([driver()], {"channel": "aeron:tcp"}, "discovery.channel"),
        ([driver()], {"channel": "aeron-spy:" + UDP}, "discovery.channel"),
        ([driver()], {"stream_id": 0}, "discovery.stream_id"),
        ([driver()], {"max_results": 70_000}, "discovery.max_results"),
        ([driver()], {"response_channel_allow": ["aeron:tcp"]}, "discovery.response_channel_allow[0]"),
        ([driver()], {"max_result": 5}, "discovery.max_result"),
        ([driver(announce="x")], {}, "discovery.drivers[0].announce"),
        ([driver()], {"acl": [{"clients": [1]}]}, "discovery.acl[0].clients"),
    ],
)
def test_what_cannot_be_served_is_refused(drivers: list[dict[str, Any]], section: dict[str, Any], key: str) -> None:
    """With the key that is to blame."""
    with pytest.raises(ConfigError) as caught:
        registry(*drivers, **section)
    assert caught.value.key == key, str(caught.value)


def test_drivers_elsewhere_may_have_the_endpoints_of_this_host() -> None:
    """Their control streams are on other media drivers; only where they announce must differ."""
    config = registry(
        driver("a", control_stream_id=1000, announce_channel=UDP, announce_stream_id=1),
        driver("b", control_stream_id=1000, announce_channel=UDP, announce_stream_id=2),
    )
    assert len(config.discovery.drivers) == 2


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"discovery.channel": "aeron:ipc?term-length=1m"}, "discovery.channel"),  # F4: it shares stream 1000
        ({"discovery.expiry_ms": 1000}, "discovery.expiry_ms"),
        ({"discovery.stream_id": 20_001}, "driver.stream_id_range"),
        ({"discovery.registries": [{"stream_id": 5}]}, "discovery.registries[0].channel"),
    ],
)
def test_a_driver_refuses_what_it_cannot_serve(overrides: dict[str, Any], key: str) -> None:
    """Before anything starts."""
    with pytest.raises(ConfigError) as caught:
        DriverConfig.load(environ={}, overrides=overrides)
    assert caught.value.key == key, str(caught.value)
