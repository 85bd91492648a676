# SPDX-License-Identifier: Apache-2.0
"""Configuration clauses of the driver: canonical keys and defaults, precedence, what must not start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorpool.driver.config import DriverConfig
from tensorpool.errors import ConfigError
from tensorpool.shm import AllowedBases, namespace_path

# Only what the specification requires: a profile with a pool, and a stream since streams on demand are off.
REQUIRED = """
[profiles.first]
payload_pools = [{ pool_id = 1, stride_bytes = 1048576 }]
[profiles.second]
payload_pools = [{ pool_id = 1, stride_bytes = 64 }]
[streams.camera]
stream_id = 10000
profile = "second"
"""


def configured(folder: Path, text: str = REQUIRED, /, **environ: str) -> DriverConfig:
    path = folder / "driver.toml"
    path.write_text(text)
    return DriverConfig.load(path, environ)


def refused(folder: Path, text: str) -> str:
    """The key that a configuration is refused for."""
    with pytest.raises(ConfigError) as caught:
        configured(folder, text)
    return caught.value.key


@pytest.mark.parametrize(
    ("key", "default"),
    [
        pytest.param("driver.instance_id", "driver-01", marks=pytest.mark.spec("DRV-17-04")),
        pytest.param("driver.control_channel", "aeron:ipc?term-length=4m", marks=pytest.mark.spec("DRV-17-05")),
        pytest.param("driver.control_stream_id", 1000, marks=pytest.mark.spec("DRV-17-06")),
        pytest.param("shm.base_dir", "/dev/shm/tensorpool", marks=pytest.mark.spec("DRV-17-07")),
        pytest.param("driver.aeron_dir", "", marks=pytest.mark.spec("DRV-17-11")),
        pytest.param("driver.qos_channel", "aeron:ipc?term-length=4m", marks=pytest.mark.spec("DRV-17-14")),
        pytest.param("driver.qos_stream_id", 1200, marks=pytest.mark.spec("DRV-17-15")),
        pytest.param("shm.require_hugepages", False, marks=pytest.mark.spec("DRV-17-19")),
        pytest.param("shm.page_size_bytes", 4096, marks=pytest.mark.spec("DRV-17-20")),
        pytest.param("shm.permissions_mode", "660"),
        pytest.param("policies.allow_dynamic_streams", False, marks=pytest.mark.spec("DRV-17-23")),
        pytest.param("policies.announce_period_ms", 1000, marks=pytest.mark.spec("DRV-17-25")),
        pytest.param("policies.lease_keepalive_interval_ms", 1000, marks=pytest.mark.spec("DRV-17-26")),
        pytest.param("policies.lease_expiry_grace_intervals", 3, marks=pytest.mark.spec("DRV-17-27")),
        pytest.param("policies.prefault_shm", True, marks=pytest.mark.spec("DRV-17-28")),
        pytest.param("policies.mlock_shm", False, marks=pytest.mark.spec("DRV-17-29")),
        pytest.param("policies.epoch_gc_enabled", True, marks=pytest.mark.spec("DRV-17-33")),
        pytest.param("policies.epoch_gc_keep", 2, marks=pytest.mark.spec("DRV-17-34")),
        pytest.param("policies.epoch_gc_on_startup", False, marks=pytest.mark.spec("DRV-17-36")),
        pytest.param("policies.shutdown_timeout_ms", 2000, marks=pytest.mark.spec("DRV-17-37")),
        pytest.param("policies.shutdown_token", ""),
    ],
)
def test_a_file_with_the_required_keys_gets_the_canonical_defaults(tmp_path: Path, key: str, default: object) -> None:
    """Each default of §17, as the configuration in effect tells it."""
    assert configured(tmp_path).dump()[key] == default


@pytest.mark.spec("DRV-17-01")
def test_the_canonical_keys_are_read_from_toml(tmp_path: Path) -> None:
    """Every key of §17 under its own name, each with a value that is not its default."""
    text = """
        [driver]
        instance_id = "driver-02"
        control_channel = "aeron:ipc?term-length=1m"
        control_stream_id = 2000
        aeron_dir = "/dev/shm/aeron-lab"
        announce_channel = "aeron:udp?endpoint=127.0.0.1:40123"
        announce_stream_id = 2001
        qos_channel = "aeron:ipc?term-length=2m"
        qos_stream_id = 2200
        stream_id_range = "20000-29999"
        descriptor_stream_id_range = [30000, 30999]
        control_stream_id_range = "31000-31999"
        [shm]
        base_dir = "/dev/shm/lab"
        require_hugepages = true
        page_size_bytes = 2097152
        permissions_mode = "600"
        allowed_base_dirs = ["/dev/shm", "/mnt/huge"]
        [policies]
        allow_dynamic_streams = true
        default_profile = "large"
        announce_period_ms = 100
        lease_keepalive_interval_ms = 200
        lease_expiry_grace_intervals = 5
        prefault_shm = false
        mlock_shm = true
        epoch_gc_enabled = false
        epoch_gc_keep = 4
        epoch_gc_min_age_ns = 1
        epoch_gc_on_startup = true
        shutdown_timeout_ms = 1
        shutdown_token = "s3cret"
        [profiles.small]
        header_nslots = 8
        payload_pools = [{ pool_id = 3, stride_bytes = 128 }]
        [profiles.large]
        payload_pools = [{ pool_id = 4, stride_bytes = 1048576 }]
        [streams.camera]
        stream_id = 10001
        profile = "small"
    """
    config = configured(tmp_path, text)
    expected: dict[str, object] = {
        "driver.instance_id": "driver-02",
        "driver.control_channel": "aeron:ipc?term-length=1m",
        "driver.control_stream_id": 2000,
        "driver.aeron_dir": "/dev/shm/aeron-lab",
        "driver.announce_channel": "aeron:udp?endpoint=127.0.0.1:40123",
        "driver.announce_stream_id": 2001,
        "driver.qos_channel": "aeron:ipc?term-length=2m",
        "driver.qos_stream_id": 2200,
        "driver.stream_id_range": "20000-29999",
        "driver.descriptor_stream_id_range": "30000-30999",
        "driver.control_stream_id_range": "31000-31999",
        "shm.base_dir": "/dev/shm/lab",
        "shm.require_hugepages": True,
        "shm.page_size_bytes": 2097152,
        "shm.permissions_mode": "600",
        "shm.allowed_base_dirs": ["/dev/shm", "/mnt/huge"],
        "policies.allow_dynamic_streams": True,
        "policies.default_profile": "large",
        "policies.announce_period_ms": 100,
        "policies.lease_keepalive_interval_ms": 200,
        "policies.lease_expiry_grace_intervals": 5,
        "policies.prefault_shm": False,
        "policies.mlock_shm": True,
        "policies.epoch_gc_enabled": False,
        "policies.epoch_gc_keep": 4,
        "policies.epoch_gc_min_age_ns": 1,
        "policies.epoch_gc_on_startup": True,
        "policies.shutdown_timeout_ms": 1,
        "profiles.small.header_nslots": 8,
        "profiles.small.payload_pools[0].pool_id": 3,
        "profiles.small.payload_pools[0].stride_bytes": 128,
        "profiles.large.header_nslots": 1024,
        "profiles.large.payload_pools[0].pool_id": 4,
        "profiles.large.payload_pools[0].stride_bytes": 1048576,
        "streams.camera.stream_id": 10001,
        "streams.camera.profile": "small",
    }
    assert {key: value for key, value in config.dump().items() if key in expected} == expected
    assert config.policies.shutdown_token.matches("s3cret")


@pytest.mark.spec("DRV-17-02", "DRV-17-03")
def test_environment_variables_override_the_file(tmp_path: Path) -> None:
    """Upper case, underscores for dots; the file still holds for what no variable names."""
    text = REQUIRED + "[driver]\ncontrol_stream_id = 1001\nqos_stream_id = 1201\n"
    driver = configured(tmp_path, text, DRIVER_CONTROL_STREAM_ID="1002").driver
    assert (driver.control_stream_id, driver.qos_stream_id) == (1002, 1201)
    environ = {
        "SHM_REQUIRE_HUGEPAGES": "true",
        "POLICIES_EPOCH_GC_KEEP": "5",
        "PROFILES_FIRST_HEADER_NSLOTS": "4",
        "STREAMS_CAMERA_PROFILE": "first",
    }
    config = configured(tmp_path, REQUIRED, **environ)
    assert config.shm.require_hugepages
    assert config.policies.epoch_gc_keep == 5
    assert config.profiles[config.streams["camera"].profile].ring.nslots == 4


@pytest.mark.spec("DRV-17-08")
def test_at_least_one_profile_is_defined(tmp_path: Path) -> None:
    """A file without one is refused, whether the table is empty or absent."""
    stream = "[streams.camera]\nstream_id = 1\n"
    assert refused(tmp_path, stream) == "profiles"
    assert refused(tmp_path, stream + "[profiles]\n") == "profiles"


@pytest.mark.spec("DRV-17-09")
def test_every_profile_has_a_pool(tmp_path: Path) -> None:
    """Also one that no stream uses."""
    for pools in ("", "payload_pools = []\n"):
        assert refused(tmp_path, f"{REQUIRED}[profiles.third]\n{pools}") == "profiles.third.payload_pools"


@pytest.mark.spec("DRV-17-12", "DRV-17-13")
def test_announces_use_the_control_endpoint_by_default(tmp_path: Path) -> None:
    """Whatever that is."""
    text = REQUIRED + '[driver]\ncontrol_channel = "aeron:ipc?term-length=1m"\ncontrol_stream_id = 77\n'
    driver = configured(tmp_path, text).driver
    assert (driver.announce_channel, driver.announce_stream_id) == ("aeron:ipc?term-length=1m", 77)


@pytest.mark.parametrize(
    "key",
    [
        pytest.param("stream_id_range", marks=pytest.mark.spec("DRV-17-16")),
        pytest.param("descriptor_stream_id_range", marks=pytest.mark.spec("DRV-17-17")),
        pytest.param("control_stream_id_range", marks=pytest.mark.spec("DRV-17-18")),
    ],
)
def test_a_range_is_inclusive_as_string_or_array_and_empty_by_default(tmp_path: Path, key: str) -> None:
    """Both spellings mean the same ids."""
    assert len(getattr(configured(tmp_path).driver, key)) == 0
    for value in ('"20000-29999"', "[20000, 29999]"):
        ids = getattr(configured(tmp_path, f"{REQUIRED}[driver]\n{key} = {value}\n").driver, key)
        assert list(ids) == list(range(20000, 30000))
        assert 19999 not in ids
        assert 20000 in ids
        assert 29999 in ids
        assert 30000 not in ids


@pytest.mark.spec("DRV-17-22")
def test_the_base_directory_is_the_one_allowed_by_default(tmp_path: Path) -> None:
    """`shm.allowed_base_dirs` follows `shm.base_dir`."""
    assert configured(tmp_path).shm.allowed_base_dirs == ("/dev/shm/tensorpool",)
    assert configured(tmp_path, REQUIRED + '[shm]\nbase_dir = "/x"\n').shm.allowed_base_dirs == ("/x",)


@pytest.mark.spec("DRV-17-24")
def test_the_first_defined_profile_is_the_default(tmp_path: Path) -> None:
    """In the order of the file."""
    assert configured(tmp_path).policies.default_profile == "first"
    swapped = REQUIRED.replace("first", "x").replace("second", "first").replace("x", "second")
    assert configured(tmp_path, swapped).policies.default_profile == "second"


@pytest.mark.spec("DRV-17-35")
def test_an_epoch_is_kept_for_three_announce_periods_by_default(tmp_path: Path) -> None:
    """Of the period in effect."""
    assert configured(tmp_path).policies.epoch_gc_min_age_ns == 3_000_000_000
    config = configured(tmp_path, REQUIRED, POLICIES_ANNOUNCE_PERIOD_MS="250")
    assert config.policies.epoch_gc_min_age_ns == 750_000_000


@pytest.mark.spec("DRV-17-39")
def test_header_nslots_is_a_power_of_two_and_1024_by_default(tmp_path: Path) -> None:
    """1000 is refused."""
    assert configured(tmp_path).profiles["first"].header_nslots == 1024
    text = REQUIRED.replace("[profiles.first]", "[profiles.first]\nheader_nslots = {}")
    for nslots in (0, 3, 1000, 1025):
        assert refused(tmp_path, text.replace("{}", str(nslots))) == "profiles.first.header_nslots"
    for nslots in (1, 2, 4096):
        assert configured(tmp_path, text.replace("{}", str(nslots))).profiles["first"].header_nslots == nslots


@pytest.mark.spec("DRV-17-40")
def test_pool_ids_are_unique_within_a_profile(tmp_path: Path) -> None:
    """Two profiles may use the same id."""
    pool = "{ pool_id = 1, stride_bytes = 64 }"
    text = f"{REQUIRED}[profiles.third]\npayload_pools = [{pool}, {pool}]\n"
    assert refused(tmp_path, text) == "profiles.third.payload_pools[1].pool_id"


@pytest.mark.spec("DRV-17-41")
def test_strides_are_powers_of_two_from_64(tmp_path: Path) -> None:
    """100 is refused, and so is 192, a multiple of 64."""
    for stride in (0, 32, 100, 192, 65537):
        text = REQUIRED.replace("stride_bytes = 1048576", f"stride_bytes = {stride}")
        assert refused(tmp_path, text) == "profiles.first.payload_pools[0].stride_bytes"


@pytest.mark.spec("DRV-17-42")
def test_a_stream_names_a_profile_that_exists(tmp_path: Path) -> None:
    """Another name is refused."""
    assert refused(tmp_path, REQUIRED.replace('profile = "second"', 'profile = "third"')) == "streams.camera.profile"


DYNAMIC = '[policies]\nallow_dynamic_streams = true\n[driver]\nstream_id_range = "20000-29999"\n'


@pytest.mark.spec("DRV-11-01")
def test_streams_on_demand_can_be_configured(tmp_path: Path) -> None:
    """A policy and the range that ids are taken from."""
    config = configured(tmp_path, REQUIRED + DYNAMIC)
    assert config.policies.allow_dynamic_streams
    assert len(config.driver.stream_id_range) == 10000


@pytest.mark.spec("DRV-11-03")
def test_streams_on_demand_without_ids_are_refused_at_startup(tmp_path: Path) -> None:
    """Unset or empty."""
    for value in ("", 'stream_id_range = ""\n', "stream_id_range = []\n"):
        text = f"{REQUIRED}[policies]\nallow_dynamic_streams = true\n[driver]\n{value}"
        assert refused(tmp_path, text) == "driver.stream_id_range"


RANGES = ("stream_id_range", "descriptor_stream_id_range", "control_stream_id_range")


@pytest.mark.spec("DRV-11-09", "DRV-11-13")
@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("endpoint", ["control_stream_id = 500", "announce_stream_id = 500", "qos_stream_id = 500"])
def test_a_range_with_the_id_of_an_endpoint_fails_fast(tmp_path: Path, name: str, endpoint: str) -> None:
    """At either end too."""
    for ids in ("500-600", "400-500", "400-600"):
        assert refused(tmp_path, f'{REQUIRED}[driver]\n{name} = "{ids}"\n{endpoint}\n') == f"driver.{name}"


@pytest.mark.spec("DRV-11-10", "DRV-11-13")
@pytest.mark.parametrize("name", RANGES)
def test_a_range_with_the_id_of_a_configured_stream_fails_fast(tmp_path: Path, name: str) -> None:
    """The static stream has 10000."""
    assert refused(tmp_path, f'{REQUIRED}[driver]\n{name} = "10000-10001"\n') == f"driver.{name}"


@pytest.mark.spec("DRV-11-11", "DRV-11-13")
@pytest.mark.parametrize(("one", "other"), [(RANGES[0], RANGES[1]), (RANGES[0], RANGES[2]), (RANGES[1], RANGES[2])])
def test_ranges_that_overlap_fail_fast(tmp_path: Path, one: str, other: str) -> None:
    """One shared id is enough."""
    text = f'{REQUIRED}[driver]\n{one} = "500-600"\n{other} = "600-700"\n'
    assert refused(tmp_path, text) == f"driver.{other}"
    configured(tmp_path, text.replace("600-700", "601-700"))


@pytest.mark.spec("DRV-11-12", "DRV-11-13")
@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("value", ['"200-100"', "[200, 100]"])
def test_a_range_that_starts_after_its_end_fails_fast(tmp_path: Path, name: str, value: str) -> None:
    """In either spelling."""
    assert refused(tmp_path, f"{REQUIRED}[driver]\n{name} = {value}\n") == f"driver.{name}"


@pytest.mark.spec("DRV-4.4-05")
def test_interval_and_grace_in_effect_can_be_read_from_the_configuration(tmp_path: Path) -> None:
    """`dump` has them, wherever they were set."""
    text = REQUIRED + "[policies]\nlease_keepalive_interval_ms = 250\n"
    config = configured(tmp_path, text, POLICIES_LEASE_EXPIRY_GRACE_INTERVALS="4")
    dump: dict[str, Any] = config.dump()
    assert dump["policies.lease_keepalive_interval_ms"] == 250
    assert dump["policies.lease_expiry_grace_intervals"] == 4
    assert config.lease_duration_ns == 1_000_000_000


@pytest.mark.spec("WIRE-15.11-01")
def test_the_default_aeron_streams_are_on_ipc(tmp_path: Path) -> None:
    """Control 1000, descriptor 1100, QoS 1200, metadata 1300."""
    driver = configured(tmp_path).driver
    endpoints = (driver.control, driver.descriptor, driver.qos, driver.metadata)
    assert [endpoint.stream_id for endpoint in endpoints] == [1000, 1100, 1200, 1300]
    assert all(endpoint.channel.startswith("aeron:ipc") for endpoint in endpoints)


@pytest.mark.spec("WIRE-15.21a.2-01")
def test_the_base_directory_is_an_absolute_path(tmp_path: Path) -> None:
    """A relative one is refused."""
    assert configured(tmp_path, REQUIRED + f'[shm]\nbase_dir = "{tmp_path}"\n').shm.base_dir == str(tmp_path)
    assert refused(tmp_path, REQUIRED + '[shm]\nbase_dir = "tensorpool"\n') == "shm.base_dir"


@pytest.mark.spec("WIRE-15.21a.2-02")
def test_several_base_directories_may_be_allowed(tmp_path: Path) -> None:
    """Regions below each of them pass."""
    text = REQUIRED + f'[shm]\nbase_dir = "{tmp_path}/a"\nallowed_base_dirs = ["{tmp_path}/a", "{tmp_path}/b"]\n'
    bases = AllowedBases(configured(tmp_path, text).shm.allowed_base_dirs)
    assert bases.contains(f"{tmp_path}/a/x")
    assert bases.contains(f"{tmp_path}/b/x")
    assert not bases.contains(f"{tmp_path}/c/x")


@pytest.mark.spec("WIRE-15.21a.3-04")
def test_the_namespace_is_configured_per_deployment(tmp_path: Path) -> None:
    """It becomes a directory of the canonical layout."""
    shm = configured(tmp_path, REQUIRED + '[shm]\nnamespace = "lab1"\n').shm
    assert namespace_path(shm.base_dir, shm.namespace).endswith("/lab1")
    assert configured(tmp_path).shm.namespace == "default"
