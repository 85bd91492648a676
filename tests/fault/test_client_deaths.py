# SPDX-License-Identifier: Apache-2.0
"""kill -9 of producers, consumers, the driver and the media driver: the others go on by themselves, nothing is left.

Every consumer here checks each byte that it gets, keeps views of every epoch and looks at them again later; every test
ends with an audit of its books (tests/support/stream_processes.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import LeaseRevokeReason, Role, ShmLeaseRevoked
from tests.support.driver_client import DriverClient
from tests.support.frame_books import Book
from tests.support.processes import private_directory, wait_until
from tests.support.stream_processes import ClientProcess, Consuming, Producing, Site, audit

STREAMS = range(42_000, 42_010)

_stream_ids = iter(STREAMS)


@pytest.fixture(scope="module")
def shared_site() -> Iterator[Site]:
    """Leases of 2 s; a driver that says nothing for 2.1 s counts as gone; rings of five seconds."""
    policies = {"announce_period_ms": 700, "lease_keepalive_interval_ms": 500, "lease_expiry_grace_intervals": 4}
    with private_directory() as folder, Site(folder, STREAMS, nslots=1024, policies=policies) as site:
        yield site
        site.shut_down()


@pytest.fixture
def site(shared_site: Site) -> Iterator[Site]:
    before = len(shared_site.clients)
    yield shared_site
    for client in shared_site.clients[before:]:
        client.reap()
    del shared_site.clients[before:]


@pytest.fixture
def stream_id() -> int:
    """A stream of the test's own."""
    return next(_stream_ids)


def flowing(site: Site, stream_id: int, **options: float) -> tuple[Producing, list[Consuming]]:
    """A producer and two consumers that receive its frames."""
    producer = site.produce(stream_id, **options)
    consumers = [site.consume(stream_id) for _ in range(2)]
    for consumer in consumers:
        consumer.wait_for_more(20)
    return producer, consumers


def wait_for_epoch_after(epoch: int, consumers: list[Consuming]) -> None:
    """Until all of them receive frames of a later one."""
    for consumer in consumers:
        wait_until(lambda consumer=consumer: consumer.check() or consumer.last[0] > epoch, f"{consumer.name} goes on")
        consumer.wait_for_more(20)


def close_the_books(site: Site, stream_id: int, consumers: list[Consuming]) -> None:
    site.drain(*consumers)
    truth = site.truth(stream_id)
    for consumer in consumers:
        audit(consumer, truth, consumer.end())


def shared_files(pid: int) -> set[Path]:
    """Files in /dev/shm that a process has open or mapped."""
    found = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    found |= {line.split(maxsplit=5)[-1].strip() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    return {Path(name.removesuffix(" (deleted)")) for name in found if name.startswith("/dev/shm/")}


# --- clients


def test_consumers_of_a_killed_producer_go_on_with_the_next(site: Site, stream_id: int) -> None:
    """The lease expires, a rival who has been waiting gets it, and the consumers follow to its epoch unasked."""
    producer, consumers = flowing(site, stream_id)
    rival = site.produce(stream_id)
    epoch = producer.last[0]
    producer.kill()
    wait_for_epoch_after(epoch, consumers)
    assert {consumer.last[0] for consumer in consumers} == {rival.last[0]}
    close_the_books(site, stream_id, consumers)
    assert rival.end()["epochs"] == 1


def test_of_a_killed_client_neither_file_nor_lease_is_left(site: Site, stream_id: int) -> None:
    """Both roles: EXPIRED; no file of their own in /dev/shm; the other consumer misses nothing."""
    with DriverClient(site.deployment) as observer:
        producer, (victim, survivor) = flowing(site, stream_id)
        for client in (producer, victim):
            known = {"aeron", "shm", f"{client.name}.book", f"{client.name}.journal"}  # the drivers' and the test's
            assert {path.relative_to(site.folder).parts[0] for path in shared_files(client.pid)} <= known
        victim.kill()
        revoked = observer.wait_for(ShmLeaseRevoked, stream_id=stream_id, role=Role.CONSUMER).message
        assert revoked.reason is LeaseRevokeReason.EXPIRED
        survivor.wait_for_more(100)
        site.drain(survivor)
        drops = survivor.journal("first")[0]["dropped"]
        truth = site.truth(stream_id)
        ended = survivor.end()
        audit(survivor, truth, ended)
        kept_too_long = survivor.book[Book.SPOILT]  # views that it looked at again when the ring had come round
        assert sum(ended["drops"].values()) == drops + kept_too_long, "nothing was lost once it had the first frame"
        before = site.deployment.epochs(stream_id)
        producer.kill()
        revoked = observer.wait_for(ShmLeaseRevoked, stream_id=stream_id, role=Role.PRODUCER).message
        assert revoked.reason is LeaseRevokeReason.EXPIRED
        observer.wait_for(ShmPoolAnnounce, stream_id=stream_id, producer_id=0)
        wait_until(lambda: site.deployment.epochs(stream_id)[0] >= before[-1], "older epochs are removed")
    assert victim.journal("failed") == []


# --- the drivers


def test_after_a_killed_driver_everybody_attaches_to_the_next(site: Site, stream_id: int) -> None:
    """Started again at once, or after it was missed: higher epochs, no user has to act, no frame is uncounted.

    Who misses its driver stops by itself; who does not goes on in the old epoch until it hears of the new one.
    """
    producer, consumers = flowing(site, stream_id)
    for is_missed in (False, True):
        epoch, waits = producer.last[0], {client: waiting(client) for client in (producer, *consumers)}
        site.driver.kill()
        if is_missed:
            for client, before in waits.items():
                wait_until(lambda client=client, before=before: waiting(client) > before, f"{client.name} notices")
        site.start_driver()
        wait_for_epoch_after(epoch, consumers)
        assert producer.last[0] > epoch
    close_the_books(site, stream_id, consumers)
    assert producer.end()["epochs"] == 3


def test_after_a_killed_media_driver_everybody_finds_the_next(site: Site, stream_id: int) -> None:
    """With the SHM driver or without: another one at the same directory, all come back to it, and frames flow."""
    producer, consumers = flowing(site, stream_id)
    for is_alone in (False, True):
        epoch, waits = producer.last[0], {client: waiting(client) for client in (producer, *consumers)}
        started_s = time.monotonic()
        site.media.kill()
        if not is_alone:
            site.driver.kill()
        for client, before in waits.items():
            wait_until(lambda client=client, before=before: waiting(client) > before, f"{client.name} notices")
        site.start_media()
        if not is_alone:
            site.start_driver()
        wait_for_epoch_after(epoch, consumers)
        print(f"{'alone' if is_alone else 'both'}: frames again after {time.monotonic() - started_s:.1f} s")
    close_the_books(site, stream_id, consumers)
    producer.end()


def waiting(client: ClientProcess) -> int:
    """How often it had to wait so far."""
    return sum(entry["state"] == "WAITING" for entry in client.journal("state"))
