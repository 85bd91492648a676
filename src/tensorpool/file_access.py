# SPDX-License-Identifier: Apache-2.0
"""Who may open files: names of users and groups, and modes that no umask changes.

Region files and the files of a media driver have one group and one mode, so that the same accounts may use both. Only
their owner may create, remove or replace them: the directories give the group no right to write.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import struct
from typing import Final

import msgspec

from tensorpool.errors import ConfigError

_ACL_DEFAULT: Final = "system.posix_acl_default"
_ACL_VERSION: Final = struct.pack("<I", 2)
_ACL_USER, _ACL_GROUP, _ACL_OTHER = 0x01, 0x04, 0x20
_ACL_NO_ID: Final = 0xFFFF_FFFF


class FileAccess(msgspec.Struct, frozen=True):
    """The mode of files, and the group that they belong to; None leaves them the group that the system gives."""

    file_mode: int
    gid: int | None = None

    @property
    def directory_mode(self) -> int:
        return directory_mode(self.file_mode)

    def set_directory(self, fd: int) -> None:
        """Give a directory of ours its group and mode. Raises OSError."""
        if self.gid is not None and os.fstat(fd).st_gid != self.gid:
            os.fchown(fd, -1, self.gid)
        os.fchmod(fd, self.directory_mode)

    def set_file(self, path: str) -> None:
        """Give a file of ours its group and mode. Raises OSError."""
        if self.gid is not None:
            os.chown(path, -1, self.gid, follow_symlinks=False)
        os.chmod(path, self.file_mode)

    def set_default(self, fd: int) -> bool:
        """Have files that are created in a directory get the mode, whatever the umask; False where that cannot be."""
        entries = ((_ACL_USER, 6), (_ACL_GROUP, self.file_mode >> 3 & 6), (_ACL_OTHER, 0))
        acl = b"".join(struct.pack("<HHI", tag, permissions, _ACL_NO_ID) for tag, permissions in entries)
        try:
            os.setxattr(fd, _ACL_DEFAULT, _ACL_VERSION + acl)
        except OSError:
            return False
        return True


def directory_mode(file_mode: int) -> int:
    """The mode of the directories around files of `file_mode`: the group may list and search, and never write.

    >>> f"{directory_mode(0o660):o} {directory_mode(0o600):o}"
    '2750 700'
    """
    if not file_mode & 0o060:
        return 0o700
    # setgid: what is created inside belongs to the group of the directory, not to the creator's own.
    return stat.S_ISGID | 0o710 | file_mode & 0o040


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


def group_id(key: str, group: str) -> int | None:
    """The number of a group that this process may give files to; None for "". Raises ConfigError."""
    if not group:
        return None
    try:
        gid = int(group) if group.isascii() and group.isdecimal() else grp.getgrnam(group).gr_gid
    except KeyError:
        accepted = f"a group of this host; make it (groupadd {group}) and add the accounts (usermod -aG {group} NAME)"
        raise ConfigError(key, group, accepted) from None
    if os.geteuid() != 0 and gid not in (os.getegid(), *os.getgroups()):
        me = user_name(os.geteuid())
        accepted = f"a group of {me}, who runs this: usermod -aG {group} {me}, then log in again"
        raise ConfigError(key, group, accepted)
    return gid


def joining(found: os.stat_result, needed: int) -> str:
    """What would let this process have `needed` (rwx) of a file or directory; never the advice to join group root."""
    me, owner, group = user_name(os.geteuid()), user_name(found.st_uid), group_name(found.st_gid)
    has_mode, is_root = found.st_mode >> 3 & needed == needed, found.st_gid == 0
    if has_mode and not is_root:
        return f"add {me} to group {group} (usermod -aG {group} {me}) and start anew"
    is_member = not is_root and found.st_gid in (os.getegid(), *os.getgroups())
    changes = [] if is_member else [f"shm.group to a group of {owner} and {me}"]
    changes += [] if has_mode else ['shm.permissions_mode to "660"']
    return f"have {owner} set {' and '.join(changes)}, and restart the driver"


def own_groups() -> str:
    """The groups of this process, by name."""
    return ", ".join(group_name(gid) for gid in sorted({os.getegid(), *os.getgroups()}))
