# SPDX-License-Identifier: Apache-2.0
"""A look into a stream's header ring: is it refreshed, how far is it, what does the newest frame look like?

Opens the announced file as a consumer would, with every check of path containment, reads a few hundred bytes and closes
it: nothing is mapped, no lease is taken, nobody notices. It tells the rate of producers that report nothing.
Wire §7.1, §8.3, §15.14, §15.21a.5; decisions C8, C9.
"""

from __future__ import annotations

import os
import struct
from typing import Final

from tensorpool._core import SLOT_BYTES, SUPERBLOCK_BYTES
from tensorpool.errors import DecodeError, RegionRejected, TensorPoolError
from tensorpool.shm.containment import AllowedBases, open_region
from tensorpool.shm.layout import RegionSpec, RingSpec, parse_superblock
from tensorpool.supervisor.view import Look
from tensorpool.wire import control
from tensorpool.wire.control import ClockDomain, ShmPoolAnnounce, SlotHeader, TensorHeader
from tensorpool.wire.region_uri import RegionUri

MAX_SCANNED_SLOTS: Final = 16_384  # 4 MiB: larger rings are searched from a seq that is known
_WORD: Final = struct.Struct("<Q")


def look(announce: ShmPoolAnnounce, known_seq: int | None, bases: AllowedBases, *, now_ns: int, wall_ns: int) -> Look:
    """Look once. Never raises for what is found there: a fault is told."""
    spec = RingSpec.announced(announce.header_nslots, announce.header_slot_bytes, announce.payload_pools)
    try:
        ring = spec.regions(announce.stream_id, announce.epoch, announce.layout_version)[0]
        fd = open_region(RegionUri.parse(announce.header_region_uri), bases, ring.size_bytes)
    except RegionRejected as rejected:
        return Look(stream_id=announce.stream_id, epoch=announce.epoch, fault=f"{rejected.check}: {rejected.detail}")
    except TensorPoolError as error:
        return Look(stream_id=announce.stream_id, epoch=announce.epoch, fault=str(error))
    try:
        return _read(fd, announce, ring, known_seq, now_ns, wall_ns)
    except OSError as error:
        return Look(stream_id=announce.stream_id, epoch=announce.epoch, fault=error.strerror or str(error))
    finally:
        os.close(fd)


def _read(
    fd: int, announce: ShmPoolAnnounce, ring: RegionSpec, known_seq: int | None, now_ns: int, wall_ns: int
) -> Look:
    data = os.pread(fd, SUPERBLOCK_BYTES, 0)
    fault = ring.mismatch(data)
    superblock = parse_superblock(data)
    if fault is not None or superblock is None:
        return Look(stream_id=announce.stream_id, epoch=announce.epoch, fault=f"superblock: {fault}")
    clock_ns = now_ns if announce.announce_clock_domain is ClockDomain.MONOTONIC else wall_ns
    age_ns = clock_ns - superblock.activity_timestamp_ns
    seq = _newest(fd, ring.nslots, known_seq)
    slot = None if seq is None else _slot(fd, ring.nslots, seq)
    tensor = None if slot is None else _tensor(slot)
    return Look(
        stream_id=announce.stream_id,
        epoch=announce.epoch,
        activity_age_ns=max(0, age_ns) if age_ns > -1_000_000_000 else None,  # stamped since we read the clock
        seq=seq,
        frame_bytes=None if slot is None else slot.values_len_bytes,
        dtype=None if tensor is None else tensor.dtype.name.lower(),
        shape=None if tensor is None else tensor.dims[: tensor.ndims],
    )


def _newest(fd: int, nslots: int, known_seq: int | None) -> int | None:
    """The newest committed seq, as of about now."""
    if known_seq:
        found = _search(fd, nslots, known_seq)
        if found is not None:
            return found
    return _scan(fd, nslots) if nslots <= MAX_SCANNED_SLOTS else None


def _search(fd: int, nslots: int, known_seq: int) -> int | None:
    """From a seq that was there: whatever its slot holds now, all later ones are within one lap of it."""
    word = _word(fd, nslots, known_seq)
    first = word >> 1
    if not word & 1 or first & (nslots - 1) != known_seq & (nslots - 1):
        return None
    low, high = 0, nslots - 1  # first + low is committed
    while low < high:
        middle = (low + high + 1) // 2
        word = _word(fd, nslots, first + middle)
        if word & 1 and word >> 1 >= first + middle:
            low = middle
        else:
            high = middle - 1
    return first + low


def _scan(fd: int, nslots: int) -> int | None:
    data = os.pread(fd, nslots * SLOT_BYTES, SUPERBLOCK_BYTES)
    words = (_WORD.unpack_from(data, offset)[0] for offset in range(0, len(data) - 7, SLOT_BYTES))
    return max((word >> 1 for word in words if word & 1), default=None)


def _word(fd: int, nslots: int, seq: int) -> int:
    data = os.pread(fd, _WORD.size, SUPERBLOCK_BYTES + (seq & (nslots - 1)) * SLOT_BYTES)
    return int.from_bytes(data, "little")


def _slot(fd: int, nslots: int, seq: int) -> SlotHeader | None:
    """The slot of `seq`, whole: read twice, the same both times."""
    offset = SUPERBLOCK_BYTES + (seq & (nslots - 1)) * SLOT_BYTES
    data = os.pread(fd, SLOT_BYTES, offset)
    if data != os.pread(fd, SLOT_BYTES, offset) or not data[0] & 1:
        return None
    try:
        return SlotHeader.decode_body(data)
    except DecodeError:
        return None


def _tensor(slot: SlotHeader) -> TensorHeader | None:
    try:
        message = control.schema.decode(slot.header_bytes)
    except DecodeError:
        return None
    return message if isinstance(message, TensorHeader) else None
