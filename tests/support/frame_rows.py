# SPDX-License-Identifier: Apache-2.0
"""Frames as rows, and lakes of them, made by hand: for tests that need no driver."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tensorpool.lake import Lake, LakeFile
from tensorpool.lake.lake import Change
from tensorpool.lake.manifest import Gap, with_gaps
from tensorpool.lake.ring_reader import FRAME_SCHEMA
from tensorpool.lake.side_tables import write_rows
from tensorpool.shm.arrays import dtype_of
from tensorpool.wire.control import Dtype

MS = 1_000_000
SECOND_NS = 1_000_000_000


def row(array: np.ndarray[Any, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A frame; what is not given is the usual."""
    data = np.arange(6, dtype=np.uint8).reshape(2, 3) if array is None else array
    order = "F" if data.flags.fnc else "C"
    made: dict[str, Any] = {
        "stream_id": 10_000,
        "epoch": 1,
        "seq": 0,
        "time": None,
        "timestamp_ns": None,
        "received_ns": SECOND_NS,
        "meta_version": 0,
        "trace_id": None,
        "dtype": dtype_of(data.dtype).name,
        "shape": list(data.shape),
        "order": order,
        "nbytes": data.nbytes,
        "dropped_before": 0,
        "dropped_reason": None,
        "payload": data.tobytes(order="F" if order == "F" else "C"),
    }
    return made | fields


def bit_row(bits: int, **fields: Any) -> dict[str, Any]:
    """A frame of so many ones."""
    packed = np.packbits(np.ones(bits, np.uint8))
    return row(packed, dtype=Dtype.BIT.name, shape=[bits], **fields)


def rows_over_time(
    count: int, *, rate_hz: float = 100.0, latency_ns: int = 2 * MS, **fields: Any
) -> list[dict[str, Any]]:
    """Frames of a steady camera; each holds its number."""
    found = []
    for seq in range(count):
        captured_ns = SECOND_NS + round(seq * 1e9 / rate_hz)
        stamps = {"timestamp_ns": captured_ns, "received_ns": captured_ns + latency_ns}
        found.append(row(np.full((2, 3), seq % 250, np.uint8), **({"seq": seq} | stamps | fields)))
    return found


def table(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist([dict(one) for one in rows], FRAME_SCHEMA)


def write_in_order(folder: Path, tables: Iterable[pa.Table]) -> None:
    """A file for each, for a stream that takes them one by one: Spark goes by their times, to the millisecond."""
    for number, one in enumerate(tables):
        path = folder / f"{number}.parquet"
        pq.write_table(one, path)
        os.utime(path, (1_700_000_000 + number,) * 2)


def make_lake(
    path: Path,
    rows: Iterable[Mapping[str, Any]],
    *,
    gaps: tuple[Gap, ...] = (),
    metadata: Iterable[tuple[Any, ...]] = (),
    qos: Iterable[tuple[Any, ...]] = (),
    rows_per_file: int = 50,
) -> Lake:
    """A lake of these frames, with its other tables; rows of those as the live tables have them."""
    lake = Lake.create(path)
    frames = sorted(rows, key=lambda one: (one["stream_id"], one["epoch"], one["seq"]))
    files = []
    for key in dict.fromkeys((one["stream_id"], one["epoch"]) for one in frames):
        own = [one for one in frames if (one["stream_id"], one["epoch"]) == key]
        files += [_write_file(lake, own[at : at + rows_per_file]) for at in range(0, len(own), rows_per_file)]
    described, alone = with_gaps(files, gaps)
    assert not alone, "gaps of an epoch without frames"
    lake.append("write", lambda _: Change(tuple(described)))
    for name, found in (("metadata", list(metadata)), ("qos", list(qos))):
        if found:
            write_rows(lake, name, found)
    return lake


def _write_file(lake: Lake, rows: list[Mapping[str, Any]]) -> LakeFile:
    stream_id, epoch, lo, hi = rows[0]["stream_id"], rows[0]["epoch"], rows[0]["seq"], rows[-1]["seq"] + 1
    path = f"stream_id={stream_id}/epoch={epoch}/part-{lo:010d}-{hi:010d}-test.parquet"
    full = lake.path / path
    full.parent.mkdir(parents=True, exist_ok=True)
    stored = table(rows).drop_columns(["stream_id", "epoch"])
    pq.write_table(stored, full, row_group_size=16, use_dictionary=False)
    stamps = [one["timestamp_ns"] for one in rows if one["timestamp_ns"] is not None]
    first, last = (min(stamps), max(stamps)) if len(stamps) == len(rows) else (None, None)
    return LakeFile(path, stream_id, epoch, lo, hi, len(rows), full.stat().st_size, first, last)


def source(stream_id: int, name: str, *, told_ns: int = 0) -> Any:
    """A row of the table "metadata": a stream's name."""
    return (told_ns, "source", stream_id, 0, None, name, None, None, None)


def attribute(stream_id: int, version: int, key: str, text: str, *, told_ns: int = 0, kind: str = "text/plain") -> Any:
    """A row of the table "metadata"."""
    return (told_ns, "attribute", stream_id, version, told_ns, None, key, kind, text.encode())
