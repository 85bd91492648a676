# SPDX-License-Identifier: Apache-2.0
"""Merge maps: the rules of a join as messages, and joins that announce and take them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tensorpool as tp
from tensorpool.client import Client, Consumer, Producer
from tensorpool.client.join_barrier import KeyBarrier
from tensorpool.client.joining import Join
from tensorpool.client.merge_maps import MergeMap, MergeMapQuery, MergeRule
from tensorpool.errors import LocalProtocolError, RemoteProtocolError
from tensorpool.wire.merge import (
    ClockDomain,
    Rule,
    SequenceMergeMapAnnounce,
    SequenceMergeMapRequest,
    SequenceRuleType,
    TimeRule,
    TimestampMergeMapAnnounce,
    TimestampMergeMapRequest,
    TimestampRuleType,
    TimestampSource,
)
from tests.client.conftest import SMALL, Outsider, new_name
from tests.support.processes import wait_until

SLOT, DESCRIBED = TimestampSource.SLOT_HEADER, TimestampSource.FRAME_DESCRIPTOR


def seq_rule(stream_id: int, offset: int | None = None, window_size: int | None = None, **changed: Any) -> Rule:
    kind = SequenceRuleType.OFFSET if window_size is None else SequenceRuleType.WINDOW
    fields: dict[str, Any] = {"input_stream_id": stream_id, "offset": offset, "window_size": window_size}
    return Rule(**{"rule_type": kind} | fields | changed)


def time_rule(stream_id: int, offset_ns: int | None = None, window_ns: int | None = None, **changed: Any) -> TimeRule:
    kind = TimestampRuleType.OFFSET_NS if window_ns is None else TimestampRuleType.WINDOW_NS
    fields: dict[str, Any] = {"input_stream_id": stream_id, "offset_ns": offset_ns, "window_ns": window_ns}
    return TimeRule(**{"rule_type": kind, "timestamp_source": SLOT} | fields | changed)


def seq_map(*rules: Rule, **changed: Any) -> SequenceMergeMapAnnounce:
    fields: dict[str, Any] = {"out_stream_id": 9, "epoch": 3, "rules": rules}
    return SequenceMergeMapAnnounce(**fields | changed)


def time_map(*rules: TimeRule, **changed: Any) -> TimestampMergeMapAnnounce:
    fields: dict[str, Any] = {
        "out_stream_id": 9,
        "epoch": 3,
        "clock_domain": ClockDomain.REALTIME_SYNCED,
        "time_rules": rules,
    }
    return TimestampMergeMapAnnounce(**fields | changed)


# --- rules as messages

PAIRS: list[tuple[SequenceMergeMapAnnounce | TimestampMergeMapAnnounce, MergeMap]] = [
    (
        seq_map(seq_rule(1, 0), seq_rule(2, -2), stale_timeout_ns=5),
        MergeMap(by="seq", rules=(MergeRule(stream_id=1), MergeRule(stream_id=2, offset=2)), timeout_ns=5),
    ),
    (
        seq_map(seq_rule(1, 0), seq_rule(2, window_size=5)),
        MergeMap(by="seq", rules=(MergeRule(stream_id=1), MergeRule(stream_id=2, window=4))),
    ),
    (
        time_map(time_rule(1, 0), time_rule(2, -7), lateness_ns=1000),
        MergeMap(by="time", rules=(MergeRule(stream_id=1, window=1000), MergeRule(stream_id=2, offset=7, window=1000))),
    ),
    (
        time_map(
            time_rule(1, 0),
            time_rule(2, window_ns=10, timestamp_source=DESCRIBED),
            clock_domain=ClockDomain.MONOTONIC,
        ),
        MergeMap(
            by="time",
            rules=(MergeRule(stream_id=1), MergeRule(stream_id=2, window=10, source=DESCRIBED)),
            clock_domain=ClockDomain.MONOTONIC,
        ),
    ),
]


@pytest.mark.parametrize(("message", "merge_map"), PAIRS)
def test_rules_are_read_and_announced(
    message: SequenceMergeMapAnnounce | TimestampMergeMapAnnounce, merge_map: MergeMap
) -> None:
    """Both ways; the offset of a rule is the other way round: what is added to the output's seq."""
    assert MergeMap.read(message) == merge_map
    assert merge_map.announce(9, 3) == message


@given(
    st.sampled_from(["seq", "time"]),
    st.lists(st.tuples(st.integers(-(2**31) + 1, 2**31 - 1), st.integers(0, 2**32 - 3)), min_size=2, max_size=5),
    st.none() | st.integers(0, 2**64 - 2),
    st.booleans(),
)
def test_every_map_that_can_be_announced_is_read_again(
    by: Any, parameters: list[tuple[int, int]], timeout_ns: int | None, is_uniform: bool
) -> None:
    """With the same rules; what no rule can say is refused."""
    window = parameters[0][1]
    rules = tuple(
        MergeRule(stream_id=index, offset=offset, window=window if is_uniform else own)
        for index, (offset, own) in enumerate(parameters, 1)
    )
    merge_map = MergeMap(by=by, rules=rules, timeout_ns=timeout_ns)
    has_both = [rule for rule in rules if rule.offset and rule.window]
    try:
        message = merge_map.announce(9, 3)
    except LocalProtocolError:
        is_one_window = len({rule.window for rule in rules}) == 1
        assert has_both
        assert by == "seq" or not is_one_window
        return
    assert MergeMap.read(message) == merge_map


BROKEN: dict[str, SequenceMergeMapAnnounce | TimestampMergeMapAnnounce] = {
    "no rules": seq_map(),
    "one rule": seq_map(seq_rule(1, 0)),
    "an input twice": seq_map(seq_rule(1, 0), seq_rule(1, 1)),
    "neither": seq_map(seq_rule(1, 0), seq_rule(2)),
    "an offset with a window": seq_map(seq_rule(1, 0), seq_rule(2, 0, 5, rule_type=SequenceRuleType.OFFSET)),
    "both": seq_map(seq_rule(1, 0), seq_rule(2, 0, 5)),
    "a window that is an offset": seq_map(seq_rule(1, 0), seq_rule(2, 0, rule_type=SequenceRuleType.WINDOW)),
    "no window": seq_map(seq_rule(1, 0), seq_rule(2, window_size=0)),
    "neither time": time_map(time_rule(1, 0), time_rule(2)),
    "both times": time_map(time_rule(1, 0), time_rule(2, 0, 5)),
    "no window of time": time_map(time_rule(1, 0), time_rule(2, window_ns=0)),
    "two clocks": time_map(time_rule(1, 0), time_rule(2, 0, timestamp_source=DESCRIBED)),
    "too many": seq_map(*(seq_rule(number, 0) for number in range(257))),
}


@pytest.mark.parametrize("message", BROKEN.values(), ids=BROKEN.keys())
def test_a_map_that_breaks_the_rules_is_refused_as_a_whole(
    message: SequenceMergeMapAnnounce | TimestampMergeMapAnnounce,
) -> None:
    """And does not answer a question."""
    with pytest.raises(RemoteProtocolError, match="merge map"):
        MergeMap.read(message)
    query = MergeMapQuery(9)
    query.on_pool_announce(3)
    query.on_announce(message)
    assert (query.is_done, str(query.failure)[:9]) == (False, "merge map")


def test_only_the_map_of_the_present_epoch_answers_a_question() -> None:
    """Which is known when the driver has announced the stream; then the map is asked for, by seq and by time."""
    query, good = MergeMapQuery(9), PAIRS[0][0]
    query.on_announce(good)
    assert not query.is_done
    assert query.on_pool_announce(3) == [
        SequenceMergeMapRequest(out_stream_id=9, epoch=3),
        TimestampMergeMapRequest(out_stream_id=9, epoch=3),
    ]
    for other in (seq_map(*good.rules, epoch=2), seq_map(*good.rules, out_stream_id=8)):  # type: ignore[union-attr]
        query.on_announce(other)
        assert not query.is_done
    query.on_announce(good)
    assert query.merge_map == PAIRS[0][1]
    assert query.on_pool_announce(3) == []


# --- windows


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), max_size=25),
    st.tuples(*[st.integers(0, 8)] * 3),
)
def test_every_tuple_lies_within_the_windows_behind_its_newest(
    steps: list[tuple[int, int]], windows: tuple[int, ...]
) -> None:
    """And a frame that is left without a partner lies outside of them behind a later one of another input."""
    barrier: KeyBarrier[tuple[int, int]] = KeyBarrier(3, windows=windows)
    keys = [0, 0, 0]
    taken = []
    for index, step in steps:
        keys[index] += step
        barrier.offer(index, keys[index], (index, keys[index]), 0)
        while (found := barrier.take()) is not None:
            taken.append(found)
    for found in taken:
        newest = max(key for _, key in found)
        assert all(key + windows[index] >= newest for index, key in found)
    for left in barrier.left:
        index, key = left.item
        assert any(keys[other] + 1 > key + windows[index] for other in range(3) if other != index)


# --- joins over real streams


class Rig:
    """Two inputs and an output."""

    def __init__(self, client: Client) -> None:
        self.producers: list[Producer] = [client.producer(new_name(), create=True) for _ in range(3)]
        self.output = self.producers[2]
        self.consumers: list[Consumer] = [client.consumer(one.stream_id, timeout=10) for one in self.producers[:2]]
        for producer in self.producers[:2]:
            assert producer.wait_for_consumers(1, 10)
        self.ids = [one.stream_id for one in self.consumers]

    def publish(self, index: int, seq: int, **more: Any) -> None:
        assert self.producers[index].publish(np.full(4, seq), seq=seq, **more) == seq


@pytest.fixture
def rig(client: Client) -> Iterator[Rig]:
    rig = Rig(client)
    yield rig
    for consumer in rig.consumers:
        consumer.close()
    for producer in rig.producers:
        producer.close()


def seqs(join: Any) -> list[tuple[int, ...]]:
    return [tuple(frame.seq for frame in found) for found in iter(lambda: join.poll(0.3), None)]


def test_a_join_announces_its_map_and_another_takes_it(client: Client, rig: Rig) -> None:
    """With the offsets and the timeout of the first."""
    first = tp.join(rig.consumers, by="seq", offsets=[0, -2], timeout=4, announce_as=rig.output)
    second = tp.join(rig.consumers, rules_of=rig.output.stream_id, rules_timeout=30)
    assert second.merge_map == first.merge_map
    assert second.merge_map is not None
    assert second.merge_map.timeout_ns == 4 * 10**9
    for seq in range(3):
        rig.publish(0, seq)
        rig.publish(1, seq + 2)
    assert seqs(second) == [(0, 2), (1, 3), (2, 4)]


def announced_by(message: Any, producer: Producer) -> bool:
    return (message.out_stream_id, message.epoch) == (producer.stream_id, producer.epoch)


def test_the_maker_of_a_joined_stream_announces_its_map_regularly(rig: Rig, outsider: Outsider) -> None:
    """On the control stream, with its epoch."""
    tp.join(rig.consumers, by="seq", announce_as=rig.output)
    for _ in range(2):
        heard = outsider.wait_for(SequenceMergeMapAnnounce, lambda message: announced_by(message, rig.output))
        assert [rule.input_stream_id for rule in heard.rules] == rig.ids
        outsider.received.clear()


@pytest.mark.parametrize("by", ["seq", "time"])
def test_a_question_is_answered_at_once(by: Literal["seq", "time"]) -> None:
    """Long before the next regular announce; one about the other kind of map has no answer."""
    with (
        tp.local(overrides=SMALL | {"policies.announce_period_ms": 300_000}) as pool,
        pool.connect() as client,
        closing(Outsider(pool)) as outsider,
    ):
        rig = Rig(client)
        tp.join(rig.consumers, by=by, tolerance=0.5 if by == "time" else None, announce_as=rig.output)
        kinds: list[Any] = [SequenceMergeMapAnnounce, TimestampMergeMapAnnounce]
        requests: list[Any] = [SequenceMergeMapRequest, TimestampMergeMapRequest]
        if by == "time":
            kinds, requests = kinds[::-1], requests[::-1]
        for _ in range(3):  # at once, and twice because of a question
            outsider.wait_for(kinds[0], lambda message: announced_by(message, rig.output))
            assert not [message for message in outsider.received if isinstance(message, kinds[1])]
            outsider.received.clear()
            for request in requests[::-1]:
                outsider.say("control", request(out_stream_id=rig.output.stream_id, epoch=rig.output.epoch))
            outsider.say("control", requests[0](out_stream_id=rig.output.stream_id + 1, epoch=1))


def test_a_map_that_others_announce_is_taken(rig: Rig, outsider: Outsider) -> None:
    """When they are asked: with windows that are each input's own."""
    output, epoch = rig.output.stream_id, rig.output.epoch
    assert epoch is not None
    found: list[Any] = []

    def ask() -> None:
        found.append(tp.join(rig.consumers, rules_of=output, rules_timeout=60))

    thread = threading.Thread(target=ask)
    thread.start()
    outsider.wait_for(SequenceMergeMapRequest, lambda request: request.out_stream_id == output)
    rules = (seq_rule(rig.ids[1], window_size=3), seq_rule(rig.ids[0], 0))
    outsider.say("control", seq_map(seq_rule(1, 0), out_stream_id=output, epoch=epoch))  # broken: one input
    outsider.say("control", seq_map(*rules, out_stream_id=output, epoch=epoch))
    thread.join()
    (join,) = found
    for seq in (3, 5):
        rig.publish(0, seq)
    for seq in (0, 1, 4):
        rig.publish(1, seq)
    assert seqs(join) == [(3, 1), (5, 4)]


def test_a_map_of_monotonic_times_joins_by_them(rig: Rig, outsider: Outsider) -> None:
    """Whatever UTC is; a frame without the time of its rule is counted."""
    output, epoch = rig.output.stream_id, rig.output.epoch
    rules = tuple(time_rule(stream_id, window_ns=1_000) for stream_id in rig.ids)
    message = time_map(*rules, out_stream_id=output, epoch=epoch, clock_domain=ClockDomain.MONOTONIC)
    stop = threading.Event()

    def repeat() -> None:
        while not stop.wait(0.05):
            outsider._publications["control"].offer(message.encode())

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        join = tp.join(rig.consumers, rules_of=output, rules_timeout=60)
    finally:
        stop.set()
        thread.join()
    rig.publish(0, 0, timestamp_ns=5_000_000)
    rig.publish(1, 0, timestamp_ns=5_001_000)
    rig.publish(0, 1, timestamp_ns=6_000_000)
    rig.publish(1, 1, timestamp_ns=6_001_001)
    assert seqs(join) == [(0, 0)]


def test_without_a_map_the_wait_ends_with_a_sentence(rig: Rig) -> None:
    """Which says whether the stream is there."""
    output = rig.output.stream_id
    with pytest.raises(tp.TensorPoolError, match=f"no merge map of stream {output} within 7 s: its epoch .* has none"):
        tp.join(rig.consumers, rules_of=output, rules_timeout=7)
    with pytest.raises(tp.TensorPoolError, match="no driver announces that stream"):
        tp.join(rig.consumers, rules_of=77, rules_timeout=0.1)
    conductor = rig.consumers[0]._client._conductor
    wait_until(lambda: conductor.merge_queries == [], "the questions are forgotten")


def test_arguments_that_do_not_fit_are_refused(rig: Rig) -> None:
    """Where the caller stands."""
    wrong: list[dict[str, Any]] = [
        {},
        {"by": "seq", "rules_of": 5},
        {"rules_of": 5, "tolerance": 1.0},
        {"rules_of": 5, "timeout": 1.0},
        {"rules_of": 5, "offsets": [1, 2]},
        {"rules_of": "fused"},
        {"rules_of": -1},
        {"rules_of": 5, "rules_timeout": float("nan")},
        {"by": "latest", "announce_as": rig.output},
        {"by": "seq", "offsets": [0, 2**31], "announce_as": rig.output},
    ]
    for arguments in wrong:
        with pytest.raises(LocalProtocolError):
            tp.join(rig.consumers, **arguments)
    with pytest.raises(LocalProtocolError):
        tp.join([], rules_of=5)
    merge_map = MergeMap(by="seq", rules=(MergeRule(stream_id=1), MergeRule(stream_id=2)))
    with pytest.raises(LocalProtocolError, match="the merge map joins the streams 1, 2; the consumers read"):
        Join(rig.consumers, "seq", None, None, (), merge_map)
