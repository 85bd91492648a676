# SPDX-License-Identifier: Apache-2.0
"""The columns of frames and of the control plane's tables, with their types in SQL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tensorpool.lake.delta_log import Column

FRAMES: Final[dict[str, str]] = {
    "stream_id": "BIGINT",
    "epoch": "BIGINT",
    "seq": "BIGINT",
    "time": "TIMESTAMP",  # UTC; null where it is not known
    "timestamp_ns": "BIGINT",
    "received_ns": "BIGINT",
    "meta_version": "BIGINT",
    "trace_id": "BIGINT",
    "dtype": "STRING",
    "shape": "ARRAY<INT>",
    "order": "STRING",
    "nbytes": "BIGINT",
    "dropped_before": "BIGINT",
    "dropped_reason": "STRING",  # of what was dropped before this frame
    "payload": "BINARY",
}
CONTROL_PLANE: Final[dict[str, dict[str, str]]] = {
    "announces": {
        "received_ns": "BIGINT",
        "stream_id": "BIGINT",
        "producer_id": "BIGINT",
        "epoch": "BIGINT",
        "announce_timestamp_ns": "BIGINT",
        "layout_version": "BIGINT",
        "header_nslots": "BIGINT",
        "pools": "STRING",
        "header_region_uri": "STRING",
    },
    "qos": {
        "received_ns": "BIGINT",
        "kind": "STRING",
        "stream_id": "BIGINT",
        "client_id": "BIGINT",
        "epoch": "BIGINT",
        "seq": "BIGINT",
        "drops_gap": "BIGINT",
        "drops_late": "BIGINT",
        "mode": "STRING",
    },
    "metadata": {
        "received_ns": "BIGINT",
        "kind": "STRING",
        "stream_id": "BIGINT",
        "meta_version": "BIGINT",
        "timestamp_ns": "BIGINT",
        "name": "STRING",
        "key": "STRING",
        "format": "STRING",
        "value": "BINARY",
    },
    "traces": {
        "received_ns": "BIGINT",
        "stream_id": "BIGINT",
        "epoch": "BIGINT",
        "seq": "BIGINT",
        "trace_id": "BIGINT",
        "parent_id": "BIGINT",
    },
    "events": {
        "received_ns": "BIGINT",
        "timestamp_ns": "BIGINT",
        "correlation_id": "BIGINT",
        "tag": "STRING",
        "key": "STRING",
        "format": "STRING",
        "value": "BINARY",
    },
}

_DELTA_TYPES: Final = {
    "ARRAY<INT>": "array<integer>",
    "BIGINT": "long",
    "BINARY": "binary",
    "STRING": "string",
    "TIMESTAMP": "timestamp",
}


def delta_columns(columns: Mapping[str, str]) -> list[Column]:
    """Columns as a Delta table has them."""
    return [Column(name, _DELTA_TYPES[kind]) for name, kind in columns.items()]
