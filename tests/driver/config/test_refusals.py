# SPDX-License-Identifier: Apache-2.0
"""Which values, keys and combinations of the driver's configuration are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorpool.errors import ConfigError
from tests.driver.config.conftest import BASE, load, refused

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
