# SPDX-License-Identifier: Apache-2.0
"""`tensorpool.open`. Imports the lake when it is called: its name is there without the extra `lake`, too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorpool.lake.recording import Recording


def open(path: Path | str) -> Recording:
    """A recording, for random access: a lake on a local disk, or `s3://bucket/path`.

    >>> front = tensorpool.open("/data/lake")["camera/front"]      # doctest: +SKIP
    >>> front[100:200].numpy().shape                               # doctest: +SKIP
    (100, 1080, 1920, 3)

    Raises ConfigError where there is no lake, and MissingExtra where the extra `lake` is not installed.
    """
    from tensorpool.lake.lake import Lake
    from tensorpool.lake.recording import Recording

    return Recording(Lake.open(path))
