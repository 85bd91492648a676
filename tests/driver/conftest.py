# SPDX-License-Identifier: Apache-2.0
"""A small configuration, requests made by hand, and epochs without memory."""

from __future__ import annotations

from typing import Any

from tensorpool.driver.config import DriverConfig
from tensorpool.driver.effects import Effect
from tensorpool.driver.epoch_messages import Epoch
from tensorpool.driver.lifecycle import Lifecycle
from tensorpool.shm import LAYOUT_VERSION, PoolSpec, RingSpec
from tensorpool.wire.driver import (
    HugepagesPolicy,
    PublishMode,
    Role,
    ShmAttachRequest,
    ShmDetachRequest,
    ShmLeaseKeepalive,
)

FRONT, REAR = 10000, 10001  # the streams that are configured
DYNAMIC = (20000, 20001, 20002)  # the ids that clients may create
RING = RingSpec(4, (PoolSpec(1, 64), PoolSpec(2, 128)))

SECOND_NS = 1_000_000_000
LEASE_NS = 3 * SECOND_NS
PERIOD_NS = SECOND_NS

_SMALL: dict[str, Any] = {
    "driver.stream_id_range": [DYNAMIC[0], DYNAMIC[-1]],
    "driver.descriptor_stream_id_range": [31000, 31001],
    "driver.control_stream_id_range": [32000, 32000],
    "policies.shutdown_token": "sesame",
    "profiles.default": {
        "header_nslots": RING.nslots,
        "payload_pools": [{"pool_id": pool.pool_id, "stride_bytes": pool.stride_bytes} for pool in RING.pools],
    },
    "streams.front.stream_id": FRONT,
    "streams.rear.stream_id": REAR,
}


def driver_config(overrides: dict[str, Any] | None = None) -> DriverConfig:
    """Two streams and three ids for more, in rings of a few kilobytes."""
    return DriverConfig.load(environ={}, overrides=_SMALL | (overrides or {}))


def attach(
    client_id: int,
    stream_id: int = FRONT,
    role: Role = Role.CONSUMER,
    *,
    correlation_id: int = 1,
    publish_mode: PublishMode | None = None,
    layout_version: int = 0,
    pages: HugepagesPolicy = HugepagesPolicy.UNSPECIFIED,
) -> ShmAttachRequest:
    return ShmAttachRequest(
        correlation_id=correlation_id,
        stream_id=stream_id,
        client_id=client_id,
        role=role,
        expected_layout_version=layout_version,
        max_dims=0,
        publish_mode=publish_mode,
        require_hugepages=pages,
    )


def keepalive(lease_id: int, client_id: int, stream_id: int = FRONT, role: Role = Role.CONSUMER) -> ShmLeaseKeepalive:
    return ShmLeaseKeepalive(
        lease_id=lease_id, stream_id=stream_id, client_id=client_id, role=role, client_timestamp_ns=0
    )


def detach(
    lease_id: int, client_id: int, stream_id: int = FRONT, role: Role = Role.CONSUMER, *, correlation_id: int = 2
) -> ShmDetachRequest:
    return ShmDetachRequest(
        correlation_id=correlation_id, lease_id=lease_id, stream_id=stream_id, client_id=client_id, role=role
    )


def epoch_of(stream_id: int, number: int, ring: RingSpec = RING) -> Epoch:
    """Where the memory of an epoch would be."""
    folder = f"shm:file?path=/dev/shm/{stream_id}/{number}"
    pools = tuple(f"{folder}/{pool.pool_id}.pool" for pool in ring.pools)
    return Epoch(stream_id, number, LAYOUT_VERSION, ring, f"{folder}/header.ring", pools)


def created(
    lifecycle: Lifecycle, stream_id: int, number: int, now_ns: int = 0, *, reserved: bool = False
) -> list[Effect]:
    """The memory that was ordered is there."""
    return lifecycle.on_epoch_created(epoch_of(stream_id, number), reserved, now_ns)


def serving(overrides: dict[str, Any] | None = None, *, now_ns: int = 0, hugepages: bool = False) -> Lifecycle:
    """A driver whose configured streams have epoch 1, with nothing due before the next announce."""
    lifecycle = Lifecycle(driver_config(overrides), first_lease_id=500, hugepages=hugepages)
    lifecycle.on_start(now_ns)
    for stream in lifecycle.streams:
        created(lifecycle, stream.stream_id, 1, now_ns)
    lifecycle.on_tick(now_ns)
    return lifecycle
