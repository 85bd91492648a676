# SPDX-License-Identifier: Apache-2.0
"""The data pipeline's adapters to Spark: live source, sink, lake format, functions, sessions.

The only importer of pyspark. Names are loaded when they are used: a process of Spark imports what its step needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tensorpool import extras
from tensorpool.lazy import exports

if TYPE_CHECKING:
    from tensorpool.lake.ring_reader import fetch_payloads
    from tensorpool.spark.native import native_frames
    from tensorpool.spark.progress import Progress, progress_of, total_of, with_metrics
    from tensorpool.spark.sessions import register, session

__all__ = [
    "Progress",
    "fetch_payloads",
    "native_frames",
    "progress_of",
    "register",
    "session",
    "total_of",
    "with_metrics",
]

_HOMES: Final = {
    "Progress": "tensorpool.spark.progress",
    "fetch_payloads": "tensorpool.lake.ring_reader",
    "native_frames": "tensorpool.spark.native",
    "progress_of": "tensorpool.spark.progress",
    "register": "tensorpool.spark.sessions",
    "session": "tensorpool.spark.sessions",
    "total_of": "tensorpool.spark.progress",
    "with_metrics": "tensorpool.spark.progress",
}

extras.require("tensorpool.spark", "spark", "pyspark")

__getattr__ = exports(__name__, _HOMES)
