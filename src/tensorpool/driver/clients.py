# SPDX-License-Identifier: Apache-2.0
"""Clients: which process asks for a lease, as far as the driver knows.

A client is recognised by the Aeron session in which its requests come, and declares its process for that session
(`identify`). The first declaration counts. Where limits hold per user, an attach waits a moment for the declaration of
its session. Soft state, bounded, without clock or IO.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec

from tensorpool.process_description import ProcessDescription
from tensorpool.process_identity import ProcessIdentity
from tensorpool.wire.attach import AttachRequest

MAX_CLIENTS: Final = 20_000
MAX_WAITING: Final = 1024
DECLARATION_NS: Final = 500_000_000  # how long an attach waits: declaration and request come in different logs


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The process behind a client. `is_seen`: this host's /proc says so, too; else the client alone does."""

    process: ProcessIdentity
    description: ProcessDescription
    place: str = ""  # as ProcessIdentity.place
    is_seen: bool = False

    @property
    def user(self) -> str:
        return self.description.user

    def __str__(self) -> str:
        where = f", on {self.description.host}" if self.place else ""
        return f"pid {self.process.pid}, {self.description}{where}" + ("" if self.is_seen else ", declared")


class _Waiting(msgspec.Struct, frozen=True):
    request: AttachRequest
    session_id: int
    until_ns: int


class Clients:
    """Which session each client id was used in, and which process each session belongs to."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[int, int] = OrderedDict()  # by client id
        self._owners: OrderedDict[int, Owner] = OrderedDict()  # by session id
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._sessions) + len(self._owners)

    def on_request(self, client_id: int, session_id: int) -> None:
        """The client asks for a lease."""
        self._sessions[client_id] = session_id
        self._sessions.move_to_end(client_id)
        if len(self._sessions) > MAX_CLIENTS:
            self._sessions.popitem(last=False)

    def declare(self, session_id: int, owner: Owner) -> bool:
        """Note the process of a session; False where another process was declared for it."""
        known = self._owners.setdefault(session_id, owner)
        if known.process != owner.process:
            return False
        self._owners[session_id] = owner
        self._owners.move_to_end(session_id)
        if len(self._owners) > MAX_CLIENTS:
            self._owners.popitem(last=False)
        return True

    def session_of(self, client_id: int) -> int | None:
        return self._sessions.get(client_id)

    def owner_of(self, client_id: int) -> Owner | None:
        session_id = self._sessions.get(client_id)
        return None if session_id is None else self._owners.get(session_id)

    # --- attaches that wait for a declaration

    def defer(self, request: AttachRequest, session_id: int, now_ns: int) -> bool:
        """Whether the attach has to wait; once for each client id."""
        if session_id in self._owners or len(self._waiting) >= MAX_WAITING:
            return False
        if any(waiting.request.client_id == request.client_id for waiting in self._waiting):
            return True  # it asks again
        if self._sessions.get(request.client_id) == session_id:
            return False  # it has waited
        self._waiting.append(_Waiting(request, session_id, now_ns + DECLARATION_NS))
        return True

    def take_due(self, now_ns: int) -> list[AttachRequest]:
        """The attaches whose session was declared by now, or that have waited long enough, in their order."""
        due = [it for it in self._waiting if it.session_id in self._owners or now_ns >= it.until_ns]
        if due:
            self._waiting = [it for it in self._waiting if it not in due]
        return [it.request for it in due]
