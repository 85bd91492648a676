# SPDX-License-Identifier: Apache-2.0
"""What a bridge carries beside frames: announces, metadata, QoS and progress, each where it belongs and rewritten.

Bridge §7, §7.1, §7.2, §9; decisions G6, G7, G10-G13. A test sender sends to the receiving half, and a
test receiver receives from the sending half.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.wire import Message
from tensorpool.wire.bridge import BridgeFrameChunk
from tensorpool.wire.control import (
    Attribute,
    DataSourceAnnounce,
    DataSourceMeta,
    FrameProgress,
    FrameProgressState,
    QosConsumer,
    QosProducer,
    ShmPoolAnnounce,
)
from tensorpool.wire.trace import Parent, TraceLinkSet
from tests.support.bridge_rig import Host, Reception, Sending, new_dest_stream_id
from tests.support.bridge_sender import BridgeSender, Link, noise
from tests.support.driver_process import IPC
from tests.support.wire_producer import new_stream_id

ATTRIBUTES = (
    Attribute(key="exposure_ms", format="text/plain", value=b"4"),
    Attribute(key="mask", format="application/octet-stream", value=bytes(range(256))),
)


@pytest.fixture(scope="module")
def reception(host: Host, link: Link) -> Iterator[Reception]:
    """A receiver that forwards everything; a consumer hears the mapping's local control stream."""
    control = new_stream_id()
    mapping = {"source_control_stream_id": 1000, "dest_control_stream_id": control}
    keys: dict[str, Any] = {"forward_metadata": True, "forward_qos": True, "forward_progress": True}
    with Reception(host, link=link.again(), mapping=mapping, forward_traces=True, **keys) as reception:
        reception.listen((IPC, control))
        yield reception.meet()


def control_of(reception: Reception) -> tuple[str, int]:
    return IPC, reception.tables["mappings"][0]["dest_control_stream_id"]


def wait_qos(reception: Reception, since: int) -> QosProducer:
    """The first that is sent on the mapping's control stream; the bridge's own is on the driver's QoS stream."""
    endpoint = control_of(reception)
    reception.wait_until(lambda: reception.consumer.received_on(endpoint, QosProducer, since), "QoS is forwarded")
    return reception.consumer.received_on(endpoint, QosProducer, since)[0]


# --- metadata, received


@pytest.mark.spec("BRG-7.1-01", "BRG-7.1-03", "BRG-7.1-04", "BRG-7.1-05")
def test_metadata_are_forwarded_to_local_consumers_under_the_destinations_id(reception: Reception, host: Host) -> None:
    """G12: with the local epoch and producer; version, name, summary and attributes are the source's."""
    descriptor = reception.deliver(b"frame").descriptor
    since = reception.now
    said = reception.sender.name("camera/front", meta_version=41, summary="left of the door")
    received = reception.wait_for(DataSourceAnnounce, since, stream_id=reception.dest_stream_id)
    assert received.stream_id == host.place.endpoints.metadata[1]
    assert (received.message.meta_version, received.message.name, received.message.summary) == (
        41,
        said.name,
        said.summary,
    )
    assert received.message.epoch == descriptor.epoch
    assert received.message.producer_id != said.producer_id
    said_meta = reception.sender.describe(meta_version=42, attributes=ATTRIBUTES)
    received_meta = reception.wait_for(DataSourceMeta, since, stream_id=reception.dest_stream_id)
    assert received_meta.stream_id == host.place.endpoints.metadata[1]
    assert received_meta.message.meta_version == 42
    assert received_meta.message.attributes == ATTRIBUTES
    assert received_meta.message.timestamp_ns == said_meta.timestamp_ns
    assert not reception.consumer.received(DataSourceMeta, stream_id=reception.sender.stream_id)


def test_trace_links_are_forwarded_under_the_ids_of_the_destination(reception: Reception, host: Host) -> None:
    """Stream and epoch are the receiver's, seq and trace ids the source's; those of another epoch stay away."""
    descriptor = reception.deliver(b"frame").descriptor
    since = reception.now
    ids: dict[str, Any] = {"stream_id": reception.sender.stream_id, "parents": (Parent(trace_id=5), Parent(trace_id=7))}
    epoch = reception.sender.epoch
    for link in (
        TraceLinkSet(**ids, epoch=epoch + 1, seq=1, trace_id=8),
        TraceLinkSet(**ids | {"stream_id": ids["stream_id"] + 1_000_000}, epoch=epoch, seq=2, trace_id=8),
        TraceLinkSet(**ids, epoch=epoch, seq=3, trace_id=9),
    ):
        reception.sender.send(link, reception.link.metadata)
    received = reception.wait_for(TraceLinkSet, since, stream_id=reception.dest_stream_id)
    assert received.stream_id == host.place.endpoints.metadata[1]
    assert received.message == TraceLinkSet(
        stream_id=reception.dest_stream_id, epoch=descriptor.epoch, seq=3, trace_id=9, parents=ids["parents"]
    )
    assert len(reception.consumer.received(TraceLinkSet, since)) == 1


@pytest.mark.spec("BRG-7.1-04")
def test_metadata_that_are_rewritten_already_are_taken_too(reception: Reception) -> None:
    """G10; those of strangers are not."""
    since = reception.now
    reception.sender.describe(stream_id=reception.sender.stream_id + 1_000_000, meta_version=43)
    reception.sender.describe(stream_id=reception.dest_stream_id, meta_version=44)
    reception.wait_for(DataSourceMeta, since, stream_id=reception.dest_stream_id, meta_version=44)
    versions = [received.message.meta_version for received in reception.consumer.received(DataSourceMeta, since)]
    assert versions == [44]


@pytest.mark.spec("BRG-7.1-04")
def test_a_mapping_may_name_another_metadata_stream(host: Host, link: Link) -> None:
    with Reception(host, link=link.again(), mapping={"metadata_stream_id": 28_000}) as reception:
        reception.meet()
        reception.wait_until(lambda: reception.sender.is_connected(reception.link.metadata), "metadata are listened to")
        reception.sender.describe(meta_version=3)
        reception.wait_for(DataSourceMeta, stream_id=28_000, meta_version=3)
        reception.sender.name("elsewhere")
        reception.wait_for(DataSourceAnnounce, stream_id=28_000, name="elsewhere")


@pytest.mark.spec("BRG-7.1-04")
@pytest.mark.parametrize("is_first", [True, False], ids=["the link first", "the link last"])
def test_metadata_of_chained_mappings_keep_their_streams(host: Host, link: Link, is_first: bool) -> None:
    """A->B and B->C: what the source B says is C's, though B is also what A's metadata are rewritten to."""
    head, middle, tail = new_stream_id(), new_dest_stream_id(), new_dest_stream_id()
    mappings = [
        {"source_stream_id": head, "dest_stream_id": middle},
        {"source_stream_id": middle, "dest_stream_id": tail},
    ]
    own, *more = mappings if is_first else reversed(mappings)
    with (
        BridgeSender(host.aeron_dir, own_link := link.again(), own["source_stream_id"]) as sender,
        Reception(host, link=own_link, sender=sender, mapping=own, more=more) as reception,
    ):
        reception.wait_until(lambda: reception.bridge.bridge.is_ready, "it has both destinations")
        reception.wait_until(lambda: sender.is_connected(own_link.metadata), "metadata are listened to")
        for stream_id in (head, middle):  # which also tells whose metadata count
            sender.announce(stream_id=stream_id)
        sender.describe(stream_id=middle, meta_version=7)
        sender.describe(stream_id=head, meta_version=8)
        found = [reception.wait_for(DataSourceMeta, meta_version=version).message for version in (7, 8)]
        assert [(it.stream_id, it.meta_version) for it in found] == [(tail, 7), (middle, 8)]


@pytest.mark.spec("BRG-7.2-04")
def test_metadata_on_the_control_stream_are_none(reception: Reception) -> None:
    since = reception.now
    said = DataSourceMeta(stream_id=reception.sender.stream_id, meta_version=66, timestamp_ns=1)
    reception.sender.send(said, reception.link.control)
    reception.sender.qos()
    wait_qos(reception, since)
    reception.sender.describe(meta_version=67)
    reception.wait_for(DataSourceMeta, since, meta_version=67)
    assert not reception.consumer.received(DataSourceMeta, since, meta_version=66)


@pytest.mark.spec("BRG-7.1-06")
def test_without_a_metadata_channel_frames_come_without_metadata(host: Host, link: Link) -> None:
    with Reception(host, link=link.again(), metadata_channel=None, metadata_stream_id=None) as reception:
        assert reception.meet().deliver(b"frame").payload == b"frame"
        assert not reception.sender.is_connected(reception.link.metadata)


# --- progress and QoS, received


@pytest.mark.spec("BRG-9-03", "BRG-9-06", "BRG-9-07", "BRG-9-08", "BRG-7.2-05")
def test_progress_is_forwarded_under_the_destinations_id(reception: Reception) -> None:
    """G6: epoch, seq, bytes and state are the source's, also of a frame whose chunks are still to come (G7)."""
    states = [FrameProgressState.STARTED, FrameProgressState.PROGRESS, FrameProgressState.COMPLETE]
    for filled, state in enumerate(states):
        since = reception.now
        seq = reception.sender.next_seq + 5
        said = reception.sender.progress(seq, payload_bytes_filled=2**40 + filled, state=state)
        received = reception.wait_for(FrameProgress, since)
        assert received.stream_id == control_of(reception)[1]
        forwarded = (
            received.message.epoch,
            received.message.seq,
            received.message.payload_bytes_filled,
            received.message.state,
        )
        assert forwarded == (said.epoch, seq, 2**40 + filled, state)
        assert received.message.stream_id == reception.dest_stream_id


@pytest.mark.spec("BRG-9-09", "BRG-9-10")
def test_progress_of_an_unknown_stream_or_epoch_is_dropped(reception: Reception) -> None:
    """Of an unknown stream, another epoch, and a frame that is published already; the one behind them comes."""
    sender = reception.sender
    done = reception.fence()
    since = reception.now
    sender.progress(done + 1, stream_id=sender.stream_id + 1_000_000)
    sender.progress(done + 1, stream_id=0)
    sender.progress(done + 1, epoch=sender.epoch + 1)
    sender.progress(done + 1, epoch=sender.epoch - 1)
    sender.progress(done)
    sender.progress(0)
    sender.progress(done + 1, payload_bytes_filled=77)
    reception.wait_for(FrameProgress, since, payload_bytes_filled=77)
    assert len(reception.consumer.received(FrameProgress, since)) == 1


@pytest.mark.spec("BRG-9-10")
def test_progress_of_a_frame_that_was_given_up_is_dropped(host: Host, link: Link) -> None:
    """Also long after its assembly has expired."""
    control = new_stream_id()
    mapping = {"source_control_stream_id": 1000, "dest_control_stream_id": control}
    keys: dict[str, Any] = {"forward_progress": True, "assembly_timeout_ms": 40}
    with Reception(host, link=link.again(), mapping=mapping, **keys) as reception:
        reception.listen((IPC, control))
        reception.meet()
        (first, *_) = reception.sender.frame(noise(3000))
        before, since = reception.drops(), reception.now
        reception.send(first)
        reception.wait_until(lambda: (reception.drops() - before)["frames.timeout"] == 1, "it is given up")
        expired_s = time.monotonic() + 0.2
        reception.wait_until(lambda: time.monotonic() > expired_s, "its tombstone is gone, too")
        reception.sender.progress(first["seq"], payload_bytes_filled=66)
        reception.sender.progress(first["seq"] + 1, payload_bytes_filled=77)
        reception.wait_for(FrameProgress, since, payload_bytes_filled=77)
        assert not reception.consumer.received(FrameProgress, since, payload_bytes_filled=66)
        assert (reception.drops() - before)["progress.late"] == 1


@pytest.mark.spec("BRG-9-13")
def test_progress_alone_makes_no_frame_for_a_consumer(reception: Reception) -> None:
    """COMPLETE says nothing about this host: a consumer of ours gets the frame when its chunks are there."""
    client = tp.connect(reception.host.aeron_dir, config=reception.host.config)
    with client, client.consumer(reception.dest_stream_id) as consumer:
        while consumer.poll(0.5) is None:
            reception.deliver(b"warm")
        while consumer.poll() is not None:
            pass
        since = reception.now
        (chunk,) = reception.sender.frame(b"complete")
        reception.sender.progress(chunk["seq"], state=FrameProgressState.COMPLETE, payload_bytes_filled=8)
        reception.wait_for(FrameProgress, since, seq=chunk["seq"])
        assert consumer.poll(0.1) is None
        assert reception.seqs(since) == []
        reception.send(chunk)
        frame = consumer.poll(60.0)
        assert frame is not None
        assert (frame.seq, frame.copy().tobytes()) == (chunk["seq"], b"complete")


@pytest.mark.spec("BRG-9-01", "BRG-9-02")
def test_qos_of_the_source_is_forwarded_on_the_mappings_control_stream(reception: Reception) -> None:
    since = reception.now
    said = reception.sender.qos(current_seq=4711, watermark=3)
    received = wait_qos(reception, since)
    assert received.stream_id == reception.dest_stream_id
    assert (received.current_seq, received.watermark) == (said.current_seq, said.watermark)
    since = reception.now
    reception.sender.qos(stream_id=reception.sender.stream_id + 1_000_000, current_seq=1)
    reception.sender.qos(current_seq=2)
    assert wait_qos(reception, since).current_seq == 2


@pytest.mark.spec("BRG-9-01", "BRG-9-03", "BRG-9-11")
@pytest.mark.parametrize("flag", ["forward_qos", "forward_progress"])
def test_only_what_is_to_be_forwarded_is(host: Host, link: Link, flag: str) -> None:
    """Each has its own switch, whatever the sender says."""
    control = new_stream_id()
    mapping = {"source_control_stream_id": 1000, "dest_control_stream_id": control}
    keys: dict[str, Any] = {flag: True}
    with Reception(host, link=link.again(), mapping=mapping, **keys) as reception:
        reception.listen((IPC, control))
        reception.meet()
        sender, since = reception.sender, reception.now
        say: list[Callable[[], object]] = [sender.qos, lambda: sender.progress(sender.next_seq + 1)]
        kinds: list[type[Message]] = [QosProducer, FrameProgress]
        wanted = flag == "forward_progress"
        say[not wanted]()
        say[wanted]()
        received_on = reception.consumer.received_on
        reception.wait_until(lambda: received_on((IPC, control), kinds[wanted], since), "one is forwarded")
        assert received_on((IPC, control), kinds[not wanted], since) == []


# --- sent


@pytest.fixture(scope="module")
def sending_link() -> Link:
    """Other channels: the test receiver's socket is not a bridge's."""
    return Link.unused()


@pytest.fixture
def sending(shared_media_driver: aeron.MediaDriver, shm_dir: Path, sending_link: Link) -> Iterator[Sending]:
    """A sender that forwards everything that its source's control and metadata streams say."""
    keys: dict[str, Any] = {"forward_metadata": True, "forward_qos": True, "forward_progress": True}
    with Sending(
        shm_dir, shared_media_driver.aeron_dir, link=sending_link.again(), has_control=True, **keys
    ) as sending:
        yield sending.meet()


@pytest.mark.spec("BRG-7.2-01", "BRG-7.2-05", "BRG-7.1-02", "BRG-7-02", "BRG-3-04", "BRG-7.2-04", "BRG-10-15")
def test_everything_travels_on_its_own_stream(sending: Sending) -> None:
    """Chunks alone on the payload stream, metadata alone on theirs; never a descriptor or a word of the driver's."""
    producer, receiver = sending.producer, sending.receiver
    sending.carry(noise(3000))
    producer.say(DataSourceAnnounce, name="camera", meta_version=9)
    producer.say(DataSourceMeta, meta_version=9, attributes=ATTRIBUTES)
    producer.say(FrameProgress, seq=producer.next_seq, payload_bytes_filled=5)
    producer.say(QosProducer, on=producer.endpoints.control)
    announce = receiver.wait_for(ShmPoolAnnounce)
    name, meta = receiver.wait_for(DataSourceAnnounce), receiver.wait_for(DataSourceMeta)
    receiver.wait_for(FrameProgress)
    receiver.wait_for(QosProducer)
    sending.carry(noise(3000))
    assert receiver.kinds(sending.link.payload) == {BridgeFrameChunk}
    assert receiver.kinds(sending.link.metadata) == {DataSourceAnnounce, DataSourceMeta}
    forwarded = {ShmPoolAnnounce, FrameProgress, QosProducer}
    assert forwarded <= receiver.kinds(sending.link.control) <= forwarded | {QosConsumer}
    assert announce.message.payload_pools == producer.honest(ShmPoolAnnounce).payload_pools  # type: ignore[attr-defined]
    assert (announce.message.stream_id, announce.message.epoch) == (producer.stream_id, producer.epoch)
    assert (name.message.stream_id, name.message.meta_version, name.message.name) == (producer.stream_id, 9, "camera")
    assert (meta.message.stream_id, meta.message.meta_version) == (producer.stream_id, 9)
    assert meta.message.attributes == ATTRIBUTES


@pytest.mark.spec("BRG-9-05", "BRG-9-07")
def test_progress_of_the_source_is_sent_as_it_was_said(sending: Sending) -> None:
    """From the configured control stream, of this stream only."""
    producer, receiver = sending.producer, sending.receiver
    since = len(receiver.transcript)
    producer.say(FrameProgress, stream_id=producer.stream_id + 1, seq=1, payload_bytes_filled=1)
    producer.say(FrameProgress, seq=12, payload_bytes_filled=2**33, state=FrameProgressState.STARTED)
    received = receiver.wait_for(FrameProgress, since).message
    assert (received.stream_id, received.epoch, received.seq) == (producer.stream_id, producer.epoch, 12)
    assert (received.payload_bytes_filled, received.state) == (2**33, FrameProgressState.STARTED)
    assert len(receiver.received(FrameProgress, since)) == 1


@pytest.mark.spec("BRG-9-02")
def test_qos_of_the_source_is_sent(sending: Sending) -> None:
    producer, receiver = sending.producer, sending.receiver
    since = len(receiver.transcript)
    producer.say(QosProducer, on=producer.endpoints.control, stream_id=producer.stream_id + 1, current_seq=1)
    producer.say(QosProducer, on=producer.endpoints.control, current_seq=99)
    received = receiver.wait_for(QosProducer, since).message
    assert (received.stream_id, received.current_seq) == (producer.stream_id, 99)


@pytest.mark.spec("BRG-7.1-02")
def test_every_version_of_metadata_is_sent_in_order(sending: Sending) -> None:
    """Frames refer to them by version: none may be passed over because another followed at once."""
    since = len(sending.receiver.transcript)
    for version in range(10, 30):
        sending.producer.say(DataSourceMeta, meta_version=version, attributes=ATTRIBUTES)
    sending.receiver.wait_for(DataSourceMeta, since, meta_version=29)
    received = [it.message.meta_version for it in sending.receiver.received(DataSourceMeta, since)]
    assert received == list(range(10, 30))


@pytest.mark.spec("BRG-9-01", "BRG-9-03", "BRG-9-11")
@pytest.mark.parametrize("flag", ["forward_qos", "forward_progress"])
def test_only_what_is_to_be_sent_is(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path, sending_link: Link, flag: str
) -> None:
    keys: dict[str, Any] = {flag: True}
    link, has_control = sending_link.again(), True
    with Sending(shm_dir, shared_media_driver.aeron_dir, link=link, has_control=has_control, **keys) as sending:
        producer, receiver = sending.meet().producer, sending.receiver
        wanted = flag == "forward_progress"
        kinds: list[type[Message]] = [QosProducer, FrameProgress]
        for kind in kinds if wanted else reversed(kinds):
            fields = {"seq": 1, "payload_bytes_filled": 5} if kind is FrameProgress else {}
            producer.say(kind, on=producer.endpoints.control, **fields)
        receiver.wait_for(kinds[wanted])
        assert not receiver.received(kinds[not wanted])


@pytest.mark.spec("BRG-9-11", "BRG-7.1-06", "BRG-7.2-01")
def test_only_the_announce_is_sent_unasked(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path, sending_link: Link
) -> None:
    """With metadata, QoS and progress off, whatever the source says."""
    keys: dict[str, Any] = {"forward_metadata": False}
    with Sending(shm_dir, shared_media_driver.aeron_dir, link=sending_link.again(), **keys) as sending:
        sending.meet()
        producer, receiver = sending.producer, sending.receiver
        producer.say(DataSourceMeta, meta_version=5)
        producer.say(FrameProgress, seq=1, payload_bytes_filled=5)
        producer.say(QosProducer, on=producer.endpoints.control)
        since = len(receiver.transcript)
        receiver.wait_for(ShmPoolAnnounce, since)
        sending.carry(b"frame")
        receiver.wait_for(ShmPoolAnnounce, len(receiver.transcript))
        assert receiver.kinds(sending.link.control) == {ShmPoolAnnounce}
        assert receiver.kinds(sending.link.metadata) == set()
