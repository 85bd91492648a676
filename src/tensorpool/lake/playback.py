# SPDX-License-Identifier: Apache-2.0
"""Recorded frames in the order in which they were captured, read ahead of time. Needs no Spark.

A track is one stream: its files one after another, on one clock that never goes back. Where files overlap, their rows
are merged by seq.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import pyarrow as pa

from tensorpool.client.metadata import Metadata
from tensorpool.errors import ConfigError
from tensorpool.lake import Lake, LakeFile, RecordedAttribute, RecordedMetadata
from tensorpool.lake.payloads import payloads_of
from tensorpool.shm.arrays import Array
from tensorpool.wire.control import Attribute, DataSourceMeta

FOREIGN_CLOCK_NS: Final = 600_000_000_000  # a frame that is received so long after its capture has another clock
AHEAD_NS: Final = 1_000_000_000


class Recorded(msgspec.Struct, frozen=True):
    """A frame of a recording; `time_ns` is its moment on the track's clock."""

    epoch: int
    seq: int
    time_ns: int
    timestamp_ns: int | None
    meta_version: int
    trace_id: int | None
    dtype: str
    shape: tuple[int, ...]
    order: str
    nbytes: int
    payload: Array
    utc_ns: int | None = None

    @property
    def has_elements(self) -> bool:
        return math.prod(self.shape) > 0


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a recording: seqs, or nanoseconds since its first frame. The ends are not part of it."""

    from_seq: int | None = None
    to_seq: int | None = None
    from_ns: int | None = None
    to_ns: int | None = None

    def has_seq(self, seq: int) -> bool:
        return (self.from_seq is None or seq >= self.from_seq) and (self.to_seq is None or seq < self.to_seq)

    def is_over(self, since_ns: int) -> bool:
        return self.to_ns is not None and since_ns >= self.to_ns


class TrackClock:
    """Capture times as one line: where they go back, after a reboot or a change of the clock, time stands still.

    >>> clock = TrackClock(0)
    >>> [clock.advance(time_ns) for time_ns in (100, 130, 5, 15)]
    [100, 130, 130, 140]
    """

    def __init__(self, shift_ns: int) -> None:
        self._shift_ns = shift_ns
        self._raw_ns: int | None = None
        self._now_ns = 0

    def advance(self, raw_ns: int) -> int:
        self._now_ns = self._after(raw_ns)
        self._raw_ns = raw_ns
        return self._now_ns

    def pass_over(self, first_ns: int, last_ns: int, before_ns: int) -> bool:
        """Whether frames between two times lie before a moment; then the clock goes on as if they had been read."""
        end_ns = self._after(first_ns) + max(0, last_ns - first_ns)
        if end_ns >= before_ns:
            return False
        self._now_ns, self._raw_ns = end_ns, last_ns
        return True

    def _after(self, raw_ns: int) -> int:
        if self._raw_ns is None:
            return raw_ns + self._shift_ns
        return self._now_ns + max(0, raw_ns - self._raw_ns)


class Track:
    """A recorded stream. Raises ConfigError where it has no frames, or the span leaves none of them."""

    def __init__(self, lake: Lake, stream_id: int, span: Span) -> None:
        self.stream_id: Final = stream_id
        self._lake = lake
        self._span = span
        self._start_ns = 0
        self._clusters: Final = _clusters(lake.files(stream_id))
        earliest = next(self._rows(TrackClock(0), Span()), None)
        if earliest is None:
            raise ConfigError("--stream", stream_id, "a stream with frames")
        self._shift_ns = _shift(earliest)
        self.first_ns: Final = next(self._timed(Span())).time_ns
        self.first: Recorded

    def begin_at(self, start_ns: int) -> None:
        """Where the recording, of which this is one stream, begins."""
        self._start_ns = start_ns
        first = next(self.frames(), None)
        if first is None:
            bounds = msgspec.structs.asdict(self._span).items()
            text = ", ".join(f"{name}={value}" for name, value in bounds if value is not None)
            raise ConfigError("--from, --to", text, f"a span in which stream {self.stream_id} has frames")
        self.first = first

    def frames(self) -> Iterator[Recorded]:
        """Within the span, from its beginning."""
        span = self._span
        for frame in self._timed(span):
            since_ns = frame.time_ns - self._start_ns
            if span.is_over(since_ns):
                return
            if span.has_seq(frame.seq) and since_ns >= (span.from_ns or 0):
                yield frame

    def _timed(self, span: Span) -> Iterator[Recorded]:
        clock = TrackClock(self._shift_ns)
        for row in self._rows(clock, span):
            stamp_ns = row["timestamp_ns"]
            raw_ns = row["received_ns"] - self._shift_ns if stamp_ns is None else stamp_ns
            yield Recorded(
                row["epoch"],
                row["seq"],
                clock.advance(raw_ns),
                stamp_ns,
                row["meta_version"],
                row["trace_id"],
                row["dtype"],
                tuple(row["shape"]),
                row["order"],
                row["nbytes"],
                row["payload"],
                None if row["time"] is None else row["time"] * 1000,
            )

    def _rows(self, clock: TrackClock, span: Span) -> Iterator[dict[str, Any]]:
        """Files that lie before the span are not read: by their seqs, or by their times where they have some."""
        skip_before_ns = None if span.from_ns is None else self._start_ns + span.from_ns
        for cluster in self._clusters:
            if skip_before_ns is not None and _passes(clock, cluster, skip_before_ns):
                continue
            skip_before_ns = None
            wanted = [file for file in cluster if _overlaps(span, file.lo, file.hi)]
            rows = [_rows_of_file(self._lake, file, span) for file in wanted]
            yield from heapq.merge(*rows, key=lambda row: int(row["seq"]))


def _passes(clock: TrackClock, cluster: Sequence[LakeFile], before_ns: int) -> bool:
    """Whether a file need not be read: it has times, and they lie before the moment."""
    first_ns, last_ns = cluster[0].first_timestamp_ns, cluster[0].last_timestamp_ns
    if len(cluster) > 1 or first_ns is None or last_ns is None:
        return False
    return clock.pass_over(first_ns, last_ns, before_ns)


def _overlaps(span: Span, lo: int, hi: int) -> bool:
    return (span.from_seq is None or hi > span.from_seq) and (span.to_seq is None or lo < span.to_seq)


def _shift(row: dict[str, Any]) -> int:
    """What makes a capture time comparable to other streams': nothing, unless it is of another clock than ours."""
    stamp_ns, received_ns = row["timestamp_ns"], row["received_ns"]
    if stamp_ns is None or -AHEAD_NS <= received_ns - stamp_ns <= FOREIGN_CLOCK_NS:
        return 0
    return int(received_ns - stamp_ns)


def _clusters(files: Sequence[LakeFile]) -> list[list[LakeFile]]:
    """Files that share seqs, together; one after another."""
    found: list[list[LakeFile]] = []
    ends: tuple[int, int] = (-1, -1)
    for file in files:
        if found and (file.epoch, file.lo) < ends:
            found[-1].append(file)
        else:
            found.append([file])
        ends = max(ends, (file.epoch, file.hi))
    return found


def _rows_of_file(lake: Lake, file: LakeFile, span: Span) -> Iterator[dict[str, Any]]:
    with lake.open_parquet(file.path) as parquet:
        for group in range(parquet.num_row_groups):
            if not _may_have(parquet, group, span):
                continue
            for batch in parquet.read_row_group(group, columns=_COLUMNS).to_batches():
                yield from (row | {"epoch": file.epoch} for row in _rows_of_batch(batch))


def _may_have(parquet: Any, group: int, span: Span) -> bool:
    """Whether seqs of the span can be in a row group, by its statistics."""
    metadata = parquet.metadata.row_group(group)
    for index in range(metadata.num_columns):
        column = metadata.column(index)
        if column.path_in_schema == "seq" and column.statistics is not None and column.statistics.has_min_max:
            return _overlaps(span, column.statistics.min, column.statistics.max + 1)
    return True


_COLUMNS: Final = [
    "seq", "time", "timestamp_ns", "received_ns", "meta_version", "trace_id",
    "dtype", "shape", "order", "nbytes", "payload",
]  # fmt: skip


def _rows_of_batch(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    times = batch.column("time").cast(pa.int64())
    slim = batch.set_column(batch.schema.get_field_index("time"), "time", times).drop_columns(["payload"]).to_pylist()
    for row, payload in zip(slim, payloads_of(batch), strict=True):
        yield row | {"payload": payload}


class Prefetch:
    """Reads a track ahead on a thread of its own, up to so many bytes."""

    def __init__(self, track: Track, budget_bytes: int) -> None:
        self._track = track
        self._budget_bytes = budget_bytes
        self._frames: deque[Recorded] = deque()
        self._held_bytes = 0
        self._is_over = False
        self._is_closed = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"tensorpool-read-{track.stream_id}", daemon=True)

    def wait_ready(self, timeout: float) -> bool:
        """Whether there is something to play, or nothing more to come."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._frames) or self._is_over, timeout)

    def __iter__(self) -> Iterator[Recorded]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._frames or self._is_over)
                if not self._frames:
                    if self._failure is not None:
                        raise self._failure
                    return
                frame = self._frames.popleft()
                was_full = self._held_bytes > self._budget_bytes
                self._held_bytes -= frame.nbytes
                if was_full:
                    self._changed.notify_all()
            yield frame

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            for frame in self._track.frames():
                with self._changed:
                    self._changed.wait_for(lambda: self._held_bytes <= self._budget_bytes or self._is_closed)
                    if self._is_closed:
                        return
                    self._frames.append(frame)
                    self._held_bytes += frame.nbytes
                    self._changed.notify_all()
        except BaseException as failure:
            self._failure = failure
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()


class MetadataHistory:
    """What was said about a stream's frames, and when."""

    def __init__(self, tellings: Sequence[RecordedMetadata]) -> None:
        self._by_version: dict[int, list[RecordedMetadata]] = defaultdict(list)
        for one in sorted(tellings, key=lambda one: one.timestamp_ns or 0):
            self._by_version[one.meta_version].append(one)

    def of(self, meta_version: int, at_ns: int) -> RecordedMetadata | None:
        """Of a frame's version; where a restarted producer published it anew, the last before the frame's time."""
        tellings = self._by_version.get(meta_version)
        if not tellings:
            return None
        earlier = [one for one in tellings if (one.timestamp_ns or 0) <= at_ns]
        return earlier[-1] if earlier else tellings[0]

    def metadata(self, meta_version: int, at_ns: int) -> Metadata | None:
        """The same, as frames show it."""
        found = self.of(meta_version, at_ns)
        if found is None:
            return None
        attributes = tuple(Attribute(key=one.key, format=one.format, value=one.value) for one in found.attributes)
        return Metadata.of(
            DataSourceMeta(
                stream_id=found.stream_id,
                meta_version=meta_version,
                timestamp_ns=found.timestamp_ns or 0,
                attributes=attributes,
            )
        )


def recorded_metadata(lake: Lake, stream_id: int) -> MetadataHistory:
    """Everything that a lake has of a stream's metadata."""
    found: dict[tuple[int, int | None], dict[str, RecordedAttribute]] = defaultdict(dict)
    for file in lake.tables("metadata"):
        for row in lake.open_parquet(file.path).read().to_pylist():
            if row["stream_id"] == stream_id and row["key"] is not None:
                attribute = RecordedAttribute(row["key"], row["format"], row["value"])
                found[row["meta_version"], row["timestamp_ns"]][row["key"]] = attribute
    return MetadataHistory(
        [
            RecordedMetadata(stream_id, version, None, stamp_ns, tuple(attributes.values()))
            for (version, stamp_ns), attributes in found.items()
        ]
    )
