# SPDX-License-Identifier: Apache-2.0
"""The shape of a stream's memory: which regions there are, how large they are, what their superblocks say.

    header.ring   superblock | nslots x 256 bytes
    <id>.pool     superblock | nslots x stride_bytes        one per pool, with the ring's nslots

Pure arithmetic: opens nothing and knows no clock. What the specifications forbid cannot be constructed.
Wire §6, §7.1, §8.1, §9, §15.1, §15.5, §15.22; decisions A1, A7, A9, B19–B22, C14, C16, C17, C19, K7.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

import msgspec

from tensorpool._core import HEADER_SLOT_BYTES, SUPERBLOCK_BYTES
from tensorpool.errors import DecodeError, LocalProtocolError, RemoteProtocolError
from tensorpool.wire.control import RegionType, ShmRegionSuperblock

MAGIC: Final = 0x544F504C53484D31  # A1: the number decides, not the text that it almost spells
MAGIC_OFFSET: Final = 0
ACTIVITY_OFFSET: Final = 56  # A8: besides the magic the only field that is read and written atomically
LAYOUT_VERSION: Final = 1
MAX_EPOCH: Final = 2**64 - 2  # C17: 0 is no epoch, all ones is null

_MAX_NSLOTS: Final = 2**31  # the largest power of two in a u32
_MAX_STRIDE_BYTES: Final = 2**31
_MIN_STRIDE_BYTES: Final = 64
_MAX_SIZE_BYTES: Final = 2**63 - 1  # off_t
_MAX_STREAM_ID: Final = 2**32 - 2
_NO_SLOT_BYTES: Final = 2**32 - 1  # what another implementation writes for a pool (A9)


class PoolSpec(msgspec.Struct, frozen=True):
    """One size class of payload slots."""

    pool_id: int
    stride_bytes: int

    def __post_init__(self) -> None:
        _require("pool_id", self.pool_id, 0 <= self.pool_id <= 0xFFFF, "0 to 65535")
        is_stride = _is_power_of_two(self.stride_bytes, _MIN_STRIDE_BYTES, _MAX_STRIDE_BYTES)
        name = f"pool {self.pool_id}: stride_bytes"
        _require(name, self.stride_bytes, is_stride, "a power of two from 64 to 2^31")


class ForeignPoolSpec(PoolSpec, frozen=True):
    """A pool that a driver of another implementation made: its stride may be any multiple of 64 (K7)."""

    def __post_init__(self) -> None:
        _require("pool_id", self.pool_id, 0 <= self.pool_id <= 0xFFFF, "0 to 65535")
        is_stride = _MIN_STRIDE_BYTES <= self.stride_bytes <= _MAX_STRIDE_BYTES
        name = f"pool {self.pool_id}: stride_bytes"
        _require(name, self.stride_bytes, is_stride and self.stride_bytes % 64 == 0, "a multiple of 64 up to 2^31")


class AnnouncedPool(Protocol):
    """An entry of `payload_pools`, in an announce or an attach response alike."""

    @property
    def pool_id(self) -> int: ...
    @property
    def pool_nslots(self) -> int: ...
    @property
    def stride_bytes(self) -> int: ...


class RingSpec(msgspec.Struct, frozen=True):
    """A header ring and its pools.

    >>> RingSpec(1024, (PoolSpec(1, 65536), PoolSpec(2, 1048576))).size_bytes
    1141113024

    Raises LocalProtocolError for what no stream may have.
    """

    nslots: int
    pools: tuple[PoolSpec, ...]

    def __post_init__(self) -> None:
        is_nslots = _is_power_of_two(self.nslots, 1, _MAX_NSLOTS)
        _require("nslots", self.nslots, is_nslots, "a power of two from 1 to 2^31")
        _require("pools", len(self.pools), len(self.pools) > 0, "at least one pool")
        ids = [pool.pool_id for pool in self.pools]
        _require("pool ids", ids, len(set(ids)) == len(ids), "each id once")
        size = self.size_bytes
        _require("size_bytes", size, size <= _MAX_SIZE_BYTES, "less than 2^63 bytes in all regions together")

    @classmethod
    def announced(cls, header_nslots: int, header_slot_bytes: int, pools: Iterable[AnnouncedPool]) -> RingSpec:
        """The ring that a peer announces. Raises RemoteProtocolError; one bad pool rejects it whole (C16)."""
        try:
            _require(
                "header_slot_bytes", header_slot_bytes, header_slot_bytes == HEADER_SLOT_BYTES, str(HEADER_SLOT_BYTES)
            )
            specs = []
            for pool in pools:
                name = f"pool {pool.pool_id}: nslots"
                _require(name, pool.pool_nslots, pool.pool_nslots == header_nslots, f"the ring's {header_nslots}")
                is_ours = _is_power_of_two(pool.stride_bytes, _MIN_STRIDE_BYTES, _MAX_STRIDE_BYTES)
                kind = PoolSpec if is_ours else ForeignPoolSpec
                specs.append(kind(pool.pool_id, pool.stride_bytes))
            return cls(header_nslots, tuple(specs))
        except LocalProtocolError as error:
            raise RemoteProtocolError(f"announced ring: {error}") from None

    @property
    def size_bytes(self) -> int:
        """The bytes of all regions of one epoch together, superblocks included."""
        return sum(_region_bytes(self.nslots, slot) for slot in self._slot_sizes)

    @property
    def _slot_sizes(self) -> list[int]:
        return [HEADER_SLOT_BYTES, *(pool.stride_bytes for pool in self.pools)]

    def regions(self, stream_id: int, epoch: int, layout_version: int = LAYOUT_VERSION) -> tuple[RegionSpec, ...]:
        """The regions of one epoch: the header ring, then the pools in their order."""
        ring = (RegionType.HEADER_RING, 0, HEADER_SLOT_BYTES)  # §7.1: the ring's pool_id is 0
        pools = ((RegionType.PAYLOAD_POOL, pool.pool_id, pool.stride_bytes) for pool in self.pools)
        return tuple(
            RegionSpec(stream_id, epoch, layout_version, kind, pool_id, self.nslots, slot_bytes)
            for kind, pool_id, slot_bytes in (ring, *pools)
        )


class RegionSpec(msgspec.Struct, frozen=True):
    """One region of one epoch: what its superblock must say, and the bytes it takes. Made by `RingSpec`."""

    stream_id: int
    epoch: int
    layout_version: int
    region_type: RegionType
    pool_id: int
    nslots: int
    slot_bytes: int  # a pool's stride_bytes

    def __post_init__(self) -> None:
        _require("stream_id", self.stream_id, 1 <= self.stream_id <= _MAX_STREAM_ID, "1 to 2^32 - 2")
        _require("epoch", self.epoch, 1 <= self.epoch <= MAX_EPOCH, "1 to 2^64 - 2")
        version = self.layout_version
        _require("layout_version", version, 1 <= version < 2**32, "1 to 2^32 - 1")

    @property
    def size_bytes(self) -> int:
        """What the file must hold at least."""
        return _region_bytes(self.nslots, self.slot_bytes)

    @property
    def stride_bytes(self) -> int:
        """As its superblock is written: 0 in a header ring (A9)."""
        return self.slot_bytes if self.region_type is RegionType.PAYLOAD_POOL else 0

    def superblock(self, pid: int, now_ns: int) -> ShmRegionSuperblock:
        """The superblock of a region that `pid` creates now."""
        return ShmRegionSuperblock(
            magic=MAGIC,
            layout_version=self.layout_version,
            epoch=self.epoch,
            stream_id=self.stream_id,
            region_type=self.region_type,
            pool_id=self.pool_id,
            nslots=self.nslots,
            slot_bytes=self.slot_bytes,
            stride_bytes=self.stride_bytes,
            pid=pid,
            start_timestamp_ns=now_ns,
            activity_timestamp_ns=now_ns,
        )

    def mismatch(self, superblock: bytes) -> str | None:
        """How 64 bytes differ from the superblock that this region must carry: only what differs, or None.

        >>> ring.mismatch(other.superblock(1, 0).encode_body())
        'epoch: expected 7, found 6; nslots: expected 1024, found 512'
        """
        return "; ".join(self.differences(superblock).values()) or None

    def differences(self, superblock: bytes) -> dict[str, str]:
        """What differs: the field's name, and what was expected and found."""
        magic = int.from_bytes(superblock[:8], "little")
        if magic != MAGIC:
            note = " (never initialised, or still being created)" if magic == 0 else ""
            return {"magic": f"magic: expected {MAGIC:#018x}, found {magic:#018x}{note}"}
        try:
            found = ShmRegionSuperblock.decode_body(superblock)
        except DecodeError as error:
            return {error.field: error.what}
        checks = [
            ("layout_version", self.layout_version, found.layout_version),
            ("epoch", self.epoch, found.epoch),
            ("stream_id", self.stream_id, found.stream_id),
            ("region_type", self.region_type.name, found.region_type.name),
            ("pool_id", self.pool_id, found.pool_id),
            ("nslots", self.nslots, found.nslots),
        ]
        # A9: a ring's stride_bytes is undefined, a pool's slot_bytes is its stride or all ones.
        if self.region_type is RegionType.PAYLOAD_POOL:
            checks.append(("stride_bytes", self.stride_bytes, found.stride_bytes))
        if self.region_type is RegionType.HEADER_RING or found.slot_bytes != _NO_SLOT_BYTES:
            checks.append(("slot_bytes", self.slot_bytes, found.slot_bytes))
        return {name: f"{name}: expected {want}, found {got}" for name, want, got in checks if want != got}


def parse_superblock(superblock: bytes) -> ShmRegionSuperblock | None:
    """Whichever superblock these bytes are, or None where they are none."""
    if int.from_bytes(superblock[:8], "little") != MAGIC:
        return None
    try:
        return ShmRegionSuperblock.decode_body(superblock)
    except DecodeError:
        return None


def round_up(size_bytes: int, unit_bytes: int) -> int:
    """The smallest multiple of `unit_bytes` that holds `size_bytes`."""
    return -(-size_bytes // unit_bytes) * unit_bytes


def _region_bytes(nslots: int, slot_bytes: int) -> int:
    return SUPERBLOCK_BYTES + nslots * slot_bytes


def _is_power_of_two(value: int, low: int, high: int) -> bool:
    return low <= value <= high and value & (value - 1) == 0


def _require(name: str, value: object, is_met: bool, accepted: str) -> None:
    if not is_met:
        raise LocalProtocolError(f"{name} = {value}: expected {accepted}")
