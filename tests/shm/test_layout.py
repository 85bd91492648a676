# SPDX-License-Identifier: Apache-2.0
"""Layouts: sizes, refusals by name, superblocks byte by byte."""

from __future__ import annotations

from typing import Any

import pytest

from tensorpool.errors import LocalProtocolError, RemoteProtocolError
from tensorpool.shm.layout import MAX_EPOCH, PoolSpec, RegionSpec, RingSpec, parse_superblock, round_up
from tensorpool.wire.control import PayloadPool, RegionType
from tests.shm.by_hand import POOL, RING
from tests.support.region_bytes import packed_superblock

SPEC = RingSpec(4, (PoolSpec(3, 128),))
HEADER, POOL_3 = SPEC.regions(10000, 7)


def test_a_ring_has_one_header_region_and_its_pools_in_order() -> None:
    """regions() lists the header ring first, then the pools as they were given."""
    regions = RingSpec(8, (PoolSpec(9, 4096), PoolSpec(2, 64))).regions(5, 1, layout_version=3)
    assert [(region.region_type, region.pool_id, region.slot_bytes) for region in regions] == [
        (RegionType.HEADER_RING, 0, 256),
        (RegionType.PAYLOAD_POOL, 9, 4096),
        (RegionType.PAYLOAD_POOL, 2, 64),
    ]
    assert {(region.stream_id, region.epoch, region.layout_version) for region in regions} == {(5, 1, 3)}
    assert [region.size_bytes for region in regions] == [64 + 8 * 256, 64 + 8 * 4096, 64 + 8 * 64]


def test_the_bill_of_an_epoch_is_the_sum_of_its_regions() -> None:
    """size_bytes counts every region with its superblock."""
    ring = RingSpec(1024, (PoolSpec(1, 65536), PoolSpec(2, 1 << 20)))
    assert ring.size_bytes == 3 * 64 + 1024 * (256 + 65536 + (1 << 20))
    assert ring.size_bytes == sum(region.size_bytes for region in ring.regions(1, 1))


def test_the_largest_ring_is_counted_without_overflow() -> None:
    """2^31 slots of 2^31 bytes are 2^62 bytes and a superblock."""
    ring = RingSpec(2**31, (PoolSpec(1, 2**31),))
    assert ring.regions(1, 1)[1].size_bytes == 2**62 + 64


@pytest.mark.parametrize(
    ("nslots", "pools", "text"),
    [
        (0, [(1, 64)], r"nslots = 0: expected a power of two from 1 to 2\^31"),
        (3, [(1, 64)], "nslots = 3"),
        (2**32, [(1, 64)], "nslots = 4294967296"),
        (-4, [(1, 64)], "nslots = -4"),
        (4, [], "pools = 0: expected at least one pool"),
        (4, [(1, 0)], r"pool 1: stride_bytes = 0: expected a power of two from 64 to 2\^31"),
        (4, [(1, 32)], "stride_bytes = 32"),
        (4, [(1, 96)], "stride_bytes = 96"),
        (4, [(1, 192)], "stride_bytes = 192"),
        (4, [(1, 2**32)], "stride_bytes = 4294967296"),
        (4, [(-1, 64)], "pool_id = -1: expected 0 to 65535"),
        (4, [(65536, 64)], "pool_id = 65536"),
        (4, [(1, 64), (2, 64), (1, 128)], r"pool ids = \[1, 2, 1\]: expected each id once"),
        (2**31, [(1, 2**31), (2, 2**31)], "less than 2\\^63 bytes"),
    ],
)
def test_what_no_stream_may_have_is_refused_by_name(nslots: int, pools: list[tuple[int, int]], text: str) -> None:
    """A RingSpec that breaks a rule cannot be made, and says which rule."""
    with pytest.raises(LocalProtocolError, match=text):
        RingSpec(nslots, tuple(PoolSpec(*pool) for pool in pools))


@pytest.mark.parametrize(
    ("stream_id", "epoch", "layout_version", "text"),
    [
        (0, 1, 1, "stream_id = 0"),
        (2**32 - 1, 1, 1, "stream_id = 4294967295"),
        (1, 0, 1, "epoch = 0"),
        (1, 2**64 - 1, 1, "epoch = 18446744073709551615"),
        (1, 1, 0, "layout_version = 0"),
        (1, 1, 2**32, "layout_version = 4294967296"),
    ],
)
def test_ids_that_mean_nothing_are_refused(stream_id: int, epoch: int, layout_version: int, text: str) -> None:
    """Stream 0, epoch 0, layout version 0 and all nulls have no regions."""
    with pytest.raises(LocalProtocolError, match=text):
        SPEC.regions(stream_id, epoch, layout_version)
    assert SPEC.regions(2**32 - 2, MAX_EPOCH, 2**32 - 1)


def test_an_announced_ring_is_the_ring_that_was_announced() -> None:
    """announced() reads the fields that announces and attach responses share."""
    pools = [PayloadPool(pool_id=3, pool_nslots=4, stride_bytes=128)]
    assert RingSpec.announced(4, 256, pools) == SPEC


@pytest.mark.parametrize(
    ("nslots", "slot_bytes", "pools", "text"),
    [
        (4, 128, [(1, 4, 64)], "header_slot_bytes = 128: expected 256"),
        (4, 256, [(1, 8, 64)], "pool 1: nslots = 8: expected the ring's 4"),
        (4, 256, [(1, 4, 64), (2, 4, 100)], "pool 2: stride_bytes = 100"),
        (4, 256, [(1, 4, 64), (1, 4, 64)], "each id once"),
        (4, 256, [], "at least one pool"),
        (5, 256, [(1, 5, 64)], "nslots = 5"),
    ],
)
def test_an_announce_with_one_flaw_is_refused_whole(
    nslots: int, slot_bytes: int, pools: list[tuple[int, int, int]], text: str
) -> None:
    """The peer is to blame: RemoteProtocolError, and no part of the ring survives."""
    entries = [PayloadPool(pool_id=a, pool_nslots=b, stride_bytes=c) for a, b, c in pools]
    with pytest.raises(RemoteProtocolError, match=f"announced ring: .*{text}"):
        RingSpec.announced(nslots, slot_bytes, entries)


def test_superblocks_are_the_bytes_of_the_schema() -> None:
    """Ring and pool superblocks equal those packed by hand."""
    assert HEADER.superblock(4711, 1_000).encode_body() == packed_superblock(RING | {"activity_timestamp_ns": 1_000})
    assert POOL_3.superblock(4711, 1_000).encode_body() == packed_superblock(POOL | {"activity_timestamp_ns": 1_000})


@pytest.mark.parametrize(("spec", "fields"), [(HEADER, RING), (POOL_3, POOL)], ids=["ring", "pool"])
def test_a_matching_superblock_has_no_mismatch(spec: RegionSpec, fields: dict[str, int]) -> None:
    """Identity and liveness fields are free; everything else as expected is None."""
    assert spec.mismatch(packed_superblock(fields | {"pid": 1, "start_timestamp_ns": 5})) is None


@pytest.mark.parametrize(
    ("spec", "fields", "changed", "text"),
    [
        (
            HEADER,
            RING,
            {"magic": 0},
            "magic: expected 0x544f504c53484d31, found 0x0000000000000000 (never init",
        ),
        (
            HEADER,
            RING,
            {"magic": 0x54504F4C53484D31},
            "magic: expected 0x544f504c53484d31, found 0x54504f4c5348",
        ),
        (HEADER, RING, {"layout_version": 2}, "layout_version: expected 1, found 2"),
        (HEADER, RING, {"epoch": 8}, "epoch: expected 7, found 8"),
        (HEADER, RING, {"stream_id": 1}, "stream_id: expected 10000, found 1"),
        (HEADER, RING, {"region_type": 2}, "region_type: expected HEADER_RING, found PAYLOAD_POOL"),
        (HEADER, RING, {"region_type": 9}, "ShmRegionSuperblock.region_type: 9 is refused"),
        (HEADER, RING, {"pool_id": 1}, "pool_id: expected 0, found 1"),
        (HEADER, RING, {"nslots": 8}, "nslots: expected 4, found 8"),
        (HEADER, RING, {"slot_bytes": 128}, "slot_bytes: expected 256, found 128"),
        (HEADER, RING, {"slot_bytes": 2**32 - 1}, "slot_bytes: expected 256, found 4294967295"),
        (POOL_3, POOL, {"stride_bytes": 64}, "stride_bytes: expected 128, found 64"),
        (POOL_3, POOL, {"pool_id": 4}, "pool_id: expected 3, found 4"),
        (POOL_3, POOL, {"slot_bytes": 64}, "slot_bytes: expected 128, found 64"),
        (POOL_3, POOL, {"epoch": 6, "nslots": 2}, "epoch: expected 7, found 6; nslots: expected 4, found 2"),
    ],
)
def test_a_mismatch_names_what_differs_and_nothing_else(
    spec: RegionSpec, fields: dict[str, int], changed: dict[str, int], text: str
) -> None:
    """Expected and found, field by field; fields that agree are not printed."""
    found = spec.mismatch(packed_superblock(fields | changed))
    assert found is not None
    assert found.startswith(text)
    assert found.count("expected") == max(len(changed), 1)


@pytest.mark.parametrize(
    ("spec", "fields", "changed"),
    [(HEADER, RING, {"stride_bytes": 77}), (POOL_3, POOL, {"slot_bytes": 2**32 - 1})],
)
def test_what_implementations_fill_in_differently_is_accepted(
    spec: RegionSpec, fields: dict[str, int], changed: dict[str, int]
) -> None:
    """A ring's stride_bytes is undefined, and another implementation leaves a pool's slot_bytes null."""
    assert spec.mismatch(packed_superblock(fields | changed)) is None


@pytest.mark.parametrize(
    "data", [b"", bytes(64), packed_superblock(RING)[:63], packed_superblock(RING | {"region_type": 5})]
)
def test_bytes_that_are_no_superblock_parse_to_none(data: bytes) -> None:
    """parse_superblock never raises for what a file may hold."""
    assert parse_superblock(data) is None


def test_a_superblock_parses_to_its_fields() -> None:
    """parse_superblock gives the message."""
    found: Any = parse_superblock(packed_superblock(RING))
    assert (found.epoch, found.pid, found.activity_timestamp_ns) == (7, 4711, 2_000)


def test_rounding_goes_up_to_whole_units() -> None:
    """round_up keeps multiples and never loses a byte."""
    assert [round_up(size, 4096) for size in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
