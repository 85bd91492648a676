# SPDX-License-Identifier: Apache-2.0
"""One deployment for all tests of the lake and of the pipeline; what a test starts ends with it.

pool        a driver with streams of several shapes of memory, see PROFILES
client      a client of that driver, closed with the test
stream      makes a stream of a profile, with an id that no other test has
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.wire.driver import Role
from tests.support.processes import wait_until

# By name: slots, the bytes of the largest frame, and how many streams there are from the start.
PROFILES: Final = {
    "default": (256, 4096, 0),
    "tiny": (8, 4096, 48),
    "deep": (4096, 4096, 64),
    "large": (16, 16 << 20, 6),
}
FIRST_ID: Final = {"default": 20_000, "tiny": 10_000, "deep": 11_000, "large": 12_000}
ANNOUNCE_MS: Final = 1000
LOOK_EVERY_S: Final = 0.05

_ids: Final = {name: itertools.count(first) for name, first in FIRST_ID.items()}


def deployment(**more: Any) -> dict[str, Any]:
    """Settings of a driver whose streams have the shapes of PROFILES; those of the default one are made on demand."""
    settings: dict[str, Any] = {
        "policies.allow_dynamic_streams": True,
        "policies.default_profile": "default",
        "policies.max_streams": 256,
        "policies.announce_period_ms": ANNOUNCE_MS,
        "policies.epoch_gc_min_age_ns": 20_000_000_000,
        "driver.stream_id_range": [20_000, 29_999],
    }
    for name, (nslots, stride, streams) in PROFILES.items():
        pools = [{"pool_id": 1, "stride_bytes": 256}, {"pool_id": 2, "stride_bytes": stride}]
        settings[f"profiles.{name}"] = {"header_nslots": nslots, "payload_pools": pools}
        for index in range(streams):
            settings[f"streams.{name}-{index}"] = {"stream_id": FIRST_ID[name] + index, "profile": name}
    return settings | more


@pytest.fixture(scope="session")
def pool() -> Iterator[tp.Local]:
    """A driver for tests that do not end it."""
    with tp.local(overrides=deployment()) as pool:
        yield pool


@pytest.fixture
def client(pool: tp.Local) -> Iterator[Client]:
    with pool.connect() as client:
        yield client


@pytest.fixture
def stream() -> Callable[..., int]:
    """The id of a stream that no other test has: `stream("tiny")`."""
    return new_stream


def new_stream(profile: str = "default") -> int:
    return next(_ids[profile])


def options_of(pool: tp.Local) -> dict[str, str]:
    """What a query needs to find a deployment."""
    return {
        "aeronDir": pool.aeron_dir,
        "shm.base_dir": pool.config.shm.base_dir,
        "policies.announce_period_ms": str(ANNOUNCE_MS),
    }


def publish(client: Client, stream: int | str, frames: int, nbytes: int = 64, *, first: int = 0) -> tp.Producer:
    """A producer that has published frames of which each holds its number; close it yourself."""
    producer = client.producer(stream, create=True)
    for number in range(first, first + frames):
        assert producer.publish(pattern(number, nbytes)) is not None
    return producer


def pattern(number: int, nbytes: int = 64) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A frame that says which it is."""
    frame = np.full(nbytes, number & 0xFF, np.uint8)
    frame[:8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
    return frame


def consumer_leases(pool: tp.Local, stream_id: int) -> int:
    """How many the driver counts."""
    held = list(pool.conductor.lifecycle.leases)
    return sum((lease.stream_id, lease.role) == (stream_id, Role.CONSUMER) for lease in held)


def look_until(condition: Callable[..., object], what: str) -> None:
    """Wait for a condition that Spark or a lake has to be asked for: less often than is usual here."""
    due_s = 0.0

    def is_met() -> object:
        nonlocal due_s
        if time.monotonic() < due_s:
            return False
        found = condition()
        due_s = time.monotonic() + LOOK_EVERY_S
        return found

    wait_until(is_met, what)
