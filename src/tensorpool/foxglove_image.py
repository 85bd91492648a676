# SPDX-License-Identifier: Apache-2.0
"""Pictures as Foxglove writes them: foxglove.RawImage and foxglove.CompressedImage in protobuf. Does no IO.

Encodings have the names of ROS. Protobuf is written and read here: two small messages need no library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

from tensorpool import ros_image
from tensorpool.ros_image import CompressedImage, Image
from tensorpool.shm.arrays import Array

SCHEMA_NAME: Final = "foxglove.RawImage"
COMPRESSED_NAME: Final = "foxglove.CompressedImage"
ENCODING: Final = "protobuf"  # of messages, and of the schema

# Field numbers of the two messages.
_TIMESTAMP: Final = 1
_WIDTH, _HEIGHT, _ENCODING, _STEP, _DATA, _FRAME_ID = range(2, 8)
_COMPRESSED_DATA, _FORMAT, _COMPRESSED_FRAME_ID = range(2, 5)

_VARINT, _BYTES, _FIXED32 = 0, 2, 5  # wire types
_FIXED: Final = {1: struct.Struct("<Q"), _FIXED32: struct.Struct("<I")}


def encode(array: Array, encoding: str, time_ns: int, frame_id: str) -> bytes:
    """A foxglove.RawImage."""
    seconds, nanoseconds = divmod(time_ns, 1_000_000_000)
    return b"".join(
        (
            _text(_TIMESTAMP, _number(1, seconds) + _number(2, nanoseconds)),
            _fixed(_WIDTH, array.shape[1]),
            _fixed(_HEIGHT, array.shape[0]),
            _text(_ENCODING, encoding.encode()),
            _fixed(_STEP, array.nbytes // max(1, array.shape[0])),
            _text(_FRAME_ID, frame_id.encode()),
            _text(_DATA, array.tobytes()),
        )
    )


def decode(data: bytes) -> Image:
    """A foxglove.RawImage. Raises ValueError."""
    try:
        fields = dict(_fields(memoryview(data)))
        encoding = bytes(fields.get(_ENCODING, b"")).decode()
        width, height, step = (fields.get(number, 0) for number in (_WIDTH, _HEIGHT, _STEP))
        array = ros_image.pixels(fields.get(_DATA, b""), encoding, width, height, step, is_big=False)
        frame_id = bytes(fields.get(_FRAME_ID, b"")).decode()
        return Image(array, _time_ns(fields), frame_id, ros_image.pixel_format(encoding))
    except (struct.error, UnicodeDecodeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"no {SCHEMA_NAME}: {error}") from None


def decode_compressed(data: bytes) -> CompressedImage:
    """A foxglove.CompressedImage. Raises ValueError."""
    try:
        fields = dict(_fields(memoryview(data)))
        format = bytes(fields.get(_FORMAT, b"")).decode()
        return CompressedImage(bytes(fields.get(_COMPRESSED_DATA, b"")), _time_ns(fields), format)
    except (struct.error, UnicodeDecodeError, IndexError, TypeError) as error:
        raise ValueError(f"no {COMPRESSED_NAME}: {error}") from None


def _time_ns(fields: dict[int, Any]) -> int:
    stamp = dict(_fields(memoryview(fields.get(_TIMESTAMP, b""))))
    seconds, nanoseconds = int(stamp.get(1, 0)), int(stamp.get(2, 0))
    return (seconds - (1 << 64) if seconds >> 63 else seconds) * 1_000_000_000 + nanoseconds


# --- protobuf


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _fixed(number: int, value: int) -> bytes:
    return _varint(number << 3 | _FIXED32) + _FIXED[_FIXED32].pack(value)


def _text(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(data)) + data


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """The number and the value of each field: an integer, or bytes. Raises ValueError, IndexError and struct.error."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = 0
        for shift in range(0, 70, 7):
            value |= (data[at] & 0x7F) << shift
            at += 1
            if not data[at - 1] & 0x80:
                return value & (1 << 64) - 1
        raise ValueError("a number of more than ten bytes")

    while at < len(data):
        key = varint()
        kind = key & 7
        if kind == _VARINT:
            yield key >> 3, varint()
        elif kind == _BYTES:
            size = varint()
            if size > len(data) - at:
                raise ValueError(f"a field of {size} bytes, {len(data) - at} are left")
            yield key >> 3, data[at : at + size]
            at += size
        elif kind in _FIXED:
            yield key >> 3, _FIXED[kind].unpack_from(data, at)[0]
            at += _FIXED[kind].size
        else:
            raise ValueError(f"a field of wire type {kind}")


def _schema() -> bytes:
    """The two files that describe a RawImage, as a FileDescriptorSet: so MCAP wants it."""
    int64, int32, fixed32, string, message, data = 3, 5, 7, 9, 11, 12

    def field(name: str, number: int, kind: int, type_name: str = "") -> bytes:
        named = _text(6, type_name.encode()) if type_name else b""
        return _text(2, _text(1, name.encode()) + _number(3, number) + _number(4, 1) + _number(5, kind) + named)

    def file(name: str, package: str, uses: str, described: str, *fields: bytes) -> bytes:
        used = _text(3, uses.encode()) if uses else b""
        body = _text(4, _text(1, described.encode()) + b"".join(fields))
        return _text(1, _text(1, name.encode()) + _text(2, package.encode()) + used + body + _text(12, b"proto3"))

    stamp_file = "google/protobuf/timestamp.proto"
    return file(
        stamp_file, "google.protobuf", "", "Timestamp", field("seconds", 1, int64), field("nanos", 2, int32)
    ) + file(
        "foxglove/RawImage.proto",
        "foxglove",
        stamp_file,
        "RawImage",
        field("timestamp", _TIMESTAMP, message, ".google.protobuf.Timestamp"),
        field("frame_id", _FRAME_ID, string),
        field("width", _WIDTH, fixed32),
        field("height", _HEIGHT, fixed32),
        field("encoding", _ENCODING, string),
        field("step", _STEP, fixed32),
        field("data", _DATA, data),
    )


SCHEMA: Final = _schema()
