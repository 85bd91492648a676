# SPDX-License-Identifier: Apache-2.0
"""What `Lifecycle` has the conductor do."""

from __future__ import annotations

import msgspec

from tensorpool.shm.layout import RingSpec
from tensorpool.wire import Message


class Send(msgspec.Struct, frozen=True):
    """Publish on the control stream."""

    message: Message


class Announce(msgspec.Struct, frozen=True):
    """Publish the announce of this stream's current epoch, stamped when it leaves."""

    stream_id: int


class CreateEpoch(msgspec.Struct, frozen=True):
    """Make a new epoch; answer with `on_epoch_created` or `on_epoch_failed`. `reserve`: a producer will write it."""

    stream_id: int
    ring: RingSpec
    reserve: bool


class Report(msgspec.Struct, frozen=True):
    """Publish on the status stream that the attach of this correlation id is being worked on."""

    correlation_id: int
    stream_id: int
    size_bytes: int
    elapsed_ns: int


class DropStream(msgspec.Struct, frozen=True):
    """No client uses this dynamic stream any more: its memory can be removed."""

    stream_id: int


class Exit(msgspec.Struct, frozen=True):
    """All messages are sent: the driver ends."""


type Effect = Send | Announce | CreateEpoch | Report | DropStream | Exit
