# SPDX-License-Identifier: Apache-2.0
"""Leases from the client's side: which answers it believes, how it keeps a lease, and what it does when one ends.

Driver Model §2.2, §2.3, §4.2-§4.4a, §4.7-§4.9, §4.12, §4.13, §9, §10. Producers and consumers are judged alike. The
driver is `WireProducer`, which grants honestly but for the answers that a test falsifies; one test restarts a real one.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from msgspec.structs import replace

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Client, Consumer, DropReason, Producer
from tensorpool.wire.control import ConsumerConfig, ConsumerHello, FrameDescriptor, ShmPoolAnnounce
from tensorpool.wire.driver import (
    LeaseRevokeReason,
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmAttachResponse,
    ShmDetachRequest,
    ShmLeaseKeepalive,
    ShmLeaseRevoked,
    ShutdownReason,
)
from tests.shm.by_hand import mapped_files
from tests.support.driver_client import DriverClient, new_client_id
from tests.support.driver_process import Deployment
from tests.support.listener import Heard, Said
from tests.support.messages import hello
from tests.support.processes import private_directory, wait_until
from tests.support.regions import RING
from tests.support.wire_consumer import separate
from tests.support.wire_producer import ANNOUNCE_EVERY_S, Grant, WireProducer, altered

PERIOD_MS = 1000  # in the client's configuration; the peer announces far more often
SHORT_PERIOD_MS = 300
KEEPALIVE_MS = 100
FRAME = np.arange(6, dtype=np.float32)

both_roles = pytest.mark.parametrize("role", list(Role), ids=lambda role: role.name.lower())

type Session = Producer | Consumer


class Bench:
    """A peer, and clients that are closed at the end."""

    def __init__(self, folder: Path, aeron_dir: str) -> None:
        self.aeron_dir = aeron_dir
        self.peer = WireProducer(folder, aeron_dir)
        self.clients: list[Client] = []

    def connect(
        self,
        *,
        conductor: Literal["thread", "invoked"] = "thread",
        announce_period_ms: int = PERIOD_MS,
        **more: Any,
    ) -> Client:
        settings = self.peer.settings | {
            "policies.announce_period_ms": announce_period_ms,
            "policies.lease_keepalive_interval_ms": KEEPALIVE_MS,
        }
        self.clients.append(tp.connect(self.aeron_dir, conductor=conductor, overrides=settings | more))
        return self.clients[-1]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.peer.close()


@pytest.fixture
def bench(shared_media_driver: aeron.MediaDriver, shm_dir: Path) -> Iterator[Bench]:
    bench = Bench(shm_dir, shared_media_driver.aeron_dir)
    yield bench
    bench.close()


@pytest.fixture
def peer(bench: Bench) -> WireProducer:
    return bench.peer


@pytest.fixture(scope="module")
def shared_bench(shared_media_driver: aeron.MediaDriver) -> Iterator[Bench]:
    with private_directory() as folder:
        bench = Bench(folder, shared_media_driver.aeron_dir)
        bench.connect()
        yield bench
        bench.close()


@pytest.fixture
def shared(shared_bench: Bench) -> tuple[WireProducer, Client]:
    """For the many tests that need no client of their own."""
    shared_bench.peer.lies.clear()
    shared_bench.peer.answer_held()
    shared_bench.peer.announces = True
    return shared_bench.peer, shared_bench.clients[0]


def start(client: Client, peer: WireProducer, role: Role, **options: Any) -> Session:
    opener: Callable[..., Session] = client.producer if role is Role.PRODUCER else client.consumer
    return opener(peer.stream_id, **options)


def works(session: Session, peer: WireProducer, client: Client | None = None) -> bool:
    """Whether a frame goes through now: out of a producer, or into a consumer."""
    if client is not None:
        client.invoke()
    if isinstance(session, Producer):
        return session.publish(FRAME) is not None
    seq = peer.publish(FRAME)
    while (frame := session.poll(0.01)) is not None:
        if (frame.epoch, frame.seq) == (peer.epoch, seq):
            return True
    return False


def wait_works(session: Session, peer: WireProducer, client: Client | None = None) -> None:
    wait_until(lambda: works(session, peer, client), "frames go through")


def own_id(session: Session) -> int:
    return session.producer_id if isinstance(session, Producer) else session.consumer_id


def requests_of(peer: WireProducer, role: Role, since: int = 0) -> list[ShmAttachRequest]:
    """Each once, however often it was repeated for want of an answer."""
    found = {heard.message: None for heard in peer.heard(ShmAttachRequest, since, stream_id=peer.stream_id, role=role)}
    return list(found)


def fence(session: Session, peer: WireProducer) -> None:
    """Return when the client has handled all that was said on the control stream before."""
    if isinstance(session, Consumer):
        peer.fence(session)
        return
    nobody, since = new_client_id(), peer.now
    peer.send(hello(peer.stream_id, nobody, descriptor_stream_id=31_000))
    peer.wait_for(ConsumerConfig, since, consumer_id=nobody)


# --- the request


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
    heard = peer.wait_for(ShmAttachRequest, since, stream_id=peer.stream_id)
    assert opened == []
    assert peer.heard(FrameDescriptor, since) == []
    message = heard.message
    fields = (message.correlation_id, peer.stream_id, message.client_id, role)
    expected = {struct.pack("<4H q I I B I B B B", 24, 1, 901, 1, *fields, version, 0, 1, 0) for version in (0, 1)}
    assert heard.data in expected  # 0 is any layout, 1 the only one there is
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
    asked = [heard.message.client_id for heard in peer.heard(ShmAttachRequest)]
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
        wait_until(lambda: len(peer.heard(ShmAttachRequest)) >= 2, "the request is repeated")
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
    times = [heard.received_ns for heard in peer.heard(ShmAttachRequest)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(gaps) >= 2
    assert gaps[-1] > 1.3 * gaps[0]
    assert len(requests_of(peer, role)) == 1
    assert peer.heard(FrameDescriptor) == []
    assert peer.mapped_at_attach
    assert not any(peer.mapped_at_attach)


@pytest.mark.spec("DRV-4.8-06")
def test_a_driver_that_takes_long_gets_one_request_until_it_answers(bench: Bench, peer: WireProducer) -> None:
    """Six seconds: repeated under the same ids all the time, and its one answer is the producer's lease."""
    client = bench.connect()
    peer.answers = False
    opened: list[Session] = []
    thread = threading.Thread(target=lambda: opened.append(start(client, peer, Role.PRODUCER, timeout=60)), daemon=True)
    begin_ns = time.monotonic_ns()
    thread.start()
    try:
        wait_until(
            lambda: any(heard.received_ns > begin_ns + 6 * 10**9 for heard in peer.heard(ShmAttachRequest)),
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
    since = len(peer.heard(ShmAttachRequest))
    thread = threading.Thread(target=lambda: opened.append(start(client, peer, role, timeout=60)), daemon=True)
    thread.start()
    try:
        wait_until(lambda: len(peer.heard(ShmAttachRequest)) > since, "the request is repeated")
    finally:
        peer.answer_held()
        thread.join()
    assert len(requests_of(peer, role)) == 1
    (session,) = opened
    assert not peer.heard(ShmDetachRequest)
    wait_works(session, peer)


@pytest.mark.spec("DRV-4.12-02", "WIRE-15.17-02")
@both_roles
@pytest.mark.parametrize("code", [ResponseCode.REJECTED, ResponseCode.INTERNAL_ERROR], ids=lambda it: it.name)
def test_a_refusal_is_told_in_the_drivers_words_or_overcome(
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


# --- answers


def _lie(**changed: Any) -> Callable[[WireProducer, ShmAttachResponse], Said]:
    def told(peer: WireProducer, honest: ShmAttachResponse) -> Said:
        return replace(honest, **changed)

    return told


def _pool(**changed: Any) -> Callable[[WireProducer, ShmAttachResponse], Said]:
    """False in the last pool."""

    def told(peer: WireProducer, honest: ShmAttachResponse) -> Said:
        *others, last = honest.payload_pools
        changes = {name: value(last) if callable(value) else value for name, value in changed.items()}
        return replace(honest, payload_pools=(*others, replace(last, **changes)))

    return told


def _bytes(offset: int, data: bytes) -> Callable[[WireProducer, ShmAttachResponse], Said]:
    return lambda peer, honest: altered(honest, offset, data)


def _outside(peer: WireProducer, honest: ShmAttachResponse) -> Said:
    """The files are as they should be, but not below an allowed directory."""
    target = Path("/dev/shm") / f"tp-test-outside-{honest.lease_id}"
    if peer.regions.paths[RING].exists():
        peer.regions.paths[RING].rename(target)
    return _lie(header_region_uri=f"shm:file?path={target}")(peer, honest)


UNUSABLE: dict[str, Callable[[WireProducer, ShmAttachResponse], Said]] = {
    "no lease_id": _lie(lease_id=None),
    "no stream_id": _lie(stream_id=None),
    "no epoch": _lie(epoch=None),
    "no layout_version": _lie(layout_version=None),
    "no header_nslots": _lie(header_nslots=None),
    "no header_slot_bytes": _lie(header_slot_bytes=None),
    "no max_dims": _lie(max_dims=None),
    "empty header URI": _lie(header_region_uri=""),
    "blank header URI": _lie(header_region_uri="   "),
    "empty pool URI": _pool(region_uri=""),
    "blank pool URI": _pool(region_uri=" "),
    "slots of 128 bytes": _lie(header_slot_bytes=128),
    "7 dimensions": _lie(max_dims=7),
    "9 dimensions": _lie(max_dims=9),
    "no pools": _lie(payload_pools=()),
    "other slots in a pool": _pool(pool_nslots=16),
    "layout version 2": _lie(layout_version=2),
    "code 77": _bytes(8 + 8, struct.pack("<i", 77)),
    "schema version 2": _bytes(6, b"\x02\x00"),
    "schema 900": _bytes(4, b"\x84\x03"),
    "a block of 54 bytes": _bytes(0, b"\x36\x00"),
    "cut short": lambda peer, honest: honest.encode()[:-3],
}


UNMAPPABLE: dict[str, Callable[[WireProducer, ShmAttachResponse], Said]] = {
    "another scheme": _pool(region_uri=lambda it: it.region_uri.replace("shm:file", "shm:memfd")),
    "a parameter": _pool(region_uri=lambda it: it.region_uri + "|mode=rw"),
    "a relative path": _pool(region_uri="shm:file?path=7.pool"),
    "huge pages that are none": _pool(region_uri=lambda it: it.region_uri + "|require_hugepages=true"),
    "a file that is not there": _pool(region_uri=lambda it: it.region_uri + "x"),
    "outside of the allowed directories": _outside,
    "a pool of another stride": _pool(stride_bytes=2048),
    "another epoch": _lie(epoch=5),
}


@pytest.mark.spec("DRV-4.2-23", "DRV-4.2-24", "DRV-4.2-25", "DRV-4.2-26", "DRV-4.2-27", "DRV-4.2-28", "DRV-4.2-29")
@pytest.mark.spec("DRV-4.7a-01", "DRV-4.7a-02", "DRV-4.4a-01")
@both_roles
@pytest.mark.parametrize("lie", list(UNUSABLE.values()), ids=list(UNUSABLE))
def test_an_ok_that_is_not_as_it_must_be_is_dropped_and_asked_again(
    shared: tuple[WireProducer, Client], role: Role, lie: Callable[[WireProducer, ShmAttachResponse], Said]
) -> None:
    """Nothing of it is mapped or kept alive; the next answer, which is honest, is the lease that is used."""
    peer, client = shared
    since, asked = peer.now, len(peer.mapped_at_attach)
    peer.lies.append(lambda honest: lie(peer, honest))
    with start(client, peer, role) as session:
        wait_works(session, peer)
        dropped = peer.ended[-1]
        assert session.lease_id == peer.grant_of(own_id(session)).lease_id != dropped.lease_id
        peer.wait_for(ShmLeaseKeepalive, since, lease_id=session.lease_id)
    assert len(peer.mapped_at_attach) - asked >= 2
    assert peer.mapped_at_attach[asked + 1] == []
    assert peer.heard(ShmLeaseKeepalive, since, lease_id=dropped.lease_id) == []


@pytest.mark.spec("DRV-4.2-34", "DRV-9-05", "WIRE-15.22-15", "DRV-4.7a-01")
@both_roles
@pytest.mark.parametrize("lie", list(UNMAPPABLE.values()), ids=list(UNMAPPABLE))
def test_regions_that_may_not_be_mapped_are_not_and_the_caller_learns_why(
    shared: tuple[WireProducer, Client], role: Role, lie: Callable[[WireProducer, ShmAttachResponse], Said]
) -> None:
    """Whatever the driver says, nothing is mapped, and the error names the region; once it is in order, all is well."""
    peer, client = shared
    asked = len(peer.mapped_at_attach)
    peer.announces = False
    peer.lies.extend([lambda honest: lie(peer, honest)] * 20)
    with pytest.raises(tp.TensorPoolError) as caught:
        start(client, peer, role, timeout=1.2)
    assert not isinstance(caught.value, tp.DriverUnreachable)
    assert any(word in str(caught.value) for word in ("7.pool", "shm:", "epoch")), caught.value
    assert not any(peer.mapped_at_attach[asked:])
    assert not mapped_files(peer.folder)
    peer.lies.clear()
    peer.announces = True
    peer.new_epoch()
    with start(client, peer, role) as session:
        wait_works(session, peer)
    for path in Path("/dev/shm").glob("tp-test-outside-*"):
        path.unlink()


@pytest.mark.spec("DRV-4.7a-01")
@both_roles
def test_a_lease_that_cannot_be_used_is_given_back(shared: tuple[WireProducer, Client], role: Role) -> None:
    """E18: the client detaches, so that the driver need not wait for the lease to expire."""
    peer, client = shared
    since = peer.now
    peer.lie(max_dims=7)
    with start(client, peer, role) as session:
        wait_works(session, peer)
    dropped = peer.ended[-2] if peer.ended[-1].lease_id == session.lease_id else peer.ended[-1]
    request = dropped.request
    fields: dict[str, Any] = {"lease_id": dropped.lease_id, "client_id": request.client_id, "role": role}
    peer.wait_for(ShmDetachRequest, since, stream_id=peer.stream_id, **fields)


@pytest.mark.spec("DRV-4.7a-01")
@both_roles
def test_answers_that_are_not_for_us_are_ignored(shared: tuple[WireProducer, Client], role: Role) -> None:
    """E3: with another correlation id, or ours but for another stream, they neither attach nor disturb."""
    peer, client = shared

    def told(honest: ShmAttachResponse) -> Iterable[Said]:
        stranger = _lie(correlation_id=honest.correlation_id + 1, lease_id=1)
        other_stream = _lie(stream_id=peer.stream_id + 1, lease_id=2)
        refusal = ShmAttachResponse(correlation_id=honest.correlation_id - 1, code=ResponseCode.INVALID_PARAMS)
        return [stranger(peer, honest), refusal, other_stream(peer, honest), honest]

    since = peer.now
    peer.lies.append(told)
    with start(client, peer, role) as session:
        peer.grants.append(peer.ended.pop())
        wait_works(session, peer)
        assert session.lease_id == peer.grants[-1].lease_id
        assert len(requests_of(peer, role, since)) == 1


@pytest.mark.spec("DRV-4.2-30")
@both_roles
def test_an_answer_whose_deadline_is_over_is_not_used(shared: tuple[WireProducer, Client], role: Role) -> None:
    """The lease was dead on arrival: another one is asked for."""
    peer, client = shared
    since = peer.now
    peer.lies.append(lambda honest: _lie(lease_expiry_timestamp_ns=time.monotonic_ns() - 1)(peer, honest))
    with start(client, peer, role) as session:
        wait_works(session, peer)
        assert session.lease_id == peer.grant_of(own_id(session)).lease_id
        assert len(requests_of(peer, role, since)) == 2


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
    last = peer.heard(ShmLeaseKeepalive, lease_id=lease_id)[-1]  # the conductor gets no more turns
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

    def keepalives() -> list[Heard[ShmLeaseKeepalive]]:
        """Of the lease that it has: a machine that stands still for longer than a lease ends it."""
        return peer.heard(ShmLeaseKeepalive, lease_id=session.lease_id)

    wait_until(lambda: len(keepalives()) >= 5, "five keepalives of one lease")
    kept = keepalives()
    sent = [heard.message.client_timestamp_ns for heard in kept]
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
    wait_until(lambda: len(peer.heard(ShmLeaseKeepalive, lease_id=grant.lease_id)) >= 8, "eight keepalives")
    times = [heard.received_ns for heard in peer.heard(ShmLeaseKeepalive, lease_id=grant.lease_id)]
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    assert KEEPALIVE_MS * 500_000 < gaps[len(gaps) // 2] < KEEPALIVE_MS * 5_000_000  # half the default at most
    assert session.lease_id == grant.lease_id
    peer.answers = False
    peer.revoke(grant)
    wait_until(lambda: not works(session, peer) and not session.is_active, "the lease is not used any more")


# --- the end of a lease


def queue_frames(session: Session, peer: WireProducer) -> None:
    """Frames that a consumer has not polled yet."""
    if isinstance(session, Consumer):
        for _ in range(3):
            peer.publish(FRAME)


def assert_idle(session: Session, peer: WireProducer) -> None:
    """Neither old nor new frames go through, in either direction, and every one of them is counted."""
    if isinstance(session, Producer):
        before = session.stats.dropped.get(DropReason.DETACHED, 0)
        since = peer.now
        assert [session.publish(FRAME) for _ in range(3)] == [None] * 3
        assert session.stats.dropped[DropReason.DETACHED] == before + 3
        with session.claim((4,), np.uint8) as slot:
            slot.array[:] = 1
        assert slot.seq is None
        assert peer.heard(FrameDescriptor, since) == []
    else:
        peer.publish(FRAME)
        assert session.poll(0.05) is None
        assert session.latest() is None


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
    wait_until(lambda: not session.is_active, "the revocation is heard")
    assert_idle(session, peer)
    again = peer.wait_for(ShmAttachRequest, since, stream_id=peer.stream_id, role=role).message
    assert again.correlation_id != grant.request.correlation_id
    assert_idle(session, peer)
    peer.answer_held()
    wait_works(session, peer)
    assert session.lease_id != grant.lease_id
    fenced = peer.now
    peer.wait_for(ShmLeaseKeepalive, fenced, lease_id=session.lease_id)
    assert peer.heard(ShmLeaseKeepalive, fenced, lease_id=grant.lease_id) == []


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
        wait_until(lambda: not one.is_active, "the revocation is heard")
        assert two.is_active
        assert producer.is_active
        assert works(two, peer) or works(two, peer)
        assert works(producer, other)
        peer.wait_for(ShmAttachRequest, since)
        assert len(peer.heard(ShmAttachRequest, since)) == len(peer.heard(ShmAttachRequest, since, role=Role.CONSUMER))
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
    wait_until(lambda: not consumer.is_active, "the revocation is heard")
    other = peer.make_regions(peer.epoch + 1)
    peer.say(ShmPoolAnnounce, **other.layout | {"stream_id": peer.stream_id + 1})
    wait_until(lambda: len(peer.heard(ShmPoolAnnounce, since, epoch=peer.epoch)) > 3, "the epoch is announced again")
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
    heard = peer.wait_for(ShmAttachRequest, since, stream_id=peer.stream_id)
    assert heard.message == peer.grant_of(own_id(consumer)).request, "E40: the same request, for the lease that it has"
    assert heard.received_ns - said_ns >= 2.5 * SHORT_PERIOD_MS * 1_000_000
    announces = [announce for announce in peer.heard(ShmPoolAnnounce, since) if announce.index < heard.index]
    assert len(announces) < 6 * SHORT_PERIOD_MS / 1e3 / ANNOUNCE_EVERY_S
    wait_works(consumer, peer)
    assert consumer.lease_id == lease_id
    assert peer.heard(ShmDetachRequest, since, stream_id=peer.stream_id) == []


# --- the end of the driver


@pytest.mark.spec("DRV-4.13-11", "DRV-4.13-12", "DRV-4.13-13", "DRV-4.12-03", "DRV-4.8-03")
@both_roles
@pytest.mark.parametrize("reason", list(ShutdownReason), ids=lambda reason: reason.name)
def test_a_shutdown_notice_ends_every_lease_at_once(
    bench: Bench, peer: WireProducer, role: Role, reason: ShutdownReason
) -> None:
    """Nothing goes through any more; when the driver is back, the client attaches and keeps the new lease alive.

    It is the notice that ends them: the stream is announced and its memory refreshed until the client has let go.
    """
    session = start(bench.connect(), peer, role)
    wait_works(session, peer)
    lease_id = session.lease_id
    queue_frames(session, peer)
    peer.answers = False
    since = peer.now
    peer.shut_down(reason)
    wait_until(lambda: not session.is_active, "the notice is heard")
    peer.announces = peer.breathes = False
    assert_idle(session, peer)
    peer.wait_for(ShmAttachRequest, since, stream_id=peer.stream_id, role=role)
    peer.use(peer.make_regions(peer.epoch + 10))
    peer.announces = peer.breathes = True
    peer.answer_held()
    wait_works(session, peer)
    assert session.lease_id not in (None, lease_id)
    fenced = peer.now
    peer.wait_for(ShmLeaseKeepalive, fenced, lease_id=session.lease_id)
    assert peer.heard(ShmLeaseKeepalive, fenced, lease_id=lease_id) == []


@pytest.mark.spec("DRV-4.12-03", "DRV-4.13-13")
@both_roles
def test_a_request_that_was_under_way_at_a_shutdown_is_made_anew(bench: Bench, peer: WireProducer, role: Role) -> None:
    """The old one died with the driver: the client asks by itself, under new ids, and uses the answer to that alone."""
    peer.answers = False
    since = peer.now
    client = bench.connect()

    def later() -> list[ShmAttachRequest]:
        asked = [heard.message for heard in peer.heard(ShmAttachRequest, since, stream_id=peer.stream_id)]
        return [it for it in asked if it.correlation_id != first.correlation_id]

    with ThreadPoolExecutor(1) as pool:
        attaching = pool.submit(start, client, peer, role)
        first = peer.wait_for(ShmAttachRequest, since, stream_id=peer.stream_id, role=role).message
        peer.shut_down(ShutdownReason.NORMAL)
        wait_until(later, "another request")
        assert later()[0].client_id != first.client_id
        peer.held.clear()
        peer.answer(first)
        peer.answer_held()
        session = attaching.result(60)
    wait_works(session, peer)
    assert own_id(session) == later()[0].client_id


@pytest.mark.spec("DRV-4.7a-02")
@both_roles
def test_a_shutdown_notice_with_an_undefined_reason_is_none(bench: Bench, peer: WireProducer, role: Role) -> None:
    """Malformed, and therefore ignored (A19)."""
    session = start(bench.connect(), peer, role)
    wait_works(session, peer)
    lease_id = session.lease_id
    peer.send(struct.pack("<4H Q B I", 9, 6, 901, 1, time.monotonic_ns(), 9, 0))
    fence(session, peer)
    assert session.is_active
    assert session.lease_id == lease_id


@pytest.mark.spec("DRV-4.13-15", "DRV-10-01")
@both_roles
def test_a_driver_that_falls_silent_is_gone(bench: Bench, peer: WireProducer, role: Role) -> None:
    """Without announces and fresh stamps nothing goes through after the window; with them the client comes back."""
    session = start(bench.connect(announce_period_ms=SHORT_PERIOD_MS), peer, role)
    wait_works(session, peer)
    lease_id = session.lease_id
    peer.answers = peer.announces = peer.breathes = False
    silent_ns = time.monotonic_ns()
    window_ns = 5 * SHORT_PERIOD_MS * 1_000_000
    wait_until(lambda: not works(session, peer) and not session.is_active, "nothing goes through")
    wait_until(lambda: time.monotonic_ns() - silent_ns > window_ns, "the window is over")
    assert_idle(session, peer)
    peer.use(peer.make_regions(peer.epoch + 1))
    peer.announces = peer.breathes = True
    peer.answer_held()
    wait_works(session, peer)
    assert session.lease_id not in (None, lease_id)


@pytest.mark.spec("DRV-10-01", "DRV-4.13-13", "DRV-4.13-15", "DRV-4.8-03")
def test_clients_outlive_a_driver_that_is_killed_and_started_again(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path
) -> None:
    """Producer and consumer reattach by themselves, in a higher epoch, under leases of the new driver."""
    policies = {"announce_period_ms": 500, "lease_keepalive_interval_ms": 500}
    deployment = separate(Deployment(shm_dir, shared_media_driver.aeron_dir, policies=policies))
    with DriverClient(deployment) as observer:
        process = deployment.start()
        try:
            observer.meet(process)
            with tp.connect(deployment.aeron_dir, config=deployment.config_path) as client:
                producer, consumer = client.producer(10_000), client.consumer(10_000)
                epoch = _exchange(producer, consumer)
                leases = (producer.lease_id, consumer.lease_id)
                process.kill()
                wait_until(lambda: producer.publish(FRAME) is None and not consumer.is_active, "they notice")
                assert consumer.poll(0.05) is None
                process.reap()
                process = deployment.start()
                observer.meet(process)
                assert _exchange(producer, consumer) > epoch
                assert None not in (producer.lease_id, consumer.lease_id)
                assert producer.lease_id != leases[0]
                assert consumer.lease_id != leases[1]
        finally:
            process.reap()


def _exchange(producer: Producer, consumer: Consumer) -> int:
    """Wait for a frame from one to the other; its epoch."""
    epochs: list[int] = []

    def is_through() -> bool:
        seq = producer.publish(FRAME)
        epoch = producer.epoch
        while (frame := consumer.poll(0.02)) is not None:
            if (frame.epoch, frame.seq) == (epoch, seq):
                epochs.append(frame.epoch)
        return bool(epochs)

    wait_until(is_through, "a frame goes from producer to consumer")
    return epochs[-1]


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
