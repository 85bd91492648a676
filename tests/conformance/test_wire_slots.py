# SPDX-License-Identifier: Apache-2.0
"""The slot protocol: bytes in files against the ring that maps them.

Producers write through `RingWriter` and their files are read with `struct`; consumers read files that were
laid out by hand. What only concurrency shows is in tests/fault/test_torn_reads.py.
Wire §8, §9, §15.3–15.5, §15.8, §15.18, §15.21.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorpool import _core
from tensorpool._core import DropReason, Mapping, RingReader, RingWriter, SlotFrame, TensorLayout
from tensorpool.errors import LocalProtocolError
from tests.support.processes import Process
from tests.support.region_bytes import SLOT, SLOT_FIELDS, committed, packed_slot

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


# --- what a producer writes


@pytest.mark.spec("WIRE-8.2-01", "WIRE-8.2-02", "WIRE-8.2-03", "WIRE-8.2-04", "WIRE-8.2-05", "WIRE-8.2-13")
def test_a_written_slot_has_the_golden_bytes(ring: RingFiles) -> None:
    """A slot is a bare SlotHeader: seq_commit first, 192 bytes of headerBytes, no byte for maxDims."""
    assert len(GOLDEN) == SLOT.size == 256
    assert _core.MAX_DIMS == 8
    assert ring.writer().write(SEQ, tensor(), PAYLOAD, timestamp_ns=77, meta_version=1)
    assert ring.slot(SEQ) == GOLDEN == slot_bytes()
    assert struct.unpack_from("<I", GOLDEN, 60) == (192,)
    assert struct.unpack_from("<HHHH", GOLDEN, 64) == (184, 52, 900, 1)


@pytest.mark.spec("WIRE-8.1-01", "WIRE-8.1-02", "WIRE-15.18-01")
def test_slot_i_is_the_256_bytes_from_64_plus_256_i(ring: RingFiles) -> None:
    """Frame seq goes to slot seq & (nslots - 1), and nothing outside its 256 bytes changes."""
    for seq in (0, 1, 7, 8, 13, 2**32 + 6, _core.MAX_SEQ):
        index = seq & (NSLOTS - 1)
        before = os.pread(ring.header, 64 + NSLOTS * 256, 0)
        writer = ring.writer()
        assert writer.write(seq, tensor(), PAYLOAD)
        after = os.pread(ring.header, 64 + NSLOTS * 256, 0)
        begin = 64 + index * 256
        assert before[:begin] == after[:begin]
        assert before[begin + 256 :] == after[begin + 256 :]
        assert ring.word(index) == committed(seq)
    assert _core.HEADER_SLOT_BYTES == 256
    assert _core.SUPERBLOCK_BYTES == 64


# Looks at every commit word of a ring, over and over. Words whose halves do not belong together were never stored.
WATCHER = """
import mmap, sys
import numpy as np
with open(sys.argv[1], "rb") as file:
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
words = np.frombuffer(memory, np.uint64, offset=64).reshape(-1, 32)[:, 0]
torn, changes, before = set(), 0, words.copy()
while changes < 20_000:
    now = words.copy()
    changes += int((now != before).any())
    before = now
    halves = (now >> np.uint64(32)) << np.uint64(1)
    torn.update(now[halves != (now & np.uint64(0xFFFFFFFE))].tolist())
print("torn", len(torn), flush=True)
"""


@pytest.mark.spec("WIRE-8.2-10")
def test_seq_commit_is_aligned_and_never_seen_half_written(ring: RingFiles) -> None:
    """Another process finds only whole words, while both halves change with every frame; they never cross a line."""
    mapping = Mapping(ring.header, 64 + NSLOTS * 256, writable=False)
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    assert all((address + _core.SUPERBLOCK_BYTES + i * _core.HEADER_SLOT_BYTES) % 64 == 0 for i in range(NSLOTS))
    writer, layout = ring.writer(), tensor()
    said: list[str] = []
    with Process("-c", WATCHER, f"/proc/{os.getpid()}/fd/{ring.header}") as watcher:
        reading = threading.Thread(target=lambda: said.append(watcher.read_line()))
        reading.start()
        for k in itertools.count(1):
            writer.write(k << 31 | k, layout, PAYLOAD)
            if k % 1000 == 0 and not reading.is_alive():
                break
        reading.join()
    assert said == ["torn 0"]


@pytest.mark.spec("WIRE-8.2-11")
@pytest.mark.parametrize("dims", [[], [1] * 9])
def test_a_producer_cannot_declare_0_or_9_dimensions(dims: list[int]) -> None:
    """ndims is within 1..8."""
    with pytest.raises(ValueError, match="dimensions"):
        tensor(dims)


@pytest.mark.parametrize("dims", [[1], [1] * 8])
def test_a_producer_can_declare_1_to_8_dimensions(dims: list[int]) -> None:
    """1 and 8 dimensions are the bounds that are allowed."""
    assert tensor(dims).shape == tuple(dims)


@pytest.mark.spec("WIRE-8.2-07", "WIRE-8.2-15", "WIRE-8.3-05")
def test_every_field_is_rewritten_whatever_the_slot_held(ring: RingFiles) -> None:
    """Nothing of an earlier frame or of garbage stays: padding and what is past ndims are zero."""
    writer = ring.writer()
    eight = tensor([2] * 8, [128, 64, 32, 16, 8, 4, 2, 1], dtype=UINT8)
    assert writer.write(SEQ, eight, bytes(256))
    assert struct.unpack_from("<8i", ring.slot(SEQ), 83) == (2,) * 8
    assert writer.write(SEQ + NSLOTS, tensor(), PAYLOAD, timestamp_ns=77, meta_version=1)
    assert ring.slot(SEQ)[8:] == GOLDEN[8:]
    ring.put(SEQ, b"\xaa" * 248, at=8)
    assert writer.write(SEQ + 2 * NSLOTS, tensor(), PAYLOAD, timestamp_ns=77, meta_version=1)
    assert ring.slot(SEQ)[8:] == GOLDEN[8:]
    ring.put(SEQ, b"\xaa" * 248, at=8)
    writer.begin(SEQ + 3 * NSLOTS, tensor())
    writer.commit(timestamp_ns=77, meta_version=1)
    assert ring.slot(SEQ)[8:] == GOLDEN[8:]


INFERRED = [
    (FLOAT32, ROW, [2, 3], [], (12, 4)),
    (FLOAT32, COLUMN, [2, 3], [], (4, 8)),
    (UINT8, ROW, [2, 3, 4], [], (12, 4, 1)),
    (FLOAT64, COLUMN, [2, 3, 4], [], (8, 16, 48)),
    (FLOAT32, ROW, [2, 3], [0, 8], (24, 8)),
    (FLOAT32, ROW, [2, 3], [100, 0], (100, 4)),
    (FLOAT32, COLUMN, [3, 2], [0, 64], (4, 64)),
]


@pytest.mark.spec("WIRE-8.2-17")
@pytest.mark.parametrize(("dtype", "order", "dims", "strides", "effective"), INFERRED)
def test_a_stride_of_zero_is_inferred(
    ring: RingFiles, dtype: int, order: int, dims: list[int], strides: list[int], effective: tuple[int, ...]
) -> None:
    """0 stands for the contiguous stride that follows from shape, dtype and order, on both sides."""
    layout = tensor(dims, strides, dtype=dtype, order=order)
    assert layout.byte_strides == effective
    assert ring.writer().write(SEQ, layout, bytes(layout.extent_bytes))
    declared = struct.unpack_from("<8i", ring.slot(SEQ), 115)
    assert declared == (*strides, *(0,) * 8)[:8]
    read = accepted(ring.reader().read(SEQ)).layout
    assert read.byte_strides == effective
    assert read.shape == tuple(dims)


@pytest.mark.spec("WIRE-8.2-19")
@pytest.mark.parametrize(
    ("order", "dims", "strides"),
    [
        (ROW, [2, 3], [11, 4]),
        (ROW, [2, 3], [12, 3]),
        (ROW, [2, 3], [4, 4]),
        (ROW, [2, 3], [4, 8]),
        (COLUMN, [2, 3], [12, 4]),
        (COLUMN, [2, 3], [4, 7]),
        (ROW, [2, 3], [-12, 4]),
    ],
)
def test_a_producer_cannot_declare_overlap_or_the_wrong_order(order: int, dims: list[int], strides: list[int]) -> None:
    """Non-zero strides describe a layout without overlap that is consistent with major_order."""
    with pytest.raises(ValueError, match="strides"):
        tensor(dims, strides, order=order)


@pytest.mark.spec("WIRE-8.2-22")
def test_pool_stride_and_tensor_strides_are_independent(ring: RingFiles) -> None:
    """A pool of 4096-byte slots carries rows that are 100 bytes apart, inside one slot."""
    layout = tensor([3, 10], [100, 1], dtype=UINT8)
    rows = bytes(range(210))
    assert ring.writer().write(SEQ, layout, rows)
    assert ring.field(SEQ, "pool_id") == 4
    assert ring.payload(4, SEQ, 210) == rows
    frame = accepted(ring.reader().read(SEQ))
    assert frame.payload_offset == 64 + SEQ * 4096
    assert frame.layout.byte_strides == (100, 1)


@pytest.mark.spec("WIRE-8.2-23")
@pytest.mark.parametrize(
    ("dims", "strides", "order", "unit", "real"),
    [
        ([2, 3], [], ROW, ROWS, 12),
        ([2, 3], [64, 4], ROW, ROWS, 64),
        ([2, 3], [], COLUMN, COLUMNS, 8),
    ],
)
def test_a_producer_declares_the_real_progress_stride(
    ring: RingFiles, dims: list[int], strides: list[int], order: int, unit: int, real: int
) -> None:
    """With a progress unit, progress_stride_bytes is the true distance of rows or columns."""
    layout = tensor(dims, strides, order=order, unit=unit, stride=real)
    assert ring.writer().write(SEQ, layout, bytes(layout.extent_bytes))
    assert ring.field(SEQ, "progress_unit") == unit
    assert ring.field(SEQ, "progress_stride_bytes") == real
    for wrong in (0, real - 1, real + 1):
        with pytest.raises(ValueError, match="progress"):
            tensor(dims, strides, order=order, unit=unit, stride=wrong)


@pytest.mark.spec("WIRE-8.2-28")
def test_an_empty_frame_is_committed_in_its_slot(ring: RingFiles) -> None:
    """values_len_bytes 0 is legal: the slot is committed, and payload_slot is still the header's index."""
    assert ring.writer().write(SEQ, tensor([0, 3]), b"")
    assert ring.word(SEQ) == committed(SEQ)
    assert ring.field(SEQ, "values_len_bytes") == 0
    assert ring.field(SEQ, "payload_slot") == SEQ
    assert ring.field(SEQ, "pool_id") == 1
    assert accepted(ring.reader().read(SEQ)).values_len_bytes == 0


@pytest.mark.spec("WIRE-8.3-01", "WIRE-8.3-03", "WIRE-15.21-01")
@pytest.mark.parametrize("held", [None, SEQ], ids=["never-written", "committed"])
def test_a_write_begins_with_the_in_progress_word_alone(ring: RingFiles, held: int | None) -> None:
    """From an empty or a committed slot, the first thing that changes is seq_commit, to seq << 1."""
    writer = ring.writer()
    if held is not None:
        writer.write(held, tensor(), PAYLOAD, timestamp_ns=77, meta_version=1)
    header, payload = ring.slot(SEQ), ring.payload(1, SEQ, 64)
    seq = SEQ + NSLOTS
    writer.begin(seq, tensor())
    assert ring.word(SEQ) == seq << 1
    assert ring.word(SEQ) & 1 == 0
    assert ring.word(SEQ) >> 1 == seq
    assert ring.slot(SEQ)[8:] == header[8:]
    assert ring.payload(1, SEQ, 64) == payload
    assert ring.reader().read(seq) is DropReason.NOT_COMMITTED
    writer.commit()
    assert ring.word(SEQ) == seq << 1 | 1


@pytest.mark.spec("WIRE-15.21-02")
def test_a_slot_is_committed_only_with_its_header_and_payload(ring: RingFiles) -> None:
    """S1 to S2 is the commit of an open claim: never without one, never after it was abandoned."""
    writer, reader = ring.writer(), ring.reader()
    with pytest.raises(LocalProtocolError, match="no claim"):
        writer.commit()
    begun = writer.begin(SEQ, tensor())
    assert begun is not None
    mapping, offset = begun
    memoryview(mapping)[offset : offset + 24] = PAYLOAD
    assert reader.read(SEQ) is DropReason.NOT_COMMITTED
    writer.abandon()
    assert reader.read(SEQ) is DropReason.NOT_COMMITTED
    with pytest.raises(LocalProtocolError, match="no claim"):
        writer.commit()
    mapping, offset = writer.begin(SEQ, tensor()) or pytest.fail("no pool")
    memoryview(mapping)[offset : offset + 24] = PAYLOAD
    writer.commit(timestamp_ns=77, meta_version=1)
    assert ring.slot(SEQ) == GOLDEN
    assert ring.payload(1, SEQ, 24) == PAYLOAD


@pytest.mark.spec("WIRE-8.3-02")
def test_the_logical_sequence_never_goes_back(ring: RingFiles) -> None:
    """A producer's seq is monotonic: what is not above the last one is refused before anything is written."""
    writer = ring.writer()
    assert writer.write(SEQ, tensor(), PAYLOAD)
    before = os.pread(ring.header, 64 + NSLOTS * 256, 0)
    for seq in (0, SEQ - 1, SEQ):
        with pytest.raises(ValueError, match="goes back"):
            writer.write(seq, tensor(), PAYLOAD)
        with pytest.raises(ValueError, match="goes back"):
            writer.begin(seq, tensor())
    with pytest.raises(ValueError, match="exceeds"):
        writer.write(2**63, tensor(), PAYLOAD)
    assert os.pread(ring.header, 64 + NSLOTS * 256, 0) == before
    assert writer.next_seq == SEQ + 1


# --- pools


@pytest.mark.spec("WIRE-9-01", "WIRE-9-06", "WIRE-9-07")
@pytest.mark.parametrize(("size", "pool_id"), [(64, 1), (65, 4)])
@pytest.mark.parametrize("seq", [0, 5, 7, 13])
def test_payloads_are_in_the_same_slot_of_the_chosen_pool(ring: RingFiles, size: int, pool_id: int, seq: int) -> None:
    """The payload starts at 64 + slot * stride_bytes of the pool that pool_id names."""
    data = bytes((seq + i) & 0xFF for i in range(size))
    other = 5 - pool_id
    assert ring.writer().write(seq, tensor([size], dtype=UINT8), data)
    index = seq & (NSLOTS - 1)
    assert ring.field(index, "payload_slot") == index
    assert ring.field(index, "pool_id") == pool_id
    assert ring.field(index, "values_len_bytes") == size
    assert ring.payload(pool_id, index, size) == data
    assert not any(ring.payload(other, 0, NSLOTS * POOLS[other]))
    frame = accepted(ring.reader().read(seq))
    assert frame.payload_offset == 64 + index * POOLS[pool_id]


@pytest.mark.spec("WIRE-9-02", "WIRE-9-03")
def test_the_smallest_pool_that_holds_the_frame_is_chosen(tmp_path: Path) -> None:
    """Of several size classes the smallest that fits: stride does, stride + 1 goes to the next."""
    ring = RingFiles(tmp_path, pools={9: 256, 7: 4096, 4: 64, 2: 64})
    writer = ring.writer()
    rows = [(0, 2), (1, 2), (63, 2), (64, 2), (65, 9), (255, 9), (256, 9), (257, 7), (4095, 7), (4096, 7)]
    for seq, (size, pool_id) in enumerate(rows):
        assert writer.write(seq, tensor([size], dtype=UINT8), bytes(size))
        assert ring.field(seq & (NSLOTS - 1), "pool_id") == pool_id, size
    ring.close()


@pytest.mark.spec("WIRE-9-04", "WIRE-9-05")
def test_an_oversize_frame_is_dropped_at_once_and_counted(ring: RingFiles) -> None:
    """A frame above every stride is dropped without blocking, without a trace in the ring, and counted."""
    writer = ring.writer()
    writer.write(SEQ, tensor(), PAYLOAD, timestamp_ns=77, meta_version=1)
    layout = tensor([4097], dtype=UINT8)
    start = time.monotonic()
    assert writer.write(SEQ + NSLOTS, layout, bytes(4097)) is False
    assert writer.begin(SEQ + NSLOTS, layout) is None
    assert time.monotonic() - start < 1
    assert writer.no_pool_drops == 2
    assert ring.slot(SEQ) == GOLDEN
    assert not writer.is_claimed
    assert writer.write(SEQ + NSLOTS, tensor(), PAYLOAD)


def test_regions_that_cannot_hold_the_slots_are_refused(ring: RingFiles) -> None:
    """Every region must hold the header ring's number of slots; one byte less is refused."""
    header, pools, _ = ring._map(writable=False)
    with pytest.raises(ValueError, match="needs"):
        RingReader(header, pools, NSLOTS * 2)
    short = Mapping(ring.files[1], 64 + NSLOTS * 64 - 1, writable=False)
    with pytest.raises(ValueError, match="needs"):
        RingReader(header, [(1, 64, short)], NSLOTS)
    for nslots in (0, 3, 6):
        with pytest.raises(ValueError, match="power of two"):
            RingReader(header, pools, nslots)
    for stride in (0, 32, 192):
        with pytest.raises(ValueError, match="power of two"):
            RingReader(header, [(1, stride, pools[0][2])], 1)


# --- overwriting


@pytest.mark.spec("WIRE-15.4-01", "WIRE-15.4-02")
def test_a_stalled_consumer_does_not_hold_the_producer_back(ring: RingFiles) -> None:
    """Slots are overwritten under a consumer that still looks at them, which learns it afterwards."""
    writer, reader = ring.writer(), ring.reader()
    writer.write(0, tensor(), PAYLOAD)
    stalled = accepted(reader.read(0))
    view = memoryview(reader.pools[stalled.pool][2])
    for seq in range(1, 10_000):
        assert writer.write(seq, tensor(), PAYLOAD)
    assert not reader.intact(stalled)
    assert not reader.copy_into(stalled, bytearray(24))
    assert reader.newest() == 9_999
    assert view.readonly


# --- what a consumer accepts

FORGED = [
    pytest.param("BAD_NDIMS", {"ndims": 0}, marks=pytest.mark.spec("WIRE-8.2-12")),
    pytest.param("BAD_NDIMS", {"ndims": 9}, marks=pytest.mark.spec("WIRE-8.2-12")),
    pytest.param("BAD_NDIMS", {"ndims": 255}, marks=pytest.mark.spec("WIRE-8.2-12")),
    pytest.param("BAD_PAYLOAD_OFFSET", {"payload_offset": 1}, marks=pytest.mark.spec("WIRE-8.2-14")),
    pytest.param("BAD_PAYLOAD_OFFSET", {"payload_offset": 1 << 24}, marks=pytest.mark.spec("WIRE-8.2-14")),
    pytest.param("BAD_STRIDES", {"strides": (-12, 4)}, marks=pytest.mark.spec("WIRE-8.2-18")),
    pytest.param("BAD_STRIDES", {"strides": (0, -4)}, marks=pytest.mark.spec("WIRE-8.2-18")),
    pytest.param("BAD_STRIDES", {"strides": (8, 4)}, marks=pytest.mark.spec("WIRE-8.2-20")),
    pytest.param("BAD_STRIDES", {"strides": (4, 4)}, marks=pytest.mark.spec("WIRE-8.2-20")),
    pytest.param("BAD_STRIDES", {"strides": (0, 2)}, marks=pytest.mark.spec("WIRE-8.2-20")),
    pytest.param("BAD_STRIDES", {"strides": (4, 8)}, marks=pytest.mark.spec("WIRE-8.2-21")),
    pytest.param("BAD_STRIDES", {"major_order": COLUMN, "strides": (12, 4)}, marks=pytest.mark.spec("WIRE-8.2-21")),
    pytest.param("BAD_PROGRESS", {"progress_unit": ROWS}, marks=pytest.mark.spec("WIRE-8.2-24")),
    pytest.param("BAD_PROGRESS", {"progress_unit": COLUMNS}, marks=pytest.mark.spec("WIRE-8.2-24")),
    pytest.param(
        "BAD_PROGRESS",
        {"progress_unit": ROWS, "progress_stride_bytes": 13},
        marks=pytest.mark.spec("WIRE-8.2-25"),
    ),
    pytest.param(
        "BAD_PROGRESS",
        {"progress_unit": COLUMNS, "progress_stride_bytes": 12},
        marks=pytest.mark.spec("WIRE-8.2-25"),
    ),
    pytest.param(
        "BAD_PROGRESS",
        {"progress_unit": COLUMNS, "progress_stride_bytes": 4, "ndims": 1, "dims": (6,)},
        marks=pytest.mark.spec("WIRE-8.2-25"),
    ),
    pytest.param("BAD_EMBEDDED_HEADER", {"header_length": 191}, marks=pytest.mark.spec("WIRE-8.3-10")),
    pytest.param("BAD_EMBEDDED_HEADER", {"header_length": 193}, marks=pytest.mark.spec("WIRE-8.3-10")),
    pytest.param("BAD_EMBEDDED_HEADER", {"block_length": 183}, marks=pytest.mark.spec("WIRE-8.3-10")),
    pytest.param("BAD_EMBEDDED_HEADER", {"template_id": 51}, marks=pytest.mark.spec("WIRE-8.3-11")),
    pytest.param("BAD_EMBEDDED_HEADER", {"schema_id": 901}, marks=pytest.mark.spec("WIRE-8.3-12")),
    pytest.param("BAD_EMBEDDED_HEADER", {"version": 0}, marks=pytest.mark.spec("WIRE-8.3-13")),
    pytest.param("BAD_EMBEDDED_HEADER", {"version": 2}, marks=pytest.mark.spec("WIRE-8.3-13")),
    pytest.param("BAD_DTYPE", {"dtype": 12}, marks=pytest.mark.spec("WIRE-15.8-01")),
    pytest.param("BAD_DTYPE", {"dtype": 99}, marks=pytest.mark.spec("WIRE-15.8-01")),
    pytest.param("BAD_DTYPE", {"dtype": -1}, marks=pytest.mark.spec("WIRE-15.8-01")),
    pytest.param("BAD_MAJOR_ORDER", {"major_order": 3}, marks=pytest.mark.spec("WIRE-15.8-02")),
    pytest.param("BAD_PROGRESS", {"progress_unit": 3}, marks=pytest.mark.spec("WIRE-15.8-03")),
    # decisions B11-B16: no clause of their own
    pytest.param("BAD_DTYPE", {"dtype": 0}),
    pytest.param("BAD_MAJOR_ORDER", {"major_order": 0}),
    pytest.param("BAD_DIMS", {"dims": (2, -3)}),
    pytest.param("BAD_DIMS", {"dims": (2**31 - 1, 2**31 - 1)}),
    pytest.param("BAD_DIMS", {"dtype": BIT, "ndims": 3, "dims": (2**30, 2**17, 2**17)}),
    pytest.param("BAD_STRIDES", {"dtype": BIT, "strides": (1, 0)}),
    pytest.param("BAD_LENGTH", {"dims": (0, 3)}),
    pytest.param("BAD_LENGTH", {"dims": (2, 4)}),
    pytest.param("BAD_LENGTH", {"values_len_bytes": 23}),
    pytest.param("BAD_LENGTH", {"values_len_bytes": 65}),
    pytest.param("BAD_POOL", {"pool_id": 2}),
    pytest.param("BAD_PAYLOAD_SLOT", {"payload_slot": 4}),
    pytest.param("BAD_PAYLOAD_SLOT", {"payload_slot": SEQ + NSLOTS}),
]


@pytest.mark.parametrize(("reason", "changed"), FORGED)
@pytest.mark.parametrize("remembers", [False, True], ids=["first", "after-a-good-frame"])
def test_a_header_that_no_producer_writes_is_dropped(
    ring: RingFiles, reason: str, changed: dict[str, Any], remembers: bool
) -> None:
    """One wrong field is enough: the frame is dropped, with its reason, and the next good one is accepted."""
    reader = ring.reader()
    if remembers:
        ring.put(SEQ, GOLDEN)
        accepted(reader.read(SEQ))
    ring.put(SEQ, slot_bytes(**changed))
    assert reader.read(SEQ) is DropReason[reason]
    assert reader.drops == {DropReason[reason]: 1}
    assert not _core.is_late(DropReason[reason])
    ring.put(SEQ, GOLDEN)
    accepted(reader.read(SEQ))


HARMLESS = [
    pytest.param(
        {"pad": b"\xaa" * 26, "pad_align": 0xAA, "tail": b"\xaa" * 109}, marks=pytest.mark.spec("WIRE-8.2-06")
    ),
    pytest.param(
        {"dims": (2, 3, -1, 7, 0, 2**31 - 1, 9, 9), "strides": (0, 0, -4, 1, 2, 3, 4, -(2**31))},
        marks=pytest.mark.spec("WIRE-8.2-16"),
    ),
    pytest.param({"progress_stride_bytes": 999}),
    pytest.param({"values_len_bytes": 64}),
    pytest.param({"timestamp_ns": 2**64 - 1, "meta_version": 2**32 - 1}),
]


@pytest.mark.parametrize("changed", HARMLESS)
def test_what_must_be_ignored_does_not_decide(ring: RingFiles, changed: dict[str, Any]) -> None:
    """Padding, dims and strides past ndims, and an unused progress stride are ignored."""
    ring.put(SEQ, slot_bytes(**changed))
    frame = accepted(ring.reader().read(SEQ))
    assert frame.layout.shape == (2, 3)
    assert frame.layout.byte_strides == (12, 4)
    assert frame.layout.extent_bytes == 24


def test_a_forged_slot_differs_from_the_golden_one_only_as_meant(ring: RingFiles) -> None:
    """The golden slot itself is accepted with every value that was written into it."""
    ring.put(SEQ, GOLDEN)
    os.pwrite(ring.files[1], PAYLOAD, 64 + SEQ * 64)
    reader = ring.reader()
    frame = accepted(reader.read(SEQ))
    assert (frame.seq, frame.slot, frame.timestamp_ns, frame.meta_version) == (SEQ, SEQ, 77, 1)
    assert (frame.layout.dtype, frame.layout.major_order) == (FLOAT32, ROW)
    out = bytearray(frame.values_len_bytes)
    assert reader.copy_into(frame, out)
    assert out == PAYLOAD


@pytest.mark.spec("WIRE-8.2-27")
def test_no_payload_byte_is_read_for_an_empty_frame(ring: RingFiles) -> None:
    """With values_len_bytes 0 the payload is not touched: its pages are gone, reading would be fatal."""
    reader = ring.reader()
    for pool_id, fd in ring.files.items():
        os.truncate(fd, 0)
        assert os.fstat(fd).st_size == 0, pool_id
    for changed in ({"dims": (0, 3)}, {"pool_id": 999}, {"dims": (2**20, 3)}):
        ring.put(SEQ, slot_bytes(values_len_bytes=0, **changed))
        frame = accepted(reader.read(SEQ))
        assert frame.values_len_bytes == 0
        assert reader.copy_into(frame, bytearray())
        assert reader.intact(frame)


@pytest.mark.spec("WIRE-8.3-08", "WIRE-8.3-14", "WIRE-15.3-01")
@pytest.mark.parametrize(
    ("word", "wanted", "reason"),
    [
        (committed(5), 5, None),
        (committed(13), 13, None),
        (5 << 1, 5, "NOT_COMMITTED"),
        (13 << 1, 13, "NOT_COMMITTED"),
        (0, 0, "NOT_COMMITTED"),
        (0, 5, "STALE"),
        (committed(5), 13, "STALE"),
        (5 << 1, 13, "STALE"),
        (committed(4), 5, "STALE"),
        (committed(13), 5, "OVERWRITTEN"),
        (13 << 1, 5, "OVERWRITTEN"),
        (committed(6), 5, "OVERWRITTEN"),
        (2**64 - 1, 5, "OVERWRITTEN"),
        (2**64 - 1, 2**63 + 5, "STALE"),
    ],
)
def test_only_the_committed_word_of_the_wanted_seq_is_accepted(
    ring: RingFiles, word: int, wanted: int, reason: str | None
) -> None:
    """LSB 1 and the wanted sequence: anything else is skipped, as late, and a lower sequence is stale."""
    index = wanted & (NSLOTS - 1)
    ring.put(index, slot_bytes(seq_commit=word, payload_slot=index))
    reader = ring.reader()
    result = reader.read(wanted)
    if reason is None:
        assert accepted(result).seq == wanted
        assert reader.accepted == 1
    else:
        assert result is DropReason[reason]
        assert _core.is_late(DropReason[reason])
        assert reader.drops == {DropReason[reason]: 1}


@pytest.mark.spec("WIRE-15.3-01")
def test_a_slot_that_went_back_is_stale(ring: RingFiles) -> None:
    """A lower logical sequence in a slot that already held a higher one is skipped."""
    reader = ring.reader()
    ring.put(SEQ, slot_bytes(seq_commit=committed(SEQ + NSLOTS)))
    accepted(reader.read(SEQ + NSLOTS))
    ring.put(SEQ, slot_bytes(seq_commit=committed(SEQ)))
    assert reader.read(SEQ + NSLOTS) is DropReason.STALE


@pytest.mark.spec("WIRE-15.21-03")
def test_a_consumer_never_waits_for_a_commit(ring: RingFiles) -> None:
    """Ten thousand reads of a slot that stays in progress take no time and no more than a drop each."""
    ring.writer().begin(SEQ, tensor())
    reader = ring.reader()
    start = time.thread_time()
    for _ in range(10_000):
        assert reader.read(SEQ) is DropReason.NOT_COMMITTED
    assert time.thread_time() - start < 2
    assert reader.drops == {DropReason.NOT_COMMITTED: 10_000}


@pytest.mark.spec("WIRE-15.21-04")
def test_drops_are_results_and_not_errors(ring: RingFiles) -> None:
    """Every drop is a value that says why, and is counted; nothing is raised, whatever the slot holds."""
    reader = ring.reader()
    results = []
    for fill in (b"\x00", b"\xff", b"\xaa", b"\x01"):
        ring.put(SEQ, fill * 256)
        results.append(reader.read(SEQ))
        ring.put(SEQ, struct.pack("<Q", committed(SEQ)))
        results.append(reader.read(SEQ))
    assert all(isinstance(result, DropReason) for result in results)
    assert sum(reader.drops.values()) == len(results)
    assert reader.accepted == 0
