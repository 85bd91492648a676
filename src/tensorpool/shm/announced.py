# SPDX-License-Identifier: Apache-2.0
"""What a peer announces of an epoch: whether it is fresh, and whether memory can be as described.

The driver, clients, bridges and tools judge announces and attach responses by these rules and by
`RingSpec.announced`. Holds no clock and does no IO. Wire §10.1.1, §15.1; decisions C6-C8, C15-C17, K2.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tensorpool._core import MAX_DIMS
from tensorpool.errors import RegionRejected, RemoteProtocolError
from tensorpool.shm.layout import LAYOUT_VERSION, MAX_EPOCH, RingSpec
from tensorpool.wire.attach import AttachResponse
from tensorpool.wire.control import ClockDomain, ShmPoolAnnounce
from tensorpool.wire.driver import ShmAttachResponse
from tensorpool.wire.region_uri import RegionUri

FRESH_PERIODS: Final = 3  # announce periods


class Regions(msgspec.Struct, frozen=True):
    """What to map for one epoch."""

    stream_id: int
    epoch: int
    layout_version: int
    ring: RingSpec
    uris: tuple[str, ...]

    @classmethod
    def of(cls, source: ShmPoolAnnounce | AttachResponse) -> Regions:
        """Raises RemoteProtocolError for a layout that no stream may have (C16)."""
        stream_id, epoch, version = source.stream_id, source.epoch, source.layout_version
        nslots, slot_bytes = source.header_nslots, source.header_slot_bytes
        if stream_id is None or epoch is None or version is None or nslots is None or slot_bytes is None:
            raise RemoteProtocolError("a field that the layout needs is missing")
        if not 1 <= epoch <= MAX_EPOCH:
            raise RemoteProtocolError(f"epoch: expected 1 to 2^64 - 2, found {epoch}")
        if version != LAYOUT_VERSION:
            text = f"layout_version: expected {LAYOUT_VERSION}, found {version}; update the older of driver and client"
            raise RemoteProtocolError(text)
        ring = RingSpec.announced(nslots, slot_bytes, source.payload_pools)
        uris = (source.header_region_uri, *(pool.region_uri for pool in source.payload_pools))
        return cls(stream_id, epoch, version, ring, uris)

    def difference(self, other: Regions) -> str | None:
        """The first thing in which two descriptions of one epoch differ; the order of the pools says nothing."""
        pairs = (
            ("layout_version", self.layout_version, other.layout_version),
            ("nslots", self.ring.nslots, other.ring.nslots),
            ("header_region_uri", _place(self.uris[0]), _place(other.uris[0])),
            ("payload_pools", self._pools, other._pools),
        )
        return next((f"{name}: {ours}, now {theirs}" for name, ours, theirs in pairs if ours != theirs), None)

    @property
    def _pools(self) -> list[tuple[int, int, str]]:
        pools = zip(self.ring.pools, self.uris[1:], strict=True)
        return sorted((pool.pool_id, pool.stride_bytes, _place(uri)) for pool, uri in pools)


def _place(uri: str) -> str:
    """A URI in its canonical form: a parameter that is spelt out with its default changes nothing."""
    try:
        return str(RegionUri.parse(uri))
    except RegionRejected:
        return uri  # it differs from every URI that could be mapped


def has_epoch(announce: ShmPoolAnnounce) -> bool:
    """Whether it is about an epoch at all: 0 and null are none (C17, K2)."""
    return 1 <= announce.epoch <= MAX_EPOCH


def is_fresh(announce: ShmPoolAnnounce, joined_ns: int, now_ns: int, wall_ns: int, announce_period_ns: int) -> bool:
    """Whether to believe it (§10.1.1, C6-C8, C15): it was sent after we joined, is not old and not from the future.

    `joined_ns` is when we joined its publisher; `wall_ns` is the time by CLOCK_REALTIME, the others by CLOCK_MONOTONIC.
    """
    window_ns = FRESH_PERIODS * announce_period_ns
    stamp_ns = announce.announce_timestamp_ns
    if announce.announce_clock_domain is ClockDomain.MONOTONIC:
        return stamp_ns >= joined_ns and abs(now_ns - stamp_ns) <= window_ns
    return abs(wall_ns - stamp_ns) <= window_ns


def flaw_in(response: AttachResponse, wanted_stream_id: int) -> str | None:
    """Why the OK of an attach cannot be used (Driver Model §4.2); None when it can."""
    required = ["lease_id", "stream_id", "epoch", "layout_version", "header_nslots", "header_slot_bytes"]
    if isinstance(response, ShmAttachResponse):  # the other dialect has none (K9)
        required.append("max_dims")
    missing = [name for name in required if getattr(response, name) is None]
    if missing:
        return f"{', '.join(missing)} missing"
    if wanted_stream_id and response.stream_id != wanted_stream_id:
        return f"it is for stream {response.stream_id}, not {wanted_stream_id}"
    if isinstance(response, ShmAttachResponse) and response.max_dims != MAX_DIMS:
        return f"max_dims: expected {MAX_DIMS}, found {response.max_dims}"
    try:
        for uri in Regions.of(response).uris:
            if not uri.strip():
                return "a region URI is empty"
            RegionUri.parse(uri)
    except (RemoteProtocolError, RegionRejected) as error:
        return str(error)
    return None
