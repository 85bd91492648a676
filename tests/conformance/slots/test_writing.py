# SPDX-License-Identifier: Apache-2.0
"""The bytes that a producer writes into slots and pools.

Producers write through `RingWriter`; their files are read with `struct`. Wire §8, §9, §15.3, §15.5, §15.8, §15.21.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tensorpool import _core
from tensorpool._core import DropReason, Mapping, RingReader
from tensorpool.errors import LocalProtocolError
from tests.conformance.slots.conftest import (
    COLUMN,
    COLUMNS,
    FLOAT32,
    FLOAT64,
    GOLDEN,
    NSLOTS,
    PAYLOAD,
    POOLS,
    ROW,
    ROWS,
    SEQ,
    UINT8,
    RingFiles,
    accepted,
    slot_bytes,
    tensor,
)
from tests.support.processes import Process
from tests.support.region_bytes import SLOT, committed

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
    for stride in (0, 32, 96):
        with pytest.raises(ValueError, match="a multiple of 64"):
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
