# SPDX-License-Identifier: Apache-2.0
"""Parquet files of frames: how they are written, and what they tell about themselves.

Payloads go in row groups of at most 16 MiB, without dictionary and statistics. A file carries in its footer which seqs
it accounts for and what is missing of them, so that whoever finds it staged can take it as it is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tensorpool.spark.lake.cut import Cut
from tensorpool.spark.lake.direct import DirectFile
from tensorpool.spark.lake.errors import LakeDamaged
from tensorpool.spark.lake.manifest import Gap, LakeFile
from tensorpool.spark.rings import FRAME_SCHEMA

ROW_GROUP_BYTES: Final = 16 << 20
ZSTD_LEVEL: Final = 1
PAGE_BYTES: Final = 1 << 20
WITHOUT_PAYLOAD: Final = [name for name in FRAME_SCHEMA.names if name != "payload"]

_FOOTER: Final = b"tensorpool"


class Footer(msgspec.Struct, frozen=True):
    """What a file says about itself. `path` is left empty: names change on the way in."""

    file: LakeFile
    gaps: tuple[Gap, ...] = ()


class FrameFile:
    """A file that is being written. It has its name when it is finished, and then for good."""

    def __init__(self, draft: Path, cut: Cut) -> None:
        self._draft = draft
        self._cut = cut
        draft.parent.mkdir(parents=True, exist_ok=True)
        is_zstd = cut.codec == "zstd"
        self._file = DirectFile(draft)
        self._writer = pq.ParquetWriter(
            self._file,
            FRAME_SCHEMA,
            compression=cut.codec,
            compression_level={"payload": ZSTD_LEVEL} if is_zstd else None,
            use_dictionary=["dtype", "order"],
            write_statistics=WITHOUT_PAYLOAD,
            data_page_size=PAGE_BYTES,
            store_schema=False,
        )
        self.frames = 0
        self.payload_bytes = 0
        self.first_seq: int | None = None
        self.last_seq: int | None = None
        self._first_ns: int | None = None
        self._last_ns: int | None = None
        self.ids = (0, 0)  # of stream and epoch

    @property
    def is_full(self) -> bool:
        has_stamps = self._first_ns is not None and self._last_ns is not None
        is_long = has_stamps and self._last_ns - self._first_ns >= self._cut.max_ns  # type: ignore[operator]
        return self.payload_bytes >= self._cut.max_bytes or is_long

    def add(self, batch: pa.RecordBatch) -> None:
        """A batch of at most ROW_GROUP_BYTES, sorted by seq and after everything that came before."""
        self._writer.write_table(pa.Table.from_batches([batch]), row_group_size=batch.num_rows)
        seqs = batch.column("seq")
        if self.first_seq is None:
            self.first_seq = seqs[0].as_py()
            self.ids = batch.column("stream_id")[0].as_py(), batch.column("epoch")[0].as_py()
        self.last_seq = seqs[-1].as_py()
        self.frames += batch.num_rows
        self.payload_bytes += pc.sum(batch.column("nbytes")).as_py() or 0
        stamps = pc.min_max(batch.column("timestamp_ns")).as_py()
        if stamps["min"] is not None:
            self._first_ns = stamps["min"] if self._first_ns is None else min(self._first_ns, stamps["min"])
            self._last_ns = stamps["max"] if self._last_ns is None else max(self._last_ns, stamps["max"])

    def finish(
        self, lo: int, hi: int, gaps: tuple[Gap, ...], name: Callable[[int, int], Path], *, is_recorded: bool = True
    ) -> tuple[Path, Footer]:
        """Give it its name; where that is taken, what is there counts and this one goes."""
        stream_id, epoch = self.ids
        about = LakeFile(
            "", stream_id, epoch, lo, hi, self.frames, 0, self._first_ns, self._last_ns, self.payload_bytes, is_recorded
        )
        footer = Footer(about, gaps)
        self._writer.add_key_value_metadata({_FOOTER: msgspec.json.encode(footer)})
        path = name(lo, hi)
        try:
            self._writer.close()
            self._file.finish(is_durable=self._cut.is_durable)
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


def read_footer(path: Path) -> Footer:
    """What a file of frames says about itself. Raises LakeDamaged."""
    try:
        with pq.ParquetFile(path) as file:
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
    size = path.stat().st_size
    return msgspec.structs.replace(footer, file=msgspec.structs.replace(footer.file, bytes=size))


def read_frames(
    path: Path,
    *,
    columns: list[str] | None = None,
    share: tuple[int, int] = (0, 1),
    lo: int | None = None,
    hi: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of a file, one batch per row group; of `share` (i, n) only the i-th of n parts of its row groups.

    Raises LakeDamaged.
    """
    wanted = columns or FRAME_SCHEMA.names
    try:
        with pq.ParquetFile(path) as file:
            index, count = share
            groups = file.metadata.num_row_groups
            for group in range(groups * index // count, groups * (index + 1) // count):
                table = file.read_row_group(group, wanted, use_threads=False)
                if lo is not None and hi is not None:
                    seqs = table.column("seq")
                    table = table.filter(pc.and_(pc.greater_equal(seqs, lo), pc.less(seqs, hi)))
                yield from _normal(table, wanted).to_batches()
    except FileNotFoundError:
        raise LakeDamaged(str(path), "the manifest names this file, but it is missing") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise LakeDamaged(str(path), f"it is torn or no Parquet file ({error})") from None


def _normal(table: pa.Table, names: list[str]) -> pa.Table:
    """With exactly our columns and types, however they came back."""
    return table.select(names).cast(pa.schema([FRAME_SCHEMA.field(name) for name in names])).combine_chunks()
