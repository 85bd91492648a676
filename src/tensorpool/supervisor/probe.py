# SPDX-License-Identifier: Apache-2.0
"""Reads a stream's header ring: whether it is refreshed, its newest seq, and the shape of the newest frame.

Opens the announced file as a consumer would, with every check of path containment, reads a few hundred bytes and closes
it: nothing is mapped and no lease is taken. It gives the rate of producers that report nothing.
Wire §7.1, §8.3, §15.14, §15.21a.5; decisions C8, C9.
"""

from __future__ import annotations

import os
from typing import Final

from tensorpool._core import SUPERBLOCK_BYTES
from tensorpool.errors import RegionRejected, TensorPoolError
from tensorpool.shm.containment import AllowedBases, open_region
from tensorpool.shm.headers import HeaderFile
from tensorpool.shm.layout import RegionSpec, RingSpec, parse_superblock
from tensorpool.supervisor.view import ProbeResult
from tensorpool.wire.control import ClockDomain, ShmPoolAnnounce
from tensorpool.wire.region_uri import RegionUri

MAX_SCANNED_SLOTS: Final = 16_384  # 4 MiB: larger rings are searched from a known seq


def probe(
    announce: ShmPoolAnnounce, known_seq: int | None, bases: AllowedBases, *, now_ns: int, wall_ns: int
) -> ProbeResult:
    """Read once. Whatever is found there is reported as a fault, never raised."""
    spec = RingSpec.announced(announce.header_nslots, announce.header_slot_bytes, announce.payload_pools)
    try:
        ring = spec.regions(announce.stream_id, announce.epoch, announce.layout_version)[0]
        fd = open_region(RegionUri.parse(announce.header_region_uri), bases, ring.size_bytes)
    except RegionRejected as rejected:
        return ProbeResult(
            stream_id=announce.stream_id, epoch=announce.epoch, fault=f"{rejected.check}: {rejected.detail}"
        )
    except TensorPoolError as error:
        return ProbeResult(stream_id=announce.stream_id, epoch=announce.epoch, fault=str(error))
    try:
        return _read(fd, announce, ring, known_seq, now_ns, wall_ns)
    except OSError as error:
        return ProbeResult(stream_id=announce.stream_id, epoch=announce.epoch, fault=error.strerror or str(error))
    finally:
        os.close(fd)


def _read(
    fd: int, announce: ShmPoolAnnounce, ring: RegionSpec, known_seq: int | None, now_ns: int, wall_ns: int
) -> ProbeResult:
    data = os.pread(fd, SUPERBLOCK_BYTES, 0)
    fault = ring.mismatch(data)
    superblock = parse_superblock(data)
    if fault is not None or superblock is None:
        return ProbeResult(stream_id=announce.stream_id, epoch=announce.epoch, fault=f"superblock: {fault}")
    clock_ns = now_ns if announce.announce_clock_domain is ClockDomain.MONOTONIC else wall_ns
    age_ns = clock_ns - superblock.activity_timestamp_ns
    header = HeaderFile(fd, ring.nslots)
    seq = _newest(header, known_seq)
    slot, tensor = (None if seq is None else header.frame(seq)) or (None, None)
    return ProbeResult(
        stream_id=announce.stream_id,
        epoch=announce.epoch,
        activity_age_ns=max(0, age_ns) if age_ns > -1_000_000_000 else None,  # stamped since we read the clock
        seq=seq,
        frame_bytes=None if slot is None else slot.values_len_bytes,
        dtype=None if tensor is None else tensor.dtype.name.lower(),
        shape=None if tensor is None else tensor.dims[: tensor.ndims],
    )


def _newest(header: HeaderFile, known_seq: int | None) -> int | None:
    """The newest committed seq, as of about now."""
    found = header.newest_since(known_seq) if known_seq else None
    if found is not None:
        return found
    return header.newest() if header.nslots <= MAX_SCANNED_SLOTS else None
