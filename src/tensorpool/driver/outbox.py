# SPDX-License-Identifier: Apache-2.0
"""What the driver has to send: answers and notices in their order, then at most one announce of each stream.

An announce is made when it can leave, so it is stamped then and names the epoch that is current then; a newer one of
the same stream is the same entry. What no publication can carry is dropped, counted, and logged once for each kind;
where too much waits the oldest goes first, since its client has asked again. Decisions E9, E45.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Final, Protocol

from tensorpool.aeron import OfferResult
from tensorpool.logs import Logger
from tensorpool.wire import Message

MAX_MESSAGES: Final = 10_000
MAX_BYTES: Final = 16 << 20


class Outlet(Protocol):
    """A publication that messages leave through."""

    @property
    def max_message_length(self) -> int: ...
    def offer(self, data: bytes) -> OfferResult: ...


class Outbox:
    """Everything that waits to be sent. `counts` gets `messages_unsendable` and `messages_dropped`."""

    def __init__(self, counts: Counter[str], log: Logger) -> None:
        self._counts = counts
        self._log = log
        self._messages: deque[tuple[str, bytes]] = deque()  # each with its kind
        self._bytes = 0
        self._announces: dict[int, None] = {}  # stream ids, the one that waits longest first
        self._logged: set[str] = set()

    def __len__(self) -> int:
        return len(self._messages) + len(self._announces)

    @property
    def size_bytes(self) -> int:
        """Of the messages that wait; announces take nothing before they leave."""
        return self._bytes

    def post(self, message: Message) -> None:
        """Queue an answer or a notice."""
        kind = type(message).__name__
        data = self._encoded(kind, message)
        if data is None:
            return
        self._messages.append((kind, data))
        self._bytes += len(data)
        while len(self._messages) > MAX_MESSAGES or (self._bytes > MAX_BYTES and len(self._messages) > 1):
            self._take()
            self._counts["messages_dropped"] += 1

    def announce(self, stream_id: int) -> None:
        """Queue the announce of a stream, unless it waits already."""
        if stream_id in self._announces:
            self._counts["announces_superseded"] += 1
        self._announces[stream_id] = None

    def flush(self, answers: Outlet, announces: Outlet, announce_of: Callable[[int], Message | None]) -> int:
        """Send what there is room for. Raises TransportError and Closed when the publications are gone."""
        sent = 0
        while self._messages and self._offer(answers, *self._messages[0]):
            self._take()
            sent += 1
        if self._messages and announces is answers:
            return sent
        for stream_id in list(self._announces):
            message = announce_of(stream_id)
            data = None if message is None else self._encoded("ShmPoolAnnounce", message)
            if data is not None and not self._offer(announces, "ShmPoolAnnounce", data):
                break
            del self._announces[stream_id]
            sent += data is not None
        return sent

    def drop_announces(self) -> None:
        """Nothing is announced any more."""
        self._announces.clear()

    def clear(self) -> None:
        """Those who waited are not there any more."""
        self._counts["messages_dropped"] += len(self._messages)
        self._messages.clear()
        self._bytes = 0
        self._announces.clear()

    def _take(self) -> None:
        _, data = self._messages.popleft()
        self._bytes -= len(data)

    def _offer(self, outlet: Outlet, kind: str, data: bytes) -> bool:
        """Whether the message is settled: sent, without any listener, or one that can never be sent."""
        limit = outlet.max_message_length
        if len(data) > limit:
            self._refuse(kind, f"{len(data)} bytes; the channel carries {limit}, an eighth of its term-length")
            return True
        result = outlet.offer(data)
        return bool(result) or result is OfferResult.NOT_CONNECTED

    def _encoded(self, kind: str, message: Message) -> bytes | None:
        try:
            return message.encode()
        except Exception as error:  # whatever a field holds: the others' messages go on
            self._refuse(kind, f"{type(error).__name__}: {error}")
            return None

    def _refuse(self, kind: str, why: str) -> None:
        self._counts["messages_unsendable"] += 1
        if kind not in self._logged:
            self._logged.add(kind)
            self._log.error("message_unsendable", kind=kind, error=why[:500])
