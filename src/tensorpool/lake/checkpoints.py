# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a version of a table as one Parquet file, so that a reader need not read every entry before it.

A row per action, with the columns that the Delta protocol names; any Delta reader takes them. Read and written column
by column: a row at a time takes seconds at 100,000 files.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tensorpool.lake.delta_log import AddFile, Format, Metadata, Protocol, RemoveFile, Txn, check_understood
from tensorpool.lake.snapshot import Snapshot

REMEMBER_REMOVED_MS: Final = 7 * 86_400_000  # what was removed longer ago is not in a checkpoint

_STRINGS: Final = pa.map_(pa.string(), pa.string())
_ADD: Final = pa.struct(
    [
        ("path", pa.string()),
        ("partitionValues", _STRINGS),
        ("size", pa.int64()),
        ("modificationTime", pa.int64()),
        ("dataChange", pa.bool_()),
        ("stats", pa.string()),
        ("tags", _STRINGS),
    ]
)
_REMOVE: Final = pa.struct(
    [
        ("path", pa.string()),
        ("deletionTimestamp", pa.int64()),
        ("dataChange", pa.bool_()),
        ("extendedFileMetadata", pa.bool_()),
        ("partitionValues", _STRINGS),
        ("size", pa.int64()),
    ]
)
_METADATA: Final = pa.struct(
    [
        ("id", pa.string()),
        ("name", pa.string()),
        ("description", pa.string()),
        ("format", pa.struct([("provider", pa.string()), ("options", _STRINGS)])),
        ("schemaString", pa.string()),
        ("partitionColumns", pa.list_(pa.string())),
        ("configuration", _STRINGS),
        ("createdTime", pa.int64()),
    ]
)
_PROTOCOL: Final = pa.struct([("minReaderVersion", pa.int32()), ("minWriterVersion", pa.int32())])
_TXN: Final = pa.struct([("appId", pa.string()), ("version", pa.int64()), ("lastUpdated", pa.int64())])
SCHEMA: Final = pa.schema(
    [("txn", _TXN), ("add", _ADD), ("remove", _REMOVE), ("metaData", _METADATA), ("protocol", _PROTOCOL)]
)


class LastCheckpoint(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """What `_last_checkpoint` says."""

    version: int
    size: int = 0  # rows
    parts: int | None = None


def encode_checkpoint(snapshot: Snapshot, now_ms: int) -> tuple[bytes, int]:
    """A checkpoint of a version, and how many rows it has."""
    assert snapshot.metadata is not None
    assert snapshot.protocol is not None
    txns = [Txn(app_id, version) for app_id, version in snapshot.txns.items()]
    adds = list(snapshot.files.values())
    keep_ms = now_ms - REMEMBER_REMOVED_MS
    removes = [gone for gone in snapshot.removed.values() if (gone.deletion_timestamp or 0) >= keep_ms]
    metadata, protocol = snapshot.metadata, snapshot.protocol
    parts: list[pa.Table] = [
        _rows("protocol", _of_pylist(_PROTOCOL, [msgspec.to_builtins(protocol)])),
        _rows("metaData", _of_pylist(_METADATA, [_metadata_row(metadata)])),
        _rows("txn", _struct(_TXN, [[t.app_id for t in txns], [t.version for t in txns], [None] * len(txns)])),
        _rows("remove", _removes(removes)),
        _rows("add", _adds(adds)),
    ]
    table = pa.concat_tables(part for part in parts if part.num_rows)
    out = io.BytesIO()
    pq.write_table(table, out, compression="snappy", store_schema=False)
    return out.getvalue(), table.num_rows


def decode_checkpoint(data: bytes, version: int) -> Snapshot:
    """The version that a checkpoint holds. Raises ValueError, in words."""
    try:
        with pq.ParquetFile(pa.BufferReader(data)) as file:  # read_table would load pandas
            table = file.read()
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"it is torn or no Parquet file ({error})") from None
    found = Snapshot(version)
    for name in ("protocol", "metaData", "txn", "remove", "add"):
        if name not in table.column_names:
            continue
        rows = _present(table.column(name).combine_chunks())
        if len(rows):
            _TAKE[name](found, rows)
    if found.metadata is None or found.protocol is None:
        raise ValueError("it does not say what the table is: protocol or metaData is missing")
    check_understood(found.protocol)
    return found


# --- writing


def _rows(name: str, values: pa.StructArray) -> pa.Table:
    """Rows of one kind of action; the other columns are null."""
    arrays = [values if field.name == name else pa.nulls(len(values), field.type) for field in SCHEMA]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _of_pylist(kind: pa.StructType, rows: list[dict[str, Any]]) -> pa.StructArray:
    return pa.array(rows, kind)


def _struct(kind: pa.StructType, columns: Sequence[Any]) -> pa.StructArray:
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, field.type)
        for column, field in zip(columns, kind, strict=True)
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(kind))


def _metadata_row(metadata: Metadata) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(metadata)
    row["configuration"] = list(metadata.configuration.items())
    row["format"] = {"provider": metadata.format.provider, "options": list(metadata.format.options.items())}
    return row


def _maps(values: Iterable[dict[str, str | None] | dict[str, str] | None]) -> pa.MapArray:
    """A column of maps, much quicker than from a list of lists of pairs."""
    offsets: list[int | None] = []
    keys: list[str] = []
    items: list[str | None] = []
    for value in values:
        offsets.append(None if value is None else len(keys))
        if value:
            keys += value.keys()
            items += value.values()
    offsets.append(len(keys))
    return pa.MapArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(keys, pa.string()), pa.array(items, pa.string())
    )


def _adds(adds: Sequence[AddFile]) -> pa.StructArray:
    return _struct(
        _ADD,
        [
            [add.path for add in adds],
            _maps(add.partition_values for add in adds),
            [add.size for add in adds],
            [add.modification_time for add in adds],
            [False] * len(adds),  # as the protocol wants it of a checkpoint
            [add.stats for add in adds],
            _maps(add.tags for add in adds),
        ],
    )


def _removes(removes: Sequence[RemoveFile]) -> pa.StructArray:
    return _struct(
        _REMOVE,
        [
            [gone.path for gone in removes],
            [gone.deletion_timestamp for gone in removes],
            [False] * len(removes),
            [gone.extended_file_metadata for gone in removes],
            _maps(gone.partition_values for gone in removes),
            [gone.size for gone in removes],
        ],
    )


# --- reading


def _present(column: pa.StructArray) -> pa.StructArray:
    """The rows that are not null. Usually they are neighbours: then Arrow's compute functions need not be loaded."""
    if column.null_count == 0:
        return column
    bits = np.unpackbits(np.frombuffer(column.buffers()[0], np.uint8), bitorder="little")
    at = np.flatnonzero(bits[column.offset : column.offset + len(column)])
    if len(at) == 0:
        return column[:0]
    if at[-1] - at[0] + 1 == len(at):
        return column.slice(int(at[0]), len(at))
    return column.filter(column.is_valid())


def _column(rows: pa.StructArray, name: str) -> list[Any]:
    """A field of every row; nothing where the writer left the field out."""
    index = rows.type.get_field_index(name)
    return [None] * len(rows) if index < 0 else rows.field(index).to_pylist()


def _dicts(rows: pa.StructArray, name: str) -> Sequence[dict[str, Any] | None]:
    """A field of maps, as dicts; equal ones are one object where the maps have the same keys throughout."""
    index = rows.type.get_field_index(name)
    if index < 0:
        return [None] * len(rows)
    maps = rows.field(index)
    keys, items = maps.keys.to_pylist(), maps.items.to_pylist()
    width = len(keys) // len(rows)
    names = tuple(keys[:width])
    if maps.null_count == 0 and width and keys == [*names] * len(rows):
        known: dict[tuple[Any, ...], dict[str, Any]] = {}
        if width == 1:
            return [{names[0]: item} for item in items]
        values = zip(*(items[offset::width] for offset in range(width)), strict=True)
        return [known.get(row) or known.setdefault(row, dict(zip(names, row, strict=True))) for row in values]
    offsets, is_valid = maps.offsets.to_pylist(), maps.is_valid().to_pylist()
    return [
        dict(zip(keys[lo:hi], items[lo:hi], strict=True)) if valid else None
        for lo, hi, valid in zip(offsets[:-1], offsets[1:], is_valid, strict=True)
    ]


def _take_adds(found: Snapshot, rows: pa.StructArray) -> None:
    index = rows.type.get_field_index("deletionVector")
    if index >= 0 and rows.field(index).null_count < len(rows):
        raise ValueError("it has deletion vectors, which tensorpool does not read")
    columns = (_column(rows, name) for name in ("path", "size", "modificationTime", "stats"))
    for path, size, modified, stats, partition, tags in zip(
        *columns, _dicts(rows, "partitionValues"), _dicts(rows, "tags"), strict=True
    ):
        found.files[path] = AddFile(path, partition or {}, size, modified, False, stats, tags)


def _take_removes(found: Snapshot, rows: pa.StructArray) -> None:
    names = ("path", "deletionTimestamp", "dataChange", "extendedFileMetadata", "size")
    for path, deleted, changed, extended, size, partition in zip(
        *(_column(rows, name) for name in names), _dicts(rows, "partitionValues"), strict=True
    ):
        found.removed[path] = RemoveFile(path, deleted, bool(changed), extended, partition, size)


def _take_txns(found: Snapshot, rows: pa.StructArray) -> None:
    found.txns.update(zip(_column(rows, "appId"), _column(rows, "version"), strict=True))


def _take_metadata(found: Snapshot, rows: pa.StructArray) -> None:
    row = rows[-1].as_py()
    found.metadata = Metadata(
        row["id"],
        row["schemaString"],
        tuple(row["partitionColumns"] or ()),
        dict(row["configuration"] or ()),
        row.get("createdTime"),
        row.get("name"),
        row.get("description"),
        Format(row["format"]["provider"], dict(row["format"]["options"] or ())),
    )


def _take_protocol(found: Snapshot, rows: pa.StructArray) -> None:
    row = rows[-1].as_py()
    found.protocol = Protocol(row["minReaderVersion"], row["minWriterVersion"])


_TAKE: Final = {
    "add": _take_adds,
    "remove": _take_removes,
    "txn": _take_txns,
    "metaData": _take_metadata,
    "protocol": _take_protocol,
}
