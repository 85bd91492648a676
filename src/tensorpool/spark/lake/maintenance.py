# SPDX-License-Identifier: Apache-2.0
"""Keeping a lake in shape: compaction, retention, removal of what nobody needs, and a check of everything.

Each is one commit. Files that leave the lake stay on disk for a grace period, for those who read an earlier state.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa

from tensorpool.spark.lake import commits, layout
from tensorpool.spark.lake.cut import Cut
from tensorpool.spark.lake.errors import LakeDamaged
from tensorpool.spark.lake.files import ROW_GROUP_BYTES, FrameFile, read_footer, read_frames
from tensorpool.spark.lake.lake import Lake, files_of, gaps_of
from tensorpool.spark.lake.manifest import Commit, Gap, LakeFile, State, missing_inside, unexplained
from tensorpool.spark.lake.store import sync_directory
from tensorpool.spark.offsets import MAX_SEQ

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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


def compact(spark: SparkSession, lake: Lake, *, codec: str = "zstd", target_bytes: int = COMPACTED_BYTES) -> Compacted:
    """Make few large files of many small ones, in parallel. Readers of the state before it are not disturbed."""
    state = lake.state
    merges = plan_merges(state, target_bytes)
    if not merges:
        return Compacted(0, 0, 0, 0)
    job = uuid.uuid4().hex
    root, cut = str(lake.path), Cut(codec, max_bytes=1 << 62, max_ns=1 << 62)

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for row in batch.to_pylist():
                merge = msgspec.msgpack.decode(row["merge"], type=Merge)
                made = msgspec.msgpack.encode(merge_files(Path(root), job, merge, cut))
                yield pa.RecordBatch.from_pydict({"merge": [row["merge"]], "made": [made]})

    tasks = spark.createDataFrame([(msgspec.msgpack.encode(merge),) for merge in merges], "merge BINARY")
    rows = tasks.repartition(len(merges)).mapInArrow(work, "merge BINARY, made BINARY").collect()
    done = [
        (msgspec.msgpack.decode(bytes(row.merge), type=Merge), msgspec.msgpack.decode(bytes(row.made), type=LakeFile))
        for row in rows
    ]
    try:
        return commit_merges(lake, job, done)
    finally:
        commits.discard(lake, job)


def merge_files(root: Path, job: str, merge: Merge, cut: Cut) -> LakeFile:
    """In a task: write the merged file to the staging directory. Its path is its name there."""
    folder = commits.staging_folder(root, job, 0)
    first, last = merge.files[0], merge.files[-1]
    file = FrameFile(folder / f".{uuid.uuid4().hex}", cut)
    gaps: list[Gap] = []
    try:
        for batch in _rebatched(root, merge.files):
            file.add(batch)
        for part in merge.files:
            gaps += read_footer(root / part.path).gaps
        name = layout.staged_name(first.stream_id, first.epoch, first.lo, last.hi)
        _, footer = file.finish(
            first.lo, last.hi, tuple(gaps), lambda lo, hi: folder / name, is_recorded=first.is_recorded
        )
    except BaseException:
        file.discard()
        raise
    written_ns = max(part.written_ns for part in merge.files)
    return msgspec.structs.replace(footer.file, path=name, written_ns=written_ns)


def _rebatched(root: Path, files: Iterable[LakeFile]) -> Iterator[pa.RecordBatch]:
    """The rows of files in row groups that are neither small nor too large."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for part in files:
        for batch in read_frames(root / part.path):
            if waiting and size + batch.nbytes > ROW_GROUP_BYTES:
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
    for merge, file in done:
        path = layout.frames_path(file.stream_id, file.epoch, file.lo, file.hi, unique)
        target = lake.path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(folder / file.path, target)
        sync_directory(target.parent)
        placed.append((merge, msgspec.structs.replace(file, path=path)))
    kept: list[tuple[Merge, LakeFile]] = []

    def make(state: State) -> Commit | None:
        kept[:] = [pair for pair in placed if all(part.path in state.files for part in pair[0].files)]
        if not kept:
            return None
        removed = tuple(part.path for merge, _ in kept for part in merge.files)
        return Commit(kind="compact", added=tuple(file for _, file in kept), removed=removed)

    lake.store.append(make)
    for _, file in placed:
        if file not in [other for _, other in kept]:
            (lake.path / file.path).unlink(missing_ok=True)
    before = [part for merge, _ in kept for part in merge.files]
    after = [file for _, file in kept]
    return Compacted(len(before), len(after), sum(file.bytes for file in before), sum(file.bytes for file in after))


# --- retention


def retain(lake: Lake, *, max_age_s: float | None = None, max_bytes: int | None = None) -> Removal:
    """Let go of the oldest frames: those recorded longer ago than an age, and whatever is beyond a size."""
    taken: list[LakeFile] = []

    def make(state: State) -> Commit | None:
        taken[:] = _too_old(state, max_age_s) if max_age_s is not None else []
        if max_bytes is not None:
            taken[:] = _beyond(state, max_bytes, taken)
        tables = [
            file.path
            for file in state.tables.values()
            if max_age_s is not None and file.table == "qos" and _is_older(file.written_ns, max_age_s)
        ]
        if not taken and not tables:
            return None
        return Commit(kind="retain", removed=(*(file.path for file in taken), *tables), gaps=_spans(state, taken))

    lake.store.append(make)
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
    left = [file for file in state.files.values() if file.path not in gone]
    size = sum(file.bytes for file in left)
    for file in sorted(left, key=lambda file: (file.written_ns, file.key)):
        if size <= max_bytes:
            break
        found.append(file)
        size -= file.bytes
    return found


def _spans(state: State, taken: Sequence[LakeFile]) -> tuple[Gap, ...]:
    """What is told of no more: every epoch from its front up to the last file that goes, or all of it."""
    gone = {file.path for file in taken}
    ends: dict[tuple[int, int], int] = {}
    for file in taken:
        epoch = (file.stream_id, file.epoch)
        ends[epoch] = max(file.hi, ends.get(epoch, 0))
    for file in state.files.values():
        epoch = (file.stream_id, file.epoch)
        if epoch in ends and file.path not in gone:
            ends[epoch] = min(ends[epoch], file.lo)
    left = {(file.stream_id, file.epoch) for file in state.files.values() if file.path not in gone}
    return tuple(
        Gap(stream_id, epoch, 0, hi if (stream_id, epoch) in left else MAX_SEQ, "RETAINED")
        for (stream_id, epoch), hi in sorted(ends.items())
    )


# --- what nobody needs any more


def remove_unused(lake: Lake, *, grace_s: float = GRACE_S) -> Removal:
    """Delete files that left the lake longer ago than the grace period, orphans, and leftovers of dead queries."""
    now_ns = time.time_ns()
    old = [gone for gone in lake.state.removed.values() if gone.time_ns < now_ns - grace_s * 1e9]
    count = size = 0
    for gone in old:
        with contextlib.suppress(FileNotFoundError):
            path = lake.full_path(gone.path)
            size += path.stat().st_size
            path.unlink()
            count += 1
    if old:
        lake.store.append(lambda state: _deletion(state, [gone.path for gone in old]))
    for path in orphans(lake, ORPHANED_AFTER_S):
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
            path.unlink()
            count += 1
    commits.collect(lake)
    lake.store.forget_before(now_ns - round(FORGET_AFTER_S * 1e9))
    return Removal(count, 0, size)


def _deletion(state: State, paths: Sequence[str]) -> Commit | None:
    known = tuple(path for path in paths if path in state.removed)
    return Commit(kind="delete", deleted=known) if known else None


def orphans(lake: Lake, older_than_s: float) -> list[Path]:
    """Files in the places of frames that no commit ever named: their committer died and never came back."""
    state = lake.state
    found = []
    for path in lake.path.glob("stream_id=*/epoch=*/*"):
        name = str(path.relative_to(lake.path))
        if name not in state.files and name not in state.removed:
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_ctime > older_than_s:  # a link is a change
                    found.append(path)
    return found


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
    for table in state.tables.values():
        try:
            lake.open_parquet(table.path).close()
        except LakeDamaged as damage:
            problems.append(str(damage))
    return problems


def _problems_of(lake: Lake, state: State, file: LakeFile, is_deep: bool) -> list[str]:
    path = lake.full_path(file.path)
    try:
        said = read_footer(path).file
        rows = sum(batch.num_rows for batch in read_frames(path)) if is_deep else said.frames
    except LakeDamaged as damage:
        return [str(damage)]
    found = []
    if (said.stream_id, said.epoch, said.lo, said.hi, rows) != (
        file.stream_id, file.epoch, file.lo, file.hi, file.frames,
    ):  # fmt: skip
        found.append(f"{path}: {rows} frames {said.lo} to {said.hi}, where the manifest has {file.frames}")
    missing = missing_inside(file, gaps_of(state, file.stream_id, file.epoch)) if file.is_recorded else 0
    if missing:
        found.append(f"{path}: {missing} of its frames are neither there nor in a gap")
    return found
