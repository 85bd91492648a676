# SPDX-License-Identifier: Apache-2.0
"""Ids of streams, endpoints and ranges may not meet."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorpool.channel import Endpoint
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import ConfigError
from tensorpool.settings import Range
from tests.driver.config.conftest import IPC, load, refused

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
