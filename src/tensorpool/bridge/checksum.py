# SPDX-License-Identifier: Apache-2.0
"""The private extensions `bridge.crc32c` and `bridge.mac_key_file`: what proves that a frame arrived as it was sent.

Native code computes, sends, receives and checks it: see native/frame_digest.hpp for the message. Bridge §5.4.
"""

from __future__ import annotations

import os
from typing import ClassVar, Final

from tensorpool.errors import ConfigError

KEY_BYTES: Final = range(16, 65)


class FrameChecksum:
    """The message on the control stream that carries a frame's checksum or authentication code."""

    SCHEMA_ID: ClassVar[int] = 902
    TEMPLATE_ID: ClassVar[int] = 9001


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
