# SPDX-License-Identifier: Apache-2.0
"""The driver embedded in a program: `tp.Driver` and `tp.local()`."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.discovery.provider import Provider
from tensorpool.driver import conductor as conductor_module
from tensorpool.driver import driver as driver_module
from tensorpool.wire import Message, decode
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import PublishMode, ShmAttachResponse, ShmDriverShutdown
from tests.driver.conftest import attach
from tests.support.processes import Process, run_script, wait_until

NAP_NS = 120_000_000_000  # longer than a client waits for an answer


def listen(client: aeron.Client, config: tp.DriverConfig) -> tuple[aeron.Publication, aeron.Subscription]:
    control = config.driver.control
    subscription = client.add_subscription(control.channel, control.stream_id)
    publication = client.add_publication(control.channel, control.stream_id)
    wait_until(lambda: publication.has_room, "the control stream is connected")
    return publication, subscription


def hear[M: Message](subscription: aeron.Subscription, kind: type[M]) -> M:
    received: list[Message] = []

    def found() -> bool:
        subscription.poll(lambda data, _: received.append(decode(data)), 100)
        return any(isinstance(message, kind) for message in received)

    wait_until(found, f"a {kind.__name__} is received")
    return next(message for message in received if isinstance(message, kind))


def test_local_serves_at_once_and_leaves_nothing() -> None:
    """A driver of the program's own grants a stream on demand, and /dev/shm is as before when it is closed."""
    with tp.local() as pool:
        assert pool.embeds_media_driver
        own = Path(pool.aeron_dir).parent
        assert "tensorpool-local" in own.name
        assert Path(pool.config.shm.base_dir).is_relative_to(own)
        client = aeron.connect(pool.aeron_dir)
        publication, subscription = listen(client, pool.config)
        request = attach(client_id=5, stream_id=0, publish_mode=PublishMode.EXISTING_OR_CREATE)
        assert publication.offer(request.encode())
        response = hear(subscription, ShmAttachResponse)
        assert (response.error_message, response.stream_id) == ("", 20_000)
        assert hear(subscription, ShmPoolAnnounce).epoch == response.epoch
        client.close()
    assert not pool.is_running
    assert not own.exists()


def test_what_a_killed_process_left_is_removed_by_the_next() -> None:
    """The directory of one that lives is left alone."""
    script = """
import os, signal, sys, tensorpool as tp
pool = tp.local()
print(os.path.dirname(pool.aeron_dir), flush=True)
if sys.stdin.readline():
    os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", script]
    with tp.local() as living, subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as doomed:
        assert doomed.stdin is not None
        assert doomed.stdout is not None
        left = Path(doomed.stdout.readline().strip())
        assert left.is_dir()
        with tp.local():
            assert left.is_dir()
        doomed.communicate("die\n")
        assert left.is_dir()
        with tp.local():
            assert not left.exists()
        assert Path(living.aeron_dir).is_dir()


def test_two_local_drivers_do_not_meet() -> None:
    """Each has a media driver and directories of its own."""
    with tp.local() as one, tp.local() as other:
        assert one.aeron_dir != other.aeron_dir
        assert one.config.shm.base_dir != other.config.shm.base_dir


def test_a_driver_uses_a_media_driver_that_is_there_and_leaves_it_alone(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path
) -> None:
    """It embeds one only where none lives, and ends only what is its own; its clients are notified."""
    overrides = {"shm.base_dir": str(shm_dir), "driver.control_stream_id": 47_110}
    config = tp.DriverConfig.load(environ={}, overrides=overrides)
    client = aeron.connect(shared_media_driver.aeron_dir)
    with tp.Driver(config, aeron_dir=shared_media_driver.aeron_dir) as driver:
        assert not driver.embeds_media_driver
        _, subscription = listen(client, config)
    assert hear(subscription, ShmDriverShutdown).reason == 0
    assert aeron.is_driver_active(shared_media_driver.aeron_dir)
    client.close()


def test_a_killed_media_driver_is_noticed_long_before_its_heartbeat_is_old(shm_dir: Path) -> None:
    """By its process: the driver has let it go while Aeron still takes it for alive, and finds the next."""
    directory = str(shm_dir / "aeron")
    with Process("-m", "tensorpool", "media-driver", "--aeron-dir", directory) as media_driver:
        assert media_driver.read_line() == f"media driver at {directory}"
        config = tp.DriverConfig.load(None, environ={}, overrides={"shm.base_dir": str(shm_dir / "regions")})
        with tp.Driver(config, aeron_dir=directory) as driver:
            media_driver.send(signal.SIGKILL)
            media_driver.finish()
            wait_until(lambda: driver.conductor._streams is None, "the driver has noticed")
            assert aeron.is_driver_active(directory)
            with aeron.MediaDriver(directory):
                wait_until(lambda: driver.conductor._streams is not None, "the driver has found the next")


def test_a_driver_sleeps_until_a_client_sends_something(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also its discovery: clients ring for requests and queries, and what it was ordered ends its sleep."""
    for name in ("LONGEST_NAP_NS", "SHORTEST_DISCOVERY_NAP_NS", "LONGEST_DISCOVERY_NAP_NS"):
        monkeypatch.setattr(driver_module, name, NAP_NS)
    monkeypatch.setattr(conductor_module, "LOOK_EVERY_NS", NAP_NS)
    config = tp.DriverConfig.load(environ={}, overrides={"shm.base_dir": str(shm_dir / "regions")})
    driver = tp.Driver(config, aeron_dir=str(shm_dir / "aeron"))
    try:
        with tp.connect(driver.aeron_dir, config=config) as client, client.producer("cam", create=True) as producer:
            wait_until(lambda: client.discover(name="cam", timeout=20), "its stream is announced")
            assert producer.publish(np.zeros(8, np.uint8)) is not None
    finally:
        driver.shut_down()
        wait_until(lambda: (driver.conductor.wake(), not driver.is_running)[1], "it has drained", timeout_s=200)
        assert driver.discovery is not None
        monkeypatch.undo()
        ringer = aeron.connect(driver.aeron_dir)
        closing = threading.Thread(target=driver.close)
        closing.start()
        wait_until(lambda: (ringer.ring(aeron.Bell.DISCOVERY), not closing.is_alive())[1], "it is closed")
        ringer.close()


def test_a_namespace_that_is_taken_leaves_no_media_driver_behind(shm_dir: Path) -> None:
    """A driver that cannot start takes everything back that it began."""
    config = tp.DriverConfig.load(environ={}, overrides={"shm.base_dir": str(shm_dir / "regions")})
    with tp.Driver(config, aeron_dir=str(shm_dir / "one")):
        with pytest.raises(tp.ConfigError, match=r"shm\.namespace.*holds"):
            tp.Driver(config, aeron_dir=str(shm_dir / "two"))
        assert not (shm_dir / "two").exists()


def test_a_discovery_provider_that_fails_stops_nothing(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither with its turns, which are logged once a second, nor with its end: driver and media driver are closed."""
    config = tp.DriverConfig.load(environ={}, overrides={"shm.base_dir": str(shm_dir / "regions")})
    turns: list[int] = []

    def do_work(_: object) -> int:
        turns.append(1)
        raise RuntimeError("the provider fails")

    def on_close(_: object) -> None:
        raise RuntimeError("the provider cannot end")

    monkeypatch.setattr(Provider, "do_work", do_work)
    monkeypatch.setattr(Provider, "on_close", on_close)
    driver = tp.Driver(config, aeron_dir=str(shm_dir / "aeron"))
    client = aeron.connect(driver.aeron_dir)
    publication, subscription = listen(client, config)
    wait_until(lambda: len(turns) > 50, "the provider has failed often")
    assert publication.offer(attach(5, 0, publish_mode=PublishMode.EXISTING_OR_CREATE).encode())
    assert hear(subscription, ShmAttachResponse).error_message == ""
    failures = [record for record in caplog.records if record.getMessage().startswith("turn_failed")]
    assert 0 < len(failures) < len(turns) // 5
    client.close()
    with pytest.raises(RuntimeError, match="cannot end"):
        driver.close()
    assert not driver.is_running
    assert not list((shm_dir / "regions").rglob("*.ring"))
    assert not (shm_dir / "aeron").exists()


def test_an_embedded_driver_prints_nothing() -> None:
    """A library is silent unless it is asked: a notebook shows what its author prints."""
    script = "import tensorpool as tp\nwith tp.local() as pool:\n    print(pool.is_running)"
    assert run_script(script) == (0, "True\n")
