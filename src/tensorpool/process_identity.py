# SPDX-License-Identifier: Apache-2.0
"""Which process something belongs to, in terms that another process can check: not a pid alone, which is given again.

A declared identity is checked only where it can be: on the same run of the same kernel, in the same namespaces of pids
and of time (start times differ between the latter). Elsewhere, and wherever /proc does not say, a process counts as
running.
"""

from __future__ import annotations

import os
from typing import Annotated, Final, Self

import msgspec
from msgspec import Meta

MAX_PID: Final = 2**31 - 1
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A process, as it declares itself.

    >>> me = ProcessIdentity.own()
    >>> me.pid == os.getpid(), me.has_ended()
    (True, False)
    """

    pid: Annotated[int, Meta(ge=1, le=MAX_PID)]  # as its own namespace numbers it
    start_ticks: int  # field 22 of /proc/PID/stat
    pid_namespace: int  # the inode of /proc/PID/ns/pid
    time_namespace: int  # the inode of /proc/PID/ns/time; 0 on kernels without
    boot_id: Annotated[str, Meta(max_length=64)]

    @classmethod
    def own(cls) -> Self | None:
        """Of this process; None where /proc does not say."""
        try:
            with open(_BOOT_ID, encoding="utf-8") as file:
                boot_id = file.read().strip()
            pid_namespace = os.stat("/proc/self/ns/pid").st_ino
        except (OSError, ValueError):
            return None
        try:
            time_namespace = os.stat("/proc/self/ns/time").st_ino
        except OSError:
            time_namespace = 0
        stat = process_stat("self")
        if stat is None:
            return None
        return cls(
            pid=os.getpid(),
            start_ticks=stat.start_ticks,
            pid_namespace=pid_namespace,
            time_namespace=time_namespace,
            boot_id=boot_id,
        )

    def has_ended(self) -> bool:
        """Whether this process can see that it runs no more; False where it cannot tell. A zombie has ended."""
        here = ProcessIdentity.own()
        if here is None or here._place != self._place:
            return False
        try:
            os.kill(self.pid, 0)  # asks, sends nothing
        except ProcessLookupError:
            return True
        except OSError:
            pass  # it exists and is another user's
        if not _is_proc_of_own_namespace():
            return False
        stat = process_stat(self.pid)
        return stat is not None and (stat.start_ticks != self.start_ticks or stat.has_ended)

    def user_id(self) -> int | None:
        """The account that runs it, as this process sees it; None where it cannot tell."""
        here = ProcessIdentity.own()
        if here is None or here._place != self._place or not _is_proc_of_own_namespace():
            return None
        stat = process_stat(self.pid)
        if stat is None or stat.start_ticks != self.start_ticks:
            return None
        try:
            with open(f"/proc/{self.pid}/status", encoding="utf-8", errors="replace") as file:
                # The owner of the directory would be root for a process that may not be dumped.
                return next((int(line.split()[2]) for line in file if line.startswith("Uid:")), None)
        except (OSError, ValueError, IndexError):
            return None

    def place(self) -> str:
        """Where it runs, seen from this process: "" for the same host and namespaces, "container" or "other host"."""
        here = ProcessIdentity.own()
        if here is None or here.boot_id != self.boot_id:
            return "other host"
        return "" if here._place == self._place else "container"

    @property
    def _place(self) -> tuple[str, int, int]:
        return self.boot_id, self.pid_namespace, self.time_namespace


class ProcessStat(msgspec.Struct, frozen=True):
    """What /proc/PID/stat says."""

    state: str
    threads: int
    start_ticks: int  # since boot

    @property
    def has_ended(self) -> bool:
        """A zombie has, or a dead process; not one whose first thread has ended before the others."""
        return self.state in ("Z", "X") and self.threads <= 1


def process_stat(pid: int | str) -> ProcessStat | None:
    """Of a process, or of "self"; None without a readable /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name comes second, in parentheses, and may itself hold spaces and parentheses.
            fields = file.read().rpartition(")")[2].split()
        return ProcessStat(fields[0], int(fields[17]), int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def _is_proc_of_own_namespace() -> bool:
    """Whether /proc numbers processes as we do; one of an outer namespace shows others under the same numbers."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False
