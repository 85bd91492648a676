# SPDX-License-Identifier: Apache-2.0
"""Where a query is in its streams, and what the next batch reads.

An offset names, per stream, the epoch and the first seq that was not read yet. Where a batch is more than a plain range
of one epoch its end also says which way it went: `path` lists every epoch between the two ends, the first seq that was
still there when the batch was planned, and where the epoch ended. So the ranges of a batch, and its losses, follow from
its two offsets alone, and a batch that is run again is the same batch. Holds no state and does no IO.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import msgspec

from tensorpool._core import MAX_SEQ
from tensorpool.errors import RemoteProtocolError

OVERWRITTEN: Final = "overwritten before they were read"
ENDED: Final = "it is not known where the epoch ended"
UNSEEN: Final = "epochs from this one on came and went unseen"


class EpochSpan(msgspec.Struct, frozen=True):
    """What a batch reads of one epoch: `lo` up to, not including, `hi`; None: it is not known where the epoch ended."""

    epoch: int
    lo: int
    hi: int | None


class Position(msgspec.Struct, frozen=True):
    """The next frame to read of a stream."""

    epoch: int
    seq: int
    path: tuple[EpochSpan, ...] = ()


class Offsets(msgspec.Struct, frozen=True):
    """A position per stream.

    >>> Offsets({10000: Position(3, 120)}).to_json()
    {'10000': {'epoch': 3, 'seq': 120}}
    """

    positions: dict[int, Position] = {}

    def to_json(self) -> dict[str, dict[str, Any]]:
        """As Spark keeps it: Spark compares the text, so the order is fixed."""
        return {str(stream): _to_json(position) for stream, position in sorted(self.positions.items())}

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | str) -> Self:
        """Raises RemoteProtocolError for what is no offset."""
        try:
            data = json.loads(value) if isinstance(value, str) else value
            return cls({_stream_id(stream): _position(given) for stream, given in data.items()})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RemoteProtocolError(
                f'{value!r} is no offset; expected {{"10000": {{"epoch": 3, "seq": 120}}}} ({error})'
            ) from None


def _to_json(position: Position) -> dict[str, Any]:
    plain: dict[str, Any] = {"epoch": position.epoch, "seq": position.seq}
    if position.path:
        plain["path"] = [[part.epoch, part.lo, part.hi] for part in position.path]
    return plain


def _stream_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**32):
        raise ValueError(f"stream {text!r}")
    return int(text)


def _position(given: Mapping[str, Any]) -> Position:
    unknown = set(given) - {"epoch", "seq", "path"}
    if unknown:
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
    epoch, seq = _number("epoch", given["epoch"]), _number("seq", given["seq"])
    path = tuple(
        EpochSpan(_number("epoch", at), _number("seq", lo), None if hi is None else _number("seq", hi))
        for at, lo, hi in given.get("path", ())
    )
    epochs = [part.epoch for part in path]
    if path and (epochs != sorted(set(epochs)) or (epochs[-1], path[-1].hi) != (epoch, seq)):
        raise ValueError(f"the path {given['path']} does not lead to epoch {epoch}, seq {seq}")
    return Position(epoch, seq, path)


def _number(name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_SEQ:
        raise ValueError(f"{name} {value!r}")
    return value


class RingExtent(msgspec.Struct, frozen=True):
    """What a ring holds of one epoch: the seqs from `first` up to, not including, `end`."""

    stream_id: int
    epoch: int
    first: int
    end: int
    frame_bytes: int  # what one of them weighs, about


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
    """Frames that no batch will read. `hi` is None where it is not known how many they were."""

    stream_id: int
    epoch: int
    lo: int
    hi: int | None
    reason: str

    @property
    def frames(self) -> int | None:
        return None if self.hi is None else self.hi - self.lo

    @property
    def is_data(self) -> bool:
        """Whether the query was to read it; an epoch that the planner did not see may never have had a producer."""
        return self.reason != UNSEEN

    def __str__(self) -> str:
        head = f"stream {self.stream_id}, epoch {self.epoch}: "
        if self.hi is None:
            return f"{head}frames from {self.lo} on, if there were any, are lost ({self.reason})"
        return f"{head}frames {self.lo} to {self.hi - 1} are lost ({self.reason})"


class Limits(msgspec.Struct, frozen=True):
    """Admission control: how much one batch may take."""

    max_frames: int | None = None
    max_bytes: int | None = None


def latest(held: Sequence[RingExtent]) -> Offsets:
    """The end of every stream: the next frame that will be published."""
    return Offsets({stream: Position(epochs[-1].epoch, epochs[-1].end) for stream, epochs in _by_stream(held).items()})


def earliest(held: Sequence[RingExtent]) -> Offsets:
    """The oldest frame that a ring still has, per stream."""
    found = {}
    for stream, epochs in _by_stream(held).items():
        oldest = next((epoch for epoch in epochs if epoch.end > epoch.first), epochs[-1])
        found[stream] = Position(oldest.epoch, oldest.first)
    return Offsets(found)


def cut(held: Sequence[RingExtent], target: Offsets) -> list[RingExtent]:
    """What was there when a target was set: nothing beyond it."""
    found = []
    for part in held:
        stop = target.positions.get(part.stream_id)
        if stop is None or part.epoch < stop.epoch:
            found.append(part)
        elif part.epoch == stop.epoch:
            end = min(part.end, stop.seq)
            found.append(RingExtent(part.stream_id, part.epoch, min(part.first, end), end, part.frame_bytes))
    return found


def ahead(start: Offsets, held: Sequence[RingExtent]) -> list[tuple[int, int, int]]:
    """Streams whose position lies in an epoch that never was: the stream, that epoch, and the newest one.

    Epochs grow, so the position is another deployment's.
    """
    found = []
    for stream, epochs in _by_stream(held).items():
        position = start.positions.get(stream)
        if position is not None and position.epoch > epochs[-1].epoch:
            found.append((stream, position.epoch, epochs[-1].epoch))
    return found


def advance(start: Offsets, held: Sequence[RingExtent], limits: Limits, *, joins_at_oldest: bool = False) -> Offsets:
    """Where the next batch ends: as far as the rings and the limits allow.

    The limits are shared in proportion to what each stream has waiting, and no stream that has some gets nothing.
    A stream without news keeps its position as it is; one that was not there before begins with its newest frame, or
    with `joins_at_oldest` with the oldest that its ring has.
    """
    positions = dict(start.positions)
    pending: dict[int, list[_PendingSpan]] = {}
    joining = earliest(held).positions if joins_at_oldest else {}
    for stream, epochs in _by_stream(held).items():
        begin = positions.get(stream, joining.get(stream))
        if begin is None:
            positions[stream] = Position(epochs[-1].epoch, epochs[-1].end)
        else:
            positions[stream] = begin
            pending[stream] = _pending_spans(begin, epochs)
    admitted = _admitted(pending, limits)
    for stream, spans in pending.items():
        if spans:
            is_known = stream in start.positions  # otherwise the path says where it began
            positions[stream] = _walk(positions[stream] if is_known else None, spans, admitted[stream])
    return Offsets(positions)


class _PendingSpan(msgspec.Struct, frozen=True):
    """What lies ahead in one epoch; `hi` is None for an epoch whose end the planner did not see."""

    epoch: int
    lo: int
    hi: int | None
    frame_bytes: int

    @property
    def frames(self) -> int:
        return 0 if self.hi is None else self.hi - self.lo


def _pending_spans(begin: Position, epochs: Sequence[RingExtent]) -> list[_PendingSpan]:
    """From a position on, epoch by epoch; nothing where there is no news."""
    pending: list[_PendingSpan] = []
    for held in epochs:
        if held.epoch < begin.epoch:
            continue
        at = begin.seq if held.epoch == begin.epoch else 0
        end = max(held.end, at)
        pending.append(_PendingSpan(held.epoch, min(max(at, held.first), end), end, held.frame_bytes))
    if not pending or (len(pending) == 1 and pending[0].epoch == begin.epoch and pending[0].hi == begin.seq):
        return []
    if pending[0].epoch != begin.epoch:
        pending.insert(0, _PendingSpan(begin.epoch, begin.seq, None, 0))
    for index in range(len(pending) - 1, 0, -1):
        if pending[index].epoch > pending[index - 1].epoch + 1:
            pending.insert(index, _PendingSpan(pending[index - 1].epoch + 1, 0, None, 0))
    return pending


def _walk(begin: Position | None, pending: Sequence[_PendingSpan], frames: int) -> Position:
    spans: list[EpochSpan] = []
    for part in pending:
        taken = min(frames, part.frames)
        frames -= taken
        spans.append(EpochSpan(part.epoch, part.lo, None if part.hi is None else part.lo + taken))
        if taken < part.frames:
            break
    last = spans[-1]
    assert last.hi is not None
    is_plain = len(spans) == 1 and begin is not None and (last.epoch, last.lo) == (begin.epoch, begin.seq)
    return Position(last.epoch, last.hi, () if is_plain else tuple(spans))


def _admitted(pending: Mapping[int, Sequence[_PendingSpan]], limits: Limits) -> dict[int, int]:
    """How many frames each stream may take."""
    waiting = {stream: sum(span.frames for span in spans) for stream, spans in pending.items()}
    total_frames = sum(waiting.values())
    total_bytes = sum(span.frames * max(span.frame_bytes, 1) for spans in pending.values() for span in spans)
    share = 1.0
    if limits.max_frames is not None and total_frames > limits.max_frames:
        share = limits.max_frames / total_frames
    if limits.max_bytes is not None and total_bytes > limits.max_bytes:
        share = min(share, limits.max_bytes / total_bytes)
    if share >= 1.0:
        return waiting
    admitted = {stream: min(count, max(1, int(count * share))) for stream, count in waiting.items()}
    # One frame for everybody may already be more than was allowed; then the largest shares give some back.
    if limits.max_frames is not None:
        busy = sum(1 for count in waiting.values() if count)
        excess = sum(admitted.values()) - max(limits.max_frames, busy)
        for stream in sorted(admitted, key=lambda key: -admitted[key]):
            given = max(0, min(excess, admitted[stream] - 1))
            admitted[stream] -= given
            excess -= given
    return admitted


def between(start: Offsets, end: Offsets) -> tuple[list[SeqRange], list[Loss]]:
    """The ranges of a batch, and what was lost on its way when it was planned. Follows from its ends alone."""
    ranges: list[SeqRange] = []
    losses: list[Loss] = []
    for stream, stop in sorted(end.positions.items()):
        begin = start.positions.get(stream)
        if begin is None and stop.path:  # it joined with this batch
            begin = Position(stop.path[0].epoch, stop.path[0].lo)
        if begin is None or begin == stop or (begin.epoch, begin.seq) == (stop.epoch, stop.seq):
            continue
        for part in _spans(begin, stop):
            at = begin.seq if part.epoch == begin.epoch else 0
            if part.hi is None:
                losses.append(Loss(stream, part.epoch, at, None, ENDED if part.epoch == begin.epoch else UNSEEN))
                continue
            if part.lo > at:
                losses.append(Loss(stream, part.epoch, at, part.lo, OVERWRITTEN))
            if part.hi > part.lo:
                ranges.append(SeqRange(stream, part.epoch, part.lo, part.hi))
    return ranges, losses


def _spans(begin: Position, stop: Position) -> list[EpochSpan]:
    if (begin.epoch, begin.seq) > (stop.epoch, stop.seq):
        return []
    spans = [part for part in stop.path if part.epoch >= begin.epoch]
    if not spans:
        at = begin.seq if begin.epoch == stop.epoch else 0
        spans = [EpochSpan(stop.epoch, at, stop.seq)]
    if spans[0].epoch != begin.epoch:
        if spans[0].epoch > begin.epoch + 1:
            spans.insert(0, EpochSpan(begin.epoch + 1, 0, None))
        spans.insert(0, EpochSpan(begin.epoch, begin.seq, None))
    return spans


def span(start: Offsets, end: Offsets) -> int:
    """How many frames lie between two offsets, read or lost, as far as anybody knows."""
    ranges, losses = between(start, end)
    return sum(part.frames for part in ranges) + sum(loss.frames or 0 for loss in losses)


def split(ranges: Sequence[SeqRange], parts: int) -> list[SeqRange]:
    """Cut ranges so that at least `parts` tasks have something to do, where there are enough frames."""
    total = sum(part.frames for part in ranges)
    if total == 0 or parts <= len(ranges):
        return list(ranges)
    pieces: list[SeqRange] = []
    for part in ranges:
        count = min(part.frames, max(1, -(-parts * part.frames // total)))
        edges = [part.lo + part.frames * index // count for index in range(count + 1)]
        pieces += [SeqRange(part.stream_id, part.epoch, lo, hi) for lo, hi in itertools.pairwise(edges)]
    return pieces


def grouped(ranges: Sequence[SeqRange], parts: int) -> list[list[SeqRange]]:
    """At most `parts` groups with about as many frames each; ranges of one stream and epoch keep their order."""
    groups: list[list[SeqRange]] = [[] for _ in range(min(parts, len(ranges)))]
    for part in sorted(ranges, key=lambda part: -part.frames):
        min(groups, key=lambda group: sum(other.frames for other in group)).append(part)
    return [sorted(group, key=msgspec.structs.astuple) for group in groups]


def _by_stream(held: Sequence[RingExtent]) -> dict[int, list[RingExtent]]:
    streams: dict[int, list[RingExtent]] = {}
    for part in sorted(held, key=lambda part: (part.stream_id, part.epoch)):
        streams.setdefault(part.stream_id, []).append(part)
    return streams
