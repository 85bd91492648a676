# SPDX-License-Identifier: Apache-2.0
"""A media driver by its command-and-control file: who runs it, since when, and when it last gave a sign of life.

Reads the file and connects to nothing. The places of the fields are those of Aeron's CnC version 0.2: the driver's
heartbeat lies in the trailer of the ring buffer to the driver, which begins behind 128 bytes of metadata.
"""

from __future__ import annotations

import os
import struct
import time
from typing import Final

import msgspec

from tensorpool.shm.liveness import is_process_alive

CNC_NAME: Final = "cnc.dat"
_METADATA: Final = struct.Struct("<ii16xqqq")  # version, to-driver length, client liveness, start, pid
_METADATA_BYTES: Final = 128
_HEARTBEAT_FROM_END: Final = 128  # of the to-driver buffer: the last of six padded fields
_KNOWN_MAJOR_MINOR: Final = (0, 2)


class CncFacts(msgspec.Struct, frozen=True):
    """What the file says. `heartbeat_age_s` is None in a layout that we do not know, or before the first beat."""

    version: str
    pid: int
    is_process_alive: bool
    heartbeat_age_s: float | None
    client_liveness_timeout_s: float

    def is_silent(self, seconds: float) -> bool:
        """Whether there is a heartbeat that is older."""
        return self.heartbeat_age_s is not None and self.heartbeat_age_s > seconds


def read_cnc(aeron_dir: str, dir_fd: int | None = None) -> CncFacts | None:
    """The facts; None where there is no such file that could be one. Raises PermissionError.

    `aeron_dir` is relative to `dir_fd` where that is given.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(os.path.join(aeron_dir, CNC_NAME), flags, dir_fd=dir_fd)
    except PermissionError:
        raise
    except OSError:
        return None
    try:
        head = os.pread(fd, _METADATA.size, 0)
        if len(head) < _METADATA.size:
            return None
        version, to_driver_bytes, liveness_ns, started_ms, pid = _METADATA.unpack(head)
        major, minor, patch = version >> 16, version >> 8 & 0xFF, version & 0xFF
        beat_ms = 0
        if (major, minor) == _KNOWN_MAJOR_MINOR:
            word = os.pread(fd, 8, _METADATA_BYTES + to_driver_bytes - _HEARTBEAT_FROM_END)
            beat_ms = int.from_bytes(word, "little", signed=True)
    except OSError:
        return None
    finally:
        os.close(fd)
    started_ns = started_ms * 1_000_000 - (time.time_ns() - time.monotonic_ns())
    age_s = max(time.time_ns() / 1e9 - beat_ms / 1e3, 0.0) if beat_ms > 0 else None
    return CncFacts(f"{major}.{minor}.{patch}", pid, is_process_alive(pid, started_ns), age_s, liveness_ns / 1e9)
