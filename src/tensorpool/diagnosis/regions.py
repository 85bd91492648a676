# SPDX-License-Identifier: Apache-2.0
"""The files of an epoch as they lie there: whose they are, what their superblocks say, whether that was announced.

Opened read-only after every check of path containment, and read, never mapped. Wire §7.1, §15.1, §15.21a.5, §15.22.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec

from tensorpool._core import SUPERBLOCK_BYTES
from tensorpool.errors import RegionRejected
from tensorpool.file_access import group_name, user_name
from tensorpool.shm.containment import AllowedBases, Check, open_region
from tensorpool.shm.layout import RegionSpec, parse_superblock
from tensorpool.shm.leftovers import BLOCK_BYTES
from tensorpool.shm.liveness import activity_age_ns, is_owner_alive
from tensorpool.wire.control import RegionType, ShmRegionSuperblock
from tensorpool.wire.region_uri import RegionUri


class FileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Whose a file is, and what it takes."""

    owner: str
    group: str
    mode: str
    size_bytes: int
    memory_bytes: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileFacts:
        return cls(
            owner=user_name(found.st_uid),
            group=group_name(found.st_gid),
            mode=f"{stat.S_IMODE(found.st_mode):04o}",
            size_bytes=found.st_size,
            memory_bytes=found.st_blocks * BLOCK_BYTES,
        )


class RegionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A region: its file, its superblock, and what is wrong with it ("" for nothing)."""

    name: str
    path: str
    file: FileFacts | None
    superblock: ShmRegionSuperblock | None
    is_owner_alive: bool | None
    activity_age_s: float | None
    problem: str

    @property
    def is_missing(self) -> bool:
        return self.problem.startswith(f"{Check.MISSING}:")


@contextmanager
def opened(uri: str, spec: RegionSpec, bases: AllowedBases) -> Iterator[int]:
    """A descriptor of the region for reading. Raises RegionRejected."""
    fd = open_region(RegionUri.parse(uri), bases, spec.size_bytes)
    try:
        yield fd
    finally:
        os.close(fd)


def look_at(uris: Iterable[str], specs: Iterable[RegionSpec], bases: AllowedBases) -> tuple[RegionFacts, ...]:
    """The regions of an epoch, the header ring first; one that may not be opened says why."""
    return tuple(_look_at(uri, spec, bases) for uri, spec in zip(uris, specs, strict=True))


def name_of(spec: RegionSpec) -> str:
    return "header ring" if spec.region_type is RegionType.HEADER_RING else f"pool {spec.pool_id}"


def activity_age_s(stamp_ns: int) -> float | None:
    """Seconds since a stamp of either clock that stamps may be of (C8); None for one in the future of both."""
    age_ns = activity_age_ns(stamp_ns, time.monotonic_ns(), time.time_ns())
    return None if age_ns is None else age_ns / 1e9


def _look_at(uri: str, spec: RegionSpec, bases: AllowedBases) -> RegionFacts:
    superblock, file, problem = None, None, ""
    try:
        path = RegionUri.parse(uri).path
    except RegionRejected as rejected:
        return _facts(spec, uri, None, None, str(rejected))
    try:
        with opened(uri, spec, bases) as fd:
            file = FileFacts.of(os.fstat(fd))
            data = os.pread(fd, SUPERBLOCK_BYTES, 0)
            superblock = parse_superblock(data)
            problem = spec.mismatch(data) or ""
    except RegionRejected as rejected:
        problem = f"{rejected.check}: {rejected.detail}"
        file = _file_at(path)
    return _facts(spec, path, file, superblock, problem)


def _facts(
    spec: RegionSpec, path: str, file: FileFacts | None, superblock: ShmRegionSuperblock | None, problem: str
) -> RegionFacts:
    return RegionFacts(
        name=name_of(spec),
        path=path,
        file=file,
        superblock=superblock,
        is_owner_alive=None if superblock is None else is_owner_alive(superblock, time.monotonic_ns(), time.time_ns()),
        activity_age_s=None if superblock is None else activity_age_s(superblock.activity_timestamp_ns),
        problem=problem,
    )


def _file_at(path: str) -> FileFacts | None:
    try:
        return FileFacts.of(os.lstat(path))
    except OSError:
        return None
