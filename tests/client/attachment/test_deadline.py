# SPDX-License-Identifier: Apache-2.0
"""Keepalives, and the deadline until which a lease may be used."""

from __future__ import annotations

import pytest

from tensorpool.client.attachment import LossReason
from tensorpool.client.attachment_phases import Phase
from tensorpool.wire.driver import ShmLeaseKeepalive
from tests.client.attachment.conftest import KEEPALIVE_NS, LEASE_NS, T0, WALL, Bench, attach_request, lost
from tests.client.conftest import MS, SECOND_NS, STREAM, revoked


@pytest.mark.spec("DRV-4.4-02", "DRV-4.2-31")
@pytest.mark.parametrize("lease_ns", [None, LEASE_NS], ids=["no deadline", "deadline"])
def test_keepalives_are_due_at_once_and_then_at_the_interval(bench: Bench, lease_ns: int | None) -> None:
    """With a deadline or without one."""
    bench.attach(lease_ns=lease_ns)
    first = bench.keep(T0)
    assert first == ShmLeaseKeepalive(
        lease_id=77,
        stream_id=STREAM,
        client_id=bench.attachment.client_id,
        role=bench.attachment.spec.role,
        client_timestamp_ns=T0,
    )
    assert bench.keep(T0 + KEEPALIVE_NS - 1) is None
    assert bench.keep(T0 + KEEPALIVE_NS) is not None
    late_ns = T0 + KEEPALIVE_NS + 300 * MS
    assert bench.keep(late_ns + KEEPALIVE_NS) is not None
    assert bench.keep(late_ns + 2 * KEEPALIVE_NS - 1) is None


@pytest.mark.spec("DRV-4.4-02")
def test_a_lease_that_is_shorter_than_the_interval_is_kept_too(bench: Bench) -> None:
    """§4.4: keepalives come before the deadline, whatever is configured."""
    lease_ns = KEEPALIVE_NS // 2
    bench.attach(lease_ns=lease_ns)
    for now_ns in range(T0, T0 + 5 * KEEPALIVE_NS, lease_ns // 5):
        bench.hear(now_ns)
        assert bench.attachment.on_tick(now_ns) == []
        bench.keep(now_ns)
    assert bench.attachment.is_attached


@pytest.mark.spec("DRV-4.2-30", "DRV-4.7-07", "DRV-4.13-14")
def test_a_lease_ends_at_its_deadline_by_itself(bench: Bench) -> None:
    """Not a nanosecond later, whether or not the driver says so."""
    bench.attach()
    assert bench.attachment.on_tick(T0 + LEASE_NS - 1) == []
    bench.hear(T0 + LEASE_NS - 1)
    loss = lost(bench.attachment.on_tick(T0 + LEASE_NS))
    assert loss.reason is LossReason.EXPIRED
    assert bench.attachment.lease_id is None
    assert bench.attachment.keepalive(T0 + LEASE_NS, T0 + LEASE_NS) is None
    attach_request(bench.attachment.on_tick(bench.attachment.next_ns))


@pytest.mark.spec("DRV-4.2-30", "DRV-4.4-02")
def test_the_deadline_slides_with_each_keepalive_that_was_sent(bench: Bench) -> None:
    """E4: by the whole duration of the lease from then on."""
    bench.attach()
    sent_ns = T0
    for now_ns in range(T0, T0 + 10 * SECOND_NS, 700 * MS):
        bench.hear(now_ns)
        assert bench.attachment.on_tick(now_ns) == []
        if bench.keep(now_ns) is not None:
            sent_ns = now_ns
    end_ns = sent_ns + LEASE_NS
    bench.hear(end_ns - 1)
    assert bench.attachment.on_tick(end_ns - 1) == []
    assert lost(bench.attachment.on_tick(end_ns)).reason is LossReason.EXPIRED


@pytest.mark.spec("DRV-4.2-30")
def test_a_keepalive_that_could_not_be_sent_slides_nothing(bench: Bench) -> None:
    """E7: back pressure is retried at every turn, and the deadline stays where it was."""
    bench.attach()
    for now_ns in range(T0, T0 + LEASE_NS, 250 * MS):
        bench.hear(now_ns)
        assert bench.attachment.on_tick(now_ns) == []
        assert bench.attachment.keepalive(now_ns, now_ns) is not None
        assert bench.attachment.on_keepalive_failed(is_connected=True, now_ns=now_ns) == []
    assert lost(bench.attachment.on_tick(T0 + LEASE_NS)).reason is LossReason.EXPIRED


@pytest.mark.parametrize("by", ["monotonic", "wall"])
def test_the_expiry_may_be_by_either_clock(bench: Bench, by: str) -> None:
    """C8: the clock is not declared, so the nearer one counts."""
    bench.start()
    base_ns = T0 if by == "monotonic" else WALL + T0
    bench.answer(T0, lease_expiry_timestamp_ns=base_ns + LEASE_NS)
    assert bench.attachment.on_tick(T0 + LEASE_NS - 1) == []
    assert lost(bench.attachment.on_tick(T0 + LEASE_NS)).reason is LossReason.EXPIRED


@pytest.mark.spec("DRV-4.2-32")
def test_a_lease_without_deadline_lasts_while_the_driver_announces(bench: Bench) -> None:
    """Until it is revoked; keepalives go on all the same."""
    bench.attach(lease_ns=None)
    now_ns = T0
    for _ in range(100):
        now_ns += SECOND_NS
        bench.hear(now_ns)
        assert bench.attachment.on_tick(now_ns) == []
        assert bench.keep(now_ns) is not None
    notice = revoked(77, bench.attachment.client_id, bench.attachment.spec.role)
    assert lost(bench.attachment.on_revoked(notice, now_ns)).reason is LossReason.EXPIRED


@pytest.mark.spec("DRV-4.4-06")
def test_a_lease_ends_when_no_driver_listens_for_more_than_an_interval(bench: Bench) -> None:
    """E7: counted from the first failure, forgotten when one gets through."""
    bench.attach(lease_ns=None)
    fail = bench.attachment.on_keepalive_failed
    assert fail(is_connected=False, now_ns=T0) == []
    assert fail(is_connected=False, now_ns=T0 + KEEPALIVE_NS) == []
    bench.attachment.on_keepalive_sent(T0 + KEEPALIVE_NS)
    assert fail(is_connected=False, now_ns=T0 + 2 * KEEPALIVE_NS) == []
    assert fail(is_connected=True, now_ns=T0 + 2 * KEEPALIVE_NS + 1) == []  # the driver listens again: back pressure
    assert fail(is_connected=False, now_ns=T0 + 3 * KEEPALIVE_NS) == []
    assert fail(is_connected=False, now_ns=T0 + 4 * KEEPALIVE_NS) == []
    assert lost(fail(is_connected=False, now_ns=T0 + 4 * KEEPALIVE_NS + 1)).reason is LossReason.DRIVER_GONE
    assert bench.attachment.phase is Phase.BACKOFF
