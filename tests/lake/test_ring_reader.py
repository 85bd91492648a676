# SPDX-License-Identifier: Apache-2.0
"""Ranges of a ring as Arrow batches, and what a worker keeps of it; a real ring, no Spark."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from tensorpool._core import RingReader
from tensorpool.client import Client
from tensorpool.client.ring_watch import RingWatch
from tensorpool.client.wall_clock import ClockPair, EpochClock
from tensorpool.errors import TensorPoolError
from tensorpool.lake import ring_reader
from tensorpool.lake.offsets import SeqRange
from tensorpool.lake.payloads import over_payloads
from tensorpool.lake.ring_reader import (
    FRAME_SCHEMA,
    Builder,
    FrameReader,
    RingPart,
    WrongHost,
    fetch_payloads,
    this_host,
)
from tensorpool.wire.region_uri import RegionUri
from tests.support.deployment import pattern, publish


class Followed:
    """A stream with its producer, and parts of it as a planner makes them."""

    def __init__(self, client: Client, stream_id: int, frames: int) -> None:
        self.producer = publish(client, stream_id, frames)
        self.watch: RingWatch = client.watch(stream_id)
        self.bases = tuple(client.config.shm.allowed_base_dirs)

    def part(self, lo: int, hi: int, lost_before: int = 0) -> RingPart:
        newest = self.watch.epochs[-1]
        piece = SeqRange(newest.regions.stream_id, newest.epoch, lo, hi)
        return RingPart(piece, newest.regions, self.bases, this_host(), lost_before)


@pytest.fixture
def followed(client: Client, stream: Callable[..., int]) -> Iterator[Callable[..., Followed]]:
    yield lambda frames, profile="tiny": Followed(client, stream(profile), frames)
    assert ring_reader.let_go(0) == 0


def read_all(part: RingPart, **options: bool) -> tuple[pa.Table, FrameReader]:
    reader = FrameReader(part, **options)
    return pa.Table.from_batches(reader.batches(), FRAME_SCHEMA), reader


def test_a_range_comes_whole_and_in_order(followed: Callable[..., Followed]) -> None:
    table, reader = read_all(followed(8).part(2, 7))
    assert table.column("seq").to_pylist() == [2, 3, 4, 5, 6]
    assert table.column("payload").to_pylist() == [pattern(seq).tobytes() for seq in range(2, 7)]
    assert table.column("dropped_before").to_pylist() == [0] * 5
    assert reader.gaps == []


def test_rows_say_in_utc_when_a_frame_was_taken(followed: Callable[..., Followed]) -> None:
    """By the pair that the planner has of the epoch; without one by this host's clocks, where the frame is fresh."""
    stream = followed(4)
    pair = ClockPair(monotonic_ns=7, utc_ns=1_600_000_000_123_456_789)
    table, _ = read_all(msgspec.structs.replace(stream.part(0, 4), clock=EpochClock(pair)))
    stamps = table.column("timestamp_ns").to_pylist()
    assert table.column("time").cast(pa.int64()).to_pylist() == [pair.utc_ns_of(stamp) // 1000 for stamp in stamps]
    local, _ = read_all(stream.part(0, 4))
    times = local.column("time").to_pylist()
    assert all(abs(datetime.now(UTC) - at) < timedelta(minutes=2) for at in times)
    none, _ = read_all(msgspec.structs.replace(stream.part(0, 4), clock=EpochClock(None)))
    assert none.column("time").null_count == 4


def test_missing_frames_are_counted_in_the_next_row(followed: Callable[..., Followed]) -> None:
    """However many there are: they are not read one by one."""
    stream = followed(8)
    stream.producer.publish(pattern(0), seq=10**12)
    table, reader = read_all(stream.part(3, 10**12 + 1, lost_before=5))
    assert table.column("seq").to_pylist() == [3, 4, 5, 6, 7, 10**12]
    assert table.column("dropped_before").to_pylist() == [5, 0, 0, 0, 0, 10**12 - 8]
    assert sum(gap.hi - gap.lo for gap in reader.gaps) == 10**12 - 8


def test_overwritten_frames_are_one_gap(followed: Callable[..., Followed]) -> None:
    table, reader = read_all(followed(30).part(3, 30))
    assert table.column("seq").to_pylist() == list(range(22, 30))
    assert table.column("dropped_before").to_pylist() == [19] + [0] * 7
    assert [(gap.lo, gap.hi) for gap in reader.gaps] == [(3, 22)]


def test_an_open_range_ends_where_the_ring_does(followed: Callable[..., Followed]) -> None:
    """A snapshot of a ring that went round since it was planned is what the ring holds now, not nothing."""
    stream = followed(8)
    planned = msgspec.structs.replace(stream.part(0, 8), is_open=True)
    for number in range(8, 30):
        stream.producer.publish(pattern(number))
    table, reader = read_all(planned)
    assert table.column("seq").to_pylist() == list(range(22, 30))
    assert [(gap.lo, gap.hi) for gap in reader.gaps] == [(0, 22)]
    closed, _ = read_all(stream.part(0, 8))
    assert closed.num_rows == 0


class Racing:
    """A ring's reader whose producer is always one frame ahead of who begins with the oldest."""

    def __init__(self, reader: RingReader, publish: Callable[[], object]) -> None:
        self._reader = reader
        self._publish = publish
        self.nslots = reader.nslots

    def newest(self, since: int | None = None) -> int | None:
        newest = self._reader.newest(since)
        self._publish()  # what was the oldest frame is none now
        return newest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


def test_a_reader_that_is_always_too_late_keeps_a_distance(followed: Callable[..., Followed]) -> None:
    """The oldest frame is overwritten whenever the reader looks for it: reading further ahead succeeds."""
    stream = followed(30)
    mapped = stream.watch.epochs[-1].mapped
    numbers = itertools.count(30)
    racing = Racing(mapped.reader, lambda: stream.producer.publish(pattern(next(numbers))))
    epoch = SimpleNamespace(reader=racing, stream_id=mapped.stream_id, epoch=mapped.epoch, clock=None)
    builder = Builder(cast(Any, epoch), 1 << 20)
    lost: list[tuple[int, int]] = []
    assert list(builder.take(0, 30, lambda lo, hi, reason: lost.append((lo, hi)))) == []
    seqs = builder.finish().column("seq").to_pylist()
    assert seqs == list(range(seqs[0], 30))
    assert len(seqs) >= 4, "some of the eight"
    assert sum(hi - lo for lo, hi in lost) == seqs[0]


def test_frames_that_are_not_there_yet_are_a_gap(followed: Callable[..., Followed]) -> None:
    table, reader = read_all(followed(4).part(2, 6))
    assert table.column("seq").to_pylist() == [2, 3]
    assert [(gap.lo, gap.hi) for gap in reader.gaps] == [(4, 6)]


def test_batches_are_cut_by_bytes(client: Client, stream: Callable[..., int]) -> None:
    """A frame larger than a batch is a batch of its own."""
    stream_id = stream("large")
    producer = publish(client, stream_id, 2, 16 << 20)
    watch = client.watch(stream_id)
    epoch = watch.epochs[-1]
    part = RingPart(
        SeqRange(stream_id, epoch.epoch, 0, 2), epoch.regions, tuple(client.config.shm.allowed_base_dirs), this_host()
    )
    batches = list(FrameReader(part).batches())
    assert [batch.num_rows for batch in batches] == [1, 1]
    assert all(len(batch.column("payload")[0].as_buffer()) == 16 << 20 for batch in batches)
    ring_reader.let_go(0)
    producer.close()


@pytest.mark.parametrize("reuses", [False, True])
def test_batches_have_memory_of_their_own_unless_they_share_it(followed: Callable[..., Followed], reuses: bool) -> None:
    """A caller that is done with a batch when it asks for the next one saves the memory."""
    stream = followed(8)
    frame = pattern(0).tobytes()
    seen, kept = [], []
    for batch in FrameReader(stream.part(0, 8), batch_bytes=2 * len(frame), reuses=reuses).batches():
        payload = batch.column("payload")
        kept.append(payload)
        seen += payload.to_pylist()
    assert seen == [pattern(seq).tobytes() for seq in range(8)]
    assert len({payload.buffers()[2].address for payload in kept}) == (1 if reuses else 4)
    if not reuses:
        assert pa.concat_arrays(kept).to_pylist() == seen


def test_a_ring_that_is_gone_is_a_gap_with_a_reason(followed: Callable[..., Followed]) -> None:
    part = followed(8).part(0, 8)
    elsewhere = tuple(uri.replace(f"/{part.range.epoch}/", "/1/") for uri in part.regions.uris)
    gone = msgspec.structs.replace(part, regions=msgspec.structs.replace(part.regions, uris=elsewhere))
    table, reader = read_all(gone)
    assert table.num_rows == 0
    assert [(gap.lo, gap.hi) for gap in reader.gaps] == [(0, 8)]
    assert reader.gaps[0].reason.startswith("the ring is gone")


def test_memory_of_another_host_is_no_gap_but_an_error(followed: Callable[..., Followed]) -> None:
    part = msgspec.structs.replace(followed(8).part(0, 8), host="lab-pc-7 0000-boot")
    with pytest.raises(WrongHost, match=r"on lab-pc-7, and this task runs on .*; run the query on the producer's host"):
        read_all(part)


def test_mappings_are_kept_between_tasks_and_given_up_when_idle(followed: Callable[..., Followed]) -> None:
    stream = followed(8)
    part = stream.part(0, 8)
    first = ring_reader.mapped_epoch(part.regions, part.bases)
    assert ring_reader.mapped_epoch(part.regions, part.bases) is first
    assert ring_reader.let_go(60) == 1
    assert ring_reader.let_go(0) == 0
    assert ring_reader.mapped_epoch(part.regions, part.bases) is not first


def test_an_epoch_that_lost_its_name_is_still_read(followed: Callable[..., Followed]) -> None:
    """A worker that has it mapped reads what the driver has removed since."""
    stream = followed(8)
    part = stream.part(0, 8)
    ring_reader.mapped_epoch(part.regions, part.bases)
    for uri in part.regions.uris:
        os.unlink(RegionUri.parse(uri).path)
    table, reader = read_all(part)
    assert table.num_rows == 8
    assert reader.gaps == []


# --- references


def test_references_lead_to_the_payload(followed: Callable[..., Followed]) -> None:
    stream = followed(8)
    table, _ = read_all(stream.part(0, 8), inline=False)
    row = table.slice(3, 1).to_pylist()[0]
    assert len(row["payload"]) != row["nbytes"]
    assert ring_reader.payload_of(row["payload"], row["nbytes"], row["seq"]) == pattern(3).tobytes()
    frame = ring_reader.referenced(row["payload"], row["seq"])
    assert frame is not None
    np.testing.assert_array_equal(frame.array, pattern(3))
    assert frame.is_intact()
    for number in range(8, 16):
        stream.producer.publish(pattern(number))
    assert not frame.is_intact()
    assert ring_reader.payload_of(row["payload"], row["nbytes"], row["seq"]) is None


def test_a_reference_never_has_the_length_of_its_frame(client: Client, stream: Callable[..., int]) -> None:
    """So that a caller does not confuse them."""
    stream_id = stream("tiny")
    producer = publish(client, stream_id, 1)
    watch = client.watch(stream_id)
    epoch = watch.epochs[-1]
    bases = tuple(client.config.shm.allowed_base_dirs)
    part = RingPart(SeqRange(stream_id, epoch.epoch, 0, 2), epoch.regions, bases, this_host())
    length = len(read_all(part, inline=False)[0].column("payload")[0].as_py())
    assert producer.publish(pattern(1, length)) == 1
    row = read_all(part, inline=False)[0].to_pylist()[1]
    assert row["nbytes"] == length != len(row["payload"])
    assert ring_reader.payload_of(row["payload"], length, 1) == pattern(1, length).tobytes()
    ring_reader.let_go(0)
    producer.close()


def test_payloads_are_fetched_for_whole_batches(followed: Callable[..., Followed]) -> None:
    """Those that are overwritten by now are null; rows that hold theirs keep it."""
    stream = followed(8)
    references = list(FrameReader(stream.part(0, 8), inline=False).batches())
    inline = list(FrameReader(stream.part(4, 8)).batches())
    for number in (8, 9):
        stream.producer.publish(pattern(number))
    fetched = pa.Table.from_batches(fetch_payloads(iter(references)), FRAME_SCHEMA)
    assert fetched.column("payload").to_pylist() == [None, None] + [pattern(seq).tobytes() for seq in range(2, 8)]
    assert pa.Table.from_batches(fetch_payloads(iter(inline))) == pa.Table.from_batches(inline)


def test_functions_see_frames_where_they_are_and_nothing_that_was_overwritten(
    followed: Callable[..., Followed],
) -> None:
    """A reference is followed to a view. What a function saw while the frame went is no result, and no error either."""
    stream = followed(8)
    (references,) = FrameReader(stream.part(0, 8), inline=False).batches()

    def first_byte(index: int, payload: npt.NDArray[np.uint8]) -> int:
        assert not payload.flags.writeable
        if index in (3, 4):  # the producer comes round
            for number in range(4):
                stream.producer.publish(pattern(100 + number))
        if index == 4:
            raise ValueError("a torn frame")
        return int(payload[0])

    assert over_payloads(references, first_byte) == [0, 1, 2, None, None, None, None, None]
    (inline,) = FrameReader(stream.part(8, 16)).batches()
    assert over_payloads(inline, lambda _, payload: int(payload[0])) == [*range(100, 104), *range(100, 104)]
    (references,) = FrameReader(stream.part(8, 16), inline=False).batches()
    for batch in (inline, references):
        with pytest.raises(ZeroDivisionError):
            over_payloads(batch, lambda index, _: 1 // index)


def test_bytes_that_are_neither_are_refused() -> None:
    with pytest.raises(TensorPoolError, match="3 bytes is neither the frame's nor a reference"):
        ring_reader.payload_of(b"abc", 10, 0)
