# SPDX-License-Identifier: Apache-2.0
"""`tensorpool.open`: says what to install where the extra `lake` is missing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tensorpool.lake.lake import Lake

if TYPE_CHECKING:
    from tensorpool.lake.recording import Recording


def open(path: Path | str) -> Recording:
    """A recording, for random access: a lake on a local disk, or `s3://bucket/path`.

    >>> front = tensorpool.open("/data/lake")["camera/front"]      # doctest: +SKIP
    >>> front[100:200].numpy().shape                               # doctest: +SKIP
    (100, 1080, 1920, 3)

    Raises ConfigError where there is no lake, and ImportError where the extra `lake` is not installed.
    """
    try:
        from tensorpool.lake.recording import Recording
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "pyarrow":
            raise
        raise ImportError("reading a lake needs pyarrow: pip install 'tensorpool[lake]'", name=error.name) from None
    return Recording(Lake.open(path))
