# SPDX-License-Identifier: Apache-2.0
"""Follows rings as they fill and commits what it reads, without Spark.

    rings ──copied as they fill──► batches of 16 MiB ──► threads that compress and write ──► commits in order

A ring needs to last only as long as the process may be held up, not several micro-batches. What is committed, and what
a killed process leaves behind, is the same as with Spark. A follower that takes over adopts what is staged, continues
where the lake ends, and what the rings lost meanwhile is a gap.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, Self

import msgspec
import numpy as np
import pyarrow as pa

from tensorpool.lake import commits, layout, offsets
from tensorpool.lake.commits import Staged
from tensorpool.lake.errors import LakeConflict
from tensorpool.lake.file_policy import FilePolicy
from tensorpool.lake.files import WRITE_BYTES
from tensorpool.lake.lake import Lake
from tensorpool.lake.live_options import LiveOptions
from tensorpool.lake.losses import refuse
from tensorpool.lake.manifest import Gap, State
from tensorpool.lake.offsets import Limits, Loss, Offsets, Position, SeqRange
from tensorpool.lake.query_planner import Planner
from tensorpool.lake.ring_reader import Builder, Bytes
from tensorpool.lake.row_staging import gap_of
from tensorpool.lake.staging import GONE, Staging
from tensorpool.lake.writer_threads import Draft, WriterThread

WRITERS: Final = 2
STEP_BYTES: Final = 64 << 20  # that are read without a look at anything else
COMMITS_WAITING: Final = 4
NAP_S, LONGEST_NAP_S = 0.002, 0.02


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to follow, and how."""

    recording: str
    query: str  # under which it commits
    options: LiveOptions  # the streams, and where a new recording begins
    policy: FilePolicy
    commit_s: float


class RingFollower:
    """Follows the streams of a plan. One recording has one follower at a time: the recorder's lock sees to it."""

    def __init__(self, lake: Lake, plan: Plan) -> None:
        self._plan = plan
        self._lake = lake
        self._planner = Planner(plan.options)
        self._writers = [WriterThread(f"writer-{number}") for number in range(WRITERS)]
        self._committer = WriterThread("commits")
        self._memory: list[Bytes] = []
        self._sources: dict[int, _Source] = {}
        self._batch = self._lake.state.last_batch(plan.query) + 1
        self._generation = _Generation(self._batch)
        self._at = Offsets()
        self._roll_s = 0.0
        self.frames = 0

    def run(self, target: Callable[[], Offsets | None]) -> None:
        """Until everything up to `target` is committed; it is asked again and again while it says None.

        Offsets without a stream mean: no further than here.
        """
        nap_s = NAP_S
        while True:
            end = target()
            if end is not None and not end.positions:
                break
            has_news = self.step(end)
            if end is not None and not has_news:
                break
            if time.monotonic() >= self._roll_s:
                self.roll()
            nap_s = NAP_S if has_news else min(2 * nap_s, LONGEST_NAP_S)
            if not has_news:
                time.sleep(nap_s)
        self.roll()
        self.settle()

    def begin(self) -> Offsets:
        """Take over from an earlier follower; where this one begins."""
        self._at = self._adopt(self._beginning())
        self._roll_s = time.monotonic() + self._plan.commit_s
        return self._at

    def step(self, target: Offsets | None = None) -> bool:
        """Read what is new, up to a target; whether there was something."""
        held = self._planner.held(is_exact=target is not None)
        self._planner.check(self._at, held)
        if target is not None:
            held = offsets.cut(held, target)
        end = offsets.advance(self._at, held, Limits(max_bytes=STEP_BYTES))
        ranges, losses = offsets.between(self._at, end)
        if not ranges and not losses:
            return False
        self._lose(losses)
        for piece in ranges:
            self._read(piece, losses)
        self._at = Offsets({stream: Position(at.epoch, at.seq) for stream, at in end.positions.items()})
        return True

    def settle(self) -> None:
        """Wait for what was rolled to be committed."""
        self._committer.settle()

    def roll(self) -> None:
        """Have everything committed that was read so far, while reading goes on."""
        for source in self._sources.values():
            source.flush()
            source.cut()
        self._roll_s = time.monotonic() + self._plan.commit_s
        self._planner.count([])
        done = self._generation
        if done.is_empty:
            return
        self._committer.wait_for_room(COMMITS_WAITING)
        self._committer.submit(self._commit, done)
        self._batch += 1
        self._generation = _Generation(self._batch)

    def close(self) -> None:
        """What is not committed is left to the next follower."""
        for writer in (*self._writers, self._committer):
            writer.close()
        for source in self._sources.values():
            source.drop()
        self._planner.close()

    # --- where it begins

    def _beginning(self) -> Offsets:
        """Where the lake ends, or where a new recording is to begin."""
        wanted = self._planner.resolve("startingOffsets", self._plan.options.starting_offsets or "latest")
        known = ends_of(self._lake.state) if self._lake.state.has_batch(self._plan.query, 0) else {}
        return Offsets({stream: known.get(stream, at) for stream, at in wanted.positions.items()})

    def _adopt(self, at: Offsets) -> Offsets:
        """Commit what a task staged that did not live to see it committed; where to go on."""
        commits.clear(self._lake, self._plan.query, self._batch - 1)  # committed, and not cleared any more
        root = self._lake.path / layout.STAGING / self._plan.query
        mine = commits.staging_folder(self._lake.path, self._plan.query, self._batch)
        found: dict[int, dict[int, list[tuple[int, int]]]] = {}
        for folder in (root / name for name in _names(root) if name.isdecimal()):
            for name in _names(folder):
                entry = layout.staged_entry(name)
                if entry is None:
                    continue
                mine.mkdir(parents=True, exist_ok=True)
                os.replace(folder / name, mine / name)
                found.setdefault(entry[0], {}).setdefault(entry[1], []).append(entry[2:])
        is_new = not self._lake.state.has_batch(self._plan.query, 0)
        known = ends_of(self._lake.state) | at.positions  # of streams that are not recorded any more, too
        for stream, epochs in sorted(found.items()):
            for epoch, spans in sorted(epochs.items()):
                lo, hi = min(span[0] for span in spans), max(span[1] for span in spans)
                begin = (
                    Position(epoch, lo) if is_new and epoch == min(epochs) else known.get(stream, Position(epoch, lo))
                )
                self._adopt_range(stream, begin, Position(epoch, hi))
                known[stream] = Position(epoch, hi)
        if found:
            self.roll()
            self.settle()
        return Offsets({stream: known[stream] for stream in at.positions})

    def _adopt_range(self, stream: int, begin: Position, end: Position) -> None:
        ranges, losses = offsets.between(Offsets({stream: begin}), Offsets({stream: end}))
        self._lose(losses)
        staging = Staging(self._lake.path, self._plan.query, self._batch)
        for piece in ranges:
            staged = staging.stage(self._planner.part(piece), piece, self._plan.policy)
            self._generation.staged.append(staged)

    # --- what a step does

    def _read(self, piece: SeqRange, losses: Sequence[Loss]) -> None:
        source = self._sources.get(piece.stream_id)
        if source is None or source.epoch != piece.epoch:
            if source is not None:
                self.roll()  # so that no batch has two epochs of a stream
            epoch = self._planner.epoch(piece)
            if epoch is None:
                self._lose([Loss(piece.stream_id, piece.epoch, piece.lo, piece.hi, GONE)])
                return
            builder = Builder(epoch.mapped, WRITE_BYTES, reuses=True)
            source = self._sources[piece.stream_id] = _Source(self, piece.stream_id, piece.epoch, builder)
        for loss in losses:
            if (loss.stream_id, loss.epoch, loss.hi) == (piece.stream_id, piece.epoch, piece.lo):
                source.lost_before(loss)
        source.read(piece)

    def _lose(self, losses: Sequence[Loss]) -> None:
        self.note(losses)
        self._generation.gaps += map(gap_of, losses)

    def _commit(self, generation: _Generation) -> None:
        query, batch = self._plan.query, generation.batch
        staged = [*generation.staged, *(future.result() for future in generation.files)]
        gaps = Staged(gaps=tuple(generation.gaps))
        made = commits.commit(self._lake, query, batch, [*staged, gaps], is_durable=self._plan.policy.is_durable)
        if made is None:
            raise LakeConflict(f"batch {batch} of recording {self._plan.recording} was committed by another")
        self.frames += sum(file.frames for file in made.added)

    # --- for sources

    @property
    def generation(self) -> _Generation:
        return self._generation

    @property
    def max_file_bytes(self) -> int:
        return self._plan.policy.max_bytes

    def note(self, losses: Sequence[Loss]) -> None:
        """Say what is lost. Raises DataLoss where nothing must be."""
        self._planner.count(losses)
        refuse(losses, is_fatal=self._plan.options.fail_on_data_loss)

    @property
    def has_idle_writer(self) -> bool:
        return any(writer.waiting == 0 for writer in self._writers)

    def new_file(self) -> Draft:
        """By the thread that has least to do."""
        writer = min(self._writers, key=lambda writer: writer.waiting)
        folder = commits.staging_folder(self._lake.path, self._plan.query, self._generation.batch)
        return Draft(writer, folder, self._plan.policy)

    def take_memory(self) -> Bytes:
        return self._memory.pop() if self._memory else np.empty(0, np.uint8)

    def give_memory(self, memory: Bytes) -> None:
        self._memory.append(memory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Generation:
    """What the next commit holds."""

    def __init__(self, batch: int) -> None:
        self.batch: Final = batch
        self.files: list[Future[Staged]] = []
        self.staged: list[Staged] = []  # adopted
        self.gaps: list[Gap] = []  # outside of files

    @property
    def is_empty(self) -> bool:
        return not (self.files or self.staged or self.gaps)


class _Source:
    """One epoch of a stream: its frames on their way from the ring to files."""

    def __init__(self, follower: RingFollower, stream_id: int, epoch: int, builder: Builder) -> None:
        self._follower = follower
        self._stream_id = stream_id
        self.epoch: Final = epoch
        self._builder = builder
        self._draft: Draft | None = None
        self._gaps: list[Gap] = []  # since the last batch

    def read(self, piece: SeqRange) -> None:
        for batch in self._builder.take(piece.lo, piece.hi, self._lose):
            self._hand_over(batch)

    def lost_before(self, loss: Loss) -> None:
        """Have the next row say what was lost before it."""
        self._builder.lose(loss.frames or 0, gap_of(loss).reason)

    def flush(self) -> None:
        if self._builder.rows:
            self._hand_over(self._builder.finish())

    def cut(self) -> None:
        """The file ends here; no file accounts for what is missing behind it."""
        if self._draft is not None:
            draft, self._draft = self._draft, None
            self._follower.generation.files.append(draft.finish())
        self._follower.generation.gaps += self._gaps
        self._gaps = []

    def drop(self) -> None:
        if self._draft is not None:
            self._draft.drop()
            self._draft = None

    def _hand_over(self, batch: pa.RecordBatch) -> None:
        """Give a batch to the thread of the file; one that is behind finishes its file, and another begins the next."""
        follower, memory = self._follower, self._builder.swap(self._follower.take_memory())
        seqs = batch.column("seq")
        first, last = seqs[0].as_py(), seqs[-1].as_py()
        before = [gap for gap in self._gaps if gap.lo < first]
        inside = [gap for gap in self._gaps if first < gap.lo < last]
        behind = [gap for gap in self._gaps if gap.lo > last]
        if self._draft is not None and self._is_to_be_cut(self._draft):
            self._gaps = before
            self.cut()
        elif self._draft is None:
            follower.generation.gaps += before
        else:
            inside = before + inside
        self._draft = self._draft or follower.new_file()
        self._draft.add(batch, inside, lambda: follower.give_memory(memory))
        self._gaps = behind

    def _is_to_be_cut(self, draft: Draft) -> bool:
        is_full = draft.payload_bytes >= self._follower.max_file_bytes
        return is_full or (draft.is_behind and self._follower.has_idle_writer)

    def _lose(self, lo: int, hi: int, reason: str) -> None:
        self._follower.note([Loss(self._stream_id, self.epoch, lo, hi, reason)])
        self._gaps.append(Gap(self._stream_id, self.epoch, lo, hi, reason))


def ends_of(state: State) -> dict[int, Position]:
    """Per stream, behind the newest frame that a lake ever had: where a recording goes on."""
    found: dict[int, Position] = {}
    for (stream, epoch), end in state.ends.items():
        if stream not in found or found[stream].epoch < epoch:
            found[stream] = Position(epoch, end)
    return found


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
