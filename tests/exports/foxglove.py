# SPDX-License-Identifier: Apache-2.0
"""Messages of Foxglove by Google's protobuf library: the other end of tensorpool.foxglove_image."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

COMPRESSED = """
name: "foxglove/CompressedImage.proto" package: "foxglove" syntax: "proto3"
dependency: "google/protobuf/timestamp.proto"
message_type {
  name: "CompressedImage"
  field { name: "timestamp" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".google.protobuf.Timestamp" }
  field { name: "frame_id" number: 4 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "data" number: 2 label: LABEL_OPTIONAL type: TYPE_BYTES }
  field { name: "format" number: 3 label: LABEL_OPTIONAL type: TYPE_STRING }
}
"""


def raw_image_class(schema: bytes) -> Any:
    """The class of foxglove.RawImage, by the schema of a file alone."""
    return _class(descriptor_pb2.FileDescriptorSet.FromString(schema), "foxglove.RawImage")


def compressed_image_class() -> tuple[Any, bytes]:
    """The class of foxglove.CompressedImage, and its schema as a file has it."""
    from google.protobuf import text_format, timestamp_pb2

    files = descriptor_pb2.FileDescriptorSet()
    timestamp_pb2.DESCRIPTOR.CopyToProto(files.file.add())
    text_format.Parse(COMPRESSED, files.file.add())
    return _class(files, "foxglove.CompressedImage"), files.SerializeToString()


def _class(files: Any, name: str) -> Any:
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
