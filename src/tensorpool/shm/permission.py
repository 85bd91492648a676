# SPDX-License-Identifier: Apache-2.0
"""Who may touch the memory: modes for files and directories, and words for the one who may not.

Modes are set with fchmod, so that no umask changes them (D9). Wire §15.10, §15.21a.6; decisions D9, J.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from typing import Final

from tensorpool.errors import ConfigError

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


def directory_mode(file_mode: int) -> int:
    """The mode of the directories around files of `file_mode`.

    >>> f"{directory_mode(0o660):o} {directory_mode(0o600):o}"
    '2770 700'
    """
    search = (file_mode & 0o444) >> 2 | (file_mode & 0o222) >> 1
    # setgid: what one member of the group creates belongs to the group, not to the member's own.
    return file_mode | search | (stat.S_ISGID if file_mode & stat.S_IWGRP else 0)


def user_name(uid: int) -> str:
    """The account's name, or its number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """The group's name, or its number where it has none."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


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
    user, group = user_name(os.geteuid()), group_name(found.st_gid)
    if found.st_gid == 0:
        fix = (
            f"have {user_name(found.st_uid)} run the driver in a group of both, below a directory of that group (group "
            "root is no group to join)"
        )
    elif found.st_mode >> 3 & needed == needed:
        fix = f"add {user} to group {group} (usermod -aG {group} {user}) and start anew"
    else:
        fix = (
            'have the driver create it with shm.permissions_mode = "660", below a directory whose group is '
            f"one of {user}'s"
        )
    groups = ", ".join(group_name(gid) for gid in sorted({os.getegid(), *os.getgroups()}))
    return (
        f"this process may not {what} {obstacle}: it runs as {user} (uid {os.geteuid()}), groups {groups}; "
        f"found owner {user_name(found.st_uid)}:{group}, mode {stat.S_IMODE(found.st_mode):04o}; {fix}"
    )


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None
