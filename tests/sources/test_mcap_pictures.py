# SPDX-License-Identifier: Apache-2.0
"""Pictures of MCAP files that other libraries wrote: raw and compressed, of ROS 2 and of Foxglove."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from mcap.writer import Writer

import tensorpool as tp
from tensorpool import foxglove_image, ros_image
from tensorpool.errors import ConfigError
from tensorpool.sources import McapSource, SourceFailed
from tests.exports.foxglove import compressed_image_class, raw_image_class
from tests.sources.receiving import through

STEP_NS = 20_000_000
PICTURES = [np.random.default_rng(seed).integers(0, 255, (6, 10, 3), np.uint8) for seed in range(3)]  # rgb
ROS_COMPRESSED = (
    "sensor_msgs/msg/CompressedImage",
    "ros2msg",
    b"std_msgs/Header header\nstring format\nuint8[] data\n",
)


def png(picture: np.ndarray[Any, Any]) -> bytes:
    is_done, data = cv2.imencode(".png", picture[:, :, ::-1] if picture.ndim == 3 else picture)
    assert is_done
    return data.tobytes()


def ros_compressed(data: bytes, format: str = "rgb8; png compressed bgr8") -> bytes:
    """In CDR, by hand: header, format, data, each aligned to four bytes."""
    body = struct.pack("<iII", 12, 34, 4) + b"cam\0"
    body += struct.pack("<I", len(format) + 1) + format.encode() + b"\0"
    body += b"\0" * (-len(body) % 4) + struct.pack("<I", len(data)) + data
    return b"\0\1\0\0" + body


def foxglove_compressed(data: bytes, format: str = "png") -> bytes:
    message = compressed_image_class()[0](data=data, format=format, frame_id="cam")
    message.timestamp.seconds = 12
    found: bytes = message.SerializeToString()
    return found


def foxglove_raw(picture: np.ndarray[Any, Any]) -> bytes:
    """Of Google's library, with a row of padding bytes."""
    padded = np.zeros((6, 32), np.uint8)
    padded[:, :30] = picture.reshape(6, 30)
    message = raw_image_class(foxglove_image.SCHEMA)(
        width=10, height=6, encoding="rgb8", step=32, data=padded.tobytes()
    )
    found: bytes = message.SerializeToString()
    return found


def write(path: Path, schema: tuple[str, str, bytes], encoding: str, messages: list[bytes]) -> Path:
    """A file with one topic, and another one that has no pictures."""
    with path.open("wb") as file:
        writer = Writer(file)
        writer.start()
        other = writer.register_channel("/log", "json", writer.register_schema("Log", "jsonschema", b"{}"))
        writer.add_message(other, 0, b"{}", 0)
        channel = writer.register_channel("/camera", encoding, writer.register_schema(*schema))
        for number, data in enumerate(messages):
            writer.add_message(channel, number * STEP_NS, data, number * STEP_NS)
        writer.finish()  # type: ignore[no-untyped-call]
    return path


FOXGLOVE_COMPRESSED = ("foxglove.CompressedImage", "protobuf", compressed_image_class()[1])
FOXGLOVE_RAW = ("foxglove.RawImage", "protobuf", foxglove_image.SCHEMA)


@pytest.mark.parametrize(
    ("schema", "encoding", "made"),
    [
        (ROS_COMPRESSED, "cdr", lambda picture: ros_compressed(png(picture))),
        (FOXGLOVE_COMPRESSED, "protobuf", lambda picture: foxglove_compressed(png(picture))),
        (FOXGLOVE_RAW, "protobuf", foxglove_raw),
    ],
    ids=["ros compressed", "foxglove compressed", "foxglove raw"],
)
def test_pictures_are_published_as_they_were_taken(
    client: tp.Client, tmp_path: Path, schema: tuple[str, str, bytes], encoding: str, made: Callable[..., bytes]
) -> None:
    """Every pixel, in RGB, at the pace of the file."""
    path = write(tmp_path / "x.mcap", schema, encoding, [made(picture) for picture in PICTURES])
    got = through(client, f"mcap/{schema[0]}", McapSource(path))
    assert np.array_equal(np.stack(got.arrays), np.stack(PICTURES))
    assert (got.lost, got.metadata["pixel_format"]) == (0, "rgb24")
    assert got.metadata["source"] == f"mcap {path} /camera"


def test_jpeg_is_decoded_and_depth_keeps_its_bits(client: tp.Client, tmp_path: Path) -> None:
    """JPEG as near as it is itself; gray with 16 bits exactly."""
    smooth = np.tile(np.arange(64, dtype=np.uint8)[:, None, None] * 3, (1, 64, 3))
    is_done, jpeg = cv2.imencode(".jpg", smooth)
    assert is_done
    depth = (np.arange(60, dtype=np.uint16) * 1000).reshape(6, 10)
    data = [ros_compressed(jpeg.tobytes(), "jpeg"), ros_compressed(png(depth), "mono16; png compressed ")]
    got = through(client, "mcap/jpeg", McapSource(write(tmp_path / "x.mcap", ROS_COMPRESSED, "cdr", data)))
    assert np.abs(got.arrays[0].astype(int) - smooth).max() <= 4
    assert np.array_equal(got.arrays[1], depth)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            ros_compressed(b"\0\0\0\1\x67", "h264"),
            r"x\.mcap: a picture compressed as 'h264': Pillow reads no such picture",
        ),
        (ros_compressed(png(PICTURES[0])[:60]), r"x\.mcap: a picture compressed as 'rgb8; png.*: "),
        (ros_compressed(png(PICTURES[0]))[:-1], r"x\.mcap: a picture of \d+ bytes, \d+ are there"),
        (b"\0\1\0\0", r"x\.mcap: no sensor_msgs/msg/CompressedImage"),
    ],
    ids=["video", "torn picture", "torn message", "empty"],
)
def test_what_cannot_be_decoded_is_named(tmp_path: Path, data: bytes, words: str) -> None:
    """With the file, and what the message says that it is."""
    path = write(tmp_path / "x.mcap", ROS_COMPRESSED, "cdr", [data])
    with pytest.raises(SourceFailed, match=words):
        list(McapSource(path).frames())


def test_a_file_without_pictures_says_what_would_be_some(tmp_path: Path) -> None:
    """A schema of the right name in another encoding is none."""
    path = write(tmp_path / "x.mcap", ROS_COMPRESSED, "ros1", [b""])
    with pytest.raises(ConfigError, match=r"no sensor_msgs/msg/Image in cdr, .*foxglove\.CompressedImage in protobuf"):
        list(McapSource(path).frames())


def test_torn_messages_raise_nothing_else() -> None:
    """Each message cut everywhere, and with each byte changed, is read or refused."""
    picture = PICTURES[0]
    messages: list[tuple[Callable[[bytes], object], bytes]] = [
        (ros_image.decode, ros_image.encode(picture, "rgb8", 5, "cam")),
        (ros_image.decode_compressed, ros_compressed(b"abc")),
        (foxglove_image.decode, foxglove_image.encode(picture, "rgb8", -5, "cam")),
        (foxglove_image.decode_compressed, foxglove_compressed(b"abc")),
    ]
    refused = 0
    for decode, data in messages:
        decode(data)
        torn = [data[:size] for size in range(len(data))]
        changed = [data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :] for at in range(min(len(data), 80))]
        for case in torn + changed:
            try:
                decode(case)
            except ValueError:
                refused += 1
    assert refused > 500


def test_times_before_1970_survive() -> None:
    """Seconds are signed."""
    assert foxglove_image.decode(foxglove_image.encode(PICTURES[0], "rgb8", -5, "cam")).time_ns == -5


def test_the_schema_is_that_of_foxglove() -> None:
    """Field by field, with its numbers and types as Foxglove publishes them."""
    fields = raw_image_class(foxglove_image.SCHEMA).DESCRIPTOR.fields
    message, string, data, fixed32 = 11, 9, 12, 7
    assert {field.name: (field.number, field.type) for field in fields} == {
        "timestamp": (1, message),
        "width": (2, fixed32),
        "height": (3, fixed32),
        "encoding": (4, string),
        "step": (5, fixed32),
        "data": (6, data),
        "frame_id": (7, string),
    }
