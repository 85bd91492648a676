# SPDX-License-Identifier: Apache-2.0
"""UTC of frames: from the pair that their producer published, or from this host's clocks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tensorpool as tp
from tensorpool.client.wall_clock import LOCAL_AGE_NS, ClockPair, EpochClock, clock_in, utc_ns, with_clock
from tensorpool.wire import decode
from tensorpool.wire.control import Attribute, DataSourceMeta
from tests.support.processes import wait_until

S = 1_000_000_000
NOW = ClockPair(monotonic_ns=100 * S, utc_ns=1_790_000_000 * S)
ELSEWHERE = ClockPair(monotonic_ns=7 * S, utc_ns=1_600_000_000 * S)
EMPTY = DataSourceMeta(stream_id=1, meta_version=0, timestamp_ns=0)


def test_the_producers_pair_decides() -> None:
    """Whatever this host's clocks say; before and after the moment of the pair."""
    assert utc_ns(8 * S, EpochClock(ELSEWHERE), NOW) == 1_600_000_001 * S
    assert utc_ns(5 * S, EpochClock(ELSEWHERE), NOW) == 1_599_999_998 * S


def test_without_a_pair_only_a_fresh_frame_of_this_host_has_a_time() -> None:
    """Another host's monotonic clock is not likely to be within ten seconds of ours."""
    assert utc_ns(99 * S, None, NOW) == 1_789_999_999 * S
    assert utc_ns(100 * S - LOCAL_AGE_NS, None, NOW) == NOW.utc_ns - LOCAL_AGE_NS
    assert utc_ns(100 * S - LOCAL_AGE_NS - 1, None, NOW) is None
    assert utc_ns(100 * S + 1, None, NOW) is None


def test_a_producer_that_knows_no_pair_has_no_time() -> None:
    """A relay of a source without one: not even a fresh stamp is believed."""
    assert utc_ns(99 * S, EpochClock(None), NOW) is None


@given(st.integers(0, 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
def test_a_pair_survives_the_wire(monotonic_ns: int, utc: int) -> None:
    """As does the statement that there is none."""
    for clock in (EpochClock(ClockPair(monotonic_ns, utc)), EpochClock(None)):
        message = decode(with_clock(EMPTY, clock).encode())
        assert isinstance(message, DataSourceMeta)
        assert clock_in(message) == clock


@pytest.mark.parametrize(
    "attribute",
    [
        Attribute(key="tensorpool.clock", format="application/json", value=b"{"),
        Attribute(key="tensorpool.clock", format="application/json", value=b"[1, 2]"),
        Attribute(key="tensorpool.clock", format="application/json", value=b'{"monotonic_ns": 1}'),
        Attribute(key="tensorpool.clock", format="application/json", value=b'{"monotonic_ns": 1, "utc_ns": 1e400}'),
        Attribute(key="tensorpool.clock", format="text/plain", value=b"null"),
        Attribute(key="clock", format="application/json", value=b"null"),
    ],
    ids=["torn", "a list", "half", "endless", "other format", "other key"],
)
def test_what_cannot_be_read_says_nothing(attribute: Attribute) -> None:
    """Anybody may write an attribute of this name."""
    assert clock_in(DataSourceMeta(stream_id=1, meta_version=0, timestamp_ns=0, attributes=(attribute,))) is None


# --- over real Aeron


@pytest.fixture(scope="module")
def client() -> Iterator[tp.Client]:
    with tp.local() as pool, pool.connect() as client:
        yield client


def received(producer: tp.Producer, consumer: tp.Consumer, stamp_ns: int | None = None) -> tp.Frame:
    assert producer.wait_for_consumers()
    producer.publish(np.zeros(4, np.uint8), timestamp_ns=stamp_ns)
    frame = consumer.poll(10)
    assert frame is not None
    return frame


def test_a_frame_says_in_utc_when_it_was_taken(client: tp.Client) -> None:
    """Within what lies between two readings of the wall clock; also long after it was received."""
    with client.producer("clock/own", create=True) as producer, client.consumer("clock/own") as consumer:
        before = datetime.now(UTC) - timedelta(microseconds=1)
        frame = received(producer, consumer)
        after = datetime.now(UTC)
        assert frame.time is not None
        assert before <= frame.time <= after
        wait_until(lambda: frame._mapped.clock is not None, "the producer's pair")
        assert before - timedelta(milliseconds=5) <= frame.time <= after + timedelta(milliseconds=5)
        now_ns = time.monotonic_ns()
        old = received(producer, consumer, now_ns // 2)  # the clock counts from the start of this host
        assert old.time is not None
        age = timedelta(microseconds=(now_ns - now_ns // 2) // 1000)
        assert abs(datetime.now(UTC) - old.time - age) < timedelta(seconds=30)


def test_who_publishes_frames_of_another_host_passes_its_pair_on(client: tp.Client) -> None:
    """First nothing is known, then the pair."""
    with (
        client.producer("clock/relayed", create=True, has_own_clock=False) as producer,
        client.consumer("clock/relayed") as consumer,
    ):
        frame = received(producer, consumer, time.monotonic_ns())
        wait_until(lambda: frame._mapped.clock is not None, "the statement that there is no pair")
        assert frame.time is None
        producer.set_clock(ELSEWHERE)
        frame = received(producer, consumer, 8 * S)
        wait_until(lambda: frame.time is not None, "the pair")
        assert frame.time == datetime.fromtimestamp(1_600_000_001, UTC)


def test_a_pair_that_is_none_is_refused(client: tp.Client) -> None:
    """Where the caller stands."""
    with client.producer("clock/refused", create=True) as producer:
        for wrong in (0, (1, 2), "now"):
            with pytest.raises(tp.LocalProtocolError, match="ClockPair"):
                producer.set_clock(wrong)  # type: ignore[arg-type]
        with pytest.raises(tp.LocalProtocolError, match=r"tensorpool\.clock"):
            producer.set_metadata({"tensorpool.clock": 1})
