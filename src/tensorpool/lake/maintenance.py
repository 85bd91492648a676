# SPDX-License-Identifier: Apache-2.0
"""Keeping a lake in shape: compaction, retention, removal of files that no version names, and a check of everything.

Each is one commit. Files that leave the lake stay on disk for a grace period, for those who read an earlier state.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa

from tensorpool.lake import commits, layout
from tensorpool.lake.errors import LakeDamaged
from tensorpool.lake.file_policy import FilePolicy
from tensorpool.lake.files import WRITE_BYTES, FrameFile, read_footer
from tensorpool.lake.lake import Change, Lake, files_of, gaps_of
from tensorpool.lake.manifest import Gap, LakeFile, State, missing_inside, unexplained
from tensorpool.lake.table_log import now_ms

GRACE_S: Final = 3600.0
COMPACTED_BYTES: Final = 256 << 20
ORPHANED_AFTER_S: Final = 86_400.0
FORGET_AFTER_S: Final = 7 * 86_400.0


class Merge(msgspec.Struct, frozen=True):
    """Neighbours that become one file."""

    files: tuple[LakeFile, ...]


class Compacted(msgspec.Struct, frozen=True):
    """What a compaction did."""

    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int


class Removal(msgspec.Struct, frozen=True):
    """What a retention or a removal took away."""

    files: int = 0
    frames: int = 0
    bytes: int = 0


# --- compaction


def plan_merges(state: State, target_bytes: int = COMPACTED_BYTES) -> list[Merge]:
    """Runs of small neighbours, each about as large as a file should be."""
    merges: list[Merge] = []
    run: list[LakeFile] = []

    def end_run() -> None:
        if len(run) > 1:
            merges.append(Merge(tuple(run)))
        run.clear()

    for file in files_of(state):
        size = sum(other.bytes for other in run) + file.bytes
        if run and not (_is_next(state, run[-1], file) and size <= target_bytes):
            end_run()
        if 2 * file.bytes <= target_bytes or run:
            run.append(file)
    end_run()
    return merges


def _is_next(state: State, left: LakeFile, right: LakeFile) -> bool:
    if (left.stream_id, left.epoch, left.is_recorded) != (right.stream_id, right.epoch, right.is_recorded):
        return False
    if left.hi == right.lo or not left.is_recorded:
        return left.hi <= right.lo
    gaps = gaps_of(state, left.stream_id, left.epoch)
    return any(gap.lo <= left.hi and right.lo <= gap.hi for gap in gaps)


def compact(lake: Lake, *, codec: str = "zstd", target_bytes: int = COMPACTED_BYTES) -> Compacted:
    """Make few large files of many small ones, on as many threads as cores.

    Readers of the version before it are not disturbed, and the lake can be recorded to meanwhile.
    """
    merges = plan_merges(lake.state, target_bytes)
    if not merges:
        return Compacted(0, 0, 0, 0)
    job, policy = uuid.uuid4().hex, FilePolicy(codec, max_bytes=1 << 62, max_ns=1 << 62)
    try:
        with ThreadPoolExecutor(os.cpu_count(), "tensorpool-compact") as threads:
            made = list(threads.map(lambda merge: merge_files(lake, job, merge, policy), merges))
        return commit_merges(lake, job, list(zip(merges, made, strict=True)))
    finally:
        commits.discard(lake, job)


def merge_files(lake: Lake, job: str, merge: Merge, policy: FilePolicy) -> LakeFile:
    """Write the merged file to the staging directory. Its path is its name there."""
    folder = commits.staging_folder(lake.path, job, 0)
    first = merge.files[0]
    file = FrameFile(folder / f".{uuid.uuid4().hex}", policy)
    file.ids = first.stream_id, first.epoch
    lo, hi = min(part.lo for part in merge.files), max(part.hi for part in merge.files)
    gaps: tuple[Gap, ...] = tuple(gap for part in merge.files for gap in part.gaps)
    try:
        for batch in _rebatched(lake, merge.files):
            file.add(batch)
        name = layout.staged_name(first.stream_id, first.epoch, lo, hi)
        _, footer = file.finish(lo, hi, gaps, lambda lo, hi: folder / name, is_recorded=first.is_recorded)
    except BaseException:
        file.discard()
        raise
    written_ns = max(part.written_ns for part in merge.files)
    return msgspec.structs.replace(footer.file, path=name, written_ns=written_ns, gaps=gaps)


def _rebatched(lake: Lake, files: Iterable[LakeFile]) -> Iterator[pa.RecordBatch]:
    """The rows of files in batches that are neither small nor too large."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for part in files:
        for batch in lake.read_frames(part.path):
            if waiting and size + batch.nbytes > WRITE_BYTES:
                yield _joined(waiting)
                waiting, size = [], 0
            waiting.append(batch)
            size += batch.nbytes
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def commit_merges(lake: Lake, job: str, done: Sequence[tuple[Merge, LakeFile]]) -> Compacted:
    """Put merged files in the place of those that went into them, as far as these are still there."""
    unique = job[:12]
    folder = commits.staging_folder(lake.path, job, 0)
    placed: list[tuple[Merge, LakeFile]] = []
    sources: dict[str, Path] = {}
    for merge, file in done:
        path = layout.frames_path(file.stream_id, file.epoch, file.lo, file.hi, unique)
        sources[path] = folder / file.path
        placed.append((merge, msgspec.structs.replace(file, path=path)))
    lake.store.place(sources)
    kept: list[tuple[Merge, LakeFile]] = []

    def make(state: State) -> Change | None:
        kept[:] = [pair for pair in placed if all(part.path in state.files for part in pair[0].files)]
        if not kept:
            return None
        return Change(tuple(file for _, file in kept), tuple(part for merge, _ in kept for part in merge.files))

    lake.append("compact", make)
    used = {file.path for _, file in kept}
    lake.store.remove(path for path in sources if path not in used)
    before = [part for merge, _ in kept for part in merge.files]
    after = [file for _, file in kept]
    return Compacted(len(before), len(after), sum(file.bytes for file in before), sum(file.bytes for file in after))


# --- retention


def retain(
    lake: Lake, *, max_age_s: float | None = None, max_bytes: int | None = None, is_dry: bool = False
) -> Removal:
    """Let go of the oldest frames: those recorded longer ago than an age, and those beyond a size.

    By size, the newest file of every stream stays, however large it is. A dry run says what would go.
    """
    taken: list[LakeFile] = []

    def make(state: State) -> Change | None:
        taken[:] = _too_old(state, max_age_s) if max_age_s is not None else []
        if max_bytes is not None:
            taken[:] = _beyond(state, max_bytes, taken)
        return Change(removed=tuple(taken)) if taken else None

    if is_dry:
        make(lake.state)
    else:
        lake.append("retain", make)
        if max_age_s is not None:
            old = [file for file in lake.tables("qos") if _is_older(file.written_ns, max_age_s)]
            lake.remove_rows("qos", old)
    return Removal(len(taken), sum(file.frames for file in taken), sum(file.bytes for file in taken))


def _is_older(written_ns: int, age_s: float) -> bool:
    return written_ns < time.time_ns() - age_s * 1e9


def _too_old(state: State, max_age_s: float) -> list[LakeFile]:
    """From the front of every epoch, up to the first that is young enough."""
    found = []
    closed: set[tuple[int, int]] = set()
    for file in files_of(state):
        epoch = (file.stream_id, file.epoch)
        if epoch not in closed and _is_older(file.written_ns, max_age_s):
            found.append(file)
        else:
            closed.add(epoch)
    return found


def _beyond(state: State, max_bytes: int, taken: Sequence[LakeFile]) -> list[LakeFile]:
    found = list(taken)
    gone = {file.path for file in taken}
    left = sorted(
        (file for file in state.files.values() if file.path not in gone), key=lambda file: (file.written_ns, file.key)
    )
    size = sum(file.bytes for file in left)
    newest = {file.stream_id: file.path for file in left if file.frames}
    for file in left:
        if size <= max_bytes:
            break
        if newest.get(file.stream_id) != file.path:
            found.append(file)
            size -= file.bytes
    return found


# --- files that no version names any more


def remove_unused(lake: Lake, *, grace_s: float = GRACE_S, is_dry: bool = False) -> Removal:
    """Delete files that left the lake longer ago than the grace period, orphans, and leftovers of dead queries.

    Log entries older than a week go too, as far as a checkpoint covers them. A dry run says what would go.
    """
    before_ms = now_ms() - round(grace_s * 1000)
    names = [*_left_before(lake, before_ms), *orphans(lake, ORPHANED_AFTER_S)]
    sizes = {name: size for name in names if (size := lake.store.size(name)) is not None}
    if not is_dry:
        lake.store.remove(sizes)
    if not is_dry:
        commits.collect(lake)
        for log in (lake.log, *(lake.table_log(table) for table in layout.SIDE_TABLES)):
            if log.exists():
                log.forget_before(now_ms() - round(FORGET_AFTER_S * 1000))
    return Removal(len(sizes), 0, sum(sizes.values()))


def _left_before(lake: Lake, time_ms: int) -> Iterator[str]:
    """Files that the lake or a table beside it had, and let go of before a moment."""
    for folder, log in (
        ("", lake.log),
        *((f"{layout.table_folder(table)}/", lake.table_log(table)) for table in layout.SIDE_TABLES),
    ):
        if log.exists():
            for gone in list(log.snapshot().removed.values()):
                if (gone.deletion_timestamp or 0) <= time_ms:
                    yield folder + gone.path


def orphans(lake: Lake, older_than_s: float) -> list[str]:
    """Files in the places of frames that no commit ever named: their committer died and never came back."""
    state = lake.state
    before_s = time.time() - older_than_s
    return [
        name
        for stream in lake.store.folders("stream_id=")
        for name, changed_s in lake.store.walk(stream)
        if changed_s < before_s and name not in state.files and name not in state.removed
    ]


# --- a check of everything


def verify(lake: Lake, *, is_deep: bool = False) -> list[str]:
    """What is wrong, in words; nothing where all is well. A deep check reads every byte."""
    state = lake.state
    problems = [
        f"stream {hole.stream_id}, epoch {hole.epoch}: nothing explains frames {hole.lo} to {hole.hi - 1}"
        for hole in unexplained(state.files.values(), gaps_of(state))
    ]
    for file in files_of(state):
        problems += _problems_of(lake, state, file, is_deep)
    for file_of_table in (file for table in layout.SIDE_TABLES for file in lake.tables(table)):
        try:
            lake.open_parquet(file_of_table.path).close()
        except LakeDamaged as damage:
            problems.append(str(damage))
    return problems


def _problems_of(lake: Lake, state: State, file: LakeFile, is_deep: bool) -> list[str]:
    path = f"{lake.uri}/{file.path}"
    try:
        said = read_footer(path, lake.source(file.path)).file
        rows = sum(batch.num_rows for batch in lake.read_frames(file.path)) if is_deep else said.frames
    except LakeDamaged as damage:
        return [str(damage)]
    found = []
    if (said.stream_id, said.epoch, said.lo, said.hi, rows) != (
        file.stream_id, file.epoch, file.lo, file.hi, file.frames,
    ):  # fmt: skip
        found.append(f"{path}: {rows} frames {said.lo} to {said.hi}, where the log has {file.frames}")
    missing = missing_inside(file, gaps_of(state, file.stream_id, file.epoch)) if file.is_recorded else 0
    if missing:
        found.append(f"{path}: {missing} of its frames are neither there nor in a gap")
    return found
