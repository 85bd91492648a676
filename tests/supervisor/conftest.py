# SPDX-License-Identifier: Apache-2.0
"""Messages as peers send them, with what a test wants otherwise, and a view that hears them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tensorpool.supervisor.config import SupervisorConfig
from tensorpool.supervisor.snapshot import ChangeKind, ConsumerStatus, StreamStatus
from tensorpool.supervisor.view import View
from tensorpool.wire.control import (
    ConsumerConfig,
    ConsumerHello,
    DataSourceAnnounce,
    QosConsumer,
    QosProducer,
    ShmPoolAnnounce,
)
from tensorpool.wire.driver import LeaseRevokeReason, Role, ShmLeaseKeepalive, ShmLeaseRevoked
from tensorpool.wire.event import EventMessage, Format
from tests.support import messages

S = 1_000_000_000
STALE_NS = 4 * S
STREAM = 20_001
PRODUCER = 11
CONSUMER = 42


def announce(stream_id: int = STREAM, now_ns: int = 0, **changed: Any) -> ShmPoolAnnounce:
    return messages.announce(
        stream_id, **{"producer_id": PRODUCER, "announce_timestamp_ns": max(now_ns, 0), "nslots": 64} | changed
    )


def produced(seq: int, stream_id: int = STREAM, **changed: Any) -> QosProducer:
    return QosProducer(**{"stream_id": stream_id, "producer_id": PRODUCER, "epoch": 1, "current_seq": seq} | changed)


def consumed(seq: int, consumer_id: int = CONSUMER, **changed: Any) -> QosConsumer:
    fields: dict[str, Any] = {"stream_id": STREAM, "epoch": 1, "last_seq_seen": seq}
    return messages.consumer_qos(consumer_id=consumer_id, **fields | changed)


def hello(consumer_id: int = CONSUMER, **changed: Any) -> ConsumerHello:
    return messages.hello(consumer_id=consumer_id, **{"stream_id": STREAM} | changed)


def configured(consumer_id: int = CONSUMER, **changed: Any) -> ConsumerConfig:
    return messages.consumer_config(consumer_id=consumer_id, **{"stream_id": STREAM} | changed)


def named(name: str, stream_id: int = STREAM, **changed: Any) -> DataSourceAnnounce:
    fields: dict[str, Any] = {
        "stream_id": stream_id,
        "producer_id": PRODUCER,
        "epoch": 1,
        "meta_version": 0,
        "name": name,
    }
    return DataSourceAnnounce(**fields | changed)


def kept(client_id: int = CONSUMER, role: Role = Role.CONSUMER, lease_id: int = 5, **changed: Any) -> ShmLeaseKeepalive:
    fields = {
        "lease_id": lease_id,
        "stream_id": STREAM,
        "client_id": client_id,
        "role": role,
        "client_timestamp_ns": 0,
    }
    return ShmLeaseKeepalive(**fields | changed)


def revoked(
    reason: LeaseRevokeReason, client_id: int = CONSUMER, role: Role = Role.CONSUMER, lease_id: int = 5, **changed: Any
) -> ShmLeaseRevoked:
    fields = {
        "timestamp_ns": 0,
        "lease_id": lease_id,
        "stream_id": STREAM,
        "client_id": client_id,
        "role": role,
        "reason": reason,
    }
    return ShmLeaseRevoked(**fields | changed)


def alive(state: str = "running", tag: str = "service:bridge:b1", **changed: Any) -> EventMessage:
    value = {"service": "bridge", "instance": "b1", "pid": 7, "state": state, "version": "0.1.0"} | changed
    return EventMessage(
        timestamp_ns=0,
        correlation_id=0,
        format=Format.STRING,
        tag=tag,
        key="alive",
        value=msgspec.json.encode(value),
    )


def a_view(**section: Any) -> View:
    return View(SupervisorConfig.load(environ={}, supervisor=section))


@pytest.fixture
def view() -> View:
    """With announces, hello, QoS and heartbeats once a second: stale after four."""
    return a_view()


def stream_of(view: View, now_ns: int, stream_id: int = STREAM) -> StreamStatus:
    (found,) = [stream for stream in view.snapshot(now_ns).streams if stream.stream_id == stream_id]
    return found


def consumer_of(view: View, now_ns: int, consumer_id: int = CONSUMER) -> ConsumerStatus:
    (found,) = [consumer for consumer in view.snapshot(now_ns).consumers if consumer.consumer_id == consumer_id]
    return found


def kinds_of(view: View) -> list[ChangeKind]:
    return [change.kind for change in view.history.changes]
