# SPDX-License-Identifier: Apache-2.0
"""What holds for every superblock, every ring and every array."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from tensorpool.errors import LocalProtocolError, RegionRejected
from tensorpool.shm import (
    AllowedBases,
    PoolSpec,
    RegionSpec,
    RingSpec,
    layout_of,
    map_region,
    map_ring,
    numpy_dtype,
    view_of_frame,
)
from tests.shm.by_hand import POOL, RING, mapped_files, pool_file, ring_file
from tests.support.region_bytes import unpacked_superblock

RING_SPEC, POOL_SPEC = RingSpec(4, (PoolSpec(3, 128),)).regions(10000, 7)


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tp-test-", dir="/dev/shm") as path:
        yield Path(path)


# Fields that a consumer compares. The others say who made the region and whether they live.
CHECKED = ("magic", "layout_version", "epoch", "stream_id", "region_type", "pool_id", "nslots")


def is_acceptable(fields: dict[str, int], expected: dict[str, int]) -> bool:
    """The rule by itself: what may be mapped as `expected` (A9 for the two sizes)."""
    if any(fields[name] != expected[name] for name in CHECKED):
        return False
    if expected["region_type"] == 1:
        return fields["slot_bytes"] == 256
    return fields["stride_bytes"] == 128 and fields["slot_bytes"] in (128, 2**32 - 1)


@given(
    is_pool=st.booleans(),
    mutations=st.lists(st.tuples(st.integers(0, 63), st.integers(0, 255)), max_size=4),
)
def test_a_mutated_superblock_maps_exactly_if_no_checked_field_changed(
    memory: Path, is_pool: bool, mutations: list[tuple[int, int]]
) -> None:
    """Whatever bytes change: wrong fields never map, and fields that are free never prevent it."""
    make, spec, sound = (pool_file, POOL_SPEC, POOL) if is_pool else (ring_file, RING_SPEC, RING)
    uri = make(memory / "r")
    data = bytearray((memory / "r").read_bytes())
    for byte, value in mutations:
        data[byte] = value
    (memory / "r").write_bytes(data)
    fields = unpacked_superblock(bytes(data[:64]))
    bases = AllowedBases([memory])
    if is_acceptable(fields, sound):
        region = map_region(uri, spec, bases)
        assert (region.pid, region.activity_timestamp_ns) == (fields["pid"], fields["activity_timestamp_ns"])
    else:
        with pytest.raises(RegionRejected) as caught:
            map_region(uri, spec, bases)
        assert caught.value.check == "superblock"
        assert mapped_files(memory) == []


@given(data=st.binary(max_size=700))
def test_no_bytes_at_all_make_a_consumer_fall(memory: Path, data: bytes) -> None:
    """A file of anything is rejected, or is a region."""
    (memory / "r").write_bytes(data)
    with pytest.raises(RegionRejected):
        map_region(f"shm:file?path={memory}/r", POOL_SPEC, AllowedBases([memory]))


powers = st.integers(0, 31).map(lambda exponent: 1 << exponent)
strides = st.integers(6, 31).map(lambda exponent: 1 << exponent)
pool_lists = st.lists(st.tuples(st.integers(0, 65535), strides), min_size=1, max_size=6, unique_by=lambda pool: pool[0])


@given(nslots=powers, pools=pool_lists)
def test_sizes_equal_an_independent_formula(nslots: int, pools: list[tuple[int, int]]) -> None:
    """Superblock and slots, region by region; refused exactly when 63 bits do not hold the sum."""
    expected = [64 + 256 * nslots] + [64 + stride * nslots for _, stride in pools]
    specs = tuple(PoolSpec(pool_id, stride) for pool_id, stride in pools)
    if sum(expected) >= 2**63:
        with pytest.raises(LocalProtocolError, match="size_bytes"):
            RingSpec(nslots, specs)
        return
    ring = RingSpec(nslots, specs)
    assert [region.size_bytes for region in ring.regions(1, 1)] == expected
    assert ring.size_bytes == sum(expected)


@given(nslots=st.integers(-1, 2**33), stride=st.integers(-1, 2**33), pool_id=st.integers(-1, 2**17))
def test_a_ring_exists_exactly_if_its_numbers_are_lawful(nslots: int, stride: int, pool_id: int) -> None:
    """Powers of two in their ranges, ids of 16 bits."""
    is_lawful = nslots in {1 << n for n in range(32)} and stride in {1 << n for n in range(6, 32)}
    try:
        RingSpec(nslots, (PoolSpec(pool_id, stride),))
    except LocalProtocolError:
        assert not (is_lawful and 0 <= pool_id <= 0xFFFF)
    else:
        assert is_lawful
        assert 0 <= pool_id <= 0xFFFF


specs = st.builds(
    lambda nslots, stride, stream_id, epoch, version, which: RingSpec(nslots, (PoolSpec(5, stride),)).regions(
        stream_id, epoch, version
    )[which],
    powers,
    strides,
    st.integers(1, 2**32 - 2),
    st.integers(1, 2**64 - 2),
    st.integers(1, 2**32 - 1),
    st.integers(0, 1),
)


@given(ours=specs, theirs=specs, pid=st.integers(0, 2**64 - 1), now_ns=st.integers(0, 2**64 - 1))
def test_a_superblock_matches_its_own_region_and_no_other(
    ours: RegionSpec, theirs: RegionSpec, pid: int, now_ns: int
) -> None:
    """The superblocks of any two regions that differ are distinguished, in either direction."""
    assert ours.mismatch(ours.superblock(pid, now_ns).encode_body()) is None
    if ours != theirs:
        assert ours.mismatch(theirs.superblock(pid, now_ns).encode_body()) is not None


dtypes = st.sampled_from(sorted({numpy_dtype(wire) for wire in (*range(1, 12),)}, key=str))


@given(data=st.data())
def test_arrays_come_back_as_they_were_sent(memory: Path, data: st.DataObject) -> None:
    """Any dtype, shape, order and stride, through layout_of, the ring and view_of_frame."""
    dtype = data.draw(dtypes)
    shape = data.draw(nps.array_shapes(min_dims=1, max_dims=8, min_side=0, max_side=4).filter(small))
    array: Any = data.draw(nps.arrays(dtype, shape))
    match data.draw(st.sampled_from(["C", "F", "reversed", "strided"])):
        case "F":
            array = np.asfortranarray(array)
        case "reversed":
            array = array[::-1]
        case "strided":
            array = np.repeat(array, 2, axis=-1)[..., ::2]
    ring = fresh_ring(memory)
    layout = layout_of(array)
    writer, reader = ring.writer(), ring.reader()
    assert writer.write(0, layout, np.copy(array, order="F" if layout.major_order == 2 else "C"))
    frame: Any = reader.read(0)
    view = view_of_frame(reader.pools[frame.pool][2], frame)
    assert view.dtype == array.dtype
    assert not view.flags.writeable
    assert view.tobytes() == array.tobytes()
    assert view.shape == array.shape


def small(shape: tuple[int, ...]) -> bool:
    return int(np.prod(shape)) <= 512


def fresh_ring(memory: Path) -> Any:
    stride = 4096
    ring_file(memory / "ring")
    pool_file(memory / "pool", slot_bytes=stride, stride_bytes=stride)
    with (memory / "pool").open("r+b") as file:
        file.truncate(64 + 4 * stride)
    uris = [f"shm:file?path={memory}/{name}" for name in ("ring", "pool")]
    spec = RingSpec(4, (PoolSpec(3, stride),))
    return map_ring(spec, uris, AllowedBases([memory]), stream_id=10000, epoch=7, writable=True)
