# SPDX-License-Identifier: Apache-2.0
"""What a discovery provider makes of requests: which it answers, where, and which streams a filter lets through.

Discovery §4, §5.0, §5.1, §10; decisions F2, F11-F13, F16. The provider is a registry in a process of its own; drivers
and clients are made of the codec and Aeron.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorpool import aeron
from tensorpool.wire import bridge
from tensorpool.wire.control import Attribute
from tensorpool.wire.discovery import DiscoveryResponse, DiscoveryStatus
from tensorpool.wire.driver import ResponseCode, Role, ShmAttachResponse
from tests.support.disc_client import (
    NULL_32,
    NULL_64,
    Counted,
    DiscoveryPeer,
    new_request_id,
    new_response_stream_id,
    packed_tag,
    unused_udp_channel,
)
from tests.support.disc_fleet import LONG_PERIOD_MS, AnnouncedDriver, Fleet, serving
from tests.support.driver_client import attach_request, new_client_id
from tests.support.driver_process import IPC
from tests.support.messages import hello
from tests.support.wire_producer import new_stream_id


@pytest.fixture
def listener(fleet: Fleet) -> Iterator[DiscoveryPeer]:
    """A client that may listen to what it likes."""
    with DiscoveryPeer(fleet.registry.aeron_dir, fleet.registry.endpoint) as peer:
        peer.fence()
        peer.transcript.clear()
        yield peer


def unused_name() -> str:
    return f"camera/{new_stream_id()}"


# --- where answers go


@pytest.mark.spec("DISC-4.3-02", "DISC-4.3-03")
@pytest.mark.parametrize("channel", [IPC, "aeron:ipc", "aeron:ipc?term-length=64k", "aeron:udp"])
def test_an_answer_goes_to_the_endpoint_that_the_request_names(
    listener: DiscoveryPeer, driver: AnnouncedDriver, channel: str
) -> None:
    """There and nowhere else that we listen: neither to another endpoint of the client nor to the requests' stream."""
    stream_id = driver.announce()
    listener.wait_listed(stream_id)
    listener.transcript.clear()
    channel = unused_udp_channel() if channel == "aeron:udp" else channel
    elsewhere = new_response_stream_id()
    listener.listen((channel, elsewhere))
    endpoint = {"response_channel": channel, "response_stream_id": elsewhere}
    received = listener.answer(listener.request(stream_id=stream_id, **endpoint))
    assert received.stream_id == elsewhere
    assert [result.stream_id for result in received.message.results] == [stream_id]
    listener.fence()
    assert [it.stream_id for it in listener.received(DiscoveryResponse)] == [elsewhere, listener.responses[1]]


@pytest.mark.spec("DISC-4.3-03")
def test_the_requests_stream_is_answered_on_when_asked_to(listener: DiscoveryPeer) -> None:
    """F13: a response endpoint that is the request endpoint asks for it; the provider ignores its own echo."""
    channel, stream_id = listener.endpoint
    received = listener.answer(listener.request(stream_id=1, response_channel=channel, response_stream_id=stream_id))
    assert received.stream_id == stream_id
    assert received.message.status is DiscoveryStatus.OK
    listener.fence()
    answers = [it.stream_id for it in listener.received(DiscoveryResponse)]
    assert answers == [stream_id, listener.responses[1]]


@pytest.mark.spec("DISC-5.2-01")
def test_answers_carry_the_id_of_their_request(listener: DiscoveryPeer) -> None:
    """Whatever the id, and with many under way at once, in their order."""
    ids = [0, 1, 2**63, 2**64 - 1, *(new_request_id() for _ in range(100))]
    for request_id in ids:
        listener.send(listener.request(request_id=request_id, stream_id=1))
    listener.fence()
    assert [received.message.request_id for received in listener.received(DiscoveryResponse)][:-1] == ids


# --- requests that are none


@pytest.mark.spec("DISC-5.1-07")
@pytest.mark.parametrize("stream_id", [0, 1, NULL_32], ids=["no stream id", "a stream id", "the null id"])
def test_a_request_without_a_response_channel_gets_no_answer_at_all(listener: DiscoveryPeer, stream_id: int) -> None:
    """Not on the streams that it could mean: its stream id, stream 0, another endpoint of its client, the requests'."""
    for id in (0, listener.responses[1] + 100_000):
        listener.listen((IPC, id))
    for id in (stream_id, listener.responses[1], listener.responses[1] + 100_000):
        listener.unanswered(listener.request(response_channel="", response_stream_id=id))


@pytest.mark.spec("DISC-5.1-08", "DISC-5.1-09", "DISC-5.2-03", "DISC-5.2-24", "DISC-5.2-25")
def test_a_response_stream_id_of_zero_is_refused_where_it_can_be(
    listener: DiscoveryPeer, driver: AnnouncedDriver
) -> None:
    """ERROR with the request's id and no results, on stream 0 of the channel, and on no other stream."""
    stream_id = driver.announce()
    listener.wait_listed(stream_id)
    listener.listen((IPC, 0))
    listener.transcript.clear()
    received = listener.answer(listener.request(stream_id=stream_id, response_stream_id=0))
    assert received.stream_id == 0
    assert received.message.status is DiscoveryStatus.ERROR
    assert received.message.results == ()
    assert received.message.error_message
    listener.fence()
    assert [it.stream_id for it in listener.received(DiscoveryResponse)] == [0, listener.responses[1]]


HOPELESS_CHANNELS = [
    " ",
    "ipc",
    "aeron:",
    "aeron:tcp?endpoint=127.0.0.1:1",
    "aeron:ipc?term-length=3",
    "aeron:ipc?term-length=64k|mtu=banana",
    "aeron:udp",
    "aeron:udp?endpoint=127.0.0.1",
    "aeron:udp?endpoint=no-such-host.invalid:1",
    "aeron-spy:aeron:ipc",
    "aeron:ipc?" + "x" * 5000,
    "aeron:udp?endpoint=127.0.0.1:24572",
]


@pytest.mark.parametrize("channel", HOPELESS_CHANNELS, ids=lambda channel: channel[:40])
def test_a_response_channel_that_leads_nowhere_delays_no_other_client(peer: DiscoveryPeer, channel: str) -> None:
    """F11: whatever it is, the request after it is answered."""
    peer.unanswered(*[peer.request(response_channel=channel) for _ in range(3)])


def _as(peer: DiscoveryPeer, **changed: Any) -> bytes:
    return peer.raw(new_request_id(), **changed)


FOREIGN_HEADERS = {
    "schema 900": (32, 1, 900, 1),
    "schema 901": (32, 1, 901, 1),
    "schema 902": (32, 1, 902, 1),
    "schema 0": (32, 1, 0, 1),
    "schema 65535": (32, 1, 65535, 1),
    "version 0": (32, 1, 910, 0),
    "version 2": (32, 1, 910, 2),
    "version 65535": (32, 1, 910, 65535),
    "template 0": (32, 0, 910, 1),
    "template 2": (32, 2, 910, 1),
    "template 3": (32, 3, 910, 1),
    "a block of 31 bytes": (31, 1, 910, 1),
    "a block of 33 bytes": (33, 1, 910, 1),
    "a block of 0 bytes": (0, 1, 910, 1),
    "a block of 65535 bytes": (65535, 1, 910, 1),
}


@pytest.mark.spec("DISC-10-04", "DISC-4.2-04", "DISC-4.1-01")
@pytest.mark.parametrize("header", list(FOREIGN_HEADERS.values()), ids=list(FOREIGN_HEADERS))
def test_only_the_header_of_a_discovery_request_makes_one(
    peer: DiscoveryPeer, header: tuple[int, int, int, int]
) -> None:
    """With the body of a good request, which is answered as soon as its header is right."""
    good = _as(peer)
    request_id = struct.unpack_from("<Q", good, 8)[0]
    peer.unanswered(struct.pack("<4H", *header) + good[8:])
    assert peer.answer(good, request_id).message.status is not None


@pytest.mark.spec("DISC-4.2-04")
def test_other_messages_on_the_requests_stream_are_not_taken_for_requests(
    peer: DiscoveryPeer, driver: AnnouncedDriver
) -> None:
    """Schemas 900, 901, 902 and 910 with template ids 1 and 2: no answer, no stream, no harm."""
    stream_id = new_stream_id()
    chunk = dict.fromkeys(("stream_id", "epoch", "seq", "chunk_index", "chunk_offset", "chunk_length"), 0)
    peer.unanswered(
        driver.announced(stream_id),
        hello(stream_id, new_client_id()),
        attach_request(stream_id, Role.PRODUCER),
        ShmAttachResponse(correlation_id=1, code=ResponseCode.OK, stream_id=stream_id),
        bridge.BridgeFrameChunk(
            **chunk, chunk_count=1, payload_length=0, header_included=False, header_bytes=b"", payload_bytes=b""
        ),
    )
    peer.send(DiscoveryResponse(request_id=new_request_id(), status=DiscoveryStatus.OK))
    assert peer.ids(stream_id=stream_id) == set()


def test_a_request_that_is_cut_short_anywhere_is_dropped(peer: DiscoveryPeer) -> None:
    """At every byte but one: without its last field it is taken for one without a name (J)."""
    whole = peer.request(tags=("a", "bc"), data_source_name="name").encode()
    nameless = len(whole) - len("name") - 4
    peer.unanswered(*[whole[:length] for length in range(len(whole)) if length != nameless])
    request_id = new_request_id()
    cut = struct.pack("<Q", request_id).join((whole[:8], whole[16:nameless]))
    assert peer.answer(cut, request_id).message.status is DiscoveryStatus.OK


ABSURD_GROUPS = {
    "more tags than bytes": Counted(0, 60_000),
    "all ones": Counted(0, 65_535),
    "a tag of 2 GiB": Counted(0, 1, struct.pack("<I", 2**31)),
    "a tag of 4 GiB": Counted(0, 1, struct.pack("<I", 2**32 - 1)),
    "a block of 64 KiB": Counted(65_535, 1, packed_tag("a")),
    "half a tag": Counted(0, 2, packed_tag("a")),
}


@pytest.mark.parametrize("tags", list(ABSURD_GROUPS.values()), ids=list(ABSURD_GROUPS))
def test_absurd_groups_are_dropped(peer: DiscoveryPeer, tags: Counted) -> None:
    """They announce what is not there: nothing is allocated for it, nothing answered but a later request."""
    since = len(peer.transcript)
    request_id = new_request_id()
    peer.send(peer.raw(request_id, tags=tags))
    peer.fence()
    answers = peer.received(DiscoveryResponse, since, request_id=request_id)
    assert all(received.message.status is DiscoveryStatus.ERROR for received in answers)


# --- filters


@pytest.mark.spec("DISC-5.1-02", "DISC-5.1-03", "DISC-5.1-04", "DISC-5.1-05", "DISC-5.1-06", "DISC-5.1-15")
def test_all_filters_have_to_match(peer: DiscoveryPeer, driver: AnnouncedDriver) -> None:
    """Every combination of right filters finds the stream; with any one of them another stream's, none does."""
    streams: list[dict[str, Any]] = []
    for tags in (("rgb", "lab1"), ("rgb", "lab2")):
        first, second = (f"{tag}-{new_stream_id()}" for tag in tags)
        tags = first, second
        source: dict[str, Any] = {"producer_id": new_client_id(), "data_source_id": new_client_id() << 20}
        name = unused_name()
        stream_id = driver.source(name, tags, **source)
        streams.append({"stream_id": stream_id, "data_source_name": name, "tags": tags, **source})
    driver.settle(peer)
    right, wrong = streams
    for count in range(1, len(right) + 1):
        for chosen in itertools.combinations(right, count):
            filters = {key: right[key] for key in chosen}
            assert peer.ids(**filters) == {right["stream_id"]}, filters
            for spoilt in chosen:
                expected = {wrong["stream_id"]} if count == 1 else set()
                assert peer.ids(**filters | {spoilt: wrong[spoilt]}) == expected, (filters, spoilt)


@pytest.mark.spec("DISC-5.1-03", "DISC-5.1-04", "DISC-5.1-05")
def test_each_number_selects_its_own(peer: DiscoveryPeer, driver: AnnouncedDriver) -> None:
    """Among three streams, two of one producer and one source."""
    mine, other = new_client_id(), new_client_id()
    first = driver.source(producer_id=mine, data_source_id=mine)
    second = driver.source(producer_id=mine, data_source_id=other)
    third = driver.source(producer_id=other, data_source_id=other)
    driver.settle(peer)
    assert peer.ids(stream_id=first) == {first}
    assert peer.ids(producer_id=mine) == {first, second}
    assert peer.ids(producer_id=other) == {third}
    assert peer.ids(data_source_id=mine) == {first}
    assert peer.ids(data_source_id=other) == {second, third}


@pytest.mark.spec("DISC-5.1-04", "DISC-5.0-01")
def test_zero_is_a_value_and_all_ones_is_none(peer: DiscoveryPeer, driver: AnnouncedDriver) -> None:
    """F12: producer 0 is a stream without one; only the null values mean that a filter was not given."""
    idle, busy = driver.source(producer_id=0), driver.source(producer_id=new_client_id())
    named = driver.source(data_source_id=0)
    driver.settle(peer)
    assert {idle, busy} & peer.ids(producer_id=0) == {idle}
    assert peer.ids(stream_id=0) == set()
    found = peer.ids(data_source_id=0)
    assert (named in found, idle in found) == (True, False)
    request_id = new_request_id()
    nulls = {"producer_id": NULL_32, "data_source_id": NULL_64}
    results = peer.answer(peer.raw(request_id, stream_id=busy, **nulls), request_id).message.results
    assert [result.stream_id for result in results] == [busy]


@pytest.mark.spec("DISC-5.1-05", "DISC-5.1-06", "DISC-5.1-15")
def test_a_filter_on_what_is_not_known_does_not_match(peer: DiscoveryPeer, driver: AnnouncedDriver) -> None:
    """F5: a stream without a name, a source id and tags is found by its number alone."""
    stream_id = driver.announce()
    peer.wait_listed(stream_id)
    assert peer.ids(stream_id=stream_id) == {stream_id}
    for filters in ({"data_source_id": 0}, {"data_source_name": "x"}, {"tags": ("x",)}):
        assert peer.ids(stream_id=stream_id, **filters) == set(), filters


@pytest.mark.spec("DISC-5.1-01")
def test_a_request_without_filters_returns_every_stream(peer: DiscoveryPeer, driver: AnnouncedDriver) -> None:
    """What has a name and tags, and what has none."""
    streams = {driver.announce(), driver.source(unused_name()), driver.source("", ("rgb",))}
    driver.settle(peer)
    assert streams <= peer.ids()


@pytest.mark.spec("DISC-5.0-02", "DISC-5.1-01")
def test_an_empty_name_is_no_filter(peer: DiscoveryPeer, driver: AnnouncedDriver) -> None:
    """Length 0 is not provided: streams with and without a name are returned."""
    named, nameless = driver.source(unused_name()), driver.announce()
    driver.settle(peer)
    assert {named, nameless} <= peer.ids(data_source_name="")


# --- names


@pytest.mark.spec("DISC-5.1-06")
def test_names_match_exactly(peer: DiscoveryPeer, driver: AnnouncedDriver) -> None:
    """No case is folded, no blank trimmed, nothing taken for a pattern or a prefix."""
    base = unused_name()
    upper, lower = driver.source(base.upper()), driver.source(base)
    driver.settle(peer)
    assert peer.ids(data_source_name=base) == {lower}
    assert peer.ids(data_source_name=base.upper()) == {upper}
    for other in (base.title(), base + " ", " " + base, base[:-1], base + "/", base[:-1] + "*", base + "\0", "*", "/"):
        assert peer.ids(data_source_name=other) == set(), other


ODD_NAMES = [
    b"\xff\xfe\x80 not UTF-8",
    "Kamera/hinten-ü".encode(),
    "Kamera/hinten-u\u0308".encode(),
    b" blanks at both ends ",
    b"nul\0inside",
    b"line\nbreak\ttab",
    b'quote"s and, commas; {braces}',
    b"%s%n${HOME}",
    b"x" * 256,
]


@pytest.mark.spec("DISC-5.1-11", "DISC-5.1-06")
@pytest.mark.parametrize("name", ODD_NAMES, ids=range(len(ODD_NAMES)))
def test_names_come_back_as_they_were_announced(peer: DiscoveryPeer, driver: AnnouncedDriver, name: bytes) -> None:
    """Byte for byte, and found by those bytes."""
    stream_id = driver.source(name)
    driver.settle(peer)
    request_id = new_request_id()
    received = peer.answer(peer.raw(request_id, stream_id=stream_id, data_source_name=name), request_id)
    (result,) = received.message.results
    assert result.data_source_name.encode("utf-8", "surrogateescape") == name
    assert struct.pack("<I", len(name)) + name in received.data


@pytest.mark.spec("DISC-5.1-13")
def test_a_name_of_more_than_256_bytes_is_not_passed_on(peer: DiscoveryPeer, driver: AnnouncedDriver) -> None:
    """Neither whole nor cut, which would be another name: the stream is listed without one."""
    stream_id = driver.source(b"x" * 257)
    driver.settle(peer)
    assert peer.find(stream_id).data_source_name == ""
    assert stream_id not in peer.ids(data_source_name="x" * 256)


# --- tags


@pytest.mark.spec("DISC-5.1-14", "DISC-5.1-15", "DISC-5.1-16")
def test_all_requested_tags_have_to_be_there_in_their_case(peer: DiscoveryPeer, driver: AnnouncedDriver) -> None:
    """Said once or many times, in any order."""
    tag = f"tag-{new_stream_id()}"
    both = driver.source("", (tag, tag + "-RGB"))
    one = driver.source("", (tag,))
    upper = driver.source("", (tag.upper(),))
    driver.settle(peer)
    assert peer.ids(tags=(tag,)) == {both, one}
    assert peer.ids(tags=(tag.upper(),)) == {upper}
    assert peer.ids(tags=(tag, tag + "-RGB")) == {both}
    assert peer.ids(tags=(tag + "-RGB", tag)) == {both}
    assert peer.ids(tags=(tag, tag + "-rgb")) == set()
    assert peer.ids(tags=(tag, tag.upper())) == set()
    assert peer.ids(tags=(tag[:-1],)) == set()
    assert peer.ids(tags=(tag,) * 50) == {both, one}
    assert peer.ids(tags=(tag, tag + "-RGB", tag, tag + "-RGB")) == {both}


@pytest.mark.spec("DISC-5.1-14", "DISC-6.4-02")
def test_tags_are_learnt_from_text_and_from_json(peer: DiscoveryPeer, driver: AnnouncedDriver) -> None:
    """F5: comma-separated text or an array."""
    tag = f"tag-{new_stream_id()}"
    texts, array = driver.announce(), driver.announce()
    driver.describe(texts, tags=f"{tag},second")
    driver.describe(array, Attribute(key="tags", format="application/json", value=f'["{tag}", "second"]'.encode()))
    driver.settle(peer)
    assert peer.ids(tags=(tag, "second")) == {texts, array}


# --- who asks


@pytest.mark.spec("DISC-5.1-18")
def test_who_asks_makes_no_difference_without_access_control(peer: DiscoveryPeer, driver: AnnouncedDriver) -> None:
    """Every id is answered alike, also one that another client uses at the same time."""
    stream_id = driver.announce(producer_id=new_client_id())
    peer.wait_listed(stream_id)
    answers = [peer.ask(stream_id=stream_id, client_id=id).results for id in (0, 1, 7, 7, 2**31, NULL_32)]
    assert answers == [answers[0]] * len(answers)
    assert len(answers[0]) == 1


# --- floods


def test_a_thousand_endpoints_without_a_subscriber_cost_little(fleet: Fleet, peer: DiscoveryPeer) -> None:
    """F11: requests after them are answered, and the provider's memory does not grow with them."""
    peer.fence()
    before_kib = _resident_kib(fleet.process.pid)
    for index in range(2000):
        channel = IPC if index % 2 else f"aeron:udp?endpoint=127.0.0.{index % 250 + 1}:{25_000 + index}"
        peer.send(peer.request(response_channel=channel, response_stream_id=2_000_000 + index))
        if index % 500 == 499:
            peer.fence()
    assert _resident_kib(fleet.process.pid) - before_kib < 64 * 1024


def test_a_client_that_floods_leaves_others_their_answers(shared_media_driver: aeron.MediaDriver) -> None:
    """Its requests over the rate are dropped; those of others are not."""
    limits: dict[str, Any] = {"client_requests_per_s": 5, "requests_per_s": 1_000_000}
    with serving(shared_media_driver.aeron_dir, LONG_PERIOD_MS, **limits) as fleet:
        flooder, since = new_client_id(), len(fleet.peer.transcript)
        for _ in range(300):
            fleet.peer.send(fleet.peer.request(client_id=flooder, stream_id=1))
        for _ in range(20):
            fleet.peer.fence()
        answers = len(fleet.peer.received(DiscoveryResponse, since))
    assert 20 < answers < 100


def _resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
