# SPDX-License-Identifier: Apache-2.0
"""The defaults of the driver's configuration, and what overrides them: file, variable, flag."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorpool import settings
from tensorpool.channel import Endpoint
from tensorpool.driver.config import DriverConfig, StreamConfig
from tensorpool.settings import Range
from tensorpool.shm.layout import PoolSpec, RingSpec
from tests.driver.config.conftest import BASE, IPC, Key, ids, load, number, refused

# ---


UDP = "aeron:udp?endpoint=127.0.0.1:40123"


def switch(key: str, variable: str, default: bool) -> Key:
    file, text = str(not default).lower(), str(default).lower()
    return Key(key, variable, default, file, text, not default, (not default, default))


def channel(key: str, variable: str, default: str = IPC) -> Key:
    other = "aeron:udp?endpoint=localhost:40124|mtu=8k"
    return Key(key, variable, default, f'"{other}"', UDP, other, (other, UDP))


KEYS = [
    Key("driver.instance_id", "DRIVER_INSTANCE_ID", "driver-01", '"f"', "e", "o", ("f", "e")),
    channel("driver.control_channel", "DRIVER_CONTROL_CHANNEL"),
    number("driver.control_stream_id", "DRIVER_CONTROL_STREAM_ID", 1000),
    Key("driver.aeron_dir", "DRIVER_AERON_DIR", "", '"/f"', "/e", "/o", ("/f", "/e")),
    channel("driver.announce_channel", "DRIVER_ANNOUNCE_CHANNEL"),
    number("driver.announce_stream_id", "DRIVER_ANNOUNCE_STREAM_ID", 1000),
    channel("driver.qos_channel", "DRIVER_QOS_CHANNEL"),
    number("driver.qos_stream_id", "DRIVER_QOS_STREAM_ID", 1200),
    ids("driver.stream_id_range", "DRIVER_STREAM_ID_RANGE"),
    ids("driver.descriptor_stream_id_range", "DRIVER_DESCRIPTOR_STREAM_ID_RANGE"),
    ids("driver.control_stream_id_range", "DRIVER_CONTROL_STREAM_ID_RANGE"),
    channel("driver.descriptor_channel", "DRIVER_DESCRIPTOR_CHANNEL"),
    number("driver.descriptor_stream_id", "DRIVER_DESCRIPTOR_STREAM_ID", 1100),
    channel("driver.metadata_channel", "DRIVER_METADATA_CHANNEL"),
    number("driver.metadata_stream_id", "DRIVER_METADATA_STREAM_ID", 1300),
    Key(
        "driver.announce_clock_domain",
        "DRIVER_ANNOUNCE_CLOCK_DOMAIN",
        "MONOTONIC",
        '"REALTIME_SYNCED"',
        "MONOTONIC",
        "REALTIME_SYNCED",
        ("REALTIME_SYNCED", "MONOTONIC"),
    ),
    Key("driver.dialect", "DRIVER_DIALECT", "auto", '"specified"', "2026-01", "auto", ("specified", "2026-01")),
    Key("driver.node_id_range", "DRIVER_NODE_ID_RANGE", "1-1023", '"5-7"', "8-9", "10-11", ("5-7", "8-9")),
    Key("shm.base_dir", "SHM_BASE_DIR", "/dev/shm/tensorpool", '"/f"', "/e", "/o", ("/f", "/e")),
    Key("shm.namespace", "SHM_NAMESPACE", "default", '"f"', "e", "o", ("f", "e")),
    switch("shm.require_hugepages", "SHM_REQUIRE_HUGEPAGES", False),
    Key("shm.page_size_bytes", "SHM_PAGE_SIZE_BYTES", 4096, "8192", "16384", 2097152, (8192, 16384)),
    Key("shm.permissions_mode", "SHM_PERMISSIONS_MODE", "660", '"600"', "640", "0660", ("600", "640")),
    Key("shm.group", "SHM_GROUP", "", '"users"', "lab", "100", ("users", "lab")),
    Key(
        "shm.allowed_base_dirs",
        "SHM_ALLOWED_BASE_DIRS",
        ["/dev/shm/tensorpool"],
        '["/dev/shm"]',
        "/dev/shm,/e",
        ["/dev/shm", "/o"],
        (["/dev/shm"], ["/dev/shm", "/e"]),
    ),
    switch("policies.allow_dynamic_streams", "POLICIES_ALLOW_DYNAMIC_STREAMS", False),
    Key("policies.default_profile", "POLICIES_DEFAULT_PROFILE", "a", '"b"', "a", "b", ("b", "a")),
    number("policies.announce_period_ms", "POLICIES_ANNOUNCE_PERIOD_MS", 1000),
    number("policies.lease_keepalive_interval_ms", "POLICIES_LEASE_KEEPALIVE_INTERVAL_MS", 1000),
    number("policies.lease_expiry_grace_intervals", "POLICIES_LEASE_EXPIRY_GRACE_INTERVALS", 3),
    switch("policies.prefault_shm", "POLICIES_PREFAULT_SHM", True),
    switch("policies.mlock_shm", "POLICIES_MLOCK_SHM", False),
    switch("policies.epoch_gc_enabled", "POLICIES_EPOCH_GC_ENABLED", True),
    number("policies.epoch_gc_keep", "POLICIES_EPOCH_GC_KEEP", 2),
    number("policies.epoch_gc_min_age_ns", "POLICIES_EPOCH_GC_MIN_AGE_NS", 3_000_000_000),
    switch("policies.epoch_gc_on_startup", "POLICIES_EPOCH_GC_ON_STARTUP", False),
    number("policies.shutdown_timeout_ms", "POLICIES_SHUTDOWN_TIMEOUT_MS", 2000),
    Key("policies.shutdown_token", "POLICIES_SHUTDOWN_TOKEN", "", '"f"', "", "o", ("<hidden>", "")),
    switch("policies.recreate_on_startup", "POLICIES_RECREATE_ON_STARTUP", False),
    number("policies.max_leases", "POLICIES_MAX_LEASES", 10_000),
    number("policies.max_streams", "POLICIES_MAX_STREAMS", 1_000),
    number("policies.max_user_leases", "POLICIES_MAX_USER_LEASES", 0),
    number("policies.max_user_streams", "POLICIES_MAX_USER_STREAMS", 0),
    number("policies.max_user_bytes", "POLICIES_MAX_USER_BYTES", 0),
    number("policies.max_provisioned_stream_bytes", "POLICIES_MAX_PROVISIONED_STREAM_BYTES", 2 << 30),
    number("policies.max_provisioned_bytes", "POLICIES_MAX_PROVISIONED_BYTES", 8 << 30),
    number("policies.max_bytes", "POLICIES_MAX_BYTES", 0),
    number("policies.dynamic_stream_linger_ms", "POLICIES_DYNAMIC_STREAM_LINGER_MS", 30_000),
    number("policies.node_id_reuse_cooldown_ms", "POLICIES_NODE_ID_REUSE_COOLDOWN_MS", 10_000),
    number("policies.rate_limited_default_hz", "POLICIES_RATE_LIMITED_DEFAULT_HZ", 10),
    number("client.attach_timeout_ms", "CLIENT_ATTACH_TIMEOUT_MS", 5000),
    number("client.discover_timeout_ms", "CLIENT_DISCOVER_TIMEOUT_MS", 2000),
    switch("client.trace_ids", "CLIENT_TRACE_IDS", False),
    Key("profiles.a.header_nslots", "PROFILES_A_HEADER_NSLOTS", 1024, "1", "2", 2**31, (1, 2)),
    Key("profiles.a.payload_pools[0].pool_id", None, 1, "0"),
    Key("profiles.a.payload_pools[0].stride_bytes", None, 65536, "64"),
    Key("streams.s.stream_id", "STREAMS_S_STREAM_ID", 10000, "1", "2", 2**32 - 2, (1, 2)),
    Key("streams.s.profile", "STREAMS_S_PROFILE", "a", '"b"', "a", "b", ("b", "a")),
]


def with_key(key: str, value: str) -> str:
    """BASE with a key set; `allow_dynamic_streams` brings the range that it needs."""
    table, _, name = key.rpartition(".")
    if name == "allow_dynamic_streams":
        return f'{BASE}[{table}]\n{name} = {value}\n[driver]\nstream_id_range = "20000-29999"\n'
    if f"[{table}]" not in BASE:
        return f"{BASE}[{table}]\n{name} = {value}\n"
    lines = [line for line in BASE.splitlines() if table != "streams.s" or not line.startswith(name)]
    lines.insert(lines.index(f"[{table}]") + 1, f"{name} = {value}")
    return "\n".join(lines)


def test_the_table_of_keys_is_complete() -> None:
    """What is tested below is all there is, and the variables are spelt as documented."""
    others = ("discovery.", "control.")
    known = {key: name for key, name in settings.known_keys(DriverConfig).items() if not key.startswith(others)}
    ours = {key.key.replace(".a.", ".<name>.").replace(".s.", ".<name>.").replace("[0]", "[]"): key for key in KEYS}
    assert known.keys() - {"profiles.<name>.payload_pools"} == ours.keys()
    for name, key in ours.items():
        generic = (key.variable or "").replace("_A_", "_<NAME>_").replace("STREAMS_S_", "STREAMS_<NAME>_")
        assert (known[name] or "") == generic


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.key)
def test_a_key_that_a_file_leaves_out_has_its_default(tmp_path: Path, key: Key) -> None:
    """The specification's own, also with a file that says nothing else."""
    assert load(folder=tmp_path).dump()[key.key] == key.default


@pytest.mark.spec("DRV-17-02", "DRV-17-03")
@pytest.mark.parametrize("key", [key for key in KEYS if key.variable], ids=lambda key: key.key)
def test_a_variable_goes_over_the_file_and_a_flag_over_the_variable(tmp_path: Path, key: Key) -> None:
    """For each key that has a variable, with three different values as far as there are three."""
    assert key.variable is not None
    assert key.seen is not None
    text, environ = with_key(key.key, key.file), {key.variable: key.text}
    flagged = "<hidden>" if key.key.endswith("token") else key.flag
    assert load(text, folder=tmp_path).dump()[key.key] == key.seen[0]
    assert load(text, environ, folder=tmp_path).dump()[key.key] == key.seen[1]
    assert load(text, environ, folder=tmp_path, **{key.key: key.flag}).dump()[key.key] == flagged
    if "dynamic" not in key.key:
        assert load(BASE, environ, folder=tmp_path).dump()[key.key] == key.seen[1]


# --- defaults that depend on other keys


def test_announces_go_where_control_goes_unless_configured(tmp_path: Path) -> None:
    """Channel and id each on their own, also when control came from a variable or a flag."""
    environ = {"DRIVER_CONTROL_CHANNEL": UDP}
    driver = load(BASE, environ, folder=tmp_path, **{"driver.control_stream_id": 5}).driver
    assert driver.announce == driver.control == Endpoint(UDP, 5)
    driver = load(BASE, environ, folder=tmp_path, **{"driver.announce_stream_id": 6}).driver
    assert driver.announce == Endpoint(UDP, 6)


def test_old_epochs_live_for_three_announce_periods_unless_configured(tmp_path: Path) -> None:
    """The period in effect counts; 0 is an age too."""
    policies = load(BASE, {"POLICIES_ANNOUNCE_PERIOD_MS": "20"}, folder=tmp_path).policies
    assert policies.epoch_gc_min_age_ns == 60_000_000
    assert load(folder=tmp_path, **{"policies.epoch_gc_min_age_ns": 0}).policies.epoch_gc_min_age_ns == 0


def test_the_base_directory_is_allowed_unless_configured(tmp_path: Path) -> None:
    """Whichever it is."""
    assert load(BASE, {"SHM_BASE_DIR": "/x"}, folder=tmp_path).shm.allowed_base_dirs == ("/x",)


def test_the_first_profile_of_the_file_is_the_default(tmp_path: Path) -> None:
    """File order, not the alphabet; a stream without a profile follows `policies.default_profile`."""
    text = BASE.replace("profiles.a", "profiles.z")
    loaded = load(text, folder=tmp_path)
    assert (loaded.policies.default_profile, loaded.streams["s"].profile) == ("z", "z")
    loaded = load(text, folder=tmp_path, **{"policies.default_profile": "b"})
    assert (loaded.streams["s"].profile, loaded.default_ring) == ("b", RingSpec(1024, (PoolSpec(1, 64),)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("driver.announce_channel", ""),
        ("driver.announce_stream_id", 0),
        ("policies.epoch_gc_min_age_ns", -1),
        ("policies.default_profile", ""),
        ("streams.s.profile", ""),
        ("shm.allowed_base_dirs", []),
    ],
)
def test_what_stands_for_a_derived_default_cannot_be_configured(tmp_path: Path, key: str, value: object) -> None:
    """Leaving a key out is the only way to get its default."""
    error = refused(key, value, tmp_path)
    assert (error.key, error.value) == (key, value)


# --- the built-in configuration


def test_without_a_file_there_is_something_that_works() -> None:
    """Streams on demand in a profile for small and large frames; everything else as specified."""
    built_in = DriverConfig.load(environ={})
    assert built_in.policies.allow_dynamic_streams
    assert built_in.driver.stream_id_range == Range(20000, 29999)
    pools = (PoolSpec(1, 64 * 1024), PoolSpec(2, 1024**2), PoolSpec(3, 8 * 1024**2))
    assert built_in.profiles.keys() == {"default"}
    assert built_in.default_ring == RingSpec(16, pools)
    assert not built_in.streams
    assert built_in.policies.max_streams == 64
    changed = {
        "driver.stream_id_range",
        "policies.allow_dynamic_streams",
        "policies.default_profile",
        "policies.max_streams",
    }
    for key in KEYS:
        if key.key.startswith(("driver.", "shm.", "policies.")) and key.key not in changed:
            assert built_in.dump()[key.key] == key.default


def test_a_file_replaces_the_built_in_configuration(tmp_path: Path) -> None:
    """Nothing of it shines through: a file gets the specification's defaults."""
    loaded = load(folder=tmp_path)
    assert not loaded.policies.allow_dynamic_streams
    assert not loaded.driver.stream_id_range
    assert loaded.profiles.keys() == {"a", "b"}


def test_flags_come_as_dotted_keys_and_as_tables() -> None:
    """Both at once if need be, over the built-in configuration too."""
    loaded = DriverConfig.load(
        environ={"PROFILES_DEFAULT_HEADER_NSLOTS": "4"},
        overrides={"shm.namespace": "lab1", "driver.control_stream_id": "2000"},
        streams={"front": {"stream_id": 7}},
    )
    assert (loaded.shm.namespace, loaded.driver.control_stream_id) == ("lab1", 2000)
    assert loaded.streams == {"front": StreamConfig(stream_id=7, profile="default")}
    assert loaded.default_ring.nslots == 4


@pytest.mark.spec("DRV-17-02")
def test_the_environment_of_the_process_counts_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a caller need not pass it."""
    monkeypatch.setenv("DRIVER_INSTANCE_ID", "from-the-environment")
    assert DriverConfig.load().driver.instance_id == "from-the-environment"
