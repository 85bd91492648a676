# SPDX-License-Identifier: Apache-2.0
"""The media driver is killed or stopped under its clients: they notice, say so, and can start over."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tensorpool import aeron
from tensorpool.errors import TransportError
from tests.support.processes import media_driver, wait_until

IPC = "aeron:ipc?term-length=64k"
PATIENCE = "driver_timeout_ms=3000"


def test_a_killed_media_driver_is_noticed_and_replaced(shm_dir: Path) -> None:
    """After kill -9 the client reports the loss instead of ending the process, offers fail, and a new driver serves."""
    directory = str(shm_dir / "aeron")
    with media_driver(directory, PATIENCE) as driver:
        client = aeron.connect(directory, driver_timeout_ms=3000)
        publication = client.add_publication(IPC, 1)
        subscription = client.add_subscription(IPC, 1)
        wait_until(lambda: publication.has_room, "connected")
        driver.send(signal.SIGKILL)
        driver.finish()
        wait_until(lambda: client.is_closed, "the client notices that its driver is gone")
        errors = client.take_errors()
        assert errors, "Aeron's error is reported"
        assert client.take_errors() == []
        with pytest.raises(TransportError, match="media driver is gone"):
            publication.offer(b"x")
        assert subscription.poll(lambda *_: None) == 0
        client.close()
    with media_driver(directory, PATIENCE):
        client = aeron.connect(directory, driver_timeout_ms=3000)
        assert client.add_publication(IPC, 1).max_message_length > 0
        client.close()


def test_a_paused_media_driver_stalls_no_client_for_good(shm_dir: Path) -> None:
    """SIGSTOP and SIGCONT within the timeout: the client stays open and messages flow again."""
    directory = str(shm_dir / "aeron")
    with media_driver(directory, PATIENCE) as driver:
        client = aeron.connect(directory, driver_timeout_ms=20_000)
        publication = client.add_publication(IPC, 1)
        subscription = client.add_subscription(IPC, 1)
        wait_until(lambda: publication.has_room, "connected")
        driver.send(signal.SIGSTOP)
        wait_until(lambda: not publication.offer(bytes(1000)), "the log fills: back pressure, not an error")
        driver.send(signal.SIGCONT)
        received: list[bytes] = []

        def flows() -> bool:
            subscription.poll(lambda data, _: received.append(data), 100)
            return bool(publication.offer(b"again"))

        wait_until(flows, "offers are accepted again")
        wait_until(
            lambda: subscription.poll(lambda data, _: received.append(data), 100) < 0 or received[-1] == b"again",
            "the message after the pause arrives",
        )
        assert not client.is_closed
        client.close()
