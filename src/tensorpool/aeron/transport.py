# SPDX-License-Identifier: Apache-2.0
"""Connections, publications and subscriptions: the seam over the Aeron binding.

The objects come from `tensorpool._core`, which makes them safe to misuse: a call after `close()` raises `Closed`, a
close inside a handler or from another thread takes effect when the last call has left, an object from before a fork
refuses everything, and Aeron's errors never end the process. Back pressure is a falsy `OfferResult`.
"""

from __future__ import annotations

import os
import stat
import struct
from enum import IntEnum

from tensorpool import _core
from tensorpool._core import (
    Client,
    Counter,
    CounterReading,
    ImageEvent,
    MessageInfo,
    OfferResult,
    Publication,
    Subscription,
)
from tensorpool.aeron import library
from tensorpool.errors import TransportError
from tensorpool.file_access import group_name, joining, user_name

__all__ = [
    "Bell",
    "Client",
    "Counter",
    "CounterReading",
    "ImageEvent",
    "MessageInfo",
    "OfferResult",
    "Publication",
    "Subscription",
    "connect",
    "default_aeron_dir",
    "driver_pid",
    "explain_denial",
    "is_driver_active",
]

DRIVER_TIMEOUT_MS = 10_000
MAX_NAME = 80  # Aeron takes 100 characters
_CNC_PID = struct.Struct("<40xq")


class Bell(IntEnum):
    """Which messages a ring is about. Other implementations do not ring: who naps on a bell polls now and then."""

    CONTROL = 0  # requests to the driver, commands to services
    DISCOVERY = 1  # requests to a provider


def default_aeron_dir() -> str:
    """The media driver's directory when none is given: AERON_DIR, else Aeron's own default."""
    library.load()
    return os.environ.get("AERON_DIR") or _core.aeron_default_dir()


def is_driver_active(aeron_dir: str | None = None, *, timeout_ms: int = DRIVER_TIMEOUT_MS) -> bool:
    """Whether a media driver has given a sign of life at `aeron_dir` within the last `timeout_ms`."""
    library.load()
    return _core.is_driver_active(aeron_dir or default_aeron_dir(), timeout_ms)


def explain_denial(aeron_dir: str) -> str | None:
    """Why this process may not use the media driver at `aeron_dir`, and what helps; None where it may, or none is."""
    cnc = os.path.join(aeron_dir, "cnc.dat")
    for path, needed in ((aeron_dir, os.X_OK), (cnc, os.R_OK | os.W_OK)):
        try:
            found = os.stat(path)
        except OSError:
            return None
        if not os.access(path, needed, effective_ids=True):
            owner, me = user_name(found.st_uid), user_name(os.geteuid())
            pid = driver_pid(aeron_dir)
            state = "is alive" if pid is not None and os.path.exists(f"/proc/{pid}") else "may be alive"
            return (
                f"the media driver at {aeron_dir} {state} and belongs to {owner}: {path} has group "
                f"{group_name(found.st_gid)} and mode {stat.S_IMODE(found.st_mode):04o}, and {me} (uid {os.geteuid()}) "
                f"may not use it; {joining(found, needed)}, or use one of your own (AERON_DIR=/dev/shm/aeron-{me} "
                "tensorpool driver)"
            )
    return None


def driver_pid(aeron_dir: str) -> int | None:
    """The process that runs, or ran, the driver at `aeron_dir`, as its command-and-control file names it."""
    try:
        with open(os.path.join(aeron_dir, "cnc.dat"), "rb") as cnc:
            head = cnc.read(_CNC_PID.size)
    except OSError:
        return None
    return _CNC_PID.unpack(head)[0] if len(head) == _CNC_PID.size else None


def connect(
    aeron_dir: str | None = None,
    *,
    client_name: str = "tensorpool",
    driver_timeout_ms: int = DRIVER_TIMEOUT_MS,
    keepalive_interval_ns: int = 500_000_000,
    idle_sleep_ns: int = 16_000_000,
) -> Client:
    """Connect to the media driver at `aeron_dir`.

    >>> client = connect("/dev/shm/aeron-me")          # doctest: +SKIP
    >>> publication = client.add_publication("aeron:ipc?term-length=4m", 1000)   # doctest: +SKIP

    Raises `TransportError` at once when no media driver is alive there.
    """
    directory = aeron_dir or default_aeron_dir()
    if not is_driver_active(directory, timeout_ms=driver_timeout_ms):
        denial = explain_denial(directory)
        if denial is not None:
            raise TransportError(denial)
        raise TransportError(
            f"no media driver is alive at {directory}; start one (`tensorpool driver`) or name another with --aeron-dir"
        )
    client = _core.Client(
        directory,
        client_name=f"{client_name[:MAX_NAME]} pid={os.getpid()}",
        driver_timeout_ms=driver_timeout_ms,
        keepalive_interval_ns=keepalive_interval_ns,
        idle_sleep_ns=idle_sleep_ns,
    )
    library.close_at_exit(client, library.ClosingTurn.CLIENT)
    return client
