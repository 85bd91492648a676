# SPDX-License-Identifier: Apache-2.0
"""The column `metadata` of frames: the attributes of each frame's meta_version, as a VARIANT."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql.types import VariantVal

from tensorpool.client.metadata import Metadata

VARIANT: Final = pa.struct(  # as Spark exchanges it
    [
        pa.field("value", pa.binary(), nullable=False),
        pa.field("metadata", pa.binary(), nullable=False, metadata={b"variant": b"true"}),
    ]
)


def text_of(metadata: Metadata) -> str:
    """Attributes as JSON; those that are neither text nor JSON as base64."""
    return msgspec.json.encode(dict(metadata.attributes)).decode()


def with_metadata(batch: pa.RecordBatch, find: Callable[[int, int], str | None]) -> pa.RecordBatch:
    """Rows with their metadata: `find` has the text of a version at a time, or None where nothing is known of it."""
    columns = (batch.column(name).to_pylist() for name in ("meta_version", "timestamp_ns", "received_ns"))
    found: list[dict[str, Any] | None] = []
    for version, stamp_ns, received_ns in zip(*columns, strict=True):
        at_ns = received_ns if stamp_ns is None else stamp_ns
        text = find(version, at_ns or 0) if version else None  # frames of version 0 have none
        found.append(None if text is None else _variant(text))
    return batch.append_column(pa.field("metadata", VARIANT), pa.array(found, VARIANT))


@functools.lru_cache(maxsize=256)
def _variant(text: str) -> dict[str, Any]:
    made = VariantVal.parseJson(text)
    return {"value": made.value, "metadata": made.metadata}
