# SPDX-License-Identifier: Apache-2.0
"""The control plane as tables: announces, QoS, metadata and events, as the planner hears them.

Messages are soft state: a table begins when its query does, and a restarted query goes on with what it hears then. The
planner keeps what no batch has taken yet, up to a bound; beyond it the oldest are forgotten, and counted.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from tensorpool import aeron
from tensorpool.channel import Endpoint
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import DecodeError
from tensorpool.spark.options import LiveOptions
from tensorpool.wire import Message, decode
from tensorpool.wire.control import DataSourceAnnounce, DataSourceMeta, QosConsumer, QosProducer, ShmPoolAnnounce
from tensorpool.wire.event import EventMessage

MAX_ROWS: Final = 100_000
SNAPSHOT_PERIODS: Final = 1.5
POLL_S: Final = 0.02
EVENTS: Final = Endpoint("aeron:ipc?term-length=4m", 1401)

TABLE_DDL: Final = {
    "announces": "received_ns BIGINT, stream_id BIGINT, producer_id BIGINT, epoch BIGINT, announce_timestamp_ns BIGINT, "
    "layout_version BIGINT, header_nslots BIGINT, pools STRING, header_region_uri STRING",
    "qos": "received_ns BIGINT, kind STRING, stream_id BIGINT, client_id BIGINT, epoch BIGINT, seq BIGINT, "
    "drops_gap BIGINT, drops_late BIGINT, mode STRING",
    "metadata": "received_ns BIGINT, kind STRING, stream_id BIGINT, meta_version BIGINT, timestamp_ns BIGINT, "
    "name STRING, `key` STRING, format STRING, value BINARY",
    "events": "received_ns BIGINT, timestamp_ns BIGINT, correlation_id BIGINT, tag STRING, `key` STRING, "
    "format STRING, value BINARY",
}
_INT: Final = pa.int64()
_TEXT: Final = pa.string()
SCHEMAS: Final = {
    "announces": pa.schema(
        [(name, _INT) for name in TABLE_DDL["announces"].replace(" BIGINT", "").split(", ")[:7]]
        + [("pools", _TEXT), ("header_region_uri", _TEXT)]
    ),
    "qos": pa.schema(
        [("received_ns", _INT), ("kind", _TEXT), ("stream_id", _INT), ("client_id", _INT), ("epoch", _INT)]
        + [("seq", _INT), ("drops_gap", _INT), ("drops_late", _INT), ("mode", _TEXT)]
    ),
    "metadata": pa.schema(
        [("received_ns", _INT), ("kind", _TEXT), ("stream_id", _INT), ("meta_version", _INT), ("timestamp_ns", _INT)]
        + [("name", _TEXT), ("key", _TEXT), ("format", _TEXT), ("value", pa.binary())]
    ),
    "events": pa.schema(
        [("received_ns", _INT), ("timestamp_ns", _INT), ("correlation_id", _INT), ("tag", _TEXT), ("key", _TEXT)]
        + [("format", _TEXT), ("value", pa.binary())]
    ),
}

type Row = tuple[Any, ...]


def rows_of(table: str, message: Message, now_ns: int) -> list[Row]:
    """What a message adds to a table; nothing where it belongs to another."""
    match table, message:
        case "announces", ShmPoolAnnounce():
            pools = ",".join(f"{pool.pool_id}:{pool.stride_bytes}" for pool in message.payload_pools)
            stamp_ns, uri = message.announce_timestamp_ns, message.header_region_uri
            head = (now_ns, message.stream_id, message.producer_id, message.epoch, stamp_ns)
            return [(*head, message.layout_version, message.header_nslots, pools, uri)]
        case "qos", QosProducer():
            head = (now_ns, "producer", message.stream_id, message.producer_id, message.epoch)
            return [(*head, message.current_seq, None, None, None)]
        case "qos", QosConsumer():
            head = (now_ns, "consumer", message.stream_id, message.consumer_id, message.epoch)
            return [(*head, message.last_seq_seen, message.drops_gap, message.drops_late, message.mode.name)]
        case "metadata", DataSourceAnnounce():
            head = (now_ns, "source", message.stream_id, message.meta_version, None, message.name)
            return [(*head, None, None, None)]
        case "metadata", DataSourceMeta():
            head = (now_ns, "attribute", message.stream_id, message.meta_version, message.timestamp_ns, None)
            return [(*head, entry.key, entry.format, entry.value) for entry in message.attributes]
        case "events", EventMessage():
            head = (now_ns, message.timestamp_ns, message.correlation_id, message.tag, message.key)
            return [(*head, message.format.name, message.value)]
    return []


class Listener:
    """Collects the rows of a table from the moment it is made. Lets itself be passed over like any observer."""

    def __init__(self, options: LiveOptions) -> None:
        config = DriverConfig.load(options.config, overrides=options.overrides)
        self._table = options.table
        self._streams = {stream for stream in options.streams if isinstance(stream, int)}
        self.period_s = config.policies.announce_period_ms / 1000
        self._client = aeron.connect(
            options.aeron_dir or config.driver.aeron_dir or None, client_name="tensorpool-spark"
        )
        driver = config.driver
        endpoint = {"announces": driver.announce, "qos": driver.qos, "metadata": driver.metadata, "events": EVENTS}
        where = endpoint[options.table]
        separator = "|" if "?" in where.channel else "?"
        self._subscription = self._client.add_subscription(f"{where.channel}{separator}tether=false", where.stream_id)
        self._rows: deque[Row] = deque()
        self.first = 0  # the number of the oldest row that is kept
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="tensorpool-table", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def end(self) -> int:
        with self._lock:
            return self.first + len(self._rows)

    def rows(self, lo: int, hi: int) -> list[Row]:
        with self._lock:
            return [row for index, row in enumerate(self._rows, self.first) if lo <= index < hi]

    def forget(self, upto: int) -> None:
        with self._lock:
            while self.first < upto and self._rows:
                self._rows.popleft()
                self.first += 1

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._is_closed:
            if self._subscription.poll(self._on_message, 256) == 0:
                time.sleep(POLL_S)

    def _on_message(self, data: bytes, info: aeron.MessageInfo) -> None:
        try:
            message = decode(data)
        except DecodeError:
            return
        if self._streams and getattr(message, "stream_id", None) not in self._streams:
            return
        rows = rows_of(self._table, message, time.monotonic_ns())
        with self._lock:
            self._rows.extend(rows)
            while len(self._rows) > MAX_ROWS:
                self._rows.popleft()
                self.first += 1


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
            time.sleep(SNAPSHOT_PERIODS * listener.period_s)
            return [RowsPartition(listener.rows(0, listener.end), self._options.table)]
        finally:
            listener.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read_rows(partition)


class TableStreamReader(DataSourceStreamReader):
    """Streaming: everything from the query's start on."""

    def __init__(self, options: LiveOptions) -> None:
        self._options = options
        self._listener: Listener | None = None
        self._base = 0  # where an earlier run of the query stopped counting

    def initialOffset(self) -> dict[str, Any]:
        self._listen()
        return {"row": 0}

    def latestOffset(self, start: dict[str, Any] | None = None, limit: object = None) -> dict[str, Any]:
        listener = self._listen()
        if start is not None and listener.end == 0:
            self._base = start["row"]
        return {"row": self._base + listener.end}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        listener = self._listen()
        rows = listener.rows(start["row"] - self._base, end["row"] - self._base)
        return [RowsPartition(rows, self._options.table)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read_rows(partition)

    def commit(self, end: dict[str, Any]) -> None:
        self._listen().forget(end["row"] - self._base)

    def stop(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _listen(self) -> Listener:
        if self._listener is None:
            self._listener = Listener(self._options)
        return self._listener
