# SPDX-License-Identifier: Apache-2.0
"""Made-up announces, and directories to tell them to."""

from __future__ import annotations

from typing import Any

from tensorpool.channel import Endpoint
from tensorpool.discovery.directory import DriverIdentity
from tensorpool.wire import decode
from tensorpool.wire.control import (
    Attribute,
    ClockDomain,
    DataSourceAnnounce,
    DataSourceMeta,
    PayloadPool,
    ShmPoolAnnounce,
)
from tensorpool.wire.discovery import DiscoveryRequest, DiscoveryResponse, Tag

SECOND_NS = 1_000_000_000
EXPIRY_NS = 3 * SECOND_NS
IPC = "aeron:ipc?term-length=4m"


def identity(name: str = "a", expiry_ns: int = EXPIRY_NS) -> DriverIdentity:
    return DriverIdentity(name, Endpoint(IPC, 1000), expiry_ns)


def announce(stream_id: int = 7, **changed: Any) -> ShmPoolAnnounce:
    epoch = changed.get("epoch", 1)
    uri = f"shm:file?path=/dev/shm/x/{stream_id}/{epoch}"
    fields: dict[str, Any] = {
        "stream_id": stream_id,
        "producer_id": 0,
        "epoch": epoch,
        "announce_timestamp_ns": 0,
        "announce_clock_domain": ClockDomain.MONOTONIC,
        "layout_version": 1,
        "header_nslots": 8,
        "header_slot_bytes": 256,
        "payload_pools": (PayloadPool(pool_id=1, pool_nslots=8, stride_bytes=4096, region_uri=f"{uri}/1.pool"),),
        "header_region_uri": f"{uri}/header.ring",
    }
    return ShmPoolAnnounce(**fields | changed)


def named(stream_id: int, name: str, epoch: int = 1) -> DataSourceAnnounce:
    return DataSourceAnnounce(stream_id=stream_id, producer_id=1, epoch=epoch, meta_version=1, name=name)


def described(stream_id: int, **texts: str) -> DataSourceMeta:
    attributes = tuple(Attribute(key=key, format="text/plain", value=text.encode()) for key, text in texts.items())
    return DataSourceMeta(stream_id=stream_id, meta_version=1, timestamp_ns=0, attributes=attributes)


def request(*tags: str, **changed: Any) -> DiscoveryRequest:
    fields: dict[str, Any] = {
        "request_id": 1,
        "client_id": 1,
        "response_stream_id": 1,
        "response_channel": "aeron:ipc",
        "tags": tuple(Tag(tag=tag) for tag in tags),
    }
    return DiscoveryRequest(**fields | changed)


def read(data: bytes) -> DiscoveryResponse:
    response = decode(data)
    assert isinstance(response, DiscoveryResponse)
    return response
