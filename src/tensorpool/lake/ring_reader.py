# SPDX-License-Identifier: Apache-2.0
"""Frames out of a ring and into Arrow, in whichever process a task runs.

A worker keeps its mappings between batches and lets go of those that were not used for a while. It needs no Aeron and
no lease of its own: the planner holds one for as long as the query lives. Wire §15.18, §15.21a.5.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensorpool._core import DropReason, SlotFrame, TensorLayout
from tensorpool.client.mapped_epoch import MappedEpoch
from tensorpool.client.wall_clock import ClockPair, EpochClock, utc_ns
from tensorpool.errors import RegionRejected, TensorPoolError
from tensorpool.lake.offsets import SeqRange
from tensorpool.shm import AllowedBases, map_ring
from tensorpool.shm.announced import Regions
from tensorpool.shm.copies import choose_copies
from tensorpool.wire.control import Dtype, MajorOrder
from tensorpool.wire.region_uri import RegionUri

type Bytes = npt.NDArray[np.uint8]

BATCH_BYTES: Final = 8 << 20
BATCH_ROWS: Final = 4096
IDLE_S: Final = 30.0
MAX_MAPPED: Final = 64
NO_TIMESTAMP: Final = 2**64 - 1
MAX_PAYLOAD: Final = 2**31 - 64  # what a binary value of Spark holds

FRAME_FIELDS: Final = [
    pa.field("stream_id", pa.int64()),
    pa.field("epoch", pa.int64()),
    pa.field("seq", pa.int64()),
    pa.field("time", pa.timestamp("us", "UTC")),
    pa.field("timestamp_ns", pa.int64()),
    pa.field("received_ns", pa.int64()),
    pa.field("meta_version", pa.int64()),
    pa.field("trace_id", pa.int64()),
    pa.field("dtype", pa.string()),
    pa.field("shape", pa.list_(pa.int32())),
    pa.field("order", pa.string()),
    pa.field("nbytes", pa.int64()),
    pa.field("dropped_before", pa.int64()),
    pa.field("dropped_reason", pa.string()),
    pa.field("payload", pa.binary()),
]
FRAME_SCHEMA: Final = pa.schema(FRAME_FIELDS)


class RingPart(msgspec.Struct, frozen=True):
    """What a task needs to read a range: where the ring is, and which directories are trusted."""

    range: SeqRange
    regions: Regions
    bases: tuple[str, ...]
    host: str  # whose memory it is
    lost_before: int = 0  # frames lost ahead of the range
    lost_reason: str | None = None
    clock: EpochClock | None = None  # by which the frames are stamped, as far as the planner knows
    is_open: bool = False  # the range ends where the ring does when it is read, not where it did when it was planned


class Gap(msgspec.Struct, frozen=True):
    """Frames of a range that could not be read."""

    stream_id: int
    epoch: int
    lo: int
    hi: int
    reason: str


class WrongHost(TensorPoolError):
    """A task was sent to a host that does not have the stream's memory."""


@functools.cache
def this_host() -> str:
    """The name of this host and of its present run: memory is shared within it only."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}".strip()


def require_host(stream_id: int, host: str) -> None:
    """Raises WrongHost for memory of another host."""
    if host.split(" ")[1:] != this_host().split(" ")[1:]:
        raise WrongHost(
            f"the memory of stream {stream_id} is on {host.split(' ')[0]}, and this task runs on "
            f"{this_host().split(' ')[0]}; run the query on the producer's host, or bring the stream here with a bridge"
        )


# --- mappings, kept between the tasks of a worker


class _Mapped(msgspec.Struct):
    epoch: MappedEpoch
    inode: int
    used_ns: int


_mapped: OrderedDict[tuple[str, int], _Mapped] = OrderedDict()
_lock = threading.Lock()
_sweeper: threading.Thread | None = None


def mapped_epoch(regions: Regions, bases: tuple[str, ...]) -> MappedEpoch:
    """The mapping of an epoch, kept from an earlier task where it is still the same file.

    Raises RegionRejected when it is neither kept nor there any more.
    """
    now_ns = time.monotonic_ns()
    key = (regions.uris[0], regions.epoch)
    inode = _inode(RegionUri.parse(regions.uris[0]).path)
    with _lock:
        kept = _mapped.get(key)
        if kept is not None and inode in (kept.inode, 0):  # 0: it lost its name; its memory is what it was
            kept.epoch.ring.revalidate()
            kept.used_ns = now_ns
            _mapped.move_to_end(key)
            return kept.epoch
    choose_copies()
    ring = map_ring(
        regions.ring,
        regions.uris,
        AllowedBases(bases),
        stream_id=regions.stream_id,
        epoch=regions.epoch,
        layout_version=regions.layout_version,
    )
    epoch = MappedEpoch(ring)
    with _lock:
        _mapped[key] = _Mapped(epoch, inode, now_ns)
        while len(_mapped) > MAX_MAPPED:
            _mapped.popitem(last=False)
    _keep_sweeping()
    return epoch


def let_go(idle_s: float = IDLE_S) -> int:
    """Unmap what was not used for so long; how many are left."""
    oldest_ns = time.monotonic_ns() - int(idle_s * 1e9)
    with _lock:
        for key in [key for key, kept in _mapped.items() if kept.used_ns <= oldest_ns]:
            del _mapped[key]
        return len(_mapped)


def _keep_sweeping() -> None:
    """A worker that Spark leaves idle, or uses for something else, gives its mappings up too."""
    global _sweeper
    with _lock:
        if _sweeper is None or not _sweeper.is_alive():
            _sweeper = threading.Thread(target=_sweep, name="tensorpool-mappings", daemon=True)
            _sweeper.start()


def _sweep() -> None:
    global _sweeper
    while True:
        time.sleep(IDLE_S / 2)
        let_go()
        with _lock:
            if not _mapped:
                _sweeper = None
                return


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


# --- ranges to batches


class FrameReader:
    """Reads a range as Arrow batches; afterwards `gaps` says what could not be read.

    Without `inline` the payload column holds references, see `payload_of`. With `reuses` a batch lasts until the next
    one is asked for: new memory costs more than the copy into it.
    """

    def __init__(
        self, part: RingPart, *, inline: bool = True, batch_bytes: int = BATCH_BYTES, reuses: bool = False
    ) -> None:
        self._part = part
        self._inline = inline
        self._batch_bytes = batch_bytes
        self._reuses = reuses
        self.gaps: list[Gap] = []

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Raises WrongHost for memory that is not here."""
        part = self._part.range
        require_host(part.stream_id, self._part.host)
        try:
            epoch = mapped_epoch(self._part.regions, self._part.bases)
        except RegionRejected as rejected:
            self._lose(part.lo, part.hi, f"the ring is gone: {rejected.check}")
            return
        epoch.clock = self._part.clock
        reference = None if self._inline else _Reference(self._part.regions, self._part.bases, self._part.host)
        builder = Builder(epoch, self._batch_bytes, reference=reference, reuses=self._reuses)
        builder.lose(self._part.lost_before, self._part.lost_reason)
        newest = epoch.reader.newest(part.hi) if self._part.is_open else None
        yield from builder.take(part.lo, part.hi if newest is None else max(part.hi, newest + 1), self._lose)
        if builder.rows:
            yield builder.finish()

    def _lose(self, lo: int, hi: int, reason: str) -> None:
        part = self._part.range
        last = self.gaps[-1] if self.gaps else None
        if last is not None and last.hi == lo and last.reason == reason:
            self.gaps[-1] = Gap(part.stream_id, part.epoch, last.lo, hi, reason)
        else:
            self.gaps.append(Gap(part.stream_id, part.epoch, lo, hi, reason))


class Builder:
    """Columns of one batch; payloads are copied once, from shared memory into Arrow's own buffer, and verified."""

    def __init__(
        self, epoch: MappedEpoch, batch_bytes: int, *, reference: _Reference | None = None, reuses: bool = False
    ) -> None:
        self._epoch = epoch
        self._reference = None if reference is None else reference.encode()
        self._batch_bytes = batch_bytes
        self._lost = 0
        self._lost_reason: str | None = None
        self._layout: TensorLayout | None = None
        self._described: tuple[str, list[int], str] = "", [], "C"
        self._reuses = reuses
        self._buffer: Bytes = np.empty(0, np.uint8)
        self._reset()

    @property
    def rows(self) -> int:
        return len(self._seqs)

    def take(self, lo: int, hi: int, lose: Callable[[int, int, str], None]) -> Iterator[pa.RecordBatch]:
        """Add the frames of a range, and yield what was there before whenever a batch is full.

        What cannot be read is reported as `lose(lo, hi, reason)`.
        """
        reader = self._epoch.reader
        seq, margin = lo, 0
        passed: int | None = None  # the newest frame when the one before this was found to be gone
        while seq < hi:
            slot = reader.read(seq)
            if isinstance(slot, SlotFrame):
                if self._is_full(slot.values_len_bytes):
                    yield self.finish()
                reason = None if self._add(slot) else DropReason.OVERWRITTEN
            else:
                reason = slot
            if reason is None:
                seq += 1
                passed = None
                continue
            newest = reader.newest(seq) or 0
            if passed is not None and newest > passed:
                # The oldest frame is the next to be overwritten: a reader that was too late twice keeps a distance.
                margin = min(max(1, 2 * margin), reader.nslots // 4)
            passed = newest
            after = min(hi, max(seq + 1, newest + 1 - reader.nslots + margin))
            lose(seq, after, reason.name)
            self.lose(after - seq, reason.name)
            seq = after

    def lose(self, frames: int, reason: str | None) -> None:
        """Have the next row say that frames before it were dropped, and why."""
        if frames:
            self._lost += frames
            known = self._lost_reason
            self._lost_reason = reason if known is None or reason is None or reason in known else f"{known},{reason}"

    def swap(self, memory: Bytes) -> Bytes:
        """Go on with other memory; the memory of the batch that was finished last."""
        memory, self._buffer = self._buffer, memory
        return memory

    def _is_full(self, more_bytes: int) -> bool:
        return self.rows > 0 and (self.rows >= BATCH_ROWS or self._filled + more_bytes > self._batch_bytes)

    def _add(self, slot: SlotFrame) -> bool:
        """False: it was overwritten before it was copied."""
        size = slot.values_len_bytes
        if self._reference is not None:
            self._references.append(_unlike(self._reference, size))
        elif size:
            if not self._copy(slot, size):
                return False
            self._filled += size
        if slot.layout is not self._layout:
            self._describe(slot.layout)
        dtype, shape, order = self._described
        stamp = slot.timestamp_ns
        self._seqs.append(slot.seq)
        self._stamps.append(stamp if 0 < stamp < 2**63 else None)
        self._received.append(time.monotonic_ns())
        self._versions.append(slot.meta_version)
        self._traces.append(slot.trace_id if 0 < slot.trace_id < 2**63 else None)
        self._dtypes.append(dtype)
        self._shapes.append(shape)
        self._orders.append(order)
        self._sizes.append(size)
        self._drops.append(self._lost)
        self._reasons.append(self._lost_reason)
        self._offsets.append(self._filled)
        self._lost, self._lost_reason = 0, None
        return True

    def finish(self) -> pa.RecordBatch:
        rows = self.rows
        if self._reference is None:
            offsets = pa.py_buffer(np.asarray(self._offsets, np.int32))
            payload = pa.BinaryArray.from_buffers(pa.binary(), rows, [None, offsets, pa.py_buffer(self._buffer)])
        else:
            payload = pa.array(self._references, pa.binary())
        columns = [
            pa.array(np.full(rows, self._epoch.stream_id, np.int64)),
            pa.array(np.full(rows, self._epoch.epoch, np.int64)),
            pa.array(self._seqs, pa.int64()),
            pa.array(self._times(), pa.timestamp("us", "UTC")),
            pa.array(self._stamps, pa.int64()),
            pa.array(self._received, pa.int64()),
            pa.array(self._versions, pa.int64()),
            pa.array(self._traces, pa.int64()),
            pa.array(self._dtypes, pa.string()),
            pa.array(self._shapes, pa.list_(pa.int32())),
            pa.array(self._orders, pa.string()),
            pa.array(self._sizes, pa.int64()),
            pa.array(self._drops, pa.int64()),
            pa.array(self._reasons, pa.string()),
            payload,
        ]
        self._reset()
        return pa.RecordBatch.from_arrays(columns, schema=FRAME_SCHEMA)

    def _times(self) -> list[int | None]:
        """UTC in microseconds, as `Frame.time`."""
        clock, now = self._epoch.clock, ClockPair(time.monotonic_ns(), time.time_ns())
        utc = (None if stamp is None else utc_ns(stamp, clock, now) for stamp in self._stamps)
        return [None if at_ns is None else at_ns // 1000 for at_ns in utc]

    def _copy(self, slot: SlotFrame, size: int) -> bool:
        if size > MAX_PAYLOAD:
            raise TensorPoolError(
                f"frame {slot.seq} of stream {self._epoch.stream_id} has {size} bytes, more than a value of Spark "
                "holds; set option payload to reference"
            )
        if self._filled + size > len(self._buffer):
            grown = np.empty(max(self._filled + size, self._batch_bytes), np.uint8)
            grown[: self._filled] = self._buffer[: self._filled]
            self._buffer = grown
        return self._epoch.reader.copy_into(slot, self._buffer[self._filled : self._filled + size])

    def _describe(self, layout: TensorLayout) -> None:
        order = "F" if layout.major_order == MajorOrder.COLUMN else "C"
        self._layout = layout
        self._described = Dtype(layout.dtype).name, list(layout.shape), order

    def _reset(self) -> None:
        self._seqs: list[int] = []
        self._reasons: list[str | None] = []
        self._stamps: list[int | None] = []
        self._received: list[int] = []
        self._versions: list[int] = []
        self._traces: list[int | None] = []
        self._dtypes: list[str] = []
        self._shapes: list[list[int]] = []
        self._orders: list[str] = []
        self._sizes: list[int] = []
        self._drops: list[int] = []
        self._references: list[bytes] = []
        self._offsets: list[int] = [0]
        self._filled = 0
        if not self._reuses:
            self._buffer = np.empty(0, np.uint8)


# --- references: what the payload column holds instead of payloads


class _Reference(msgspec.Struct, frozen=True):
    """Where the ring of a frame is; which frame of it, the row's seq says."""

    regions: Regions
    bases: tuple[str, ...]
    host: str

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


_PAD: Final = b"\xc1"  # never used by msgpack


def _unlike(reference: bytes, nbytes: int) -> bytes:
    """References tell themselves from payloads by their length: it is never that of the frame."""
    return reference + _PAD if len(reference) == nbytes else reference


@functools.lru_cache(maxsize=MAX_MAPPED)
def _decoded(payload: bytes) -> _Reference:
    try:
        return msgspec.msgpack.decode(payload.removesuffix(_PAD), type=_Reference)
    except msgspec.DecodeError as error:
        raise TensorPoolError(
            f"a payload of {len(payload)} bytes is neither the frame's nor a reference to it ({error})"
        ) from None


class ReferencedFrame:
    """A frame in shared memory that a row refers to; `array` is a read-only view of it, as in `Frame.array`."""

    __slots__ = ("_epoch", "_slot")

    def __init__(self, epoch: MappedEpoch, slot: SlotFrame) -> None:
        self._epoch = epoch
        self._slot = slot

    @property
    def array(self) -> npt.NDArray[np.generic]:
        return self._epoch.view(self._slot)

    @property
    def nbytes(self) -> int:
        return self._slot.values_len_bytes

    def is_intact(self) -> bool:
        """Whether the bytes are still the frame's: ask after you have used them."""
        return self._epoch.reader.intact(self._slot)

    def copy_into(self, out: Bytes) -> bool:
        """True when it stayed whole."""
        return self._epoch.reader.copy_into(self._slot, out)


def referenced(payload: bytes, seq: int) -> ReferencedFrame | None:
    """The frame that a row of `payload=reference` refers to, without a copy; None when it is overwritten.

    >>> frame = referenced(row.payload, row.seq)                  # doctest: +SKIP
    >>> mean = frame.array.mean() if frame else None              # doctest: +SKIP
    >>> is_true = frame is not None and frame.is_intact()         # doctest: +SKIP

    Raises WrongHost for memory that is not here.
    """
    reference = _decoded(payload)
    require_host(reference.regions.stream_id, reference.host)
    try:
        epoch = mapped_epoch(reference.regions, reference.bases)
    except RegionRejected:
        return None
    slot = epoch.reader.read(seq)
    return ReferencedFrame(epoch, slot) if isinstance(slot, SlotFrame) else None


def payload_of(payload: bytes | None, nbytes: int, seq: int) -> bytes | None:
    """The payload of a row, whether it holds it or refers to it; None when it is overwritten by now."""
    if payload is None or len(payload) == nbytes:
        return payload
    frame = referenced(payload, seq)
    if frame is None or frame.nbytes != nbytes:
        return None
    out = np.empty(nbytes, np.uint8)
    return out.tobytes() if frame.copy_into(out) else None


def fetch_payloads(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For `mapInArrow`: rows with their payloads in place of references; null where a frame is overwritten by now.

    >>> frames.filter("nbytes > 0").mapInArrow(fetch_payloads, frames.schema)          # doctest: +SKIP
    """
    for batch in batches:
        sizes = batch.column("nbytes").to_pylist()
        lo = 0
        while lo < batch.num_rows:
            hi, total = lo + 1, sizes[lo]
            while hi < batch.num_rows and total + sizes[hi] <= BATCH_BYTES:
                total += sizes[hi]
                hi += 1
            yield _fetched(batch.slice(lo, hi - lo))
            lo = hi


def _fetched(batch: pa.RecordBatch) -> pa.RecordBatch:
    rows = zip(*(batch.column(name).to_pylist() for name in ("payload", "nbytes", "seq")), strict=True)
    payloads = pa.array([payload_of(*row) for row in rows], pa.binary())
    return batch.set_column(batch.schema.get_field_index("payload"), "payload", payloads)
