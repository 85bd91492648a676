# SPDX-License-Identifier: Apache-2.0
"""An epoch as clients learn of it, and the two messages that name all its regions: a grant and an announce.

Driver Model §4.2; Wire §10.1.1; decision K9."""

from __future__ import annotations

from typing import Any

import msgspec

from tensorpool._core import HEADER_SLOT_BYTES, MAX_DIMS
from tensorpool.shm.layout import RingSpec
from tensorpool.wire.attach import AttachRequest, AttachResponse
from tensorpool.wire.control import ClockDomain, ShmPoolAnnounce
from tensorpool.wire.control import PayloadPool as AnnouncedPool
from tensorpool.wire.driver import (
    ExtendedAttachRequest,
    ExtendedAttachResponse,
    PayloadPool,
    ResponseCode,
    ShmAttachResponse,
)


class Epoch(msgspec.Struct, frozen=True):
    """One generation of a stream's memory: where its regions are."""

    stream_id: int
    epoch: int
    layout_version: int
    ring: RingSpec
    header_region_uri: str
    pool_region_uris: tuple[str, ...]


def grant(
    epoch: Epoch, request: AttachRequest, lease_id: int, expiry_ns: int, node_id: int | None = None
) -> AttachResponse:
    """An OK in the dialect of the request, with all that it must carry."""
    fields: dict[str, Any] = {
        "correlation_id": request.correlation_id,
        "code": ResponseCode.OK,
        "lease_id": lease_id,
        "lease_expiry_timestamp_ns": expiry_ns,
        "stream_id": epoch.stream_id,
        "epoch": epoch.epoch,
        "layout_version": epoch.layout_version,
        "header_nslots": epoch.ring.nslots,
        "header_slot_bytes": HEADER_SLOT_BYTES,
        "payload_pools": tuple(
            PayloadPool(
                pool_id=pool.pool_id, pool_nslots=epoch.ring.nslots, stride_bytes=pool.stride_bytes, region_uri=uri
            )
            for pool, uri in zip(epoch.ring.pools, epoch.pool_region_uris, strict=True)
        ),
        "header_region_uri": epoch.header_region_uri,
    }
    if isinstance(request, ExtendedAttachRequest):
        return ExtendedAttachResponse(**fields, node_id=node_id)
    return ShmAttachResponse(**fields, max_dims=MAX_DIMS)


def announce(epoch: Epoch, *, producer_id: int, timestamp_ns: int, clock_domain: ClockDomain) -> ShmPoolAnnounce:
    """The announce of the epoch; `producer_id` 0 is none."""
    return ShmPoolAnnounce(
        stream_id=epoch.stream_id,
        producer_id=producer_id,
        epoch=epoch.epoch,
        announce_timestamp_ns=timestamp_ns,
        announce_clock_domain=clock_domain,
        layout_version=epoch.layout_version,
        header_nslots=epoch.ring.nslots,
        header_slot_bytes=HEADER_SLOT_BYTES,
        payload_pools=tuple(
            AnnouncedPool(
                pool_id=pool.pool_id, pool_nslots=epoch.ring.nslots, stride_bytes=pool.stride_bytes, region_uri=uri
            )
            for pool, uri in zip(epoch.ring.pools, epoch.pool_region_uris, strict=True)
        ),
        header_region_uri=epoch.header_region_uri,
    )
