# SPDX-License-Identifier: Apache-2.0
"""The destination streams of a bridge: whose they are, which ids they have, and that there are no others.

Bridge §2.3, §3, §4, §7; decisions G4, G29. The local driver is real; another client of it hears everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tensorpool import aeron
from tensorpool.control import ControlConfig
from tensorpool.wire.control import ConsumerConfig, FrameDescriptor
from tensorpool.wire.driver import Role, ShmAttachRequest
from tests.support.bridge_rig import BridgeProcess, Host, Reception, held_by_another, new_dest_stream_id, serving_host
from tests.support.bridge_sender import BridgeSender, Link, noise
from tests.support.disc_client import unused_udp_channel
from tests.support.driver_client import attach_request
from tests.support.driver_process import IPC
from tests.support.wire_producer import new_stream_id

STATIC = 12_345


@pytest.fixture(scope="module")
def host(shared_media_driver: aeron.MediaDriver) -> Iterator[Host]:
    with serving_host(shared_media_driver.aeron_dir, streams=(STATIC,)) as host:
        yield host


@pytest.mark.spec("BRG-4-02", "BRG-4-08")
def test_a_bridge_is_the_only_producer_of_its_destination(host: Host, link: Link) -> None:
    """It attaches as any producer does, no other producer gets the stream, and it asks for no other stream."""
    with Reception(host, link=link.again()) as reception:
        reception.meet()
        requests = [received.message for received in reception.consumer.received(ShmAttachRequest)]
        ours = [it for it in requests if it.stream_id == reception.dest_stream_id]
        assert {request.role for request in ours} == {Role.PRODUCER}
        assert {request.stream_id for request in requests} == {reception.dest_stream_id}
        epoch = reception.deliver(b"mine").descriptor.epoch
        rival = attach_request(reception.dest_stream_id, Role.PRODUCER)
        reception.consumer.refused(rival)
        assert reception.deliver(b"still mine").descriptor.epoch == epoch
    with Reception(host, link=link.again(), dest_stream_id=STATIC) as reception:
        assert reception.meet().deliver(b"configured").descriptor.stream_id == STATIC


@pytest.mark.spec("BRG-4-04")
def test_a_destination_that_has_a_producer_is_left_to_it(host: Host, link: Link) -> None:
    """The bridge publishes nothing there while the other holds it, and says why; then it is its own."""
    stream_id = new_dest_stream_id()
    with (
        held_by_another(host, stream_id) as release,
        Reception(host, link=link.again(), dest_stream_id=stream_id) as reception,
    ):
        reception.wait_until(lambda: str(stream_id) in reception.complaint, "the bridge says what is wrong")
        assert not reception.bridge.bridge.is_ready
        reception.sender.announce()
        lost = [reception.sender.send_frame(noise(100)) for _ in range(3)]
        reception.wait_until(lambda: reception.drops().total() >= 3, "frames are dropped")
        assert reception.seqs() == []
        release()
        reception.wait_through()
        assert reception.bridge.bridge.is_ready
        assert not set(lost) & set(reception.seqs())


@pytest.mark.spec("BRG-4-03")
def test_ids_that_the_driver_does_not_give_are_not_used(host: Host, link: Link) -> None:
    """A destination that the driver neither has nor may create."""
    with Reception(host, link=link.again(), dest_stream_id=777) as reception:
        reception.wait_until(lambda: "777" in reception.complaint, "the bridge says what is wrong")
        assert not reception.bridge.bridge.is_ready
        asked = {received.message.stream_id for received in reception.consumer.received(ShmAttachRequest)}
        assert asked == {777}


@pytest.mark.spec("BRG-4-05", "BRG-4-06")
def test_a_destination_is_chosen_from_the_range(host: Host, link: Link) -> None:
    """Another for each mapping, also for mappings of another bridge, and what was chosen stays chosen."""
    stream_ids = [new_dest_stream_id() for _ in range(3)]
    keys: dict[str, Any] = {"dest_stream_id": 0, "dest_stream_id_range": f"{stream_ids[0]}-{stream_ids[-1]}"}
    with Reception(host, link=link.again(), more=[{"source_stream_id": 5}], **keys) as reception:
        reception.wait_until(lambda: reception.bridge.bridge.is_ready, "the bridge has its destinations")
        chosen = reception.bridge.bridge.destinations
        assert sorted(chosen.values()) == stream_ids[:2]
        reception.dest_stream_id = chosen[f"{reception.sender.stream_id}->auto"]
        assert reception.meet().deliver(b"chosen").payload == b"chosen"
        reception.sender.new_epoch()
        assert reception.wait_through().descriptor.stream_id == reception.dest_stream_id
        requests = {received.message.stream_id for received in reception.consumer.received(ShmAttachRequest)}
        assert requests == set(stream_ids[:2])


@pytest.mark.spec("BRG-4-07", "BRG-4-08")
def test_no_consumer_gets_a_private_stream(host: Host, link: Link) -> None:
    """A consumer that asks a bridge for private streams is declined, and finds frames where all do."""
    with Reception(host, link=link.again()) as reception:
        reception.meet()
        consumer = reception.consumer
        asked = (IPC, new_stream_id())
        consumer.listen(asked)
        since = reception.now
        consumer.say_hello(
            reception.dest_stream_id,
            descriptor_stream_id=asked[1],
            descriptor_channel=asked[0],
            control_stream_id=asked[1] + 1,
            control_channel=asked[0],
            max_rate_hz=1,
        )
        config = reception.wait_for(ConsumerConfig, since, consumer_id=consumer.consumer_id).message
        assert (config.descriptor_stream_id, config.descriptor_channel) == (0, "")
        assert (config.control_stream_id, config.control_channel) == (0, "")
        for _ in range(5):
            reception.deliver(b"for all")
        assert consumer.received_on(asked, FrameDescriptor) == []
        with closing(aeron.connect(host.aeron_dir)) as client:
            assert not {asked[1], asked[1] + 1} & {stream_id for _, stream_id in publications(client)}


@pytest.mark.spec("BRG-4-08", "BRG-3-04")
def test_a_receiver_publishes_on_local_streams_and_nowhere_else(host: Host, link: Link) -> None:
    """Every publication that it adds is IPC, on the driver's streams, its service's or the mapping's control stream."""
    control, own = new_stream_id(), link.again()
    mapping = {"source_control_stream_id": 1000, "dest_control_stream_id": control}
    keys: dict[str, Any] = {"forward_qos": True, "forward_progress": True, "forward_metadata": True}
    with closing(aeron.connect(host.aeron_dir)) as client, BridgeSender(host.aeron_dir, own) as sender:
        before = publications(client)
        with Reception(host, link=own, sender=sender, mapping=mapping, **keys) as reception:
            reception.meet()
            added = publications(client) - before
        stream_ids = {stream_id for _, stream_id in added}
        assert control in stream_ids
        service = ControlConfig().control_stream_id  # by which clients declare who they are
        assert stream_ids <= {stream_id for _, stream_id in host.place.endpoints} | {control, service}
        assert all(channel.startswith("aeron:ipc") for channel, _ in added)


def publications(client: aeron.Client) -> set[tuple[str, int]]:
    """Channel and stream of every publication on the media driver: its position counters tell."""
    found = set()
    for counter in client.counters():
        name, _, rest = counter.label.partition(": ")
        if name in ("pub-pos (sampled)", "pub-lmt"):
            _, _, stream_id, channel = rest.split(" ")[:4]
            found.add((channel, int(stream_id)))
    return found


@pytest.mark.spec("BRG-2.3-01", "BRG-6-01")
def test_mappings_of_one_bridge_do_not_mix(host: Host, link: Link) -> None:
    """Two streams on one link: the same epoch and the same seqs, each to its own destination."""
    own = link.again()
    other, dest = new_stream_id(), new_dest_stream_id()
    mappings = [{"source_stream_id": other, "dest_stream_id": dest}]
    with (
        Reception(host, link=own, more=mappings, sender={"epoch": 5}) as reception,
        BridgeSender(host.aeron_dir, own, other, epoch=5) as second,
    ):
        reception.meet()
        since = reception.now
        second.next_seq = reception.sender.next_seq
        early = second.send_frame(b"not announced")
        reception.wait_until(lambda: reception.drops()["chunks.no_announce"] >= 1, "it is dropped")
        mine = reception.deliver(b"first").descriptor
        second.announce()

        def is_through() -> bool:
            second.send_frame(b"second")
            return bool(reception.consumer.received(FrameDescriptor, since, stream_id=dest))

        reception.wait_until(is_through, "a frame of the second stream gets through")
        assert mine.stream_id == reception.dest_stream_id
        assert early not in [it.message.seq for it in reception.consumer.received(FrameDescriptor, stream_id=dest)]


@pytest.mark.spec("BRG-3-02", "BRG-3-03")
def test_receivers_of_a_multicast_judge_each_for_itself(host: Host, link: Link) -> None:
    """Both put the same frames together by the same rules; what only one of them drops, the other has."""
    group = "aeron:udp?endpoint=224.20.30.39:{}|interface=127.0.0.1|ttl=0"
    payload, control = (group.format(unused_udp_channel().rpartition(":")[2]) for _ in range(2))
    shared = Link.unused(payload=payload, control=control, metadata=link.metadata[0])
    keys: dict[str, Any] = {"max_payload_bytes": 1000}
    with (
        Reception(host, link=shared) as one,
        Reception(host, link=shared, sender=one.sender, **keys) as two,
    ):
        one.meet()
        two.wait_through(announces=True)
        since = two.now
        large = noise(2000)
        assert one.deliver(large).payload == large
        chunks = one.sender.frame(noise(900), cuts=[(0, 300), (300, 300), (600, 300)])
        whole = b"".join(chunk["payload_bytes"] for chunk in chunks)
        assert one.accepts(chunks[2], chunks[0], chunks[0], chunks[1]).payload == whole
        assert two.wait_arrived(chunks[0]["seq"], since).payload == whole
        false = one.sender.frame(noise(900), cuts=[(0, 300), (300, 300), (600, 300)])
        one.refuses(*false[:2], false[1] | {"payload_bytes": noise(300)}, false[2])
        last = two.fence()
        assert one.sender.next_seq == last + 1
        probes = [seq for seq in two.seqs(since) if seq not in (chunks[0]["seq"], last)]
        assert false[0]["seq"] not in probes
        assert len(probes) == 2  # the proofs of `accepts` and `refuses`


@pytest.mark.spec("BRG-2-02", "BRG-10-01")
def test_the_command_bridges_until_it_is_stopped(host: Host, link: Link) -> None:
    """It says when its mappings are set up, and in the end what became of everything."""
    with Reception(host, link=link.again(), runs=BridgeProcess) as reception:
        ready = reception.bridge.wait_for("ready")
        assert ready["instance_id"] == reception.tables["bridge"]["instance_id"]
        name = f"{reception.sender.stream_id}->{reception.dest_stream_id}"
        assert ready["destinations"] == {name: reception.dest_stream_id}
        reception.meet()
        payload = noise(3000)
        assert reception.deliver(payload).payload == payload
        chunks = reception.sender.frame(noise(3000))
        reception.refuses(*chunks[:2], chunks[2] | {"chunk_count": 5})
        published = len(reception.seqs())
        counted = reception.bridge.stop()[name]
        assert counted["frames_received"] == published
        assert counted["frames_dropped.inconsistent"] == 1
