# SPDX-License-Identifier: Apache-2.0
"""produced = received + the sum of counted drops, for every schedule of publishing, losing, reading and remapping.

A writer, a reader and a real Aeron stream between them, in one process. Descriptors get lost and come twice, slots
lie, the reader is slow, asks for the newest, keeps to a rate, changes its stream, loses its memory and gets it back,
epochs come and go. Whenever everything that is left was read, the book has to balance, to the frame:

    received + lost = committed                            sum of dropped_before = lost, but for what was asked for
    delivered frames are whole, in order, each once        nothing is delivered while nothing is mapped
    a frame that its reader finds overwritten later counts as dropped instead of received, once
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tensorpool import aeron
from tensorpool._core import ConsumerBase, DropReason
from tensorpool.client.frame import Frame
from tensorpool.client.stream_reader import SEQ_WENT_BACK, StreamReader
from tensorpool.errors import FrameOverwritten
from tests.client.conftest import Stream
from tests.levels import SOAK
from tests.support.processes import private_directory

NSLOTS = 4
WISHED = (DropReason.RATE_LIMITED, DropReason.SKIPPED)  # not a loss to a consumer that asked for it

_stream_ids = itertools.count(40_000)

few = st.integers(1, 3)
many = st.integers(1, 3 * NSLOTS)


def entered(frame: Frame) -> None:
    with frame:
        pass


USES: dict[str, Callable[[Frame], object]] = {
    "is_intact": Frame.is_intact,
    "copy": Frame.copy,
    "copy_into": lambda frame: frame.copy_into(np.empty(2, np.uint64)),
    "copy_into, strided": lambda frame: frame.copy_into(np.empty(4, np.uint64)[::2]),
    "with": entered,
}


def is_whole(frame: Frame, use: str) -> bool:
    """What a use of the frame says about it."""
    try:
        return USES[use](frame) is not False
    except FrameOverwritten:
        return False


class AccountingMachine(RuleBasedStateMachine):
    folder: Path
    client: aeron.Client

    def __init__(self) -> None:
        super().__init__()
        self.own_folder = Path(tempfile.mkdtemp(dir=self.folder))
        self.logical_id = next(_stream_ids)
        shape = {"nslots": NSLOTS, "pools": ((1, 64),)}
        self.first = Stream(self.own_folder, self.client, stream_id=self.logical_id, **shape)  # type: ignore[arg-type]
        self.stream = self.first
        self.committed = 0  # in the epochs before
        self.is_mapped = True
        self.delivered: list[tuple[int, int]] = []
        self.reported_lost = 0  # the sum of dropped_before
        self.kept: list[Frame] = []
        self.late: set[tuple[int, int]] = set()  # delivered, and found overwritten later

    @initialize(max_gap=st.sampled_from([None, 0, 2, NSLOTS]))
    def begin(self, max_gap: int | None) -> None:
        """The first frame that is seen is where counting begins."""
        self.reader = StreamReader(max_gap)
        self.reader.set_streams(self.first.subscription, None)
        self.reader.adopt(self.stream.mapped())
        self.publish(1)
        self.read_all()
        assert self.delivered == [(1, 0)]

    # --- the producer

    @rule(count=many)
    def publish(self, count: int) -> None:
        for _ in range(count):
            self.describe(self.write())

    @rule(count=few)
    def lose_descriptors(self, count: int) -> None:
        for _ in range(count):
            self.write()

    @rule()
    def describe_twice(self) -> None:
        seq = self.write()
        self.describe(seq)
        self.describe(seq)

    @rule(offset_and_data=st.sampled_from([(72, b"\x63"), (16, b"\x09"), (76, b"\x00"), (60, b"\x00")]))
    def lie(self, offset_and_data: tuple[int, bytes]) -> None:
        seq = self.write()
        self.stream.poke(seq % NSLOTS, *offset_and_data)
        self.describe(seq)

    @rule()
    def describe_too_early(self) -> None:
        """Then it is committed, and no further progress is reported."""
        seq = self.stream.next_seq
        self.stream.begin(seq)
        self.describe(seq)
        self.read(1)
        self.write()

    @rule(other=st.sampled_from([b"", b"noise", bytes(48)]))
    def say_something_else(self, other: bytes) -> None:
        self.stream.say(other)
        self.describe(0, epoch=self.stream.epoch + 7)
        self.describe(0, stream_id=self.logical_id + 500_000)

    def write(self) -> int:
        seq = self.stream.next_seq
        return self.stream.write(np.array([self.stream.epoch, seq], np.uint64))

    def describe(self, seq: int, *, epoch: int | None = None, stream_id: int | None = None) -> None:
        self.stream.describe(seq, epoch=epoch, stream_id=stream_id)

    # --- the reader

    @rule(count=few)
    def read(self, count: int) -> None:
        with self.reader.lock:
            self.reader.apply()
            for _ in range(count):
                source = self.reader.source
                frame = None if source is None else source.next()
                if frame is None:
                    return
                self.take(frame)

    @rule(count=many)
    def read_many(self, count: int) -> None:
        """As `poll_many` does."""
        consumer = ConsumerBase(self.reader, True)
        with self.reader.lock:
            self.reader.apply()
            for frame in consumer._take_arrived(count):
                self.take(frame)

    @rule()
    def read_all(self) -> None:
        before = -1
        while len(self.delivered) != before:
            before = len(self.delivered)
            self.read(100)

    @rule()
    def look_at_the_newest(self) -> None:
        with self.reader.lock:
            self.reader.apply()
            source = self.reader.source
            received = None if source is None else source.feed.latest(source.descriptors)
        if source is None or received is None:
            return
        frame = Frame(source.mapped, received)
        if self.delivered and self.delivered[-1] == (frame.epoch, frame.seq):
            assert frame.dropped_before == 0
            assert list(frame.copy()) == [frame.epoch, frame.seq]
            self.kept.append(frame)
        elif source.feed.last_seq_seen == frame.seq:  # else it was counted as lost before, and is only shown
            self.take(frame)

    def take(self, frame: Frame) -> None:
        assert self.is_mapped, "nothing is delivered while nothing is mapped"
        key = frame.epoch, frame.seq
        assert not self.delivered or key > self.delivered[-1], "in order, each once"
        assert list(frame.copy()) == [frame.epoch, frame.seq], "whole, and its own"
        self.delivered.append(key)
        self.reported_lost += frame.dropped_before
        self.kept = [*self.kept[-20:], frame]

    @precondition(lambda self: self.kept)
    @rule(index=st.integers(0, 100), use=st.sampled_from(sorted(USES)), elsewhere=st.booleans())
    def look_at_a_frame_again(self, index: int, use: str, elsewhere: bool) -> None:
        """However late, on whichever thread, and again: the first time that it is not whole, its count moves."""
        frame = self.kept[index % len(self.kept)]
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(is_whole, frame, use).result() if elsewhere else is_whole(frame, use)
        received = self.reader.stats().received
        if not found:
            self.late.add((frame.epoch, frame.seq))
        assert received == len(self.delivered) - len(self.late)

    @rule(rate_hz=st.sampled_from([0, 0, 1, 1_000_000]))
    def keep_to_a_rate(self, rate_hz: int) -> None:
        self.reader.set_rate(rate_hz)

    @rule(is_throttled=st.booleans())
    def change_the_stream(self, is_throttled: bool) -> None:
        self.reader.switch(self.stream.subscribe(), is_throttled=is_throttled)

    # --- memory

    @precondition(lambda self: self.is_mapped)
    @rule()
    def lose_memory(self) -> None:
        self.reader.suspend()
        self.is_mapped = False

    @precondition(lambda self: not self.is_mapped)
    @rule()
    def let_go(self) -> None:
        self.reader.let_go()

    @rule()
    def map_again(self) -> None:
        self.reader.adopt(self.stream.mapped())
        self.is_mapped = True

    @rule(count=st.integers(0, NSLOTS + 1))
    def begin_an_epoch(self, count: int) -> None:
        """With some frames that are there before it is mapped."""
        self.committed += self.stream.next_seq
        self.stream = self.stream.later(self.own_folder)
        self.publish(count)
        self.reader.adopt(self.stream.mapped())
        self.is_mapped = True

    # --- the book

    @rule()
    def balance(self) -> None:
        """Read what is left; a last frame makes everything before it known."""
        if not self.is_mapped:
            self.map_again()
        self.reader.set_rate(0)
        self.read_all()
        assert not self.reader.attention & SEQ_WENT_BACK
        self.publish(1)
        self.read_all()
        assert self.delivered[-1] == (self.stream.epoch, self.stream.next_seq - 1)
        stats = self.reader.stats()
        assert stats.received == len(self.delivered) - len(self.late)
        assert stats.received + stats.lost == self.committed + self.stream.next_seq
        assert self.reported_lost == stats.lost - len(self.late) - sum(stats.drops.get(reason, 0) for reason in WISHED)
        assert (stats.epoch, stats.epochs) == (self.stream.epoch, self.stream.epoch)
        assert stats.last_seq_seen == self.stream.next_seq - 1

    def teardown(self) -> None:
        if hasattr(self, "reader"):
            self.balance()
            before = self.reader.stats()
            self.reader.close()
            later = {(it.epoch, it.seq) for it in self.kept if not is_whole(it, "is_intact")} - self.late
            after = self.reader.stats()
            assert (after.received, after.drops_late) == (
                before.received - len(later),
                before.drops_late + len(later),
            ), "also after the consumer was closed"
            assert self.reader.descriptors is not None
            self.reader.descriptors.close()
        self.first.publication.close()
        shutil.rmtree(self.own_folder)


@pytest.fixture
def machine(shared_media_driver: aeron.MediaDriver) -> Iterator[type[AccountingMachine]]:
    with private_directory() as folder:
        AccountingMachine.folder = folder
        AccountingMachine.client = aeron.connect(shared_media_driver.aeron_dir)
        yield AccountingMachine
        AccountingMachine.client.close()


def test_the_book_balances(machine: type[AccountingMachine]) -> None:
    """Under every schedule."""
    run_state_machine_as_test(machine, settings=settings(max_examples=60 * SOAK, stateful_step_count=40))


step = st.tuples(st.sampled_from(["publish", "publish", "lose", "read", "read"]), st.integers(1, 3 * NSLOTS))


@pytest.mark.parametrize("max_gap", [None, 0, 2])
@settings(max_examples=40 * SOAK)
@given(steps=st.lists(step, min_size=1, max_size=20))
def test_many_at_once_are_what_one_at_a_time_are(
    shared_media_driver: aeron.MediaDriver, max_gap: int | None, steps: list[tuple[str, int]]
) -> None:
    """The same frames, with the same losses before each and in the same counters."""
    with private_directory() as folder, closing(aeron.connect(shared_media_driver.aeron_dir)) as client:
        stream = Stream(folder, client, stream_id=next(_stream_ids), nslots=NSLOTS, pools=((1, 64),))
        readers = [StreamReader(max_gap), StreamReader(max_gap)]
        for reader in readers:
            reader.set_streams(stream.subscribe(), None)
            reader.adopt(stream.mapped())
        one, many_at_once = (ConsumerBase(reader, True) for reader in readers)
        for kind, count in [*steps, ("publish", 1), ("read", 1000)]:
            if kind == "publish":
                for _ in range(count):
                    stream.publish()
            elif kind == "lose":
                for _ in range(count):
                    stream.write()
            else:
                singles = [frame for _ in range(count) for frame in one._take_arrived(1)]
                batch = many_at_once._take_arrived(count)
                assert [(it.seq, it.dropped_before) for it in batch] == [(it.seq, it.dropped_before) for it in singles]
        first, second = (reader.stats() for reader in readers)
        assert first == second
        assert first.received + first.lost == stream.next_seq - (first.last_seq_seen + 1 - first.received - first.lost)
