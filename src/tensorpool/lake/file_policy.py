# SPDX-License-Identifier: Apache-2.0
"""How the files of a lake are cut and compressed."""

from __future__ import annotations

from typing import Final

import msgspec

from tensorpool.errors import ConfigError

CODECS: Final = ("none", "lz4", "zstd")


class FilePolicy(msgspec.Struct, frozen=True):
    """When a file is full, and how its payloads are compressed."""

    codec: str = "zstd"
    max_bytes: int = 256 << 20
    max_ns: int = 60_000_000_000
    is_durable: bool = True

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise ConfigError("option codec", self.codec, " or ".join(CODECS))
