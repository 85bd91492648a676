# SPDX-License-Identifier: Apache-2.0
"""Connections, publications and subscriptions: the seam over the Aeron binding.

The objects come from `tensorpool._core`, which makes them safe to misuse: a call after `close()` raises `Closed`, a
close inside a handler or from another thread takes effect when the last call has left, an object from before a fork
refuses everything, and Aeron's errors never end the process. Back pressure is a falsy `OfferResult`.
"""

from __future__ import annotations

import os

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

__all__ = [
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
    "is_driver_active",
]

DRIVER_TIMEOUT_MS = 10_000
MAX_NAME = 80  # Aeron takes 100 characters


def default_aeron_dir() -> str:
    """The media driver's directory when none is given: AERON_DIR, else Aeron's own default."""
    library.load()
    return os.environ.get("AERON_DIR") or _core.aeron_default_dir()


def is_driver_active(aeron_dir: str | None = None, *, timeout_ms: int = DRIVER_TIMEOUT_MS) -> bool:
    """Whether a media driver has given a sign of life at `aeron_dir` within the last `timeout_ms`."""
    library.load()
    return _core.is_driver_active(aeron_dir or default_aeron_dir(), timeout_ms)


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
    library.close_at_exit(client)
    return client
