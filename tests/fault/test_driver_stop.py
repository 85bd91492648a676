# SPDX-License-Identifier: Apache-2.0
"""SIGTERM ends the driver within its shutdown timeout, whatever state it is in."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorpool.cli.driver import FORCE_AFTER_S
from tensorpool.wire.driver import ResponseCode, Role, ShmAttachResponse
from tests.support.chaos import events_of, start_logged
from tests.support.driver_client import DriverClient, attach_request
from tests.support.driver_process import Deployment, DriverProcess
from tests.support.processes import Process, media_driver, wait_until

STREAM = 36_000
TIMEOUT_S = 0.5
LARGE_BYTES = 4 << 30
BUSY_S = 4.0  # a machine with a busy neighbour


HANGING = """
import sys, time
from tensorpool.cli.main import main
from tensorpool.driver.conductor import DriverConductor

def hang(conductor, now_ns):
    while not conductor._memory._finished:
        time.sleep(0.01)
    print("hangs", flush=True)
    time.sleep(1000)

DriverConductor._listen = hang
main()
"""


@pytest.fixture
def media(shm_dir: Path) -> Iterator[Process]:
    with media_driver(str(shm_dir / "aeron")) as media:
        yield media


@pytest.fixture
def deployment(media: Process, shm_dir: Path) -> Deployment:
    policies = {"shutdown_timeout_ms": int(TIMEOUT_S * 1000)}
    return Deployment(shm_dir, str(shm_dir / "aeron"), streams=[STREAM], policies=policies)


@pytest.fixture
def process(deployment: Deployment, log: Path) -> Iterator[DriverProcess]:
    with start_logged(deployment, log) as process, DriverClient(deployment) as client:
        client.meet(process)
        yield process


def terminate(process: DriverProcess) -> tuple[int, float]:
    """Exit code, and the seconds until the end."""
    begun_s = time.monotonic()
    code, _ = process.terminate()
    took_s = time.monotonic() - begun_s
    print(f"ended {took_s:.2f} s after SIGTERM with code {code}")
    return code, took_s


def test_a_media_driver_that_is_stopped_does_not_keep_the_driver(
    media: Process, process: DriverProcess, deployment: Deployment
) -> None:
    """It answers nothing, and has not died either."""
    media.send(signal.SIGSTOP)
    _, took_s = terminate(process)
    assert took_s < TIMEOUT_S + FORCE_AFTER_S + BUSY_S
    assert deployment.leftovers() == []


def test_a_media_driver_that_died_does_not_keep_the_driver(
    media: Process, process: DriverProcess, deployment: Deployment, log: Path
) -> None:
    """The driver looks for another one, and ends in order all the same."""
    media.send(signal.SIGKILL)
    media.finish()
    wait_until(lambda: events_of(log, "media_driver_lost"), "the driver has noticed")
    code, took_s = terminate(process)
    assert code == 0
    assert took_s < TIMEOUT_S + FORCE_AFTER_S + BUSY_S
    assert deployment.leftovers() == []


def test_a_turn_that_never_ends_does_not_keep_the_driver(deployment: Deployment) -> None:
    """Whatever it waits for: the process ends by force, and its regions are removed before."""
    deployment._write()
    arguments = ["driver", "--config", str(deployment.config_path), "--aeron-dir", deployment.aeron_dir]
    with DriverProcess("-c", HANGING, *arguments) as process:
        wait_until(lambda: process.read_line() == "hangs", "its turn hangs")
        assert deployment.leftovers(), "regions are there"
        code, took_s = terminate(process)
    assert code == 1
    assert took_s < TIMEOUT_S + FORCE_AFTER_S + BUSY_S
    assert [path for path in deployment.leftovers() if path.is_file() and path.suffix in (".ring", ".pool")] == []


def test_gigabytes_under_way_do_not_keep_the_driver(media: Process, shm_dir: Path, log: Path) -> None:
    """An attach that waits for its memory: the memory is given up, and nothing of it is left."""
    large = {"header_nslots": 64, "payload_pools": [{"pool_id": 1, "stride_bytes": LARGE_BYTES // 64}]}
    deployment = Deployment(
        shm_dir,
        str(shm_dir / "aeron"),
        streams=[STREAM],
        policies={"shutdown_timeout_ms": 0},
        profiles={"small": large},
    )
    with start_logged(deployment, log) as process, DriverClient(deployment) as client:
        client.meet(process)
        client.send(attach_request(STREAM, Role.PRODUCER))
        wait_until(lambda: any(path.stat().st_blocks > 1000 for path in pools_of(deployment)), "memory is coming")
        code, took_s = terminate(process)
        assert code == 0
        assert not events_of(log, "end_forced")
        (given_up,) = events_of(log, "epoch_failed")
        assert "not wanted any more" in given_up["error"]
        assert client.received(ShmAttachResponse, code=ResponseCode.OK) == []
        assert deployment.leftovers() == []
    assert took_s < FORCE_AFTER_S + BUSY_S


def pools_of(deployment: Deployment) -> list[Path]:
    return sorted(deployment.base_dir.rglob("*.pool"))
