# SPDX-License-Identifier: Apache-2.0
"""Clients that say what no client should, as fast as they can: no lease ends, no client waits, no memory is lost.

TENSORPOOL_SEED repeats a run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorpool import aeron
from tensorpool.wire.control import ConsumerConfig
from tensorpool.wire.driver import LeaseRevokeReason, ResponseCode, Role, ShmAttachResponse, ShmLeaseRevoked
from tests.levels import SEED, SOAK
from tests.support.chaos import TOKEN, end, events_of
from tests.support.client_nursery import Listener, Nursery
from tests.support.driver_client import DriverClient, Lease, attach_request, new_client_id
from tests.support.driver_process import Deployment, DriverProcess
from tests.support.hostile_messages import hostile_messages, write_messages
from tests.support.messages import consumer_config, hello
from tests.support.processes import own_bytes

SECONDS = 3 * SOAK
FIRST, SECOND, THIRD = STREAMS = range(34_000, 34_003)
MAX_LEASES = 400
MAX_MESSAGE_BYTES = 4 * 2**20 // 8  # an eighth of the term
MIB = 1 << 20
GROWTH_BYTES = 16 * MIB


@pytest.fixture
def deployment(shared_media_driver: aeron.MediaDriver, shm_dir: Path) -> Deployment:
    return Deployment(
        shm_dir,
        shared_media_driver.aeron_dir,
        streams=STREAMS,
        driver={"descriptor_stream_id_range": "50000-59999", "control_stream_id_range": "60000-69999"},
        policies={
            "max_leases": MAX_LEASES,
            "shutdown_token": TOKEN,
            "lease_keepalive_interval_ms": 400,
            "lease_expiry_grace_intervals": 10,
        },
    )


@pytest.fixture
def client(deployment: Deployment, process: DriverProcess) -> Iterator[Listener]:
    with Listener(deployment) as client:
        yield client.meet(process)


@pytest.fixture
def nursery(deployment: Deployment, process: DriverProcess) -> Iterator[Nursery]:
    with Nursery(deployment) as nursery:
        yield nursery


def counts_at_end(process: DriverProcess, client: DriverClient, deployment: Deployment, log: Path) -> dict[str, int]:
    """Stop a driver that is as well as ever; what it counted."""
    assert not process.has_ended, log.read_text()
    end(process, client)
    assert events_of(log, "turn_failed") == []
    assert deployment.leftovers() == []
    (stopped,) = events_of(log, "driver_stopped")
    counts: dict[str, int] = stopped["counts"]
    print("counted:", counts)
    return counts


def attach_a_few(client: DriverClient) -> list[Lease]:
    """A producer and four consumers, kept alive from now on."""
    leases = [client.attach(FIRST, Role.PRODUCER), *(client.attach(id) for id in (FIRST, FIRST, SECOND, SECOND))]
    client.kept += leases
    return leases


def assert_kept(client: DriverClient, leases: list[Lease]) -> None:
    """None has ended, and the producer is the one that it was."""
    client.fence()
    ended = {received.message.lease_id for received in client.received(ShmLeaseRevoked)}
    assert not ended & {lease.lease_id for lease in leases}
    announce = client.next_announce(FIRST).message
    assert (announce.epoch, announce.producer_id) == (leases[0].epoch, leases[0].client_id)


@pytest.mark.timeout(SECONDS + 240)
def test_no_message_moves_a_lease_or_costs_memory(
    deployment: Deployment, process: DriverProcess, client: Listener, nursery: Nursery, log: Path
) -> None:
    """Hostile messages at full rate: leases stay, keepalives count, attaches are answered, memory does not grow."""
    print(f"seed {SEED}")
    leases = attach_a_few(client)
    messages = deployment.folder / "messages"
    write_messages(messages, hostile_messages(SEED, 3000, leases, MAX_MESSAGE_BYTES))
    flood = nursery.flood(messages, SEED)
    client.wait_until(lambda: nursery.diary(flood), "the flood has begun")
    before_bytes, started_s = own_bytes(process.pid), time.monotonic()
    begun = nursery.diary(flood)[-1]
    granted: list[Lease] = []
    latencies: list[float] = []
    while time.monotonic() - started_s < SECONDS:
        asked_s = time.monotonic()
        granted.append(client.attach(THIRD, Role.PRODUCER if len(granted) % 10 == 0 else Role.CONSUMER))
        latencies.append(time.monotonic() - asked_s)
        assert client.detach(granted[-1]).message.code is ResponseCode.OK
    after_bytes, ended = own_bytes(process.pid), nursery.diary(flood)[-1]
    rate = (ended["count"] - begun["count"]) / max(ended["ns"] - begun["ns"], 1) * 1e9
    nursery.kill(flood)
    print(
        f"{rate:.0f} messages a second, {len(granted)} attaches, the slowest {max(latencies) * 1e3:.0f} ms, "
        f"memory {before_bytes / MIB:.1f} -> {after_bytes / MIB:.1f} MiB"
    )
    assert_kept(client, leases)
    ours = {lease.lease_id for lease in (*leases, *granted)}
    granted_ids = {
        received.message.lease_id
        for received in client.received(ShmAttachResponse, code=ResponseCode.OK)
        if received.message.correlation_id in client.asked or received.message.stream_id in STREAMS
    }
    assert granted_ids <= ours, "no other client was granted anything"
    assert after_bytes - before_bytes < GROWTH_BYTES
    assert len(granted) > SECONDS
    for lease in leases:
        client.kept.remove(lease)
        assert client.detach(lease).message.code is ResponseCode.OK, "it was alive to the end"
    counts = counts_at_end(process, client, deployment, log)
    for name in (
        "malformed_messages",
        "keepalives_unknown_lease",
        "keepalives_wrong_fields",
        "shutdown_requests_refused",
        "attaches_refused",
    ):
        assert counts[name] > 0, counts


def test_a_flood_of_attaches_is_answered_within_bounds(
    deployment: Deployment, process: DriverProcess, client: Listener, nursery: Nursery, log: Path
) -> None:
    """Many clients at once: each is granted or refused, never more than `policies.max_leases`; earlier leases live on.

    Then theirs expire, each is revoked once, and there is room for as many again.
    """
    leases = attach_a_few(client)
    room = MAX_LEASES - len(leases)
    before_bytes = own_bytes(process.pid)
    for _ in range(2):
        requests = [attach_request(SECOND) for _ in range(3 * MAX_LEASES)]
        asked = {request.correlation_id for request in requests}
        client.asked |= asked
        messages = deployment.folder / "messages"
        write_messages(messages, (request.encode() for request in requests))
        since = len(client.transcript)
        flood = nursery.flood(messages, rounds=1)

        def answers(since: int = since, asked: set[int] = asked) -> list[ShmAttachResponse]:
            received = client.received(ShmAttachResponse, since)
            return [answer.message for answer in received if answer.message.correlation_id in asked]

        client.wait_until(lambda: len(answers()) == 3 * MAX_LEASES, "every request is answered")
        nursery.kill(flood)
        granted = [answer for answer in answers() if answer.code is ResponseCode.OK]
        refused = [answer for answer in answers() if answer.code is not ResponseCode.OK]
        assert len(granted) == room
        assert {(answer.code, answer.error_message) for answer in refused} == {
            (
                ResponseCode.REJECTED,
                f"{MAX_LEASES} leases are held (policies.max_leases): not declared {MAX_LEASES}; detach some, or "
                "raise it",
            )
        }
        assert_kept(client, leases)

        ids = {answer.lease_id for answer in granted}
        client.wait_until(lambda ids=ids: len(ended(client, ids)) >= len(ids), "they expire")
        client.fence()
        assert Counter(ended(client, ids)) == Counter(ids), "each is revoked once"
        assert_kept(client, leases)
    assert own_bytes(process.pid) - before_bytes < GROWTH_BYTES
    counts = counts_at_end(process, client, deployment, log)
    assert "messages_dropped" not in counts


def ended(client: DriverClient, lease_ids: set[int | None]) -> list[int]:
    """Those of the leases that were revoked as expired, once per message."""
    received = client.received(ShmLeaseRevoked, reason=LeaseRevokeReason.EXPIRED)
    return [revoke.message.lease_id for revoke in received if revoke.message.lease_id in lease_ids]


def test_a_flood_of_hellos_keeps_no_client_waiting(
    deployment: Deployment, process: DriverProcess, client: Listener, nursery: Nursery, log: Path
) -> None:
    """Twice as many strangers ask for streams of their own as there are ids: attaches and keepalives still pass."""
    leases = attach_a_few(client)
    messages = deployment.folder / "messages"
    wish = {"descriptor_channel": "aeron:ipc", "control_channel": "aeron:ipc"}
    write_messages(messages, (hello(FIRST, consumer_id, **wish).encode() for consumer_id in range(1, 20_001)))
    flood = nursery.flood(messages, rounds=1)
    latencies: list[float] = []
    while not latencies or not nursery.diary(flood):
        asked_s = time.monotonic()
        lease = client.attach(THIRD)
        latencies.append(time.monotonic() - asked_s)
        client.send(lease.detach())
    client.fence()
    print(f"{len(latencies)} attaches, the slowest {max(latencies) * 1e3:.0f} ms")
    assert_kept(client, leases)
    counts_at_end(process, client, deployment, log)


def test_a_channel_that_cannot_be_answered_is_declined(
    deployment: Deployment, process: DriverProcess, log: Path
) -> None:
    """A hello whose channel no ConsumerConfig can carry gets an empty one and id 0; the driver goes on."""
    with DriverClient(deployment) as client:
        client.meet(process)
        lease = client.attach(FIRST)
        client.kept.append(lease)
        for channel in (b"aeron:ipc\xff", "aeron:ipc?alias=\u00e9".encode(), b"aeron:ipc\n", b"x" * 5000):
            asked = hello(FIRST, lease.client_id).encode()[:-8]
            since = len(client.transcript)
            client.send(asked + (len(channel).to_bytes(4, "little") + channel) * 2)
            config = client.wait_for(ConsumerConfig, since, consumer_id=lease.client_id).message
            assert (config.descriptor_channel, config.descriptor_stream_id) == ("", 0)
            assert (config.control_channel, config.control_stream_id) == ("", 0)
        counts_at_end(process, client, deployment, log)


@pytest.mark.parametrize("has_lease", [False, True])
def test_a_fallback_too_long_for_any_answer_costs_other_clients_nothing(
    deployment: Deployment, process: DriverProcess, log: Path, has_lease: bool
) -> None:
    """A hello, a ConsumerConfig with 600 kB, a hello again: others attach, and SIGTERM ends the driver."""
    with DriverClient(deployment) as client:
        client.meet(process)
        kept = client.attach(FIRST)
        client.kept.append(kept)
        consumer_id = kept.client_id if has_lease else new_client_id()
        asked = hello(FIRST, consumer_id, descriptor_channel="aeron:ipc", control_channel="aeron:ipc")
        client.send(asked)
        first = client.wait_for(ConsumerConfig, consumer_id=consumer_id).message
        assert bool(first.descriptor_stream_id) is has_lease, "ids are lent to holders of leases"
        room = MAX_MESSAGE_BYTES - 1024
        override = consumer_config(FIRST, consumer_id, use_shm=False, payload_fallback_uri="x" * min(600_000, room))
        since = len(client.transcript)
        client.send(override)
        client.send(asked)
        ours: dict[str, Any] = {"consumer_id": consumer_id, "payload_fallback_uri": ""}
        assert client.wait_for(ConsumerConfig, since, **ours).message == first
        assert client.detach(client.attach(SECOND, Role.PRODUCER)).message.code is ResponseCode.OK
        counts = counts_at_end(process, client, deployment, log)
    assert counts.get("consumer_configs_refused", 0) == has_lease
