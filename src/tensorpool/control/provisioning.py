# SPDX-License-Identifier: Apache-2.0
"""The driver's command `provision`: what a client asks for before it attaches, and what it gets.

Ours: the specifications let a driver choose the memory of a stream and have no message for it (Driver Model §4.2).
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from tensorpool.shm.layout import PoolSpec, RingSpec

KEY: Final = "provision"
SMALLEST_STRIDE: Final = 64


class RingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ring that holds at least so many frames of so many bytes.

    >>> RingRequest(slots=120, frame_bytes=6_220_800).ring
    RingSpec(nslots=128, pools=(PoolSpec(pool_id=1, stride_bytes=8388608),))
    """

    slots: Annotated[int, Meta(ge=1, le=2**31)]
    frame_bytes: Annotated[int, Meta(ge=0, le=2**31)]

    @property
    def ring(self) -> RingSpec:
        """Slots and strides are powers of two (Wire §15.22). Raises LocalProtocolError."""
        return RingSpec(_power_of_two(self.slots), (PoolSpec(1, _power_of_two(self.frame_bytes, SMALLEST_STRIDE)),))

    def is_met_by(self, ring: RingSpec | None) -> bool:
        return ring is not None and ring.nslots >= self.slots and _largest(ring) >= self.frame_bytes

    def __str__(self) -> str:
        return f"{self.slots} slots of {self.frame_bytes} bytes"


class ProvisionRequest(RingRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value of the command, as JSON. `stream_id` 0: the driver chooses one."""

    stream_id: Annotated[int, Meta(ge=0, le=2**32 - 2)]


class Provisioned(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the command, as JSON: the stream, and the ring that its next producer gets."""

    stream_id: int
    slots: int
    frame_bytes: int

    @classmethod
    def of(cls, stream_id: int, ring: RingSpec) -> Provisioned:
        return cls(stream_id=stream_id, slots=ring.nslots, frame_bytes=_largest(ring))


def describe(ring: RingSpec | None) -> str:
    """What a ring holds, for errors."""
    return "no memory" if ring is None else f"{ring.nslots} slots of up to {_largest(ring)} bytes"


def _largest(ring: RingSpec) -> int:
    return max(pool.stride_bytes for pool in ring.pools)


def _power_of_two(number: int, least: int = 1) -> int:
    return max(least, 1 << (number - 1).bit_length()) if number > 1 else least
