# SPDX-License-Identifier: Apache-2.0
"""Streams read together, on real rings: what is joined, what is copied, and that every frame is accounted for."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import tensorpool as tp
from tensorpool.client import Client, Consumer, Producer
from tensorpool.client.join_barrier import Unjoined
from tensorpool.client.joining import FrameCopy, Join
from tests.support.processes import wait_until

NSLOTS = 8  # of the small deployment's rings
_numbers = itertools.count()


class Rig:
    """Streams with a producer and a consumer each."""

    def __init__(self, client: Client, count: int) -> None:
        names = [f"join/{next(_numbers)}" for _ in range(count)]
        self.producers: list[Producer] = [client.producer(name, create=True) for name in names]
        self.consumers: list[Consumer] = [client.consumer(name, timeout=10) for name in names]
        for producer in self.producers:
            assert producer.wait_for_consumers(1, 10)

    def publish(self, index: int, seq: int, *, at_s: float | None = None) -> None:
        stamp_ns = time.monotonic_ns() if at_s is None else round(at_s * 1e9)
        assert self.producers[index].publish(np.full(4, seq, np.int64), seq=seq, timestamp_ns=stamp_ns) == seq

    def close(self) -> None:
        for consumer in self.consumers:
            consumer.close()
        for producer in self.producers:
            producer.close()


@pytest.fixture
def rig(client: Client) -> Iterator[Rig]:
    rig = Rig(client, 2)
    yield rig
    rig.close()


def drained(join: Join) -> list[tuple[int, ...]]:
    """The seqs of all tuples that there are."""
    return [tuple(frame.seq for frame in found) for found in iter(lambda: join.poll(0.3), None)]


def check(join: Join, published: list[int]) -> None:
    """Every frame is joined, not joined for a reason, or waits."""
    stats = join.stats
    for index, count in enumerate(published):
        lost = join._consumers[index].stats.lost
        assert stats.received[index] + lost == count
        assert stats.joined + sum(stats.unjoined[index].values()) + stats.waiting[index] == stats.received[index]


def test_equal_seqs_are_joined(rig: Rig) -> None:
    join = tp.join(rig.consumers, by="seq")
    for seq in (0, 1, 3, 4):
        rig.publish(0, seq)
    for seq in (1, 2, 4):
        rig.publish(1, seq)
    assert drained(join) == [(1, 1), (4, 4)]
    assert join.stats.unjoined == ({Unjoined.NO_PARTNER: 2}, {Unjoined.NO_PARTNER: 1})
    check(join, [4 + 1, 3 + 1])  # with the seqs that were not published, which count as lost


def test_times_within_the_tolerance_are_joined(rig: Rig) -> None:
    """Cameras of two rates: each frame of the slow one with the nearest earlier of the fast one, in UTC."""
    join = tp.join(rig.consumers, by="time", tolerance=0.004)
    now_s = time.monotonic()
    for seq in range(6):
        rig.publish(0, seq, at_s=now_s + 0.010 * seq)
    for seq in range(3):
        rig.publish(1, seq, at_s=now_s + 0.020 * seq + 0.003)
    assert drained(join) == [(0, 0), (2, 1), (4, 2)]
    assert join.stats.unjoined[0][Unjoined.NO_PARTNER] == 2
    check(join, [6, 3])


def test_offsets_move_keys(rig: Rig) -> None:
    join = tp.join(rig.consumers, by="seq", offsets=(0, -1))
    for seq in range(4):
        rig.publish(0, seq)
        rig.publish(1, seq)
    assert drained(join) == [(0, 1), (1, 2), (2, 3)]
    check(join, [4, 4])


def test_the_newest_of_others_comes_with_every_frame_of_the_first(rig: Rig) -> None:
    join = tp.join(rig.consumers, by="latest")
    rig.publish(0, 0)
    assert join.poll(0.2) is None
    rig.publish(1, 0)
    rig.publish(1, 1)
    assert join.poll(0.2) is None
    rig.publish(0, 1)
    rig.publish(0, 2)
    assert [tuple(frame.seq for frame in found) for found in (join.poll(5),) if found] == [(2, 1)]
    assert join.stats.unjoined == ({Unjoined.NO_PARTNER: 1, Unjoined.REPLACED: 1}, {Unjoined.REPLACED: 1})


def test_a_frame_whose_ring_comes_round_is_copied(rig: Rig) -> None:
    """One stream is far ahead: its frames wait as copies, and are the ones that were published."""
    join = tp.join(rig.consumers, by="seq")
    for seq in range(4 * NSLOTS):
        rig.publish(0, seq)
        assert join.poll() is None
        wait_until(lambda seq=seq: join.poll() is None and join.stats.received[0] == seq + 1, "it is received")
    rig.publish(1, 2)
    found = join.poll(5)
    assert found is not None
    first, second = found
    assert isinstance(first, FrameCopy)
    assert (first.seq, second.seq) == (2, 2)
    assert first.array.tolist() == [2] * 4
    assert first.shape == (4,)
    assert first.is_intact()
    assert first.time is not None
    stats = join.stats
    assert stats.copied >= 3 * NSLOTS
    assert stats.unjoined[0] == {Unjoined.NO_PARTNER: 2}


def test_a_frame_waits_no_longer_than_the_timeout(rig: Rig) -> None:
    join = tp.join(rig.consumers, by="seq", timeout=0.05)
    rig.publish(0, 0)
    wait_until(lambda: join.poll(0.01) is None and join.stats.unjoined[0] == {Unjoined.TIMED_OUT: 1}, "it is over")
    rig.publish(1, 0)
    assert join.poll(0.02) is None


def test_epochs_begin_again(client: Client) -> None:
    """A producer that starts again starts at seq 0; so does its partner: both are joined again."""
    names = [f"join/again/{index}" for index in range(2)]
    consumers: list[Consumer] = []
    join: Join | None = None
    for _ in range(2):
        producers = [client.producer(name, create=True, timeout=10) for name in names]
        consumers = consumers or [client.consumer(name, timeout=10) for name in names]
        join = join or tp.join(consumers, by="seq")
        for producer, consumer in zip(producers, consumers, strict=True):
            wait_until(lambda one=consumer, other=producer: one.epoch == other.epoch, "the consumer follows")
            assert producer.wait_for_consumers(1, 10)
        for _ in range(3):
            for producer in producers:
                producer.publish(np.zeros(4))
        assert drained(join)[-1] == (2, 2)
        for producer in producers:
            producer.close()
    for consumer in consumers:
        consumer.close()


def test_iteration_ends_with_its_consumers(rig: Rig) -> None:
    """Closed from another thread, as at the end of a program."""
    seen: list[tuple[int, ...]] = []
    join = tp.join(rig.consumers, by="seq")
    thread = threading.Thread(target=lambda: seen.extend(tuple(frame.seq for frame in found) for found in join))
    thread.start()
    rig.publish(0, 0)
    rig.publish(1, 0)
    wait_until(lambda: seen == [(0, 0)], "it is joined")
    for consumer in rig.consumers:
        consumer.close()
    thread.join(10)
    assert not thread.is_alive()


def test_wrong_arguments_are_refused(rig: Rig) -> None:
    """In a sentence that names the argument, where the caller stands; nothing is taken for something else."""
    both = rig.consumers
    wrong = [
        ({"by": "seq", "tolerance": 1.0}, "tolerance = 1.0: by = 'seq' expects none"),
        ({"by": "time"}, "tolerance = None: by = 'time' expects seconds"),
        ({"by": "time", "tolerance": -0.01}, "tolerance = -0.01"),
        ({"by": "time", "tolerance": math.nan}, "tolerance = nan"),
        ({"by": "seq", "timeout": -1}, "timeout = -1"),
        ({"by": "size"}, "by = 'size'"),
        ({"by": "seq", "offsets": (1,)}, "offsets"),
        ({"by": "seq", "offsets": (0.5, 0)}, "offsets = 0.5: expected a whole number"),
        ({"by": "time", "tolerance": 0.1, "offsets": ("1", 0)}, "offsets = '1'"),
        ({"by": "time", "tolerance": 0.1, "offsets": (math.nan, 0)}, "offsets = nan"),
        ({"by": "latest", "timeout": 1}, "latest"),
        ({"by": "seq", "announce_as": both[0]}, "announce_as = .*: expected the producer"),
    ]
    for arguments, text in wrong:
        with pytest.raises(tp.LocalProtocolError, match=text):
            tp.join(both, **arguments)  # type: ignore[arg-type]
    for consumers in (both[:1], ["camera/left", "camera/right"], both[0]):  # a consumer is an iterator over frames
        with pytest.raises(tp.LocalProtocolError, match="two consumers or more"):
            tp.join(consumers, by="seq")  # type: ignore[arg-type]
    with pytest.raises(tp.LocalProtocolError, match="each consumer once"):
        tp.join([both[0], both[0]], by="seq")


def test_a_tuple_with_an_overwritten_frame_is_not_given(rig: Rig) -> None:
    """The ring comes round between receiving and joining: the frame is lost for this reason, its partner has none."""
    join = tp.join(rig.consumers, by="seq")
    for index in (0, 1):
        rig.publish(index, 0)
        frame = rig.consumers[index].poll(5)
        assert frame is not None
        join._offer(index, frame)
    for seq in range(1, NSLOTS + 1):
        rig.publish(0, seq)
    assert join.take() is None
    assert join.stats.unjoined == ({Unjoined.OVERWRITTEN: 1}, {Unjoined.NO_PARTNER: 1})
