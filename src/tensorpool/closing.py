# SPDX-License-Identifier: Apache-2.0
"""The `with` statement for objects that have a `close()`."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class ClosesOnExit:
    """`with` closes it at the end of the block, whether or not the block raised."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
