# SPDX-License-Identifier: Apache-2.0
"""Pictures of an MCAP file: one topic of images of ROS 2 or Foxglove, in the order and at the pace of its log times.

Compressed ones (JPEG, PNG, …) are decoded by Pillow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tensorpool import foxglove_image, pixel_formats, ros_image
from tensorpool.errors import ConfigError
from tensorpool.extras import library
from tensorpool.ros_image import CompressedImage, Image
from tensorpool.shm.arrays import Array
from tensorpool.sources.images import decode_picture
from tensorpool.sources.protocol import SOURCE_KEY, SourceFailed, SourceFrame

# By the encoding of messages and the name of the schema.
DECODERS: Final[Mapping[tuple[str, str], Callable[[bytes], Image | CompressedImage]]] = {
    (ros_image.ENCODING, ros_image.SCHEMA_NAME): ros_image.decode,
    (ros_image.ENCODING, ros_image.COMPRESSED_NAME): ros_image.decode_compressed,
    (foxglove_image.ENCODING, foxglove_image.SCHEMA_NAME): foxglove_image.decode,
    (foxglove_image.ENCODING, foxglove_image.COMPRESSED_NAME): foxglove_image.decode_compressed,
}


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
                for schema, channel, message in reader.iter_messages(topics=[topic]):
                    decode = DECODERS.get((channel.message_encoding, "" if schema is None else schema.name))
                    if decode is None:
                        continue  # another channel of the topic
                    array, pixel_format = self._pixels(decode(message.data))
                    if pixel_format is not None:
                        self._about = self._about | {pixel_formats.KEY: pixel_format}
                    yield SourceFrame.of(array, message.log_time)
            except (broken, ValueError) as error:
                raise SourceFailed(f"{self._path}: {error or type(error).__name__}") from None

    def _chosen(self, summary: Any) -> str:
        if summary is None:
            raise SourceFailed(f"{self._path}: has no summary; it was not written to its end")
        schemas = summary.schemas
        pictures = {
            channel.topic
            for channel in summary.channels.values()
            if channel.schema_id in schemas and (channel.message_encoding, schemas[channel.schema_id].name) in DECODERS
        }
        if self._topic in pictures or (self._topic is None and len(pictures) == 1):
            return self._topic or next(iter(pictures))
        names = ", ".join(f"{name} in {encoding}" for encoding, name in DECODERS)
        accepted = ", ".join(sorted(pictures)) or f"none: the file has no {names}"
        raise ConfigError("--topic", self._topic, f"a topic with pictures: {accepted}")

    def _pixels(self, image: Image | CompressedImage) -> tuple[Array, str | None]:
        """And what they mean. Raises SourceFailed."""
        if isinstance(image, Image):
            return image.array, image.pixel_format
        array = decode_picture(image.data, f"{self._path}: a picture compressed as {image.format!r:.80}")
        return array, pixel_formats.guess(array.shape, array.dtype)
