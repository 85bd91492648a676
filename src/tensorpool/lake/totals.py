# SPDX-License-Identifier: Apache-2.0
"""What a recording adds up to: published in the recorded span = recorded + lost, stream by stream."""

from __future__ import annotations

import msgspec

from tensorpool.lake.manifest import Commit


class StreamTotals(msgspec.Struct, frozen=True):
    """One stream: every frame of the recorded span is recorded, or lost for a reason."""

    stream_id: int
    published: int  # between the first and the last frame that the recording accounts for, in every epoch
    recorded: int
    lost: int
    reasons: dict[str, int]
    epochs: int
    unknown: int  # ends of epochs that the recorder did not see

    @property
    def adds_up(self) -> bool:
        return self.published == self.recorded + self.lost


class Counted:
    """The sum of a query's commits."""

    def __init__(self) -> None:
        self.frames = self.payload_bytes = self.file_bytes = self.files = self.lost = self.batches = 0
        self._recorded: dict[int, int] = {}
        self._lost: dict[int, dict[str, int]] = {}
        self._unknown: dict[int, int] = {}
        self._spans: dict[int, dict[int, tuple[int, int]]] = {}

    def add(self, commit: Commit) -> None:
        self.batches += 1
        for file in commit.added:
            if not file.frames:
                continue  # it tells of gaps only
            self.frames += file.frames
            self.payload_bytes += file.payload_bytes
            self.file_bytes += file.bytes
            self.files += 1
            self._recorded[file.stream_id] = self._recorded.get(file.stream_id, 0) + file.frames
            self._cover(file.stream_id, file.epoch, file.lo, file.hi)
        for gap in commit.gaps:
            count = gap.hi - gap.lo
            if count:
                self.lost += count
                reasons = self._lost.setdefault(gap.stream_id, {})
                reasons[gap.reason] = reasons.get(gap.reason, 0) + count
                self._cover(gap.stream_id, gap.epoch, gap.lo, gap.hi)
            else:
                self._unknown[gap.stream_id] = self._unknown.get(gap.stream_id, 0) + 1

    def streams(self) -> tuple[StreamTotals, ...]:
        found = []
        for stream in sorted(self._spans.keys() | self._unknown.keys()):
            spans, reasons = self._spans.get(stream, {}), self._lost.get(stream, {})
            published = sum(hi - lo for lo, hi in spans.values())
            recorded, lost = self._recorded.get(stream, 0), sum(reasons.values())
            unknown = self._unknown.get(stream, 0)
            found.append(StreamTotals(stream, published, recorded, lost, dict(reasons), len(spans), unknown))
        return tuple(found)

    def _cover(self, stream: int, epoch: int, lo: int, hi: int) -> None:
        spans = self._spans.setdefault(stream, {})
        first, last = spans.get(epoch, (lo, hi))
        spans[epoch] = (min(first, lo), max(last, hi))
