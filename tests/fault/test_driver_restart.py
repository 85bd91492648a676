# SPDX-License-Identifier: Apache-2.0
"""The SHM driver or its media driver is killed or stopped: the next one goes on, pauses end no lease."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

import pytest

from tensorpool import aeron
from tensorpool.errors import TransportError
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import LeaseRevokeReason, ResponseCode, Role, ShmAttachResponse, ShmLeaseRevoked
from tests.support.chaos import TOKEN, end, events_of, start_logged
from tests.support.client_nursery import Listener, ring_of
from tests.support.driver_client import DriverClient, Lease, attach_request
from tests.support.driver_process import Deployment, DriverProcess
from tests.support.processes import media_driver, wait_until

FIRST, SECOND, THIRD = STREAMS = range(31_000, 31_003)
PERIOD_NS = 100_000_000
PATIENT = {"lease_expiry_grace_intervals": 5}


def attach_a_few(client: DriverClient) -> list[Lease]:
    """A producer and two consumers, kept alive from now on."""
    leases = [client.attach(FIRST, Role.PRODUCER), client.attach(FIRST), client.attach(SECOND)]
    client.kept += leases
    return leases


def pass_time(client: DriverClient, duration_ns: int) -> None:
    """Listen and keep alive for so long."""
    end_ns = time.monotonic_ns() + duration_ns
    client.wait_until(lambda: time.monotonic_ns() > end_ns, "time passes")


def assert_served(client: DriverClient, leases: list[Lease]) -> None:
    """The driver answers, has ended none of the leases, and grants new ones."""
    client.fence()
    ended = {received.message.lease_id for received in client.received(ShmLeaseRevoked)}
    assert not ended & {lease.lease_id for lease in leases}
    assert client.next_announce(FIRST).message.producer_id == leases[0].client_id
    assert client.detach(client.attach(THIRD, Role.PRODUCER)).message.code is ResponseCode.OK
    assert client.detach(client.attach(FIRST)).message.code is ResponseCode.OK


# --- kill -9


@pytest.mark.spec("DRV-10-02", "DRV-4.13-14")
def test_after_kill_9_no_lease_is_granted_before_its_stream_is_announced_higher(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path
) -> None:
    """Under a storm of attaches the restarted driver speaks of no old epoch, and announces each stream first.

    Meanwhile the old regions give no sign of life, old leases are worth nothing, and what the killed driver left is
    removed by policy.
    """
    deployment = Deployment(
        shm_dir,
        shared_media_driver.aeron_dir,
        streams=STREAMS,
        policies={"lease_expiry_grace_intervals": 10, "shutdown_token": TOKEN},
    )
    with Listener(deployment) as client:
        with deployment.start() as process:
            client.meet(process)
            old = attach_a_few(client)
            ring = ring_of(old[0], deployment.base_dir)
            client.wait_for(ShmPoolAnnounce, stream_id=THIRD)
            last = {id: deployment.epochs(id)[-1] for id in STREAMS}
            process.kill()
        stamp_ns = ring.activity_timestamp_ns
        pass_time(client, 3 * PERIOD_NS)
        assert time.monotonic_ns() - stamp_ns >= 3 * PERIOD_NS
        assert ring.activity_timestamp_ns == stamp_ns, "who mapped it can tell that the driver is gone"

        client.transcript.clear()
        sent: set[int] = set()
        with deployment.start() as process:

            def is_granted() -> bool:
                assert not process.has_ended, process.finish()
                for id in STREAMS:  # as clients do that wait for their driver
                    request = attach_request(id)
                    sent.add(request.correlation_id)
                    client.send(request)
                return len({received.message.stream_id for received in client.received(ShmAttachResponse, code=0)}) == 3

            client.wait_until(is_granted, "a lease on every stream")
            client.fence()
            announced: dict[int, int] = {}
            for received in client.transcript:
                message = received.message
                if isinstance(message, ShmPoolAnnounce):
                    assert message.epoch > last[message.stream_id]
                    announced.setdefault(message.stream_id, message.epoch)
                elif isinstance(message, ShmAttachResponse) and message.code is ResponseCode.OK:
                    assert message.correlation_id in sent
                    assert message.stream_id is not None
                    assert message.epoch == announced[message.stream_id]
            assert set(announced) == set(STREAMS)

            for lease in old:
                assert client.detach(lease).message.code is ResponseCode.REJECTED
            producer = client.attach(FIRST, Role.PRODUCER, client_id=old[0].client_id)
            client.kept.append(producer)
            assert producer.epoch > announced[FIRST] > old[0].epoch
            assert ring.activity_timestamp_ns == stamp_ns
            client.wait_until(
                lambda: (
                    deployment.epochs(FIRST) == [announced[FIRST], producer.epoch]
                    and deployment.epochs(SECOND) == [last[SECOND], announced[SECOND]]
                ),
                "the current epoch and the one before are left",
            )
            assert not client.received(ShmLeaseRevoked, lease_id=old[0].lease_id)
            client.kept.clear()
            end(process, client)
    assert deployment.leftovers() == []


def test_a_killed_driver_with_its_media_driver_is_started_again_at_once(shm_dir: Path) -> None:
    """Everything by default, kill -9, the same command again: it serves within seconds, with a higher epoch."""
    deployment = Deployment(shm_dir, str(shm_dir / "aeron"), streams=STREAMS, policies={"shutdown_token": TOKEN})
    epoch = 0
    took_s: list[float] = []
    for is_last in (False, True):
        started_s = time.monotonic()
        with deployment.start() as process:
            assert process.read_line() == f"driver driver-01 serves {deployment.aeron_dir}"
            took_s.append(time.monotonic() - started_s)
            assert took_s[-1] < took_s[0] + 9.0, "before Aeron's own timeout"
            with DriverClient(deployment) as client:
                client.meet(process)
                lease = client.attach(FIRST, Role.PRODUCER)
                assert lease.epoch > epoch
                epoch = lease.epoch
                if not is_last:
                    process.kill()
                else:
                    end(process, client)
    assert deployment.leftovers() == []
    assert not Path(deployment.aeron_dir).exists()


@pytest.mark.parametrize("kind", [DriverClient, Listener], ids=["shared log", "log of its own"])
def test_requests_to_the_last_driver_are_not_handled_by_the_next(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path, kind: type[DriverClient]
) -> None:
    """Attaches and the order to end are still in the clients' logs when the next driver comes: it passes them over."""
    deployment = Deployment(shm_dir, shared_media_driver.aeron_dir, streams=STREAMS, policies={"shutdown_token": TOKEN})
    with DriverClient(deployment), kind(deployment) as client:  # the first never listens: a new subscriber joins there
        with deployment.start() as process:
            client.meet(process)
            for stream_id in STREAMS:
                client.attach(stream_id, Role.PRODUCER)
            end(process, client)
        with deployment.start() as process:
            client.meet(process)
            pass_time(client, 2 * PERIOD_NS)
            assert not process.has_ended, "it was not meant"
            for stream_id in STREAMS:
                assert client.next_announce(stream_id).message.producer_id == 0
            assert not client.received(ShmAttachResponse, code=ResponseCode.OK)
            end(process, client)


# --- SIGSTOP and SIGCONT


def stop_and_go(process: DriverProcess, client: DriverClient, duration_ns: int) -> int:
    """Pause a driver while the clients go on; when it was woken."""
    process.send(signal.SIGSTOP)
    pass_time(client, duration_ns)
    woken_ns = time.monotonic_ns()
    process.send(signal.SIGCONT)
    return woken_ns


def test_a_driver_that_is_stopped_for_longer_than_a_lease_expires_no_lease(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path
) -> None:
    """Keepalives that waited in the log count; a client that fell silent meanwhile gets its full grace, then ends."""
    deployment = Deployment(shm_dir, shared_media_driver.aeron_dir, streams=STREAMS, policies=PATIENT)
    with deployment.start() as process, DriverClient(deployment) as client:
        client.meet(process)
        leases = attach_a_few(client)
        silent = client.attach(THIRD)
        woken_ns = stop_and_go(process, client, 3 * deployment.lease_ns)
        assert_served(client, leases)
        revoke = client.wait_for(ShmLeaseRevoked, lease_id=silent.lease_id).message
        assert revoke.reason is LeaseRevokeReason.EXPIRED
        assert revoke.timestamp_ns >= woken_ns + deployment.lease_ns // 2
        pass_time(client, 2 * deployment.lease_ns)
        assert_served(client, leases)


def test_a_driver_that_stops_with_its_media_driver_expires_no_lease(shm_dir: Path) -> None:
    """For less than Aeron's timeout: clients send on into the logs, and everything is served afterwards."""
    deployment = Deployment(shm_dir, str(shm_dir / "aeron"), streams=STREAMS, policies=PATIENT)
    with deployment.start() as process:
        assert process.read_line()
        with DriverClient(deployment) as client:
            client.meet(process)
            leases = attach_a_few(client)
            stop_and_go(process, client, 3 * deployment.lease_ns)
            assert_served(client, leases)
            pass_time(client, 2 * deployment.lease_ns)
            assert_served(client, leases)


def test_a_driver_that_its_media_driver_gave_up_comes_back_by_itself(shm_dir: Path) -> None:
    """Stopped for longer than Aeron's client timeout: it connects anew, expires no lease, and serves."""
    directory = str(shm_dir / "aeron")
    liveness = ("client_liveness_timeout_ns=3000000000", "publication_unblock_timeout_ns=3500000000")
    deployment = Deployment(shm_dir, directory, streams=STREAMS, policies=PATIENT)
    log = shm_dir / "log"
    with (
        media_driver(directory, *liveness),
        start_logged(deployment, log) as process,
        DriverClient(deployment) as client,
    ):
        client.meet(process)
        leases = attach_a_few(client)
        stop_and_go(process, client, 5_000_000_000)
        client.wait_until(lambda: events_of(log, "media_driver_found"), "it connects anew")
        assert_served(client, leases)
        pass_time(client, 2 * deployment.lease_ns)
        assert_served(client, leases)


# --- the media driver


def test_a_killed_media_driver_is_replaced_and_the_driver_reconnects(shm_dir: Path) -> None:
    """kill -9, then another at the same directory: the driver finds it by itself and serves attaches again.

    A client that comes back too still has its lease; nothing is said that was due during the outage.
    """
    directory, log = str(shm_dir / "aeron"), shm_dir / "log"
    deployment = Deployment(
        shm_dir, directory, streams=STREAMS, policies={"lease_expiry_grace_intervals": 15, "shutdown_token": TOKEN}
    )
    first = media_driver(directory)
    with first, start_logged(deployment, log) as process, DriverClient(deployment) as before:
        before.meet(process)
        leases = attach_a_few(before)
        first.send(signal.SIGKILL)
        first.finish()
        killed_s = time.monotonic()
        with media_driver(directory), DriverClient(deployment) as client:

            def is_found() -> bool:
                with contextlib.suppress(TransportError):  # the old logs still work until Aeron notices
                    before.poll()
                client.poll()
                return bool(events_of(log, "media_driver_found"))

            wait_until(is_found, "the driver finds the new media driver")
            found_s = time.monotonic()
            client.kept += leases
            client.meet(process)
            assert_served(client, leases)
            print(f"reconnected {found_s - killed_s:.1f} s after the kill")
            stamps = [received.message.announce_timestamp_ns / 1e9 for received in client.received(ShmPoolAnnounce)]
            assert min(stamps) > found_s - 1.0, "what could not be said in time is not said late"
            pass_time(client, deployment.lease_ns)
            assert_served(client, leases)
            client.kept.clear()
            end(process, client)
    assert deployment.leftovers() == []
