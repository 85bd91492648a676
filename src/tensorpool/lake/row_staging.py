# SPDX-License-Identifier: Apache-2.0
"""What comes to a task of the lake's writer: rows that name ranges, or rows that are frames."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tensorpool._core import DropReason
from tensorpool.errors import TensorPoolError
from tensorpool.lake import offsets
from tensorpool.lake.commits import Staged
from tensorpool.lake.file_policy import FilePolicy
from tensorpool.lake.files import WRITE_BYTES, FrameFile
from tensorpool.lake.manifest import UNKNOWN_TAIL, UNSEEN_EPOCHS, Gap, LakeFile
from tensorpool.lake.offsets import Loss, SeqRange
from tensorpool.lake.ring_reader import FRAME_SCHEMA, RingPart
from tensorpool.lake.staging import Staging
from tensorpool.shm.arrays import numpy_dtype
from tensorpool.wire.control import Dtype

SORT_BYTES: Final = 64 << 20  # rows are sorted by seq in pieces of this size

_REASONS: Final = {
    offsets.OVERWRITTEN: DropReason.OVERWRITTEN.name,
    offsets.ENDED: UNKNOWN_TAIL,
    offsets.UNSEEN: UNSEEN_EPOCHS,
}


class RowRefused(TensorPoolError):
    """A row that is no frame."""


def stage_ranges(folder: Staging, batches: Iterator[pa.RecordBatch], policy: FilePolicy) -> Staged:
    """Account for every range: its frames in files, what is missing as gaps."""
    files: list[LakeFile] = []
    gaps: list[Gap] = []
    for batch in batches:
        for row in batch.to_pylist():
            stream_id, epoch, lo, hi = row["stream_id"], row["epoch"], row["lo"], row["hi"]
            if row["lost"] is not None:
                gaps.append(gap_of(Loss(stream_id, epoch, lo, hi, row["lost"])))
            else:
                part = None if row["part"] is None else msgspec.msgpack.decode(row["part"], type=RingPart)
                staged = folder.stage(part, SeqRange(stream_id, epoch, lo, hi), policy)
                files += staged.files
                gaps += staged.gaps
    return Staged(tuple(files), tuple(gaps))


def gap_of(loss: Loss) -> Gap:
    """A loss of the live source, as a lake tells it."""
    hi = loss.lo if loss.hi is None else loss.hi
    return Gap(loss.stream_id, loss.epoch, loss.lo, hi, _REASONS.get(loss.reason, loss.reason))


def stage_rows(folder: Staging, batches: Iterator[pa.RecordBatch], policy: FilePolicy) -> Staged:
    """Write frames as they come. Raises RowRefused with the number of the first row that is none."""
    return _Rows(folder, policy).stage(batches)


class _Rows:
    """Rows on their way to files: one open file per stream and epoch, rows sorted by seq within a piece."""

    def __init__(self, folder: Staging, policy: FilePolicy) -> None:
        self._folder = folder.folder
        self._policy = policy
        self._number = 0
        self._files: list[LakeFile] = []

    def stage(self, batches: Iterator[pa.RecordBatch]) -> Staged:
        waiting: list[pa.Table] = []
        waiting_bytes = 0
        for batch in batches:
            table = self._checked(batch)
            waiting.append(table)
            waiting_bytes += table.nbytes
            if waiting_bytes >= SORT_BYTES:
                self._write(pa.concat_tables(waiting))
                waiting, waiting_bytes = [], 0
        if waiting:
            self._write(pa.concat_tables(waiting))
        return Staged(tuple(self._files))

    def _checked(self, batch: pa.RecordBatch) -> pa.Table:
        """With our columns and types. Raises RowRefused with the number of the first row that is no frame."""
        columns = []
        for field in FRAME_SCHEMA:
            index = batch.schema.get_field_index(field.name)
            if index >= 0:
                try:
                    columns.append(batch.column(index).cast(field.type))
                except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                    raise RowRefused(f"column {field.name}: {error}") from None
            elif field.name == "order":
                columns.append(pa.array(["C"] * batch.num_rows))
            elif field.name == "nbytes":
                columns.append(pc.binary_length(batch.column("payload")).cast(pa.int64()))
            else:
                columns.append(pa.nulls(batch.num_rows, field.type))
        table = pa.Table.from_arrays(columns, schema=FRAME_SCHEMA)
        names = ("stream_id", "epoch", "seq", "dtype", "shape", "order", "nbytes")
        sizes = pc.binary_length(table.column("payload")).to_pylist()
        for row, size in zip(table.select(names).to_pylist(), sizes, strict=True):
            problem = _problem(row, size)
            if problem:
                raise RowRefused(f"row {self._number}: {problem}")
            self._number += 1
        return table

    def _write(self, table: pa.Table) -> None:
        order = [("stream_id", "ascending"), ("epoch", "ascending"), ("seq", "ascending")]
        order_of_rows = pc.sort_indices(table.select(["stream_id", "epoch", "seq"]), sort_keys=order)
        keys = table.select(["stream_id", "epoch", "nbytes"]).take(order_of_rows).to_pylist()
        start = 0
        while start < len(keys):
            same = (keys[start]["stream_id"], keys[start]["epoch"])
            file = FrameFile(self._folder / f".{uuid.uuid4().hex}", self._policy)
            try:
                while start < len(keys) and (keys[start]["stream_id"], keys[start]["epoch"]) == same:
                    stop, size = start, 0
                    while stop < len(keys) and (keys[stop]["stream_id"], keys[stop]["epoch"]) == same:
                        size += keys[stop]["nbytes"]
                        if size > WRITE_BYTES and stop > start:
                            break
                        stop += 1
                    rows = table.take(order_of_rows.slice(start, stop - start)).combine_chunks()
                    for batch in rows.to_batches():
                        file.add(batch)
                    start = stop
                assert file.first_seq is not None
                assert file.last_seq is not None
                lo, hi = file.first_seq, file.last_seq + 1
                path, footer = file.finish(lo, hi, (), self._name, is_recorded=False)
            except BaseException:
                file.discard()
                raise
            self._files.append(msgspec.structs.replace(footer.file, path=path.name))

    def _name(self, lo: int, hi: int) -> Path:
        return self._folder / f"rows-{uuid.uuid4().hex}.parquet"


def _problem(row: dict[str, Any], size: int | None) -> str:
    for name in ("stream_id", "epoch", "seq"):
        if row[name] is None or row[name] < 0:
            return f"{name} {row[name]!r}; expected a number from 0"
    if size is None:
        return "payload is null; write frames with payload=inline"
    if row["dtype"] is None or row["shape"] is None:
        return "dtype and shape must not be null"
    if row["dtype"].upper() not in Dtype.__members__ or not Dtype[row["dtype"].upper()]:
        return f"dtype {row['dtype']!r}; expected one of {', '.join(member.name for member in Dtype if member)}"
    if row["order"] not in ("C", "F"):
        return f"order {row['order']!r}; expected C or F"
    dtype = Dtype[row["dtype"].upper()]
    count = math.prod(row["shape"])
    expected = -(-count // 8) if dtype is Dtype.BIT else count * numpy_dtype(dtype).itemsize
    if any(extent < 0 for extent in row["shape"]) or size != expected:
        return f"{size} bytes; {dtype.name} {row['shape']} has {expected}"
    return f"nbytes {row['nbytes']}; the payload has {size}" if row["nbytes"] != size else ""
