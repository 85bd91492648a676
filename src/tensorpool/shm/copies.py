# SPDX-License-Identifier: Apache-2.0
"""Which instructions copy payloads: measured once per host and processor, kept in a file, fixed by TENSORPOOL_COPY.

    unset, auto                       measured in 15 ms by the first process that connects, then read from the file
    processor                         by what the processor is; nothing is measured, read or written
    libc, avx2, stream-avx2, …        this kind for every use that it fits, the rest as with `processor`
    read-medium=libc,stream=libc      the kind of single uses, the rest as with `processor`

The file is a cache: one that is missing, damaged or of another processor is made anew, and one that cannot be written
is done without. Processes that measure at the same time each rename a whole file into place.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from tensorpool import _core
from tensorpool.errors import ConfigError

VARIABLE: Final = "TENSORPOOL_COPY"
BUDGET_NS: Final = 12_000_000  # no further round of measuring begins after it

_lock = threading.Lock()
_origin: str | None = None  # where the kinds of this process come from, once they are chosen


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file's contents: what was measured, and on which processor."""

    processor: str
    kinds: dict[str, str]

    @property
    def is_usable(self) -> bool:
        """Whether this processor can take it: a damaged or copied file may hold anything."""
        return (
            self.processor == _core.processor()
            and self.kinds.keys() == _core.copy_kinds().keys()
            and all(kind in _core.copy_candidates(use) for use, kind in self.kinds.items())
        )


def choose_copies(*, keep: bool = True) -> str:
    """Set this process's copies, at the first call only; returns where they come from.

    `keep` writes what had to be measured to the file. Raises ConfigError for a TENSORPOOL_COPY that
    names what does not exist or what this processor lacks.
    """
    global _origin
    with _lock:
        if _origin is None:
            _origin = _choose(os.environ.get(VARIABLE, "auto"), cache_file(), keep=keep)
        return _origin


def cache_file() -> Path:
    """The file of this user's calibration."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "tensorpool" / "copies.json"


def _choose(wish: str, file: Path, *, keep: bool) -> str:
    _core.reset_copy_kinds()
    if wish in ("", "auto"):
        if not has_choice():
            return "no choice on this processor"
        found = _read(file)
        origin = f"measured, kept in {file}"
        if found is None:
            found = Calibration(processor=_core.processor(), kinds=_core.calibrate_copies(BUDGET_NS))
            if not keep:
                origin = f"measured now; the next process that connects keeps its own in {file}"
            elif not _write(file, found):
                origin = f"measured by this process; {file} cannot be written"
        _apply(found.kinds)
        return origin
    if wish != "processor":
        _apply(_parse(wish))
        return f"{VARIABLE}={wish}"
    return f"by processor, {VARIABLE}={wish}"


def has_choice() -> bool:
    """Whether there is more than one kind of copy for any use."""
    return any(len(_core.copy_candidates(use)) > 1 for use in _core.copy_kinds())


def _apply(kinds: Mapping[str, str]) -> None:
    for use, kind in kinds.items():
        _core.set_copy_kind(use, kind)


def _parse(wish: str) -> dict[str, str]:
    fitting = {use: _core.copy_candidates(use) for use in _core.copy_kinds()}
    if "=" not in wish:
        wanted = {use: wish for use, kinds in fitting.items() if wish in kinds}
    else:
        pairs = [part.partition("=") for part in wish.split(",")]
        wanted = {use: kind for use, _, kind in pairs}
        if len(wanted) < len(pairs) or any(kind not in fitting.get(use, ()) for use, kind in wanted.items()):
            wanted = {}
    if not wanted:
        known = sorted({kind for kinds in fitting.values() for kind in kinds})
        uses = "; ".join(f"{use}={'|'.join(kinds)}" for use, kinds in fitting.items())
        raise ConfigError(VARIABLE, wish, f"auto, processor, one of {', '.join(known)}, or a list of {uses}")
    return wanted


def _read(file: Path) -> Calibration | None:
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Calibration)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found if found.is_usable else None


def _write(file: Path, calibration: Calibration) -> bool:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(dir=file.parent, prefix=f"{file.name}.")
        try:
            with open(descriptor, "wb") as out:
                out.write(msgspec.json.format(msgspec.json.encode(calibration)) + b"\n")
            os.replace(unfinished, file)
        except OSError:
            os.unlink(unfinished)
            return False
    except OSError:
        return False
    return True
