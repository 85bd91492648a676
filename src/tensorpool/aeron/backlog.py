# SPDX-License-Identifier: Apache-2.0
"""The messages that lay in a stream's logs before we subscribed.

A new subscriber on IPC begins where the slowest one is. It may find requests that an earlier process answered, and even
the one that ended it.
"""

from __future__ import annotations

from typing import Final

from tensorpool._core import MessageInfo, Publication

AT_LEAST_NS: Final = 50_000_000  # logs come into sight a moment after we subscribed
AT_MOST_NS: Final = 1_000_000_000  # a log that is filled without pause must not hold us up


class Backlog:
    """Recognizes messages of the backlog.

    `shared` is a publication to the log that all non-exclusive publishers of the stream share: its position at the time
    of subscribing is known. Messages in other logs belong to the backlog until all logs were read to their end once.
    """

    def __init__(self, now_ns: int, shared: Publication | None = None) -> None:
        self._subscribed_ns = now_ns
        self._shared_session_id = None if shared is None else shared.session_id
        self._shared_end = 0 if shared is None else shared.position
        self._is_reading = True

    def contains(self, info: MessageInfo) -> bool:
        """Whether a message that was just read was there before us."""
        if info.session_id == self._shared_session_id:
            return info.position <= self._shared_end
        return self._is_reading

    def on_polled(self, fragments: int, now_ns: int) -> None:
        """Call after every poll with the number of fragments that it read."""
        if self._is_reading:
            age_ns = now_ns - self._subscribed_ns
            self._is_reading = age_ns <= AT_MOST_NS and (fragments > 0 or age_ns <= AT_LEAST_NS)
