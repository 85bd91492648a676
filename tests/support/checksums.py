# SPDX-License-Identifier: Apache-2.0
"""The checksum of blobs, written from its definition: it shares no code with ours."""

from __future__ import annotations


def crc32c(data: bytes) -> int:
    """Castagnoli's, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
