# SPDX-License-Identifier: Apache-2.0
"""How a driver ends, and what the next one makes of it. Driver Model §2.1, §4.13, §6, §10, §14; decision C2."""

from __future__ import annotations

import shutil
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tensorpool import aeron
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import (
    ResponseCode,
    Role,
    ShmDriverShutdown,
    ShmLeaseRevoked,
    ShutdownReason,
)
from tests.support.driver_client import DriverClient, attach_request, packed_text, shutdown_request
from tests.support.driver_process import NSLOTS, Deployment, path_of
from tests.support.processes import private_directory, wait_until

STREAM, OTHER = 14_000, 14_001
TOKEN = "open sesame"
TEXT = "maintenance " * 200
TURN_NS = 1_000_000_000  # how old the time may be that a driver reads once a turn, on a machine that stands still


def packed_shutdown(notice: ShmDriverShutdown, reason: int, text: str) -> bytes:
    return struct.pack("<4H Q B", 9, 6, 901, 1, notice.timestamp_ns, reason) + packed_text(text)


# --- the end


@pytest.mark.spec("DRV-4.13-01", "DRV-4.13-03", "DRV-4.13-06", "DRV-4.13-07", "DRV-4.13-08", "DRV-4.13-09", "DRV-A-07")
@pytest.mark.spec("DRV-4.2-36", "DRV-A-08")
def test_the_right_token_drains_the_driver(shared_media_driver: aeron.MediaDriver, shm_dir: Path) -> None:
    """Draining: a last announce, attaches refused, keepalives and detaches served; then the notice, and the end."""
    deployment = Deployment(
        shm_dir,
        shared_media_driver.aeron_dir,
        streams=[STREAM, OTHER],
        policies={
            "shutdown_token": TOKEN,
            "shutdown_timeout_ms": 2500,
            "announce_period_ms": 600_000,
            "lease_expiry_grace_intervals": 10,
        },
    )
    with deployment.start() as process, DriverClient(deployment) as client:
        client.meet(process)
        producer, consumer, silent = (
            client.attach(STREAM, Role.PRODUCER),
            client.attach(STREAM),
            client.attach(OTHER),
        )
        client.kept += [producer, consumer]
        client.wait_for(ShmPoolAnnounce, stream_id=STREAM, epoch=producer.epoch)
        client.forget()
        request = struct.pack("<4H q B", 9, 8, 901, 1, -1, 1) + packed_text(TOKEN) + packed_text(TEXT)
        sent_ns = client.send(request)
        for stream_id, epoch in ((STREAM, producer.epoch), (OTHER, silent.epoch)):
            final = client.wait_for(ShmPoolAnnounce, stream_id=stream_id)
            assert final.message.epoch == epoch, "the last announce changes nothing"

        refusal = client.refused(attach_request(STREAM))
        assert refusal.code is ResponseCode.REJECTED
        assert "shutting down" in refusal.error_message
        client.kept.remove(consumer)
        assert client.detach(consumer).message.code is ResponseCode.OK
        client.send(shutdown_request(TOKEN, ShutdownReason.NORMAL))  # the first one counts

        received = client.wait_for(ShmDriverShutdown)
        client.kept.clear()
        assert received.data == packed_shutdown(received.message, 1, TEXT[:1024])
        assert received.message.timestamp_ns >= sent_ns - TURN_NS + 2_500_000_000
        ended = {received.message.lease_id for received in client.received(ShmLeaseRevoked)}
        assert consumer.lease_id in ended
        assert producer.lease_id not in ended, "it was kept alive, for longer than a lifetime"
        assert process.wait_for_end()[0] == 0
        client.poll()
        assert not list(client.from_driver(received.index + 1)), "nothing is said after the notice"
    assert deployment.leftovers() == []


@pytest.mark.spec("DRV-4.13-10", "DRV-4.5-01", "DRV-A-07", "WIRE-15.14-05")
def test_sigterm_ends_a_driver_in_order(shm_dir: Path) -> None:
    """With everything by default, media driver included: the notice is on stream 1000, exit code 0, nothing is left."""
    deployment = Deployment(shm_dir, str(shm_dir / "aeron"), streams=[STREAM], driver={"control_stream_id": None})
    with deployment.start() as process:
        wait_until(lambda: aeron.is_driver_active(deployment.aeron_dir) or process.has_ended, "a media driver")
        with DriverClient(deployment) as client:
            client.meet(process)
            lease = client.attach(STREAM, Role.PRODUCER)
            announce = client.wait_for(ShmPoolAnnounce, stream_id=STREAM, epoch=lease.epoch).message
            process.send(signal.SIGTERM)
            received = client.wait_for(ShmDriverShutdown)
            code, _ = process.finish()
            assert code == 0
            assert received.stream_id == 1000
            assert received.data == packed_shutdown(received.message, 0, received.message.error_message)
            last = client.received(ShmPoolAnnounce, stream_id=STREAM)[-1]
            assert last.index < received.index
            assert last.message.epoch >= announce.epoch
    assert deployment.leftovers() == []
    assert not Path(deployment.aeron_dir).exists()


# --- the next one


class Lineage:
    """A driver that runs, and its successors, on one configuration; a listener records everything."""

    def __init__(self, deployment: Deployment, client: DriverClient) -> None:
        self.deployment = deployment
        self.client = client
        self.process = deployment.start()
        self.highest = 0  # that was on record when the last one had ended

    def succeed(self, end: Callable[[Lineage], None]) -> None:
        """End the driver in some way and start the next one."""
        end(self)
        self.process.reap()
        self.process = self.deployment.start()
        self.client.meet(self.process)


@pytest.fixture(scope="module")
def lineage(shared_media_driver: aeron.MediaDriver) -> Iterator[Lineage]:
    with private_directory() as folder:
        deployment = Deployment(
            folder,
            shared_media_driver.aeron_dir,
            streams=[STREAM, OTHER],
            policies={"epoch_gc_min_age_ns": 600_000_000_000, "lease_expiry_grace_intervals": 50},
        )
        with DriverClient(deployment) as client:
            lineage = Lineage(deployment, client)
            try:
                client.meet(lineage.process)
                yield lineage
            finally:
                lineage.process.reap()


def in_order(lineage: Lineage) -> None:
    assert lineage.process.terminate()[0] == 0
    assert lineage.deployment.leftovers() == []


def in_order_and_clock_set_back(lineage: Lineage) -> None:
    """As if the epochs of the last driver had been counted by a clock that was a day ahead."""
    in_order(lineage)
    (record,) = lineage.deployment.base_dir.glob("*/*/highest-epoch.*")
    assert record.stat().st_size == 0
    lineage.highest = int(record.name.partition(".")[2]) + 86_400_000_000_000
    record.rename(record.with_name(f"highest-epoch.{lineage.highest}"))


def killed(lineage: Lineage) -> None:
    lineage.process.kill()
    assert lineage.deployment.epochs(STREAM)


def killed_and_recreated(lineage: Lineage) -> None:
    killed(lineage)
    lineage.deployment.tables["policies"]["recreate_on_startup"] = True


def killed_and_looked_through(lineage: Lineage) -> None:
    """Collection at the start, whose policy keeps what is younger than ten minutes."""
    killed(lineage)
    lineage.deployment.tables["policies"]["epoch_gc_on_startup"] = True


def killed_and_collected(lineage: Lineage) -> None:
    """Collection at the start, whose policy keeps nothing but the current epoch."""
    killed_and_looked_through(lineage)
    lineage.deployment.tables["policies"] |= {"epoch_gc_keep": 1, "epoch_gc_min_age_ns": 0}


def killed_and_files_lost(lineage: Lineage) -> None:
    killed(lineage)
    shutil.rmtree(lineage.deployment.base_dir)


def killed_and_layout_changed(lineage: Lineage) -> None:
    killed(lineage)
    pools = [{"pool_id": 2, "stride_bytes": 1024}]
    lineage.deployment.tables["profiles"]["small"] = {"header_nslots": 4 * NSLOTS, "payload_pools": pools}


@pytest.mark.spec("DRV-10-02", "DRV-6-01")
@pytest.mark.parametrize(
    "end",
    [
        in_order,
        pytest.param(killed, marks=pytest.mark.spec("DRV-17-36")),
        pytest.param(killed_and_recreated, marks=pytest.mark.spec("DRV-14-01", "DRV-14-02")),
        killed_and_looked_through,
        killed_and_collected,
        pytest.param(killed_and_files_lost, marks=pytest.mark.spec("DRV-6-06")),
        pytest.param(killed_and_layout_changed, marks=pytest.mark.spec("DRV-6-05", "WIRE-15.2-02")),
        in_order_and_clock_set_back,  # last: from here on nothing but the record tells
    ],
)
def test_the_next_driver_goes_on_above_the_epochs_of_the_last(lineage: Lineage, end: Callable[[Lineage], None]) -> None:
    """However a driver ended and whatever became of its files: announces and grants of the next have higher epochs."""
    client, deployment, policies = lineage.client, lineage.deployment, lineage.deployment.tables["policies"]
    client.forget()
    before, consumer = client.attach(STREAM, Role.PRODUCER), client.attach(OTHER)
    old_files = path_of(before.response.header_region_uri).parent
    usual = dict(policies)
    lineage.succeed(end)
    policies.clear()
    policies.update(usual)

    announce = client.next_announce(STREAM).message
    assert announce.producer_id == 0
    assert announce.epoch > max(before.epoch, lineage.highest)
    assert client.next_announce(OTHER).message.epoch > consumer.epoch
    assert old_files.exists() == (end in (killed, killed_and_looked_through, killed_and_layout_changed))
    assert deployment.epochs(STREAM)[-1] == announce.epoch

    for lease in (before, consumer):  # the old leases are gone with the old driver
        client.send(lease.keepalive())
        assert client.detach(lease).message.code is ResponseCode.REJECTED
    after = client.attach(STREAM, Role.PRODUCER, client_id=before.client_id)
    assert after.epoch > announce.epoch
    assert after.lease_id not in (before.lease_id, consumer.lease_id)
    nslots = deployment.tables["profiles"]["small"]["header_nslots"]
    assert after.response.header_nslots == nslots
    assert {pool.pool_nslots for pool in after.response.payload_pools} == {nslots}
    client.detach(after)


@pytest.mark.spec("DRV-8-01")
def test_announces_end_with_the_driver(lineage: Lineage) -> None:
    """Only the driver announces, though clients are there and a producer keeps its lease alive."""
    client = lineage.client

    def killed_and_missed(lineage: Lineage) -> None:
        killed(lineage)
        client.poll()
        since, until_s = len(client.transcript), time.monotonic() + 0.3
        client.wait_until(lambda: time.monotonic() > until_s, "three periods pass")
        assert not client.received(ShmPoolAnnounce, since)

    client.forget()
    client.kept.append(client.attach(STREAM, Role.PRODUCER))
    try:
        lineage.succeed(killed_and_missed)
    finally:
        client.kept.clear()


@pytest.mark.spec("DRV-2.1-02")
def test_a_second_driver_for_a_namespace_is_refused(lineage: Lineage) -> None:
    """Exit code 1 and one line with the holder's pid; the holder, its leases and its epochs are untouched."""
    client, deployment = lineage.client, lineage.deployment
    client.forget()
    lease = client.attach(STREAM, Role.PRODUCER)
    with deployment.start() as second:
        code, output = second.finish()
    assert code == 1
    (line,) = output.splitlines()
    assert f"pid {lineage.process.pid} " in line
    announce = client.next_announce(STREAM).message
    assert (announce.epoch, announce.producer_id) == (lease.epoch, lease.client_id)
    assert client.detach(lease).message.code is ResponseCode.OK


def test_a_driver_does_not_act_on_what_was_said_to_its_predecessor(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path
) -> None:
    """A slow listener holds the log back: the attach and the shutdown that it still contains are not obeyed again."""
    deployment = Deployment(
        shm_dir,
        shared_media_driver.aeron_dir,
        streams=[STREAM],
        policies={"shutdown_token": TOKEN, "lease_expiry_grace_intervals": 100},
    )
    with DriverClient(deployment) as client, DriverClient(deployment):
        with deployment.start() as first:
            client.meet(first)
            client.attach(STREAM, Role.PRODUCER)
            client.send(shutdown_request(TOKEN))
            assert first.wait_for_end()[0] == 0
        with deployment.start() as second:
            client.meet(second)
            assert client.next_announce(STREAM).message.producer_id == 0
            client.detach(client.attach(STREAM, Role.PRODUCER))
            client.next_announce(STREAM)
            client.next_announce(STREAM)
            assert not client.received(ShmDriverShutdown)
            assert second.terminate()[0] == 0
