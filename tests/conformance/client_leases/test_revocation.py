# SPDX-License-Identifier: Apache-2.0
"""What a client does when its lease is revoked. Driver Model §4.7-§4.9, §10."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import (
    LeaseRevokeReason,
    Role,
    ShmAttachRequest,
    ShmDetachRequest,
    ShmLeaseKeepalive,
    ShmLeaseRevoked,
)
from tests.conformance.client_leases.conftest import (
    FRAME,
    SHORT_PERIOD_MS,
    Bench,
    assert_idle,
    both_roles,
    fence,
    own_id,
    queue_frames,
    requests_of,
    start,
    wait_works,
    works,
)
from tests.support.driver_client import new_client_id
from tests.support.listener import Said
from tests.support.processes import wait_until
from tests.support.wire_producer import ANNOUNCE_EVERY_S, Grant, WireProducer, altered


@pytest.mark.spec("DRV-4.7-06", "DRV-4.7-07", "DRV-4.9-07", "DRV-4.9-08", "DRV-4.9-09", "DRV-4.2-32", "DRV-4.12-04")
@both_roles
@pytest.mark.parametrize("reason", list(LeaseRevokeReason), ids=lambda reason: reason.name)
def test_a_revoked_lease_is_not_used_and_another_one_asked_for(
    bench: Bench, peer: WireProducer, role: Role, reason: LeaseRevokeReason
) -> None:
    """At once: frames in flight are dropped, nothing more goes through until a new request is granted."""
    session = start(bench.connect(), peer, role)
    wait_works(session, peer)
    grant = peer.grant_of(own_id(session))
    queue_frames(session, peer)
    peer.answers = False
    since = peer.now
    peer.revoke(grant, reason)
    wait_until(lambda: not session.is_active, "the client has received the revocation")
    assert_idle(session, peer)
    again = peer.wait_for(ShmAttachRequest, since, stream_id=peer.stream_id, role=role).message
    assert again.correlation_id != grant.request.correlation_id
    assert_idle(session, peer)
    peer.answer_held()
    wait_works(session, peer)
    assert session.lease_id != grant.lease_id
    fenced = peer.now
    peer.wait_for(ShmLeaseKeepalive, fenced, lease_id=session.lease_id)
    assert peer.received(ShmLeaseKeepalive, fenced, lease_id=grant.lease_id) == []


@pytest.mark.spec("DRV-4.9-21", "DRV-4.9-09")
@both_roles
def test_a_revocation_that_comes_again_ends_nothing_more(bench: Bench, peer: WireProducer, role: Role) -> None:
    """Three at once are one loss, and the same notice later does not touch the lease that came after."""
    session = start(bench.connect(), peer, role)
    wait_works(session, peer)
    grant, since = peer.grant_of(own_id(session)), peer.now
    for _ in range(3):
        peer.revoke(grant)
    wait_until(lambda: works(session, peer) and session.lease_id not in (None, grant.lease_id), "a new lease")
    lease_id = session.lease_id
    for _ in range(3):
        peer.revoke(grant)
    fence(session, peer)
    assert works(session, peer) or works(session, peer)
    assert session.lease_id == lease_id
    assert len(requests_of(peer, role, since)) == 1


def _malformed(peer: WireProducer, grant: Grant) -> dict[str, Said]:
    """What must not end a lease: offsets are those of role and reason."""
    notice = peer.revoke_of(grant)
    other = Role.CONSUMER if grant.request.role is Role.PRODUCER else Role.PRODUCER
    return {
        "reason 0": altered(notice, 8 + 25, b"\x00"),
        "reason 9": altered(notice, 8 + 25, b"\x09"),
        "role 0": altered(notice, 8 + 24, b"\x00"),
        "role 9": altered(notice, 8 + 24, b"\x09"),
        "the other role": peer.revoke_of(grant, role=other, client_id=new_client_id()),
        "another lease": peer.revoke_of(grant, lease_id=grant.lease_id + 1),
        "another stream": peer.revoke_of(grant, stream_id=peer.stream_id + 1),
        "another client": peer.revoke_of(grant, client_id=new_client_id()),
        "schema version 2": altered(notice, 6, b"\x02\x00"),
        "another schema": altered(notice, 4, b"\x84\x03"),
    }


@pytest.mark.spec("DRV-4.9-13", "DRV-4.9-14", "DRV-4.9-11", "DRV-4.4a-01")
@both_roles
def test_a_revocation_that_is_malformed_or_not_ours_is_rejected(bench: Bench, peer: WireProducer, role: Role) -> None:
    """Unknown reason or role, another lease, stream or client: the lease goes on, without a new request."""
    session = start(bench.connect(), peer, role)
    wait_works(session, peer)
    grant, since = peer.grant_of(own_id(session)), peer.now
    peer.wait_for(ShmPoolAnnounce, since + 1)
    fence(session, peer)  # from now on a consumer knows who its producer is
    for name, said in _malformed(peer, grant).items():
        peer.send(said)
        fence(session, peer)
        assert session.is_active, name
        assert session.lease_id == grant.lease_id, name
    assert works(session, peer) or works(session, peer)
    assert requests_of(peer, role, since) == []
    peer.answers = False
    peer.send(peer.revoke_of(grant))  # the same without a lie
    wait_until(lambda: not session.is_active, "an honest one is obeyed")


@pytest.mark.spec("DRV-4.9-12")
def test_one_revoked_lease_leaves_the_others_alone(bench: Bench, peer: WireProducer, shm_dir: Path) -> None:
    """A producer and two consumers of one client: the end of one consumer's lease ends no other."""
    client = bench.connect()
    with WireProducer(shm_dir, bench.aeron_dir, endpoints=peer.endpoints) as other:
        one, two = start(client, peer, Role.CONSUMER), start(client, peer, Role.CONSUMER)
        producer = start(client, other, Role.PRODUCER)
        for session, its_peer in ((one, peer), (two, peer), (producer, other)):
            wait_works(session, its_peer)
        leases = (two.lease_id, producer.lease_id)
        peer.answers = False
        since = peer.now
        peer.revoke(peer.grant_of(own_id(one)))
        wait_until(lambda: not one.is_active, "the client has received the revocation")
        assert two.is_active
        assert producer.is_active
        assert works(two, peer) or works(two, peer)
        assert works(producer, other)
        peer.wait_for(ShmAttachRequest, since)
        assert len(peer.received(ShmAttachRequest, since)) == len(
            peer.received(ShmAttachRequest, since, role=Role.CONSUMER)
        )
        peer.answer_held()
        wait_works(one, peer)
        assert leases == (two.lease_id, producer.lease_id)


@pytest.mark.spec("DRV-4.9-10", "DRV-4.9-18", "DRV-4.9-19", "DRV-4.12-05")
def test_after_the_end_of_its_producer_a_consumer_waits_for_the_next_epoch(bench: Bench, peer: WireProducer) -> None:
    """Announces of the same epoch and of other streams change nothing; it keeps its lease and maps the higher epoch."""
    consumer = start(bench.connect(announce_period_ms=10_000), peer, Role.CONSUMER)
    wait_works(consumer, peer)
    fence(consumer, peer)
    lease_id, since = consumer.lease_id, peer.now
    for _ in range(3):
        peer.publish(FRAME)
    peer.say(ShmLeaseRevoked)
    wait_until(lambda: not consumer.is_active, "the client has received the revocation")
    other = peer.make_regions(peer.epoch + 1)
    peer.say(ShmPoolAnnounce, **other.layout | {"stream_id": peer.stream_id + 1})
    wait_until(lambda: len(peer.received(ShmPoolAnnounce, since, epoch=peer.epoch)) > 3, "the epoch is announced again")
    fence(consumer, peer)
    assert_idle(consumer, peer)
    assert not consumer.is_active
    regions = peer.new_epoch()
    wait_works(consumer, peer)
    assert consumer.epoch == regions.epoch
    assert consumer.lease_id == lease_id
    assert requests_of(peer, Role.CONSUMER, since) == []


@pytest.mark.spec("DRV-4.9-16", "DRV-4.9-17", "DRV-4.12-05")
def test_a_consumer_does_not_wait_for_ever_for_the_next_epoch(bench: Bench, peer: WireProducer) -> None:
    """Three announce periods after the revocation it asks the driver what there is, under its lease, and maps that.

    Its peer announces the old epoch all the time: how often it did so measures the wait, also on a busy machine.
    """
    consumer = start(bench.connect(announce_period_ms=SHORT_PERIOD_MS), peer, Role.CONSUMER)
    wait_works(consumer, peer)
    fence(consumer, peer)
    since, lease_id = peer.now, consumer.lease_id
    said_ns = peer.say(ShmLeaseRevoked)
    received = peer.wait_for(ShmAttachRequest, since, stream_id=peer.stream_id)
    assert received.message == peer.grant_of(own_id(consumer)).request, (
        "E40: the same request, for the lease that it has"
    )
    assert received.received_ns - said_ns >= 2.5 * SHORT_PERIOD_MS * 1_000_000
    announces = [announce for announce in peer.received(ShmPoolAnnounce, since) if announce.index < received.index]
    assert len(announces) < 6 * SHORT_PERIOD_MS / 1e3 / ANNOUNCE_EVERY_S
    wait_works(consumer, peer)
    assert consumer.lease_id == lease_id
    assert peer.received(ShmDetachRequest, since, stream_id=peer.stream_id) == []
