# SPDX-License-Identifier: Apache-2.0
"""What a loaded configuration offers the driver, and the examples that load."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tensorpool.channel import Endpoint
from tensorpool.driver.config import DriverConfig, PoolConfig, ProfileConfig, StreamConfig
from tensorpool.errors import ConfigError
from tensorpool.settings import Range
from tensorpool.shm.layout import PoolSpec, RingSpec
from tests.driver.config.conftest import BASE, IPC, load

EXAMPLES = Path(__file__).parents[3] / "examples" / "driver"


# --- what it offers


def test_durations_and_modes_come_ready_for_use(tmp_path: Path) -> None:
    """In nanoseconds and as a number."""
    text = BASE + (
        "[policies]\nlease_keepalive_interval_ms = 250\nlease_expiry_grace_intervals = 4\n"
        'announce_period_ms = 20\nshutdown_timeout_ms = 5\n[shm]\npermissions_mode = "0640"'
    )
    loaded = load(text, folder=tmp_path)
    assert loaded.lease_keepalive_interval_ns == 250_000_000
    assert loaded.lease_duration_ns == 1_000_000_000
    assert loaded.announce_period_ns == 20_000_000
    assert loaded.shutdown_timeout_ns == 5_000_000
    assert loaded.file_mode == 0o640
    assert loaded.profiles["a"].ring == RingSpec(1024, (PoolSpec(1, 65536),))
    assert [loaded.driver.descriptor, loaded.driver.qos] == [Endpoint(IPC, 1100), Endpoint(IPC, 1200)]


def test_the_bill_counts_every_epoch_of_every_stream(tmp_path: Path) -> None:
    """By hand: superblock, ring of 256-byte slots, pools, times the epochs kept."""
    bill = load(f"{BASE}[policies]\nepoch_gc_keep = 3", folder=tmp_path).bill()
    epoch_bytes = (64 + 1024 * 256) + (64 + 1024 * 65536)
    (line,) = bill.lines
    assert (line.name, line.stream_id, line.profile) == ("s", 10000, "a")
    assert (line.epoch_bytes, line.epochs, line.streams) == (epoch_bytes, 3, 1)
    assert (line.total_bytes, bill.epoch_bytes, bill.total_bytes) == (3 * epoch_bytes, epoch_bytes, 3 * epoch_bytes)


@pytest.mark.parametrize(("ids", "max_streams", "streams"), [("1-5", 100, 5), ("1-500", 10, 9), ("1-5", 1, None)])
def test_the_bill_counts_the_streams_that_clients_may_create(
    tmp_path: Path, ids: str, max_streams: int, streams: int | None
) -> None:
    """As many as the range and the limit leave room for, in the default profile."""
    overrides = {"driver.stream_id_range": ids, "policies.max_streams": max_streams, "streams.s.profile": "b"}
    bill = load(folder=tmp_path, **overrides, **{"policies.allow_dynamic_streams": True}).bill()
    static, *dynamic = bill.lines
    assert [line.streams for line in dynamic] == ([] if streams is None else [streams])
    assert bill.epoch_bytes == static.epoch_bytes
    for line in dynamic:
        assert (line.stream_id, line.profile) == (None, "a")
        assert static.total_bytes is not None
        assert bill.total_bytes == static.total_bytes + 2 * line.epoch_bytes * line.streams


def test_the_bill_has_no_limit_when_old_epochs_stay(tmp_path: Path) -> None:
    """None, not a number that looks like one."""
    bill = load(folder=tmp_path, **{"policies.epoch_gc_enabled": False}).bill()
    assert (bill.lines[0].epochs, bill.lines[0].total_bytes, bill.total_bytes) == (None, None, None)


def test_a_configuration_made_by_hand_is_checked() -> None:
    """As in a test or an embedded driver, without a file."""
    profiles = {"p": ProfileConfig(payload_pools=(PoolConfig(pool_id=1, stride_bytes=64),))}
    loaded = DriverConfig.load(environ={})
    driver = msgspec.structs.replace(loaded.driver, stream_id_range=Range())
    policies = msgspec.structs.replace(loaded.policies, allow_dynamic_streams=False, default_profile="p")
    stream = StreamConfig(stream_id=5, profile="p")
    made = msgspec.structs.replace(loaded, driver=driver, policies=policies, profiles=profiles, streams={"s": stream})
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"driver": msgspec.structs.replace(driver, control_channel="ipc")}, "driver.control_channel"),
        ({"driver": msgspec.structs.replace(driver, stream_id_range=Range(1, 9))}, "driver.stream_id_range"),
        ({"shm": msgspec.structs.replace(made.shm, permissions_mode="777")}, "shm.permissions_mode"),
        ({"policies": msgspec.structs.replace(policies, epoch_gc_keep=0)}, "policies.epoch_gc_keep"),
        ({"profiles": {"p": ProfileConfig(payload_pools=())}}, "profiles.p.payload_pools"),
        ({"profiles": {}}, "profiles"),
        ({"streams": {"s": StreamConfig(stream_id=0, profile="p")}}, "streams.s.stream_id"),
        ({"streams": {}}, "streams"),
    ]
    for changes, key in refusals:
        with pytest.raises(ConfigError) as caught:
            msgspec.structs.replace(made, **changes)
        assert caught.value.key == key


def test_a_configuration_is_a_value() -> None:
    """Frozen, comparable, and fit to be handed to another process."""
    loaded = DriverConfig.load(environ={}, overrides={"policies.shutdown_token": "hush"})
    assert loaded == DriverConfig.load(environ={}, overrides={"policies.shutdown_token": "hush"})
    assert pickle.loads(pickle.dumps(loaded)) == copy.deepcopy(loaded) == loaded
    with pytest.raises(AttributeError):
        loaded.driver.instance_id = "x"  # type: ignore[misc]


# --- examples


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_every_example_loads(path: Path) -> None:
    """As it is, with nothing from the environment."""
    loaded = DriverConfig.load(path, environ={})
    assert loaded.bill().epoch_bytes > 0
    assert path.name in (EXAMPLES / "README.md").read_text()


def test_the_examples_show_what_they_say() -> None:
    """The point of each, so that an edit cannot lose it."""
    minimal, camera, dynamic, shared = (
        DriverConfig.load(EXAMPLES / f"{name}.toml", environ={})
        for name in ("minimal", "camera", "dynamic", "shared_group")
    )
    assert len(minimal.streams) == len(minimal.profiles) == 1
    assert {stream.profile for stream in camera.streams.values()} == camera.profiles.keys()
    assert all(len(profile.payload_pools) > 1 for profile in camera.profiles.values())
    assert dynamic.policies.allow_dynamic_streams
    assert dynamic.driver.descriptor_stream_id_range
    assert dynamic.driver.control_stream_id_range
    assert (shared.file_mode, shared.shm.base_dir) == (0o660, "/dev/shm/imaging")
