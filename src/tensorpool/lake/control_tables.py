# SPDX-License-Identifier: Apache-2.0
"""The control plane as rows: announces, QoS, metadata, trace links and events, from the moment a listener is made.

Messages are soft state. A listener keeps what its user has not taken yet, up to a bound; beyond it the oldest rows are
dropped, and counted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Final

import pyarrow as pa

from tensorpool import aeron
from tensorpool.aeron.adapter import MessageAdapter
from tensorpool.channel import Endpoint
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import Closed, TransportError
from tensorpool.lake.columns import CONTROL_PLANE
from tensorpool.lake.live_options import LiveOptions
from tensorpool.logs import get_logger
from tensorpool.wire import Message
from tensorpool.wire.control import DataSourceAnnounce, DataSourceMeta, QosConsumer, QosProducer, ShmPoolAnnounce
from tensorpool.wire.event import EventMessage
from tensorpool.wire.trace import TraceLinkSet

MAX_ROWS: Final = 100_000
FRAGMENT_LIMIT: Final = 256
POLL_NS: Final = 20_000_000
EVENTS: Final = Endpoint("aeron:ipc?term-length=4m", 1401)

_TYPES: Final = {"BIGINT": pa.int64(), "STRING": pa.string(), "BINARY": pa.binary()}
SCHEMAS: Final = {
    table: pa.schema([(name, _TYPES[kind]) for name, kind in columns.items()])
    for table, columns in CONTROL_PLANE.items()
}

_KINDS: Final[dict[str, tuple[type[Message], ...]]] = {
    "announces": (ShmPoolAnnounce,),
    "qos": (QosProducer, QosConsumer),
    "metadata": (DataSourceAnnounce, DataSourceMeta),
    "traces": (TraceLinkSet,),
    "events": (EventMessage,),
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
        case "traces", TraceLinkSet():
            head = (now_ns, message.stream_id, message.epoch, message.seq, message.trace_id)
            return [_row(*head, parent.trace_id) for parent in message.parents]
        case "events", EventMessage():
            head = (now_ns, message.timestamp_ns, message.correlation_id, message.tag, message.key)
            return [_row(*head, message.format.name, message.value)]
    return []


def _row(*values: Any) -> Row:
    """Numbers beyond Spark's BIGINT, which no conforming peer sends, are null."""
    return tuple(None if isinstance(value, int) and not -(2**63) <= value < 2**63 else value for value in values)


class Listener:
    """Collects the rows of a table from the moment it is made, on a thread. Outlives the media driver.

    Raises TransportError where no media driver is alive.
    """

    role_name = "tensorpool-table"

    def __init__(self, options: LiveOptions) -> None:
        config = DriverConfig.load(options.config, overrides=options.overrides)
        driver = config.driver
        endpoints = {
            "announces": driver.announce,
            "qos": driver.qos,
            "metadata": driver.metadata,
            "traces": driver.metadata,
            "events": EVENTS,
        }
        self._table = options.table
        self._stream_ids = set(options.streams)
        self._log = get_logger("spark", table=options.table)
        endpoint = endpoints[options.table]
        self._connection = aeron.MediaDriverConnection(
            options.aeron_dir or driver.aeron_dir or aeron.default_aeron_dir(),
            "tensorpool-spark",
            lambda client, now_ns: aeron.subscribe(client, endpoint),
            self._log,
        )
        self._adapter = MessageAdapter(on_malformed=lambda data, error: None)
        for kind in _KINDS[options.table]:
            self._adapter.add(kind, self._on_message)
        self.period_s = config.policies.announce_period_ms / 1000
        self._rows: deque[Row] = deque()
        self.first = 0  # the number of the oldest row that is kept
        self._lock = threading.Lock()
        self._runner = aeron.AgentRunner(self, aeron.SleepingIdle(POLL_NS), on_error=self._log_failed_turn).start()

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
        self._runner.close()

    # --- the agent

    def on_start(self) -> None:
        self._connection.open(time.monotonic_ns())

    def do_work(self) -> int:
        now_ns = time.monotonic_ns()
        try:
            self._connection.maintain(now_ns)
            subscription = self._connection.streams
            return 0 if subscription is None else subscription.poll(self._adapter.on_message, FRAGMENT_LIMIT)
        except (TransportError, Closed) as error:
            self._connection.lose(error, now_ns)
            return 0

    def on_close(self) -> None:
        self._connection.close()

    # --- inside

    def _log_failed_turn(self, error: Exception) -> None:
        self._log.error("turn_failed", exc_info=error)

    def _on_message(self, message: Message, info: aeron.MessageInfo) -> None:
        if self._stream_ids and self._table != "events" and getattr(message, "stream_id", None) not in self._stream_ids:
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
