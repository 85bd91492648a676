# SPDX-License-Identifier: Apache-2.0
"""Which attach responses a client believes. Driver Model §4.2, §4.3, §9."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.wire.attach import AttachResponse
from tensorpool.wire.driver import ResponseCode, Role, ShmAttachResponse, ShmDetachRequest, ShmLeaseKeepalive
from tests.conformance.client_leases.conftest import both_roles, own_id, requests_of, start, wait_works
from tests.shm.by_hand import mapped_files
from tests.support.listener import Said
from tests.support.regions import RING
from tests.support.wire_producer import WireProducer, altered


def _lie(**changed: Any) -> Callable[[WireProducer, AttachResponse], Said]:
    def falsified(peer: WireProducer, honest: AttachResponse) -> Said:
        return replace(honest, **changed)

    return falsified


def _pool(**changed: Any) -> Callable[[WireProducer, AttachResponse], Said]:
    """False in the last pool."""

    def falsified(peer: WireProducer, honest: AttachResponse) -> Said:
        *others, last = honest.payload_pools
        changes = {name: value(last) if callable(value) else value for name, value in changed.items()}
        return replace(honest, payload_pools=(*others, replace(last, **changes)))

    return falsified


def _bytes(offset: int, data: bytes) -> Callable[[WireProducer, AttachResponse], Said]:
    return lambda peer, honest: altered(honest, offset, data)


def _outside(peer: WireProducer, honest: AttachResponse) -> Said:
    """The files are as they should be, but not below an allowed directory."""
    target = Path("/dev/shm") / f"tp-test-outside-{honest.lease_id}"
    if peer.regions.paths[RING].exists():
        peer.regions.paths[RING].rename(target)
    return _lie(header_region_uri=f"shm:file?path={target}")(peer, honest)


UNUSABLE: dict[str, Callable[[WireProducer, AttachResponse], Said]] = {
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
UNMAPPABLE: dict[str, Callable[[WireProducer, AttachResponse], Said]] = {
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
    shared: tuple[WireProducer, Client], role: Role, lie: Callable[[WireProducer, AttachResponse], Said]
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
    assert peer.received(ShmLeaseKeepalive, since, lease_id=dropped.lease_id) == []


@pytest.mark.spec("DRV-4.2-34", "DRV-9-05", "WIRE-15.22-15", "DRV-4.7a-01")
@both_roles
@pytest.mark.parametrize("lie", list(UNMAPPABLE.values()), ids=list(UNMAPPABLE))
def test_regions_that_may_not_be_mapped_are_not_and_the_caller_learns_why(
    shared: tuple[WireProducer, Client], role: Role, lie: Callable[[WireProducer, AttachResponse], Said]
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

    def falsified(honest: AttachResponse) -> Iterable[Said]:
        stranger = _lie(correlation_id=honest.correlation_id + 1, lease_id=1)
        other_stream = _lie(stream_id=peer.stream_id + 1, lease_id=2)
        refusal = ShmAttachResponse(correlation_id=honest.correlation_id - 1, code=ResponseCode.INVALID_PARAMS)
        return [stranger(peer, honest), refusal, other_stream(peer, honest), honest]

    since = peer.now
    peer.lies.append(falsified)
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
