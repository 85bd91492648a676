# SPDX-License-Identifier: Apache-2.0
"""Tables of a source (MetaBlob*): kept whole, and sent again to receivers and consumers that come later.

    announce ──► partial ──every chunk and the complete──► kept ──post──► due ──flush──► kept
                    └──a gap, another length or checksum──► dropped

A table that is not complete is not forwarded: no reader could use it. Both ends keep tables, the sender for receivers
and the receiver for consumers of its destination, up to MAX_TABLE_BYTES together; the oldest are forgotten. Holds no
clock and does no IO. Wire §10.3.3; Bridge §7.1; decision K4.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from tensorpool.wire.control import MetaBlobAnnounce, MetaBlobChunk, MetaBlobComplete

MAX_TABLE_BYTES: Final = 64 << 20  # of one mapping, for all tables together
MESSAGE_BYTES: Final = 256  # that a message takes besides its chunk
MESSAGES_PER_FLUSH: Final = 16
SECOND: Final = 1_000_000_000
REPEAT_NS: Final = 15 * SECOND  # for readers that Aeron does not report, and those that were too slow
REPEATED_BYTES_PER_S: Final = 1 << 20  # tables that are larger are repeated less often

type TableMessage = MetaBlobAnnounce | MetaBlobChunk | MetaBlobComplete
type TableKey = tuple[int, int]  # meta_version and blob_type


class _Table[T]:
    """The messages of one table, in order."""

    def __init__(self, announce: MetaBlobAnnounce, kept: T) -> None:
        self.announce: Final = announce
        self.messages = [kept]
        self._data_bytes = 0

    @property
    def key(self) -> TableKey:
        return self.announce.meta_version, self.announce.blob_type

    @property
    def size_bytes(self) -> int:
        return self._data_bytes + MESSAGE_BYTES * len(self.messages)

    def add(self, chunk: MetaBlobChunk, kept: T) -> bool:
        """Offsets grow without gap or overlap."""
        length = len(chunk.chunk_bytes)
        is_next = chunk.chunk_offset == self._data_bytes and length > 0
        if not is_next or self._data_bytes + length > self.announce.total_len:
            return False
        self._data_bytes += length
        self.messages.append(kept)
        return True

    def finish(self, complete: MetaBlobComplete, kept: T) -> bool:
        self.messages.append(kept)
        return self._data_bytes == self.announce.total_len and complete.checksum == self.announce.checksum


class Tables[T]:
    """The tables of one source in one epoch; `T` is the form in which messages are kept.

    >>> tables = Tables[bytes]()
    >>> tables.take(MetaBlobAnnounce(stream_id=1, meta_version=3, blob_type=7, total_len=0, checksum=0), b"announce")
    ''
    >>> tables.take(MetaBlobComplete(stream_id=1, meta_version=3, checksum=0), b"complete")
    ''
    >>> sent = []
    >>> tables.flush(lambda message: not sent.append(message)), sent
    (2, [b'announce', b'complete'])
    """

    def __init__(self, limit_bytes: int = MAX_TABLE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._partial: OrderedDict[int, _Table[T]] = OrderedDict()  # by meta_version: a chunk has no type
        self._kept: OrderedDict[TableKey, _Table[T]] = OrderedDict()
        self._due: OrderedDict[TableKey, None] = OrderedDict()
        self._sending: deque[T] = deque()  # what is left of the table that is being sent
        self.size_bytes = 0  # of what is kept, also of tables that are not complete

    def take(self, message: TableMessage, kept: T) -> str:
        """The next message of the source; a table that it completes is due, unless it is kept already.

        Returns why a table is dropped, or "".
        """
        version = message.meta_version
        table = self._partial.get(version)
        if isinstance(message, MetaBlobAnnounce):
            if table is not None:
                self._drop_partial(version)
            if message.total_len > self._limit_bytes:
                return "table_too_large"
            self._partial[version] = begun = _Table(message, kept)
            self.size_bytes += begun.size_bytes
            return self._make_room(begun) or ("table_incomplete" if table is not None else "")
        if table is None:
            return ""  # of a table that was dropped, or that began before we listened
        before_bytes = table.size_bytes
        is_good = table.add(message, kept) if isinstance(message, MetaBlobChunk) else table.finish(message, kept)
        self.size_bytes += table.size_bytes - before_bytes
        if not is_good:
            self._drop_partial(version)
            return "table_incomplete"
        if isinstance(message, MetaBlobComplete):
            self._keep(self._partial.pop(version))
        return self._make_room(table)

    def post(self) -> None:
        """A reader has come that has none of them: everything is due, from its beginning."""
        self._sending.clear()
        self._due = OrderedDict.fromkeys(self._kept)

    def clear(self) -> None:
        """They were of an epoch that is over."""
        self._partial.clear()
        self._kept.clear()
        self._due.clear()
        self._sending.clear()
        self.size_bytes = 0

    def period_ns(self, least_ns: int = REPEAT_NS) -> int:
        """After which it is time for `post`, for readers that Aeron does not report."""
        return max(least_ns, self.size_bytes * SECOND // REPEATED_BYTES_PER_S)

    def flush(self, offer: Callable[[T], bool], limit: int = MESSAGES_PER_FLUSH) -> int:
        """Hand over what is due, table by table; `offer` says whether a message is done with. Returns how many are."""
        for sent in range(limit):
            if not self._sending and self._due:
                key, _ = self._due.popitem(last=False)
                self._sending = deque(self._kept[key].messages)
            if not self._sending or not offer(self._sending[0]):
                return sent
            self._sending.popleft()
        return limit

    def _keep(self, table: _Table[T]) -> None:
        known = self._kept.pop(table.key, None)
        self._kept[table.key] = table
        if known is not None:
            self.size_bytes -= known.size_bytes
        if known is None or known.messages != table.messages:
            self._due[table.key] = None

    def _drop_partial(self, version: int) -> None:
        self.size_bytes -= self._partial.pop(version).size_bytes

    def _make_room(self, newest: _Table[T]) -> str:
        """Forget the oldest tables, complete ones first, until the rest is within the limit."""
        reason = ""
        while self.size_bytes > self._limit_bytes:
            _, oldest = (self._kept or self._partial).popitem(last=False)
            self._due.pop(oldest.key, None)
            self.size_bytes -= oldest.size_bytes
            reason = "table_too_large" if oldest is newest else "table_forgotten"
        return reason
