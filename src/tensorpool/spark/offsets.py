# SPDX-License-Identifier: Apache-2.0
"""Where a query is in its streams, and what the next batch reads.

An offset names, per stream, the epoch and the first seq that was not read yet. Batches end where an epoch ends: what an
ended epoch still holds is a batch of its own, so that every range lies in one ring. Holds no state and does no IO.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import msgspec

from tensorpool.errors import RemoteProtocolError

MAX_SEQ: Final = 2**63 - 1


class Position(msgspec.Struct, frozen=True, order=True):
    """The next frame to read of a stream."""

    epoch: int
    seq: int


class Offsets(msgspec.Struct, frozen=True):
    """A position per stream.

    >>> Offsets({10000: Position(3, 120)}).to_json()
    {'10000': {'epoch': 3, 'seq': 120}}
    """

    positions: dict[int, Position] = {}

    def to_json(self) -> dict[str, dict[str, int]]:
        """As Spark keeps it: Spark compares the text, so the order is fixed."""
        return {
            str(stream): {"epoch": position.epoch, "seq": position.seq}
            for stream, position in sorted(self.positions.items())
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | str) -> Self:
        """Raises RemoteProtocolError for what is no offset."""
        try:
            data = json.loads(value) if isinstance(value, str) else value
            return cls({int(stream): _position(given) for stream, given in data.items()})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RemoteProtocolError(
                f'{value!r} is no offset; expected {{"10000": {{"epoch": 3, "seq": 120}}}} ({error})'
            ) from None


def _position(given: Mapping[str, Any]) -> Position:
    epoch, seq = given["epoch"], given["seq"]
    if type(epoch) is not int or type(seq) is not int or epoch < 0 or not 0 <= seq <= MAX_SEQ:
        raise ValueError(f"epoch {epoch!r}, seq {seq!r}")
    return Position(epoch, seq)


class Held(msgspec.Struct, frozen=True):
    """What a ring holds of one epoch: the seqs from `first` up to, not including, `end`."""

    stream_id: int
    epoch: int
    first: int
    end: int
    is_over: bool  # nobody writes to it any more
    frame_bytes: int  # of the newest frame, to guess what a range weighs

    @property
    def frames(self) -> int:
        return self.end - self.first


class SeqRange(msgspec.Struct, frozen=True):
    """Frames to read: `lo` up to, not including, `hi`."""

    stream_id: int
    epoch: int
    lo: int
    hi: int

    @property
    def frames(self) -> int:
        return self.hi - self.lo


class Loss(msgspec.Struct, frozen=True):
    """Frames that no batch will read. `frames` is None where nobody knows how many they were."""

    stream_id: int
    epoch: int
    lo: int
    hi: int | None
    reason: str

    @property
    def frames(self) -> int | None:
        return None if self.hi is None else self.hi - self.lo

    def __str__(self) -> str:
        upto = "the epoch's end" if self.hi is None else str(self.hi - 1)
        return f"stream {self.stream_id}, epoch {self.epoch}: frames {self.lo} to {upto} are lost ({self.reason})"


class Limits(msgspec.Struct, frozen=True):
    """Admission control: how much one batch may take."""

    max_frames: int | None = None
    max_bytes: int | None = None


def latest(held: Sequence[Held]) -> Offsets:
    """The end of every stream: the next frame that will be published."""
    return Offsets({stream: Position(epochs[-1].epoch, epochs[-1].end) for stream, epochs in _by_stream(held).items()})


def earliest(held: Sequence[Held]) -> Offsets:
    """The oldest frame that a ring still has, per stream."""
    found = {}
    for stream, epochs in _by_stream(held).items():
        oldest = next((epoch for epoch in epochs if epoch.frames), epochs[-1])
        found[stream] = Position(oldest.epoch, oldest.first)
    return Offsets(found)


def advance(start: Offsets, held: Sequence[Held], limits: Limits) -> Offsets:
    """Where the next batch ends: as far as the rings and the limits allow, each stream inside one epoch.

    The limits are shared in proportion to what each stream has waiting, and no stream that has some gets nothing.
    """
    backlog = {stream: _backlog(start.positions.get(stream), epochs) for stream, epochs in _by_stream(held).items()}
    waiting = {stream: part for stream, part in backlog.items() if part is not None and part.frames > 0}
    admitted = _admitted({stream: (part.frames, part.frame_bytes) for stream, part in waiting.items()}, limits)
    positions = dict(start.positions)
    for stream, part in backlog.items():
        if part is not None:
            positions[stream] = Position(part.epoch, part.lo + admitted.get(stream, 0))
    return Offsets(positions)


class _Part(msgspec.Struct, frozen=True):
    epoch: int
    lo: int
    frames: int
    frame_bytes: int


def _backlog(start: Position | None, epochs: Sequence[Held]) -> _Part | None:
    """What a stream has waiting in the first epoch that has any; nothing moves back."""
    if start is None:
        newest = epochs[-1]
        return _Part(newest.epoch, newest.end, 0, 0)
    for held in epochs:
        if held.epoch < start.epoch:
            continue
        lo = max(start.seq, held.first) if held.epoch == start.epoch else held.first
        if held.end > lo:
            return _Part(held.epoch, lo, held.end - lo, held.frame_bytes)
        if held.epoch == start.epoch and not held.is_over:
            return _Part(held.epoch, start.seq, 0, 0)
    newest = epochs[-1]
    if newest.epoch > start.epoch:
        return _Part(newest.epoch, newest.end, 0, 0)
    return None


def _admitted(waiting: Mapping[int, tuple[int, int]], limits: Limits) -> dict[int, int]:
    frames = {stream: count for stream, (count, _) in waiting.items()}
    share = 1.0
    total_frames = sum(frames.values())
    total_bytes = sum(count * max(size, 1) for count, size in waiting.values())
    if limits.max_frames is not None and total_frames > limits.max_frames:
        share = min(share, limits.max_frames / total_frames)
    if limits.max_bytes is not None and total_bytes > limits.max_bytes:
        share = min(share, limits.max_bytes / total_bytes)
    if share >= 1.0:
        return frames
    admitted = {stream: max(1, int(count * share)) for stream, count in frames.items()}
    # One frame for everybody may already be more than was allowed; then the largest shares give some back.
    if limits.max_frames is not None:
        excess = sum(admitted.values()) - max(limits.max_frames, len(admitted))
        for stream in sorted(admitted, key=lambda key: -admitted[key]):
            if excess <= 0:
                break
            given = min(excess, admitted[stream] - 1)
            admitted[stream] -= given
            excess -= given
    return admitted


def between(start: Offsets, end: Offsets, held: Sequence[Held]) -> tuple[list[SeqRange], list[Loss]]:
    """The ranges of a batch, and what lies between its ends but in no ring any more."""
    ranges: list[SeqRange] = []
    losses: list[Loss] = []
    known = {(part.stream_id, part.epoch): part for part in held}
    for stream, stop in sorted(end.positions.items()):
        begin = start.positions.get(stream)
        if begin is None or begin == stop:
            continue
        if begin.epoch != stop.epoch:
            losses += _losses_across(stream, begin, stop, known)
            begin = Position(stop.epoch, 0)
        part = known.get((stream, stop.epoch))
        if part is None:
            if stop.seq > begin.seq:
                losses.append(Loss(stream, stop.epoch, begin.seq, stop.seq, "the epoch is gone"))
            continue
        lo = max(begin.seq, part.first)
        if lo > begin.seq:
            losses.append(Loss(stream, stop.epoch, begin.seq, min(lo, stop.seq), "overwritten before they were read"))
        if stop.seq > lo:
            ranges.append(SeqRange(stream, stop.epoch, lo, stop.seq))
    return ranges, losses


def _losses_across(stream: int, begin: Position, stop: Position, known: Mapping[tuple[int, int], Held]) -> list[Loss]:
    """What the epochs before the last one still had to give when the batch left them."""
    losses = []
    ended = known.get((stream, begin.epoch))
    if ended is None:
        losses.append(Loss(stream, begin.epoch, begin.seq, None, "the epoch ended and is gone"))
    elif ended.end > begin.seq:
        losses.append(Loss(stream, begin.epoch, begin.seq, ended.end, "the epoch ended before they were read"))
    for (other, epoch), held in sorted(known.items()):
        if other == stream and begin.epoch < epoch < stop.epoch and held.end > 0:
            losses.append(Loss(stream, epoch, 0, held.end, "the epoch came and went between two batches"))
    return losses


def split(ranges: Sequence[SeqRange], parts: int) -> list[SeqRange]:
    """Cut ranges so that at least `parts` tasks have something to do, where there are enough frames."""
    total = sum(part.frames for part in ranges)
    if total == 0 or parts <= len(ranges):
        return list(ranges)
    pieces: list[SeqRange] = []
    for part in ranges:
        count = min(part.frames, max(1, round(parts * part.frames / total)))
        edges = [part.lo + part.frames * index // count for index in range(count + 1)]
        pieces += [SeqRange(part.stream_id, part.epoch, lo, hi) for lo, hi in itertools.pairwise(edges)]
    return pieces


def _by_stream(held: Sequence[Held]) -> dict[int, list[Held]]:
    streams: dict[int, list[Held]] = {}
    for part in sorted(held, key=lambda part: (part.stream_id, part.epoch)):
        streams.setdefault(part.stream_id, []).append(part)
    return streams
