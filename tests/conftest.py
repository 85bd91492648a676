# SPDX-License-Identifier: Apache-2.0
"""Fixtures that every folder may use: a media driver of the test's own, connections to it, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tensorpool import aeron
from tests.support.processes import private_directory


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A private directory in /dev/shm."""
    with private_directory() as path:
        yield path


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
