# SPDX-License-Identifier: Apache-2.0
"""A small Delta table with real files, as tests write it; also a process that appends until it is killed."""

from __future__ import annotations

import io
import sys
import uuid

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from tensorpool.lake.delta_log import Action, AddFile, Column, RemoveFile, Txn, new_table
from tensorpool.lake.log_store import LocalStore, open_store
from tensorpool.lake.snapshot import Snapshot
from tensorpool.lake.table_log import TableLog, now_ms

COLUMNS = [Column("stream_id", "long"), Column("epoch", "long"), Column("seq", "long"), Column("payload", "binary")]
PARTITION: dict[str, str | None] = {"stream_id": "10000", "epoch": "3"}
ROWS = 10


def open_log(place: str) -> TableLog:
    """The log of a table, made where there is none."""
    store = open_store(place)
    if isinstance(store, LocalStore):
        (store.root / "_delta_log").mkdir(parents=True, exist_ok=True)
        (store.root / "stream_id=10000" / "epoch=3").mkdir(parents=True, exist_ok=True)
    log = TableLog(store)
    log.append(_creation, "CREATE TABLE")
    return log


def _creation(snapshot: Snapshot) -> list[Action] | None:
    if snapshot.version >= 0:
        return None
    return new_table(COLUMNS, partition_by=("stream_id", "epoch"), now_ms=now_ms())


def write_file(log: TableLog, lo: int, hi: int, *, data_change: bool = True) -> AddFile:
    """A Parquet file with the seqs from `lo` up to, not including, `hi`; not part of the table yet."""
    seqs = list(range(lo, hi))
    table = pa.table({"seq": seqs, "payload": [seq.to_bytes(8, "little") for seq in seqs]})
    out = io.BytesIO()
    pq.write_table(table, out)
    path = f"stream_id=10000/epoch=3/part-{lo:010d}-{hi:010d}-{uuid.uuid4().hex[:12]}.parquet"
    log.store.put(path, out.getvalue())
    stats = {"numRecords": hi - lo, "minValues": {"seq": lo}, "maxValues": {"seq": hi - 1}, "nullCount": {"seq": 0}}
    return AddFile(
        path,
        PARTITION,
        len(out.getvalue()),
        now_ms(),
        data_change,
        msgspec.json.encode(stats).decode(),
        {"tensorpool": f'{{"lo":{lo},"hi":{hi}}}'},
    )


def append_next(log: TableLog) -> int:
    """Append a file with the next seqs; the version. What another process appended in the meantime goes first."""
    files: dict[int, AddFile] = {}

    def make(snapshot: Snapshot) -> list[Action]:
        lo = snapshot.txns.get("10000/3", 0)
        if lo not in files:
            files[lo] = write_file(log, lo, lo + ROWS)
        return [files[lo], Txn("10000/3", lo + ROWS)]

    return log.append(make, "WRITE")


def replace_all(log: TableLog) -> int:
    """Put one file in the place of all; the version."""

    def make(snapshot: Snapshot) -> list[Action]:
        gone = [RemoveFile(path, now_ms(), False) for path in snapshot.files]
        return [*gone, write_file(log, 0, snapshot.txns["10000/3"], data_change=False)]

    return log.append(make, "OPTIMIZE")


def main() -> None:
    place, count = sys.argv[1], int(sys.argv[2])
    log = open_log(place)
    print("ready", flush=True)
    for _ in range(count):
        print(append_next(log), flush=True)


if __name__ == "__main__":
    main()
