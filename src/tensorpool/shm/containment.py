# SPDX-License-Identifier: Apache-2.0
"""Opening a file whose path a peer announced: only where we allow it, only what it claims to be.

    1 absolute ─► 2 realpath ─► 4 inside an allowed base ─► 5 regular file ─► 6 open without following links,
    (RegionUri)                 (3 resolved once)                               same file on the descriptor,
                                                                                huge pages, size

Every failure is a RegionRejected whose `check` is the rule's name; no descriptor survives it. The path is
walked directory by directory from the root without following a link, so that no swap under our feet can
redirect it: O_NOFOLLOW on the whole path would guard its last component only (D6).
Wire §15.21a.2, §15.21a.5, §15.22; decisions B22, C13, D4–D8.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Final

from tensorpool.errors import ConfigError, RegionRejected
from tensorpool.shm.layout import round_up
from tensorpool.shm.permission import explain_denial
from tensorpool.wire.region_uri import RegionUri

_HUGETLBFS_MAGIC: Final = 0x958458F6
_CAN_WALK: Final = {os.open, os.stat} <= os.supports_dir_fd


class Check(StrEnum):
    """The rules by name, as RegionRejected.check reports them beside those of the URI's grammar."""

    MISSING = "missing"  # C13: the epoch was retired; the next announce names another
    CONTAINMENT = "containment"
    REGULAR_FILE = "regular file"
    NO_SYMLINK = "no symlink"
    SAME_FILE = "same file"
    PERMISSION = "permission"
    HUGEPAGES = "require_hugepages"
    SIZE = "size"
    OPEN = "open"
    CREATE = "create"
    PLATFORM = "platform"
    MAPPING = "mapping"
    SUPERBLOCK = "superblock"
    SECOND_WRITER = "second writer"
    SPACE = "space"
    MLOCK = "mlock"


class AllowedBases:
    """The directories below which regions may lie, resolved once.

    >>> AllowedBases(["/dev/shm/tensorpool"]).contains("/dev/shm/tensorpool-evil/header.ring")
    False

    A base that does not exist yet is kept as it is spelled; should it turn out to be a link, what lies behind
    the link is outside. Raises ConfigError for a relative path or an empty list.
    """

    def __init__(self, directories: Iterable[str | os.PathLike[str]]) -> None:
        given = [os.fspath(directory) for directory in directories]
        if not given or not all(map(os.path.isabs, given)):
            raise ConfigError("shm.allowed_base_dirs", given, "one or more absolute directories")
        self.directories: Final = tuple(os.path.realpath(directory) for directory in given)

    def contains(self, canonical_path: str) -> bool:
        """Whether the path lies below a base, by whole components (D5)."""
        return any(
            canonical_path != base and os.path.commonpath([base, canonical_path]) == base for base in self.directories
        )


def open_region(uri: RegionUri, bases: AllowedBases, size_bytes: int, *, writable: bool = False) -> int:
    """Open the file of a region that needs `size_bytes`; returns a descriptor that is safe to map.

    Raises RegionRejected.
    """
    _require_safe_open(uri)
    try:
        path = os.path.realpath(uri.path, strict=True)
        if not bases.contains(path):
            allowed = ", ".join(bases.directories)
            detail = f"{path} is not inside {allowed}; add its directory to allowed_base_dirs if you trust it"
            raise _rejected(uri, Check.CONTAINMENT, detail)
        parent, name = os.path.split(path)
        with directory(parent) as folder:
            seen = os.stat(name, dir_fd=folder, follow_symlinks=False)
            _require_regular(uri, seen)
            # O_NONBLOCK, O_NOCTTY: a FIFO or a terminal that took the file's place must not hold us up.
            flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NONBLOCK | os.O_NOCTTY
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        raise _refusal(uri, error, writable=writable) from error
    try:
        _check_opened(uri, fd, seen, size_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def directory(path: str) -> Iterator[int]:
    """A descriptor to resolve names against: the directory at an absolute path that has no link in it.

    Raises OSError: NotADirectoryError where a component is a link or no directory.
    """
    # O_PATH asks for no permission to read the directories on the way.
    flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open("/", flags)
    try:
        for part in filter(None, path.split("/")):
            child = os.open(part, flags, dir_fd=fd)
            os.close(fd)
            fd = child
        yield fd
    finally:
        os.close(fd)


def mapped_bytes(fd: int, size_bytes: int) -> int:
    """How many bytes to size or map a file to: hugetlbfs only deals in whole pages (B22)."""
    return round_up(size_bytes, huge_page_bytes(fd) or 1)


def huge_page_bytes(fd: int) -> int | None:
    """The page size of a file on hugetlbfs; None elsewhere, and where the platform does not report it (D8)."""
    statfs = _fstatfs()
    if statfs is None or statfs(fd) != _HUGETLBFS_MAGIC:
        return None
    return os.fstatvfs(fd).f_bsize


@functools.cache
def _fstatfs() -> Callable[[int], int] | None:
    """libc's fstatfs reduced to f_type, which Python's os module does not offer. None on other platforms."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)

    def file_system_type(fd: int) -> int:
        buffer = ctypes.create_string_buffer(512)  # larger than struct statfs, whose first word is f_type
        if libc.fstatfs(fd, buffer) != 0:
            raise OSError(ctypes.get_errno(), "fstatfs")
        return int.from_bytes(buffer.raw[:4], "little")

    return file_system_type


def _require_safe_open(uri: RegionUri) -> None:
    """§15.21a.5: without no-follow and a reliable identity, fail closed."""
    if not hasattr(os, "O_NOFOLLOW") or not _CAN_WALK:
        detail = "this platform cannot open a file without following links"
        raise _rejected(uri, Check.PLATFORM, detail, "use Linux, or attach through a bridge")


def _check_opened(uri: RegionUri, fd: int, seen: os.stat_result, size_bytes: int) -> None:
    opened = os.fstat(fd)
    _require_regular(uri, opened)
    if (opened.st_dev, opened.st_ino) != (seen.st_dev, seen.st_ino):
        raise _rejected(uri, Check.SAME_FILE, "the file was replaced while it was being opened; try again")
    page = huge_page_bytes(fd)
    if uri.require_hugepages and page is None:
        detail = "the file is not on hugetlbfs, as far as can be verified; put shm.base_dir on a hugetlbfs mount"
        raise _rejected(uri, Check.HUGEPAGES, detail)
    if opened.st_size < round_up(size_bytes, page or 1):
        # Mapping more than the file holds would be a SIGBUS at the first access behind its end.
        detail = f"expected at least {size_bytes} bytes, found {opened.st_size}"
        remedy = "it was cut short, or announced with another layout: restart the driver, which makes new files"
        raise _rejected(uri, Check.SIZE, detail, remedy)


def _require_regular(uri: RegionUri, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        remedy = "a driver never makes such: find out who put it there, and remove it"
        raise _rejected(uri, Check.REGULAR_FILE, f"expected a regular file, found a {kind}", remedy)


_KINDS: Final = {
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}


def _refusal(uri: RegionUri, error: OSError, *, writable: bool) -> RegionRejected:
    """What an errno means to a client that received this URI."""
    match error.errno:
        case errno.ENOENT:
            detail = "there is no such file; its epoch was retired, or another host or container announced it"
            remedy = "the next announce names another; containers have to share /dev/shm (`--ipc=host`, or a volume)"
            return _rejected(uri, Check.MISSING, detail, remedy)
        case errno.ELOOP | errno.ENOTDIR | errno.EINVAL:  # the last for a link that ceased to be one
            detail = "a component of the path is no directory, or links were swapped while it was checked"
            return _rejected(uri, Check.NO_SYMLINK, detail, f"look at `namei -l {uri.path}`")
        case errno.EACCES | errno.EPERM:
            return _rejected(uri, Check.PERMISSION, explain_denial(uri.path, writable=writable))
    return _rejected(uri, Check.OPEN, error.strerror or str(error), "see `tensorpool doctor`")


def _rejected(uri: RegionUri, check: Check, detail: str, remedy: str = "") -> RegionRejected:
    return RegionRejected(str(uri), check, detail, remedy)
