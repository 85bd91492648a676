# SPDX-License-Identifier: Apache-2.0
"""What a header ring holds right now: which slots are committed, how far back they reach, the newest frame.

What changes while it is read is left out. Wire §8.1-§8.3, §15.21.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np

from tensorpool.shm import HeaderFile
from tensorpool.wire.control import SlotHeader, TensorHeader

TRIES: Final = 8  # slots from either end, until one holds still


class FrameFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A frame as its header describes it."""

    seq: int
    timestamp_ns: int
    meta_version: int
    pool_id: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


class SlotFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The slots of a ring. A zero word is counted as never written, though frame 0 begins with it."""

    nslots: int
    committed: int
    in_progress: int
    never_written: int
    misplaced: int  # hold a seq that belongs to another slot: not written by this protocol
    oldest_seq: int | None
    newest_seq: int | None
    span_s: float | None  # between the oldest and the newest, by the producer's own clock
    rate_hz: float | None
    holds_s: float | None  # what the whole ring holds at that rate
    newest: FrameFacts | None


def read_slots(fd: int, nslots: int) -> SlotFacts:
    """Read the header ring behind `fd`, whose size was checked."""
    header = HeaderFile(fd, nslots)
    words = np.array(header.commit_words(), np.uint64)
    is_written = words != 0
    seqs = words >> np.uint64(1)
    is_placed = (seqs & np.uint64(nslots - 1)) == np.arange(len(words), dtype=np.uint64)
    is_committed = ((words & np.uint64(1)) == 1) & is_placed
    slots = np.flatnonzero(is_committed)
    by_age = slots[np.argsort(seqs[slots])]
    oldest = _first_still(header, by_age[:TRIES])
    newest = _first_still(header, by_age[::-1][:TRIES])
    span_s, rate_hz = _pace(oldest, newest)
    return SlotFacts(
        nslots=nslots,
        committed=len(slots),
        in_progress=int(np.count_nonzero(is_written & is_placed & ~is_committed)),
        never_written=int(np.count_nonzero(~is_written)),
        misplaced=int(np.count_nonzero(is_written & ~is_placed)),
        oldest_seq=int(seqs[by_age[0]]) if len(by_age) else None,
        newest_seq=int(seqs[by_age[-1]]) if len(by_age) else None,
        span_s=span_s,
        rate_hz=rate_hz,
        holds_s=nslots / rate_hz if rate_hz else None,
        newest=newest,
    )


def _first_still(header: HeaderFile, slots: Iterable[np.intp]) -> FrameFacts | None:
    """The first of these slots that can be read while it holds still."""
    for slot in slots:
        if (frame := header.frame(int(slot))) is not None:
            return _facts_of(*frame)
    return None


def _facts_of(slot: SlotHeader, tensor: TensorHeader) -> FrameFacts:
    return FrameFacts(
        seq=slot.seq_commit >> 1,
        timestamp_ns=slot.timestamp_ns,
        meta_version=slot.meta_version,
        pool_id=slot.pool_id,
        nbytes=slot.values_len_bytes,
        dtype=tensor.dtype.name,
        shape=tensor.dims[: tensor.ndims],
    )


def _pace(oldest: FrameFacts | None, newest: FrameFacts | None) -> tuple[float | None, float | None]:
    """Seconds between two frames, and frames a second; None where the producer gives no usable times."""
    if oldest is None or newest is None or oldest.timestamp_ns == 0:
        return None, None
    span_s = (newest.timestamp_ns - oldest.timestamp_ns) / 1e9
    frames = newest.seq - oldest.seq
    return (span_s, frames / span_s) if span_s > 0 and frames > 0 else (None, None)
