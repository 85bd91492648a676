# SPDX-License-Identifier: Apache-2.0
"""Pictures as ROS 2 writes them: sensor_msgs/msg/Image and CompressedImage in CDR. Holds no clock and does no IO.

Foxglove and the tools of ROS 2 show them from an MCAP file.
"""

from __future__ import annotations

import struct
import sys
from typing import Any, Final

import msgspec
import numpy as np

from tensorpool.pixel_formats import BAYER, FORMATS
from tensorpool.shm.arrays import Array

SCHEMA_NAME: Final = "sensor_msgs/msg/Image"
COMPRESSED_NAME: Final = "sensor_msgs/msg/CompressedImage"
ENCODING: Final = "cdr"  # of messages
_RULE: Final = "=" * 80
SCHEMA: Final = f"""std_msgs/Header header
uint32 height
uint32 width
string encoding
uint8 is_bigendian
uint32 step
uint8[] data
{_RULE}
MSG: std_msgs/Header
builtin_interfaces/Time stamp
string frame_id
{_RULE}
MSG: builtin_interfaces/Time
int32 sec
uint32 nanosec
"""
_ENCODINGS: Final = {
    "gray": "mono8",
    "gray16le": "mono16",
    "rgb24": "rgb8",
    "bgr24": "bgr8",
    "rgba": "rgba8",
    "bgra": "bgra8",
    "rgb48le": "rgb16",
    "rgba64le": "rgba16",
    "uyvy422": "uyvy",
    "yuyv422": "yuyv",
} | {f"bayer_{order}{bits}": f"bayer_{order}{bits.removesuffix('le')}" for order in BAYER for bits in ("8", "16le")}
_FORMATS: Final = {encoding: name for name, encoding in _ENCODINGS.items()}
_KINDS: Final = {"uint8": "8U", "int8": "8S", "uint16": "16U", "int16": "16S", "int32": "32S"} | {
    "float32": "32F",
    "float64": "64F",
}
_DTYPES: Final = {kind: dtype for dtype, kind in _KINDS.items()}


class Image(msgspec.Struct, frozen=True, eq=False):
    """A picture as a message has it. `pixel_format` is None where the encoding has no name here."""

    array: Array
    time_ns: int
    frame_id: str
    pixel_format: str | None


class CompressedImage(msgspec.Struct, frozen=True):
    """A picture as a JPEG, a PNG or the like; `format` is what the message calls it."""

    data: bytes
    time_ns: int
    format: str


def encoding_of(shape: tuple[int, ...], dtype: np.dtype[Any], pixel_format: str | None) -> str | None:
    """How ROS names it; None for an array that is no picture to it."""
    if pixel_format in _ENCODINGS:
        return _ENCODINGS[pixel_format]
    channels = 1 if len(shape) == 2 else shape[2] if len(shape) == 3 else 0
    kind = _KINDS.get(dtype.name)
    return f"{kind}C{channels}" if kind and 1 <= channels <= 4 else None


def encode(array: Array, encoding: str, time_ns: int, frame_id: str) -> bytes:
    """The message: numbers little-endian, aligned to their size from the end of the four bytes in front."""
    seconds, nanoseconds = divmod(time_ns, 1_000_000_000)
    body = bytearray(struct.pack("<iI", seconds, nanoseconds))
    _put_text(body, frame_id)
    body += b"\0" * (-len(body) % 4)
    body += struct.pack("<II", array.shape[0], array.shape[1])
    _put_text(body, encoding)
    body.append(sys.byteorder == "big")
    body += b"\0" * (-len(body) % 4)
    body += struct.pack("<II", array.nbytes // max(1, array.shape[0]), array.nbytes)
    return b"\0\1\0\0" + bytes(body) + array.tobytes()


def decode(data: bytes) -> Image:
    """A message in little-endian CDR. Raises ValueError."""
    try:
        return _decode(memoryview(data))
    except (struct.error, UnicodeDecodeError, IndexError, KeyError) as error:
        raise ValueError(f"no {SCHEMA_NAME}: {error}") from None


def decode_compressed(data: bytes) -> CompressedImage:
    """A sensor_msgs/msg/CompressedImage in little-endian CDR. Raises ValueError."""
    try:
        body, time_ns, _, at = _header(memoryview(data), COMPRESSED_NAME)
        format, at = _text(body, at)
        at += -at % 4
        (size,) = struct.unpack_from("<I", body, at)
        picture = bytes(body[at + 4 : at + 4 + size])
        if len(picture) != size:
            raise ValueError(f"a picture of {size} bytes, {len(picture)} are there")
        return CompressedImage(picture, time_ns, format)
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"no {COMPRESSED_NAME}: {error}") from None


def _header(data: memoryview, kind: str) -> tuple[memoryview, int, str, int]:
    """What follows the four bytes in front, with the time, the frame id, and where the rest begins."""
    if bytes(data[:2]) != b"\0\1":
        raise ValueError(f"no {kind} in little-endian CDR")
    body = data[4:]
    seconds, nanoseconds = struct.unpack_from("<iI", body, 0)
    frame_id, at = _text(body, 8)
    return body, seconds * 1_000_000_000 + nanoseconds, frame_id, at


def _decode(data: memoryview) -> Image:
    body, time_ns, frame_id, at = _header(data, SCHEMA_NAME)
    height, width = struct.unpack_from("<II", body, at + (-at % 4))
    encoding, at = _text(body, at + (-at % 4) + 8)
    is_big = bool(body[at])
    at += 1
    step, size = struct.unpack_from("<II", body, at + (-at % 4))
    data = body[at + (-at % 4) + 8 :][:size]
    if len(data) != size:
        raise ValueError(f"{encoding} of {width}x{height} with {len(data)} of {size} bytes")
    array = pixels(data, encoding, width, height, step, is_big=is_big)
    return Image(array, time_ns, frame_id, pixel_format(encoding))


def pixels(data: memoryview | bytes, encoding: str, width: int, height: int, step: int, *, is_big: bool) -> Array:
    """The array of a picture whose rows have `step` bytes. Raises ValueError, and KeyError for an unknown encoding."""
    dtype, channels = _layout(encoding)
    row = width * channels * dtype.itemsize
    if step < row or len(data) != step * height:
        raise ValueError(f"{encoding} of {width}x{height} with {len(data)} bytes in rows of {step}")
    rows = np.frombuffer(data, np.uint8).reshape(height, step)[:, :row]
    array: Array = np.ascontiguousarray(rows).view(dtype.newbyteorder(">" if is_big else "<")).astype(dtype, copy=False)
    return array.reshape((height, width) if channels == 1 else (height, width, channels))


def pixel_format(encoding: str) -> str | None:
    """Our name for an encoding of ROS; None where it has none."""
    return _FORMATS.get(encoding)


def _layout(encoding: str) -> tuple[np.dtype[Any], int]:
    kind, separator, channels = encoding.partition("C")
    if separator and kind in _DTYPES and channels in ("1", "2", "3", "4"):
        return np.dtype(_DTYPES[kind]), int(channels)
    known = FORMATS[_FORMATS[encoding]]
    return np.dtype(known.dtype), max(1, known.channels)


def _put_text(body: bytearray, text: str) -> None:
    data = text.encode() + b"\0"
    body += b"\0" * (-len(body) % 4) + struct.pack("<I", len(data)) + data


def _text(body: memoryview, at: int) -> tuple[str, int]:
    at += -at % 4
    (length,) = struct.unpack_from("<I", body, at)
    return bytes(body[at + 4 : at + 4 + length]).rstrip(b"\0").decode(), at + 4 + length
