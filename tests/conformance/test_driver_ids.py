# SPDX-License-Identifier: Apache-2.0
"""Ids that the driver gives away: of dynamic streams, of consumers' own Aeron streams. Driver Model §4.2, §4.3, §11."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tensorpool import aeron
from tensorpool.wire.control import ConsumerConfig, ConsumerHello, ShmPoolAnnounce
from tensorpool.wire.driver import PublishMode, ResponseCode, Role, ShmLeaseRevoked
from tests.support.driver_client import DriverClient, attach_request, deployed, new_client_id
from tests.support.driver_process import IPC, NSLOTS, Deployment
from tests.support.messages import consumer_config, hello
from tests.support.processes import private_directory

STATIC = 13_000
DYNAMIC = range(20_000, 20_003)
DESCRIPTORS = range(31_000, 31_002)
CONTROLS = range(32_000, 32_002)
WIDE = {"header_nslots": 2 * NSLOTS, "payload_pools": [{"pool_id": 3, "stride_bytes": 64}]}


@pytest.fixture(scope="module")
def deployment(shared_media_driver: aeron.MediaDriver) -> Iterator[Deployment]:
    """Ranges of a few ids each, so that they run out."""
    with deployed(
        shared_media_driver.aeron_dir,
        streams=[STATIC],
        driver={
            "stream_id_range": f"{DYNAMIC[0]}-{DYNAMIC[-1]}",
            "descriptor_stream_id_range": [DESCRIPTORS[0], DESCRIPTORS[-1]],
            "control_stream_id_range": [CONTROLS[0], CONTROLS[-1]],
        },
        policies={
            "allow_dynamic_streams": True,
            "default_profile": "wide",
            "lease_keepalive_interval_ms": 1000,
            "lease_expiry_grace_intervals": 20,
        },
        profiles={"wide": WIDE},
    ) as deployment:
        yield deployment


def ask(client: DriverClient, request: ConsumerHello) -> ConsumerConfig:
    """The driver's answer to a hello."""
    since = len(client.transcript)
    client.send(request)
    return client.wait_for(ConsumerConfig, since, stream_id=request.stream_id, consumer_id=request.consumer_id).message


def wants_both(consumer_id: int, stream_id: int = STATIC) -> ConsumerHello:
    return hello(stream_id, consumer_id, descriptor_channel=IPC, control_channel="aeron:ipc?alias=mine")


# --- streams


@pytest.mark.spec("DRV-11-01", "DRV-11-02", "DRV-4.2-13", "DRV-4.2-14", "DRV-4.3-05", "DRV-17-24")
def test_streams_are_made_on_demand_until_the_range_is_exhausted(client: DriverClient, deployment: Deployment) -> None:
    """Only with EXISTING_OR_CREATE, by either role, with the default profile; 0 takes the lowest id that is free."""
    create: dict[str, Any] = {"publish_mode": PublishMode.EXISTING_OR_CREATE}
    for mode in (None, PublishMode.REQUIRE_EXISTING):
        for stream_id in (0, DYNAMIC[0]):
            refusal = client.refused(attach_request(stream_id, publish_mode=mode))
            assert refusal.code is ResponseCode.REJECTED, "nothing is made without the mode"
    for stream_id in (1, DYNAMIC[0] - 1, DYNAMIC[-1] + 1, DESCRIPTORS[0]):
        assert client.refused(attach_request(stream_id, **create)).code is ResponseCode.INVALID_PARAMS, "outside"
    assert not client.received(ShmPoolAnnounce, stream_id=DYNAMIC[0])

    chosen = client.attach(DYNAMIC[1], Role.PRODUCER, **create)
    assert chosen.stream_id == DYNAMIC[1]
    lowest = client.attach(0, Role.CONSUMER, **create)
    assert lowest.stream_id == DYNAMIC[0]
    request = attach_request(0, Role.PRODUCER, **create)
    next_free = client.granted(request)
    assert next_free.stream_id == DYNAMIC[2]
    assert client.granted(request).received.data == next_free.received.data, "a retry makes no second stream"
    for lease in (chosen, lowest, next_free):
        announce = client.wait_for(ShmPoolAnnounce, stream_id=lease.stream_id, epoch=lease.epoch).message
        assert announce.header_nslots == lease.response.header_nslots == 2 * NSLOTS
        assert [(pool.pool_id, pool.stride_bytes) for pool in announce.payload_pools] == [(3, 64)]
        assert announce.producer_id == (lease.client_id if lease.role is Role.PRODUCER else 0)
        assert deployment.epochs(lease.stream_id)[-1] == lease.epoch

    refusal = client.refused(attach_request(0, Role.PRODUCER, **create))
    assert refusal.code is ResponseCode.REJECTED, "exhausted"
    assert str(DYNAMIC[-1]) in refusal.error_message
    joined = client.attach(DYNAMIC[1])  # what exists is found without creating
    assert joined.epoch == chosen.epoch
    for lease in (chosen, lowest, next_free, joined):
        client.detach(lease)


# --- consumers' own streams


@pytest.mark.spec("DRV-11-04", "DRV-11-05", "DRV-11-07", "DRV-11-08")
def test_consumers_get_ids_of_their_own_until_the_ranges_are_exhausted(client: DriverClient) -> None:
    """Channel with id 0 is a request; ids are distinct, the same at every hello, and free again when a lease ends."""
    leases = [client.attach(STATIC) for _ in range(2)]
    granted = [ask(client, wants_both(lease.client_id)) for lease in leases]
    assert {config.descriptor_stream_id for config in granted} == set(DESCRIPTORS)
    assert {config.control_stream_id for config in granted} == set(CONTROLS)
    for config in granted:
        assert (config.descriptor_channel, config.control_channel) == (IPC, "aeron:ipc?alias=mine")
        assert config.use_shm
    for lease, config in zip(leases, granted, strict=True):
        assert ask(client, wants_both(lease.client_id)) == config

    late = client.attach(STATIC)
    declined = ask(client, wants_both(late.client_id))
    assert declined == consumer_config(STATIC, late.client_id)
    client.detach(leases[0])
    assert ask(client, wants_both(late.client_id)) == consumer_config(
        STATIC,
        late.client_id,
        descriptor_stream_id=granted[0].descriptor_stream_id,
        control_stream_id=granted[0].control_stream_id,
        descriptor_channel=IPC,
        control_channel="aeron:ipc?alias=mine",
    )
    for lease in (leases[1], late):
        client.detach(lease)
    client.wait_for(ShmLeaseRevoked, lease_id=late.lease_id)


@pytest.mark.spec("DRV-11-04", "DRV-11-05")
@pytest.mark.parametrize("kind", ["descriptor", "control"])
def test_a_consumer_may_ask_for_one_of_the_two(client: DriverClient, kind: str) -> None:
    """The stream that was not asked for stays empty and 0."""
    lease = client.attach(STATIC)
    config = ask(client, hello(STATIC, lease.client_id, **{f"{kind}_channel": IPC}))
    other = {"descriptor": "control", "control": "descriptor"}[kind]
    assert getattr(config, f"{kind}_stream_id") in {"descriptor": DESCRIPTORS, "control": CONTROLS}[kind]
    assert getattr(config, f"{kind}_channel") == IPC
    assert (getattr(config, f"{other}_stream_id"), getattr(config, f"{other}_channel")) == (0, "")
    client.detach(lease)


def test_hellos_that_are_the_producers_to_answer_are_left_to_it(client: DriverClient) -> None:
    """Explicit ids, no request at all, or a stream that is not ours: the driver gives nothing away."""
    consumer_id = new_client_id()
    for request in (
        hello(STATIC, consumer_id),
        hello(STATIC, consumer_id, descriptor_channel=IPC, descriptor_stream_id=DESCRIPTORS[0]),
        hello(STATIC, consumer_id, control_channel=IPC, control_stream_id=CONTROLS[0]),
        hello(STATIC, consumer_id, descriptor_stream_id=DESCRIPTORS[0], control_stream_id=CONTROLS[0]),
        hello(STATIC + 1, consumer_id, descriptor_channel=IPC),
    ):
        client.send(request)
    client.fence()
    given = client.received(ConsumerConfig, consumer_id=consumer_id)
    assert not [
        received for received in given if received.message.descriptor_stream_id or received.message.control_stream_id
    ]


@pytest.mark.spec("DRV-11-06")
def test_without_ranges_a_request_is_declined_and_the_attach_goes_on(
    shared_media_driver: aeron.MediaDriver,
) -> None:
    """No range: empty channels and id 0, so that the consumer stays on the shared streams; its lease is untouched."""
    with private_directory() as folder:
        policies = {"lease_expiry_grace_intervals": 100}
        deployment = Deployment(folder, shared_media_driver.aeron_dir, streams=[STATIC], policies=policies)
        with deployment.start() as process, DriverClient(deployment) as client:
            client.meet(process)
            lease = client.attach(STATIC)
            config = ask(client, wants_both(lease.client_id))
            assert (config.descriptor_stream_id, config.control_stream_id) == (0, 0)
            assert (config.descriptor_channel, config.control_channel) == ("", "")
            assert client.detach(lease).message.code is ResponseCode.OK
