# SPDX-License-Identifier: Apache-2.0
"""The view at one moment: plain frozen structs, ready to be JSON.

Ages are nanoseconds at the moment the snapshot was taken; unknown values are None, never a guess. Wire §10.5.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from tensorpool.control.identification import LeaseFacts


class StreamState(StrEnum):
    """What a stream is doing, the worst first."""

    STALE = "stale"  # not announced, or its memory not refreshed, for the liveness window
    NO_PRODUCER = "no producer"
    IDLE = "idle"  # a producer that publishes nothing
    LIVE = "live"


class ConsumerState(StrEnum):
    """The condition of a consumer, the worst first."""

    EXPIRED = "expired"  # the driver took its lease
    STALE = "stale"  # no message for the liveness window
    DROPPING = "dropping"  # lost frames lately
    LAGGING = "lagging"
    REDIRECTED = "redirected"  # a ConsumerConfig sent it to a fallback
    OK = "ok"


class ChangeKind(StrEnum):
    """The kinds of changes in the history."""

    STREAM_APPEARED = "stream appeared"
    STREAM_VANISHED = "stream vanished"
    STREAM_STALE = "stream stale"
    STREAM_FRESH = "stream fresh"
    EPOCH_CHANGED = "epoch changed"
    PRODUCER_ATTACHED = "producer attached"
    PRODUCER_LEFT = "producer left"
    PRODUCER_CHANGED = "producer changed"
    CONSUMER_APPEARED = "consumer appeared"
    CONSUMER_VANISHED = "consumer vanished"
    CONSUMER_STALE = "consumer stale"
    CONSUMER_FRESH = "consumer fresh"
    CONSUMER_EXPIRED = "consumer expired"
    CONSUMER_LAGGING = "consumer lagging"
    CONSUMER_CAUGHT_UP = "consumer caught up"
    CONSUMER_DROPPING = "consumer dropping"
    CONSUMER_DROPS_ENDED = "consumer drops ended"
    CONSUMER_CONFIGURED = "consumer configured"
    SERVICE_APPEARED = "service appeared"
    SERVICE_VANISHED = "service vanished"
    SERVICE_STATE = "service state"
    SERVICE_STALE = "service stale"
    SERVICE_FRESH = "service fresh"
    DRIVER_SHUTDOWN = "driver shutdown"
    POLICY_DECIDED = "policy decided"


class Pool(msgspec.Struct, frozen=True):
    """One size class of a stream's payloads."""

    pool_id: int
    nslots: int
    stride_bytes: int


class StreamStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A stream. Values that only our own producers send are None for a foreign one, until its ring was probed."""

    stream_id: int
    name: str | None
    state: StreamState
    epoch: int | None
    epoch_changes: int  # since it is known here
    producer_id: int | None  # None: no producer
    producer: str | None  # its user, pid and program, where they are known
    seq: int | None  # of the newest frame, as far as known
    rate_hz: float | None
    bytes_per_s: float | None
    frame_bytes: int | None
    dtype: str | None
    shape: tuple[int, ...] | None
    consumers: int
    announced_age_ns: int | None  # None: never announced
    frame_age_ns: int | None  # since its seq last grew
    activity_age_ns: int | None  # of the superblock's stamp; None: not probed
    layout_version: int | None
    nslots: int | None
    pools: tuple[Pool, ...]
    header_region_uri: str | None
    layout_flaw: str | None  # why no client can map the announced ring
    region_fault: str | None  # why its memory could not be probed
    meta_version: int | None
    summary: str | None
    tags: tuple[str, ...]


class ConsumerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer of a stream."""

    stream_id: int
    stream_name: str | None
    consumer_id: int
    state: ConsumerState
    mode: str | None
    max_rate_hz: int | None  # 0: unlimited
    epoch: int | None
    last_seq: int | None
    lag: int | None  # frames behind the producer when it last reported; of a stale one, by now
    drops_gap: int
    drops_late: int
    drops_per_s: float | None
    rate_hz: float | None  # None for one that skips frames on purpose
    age_ns: int  # since its last message
    qos_age_ns: int | None
    lease_id: int | None
    process: str | None  # its user, pid and program, where they are known
    is_lagging: bool
    is_dropping: bool
    fallback_uri: str | None


class LeaseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A lease, known by its keepalives; `holder` is what its driver says of it and of its process, once it has."""

    lease_id: int
    stream_id: int
    client_id: int
    role: str
    age_ns: int  # since its last keepalive
    held_ns: int  # since its first keepalive here
    holder: LeaseFacts | None


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A service of the control plane, as its heartbeats describe it."""

    tag: str
    service: str
    instance: str | None
    state: str  # running, paused, draining, or another
    is_stale: bool
    pid: int | None
    version: str | None
    age_ns: int


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change; `number` counts all changes since the start."""

    number: int
    at_ns: int  # monotonic
    kind: ChangeKind
    text: str
    stream_id: int | None = None
    consumer_id: int | None = None
    service: str | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known at `taken_ns` (monotonic)."""

    taken_ns: int
    streams: tuple[StreamStatus, ...]
    consumers: tuple[ConsumerStatus, ...]
    leases: tuple[LeaseStatus, ...]
    services: tuple[ServiceStatus, ...]
    changes: tuple[Change, ...]  # the latest, oldest first
    change_counts: dict[ChangeKind, int]
    message_counts: dict[str, int]  # received, by kind
    overflow: dict[str, int]  # entries without room in the view, by kind
