# SPDX-License-Identifier: Apache-2.0
"""Staged files become part of a lake, all of a batch at once and once only; what is left over is collected.

A commit places the staged files, by links or by an upload, and adds one entry to the log. Whatever interrupts it, it
can be done again: the staged files stay until the entry is there, and a batch that the log has is not added twice.
Every kind of recording commits here: what a batch is, how far a recording is and that no frame comes twice is decided
once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from tensorpool.lake import layout
from tensorpool.lake.errors import LakeConflict, LakeDamaged
from tensorpool.lake.lake import Change, Lake
from tensorpool.lake.manifest import Commit, Gap, Kind, LakeFile, State, with_gaps

COLLECT_AFTER_S: Final = 7 * 86_400.0  # staged files of queries whose checkpoint is not in the lake


class Staged(msgspec.Struct, frozen=True):
    """What a task did: staged files, by name, and what was missing."""

    files: tuple[LakeFile, ...] = ()  # their paths are those in the staging directory
    gaps: tuple[Gap, ...] = ()


def staging_folder(root: Path, query: str, batch: int) -> Path:
    """Where the tasks of a batch put their files."""
    return root / layout.STAGING / query / str(batch)


def commit(
    lake: Lake, query: str, batch: int, staged: Sequence[Staged], *, kind: Kind = "record", is_durable: bool = True
) -> Commit | None:
    """Make a batch part of the lake; None where it is already.

    Raises LakeConflict when the lake has some of the frames from another recording.
    """
    folder = staging_folder(lake.path, query, batch)
    if lake.state.has_batch(query, batch):
        clear(lake, query, batch)
        return None
    unique = hashlib.blake2b(f"{query}/{batch}".encode(), digest_size=6).hexdigest()
    placed: list[LakeFile] = []
    sources: dict[str, Path] = {}
    for file in (file for part in staged for file in part.files):
        name = f"{unique}-{len(placed)}" if not file.is_recorded else unique
        path = layout.frames_path(file.stream_id, file.epoch, file.lo, file.hi, name)
        placed.append(msgspec.structs.replace(file, path=path))
        sources[path] = folder / file.path
    placed, alone = with_gaps(placed, (gap for part in staged for gap in part.gaps))
    for (stream_id, epoch), gaps in alone.items():
        file, source = _write_gaps(folder, stream_id, epoch, gaps, is_durable)
        path = layout.frames_path(stream_id, epoch, file.lo, file.hi, unique)
        placed.append(msgspec.structs.replace(file, path=path))
        sources[path] = source
    try:
        lake.store.place(sources, is_durable=is_durable)
    except FileNotFoundError as error:
        if lake.state.has_batch(query, batch):
            return None  # another committer of the same batch was quicker
        raise LakeDamaged(str(error.filename), "this staged file is missing") from None

    def make(state: State) -> Change | None:
        if state.has_batch(query, batch):
            return None
        for file in placed:
            other = state.overlapping(file) if file.is_recorded else None
            if other is not None:
                raise LakeConflict(
                    f"frames {file.lo} to {file.hi - 1} of stream {file.stream_id}, epoch {file.epoch}, are in the "
                    f"lake already: {other.path} has {other.lo} to {other.hi - 1}; go on with the recording that wrote "
                    "it, or record to another lake"
                )
        return Change(tuple(placed))

    try:
        made = lake.append(kind, make, query=query, batch=batch)
    except LakeConflict:
        lake.store.remove(file.path for file in placed)
        raise
    clear(lake, query, batch)
    return made


def _write_gaps(
    folder: Path, stream_id: int, epoch: int, gaps: Sequence[Gap], is_durable: bool
) -> tuple[LakeFile, Path]:
    """Stage a file without frames, for gaps that no file of frames can tell of: the log keeps gaps with files."""
    from tensorpool.lake.file_policy import FilePolicy
    from tensorpool.lake.files import FrameFile  # loads Arrow

    at = min(gap.lo for gap in gaps)
    file = FrameFile(folder / f".{uuid.uuid4().hex}", FilePolicy(is_durable=is_durable))
    file.ids = stream_id, epoch
    path, footer = file.finish(
        at, at, tuple(gaps), lambda lo, hi: folder / f"gaps-{stream_id}-{epoch}-{uuid.uuid4().hex}"
    )
    return msgspec.structs.replace(footer.file, gaps=tuple(gaps)), path


def clear(lake: Lake, query: str, batch: int) -> None:
    """Remove the staging of a committed batch and of those before it."""
    folder = lake.path / layout.STAGING / query
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            if name.isdecimal() and int(name) <= batch:
                shutil.rmtree(folder / name, ignore_errors=True)


def discard(lake: Lake, query: str) -> None:
    """Remove the staging of a job that is over."""
    shutil.rmtree(lake.path / layout.STAGING / query, ignore_errors=True)


def collect(lake: Lake, older_than_s: float = COLLECT_AFTER_S) -> list[str]:
    """Remove what dead queries left behind; which. One with a checkpoint in the lake may come back and keeps it."""
    checkpoints = lake.path / layout.CHECKPOINTS
    living = {_query_of(path) for name in ("metadata", layout.DIRECT) for path in checkpoints.glob(f"*/{name}")}
    removed = []
    for folder in (lake.path / layout.STAGING).iterdir():
        if folder.name not in living and time.time() - _touched(folder) > older_than_s:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
    return removed


def _query_of(metadata: Path) -> str | None:
    try:
        found = json.loads(metadata.read_text())
    except (OSError, ValueError):
        return None
    return found.get("id") if isinstance(found, dict) else None


def _touched(folder: Path) -> float:
    times = [folder.stat().st_mtime]
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times)
