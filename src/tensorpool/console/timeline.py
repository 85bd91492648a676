# SPDX-License-Identifier: Apache-2.0
"""What of a recorded stream there is, over time, as the lake's log knows it: no file is opened.

Frames of a file are spread evenly between its first and its last one. Holds no clock and does no IO.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # the console does without the extra `lake` where it is given none
    from tensorpool.lake.manifest import Gap, LakeFile

MAX_BUCKETS: Final = 600
MAX_GAPS: Final = 1_000
MAX_EPOCHS: Final = 100
_US: Final = 1_000

type Numbers = npt.NDArray[np.int64]


class _Span:
    """Of `count` frames, from `first_ns` to `last_ns`."""

    def __init__(self, first_ns: int, last_ns: int, count: int) -> None:
        self.first_ns = first_ns
        self.last_ns = max(first_ns, last_ns)
        self.count = count

    def before(self, edges: Numbers) -> Numbers:
        """How many of its frames are before each of these times."""
        if self.count == 1 or self.last_ns == self.first_ns:
            return np.where(edges > self.first_ns, self.count, 0)
        step = (self.last_ns - self.first_ns) / (self.count - 1)
        reached = np.clip(np.ceil((edges - self.first_ns) / step), 0, self.count)
        return np.where(edges > self.last_ns, self.count, reached).astype(np.int64)


def ends(files: Iterable[LakeFile]) -> tuple[int, int] | None:
    """The times of the first and the last frame, in ns since 1970; None where there is none."""
    spans = [_span(file) for file in files if file.frames]
    return (min(span.first_ns for span in spans), max(span.last_ns for span in spans)) if spans else None


def lost_by_reason(gaps: Iterable[Gap]) -> dict[str, int]:
    """Frames that are missing; of a gap of unknown length none."""
    found: dict[str, int] = {}
    for gap in gaps:
        found[gap.reason] = found.get(gap.reason, 0) + gap.hi - gap.lo
    return found


def timeline(
    files: Sequence[LakeFile], gaps: Sequence[Gap], start_ns: int | None = None, end_ns: int | None = None
) -> dict[str, Any]:
    """Buckets of equal length with the frames recorded and lost in each, gaps and epochs, of all or of a span."""
    recorded = [file for file in files if file.frames]
    whole = ends(recorded)
    if whole is None:
        return {"from": None, "to": None, "buckets": [], "gaps": [], "epochs": []}
    start_ns = whole[0] if start_ns is None else start_ns
    end_ns = max(start_ns, whole[1] if end_ns is None else end_ns)
    length_ns = end_ns + 1 - start_ns
    count = min(MAX_BUCKETS, length_ns)
    edges = np.array([start_ns + length_ns * at // count for at in range(count + 1)], np.int64)
    by_epoch = _by_epoch(recorded)
    timed = [(gap, _gap_span(gap, by_epoch.get(gap.epoch, recorded))) for gap in gaps]
    inside = [(gap, span) for gap, span in timed if span.last_ns >= start_ns and span.first_ns <= end_ns]
    frames, lost = _counted(map(_span, recorded), edges), _counted([span for _, span in inside], edges)
    return {
        "from": start_ns,
        "to": end_ns,
        "buckets": [list(bucket) for bucket in zip(edges[:-1].tolist(), frames.tolist(), lost.tolist(), strict=True)],
        "gaps": [_gap(gap, span) for gap, span in inside[:MAX_GAPS]],
        "epochs": [_epoch(epoch, own) for epoch, own in list(by_epoch.items())[-MAX_EPOCHS:]],
    }


def _counted(spans: Iterable[_Span], edges: Numbers) -> Numbers:
    total = np.zeros(len(edges) - 1, np.int64)
    for span in spans:
        if span.count:
            total += np.diff(span.before(edges))
    return total


def _span(file: LakeFile) -> _Span:
    """Of a file whose frames have no known times, that at which it was written."""
    if file.first_time_us is None or file.last_time_us is None:
        return _Span(file.written_ns, file.written_ns, file.frames)
    return _Span(file.first_time_us * _US, file.last_time_us * _US, file.frames)


def _gap_span(gap: Gap, files: Sequence[LakeFile]) -> _Span:
    """When the missing frames would have been: between the frames around them."""
    seqs: list[int] = []
    times: list[int] = []
    for file in sorted(files, key=lambda file: file.lo):
        span = _span(file)
        seqs += [_first_seq(file), _last_seq(file)]
        times += [span.first_ns, span.last_ns]
    between = np.interp([gap.lo, max(gap.lo, gap.hi - 1)], seqs, np.array(times) - times[0])
    # Nanoseconds of a long recording are more digits than a float has.
    first_ns, last_ns = (min(max(times[0] + round(at), min(times)), max(times)) for at in between)
    return _Span(first_ns, last_ns, gap.hi - gap.lo)


def _by_epoch(files: Sequence[LakeFile]) -> dict[int, list[LakeFile]]:
    found: dict[int, list[LakeFile]] = {}
    for file in files:
        found.setdefault(file.epoch, []).append(file)
    return found


def _gap(gap: Gap, span: _Span) -> dict[str, Any]:
    return {
        "epoch": gap.epoch,
        "from_seq": gap.lo,
        "to_seq": max(gap.lo, gap.hi - 1),
        "frames": gap.hi - gap.lo,
        "reason": gap.reason,
        "time": span.first_ns,
    }


def _epoch(epoch: int, files: Sequence[LakeFile]) -> dict[str, Any]:
    spans = [_span(file) for file in files]
    return {
        "epoch": epoch,
        "from": min(span.first_ns for span in spans),
        "to": max(span.last_ns for span in spans),
        "from_seq": min(map(_first_seq, files)),
        "to_seq": max(map(_last_seq, files)),
        "frames": sum(file.frames for file in files),
    }


def _first_seq(file: LakeFile) -> int:
    return file.lo if file.first_seq is None else file.first_seq


def _last_seq(file: LakeFile) -> int:
    return file.hi - 1 if file.last_seq is None else file.last_seq
