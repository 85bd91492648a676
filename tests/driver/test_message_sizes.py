# SPDX-License-Identifier: Apache-2.0
"""Configurations whose grants or announces no channel could carry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.driver.config import DriverConfig
from tensorpool.driver.message_sizes import check_message_sizes
from tensorpool.errors import ConfigError
from tensorpool.wire.driver import ResponseCode, Role
from tests.support.driver_client import DriverClient, deployed


def pools(count: int) -> dict[str, Any]:
    return {"header_nslots": 4, "payload_pools": [{"pool_id": 65_000 - n, "stride_bytes": 64} for n in range(count)]}


def load(count: int, **driver: str) -> DriverConfig:
    overrides = {f"driver.{key}": value for key, value in driver.items()} | {"profiles.default": pools(count)}
    return DriverConfig.load(environ={}, overrides=overrides)


def test_99_pools_and_a_term_of_64k_are_refused_with_the_arithmetic() -> None:
    """When the configuration is made: the bytes that are needed, those that there are, and a term that would do."""
    with pytest.raises(ConfigError) as refused:
        load(99, control_channel="aeron:ipc?term-length=64k")
    assert refused.value.key == "driver.control_channel"
    for words in ("profile default has 99 pools", "this one carries 8192", "a term-length of at least 131072"):
        assert words in refused.value.accepted
    load(99, control_channel="aeron:ipc?term-length=128k")


def test_the_announce_channel_is_checked_by_itself() -> None:
    """Its log may be smaller than the control stream's."""
    with pytest.raises(ConfigError, match=r"driver\.announce_channel.*this one carries 8192"):
        load(99, announce_channel="aeron:ipc?term-length=64k", announce_stream_id="1001")


def test_without_a_term_length_the_publications_decide() -> None:
    """The media driver chooses then, and the driver compares with what it got, at start."""
    config = load(99, control_channel="aeron:ipc")
    check_message_sizes(config, 1 << 20, 1 << 20)
    with pytest.raises(ConfigError, match="this one carries 8192"):
        check_message_sizes(config, 8192, 1 << 20)
    with pytest.raises(ConfigError, match=r"announce_channel.*this one carries 8192"):
        check_message_sizes(config, 1 << 20, 8192)


def test_a_driver_on_a_media_driver_with_small_terms_does_not_start(shm_dir: Path) -> None:
    """The refusal comes from the publication itself; the namespace is free again, and nothing is left."""
    aeron_dir = str(shm_dir / "aeron")
    with aeron.MediaDriver(aeron_dir, ipc_term_buffer_length=1 << 16):
        tables = {"shm.base_dir": str(shm_dir / "regions"), "driver.control_channel": "aeron:ipc"}
        streams = {"discovery.enabled": False, "control.enabled": False}
        many = DriverConfig.load(environ={}, overrides=tables | streams | {"profiles.default": pools(99)})
        for _ in range(2):
            with pytest.raises(ConfigError, match="this one carries 8192"):
                tp.Driver(many, aeron_dir=aeron_dir)
        with tp.Driver(DriverConfig.load(environ={}, overrides=tables | streams), aeron_dir=aeron_dir) as driver:
            assert driver.is_running


def test_what_is_accepted_is_granted_and_announced(shared_media_driver: aeron.MediaDriver) -> None:
    """Forty pools in a term of 64k, which take half of what it carries."""
    aeron_dir = shared_media_driver.aeron_dir
    with (
        deployed(
            aeron_dir,
            streams=[38_000],
            driver={"control_channel": "aeron:ipc?term-length=64k"},
            profiles={"small": pools(40)},
        ) as deployment,
        DriverClient(deployment) as client,
    ):
        lease = client.attach(38_000, Role.PRODUCER)
        assert len(lease.response.payload_pools) == 40
        assert len(client.next_announce(38_000).message.payload_pools) == 40
        assert client.detach(lease).message.code is ResponseCode.OK
