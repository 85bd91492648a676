# SPDX-License-Identifier: Apache-2.0
"""Regions: mapped files with a superblock that says what they are.

`map_region` maps what a peer announced, after every check of `containment`, and believes it only when its
superblock agrees; `create_region` makes one for others to map. When either fails nothing stays mapped and no
file stays behind. A region is unmapped with its last reference, be it an array's: there is nothing to close.
Wire §7.1, §15.1, §15.10, §15.14, §15.21a.5; decisions A8, C9, C10, C12–C14, D9, D10.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Final

import msgspec

from tensorpool._core import SUPERBLOCK_BYTES, Mapping
from tensorpool.errors import RegionRejected
from tensorpool.shm.containment import AllowedBases, Check, huge_page_bytes, mapped_bytes, open_region
from tensorpool.shm.layout import ACTIVITY_OFFSET, LAYOUT_VERSION, MAGIC_OFFSET, RegionSpec
from tensorpool.shm.permission import FILE_MODE, explain_denial
from tensorpool.shm.space import bring_in, reserve, space_refused
from tensorpool.wire.control import ShmRegionSuperblock
from tensorpool.wire.region_uri import RegionUri

_NEW_FILE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM})

# What to do about a superblock, by the fields that differ; the first that fits. An empty set fits all.
_REMEDIES: Final = (
    (frozenset({"magic"}), "the next announce may name a finished one; else another program writes to this file"),
    (frozenset({"layout_version"}), "update the older of driver and client: both need the same layout version"),
    (
        frozenset({"stream_id", "region_type", "pool_id"}),
        "the file is another region's: do two drivers share shm.base_dir and shm.namespace? See `tensorpool doctor`",
    ),
    (frozenset({"epoch"}), "the file is of another epoch; the next announce names the current one"),
    (frozenset[str](), "file and announce disagree: restart the driver, which makes new files"),
)


class Region:
    """A mapped region whose superblock agrees with `spec`."""

    __slots__ = ("mapping", "pid", "spec", "uri")

    def __init__(self, uri: str, spec: RegionSpec, mapping: Mapping, pid: int) -> None:
        self.uri: Final = uri
        self.spec: Final = spec
        self.mapping: Final = mapping
        self.pid: Final = pid

    @property
    def activity_timestamp_ns(self) -> int:
        """When its owner last gave a sign of life."""
        return self.mapping.load_u64(ACTIVITY_OFFSET)

    @property
    def superblock(self) -> ShmRegionSuperblock:
        """As it stands now. Raises DecodeError if it was overwritten with something else."""
        return ShmRegionSuperblock.decode_body(_superblock_bytes(self.mapping))

    def revalidate(self) -> None:
        """Check the superblock again, as every announce demands (§15.1).

        Raises RegionRejected, check "superblock", when it is no longer the one that was mapped, or "second writer": a
        new pid under the same epoch (C10). The holder of the region then drops it.
        """
        found = _superblock_bytes(self.mapping)
        differences = self.spec.differences(found)
        if differences:
            raise mismatched(self.uri, differences)
        pid = ShmRegionSuperblock.decode_body(found).pid
        if pid != self.pid:
            detail = f"pid: expected {self.pid}, found {pid}"
            remedy = "two processes write one epoch: stop one of them; the next epoch is whole again"
            raise RegionRejected(self.uri, Check.SECOND_WRITER, detail, remedy)

    def refresh_activity(self, now_ns: int) -> None:
        """Give a sign of life: the only field of a superblock that ever changes (C12)."""
        self.mapping.store_u64(ACTIVITY_OFFSET, now_ns)


def map_region(
    uri: str,
    spec: RegionSpec,
    bases: AllowedBases,
    *,
    writable: bool = False,
    on_open: Callable[[int], object] | None = None,
) -> Region:
    """Map the region that a peer announced as `uri`, read-only unless a producer asks to write.

    `on_open` sees the descriptor, which is closed again. Raises RegionRejected, with nothing mapped.
    """
    fd = open_region(RegionUri.parse(uri), bases, spec.size_bytes, writable=writable)
    try:
        mapping = Mapping(fd, mapped_bytes(fd, spec.size_bytes), writable=writable)
        if on_open is not None:
            on_open(fd)
    except OSError as error:
        remedy = f"{spec.size_bytes} bytes have to be mapped: look at `ulimit -v` and vm.max_map_count"
        raise RegionRejected(uri, Check.MAPPING, _reason(error), remedy) from error
    finally:
        os.close(fd)
    found = _superblock_bytes(mapping)
    differences = spec.differences(found)
    if differences:
        del mapping  # now: a kept traceback keeps this frame, and the frame would keep the mapping
        raise mismatched(uri, differences)
    return Region(uri, spec, mapping, ShmRegionSuperblock.decode_body(found).pid)


def mismatched(uri: str, differences: dict[str, str]) -> RegionRejected:
    """A superblock that is not the announced one: only what differs, and what to do about that."""
    remedy = next(text for fields, text in _REMEDIES if not fields or not fields.isdisjoint(differences))
    if "layout_version" in differences:
        from tensorpool.version import __version__

        remedy += f" (this is tensorpool {__version__}, layout version {LAYOUT_VERSION})"
    return RegionRejected(uri, Check.SUPERBLOCK, "; ".join(differences.values()), remedy)


class Backing(msgspec.Struct, frozen=True, kw_only=True):
    """How a new region gets its memory.

    Reserved space never fails its writer; without, memory is taken as it is used, which suits an epoch that
    has no producer (C4). `prefault` and `mlock` reserve in any case. Once `stop` is set, regions that are being created
    are given up.
    """

    reserve_space: bool = True
    prefault: bool = False
    mlock: bool = False
    stop: threading.Event | None = None

    @property
    def is_reserved(self) -> bool:
        return self.reserve_space or self.prefault or self.mlock


def create_region(
    uri: RegionUri, spec: RegionSpec, now_ns: int, *, dir_fd: int, backing: Backing, mode: int = FILE_MODE
) -> Region:
    """Create the file of a region in the directory `dir_fd`, zeroed, with its superblock, mapped for writing.

    `uri` is where others will find it. Raises RegionRejected: "space" with the bill, "require_hugepages",
    "mlock", "permission", or "create" for what else the system refuses, such as a file that is already there; and
    Closed by its stop event.
    """
    name = os.path.basename(uri.path)
    try:
        fd = os.open(name, _NEW_FILE, 0o600, dir_fd=dir_fd)
    except OSError as error:
        raise create_refused(uri, dir_fd, spec.size_bytes, error) from error
    mapping: Mapping | None = None
    try:
        os.fchmod(fd, mode)
        if uri.require_hugepages and huge_page_bytes(fd) is None:
            remedy = "mount one there: mount -t hugetlbfs none DIR, or set shm.require_hugepages = false"
            raise RegionRejected(str(uri), Check.HUGEPAGES, "shm.base_dir is not on hugetlbfs", remedy)
        length = mapped_bytes(fd, spec.size_bytes)
        if backing.is_reserved:
            reserve(fd, length, in_huge_pages=backing.prefault, stop=backing.stop)
        else:
            reserve(fd, SUPERBLOCK_BYTES)  # written below: a full mount refuses here, not with SIGBUS there
            os.ftruncate(fd, length)
        mapping = Mapping(fd, length, writable=True)
        if backing.prefault:
            bring_in(mapping, stop=backing.stop)
        if backing.mlock:
            _lock(uri, mapping)
        pid = os.getpid()
        _publish(mapping, spec.superblock(pid, now_ns))
        os.fsync(fd)
        return Region(str(uri), spec, mapping, pid)
    except BaseException as error:
        mapping = None
        os.unlink(name, dir_fd=dir_fd)
        os.ftruncate(fd, 0)  # gives back what was reserved, though a kept traceback may still hold a mapping
        if isinstance(error, OSError):
            raise create_refused(uri, dir_fd, spec.size_bytes, error) from error
        raise
    finally:
        os.close(fd)


def create_refused(uri: RegionUri, dir_fd: int, size_bytes: int, error: OSError) -> RegionRejected:
    """What an errno means to a process that creates `uri` in the directory `dir_fd`."""
    folder = os.path.dirname(uri.path)
    if error.errno in _NO_SPACE:
        return space_refused(str(uri), dir_fd, folder, size_bytes)
    if isinstance(error, PermissionError):
        return RegionRejected(str(uri), Check.PERMISSION, explain_denial(folder, writable=True))
    remedy = f"look at `ls -la {folder}`; is another program at work there?"
    return RegionRejected(str(uri), Check.CREATE, error.strerror or str(error), remedy)


def _lock(uri: RegionUri, mapping: Mapping) -> None:
    try:
        mapping.lock()
    except OSError as error:
        detail = f"{_reason(error)}; raise `ulimit -l`, or set policies.mlock_shm = false"
        raise RegionRejected(str(uri), Check.MLOCK, detail) from error


def _reason(error: OSError) -> str:
    """Without the name of the call, which the native module puts in front."""
    return os.strerror(error.errno or 0)


def _publish(mapping: Mapping, superblock: ShmRegionSuperblock) -> None:
    body = superblock.encode_body()
    memoryview(mapping)[8:SUPERBLOCK_BYTES] = body[8:]
    # Last, and a release store: a reader that sees the magic sees all the rest (C13). Pairs with _superblock_bytes.
    mapping.store_u64(MAGIC_OFFSET, superblock.magic)


def _superblock_bytes(mapping: Mapping) -> bytes:
    """A private copy: what was checked cannot change afterwards."""
    magic = mapping.load_u64(MAGIC_OFFSET)  # acquire: pairs with the release store in _publish
    return magic.to_bytes(8, "little") + bytes(memoryview(mapping)[8:SUPERBLOCK_BYTES])
