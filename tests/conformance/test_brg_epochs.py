# SPDX-License-Identifier: Apache-2.0
"""Epochs of a source, and what a bridge receiver makes of them: boundaries that no frame crosses.

Bridge §6, §7.2, §8; decisions G4, G5, G16, G17. Every bridge here receives one mapping of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tensorpool.wire.control import FrameDescriptor, ShmPoolAnnounce
from tensorpool.wire.driver import Role, ShmAttachRequest
from tests.support.bridge_rig import Host, Reception
from tests.support.bridge_sender import CHUNK_BYTES, FIRST_CHUNK_BYTES, Link, noise
from tests.support.region_bytes import in_progress, superblock

LENGTH = FIRST_CHUNK_BYTES + CHUNK_BYTES + 700  # three chunks


@pytest.fixture
def reception(host: Host, link: Link) -> Iterator[Reception]:
    """The source is in epoch 77, and never silent for long enough to be forgotten."""
    with Reception(host, link=link.again(), sender={"epoch": 77}, announce_period_ms=60_000) as reception:
        yield reception.meet()


@pytest.mark.spec("BRG-8-04", "BRG-8-05")
def test_the_local_epoch_has_nothing_to_do_with_the_sources(reception: Reception) -> None:
    """It is the local driver's, which is its sole authority (G4): the one that its memory bears."""
    epoch = reception.deliver(b"frame").descriptor.epoch
    assert epoch not in (0, 77)
    assert superblock(reception.mapped(epoch).paths[0])["epoch"] == epoch
    announced = reception.wait_for(ShmPoolAnnounce, stream_id=reception.dest_stream_id, epoch=epoch)
    assert announced.message.producer_id != reception.sender.producer_id


@pytest.mark.spec("BRG-8-01", "BRG-8-04")
def test_a_new_source_epoch_is_a_new_local_epoch(reception: Reception) -> None:
    """G5: seqs begin anew, in new memory, under a new lease; consumers see a boundary as with any producer."""
    old = reception.deliver(b"old", seq=1000).descriptor
    since = reception.now
    reception.sender.new_epoch()
    new = reception.wait_through().descriptor
    assert new.epoch > old.epoch
    assert new.seq < old.seq
    paths = {epoch: set(reception.mapped(epoch).paths.values()) for epoch in (old.epoch, new.epoch)}
    assert not paths[old.epoch] & paths[new.epoch]
    requests = reception.consumer.received(ShmAttachRequest, since, stream_id=reception.dest_stream_id)
    assert {received.message.role for received in requests} == {Role.PRODUCER}
    epochs = [descriptor.epoch for descriptor in reception.published(since)]
    assert epochs == sorted(epochs)


@pytest.mark.spec("BRG-8-02", "BRG-5.3-01")
def test_what_is_under_way_does_not_outlive_its_epoch(reception: Reception) -> None:
    """Neither its own last chunk nor one of the new epoch completes it."""
    sender = reception.sender
    chunks = sender.frame(noise(LENGTH), seq=500)
    reception.send(*chunks[:2])
    reception.wait_until(lambda: reception.inflight_frames == 1, "a frame is under way")
    since = reception.now
    sender.new_epoch()
    reception.wait_through()
    reception.refuses(chunks[2])
    again = sender.frame(noise(LENGTH), seq=500)
    reception.refuses(again[2])
    assert 500 not in reception.seqs(since)
    assert reception.drops()["frames.epoch"] >= 1


@pytest.mark.spec("BRG-8-03", "BRG-6-02")
def test_an_older_epoch_stays_over(reception: Reception) -> None:
    """Its chunks are dropped, and an announce of it changes nothing while the newer one is alive."""
    sender = reception.sender
    sender.new_epoch(80)
    epoch = reception.wait_through().descriptor.epoch
    before = reception.drops()
    reception.refuses(*sender.frame(noise(LENGTH), epoch=77))
    sender.announce(epoch=77)
    sender.announce(epoch=79)
    reception.wait_until(lambda: (reception.drops() - before)["announces.stale"] == 2, "they are counted")
    reception.refuses(*sender.frame(noise(LENGTH), epoch=77))
    reception.refuses(*sender.frame(noise(LENGTH), epoch=79))
    assert (reception.drops() - before)["chunks.epoch"] == 9
    assert reception.deliver(b"on").descriptor.epoch == epoch


@pytest.mark.spec("BRG-6-02", "BRG-6-03", "BRG-8-01", "BRG-8-02", "BRG-8-03")
def test_an_epoch_that_is_not_announced_yet_ends_the_one_before(reception: Reception) -> None:
    """Its own frames wait for the announce, those of the old epoch are over at once, and memory stays as it was."""
    sender = reception.sender
    descriptor = reception.deliver(b"old").descriptor
    files = reception.files(descriptor.epoch)
    started = sender.frame(noise(LENGTH))
    reception.send(*started[:2])
    before = reception.drops()
    reception.send(*sender.frame(noise(LENGTH), epoch=78))
    reception.send(started[2])
    late = sender.send_frame(b"of the old epoch")
    reception.wait_until(lambda: (reception.drops() - before)["chunks.epoch"] == 5, "all are dropped")
    assert reception.seqs()[-1] == descriptor.seq
    changed = [region for region, data in reception.files(descriptor.epoch).items() if data != files[region]]
    assert not changed or reception.mapped(descriptor.epoch).word(started[0]["seq"]) == in_progress(started[0]["seq"])
    sender.new_epoch(78)
    since = reception.now
    reception.wait_through()
    assert not {late, started[0]["seq"]} & set(reception.seqs(since))


@pytest.mark.spec("BRG-8-03", "BRG-8-01")
def test_a_source_whose_epochs_begin_anew_is_received_again(host: Host, link: Link) -> None:
    """G17: once the higher epoch has been silent for three announce periods."""
    with Reception(host, link=link.again(), sender={"epoch": 77}, announce_period_ms=400) as reception:
        old = reception.meet().deliver(b"old").descriptor
        reception.sender.epoch = 3
        reception.sender.next_seq = 0
        since = reception.now
        arrived = reception.wait_through(announces=True)
        assert arrived.descriptor.epoch > old.epoch
        assert arrived.descriptor.seq == reception.sender.next_seq - 1
        assert {descriptor.epoch for descriptor in reception.published(since)} == {arrived.descriptor.epoch}


@pytest.mark.spec("BRG-7.2-02", "BRG-6-09", "BRG-6-10")
def test_the_latest_announce_tells_which_pools_there_are(reception: Reception) -> None:
    """A new epoch with other pools: the old ids and strides are over, the new ones count."""
    sender = reception.sender
    sender.pools = {5: 2048}
    sender.new_epoch()
    reception.wait_through()
    before = reception.drops()
    reception.refuses(*sender.frame(b"old pool", pool_id=3))
    assert (reception.drops() - before).total() == 1
    reception.refuses(*sender.frame(noise(2049), pool_id=5))
    assert len(reception.deliver(noise(2048), pool_id=5).payload) == 2048


@pytest.mark.spec("BRG-7.2-02")
@pytest.mark.parametrize(
    "lie",
    [{"layout_version": 2}, {"header_slot_bytes": 128}, {"header_nslots": 7}, {"pools": {}}, {"pools": {3: 1000}}],
    ids=["another layout", "other slots", "a number of slots that is none", "no pools", "a stride that is none"],
)
def test_an_announce_of_unknown_memory_is_not_believed(reception: Reception, lie: dict[str, object]) -> None:
    """It opens no epoch; the one that was announced before goes on."""
    epoch = reception.deliver(b"before").descriptor.epoch
    before = reception.drops()
    reception.sender.announce(**{"epoch": reception.sender.epoch + 1} | lie)
    reception.wait_until(lambda: _announces(reception.drops() - before), "the announce is counted")
    assert reception.deliver(b"after").descriptor.epoch == epoch


def _announces(drops: Counter[str]) -> int:
    return sum(count for name, count in drops.items() if name.startswith(("announces.", "control.")))


@pytest.mark.spec("BRG-8-06")
def test_a_restarted_receiver_has_a_higher_local_epoch(reception: Reception) -> None:
    """Though the source is the same as before."""
    before = reception.deliver(b"before").descriptor.epoch
    reception.restart()
    reception.meet()
    assert reception.deliver(b"after").descriptor.epoch > before


@pytest.mark.spec("BRG-7.2-03", "BRG-4-08")
def test_the_sources_announce_is_not_forwarded_to_local_consumers(reception: Reception) -> None:
    """On no stream of the host: what is announced here is the local driver's memory."""
    sender = reception.sender
    sender.announce()
    sender.new_epoch()
    reception.wait_through()
    announces = [received.message for received in reception.consumer.received(ShmPoolAnnounce)]
    assert {announce.stream_id for announce in announces} >= {reception.dest_stream_id}
    assert sender.stream_id not in {announce.stream_id for announce in announces}
    uris = [announce.header_region_uri for announce in announces if announce.stream_id == reception.dest_stream_id]
    assert not [uri for uri in uris if "elsewhere" in uri]
    described = {received.message.stream_id for received in reception.consumer.received(FrameDescriptor)}
    assert sender.stream_id not in described
