# SPDX-License-Identifier: Apache-2.0
"""Leftovers of every kind: epochs, embedded drivers (`tp.local()`), media drivers; found, explained, removed.

    kind            dead when
    epoch           no driver holds the namespace, its process is gone, its stamp is stale: `tensorpool.shm.leftovers`
    embedded        its lock is free, and nothing in it has a process or a recent sign of life
    media driver    its process is gone and its heartbeat is older than Aeron's timeout

Each is looked at again under the lock that its makers take, renamed out of sight, and then deleted. What is another
user's, a link, or holds anything that its kind does not have is left alone and reported. Wire §15.21a.7; decision C11.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final

from tensorpool.aeron.media_driver import alone_in
from tensorpool.aeron.transport import DRIVER_TIMEOUT_MS
from tensorpool.clock import SystemClock
from tensorpool.diagnosis.check_result import CheckResult, ok, size, warn
from tensorpool.diagnosis.cnc import CNC_NAME, read_cnc
from tensorpool.driver.config import DriverConfig
from tensorpool.embedded import LOCK, PREFIX, ROOT
from tensorpool.errors import TransportError
from tensorpool.file_access import user_name
from tensorpool.shm.epochs import scan_epochs
from tensorpool.shm.leftovers import (
    GONE,
    LIVES,
    Contents,
    Kept,
    Leftover,
    Outcome,
    Survey,
    clear,
    contents_of,
    outcome_of,
    remove_epochs,
    strangers_in,
    survey,
)
from tensorpool.shm.liveness import liveness_of
from tensorpool.shm.namespace import FOLDER_FLAGS, find_namespaces, lock_holder

CHECK: Final = "leftovers"
EMBEDDED: Final = "embedded driver"
MEDIA_DRIVER: Final = "media driver"
LIVENESS_PERIODS: Final = 4  # wire §15.14
UNFINISHED: Final = "tensorpool-new-"
BEING_MADE_S: Final = 60.0
RETIRED: Final = ".retired-"

_AERON: Final = r"cnc\.dat|loss-report\.dat|(publications|images)(/[^/]+\.logbuffer)?"
_EPOCH: Final = r"[0-9]+(/\.?[0-9]+(\.retired)?(/(header\.ring|[0-9]+\.pool))?)?"
_AERON_FILES: Final = re.compile(_AERON)
_NAMESPACE: Final = rf"driver\.lock|highest-epoch\.[0-9]+|{_EPOCH}"
_EMBEDDED_FILES: Final = re.compile(
    rf"owner\.lock|aeron(/({_AERON}))?|regions(/tensorpool-[^/]+(/[^/]+(/({_NAMESPACE}))?)?)?"
)


def survey_everything(config: DriverConfig, aeron_dir: str) -> Survey:
    """All kinds, wherever this configuration and this host keep them. Changes nothing."""
    window_ns = _window_ns(config)
    bases = dict.fromkeys(map(os.path.realpath, config.shm.allowed_base_dirs))
    folders = dict.fromkeys([os.path.realpath(aeron_dir), *_below_root("aeron-")])
    return Survey.together(
        [
            *(survey(base, SystemClock(), window_ns) for base in bases),
            *(_survey_embedded(path, window_ns) for path in _below_root(PREFIX)),
            *(_survey_unfinished(path) for path in _below_root(UNFINISHED)),
            *(_survey_media_driver(path) for path in folders),
        ]
    )


def remove(found: Survey, config: DriverConfig) -> Iterator[Outcome]:
    """Remove what a survey called dead, as far as it still is. Two at once share the work."""
    window_ns = _window_ns(config)
    epochs = [leftover for leftover in found.dead if leftover.kind not in (EMBEDDED, MEDIA_DRIVER)]
    yield from remove_epochs(epochs, SystemClock(), window_ns)
    for leftover in found.dead:
        if leftover.kind == EMBEDDED:
            yield outcome_of(leftover, partial(_remove_embedded, leftover.path, window_ns))
        elif leftover.kind == MEDIA_DRIVER:
            yield outcome_of(leftover, partial(_remove_media_driver, leftover.path))


def check_leftovers(found: Survey) -> list[CheckResult]:
    """What the doctor says of a survey."""
    findings = [warn(CHECK, f"{kept.path}: {kept.reason}", "none is taken by --gc") for kept in found.kept]
    if found.dead:
        total = size(sum(leftover.memory_bytes for leftover in found.dead))
        kinds = ", ".join(f"{count} of kind {kind}" for kind, count in _counted(found.dead))
        text = f"{len(found.dead)} directories of dead processes hold {total}: {kinds}"
        findings.insert(0, warn(CHECK, text, "tensorpool doctor --gc"))
    return findings or [ok(CHECK, f"none; {found.living} directories belong to living processes")]


def _counted(dead: Iterable[Leftover]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for leftover in dead:
        counts[leftover.kind] = counts.get(leftover.kind, 0) + 1
    return sorted(counts.items())


def _window_ns(config: DriverConfig) -> int:
    return LIVENESS_PERIODS * max(config.announce_period_ns, 1_000_000_000)


def _below_root(prefix: str) -> list[str]:
    try:
        with os.scandir(ROOT) as entries:
            return sorted(entry.path for entry in entries if entry.name.startswith(prefix))
    except OSError:
        return []


# --- embedded drivers


def _survey_embedded(path: str, window_ns: int) -> Survey:
    try:
        with _opened(path) as folder:
            holder = lock_holder(os.path.join(path, LOCK))
            sign = None if holder is not None else _sign_of_life(path, window_ns)
            if holder is not None or sign is not None:
                return Survey(living=1)
            contents = contents_of(folder, _EMBEDDED_FILES)
    except FileNotFoundError:
        return Survey()
    except OSError as error:
        return _kept(path, error.strerror or str(error))
    if LOCK not in contents.files:
        return _kept(path, f"without {LOCK} nothing says whose it is; `rm -r` it if you know")
    if contents.strangers:
        return _kept(path, strangers_in(contents))
    why = (f"its lock is free ({LOCK})", "no process of it is left, nor a recent sign of life")
    return Survey(dead=(Leftover(kind=EMBEDDED, path=path, memory_bytes=contents.memory_bytes, why=why),))


def _survey_unfinished(path: str) -> Survey:
    """Made by `tp.local()` for an instant, until it is locked."""
    try:
        found = os.lstat(path)
    except OSError:
        return Survey()
    is_new = time.time() - found.st_mtime < BEING_MADE_S
    if is_new or lock_holder(os.path.join(path, LOCK)) is not None:
        return Survey(living=1)
    return _kept(path, f"probably a start that was interrupted; `rm -r {path}`")


def _remove_embedded(path: str, window_ns: int) -> str:
    """As `outcome_of` wants it."""
    with _opened(path) as folder:
        lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(folder, path):
                return GONE
            sign = _sign_of_life(path, window_ns)
            if sign is not None:
                return f"{LIVES}: {sign}"
            return _retire(path, folder, _EMBEDDED_FILES, last=LOCK)
        except BlockingIOError:
            return "a process holds its lock by now"
        finally:
            os.close(lock)


def _sign_of_life(path: str, window_ns: int) -> str | None:
    """Something below an embedded driver's directory that lives, or did a moment ago."""
    facts = read_cnc(os.path.join(path, "aeron"))
    if facts is not None and (facts.is_process_alive or not facts.is_silent(window_ns / 1e9)):
        return f"its media driver, pid {facts.pid}, lives or did a moment ago"
    for namespace in find_namespaces(os.path.join(path, "regions")):
        found = scan_epochs(namespace)
        now_ns, wall_ns = time.monotonic_ns(), time.time_ns()
        for epoch in found:
            if epoch.superblock is not None:
                life = liveness_of(epoch.superblock, now_ns, wall_ns)
                if life.is_process_alive or life.is_active(window_ns):
                    return f"its driver, pid {life.pid}, lives or did a moment ago"
    return None


# --- media drivers


def _survey_media_driver(path: str) -> Survey:
    if _is_anothers(path):
        return _survey_anothers(path)
    try:
        with _opened(path) as folder:
            facts = read_cnc(".", folder)
            contents = contents_of(folder, _AERON_FILES)
    except FileNotFoundError:
        return Survey()
    except OSError as error:
        return _kept(path, error.strerror or str(error))
    if facts is None:
        return _kept(path, f"without a {CNC_NAME} that can be read nothing says whose it is; `rm -r` it if you know")
    if facts.is_process_alive or not facts.is_silent(DRIVER_TIMEOUT_MS / 1000):
        return Survey(living=1)
    if contents.strangers:
        return _kept(path, strangers_in(contents))
    why = (f"pid {facts.pid}, which ran it, is gone", f"last heartbeat {facts.heartbeat_age_s or 0:.0f} s ago")
    return Survey(dead=(Leftover(kind=MEDIA_DRIVER, path=path, memory_bytes=contents.memory_bytes, why=why),))


def _is_anothers(path: str) -> bool:
    try:
        return os.lstat(path).st_uid != os.geteuid()
    except OSError:
        return False


def _survey_anothers(path: str) -> Survey:
    """Of another user's media driver: what lives is no leftover, and neither is what we may not look into."""
    try:
        facts = read_cnc(path)
    except PermissionError:
        return Survey()
    if facts is not None and (facts.is_process_alive or not facts.is_silent(DRIVER_TIMEOUT_MS / 1000)):
        return Survey(living=1)
    owner = user_name(os.lstat(path).st_uid)
    return _kept(path, f"it belongs to {owner}, who may run `tensorpool doctor --gc`")


def _remove_media_driver(path: str) -> str:
    """As `outcome_of` wants it."""
    try:
        with alone_in(os.path.dirname(path)), _opened(path) as folder:
            facts = read_cnc(".", folder)
            if facts is None or not _is_at(folder, path):
                return GONE
            if facts.is_process_alive or not facts.is_silent(DRIVER_TIMEOUT_MS / 1000):
                return LIVES
            return _retire(path, folder, _AERON_FILES, last=CNC_NAME)
    except TransportError as error:
        return str(error)  # one is being started there


# --- both


def _retire(path: str, folder: int, known: re.Pattern[str], *, last: str) -> str:
    """Rename the open directory out of sight, then delete it; `last` goes last, since it says whose the rest is."""
    contents = contents_of(folder, known)
    if contents.strangers:
        raise OSError(errno.ENOTEMPTY, strangers_in(contents))
    retired = path if RETIRED in os.path.basename(path) else f"{path}{RETIRED}{os.getpid()}"
    if retired != path:
        os.rename(path, retired)
    files = tuple(name for name in contents.files if name != last)
    clear(folder, Contents(files, contents.folders, (), 0))
    clear(folder, Contents((last,), (), (), 0))
    os.rmdir(retired)
    return ""


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    """A directory of our own, not followed through a link. Raises OSError: PermissionError for another user's."""
    try:
        folder = os.open(path, FOLDER_FLAGS)
    except NotADirectoryError:
        raise NotADirectoryError(errno.ENOTDIR, "it is a link or no directory") from None
    except PermissionError:
        owner = user_name(os.lstat(path).st_uid)
        raise PermissionError(errno.EACCES, f"it belongs to {owner}, who may run `tensorpool doctor --gc`") from None
    try:
        owner_id = os.fstat(folder).st_uid
        if owner_id != os.geteuid():
            name = user_name(owner_id)
            raise PermissionError(errno.EPERM, f"it belongs to {name}, who may run `tensorpool doctor --gc`")
        yield folder
    finally:
        os.close(folder)


def _is_at(folder: int, path: str) -> bool:
    return os.path.samestat(os.fstat(folder), os.lstat(path))


def _kept(path: str, reason: str) -> Survey:
    return Survey(kept=(Kept(path=path, reason=reason),))
