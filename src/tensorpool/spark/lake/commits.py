# SPDX-License-Identifier: Apache-2.0
"""Staged files become part of a lake, all of a batch at once and once only; what is left over is collected.

A commit links the staged files to their places and adds one entry to the manifest. Whatever interrupts it, it can be
done again: the staged files stay until the entry is there, and a batch that the manifest has is not added twice.
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

from tensorpool.spark.lake import layout
from tensorpool.spark.lake.errors import LakeConflict, LakeDamaged
from tensorpool.spark.lake.lake import Lake
from tensorpool.spark.lake.manifest import Commit, Gap, Kind, LakeFile, State
from tensorpool.spark.lake.store import sync_directory

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
    for file in (file for part in staged for file in part.files):
        name = f"{unique}-{len(placed)}" if not file.is_recorded else unique
        path = layout.frames_path(file.stream_id, file.epoch, file.lo, file.hi, name)
        placed.append(msgspec.structs.replace(file, path=path))
        try:
            _place(folder / file.path, lake.path / path)
        except FileNotFoundError:
            if lake.state.has_batch(query, batch):
                return None  # another committer of the same batch was quicker
            raise LakeDamaged(str(folder / file.path), "this staged file is missing") from None
    if is_durable:
        for parent in {(lake.path / file.path).parent for file in placed}:
            sync_directory(parent)
            sync_directory(parent.parent)
    gaps = tuple(gap for part in staged for gap in part.gaps)

    def make(state: State) -> Commit | None:
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
        return Commit(kind=kind, query=query, batch=batch, added=tuple(placed), gaps=gaps)

    try:
        made = lake.store.append(make)
    except LakeConflict:
        for file in placed:
            (lake.path / file.path).unlink(missing_ok=True)
        raise
    clear(lake, query, batch)
    return made


def _place(source: Path, target: Path) -> None:
    """Link a staged file to its place. What is there from an earlier try is the same file, or of no worth."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileExistsError:
        if not os.path.samefile(source, target):
            draft = target.with_name(f".{uuid.uuid4().hex}")
            os.link(source, draft)
            os.replace(draft, target)


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
    living = {_query_of(path) for name in ("metadata", layout.TAIL) for path in checkpoints.glob(f"*/{name}")}
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
