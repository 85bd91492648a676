# SPDX-License-Identifier: Apache-2.0
"""Recording by following: one task that runs as long as the recording does, and is never a batch behind.

    rings ──copied as they fill──► batches of 16 MiB ──► lanes, each compressing and writing a file ──► commits in order

A ring needs to last only as long as the task may be held up, not several micro-batches. What is committed, and what a
killed task leaves behind, is the same as with micro-batches: staged files, then one entry of the manifest. A task that
takes over adopts what is staged, goes on where the lake ends, and what the rings forgot meanwhile is a gap.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, Self

import msgspec
import numpy as np
import pyarrow as pa

from tensorpool.spark import offsets
from tensorpool.spark.lake import commits, layout
from tensorpool.spark.lake.commits import Staged
from tensorpool.spark.lake.cut import Cut
from tensorpool.spark.lake.errors import LakeConflict
from tensorpool.spark.lake.files import ROW_GROUP_BYTES
from tensorpool.spark.lake.intake import gap_of
from tensorpool.spark.lake.lake import Lake
from tensorpool.spark.lake.lanes import Draft, Lane
from tensorpool.spark.lake.manifest import Gap, State
from tensorpool.spark.lake.staging import GONE, Staging
from tensorpool.spark.lake.store import write_once
from tensorpool.spark.live import refuse
from tensorpool.spark.offsets import Limits, Loss, Offsets, Position, SeqRange
from tensorpool.spark.options import LiveOptions
from tensorpool.spark.planner import Planner
from tensorpool.spark.rings import Builder, Bytes

LANES: Final = 2
STEP_BYTES: Final = 64 << 20  # that are read without a look at anything else
COMMITS_WAITING: Final = 4
NAP_S, LONGEST_NAP_S = 0.002, 0.02
LOOK_EVERY_S: Final = 0.05  # for the word to stop


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a task needs to know. Pickled."""

    lake: str
    recording: str
    query: str  # under which it commits
    run: str  # of the recorder's tries
    options: LiveOptions  # the streams, and where a new recording begins
    cut: Cut
    commit_s: float


class Signs(msgspec.Struct, frozen=True):
    """Files by which recorder and task tell each other something."""

    folder: Path
    run: str

    @property
    def ready(self) -> Path:
        """From the task: it has the rings, and begins at these offsets."""
        return self.folder / f"ready-{self.run}"

    @property
    def stop(self) -> Path:
        """From the recorder: record up to these offsets, commit, and end."""
        return self.folder / f"stop-{self.run}"

    def clear(self) -> None:
        """Of this run, and of those that nobody was left to clear; a recording has one recorder at a time."""
        for path in (*self.folder.glob("ready-*"), *self.folder.glob("stop-*")):
            path.unlink(missing_ok=True)


def follow(plan: Plan, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The task, for `mapInArrow`. Its one row says how many frames were committed."""
    for _ in batches:
        pass
    with Tail(plan) as tail:
        frames = tail.run()
    yield pa.record_batch([pa.array([frames], pa.int64())], names=["frames"])


class Tail:
    """Follows the streams of a plan. Waits for an earlier task of the recording to be gone."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._lake = Lake.create(plan.lake)
        self._folder = self._lake.path / layout.CHECKPOINTS / plan.recording
        self._folder.mkdir(parents=True, exist_ok=True)
        self._signs = Signs(self._folder, plan.run)
        self._lock = os.open(self._folder / "task.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            self._planner = Planner(plan.options)
        except BaseException:
            os.close(self._lock)  # the process goes on to other tasks
            raise
        self._lanes = [Lane(f"lane-{number}") for number in range(LANES)]
        self._committer = Lane("commits")
        self._memory: list[Bytes] = []
        self._sources: dict[int, _Source] = {}
        self._batch = self._lake.state.batches.get(plan.query, -1) + 1
        self._generation = _Generation(self._batch)
        self._at = Offsets()
        self._roll_s = 0.0
        self.frames = 0

    def run(self) -> int:
        """Until it is told to stop; how many frames were committed."""
        self.begin()
        target: Offsets | None = None
        look_s, nap_s = 0.0, NAP_S
        while True:
            if target is None and time.monotonic() >= look_s:
                target, look_s = self._told_to_stop(), time.monotonic() + LOOK_EVERY_S
            has_news = self.step(target)
            is_over = target is not None and not has_news
            if is_over or time.monotonic() >= self._roll_s:
                self.roll()
            if is_over:
                break
            nap_s = NAP_S if has_news else min(2 * nap_s, LONGEST_NAP_S)
            if not has_news:
                time.sleep(nap_s)
        self.settle()
        return self.frames

    def begin(self) -> None:
        """Take over from an earlier task, and say where this one begins."""
        self._at = self._adopt(self._beginning())
        self._roll_s = time.monotonic() + self._plan.commit_s
        write_once(self._signs.ready, msgspec.json.encode(self._at.to_json()))

    def step(self, target: Offsets | None = None) -> bool:
        """Read what is new, up to a target; whether there was something."""
        held = self._planner.held()
        self._planner.check(self._at, held)
        if target is not None:
            held = offsets.cut(held, target)
        end = offsets.advance(self._at, held, Limits(max_bytes=STEP_BYTES))
        ranges, losses = offsets.between(self._at, end)
        if not ranges and not losses:
            return False
        self._lose(losses)
        for piece in ranges:
            self._read(piece)
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
        """Whatever is not committed is left to whoever goes on."""
        for lane in (*self._lanes, self._committer):
            lane.close()
        for source in self._sources.values():
            source.drop()
        self._planner.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # --- where it begins

    def _beginning(self) -> Offsets:
        """Where the lake ends, or where a new recording is to begin."""
        wanted = self._planner.resolve("startingOffsets", self._plan.options.starting_offsets or "latest")
        known = ends_of(self._lake.state) if self._plan.query in self._lake.state.batches else {}
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
        is_new = self._plan.query not in self._lake.state.batches
        for stream, epochs in sorted(found.items()):
            for epoch, spans in sorted(epochs.items()):
                lo, hi = min(span[0] for span in spans), max(span[1] for span in spans)
                begin = Position(epoch, lo) if is_new and epoch == min(epochs) else at.positions[stream]
                self._adopt_range(stream, begin, Position(epoch, hi))
                at = Offsets(at.positions | {stream: Position(epoch, hi)})
        if found:
            self.roll()
            self.settle()
        return at

    def _adopt_range(self, stream: int, begin: Position, end: Position) -> None:
        ranges, losses = offsets.between(Offsets({stream: begin}), Offsets({stream: end}))
        self._lose(losses)
        staging = Staging(self._lake.path, self._plan.query, self._batch)
        for piece in ranges:
            staged = staging.stage(self._planner.part(piece), piece, self._plan.cut)
            self._generation.staged.append(staged)

    # --- what a step does

    def _read(self, piece: SeqRange) -> None:
        source = self._sources.get(piece.stream_id)
        if source is None or source.epoch != piece.epoch:
            if source is not None:
                self.roll()  # so that no batch has two epochs of a stream
            epoch = self._planner.epoch(piece)
            if epoch is None:
                self._lose([Loss(piece.stream_id, piece.epoch, piece.lo, piece.hi, GONE)])
                return
            builder = Builder(epoch.mapped, ROW_GROUP_BYTES, reuses=True)
            source = self._sources[piece.stream_id] = _Source(self, piece.stream_id, piece.epoch, builder)
        source.read(piece)

    def _lose(self, losses: Sequence[Loss]) -> None:
        self.note(losses)
        self._generation.gaps += map(gap_of, losses)

    def _told_to_stop(self) -> Offsets | None:
        """Up to where to record yet; whoever names no place wants it to end here."""
        try:
            told = Offsets.from_json(self._signs.stop.read_text())
        except FileNotFoundError:
            return None
        return told if told.positions else self._at

    def _commit(self, generation: _Generation) -> None:
        query, batch = self._plan.query, generation.batch
        staged = [*generation.staged, *(future.result() for future in generation.files)]
        gaps = Staged(gaps=tuple(generation.gaps))
        made = commits.commit(self._lake, query, batch, [*staged, gaps], is_durable=self._plan.cut.is_durable)
        if made is None:
            raise LakeConflict(f"batch {batch} of recording {self._plan.recording} was committed by somebody else")
        self.frames += sum(file.frames for file in made.added)

    # --- for sources

    @property
    def generation(self) -> _Generation:
        return self._generation

    @property
    def max_file_bytes(self) -> int:
        return self._plan.cut.max_bytes

    def note(self, losses: Sequence[Loss]) -> None:
        """Say what is lost. Raises DataLoss where nothing must be."""
        self._planner.count(losses)
        refuse(losses, self._plan.options)

    @property
    def has_idle_lane(self) -> bool:
        return any(lane.waiting == 0 for lane in self._lanes)

    def new_file(self) -> Draft:
        """In the lane that has least to do."""
        lane = min(self._lanes, key=lambda lane: lane.waiting)
        folder = commits.staging_folder(self._lake.path, self._plan.query, self._generation.batch)
        return Draft(lane, folder, self._plan.cut)

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

    def __init__(self, tail: Tail, stream_id: int, epoch: int, builder: Builder) -> None:
        self._tail = tail
        self._stream_id = stream_id
        self.epoch: Final = epoch
        self._builder = builder
        self._draft: Draft | None = None
        self._gaps: list[Gap] = []  # since the last batch

    def read(self, piece: SeqRange) -> None:
        for batch in self._builder.take(piece.lo, piece.hi, self._lose):
            self._hand_over(batch)

    def flush(self) -> None:
        if self._builder.rows:
            self._hand_over(self._builder.finish())

    def cut(self) -> None:
        """The file ends here; what is missing behind it is nobody's."""
        if self._draft is not None:
            draft, self._draft = self._draft, None
            self._tail.generation.files.append(draft.finish())
        self._tail.generation.gaps += self._gaps
        self._gaps = []

    def drop(self) -> None:
        if self._draft is not None:
            self._draft.drop()
            self._draft = None

    def _hand_over(self, batch: pa.RecordBatch) -> None:
        """Give a batch to the lane of the file; a lane that is behind goes on with what it has, and another begins."""
        tail, memory = self._tail, self._builder.swap(self._tail.take_memory())
        seqs = batch.column("seq")
        first, last = seqs[0].as_py(), seqs[-1].as_py()
        before = [gap for gap in self._gaps if gap.lo < first]
        inside = [gap for gap in self._gaps if first < gap.lo < last]
        behind = [gap for gap in self._gaps if gap.lo > last]
        if self._draft is not None and self._is_to_be_cut(self._draft):
            self._gaps = before
            self.cut()
        elif self._draft is None:
            tail.generation.gaps += before
        else:
            inside = before + inside
        self._draft = self._draft or tail.new_file()
        self._draft.add(batch, inside, lambda: tail.give_memory(memory))
        self._gaps = behind

    def _is_to_be_cut(self, draft: Draft) -> bool:
        is_full = draft.payload_bytes >= self._tail.max_file_bytes
        return is_full or (draft.is_behind and self._tail.has_idle_lane)

    def _lose(self, lo: int, hi: int, reason: str) -> None:
        self._tail.note([Loss(self._stream_id, self.epoch, lo, hi, reason)])
        self._gaps.append(Gap(self._stream_id, self.epoch, lo, hi, reason))


def ends_of(state: State) -> dict[int, Position]:
    """Per stream, behind the newest frame that a lake ever had: where whoever goes on begins."""
    found: dict[int, Position] = {}
    for key, end in state.ends.items():
        stream, epoch = map(int, key.split("/"))
        if stream not in found or found[stream].epoch < epoch:
            found[stream] = Position(epoch, end)
    for gap in itertools.chain.from_iterable(state.gaps.values()):
        at = found.get(gap.stream_id)
        if at is None or (gap.epoch, gap.hi) > (at.epoch, at.seq):
            found[gap.stream_id] = Position(gap.epoch, gap.hi)
    return found


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
