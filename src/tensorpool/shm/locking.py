# SPDX-License-Identifier: Apache-2.0
"""Locked memory: what this process may lock, and whether the platform locks any. Driver Model §17; decision E37."""

from __future__ import annotations

import errno
import os
import resource
from typing import Final

from tensorpool._core import Mapping

_CAP_IPC_LOCK: Final = 14
_UNSUPPORTED: Final = frozenset({errno.ENOSYS, errno.EOPNOTSUPP})


def is_unsupported(error: OSError) -> bool:
    """Whether an error of mlock says that this platform has none."""
    return error.errno in _UNSUPPORTED


def can_lock() -> bool:
    """Whether this platform locks memory: one page is tried."""
    fd = os.memfd_create("tensorpool-mlock", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, os.sysconf("SC_PAGE_SIZE"))
        Mapping(fd, os.sysconf("SC_PAGE_SIZE"), writable=True).lock()
    except OSError as error:
        return not is_unsupported(error)  # what else is refused is a matter of `lockable_bytes`
    finally:
        os.close(fd)
    return True


def lockable_bytes() -> int | None:
    """How much memory this process may lock; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY or _has_capability(_CAP_IPC_LOCK) else soft


def _has_capability(number: int) -> bool:
    try:
        with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
            effective = next(line.split()[1] for line in file if line.startswith("CapEff:"))
    except (OSError, StopIteration):
        return False
    return bool(int(effective, 16) >> number & 1)
