# SPDX-License-Identifier: Apache-2.0
"""One recorder per recording.

The lock goes with the recorder's process. Its JVM may live on for a moment after the recorder was killed, and could
still commit; so the lock's file names it, and the next recorder waits until it is gone.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final

import msgspec

from tensorpool.errors import LocalProtocolError
from tensorpool.lake.ring_reader import this_host
from tensorpool.shm.liveness import is_process_alive

WAIT_S: Final = 20.0


class _Holder(msgspec.Struct, frozen=True):
    pid: int
    since_ns: int
    host: str


class RecordingLock:
    """Raises LocalProtocolError where another recorder runs, or the JVM of an earlier one does not end."""

    def __init__(self, path: Path, name: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        advice = "stop it, or give this recording another name"
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LocalProtocolError(f"recording {name!r} is running already ({path}); {advice}") from None
            until_s = time.monotonic() + WAIT_S
            while (holder := self._living()) is not None:
                if time.monotonic() > until_s:
                    raise LocalProtocolError(
                        f"the Spark of an earlier recording {name!r}, pid {holder.pid}, does not end; {advice}"
                    )
                time.sleep(0.05)
        except BaseException:
            self.release()
            raise

    def tell(self, pid: int | None) -> None:
        """Name the process that must be gone before the recording may go on."""
        os.ftruncate(self._fd, 0)
        if pid is not None:
            os.pwrite(self._fd, msgspec.json.encode(_Holder(pid, time.monotonic_ns(), this_host())), 0)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _living(self) -> _Holder | None:
        try:
            holder = msgspec.json.decode(os.pread(self._fd, 4096, 0), type=_Holder)
        except msgspec.DecodeError:
            return None  # no holder, or one that died while it wrote this
        is_here = holder.host == this_host() and holder.pid != os.getpid()
        return holder if is_here and is_process_alive(holder.pid, holder.since_ns) else None
