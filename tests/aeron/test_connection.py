# SPDX-License-Identifier: Apache-2.0
"""A connection that outlives its media driver: opened, lost, opened again with growing pauses, and logged once each."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path

import pytest

from tensorpool import aeron
from tensorpool.aeron.connection import CHECK_EVERY_NS, LASTING_NS, MAX_RETRY_NS, RETRY_NS, MediaDriverConnection
from tensorpool.channel import Endpoint
from tensorpool.errors import TransportError
from tensorpool.logs import get_logger
from tests.support.processes import Process

ENDPOINT = Endpoint("aeron:ipc?term-length=64k", 4711)
S = 1_000_000_000


class Desk:
    """A connection under a clock that the test moves, and what it called."""

    def __init__(self, aeron_dir: str) -> None:
        self.now_ns = 100 * S
        self.refusal: Exception | None = None
        self.opened = 0
        self.closed: list[aeron.Subscription] = []
        self.lost: list[str] = []
        self.connection = MediaDriverConnection(
            aeron_dir,
            "tensorpool-test",
            self.open_streams,
            get_logger("test"),
            close_streams=self.closed.append,
            on_lost=lambda reason, now_ns: self.lost.append(reason),
            explain=lambda reason: f"{reason}!",
        )

    def open_streams(self, client: aeron.Client, now_ns: int) -> aeron.Subscription:
        assert now_ns == self.now_ns
        self.opened += 1
        if self.refusal is not None:
            raise self.refusal
        return aeron.subscribe(client, ENDPOINT)

    def maintain_after(self, pause_ns: int) -> bool:
        self.now_ns += pause_ns
        return self.connection.maintain(self.now_ns)

    def lose(self, reason: str = "gone") -> None:
        self.connection.lose(TransportError(reason), self.now_ns)

    def next_attempt_ns(self) -> int:
        """After which pause streams are opened again; the refusal must be set."""
        before, start_ns = self.opened, self.now_ns
        while self.opened == before:
            assert not self.maintain_after(RETRY_NS // 2)
        return self.now_ns - start_ns


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The events of the log, in order."""
    caplog.set_level(logging.INFO)
    handler = caplog.handler
    seen: list[str] = []
    emit = handler.emit

    def noted(record: logging.LogRecord) -> None:
        if record.threadName == threading.current_thread().name == "MainThread":  # of this test alone
            seen.append(record.getMessage().split()[0])
        emit(record)

    handler.emit = noted  # type: ignore[method-assign]
    return seen


def test_without_a_media_driver_opening_fails_and_maintaining_waits(shm_dir: Path, events: list[str]) -> None:
    """`open` is for those who need one now; the log says once that it is missing."""
    desk = Desk(str(shm_dir / "aeron"))
    with pytest.raises(TransportError, match="no media driver is alive"):
        desk.connection.open(desk.now_ns)
    for _ in range(3):
        assert not desk.maintain_after(RETRY_NS)
    assert (desk.connection.client, desk.connection.streams, desk.opened) == (None, None, 0)
    assert events == ["media_driver_missing"]
    with aeron.MediaDriver(str(shm_dir / "aeron")):
        assert desk.maintain_after(RETRY_NS)
        assert desk.connection.streams is not None
        assert events == ["media_driver_missing", "media_driver_found"]
        desk.connection.close()


def test_it_comes_back_with_the_next_media_driver(shm_dir: Path, events: list[str]) -> None:
    """A killed one is noticed by its process, and its streams are given back before the client is closed."""
    aeron_dir = str(shm_dir / "aeron")
    desk = Desk(aeron_dir)
    with Process("-m", "tensorpool", "media-driver", "--aeron-dir", aeron_dir) as killed:
        killed.read_line()
        streams = desk.connection.open(desk.now_ns)
        assert not desk.maintain_after(LASTING_NS)
        killed.send(signal.SIGKILL)
        killed.finish()
    with pytest.raises(TransportError, match="is gone") as raised:
        desk.maintain_after(CHECK_EVERY_NS)
    desk.connection.lose(raised.value, desk.now_ns)
    assert (desk.connection.client, desk.connection.streams, desk.closed) == (None, None, [streams])
    assert desk.lost == [f"the media driver at {aeron_dir} is gone!"]
    assert not desk.maintain_after(RETRY_NS)
    with aeron.MediaDriver(aeron_dir):
        assert desk.maintain_after(RETRY_NS)
        assert not desk.maintain_after(CHECK_EVERY_NS)
        desk.connection.close()
    assert events == ["media_driver_lost", "media_driver_found"]


def test_the_pause_grows_while_streams_cannot_be_opened(
    shared_media_driver: aeron.MediaDriver, events: list[str]
) -> None:
    """Up to a bound; each new reason is logged once, and nothing stays open."""
    desk = Desk(shared_media_driver.aeron_dir)
    desk.refusal = TransportError("no room")
    pauses = [desk.next_attempt_ns() for _ in range(8)]
    assert pauses[1:] == [2 * RETRY_NS, 4 * RETRY_NS, 8 * RETRY_NS, 16 * RETRY_NS, *[MAX_RETRY_NS] * 3]
    assert (events, desk.connection.client, desk.lost) == (["connection_failed"], None, [])
    desk.refusal = TransportError("no room at all")
    desk.next_attempt_ns()
    assert events == ["connection_failed"] * 2
    desk.refusal = None
    assert desk.maintain_after(MAX_RETRY_NS)
    desk.connection.close()
    assert events == ["connection_failed", "connection_failed", "media_driver_found"]


def test_the_pause_grows_while_connections_do_not_last(shared_media_driver: aeron.MediaDriver) -> None:
    """One that lasted is opened again soon."""
    desk = Desk(shared_media_driver.aeron_dir)
    desk.connection.open(desk.now_ns)
    for pause_ns in (2 * RETRY_NS, 4 * RETRY_NS):
        desk.lose()
        assert not desk.maintain_after(pause_ns - 1)
        assert desk.maintain_after(1)
    desk.now_ns += LASTING_NS
    desk.lose()
    assert not desk.maintain_after(RETRY_NS - 1)
    assert desk.maintain_after(1)
    desk.connection.close()


def test_a_connection_is_lost_once(shared_media_driver: aeron.MediaDriver, events: list[str]) -> None:
    """However many parts of a turn fail because of it; one that was closed is not lost."""
    desk = Desk(shared_media_driver.aeron_dir)
    desk.connection.open(desk.now_ns)
    desk.lose()
    desk.lose()
    assert (events, desk.lost, len(desk.closed)) == (["media_driver_lost"], ["gone!"], 1)
    assert desk.maintain_after(2 * RETRY_NS)
    desk.connection.close()
    desk.lose()
    assert (len(desk.lost), len(desk.closed)) == (1, 2)


def test_a_failure_that_no_retry_mends_is_raised(shared_media_driver: aeron.MediaDriver) -> None:
    """Such as a wrong configuration; the client is closed."""
    desk = Desk(shared_media_driver.aeron_dir)
    desk.refusal = ValueError("wrong")
    with pytest.raises(ValueError, match="wrong"):
        desk.connection.maintain(desk.now_ns)
    assert desk.connection.client is None


def test_streams_that_fail_to_close_leave_no_client_open(shared_media_driver: aeron.MediaDriver) -> None:
    """The failure is raised."""
    desk = Desk(shared_media_driver.aeron_dir)

    def fails(_: object) -> None:
        raise ValueError("wrong")

    desk.connection._close_streams = fails
    desk.connection.open(desk.now_ns)
    client = desk.connection.client
    assert client is not None
    with pytest.raises(ValueError, match="wrong"):
        desk.connection.close()
    assert client.is_closed
