# SPDX-License-Identifier: Apache-2.0
"""Frames out of a ring and into Arrow, in whichever process a task runs.

A worker keeps its mappings between batches and lets go of those that were not used for a while. It needs no Aeron and no
lease of its own: the planner holds one for as long as the query lives. Wire §15.18, §15.21a.5.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from tensorpool._core import DropReason, SlotFrame
from tensorpool.client.frame import MappedEpoch
from tensorpool.client.mapping import Regions
from tensorpool.errors import RegionRejected
from tensorpool.shm import AllowedBases, map_ring
from tensorpool.spark.offsets import SeqRange
from tensorpool.wire.control import Dtype, MajorOrder
from tensorpool.wire.region_uri import RegionUri

BATCH_BYTES: Final = 8 << 20
BATCH_ROWS: Final = 4096
IDLE_NS: Final = 60_000_000_000
MAX_MAPPED: Final = 64
NO_TIMESTAMP: Final = 2**64 - 1

FRAME_FIELDS: Final = [
    pa.field("stream_id", pa.int64()),
    pa.field("epoch", pa.int64()),
    pa.field("seq", pa.int64()),
    pa.field("timestamp_ns", pa.int64()),
    pa.field("received_ns", pa.int64()),
    pa.field("meta_version", pa.int64()),
    pa.field("trace_id", pa.int64()),
    pa.field("dtype", pa.string()),
    pa.field("shape", pa.list_(pa.int32())),
    pa.field("order", pa.string()),
    pa.field("nbytes", pa.int64()),
    pa.field("dropped_before", pa.int64()),
    pa.field("payload", pa.binary()),
]
FRAME_SCHEMA: Final = pa.schema(FRAME_FIELDS)
FRAME_DDL: Final = (
    "stream_id BIGINT, epoch BIGINT, seq BIGINT, timestamp_ns BIGINT, received_ns BIGINT, meta_version BIGINT, "
    "trace_id BIGINT, dtype STRING, shape ARRAY<INT>, `order` STRING, nbytes BIGINT, dropped_before BIGINT, "
    "payload BINARY"
)


class RingPart(msgspec.Struct, frozen=True):
    """What a task needs to read a range: where the ring is, and which directories are trusted."""

    range: SeqRange
    regions: Regions
    bases: tuple[str, ...]
    lost_before: int = 0  # frames lost ahead of the range


class Gap(msgspec.Struct, frozen=True):
    """Frames of a range that could not be read."""

    stream_id: int
    epoch: int
    lo: int
    hi: int
    reason: str


class _Mapped(msgspec.Struct):
    epoch: MappedEpoch
    inode: int
    used_ns: int


_mapped: OrderedDict[tuple[str, int], _Mapped] = OrderedDict()


def mapped_epoch(regions: Regions, bases: tuple[str, ...]) -> MappedEpoch:
    """The mapping of an epoch, kept from an earlier task where it is still the same file.

    Raises RegionRejected when it is neither kept nor there any more.
    """
    now_ns = time.monotonic_ns()
    for key in [key for key, kept in _mapped.items() if now_ns - kept.used_ns > IDLE_NS]:
        del _mapped[key]
    key = (regions.uris[0], regions.epoch)
    path = RegionUri.parse(regions.uris[0]).path
    inode = _inode(path)
    kept = _mapped.get(key)
    if kept is not None and inode in (kept.inode, 0):  # 0: it lost its name; its memory is what it was
        kept.epoch.ring.revalidate()
        kept.used_ns = now_ns
        _mapped.move_to_end(key)
        return kept.epoch
    ring = map_ring(
        regions.ring,
        regions.uris,
        AllowedBases(bases),
        stream_id=regions.stream_id,
        epoch=regions.epoch,
        layout_version=regions.layout_version,
    )
    epoch = MappedEpoch(ring)
    _mapped[key] = _Mapped(epoch, inode, now_ns)
    while len(_mapped) > MAX_MAPPED:
        _mapped.popitem(last=False)
    return epoch


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


class FrameReader:
    """Reads a range as Arrow batches; afterwards `gaps` says what could not be read."""

    def __init__(self, part: RingPart, *, inline: bool = True, batch_bytes: int = BATCH_BYTES) -> None:
        self._part = part
        self._inline = inline
        self._batch_bytes = batch_bytes
        self.gaps: list[Gap] = []
        self.frames = 0

    def batches(self) -> Iterator[pa.RecordBatch]:
        part = self._part.range
        try:
            epoch = mapped_epoch(self._part.regions, self._part.bases)
        except RegionRejected as rejected:
            self._lose(part.lo, part.hi, rejected.check)
            return
        builder = _Builder(epoch, self._inline, self._batch_bytes)
        builder.lost = self._part.lost_before
        for seq in range(part.lo, part.hi):
            slot = epoch.reader.read(seq)
            if not isinstance(slot, SlotFrame):
                self._lose(seq, seq + 1, slot.name)
                builder.lost += 1
                continue
            if builder.is_full(slot.values_len_bytes):
                yield builder.finish()
            if not builder.add(slot):
                self._lose(seq, seq + 1, DropReason.OVERWRITTEN.name)
                builder.lost += 1
                continue
            self.frames += 1
        if builder.rows:
            yield builder.finish()

    def _lose(self, lo: int, hi: int, reason: str) -> None:
        part = self._part.range
        last = self.gaps[-1] if self.gaps else None
        if last is not None and last.hi == lo and last.reason == reason:
            self.gaps[-1] = Gap(part.stream_id, part.epoch, last.lo, hi, reason)
        else:
            self.gaps.append(Gap(part.stream_id, part.epoch, lo, hi, reason))


class _Builder:
    """Columns of one batch; payloads are copied once, from shared memory into Arrow's own buffer, and verified."""

    def __init__(self, epoch: MappedEpoch, inline: bool, batch_bytes: int) -> None:
        self._epoch = epoch
        self._inline = inline
        self._batch_bytes = batch_bytes
        self.lost = 0
        self._reset()

    @property
    def rows(self) -> int:
        return len(self._seqs)

    def is_full(self, more_bytes: int) -> bool:
        return self.rows > 0 and (self.rows >= BATCH_ROWS or self._filled + more_bytes > self._batch_bytes)

    def add(self, slot: SlotFrame) -> bool:
        """False: it was overwritten before it was copied."""
        size = slot.values_len_bytes
        if self._inline and size:
            if self._filled + size > len(self._buffer):
                grown = np.empty(max(self._filled + size, self._batch_bytes), np.uint8)
                grown[: self._filled] = self._buffer[: self._filled]
                self._buffer = grown
            if not self._epoch.reader.copy_into(slot, self._buffer[self._filled : self._filled + size]):
                return False
        layout = slot.layout
        self._seqs.append(slot.seq)
        self._stamps.append(None if slot.timestamp_ns in (0, NO_TIMESTAMP) else slot.timestamp_ns)
        self._received.append(time.monotonic_ns())
        self._versions.append(slot.meta_version)
        self._dtypes.append(Dtype(layout.dtype).name)
        self._shapes.append(list(layout.shape))
        self._orders.append("F" if layout.major_order == MajorOrder.COLUMN else "C")
        self._sizes.append(size)
        self._drops.append(self.lost)
        self.lost = 0
        self._filled += size if self._inline else 0
        self._offsets.append(self._filled)
        return True

    def finish(self) -> pa.RecordBatch:
        rows = self.rows
        if self._inline:
            offsets = pa.py_buffer(np.asarray(self._offsets, np.int32))
            payload = pa.BinaryArray.from_buffers(pa.binary(), rows, [None, offsets, pa.py_buffer(self._buffer)])
        else:
            payload = pa.nulls(rows, pa.binary())
        columns = [
            pa.array(np.full(rows, self._epoch.stream_id, np.int64)),
            pa.array(np.full(rows, self._epoch.epoch, np.int64)),
            pa.array(self._seqs, pa.int64()),
            pa.array(self._stamps, pa.int64()),
            pa.array(self._received, pa.int64()),
            pa.array(self._versions, pa.int64()),
            pa.nulls(rows, pa.int64()),  # a trace id travels in the descriptor, not in the ring
            pa.array(self._dtypes, pa.string()),
            pa.array(self._shapes, pa.list_(pa.int32())),
            pa.array(self._orders, pa.string()),
            pa.array(self._sizes, pa.int64()),
            pa.array(self._drops, pa.int64()),
            payload,
        ]
        self._reset()
        return pa.RecordBatch.from_arrays(columns, schema=FRAME_SCHEMA)

    def _reset(self) -> None:
        self._seqs: list[int] = []
        self._stamps: list[int | None] = []
        self._received: list[int] = []
        self._versions: list[int] = []
        self._dtypes: list[str] = []
        self._shapes: list[list[int]] = []
        self._orders: list[str] = []
        self._sizes: list[int] = []
        self._drops: list[int] = []
        self._offsets: list[int] = [0]
        self._filled = 0
        self._buffer = np.empty(0, np.uint8)
