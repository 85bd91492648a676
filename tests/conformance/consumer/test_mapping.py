# SPDX-License-Identifier: Apache-2.0
"""Which regions a consumer maps, and when it lets go of them. Wire §7.1, §10.1.1, §15.1, §15.2, §15.12, §15.14,
§15.18, §15.21, §15.21a.5, §15.22; Driver Model §2.3, §9.

The other side is `WireProducer`, which is honest but for the one thing that a test wants otherwise. /proc/self/maps
tells what is mapped. The consumer believes in a long announce period unless a test is about staleness, so that a slow
machine makes nothing stale; the peer announces often.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Client, Consumer, DropReason, State, StateChange
from tensorpool.wire import Message
from tensorpool.wire.control import ClockDomain, ConsumerConfig, QosConsumer, ShmPoolAnnounce
from tests.shm.by_hand import mapped_files
from tests.support.consuming import deliver, drain, wait_waiting
from tests.support.processes import private_directory, wait_until
from tests.support.regions import RING, Regions
from tests.support.wire_producer import WireProducer, altered

PERIOD_MS = 1000  # in the consumer's configuration: fresh is what is younger than 3 s
SHORT_PERIOD_MS = 250  # for what has to become stale: fresh for 0.75 s, alive for 1 s
POOL = 7

type Connect = Callable[..., Client]


@pytest.fixture
def connected(shared_media_driver: aeron.MediaDriver, peer: WireProducer) -> Iterator[Connect]:
    """Clients of the peer, closed at the end."""
    clients: list[Client] = []

    def connect(announce_period_ms: int = PERIOD_MS, **more: Any) -> Client:
        settings = peer.settings | {"policies.announce_period_ms": announce_period_ms} | more
        clients.append(tp.connect(shared_media_driver.aeron_dir, overrides=settings))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def consumer(connected: Connect, peer: WireProducer, states: list[StateChange]) -> Consumer:
    consumer = connected().consumer(peer.stream_id, on_state=states.append)
    deliver(peer, consumer)
    return consumer


def tree(folder: Path) -> dict[Path, tuple[int, int]]:
    """What changes when a process creates, removes or truncates a file."""
    stats = {path: path.stat() for path in (folder, *folder.rglob("*"))}
    return {path: (it.st_ino, it.st_mtime_ns if path.is_dir() else it.st_size) for path, it in stats.items()}


def assert_refuses(peer: WireProducer, consumer: Consumer, regions: Regions, said: Message | bytes) -> None:
    """Announced like this, the regions are not mapped; announced honestly, they are."""
    peer.announces = False
    peer.send(said)
    peer.fence(consumer)
    assert not mapped_files(regions.folder)
    assert consumer.epoch != regions.epoch
    peer.use(regions)
    peer.announces = True
    assert deliver(peer, consumer)[0] == regions.epoch


# --- what is mapped


@pytest.mark.spec("WIRE-15.21-05", "WIRE-15.21-06", "DRV-2.3-02", "WIRE-10.1.1-10")
def test_the_files_of_the_newest_epoch_are_mapped_and_no_others(peer: WireProducer, consumer: Consumer) -> None:
    """After the attach those of its response, after an announce of a higher epoch those of the announce."""
    for epoch in (peer.epoch, peer.epoch + 1, peer.epoch + 1000):
        regions = peer.regions if epoch == peer.epoch else peer.new_epoch(epoch)
        assert deliver(peer, consumer)[0] == regions.epoch
        assert set(mapped_files(peer.folder)) == {str(path) for path in regions.paths.values()}
        assert consumer.epoch == regions.epoch
        assert consumer.state is State.ACTIVE


@pytest.mark.spec("DRV-2.3-01", "WIRE-15.14-02")
def test_a_consumer_maps_for_reading_and_changes_nothing_in_the_tree(peer: WireProducer, consumer: Consumer) -> None:
    """No directory was touched since before it came, no file has another size, and no mapping allows writing."""

    peer.new_epoch()
    before = tree(peer.folder)
    deliver(peer, consumer)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        permissions = {line.split()[1] for line in maps if str(peer.folder) in line}
    assert permissions == {"r--s"}
    consumer.close()
    assert tree(peer.folder) == before


# --- announces


def _announce(peer: WireProducer, regions: Regions, **changed: Any) -> ShmPoolAnnounce:
    message = peer.honest(ShmPoolAnnounce, **regions.layout | changed)
    assert isinstance(message, ShmPoolAnnounce)
    return message


def _with_pools(peer: WireProducer, regions: Regions, *order: int) -> ShmPoolAnnounce:
    pools = regions.layout["payload_pools"]
    return _announce(peer, regions, payload_pools=tuple(pools[index] for index in order))


UNACCEPTABLE: dict[str, Callable[[WireProducer, Regions], Message | bytes]] = {
    "slots of 255 bytes": lambda peer, it: _announce(peer, it, header_slot_bytes=255),
    "slots of 512 bytes": lambda peer, it: _announce(peer, it, header_slot_bytes=512),
    "clock domain 0": lambda peer, it: altered(_announce(peer, it), 8 + 24, b"\x00"),
    "clock domain 3": lambda peer, it: altered(_announce(peer, it), 8 + 24, b"\x03"),
    "layout version 2": lambda peer, it: _announce(peer, it, layout_version=2),
    "three slots": lambda peer, it: _announce(peer, it, header_nslots=3),
    "no slots": lambda peer, it: _announce(peer, it, header_nslots=0),
    "no pools": lambda peer, it: _with_pools(peer, it),
    "a pool twice": lambda peer, it: _with_pools(peer, it, 0, 1, 1),
    "a pool with other slots": lambda peer, it: _announce(peer, it, **it.layout_with(POOL, pool_nslots=16)),
    "a stride of 4160": lambda peer, it: _announce(peer, it, **it.layout_with(POOL, stride_bytes=4160)),
    "a stride of 32": lambda peer, it: _announce(peer, it, **it.layout_with(POOL, stride_bytes=32)),
    "schema version 2": lambda peer, it: altered(_announce(peer, it), 6, b"\x02\x00"),
    "another schema": lambda peer, it: altered(_announce(peer, it), 4, b"\x85\x03"),
    "a longer block": lambda peer, it: altered(_announce(peer, it), 0, b"\x24\x00"),
    "a stamp from the future": lambda peer, it: _announce(
        peer, it, announce_timestamp_ns=time.monotonic_ns() + 60_000_000_000
    ),
    "another stream": lambda peer, it: _announce(peer, it, stream_id=peer.stream_id + 1_000_000),
}


@pytest.mark.spec("WIRE-10.1.1-05", "WIRE-10.1.1-08", "WIRE-15.22-11")
@pytest.mark.parametrize("lie", list(UNACCEPTABLE.values()), ids=list(UNACCEPTABLE))
def test_an_unacceptable_announce_maps_nothing(
    peer: WireProducer, consumer: Consumer, lie: Callable[[WireProducer, Regions], Message | bytes]
) -> None:
    """Though the files are faultless: the same announce without the lie is mapped."""
    regions = peer.make_regions(peer.epoch + 1)
    assert_refuses(peer, consumer, regions, lie(peer, regions))


@pytest.mark.spec("WIRE-10.1.1-09", "WIRE-10.1.1-11")
def test_an_announce_older_than_the_window_is_ignored(connected: Connect, peer: WireProducer) -> None:
    """Stamped after the consumer joined, but more than three announce periods before it came."""
    consumer = connected(SHORT_PERIOD_MS).consumer(peer.stream_id)
    deliver(peer, consumer)
    stamp_ns = peer.now_ns()
    regions = peer.make_regions(peer.epoch + 1)
    stale = _announce(peer, regions, announce_timestamp_ns=stamp_ns)
    wait_until(lambda: peer.now_ns() - stamp_ns > 4 * SHORT_PERIOD_MS * 1_000_000, "the stamp is old")
    assert_refuses(peer, consumer, regions, stale)


@pytest.mark.spec("WIRE-10.1.1-09", "WIRE-10.1.1-12")
def test_a_monotonic_announce_from_before_the_join_is_ignored(connected: Connect, peer: WireProducer) -> None:
    """Fresh, but stamped before the consumer's image of the stream was there: a replay of the log."""
    regions = peer.make_regions(peer.epoch + 1)
    replayed = _announce(peer, regions)
    consumer = connected(60_000).consumer(peer.stream_id)
    deliver(peer, consumer)
    assert_refuses(peer, consumer, regions, replayed)


@pytest.mark.spec("WIRE-10.1.1-13")
def test_a_realtime_announce_from_before_the_join_counts_while_it_is_fresh(
    connected: Connect, peer: WireProducer
) -> None:
    """The join-time rule is for monotonic stamps alone."""
    peer.clock_domain = ClockDomain.REALTIME_SYNCED
    regions = peer.make_regions(peer.epoch + 1)
    early = _announce(peer, regions)
    consumer = connected(60_000).consumer(peer.stream_id)
    deliver(peer, consumer)
    peer.announces = False
    peer.send(early)
    peer.use(regions)
    assert deliver(peer, consumer)[0] == regions.epoch


@pytest.mark.spec("WIRE-10.1.1-14", "WIRE-10.1.1-09")
def test_a_realtime_announce_older_than_the_window_is_ignored(connected: Connect, peer: WireProducer) -> None:
    """By the wall clock; a monotonic stamp would be older still by decades."""
    peer.clock_domain = ClockDomain.REALTIME_SYNCED
    consumer = connected().consumer(peer.stream_id)
    deliver(peer, consumer)
    regions = peer.make_regions(peer.epoch + 1)
    stale = _announce(peer, regions, announce_timestamp_ns=time.time_ns() - 4 * PERIOD_MS * 1_000_000)
    assert_refuses(peer, consumer, regions, stale)


# --- epochs


@pytest.mark.spec("WIRE-10.1.1-10")
def test_a_lower_epoch_does_not_displace_a_live_one(peer: WireProducer, consumer: Consumer) -> None:
    """Fresh and faultless, yet ignored, also as long as both are announced."""
    lower = peer.make_regions(peer.epoch - 1)
    for _ in range(5):
        peer.send(_announce(peer, lower))
    peer.fence(consumer)
    assert consumer.epoch == peer.epoch
    assert not mapped_files(lower.folder)
    assert deliver(peer, consumer)[0] == peer.epoch


@pytest.mark.spec("WIRE-15.2-04", "WIRE-7.1-08")
@pytest.mark.parametrize(("high", "low"), [(7, 6), (2**64 - 2, 1)], ids=["one back", "wrapped"])
def test_a_lower_epoch_is_mapped_once_the_higher_one_is_dead(
    connected: Connect, peer: WireProducer, high: int, low: int
) -> None:
    """A driver that lost its history, or an epoch that wrapped: what was mapped is let go, what is announced mapped."""
    peer.use(peer.make_regions(high))
    consumer = connected(SHORT_PERIOD_MS).consumer(peer.stream_id)
    assert deliver(peer, consumer)[0] == high
    before = peer.regions
    peer.use(peer.make_regions(low))
    assert deliver(peer, consumer)[0] == low
    assert not mapped_files(before.folder)


@pytest.mark.spec("WIRE-15.21-07", "WIRE-15.18-03", "WIRE-15.18-04")
def test_frames_in_flight_are_dropped_at_an_epoch_change(peer: WireProducer, consumer: Consumer) -> None:
    """Described before, not yet polled, still committed in their slots: none of them is delivered, all are counted."""
    lost, gaps = consumer.stats.lost, consumer.stats.drops_gap
    for _ in range(3):
        peer.publish(np.zeros(8, np.uint8))
    old, new = peer.regions, peer.new_epoch()
    wait_until(lambda: consumer.epoch == new.epoch, "the new epoch is mapped")
    seq = peer.publish(np.ones(8, np.uint8))
    frames: list[Any] = []
    wait_until(lambda: frames.append(consumer.poll(0.02)) or frames[-1] is not None, "a frame is delivered")
    assert (frames[-1].epoch, frames[-1].seq) == (new.epoch, seq)
    assert consumer.stats.lost == lost + 3
    assert consumer.stats.drops[DropReason.EPOCH_ENDED] == 3
    assert consumer.stats.drops_gap == gaps
    assert not mapped_files(old.folder)


@pytest.mark.spec("WIRE-15.21-09", "WIRE-15.21-10", "WIRE-10.2.1-07")
def test_after_an_epoch_change_nothing_is_accepted_until_the_new_epoch_is_mapped(
    peer: WireProducer, consumer: Consumer
) -> None:
    """Neither frames of the old epoch, whose files are still there, nor of the new one, whose files are not."""
    old = peer.regions
    new = peer.make_regions(peer.epoch + 1, exists=False)
    received = consumer.stats.received
    peer.announces = False
    peer.breathes = False
    peer.send(_announce(peer, new))
    peer.fence(consumer)
    for epoch in (old.epoch, new.epoch):
        for _ in range(2):
            peer.publish(np.zeros(8, np.uint8), descriptor={"epoch": epoch})
    assert drain(consumer) == []
    assert consumer.stats.received == received
    assert not consumer.is_active
    peer.use(new.create(peer.now_ns()))
    peer.breathes = peer.announces = True
    assert deliver(peer, consumer)[0] == new.epoch


@pytest.mark.spec("WIRE-15.18-03", "WIRE-15.18-04", "WIRE-15.2-03")
@pytest.mark.parametrize("first_seq", [0, 40])
def test_seq_tracking_starts_anew_with_an_epoch(peer: WireProducer, consumer: Consumer, first_seq: int) -> None:
    """Wherever the new epoch begins, no gap is counted across it, and QoS first says that nothing was seen."""
    for _ in range(5):
        peer.publish(np.zeros(8, np.uint8))
    wait_until(lambda: drain(consumer), "the frames are there")
    gaps, since = consumer.stats.drops_gap, peer.now
    regions = peer.new_epoch()
    peer.wait_for(QosConsumer, since, consumer_id=consumer.consumer_id, epoch=regions.epoch, last_seq_seen=0)
    peer.publish(np.zeros(8, np.uint8), seq=first_seq)
    peer.publish(np.zeros(8, np.uint8), seq=first_seq + 1)
    assert [*drain(consumer)] == [first_seq, first_seq + 1]
    assert consumer.stats.drops_gap == gaps
    assert consumer.stats.last_seq_seen == first_seq + 1


@pytest.mark.spec("WIRE-15.2-05", "WIRE-15.21-08")
def test_a_seq_that_goes_back_is_a_reason_to_remap(
    peer: WireProducer, consumer: Consumer, states: list[StateChange]
) -> None:
    """The frame is committed and fits its slot, yet it is dropped; the stream goes on with a mapping made anew."""
    _, seq = deliver(peer, consumer)
    gaps = consumer.stats.drops_gap
    seq = peer.publish(np.zeros(8, np.uint8), seq=seq + 5)
    assert drain(consumer) == [seq]
    epochs, since = consumer.stats.epochs, len(states)
    lower = peer.publish(np.zeros(8, np.uint8), seq=seq - 3)
    assert drain(consumer) == []
    assert deliver(peer, consumer)[1] > seq
    assert lower < seq
    assert [change.state for change in states[since:]] == [State.WAITING, State.ACTIVE]
    assert consumer.stats.epochs == epochs
    assert consumer.stats.drops_gap == gaps + 4


# --- superblocks


SUPERBLOCK_LIES: list[tuple[int, dict[str, int]]] = [
    (RING, {"magic": 0x54504F4C53484D31}),
    (RING, {"layout_version": 2}),
    (RING, {"epoch": 5}),
    (RING, {"stream_id": 5}),
    (RING, {"region_type": 2}),
    (RING, {"pool_id": 7}),
    (RING, {"nslots": 16}),
    (RING, {"slot_bytes": 128}),
    (POOL, {"magic": 0}),
    (POOL, {"layout_version": 2}),
    (POOL, {"epoch": 5}),
    (POOL, {"stream_id": 5}),
    (POOL, {"region_type": 1}),
    (POOL, {"pool_id": 1}),
    (POOL, {"nslots": 4}),
    (POOL, {"stride_bytes": 8192}),
]


@pytest.mark.spec("WIRE-15.1-07", "WIRE-15.1-10")
@pytest.mark.parametrize(
    ("region", "lie"),
    [*SUPERBLOCK_LIES, (RING, {"activity_timestamp_ns": 1}), (POOL, {"activity_timestamp_ns": 1})],
    ids=lambda it: "-".join(it) if isinstance(it, dict) else "pool" if it else "ring",
)
def test_a_superblock_that_differs_from_the_announce_is_not_mapped(
    peer: WireProducer, consumer: Consumer, region: int, lie: dict[str, int]
) -> None:
    """The stream waits, with nothing mapped, and resumes when an announce finds the superblock as it should be."""
    regions = peer.make_regions(peer.epoch + 1)
    regions.set_superblock(region, **lie)
    peer.breathes = False
    peer.use(regions)
    wait_waiting(consumer)
    since = peer.now
    wait_until(lambda: len(peer.received(ShmPoolAnnounce, since)) > 2, "the epoch is announced again")
    peer.announces = False
    peer.fence(consumer)
    assert not consumer.is_active
    assert not mapped_files(regions.folder)
    regions.restore_superblock(region, peer.now_ns())
    peer.breathes = peer.announces = True
    assert deliver(peer, consumer)[0] == regions.epoch


@pytest.mark.spec("WIRE-15.1-08", "WIRE-15.1-07", "WIRE-15.21-08")
@pytest.mark.parametrize("region", [RING, POOL], ids=["ring", "pool"])
@pytest.mark.parametrize("field", ["magic", "epoch"])
def test_magic_and_epoch_are_looked_at_again_with_every_announce(
    peer: WireProducer, consumer: Consumer, region: int, field: str
) -> None:
    """Spoilt while mapped, the next announce of the same epoch makes the consumer let go; mended, it maps again."""
    peer.regions.set_superblock(region, **{field: 1})
    peer.say(ShmPoolAnnounce)
    wait_waiting(consumer)
    peer.publish(np.zeros(8, np.uint8))
    assert drain(consumer) == []
    peer.regions.restore_superblock(region, peer.now_ns())
    assert deliver(peer, consumer)[0] == peer.epoch


@pytest.mark.spec("WIRE-15.1-09")
def test_a_pid_tells_nothing_by_itself(peer: WireProducer, consumer: Consumer) -> None:
    """Regions of a process that is not there are mapped, and a new epoch of the same process is still a new epoch."""
    for _ in range(2):
        regions = peer.make_regions(peer.epoch + 1, pid=2**40)
        peer.use(regions)
        assert deliver(peer, consumer)[0] == regions.epoch
        assert consumer.is_active


@pytest.mark.spec("WIRE-15.14-03")
def test_a_pid_that_changes_within_an_epoch_is_a_second_writer(peer: WireProducer, consumer: Consumer) -> None:
    """The consumer lets go and waits for a new epoch, however often the old one is announced and written."""
    peer.regions.set_superblock(RING, pid=os.getpid() + 1)
    wait_waiting(consumer)
    since = peer.now
    wait_until(lambda: len(peer.received(ShmPoolAnnounce, since)) > 3, "the epoch is announced again")
    peer.publish(np.zeros(8, np.uint8))
    peer.fence(consumer)
    assert drain(consumer) == []
    assert not consumer.is_active
    regions = peer.new_epoch()
    assert deliver(peer, consumer)[0] == regions.epoch


@pytest.mark.spec("WIRE-7.1-06", "WIRE-15.1-10", "WIRE-15.14-01", "WIRE-15.21-10")
def test_regions_that_no_driver_refreshes_are_unmapped(connected: Connect, peer: WireProducer) -> None:
    """Announced all the while: a stale activity stamp alone ends the mapping; what comes until it is fresh is lost."""
    consumer = connected(SHORT_PERIOD_MS).consumer(peer.stream_id)
    deliver(peer, consumer)
    lost = consumer.stats.lost
    peer.breathes = False
    wait_waiting(consumer)
    for _ in range(3):
        peer.publish(np.zeros(8, np.uint8))
    assert drain(consumer) == []
    since = peer.now
    wait_until(lambda: len(peer.received(ShmPoolAnnounce, since)) > 3, "the epoch is announced again")
    assert not consumer.is_active
    peer.breathes = True
    wait_until(lambda: consumer.is_active, "the consumer has mapped again")
    seq = peer.publish(np.zeros(8, np.uint8))
    assert drain(consumer) == [seq]
    assert consumer.stats.lost == lost + 3


def _epoch_without_files(peer: WireProducer, consumer: Consumer) -> None:
    peer.announces = False
    peer.send(_announce(peer, peer.make_regions(peer.epoch + 1, exists=False)))


def _spoilt_magic(peer: WireProducer, consumer: Consumer) -> None:
    peer.regions.set_superblock(POOL, magic=1)


def _another_pid(peer: WireProducer, consumer: Consumer) -> None:
    peer.regions.set_superblock(RING, pid=os.getpid() + 1)


def _no_refresh(peer: WireProducer, consumer: Consumer) -> None:
    peer.breathes = False


def _no_shared_memory(peer: WireProducer, consumer: Consumer) -> None:
    peer.say(ConsumerConfig, consumer_id=consumer.consumer_id, use_shm=False, payload_fallback_uri="bridge://x")


def _revoked(peer: WireProducer, consumer: Consumer) -> None:
    peer.answers = False
    peer.revoke(peer.grant_of(consumer.consumer_id))


REASONS_TO_UNMAP = {
    "an epoch without files": _epoch_without_files,
    "a spoilt superblock": _spoilt_magic,
    "a second writer": _another_pid,
    "stale regions": _no_refresh,
    "no shared memory": _no_shared_memory,
    "a revoked lease": _revoked,
}


@pytest.mark.spec("WIRE-7.1-06", "WIRE-15.14-03", "WIRE-15.21-07", "WIRE-15.21-08", "DRV-4.7-06")
@pytest.mark.parametrize("reason", list(REASONS_TO_UNMAP.values()), ids=list(REASONS_TO_UNMAP))
def test_what_is_let_go_is_unmapped(
    connected: Connect, peer: WireProducer, reason: Callable[[WireProducer, Consumer], None]
) -> None:
    """Not merely unused: with no view of it alive, nothing of the stream is in the process's memory map any more."""
    consumer = connected(SHORT_PERIOD_MS).consumer(peer.stream_id)
    deliver(peer, consumer)
    assert mapped_files(peer.folder)
    reason(peer, consumer)
    wait_waiting(consumer)
    wait_until(lambda: consumer.poll() is None and not mapped_files(peer.folder), "nothing is mapped")


# --- files


def _outside(peer: WireProducer, regions: Regions, folder: Path) -> Message:
    regions.paths[POOL].rename(folder / "7.pool")
    return _announce(peer, regions, **regions.layout_with(POOL, region_uri=f"shm:file?path={folder}/7.pool"))


def _linked(peer: WireProducer, regions: Regions, folder: Path) -> Message:
    regions.replace_with_link(POOL, folder / "7.pool")
    return _announce(peer, regions)


def _fifo(peer: WireProducer, regions: Regions, folder: Path) -> Message:
    regions.replace_with_fifo(POOL)
    return _announce(peer, regions)


def _directory(peer: WireProducer, regions: Regions, folder: Path) -> Message:
    regions.replace_with_directory(POOL)
    return _announce(peer, regions)


def _short(peer: WireProducer, regions: Regions, folder: Path) -> Message:
    regions.shorten(POOL)
    return _announce(peer, regions)


def _uri(text: str) -> Callable[[WireProducer, Regions, Path], Message]:
    def announce(peer: WireProducer, regions: Regions, folder: Path) -> Message:
        path = regions.paths[POOL]
        uri = text.format(path=path, name=path.name, parent=path.parent.name, above=path.parent.parent)
        return _announce(peer, regions, **regions.layout_with(POOL, region_uri=uri))

    return announce


BAD_FILES: dict[str, Callable[[WireProducer, Regions, Path], Message]] = {
    "outside": _outside,
    "a link to the outside": _linked,
    "a fifo": _fifo,
    "a directory": _directory,
    "a byte short": _short,
    "not there": _uri("shm:file?path={path}x"),
    "unknown scheme": _uri("shm:memfd?path={path}"),
    "no scheme": _uri("{path}"),
    "unknown parameter": _uri("shm:file?path={path}|mode=rw"),
    "relative": _uri("shm:file?path={parent}/{name}"),
    "out of the base by dots": _uri("shm:file?path={above}/../{parent}/{name}"),
    "huge pages that are none": _uri("shm:file?path={path}|require_hugepages=true"),
    "empty": _uri(""),
}


@pytest.mark.spec("DRV-9-05", "WIRE-15.22-15", "WIRE-15.12-01")
@pytest.mark.parametrize("lie", list(BAD_FILES.values()), ids=list(BAD_FILES))
def test_files_that_may_not_be_mapped_are_not_and_the_consumer_says_why(
    peer: WireProducer,
    consumer: Consumer,
    states: list[StateChange],
    lie: Callable[[WireProducer, Regions, Path], Message],
) -> None:
    """One bad pool and no region of the epoch is mapped; the consumer waits and names what was wrong."""
    regions = peer.make_regions(peer.epoch + 1)
    with private_directory() as folder:
        peer.announces = False
        peer.send(lie(peer, regions, folder))
        peer.fence(consumer)
        wait_waiting(consumer)
        assert not mapped_files(folder)
        assert not mapped_files(regions.folder)
    assert states[-1].state is State.WAITING
    assert any(word in states[-1].reason for word in ("7.pool", "scheme", "path")), states[-1].reason
    peer.announces = True
    peer.new_epoch(regions.epoch + 1)
    assert deliver(peer, consumer)[0] == peer.epoch


# --- fallback


@pytest.mark.spec("WIRE-15.12-02", "WIRE-10.1.3-03", "WIRE-15.12-01")
@pytest.mark.parametrize("uri", ["aeron:udp?endpoint=localhost:40123", "bridge://lab-7"])
def test_without_shared_memory_the_fallback_uri_is_used(peer: WireProducer, consumer: Consumer, uri: str) -> None:
    """A ConsumerConfig that forbids shared memory ends the mapping and hands the URI to the application."""
    peer.say(ConsumerConfig, consumer_id=consumer.consumer_id, use_shm=False, payload_fallback_uri=uri)
    wait_until(lambda: consumer.poll() is None and consumer.state is State.FALLBACK, "the consumer falls back")
    assert consumer.fallback_uri == uri
    peer.publish(np.zeros(8, np.uint8))
    assert drain(consumer) == []
    peer.say(ConsumerConfig, consumer_id=consumer.consumer_id)
    assert deliver(peer, consumer)[0] == peer.epoch
    assert consumer.fallback_uri is None


@pytest.mark.spec("WIRE-10.1.3-06")
@pytest.mark.parametrize("uri", ["foo://x", "http://host/x", "bridge", "aeronautics://x", ""])
def test_a_fallback_of_an_undefined_scheme_is_unsupported(
    peer: WireProducer, consumer: Consumer, states: list[StateChange], uri: str
) -> None:
    """Nothing is delivered and nothing is offered to the application in its place; the consumer says why."""
    peer.say(ConsumerConfig, consumer_id=consumer.consumer_id, use_shm=False, payload_fallback_uri=uri)
    wait_waiting(consumer)
    peer.publish(np.zeros(8, np.uint8))
    assert drain(consumer) == []
    assert consumer.fallback_uri is None
    assert uri in states[-1].reason
