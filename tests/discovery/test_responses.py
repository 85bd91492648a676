# SPDX-License-Identifier: Apache-2.0
"""Response endpoints that strangers name: which are opened, how many, and for how long."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tensorpool import aeron
from tensorpool.discovery.config import RegistrySection
from tensorpool.discovery.responses import Responder, Route, route_to
from tests.support.processes import wait_until

BOTH = ("aeron:ipc", "aeron:udp")
LIMIT = 4
LONG_TERM = "aeron:ipc?term-length=16m"  # carries messages of a mebibyte


@pytest.mark.parametrize(
    ("channel", "opened", "longest"),
    [
        ("aeron:ipc", "aeron:ipc?term-length=8388608|linger=0", 1 << 20),
        ("aeron:ipc?term-length=64k|tether=false", "aeron:ipc?term-length=65536|linger=0", 8_192),
        ("aeron:ipc?term-length=1g", "aeron:ipc?term-length=16777216|linger=0", 2 << 20),
        ("aeron:udp?endpoint=10.1.2.3:99", "aeron:udp?endpoint=10.1.2.3:99|term-length=8388608|linger=0", 1 << 20),
        (
            "aeron:udp?mtu=8k|endpoint=localhost:99|interface=lo",
            "aeron:udp?endpoint=localhost:99|interface=lo|mtu=8k|term-length=8388608|linger=0",
            1 << 20,
        ),
        ("aeron:udp?endpoint=[::1]:99", "aeron:udp?endpoint=[::1]:99|term-length=8388608|linger=0", 1 << 20),
    ],
)
def test_of_a_channel_only_the_address_is_taken(channel: str, opened: str, longest: int) -> None:
    """The size of the log is bounded, and nothing else of it is the stranger's."""
    route = route_to(channel, BOTH, with_host_names=False)
    assert route is not None
    assert (route.channel, route.max_message_bytes) == (opened, longest)


@pytest.mark.parametrize(
    "channel",
    [
        "",
        "nonsense",
        "http://example.org",
        "aeron:tcp?endpoint=10.0.0.1:99",
        "aeron-spy:aeron:udp?endpoint=10.0.0.1:99",
        "aeron:udp",
        "aeron:udp?endpoint=10.0.0.1",
        "aeron:udp?endpoint=10.0.0.1:0",
        "aeron:udp?endpoint=10.0.0.1:70000",
        "aeron:udp?endpoint=:99",
        "aeron:udp?endpoint=0.0.0.0:99",
        "aeron:udp?endpoint=255.255.255.255:99",
        "aeron:udp?endpoint=239.1.1.1:99",
        "aeron:udp?endpoint=host.example.org:99",
        "aeron:udp?control=10.0.0.1:99|control-mode=dynamic",
        "aeron:udp?endpoint=10.0.0.1:99|control=10.0.0.1:98",
        "aeron:udp?tags=1",
        "aeron:ipc?term-length=3",
        "aeron:ipc?" + "|".join(f"p{number}=1" for number in range(100)),
        "aeron:ipc?alias=" + "x" * 5000,
        "aeron:ipc?alias=\x00",
    ],
)
def test_other_channels_are_refused(channel: str) -> None:
    """Nonsense, other schemes, many receivers, places that are none, and names that need a name server."""
    assert route_to(channel, BOTH, with_host_names=False) is None


def test_schemes_and_host_names_are_the_operators_choice() -> None:
    """Either can be allowed or not."""
    udp = "aeron:udp?endpoint=10.0.0.1:99"
    assert route_to(udp, ("aeron:ipc",), with_host_names=False) is None
    assert route_to("aeron:ipc", ("aeron:udp",), with_host_names=False) is None
    assert route_to("aeron:udp?endpoint=host.example.org:99", BOTH, with_host_names=True) is not None


class Desk:
    """A responder, turned by hand, with a clock of its own."""

    def __init__(self, client: aeron.Client) -> None:
        settings = RegistrySection(
            expiry_ms=3000, response_publication_limit=LIMIT, response_idle_ms=1000, response_connect_ms=500
        )
        self.counts: Counter[str] = Counter()
        self.now_ns = 0
        self.responder = Responder(settings, client, self.counts, 0)

    def post(self, stream_id: int, data: bytes = b"answer", channel: str = "aeron:ipc") -> None:
        route = route_to(channel, BOTH, with_host_names=False)
        assert isinstance(route, Route)
        if self.responder.admits(route, stream_id, self.now_ns):
            self.responder.post(route, stream_id, data, self.now_ns)

    def turn_until(self, condition: Callable[[], object], what: str) -> None:
        def is_met() -> object:
            self.responder.do_work(self.now_ns)
            return condition()

        wait_until(is_met, what)


@pytest.fixture
def client(
    shared_media_driver: aeron.MediaDriver, connect: Callable[[aeron.MediaDriver], aeron.Client]
) -> aeron.Client:
    return connect(shared_media_driver)


@pytest.fixture
def desk(client: aeron.Client) -> Iterator[Desk]:
    desk = Desk(client)
    yield desk
    desk.responder.close()


def test_answers_come_in_order_once_there_is_a_subscriber(desk: Desk, client: aeron.Client) -> None:
    """Those that were given before the endpoint was open, too."""
    received: list[bytes] = []
    subscription = client.add_subscription("aeron:ipc", 61_001)
    for number in range(10):
        desk.post(61_001, b"%d" % number)

    def all_received() -> bool:
        subscription.poll(lambda data, info: received.append(data), 100)
        return len(received) == 10

    desk.turn_until(all_received, "all answers")
    assert received == [b"%d" % number for number in range(10)]
    assert desk.counts["responses_opened"] == 1


def test_an_answer_without_a_subscriber_is_dropped_after_a_while(desk: Desk) -> None:
    """And its endpoint is closed when it was idle for long."""
    desk.post(61_002)
    desk.now_ns = 499_000_000
    desk.responder.do_work(desk.now_ns)
    assert desk.counts["responses_not_fetched"] == 0
    desk.now_ns = 500_000_000
    desk.responder.do_work(desk.now_ns)
    assert desk.counts["responses_not_fetched"] == 1
    assert len(desk.responder) == 1
    desk.now_ns = 1_000_000_001
    desk.responder.do_work(desk.now_ns)
    assert len(desk.responder) == 0


def test_an_endpoint_in_use_outlives_those_without_a_subscriber(desk: Desk, client: aeron.Client) -> None:
    """There are never more than the limit."""
    received: list[bytes] = []
    subscription = client.add_subscription("aeron:ipc", 61_003)
    desk.post(61_003, b"first")
    desk.turn_until(lambda: desk.counts["responses_sent"] == 1, "the first answer")
    for port in range(20_000, 20_030):
        desk.post(1, channel=f"aeron:udp?endpoint=127.0.0.1:{port}")
        assert len(desk.responder) <= LIMIT
    desk.post(61_003, b"second")
    desk.turn_until(lambda: subscription.poll(lambda data, info: received.append(data), 10), "an answer")
    desk.turn_until(lambda: desk.counts["responses_sent"] == 2, "the second answer")
    assert desk.counts["responses_opened"] == 31  # it was never opened again


def test_endpoints_are_opened_so_many_a_second(desk: Desk) -> None:
    """By medium: a flood of one kind leaves the other alone."""
    for port in range(30_000, 31_000):
        desk.post(1, channel=f"aeron:udp?endpoint=127.0.0.1:{port}")
    assert desk.counts["responses_opened"] == 64
    assert desk.counts["responses_not_opened"] == 936
    desk.post(61_004)
    assert desk.counts["responses_opened"] == 65
    desk.now_ns += 1_000_000_000
    for port in range(31_000, 32_000):
        desk.post(1, channel=f"aeron:udp?endpoint=127.0.0.1:{port}")
    assert desk.counts["responses_opened"] == 97


def test_one_endpoint_waits_for_so_many_answers(desk: Desk) -> None:
    """And all together for so many bytes."""
    for _ in range(100):
        desk.post(61_005)
    assert desk.counts["responses_beyond_queue"] == 36
    for _ in range(60):
        desk.post(61_006, bytes(1 << 20), LONG_TERM)
    assert desk.counts["responses_beyond_queue"] == 36 + 44
    desk.now_ns += 500_000_000
    desk.responder.do_work(desk.now_ns)
    desk.post(61_006, bytes(1 << 20), LONG_TERM)
    assert desk.counts["responses_beyond_queue"] == 36 + 44


def test_an_endpoint_that_aeron_refuses_is_given_up(desk: Desk) -> None:
    """An interface that this host does not have."""
    desk.post(1, channel="aeron:udp?endpoint=127.0.0.1:20999|interface=198.51.100.7")
    desk.turn_until(lambda: desk.counts["responses_refused_by_aeron"] == 1, "the refusal")
    assert len(desk.responder) == 0


def test_posting_never_waits(desk: Desk) -> None:
    """Opening takes milliseconds, a thousand times; posting them takes none of that."""
    started = time.monotonic()
    for port in range(40_000, 41_000):
        desk.post(1, channel=f"aeron:udp?endpoint=192.0.2.1:{port}")
        desk.responder.do_work(desk.now_ns)
    assert time.monotonic() - started < 5
