# SPDX-License-Identifier: Apache-2.0
"""The view: what is known of streams, consumers, leases and services, and what changed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tensorpool.supervisor.encoding import to_json
from tensorpool.supervisor.snapshot import ChangeKind, ConsumerState, ConsumerStatus, StreamState
from tensorpool.supervisor.view import ProbeResult, View
from tensorpool.wire.control import Attribute, ClockDomain, DataSourceMeta, FrameDescriptor, Mode
from tensorpool.wire.driver import LeaseRevokeReason, Role, ShmDriverShutdown, ShutdownReason
from tests.supervisor.conftest import (
    CONSUMER,
    PRODUCER,
    STALE_NS,
    STREAM,
    S,
    a_view,
    alive,
    announce,
    configured,
    consumed,
    consumer_of,
    hello,
    kept,
    kinds_of,
    named,
    produced,
    revoked,
    stream_of,
)


def run(view: View, seconds: int, hz: int = 100, begin: int = 0, **reports: Any) -> int:
    """A producer and consumers that keep up, for so long; the time it is then."""
    for second in range(begin, begin + seconds):
        now_ns = second * S
        view.on_message(announce(now_ns=now_ns), now_ns)
        view.on_message(produced(second * hz), now_ns)
        for consumer_id in reports.get("consumers", (CONSUMER,)):
            view.on_message(consumed(second * hz, consumer_id), now_ns)
        view.tick(now_ns)
    return (begin + seconds - 1) * S


# --- streams


def test_a_stream_shows_everything_that_messages_say_about_it(view: View) -> None:
    """Name, rate, epoch, producer, seq, ages, layout, metadata."""
    view.on_message(named("camera/front", summary="uint8 480x640"), 0)
    tags = Attribute(key="tags", format="application/json", value=b'["lab1", "day"]')
    view.on_message(DataSourceMeta(stream_id=STREAM, meta_version=3, timestamp_ns=0, attributes=(tags,)), 0)
    now_ns = run(view, 5)
    view.on_probe_result(
        ProbeResult(stream_id=STREAM, epoch=1, activity_age_ns=7, seq=400, frame_bytes=4096, dtype="uint8"), now_ns
    )
    found = stream_of(view, now_ns + 5)
    assert (found.name, found.summary, found.tags, found.meta_version) == (
        "camera/front",
        "uint8 480x640",
        ("lab1", "day"),
        3,
    )
    assert (found.state, found.epoch, found.producer_id, found.seq) == (StreamState.LIVE, 1, PRODUCER, 400)
    assert found.rate_hz == pytest.approx(100)
    assert found.bytes_per_s == pytest.approx(409_600)
    assert (found.announced_age_ns, found.frame_age_ns, found.activity_age_ns) == (5, 5, 12)
    assert (found.nslots, found.layout_version, found.consumers, found.layout_flaw) == (64, 1, 1, None)
    assert [(pool.pool_id, pool.stride_bytes) for pool in found.pools] == [(1, 4096)]


def test_a_foreign_producer_without_name_metadata_and_qos_is_a_stream_like_any_other(view: View) -> None:
    """An announce is enough; probes of its ring, or descriptors, give its rate."""
    for second in range(4):
        view.on_message(announce(now_ns=second * S), second * S)
    found = stream_of(view, 3 * S)
    assert (found.name, found.seq, found.rate_hz, found.producer_id) == (None, None, None, PRODUCER)
    assert not view.needs_descriptors(3 * S)
    view.on_message(announce(now_ns=5 * S), 5 * S)
    assert view.needs_descriptors(5 * S)
    for second in range(5, 8):
        view.on_message(announce(now_ns=second * S), second * S)
        view.on_message(FrameDescriptor(stream_id=STREAM, epoch=1, seq=30 * second), second * S)
    found = stream_of(view, 7 * S)
    assert (found.state, found.seq) == (StreamState.LIVE, 210)
    assert found.rate_hz == pytest.approx(30)
    assert view.needs_descriptors(7 * S)
    view.on_probe_result(ProbeResult(stream_id=STREAM, epoch=1, activity_age_ns=0, seq=211), 7 * S)
    assert not view.needs_descriptors(7 * S)


def test_a_stream_without_announces_is_shown_by_its_producers_reports(view: View) -> None:
    """The announce may be lost, or on a channel that the observer does not read."""
    view.on_message(produced(5), 0)
    found = stream_of(view, S)
    assert (found.seq, found.producer_id, found.announced_age_ns, found.nslots) == (5, PRODUCER, None, None)
    assert stream_of(view, STALE_NS + 1).state is StreamState.STALE
    view.on_message(produced(6), STALE_NS + 2)
    assert stream_of(view, STALE_NS + 2).state is not StreamState.STALE


def test_a_stream_is_stale_after_four_silent_periods_and_forgotten_later(view: View) -> None:
    """To the nanosecond; coming back is recorded too."""
    view.on_message(announce(), 0)
    assert stream_of(view, STALE_NS).state is not StreamState.STALE
    assert stream_of(view, STALE_NS + 1).state is StreamState.STALE
    view.on_message(announce(now_ns=2 * STALE_NS), 2 * STALE_NS)
    assert stream_of(view, 2 * STALE_NS).state is not StreamState.STALE
    gone_ns = 2 * STALE_NS + 60 * S
    assert stream_of(view, gone_ns).state is StreamState.STALE
    assert view.snapshot(gone_ns + 1).streams == ()
    assert kinds_of(view) == [
        ChangeKind.STREAM_APPEARED,
        ChangeKind.STREAM_STALE,
        ChangeKind.STREAM_FRESH,
        ChangeKind.STREAM_STALE,
        ChangeKind.STREAM_VANISHED,
    ]


def test_a_producer_that_is_killed_and_restarted_is_recorded_step_by_step(view: View) -> None:
    """Its epoch ends, another begins; the name stays until the next producer says otherwise."""
    view.on_message(named("camera/front"), 0)
    now_ns = run(view, 4)
    view.on_message(announce(now_ns=now_ns, epoch=2, producer_id=0), now_ns)
    found = stream_of(view, now_ns)
    assert (found.state, found.producer_id, found.epoch, found.seq, found.rate_hz, found.name) == (
        StreamState.NO_PRODUCER,
        None,
        2,
        None,
        None,
        "camera/front",
    )
    view.on_message(produced(500), now_ns)  # the zombie's
    assert stream_of(view, now_ns).seq is None
    view.on_message(announce(now_ns=now_ns, epoch=3, producer_id=12), now_ns)
    view.on_message(produced(4, epoch=3, producer_id=12), now_ns)
    found = stream_of(view, now_ns)
    assert (found.epoch, found.producer_id, found.seq, found.name) == (3, 12, 4, "camera/front")
    view.on_message(named("", epoch=3, producer_id=12), now_ns)
    assert stream_of(view, now_ns).name is None
    changes = [change for change in view.history.changes if change.kind is not ChangeKind.CONSUMER_APPEARED]
    assert [change.kind for change in changes] == [
        ChangeKind.STREAM_APPEARED,
        ChangeKind.EPOCH_CHANGED,
        ChangeKind.PRODUCER_LEFT,
        ChangeKind.EPOCH_CHANGED,
        ChangeKind.PRODUCER_ATTACHED,
    ]
    assert changes[1].text == f"camera/front ({STREAM}): epoch 1 -> 2"


def test_announces_that_are_too_old_or_of_an_earlier_epoch_are_passed_over(view: View) -> None:
    """C1, C15: what the log replays must not take the view back, until the epoch in sight is stale."""
    view.on_message(announce(now_ns=10 * S, epoch=5), 10 * S)
    view.on_message(announce(now_ns=10 * S, epoch=4), 10 * S)
    view.on_message(announce(now_ns=6 * S, epoch=6), 10 * S)
    view.on_message(announce(now_ns=14 * S, epoch=6), 10 * S)
    assert stream_of(view, 10 * S).epoch == 5
    assert (view.counts["announces_of_earlier_epochs"], view.counts["announces_too_old"]) == (1, 2)
    later_ns = 10 * S + STALE_NS + 1
    view.on_message(announce(now_ns=later_ns, epoch=4), later_ns)
    assert stream_of(view, later_ns).epoch == 4


def test_the_stamps_of_other_hosts_and_of_synchronised_clocks_are_judged_by_their_own_clock() -> None:
    """C6, §10.1.1."""
    remote = View(a_view_config(), is_local=False)
    remote.on_message(announce(now_ns=10**15), 0)
    assert stream_of(remote, 0).epoch == 1
    view = a_view()
    domain = ClockDomain.REALTIME_SYNCED
    view.on_message(announce(now_ns=10**18, announce_clock_domain=domain), 0, wall_ns=10**18 + 3 * S + 1)
    assert view.snapshot(0).streams == ()
    view.on_message(announce(now_ns=10**18, announce_clock_domain=domain), 0, wall_ns=10**18 + 3 * S)
    assert stream_of(view, 0).epoch == 1


def a_view_config() -> Any:
    from tensorpool.supervisor.config import SupervisorConfig

    return SupervisorConfig.load(environ={})


@pytest.mark.parametrize(
    "changed", [{"stream_id": 0}, {"stream_id": 2**32 - 1}, {"epoch": 0}, {"epoch": 2**64 - 1}], ids=str
)
def test_announces_without_a_stream_or_epoch_are_counted(view: View, changed: dict[str, int]) -> None:
    """C17: those are no ids."""
    view.on_message(announce(**changed), 0)
    assert view.snapshot(0).streams == ()
    assert view.counts["announces_without_stream_or_epoch"] == 1


def test_a_layout_that_no_client_could_map_is_shown_with_its_flaw(view: View) -> None:
    """The stream is there all the same."""
    view.on_message(announce(header_nslots=63), 0)
    found = stream_of(view, 0)
    assert found.layout_flaw is not None
    assert "nslots" in found.layout_flaw
    assert list(view.probe_targets()) == []


def test_an_announce_cannot_fill_the_memory_nor_a_report_claim_the_epoch(view: View) -> None:
    """Paths without end are not kept; what a report said of the epoch ends with the first announce."""
    view.on_message(produced(5, epoch=2**63), 0)
    pool = announce().payload_pools[0]
    many = tuple(msgspec.structs.replace(pool, pool_id=number, region_uri="x" * 5000) for number in range(65))
    view.on_message(announce(payload_pools=many[:1], header_region_uri="shm:file?path=/" + "y" * 20_000), 0)
    found = stream_of(view, 0)
    assert (found.epoch, found.seq, found.header_region_uri) == (1, None, "")
    assert found.layout_flaw is not None
    view.on_message(announce(payload_pools=many), 0)
    found = stream_of(view, 0)
    assert len(found.pools) == 64
    assert "at most 64 pools" in (found.layout_flaw or "")
    assert view.history.counts[ChangeKind.EPOCH_CHANGED] == 0
    assert not any("xxx" in str(place) for place in view.probe_targets())
    view.on_message(announce(), 0)
    assert stream_of(view, 0).layout_flaw is None


def test_stale_memory_is_a_stale_stream_however_often_it_is_announced(view: View) -> None:
    """§15.14: memory that is no longer refreshed has a dead owner."""
    now_ns = run(view, 6)
    view.on_probe_result(ProbeResult(stream_id=STREAM, epoch=1, activity_age_ns=STALE_NS), now_ns)
    assert stream_of(view, now_ns).state is StreamState.LIVE
    view.on_probe_result(ProbeResult(stream_id=STREAM, epoch=1, activity_age_ns=STALE_NS + 1), now_ns)
    assert stream_of(view, now_ns + 1).state is StreamState.STALE
    view.on_probe_result(ProbeResult(stream_id=STREAM, epoch=1, activity_age_ns=None), now_ns)
    assert stream_of(view, now_ns + 2).state is StreamState.STALE
    view.on_message(announce(now_ns=now_ns, epoch=2), now_ns)
    assert stream_of(view, now_ns + 3).state is not StreamState.STALE
    assert view.history.changes[-2].text.endswith("epoch 1 -> 2")


def test_a_probe_of_another_epoch_is_ignored_and_a_fault_is_shown(view: View) -> None:
    """The probed epoch may have been retired in the meantime."""
    run(view, 3)
    view.on_probe_result(ProbeResult(stream_id=STREAM, epoch=9, activity_age_ns=None, seq=10_000), 3 * S)
    view.on_probe_result(ProbeResult(stream_id=1, epoch=1), 3 * S)
    assert stream_of(view, 3 * S).seq == 200
    view.on_probe_result(ProbeResult(stream_id=STREAM, epoch=1, fault="permission: no"), 3 * S)
    found = stream_of(view, 3 * S)
    assert (found.region_fault, found.activity_age_ns, found.state) == ("permission: no", None, StreamState.LIVE)


# --- consumers


def test_lag_is_measured_at_the_time_of_the_report(view: View) -> None:
    """Producer and consumer report a second apart: who keeps up has no lag, whenever it says so."""
    run(view, 5)
    view.on_message(consumed(450), 4 * S + S // 2)
    assert consumer_of(view, 4 * S + S // 2).lag == 0
    view.on_message(produced(500), 5 * S)
    assert consumer_of(view, 5 * S).lag == 0
    view.on_message(consumed(420), 5 * S)
    assert consumer_of(view, 5 * S).lag == 80


def test_before_the_stream_is_measured_no_consumer_lags(view: View) -> None:
    """Its report came first: how far the producer was then is not known, and how much is too much neither."""
    view.on_message(announce(), 0)
    view.on_message(consumed(1000), S // 2)
    view.on_message(produced(1400), S)
    found = consumer_of(view, S)
    assert (found.lag, found.is_lagging) == (None, False)
    view.on_message(consumed(1350), S)
    found = consumer_of(view, S + 1)
    assert (found.lag, found.is_lagging) == (50, False)  # of how many a second?
    view.on_message(produced(1900), 3 * S // 2)
    view.on_message(consumed(1850), 3 * S // 2)
    found = consumer_of(view, 3 * S // 2)
    assert (found.lag, found.is_lagging) == (50, False)  # of a thousand a second: a twentieth of a second
    view.on_message(consumed(1600), 3 * S // 2)
    assert consumer_of(view, 3 * S // 2 + 1).is_lagging


def test_a_consumer_that_attaches_late_is_not_behind_before_it_reads(view: View) -> None:
    """B31: it reports 0 until its first frame. One that still reports it a second later does not read: it lags."""
    run(view, 5)
    view.on_message(hello(7), 5 * S)
    view.on_message(consumed(0, 7), 5 * S)
    view.on_message(produced(500), 5 * S)

    def late(now_ns: int, consumer_id: int = 7) -> ConsumerStatus:
        return next(found for found in view.snapshot(now_ns).consumers if found.consumer_id == consumer_id)

    assert (late(5 * S).lag, late(5 * S + 1).state) == (None, ConsumerState.OK)
    view.on_message(consumed(0, 8), 5 * S + 1)
    view.on_message(consumed(490, 8), 5 * S + S // 5)
    assert late(5 * S + S // 5, 8).lag == 10  # with its first frame
    view.on_message(produced(600), 6 * S)
    view.on_message(consumed(0, 7), 6 * S)
    assert (late(6 * S).lag, late(6 * S).state) == (600, ConsumerState.LAGGING)
    view.on_message(consumed(600, 7), 6 * S)
    assert late(6 * S + 1).lag == 0


def test_a_consumer_that_falls_behind_lags_until_it_stays_level(view: View) -> None:
    """Half the ring is too much; level for a moment is not caught up."""
    run(view, 5)
    for second, behind in enumerate([10, 40, 50, 0, 40, 0, 0, 0, 0, 0, 0, 0], start=5):
        now_ns = second * S
        view.on_message(announce(now_ns=now_ns), now_ns)
        view.on_message(produced(100 * second), now_ns)
        view.on_message(consumed(100 * second - behind), now_ns)
        view.tick(now_ns)
    kinds = [kind for kind in kinds_of(view) if "lag" in kind or "caught" in kind]
    assert kinds == [ChangeKind.CONSUMER_LAGGING, ChangeKind.CONSUMER_CAUGHT_UP]
    lagging = next(change for change in view.history.changes if change.kind is ChangeKind.CONSUMER_LAGGING)
    assert (lagging.at_ns, lagging.text) == (6 * S, f"consumer {CONSUMER} of stream {STREAM}: is 40 frames behind")
    caught_up = next(change for change in view.history.changes if change.kind is ChangeKind.CONSUMER_CAUGHT_UP)
    assert caught_up.at_ns == 15 * S


def test_who_leaves_frames_out_on_purpose_does_not_lag(view: View) -> None:
    """B28: RATE_LIMITED skips; how far it may be behind follows from its rate."""
    run(view, 5)
    view.on_message(hello(mode=Mode.RATE_LIMITED, max_rate_hz=2), 4 * S)
    view.on_message(consumed(270, mode=Mode.RATE_LIMITED), 4 * S)
    found = consumer_of(view, 4 * S)
    assert (found.mode, found.max_rate_hz, found.lag, found.is_lagging, found.rate_hz) == (
        "RATE_LIMITED",
        2,
        130,
        False,
        None,
    )
    view.on_message(consumed(200, mode=Mode.RATE_LIMITED), 4 * S)
    assert consumer_of(view, 4 * S + 1).is_lagging


def test_drops_are_recorded_when_they_begin_and_when_they_end(view: View) -> None:
    """Not with every report; what was lost before we came is no news."""
    run(view, 2)
    view.on_message(consumed(100, 7, drops_gap=1000), S)
    assert not consumer_of(view, S, 7).is_dropping
    for second in range(2, 14):
        now_ns = second * S
        view.on_message(announce(now_ns=now_ns), now_ns)
        view.on_message(produced(100 * second), now_ns)
        lost = min(second - 1, 5) * 10
        view.on_message(consumed(100 * second, drops_gap=lost - 4, drops_late=4), now_ns)
        view.on_message(consumed(100 * second, 7, drops_gap=1000), now_ns)
        view.tick(now_ns)
    found = consumer_of(view, 13 * S)
    assert (found.drops_gap, found.drops_late, found.is_dropping, found.state) == (46, 4, False, ConsumerState.OK)
    words = [change.text for change in view.history.changes if "drop" in change.kind]
    assert words == [
        f"consumer {CONSUMER} of stream {STREAM}: lost 10 frames (gap 6, late 4)",
        f"consumer {CONSUMER} of stream {STREAM}: lost 50 frames, none lately",
    ]


def test_the_rate_of_a_consumer_is_what_it_accepts(view: View) -> None:
    """Its seqs without those it lost."""
    for second in range(8):
        now_ns = second * S
        view.on_message(announce(now_ns=now_ns), now_ns)
        view.on_message(produced(100 * second), now_ns)
        view.on_message(consumed(100 * second, drops_late=60 * second), now_ns)
    found = consumer_of(view, 7 * S)
    assert found.rate_hz == pytest.approx(40)
    assert found.drops_per_s == pytest.approx(60)
    assert found.state is ConsumerState.DROPPING


def test_a_frozen_consumer_is_stale_and_then_expired(view: View) -> None:
    """It says nothing any more; by then the lag is what was produced since."""
    view.on_message(kept(), 0)
    now_ns = run(view, 4)
    run(view, 6, begin=4, consumers=())
    found = consumer_of(view, 9 * S)
    assert (found.state, found.lag, found.age_ns) == (ConsumerState.STALE, 600, 9 * S - now_ns)
    view.on_message(revoked(LeaseRevokeReason.EXPIRED), 9 * S)
    assert consumer_of(view, 9 * S).state is ConsumerState.EXPIRED
    assert stream_of(view, 9 * S).consumers == 0
    view.on_message(consumed(300), 9 * S)  # it woke up and has not noticed
    view.on_message(kept(), 9 * S)
    assert consumer_of(view, 9 * S).state is ConsumerState.EXPIRED
    view.on_message(kept(lease_id=6), 9 * S)
    assert consumer_of(view, 9 * S).state is ConsumerState.OK
    assert [kind for kind in kinds_of(view) if "consumer" in kind] == [
        ChangeKind.CONSUMER_APPEARED,
        ChangeKind.CONSUMER_STALE,
        ChangeKind.CONSUMER_EXPIRED,
        ChangeKind.CONSUMER_VANISHED,
        ChangeKind.CONSUMER_APPEARED,
    ]


def test_an_expired_consumer_is_shown_for_a_while() -> None:
    """So that an operator can see it."""
    view = a_view(forget_ms=10_000)
    view.on_message(kept(), 0)
    view.on_message(revoked(LeaseRevokeReason.REVOKED, error_message="by the operator"), S)
    assert view.history.changes[-1].text.endswith("lease REVOKED: by the operator")
    assert consumer_of(view, 11 * S - 1).state is ConsumerState.EXPIRED
    assert view.snapshot(11 * S).consumers == ()


def test_a_consumer_that_detaches_is_gone_at_once_and_late_messages_do_not_bring_it_back(view: View) -> None:
    """QoS and leases travel on different streams."""
    view.on_message(kept(), 0)
    view.on_message(consumed(5), 0)
    view.on_message(revoked(LeaseRevokeReason.DETACHED), S)
    view.on_message(consumed(6), S)
    view.on_message(hello(), S)
    assert view.snapshot(S).consumers == ()
    assert view.snapshot(S).leases == ()
    assert kinds_of(view)[-1] is ChangeKind.CONSUMER_VANISHED
    view.on_message(kept(lease_id=6), S)
    assert consumer_of(view, S).lease_id == 6


def test_foreign_consumers_that_only_hold_a_lease_or_only_report_are_shown(view: View) -> None:
    """Hello, QoS and keepalives: any of them is enough."""
    view.on_message(kept(1), 0)
    view.on_message(consumed(5, 2), 0)
    view.on_message(hello(3), 0)
    found = view.snapshot(0).consumers
    assert [(it.consumer_id, it.lease_id, it.last_seq, it.mode) for it in found] == [
        (1, 5, None, None),
        (2, None, 5, "STREAM"),
        (3, None, None, "STREAM"),
    ]
    assert {it.state for it in view.snapshot(STALE_NS + 1).consumers} == {ConsumerState.STALE}
    view.on_message(consumed(6, 2), 2 * STALE_NS)
    assert consumer_of(view, 2 * STALE_NS, 2).state is ConsumerState.OK


def test_a_consumer_config_is_recorded_once(view: View) -> None:
    """A producer repeats its answer to each hello."""
    view.on_message(hello(descriptor_channel="aeron:ipc", descriptor_stream_id=9), 0)
    for _ in range(3):
        view.on_message(configured(descriptor_channel="aeron:ipc", descriptor_stream_id=9), 0)
    assert ChangeKind.CONSUMER_CONFIGURED not in kinds_of(view)
    view.on_message(configured(use_shm=False, payload_fallback_uri="bridge://b1"), 0)
    view.on_message(configured(use_shm=False, payload_fallback_uri="bridge://b1"), 0)
    found = consumer_of(view, 0)
    assert (found.state, found.fallback_uri) == (ConsumerState.REDIRECTED, "bridge://b1")
    view.on_message(configured(), 0)
    assert consumer_of(view, 0).state is ConsumerState.OK
    assert kinds_of(view).count(ChangeKind.CONSUMER_CONFIGURED) == 2
    view.on_message(configured(4711), 0)  # an unknown consumer
    assert len(view.snapshot(0).consumers) == 1


# --- leases, the driver, services


def test_leases_are_known_by_their_keepalives(view: View) -> None:
    """Of both roles, until they end or are silent for long."""
    view.on_message(kept(PRODUCER, Role.PRODUCER, 1), 0)
    view.on_message(kept(CONSUMER, Role.CONSUMER, 2), S)
    found = view.snapshot(2 * S).leases
    assert [(it.lease_id, it.client_id, it.role, it.age_ns, it.held_ns) for it in found] == [
        (1, PRODUCER, "PRODUCER", 2 * S, 2 * S),
        (2, CONSUMER, "CONSUMER", S, S),
    ]
    view.on_message(revoked(LeaseRevokeReason.EXPIRED, PRODUCER, Role.PRODUCER, 1), 2 * S)
    assert [it.lease_id for it in view.snapshot(2 * S).leases] == [2]
    assert view.snapshot(20 * S).leases == ()
    view.on_message(kept(lease_id=3), 20 * S)
    view.on_message(ShmDriverShutdown(timestamp_ns=0, reason=ShutdownReason.ADMIN, error_message="bye"), 20 * S)
    assert view.snapshot(20 * S).leases == ()
    assert view.history.changes[-1].text == "the driver ended, ADMIN: bye"


def test_services_are_known_by_their_heartbeats(view: View) -> None:
    """Their state, a restart, silence."""
    view.on_message(alive(), 0)
    view.on_message(alive("paused"), S)
    (found,) = view.snapshot(S).services
    assert (found.tag, found.service, found.instance, found.state, found.pid) == (
        "service:bridge:b1",
        "bridge",
        "b1",
        "paused",
        7,
    )
    view.on_message(alive("running", pid=8), 2 * S)
    assert not view.snapshot(2 * S + STALE_NS - 1).services[0].is_stale
    assert view.snapshot(2 * S + STALE_NS).services[0].is_stale
    view.on_message(alive("running", pid=8), 10 * S)
    assert not view.snapshot(10 * S).services[0].is_stale
    assert view.snapshot(71 * S).services == ()
    assert [(change.kind, change.text.partition(": ")[2]) for change in view.history.changes] == [
        (ChangeKind.SERVICE_APPEARED, "is running"),
        (ChangeKind.SERVICE_STATE, "running -> paused"),
        (ChangeKind.SERVICE_STATE, "pid 7 -> 8"),
        (ChangeKind.SERVICE_STATE, "paused -> running"),
        (ChangeKind.SERVICE_STALE, "no heartbeat for 4 s"),
        (ChangeKind.SERVICE_FRESH, "sends messages again"),
        (ChangeKind.SERVICE_STALE, "no heartbeat for 4 s"),
        (ChangeKind.SERVICE_VANISHED, "is forgotten"),
    ]


@pytest.mark.parametrize("value", [b"", b"{", b"[]", b"\xff", b'{"service": 5}', b"9" * 5000], ids=range(6))
def test_heartbeats_that_say_something_else_are_counted(view: View, value: bytes) -> None:
    """Nothing of them is shown."""
    view.on_message(msgspec.structs.replace(alive(), value=value), 0)
    view.on_message(msgspec.structs.replace(alive(), tag=""), 0)
    view.on_message(msgspec.structs.replace(alive(), key="progress"), 0)
    assert view.snapshot(0).services == ()
    assert view.counts["heartbeats_malformed"] == 2


# --- the whole


def test_names_that_are_no_text_become_text(view: View) -> None:
    """A13: a name is bytes; JSON is not."""
    view.on_message(announce(), 0)
    view.on_message(named("caf\udce9\x1b[2J" + "x" * 300), 0)
    found = stream_of(view, 0)
    assert found.name is not None
    assert found.name.startswith("caf\\xe9\x1b[2Jxxx")
    assert len(found.name) < 300
    assert b"caf" in to_json(view.snapshot(0), 0)


def test_the_json_of_a_snapshot_has_times_of_day(view: View) -> None:
    """And everything else that the snapshot has."""
    view.on_message(announce(now_ns=5 * S), 5 * S)
    view.on_message(consumed(3), 5 * S)
    fields = msgspec.json.decode(to_json(view.snapshot(6 * S), 1_000 * S))
    assert fields["time_ns"] == 1_000 * S
    assert fields["changes"][0] == {
        "number": 1,
        "time_ns": 999 * S,
        "kind": "stream appeared",
        "text": f"stream {STREAM}: is there",
        "stream_id": STREAM,
        "consumer_id": None,
        "service": None,
    }
    assert fields["streams"][0]["announced_age_ns"] == S
    assert fields["consumers"][0]["state"] == "ok"
    assert fields.keys() == {
        *("time_ns", "streams", "consumers", "leases", "services", "changes"),
        *("change_counts", "message_counts", "overflow"),
    }
