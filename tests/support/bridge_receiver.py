# SPDX-License-Identifier: Apache-2.0
"""A bridge receiver made of the codec and Aeron over UDP: it keeps what a sender says, and puts frames together.

Frames are assembled by the rules of the specification, with an assertion for every rule that a sender has to keep. The
transcript is in the order in which messages were taken; control and metadata are taken before chunks, so that what was
said on them before a chunk stands before it. Bridge §5, §7, §11; decisions G1, G26.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from tensorpool import aeron
from tensorpool.wire.bridge import BridgeFrameChunk
from tests.support.bridge_sender import CHUNK, CHUNK_FIELDS, CHUNK_HEADER, Link
from tests.support.listener import Endpoint, ReceivedMessage, WireListener
from tests.support.wire_consumer import Slot

POLL_LIMIT: Final = 100


class Assembled(NamedTuple):
    """A frame that came whole."""

    epoch: int
    seq: int
    slot: Slot
    payload: bytes
    chunks: tuple[BridgeFrameChunk, ...]  # in the order of their arrival


class BridgeReceiver(WireListener):
    """The receiving side of a link.

    >>> with BridgeReceiver(aeron_dir, link) as receiver:                    # doctest: +SKIP
    ...     frame = receiver.wait_frame(seq=3)
    """

    def __init__(self, aeron_dir: str, link: Link, *, hears: Iterable[str] = Link._fields) -> None:
        super().__init__(aeron_dir)
        self.link = link
        self.on_wait: list[Callable[[], object]] = []  # what to do while waiting
        self._by_name: dict[str, aeron.Subscription] = {}
        for name in hears:
            self.hear(name)

    def hear(self, name: str) -> None:
        """One more stream of the link."""
        self._by_name[name] = self.listen(getattr(self.link, name))

    @property
    def is_connected(self) -> bool:
        """Whether a sender publishes on all streams that this one subscribes to."""
        return all(subscription.is_connected for subscription in self._by_name.values())

    @property
    def has_seen_no_fragments(self) -> bool:
        """Whether every chunk was one fragment, as only a message that can be claimed is."""
        return self._by_name["payload"].partial_sessions == 0

    def poll(self, *names: str) -> int:  # type: ignore[override]
        """Take what has arrived on these streams, by default on all."""
        taken = 0
        for name in names or ("control", "metadata", "payload"):
            if name in self._by_name:
                taken += self._by_name[name].poll(self._on_message, POLL_LIMIT)
        return taken

    def wait_until(self, condition: Callable[..., object], what: str) -> None:
        """Listen until a condition holds."""

        def is_met() -> object:
            for act in self.on_wait:
                act()
            return condition()

        super().wait_until(is_met, what)

    def kinds(self, endpoint: Endpoint) -> set[type[Any]]:
        """Which messages came on a stream; NoneType is what does not decode."""
        return {type(received.message) for received in self.transcript if received.stream_id == endpoint[1]}

    # --- frames

    def chunks(self, since: int = 0, **fields: Any) -> list[BridgeFrameChunk]:
        """In the order of their arrival."""
        return [received.message for received in self.received(BridgeFrameChunk, since, **fields)]

    def wait_frame(self, seq: int, **fields: Any) -> Assembled:
        """The frame, when all its chunks are there."""
        self.wait_until(lambda: self._is_whole(seq, fields), f"all chunks of frame {seq} over the link")
        return self.assembled(seq, **fields)

    def has_frame(self, seq: int, **fields: Any) -> bool:
        return self._is_whole(seq, fields)

    def whole(self, **fields: Any) -> list[Assembled]:
        """All frames that came whole."""
        names = dict.fromkeys((chunk.epoch, chunk.seq) for chunk in self.chunks(**fields))
        wholes = [(epoch, seq) for epoch, seq in names if self._is_whole(seq, fields | {"epoch": epoch})]
        return [self.assembled(seq, **fields | {"epoch": epoch}) for epoch, seq in wholes]

    def assembled(self, seq: int, **fields: Any) -> Assembled:
        """Put a frame together; every rule of 5.1 and 5.2 that binds a sender holds."""
        received = self.received(BridgeFrameChunk, seq=seq, **fields)
        for each in received:
            _check_bytes(each)
        chunks = [each.message for each in received]
        first = chunks[0]
        payload = bytearray(first.payload_length)
        is_filled = bytearray(first.payload_length)
        assert 1 <= first.chunk_count <= 65535
        assert sorted(chunk.chunk_index for chunk in chunks) == list(range(first.chunk_count))
        for chunk in chunks:
            agreed = ("stream_id", "epoch", "seq", "chunk_count", "payload_length")
            assert all(getattr(chunk, name) == getattr(first, name) for name in agreed), (chunk, first)
            start, end = chunk.chunk_offset, chunk.chunk_offset + chunk.chunk_length
            assert end <= first.payload_length
            assert not any(is_filled[start:end]), "chunks overlap"
            assert chunk.chunk_length or first.payload_length == 0
            assert len(chunk.payload_bytes) == chunk.chunk_length
            assert chunk.header_included is (chunk.chunk_index == 0)
            assert len(chunk.header_bytes) == (256 if chunk.header_included else 0)
            is_filled[start:end] = b"\1" * chunk.chunk_length
            payload[start:end] = chunk.payload_bytes
        assert all(is_filled), "chunks leave a gap"
        (head,) = [chunk for chunk in chunks if chunk.chunk_index == 0]
        assert head.chunk_offset == 0
        return Assembled(first.epoch, seq, Slot.unpack(head.header_bytes), bytes(payload), tuple(chunks))

    def _is_whole(self, seq: int, fields: dict[str, Any]) -> bool:
        chunks = self.chunks(seq=seq, **fields)
        return bool(chunks) and len({chunk.chunk_index for chunk in chunks}) >= chunks[0].chunk_count


def _check_bytes(received: ReceivedMessage[BridgeFrameChunk]) -> None:
    """The message is laid out as in byte_layouts: block, headerBytes, payloadBytes, and nothing behind them."""
    data, chunk = received.data, received.message
    values = CHUNK.unpack_from(data)
    assert values[:4] == CHUNK_HEADER
    assert values[4:-1] == tuple(int(getattr(chunk, name)) for name in CHUNK_FIELDS)
    image_length, at = values[-1], CHUNK.size
    assert data[at : at + image_length] == chunk.header_bytes
    at += image_length
    (length,) = struct.unpack_from("<I", data, at)
    assert data[at + 4 :] == chunk.payload_bytes
    assert len(data) == at + 4 + length
