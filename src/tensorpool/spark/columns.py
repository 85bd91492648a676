# SPDX-License-Identifier: Apache-2.0
"""The columns of our tables, as Spark's DDL.

Spark asks for a schema in a process of its own: nothing is loaded here that reads or writes rows.
"""

from __future__ import annotations

from typing import Final

from tensorpool.lake.columns import CONTROL_PLANE, FRAMES

FRAME_DDL: Final = ", ".join(f"`{name}` {kind}" for name, kind in FRAMES.items())
METADATA_DDL: Final = ", `metadata` VARIANT"  # of frames, where it is asked for
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
        "written_ns BIGINT"
    ),
    "qos": TABLE_DDL["qos"],
    "metadata": TABLE_DDL["metadata"],
    "traces": TABLE_DDL["traces"],
}
