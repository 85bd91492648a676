# SPDX-License-Identifier: Apache-2.0
"""A consumer of ours, and a producer that speaks the protocol with `struct` alone.

A module whose client has other settings has a `connected` of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Client, Consumer, Progress, StateChange
from tests.support.consuming import deliver
from tests.support.wire_producer import WireProducer


@pytest.fixture
def peer(shared_media_driver: aeron.MediaDriver, shm_dir: Path) -> Iterator[WireProducer]:
    with WireProducer(shm_dir, shared_media_driver.aeron_dir) as peer:
        yield peer


@pytest.fixture
def connected(shared_media_driver: aeron.MediaDriver, peer: WireProducer) -> Iterator[Client]:
    with tp.connect(shared_media_driver.aeron_dir, overrides=peer.settings) as client:
        yield client


@pytest.fixture
def states() -> list[StateChange]:
    """What the consumer reported about itself."""
    return []


@pytest.fixture
def reported() -> list[Progress]:
    """The progress that a consumer reported to its callback."""
    return []


@pytest.fixture
def consumer(connected: Client, peer: WireProducer, states: list[StateChange]) -> Consumer:
    """One that has received a frame."""
    consumer = connected.consumer(peer.stream_id, on_state=states.append)
    deliver(peer, consumer)
    return consumer
