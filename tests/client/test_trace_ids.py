# SPDX-License-Identifier: Apache-2.0
"""Trace ids: who gets one, what is in it, that it is in the ring too, and which messages link it to its parents."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import msgspec
import numpy as np
import pytest

import tensorpool as tp
from tensorpool._core import SlotFrame, TraceIds
from tensorpool.client import Client, Consumer, Producer
from tensorpool.client.trace_ids import derived_node_id, trace_id_parts
from tensorpool.wire.trace import TraceLinkSet
from tests.client.conftest import FRAME, Outsider, Pair

_names = itertools.count()


class Stage:
    """A stream whose frames are traced, and one with results of it."""

    def __init__(self, client: Client) -> None:
        number = next(_names)
        self.source: Producer = client.producer(f"trace/source/{number}", create=True, trace_ids=True)
        self.results: Producer = client.producer(f"trace/results/{number}", create=True)
        self.reader: Consumer = client.consumer(f"trace/source/{number}", max_outstanding_seq_gap=0)
        assert self.source.wait_for_consumers(1, 10)

    def frame(self) -> tp.Frame:
        self.source.publish(FRAME)
        frame = self.reader.poll(10)
        assert frame is not None
        return frame


@pytest.fixture
def stage(client: Client) -> Iterator[Stage]:
    stage = Stage(client)
    yield stage
    stage.reader.close()
    stage.source.close()
    stage.results.close()


def linked(outsider: Outsider, producer: Producer) -> tuple[TraceLinkSet, list[int]]:
    link = outsider.wait_for(TraceLinkSet, lambda it: it.stream_id == producer.stream_id)
    return link, [parent.trace_id for parent in link.parents]


def test_ids_grow_and_say_when_and_where_they_were_made() -> None:
    """Also many within a tick of the clock."""
    ids = TraceIds()
    ids.set_node(4_711, is_derived=False)
    before = datetime.now(UTC)
    made = [ids.next() for _ in range(10_000)]
    after = datetime.now(UTC)
    assert made == sorted(set(made))
    assert max(made) < 2**63
    parts = [trace_id_parts(one) for one in (made[0], made[-1])]
    assert [(part.node_id, part.is_derived) for part in parts] == [(4_711, False)] * 2
    tick = timedelta(microseconds=17)
    assert before - tick <= parts[0].time <= after + tick
    assert parts[0].time <= parts[1].time <= after + 10_000 * tick


def test_ids_of_threads_and_of_nodes_differ() -> None:
    ids, other = TraceIds(), TraceIds()
    ids.set_node(1, is_derived=True)
    other.set_node(1, is_derived=False)
    made: list[int] = []
    threads = [
        threading.Thread(target=lambda one=one: made.extend([one.next() for _ in range(20_000)]))
        for one in (ids, ids, other)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 60_000


def test_frames_without_parents_have_no_id_unless_it_is_asked_for(pair: Pair, stage: Stage) -> None:
    """Every way of publishing; an id that is given is taken, 0 as well."""
    assert [pair.publish(FRAME).trace_id for _ in range(2)] == [0, 0]
    stage.source.publish(FRAME)
    with stage.source.claim(FRAME.shape, FRAME.dtype) as slot:
        slot.array[:] = FRAME
    stage.source.publish_many([FRAME, FRAME])
    stage.source.publish(np.zeros((4, 4))[::2])
    stage.source.publish(FRAME, trace_id=7)
    stage.source.publish(FRAME, trace_id=0)
    ids = [frame.trace_id for frame in (stage.reader.poll(10) for _ in range(7)) if frame is not None]
    assert ids[-2:] == [7, 0]
    assert ids[1] == slot.trace_id
    assert ids[:5] == sorted(set(ids[:5]))
    parts = trace_id_parts(ids[0])
    assert (parts.node_id, parts.is_derived) == (derived_node_id(stage.source.producer_id), True)


def test_the_configuration_can_ask_for_ids(pool: tp.Local) -> None:
    traced = msgspec.structs.replace(pool.config.client, trace_ids=True)
    with tp.connect(pool.aeron_dir, config=msgspec.structs.replace(pool.config, client=traced)) as client:
        name = f"trace/configured/{next(_names)}"
        with client.producer(name, create=True) as producer, client.consumer(name) as consumer:
            assert producer.wait_for_consumers(1, 10)
            producer.publish(FRAME)
            frame = consumer.poll(10)
            assert frame is not None
            assert frame.trace_id > 0


@pytest.mark.parametrize("how", ["publish", "strided", "claim"])
def test_a_result_is_linked_to_the_frames_that_it_was_made_from(stage: Stage, outsider: Outsider, how: str) -> None:
    """Given as frames; each once, in their order, and the result gets an id of its own."""
    frames = [stage.frame(), stage.frame()]
    parents = [*frames, frames[0]]
    array = np.zeros((4, 4))[::2] if how == "strided" else FRAME
    if how == "claim":
        with stage.results.claim((2, 3), np.float32, parents=parents) as slot:
            slot.array[:] = FRAME
        assert slot.trace_id > frames[1].trace_id
    else:
        stage.results.publish(array, parents=parents)
    link, found = linked(outsider, stage.results)
    assert found == [frame.trace_id for frame in frames]
    assert link.trace_id > max(found)
    assert (link.epoch, link.seq) == (stage.results.epoch, 0)


def test_parents_without_an_id_are_counted_and_the_others_are_linked(
    pair: Pair, stage: Stage, outsider: Outsider
) -> None:
    """Such as those that a bridge of the specified dialect brought: a stage goes on."""
    frame, untraced = stage.frame(), pair.publish(FRAME)
    stage.results.publish(FRAME, parents=[untraced])
    stage.results.publish(FRAME, parents=[untraced, frame])
    link, found = linked(outsider, stage.results)
    assert (link.seq, found) == (1, [frame.trace_id])
    assert stage.results.stats.untraced_parents == 2


def test_a_slot_that_is_given_up_is_not_linked(stage: Stage, outsider: Outsider) -> None:
    frame = stage.frame()
    stage.results.claim((2, 3), np.float32, parents=[frame]).abandon()
    stage.results.publish(FRAME, trace_id=9, parents=[frame])
    assert linked(outsider, stage.results)[0].trace_id == 9


def test_the_ring_says_the_id_to_readers_without_descriptors(stage: Stage, client: Client) -> None:
    """Recorders, and `latest` of a consumer that has just come; not where the id is 0, and a slot used again."""
    ids = []
    for number in range(20):  # the ring goes round
        stage.source.publish(FRAME, trace_id=0 if number % 3 == 0 else None)
        frame = stage.reader.poll(10)
        assert frame is not None
        ids.append(frame.trace_id)
    mapped = stage.reader._reader.mapped
    assert mapped is not None
    slots = [mapped.reader.read(seq) for seq in range(13, 20)]
    assert [slot.trace_id for slot in slots if isinstance(slot, SlotFrame)] == ids[13:]
    with client.consumer(stage.source.stream_id) as late:
        newest = late.latest()
        assert newest is not None
        assert newest.trace_id == ids[19] > 0
