# SPDX-License-Identifier: Apache-2.0
"""Messages reach the method of their kind; what is malformed or foreign is counted apart."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tensorpool.aeron import MessageInfo
from tensorpool.aeron.adapter import MessageAdapter
from tensorpool.errors import Closed, DecodeError
from tensorpool.wire import bridge, decode, driver, event, trace
from tensorpool.wire.control import QosProducer, ShmPoolAnnounce
from tensorpool.wire.driver import Role, ShmLeaseKeepalive
from tensorpool.wire.event import EventMessage, Format

QOS = QosProducer(stream_id=10_000, producer_id=3, epoch=7, current_seq=5)
KEEPALIVE = ShmLeaseKeepalive(lease_id=1, stream_id=2, client_id=3, role=Role.CONSUMER, client_timestamp_ns=4)
INFO = cast(MessageInfo, object())


class Desk:
    """Notes what an adapter calls."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.malformed: list[bytes] = []
        self.foreign: list[bytes] = []
        self.adapter = MessageAdapter(self.on_malformed, on_foreign=self.foreign.append)

    def on_malformed(self, data: bytes, error: DecodeError) -> None:
        self.malformed.append(data)

    def on_received(self, message: Any, info: MessageInfo) -> None:
        assert info is INFO
        self.received.append(message)

    def take(self, *messages: bytes) -> None:
        for data in messages:
            self.adapter.on_message(data, INFO)


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.adapter.add(QosProducer, desk.on_received)
    return desk


def test_a_message_reaches_the_method_of_its_kind(desk: Desk) -> None:
    """Decoded, with where it came from."""
    desk.adapter.add(ShmLeaseKeepalive, lambda message, info: desk.on_received((message.lease_id, "driver"), info))
    desk.take(QOS.encode(), KEEPALIVE.encode())
    assert desk.received == [QOS, (1, "driver")]


@pytest.mark.parametrize("schema", [driver.schema, bridge.schema, trace.schema])
def test_the_same_template_of_another_schema_is_foreign(desk: Desk, schema: Any) -> None:
    """Template ids repeat between schemas."""
    data = bytearray(QOS.encode())
    data[4:6] = schema.id.to_bytes(2, "little")
    desk.take(bytes(data), KEEPALIVE.encode())
    assert (desk.received, len(desk.foreign), desk.malformed) == ([], 2, [])


def test_every_truncation_is_malformed(desk: Desk) -> None:
    """Also one that ends inside the header, of whatever kind the message would have been."""
    data = QOS.encode()
    desk.take(*(data[:length] for length in range(len(data))))
    desk.take(*(KEEPALIVE.encode()[:length] for length in range(8)))
    assert (desk.received, desk.foreign, len(desk.malformed)) == ([], [], len(data) + 8)


def test_bytes_are_handed_over_undecoded_from_a_whole_header_on(desk: Desk) -> None:
    """The method decides which of them it decodes; what it finds malformed is counted like any other."""
    desk.adapter.add_undecoded(ShmPoolAnnounce, lambda data, info: desk.on_received(decode(data), info))
    header = ShmPoolAnnounce._header
    desk.take(header, header[:7])
    assert (desk.received, desk.malformed) == ([], [header, header[:7]])
    desk.adapter.add_undecoded(QosProducer, desk.on_received)
    desk.take(QOS.encode())
    assert desk.received == [QOS.encode()]


def test_a_schema_may_have_another_id(desk: Desk) -> None:
    """As deployments that number events differently have it."""
    schema = event.schema.with_id(906)
    desk.adapter.add(EventMessage, desk.on_received, schema)
    message = EventMessage(timestamp_ns=1, correlation_id=2, format=Format.NOTHING, tag="t", key="k", value=b"")
    desk.take(schema.encode(message), event.schema.encode(message))
    assert (desk.received, len(desk.foreign)) == ([message], 1)


def test_a_method_that_fails_otherwise_is_its_callers_business(desk: Desk) -> None:
    """Such as a publication that is closed."""

    def fails(*_: object) -> None:
        raise Closed("closed")

    desk.adapter.add(ShmLeaseKeepalive, fails)
    with pytest.raises(Closed):
        desk.take(KEEPALIVE.encode())
    assert desk.malformed == []
