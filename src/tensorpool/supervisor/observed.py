# SPDX-License-Identifier: Apache-2.0
"""The state that the view keeps of each stream, consumer, lease and service, and its status. No IO, no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from tensorpool.control.identification import LeaseFacts
from tensorpool.supervisor.sampled_counter import SampledCounter
from tensorpool.supervisor.snapshot import (
    ConsumerState,
    ConsumerStatus,
    LeaseStatus,
    Pool,
    ServiceStatus,
    StreamState,
    StreamStatus,
)
from tensorpool.wire.control import Mode, ShmPoolAnnounce
from tensorpool.wire.driver import Role

FEWEST_FRAMES: Final = 8  # that every consumer may be behind
PATIENCE_HZ: Final = 4  # a quarter of a second of frames
UNREAD_NS: Final = 500_000_000  # so long after its attach a consumer that has read nothing has not begun yet (B31)

type Holders = Mapping[tuple[int, int], str]  # by stream and client: user, pid and program


class Stream:
    """A stream, as its messages and its memory describe it."""

    def __init__(self, stream_id: int, now_ns: int) -> None:
        self.stream_id: Final = stream_id
        self.first_ns: Final = now_ns
        self.seq_reported_ns: int | None = None  # when QoS or a probe last gave its seq
        self.name: str | None = None
        self.named_by: int | None = None  # the producer that gave the name
        self.summary: str | None = None
        self.tags: tuple[str, ...] = ()
        self.meta_version: int | None = None
        self.epoch: int | None = None
        self.epoch_changes = 0  # since the stream is known here
        self.producer_id: int | None = None
        self.announce: ShmPoolAnnounce | None = None
        self.layout_flaw: str | None = None
        self.announced_ns: int | None = None
        self.seen_ns = now_ns
        self.seq_counter = SampledCounter()
        self.is_stale = False
        # From the probe of its memory, of this epoch.
        self.probed_ns: int | None = None
        self.active_ns: int | None = None
        self.region_fault: str | None = None
        self.frame_bytes: int | None = None
        self.dtype: str | None = None
        self.shape: tuple[int, ...] | None = None

    @property
    def label(self) -> str:
        return f"{self.name} ({self.stream_id})" if self.name else f"stream {self.stream_id}"

    def begin_epoch(self, epoch: int) -> None:
        """Forget the state of the previous epoch."""
        self.epoch = epoch
        self.seq_counter.clear()
        self.probed_ns = self.active_ns = self.region_fault = None
        self.frame_bytes = self.dtype = self.shape = None

    def is_silent(self, now_ns: int, stale_ns: int) -> bool:
        """Not announced for so long, or its memory not refreshed when it was probed (§15.14)."""
        seen_ns = self.seen_ns if self.announced_ns is None else self.announced_ns
        if now_ns - seen_ns > stale_ns:
            return True
        return self.probed_ns is not None and self.active_ns is not None and self.probed_ns - self.active_ns > stale_ns

    def rate_hz(self, now_ns: int, stale_ns: int) -> float | None:
        """None where its seq was not reported lately."""
        if self.producer_id is None or self.seq_counter.seen_ns is None or now_ns - self.seq_counter.seen_ns > stale_ns:
            return None
        return self.seq_counter.rate_hz()

    def state(self, rate_hz: float | None) -> StreamState:
        if self.is_stale:
            return StreamState.STALE
        if self.producer_id is None:
            return StreamState.NO_PRODUCER
        is_moving = self.seq_counter.value if rate_hz is None else rate_hz  # the first sample gives no rate yet
        return StreamState.LIVE if is_moving else StreamState.IDLE

    def lag_limit(self, lag_frames: int) -> int | None:
        """A consumer that is more frames behind lags; None while the rate is not known."""
        if lag_frames:
            return lag_frames
        nslots, rate_hz = self.announce.header_nslots if self.announce else 0, self.seq_counter.rate_hz()
        return None if rate_hz is None else max(FEWEST_FRAMES, nslots // 2, math.ceil(rate_hz / PATIENCE_HZ))

    def status(self, now_ns: int, stale_ns: int, consumers: int, holders: Holders) -> StreamStatus:
        rate_hz = self.rate_hz(now_ns, stale_ns)
        announce = self.announce
        is_rate_known = rate_hz is not None and self.frame_bytes is not None
        return StreamStatus(
            stream_id=self.stream_id,
            name=self.name,
            state=self.state(rate_hz),
            epoch=self.epoch,
            epoch_changes=self.epoch_changes,
            producer_id=self.producer_id,
            producer=None if self.producer_id is None else holders.get((self.stream_id, self.producer_id)),
            seq=self.seq_counter.value,
            rate_hz=rate_hz,
            bytes_per_s=(rate_hz or 0.0) * (self.frame_bytes or 0) if is_rate_known else None,
            frame_bytes=self.frame_bytes,
            dtype=self.dtype,
            shape=self.shape,
            consumers=consumers,
            announced_age_ns=_age(now_ns, self.announced_ns),
            frame_age_ns=_age(now_ns, self.seq_counter.moved_ns),
            activity_age_ns=_age(now_ns, self.active_ns),
            layout_version=announce.layout_version if announce else None,
            nslots=announce.header_nslots if announce else None,
            pools=tuple(Pool(pool.pool_id, pool.pool_nslots, pool.stride_bytes) for pool in announce.payload_pools)
            if announce
            else (),
            header_region_uri=announce.header_region_uri if announce else None,
            layout_flaw=self.layout_flaw,
            region_fault=self.region_fault,
            meta_version=self.meta_version,
            summary=self.summary,
            tags=self.tags,
        )


class Consumer:
    """A consumer of a stream, as its messages describe it."""

    def __init__(self, stream_id: int, consumer_id: int, now_ns: int) -> None:
        self.stream_id: Final = stream_id
        self.consumer_id: Final = consumer_id
        self.seen_ns = now_ns
        self.qos_ns: int | None = None
        self.mode: Mode | None = None
        self.wanted_mode: Mode | None = None  # from its hello
        self.max_rate_hz: int | None = None
        self.epoch: int | None = None
        self.last_seq: int | None = None
        self.drops_gap = 0
        self.drops_late = 0
        self.unread_ns: int | None = None  # since when it reports that it has read nothing of this epoch
        self.received = SampledCounter()  # frames, up to a constant
        self.drops = SampledCounter()
        self.dropped_ns = 0
        self.drops_before = 0  # of those that are being lost now
        self.lease_id: int | None = None
        self.config: tuple[bool, Mode, str] | None = None  # the last ConsumerConfig: use_shm, mode, fallback
        self.wants_own_streams = False
        self.assigned: tuple[str, int, str, int] | None = None  # descriptor and control stream that it was given
        self.is_stale = False
        self.is_lagging = False
        self.fine_ns: int | None = None  # since when it is not far behind
        self.is_dropping = False
        self.expired_ns: int | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.stream_id, self.consumer_id

    @property
    def is_redirected(self) -> bool:
        return self.config is not None and not self.config[0]

    @property
    def drops_total(self) -> int:
        return self.drops_gap + self.drops_late

    @property
    def state(self) -> ConsumerState:
        if self.expired_ns is not None:
            return ConsumerState.EXPIRED
        if self.is_stale:
            return ConsumerState.STALE
        if self.is_redirected:
            return ConsumerState.REDIRECTED
        if self.is_dropping:
            return ConsumerState.DROPPING
        return ConsumerState.LAGGING if self.is_lagging else ConsumerState.OK

    def lag(self, stream: Stream | None) -> int | None:
        """Frames behind, when it last reported: reports of both sides come a second apart, each at its own time."""
        if stream is None or self.qos_ns is None or self.last_seq is None or self.epoch != stream.epoch:
            return None
        is_silent = self.is_stale or self.expired_ns is not None
        if self.unread_ns is not None and self.qos_ns - self.unread_ns < UNREAD_NS and not is_silent:
            return None
        produced = stream.seq_counter.value if is_silent else stream.seq_counter.at(self.qos_ns)
        return None if produced is None else max(0, produced - self.last_seq)

    def lag_limit(self, stream: Stream, lag_frames: int) -> int | None:
        """None: it skips an unknown number of frames on purpose, or the rate is not known."""
        limit = stream.lag_limit(lag_frames)
        if limit is None or self.mode is not Mode.RATE_LIMITED:
            return limit
        if not self.max_rate_hz:
            return None
        return limit + 2 * math.ceil((stream.seq_counter.rate_hz() or 0.0) / self.max_rate_hz)

    def status(self, stream: Stream | None, now_ns: int, stale_ns: int, holders: Holders) -> ConsumerStatus:
        is_reporting = self.qos_ns is not None and now_ns - self.qos_ns <= stale_ns
        return ConsumerStatus(
            stream_id=self.stream_id,
            stream_name=stream.name if stream else None,
            consumer_id=self.consumer_id,
            state=self.state,
            mode=self.mode.name if self.mode is not None else None,
            max_rate_hz=self.max_rate_hz,
            epoch=self.epoch,
            last_seq=self.last_seq,
            lag=self.lag(stream),
            drops_gap=self.drops_gap,
            drops_late=self.drops_late,
            drops_per_s=self.drops.rate_hz() if is_reporting else None,
            rate_hz=self.received.rate_hz() if is_reporting and self.mode is Mode.STREAM else None,
            age_ns=now_ns - self.seen_ns,
            qos_age_ns=_age(now_ns, self.qos_ns),
            lease_id=self.lease_id,
            process=holders.get(self.key),
            is_lagging=self.is_lagging,
            is_dropping=self.is_dropping,
            fallback_uri=self.config[2] or None if self.config else None,
        )


class Lease:
    """A lease, known by its keepalives."""

    def __init__(self, lease_id: int, stream_id: int, client_id: int, role: Role, now_ns: int) -> None:
        self.lease_id: Final = lease_id
        self.stream_id: Final = stream_id
        self.client_id: Final = client_id
        self.role: Final = role
        self.first_ns: Final = now_ns
        self.seen_ns = now_ns
        self.facts: LeaseFacts | None = None  # as its driver says

    def status(self, now_ns: int) -> LeaseStatus:
        return LeaseStatus(
            lease_id=self.lease_id,
            stream_id=self.stream_id,
            client_id=self.client_id,
            role=self.role.name,
            age_ns=now_ns - self.seen_ns,
            held_ns=now_ns - self.first_ns,
            holder=self.facts,
        )


class Service:
    """A service of the control plane, known by its heartbeats."""

    def __init__(self, tag: str, now_ns: int) -> None:
        self.tag: Final = tag
        self.service = ""
        self.instance: str | None = None
        self.state = ""
        self.pid: int | None = None
        self.version: str | None = None
        self.seen_ns = now_ns
        self.is_stale = False

    def status(self, now_ns: int) -> ServiceStatus:
        return ServiceStatus(
            tag=self.tag,
            service=self.service,
            instance=self.instance,
            state=self.state,
            is_stale=self.is_stale,
            pid=self.pid,
            version=self.version,
            age_ns=now_ns - self.seen_ns,
        )


def _age(now_ns: int, then_ns: int | None) -> int | None:
    return None if then_ns is None else now_ns - then_ns
