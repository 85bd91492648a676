# SPDX-License-Identifier: Apache-2.0
"""The private extensions `bridge.crc32c` and `bridge.mac_key_file`: what proves that a frame arrived as it was sent.

A message of its own on the control stream, schema 902, template 9001, which no published schema has: receivers that do
not know it skip it, and the chunks stay as the specification has them.

    streamId u32 · epoch u64 · seq u64 · payloadLength u32 · crc32c u32, and with a key: mac 16 bytes

`crc32c` is over the 256 bytes of the slot header as chunk 0 carries them, then over the payload. `mac` is BLAKE2b with
the key over the first 24 bytes of the message's block (which frame it is), the slot header and the payload; `crc32c` is
0 then. Either may arrive before or after the chunks; a receiver that checks waits for it until the assembly timeout.
Bridge §5.4.
"""

from __future__ import annotations

import os
import struct
from typing import ClassVar, Final

import msgspec

from tensorpool.errors import ConfigError

_HEADER: Final = struct.Struct("<HHHH")
_BLOCK: Final = struct.Struct("<IQQII")
MAC_BYTES: Final = 16
KEY_BYTES: Final = range(16, 65)


class FrameChecksum(msgspec.Struct, frozen=True):
    """What the sender computed of a frame; `mac` is empty without a key."""

    SCHEMA_ID: ClassVar[int] = 902
    TEMPLATE_ID: ClassVar[int] = 9001

    stream_id: int
    epoch: int
    seq: int
    payload_length: int
    crc32c: int
    mac: bytes = b""

    def encode(self) -> bytes:
        block = _BLOCK.pack(self.stream_id, self.epoch, self.seq, self.payload_length, self.crc32c) + self.mac
        return _header(len(block)) + block

    @classmethod
    def decode(cls, data: bytes) -> FrameChecksum | None:
        """None for anything else."""
        size = len(data) - _HEADER.size
        if size not in (_BLOCK.size, _BLOCK.size + MAC_BYTES) or not data.startswith(_header(size)):
            return None
        stream_id, epoch, seq, payload_length, crc = _BLOCK.unpack_from(data, _HEADER.size)
        return cls(stream_id, epoch, seq, payload_length, crc, data[_HEADER.size + _BLOCK.size :])


def _header(block_bytes: int) -> bytes:
    return _HEADER.pack(block_bytes, FrameChecksum.TEMPLATE_ID, FrameChecksum.SCHEMA_ID, 1)


def read_key(path: str) -> bytes:
    """The key of `bridge.mac_key_file`; none where there is no file. Raises ConfigError, which never shows the key."""
    if not path:
        return b""
    try:
        mode = os.stat(path).st_mode
        with open(path, "rb") as file:
            key = file.read(KEY_BYTES[-1] + 2).rstrip(b"\r\n")
    except OSError as error:
        raise ConfigError("bridge.mac_key_file", path, f"a file that can be read; {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError("bridge.mac_key_file", path, f"a file that only its owner can read: chmod 600 {path}")
    if len(key) not in KEY_BYTES:
        accepted = f"a file of {KEY_BYTES[0]} to {KEY_BYTES[-1]} bytes, the same on both hosts; this one has {len(key)}"
        raise ConfigError("bridge.mac_key_file", path, accepted)
    return key
