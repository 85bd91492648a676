# SPDX-License-Identifier: Apache-2.0
"""Everything about one stream that can be seen without a lease: layout, epochs, files, slots, leases, consumers.

Nothing is mapped, written, created or asked of the driver but which streams there are: users of the stream notice
nothing. Wire §7.1, §8, §15.1, §15.21; Driver Model §4.4, §15.
"""

from __future__ import annotations

import os
import time
from typing import Final

import msgspec

from tensorpool.client.client import Client
from tensorpool.client.discovery_query import DiscoveredStream
from tensorpool.control import identification
from tensorpool.diagnosis.announced_streams import announced_streams, observe_for
from tensorpool.diagnosis.regions import RegionFacts, activity_age_s, look_at, opened
from tensorpool.diagnosis.slots import SlotFacts, read_slots
from tensorpool.diagnosis.streams import Wanted, find_stream
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import RegionRejected, TensorPoolError
from tensorpool.shm.containment import AllowedBases
from tensorpool.shm.epochs import FoundEpoch, scan_epochs
from tensorpool.shm.layout import RegionSpec, RingSpec
from tensorpool.shm.leftovers import BLOCK_BYTES
from tensorpool.shm.liveness import is_owner_alive
from tensorpool.supervisor.observer import Observer
from tensorpool.supervisor.snapshot import ConsumerStatus, Snapshot, StreamStatus
from tensorpool.wire.region_uri import RegionUri

MAX_LISTENING_S: Final = 5.0


class PoolFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A payload pool as it is announced."""

    pool_id: int
    stride_bytes: int
    size_bytes: int


class LayoutFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of the stream's memory as it is announced; `problem` is "" unless no stream may have it."""

    layout_version: int
    nslots: int
    header_slot_bytes: int
    pools: tuple[PoolFacts, ...]
    epoch_bytes: int | None
    problem: str


class EpochFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch whose directory is still there."""

    epoch: int
    path: str
    state: str  # current, retired, old, unfinished
    age_s: float | None
    activity_age_s: float | None
    is_owner_alive: bool | None
    memory_bytes: int


class LeaseFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A lease by its holder's keepalives. The expiry is by our configuration: only the holder receives it."""

    role: str
    lease_id: int | None  # None: only known from the announce, no keepalive was received
    client_id: int
    last_keepalive_s: float | None
    expires_in_s: float | None
    holder: identification.LeaseFacts | None = None  # what the driver says of its process


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """A stream, seen from outside."""

    stream_id: int
    name: str | None
    tags: tuple[str, ...]
    driver_instance_id: str
    reported_by: str
    epoch: int
    producer_id: int
    layout: LayoutFacts
    regions: tuple[RegionFacts, ...]
    epochs: tuple[EpochFacts, ...]
    slots: SlotFacts | None
    leases: tuple[LeaseFacts, ...]
    consumers: tuple[ConsumerStatus, ...]
    status: StreamStatus | None  # from the observer: state, rate, metadata

    @property
    def problems(self) -> list[str]:
        """What is wrong with it, one sentence each."""
        found = [self.layout.problem] if self.layout.problem else []
        found += [f"{region.name}: {region.problem}" for region in self.regions if region.problem]
        if self.slots is not None and self.slots.misplaced:
            found.append(f"{self.slots.misplaced} slots hold a seq that belongs elsewhere: another program wrote here")
        return found


def inspect_stream(
    client: Client, observer: Observer, wanted: Wanted, *, timeout: float, seconds: float | None = None
) -> Inspection:
    """Inspect a stream. Raises TensorPoolError, with the candidates, where none or several are meant."""
    stream, reported_by = find_stream(wanted, client, observer, timeout=timeout)
    config = client.config
    interval_s = max(config.lease_keepalive_interval_ns, config.announce_period_ns) / 1e9
    observe_for(observer, min(1.2 * interval_s, MAX_LISTENING_S) if seconds is None else seconds)
    found = _look(_renewed(stream, announced_streams(observer, config)), reported_by, observer, config)
    if any(region.is_missing for region in found.regions):  # retired while we looked: the next announce names another
        observe_for(observer, min(1.2 * interval_s, MAX_LISTENING_S))
        found = _look(_renewed(stream, announced_streams(observer, config)), reported_by, observer, config)
    return found


def _look(stream: DiscoveredStream, reported_by: str, observer: Observer, config: DriverConfig) -> Inspection:
    observed = observer.snapshot()
    bases = AllowedBases(config.shm.allowed_base_dirs)
    layout, specs = _layout(stream)
    uris = [stream.header_region_uri, *(pool.region_uri for pool in stream.payload_pools)]
    return Inspection(
        stream_id=stream.stream_id,
        name=stream.data_source_name,
        tags=stream.tags,
        driver_instance_id=stream.driver_instance_id,
        reported_by=reported_by,
        epoch=stream.epoch,
        producer_id=stream.producer_id,
        layout=layout,
        regions=look_at(uris, specs, bases) if specs else (),
        epochs=_epochs(stream, bases),
        slots=_slots(uris[0], specs[0], bases) if specs else None,
        leases=_leases(stream, observed, config.lease_duration_ns),
        consumers=tuple(consumer for consumer in observed.consumers if consumer.stream_id == stream.stream_id),
        status=next((status for status in observed.streams if status.stream_id == stream.stream_id), None),
    )


def _renewed(stream: DiscoveredStream, announced: list[DiscoveredStream]) -> DiscoveredStream:
    """As it is announced by now: its epoch may have changed since discovery answered."""
    for other in announced:
        if other.stream_id == stream.stream_id and other.epoch >= stream.epoch:
            return msgspec.structs.replace(
                other,
                driver_instance_id=stream.driver_instance_id,
                data_source_name=stream.data_source_name or other.data_source_name,
                tags=stream.tags,
            )
    return stream


def _layout(stream: DiscoveredStream) -> tuple[LayoutFacts, tuple[RegionSpec, ...]]:
    specs: tuple[RegionSpec, ...] = ()
    ring, problem = None, ""
    try:
        ring = RingSpec.announced(stream.header_nslots, stream.header_slot_bytes, stream.payload_pools)
        specs = ring.regions(stream.stream_id, stream.epoch, stream.layout_version)
    except TensorPoolError as error:
        problem = str(error)
    facts = LayoutFacts(
        layout_version=stream.layout_version,
        nslots=stream.header_nslots,
        header_slot_bytes=stream.header_slot_bytes,
        pools=tuple(
            PoolFacts(
                pool_id=pool.pool_id,
                stride_bytes=pool.stride_bytes,
                size_bytes=pool.pool_nslots * pool.stride_bytes,
            )
            for pool in stream.payload_pools
        ),
        epoch_bytes=None if ring is None else ring.size_bytes,
        problem=problem,
    )
    return facts, specs


def _slots(uri: str, spec: RegionSpec, bases: AllowedBases) -> SlotFacts | None:
    try:
        with opened(uri, spec, bases) as fd:
            return read_slots(fd, spec.nslots)
    except (RegionRejected, OSError):
        return None  # its region says why


def _epochs(stream: DiscoveredStream, bases: AllowedBases) -> tuple[EpochFacts, ...]:
    """Of streams whose files lie as the specification wants them: <namespace>/<stream_id>/<epoch>/header.ring."""
    try:
        folder = os.path.dirname(os.path.dirname(RegionUri.parse(stream.header_region_uri).path))
        if not bases.contains(os.path.realpath(folder)):
            return ()
        found = scan_epochs(os.path.dirname(os.path.realpath(folder)))
    except (RegionRejected, OSError):
        return ()
    return tuple(_epoch_facts(epoch, stream.epoch) for epoch in found if epoch.stream_id == stream.stream_id)


def _epoch_facts(found: FoundEpoch, current: int) -> EpochFacts:
    superblock = found.superblock
    state = "old"
    if found.epoch == current and not found.is_retired:
        state = "current"
    elif found.is_retired:
        state = "retired"
    elif superblock is None:
        state = "unfinished"
    return EpochFacts(
        epoch=found.epoch,
        path=found.path,
        state=state,
        age_s=None if superblock is None else activity_age_s(superblock.start_timestamp_ns),
        activity_age_s=None if superblock is None else activity_age_s(superblock.activity_timestamp_ns),
        is_owner_alive=None if superblock is None else is_owner_alive(superblock, time.monotonic_ns(), time.time_ns()),
        memory_bytes=memory_bytes(found.path),
    )


def memory_bytes(folder: str) -> int:
    """What the files of an epoch take of their mount."""
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES for entry in entries)
    except OSError:
        return 0


def _leases(stream: DiscoveredStream, observed: Snapshot, duration_ns: int) -> tuple[LeaseFacts, ...]:
    found = [
        LeaseFacts(
            role=lease.role,
            lease_id=lease.lease_id,
            client_id=lease.client_id,
            last_keepalive_s=lease.age_ns / 1e9,
            expires_in_s=max(duration_ns - lease.age_ns, 0) / 1e9,
            holder=lease.holder,
        )
        for lease in observed.leases
        if lease.stream_id == stream.stream_id
    ]
    if stream.producer_id and not any(lease.client_id == stream.producer_id for lease in found):
        announced = LeaseFacts(
            role="PRODUCER", lease_id=None, client_id=stream.producer_id, last_keepalive_s=None, expires_in_s=None
        )
        found.insert(0, announced)
    return tuple(sorted(found, key=lambda lease: (lease.role != "PRODUCER", lease.lease_id or 0)))
