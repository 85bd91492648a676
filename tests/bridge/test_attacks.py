# SPDX-License-Identifier: Apache-2.0
"""What strangers on the network cannot do to a bridge: real Aeron over loopback, with the attacker on the same host.

The attacker knows the channels, the stream ids, the epoch and the seqs; not the random session id of the sender. What
it can still do is in docs/trust.md.
"""

from __future__ import annotations

import socket
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tensorpool import aeron
from tensorpool.bridge.sessions import FollowedSession, Origin
from tensorpool.client.metadata import blob_messages
from tensorpool.wire import Message
from tensorpool.wire.bridge import BridgeFrameChunk
from tensorpool.wire.control import (
    DataSourceMeta,
    FrameProgress,
    MetaBlobChunk,
    MetaBlobComplete,
    QosProducer,
    ShmPoolAnnounce,
)
from tensorpool.wire.driver import ShmAttachRequest
from tests.support.bridge_rig import BridgeProcess, Host, Reception, serving_host
from tests.support.bridge_sender import CHUNK_BYTES, FIRST_CHUNK_BYTES, BridgeSender, Link, noise, packed_chunk
from tests.support.driver_process import IPC
from tests.support.processes import own_bytes
from tests.support.wire_producer import new_stream_id

LENGTH = FIRST_CHUNK_BYTES + CHUNK_BYTES + 700  # three chunks
SECOND_NS = 1_000_000_000


@pytest.fixture(scope="module")
def host(shared_media_driver: aeron.MediaDriver) -> Iterator[Host]:
    with serving_host(shared_media_driver.aeron_dir) as host:
        yield host


@pytest.fixture(scope="module")
def link() -> Link:
    return Link.unused()


@pytest.fixture
def reception(host: Host, link: Link) -> Iterator[Reception]:
    """A bridge that follows an honest sender, which is never silent for long."""
    control = new_stream_id()
    mapping = {"source_control_stream_id": 1000, "dest_control_stream_id": control}
    keys: dict[str, Any] = {"announce_period_ms": 60_000, "forward_progress": True}
    with Reception(host, link=link.again(), mapping=mapping, **keys) as reception:
        reception.listen((IPC, control))
        yield reception.meet()


@pytest.fixture
def attacker(reception: Reception) -> Iterator[BridgeSender]:
    """Another session of the same streams that says what the honest sender would."""
    honest = reception.sender
    with BridgeSender(honest_dir(reception), reception.link, honest.stream_id, epoch=honest.epoch) as attacker:
        reception.wait_until(lambda: attacker.is_connected(*reception.link), "the attacker is connected")
        attacker.next_seq = honest.next_seq
        yield attacker


def honest_dir(reception: Reception) -> str:
    return reception.host.aeron_dir


def drops_since(reception: Reception, before: Counter[str]) -> Counter[str]:
    return reception.drops() - before


def test_a_second_session_publishes_nothing(reception: Reception, attacker: BridgeSender) -> None:
    """Its whole frames are dropped and counted, chunk by chunk."""
    before, since = reception.drops(), reception.now
    for _ in range(5):
        attacker.send_frame(noise(LENGTH), seq=reception.sender.next_seq + 1)
    reception.wait_until(lambda: drops_since(reception, before)["chunks.session"] == 15, "all chunks are dropped")
    seq = reception.fence()
    assert reception.seqs(since) == [seq]


def test_a_second_session_completes_no_frame(reception: Reception, attacker: BridgeSender) -> None:
    """Its last chunk of a frame that the honest sender has begun is not used; the honest one is."""
    payload = noise(LENGTH)
    chunks = reception.sender.frame(payload)
    forged = chunks[2] | {"payload_bytes": bytes(chunks[2]["chunk_length"])}
    before = reception.drops()
    reception.send(*chunks[:2])
    attacker.send(packed_chunk(**forged))
    reception.wait_until(lambda: drops_since(reception, before)["chunks.session"] == 1, "it is dropped")
    assert reception.accepts(chunks[2]).payload == payload


def test_an_epoch_from_the_future_silences_no_stream(reception: Reception, attacker: BridgeSender) -> None:
    """2^64-1 and tomorrow's time are no epochs, not even from the session that is followed."""
    (chunk,) = reception.sender.frame(b"no")
    before = reception.drops()
    for epoch in (2**64 - 2, 2**63):
        attacker.send(packed_chunk(**chunk | {"epoch": epoch}))
        reception.send(chunk | {"epoch": epoch})
    reception.wait_until(lambda: drops_since(reception, before)["chunks.epoch"] == 2, "two are dropped by their epoch")
    reception.wait_until(lambda: drops_since(reception, before)["chunks.session"] == 2, "and two by their session")
    for epoch in (2**64 - 2, 2**63):
        reception.sender.announce(epoch=epoch)
    reception.wait_until(lambda: drops_since(reception, before)["announces.epoch"] == 2, "announces are, too")
    assert reception.deliver(b"on it goes").payload == b"on it goes"


def test_a_seq_from_the_future_ends_no_stream(reception: Reception, attacker: BridgeSender) -> None:
    """One frame with seq 2^62 would make every honest frame late, also if it came from the session that is followed."""
    before = reception.drops()
    reception.send(*reception.sender.frame(b"far", seq=2**62))
    attacker.send_chunks(attacker.frame(b"far", seq=2**62))
    reception.wait_until(lambda: drops_since(reception, before)["chunks.seq_jump"] == 1, "it is dropped")
    reception.sender.next_seq = attacker.next_seq = reception.seqs()[-1] + 1
    assert reception.deliver(b"on it goes").payload == b"on it goes"


def test_forged_announces_make_no_regions(reception: Reception, attacker: BridgeSender) -> None:
    """Each would be a new lease and new memory: the attacker's change nothing."""
    epoch = reception.deliver(b"before").descriptor.epoch
    before, since = reception.drops(), reception.now
    for step in range(1, 6):
        attacker.announce(epoch=attacker.epoch + step)
    reception.wait_until(lambda: drops_since(reception, before)["announces.session"] == 5, "all are dropped")
    assert reception.deliver(b"after").descriptor.epoch == epoch
    assert not reception.consumer.received(ShmAttachRequest, since, stream_id=reception.dest_stream_id)


def test_forged_metadata_and_progress_are_not_published(reception: Reception, attacker: BridgeSender) -> None:
    """Nor are checksums and QoS, which go the same way."""
    reception.sender.describe(meta_version=1)
    reception.wait_for(DataSourceMeta, meta_version=1)
    before, since = reception.drops(), reception.now
    attacker.describe(meta_version=2)
    attacker.progress(reception.sender.next_seq + 1)
    attacker.qos()
    reception.wait_until(lambda: drops_since(reception, before)["metadata.session"] == 1, "metadata are dropped")
    reception.wait_until(lambda: drops_since(reception, before)["control.session"] == 2, "the others are dropped")
    assert not reception.consumer.received(DataSourceMeta, since)
    assert not reception.consumer.received(FrameProgress, since)


def test_the_next_sender_is_followed_when_the_image_of_the_last_one_is_gone(host: Host, link: Link) -> None:
    """A restarted sender has another session."""
    own = link.again()
    with (
        BridgeSender(host.aeron_dir, own) as first,
        Reception(host, link=own, sender=first, announce_period_ms=60_000) as reception,
    ):
        reception.meet()
        first.close()
        with BridgeSender(host.aeron_dir, own, first.stream_id, epoch=first.epoch + 1) as second:
            reception.sender = second
            reception.wait_until(second.is_connected, "the second sender is connected")
            reception.wait_through(announces=True)


@pytest.mark.parametrize("allowed", [["10.1.2.0/24", "fd00::/8"], ["10.1.2.3", "127.0.0.0/8"]], ids=["none", "us"])
def test_only_hosts_that_are_allowed_are_heard(host: Host, link: Link, allowed: list[str]) -> None:
    """By the source of the image; what others send is counted and changes nothing."""
    with Reception(host, link=link.again(), allow_from=allowed) as reception:
        if "127.0.0.0/8" in allowed:
            assert reception.meet().deliver(b"known").payload == b"known"
            return
        reception.wait_until(lambda: reception.sender.is_connected(*reception.link), "the sender is connected")
        reception.sender.announce()
        reception.sender.describe()
        reception.sender.send_frame(b"unknown")
        for name in ("control.address", "metadata.address", "chunks.address"):
            reception.wait_until(lambda name=name: reception.drops()[name] == 1, f"{name} is counted")
        assert reception.seqs() == []
        assert "announces_accepted" not in reception.bridge.counts()


def test_a_setup_that_no_publication_sends_ends_no_bridge(host: Host, link: Link) -> None:
    """One datagram, whose active term is before its initial one: a poll of its image would read outside of it."""
    own = link.again()
    images = Path(host.aeron_dir, "images")
    with Reception(host, link=own, runs=BridgeProcess) as reception, socket.socket(type=socket.SOCK_DGRAM) as attacker:
        reception.bridge.wait_for("ready")
        reception.wait_until(lambda: reception.sender.is_connected(*own), "it listens")
        reception.wait_through(announces=True)
        known = set(images.iterdir())
        for initial_term_id in (-(2**31), 7):  # a lie, then what makes an image: the lie was read before
            for channel, stream_id in own:
                address, port = channel.partition("endpoint=")[2].split("|")[0].split(":")
                setup = (40, 0, 0, 5, 0, 4711, stream_id, initial_term_id, 7, 65_536, 1408, 0)
                attacker.sendto(struct.pack("<iBBH8i", *setup), (address, int(port)))
        reception.wait_until(lambda: len(set(images.iterdir()) - known) >= 3, "the media driver has read them")
        for _ in range(20):
            assert reception.deliver(b"on it goes").payload == b"on it goes"


@pytest.mark.spec("BRG-5.2-30", "BRG-5.2-31")
def test_what_is_longer_than_a_datagram_takes_no_memory(reception: Reception) -> None:
    """Messages in fragments from several sessions: no chunk comes so, and none of their bytes is kept."""
    (chunk,) = reception.sender.frame(b"long")
    data = noise(1 << 20)
    forged = packed_chunk(**chunk | {"chunk_length": len(data), "payload_length": len(data), "payload_bytes": data})
    before = reception.drops()
    reception.send(forged)
    for _ in range(3):
        with BridgeSender(honest_dir(reception), reception.link, reception.sender.stream_id) as attacker:
            reception.wait_until(attacker.is_connected, "the attacker is connected")
            attacker.send(forged)
    reception.wait_until(lambda: drops_since(reception, before)["chunks.fragmented"] == 4, "all are counted")
    streams = reception.bridge.bridge._connection.streams
    assert streams.reception._payload.partial_sessions == 0
    assert reception.deliver(b"on it goes").payload == b"on it goes"


@pytest.mark.spec("BRG-5.2-30", "BRG-5.2-31")
@pytest.mark.parametrize("stream", ["payload", "control", "metadata"])
def test_long_messages_of_strangers_take_no_memory(host: Host, link: Link, stream: str) -> None:
    """Twelve sessions with 8 MB each, of known kinds and of others, at a bridge in a process of its own."""
    own = link.again()
    with Reception(host, link=own, runs=BridgeProcess) as reception, ExitStack() as stack:
        reception.bridge.wait_for("ready")
        reception.wait_until(lambda: reception.sender.is_connected(*own), "it listens")
        reception.wait_through(announces=True)
        client = aeron.connect(host.aeron_dir)
        stack.callback(client.close)
        channel, stream_id = getattr(own, stream)
        known: dict[str, tuple[type[Message], ...]] = {
            "payload": (BridgeFrameChunk, BridgeFrameChunk),
            "control": (ShmPoolAnnounce, FrameProgress),
            "metadata": (DataSourceMeta, MetaBlobChunk),
        }
        kinds: tuple[type[Message], ...] = (*known[stream], QosProducer, ShmAttachRequest)
        before = own_bytes(reception.bridge.pid)
        for number in range(12):
            kind = kinds[number % len(kinds)]
            head = struct.pack("<HHHHI", 24, kind.TEMPLATE_ID, kind.SCHEMA_ID, 1, reception.sender.stream_id)
            data = head.ljust(8_000_000, b".")
            publication = client.add_publication(f"{channel}|term-length=64m|mtu=8k", stream_id, exclusive=True)
            reception.wait_until(lambda it=publication: it.is_connected, "the attacker is connected")
            reception.wait_until(lambda it=publication, data=data: it.offer(data), "it sends 8 MB")
        payload = noise(3000)
        table = list(blob_messages(reception.sender.stream_id, 5, 9, noise(100_000)))
        for message in (*table, DataSourceMeta(stream_id=reception.sender.stream_id, meta_version=5, timestamp_ns=1)):
            reception.sender.send(message, own.metadata)
        reception.wait_for(DataSourceMeta, meta_version=5)
        reception.wait_for(MetaBlobComplete, meta_version=5)
        assert reception.deliver(payload).payload == payload
        grown = own_bytes(reception.bridge.pid) - before
        counts = Counter[str]()
        for each in reception.bridge.stop().values():
            counts.update(each)
    assert grown < 8_000_000
    if stream == "payload":
        assert counts["chunks_dropped.fragmented"] == 12
        return
    unknown = 3 if stream == "control" else 6  # QosProducer is of the control stream, a driver's message of none
    assert counts[f"{stream}_dropped.too_long"] == 12 - unknown
    assert counts[f"{stream}_dropped.foreign"] == unknown


def test_a_session_that_is_silent_for_three_periods_is_not_followed_any_longer() -> None:
    """A sender that was killed and restarted need not wait until Aeron gives its image up."""
    followed = FollowedSession(SECOND_NS)
    assert followed.follow(Origin(1, "10.0.0.7"), 0)
    assert not followed.follow(Origin(1, "10.0.0.7"), SECOND_NS)
    assert not followed.may_follow(2, 0, 4 * SECOND_NS - 1)
    assert not followed.may_follow(2, 2 * SECOND_NS, 4 * SECOND_NS)  # its chunks still come
    assert followed.may_follow(2, 0, 4 * SECOND_NS)
    assert not followed.on_image_gone(2)
    assert followed.on_image_gone(1)
    assert followed.may_follow(2, 0, SECOND_NS)
