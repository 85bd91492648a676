# SPDX-License-Identifier: Apache-2.0
"""A lake: a Delta table of recorded frames. Needs no Spark.

Reading is safe at any time, also while others write. Files that are written become part of the lake with one entry of
its log.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from tensorpool.errors import ConfigError
from tensorpool.lake import delta_log, layout
from tensorpool.lake.columns import CONTROL_PLANE, FRAMES, delta_columns
from tensorpool.lake.delta_log import Action, AddFile, RemoveFile, Txn
from tensorpool.lake.errors import LakeDamaged
from tensorpool.lake.log_store import LocalStore, LogStore, open_store, sync_directory
from tensorpool.lake.manifest import (
    OPERATIONS,
    Commit,
    Gap,
    Kind,
    LakeFile,
    State,
    TableFile,
    add_of,
    commit_of,
    epoch_key,
    positions_of,
    remove_of,
    rows_of,
)
from tensorpool.lake.snapshot import Snapshot
from tensorpool.lake.table_log import TableLog, now_ms

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

PARTITION: Final = ("stream_id", "epoch")
PROPERTIES: Final = {
    layout.VERSION_KEY: layout.VERSION,
    "delta.dataSkippingStatsColumns": "seq,time",
    "delta.logRetentionDuration": "interval 7 days",
}


class Change(msgspec.Struct, frozen=True):
    """What a commit does to a lake: files that come and go."""

    added: tuple[LakeFile, ...] = ()
    removed: tuple[LakeFile, ...] = ()


class RecordedMetadata(msgspec.Struct, frozen=True):
    """What was said about a stream's frames from one meta_version on."""

    stream_id: int
    meta_version: int
    name: str | None
    timestamp_ns: int | None
    attributes: tuple[RecordedAttribute, ...]


class RecordedAttribute(msgspec.Struct, frozen=True):
    key: str
    format: str
    value: bytes


class Lake:
    """Frames on disk.

    >>> lake = Lake.open("/data/lake")                       # doctest: +SKIP
    >>> sum(file.frames for file in lake.files(10000))       # doctest: +SKIP
    3600
    """

    def __init__(self, store: LogStore) -> None:
        self.store: Final = store
        self.uri: Final = store.uri  # as Delta readers take it
        # Where staged files, checkpoints of recordings and their locks are: in a local lake, or beside the bucket.
        self.path: Final = store.root if isinstance(store, LocalStore) else _spool(store.uri)
        self.log: Final = TableLog(store)
        self._tables: dict[str, TableLog] = {}
        self._state: State | None = None

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Raises ConfigError where there is no lake, LakeDamaged where its log cannot be read."""
        lake = cls(open_store(path))
        lake._refuse_old()
        if not lake.log.exists():
            raise ConfigError("lake", str(path), f"a directory with a {delta_log.FOLDER}; record to it first")
        metadata = lake.log.snapshot().metadata
        version = None if metadata is None else metadata.configuration.get(layout.VERSION_KEY)
        if version is None:
            raise ConfigError("lake", str(path), "a lake of tensorpool, not another Delta table")
        if version != layout.VERSION:
            raise ConfigError("lake", str(path), f"a lake of version {layout.VERSION}, not {version}")
        return lake

    @classmethod
    def create(cls, path: Path | str) -> Self:
        """Open a lake, made first where there is none.

        Raises ConfigError for a directory that holds something else, or a file system without hard links.
        """
        lake = cls(open_store(path))
        lake._refuse_old()
        if not lake.log.exists():
            lake._create()
        for name in layout.WORK_FOLDERS:
            (lake.path / name).mkdir(parents=True, exist_ok=True)
        return cls.open(path)

    def __repr__(self) -> str:
        known = self._state  # reads nothing: the log may be far away
        if known is None:
            return f"<Lake {self.uri}>"
        files = known.files.values()
        streams, frames = len({file.stream_id for file in files}), sum(file.frames for file in files)
        held = f"{frames} frames of {streams} stream{'' if streams == 1 else 's'}"
        return f"<Lake {self.uri}, version {known.number}: {held}>"

    def _create(self) -> None:
        if isinstance(self.store, LocalStore):
            root = self.store.root
            try:
                root.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise ConfigError("lake", self.uri, "a directory") from None
            ours = (delta_log.FOLDER, layout.TABLES, *layout.WORK_FOLDERS)
            others = [name for name in os.listdir(root) if name not in ours and not name.startswith(".")]
            if others and not self.log.exists():
                raise ConfigError("lake", self.uri, f"a lake, or an empty directory: it has {sorted(others)[0]!r}")
            (root / delta_log.FOLDER).mkdir(exist_ok=True)
            sync_directory(root.parent)
        elif any(True for _ in self.store.walk("")) and not self.log.exists():
            raise ConfigError("lake", self.uri, "a lake, or a place without objects")
        self.log.append(_creation(FRAMES, PARTITION, PROPERTIES), "CREATE TABLE")
        if isinstance(self.store, LocalStore):
            sync_directory(self.store.root)

    def _refuse_old(self) -> None:
        if isinstance(self.store, LocalStore) and (self.store.root / layout.OLD_MARK).exists():
            old = f"a Delta table: this has a {layout.OLD_MARK}, of a format that was never released"
            raise ConfigError("lake", self.uri, old)

    @property
    def state(self) -> State:
        """Everything, as of now; not to be changed."""
        snapshot = self.log.snapshot()
        known = self._state
        if known is None or known.table_id != snapshot.table_id:
            self._state = State(snapshot)
        elif known.number != snapshot.version:
            self._state = known.followed_by(snapshot)
        assert self._state is not None
        return self._state

    def state_at(self, number: int) -> State:
        """As it was after a version. Raises LakeDamaged where the log does not reach back so far."""
        return State(self.log.snapshot_at(number))

    def commit(self, number: int) -> Commit:
        """What a version brought. Raises LakeDamaged where its entry is not there any more."""
        return commit_of(number, self.log.entry(number))

    def append(
        self, kind: Kind, make: Callable[[State], Change | None], *, query: str = "", batch: int = -1
    ) -> Commit | None:
        """Add a version of what `make` makes of the present state; it is asked again when another was first.

        None: `make` found that there is nothing to do. A query's batch is remembered with it, and so is how far the
        recordings of its streams are.
        """
        moves_rows = kind != "compact"

        def actions(snapshot: Snapshot) -> list[Action] | None:
            state = State(snapshot)
            change = make(state)
            if change is None:
                return None
            now_ns = time.time_ns()
            found: list[Action] = [Txn(query, batch, now_ns // 1_000_000)] if query else []
            if moves_rows:
                found += positions_of(change.added, state)
            found += [remove_of(file, now_ns, is_new=moves_rows) for file in change.removed]
            found += [add_of(file, now_ns, is_new=moves_rows) for file in change.added]
            return found

        about = {"kind": kind} | ({"query": query, "batch": str(batch)} if query else {})
        version = self.log.append(actions, OPERATIONS[kind], **about)
        return None if version < 0 else self.commit(version)

    def streams(self) -> list[int]:
        """The ids of the streams that have frames or gaps."""
        state = self.state
        return sorted({file.stream_id for file in state.files.values()})

    def files(self, stream_id: int | None = None, epoch: int | None = None) -> list[LakeFile]:
        """The files that have frames, by stream, epoch and seq."""
        return [file for file in files_of(self.state, stream_id, epoch) if file.frames]

    def gaps(self, stream_id: int | None = None, epoch: int | None = None) -> list[Gap]:
        """What is missing and why, by stream, epoch and seq."""
        return gaps_of(self.state, stream_id, epoch)

    def tables(self, table: str) -> list[TableFile]:
        """The files of another table, oldest first."""
        log = self.table_log(table)
        return table_files(table, log.snapshot().files.values()) if log.exists() else []

    def table_log(self, table: str) -> TableLog:
        """The log of another table, which may not be there yet."""
        log = self._tables.get(table)
        if log is None:
            log = self._tables[table] = TableLog(self.store.child(layout.table_folder(table)))
        return log

    def append_rows(self, table: str, source: Path, rows: int) -> None:
        """Make a copy of a local file part of another table."""
        log = self.table_log(table)
        if not log.exists():
            if isinstance(log.store, LocalStore):
                (log.store.root / delta_log.FOLDER).mkdir(parents=True, exist_ok=True)
            log.append(_creation(CONTROL_PLANE[table], (), {}), "CREATE TABLE")
        log.store.place({source.name: source})
        stats = msgspec.json.encode({"numRecords": rows}).decode()
        add = AddFile(source.name, {}, source.stat().st_size, now_ms(), True, stats)
        log.append(lambda _: [add], "WRITE")

    def remove_rows(self, table: str, files: Sequence[TableFile]) -> None:
        """Take files out of another table."""
        prefix = layout.table_folder(table) + "/"
        names = [file.path.removeprefix(prefix) for file in files]

        def actions(snapshot: Snapshot) -> list[Action] | None:
            found: list[Action] = [
                RemoveFile(name, now_ms(), True, True, {}, snapshot.files[name].size)
                for name in names
                if name in snapshot.files
            ]
            return found or None

        if names:
            self.table_log(table).append(actions, "DELETE")

    def metadata(self, stream_id: int) -> list[RecordedMetadata]:
        """What was recorded of a stream's metadata, by version; of a version that was sent again, the last."""
        names: dict[int, str | None] = {}
        stamps: dict[int, int | None] = {}
        attributes: dict[int, dict[str, RecordedAttribute]] = {}
        for row in self._rows("metadata"):
            if row["stream_id"] != stream_id:
                continue
            version = row["meta_version"]
            known = attributes.setdefault(version, {})
            if row["kind"] == "source":
                names[version] = row["name"]
            else:
                if stamps.get(version) not in (None, row["timestamp_ns"]):
                    known.clear()
                stamps[version] = row["timestamp_ns"]
                known[row["key"]] = RecordedAttribute(row["key"], row["format"], row["value"])
        return [
            RecordedMetadata(stream_id, version, names.get(version), stamps.get(version), tuple(known.values()))
            for version, known in sorted(attributes.items())
        ]

    def names(self) -> dict[str, list[int]]:
        """The names under which streams were recorded, each with the ids that had it."""
        recorded = set(self.streams())
        found: dict[str, set[int]] = {}
        for row in self._rows("metadata"):
            if row["kind"] == "source" and row["name"] and row["stream_id"] in recorded:
                found.setdefault(row["name"], set()).add(row["stream_id"])
        return {name: sorted(ids) for name, ids in sorted(found.items())}

    def names_by_id(self) -> dict[int, str]:
        """Of each stream that has one, the name under which it was recorded."""
        return {stream_id: name for name, ids in self.names().items() for stream_id in ids}

    def resolve(self, streams: Sequence[int | str], key: str = "streams") -> tuple[int, ...]:
        """The ids of recorded streams that are given by id or by name.

        Raises ConfigError for `key`: of a stream that was not recorded with those that were, of a name that several
        had with their ids.
        """
        recorded, names = self.streams(), functools.cache(self.names)
        return tuple(stream_named(stream, recorded, names, key) for stream in streams)

    def full_path(self, path: str) -> Path:
        """Where a file of a local lake is. Raises LakeDamaged for a path that leads out of the lake."""
        self._check_inside(path)
        return (self.path / path).absolute()

    def source(self, path: str) -> Any:
        """A file of the log, as Parquet readers take it. Raises LakeDamaged where it is missing."""
        self._check_inside(path)
        try:
            return self.store.open(path)
        except FileNotFoundError:
            raise LakeDamaged(f"{self.uri}/{path}", "the log names this file, but it is missing") from None

    def open_parquet(self, path: str) -> pq.ParquetFile:
        """A file of the log. Raises LakeDamaged, with its name, where it is missing or no Parquet."""
        import pyarrow as pa
        import pyarrow.parquet as pq  # not needed by those who commit only, and slow to load

        try:
            # In a bucket a row group is one request, not one for each column.
            return pq.ParquetFile(self.source(path), pre_buffer=not isinstance(self.store, LocalStore))
        except (pa.ArrowInvalid, OSError) as error:
            raise LakeDamaged(f"{self.uri}/{path}", f"it is torn or no Parquet file ({error})") from None

    def read_frames(self, path: str, **how: Any) -> Iterator[pa.RecordBatch]:
        """The rows of a file of frames, as `files.read_frames` does it. Raises LakeDamaged."""
        from tensorpool.lake.files import read_frames

        return read_frames(f"{self.uri}/{path}", source=self.source(path), **how)

    def _check_inside(self, path: str) -> None:
        if os.path.isabs(path) or ".." in Path(path).parts or "://" in path:
            raise LakeDamaged(f"{self.uri}/{delta_log.FOLDER}", f"it names {path!r}, which is outside the lake")

    def _rows(self, table: str) -> Iterator[dict[str, Any]]:
        for file in self.tables(table):
            yield from self.open_parquet(file.path).read().to_pylist()


def stream_named(
    given: int | str, recorded: Sequence[int], names: Callable[[], Mapping[str, Sequence[int]]], key: str = "streams"
) -> int:
    """The id of a recorded stream; an id that came as text is an id. Raises ConfigError as `Lake.resolve` does."""
    stream = int(given) if isinstance(given, str) and given.isascii() and given.isdecimal() else given
    ids = names().get(stream, []) if isinstance(stream, str) else [stream] if stream in recorded else []
    if not ids:
        listed = _listed(recorded, names())
        raise ConfigError(key, given, f"a recorded stream: {listed or 'none, there is none in the lake'}")
    if len(ids) > 1:
        raise ConfigError(key, given, f"one of the ids that had this name: {', '.join(map(str, ids))}")
    return ids[0]


def _listed(recorded: Sequence[int], names: Mapping[str, Sequence[int]]) -> str:
    own = {stream: [name for name, ids in names.items() if stream in ids] for stream in recorded}
    return ", ".join(f"{' or '.join(own[stream])} ({stream})" if own[stream] else str(stream) for stream in recorded)


def _spool(uri: str) -> Path:
    """The local folder of a lake in a bucket; the same for every process of this user on this host."""
    home = os.environ.get("TENSORPOOL_SPOOL_DIR") or os.path.expanduser("~/.cache/tensorpool/spool")
    return Path(home).absolute() / hashlib.blake2b(uri.encode(), digest_size=12).hexdigest()


def _creation(
    columns: Mapping[str, str], partition: Sequence[str], properties: Mapping[str, str]
) -> Callable[[Snapshot], list[Action] | None]:
    """The first entry of a table, where there is none."""

    def actions(snapshot: Snapshot) -> list[Action] | None:
        if snapshot.version >= 0:
            return None
        return delta_log.new_table(
            delta_columns(columns), partition_by=partition, now_ms=now_ms(), properties=dict(properties)
        )

    return actions


def table_files(table: str, adds: Iterable[AddFile]) -> list[TableFile]:
    """Files of another table, oldest first."""
    folder = layout.table_folder(table)
    found = [
        TableFile(f"{folder}/{add.path}", rows_of(add), add.size, add.modification_time * 1_000_000) for add in adds
    ]
    return sorted(found, key=lambda file: (file.written_ns, file.path))


def files_of(state: State, stream_id: int | None = None, epoch: int | None = None) -> list[LakeFile]:
    """Of a state: the files of frames, by stream, epoch and seq."""
    found = [
        file for file in state.files.values() if stream_id in (None, file.stream_id) and epoch in (None, file.epoch)
    ]
    return sorted(found, key=lambda file: file.key)


def gaps_of(state: State, stream_id: int | None = None, epoch: int | None = None) -> list[Gap]:
    """Of a state: what is missing, by stream, epoch and seq."""
    if stream_id is not None and epoch is not None:
        return list(state.gaps.get(epoch_key(stream_id, epoch), []))
    found = [
        gap
        for gaps in state.gaps.values()
        for gap in gaps
        if stream_id in (None, gap.stream_id) and epoch in (None, gap.epoch)
    ]
    return sorted(found, key=lambda gap: (gap.stream_id, gap.epoch, gap.lo, gap.hi))
