# SPDX-License-Identifier: Apache-2.0
"""The driver's configuration: every key with its default, variable and flag, and everything that is refused."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorpool import settings
from tensorpool.channel import Endpoint
from tensorpool.driver.config import (
    DriverConfig,
    PoolConfig,
    ProfileConfig,
    StreamConfig,
)
from tensorpool.errors import ConfigError
from tensorpool.settings import Range
from tensorpool.shm.layout import PoolSpec, RingSpec

EXAMPLES = Path(__file__).parents[2] / "examples" / "driver"
IPC = "aeron:ipc?term-length=4m"
UDP = "aeron:udp?endpoint=127.0.0.1:40123"

# Two profiles, `a` first, and a stream that says no more than it must.
BASE = """
[profiles.a]
payload_pools = [{ pool_id = 1, stride_bytes = 65536 }]
[profiles.b]
payload_pools = [{ pool_id = 1, stride_bytes = 64 }]
[streams.s]
stream_id = 10000
"""


class Key(NamedTuple):
    """A key, its default with BASE, and three values: in the file as TOML, as a variable's text, as a flag.

    `seen` is what the first two are worth where that is not their text.
    """

    key: str
    variable: str | None
    default: object
    file: str
    text: str = ""
    flag: object = None
    seen: tuple[object, object] | None = None


def number(key: str, variable: str, default: int) -> Key:
    return Key(key, variable, default, "7001", "7002", 7003, (7001, 7002))


def switch(key: str, variable: str, default: bool) -> Key:
    file, text = str(not default).lower(), str(default).lower()
    return Key(key, variable, default, file, text, not default, (not default, default))


def channel(key: str, variable: str, default: str = IPC) -> Key:
    other = "aeron:udp?endpoint=localhost:40124|mtu=8k"
    return Key(key, variable, default, f'"{other}"', UDP, other, (other, UDP))


def ids(key: str, variable: str) -> Key:
    return Key(key, variable, "", "[7001, 7009]", "7011-7019", "7021-7029", ("7001-7009", "7011-7019"))


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
    Key("shm.base_dir", "SHM_BASE_DIR", "/dev/shm/tensorpool", '"/f"', "/e", "/o", ("/f", "/e")),
    Key("shm.namespace", "SHM_NAMESPACE", "default", '"f"', "e", "o", ("f", "e")),
    switch("shm.require_hugepages", "SHM_REQUIRE_HUGEPAGES", False),
    Key("shm.page_size_bytes", "SHM_PAGE_SIZE_BYTES", 4096, "8192", "16384", 2097152, (8192, 16384)),
    Key("shm.permissions_mode", "SHM_PERMISSIONS_MODE", "660", '"600"', "640", "0660", ("600", "640")),
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
    number("policies.dynamic_stream_linger_ms", "POLICIES_DYNAMIC_STREAM_LINGER_MS", 30_000),
    number("policies.rate_limited_default_hz", "POLICIES_RATE_LIMITED_DEFAULT_HZ", 10),
    number("client.attach_timeout_ms", "CLIENT_ATTACH_TIMEOUT_MS", 5000),
    number("client.discover_timeout_ms", "CLIENT_DISCOVER_TIMEOUT_MS", 2000),
    Key("profiles.a.header_nslots", "PROFILES_A_HEADER_NSLOTS", 1024, "1", "2", 2**31, (1, 2)),
    Key("profiles.a.payload_pools[0].pool_id", None, 1, "0"),
    Key("profiles.a.payload_pools[0].stride_bytes", None, 65536, "64"),
    Key("streams.s.stream_id", "STREAMS_S_STREAM_ID", 10000, "1", "2", 2**32 - 2, (1, 2)),
    Key("streams.s.profile", "STREAMS_S_PROFILE", "a", '"b"', "a", "b", ("b", "a")),
]


def load(
    text: str = BASE, environ: Mapping[str, str] | None = None, /, *, folder: Path, **overrides: Any
) -> DriverConfig:
    path = folder / "driver.toml"
    path.write_text(text)
    return DriverConfig.load(path, environ or {}, overrides)


def refused(key: str, value: object, folder: Path, /, **overrides: Any) -> ConfigError:
    """The error for one key of BASE with a value that it may not have."""
    with pytest.raises(ConfigError) as caught:
        load(folder=folder, **{key: value}, **overrides)
    return caught.value


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


# --- what is refused

AERON_ID = "an integer from 1 to 2147483647"
POSITIVE = "an integer from 1 to 4294967295"
URI = "an Aeron URI"
PATH = "an absolute path of visible ASCII"
POOL = {"pool_id": 1, "stride_bytes": 64}

INVALID: list[tuple[str, object, str]] = [
    ("driver.instance_id", "", "not empty"),
    ("driver.instance_id", "driver 1", "visible ASCII"),
    ("driver.instance_id", "träger", "visible ASCII"),
    ("driver.aeron_dir", 1, "text"),
    *((f"driver.{name}_channel", "ipc", URI) for name in ("control", "announce", "qos", "descriptor", "metadata")),
    *(
        (f"driver.{name}_stream_id", value, AERON_ID)
        for name in ("control", "announce", "qos", "descriptor", "metadata")
        for value in (0, -1, 2**31, True, 1.0)
    ),
    ("driver.control_channel", "aeron-spy:aeron:ipc", "a spy channel can only be subscribed to"),
    ("driver.announce_channel", "aeron-spy:aeron:ipc", "a spy channel can only be subscribed to"),
    *(
        (f"driver.{name}_range", value, "first <= last")
        for name in ("stream_id", "descriptor_stream_id", "control_stream_id")
        for value in ("200-100", [200, 100], "200", "a-b", [1, 2, 3], 5)
    ),
    ("driver.stream_id_range", "0-5", "ids from 1 to 4294967294"),
    ("driver.stream_id_range", "4294967294-4294967295", "ids from 1 to 4294967294"),
    ("driver.descriptor_stream_id_range", "5000-2147483648", "ids from 1 to 2147483647"),
    ("driver.control_stream_id_range", "5000-2147483648", "ids from 1 to 2147483647"),
    ("driver.announce_clock_domain", "REALTIME", "MONOTONIC or REALTIME_SYNCED"),
    ("driver.announce_clock_domain", "monotonic", "MONOTONIC or REALTIME_SYNCED"),
    *(
        ("shm.base_dir", path, PATH)
        for path in ("", "relative", "/a b", "/a?b", "/a|b", "/ä", "/a\nb", "/a\0b", "~/shm", "C:\\shm")
    ),
    ("shm.base_dir", "/a&require_hugepages=true", "separated by '|'"),
    *(("shm.namespace", name, "letters, digits") for name in ("", ".", "..", "a/b", "a b", "ä", "a\n")),
    ("shm.require_hugepages", 1, "true or false"),
    *(("shm.page_size_bytes", size, "a power of two") for size in (0, 3, 4095, -4096, 2**32)),
    *(
        ("shm.permissions_mode", mode, "octal digits")
        for mode in ("", "66", "668", "rw-rw----", "0o660", "00660", "660\n", 660, 0o660)
    ),
    *(("shm.permissions_mode", mode, "no access for others") for mode in ("666", "664", "0662", "661")),
    *(("shm.permissions_mode", mode, "rw for the owner") for mode in ("060", "440", "770", "2660", "1600")),
    ("shm.allowed_base_dirs", 5, "as an array"),
    ("policies.default_profile", "c", "one of the profiles a, b"),
    *(
        (f"policies.{name}", value, POSITIVE)
        for name in (
            "announce_period_ms",
            "lease_keepalive_interval_ms",
            "lease_expiry_grace_intervals",
            "epoch_gc_keep",
            "max_leases",
            "max_streams",
            "dynamic_stream_linger_ms",
            "rate_limited_default_hz",
        )
        for value in (0, -1, 2**32, 1.5, "soon")
    ),
    *(
        (f"policies.{name}", value, "true or false")
        for name in (
            "allow_dynamic_streams",
            "prefault_shm",
            "mlock_shm",
            "epoch_gc_enabled",
            "epoch_gc_on_startup",
            "recreate_on_startup",
        )
        for value in (0, "yes", "TRUE")
    ),
    ("policies.epoch_gc_min_age_ns", 2**63, "an integer from 0"),
    ("policies.shutdown_timeout_ms", -1, "an integer from 0 to 4294967295"),
    *(("profiles.a.header_nslots", nslots, "a power of two from 1") for nslots in (0, 3, 1000, -1, 2**32, True)),
    ("profiles.a.payload_pools", [], "at least one pool"),
    ("profiles.a.payload_pools", 5, "an array of tables"),
    ("streams.s.stream_id", 0, "an integer from 1 to 4294967294"),
    ("streams.s.stream_id", 2**32 - 1, "an integer from 1 to 4294967294"),
    ("streams.s.profile", "c", "one of the profiles a, b"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "accepted"), INVALID, ids=lambda part: repr(part)[:40])
def test_what_cannot_be_used_is_refused_by_key_value_and_what_would_do(
    tmp_path: Path, key: str, value: object, accepted: str
) -> None:
    """One row for every way to be wrong."""
    error = refused(key, value, tmp_path)
    assert (error.key, error.value) == (key, value if not key.endswith("_range") else error.value)
    assert accepted in error.accepted
    assert error.accepted.endswith("(from a flag)")


@pytest.mark.parametrize(
    ("pools", "key", "value", "accepted"),
    [
        ([{"pool_id": 65535, "stride_bytes": 64}], "[0].pool_id", 65535, "an integer from 0 to 65534"),
        ([{"pool_id": -1, "stride_bytes": 64}], "[0].pool_id", -1, "an integer from 0 to 65534"),
        *(
            ([POOL, {"pool_id": 2, "stride_bytes": size}], "[1].stride_bytes", size, "a power of two from 64")
            for size in (0, 32, 63, 100, 192, 2**32, -64)
        ),
        ([POOL, POOL], "[1].pool_id", 1, "an id that no other pool"),
        ([POOL, 5], "[1]", 5, "a table with pool_id, stride_bytes"),
    ],
)
def test_a_bad_pool_is_refused_by_its_place(
    tmp_path: Path, pools: list[Any], key: str, value: object, accepted: str
) -> None:
    """The one at fault, not the profile as a whole."""
    error = refused("profiles.a.payload_pools", pools, tmp_path)
    assert (error.key, error.value) == (f"profiles.a.payload_pools{key}", value)
    assert accepted in error.accepted


def test_a_ring_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    """Each part may be in range and the whole still be too large."""
    pools = [{"pool_id": number, "stride_bytes": 2**31} for number in range(3)]
    overrides = {"profiles.a.header_nslots": 2**31}
    error = refused("profiles.a.payload_pools", pools, tmp_path, **overrides)
    assert (error.key, error.value) == ("profiles.a.header_nslots", 2**31)
    assert "2^63" in error.accepted


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("", "profiles", "at least one table"),
        ("[profiles]", "profiles", "at least one table"),
        ("[profiles.a]", "profiles.a.payload_pools", "required"),
        ("[profiles.a]\npayload_pools = []", "profiles.a.payload_pools", "at least one pool"),
        ("[profiles.a]\npayload_pools = [{}]", "profiles.a.payload_pools[0].pool_id", "required"),
        ("[profiles.a]\npayload_pools = [{pool_id = 1}]", "profiles.a.payload_pools[0].stride_bytes", "required"),
        (BASE.replace("stream_id = 10000", ""), "streams.s.stream_id", "required"),
        (BASE.partition("[streams.s]")[0], "streams", "at least one table [streams.<name>], or policies."),
        (f"{BASE}[streams.t]\nstream_id = 10000", "streams.t.stream_id", "streams.s has this one"),
        (f"{BASE}[streams.t]\nstream_id = 2\n[policies]\nmax_streams = 1", "policies.max_streams", "the 2 streams"),
        (f"{BASE}[policies]\nallow_dynamic_streams = true", "driver.stream_id_range", '"20000-29999"'),
    ],
)  # fmt: skip
def test_what_is_missing_or_doubled_is_refused(tmp_path: Path, text: str, key: str, words: str) -> None:
    """With the key that is at fault and the file to mend."""
    with pytest.raises(ConfigError) as caught:
        load(text, folder=tmp_path)
    assert caught.value.key == key
    assert words in caught.value.accepted
    assert str(tmp_path / "driver.toml") in caught.value.accepted


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("[driver]\ncontrol_streamid = 1", "driver.control_streamid", "driver.control_stream_id"),
        ("[driver]\nnamespace = 'x'", "driver.namespace", "shm.namespace"),
        ("[driver]\nbase_dir = '/x'", "driver.base_dir", "shm.base_dir"),
        ("[policies]\nshutdown_timeout = 3", "policies.shutdown_timeout", "policies.shutdown_timeout_ms"),
        ("[policies]\nannounce_period = 3", "policies.announce_period", "policies.announce_period_ms"),
        ("[policy]\nannounce_period_ms = 3", "policy", "policies"),
        ("[profiles.a]\nheader_slots = 3", "profiles.a.header_slots", "profiles.a.header_nslots"),
        ("[streams.s]\nstreamid = 3", "streams.s.streamid", "streams.s.stream_id"),
        ("[stream.s]\nstream_id = 3", "stream", "streams"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest_one(tmp_path: Path, text: str, key: str, nearest: str) -> None:
    """A typo never becomes a default."""
    with pytest.raises(ConfigError) as caught:
        load(text, folder=tmp_path)
    assert caught.value.key == key
    assert f"the nearest is {nearest} (in {tmp_path / 'driver.toml'})" in caught.value.accepted


def test_a_variable_names_a_stream_of_the_file_only(tmp_path: Path) -> None:
    """One that is shared by two streams is refused, one of no stream is left alone."""
    text = f'{BASE}[streams."cam.a"]\nstream_id = 1\n[streams.cam_a]\nstream_id = 2'
    with pytest.raises(ConfigError, match=r"streams\.cam\.a\.stream_id and streams\.cam_a\.stream_id"):
        load(text, {"STREAMS_CAM_A_STREAM_ID": "5"}, folder=tmp_path)
    loaded = load(text, {"STREAMS_OTHER_STREAM_ID": "x", "STREAMS_S_STREAM_ID": "9"}, folder=tmp_path)
    assert {stream.stream_id for stream in loaded.streams.values()} == {1, 2, 9}
    text = BASE.replace("profiles.b", "profiles.A")
    with pytest.raises(ConfigError, match=r"profiles\.a\.header_nslots and profiles\.A\.header_nslots"):
        load(text, {"PROFILES_A_HEADER_NSLOTS": "8"}, folder=tmp_path)


def test_the_base_directory_lies_inside_the_allowed_ones(tmp_path: Path) -> None:
    """By whole components, with links resolved."""
    inside, outside, link = tmp_path / "in", tmp_path / "in-side", tmp_path / "link"
    for folder in (inside, outside):
        folder.mkdir()
    link.symlink_to(outside)
    dirs = {"shm.allowed_base_dirs": [str(inside)]}
    for base in (inside, inside / "deeper"):
        assert load(folder=tmp_path, **{"shm.base_dir": str(base)}, **dirs).shm.base_dir == str(base)
    for base in (outside, link, inside / ".." / "in-side", tmp_path):
        assert refused("shm.base_dir", str(base), tmp_path, **dirs).key == "shm.base_dir"
    error = refused("shm.allowed_base_dirs", [str(tmp_path), "relative"], tmp_path)
    assert (error.key, error.value) == ("shm.allowed_base_dirs[1]", "relative")


def test_the_shutdown_token_is_never_shown(tmp_path: Path) -> None:
    """Neither by the configuration nor by an error about it; the right token still opens."""
    loaded = load(BASE, {"POLICIES_SHUTDOWN_TOKEN": "hush"}, folder=tmp_path)
    assert "hush" not in f"{loaded} {loaded!r} {loaded.policies} {loaded.dump()}"
    assert loaded.dump()["policies.shutdown_token"] == "<hidden>"
    assert loaded.policies.shutdown_token.matches("hush")
    assert not load(folder=tmp_path).policies.shutdown_token.matches("")
    for value in (["hush"], "hush\N{SNOWMAN}"):
        assert "hush" not in str(refused("policies.shutdown_token", value, tmp_path))


# --- ids that meet

RANGES = ("stream_id_range", "descriptor_stream_id_range", "control_stream_id_range")
ENDPOINTS = ("control", "announce", "qos", "descriptor", "metadata")
USED = (
    *(f"driver.{name}_stream_id" for name in ENDPOINTS),
    *(f"control.{name}_stream_id" for name in ("control", "status")),
)


@pytest.mark.parametrize(("name", "endpoint"), list(itertools.product(RANGES, USED)))
@pytest.mark.parametrize("ids", ["7000-7100", "6000-7000", "7000-7000", "6999-7001"])
def test_a_range_holds_no_id_of_an_endpoint(tmp_path: Path, name: str, endpoint: str, ids: str) -> None:
    """Each range with each endpoint, at either end and in the middle."""
    other = {endpoint: 7000}
    error = refused(f"driver.{name}", ids, tmp_path, **other)
    assert (error.key, error.value) == (f"driver.{name}", ids)
    assert f"a range without 7000, which is {endpoint}" in error.accepted
    for apart in ("7001-7100", "6000-6999"):
        load(folder=tmp_path, **{f"driver.{name}": apart}, **other)


@pytest.mark.parametrize("number", [1400, 1401])
def test_a_range_holds_no_stream_of_the_control_plane(tmp_path: Path, number: int) -> None:
    """Also where it is not configured: services receive and answer there by default."""
    error = refused("driver.descriptor_stream_id_range", f"{number}-{number}", tmp_path)
    assert f"a range without {number}, which is control." in error.accepted


@pytest.mark.parametrize("name", RANGES)
def test_a_range_holds_no_id_of_a_configured_stream(tmp_path: Path, name: str) -> None:
    """E21: literally, though one may be an Aeron id and the other is not."""
    error = refused(f"driver.{name}", "9000-11000", tmp_path)
    assert error.value == "9000-11000"
    assert "a range without 10000, which is streams.s.stream_id" in error.accepted


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(RANGES, 2)))
@pytest.mark.parametrize("ids", ["7000-7100", "7100-7200", "6000-7000", "7050-7060", "6000-8000"])
def test_ranges_do_not_meet(tmp_path: Path, one: str, other: str, ids: str) -> None:
    """Each pair: equal, touching at either end, inside and around."""
    error = refused(f"driver.{other}", ids, tmp_path, **{f"driver.{one}": "7000-7100"})
    assert (error.key, error.value) == (f"driver.{other}", ids)
    assert f"apart from driver.{one}, which is 7000-7100" in error.accepted


_IDS = st.integers(1, 24)
_RANGE = st.just(Range()) | st.tuples(_IDS, st.integers(0, 4)).map(lambda pair: Range(pair[0], sum(pair)))


@given(
    ranges=st.tuples(_RANGE, _RANGE, _RANGE),
    endpoints=st.tuples(_IDS, _IDS, _IDS, _IDS, _IDS),
    streams=st.sets(_IDS, min_size=1, max_size=3),
)
def test_ids_are_refused_exactly_when_two_sets_of_them_meet(
    ranges: tuple[Range, ...], endpoints: tuple[int, ...], streams: set[int]
) -> None:
    """Against the plainest way to find out."""
    sets = [set(ids) for ids in ranges]
    is_clash = any(mine & (set(endpoints) | streams) for mine in sets)
    is_clash |= any(one & other for one, other in itertools.combinations(sets, 2))
    driver: dict[str, object] = {f"driver.{name}": ids for name, ids in zip(RANGES, ranges, strict=True)}
    driver |= {f"driver.{name}_stream_id": number for name, number in zip(ENDPOINTS, endpoints, strict=True)}
    tables = {str(number): {"stream_id": number} for number in streams}
    overrides = {**driver, "streams": tables, "policies.allow_dynamic_streams": False}
    if not is_clash:
        DriverConfig.load(environ={}, overrides=overrides)
        return
    with pytest.raises(ConfigError) as caught:
        DriverConfig.load(environ={}, overrides=overrides)
    assert caught.value.key in {f"driver.{name}" for name in RANGES}


def test_endpoints_may_share_a_stream_if_their_channels_agree(tmp_path: Path) -> None:
    """Everything on one stream is allowed; with another term-length, Aeron would refuse the second publisher."""
    shared = {f"driver.{name}_stream_id": 1000 for name in ENDPOINTS}
    assert load(folder=tmp_path, **shared).driver.metadata == Endpoint(IPC, 1000)
    other = "aeron:ipc?term-length=1m"
    for name in ENDPOINTS[1:]:
        error = refused(f"driver.{name}_channel", other, tmp_path, **shared)
        assert (error.key, error.value) == (f"driver.{name}_channel", other)
        assert "the parameters of driver.control_channel (both use stream id 1000" in error.accepted


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
