# SPDX-License-Identifier: Apache-2.0
"""The part of an announce that the view keeps, and why no client could map it. No IO, no clock. C16, B19, B20."""

from __future__ import annotations

from typing import Final

import msgspec

from tensorpool.errors import RemoteProtocolError
from tensorpool.shm.layout import RingSpec
from tensorpool.wire.control import ShmPoolAnnounce

MAX_POOLS: Final = 64
MAX_PATHS: Final = 16_384  # characters, of all regions together


def is_bloated(announce: ShmPoolAnnounce) -> bool:
    """Whether it is longer than any stream needs, so that no sender can fill our memory with paths."""
    pools = announce.payload_pools
    paths = sum(len(pool.region_uri) for pool in pools) + len(announce.header_region_uri)
    return len(pools) > MAX_POOLS or paths > MAX_PATHS


def lean(announce: ShmPoolAnnounce) -> ShmPoolAnnounce:
    """The part of an announce that is kept."""
    if not is_bloated(announce):
        return announce
    pools = tuple(msgspec.structs.replace(pool, region_uri="") for pool in announce.payload_pools[:MAX_POOLS])
    return msgspec.structs.replace(announce, payload_pools=pools, header_region_uri="")


def shape_of(announce: ShmPoolAnnounce) -> tuple[object, ...]:
    pools = tuple((pool.pool_id, pool.pool_nslots, pool.stride_bytes) for pool in announce.payload_pools)
    return announce.header_nslots, announce.header_slot_bytes, pools, is_bloated(announce)


def flaw_in(announce: ShmPoolAnnounce) -> str | None:
    if is_bloated(announce):
        return f"announced ring: expected at most {MAX_POOLS} pools and {MAX_PATHS} characters of paths"
    try:
        RingSpec.announced(announce.header_nslots, announce.header_slot_bytes, announce.payload_pools)
    except RemoteProtocolError as error:
        return str(error)
    return None
