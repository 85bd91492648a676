# SPDX-License-Identifier: Apache-2.0
"""The bytes of superblocks and slots by the offsets of the specification, without the code that the tests judge.

Wire §7.1, §8.1, §8.2.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tensorpool.wire.control import Dtype, MajorOrder

MAGIC: Final = 0x544F504C53484D31
SUPERBLOCK: Final = struct.Struct("<Q I Q I h H I I I Q Q Q")
SUPERBLOCK_FIELDS: Final = (
    *("magic", "layout_version", "epoch", "stream_id", "region_type", "pool_id", "nslots", "slot_bytes"),
    *("stride_bytes", "pid", "start_timestamp_ns", "activity_timestamp_ns"),
)

# SlotHeader with the length of headerBytes, the embedded message header, the TensorHeader block
SLOT: Final = struct.Struct("<QIIHIQI26sI HHHH hhBBBI8i8i109s")
SLOT_FIELDS: Final = (
    *("seq_commit", "values_len_bytes", "payload_slot", "pool_id", "payload_offset", "timestamp_ns"),
    *("meta_version", "pad", "header_length", "block_length", "template_id", "schema_id", "version"),
    *("dtype", "major_order", "ndims", "pad_align", "progress_unit", "progress_stride_bytes"),
)
_NUMERIC: Final = (Dtype(number) for number in range(Dtype.UINT8, Dtype.BOOLEAN))
DTYPES: Final = {np.dtype(dtype.name.lower()): dtype for dtype in _NUMERIC} | {np.dtype(np.bool_): Dtype.BOOLEAN}


def packed_superblock(fields: Mapping[str, int]) -> bytes:
    return SUPERBLOCK.pack(*(fields[name] for name in SUPERBLOCK_FIELDS))


def unpacked_superblock(data: bytes) -> dict[str, int]:
    return dict(zip(SUPERBLOCK_FIELDS, SUPERBLOCK.unpack(data), strict=True))


def superblock(path: str | Path) -> dict[str, int]:
    """The superblock of a region file, read from the disk."""
    with open(path, "rb") as file:
        return unpacked_superblock(file.read(SUPERBLOCK.size))


def in_progress(seq: int) -> int:
    return seq << 1


def committed(seq: int) -> int:
    return seq << 1 | 1


def packed_slot(dims: Sequence[int] = (), strides: Sequence[int] = (), **fields: Any) -> bytes:
    """The 256 bytes of a slot."""
    unused = (0,) * 8
    arrays = (*(*dims, *unused)[:8], *(*strides, *unused)[:8])
    return SLOT.pack(*(fields[name] for name in SLOT_FIELDS), *arrays, fields.get("tail", b""))


def slot_image(
    array: NDArray[Any] | bytes, *, raw: Mapping[int, bytes] | None = None, pool_id: int, slot: int, **changed: Any
) -> bytes:
    """The 256 bytes of a slot that holds this tensor, not committed, with what the test wants otherwise.

    `raw` are bytes by their offset in the slot, everything else is a field, `dims` and `strides` included.
    """
    shaped = np.frombuffer(array, np.uint8) if isinstance(array, bytes) else array
    is_column = shaped.flags.f_contiguous and not shaped.flags.c_contiguous
    fields: dict[str, Any] = {
        "seq_commit": 0,
        "values_len_bytes": shaped.nbytes,
        "payload_slot": slot,
        "pool_id": pool_id,
        "payload_offset": 0,
        "timestamp_ns": time.monotonic_ns(),
        "meta_version": 0,
        "pad": b"",
        "header_length": 192,
        "block_length": 184,
        "template_id": 52,
        "schema_id": 900,
        "version": 1,
        "dtype": DTYPES[shaped.dtype],
        "major_order": MajorOrder.COLUMN if is_column else MajorOrder.ROW,
        "ndims": shaped.ndim,
        "pad_align": 0,
        "progress_unit": 0,
        "progress_stride_bytes": 0,
        "dims": shaped.shape,
        "strides": (),
    }
    image = bytearray(packed_slot(**fields | changed))
    for offset, data in (raw or {}).items():
        image[offset : offset + len(data)] = data
    return bytes(image)
