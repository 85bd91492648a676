# SPDX-License-Identifier: Apache-2.0
"""Leases: granted once, kept alive by their owner alone, ended once."""

from __future__ import annotations

from typing import Any

import pytest

from tensorpool.driver.leases import Keepalive, LeaseState, LeaseTable
from tensorpool.wire.driver import (
    HugepagesPolicy,
    Role,
    ShmAttachRequest,
    ShmDetachRequest,
    ShmLeaseKeepalive,
)

DURATION_NS = 3_000


def attach(client_id: int = 3, stream_id: int = 10, role: Role = Role.CONSUMER) -> ShmAttachRequest:
    return ShmAttachRequest(
        correlation_id=1,
        stream_id=stream_id,
        client_id=client_id,
        role=role,
        expected_layout_version=0,
        max_dims=0,
        require_hugepages=HugepagesPolicy.UNSPECIFIED,
    )


def keepalive(lease_id: int, **changes: Any) -> ShmLeaseKeepalive:
    fields = {"stream_id": 10, "client_id": 3, "role": Role.CONSUMER, "client_timestamp_ns": 0} | changes
    return ShmLeaseKeepalive(lease_id=lease_id, **fields)


def detach(lease_id: int, **changes: Any) -> ShmDetachRequest:
    fields = {"correlation_id": 9, "stream_id": 10, "client_id": 3, "role": Role.CONSUMER} | changes
    return ShmDetachRequest(lease_id=lease_id, **fields)


@pytest.fixture
def table() -> LeaseTable:
    return LeaseTable(DURATION_NS, first_lease_id=500)


@pytest.mark.spec("DRV-4.8-01", "DRV-4.8-02")
def test_lease_ids_grow_and_are_never_used_again(table: LeaseTable) -> None:
    """An id that was given out does not come back, however the lease ended."""
    ids = []
    for ending in (
        lambda lease: table.detach(detach(lease.lease_id)),
        lambda lease: table.revoke(lease.lease_id),
        lambda lease: table.expire(10_000),
        lambda lease: None,
    ):
        lease = table.grant(10, attach(), 0)
        ids.append(lease.lease_id)
        ending(lease)
    assert ids == [500, 501, 502, 503]


@pytest.mark.spec("DRV-4.7-01", "DRV-4.7-02", "DRV-4.4-03", "DRV-4.7-04")
def test_a_keepalive_makes_the_lease_active_and_moves_its_expiry(table: LeaseTable) -> None:
    """Expiry slides from the last valid keepalive, not from the grant."""
    lease = table.grant(10, attach(), 1_000)
    assert (lease.state, lease.expiry_ns) == (LeaseState.ATTACHED, 4_000)
    assert table.keepalive(keepalive(500), 3_999) is Keepalive.EXTENDED
    assert (lease.state, lease.expiry_ns) == (LeaseState.ACTIVE, 6_999)
    assert table.expire(6_998) == []
    assert table.expire(6_999) == [lease]
    assert lease.state is LeaseState.EXPIRED


@pytest.mark.spec("DRV-4.1-01", "DRV-4.9-03")
@pytest.mark.parametrize("wrong", [{"stream_id": 11}, {"client_id": 4}, {"role": Role.PRODUCER}])
def test_a_keepalive_or_detach_with_a_wrong_field_changes_nothing(table: LeaseTable, wrong: dict[str, object]) -> None:
    """The lease id alone is not enough: stream, client and role must be the lease's own."""
    lease = table.grant(10, attach(), 0)
    assert table.keepalive(keepalive(500, **wrong), 2_000) is Keepalive.WRONG_FIELDS
    assert table.detach(detach(500, **wrong)) is None
    assert (lease.state, lease.expiry_ns, len(table)) == (LeaseState.ATTACHED, 3_000, 1)


@pytest.mark.spec("DRV-4.1-03")
@pytest.mark.spec("DRV-4.4-04")
def test_no_keepalive_revives_a_dead_lease(table: LeaseTable) -> None:
    """After its end a lease is unknown: a late keepalive or a second detach finds nothing."""
    lease = table.grant(10, attach(), 0)
    assert table.expire(3_000) == [lease]
    assert table.keepalive(keepalive(500), 3_001) is Keepalive.UNKNOWN_LEASE
    assert table.detach(detach(500)) is None
    assert table.revoke(500) is None
    assert table.of_client(3) is None


def test_a_client_holds_one_lease(table: LeaseTable) -> None:
    """Granting a second one is a mistake of the caller and is refused."""
    table.grant(10, attach(), 0)
    with pytest.raises(ValueError, match="client 3 already holds lease 500"):
        table.grant(11, attach(stream_id=11), 0)


@pytest.mark.spec("DRV-4.7-04", "DRV-4.1-03")
def test_expiry_is_found_whatever_was_skipped_before(table: LeaseTable) -> None:
    """The bound that makes idle turns free never hides an expiry, also not of a lease granted after others."""
    early = table.grant(10, attach(client_id=1), 0)
    table.keepalive(keepalive(early.lease_id, client_id=1), 2_000)
    assert table.expire(3_500) == []
    late = table.grant(10, attach(client_id=2), 3_600)
    assert table.expire(4_999) == []
    assert table.expire(5_000) == [early]
    assert table.no_expiry_before_ns <= late.expiry_ns
    assert table.expire(6_600) == [late]


def test_forgiveness_gives_everybody_a_whole_grace_period(table: LeaseTable) -> None:
    """After a stall of the driver no lease ends before a full duration has passed."""
    lease = table.grant(10, attach(), 0)
    table.forgive(50_000)
    assert table.expire(52_999) == []
    assert table.expire(53_000) == [lease]


def test_a_silent_lease_is_forgiven_once(table: LeaseTable) -> None:
    """However often the driver stalls, a lease without keepalives ends; a keepalive earns the next forgiveness."""
    lease = table.grant(10, attach(), 0)
    table.forgive(2_000)
    table.forgive(4_000)
    assert lease.expiry_ns == 5_000
    table.keepalive(keepalive(500), 4_500)
    table.forgive(6_000)
    assert lease.expiry_ns == 9_000
    table.forgive(8_000)
    assert table.expire(9_000) == [lease]
