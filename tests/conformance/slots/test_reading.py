# SPDX-License-Identifier: Apache-2.0
"""Which slots a consumer accepts, from files that were laid out by hand.

tests/fault/test_torn_reads.py has what only concurrency shows. Wire §8, §9, §15.3, §15.4, §15.18, §15.21.
"""

from __future__ import annotations

import os
import struct
import time
from typing import Any

import pytest

from tensorpool import _core
from tensorpool._core import DropReason
from tests.conformance.slots.conftest import (
    BIT,
    COLUMN,
    COLUMNS,
    FLOAT32,
    GOLDEN,
    NSLOTS,
    PAYLOAD,
    ROW,
    ROWS,
    SEQ,
    RingFiles,
    accepted,
    slot_bytes,
    tensor,
)
from tests.support.region_bytes import committed

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
    assert frame.trace_id == 0


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
