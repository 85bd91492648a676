# SPDX-License-Identifier: Apache-2.0
"""Files of numpy: each .npy a frame, or with `is_stacked` each entry of its first axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from tensorpool.shm.arrays import Array
from tensorpool.sources.images import DEFAULT_HZ, files_of
from tensorpool.sources.protocol import RATE_KEY, SOURCE_KEY, SourceFailed, SourceFrame


class NpySource:
    """Arrays as they are, of any dtype that a stream can carry. Files are mapped, not loaded."""

    is_live: Final = False

    def __init__(self, pattern: str, *, is_stacked: bool = False, rate_hz: float = DEFAULT_HZ) -> None:
        self._files = files_of("--npy", pattern)
        self._is_stacked = is_stacked
        self._about: dict[str, Any] = {SOURCE_KEY: f"npy {pattern}", RATE_KEY: rate_hz}

    @property
    def about(self) -> Mapping[str, Any]:
        return self._about

    def frames(self) -> Iterator[SourceFrame]:
        for path in self._files:
            try:
                array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError) as error:
                raise SourceFailed(f"{path}: {error}") from None
            for one in array if self._is_stacked else (array,):
                yield SourceFrame.of(one)
