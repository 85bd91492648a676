# SPDX-License-Identifier: Apache-2.0
"""Everything in one process: a driver and a media driver of its own, for notebooks, tests and first steps.

Driver Model §2.1.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from tensorpool.client import Client, connect
from tensorpool.driver import Driver, DriverConfig


class Local(Driver):
    """A driver in directories of its own. Made by `local`."""

    def __init__(self, config: Path | str | None = None, overrides: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tensorpool-local-", dir="/dev/shm"))
        try:
            own = {"shm.base_dir": str(self._folder / "regions")}
            settings = DriverConfig.load(config, environ={}, overrides={**overrides, **own})
            super().__init__(settings, aeron_dir=str(self._folder / "aeron"))
        except BaseException:
            self._remove()
            raise

    def connect(self, *, conductor: Literal["thread", "invoked"] = "thread") -> Client:
        """A client of this driver, for this process."""
        return connect(self.aeron_dir, config=self.config, conductor=conductor)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def local(config: Path | str | None = None, overrides: Mapping[str, Any] = MappingProxyType({})) -> Local:
    """Everything embedded, private to this process, gone when it is closed.

    >>> with local() as pool, pool.connect() as client:      # doctest: +SKIP
    ...     producer = client.producer("camera/front", create=True)
    """
    return Local(config, overrides)
