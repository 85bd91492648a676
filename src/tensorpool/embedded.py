# SPDX-License-Identifier: Apache-2.0
"""Everything in one process: a driver and a media driver of its own, for notebooks, tests and first steps.

A process that is killed leaves its directory behind; the next one that embeds a driver removes it. A lock that goes
with its process tells the dead from the living. Driver Model §2.1.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from tensorpool.client import Client, connect
from tensorpool.driver import Driver, DriverConfig

ROOT: Final = Path("/dev/shm")
PREFIX: Final = "tensorpool-local-"
LOCK: Final = "owner.lock"


class Local(Driver):
    """A driver in directories of its own. Made by `local`."""

    def __init__(self, config: Path | str | None = None, overrides: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._pid = os.getpid()
        _remove_dead()
        unlocked = Path(tempfile.mkdtemp(prefix="tensorpool-new-", dir=ROOT))
        self._lock = os.open(unlocked / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._folder = ROOT / unlocked.name.replace("tensorpool-new-", PREFIX)
        unlocked.rename(self._folder)  # under this name it is locked from the start
        try:
            own = {"shm.base_dir": str(self._folder / "regions")}
            environ = {name: value for name, value in os.environ.items() if name.startswith("CLIENT_")}
            settings = DriverConfig.load(config, environ=environ, overrides={**overrides, **own})
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
        if os.getpid() == self._pid:  # a forked child leaves by the same way
            shutil.rmtree(self._folder, ignore_errors=True)
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1


def _remove_dead() -> None:
    """Remove what killed processes of ours have left: their lock is free."""
    for folder in ROOT.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # being made, being removed, or another user's
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # its owner lives
        finally:
            os.close(lock)


def local(config: Path | str | None = None, overrides: Mapping[str, Any] = MappingProxyType({})) -> Local:
    """Everything embedded, private to this process, gone when it is closed.

    >>> with local() as pool, pool.connect() as client:      # doctest: +SKIP
    ...     producer = client.producer("camera/front", create=True)
    """
    return Local(config, overrides)
