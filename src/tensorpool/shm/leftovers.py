# SPDX-License-Identifier: Apache-2.0
"""Finds what dead processes left behind, apart from what living ones use, and removes it with care.

An epoch is dead when its namespace has no driver (the lock can be taken), its owner's process is gone and its activity
stamp is stale: all three, so that neither a pid from another container nor a paused driver misleads. `survey` looks
without touching anything, not even the lock; `remove_epochs` looks again under the lock and removes what is still dead.
A directory with anything in it that is not ours (a link, another user's file, a name that no epoch has) stays whole.
Wire §15.21a.7; decisions C8, C11.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

import msgspec

from tensorpool.clock import Clock
from tensorpool.errors import ConfigError
from tensorpool.file_access import user_name
from tensorpool.shm.containment import directory
from tensorpool.shm.epochs import FoundEpoch, scan_epochs
from tensorpool.shm.liveness import activity_age_ns, is_process_alive, liveness_of
from tensorpool.shm.namespace import FOLDER_FLAGS, LOCK_NAME, NamespaceLock, find_namespaces, lock_holder

REGION_FILES: Final = re.compile(r"header\.ring|(0|[1-9][0-9]{0,4})\.pool")
GONE: Final = "another process removed it meanwhile"
LIVES: Final = "it came to life meanwhile"
BLOCK_BYTES: Final = 512  # of st_blocks, whatever the file system's own are


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """Something dead: what it is, where, what it takes, and why it is known to be dead."""

    kind: str
    path: str
    memory_bytes: int
    why: tuple[str, ...]


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Something that may be dead but is left alone, and why."""

    path: str
    reason: str


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """The leftovers that were found. `living` counts the directories that a process uses."""

    dead: tuple[Leftover, ...] = ()
    kept: tuple[Kept, ...] = ()
    living: int = 0

    @classmethod
    def together(cls, surveys: Iterable[Survey]) -> Survey:
        parts = list(surveys)
        return cls(
            dead=tuple(leftover for part in parts for leftover in part.dead),
            kept=tuple(kept for part in parts for kept in part.kept),
            living=sum(part.living for part in parts),
        )


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a leftover: removed by us, or not, for a reason; `is_failed` if it should have been."""

    leftover: Leftover
    is_removed: bool = False
    is_failed: bool = False
    reason: str = ""


class Contents(msgspec.Struct, frozen=True):
    """Everything below a directory, deepest first, and what of it does not belong there."""

    files: tuple[str, ...]
    folders: tuple[str, ...]
    strangers: tuple[str, ...]
    memory_bytes: int


def dead_epochs(namespace_path: str, clock: Clock, window_ns: int) -> list[FoundEpoch]:
    """Epochs whose owner's process is gone and whose last sign of life is older than `window_ns`.

    An epoch without a superblock was never finished: it is dead once all its finished neighbours are, or the driver
    that last held the namespace is gone.
    """
    found = scan_epochs(namespace_path)
    now_ns, wall_ns = clock.monotonic_ns(), clock.realtime_ns()
    dead = []
    for epoch in found:
        if epoch.superblock is not None:
            facts = liveness_of(epoch.superblock, now_ns, wall_ns)
            if facts.is_process_alive or facts.is_active(window_ns):
                return []
        dead.append(epoch)
    is_proven = any(epoch.superblock is not None for epoch in dead) or _is_last_driver_gone(namespace_path)
    return dead if is_proven else []


def remove_dead_epochs(
    base_dir: str, clock: Clock, window_ns: int, *, except_namespace: str = ""
) -> Iterator[FoundEpoch]:
    """Remove and yield the dead epochs of every namespace below `base_dir` that has no driver."""
    for path in find_namespaces(base_dir):
        if path == except_namespace:
            continue
        with contextlib.suppress(OSError, ConfigError):  # not ours to read, or a driver holds it
            dead = dead_epochs(path, clock, window_ns)
            if not dead:
                continue
            with _swept(path) as namespace:
                for epoch in _still_dead(path, dead, clock, window_ns):
                    with contextlib.suppress(OSError):  # what else lies there is not ours
                        _retire(epoch, namespace)
                        yield epoch


def survey(base_dir: str, clock: Clock, window_ns: int) -> Survey:
    """The dead epochs of this user's namespaces below `base_dir`; other users' are reported and left alone.

    Changes nothing, and takes no lock that a starting driver would find taken.
    """
    return Survey.together(_survey_namespace(path, clock, window_ns) for path in find_namespaces(base_dir))


def remove_epochs(leftovers: Iterable[Leftover], clock: Clock, window_ns: int) -> Iterator[Outcome]:
    """Remove epochs that `survey` found, those that are still dead. Safe beside drivers and other sweepers."""
    namespaces: dict[str, list[Leftover]] = {}
    for leftover in leftovers:
        namespaces.setdefault(os.path.dirname(os.path.dirname(leftover.path)), []).append(leftover)
    for path, leftovers in namespaces.items():
        yield from _remove_from(path, leftovers, clock, window_ns)


def contents_of(folder: int, known: re.Pattern[str]) -> Contents:
    """What lies below the open directory `folder`; a stranger is what `known` has no name for, or is not ours.

    `known` is matched against paths relative to `folder`. Links are never followed. Raises OSError.
    """
    files: list[str] = []
    folders: list[str] = []
    strangers: list[str] = []
    memory_bytes = 0

    def visit(prefix: str, fd: int) -> None:
        nonlocal memory_bytes
        for name in sorted(os.listdir(fd)):
            path = prefix + name
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            memory_bytes += found.st_blocks * BLOCK_BYTES
            if found.st_uid != os.geteuid() or known.fullmatch(path) is None:
                strangers.append(path)
            elif stat.S_ISDIR(found.st_mode):
                child = os.open(name, FOLDER_FLAGS, dir_fd=fd)
                try:
                    visit(path + "/", child)
                finally:
                    os.close(child)
                folders.append(path)
            elif stat.S_ISREG(found.st_mode):
                files.append(path)
            else:
                strangers.append(path)

    visit("", folder)
    return Contents(tuple(files), tuple(folders), tuple(strangers), memory_bytes)


def clear(folder: int, contents: Contents) -> None:
    """Remove exactly `contents` from the open directory `folder`; what is gone already is no matter. Raises OSError."""
    for path in contents.files:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path, dir_fd=folder)
    for path in contents.folders:
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(path, dir_fd=folder)


# --- namespaces


def _survey_namespace(path: str, clock: Clock, window_ns: int) -> Survey:
    try:
        owner = os.stat(path, follow_symlinks=False).st_uid
        found = scan_epochs(path)
        dead = dead_epochs(path, clock, window_ns)
    except OSError as error:
        return Survey(kept=(Kept(path=path, reason=f"it cannot be read: {error.strerror}"),))
    if not dead:
        return _undecided(path, found)
    holder = lock_holder(f"{path}/{LOCK_NAME}")
    if holder is not None:
        return Survey(living=len(found))
    if owner != os.geteuid():
        name = user_name(owner)
        reason = f"{len(dead)} dead epochs belong to {name}; let {name} run `tensorpool doctor --gc`"
        return Survey(kept=(Kept(path=path, reason=reason),))
    return Survey.together(_survey_epoch(epoch, clock) for epoch in dead)


def _undecided(path: str, found: list[FoundEpoch]) -> Survey:
    """Epochs that live, or of which nothing proves that they do not."""
    living = sum(epoch.superblock is not None for epoch in found)
    if living or not found or lock_holder(f"{path}/{LOCK_NAME}") is not None:
        return Survey(living=len(found))
    reason = f"{len(found)} epochs were never finished, and nothing says whose they are; `rm -r` what you know is dead"
    return Survey(kept=(Kept(path=path, reason=reason),))


def _survey_epoch(epoch: FoundEpoch, clock: Clock) -> Survey:
    try:
        with directory(epoch.path) as place:
            folder = os.open(".", FOLDER_FLAGS, dir_fd=place)
            try:
                owner = os.fstat(folder).st_uid
                contents = contents_of(folder, REGION_FILES)
            finally:
                os.close(folder)
    except OSError as error:
        return Survey(kept=(Kept(path=epoch.path, reason=f"it cannot be read: {error.strerror}"),))
    if owner != os.geteuid():
        return Survey(kept=(Kept(path=epoch.path, reason=f"it belongs to {user_name(owner)}"),))
    if contents.strangers:
        return Survey(kept=(Kept(path=epoch.path, reason=strangers_in(contents)),))
    kind = "retired epoch" if epoch.is_retired else "epoch" if epoch.superblock else "unfinished epoch"
    leftover = Leftover(kind=kind, path=epoch.path, memory_bytes=contents.memory_bytes, why=_reasons(epoch, clock))
    return Survey(dead=(leftover,))


def strangers_in(contents: Contents) -> str:
    """Why a directory is left alone."""
    shown = ", ".join(contents.strangers[:3]) + (", …" if len(contents.strangers) > 3 else "")
    return f"it also holds what is not ours or no file of its kind: {shown}; look at it, then remove it by hand"


def _reasons(epoch: FoundEpoch, clock: Clock) -> tuple[str, ...]:
    free = "no driver holds its namespace's lock"
    superblock = epoch.superblock
    if superblock is None:
        return (free, "it was never finished, and the process that began it is gone")
    age_ns = activity_age_ns(superblock.activity_timestamp_ns, clock.monotonic_ns(), clock.realtime_ns())
    age = "stamped before the last boot" if age_ns is None else f"last sign of life {age_ns / 1e9:.0f} s ago"
    return (free, f"pid {superblock.pid}, which made it, is gone", age)


def _is_last_driver_gone(namespace_path: str) -> bool:
    """Whether the lock file names a process that has ended since: it made all that is here, or found it dead."""
    try:
        with directory(namespace_path) as folder:
            fd = os.open(LOCK_NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                holder = os.pread(fd, 40, 0).split()
            finally:
                os.close(fd)
    except OSError:
        return False
    return bool(holder) and holder[0].isdigit() and not is_process_alive(int(holder[0]), 2**63)


def _remove_from(path: str, leftovers: list[Leftover], clock: Clock, window_ns: int) -> Iterator[Outcome]:
    wanted = {leftover.path: leftover for leftover in leftovers}
    try:
        dead = dead_epochs(path, clock, window_ns)  # before the lock: it rewrites who held it last
        with _swept(path) as namespace:
            for epoch in _still_dead(path, dead, clock, window_ns):
                leftover = wanted.pop(epoch.path, None)
                if leftover is not None:
                    yield outcome_of(leftover, partial(_retire, epoch, namespace))
    except ConfigError as error:
        reason = f"a driver holds its namespace by now: {error.accepted}"
        yield from (Outcome(leftover=leftover, reason=reason) for leftover in wanted.values())
        return
    except FileNotFoundError:
        pass  # the whole namespace is gone
    except OSError as error:
        reason = error.strerror or str(error)
        yield from (Outcome(leftover=leftover, is_failed=True, reason=reason) for leftover in wanted.values())
        return
    for leftover in wanted.values():
        reason = LIVES if os.path.lexists(leftover.path) else GONE
        yield Outcome(leftover=leftover, reason=reason)


def outcome_of(leftover: Leftover, act: Callable[[], str]) -> Outcome:
    """What `act` made of it: "" when it is removed, why it did not have to be, or OSError for why it could not."""
    try:
        reason = act()
    except FileNotFoundError:
        return Outcome(leftover=leftover, reason=GONE)
    except OSError as error:
        return Outcome(leftover=leftover, is_failed=True, reason=error.strerror or str(error))
    return Outcome(leftover=leftover, is_removed=not reason, reason=reason)


@contextlib.contextmanager
def _swept(path: str) -> Iterator[int]:
    """A namespace that no driver holds nor can take meanwhile; empty streams go at the end. Raises ConfigError."""
    with directory(path) as place:
        namespace = os.open(".", FOLDER_FLAGS, dir_fd=place)
    try:
        lock = NamespaceLock(namespace, path, is_sweeper=True)
        try:
            yield namespace
            for name in os.listdir(namespace):
                if name.isdecimal():
                    with contextlib.suppress(OSError):
                        os.rmdir(name, dir_fd=namespace)  # only those that are empty
        finally:
            lock.release()
    finally:
        os.close(namespace)


def _still_dead(path: str, dead: list[FoundEpoch], clock: Clock, window_ns: int) -> list[FoundEpoch]:
    """Those that are still dead under the lock, which keeps a driver from adopting them."""
    found = scan_epochs(path)
    now_ns, wall_ns = clock.monotonic_ns(), clock.realtime_ns()
    for epoch in found:
        if epoch.superblock is not None:
            facts = liveness_of(epoch.superblock, now_ns, wall_ns)
            if facts.is_process_alive or facts.is_active(window_ns):
                return []
    before = {epoch.path for epoch in dead}
    return [epoch for epoch in found if epoch.path in before]


def _retire(epoch: FoundEpoch, namespace: int) -> str:
    """Rename, so that no client sees half an epoch, then delete. Raises OSError; returns "" for `outcome_of`."""
    retired = f".{epoch.epoch}.retired"
    stream = os.open(str(epoch.stream_id), FOLDER_FLAGS, dir_fd=namespace)
    try:
        if not epoch.is_retired:
            contents = _look_into(str(epoch.epoch), stream)
            if contents.strangers:
                raise OSError(errno.ENOTEMPTY, strangers_in(contents))
            _delete(retired, stream)  # what an interrupted removal left under the same number
            os.rename(str(epoch.epoch), retired, src_dir_fd=stream, dst_dir_fd=stream)
        _delete(retired, stream)
    finally:
        os.close(stream)
    return ""


def _look_into(name: str, stream: int) -> Contents:
    folder = os.open(name, FOLDER_FLAGS, dir_fd=stream)
    try:
        return contents_of(folder, REGION_FILES)
    finally:
        os.close(folder)


def _delete(name: str, stream: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        folder = os.open(name, FOLDER_FLAGS, dir_fd=stream)
        try:
            clear(folder, contents_of(folder, REGION_FILES))
        finally:
            os.close(folder)
        os.rmdir(name, dir_fd=stream)
