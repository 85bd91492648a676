# SPDX-License-Identifier: Apache-2.0
"""What a lake holds, as the sum of its commits. Holds no clock and does no IO.

A commit says which files came and which went. `State.apply` adds one commit to what the earlier ones said; a state that
was written down saves reading them all again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from tensorpool.spark.offsets import SeqRange

# Reasons of gaps whose `hi` equals `lo`, because nobody knows how many frames they are, if any.
UNKNOWN_TAIL: Final = "UNKNOWN_TAIL"  # nobody saw where the epoch ended
UNSEEN_EPOCHS: Final = "UNSEEN_EPOCHS"  # epochs from this one on came and went between two batches

type Kind = Literal["record", "write", "tables", "compact", "retain", "delete"]


class Gap(msgspec.Struct, frozen=True):
    """Frames that are missing: `lo` up to, not including, `hi`."""

    stream_id: int
    epoch: int
    lo: int
    hi: int
    reason: str


class LakeFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file of frames of one epoch, sorted by seq.

    A recorded file accounts for every seq from `lo` up to, not including, `hi`: it is there, or in a gap. Of one that
    was written from rows only the bounds are known.
    """

    path: str  # relative to the lake
    stream_id: int
    epoch: int
    lo: int
    hi: int
    frames: int
    bytes: int  # of the file
    first_timestamp_ns: int | None = None
    last_timestamp_ns: int | None = None
    payload_bytes: int = 0
    is_recorded: bool = True
    commit: int = 0  # the one that brought it
    written_ns: int = 0  # wall clock

    @property
    def key(self) -> tuple[int, int, int, int, str]:
        return self.stream_id, self.epoch, self.lo, self.hi, self.path


class TableFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file of rows of another table: metadata, qos."""

    path: str
    table: str
    rows: int
    bytes: int
    commit: int = 0
    written_ns: int = 0


class Commit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of a lake. `query` and `batch` say whose doing it was, where a batch can come again."""

    number: int = 0
    kind: Kind
    time_ns: int = 0  # wall clock
    query: str = ""
    batch: int = -1
    added: tuple[LakeFile, ...] = ()
    removed: tuple[str, ...] = ()
    gaps: tuple[Gap, ...] = ()  # of a retention: the spans that are told of no more
    tables: tuple[TableFile, ...] = ()
    deleted: tuple[str, ...] = ()  # files that were removed earlier, and are not on disk any more


class Removed(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file that is part of the lake no more; readers of an earlier state may still need it."""

    path: str
    commit: int
    time_ns: int


class State(msgspec.Struct):
    """Everything that the commits up to `number` add up to."""

    number: int = 0
    files: dict[str, LakeFile] = {}
    tables: dict[str, TableFile] = {}
    gaps: dict[str, list[Gap]] = {}  # by stream and epoch
    ends: dict[str, int] = {}  # by stream and epoch: beyond what was ever recorded
    batches: dict[str, int] = {}  # by query: the last batch that was committed
    removed: dict[str, Removed] = {}  # files that may still be on disk

    def apply(self, commit: Commit) -> None:
        """Add the next commit."""
        assert commit.number == self.number + 1
        for path in commit.removed:
            self.files.pop(path, None)
            self.tables.pop(path, None)
            self.removed[path] = Removed(path, commit.number, commit.time_ns)
        for path in commit.deleted:
            self.removed.pop(path, None)
        for file in commit.added:
            written_ns = file.written_ns or commit.time_ns  # what was compacted is as old as what went into it
            self.files[file.path] = msgspec.structs.replace(file, commit=commit.number, written_ns=written_ns)
            if file.is_recorded:
                epoch = epoch_key(file.stream_id, file.epoch)
                self.ends[epoch] = max(file.hi, self.ends.get(epoch, 0))
        for table in commit.tables:
            self.tables[table.path] = msgspec.structs.replace(table, commit=commit.number, written_ns=commit.time_ns)
        told: dict[str, list[Gap]] = {}
        for gap in commit.gaps:
            told.setdefault(epoch_key(gap.stream_id, gap.epoch), []).append(gap)
        for epoch, gaps in told.items():
            known = self.gaps.get(epoch, [])
            self.gaps[epoch] = forgotten(known, gaps) if commit.kind == "retain" else merged(known, gaps)
        if commit.query:
            self.batches[commit.query] = max(commit.batch, self.batches.get(commit.query, -1))
        self.number = commit.number

    def has_batch(self, query: str, batch: int) -> bool:
        return self.batches.get(query, -1) >= batch

    def overlapping(self, file: LakeFile) -> LakeFile | None:
        """A recorded file that has some of the same frames."""
        if file.lo >= self.ends.get(epoch_key(file.stream_id, file.epoch), 0):
            return None  # the usual case: recordings go forward
        for other in self.files.values():
            is_same = other.stream_id == file.stream_id and other.epoch == file.epoch
            if is_same and other.is_recorded and other.lo < file.hi and file.lo < other.hi:
                return other
        return None


def epoch_key(stream_id: int, epoch: int) -> str:
    return f"{stream_id}/{epoch}"


def forgotten(gaps: Iterable[Gap], spans: Iterable[Gap]) -> list[Gap]:
    """What is left of gaps when nothing is told any more of what lies inside the spans."""
    left = list(gaps)
    for span in spans:
        cut: list[Gap] = []
        for gap in left:
            if gap.hi <= span.lo or gap.lo >= span.hi:
                if not span.lo <= gap.lo == gap.hi <= span.hi:
                    cut.append(gap)
                continue
            if gap.lo < span.lo:
                cut.append(msgspec.structs.replace(gap, hi=span.lo))
            if gap.hi > span.hi:
                cut.append(msgspec.structs.replace(gap, lo=span.hi))
        left = cut
    return left


def merged(gaps: Iterable[Gap], more: Iterable[Gap] = ()) -> list[Gap]:
    """Sorted, neighbours of the same reason made one, nothing twice."""
    found: list[Gap] = []
    for gap in sorted({*gaps, *more}, key=msgspec.structs.astuple):
        last = found[-1] if found else None
        is_next = (
            last is not None
            and (last.stream_id, last.epoch, last.hi, last.reason) == (gap.stream_id, gap.epoch, gap.lo, gap.reason)
            and gap.hi > gap.lo
        )
        if last is not None and is_next and last.hi > last.lo:
            found[-1] = msgspec.structs.replace(last, hi=gap.hi)
        else:
            found.append(gap)
    return found


def unexplained(files: Iterable[LakeFile], gaps: Iterable[Gap]) -> list[SeqRange]:
    """What no recorded file and no gap accounts for, between the first and the last seq of every epoch."""
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for file in files:
        if file.is_recorded:
            spans.setdefault((file.stream_id, file.epoch), []).append((file.lo, file.hi))
    for gap in gaps:
        spans.setdefault((gap.stream_id, gap.epoch), []).append((gap.lo, gap.hi))
    holes = []
    for (stream_id, epoch), parts in sorted(spans.items()):
        parts.sort()
        end = parts[0][0]
        for lo, hi in parts:
            if lo > end:
                holes.append(SeqRange(stream_id, epoch, end, lo))
            end = max(end, hi)
    return holes


def missing_inside(file: LakeFile, gaps: Iterable[Gap]) -> int:
    """How many seqs of a recorded file neither it nor a gap has; below 0: more gaps than there is room for."""
    told = sum(max(0, min(gap.hi, file.hi) - max(gap.lo, file.lo)) for gap in gaps)
    return file.hi - file.lo - file.frames - told
