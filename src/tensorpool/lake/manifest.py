# SPDX-License-Identifier: Apache-2.0
"""What a lake holds, as its Delta log says it. Holds no clock and does no IO.

    add       a file of frames: stream and epoch are its partition, frames and seqs its statistics, and the tag
              `tensorpool` says which seqs it accounts for and what is missing inside and beside it
    txn       "<query>" → the last batch that was committed; "<stream>/<epoch>" → behind the last seq that was recorded
    remove    a file that was compacted (`dataChange` false) or retained no more (true)

Everything that counts is in actions that checkpoints keep: entries can be forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, get_args

import msgspec

from tensorpool._core import MAX_SEQ
from tensorpool.lake.delta_log import Action, AddFile, CommitInfo, RemoveFile, Txn
from tensorpool.lake.offsets import SeqRange
from tensorpool.lake.snapshot import Snapshot

# Reasons of gaps whose `hi` equals `lo`, because it is not known how many frames they are, if any.
UNKNOWN_TAIL: Final = "UNKNOWN_TAIL"  # the recorder did not see where the epoch ended
UNSEEN_EPOCHS: Final = "UNSEEN_EPOCHS"  # epochs from this one on came and went between two batches

TAG: Final = "tensorpool"

type Kind = Literal["record", "write", "compact", "retain"]

OPERATIONS: Final[dict[Kind, str]] = {
    "record": "STREAMING UPDATE",
    "write": "WRITE",
    "compact": "OPTIMIZE",
    "retain": "DELETE",
}
_KINDS: Final = get_args(Kind.__value__)
_EPOCH: Final = re.compile(r"(?P<stream>[0-9]+)/(?P<epoch>[0-9]+)")


class Gap(msgspec.Struct, frozen=True):
    """Frames that are missing: `lo` up to, not including, `hi`."""

    stream_id: int
    epoch: int
    lo: int
    hi: int
    reason: str


class LakeFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file of frames of one epoch, sorted by seq.

    A recorded file accounts for every seq from `lo` up to, not including, `hi`: it is there, or in a gap. Of one that
    was written from rows only the bounds are known. A file without frames tells of gaps only.
    """

    path: str  # relative to the lake
    stream_id: int
    epoch: int
    lo: int
    hi: int
    frames: int
    bytes: int  # of the file
    first_timestamp_ns: int | None = None
    last_timestamp_ns: int | None = None
    payload_bytes: int = 0
    is_recorded: bool = True
    written_ns: int = 0  # wall clock; what was compacted is as old as what went into it
    first_time_us: int | None = None  # UTC, of the column `time`
    last_time_us: int | None = None
    first_seq: int | None = None  # of the first and the last frame
    last_seq: int | None = None
    gaps: tuple[Gap, ...] = ()  # inside of it and beside it

    @property
    def key(self) -> tuple[int, int, int, int, str]:
        return self.stream_id, self.epoch, self.lo, self.hi, self.path


class TableFile(msgspec.Struct, frozen=True):
    """A file of rows of another table: metadata, qos."""

    path: str  # relative to the lake
    rows: int
    bytes: int
    written_ns: int


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a lake: what it brought. `query` and `batch` say whose doing it was, where a batch can come again.

    Files that took the place of others hold nothing new, and are not among `added`.
    """

    number: int = 0
    kind: str = ""
    time_ns: int = 0  # wall clock
    query: str = ""
    batch: int = -1
    added: tuple[LakeFile, ...] = ()
    removed: tuple[str, ...] = ()

    @property
    def gaps(self) -> tuple[Gap, ...]:
        return tuple(gap for file in self.added for gap in file.gaps)


class State:
    """What a lake holds after version `number`, read from a snapshot of its log.

    The snapshot may be that of an open log: files are those at the moment when they are first asked for.
    """

    def __init__(self, snapshot: Snapshot, known: Mapping[str, LakeFile] | None = None) -> None:
        self.number: Final = snapshot.version
        self._snapshot = snapshot
        self._known = known or {}
        self._files: dict[str, LakeFile] | None = None
        self._gaps: dict[str, list[Gap]] | None = None

    @property
    def table_id(self) -> str:
        return self._snapshot.table_id

    def followed_by(self, snapshot: Snapshot) -> State:
        """A later version of the same lake: what is known of its files is not read again."""
        return State(snapshot, self._files or self._known)

    @property
    def files(self) -> dict[str, LakeFile]:
        """The files of frames, by path."""
        if self._files is None:
            known = self._known
            self._files = {path: known.get(path) or file_of(add) for path, add in list(self._snapshot.files.items())}
            self._known = {}
        return self._files

    @property
    def gaps(self) -> dict[str, list[Gap]]:
        """By stream and epoch."""
        if self._gaps is None:
            found: dict[str, list[Gap]] = {}
            for file in self.files.values():
                for gap in file.gaps:
                    found.setdefault(epoch_key(gap.stream_id, gap.epoch), []).append(gap)
            self._gaps = {key: merged(gaps) for key, gaps in found.items()}
        return self._gaps

    @property
    def removed(self) -> Mapping[str, RemoveFile]:
        """Files that are part of the lake no more, and may still be on disk for readers of an earlier version."""
        return self._snapshot.removed

    @property
    def ends(self) -> dict[tuple[int, int], int]:
        """By stream and epoch: behind what was ever recorded, frames and gaps."""
        matches = ((_EPOCH.fullmatch(key), version) for key, version in list(self._snapshot.txns.items()))
        return {(int(key["stream"]), int(key["epoch"])): end for key, end in matches if key is not None}

    def end(self, stream_id: int, epoch: int) -> int:
        """Behind what was ever recorded of an epoch; 0 where nothing was."""
        return self._snapshot.txns.get(epoch_key(stream_id, epoch), 0)

    @property
    def batches(self) -> dict[str, int]:
        """By query: the last batch that was committed."""
        return {key: version for key, version in list(self._snapshot.txns.items()) if _EPOCH.fullmatch(key) is None}

    def last_batch(self, query: str) -> int:
        """The last batch of a query that was committed; -1 where none was."""
        return self._snapshot.txns.get(query, -1)

    def has_batch(self, query: str, batch: int) -> bool:
        return self.last_batch(query) >= batch

    def overlapping(self, file: LakeFile) -> LakeFile | None:
        """A recorded file that has some of the same frames."""
        if file.lo >= self.end(file.stream_id, file.epoch):
            return None  # the usual case: recordings go forward
        for other in self.files.values():
            is_same = other.stream_id == file.stream_id and other.epoch == file.epoch
            if is_same and other.is_recorded and other.lo < file.hi and file.lo < other.hi:
                return other
        return None


# --- files as actions


class _Tag(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a file says about itself beyond what Delta has a place for. A gap is [lo, hi, reason]."""

    lo: int
    hi: int
    written_ns: int
    payload_bytes: int = 0
    first_timestamp_ns: int | None = None
    last_timestamp_ns: int | None = None
    is_recorded: bool = True
    first_time_us: int | None = None
    last_time_us: int | None = None
    gaps: tuple[tuple[int, int, str], ...] = ()


class _Bounds(msgspec.Struct, frozen=True, omit_defaults=True):
    seq: int | None = None
    time: str | None = None


class _Stats(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    num_records: int = 0
    min_values: _Bounds = _Bounds()
    max_values: _Bounds = _Bounds()
    null_count: dict[str, object] = {}


_tags: Final = msgspec.json.Decoder(_Tag)
_stats: Final = msgspec.json.Decoder(_Stats)


def file_of(add: AddFile) -> LakeFile:
    """A file of the log. One that another writer added is known by its statistics, and as not recorded."""
    stats = _Stats() if add.stats is None else _stats.decode(add.stats)
    stream_id, epoch = (int(add.partition_values.get(name) or 0) for name in ("stream_id", "epoch"))
    text = None if add.tags is None else add.tags.get(TAG)
    if text is None:
        lo, last = stats.min_values.seq, stats.max_values.seq
        bounds = (0 if lo is None else lo, MAX_SEQ if last is None else last + 1)
        tag = _Tag(*bounds, add.modification_time * 1_000_000, is_recorded=False)
    else:
        tag = _tags.decode(text)
    return LakeFile(
        add.path,
        stream_id,
        epoch,
        tag.lo,
        tag.hi,
        stats.num_records,
        add.size,
        tag.first_timestamp_ns,
        tag.last_timestamp_ns,
        tag.payload_bytes,
        tag.is_recorded,
        tag.written_ns,
        tag.first_time_us,
        tag.last_time_us,
        stats.min_values.seq,
        stats.max_values.seq,
        tuple(Gap(stream_id, epoch, *gap) for gap in tag.gaps),
    )


def add_of(file: LakeFile, now_ns: int, *, is_new: bool = True) -> AddFile:
    """A file for the log. `is_new`: its rows are, and are not just those of files that go."""
    tag = _Tag(
        file.lo,
        file.hi,
        file.written_ns or now_ns,
        file.payload_bytes,
        file.first_timestamp_ns,
        file.last_timestamp_ns,
        file.is_recorded,
        file.first_time_us,
        file.last_time_us,
        tuple((gap.lo, gap.hi, gap.reason) for gap in merged(file.gaps)),
    )
    return AddFile(
        file.path,
        {"stream_id": str(file.stream_id), "epoch": str(file.epoch)},
        file.bytes,
        now_ns // 1_000_000,
        is_new,
        msgspec.json.encode(_stats_of(file)).decode(),
        {TAG: msgspec.json.encode(tag).decode()},
    )


def _stats_of(file: LakeFile) -> _Stats:
    if not file.frames:
        return _Stats()
    first, last = file.first_time_us, file.last_time_us
    nulls: dict[str, object] = {"seq": 0}
    if first is None or last is None:
        nulls["time"] = file.frames
        times: tuple[str | None, str | None] = None, None
    else:
        times = _iso_ms(first // 1000), _iso_ms(-(-last // 1000))  # whole milliseconds, that no row lies beyond
    first_seq = file.lo if file.first_seq is None else file.first_seq
    last_seq = file.hi - 1 if file.last_seq is None else file.last_seq
    return _Stats(file.frames, _Bounds(first_seq, times[0]), _Bounds(last_seq, times[1]), nulls)


def _iso_ms(time_ms: int) -> str:
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)
    return at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{time_ms % 1000:03d}Z"


def remove_of(file: LakeFile, now_ns: int, *, is_new: bool) -> RemoveFile:
    """A file that goes. `is_new`: its rows go with it, and are not just in another file from now on."""
    values: dict[str, str | None] = {"stream_id": str(file.stream_id), "epoch": str(file.epoch)}
    return RemoveFile(file.path, now_ns // 1_000_000, is_new, True, values, file.bytes)


def positions_of(files: Iterable[LakeFile], state: State) -> list[Txn]:
    """How far the recordings of epochs are when these files are recorded."""
    ends: dict[tuple[int, int], int] = {}
    for file in files:
        if file.is_recorded:
            key = file.stream_id, file.epoch
            known = max(ends.get(key, 0), state.end(*key))
            ends[key] = max(known, file.hi, *(gap.hi for gap in file.gaps))
    return [Txn(epoch_key(*key), end) for key, end in ends.items()]


def rows_of(add: AddFile) -> int:
    """How many rows a file has, by its statistics; 0 where its writer kept none."""
    return 0 if add.stats is None else _stats.decode(add.stats).num_records


def commit_of(number: int, actions: Iterable[Action]) -> Commit:
    """What a version of the log brought."""
    info = CommitInfo()
    added, removed = [], []
    for action in actions:
        match action:
            case CommitInfo():
                info = action
            case AddFile(data_change=True):
                added.append(file_of(action))
            case RemoveFile():
                removed.append(action.path)
            case _:
                pass
    about = info.operation_parameters
    kind, batch = str(about.get("kind", "")), str(about.get("batch", ""))
    return Commit(
        number=number,
        kind=kind if kind in _KINDS else "",
        time_ns=info.timestamp * 1_000_000,
        query=str(about.get("query", "")),
        batch=int(batch) if batch.isdecimal() else -1,
        added=tuple(added),
        removed=tuple(removed),
    )


def with_gaps(
    files: Sequence[LakeFile], gaps: Iterable[Gap]
) -> tuple[list[LakeFile], dict[tuple[int, int], list[Gap]]]:
    """Files with the gaps inside and beside them; and those, by stream and epoch, that no file is there to tell of."""
    found: dict[int, list[Gap]] = {}
    alone: dict[tuple[int, int], list[Gap]] = {}
    for gap in gaps:
        own = [
            index
            for index, file in enumerate(files)
            if file.is_recorded and (file.stream_id, file.epoch) == (gap.stream_id, gap.epoch)
        ]
        if not own:
            alone.setdefault((gap.stream_id, gap.epoch), []).append(gap)
            continue
        before = [index for index in own if files[index].lo <= gap.lo]
        best = max(before, key=lambda index: files[index].lo) if before else min(own, key=lambda at: files[at].lo)
        found.setdefault(best, []).append(gap)
    inside = [
        msgspec.structs.replace(file, gaps=tuple(merged([*file.gaps, *found.get(index, ())])))
        for index, file in enumerate(files)
    ]
    return inside, alone


def epoch_key(stream_id: int, epoch: int) -> str:
    return f"{stream_id}/{epoch}"


def merged(gaps: Iterable[Gap], more: Iterable[Gap] = ()) -> list[Gap]:
    """Sorted, neighbours of the same reason made one, nothing twice."""
    found: list[Gap] = []
    for gap in sorted({*gaps, *more}, key=msgspec.structs.astuple):
        last = found[-1] if found else None
        is_next = (
            last is not None
            and (last.stream_id, last.epoch, last.hi, last.reason) == (gap.stream_id, gap.epoch, gap.lo, gap.reason)
            and gap.hi > gap.lo
        )
        if last is not None and is_next and last.hi > last.lo:
            found[-1] = msgspec.structs.replace(last, hi=gap.hi)
        else:
            found.append(gap)
    return found


def unexplained(files: Iterable[LakeFile], gaps: Iterable[Gap]) -> list[SeqRange]:
    """What no recorded file and no gap accounts for, between the first and the last seq of every epoch."""
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for file in files:
        if file.is_recorded:
            spans.setdefault((file.stream_id, file.epoch), []).append((file.lo, file.hi))
    for gap in gaps:
        spans.setdefault((gap.stream_id, gap.epoch), []).append((gap.lo, gap.hi))
    holes = []
    for (stream_id, epoch), parts in sorted(spans.items()):
        parts.sort()
        end = parts[0][0]
        for lo, hi in parts:
            if lo > end:
                holes.append(SeqRange(stream_id, epoch, end, lo))
            end = max(end, hi)
    return holes


def missing_inside(file: LakeFile, gaps: Iterable[Gap]) -> int:
    """How many seqs of a recorded file neither it nor a gap has; below 0: more gaps than there is room for."""
    explained = sum(max(0, min(gap.hi, file.hi) - max(gap.lo, file.lo)) for gap in gaps)
    return file.hi - file.lo - file.frames - explained
