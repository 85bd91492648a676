# SPDX-License-Identifier: Apache-2.0
"""The driver's audit trail: what happened to leases and epochs, with the client behind it.

Events wait a moment for the declaration of their client, since it comes in another log than the request, and for the
name of a stream that a producer names after its attach; their order stays. A client that is refused asks again and
again: that is one line, and one more each minute with the number of times. Holds no clock and does no IO.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from tensorpool.driver.clients import Clients, Owner
from tensorpool.driver.leases import Lease
from tensorpool.process_description import process_fields
from tensorpool.wire.attach import AttachRequest
from tensorpool.wire.driver import ResponseCode

ATTACHED: Final = "lease_attached"
WAIT_NS: Final = 1_000_000_000  # for a declaration
MAX_WAITING: Final = 512  # events; when there are more, the oldest does not wait
AGAIN_NS: Final = 60_000_000_000  # between two lines about the same refusal
MAX_REFUSALS: Final = 1024  # that are remembered


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened; `client_id` names the client that had part in it, if any."""

    name: str
    stream_id: int | None = None
    client_id: int | None = None
    owner: Owner | None = None  # where it is known already
    fields: Mapping[str, object] = {}
    at_ns: int = 0


class _Refusal(msgspec.Struct):
    next_ns: int
    repeats: int = 0


class Trail:
    """Events on their way to the log.

    >>> trail = Trail(Clients(), lambda stream_id: "camera")
    >>> trail.add(Event(name="epoch_created", stream_id=7, fields={"epoch": 1}), 0)
    >>> list(trail.take(0))
    [('epoch_created', {'stream_id': 7, 'stream': 'camera', 'epoch': 1})]
    """

    def __init__(self, clients: Clients, name_of: Callable[[int], str]) -> None:
        self._clients = clients
        self._name_of = name_of
        self._waiting: deque[Event] = deque()
        self._refusals: OrderedDict[tuple[object, ...], _Refusal] = OrderedDict()

    def add(self, event: Event, now_ns: int) -> None:
        counted = self._counted(event, now_ns) if event.name == "attach_refused" else event
        if counted is not None:
            self._waiting.append(msgspec.structs.replace(counted, at_ns=now_ns))

    def take(self, now_ns: int, *, is_last: bool = False) -> Iterator[tuple[str, dict[str, object]]]:
        """The events whose client is known or has waited long enough, each with its fields."""
        while self._waiting:
            event = self._waiting[0]
            is_over = is_last or now_ns - event.at_ns >= WAIT_NS or len(self._waiting) > MAX_WAITING
            owner = event.owner
            if owner is None and event.client_id is not None:
                owner = self._clients.owner_of(event.client_id)
            is_named = event.name != ATTACHED or event.stream_id is None or bool(self._name_of(event.stream_id))
            if not is_over and (not is_named or (owner is None and event.client_id is not None)):
                return
            self._waiting.popleft()
            yield event.name, self._fields(event, owner)

    def _fields(self, event: Event, owner: Owner | None) -> dict[str, object]:
        found: dict[str, object] = {}
        if event.stream_id is not None:
            found = {"stream_id": event.stream_id, "stream": self._name_of(event.stream_id) or None}
        if event.client_id is not None:
            found["client_id"] = event.client_id
            found |= identity(owner)
        return found | dict(event.fields)

    def _counted(self, event: Event, now_ns: int) -> Event | None:
        """The event with how often it came since the last line about it; None where that was a moment ago."""
        client = None if event.client_id is None else self._clients.session_of(event.client_id)
        key = (client or event.client_id, event.stream_id, event.fields.get("role"), event.fields.get("code"))
        known = self._refusals.get(key)
        if known is not None and now_ns < known.next_ns:
            known.repeats += 1
            return None
        repeats = {} if known is None or not known.repeats else {"repeats": known.repeats}
        self._refusals[key] = _Refusal(now_ns + AGAIN_NS)
        self._refusals.move_to_end(key)
        if len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)
        return msgspec.structs.replace(event, fields={**event.fields, **repeats})


def lease_event(what: str, lease: Lease, **fields: object) -> Event:
    """Something that happened to a lease."""
    known: dict[str, object] = {"lease_id": lease.lease_id, "role": lease.role.name}
    return Event(
        name=f"lease_{what}",
        stream_id=lease.stream_id,
        client_id=lease.client_id,
        owner=lease.owner,
        fields=known | fields,
    )


def refusal_event(request: AttachRequest, code: ResponseCode, reason: str) -> Event:
    """An attach that was refused."""
    fields = {"role": request.role.name, "code": code.name, "reason": reason}
    return Event(name="attach_refused", stream_id=request.stream_id, client_id=request.client_id, fields=fields)


def identity(owner: Owner | None) -> dict[str, object]:
    """The fields of a client's process."""
    if owner is None:
        return {"identity": "unknown"}
    return process_fields(owner.process, owner.description, is_seen=owner.is_seen)
