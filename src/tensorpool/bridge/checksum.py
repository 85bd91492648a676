# SPDX-License-Identifier: Apache-2.0
"""The private extension `bridge.crc32c`: a checksum of each frame, in a message of its own on the control stream.

Schema 902, template 9001, which no published schema has: receivers that do not know it pass over it, and the chunks
stay as the specification has them.

    streamId u32 · epoch u64 · seq u64 · payloadLength u32 · crc32c u32

`crc32c` is over the 256 bytes of the slot header as chunk 0 carries them, then over the payload. It may arrive before
or after the chunks; a receiver that was told to check waits for it until the assembly timeout. Bridge §5.4.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

SCHEMA_ID: Final = 902
TEMPLATE_ID: Final = 9001
_HEADER: Final = struct.Struct("<HHHH")
_BLOCK: Final = struct.Struct("<IQQII")
_MESSAGE_HEADER: Final = _HEADER.pack(_BLOCK.size, TEMPLATE_ID, SCHEMA_ID, 1)
SIZE_BYTES: Final = _HEADER.size + _BLOCK.size


class FrameChecksum(msgspec.Struct, frozen=True):
    """What the sender computed of a frame."""

    stream_id: int
    epoch: int
    seq: int
    payload_length: int
    crc32c: int

    def encode(self) -> bytes:
        return _MESSAGE_HEADER + _BLOCK.pack(self.stream_id, self.epoch, self.seq, self.payload_length, self.crc32c)

    @classmethod
    def decode(cls, data: bytes) -> FrameChecksum | None:
        """None for anything else."""
        if len(data) != SIZE_BYTES or not data.startswith(_MESSAGE_HEADER):
            return None
        return cls(*_BLOCK.unpack_from(data, _HEADER.size))
