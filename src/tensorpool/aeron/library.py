# SPDX-License-Identifier: Apache-2.0
"""Which Aeron we use: the libraries that TENSORPOOL_LIBAERON names, the one inside pyaeron's wheel, or the system's.

Only the C API of that object is called; pyaeron's Python layer is never imported.
"""

from __future__ import annotations

import atexit
import importlib.util
import itertools
import os
from enum import IntEnum
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

from tensorpool import _core
from tensorpool.errors import TransportError

ENVIRONMENT_VARIABLE = "TENSORPOOL_LIBAERON"
SYSTEM_LIBRARIES = (Path("libaeron.so"), Path("libaeron_driver.so"))  # found by the loader, as ldconfig knows them


class Closable(Protocol):
    """What has to be closed before the interpreter ends."""

    def close(self) -> None: ...


class ClosingTurn(IntEnum):
    """What is closed first when the interpreter ends: nothing may lose what it still uses."""

    AGENT = 0
    CLIENT = 1
    MEDIA_DRIVER = 2


_open: WeakValueDictionary[tuple[ClosingTurn, int], Closable] = WeakValueDictionary()
_order = itertools.count()


def load() -> None:
    """Make Aeron's C API available; cheap when it already is.

    Raises `TransportError` when no library is found, or one lacks a function that we call.
    """
    paths = library_paths()
    try:
        _core.load_aeron([str(path) for path in paths])
    except TransportError as error:
        if tuple(paths) != SYSTEM_LIBRARIES:
            raise
        raise TransportError(
            f"no usable Aeron: pyaeron, whose wheel carries one, is not installed, and of the system's: {error}; "
            "install pyaeron, or build libaeron and libaeron_driver (docs/install.md); where the loader does not find "
            f"them, name both in {ENVIRONMENT_VARIABLE}, separated by '{os.pathsep}'"
        ) from None


def library_paths() -> list[Path]:
    """The shared objects that hold the C client and the C media driver."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        return [Path(path) for path in named.split(os.pathsep) if path]
    spec = importlib.util.find_spec("pyaeron")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found = sorted(Path(folder).glob("_pyaeron*.so"))
        if found:
            return found[:1]
    return list(SYSTEM_LIBRARIES)


def version() -> str:
    """Aeron's own version text."""
    load()
    return _core.aeron_version()


def close_at_exit(closable: Closable, turn: ClosingTurn) -> None:
    """Have `closable` closed when the interpreter ends, should its owner forget: no leftovers in /dev/shm."""
    _open[turn, -next(_order)] = closable


@atexit.register
def _close_all() -> None:
    for _, closable in sorted(_open.items()):  # the newest of a kind first
        closable.close()
