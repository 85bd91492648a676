# SPDX-License-Identifier: Apache-2.0
"""Fixtures that every folder may use: a media driver of the test's own, connections to it, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tensorpool import aeron
from tensorpool.client import Client
from tensorpool.control import Commander
from tests.support.processes import private_directory

SPARK_TIMEOUT_S = 400  # a JVM takes its time to start on a loaded machine

settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")  # an example that stands still for a moment is none that fails

LONG = ("tests/spark", "tests/fault", "tests/examples", "tests/integration", "tests/cli/test_demo.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first: a long file that begins last is waited for by everybody.

    Tests that start a Spark have more time than the others.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    for item in items:
        if "quick_jvm" in getattr(item, "fixturenames", ()) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SPARK_TIMEOUT_S))


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """Whoever names no time waits for a minute: whether something comes about is tested, not how soon."""
    with pytest.MonkeyPatch.context() as patch:
        for method in (Client.producer, Client.consumer, Client.watch, Client.discover, Commander.send):
            patch.setitem(method.__kwdefaults__, "timeout", 60.0)
        yield


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A private directory in /dev/shm."""
    with private_directory() as path:
        yield path


@pytest.fixture(scope="session")
def quick_jvm() -> Iterator[None]:
    """Every Spark that is started from now on takes half the time; see `tests.support.jvm`."""
    from tests.support.jvm import QUICK_SETTINGS, quick_options

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_SUBMIT_OPTS", f"{quick_options()} {QUICK_SETTINGS}")
        yield


@pytest.fixture(scope="session")
def shared_media_driver() -> Iterator[aeron.MediaDriver]:
    """One embedded media driver for tests that do not end it; use stream ids of your own."""
    with private_directory() as path, aeron.MediaDriver(str(path / "aeron")) as driver:
        yield driver


@pytest.fixture
def media_driver(shm_dir: Path) -> Iterator[aeron.MediaDriver]:
    """An embedded media driver that the test may end."""
    with aeron.MediaDriver(str(shm_dir / "aeron")) as driver:
        yield driver


@pytest.fixture
def connect() -> Iterator[Callable[[aeron.MediaDriver], aeron.Client]]:
    """Connects, and closes at the end of the test."""
    clients: list[aeron.Client] = []

    def connected(driver: aeron.MediaDriver) -> aeron.Client:
        clients.append(aeron.connect(driver.aeron_dir))
        return clients[-1]

    yield connected
    for client in clients:
        client.close()
