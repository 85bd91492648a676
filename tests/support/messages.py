# SPDX-License-Identifier: Apache-2.0
"""Ordinary messages of peers, with what a test wants otherwise."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from tensorpool.wire.control import (
    ClockDomain,
    ConsumerConfig,
    ConsumerHello,
    Mode,
    PayloadPool,
    QosConsumer,
    ShmPoolAnnounce,
)

NOWHERE: Final = "/dev/shm/tensorpool/tensorpool-nobody/lab"
ONE_POOL: Final[Mapping[int, int]] = MappingProxyType({1: 4096})  # id: stride
# the second of two chunks of a frame, as fields of BridgeFrameChunk
CHUNK: Final[dict[str, Any]] = {
    "stream_id": 10000,
    "epoch": 7,
    "seq": 5,
    "chunk_index": 1,
    "chunk_count": 2,
    "chunk_offset": 4,
    "chunk_length": 2,
    "payload_length": 6,
    "header_included": False,
}


def announce(
    stream_id: int,
    *,
    epoch: int = 1,
    nslots: int = 8,
    pools: Mapping[int, int] = ONE_POOL,
    below: str = NOWHERE,
    **changed: Any,
) -> ShmPoolAnnounce:
    """An announce, made just now, of regions that do not exist."""
    uri = f"shm:file?path={below}/{stream_id}/{epoch}"
    fields: dict[str, Any] = {
        "stream_id": stream_id,
        "producer_id": 0,
        "epoch": epoch,
        "announce_timestamp_ns": time.monotonic_ns(),
        "announce_clock_domain": ClockDomain.MONOTONIC,
        "layout_version": 1,
        "header_nslots": nslots,
        "header_slot_bytes": 256,
        "payload_pools": tuple(
            PayloadPool(pool_id=id, pool_nslots=nslots, stride_bytes=stride, region_uri=f"{uri}/{id}.pool")
            for id, stride in pools.items()
        ),
        "header_region_uri": f"{uri}/header.ring",
    }
    return ShmPoolAnnounce(**fields | changed)


def hello(stream_id: int, consumer_id: int, **changed: Any) -> ConsumerHello:
    """A consumer that asks for nothing of its own."""
    fields: dict[str, Any] = {
        "supports_shm": True,
        "supports_progress": False,
        "mode": Mode.STREAM,
        "max_rate_hz": 0,
        "expected_layout_version": 1,
        "descriptor_stream_id": 0,
        "control_stream_id": 0,
    }
    return ConsumerHello(stream_id=stream_id, consumer_id=consumer_id, **fields | changed)


def consumer_config(stream_id: int, consumer_id: int, **changed: Any) -> ConsumerConfig:
    """A config that asks a consumer to go on as before."""
    fields: dict[str, Any] = {
        "use_shm": True,
        "mode": Mode.STREAM,
        "descriptor_stream_id": 0,
        "control_stream_id": 0,
    }
    return ConsumerConfig(stream_id=stream_id, consumer_id=consumer_id, **fields | changed)


def consumer_qos(stream_id: int, consumer_id: int, **changed: Any) -> QosConsumer:
    """A consumer that has lost nothing."""
    fields: dict[str, Any] = {
        "epoch": 0,
        "last_seq_seen": 0,
        "drops_gap": 0,
        "drops_late": 0,
        "mode": Mode.STREAM,
    }
    return QosConsumer(stream_id=stream_id, consumer_id=consumer_id, **fields | changed)
