# SPDX-License-Identifier: Apache-2.0
"""A foreign process that subscribes to the control stream and never polls: the driver serves all other clients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorpool import aeron
from tensorpool.diagnosis.check_result import Level
from tensorpool.diagnosis.holders import check_holders
from tensorpool.driver import DriverConfig
from tensorpool.wire.driver import ResponseCode, ShmDetachResponse, ShmDriverShutdown, ShmLeaseRevoked
from tests.aeron.test_renewal import foreign_subscriber
from tests.support.chaos import events_of
from tests.support.driver_client import DriverClient
from tests.support.driver_process import Deployment, DriverProcess
from tests.support.processes import Process

STREAM = 35_000
CHANNEL = "aeron:ipc?term-length=64k"  # a window of 32 KiB is full soon
CYCLES = 60


@pytest.fixture
def deployment(shared_media_driver: aeron.MediaDriver, shm_dir: Path) -> Deployment:
    return Deployment(
        shm_dir,
        shared_media_driver.aeron_dir,
        streams=range(STREAM, STREAM + 20),
        driver={"control_channel": CHANNEL},
        policies={"lease_keepalive_interval_ms": 10_000, "shutdown_timeout_ms": 100},
    )


@pytest.fixture
def client(deployment: Deployment, process: DriverProcess) -> Iterator[DriverClient]:
    with DriverClient(deployment) as client:
        yield client.meet(process)


@pytest.fixture
def foreign(deployment: Deployment, client: DriverClient) -> Iterator[Process]:
    with foreign_subscriber(deployment.aeron_dir, *deployment.control) as foreign:
        yield foreign


@pytest.mark.spec("DRV-4.9-01", "DRV-4.9-05")
def test_everybody_else_is_served_while_a_foreign_subscriber_holds_the_log(
    deployment: Deployment, client: DriverClient, foreign: Process, log: Path
) -> None:
    """Attaches are answered, each client gets response, end and announce in order, and the process is named."""
    slowest_s = 0.0
    client.wait_until(lambda: events_of(log, "log_held"), "announces have filled the window")
    for number in range(CYCLES):
        if number % 4 == 0:
            client.next_announce(STREAM)
        asked_s = time.monotonic()
        lease = client.attach(STREAM)
        slowest_s = max(slowest_s, time.monotonic() - asked_s)
        answer = client.detach(lease)
        assert answer.message.code is ResponseCode.OK
        ended = client.wait_for(ShmLeaseRevoked, lease_id=lease.lease_id)
        kinds = [type(received.message) for received in (lease.received, answer, ended)]
        places = [received.index for received in (lease.received, answer, ended)]
        assert places == sorted(places), kinds
        assert kinds[1:] == [ShmDetachResponse, ShmLeaseRevoked]
    print(f"{CYCLES} attaches past a held log, the slowest took {1000 * slowest_s:.0f} ms")
    words = f", pid {foreign.pid}: stream {deployment.control[1]}, position "
    client.wait_until(
        lambda: any(words in it["holders"][0] for it in events_of(log, "log_held")), "the process is named"
    )

    config = DriverConfig.load(deployment.config_path, environ={})
    findings = [it.found for it in check_holders(config, deployment.aeron_dir) if it.level is Level.WARN]
    assert any(f", pid {foreign.pid}:" in found for found in findings), findings
    foreign.reap()
    client.wait_until(lambda: events_of(log, "log_released"), "the driver forgets it")
    assert events_of(log, "log_released")[0]["renewals"] >= 3
    assert client.detach(client.attach(STREAM)).message.code is ResponseCode.OK
    assert events_of(log, "turn_failed") == []


@pytest.mark.spec("DRV-4.13-10")
def test_a_held_log_does_not_keep_the_shutdown_notice_back(
    deployment: Deployment, process: DriverProcess, client: DriverClient, foreign: Process, log: Path
) -> None:
    """SIGTERM while there is no room: the clients receive the notice all the same, and nothing is left."""
    client.wait_until(lambda: events_of(log, "log_held"), "announces have filled the window")
    code, output = process.terminate()
    assert code == 0, output
    client.wait_for(ShmDriverShutdown)
    assert deployment.leftovers() == []
