# SPDX-License-Identifier: Apache-2.0
"""What a discovery provider answers: every field of a result, which status, and what does not fit.

Discovery §5.2, §12, §13; decisions F1, F3, F7. Providers are registries in processes of their own; drivers and clients
are made of the codec and Aeron.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorpool import aeron
from tensorpool.wire.control import PayloadPool
from tensorpool.wire.discovery import DiscoveryStatus
from tensorpool.wire.driver import Role, ShmAttachResponse
from tests.support import messages
from tests.support.disc_client import DiscoveryPeer, new_response_stream_id
from tests.support.disc_fleet import (
    LONG_PERIOD_MS,
    NSLOTS,
    POOLS,
    AnnouncedDriver,
    Fleet,
    Registry,
    serving,
)
from tests.support.driver_client import attach_request, new_client_id
from tests.support.driver_process import IPC, DriverProcess
from tests.support.wire_producer import new_stream_id

MAX_RESULTS = 1000
TRUSTED, STRANGER = new_client_id(), new_client_id()
SHOWN_TO_TRUSTED, SHOWN_TO_ALL = new_stream_id(), new_stream_id()


@pytest.fixture(scope="module")
def guarded(shared_media_driver: aeron.MediaDriver) -> Iterator[Fleet]:
    """A registry with access control: one stream is open to all clients, one to a single client, the rest to none."""
    rules = [
        {"stream_ids": [SHOWN_TO_ALL]},
        {"client_ids": [TRUSTED], "stream_ids": [SHOWN_TO_TRUSTED]},
    ]
    with serving(shared_media_driver.aeron_dir, LONG_PERIOD_MS, acl_enabled=True, acl=rules) as fleet:
        for stream_id in (SHOWN_TO_ALL, SHOWN_TO_TRUSTED):
            fleet.driver.announce(stream_id)
            fleet.peer.wait_listed(stream_id, client_id=TRUSTED)
        yield fleet


# --- results


@pytest.mark.spec("DISC-4.1-01", "DISC-5.0-01", "DISC-5.0-02", "DISC-5.2-04", "DISC-5.2-05", "DISC-5.2-06")
@pytest.mark.spec("DISC-5.2-03", "DISC-10-04", "DISC-15-02", "DISC-15-03")
def test_a_response_byte_for_byte(peer: DiscoveryPeer, driver: AnnouncedDriver) -> None:
    """A stream of which nothing is known but its announce: nulls and empty texts for the rest."""
    announce = driver.announced(new_stream_id(), producer_id=77, epoch=5_000_000_000)
    driver.send(announce, driver.announces)
    peer.wait_listed(announce.stream_id)
    request = peer.request(stream_id=announce.stream_id)
    texts = [announce.header_region_uri, "", driver.instance_id, driver.control[0]]
    expected = [
        struct.pack("<4H", 9, 2, 910, 1),
        struct.pack("<Q B", request.request_id, 1),
        struct.pack("<2H", 39, 1),
        struct.pack("<I I Q I I H B", announce.stream_id, 77, 5_000_000_000, 1, NSLOTS, 256, 8),
        b"\xff" * 8 + struct.pack("<I", driver.control[1]),
        struct.pack("<2H", 10, len(POOLS)),
        *(
            struct.pack("<H I I I", pool.pool_id, NSLOTS, pool.stride_bytes, len(pool.region_uri))
            + pool.region_uri.encode()
            for pool in announce.payload_pools
        ),
        struct.pack("<2H", 0, 0),
        *(struct.pack("<I", len(text)) + text.encode() for text in texts),
        struct.pack("<I", 0),
    ]
    assert peer.answer(request).data == b"".join(expected)


@pytest.mark.spec("DISC-5.2-04", "DISC-5.2-05", "DISC-5.2-06", "DISC-5.2-07", "DISC-5.2-20", "DISC-6.4-01")
@pytest.mark.parametrize("nslots", [1, 64, 2**31])
def test_a_result_tells_what_was_announced(peer: DiscoveryPeer, driver: AnnouncedDriver, nslots: int) -> None:
    """Ids, epoch, layout version, and all pools with id, slots, stride and region, in order."""
    stream_id, epoch = new_stream_id(), 2**63 + nslots
    pools = tuple(
        PayloadPool(pool_id=id, pool_nslots=nslots, stride_bytes=64 << index, region_uri=f"shm:file?path=/dev/shm/{id}")
        for index, id in enumerate((3, 1, 65534))
    )
    changed = {"layout_version": 9, "header_nslots": nslots, "payload_pools": pools, "producer_id": 4_000_000_000}
    announce = driver.announced(stream_id, epoch=epoch, **changed)
    driver.send(announce, driver.announces)
    (result,) = peer.wait_listed(stream_id).results
    assert _layout(result) == _layout(announce)
    assert (result.header_slot_bytes, result.max_dims) == (256, 8)
    assert {pool.pool_nslots for pool in result.payload_pools} == {result.header_nslots}


def _layout(described: Any) -> list[Any]:
    names = "stream_id", "producer_id", "epoch", "layout_version", "header_nslots", "header_region_uri"
    pools = [(pool.pool_id, pool.pool_nslots, pool.stride_bytes, pool.region_uri) for pool in described.payload_pools]
    return [*(getattr(described, name) for name in names), pools]


def pools_of(nslots: int) -> tuple[PayloadPool, ...]:
    return messages.announce(1, nslots=nslots, pools=POOLS).payload_pools


UNFIT_ANNOUNCES: dict[str, dict[str, Any]] = {
    "other slots in a pool": {"payload_pools": pools_of(2 * NSLOTS)},
    "other slots in the last pool": {"payload_pools": (*pools_of(NSLOTS)[:1], *pools_of(4)[1:])},
    "slots of 128 bytes": {"header_slot_bytes": 128},
    "no slot size": {"header_slot_bytes": 0},
}


@pytest.mark.spec("DISC-5.2-05", "DISC-5.2-20")
@pytest.mark.parametrize("changed", list(UNFIT_ANNOUNCES.values()), ids=list(UNFIT_ANNOUNCES))
def test_what_must_not_be_in_a_result_is_not(
    peer: DiscoveryPeer, driver: AnnouncedDriver, changed: dict[str, Any]
) -> None:
    """A stream that was only announced so is not listed; one that was well announced before stays as it was."""
    fresh, known = driver.announce(**changed), driver.announce()
    before = peer.wait_listed(known).results
    driver.announce(known, **{"epoch": 2} | changed)
    driver.settle(peer)
    assert peer.ask(stream_id=fresh).results == ()
    assert peer.ask(stream_id=known).results == before


@pytest.mark.spec("DISC-5.2-08", "DISC-5.2-09", "DISC-6.4-02")
def test_a_result_has_all_tags_in_their_case(peer: DiscoveryPeer, driver: AnnouncedDriver) -> None:
    """Whichever of them was asked for; with the name and id of the source."""
    tags = ("Lab-1", "RGB", f"only-{new_stream_id()}")
    stream_id = driver.source("camera/Front", tags, data_source_id=2**63)
    driver.settle(peer)
    for asked in ((), tags[:1], tags[2:], tags):
        result = peer.find(stream_id, tags=asked)
        assert sorted(tag.tag for tag in result.tags) == sorted(tags)
        assert (result.data_source_name, result.data_source_id) == ("camera/Front", 2**63)


@pytest.mark.spec("DISC-5.2-10", "DISC-5.2-13", "DISC-6.4-03")
def test_a_result_names_the_driver_that_grants_leases(
    fleet: Fleet, shared_media_driver: aeron.MediaDriver, driver: AnnouncedDriver, peer: DiscoveryPeer
) -> None:
    """As configured: announces do not say whose they are."""
    stream_id = driver.announce()
    (result,) = peer.wait_listed(stream_id).results
    authority = result.driver_instance_id, result.driver_control_channel, result.driver_control_stream_id
    assert authority == (driver.instance_id, *driver.control)


# --- configurations that could not name one

NO_AUTHORITY: dict[str, dict[str, Any]] = {
    "control_stream_id": {"control_stream_id": 0},
    "control_channel": {"control_channel": ""},
    "instance_id": {"instance_id": ""},
}


@pytest.mark.spec("DISC-5.2-13", "DISC-5.2-15", "DISC-6.4-03")
def test_a_registry_whose_driver_has_no_authority_does_not_start(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path
) -> None:
    """It says which key is wrong: results without a driver's endpoint cannot be emitted, nor two of one identity."""
    with AnnouncedDriver(shared_media_driver.aeron_dir) as driver:
        tables = {key: [driver.entry | changed] for key, changed in NO_AUTHORITY.items()}
        other = {"announce_stream_id": 1, "metadata_stream_id": 2}
        tables |= {"instance_id ": [driver.entry, driver.entry | other]}
        tables |= {"announce": [driver.entry, driver.entry | {"instance_id": "other"}]}
        registries = {key: Registry(shm_dir, driver.aeron_dir, entries) for key, entries in tables.items()}
        processes = {key: registry.start() for key, registry in registries.items()}
        endings = {key: process.finish() for key, process in processes.items()}
        for process in processes.values():
            process.reap()
    for key, (code, output) in endings.items():
        assert code not in (0, -9), (key, output)
        assert "discovery.drivers" in output, key
        assert key.strip() in output, key


# --- status


@pytest.mark.spec("DISC-5.2-22", "DISC-5.2-03")
def test_no_match_is_ok_with_no_results(peer: DiscoveryPeer) -> None:
    """F1: without access control, a request that finds nothing was still processed."""
    unknown = new_stream_id()
    for filters in (
        {"stream_id": unknown},
        {"producer_id": new_client_id()},
        {"data_source_id": unknown},
        {"data_source_name": f"no such name {unknown}"},
        {"tags": (f"no-such-tag-{unknown}",)},
        {"data_source_name": "x" * 10_000},
    ):
        response = peer.ask(**filters)
        assert (response.status, response.results, response.error_message) == (DiscoveryStatus.OK, (), ""), filters


@pytest.mark.spec("DISC-5.2-23", "DISC-5.2-25", "DISC-12-02", "DISC-5.2-03", "DISC-8-01")
def test_a_stream_that_may_not_be_seen_looks_like_one_that_is_not_there(guarded: Fleet) -> None:
    """NOT_FOUND, byte for byte the same, for hidden, unknown and filtered-out streams alike."""
    driver, peer = guarded.driver, guarded.peer
    unnamed = driver.announce()
    driver.announce(SHOWN_TO_ALL, epoch=2)
    peer.wait_answer(lambda it: it.results[0].epoch == 2, "announces are read", stream_id=SHOWN_TO_ALL)
    answers = {}
    for stream_id in (SHOWN_TO_TRUSTED, unnamed, new_stream_id()):
        received = peer.answer(peer.request(request_id=99, client_id=STRANGER, stream_id=stream_id))
        assert received.message.status is DiscoveryStatus.NOT_FOUND
        answers[stream_id] = received.data
    assert set(answers.values()) == {struct.pack("<4H Q B 2H I", 9, 2, 910, 1, 99, 2, 39, 0, 0)}
    filtered = peer.ask(client_id=STRANGER, stream_id=SHOWN_TO_ALL, tags=("none",))
    assert (filtered.status, filtered.results) == (DiscoveryStatus.NOT_FOUND, ())


@pytest.mark.spec("DISC-5.2-23", "DISC-12-02", "DISC-8-01", "DISC-5.1-17")
def test_what_may_be_seen_is_found_under_access_control(guarded: Fleet) -> None:
    """OK with it, whatever else is hidden; who may see more, sees more."""
    for client_id, visible in ((STRANGER, {SHOWN_TO_ALL}), (TRUSTED, {SHOWN_TO_ALL, SHOWN_TO_TRUSTED})):
        assert guarded.peer.ids(client_id=client_id) == visible
        assert guarded.peer.ids(client_id=client_id, stream_id=SHOWN_TO_ALL) == {SHOWN_TO_ALL}


@pytest.mark.spec("DISC-5.2-24")
def test_an_error_is_for_malformed_requests_and_failures_only(peer: DiscoveryPeer, driver: AnnouncedDriver) -> None:
    """Whatever a well-formed request asks for is OK; the same without a response stream is an ERROR."""
    stream_id = driver.announce()
    peer.wait_listed(stream_id)
    peer.listen((IPC, 0))
    for filters in ({}, {"stream_id": stream_id}, {"stream_id": 0}, {"tags": ("x",) * 300}, {"data_source_name": "x"}):
        assert peer.ask(**filters).status is DiscoveryStatus.OK, filters
        refused = peer.ask(**filters, response_stream_id=0)
        assert (refused.status, refused.results) == (DiscoveryStatus.ERROR, ()), filters


# --- limits


@pytest.fixture(scope="module")
def crowd(shared_media_driver: aeron.MediaDriver) -> Iterator[Fleet]:
    """A registry with as many streams as one response may have."""
    with serving(shared_media_driver.aeron_dir, LONG_PERIOD_MS) as fleet:
        ids = [fleet.driver.announce() for _ in range(MAX_RESULTS)]
        fleet.peer.wait_listed(ids[-1])
        yield fleet


@pytest.mark.spec("DISC-5.2-17", "DISC-5.2-18", "DISC-5.2-19", "DISC-5.2-24", "DISC-5.2-25")
def test_more_than_a_thousand_results_are_an_error_never_a_part(crowd: Fleet) -> None:
    """F3: a thousand are returned, one more is ERROR with a text of at most 1024 bytes; narrower requests go on."""
    driver, peer = crowd.driver, crowd.peer
    everything = peer.ask()
    assert (everything.status, len(everything.results)) == (DiscoveryStatus.OK, MAX_RESULTS)
    assert len({result.stream_id for result in everything.results}) == MAX_RESULTS
    one_more = driver.announce()
    peer.wait_listed(one_more)
    refused = peer.ask()
    assert (refused.status, refused.results) == (DiscoveryStatus.ERROR, ())
    assert "1001" in refused.error_message
    assert 0 < len(refused.error_message.encode()) <= 1024
    assert peer.ids(stream_id=one_more) == {one_more}


@pytest.mark.spec("DISC-5.2-18", "DISC-5.2-19", "DISC-5.2-25")
def test_a_response_that_the_channel_cannot_carry_is_an_error(peer: DiscoveryPeer, driver: AnnouncedDriver) -> None:
    """F3: a term of 64 KiB takes messages of 8 KiB; what fits comes, what does not is ERROR with no results."""
    producer_id = new_client_id()
    streams = {driver.announce(producer_id=producer_id) for _ in range(40)}
    peer.wait_listed(max(streams))
    narrow = {"response_channel": "aeron:ipc?term-length=64k", "response_stream_id": new_response_stream_id()}
    peer.listen((str(narrow["response_channel"]), int(str(narrow["response_stream_id"]))))
    refused = peer.ask(**narrow, producer_id=producer_id)
    assert (refused.status, refused.results) == (DiscoveryStatus.ERROR, ())
    assert 0 < len(refused.error_message.encode()) <= 1024
    assert peer.ids(**narrow, stream_id=max(streams)) == {max(streams)}
    assert peer.ids(producer_id=producer_id) == streams


# --- authority stays with drivers


@pytest.mark.spec("DISC-8-02", "DISC-12-01")
def test_a_registry_neither_grants_nor_passes_on_an_attach(
    fleet: Fleet, driver: AnnouncedDriver, peer: DiscoveryPeer
) -> None:
    """Asked for a lease on a stream that it lists: no answer anywhere, and nothing reaches the driver."""
    stream_id = driver.announce()
    peer.wait_listed(stream_id)
    since = len(peer.transcript)
    for role in Role:
        peer.send(attach_request(stream_id, role))
    peer.fence()
    assert peer.received(ShmAttachResponse, since) == []
    assert driver.requests() == []


@pytest.mark.spec("DISC-13-01")
def test_queries_are_logged_now_and_then(shared_media_driver: aeron.MediaDriver, shm_dir: Path) -> None:
    """Hundreds of requests, a few lines, and none of them tells what was asked for by name."""
    with AnnouncedDriver(shared_media_driver.aeron_dir) as driver:
        registry = Registry(shm_dir, shared_media_driver.aeron_dir, [driver])
        with registry.start(log_level="info") as process, registry.meet(process) as peer:
            for _ in range(300):
                peer.ask(data_source_name="patient-4711")
            code, output = process.terminate()
    assert code == 0, output
    queries = [line for line in output.splitlines() if "query" in line or "request" in line]
    assert 1 <= len(queries) <= 30
    assert "patient-4711" not in output


# --- defaults


@pytest.mark.spec("DISC-4.2-01", "DISC-4.2-02", "DISC-5.2-17", "DISC-6.2-02")
def test_defaults_are_the_specifications(shm_dir: Path) -> None:
    """The channel, stream id, cap and expiry of a registry that is configured with nothing but its driver."""
    path = shm_dir / "registry.toml"
    entry = 'instance_id = "lab"\ncontrol_channel = "aeron:ipc?term-length=4m"\ncontrol_stream_id = 2000\n'
    path.write_text(f"[[discovery.drivers]]\n{entry}", encoding="utf-8")
    with DriverProcess("-m", "tensorpool", "discovery", "--config", str(path), "--check", "--json") as process:
        code, output = process.finish()
    assert code == 0, output
    settings = json.loads(output)["settings"]
    expected = {
        "discovery.channel": "aeron:ipc?term-length=1m",
        "discovery.stream_id": 1000,
        "discovery.max_results": MAX_RESULTS,
        "discovery.announce_period_ms": 1000,
        "discovery.expiry_ms": 3000,
    }
    assert {key: settings[key] for key in expected} == expected
