# SPDX-License-Identifier: Apache-2.0
"""The phases of an attachment, and what changes them. Driver Model §4.7, §4.12."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Final


class Phase(Enum):
    """Where an attachment stands."""

    UNATTACHED = auto()
    ATTACHING = auto()
    ABANDONED = auto()
    ATTACHED = auto()
    DETACHING = auto()
    BACKOFF = auto()
    CLOSED = auto()


class Event(Enum):
    """What changes the phase of an attachment."""

    START = "start"
    GRANT = "OK that can be used"
    REFUSAL = "refusal, or OK that cannot be used"
    LOSS = "revoked, expired, driver silent, memory unusable"
    DETACH = "closed by its owner"
    ABANDON = "closed by its owner, request unanswered"
    RELEASE = "lease given back"
    SHUTDOWN = "the driver shuts down"
    DISCONNECTION = "the media driver is gone"


# Every change of phase is a row; an event without a row for the phase changes nothing.
TRANSITIONS: Final[Mapping[tuple[Phase, Event], Phase]] = MappingProxyType(
    {
        (Phase.UNATTACHED, Event.START): Phase.ATTACHING,
        (Phase.UNATTACHED, Event.DETACH): Phase.CLOSED,
        (Phase.UNATTACHED, Event.ABANDON): Phase.ABANDONED,
        (Phase.UNATTACHED, Event.SHUTDOWN): Phase.UNATTACHED,
        (Phase.UNATTACHED, Event.DISCONNECTION): Phase.UNATTACHED,
        (Phase.ATTACHING, Event.GRANT): Phase.ATTACHED,
        (Phase.ATTACHING, Event.REFUSAL): Phase.BACKOFF,
        (Phase.ATTACHING, Event.ABANDON): Phase.ABANDONED,
        (Phase.ATTACHING, Event.SHUTDOWN): Phase.UNATTACHED,
        (Phase.ATTACHING, Event.DISCONNECTION): Phase.UNATTACHED,
        (Phase.BACKOFF, Event.START): Phase.ATTACHING,
        (Phase.BACKOFF, Event.DETACH): Phase.CLOSED,
        (Phase.BACKOFF, Event.ABANDON): Phase.ABANDONED,
        (Phase.BACKOFF, Event.SHUTDOWN): Phase.UNATTACHED,
        (Phase.BACKOFF, Event.DISCONNECTION): Phase.UNATTACHED,
        (Phase.ATTACHED, Event.LOSS): Phase.BACKOFF,
        (Phase.ATTACHED, Event.DETACH): Phase.DETACHING,
        (Phase.ATTACHED, Event.SHUTDOWN): Phase.UNATTACHED,
        (Phase.ATTACHED, Event.DISCONNECTION): Phase.UNATTACHED,
        (Phase.ABANDONED, Event.GRANT): Phase.DETACHING,
        (Phase.ABANDONED, Event.REFUSAL): Phase.CLOSED,
        (Phase.ABANDONED, Event.SHUTDOWN): Phase.CLOSED,
        (Phase.DETACHING, Event.RELEASE): Phase.CLOSED,
        (Phase.DETACHING, Event.SHUTDOWN): Phase.CLOSED,
        (Phase.DETACHING, Event.DISCONNECTION): Phase.CLOSED,
    }
)
