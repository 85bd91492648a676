# SPDX-License-Identifier: Apache-2.0
"""Made-up announces, and directories to tell them to."""

from __future__ import annotations

from typing import Any

from tensorpool.channel import Endpoint
from tensorpool.discovery.directory import DriverIdentity
from tensorpool.wire import decode
from tensorpool.wire.control import (
    Attribute,
    DataSourceAnnounce,
    DataSourceMeta,
    ShmPoolAnnounce,
)
from tensorpool.wire.discovery import DiscoveryRequest, DiscoveryResponse, Tag
from tests.support import messages

SECOND_NS = 1_000_000_000
EXPIRY_NS = 3 * SECOND_NS
IPC = "aeron:ipc?term-length=4m"


def identity(name: str = "a", expiry_ns: int = EXPIRY_NS) -> DriverIdentity:
    return DriverIdentity(name, Endpoint(IPC, 1000), expiry_ns)


def announce(stream_id: int = 7, **changed: Any) -> ShmPoolAnnounce:
    """Of long ago, by the clock of these tests."""
    return messages.announce(stream_id, **{"announce_timestamp_ns": 0} | changed)


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
