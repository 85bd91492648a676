# SPDX-License-Identifier: Apache-2.0
"""Keeps a lake in shape beside its recording: merges the small files of commits, and lets go of old frames.

A recorder commits every second or so, and a commit has at least one file for every stream. This thread makes large
files of them, in tiers: sixteen files of about one size become one of the next. So a frame is written again a few
times at most, and at any time a stream has some tens of small files, however long it is recorded.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from tensorpool.errors import TensorPoolError
from tensorpool.lake import commits, maintenance
from tensorpool.lake.file_policy import FilePolicy
from tensorpool.lake.lake import Lake
from tensorpool.lake.maintenance import Merge
from tensorpool.lake.manifest import LakeFile
from tensorpool.logs import get_logger

FILES_PER_MERGE: Final = 16
SMALLEST_TIER_BYTES: Final = 64 << 10  # files up to this size are of the lowest tier
LOOK_EVERY_S: Final = 5.0
TRIM_EVERY_S: Final = 60.0
CLEAN_EVERY_S: Final = 600.0  # looks at every file of the lake
GRACE_S: Final = 600.0  # that files which left the lake stay on disk for those who read an earlier version
NICENESS: Final = 10


class UpkeepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do beside a recording."""

    policy: FilePolicy  # how large merged files become
    merges: bool = True
    max_age_s: float | None = None  # of frames; None: they stay
    max_bytes: int | None = None  # of the lake


def due_merges(files: Iterable[LakeFile], policy: FilePolicy) -> list[Merge]:
    """Neighbours that are to become one file now: a tier is merged once it has sixteen files in a row.

    `files` are sorted by stream, epoch and seq.
    """
    return [
        merge
        for run in _runs(files, policy)
        for part in _full_tiers(run)
        for merge in _within(part, policy)
        if len(merge.files) > 1
    ]


def _runs(files: Iterable[LakeFile], policy: FilePolicy) -> Iterator[list[LakeFile]]:
    """Small files that follow each other without a hole."""
    run: list[LakeFile] = []
    for file in files:
        is_small = 2 * file.bytes <= policy.max_bytes and 2 * _span_ns([file]) <= policy.max_ns
        if run and not (is_small and _is_next(run[-1], file)):
            yield run
            run = []
        if is_small and file.is_recorded:
            run.append(file)
    if run:
        yield run


def _is_next(left: LakeFile, right: LakeFile) -> bool:
    """Whether a file begins where another ends, or behind a gap there."""
    if (left.stream_id, left.epoch) != (right.stream_id, right.epoch):
        return False
    gaps = (*left.gaps, *right.gaps)
    return left.hi == right.lo or any(gap.lo <= left.hi and right.lo <= gap.hi for gap in gaps)


def _full_tiers(run: Sequence[LakeFile]) -> Iterator[list[LakeFile]]:
    """The parts of a run of which nothing is larger than their tier, and enough is of it; the lowest full tier only."""
    for tier in range(max(map(_tier, run)) + 1):
        parts: list[list[LakeFile]] = [[]]
        for file in run:
            if _tier(file) <= tier:
                parts[-1].append(file)
            else:
                parts.append([])
        full = [part for part in parts if sum(_tier(file) == tier for file in part) >= FILES_PER_MERGE]
        if full:
            yield from full
            return


def _tier(file: LakeFile) -> int:
    tier, bound = 0, SMALLEST_TIER_BYTES
    while file.bytes > bound:
        tier, bound = tier + 1, bound * FILES_PER_MERGE
    return tier


def _within(files: Sequence[LakeFile], policy: FilePolicy) -> Iterator[Merge]:
    """As few merges as there can be that are not larger, and do not last longer, than a file may."""
    chosen: list[LakeFile] = []
    for file in files:
        more = [*chosen, file]
        if chosen and (sum(one.bytes for one in more) > policy.max_bytes or _span_ns(more) > policy.max_ns):
            yield Merge(tuple(chosen))
            more = [file]
        chosen = more
    yield Merge(tuple(chosen))


def _span_ns(files: Sequence[LakeFile]) -> int:
    first, last = files[0].first_timestamp_ns, files[-1].last_timestamp_ns
    return 0 if first is None or last is None else last - first


def merge(lake: Lake, merges: Sequence[Merge], policy: FilePolicy) -> maintenance.Compacted:
    """Write merged files, and commit them in the place of those that went into them."""
    job = uuid.uuid4().hex
    whole = msgspec.structs.replace(policy, max_bytes=1 << 62, max_ns=1 << 62)
    try:
        done = [(one, maintenance.merge_files(lake, job, one, whole)) for one in merges]
        return maintenance.commit_merges(lake, job, done)
    finally:
        commits.discard(lake, job)


class Upkeep:
    """The thread. What fails is logged and tried again: the recording itself is not disturbed."""

    def __init__(self, lake: Lake, plan: UpkeepPlan) -> None:
        self._place = lake.uri
        self._plan = plan
        self._log = get_logger("upkeep", lake=lake.uri)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tensorpool-upkeep", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Once what it is at is done."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # recording comes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        lake = Lake.open(self._place)
        trim_s, clean_s = time.monotonic() + TRIM_EVERY_S, time.monotonic() + CLEAN_EVERY_S
        while not self._is_over.wait(LOOK_EVERY_S):
            try:
                if self._plan.merges:
                    self._merge(lake)
                if time.monotonic() >= trim_s:
                    trim_s = time.monotonic() + TRIM_EVERY_S
                    self._trim(lake)
                if time.monotonic() >= clean_s:
                    clean_s = time.monotonic() + CLEAN_EVERY_S
                    maintenance.remove_unused(lake, grace_s=GRACE_S)
            except (TensorPoolError, OSError) as error:
                self._log.warning("upkeep_failed", error=str(error))

    def _merge(self, lake: Lake) -> None:
        """One merge at a time, so that the end of the recording does not wait for all of them."""
        for one in due_merges(lake.files(), self._plan.policy):
            if self._is_over.is_set():
                return
            merge(lake, [one], self._plan.policy)

    def _trim(self, lake: Lake) -> None:
        plan = self._plan
        if plan.max_age_s is not None or plan.max_bytes is not None:
            removed = maintenance.retain(lake, max_age_s=plan.max_age_s, max_bytes=plan.max_bytes)
            if removed.files:
                self._log.info("frames_removed", files=removed.files, frames=removed.frames, bytes=removed.bytes)
