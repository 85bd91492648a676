# SPDX-License-Identifier: Apache-2.0
"""What clients do when their driver shuts down, falls silent or is killed. Driver Model §2.3, §4.12, §4.13."""

from __future__ import annotations

import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Consumer, Producer
from tensorpool.wire.driver import Role, ShmAttachRequest, ShmLeaseKeepalive, ShutdownReason
from tests.conformance.client_leases.conftest import (
    FRAME,
    SHORT_PERIOD_MS,
    Bench,
    assert_idle,
    both_roles,
    fence,
    own_id,
    queue_frames,
    start,
    wait_works,
    works,
)
from tests.support.driver_client import DriverClient
from tests.support.driver_process import Deployment
from tests.support.processes import wait_until
from tests.support.wire_consumer import separate
from tests.support.wire_producer import WireProducer


@pytest.mark.spec("DRV-4.13-11", "DRV-4.13-12", "DRV-4.13-13", "DRV-4.12-03", "DRV-4.8-03")
@both_roles
@pytest.mark.parametrize("reason", list(ShutdownReason), ids=lambda reason: reason.name)
def test_a_shutdown_notice_ends_every_lease_at_once(
    bench: Bench, peer: WireProducer, role: Role, reason: ShutdownReason
) -> None:
    """Nothing goes through any more; when the driver is back, the client attaches and keeps the new lease alive.

    It is the notice that ends them: the stream is announced and its memory refreshed until the client has let go.
    """
    session = start(bench.connect(), peer, role)
    wait_works(session, peer)
    lease_id = session.lease_id
    queue_frames(session, peer)
    peer.answers = False
    since = peer.now
    peer.shut_down(reason)
    wait_until(lambda: not session.is_active, "the client has received the notice")
    peer.announces = peer.breathes = False
    assert_idle(session, peer)
    peer.wait_for(ShmAttachRequest, since, stream_id=peer.stream_id, role=role)
    peer.use(peer.make_regions(peer.epoch + 10))
    peer.announces = peer.breathes = True
    peer.answer_held()
    wait_works(session, peer)
    assert session.lease_id not in (None, lease_id)
    fenced = peer.now
    peer.wait_for(ShmLeaseKeepalive, fenced, lease_id=session.lease_id)
    assert peer.received(ShmLeaseKeepalive, fenced, lease_id=lease_id) == []


@pytest.mark.spec("DRV-4.12-03", "DRV-4.13-13")
@both_roles
def test_a_request_that_was_under_way_at_a_shutdown_is_made_anew(bench: Bench, peer: WireProducer, role: Role) -> None:
    """The old one died with the driver: the client asks by itself, under new ids, and uses the answer to that alone."""
    peer.answers = False
    since = peer.now
    client = bench.connect()

    def later() -> list[ShmAttachRequest]:
        asked = [received.message for received in peer.received(ShmAttachRequest, since, stream_id=peer.stream_id)]
        return [it for it in asked if it.correlation_id != first.correlation_id]

    with ThreadPoolExecutor(1) as pool:
        attaching = pool.submit(start, client, peer, role)
        first = peer.wait_for(ShmAttachRequest, since, stream_id=peer.stream_id, role=role).message
        peer.shut_down(ShutdownReason.NORMAL)
        wait_until(later, "another request")
        assert later()[0].client_id != first.client_id
        peer.held.clear()
        peer.answer(first)
        peer.answer_held()
        session = attaching.result(60)
    wait_works(session, peer)
    assert own_id(session) == later()[0].client_id


@pytest.mark.spec("DRV-4.7a-02")
@both_roles
def test_a_shutdown_notice_with_an_undefined_reason_is_none(bench: Bench, peer: WireProducer, role: Role) -> None:
    """Malformed, and therefore ignored (A19)."""
    session = start(bench.connect(), peer, role)
    wait_works(session, peer)
    lease_id = session.lease_id
    peer.send(struct.pack("<4H Q B I", 9, 6, 901, 1, time.monotonic_ns(), 9, 0))
    fence(session, peer)
    assert session.is_active
    assert session.lease_id == lease_id


@pytest.mark.spec("DRV-4.13-15", "DRV-10-01")
@both_roles
def test_a_driver_that_falls_silent_is_gone(bench: Bench, peer: WireProducer, role: Role) -> None:
    """Without announces and fresh stamps nothing goes through after the window; with them the client comes back."""
    session = start(bench.connect(announce_period_ms=SHORT_PERIOD_MS), peer, role)
    wait_works(session, peer)
    lease_id = session.lease_id
    peer.answers = peer.announces = peer.breathes = False
    silent_ns = time.monotonic_ns()
    window_ns = 5 * SHORT_PERIOD_MS * 1_000_000
    wait_until(lambda: not works(session, peer) and not session.is_active, "nothing goes through")
    wait_until(lambda: time.monotonic_ns() - silent_ns > window_ns, "the window is over")
    assert_idle(session, peer)
    peer.use(peer.make_regions(peer.epoch + 1))
    peer.announces = peer.breathes = True
    peer.answer_held()
    wait_works(session, peer)
    assert session.lease_id not in (None, lease_id)


@pytest.mark.spec("DRV-10-01", "DRV-4.13-13", "DRV-4.13-15", "DRV-4.8-03")
def test_clients_outlive_a_driver_that_is_killed_and_started_again(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path
) -> None:
    """Producer and consumer reattach by themselves, in a higher epoch, under leases of the new driver."""
    policies = {"announce_period_ms": 500, "lease_keepalive_interval_ms": 500}
    deployment = separate(Deployment(shm_dir, shared_media_driver.aeron_dir, policies=policies))
    with DriverClient(deployment) as observer:
        process = deployment.start()
        try:
            observer.meet(process)
            with tp.connect(deployment.aeron_dir, config=deployment.config_path) as client:
                producer, consumer = client.producer(10_000), client.consumer(10_000)
                epoch = _exchange(producer, consumer)
                leases = (producer.lease_id, consumer.lease_id)
                process.kill()
                wait_until(lambda: producer.publish(FRAME) is None and not consumer.is_active, "they notice")
                assert consumer.poll(0.05) is None
                process.reap()
                process = deployment.start()
                observer.meet(process)
                assert _exchange(producer, consumer) > epoch
                assert None not in (producer.lease_id, consumer.lease_id)
                assert producer.lease_id != leases[0]
                assert consumer.lease_id != leases[1]
        finally:
            process.reap()


def _exchange(producer: Producer, consumer: Consumer) -> int:
    """Wait for a frame from one to the other; its epoch."""
    epochs: list[int] = []

    def is_through() -> bool:
        seq = producer.publish(FRAME)
        epoch = producer.epoch
        while (frame := consumer.poll(0.02)) is not None:
            if (frame.epoch, frame.seq) == (epoch, seq):
                epochs.append(frame.epoch)
        return bool(epochs)

    wait_until(is_through, "a frame goes from producer to consumer")
    return epochs[-1]
