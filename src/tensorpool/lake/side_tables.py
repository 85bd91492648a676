# SPDX-License-Identifier: Apache-2.0
"""What a recording keeps beside its frames: metadata, QoS and trace links, as received, in tables of the lake.

Metadata and QoS are soft state, which its senders repeat. Of metadata and links only what is new is kept; of QoS
everything. Links of all streams are kept: the frames that a result came from may be of a stream that is not recorded.
What was received but not written yet is lost with the process.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from tensorpool.lake.control_tables import SCHEMAS, Listener, Row
from tensorpool.lake.files import sync_file
from tensorpool.lake.lake import Lake
from tensorpool.lake.layout import SIDE_TABLES, STAGING
from tensorpool.lake.live_options import LiveOptions

WRITE_EVERY_S: Final = {"metadata": 2.0, "qos": 30.0, "traces": 2.0}
KEPT_LINKS: Final = 100_000  # by which repeated ones are known


class SideTables:
    """Listens to the streams of a recording. Call `write` now and then, and `close` at the end."""

    def __init__(self, lake: Lake, options: LiveOptions, names: Mapping[int, str] = MappingProxyType({})) -> None:
        """`names` are those by which streams were asked for: kept also where no announce names them in time."""
        self._lake = lake
        self._listeners: dict[str, Listener] = {}
        self._due_s: dict[str, float] = {}
        self._written: dict[Row, None] = {}  # metadata that the lake has
        self._linked: dict[Row, None] = {}  # links that it got last
        self.rows = dict.fromkeys(SIDE_TABLES, 0)
        for file in lake.tables("metadata"):
            rows = lake.open_parquet(file.path).read().to_pylist()
            self._written.update(dict.fromkeys(_without_time(tuple(row.values())) for row in rows))
        now_ns = time.monotonic_ns()
        self._known = [(now_ns, "source", stream, 0, None, name, None, None, None) for stream, name in names.items()]
        try:
            for table in SIDE_TABLES:
                self._listeners[table] = Listener(_with_table(options, table))
                self._due_s[table] = time.monotonic() + WRITE_EVERY_S[table]
        except BaseException:
            self._close()
            raise

    def write(self, *, is_last: bool = False) -> None:
        """Add what was received to the lake, where it is time. What cannot be written is kept for the next time."""
        taken: dict[str, tuple[int, list[Row]]] = {}
        for table, listener in self._listeners.items():
            if is_last or time.monotonic() >= self._due_s[table]:
                self._due_s[table] = time.monotonic() + WRITE_EVERY_S[table]
                end = listener.end
                taken[table] = end, self._news(table, listener.rows(listener.first, end))
        for table, (end, rows) in taken.items():
            if rows:
                write_rows(self._lake, table, rows)
            self._listeners[table].forget(end)
            self.rows[table] += len(rows)
            if table != "qos":
                known = self._written if table == "metadata" else self._linked
                known.update(dict.fromkeys(map(_without_time, rows)))
        while len(self._linked) > KEPT_LINKS:
            del self._linked[next(iter(self._linked))]

    def close(self) -> None:
        try:
            self.write(is_last=True)
        finally:
            self._close()

    def _news(self, table: str, rows: list[Row]) -> list[Row]:
        if table == "qos":
            return rows
        given, known = ([*self._known, *rows], self._written) if table == "metadata" else (rows, self._linked)
        news = {_without_time(row): row for row in reversed(given)}  # of repeated ones, the first
        return [row for content, row in reversed(news.items()) if content not in known]

    def _close(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()


def _without_time(row: Row) -> Row:
    return row[1:]


def _with_table(options: LiveOptions, table: str) -> LiveOptions:
    return LiveOptions(
        streams=() if table == "traces" else options.streams,
        table=table,
        aeron_dir=options.aeron_dir,
        config=options.config,
        overrides=options.overrides,
    )


def write_rows(lake: Lake, table: str, rows: list[Row]) -> None:
    """Add rows to a table of the lake."""
    schema = SCHEMAS[table]
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    draft = lake.path / STAGING / f"{table}-{uuid.uuid4().hex}.parquet"
    try:
        pq.write_table(pa.Table.from_arrays(arrays, schema=schema), draft, compression="zstd")
        sync_file(draft)
        lake.append_rows(table, draft, len(rows))
    finally:
        draft.unlink(missing_ok=True)
