# SPDX-License-Identifier: Apache-2.0
"""The view under floods and nonsense: bounded, counted, never wrong about who is there, never raising."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tensorpool.supervisor.encoding import to_json
from tensorpool.supervisor.snapshot import ChangeKind, ConsumerState
from tensorpool.supervisor.view import ProbeResult, View
from tensorpool.wire import Message
from tensorpool.wire.control import FrameDescriptor, Mode
from tensorpool.wire.driver import LeaseRevokeReason, Role
from tests.levels import SOAK
from tests.supervisor.conftest import (
    STALE_NS,
    S,
    a_view,
    alive,
    announce,
    configured,
    consumed,
    hello,
    kept,
    named,
    produced,
    revoked,
)

FEW = {"max_streams": 3, "max_consumers": 4, "max_leases": 2, "max_services": 2, "max_changes": 5, "forget_ms": 5_000}


def test_a_flood_is_bounded_and_counted_and_room_comes_back() -> None:
    """What is stale makes room for what is new, before it would be forgotten."""
    view = a_view(**FEW)
    for number in range(1, 101):
        view.on_message(announce(number), 0)
        view.on_message(consumed(1, number), 0)
        view.on_message(kept(1000 + number, lease_id=number), 0)
        view.on_message(alive(tag=f"service:{number}"), 0)
    snapshot = view.snapshot(0)
    assert [len(rows) for rows in (snapshot.streams, snapshot.consumers, snapshot.leases, snapshot.services)] == [
        *(3, 4, 2, 2)
    ]
    assert snapshot.overflow == {"streams": 97, "consumers": 98, "leases": 98, "services": 98}
    assert len(snapshot.changes) == 5
    assert snapshot.change_counts[ChangeKind.STREAM_APPEARED] == 3
    view.tick(STALE_NS + 1)
    view.on_message(announce(777, now_ns=STALE_NS + 1), STALE_NS + 1)
    assert [stream.stream_id for stream in view.snapshot(STALE_NS + 1).streams] == [777]


def messages() -> st.SearchStrategy[Message]:
    """Anything that peers say about a few streams and consumers, true or not."""
    stream_ids, consumer_ids = st.sampled_from([0, 1, 2, 3, 4, 2**32 - 1]), st.sampled_from([0, 7, 8, 9])
    epochs, seqs = st.integers(0, 4), st.integers(0, 2**64 - 1)
    u64, modes = st.integers(0, 2**64 - 1), st.sampled_from(list(Mode))

    def with_ids(make: Any, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Message]:
        return st.builds(make, stream_id=stream_ids, **fields)

    return st.one_of(
        with_ids(
            announce,
            epoch=epochs,
            producer_id=st.sampled_from([0, 11, 12]),
            header_nslots=st.sampled_from([0, 1, 63, 64]),
            announce_timestamp_ns=st.integers(0, 60 * S),
        ),
        with_ids(produced, seq=seqs, epoch=epochs),
        with_ids(FrameDescriptor, epoch=epochs, seq=seqs),
        with_ids(consumed, seq=seqs, consumer_id=consumer_ids, epoch=epochs, drops_gap=u64, drops_late=u64, mode=modes),
        with_ids(hello, consumer_id=consumer_ids, mode=modes, max_rate_hz=st.integers(0, 9)),
        with_ids(configured, consumer_id=consumer_ids, use_shm=st.booleans(), mode=modes),
        with_ids(named, name=st.text(max_size=9), epoch=epochs),
        with_ids(kept, client_id=consumer_ids, role=st.sampled_from(list(Role)), lease_id=st.integers(0, 5)),
        with_ids(
            revoked,
            reason=st.sampled_from(list(LeaseRevokeReason)),
            client_id=consumer_ids,
            role=st.sampled_from(list(Role)),
            lease_id=st.integers(0, 5),
        ),
        st.builds(alive, state=st.sampled_from(["running", "paused", "?"]), tag=st.sampled_from(["", "a", "b", "c"])),
    )


probes = st.builds(
    ProbeResult,
    stream_id=st.integers(1, 4),
    epoch=st.integers(1, 4),
    activity_age_ns=st.none() | st.integers(0, 10 * S),
    seq=st.none() | st.integers(0, 2**63),
    frame_bytes=st.none() | st.integers(0, 2**31),
    fault=st.none() | st.just("no"),
)


@settings(max_examples=120 * SOAK)
@given(st.lists(st.tuples(st.integers(0, 3 * S), messages() | probes), max_size=60))
def test_whatever_is_said_the_view_stays_whole(said: list[tuple[int, Message | ProbeResult]]) -> None:
    """Bounded, in order, encodable; what is shown is no older than it may be; nothing is raised."""
    view = a_view(**FEW)
    now_ns = 0
    for later_ns, message in said:
        now_ns += later_ns
        if isinstance(message, ProbeResult):
            view.on_probe_result(message, now_ns)
        else:
            view.on_message(message, now_ns)
    check(view, now_ns)
    check(view, now_ns + 3 * S)
    empty = view.snapshot(now_ns + 3600 * S)
    assert (empty.streams, empty.consumers, empty.leases, empty.services) == ((), (), (), ())


def check(view: View, now_ns: int) -> None:
    snapshot = view.snapshot(now_ns)
    assert to_json(snapshot, now_ns)
    assert len(snapshot.streams) <= FEW["max_streams"]
    assert len(snapshot.consumers) <= FEW["max_consumers"]
    assert len(snapshot.leases) <= FEW["max_leases"]
    assert len(snapshot.services) <= FEW["max_services"]
    numbers = [change.number for change in snapshot.changes]
    assert numbers == sorted(set(numbers))
    assert sum(snapshot.change_counts.values()) == (numbers[-1] if numbers else 0)
    present = [it for it in snapshot.consumers if it.state is not ConsumerState.EXPIRED]
    for stream in snapshot.streams:
        assert stream.consumers == sum(it.stream_id == stream.stream_id for it in present)
        assert stream.rate_hz is None or stream.rate_hz >= 0
        assert stream.announced_age_ns is None or stream.announced_age_ns >= 0
    for consumer in snapshot.consumers:
        assert consumer.age_ns >= 0
        assert consumer.lag is None or consumer.lag >= 0
        if consumer.state is ConsumerState.OK:
            assert consumer.age_ns <= STALE_NS
    for service in snapshot.services:
        assert service.is_stale == (service.age_ns >= STALE_NS)
