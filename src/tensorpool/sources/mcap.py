# SPDX-License-Identifier: Apache-2.0
"""Pictures of an MCAP file: one topic of sensor_msgs/msg/Image, in the order and at the pace of its log times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tensorpool import pixel_formats, ros_image
from tensorpool.errors import ConfigError
from tensorpool.extras import library
from tensorpool.sources.protocol import SOURCE_KEY, SourceFailed, SourceFrame


class McapSource:
    """A topic of a file; without `topic` the only one that has pictures."""

    is_live: Final = False

    def __init__(self, path: Path | str, topic: str | None = None) -> None:
        self._path = Path(path)
        self._topic = topic
        self._about: dict[str, Any] = {}

    @property
    def about(self) -> Mapping[str, Any]:
        return self._about

    def frames(self) -> Iterator[SourceFrame]:
        reading = library("mcap.reader", "reading MCAP files", "export")
        broken = library("mcap.exceptions", "reading MCAP files", "export").McapError
        with self._path.open("rb") as file:
            try:
                reader = reading.make_reader(file)
                topic = self._chosen(reader.get_summary())
                self._about = {SOURCE_KEY: f"mcap {self._path} {topic}"}
                for _, _, message in reader.iter_messages(topics=[topic]):
                    image = ros_image.decode(message.data)
                    if image.pixel_format is not None:
                        self._about = self._about | {pixel_formats.KEY: image.pixel_format}
                    yield SourceFrame.of(image.array, message.log_time)
            except (broken, ValueError) as error:
                raise SourceFailed(f"{self._path}: {error or type(error).__name__}") from None

    def _chosen(self, summary: Any) -> str:
        if summary is None:
            raise SourceFailed(f"{self._path}: has no summary; it was not written to its end")
        pictures = {
            channel.topic
            for channel in summary.channels.values()
            if channel.message_encoding == "cdr" and summary.schemas[channel.schema_id].name == ros_image.SCHEMA_NAME
        }
        if self._topic in pictures or (self._topic is None and len(pictures) == 1):
            return self._topic or next(iter(pictures))
        accepted = ", ".join(sorted(pictures)) or f"none: the file has no {ros_image.SCHEMA_NAME}"
        raise ConfigError("--topic", self._topic, f"a topic with pictures: {accepted}")
