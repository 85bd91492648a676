# SPDX-License-Identifier: Apache-2.0
"""The control plane's messages as rows."""

from __future__ import annotations

import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.lake import control_tables
from tensorpool.lake.control_tables import Listener, rows_of
from tensorpool.lake.live_options import source_options
from tensorpool.wire.control import Mode, QosConsumer, QosProducer
from tensorpool.wire.event import EventMessage, Format
from tests.support.deployment import options_of
from tests.support.processes import wait_until


def test_qos_and_events_are_rows() -> None:
    producer = QosProducer(stream_id=3, producer_id=4, epoch=5, current_seq=6)
    assert rows_of("qos", producer, 9) == [(9, "producer", 3, 4, 5, 6, None, None, None)]
    consumer = QosConsumer(
        stream_id=3, consumer_id=7, epoch=5, last_seq_seen=2**64 - 2, drops_gap=1, drops_late=2, mode=Mode.STREAM
    )
    assert rows_of("qos", consumer, 9) == [(9, "consumer", 3, 7, 5, None, 1, 2, "STREAM")]
    event = EventMessage(timestamp_ns=1, correlation_id=2, tag="lab", key="go", format=Format.NOTHING, value=b"")
    assert rows_of("events", event, 9) == [(9, 1, 2, "lab", "go", "NOTHING", b"")]
    assert rows_of("metadata", event, 9) == []


@pytest.fixture
def listening(pool: tp.Local) -> dict[str, str]:
    return {"table": "announces", **options_of(pool)}


def test_rows_that_no_query_takes_are_bounded(listening: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_tables, "MAX_ROWS", 10)
    listener = Listener(source_options(listening))
    wait_until(lambda: listener.end > 30, "more rows than are kept")
    assert len(listener.rows(0, listener.end)) <= 10
    listener.close()


def test_messages_are_received_again_after_the_media_driver_restarts(media_driver: aeron.MediaDriver) -> None:
    options = source_options({"table": "events", "aeronDir": media_driver.aeron_dir})
    listener = Listener(options)
    media_driver.close()
    wait_until(lambda: listener._connection.client is None, "the loss is noticed")
    with aeron.MediaDriver(media_driver.aeron_dir) as again:
        client = aeron.connect(again.aeron_dir)
        publication = client.add_publication(control_tables.EVENTS.channel, control_tables.EVENTS.stream_id)
        event = EventMessage(timestamp_ns=1, correlation_id=2, tag="", key="go", format=Format.NOTHING, value=b"")
        wait_until(lambda: publication.offer(event.encode()), "the listener is connected again")
        wait_until(lambda: listener.end == 1, "the event is received")
        listener.close()
        client.close()
