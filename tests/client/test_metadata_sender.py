# SPDX-License-Identifier: Apache-2.0
"""What a producer sends on the metadata stream, in which order and how often."""

from __future__ import annotations

import pytest

from tensorpool.client.metadata import (
    CHUNK_MAX,
    CHUNK_PACE_NS,
    MAX_WAITING,
    REPEATED,
    MetadataCache,
    MetadataSender,
    to_message,
)
from tensorpool.client.wall_clock import KEY, ClockPair, EpochClock, clock_in, with_clock
from tensorpool.wire import Message, decode
from tensorpool.wire.control import DataSourceAnnounce, DataSourceMeta, MetaBlobAnnounce, MetaBlobComplete

STREAM = 10_000
CLOCK = EpochClock(ClockPair(monotonic_ns=5, utc_ns=1_700_000_000_000_000_000))


def source(epoch: int, meta_version: int = 0) -> DataSourceAnnounce:
    return DataSourceAnnounce(
        stream_id=STREAM, producer_id=7, epoch=epoch, meta_version=meta_version, name="camera", summary=""
    )


def meta(version: int) -> DataSourceMeta:
    return to_message(1, version, {"n": version}, (), version)


def flushed(description: MetadataSender, room: int | None = None) -> list[Message]:
    """What goes out now, with room for so many messages."""
    sent: list[Message] = []

    def offer(data: bytes) -> bool:
        if room is not None and len(sent) >= room:
            return False
        sent.append(decode(data))
        return True

    now_ns = 0
    while (already := len(sent)) + description.flush(offer, now_ns) > already:
        now_ns += CHUNK_PACE_NS
    return sent


def said(messages: list[Message]) -> list[tuple[str, int]]:
    """Announces by their epoch, metadata by their version."""
    return [
        ("epoch", it.epoch) if isinstance(it, DataSourceAnnounce) else ("version", it.meta_version)
        for it in messages
        if isinstance(it, DataSourceAnnounce | DataSourceMeta)
    ]


@pytest.mark.spec("WIRE-10.3.2-01")
def test_every_version_is_sent_in_order_each_after_the_epoch_that_it_belongs_to() -> None:
    """K4: also where several are set before anything can be sent, and more of them than are repeated."""
    description = MetadataSender()
    description.begin(source(5), CLOCK, 9)
    assert said(flushed(description)) == [("epoch", 5), ("version", 0)]
    versions = range(1, 3 * REPEATED)
    for version in versions:
        description.set(meta(version), "")
    sent = flushed(description)
    assert said(sent) == [it for version in versions for it in (("epoch", 5), ("version", version))]
    assert {it.stream_id for it in sent if isinstance(it, DataSourceMeta)} == {STREAM}
    assert [it.meta_version for it in sent if isinstance(it, DataSourceAnnounce)] == list(versions)


def test_the_last_versions_are_repeated() -> None:
    """Oldest first, so that the last one that a listener hears is the current one."""
    description = MetadataSender()
    description.begin(source(5), CLOCK, 9)
    for version in range(1, 10):
        description.set(meta(version), "a summary")
    flushed(description)
    description.repeat()
    sent = flushed(description)
    assert said(sent) == [("epoch", 5), *(("version", version) for version in range(10 - REPEATED, 10))]
    assert isinstance(sent[0], DataSourceAnnounce)
    assert (sent[0].meta_version, sent[0].summary) == (9, "a summary")


def test_what_waits_for_room_is_not_repeated_and_keeps_its_place() -> None:
    """A log without room for a while loses nothing and brings nothing twice."""
    description = MetadataSender()
    description.begin(source(5), CLOCK, 9)
    for version in (1, 2):
        description.set(meta(version), "")
    assert said(flushed(description, 3)) == [("epoch", 5), ("version", 0), ("epoch", 5)]
    description.repeat()
    assert said(flushed(description)) == [("version", 1), ("epoch", 5), ("version", 2)]


def test_a_new_epoch_gets_all_that_is_known_anew() -> None:
    """The versions and the tables, after an announce that names it; what still waited goes before, in its own epoch."""
    description = MetadataSender()
    description.begin(source(5), CLOCK, 9)
    description.set(meta(1), "")
    description.add_blob(1, 3, b"table", True)
    flushed(description)
    description.set(meta(2), "")
    description.begin(source(6, meta_version=2), CLOCK, 9)
    sent = flushed(description)
    assert said(sent) == [("epoch", 5), ("version", 2), ("epoch", 6), ("version", 1), ("version", 2), ("epoch", 6)]
    assert isinstance(sent[6], MetaBlobAnnounce)
    assert isinstance(sent[-1], MetaBlobComplete)


def test_metadata_that_was_set_without_an_epoch_is_sent_with_the_next_one() -> None:
    """While the lease is lost there is nothing that frames could mean."""
    description = MetadataSender()
    description.set(meta(1), "")
    description.repeat()
    assert flushed(description) == []
    description.begin(source(5, meta_version=1), CLOCK, 9)
    assert said(flushed(description)) == [("epoch", 5), ("version", 1)]


def test_a_newcomer_during_a_table_gets_it_whole_afterwards() -> None:
    """One distribution at a time, however many consumers come."""
    description = MetadataSender()
    description.begin(source(5), CLOCK, 9)
    flushed(description)
    description.add_blob(1, 3, bytes(2 * CHUNK_MAX), False)
    assert len(flushed(description, 3)) == 3
    for _ in range(5):
        description.welcome()
    sent = flushed(description)
    assert sum(isinstance(it, MetaBlobAnnounce) for it in sent) == 1
    assert sum(isinstance(it, MetaBlobComplete) for it in sent) == 2


def test_nothing_grows_without_bound() -> None:
    """Without room in the log the oldest message is given up."""
    description = MetadataSender()
    description.begin(source(5), CLOCK, 9)
    for version in range(1, MAX_WAITING + 1):
        description.set(meta(version), "")
    assert description.given_up == MAX_WAITING + 2
    assert len(flushed(description)) == MAX_WAITING


def test_chunks_are_paced_by_their_length() -> None:
    """A whole one is followed by the next after CHUNK_PACE_NS; what has no data holds up nothing."""
    description = MetadataSender()
    description.begin(source(5), CLOCK, 9)
    flushed(description)
    description.add_blob(1, 3, bytes(CHUNK_MAX + CHUNK_MAX // 2), False)
    counts = {}
    for now_ns in (0, CHUNK_PACE_NS - 1, CHUNK_PACE_NS, CHUNK_PACE_NS * 3 // 2 - 1, CHUNK_PACE_NS * 3 // 2):
        now_ns += CHUNK_PACE_NS  # the first one is due at any time
        is_due = description.is_due(now_ns)
        counts[now_ns - CHUNK_PACE_NS] = (is_due, description.flush(lambda data: True, now_ns))
    assert list(counts.values()) == [(True, 3), (False, 0), (True, 1), (False, 0), (True, 1)]
    assert not description.is_due(1 << 62)


def test_a_message_that_cannot_be_sent_is_given_up_and_the_others_go_on() -> None:
    """A version that is too long for the log does not block the next one."""
    description = MetadataSender()
    description.begin(source(5), CLOCK, 9)
    description.set(meta(1), "")
    description.set(meta(2), "")
    sent: list[Message] = []

    def offer(data: bytes) -> bool:
        message = decode(data)
        if isinstance(message, DataSourceMeta) and message.meta_version == 1:
            raise ValueError("a message of 200000 bytes exceeds the limit")
        sent.append(message)
        return True

    description.flush(offer, 0)
    assert said(sent) == [("epoch", 5), ("version", 0), ("epoch", 5), ("epoch", 5), ("version", 2)]
    assert description.given_up == 1


def test_what_is_sent_is_what_a_consumer_keeps() -> None:
    """Both ends together: four quick versions are all known, and another producer's first is its own."""
    cache, description = MetadataCache(), MetadataSender()
    cache.on_epoch(5)
    description.begin(source(5), CLOCK, 9)
    for version in range(1, 5):
        description.set(meta(version), "")
    for message in flushed(description):
        cache.on_message(message, 77)
    assert [known.attributes for it in range(1, 5) if (known := cache.get(it))] == [{"n": it} for it in range(1, 5)]
    another = MetadataSender()
    another.begin(source(6), CLOCK, 9)
    cache.on_epoch(6)
    for message in flushed(another):
        cache.on_message(message, 77)
    assert cache.get(1) is None
    another.set(to_message(1, 1, {"other": 1}, (), 1), "")
    for message in flushed(another):
        cache.on_message(message, 77)
    assert [it and it.attributes for it in (cache.get(1), cache.get(1, 5), cache.get())] == [
        {"other": 1},
        {"n": 1},
        {"other": 1},
    ]


def test_the_clock_travels_with_every_version_and_alone_where_there_is_none() -> None:
    """A consumer knows the clock of each epoch; a replay replaces the pair that the recorded message had."""
    cache, description = MetadataCache(), MetadataSender()
    description.begin(source(5), CLOCK, 9)
    for message in flushed(description):
        cache.on_message(message, 77)
    assert cache.clock(5) == CLOCK
    assert cache.get() is None, "version 0 means nothing"
    description.set(meta(1), "")
    description.begin(source(6, meta_version=1), EpochClock(None), 9)
    for message in flushed(description):
        cache.on_message(message, 77)
    assert (cache.clock(5), cache.clock(6), cache.clock(7)) == (CLOCK, EpochClock(None), None)
    assert cache.get(1, 6) is not None
    description.set(with_clock(meta(2), CLOCK), "")
    *_, last = flushed(description)
    assert isinstance(last, DataSourceMeta)
    assert [attribute.key for attribute in last.attributes] == ["n", KEY]
    assert clock_in(last) == EpochClock(None)
    description.set_clock(CLOCK)
    for message in flushed(description):
        cache.on_message(message, 77)
    assert cache.clock(6) == CLOCK
