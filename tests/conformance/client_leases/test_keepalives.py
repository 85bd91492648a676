# SPDX-License-Identifier: Apache-2.0
"""How a client keeps its lease, and how it gives it back. Driver Model §4.4, §4.4a, §4.8."""

from __future__ import annotations

import itertools
import struct
import time
from contextlib import ExitStack
from typing import Any

import pytest

import tensorpool as tp
from tensorpool.client import Client, Consumer
from tensorpool.wire.control import ConsumerHello
from tensorpool.wire.driver import Role, ShmDetachRequest, ShmLeaseKeepalive
from tests.conformance.client_leases.conftest import (
    FRAME,
    KEEPALIVE_MS,
    Bench,
    both_roles,
    own_id,
    requests_of,
    start,
    wait_works,
    works,
)
from tests.support.listener import ReceivedMessage
from tests.support.processes import wait_until
from tests.support.wire_producer import WireProducer

# --- keeping


@pytest.mark.spec("DRV-4.2-30")
@both_roles
def test_a_lease_is_not_used_after_its_deadline(bench: Bench, peer: WireProducer, role: Role) -> None:
    """A client whose conductor does not get its turn sends no keepalive: at the deadline it stops using the memory."""
    peer.lease_ns = lease_ns = 400_000_000
    client = bench.connect(conductor="invoked")
    session = start(client, peer, role)
    wait_works(session, peer, client)
    lease_id = session.lease_id
    peer.wait_for(ShmLeaseKeepalive, lease_id=lease_id)
    last = peer.received(ShmLeaseKeepalive, lease_id=lease_id)[-1]  # the conductor gets no more turns
    wait_until(lambda: time.monotonic_ns() > last.received_ns + 2 * lease_ns, "the deadline is over")
    assert not works(session, peer)
    wait_works(session, peer, client)
    assert session.lease_id != lease_id


@pytest.mark.spec("DRV-4.4-02", "DRV-4.2-30")
@both_roles
@pytest.mark.parametrize(("interval_ms", "lease_ms"), [(200, 2000), (3000, 1200)], ids=["longer", "shorter"])
def test_keepalives_come_before_each_deadline(
    bench: Bench, peer: WireProducer, role: Role, interval_ms: int, lease_ms: int
) -> None:
    """Also when the lease is shorter than the configured interval: no deadline passes without one, and none is lost."""
    peer.lease_ns = lease_ms * 1_000_000
    settings: dict[str, Any] = {"policies.lease_keepalive_interval_ms": interval_ms}
    client = bench.connect(**settings)
    session = start(client, peer, role)
    wait_works(session, peer)

    def keepalives() -> list[ReceivedMessage[ShmLeaseKeepalive]]:
        """Of the lease that it has: a machine that stands still for longer than a lease ends it."""
        return peer.received(ShmLeaseKeepalive, lease_id=session.lease_id)

    wait_until(lambda: len(keepalives()) >= 5, "five keepalives of one lease")
    kept = keepalives()
    sent = [received.message.client_timestamp_ns for received in kept]
    granted = peer.grant_of(own_id(session)).response.lease_expiry_timestamp_ns
    assert granted is not None
    assert sent[0] < granted
    assert all(later - earlier < peer.lease_ns for earlier, later in itertools.pairwise(sent))
    fields = kept[-1].message
    assert (fields.stream_id, fields.client_id, fields.role) == (peer.stream_id, own_id(session), role)


@pytest.mark.spec("DRV-4.2-31", "DRV-4.2-32")
@both_roles
def test_a_lease_without_deadline_is_kept_alive_until_it_is_revoked(
    bench: Bench, peer: WireProducer, role: Role
) -> None:
    """At the configured interval, unless a driver or user asks for another."""
    peer.lease_ns = None
    session = start(bench.connect(), peer, role)
    wait_works(session, peer)
    grant = peer.grant_of(own_id(session))
    wait_until(lambda: len(peer.received(ShmLeaseKeepalive, lease_id=grant.lease_id)) >= 8, "eight keepalives")
    times = [received.received_ns for received in peer.received(ShmLeaseKeepalive, lease_id=grant.lease_id)]
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    assert KEEPALIVE_MS * 500_000 < gaps[len(gaps) // 2] < KEEPALIVE_MS * 5_000_000  # half the default at most
    assert session.lease_id == grant.lease_id
    peer.answers = False
    peer.revoke(grant)
    wait_until(lambda: not works(session, peer) and not session.is_active, "the lease is not used any more")


# --- giving back


@pytest.mark.spec("DRV-4.9-09")
@both_roles
def test_closing_gives_the_lease_back_and_asks_for_no_other(shared: tuple[WireProducer, Client], role: Role) -> None:
    """The driver's notice of a detach that we asked for is its confirmation (E8)."""
    peer, client = shared
    session = start(client, peer, role)
    wait_works(session, peer)
    grant, since = peer.grant_of(own_id(session)), peer.now
    session.close()
    request = peer.wait_for(ShmDetachRequest, since, lease_id=grant.lease_id)
    fields = (request.message.correlation_id, grant.lease_id, peer.stream_id, grant.request.client_id, role)
    assert request.data == struct.pack("<4H q Q I I B", 25, 3, 901, 1, *fields)
    with start(client, peer, role) as other:
        wait_works(other, peer)
        assert len(requests_of(peer, role, since)) == 1
    if isinstance(session, Consumer):
        assert session.poll() is None
        return
    with pytest.raises(tp.Closed):
        session.publish(FRAME)


@pytest.mark.spec("WIRE-10.1.2-15")
def test_consumers_give_themselves_random_ids(shared: tuple[WireProducer, Client]) -> None:
    """Neither one after the other nor near each other, and each says hello with its own."""
    peer, client = shared
    since = peer.now
    with ExitStack() as stack:
        consumers = [stack.enter_context(client.consumer(peer.stream_id)) for _ in range(40)]
        ids = [consumer.consumer_id for consumer in consumers]
        for consumer_id in ids:
            peer.wait_for(ConsumerHello, since, consumer_id=consumer_id)
    assert len(set(ids)) == len(ids)
    assert ids not in (sorted(ids), sorted(ids, reverse=True))
    assert max(ids) - min(ids) > 2**31  # of ids that are random less than once in ten thousand million runs
