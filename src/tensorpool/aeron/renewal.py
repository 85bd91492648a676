# SPDX-License-Identifier: Apache-2.0
"""A publication that no subscriber can stop: its log is replaced when one that does not poll holds it.

Aeron lets the slowest tethered subscriber decide how much a log takes, and a process that never polls stops all
publishers after half a term. A new session has a log of its own; the old one is revoked once all other subscribers have
read it, so for each of them messages stay in the order in which they were sent.

    FLOWING ──back pressure──► HELD ──some do not read, all others have read everything──► SETTLING ──► FLOWING
                                │ the log has room again: FLOWING                            (a new session)
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import Final

from tensorpool._core import Client, MessageInfo, OfferResult, Publication
from tensorpool.aeron.holders import Holder, Sample
from tensorpool.aeron.transport import Bell
from tensorpool.errors import TransportError

SAMPLE_EVERY_NS: Final = 100_000_000  # as long as untethered subscribers may take before Aeron skips them
STANDS_STILL_NS: Final = 300_000_000  # for a subscriber that was not known to: longer than a pause of its runtime
SETTLE_NS: Final = 50_000_000  # until the others' clients know of the new session
SESSION_AT_LEAST_NS: Final = 250_000_000  # bounds how many logs the media driver has to keep
MAX_LINGERING: Final = 8  # logs that an older Aeron, which cannot revoke, keeps until their holder is gone
REMEMBERED_SESSIONS: Final = 64


class RenewedPublication:
    """An exclusive publication with as many sessions, one after the other, as it takes.

    `renewals` counts the sessions that were given up, `holders` are the subscribers that the last one was held by, for
    as long as they do not read on.
    """

    def __init__(self, client: Client, aeron_dir: str, channel: str, stream_id: int) -> None:
        self.renewals = 0
        self.holders: tuple[Holder, ...] = ()
        self._client = client
        self._aeron_dir = aeron_dir
        self._channel = channel
        self._stream_id = stream_id
        self.publication = self._open()  # the session that is open now
        self._sessions = deque([self.publication.session_id], REMEMBERED_SESSIONS)
        self._opened_ns = 0
        self._settled_ns = 0
        self._before: Sample | None = None  # taken when offers began to fail, or some subscriber last moved
        self._before_ns = 0
        self._sampled_ns = 0

    @property
    def max_message_length(self) -> int:
        return self.publication.max_message_length

    def is_own(self, info: MessageInfo) -> bool:
        """Whether a message came from here."""
        return info.session_id in self._sessions

    @property
    def is_connected(self) -> bool:
        return self.publication.is_connected

    def offer(self, data: bytes) -> OfferResult:
        """Append a message. Raises TransportError and Closed as a publication does."""
        now_ns = time.monotonic_ns()
        if now_ns < self._settled_ns:
            return OfferResult.BACK_PRESSURED
        result = self.publication.offer(data)
        if result:
            self._client.ring(Bell.CONTROL)
        if result or result is OfferResult.NOT_CONNECTED:
            self._before = None
        elif now_ns >= self._sampled_ns:
            self._sampled_ns = now_ns + SAMPLE_EVERY_NS
            self._look(now_ns)
        return result

    def refresh_holders(self) -> None:
        """Forget the holders that read on or are gone; to be called now and then."""
        if not self.holders:
            return
        sample = Sample(self._client.counters(), self._stream_id)
        session_id, end = self.publication.session_id, self.publication.position
        standing = {}
        for holder in self.holders:
            was = holder.subscriber
            seen = sample.subscribers.get((was.registration_id, session_id))
            if seen is not None and seen.position == (was.position if was.session_id == session_id else 0):
                standing[was.registration_id, session_id] = end - seen.position
        self.holders = sample.describe(self._aeron_dir, standing, self.holders)

    def renew(self, now_ns: int) -> None:
        """Give up the session, even where a subscriber has not read all of it, and open another."""
        old = self.publication
        self.publication = self._open()
        self._sessions.append(self.publication.session_id)
        self._opened_ns = now_ns
        self._settled_ns = now_ns + SETTLE_NS
        self._before = None
        self.renewals += 1
        self._give_up(old)

    def _give_up(self, publication: Publication) -> None:
        publication.revoke()

    def _look(self, now_ns: int) -> None:
        """Find out which subscribers hold the log, and replace it if none of them reads on."""
        sample = Sample(self._client.counters(), self._stream_id)
        behind = sample.behind(self.publication.session_id, self.publication.position)
        still = set() if self._before is None else sample.still(self._before)
        if not behind or behind.keys() - still:
            self._before, self._before_ns = sample, now_ns  # some are reading
            return
        known = {holder.subscriber.registration_id for holder in self.holders}
        if now_ns - self._before_ns < STANDS_STILL_NS and {key[0] for key in behind} - known:
            return
        self.holders = sample.describe(self._aeron_dir, behind, self.holders)
        lingering = {session_id for _, session_id in sample.subscribers} & {*self._sessions}
        if now_ns - self._opened_ns >= SESSION_AT_LEAST_NS and len(lingering) <= MAX_LINGERING:
            with contextlib.suppress(TransportError):  # there is no room for another log: tried again
                self.renew(now_ns)

    def _open(self) -> Publication:
        return self._client.add_publication(self._channel, self._stream_id, exclusive=True)
