# SPDX-License-Identifier: Apache-2.0
"""The columns of our tables, as Spark's DDL.

Spark asks for a schema in a process of its own: nothing is loaded here that reads or writes rows.
"""

from __future__ import annotations

from typing import Final

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
FRAME_DDL: Final = (
    "stream_id BIGINT, epoch BIGINT, seq BIGINT, timestamp_ns BIGINT, received_ns BIGINT, meta_version BIGINT, "
    "trace_id BIGINT, dtype STRING, shape ARRAY<INT>, `order` STRING, nbytes BIGINT, dropped_before BIGINT, "
    "payload BINARY"
)
RANGE_DDL: Final = "stream_id BIGINT, epoch BIGINT, lo BIGINT, hi BIGINT, lost STRING, part BINARY"
TABLE_DDL: Final = {
    table: ", ".join(f"`{name}` {kind}" for name, kind in columns.items()) for table, columns in CONTROL_PLANE.items()
}
LIVE_DDL: Final = {"frames": FRAME_DDL, "ranges": RANGE_DDL, **TABLE_DDL}
LAKE_DDL: Final = {
    "frames": FRAME_DDL,
    "gaps": "stream_id BIGINT, epoch BIGINT, lo BIGINT, hi BIGINT, frames BIGINT, reason STRING",
    "files": (
        "path STRING, stream_id BIGINT, epoch BIGINT, lo BIGINT, hi BIGINT, frames BIGINT, bytes BIGINT, "
        "first_timestamp_ns BIGINT, last_timestamp_ns BIGINT, payload_bytes BIGINT, is_recorded BOOLEAN, "
        "commit BIGINT, written_ns BIGINT"
    ),
    "qos": TABLE_DDL["qos"],
    "metadata": TABLE_DDL["metadata"],
}
