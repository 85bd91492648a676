# SPDX-License-Identifier: Apache-2.0
"""Parquet files of frames: how they are written, and what they tell about themselves.

Row groups have about 2 MiB, or one frame: small enough to read one frame at random, large enough to read all in order.
Payloads have neither dictionary nor statistics. A file carries in its footer which seqs
it accounts for and what is missing of them, so that a task that finds it staged can take it as it is.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tensorpool.lake import layout
from tensorpool.lake.direct_io import DirectFile
from tensorpool.lake.errors import LakeDamaged
from tensorpool.lake.file_policy import FilePolicy
from tensorpool.lake.manifest import Gap, LakeFile
from tensorpool.lake.ring_reader import FRAME_SCHEMA
from tensorpool.lake.selection import Bounds, Selection, time_us_of

ROW_GROUP_BYTES: Final = 2 << 20
WRITE_BYTES: Final = 16 << 20  # that a writer collects and adds at once
ZSTD_LEVEL: Final = 1
PAGE_BYTES: Final = 1 << 20
WITHOUT_PAYLOAD: Final = [name for name in FRAME_SCHEMA.names if name != "payload"]
PARTITION: Final = ("stream_id", "epoch")  # in the names of folders, as Delta has it, and not in the files
CHOSEN_BY: Final = ("seq", "time")  # columns of files that rows are chosen by
ALL: Final = Selection()
FILE_SCHEMA: Final = pa.schema([field for field in FRAME_SCHEMA if field.name not in PARTITION])

_FOOTER: Final = b"tensorpool"


class Footer(msgspec.Struct, frozen=True):
    """What a file says about itself. `path` is left empty: names change on the way in."""

    file: LakeFile
    gaps: tuple[Gap, ...] = ()


class FrameFile:
    """A file that is being written. It has its name when it is finished, and then for good."""

    def __init__(self, draft: Path, policy: FilePolicy) -> None:
        self._draft = draft
        self._policy = policy
        draft.parent.mkdir(parents=True, exist_ok=True)
        is_zstd = policy.codec == "zstd"
        self._file = DirectFile(draft)
        self._writer = pq.ParquetWriter(
            self._file,
            FILE_SCHEMA,
            compression=policy.codec,
            compression_level={"payload": ZSTD_LEVEL} if is_zstd else None,
            use_dictionary=["dtype", "order"],
            write_statistics=[name for name in FILE_SCHEMA.names if name != "payload"],
            data_page_size=PAGE_BYTES,
            store_schema=False,
        )
        self.frames = 0
        self.payload_bytes = 0
        self.first_seq: int | None = None
        self.last_seq: int | None = None
        self._first_ns: int | None = None
        self._last_ns: int | None = None
        self._first_us: int | None = None
        self._last_us: int | None = None
        self.ids = (0, 0)  # of stream and epoch

    @property
    def is_full(self) -> bool:
        has_stamps = self._first_ns is not None and self._last_ns is not None
        is_long = has_stamps and self._last_ns - self._first_ns >= self._policy.max_ns  # type: ignore[operator]
        return self.payload_bytes >= self._policy.max_bytes or is_long

    def add(self, batch: pa.RecordBatch) -> None:
        """A batch of at most WRITE_BYTES, or one frame, sorted by seq and after everything that came before."""
        rows = pa.Table.from_batches([batch]).drop_columns(list(PARTITION))
        payload_bytes = pc.sum(batch.column("nbytes")).as_py() or 0
        frames = ROW_GROUP_BYTES * batch.num_rows // max(1, payload_bytes)
        self._writer.write_table(rows, row_group_size=min(max(1, frames), batch.num_rows))
        seqs = batch.column("seq")
        if self.first_seq is None:
            self.first_seq = seqs[0].as_py()
            self.ids = batch.column("stream_id")[0].as_py(), batch.column("epoch")[0].as_py()
        self.last_seq = seqs[-1].as_py()
        self.frames += batch.num_rows
        self.payload_bytes += payload_bytes
        stamps = pc.min_max(batch.column("timestamp_ns")).as_py()
        if stamps["min"] is not None:
            self._first_ns = stamps["min"] if self._first_ns is None else min(self._first_ns, stamps["min"])
            self._last_ns = stamps["max"] if self._last_ns is None else max(self._last_ns, stamps["max"])
        times = pc.min_max(batch.column("time").cast(pa.int64())).as_py()
        if times["min"] is not None:
            self._first_us = times["min"] if self._first_us is None else min(self._first_us, times["min"])
            self._last_us = times["max"] if self._last_us is None else max(self._last_us, times["max"])

    def finish(
        self, lo: int, hi: int, gaps: tuple[Gap, ...], name: Callable[[int, int], Path], *, is_recorded: bool = True
    ) -> tuple[Path, Footer]:
        """Give it its name; where that is taken, what is there counts and this one goes."""
        stream_id, epoch = self.ids
        about = LakeFile(
            "",
            stream_id,
            epoch,
            lo,
            hi,
            self.frames,
            0,
            self._first_ns,
            self._last_ns,
            self.payload_bytes,
            is_recorded,
            first_time_us=self._first_us,
            last_time_us=self._last_us,
            first_seq=self.first_seq,
            last_seq=self.last_seq,
        )
        footer = Footer(about, gaps)
        self._writer.add_key_value_metadata({_FOOTER: msgspec.json.encode(footer)})
        path = name(lo, hi)
        try:
            self._writer.close()
            self._file.finish(is_durable=self._policy.is_durable)
            os.link(self._draft, path)
        except FileExistsError:
            footer = read_footer(path)
        finally:
            self._file.close()
            self._draft.unlink(missing_ok=True)
        size = path.stat().st_size
        return path, msgspec.structs.replace(footer, file=msgspec.structs.replace(footer.file, bytes=size))

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # what it could not write is not wanted any more
            self._writer.close()
        self._file.close()
        self._draft.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_footer(path: Path | str, source: Any = None) -> Footer:
    """What a file of frames says about itself; where `source` is read, `path` is only its name. Raises LakeDamaged."""
    try:
        with pq.ParquetFile(path if source is None else source) as file:
            found = (file.metadata.metadata or {}).get(_FOOTER)
            rows = file.metadata.num_rows
        if found is None:
            raise LakeDamaged(str(path), "its footer does not say which frames it holds")
        footer = msgspec.json.decode(found, type=Footer)
    except FileNotFoundError:
        raise LakeDamaged(str(path), "it is missing") from None
    except (pa.ArrowInvalid, OSError, msgspec.DecodeError) as error:
        raise LakeDamaged(str(path), f"it is torn or no Parquet file ({error})") from None
    if rows != footer.file.frames:
        raise LakeDamaged(str(path), f"it has {rows} frames where its footer says {footer.file.frames}")
    size = os.stat(path).st_size if source is None else 0
    return msgspec.structs.replace(footer, file=msgspec.structs.replace(footer.file, bytes=size))


def read_frames(
    path: Path | str,
    *,
    source: Any = None,
    columns: list[str] | None = None,
    share: tuple[int, int] = (0, 1),
    wanted: Selection = ALL,
) -> Iterator[pa.RecordBatch]:
    """The rows of a file, one batch per row group; of `share` (i, n) only the i-th of n parts of its row groups.

    Row groups without a seq or time that is `wanted`, by their statistics, are not read; stream and epoch are the
    caller's to choose files by. Of a file that is not a local one `source` is read, and `path` is its name. Raises
    LakeDamaged.
    """
    names = columns or FRAME_SCHEMA.names
    stored = [name for name in names if name not in PARTITION]
    try:
        is_remote = source is not None and not isinstance(source, Path)  # there a row group is one request
        with pq.ParquetFile(path if source is None else source, pre_buffer=is_remote) as file:
            index, count = share
            groups = file.metadata.num_row_groups
            for group in range(groups * index // count, groups * (index + 1) // count):
                if not _may_have(file.metadata, group, wanted):
                    continue
                table = _chosen(file.read_row_group(group, stored, use_threads=False), wanted)
                yield from _normal(with_ids(table, *ids_of(path, file)), names).to_batches()
    except FileNotFoundError:
        raise LakeDamaged(str(path), "the log names this file, but it is missing") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise LakeDamaged(str(path), f"it is torn or no Parquet file ({error})") from None


def _may_have(file: pq.FileMetaData, group: int, wanted: Selection) -> bool:
    """Whether a row group has frames that are wanted, as far as its statistics say."""
    for index in range(file.num_columns):
        name = file.schema.column(index).path
        if name in CHOSEN_BY and not getattr(wanted, name).is_all:
            found = file.row_group(group).column(index).statistics
            if found is not None and found.has_min_max:
                ends = (time_us_of(end) if name == "time" else end for end in (found.min, found.max))
                if not getattr(wanted, name).overlaps(*ends):
                    return False
    return True


def _chosen(table: pa.Table, wanted: Selection) -> pa.Table:
    """The rows that are wanted."""
    for name in CHOSEN_BY:
        bounds: Bounds = getattr(wanted, name)
        if bounds.is_all:
            continue
        numbers = table.column(name)
        if name == "time":
            numbers = numbers.cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        checks = [pc.is_valid(numbers)]
        if bounds.lo is not None:
            checks.append(pc.greater_equal(numbers, bounds.lo))
        if bounds.hi is not None:
            checks.append(pc.less_equal(numbers, bounds.hi))
        if bounds.values is not None:
            checks.append(pc.is_in(numbers, pa.array(bounds.values, pa.int64())))
        table = table.filter(functools.reduce(pc.and_kleene, checks))
    return table


def ids_of(path: Path | str, file: pq.ParquetFile) -> tuple[int, int]:
    """Stream and epoch of a file's frames: as it says itself, or, of another writer, as its folders say."""
    found = (file.metadata.metadata or {}).get(_FOOTER)
    if found is not None:
        about = msgspec.json.decode(found, type=Footer).file
        return about.stream_id, about.epoch
    ids = layout.ids_in_path(str(path))
    if ids is None:
        raise LakeDamaged(str(path), "neither its footer nor its folders say whose frames it holds")
    return ids


def with_ids(table: pa.Table, stream_id: int, epoch: int) -> pa.Table:
    """Rows with the columns that are not in files."""
    for name, value in zip(PARTITION, (stream_id, epoch), strict=True):
        if name not in table.column_names:
            table = table.append_column(name, pa.array(np.full(table.num_rows, value, np.int64)))
    return table


def _normal(table: pa.Table, names: list[str]) -> pa.Table:
    """With exactly our columns and types, however they came back."""
    return table.select(names).cast(pa.schema([FRAME_SCHEMA.field(name) for name in names])).combine_chunks()
