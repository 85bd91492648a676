# SPDX-License-Identifier: Apache-2.0
"""When a client sends attach requests, repeats them and gives up. Driver Model §2.2, §4.2, §4.3, §4.8."""

from __future__ import annotations

import itertools
import struct
import threading
import time
from typing import Any

import pytest

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.wire.control import FrameDescriptor, ShmPoolAnnounce
from tensorpool.wire.driver import ResponseCode, Role, ShmAttachRequest, ShmDetachRequest
from tests.conformance.client_leases.conftest import Bench, Session, both_roles, own_id, requests_of, start, wait_works
from tests.support.processes import wait_until
from tests.support.wire_producer import ANNOUNCE_EVERY_S, WireProducer


@pytest.mark.spec("DRV-4.3-03", "DRV-4.8-04", "DRV-2.2-02")
@both_roles
def test_a_session_begins_with_an_attach_request(shared: tuple[WireProducer, Client], role: Role) -> None:
    """Byte for byte, with max_dims 0, an id that no other lease has, and no frame before it is answered."""
    peer, client = shared
    since = peer.now
    peer.answers = False
    opened: list[Session] = []
    thread = threading.Thread(target=lambda: opened.append(start(client, peer, role)))
    thread.start()
    received = peer.wait_for(ShmAttachRequest, since, stream_id=peer.stream_id)
    assert opened == []
    assert peer.received(FrameDescriptor, since) == []
    message = received.message
    fields = (message.correlation_id, peer.stream_id, message.client_id, role)
    expected = {struct.pack("<4H q I I B I B B B", 24, 1, 901, 1, *fields, version, 0, 1, 0) for version in (0, 1)}
    assert received.data in expected  # 0 is any layout, 1 the only one there is
    assert message.client_id not in (0, 2**32 - 1)
    peer.answer_held()
    thread.join()
    (session,) = opened
    assert own_id(session) == message.client_id
    wait_works(session, peer)
    session.close()


@pytest.mark.spec("DRV-4.8-04")
def test_every_lease_has_a_client_id_of_its_own(bench: Bench, peer: WireProducer) -> None:
    """Two clients of one process, two roles in each, one after the other: eight leases, eight ids."""
    clients = [bench.connect(), bench.connect()]
    ids = []
    for client in clients * 2:
        with start(client, peer, Role.PRODUCER) as producer, start(client, peer, Role.CONSUMER) as consumer:
            ids += [own_id(producer), own_id(consumer)]
    asked = [received.message.client_id for received in peer.received(ShmAttachRequest)]
    assert len(set(ids)) == len(ids) == 8
    assert set(asked) == set(ids)


@pytest.mark.spec("DRV-4.8-06")
@both_roles
def test_attaches_of_one_stream_and_role_come_one_after_the_other(bench: Bench, peer: WireProducer, role: Role) -> None:
    """Two threads ask for the same; until the first is answered only its request is on the wire."""
    client = bench.connect()
    peer.answers = False
    opened: list[Session] = []
    threads = [threading.Thread(target=lambda: opened.append(start(client, peer, role)), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(peer.received(ShmAttachRequest)) >= 2, "the request is repeated")
        assert len(requests_of(peer, role)) == 1
    finally:
        peer.announces = False  # a producer that learns that the other took its place asks again
        peer.answer_held()
        for thread in threads:
            thread.join()
    assert len(opened) == len(requests_of(peer, role)) == 2


@pytest.mark.spec("DRV-2.2-02", "DRV-4.2-15", "DRV-4.2-16")
@both_roles
def test_without_an_answer_there_is_no_session(bench: Bench, peer: WireProducer, role: Role) -> None:
    """Asked again and again, more and more seldom, in vain: no frame is described, no file mapped, the API says why."""
    client = bench.connect()
    peer.answers = False
    with pytest.raises(tp.DriverUnreachable) as caught:
        start(client, peer, role, timeout=2)
    assert caught.value.channel == peer.endpoints.control[0]
    assert caught.value.waited_ns >= 2_000_000_000
    times = [received.received_ns for received in peer.received(ShmAttachRequest)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(gaps) >= 2
    assert gaps[-1] > 1.3 * gaps[0]
    assert len(requests_of(peer, role)) == 1
    assert peer.received(FrameDescriptor) == []
    assert peer.mapped_at_attach
    assert not any(peer.mapped_at_attach)


@pytest.mark.spec("DRV-4.8-06")
def test_a_driver_that_takes_long_gets_one_request_until_it_answers(bench: Bench, peer: WireProducer) -> None:
    """Six seconds: repeated under the same ids all the time, and its one answer is the producer's lease.

    The dialect is known: else another driver than ours is asked in the other one meanwhile (K9).
    """
    known: Any = {"driver.dialect": "specified"}
    client = bench.connect(**known)
    peer.answers = False
    opened: list[Session] = []
    thread = threading.Thread(target=lambda: opened.append(start(client, peer, Role.PRODUCER, timeout=60)), daemon=True)
    begin_ns = time.monotonic_ns()
    thread.start()
    try:
        wait_until(
            lambda: any(received.received_ns > begin_ns + 6 * 10**9 for received in peer.received(ShmAttachRequest)),
            "the request is repeated after six seconds",
        )
        (request,) = requests_of(peer, Role.PRODUCER)
    finally:
        peer.answer_held()
        thread.join()
    (producer,) = opened
    assert producer.lease_id in {grant.lease_id for grant in peer.grants}
    assert requests_of(peer, Role.PRODUCER) == [request]
    wait_works(producer, peer)


@both_roles
def test_a_grant_that_comes_after_its_caller_gave_up_is_given_back(
    bench: Bench, peer: WireProducer, role: Role
) -> None:
    """The error says that there is a driver; the late lease is detached, and the next attach has another one."""
    client = bench.connect()
    peer.answers = False
    peer.wait_for(ShmPoolAnnounce, peer.now)
    with pytest.raises(
        tp.AttachPending, match=f"the driver is alive and has not answered yet about stream {peer.stream_id}"
    ):
        start(client, peer, role, timeout=3 * ANNOUNCE_EVERY_S)
    peer.answer_held()
    wait_until(lambda: peer.grants, "the request is granted")
    (grant,) = peer.grants
    assert peer.wait_for(ShmDetachRequest, lease_id=grant.lease_id, client_id=grant.request.client_id)
    with start(client, peer, role, timeout=20) as session:
        assert session.lease_id != grant.lease_id


@pytest.mark.spec("DRV-4.8-06")
@both_roles
def test_a_caller_that_comes_again_goes_on_with_its_request(bench: Bench, peer: WireProducer, role: Role) -> None:
    """It gave up and asks once more while the driver still works on it: one request on the wire, one lease."""
    client = bench.connect()
    peer.answers = False
    with pytest.raises(tp.DriverUnreachable):
        start(client, peer, role, timeout=0.2)
    opened: list[Session] = []
    since = len(peer.received(ShmAttachRequest))
    thread = threading.Thread(target=lambda: opened.append(start(client, peer, role, timeout=60)), daemon=True)
    thread.start()
    try:
        wait_until(lambda: len(peer.received(ShmAttachRequest)) > since, "the request is repeated")
    finally:
        peer.answer_held()
        thread.join()
    assert len(requests_of(peer, role)) == 1
    (session,) = opened
    assert not peer.received(ShmDetachRequest)
    wait_works(session, peer)


@pytest.mark.spec("DRV-4.12-02", "WIRE-15.17-02")
@both_roles
@pytest.mark.parametrize("code", [ResponseCode.REJECTED, ResponseCode.INTERNAL_ERROR], ids=lambda it: it.name)
def test_a_refusal_carries_the_drivers_text_or_is_overcome(
    shared: tuple[WireProducer, Client], role: Role, code: ResponseCode
) -> None:
    """Refused for as long as the caller would wait: AttachRefused; refused once: the next attempt succeeds."""
    peer, client = shared
    for _ in range(10):
        peer.refuse(code, "not on Sundays")
    with pytest.raises(tp.AttachRefused, match="not on Sundays") as caught:
        start(client, peer, role, timeout=1.5)
    assert (caught.value.code, caught.value.stream, caught.value.role) == (code.name, peer.stream_id, role.name)
    peer.lies.clear()
    peer.refuse(code)
    with start(client, peer, role) as session:
        wait_works(session, peer)
