# SPDX-License-Identifier: Apache-2.0
"""Whose messages a receiver believes: hosts by their address, and one session for each mapping.

    any session ──its announce is accepted──► followed ──its image goes, or it is silent for long──► any session
                                                 └──messages of other sessions are dropped, and counted

Anybody who can send datagrams to the bridge can open a session; a session id is chosen by its publisher, 32 random bits
that only hosts on the way can see. Chunks and metadata are judged by `tensorpool._core.SessionPin`, which is given the
session that is followed here. Holds no clock and does no IO.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tensorpool._core import AllowedSources, ImageEvent, address_of

SILENT_PERIODS: Final = 3  # G17: as long as a source's epoch outlives its last message


class Origin(msgspec.Struct, frozen=True):
    """A session, and the address of the host that it comes from; "" where every address that is allowed is as good."""

    session_id: int
    address: str


class Sources:
    """The sessions of one subscription whose hosts are allowed.

    >>> sources = Sources(["10.0.0.0/8"], is_ipc=False)
    """

    def __init__(self, allow_from: tuple[str, ...], *, is_ipc: bool) -> None:
        self._allowed = AllowedSources(allow_from)
        self._is_local = is_ipc
        self._is_listed = bool(allow_from)
        self._origins: dict[int, Origin] = {}

    def on_image(self, event: ImageEvent) -> None:
        if not event.available:
            self._origins.pop(event.session_id, None)
            return
        address = address_of(event.source)
        if self._is_local or self._allowed.allows(address):
            any_is_good = self._is_local or self._is_listed
            self._origins[event.session_id] = Origin(event.session_id, "" if any_is_good else address)

    def find(self, session_id: int) -> Origin | None:
        """None: its host is not allowed."""
        return self._origins.get(session_id)


class FollowedSession:
    """The session of the control stream that speaks for one mapping's source.

    >>> followed = FollowedSession(announce_period_ns=10**9)
    >>> followed.follow(Origin(1, "10.0.0.7"), now_ns=0)
    True
    >>> followed.may_follow(2, 0, now_ns=10**9), followed.may_follow(2, 0, now_ns=3 * 10**9)
    (False, True)
    """

    def __init__(self, announce_period_ns: int) -> None:
        self._silence_ns = SILENT_PERIODS * announce_period_ns
        self._heard_ns = 0
        self.origin: Origin | None = None

    def may_follow(self, session_id: int, last_chunk_ns: int, now_ns: int) -> bool:
        """Whether an announce of this session counts: of the one that is followed, or of any if that one is silent."""
        if self.origin is None or self.origin.session_id == session_id:
            return True
        return now_ns - max(self._heard_ns, last_chunk_ns) >= self._silence_ns

    def follow(self, origin: Origin, now_ns: int) -> bool:
        """Its announce was accepted; whether it is another session than before."""
        is_other = origin != self.origin
        self.origin, self._heard_ns = origin, now_ns
        return is_other

    def is_followed(self, session_id: int) -> bool:
        return self.origin is not None and self.origin.session_id == session_id

    def on_image_gone(self, session_id: int) -> bool:
        """Whether it was the one that was followed; then the next announce decides."""
        is_gone = self.is_followed(session_id)
        if is_gone:
            self.origin = None
        return is_gone
