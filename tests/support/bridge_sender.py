# SPDX-License-Identifier: Apache-2.0
"""A bridge sender made of the codec and Aeron over UDP: it has no shared memory, and lies on request.

Honest unless a test falsifies it: its frames have the slot image and the chunks that the specification demands. A
frame is a list of chunks, a chunk a dictionary of its fields, so that a test changes, drops, repeats and reorders what
it likes before the bytes are made. Nothing is said by itself. Bridge §5, §7.2, §11; decisions G1, G10, G24, G26.
"""

from __future__ import annotations

import itertools
import secrets
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from numpy.typing import NDArray

from tensorpool import aeron
from tensorpool.wire import Message
from tensorpool.wire.bridge import BridgeFrameChunk
from tensorpool.wire.control import (
    DataSourceAnnounce,
    DataSourceMeta,
    FrameProgress,
    FrameProgressState,
    QosProducer,
    ShmPoolAnnounce,
)
from tests.support.disc_client import unused_udp_channel
from tests.support.driver_client import new_client_id
from tests.support.listener import Endpoint, Said
from tests.support.listener import encoded as to_bytes
from tests.support.messages import announce
from tests.support.processes import wait_until
from tests.support.region_bytes import committed, slot_image
from tests.support.wire_producer import new_stream_id

MTU: Final = 1408
CHUNK_BYTES: Final = MTU - 128
FIRST_CHUNK_BYTES: Final = MTU - 345  # beside the slot image
SENDER_MTU: Final = 16384  # lies may be longer than an honest chunk, and stay whole
SOURCE_NSLOTS: Final = 8
SOURCE_POOLS: Final[Mapping[int, int]] = {3: 1024, 9: 65536}  # id: stride; not those of any destination

# message header, block, and the length of headerBytes
CHUNK: Final = struct.Struct("<4H I Q Q 5I B I")
CHUNK_HEADER: Final = (41, 1, 902, 1)
CHUNK_FIELDS: Final = (
    *("stream_id", "epoch", "seq", "chunk_index", "chunk_count", "chunk_offset", "chunk_length", "payload_length"),
    "header_included",
)

_udp_stream_ids = itertools.count(50_000, 4)  # bridges of a run share UDP channels

type Chunk = dict[str, Any]


class Link(NamedTuple):
    """The UDP streams between two bridges."""

    payload: Endpoint
    control: Endpoint
    metadata: Endpoint

    @classmethod
    def unused(cls, *, payload: str = "", control: str = "", metadata: str = "") -> Self:
        """Unused streams, on unused channels of this host unless given."""
        first = next(_udp_stream_ids)
        channels = [given or unused_udp_channel() for given in (payload, control, metadata)]
        return cls(*((channel, first + index) for index, channel in enumerate(channels)))

    def again(self) -> Link:
        """Other streams on the same channels."""
        return Link.unused(payload=self.payload[0], control=self.control[0], metadata=self.metadata[0])

    @property
    def keys(self) -> dict[str, Any]:
        """A bridge's configuration of them."""
        keys: dict[str, Any] = {}
        for name, (channel, stream_id) in self._asdict().items():
            keys |= {f"{name}_channel": channel, f"{name}_stream_id": stream_id}
        return keys


def packed_chunk(
    *,
    message_header: tuple[int, int, int, int] = CHUNK_HEADER,
    header_bytes: bytes = b"",
    header_length: int | None = None,
    payload_bytes: bytes = b"",
    bytes_length: int | None = None,
    tail: bytes = b"",
    **fields: int,
) -> bytes:
    """A BridgeFrameChunk byte by byte, also with what no codec would write.

    `header_length` and `bytes_length` are what the two length prefixes claim.
    """
    claimed = len(header_bytes) if header_length is None else header_length
    values = [int(fields[name]) for name in CHUNK_FIELDS]
    size = struct.pack("<I", len(payload_bytes) if bytes_length is None else bytes_length)
    return CHUNK.pack(*message_header, *values, claimed) + header_bytes + size + payload_bytes + tail


def cut(payload: bytes, first: int = FIRST_CHUNK_BYTES, other: int = CHUNK_BYTES) -> list[tuple[int, int]]:
    """Offsets and lengths of a frame's chunks."""
    ends = [min(first, len(payload))]
    while ends[-1] < len(payload):
        ends.append(min(ends[-1] + other, len(payload)))
    return [(start, end - start) for start, end in zip([0, *ends], ends, strict=False)]


class BridgeSender:
    """The sending side of one mapping.

    >>> sender = BridgeSender(aeron_dir, link, 10_000)                       # doctest: +SKIP
    >>> sender.announce()                                                    # doctest: +SKIP
    >>> chunks = sender.frame(np.arange(5_000))                              # doctest: +SKIP
    >>> chunks[1]["chunk_offset"] += 1                                       # doctest: +SKIP
    >>> sender.send_chunks(reversed(chunks))                                 # doctest: +SKIP
    """

    def __init__(
        self,
        aeron_dir: str,
        link: Link,
        stream_id: int | None = None,
        *,
        epoch: int = 7,
        nslots: int = SOURCE_NSLOTS,
        pools: Mapping[int, int] = SOURCE_POOLS,
    ) -> None:
        self.link = link
        self.stream_id = stream_id or new_stream_id()
        self.epoch = epoch
        self.nslots = nslots
        self.pools = pools
        self.producer_id = new_client_id()
        self.next_seq = 0
        self._client = aeron.connect(aeron_dir)
        self._publications = {
            endpoint: self._client.add_publication(_with_mtu(endpoint[0]), endpoint[1], exclusive=True)
            for endpoint in link
        }

    def close(self) -> None:
        self._client.close()

    def is_connected(self, *endpoints: Endpoint) -> bool:
        """Whether these have subscribers, by default those of frames and announces."""
        return all(self._publications[it].has_room for it in endpoints or self.link[:2])

    # --- what is so

    def announced(self, **changed: Any) -> ShmPoolAnnounce:
        """The announce of the source, with what the test wants otherwise; `pools` as ids and strides."""
        source: dict[str, Any] = {"stream_id": self.stream_id, "producer_id": self.producer_id, "epoch": self.epoch}
        memory = {"nslots": self.nslots, "pools": self.pools, "below": "/dev/shm/elsewhere"}
        return announce(**source | memory | changed)

    def pool_for(self, length: int) -> int:
        """The source pool of a frame: the smallest that takes it, else the largest."""
        by_stride = sorted(self.pools, key=lambda pool_id: self.pools[pool_id])
        return next((pool_id for pool_id in by_stride if self.pools[pool_id] >= length), by_stride[-1])

    def frame(
        self,
        array: NDArray[Any] | bytes,
        *,
        seq: int | None = None,
        epoch: int | None = None,
        cuts: Sequence[tuple[int, int]] | None = None,
        **header: Any,
    ) -> list[Chunk]:
        """The chunks of a frame, honest but for the given fields of its slot image, in order, not sent."""
        seq = self.next_seq if seq is None else seq
        self.next_seq = max(self.next_seq, seq + 1)
        payload = array if isinstance(array, bytes) else array.tobytes("A")
        places = {"pool_id": self.pool_for(len(payload)), "slot": seq & (self.nslots - 1)}
        image = slot_image(array, **{"seq_commit": committed(seq)} | places | header)
        slices = cut(payload) if cuts is None else cuts
        return [
            {
                "stream_id": self.stream_id,
                "epoch": self.epoch if epoch is None else epoch,
                "seq": seq,
                "chunk_index": index,
                "chunk_count": len(slices),
                "chunk_offset": offset,
                "chunk_length": length,
                "payload_length": len(payload),
                "header_included": not index,
                "header_bytes": b"" if index else image,
                "payload_bytes": payload[offset : offset + length],
            }
            for index, (offset, length) in enumerate(slices)
        ]

    # --- saying

    def announce(self, **changed: Any) -> ShmPoolAnnounce:
        """Tell the receiver of the source's memory."""
        message = self.announced(**changed)
        self.send(message, self.link.control)
        return message

    def new_epoch(self, epoch: int | None = None, **changed: Any) -> int:
        """Go on in another epoch from seq 0, and say so."""
        self.epoch = self.epoch + 1 if epoch is None else epoch
        self.next_seq = 0
        self.announce(**changed)
        return self.epoch

    def send_frame(self, array: NDArray[Any] | bytes, **given: Any) -> int:
        """A whole frame in order; its seq."""
        chunks = self.frame(array, **given)
        self.send_chunks(chunks)
        return int(chunks[0]["seq"])

    def send_chunks(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            self.send(packed_chunk(**chunk))

    def progress(self, seq: int, **changed: Any) -> FrameProgress:
        """What the source's producer says of a frame on its way."""
        fields: dict[str, Any] = {
            "stream_id": self.stream_id,
            "epoch": self.epoch,
            "seq": seq,
            "payload_bytes_filled": 64,
            "state": FrameProgressState.PROGRESS,
        }
        return self._say(FrameProgress(**fields | changed), self.link.control)

    def qos(self, **changed: Any) -> QosProducer:
        fields: dict[str, Any] = {
            "stream_id": self.stream_id,
            "producer_id": self.producer_id,
            "epoch": self.epoch,
            "current_seq": max(self.next_seq - 1, 0),
        }
        return self._say(QosProducer(**fields | changed), self.link.control)

    def name(self, name: str, **changed: Any) -> DataSourceAnnounce:
        fields: dict[str, Any] = {
            "stream_id": self.stream_id,
            "producer_id": self.producer_id,
            "epoch": self.epoch,
            "meta_version": 1,
            "name": name,
        }
        return self._say(DataSourceAnnounce(**fields | changed), self.link.metadata)

    def describe(self, **changed: Any) -> DataSourceMeta:
        fields: dict[str, Any] = {
            "stream_id": self.stream_id,
            "meta_version": 1,
            "timestamp_ns": time.monotonic_ns(),
        }
        return self._say(DataSourceMeta(**fields | changed), self.link.metadata)

    def send(self, said: Said, on: Endpoint | None = None) -> None:
        """Put a message or bytes on a stream, that of the chunks by default."""
        data = to_bytes(said)
        publication = self._publications[on or self.link.payload]
        wait_until(lambda: publication.offer(data), "the link takes a message")

    def _say[M: Message](self, message: M, on: Endpoint) -> M:
        self.send(message, on)
        return message

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def encoded(chunk: Chunk) -> bytes:
    """The same by the codec."""
    return BridgeFrameChunk(**chunk).encode()


def noise(length: int) -> bytes:
    return secrets.token_bytes(length)


def _with_mtu(channel: str) -> str:
    return channel if "mtu=" in channel else f"{channel}|mtu={SENDER_MTU}"
