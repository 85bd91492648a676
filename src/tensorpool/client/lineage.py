# SPDX-License-Identifier: Apache-2.0
"""From which frames a frame was made: what links say, step by step. Holds no clock and does no IO."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from typing import Final

import msgspec

MAX_DEPTH: Final = 32  # of a trace that leads back through a loop of stages


class FramePlace(msgspec.Struct, frozen=True):
    """Where a frame is, or was. A trace id may be in several places: copies of a frame keep it."""

    stream_id: int
    epoch: int
    seq: int
    time: datetime | None = None


class TraceStep(msgspec.Struct, frozen=True):
    """A trace id on the way back, and the frames that have it."""

    trace_id: int
    depth: int  # 0: the id that was asked for
    parents: tuple[int, ...]
    is_repeated: bool = False  # its parents follow where it came first
    is_cut: bool = False  # it has parents, beyond the depth that was asked for
    frames: tuple[FramePlace, ...] = ()

    @property
    def is_known(self) -> bool:
        return bool(self.frames or self.parents)


def trace_steps(
    trace_id: int, parents_of: Callable[[int], Iterable[int] | None], max_depth: int = MAX_DEPTH
) -> list[TraceStep]:
    """A trace id and its ancestors, each followed by its parents.

    >>> [(step.depth, step.trace_id, step.is_repeated) for step in trace_steps(3, {3: [2, 1], 2: [1], 1: [0]}.get)]
    [(0, 3, False), (1, 2, False), (2, 1, False), (3, 0, False), (1, 1, True)]
    """
    steps: list[TraceStep] = []
    seen: set[int] = set()
    due = [(0, trace_id)]
    while due:
        depth, one = due.pop()
        parents = tuple(dict.fromkeys(parents_of(one) or ()))
        is_repeated = one in seen and bool(parents)
        is_cut = depth == max_depth and bool(parents)
        steps.append(TraceStep(one, depth, parents, is_repeated, is_cut))
        if one not in seen and not is_cut:
            due += [(depth + 1, parent) for parent in reversed(parents)]
        seen.add(one)
    return steps


def with_frames(steps: Collection[TraceStep], frames: Mapping[int, Iterable[FramePlace]]) -> list[TraceStep]:
    """The same steps, with the frames that have their ids."""
    return [msgspec.structs.replace(step, frames=tuple(frames.get(step.trace_id, ()))) for step in steps]
