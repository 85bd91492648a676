# SPDX-License-Identifier: Apache-2.0
"""Publications, subscriptions, images and counters over a real media driver."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from tensorpool import aeron
from tensorpool._core import MessageFilter
from tensorpool.errors import Closed, LocalProtocolError, TransportError
from tensorpool.wire import decode
from tensorpool.wire.control import FrameDescriptor
from tests.support.processes import wait_until

IPC = "aeron:ipc?term-length=64k"
_stream_ids = itertools.count(20_000)

Connect = Callable[[aeron.MediaDriver], aeron.Client]
Pair = tuple[aeron.Publication, aeron.Subscription]


@pytest.fixture
def client(shared_media_driver: aeron.MediaDriver, connect: Connect) -> aeron.Client:
    return connect(shared_media_driver)


@pytest.fixture
def stream_id() -> int:
    return next(_stream_ids)


@pytest.fixture
def pair(client: aeron.Client, stream_id: int) -> Iterator[Pair]:
    subscription = client.add_subscription(IPC, stream_id)
    publication = client.add_publication(IPC, stream_id)
    wait_until(lambda: publication.has_room and subscription.is_connected, "the pair is connected")
    yield publication, subscription
    publication.close()
    subscription.close()


def receive(subscription: aeron.Subscription, count: int) -> list[bytes]:
    messages: list[bytes] = []
    wait_until(
        lambda: subscription.poll(lambda data, _: messages.append(data)) < 0 or len(messages) >= count,
        f"{count} messages arrive",
    )
    return messages


def test_offer_offerv_and_try_claim_deliver_the_same_bytes(pair: Pair) -> None:
    """A message arrives byte by byte however it was handed over, in one piece or gathered from several."""
    publication, subscription = pair
    text = bytes(range(256)) * 4
    assert publication.offer(text)
    assert publication.offerv([text[:100], b"", memoryview(text)[100:]])
    assert publication.try_claim(bytearray(text))
    assert receive(subscription, 3) == [text] * 3


@pytest.mark.parametrize("exclusive", [False, True])
def test_messages_beyond_the_mtu_are_assembled_across_polls(
    client: aeron.Client, stream_id: int, exclusive: bool
) -> None:
    """A message of many fragments arrives whole although every poll takes a single fragment."""
    subscription = client.add_subscription(IPC, stream_id)
    publication = client.add_publication(IPC, stream_id, exclusive)
    wait_until(lambda: publication.has_room, "connected")
    sent = [bytes([n]) * (publication.max_message_length - n) for n in range(3)]
    for message in sent:
        assert publication.offer(message)
    received: list[bytes] = []
    wait_until(
        lambda: subscription.poll(lambda data, _: received.append(data), 1) == 0 and len(received) == 3,
        "all three are assembled",
    )
    assert received == sent


def test_assembly_memory_goes_with_the_image(client: aeron.Client, stream_id: int) -> None:
    """An assembler is kept per session that fragments, and is gone once that session's image is."""
    subscription = client.add_subscription(IPC, stream_id)
    for _ in range(3):
        publication = client.add_publication(IPC, stream_id, True)
        wait_until(lambda publication=publication: publication.has_room, "connected")
        assert publication.offer(bytes(5000))
        receive(subscription, 1)
        assert subscription.partial_sessions == 1
        publication.close()
        wait_until(
            lambda: subscription.poll(lambda *_: None) == 0 and subscription.partial_sessions == 0,
            "the assembler is deleted",
        )


def test_a_filter_puts_together_known_messages_up_to_its_limit_only(client: aeron.Client, stream_id: int) -> None:
    """What it refuses keeps no memory, is counted once, and the next message of its session is none the worse."""
    channel = "aeron:ipc?term-length=1m"
    subscription = client.add_subscription(channel, stream_id)
    publication = client.add_publication(channel, stream_id, True)
    wait_until(lambda: publication.has_room, "connected")
    filter = MessageFilter([(900, 4)], max_bytes=20_000)
    received: list[bytes] = []

    def kept_after(length: int, schema_id: int = 900) -> int:
        """How many sessions have an assembler when a message of this length and a short one after it were read."""
        long = struct.pack("<HHHH", 0, 4, schema_id, 1).ljust(length, b".")
        for data in (long, b"the next"):
            wait_until(lambda data=data: publication.offer(data), "the log takes it")
        wait_until(
            lambda: (
                filter.poll(subscription, lambda data, _: received.append(data), 1) and received[-1:] == [b"the next"]
            ),
            "both are read",
        )
        received.remove(b"the next")
        return subscription.partial_sessions

    assert [kept_after(length) for length in (30_000, 20_001, 20_000, 30_000)] == [0, 0, 1, 0]
    assert kept_after(10_000, schema_id=901) == 0
    assert [len(data) for data in received] == [20_000]
    assert filter.counts == {"foreign": 1, "malformed": 0, "too_long": 3}


def test_offers_say_why_they_were_not_accepted(client: aeron.Client, stream_id: int) -> None:
    """Not connected and back-pressured are falsy results with a name, not exceptions."""
    publication = client.add_publication(IPC, stream_id)
    assert publication.offer(b"x") is aeron.OfferResult.NOT_CONNECTED
    assert not publication.offer(b"x")
    subscription = client.add_subscription(IPC, stream_id)  # kept: it is closed with its last reference
    wait_until(lambda: publication.has_room, "connected")
    results = {publication.offer(bytes(1000)) for _ in range(1000)}
    assert subscription.is_connected
    assert results <= {
        aeron.OfferResult.ACCEPTED,
        aeron.OfferResult.BACK_PRESSURED,
        aeron.OfferResult.ADMIN_ACTION,
    }
    assert aeron.OfferResult.BACK_PRESSURED in results
    assert repr(aeron.OfferResult.BACK_PRESSURED) == "OfferResult.BACK_PRESSURED"


@pytest.mark.parametrize("exclusive", [False, True])
def test_room_is_where_a_message_would_go(client: aeron.Client, stream_id: int, exclusive: bool) -> None:
    """Not without a subscriber, and not in a full log; a reader that comes and reads makes room."""
    publication = client.add_publication(IPC, stream_id, exclusive)
    assert not publication.has_room
    subscription = client.add_subscription(IPC, stream_id)
    wait_until(lambda: publication.has_room, "the log is open")
    while publication.offer(bytes(1000)):
        assert publication.is_connected
    wait_until(lambda: not publication.offer(bytes(1000)) and not publication.has_room, "the log is full")
    wait_until(lambda: subscription.poll(lambda *_: None) < 0 or publication.has_room, "there is room again")
    assert publication.offer(b"x")


def test_too_long_messages_are_refused_with_the_limit(pair: Pair) -> None:
    """A message that cannot fit is an error that names the limit; nothing is sent."""
    publication, subscription = pair
    with pytest.raises(ValueError, match=str(publication.max_message_length)):
        publication.offer(bytes(publication.max_message_length + 1))
    with pytest.raises(ValueError, match="one fragment"):
        publication.try_claim(bytes(publication.max_payload_length + 1))
    assert publication.offer(b"still fine")
    assert receive(subscription, 1) == [b"still fine"]


def test_a_handler_that_raises_loses_only_its_own_message(pair: Pair) -> None:
    """The exception reaches the caller of poll and what was not yet delivered stays in the log."""
    publication, subscription = pair
    for n in range(5):
        assert publication.offer(bytes([n]))
    seen: list[int] = []

    def handler(data: bytes, _: aeron.MessageInfo) -> None:
        seen.append(data[0])
        if data[0] == 2:
            raise KeyError("third")

    with pytest.raises(KeyError, match="third"):
        wait_until(lambda: subscription.poll(handler, 100) < 0, "the third message")
    assert seen == [0, 1, 2]
    assert receive(subscription, 2) == [b"\3", b"\4"]


def test_a_handler_that_raises_leaves_the_other_sessions_in_the_log(client: aeron.Client, stream_id: int) -> None:
    """With two publishers, an exception for one loses no message of the other, fragmented or not."""
    subscription = client.add_subscription(IPC, stream_id)
    first = client.add_publication(IPC, stream_id, True)
    second = client.add_publication(IPC, stream_id, True)
    wait_until(lambda: subscription.image_count == 2, "both images are there")
    big = bytes(4000)
    for publication in (first, second):
        assert publication.offer(b"a" + big)
        assert publication.offer(b"b" + big)
    seen: list[bytes] = []

    def handler(data: bytes, _: aeron.MessageInfo) -> None:
        seen.append(data)
        raise ZeroDivisionError

    for _ in range(4):
        with pytest.raises(ZeroDivisionError):
            wait_until(lambda: subscription.poll(handler, 100) < 0, "a message")
    assert sorted(seen) == [b"a" + big] * 2 + [b"b" + big] * 2


def test_message_info_names_the_session_and_the_position(pair: Pair) -> None:
    """The handler learns which session sent the message and where the log stands after it."""
    publication, subscription = pair
    assert publication.offer(b"abc")
    infos: list[aeron.MessageInfo] = []
    wait_until(lambda: subscription.poll(lambda _, info: infos.append(info)) < 0 or infos, "a message")
    assert infos[0].session_id == publication.session_id
    assert infos[0].stream_id == publication.stream_id
    assert infos[0].position == publication.position


def test_image_events_come_on_the_polling_thread_with_their_join_time(client: aeron.Client, stream_id: int) -> None:
    """Beginning and end of an image are reported once each, in order, with the monotonic time when Aeron saw it."""
    events: list[aeron.ImageEvent] = []
    before = time.monotonic_ns()
    subscription = client.add_subscription(IPC, stream_id, events.append)
    publication = client.add_publication(IPC, stream_id)
    wait_until(lambda: publication.has_room, "connected")
    assert events == []
    wait_until(lambda: subscription.poll(lambda *_: None) < 0 or events, "the image is reported")
    publication.close()
    wait_until(lambda: subscription.poll(lambda *_: None) < 0 or len(events) == 2, "its end is reported")
    came, went = events
    assert (came.available, went.available) == (True, False)
    assert came.session_id == went.session_id == publication.session_id
    assert before < came.monotonic_ns < went.monotonic_ns < time.monotonic_ns()


def test_an_image_listener_that_raises_reaches_the_caller(client: aeron.Client, stream_id: int) -> None:
    """An exception in on_image ends the poll before any message is taken."""

    def refuse(_: aeron.ImageEvent) -> None:
        raise RuntimeError("no images, please")

    subscription = client.add_subscription(IPC, stream_id, refuse)
    publication = client.add_publication(IPC, stream_id)
    wait_until(lambda: publication.has_room, "connected")
    assert publication.offer(b"kept")
    with pytest.raises(RuntimeError, match="no images"):
        wait_until(lambda: subscription.poll(lambda *_: None) < 0, "the image is reported")
    assert receive(subscription, 1) == [b"kept"]


def test_native_descriptors_equal_the_codec(pair: Pair) -> None:
    """What offer_descriptor writes is what the codec decodes."""
    publication, subscription = pair
    assert publication.offer_descriptor(7, 3, 41, 99, 2, 1234)
    assert publication.offer_descriptor(7, 3, 42)
    assert [decode(message) for message in receive(subscription, 2)] == [
        FrameDescriptor(stream_id=7, epoch=3, seq=41, timestamp_ns=99, meta_version=2, trace_id=1234),
        FrameDescriptor(stream_id=7, epoch=3, seq=42),
    ]


def test_counters_are_visible_to_other_clients(
    shared_media_driver: aeron.MediaDriver, client: aeron.Client, connect: Connect
) -> None:
    """A counter's value, label and key can be read by any client of the driver, and it vanishes when closed."""
    counter = client.add_counter(4242, b"key-1", "tensorpool: a counter")
    counter.value = 5
    assert counter.add(2) == 7
    other = connect(shared_media_driver)

    def readings() -> list[aeron.CounterReading]:
        return [reading for reading in other.counters() if reading.type_id == 4242]

    wait_until(readings, "the counter is visible")
    (reading,) = readings()
    assert (reading.value, reading.label, reading.key[:5]) == (7, "tensorpool: a counter", b"key-1")
    counter.close()
    wait_until(lambda: not readings(), "the counter is gone")
    with pytest.raises(ValueError, match="112"):
        client.add_counter(1, bytes(113), "too long")


def test_a_channel_that_aeron_refuses_is_a_transport_error(client: aeron.Client, stream_id: int) -> None:
    """A malformed or conflicting channel gives Aeron's own words, and the client lives on."""
    with pytest.raises(TransportError, match="cannot add publication aeron:nonsense"):
        client.add_publication("aeron:nonsense", stream_id)
    first = client.add_publication(IPC, stream_id)
    with pytest.raises(TransportError, match="term-length") as refused:
        client.add_publication("aeron:ipc?term-length=128k", stream_id)
    assert not first.is_closed
    assert refused.value.code != 0
    assert "\n" not in str(refused.value)
    assert not client.is_closed


def test_use_after_close_is_closed(client: aeron.Client, stream_id: int) -> None:
    """Every call on a closed object raises Closed, also when the client closed it; close() twice is fine."""
    subscription = client.add_subscription(IPC, stream_id)
    publication = client.add_publication(IPC, stream_id)
    counter = client.add_counter(1, b"", "c")
    publication.close()
    publication.close()
    with pytest.raises(Closed, match="publication"):
        publication.offer(b"x")
    client.close()
    client.close()
    uses: list[Callable[[], object]] = [
        lambda: subscription.poll(lambda *_: None),
        lambda: subscription.is_connected,
        lambda: counter.value,
        lambda: counter.add(1),
        lambda: publication.position,
        lambda: publication.is_connected,
        lambda: publication.has_room,
        lambda: client.add_publication(IPC, stream_id),
        lambda: client.add_subscription(IPC, stream_id),
        lambda: client.add_counter(1, b"", "c"),
        client.counters,
    ]
    for use in uses:
        with pytest.raises(Closed):
            use()
    assert client.is_closed
    assert publication.is_closed
    assert subscription.is_closed


def test_polling_from_inside_the_handler_is_refused(pair: Pair) -> None:
    """A subscription is polled by one caller at a time."""
    publication, subscription = pair
    assert publication.offer(b"x")
    with pytest.raises(LocalProtocolError, match="already being polled"):
        wait_until(lambda: subscription.poll(lambda *_: subscription.poll(lambda *_: None)) < 0, "a message")
    with pytest.raises(ValueError, match="positive"):
        subscription.poll(lambda *_: None, 0)


def test_connecting_where_no_driver_lives_says_so_at_once(shm_dir: object) -> None:
    """Without a media driver the error names the directory and what to do."""
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"no media driver is alive at .*nowhere.*tensorpool driver"):
        aeron.connect(f"{shm_dir}/nowhere")
    assert time.monotonic() - started < 5
