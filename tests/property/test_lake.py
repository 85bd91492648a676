# SPDX-License-Identifier: Apache-2.0
"""No frame is lost or doubled, whatever dies when: batches that come again, are cut otherwise, race each other.

A ring that turns under the recorder, tasks that stage real files, committers that die before or after any link or
removal, compaction and retention in between. Whenever a batch is committed at last, every seq up to its end is in the
lake once, or in a gap; and every frame that was staged whole is there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tensorpool.lake import Lake, commits, maintenance, ring_reader
from tensorpool.lake.commits import Staged
from tensorpool.lake.file_policy import FilePolicy
from tensorpool.lake.files import read_frames
from tensorpool.lake.manifest import Gap, merged
from tensorpool.lake.staging import Staging
from tests.levels import SOAK
from tests.support.lakes import Ring, recorded
from tests.support.processes import private_directory

NSLOTS = 8
QUERY = "query"

_jobs = itertools.count()


class Died(BaseException):
    """As if the process had been killed here."""


@contextlib.contextmanager
def dying(at: int | None) -> Iterator[None]:
    """Die around the `at`-th step that changes names: even numbers before it, odd ones right after it."""
    step = 0

    def deadly(act: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*arguments: Any, **named: Any) -> Any:
            nonlocal step
            step += 1
            if at is not None and step == at // 2 + 1 and at % 2 == 0:
                raise Died
            done = act(*arguments, **named)
            if at is not None and step == at // 2 + 1:
                raise Died
            return done

        return acting

    with patch.object(os, "link", deadly(os.link)), patch.object(shutil, "rmtree", deadly(shutil.rmtree)):
        yield


class LakeMachine(RuleBasedStateMachine):
    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.own = Path(tempfile.mkdtemp(dir=self.folder))
        self.ring = Ring(self.own, nslots=NSLOTS)
        self.root = self.own / "lake"
        self.lake = Lake.create(self.root)
        self.batch = 0
        self.done = 0  # everything before is committed
        self.end: int | None = None  # of the batch that is under way
        self.retained = 0
        self.staged: set[int] = set()  # frames of the batch under way that are in whole files

    @initialize(frames=st.integers(0, 3 * NSLOTS))
    def begin(self, frames: int) -> None:
        self.ring.write(frames)

    @rule(frames=st.integers(1, 2 * NSLOTS), skip=st.sampled_from([0, 0, 0, 3]))
    def publish(self, frames: int, skip: int) -> None:
        self.ring.write(frames, skip)

    @rule(
        tasks=st.integers(1, 3), rows_per_file=st.sampled_from([1, 2, 100]), at=st.one_of(st.none(), st.integers(0, 15))
    )
    def run_batch(self, tasks: int, rows_per_file: int, at: int | None) -> None:
        """Plan a batch, or run the last one again with its ends; die on the way, or not."""
        if self.end is None:
            if self.ring.next_seq == self.done:
                return
            self.end = self.ring.next_seq
        with contextlib.suppress(Died), dying(at):
            staged = self._stage(tasks, rows_per_file)
            commits.commit(Lake.open(self.root), QUERY, self.batch, staged, is_durable=False)
        if Lake.open(self.root).state.has_batch(QUERY, self.batch):
            assert at is not None or not any((self.root / "_staging" / QUERY).iterdir())
            assert self.staged <= {seq for found in recorded(Lake.open(self.root)).values() for seq in found}
            self.staged = set()
            self.batch, self.done, self.end = self.batch + 1, self.end, None
        else:
            self._look_at_staging()

    @rule(tasks=st.integers(1, 2))
    @precondition(lambda self: self.end is not None)
    def stage_as_a_ghost(self, tasks: int) -> None:
        """A task of a killed run goes on for a while: it stages, and does not commit."""
        self._stage(tasks, 100)
        self._look_at_staging()

    @rule()
    @precondition(lambda self: self.batch > 0)
    def commit_again(self) -> None:
        """A committer that comes late finds its batch done."""
        assert commits.commit(Lake.open(self.root), QUERY, self.batch - 1, [Staged()]) is None

    @rule(at=st.one_of(st.none(), st.integers(0, 7)))
    def compact(self, at: int | None) -> None:
        lake = Lake.open(self.root)
        merges = maintenance.plan_merges(lake.state, 8 << 10)
        before, job = recorded(lake), f"job{next(_jobs)}"
        with contextlib.suppress(Died), dying(at):
            policy = FilePolicy("none", is_durable=False)
            done = [(merge, maintenance.merge_files(lake, job, merge, policy)) for merge in merges]
            maintenance.commit_merges(lake, job, done)
        commits.discard(lake, job)
        assert recorded(Lake.open(self.root)) == before

    @rule(share=st.floats(0.2, 1.0))
    def retain(self, share: float) -> None:
        lake = Lake.open(self.root)
        size = sum(file.bytes for file in lake.files())
        maintenance.retain(lake, max_bytes=max(1, int(size * share)))
        self.retained = min((file.lo for file in lake.files()), default=self.done)

    @rule()
    def delete(self) -> None:
        maintenance.remove_unused(Lake.open(self.root), grace_s=0)

    @invariant()
    def every_frame_is_accounted_for(self) -> None:
        lake = Lake.open(self.root)
        assert maintenance.verify(lake) == []
        seqs = [seq for found in recorded(lake).values() for seq in found]
        missing = [seq for gap in lake.gaps() for seq in range(gap.lo, gap.hi)]
        expected = set(range(self.retained, self.done))
        assert not set(seqs) & set(missing)
        assert expected <= set(seqs) | set(missing)
        assert max([*seqs, *missing, -1]) < max(self.done, 1)

    def teardown(self) -> None:
        ring_reader.let_go(0)
        shutil.rmtree(self.own)

    def _look_at_staging(self) -> None:
        for path in Staging(self.root, QUERY, self.batch).folder.glob("*.parquet"):
            self.staged.update(seq for batch in read_frames(path) for seq in batch.column("seq").to_pylist())

    def _stage(self, tasks: int, rows_per_file: int) -> list[Staged]:
        assert self.end is not None
        count = min(tasks, self.end - self.done)
        edges = [self.done + (self.end - self.done) * index // count for index in range(count + 1)]
        policy = FilePolicy("none", max_bytes=rows_per_file * self.ring.nbytes, is_durable=False)
        folder = Staging(self.root, QUERY, self.batch)
        return [
            folder.stage(self.ring.part(lo, hi), self.ring.span(lo, hi), policy) for lo, hi in itertools.pairwise(edges)
        ]


@pytest.mark.usefixtures("small_row_groups")
def test_no_committed_frame_is_lost_or_doubled() -> None:
    with private_directory() as folder:
        LakeMachine.folder = folder
        run_state_machine_as_test(LakeMachine, settings=settings(max_examples=25 * SOAK, stateful_step_count=16))


@pytest.fixture
def small_row_groups() -> Iterator[None]:
    """Files are cut between row groups: make those of one frame."""
    with patch("tensorpool.lake.staging.WRITE_BYTES", 1):
        yield


def seqs_of(gaps: list[Gap]) -> set[int]:
    return {seq for gap in gaps for seq in range(gap.lo, gap.hi)}


spans = st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda found: (found[0], found[0] + found[1]))
gaps = st.lists(st.tuples(spans, st.sampled_from(["a", "b"])).map(lambda it: Gap(1, 1, *it[0], it[1])), max_size=6)


@given(gaps, gaps)
def test_merging_gaps_forgets_nothing(first: list[Gap], second: list[Gap]) -> None:
    both = merged(first, second)
    assert seqs_of(both) == seqs_of(first) | seqs_of(second)
    assert merged(both) == both
