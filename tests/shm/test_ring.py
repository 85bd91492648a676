# SPDX-License-Identifier: Apache-2.0
"""Mapped rings: all regions or none, bound to the native reader and writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensorpool._core import DropReason
from tensorpool.clock import SystemClock
from tensorpool.errors import LocalProtocolError, RegionRejected
from tensorpool.shm import AllowedBases, EpochTree, MappedRing, PoolSpec, RingSpec, layout_of, map_ring, view_of_frame
from tests.shm.by_hand import mapped_files, pool_file, replace_bytes, resident_bytes, ring_file

SPEC = RingSpec(4, (PoolSpec(3, 128), PoolSpec(9, 256)))


@pytest.fixture
def uris(shm_dir: Path) -> list[str]:
    large = shm_dir / "large"
    uris = [ring_file(shm_dir / "ring"), pool_file(shm_dir / "small"), pool_file(large)]
    pool_file(large, pool_id=9, slot_bytes=256, stride_bytes=256)
    with large.open("ab") as file:
        file.truncate(64 + 4 * 256)
    return uris


def mapped(uris: list[str], bases: AllowedBases, *, writable: bool = False) -> MappedRing:
    return map_ring(SPEC, uris, bases, stream_id=10000, epoch=7, writable=writable)


def test_a_frame_travels_from_writer_to_reader(uris: list[str], bases: AllowedBases) -> None:
    """Two mappings of the same files, one to write and one to read."""
    writer, ring = mapped(uris, bases, writable=True).writer(), mapped(uris, bases)
    reader = ring.reader()
    array = np.arange(40, dtype=np.int32)
    assert reader.read(0) is DropReason.NOT_COMMITTED
    assert writer.write(0, layout_of(array), array)
    frame = reader.read(0)
    assert not isinstance(frame, DropReason)
    pool_id, stride_bytes, mapping = reader.pools[frame.pool]
    assert (pool_id, stride_bytes, mapping) == (9, 256, ring.pools[1].mapping)
    assert (view_of_frame(mapping, frame) == array).all()
    assert reader.nslots == 4


def test_a_ring_knows_its_stream_epoch_and_version(uris: list[str], bases: AllowedBases) -> None:
    """The properties are those of its regions."""
    ring = mapped(uris, bases)
    assert (ring.stream_id, ring.epoch, ring.layout_version) == (10000, 7, 1)
    assert [region.uri for region in ring.regions] == uris


def test_one_bad_pool_rejects_the_ring_and_unmaps_the_rest(uris: list[str], bases: AllowedBases, shm_dir: Path) -> None:
    """Nothing is consumed in part, and the kept exception keeps nothing mapped."""
    replace_bytes(shm_dir / "large", 12, b"\x06")
    with pytest.raises(RegionRejected) as caught:
        mapped(uris, bases)
    assert caught.value.uri == uris[2]
    assert caught.value.detail == "epoch: expected 7, found 6"
    assert mapped_files(shm_dir) == []


def test_regions_in_each_others_place_are_rejected(uris: list[str], bases: AllowedBases) -> None:
    """Every file has a superblock that says which one it is."""
    with pytest.raises(RegionRejected, match="pool_id: expected 3, found 9"):
        mapped([uris[0], uris[2], uris[2]], bases)
    with pytest.raises(RegionRejected, match="region_type: expected PAYLOAD_POOL, found HEADER_RING"):
        mapped([uris[0], uris[0], uris[2]], bases)


def test_the_number_of_uris_must_be_that_of_the_regions(uris: list[str], bases: AllowedBases, shm_dir: Path) -> None:
    """A caller's mistake, and nothing stays mapped."""
    with pytest.raises(ValueError, match="zip"):
        mapped(uris[:2], bases)
    assert mapped_files(shm_dir) == []


def test_a_read_only_ring_has_no_writer(uris: list[str], bases: AllowedBases) -> None:
    """Consumers cannot write, not even by mistake."""
    with pytest.raises(ValueError, match="writable"):
        mapped(uris, bases).writer()


def test_the_oldest_sign_of_life_counts(uris: list[str], bases: AllowedBases, shm_dir: Path) -> None:
    """One region that is not refreshed makes the whole ring look dead; the driver refreshes all."""
    ring, owner = mapped(uris, bases), mapped(uris, bases, writable=True)
    owner.header.refresh_activity(9_000)
    assert ring.activity_timestamp_ns == 2_000
    owner.refresh_activity(9_000)
    assert ring.activity_timestamp_ns == 9_000


def test_revalidation_covers_every_region(uris: list[str], bases: AllowedBases, shm_dir: Path) -> None:
    """A pool's superblock counts as much as the header ring's."""
    ring = mapped(uris, bases)
    ring.revalidate()
    replace_bytes(shm_dir / "small", 0, b"\0")
    with pytest.raises(RegionRejected, match="small: superblock: magic"):
        ring.revalidate()


def test_prefaulting_brings_in_what_is_there(shm_dir: Path, bases: AllowedBases) -> None:
    """All regions, for readers and writers alike; contents stay."""
    large = RingSpec(4, (PoolSpec(3, 1 << 20),))
    uris = [
        ring_file(shm_dir / "ring"),
        pool_file(shm_dir / "pool", slot_bytes=1 << 20, stride_bytes=1 << 20),
    ]
    with open(shm_dir / "pool", "ab") as file:
        file.write(bytes(4 << 20))
    for writable in (False, True):
        ring = map_ring(large, uris, bases, stream_id=10000, epoch=7, writable=writable)
        assert resident_bytes(shm_dir) < 1 << 20
        ring.prefault()
        assert resident_bytes(shm_dir) > 4 << 20
        ring.revalidate()
        del ring


def test_ids_that_no_ring_has_are_refused_before_anything_is_opened(bases: AllowedBases) -> None:
    """Epoch 0 does not exist."""
    with pytest.raises(LocalProtocolError, match="epoch = 0"):
        map_ring(SPEC, ["a", "b", "c"], bases, stream_id=10000, epoch=0)


def test_locking_keeps_what_is_there_and_takes_nothing_for_holes(shm_dir: Path, bases: AllowedBases) -> None:
    """A reader of a sparse ring may lock it without making it take memory."""
    spec = RingSpec(64, (PoolSpec(1, 1 << 16),))
    with EpochTree.open(str(shm_dir), clock=SystemClock()) as tree:
        created = tree.create(1, 1, spec, 1, reserve_space=False)
        mapped = map_ring(spec, [region.uri for region in created.regions], bases, stream_id=1, epoch=1)
        del created
        mapped.lock()
        pool = shm_dir / "tensorpool-root" / "default" / "1" / "1" / "1.pool"
        assert pool.stat().st_blocks * 512 < 1 << 16
        mapped.prefault()
        assert resident_bytes(shm_dir, "Locked") >= spec.size_bytes
