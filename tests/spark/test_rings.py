# SPDX-License-Identifier: Apache-2.0
"""Ranges of a ring as Arrow batches, and what a worker keeps of it; a real ring, no Spark."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from tensorpool.client import Client
from tensorpool.client.watch import Watch
from tensorpool.errors import TensorPoolError
from tensorpool.spark import rings
from tensorpool.spark.offsets import SeqRange
from tensorpool.spark.rings import FRAME_SCHEMA, FrameReader, RingPart, WrongHost, fetch_payloads, this_host
from tensorpool.wire.region_uri import RegionUri
from tests.spark.conftest import pattern, publish


class Followed:
    """A stream with its producer, and parts of it as a planner makes them."""

    def __init__(self, client: Client, stream_id: int, frames: int) -> None:
        self.producer = publish(client, stream_id, frames)
        self.watch: Watch = client.watch(stream_id)
        self.bases = tuple(client.config.shm.allowed_base_dirs)

    def part(self, lo: int, hi: int, **more: int) -> RingPart:
        newest = self.watch.epochs[-1]
        piece = SeqRange(newest.regions.stream_id, newest.epoch, lo, hi)
        return RingPart(piece, newest.regions, self.bases, this_host(), **more)


@pytest.fixture
def followed(client: Client, stream: Callable[..., int]) -> Iterator[Callable[..., Followed]]:
    yield lambda frames, profile="tiny": Followed(client, stream(profile), frames)
    assert rings.let_go(0) == 0


def read_all(part: RingPart, **options: bool) -> tuple[pa.Table, FrameReader]:
    reader = FrameReader(part, **options)
    return pa.Table.from_batches(reader.batches(), FRAME_SCHEMA), reader


def test_a_range_comes_whole_and_in_order(followed: Callable[..., Followed]) -> None:
    table, reader = read_all(followed(8).part(2, 7))
    assert table.column("seq").to_pylist() == [2, 3, 4, 5, 6]
    assert table.column("payload").to_pylist() == [pattern(seq).tobytes() for seq in range(2, 7)]
    assert table.column("dropped_before").to_pylist() == [0] * 5
    assert reader.gaps == []


def test_missing_frames_are_counted_in_the_next_row(followed: Callable[..., Followed]) -> None:
    """However many there are: nobody looks at them one by one."""
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
    rings.let_go(0)
    producer.close()


@pytest.mark.parametrize("reuses", [False, True])
def test_batches_have_memory_of_their_own_unless_they_share_it(followed: Callable[..., Followed], reuses: bool) -> None:
    """Whoever is done with a batch when he asks for the next one saves the memory."""
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
    first = rings.mapped_epoch(part.regions, part.bases)
    assert rings.mapped_epoch(part.regions, part.bases) is first
    assert rings.let_go(60) == 1
    assert rings.let_go(0) == 0
    assert rings.mapped_epoch(part.regions, part.bases) is not first


def test_an_epoch_that_lost_its_name_is_still_read(followed: Callable[..., Followed]) -> None:
    """A worker that has it mapped reads what the driver has removed since."""
    stream = followed(8)
    part = stream.part(0, 8)
    rings.mapped_epoch(part.regions, part.bases)
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
    assert rings.payload_of(row["payload"], row["nbytes"], row["seq"]) == pattern(3).tobytes()
    frame = rings.referenced(row["payload"], row["seq"])
    assert frame is not None
    np.testing.assert_array_equal(frame.array, pattern(3))
    assert frame.is_intact()
    for number in range(8, 16):
        stream.producer.publish(pattern(number))
    assert not frame.is_intact()
    assert rings.payload_of(row["payload"], row["nbytes"], row["seq"]) is None


def test_a_reference_never_has_the_length_of_its_frame(client: Client, stream: Callable[..., int]) -> None:
    """So that nobody takes the one for the other."""
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
    assert rings.payload_of(row["payload"], length, 1) == pattern(1, length).tobytes()
    rings.let_go(0)
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


def test_bytes_that_are_neither_are_refused() -> None:
    with pytest.raises(TensorPoolError, match="3 bytes is neither the frame's nor a reference"):
        rings.payload_of(b"abc", 10, 0)
