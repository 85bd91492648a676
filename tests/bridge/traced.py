# SPDX-License-Identifier: Apache-2.0
"""BridgeFrameChunk with a block of 53 bytes, written and read byte by byte from its table of fields (K9)."""

from __future__ import annotations

import struct
from typing import Any, Final

FIELDS: Final = (
    "streamId",
    "epoch",
    "seq",
    "traceId",
    "chunkIndex",
    "chunkCount",
    "chunkOffset",
    "chunkLength",
    "payloadLength",
    "payloadCrc32c",
)
HEADER: Final = struct.Struct("<HHHH")
BLOCK: Final = struct.Struct("<IQQQIIIIIIB")  # streamId u32, epoch seq traceId u64, six u32, headerIncluded u8
MESSAGE: Final = (BLOCK.size, 1, 902, 1)
LENGTH: Final = struct.Struct("<I")


def encode(fields: dict[str, Any]) -> bytes:
    header, payload = bytes.fromhex(fields["headerBytes"]), bytes.fromhex(fields["payloadBytes"])
    block = BLOCK.pack(*(fields[name] for name in FIELDS), bool(header))
    return HEADER.pack(*MESSAGE) + block + LENGTH.pack(len(header)) + header + LENGTH.pack(len(payload)) + payload


def decode(message: bytes) -> dict[str, Any]:
    assert HEADER.unpack_from(message) == MESSAGE
    at = HEADER.size + BLOCK.size
    *values, is_included = BLOCK.unpack_from(message, HEADER.size)
    texts = []
    for _ in range(2):
        (length,) = LENGTH.unpack_from(message, at)
        texts.append(message[at + LENGTH.size : at + LENGTH.size + length])
        at += LENGTH.size + length
    assert at == len(message)
    assert is_included == bool(texts[0])
    return dict(zip(FIELDS, values, strict=True)) | {"headerBytes": texts[0].hex(), "payloadBytes": texts[1].hex()}
