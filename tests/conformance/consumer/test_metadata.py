# SPDX-License-Identifier: Apache-2.0
"""Metadata across producers and versions, over real Aeron. Wire §10.3; decision K4."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Client, Consumer
from tensorpool.wire.control import Attribute, DataSourceAnnounce, DataSourceMeta
from tests.support.consuming import deliver
from tests.support.processes import wait_until
from tests.support.wire_producer import WireProducer

FRAME = np.arange(8, dtype=np.uint8)


@pytest.fixture
def client(shared_media_driver: aeron.MediaDriver, peer: WireProducer) -> Iterator[Client]:
    settings = peer.settings | {"policies.announce_period_ms": 1000}
    with tp.connect(shared_media_driver.aeron_dir, overrides=settings) as client:
        yield client


def attributes(consumer: Consumer, version: int, epoch: int | None = None) -> object:
    known = consumer.metadata(version, epoch=epoch)
    return None if known is None else dict(known.attributes)


@pytest.mark.spec("WIRE-10.3.2-03", "WIRE-10.3.1-02")
def test_a_new_producers_first_version_is_never_the_old_producers(peer: WireProducer, client: Client) -> None:
    """Each counts from 1; a frame of the new epoch has no metadata until its own producer has sent them."""
    consumer = client.consumer(peer.stream_id)
    epochs = (peer.epoch, peer.epoch + 1)
    for epoch, value in zip(epochs, (b"old", b"new"), strict=True):
        if epoch != peer.epoch:
            peer.new_epoch()
        assert deliver(peer, consumer)[0] == epoch
        assert consumer.metadata(1) is None
        assert consumer.metadata() is None
        peer.say(DataSourceAnnounce)
        peer.say(DataSourceMeta, attributes=(Attribute(key="camera", format="text/plain", value=value),))
        wait_until(lambda: consumer.metadata(1) is not None, "the metadata is there")
        assert attributes(consumer, 1) == {"camera": value.decode()}
    assert attributes(consumer, 1, epochs[0]) == {"camera": "old"}


@pytest.mark.spec("WIRE-10.3.2-01", "WIRE-10.3.1-03")
def test_every_version_of_quick_changes_reaches_the_wire_in_order_and_a_late_joiner_gets_the_last(
    peer: WireProducer, client: Client
) -> None:
    """Nine versions with a frame each, as fast as they can be set: each once, in order; the last four are repeated."""
    since = peer.now
    producer = client.producer(peer.stream_id)
    for value in range(9):
        version = producer.set_metadata({"n": value})
        assert version == value + 1
        assert producer.publish(FRAME) is not None
    mine = {"stream_id": producer.stream_id}
    wait_until(lambda: peer.received(DataSourceMeta, since, **mine, meta_version=9), "the last version is sent")
    sent = dict.fromkeys(it.message.meta_version for it in peer.received(DataSourceMeta, since, **mine))
    assert [version for version in sent if version] == list(range(1, 10))  # version 0 tells of the clock only
    announced = peer.received(DataSourceAnnounce, since, **mine)
    assert {it.message.epoch for it in announced} == {producer.epoch}
    late = peer.now
    wait_until(
        lambda: {it.message.meta_version for it in peer.received(DataSourceMeta, late, **mine)} == {6, 7, 8, 9},
        "all are repeated",
    )
    producer.close()


@pytest.mark.spec("WIRE-10.3.2-03")
def test_our_own_producers_that_follow_each_other_are_distinguished() -> None:
    """A real driver, two producers of one process one after the other, four quick versions each."""
    with tp.local() as pool, pool.connect() as client:
        for value in ("old", "new"):
            with client.producer("camera", create=True) as producer:
                consumer = client.consumer(producer.stream_id)
                assert producer.wait_for_consumers(1, 20)
                wait_until(lambda c=consumer, p=producer: c.epoch == p.epoch, "the epoch is mapped")
                for number in range(4):
                    version = producer.set_metadata({"of": value, "n": number})
                    producer.publish(FRAME)
                    frame = consumer.poll(20)
                    assert frame is not None
                    assert frame.meta_version == version
                for number in range(4):
                    wait_until(lambda n=number, c=consumer: c.metadata(n + 1) is not None, "the version is known")
                    assert attributes(consumer, number + 1) == {"of": value, "n": number}
                consumer.close()
