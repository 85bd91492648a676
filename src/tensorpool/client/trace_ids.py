# SPDX-License-Identifier: Apache-2.0
"""Trace ids: which frame is meant, wherever it goes, and from which frames it was made. Decision K9.

An id is 64 bits: a 0, so that it fits a signed BIGINT; 46 bits of time in ticks of 16,384 ns since 2026-01-01 UTC; a
bit that says that no driver assigned the node id; 16 bits of node id. `_core.TraceIds` makes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, Protocol

from tensorpool.errors import LocalProtocolError
from tensorpool.wire.trace import Parent

MAX_PARENTS: Final = 10_000
MAX_TRACE_ID: Final = 2**64 - 2

MAX_NODE_ID: Final = 2**16 - 1

_NODE_BITS: Final = 16
_TICK_NS: Final = 2**14
_FIRST: Final = datetime(2026, 1, 1, tzinfo=UTC)


class Traced(Protocol):
    """A frame, live or of a recording."""

    @property
    def trace_id(self) -> int | None: ...


class TraceIdParts(NamedTuple):
    """What an id that tensorpool made says."""

    time: datetime  # when it was made, in steps of 16 microseconds
    node_id: int
    is_derived: bool  # the node id, from a client id: another node may have the same


def trace_id_parts(trace_id: int) -> TraceIdParts:
    """Take an id apart. Those of other implementations have other parts.

    >>> trace_id_parts(0x1234567890ABCD)
    TraceIdParts(time=datetime.datetime(2026, 1, 8, 6, 25, 0, 63785, tzinfo=datetime.timezone.utc), node_id=43981, \
is_derived=False)
    """
    ticks = trace_id >> _NODE_BITS + 1
    node_id, is_derived = trace_id & MAX_NODE_ID, bool(trace_id >> _NODE_BITS & 1)
    return TraceIdParts(_FIRST + timedelta(microseconds=ticks * _TICK_NS // 1000), node_id, is_derived)


def derived_node_id(client_id: int) -> int:
    """For a client to which no driver has assigned one."""
    return (client_id ^ client_id >> _NODE_BITS) & MAX_NODE_ID


def parent_ids(parents: Iterable[Traced | int]) -> tuple[tuple[Parent, ...], int]:
    """The ids of parents, each once, and how many have none. Raises LocalProtocolError for what is no frame or id."""
    known: dict[int, None] = {}
    untraced = 0
    try:
        for count, parent in enumerate(parents, 1):
            trace_id = parent if isinstance(parent, int) else parent.trace_id or 0
            is_untraced = trace_id == 0 and not isinstance(parent, int)
            if count > MAX_PARENTS or (not is_untraced and not _is_trace_id(trace_id)):
                text = f"parents: expected at most {MAX_PARENTS} frames, or trace ids from 1 to 2^64 - 2"
                raise LocalProtocolError(text)
            untraced += is_untraced
            if not is_untraced:
                known[trace_id] = None
    except (TypeError, AttributeError):
        text = f"parents = {parents!r:.80}: expected a list of frames, or of their trace ids"
        raise LocalProtocolError(text) from None
    return tuple(Parent(trace_id=parent) for parent in known), untraced


def _is_trace_id(value: object) -> bool:
    return type(value) is int and 0 < value <= MAX_TRACE_ID
