# SPDX-License-Identifier: Apache-2.0
"""Another configuration for a driver that runs: what differs, whether it can change now, and what follows for streams.

All or nothing: either every difference can be applied, or `plan` names each that cannot and nothing changes. What
clients have agreed on with the driver (endpoints, lease times, directories) needs a restart; streams, profiles, ranges,
registries and limits do not. A stream with leases is not retired, and an id that is lent stays in its range. A stream
whose profile changes gets the new ring with its next producer. Holds no clock and does no IO.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from tensorpool import settings
from tensorpool.driver.config import DriverConfig, StreamConfig
from tensorpool.settings import ReloadRefused

# Policies that clients need not agree on with the driver, and that nothing was made by at its start.
POLICIES: Final = (
    "allow_dynamic_streams",
    "default_profile",
    "prefault_shm",
    "epoch_gc_enabled",
    "epoch_gc_keep",
    "epoch_gc_min_age_ns",
    "epoch_gc_on_startup",
    "shutdown_timeout_ms",
    "shutdown_token",
    "recreate_on_startup",
    "max_provisioned_stream_bytes",
    "max_provisioned_bytes",
    "max_bytes",
    "max_leases",
    "max_streams",
    "max_user_leases",
    "max_user_streams",
    "max_user_bytes",
    "dynamic_stream_linger_ms",
    "node_id_reuse_cooldown_ms",
    "rate_limited_default_hz",
)
CHANGEABLE: Final = re.compile(
    r"(streams|profiles|client)\..+|driver\.((stream|descriptor_stream|control_stream|node)_id_range|dialect)"
    rf"|discovery\.registries\[.+|policies\.({'|'.join(POLICIES)})"
)


class InUse(msgspec.Struct, frozen=True, kw_only=True):
    """What clients hold at the moment: by stream who, as an error names them; and the ids that were lent."""

    holders: dict[int, list[str]] = {}
    dynamic_ids: frozenset[int] = frozenset()  # of streams that clients created
    descriptor_ids: frozenset[int] = frozenset()
    control_ids: frozenset[int] = frozenset()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The new configuration and what it changes; `lines` say it key by key."""

    config: DriverConfig
    lines: tuple[str, ...] = ()
    added: tuple[tuple[str, StreamConfig], ...] = ()  # streams by name
    retired: tuple[int, ...] = ()  # ids of streams that no client uses
    changed: tuple[tuple[str, StreamConfig], ...] = ()  # same id, other name or other ring


def plan(old: DriverConfig, new: DriverConfig, use: InUse) -> Plan:
    """What it takes to get from one configuration to the other. Raises ReloadRefused with every reason."""
    lines = settings.differences(old, new)
    refused = settings.fixed(lines, CHANGEABLE)
    present = {stream.stream_id: (name, stream) for name, stream in old.streams.items()}
    wanted = {stream.stream_id: (name, stream) for name, stream in new.streams.items()}
    refused += [
        f'stream "{present[stream_id][0]}" ({stream_id}) is in use by {_some(use.holders[stream_id])}'
        for stream_id in sorted((present.keys() - wanted.keys()) & use.holders.keys())
    ]
    refused += [
        f"id {stream_id} of [streams.{wanted[stream_id][0]}] is in use by {_some(use.holders[stream_id])}"
        for stream_id in sorted(wanted.keys() & use.dynamic_ids & use.holders.keys())
    ]
    ids = new.driver.stream_id_range
    outside = sorted(number for number in use.dynamic_ids - wanted.keys() if number not in ids)
    refused += [
        f"driver.stream_id_range {_ids(ids)}: stream {number} is in use by {_some(use.holders[number])}"
        for number in outside
        if number in use.holders
    ]
    for kind, lent in (("descriptor", use.descriptor_ids), ("control", use.control_ids)):
        given = getattr(new.driver, f"{kind}_stream_id_range")
        if gone := sorted(number for number in lent if number not in given):
            numbers = ", ".join(map(str, gone))
            refused.append(f"driver.{kind}_stream_id_range {_ids(given)}: consumers have {numbers}")
    if refused:
        raise ReloadRefused("; ".join(refused))
    added = [wanted[stream_id] for stream_id in sorted(wanted.keys() - present.keys())]
    changed = [
        wanted[stream_id]
        for stream_id in sorted(wanted.keys() & present.keys())
        if present[stream_id][0] != wanted[stream_id][0]
        or old.profiles[present[stream_id][1].profile] != new.profiles[wanted[stream_id][1].profile]
    ]
    return Plan(
        config=new,
        lines=tuple(lines.values()),
        added=tuple(added),
        retired=(*sorted(present.keys() - wanted.keys()), *outside),
        changed=tuple(changed),
    )


def _ids(given: settings.Range) -> str:
    return str(given) or "without ids"


def _some(holders: Iterable[str], most: int = 5) -> str:
    names = list(holders)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
