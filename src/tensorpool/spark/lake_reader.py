# SPDX-License-Identifier: Apache-2.0
"""Reading format "tensorpool.lake": frames and the tables beside them, in batches or as new commits come.

A batch read is of the state at its planning. A streaming offset is a version of the table's log; a file that was
compacted away in the meantime is read from the file that took it in. Tasks get shares of files by a bound of bytes, and
read one row group at a time.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow

from tensorpool.lake.control_tables import SCHEMAS
from tensorpool.lake.delta_log import FOLDER, AddFile
from tensorpool.lake.errors import LakeDamaged
from tensorpool.lake.files import WITHOUT_PAYLOAD
from tensorpool.lake.lake import Lake, files_of, gaps_of, table_files
from tensorpool.lake.layout import SIDE_TABLES
from tensorpool.lake.log_store import open_store
from tensorpool.lake.manifest import Gap, LakeFile, TableFile, file_of, rows_of
from tensorpool.lake.playback import MetadataHistory, recorded_metadata
from tensorpool.lake.ring_reader import FRAME_SCHEMA
from tensorpool.lake.selection import Selection
from tensorpool.lake.table_log import TableLog
from tensorpool.lake.trigger_delay import TriggerDelay
from tensorpool.logs import get_logger
from tensorpool.spark.lake_options import LakeOptions
from tensorpool.spark.metadata_column import text_of, with_metadata
from tensorpool.spark.pushdown import Pushdown

_INT: Final = pa.int64()
ROW_SCHEMAS: Final = {
    "gaps": pa.schema(
        [(name, _INT) for name in ("stream_id", "epoch", "lo", "hi", "frames")] + [("reason", pa.string())]
    ),
    "files": pa.schema(
        [("path", pa.string())]
        + [(name, _INT) for name in ("stream_id", "epoch", "lo", "hi", "frames", "bytes")]
        + [(name, _INT) for name in ("first_timestamp_ns", "last_timestamp_ns", "payload_bytes")]
        + [("is_recorded", pa.bool_()), ("written_ns", _INT)]
    ),
}


class Share(msgspec.Struct, frozen=True):
    """A part of a file: the `index`-th of `count` parts of its row groups, and of those the frames that are wanted."""

    path: str
    wanted: Selection
    index: int = 0
    count: int = 1


class SharesPartition(InputPartition):
    """Files for a task, as Shares. Pickled: plain data only."""

    def __init__(
        self, root: str, table: str, shares: bytes, inline: bool, fail_on_data_loss: bool, include_metadata: bool
    ) -> None:
        super().__init__(shares)
        self.include_metadata = include_metadata
        self.root = root
        self.table = table
        self.shares = shares
        self.inline = inline
        self.fail_on_data_loss = fail_on_data_loss


class RowsPartition(InputPartition):
    """Rows that the log has itself."""

    def __init__(self, table: str, rows: list[tuple[Any, ...]]) -> None:
        super().__init__(len(rows))
        self.table = table
        self.rows = rows


def with_ids(options: LakeOptions) -> LakeOptions:
    """Options whose streams are ids. Raises ConfigError for a name that the lake does not have, or of several."""
    names = [stream for stream in options.streams if isinstance(stream, str)]
    if not names:
        return options
    ids = {stream for stream in options.streams if isinstance(stream, int)}
    ids.update(Lake.open(options.path).resolve(names, "option streams"))
    return msgspec.structs.replace(options, streams=tuple(sorted(ids)))


def plan(lake: Lake, options: LakeOptions, wanted: Selection, version: int | None = None) -> list[InputPartition]:
    """The tasks that read what a lake holds now, or held after a version; of frames, those that are wanted."""
    if options.table in SIDE_TABLES:
        log = lake.table_log(options.table)
        if not log.exists():
            return []
        snapshot = log.snapshot() if version is None else log.snapshot_at(version)
        return _of_tables(table_files(options.table, snapshot.files.values()), options)
    state = lake.state if version is None else lake.state_at(version)
    match options.table:
        case "gaps":
            return _of_rows("gaps", _gap_rows(gaps_of(state), options))
        case "files":
            return _of_rows("files", _file_rows(files_of(state), options))
        case "frames":
            files = [file for file in files_of(state) if _has_wanted(file, wanted, options)]
            return _of_shares([_share(file, wanted) for file in files], options)
    raise AssertionError(options.table)


def _is_wanted(stream_id: int, options: LakeOptions) -> bool:
    return not options.streams or stream_id in options.streams


def _has_wanted(file: LakeFile, wanted: Selection, options: LakeOptions) -> bool:
    """Whether a file may have frames that are wanted, by its partition and its statistics."""
    return (
        file.frames > 0
        and _is_wanted(file.stream_id, options)
        and wanted.has_epoch(file.stream_id, file.epoch)
        and wanted.seq.overlaps(file.first_seq, file.last_seq)
        and wanted.time.overlaps(file.first_time_us, file.last_time_us)
    )


def _gap_rows(gaps: Sequence[Gap], options: LakeOptions) -> list[tuple[Any, ...]]:
    return [
        (gap.stream_id, gap.epoch, gap.lo, gap.hi, gap.hi - gap.lo or None, gap.reason)
        for gap in gaps
        if _is_wanted(gap.stream_id, options)
    ]


def _file_rows(files: Sequence[LakeFile], options: LakeOptions) -> list[tuple[Any, ...]]:
    return [msgspec.structs.astuple(file)[:12] for file in files if _is_wanted(file.stream_id, options)]


def _share(file: LakeFile, wanted: Selection) -> tuple[Share, int]:
    """A file for the tasks, and about how many bytes of it they read."""
    seqs = sum(hi - lo for lo, hi in wanted.seq.spans(file.lo, file.hi))
    return Share(file.path, wanted), file.bytes * seqs // max(1, file.hi - file.lo)


def _of_rows(table: str, rows: list[tuple[Any, ...]]) -> list[InputPartition]:
    return [RowsPartition(table, rows)] if rows else []


def _of_tables(tables: Sequence[TableFile], options: LakeOptions) -> list[InputPartition]:
    shares = [(Share(file.path, Selection()), file.bytes) for file in tables]
    return _of_shares(shares, options)


def _of_shares(shares: Sequence[tuple[Share, int]], options: LakeOptions) -> list[InputPartition]:
    """Small ones together, large ones apart: every task reads about as many bytes as it may."""
    bound = options.max_bytes_per_partition
    tasks: list[list[Share]] = []
    room = 0
    for share, size in shares:
        parts = max(1, -(-size // bound)) if options.table == "frames" else 1
        if parts > 1:
            tasks += [[msgspec.structs.replace(share, index=index, count=parts)] for index in range(parts)]
            room = 0
        elif size <= room and tasks:
            tasks[-1].append(share)
            room -= size
        else:
            tasks.append([share])
            room = bound - size
    how = options.payload == "inline", options.fail_on_data_loss, options.include_metadata
    return [SharesPartition(options.path, options.table, msgspec.msgpack.encode(task), *how) for task in tasks]


def read_partition(partition: InputPartition | None, streams: Sequence[int | str]) -> Iterator[pa.RecordBatch]:
    """In a worker: the rows of one task."""
    if isinstance(partition, RowsPartition):
        schema = ROW_SCHEMAS[partition.table]
        columns = zip(*partition.rows, strict=True)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        return
    if not isinstance(partition, SharesPartition):
        return  # Spark runs one task for a plan without any
    lake = Lake(open_store(partition.root))  # the files are known: its log is not read again
    metadata = _Metadata(lake)
    for share in msgspec.msgpack.decode(partition.shares, type=list[Share]):
        try:
            if partition.table == "frames":
                frames = _frames(lake, share, partition.inline)
                yield from metadata.added(frames) if partition.include_metadata else frames
            else:
                yield from _table_rows(lake.open_parquet(share.path), partition.table, streams)
        except LakeDamaged as damage:
            if partition.fail_on_data_loss:
                raise
            get_logger("spark").warning("data_loss", path=damage.path, problem=damage.problem)


class _Metadata:
    """The metadata of the streams that a task reads."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._metadata_history: dict[int, MetadataHistory] = {}

    def added(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                stream_id = batch.column("stream_id")[0].as_py()
                yield with_metadata(batch, functools.partial(self._find, stream_id))

    def _find(self, stream_id: int, meta_version: int, at_ns: int) -> str | None:
        if stream_id not in self._metadata_history:
            self._metadata_history[stream_id] = recorded_metadata(self._lake, stream_id)
        found = self._metadata_history[stream_id].metadata(meta_version, at_ns)
        return None if found is None else text_of(found)


def _frames(lake: Lake, share: Share, inline: bool) -> Iterator[pa.RecordBatch]:
    columns = None if inline else WITHOUT_PAYLOAD
    part = (share.index, share.count)
    for batch in lake.read_frames(share.path, columns=columns, share=part, wanted=share.wanted):
        if inline:
            yield batch
        else:
            arrays = [*batch.columns, pa.nulls(batch.num_rows, pa.binary())]
            yield pa.RecordBatch.from_arrays(arrays, schema=FRAME_SCHEMA)


def _table_rows(file: pq.ParquetFile, table: str, streams: Sequence[int | str]) -> Iterator[pa.RecordBatch]:
    for batch in file.iter_batches():
        rows = batch.cast(SCHEMAS[table])
        if streams:
            rows = rows.filter(pa.compute.is_in(rows.column("stream_id"), pa.array(streams, _INT)))
        yield rows


class LakeReader(DataSourceReader):
    """Batch: the state as it is when the read is planned."""

    def __init__(self, options: LakeOptions) -> None:
        self._options = options
        self._pushdown = Pushdown(options.selection)
        if options.push_filters and options.table == "frames":
            self.pushFilters = self._pushdown  # type: ignore[method-assign]

    def partitions(self) -> Sequence[InputPartition]:
        return plan(Lake.open(self._options.path), self._options, self._pushdown.selection)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition, self._options.streams)


class LakeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streaming: every row that versions of the table bring, once. An offset is {"commit": the last that was read}.

    Files that only took the place of others are passed over. Entries that were forgotten before the stream began are
    read as one batch: what the table held after the oldest version that can still be read.
    """

    def __init__(self, options: LakeOptions) -> None:
        self._options = options
        self._delay = TriggerDelay(options.min_frames_per_trigger, options.max_trigger_delay_s)
        self._lake: Lake | None = None
        self._initial: int | None = None
        self._target: int | None = None

    def initialOffset(self) -> dict[str, int]:
        if self._initial is None:
            wanted = self._options.starting_commit
            self._initial = self._newest() if wanted < 0 else wanted
        return {"commit": self._initial}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, int] | None = None, limit: ReadLimit | None = None) -> dict[str, int]:
        begin = (start or self.initialOffset())["commit"]
        newest = self._newest()
        end = newest if self._target is None else min(newest, self._target)
        most = self._options.max_bytes_per_trigger
        if end <= begin or (self._target is None and self._is_early(begin, end)):
            return {"commit": begin}
        if most is None:
            return {"commit": end}
        oldest_entry, oldest_version = self._log().oldest()
        if begin + 1 < oldest_entry:
            return {"commit": min(end, oldest_version)}  # whatever its size: it cannot be read in parts
        size = 0
        for version in range(begin + 1, end + 1):
            size += sum(add.size for add in self._news(version))
            if size >= most:
                return {"commit": version}
        return {"commit": end}

    def reportLatestOffset(self) -> dict[str, int]:
        return {"commit": self._newest()}

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._newest()

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        lo, hi = start["commit"], end["commit"]
        if hi <= lo:
            return []
        oldest = self._log().oldest()[0]
        if lo + 1 < oldest:
            if lo > 0:
                where = f"{self._log().store.uri}/{FOLDER}"
                raise LakeDamaged(where, f"versions {lo + 1} to {oldest - 1} are forgotten; use a new checkpoint")
            return plan(self._open(), self._options, self._options.selection, hi)
        return self._plan_versions(range(lo + 1, hi + 1))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition, self._options.streams)

    def commit(self, end: dict[str, int]) -> None:
        """Nothing to give back."""

    def stop(self) -> None:
        self._lake = None

    def _open(self) -> Lake:
        if self._lake is None:
            self._lake = Lake.open(self._options.path)
        return self._lake

    def _log(self) -> TableLog:
        """Of the table that is read; gaps and files are in the log of frames."""
        table, lake = self._options.table, self._open()
        return lake.table_log(table) if table in SIDE_TABLES else lake.log

    def _newest(self) -> int:
        """The newest version; 0 where the table is not there yet, as its first version has no rows."""
        return self._log().snapshot().version if self._log().exists() else 0

    def _is_early(self, begin: int, end: int) -> bool:
        """Whether the next batch is to wait for more frames. Forgotten entries are read at once."""
        if self._options.min_frames_per_trigger is None or begin + 1 < self._log().oldest()[0]:
            return False
        waiting = sum(rows_of(add) for version in range(begin + 1, end + 1) for add in self._news(version))
        return not self._delay.is_due(waiting, time.monotonic()) and waiting > 0

    def _news(self, version: int) -> list[AddFile]:
        actions = self._log().entry(version)
        return [action for action in actions if isinstance(action, AddFile) and action.data_change]

    def _plan_versions(self, versions: range) -> list[InputPartition]:
        """The tasks that read what some versions brought."""
        lake, options = self._open(), self._options
        news = [add for version in versions for add in self._news(version)]
        if options.table in SIDE_TABLES:
            return _of_tables(table_files(options.table, news), options)
        files = [file for file in map(file_of, news) if _is_wanted(file.stream_id, options)]
        if options.table == "frames":
            wanted = options.selection
            found = [file for file in files if _has_wanted(file, wanted, options)]
            return _of_shares([share for file in found for share in _present(lake, file, wanted)], options)
        if options.table == "gaps":
            return _of_rows("gaps", _gap_rows([gap for file in files for gap in file.gaps], options))
        return _of_rows("files", _file_rows(files, options))


def _present(lake: Lake, file: LakeFile, wanted: Selection) -> list[tuple[Share, int]]:
    """Where the frames of a file are now: in it, as long as it exists, or in those that took it in."""
    state = lake.state
    if file.path in state.files or lake.store.size(file.path) is not None:
        return [_share(file, wanted)]
    own = wanted.narrowed("seq", lo=file.lo, hi=file.hi - 1)
    heirs = [
        _share(other, own)
        for other in files_of(state, file.stream_id, file.epoch)
        if file.is_recorded and other.is_recorded and other.lo < file.hi and file.lo < other.hi
    ]
    return heirs or [_share(file, wanted)]  # retained no more: the task says so
