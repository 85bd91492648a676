# SPDX-License-Identifier: Apache-2.0
"""Discovery inside a driver: on its control stream, beside leases, with the driver's own streams.

Discovery §2, §4.2, §5.2, §12, §13; decisions E13, F4, F14. The driver is `tensorpool driver` in a process of its own
with nothing said about where discovery is; clients are made of the codec and Aeron.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.wire.control import Attribute, DataSourceAnnounce, DataSourceMeta, ShmPoolAnnounce
from tensorpool.wire.discovery import DiscoveryResponse, DiscoveryStatus, Result
from tensorpool.wire.driver import ResponseCode, Role, ShmAttachResponse, ShmLeaseKeepalive, ShmLeaseRevoked
from tests.support.disc_client import DiscoveryPeer, new_request_id
from tests.support.disc_fleet import UNLIMITED
from tests.support.driver_client import DriverClient, attach_request, raw_attach
from tests.support.driver_client import serving as serving_driver
from tests.support.driver_process import IPC, Deployment, DriverProcess
from tests.support.processes import private_directory, wait_until
from tests.support.wire_producer import new_stream_id

PLAIN, BUSY, NAMED, OTHER = streams = (10_000, 10_001, 10_002, 10_003)
METADATA: tuple[str, int] = (IPC, 79_990)


@pytest.fixture(scope="module")
def deployment(shared_media_driver: aeron.MediaDriver) -> Iterator[Deployment]:
    with private_directory() as folder:
        settings = {"metadata_stream_id": METADATA[1], "instance_id": "lab-7", "stream_id_range": "21000-21010"}
        deployment = Deployment(
            folder,
            shared_media_driver.aeron_dir,
            streams=streams,
            driver=settings | {"descriptor_stream_id": METADATA[1] + 1, "qos_stream_id": METADATA[1] + 2},
            policies={
                "allow_dynamic_streams": True,
                "announce_period_ms": 500,
                "lease_keepalive_interval_ms": 1000,
            },
        )
        deployment.tables["discovery"] = {"requests_per_s": UNLIMITED, "client_requests_per_s": UNLIMITED}
        with serving_driver(deployment):
            yield deployment


@pytest.fixture
def peer(deployment: Deployment) -> Iterator[DiscoveryPeer]:
    with DiscoveryPeer(deployment.aeron_dir, deployment.control) as peer:
        peer.wait_listed(*streams)
        yield peer


@pytest.mark.spec("DISC-2-01", "DISC-4.2-03", "DISC-13-02", "DISC-5.2-04", "DISC-5.2-07", "DISC-6.4-01")
def test_a_driver_tells_of_its_streams_on_its_control_stream(
    deployment: Deployment, client: DriverClient, peer: DiscoveryPeer
) -> None:
    """All of them, provisioned and idle, as it announces them."""
    response = peer.ask()
    assert response.status is DiscoveryStatus.OK
    found = {result.stream_id: result for result in response.results}
    assert set(streams) <= set(found)
    announce, result = client.next_announce(PLAIN).message, found[PLAIN]
    assert _layout(result) == _layout(announce)
    assert (result.header_slot_bytes, result.max_dims) == (256, 8)


def _layout(described: ShmPoolAnnounce | Result) -> list[object]:
    names = "stream_id", "producer_id", "epoch", "layout_version", "header_nslots", "header_region_uri"
    pools = [(pool.pool_id, pool.pool_nslots, pool.stride_bytes, pool.region_uri) for pool in described.payload_pools]
    return [*(getattr(described, name) for name in names), pools]


@pytest.mark.spec("DISC-5.2-10", "DISC-5.2-13", "DISC-6.4-03")
def test_the_authority_of_a_result_grants_the_lease(deployment: Deployment, peer: DiscoveryPeer) -> None:
    """At the endpoint that it names an attach is granted, with the epoch and the regions that it listed."""
    result = peer.find(PLAIN)
    assert result.driver_instance_id == "lab-7"
    endpoint = (result.driver_control_channel, result.driver_control_stream_id)
    with DiscoveryPeer(deployment.aeron_dir, endpoint) as attacher:
        request = attach_request(PLAIN)
        granted = attacher.wait_for(
            ShmAttachResponse, attacher.send(request), correlation_id=request.correlation_id
        ).message
    assert granted.code is ResponseCode.OK
    assert (granted.epoch, granted.header_region_uri) == (result.epoch, result.header_region_uri)


@pytest.mark.spec("DISC-6.3-01", "DISC-6.4-01", "DISC-12-01")
def test_a_new_producer_is_seen_and_no_more_than_that(client: DriverClient, peer: DiscoveryPeer) -> None:
    """Its epoch takes the place of the earlier one; being listed does not let another producer attach."""
    before = peer.find(BUSY)
    lease = client.attach(BUSY, Role.PRODUCER)
    client.kept.append(lease)
    response = peer.wait_answer(
        lambda it: it.results[0].producer_id == lease.client_id, "the producer is seen", stream_id=BUSY
    )
    (result,) = response.results
    assert result.epoch == lease.epoch > before.epoch
    assert peer.ids(producer_id=lease.client_id) == {BUSY}
    refused = client.refused(attach_request(BUSY, Role.PRODUCER))
    assert refused.code is ResponseCode.REJECTED
    assert client.detach(lease).message.code is ResponseCode.OK
    client.kept.clear()
    peer.wait_answer(lambda it: it.results[0].producer_id == 0, "it is gone", stream_id=BUSY)


@pytest.mark.spec("DISC-6.4-02", "DISC-5.2-08", "DISC-5.1-06")
def test_what_producers_say_about_themselves_is_found(deployment: Deployment, peer: DiscoveryPeer) -> None:
    """F14: they say it on the metadata stream; the driver listens."""
    connection = aeron.connect(deployment.aeron_dir)
    try:
        publication = connection.add_publication(*METADATA)
        wait_until(lambda: publication.has_room, "the driver listens to metadata")
        epoch = peer.find(NAMED).epoch
        tags = Attribute(key="tags", format="text/plain", value=b"Lab1,rgb")
        for message in (
            DataSourceAnnounce(stream_id=NAMED, producer_id=0, epoch=epoch, meta_version=1, name="camera/Front"),
            DataSourceMeta(stream_id=NAMED, meta_version=1, timestamp_ns=0, attributes=(tags,)),
        ):
            wait_until(lambda it=message: publication.offer(it.encode()), "it is taken")
        peer.wait_answer(lambda it: it.results, "it is known", data_source_name="camera/Front", tags=("rgb",))
    finally:
        connection.close()
    assert peer.ids(data_source_name="camera/front") == set()
    assert {tag.tag for tag in peer.find(NAMED).tags} == {"Lab1", "rgb"}


@pytest.mark.spec("DISC-4.2-04", "DISC-10-04")
def test_leases_and_discovery_share_a_stream_and_are_not_confused(client: DriverClient, peer: DiscoveryPeer) -> None:
    """Template 1 of schemas 900, 901 and 910 in turn: each is what its header says, or nothing."""
    since = len(client.transcript)
    attach_id = 2**40 + new_request_id() % 2**40
    request_id = new_request_id()
    body = peer.raw(request_id, stream_id=PLAIN)
    client.send(raw_attach(attach_id, header=(24, 1, 910, 1), stream_id=PLAIN))
    client.send(raw_attach(attach_id, header=(24, 1, 900, 1), stream_id=PLAIN))
    client.send(struct.pack("<4H", 32, 1, 901, 1) + body[8:])
    client.send(struct.pack("<4H", 32, 1, 900, 1) + body[8:])
    peer.send(struct.pack("<4H", 32, 1, 901, 1) + body[8:])
    client.fence()
    peer.fence()
    assert client.received(ShmAttachResponse, since, correlation_id=attach_id) == []
    assert peer.received(DiscoveryResponse, request_id=request_id) == []
    assert client.received(DiscoveryResponse, since) == []
    lease = client.attach(PLAIN)
    assert peer.answer(body, request_id).message.results[0].stream_id == PLAIN
    assert client.detach(lease).message.code is ResponseCode.OK


@pytest.mark.spec("DISC-4.3-02", "DISC-4.3-03")
def test_answers_of_a_driver_do_not_go_to_its_control_stream(client: DriverClient, peer: DiscoveryPeer) -> None:
    """Unless the client asks for that."""
    channel, stream_id = peer.endpoint
    since = len(client.transcript)
    peer.ask(stream_id=PLAIN)
    client.fence()
    assert client.received(DiscoveryResponse, since) == []
    peer.ask(stream_id=PLAIN, response_channel=channel, response_stream_id=stream_id)
    client.wait_for(DiscoveryResponse, since)


@pytest.mark.spec("DISC-12-01", "DISC-5.1-18")
def test_asking_for_a_stream_gives_no_lease_on_it(client: DriverClient, peer: DiscoveryPeer) -> None:
    """The client that found a stream has no lease; nor does it matter that its client_id is one that has."""
    lease = client.attach(OTHER)
    asked = peer.ask(stream_id=OTHER, client_id=lease.client_id)
    assert len(asked.results) == 1
    since = len(client.transcript)
    stranger = attach_request(OTHER).client_id
    peer.ask(stream_id=OTHER, client_id=stranger)
    client.send(
        ShmLeaseKeepalive(
            lease_id=lease.lease_id + 1, stream_id=OTHER, client_id=stranger, role=Role.CONSUMER, client_timestamp_ns=0
        )
    )
    client.send(lease.detach(client_id=stranger))
    client.fence()
    assert client.received(ShmLeaseRevoked, since, lease_id=lease.lease_id) == []
    assert client.detach(lease).message.code is ResponseCode.OK


@pytest.mark.spec("DISC-7-01", "DISC-5.2-10", "DISC-6.4-02")
def test_a_stream_is_found_and_read_by_the_name_that_its_producer_gave_it(deployment: Deployment) -> None:
    """By another client of the same driver that knows nothing but the name."""
    name, array = f"camera/{new_stream_id()}", np.arange(12, dtype=np.int16)
    with (
        tp.connect(deployment.aeron_dir, config=deployment.config_path) as first,
        tp.connect(deployment.aeron_dir, config=deployment.config_path) as second,
        first.producer(name, create=True) as producer,
    ):
        wait_until(lambda: second.discover(name=name), "it is found")
        (found,) = second.discover(name=name)
        assert (found.driver_instance_id, found.stream_id) == ("lab-7", producer.stream_id)
        assert (found.producer_id, found.epoch) == (producer.producer_id, producer.epoch)
        with second.consumer(name) as consumer:
            producer.publish(array)
            frame = consumer.poll(timeout=60)
            assert frame is not None
            assert np.array_equal(frame.copy(), array)


@pytest.mark.spec("DISC-4.2-03", "DISC-13-02")
def test_a_driver_without_a_setting_has_discovery_on_its_control_endpoint(deployment: Deployment) -> None:
    """F4: its channel verbatim, so that the terms of the shared stream agree."""
    arguments = ["driver", "--config", str(deployment.config_path), "--check", "--json"]
    with DriverProcess("-m", "tensorpool", *arguments) as process:
        code, output = process.finish()
    assert code == 0, output
    settings = json.loads(output)["settings"]
    for key in ("channel", "stream_id"):
        assert settings[f"discovery.{key}"] == settings[f"driver.control_{key}"]
    assert settings["discovery.enabled"] is True


@pytest.mark.spec("DRV-4.11-02")
def test_an_embedded_driver_with_an_unknown_control_endpoint_is_found_by_discovery() -> None:
    """At discovery's own endpoint, which is configured; the one that it names grants leases."""
    found_at = (IPC, METADATA[1] + 4)
    overrides = {
        "driver.control_stream_id": METADATA[1] + 3,
        "discovery.channel": found_at[0],
        "discovery.stream_id": found_at[1],
        "streams.plain.stream_id": PLAIN,
    }
    with tp.local(overrides=overrides) as pool, DiscoveryPeer(pool.aeron_dir, found_at) as peer:
        (result,) = peer.wait_listed(PLAIN).results
        found = {
            "driver.control_channel": result.driver_control_channel,
            "driver.control_stream_id": result.driver_control_stream_id,
        }
        assert set(found.values()) == {pool.config.driver.control_channel, METADATA[1] + 3}
        bases = {"shm.base_dir": pool.config.shm.base_dir, "discovery.enabled": False}
        with tp.connect(pool.aeron_dir, overrides=bases | found) as client, client.consumer(PLAIN) as consumer:
            wait_until(lambda: consumer.is_active, "the consumer has its lease")
            assert consumer.epoch == result.epoch
