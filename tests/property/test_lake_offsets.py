# SPDX-License-Identifier: Apache-2.0
"""Offsets, whatever the producers, the rings and the limits do: every frame is read once, or named as lost."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from tensorpool.lake import offsets
from tensorpool.lake.offsets import Limits, Offsets, Position, RingExtent, SeqRange

NSLOTS = 8
KEPT = 3  # epochs that a planner remembers


class World:
    """Streams whose producers publish and restart, and the query that follows them."""

    def __init__(self, streams: int) -> None:
        self.epochs = {stream: [[5, 0]] for stream in range(1, streams + 1)}  # epoch and end, oldest first
        self.at = Offsets({stream: Position(5, 0) for stream in self.epochs})
        self.read: list[SeqRange] = []
        self.lost: list[offsets.Loss] = []

    def held(self) -> list[RingExtent]:
        return [
            RingExtent(stream, epoch, max(0, end - NSLOTS), end, 10)
            for stream, epochs in self.epochs.items()
            for epoch, end in epochs[-KEPT:]
        ]

    def batch(self, limits: Limits) -> None:
        end = offsets.advance(self.at, self.held(), limits)
        # As Spark does: both ends go through the log.
        start, stop = (Offsets.from_json(json.dumps(one.to_json())) for one in (self.at, end))
        ranges, losses = offsets.between(start, stop)
        if limits.max_frames is not None:
            waiting = sum(1 for stream in self.epochs if any(part.stream_id == stream for part in ranges))
            assert sum(part.frames for part in ranges) <= max(limits.max_frames, waiting)
        self.read += ranges
        self.lost += losses
        self.at = end


steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(1, 3), st.integers(1, 20)),
        st.tuples(st.just("restart"), st.integers(1, 3), st.integers(1, 2)),
        st.tuples(st.just("batch"), st.integers(0, 12), st.just(0)),
    ),
    max_size=40,
)


@given(steps)
def test_every_frame_is_read_once_or_named_as_lost(schedule: list[tuple[str, int, int]]) -> None:
    world = World(3)
    for action, one, many in schedule:
        if action == "publish":
            world.epochs[one][-1][1] += many
        elif action == "restart":
            world.epochs[one].append([world.epochs[one][-1][0] + many, 0])
        else:
            world.batch(Limits(one or None))
    for _ in range(100):
        before = world.at
        world.batch(Limits())
        if world.at == before:
            break
    latest = offsets.latest(world.held())
    assert {stream: (at.epoch, at.seq) for stream, at in world.at.positions.items()} == {
        stream: (at.epoch, at.seq) for stream, at in latest.positions.items()
    }
    for stream, epochs in world.epochs.items():
        for epoch, end in epochs:
            _check_epoch(world, stream, epoch, end)


def _check_epoch(world: World, stream: int, epoch: int, end: int) -> None:
    mine = [part for part in world.read if (part.stream_id, part.epoch) == (stream, epoch)]
    known = [loss for loss in world.lost if (loss.stream_id, loss.epoch) == (stream, epoch)]
    seqs = [seq for part in mine for seq in range(part.lo, part.hi)]
    gone = [seq for loss in known if loss.hi is not None for seq in range(loss.lo, loss.hi)]
    assert seqs == sorted(set(seqs))
    assert not set(seqs) & set(gone)
    unknown = [loss.lo for loss in known if loss.hi is None]
    unseen = [loss.epoch for loss in world.lost if loss.stream_id == stream and not loss.is_data]
    is_unseen = any(first <= epoch for first in unseen) and not mine and not gone
    upto = min(unknown, default=end)
    if not is_unseen:
        assert sorted({*seqs, *gone}) == list(range(upto)), (stream, epoch, end)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 50), st.integers(1, 40)), min_size=1, max_size=6),
    st.integers(1, 12),
)
def test_pieces_cover_their_ranges_and_are_enough(parts: list[tuple[int, int, int]], tasks: int) -> None:
    ranges = [SeqRange(stream, 5, lo, lo + frames) for stream, lo, frames in parts]
    pieces = offsets.split(ranges, tasks)
    assert [(part.stream_id, seq) for part in pieces for seq in range(part.lo, part.hi)] == [
        (part.stream_id, seq) for part in ranges for seq in range(part.lo, part.hi)
    ]
    assert all(piece.frames > 0 for piece in pieces)
    assert len(pieces) >= min(tasks, sum(part.frames for part in ranges))
    assert pieces == offsets.split(ranges, tasks)
