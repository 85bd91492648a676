# SPDX-License-Identifier: Apache-2.0
"""Namespaces: a directory per user and deployment, owned by one driver at a time.

    <base_dir>/                      shared by all users, sticky like /tmp
        tensorpool-<user>/           ours
            <namespace>/             one driver's, guarded by driver.lock
                <stream_id>/<epoch>/ see `epochs`

The user is the effective one, never an environment variable. A directory that another user made where
ours belongs is refused. Wire §15.21a.3, §15.21a.6; decisions D1–D4, D9, D11.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from typing import Final

from tensorpool.errors import ConfigError, RegionRejected
from tensorpool.file_access import FileAccess, user_name
from tensorpool.shm.permission import FILE_MODE, check_file_mode, explain_denial
from tensorpool.wire.region_uri import RegionUri

DEFAULT_NAMESPACE: Final = "default"
LOCK_NAME: Final = "driver.lock"
SWEEP_PATIENCE_NS: Final = 5_000_000_000
FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_USER_PREFIX: Final = "tensorpool-"
_SWEEPING: Final = " (removing leftovers)"
_BASE_MODE: Final = 0o1777  # every user may add a tree of its own, and none may touch another's
_COMPONENT: Final = re.compile(r"[A-Za-z0-9._-]{1,200}")


def namespace_path(base_dir: str, namespace: str = DEFAULT_NAMESPACE) -> str:
    """Where this user's namespace lies, with every link of the base resolved.

    >>> namespace_path("/dev/shm/tensorpool", "lab1")
    '/dev/shm/tensorpool/tensorpool-ann/lab1'

    Raises ConfigError for a namespace or a base that cannot be part of a region URI.
    """
    if not _is_component(namespace):
        accepted = "letters, digits, '.', '_' and '-', but neither '.' nor '..'"
        raise ConfigError("shm.namespace", namespace, accepted)
    base = os.path.realpath(base_dir) if os.path.isabs(base_dir) else base_dir
    try:
        RegionUri(base)
    except RegionRejected as rejected:
        raise ConfigError("shm.base_dir", base_dir, rejected.detail) from None
    return os.path.join(base, _USER_PREFIX + user_component(os.geteuid()), namespace)


def user_component(uid: int) -> str:
    """The account's name where it is safe as a file name, else its number."""
    name = user_name(uid)
    return name if _is_component(name) else str(uid)


def make_namespace(
    base_dir: str, namespace: str = DEFAULT_NAMESPACE, *, file_mode: int = FILE_MODE, gid: int | None = None
) -> str:
    """Create what is missing of a namespace's directories and return its path.

    Our own directories get the mode that suits `file_mode`, and the group if one is given; those that root prepared
    keep theirs. Raises ConfigError.
    """
    access = FileAccess(check_file_mode(file_mode), gid)
    path = namespace_path(base_dir, namespace)
    user_dir = os.path.dirname(path)
    base = os.path.dirname(user_dir)
    try:
        if not os.path.isdir(base):
            os.makedirs(os.path.dirname(base), exist_ok=True)
            _ensure_at(base, None)
        _ensure_at(user_dir, access)
        _ensure_at(path, access)
    except OSError as error:
        accepted = f"a directory below which this user may create its own; {error.strerror}"
        raise ConfigError("shm.base_dir", base_dir, accepted) from error
    return path


def find_namespaces(base_dir: str) -> list[str]:
    """The namespaces of all users below a base, for those who look after leftovers.

    Ignores what this process may not read.
    """
    base = os.path.realpath(base_dir)
    users = [os.path.join(base, name) for name in _directories(base) if name.startswith(_USER_PREFIX)]
    return sorted(os.path.join(user_dir, name) for user_dir in users for name in _directories(user_dir))


def ensure_directory(name: str, dir_fd: int, access: FileAccess | None) -> None:
    """Make sure that `name` is a directory of ours with exactly this access, or one of root's as root left it.

    None: all users may add a directory of their own.

    Raises OSError where another user's directory, a link or a file is in its place.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=dir_fd)
    fd = os.open(name, FOLDER_FLAGS, dir_fd=dir_fd)
    try:
        owner = os.fstat(fd).st_uid
        if owner == os.geteuid():
            if access is None:
                os.fchmod(fd, _BASE_MODE)
            else:
                access.set_directory(fd)
        elif owner != 0:
            text = f"it belongs to {user_name(owner)}, who could replace our files; have it removed"
            raise FileExistsError(errno.EEXIST, text, name)
    finally:
        os.close(fd)


class NamespaceLock:
    """Held by the one driver of a namespace, for as long as it lives, or for a moment by who removes leftovers.

    The kernel drops it with the process, however that ends; `release` also removes the file. Raises
    ConfigError, which names the holder's pid, while another driver has it; a sweeper is waited for, since it is
    gone in a moment, and it never waits itself.
    """

    def __init__(self, folder_fd: int, path: str, *, is_sweeper: bool = False) -> None:
        self._folder_fd = folder_fd
        deadline_ns = time.monotonic_ns() + (0 if is_sweeper else SWEEP_PATIENCE_NS)
        fd = _try_lock(folder_fd, path, deadline_ns, is_sweeper=is_sweeper)
        while fd is None:
            fd = _try_lock(folder_fd, path, deadline_ns, is_sweeper=is_sweeper)
        self._fd = fd

    def release(self) -> None:
        """Let the next driver have it."""
        if _is_at_its_path(self._fd, self._folder_fd):  # else it was removed, and another process may hold a new one
            os.unlink(LOCK_NAME, dir_fd=self._folder_fd)
        os.close(self._fd)


def has_lock_file(path: str) -> bool:
    """Whether a driver of ours has this namespace, or was killed in it; seen from any process and account."""
    return os.path.lexists(os.path.join(path, LOCK_NAME))


def lock_holder(path: str) -> int | None:
    """The process that holds the lock file at `path`; None where none does that we can see. Does not touch the lock."""
    try:
        found = os.stat(path, follow_symlinks=False)
        with open("/proc/locks", encoding="utf-8") as locks:
            lines = [line.split() for line in locks]
    except OSError:
        return None
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    holders = [int(fields[4]) for fields in lines if fields[1] == "FLOCK" and fields[5] == place]
    return holders[0] if holders else None


def _try_lock(folder_fd: int, path: str, deadline_ns: int, *, is_sweeper: bool) -> int | None:
    """The lock's descriptor; None to try again: its holder is about to go, or went just as we locked it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.ExitStack() as undo:
        fd = os.open(LOCK_NAME, flags, 0o600, dir_fd=folder_fd)
        undo.callback(os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(fd)
            if not _is_driver(holder) and time.monotonic_ns() < deadline_ns:
                time.sleep(0.002)
                return None
            accepted = (
                f"a namespace without a running driver: pid {holder} holds {path}/{LOCK_NAME}; "
                "stop that driver or choose another namespace"
            )
            raise ConfigError("shm.namespace", os.path.basename(path), accepted) from None
        if not _is_at_its_path(fd, folder_fd):
            return None
        with contextlib.suppress(OSError):  # hugetlbfs has no write(2): there the holder stays unnamed
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}{_SWEEPING if is_sweeper else ''}\n".encode(), 0)
        undo.pop_all()
        return fd


def _holder(fd: int) -> str:
    try:
        return os.pread(fd, 40, 0).decode("ascii", "replace").strip() or "unknown"
    except OSError:
        return "unknown"


def _is_driver(holder: str) -> bool:
    """Whether a living process holds it: the text of a dead holder stays until the next one writes its own."""
    return holder.isdecimal() and os.path.exists(f"/proc/{holder}")


def _is_at_its_path(fd: int, folder_fd: int) -> bool:
    try:
        found = os.stat(LOCK_NAME, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(fd))


def _ensure_at(path: str, access: FileAccess | None) -> None:
    parent, name = os.path.split(path)
    try:
        fd = os.open(parent, FOLDER_FLAGS)
        try:
            ensure_directory(name, fd, access)
        finally:
            os.close(fd)
    except PermissionError as error:
        raise PermissionError(error.errno, explain_denial(parent, writable=True)) from error
    except OSError as error:
        raise OSError(error.errno, f"{path}: {error.strerror}") from error


def _directories(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _is_component(text: str) -> bool:
    return _COMPONENT.fullmatch(text) is not None and text not in (".", "..")
