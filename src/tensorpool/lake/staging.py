# SPDX-License-Identifier: Apache-2.0
"""What tasks do for a batch: read ranges from shared memory, and stage them as files.

A task stages a file under the range that it accounts for; the first to do so wins. When a batch comes again, because
a process was killed before its commit, what is staged is taken as it is: the ring may have moved on since.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa

from tensorpool.lake import layout, ring_reader
from tensorpool.lake.commits import Staged, staging_folder
from tensorpool.lake.errors import LakeDamaged
from tensorpool.lake.file_policy import FilePolicy
from tensorpool.lake.files import WRITE_BYTES, Footer, FrameFile, read_footer, read_frames
from tensorpool.lake.manifest import Gap, LakeFile
from tensorpool.lake.offsets import SeqRange
from tensorpool.lake.ring_reader import FrameReader, RingPart
from tensorpool.lake.selection import Bounds, Selection

GONE: Final = "EPOCH_GONE"  # the ring was not there any more


class Staging:
    """The staging directory of one batch of one query."""

    def __init__(self, root: Path, query: str, batch: int) -> None:
        self.folder: Final = staging_folder(root, query, batch)

    def stage(self, part: RingPart | None, span: SeqRange, policy: FilePolicy) -> Staged:
        """Account for a range: adopt what is staged already, and read the rest from the ring.

        `part` is None where the planner does not know the ring any more.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        files: list[LakeFile] = []
        gaps: list[Gap] = []
        at = span.lo
        found = self._found(span)
        for footer in found:
            file = footer.file
            if file.lo < at or file.hi > span.hi:
                continue
            files.append(file)
            gaps += footer.gaps
            self._fill(part, msgspec.structs.replace(span, lo=at, hi=file.lo), policy, found, files, gaps)
            at = file.hi
        self._fill(part, msgspec.structs.replace(span, lo=at), policy, found, files, gaps)
        return Staged(tuple(files), tuple(gaps))

    def _found(self, span: SeqRange) -> list[Footer]:
        """What is staged of a range. A torn file, left by a crash of the machine, is removed."""
        found = []
        for name in os.listdir(self.folder):
            entry = layout.staged_entry(name)
            if entry is None or entry[:2] != (span.stream_id, span.epoch) or entry[2] >= span.hi or entry[3] <= span.lo:
                continue
            try:
                footer = read_footer(self.folder / name)
            except LakeDamaged:
                (self.folder / name).unlink(missing_ok=True)
                continue
            found.append(msgspec.structs.replace(footer, file=msgspec.structs.replace(footer.file, path=name)))
        return sorted(found, key=lambda footer: footer.file.key)

    def _fill(
        self,
        part: RingPart | None,
        span: SeqRange,
        policy: FilePolicy,
        found: Sequence[Footer],
        files: list[LakeFile],
        gaps: list[Gap],
    ) -> None:
        """Stage a range of which no whole file is there: from files that were cut otherwise, then from the ring."""
        at = span.lo
        for footer in found:
            lo, hi = max(footer.file.lo, at), min(footer.file.hi, span.hi)
            if lo >= hi or (span.lo <= footer.file.lo and footer.file.hi <= span.hi):
                continue
            self._read(part, msgspec.structs.replace(span, lo=at, hi=lo), policy, files, gaps)
            rows = read_frames(self.folder / footer.file.path, wanted=Selection(seq=Bounds(lo, hi - 1)))
            self._write(msgspec.structs.replace(span, lo=lo, hi=hi), rows, footer.gaps, policy, files, gaps)
            at = hi
        self._read(part, msgspec.structs.replace(span, lo=at), policy, files, gaps)

    def _read(
        self, part: RingPart | None, span: SeqRange, policy: FilePolicy, files: list[LakeFile], gaps: list[Gap]
    ) -> None:
        if span.frames <= 0:
            return
        if part is None:
            gaps.append(Gap(span.stream_id, span.epoch, span.lo, span.hi, GONE))
            return
        lost_before = part.lost_before if span.lo == part.range.lo else 0
        part = msgspec.structs.replace(part, range=span, lost_before=lost_before)
        reader = FrameReader(part, batch_bytes=WRITE_BYTES, reuses=True)
        self._write(span, reader.batches(), reader.gaps, policy, files, gaps)

    def _write(
        self,
        span: SeqRange,
        batches: Iterator[pa.RecordBatch],
        missing: Sequence[Gap | ring_reader.Gap],
        policy: FilePolicy,
        files: list[LakeFile],
        gaps: list[Gap],
    ) -> None:
        """Write what comes as files that account for the whole range. `missing` grows meanwhile.

        A cut lies right behind a frame, so that no gap is in two files.
        """
        lo = span.lo
        file: FrameFile | None = None

        def finish(whole: FrameFile, hi: int) -> None:
            inside = tuple(_within(missing, lo, hi))
            path, footer = whole.finish(lo, hi, inside, lambda lo, hi: self._path(span, lo, hi))
            files.append(msgspec.structs.replace(footer.file, path=path.name))
            gaps.extend(footer.gaps)  # of the file that is there, which may be another task's

        try:
            for batch in batches:
                if batch.num_rows == 0:
                    continue
                if file is not None and file.is_full:
                    assert file.last_seq is not None
                    finish(file, file.last_seq + 1)
                    lo, file = file.last_seq + 1, None
                if file is None:
                    file = FrameFile(self.folder / f".{uuid.uuid4().hex}", policy)
                file.add(batch)
            if file is None:
                gaps += _within(missing, span.lo, span.hi)
            else:
                finish(file, span.hi)
                file = None
        finally:
            if file is not None:
                file.discard()

    def _path(self, span: SeqRange, lo: int, hi: int) -> Path:
        return self.folder / layout.staged_name(span.stream_id, span.epoch, lo, hi)


def _within(gaps: Iterable[Gap | ring_reader.Gap], lo: int, hi: int) -> list[Gap]:
    clipped = [Gap(gap.stream_id, gap.epoch, max(gap.lo, lo), min(gap.hi, hi), gap.reason) for gap in gaps]
    return [gap for gap in clipped if gap.lo < gap.hi]
