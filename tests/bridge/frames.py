# SPDX-License-Identifier: Apache-2.0
"""A stream between two rings in memory: frames of a source cut into chunks, and an assembler with its ring."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from tensorpool._core import Assembler, ChunkRouter, Mapping, RingReader, RingWriter, SlotFrame, TensorLayout
from tensorpool.wire.bridge import BridgeFrameChunk

STREAM: Final = 1000
EPOCH: Final = 7
POOLS: Final = ((1, 1024), (2, 16_384))
NSLOTS: Final = 8
TIMEOUT_NS: Final = 250_000_000
FOREVER_NS: Final = 2**63


def new_mapping(size: int) -> Mapping:
    fd = os.memfd_create("tensorpool-bridge-test")
    try:
        os.ftruncate(fd, size)
        return Mapping(fd, size, writable=True)
    finally:
        os.close(fd)


class Ring:
    """A header ring and its pools, with both ends."""

    def __init__(self, pools: Sequence[tuple[int, int]] = POOLS, nslots: int = NSLOTS) -> None:
        self.header = new_mapping(64 + nslots * 256)
        parts = [(pool_id, stride, new_mapping(64 + nslots * stride)) for pool_id, stride in pools]
        self.writer = RingWriter(self.header, parts, nslots)
        self.reader = RingReader(self.header, parts, nslots)
        self.nslots = nslots

    def image(self, seq: int) -> bytes:
        """The slot header."""
        at = 64 + seq % self.nslots * 256
        return bytes(memoryview(self.header)[at : at + 256])

    def payload(self, seq: int) -> bytes | None:
        """None where the frame is not there."""
        found = self.reader.read(seq)
        if not isinstance(found, SlotFrame):
            return None
        out = bytearray(found.values_len_bytes)
        assert self.reader.copy_into(found, out)
        return bytes(out)


_source = Ring()


def header_of(seq: int, payload: bytes, *, timestamp_ns: int = 5, meta_version: int = 3) -> bytes:
    """The slot header that a producer writes for these bytes; an empty payload has a dimension of 0."""
    global _source
    if seq < _source.writer.next_seq:
        _source = Ring()
    layout = TensorLayout(1, 1, [len(payload)])
    assert _source.writer.write(seq, layout, np.frombuffer(payload, np.uint8), timestamp_ns, meta_version)
    return _source.image(seq)


def chunk(**fields: Any) -> bytes:
    return BridgeFrameChunk(**fields).encode()


def chunks_of(
    seq: int,
    payload: bytes,
    sizes: Sequence[int] = (),
    *,
    epoch: int = EPOCH,
    header: bytes | None = None,
    **fixed: Any,
) -> list[bytes]:
    """A frame cut into chunks of these sizes; what is left is the last one."""
    cuts = [0]
    for size in sizes:
        if cuts[-1] + size < len(payload):
            cuts.append(cuts[-1] + size)
    ends = [*cuts[1:], len(payload)]
    image = header_of(seq, payload) if header is None else header
    return [
        chunk(
            **{
                "stream_id": STREAM,
                "epoch": epoch,
                "seq": seq,
                "chunk_index": index,
                "chunk_count": len(cuts),
                "chunk_offset": begin,
                "chunk_length": end - begin,
                "payload_length": len(payload),
                "header_included": 1 if index == 0 else 0,
                "header_bytes": image if index == 0 else b"",
                "payload_bytes": payload[begin:end],
            }
            | fixed
        )
        for index, (begin, end) in enumerate(zip(cuts, ends, strict=True))
    ]


def digest_of(
    seq: int,
    payload: bytes,
    *,
    crc32c: int = 0,
    mac: bytes = b"",
    stream_id: int = STREAM,
    epoch: int = EPOCH,
) -> bytes:
    """The message of the private extension that carries a frame's checksum or code: schema 902, template 9001."""
    block = struct.pack("<IQQII", stream_id, epoch, seq, len(payload), crc32c) + mac
    return struct.pack("<HHHH", len(block), 9001, 902, 1) + block


class Receiving:
    """An assembler that is announced to and has a ring, fed by hand."""

    def __init__(
        self,
        *,
        is_announced: bool = True,
        is_bound: bool = True,
        pools: Sequence[tuple[int, int]] = POOLS,
        **limits: Any,
    ) -> None:
        self.ring = Ring(pools)
        self.router = ChunkRouter()
        self.assembler = Assembler(
            STREAM,
            **{
                "max_chunk_bytes": 65_535,
                "max_payload_bytes": 2**30,
                "max_inflight": 4,
                "timeout_ns": TIMEOUT_NS,
            }
            | limits,
        )
        self.router.add(self.assembler)
        self.now_ns = 1
        if is_announced:
            self.assembler.set_origin(0)  # of any address
            self.assembler.set_source(EPOCH, POOLS)
        if is_bound:
            self.assembler.bind(self.ring.writer, FOREVER_NS)

    def take(self, *messages: bytes) -> None:
        for message in messages:
            self.router.take(message, self.now_ns)

    def take_digest(self, seq: int, payload: bytes, **values: Any) -> None:
        assert self.router.take_digest(digest_of(seq, payload, **values), self.now_ns)

    def wait(self, nanoseconds: int = TIMEOUT_NS) -> None:
        self.now_ns += nanoseconds
        self.assembler.expire(self.now_ns)

    @property
    def counts(self) -> dict[str, int]:
        both = {**self.router.counts, **self.assembler.counts}
        return {f"{what}.{reason}" if reason else what: count for (what, reason), count in both.items()}

    @property
    def frames_dropped(self) -> dict[str, int]:
        return self._dropped("frames_dropped.")

    @property
    def chunks_dropped(self) -> dict[str, int]:
        return self._dropped("chunks_dropped.")

    def _dropped(self, prefix: str) -> dict[str, int]:
        return {name.removeprefix(prefix): n for name, n in self.counts.items() if name.startswith(prefix)}
