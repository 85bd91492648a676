# SPDX-License-Identifier: Apache-2.0
"""The data pipeline on Spark; the only importer of pyspark.

Names are loaded when they are used: rings, offsets and the lake work without a JVM and without pyspark.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tensorpool.spark.progress import Progress, progress_of, total_of, with_metrics
    from tensorpool.spark.rings import fetch_payloads
    from tensorpool.spark.sessions import register, session

__all__ = ["Progress", "fetch_payloads", "progress_of", "register", "session", "total_of", "with_metrics"]

_HOMES: Final = {
    "Progress": "progress",
    "fetch_payloads": "rings",
    "progress_of": "progress",
    "register": "sessions",
    "session": "sessions",
    "total_of": "progress",
    "with_metrics": "progress",
}


def __getattr__(name: str) -> Any:
    """Load a public name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
