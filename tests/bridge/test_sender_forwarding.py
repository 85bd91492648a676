# SPDX-License-Identifier: Apache-2.0
"""What the sender forwards beside the chunks: announces, metadata, QoS and progress of its own stream, as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from tensorpool.wire import Message
from tensorpool.wire.control import (
    DataSourceAnnounce,
    DataSourceMeta,
    FrameProgress,
    FrameProgressState,
    Mode,
    QosConsumer,
    QosProducer,
    ShmPoolAnnounce,
)
from tensorpool.wire.trace import TraceLinkSet
from tests.bridge.sending import METADATA_ID, Rig, free_endpoint, pattern
from tests.support.processes import wait_until

SOURCE_CONTROL_ID = 61_000
CONTROL_KEYS = {"source_control_stream_id": SOURCE_CONTROL_ID, "dest_control_stream_id": 61_001}


@pytest.fixture
def make(make: Callable[..., Rig]) -> Callable[..., Rig]:
    """With a receiver."""

    def made(**keys: Any) -> Rig:
        rig = make(**keys)
        rig.listen()
        return rig

    return made


def with_metadata(**keys: Any) -> dict[str, Any]:
    channel = f"aeron:udp?endpoint={free_endpoint()}|term-length=64k"
    return {"metadata_channel": channel, "metadata_stream_id": METADATA_ID, "source_metadata_stream_id": 1300, **keys}


class Local:
    """A process on the source host that publishes on its control stream."""

    def __init__(self, rig: Rig) -> None:
        channel = rig.config.bridge.local_control_channel
        self._publication = rig.link.add_publication(channel, SOURCE_CONTROL_ID, exclusive=True)
        wait_until(lambda: self._publication.has_room, "the sender listens")

    def say(self, *messages: Message | bytes) -> None:
        for message in messages:
            data = message if isinstance(message, bytes) else message.encode()
            wait_until(lambda data=data: self._publication.offer(data), "the log takes it")


def progress(stream_id: int, epoch: int, seq: int) -> FrameProgress:
    return FrameProgress(
        stream_id=stream_id, epoch=epoch, seq=seq, payload_bytes_filled=77, state=FrameProgressState.PROGRESS
    )


def produced(stream_id: int) -> QosProducer:
    return QosProducer(stream_id=stream_id, producer_id=1, epoch=3, current_seq=10)


def qos(stream_id: int, consumer_id: int) -> QosConsumer:
    return QosConsumer(
        stream_id=stream_id,
        consumer_id=consumer_id,
        epoch=3,
        last_seq_seen=9,
        drops_gap=1,
        drops_late=2,
        mode=Mode.STREAM,
    )


@pytest.mark.spec("BRG-7.2-01")
def test_announces_are_forwarded_as_they_were_and_again_every_period(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.settle()
    rig.until(lambda: len(rig.announced_epochs) >= 3, "the epoch is announced again and again")
    announces = rig.received(ShmPoolAnnounce)
    last = announces[-1]
    assert {announce.stream_id for announce in announces} == {rig.stream_id}  # G10
    assert last.epoch == rig.producer.epoch
    assert [pool.stride_bytes for pool in last.payload_pools] == [4096, 262_144]
    assert last.announce_timestamp_ns > announces[0].announce_timestamp_ns


def test_a_receiver_that_comes_back_gets_an_announce_before_a_chunk(make: Callable[..., Rig]) -> None:
    """G16, also without a change of the epoch: a receiver takes no chunk without an announce."""
    rig = make()
    rig.settle()
    rig.deafen()
    rig.wait_until_disconnected()
    rig.control.clear()
    rig.listen()
    rig.settle()
    seq = rig.publish(pattern(500))
    rig.until(lambda: rig.frames, "the frame has come")
    assert [seq for _, seq in rig.frames] == [seq]
    rig.until(lambda: rig.announced_epochs, "the epoch is announced")  # by another socket


@pytest.mark.spec("BRG-7.1-01", "BRG-7.1-02", "BRG-7.2-04")
def test_metadata_go_over_their_own_channel_and_to_who_comes_later(make: Callable[..., Rig]) -> None:
    rig = make(**with_metadata())
    rig.settle()
    rig.producer.set_metadata({"exposure_ms": 4}, tags=["lab1"])
    rig.until(
        lambda: rig.received(DataSourceAnnounce) and any(meta.meta_version for meta in rig.received(DataSourceMeta)),
        "the metadata have come",
    )
    meta = rig.received(DataSourceMeta)[-1]
    assert meta.stream_id == rig.stream_id
    assert [attribute.key for attribute in meta.attributes] == ["exposure_ms", "tags", "tensorpool.clock"]
    assert not any(data[2] in (DataSourceMeta.TEMPLATE_ID, DataSourceAnnounce.TEMPLATE_ID) for data in rig.control)
    rig.deafen()
    rig.metadata.clear()
    rig.wait_until_disconnected()
    rig.listen()
    rig.until(lambda: rig.received(DataSourceMeta) and rig.received(DataSourceAnnounce), "the metadata are sent again")
    assert rig.received(DataSourceMeta)[-1] == meta


@pytest.mark.spec("BRG-7.1-02")
def test_metadata_of_an_epoch_that_is_over_are_not_sent_to_later_receivers(make: Callable[..., Rig]) -> None:
    """The next epoch has a name so far, and nothing else."""
    rig = make(**with_metadata())
    rig.settle()
    rig.producer.close()
    endpoint = rig.pool.config.driver.metadata
    source = rig.link.add_publication(endpoint.channel, endpoint.stream_id, exclusive=True)
    rig.until(lambda: source.has_room, "the sender listens")
    named = DataSourceAnnounce(stream_id=rig.stream_id, producer_id=1, epoch=70, meta_version=5, name="cam")
    described = DataSourceMeta(stream_id=rig.stream_id, meta_version=5, timestamp_ns=1)
    renewed = msgspec.structs.replace(named, epoch=71)
    for data in (named.encode(), described.encode(), renewed.encode()):
        rig.until(lambda data=data: source.offer(data), "the log takes it")  # type: ignore[misc]
    rig.until(lambda: renewed in rig.received(DataSourceAnnounce), "all has come")
    rig.deafen()
    rig.wait_until_disconnected()
    rig.metadata.clear()
    rig.listen()
    rig.until(lambda: rig.received(DataSourceAnnounce), "the name is sent again")
    rig.until(lambda: rig.turn() == 0, "nothing is left to send")
    assert all(it == renewed for it in rig.received(DataSourceAnnounce))
    assert rig.received(DataSourceMeta) == []


@pytest.mark.spec("BRG-7.1-06")
@pytest.mark.parametrize("is_asked", [True, False])
def test_trace_links_are_forwarded_where_that_is_asked(make: Callable[..., Rig], is_asked: bool) -> None:
    """As they were, on the metadata channel; the metadata that follow are forwarded in any case."""
    rig = make(**with_metadata(forward_traces=is_asked))
    rig.producer.set_metadata({"before": 1})
    rig.until(lambda: rig.received(DataSourceMeta), "the channel is open")
    rig.producer.publish(np.zeros(4), trace_id=9, parents=[5, 7])
    version = rig.producer.set_metadata({"after": 1})
    rig.until(lambda: version in [it.meta_version for it in rig.received(DataSourceMeta)], "what follows has come")
    if is_asked:
        rig.until(lambda: rig.received(TraceLinkSet), "the links have come")
        link = rig.received(TraceLinkSet)[0]
        assert (link.stream_id, link.trace_id, link.seq) == (rig.producer.stream_id, 9, 0)
        assert [parent.trace_id for parent in link.parents] == [5, 7]
    assert bool(rig.received(TraceLinkSet)) == is_asked


def test_without_a_metadata_channel_metadata_stay_at_home(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.settle()
    rig.producer.set_metadata({"exposure_ms": 4})
    rig.publish(pattern(100))
    before = len(rig.announced_epochs)
    rig.until(lambda: len(rig.announced_epochs) > before + 1, "announces go on")
    assert not rig.received(DataSourceMeta)
    assert not rig.counters["messages_forwarded", "metadata"]


@pytest.mark.spec("BRG-7.2-05", "BRG-9-02", "BRG-9-04", "BRG-9-05", "BRG-9-07")
def test_qos_and_progress_of_the_stream_use_the_control_channel(make: Callable[..., Rig]) -> None:
    rig = make(forward_qos=True, forward_progress=True, mapping=CONTROL_KEYS)
    rig.settle()
    local = Local(rig)
    own = [produced(rig.stream_id), progress(rig.stream_id, 3, 11)]
    malformed = progress(rig.stream_id, 3, 12).encode()[:-1]
    local.say(qos(rig.stream_id, 5), qos(1, 6), progress(1, 3, 11), malformed, *own)
    rig.until(lambda: rig.received(FrameProgress), "the progress has come")
    forwarded = rig.received(QosConsumer) + rig.received(QosProducer) + rig.received(FrameProgress)
    assert forwarded == own  # a consumer of this host would be a phantom at the other one
    assert rig.counters["messages_forwarded", "qos"] == 1
    assert rig.counters["messages_forwarded", "progress"] == 1
    assert rig.counters["messages_dropped", "malformed"] == 1


@pytest.mark.parametrize(("flag", "kind"), [("forward_qos", QosProducer), ("forward_progress", FrameProgress)])
def test_only_what_is_enabled_is_forwarded(make: Callable[..., Rig], flag: str, kind: type[Message]) -> None:
    rig = make(**{flag: True}, mapping=CONTROL_KEYS)
    rig.settle()
    Local(rig).say(produced(rig.stream_id), progress(rig.stream_id, 3, 11), produced(rig.stream_id))
    rig.until(lambda: rig.received(kind), "what is enabled has come")
    rig.until(lambda: rig.turn() == 0, "nothing is left to forward")
    assert {type(message) for message in rig.received(QosProducer) + rig.received(FrameProgress)} == {kind}


def test_qos_without_a_receiver_is_dropped_and_counted(make: Callable[..., Rig]) -> None:
    """Old reports are not sent later: a receiver that comes back gets current ones."""
    rig = make(forward_qos=True, mapping=CONTROL_KEYS)
    rig.settle()
    rig.deafen()
    rig.wait_until_disconnected()
    Local(rig).say(produced(rig.stream_id))
    rig.until(lambda: rig.counters["messages_dropped", "qos"], "it is counted")


def test_message_longer_than_the_log_takes_is_dropped_and_counted(make: Callable[..., Rig]) -> None:
    rig = make(**with_metadata())
    rig.settle()
    rig.producer.set_metadata({"table": "x" * 10_000})
    rig.until(lambda: rig.counters["messages_dropped", "metadata_too_long"], "it is counted")
