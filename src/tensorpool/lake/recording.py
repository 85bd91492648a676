# SPDX-License-Identifier: Apache-2.0
"""Random access to a lake: recordings, their streams, and frames as numpy arrays. Needs no Spark.

A recording is the lake as it was when it was opened or refreshed; its streams, and slices of them, do not change.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import groupby
from typing import Any, Final, overload

import msgspec
import numpy as np
import pyarrow as pa

from tensorpool.client.metadata import NUMPY_DTYPE, Metadata
from tensorpool.errors import ConfigError
from tensorpool.lake.errors import NotRecorded
from tensorpool.lake.lake import Lake, files_of, gaps_of, stream_named
from tensorpool.lake.manifest import Gap, LakeFile
from tensorpool.lake.open_files import COLUMNS, OpenFiles, Rows, Times
from tensorpool.lake.payloads import array_of
from tensorpool.lake.playback import MetadataHistory, recorded_metadata
from tensorpool.looks.card import Card, card
from tensorpool.shm.arrays import Array
from tensorpool.shm.carried_dtypes import CarriedDtype, carried_named, is_carrier
from tensorpool.wire.control import Dtype

type Moment = str | datetime | np.datetime64

_FIELDS: Final = [name for name in COLUMNS if name not in ("time", "payload")]
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class RecordedFrame(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A frame of a recording. `array` is read-only; BIT frames show their packed bytes, as a live frame does."""

    stream_id: int
    epoch: int
    seq: int
    time: datetime | None  # UTC
    timestamp_ns: int | None
    received_ns: int
    meta_version: int
    trace_id: int | None
    wire_dtype: Dtype
    shape: tuple[int, ...]
    order: str
    dropped_before: int
    dropped_reason: str | None
    array: Array
    _find_metadata: Callable[[int, int], Metadata | None]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    @property
    def metadata(self) -> Metadata | None:
        """What was recorded about frames of its meta_version; None where nothing was."""
        at_ns = self.received_ns if self.timestamp_ns is None else self.timestamp_ns
        return self._find_metadata(self.meta_version, at_ns)

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> Array:
        return np.array(self.array, dtype, copy=copy)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.shape))
        at = "" if self.time is None else f", {_text(self.time)}"
        about = f"{self.wire_dtype.name} {shape}{at}"
        return f"<RecordedFrame {self.seq} of stream {self.stream_id}, epoch {self.epoch}: {about}>"

    def _repr_png_(self) -> bytes | None:
        """For notebooks: a picture of it; None where there can be none, or Pillow is not installed."""
        return self._card().png

    def _repr_html_(self) -> str:
        """For notebooks: what it is, above a picture of it."""
        return self._card().html

    def _card(self) -> Card:
        metadata = self.metadata
        return card(self, f"stream {self.stream_id}", None if metadata is None else metadata.attributes)


class _Bounds(msgspec.Struct, frozen=True):
    """Which frames a slice has; the ends are not part of it. Times in microseconds since 1970."""

    lo: int | None = None
    hi: int | None = None
    from_us: int | None = None
    to_us: int | None = None

    @property
    def has_times(self) -> bool:
        return self.from_us is not None or self.to_us is not None

    def within(self, other: _Bounds) -> _Bounds:
        return _Bounds(
            _tighter(max, self.lo, other.lo),
            _tighter(min, self.hi, other.hi),
            _tighter(max, self.from_us, other.from_us),
            _tighter(min, self.to_us, other.to_us),
        )

    def covers(self, file: LakeFile) -> bool:
        """Whether all frames of a file are inside, by what the log says of it."""
        return not self.has_times and _covers(self.lo, self.hi, file.lo, file.hi - 1)


class _Ends(msgspec.Struct, frozen=True, eq=False):
    """The first and last seqs and times of files as the log has them, to find those that a slice needs among many."""

    first_seqs: Rows
    last_seqs: Rows
    first_us: Rows
    last_us: Rows

    @classmethod
    def of(cls, files: Sequence[LakeFile]) -> _Ends:
        """Of a file whose times are not known, any are possible."""
        least, most = np.iinfo(np.int64).min, np.iinfo(np.int64).max
        return cls(
            np.array([file.lo for file in files], np.int64),
            np.array([file.hi - 1 for file in files], np.int64),
            np.array([least if file.first_time_us is None else file.first_time_us for file in files], np.int64),
            np.array([most if file.last_time_us is None else file.last_time_us for file in files], np.int64),
        )

    def overlapping(self, bounds: _Bounds) -> list[int]:
        """Which files can have frames inside."""
        found = np.ones(len(self.first_seqs), np.bool_)
        found &= True if bounds.lo is None else self.last_seqs >= bounds.lo
        found &= True if bounds.hi is None else self.first_seqs < bounds.hi
        found &= True if bounds.from_us is None else self.last_us >= bounds.from_us
        found &= True if bounds.to_us is None else self.first_us < bounds.to_us
        return [int(at) for at in np.flatnonzero(found)]


class RecordedStream:
    """The frames of one stream, or of a slice of it, by epoch and seq.

    >>> stream = tensorpool.open("/data/lake")["camera/front"]                     # doctest: +SKIP
    >>> stream[100].array, stream[100:200].numpy()                                 # doctest: +SKIP
    >>> stream.at("2026-11-16T10:00Z")                                             # doctest: +SKIP
    >>> for frame in stream["2026-11-16T10:00Z":"2026-11-16T10:05Z"]: ...          # doctest: +SKIP

    Seqs count within an epoch. Where there are frames of several, choose one before you ask for a seq:
    `stream.epoch(3)[100]`.
    """

    def __init__(self, source: _Source, files: Sequence[LakeFile], gaps: Sequence[Gap], bounds: _Bounds) -> None:
        self._source = source
        self._files = files
        self._gaps = gaps
        self._bounds = bounds

    @property
    def stream_id(self) -> int:
        return self._source.stream_id

    @property
    def name(self) -> str | None:
        """Under which it was recorded."""
        return self._source.name

    @cached_property
    def epochs(self) -> tuple[int, ...]:
        """That have frames here."""
        if self._bounds == _Bounds():  # then the log knows: no file is opened
            return tuple(dict.fromkeys(file.epoch for file in self._files if file.frames))
        return tuple(dict.fromkeys(file.epoch for file, _ in self._parts))

    @property
    def seqs(self) -> Rows:
        """Of all frames, in order. Reads no payloads."""
        found: Rows = self._joined(self._source.files.seqs, np.dtype(np.int64))
        return found

    @property
    def times(self) -> Times:
        """Of all frames, as datetime64 in UTC, NaT where the time is not known. Reads no payloads."""
        found: Times = self._joined(self._source.files.times, np.dtype("datetime64[us]"))
        return found

    def epoch(self, epoch: int) -> RecordedStream:
        """The frames of one epoch. Raises NotRecorded."""
        if epoch not in self.epochs:
            raise NotRecorded(f"{self._label} has no frames of epoch {epoch}, but of {_list(self.epochs)}")
        files = [file for file in self._files if file.epoch == epoch]
        return RecordedStream(self._source, files, [gap for gap in self._gaps if gap.epoch == epoch], self._bounds)

    def at(self, moment: Moment) -> RecordedFrame:
        """The newest frame captured at this moment or before. Text without a zone is UTC. Raises NotRecorded."""
        at_us = _micros(moment)
        best: tuple[int, LakeFile, int] | None = None
        parts = [part for part in self._parts if part[0].first_time_us is None or part[0].first_time_us <= at_us]
        parts.sort(key=lambda part: at_us if part[0].last_time_us is None else min(at_us, part[0].last_time_us))
        for file, rows in reversed(parts):
            if best is not None and file.last_time_us is not None and file.last_time_us < best[0]:
                continue
            times = self._source.files.times(file)[rows].astype(np.int64)
            early = np.flatnonzero((times <= at_us) & (times != np.iinfo(np.int64).min))
            if len(early):
                newest = early[np.flatnonzero(times[early] == times[early].max())[-1]]
                if best is None or times[newest] > best[0]:
                    best = int(times[newest]), file, int(rows[newest])
        if best is None:
            raise NotRecorded(f"{self._label} has no frame of {_text(_moment(at_us))} or before, by its times in UTC")
        return self._frame(best[1], best[2])

    def sample(self, count: int) -> list[RecordedFrame]:
        """Frames at even distances from the first to the last; all where there are not so many."""
        ends = np.cumsum([0, *(len(rows) for _, rows in self._parts)])
        wanted = np.unique(np.linspace(0, ends[-1] - 1, min(count, int(ends[-1]))).round().astype(np.int64))
        found = []
        for number in wanted:
            at = int(np.searchsorted(ends, number, side="right")) - 1
            file, rows = self._parts[at]
            found.append(self._frame(file, int(rows[number - ends[at]])))
        return found

    def gaps(self) -> list[Gap]:
        """What is missing between these frames and why, by epoch and seq."""
        bounds = self._bounds
        if not bounds.has_times:
            found = [gap for gap in self._gaps if _overlap(bounds.lo, bounds.hi, gap.lo, max(gap.lo, gap.hi - 1))]
            return [_cut(gap, bounds.lo, bounds.hi) for gap in found]
        spans = {epoch: (own.seqs[0], own.seqs[-1]) for epoch in self.epochs for own in [self.epoch(epoch)]}
        return [gap for gap in self._gaps if gap.epoch in spans and _covers(*spans[gap.epoch], gap.lo, gap.hi - 1)]

    def numpy(self) -> Array:
        """All frames as one array, the first axis being the frames. Raises ValueError where they differ in shape."""
        stacked: Array | None = None
        for number, frame in enumerate(self):
            if stacked is None:
                stacked = np.empty((len(self), *frame.array.shape), frame.array.dtype)
            if frame.array.shape != stacked.shape[1:] or frame.array.dtype != stacked.dtype:
                raise ValueError(
                    f"frame {frame.seq} of epoch {frame.epoch} is {frame.array.dtype} {frame.array.shape}, the frames "
                    f"before are {stacked.dtype} {stacked.shape[1:]}; stack frames of one shape"
                )
            stacked[number] = frame.array
        if stacked is None:
            raise ValueError(f"{self._label} has no frames here to stack")
        return stacked

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("frames of a recording are stacked by a copy")
        return self.numpy().astype(dtype, copy=False) if dtype is not None else self.numpy()

    def __len__(self) -> int:
        return sum(len(rows) for _, rows in self._parts)

    def __iter__(self) -> Iterator[RecordedFrame]:
        """The frames by epoch and seq; consecutive ones share the memory of their row group."""
        for _, cluster in groupby(_with_clusters(self._parts), key=lambda found: found[0]):
            parts = [part for _, part in cluster]
            if len(parts) == 1:
                yield from self._frames(*parts[0])
            else:
                yield from heapq.merge(*(self._frames(*part) for part in parts), key=lambda frame: frame.seq)

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, int) and self._find(seq) is not None

    @overload
    def __getitem__(self, key: int) -> RecordedFrame: ...
    @overload
    def __getitem__(self, key: slice) -> RecordedStream: ...
    def __getitem__(self, key: int | slice) -> RecordedFrame | RecordedStream:
        """A frame by its seq, or a slice by seqs or by times. Raises NotRecorded for a frame that is not there."""
        if isinstance(key, slice):
            return self._slice(key)
        if not isinstance(key, int | np.integer):
            raise TypeError(f"a seq, or a slice of seqs or of times, not {type(key).__name__}; for a moment use at()")
        found = self._find(int(key))
        if found is None:
            raise self._missing(int(key))
        return self._frame(*found)

    def __repr__(self) -> str:
        seqs = ""
        if len(self.epochs) == 1 and len(self):
            first, last = self._parts[0], self._parts[-1]
            ends = [self._source.files.seqs(file)[rows[at]] for (file, rows), at in ((first, 0), (last, -1))]
            seqs = f", seqs {ends[0]} to {ends[1]}"
        epochs = f"epoch {self.epochs[0]}" if len(self.epochs) == 1 else f"{len(self.epochs)} epochs"
        return f"<RecordedStream {self._label}: {len(self)} frames, {epochs}{seqs}>"

    @property
    def _label(self) -> str:
        return self._source.label

    @cached_property
    def _parts(self) -> list[tuple[LakeFile, Rows]]:
        """The files that have frames of the slice, each with its rows by seq."""
        found = []
        for file in self._files:
            rows = self._rows(file)
            if len(rows):
                found.append((file, rows))
        return found

    @cached_property
    def _ends(self) -> _Ends:
        return _Ends.of(self._files)

    def _rows(self, file: LakeFile) -> Rows:
        bounds, files = self._bounds, self._source.files
        if file.is_recorded and bounds.covers(file):
            return np.arange(file.frames, dtype=np.int64)
        seqs = files.seqs(file)
        wanted = np.ones(len(seqs), np.bool_)
        wanted &= True if bounds.lo is None else seqs >= bounds.lo
        wanted &= True if bounds.hi is None else seqs < bounds.hi
        if bounds.has_times:
            times = files.times(file)
            wanted &= ~np.isnat(times)
            wanted &= True if bounds.from_us is None else times.astype(np.int64) >= bounds.from_us
            wanted &= True if bounds.to_us is None else times.astype(np.int64) < bounds.to_us
        rows = np.flatnonzero(wanted)
        return rows[np.argsort(seqs[rows], kind="stable")]

    def _slice(self, key: slice) -> RecordedStream:
        ends = [end for end in (key.start, key.stop) if end is not None]
        if key.step is not None:
            raise TypeError("slices of a recording have no step")
        if all(isinstance(end, int | np.integer) for end in ends):
            if ends:
                self._check_one_epoch()
            low, high = (None if end is None else int(end) for end in (key.start, key.stop))
            bounds = _Bounds(low, high)
        elif all(isinstance(end, str | datetime | np.datetime64) for end in ends):
            start, stop = (None if end is None else _micros(end) for end in (key.start, key.stop))
            bounds = _Bounds(from_us=start, to_us=stop)
        else:
            raise TypeError(f"a slice by seqs or by times, not {key.start!r}:{key.stop!r}")
        files = [self._files[at] for at in self._ends.overlapping(bounds)]
        return RecordedStream(self._source, files, self._gaps, self._bounds.within(bounds))

    def _find(self, seq: int) -> tuple[LakeFile, int] | None:
        self._check_one_epoch()
        for index in self._ends.overlapping(_Bounds(seq, seq + 1)):
            file = self._files[index]
            rows = self._rows(file)
            own = self._source.files.seqs(file)[rows]
            at = int(np.searchsorted(own, seq))
            if at < len(own) and own[at] == seq:
                return file, int(rows[at])
        return None

    def _missing(self, seq: int) -> NotRecorded:
        own = self.seqs
        before, after = own[own < seq], own[own > seq]
        near = [str(int(found)) for found in (*before[-1:], *after[:1])]
        epoch = f", epoch {self.epochs[0]}," if self.epochs else ""
        gap = next((gap for gap in self._gaps if gap.epoch in self.epochs and gap.lo <= seq < gap.hi), None)
        reason = "" if gap is None else f": {gap.reason}, seqs {gap.lo} to {gap.hi - 1} are missing"
        nearest = f"; nearest: {' and '.join(near)}" if near else ""
        return NotRecorded(f"frame {seq} of {self._label}{epoch} is not here{reason}{nearest}")

    def _check_one_epoch(self) -> None:
        if len(self.epochs) > 1:
            raise NotRecorded(
                f"{self._label} has frames of epochs {_list(self.epochs)}, and seqs count within an epoch; "
                f"choose one, such as epoch({self.epochs[-1]})"
            )

    def _joined(self, column: Callable[[LakeFile], Any], dtype: np.dtype[Any]) -> Any:
        """A column of all frames, in the order of iteration."""
        found = [np.empty(0, dtype)]
        for _, cluster in groupby(_with_clusters(self._parts), key=lambda numbered: numbered[0]):
            parts = [part for _, part in cluster]
            values = np.concatenate([column(file)[rows] for file, rows in parts])
            if len(parts) > 1:
                seqs = np.concatenate([self._source.files.seqs(file)[rows] for file, rows in parts])
                values = values[np.argsort(seqs, kind="stable")]
            found.append(values)
        return np.concatenate(found)

    def _frames(self, file: LakeFile, rows: Rows) -> Iterator[RecordedFrame]:
        starts = self._source.files.starts(file)
        groups = np.searchsorted(starts, rows, side="right") - 1
        for group, members in groupby(range(len(rows)), key=lambda at: int(groups[at])):
            batch = self._source.files.group(file, group)
            for at in members:
                yield self._source.frame(file, batch, int(rows[at] - starts[group]))

    def _frame(self, file: LakeFile, row: int) -> RecordedFrame:
        """One frame, which owns its memory: kept, it does not keep the rest of its row group."""
        frame = next(self._frames(file, np.array([row])))
        own = frame.array.copy(order="K")
        own.flags.writeable = False
        return msgspec.structs.replace(frame, array=own)


class _Source:
    """What the slices of a stream share."""

    def __init__(self, lake: Lake, files: OpenFiles, stream_id: int, name: str | None) -> None:
        self._lake = lake
        self.files: Final = files
        self.stream_id: Final = stream_id
        self.name: Final = name

    @property
    def label(self) -> str:
        return f"stream {self.stream_id}" if self.name is None else f'stream "{self.name}" ({self.stream_id})'

    @cached_property
    def _metadata_history(self) -> MetadataHistory:
        return recorded_metadata(self._lake, self.stream_id)

    def metadata(self, meta_version: int, at_ns: int) -> Metadata | None:
        return self._metadata_history.metadata(meta_version, at_ns)

    def _carried(self, row_values: dict[str, Any]) -> CarriedDtype | None:
        """The dtype that a frame's payload stands for, by its metadata."""
        if not row_values["meta_version"] or not is_carrier(Dtype[row_values["dtype"]], row_values["shape"]):
            return None
        at_ns = row_values["received_ns"] if row_values["timestamp_ns"] is None else row_values["timestamp_ns"]
        found = self._metadata_history.of(row_values["meta_version"], at_ns)
        names = [one.value for one in (() if found is None else found.attributes) if one.key == NUMPY_DTYPE]
        return carried_named(names[0].decode(errors="replace")) if names else None

    def frame(self, file: LakeFile, batch: pa.RecordBatch, row: int) -> RecordedFrame:
        row_values = {name: batch.column(name)[row].as_py() for name in _FIELDS}
        payload = batch.column("payload")[row].as_buffer()
        array = array_of(
            b"" if payload is None else payload, row_values["dtype"], row_values["shape"], row_values["order"]
        )
        carried = self._carried(row_values)
        if carried is not None and carried.fits(Dtype[row_values["dtype"]], array.shape):
            array = carried.restore(array)
        else:
            carried = None
        array.flags.writeable = False
        at_us = batch.column("time")[row].value
        return RecordedFrame(
            stream_id=self.stream_id,
            epoch=file.epoch,
            seq=row_values["seq"],
            time=None if at_us is None else _moment(at_us),
            timestamp_ns=row_values["timestamp_ns"],
            received_ns=row_values["received_ns"],
            meta_version=row_values["meta_version"],
            trace_id=row_values["trace_id"],
            wire_dtype=Dtype[row_values["dtype"]],
            shape=tuple(row_values["shape"]) if carried is None else carried.shape_of(tuple(row_values["shape"])),
            order=row_values["order"],
            dropped_before=row_values["dropped_before"],
            dropped_reason=row_values["dropped_reason"],
            array=array,
            _find_metadata=self.metadata,
        )


class Recording(Mapping[str | int, RecordedStream]):
    """The recorded streams of a lake, by name or id; `tensorpool.open` makes one.

    Iteration gives names; of a stream without a name of its own, its id. Others may write to the lake meanwhile:
    `refresh()` shows what they committed, in streams that are taken from the recording afterwards.
    """

    def __init__(self, lake: Lake) -> None:
        self.lake: Final = lake
        self._files: Final = OpenFiles(lake)
        self.refresh()

    def refresh(self) -> None:
        """Show the lake as it is now. Streams that were taken before stay as they were."""
        state = self.lake.state
        self._state = state
        self._files.keep(state.files)
        files = groupby(files_of(state), key=lambda file: file.stream_id)
        self._by_stream = {stream_id: [file for file in own if file.frames] for stream_id, own in files}
        self._streams: dict[int, RecordedStream] = {}
        self._ids = self.lake.names()
        # Of several names of a stream the first.
        self._names = {ids[0]: name for name, ids in reversed(self._ids.items()) if len(ids) == 1}

    @property
    def version(self) -> int:
        """Of the lake, as a Delta table."""
        return self._state.number

    def __getitem__(self, stream: str | int) -> RecordedStream:
        """Raises NotRecorded, with the streams that are there."""
        try:
            stream_id = stream_named(stream, [*self._by_stream], lambda: self._ids)
        except ConfigError as error:
            raise NotRecorded(f"{self.lake.uri} has no stream {stream!r}; {error.accepted}") from None
        known = self._streams.get(stream_id)
        if known is not None:
            return known
        source = _Source(self.lake, self._files, stream_id, self._names.get(stream_id))
        made = RecordedStream(source, self._by_stream[stream_id], gaps_of(self._state, stream_id), _Bounds())
        self._streams[stream_id] = made
        return made

    def __iter__(self) -> Iterator[str | int]:
        return iter([self._names.get(stream_id, stream_id) for stream_id in self._by_stream])

    def __len__(self) -> int:
        return len(self._by_stream)

    def __repr__(self) -> str:
        return f"<Recording {self.lake.uri}, version {self.version}: {', '.join(map(repr, self)) or 'no streams'}>"


def _with_clusters(parts: Sequence[tuple[LakeFile, Rows]]) -> Iterator[tuple[int, tuple[LakeFile, Rows]]]:
    """Parts with a number that those share whose files overlap."""
    number, end = 0, (-1, -1)
    for part in parts:
        file = part[0]
        if (file.epoch, file.lo) >= end:
            number += 1
        end = max(end, (file.epoch, file.hi))
        yield number, part


def _micros(moment: Moment) -> int:
    """Since 1970. Raises ValueError for text that is no time."""
    if isinstance(moment, np.datetime64):
        return int(moment.astype("datetime64[us]").astype(np.int64))
    at = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    return ((at if at.tzinfo is not None else at.replace(tzinfo=UTC)) - EPOCH) // timedelta(microseconds=1)


def _moment(at_us: int) -> datetime:
    return EPOCH + timedelta(microseconds=at_us)


def _text(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")


def _list(epochs: Sequence[int]) -> str:
    return ", ".join(map(str, epochs)) or "none"


def _tighter(choose: Callable[[int, int], int], one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else choose(one, other)


def _overlap(lo: int | None, hi: int | None, first: int | None, last: int | None) -> bool:
    return (lo is None or last is None or last >= lo) and (hi is None or first is None or first < hi)


def _covers(lo: int | None, hi: int | None, first: int, last: int) -> bool:
    return (lo is None or first >= lo) and (hi is None or last < hi)


def _cut(gap: Gap, lo: int | None, hi: int | None) -> Gap:
    low = gap.lo if lo is None else max(lo, gap.lo)
    return msgspec.structs.replace(gap, lo=low, hi=max(low, gap.hi if hi is None else min(hi, gap.hi)))
