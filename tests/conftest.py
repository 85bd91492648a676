# SPDX-License-Identifier: Apache-2.0
"""Fixtures that every folder may use: a media driver of the test's own, connections to it, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from tensorpool import aeron
from tests.levels import SOAK, level_of
from tests.support.patience import PATIENT
from tests.support.processes import private_directory, remove_directories_of_the_dead

SPARK_TIMEOUT_S = 400  # a JVM takes its time to start on a loaded machine

# On a busy machine an example may take any time.
settings.register_profile(
    "patient", settings(max_examples=100 * SOAK), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

LONG = ("tests/spark", "tests/lake", "tests/fault", "tests/examples", "tests/integration", "tests/cli/test_demo.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its level, begin with the files that take longest, and give tests with Spark more time."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    for item in items:
        item.add_marker(level_of(item))
        if "quick_jvm" in getattr(item, "fixturenames", ()) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SPARK_TIMEOUT_S))


@pytest.fixture(scope="session", autouse=True)
def _tidy() -> None:
    remove_directories_of_the_dead()


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """A call that names no timeout waits for a minute: tests ask whether something happens, not how soon.

    No process measures which copies are fastest, nor keeps a file about it in the home.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORPOOL_COPY", "processor")
        for name, value in PATIENT.items():
            patch.setenv(name, value)
        yield


class OneSpark(LoadFileScheduling):  # type: ignore[misc]
    """A file's tests run in one worker, and so do all of tests/spark: they share a session, which is a JVM."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/spark" if nodeid.startswith("tests/spark/") else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneSpark:
    return OneSpark(config, log)


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
