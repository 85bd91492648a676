# SPDX-License-Identifier: Apache-2.0
"""A lake as readers see it that know nothing of tensorpool: deltalake, Polars, DuckDB and pyarrow."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import deltalake
import duckdb
import polars
import pyarrow as pa
import pyarrow.dataset as ds

from tensorpool.lake import Lake

COLUMNS = ["stream_id", "epoch", "seq", "payload"]

type Rows = list[tuple[int, int, int, int]]


def check_readers(lake: Lake) -> None:
    """Every reader finds the frames that we find, each once, with the same bytes."""
    expected = _own(lake)
    place = lake.uri
    table = deltalake.DeltaTable(place)
    files = table.file_uris()
    assert _rows(table.to_pyarrow_table(columns=COLUMNS).to_pylist()) == expected, "deltalake"
    assert _rows(polars.scan_delta(place).select(COLUMNS).collect().to_dicts()) == expected, "polars"
    if not files or "://" in place:
        return  # DuckDB fetches its S3 reader from the network
    query = f"select {', '.join(COLUMNS)} from read_parquet({files!r}, hive_partitioning = true)"
    listed = duckdb.execute(query).fetchall()
    assert _rows(dict(zip(COLUMNS, row, strict=True)) for row in listed) == expected, "duckdb"
    folders = ds.partitioning(pa.schema([("stream_id", pa.int64()), ("epoch", pa.int64())]), flavor="hive")
    parquet = ds.dataset(files, partitioning=folders, partition_base_dir=place)
    assert _rows(parquet.to_table(columns=COLUMNS).to_pylist()) == expected, "pyarrow"


def _own(lake: Lake) -> Rows:
    batches = (batch for file in lake.files() for batch in lake.read_frames(file.path))
    return _rows(row for batch in batches for row in batch.to_pylist())


def _rows(rows: Iterable[dict[str, Any]]) -> Rows:
    return sorted((row["stream_id"], row["epoch"], row["seq"], zlib.crc32(row["payload"])) for row in rows)
