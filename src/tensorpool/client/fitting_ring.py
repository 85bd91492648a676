# SPDX-License-Identifier: Apache-2.0
"""A producer whose ring holds two seconds of frames, or what there is room for: recorders that start lose none."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tensorpool.control.provisioning import RingRequest
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import RingRefused
from tensorpool.shm.space import mount_space

if TYPE_CHECKING:
    from tensorpool.client.client import Client
    from tensorpool.client.producer import Producer
    from tensorpool.client.session import StateChange

HELD_S: Final = 2.0
UNPACED_HZ: Final = 60.0  # for which it is made without a rate
LEAST_SLOTS: Final = 16
EPOCHS: Final = 3  # of a stream that may be in memory at a time, while producers follow each other


def attach_producer(
    client: Client,
    stream: int | str,
    nbytes: int,
    rate_hz: float,
    *,
    create: bool,
    timeout: float | None,
    on_state: Callable[[StateChange], object] | None,
    on_note: Callable[[str], object],
    has_own_clock: bool = True,
) -> Producer:
    """For frames of that size and rate. A driver that makes no such ring gives the one that it has, which is noted.

    Raises what `Client.producer` raises, and FrameTooLarge where that ring cannot hold such a frame.
    """
    ring = None if not create or not nbytes else ring_for(client.config, nbytes, rate_hz)
    attach = functools.partial(
        client.producer, stream, create=create, timeout=timeout, on_state=on_state, has_own_clock=has_own_clock
    )
    if ring is None:
        producer = attach()
    else:
        try:
            producer = attach(slots=ring.slots, max_frame_bytes=ring.frame_bytes)
        except RingRefused as refused:
            producer = attach()
            on_note(f"taking the ring that there is: {refused.words}")
    try:
        producer.check_fits(nbytes)
    except BaseException:
        producer.close()
        raise
    return producer


def ring_for(config: DriverConfig, nbytes: int, rate_hz: float) -> RingRequest | None:
    """Two seconds of frames, at least the 16 that a stream holds without configuration; None: not even those fit."""
    slots = max(LEAST_SLOTS, math.ceil(HELD_S * (rate_hz or UNPACED_HZ)))
    free_bytes = mount_space(config.shm.base_dir).free_bytes
    most = config.policies.max_provisioned_stream_bytes
    if free_bytes is not None:
        most = min(most, free_bytes // EPOCHS)
    while slots >= LEAST_SLOTS:
        ring = RingRequest(slots=slots, frame_bytes=nbytes)
        if ring.ring.size_bytes <= most:
            return ring
        slots = ring.ring.nslots // 2
    return None
