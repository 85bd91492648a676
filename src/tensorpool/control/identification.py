# SPDX-License-Identifier: Apache-2.0
"""The driver's command `identify`: which process holds a lease, as its client declares it.

Ours: the specified messages say nothing of processes, and stay as they are. With it the driver can see that the process
behind a lease has ended. Clients find the driver's service by the control stream on which they ask for leases, since
they need not know its instance id.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tensorpool.channel import Endpoint
from tensorpool.control.config import MAX_TAG_BYTES
from tensorpool.process_identity import ProcessIdentity

KEY: Final = "identify"


class LeaseOwner(msgspec.Struct, frozen=True, kw_only=True):
    """The value of the command, as JSON: a lease, by all of its ids, and the process that holds it."""

    lease_id: int
    stream_id: int
    client_id: int
    process: ProcessIdentity


def driver_tag(control: Endpoint) -> str:
    """A tag of the driver that grants leases on this control stream.

    >>> driver_tag(Endpoint("aeron:ipc?term-length=4m", 1000))
    'service:driver-at:1000:ipc'
    """
    address, stream_id = control.place
    return ":".join(["service:driver-at", str(stream_id), *(part or "" for part in address)])[:MAX_TAG_BYTES]
