# SPDX-License-Identifier: Apache-2.0
"""The files of one epoch, made with plain calls: honest, or with any byte in them replaced.

Written with pwrite, never mapped, so that /proc/self/maps tells what the client under test has mapped.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from tensorpool.wire.control import PayloadPool
from tests.support.region_bytes import MAGIC, packed_superblock, unpacked_superblock

NSLOTS: Final = 8
POOLS: Final[Mapping[int, int]] = {1: 256, 7: 4096}  # id: stride
RING: Final = 0  # among the regions of an epoch; the others have their pool's id


class Regions:
    """The files of one epoch: a header ring and its pools."""

    def __init__(
        self, folder: Path, stream_id: int, epoch: int, *, nslots: int = NSLOTS, pools: Mapping[int, int] = POOLS
    ) -> None:
        self.folder = folder
        self.stream_id = stream_id
        self.epoch = epoch
        self.nslots = nslots
        self.pools = dict(pools)
        names = {RING: "header.ring"} | {pool_id: f"{pool_id}.pool" for pool_id in pools}
        self.paths = {region: folder / name for region, name in names.items()}
        self._fds: dict[int, int] = {}

    def create(self, activity_ns: int, **lies: int) -> Self:
        """Make the files, with lies in all of the superblocks."""
        self.folder.mkdir(parents=True)
        for region, path in self.paths.items():
            self._fds[region] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.truncate(self._fds[region], self.size_of(region))
            stamps = {"start_timestamp_ns": activity_ns, "activity_timestamp_ns": activity_ns}
            self.set_superblock(region, **stamps | lies)
        return self

    def size_of(self, region: int) -> int:
        return 64 + self.nslots * self.pools.get(region, 256)

    def set_superblock(self, region: int, **changed: int) -> None:
        """Write a superblock: what is there or else what is true, with some fields changed."""
        current = self.read(region, 0, 64)
        is_written = len(current) == 64 and any(current)
        fields = unpacked_superblock(current) if is_written else self._honest_superblock(region)
        self.write(region, 0, packed_superblock(fields | changed))

    def restore_superblock(self, region: int, now_ns: int) -> None:
        """Write nothing but the truth."""
        honest = self._honest_superblock(region) | {"start_timestamp_ns": now_ns, "activity_timestamp_ns": now_ns}
        self.set_superblock(region, **honest)

    def _honest_superblock(self, region: int) -> dict[str, int]:
        stride = self.pools.get(region, 0)
        return {
            "magic": MAGIC,
            "layout_version": 1,
            "epoch": self.epoch,
            "stream_id": self.stream_id,
            "region_type": 2 if region else 1,
            "pool_id": region,
            "nslots": self.nslots,
            "slot_bytes": stride or 256,
            "stride_bytes": stride,
            "pid": os.getpid(),
            "start_timestamp_ns": 0,
            "activity_timestamp_ns": 0,
        }

    def breathe(self, now_ns: int) -> None:
        """Refresh the activity of every region."""
        for region in self._fds:
            self.write(region, 56, struct.pack("<Q", now_ns))

    def write(self, region: int, offset: int, data: bytes) -> None:
        os.pwrite(self._fds[region], data, offset)

    def read(self, region: int, offset: int, length: int) -> bytes:
        return os.pread(self._fds[region], length, offset)

    # --- slots

    def set_word(self, slot: int, word: int) -> None:
        """The commit word alone."""
        self.write(RING, 64 + slot * 256, struct.pack("<Q", word))

    def set_header(self, slot: int, data: bytes) -> None:
        """Everything of a slot but its commit word."""
        self.write(RING, 64 + slot * 256 + 8, data[8:])

    def header(self, slot: int) -> bytes:
        return self.read(RING, 64 + slot * 256, 256)

    def set_payload(self, pool_id: int, slot: int, data: bytes, offset: int = 0) -> None:
        self.write(pool_id, 64 + slot * self.pools[pool_id] + offset, data)

    def pool_for(self, length: int) -> int:
        """The smallest pool that takes so many bytes; the largest where none does."""
        by_stride = sorted(self.pools, key=lambda pool_id: (self.pools[pool_id], pool_id))
        return next((pool_id for pool_id in by_stride if self.pools[pool_id] >= length), by_stride[-1])

    # --- what a message says of them

    def uri(self, region: int) -> str:
        return f"shm:file?path={self.paths[region]}"

    @property
    def layout(self) -> dict[str, Any]:
        """The fields by which an announce describes them."""
        pools = [
            PayloadPool(pool_id=pool_id, pool_nslots=self.nslots, stride_bytes=stride, region_uri=self.uri(pool_id))
            for pool_id, stride in self.pools.items()
        ]
        return {
            "epoch": self.epoch,
            "layout_version": 1,
            "header_nslots": self.nslots,
            "header_slot_bytes": 256,
            "payload_pools": tuple(pools),
            "header_region_uri": self.uri(RING),
        }

    def layout_with(self, region: int, **changed: Any) -> dict[str, Any]:
        """The same with some fields of one pool, or the URI of the ring, otherwise."""
        if region == RING:
            return self.layout | {"header_region_uri": changed["region_uri"]}
        pools = [
            msgspec.structs.replace(pool, **changed) if pool.pool_id == region else pool
            for pool in self.layout["payload_pools"]
        ]
        return self.layout | {"payload_pools": tuple(pools)}

    # --- files that are none

    def replace_with_link(self, region: int, target: Path) -> None:
        """The path of a region becomes a symbolic link; the file moves to the target."""
        self.paths[region].rename(target)
        self.paths[region].symlink_to(target)

    def replace_with_fifo(self, region: int) -> None:
        self.paths[region].unlink()
        os.mkfifo(self.paths[region], 0o600)

    def replace_with_directory(self, region: int) -> None:
        self.paths[region].unlink()
        self.paths[region].mkdir()

    def shorten(self, region: int, missing: int = 1) -> None:
        """Cut bytes off the end of a file."""
        os.truncate(self._fds[region], self.size_of(region) - missing)

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
