# SPDX-License-Identifier: Apache-2.0
"""A lake: a directory of recorded frames with a manifest. Needs no Spark.

Reading is safe at any time, also while others write. Whoever writes stages files first and commits them with one
manifest entry; until then they are no part of the lake.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from tensorpool.errors import ConfigError
from tensorpool.spark.lake import layout
from tensorpool.spark.lake.errors import LakeDamaged
from tensorpool.spark.lake.manifest import Gap, LakeFile, State, TableFile, epoch_key
from tensorpool.spark.lake.store import Store, sync_directory, write_once

if TYPE_CHECKING:
    import pyarrow.parquet as pq

_NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class _Mark(msgspec.Struct, frozen=True):
    format: str
    version: int


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

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self.store: Final = Store(path / layout.MANIFEST)

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Raises ConfigError where there is no lake, LakeDamaged where its manifest cannot be read."""
        root = Path(path).absolute()
        mark = root / layout.MARK
        try:
            data = mark.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError("lake", str(path), f"a directory with a {layout.MARK}; record to it first") from None
        try:
            found = msgspec.json.decode(data, type=_Mark)
        except msgspec.DecodeError as error:
            raise LakeDamaged(str(mark), f"it is torn ({error})") from None
        if found.format != layout.FORMAT or found.version != layout.VERSION:
            raise ConfigError(
                "lake",
                str(path),
                f"format {layout.FORMAT} of version {layout.VERSION}, not {found.format} {found.version}",
            )
        return cls(root)

    @classmethod
    def create(cls, path: Path | str) -> Self:
        """Open a lake, made first where there is none.

        Raises ConfigError for a directory that holds something else, or a file system without hard links.
        """
        root = Path(path).absolute()
        if not (root / layout.MARK).exists():
            try:
                root.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise ConfigError("lake", str(path), "a directory") from None
            others = [name for name in os.listdir(root) if name not in _OURS and not name.startswith(".")]
            if others and not (root / layout.MARK).exists():
                raise ConfigError("lake", str(path), f"a lake, or an empty directory: it has {sorted(others)[0]!r}")
            for name in (layout.MANIFEST, layout.STAGING, layout.TABLES, layout.CHECKPOINTS):
                (root / name).mkdir(exist_ok=True)
            try:
                write_once(root / layout.MARK, msgspec.json.encode(_Mark(layout.FORMAT, layout.VERSION)) + b"\n")
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                raise ConfigError("lake", str(path), f"a file system with hard links ({error})") from None
            sync_directory(root.parent)
        return cls.open(root)

    @property
    def state(self) -> State:
        """Everything, as of now; not to be changed."""
        return self.store.state()

    def streams(self) -> list[int]:
        """The ids of the streams that have frames or gaps."""
        state = self.state
        found = {file.stream_id for file in state.files.values()}
        return sorted(found | {gap.stream_id for gaps in state.gaps.values() for gap in gaps})

    def files(self, stream_id: int | None = None, epoch: int | None = None) -> list[LakeFile]:
        """The files of frames, by stream, epoch and seq."""
        return files_of(self.state, stream_id, epoch)

    def gaps(self, stream_id: int | None = None, epoch: int | None = None) -> list[Gap]:
        """What is missing and why, by stream, epoch and seq."""
        return gaps_of(self.state, stream_id, epoch)

    def tables(self, table: str) -> list[TableFile]:
        """The files of another table, oldest first."""
        found = [file for file in self.state.tables.values() if file.table == table]
        return sorted(found, key=lambda file: (file.commit, file.path))

    def metadata(self, stream_id: int) -> list[RecordedMetadata]:
        """What was recorded of a stream's metadata, by version; of a version that was told anew, the last."""
        names: dict[int, str | None] = {}
        stamps: dict[int, int | None] = {}
        attributes: dict[int, dict[str, RecordedAttribute]] = {}
        for row in self._rows("metadata"):
            if row["stream_id"] != stream_id:
                continue
            version = row["meta_version"]
            told = attributes.setdefault(version, {})
            if row["kind"] == "source":
                names[version] = row["name"]
            else:
                if stamps.get(version) not in (None, row["timestamp_ns"]):
                    told.clear()
                stamps[version] = row["timestamp_ns"]
                told[row["key"]] = RecordedAttribute(row["key"], row["format"], row["value"])
        return [
            RecordedMetadata(stream_id, version, names.get(version), stamps.get(version), tuple(told.values()))
            for version, told in sorted(attributes.items())
        ]

    def names(self) -> dict[str, list[int]]:
        """The names under which streams were recorded, each with the ids that had it."""
        recorded = set(self.streams())
        found: dict[str, set[int]] = {}
        for row in self._rows("metadata"):
            if row["kind"] == "source" and row["name"] and row["stream_id"] in recorded:
                found.setdefault(row["name"], set()).add(row["stream_id"])
        return {name: sorted(ids) for name, ids in sorted(found.items())}

    def resolve(self, streams: Sequence[int | str], key: str = "streams") -> tuple[int, ...]:
        """The ids of recorded streams that are given by id or by name.

        Raises ConfigError for `key`: of a stream that was not recorded with those that were, of a name that several
        had with their ids.
        """
        recorded = self.streams()
        names = self.names() if any(isinstance(_stream(stream), str) for stream in streams) else {}
        found = []
        for given in streams:
            stream = _stream(given)
            ids = names.get(stream, []) if isinstance(stream, str) else [stream] if stream in recorded else []
            if not ids:
                listed = _listed(recorded, names or self.names())
                raise ConfigError(key, given, f"a recorded stream: {listed or 'none, there is none in the lake'}")
            if len(ids) > 1:
                raise ConfigError(key, given, f"one of the ids that had this name: {', '.join(map(str, ids))}")
            found += ids
        return tuple(found)

    def full_path(self, path: str) -> Path:
        """Where a file of the manifest is. Raises LakeDamaged for a path that leads out of the lake."""
        full = (self.path / path).absolute()
        if os.path.isabs(path) or ".." in Path(path).parts:
            raise LakeDamaged(str(self.path / layout.MANIFEST), f"it names {path!r}, which is outside the lake")
        return full

    def open_parquet(self, path: str) -> pq.ParquetFile:
        """A file of the manifest. Raises LakeDamaged, with its name, where it is missing or no Parquet."""
        import pyarrow as pa
        import pyarrow.parquet as pq  # not needed by those who commit only, and slow to load

        full = self.full_path(path)
        try:
            return pq.ParquetFile(full)
        except FileNotFoundError:
            raise LakeDamaged(str(full), "the manifest names this file, but it is missing") from None
        except (pa.ArrowInvalid, OSError) as error:
            raise LakeDamaged(str(full), f"it is torn or no Parquet file ({error})") from None

    def _rows(self, table: str) -> Iterator[dict[str, Any]]:
        for file in self.tables(table):
            yield from self.open_parquet(file.path).read().to_pylist()


def _stream(given: int | str) -> int | str:
    """An id that came as text is an id."""
    return int(given) if isinstance(given, str) and given.isascii() and given.isdecimal() else given


def _listed(recorded: Sequence[int], names: Mapping[str, Sequence[int]]) -> str:
    own = {stream: [name for name, ids in names.items() if stream in ids] for stream in recorded}
    return ", ".join(f"{' or '.join(own[stream])} ({stream})" if own[stream] else str(stream) for stream in recorded)


_OURS: Final = (layout.MANIFEST, layout.STAGING, layout.TABLES, layout.CHECKPOINTS, layout.MARK)


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
