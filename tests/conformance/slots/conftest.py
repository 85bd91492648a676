# SPDX-License-Identifier: Apache-2.0
"""The files of a ring, laid out by hand, and the ring that maps them. Wire §8, §9."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorpool._core import DropReason, Mapping, RingReader, RingWriter, SlotFrame, TensorLayout
from tests.support.region_bytes import SLOT, SLOT_FIELDS, packed_slot

NSLOTS = 8
POOLS = {1: 64, 4: 4096}  # pool id -> stride
SEQ = 5
UINT8, FLOAT32, FLOAT64, BIT = 1, 9, 10, 14
ROW, COLUMN = 1, 2
ROWS, COLUMNS = 1, 2

# byte_layouts.md: seq 5, 24 bytes, slot 5, pool 1, timestamp 77, meta 1, FLOAT32 ROW 2x3, inferred strides
GOLDEN = bytes.fromhex(
    "0b000000000000001800000005000000010000000000 4d00000000000000 01000000"
    + "00" * 26
    + "c0000000 b800340084030100 0900 0100 02 00 00 00000000 02000000 03000000"
    + "00" * 24
    + "00" * 32
    + "00" * 109
)
PAYLOAD = bytes(range(0x40, 0x58))


def slot_bytes(dims: tuple[int, ...] = (2, 3), strides: tuple[int, ...] = (), **changed: Any) -> bytes:
    """The golden slot with some fields replaced."""
    return packed_slot(dims, strides, **dict(zip(SLOT_FIELDS, SLOT.unpack(GOLDEN), strict=False)) | changed)


class RingFiles:
    """A header ring and its pools as files of exactly the size that the specification asks for."""

    def __init__(self, folder: Path, nslots: int = NSLOTS, pools: dict[int, int] | None = None) -> None:
        self.nslots = nslots
        self.pools = POOLS if pools is None else pools
        self.header = self._create(folder / "header.ring", 64 + nslots * 256)
        self.files = {
            pool_id: self._create(folder / f"{pool_id}.pool", 64 + nslots * stride)
            for pool_id, stride in self.pools.items()
        }

    @staticmethod
    def _create(path: Path, size: int) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.truncate(fd, size)
        return fd

    def close(self) -> None:
        for fd in (self.header, *self.files.values()):
            os.close(fd)

    def _map(self, writable: bool) -> tuple[Mapping, list[tuple[int, int, Mapping]], int]:
        def whole(fd: int) -> Mapping:
            return Mapping(fd, os.fstat(fd).st_size, writable=writable)

        pools = [(pool_id, stride, whole(self.files[pool_id])) for pool_id, stride in self.pools.items()]
        return whole(self.header), pools, self.nslots

    def writer(self) -> RingWriter:
        return RingWriter(*self._map(writable=True))

    def reader(self) -> RingReader:
        return RingReader(*self._map(writable=False))

    def slot(self, index: int) -> bytes:
        return os.pread(self.header, 256, 64 + index * 256)

    def field(self, index: int, name: str) -> Any:
        return dict(zip(SLOT_FIELDS, SLOT.unpack(self.slot(index)), strict=False))[name]

    def word(self, index: int) -> int:
        return int(struct.unpack_from("<Q", self.slot(index))[0])

    def put(self, index: int, data: bytes, at: int = 0) -> None:
        os.pwrite(self.header, data, 64 + index * 256 + at)

    def payload(self, pool_id: int, index: int, size: int) -> bytes:
        return os.pread(self.files[pool_id], size, 64 + index * self.pools[pool_id])


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[RingFiles]:
    files = RingFiles(tmp_path)
    yield files
    files.close()


def tensor(
    dims: list[int] | None = None,
    strides: list[int] | None = None,
    *,
    dtype: int = FLOAT32,
    order: int = ROW,
    unit: int = 0,
    stride: int = 0,
) -> TensorLayout:
    return TensorLayout(dtype, order, [2, 3] if dims is None else dims, strides or [], unit, stride)


def accepted(result: SlotFrame | DropReason) -> SlotFrame:
    assert isinstance(result, SlotFrame), result
    return result
