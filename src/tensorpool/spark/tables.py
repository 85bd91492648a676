# SPDX-License-Identifier: Apache-2.0
"""The control plane as DataFrames: tables "announces", "qos", "metadata" and "events" of format "tensorpool".

A table begins when its query does, and a restarted query continues with the messages that arrive from then on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from tensorpool.lake.control_tables import SCHEMAS, Listener, Row
from tensorpool.lake.live_options import LiveOptions
from tensorpool.spark.planner_process import exit_in_order

SNAPSHOT_PERIODS: Final = 1.5


class RowsPartition(InputPartition):
    """Rows that the planner has already."""

    def __init__(self, rows: list[Row], table: str) -> None:
        super().__init__(len(rows))
        self.rows = rows
        self.table = table


def _read_rows(partition: InputPartition) -> Iterator[pa.RecordBatch]:
    assert isinstance(partition, RowsPartition)
    schema = SCHEMAS[partition.table]
    if partition.rows:
        columns = zip(*partition.rows, strict=True)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


class TableReader(DataSourceReader):
    """Batch: what is said within one and a half announce periods."""

    def __init__(self, options: LiveOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        listener = Listener(self._options)
        try:
            time.sleep(SNAPSHOT_PERIODS * listener.period_s)  # soft state: everybody has spoken once by then
            return [RowsPartition(listener.rows(0, listener.end), self._options.table)]
        finally:
            listener.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read_rows(partition)


class TableStreamReader(DataSourceStreamReader):
    """Streaming: everything from the query's start on. An offset counts rows."""

    def __init__(self, options: LiveOptions) -> None:
        self._options = options
        self._listener: Listener | None = None
        self._base: int | None = None  # where an earlier run of the query stopped counting

    def initialOffset(self) -> dict[str, Any]:
        self._listen()
        return {"row": 0}

    def latestOffset(self, start: dict[str, Any] | None = None, limit: object = None) -> dict[str, Any]:
        listener = self._listen()
        if self._base is None:
            self._base = 0 if start is None else start["row"]
        return {"row": self._base + listener.end}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        listener = self._listen()
        if self._base is None:  # a batch that an earlier run planned: its rows are gone
            self._base = end["row"]
        rows = listener.rows(start["row"] - self._base, end["row"] - self._base)
        return [RowsPartition(rows, self._options.table)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read_rows(partition)

    def commit(self, end: dict[str, Any]) -> None:
        if self._base is not None:
            self._listen().forget(end["row"] - self._base)

    def stop(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _listen(self) -> Listener:
        if self._listener is None:
            self._listener = Listener(self._options)
            exit_in_order(self._listener.close)
        return self._listener
