# SPDX-License-Identifier: Apache-2.0
"""MCAP with pictures as ROS 2 has them (sensor_msgs/msg/Image): for Foxglove, rosbag2 and PlotJuggler.

A channel per epoch, all with one topic; `sequence` is the seq, `log_time` UTC where it is known. What is missing is in
a metadata record named tensorpool. A file cannot be appended to: a continuation copies what an earlier run wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tensorpool import ros_image
from tensorpool.exports.protocol import ExportFrame, ExportRefused, Missing, Written
from tensorpool.extras import library


class McapExport:
    """One topic."""

    def __init__(self, path: Path, topic: str) -> None:
        self._path = path
        self._topic = topic
        self._channels: dict[int, int] = {}
        library("mcap.writer", "writing MCAP", "export")

    def resume(self) -> Written:
        from mcap.writer import CompressionType, Writer

        before = self._path.with_name(self._path.name + ".before")
        if self._path.exists() and not before.exists():
            self._path.rename(before)
        self._file = self._path.open("wb")
        self._writer = Writer(self._file, compression=CompressionType.NONE)
        self._writer.start(profile="ros2", library="tensorpool")
        self._schema = self._writer.register_schema(ros_image.SCHEMA_NAME, "ros2msg", ros_image.SCHEMA.encode())
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
        data = ros_image.encode(array, encoding, at_ns, self._topic.strip("/"))
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
                self._topic, "cdr", self._schema, metadata={"epoch": str(epoch)}
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
