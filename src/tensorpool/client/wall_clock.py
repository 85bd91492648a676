# SPDX-License-Identifier: Apache-2.0
"""UTC of frames: one pair of (monotonic, UTC) per epoch, taken at the producer and published with its metadata.

Frames carry the monotonic clock of the host where they were captured, which no other host can read, nor the same host
after a reboot. The pair makes UTC of it; it crosses the bridge and is recorded with the rest of the metadata. A process
that publishes frames of another producer passes that producer's pair on, or says that it knows none.
Holds no clock and does no IO.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tensorpool.wire.control import Attribute, DataSourceMeta

KEY: Final = "tensorpool.clock"
LOCAL_AGE_NS: Final = 10_000_000_000
MAX_ATTRIBUTE_BYTES: Final = 160  # of a message
_FORMAT: Final = "application/json"


class ClockPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One moment by both clocks of a host. `utc_ns` counts from 1970."""

    monotonic_ns: int
    utc_ns: int

    def utc_ns_of(self, timestamp_ns: int) -> int:
        """When it was by UTC, at a moment of the monotonic clock."""
        return self.utc_ns + timestamp_ns - self.monotonic_ns


class EpochClock(msgspec.Struct, frozen=True):
    """What the producer of an epoch published about its clock; without a pair, that it knows none."""

    pair: ClockPair | None


def with_clock(message: DataSourceMeta, clock: EpochClock) -> DataSourceMeta:
    """The message with this clock and no other."""
    others = (found for found in message.attributes if found.key != KEY)
    return msgspec.structs.replace(message, attributes=(*others, _attribute(clock)))


def clock_in(message: DataSourceMeta) -> EpochClock | None:
    """What a message says about the clock; None: nothing, or nothing that can be read."""
    for found in message.attributes:
        if found.key == KEY and found.format == _FORMAT:
            try:
                return EpochClock(msgspec.json.decode(found.value, type=ClockPair | None))
            except msgspec.DecodeError:
                return None
    return None


def utc_ns(timestamp_ns: int, clock: EpochClock | None, now: ClockPair) -> int | None:
    """UTC of a frame; None where it cannot be known.

    A producer that published no pair is taken to be on this host if the frame was stamped within the last ten seconds
    by this host's monotonic clock, of which `now` is the present moment.
    """
    if clock is not None:
        return None if clock.pair is None else clock.pair.utc_ns_of(timestamp_ns)
    return now.utc_ns_of(timestamp_ns) if 0 <= now.monotonic_ns - timestamp_ns <= LOCAL_AGE_NS else None


def _attribute(clock: EpochClock) -> Attribute:
    return Attribute(key=KEY, format=_FORMAT, value=msgspec.json.encode(clock.pair))
