# SPDX-License-Identifier: Apache-2.0
"""Whether the channels of a configuration can carry the largest messages that its driver will have to send.

Those are a grant and an announce, which name every region of a stream. Aeron carries an eighth of a term, at most
16 MiB. Refused at start, where the operator can still change it, instead of at each attach.
Driver Model §4.2; Wire §10.1.1; decision E39.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from tensorpool.channel import check_channel
from tensorpool.driver.epoch_messages import Epoch, announce
from tensorpool.errors import ConfigError
from tensorpool.shm.epochs import region_uris
from tensorpool.shm.layout import LAYOUT_VERSION, MAX_EPOCH
from tensorpool.shm.namespace import namespace_path
from tensorpool.wire.control import ClockDomain
from tensorpool.wire.driver import ExtendedAttachResponse, PayloadPool, ResponseCode

if TYPE_CHECKING:
    from tensorpool.driver.config import DriverConfig

MAX_MESSAGE_BYTES: Final = 16 << 20
ERROR_MESSAGE_BYTES: Final = 1024
_LARGEST_STREAM_ID: Final = 0xFFFF_FFFE


def check_message_sizes(
    config: DriverConfig, control_bytes: int | None = None, announce_bytes: int | None = None
) -> None:
    """Compare with what the publications carry, or else with what the channels' own term-length allows.

    Raises ConfigError with the arithmetic.
    """
    endpoints, shm = config.driver, config.shm
    path = namespace_path(shm.base_dir, shm.namespace)
    names = {stream.profile for stream in config.streams.values()}
    if config.policies.allow_dynamic_streams:
        names.add(config.policies.default_profile)
    for name in sorted(names):
        ring = config.profiles[name].ring
        uris = list(map(str, region_uris(path, ring, _LARGEST_STREAM_ID, MAX_EPOCH, shm.require_hugepages)))
        largest = Epoch(_LARGEST_STREAM_ID, MAX_EPOCH, LAYOUT_VERSION, ring, uris[0], tuple(uris[1:]))
        needed = _grant_bytes(largest), _announce_bytes(largest)
        _check(name, "driver.control_channel", endpoints.control_channel, control_bytes, needed[0], uris)
        _check(name, "driver.announce_channel", endpoints.announce_channel, announce_bytes, needed[1], uris)


def carried_bytes(key: str, channel: str) -> int | None:
    """The longest message of a channel with a term-length of its own; None where the media driver decides."""
    term = check_channel(key, channel).terms.get("term-length")
    return min(term // 8, MAX_MESSAGE_BYTES) if isinstance(term, int) else None


def limited(text: str) -> str:
    """At most 1024 bytes, cut between characters (§4.2, E39)."""
    encoded = text.encode("utf-8", "surrogateescape")
    return encoded[:ERROR_MESSAGE_BYTES].decode("utf-8", "ignore") if len(encoded) > ERROR_MESSAGE_BYTES else text


def _check(profile: str, key: str, channel: str, limit: int | None, needed: int, uris: list[str]) -> None:
    limit = carried_bytes(key, channel) if limit is None else limit
    if limit is None or needed <= limit:
        return
    term = 1 << (8 * needed - 1).bit_length()
    remedy = f"use a term-length of at least {term}" if term // 8 <= MAX_MESSAGE_BYTES else "use fewer pools"
    raise ConfigError(
        key,
        channel,
        f"a channel that carries {needed} bytes: profile {profile} has {len(uris) - 1} pools, and the URIs of its "
        f"{len(uris)} regions have {sum(map(len, uris))} bytes; this one carries {limit}, an eighth of its "
        f"term-length; {remedy}",
    )


def _grant_bytes(epoch: Epoch) -> int:
    """Of the longest answer: in the dialect whose block is longer, an OK or a refusal."""
    refused = ExtendedAttachResponse(correlation_id=0, code=ResponseCode.REJECTED)
    pools = tuple(
        PayloadPool(pool_id=0, pool_nslots=0, stride_bytes=0, region_uri=uri) for uri in epoch.pool_region_uris
    )
    granted = msgspec.structs.replace(refused, payload_pools=pools, header_region_uri=epoch.header_region_uri)
    return max(len(granted.encode()), len(refused.encode()) + ERROR_MESSAGE_BYTES)


def _announce_bytes(epoch: Epoch) -> int:
    return len(announce(epoch, producer_id=0, timestamp_ns=0, clock_domain=ClockDomain.MONOTONIC).encode())
