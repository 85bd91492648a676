# SPDX-License-Identifier: Apache-2.0
"""When a test runs, and how long a random one goes on. Every test has exactly one level.

    quick   `make quick`   decisions, bytes, memory and properties: no JVM, no chaos, hardly a process
    test    `make test`    all of quick, and real processes, faults, commands and Spark, in their short form
    soak    `make soak`    what takes minutes: the long form of something that `make test` does in short

QUICK_FOLDERS and the files of tests/ itself are quick; a test marked `@pytest.mark.soak` has that level wherever it is.
`make soak` also repeats the tests that choose at random (tests/property, tests/fuzz, tests/fault) SOAK times as long.
"""

from __future__ import annotations

import os
import time
from typing import Final

import pytest

QUICK_FOLDERS: Final = frozenset(
    {
        "aeron",
        "bridge",
        "client",
        "control",
        "discovery",
        "driver",
        "looks",
        "mutants",
        "native",
        "property",
        "shm",
        "supervisor",
        "telemetry",
        "wire",
    }
)
SOAK: Final = int(os.environ.get("TENSORPOOL_SOAK", "1"))  # times as many examples, rounds and seconds
SEED: Final = int(os.environ.get("TENSORPOOL_SEED", time.time_ns() % 1_000_000_007))  # of tests that print it


def level_of(item: pytest.Item) -> str:
    """quick, test or soak."""
    if item.get_closest_marker("soak") is not None:
        return "soak"
    folder = item.path.relative_to(item.config.rootpath / "tests").parts[0]
    return "quick" if folder in QUICK_FOLDERS or folder.endswith(".py") else "test"
