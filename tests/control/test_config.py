# SPDX-License-Identifier: Apache-2.0
"""`[control]` of every service: defaults, variables, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tensorpool import settings
from tensorpool.control import ControlConfig, Service
from tensorpool.discovery.config import RegistryConfig
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import ConfigError

DRIVERS = [{"instance_id": "a", "control_channel": "aeron:ipc?term-length=4m", "control_stream_id": 2000}]


def load(environ: dict[str, str] | None = None, **section: Any) -> ControlConfig:
    return DriverConfig.load(environ=environ or {}, overrides={"control": section}).control


def test_the_defaults_are_those_of_the_table_of_keys() -> None:
    """On by default, at the streams and the schema that decisions H6 and A11 give."""
    found = load()
    assert found.enabled
    assert (found.control_channel, found.control_stream_id) == ("aeron:ipc?term-length=4m", 1400)
    assert (found.status_channel, found.status_stream_id) == ("aeron:ipc?term-length=4m", 1401)
    assert found.schema_id == 905
    assert found == ControlConfig()
    registry = RegistryConfig.load(environ={}, overrides={"discovery": {"drivers": DRIVERS}})
    assert registry.control == found


def test_variables_and_flags_set_them() -> None:
    """Of the driver and of a registry alike."""
    keys = settings.known_keys(DriverConfig)
    assert keys["control.control_stream_id"] == "CONTROL_CONTROL_STREAM_ID"
    environ = {"CONTROL_ENABLED": "false", "CONTROL_ALIASES": "service:driver,driver"}
    found = load(environ, status_stream_id=1500)
    assert (found.enabled, found.aliases, found.status_stream_id) == (False, ("service:driver", "driver"), 1500)
    overrides = {"discovery": {"drivers": DRIVERS, "instance_id": "r1"}}
    registry = RegistryConfig.load(environ=environ, overrides=overrides)
    assert (registry.control.enabled, registry.discovery.instance_id) == (False, "r1")


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"status_stream_id": 1400}, "control.status_stream_id"),
        ({"schema_id": 901}, "control.schema_id"),
        ({"schema_id": 903}, "control.schema_id"),
        ({"schema_id": 70_000}, "control.schema_id"),
        ({"aliases": ["service driver"]}, "control.aliases[0]"),
        ({"aliases": ["x" * 256]}, "control.aliases[0]"),
        ({"control_channel": "aeron-spy:aeron:udp?endpoint=h:1"}, "control.control_channel"),
        ({"control_channel": "aeron:ipc?term-lenth=4m"}, "control.control_channel"),
        ({"control_stream_id": 1000, "control_channel": "aeron:ipc"}, "control.control_channel"),
        ({"commands_per_s": 0}, "control.commands_per_s"),
        ({"drain": "yes"}, "control.drain"),
        ({"allow_remote": ["", "drain"]}, "control.allow_remote[0]"),
    ],
)
def test_what_cannot_be_served_is_refused(section: dict[str, Any], key: str) -> None:
    """By its key: an echo that would come back as a command, a schema of others, a log that others share."""
    with pytest.raises(ConfigError) as refused:
        load(**section)
    assert refused.value.key == key


def test_streams_of_others_may_be_shared_where_their_channels_agree() -> None:
    """Headers distinguish the messages of many schemas."""
    assert load(control_stream_id=1000, status_stream_id=1300).control_stream_id == 1000
    assert load(enabled=False, control_stream_id=1000, control_channel="aeron:ipc").control_stream_id == 1000


def test_who_may_end_a_service() -> None:
    """Processes with access to the media driver's directory; over a network none, unless configured."""
    udp: dict[str, Any] = {"control_channel": "aeron:udp?endpoint=127.0.0.1:40123"}
    assert load().allows("drain")
    assert not load(**udp).allows("drain")
    assert load(allow_remote=["drain"], **udp).allows("drain")
    assert not load(allow_remote=["drain"], **udp).allows("pause")


def test_tags_follow_the_convention() -> None:
    """service:<name>, and service:<name>:<instance> where there are several."""
    assert Service("recorder").tag == "service:recorder"
    assert Service("recorder", "lab1").tag == "service:recorder:lab1"
    for name in ("", " ", "rec order", "ä", "x" * 300):
        if name:
            with pytest.raises(ConfigError, match="visible ASCII"):
                Service(name)
