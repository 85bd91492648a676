# SPDX-License-Identifier: Apache-2.0
"""What a discovery provider remembers: from whom it learns of streams, for how long, and which epoch it believes.

Discovery §6, §8, §9; decisions C6, F5, F6, F8, F9, F14. The provider is a registry over three drivers made of the
codec and Aeron: two that announce often, and one that announces over UDP.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tensorpool import aeron
from tensorpool.wire.control import Attribute, ClockDomain
from tensorpool.wire.discovery import DiscoveryResponse
from tests.support.disc_client import DiscoveryPeer, unused_udp_channel
from tests.support.disc_fleet import LONG_PERIOD_MS, AnnouncedDriver, Fleet, serving
from tests.support.driver_client import new_client_id
from tests.support.wire_producer import new_stream_id

PERIOD_MS = 400
WINDOW_NS = 3 * PERIOD_MS * 1_000_000


@pytest.fixture(scope="module")
def fleet(shared_media_driver: aeron.MediaDriver) -> Iterator[Fleet]:
    """Two drivers whose streams are forgotten soon, one whose streams stay."""
    with serving(shared_media_driver.aeron_dir, PERIOD_MS, PERIOD_MS, LONG_PERIOD_MS) as fleet:
        yield fleet


@pytest.fixture
def brief(fleet: Fleet) -> AnnouncedDriver:
    """A driver whose streams are forgotten soon."""
    return fleet.drivers[0]


@pytest.fixture
def driver(fleet: Fleet) -> AnnouncedDriver:
    """A driver whose streams stay."""
    return fleet.drivers[2]


# --- who


@pytest.mark.spec("DISC-6.1-01", "DISC-2-02", "DISC-6.4-03", "DISC-5.2-10")
def test_one_stream_id_of_two_drivers_is_two_streams(fleet: Fleet) -> None:
    """Each with the layout and the authority of its own driver, and forgotten on its own."""
    first, _, steady = fleet.drivers
    stream_id = steady.announce(epoch=7, producer_id=1)

    def are_two(response: DiscoveryResponse) -> bool:
        first.announce(stream_id, epoch=3, producer_id=2)
        return len(response.results) == 2

    response = fleet.peer.wait_answer(are_two, "both are listed", stream_id=stream_id)
    found = {result.driver_instance_id: result for result in response.results}
    assert set(found) == {first.instance_id, steady.instance_id}
    for driver, epoch, producer_id in ((first, 3, 2), (steady, 7, 1)):
        result = found[driver.instance_id]
        assert (result.epoch, result.producer_id) == (epoch, producer_id)
        assert (result.driver_control_channel, result.driver_control_stream_id) == driver.control
    assert len(fleet.peer.ask(stream_id=stream_id, producer_id=2).results) <= 1
    only = fleet.peer.wait_answer(lambda it: len(it.results) == 1, "one is forgotten", stream_id=stream_id)
    assert only.results[0].driver_instance_id == steady.instance_id


@pytest.mark.spec("DISC-6.1-01")
def test_the_metadata_of_one_driver_is_not_anothers(fleet: Fleet) -> None:
    """Two drivers, one stream id, one of them named."""
    _, other, steady = fleet.drivers
    stream_id = steady.source("steady/camera", ("steady",))

    def are_both(response: DiscoveryResponse) -> bool:
        other.announce(stream_id)
        return {result.data_source_name for result in response.results} == {"", "steady/camera"}

    response = fleet.peer.wait_answer(are_both, "both are listed, one with its name", stream_id=stream_id)
    nameless = next(result for result in response.results if not result.data_source_name)
    assert (nameless.driver_instance_id, nameless.tags) == (other.instance_id, ())


@pytest.mark.spec("DISC-2-02", "DISC-6.4-01")
def test_two_registries_of_one_driver_give_the_same_answer(
    shared_media_driver: aeron.MediaDriver, driver: AnnouncedDriver, peer: DiscoveryPeer
) -> None:
    """Replicated for availability: each hears all, and clients need one of them."""
    with serving(shared_media_driver.aeron_dir, drivers=[driver]) as replica:
        streams = [driver.source(f"replicated/{index}", ("replicated",), epoch=index + 1) for index in range(5)]
        for each in (peer, replica.peer):
            driver.settle(each)
        first, second = (each.ask(tags=("replicated",)).results for each in (peer, replica.peer))
    assert sorted(first, key=lambda it: it.stream_id) == sorted(second, key=lambda it: it.stream_id)
    assert {result.stream_id for result in first} == set(streams)


# --- how long


@pytest.mark.spec("DISC-6.2-01", "DISC-6.2-02", "DISC-6.2-03")
def test_a_stream_is_listed_for_three_announce_periods_and_no_longer(
    brief: AnnouncedDriver, peer: DiscoveryPeer
) -> None:
    """Whatever is answered within them lists it, nothing that is asked after them does."""
    while not answers_within_the_window(brief, peer):
        pass  # the machine stood still for three periods: once more


def answers_within_the_window(brief: AnnouncedDriver, peer: DiscoveryPeer) -> int:
    """Announce a stream once and ask for it until it is gone; how many answers came within its time."""
    before_ns = time.monotonic_ns()
    stream_id = brief.announce()
    peer.wait_listed(stream_id)
    listed_ns = time.monotonic_ns()
    within = after = 0
    while after < 3:
        asked_ns = time.monotonic_ns()
        results = peer.ask(stream_id=stream_id).results
        if time.monotonic_ns() < before_ns + WINDOW_NS:
            within += 1
            assert results, f"forgotten after {(time.monotonic_ns() - before_ns) / 1e6:.0f} ms"
        if asked_ns > listed_ns + WINDOW_NS:
            after += 1
            assert not results, f"still there after {(asked_ns - listed_ns) / 1e6:.0f} ms"
    assert stream_id not in peer.ids()
    return within


@pytest.mark.spec("DISC-6.2-01")
def test_every_announce_gives_a_stream_a_new_lease_of_life(brief: AnnouncedDriver, peer: DiscoveryPeer) -> None:
    """Announced in time again and again it stays; one that is not goes meanwhile."""
    announced_ns = time.monotonic_ns()
    kept, silent = brief.announce(), brief.announce()
    peer.wait_listed(kept, silent)
    while peer.ids(stream_id=silent):
        before_ns, announced_ns = announced_ns, time.monotonic_ns()
        brief.announce(kept)
        is_listed = peer.ids(stream_id=kept) == {kept}
        assert is_listed or time.monotonic_ns() > before_ns + WINDOW_NS, "only if we stood still ourselves"


@pytest.mark.spec("DISC-6.2-01", "DISC-6.4-01")
def test_metadata_does_not_keep_a_stream(brief: AnnouncedDriver, peer: DiscoveryPeer) -> None:
    """Its producer talks on, its driver does not: the stream is forgotten."""
    stream_id = brief.announce()
    peer.wait_listed(stream_id)
    while peer.ids(stream_id=stream_id):
        brief.name(stream_id, "talkative")
        brief.describe(stream_id, tags="talkative")
    brief.name(stream_id, "talkative")
    assert peer.ids(data_source_name="talkative") == set()


@pytest.mark.spec("DISC-6.2-03")
def test_a_stream_that_comes_back_is_listed_again(brief: AnnouncedDriver, peer: DiscoveryPeer) -> None:
    """As it is announced then."""
    stream_id = brief.announce(epoch=4)
    peer.wait_listed(stream_id)
    peer.wait_gone(stream_id)
    brief.announce(stream_id, epoch=5)
    assert peer.wait_listed(stream_id).results[0].epoch == 5


# --- which epoch


@pytest.mark.spec("DISC-6.3-01")
def test_a_later_epoch_takes_the_place_of_an_earlier_one(driver: AnnouncedDriver, peer: DiscoveryPeer) -> None:
    """At once, with its own producer and regions; the earlier one is not listed beside it."""
    stream_id = driver.announce(epoch=3, producer_id=1)
    peer.wait_listed(stream_id)
    for epoch in (4, 9, 2**64 - 2):
        announce = driver.announced(stream_id, epoch=epoch, producer_id=epoch & 0xFFFF)
        driver.send(announce, driver.announces)
        response = peer.wait_answer(lambda it, new=epoch: it.results[0].epoch == new, "it is", stream_id=stream_id)
        (result,) = response.results
        assert result.producer_id == announce.producer_id
        assert result.header_region_uri == announce.header_region_uri
        assert [pool.region_uri for pool in result.payload_pools] == [
            pool.region_uri for pool in announce.payload_pools
        ]


@pytest.mark.spec("DISC-6.3-02")
def test_an_earlier_epoch_is_passed_over(driver: AnnouncedDriver, peer: DiscoveryPeer) -> None:
    """A replayed announce changes nothing while the stream is fresh."""
    stream_id = driver.announce(epoch=10, producer_id=5)
    before = peer.wait_listed(stream_id).results
    for epoch in (9, 1, 0):
        driver.announce(stream_id, epoch=epoch, producer_id=6)
    driver.settle(peer)
    assert peer.ask(stream_id=stream_id).results == before


@pytest.mark.spec("DISC-6.3-02", "DISC-6.2-01")
def test_an_earlier_epoch_does_not_keep_a_stream_and_is_believed_after_it(
    brief: AnnouncedDriver, peer: DiscoveryPeer
) -> None:
    """F8: a driver that lost its history is seen again as soon as what it said before is forgotten."""
    stream_id = brief.announce(epoch=10)
    peer.wait_listed(stream_id)
    seen: list[int] = []

    def is_back(response: DiscoveryResponse) -> bool:
        seen.extend(result.epoch for result in response.results)
        brief.announce(stream_id, epoch=2)
        return bool(seen) and seen[-1] == 2

    peer.wait_answer(is_back, "the lower epoch is listed", stream_id=stream_id)
    assert seen == sorted(seen, reverse=True)
    assert set(seen) <= {10, 2}


@pytest.mark.spec("DISC-6.3-01")
def test_within_an_epoch_the_latest_announce_counts(driver: AnnouncedDriver, peer: DiscoveryPeer) -> None:
    """A producer that came or went."""
    stream_id = driver.announce(epoch=3, producer_id=0)
    peer.wait_listed(stream_id)
    producer_id = new_client_id()
    driver.announce(stream_id, epoch=3, producer_id=producer_id)
    driver.settle(peer)
    assert peer.find(stream_id).producer_id == producer_id


# --- from what


@pytest.mark.spec("DISC-6.4-01")
def test_without_an_announce_there_is_no_stream(driver: AnnouncedDriver, peer: DiscoveryPeer) -> None:
    """A name, tags and an id are known, regions are not: nothing is listed until they are."""
    stream_id = new_stream_id()
    driver.name(stream_id, f"early-{stream_id}")
    driver.describe(stream_id, tags="early", data_source_id="5")
    driver.settle(peer)
    assert peer.ids(stream_id=stream_id) == set()
    assert peer.ids(data_source_name=f"early-{stream_id}") == set()
    driver.announce(stream_id)
    peer.wait_listed(stream_id)


@pytest.mark.spec("DISC-6.4-02", "DISC-5.0-01", "DISC-5.0-02")
def test_metadata_appears_when_it_is_sent(driver: AnnouncedDriver, peer: DiscoveryPeer) -> None:
    """Before it: no name, no id, no tags; afterwards what DataSourceAnnounce and DataSourceMeta said, and said last."""
    stream_id = driver.announce()
    (bare,) = peer.wait_listed(stream_id).results
    assert (bare.data_source_name, bare.data_source_id, bare.tags) == ("", None, ())
    driver.name(stream_id, "first name")
    peer.wait_answer(lambda it: it.results[0].data_source_name == "first name", "it is named", stream_id=stream_id)
    driver.describe(stream_id, tags="one,two", data_source_id="12345")
    response = peer.wait_answer(lambda it: it.results[0].tags, "it is tagged", stream_id=stream_id)
    assert response.results[0].data_source_id == 12345
    assert {tag.tag for tag in response.results[0].tags} == {"one", "two"}
    driver.name(stream_id, "second name", meta_version=2)
    driver.describe(stream_id, tags="three", data_source_id="6", meta_version=2)
    driver.settle(peer)
    result = peer.find(stream_id)
    assert (result.data_source_name, result.data_source_id) == ("second name", 6)
    assert [tag.tag for tag in result.tags] == ["three"]


@pytest.mark.parametrize("value", [b"-1", b"1.5", b"0x10", b"18446744073709551615", b"9" * 40, b"", b"\xff", b" 7"])
def test_a_source_id_that_is_none_is_not_known(driver: AnnouncedDriver, peer: DiscoveryPeer, value: bytes) -> None:
    """F5: decimal text below the null value; the stream is listed without an id."""
    stream_id = driver.announce()
    driver.describe(stream_id, Attribute(key="data_source_id", format="text/plain", value=value))
    driver.settle(peer)
    assert peer.find(stream_id).data_source_id is None


def test_bytes_that_are_no_announce_are_passed_over(driver: AnnouncedDriver, peer: DiscoveryPeer) -> None:
    """Cut anywhere, or of another schema: the streams are as before."""
    stream_id = new_stream_id()
    whole = driver.announced(stream_id).encode()
    for length in range(len(whole)):
        driver.send(whole[:length], driver.announces)
    for at, byte in ((4, b"\x85"), (6, b"\x02"), (0, b"\x22"), (2, b"\x09"), (32, b"\x07")):
        driver.send(whole[:at] + byte + whole[at + 1 :], driver.announces)
    named = driver.announce()
    driver.name(named, "kept")
    driver.send(b"\x14\x00\x07\x00\x84\x03\x01\x00", driver.metadata)
    driver.settle(peer)
    assert peer.ids(stream_id=stream_id) == set()
    assert peer.find(named).data_source_name == "kept"


# --- clocks of other hosts


@pytest.mark.spec("DISC-9-01", "DISC-6.2-01")
def test_streams_of_another_host_live_by_the_clock_of_this_one(shared_media_driver: aeron.MediaDriver) -> None:
    """C6: over UDP an announce counts from its receipt, whatever its timestamp says; then it expires as any other."""
    aeron_dir = shared_media_driver.aeron_dir
    announces = unused_udp_channel()
    with (
        AnnouncedDriver(aeron_dir, announce_period_ms=PERIOD_MS, announce_channel=announces) as remote,
        serving(aeron_dir, drivers=[remote], channel=unused_udp_channel()) as fleet,
    ):
        now_ns = time.monotonic_ns()
        day_ns = 86_400 * 10**9
        for stamp_ns in (0, 1, now_ns + day_ns, 2**64 - 1):
            stream_id = remote.announce(announce_timestamp_ns=stamp_ns)
            fleet.peer.wait_listed(stream_id)
            fleet.peer.wait_gone(stream_id)
        real = {"announce_clock_domain": ClockDomain.REALTIME_SYNCED, "announce_timestamp_ns": time.time_ns()}
        fleet.peer.wait_listed(remote.announce(**real))
