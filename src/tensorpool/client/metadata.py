# SPDX-License-Identifier: Apache-2.0
"""What frames mean: attributes and blobs by epoch and meta_version, sent by a producer and kept by its consumers.

Holds no clock and does no IO. Wire §10.3, §15.9; decisions A11, F5, I5, K4.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import google_crc32c
import msgspec

from tensorpool.client import wall_clock
from tensorpool.client.wall_clock import EpochClock
from tensorpool.errors import LocalProtocolError
from tensorpool.wire import Message
from tensorpool.wire.control import (
    Attribute,
    DataSourceAnnounce,
    DataSourceMeta,
    MetaBlobAnnounce,
    MetaBlobChunk,
    MetaBlobComplete,
)
from tensorpool.wire.trace import TraceLinkSet

CHUNK_MAX: Final = 65_536
MAX_BLOB_BYTES: Final = 256 << 20
NUMPY_DTYPE: Final = "numpy_dtype"  # the attribute with the dtype that payloads stand for (shm/carried_dtypes.py)
MAX_KEPT: Final = 64  # versions that a consumer remembers
KEPT_LINKS: Final = 256  # the last trace links of a producer, for consumers that come later
REPEATED: Final = 4  # versions that a producer sends again every announce period
MAX_WAITING: Final = 1_024  # messages of a producer that wait for room in the log; then the oldest is given up
CHUNK_PACE_NS: Final = 50_000_000  # after a chunk of CHUNK_MAX bytes, and in proportion after a shorter one

_TEXT: Final = "text/plain"
_JSON: Final = "application/json"
_BYTES: Final = "application/octet-stream"
_TAGS: Final = "tags"


class Metadata(msgspec.Struct, frozen=True):
    """The attributes that apply to frames of one meta_version.

    Text and JSON are shown as what they hold; everything else as bytes, with its format in `formats`.
    """

    meta_version: int
    timestamp_ns: int
    attributes: Mapping[str, Any]
    formats: Mapping[str, str]
    tags: tuple[str, ...] = ()

    @classmethod
    def of(cls, message: DataSourceMeta) -> Metadata:
        attributes: dict[str, Any] = {}
        formats: dict[str, str] = {}
        tags: tuple[str, ...] = ()
        for attribute in message.attributes:
            if attribute.key == wall_clock.KEY:
                continue
            value: Any = attribute.value
            try:
                if attribute.format == _TEXT:
                    value = attribute.value.decode()
                elif attribute.format == _JSON:
                    value = msgspec.json.decode(attribute.value)
            except (UnicodeDecodeError, msgspec.DecodeError):
                value = attribute.value  # not what it claims to be; the bytes are still the bytes
            if attribute.key == _TAGS:
                tags = _tags_of(value)
                continue
            attributes[attribute.key] = value
            formats[attribute.key] = attribute.format
        return cls(message.meta_version, message.timestamp_ns, attributes, formats, tags)

    def message(self, stream_id: int) -> DataSourceMeta:
        """As another stream's, with the bytes and formats that it had."""
        entries = [
            Attribute(key=key, format=self.formats[key], value=_bytes_of(value, self.formats[key]))
            for key, value in self.attributes.items()
        ]
        if self.tags:
            entries.append(Attribute(key=_TAGS, format=_TEXT, value=",".join(self.tags).encode()))
        return DataSourceMeta(
            stream_id=stream_id,
            meta_version=self.meta_version,
            timestamp_ns=self.timestamp_ns,
            attributes=tuple(entries),
        )


def _bytes_of(value: Any, format: str) -> bytes:
    if isinstance(value, bytes):
        return value
    return value.encode() if format == _TEXT else msgspec.json.encode(value)


def _tags_of(value: object) -> tuple[str, ...]:
    """F5: a JSON array, or text with commas."""
    if isinstance(value, str):
        return tuple(tag.strip() for tag in value.split(",") if tag.strip())
    if isinstance(value, list):
        return tuple(tag for tag in value if isinstance(tag, str))
    return ()


def to_message(
    stream_id: int, meta_version: int, attributes: Mapping[Any, Any], tags: Iterable[Any], timestamp_ns: int
) -> DataSourceMeta:
    """Attributes as they travel: text as text, bytes as bytes, everything else as JSON.

    Raises LocalProtocolError for a key or value that cannot travel.
    """
    entries = []
    for key, value in attributes.items():
        if not isinstance(key, str) or not key or not key.isascii():
            raise LocalProtocolError(f"metadata key {key!r}: expected ASCII text")
        if key == _TAGS:
            raise LocalProtocolError("metadata key 'tags' is what tags= fills")
        if key == wall_clock.KEY:
            raise LocalProtocolError(f"metadata key {key!r} is what the producer fills")
        entries.append(_attribute(key, value))
    tag_list = list(tags)
    for tag in tag_list:
        if not isinstance(tag, str) or not tag or "," in tag or not tag.isascii() or tag != tag.strip():
            raise LocalProtocolError(f"tag {tag!r}: expected ASCII text without a comma or blanks at its ends")
    if tag_list:
        entries.append(Attribute(key=_TAGS, format=_TEXT, value=",".join(tag_list).encode()))
    return DataSourceMeta(
        stream_id=stream_id, meta_version=meta_version, timestamp_ns=timestamp_ns, attributes=tuple(entries)
    )


def with_numpy_dtype(message: DataSourceMeta, name: str | None) -> DataSourceMeta:
    """The same metadata for frames whose payloads stand for that dtype, or for what the wire says."""
    others = tuple(attribute for attribute in message.attributes if attribute.key != NUMPY_DTYPE)
    own = () if name is None else (_attribute(NUMPY_DTYPE, name),)
    return msgspec.structs.replace(message, attributes=others + own)


def _attribute(key: str, value: object) -> Attribute:
    if isinstance(value, bytes | bytearray | memoryview):
        return Attribute(key=key, format=_BYTES, value=bytes(value))
    try:
        if isinstance(value, str):
            return Attribute(key=key, format=_TEXT, value=value.encode())
        return Attribute(key=key, format=_JSON, value=msgspec.json.encode(value))
    except (TypeError, UnicodeEncodeError) as error:
        raise LocalProtocolError(f"metadata {key!r}: {error}; give text, bytes, or what JSON can hold") from None


def blob_messages(
    stream_id: int, meta_version: int, blob_type: int, data: bytes, *, checksum: bool = True
) -> Iterator[Message]:
    """A large table, cut for the metadata stream."""
    digest = google_crc32c.value(data) if checksum else 0
    yield MetaBlobAnnounce(
        stream_id=stream_id, meta_version=meta_version, blob_type=blob_type, total_len=len(data), checksum=digest
    )
    for offset in range(0, len(data), CHUNK_MAX):
        chunk = data[offset : offset + CHUNK_MAX]
        yield MetaBlobChunk(stream_id=stream_id, meta_version=meta_version, chunk_offset=offset, chunk_bytes=chunk)
    yield MetaBlobComplete(stream_id=stream_id, meta_version=meta_version, checksum=digest)


class _Assembly:
    """A blob of which some chunks are here. Offsets grow without gap or overlap (§10.3.3)."""

    def __init__(self, announce: MetaBlobAnnounce) -> None:
        self.announce = announce
        self.data = bytearray()

    def add(self, chunk: MetaBlobChunk) -> bool:
        is_next = chunk.chunk_offset == len(self.data) and len(chunk.chunk_bytes) > 0
        if not is_next or len(self.data) + len(chunk.chunk_bytes) > self.announce.total_len:
            return False
        self.data += chunk.chunk_bytes
        return True

    def finish(self, complete: MetaBlobComplete) -> bytes | None:
        if len(self.data) != self.announce.total_len or complete.checksum != self.announce.checksum:
            return None
        data = bytes(self.data)
        checksum = self.announce.checksum
        return data if checksum == 0 or google_crc32c.value(data) == checksum else None


class _Source:
    """One producer in one epoch, as one Aeron session has it; `epoch` is None until a DataSourceAnnounce names it."""

    def __init__(self, epoch: int | None = None) -> None:
        self.epoch = epoch
        self.current: int | None = None  # the meta_version of its last announce


class MetadataCache:
    """What one stream's producers said about their frames, by epoch and meta_version; the oldest is forgotten.

    Only DataSourceAnnounce carries an epoch: what the same session sends after it belongs to that epoch. What a session
    sends that never announced anything belongs to the epoch that is mapped meanwhile (K4). Any thread may look up.
    """

    def __init__(self) -> None:
        self.epoch: int | None = None  # that is mapped, or was last
        self._sources: OrderedDict[int, _Source] = OrderedDict()  # by session
        self._versions: OrderedDict[tuple[_Source, int], Metadata] = OrderedDict()
        self._blobs: OrderedDict[tuple[_Source, int, int], tuple[MetaBlobAnnounce, bytes]] = OrderedDict()
        self._assemblies: OrderedDict[tuple[_Source, int], _Assembly] = OrderedDict()
        self._clocks: OrderedDict[int, EpochClock] = OrderedDict()  # by epoch
        self.blobs_discarded = 0

    def clock(self, epoch: int) -> EpochClock | None:
        """What the producer of an epoch published about its clock; None: nothing yet."""
        return self._clocks.get(epoch)

    def get(self, meta_version: int | None = None, epoch: int | None = None) -> Metadata | None:
        """Of a version, or of the current one, in an epoch (the mapped one by default)."""
        for source in self._sources_of(epoch):
            found = [kept for (of, _), kept in tuple(self._versions.items()) if of is source]
            wanted = source.current if meta_version is None else meta_version
            match = next((kept for kept in found if kept.meta_version == wanted), None)
            if match is None and meta_version is None and found:
                match = found[-1]
            if match is not None:
                return match
        return None

    def versions(self, epoch: int) -> dict[int, Metadata]:
        """Everything that is known of an epoch, by version."""
        found: dict[int, Metadata] = {}
        for source in self._sources_of(epoch)[::-1]:
            found |= {kept.meta_version: kept for (of, _), kept in tuple(self._versions.items()) if of is source}
        return found

    def blob(self, blob_type: int, meta_version: int | None = None, epoch: int | None = None) -> bytes | None:
        """The blob of a version, or the one of this type that came last, in an epoch (the mapped one by default)."""
        for source in self._sources_of(epoch):
            found = [
                data
                for (of, version, kind), (_, data) in tuple(self._blobs.items())
                if of is source and kind == blob_type and meta_version in (None, version)
            ]
            if found:
                return found[-1]
        return None

    def on_epoch(self, epoch: int) -> None:
        """This epoch is mapped: what was said without naming an epoch was said about another one."""
        if epoch == self.epoch:
            return
        self.epoch = epoch
        for session, source in list(self._sources.items()):
            if source.epoch is None:
                del self._sources[session]

    def on_message(self, message: Message, session_id: int = 0) -> None:
        source = self._sources.get(session_id)
        if source is None:
            source = _Source()
            _keep(self._sources, session_id, source)
        match message:
            case DataSourceAnnounce():
                if source.epoch is None:
                    source.epoch = message.epoch
                elif source.epoch != message.epoch:
                    source = _Source(message.epoch)
                    _keep(self._sources, session_id, source)
                source.current = message.meta_version
            case DataSourceMeta():
                self._keep_clock(message, self.epoch if source.epoch is None else source.epoch)
                if message.meta_version == 0:
                    return  # frames of version 0 have no metadata: it tells of the clock only
                known = self._versions.get((source, message.meta_version))
                if known is None or known.timestamp_ns != message.timestamp_ns:
                    _keep(self._versions, (source, message.meta_version), Metadata.of(message))
            case MetaBlobAnnounce():
                if message.total_len > MAX_BLOB_BYTES:
                    self.blobs_discarded += 1
                elif not message.checksum or message != self._announce_of(source, message):
                    _keep(self._assemblies, (source, message.meta_version), _Assembly(message))
            case MetaBlobChunk():
                assembly = self._assemblies.get((source, message.meta_version))
                if assembly is not None and not assembly.add(message):
                    del self._assemblies[source, message.meta_version]
                    self.blobs_discarded += 1
            case MetaBlobComplete():
                assembly = self._assemblies.pop((source, message.meta_version), None)
                if assembly is None:
                    return
                data = assembly.finish(message)
                if data is None:
                    self.blobs_discarded += 1
                else:
                    key = (source, message.meta_version, assembly.announce.blob_type)
                    _keep(self._blobs, key, (assembly.announce, data))

    def _keep_clock(self, message: DataSourceMeta, epoch: int | None) -> None:
        clock = wall_clock.clock_in(message)
        if clock is not None and epoch is not None:
            _keep(self._clocks, epoch, clock)

    def _sources_of(self, epoch: int | None) -> list[_Source]:
        """Who spoke of an epoch, the last to come first; then who named none, if the epoch is the mapped one."""
        wanted = self.epoch if epoch is None else epoch
        kept = dict.fromkeys([*(key[0] for key in tuple(self._versions)), *(key[0] for key in tuple(self._blobs))])
        named = [source for source in kept if source.epoch is not None and wanted in (None, source.epoch)]
        unnamed = [source for source in tuple(self._sources.values()) if source.epoch is None]
        return named[::-1] + (unnamed if wanted == self.epoch else [])

    def _announce_of(self, source: _Source, message: MetaBlobAnnounce) -> MetaBlobAnnounce | None:
        kept = self._blobs.get((source, message.meta_version, message.blob_type))
        return None if kept is None else kept[0]


def _keep[K, V](kept: OrderedDict[K, V], key: K, value: V) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > MAX_KEPT:
        kept.popitem(last=False)


class TablePace:
    """When the next message of a table may be sent.

    Aeron skips a consumer that is six chunks behind the fastest one for a tenth of a second, and it would get no table
    at all: at this pace one that looks three times a second is never so far behind.
    """

    def __init__(self) -> None:
        self._next_ns = 0

    def is_due(self, now_ns: int) -> bool:
        return now_ns >= self._next_ns

    def on_sent(self, message: Message, now_ns: int) -> None:
        if isinstance(message, MetaBlobChunk):
            self._next_ns = now_ns + CHUNK_PACE_NS * len(message.chunk_bytes) // CHUNK_MAX


class _Blob(msgspec.Struct, frozen=True):
    """A table that a producer distributes."""

    meta_version: int
    blob_type: int
    data: bytes
    checksum: bool


class MetadataSender:
    """The messages that describe one producer's stream, in the order in which they are sent.

    Every version is sent once when it is set, in order, after a DataSourceAnnounce that names its epoch. The last few
    are repeated every announce period, and tables are sent again, for consumers that come later. A new epoch gets
    everything anew: consumers keep versions and tables by epoch (K4). `flush` hands the messages to its caller.
    """

    def __init__(self) -> None:
        self._source: DataSourceAnnounce | None = None  # without one there is nothing to describe yet
        self._clock = EpochClock(None)
        self._unversioned = DataSourceMeta(stream_id=0, meta_version=0, timestamp_ns=0)  # tells of the clock only
        self._versions: OrderedDict[int, DataSourceMeta] = OrderedDict()
        self._blobs: OrderedDict[int, _Blob] = OrderedDict()  # by type
        self._links: deque[TraceLinkSet] = deque(maxlen=KEPT_LINKS)
        self._waiting: deque[Message] = deque()
        self._chunks: Iterator[Message] | None = None
        self._chunk: Message | None = None
        self._pace = TablePace()
        self._are_blobs_due = False
        self.summary = ""
        self.given_up = 0

    # --- what there is to send

    def begin(self, source: DataSourceAnnounce, clock: EpochClock, stamp_ns: int) -> None:
        """From now on frames are in the epoch that `source` names; all that is known is sent for it."""
        self._unversioned = DataSourceMeta(stream_id=source.stream_id, meta_version=0, timestamp_ns=stamp_ns)
        self._source = source
        self._clock = clock
        self._chunks = self._chunk = None
        self._are_blobs_due = bool(self._blobs)
        self._post_all()

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

    def set_clock(self, clock: EpochClock) -> None:
        """Timestamps of this epoch's frames are by this clock."""
        self._clock = clock
        self._post_all()

    def add_blob(self, meta_version: int, blob_type: int, data: bytes, checksum: bool) -> None:
        """Send a table now, and again to consumers that come later; it replaces the one of its type."""
        self._blobs.pop(blob_type, None)
        self._blobs[blob_type] = _Blob(meta_version, blob_type, data, checksum)
        while len(self._blobs) > MAX_KEPT:
            self._blobs.popitem(last=False)
        self._are_blobs_due = True

    def link(self, message: TraceLinkSet) -> None:
        """Send now, and once more to consumers that come soon."""
        self._links.append(message)
        self.post(message)

    def post(self, message: Message) -> None:
        """Send once."""
        self._waiting.append(message)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self.given_up += 1

    def repeat(self) -> None:
        """Every announce period; what still waits for room is not queued twice."""
        if not self._waiting:
            self._post_all()

    def welcome(self) -> None:
        """A consumer has come: it gets at once what others have."""
        self.repeat()
        self._are_blobs_due = bool(self._blobs)
        if len(self._waiting) + len(self._links) <= MAX_WAITING:
            self._waiting.extend(self._links)

    # --- sending

    def is_due(self, now_ns: int) -> bool:
        """Whether it is time for more of a table."""
        has_more = self._chunk is not None or self._chunks is not None or self._are_blobs_due
        return has_more and self._source is not None and self._pace.is_due(now_ns)

    def flush(self, offer: Callable[[bytes], bool], now_ns: int) -> int:
        """Hand over what there is room for; `offer` returns whether a message is handled. Returns how many were."""
        sent = 0
        while self._waiting:
            if not self._is_handled(self._waiting[0], offer):
                return sent
            self._waiting.popleft()
            sent += 1
        while self._pace.is_due(now_ns):
            self._chunk = self._chunk or self._next_chunk()
            if self._chunk is None or not self._is_handled(self._chunk, offer):
                return sent
            self._pace.on_sent(self._chunk, now_ns)
            self._chunk = None
            sent += 1
        return sent

    # --- inside

    def _is_handled(self, message: Message, offer: Callable[[bytes], bool]) -> bool:
        """A message that cannot be sent is given up: it must not hold up the others."""
        try:
            return offer(message.encode())
        except (ValueError, LocalProtocolError):
            self.given_up += 1
            return True

    def _post_all(self) -> None:
        if self._source is None:
            return
        self.post(self._source)
        for message in self._versions.values() or (self._unversioned,):
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
        return wall_clock.with_clock(msgspec.structs.replace(message, stream_id=self._source.stream_id), self._clock)
