# SPDX-License-Identifier: Apache-2.0
"""Leases that are lost and come back: no unexpected exception, and every frame accounted for."""

from __future__ import annotations

import contextlib
import functools
import time
from pathlib import Path

import msgspec
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Client, DropReason, State, StateChange
from tensorpool.client.attachment import AttachSpec
from tensorpool.client.producer_session import ProducerSession
from tensorpool.client.session import MAX_EVENTS
from tensorpool.driver import Driver, DriverConfig
from tensorpool.wire.control import DataSourceMeta
from tensorpool.wire.driver import Role, ShmDetachRequest, ShmLeaseKeepalive
from tests.client.conftest import FRAME, SMALL, STREAM, Outsider, Pair, StillConductor, new_name
from tests.support.patience import PATIENT
from tests.support.processes import wait_until
from tests.support.wire_producer import WireProducer

# --- leases that are lost


def test_a_revoked_consumer_comes_back_by_itself(client: Client, pool: tp.Local) -> None:
    """With another lease; its loop sees nothing but frames, and its callback what happened."""
    seen: list[StateChange] = []
    producer = client.producer(new_name(), create=True)
    consumer = client.consumer(producer.stream_id, on_state=seen.append)
    pair = Pair(producer, consumer)
    producer.wait_for_consumers(1, 20)
    pair.publish()
    before = consumer.lease_id
    assert before is not None
    pool.conductor.revoke(before)
    wait_until(lambda: consumer.is_active and consumer.lease_id not in (None, before), "there is another lease")
    frames: list[int] = []

    def is_through() -> bool:
        producer.publish(FRAME)
        frame = consumer.poll(0.05)
        frames.extend([frame.seq] if frame else [])
        return frame is not None

    wait_until(is_through, "frames flow again")
    consumer.poll()
    states = [change.state for change in seen]
    assert states[0] is State.ACTIVE
    assert State.WAITING in states
    assert states[-1] is State.ACTIVE
    assert any("REVOKED" in change.reason for change in seen)
    assert seen[-1].epoch == producer.epoch
    while consumer.poll() is not None:
        pass
    stats = consumer.stats
    assert stats.received + stats.lost == producer.stats.published
    consumer.close()
    assert seen[-1].state is State.CLOSED


def test_a_revoked_producer_comes_back_by_itself(client: Client, pool: tp.Local) -> None:
    """In a new epoch; what it could not publish meanwhile is counted, and its consumers follow."""
    seen: list[StateChange] = []
    producer = client.producer(new_name(), create=True, on_state=seen.append)
    consumer = client.consumer(producer.stream_id)
    producer.wait_for_consumers(1, 20)
    Pair(producer, consumer).publish()
    lease, epoch = producer.lease_id, producer.epoch
    assert lease is not None
    assert epoch is not None
    given = 1
    pool.conductor.revoke(lease)

    def publish() -> bool:
        nonlocal given
        given += 1
        return producer.publish(FRAME) is not None and producer.epoch != epoch

    wait_until(publish, "frames go to a new epoch")
    assert producer.epoch is not None
    assert producer.epoch > epoch
    wait_until(lambda: consumer.epoch == producer.epoch, "the consumer follows")
    producer.publish(FRAME)
    given += 1
    wait_until(lambda: consumer.poll(0.05), "frames flow again")
    stats = producer.stats
    assert stats.published + sum(stats.dropped.values()) == given
    assert set(stats.dropped) <= {DropReason.DETACHED}
    assert stats.epochs == 2
    states = [change.state for change in seen]
    assert states[0] is State.ACTIVE
    assert State.WAITING in states
    assert states[-1] is State.ACTIVE


def test_a_slot_whose_lease_went_meanwhile_is_dropped(client: Client, pool: tp.Local) -> None:
    """It is never published into an epoch that has another owner."""
    with client.producer(new_name(), create=True) as producer:
        slot = producer.claim((3,))
        lease = producer.lease_id
        assert lease is not None
        pool.conductor.revoke(lease)
        wait_until(lambda: producer.lease_id not in (None, lease) and producer.is_active, "there is another lease")
        slot.array[:] = 1  # the memory is still there
        assert slot.commit() is None
        assert slot.seq is None
        assert producer.stats.dropped == {DropReason.DETACHED: 1}
        assert producer.publish(FRAME) == 0


def test_everything_comes_back_with_the_driver(media_driver: aeron.MediaDriver, shm_dir: Path) -> None:
    """It ends and another one begins: no exception in between, and every frame is accounted for."""
    overrides = SMALL | {
        "shm.base_dir": str(shm_dir / "regions"),
        "policies.announce_period_ms": 400,
        "policies.lease_keepalive_interval_ms": 400,
    }
    config = DriverConfig.load(environ=PATIENT, overrides=overrides)
    driver = Driver(config, aeron_dir=media_driver.aeron_dir)
    with tp.connect(media_driver.aeron_dir, config=config) as client:
        producer, consumer = client.producer(STREAM), client.consumer(STREAM)
        producer.wait_for_consumers(1, 20)
        Pair(producer, consumer).publish()
        before = producer.lease_id, consumer.lease_id
        driver.close()

        def is_lost() -> bool:
            consumer.poll()
            return producer.publish(FRAME) is None and consumer.epoch is None

        wait_until(is_lost, "the driver is missed")
        driver = Driver(config, aeron_dir=media_driver.aeron_dir)

        def is_back() -> bool:
            frame = consumer.poll(0.02) if producer.publish(FRAME) is not None else None
            return frame is not None and frame.epoch == producer.epoch

        wait_until(is_back, "frames flow again")
        assert producer.lease_id != before[0]
        assert consumer.lease_id != before[1]
        while consumer.poll() is not None:
            pass
        stats = consumer.stats
        assert stats.received + stats.lost == producer.stats.published
    driver.close()


# --- answers that cannot be used


@pytest.mark.spec("DRV-4.7a-01")
@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_an_answer_with_an_impossible_layout_is_given_back(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path, role: str
) -> None:
    """Complete as it is, no ring has three slots: no session is kept up with it, and the next answer is used."""
    aeron_dir = shared_media_driver.aeron_dir
    with WireProducer(shm_dir, aeron_dir) as peer, tp.connect(aeron_dir, overrides=peer.settings) as client:
        honest = peer.regions.layout["payload_pools"]
        pools = tuple(msgspec.structs.replace(pool, pool_nslots=3) for pool in honest)
        peer.lie(header_nslots=3, payload_pools=pools)
        session = getattr(client, role)(peer.stream_id, timeout=20)
        assert session.is_active
        lying = peer.ended[0].lease_id
        assert peer.wait_for(ShmDetachRequest, lease_id=lying)
        assert session.lease_id != lying


# --- what users see of it


def test_states_are_reported_once_each_and_closed_is_the_last() -> None:
    """A thread that waits is woken; nothing comes after CLOSED."""
    session = ProducerSession(StillConductor(), AttachSpec(STREAM, Role.PRODUCER), None)  # type: ignore[arg-type]
    assert (session.state, session.is_closed) == (State.ATTACHING, False)
    session.set_state(State.ACTIVE, "attached", 5)
    session.set_state(State.ACTIVE, "attached", 6)  # in another epoch: news
    session.set_state(State.WAITING, "lost")
    session.set_state(State.WAITING, "lost")  # no news
    session.set_state(State.CLOSED, "closed")
    session.set_state(State.ACTIVE, "attached", 7)
    seen: list[StateChange] = []
    session.take_events(seen.append)
    assert seen == [
        StateChange(State.ACTIVE, "attached", 5),
        StateChange(State.ACTIVE, "attached", 6),
        StateChange(State.WAITING, "lost"),
        StateChange(State.CLOSED, "closed"),
    ]
    assert session.is_closed
    session.take_events(seen.append)
    assert len(seen) == 4


def test_events_that_no_caller_takes_do_not_pile_up() -> None:
    """Without a callback they are passed over; without a poll the oldest go."""
    session = ProducerSession(StillConductor(), AttachSpec(STREAM, Role.PRODUCER), None)  # type: ignore[arg-type]
    for epoch in range(2 * MAX_EVENTS):
        session.set_state(State.ACTIVE, "attached", epoch)
    assert len(session.events) == MAX_EVENTS
    session.take_events(None)
    assert not session.events


@pytest.mark.parametrize("domain", ["MONOTONIC", "REALTIME_SYNCED"])
def test_what_a_client_stamps_is_in_the_clock_of_the_announces(domain: str) -> None:
    """C8: keepalives and metadata, over the wire."""
    clock_ns = time.monotonic_ns if domain == "MONOTONIC" else time.time_ns
    with (
        tp.local(overrides=SMALL | {"driver.announce_clock_domain": domain}) as pool,
        pool.connect() as client,
        contextlib.closing(Outsider(pool)) as outsider,
    ):
        before_ns = clock_ns()
        producer = client.producer(new_name(), create=True)
        producer.set_metadata({"a": 1})
        keepalive = outsider.wait_for(ShmLeaseKeepalive, lambda it: it.client_id == producer.producer_id)
        of_clock, of_version = (
            outsider.wait_for(DataSourceMeta, functools.partial(is_version, producer.stream_id, version))
            for version in (0, 1)
        )
        after_ns = clock_ns()
        assert before_ns <= keepalive.client_timestamp_ns <= after_ns
        assert before_ns <= of_clock.timestamp_ns <= of_version.timestamp_ns <= after_ns


def is_version(stream_id: int, version: int, message: DataSourceMeta) -> bool:
    return (message.stream_id, message.meta_version) == (stream_id, version)
