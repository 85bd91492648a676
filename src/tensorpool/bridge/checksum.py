# SPDX-License-Identifier: Apache-2.0
"""The private extension `bridge.crc32c`: a checksum of each frame, in a message of its own on the control stream.

Schema 902, template 9001, which no published schema has: receivers that do not know it skip it, and the chunks stay as
the specification has them.

    streamId u32 · epoch u64 · seq u64 · payloadLength u32 · crc32c u32

`crc32c` is over the 256 bytes of the slot header as chunk 0 carries them, then over the payload. It may arrive before
or after the chunks; a receiver that checks waits for it until the assembly timeout. Bridge §5.4.
"""

from __future__ import annotations

import struct
from typing import ClassVar, Final

import msgspec

_HEADER: Final = struct.Struct("<HHHH")
_BLOCK: Final = struct.Struct("<IQQII")
SIZE_BYTES: Final = _HEADER.size + _BLOCK.size


class FrameChecksum(msgspec.Struct, frozen=True):
    """What the sender computed of a frame."""

    SCHEMA_ID: ClassVar[int] = 902
    TEMPLATE_ID: ClassVar[int] = 9001

    stream_id: int
    epoch: int
    seq: int
    payload_length: int
    crc32c: int

    def encode(self) -> bytes:
        return _HEADER_BYTES + _BLOCK.pack(self.stream_id, self.epoch, self.seq, self.payload_length, self.crc32c)

    @classmethod
    def decode(cls, data: bytes) -> FrameChecksum | None:
        """None for anything else."""
        if len(data) != SIZE_BYTES or not data.startswith(_HEADER_BYTES):
            return None
        return cls(*_BLOCK.unpack_from(data, _HEADER.size))


_HEADER_BYTES: Final = _HEADER.pack(_BLOCK.size, FrameChecksum.TEMPLATE_ID, FrameChecksum.SCHEMA_ID, 1)
