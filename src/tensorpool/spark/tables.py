# SPDX-License-Identifier: Apache-2.0
"""The control plane as tables: announces, QoS, metadata and events, as the planner hears them.

Messages are soft state: a table begins when its query does, and a restarted query goes on with what it hears then. The
planner keeps what no batch has taken yet, up to a bound; beyond it the oldest are forgotten, and counted.
"""

from __future__ import annotations

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
from tensorpool.errors import Closed, DecodeError, TransportError
from tensorpool.logs import get_logger
from tensorpool.spark.columns import CONTROL_PLANE
from tensorpool.spark.options import LiveOptions
from tensorpool.spark.planner import exit_in_order
from tensorpool.wire import Message, decode
from tensorpool.wire.control import DataSourceAnnounce, DataSourceMeta, QosConsumer, QosProducer, ShmPoolAnnounce
from tensorpool.wire.event import EventMessage

MAX_ROWS: Final = 100_000
SNAPSHOT_PERIODS: Final = 1.5
POLL_S: Final = 0.02
RECONNECT_S: Final = 0.5
EVENTS: Final = Endpoint("aeron:ipc?term-length=4m", 1401)

_TYPES: Final = {"BIGINT": pa.int64(), "STRING": pa.string(), "BINARY": pa.binary()}
SCHEMAS: Final = {
    table: pa.schema([(name, _TYPES[kind]) for name, kind in columns.items()])
    for table, columns in CONTROL_PLANE.items()
}

type Row = tuple[Any, ...]


def rows_of(table: str, message: Message, now_ns: int) -> list[Row]:
    """What a message adds to a table; nothing where it belongs to another."""
    head: Row
    match table, message:
        case "announces", ShmPoolAnnounce():
            pools = ",".join(f"{pool.pool_id}:{pool.stride_bytes}" for pool in message.payload_pools)
            stamp_ns, uri = message.announce_timestamp_ns, message.header_region_uri
            head = (now_ns, message.stream_id, message.producer_id, message.epoch, stamp_ns)
            return [_row(*head, message.layout_version, message.header_nslots, pools, uri)]
        case "qos", QosProducer():
            head = (now_ns, "producer", message.stream_id, message.producer_id, message.epoch)
            return [_row(*head, message.current_seq, None, None, None)]
        case "qos", QosConsumer():
            head = (now_ns, "consumer", message.stream_id, message.consumer_id, message.epoch)
            return [_row(*head, message.last_seq_seen, message.drops_gap, message.drops_late, message.mode.name)]
        case "metadata", DataSourceAnnounce():
            head = (now_ns, "source", message.stream_id, message.meta_version, None, message.name)
            return [_row(*head, None, None, None)]
        case "metadata", DataSourceMeta():
            head = (now_ns, "attribute", message.stream_id, message.meta_version, message.timestamp_ns, None)
            return [_row(*head, entry.key, entry.format, entry.value) for entry in message.attributes]
        case "events", EventMessage():
            head = (now_ns, message.timestamp_ns, message.correlation_id, message.tag, message.key)
            return [_row(*head, message.format.name, message.value)]
    return []


def _row(*values: Any) -> Row:
    """Numbers beyond Spark's BIGINT, which no conforming peer sends, are null."""
    return tuple(None if isinstance(value, int) and not -(2**63) <= value < 2**63 else value for value in values)


class Listener:
    """Collects the rows of a table from the moment it is made. Lets itself be passed over like any observer."""

    def __init__(self, options: LiveOptions) -> None:
        config = DriverConfig.load(options.config, overrides=options.overrides)
        driver = config.driver
        endpoints = {"announces": driver.announce, "qos": driver.qos, "metadata": driver.metadata, "events": EVENTS}
        self._table = options.table
        self._streams = set(options.streams)
        self._endpoint = endpoints[options.table]
        self._aeron_dir = options.aeron_dir or driver.aeron_dir or None
        self._log = get_logger("spark", table=options.table)
        self.period_s = config.policies.announce_period_ms / 1000
        self._rows: deque[Row] = deque()
        self.first = 0  # the number of the oldest row that is kept
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._client, self._subscription = self._connect()
        self._thread = threading.Thread(target=self._run, name="tensorpool-table", daemon=True)
        self._thread.start()

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
        self._is_closed.set()
        self._thread.join()
        self._client.close()

    def _connect(self) -> tuple[aeron.Client, aeron.Subscription]:
        client = aeron.connect(self._aeron_dir, client_name="tensorpool-spark")
        channel = self._endpoint.channel
        separator = "|" if "?" in channel else "?"
        try:
            return client, client.add_subscription(f"{channel}{separator}tether=false", self._endpoint.stream_id)
        except BaseException:
            client.close()
            raise

    def _run(self) -> None:
        while not self._is_closed.is_set():
            if self._client.is_closed:
                self._reconnect()
                continue
            try:
                heard = self._subscription.poll(self._on_message, 256)
            except (TransportError, Closed):
                heard = 0
            if heard == 0:
                self._is_closed.wait(POLL_S)

    def _reconnect(self) -> None:
        self._log.warning("media_driver_lost")
        self._client.close()
        while not self._is_closed.wait(RECONNECT_S):
            try:
                self._client, self._subscription = self._connect()
                return
            except TransportError:
                continue  # none is there yet

    def _on_message(self, data: bytes, info: aeron.MessageInfo) -> None:
        try:
            message = decode(data)
        except DecodeError:
            return
        if self._streams and self._table != "events" and getattr(message, "stream_id", None) not in self._streams:
            return
        rows = rows_of(self._table, message, time.monotonic_ns())
        with self._lock:
            self._rows.extend(rows)
            excess = len(self._rows) - MAX_ROWS
            for _ in range(excess):
                self._rows.popleft()
                self.first += 1
        if excess > 0:
            self._log.warning("rows_forgotten", rows=excess, reason="no batch took them in time")


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
        if self._base is None:  # a batch that an earlier run planned: nobody has its rows any more
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
