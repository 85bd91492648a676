# SPDX-License-Identifier: Apache-2.0
"""The observer at a real media driver: it receives all messages, of foreign peers too, and disturbs no process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.errors import TransportError
from tensorpool.supervisor.config import SupervisorConfig
from tensorpool.supervisor.observer import Observer
from tensorpool.supervisor.snapshot import ConsumerState, ConsumerStatus, StreamState, StreamStatus
from tensorpool.wire.control import DataSourceAnnounce, Mode, QosProducer
from tests.support.messages import consumer_qos, hello
from tests.support.processes import wait_until
from tests.support.wire_producer import WireProducer

PERIOD = {"policies.announce_period_ms": 1000, "control.enabled": False}


@pytest.fixture
def peer(shm_dir: Path, shared_media_driver: aeron.MediaDriver) -> Iterator[WireProducer]:
    """A foreign stream with its driver: no name, no metadata, no QoS unless the test says so."""
    with WireProducer(shm_dir / "regions", shared_media_driver.aeron_dir) as peer:
        yield peer


def observer_of(peer: WireProducer, aeron_dir: str, **overrides: Any) -> Observer:
    config = SupervisorConfig.load(environ={}, overrides=peer.settings | PERIOD | overrides)
    return Observer(aeron_dir, config)


def sees(observer: Observer, stream_id: int, fits: Callable[[StreamStatus], object]) -> bool:
    return any(it.stream_id == stream_id and fits(it) for it in observer.snapshot().streams)


class Publishing:
    """Publishes a frame whenever it is asked whether something has happened yet."""

    def __init__(self, peer: WireProducer, observer: Observer) -> None:
        self._peer = peer
        self._observer = observer

    def until(self, fits: Callable[[StreamStatus], object], what: str) -> None:
        def is_done() -> bool:
            self._peer.publish(np.zeros((4, 8), np.uint16))
            return sees(self._observer, self._peer.stream_id, fits)

        wait_until(is_done, what)


def test_a_foreign_producer_is_seen_with_its_rate_and_notices_nothing(
    peer: WireProducer, shared_media_driver: aeron.MediaDriver
) -> None:
    """Its ring tells what it does not: no lease was taken, nothing was said."""
    with observer_of(peer, shared_media_driver.aeron_dir) as observer:
        Publishing(peer, observer).until(lambda it: it.rate_hz and it.bytes_per_s, "the ring tells the rate")
        (found,) = observer.snapshot().streams
    assert (found.stream_id, found.epoch, found.producer_id) == (peer.stream_id, peer.epoch, peer.producer_id)
    assert (found.name, found.state, found.consumers) == (None, StreamState.LIVE, 0)
    assert (found.frame_bytes, found.dtype, found.shape) == (64, "uint16", (4, 8))
    assert (found.nslots, found.region_fault, found.layout_flaw) == (peer.nslots, None, None)
    assert found.seq is not None
    assert 0 <= found.seq < peer.next_seq
    sent = {type(entry.message).__name__ for entry in peer.transcript}
    assert sent <= {"ShmPoolAnnounce", "FrameDescriptor"}
    assert peer.grants == []


def test_where_rings_may_not_be_read_descriptors_tell_the_rate(
    peer: WireProducer, shm_dir: Path, shared_media_driver: aeron.MediaDriver
) -> None:
    """Announced from outside our directories: the fault is shown, and the stream all the same."""
    elsewhere = {"shm.base_dir": str(shm_dir / "other")}
    with observer_of(peer, shared_media_driver.aeron_dir, **elsewhere) as observer:
        Publishing(peer, observer).until(lambda it: it.rate_hz, "descriptors tell the rate")
        (found,) = observer.snapshot().streams
    assert found.region_fault is not None
    assert "containment" in found.region_fault
    assert (found.state, found.bytes_per_s, found.activity_age_ns) == (StreamState.LIVE, None, None)


def test_a_ring_of_which_only_a_part_was_written_and_one_that_turned_many_times(
    peer: WireProducer, shared_media_driver: aeron.MediaDriver
) -> None:
    """The newest frame is found wherever it is, also behind one that is being written."""
    with observer_of(peer, shared_media_driver.aeron_dir) as observer:
        for seq in (3, 5 * peer.nslots + 2):
            for number in range(max(0, seq - peer.nslots + 1), seq + 1):
                peer.write(number, bytes(8))
            peer.begin(seq + 1, bytes(8))
            wait_until(
                lambda seq=seq: sees(observer, peer.stream_id, lambda it: it.seq == seq),
                f"seq {seq} is found",
            )


def test_what_peers_report_is_in_the_view(peer: WireProducer, shared_media_driver: aeron.MediaDriver) -> None:
    """Names, QoS, hello; malformed messages are counted."""
    with observer_of(peer, shared_media_driver.aeron_dir) as observer:

        def is_complete() -> bool:
            peer.say(DataSourceAnnounce, name="lab/camera")
            peer.say(QosProducer, current_seq=500)
            qos = {"epoch": peer.epoch, "last_seq_seen": 490, "drops_gap": 3, "drops_late": 1}
            peer.send(consumer_qos(peer.stream_id, 77, **qos), peer.endpoints.qos)
            peer.send(peer.honest(QosProducer, current_seq=500).encode()[:-1])
            snapshot = observer.snapshot()
            is_named = sees(observer, peer.stream_id, lambda it: it.name == "lab/camera")
            return bool(snapshot.consumers) and is_named and snapshot.message_counts.get("malformed", 0) > 0

        wait_until(is_complete, "everything is in the view")
        snapshot = observer.snapshot()
    (consumer,) = snapshot.consumers
    assert (consumer.consumer_id, consumer.stream_name, consumer.lag) == (77, "lab/camera", 10)
    assert (consumer.drops_gap, consumer.drops_late) == (3, 1)


def test_a_client_of_ours_is_seen_from_attach_to_detach() -> None:
    """Leases, QoS, lag; who detaches is gone at once, and so is the producer."""
    profile = {"header_nslots": 64, "payload_pools": [{"pool_id": 1, "stride_bytes": 4096}]}
    settings = {"profiles.default": profile, "policies.announce_period_ms": 500}
    with tp.local(overrides=settings) as pool, pool.connect() as client:
        with (
            Observer(pool.aeron_dir, SupervisorConfig.of(pool.config)) as observer,
            client.producer("lab/front", create=True) as producer,
        ):
            with client.consumer(producer.stream_id) as consumer:

                def status() -> ConsumerStatus | None:
                    producer.publish(np.zeros(16))
                    consumer.poll(0.001)
                    return next((it for it in observer.snapshot().consumers), None)

                def reads_well() -> bool:
                    found = status()
                    if found is None or not found.rate_hz or found.lag is None:
                        return False
                    whose = (found.consumer_id, found.lease_id, found.epoch)
                    ours = (consumer.consumer_id, consumer.lease_id, consumer.epoch)
                    return whose == ours and (found.state, found.mode) == (ConsumerState.OK, "STREAM")

                wait_until(reads_well, "it is seen to read")
                held = {"CONSUMER": consumer.consumer_id, "PRODUCER": producer.producer_id}
                wait_until(
                    lambda: {it.role: it.client_id for it in observer.snapshot().leases} == held, "both hold a lease"
                )
                wait_until(
                    lambda: sees(observer, producer.stream_id, lambda it: it.name == "lab/front" and it.consumers == 1),
                    "the stream has its name and its consumer",
                )
                wait_until(lambda: observer.snapshot().services, "the driver says that it is alive")
                assert observer.snapshot().services[0].tag == f"service:driver:{pool.config.driver.instance_id}"
            wait_until(lambda: not observer.snapshot().consumers, "the consumer left")
            producer.close()
            wait_until(
                lambda: sees(observer, producer.stream_id, lambda it: it.state is StreamState.NO_PRODUCER),
                "the producer left",
            )
            kinds = [str(change.kind) for change in observer.snapshot().changes]
        assert "consumer vanished" in kinds
        assert kinds.index("epoch changed") < kinds.index("producer left")


def test_it_outlives_the_media_driver(shm_dir: Path) -> None:
    """It reports whether there is one; without any it does not start unless it is patient."""
    aeron_dir = str(shm_dir / "aeron")
    config = SupervisorConfig.load(environ={}, overrides=PERIOD)
    with pytest.raises(TransportError, match=r"no media driver is alive at .*tensorpool driver"):
        Observer(aeron_dir, config).on_start()
    with Observer(aeron_dir, config, is_patient=True) as observer:
        assert not observer.is_connected
        for _ in range(2):
            with aeron.MediaDriver(aeron_dir) as driver:
                wait_until(lambda: observer.is_connected, "the media driver is found")
                assert observer.counters()
                driver.close()
            wait_until(lambda: not observer.is_connected, "the media driver is missed")
        assert observer.counters() == []


def test_hellos_alone_make_a_consumer(peer: WireProducer, shared_media_driver: aeron.MediaDriver) -> None:
    """What is not for the view is passed over by its header."""
    with observer_of(peer, shared_media_driver.aeron_dir) as observer:
        said = hello(peer.stream_id, 5, mode=Mode.RATE_LIMITED, max_rate_hz=3)
        wait_until(lambda: peer.send(said) and observer.snapshot().consumers, "it is there")
        (found,) = observer.snapshot().consumers
    assert (found.consumer_id, found.mode, found.max_rate_hz, found.qos_age_ns) == (5, "RATE_LIMITED", 3, None)
