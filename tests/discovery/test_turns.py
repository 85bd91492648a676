# SPDX-License-Identifier: Apache-2.0
"""What one turn of a provider does, and in which order: announces before answers, a share for answers, late turns.

The provider of most tests is turned by hand, over real Aeron, with a clock of its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tensorpool import aeron
from tensorpool.channel import Endpoint
from tensorpool.client.discovery import _response_channel
from tensorpool.clock import ManualClock, SystemClock
from tensorpool.discovery.config import DiscoverySection
from tensorpool.discovery.directory import DriverIdentity
from tensorpool.discovery.provider import (
    ANSWERS_PER_TURN,
    FRAGMENT_LIMIT,
    MAX_QUEUED_REQUESTS,
    POLLS_PER_TURN,
    Provider,
    Source,
    ThriftyIdle,
)
from tensorpool.driver.config import DriverConfig
from tensorpool.driver.driver import DISCOVERY_SHARE
from tensorpool.wire import Message, decode
from tensorpool.wire.control import DataSourceAnnounce
from tensorpool.wire.discovery import DiscoveryResponse, DiscoveryStatus
from tests.discovery.conftest import IPC, SECOND_NS, announce, named, read, request
from tests.support.processes import wait_until

EXPIRY_NS = 3 * SECOND_NS
BELOW = "/dev/shm/tensorpool/tensorpool-operator/production"
_stream_ids = itertools.count(64_000)


def section_of(place: Endpoint, **keys: Any) -> DiscoverySection:
    keys |= {"channel": place.channel, "stream_id": place.stream_id}
    return DriverConfig.load(environ={}, discovery=keys).discovery


class Desk:
    """A provider whose announces, metadata and requests come on one stream, as inside a driver."""

    def __init__(self, client: aeron.Client, aeron_dir: str, clock: ManualClock | SystemClock, **keys: Any) -> None:
        self.place = Endpoint(IPC, next(_stream_ids))
        self.response_stream_id = next(_stream_ids)
        self.client = client
        self.clock = clock
        limits = {"client_requests_per_s": 100_000, "requests_per_s": 100_000, "announce_period_ms": 1000}
        section = section_of(self.place, **limits | keys)
        identity = DriverIdentity("a", self.place, section.expiry_ms * 1_000_000)
        self.provider = Provider(section, [Source(identity, self.place, self.place)], aeron_dir, clock)
        self.publication = client.add_publication(IPC, self.place.stream_id, exclusive=True)
        self._responses = client.add_subscription("aeron:ipc", self.response_stream_id)
        self.received: list[bytes] = []

    def start(self) -> None:
        self.provider.on_start()
        wait_until(lambda: self.publication.is_connected, "the provider listens")

    def send(self, message: Message) -> None:
        wait_until(lambda: self.publication.offer(message.encode()), "the stream takes it")

    def announce(self, stream_id: int, stamp_ns: int, **changed: Any) -> None:
        self.send(announce(stream_id, announce_timestamp_ns=stamp_ns, **changed))

    def ask(self, request_id: int, **changed: Any) -> None:
        fields = {"request_id": request_id, "response_stream_id": self.response_stream_id} | changed
        self.send(request(**fields))

    @property
    def answers(self) -> list[DiscoveryResponse]:
        return [read(data) for data in self.received]

    def fetch(self) -> None:
        self._responses.poll(lambda data, info: self.received.append(data), 100)

    def turn_until_answered(self, count: int) -> None:
        def is_met() -> bool:
            self.provider.do_work()
            self.fetch()
            return len(self.received) >= count

        wait_until(is_met, f"{count} answers")


type Opener = Callable[..., Desk]


@pytest.fixture
def open_desk(
    shared_media_driver: aeron.MediaDriver, connect: Callable[[aeron.MediaDriver], aeron.Client]
) -> Iterator[Opener]:
    made: list[Desk] = []

    def open_one(clock: ManualClock | SystemClock | None = None, **keys: Any) -> Desk:
        client = connect(shared_media_driver)
        keys = {"expiry_ms": EXPIRY_NS // 1_000_000} | keys
        made.append(Desk(client, shared_media_driver.aeron_dir, clock or ManualClock(100 * SECOND_NS), **keys))
        return made[-1]

    yield open_one
    for desk in made:
        desk.provider.on_close()


@pytest.fixture
def desk(open_desk: Opener) -> Desk:
    desk = open_desk()
    desk.start()
    return desk


def _advance(desk: Desk, duration_ns: int) -> int:
    assert isinstance(desk.clock, ManualClock)
    desk.clock.advance(duration_ns)
    return desk.clock.monotonic_ns()


def test_an_announce_behind_a_hundred_queries_is_taken_before_they_are_answered(desk: Desk) -> None:
    """Every answer of that turn has the stream, and the turn answers no more than its share."""
    desk.ask(0)
    desk.turn_until_answered(1)
    for number in range(1, 101):
        desk.ask(number)
    desk.announce(7, desk.clock.monotonic_ns())
    desk.provider.do_work()
    assert desk.provider.size == 1
    assert desk.provider.counts["requests"] == 1 + ANSWERS_PER_TURN
    desk.turn_until_answered(101)
    first, *answers = desk.answers
    assert first.results == ()
    assert [(answer.request_id, len(answer.results)) for answer in answers] == [(it, 1) for it in range(1, 101)]


def test_a_request_that_is_sent_again_while_it_waits_is_answered_once(desk: Desk) -> None:
    """And of a flood only so many wait: the rest is dropped and counted."""
    for number in range(MAX_QUEUED_REQUESTS + 50):
        desk.ask(number, response_channel="")
        desk.ask(number, response_channel="")
    desk.provider.do_work()
    counts = desk.provider.counts
    assert counts["requests_beyond_queue"] == 2 * 50
    wait_until(lambda: not desk.provider.do_work(), "everything is looked at")
    assert counts["requests_without_channel"] == MAX_QUEUED_REQUESTS


@pytest.mark.spec("DISC-6.2-01", "DISC-6.2-03")
def test_a_turn_that_comes_late_costs_no_live_stream_its_entry(desk: Desk) -> None:
    """Ten seconds of announces wait in the log: what was announced all the time is known, by its name; the rest not."""
    began_ns = desk.clock.monotonic_ns()
    for stream_id in (7, 8):
        desk.announce(stream_id, began_ns)
        desk.send(named(stream_id, f"cam{stream_id}"))
    wait_until(lambda: desk.provider.do_work() and desk.provider.size == 2, "both are known")
    for second in range(1, 11):
        desk.announce(7, began_ns + second * SECOND_NS)
        if second < 3:
            desk.announce(8, began_ns + second * SECOND_NS)
    _advance(desk, 10 * SECOND_NS)
    desk.ask(1)
    desk.turn_until_answered(1)
    assert desk.provider.counts["announces_too_old"] == 0
    (result,) = desk.answers[0].results
    assert (result.stream_id, result.data_source_name) == (7, "cam7")


def test_a_turn_that_cannot_read_everything_forgets_nothing(desk: Desk) -> None:
    """The announce that keeps the stream is still in the log: who asks meanwhile finds the stream."""
    desk.ask(0)
    desk.announce(7, desk.clock.monotonic_ns())
    desk.turn_until_answered(1)
    desk.ask(1)
    for _ in range(POLLS_PER_TURN * FRAGMENT_LIMIT):
        desk.send(named(9, "crowd"))
    now_ns = _advance(desk, 10 * SECOND_NS)
    desk.announce(7, now_ns)
    desk.turn_until_answered(2)
    assert desk.provider.counts["streams_expired"] == 0
    assert [result.stream_id for result in desk.answers[1].results] == [7]


def test_registries_get_the_names_of_the_drivers_configuration(
    shared_media_driver: aeron.MediaDriver, connect: Callable[[aeron.MediaDriver], aeron.Client]
) -> None:
    """As a producer would announce them, with every announce of the driver, and not where a producer named it."""
    client = connect(shared_media_driver)
    place, registry = Endpoint(IPC, next(_stream_ids)), Endpoint(IPC, next(_stream_ids))
    clock = ManualClock(100 * SECOND_NS)
    section = section_of(place, announce_period_ms=1000, expiry_ms=3000)
    identity = DriverIdentity("a", place, EXPIRY_NS, {7: "volume", 8: "other"})
    provider = Provider(
        section, [Source(identity, place, place)], shared_media_driver.aeron_dir, clock, registries=[registry]
    )
    received: list[bytes] = []
    subscription = client.add_subscription(registry.channel, registry.stream_id)
    publication = client.add_publication(place.channel, place.stream_id, exclusive=True)
    provider.on_start()
    try:
        wait_until(lambda: publication.is_connected, "the provider listens")
        said = [announce(7, announce_timestamp_ns=clock.monotonic_ns(), epoch=3), named(8, "its own", 3)]
        for message in (*said, announce(8, announce_timestamp_ns=clock.monotonic_ns(), epoch=3), said[0]):
            wait_until(lambda it=message: publication.offer(it.encode()), "the stream takes it")

        def names() -> list[DataSourceAnnounce]:
            provider.do_work()
            subscription.poll(lambda data, info: received.append(data), 100)
            return [it for it in map(decode, received) if isinstance(it, DataSourceAnnounce)]

        wait_until(lambda: len(names()) == 3, "all names")
        assert [(it.stream_id, it.epoch, it.name) for it in names()] == [
            (7, 3, "volume"),
            (8, 3, "its own"),
            (7, 3, "volume"),
        ]
    finally:
        provider.on_close()


def test_a_log_from_before_is_not_believed(open_desk: Opener) -> None:
    """A provider that joins late judges what it finds by the time at which it joined."""
    desk = open_desk()
    unread = desk.client.add_subscription(desk.place.channel, desk.place.stream_id)  # keeps in the log what it leaves
    wait_until(lambda: desk.publication.is_connected, "the log is there")
    desk.announce(7, desk.clock.monotonic_ns())
    _advance(desk, EXPIRY_NS + 1)
    desk.announce(8, desk.clock.monotonic_ns())
    desk.start()
    wait_until(lambda: desk.provider.do_work() or desk.provider.size, "the later stream is known")
    assert desk.provider.counts["announces_too_old"] == 1
    unread.close()


@pytest.mark.spec("DISC-5.2-17")
def test_a_thousand_named_streams_of_three_pools_are_one_answer(desk: Desk) -> None:
    """On the channel that our client names, and on one that leaves the size of its log to the provider."""
    channels = (_response_channel(IPC), "aeron:ipc")
    for number in range(1, 1001):
        stamp_ns = desk.clock.monotonic_ns()
        desk.announce(
            number, stamp_ns, epoch=1_794_803_188_555_446_106, pools={1: 4096, 2: 65_536, 3: 1 << 20}, below=BELOW
        )
        desk.send(named(number, f"hall-4/line-{number:04}/camera", 1_794_803_188_555_446_106))
        desk.provider.do_work()
    wait_until(lambda: not desk.provider.do_work(), "everything is read")
    for number, channel in enumerate(channels, 1):
        desk.ask(number, response_channel=channel)
        desk.turn_until_answered(number)
        answer = desk.answers[-1]
        assert (answer.status, len(answer.results)) == (DiscoveryStatus.OK, 1000), answer.error_message
        assert {result.data_source_name for result in answer.results} == {
            f"hall-4/line-{stream:04}/camera" for stream in range(1, 1001)
        }
        assert all(len(result.payload_pools) == 3 for result in answer.results)


@pytest.mark.spec("DISC-5.2-18")
def test_an_answer_that_is_too_large_names_the_filters(desk: Desk) -> None:
    """By bytes, with what the channel carries; and by count."""
    for number in range(1, 1002):
        desk.announce(number, desk.clock.monotonic_ns())
        desk.provider.do_work()
    wait_until(lambda: not desk.provider.do_work(), "everything is read")
    desk.ask(1)
    desk.ask(2, response_channel="aeron:ipc?term-length=64k", producer_id=0)
    desk.turn_until_answered(2)
    for answer in desk.answers:
        assert (answer.status, answer.results) == (DiscoveryStatus.ERROR, ())
        for words in ("data_source_name", "tags", "stream_id"):
            assert words in answer.error_message


@pytest.mark.timeout(120)
def test_nine_hundred_streams_stay_known_under_hundreds_of_queries(open_desk: Opener) -> None:
    """The provider of a driver on its thread, with its share of a core: everything is answered, nothing forgotten."""
    desk = open_desk(SystemClock(), expiry_ms=1500)
    runner = aeron.AgentRunner(desk.provider, ThriftyIdle(share=DISCOVERY_SHARE)).start()
    streams, asked, lowest = 900, 0, 900
    try:
        began_s, sent = time.monotonic(), 0
        while len(desk.received) < 400:
            for _ in range(20):  # each stream about twice a second
                desk.announce(1 + sent % streams, time.monotonic_ns())
                sent += 1
            while asked < (time.monotonic() - began_s - 1) * 300 and asked < len(desk.received) + 300:
                asked += 1
                desk.ask(asked, client_id=asked)
            desk.fetch()
            time.sleep(0.005)
            if asked:
                lowest = min(lowest, desk.provider.size)
    finally:
        runner.close()
    assert lowest == streams
    assert desk.provider.counts["announces_too_old"] == 0
