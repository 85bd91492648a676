# SPDX-License-Identifier: Apache-2.0
"""Discovery from the client's side: what it asks, which answers it believes, and that attaching decides.

Discovery §2.3, §3, §4.3, §5, §7, §10; decisions F10, F12, F15. The provider is `WireProvider`, which says anything, and
the drivers behind its results are `WireProducer`s: the client's own, and another with a control stream of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Client, Consumer
from tensorpool.wire.control import ConsumerHello
from tensorpool.wire.discovery import DiscoveryResponse, DiscoveryStatus, Result
from tensorpool.wire.driver import ResponseCode, Role, ShmAttachRequest
from tests.shm.by_hand import mapped_files
from tests.support.disc_client import NULL_32, NULL_64
from tests.support.disc_provider import WireProvider, result_of
from tests.support.listener import Said
from tests.support.processes import private_directory, wait_until
from tests.support.regions import RING
from tests.support.wire_producer import Endpoints, WireProducer, new_stream_id

OWN, OTHER = "own-driver", "other-driver"
FRAME = np.arange(6, dtype=np.float32)


class Bench:
    """A client, the driver that it is configured for, another driver, and a provider for both."""

    def __init__(self, folder: Any, aeron_dir: str) -> None:
        self.aeron_dir = aeron_dir
        self.own = WireProducer(folder, aeron_dir)
        control, *_ = Endpoints.unused()
        self.other = WireProducer(folder, aeron_dir, endpoints=self.own.endpoints._replace(control=control))
        self.provider = WireProvider(aeron_dir)
        self.client = tp.connect(aeron_dir, overrides=self.settings())

    def settings(self, *more: WireProvider) -> dict[str, Any]:
        channel, stream_id = self.provider.endpoint
        registries = [{"channel": each.endpoint[0], "stream_id": each.endpoint[1]} for each in more]
        return self.own.settings | {
            "driver.instance_id": OWN,
            "discovery.channel": channel,
            "discovery.stream_id": stream_id,
            **({"discovery.registries": registries} if registries else {}),
        }

    def own_result(self, name: str = "", **changed: Any) -> Result:
        return result_of(self.own, name, **{"driver_instance_id": OWN} | changed)

    def other_result(self, name: str = "", **changed: Any) -> Result:
        return result_of(self.other, name, **{"driver_instance_id": OTHER} | changed)

    def close(self) -> None:
        self.client.close()
        self.provider.close()
        self.other.close()
        self.own.close()


@pytest.fixture(scope="module")
def shared_bench(shared_media_driver: aeron.MediaDriver) -> Iterator[Bench]:
    with private_directory() as folder:
        bench = Bench(folder, shared_media_driver.aeron_dir)
        yield bench
        bench.close()


@pytest.fixture
def bench(shared_bench: Bench) -> Bench:
    shared_bench.provider.reset()
    for peer in (shared_bench.own, shared_bench.other):
        peer.lies.clear()
        peer.answer_held()
    return shared_bench


@pytest.fixture
def provider(bench: Bench) -> WireProvider:
    return bench.provider


@pytest.fixture
def client(bench: Bench) -> Client:
    return bench.client


@pytest.fixture
def other(bench: Bench) -> WireProducer:
    return bench.other


def unused_name() -> str:
    return f"camera/{new_stream_id()}"


def works(consumer: Consumer, peer: WireProducer) -> bool:
    seq = peer.publish(FRAME)
    while (frame := consumer.poll(0.01)) is not None:
        if (frame.stream_id, frame.epoch, frame.seq) == (peer.stream_id, peer.epoch, seq):
            return True
    return False


def wait_works(consumer: Consumer, peer: WireProducer) -> None:
    wait_until(lambda: works(consumer, peer), "frames come through")


def ids_since(provider: WireProvider, since: int) -> set[int]:
    """Of the requests: one that is not answered soon is sent again as it was."""
    return {received.message.request_id for received in provider.transcript[since:]}


def attaches(peer: WireProducer, since: int = 0) -> list[ShmAttachRequest]:
    return [received.message for received in peer.received(ShmAttachRequest, since)]


# --- what is asked


@pytest.mark.spec("DISC-4.1-01", "DISC-4.3-01", "DISC-5.0-01", "DISC-5.0-02", "DISC-5.1-10", "DISC-15-01", "DISC-10-04")
def test_a_request_byte_for_byte(provider: WireProvider, client: Client) -> None:
    """Nulls and empty texts for what is not asked; always an endpoint for the answer, and its stream id is not 0."""
    asked: dict[str, Any] = {
        "stream_id": 7,
        "producer_id": 0,  # F12: a value like any other
        "data_source_id": 2**63,
        "name": "Camera/1",
        "tags": ["b", "A"],
    }
    every: list[dict[str, Any]] = [{}, *({key: value} for key, value in asked.items()), asked]
    for filters in every:
        since = provider.now
        client.discover(**filters)
        received = provider.wait_asked(since)
        message = received.message
        assert message.response_channel
        assert 0 < message.response_stream_id < 2**31
        tags, name = filters.get("tags", []), filters.get("name", "")
        numbers = [filters.get("stream_id", NULL_32), filters.get("producer_id", NULL_32)]
        fixed = (message.request_id, message.client_id, message.response_stream_id, *numbers)
        expected = [
            struct.pack("<4H", 32, 1, 910, 1),
            struct.pack("<Q I I I I", *fixed),
            struct.pack("<Q", filters.get("data_source_id", NULL_64)),
            struct.pack("<2H", 0, len(tags)),
            *(struct.pack("<I", len(text)) + text.encode() for text in (*tags, message.response_channel, name)),
        ]
        assert received.data == b"".join(expected)


@pytest.mark.spec("DISC-4.3-01")
@pytest.mark.parametrize("channel", ["aeron:tcp", "nowhere", "aeron:ipc?term-length"])
def test_a_response_channel_that_cannot_be_is_refused(bench: Bench, channel: str) -> None:
    """Before anything is asked."""
    since = bench.provider.now
    with pytest.raises(tp.ConfigError, match=r"discovery\.response_channel"):
        tp.connect(bench.aeron_dir, overrides=bench.settings() | {"discovery.response_channel": channel})
    assert bench.provider.now == since


def test_every_request_has_an_id_of_its_own(provider: WireProvider, client: Client) -> None:
    """Another process cannot guess it, and no earlier answer fits."""
    since = provider.now
    for _ in range(20):
        client.discover(stream_id=1)
    ids = ids_since(provider, since)
    assert len(ids) == 20
    assert max(ids) > 2**40


# --- which answers are believed


def test_a_result_is_shown_as_it_came(bench: Bench, provider: WireProvider, client: Client) -> None:
    """All fields; what was not provided is None."""
    full = bench.other_result("Camera/1", tags=("Lab", "rgb"), data_source_id=7)
    provider.results = [full, bench.own_result()]
    shown, bare = client.discover()
    assert (shown.driver_instance_id, bare.driver_instance_id) == (OTHER, OWN)
    same = ["stream_id", "producer_id", "epoch", "layout_version", "header_nslots", "header_slot_bytes", "max_dims"]
    same += ["data_source_id", "data_source_name", "header_region_uri"]
    same += ["driver_instance_id", "driver_control_channel", "driver_control_stream_id"]
    assert [getattr(shown, name) for name in same] == [getattr(full, name) for name in same]
    assert shown.tags == ("Lab", "rgb")
    pools = "pool_id", "pool_nslots", "stride_bytes", "region_uri"
    expected = [[getattr(pool, name) for name in pools] for pool in full.payload_pools]
    assert [[getattr(pool, name) for name in pools] for pool in shown.payload_pools] == expected
    assert (bare.data_source_name, bare.data_source_id, bare.tags) == (None, None, ())


@pytest.mark.spec("DISC-5.2-02")
def test_answers_to_what_was_not_asked_are_dropped(bench: Bench, provider: WireProvider, client: Client) -> None:
    """Foreign ids before ours, and ours a second time, with other results: only the first answer to ours counts."""
    provider.results = [bench.own_result()]
    lies = (bench.other_result(),)

    def falsified(honest: DiscoveryResponse) -> Iterable[Said]:
        foreign = [honest.request_id + 1, honest.request_id - 1, 0, 2**64 - 1, honest.request_id ^ 2**63]
        strangers = [replace(honest, request_id=id % 2**64, results=lies) for id in foreign]
        return [*strangers, honest, replace(honest, results=lies)]

    provider.always = falsified
    for _ in range(3):
        assert [stream.driver_instance_id for stream in client.discover()] == [OWN]


@pytest.mark.spec("DISC-5.2-02")
def test_an_answer_that_comes_late_is_dropped(bench: Bench, provider: WireProvider, client: Client) -> None:
    """Its question was given up; it does not become the answer to the next one."""
    since = provider.now
    provider.always = lambda honest: ()
    with pytest.raises(tp.DriverUnreachable):
        client.discover(timeout=1.0)
    late = [received.message for received in provider.transcript[since:]]
    assert late
    provider.results = [bench.own_result()]

    def falsified(honest: DiscoveryResponse) -> Iterable[Said]:
        lie = replace(honest, results=(bench.other_result(),))
        return [*(replace(lie, request_id=message.request_id) for message in late), honest]

    provider.always = falsified
    assert [stream.driver_instance_id for stream in client.discover()] == [OWN]


HEADERS = {
    "version 2": (9, 2, 910, 2),
    "version 0": (9, 2, 910, 0),
    "version 65535": (9, 2, 910, 65535),
    "schema 900": (9, 2, 900, 1),
    "schema 901": (9, 2, 901, 1),
    "schema 911": (9, 2, 911, 1),
    "template 1": (9, 1, 910, 1),
    "template 3": (9, 3, 910, 1),
    "a block of 8 bytes": (8, 2, 910, 1),
    "a block of 10 bytes": (10, 2, 910, 1),
}


@pytest.mark.spec("DISC-10-01", "DISC-10-02", "DISC-10-04", "DISC-4.2-04")
def test_the_header_alone_decides_what_is_an_answer(bench: Bench, provider: WireProvider, client: Client) -> None:
    """Everything behind it is as it should be; with any other header it is not read, and with the right one it is."""
    provider.results = [bench.own_result()]

    def falsified(honest: DiscoveryResponse) -> Iterable[Said]:
        lie = replace(honest, results=(bench.other_result(),)).encode()
        return [*(struct.pack("<4H", *header) + lie[8:] for header in HEADERS.values()), honest]

    provider.always = falsified
    assert [stream.driver_instance_id for stream in client.discover()] == [OWN]
    provider.always = lambda honest: struct.pack("<4H", *HEADERS["version 2"]) + honest.encode()[8:]
    with pytest.raises(tp.DriverUnreachable):
        client.discover(timeout=1.0)


def test_bytes_that_are_no_answer_are_passed_over(bench: Bench, provider: WireProvider, client: Client) -> None:
    """Cut anywhere, with a status that is none, with groups that are not there: the honest answer still counts."""
    provider.results = [bench.own_result("name", tags=("a",))]

    def falsified(honest: DiscoveryResponse) -> Iterable[Said]:
        whole = honest.encode()
        counts = [whole[:19] + struct.pack("<H", count) + whole[21:] for count in (2, 60_000, 65_535)]
        statuses = [whole[:16] + bytes([status]) + whole[17:] for status in (0, 4, 255)]
        return [*(whole[:length] for length in range(len(whole))), *counts, *statuses, honest]

    provider.always = falsified
    (stream,) = client.discover()
    assert stream.data_source_name == "name"


@pytest.mark.spec("DISC-5.2-26")
def test_results_of_a_refusal_are_ignored(bench: Bench, provider: WireProvider, client: Client) -> None:
    """NOT_FOUND has none, whatever it carries; ERROR is an error in the provider's words."""
    provider.results = [bench.own_result()]
    provider.lie(status=DiscoveryStatus.NOT_FOUND)
    assert client.discover() == []
    provider.lie(status=DiscoveryStatus.ERROR, error_message="too many of them")
    with pytest.raises(tp.TensorPoolError, match="too many of them"):
        client.discover()
    assert len(client.discover()) == 1


INVALID: dict[str, dict[str, Any]] = {
    "no control channel": {"driver_control_channel": ""},
    "control stream 0": {"driver_control_stream_id": 0},
    "slots of 128 bytes": {"header_slot_bytes": 128},
    "7 dimensions": {"max_dims": 7},
}


@pytest.mark.spec("DISC-5.2-14", "DISC-5.2-16")
@pytest.mark.parametrize("changed", list(INVALID.values()), ids=list(INVALID))
def test_a_result_that_is_invalid_is_ignored(
    bench: Bench, provider: WireProvider, client: Client, changed: dict[str, Any]
) -> None:
    """The results beside it are not; its stream cannot be had by its name."""
    name = unused_name()
    provider.results = [bench.other_result(name, **changed), bench.own_result()]
    assert [stream.driver_instance_id for stream in client.discover()] == [OWN]
    since = bench.other.now
    with pytest.raises(tp.TensorPoolError):
        client.consumer(name, timeout=1.0)
    assert attaches(bench.other, since) == []


def _other_slots(result: Result) -> Result:
    *first, last = result.payload_pools
    pools = (*first, replace(last, pool_nslots=2 * last.pool_nslots))
    return replace(result, payload_pools=pools)


@pytest.mark.spec("DISC-5.2-21")
def test_a_result_with_other_slots_in_a_pool_is_discarded_and_asked_for_again(
    bench: Bench, provider: WireProvider, client: Client
) -> None:
    """F10: as long as it is so the stream is not shown; as soon as it is not, it is."""
    good = bench.other_result()
    provider.results = [good, bench.own_result()]
    since = provider.now
    provider.lie(results=(_other_slots(good), bench.own_result()))
    assert [stream.driver_instance_id for stream in client.discover()] == [OTHER, OWN]
    assert len(ids_since(provider, since)) == 2
    provider.results = [_other_slots(good)]
    assert client.discover() == []


@pytest.mark.spec("DISC-5.1-12")
def test_names_are_compared_by_the_client_too(bench: Bench, provider: WireProvider, client: Client) -> None:
    """A provider that thinks otherwise of case and blanks is not followed."""
    name = unused_name()
    others = [name.upper(), name + " ", name[:-1], name + "\0", ""]
    lies = tuple(bench.other_result(each, stream_id=new_stream_id()) for each in others)
    provider.always = lambda honest: replace(honest, results=lies)
    assert client.discover(name=name) == []
    since = bench.other.now
    with pytest.raises(tp.TensorPoolError, match=name):
        client.consumer(name, timeout=1.0)
    assert attaches(bench.other, since) == []
    provider.always = lambda honest: replace(honest, results=(*lies, bench.other_result(name)))
    assert [stream.data_source_name for stream in client.discover(name=name)] == [name]


# --- more than one answer


@pytest.mark.spec("DISC-7-04")
def test_of_one_stream_the_latest_epoch_is_shown_once(bench: Bench, provider: WireProvider, client: Client) -> None:
    """By driver and stream: repeated ones are one, earlier epochs are none, the same id elsewhere is another."""
    results = [bench.other_result(epoch=epoch) for epoch in (5, 9, 7, 9, 6)]
    elsewhere = bench.other_result(epoch=3, driver_instance_id="third")
    provider.results = [*results, elsewhere]
    found = [(stream.driver_instance_id, stream.epoch) for stream in client.discover()]
    assert found == [(OTHER, 9), ("third", 3)]


@pytest.mark.spec("DISC-7-04")
def test_answers_of_two_providers_are_one(bench: Bench, provider: WireProvider) -> None:
    """F15: the provider with the later epoch is believed, and a stream that only one knows is shown."""
    with WireProvider(bench.aeron_dir) as replica:
        provider.results = [bench.other_result(epoch=5), bench.own_result()]
        replica.results = [bench.other_result(epoch=6), bench.other_result(stream_id=99)]
        expected = {
            (OTHER, bench.other.stream_id, 6),
            (OTHER, 99, bench.other.epoch),
            (OWN, bench.own.stream_id, bench.own.epoch),
        }
        with tp.connect(bench.aeron_dir, overrides=bench.settings(replica)) as client:
            wait_until(  # the later of two answers has a moment only
                lambda: {(it.driver_instance_id, it.stream_id, it.epoch) for it in client.discover()} == expected,
                "both have answered",
            )
        assert provider.transcript
        assert replica.transcript


@pytest.mark.spec("DISC-7-05")
@pytest.mark.parametrize("lie", [{"epoch": 3}, {"layout_version": 2}], ids=["an earlier epoch", "another layout"])
def test_what_the_driver_announced_otherwise_is_discarded_and_asked_for_again(
    bench: Bench, provider: WireProvider, client: Client, lie: dict[str, Any]
) -> None:
    """A provider that lags behind the announces that we hear ourselves."""
    with client.consumer(bench.own.stream_id) as consumer:
        wait_works(consumer, bench.own)
        since = provider.now
        good = bench.own_result()
        provider.results = [good]
        provider.lie(results=(replace(good, **lie),))
        found = [(stream.epoch, stream.layout_version) for stream in client.discover()]
    assert found == [(bench.own.epoch, 1)]
    assert len(ids_since(provider, since)) == 2


def test_a_name_that_two_streams_have_is_an_error_that_lists_them(
    bench: Bench, provider: WireProvider, client: Client
) -> None:
    """And one of them is chosen by its driver."""
    name = unused_name()
    provider.results = [bench.own_result(name), bench.other_result(name)]
    with pytest.raises(tp.TensorPoolError, match="ambiguous") as caught:
        client.consumer(name)
    for word in (OWN, OTHER, str(bench.own.stream_id), str(bench.other.stream_id)):
        assert word in str(caught.value)
    with client.consumer(name, driver_instance_id=OTHER) as consumer:
        wait_works(consumer, bench.other)


# --- attaching decides


@pytest.mark.spec("DISC-3-02")
def test_to_ask_is_not_to_attach(bench: Bench, provider: WireProvider, client: Client) -> None:
    """Streams are shown; no lease is asked for, nothing is mapped or subscribed to."""
    provider.results = [bench.own_result("a"), bench.other_result("b")]
    since = bench.own.now, bench.other.now
    assert len(client.discover()) == 2
    assert len(client.discover(name="b")) == 1
    assert attaches(bench.own, since[0]) == attaches(bench.other, since[1]) == []
    assert mapped_files(bench.own.folder) == []


@pytest.mark.spec("DISC-5.2-11", "DISC-3-03", "DISC-7-01", "DISC-5.2-12")
def test_a_stream_is_attached_to_at_the_driver_that_the_answer_names(
    bench: Bench, provider: WireProvider, client: Client, other: WireProducer
) -> None:
    """There, and not at the client's own; nothing is inferred about streams of descriptors or progress."""
    name = unused_name()
    provider.results = [bench.other_result(name)]
    since = bench.own.now, other.now
    with client.consumer(name) as consumer:
        wait_works(consumer, other)
        (request,) = set(attaches(other, since[1]))
        assert (request.stream_id, request.role, request.client_id) == (
            other.stream_id,
            Role.CONSUMER,
            consumer.consumer_id,
        )
        received = other.wait_for(ConsumerHello, since[1], consumer_id=consumer.consumer_id).message
        assert (received.descriptor_stream_id, received.control_stream_id) == (0, 0)
        assert (received.descriptor_channel, received.control_channel) == ("", "")
    assert attaches(bench.own, since[0]) == []


@pytest.mark.spec("DISC-3-01", "DISC-3-02", "DISC-3-03", "DISC-7-01")
def test_what_an_answer_says_of_memory_is_never_mapped(
    bench: Bench, provider: WireProvider, client: Client, other: WireProducer
) -> None:
    """It names files that are there and sound, of a later epoch; what the driver grants is mapped, and after it did."""
    name = unused_name()
    decoy = other.make_regions(other.epoch + 50)
    pools = tuple(replace(pool, region_uri=decoy.uri(pool.pool_id)) for pool in bench.other_result().payload_pools)
    lie = {"epoch": decoy.epoch, "header_region_uri": decoy.uri(RING), "payload_pools": pools, "layout_version": 9}
    provider.results = [bench.other_result(name, **lie)]
    asked = len(other.mapped_at_attach)
    with client.consumer(name) as consumer:
        wait_works(consumer, other)
        mapped = mapped_files(other.folder)
        assert mapped
        assert not any(str(decoy.folder) in path for path in mapped)
        assert all(str(other.regions.folder) in path for path in mapped)
    assert len(other.mapped_at_attach) > asked
    assert not any(other.mapped_at_attach[asked:])


type Change = Callable[[WireProducer], None]


def _grant_other_epoch(peer: WireProducer) -> None:
    peer.lies.extend([lambda honest: replace(honest, epoch=int(honest.epoch or 0) - 1)] * 20)


def _grant_other_layout(peer: WireProducer) -> None:
    peer.lies.extend([lambda honest: replace(honest, layout_version=2)] * 20)


def _spoil(**fields: int) -> Change:
    def change(peer: WireProducer) -> None:
        regions = peer.use(peer.make_regions(peer.epoch + 1))
        for region in regions.paths:
            regions.set_superblock(region, **fields)

    return change


MUTATIONS: dict[str, Change] = {
    "another epoch is granted": _grant_other_epoch,
    "another layout version is granted": _grant_other_layout,
    "the superblock has another magic": _spoil(magic=1),
    "the superblock has another epoch": _spoil(epoch=7),
    "the superblock has another layout version": _spoil(layout_version=2),
    "the superblock has another stream": _spoil(stream_id=7),
    "the superblock has other slots": _spoil(nslots=16),
}


@pytest.mark.spec("DISC-2-03")
@pytest.mark.parametrize("mutate", list(MUTATIONS.values()), ids=list(MUTATIONS))
def test_what_the_driver_grants_is_validated_as_ever(
    bench: Bench, provider: WireProvider, client: Client, other: WireProducer, mutate: Change
) -> None:
    """A discovery answer that agrees with the mutation makes it no better: nothing is mapped, and the caller learns."""
    name = unused_name()
    mutate(other)
    provider.results = [bench.other_result(name)]
    other.announces = False
    try:
        with pytest.raises(tp.TensorPoolError):
            client.consumer(name, timeout=1.0)
        assert mapped_files(other.folder) == []
    finally:
        other.lies.clear()
        other.use(other.make_regions(other.epoch + 1))
        other.announces = True
    provider.results = [bench.other_result(name)]
    with client.consumer(name) as consumer:
        wait_works(consumer, other)


@pytest.mark.spec("DISC-7-03", "DISC-3-01")
def test_a_driver_may_refuse_what_discovery_shows(
    bench: Bench, provider: WireProvider, client: Client, other: WireProducer
) -> None:
    """Its words are the caller's; the stream is shown as before."""
    name = unused_name()
    provider.results = [bench.other_result(name)]
    for _ in range(20):
        other.refuse(ResponseCode.REJECTED, "members only")
    with pytest.raises(tp.AttachRefused, match="members only"):
        client.consumer(name, timeout=1.0)
    assert mapped_files(other.folder) == []
    assert len(client.discover(name=name)) == 1


@pytest.mark.spec("DISC-7-02")
def test_after_attaching_announces_are_what_counts(
    bench: Bench, provider: WireProvider, client: Client, other: WireProducer
) -> None:
    """A new epoch is followed when its driver announces it, though the provider still tells of the old one."""
    name = unused_name()
    provider.results = [bench.other_result(name)]
    with client.consumer(name) as consumer:
        wait_works(consumer, other)
        before, since = other.epoch, provider.now
        other.new_epoch()
        wait_works(consumer, other)
        assert other.epoch == before + 1
        assert provider.now == since


@pytest.mark.spec("DISC-3-03", "DISC-5.2-11")
@pytest.mark.parametrize("channel", ["nowhere", "aeron:ipc?term-length=3", "aeron-spy:aeron:ipc", "aeron:udp"])
def test_an_authority_that_cannot_be_reached_is_an_error(
    bench: Bench, provider: WireProvider, client: Client, channel: str
) -> None:
    """Not a stream that is attached to elsewhere; the client goes on."""
    name = unused_name()
    provider.results = [bench.other_result(name, driver_control_channel=channel)]
    since = bench.own.now, bench.other.now
    with pytest.raises(tp.TensorPoolError):
        client.consumer(name, timeout=1.0)
    assert attaches(bench.own, since[0]) == attaches(bench.other, since[1]) == []
    provider.results = [bench.own_result(name)]
    with client.consumer(name) as consumer:
        wait_works(consumer, bench.own)
