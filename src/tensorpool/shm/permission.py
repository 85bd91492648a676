# SPDX-License-Identifier: Apache-2.0
"""Who may touch the memory: which modes region files can have, and words for the process that may not.

Modes are set with fchmod, so that no umask changes them (D9). Wire §15.10, §15.21a.6; decisions D9, J.
"""

from __future__ import annotations

import os
import stat
from typing import Final

from tensorpool.errors import ConfigError
from tensorpool.file_access import group_name, joining, own_groups, user_name

FILE_MODE: Final = 0o660
_FILE_BITS: Final = 0o660


def check_file_mode(mode: int) -> int:
    """`mode` if regions can have it: rw for the owner, nothing for others, nothing executable. Raises ConfigError."""
    accepted = "600, 640, 660 and the like: rw for the owner, no x"
    if mode & 0o007:
        accepted = "no access for others: 660, with the users who attach in one group, or 640, 600"
    if mode & ~_FILE_BITS or mode & 0o600 != 0o600:
        raise ConfigError("shm.permissions_mode", f"{mode:o}", accepted)
    return mode


def explain_denial(path: str, *, writable: bool) -> str:
    """Who we are, whose the file or the directory in the way is, and what would help."""
    obstacle, found = path, _stat(path)
    while found is None and obstacle != "/":
        obstacle = os.path.dirname(obstacle)
        found = _stat(obstacle)
    if found is None:
        return f"{path} is out of reach for uid {os.geteuid()}"
    if obstacle != path:
        needed, what = 0o1, "search"
    else:
        needed, what = (0o6, "read and write") if writable else (0o4, "read")
    return (
        f"this process may not {what} {obstacle}: it runs as {user_name(os.geteuid())} (uid {os.geteuid()}), groups "
        f"{own_groups()}; found owner {user_name(found.st_uid)}:{group_name(found.st_gid)}, mode "
        f"{stat.S_IMODE(found.st_mode):04o}; {joining(found, needed)}"
    )


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None
