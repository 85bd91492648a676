# SPDX-License-Identifier: Apache-2.0
"""MCAP with pictures as ROS 2 has them (sensor_msgs/msg/Image), for Foxglove and rosbag2, or as foxglove.RawImage.

A channel per epoch, all with one topic; `sequence` is the seq, `log_time` UTC where it is known. What is missing is in
a metadata record named tensorpool. A file cannot be appended to: a continuation copies what an earlier run wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from tensorpool import foxglove_image, ros_image
from tensorpool.exports.protocol import ExportFrame, ExportRefused, Missing, Written
from tensorpool.extras import library
from tensorpool.shm.arrays import Array


class Messages(msgspec.Struct, frozen=True):
    """A kind of message: its schema, and how an array becomes one."""

    profile: str
    schema_name: str
    schema_encoding: str
    schema: bytes
    encoding: str
    encode: Callable[[Array, str, int, str], bytes]


ROS: Final = Messages(
    "ros2", ros_image.SCHEMA_NAME, "ros2msg", ros_image.SCHEMA.encode(), ros_image.ENCODING, ros_image.encode
)
FOXGLOVE: Final = Messages(
    "",
    foxglove_image.SCHEMA_NAME,
    foxglove_image.ENCODING,
    foxglove_image.SCHEMA,
    foxglove_image.ENCODING,
    foxglove_image.encode,
)


class McapExport:
    """One topic."""

    def __init__(self, path: Path, topic: str, messages: Messages = ROS) -> None:
        self._path = path
        self._topic = topic
        self._messages = messages
        self._channels: dict[int, int] = {}
        library("mcap.writer", "writing MCAP", "export")

    def resume(self) -> Written:
        from mcap.writer import CompressionType, Writer

        before = self._path.with_name(self._path.name + ".before")
        if self._path.exists() and not before.exists():
            self._path.rename(before)
        self._file = self._path.open("wb")
        self._writer = Writer(self._file, compression=CompressionType.NONE)
        kind = self._messages
        self._writer.start(profile=kind.profile, library="tensorpool")
        self._schema = self._writer.register_schema(kind.schema_name, kind.schema_encoding, kind.schema)
        written = Written()
        if before.exists():
            for epoch, message in _salvaged(before):
                self._put(epoch, message.sequence, message.log_time, message.publish_time, message.data)
                written = Written(written.frames + 1, (epoch, message.sequence))
            self._file.flush()
            before.unlink()
        return written

    def add(self, frame: ExportFrame) -> None:
        array = frame.array
        encoding = ros_image.encoding_of(array.shape, array.dtype, frame.pixel_format)
        if encoding is None:
            raise ExportRefused(
                f"frame {frame.seq} is {array.dtype} {array.shape}, and no picture of 1 to 4 channels; "
                "export it as npy, zarr or hdf5"
            )
        at_ns = frame.timestamp_ns or 0 if frame.time_ns is None else frame.time_ns
        data = self._messages.encode(array, encoding, at_ns, self._topic.strip("/"))
        self._put(frame.epoch, frame.seq, at_ns, at_ns, data)

    def finish(self, missing: Sequence[Missing], about: dict[str, Any]) -> Path:
        gaps = msgspec.json.encode(missing).decode()
        self._writer.add_metadata("tensorpool", {"missing": gaps} | {key: str(value) for key, value in about.items()})
        self.suspend()
        return self._path

    def suspend(self) -> None:
        self._writer.finish()  # type: ignore[no-untyped-call]
        self._file.close()

    def _put(self, epoch: int, seq: int, log_ns: int, publish_ns: int, data: bytes) -> None:
        if epoch not in self._channels:
            self._channels[epoch] = self._writer.register_channel(
                self._topic, self._messages.encoding, self._schema, metadata={"epoch": str(epoch)}
            )
        self._writer.add_message(self._channels[epoch], log_ns, data, publish_ns, seq & 0xFFFF_FFFF)


def _salvaged(path: Path) -> Iterator[tuple[int, Any]]:
    """The messages of a file that may end in the middle of one."""
    from mcap.exceptions import McapError
    from mcap.records import Channel, Message
    from mcap.stream_reader import StreamReader

    epochs: dict[int, int] = {}
    with path.open("rb") as file:
        try:
            for record in StreamReader(file).records:
                if isinstance(record, Channel):
                    epochs[record.id] = int(record.metadata["epoch"])
                elif isinstance(record, Message):
                    yield epochs[record.channel_id], record
        except (McapError, EOFError, ValueError):
            return
