# SPDX-License-Identifier: Apache-2.0
"""What a page sends about a preview, and what it gets. Holds no clock and does no IO.

A picture is one binary message: the length of a JSON header (u32, little-endian), the header, the picture's bytes.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import msgspec

from tensorpool.console.budget import Allowance
from tensorpool.errors import ConfigError
from tensorpool.looks import Look

MAX_BYTES: Final = 65_536  # of a message
PER_S: Final = 120.0  # messages of one socket
AT_ONCE: Final = 240.0
_LENGTH: Final = struct.Struct("<I")


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """From a page."""


class SetLook(_Message, frozen=True, tag="look"):
    look: Look


class Ack(_Message, frozen=True, tag="ack"):
    number: int


class Pause(_Message, frozen=True, tag="pause"):
    pass


class Resume(_Message, frozen=True, tag="resume"):
    pass


class Step(_Message, frozen=True, tag="step"):
    pass


class PixelQuery(_Message, frozen=True, tag="pixel"):
    x: int
    y: int


class ProfileQuery(_Message, frozen=True, tag="profile"):
    x0: float
    y0: float
    x1: float
    y1: float


class SetHistogram(_Message, frozen=True, tag="histogram"):
    on: bool


type FromPage = SetLook | Ack | Pause | Resume | Step | PixelQuery | ProfileQuery | SetHistogram

_decoder: Final = msgspec.json.Decoder(SetLook | Ack | Pause | Resume | Step | PixelQuery | ProfileQuery | SetHistogram)


def read(text: str | bytes) -> FromPage:
    """A message of a page. Raises ValueError with what is wrong about it."""
    try:
        found: FromPage = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeError, ConfigError) as error:
        raise ValueError(f"not understood: {error}") from None
    return found


class MessageRate:
    """Whether a page sends too many messages."""

    def __init__(self) -> None:
        self._allowance = Allowance(PER_S, AT_ONCE)

    def is_kept(self, now_ns: int) -> bool:
        return self._allowance.take(now_ns)


def pack(header: dict[str, Any], body: bytes) -> bytes:
    """A picture as it travels."""
    encoded = msgspec.json.encode(header)
    return b"".join((_LENGTH.pack(len(encoded)), encoded, body))


def unpack(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The other way round, for clients in Python."""
    (length,) = _LENGTH.unpack_from(data)
    return msgspec.json.decode(data[_LENGTH.size : _LENGTH.size + length]), data[_LENGTH.size + length :]


def text(kind: str, **fields: object) -> str:
    """Any other message to a page."""
    return msgspec.json.encode({"type": kind, **fields}).decode()
