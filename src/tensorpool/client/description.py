# SPDX-License-Identifier: Apache-2.0
"""What a producer sends on the metadata stream: who it is, what its frames mean, its tables.

Every version is sent once when it is set, in order, after a DataSourceAnnounce that names its epoch; the last few are
repeated every announce period, and tables are sent again, for consumers that come later. A new epoch gets everything
anew: consumers keep versions and tables by epoch. Holds no clock and does no IO: `flush` hands messages to its caller.
Wire §10.3, §15.9; decision K4.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from tensorpool.client.metadata import MAX_KEPT, blob_messages
from tensorpool.errors import LocalProtocolError
from tensorpool.wire import Message
from tensorpool.wire.control import DataSourceAnnounce, DataSourceMeta

REPEATED: Final = 4  # versions that are sent again every period
MAX_WAITING: Final = 1_024  # messages that wait for room in the log; then the oldest is given up
CHUNKS_PER_FLUSH: Final = 64  # of tables


class _Blob(msgspec.Struct, frozen=True):
    meta_version: int
    blob_type: int
    data: bytes
    checksum: bool


class Description:
    """The messages that describe one producer's stream, in the order in which they go out."""

    def __init__(self) -> None:
        self._source: DataSourceAnnounce | None = None  # without one there is nothing to describe yet
        self._versions: OrderedDict[int, DataSourceMeta] = OrderedDict()
        self._blobs: OrderedDict[int, _Blob] = OrderedDict()  # by type
        self._waiting: deque[Message] = deque()
        self._chunks: Iterator[Message] | None = None
        self._chunk: Message | None = None
        self._are_blobs_due = False
        self.summary = ""
        self.given_up = 0

    # --- what there is to say

    def begin(self, source: DataSourceAnnounce) -> None:
        """From now on frames are in the epoch that `source` names; all that is known is said for it."""
        self._source = source
        self._chunks = self._chunk = None
        self._are_blobs_due = bool(self._blobs)
        self._say_all()

    def set(self, message: DataSourceMeta, summary: str) -> None:
        """Frames of this version mean this."""
        self._versions.pop(message.meta_version, None)
        self._versions[message.meta_version] = message
        while len(self._versions) > REPEATED:
            self._versions.popitem(last=False)
        self.summary = summary
        if self._source is not None:
            self._source = msgspec.structs.replace(self._source, meta_version=message.meta_version, summary=summary)
            self.post(self._source)
            self.post(self._of_stream(message))

    def add_blob(self, meta_version: int, blob_type: int, data: bytes, checksum: bool) -> None:
        """Send a table now, and again to consumers that come later; it replaces the one of its type."""
        self._blobs.pop(blob_type, None)
        self._blobs[blob_type] = _Blob(meta_version, blob_type, data, checksum)
        while len(self._blobs) > MAX_KEPT:
            self._blobs.popitem(last=False)
        self._are_blobs_due = True

    def post(self, message: Message) -> None:
        """Send once."""
        self._waiting.append(message)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self.given_up += 1

    def repeat(self) -> None:
        """Every announce period; what still waits for room is not said twice."""
        if not self._waiting:
            self._say_all()

    def welcome(self) -> None:
        """A consumer has come: it gets at once what others have."""
        self.repeat()
        self._are_blobs_due = bool(self._blobs)

    # --- sending

    def flush(self, offer: Callable[[bytes], bool]) -> int:
        """Hand over what there is room for; `offer` says whether a message is dealt with. Returns how many were."""
        sent = 0
        while self._waiting:
            if not self._is_dealt_with(self._waiting[0], offer):
                return sent
            self._waiting.popleft()
            sent += 1
        for _ in range(CHUNKS_PER_FLUSH):
            self._chunk = self._chunk or self._next_chunk()
            if self._chunk is None or not self._is_dealt_with(self._chunk, offer):
                return sent
            self._chunk = None
            sent += 1
        return sent

    # --- inside

    def _is_dealt_with(self, message: Message, offer: Callable[[bytes], bool]) -> bool:
        """A message that cannot be sent is given up: it must not hold up the others."""
        try:
            return offer(message.encode())
        except (ValueError, LocalProtocolError):
            self.given_up += 1
            return True

    def _say_all(self) -> None:
        if self._source is None:
            return
        self.post(self._source)
        for message in self._versions.values():
            self.post(self._of_stream(message))

    def _next_chunk(self) -> Message | None:
        if self._chunks is None and self._are_blobs_due and self._source is not None:
            self._are_blobs_due = False
            self._chunks = self._tables(self._source)
        message = None if self._chunks is None else next(self._chunks, None)
        if message is None and self._chunks is not None:
            self._chunks = None
            return self._next_chunk()
        return message

    def _tables(self, source: DataSourceAnnounce) -> Iterator[Message]:
        yield source
        for blob in tuple(self._blobs.values()):
            yield from blob_messages(
                source.stream_id, blob.meta_version, blob.blob_type, blob.data, checksum=blob.checksum
            )

    def _of_stream(self, message: DataSourceMeta) -> DataSourceMeta:
        assert self._source is not None
        return msgspec.structs.replace(message, stream_id=self._source.stream_id)
