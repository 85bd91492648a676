# SPDX-License-Identifier: Apache-2.0
"""For modules with a `deployment` of their own: a client of it that starts with an empty transcript.

For those about discovery: a registry that serves one driver, unless they have a `fleet` of their own. For those about
the bridge: a host and the channels of a link.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensorpool import aeron
from tests.support.bridge_rig import Host, serving_host
from tests.support.bridge_sender import Link
from tests.support.disc_client import DiscoveryPeer
from tests.support.disc_fleet import LONG_PERIOD_MS, AnnouncedDriver, Fleet, serving
from tests.support.driver_client import DriverClient
from tests.support.driver_process import Deployment


@pytest.fixture(scope="module")
def host(shared_media_driver: aeron.MediaDriver) -> Iterator[Host]:
    with serving_host(shared_media_driver.aeron_dir) as host:
        yield host


@pytest.fixture(scope="module")
def link() -> Link:
    """The channels that the bridges of a module share."""
    return Link.unused()


@pytest.fixture
def client(deployment: Deployment) -> Iterator[DriverClient]:
    with DriverClient(deployment) as client:
        yield client.forget()


@pytest.fixture(scope="module")
def fleet(shared_media_driver: aeron.MediaDriver) -> Iterator[Fleet]:
    with serving(shared_media_driver.aeron_dir, LONG_PERIOD_MS) as fleet:
        yield fleet


@pytest.fixture
def driver(fleet: Fleet) -> AnnouncedDriver:
    return fleet.driver


@pytest.fixture
def peer(fleet: Fleet) -> DiscoveryPeer:
    return fleet.peer
